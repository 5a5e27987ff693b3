"""Connects a node to Kubernetes: offers GPUs to the scheduler, prepares claims for the kubelet.

What the governor knows is published as a ResourceSlice. What the scheduler has decided is entered
into the governor's books and written as CDI devices. This package decides nothing itself.
"""
