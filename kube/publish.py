"""Keeps the node's ResourceSlice up to date with as few requests as possible.

Nothing is written while nothing changes. The stored slice is read back: a cluster that drops the
fields needed to share devices gets no slice, because its scheduler would give a whole GPU to one
claim, contrary to the node's quotas.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import structlog

from kube.errors import ClusterError, GateError
from kube.recheck import ANNOTATION
from kube.slices import normalised

log = structlog.get_logger()

INTERVAL_S = 6.0
"""Minimum interval between two writes, in seconds; the next write contains all changes made up
to then."""
WATCH_S = 540
"""Duration of one watch request, in seconds."""
OWN = 16
"""Number of resource versions, written or read, that are kept, because their events may still
arrive."""
PACE_S = 1.0
"""Pause in seconds after a change to the slice by another client."""
GATE = GateError(
    "the API server drops allowMultipleAllocations or requestPolicy from ResourceSlices: its"
    " feature gate DRAConsumableCapacity is off",
    hint="turn it on (in Kubernetes 1.36 it is on by default), or run the device plugin instead"
    " (docs/howto/kubernetes.md); no GPU was offered",
)


class Slices(Protocol):
    """The publisher's requests to the API server (`kube.cluster.Cluster`)."""

    def slice(self, name: str) -> dict[str, Any] | None:
        """Return a slice, or None if it does not exist."""

    def create_slice(self, body: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Create a slice and return what is stored."""

    def replace_slice(self, body: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Replace a slice and return what is stored."""

    def delete_slice(self, name: str) -> None:
        """Delete a slice."""


class Publisher:
    """Writes one slice; `forget` is called when another client may have changed it."""

    def __init__(
        self,
        cluster: Slices,
        *,
        interval: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._interval = interval
        self._clock = clock
        self._stale = threading.Event()
        self._stale.set()
        self._shown: dict[str, Any] | None = None
        self._written: float | None = None
        self._probed = False
        self._keeps_taints = True
        self._lock = threading.Lock()
        """Held from before a write until the written version is known."""
        self._own: deque[str] = deque(maxlen=OWN)
        self.version = ""
        """The last known resource version of the stored slice."""
        self.mark = ""
        """The last known mark of the stored slice (`kube.recheck`)."""

    @property
    def current(self) -> bool:
        """Whether the API server has this driver's slice, as far as is known."""
        return self._shown is not None and not self._stale.is_set()

    def is_own(self, version: str) -> bool:
        """Return whether a version of the slice was written or already read by this publisher.

        The event of a write can arrive before the answer to the write, so this waits for the
        answer.
        """
        with self._lock:
            return version in self._own

    def forget(self) -> None:
        """Read the stored slice before the next decision."""
        self._stale.set()

    def publish(self, wanted: dict[str, Any]) -> bool:
        """Make the API server store this slice; return whether anything was written.

        If the slice has no mark (`kube.recheck`), the stored mark stays. Raise ClusterError if the
        API server does not answer or another write came first; the caller has to retry. Raise
        GateError if the cluster cannot share devices; no slice is stored in that case.
        """
        body = self._shape(wanted)
        shown = self._comparable(body)
        if not self._stale.is_set():
            if shown == self._shown and _mark(body) in (None, self.mark):
                return False
            if self._written is not None and self._clock() - self._written < self._interval:
                return False
        self._stale.clear()
        try:
            with self._lock:
                return self._write(body, shown)
        except BaseException:
            self._stale.set()
            raise

    def _write(self, body: dict[str, Any], shown: dict[str, Any]) -> bool:
        name = body["metadata"]["name"]
        stored = self._cluster.slice(name)
        if stored is not None:
            self._check(stored, name)
            mark = _mark(body)
            if self._comparable(stored) != shown:
                body = _succeed(body, stored)
            elif mark in (None, _mark(stored)):
                self._note(stored, shown)
                return False
            else:  # the devices stay unchanged, and so does the generation
                body = _with_mark(stored, mark)
        write = self._cluster.create_slice if stored is None else self._cluster.replace_slice
        if not self._probed:
            # Check a dry run first, so that the scheduler never sees a slice without sharing.
            self._check(write(body, dry_run=True), name if stored is not None else None)
            self._probed = True
        result = write(body)
        self._check(result, name)
        self._written = self._clock()
        if self._keeps_taints and _taints(body) and not _taints(result):
            self._keeps_taints = False
            log.warning(
                "taints-dropped",
                message="the API server drops device taints: its feature gate DRADeviceTaints is"
                " off; GPUs that accept no containers are left out of the ResourceSlice instead",
            )
            self._note(result, self._comparable(result))
            self._stale.set()
            return True
        self._note(result, shown)
        log.info(
            "slice-written",
            slice=name,
            generation=result["spec"]["pool"]["generation"],
            mark=self.mark,
            devices=len(result["spec"].get("devices") or ()),
            taints=_taints(result),
        )
        return True

    def _shape(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if self._keeps_taints:
            return wanted
        devices = [one for one in wanted["spec"]["devices"] if not one.get("taints")]
        return {**wanted, "spec": {**wanted["spec"], "devices": devices}}

    def _comparable(self, body: Mapping[str, Any]) -> dict[str, Any]:
        owners = (body.get("metadata") or {}).get("ownerReferences") or ()
        return {
            "owners": sorted(str(owner.get("uid")) for owner in owners),
            **normalised(body.get("spec") or {}, taints=self._keeps_taints),
        }

    def _note(self, stored: Mapping[str, Any], shown: dict[str, Any]) -> None:
        self.version = str((stored.get("metadata") or {}).get("resourceVersion") or "")
        self._own.append(self.version)
        self.mark = _mark(stored) or ""
        self._shown = shown

    def _check(self, stored: Mapping[str, Any], delete: str | None) -> None:
        """Raise GATE if the API server dropped fields that sharing needs.

        Before that, delete the slice named `delete`, if a name is given.
        """
        for device in (stored.get("spec") or {}).get("devices") or ():
            capacities = (device.get("capacity") or {}).values()
            shared = device.get("allowMultipleAllocations") is True
            if not shared or not all(capacity.get("requestPolicy") for capacity in capacities):
                if delete is not None:
                    self._cluster.delete_slice(delete)
                self._shown = None
                raise GATE


def _taints(body: Mapping[str, Any]) -> int:
    devices = (body.get("spec") or {}).get("devices") or ()
    return sum(len(device.get("taints") or ()) for device in devices)


def _mark(body: Mapping[str, Any]) -> str | None:
    annotations = (body.get("metadata") or {}).get("annotations") or {}
    mark = annotations.get(ANNOTATION)
    return None if mark is None else str(mark)


def _with_mark(body: Mapping[str, Any], mark: str) -> dict[str, Any]:
    after = copy.deepcopy(dict(body))
    after["metadata"]["annotations"] = {
        **(after["metadata"].get("annotations") or {}),
        ANNOTATION: mark,
    }
    return after


def _succeed(body: dict[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body that replaces the stored slice, with the next generation.

    A taint that stays keeps the time at which it was added, and the slice keeps its mark.
    """
    after = copy.deepcopy(body)
    kept = _mark(stored)
    if kept is not None and _mark(body) is None:
        after = _with_mark(after, kept)
    after["metadata"]["resourceVersion"] = stored["metadata"]["resourceVersion"]
    pool = (stored.get("spec") or {}).get("pool") or {}
    after["spec"]["pool"]["generation"] = int(pool.get("generation") or 0) + 1
    times = {
        (device.get("name"), taint.get("key"), taint.get("value")): taint.get("timeAdded")
        for device in (stored.get("spec") or {}).get("devices") or ()
        for taint in device.get("taints") or ()
    }
    for device in after["spec"]["devices"]:
        for taint in device.get("taints", ()):
            added = times.get((device["name"], taint["key"], taint["value"]))
            if added:
                taint["timeAdded"] = added
    return after


class Watcher:
    """Tells a publisher, on a separate thread, when another client changes the publisher's slice.

    A kubelet that starts deletes the slices of its node; the scheduler sees no GPU until the slice
    exists again.
    """

    def __init__(
        self, cluster: Any, publisher: Publisher, name: str, wake: threading.Event
    ) -> None:
        self._cluster = cluster
        self._publisher = publisher
        self._name = name
        self._wake = wake
        self._stop = threading.Event()

    def run(self) -> None:
        """Watch until `stop`."""
        pause = 1.0
        while not self._stop.is_set():
            version = self._publisher.version
            if not version:
                self._stop.wait(1.0)
                continue
            try:
                for event in self._cluster.watch_slice(self._name, version, WATCH_S):
                    if self._look(event):
                        # Two clients that undo each other's changes must not do so in a busy loop.
                        self._stop.wait(PACE_S)
                    pause = 1.0
                    if self._stop.is_set():
                        return
                if self._publisher.version == version:
                    self._stop.wait(0.2)
            except Exception as e:  # noqa: BLE001 - an unexpected answer must not end the thread
                message = e.message if isinstance(e, ClusterError) else repr(e)[:300]
                log.info("watch-ended", message=message)
                # Events may have been missed in the meantime.
                self._publisher.forget()
                self._wake.set()
                self._stop.wait(pause)
                pause = min(pause * 2, 60.0)

    def stop(self) -> None:
        """Stop at the next event, or when the process ends."""
        self._stop.set()

    def _look(self, event: Mapping[str, Any]) -> bool:
        metadata = (event.get("object") or {}).get("metadata") or {}
        own = self._publisher.is_own(str(metadata.get("resourceVersion") or ""))
        if event.get("type") == "DELETED" or not own:
            log.info("slice-changed-by-others", slice=self._name, what=event.get("type"))
            self._publisher.forget()
            self._wake.set()
            return True
        return False
