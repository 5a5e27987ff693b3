"""Tidegate as pip installs it: its packages are below `python`, out of the way of other software.

In an environment, other packages may have modules with names such as `governor` or `kube`. So only
this package is in a directory that Python searches, and its commands add `python` at the beginning
of the search path of their own process.
"""
