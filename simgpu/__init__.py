"""A simulated GPU: libcuda and libnvidia-ml that model memory, queues and time slicing."""
