"""Finds the host's driver, reads its files with pyelftools and keeps a mirror of it."""
