"""The control library, interposed in front of libcuda: API table, generator and shared pages."""
