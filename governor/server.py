"""The governor's socket: the hook and the command line ask, one JSON object per line each way.

An admission belongs to the connection that asked for it until it is confirmed. If the connection
ends first, everything that was made for the admission is taken back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import structlog

from governor import VERSION
from governor.arbiter import Runner
from governor.books import Books, Nodes
from governor.claims import (
    MOST_SHOWN,
    NODE,
    Claim,
    Share,
    Use,
    check_claim,
    merge,
    parse_claim,
    uses_key,
    words,
)
from governor.config import Config
from governor.container import Container, Member, container_key
from governor.counters import Tally
from governor.errors import OccupiedError, RefusedError, RequestError, StateError, TidegateError
from governor.listener import SHORT
from governor.mps import Event, Mps
from governor.names import find_name
from governor.quota import MIB, Device, Quota
from governor.recover import Found, find_containers
from governor.settings import Settings
from governor.state import State, Whose
from oci_hook.errors import HookError, show
from oci_hook.notation import load_json
from oci_hook.request import Request, check_request, parse_annotations, refuse_beside

log = structlog.get_logger()

LINE_LIMIT = 64 << 10
SHORT_S = 0.1
RESERVED_S = 30.0
"""How long GPUs stay reserved for a container that was given their device nodes and does not start,
in seconds."""
MOST_RESERVED = 1024
SCHEMA_FILE = Path(__file__).with_name("protocol.schema.json")
_SCHEMA: dict[str, Any] = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
_VALIDATOR = jsonschema.Draft202012Validator(_SCHEMA)


def _validators_by_op() -> dict[str, jsonschema.Draft202012Validator]:
    """Return a validator for each operation alone.

    `oneOf` tries all of them: 0.7 ms of the 5.5 ms of processor time that a start took here.
    """
    whole = dict(_SCHEMA)
    kinds = whole.pop("oneOf")
    validators = {}
    for kind in kinds:
        said = kind["properties"]["op"]
        for op in said.get("enum") or [said["const"]]:
            validators[op] = jsonschema.Draft202012Validator({**whole, "allOf": [kind]})
    return validators


_BY_OP = _validators_by_op()


Pending = tuple[Container, Member]
"""An admission that was not confirmed."""


def parse_request(line: bytes) -> dict[str, Any]:
    """Return the request in a line; RequestError if the line is not a request."""
    try:
        document: dict[str, Any] = load_json(line)
        json.dumps(document, ensure_ascii=False).encode()  # half a surrogate pair is not text
        # What is just not too deep for the JSON parser can be too deep for the validator that says
        # what is wrong with it.
        error = None if _is_request(document) else _find_error(document)
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


def _is_request(document: object) -> bool:
    op = document.get("op") if isinstance(document, dict) else None
    validator = _BY_OP.get(op) if isinstance(op, str) else None
    return validator is not None and validator.is_valid(document)


def _find_error(document: object) -> jsonschema.ValidationError | None:
    """Return what is wrong with a document, by the whole schema: the error that fits best."""
    error: jsonschema.ValidationError | None = jsonschema.exceptions.best_match(
        _VALIDATOR.iter_errors(document)
    )
    return error


class Server:
    """Answers requests and keeps the containers, by their keys."""

    def __init__(
        self,
        config: Config,
        books: Books,
        runners: dict[str, Runner],
        state: State | None = None,
    ) -> None:
        self.mps: dict[str, Mps] = {}  # by GPU, where it is shared by MPS
        self.versions: dict[str, str | None] = {"driver": None, "cuda": None}
        self._config = config
        self._state = state or State()
        self._books = books
        self._runners = runners
        self.containers: dict[str, Container] = {}
        self.claims: dict[str, Claim] = {}
        self._reserved: dict[str, tuple[tuple[Device, ...], asyncio.TimerHandle]] = {}
        self.tally = Tally()
        self.on_end: Callable[[Container], None] | None = None
        """Called for each container that ends, while the arbiter still knows it."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.settings: Settings | None = None  # None where there are no files to read again

    def configure(self, config: Config) -> None:
        """Put a new configuration in force.

        For containers that run it counts only as far as its options say so.
        """
        self._config = config
        self._books.configure(config)
        for container in self.containers.values():
            container.configure(config)
        for mps in self.mps.values():
            mps.configure(config)

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self._config

    @property
    def books(self) -> Books:
        """The books: what each container has of which GPU."""
        return self._books

    async def adopt(self) -> None:
        """Take over what the previous governor has left, before any request is served."""
        for claim in self._state.claims.values():
            self._adopt_claim(claim)
        for found in find_containers(self._config, self._state, self._books.devices):
            try:
                await self._adopt(found)
            except Exception as e:  # one container must not keep the others from being adopted
                # The container keeps to its quota on its own, as while the governor was away.
                log.exception("container-not-adopted", key=found.remains.key, error=repr(e))
        for claim in list(self.claims.values()):
            if claim.leaving:
                self._strike_claim(claim)  # if the last of its containers has ended meanwhile
        self._state.retry()

    def _adopt_claim(self, claim: Claim) -> None:
        self.claims[claim.uid] = claim
        for uuid in self._books.restore_claim(claim):
            log.error("claim-without-gpu", claim=_called(claim), uid=claim.uid, gpu=uuid)

    def _known_uses(self, found: Found) -> list[tuple[Claim, Share]]:
        """Return the shares that a container uses.

        Claims that the state has lost are recovered from the container's directory.
        """
        for claim in found.claims:
            if claim.uid not in self.claims:
                self._adopt_claim(claim)
                self._state.note_claim(claim)
                log.warning("claim-recovered", claim=_called(claim), uid=claim.uid)
        shares = []
        for uid, name in found.uses:
            claim = self.claims[uid]
            shares.append((claim, next(share for share in claim.shares if share.name == name)))
        return shares

    async def _adopt(self, found: Found) -> None:
        key = found.remains.key
        try:
            shares = self._known_uses(found)
            if shares:
                devices = self._books.named(found.devices)
            else:
                devices = self._books.restore(key, found.quota, found.devices)
            container = Container(
                identifier=found.identifier,
                pidfd=found.pidfd,
                quota=found.quota,
                devices=devices,
                runners=self._runners,
                config=self._config,
                state=self._state,
                remains=found.remains,
                mps=self.mps.get(devices[0].uuid),
                whose=found.whose,
                claims=shares,
            )
        except BaseException:
            self._books.leave(key)
            raise
        self.containers[key] = container
        self._state.note(container.row)
        try:
            await container.listen(self._ended)
        except OSError as e:
            # Its registered processes are known; only new ones cannot reach the governor.
            log.error("container-unreachable", container=found.identifier, error=str(e))
        log.info(
            "container-adopted",
            container=found.identifier,
            key=key,
            processes=sorted(container.pids()),
            **found.quota.describe(),
        )

    async def keep_state(self) -> None:
        """Write what could not be written before, as soon as that is possible."""
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
                task = loop.create_task(self._connection(connection))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
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
                    self._part(container, member, "unconfirmed")
            connection.close()

    async def _answer(
        self, line: bytes, descriptors: list[int], pending: list[Pending]
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
                case "claim":
                    return self._claim(request)
                case "unclaim":
                    return self._unclaim(request["uid"])
                case "claims":
                    return {"ok": True, "claims": self._describe_claims()}
                case "list":
                    listed = [one for c in self.containers.values() for one in c.describe()]
                    return {"ok": True, "containers": listed}
                case "gpus":
                    answer = self._books.describe()
                    for gpu in answer["gpus"]:
                        gpu["containers"] += self._claimants(gpu["uuid"])
                        mps = self.mps.get(gpu["uuid"])
                        gpu["mps"] = None if mps is None else mps.describe()
                        gpu.update(self.scheduling(gpu["uuid"]))
                    return {"ok": True, **answer, **self.versions}
                case "config" if self.settings is not None:
                    return {"ok": True, **await self.settings.describe()}
                case "reload" if self.settings is not None:
                    return {"ok": True, **await self.settings.reload()}
                case "config" | "reload":
                    raise RequestError("this governor reads no file", hint="start another")
                case _:
                    return {"ok": True, "pid": os.getpid(), "version": VERSION}
        except (TidegateError, HookError) as e:
            # `tidegate events` finds the line by the container, and shows the hint.
            about = {"container": request["id"]} if "id" in request else {}
            about |= _pod(request.get("identity", {}))
            if claims := self._named_claims(_uses(request)):
                about["claims"] = claims
            if "uid" in request:
                about = {"uid": request["uid"]}
                if "namespace" in request:
                    about["claim"] = f"{request['namespace']}/{request['name']}"
            if request.get("op") != "reload":  # it has a log event of its own
                log.info("request-refused", **about, code=e.code, message=e.message, hint=e.hint)
            if request.get("op") in ("admit", "reserve"):
                who = str(request.get("id") or find_name("", "", request["identity"]).whole)
                self.tally.refuse(time.time(), who, e.code, e.message, e.hint)
            return {"ok": False, "error": {"code": e.code, "message": e.message, "hint": e.hint}}

    async def _admit(
        self, request: dict[str, Any], descriptors: list[int], pending: list[Pending]
    ) -> dict[str, Any]:
        identifier = request["id"]
        if not descriptors:
            raise RequestError("admit came without a pidfd", hint="send it with SCM_RIGHTS")
        uses = _uses(request)
        known = self._find(identifier)
        if known is not None:
            container, member = known
            if (
                member.confirmed
                and member.is_process(descriptors[0])
                and set(container.uses) == set(uses)
            ):
                # The hook may be entered twice, by two components that each make sure that it is
                # entered, or once for each share of a claim.
                return {**self._grant(container), "already": True}
            if not (uses and member.has_ended()):
                raise RefusedError(
                    f"a container {identifier[:64]!r} is registered already",
                    hint="delete it first, or give this one another name",
                )
            self._part(container, member, "ended")
        parsed = parse_annotations(request["annotations"])
        check_request(parsed, request["annotations"])
        whose = Whose(request["bundle"], request["identity"])
        if uses:
            shares = self._find_shares(uses, request)
            key = uses_key(uses)
            together = self.containers.get(key)
            if together is not None:
                return self._join(together, request, descriptors, pending)
            quotas = merge(shares)
            quota = next(iter(quotas.values()))
            devices = self._books.claimed(shares[0][0], quotas)
        else:
            shares, key = [], container_key(identifier)
            parsed = self._redeem(request, parsed)
            annotated = bool(request["annotations"])
            quota, devices = self._books.admit(key, parsed, _nodes(request), annotated=annotated)
        pidfd = descriptors.pop(0)
        made: Container | None = None
        try:
            made = Container(
                identifier=identifier,
                pidfd=pidfd,
                quota=quota,
                devices=devices,
                runners=self._runners,
                config=self._config,
                state=self._state,
                mps=self.mps.get(devices[0].uuid),
                whose=whose,
                claims=shares,
            )
            self.containers[key] = made
            pending.append((made, made.members[0]))
            # After the directory: one that no row names is examined and removed, but a row that has
            # no directory yet would be taken for damage.
            self._state.put(made.row)
            await made.listen(self._ended)
        except BaseException as e:
            if made is None:
                self._books.leave(key)
            else:
                self._end(made, "failed")
            if not isinstance(e, OSError):
                raise
            raise RefusedError(
                f"the container's directory cannot be made: {e.strerror or e}",
                hint=f"look at {self._config.runtime_dir}",
            ) from e
        self._admitted(made, request)
        return self._grant(made)

    def _join(
        self,
        container: Container,
        request: dict[str, Any],
        descriptors: list[int],
        pending: list[Pending],
    ) -> dict[str, Any]:
        """Add a container to those that use the same shares; it gets what they have."""
        whose = Whose(request["bundle"], request["identity"])
        member = container.join(request["id"], descriptors.pop(0), whose)
        try:
            self._state.put(container.row)
        except StateError:
            container.part(member)
            raise
        pending.append((container, member))
        self._admitted(container, request)
        return self._grant(container)

    def _admitted(self, container: Container, request: dict[str, Any]) -> None:
        self.tally.admitted += 1
        quota = container.quota
        claims = self._named_claims(container.uses)
        log.info(
            "container-admitted",
            container=request["id"],
            key=container.key,
            devices=[device.index for device in container.devices],
            memory=quota.memory,
            compute=quota.compute,
            compute_limit=quota.compute_limit,
            strategy=container.strategy,
            **{"class": quota.work_class},
            **({"claims": claims} if claims else {}),
            **_pod(request["identity"]),
        )

    def scheduling(self, uuid: str) -> dict[str, str]:
        """Return what divides a GPU's time, and why, if that is not what the node asks for."""
        runner = self._runners[uuid]
        return {
            "scheduling": "hardware" if runner.is_steered else "gate",
            "not_steered": runner.not_steered,
        }

    def _named_claims(self, uses: Sequence[Use]) -> list[str]:
        """Return the names of claims; the uid of a claim that is not known."""
        known = (self.claims.get(uid) or uid for uid, _ in uses)
        return sorted({one if isinstance(one, str) else _called(one) for one in known})

    def _find_shares(
        self, uses: Sequence[Use], request: dict[str, Any]
    ) -> list[tuple[Claim, Share]]:
        """Return the shares that a container may use; RefusedError says why it may not."""
        shares = []
        for uid, name in uses:
            claim = self.claims.get(uid)
            if claim is None:
                raise RefusedError(
                    f"claim {uid} is not known to this node's governor",
                    hint="the pod's node driver tells it, see the log of tidegate-dra",
                )
            if claim.leaving:
                raise RefusedError(
                    f"{claim} was taken back, and its last container has not ended",
                    hint="wait until that has ended",
                )
            share = next((one for one in claim.shares if one.name == name), None)
            if share is None:
                raise RefusedError(
                    f"{claim} has no share {name[:64]!r}, it has"
                    f" {', '.join(one.name for one in claim.shares)}",
                    hint="install the same version of hook and node driver",
                )
            namespace = request["identity"].get("namespace", claim.namespace)
            if claim.namespace not in (namespace, NODE):
                raise RefusedError(
                    f"{claim} is not of this container's namespace {namespace[:64]!r}",
                    hint="have the pod use a claim of its own namespace",
                )
            shares.append((claim, share))
        refuse_beside(request["annotations"], " and ".join(sorted({str(c) for c, _ in shares})))
        self._keep_apart(uses)
        return shares

    def _keep_apart(self, uses: Sequence[Use]) -> None:
        """Refuse a container that would combine a share with other shares than its users do now."""
        for container in list(self.containers.values()):
            both = set(container.uses) & set(uses)
            if not both:
                continue
            # A member's end may not have been noticed yet: a pod's containers follow each other
            # closely.
            for member in list(container.members):
                if member.has_ended():
                    self._part(container, member, "ended")
            if container.key not in self.containers or set(container.uses) == set(uses):
                continue
            uid, name = min(both)
            raise RefusedError(
                f"share {name} of {self.claims[uid]} is used by container"
                f" {container.identifier[:64]!r} together with other shares than by this one",
                hint="give each container the same requests of a claim, or none that another has",
            )

    # Claims

    def _claim(self, request: dict[str, Any]) -> dict[str, Any]:
        """Book a claim, in the file before the answer; the same claim again is not an error."""
        claim = parse_claim(request)
        known = self.claims.get(claim.uid)
        check_claim(claim)
        try:
            self._book(claim, known)
        except OccupiedError as e:
            if not e.device:
                raise
            e.hint = self._occupants(e.device, claim.uid)
            if not e.hint:
                # Its own shares together exceed the GPU: no container's end makes room for them.
                raise RefusedError(e.message, hint="ask for less of one GPU") from e
            raise
        if known is None or not known.same(claim):
            log.info(
                "claim-booked" if known is None else "claim-changed",
                claim=_called(claim),
                uid=claim.uid,
                shares=claim.describe()["shares"],
            )
        return {"ok": True, "uid": claim.uid, "shares": self._describe_shares(claim)}

    def _book(self, claim: Claim, known: Claim | None) -> None:
        """Enter a claim in the place of what is known about it; an error changes nothing."""
        if known is not None and known.same(claim):
            if known.leaving:
                # It was taken back too early, or its sender has forgotten that and tells it again.
                self._state.put_claim(claim)
                self.claims[claim.uid] = claim
            return
        if known is None:
            self._part_ended({share.device for share in claim.shares})
            self._books.admit_claim(claim)
            try:
                self._state.put_claim(claim)
            except StateError:
                self._books.leave_claim(claim)
                raise
        else:
            user = self._user_of(claim.uid)
            if user is not None:
                raise OccupiedError(
                    f"{known} is used by container {user.identifier[:64]!r} with {known.amounts()},"
                    f" and cannot be changed to {claim.amounts()}",
                    hint="wait until that has ended",
                )
            self._books.change_claim(known, claim)
            try:
                self._state.put_claim(claim)
            except StateError:
                self._books.leave_claim(claim)
                self._books.restore_claim(known)
                raise
        self.claims[claim.uid] = claim

    def _part_ended(self, devices: set[str]) -> None:
        """Remove members on these GPUs that have ended without being noticed."""
        for container in list(self.containers.values()):
            if any(device.uuid in devices for device in container.devices):
                for member in list(container.members):
                    if member.has_ended():
                        self._part(container, member, "ended")

    def _occupants(self, uuid: str, but: str) -> str:
        """Return what has parts of a GPU besides claim `but`, as a hint; empty if nothing has."""
        ending, booked = [], []
        for claim in list(self.claims.values()):
            quotas = [share.quota for share in claim.shares if share.device == uuid]
            if claim.uid == but or not quotas:
                continue
            user = self._user_of(claim.uid)
            if claim.uid not in self.claims:
                continue  # its last container had ended
            amount = f"{claim} ({' and '.join(words(quota) for quota in quotas)})"
            container = "" if user is None else f"container {user.identifier[:64]!r}"
            if claim.leaving:
                ending.append(f"{amount}, taken back, is free when its {container} has ended")
            else:
                booked.append(f"{amount} has it" + (f" with {container}" if container else ""))
        beside = [
            f"container {one.identifier[:64]!r} ({words(one.quota)}) was started beside the"
            " cluster's scheduler"
            for one in self.containers.values()
            if not one.uses and any(device.uuid == uuid for device in one.devices)
        ]
        found = [*ending, *beside, *booked]
        if not found:
            return ""
        more = [f"{len(found) - MOST_SHOWN} more (tidegate ps)"] if len(found) > MOST_SHOWN else []
        return "wait: " + "; ".join([*found[:MOST_SHOWN], *more])

    def _unclaim(self, uid: str) -> dict[str, Any]:
        """Take a claim back, at once or when its last container has ended."""
        user = self._user_of(uid)
        claim = self.claims.get(uid)
        if claim is None:
            return {"ok": True}
        if user is None:
            self._state.strike_claim(uid)
            del self.claims[uid]
            self._books.leave_claim(claim)
            log.info("claim-released", claim=_called(claim), uid=uid)
        elif not claim.leaving:
            leaving = replace(claim, leaving=True)
            self._state.put_claim(leaving)
            self.claims[uid] = leaving
            log.info("claim-leaving", claim=_called(claim), uid=uid, container=user.identifier)
        return {"ok": True}

    def _user_of(self, uid: str) -> Container | None:
        """Return a container that uses a share of a claim.

        Members that have ended without being noticed are removed first.
        """
        for container in list(self.containers.values()):
            if not any(uid == own for own, _ in container.uses):
                continue
            for member in list(container.members):
                if member.has_ended():
                    self._part(container, member, "ended")
            if container.key in self.containers:
                return container
        return None

    def _strike_claim(self, claim: Claim) -> None:
        """Forget a claim that was taken back, if no container uses it any more."""
        if any(uid == claim.uid for c in self.containers.values() for uid, _ in c.uses):
            return
        del self.claims[claim.uid]
        self._books.leave_claim(claim)
        self._state.leave_claim(claim.uid)
        log.info("claim-released", claim=_called(claim), uid=claim.uid)

    def _describe_claims(self) -> list[dict[str, Any]]:
        """Return what `tidegate claims` shows."""
        return [
            {
                **claim.describe(),
                "leaving": claim.leaving,
                "shares": self._describe_shares(claim),
            }
            for claim in self.claims.values()
        ]

    def _describe_shares(self, claim: Claim) -> list[dict[str, Any]]:
        known = {device.uuid: device for device in self._books.devices}
        shares = []
        for one, share in zip(claim.describe()["shares"], claim.shares, strict=True):
            device = known.get(share.device)
            users = [c for c in self.containers.values() if (claim.uid, share.name) in c.uses]
            used = [
                c.used(i)
                for c in users
                for i, own in enumerate(c.devices)
                if own.uuid == share.device
            ]
            shares.append(
                {
                    **one,
                    "uuid": share.device,
                    "index": device and device.index,
                    "minor": device and device.minor,
                    "memory_used": sum(used),
                    "containers": [m.identifier for c in users for m in c.members],
                }
            )
        return shares

    def _claimants(self, uuid: str) -> int:
        """Return how many containers have their part of a GPU from claims."""
        return sum(
            len(container.members)
            for container in self.containers.values()
            if container.uses and any(device.uuid == uuid for device in container.devices)
        )

    def _grant(self, container: Container) -> dict[str, Any]:
        return {
            "ok": True,
            "key": container.key,
            "directory": str(container.directory),
            "devices": _describe(container.devices),
            **container.quota.describe(),
            "strategy": container.strategy,
        }

    def _reserve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Reserve GPUs for a while, for a container that is being given their device nodes."""
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
            **quota.describe(),
        }

    def _strike(self, token: str) -> tuple[Device, ...]:
        """Remove a reservation from the books; one that is unknown or over is not an error."""
        devices, expiry = self._reserved.pop(token, ((), None))
        if expiry is not None:
            expiry.cancel()
            self._books.leave(_reservation(token))
        return devices

    def _expire(self, token: str) -> None:
        log.warning("reservation-expired", devices=[d.index for d in self._strike(token)])

    def _redeem(self, request: dict[str, Any], parsed: Request) -> Request:
        """Give a container the GPUs that were reserved for it.

        If its reservation is gone, it gets what its device nodes allow: they were written down with
        the reservation.
        """
        devices = self._strike(request.get("reservation", ""))
        if not devices:
            return parsed
        return parsed._replace(devices=tuple(device.uuid for device in devices), gpus=None)

    def _confirm(self, pending: list[Pending]) -> dict[str, Any]:
        container, member = pending[-1] if pending else (None, None)
        if (
            container is None
            or member is None
            or self.containers.get(container.key) is not container
            or member not in container.members
        ):
            raise RequestError("confirm without an admission", hint="send admit first")
        row = container.confirm(member)
        self._state.put(row)
        container.confirmed_as(row)
        return {"ok": True}

    def _find(self, identifier: str) -> tuple[Container, Member] | None:
        """Return a container by its id, or by the name that it has while its id is not known."""
        container = self.containers.get(container_key(identifier))
        if container is not None:
            return container, container.members[0]
        named = (
            (one, member)
            for one in self.containers.values()
            for member in one.members
            if member.identifier == identifier
        )
        return next(named, None)

    def _release(self, identifier: str) -> dict[str, Any]:
        found = self._find(identifier)
        # Another engine's container of the same id may run: only its process says that it has
        # ended.
        if found is not None and found[1].has_ended():
            self._part(*found, "released")
        return {"ok": True}

    def _set(self, request: dict[str, Any]) -> dict[str, Any]:
        found = self._find(request["id"])
        if found is None:
            raise RefusedError(
                f"no container {request['id'][:64]!r} shares a GPU of this node",
                hint="tidegate ps lists them",
            )
        container, _ = found
        if container.claims:
            raise RefusedError(
                f"the container has its quota from {container.claims[0][0]}",
                hint="have the pod use another claim",
            )
        old = container.quota
        quota = Quota(
            request.get("memory", old.memory),
            request.get("compute", old.compute),
            request.get("compute_limit", _limit_after(request, old)),
            request.get("class", old.work_class),
        )
        used = max(container.used(i) for i in range(len(container.devices)))
        if quota.memory < min(used, old.memory):
            whole = quota.memory >= MIB
            asked = f"{quota.memory // MIB} MiB" if whole else f"{quota.memory} bytes"
            raise RefusedError(
                f"the container uses {-(-used // MIB)} MiB, {asked} were asked for",
                hint="ask for more, or wait until it has given memory back"
                if whole
                else f"write it like {-(-used // MIB)}Mi",
            )
        self._books.change(container.key, quota)
        try:
            # Before the grant page, which is what counts after a restart.
            self._state.put(replace(container.row, quota=quota))
        except StateError:
            self._books.change(container.key, old)
            raise
        container.set_quota(quota)
        log.info("quota-changed", container=container.identifier, **quota.describe())
        return {"ok": True, **quota.describe()}

    def mps_event(self, mps: Mps, event: Event) -> None:
        """Handle what happened to a GPU's MPS server, and tell the containers that share it."""
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
                # A container must not learn which the others are.
                own = by == container.identifier
                said = "a process of this container" if own else "a process of some container"
                what = f"{said} had a fatal fault" if event.kind == "fault" else "the server ended"
                container.tell_mps(Event(event.kind, f"{what}; start what used the GPU again"))

    def mps_used(self, mps: Mps) -> bool:
        """Return whether any container has the GPU."""
        return any(mps.device in container.devices for container in self.containers.values())

    def _ended(self, container: Container, member: Member) -> None:
        self._part(container, member, "ended")

    def _part(self, container: Container, member: Member, why: str) -> None:
        """Remove one member; with the last one goes what the members had."""
        if self.containers.get(container.key) is not container or member not in container.members:
            return
        if len(container.members) == 1:
            self._end(container, why)
            return
        container.part(member)
        self._state.note(container.row)
        log.info("container-ended", container=member.identifier, key=container.key, why=why)

    def _end(self, container: Container, why: str) -> None:
        if self.containers.get(container.key) is not container:
            return
        del self.containers[container.key]
        self._books.leave(container.key)
        self.tally.container_ended(container)
        if self.on_end is not None:
            self.on_end(container)
        container.close()
        log.info("container-ended", container=container.identifier, why=why)
        for uid in {uid for uid, _ in container.uses}:
            claim = self.claims.get(uid)
            if claim is not None and claim.leaving:
                self._strike_claim(claim)

    def close(self) -> None:
        """Let go of every container; those that run keep to their quota on their own."""
        for container in list(self.containers.values()):
            for member in list(container.members):
                if not member.confirmed:
                    self._part(container, member, "stopping")
            if container.key in self.containers:
                del self.containers[container.key]
                container.close(keep=True)


def _called(claim: Claim) -> str:
    return f"{claim.namespace}/{claim.name}"


def _pod(identity: Mapping[str, str]) -> dict[str, str]:
    """Return the pod that a container belongs to, for the log; empty outside of Kubernetes."""
    pod, namespace = identity.get("pod"), identity.get("namespace", "")
    return {"pod": f"{namespace}/{pod}"} if pod else {}


def _uses(request: dict[str, Any]) -> tuple[Use, ...]:
    """Return the shares that an admission names, each once."""
    return tuple(
        dict.fromkeys(
            (one["uid"], name) for one in request.get("claims", ()) for name in one["shares"]
        )
    )


def _reservation(token: str) -> str:
    """Return the name of a reservation in the books, which no container's key can equal."""
    return f"reservation {token}"


def _nodes(request: dict[str, Any]) -> Nodes:
    return Nodes(frozenset(request.get("nodes", ())), request.get("exact", False))


def _describe(devices: Sequence[Device]) -> list[dict[str, Any]]:
    return [{"uuid": d.uuid, "index": d.index, "minor": d.minor} for d in devices]


def _limit_after(request: dict[str, Any], old: Quota) -> int:
    """Return the limit for a request that names none: a strict container stays strict."""
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
