"""The governor, the daemon of a node that shares its GPUs by quota, and the `tidegate` command."""

VERSION = "0.1.0"
"""Tidegate's version. pyproject.toml, meson.build and the packages read it from here."""
