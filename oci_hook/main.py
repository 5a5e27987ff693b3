"""The hook, from its arguments to its exit status.

Modules that only a GPU container needs are imported after it is known to be one: every other
container of the node pays for the interpreter, json and two files read.
"""

from __future__ import annotations

import os
import sys

from oci_hook.errors import (
    BundleError,
    DriverError,
    HookError,
    InternalError,
    MountError,
    UnservedImageError,
    show,
)
from oci_hook.log import Event, complain
from oci_hook.state import (
    PREFIX,
    STATE_LIMIT,
    State,
    is_sandbox,
    may_mention_us,
    our_annotations,
    parse_config,
    parse_state,
    read_bounded,
    read_config,
)

TYPE_CHECKING = False  # typing itself takes 3 ms
if TYPE_CHECKING:
    import signal
    from types import FrameType
else:
    import _signal as signal  # without the names of numbers, which take 4 ms

STAGES = ("prestart", "createRuntime", "precreate", "poststop")
USAGE = (
    "usage: tidegate-hook [--runtime-dir DIR] [--driver-dir DIR] [--dev-dir DIR] "
    "[--module-version FILE] [--log FILE] [--timeout SECONDS] [--governed] "
    "{prestart|createRuntime|precreate|poststop}"
)
WITH_VALUE = (
    "--runtime-dir",
    "--driver-dir",
    "--dev-dir",
    "--module-version",
    "--log",
    "--timeout",
)
DEADLINE = 20.0  # runtimes have none of their own unless the hook entry sets one
UNDO_DEADLINE = 5.0


class Options:
    """The command line."""

    def __init__(self) -> None:
        self.runtime_dir = "/run/tidegate"
        self.driver_dir = "/var/lib/tidegate/driver"
        self.module_version = "/proc/driver/nvidia/version"
        self.log: str | None = None
        self.timeout = DEADLINE
        self.dev_dir = "/dev"
        self.governed = False  # who entered the hook says so, whatever the annotations say
        self.stage = ""
        self.given: tuple[str, ...] = ()  # the options, to be written into config.json


def parse_arguments(arguments: list[str]) -> Options:
    """Parse the command line; argparse would take 10 ms."""
    options = Options()
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
                value = ""
            if not value or not 0 < options.timeout <= 3600:
                raise InternalError(f"option {show(name)} is '{show(value)}'", hint=USAGE)
            options.given += (name, value)
        elif argument == "--governed":
            options.governed = True
        elif argument in STAGES and not options.stage:
            options.stage = argument
        else:
            raise InternalError(f"argument '{show(argument)}' is not understood", hint=USAGE)
    if not options.stage:
        raise InternalError("no stage is given", hint=USAGE)
    return options


def arm(seconds: float, who: str = "the hook") -> None:
    """Set a deadline of our own: without one a hook that hangs holds the runtime for ever."""

    def expire(_signal: int, _frame: FrameType | None) -> None:
        raise MountError(
            f"{who} did not finish within {seconds:g} s", hint="see the hook's log on the node"
        )

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def disarm() -> None:
    """Take the deadline back."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def asks_nothing(state: bytes | None) -> bool:
    """Tell without parsing that a container asks for nothing, as most of a node do.

    To import json takes as long as all else. What is not as every runtime writes it is parsed.
    """
    if state is None or may_mention_us(state) or state.count(b'"bundle"') != 1:
        return False
    colon, _, rest = state.partition(b'"bundle"')[2].partition(b'"')
    path, quote, _ = rest.partition(b'"')
    if colon.strip() != b":" or not quote or b"\\" in path or not path.startswith(b"/"):
        return False
    try:
        return not may_mention_us(read_config(os.fsdecode(path)))
    except (HookError, ValueError):
        return False  # who parses it says what is wrong


def prepare(options: Options, state: State, event: Event) -> str:
    """Prepare one container; gives the outcome."""
    config = read_config(state.bundle)
    if (
        not options.governed
        and not may_mention_us(config)
        and not any(name.startswith(PREFIX) for name in state.annotations)
    ):
        return "no-request"
    bundle = parse_config(config, state.bundle)
    annotations = our_annotations(state, bundle, governed=options.governed)
    if not annotations and not options.governed:
        return "no-request"
    event.phase("state")

    from oci_hook import kernel, traces
    from oci_hook.apply import Container, Inside, Undo, apply_plan, explain
    from oci_hook.client import Client, require_reachable
    from oci_hook.edits import (
        check_devices,
        gpu_nodes,
        refuse_foreign,
        require_no_gpu,
        take_reservation,
    )
    from oci_hook.image import (
        inspect_image,
        look_at_places,
        look_for_drivers,
        search_path,
    )
    from oci_hook.manifest import check_fresh, choose_share, module_version, read_manifest
    from oci_hook.plan import plan_container
    from oci_hook.request import check_request, parse_annotations

    event.phase("import")
    kernel.set_undumpable()
    reservation = take_reservation(annotations)
    refuse_foreign(bundle.document)
    nodes = gpu_nodes(bundle.document)
    request = parse_annotations(annotations)
    check_request(request, annotations)
    require_reachable(options.runtime_dir)
    event.phase("request")
    try:
        manifest = read_manifest(options.driver_dir)
        check_fresh(manifest, module_version(options.module_version))
        share = choose_share(manifest, request.capabilities)
        event.fields |= {"generation": manifest.generation}
        event.phase("manifest")
        container = Container(state.pid, bundle.root)
        # Of a run whose end nobody told.
        traces.take_back(options.runtime_dir, state.id)
        image = inspect_image(
            container.rootfd,
            container.procfd,
            manifest.machine,
            compat32=share.compat32 != "no",
        )
        with Inside(container) as rootfd:
            search = search_path(rootfd, container.procfd, image.library_dir, bundle.document)
            image = look_for_drivers(rootfd, image, search)
            if share.places:
                image = look_at_places(rootfd, image, share)
        event.phase("image")
    except (DriverError, UnservedImageError) as e:
        if not request.optional:
            raise
        require_no_gpu(bundle.document, e)
        event.fields |= {"code": e.code, "message": e.message}
        return "without-gpu"
    except OSError as e:
        raise explain(e, f"look into {show(bundle.root)}") from e

    # half of the deadline, so that the line says who did not answer
    client = Client(options.runtime_dir, options.timeout / 2)
    undo, noted = Undo(), False
    try:
        grant = client.admit(
            ident=state.id,
            pid=state.pid,
            pidfd=container.pidfd,
            bundle=state.bundle,
            annotations=annotations,
            identity=bundle.identity,
            reservation=reservation,
            nodes=nodes,
            exact=options.governed,
        )
        event.phase("admit")
        if grant.already:
            return "prepared-already"
        check_devices(grant.minors, nodes)
        plan = plan_container(manifest, share, grant, image)
        event.fields |= {
            "key": grant.key,
            "devices": list(grant.devices),
            "memory": grant.memory,
            "compute": grant.compute,
            "strategy": grant.strategy,
            "operations": len(plan.operations),
            "plan": plan.describe(),
        }
        event.phase("plan")
        skipped = [*plan.skipped, *apply_plan(plan, manifest.hold, container, undo)]
        try:
            traces.remember(options.runtime_dir, state.id, state.pid, bundle.root, undo.traces())
            noted = True
        except OSError as e:
            skipped.append(f"traces of this container will stay: {e.strerror}")
        if skipped:
            event.fields["skipped"] = skipped
        event.phase("apply")
        client.confirm()
        undo.forget()
        event.phase("confirm")
    except BaseException:
        arm(UNDO_DEADLINE)
        left = undo.run(container)
        # Or the note is another engine's, of a container that runs; or the end does what is left.
        if noted and not left:
            traces.forget(options.runtime_dir, state.id)
        if left:
            event.fields["left_behind"] = left
        raise
    finally:
        client.close()
    return "prepared"


def precreate(options: Options, event: Event) -> str:
    """Podman's own stage: config.json comes on stdin, and goes on stdout as it is to be."""
    from oci_hook.state import CONFIG_LIMIT

    data = read_bounded(0, CONFIG_LIMIT)
    if data is None:
        raise BundleError(
            f"config.json on stdin is larger than {CONFIG_LIMIT} bytes", hint="make it smaller"
        )
    outcome, edited = "no-request", None
    if may_mention_us(data):
        import json

        from oci_hook.edits import Entry, enter_hook
        from oci_hook.reserve import Settings, edit_config
        from oci_hook.state import parse_document

        settings = Settings(
            # Under no other name than it has: a file of the engine's enters it by that, too.
            entry=Entry(os.path.abspath(sys.argv[0]), options.given),
            runtime_dir=options.runtime_dir,
            dev_dir=options.dev_dir,
            driver_dir=options.driver_dir,
            module_version=options.module_version,
            timeout=options.timeout / 2,
        )
        name = "config.json on stdin"
        try:
            outcome, edited = edit_config(data, "", name, settings, event)
        except HookError as e:
            # Podman shows the status alone. The hook finds the same, and its line is shown.
            document, _, _ = parse_document(data, name)
            enter_hook(document, settings.entry)
            outcome, edited = "edited", json.dumps(document).encode()
            event.fields |= {"code": e.code, "message": e.message}
    event.phase("edit")
    from oci_hook.files import write_all

    write_all(1, data if edited is None else edited)
    return outcome


def release(options: Options, state: State) -> str:
    """Take away what a container left, and tell the governor; it finds out by itself too."""
    from oci_hook import traces

    traces.take_back(options.runtime_dir, state.id)
    traces.sweep(options.runtime_dir)
    asks = any(name.startswith(PREFIX) for name in state.annotations)
    if not options.governed and (is_sandbox(state.annotations) or not asks):
        return "no-request"
    from oci_hook.client import Client

    client = Client(options.runtime_dir, min(options.timeout, 5.0))
    client.release(state.id)
    client.close()
    return "released"


def run(arguments: list[str]) -> int:
    """Do what the command line asks; gives the exit status."""
    event = Event("?", None)
    stage = ""
    try:
        options = parse_arguments(arguments)
        stage = options.stage
        event = Event(stage, options.log)
        arm(options.timeout)
        if stage == "precreate":
            outcome = precreate(options, event)
        else:
            raw = read_bounded(0, STATE_LIMIT)
            if not options.governed and asks_nothing(raw):
                return 0
            state = parse_state(raw, needs_pid=stage != "poststop")
            event.fields["id"] = show(state.id, 128)
            outcome = (
                release(options, state) if stage == "poststop" else prepare(options, state, event)
            )
        disarm()
    except Exception as e:  # noqa: BLE001
        disarm()
        error = e if isinstance(e, HookError) else _internal(e)
        complain(error.line())
        event.emit("failed", code=error.code, message=error.message, hint=error.hint)
        # a container that is gone stays gone, whatever we have to say about it
        return 0 if stage == "poststop" else error.status
    if outcome != "no-request":
        event.emit(outcome)
    return 0


def _internal(e: Exception) -> InternalError:
    """Give a mistake of ours a line with its place."""
    frame = e.__traceback__
    while frame and frame.tb_next:
        frame = frame.tb_next
    where = (
        f"{os.path.basename(frame.tb_frame.f_code.co_filename)}:{frame.tb_lineno}" if frame else "?"
    )
    return InternalError(
        f"{type(e).__name__} at {where}: {show(e)}",
        hint="report this at the project's issue tracker",
    )


def main() -> None:
    """Run and end the process."""
    os.environ.clear()
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(
                "/dev/null", os.O_RDWR
            )  # or a descriptor of ours becomes somebody's standard error
    os.closerange(3, 1 << 30)
    os.umask(0o022)
    status = run(sys.argv[1:])
    os._exit(status)  # nothing to flush, and the interpreter's end takes milliseconds
