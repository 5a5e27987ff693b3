"""Makes a container engine use Tidegate, and takes it out again, by editing the engine's own files.

`plan` modules, one an engine, read what is there and say what each file shall be (docker, podman,
containerd, crio); `apply` writes it, keeps a journal of the bytes before, and undoes it. `jsontext`
and `tomltext` edit text in place, so that what others wrote keeps its form and its comments.
"""
