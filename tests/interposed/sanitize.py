"""`python -m tests.interposed.sanitize address|undefined|thread|none`: the control library under a sanitizer.

Build the C parts with the sanitizer, in a build folder of their own, and run
tests/interposed/stress.c with the control library and the simulated GPU, all of them instrumented,
while the grant opens and closes; then run it again, while memory is also parked and moved back.
Exit with 1 if the sanitizer found an error (the output is its report), and with 77 if this machine
does not allow mount namespaces. With `none`, run the build in TIDEGATE_BUILD or build/meson.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.sandbox import GrantSandbox, control_folder
from simgpu import simgpu

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 6
LIMIT_S = 120
"""Time limit of a run in seconds; a longer run counts as hanging."""

OPTIONS = {
    # Driver objects of the control library are freed with their context, and are not leaks.
    "address": {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=66"},
    "undefined": {"UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1:exitcode=66"},
    "thread": {"TSAN_OPTIONS": "halt_on_error=0:exitcode=66:second_deadlock_stack=1"},
    "none": {},
}
# ThreadSanitizer does not model fences, and gcc warns about each of them.
PROGRAMS = ("stress", "libcontrol/cuda:shared_library", "simgpu/cuda:shared_library")
FLAGS = {"thread": ["-Dc_args=-Wno-tsan"]}
NOT_HERE = 77


def build(sanitizer: str) -> Path:
    """Build with a sanitizer and return the build folder. Raise CalledProcessError with the output
    if that fails.
    """
    if sanitizer == "none":
        return Path(os.environ.get("TIDEGATE_BUILD", ROOT / "build" / "meson"))
    folder = ROOT / "build" / f"sanitize-{sanitizer}"
    meson = [sys.executable, "-m", "mesonbuild.mesonmain"]
    commands = [[*meson, "compile", "-C", str(folder), *PROGRAMS]]
    if not (folder / "build.ninja").exists():
        options = [f"-Db_sanitize={sanitizer}", *FLAGS.get(sanitizer, [])]
        commands.insert(0, [*meson, "setup", str(folder), *options])
    for command in commands:
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return folder


def open_and_close(
    room: GrantSandbox, process: subprocess.Popen[str], *, parks: bool, seed: int = 1
) -> int:
    """Change the grant as a governor does, and sometimes leave it unchanged as if no governor ran,
    until the process ends. Return how many bytes of memory were moved.
    """
    draw = random.Random(seed)  # noqa: S311 - a schedule, no secret
    began = time.monotonic()
    is_lost, moved = False, 0
    while process.poll() is None and time.monotonic() < began + LIMIT_S:
        if not is_lost and room.counter("launches") > 100:
            is_lost = True
            room.lose_ledger()  # the program gets a new ledger while its threads use the old one
        moved = max(moved, room.moved())
        now = time.monotonic_ns()
        room.alive = draw.random() > 0.02
        room.write("contended", draw.randrange(2))
        room.write("memory_overhead", draw.choice((0, 0, 0, 64 << 20)))
        match draw.randrange(8):
            case 0:
                room.grant_until(2**64 - 1)
            case 1:
                room.write("standby_ns", now + 300_000)
                room.wake()
            case _:
                room.grant_until(now + draw.randrange(500_000, 6_000_000))
        time.sleep(draw.uniform(0.0005, 0.008))
        if draw.random() < 0.05:
            room.hang_up()
        # Some orders are revoked at once; most are carried out first.
        if parks and (room.has_moved() or draw.random() < 0.01):
            room.order(resident=draw.random() < 0.95)
        if not room.alive:
            time.sleep(1.2)
        room.grant_until(0)
        time.sleep(draw.uniform(0, 0.004))
    room.order(resident=True)
    room.grant_until(2**64 - 1)
    return moved


def stress(
    folder: Path, work: Path, environment: dict[str, str], *, parks: bool
) -> tuple[int, str, str]:
    """Run the stress program of a build; return its status, output and errors."""
    simgpu.create(work / "gpu")
    library = control_folder(
        work / "lib", folder / "libcontrol/libcuda.so.1", (folder / "simgpu/libcuda.so.1").resolve()
    )
    uuid = simgpu.device_uuid(1, 0).bytes
    with GrantSandbox(work / "room", [uuid], memory_limit=1 << 30, parks=parks) as room:
        # Addresses are not randomised: random mappings may collide with the shadow memory of the
        # sanitizers.
        command = ["setarch", "-R", str(folder / "stress"), "--seconds", str(SECONDS)]
        command += ["--limit-ms", "30000"] if parks else []  # waits for several instrumented moves
        variables = {"LD_LIBRARY_PATH": str(library), "SIMGPU_DIR": str(work / "gpu")}
        with (
            (work / "errors").open("w") as errors,
            subprocess.Popen(
                room.command(*command),
                env={**os.environ, **variables, **environment},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as process,
        ):
            try:
                moved = open_and_close(room, process, parks=parks)
                output, _ = process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                return -1, "", f"the program did not end within {LIMIT_S} s"
        if process.returncode == 0 and (not room.counter("launches") or room.counter("blocks")):
            return -1, output, "the ledger has no launch, or keeps blocks that were freed"
        if process.returncode == 0 and not room.returned:
            return -1, output, "the program never connected again"
        if process.returncode == 0 and parks and not moved:
            return -1, output, "no memory was parked"
    return process.returncode, output, (work / "errors").read_text()


def main() -> int:
    """Build, run the stress program twice, and print the result; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.interposed.sanitize", description=__doc__
    )
    parser.add_argument("sanitizer", choices=sorted(OPTIONS))
    sanitizer = parser.parse_args().sanitizer
    with tempfile.TemporaryDirectory() as work:
        with GrantSandbox(Path(work) / "probe", []) as room:
            probe = subprocess.run(
                room.command("true"), capture_output=True, text=True, check=False
            )
        if probe.returncode:
            print(f"skipped: no mount namespace ({probe.stderr.strip()})")
            return NOT_HERE
        try:
            folder = build(sanitizer)
        except subprocess.CalledProcessError as e:
            report = e.stdout + e.stderr
            print(report[max(report.find("FAILED:"), 0) :][:4000])
            return 1
        found = []
        for parks in (False, True):
            work_of_run = Path(work) / f"run-{parks}"
            status, output, errors = stress(folder, work_of_run, OPTIONS[sanitizer], parks=parks)
            if status or "runtime error:" in errors or "WARNING: ThreadSanitizer" in errors:
                print(
                    f"{sanitizer} sanitizer, parking {parks}: status {status}\n{output}{errors[:20000]}"
                )
                return 1
            found.append(json.loads(output.splitlines()[-1]))
    calls = " and ".join(str(one["calls"]) for one in found)
    longest = max(one["longest_ms"] for one in found)
    print(f"{calls} calls (memory parked), nothing found; the longest took {longest} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
