"""Serve the governor's socket, to which the hook and the command line send requests.

Requests and answers are one JSON object per line. An admission belongs to the connection that
requested it until it is confirmed. If the connection ends before that, the admission is undone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import time
from typing import Any

import structlog

from governor import VERSION
from governor.admissions import Admissions, Pending
from governor.allocations import AllocationTable
from governor.arbiter import Runner
from governor.bookings import Bookings
from governor.claims import Claim
from governor.config import Config
from governor.container import Container
from governor.counters import Tally
from governor.errors import RequestError, TidegateError
from governor.listener import SHORT, start_serving
from governor.mps import Mps, MpsEvent
from governor.names import find_name
from governor.recover import find_containers
from governor.requests import parse_request, pod_of, uses_of
from governor.reservations import Reservations
from governor.settings import SettingsInForce
from governor.state import State
from governor.suspension import Suspender
from oci_hook.errors import HookError

log = structlog.get_logger()

LINE_LIMIT = 64 << 10
SHORT_S = 0.1


class Server:
    """Answers requests about the containers and claims of this node."""

    def __init__(
        self,
        config: Config,
        allocations: AllocationTable,
        runners: dict[str, Runner],
        state: State | None = None,
    ) -> None:
        self.versions: dict[str, str | None] = {"driver": None, "cuda": None}
        self.settings: SettingsInForce | None = None  # None if there are no files to reload
        self._state = state or State()
        self._allocations = allocations
        self._runners = runners
        self._reservations = Reservations(allocations)
        self.admissions = Admissions(config, allocations, runners, self._state, self._reservations)
        self.bookings = Bookings(allocations, self._state, self.admissions)
        self.admissions.bookings = self.bookings
        self.suspender = Suspender(self.admissions, self._state)
        self._tasks: set[asyncio.Task[None]] = set()

    def configure(self, config: Config) -> None:
        """Apply a new configuration.

        For running containers, it takes effect only for options with `effect: now`.
        """
        self.admissions.config = config
        self._allocations.configure(config)
        for container in self.containers.values():
            container.configure(config)
        for mps in self.mps.values():
            mps.configure(config)

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.admissions.config

    @property
    def containers(self) -> dict[str, Container]:
        """The containers, by key."""
        return self.admissions.containers

    @property
    def claims(self) -> dict[str, Claim]:
        """The claims that are booked, by uid."""
        return self.bookings.claims

    @property
    def mps(self) -> dict[str, Mps]:
        """The MPS daemons, by GPU."""
        return self.admissions.mps

    @property
    def tally(self) -> Tally:
        """The counters since the start."""
        return self.admissions.tally

    @property
    def allocations(self) -> AllocationTable:
        """The allocation table: which container has which part of which GPU."""
        return self._allocations

    async def adopt(self) -> None:
        """Take over the previous governor's claims and containers, before requests are served."""
        for claim in self._state.claims.values():
            self.bookings.restore(claim)
        for found in find_containers(self.config, self._state, self._allocations.devices):
            try:
                await self.admissions.adopt(found)
            except Exception as e:  # one container must not keep the others from being adopted
                # The container enforces its quota itself, as it did while the governor was away.
                log.exception("container-not-adopted", key=found.recovered.key, error=repr(e))
        self.bookings.release_unused()
        for claim in list(self.claims.values()):
            if claim.leaving:
                self.bookings.strike(claim)  # has no effect while a container uses the claim
        self._state.retry()

    async def keep_state(self) -> None:
        """Retry failed writes of the state once a second."""
        while True:
            await asyncio.sleep(1)
            self._state.retry()

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as e:
                    if e.errno not in SHORT:
                        raise
                    log.error("connection-not-accepted", error=e.strerror)
                    await asyncio.sleep(SHORT_S)
                    continue
                connection.setblocking(False)
                start_serving(self._tasks, self._connection(connection), connection)
        finally:
            for task in list(self._tasks):
                task.cancel()

    async def _connection(self, connection: socket.socket) -> None:
        pending: list[Pending] = []
        descriptors: list[int] = []
        buffer = b""
        try:
            while True:
                data, fds = await _receive(connection)
                descriptors += fds
                if not data:
                    return
                buffer += data
                while b"\n" in buffer:
                    line, _, buffer = buffer.partition(b"\n")
                    if len(line) >= LINE_LIMIT:
                        return
                    answer = await self._answer(line, descriptors, pending)
                    await asyncio.get_running_loop().sock_sendall(
                        connection, json.dumps(answer).encode() + b"\n"
                    )
                if len(buffer) > LINE_LIMIT or len(descriptors) > 4:
                    return
        except OSError as e:
            log.info("connection-lost", error=str(e))
        finally:
            for fd in descriptors:
                os.close(fd)
            for container, member in pending:
                if not member.confirmed:
                    self.admissions.part(container, member, "unconfirmed")
            connection.close()

    async def _answer(
        self, line: bytes, descriptors: list[int], pending: list[Pending]
    ) -> dict[str, Any]:
        request: dict[str, Any] = {}
        try:
            request = parse_request(line)
            match request["op"]:
                case "admit":
                    return await self.admissions.admit(request, descriptors, pending)
                case "confirm":
                    return self.admissions.confirm(pending)
                case "reserve":
                    return self._reservations.reserve(request)
                case "release":
                    return self.admissions.release(request["id"])
                case "set":
                    return await self.admissions.set(request)
                case "suspend":
                    return await self.suspender.suspend(request)
                case "resume":
                    return await self.suspender.resume(request)
                case "claim":
                    return self.bookings.claim(request)
                case "unclaim":
                    return self.bookings.unclaim(request["uid"])
                case "claims":
                    return {"ok": True, "claims": self.bookings.describe()}
                case "list":
                    listed = [one for c in self.containers.values() for one in c.describe()]
                    return {"ok": True, "containers": listed}
                case "gpus":
                    return {"ok": True, **self._describe_gpus(), **self.versions}
                case "config" if self.settings is not None:
                    return {"ok": True, **await self.settings.describe()}
                case "reload" if self.settings is not None:
                    return {"ok": True, **await self.settings.reload()}
                case "config" | "reload":
                    raise RequestError(
                        "this governor has no configuration files to reload",
                        hint="start tidegate-governor, which reads them",
                    )
                case _:
                    return {"ok": True, "pid": os.getpid(), "version": VERSION}
        except (TidegateError, HookError) as e:
            self._note_refusal(request, e)
            return {"ok": False, "error": {"code": e.code, "message": e.message, "hint": e.hint}}

    def _note_refusal(self, request: dict[str, Any], e: TidegateError | HookError) -> None:
        """Log a refused request, so that `tidegate events` finds it by its container."""
        about: dict[str, Any] = {"container": request["id"]} if "id" in request else {}
        about |= pod_of(request.get("identity", {}))
        if claims := self.bookings.names(uses_of(request)):
            about["claims"] = claims
        if "uid" in request:
            about = {"uid": request["uid"]}
            if "namespace" in request:
                about["claim"] = f"{request['namespace']}/{request['name']}"
        is_logged = isinstance(e, TidegateError) and e.is_logged
        if request.get("op") != "reload" and not is_logged:  # otherwise it has its own event
            log.info("request-refused", **about, code=e.code, message=e.message, hint=e.hint)
        if request.get("op") in ("admit", "reserve"):
            name = str(request.get("id") or find_name("", "", request["identity"]).whole)
            self.tally.refuse(time.time(), name, e.code, e.message, e.hint)

    def _describe_gpus(self) -> dict[str, Any]:
        """Return the GPUs as `tidegate check` shows them."""
        answer = self._allocations.describe()
        for gpu in answer["gpus"]:
            gpu["containers"] += self.bookings.claimants(gpu["uuid"])
            mps = self.mps.get(gpu["uuid"])
            gpu["mps"] = None if mps is None else mps.describe()
            gpu.update(self.scheduling(gpu["uuid"]))
        return answer

    def scheduling(self, uuid: str) -> dict[str, str]:
        """Return how a GPU's time is divided, and why, if that is not as configured."""
        runner = self._runners[uuid]
        return {
            "scheduling": "hardware" if runner.is_steered else "gate",
            "not_steered": runner.not_steered,
        }

    def host_memory(self) -> dict[str, int]:
        """Return the host memory for parked memory, in bytes.

        `taken` is allocated now, `needed` would be taken if all containers that may be parked used
        their quotas, and `limit` is the upper bound of `needed`.
        """
        each = [
            (container.parking.arenas.total, container.quota.memory)
            for container in self.containers.values()
            if container.parking is not None
        ]
        return {
            "taken": sum(taken for taken, _ in each),
            "needed": sum(needed for _, needed in each),
            "limit": self.config.memory.host_limit,
        }

    def mps_event(self, mps: Mps, event: MpsEvent) -> None:
        """Handle an event from a GPU's MPS server, and tell the containers that share the GPU."""
        if event.kind == "state":
            self._allocations.set_closed(mps.device.uuid, mps.reason)
            log.info("mps-state", gpu=mps.device.index, state=mps.state)
            return
        name = "mps-" + event.kind
        concerned = [c for c in self.containers.values() if mps.device in c.devices]
        by = next((c.identifier for c in concerned if event.pid in c.pids()), None)
        if event.kind in ("client", "server-started"):
            log.info(name, gpu=mps.device.index, container=by, text=event.text)
            return
        log.warning(
            name,
            gpu=mps.device.index,
            by=by,
            containers=[container.identifier for container in concerned],
            text=event.text,
        )
        if event.kind in ("fault", "server-ended", "daemon-ended"):
            for container in concerned:
                # A container must not learn the identity of the others.
                whose = "this" if by == container.identifier else "another" if by else "an unknown"
                said = f"a process of {whose} container"
                ended = "the MPS server has ended"
                what = f"{said} had a fatal fault" if event.kind == "fault" else ended
                container.tell_mps(
                    MpsEvent(event.kind, f"{what}; restart the programs that used the GPU")
                )

    def mps_used(self, mps: Mps) -> bool:
        """Return whether any container has the GPU."""
        return any(mps.device in container.devices for container in self.containers.values())

    def close(self) -> None:
        """Detach from every container; running containers then enforce their quotas themselves."""
        self.admissions.close()


async def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Receive bytes and descriptors without blocking the loop."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            data, ancillary, _, _ = connection.recvmsg(
                LINE_LIMIT, socket.CMSG_SPACE(4 * struct.calcsize("i")), socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            readable = loop.create_future()
            loop.add_reader(connection, _wake, readable)
            try:
                await readable
            finally:
                loop.remove_reader(connection)
            continue
        fds: list[int] = []
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                whole = len(content) - len(content) % struct.calcsize("i")
                fds += struct.unpack(f"{whole // struct.calcsize('i')}i", content[:whole])
        return data, fds


def _wake(future: asyncio.Future[None]) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):
        future.set_result(None)
