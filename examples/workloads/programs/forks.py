#!/usr/bin/env python3
"""Tests child processes: forked before and after cuInit, spawned, and ended without a clean-up.

The memory of a child has to be free again soon after its end, however it ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

from driver_api import MIB, CallError, Cuda
from program import ProgramCheck, child_environment, run, wait_until

BLOCK = 256 * MIB
SLACK = 48 * MIB
"""Tolerance for a measurement of free memory: other processes' streams and modules change it."""

BURNS = 20

# A process that has launched a kernel may have threads that it did not start: the driver's, or
# those of the control library. Python then warns when it forks.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
CHILD_S = 60


def use_gpu() -> dict[str, object]:
    """Allocate memory and launch kernels; return the sum of the memory's words."""
    cuda = Cuda()
    cuda.start()
    block = cuda.get("cuMemAlloc_v2", BLOCK)
    cuda.call("cuMemsetD32_v2", block, 7, 1024)
    for _ in range(BURNS):
        cuda.burn(100_000)
    cuda.call("cuCtxSynchronize")
    return {"sum": sum(cuda.words(block, 1024)), "burns": BURNS}


def in_a_fork(work: Callable[[], object]) -> object:
    """Run `work` in a forked child, and return its result, or how the child ended."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            text = json.dumps(work())
        except CallError as e:
            text = json.dumps(str(e))
        except Exception as e:  # noqa: BLE001 - the parent reports it
            text = json.dumps(repr(e))
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    ended: list[int] = []

    def is_over() -> bool:
        if not ended and os.waitpid(pid, os.WNOHANG)[0]:
            ended.append(pid)
        return bool(ended)

    if not wait_until(is_over, CHILD_S):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        return f"did not end within {CHILD_S} s"
    with os.fdopen(reader) as file:
        return json.loads(file.read() or '"no output"')


def child_command(action: str) -> list[str]:
    return [sys.executable, __file__, action]


def by_exec() -> object:
    done = subprocess.run(
        child_command("use"),
        capture_output=True,
        text=True,
        check=False,
        timeout=CHILD_S,
        env=child_environment(),
    )
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


def by_posix_spawn() -> object:
    reader, writer = os.pipe()
    pid = os.posix_spawn(
        sys.executable,
        child_command("use"),
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, writer, 1), (os.POSIX_SPAWN_CLOSE, reader)],
    )
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(text) if os.waitstatus_to_exitcode(status) == 0 else f"status {status}"


def time_return(program: ProgramCheck, cuda: Cuda, ending: str) -> None:
    """Measure how long cuMemGetInfo still counts the memory of a child that has ended."""
    before, _ = cuda.memory()
    with subprocess.Popen(
        child_command(ending),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(),
    ) as child:
        assert child.stdin  # noqa: S101 - for the types
        assert child.stdout  # noqa: S101 - for the types
        ready = child.stdout.readline()
        held = before - cuda.memory()[0]
        if ending == "killed":
            child.kill()
        else:
            child.stdin.write(b"\n")
            child.stdin.flush()
        child.wait()
        ended = time.monotonic()
        back = wait_until(lambda: cuda.memory()[0] >= before - SLACK, 10, every=0.001)
        taken = (time.monotonic() - ended) * 1000
    free, total = cuda.memory()
    program.check(f"a child is ready before it is {ending}", ready == b"ready\n", ready)
    program.check(
        f"cuMemGetInfo shows the memory of a child before it is {ending}", held >= BLOCK, held
    )
    program.check(
        f"the memory of a child that is {ending} comes back soon",
        back and taken <= program.within_ms,
        f"{taken:.0f} ms; {before} of {total} bytes were free before, {free} now",
    )
    program.note(f"ms until the memory of a child that is {ending} is back", round(taken, 1))


def is_steady(cuda: Cuda) -> bool:
    """Return whether the free memory stays the same for 0.3 s."""
    before = cuda.memory()[0]
    time.sleep(0.3)
    return cuda.memory()[0] == before


def body(program: ProgramCheck) -> None:
    wanted = {"sum": 7 * 1024, "burns": BURNS}
    answers = {"forked before cuInit": in_a_fork(use_gpu)}
    cuda = Cuda()
    cuda.start()
    cuda.burn(100_000)
    answers["started by exec"] = by_exec()
    answers["spawned"] = by_posix_spawn()
    for how, answer in answers.items():
        program.check(f"a child {how} uses the GPU", answer == wanted, answer)
    # The driver refuses all calls of a child that was forked after its parent's cuInit.
    program.value("a child forked after cuInit", str(in_a_fork(lambda: cuda.memory()[1] > 0)))
    # The memory of the children above becomes free some time after their end.
    wait_until(lambda: is_steady(cuda), 10)
    used = cuda.memory()[1] - cuda.memory()[0]
    program.check("a child that does nothing ends", in_a_fork(lambda: 1) == 1)
    after = cuda.memory()[1] - cuda.memory()[0]
    program.check("and takes nothing from its parent", abs(after - used) <= SLACK, after - used)
    for ending in ("done", "killed"):
        time_return(program, cuda, ending)
    cuda.burn(100_000)
    cuda.call("cuCtxSynchronize")
    program.launches = 2


def hold() -> None:
    """Allocate memory, then wait for a line of input or a signal that ends the process."""
    cuda = Cuda()
    cuda.start()
    cuda.get("cuMemAlloc_v2", BLOCK)
    print("ready", flush=True)
    sys.stdin.readline()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:] == ["use"]:
        print(json.dumps(use_gpu()))
    elif sys.argv[1:] in (["done"], ["killed"]):
        hold()
    else:
        run(body)
