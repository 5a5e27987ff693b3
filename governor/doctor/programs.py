"""Check Tidegate's own programs and files: whether they run, and that only root can change them."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from governor import install_paths
from governor.config import PATH
from governor.doctor.finding import Finding, UnseenError, ok, warning, wrong
from governor.doctor.mirror import kind_of_mirror
from governor.doctor.node import AS_ROOT, BrokenError, ExaminedNode
from oci_hook.runtime import CONFIG, HOOK, RUNTIMES, NodeSettings, SettingsError, parse_node
from vdriver.tree import MAX_LINKS

RUNTIME = "/usr/bin/tidegate-runtime"
CHECKOUT = Path(__file__).parents[2]
PACKAGE = "install the package tidegate"
OLDEST = (3, 11)

IMPORTS = """
import sys
sys.path.insert(0, sys.argv[1])
import oci_hook.main, oci_hook.apply, oci_hook.client, oci_hook.image, oci_hook.manifest
import oci_hook.plan, oci_hook.request
print(*sys.version_info[:3], sep=".")
"""


def _resolution(node: ExaminedNode, path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield each component in the resolution of `path`, including those of links."""
    below = "" if node.alive else node.root
    yield "/", os.lstat(below or "/")
    todo, done, links = path.split("/")[::-1], list[str](), 0
    while todo:
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            done = done[:-1]
            continue
        done.append(part)
        name = "/" + "/".join(done)
        status = os.lstat(below + name)
        yield name, status
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            target = os.readlink(below + name)  # noqa: PTH115
            done = [] if target.startswith("/") else done[:-1]
            todo += target.split("/")[::-1]


def not_trusted(node: ExaminedNode, path: str) -> str | None:
    """Return how a user other than root could change the file at `path`, or None if none could.

    The file and all of its parent directories are examined, and so are those of each link's target.
    """
    try:
        for name, status in _resolution(node, path):
            reason = _writable(node, status)
            if reason and not (status.st_uid == node.owner and _is_read_only(node, name)):
                return f"{name} {reason}"
    except OSError as e:
        raise UnseenError(f"{path}: {e.strerror}", remedy=AS_ROOT) from e
    return None


def _is_read_only(node: ExaminedNode, name: str) -> bool:
    """Return whether the mount is read-only, like a pod's ConfigMap, which has mode 0777.

    The file may be writable through another mount, but not through this path.
    """
    host = name if node.alive else node.root + name
    return bool(os.statvfs(host).f_flag & os.ST_RDONLY)


def _writable(node: ExaminedNode, status: os.stat_result) -> str | None:
    if status.st_uid != node.owner:
        return f"belongs to user {status.st_uid}"
    mode = status.st_mode
    # A link's mode has no meaning. In a sticky directory, files of other users cannot be replaced.
    if stat.S_ISLNK(mode) or (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        return None
    if mode & 0o002:
        return f"has mode {stat.S_IMODE(mode):04o}: all users may write to it"
    if mode & 0o020 and status.st_gid != 0 and node.alive:
        return f"has mode {stat.S_IMODE(mode):04o}: group {status.st_gid} may write to it"
    return None


def examine_program(node: ExaminedNode, path: str, what: str, install: str = PACKAGE) -> Finding:
    """Check that root can run the program at `path`, and that no other user can change it.

    `install` is the remedy if the program is missing.
    """
    status = node.stat(path)
    if status is None:
        return wrong(f"{what} {path} is missing", install)
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o111 != 0o111:
        return wrong(
            f"{what} {path} has mode {stat.S_IMODE(status.st_mode):04o}: it cannot be run",
            f"chmod 0755 {path}",
        )
    if reason := not_trusted(node, path):
        return wrong(
            f"{what} {path} runs as root, but {reason}",
            "run chown root: and chmod go-w on that path",
        )
    return ok(f"{what} {path}")


def _installed(node: ExaminedNode, path: str) -> str | None:
    """Return the path of one of Tidegate's programs: installed, or in this checkout."""
    if node.stat(path) is not None:
        return path
    own = CHECKOUT / "oci_hook" / os.path.basename(path)  # noqa: PTH119
    return str(own) if node.alive and own.exists() else None


def programs(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether the hook and the wrapper runtime exist, and that only root can change them."""
    for path, what in ((HOOK, "the hook"), (RUNTIME, "the wrapper runtime")):
        found = _installed(node, path)
        if found is None:
            yield wrong(f"{what} {path} is missing", PACKAGE)
        elif found == path:
            yield examine_program(node, path, what)
        else:
            yield warning(
                f"{what} is not installed; this checkout has {found}",
                f"tidegate setup ENGINE --bin-dir {CHECKOUT / 'oci_hook'} sets up that one",
            )


def _script(node: ExaminedNode, hook: str) -> str:
    """Return the hook's Python script: the hook itself, or what its C front end executes."""
    if not (node.read(hook) or "").startswith("\x7fELF"):
        return hook
    program = Path(os.path.realpath(node.host(hook) or hook))
    script = program.parents[1] / program.name
    return str(script) if node.alive else "/" + os.path.relpath(script, os.path.realpath(node.root))


def python(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether the interpreter in the hook's first line can run the hook."""
    hook = _installed(node, HOOK)
    installed = hook == HOOK
    hook = _script(node, hook) if hook else None
    text = node.read(hook) if hook else None
    if hook is None or text is None:
        raise UnseenError(f"{HOOK} is missing, so the python3 that would run it is unknown")
    line = re.match(r"#! *(/\S+)", text)
    if line is None:
        yield wrong(f"{hook} does not begin with #!: the kernel does not run it", PACKAGE)
        return
    interpreter = line[1]
    if node.stat(interpreter) is None:
        yield wrong(f"{interpreter}, which runs {hook}, is missing", "install python3")
        return
    # A program that other users could have changed must not be run.
    if reason := not_trusted(node, interpreter):
        yield wrong(f"{interpreter} runs as root, but {reason}", "reinstall python3")
        return
    if installed and (reason := not_trusted(node, hook)):
        raise UnseenError(f"{hook} is not run: {reason}")
    directory = os.path.dirname(os.path.dirname(os.path.realpath(node.host(hook) or hook)))  # noqa: PTH120
    try:
        answer = node.run(interpreter, "-ISEB", "-c", IMPORTS, directory).strip()
    except UnseenError as e:
        if not node.alive and node.runner is None:
            raise
        yield wrong(
            f"{interpreter} cannot run the hook: {e.message}",
            "install python3's whole standard library (python3, not python3-minimal)",
        )
        return
    number = tuple(int(part) for part in re.findall(r"[0-9]+", answer)[:2])
    if number < OLDEST:
        yield wrong(
            f"{interpreter} is Python {answer}, but the hook needs {OLDEST[0]}.{OLDEST[1]}",
            "install a newer python3",
        )
    else:
        yield ok(f"{interpreter} is Python {answer}, and has the modules that the hook needs")


def wrapper_settings(node: ExaminedNode) -> NodeSettings:
    """Return the wrapper's settings; raise BrokenError if the wrapper would not accept its file."""
    try:
        return parse_node(node.read(CONFIG) or "", CONFIG)
    except SettingsError as e:
        raise BrokenError(str(e)) from e


def low_level(node: ExaminedNode) -> Iterator[Finding]:
    """Check the runtime that the wrapper executes, and the hook that it adds."""
    settings = wrapper_settings(node)
    if settings.hook != HOOK:
        install = f"install it, or correct `hook` in {CONFIG}"
        yield examine_program(node, settings.hook, f"the hook in {CONFIG},", install)
    for directory, program in settings.runtime_for.items():
        install = f"install it, or correct `runtime-for {directory}` in {CONFIG}"
        yield examine_program(node, program, f"the runtime in {CONFIG} for {directory},", install)
    if settings.runtime:
        install = f"install it, or correct `runtime` in {CONFIG}"
        yield examine_program(node, settings.runtime, f"the runtime in {CONFIG},", install)
        return
    for path in RUNTIMES:
        if node.stat(path) is not None:
            yield examine_program(node, path, "the wrapper's runtime")
            return
    if settings.runtime_for:
        return
    yield warning(
        f"none of {', '.join(RUNTIMES)} is installed: the wrapper has no runtime",
        f"install runc, or write `runtime /path/to/runtime` to {CONFIG}",
    )


def owners(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether users other than root could change Tidegate's configuration and state."""
    bad = False
    drop_ins = str(PATH.with_suffix(".d"))
    for path in (
        *(str(PATH), drop_ins, *(f"{drop_ins}/{name}" for name in node.names(drop_ins))),
        *(CONFIG, node.config.state_dir, node.config.driver_dir),
    ):
        if node.stat(path) is not None and (reason := not_trusted(node, path)):
            bad = True
            yield wrong(
                f"root relies on {path}, but {reason}",
                "run chown root: and chmod go-w on that path",
            )
    if not bad:
        yield ok("only root can change configuration and state")


def control(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether a refresh would find the control libraries."""
    directory = (
        install_paths.control_dir()
        if node.alive
        else install_paths.PRIVATE / install_paths.triplet()
    )
    lacking = [
        name
        for name in ("libcuda.so.1", "libnvidia-ml.so.1")
        if node.stat(f"{directory}/{name}") is None
    ]
    if lacking:
        # A mirror in force has its own copies.
        yield (warning if kind_of_mirror(node) else wrong)(
            f"{directory} has no {' and no '.join(lacking)}: tidegate refresh cannot make a mirror",
            "install the package tidegate, or run make build in a checkout",
        )
    else:
        yield ok(f"the control libraries are in {directory}")
