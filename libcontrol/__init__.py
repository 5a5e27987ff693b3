"""The control library in libcuda's place: its API table, generator and pages."""
