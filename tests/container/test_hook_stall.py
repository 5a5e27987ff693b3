"""A root file system that does not answer: the start ends at its deadline, and has no effect
afterwards.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oci_hook.edits import HOOK_TIMEOUT
from tests.container.bundles import HOOK, Runtime
from tests.container.conftest import ForkServer, HookNode
from tests.container.fuse import Fuse
from tests.container.held import HeldContainer
from tests.container.nodes import wait_for
from tests.container.test_hook_start import tree

# These tests wait for deadlines. For some seconds they leave processes that cannot be killed, which
# other tests would find when they search for leftovers.
pytestmark = pytest.mark.slow

DEADLINE = 4.0  # seconds; the hook has to reach the request that stalls before it
ENOUGH = 60.0  # seconds; a deadline that the hook is not meant to reach
ANSWERS = "check that file system's server (FUSE, NFS), and start the container once it answers\n"
LINE = (
    f"tidegate: the hook did not finish within {DEADLINE:g} s, and could not be interrupted:"
    f" most likely the container's root file system does not answer; {ANSWERS}"
)
# Requests that a start makes to its root file system. The governor admits the container after
# IMAGE and before MAKES.
IMAGE, MAKES = ("open", "ld.so.cache"), ("create", ".ld.so.cache.tidegate")
OTHERS = [
    ("getattr", ""), ("mkdir", "glibc-hwcaps"), ("mkdir", "x86-64-v2"), ("create", "nvidia-smi"),
    ("write", ".ld.so.cache.tidegate"), ("rename", "ld.so.cache"),
]  # fmt: skip
ENDS = ("rmdir", "x86-64-v2")


class HookWay:
    """The way in which the hook is executed: as the C program, with or without the fork server, or
    as the script.
    """

    def __init__(self, node: HookNode, fronts: Path, name: str) -> None:
        node.timeout = DEADLINE
        node.program = HOOK if name == "script" else fronts / "tidegate-hook"
        self.server = ForkServer(node.base / "run") if name == "server" else None

    def ends(self, fuse: Fuse) -> None:
        """Let the file system answer, and wait until the stuck process has ended."""
        stuck = fuse.stuck()
        # C programs built in another tree execute the scripts of that tree (tools/mutate.py).
        if self.server and "TIDEGATE_BUILD" not in os.environ:
            status = Path(f"/proc/{stuck}/stat").read_text()
            assert int(status.rpartition(") ")[2].split()[1]) == self.server.process.pid
        fuse.resume()
        wait_for(lambda: not Path(f"/proc/{stuck}").exists(), "the abandoned process to end")


@pytest.fixture(params=["server", "front", "script"])
def way(request: pytest.FixtureRequest, node: HookNode, fronts: Path) -> Iterator[HookWay]:
    made = HookWay(node, fronts, request.param)
    yield made
    if made.server:
        made.server.stop()


one_way = pytest.mark.parametrize("way", ["script"], indirect=True)


class Stalling:
    """A bundle with a root that FUSE serves from the directory `below`; `before`: its original content."""

    def __init__(self, node: HookNode) -> None:
        self.bundle = node.bundle("true")
        self.below = node.base / "below"
        self.bundle.rootfs.rename(self.below)
        self.bundle.rootfs.mkdir()
        self.fuse = Fuse(self.below, self.bundle.rootfs)
        self.before = tree(self.below)


@pytest.fixture
def stalling(node: HookNode) -> Stalling:
    return Stalling(node)


def left(node: HookNode) -> list[str]:
    """Return the names of the notes that starts have left in the runtime directory."""
    traces = node.base / "run/traces"
    return sorted(path.name for path in traces.iterdir()) if traces.exists() else []


def assert_nothing_left(node: HookNode, stalling: Stalling, held: HeldContainer) -> None:
    assert [mount for mount in held.mounts() if mount] == []
    assert tree(stalling.below) == stalling.before
    node.governor.wait_idle()
    assert node.governor.admitted == {}
    assert node.governor.confirmed == set()
    assert left(node) == []
    assert "left_behind" not in node.events()[-1]


def prepare_and_end(node: HookNode, held: HeldContainer) -> None:
    """Let the hook prepare the container, and end the container."""
    node.timeout = ENOUGH
    assert held.hook(node.hook).returncode == 0
    held.process.kill()
    held.process.wait()
    node.timeout = DEADLINE


def assert_ends_and_leaves_nothing(
    node: HookNode, way: HookWay, stalling: Stalling, operation: str, name: str
) -> None:
    with stalling.fuse as fuse, HeldContainer(stalling.bundle) as held:
        fuse.stall(operation, name)
        began = time.monotonic()
        done = held.hook(node.hook)
        assert time.monotonic() - began < HOOK_TIMEOUT
        assert (done.returncode, done.stderr, done.stdout) == (71, LINE, "")
        [event] = node.events()
        assert (event["outcome"], event["code"]) == ("failed", "mount")
        assert event["id"] == f"held-{held.process.pid}"
        way.ends(fuse)
        assert_nothing_left(node, stalling, held)
    assert [event["outcome"] for event in node.events()] == ["failed", "abandoned"]


@pytest.mark.parametrize(("operation", "name"), [IMAGE, MAKES], ids=["image", "makes"])
def test_a_start_ends_at_its_deadline_and_leaves_nothing(
    node: HookNode, way: HookWay, stalling: Stalling, operation: str, name: str
) -> None:
    assert_ends_and_leaves_nothing(node, way, stalling, operation, name)


@one_way
@pytest.mark.parametrize(("operation", "name"), OTHERS, ids=[f"{o}-{n}" for o, n in OTHERS])
def test_a_start_ends_at_its_deadline_wherever_it_is_stuck(
    node: HookNode, way: HookWay, stalling: Stalling, operation: str, name: str
) -> None:
    assert_ends_and_leaves_nothing(node, way, stalling, operation, name)


def test_a_runtime_waits_no_longer_than_the_deadline(
    way: HookWay, runc: Runtime, stalling: Stalling
) -> None:
    """runc waits until the hook and every process that has the hook's outputs have ended."""
    # The hook's entry was made before the deadline was set.
    for entries in stalling.bundle.config["hooks"].values():
        entries[0]["args"][-2] = str(DEADLINE)
    with stalling.fuse as fuse:
        fuse.stall(*IMAGE)
        ran = runc.run(stalling.bundle, timeout=HOOK_TIMEOUT)
        assert ran.status != 0
        assert LINE.strip() in ran.stderr
        way.ends(fuse)


def test_an_undo_that_is_stuck_is_completed_later(
    node: HookNode, way: HookWay, stalling: Stalling
) -> None:
    """The governor refuses the confirmation, and the file system stalls while the start is undone."""
    node.governor.mode = "deny-confirm"
    with stalling.fuse as fuse, HeldContainer(stalling.bundle) as held:
        fuse.stall("rmdir", "glibc-hwcaps")
        done = held.hook(node.hook)
        assert (done.returncode, done.stderr) == (71, LINE)
        way.ends(fuse)
        assert_nothing_left(node, stalling, held)
    assert node.events()[-1]["message"] == "the admission is gone"


def test_a_hook_that_the_runtime_kills_leaves_nothing(
    node: HookNode, way: HookWay, stalling: Stalling
) -> None:
    """This happens if the timeout in the hook entry is shorter than the hook's own deadline."""
    node.timeout = ENOUGH
    with stalling.fuse as fuse, HeldContainer(stalling.bundle) as held:
        fuse.stall(*MAKES)
        with subprocess.Popen(
            [*node.hook, "createRuntime"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as hook:
            assert hook.stdin is not None
            assert hook.stdout is not None
            hook.stdin.write(held.state())
            hook.stdin.close()
            fuse.stuck()
            hook.kill()
            assert hook.stdout.read() == b""  # no other process has it open
        way.ends(fuse)
        assert_nothing_left(node, stalling, held)
    assert [event["outcome"] for event in node.events()] == ["abandoned"]


@one_way
def test_a_stuck_start_delays_only_starts_on_its_own_root(
    node: HookNode, way: HookWay, runc: Runtime, stalling: Stalling
) -> None:
    """The stuck process holds the lock of that root until it ends."""
    with stalling.fuse as fuse, HeldContainer(stalling.bundle) as held:
        fuse.stall(*MAKES)
        assert held.hook(node.hook).stderr == LINE
        again = held.hook(node.hook, stdin=held.state(id="again"))
        assert again.returncode == 71
        assert again.stderr == (
            "tidegate: the start or end of another container on the same root file system is"
            f" unfinished, and the hook did not finish within {DEADLINE:g} s; {ANSWERS}"
        )
        node.timeout = ENOUGH
        other = runc.run(node.bundle("ls -A /run/tidegate", name="other"))
        assert "grant" in other.stdout.split(), other.stderr
        way.ends(fuse)
        assert held.hook(node.hook).returncode == 0
        assert node.events()[-1]["outcome"] == "prepared"


def test_a_stuck_cleanup_is_abandoned(node: HookNode, way: HookWay, stalling: Stalling) -> None:
    """The hook exits with 0; what the start left is removed when the file system answers."""
    with stalling.fuse as fuse, HeldContainer(stalling.bundle) as held:
        prepare_and_end(node, held)
        fuse.stall(*ENDS)
        done = held.hook(node.hook, stage="poststop")
        assert (done.returncode, done.stderr) == (0, LINE)
        way.ends(fuse)
        assert left(node) == []


@one_way
@pytest.mark.usefixtures("way")
def test_a_record_of_a_stuck_root_delays_no_other_cleanup(
    node: HookNode, stalling: Stalling
) -> None:
    """At each end of a container, the hook checks whether the roots of all notes still exist."""
    with stalling.fuse as fuse, HeldContainer(stalling.bundle) as held:
        prepare_and_end(node, held)
        node.timeout = ENOUGH
        fuse.stall("getattr", "")
        for number in range(3):
            done = held.hook(node.hook, stage="poststop", stdin=held.state(id=f"other{number}"))
            assert (done.returncode, done.stderr) == (0, "")
        stuck = fuse.stuck()
        assert [request.pid for request in fuse.held] == [stuck]  # a second sweep would be listed
        fuse.resume()
        wait_for(lambda: not Path(f"/proc/{stuck}").exists(), "the processes that looked to end")
    assert left(node) == [f"held-{held.process.pid}"]


@one_way
def test_a_stuck_precreate_is_abandoned(node: HookNode, way: HookWay, stalling: Stalling) -> None:
    """Podman takes the output as the configuration, so nothing is written."""
    config = stalling.bundle.config
    config["annotations"] |= {"tidegate.gpu/driver": "optional"}
    config["root"]["path"] = str(stalling.bundle.rootfs)
    with stalling.fuse as fuse:
        fuse.stall("lookup", "usr")
        done = subprocess.run(
            [*node.hook, "precreate"], input=json.dumps(config), capture_output=True, text=True,
            check=False, timeout=HOOK_TIMEOUT,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (71, "", LINE)
        way.ends(fuse)
    assert node.governor.requests == []


def wrapper(node: HookNode, runtime: str) -> list[str]:
    """Return the wrapper's command line, with the script `runtime` as the real runtime."""
    real, settings = node.base / "real", node.base / "settings"
    real.write_text(runtime)
    real.chmod(0o755)
    settings.write_text(
        f"runtime {real}\nruntime-dir {node.base}/run\nlog {node.log}\n"
        f"hook-arguments {' '.join(node.hook[1:])}\n"
    )
    program = node.program.with_name("tidegate-runtime")
    return [str(program), "--tidegate-config", str(settings)]


def test_the_wrapper_abandons_a_root_that_does_not_answer(
    node: HookNode, way: HookWay, stalling: Stalling
) -> None:
    """With `driver: optional`, the wrapper searches the image for its C library."""
    log = node.base / "runc.log"
    command = [*wrapper(node, "#!/bin/sh\necho executed\n"), "--log", str(log)]
    bundle = stalling.bundle
    bundle.config["annotations"] |= {"tidegate.gpu/driver": "optional"}
    bundle.write()
    before = (bundle.path / "config.json").read_bytes()
    with stalling.fuse as fuse:
        fuse.stall("lookup", "usr")
        done = subprocess.run(
            [*command, "create", "--bundle", bundle.path, "one"],
            capture_output=True, text=True, check=False, timeout=HOOK_TIMEOUT,
        )  # fmt: skip
        line = LINE.replace("the hook", "tidegate-runtime", 1)
        assert (done.returncode, done.stdout, done.stderr) == (71, "", line)
        way.ends(fuse)
    assert log.read_text().count(line.strip()) == 1
    assert [event["outcome"] for event in node.events()] == ["failed", "abandoned"]
    assert (bundle.path / "config.json").read_bytes() == before
    assert node.governor.requests == []


def test_the_wrapper_abandons_a_stuck_cleanup(
    node: HookNode, way: HookWay, stalling: Stalling
) -> None:
    """The wrapper returns the real runtime's status."""
    command = wrapper(node, "#!/bin/sh\necho deleted\nexit 3\n")
    with stalling.fuse as fuse, HeldContainer(stalling.bundle) as held:
        prepare_and_end(node, held)
        fuse.stall(*ENDS)
        done = subprocess.run(
            [*command, "delete", f"held-{held.process.pid}"],
            capture_output=True, text=True, check=False, timeout=HOOK_TIMEOUT,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (3, "deleted\n", "")
        way.ends(fuse)
        assert left(node) == []
