"""The part of the hook that runs for every container: parses options, and looks for a request.

Most containers on a node request no GPU, and pay only for the interpreter, `oci_hook.entry` and
this module. It imports no module that has to be read from disk: `os` alone takes 2 ms. Type
annotations are string literals where necessary, which saves the 0.3 ms for importing `__future__`.
"""

import posix  # os, without its classes
from _stat import S_ISREG

TYPE_CHECKING = False  # importing typing takes 3 ms
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
else:
    import _signal as signal  # without signal's enums, which take 4 ms

STAGES = ("prestart", "createRuntime", "precreate", "poststop")
USAGE = (
    "usage: tidegate-hook [--runtime-dir DIR] [--driver-dir DIR] [--dev-dir DIR] "
    "[--module-version FILE] [--log FILE] [--timeout SECONDS] [--governed] "
    "[--claim UID --share NAME] "
    "{prestart|createRuntime|precreate|poststop}"
)
WITH_VALUE = (
    "--runtime-dir",
    "--driver-dir",
    "--dev-dir",
    "--module-version",
    "--log",
    "--timeout",
    "--claim",
    "--share",
)
OF_CLAIMS = ("--claim", "--share")
NAME_LIMIT = 253  # characters of a claim's uid and of a share's name
DEADLINE = 20.0  # seconds; runtimes have no deadline unless the hook entry sets one
PREFIX = "tidegate.gpu/"
ESCAPES = tuple([b"\\u%04x" % ord(character) for character in PREFIX])
LATE = "--late"  # set by the C front end after a child of the fork server has missed its deadline
STATE_LIMIT = 4 << 20  # bytes
CONFIG_LIMIT = 4 << 20  # bytes; once parsed, the smallest values take 50 times as much memory
FIRST_READ = 64 << 10  # bytes in the first read; most inputs are smaller
NEXT_READ = 1 << 20  # bytes in each further read


class HookOptions:
    """The command-line options."""

    def __init__(self) -> None:
        self.runtime_dir = "/run/tidegate"
        self.driver_dir = "/var/lib/tidegate/driver"
        self.module_version = "/proc/driver/nvidia/version"
        self.log: str | None = None
        self.timeout = DEADLINE
        self.dev_dir = "/dev"
        self.governed = False  # the hook entry requests a GPU, whatever the annotations request
        self.claim = ""  # uid of the claim that `share` belongs to
        self.share = ""
        self.stage = ""
        self.given: tuple[str, ...] = ()  # the options, to be written into config.json


def parse_arguments(arguments: "list[str]") -> HookOptions:
    """Parse the command line; argparse would take 10 ms."""
    options = HookOptions()
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in WITH_VALUE:
            if not equals:
                value = next(rest, "")
            try:
                setattr(
                    options,
                    name[2:].replace("-", "_"),
                    float(value) if name == "--timeout" else value,
                )
            except ValueError:
                options.timeout = 0.0  # is refused below
            if not value or not 0 < options.timeout <= 3600:
                raise _misuse("option {} has the invalid value '{}'", name, value)
            if name not in OF_CLAIMS:
                options.given += (name, value)
            elif len(value) > NAME_LIMIT or not value.isascii() or not value.isprintable():
                raise _misuse("option {} has the invalid value '{}'", name, value)
        elif argument == "--governed":
            options.governed = True
        elif argument in STAGES and not options.stage:
            options.stage = argument
        else:
            raise _misuse("unknown argument '{}'", argument)
    if not options.stage:
        raise _misuse("no stage is given")
    if (options.claim == "") != (options.share == "") or (
        options.claim and options.stage == "precreate"
    ):
        raise _misuse(
            "--claim and --share must be given together, and cannot be used with precreate"
        )
    return options


def _misuse(message: str, *values: str) -> Exception:
    from oci_hook.errors import InternalError, show

    return InternalError(message.format(*map(show, values)), hint=USAGE)


def arm(seconds: float, subject: str = "the hook") -> None:
    """Set a deadline: without one, a hook that hangs would block the runtime forever."""

    def expire(*_: object) -> None:
        from oci_hook.errors import MountError

        if DeferredDeadline.depth:
            DeferredDeadline.missed = expire
            return
        shield()
        raise MountError(
            f"{subject} did not finish within {seconds:g} s", hint="see the hook's log on the node"
        )

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)


class DeferredDeadline:
    """`with DeferredDeadline():` defers a deadline that passes inside the block until its end.

    The deadline usually passes during the call that is stuck. When that call returns, the step that
    undoes it has to be recorded before the deadline takes effect.
    """

    depth = 0
    missed: "Callable[[], None] | None" = None

    def __enter__(self) -> None:
        """Defer the deadline."""
        DeferredDeadline.depth += 1

    def __exit__(self, *_: object) -> None:
        """Raise the error for a deadline that passed inside the block."""
        DeferredDeadline.depth -= 1
        if DeferredDeadline.missed and not DeferredDeadline.depth:
            missed, DeferredDeadline.missed = DeferredDeadline.missed, None
            missed()


def disarm() -> None:
    """Cancel the deadline."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def shield() -> None:
    """Disable the deadline before undoing a failed start, and before work after a success.

    The process that waits for this one has its own time limit (`oci_hook.apart`).
    """
    disarm()
    signal.signal(signal.SIGALRM, signal.SIG_IGN)


def read_bounded(fd: int, limit: int) -> "bytes | None":
    """Read `fd` to its end; None if it has more than `limit` bytes."""
    parts: list[bytes] = []
    size = 0
    while size <= limit:
        part = posix.read(fd, min(NEXT_READ if parts else FIRST_READ, limit + 1 - size))
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
    return None


def may_mention_us(config: bytes) -> bool:
    """Return, without parsing, whether config.json may contain a Tidegate annotation.

    Most containers on a node have none, and this check is all that they pay for. JSON escapes could
    spell the prefix, so a text in which a character of the prefix is escaped is parsed to be sure.
    Go escapes "&", "<" and ">", which half of all command lines contain; the prefix has none of
    them.
    """
    if PREFIX.encode()[:-1] in config:
        return True
    return b"\\u00" in config and any(map(config.lower().__contains__, ESCAPES))


def asks_nothing(state: "bytes | None") -> bool:
    """Return, without parsing, whether a container certainly requests nothing.

    Most containers on a node request nothing, and parsing needs modules that take time to import.
    A state that is not in the form that runtimes write gives False, and the code that then parses
    it reports the fault.
    """
    if state is None or may_mention_us(state):
        return False
    if state.count(b'"bundle"') != 1 or b"\\u00" in state:  # escapes could also spell the key
        return False
    colon, _, rest = state.partition(b'"bundle"')[2].partition(b'"')
    path, quote, _ = rest.partition(b'"')
    if colon.strip() != b":" or not quote or b"\\" in path or not path.startswith(b"/"):
        return False
    flags = posix.O_RDONLY | posix.O_CLOEXEC | posix.O_NONBLOCK | posix.O_NOCTTY
    try:
        fd = posix.open(path + b"/config.json", flags)
        try:
            config = read_bounded(fd, CONFIG_LIMIT) if S_ISREG(posix.fstat(fd).st_mode) else None
        finally:
            posix.close(fd)
    except (OSError, ValueError):
        return False
    return config is not None and not may_mention_us(config)


def take_program(argv: "list[str]") -> "list[str]":
    """Return the caller's command line; the C front end passes its own path with --program."""
    return [argv[2], *argv[3:]] if argv[1:2] == ["--program"] and len(argv) > 2 else argv


def open_standard() -> None:
    """Open closed standard descriptors; otherwise a file opened later becomes standard error."""
    for fd in range(3):
        try:
            posix.fstat(fd)
        except OSError:
            posix.open("/dev/null", posix.O_RDWR)
