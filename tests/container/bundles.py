"""Containers for tests: bundles, root file systems with this host's glibc, driver mirrors, and runtimes.

Everything here is real: the libraries are ELF files with the right sonames, the mirror's manifest follows
vdriver/manifest.schema.json, the runtimes are runc and crun.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vdriver.manifest import validate

ROOT = Path(__file__).resolve().parents[2]
HOOK = ROOT / "oci_hook" / "tidegate-hook"
LIBDIR = "usr/lib/x86_64-linux-gnu"
TARGET = f"{LIBDIR}/glibc-hwcaps/x86-64-v2"
VERSION = "580.159.04"
GPU = "GPU-6d0b7ab0-2f4f-4d5e-9b3a-0c2d9d2a7f10"

PROBE_C = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
/* Print for each library named: where the loader found it, and the name that it reports. */
int main(int argc, char **argv) {
        for (int i = 1; i < argc; i++) {
                void *library = dlopen(argv[i], RTLD_NOW);
                const char *(*who)(void) = library ? (const char *(*)(void))dlsym(library, "tidegate_test_who") : NULL;
                Dl_info info;
                if (!library)
                        printf("%s: %s\n", argv[i], dlerror());
                else if (!who || !dladdr((void *)who, &info))
                        printf("%s: found, a stranger\n", argv[i]);
                else
                        printf("%s: %s %s\n", argv[i], info.dli_fname, who());
        }
        return 0;
}
"""


def compile_c(source: str, output: Path, *flags: str) -> Path:
    """Compile C from a string."""
    output.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["gcc", "-O1", "-o", str(output), "-x", "c", "-", *flags], input=source.encode(), check=True
    )
    return output


@functools.cache
def _tools(cache: Path) -> Path:
    compile_c(PROBE_C, cache / "probe", "-ldl")
    return cache


def make_library(path: Path, soname: str, name: str, *flags: str) -> Path:
    """Build a small library with a function that returns the library's name."""
    source = f'const char *tidegate_test_who(void) {{ return "{name}"; }}'
    return compile_c(source, path, "-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{soname}", *flags)


PLACES = (
    ("vulkan-icd", ["/etc/vulkan/icd.d", "/usr/share/vulkan/icd.d"], "all", "nvidia_icd.json"),
    (
        "egl-vendor",
        ["/usr/share/glvnd/egl_vendor.d", "/etc/glvnd/egl_vendor.d"],
        "all",
        "10_nvidia.json",
    ),
    ("gbm", ["{libdir}/gbm"], "one", "nvidia-drm_gbm.so"),
    ("profiles", ["/usr/share/nvidia", "/etc/nvidia"], "one", "nvidia-application-profiles-rc"),
)


class _Mirror:
    """A generation that is being made."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.files: list[dict[str, Any]] = []

    def add(self, path: Path, role: str, **fields: str) -> None:
        data = path.read_bytes()
        digest = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        where = str(path.relative_to(self.work))
        self.files.append({"path": where, "role": role, **fields, **digest})

    def link(self, path: str, target: str) -> None:
        (self.work / path).symlink_to(target)
        self.files.append({"path": path, "role": "link", "target": target})

    def library(self, directory: str, stem: str, soname: str, capability: str) -> None:
        name = f"{stem}.so.{VERSION}"
        bits = "-m32" if directory == "lib32" else "-m64"
        path = make_library(self.work / directory / name, soname, f"tidegate's {stem}", bits)
        self.add(path, "library", soname=soname, capability=capability)
        self.link(f"{directory}/{soname}", name)
        self.link(f"{directory}/{stem}.so", name)

    def restrict(self, directory: str, into: str, without: set[str]) -> list[str]:
        """Make a set's directory with the entries of `directory`, except those of `without`."""
        (self.work / into).mkdir(parents=True)
        for entry in (self.work / directory).iterdir():
            copy = self.work / into / entry.name
            if entry.is_dir():
                shutil.copytree(entry, copy, copy_function=os.link)
            elif entry.name.partition(".so")[0] not in without:
                os.link(entry, copy, follow_symlinks=False)
        return self.names(into)

    def names(self, directory: str) -> list[str]:
        return sorted(p.name for p in (self.work / directory).iterdir() if p.name != "origin")


def make_mirror(driver_dir: Path) -> Path:
    """Build a generation with a manifest, and the driver's files that the manifest watches; return the generation.

    The mirror has a set for compute and utility, and another set that adds graphics. The latter
    comes with places and with a directory of this host, `host-sockets`, next to the driver's
    directory.
    """
    host = driver_dir.parent / "host-driver"
    sockets = driver_dir.parent / "host-sockets"
    sockets.mkdir()
    (sockets / "socket").touch()
    work = driver_dir / "making"
    mirror = _Mirror(work)
    lib64 = work / "lib64"
    watch = []

    def watched(path: Path, role: str) -> None:
        stat = path.stat()
        watch.append(
            {"path": str(path), "role": role, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        )

    for stem, capability in (("libcuda", "compute"), ("libnvidia-ml", "utility")):
        soname = f"{stem}.so.1"
        path = make_library(lib64 / soname, soname, f"tidegate's {stem}")
        mirror.add(path, "control", soname=soname, capability=capability)
        mirror.link(f"lib64/{stem}.so", soname)
        mirror.link(f"lib64/{stem}.so.{VERSION}", soname)
        origin = make_library(
            lib64 / "origin" / f"{stem}-origin.so.1", f"{stem}-origin.so.1", f"origin {stem}"
        )
        source = make_library(host / f"{stem}.so.{VERSION}", soname, f"driver's {stem}")
        mirror.add(origin, "origin", source=str(source), capability=capability)
        watched(source, "driver")
        control = host / "control" / soname
        control.parent.mkdir(exist_ok=True)
        shutil.copy(path, control)
        watched(control, "control")
    mirror.library("lib64", "libnvidia-ptxjitcompiler", "libnvidia-ptxjitcompiler.so.1", "compute")
    mirror.library("lib64", "libnvidia-nvvm", "libnvidia-nvvm.so.1", "compute")
    mirror.library("lib64", "libGLX_nvidia", "libGLX_nvidia.so.0", "graphics")
    mirror.library("lib32", "libnvidia-ptxjitcompiler", "libnvidia-ptxjitcompiler.so.1", "compute")
    mirror.library("lib32", "libGLX_nvidia", "libGLX_nvidia.so.0", "graphics")
    smi = work / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho tidegate test smi\n")
    smi.chmod(0o755)
    mirror.add(smi, "program", capability="utility")
    places = []
    for name, targets, looks, file in PLACES:
        path = work / "data" / name / file
        if name == "gbm":
            make_library(path, file, "tidegate's gbm")
        else:
            path.parent.mkdir(parents=True)
            path.write_text(f"the driver's {file}\n")
        mirror.add(path, "data", capability="graphics")
        places.append(
            {
                "name": name,
                "source": f"data/{name}",
                "capability": "graphics",
                "targets": targets,
                "looks": looks,
                "files": [file],
            }
        )
    small = "sets/compute,utility"
    name = f"{VERSION}-0123456789ab"
    manifest = {
        "schema": 2,
        "generation": name,
        "driver": {"version": VERSION, "kind": "nvidia"},
        "machine": "x86_64",
        "sets": [
            {
                "capabilities": ["compute", "graphics", "utility"],
                "lib64": "lib64",
                "names64": mirror.names("lib64"),
                "lib32": "lib32",
                "names32": mirror.names("lib32"),
            },
            {
                "capabilities": ["compute", "utility"],
                "lib64": f"{small}/lib64",
                "names64": mirror.restrict("lib64", f"{small}/lib64", {"libGLX_nvidia"}),
                "lib32": f"{small}/lib32",
                "names32": mirror.restrict("lib32", f"{small}/lib32", {"libGLX_nvidia"}),
            },
        ],
        "programs": [{"path": "bin/nvidia-smi", "capability": "utility"}],
        "places": places,
        "binds": [
            {"path": str(sockets), "capability": "graphics"},
            {"path": str(sockets.with_name("host-lacks-it")), "capability": "graphics"},
        ],
        "files": mirror.files,
        "source": {"root": "/", "watch": watch},
    }
    validate(manifest)
    (work / "manifest.json").write_text(json.dumps(manifest))
    generation = driver_dir / name
    work.rename(generation)
    (driver_dir / "current").symlink_to(name)
    return generation


def make_rootfs(path: Path, tools: Path, *, cache: bool = True) -> Path:
    """Build a root file system in Debian's layout from this host's shell, loader and C library."""
    for directory in (
        "usr/bin",
        "usr/sbin",
        LIBDIR,
        "usr/lib64",
        "etc",
        "proc",
        "dev",
        "sys",
        "run",
        "tmp",
        "var",
    ):
        (path / directory).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (path / name).symlink_to(f"usr/{name}")
    programs = [Path("/usr/bin") / name for name in ("sh", "cat", "ls", "stat", "touch", "sleep")]
    needed = set()
    for program in [*programs, _tools(tools) / "probe"]:
        shutil.copy(program, path / "usr/bin" / program.name)
        listing = subprocess.run(
            ["ldd", str(program)], capture_output=True, text=True, check=True
        ).stdout
        needed |= {word for word in listing.split() if word.startswith("/lib")}
    for library in needed:
        name = Path(library).name
        directory = "usr/lib64" if name.startswith("ld-linux") else LIBDIR
        shutil.copy(Path(library).resolve(), path / directory / name)
    # Ubuntu's ldconfig is a script around the program.
    real = Path("/sbin/ldconfig.real")
    shutil.copy(real if real.exists() else "/sbin/ldconfig", path / "usr/sbin/ldconfig")
    if cache:
        subprocess.run(["ldconfig", "-r", str(path), "-X"], check=True)
    return path


@dataclass
class DiskBundle:
    """A bundle on disk; edit `config` before the container is run."""

    path: Path
    rootfs: Path
    config: dict[str, Any] = field(default_factory=dict)

    def write(self) -> None:
        """Write config.json."""
        (self.path / "config.json").write_text(json.dumps(self.config))


def base_config(command: str, *, annotations: dict[str, str] | None = None) -> dict[str, Any]:
    """Return a small config.json that runs a shell command as root."""
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": ["/bin/sh", "-c", command],
            "env": ["PATH=/usr/bin:/usr/sbin"],
            "cwd": "/",
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": False},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {
                "destination": "/dev",
                "type": "tmpfs",
                "source": "tmpfs",
                "options": ["nosuid", "mode=755"],
            },
        ],
        "annotations": dict(annotations or {}),
        "linux": {
            "namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "uts"}]
        },
    }


def add_hook(
    config: dict[str, Any], argv: Iterable[str], *, stage: str, poststop: bool = True
) -> None:
    """Register the hook as our packages do: with an absolute path, a non-empty `env`, and a timeout."""
    arguments = list(argv)
    hooks = config.setdefault("hooks", {})
    entry = {"path": arguments[0], "env": ["LC_ALL=C"], "timeout": 30}
    hooks[stage] = [{**entry, "args": [*arguments, stage]}]
    if poststop:
        hooks["poststop"] = [{**entry, "args": [*arguments, "poststop"]}]


def add_user_namespace(bundle: DiskBundle, first: int = 100000) -> None:
    """Map the container's root user to an ordinary user, and give that user the root file system."""
    bundle.config["linux"]["namespaces"].append({"type": "user"})
    mapping = [{"containerID": 0, "hostID": first, "size": 65536}]
    bundle.config["linux"] |= {"uidMappings": mapping, "gidMappings": mapping}
    for directory, names, files in os.walk(bundle.rootfs):
        for name in [".", *names, *files]:
            os.lchown(Path(directory) / name, first, first)


@dataclass
class ContainerResult:
    """The result of a container."""

    status: int
    stdout: str
    stderr: str


class Runtime:
    """runc or crun, with a state directory of its own."""

    def __init__(self, name: str, state: Path) -> None:
        self.name = name
        self.state = state
        self.count = 0

    def command(self, *arguments: str) -> list[str]:
        """Return the command line for a command of the runtime."""
        command = [self.name, "--root", str(self.state), *arguments]
        if self.name == "crun" and Path("/sys/fs/cgroup/unified").exists():
            # crun 1.8 refuses a hybrid hierarchy. Without its unified part, it is an ordinary
            # version 1 hierarchy.
            script = 'umount /sys/fs/cgroup/unified; exec "$@"'
            command = [
                "unshare",
                "-m",
                "--propagation",
                "private",
                "sh",
                "-c",
                script,
                "sh",
                *command,
            ]
        return command

    def run(
        self, bundle: DiskBundle, *, timeout: float = 30, env: dict[str, str] | None = None
    ) -> ContainerResult:
        """Run a container to its end."""
        self.count += 1
        bundle.write()
        name = f"tidegate-test-{os.getpid()}-{self.count}"
        done = subprocess.run(
            self.command("run", "--bundle", str(bundle.path), name),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **(env or {})},
        )
        return ContainerResult(done.returncode, done.stdout, done.stderr)
