"""Test what images, users and nodes can do to the wrapper, precreate, CDI and the hook alone.

Whatever they do, a container that can reach a GPU is governed or does not start.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.container.bundles import (
    LIBDIR,
    ContainerResult,
    DiskBundle,
    Runtime,
    add_hook,
    base_config,
    compile_c,
)
from tests.container.conftest import HookNode
from tests.container.test_hook_start import tree
from tests.container.test_runtime import (
    OURS,
    WrappedRuntime,
    dev,
    node,
    path_of,
    plain,
    precreate,
    wrapped,
    write_settings,
    written,
)

__all__ = ["dev", "node", "wrapped"]  # fixtures

OPTIONAL = {"tidegate.gpu/memory": "1Gi", "tidegate.gpu/driver": "optional"}
GPU_NODES = [
    {"path": "/dev/nvidiactl", "type": "c", "major": 195, "minor": 255},
    {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0},
]
UNGOVERNED = "and config.json gives the container a GPU, which would be ungoverned"
WITHOUT, WITH = 42, 7
LOOK_C = f"""
#include <unistd.h>
int main(void) {{ return access("/dev/nvidia0", F_OK) ? {WITHOUT} : {WITH}; }}
"""


def make_unserved(node: HookNode, bundle: DiskBundle, why: str) -> str:
    """Remove the node's mirror, or make the image unsuitable for any driver; return a word of the
    reason that is reported.
    """
    compile_c(LOOK_C, bundle.rootfs / "look", "-static")
    bundle.config["process"]["args"] = ["/look"]
    if why == "no mirror":
        node.driver_dir.unlink()
        node.driver_dir.mkdir()
        return "no driver mirror"
    (bundle.rootfs / LIBDIR / "libc.so.6").unlink()
    (bundle.rootfs / "usr/lib/ld-musl-x86_64.so.1").write_bytes(b"\x7fELF musl")
    return "musl"


def enter_cdi(node: HookNode, bundle: DiskBundle, nodes: list[dict[str, Any]] = GPU_NODES) -> None:
    """Edit the configuration as an engine with CDI does."""
    add_hook(bundle.config, [*node.hook, "--governed"], stage="createRuntime")
    bundle.config["linux"]["devices"] = list(nodes)


def logged(node: HookNode, name: str = "runtime.log") -> list[dict[str, Any]]:
    path = node.base / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_refused(node: HookNode, ran: ContainerResult, word: str) -> None:
    """Require that the container did not start and that the log says why; crun does not show what
    hooks write.
    """
    assert ran.status not in (WITH, WITHOUT, 0)
    [event] = [e for e in (*logged(node), *node.events()) if e["outcome"] == "failed"]
    assert word in event["message"]
    assert event["message"].endswith(UNGOVERNED)
    assert node.governor.admitted == {}


UNSERVED = pytest.mark.parametrize("why", ["musl", "no mirror"])


@UNSERVED
def test_optional_without_a_driver_gets_no_gpu_from_the_wrapper(
    node: HookNode, wrapped: WrappedRuntime, dev: Path, why: str
) -> None:
    """Such a node has no governor either, so the wrapper must not need one."""
    bundle = plain(node, "", annotations=OPTIONAL)
    word = make_unserved(node, bundle, why)
    write_settings(
        wrapped.settings, node, dev, path_of(wrapped.name), "runtime-dir /nonexistent/tidegate"
    )
    ran = wrapped.run(bundle)
    assert (ran.status, ran.stderr) == (WITHOUT, "")
    assert written(bundle) == bundle.config
    [event] = logged(node)
    assert (event["stage"], event["outcome"]) == ("runtime", "without-gpu")
    assert word in event["message"]


@UNSERVED
def test_optional_without_a_driver_gets_no_gpu_from_precreate(
    node: HookNode, dev: Path, runtime: Runtime, why: str
) -> None:
    bundle = plain(node, "", annotations=OPTIONAL)
    word = make_unserved(node, bundle, why)
    bundle.config["root"]["path"] = str(bundle.rootfs)
    data = json.dumps(bundle.config).encode()
    answer = precreate(node, dev, data)
    assert (answer.status, answer.stdout, answer.stderr) == (0, data.decode(), "")
    assert node.events()[0]["outcome"] == "without-gpu"
    assert word in node.events()[0]["message"]
    add_hook(bundle.config, node.hook, stage="createRuntime")
    assert runtime.run(bundle).status == WITHOUT
    assert node.events()[1]["outcome"] == "without-gpu"
    assert node.governor.requests == [r for r in node.governor.requests if r["op"] == "release"]


@UNSERVED
def test_optional_without_a_driver_is_refused_by_cdi(
    node: HookNode, runtime: Runtime, why: str
) -> None:
    """The engine has made the device nodes already."""
    bundle = plain(node, "", annotations=OPTIONAL)
    word = make_unserved(node, bundle, why)
    enter_cdi(node, bundle)
    assert_refused(node, runtime.run(bundle), word)


@UNSERVED
@pytest.mark.parametrize("how", ["node", "rule", "mount"])
def test_optional_with_a_gpu_of_the_user_s_is_refused_by_the_wrapper(
    node: HookNode, wrapped: WrappedRuntime, why: str, how: str
) -> None:
    bundle = plain(node, "", annotations=OPTIONAL)
    word = make_unserved(node, bundle, why)
    linux = bundle.config["linux"]
    if how == "node":
        linux["devices"] = GPU_NODES
    elif how == "rule":
        rule = {"allow": True, "type": "c", "major": 195, "minor": 0, "access": "rw"}
        linux["resources"] = {"devices": [rule]}
    else:
        bundle.config["mounts"].append(
            {"destination": "/dev/nvidia0", "source": "/dev/nvidia0", "options": ["bind"]}
        )
    ran = wrapped.run(bundle)
    assert UNGOVERNED in ran.stderr
    assert_refused(node, ran, word)
    assert written(bundle) == bundle.config


def test_optional_with_a_gpu_of_the_user_s_is_refused_by_precreate_and_hook(
    node: HookNode, dev: Path, runtime: Runtime
) -> None:
    bundle = plain(node, "", annotations=OPTIONAL)
    word = make_unserved(node, bundle, "musl")
    bundle.config["root"]["path"] = str(bundle.rootfs)
    bundle.config["linux"]["devices"] = GPU_NODES
    answer = precreate(node, dev, json.dumps(bundle.config).encode())
    assert answer.status == 0  # the hook finds the same error, and its message is shown
    node.log.unlink()
    bundle.config = json.loads(answer.stdout)
    assert_refused(node, runtime.run(bundle), word)


def test_optional_on_a_node_with_a_driver_gets_a_gpu(
    node: HookNode, wrapped: WrappedRuntime
) -> None:
    bundle = plain(node, "ls /dev; ls -A /run/tidegate", annotations=OPTIONAL)
    ran = wrapped.run(bundle)
    assert {"nvidia0", "grant"} <= set(ran.stdout.split()), ran.stderr


def test_an_image_that_changes_after_it_was_examined_gets_no_ungoverned_gpu(
    node: HookNode, wrapped: WrappedRuntime
) -> None:
    """By then, the wrapper has added the device nodes to the configuration."""
    bundle = plain(node, "", annotations=OPTIONAL)
    compile_c(LOOK_C, bundle.rootfs / "look", "-static")
    bundle.config["process"]["args"] = ["/look"]
    libc = bundle.rootfs / LIBDIR / "libc.so.6"
    # A hook of the engine runs before ours, as root and on the host.
    shell = ["sh", "-c", f"mv {libc} {libc}.away"]
    bundle.config["hooks"] = {"prestart": [{"path": "/bin/sh", "args": shell}]}
    assert_refused(node, wrapped.run(bundle), "no glibc")


def test_a_stale_mirror_is_refused_by_the_wrapper(node: HookNode, wrapped: WrappedRuntime) -> None:
    (node.base / "module-version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  1.2.3  Tue Jan 1 00:00:00 UTC 2030\n"
    )
    ran = wrapped.run(plain(node, "true", annotations=OPTIONAL))
    assert ran.status == 72
    assert "the kernel module is 1.2.3" in ran.stderr
    assert node.governor.requests == []


def test_the_wrapper_follows_no_link_of_the_image(node: HookNode, wrapped: WrappedRuntime) -> None:
    """R2: a file that the host has under the loader's path is not taken for the image's."""
    bundle = plain(node, "", annotations=OPTIONAL)
    compile_c(LOOK_C, bundle.rootfs / "look", "-static")
    bundle.config["process"]["args"] = ["/look"]
    shutil.rmtree(bundle.rootfs / "usr")
    (bundle.rootfs / "usr").symlink_to("/" + "../" * 20 + "usr")
    assert wrapped.run(bundle).status == WITHOUT
    assert written(bundle) == bundle.config


def test_the_wrapper_does_not_examine_the_hosts_root(
    node: HookNode, wrapped: WrappedRuntime
) -> None:
    """R16, with the host's root under another name."""
    bundle = plain(node, "", annotations=OPTIONAL)
    shutil.rmtree(bundle.rootfs)
    bundle.rootfs.symlink_to("/")
    ran = wrapped.run(bundle)
    assert ran.status == 66
    assert "is the host's own root" in ran.stderr
    assert node.governor.requests == []


KINDS = ("io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType")
SANDBOX = dict.fromkeys(KINDS, "sandbox")
CLAIMS = pytest.mark.parametrize(
    "claim",
    [SANDBOX, *(pytest.param({kind: "sandbox"}, marks=pytest.mark.slow) for kind in KINDS)],
    ids=["both", "containerd", "cri-o"],
)
SHOW = "ls /dev; ls -A /run/tidegate"


def assert_governed(node: HookNode, ran: ContainerResult) -> None:
    """Require that the container started with its GPU, under the quota that its annotations ask
    for.
    """
    assert {"nvidia0", "grant"} <= set(ran.stdout.split()), ran.stderr
    node.governor.wait_idle()
    [admit] = [r for r in node.governor.requests if r["op"] == "admit"]
    assert admit["annotations"] == OURS
    assert len(node.governor.confirmed) == 1


@CLAIMS
def test_a_container_that_claims_to_be_a_sandbox_is_governed_by_cdi(
    node: HookNode, dev: Path, runtime: Runtime, claim: dict[str, str]
) -> None:
    """Docker and Podman let a user set any annotation; sandboxes of containerd and CRI-O have no devices."""
    assert dev
    bundle = plain(node, SHOW, annotations=OURS | claim)
    enter_cdi(node, bundle)
    assert_governed(node, runtime.run(bundle))


def test_a_container_that_claims_to_be_a_sandbox_is_governed_by_cdi_without_nodes_too(
    node: HookNode, runtime: Runtime
) -> None:
    """Simulated GPUs, for instance, have no nodes: the hook's own argument shows that a GPU was
    requested.
    """
    bundle = plain(node, "ls -A /run/tidegate", annotations=OURS | SANDBOX)
    enter_cdi(node, bundle, [])
    assert "grant" in runtime.run(bundle).stdout
    assert node.governor.requests[0]["annotations"] == OURS
    assert node.events()[-1]["outcome"] == "released"
    assert not list((node.base / "run/traces").iterdir())


def test_a_sandbox_with_a_node_is_governed_by_the_hook_alone(
    node: HookNode, dev: Path, runtime: Runtime
) -> None:
    """Podman's `--device /dev/nvidia0`, with a hook that an annotation selected."""
    assert dev
    bundle = plain(node, SHOW, annotations=OURS | SANDBOX)
    add_hook(bundle.config, node.hook, stage="createRuntime", poststop=False)
    bundle.config["linux"]["devices"] = GPU_NODES
    assert_governed(node, runtime.run(bundle))


@CLAIMS
def test_a_container_that_claims_to_be_a_sandbox_is_governed_by_the_wrapper(
    node: HookNode, wrapped: WrappedRuntime, claim: dict[str, str]
) -> None:
    bundle = plain(node, SHOW, annotations=OURS | claim)
    bundle.config["linux"]["devices"] = GPU_NODES
    assert_governed(node, wrapped.run(bundle))
    assert node.governor.requests[0]["op"] == "reserve"
    assert node.governor.requests[0]["nodes"] == [0]


def test_a_container_that_claims_to_be_a_sandbox_is_governed_by_cdi_behind_the_wrapper(
    node: HookNode, wrapped: WrappedRuntime
) -> None:
    bundle = plain(node, SHOW, annotations=OURS | SANDBOX)
    enter_cdi(node, bundle, [])
    assert_governed(node, wrapped.run(bundle))
    assert node.governor.requests[0]["exact"] is True
    assert "poststop" not in written(bundle)["hooks"]


def test_a_container_that_claims_to_be_a_sandbox_is_governed_by_precreate(
    node: HookNode, dev: Path, runtime: Runtime
) -> None:
    bundle = plain(node, SHOW, annotations=OURS | SANDBOX)
    bundle.config["linux"]["devices"] = GPU_NODES
    answer = precreate(node, dev, json.dumps(bundle.config).encode())
    bundle.config = json.loads(answer.stdout)
    assert_governed(node, runtime.run(bundle))


def test_a_sandbox_without_a_gpu_is_left_alone_by_all(
    node: HookNode, dev: Path, wrapped: WrappedRuntime, runtime: Runtime
) -> None:
    """A pod's own sandbox has the pod's annotations; a user's container that claims to be one has no GPU either."""
    bundle = plain(node, SHOW, annotations=OURS | SANDBOX)
    for n in range(2):
        ran = (wrapped, runtime)[n].run(bundle)
        assert not {"nvidia0", "grant"} & set(ran.stdout.split())
        assert written(bundle) == bundle.config
        data = json.dumps(bundle.config).encode()
        assert precreate(node, dev, data).stdout.encode() == data
        # Once more with the hook, which Podman adds because of the annotation.
        add_hook(bundle.config, node.hook, stage="createRuntime", poststop=False)
    assert node.governor.requests == []


# How engines and people write the command line, and how an attacker would write it to make the
# wrapper edit a different bundle from the one that the runtime reads. {b} is the container's
# bundle. The directory around it is another bundle, which asks for nothing.
LINES = {
    "run -b {b} x": True,
    "run -b={b} x": False,
    "run -b{b} x": True,
    "run --b {b} x": False,
    "run --bund={b} x": False,
    "run -bundle {b} x": True,
    "run x -b {b}": False,
    "run --bundle {b} -- x": False,
    "run --bundle . --bundle {b} x": False,
    "run --pid-file --bundle -b {b} x": True,
    "run --bundle link/.. x": True,
    "run --no-pivot=false -b {b} x": False,
    "--log-format create run -b {b} x": False,
    "-debug run -b {b} x": False,
    "-- run -b {b} x": False,
    "run -f {b}/config.json x": False,
    "run --conf {b}/config.json -b {b} x": True,
}
STARTS = {
    "run -b {b} x": ("runc", "crun"),
    "run --bundle link/.. x": ("runc", "crun"),
    "run --pid-file --bundle -b {b} x": ("runc", "crun"),
    "run -bundle {b} x": ("runc",),
    "run -b{b} x": ("crun",),
}
QUICK_LINES = [
    pytest.param(line, marks=() if quick else pytest.mark.slow) for line, quick in LINES.items()
]


@pytest.mark.parametrize("line", QUICK_LINES)
def test_the_wrapper_reads_the_command_line_as_the_runtime_does(
    node: HookNode, wrapped: WrappedRuntime, line: str
) -> None:
    """A container that starts has the GPU that its own config.json asks for, and the other bundle stays unchanged."""
    bundle = plain(node, SHOW + "; echo it-runs")
    bundle.write()
    other = node.base / "other"
    (other / "rootfs").mkdir(parents=True)
    (other / "undle").mkdir()
    (other / "link").symlink_to(bundle.rootfs)
    beside = plain_config()
    (other / "config.json").write_text(beside)
    words = wrapped.command(*line.format(b=bundle.path).split())
    name = f"tidegate-front-{os.getpid()}"
    done = subprocess.run(
        [name if word == "x" else word for word in words],
        cwd=other, capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    if "it-runs" in done.stdout:
        assert "grant" in done.stdout.split(), done.stderr
    else:
        assert done.returncode != 0
        assert node.governor.admitted == {}
    assert (other / "config.json").read_text() == beside
    if wrapped.name in STARTS.get(line, ()):
        assert "it-runs" in done.stdout, done.stderr


def plain_config() -> str:
    config = base_config("echo other", annotations={})
    return json.dumps(config)


def test_a_config_that_hooks_do_not_read_is_refused(
    node: HookNode, wrapped: WrappedRuntime
) -> None:
    """Only crun has --config; the hook would follow the bundle's own config.json instead."""
    bundle = plain(node, "true")
    asks = node.base / "asks.json"
    asks.write_text(json.dumps(bundle.config))
    bundle.config["annotations"] = {}
    bundle.write()
    done = subprocess.run(
        wrapped.command("run", "-f", str(asks), "-b", str(bundle.path), "x"),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert node.governor.requests == []
    if wrapped.name == "crun":
        assert "--config names" in done.stderr


def nested(depth: int) -> str:
    return '{"annotations": {"tidegate.gpu/memory": "1Gi"}, "x": ' + "[" * depth + "]" * depth + "}"


HOSTILE = {
    "enormous": '{"annotations": {"tidegate.gpu/memory": "1Gi"}, "x": "' + "x" * (9 << 20) + '"}',
    "deep": nested(100_000),
    "twice": '{"annotations": {"tidegate.gpu/memory": "1Gi"}, "linux": {}, "linux": {"devices": []}}',
    "annotation twice": '{"annotations": {"tidegate.gpu/memory": "1Gi", "tidegate.gpu/memory": "2Gi"}}',
    "digits": '{"annotations": {"tidegate.gpu/memory": "1Gi"}, "x": ' + "9" * 10_000 + "}",
    "no text": '{"annotations": {"tidegate.gpu/memory": "1Gi"}, "x": "\udcff"}',
    "lists": '{"annotations": {"tidegate.gpu/memory": "1Gi"}, "linux": [], "hooks": [], "process": []}',
    "options": '{"annotations": {"tidegate.gpu/memory": "1Gi --driver-dir=/tmp", "tidegate.gpu/--log": "/x"}}',
    "a reservation of any size": '{"annotations": {"tidegate.gpu/reservation": "'
    + "x" * 60_000
    + '", "tidegate.gpu/x": "1"}}',
}


QUICK_HOSTILE = ("enormous", "deep", "twice", "options")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, id=name, marks=() if name in QUICK_HOSTILE else pytest.mark.slow)
        for name, text in HOSTILE.items()
    ],
)
def test_a_hostile_config_is_refused_with_one_line(
    node: HookNode, dev: Path, wrapped: WrappedRuntime, text: str
) -> None:
    bundle = node.bundle("true")
    data = text.encode(errors="surrogateescape")
    (bundle.path / "config.json").write_bytes(data)
    done = subprocess.run(
        wrapped.command("run", "--bundle", str(bundle.path), "x"),
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert done.returncode in (64, 66), done.stderr
    [line] = [line for line in done.stderr.splitlines() if line]
    assert line.startswith("tidegate: ")
    assert (bundle.path / "config.json").read_bytes() == data
    answer = precreate_bytes(node, dev, data)
    assert "Traceback" not in answer.stderr
    if answer.status == 0:  # the hook comes to the same result
        hooks = json.loads(answer.stdout)["hooks"]["createRuntime"]
        assert [hook["path"] for hook in hooks] == [node.hook[0]]
        assert "devices" not in answer.stdout
    assert {request["op"] for request in node.governor.requests} <= {"reserve"}


@pytest.mark.slow
def test_a_deeply_nested_config_is_refused_or_passed_on(
    node: HookNode, dev: Path, wrapped: WrappedRuntime
) -> None:
    """Near the depth limit, every configuration that can be read can be written as well."""
    assert dev
    bundle = node.bundle("true")
    ends = set()
    for depth in range(960, 1010):
        (bundle.path / "config.json").write_text(nested(depth))
        done = subprocess.run(
            wrapped.command("run", "--bundle", str(bundle.path), f"x{depth}"),
            capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
        assert "Traceback" not in done.stderr
        assert (done.returncode in (64, 66)) == done.stderr.startswith("tidegate: "), done.stderr
        ends.add(done.returncode in (64, 66))
    assert ends == {True, False}


def precreate_bytes(node: HookNode, dev: Path, data: bytes) -> ContainerResult:
    done = subprocess.run(
        [*node.hook, "--dev-dir", str(dev), "precreate"],
        input=data, capture_output=True, check=False, timeout=30,
    )  # fmt: skip
    return ContainerResult(done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.parametrize(
    "kind",
    ["fifo", "device", *(pytest.param(k, marks=pytest.mark.slow) for k in ("directory", "socket"))],
)
def test_a_config_that_is_not_a_regular_file_is_refused_with_one_line(
    node: HookNode, wrapped: WrappedRuntime, kind: str
) -> None:
    bundle = node.bundle("true")
    path = bundle.path / "config.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    else:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero never ends
    done = subprocess.run(
        wrapped.command("run", "--bundle", str(bundle.path), "x"),
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert done.returncode == 66
    assert done.stderr.startswith("tidegate: ")


def test_an_endless_answer_of_the_governor_ends_at_the_deadline(
    node: HookNode, dev: Path, wrapped: WrappedRuntime
) -> None:
    """R14: each byte arrives in time, but the deadline applies to the whole answer."""
    drip = node.base / "drip"
    drip.mkdir()
    stop = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(drip / "governor.sock"))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                while not stop.wait(0.1):
                    connection.sendall(b" ")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        node.timeout = 1.0
        write_settings(wrapped.settings, node, dev, path_of(wrapped.name), f"runtime-dir {drip}")
        ran = wrapped.run(plain(node, "true"), timeout=15)
        stop.set()
        thread.join()
    assert ran.status == 71
    assert "tidegate-runtime did not finish within 1 s; see the hook's log" in ran.stderr


def test_the_deadline_does_not_apply_to_the_real_runtime(
    node: HookNode, dev: Path, require: Callable[..., None]
) -> None:
    """A timer survives execve and would end crun; programs in Go ignore its signal."""
    require("crun")
    wrapper = WrappedRuntime("crun", node.base / "state")
    wrapper.program = node.program.with_name("tidegate-runtime")
    wrapper.settings = node.base / "runtime.conf"
    node.timeout = 5.0
    write_settings(wrapper.settings, node, dev, path_of("crun"))
    bundle = plain(node, "echo alive")
    bundle.config["hooks"] = {"prestart": [{"path": "/bin/sleep", "args": ["sleep", "5.2"]}]}
    ran = wrapper.run(bundle)
    assert ran.stdout == "alive\n", ran.stderr


def test_other_hooks_stay_in_place_and_precede_ours(
    node: HookNode, wrapped: WrappedRuntime
) -> None:
    """A hook entry that names our hook with other options is replaced; no other hook runs between
    the creation of the device nodes and ours.
    """
    # The other hook reads its input: if a hook ends before that, crun fails the start (EPIPE).
    other = {"path": "/bin/sh", "args": ["sh", "-c", "cat >/dev/null"]}
    fake = {"path": node.hook[0], "args": ["tidegate-hook", "--runtime-dir", "/x", "poststop"]}
    bundle = plain(node, SHOW)
    bundle.config["hooks"] = {
        "prestart": [other, fake],
        "createRuntime": [fake, other, other],
        "poststop": [fake],
    }
    assert_governed(node, wrapped.run(bundle))
    hooks = written(bundle)["hooks"]
    assert hooks["prestart"] == [other]
    assert hooks["createRuntime"][:2] == [other, other]
    assert [hook["path"] for hook in hooks["createRuntime"]][2:] == [node.hook[0]]
    assert hooks["createRuntime"][2]["args"][-1] == "createRuntime"
    assert "poststop" not in hooks


def test_a_config_that_changes_after_the_wrapper_gets_no_ungoverned_gpu(
    node: HookNode, wrapped: WrappedRuntime, dev: Path
) -> None:
    """The runtime reads a different configuration from the one that the wrapper edited, with the
    device node of a GPU that was not granted.
    """
    real = node.base / "swapping"
    bundle = plain(node, SHOW)
    swap = 's/"major": 195, "minor": 0,/"major": 195, "minor": 1,/g'
    real.write_text(
        f"#!/bin/sh\nsed -i '{swap}' {bundle.path}/config.json\n"
        f'exec {path_of(wrapped.name)} "$@"\n'
    )
    real.chmod(0o755)
    write_settings(wrapped.settings, node, dev, str(real))
    ran = wrapped.run(bundle)
    assert ran.status != 0
    assert "nvidia1" not in ran.stdout
    [event] = node.events()
    assert (event["outcome"], event["code"]) == ("failed", "device")
    deadline = time.monotonic() + 20
    while node.governor.admitted:  # the governor detects the end without a report
        assert time.monotonic() < deadline
        time.sleep(0.02)


MORE = {
    "node": {"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1},
    "another name": {"path": "/dev/gpu", "type": "c", "major": 195, "minor": 1},
    "rule": {"allow": True, "type": "c", "major": 195, "minor": 1, "access": "rw"},
    "rule for all": {"allow": True, "type": "c", "major": 195, "minor": -1, "access": "rwm"},
}


@pytest.mark.parametrize(
    "how",
    [
        "node",
        "rule for all",
        *(pytest.param(h, marks=pytest.mark.slow) for h in ("another name", "rule")),
    ],
)
def test_the_wrapper_removes_a_gpu_that_was_not_granted(
    node: HookNode, wrapped: WrappedRuntime, how: str
) -> None:
    bundle = plain(node, SHOW)
    linux = bundle.config["linux"]
    if how.startswith("rule"):
        linux["resources"] = {"devices": [MORE[how]]}
    else:
        linux["devices"] = [MORE[how]]
    ran = wrapped.run(bundle)
    assert_governed(node, ran)
    assert not {"nvidia1", "gpu"} & set(ran.stdout.split())
    assert {r["minor"] for r in written(bundle)["linux"]["resources"]["devices"]} == {0, 255}


@pytest.mark.parametrize("how", [["--force"], ["-f"], ["--"], []])
def test_each_form_of_delete_cleans_up(
    node: HookNode, wrapped: WrappedRuntime, how: list[str]
) -> None:
    """The wrapper cleans up what the runtime deletes, even for a container that calls itself a
    sandbox.
    """
    bundle = plain(node, "true", annotations=OURS | SANDBOX)
    bundle.config["linux"]["devices"] = GPU_NODES
    bundle.write()
    before = tree(bundle.rootfs)
    name = f"tidegate-test-{os.getpid()}-delete"

    def command(*arguments: str, stdout: int = subprocess.DEVNULL) -> str:
        ran = subprocess.run(
            wrapped.command(*arguments),
            check=True,
            timeout=30,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            text=True,
        )
        return ran.stdout

    command("create", "--bundle", str(bundle.path), name)
    try:
        assert (node.base / "run/traces" / name).exists()
        if how in ([], ["--"]):
            command("start", name)
            for _ in range(300):
                if (
                    json.loads(command("state", name, stdout=subprocess.PIPE))["status"]
                    == "stopped"
                ):
                    break
                time.sleep(0.1)
    finally:
        command("delete", *how, name)
    assert not list((node.base / "run/traces").iterdir())
    assert tree(bundle.rootfs).keys() == before.keys()
