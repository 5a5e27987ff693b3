"""The OCI hook: prepares a container to use its share of a GPU.

It uses the standard library only. It knows the driver through a manifest and the governor through a
socket.
"""
