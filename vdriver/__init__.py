"""The driver mirror: finds the host's NVIDIA driver and keeps a copy for containers to mount."""
