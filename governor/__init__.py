"""The node's daemon: admission, allocations, the arbiter on its own thread, and the command."""

VERSION = "0.1.0"
"""Tidegate's version. pyproject.toml, meson.build and the packages read it here."""
