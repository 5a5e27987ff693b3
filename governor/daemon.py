"""Main program of the governor: read the configuration, find the GPUs, serve, stop.

It logs one event per line (JSON if standard error is not a terminal), reloads its configuration on
SIGHUP, and ends on SIGTERM or SIGINT. However it ends, the next governor takes over the running
containers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from governor import logs, metrics, web
from governor.allocations import AllocationTable
from governor.arbiter import Runner, Runners, load_library
from governor.audit import Auditor
from governor.config import Config, LoadedConfig, load_config
from governor.errors import GovernorError, TidegateError
from governor.hardware.runner import GangCoordinator
from governor.history import History
from governor.httpd import Offer
from governor.manager import feed_watchdog, notify, watchdog_s
from governor.mps import Mps, find_tools
from governor.options import Parser
from governor.parker import Parker
from governor.quota import Device
from governor.reconcile import reconcile
from governor.recover import CONTAINERS
from governor.runners import RunnerMaker, wait_opened
from governor.server import Server
from governor.settings import SettingsInForce
from governor.state import NAME, State
from governor.suspension import Suspender
from vdriver.errors import NvmlError, VdriverError
from vdriver.manifest import read_manifest
from vdriver.nvml import Nvml

log = structlog.get_logger()

WAIT_S = 0.05
"""Interval at which `--wait` checks whether the other governor has ended, in seconds."""
SUMMARY = "Share this node's GPUs among containers by quota"
OVERRIDES = ("runtime_dir", "state_dir", "driver_dir")
"""Options of the configuration that the command line can override."""


SIMULATED = ("SIMGPU_DIR", Path("/dev/tidegate-simgpu"))
"""Where the simulated driver finds its GPUs: the directory in this environment variable, or this
default.
"""


def require_simulated(driver_dir: str) -> str | None:
    """Return the directory of simulated GPUs if the mirror has their driver, else None.

    Raise GovernorError if the directory is not known: NVML's own error would mention a kernel
    module, which simulated GPUs do not have.
    """
    generation = Path(driver_dir) / "current"
    manifest = read_manifest(generation.resolve())
    variable, directory = SIMULATED
    if manifest.kind == "simulated" and not (os.environ.get(variable) or directory.exists()):
        raise GovernorError(
            f"the mirror at {generation} holds the simulated GPU's driver, but {variable} is not"
            " set",
            hint=f"set {variable} to the directory that `python -m simgpu create` made",
        )
    if manifest.kind != "simulated":
        return None
    named = Path(os.environ.get(variable) or directory)
    if not any(named.glob("gpu[0-9]*")):
        raise GovernorError(
            f"{named} has no simulated GPU",
            hint=f"set {variable} to the directory that `python -m simgpu create` made",
        )
    return str(named.absolute())


def original_nvml(driver_dir: str) -> Path:
    """Return the driver's own NVML library in the current generation."""
    return origin_of(driver_dir, "libnvidia-ml")


def origin_of(driver_dir: str, library: str) -> Path:
    """Return the driver's own `library`, libcuda or libnvidia-ml, in the current generation."""
    generation = Path(driver_dir) / "current"
    manifest = read_manifest(generation.resolve())
    for file in manifest.files:
        if file.role == "origin" and file.path.endswith(f"{library}-origin.so.1"):
            return generation.resolve() / file.path
    raise GovernorError(f"the mirror at {generation} has no {library}", hint="run tidegate refresh")


def find_devices(nvml: Nvml) -> tuple[list[Device], dict[int, str]]:
    """Return the node's GPUs and, by index, the reason why others cannot be shared."""
    devices: list[Device] = []
    left_out: dict[int, str] = {}
    for index, found in enumerate(nvml.survey()):
        if isinstance(found, NvmlError):
            left_out[index] = found.message.removeprefix(f"GPU {index}: ")
        elif found.memory_total is None:
            left_out[index] = "NVML does not report its memory"
        else:
            devices.append(
                Device(found.index, found.uuid, found.name, found.memory_total, found.minor)
            )
    return devices, left_out


def _find_mps(config: Config, devices: list[Device], server: Server) -> list[Mps]:
    """Add the configured MPS daemons; a GPU accepts no containers until its daemon is running."""
    wanted = [d for d in devices if config.strategy_of(d.index, d.uuid) == "mps"]
    if wanted:
        tools = find_tools(read_manifest((Path(config.driver_dir) / "current").resolve()))
        for device in wanted:
            mps = Mps(device, tools, config, server.mps_event)
            server.mps[device.uuid] = mps
            server.allocations.set_closed(device.uuid, mps.reason)
    return list(server.mps.values())


def _release_mps(server: Server, mps: Mps) -> None:
    """Leave a daemon running if containers are using it; otherwise stop it."""
    if server.mps_used(mps):
        mps.leave()
    else:
        mps.stop()


LOCK = "governor.lock"
"""Lock file in the runtime directory, mode 0600. The directory itself is not locked, because any
user can open and lock it, and so prevent the governor from starting."""
SOCKET = "governor.sock"


def _open_lock(directory: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(directory / LOCK, flags, 0o600)
        os.fchmod(fd, 0o600)  # even if something else created the file
    except OSError as e:
        raise GovernorError(
            f"{directory / LOCK}: {e.strerror}", hint="run as root; if it is a link, remove it"
        ) from e
    return fd


def _take_lock(lock: int, directory: Path) -> None:
    """Lock a directory for this governor; raise BlockingIOError if another is running there.

    A governor that answers on the socket counts even if it does not hold the lock, because older
    versions lock the directory instead of this file.
    """
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(str(directory / SOCKET))
        except BlockingIOError:
            pass  # the backlog is full, so a governor is listening
        except OSError:
            return
    fcntl.flock(lock, fcntl.LOCK_UN)
    raise BlockingIOError


async def wait_for_lock(directory: Path, stop: asyncio.Event) -> int | None:
    """Wait for another governor in `directory` to end; return the lock for `listening`.

    Return None if `stop` was set first.
    """
    lock = _open_lock(directory)
    said = False
    while not stop.is_set():
        try:
            _take_lock(lock, directory)
        except BlockingIOError:
            if not said:
                log.info("waits-for-another-governor", runtime_dir=str(directory))
                said = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), WAIT_S)
            continue
        return lock
    os.close(lock)
    return None


@contextlib.contextmanager
def listening(path: Path, lock: int | None = None) -> Iterator[socket.socket]:
    """Listen at `path`; raise GovernorError if another governor is running there.

    A file next to the socket is locked. Without the lock, two governors that start at the same time
    would not notice each other, nor would one notice a governor whose socket was removed. `lock` is
    a descriptor of that file with the lock held; it is closed at the end.
    """
    with contextlib.ExitStack() as stack:
        if lock is None:
            lock = _open_lock(path.parent)
            stack.callback(os.close, lock)
            try:
                _take_lock(lock, path.parent)
            except BlockingIOError as e:
                raise GovernorError(
                    f"another governor is running in {path.parent}",
                    hint="stop it, or choose another runtime_dir; with --wait, this governor"
                    " waits for the other one to end and takes its place",
                ) from e
        else:
            stack.callback(os.close, lock)
        path.unlink(missing_ok=True)
        yield stack.enter_context(_bound(path))


@contextlib.contextmanager
def _bound(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        except OSError as e:
            raise GovernorError(
                f"{path}: {e.strerror or e}", hint="choose a runtime_dir on a tmpfs"
            ) from e
        finally:
            os.umask(before)
        listener.listen(128)
        listener.setblocking(False)
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


LONGEST_SOCKET = 107
"""Longest path of a socket that the kernel accepts, in bytes."""


def _make_directories(runtime: Path) -> None:
    longest = runtime / CONTAINERS / ("0" * 16) / "governor.sock"
    if (too_long := len(os.fsencode(longest)) - LONGEST_SOCKET) > 0:
        raise GovernorError(
            f"{runtime}: the sockets of containers would have paths that are too long",
            hint=f"choose a runtime_dir that is shorter by {too_long} byte{'s' * (too_long != 1)}",
        )
    try:
        runtime.mkdir(parents=True, exist_ok=True)
        # Other users of the host need no access; a container has its own mount.
        (runtime / CONTAINERS).mkdir(mode=0o700, exist_ok=True)
        (runtime / CONTAINERS).chmod(0o700)  # an earlier governor may have created it
    except OSError as e:
        raise GovernorError(f"{runtime}: {e.strerror}", hint="run as root") from e


def _install_signal_handlers(stop: asyncio.Event, hangups: asyncio.Event) -> None:
    """Set `stop` on SIGTERM and SIGINT, `hangups` on SIGHUP."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    had_terminal = sys.stderr.isatty()

    def hang_up() -> None:
        # For a governor in the foreground, SIGHUP may come from its terminal.
        (stop if had_terminal and not os.isatty(2) else hangups).set()

    loop.add_signal_handler(signal.SIGHUP, hang_up)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])


async def govern(load: Callable[[], LoadedConfig], *, wait: bool = False) -> None:
    """Serve with the configuration that `load` returns, until a signal stops the governor.

    If another governor is running in the same directory, wait for it to end if `wait` is true, and
    raise GovernorError otherwise.
    """
    settings = SettingsInForce(load)
    config = settings.config
    runtime = Path(config.runtime_dir)
    _make_directories(runtime)
    library = load_library(config.library_dir)
    stop, hangups = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    _install_signal_handlers(stop, hangups)
    lock = await wait_for_lock(runtime, stop) if wait else None
    if wait and lock is None:
        return
    require_simulated(config.driver_dir)
    with (
        Nvml(original_nvml(config.driver_dir)) as nvml,
        listening(runtime / SOCKET, lock) as listener,
        contextlib.closing(Offer(lambda: metrics.listening(config))) as scraped,
        contextlib.closing(Offer(lambda: web.listening(config))) as shown,
        contextlib.ExitStack() as stack,
    ):
        server, devices, runners = _make_server(stack, config, nvml, library)
        await server.adopt()
        auditor = Auditor(server.containers, server.tally, config)
        stack.callback(auditor.close)
        settings.tell(server.configure)
        settings.tell(auditor.configure)
        server.settings = settings
        tasks = [loop.create_task(mps.run()) for mps in server.mps.values()]
        # Meanwhile, requests wait at the socket instead of being refused because MPS is starting.
        for mps in server.mps.values():
            await mps.tried()
        work = [
            server.serve(listener),
            _park(server, devices),
            reconcile(server, nvml, devices, runners, tally=server.tally, auditor=auditor),
            server.keep_state(),
            settings.follow(hangups),
            *_pages(server, scraped, shown),
        ]
        tasks += [loop.create_task(one) for one in work]
        log.info(
            "governor-started",
            gpus=[f"{device.index}: {device.name}" for device in devices],
            driver=nvml.driver_version(),
            runtime_dir=config.runtime_dir,
            metrics=config.metrics.listen,
            web=config.web.listen,
            containers=len(server.containers),
        )
        notify("READY=1")
        if (within_s := watchdog_s()) is not None:
            tasks.append(loop.create_task(feed_watchdog(within_s)))
        await _run_until(stop, tasks)
        log.info("governor-stopped")


def _make_server(
    stack: contextlib.ExitStack, config: Config, nvml: Nvml, library: ctypes.CDLL
) -> tuple[Server, list[Device], dict[str, Runner]]:
    """Return the server with the stored state, the GPUs and their runners; `stack` closes them."""
    devices, left_out = find_devices(nvml)
    for index, reason in left_out.items():
        log.warning("gpu-left-out", gpu=index, reason=reason)
    together = Runners(library, config)
    stack.callback(together.close)
    libcuda = origin_of(config.driver_dir, "libcuda")
    maker = RunnerMaker(library, config, nvml, libcuda, GangCoordinator(together))
    runners: dict[str, Runner] = {}
    for device in devices:
        runners[device.uuid] = maker.make(device)
        stack.callback(runners[device.uuid].close)
    wait_opened(runners.values())
    topology = nvml.topology([device.uuid for device in devices])
    state = State(Path(config.state_dir) / NAME)
    stack.callback(state.close)
    state.load()
    server = Server(config, AllocationTable(devices, config, topology, left_out), runners, state)
    server.suspender = Suspender(server.admissions, state, libcuda, nvml.processes)
    server.versions = {"driver": nvml.driver_version(), "cuda": nvml.cuda_version()}
    stack.callback(server.close)
    for mps in _find_mps(config, devices, server):
        # This runs before the server detaches from the containers.
        stack.callback(_release_mps, server, mps)
    return server, devices, runners


def _park(server: Server, devices: list[Device]) -> Coroutine[None, None, None]:
    """Return the coroutine that parks and restores memory; let admissions ask it for room."""
    parker = Parker(server.admissions, devices, lambda: server.admissions.config.memory_reserve)
    server.admissions.make_room = parker.make_room
    return parker.run()


def _pages(server: Server, scraped: Offer, shown: Offer) -> list[Coroutine[None, None, None]]:
    """Return the coroutines that serve metrics and the web page, as configured."""
    config = server.config
    work: list[Coroutine[None, None, None]] = []
    if config.metrics.listen != "off":
        work.append(scraped.serve(metrics.MetricsEndpoint(lambda: metrics.collect(server))))
    if config.web.listen != "off":
        history = History(time.monotonic_ns())
        work += [
            web.find_names(server),
            web.keep(server, history),
            shown.serve(web.PageEndpoint(server, history)),
        ]
    return work


async def _run_until(stop: asyncio.Event, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait until `stop` is set or the first task ends; raise that task's exception."""
    waiter = asyncio.get_running_loop().create_task(stop.wait())
    try:
        done, _ = await asyncio.wait([waiter, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (waiter, *tasks):
            task.cancel()
        await asyncio.gather(*tasks, waiter, return_exceptions=True)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the governor's command line."""
    made = Parser(prog="tidegate-governor", description=SUMMARY + ".")
    made.add_argument(
        "--config", metavar="FILE", help="configuration file (/etc/tidegate/config.yaml)"
    )
    for name in OVERRIDES:
        option = "--" + name.replace("_", "-")
        made.add_argument(
            option, metavar="DIR", help="use this directory instead of the configured one"
        )
    made.add_argument(
        "--wait",
        action="store_true",
        help="wait for another governor in the same directory to end, and take its place",
    )
    return made


def load_overridden(args: argparse.Namespace) -> LoadedConfig:
    """Return the configuration from the files, with the overrides from the command line."""
    loaded = load_config(args.config)
    given = {name: getattr(args, name) for name in OVERRIDES if getattr(args, name)}
    return replace(loaded, config=replace(loaded.config, **given))


def main(argv: list[str] | None = None) -> int:
    """Run the governor; return its exit status."""
    # Blocked until a handler is installed, because SIGHUP would end the governor.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    args = parser().parse_args(argv)
    logs.configure()
    try:
        asyncio.run(govern(lambda: load_overridden(args), wait=args.wait))
    except (TidegateError, VdriverError) as e:
        print(f"tidegate-governor: {e}", file=sys.stderr)
        return e.status
    return 0


if __name__ == "__main__":
    sys.exit(main())
