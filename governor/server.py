"""The governor's socket: the hook and the command line ask, one JSON object per line each way.

An admission belongs to the connection that asked for it until it is confirmed: when the connection
ends first, everything made for it is taken back.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jsonschema
import structlog

from governor.arbiter import Runner
from governor.books import MIB, Books, Device, Nodes, Quota
from governor.config import Config
from governor.container import Container, container_key
from governor.counters import Tally
from governor.errors import RefusedError, RequestError, StateError, TidegateError
from governor.mps import Event, Mps
from governor.recover import Found, find_containers
from governor.state import State
from oci_hook.errors import HookError, show
from oci_hook.notation import load_json
from oci_hook.request import Request, check_request, parse_annotations

log = structlog.get_logger()

LINE_LIMIT = 64 << 10
VERSION = "0.1.0"
SHORT_S = 0.1
RESERVED_S = 30.0
"""How long GPUs are kept for a container whose devices were written down and that starts not."""
MOST_RESERVED = 1024
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Somebody has taken what a connection needs; who governs waits until there is some again."""
SCHEMA_FILE = Path(__file__).with_name("protocol.schema.json")
_VALIDATOR = jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))


def parse_request(line: bytes) -> dict[str, Any]:
    """Return the request in a line; RequestError where it is none."""
    try:
        document: dict[str, Any] = load_json(line)
        json.dumps(document, ensure_ascii=False).encode()  # half a surrogate pair is no text
        # What is just not too deep for JSON can be too deep for who says what is wrong with it.
        error = jsonschema.exceptions.best_match(_VALIDATOR.iter_errors(document))
    except (ValueError, RecursionError) as e:
        raise RequestError(
            "a request is not JSON", hint="install the same version of hook and governor"
        ) from e
    if error is not None:
        raise RequestError(
            f"a request is not understood: {show(error.message, 160)}",
            hint="install the same version of hook and governor",
        )
    return document


class Server:
    """Answers requests and keeps the containers, by their keys."""

    def __init__(
        self,
        config: Config,
        books: Books,
        runners: dict[str, Runner],
        state: State | None = None,
    ) -> None:
        self.mps: dict[str, Mps] = {}  # by GPU, where it is shared so
        self._config = config
        self._state = state or State()
        self._books = books
        self._runners = runners
        self.containers: dict[str, Container] = {}
        self._reserved: dict[str, tuple[tuple[Device, ...], asyncio.TimerHandle]] = {}
        self.tally = Tally()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def books(self) -> Books:
        """Who has how much of which GPU."""
        return self._books

    async def adopt(self) -> None:
        """Take over what the governor before us has left, before anybody is served."""
        for found in find_containers(self._config, self._state, self._books.devices):
            try:
                await self._adopt(found)
            except Exception as e:  # one container keeps nobody from the others
                # It keeps its quota by itself, as while we were away.
                log.exception("container-not-adopted", key=found.remains.key, error=repr(e))
        self._state.retry()

    async def _adopt(self, found: Found) -> None:
        key = found.remains.key
        try:
            devices = self._books.restore(key, found.quota, found.devices)
            container = Container(
                identifier=found.identifier,
                pidfd=found.pidfd,
                pid=found.process.pid,
                quota=found.quota,
                devices=devices,
                runners=self._runners,
                config=self._config,
                state=self._state,
                remains=found.remains,
                mps=self.mps.get(devices[0].uuid),
            )
        except BaseException:
            self._books.leave(key)
            raise
        self.containers[key] = container
        self._state.note(container.row)
        try:
            await container.listen(self._ended)
        except OSError as e:
            # Its processes are known; only new ones find nobody.
            log.error("container-unreachable", container=found.identifier, error=str(e))
        log.info(
            "container-adopted",
            container=found.identifier,
            key=key,
            processes=sorted(container.pids()),
            **asdict(found.quota),
        )

    async def keep_state(self) -> None:
        """Write what could not be written, as soon as it can be."""
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
                    if e.errno not in _SHORT:
                        raise
                    log.error("connection-not-accepted", error=e.strerror)
                    await asyncio.sleep(SHORT_S)
                    continue
                connection.setblocking(False)
                task = loop.create_task(self._connection(connection))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            for task in list(self._tasks):
                task.cancel()

    async def _connection(self, connection: socket.socket) -> None:
        pending: list[Container] = []
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
            for container in pending:
                if not container.confirmed:
                    self._end(container, "unconfirmed")
            connection.close()

    async def _answer(
        self, line: bytes, descriptors: list[int], pending: list[Container]
    ) -> dict[str, Any]:
        request: dict[str, Any] = {}
        try:
            request = parse_request(line)
            match request["op"]:
                case "admit":
                    return await self._admit(request, descriptors, pending)
                case "confirm":
                    return self._confirm(pending)
                case "reserve":
                    return self._reserve(request)
                case "release":
                    return self._release(request["id"])
                case "set":
                    return self._set(request)
                case "list":
                    listed = [c.describe() for c in self.containers.values()]
                    return {"ok": True, "containers": listed}
                case "gpus":
                    answer = self._books.describe()
                    for gpu in answer["gpus"]:
                        mps = self.mps.get(gpu["uuid"])
                        gpu["mps"] = None if mps is None else mps.describe()
                    return {"ok": True, **answer}
                case _:
                    return {"ok": True, "pid": os.getpid(), "version": VERSION}
        except (TidegateError, HookError) as e:
            # `tidegate events` finds it by the container, and says what to do.
            about = {"container": request["id"]} if "id" in request else {}
            log.info("request-refused", **about, code=e.code, message=e.message, hint=e.hint)
            if request.get("op") in ("admit", "reserve"):
                self.tally.refused[e.code] += 1
            return {"ok": False, "error": {"code": e.code, "message": e.message, "hint": e.hint}}

    async def _admit(
        self, request: dict[str, Any], descriptors: list[int], pending: list[Container]
    ) -> dict[str, Any]:
        identifier = request["id"]
        if not descriptors:
            raise RequestError("admit came without a pidfd", hint="send it with SCM_RIGHTS")
        key = container_key(identifier)
        known = self.containers.get(key)
        if known is not None and known.confirmed and known.is_process(descriptors[0]):
            # The hook is entered twice, by two who each make sure that it is.
            return {**self._grant(known), "already": True}
        if known is not None:
            raise RefusedError(
                f"a container {identifier[:64]!r} is registered already",
                hint="delete it first, or give this one another name",
            )
        parsed = parse_annotations(request["annotations"])
        check_request(parsed, request["annotations"])
        parsed = self._redeem(request, parsed)
        quota, devices = self._books.admit(key, parsed, _nodes(request))
        pidfd = descriptors.pop(0)
        container: Container | None = None
        try:
            container = Container(
                identifier=identifier,
                pidfd=pidfd,
                pid=request["pid"],
                quota=quota,
                devices=devices,
                runners=self._runners,
                config=self._config,
                state=self._state,
                mps=self.mps.get(devices[0].uuid),
            )
            self.containers[key] = container
            pending.append(container)
            # Behind its directory: one that no row names is looked at and removed, a row whose
            # directory is not there yet would be taken for damage.
            self._state.put(container.row)
            await container.listen(self._ended)
        except BaseException as e:
            if container is None:
                self._books.leave(key)
            else:
                self._end(container, "failed")
            if not isinstance(e, OSError):
                raise
            raise RefusedError(
                f"the container's directory cannot be made: {e.strerror}",
                hint=f"look at {self._config.runtime_dir}",
            ) from e
        self.tally.admitted += 1
        log.info(
            "container-admitted",
            container=identifier,
            key=container.key,
            devices=[device.index for device in devices],
            memory=quota.memory,
            compute=quota.compute,
            compute_limit=quota.compute_limit,
            strategy=container.strategy,
        )
        return self._grant(container)

    def _grant(self, container: Container) -> dict[str, Any]:
        return {
            "ok": True,
            "key": container.key,
            "directory": str(container.directory),
            "devices": _describe(container.devices),
            **asdict(container.quota),
            "strategy": container.strategy,
        }

    def _reserve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Keep GPUs for a container whose devices are being written down, for a while."""
        parsed = parse_annotations(request["annotations"])
        check_request(parsed, request["annotations"])
        self._strike(request.get("replaces", ""))
        if len(self._reserved) >= MOST_RESERVED:
            raise RefusedError(
                f"{MOST_RESERVED} reservations wait for their containers",
                hint=f"try again in {RESERVED_S:g} s",
            )
        token = secrets.token_hex(16)
        quota, devices = self._books.admit(_reservation(token), parsed, _nodes(request))
        expiry = asyncio.get_running_loop().call_later(RESERVED_S, self._expire, token)
        self._reserved[token] = (devices, expiry)
        return {
            "ok": True,
            "reservation": token,
            "expires_s": RESERVED_S,
            "devices": _describe(devices),
            **asdict(quota),
        }

    def _strike(self, token: str) -> tuple[Device, ...]:
        """Take a reservation out of the books; one that is not known, or no more, is no error."""
        devices, expiry = self._reserved.pop(token, ((), None))
        if expiry is not None:
            expiry.cancel()
            self._books.leave(_reservation(token))
        return devices

    def _expire(self, token: str) -> None:
        log.warning("reservation-expired", devices=[d.index for d in self._strike(token)])

    def _redeem(self, request: dict[str, Any], parsed: Request) -> Request:
        """Give a container the GPUs that were reserved for it.

        Whose reservation is gone gets what its nodes allow: they were written down with it.
        """
        devices = self._strike(request.get("reservation", ""))
        if not devices:
            return parsed
        return parsed._replace(devices=tuple(device.uuid for device in devices), gpus=None)

    def _confirm(self, pending: list[Container]) -> dict[str, Any]:
        if not pending or self.containers.get(pending[-1].key) is not pending[-1]:
            raise RequestError("confirm without an admission", hint="send admit first")
        container = pending[-1]
        container.row = replace(container.row, confirmed=True)
        self._state.put(container.row)
        container.confirmed = True
        return {"ok": True}

    def _find(self, identifier: str) -> Container | None:
        """Return a container by its id, or by the name that it has while that is not known."""
        container = self.containers.get(container_key(identifier))
        if container is not None:
            return container
        named = (one for one in self.containers.values() if one.identifier == identifier)
        return next(named, None)

    def _release(self, identifier: str) -> dict[str, Any]:
        container = self._find(identifier)
        # Another engine's of the same id may run: nobody but its process says that it has ended.
        if container is not None and container.has_ended():
            self._end(container, "released")
        return {"ok": True}

    def _set(self, request: dict[str, Any]) -> dict[str, Any]:
        container = self._find(request["id"])
        if container is None:
            raise RefusedError(
                f"no container {request['id'][:64]!r} shares a GPU of this node",
                hint="tidegate ps lists them",
            )
        old = container.quota
        quota = Quota(
            request.get("memory", old.memory),
            request.get("compute", old.compute),
            request.get("compute_limit", _limit_after(request, old)),
        )
        used = max(container.used(i) for i in range(len(container.devices)))
        if quota.memory < min(used, old.memory):
            raise RefusedError(
                f"the container uses {-(-used // MIB)} MiB, "
                f"{quota.memory // MIB} MiB were asked for",
                hint="ask for more, or wait until it has given memory back",
            )
        self._books.change(container.key, quota)
        try:
            # Before its page, which is what counts after a restart.
            self._state.put(replace(container.row, quota=quota))
        except StateError:
            self._books.change(container.key, old)
            raise
        container.set_quota(quota)
        log.info("quota-changed", container=container.identifier, **asdict(quota))
        return {"ok": True, **asdict(quota)}

    def mps_event(self, mps: Mps, event: Event) -> None:
        """Take in what happened to a GPU's MPS server, and tell the containers whose it is."""
        if event.kind == "state":
            self._books.set_closed(mps.device.uuid, mps.reason)
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
                # Who the others are is nobody's business.
                own = by == container.identifier
                said = "a process of this container" if own else "a process of some container"
                what = f"{said} had a fatal fault" if event.kind == "fault" else "the server ended"
                container.tell_mps(Event(event.kind, f"{what}; start what used the GPU again"))

    def mps_used(self, mps: Mps) -> bool:
        """Return whether containers have the GPU."""
        return any(mps.device in container.devices for container in self.containers.values())

    def _ended(self, container: Container) -> None:
        self._end(container, "ended")

    def _end(self, container: Container, why: str) -> None:
        if self.containers.get(container.key) is not container:
            return
        del self.containers[container.key]
        self._books.leave(container.key)
        self.tally.container_ended(container)
        container.close()
        log.info("container-ended", container=container.identifier, why=why)

    def close(self) -> None:
        """Let go of every container; those that run keep their quota by themselves."""
        for container in list(self.containers.values()):
            if container.confirmed:
                del self.containers[container.key]
                container.close(keep=True)
            else:
                self._end(container, "stopping")


def _reservation(token: str) -> str:
    """Return the name of a reservation in the books, which is no container's key."""
    return f"reservation {token}"


def _nodes(request: dict[str, Any]) -> Nodes:
    return Nodes(frozenset(request.get("nodes", ())), request.get("exact", False))


def _describe(devices: Sequence[Device]) -> list[dict[str, Any]]:
    return [{"uuid": d.uuid, "index": d.index, "minor": d.minor} for d in devices]


def _limit_after(request: dict[str, Any], old: Quota) -> int:
    """Return the limit of a request that names none: a strict container stays strict."""
    compute = int(request.get("compute", old.compute))
    return compute if old.compute_limit == old.compute else max(old.compute_limit, compute)


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
