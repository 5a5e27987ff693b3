"""Test the control library with a grant page of arbitrary content, for TIDEGATE_FUZZ_SECONDS seconds.

Only the governor writes the page, so invalid content means a bug in the governor, or a governor of
another version. A governed process must survive that: no crash, and no call that never returns. If
the page closes the grant, calls have to wait, and return when the page is valid again. The library
has no options that could be fuzzed together with the page: it reads no environment variable and no
other file.
"""

import contextlib
import json
import os
import random
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from bench.sandbox import GrantSandbox, control_folder
from libcontrol import layout, pages
from simgpu import simgpu
from tests.conftest import lack

SECONDS = float(os.environ.get("TIDEGATE_FUZZ_SECONDS", "60"))
LIMIT_MS = 5000
"""Limit in milliseconds after which a call counts as hanging: the tests never close the grant for
more than 0.2 s.
"""
UUID = simgpu.device_uuid(1, 0).bytes
SECOND_NS = 1_000_000_000

FIELDS = [
    (struct, base, field)
    for struct, base in (
        (layout.GRANT_HEADER, 0),
        (layout.GRANT_DEVICE, layout.grant_device(0)),
        (layout.GRANT_DEVICE, layout.grant_device(1)),
    )
    for field in struct.fields
]


class StressProgram:
    """The stress program in a sandbox, on a separate simulated GPU."""

    def __init__(self, work: Path, build: Path, **fields: int) -> None:
        self.work = work
        self.build = build
        simgpu.create(work / "gpu")
        driver = (build / "simgpu/libcuda.so.1").resolve()
        self.library = control_folder(work / "lib", build / "libcontrol/libcuda.so.1", driver)
        self.room = GrantSandbox(work / "room", [UUID], **{"memory_limit": 1 << 30, **fields})

    def start(self, *options: str) -> subprocess.Popen[str]:
        """Start the program, with its standard error redirected to its output."""
        return subprocess.Popen(
            self.room.command(str(self.build / "stress"), "--limit-ms", str(LIMIT_MS), *options),
            env={
                **os.environ,
                "LD_LIBRARY_PATH": str(self.library),
                "SIMGPU_DIR": str(self.work / "gpu"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture
def governed(build_dir):
    """Yield a governed program; skip the test if this machine does not allow mount namespaces."""
    with tempfile.TemporaryDirectory() as work:
        made = StressProgram(Path(work), build_dir)
        with made.room:
            if subprocess.run(
                made.room.command("true"), capture_output=True, check=False
            ).returncode:
                lack("this machine does not allow mount namespaces")
            yield made


def finish(process: subprocess.Popen[str], seconds: float) -> str:
    """Return the complete output of a process; fail if it does not end within `seconds`."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"the process did not end within {seconds:g} s: {output}", pytrace=False)
    return output


def number(draw: random.Random) -> int:
    """Draw a number that is likely to expose an error."""
    now = time.monotonic_ns()
    return draw.choice(
        [
            0, 1, 2, 5, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1,
            now, now - 1, now - SECOND_NS, now + 10_000_000, now + SECOND_NS,
            now + 1000 * SECOND_NS, now - 1000 * SECOND_NS, draw.getrandbits(64),
            draw.getrandbits(20),
        ]
    )  # fmt: skip


def damage(room: GrantSandbox, draw: random.Random) -> list[str]:
    """Change one to four words of the page, and return a description of the changes."""
    done = []
    for _ in range(draw.randrange(1, 5)):
        value = number(draw)
        if draw.random() < 0.15:
            at = draw.randrange(0, layout.GRANT_SIZE - 8, 4)
            room.grant[at : at + 8] = value.to_bytes(8, "little")
            done.append(f"[{at}] = {value:#x}")
            continue
        struct, base, field = draw.choice(FIELDS)
        index = draw.randrange(field.n)
        value &= (1 << (8 * layout.SIZES[field.type])) - 1
        pages.write(room.grant, base, struct.name, field.name, value, index=index)
        done.append(f"{struct.name}@{base}.{field.name}[{index}] = {value:#x}")
    if draw.random() < 0.5:
        room.wake()
    return done


def test_a_running_process_survives_any_page_and_continues_when_it_is_valid(governed):
    seed = time.time_ns()
    draw = random.Random(seed)  # noqa: S311
    history: list[list[str]] = []
    process = governed.start("--wait-file", str(governed.work / "end"), "--seed", str(seed % 2**32))
    wait_for(governed.work / "end.ready", process)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        governed.room.alive = draw.random() < 0.8
        history.append(damage(governed.room, draw))
        time.sleep(draw.uniform(0.001, 0.1))
        governed.room.recover()
        time.sleep(draw.uniform(0.001, 0.02))
    governed.room.recover()
    governed.room.alive = True
    (governed.work / "end").touch()
    output = finish(process, 30)
    assert process.returncode == 0, f"seed {seed}: {output}\nlast changes: {history[-5:]}"
    result = json.loads(output.splitlines()[-1])
    assert result["calls"] > 0
    print(f"{len(history)} pages, {result}")


def wait_for(path: Path, process: subprocess.Popen[str], seconds: float = 30) -> None:
    """Wait until a file exists; fail if the process ends before that."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"the process did not become ready: {finish(process, 1)}", pytrace=False)
        time.sleep(0.005)


def test_a_process_that_starts_with_any_page_ends(governed):
    """The process runs, or cuInit returns CUDA_ERROR_SYSTEM_NOT_READY, or there is not enough memory
    for a context.
    """
    seed = time.time_ns()
    draw = random.Random(seed)  # noqa: S311
    deadline = time.monotonic() + SECONDS
    rounds = 0
    while rounds < 3 or time.monotonic() < deadline:
        changes = damage(governed.room, draw)
        process = governed.start("--seconds", "0.1", "--threads", "2")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.3)
        governed.room.recover()
        output = finish(process, 30)
        fine = process.returncode in (0, 2) or "cuInit returned 802" in output
        assert fine, f"seed {seed}: {changes}: status {process.returncode}, {output}"
        rounds += 1
    print(f"{rounds} processes")


FAR = time.monotonic_ns() + 10**6 * SECOND_NS
AWAY = {
    "a grant that ended": [("grant_device", "deadline_ns", 1)],
    "a grant of the future": [("grant_device", "deadline_ns", FAR)],
    "a heartbeat of none": [("grant_header", "heartbeat_ns", 0), ("grant_device", "deadline_ns", 0)],
    "a heartbeat of the future": [
        ("grant_header", "heartbeat_ns", FAR), ("grant_device", "deadline_ns", 0)
    ],
    "a heartbeat of the end of time": [
        ("grant_header", "heartbeat_ns", 2**64 - 1), ("grant_device", "deadline_ns", 0)
    ],
    "standby for ever": [("grant_device", "standby_ns", FAR), ("grant_device", "deadline_ns", 0)],
    "no share": [("grant_device", "compute", 0), ("grant_device", "deadline_ns", 0)],
    "all shares": [("grant_device", "compute", 2**32 - 1), ("grant_device", "deadline_ns", 0)],
    "nothing in flight": [("grant_header", "inflight_ns", 0), ("grant_device", "deadline_ns", 0)],
    "markers for ever": [("grant_header", "marker_ns", 0), ("grant_device", "deadline_ns", 0)],
    "never a marker": [("grant_header", "marker_ns", 2**64 - 1), ("grant_device", "deadline_ns", 0)],
    "another's work beside it for ever": [
        ("grant_header", "lookahead_ns", 2**62), ("grant_device", "strategy", 1),
        ("grant_device", "start_ns", FAR), ("grant_device", "epoch", 4711),
        ("grant_device", "deadline_ns", FAR),
    ],
    "a lookahead for ever": [
        ("grant_header", "lookahead_ns", 2**64 - 1), ("grant_device", "deadline_ns", 0)
    ],
}  # fmt: skip
"""Fields of a page, with the values that they had when its governor died with `on_governor_loss: keep`."""


@pytest.mark.parametrize("fields", AWAY.values(), ids=AWAY)
def test_a_process_continues_whatever_its_page_contained_when_the_governor_died(governed, fields):
    process = governed.start(
        "--seconds", "2", "--threads", "2", "--wait-file", str(governed.work / "end")
    )
    wait_for(governed.work / "end.ready", process)
    governed.room.alive = False
    time.sleep(0.1)  # after the last heartbeat
    for struct, field, value in fields:
        base = 0 if struct == "grant_header" else layout.grant_device(0)
        pages.write(governed.room.grant, base, struct, field, value)
    governed.room.wake()
    (governed.work / "end").touch()
    output = finish(process, 30)
    assert process.returncode == 0, output
