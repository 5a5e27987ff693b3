"""From an OCI state on stdin to a container that is ready to use its share of a GPU.

Standard library only.  What the hook knows of the driver is a manifest, what it knows of the
governor is a socket.
"""
