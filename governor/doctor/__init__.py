"""What `tidegate doctor` looks at: a module for each area of a node; `checks` lists them all.

A check is a function that takes a `node.Node` and yields `finding.Finding`s. It reads, asks and
never writes, and what it cannot see it says (`finding.UnseenError`).
"""
