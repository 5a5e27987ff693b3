"""Prepares claims for the kubelet and takes them back.

Calls are idempotent and may be interrupted. In both directions the governor, which writes its state
before it answers, comes first, and then the CDI file. A file is thus written only for a claim that
the governor knows, and a missing one is created when the kubelet asks again. A file that is left
over from a claim that was taken back is of no use, because the governor no longer knows the claim,
and is removed when the kubelet asks again or the claims are reconciled.

A kubelet that was refused asks again only at the pod's next resync, 60 to 90 s later. Therefore a
call waits for temporary conditions to pass: a governor or an API server that is being restarted, or
a previous container that is still ending. It waits without a lock, so that other calls proceed,
even those for the same claim.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from governor.cdi import HOOK
from governor.errors import GovernorError, OccupiedError, TidegateError
from kube.cdi import Directory, make_spec
from kube.claims import AllocatedClaim, Reference, read_claim
from kube.errors import CdiError, ClusterError, SocketError
from kube.names import DRIVER
from kube.slices import device_name
from oci_hook.errors import HookError

log = structlog.get_logger()

MAX_WAIT_S = 40.0
"""Longest time in seconds that a call waits; the kubelet's timeout is 45 s."""
PAUSE_S, MAX_PAUSE_S = 0.1, 1.0
"""First and longest pause between two attempts of a call that waits, in seconds."""
MAX_WAITING = 192
"""Maximum number of calls that wait. Each occupies a thread of the server, as other calls do."""


@dataclass(frozen=True)
class CallContext:
    """The properties of a call that the driver needs; by default the call does not wait."""

    check: Callable[[], None] = lambda: None
    """Raises a TidegateError if the caller has given up."""
    left: Callable[[], float] = lambda: 0.0
    """Returns the number of seconds that the call may wait."""
    when_ended: Callable[[Callable[[], None]], object] = lambda _tell: None
    """Takes a function that is called when the call ends."""


class _Waiter:
    """A call in progress that prepares a claim."""

    def __init__(self) -> None:
        self.overtaken = False
        """Whether a call to take the claim back came after this call had begun."""


class ClaimGovernor(Protocol):
    """The driver's requests to the node's governor (`kube.node.NodeClient`)."""

    def gpus(self) -> dict[str, Any]:
        """Return the GPUs that are shared."""

    def claim(self, claim: dict[str, Any]) -> list[dict[str, Any]]:
        """Announce a claim and return its shares with their GPUs."""

    def unclaim(self, uid: str) -> None:
        """Withdraw a claim."""

    def claims(self) -> list[dict[str, Any]]:
        """Return the announced claims."""


class Claims(Protocol):
    """The driver's requests to the API server."""

    def claim(self, namespace: str, name: str) -> dict[str, Any]:
        """Return a ResourceClaim."""


class Refusals(Protocol):
    """Receives the driver's refusals (`kube.announce`)."""

    def refused(
        self, reference: Reference, document: dict[str, Any] | None, error: TidegateError
    ) -> None:
        """Record that a claim was refused."""

    def waits(
        self,
        reference: Reference,
        document: dict[str, Any] | None,
        error: TidegateError,
        seconds: float,
    ) -> None:
        """Record that a claim has not been prepared yet, and is retried for `seconds`."""


class ClaimDriver:
    """Prepares the claims of one node."""

    def __init__(
        self,
        node_name: str,
        governor: ClaimGovernor,
        cluster: Claims,
        directory: Directory,
        refusals: Refusals | None = None,
        *,
        hook: str = HOOK,
        hook_arguments: Sequence[str] = (),
        dev_dir: str = "/dev",
        hold: Callable[
            [str, Callable[[], None]], contextlib.AbstractContextManager[None]
        ] = lambda _uid, _check: contextlib.nullcontext(),
        others: Callable[[], bool] = lambda: False,
        again: Callable[[Reference, dict[str, Any] | None], None] = lambda _r, _d: None,
    ) -> None:
        """Start without claims; `hold` and `others` concern the node's other drivers.

        `hold` keeps them from working on a claim, and `others` returns whether one of them was seen
        recently (`kube.instances`). `again` is called for claims that were refused for a reason
        that may pass (`kube.resync`).
        """
        self._node_name = node_name
        self._governor = governor
        self._cluster = cluster
        self._directory = directory
        self._refusals = refusals
        self._hook = hook
        self._hook_arguments = tuple(hook_arguments)
        self._dev_dir = dev_dir
        self._hold = hold
        self._others = others
        self._again = again
        self._answered: set[str] = set()
        """Uids of claims that this process prepared at the kubelet's request."""
        self._prepared: dict[str, Reference] = {}
        """The prepared claims, by uid; the governor has to know all of them."""
        self.entered: frozenset[str] = frozenset()
        """Uids of the claims that the governor had at the last call to `differs`, except those that
        it was removing."""
        self._calls = 0
        self._locks: dict[str, tuple[threading.Lock, int]] = {}
        self._guard = threading.Lock()
        self._changed = threading.Condition()
        """Notified when the condition that makes a call wait may have passed.

        It guards the next two attributes.
        """
        self._waiters: dict[str, set[_Waiter]] = {}
        self._waiting = 0

    @contextlib.contextmanager
    def _alone(self, uid: str, check: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Let one thread at a time work on a claim, across all drivers of the node."""
        with self._guard:
            lock, users = self._locks.get(uid, (threading.Lock(), 0))
            self._locks[uid] = (lock, users + 1)
            self._calls += 1
        try:
            with lock, self._hold(uid, check):
                yield
        finally:
            with self._guard:
                lock, users = self._locks[uid]
                if users == 1:
                    del self._locks[uid]
                else:
                    self._locks[uid] = (lock, users - 1)

    def prepare(self, reference: Reference, call: CallContext = CallContext()) -> AllocatedClaim:
        """Make a claim ready for the containers that use it; raise a TidegateError on failure.

        If the caller has given up, or a later call takes the claim back, nothing is changed.
        """
        document: dict[str, Any] | None = None
        begun = time.monotonic()
        until = begun + min(MAX_WAIT_S, call.left())
        pause, said = PAUSE_S, False
        with self._entered_waiter(reference.uid) as waiter:
            call.when_ended(self._wake)
            while True:
                try:
                    reference.check()
                    with self._alone(reference.uid, call.check):
                        self._require_wanted(reference, call, waiter)
                        if document is None:
                            document = self._cluster.claim(reference.namespace, reference.name)
                        claim = self._prepare(reference, document, time.monotonic() - begun)
                        self._answered.add(reference.uid)
                        return claim
                except (HookError, TidegateError) as e:
                    error = _explain(reference, e)
                    left = until - time.monotonic()
                    with self._wait_for(error, left) as may:
                        if may:
                            if not said:
                                said = True
                                self._say_waits(reference, document, error, left)
                            self._pause(waiter, min(pause * random.uniform(0.7, 1.0), left))  # noqa: S311
                            pause = min(pause * 2, MAX_PAUSE_S)
                            continue
                    self._refuse(reference, document, error)
                    if said and _may_pass(error):  # only after a wait, which prevents a busy loop
                        self._again(reference, document)
                    if error is e:
                        raise
                    raise error from e

    @contextlib.contextmanager
    def _entered_waiter(self, uid: str) -> Iterator[_Waiter]:
        """Register a call that prepares a claim, so that a call that takes it back can find it."""
        waiter = _Waiter()
        with self._changed:
            self._waiters.setdefault(uid, set()).add(waiter)
        try:
            yield waiter
        finally:
            with self._changed:
                self._waiters[uid].discard(waiter)
                if not self._waiters[uid]:
                    del self._waiters[uid]

    def _require_wanted(self, reference: Reference, call: CallContext, waiter: _Waiter) -> None:
        call.check()
        if waiter.overtaken:
            raise SocketError(
                f"{reference}: the kubelet has taken it back in the meantime",
                hint="the kubelet retries",
            )

    @contextlib.contextmanager
    def _wait_for(self, error: TidegateError, left: float) -> Iterator[bool]:
        """Yield whether a call may wait for an error to pass; in the block it counts as waiting."""
        with self._changed:
            may = left > 0 and _may_pass(error) and self._waiting < MAX_WAITING
            self._waiting += may
        try:
            yield may
        finally:
            with self._changed:
                self._waiting -= may

    def _pause(self, waiter: _Waiter, seconds: float) -> None:
        with self._changed:
            if not waiter.overtaken:
                self._changed.wait(seconds)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _say_waits(
        self,
        reference: Reference,
        document: dict[str, Any] | None,
        error: TidegateError,
        left: float,
    ) -> None:
        log.info(
            "claim-waits",
            claim=reference.name,
            namespace=reference.namespace,
            uid=reference.uid,
            code=error.code,
            message=error.message,
            hint=error.hint,
            seconds=round(left, 1),
        )
        if self._refusals is not None and not isinstance(error, ClusterError):
            self._refusals.waits(reference, document, error, left)

    def _prepare(
        self, reference: Reference, document: dict[str, Any], waited: float = 0.0
    ) -> AllocatedClaim:
        gpus = self._governor.gpus()["gpus"]
        devices = {device_name(gpu["uuid"]): str(gpu["uuid"]) for gpu in gpus}
        claim = read_claim(document, reference, self._node_name, devices)
        entered = self._governor.claim(claim.describe())
        spec = make_spec(
            claim,
            {share["uuid"]: share.get("minor") for share in entered},
            hook=self._hook,
            arguments=self._hook_arguments,
            dev_dir=self._dev_dir,
        )
        written = self._directory.write(reference.uid, spec)
        self._prepared[reference.uid] = reference
        log.info(
            "claim-prepared",
            claim=reference.name,
            namespace=reference.namespace,
            uid=reference.uid,
            again=not written,
            seconds=round(waited, 3),
            shares=[
                {"name": s.name, "device": s.device, "memory": s.memory, "compute": s.compute}
                for s in claim.shares
            ],
        )
        return claim

    def _refuse(
        self, reference: Reference, document: dict[str, Any] | None, error: TidegateError
    ) -> None:
        log.warning(
            "claim-refused",
            claim=reference.name,
            namespace=reference.namespace,
            uid=reference.uid,
            code=error.code,
            message=error.message,
            hint=error.hint,
        )
        # Without the API server no event can be written, and a call that came too late is no
        # reason to report anything about the claim.
        if self._refusals is not None and not isinstance(error, ClusterError | SocketError):
            self._refusals.refused(reference, document, error)

    def unprepare(self, reference: Reference, call: CallContext = CallContext()) -> None:
        """Take a claim back; it is not an error if it was never prepared.

        Calls that have begun to prepare it fail without preparing it.
        """
        reference.check()
        with self._changed:
            for waiter in self._waiters.get(reference.uid, ()):
                waiter.overtaken = True
            self._changed.notify_all()
        with self._alone(reference.uid, call.check):
            call.check()
            self._take_back(reference.uid, "unprepared", str(reference))
        self._wake()  # a waiting claim may fit now

    def _take_back(self, uid: str, why: str, name: str = "") -> None:
        self._governor.unclaim(uid)
        self._prepared.pop(uid, None)
        self._answered.discard(uid)
        removed = self._directory.remove(uid)
        log.info("claim-taken-back", uid=uid, claim=name, why=why, cdi=removed)

    def was_asked(self, uid: str) -> bool:
        """Return whether this process prepared the claim for a kubelet, or is working on it."""
        with self._changed:
            return uid in self._answered or uid in self._waiters

    @property
    def idle(self) -> bool:
        """Whether no call is working on a claim or waiting."""
        with self._guard, self._changed:
            return not self._locks and not self._waiters

    def differs(self) -> bool:
        """Return whether the state differs from the state that the kubelet last got.

        The claims in the governor differ after this driver has started, after the governor has lost
        its database, or if another driver of the node was called. The result is also True if the
        CDI file of a claim is missing, and False while a call is working on a claim. Raise
        TidegateError if the governor does not answer.
        """
        with self._guard:
            calls, idle = self._calls, not self._locks
        claims = self._governor.claims()
        known = self.entered = frozenset(str(one["uid"]) for one in claims if not _leaves(one))
        files = self._directory.uids()
        with self._guard:
            if not idle or calls != self._calls:
                return False
            return known != set(self._prepared) or not files.issuperset(self._prepared)

    def reconcile(self) -> None:
        """Take back leftover claims and prepare lost ones again, according to the cluster.

        A claim is lost if the governor has forgotten it or its file was removed: while a pod has
        its sandbox, the kubelet does not ask again. After a TidegateError, claims that were not
        examined by then are unchanged.
        """
        failed: TidegateError | None = None
        entered = {str(claim["uid"]) for claim in self._governor.claims()}
        for uid in sorted(entered | set(self._prepared) | self._directory.uids()):
            try:
                with self._alone(uid):
                    self._settle(uid)
            except (CdiError, ClusterError) as e:
                if isinstance(e, ClusterError) and not e.http:
                    raise  # the API server does not answer, so the other claims would fail, too
                failed = e  # the other claims are settled nevertheless
        if failed is not None:
            raise failed

    def _settle(self, uid: str) -> None:
        """Bring one claim into line with its state in the cluster."""
        # A call may have prepared the claim, or taken it back, since the claim was listed.
        entered = self._entered(uid)
        reference = self._prepared.get(uid)
        undone = entered is None and not self._directory.has(uid) and self._others()
        if reference is not None and (undone or (entered is not None and _leaves(entered))):
            # The kubelet called another driver of the node to take it back.
            log.info("claim-taken-back", uid=uid, claim=str(reference), why="by another driver")
            del self._prepared[uid]
            reference = None
        if reference is None and (entered is None or _leaves(entered)):
            if self._directory.remove(uid):
                log.info("cdi-left-over", uid=uid)
            return
        if reference is None and entered is not None:
            reference = Reference(str(entered["namespace"]), str(entered["name"]), uid)
        assert reference is not None  # noqa: S101 - one of the two is set
        document, why = self._look_up(reference)
        if why:
            self._take_back(uid, why, str(reference))
        elif entered is None or uid not in self._prepared or not self._directory.has(uid):
            self._prepare_again(reference, document)

    def _prepare_again(self, reference: Reference, document: dict[str, Any]) -> None:
        try:
            self._prepare(reference, document)
        except (ClusterError, GovernorError):
            raise
        except (TidegateError, HookError) as e:
            error = _explain(reference, e)
            self._refuse(reference, document, error)
            # A refused claim stays as it is until the kubelet asks again.
            if self._entered(reference.uid) is None:
                self._prepared.pop(reference.uid, None)
            else:
                self._prepared[reference.uid] = reference
            if isinstance(error, CdiError):
                raise error from e

    def _entered(self, uid: str) -> dict[str, Any] | None:
        """Return what the governor knows about a claim, or None if it does not have the claim."""
        return next((one for one in self._governor.claims() if str(one["uid"]) == uid), None)

    def _look_up(self, reference: Reference) -> tuple[dict[str, Any], str]:
        """Return a claim and the reason not to prepare it here; "" if it is to be prepared."""
        try:
            document = self._cluster.claim(reference.namespace, reference.name)
        except ClusterError as e:
            if e.http == 404:
                return {}, "the cluster has no such claim"
            raise
        if _mapping(document.get("metadata")).get("uid") != reference.uid:
            return document, "another claim has its name"
        allocation = _mapping(_mapping(document.get("status")).get("allocation"))
        if not allocation:
            return document, "it is no longer allocated"
        results = _mapping(allocation.get("devices")).get("results")
        pools = {
            one.get("pool")
            for one in (results if isinstance(results, list) else ())
            if isinstance(one, dict) and one.get("driver") == DRIVER
        }
        if self._node_name not in pools:
            return document, "it is allocated to another node"
        return document, ""


def _explain(reference: Reference, e: TidegateError | HookError) -> TidegateError:
    """Return the error with the claim's name in its message."""
    if isinstance(e, HookError):  # a device node that the host does not have
        return CdiError(f"{reference}: {e.message}", hint=e.hint)
    if str(reference) not in e.message:  # an error about a socket or a file
        e.message = f"{reference}: {e.message}"
    return e


def _may_pass(error: TidegateError) -> bool:
    """Return whether the cause may go away soon without action by an operator."""
    if isinstance(error, ClusterError):
        return error.http in (0, 429) or error.http >= 500
    return isinstance(error, GovernorError | OccupiedError)


def _leaves(claim: Mapping[str, Any]) -> bool:
    return bool(claim.get("leaving"))


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
