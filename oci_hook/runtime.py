"""The wrapper runtime: engines run it in place of runc or crun, and it edits config.json for them.

Engines execute the C program (front/runtime.c). For most commands it executes the real runtime
at once. The others are handled by the fork server or, more slowly, by this script in a new
interpreter.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing takes 3 ms
if TYPE_CHECKING:
    from oci_hook.log import RunEvent
    from oci_hook.reserve import Settings

CONFIG = "/etc/tidegate/runtime"
RUNTIMES = (
    *("/usr/bin/runc", "/usr/sbin/runc", "/usr/local/sbin/runc", "/usr/bin/crun"),
    # The paths in CRI-O's own packages, in which crun is the default.
    *("/usr/libexec/crio/crun", "/usr/libexec/crio/runc"),
)
HOOK = "/usr/bin/tidegate-hook"
NAME = "tidegate-runtime"
LATE = "--tidegate-late"  # set by the C program, after a forked child has missed its deadline
END_DEADLINE = 6.0  # seconds; the engine holds a lock during this time
COMMANDS = frozenset(
    (
        *("checkpoint", "create", "delete", "events", "exec", "features", "help", "init", "kill"),
        *("list", "mounts", "pause", "ps", "restore", "resume", "run", "spec", "start", "state"),
        *("update", "version"),
    )
)
CREATING = ("create", "run", "restore")
# Options that take a value, and options that take none: those before the command, those of
# `delete`, and those of the commands in CREATING.
GLOBAL_OPTIONS = (
    frozenset(
        ("cgroup-manager", "criu", "log", "log-format", "log-level", "root", "rootless"),
    ),
    frozenset(("debug", "help", "systemd-cgroup", "usage", "version")),
)
OF_DELETE = (frozenset[str](), frozenset(("force", "help", "regex", "usage")))
OF_COMMAND = (
    frozenset(
        (
            *("bundle", "config", "console-socket", "empty-ns", "image-path", "lsm-mount-context"),
            *("lsm-profile", "manage-cgroups-mode", "pid-file", "pidfd-socket", "preserve-fds"),
            "work-path",
        )
    ),
    frozenset(
        (
            *("auto-dedup", "detach", "ext-unix-sk", "file-locks", "help", "keep", "lazy-pages"),
            *("network-lock", "no-new-keyring", "no-pivot", "no-subreaper", "shell-job"),
            *("tcp-close", "tcp-established", "usage"),
        )
    ),
)
SHORT = {"b": "bundle", "f": "config"}
GETOPT = ("crun", "krun", "youki")  # runtimes that parse options like getopt, by file name


class EngineCall:
    """The parts of the engine's command line that the wrapper uses."""

    __slots__ = ("bundle", "command", "config", "ident", "log", "log_format")

    def __init__(self) -> None:
        self.command = self.bundle = self.config = self.ident = self.log = self.log_format = ""


def parse_call(arguments: list[str], *, like_crun: bool = False) -> EngineCall:
    """Parse a command line in the same way as the runtime itself.

    runc uses Go's flags: one dash means the same as two, and names cannot be abbreviated. crun uses
    getopt: names may be abbreviated, and short options may be combined with their values. An option
    that neither of them has is taken to have no value; before the command, a word that is not a
    command is taken as the value of such an option.
    """
    call = EngineCall()
    words = iter(arguments)
    ended = False  # whether a `--` ended the options
    for argument in words:
        if argument == "--" and not ended:
            ended = call.command != ""
        elif ended or not argument.startswith("-") or argument == "-":
            if not call.command and argument in COMMANDS:
                call.command = argument
            elif call.command:
                call.ident = argument
        else:
            own = GLOBAL_OPTIONS
            if call.command:
                own = OF_DELETE if call.command == "delete" else OF_COMMAND
            read = _read_getopt if like_crun else _read_go
            name, value = read(argument, own)
            if name in own[0]:
                if value is None:
                    value = next(words, "")
                _take(call, name, value)
    return call


def _take(call: EngineCall, name: str, value: str) -> None:
    if name == "log":
        call.log = value.removeprefix("file:")  # crun accepts file:PATH and journald:NAME
    elif name in ("log-format", "bundle", "config"):
        setattr(call, name.replace("-", "_"), value)


def _read_go(argument: str, _own: tuple[frozenset[str], frozenset[str]]) -> tuple[str, str | None]:
    """Return an option's name, and its value if that is in the same word."""
    name, equals, value = argument.lstrip("-").partition("=")
    return SHORT.get(name, name), value if equals else None


def _read_getopt(
    argument: str, own: tuple[frozenset[str], frozenset[str]]
) -> tuple[str, str | None]:
    if argument.startswith("--"):
        name, equals, value = argument[2:].partition("=")
        known = own[0] | own[1]
        if name not in known:
            # crun itself rejects an abbreviation that fits several names.
            name = next((k for k in sorted(known) if k.startswith(name)), name)
        return name, value if equals else None
    for place, letter in enumerate(argument[1:], 2):
        if SHORT.get(letter) in own[0]:
            return SHORT[letter], argument[place:] or None
    return "", None


class NodeSettings:
    """The node's settings; each is a line of the file, with a name, a space and a value."""

    __slots__ = (
        "dev_dir",
        "environment",
        "hook",
        "hook_arguments",
        "log",
        "runtime",
        "runtime_dir",
        "runtime_for",
    )

    def __init__(self) -> None:
        self.runtime = ""
        self.runtime_for: dict[str, str] = {}  # runtimes by the state directory that --root names
        self.environment = ""
        self.hook = HOOK
        self.hook_arguments = ""
        self.runtime_dir = "/run/tidegate"
        self.dev_dir = "/dev"
        self.log = ""


class SettingsError(Exception):
    """The node's settings are invalid; the message is the error line for the engine."""


def parse_node(text: str, path: str, *, strict: bool = True) -> NodeSettings:
    """Parse the text of a settings file; `path` is used only in the error.

    Without `strict`, invalid lines are skipped.
    """
    node = NodeSettings()
    for number, line in enumerate(text.splitlines(), 1):
        name, _, value = line.strip().partition(" ")
        field = name.replace("-", "_")
        if not name or name.startswith("#"):
            continue
        if not strict and not (field in NodeSettings.__slots__ and value.strip()):
            continue
        if field not in NodeSettings.__slots__ or not value.strip():
            known = ", ".join(slot.replace("_", "-") for slot in NodeSettings.__slots__)
            raise SettingsError(
                f"{path}:{number}: invalid line '{line[:80]}'; the settings are {known}, each with"
                " a value"
            )
        if field != "runtime_for":
            setattr(node, field, value.strip())
            continue
        directory, _, program = value.strip().partition(" ")
        if directory.startswith("/") and program.strip().startswith("/"):
            node.runtime_for[directory] = program.strip()
        elif strict:
            raise SettingsError(
                f"{path}:{number}: invalid line '{line[:80]}'; write `runtime-for"
                " /state/directory /path/to/runtime`"
            )
    if strict and node.environment not in ("", "allow", "ignore"):
        raise SettingsError(
            f"{path}: environment is '{node.environment[:80]}'; write allow or ignore"
        )
    return node


def state_root(arguments: list[str]) -> str:
    """Return the state directory that a command line names with --root; "" if none."""
    for place, argument in enumerate(arguments):
        if argument in COMMANDS:
            break
        if argument.startswith("--root="):
            return argument[len("--root=") :]
        if argument == "--root":
            return arguments[place + 1] if len(arguments) > place + 1 else ""
    return ""


def read_node(path: str, arguments: list[str], *, strict: bool = True) -> NodeSettings:
    """Read the settings that apply to a command line.

    Raise SettingsError if they are invalid or name no runtime. Without `strict`, only a missing
    runtime is an error.
    """
    try:
        with open(path, encoding="utf-8", errors="strict" if strict else "replace") as file:
            text = file.read(1 << 16)
    except FileNotFoundError:
        text = ""
    except (OSError, ValueError) as e:
        if strict:
            raise SettingsError(f"{path}: {e}; make it a readable text file") from e
        text = ""
    node = parse_node(text, path, strict=strict)
    if node.runtime_for:
        node.runtime = node.runtime_for.get(state_root(arguments), node.runtime)
    if not node.runtime:
        node.runtime = next((r for r in RUNTIMES if os.access(r, os.X_OK)), "")
    if not node.runtime.startswith("/"):
        raise SettingsError(
            "no runtime to execute; install runc or crun, or write `runtime /path/to/runtime` to"
            f" {path}"
        )
    return node


def _tell_engine(call: EngineCall, line: str) -> None:
    """Write an error line to the runtime's log, which containerd's shim and other programs read."""
    if not call.log or call.log.startswith(("journald:", "syslog:")):
        return
    import time

    from oci_hook.light_json import dump_json

    if call.log_format == "json":
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        text = dump_json({"level": "error", "msg": line, "time": now})
    else:
        text = f"level=error msg={dump_json(line)}"
    try:
        flags = (
            os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        )
        fd = os.open(call.log, flags, 0o640)
        os.write(fd, text.encode() + b"\n")
        os.close(fd)
    except OSError:
        pass


def _fail(call: EngineCall, line: str, log: str = "") -> int:
    """Report a fatal error on standard error, in the runtime's log and in the node's log."""
    from oci_hook.errors import show
    from oci_hook.log import RunEvent, complain

    complain(f"tidegate-runtime: {line}")
    _tell_engine(call, f"tidegate-runtime: {line}")
    if call.command in CREATING:
        message, _, hint = line.partition("; ")
        event = RunEvent("runtime", log or None)
        event.fields["id"] = show(call.ident, 128)
        event.emit("failed", code="config", message=message, hint=hint)
    return 78


def replace_file(path: str, data: bytes) -> None:
    """Replace a file's content with `data` atomically: readers see the old or the new content."""
    from oci_hook.files import write_all

    directory, name = os.path.split(path)
    dirfd = os.open(directory or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    temporary = f".{name}.tidegate-{os.getpid()}"
    try:
        old = os.stat(name, dir_fd=dirfd)  # follows a link, as reading the file did
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=dirfd)
        try:
            write_all(fd, data)
            if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(fd, old.st_uid, old.st_gid)
            os.fchmod(fd, old.st_mode & 0o7777)
            os.rename(temporary, name, src_dir_fd=dirfd, dst_dir_fd=dirfd)
        except BaseException:
            os.unlink(temporary, dir_fd=dirfd)
            raise
        finally:
            os.close(fd)
    finally:
        os.close(dirfd)


class PendingContainer:
    """A container that is about to be created and may request a GPU."""

    __slots__ = ("bundle", "data", "path", "settings", "timeout")

    def __init__(self, data: bytes, bundle: str, path: str, settings: Settings) -> None:
        self.data = data  # content of config.json, which is at `path`
        self.bundle = bundle
        self.path = path
        self.settings = settings
        self.timeout = settings.timeout * 2


def read_pending(call: EngineCall, node: NodeSettings) -> PendingContainer | None:
    """Return the container; None if it requests no GPU. Raise HookError if it cannot start."""
    from oci_hook.quick import may_mention_us
    from oci_hook.state import read_file

    # Resolved as the kernel resolves it for the runtimes: links first, then `..`.
    bundle = os.path.realpath(call.bundle or ".")
    path = f"{bundle}/config.json"
    if call.config and os.path.realpath(call.config) != os.path.realpath(path):
        path = os.path.abspath(call.config)
    data = read_file(path, "check that the bundle contains config.json")
    allowed = node.environment == "allow"
    if not may_mention_us(data) and not (allowed and b"TIDEGATE_" in data):
        return None
    import gc

    gc.disable()  # searching for reference cycles takes 2 ms
    from oci_hook.edits import HookEntry
    from oci_hook.quick import parse_arguments
    from oci_hook.reserve import Settings

    if path != f"{bundle}/config.json":
        _refuse_elsewhere(data, path)
        return None
    if os.path.basename(os.path.realpath(node.runtime)).startswith("runsc"):
        _refuse_gvisor(data, path, node)
    words = node.hook_arguments.split()
    hook = parse_arguments([*words, "createRuntime"])
    settings = Settings(
        entry=HookEntry(node.hook, tuple(words)),
        runtime_dir=node.runtime_dir,
        dev_dir=node.dev_dir,
        driver_dir=hook.driver_dir,
        module_version=hook.module_version,
        environment=allowed,
        timeout=hook.timeout / 2,
    )
    return PendingContainer(data, bundle, path, settings)


def edit(pending: PendingContainer, event: RunEvent) -> None:
    """Edit config.json if necessary. Raise HookError if the container cannot start."""
    from oci_hook.errors import BundleError, show
    from oci_hook.quick import arm, disarm
    from oci_hook.reserve import edit_config

    path = pending.path
    arm(pending.timeout, NAME)
    try:
        outcome, edited = edit_config(pending.data, pending.bundle, path, pending.settings, event)
    finally:
        disarm()
    if edited is None:
        if outcome != "no-request":
            event.emit(outcome)
        return
    try:
        replace_file(path, edited)
    except OSError as e:
        raise BundleError(
            f"{show(path)} cannot be replaced: {e.strerror}",
            hint="the engine has to keep its bundles in a directory that root can write to",
        ) from e


def _refuse_elsewhere(data: bytes, path: str) -> None:
    """Refuse a GPU request made with crun's --config: hooks read the bundle's config.json."""
    from oci_hook.errors import BundleError, show
    from oci_hook.quick import PREFIX
    from oci_hook.state import parse_document

    _, annotations, _ = parse_document(data, show(path))
    if any(name.startswith(PREFIX) for name in annotations):
        raise BundleError(
            f"--config names {show(path)}, but hooks read config.json in the bundle",
            hint="put the configuration there, and start the container without --config",
        )


def _refuse_gvisor(data: bytes, path: str, node: NodeSettings) -> None:
    """Refuse a container that asks for a GPU; gVisor runs all others unchanged."""
    from oci_hook.errors import show
    from oci_hook.gvisor import refusal
    from oci_hook.quick import PREFIX
    from oci_hook.reserve import from_environment
    from oci_hook.state import parse_document

    document, annotations, _ = parse_document(data, show(path))
    asked = {*annotations}
    if node.environment == "allow":
        asked |= {*from_environment(document)}
    if any(name.startswith(PREFIX) for name in asked):
        raise refusal(node.runtime)


def left_traces(call: EngineCall, node: NodeSettings) -> bool:
    """Return whether this is the deletion of a container that the hook has prepared."""
    return (
        call.command == "delete"
        and "/" not in call.ident
        and call.ident not in ("", ".", "..")
        and os.path.exists(f"{node.runtime_dir}/traces/{call.ident}")
    )


def delete(call: EngineCall, node: NodeSettings, arguments: list[str]) -> int:
    """Run the real runtime's `delete`, then remove what the hook left in the container's root."""
    from oci_hook import kernel

    pid = os.fork()
    if pid == 0:
        kernel.die_with_parent()  # an engine that gives up kills only the process that it started
        os.execv(node.runtime, [node.runtime, *arguments])  # noqa: S606 - the wrapper's purpose
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    # This is done whatever the status is: if the container does not exist, its files are removed,
    # but a running container keeps them.
    take_back(call, node)
    return status if status >= 0 else 128 - status


def take_back(call: EngineCall, node: NodeSettings) -> None:
    """Remove what the hook left in the container's root; failures are only logged."""
    from oci_hook.apart import run_apart

    def work() -> int:
        from oci_hook import cleanup
        from oci_hook.quick import arm, disarm

        arm(END_DEADLINE, NAME)
        try:
            cleanup.take_back(node.runtime_dir, call.ident)
            cleanup.sweep_apart(node.runtime_dir)
        except Exception as e:  # noqa: BLE001
            _log_failure(node, e)
        finally:
            disarm()
        return 0

    try:
        run_apart(work, END_DEADLINE, NAME)
    except Exception as e:  # noqa: BLE001
        _log_failure(node, e)


def _log_failure(node: NodeSettings, e: Exception) -> None:
    """Log that a container's clean-up failed; the container itself is deleted nevertheless."""
    from oci_hook.log import RunEvent

    RunEvent("runtime", node.log or None).emit("failed", code="internal", message=str(e))


def take_config(arguments: list[str]) -> tuple[str, list[str]]:
    """Return the path of the settings file, and the command line without --tidegate-config."""
    if arguments[:1] != ["--tidegate-config"]:
        return CONFIG, arguments
    return (arguments[1] if len(arguments) > 1 else ""), arguments[2:]


def understand(arguments: list[str], node: NodeSettings) -> EngineCall:
    """Parse a command line as the node's runtime does."""
    real = os.path.basename(os.path.realpath(node.runtime))
    return parse_call(arguments, like_crun=any(name in real for name in GETOPT))


def make_ready(arguments: list[str]) -> int:
    """Do the work that precedes the real runtime, for the C program; return 0 or an exit status."""
    config, words = take_config(arguments)
    try:
        node = read_node(config, words)
    except SettingsError as e:
        return _fail(parse_call(words), str(e))
    call = understand(words, node)
    return edit_or_refuse(call, node) if call.command in CREATING else 0


def after_delete(arguments: list[str]) -> int:
    """Do the work that follows the real runtime's `delete`, for the C program."""
    config, words = take_config(arguments)
    node = read_node(config, words, strict=False)
    call = understand(words, node)
    if left_traces(call, node):
        take_back(call, node)
    return 0


def edit_or_refuse(call: EngineCall, node: NodeSettings, *, late: bool = False) -> int:
    """Edit config.json if necessary; return 0, or the exit status of a start that is refused.

    `late`: the C program has already abandoned a process that was editing the file.
    """
    from oci_hook.errors import show
    from oci_hook.log import RunEvent

    event = RunEvent("runtime", node.log or None)
    event.fields["id"] = show(call.ident, 128)
    try:
        pending = read_pending(call, node)
        if pending is None:
            return 0
        from oci_hook.apart import overdue, run_apart

        if late:
            raise overdue(pending.timeout, NAME)  # noqa: TRY301 - handled as if found here

        def work() -> int:
            try:
                edit(pending, event)
            except Exception as e:  # noqa: BLE001
                return _refuse(call, event, e)
            return 0

        return run_apart(work, pending.timeout, NAME)
    except Exception as e:  # noqa: BLE001
        return _refuse(call, event, e)


def _refuse(call: EngineCall, event: RunEvent, e: Exception) -> int:
    """Report any error to the engine in one line; return the exit status."""
    from oci_hook.apart import is_abandoned
    from oci_hook.errors import HookError, InternalError, show
    from oci_hook.log import complain

    error = (
        e
        if isinstance(e, HookError)
        else InternalError(
            f"{type(e).__name__}: {show(e)}",
            hint="report this in the project's issue tracker",
        )
    )
    outcome = "abandoned" if is_abandoned() else "failed"
    if outcome == "failed":
        complain(error.line())
        _tell_engine(call, error.line())
    event.emit(outcome, code=error.code, message=error.message, hint=error.hint)
    return error.status


def main() -> None:
    """Edit config.json if necessary, and execute the real runtime."""
    from oci_hook.quick import open_standard, take_program

    open_standard()
    sys.argv = take_program(sys.argv)
    arguments = sys.argv[1:]
    if arguments[:1] == ["--tidegate-deleted"]:
        sys.exit(after_delete(arguments[1:]))
    late = arguments[:1] == [LATE]
    config, arguments = take_config(arguments[late:])
    try:
        node = read_node(config, arguments)
    except SettingsError as e:
        # Parsed as runc's command line: engines write --log in a form that all runtimes accept.
        call = parse_call(arguments)
        if call.command in CREATING:
            sys.exit(_fail(call, str(e)))
        try:  # running containers can be inspected and ended even with invalid settings
            node = read_node(config, arguments, strict=False)
        except SettingsError as none:
            sys.exit(_fail(call, str(none)))
    call = understand(arguments, node)
    if call.command in CREATING:
        status = edit_or_refuse(call, node, late=late)
        if status:
            sys.exit(status)
    try:
        if left_traces(call, node):
            sys.exit(delete(call, node, arguments))
        os.execv(node.runtime, [node.runtime, *arguments])  # noqa: S606 - the wrapper's purpose
    except OSError as e:
        line = f"{node.runtime}: {e.strerror}; write `runtime /path/to/runtime` to {config}"
        sys.exit(_fail(call, line, node.log))
