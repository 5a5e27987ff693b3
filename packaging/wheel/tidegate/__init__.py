"""Tidegate as pip installs it: its packages are below `python`, out of the way of other software.

Names such as `governor` and `kube` may be taken in an environment, or be wanted by another package.
So only this package is where Python looks for modules, and its commands put `python` first on the
path of their own process.
"""
