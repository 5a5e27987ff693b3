"""Add Tidegate to a container engine, and remove it again, by editing the engine's own files.

One module per engine (docker, podman, containerd, crio) reads the current files and plans the new
content of each. `apply` writes the files, keeps a journal of the previous content, and undoes the
changes. `jsontext` and `tomltext` edit text in place, so that other text keeps its formatting and
comments.
"""
