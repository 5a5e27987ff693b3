"""Add Tidegate to a container engine, and remove it again, by editing the engine's own files.

The `plan` modules, one per engine, read the present files and define what each is to become
(docker, podman, containerd, crio). `apply` writes the files, keeps a journal of the bytes before,
and undoes the changes. `jsontext` and `tomltext` edit text in place, so that the text of others
keeps its form and its comments.
"""
