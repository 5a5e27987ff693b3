"""The OCI hook: prepares a container to use its share of a GPU.

It uses the standard library only. It learns about the driver from a manifest, and talks to the
governor through a socket.
"""
