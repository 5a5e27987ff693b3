"""A node of a Kubernetes cluster: GPUs offered to the scheduler, claims prepared for the kubelet.

What the governor knows is published as a ResourceSlice; what the scheduler decided is entered into
the governor's books and written down as CDI devices. Nothing is decided here.
"""
