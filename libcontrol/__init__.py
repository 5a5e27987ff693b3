"""The control library that takes libcuda's place: its API table, generator and shared pages."""
