#!/usr/bin/env python3
"""Tests NVIDIA's MPS: starts a daemon and a client of it in this container.

Without a quota both have to work. Under a quota the client may be refused, by an error or because
the daemon's program is missing; if the client runs, its launches have to be counted as usual.
"""

from __future__ import annotations

import json
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from driver_api import CallError, Cuda
from program import NotHereError, ProgramCheck, child_environment, run

CONTROL = "nvidia-cuda-mps-control"
OWN, CLIENTS = 5, 10
BURN_NS = 100_000
MPS_ENABLED = 133  # CU_DEVICE_ATTRIBUTE_MPS_ENABLED
WAIT_S = 40.0


def client() -> None:
    """Launch kernels as a client, print the outcome, and wait for the end of the input."""
    cuda = Cuda()
    try:
        cuda.start()
        enabled = cuda.get("cuDeviceGetAttribute", MPS_ENABLED, cuda.get("cuDeviceGet", 0))
        for _ in range(CLIENTS):
            cuda.burn(BURN_NS)
        cuda.call("cuCtxSynchronize")
        answer = {"outcome": "ran", "enabled": enabled & 0xFFFFFFFF}
    except CallError as e:
        answer = {"outcome": "refused", "error": str(e)}
    print(json.dumps(answer), flush=True)
    sys.stdin.read()


def try_client(program: ProgramCheck, environment: dict[str, str]) -> dict:
    """Start a client that runs until this program ends, and return its answer."""
    child = program.until_end.enter_context(
        subprocess.Popen(
            [sys.executable, __file__, "client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
    )
    if not select.select([child.stdout], [], [], WAIT_S)[0]:
        child.kill()
        return {"outcome": "hangs"}
    line = child.stdout.readline()
    if not line:
        return {
            "outcome": f"ends with status {child.wait()}",
            "stderr": child.stderr.read().decode(),
        }
    answer = json.loads(line)
    if answer["outcome"] == "refused":
        # A refusal is explained on the client's standard error.
        answer["stderr"] = child.stderr.readline().decode().strip()
    return answer


def start_daemon(program: ProgramCheck, environment: dict[str, str], log: Path) -> dict | None:
    """Start the daemon, and end it with this program; return an outcome if it refuses to start."""
    # The output is a file: the daemon keeps it open, so reading a pipe would never end.
    with log.open("w") as output:
        done = subprocess.run(
            [CONTROL, "-d"],
            env=environment,
            check=False,
            timeout=30,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        return {"outcome": "refused", "error": log.read_text(errors="replace").strip()}
    program.until_end.callback(
        subprocess.run,
        [CONTROL], input=b"quit\n", env=environment, check=False, timeout=30,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return None


def body(program: ProgramCheck) -> None:
    cuda = Cuda()
    cuda.start()
    for _ in range(OWN):
        cuda.burn(BURN_NS)
    cuda.call("cuCtxSynchronize")
    program.launches = OWN
    if shutil.which(CONTROL) is None:
        if not program.governed:
            raise NotHereError(f"{CONTROL} is not installed")
        answer = {"outcome": "refused", "error": f"there is no {CONTROL}"}
    else:
        directory = program.until_end.enter_context(
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        )
        environment = child_environment(
            CUDA_MPS_PIPE_DIRECTORY=directory, CUDA_MPS_LOG_DIRECTORY=directory
        )
        answer = start_daemon(program, environment, Path(directory) / "output")
        answer = answer or try_client(program, environment)
    program.note("client", answer)
    if answer["outcome"] == "ran":
        program.launches += CLIENTS
    mps = program.governed or answer.get("enabled") == 1
    program.check("alone, the client uses MPS", mps, answer)
    allowed = ("ran", "refused") if program.governed else ("ran",)
    program.check(
        "a client works, or is refused with an error", answer["outcome"] in allowed, answer
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["client"]:
        client()
    else:
        run(body)
