"""What an image, a user or a node can do to the ways in: the wrapper, precreate, CDI, and the hook alone.

Whatever they do, a container that can reach a GPU is governed or does not start.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.container.bundles import LIBDIR, Bundle, Ran, Runtime, add_hook, compile_c
from tests.container.conftest import Node
from tests.container.test_runtime import (
    OURS,
    Wrapped,
    dev,
    path_of,
    plain,
    precreate,
    wrapped,
    write_settings,
    written,
)

__all__ = ["dev", "wrapped"]  # fixtures

OPTIONAL = {"tidegate.gpu/memory": "1Gi", "tidegate.gpu/driver": "optional"}
GPU_NODES = [
    {"path": "/dev/nvidiactl", "type": "c", "major": 195, "minor": 255},
    {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0},
]
UNGOVERNED = "and config.json gives the container a GPU, which nobody would govern"
WITHOUT, WITH = 42, 7
LOOK_C = f"""
#include <unistd.h>
int main(void) {{ return access("/dev/nvidia0", F_OK) ? {WITHOUT} : {WITH}; }}
"""


def make_unserved(node: Node, bundle: Bundle, why: str) -> str:
    """Let no driver serve the image, or the node have none; gives a word of the reason."""
    compile_c(LOOK_C, bundle.rootfs / "look", "-static")
    bundle.config["process"]["args"] = ["/look"]
    if why == "no mirror":
        node.driver_dir.unlink()
        node.driver_dir.mkdir()
        return "no driver mirror"
    (bundle.rootfs / LIBDIR / "libc.so.6").unlink()
    (bundle.rootfs / "usr/lib/ld-musl-x86_64.so.1").write_bytes(b"\x7fELF musl")
    return "musl"


def enter_cdi(node: Node, bundle: Bundle, nodes: list[dict[str, Any]] = GPU_NODES) -> None:
    """Do what an engine does that knows CDI."""
    add_hook(bundle.config, [*node.hook, "--governed"], stage="createRuntime", poststop=False)
    bundle.config["linux"]["devices"] = list(nodes)


def logged(node: Node, name: str = "runtime.log") -> list[dict[str, Any]]:
    path = node.base / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def refused(node: Node, ran: Ran, word: str) -> None:
    """It did not start, and the line says why; crun keeps what hooks write to itself."""
    assert ran.status not in (WITH, WITHOUT, 0)
    [event] = [e for e in (*logged(node), *node.events()) if e["outcome"] == "failed"]
    assert word in event["message"]
    assert event["message"].endswith(UNGOVERNED)
    assert node.governor.admitted == {}


UNSERVED = pytest.mark.parametrize("why", ["musl", "no mirror"])


@UNSERVED
def test_optional_without_a_driver_is_without_a_gpu_by_the_wrapper(
    node: Node, wrapped: Wrapped, dev: Path, why: str
) -> None:
    """Nor is there a governor on such a node: nobody asks it."""
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
def test_optional_without_a_driver_is_without_a_gpu_by_precreate(
    node: Node, dev: Path, runtime: Runtime, why: str
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
    node: Node, runtime: Runtime, why: str
) -> None:
    """The engine has made the nodes already."""
    bundle = plain(node, "", annotations=OPTIONAL)
    word = make_unserved(node, bundle, why)
    enter_cdi(node, bundle)
    refused(node, runtime.run(bundle), word)


@UNSERVED
@pytest.mark.parametrize("how", ["node", "rule", "mount"])
def test_optional_with_a_gpu_of_the_user_s_is_refused_by_the_wrapper(
    node: Node, wrapped: Wrapped, why: str, how: str
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
    refused(node, ran, word)
    assert written(bundle) == bundle.config


def test_optional_with_a_gpu_of_the_user_s_is_refused_by_precreate_and_hook(
    node: Node, dev: Path, runtime: Runtime
) -> None:
    bundle = plain(node, "", annotations=OPTIONAL)
    word = make_unserved(node, bundle, "musl")
    bundle.config["root"]["path"] = str(bundle.rootfs)
    bundle.config["linux"]["devices"] = GPU_NODES
    answer = precreate(node, dev, json.dumps(bundle.config).encode())
    assert answer.status == 0  # the hook finds the same, and its line is shown
    node.log.unlink()
    bundle.config = json.loads(answer.stdout)
    refused(node, runtime.run(bundle), word)


def test_optional_on_a_node_with_a_driver_is_with_a_gpu(node: Node, wrapped: Wrapped) -> None:
    bundle = plain(node, "ls /dev; ls -A /run/tidegate", annotations=OPTIONAL)
    ran = wrapped.run(bundle)
    assert {"nvidia0", "grant"} <= set(ran.stdout.split()), ran.stderr


def test_an_image_that_changes_after_it_was_looked_at_gets_no_ungoverned_gpu(
    node: Node, wrapped: Wrapped
) -> None:
    """The nodes are written down by then."""
    bundle = plain(node, "", annotations=OPTIONAL)
    compile_c(LOOK_C, bundle.rootfs / "look", "-static")
    bundle.config["process"]["args"] = ["/look"]
    libc = bundle.rootfs / LIBDIR / "libc.so.6"
    # A hook of the engine's runs before ours, as root and on the host.
    shell = ["sh", "-c", f"mv {libc} {libc}.away"]
    bundle.config["hooks"] = {"prestart": [{"path": "/bin/sh", "args": shell}]}
    refused(node, wrapped.run(bundle), "no glibc")


def test_a_stale_mirror_ends_the_start_at_the_wrapper(node: Node, wrapped: Wrapped) -> None:
    (node.base / "module-version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  1.2.3  Tue Jan 1 00:00:00 UTC 2030\n"
    )
    ran = wrapped.run(plain(node, "true", annotations=OPTIONAL))
    assert ran.status == 72
    assert "the kernel module is 1.2.3" in ran.stderr
    assert node.governor.requests == []


def test_the_wrapper_follows_no_link_of_the_image(node: Node, wrapped: Wrapped) -> None:
    """R2: what the host has in the loader's place is not taken for the image's."""
    bundle = plain(node, "", annotations=OPTIONAL)
    compile_c(LOOK_C, bundle.rootfs / "look", "-static")
    bundle.config["process"]["args"] = ["/look"]
    shutil.rmtree(bundle.rootfs / "usr")
    (bundle.rootfs / "usr").symlink_to("/" + "../" * 20 + "usr")
    assert wrapped.run(bundle).status == WITHOUT
    assert written(bundle) == bundle.config


def test_the_wrapper_looks_into_no_root_of_the_host_s(node: Node, wrapped: Wrapped) -> None:
    """R16, by another name."""
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


def governed(node: Node, ran: Ran) -> None:
    """It started with its GPU, under the quota that its annotations ask for."""
    assert {"nvidia0", "grant"} <= set(ran.stdout.split()), ran.stderr
    node.governor.wait_idle()
    [admit] = [r for r in node.governor.requests if r["op"] == "admit"]
    assert admit["annotations"] == OURS
    assert len(node.governor.confirmed) == 1


@CLAIMS
def test_who_calls_itself_a_sandbox_is_governed_by_cdi(
    node: Node, dev: Path, runtime: Runtime, claim: dict[str, str]
) -> None:
    """Docker and Podman let a user set any annotation; sandboxes of containerd and CRI-O have no devices."""
    assert dev
    bundle = plain(node, SHOW, annotations=OURS | claim)
    enter_cdi(node, bundle)
    governed(node, runtime.run(bundle))


def test_who_calls_itself_a_sandbox_is_governed_by_cdi_without_nodes_too(
    node: Node, runtime: Runtime
) -> None:
    """As simulated GPUs have none: the hook's own argument says that a GPU was asked for."""
    bundle = plain(node, "ls -A /run/tidegate", annotations=OURS | SANDBOX)
    enter_cdi(node, bundle, [])
    assert "grant" in runtime.run(bundle).stdout
    assert node.governor.requests[0]["annotations"] == OURS


def test_a_sandbox_with_a_node_is_governed_by_the_hook_alone(
    node: Node, dev: Path, runtime: Runtime
) -> None:
    """Podman's `--device /dev/nvidia0`, with a hook that came by its annotation."""
    assert dev
    bundle = plain(node, SHOW, annotations=OURS | SANDBOX)
    add_hook(bundle.config, node.hook, stage="createRuntime", poststop=False)
    bundle.config["linux"]["devices"] = GPU_NODES
    governed(node, runtime.run(bundle))


@CLAIMS
def test_who_calls_itself_a_sandbox_is_governed_by_the_wrapper(
    node: Node, wrapped: Wrapped, claim: dict[str, str]
) -> None:
    bundle = plain(node, SHOW, annotations=OURS | claim)
    bundle.config["linux"]["devices"] = GPU_NODES
    governed(node, wrapped.run(bundle))
    assert node.governor.requests[0]["op"] == "reserve"
    assert node.governor.requests[0]["nodes"] == [0]


def test_who_calls_itself_a_sandbox_is_governed_by_cdi_behind_the_wrapper(
    node: Node, wrapped: Wrapped
) -> None:
    bundle = plain(node, SHOW, annotations=OURS | SANDBOX)
    enter_cdi(node, bundle, [])
    governed(node, wrapped.run(bundle))
    assert node.governor.requests[0]["exact"] is True


def test_who_calls_itself_a_sandbox_is_governed_by_precreate(
    node: Node, dev: Path, runtime: Runtime
) -> None:
    bundle = plain(node, SHOW, annotations=OURS | SANDBOX)
    bundle.config["linux"]["devices"] = GPU_NODES
    answer = precreate(node, dev, json.dumps(bundle.config).encode())
    bundle.config = json.loads(answer.stdout)
    governed(node, runtime.run(bundle))


def test_a_sandbox_without_a_gpu_is_left_alone_by_all(
    node: Node, dev: Path, wrapped: Wrapped, runtime: Runtime
) -> None:
    """A pod's own has its annotations; a user's container that says so has no GPU, either."""
    bundle = plain(node, SHOW, annotations=OURS | SANDBOX)
    for n in range(2):
        ran = (wrapped, runtime)[n].run(bundle)
        assert not {"nvidia0", "grant"} & set(ran.stdout.split())
        assert written(bundle) == bundle.config
        data = json.dumps(bundle.config).encode()
        assert precreate(node, dev, data).stdout.encode() == data
        # Once more with the hook, as Podman enters it by the annotation.
        add_hook(bundle.config, node.hook, stage="createRuntime", poststop=False)
    assert node.governor.requests == []
