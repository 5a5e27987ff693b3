"""The hook's entry point: parses the command line, and exits early for most containers.

A container that requests no GPU is left alone (`oci_hook.quick`). For the others, the modules that
do the work are imported here, when they are needed.
"""

import posix  # os, without its classes
import sys
from time import monotonic

from oci_hook.quick import (
    CONFIG_LIMIT,
    LATE,
    STATE_LIMIT,
    HookOptions,
    arm,
    asks_nothing,
    disarm,
    may_mention_us,
    open_standard,
    parse_arguments,
    read_bounded,
    take_program,
)


def run(arguments: "list[str]") -> int:
    """Run the stage that the command line names; return the exit status."""
    began = monotonic()
    options = HookOptions()
    raw = None
    late = arguments[:1] == [LATE]
    try:
        options = parse_arguments(arguments[late:])
        arm(options.timeout)
        raw = read_bounded(0, CONFIG_LIMIT if options.stage == "precreate" else STATE_LIMIT)
        if not late and is_done(options, raw):
            return 0
        disarm()
        import gc

        gc.disable()  # searching for reference cycles takes 2 ms, and exiting frees everything
        from oci_hook.apart import overdue, run_apart

        if late:
            raise overdue(options.timeout, "the hook")  # noqa: TRY301 - handled as if found here
        return run_apart(lambda: _serve(options, raw, began), options.timeout)
    except Exception as e:  # noqa: BLE001
        disarm()
        from oci_hook.main import begin_event, fail

        return fail(e, options, begin_event(options, raw, began))


def is_done(options: HookOptions, raw: "bytes | None") -> bool:
    """Return whether nothing is left to do, according to `raw`, the text from standard input.

    If so, and the stage is `precreate`, this writes config.json unchanged to standard output.
    """
    if options.stage != "precreate":
        return not options.governed and not options.claim and asks_nothing(raw)
    if raw is None or may_mention_us(raw):
        return False
    from oci_hook.files import write_all

    write_all(1, raw)
    return True


def _serve(options: HookOptions, raw: "bytes | None", began: float) -> int:
    """Run the stage in a worker process; return the exit status."""
    event = None
    try:
        arm(options.timeout)
        from oci_hook.log import RunEvent
        from oci_hook.main import serve

        event = RunEvent(options.stage, options.log, began)
        outcome = serve(options, raw, event)
        disarm()
    except Exception as e:  # noqa: BLE001
        disarm()
        from oci_hook.main import fail

        return fail(e, options, event)
    if outcome != "no-request":
        event.emit(outcome)
    return 0


def main() -> None:
    """Run the hook and end the process."""
    sys.argv = take_program(sys.argv)
    for name in posix.environ:
        if name:  # "=x" has no name and cannot be unset
            posix.unsetenv(name)
    posix.environ.clear()
    open_standard()
    posix.closerange(3, 1 << 30)
    posix.umask(0o022)
    status = run(sys.argv[1:])
    posix._exit(status)  # noqa: SLF001 - nothing to flush, and a normal exit takes milliseconds
