"""Connects a node to Kubernetes: offers GPUs to the scheduler, and prepares claims for the kubelet.

The GPUs that the governor reports are published as a ResourceSlice. A claim that the scheduler has
allocated is announced to the governor and written as CDI devices. This package makes no decision
about allocations itself.
"""
