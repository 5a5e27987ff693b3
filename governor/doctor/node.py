"""Access to the node that is examined: its files below a root, its commands, its configuration.

If the root is not `/`, no command is run, because the files belong to another machine or to a test.
Links are resolved as for a process with that root.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from governor.config import PATH, Config, LoadedConfig, is_drop_in, load_config, merge_config
from governor.doctor.finding import UnseenError
from governor.errors import ConfigError
from vdriver.tree import Tree

CHUNK, MOST = 64 << 10, 4 << 20
"""Size of one read, and size from which a file counts as too large, in bytes. For comparison:
containerd's configuration is 10 KiB."""
TIMEOUT = 10.0  # seconds, for a command; an engine answers within a second
SEARCH = (
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
)
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
AS_ROOT = "run tidegate doctor as root"

Run = Callable[[Sequence[str]], str]


def in_pod() -> bool:
    """Return whether this process is in a container that a kubelet started."""
    return "KUBERNETES_SERVICE_HOST" in os.environ


def run_command(command: Sequence[str]) -> str:
    """Return a command's output; raise UnseenError if it fails or takes too long."""
    name = os.path.basename(command[0])  # noqa: PTH119
    try:
        done = subprocess.run(
            command,
            check=False,
            cwd="/",
            # The caller's environment is not passed: it could direct an engine's client to another
            # machine.
            env={"PATH": ":".join(SEARCH), "LC_ALL": "C", "HOME": "/nonexistent"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired as e:
        raise UnseenError(f"{name} did not answer within {TIMEOUT:g} s") from e
    except OSError as e:
        raise UnseenError(f"{name} cannot be run: {e.strerror}") from e
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())[:200]
        status = done.returncode
        how = f"exited with status {status}" if status > 0 else f"was killed by signal {-status}"
        raise UnseenError(f"{name} {how}" + (f": {said}" * bool(said)))
    return done.stdout.decode(errors="replace")


@dataclass(frozen=True)
class ExaminedNode:
    """A node; paths are as a process on it sees them.

    `config` is read from `config_files`, or is the default if these are invalid (`config_error`).
    Its directories are paths on the node, which `host` translates. Methods raise UnseenError for
    what this process cannot examine; a file that does not exist is not an error.
    """

    root: str = "/"
    config: Config = field(default_factory=Config)
    config_error: ConfigError | None = None
    runner: Run | None = None  # called instead of running a command
    config_files: tuple[str, ...] = ()
    _answers: dict[tuple[str, ...], str | UnseenError] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def alive(self) -> bool:
        """Whether this is the machine on which the command runs."""
        return self.root == "/"

    @property
    def in_pod(self) -> bool:
        """Whether the command runs in a pod's container: engines and hooks belong to its node."""
        return self.alive and in_pod()

    @property
    def has_systemd(self) -> bool:
        """Whether systemd manages the services; assumed if the node is not this machine."""
        return not self.alive or Path("/run/systemd/system").is_dir()

    @property
    def owner(self) -> int:
        """Expected owner of system files: root, or the user that unpacked the tree."""
        return 0 if self.alive else os.stat(self.root).st_uid  # noqa: PTH116

    def host(self, path: str) -> str | None:
        """Return this process's path for a path on the node, or None if it does not resolve."""
        if self.alive:
            return path
        tree = Tree(self.root)
        real = tree.resolve(path)
        return None if real is None else tree.host(real)

    def stat(self, path: str) -> os.stat_result | None:
        """Return a file's status, or None if there is no file."""
        host = self.host(path)
        try:
            return None if host is None else os.stat(host)  # noqa: PTH116
        except OSError as e:
            if e.errno in GONE:
                return None
            raise UnseenError(f"{path}: {e.strerror}", remedy=AS_ROOT) from e

    def names(self, directory: str) -> tuple[str, ...]:
        """Return the sorted names in a directory; no names if it does not exist."""
        host = self.host(directory)
        try:
            return () if host is None else tuple(sorted(os.listdir(host)))  # noqa: PTH208
        except OSError as e:
            if e.errno in GONE:
                return ()
            raise UnseenError(f"{directory}: {e.strerror}", remedy=AS_ROOT) from e

    def read(self, path: str) -> str | None:
        """Return a regular file's text, or None if there is no file."""
        host = self.host(path)
        if host is None:
            return None
        try:
            # O_NONBLOCK: if the name is that of a FIFO, do not wait for a writer.
            fd = os.open(host, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise UnseenError(f"{path} is not a regular file")
                # The file is read in small pieces: a sysctl fails with ENOMEM if megabytes are
                # read at once, and most files in /proc return at most a page.
                data = bytearray()
                while len(data) < MOST and (piece := os.read(fd, CHUNK)):
                    data += piece
            finally:
                os.close(fd)
        except OSError as e:
            if e.errno in GONE:
                return None
            raise UnseenError(f"{path}: {e.strerror}", remedy=AS_ROOT) from e
        if len(data) >= MOST:
            raise UnseenError(f"{path} is larger than {MOST >> 20} MiB")
        return data.decode(errors="replace")

    def find(self, program: str) -> str | None:
        """Return the path of a program in the system's directories, or None if there is none."""
        for directory in SEARCH:
            path = f"{directory}/{program}"
            try:
                status = self.stat(path)
            except UnseenError:
                continue
            if status is not None and stat.S_ISREG(status.st_mode) and status.st_mode & 0o111:
                return path
        return None

    def run(self, *command: str) -> str:
        """Return a command's output, or raise UnseenError with the reason; results are cached."""
        if command not in self._answers:
            try:
                self._answers[command] = self._run(command)
            except UnseenError as e:
                self._answers[command] = e
        answer = self._answers[command]
        if isinstance(answer, UnseenError):
            raise answer
        return answer

    def _run(self, command: Sequence[str]) -> str:
        if self.runner is not None:
            return self.runner(command)
        if not self.alive:
            raise UnseenError(f"no command is run for a node below {self.root}")
        return run_command(command)


class BrokenError(Exception):
    """A file is not in the format that its reader expects; the message names the file."""


def read_json(node: ExaminedNode, path: str) -> dict[str, Any] | None:
    """Return a JSON object, or None if there is no file; raise BrokenError for anything else."""
    text = node.read(path)
    if text is None:
        return None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise BrokenError(f"{path} is not JSON: {e}") from e
    if not isinstance(document, dict):
        raise BrokenError(f"{path} is not a JSON object")
    return document


def read_toml(node: ExaminedNode, path: str) -> dict[str, Any] | None:
    """Return a TOML document, or None if there is no file; raise BrokenError for anything else."""
    text = node.read(path)
    try:
        return None if text is None else parse_toml(text)
    except ValueError as e:
        raise BrokenError(f"{path} is not TOML: {e}") from e


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; raise ValueError if it is not TOML, however deeply it is nested."""
    try:
        return tomllib.loads(text)
    except RecursionError as e:
        raise ValueError("nested too deeply") from e


def table(document: object, *path: str) -> dict[str, Any]:
    """Return an inner object, empty if there is none: foreign files may have any structure."""
    for name in path:
        document = document.get(name) if isinstance(document, dict) else None
    return document if isinstance(document, dict) else {}


def strings(value: object) -> tuple[str, ...]:
    """Return the strings in a list; none if the value is not a list."""
    return tuple(v for v in value if isinstance(v, str)) if isinstance(value, list) else ()


def objects(document: object, name: str) -> list[dict[str, Any]]:
    """Return the objects in a list in an object; none if there is no such list."""
    entries = document.get(name) if isinstance(document, dict) else None
    return [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []


def open_node(
    root: str = "/",
    config_file: str | None = None,
    runtime_dir: str | None = None,
    driver_dir: str | None = None,
) -> ExaminedNode:
    """Return the node below `root`; an error in the configuration becomes `config_error`."""
    # The root is made absolute, because printed paths must not depend on the working directory.
    root = os.path.abspath(root)  # noqa: PTH100
    node = ExaminedNode(root)
    loaded, error = LoadedConfig(Config()), None
    try:
        loaded = load_config(config_file) if node.alive else _load_below(node, config_file)
    except ConfigError as e:
        error = e
    config = loaded.config
    if runtime_dir:
        config = replace(config, runtime_dir=runtime_dir)
    if driver_dir:
        config = replace(config, driver_dir=driver_dir)
    return ExaminedNode(root, config, error, config_files=loaded.files)


def _load_below(node: ExaminedNode, config_file: str | None) -> LoadedConfig:
    """Read the configuration of a node below a root, with links resolved below that root."""
    main = config_file or str(PATH)
    directory = str(Path(main).with_suffix(".d"))
    try:
        paths = [f"{directory}/{name}" for name in node.names(directory) if is_drop_in(name)]
        if config_file or node.stat(main) is not None:
            paths.insert(0, main)
        texts = [(path, node.read(path)) for path in paths]
    except UnseenError as e:
        raise ConfigError(e.message, hint=e.remedy or "name a readable file") from e
    missing = [path for path, text in texts if text is None]
    if missing:
        raise ConfigError(f"{missing[0]}: No such file", hint="name a readable file")
    return merge_config([(path, text or "") for path, text in texts])
