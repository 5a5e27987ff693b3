"""`tidegate-dra`: offers a node's GPUs to a cluster, and prepares claims for its kubelet.

    tidegate-dra --node-name NODE [--kubeconfig FILE] [--runtime-dir DIR] [--kubelet-dir DIR] ...

In a pod the driver uses the service account for the API server. It logs one event per line (JSON if
standard error is not a terminal) and ends on SIGTERM or SIGINT. Containers on the GPUs keep running
without it; the next driver takes over the prepared claims.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from governor import logs
from governor.errors import ConfigError, TidegateError
from governor.options import Parser
from kube.announce import Announcer, pods_of
from kube.cdi import Directory
from kube.cluster import Cluster
from kube.driver import ClaimDriver
from kube.errors import GateError
from kube.health import UNKNOWN, Condition, Damper, Taint, judge
from kube.instances import Instance
from kube.names import TAINT_CLOSED
from kube.node import NodeClient
from kube.options import add_node_options
from kube.pci import find_roots
from kube.publish import Publisher, Watcher
from kube.quantity import whole
from kube.recheck import ANNOTATION, Recheck, has_room
from kube.resync import Resync
from kube.service import Endpoints, Health, KubeletAbsence, directories
from kube.slices import ClaimDefaults, make_slice, slice_name

log = structlog.get_logger()

PERIOD_S = 2.0
"""Default interval between two steps of the loop, in seconds."""
PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""First and longest pause in seconds before a peer that does not answer is asked again."""
AWAY_S = 60.0
"""Seconds without an answer from the governor after which its GPUs get the taint AWAY."""
AWAY = Taint(TAINT_CLOSED, "governor-away")


class Backoff:
    """The pause before a peer that does not answer is asked again; it doubles each time."""

    def __init__(self) -> None:
        self._pause = 0.0
        self._until = 0.0

    def failed(self, now: float) -> float:
        """Record a failure, and return the pause until the next attempt in seconds."""
        self._pause = min(max(self._pause * 2, PAUSE_S), MAX_PAUSE_S)
        # The pause is random, so that not all nodes ask at once when the API server comes back.
        wait = self._pause * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        self._until = now + wait
        return wait

    def answered(self) -> None:
        """Record an answer."""
        self._pause = self._until = 0.0

    def over(self, now: float) -> bool:
        """Return whether the pause is over."""
        return now >= self._until


class DriverLoop:
    """The work that is done every `--look-every` seconds, and whenever `wake` is set."""

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        cluster: Cluster,
        node: NodeClient,
        driver: ClaimDriver,
        publisher: Publisher,
        health: Health,
        recheck: Recheck | None = None,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        """Set up; `leads` returns whether this driver publishes and reconciles."""
        self.wake = threading.Event()
        self._args = args
        self._cluster = cluster
        self._node = node
        self._driver = driver
        self._publisher = publisher
        self._health = health
        self._recheck = recheck or Recheck()
        self._damper = Damper()
        self._backoffs = {"publish": Backoff(), "reconcile": Backoff()}
        self._reconcile = threading.Event()
        self._reconcile.set()
        self._known = False
        self._leads = leads
        self.leading = True
        self._absence = KubeletAbsence()
        self._node_uid: str | None = None
        self._away_since: float | None = None
        self._answer: Mapping[str, Any] | None = None
        self._conditions: Mapping[str, Condition] = {}

    def registered(self, accepted: bool = True) -> None:  # noqa: FBT001, FBT002
        """Handle the kubelet's answer to the registration.

        A kubelet that starts deletes the node's slices. A driver that the kubelet refused is never
        called, so it does not publish the slice again.
        """
        self._known = accepted
        self._publisher.forget()
        if not accepted:
            self._absence = KubeletAbsence()
        self._reconcile.set()
        self.wake.set()

    def step(self) -> None:
        """Query the node's state and publish it to the cluster."""
        now = time.monotonic()
        self._take_or_leave()
        self._look(now)
        # Nothing is published before the kubelet has registered the driver: pods would be scheduled
        # to this node but never start.
        if not self._known:
            self._wait(now)
        if not self.leading:
            return
        if self._known and self._answer is not None:
            self._try("publish", now, functools.partial(self._publish, self._answer, now))
        if self._reconcile.is_set():
            self._reconcile.clear()  # before it runs: a later registration needs another run
            if not self._try("reconcile", now, self._driver.reconcile):
                self._reconcile.set()

    @property
    def stands_by(self) -> bool:
        """Whether the kubelet has registered this driver, but another instance publishes."""
        return self._known and not self.leading

    def _take_or_leave(self) -> None:
        """Check whether this instance leads: another one may have taken over, or have ended."""
        leading = self._leads()
        if leading == self.leading:
            return
        self.leading = leading
        log.info("leads" if leading else "another-leads")
        # The other instance may have changed something in the meantime, so all state is read again.
        self._publisher.forget()
        self._recheck.forget()
        self._reconcile.set()

    def _try(self, what: str, now: float, function: Callable[[], None]) -> bool:
        """Run a function that asks a peer, except during a pause; return whether it succeeded.

        Publishing and reconciling have separate pauses, so that one does not delay the other.
        """
        backoff = self._backoffs[what]
        if not backoff.over(now):
            return False
        try:
            function()
        except GateError:
            raise
        except TidegateError as e:
            wait = round(backoff.failed(now), 1)
            log.warning("not-answered", what=what, message=e.message, hint=e.hint, again_s=wait)
            return False
        except Exception as e:  # an unexpected answer must not keep the driver from serving
            wait = round(backoff.failed(now), 1)
            log.exception("not-understood", what=what, error=repr(e)[:300], again_s=wait)
            return False
        backoff.answered()
        return True

    def _wait(self, now: float) -> None:
        seconds = self._absence.poll(now)
        if seconds:
            place = directories(self._args.kubelet_dir)
            path = Instance(*place, self._args.instance).registration
            log.warning(
                "no-kubelet",
                message=f"no kubelet has registered this driver for {seconds:.0f} s; it should have"
                f" found {path}; no GPU is offered",
                hint="see the kubelet's log; --kubelet-dir has to be its --root-dir, with the same"
                " path here and on the host",
            )

    def _look(self, now: float) -> None:
        """Ask the governor for the state of its GPUs."""
        try:
            answer = self._node.gpus()
            conditions = judge(answer["gpus"], self._node.containers())
            if self._driver.differs():
                self._reconcile.set()
        except TidegateError as e:
            if self._away_since is None:
                self._away_since = now
                log.warning("governor-away", message=e.message, hint=e.hint)
            # A restart takes less than AWAY_S. After that no more pods should be scheduled here,
            # because a node without a governor prepares no claim.
            taints = (AWAY,) if now - self._away_since >= AWAY_S else ()
            unknown = Condition(UNKNOWN, "the node's governor does not answer", taints)
            self._conditions = dict.fromkeys(self._conditions, unknown)
            self._health.update(self._conditions)
            return
        if self._away_since is not None:
            log.info("governor-back", seconds=round(now - self._away_since, 1))
            self._away_since = None
        self._answer, self._conditions = answer, conditions
        self._health.update(conditions)

    def _publish(self, answer: Mapping[str, Any], now: float) -> None:
        # A recreated node has a new uid, and its slice was deleted with the old node.
        if self._node_uid is None or not self._publisher.current:
            metadata = self._cluster.node(self._args.node_name).get("metadata") or {}
            self._node_uid = str(metadata["uid"])
        addresses = [gpu.get("pci") for gpu in answer["gpus"]]
        taints = self._damper.settle(self._conditions, now)
        wanted = make_slice(
            self._args.node_name,
            self._node_uid,
            answer,
            taints,
            defaults=ClaimDefaults(self._args.default_memory, self._args.default_compute),
            roots=find_roots(addresses),
        )
        claims = self._driver.entered
        if self._publisher.current:  # otherwise the stored mark is not known yet
            closed = {uuid for uuid, found in taints.items() if found}
            room = self._away_since is None and has_room(answer, closed)
            mark = self._recheck.next_mark(claims, self._publisher.mark, now, room=room)
            if mark is not None:
                wanted["metadata"]["annotations"] = {ANNOTATION: mark}
        if self._publisher.publish(wanted):
            self._recheck.updated(claims, now)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tidegate-dra", description="Offers the node's GPUs to a Kubernetes cluster."
    )
    parser.add_argument(
        "--node-name",
        default=os.environ.get("NODE_NAME"),
        help="the node's name in the cluster (default: NODE_NAME)",
    )
    parser.add_argument(
        "--kubeconfig", metavar="FILE", help="for use outside a pod, without a service account"
    )
    add_node_options(parser)
    parser.add_argument(
        "--default-memory",
        metavar="QUANTITY",
        help="memory of a claim that specifies none, for example 8Gi (default: all of the GPU's)",
    )
    parser.add_argument(
        "--default-compute",
        metavar="PERCENT",
        help="compute of a claim that specifies none (default: 100)",
    )
    parser.add_argument(
        "--look-every",
        type=float,
        default=PERIOD_S,
        metavar="SECONDS",
        help="interval at which the governor is asked about its GPUs (%(default)g); writes of"
        " changes to the API server are at least three times this interval apart",
    )
    parser.add_argument(
        "--instance",
        default=os.environ.get("POD_UID", ""),
        metavar="NAME",
        help="a name for the sockets, usually the pod's uid. With it, kubelet 1.33 or newer"
        " accepts this driver alongside the one that it replaces; without it, this driver is the"
        " only one (default: POD_UID)",
    )
    parser.add_argument("--ready-file", metavar="FILE", help="exists while the GPUs are offered")
    return parser


def _check(args: argparse.Namespace) -> None:
    if not args.node_name:
        raise ConfigError("no node name is given", hint="add --node-name, or set NODE_NAME")
    if not 0.1 <= args.look_every <= 60:
        raise ConfigError(
            f"--look-every is {args.look_every:g}", hint="it must be between 0.1 and 60"
        )
    for option, least, most in (("default_memory", 1 << 20, 1 << 50), ("default_compute", 1, 100)):
        text = getattr(args, option)
        if text is None:
            continue
        name = f"--{option.replace('_', '-')}"
        try:
            number = whole(text)
        except ValueError as e:
            raise ConfigError(f"{name}: {e}", hint="use a value such as 8Gi or 25") from e
        if not least <= number <= most:
            raise ConfigError(f"{name} is {text}", hint=f"it must be between {least} and {most}")
        setattr(args, option, number)


class _Ready:
    """The file that exists while the node's GPUs are offered."""

    def __init__(self, path: str | None) -> None:
        self._path = Path(path) if path else None
        self._shown = False
        self.show(ready=False, always=True)  # removes the file of a driver that was killed

    def show(self, *, ready: bool, always: bool = False) -> None:
        """Create or remove the file if `ready` has changed; with `always`, in any case."""
        if self._path is None or (ready == self._shown and not always):
            return
        with contextlib.suppress(OSError):
            if ready:
                self._path.write_text(f"{os.getpid()}\n")
            else:
                self._path.unlink(missing_ok=True)
        if ready:
            log.info("ready")
        self._shown = ready


def serve(args: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT."""
    service = _Service(args)
    stop = threading.Event()

    def end(_number: int, _frame: object) -> None:
        stop.set()
        service.loop.wake.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    ready = _Ready(args.ready_file)
    service.start()
    log.info("driver-started", node=args.node_name, kubelet_dir=args.kubelet_dir)
    loop = service.loop
    try:
        while not stop.is_set():
            loop.step()
            service.endpoints.poll()
            ready.show(ready=service.publisher.current or loop.stands_by)
            loop.wake.wait(args.look_every)
            loop.wake.clear()
    finally:
        ready.show(ready=False)
        service.stop()
    log.info("driver-stopped")


class _Service:
    """The parts of one node's driver, and their threads."""

    def __init__(self, args: argparse.Namespace) -> None:
        cluster = Cluster(args.kubeconfig)
        node = NodeClient(args.runtime_dir)
        instance = Instance(*directories(args.kubelet_dir), args.instance)
        self.announcer = Announcer(cluster, args.node_name)
        driver = ClaimDriver(
            args.node_name,
            node,
            cluster,
            Directory(args.cdi_dir),
            self.announcer,
            hook=args.hook,
            hook_arguments=args.hook_argument,
            dev_dir=args.dev_dir,
            hold=instance.hold,
            others=instance.others,
            again=lambda reference, document: self.resync.refused(
                reference.namespace, None if document is None else pods_of(document)
            ),
        )
        self.resync = Resync(cluster, args.node_name, driver)
        self.publisher = Publisher(cluster, interval=3 * args.look_every)
        self.health = Health(args.node_name)
        self.loop = DriverLoop(
            args,
            cluster=cluster,
            node=node,
            driver=driver,
            publisher=self.publisher,
            health=self.health,
            recheck=Recheck(delay=0.5 * args.look_every, interval=3 * args.look_every),
            leads=instance.leads,
        )
        self.watcher = Watcher(cluster, self.publisher, slice_name(args.node_name), self.loop.wake)
        self.endpoints = Endpoints(
            args.kubelet_dir, driver, self.health, self._registered, instance
        )
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (
                ("events", self.announcer.run),
                ("watch", self.watcher.run),
                ("resync", self.resync.run),
            )
        ]

    def start(self) -> None:
        """Serve the kubelet, and start the threads."""
        self.endpoints.start()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop serving, and write the remaining events."""
        self.watcher.stop()
        self.health.close()
        self.endpoints.stop()
        self.announcer.stop()
        self.resync.stop()
        self._threads[0].join(2.0)

    def _registered(self, accepted: bool) -> None:  # noqa: FBT001 - the callback's only argument
        self.loop.registered(accepted)
        if accepted:
            self.resync.registered()


def main(argv: list[str] | None = None) -> int:
    """Run the driver; return its exit status."""
    args = _parser().parse_args(argv)
    logs.configure()
    try:
        _check(args)
        serve(args)
    except TidegateError as e:
        print(f"tidegate-dra: {e}", file=sys.stderr)
        return e.status
    return 0


if __name__ == "__main__":
    sys.exit(main())
