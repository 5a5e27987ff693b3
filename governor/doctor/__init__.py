"""Checks of `tidegate doctor`: a module for each area of a node; `checks` lists them all.

A check is a function that takes a `node.ExaminedNode` and yields `finding.Finding`s. It reads files
and runs programs but never writes, and reports what it cannot examine (`finding.UnseenError`).
"""
