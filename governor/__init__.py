"""The node's daemon: admission, the books, the arbiter on a thread of its own, and the command."""

VERSION = "0.1.0"
"""Tidegate's version. pyproject.toml, meson.build and the packages read it here."""
