"""Connects a node to Kubernetes: offers GPUs to the scheduler, prepares claims for the kubelet.

What the governor knows is published as a ResourceSlice. What the scheduler has decided is
allocated in the governor and written as CDI devices. This package decides nothing itself.
"""
