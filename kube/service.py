"""Serves the kubelet's gRPC calls on two sockets, one for registration and one for the driver.

A socket that has been removed is created again (`Endpoints.poll`): the kubelet forgets a plugin
when its socket is removed, and finds the plugin again through the new socket.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import structlog

from governor.errors import TidegateError
from kube.api import (
    dra_health_v1_pb2,
    dra_health_v1_pb2_grpc,
    dra_health_v1alpha1_pb2,
    dra_health_v1alpha1_pb2_grpc,
    dra_v1_pb2,
    dra_v1_pb2_grpc,
    dra_v1beta1_pb2,
    dra_v1beta1_pb2_grpc,
    pluginregistration_v1_pb2,
    pluginregistration_v1_pb2_grpc,
)
from kube.claims import AllocatedClaim, Reference
from kube.driver import MAX_WAITING, CallContext, ClaimDriver
from kube.errors import SocketError
from kube.health import HEALTHY, UNHEALTHY, Condition
from kube.instances import Instance
from kube.names import DRIVER
from kube.slices import device_name

log = structlog.get_logger()

SERVICES = (
    "v1.DRAPlugin",
    "v1beta1.DRAPlugin",
    "v1.DRAResourceHealth",
    "v1alpha1.DRAResourceHealth",
)
"""The services that are offered to the kubelet, which chooses among them."""
WORKERS = MAX_WAITING + 64
"""Maximum number of threads: each waiting call occupies one, and 64 are left for other calls."""
STREAMS = 4
"""Maximum number of open streams. Each occupies a worker; a kubelet opens one."""
AT_ONCE = 32
"""Number of claims of one call that are prepared concurrently."""
RESEND_S = 10.0
"""Interval in seconds at which the health is sent; after 30 s the kubelet counts it as unknown."""
RESERVE_S = 2.0
"""Time in seconds that a call must have left for work on a claim to begin."""
MAX_DEADLINE_S = 86400.0
"""Maximum time in seconds that a call with a deadline has left. For a call without a deadline, gRPC
reports a remaining time of centuries."""
ANSWER_S = 3.0
"""Time in seconds before its deadline at which a waiting call gives up and returns the reason."""
SOCKET_LIMIT = 107
"""Maximum length of a Unix socket's path, in bytes."""
HAND_OVER_S = 42.0
"""Longest time in seconds to finish calls if a successor is serving; a call waits 40 s at most."""
UNREGISTER_S = 1.5
"""Seconds until the kubelet stops calling: it checks for removed sockets once a second."""
ABSENT_S = 20.0
"""Seconds until a missing kubelet is logged. A running kubelet finds a plugin within a second, and
one that is starting does so within a few."""
REFUSED_S, MAX_REFUSED_S = 10.0, 300.0
"""First and longest pause in seconds before the registration socket is created again after the
kubelet refused the driver. A kubelet may retry on its own, or never for the same socket."""


class DraPlugin:
    """NodePrepareResources and NodeUnprepareResources, in the API version of `messages`."""

    def __init__(self, driver: ClaimDriver, messages: ModuleType) -> None:
        self._driver = driver
        self._messages = messages

    def NodePrepareResources(self, request: Any, context: Any) -> Any:  # noqa: N802 - protocol
        """Prepare each claim; the answer has a result or an error for each.

        A claim that has to wait does not delay the others.
        """
        response = self._messages.NodePrepareResourcesResponse()
        references = _references(request)
        prepare = partial(self._prepare, context=context)
        if len(references) < 2:
            prepared = [prepare(reference) for reference in references]
        else:
            with ThreadPoolExecutor(min(len(references), AT_ONCE)) as pool:
                prepared = list(pool.map(prepare, references))
        for reference, claim in zip(references, prepared, strict=True):
            answer = response.claims[reference.uid]
            if isinstance(claim, str):
                answer.error = claim
                continue
            for share in claim.shares:
                device = answer.devices.add(
                    # The kubelet compares this with the request name in the container, which is
                    # never that of an alternative.
                    request_names=[share.base_request],
                    pool_name=share.pool,
                    device_name=share.device,
                    cdi_device_ids=[share.cdi_id(reference.uid)],
                )
                if share.share_id and "share_id" in device.DESCRIPTOR.fields_by_name:
                    device.share_id = share.share_id
        return response

    def _prepare(self, reference: Reference, context: Any) -> AllocatedClaim | str:
        """Prepare a claim and return it, or return why it could not be prepared."""
        try:
            return self._driver.prepare(reference, _call(context, reference))
        except TidegateError as e:
            return str(e)
        except Exception as e:  # noqa: BLE001 - it must not affect the other claims
            return _internal_error(reference, e)

    def NodeUnprepareResources(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Withdraw each claim."""
        response = self._messages.NodeUnprepareResourcesResponse()
        for reference in _references(request):
            answer = response.claims[reference.uid]
            try:
                self._driver.unprepare(reference, _call(context, reference))
            except TidegateError as e:
                answer.error = str(e)
                log.warning("claim-not-taken-back", uid=reference.uid, error=str(e))
            except Exception as e:  # noqa: BLE001
                answer.error = _internal_error(reference, e)
        return response


def _references(request: Any) -> list[Reference]:
    """Return the claims of a request, each once."""
    found = {c.uid: Reference(c.namespace, c.name, c.uid) for c in request.claims}
    return list(found.values())


def _call(context: Any, reference: Reference) -> CallContext:
    """Return the kubelet's call in the form that the driver needs."""

    def left() -> float:
        remaining = context.time_remaining()
        # Without a deadline the driver cannot tell when the caller is gone, so it does not wait.
        if remaining is None or remaining > MAX_DEADLINE_S:
            return 0.0
        return float(remaining) - ANSWER_S

    def when_ended(tell: Callable[[], None]) -> None:
        if not context.add_callback(tell):
            tell()

    return CallContext(partial(_check_time, context, reference), left, when_ended)


def _check_time(context: Any, reference: Reference) -> None:
    """Refuse a call that is over or late: the kubelet may since have requested the opposite."""
    left = context.time_remaining()
    if not context.is_active() or (left is not None and left < RESERVE_S):
        raise SocketError(
            f"{reference}: the kubelet's call has run out of time", hint="the kubelet retries"
        )


def _internal_error(reference: Reference, e: Exception) -> str:
    log.error("claim-failed", uid=reference.uid, error=repr(e), exc_info=e)
    return f"{reference}: internal error in the driver: {e!r}"[:500]


class Registration:
    """The registration service, which the kubelet queries first."""

    def __init__(self, endpoint: str, registered: Callable[[bool], None]) -> None:
        self._endpoint = endpoint
        self._registered = registered

    def GetInfo(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        """Return the driver's name, its socket and the services that it offers."""
        return pluginregistration_v1_pb2.PluginInfo(
            type="DRAPlugin",
            name=DRIVER,
            endpoint=self._endpoint,
            supported_versions=list(SERVICES),
        )

    def NotifyRegistrationStatus(self, request: Any, _context: Any) -> Any:  # noqa: N802
        """Handle the result. The kubelet registers the driver whenever one of the two starts."""
        if request.plugin_registered:
            log.info("registered")
        else:
            log.error("registration-failed", error=request.error[:500])
        self._registered(bool(request.plugin_registered))
        return pluginregistration_v1_pb2.RegistrationStatusResponse()


class Health:
    """The health of the GPUs, which the kubelet watches in streams."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._changed = threading.Condition()
        self._conditions: Mapping[str, Condition] = {}
        self._looked = 0.0
        self._version = 0
        self._closed = False
        self._streams = threading.BoundedSemaphore(STREAMS)

    def update(self, conditions: Mapping[str, Condition]) -> None:
        """Set the conditions of the GPUs, by UUID, as just observed."""
        with self._changed:
            self._looked = time.time()
            if dict(conditions) != dict(self._conditions):
                self._conditions = dict(conditions)
                self._version += 1
                self._changed.notify_all()

    def close(self) -> None:
        """End every stream."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def watch(self, messages: ModuleType, context: Any) -> Iterator[Any]:
        """Yield the health of all devices, when it changes and every ten seconds."""
        if not self._streams.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{STREAMS} streams are open")
        try:
            context.add_callback(self._nudge)
            version = -1
            while True:
                with self._changed:
                    if self._version == version:
                        self._changed.wait(RESEND_S)
                    if self._closed or not context.is_active():
                        return
                    version, response = self._version, self._response(messages)
                yield response
        finally:
            self._streams.release()

    def _nudge(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _response(self, messages: ModuleType) -> Any:
        response = messages.NodeWatchResourcesResponse()
        numbers = {HEALTHY: messages.HEALTHY, UNHEALTHY: messages.UNHEALTHY}
        for uuid, condition in sorted(self._conditions.items()):
            response.devices.add(
                device={"pool_name": self._pool, "device_name": device_name(uuid)},
                health=numbers.get(condition.health, messages.UNKNOWN),
                last_updated_time=int(self._looked),
                message=condition.message,
            )
        return response


class HealthService:
    """NodeWatchResources, in the API version of `messages`."""

    def __init__(self, health: Health, messages: ModuleType) -> None:
        self._health = health
        self._messages = messages

    def NodeWatchResources(self, _request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        """Stream the health of all devices."""
        return self._health.watch(self._messages, context)


class KubeletAbsence:
    """Decides when to log that there is no kubelet: after ABSENT_S, then at doubling intervals."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._say_at = ABSENT_S

    def poll(self, now: float, *, absent: bool = True) -> float | None:
        """Return the seconds without a kubelet if they are to be logged now, else None."""
        if not absent:
            self._since, self._say_at = None, ABSENT_S
            return None
        if self._since is None:
            self._since = now
        seconds = now - self._since
        if seconds < self._say_at:
            return None
        self._say_at *= 2
        return seconds


class GrpcServer:
    """A gRPC server on a Unix socket in the file system."""

    def __init__(self, path: Path, add: Callable[[Any], None], workers: int) -> None:
        if len(os.fsencode(path)) > SOCKET_LIMIT:
            raise SocketError(
                f"{path} is longer than {SOCKET_LIMIT} bytes", hint="use a shorter --kubelet-dir"
            )
        self._path = path
        self._add = add
        self._workers = workers
        self._server: Any = None
        self._inode = 0

    def start(self) -> None:
        """Listen; raise SocketError if that is not possible."""
        server = grpc.server(
            ThreadPoolExecutor(self._workers),
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 4 << 20)],
        )
        self._add(server)
        before = os.umask(0o177)
        try:
            self._path.unlink(missing_ok=True)
            server.add_insecure_port(f"unix:{self._path}")
            server.start()
            self._inode = self._path.stat().st_ino
        except (OSError, RuntimeError) as e:
            raise SocketError(
                f"cannot listen on {self._path}: {e}", hint="run as root; see --kubelet-dir"
            ) from e
        finally:
            os.umask(before)
        self._server = server

    def poll(self) -> bool:
        """Listen again if the socket was removed or replaced; return whether it was."""
        try:
            if self._path.stat().st_ino == self._inode:
                return False
        except OSError:
            pass
        log.warning("socket-gone", path=str(self._path))
        self.stop(0)
        self.start()
        return True

    def stop(self, grace: float) -> None:
        """Stop listening, and give running calls `grace` seconds to finish."""
        if self._server is not None:
            self._server.stop(grace).wait()
            self._server = None


def directories(kubelet_dir: str | Path) -> tuple[Path, Path]:
    """Return the driver's directory below the kubelet's, and that of the registration sockets."""
    root = Path(kubelet_dir)
    return root / "plugins" / DRIVER, root / "plugins_registry"


class Endpoints:
    """Both sockets below the kubelet's directory."""

    def __init__(
        self,
        kubelet_dir: str | Path,
        driver: ClaimDriver,
        health: Health,
        registered: Callable[[bool], None],
        instance: Instance | None = None,
    ) -> None:
        self._instance = instance or Instance(*directories(kubelet_dir))
        self._driver = driver
        self._tell = registered
        self._pause = self._again_at = 0.0
        path = self._instance.socket

        def add_plugin(server: Any) -> None:
            dra_v1_pb2_grpc.add_DRAPluginServicer_to_server(DraPlugin(driver, dra_v1_pb2), server)
            dra_v1beta1_pb2_grpc.add_DRAPluginServicer_to_server(
                DraPlugin(driver, dra_v1beta1_pb2), server
            )
            dra_health_v1_pb2_grpc.add_DRAResourceHealthServicer_to_server(
                HealthService(health, dra_health_v1_pb2), server
            )
            dra_health_v1alpha1_pb2_grpc.add_DRAResourceHealthServicer_to_server(
                HealthService(health, dra_health_v1alpha1_pb2), server
            )

        def add_registration(server: Any) -> None:
            pluginregistration_v1_pb2_grpc.add_RegistrationServicer_to_server(
                Registration(str(path), self._registered), server
            )

        self._plugin = GrpcServer(path, add_plugin, WORKERS)
        self._registrar = GrpcServer(self._instance.registration, add_registration, workers=2)

    def start(self) -> None:
        """Listen on both sockets.

        The driver's is first, because the kubelet calls the driver as soon as it sees the
        registration socket.
        """
        self._instance.start()
        self._plugin.start()
        self._registrar.start()

    def poll(self) -> None:
        """Check that both sockets exist, and register again after the kubelet's refusal."""
        again = 0.0 < self._again_at <= time.monotonic()
        if self._plugin.poll() or again:
            # The kubelet connects to the driver's socket again when the driver registers.
            self._again_at = 0.0
            self._registrar.stop(0)
            self._registrar.start()
        else:
            self._registrar.poll()

    def _registered(self, accepted: bool) -> None:  # noqa: FBT001 - the callback's only argument
        """Handle the kubelet's answer to the registration."""
        if accepted:
            self._pause = self._again_at = 0.0
        else:
            self._pause = min(max(self._pause * 2, REFUSED_S), MAX_REFUSED_S)
            self._again_at = time.monotonic() + self._pause
        self._instance.note_registered(accepted)
        self._tell(accepted)

    def stop(self, grace: float = 5.0, most: float = HAND_OVER_S) -> None:
        """Finish the running calls, then unregister.

        The kubelet aborts the calls to a plugin when its registration socket is removed. If a later
        instance is serving, it gets the new calls, so the calls of this one may continue for up to
        `most` seconds. Otherwise they have `grace` seconds: they may be waiting for a governor that
        starts only with the next pod.
        """
        until = time.monotonic() + most
        while self._instance.has_successor() and time.monotonic() < until:
            if self._driver.idle:
                self._registrar.stop(0)
                time.sleep(UNREGISTER_S)
                break
            time.sleep(0.05)
        self._plugin.stop(grace)
        self._registrar.stop(0)
        self._instance.close()
