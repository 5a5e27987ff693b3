"""`tidegate-device-plugin`: offers a node's GPU memory as a resource that the kubelet counts.

    tidegate-device-plugin [--runtime-dir DIR] [--kubelet-dir DIR] [--compute 25] ...

It is meant for clusters that cannot share devices through DRA. A container asks for
`tidegate.gpu/memory-gib: 8`; the node's policy determines how much of the GPU's time comes with
that. The allocation is encoded in the hook's arguments, in a CDI file on the node. It is never
passed in the environment, which a pod can override.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
import structlog

from governor import logs
from governor.cdi import HOOK
from governor.config import STRATEGIES
from governor.errors import GovernorError, RefusedError, TidegateError
from governor.options import Parser
from kube.api import deviceplugin_v1beta1_pb2 as messages
from kube.api import deviceplugin_v1beta1_pb2_grpc as services
from kube.cdi import Directory, make_spec
from kube.claims import AllocatedClaim
from kube.errors import CdiError, SocketError
from kube.health import HEALTHY, UNHEALTHY, judge
from kube.names import DRIVER, PLUGIN_RESOURCE
from kube.node import NodeClient
from kube.options import add_node_options
from kube.service import GrpcServer, KubeletAbsence
from kube.units import UnitPolicy, Units, make_claim, parse_units, prefer, read_back, unit_names
from oci_hook.errors import HookError

log = structlog.get_logger()

VERSION = "v1beta1"
SOCKET = "tidegate-gpu-memory.sock"
PERIOD_S = 1.0
"""Interval between two steps of the loop, in seconds."""
AWAY_S = 15.0
"""Seconds that a governor may be away, as during a restart, before the units become unhealthy."""
MAX_PAUSE_S = 30.0
"""Longest pause between two attempts to register, in seconds."""
CALL_S = 10.0
"""Timeout of the registration call, in seconds."""
WORKERS = 8
STREAMS = 4
"""Maximum number of open streams. Each occupies a worker; a kubelet opens one."""


class UnitGovernor(Protocol):
    """The plugin's requests to the node's governor (`kube.node.NodeClient`)."""

    def gpus(self) -> dict[str, Any]:
        """Return the GPUs that are shared."""

    def containers(self) -> list[dict[str, Any]]:
        """Return the containers, with their violations."""

    def claim(self, claim: dict[str, Any]) -> list[dict[str, Any]]:
        """Announce a claim and return its shares with their GPUs."""

    def unclaim(self, uid: str) -> None:
        """Withdraw a claim."""

    def claims(self) -> list[dict[str, Any]]:
        """Return the announced claims."""


@dataclass(frozen=True)
class Unit:
    """One device as the kubelet counts it: its name, whether it can be allocated, its NUMA node."""

    name: str
    healthy: bool
    numa: int | None


class Allocations:
    """Announces to the governor the units that the kubelet allocates, and writes the CDI files.

    As in the DRA driver, a claim is announced to the governor before its CDI file is written.
    Claims that overlap it are withdrawn first.
    """

    def __init__(
        self,
        governor: UnitGovernor,
        directory: Directory,
        policy: UnitPolicy,
        *,
        hook: str = HOOK,
        hook_arguments: Sequence[str] = (),
        dev_dir: str = "/dev",
    ) -> None:
        self._governor = governor
        self._directory = directory
        self._policy = policy
        self._hook = hook
        self._arguments = tuple(hook_arguments)
        self._dev_dir = dev_dir
        self._lock = threading.Lock()
        self._given: dict[str, tuple[Units, AllocatedClaim]] = {}
        """The kubelet's allocations by uid; the governor must know all of them."""

    def allocate(self, containers: Sequence[Sequence[str]]) -> list[str]:
        """Return the CDI device of each container; raise TidegateError if the units are refused."""
        with self._lock:
            gpus = self._governor.gpus()["gpus"]
            wanted = [parse_units(names, gpus) for names in containers]
            _require_apart(wanted, gpus)
            for uid, (units, _) in (self._given | read_back(self._governor.claims())).items():
                # Exactly the same units mean the same container again, or one that replaces it.
                if any(units.overlaps(new) and uid != new.uid for new in wanted):
                    self._governor.unclaim(uid)
                    self._given.pop(uid, None)
                    self._directory.remove(uid)
                    log.info("units-free", uid=uid, gpu=units.uuid, gib=units.count)
            return [self._enter(units, gpus) for units in wanted]

    def _enter(self, units: Units, gpus: Sequence[Mapping[str, Any]]) -> str:
        gpu = next(gpu for gpu in gpus if gpu["uuid"] == units.uuid)
        claim = make_claim(units, gpu, self._policy)
        entered = self._governor.claim(claim.describe())
        self._given[units.uid] = units, claim
        self._write(claim, entered)
        (share,) = claim.shares
        log.info(
            "units-given",
            uid=units.uid,
            gpu=units.uuid,
            gib=units.count,
            compute=share.compute,
            compute_limit=share.compute_limit,
        )
        return share.cdi_id(units.uid)

    def _write(self, claim: AllocatedClaim, entered: Sequence[Mapping[str, Any]]) -> None:
        try:
            spec = make_spec(
                claim,
                {share["uuid"]: share.get("minor") for share in entered},
                hook=self._hook,
                arguments=self._arguments,
                dev_dir=self._dev_dir,
            )
        except HookError as e:  # a device node that the host does not have
            raise CdiError(e.message, hint=e.hint) from e
        self._directory.write(claim.reference.uid, spec)

    def restore(self) -> None:
        """Rewrite the CDI files that a reboot has removed, and remove those without a claim.

        The kubelet remembers its allocations and starts containers with them without asking again.
        """
        with self._lock:
            claims = self._governor.claims()
            shares = {str(claim["uid"]): claim["shares"] for claim in claims}
            for uid, (units, claim) in read_back(claims).items():
                self._given[uid] = units, claim
                self._write(claim, shares[uid])
            for uid in sorted(self._directory.uids() - set(shares)):
                self._directory.remove(uid)
                log.info("cdi-left-over", uid=uid)

    def tell_again(self) -> None:
        """Announce claims that the governor has lost; the kubelet does not ask twice for a pod."""
        with self._lock:
            known = {str(claim["uid"]) for claim in self._governor.claims()}
            for uid, (_, claim) in list(self._given.items()):
                if uid in known:
                    continue
                try:
                    self._governor.claim(claim.describe())
                except RefusedError as e:
                    del self._given[uid]  # a container that starts with the claim gets the error
                    log.warning("units-lost", uid=uid, message=e.message, hint=e.hint)
                else:
                    log.info("units-restored", uid=uid)


def _require_apart(wanted: Sequence[Units], gpus: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a call that gives a unit to two containers: each would get the whole unit."""
    for number, units in enumerate(wanted):
        for other in wanted[:number]:
            if units.overlaps(other):
                index = next(gpu["index"] for gpu in gpus if gpu["uuid"] == units.uuid)
                both = (units.bits & other.bits).bit_count()
                raise RefusedError(
                    f"the kubelet allocated {both} GiB of GPU {index} to two containers",
                    hint="recreate the pod; see the kubelet's log",
                )


class DevicePlugin(services.DevicePluginServicer):  # type: ignore[misc]
    """The calls that the kubelet makes."""

    def __init__(self, allocations: Allocations) -> None:
        self._allocations = allocations
        self._changed = threading.Condition()
        self._units: tuple[Unit, ...] = ()
        self._closed = False
        self._streams = threading.BoundedSemaphore(STREAMS)

    def update(self, units: Sequence[Unit]) -> None:
        """Set the units, and send them on all streams if they have changed."""
        with self._changed:
            if tuple(units) != self._units:
                healthy = sum(unit.healthy for unit in units)
                log.info("units", all=len(units), healthy=healthy)
                self._units = tuple(units)
                self._changed.notify_all()

    def close(self, *, closed: bool = True) -> None:
        """End all streams; with `closed` false, allow new ones."""
        with self._changed:
            self._closed = closed
            self._changed.notify_all()

    def GetDevicePluginOptions(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        """Announce that GetPreferredAllocation is implemented and PreStartContainer not needed."""
        return messages.DevicePluginOptions(get_preferred_allocation_available=True)

    def ListAndWatch(self, _request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        """Stream the list of all units, at once and whenever one changes."""
        if not self._streams.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{STREAMS} streams are open")
        try:
            context.add_callback(self._nudge)
            sent: tuple[Unit, ...] | None = None
            while True:
                with self._changed:
                    while self._units == sent and not self._closed and context.is_active():
                        self._changed.wait()
                    if self._closed or not context.is_active():
                        return
                    sent = self._units
                yield messages.ListAndWatchResponse(devices=[_device(unit) for unit in sent])
        finally:
            self._streams.release()

    def _nudge(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def GetPreferredAllocation(self, request: Any, _context: Any) -> Any:  # noqa: N802
        """Choose units of one GPU: the fullest GPU with enough room."""
        response = messages.PreferredAllocationResponse()
        for one in request.container_requests:
            chosen = prefer(
                one.available_deviceIDs, one.must_include_deviceIDs, max(one.allocation_size, 0)
            )
            response.container_responses.add(deviceIDs=chosen)
        return response

    def Allocate(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Announce the units and return their CDI devices."""
        asked = [list(one.devices_ids) for one in request.container_requests]
        try:
            devices = self._allocations.allocate(asked)
        except TidegateError as e:
            log.warning("units-refused", code=e.code, message=e.message, hint=e.hint)
            temporary = isinstance(e, GovernorError)
            code = grpc.StatusCode.UNAVAILABLE if temporary else grpc.StatusCode.FAILED_PRECONDITION
            context.abort(code, f"{PLUGIN_RESOURCE}: {e}")
        response = messages.AllocateResponse()
        for device in devices:
            response.container_responses.add(cdi_devices=[messages.CDIDevice(name=device)])
        return response

    def PreStartContainer(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        """Do nothing; because of the plugin's options, the kubelet does not call it."""
        return messages.PreStartContainerResponse()


def _device(unit: Unit) -> Any:
    device = messages.Device(ID=unit.name, health=HEALTHY if unit.healthy else UNHEALTHY)
    if unit.numa is not None:
        device.topology.nodes.add(ID=unit.numa)
    return device


class KubeletSocket:
    """The kubelet's registration socket; a new socket file means that the kubelet has restarted."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "kubelet.sock"
        self._known: tuple[int, int, int] | None = None
        self._pause = self._not_before = 0.0

    def poll(self, now: float) -> bool:
        """Return whether the plugin has to register now."""
        found = self._identity()
        if found is None:
            self._known = None
        return found is not None and found != self._known and now >= self._not_before

    def _identity(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino, status.st_ctime_ns

    def forget(self) -> None:
        """Register again at the next poll, because the plugin's own socket was created again."""
        self._known = None

    def register(self, now: float) -> bool:
        """Register, and return whether that succeeded; the pause after a failure doubles."""
        found = self._identity()
        request = messages.RegisterRequest(
            version=VERSION,
            endpoint=SOCKET,
            resource_name=PLUGIN_RESOURCE,
            options=messages.DevicePluginOptions(get_preferred_allocation_available=True),
        )
        try:
            with grpc.insecure_channel(f"unix:{self._path}") as channel:
                services.RegistrationStub(channel).Register(request, timeout=CALL_S)
        except grpc.RpcError as e:
            self._pause = min(max(self._pause * 2, 1.0), MAX_PAUSE_S)
            self._not_before = now + self._pause
            said = getattr(e, "details", lambda: "")() or repr(e)
            log.warning("not-registered", error=said[:300], again_s=self._pause)
            return False
        self._known, self._pause, self._not_before = found, 0.0, 0.0
        log.info("registered", resource=PLUGIN_RESOURCE)
        return True


class PluginLoop:
    """The work that is done every second."""

    def __init__(
        self,
        governor: UnitGovernor,
        allocations: Allocations,
        plugin: DevicePlugin,
        kubelet_dir: Path,
    ) -> None:
        self._directory = directory = kubelet_dir / "device-plugins"
        self._governor = governor
        self._allocations = allocations
        self._plugin = plugin
        self._kubelet = KubeletSocket(directory)
        self._endpoint = GrpcServer(
            directory / SOCKET,
            lambda server: services.add_DevicePluginServicer_to_server(plugin, server),
            WORKERS,
        )
        self._absence = KubeletAbsence()
        self._started = False
        self._restored = False
        self._away_since: float | None = None
        self._units: tuple[Unit, ...] = ()
        self.registered = False

    def step(self) -> None:
        """Check the node and the kubelet."""
        now = time.monotonic()
        self._look(now)
        if not self._restored:
            return  # there is nothing to offer until the governor has answered once
        if not self._started:
            self._endpoint.start()
            self._started = True
        # A kubelet that starts removes every socket in the directory, including the plugin's.
        elif self._endpoint.poll():
            self._kubelet.forget()
        if self._kubelet.poll(now):
            self.registered = self._kubelet.register(now)

    def turn(self) -> None:
        """Run one step, and log if there has been no kubelet for a while."""
        try:
            self.step()
        except SocketError as e:  # the kubelet has not created the directory yet
            reason = e.message
        else:
            path = self._directory / "kubelet.sock"
            reason = "" if path.exists() else f"{path} does not exist"
        seconds = self._absence.poll(time.monotonic(), absent=bool(reason))
        if seconds:
            log.warning(
                "no-kubelet",
                message=f"no kubelet for {seconds:.0f} s: {reason}; no GPU is offered",
                hint="check that the kubelet is running and that --kubelet-dir is its --root-dir",
            )

    def _look(self, now: float) -> None:
        try:
            answer = self._governor.gpus()
            conditions = judge(answer["gpus"], self._governor.containers())
            if not self._restored:
                self._allocations.restore()
                self._restored = True
            self._allocations.tell_again()
        except TidegateError as e:
            if self._away_since is None:
                self._away_since = now
                log.warning("governor-away", message=e.message, hint=e.hint)
            if now - self._away_since >= AWAY_S:
                self._plugin.update([Unit(u.name, healthy=False, numa=u.numa) for u in self._units])
            return
        self._away_since = None
        self._units = tuple(
            Unit(name, conditions[gpu["uuid"]].health == HEALTHY, gpu.get("numa_node"))
            for gpu in answer["gpus"]
            for name in unit_names(gpu)
        )
        self._plugin.update(self._units)

    def stop(self) -> None:
        """Stop listening."""
        self._plugin.close()
        self._endpoint.stop(1.0)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tidegate-device-plugin",
        description=f"Offers the node's GPU memory to a kubelet, as {PLUGIN_RESOURCE}.",
    )
    add_node_options(parser)
    parser.add_argument(
        "--compute",
        type=_percent,
        metavar="PERCENT",
        help="guarantee of every container (default: in proportion to its memory)",
    )
    parser.add_argument(
        "--compute-limit",
        type=_percent,
        default=100,
        metavar="PERCENT",
        help="cap of a container that uses time that others leave idle (%(default)s)",
    )
    parser.add_argument(
        "--strategy",
        choices=("auto", *STRATEGIES),
        default="auto",
        help="how the GPU is shared (%(default)s)",
    )
    parser.add_argument(
        "--ready-file", metavar="FILE", help="file that exists once the plugin is registered"
    )
    return parser


def _percent(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 100:
        raise argparse.ArgumentTypeError("must be between 1 and 100")
    return int(text)


@contextlib.contextmanager
def _exclusive_lock(kubelet_dir: Path) -> Iterator[None]:
    """Exclude the DRA driver and a second plugin, which would allocate the same GPUs."""
    directory = kubelet_dir / "plugins" / DRIVER
    try:
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise SocketError(
            f"{e.filename}: {e.strerror}", hint="run as root; see --kubelet-dir"
        ) from e
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise SocketError(
                f"{directory} is in use", hint="run the DRA driver or the device plugin, not both"
            ) from e
        yield
    finally:
        os.close(lock)


def serve(args: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    node = NodeClient(args.runtime_dir)
    allocations = Allocations(
        node,
        Directory(args.cdi_dir),
        UnitPolicy(args.compute, args.compute_limit, args.strategy),
        hook=args.hook,
        hook_arguments=args.hook_argument,
        dev_dir=args.dev_dir,
    )
    kubelet_dir = Path(args.kubelet_dir)
    ready = Path(args.ready_file) if args.ready_file else None
    with _exclusive_lock(kubelet_dir):
        loop = PluginLoop(node, allocations, DevicePlugin(allocations), kubelet_dir)
        log.info("plugin-started", kubelet_dir=args.kubelet_dir)
        try:
            while not stop.is_set():
                loop.turn()
                if ready and loop.registered and not ready.exists():
                    ready.write_text(f"{os.getpid()}\n")
                stop.wait(PERIOD_S)
        finally:
            loop.stop()
            if ready:
                ready.unlink(missing_ok=True)
    log.info("plugin-stopped")


def main(argv: list[str] | None = None) -> int:
    """Run the plugin; return its exit status."""
    args = _parser().parse_args(argv)
    logs.configure()
    try:
        serve(args)
    except TidegateError as e:
        print(f"tidegate-device-plugin: {e}", file=sys.stderr)
        return e.status
    return 0


if __name__ == "__main__":
    sys.exit(main())
