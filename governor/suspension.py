"""Suspend containers and resume them, by hand.

A suspended container has nothing on the GPU: the contents of its memory are in host memory, and its
contexts are gone. Its processes run on until they call the driver, and then wait. Its quota stays
booked, so it can be resumed at any time.

Before the driver's calls are made (`checkpoint_work`), the container has to be at rest: launches
that are held on the GPU wait for a grant, and channels that are switched off do not finish their
work. So no more launches are held, those that are held get a last grant, and then the container is
granted nothing, and its processes are no longer steered.

That a container is suspended is stored before the first call and until after the last. If the
governor ends in between, the next one shows the container as suspended, and `resume` works from the
state in which each process is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

import structlog

from governor.cgroups import pid_namespaces, read_cgroups
from governor.container import Container
from governor.errors import RefusedError
from governor.hardware.child import module_command
from governor.members import Member
from governor.processes import Identity, start_time
from governor.state import State
from vdriver.errors import VdriverError
from vdriver.nvml import ProcessMemory

log = structlog.get_logger()

WAIT_S = 30
"""Time within which the submitted work of a container has to end, in seconds."""
GRANTS_S = 3.0
"""Longest wait for the grants that end held launches, in seconds."""
N_GRANTS = 2
"""Number of those grants: one may have begun before the container was told to hold no launch."""
POLL_S = 0.01
EXTRA_S = 60.0
SLOWEST = 500_000_000
"""Time for the driver's calls: EXTRA_S seconds, plus one for each SLOWEST bytes of memory. An H200
(driver 580) moves 2 GB/s out and 5 GB/s back."""


class WorkError(Exception):
    """The driver's calls failed; the message is one line.

    `undone` is true if all processes run as before.
    """

    def __init__(self, message: str, *, undone: bool = False) -> None:
        super().__init__(message)
        self.undone = undone


class FindsContainers(Protocol):
    """The containers of a node."""

    def find(self, identifier: str) -> tuple[Container, Member] | None:
        """Return a container by its id."""


class Suspender:
    """Suspends and resumes the containers of a node."""

    def __init__(
        self,
        containers: FindsContainers,
        state: State,
        libcuda: Path | None = None,
        computing: Callable[[str], Iterable[ProcessMemory]] = lambda _: (),
    ) -> None:
        """Without `libcuda`, the driver's own library, no container can be suspended.

        `computing` returns the processes on a GPU, by its UUID; it may raise VdriverError.
        """
        self._containers, self._state = containers, state
        self._libcuda, self._computing = libcuda, computing

    async def suspend(self, request: dict[str, Any]) -> dict[str, Any]:
        """Suspend a container; raise RefusedError, with the container running, if it cannot be."""
        container = self._find(request["id"])
        self._refuse(container)
        if container.suspension:
            raise RefusedError(
                f"the container is {container.suspension} already",
                hint="tidegate resume ends that",
            )
        began = time.monotonic()
        wait_s = request.get("wait", WAIT_S)
        container.suspension = "suspending"
        container.allow_holds(allowed=False)
        try:
            await self._end_holds(container)
            self._state.put(replace(container.row, suspended=True))
        except BaseException:
            container.suspension = ""
            container.allow_holds(allowed=True)
            raise
        container.row = replace(container.row, suspended=True)
        container.pause()
        uses: dict[Identity, int] = {}
        try:
            uses = await self._uses(container)
            n = await self._work("suspend", container, uses, wait_s)
        except WorkError as e:
            if e.undone:
                self._run_again(container)
            hint = "" if e.undone else "tidegate resume makes it run again"
            log.warning("container-not-suspended", container=container.identifier, error=str(e))
            raise RefusedError(f"the container cannot be suspended: {e}", hint=hint) from e
        finally:
            if container.suspension:
                container.suspension = "suspended"
        _require_running(container)
        return self._done("container-suspended", container, n, sum(uses.values()), began)

    async def resume(self, request: dict[str, Any]) -> dict[str, Any]:
        """Resume a container; raise RefusedError, with the container suspended, if that fails."""
        container = self._find(request["id"])
        if container.suspension not in ("", "suspended"):
            raise RefusedError(
                f"the container is {container.suspension}", hint="try again when that has ended"
            )
        self._refuse(container)
        began = time.monotonic()
        # Even if it does not count as suspended, its processes may be: the state may have been
        # lost, or the driver's calls made by another program.
        before, container.suspension = container.suspension, "resuming"
        used = sum(container.account.memory(i).charged for i in range(len(container.devices)))
        try:
            n = await self._work("resume", container, await self._uses(container), 0)
        except WorkError as e:
            log.warning("container-not-resumed", container=container.identifier, error=str(e))
            hint = f"it stays {before}; try again" if before else "tidegate ps shows its state"
            raise RefusedError(f"the container cannot be resumed: {e}", hint=hint) from e
        finally:
            container.suspension = before
        if not (before or n):
            raise RefusedError(
                "the container is not suspended", hint="tidegate ps shows the state of each"
            )
        _require_running(container)
        self._run_again(container)
        return self._done("container-resumed", container, n, used, began)

    def _find(self, identifier: str) -> Container:
        found = self._containers.find(identifier)
        if found is None:
            raise RefusedError(
                f"no container {identifier[:64]!r} shares a GPU of this node",
                hint="tidegate ps lists them",
            )
        return found[0]

    def _refuse(self, container: Container) -> None:
        """Raise RefusedError if a container cannot be suspended or resumed."""
        if self._libcuda is None:
            raise RefusedError("this governor has no driver", hint="start another")
        if container.strategy == "mps":
            raise RefusedError(
                "the container shares its GPU by MPS, whose clients the driver cannot checkpoint",
                hint="use strategy timeslice",
            )
        if container.findings.frozen:
            raise RefusedError(
                "the container is frozen for a violation", hint="try again when it is thawed"
            )

    async def _end_holds(self, container: Container) -> None:
        """Wait until no launch is held on the GPU, because of N_GRANTS grants or of a rest."""
        until = time.monotonic() + GRANTS_S
        granted = [i for i in range(len(container.devices)) if not container.gpus.is_steered(i)]
        before = {i: int(container.gpus.stats(i).grants) for i in granted}
        while time.monotonic() < until:
            _require_running(container)
            if all(
                container.account.is_at_rest(i)
                or int(container.gpus.stats(i).grants) >= before[i] + N_GRANTS
                for i in granted
            ):
                return
            await asyncio.sleep(POLL_S)

    def _run_again(self, container: Container) -> None:
        container.suspension = ""
        if container.has_ended:
            return
        container.allow_holds(allowed=True)
        container.unpause()
        container.row = replace(container.row, suspended=False)
        self._state.note(container.row)

    async def _uses(self, container: Container) -> dict[Identity, int]:
        """Return the container's processes, registered or not, with the memory that NVML shows."""
        seen: dict[int, int] = {}
        for device in container.devices:
            # NVML's failure is reported elsewhere; the registered processes are known.
            with contextlib.suppress(VdriverError):
                for one in await asyncio.to_thread(self._computing, device.uuid):
                    seen[one.pid] = seen.get(one.pid, 0) + (one.used or 0)
        pids = container.pids()
        found = pids | {pid for pid in seen.keys() - pids if _belongs(pid, container)}
        started = {pid: start_time(pid) for pid in found}
        return {
            Identity(pid, start): seen.get(pid, 0)
            for pid, start in sorted(started.items())
            if start is not None
        }

    async def _work(
        self,
        what: Literal["suspend", "resume"],
        container: Container,
        uses: Mapping[Identity, int],
        wait_s: float,
    ) -> int:
        """Make the driver's calls, and return the number of processes that they were made for."""
        if not uses:
            return 0
        memory = sum(container.account.memory(i).used for i in range(len(container.devices)))
        within_s = wait_s * len(uses) + EXTRA_S + memory / SLOWEST
        libcuda = self._libcuda
        assert libcuda is not None  # noqa: S101 - see `_refuse`
        named = [f"{one.pid}:{one.start}" for one in uses]
        arguments = [str(libcuda), what, str(int(wait_s * 1000)), *named]
        try:
            child = await asyncio.create_subprocess_exec(
                *module_command("governor.checkpoint_work", arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={**os.environ, "LD_LIBRARY_PATH": f"{libcuda.parent}:{libcuda.parent.parent}"},
            )
        except OSError as e:
            raise WorkError(f"no process can be started: {e.strerror}", undone=True) from e
        try:
            output, _ = await asyncio.wait_for(child.communicate(), within_s)
        except TimeoutError as e:
            raise WorkError(f"the driver did not answer within {within_s:.0f} s") from e
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        return _read(output)

    def _done(
        self, event: str, container: Container, n: int, memory: int, began: float
    ) -> dict[str, Any]:
        seconds = round(time.monotonic() - began, 2)
        log.info(
            event,
            container=container.identifier,
            processes=n,
            memory=memory,
            seconds=seconds,
        )
        return {"ok": True, "processes": n, "memory": memory, "seconds": seconds}


def _read(output: bytes) -> int:
    """Return the number of processes in the output of `checkpoint_work`; raise its error."""
    try:
        lines = [json.loads(line) for line in output.splitlines()]
    except ValueError:
        lines = []
    for line in lines:
        if "error" in line:
            raise WorkError(str(line["error"]), undone=any("undone" in one for one in lines))
    if not any("done" in line for line in lines):
        raise WorkError("the process that makes the driver's calls has ended")
    return sum("pid" in line for line in lines)


def _require_running(container: Container) -> None:
    if container.has_ended:
        raise RefusedError("the container has ended", hint="tidegate ps lists the others")


def _belongs(pid: int, container: Container) -> bool:
    return container.members.has_cgroups(read_cgroups(pid)) or container.members.has_namespaces(
        pid_namespaces(pid)
    )
