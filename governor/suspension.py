"""Suspend containers and resume them, on request.

A suspended container has nothing on the GPU: the contents of its memory are in host memory, and its
contexts are gone. Its processes run until they call the driver, and then wait. Its quota stays
allocated, so it can be resumed at any time.

Before the driver's checkpoint functions are called (`checkpoint_work`), the container has to be
idle: launches that are held on the GPU wait for a grant, and channels that are switched off do not
finish their work. So holding is disabled first, and the launches that are already held get another
grant. Then the container gets no more grants, and its processes are not steered until the calls
have returned. Work that depends on another GPU or another process may be unable to finish in this
state. The container is then allowed to run for a moment, and the suspension is tried again.

The state is stored as suspended before the first call, and as running after the last one. If the
governor ends in between, the next governor shows the container as suspended, and `resume` continues
from the actual state of each process.
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

from governor.container import Container, find_owner, unknown_container
from governor.errors import RefusedError
from governor.hardware.child import driver_environment, module_command
from governor.members import Member
from governor.processes import Identity, start_time
from governor.state import State
from vdriver.errors import VdriverError
from vdriver.nvml import ProcessMemory

log = structlog.get_logger()

WAIT_S = 30
"""Time within which the submitted work of a container has to end, in seconds."""
FIRST_WAIT_S = 1.0
"""The same, in seconds, for the first attempt with a container that has several processes or GPUs:
parts of its work may depend on each other. It doubles with each attempt."""
RUN_S = 0.1
"""Time for which such a container runs on between two attempts, in seconds."""
GRANTS_S = 3.0
"""Longest wait for the grants that end held launches, in seconds."""
N_GRANTS = 2
"""Number of those grants: one may have begun before the container was told to hold no launch."""
POLL_S = 0.01
NVML_S = 5.0
"""Longest wait for NVML's list of processes, in seconds."""
END_S = 5.0
"""Longest wait for the process that makes the calls to end after it was killed, in seconds."""
EXTRA_S = 60.0
SLOWEST = 500_000_000
"""Time allowed for the checkpoint calls, beyond the waits for submitted work: EXTRA_S seconds, plus
one second per SLOWEST bytes of memory. An H200 (driver 580) moves 2 GB/s out and 5 GB/s back."""


class WorkError(Exception):
    """The checkpoint calls failed; the message is one line.

    `undone` is true if all processes are running as before, `busy` if work of one of them did not
    finish.
    """

    def __init__(self, message: str, *, undone: bool = False, busy: bool = False) -> None:
        super().__init__(message)
        self.undone, self.busy = undone, busy


class FindsContainers(Protocol):
    """The containers of a node."""

    @property
    def containers(self) -> Mapping[str, Container]:
        """All of them, by key."""

    def find(self, identifier: str) -> tuple[Container, Member] | None:
        """Return a container and its member with this id; None if there is none."""


class Suspender:
    """Suspends and resumes the containers of a node."""

    def __init__(
        self,
        containers: FindsContainers,
        state: State,
        libcuda: Path | None = None,
        computing: Callable[[str], Iterable[ProcessMemory]] = lambda _: (),
    ) -> None:
        """Use `libcuda`, the driver's own library; without it, containers cannot be suspended.

        `computing` returns the processes on a GPU, by its UUID; it may raise VdriverError.
        """
        self._containers, self._state = containers, state
        self._libcuda, self._computing = libcuda, computing

    async def suspend(self, request: dict[str, Any]) -> dict[str, Any]:
        """Suspend a container.

        Raise RefusedError if that is not possible, and StateError if it cannot be stored.
        """
        container = self._find(request["id"])
        self._refuse(container)
        if container.suspension:
            is_done = container.suspension == "suspended"
            raise RefusedError(
                f"the container is already {container.suspension}",
                hint="tidegate resume undoes that"
                if is_done
                else "try again when that has finished",
            )
        began = time.monotonic()
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
        try:
            n, memory = await self._move_out(container, request.get("wait", WAIT_S))
        except WorkError as e:
            if e.undone:
                self._run_again(container)
            hint = "tidegate resume makes it run again"
            if e.undone:
                hint = "it keeps running" + ("; give more time with --wait" if e.busy else "")
            raise _failed("container-not-suspended", container, e, hint) from e
        finally:
            if container.suspension:
                container.suspension = "suspended"
        _require_running(container)
        return self._done("container-suspended", container, n, memory, began)

    async def resume(self, request: dict[str, Any]) -> dict[str, Any]:
        """Resume a container; if that fails, it stays suspended, and RefusedError is raised."""
        container = self._find(request["id"])
        if container.is_moving:
            raise RefusedError(
                f"the container is {container.suspension}", hint="try again when that has finished"
            )
        self._refuse(container)
        began = time.monotonic()
        # Even if it does not count as suspended, its processes may be: the state may have been
        # lost, or another program may have made the checkpoint calls.
        before, container.suspension = container.suspension, "resuming"
        used = sum(container.account.memory(i).used for i in range(len(container.devices)))
        try:
            with container.left_alone():
                n = await self._work("resume", await self._uses(container), used, 0)
        except WorkError as e:
            hint = f"it stays {before}; try again" if before else "tidegate ps shows its state"
            raise _failed("container-not-resumed", container, e, hint) from e
        finally:
            container.suspension = before
            container.allow_holds(allowed=not before)
        if not (before or n):
            raise RefusedError("the container is not suspended", hint="there is nothing to resume")
        _require_running(container)
        self._run_again(container)
        return self._done("container-resumed", container, n, used, began)

    def _find(self, identifier: str) -> Container:
        found = self._containers.find(identifier)
        if found is None:
            raise unknown_container(identifier)
        return found[0]

    def _refuse(self, container: Container) -> None:
        """Raise RefusedError if a container cannot be suspended or resumed."""
        if self._libcuda is None:
            raise RefusedError(
                "this governor was started without the driver's libcuda",
                hint="run tidegate refresh, and restart tidegate-governor",
            )
        if container.strategy == "mps":
            raise RefusedError(
                "the container uses MPS, and the driver cannot checkpoint clients of MPS",
                hint="use strategy timeslice",
            )
        if container.findings.frozen:
            raise RefusedError(
                "the container is frozen because of a violation",
                hint="try again when it is thawed",
            )

    async def _end_holds(self, container: Container) -> None:
        """Wait until no launch is held.

        That is when each GPU is idle, is held under an open grant, or has had N_GRANTS grants.
        """
        until = time.monotonic() + GRANTS_S
        granted = [i for i in range(len(container.devices)) if not container.gpus.is_steered(i)]
        before = {i: int(container.gpus.stats(i).grants) for i in granted}
        while time.monotonic() < until and not all(
            container.account.is_at_rest(i)
            # Under an open grant no launch is held.
            or container.account.is_sampled(i)
            or int(container.gpus.stats(i).grants) >= before[i] + N_GRANTS
            for i in granted
        ):
            await asyncio.sleep(POLL_S)
            _require_running(container)
        _require_running(container)

    async def _move_out(self, container: Container, wait_s: float) -> tuple[int, int]:
        """Bring a container to rest and suspend it; return the number of processes and bytes."""
        left_s, step_s = wait_s, FIRST_WAIT_S
        while True:
            container.gpus.pause()
            with container.left_alone():
                uses = await self._uses(container)
                memory = sum(uses.values())
                is_one = len(uses) < 2 and len(container.devices) < 2
                step_s = left_s if is_one else min(step_s, left_s)
                try:
                    return await self._work("suspend", uses, memory, step_s), memory
                except WorkError as e:
                    left_s -= step_s
                    if not (e.busy and e.undone) or left_s <= 0:
                        raise
            _require_running(container)
            container.gpus.unpause()
            await asyncio.sleep(RUN_S)
            _require_running(container)
            step_s *= 2

    def _run_again(self, container: Container) -> None:
        if container.has_ended:
            container.suspension = ""
            return
        container.gpus.unpause()
        container.allow_holds(allowed=True)
        container.row = replace(container.row, suspended=False)
        self._state.note(container.row)
        container.suspension = ""

    async def _uses(self, container: Container) -> dict[Identity, int]:
        """Return the container's processes, registered or not, with the memory that NVML shows."""
        seen: dict[int, int] = {}
        for device in container.devices:
            # NVML's failure is reported elsewhere; the registered processes are known without it.
            with contextlib.suppress(VdriverError, TimeoutError):
                listed = asyncio.to_thread(self._computing, device.uuid)
                for one in await asyncio.wait_for(listed, NVML_S):
                    seen[one.pid] = seen.get(one.pid, 0) + (one.used or 0)
        everyone = list(self._containers.containers.values())
        registered = {pid for one in everyone for pid in one.pids()}
        own = {pid for pid in seen.keys() - registered if find_owner(pid, everyone) is container}
        started = {pid: start_time(pid) for pid in container.pids() | own}
        return {
            Identity(pid, start): seen.get(pid, 0)
            for pid, start in sorted(started.items())
            if start is not None
        }

    async def _work(
        self,
        what: Literal["suspend", "resume"],
        processes: Iterable[Identity],
        memory: int,
        wait_s: float,
    ) -> int:
        """Make the checkpoint calls; return the number of processes for which they were made."""
        named = [f"{one.pid}:{one.start}" for one in processes]
        if not named:
            return 0
        within_s = wait_s * len(named) + EXTRA_S + memory / SLOWEST
        libcuda = self._libcuda
        assert libcuda is not None  # noqa: S101 - see `_refuse`
        arguments = [str(os.getpid()), str(libcuda), what, str(int(wait_s * 1000)), *named]
        try:
            child = await asyncio.create_subprocess_exec(
                *module_command("governor.checkpoint_work", arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=driver_environment(libcuda),
            )
        except OSError as e:
            raise WorkError(
                f"the process that makes the driver's calls cannot be started: {e.strerror}",
                undone=True,
            ) from e
        try:
            output, _ = await asyncio.wait_for(child.communicate(), within_s)
        except TimeoutError as e:
            raise WorkError(f"the driver did not answer within {within_s:.0f} s") from e
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(child.wait(), END_S)
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
            undone = any("undone" in one for one in lines)
            raise WorkError(str(line["error"]), undone=undone, busy=bool(line.get("busy")))
    if not any("done" in line for line in lines):
        raise WorkError("the process that makes the driver's calls has ended")
    return sum("pid" in line for line in lines)


def _failed(event: str, container: Container, e: WorkError, hint: str) -> RefusedError:
    """Log that the checkpoint calls failed, and return the error for the caller."""
    log.warning(event, container=container.identifier, error=str(e))
    done = event.removeprefix("container-not-")
    error = RefusedError(f"the container cannot be {done}: {e}", hint=hint)
    error.is_logged = True
    return error


def _require_running(container: Container) -> None:
    if container.has_ended:
        raise RefusedError("the container has ended", hint="tidegate ps lists the others")
