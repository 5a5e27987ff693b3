"""Prepares claims and takes them back; whoever asks twice, or dies in between, changes nothing.

The order is the same both ways: the governor first, which writes before it answers, then the CDI
file. So a file never says more than the governor knows, and what is missing is made when the
kubelet asks again, which it does until it has an answer.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import structlog

from governor.cdi import HOOK
from governor.errors import TidegateError
from kube.cdi import Directory, make_spec
from kube.claims import Claim, Reference, read_claim
from kube.errors import CdiError, ClusterError, SocketError
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
        self._locks: dict[str, tuple[threading.Lock, int]] = {}
        self._guard = threading.Lock()

    @contextlib.contextmanager
    def _alone(self, uid: str) -> Iterator[None]:
        """Let one thread at a time work on a claim."""
        with self._guard:
            lock, users = self._locks.get(uid, (threading.Lock(), 0))
            self._locks[uid] = (lock, users + 1)
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

        `require_wanted` raises one where whoever asked has given up. He may have asked for something
        else meanwhile, so it is called when it is this call's turn.
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
        # Whoever does not reach the API server cannot write an event there, and a call that came too
        # late says nothing of the claim.
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
        removed = self._directory.remove(uid)
        log.info("claim-taken-back", uid=uid, claim=name, why=why, cdi=removed)

    def reconcile(self) -> None:
        """Take back what nobody will: of claims that the governor or the cluster does not know.

        A TidegateError says who did not answer; what was not looked at is left as it is.
        """
        known = {str(claim["uid"]) for claim in self._governor.claims()}
        for uid in sorted(self._directory.uids() - known):
            with self._alone(uid):
                # Somebody may have prepared it meanwhile.
                if uid not in {str(claim["uid"]) for claim in self._governor.claims()}:
                    self._directory.remove(uid)
                    log.info("cdi-left-over", uid=uid)
        for claim in self._governor.claims():
            reference = Reference(str(claim["namespace"]), str(claim["name"]), str(claim["uid"]))
            with self._alone(reference.uid):
                why = self._is_gone(reference)
                if why:
                    self._take_back(reference.uid, why, str(reference))

    def _is_gone(self, reference: Reference) -> str | None:
        try:
            document = self._cluster.claim(reference.namespace, reference.name)
        except ClusterError as e:
            if e.http == 404:
                return "the cluster has no such claim"
            raise
        if (document.get("metadata") or {}).get("uid") != reference.uid:
            return "another claim has its name"
        if not (document.get("status") or {}).get("allocation"):
            return "it is not allocated any more"
        return None
