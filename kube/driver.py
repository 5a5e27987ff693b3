"""Prepares claims and takes them back; whoever asks twice, or dies in between, changes nothing.

The order is the same both ways: the governor first, which writes before it answers, then the CDI
file. So a file never says more than the governor knows, and what is missing is made when the
kubelet asks again, which it does until it has an answer.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import structlog

from governor.cdi import HOOK
from governor.errors import GovernorError, TidegateError
from kube.cdi import Directory, make_spec
from kube.claims import Claim, Reference, read_claim
from kube.errors import CdiError, ClusterError, SocketError
from kube.names import DRIVER
from kube.slices import device_name
from oci_hook.errors import HookError

log = structlog.get_logger()


class Governor(Protocol):
    """What a driver asks of the node's governor (`kube.node.Node`)."""

    def gpus(self) -> dict[str, Any]:
        """Return the GPUs that are shared."""

    def claim(self, claim: dict[str, Any]) -> list[dict[str, Any]]:
        """Enter a claim and return its shares with their GPUs."""

    def unclaim(self, uid: str) -> None:
        """Take a claim back."""

    def claims(self) -> list[dict[str, Any]]:
        """Return the claims that are entered."""


class Claims(Protocol):
    """What a driver asks of the API server."""

    def claim(self, namespace: str, name: str) -> dict[str, Any]:
        """Return a ResourceClaim."""


class Refusals(Protocol):
    """Who is told of refusals."""

    def refused(
        self, reference: Reference, document: dict[str, Any] | None, error: TidegateError
    ) -> None:
        """A claim was refused."""


class Driver:
    """One node's claims."""

    def __init__(
        self,
        node_name: str,
        governor: Governor,
        cluster: Claims,
        directory: Directory,
        refusals: Refusals | None = None,
        *,
        hook: str = HOOK,
        hook_arguments: Sequence[str] = (),
        dev_dir: str = "/dev",
    ) -> None:
        self._node_name = node_name
        self._governor = governor
        self._cluster = cluster
        self._directory = directory
        self._refusals = refusals
        self._hook = hook
        self._hook_arguments = tuple(hook_arguments)
        self._dev_dir = dev_dir
        self._prepared: dict[str, Reference] = {}
        """What the kubelet was answered, and so what the governor has to know: by uid."""
        self._calls = 0
        self._locks: dict[str, tuple[threading.Lock, int]] = {}
        self._guard = threading.Lock()

    @contextlib.contextmanager
    def _alone(self, uid: str) -> Iterator[None]:
        """Let one thread at a time work on a claim."""
        with self._guard:
            lock, users = self._locks.get(uid, (threading.Lock(), 0))
            self._locks[uid] = (lock, users + 1)
            self._calls += 1
        try:
            with lock:
                yield
        finally:
            with self._guard:
                lock, users = self._locks[uid]
                if users == 1:
                    del self._locks[uid]
                else:
                    self._locks[uid] = (lock, users - 1)

    def prepare(
        self, reference: Reference, require_wanted: Callable[[], None] = lambda: None
    ) -> Claim:
        """Have a claim ready for the containers that use it; a TidegateError says why it is not.

        `require_wanted` raises one where whoever asked has given up. He may have asked for another
        thing meanwhile, so it is called when it is this call's turn.
        """
        document: dict[str, Any] | None = None
        try:
            reference.check()
            with self._alone(reference.uid):
                require_wanted()
                document = self._cluster.claim(reference.namespace, reference.name)
                return self._prepare(reference, document)
        except HookError as e:  # a device node that the host does not have
            error = CdiError(f"{reference}: {e.message}", hint=e.hint)
            self._refuse(reference, document, error)
            raise error from e
        except TidegateError as e:
            if str(reference) not in e.message:  # a socket or a file is at fault
                e.message = f"{reference}: {e.message}"
            self._refuse(reference, document, e)
            raise

    def _prepare(self, reference: Reference, document: dict[str, Any]) -> Claim:
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
        # Whoever does not reach the API server cannot write an event there, and a call that came
        # too late says nothing of the claim.
        if self._refusals is not None and not isinstance(error, ClusterError | SocketError):
            self._refusals.refused(reference, document, error)

    def unprepare(
        self, reference: Reference, require_wanted: Callable[[], None] = lambda: None
    ) -> None:
        """Take a claim back; one that was never prepared is no error."""
        reference.check()
        with self._alone(reference.uid):
            require_wanted()
            self._take_back(reference.uid, "unprepared", str(reference))

    def _take_back(self, uid: str, why: str, name: str = "") -> None:
        self._governor.unclaim(uid)
        self._prepared.pop(uid, None)
        removed = self._directory.remove(uid)
        log.info("claim-taken-back", uid=uid, claim=name, why=why, cdi=removed)

    def differs(self) -> bool:
        """Return whether the governor knows other claims than the kubelet was answered.

        So it is after a start of ours, or when the governor has lost its file. Nothing is said
        while somebody works on a claim. A TidegateError says why the governor does not answer.
        """
        with self._guard:
            calls, idle = self._calls, not self._locks
        known = {str(claim["uid"]) for claim in self._governor.claims() if not _leaves(claim)}
        with self._guard:
            return idle and calls == self._calls and known != set(self._prepared)

    def reconcile(self) -> None:
        """Take back what nobody will, and prepare again what was lost, as the cluster says.

        Lost is what the governor has forgotten, or a file that somebody removed: as long as a pod's
        sandbox is there no kubelet asks again. A TidegateError says what went wrong; what was not
        looked at is left as it is.
        """
        failed: TidegateError | None = None
        entered = {str(claim["uid"]) for claim in self._governor.claims()}
        for uid in sorted(entered | set(self._prepared) | self._directory.uids()):
            try:
                with self._alone(uid):
                    self._settle(uid)
            except (CdiError, ClusterError) as e:
                if isinstance(e, ClusterError) and not e.http:
                    raise  # nor will it answer for the others
                failed = e  # this one keeps nobody from the others
        if failed is not None:
            raise failed

    def _settle(self, uid: str) -> None:
        """Have one claim be what the cluster says of it."""
        # Somebody may have prepared it, or taken it back, since it was listed.
        entered = self._entered(uid)
        reference = self._prepared.get(uid)
        if reference is None and (entered is None or _leaves(entered)):
            if self._directory.remove(uid):
                log.info("cdi-left-over", uid=uid)
            return
        if reference is None and entered is not None:
            reference = Reference(str(entered["namespace"]), str(entered["name"]), uid)
        assert reference is not None  # noqa: S101 - one of both is there
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
            # A device node that the host does not have.
            error = (
                CdiError(f"{reference}: {e.message}", hint=e.hint)
                if isinstance(e, HookError)
                else e
            )
            self._refuse(reference, document, error)
            # What is refused stays as it is until the kubelet asks.
            if self._entered(reference.uid) is None:
                self._prepared.pop(reference.uid, None)
            else:
                self._prepared[reference.uid] = reference
            if isinstance(error, CdiError):
                raise error from e

    def _entered(self, uid: str) -> dict[str, Any] | None:
        """Return what the governor knows of a claim."""
        return next((one for one in self._governor.claims() if str(one["uid"]) == uid), None)

    def _look_up(self, reference: Reference) -> tuple[dict[str, Any], str]:
        """Return a claim, and why it is not to be prepared here, empty where it is."""
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
            return document, "it is not allocated any more"
        results = _mapping(allocation.get("devices")).get("results")
        pools = {
            one.get("pool")
            for one in (results if isinstance(results, list) else ())
            if isinstance(one, dict) and one.get("driver") == DRIVER
        }
        if self._node_name not in pools:
            return document, "it is allocated to another node"
        return document, ""


def _leaves(claim: Mapping[str, Any]) -> bool:
    return bool(claim.get("leaving"))


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
