"""Claims in real containers: what the node's driver tells the governor and writes as CDI, and what containers get from it.

The node has two simulated GPUs. The tests apply the edits of the CDI specification that `governor.cdi` makes to config.json,
as engines do.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.machine import Simulated
from bench.node import BenchNode, Running, last_json
from governor.cdi import claim_device, make_claim_spec
from governor.claims import uses_key
from governor.client import ask
from governor.errors import RefusedError
from simgpu import simgpu
from tests.container.bundles import HOOK, compile_c
from tests.container.nodes import WAIT_S, begin, clear, events, show_output, units, wait_for
from tests.container.test_several_gpus import PROBE_C, fill

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
GIB = 1 << 30
UUIDS = [f"GPU-{simgpu.device_uuid(1, index)}" for index in range(2)]
UNIT_S = 0.002

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def node(
    tmp_path_factory: pytest.TempPathFactory, build_dir: Path, require: Callable[..., None]
) -> Iterator[BenchNode]:
    require("gcc", "runc")
    work = tmp_path_factory.mktemp("claims")
    compile_c(PROBE_C, work / "probe", "-ldl", "-lpthread", "-w")
    machine = Simulated(work, build_dir, devices=2)
    machine.programs.append(work / "probe")
    with BenchNode(machine) as made:
        yield made


@pytest.fixture(autouse=True)
def clean(node: BenchNode) -> Iterator[None]:
    yield
    clear(node)
    for claim in ask(node.config, "claims")["claims"]:
        ask(node.config, "unclaim", uid=claim["uid"])
    assert claims(node) == {}
    assert [gpu["compute_left"] for gpu in ask(node.config, "gpus")["gpus"]] == [100, 100]


def share(
    name: str, gpu: int = 0, memory: int = 2 * GIB, compute: int = 40, **more: Any
) -> dict[str, Any]:
    return {"name": name, "device": UUIDS[gpu], "memory": memory, "compute": compute, **more}


def announce(
    node: BenchNode, uid: str, *shares: dict[str, Any], namespace: str = "default"
) -> dict[str, Any]:
    """Send the governor the request that NodePrepareResources sends."""
    return ask(
        node.config, "claim", uid=uid, namespace=namespace, name=f"name-{uid}", shares=list(shares)
    )


def claims(node: BenchNode) -> dict[str, dict[str, Any]]:
    return {claim["uid"]: claim for claim in ask(node.config, "claims")["claims"]}


def with_devices(node: BenchNode, *wanted: tuple[str, str], pod: str = "", **more: Any) -> Edit:
    """Return an edit of config.json as an engine makes it for these shares, in this order."""

    def edit(config: dict[str, Any]) -> None:
        config["hooks"] = {}
        config["annotations"] |= {
            "io.kubernetes.cri.sandbox-namespace": "default",
            "io.kubernetes.cri.sandbox-name": pod or "pod",
        }
        seen = set()
        for uid, name in wanted:
            spec = make_claim_spec(
                uid,
                [(one["name"], one["minor"]) for one in claims(node)[uid]["shares"]],
                hook=str(HOOK),
                arguments=node.hook_arguments(),
            )
            assert spec["kind"] == "tidegate.gpu/claim"
            devices = {device["name"]: device["containerEdits"] for device in spec["devices"]}
            apply(config, devices[claim_device(uid, name)])
            if uid not in seen:
                apply(config, spec["containerEdits"])
            seen.add(uid)
        if more:
            more["edit"](config)

    return edit


def apply(config: dict[str, Any], edits: dict[str, Any]) -> None:
    """Apply those edits of the CDI specification that Tidegate uses; simulated GPUs have no device nodes."""
    assert "deviceNodes" not in edits
    for hook in edits.get("hooks", ()):
        entry = {key: value for key, value in hook.items() if key != "hookName"}
        config.setdefault("hooks", {}).setdefault(hook["hookName"], []).append(entry)
    config["process"]["env"] += edits.get("env", [])


def start(
    node: BenchNode,
    name: str,
    arguments: Sequence[str],
    edit: Edit,
    annotations: dict[str, str] | None = None,
) -> Running:
    return node.start(name, arguments, annotations or {}, edit=edit)


def probe(node: BenchNode, name: str, edit: Edit, *arguments: str) -> Running:
    return start(node, name, ["/usr/bin/probe", *(arguments or ("fill",))], edit)


def full_probe(node: BenchNode, name: str, edit: Edit, room: list[int]) -> Running:
    """Return a probe that has allocated `room`, the number of bytes for each of its GPUs."""
    return fill(node, lambda nth: probe(node, f"{name}-{nth}", edit), room)


def worker(node: BenchNode, name: str, edit: Edit) -> Running:
    """Start the workload; it begins on request."""
    arguments = [
        *node.machine.command("burn", inside=True),
        "--seconds", "600", "--out", "/out/progress.bin", "--wait-file", "/out/begin",
    ]  # fmt: skip
    return start(node, name, arguments, edit)


def refused(
    node: BenchNode, name: str, edit: Edit, annotations: dict[str, str] | None = None
) -> str:
    """Start a container that must be refused, and return the line with the reason."""
    container = start(node, name, ["/usr/bin/probe", "work", "0"], edit, annotations)
    assert node.wait(container, WAIT_S) != 0
    [line] = [line for line in container.output.splitlines() if "tidegate: " in line]
    assert container.identifier not in node.list_containers()
    return line


def finish(node: BenchNode, container: Running) -> list[dict[str, Any]]:
    (container.out / "end").touch()
    (container.out / "begin").touch()
    assert node.wait(container, WAIT_S) == 0, container.output
    wait_for(lambda: container.identifier not in node.list_containers(), "its memory to be free")
    devices: list[dict[str, Any]] = last_json(container.output)["devices"]
    return devices


def known(node: BenchNode, *containers: Running) -> list[dict[str, Any]]:
    """Return what the governor reports about containers, as soon as they are confirmed."""

    def all_there() -> bool:
        for one in containers:
            assert one.process.poll() is None, show_output(one)
        seen = node.list_containers()
        return all(seen.get(one.identifier, {}).get("confirmed") for one in containers)

    wait_for(all_there, "the containers")
    seen = node.list_containers()
    return [seen[one.identifier] for one in containers]


def outcomes(node: BenchNode, container: Running) -> list[str]:
    log = (node.work / "hook.log").read_text().splitlines()
    events = [event for event in map(json.loads, log) if event.get("id") == container.identifier]
    return [event["outcome"] for event in events if event["stage"] == "createRuntime"]


def delivered(node: BenchNode, *containers: Running, seconds: float = 2.5) -> list[float]:
    """Return the percentage of the GPU that was charged to each container's key in `seconds`."""
    began = time.monotonic_ns()
    before = {
        one["key"]: one["devices"][0]["charged_ns"] for one in node.list_containers().values()
    }
    time.sleep(seconds)
    after = node.list_containers()
    passed = time.monotonic_ns() - began
    return [
        100
        * (after[one.identifier]["devices"][0]["charged_ns"] - before[after[one.identifier]["key"]])
        / passed
        for one in containers
    ]


# ---- the shares of containers ----


def test_two_claims_share_a_gpu_70_30(node: BenchNode) -> None:
    announce(node, "large", share("gpu", compute=70))
    announce(node, "small", share("gpu", compute=30))
    large = worker(node, "large", with_devices(node, ("large", "gpu"), pod="train"))
    small = worker(node, "small", with_devices(node, ("small", "gpu"), pod="serve"))
    begin(large, small)
    # On a busy machine, programs may launch work too late to use their whole share: they may get
    # less for a while, but never more.
    for _ in range(3):
        most, least = delivered(node, large, small)
        assert most <= 75
        assert least <= 34
        if most > least > 5:
            break
    assert most > least > 5
    with pytest.raises(
        RefusedError,
        match="claim default/name-third asks for 1 % of the time of GPU 0, but only 0 % is left",
    ):
        announce(node, "third", share("gpu", compute=1, memory=GIB))
    one, two = known(node, large, small)
    assert (one["compute"], one["compute_limit"], two["compute"]) == (70, 70, 30)
    assert one["identity"]["pod"] == "train"
    tidegate = [sys.executable, "-m", "governor.cli"]
    where = ["--runtime-dir", str(node.runtime_dir)]

    def run_tidegate(*words: str) -> str:
        done = subprocess.run(
            [*tidegate, *words, *where], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return done.stdout

    table = run_tidegate("ps")
    assert "CLAIM" in table.splitlines()[0]
    row = next(line for line in table.splitlines() if "default/train" in line)
    assert "default/name-large" in row
    assert "claim           default/name-small, share gpu, uid small" in run_tidegate(
        "inspect", small.identifier
    )
    listed = run_tidegate("claims").splitlines()
    assert [line.split()[:3] for line in listed[1:]] == [
        ["default/name-large", "gpu", "0"], ["default/name-small", "gpu", "0"]
    ]  # fmt: skip
    assert "container     " + large.identifier in run_tidegate(
        "inspect", "default/name-large"
    ).replace("  container", "container", 1)


def test_one_container_with_two_shares_on_two_gpus(node: BenchNode) -> None:
    announce(node, "pair", share("gpu/0"), share("gpu/1", gpu=1))
    edit = with_devices(node, ("pair", "gpu/0"), ("pair", "gpu/1"))
    container = full_probe(node, "pair", edit, [1536 * MIB] * 2)
    (seen,) = known(node, container)
    assert [device["index"] for device in seen["devices"]] == [0, 1]
    shown = finish(node, container)
    assert [(one["total"], one["error"]) for one in shown] == [(2 * GIB, 2)] * 2
    # The first of the two hook entries has done all the work.
    assert outcomes(node, container) == ["prepared", "prepared-already"]
    admitted = [
        one
        for one in events(node, "container-admitted")
        if one["container"] == container.identifier
    ]
    assert len(admitted) == 1
    assert (admitted[0]["claims"], admitted[0]["pod"]) == (["default/name-pair"], "default/pod")


def test_a_share_that_is_named_three_times_is_allocated_once(node: BenchNode) -> None:
    """If another claim of the pod was refused at first, a kubelet names a device once for each
    attempt.
    """
    announce(node, "again", share("gpu", compute=40))
    edit = with_devices(node, *[("again", "gpu")] * 3)
    container = full_probe(node, "again", edit, [1536 * MIB])
    (seen,) = known(node, container)
    assert [(one["uid"], one["shares"]) for one in seen["claims"]] == [("again", ["gpu"])]
    [shown] = finish(node, container)
    assert (shown["total"], shown["error"]) == (2 * GIB, 2)
    assert outcomes(node, container)[0] == "prepared"
    assert set(outcomes(node, container)[1:]) == {"prepared-already"}


def test_a_container_with_two_claims_that_are_not_equal_is_refused(node: BenchNode) -> None:
    announce(node, "one", share("gpu"))
    announce(node, "two", share("gpu", gpu=1, compute=60))
    line = refused(node, "unequal", with_devices(node, ("one", "gpu"), ("two", "gpu")))
    assert "claim default/name-one with claim default/name-two has 2048 MiB and 40 % of" in line


def test_two_containers_share_the_memory_of_one_claim(node: BenchNode) -> None:
    announce(node, "both", share("gpu", memory=4 * GIB))
    edit, room = with_devices(node, ("both", "gpu")), [4 * GIB - 512 * MIB]
    first = full_probe(node, "first", edit, room)
    second = probe(node, "second", edit)
    assert node.wait(second, WAIT_S) == 1
    assert "cuDevicePrimaryCtxRetain: 2" in second.output  # there is no room even for a context
    (one,) = known(node, first)
    assert one["key"] == uses_key([("both", "gpu")])
    # The governor's last sample may be from before the last allocation.
    wait_for(
        lambda: known(node, first)[0]["devices"][0]["memory_used"] == 4 * GIB, "4 GiB to be in use"
    )
    finish(node, first)
    finish(node, full_probe(node, "third", edit, room))


def test_two_containers_share_the_time_of_one_claim(node: BenchNode) -> None:
    announce(node, "both", share("gpu", memory=4 * GIB, compute=40))
    pair = [
        worker(node, name, with_devices(node, ("both", "gpu"), pod=name)) for name in ("one", "two")
    ]
    begin(*pair)
    assert known(node, *pair)[0]["key"] == known(node, *pair)[1]["key"]
    (together, same) = delivered(node, *pair)
    assert together == same  # they have one account
    assert 5 < together <= 44
    done = [units(one) for one in pair]
    assert min(done) > 20
    # Their processes are distinguished, and charged together.
    one, two = known(node, *pair)
    assert len(one["processes"]) == len(two["processes"]) == 1
    assert one["processes"] != two["processes"]
    node.kill(pair[0])
    node.wait(pair[0], WAIT_S)
    before = units(pair[1])
    wait_for(lambda: units(pair[1]) > before + 20, "the other one to continue")


def test_an_init_container_and_then_the_main_one(node: BenchNode) -> None:
    announce(node, "pod", share("gpu"), share("more", gpu=1))
    for name, shares in (("init", ["gpu"]), ("main", ["gpu", "more"])):
        edit = with_devices(node, *(("pod", one) for one in shares))
        finish(node, full_probe(node, name, edit, [1536 * MIB] * len(shares)))


# ---- restarts of the governor, and claims that are taken back ----


def test_a_claim_and_its_containers_survive_a_killed_governor(node: BenchNode) -> None:
    announce(node, "kept", share("gpu", memory=4 * GIB, compute=60))
    announce(node, "idle", share("gpu", compute=30))
    pair = [worker(node, f"kept-{name}", with_devices(node, ("kept", "gpu"))) for name in "ab"]
    begin(*pair)
    before = known(node, *pair)
    for _ in range(2):
        node.stop_governor(signal.SIGKILL)
        node.start_governor()
        after = known(node, *pair)
        for old, new in zip(before, after, strict=True):
            assert [old[name] for name in ("id", "key", "pid", "claims", "processes")] == [
                new[name] for name in ("id", "key", "pid", "claims", "processes")
            ]
        assert ask(node.config, "gpus")["gpus"][0]["compute_left"] == 10
        done = [units(one) for one in pair]
        wait_for(
            lambda d=done: all(units(o) > n + 10 for o, n in zip(pair, d, strict=True)),
            "work to continue",
        )
    announce(node, "kept", share("gpu", memory=4 * GIB, compute=60))
    assert ask(node.config, "gpus")["gpus"][0]["compute_left"] == 10


def test_claims_in_use_survive_the_loss_of_the_database(node: BenchNode) -> None:
    announce(node, "lost", share("gpu", memory=4 * GIB, compute=60))
    pair = [worker(node, f"lost-{name}", with_devices(node, ("lost", "gpu"))) for name in "ab"]
    begin(*pair)
    before = known(node, *pair)
    node.stop_governor(signal.SIGKILL)
    for file in (node.work / "state").glob("state.db*"):
        file.unlink()
    node.start_governor()
    after = list(node.list_containers().values())
    assert sorted(one["pid"] for one in after) == sorted(one["pid"] for one in before)
    assert {one["key"] for one in after} == {before[0]["key"]}
    assert sorted(p for one in after for p in one["processes"]) == sorted(
        p for one in before for p in one["processes"]
    )
    assert ask(node.config, "gpus")["gpus"][0]["compute_left"] == 40
    announce(
        node, "lost", share("gpu", memory=4 * GIB, compute=60)
    )  # unchanged: no claim is allocated twice
    assert ask(node.config, "gpus")["gpus"][0]["compute_left"] == 40
    done = [units(one) for one in pair]
    wait_for(
        lambda: all(units(o) > n + 10 for o, n in zip(pair, done, strict=True)), "work to continue"
    )


def test_a_claim_taken_back_while_in_use_stays_until_its_container_ends(node: BenchNode) -> None:
    announce(node, "gone", share("gpu", compute=60))
    container = worker(node, "gone", with_devices(node, ("gone", "gpu")))
    begin(container)
    edit = with_devices(node, ("gone", "gpu"))
    ask(node.config, "unclaim", uid="gone")
    assert claims(node)["gone"]["leaving"]
    assert ask(node.config, "gpus")["gpus"][0]["compute_left"] == 40
    listing = ask(node.config, "claims")["claims"]

    def late(config: dict[str, Any]) -> None:
        edit(config)

    line = refused(node, "late", late)
    assert (
        "claim default/name-gone was taken back, but its last container has not ended yet" in line
    )
    assert listing[0]["shares"][0]["containers"] == [container.identifier]
    done = units(container)
    wait_for(lambda: units(container) > done + 10, "work to continue")
    node.kill(container)
    wait_for(lambda: not claims(node), "the claim to go")
    assert ask(node.config, "gpus")["gpus"][0]["compute_left"] == 100


# ---- requests that a tenant forges ----


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        *(("memory", "8Gi"), ("compute", "100"), ("compute-limit", "100"), ("devices", "1")),
        *(("count", "2"), ("strategy", "timeslice")),
    ],
)
def test_an_annotation_beside_a_claim_is_refused(
    node: BenchNode, annotation: str, value: str
) -> None:
    announce(node, "mine", share("gpu"))
    line = refused(
        node, f"beside-{annotation}", with_devices(node, ("mine", "gpu")), {annotation: value}
    )
    assert f"annotation tidegate.gpu/{annotation} conflicts with claim default/name-mine" in line


@pytest.mark.parametrize("annotation", ["claim", "claims", "share", "uid"])
def test_an_annotation_cannot_name_a_claim(node: BenchNode, annotation: str) -> None:
    announce(node, "theirs", share("gpu", compute=90))
    announce(node, "mine", share("gpu", compute=10))
    own = refused(
        node, f"own-{annotation}", with_devices(node, ("mine", "gpu")), {annotation: "theirs"}
    )
    alone = refused(node, f"alone-{annotation}", only_hook(node), {annotation: "theirs"})
    for line in (own, alone):
        assert f"annotation tidegate.gpu/{annotation} is unknown" in line
    assert not claims(node)["theirs"]["shares"][0]["containers"]


def only_hook(node: BenchNode) -> Edit:
    """Add our hook as an engine does from its own directory of hooks: for every container, and
    without a claim.
    """

    def edit(config: dict[str, Any]) -> None:
        arguments = [HOOK.name, *node.hook_arguments(), "createRuntime"]
        entry = {"path": str(HOOK), "args": arguments, "env": ["LC_ALL=C"]}
        config["hooks"] = {"createRuntime": [entry]}

    return edit


def test_the_environment_cannot_name_a_claim(node: BenchNode) -> None:
    announce(node, "theirs", share("gpu", compute=90))
    announce(node, "mine", share("gpu", compute=10))

    def forge(config: dict[str, Any]) -> None:
        config["process"]["env"] += [
            *("TIDEGATE_CLAIM=theirs", "TIDEGATE_MEMORY=8Gi", "TIDEGATE_COMPUTE=90"),
            *("TIDEGATE_CLAIMS=theirs/gpu", "NVIDIA_VISIBLE_DEVICES=all", "--claim=theirs"),
        ]
        config["process"]["args"] += ["0", "--claim", "theirs", "--share", "gpu"]

    container = probe(node, "forged", with_devices(node, ("mine", "gpu"), edit=forge))
    (seen,) = known(node, container)
    assert (seen["compute"], [one["uid"] for one in seen["claims"]]) == (10, ["mine"])
    (container.out / "begin").touch()
    wait_for((container.out / "full").exists, "a full GPU")
    finish(node, container)


@pytest.mark.parametrize("path", ["/usr/bin/true", "{work}/other/tidegate-hook"])
def test_an_entry_of_another_program_cannot_name_a_claim(node: BenchNode, path: str) -> None:
    announce(node, "theirs", share("gpu", compute=90))
    announce(node, "mine", share("gpu", compute=10))
    other = node.work / "other" / "tidegate-hook"
    other.parent.mkdir(exist_ok=True)
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)

    def forge(config: dict[str, Any]) -> None:
        entry = {
            "path": path.format(work=node.work),
            "args": ["tidegate-hook", "--claim", "theirs", "--share", "gpu", "createRuntime"],
        }
        config["hooks"]["createRuntime"].insert(0, entry)
        config["hooks"]["prestart"] = [entry]

    edit = with_devices(node, ("mine", "gpu"), edit=forge)
    container = probe(node, f"other-{path.count('/')}", edit)
    (seen,) = known(node, container)
    assert [one["uid"] for one in seen["claims"]] == ["mine"]
    wait_for((container.out / "full").exists, "a full GPU")
    finish(node, container)


def test_a_claim_of_another_namespace_is_refused(node: BenchNode) -> None:
    announce(node, "theirs", share("gpu"), namespace="others")
    line = refused(node, "namespace", with_devices(node, ("theirs", "gpu")))
    assert "claim others/name-theirs is not in this container's namespace 'default'" in line


def test_a_shared_gpu_beside_a_claim_is_refused(node: BenchNode) -> None:
    announce(node, "mine", share("gpu"))

    def shared(config: dict[str, Any]) -> None:
        entry = dict(config["hooks"]["createRuntime"][0])
        entry["args"] = [HOOK.name, *node.hook_arguments(), "--governed", "createRuntime"]
        config["hooks"]["createRuntime"].insert(0, entry)

    line = refused(node, "shared", with_devices(node, ("mine", "gpu"), edit=shared))
    assert "config.json asks for a device of tidegate.gpu/shared together with claim mine" in line


def test_a_hook_from_an_engines_directory_does_nothing_beside_a_claim(node: BenchNode) -> None:
    """An allowed annotation makes the engine add the hook, before or after the claim's entries."""
    announce(node, "mine", share("gpu"))
    for place in (0, 1):

        def beside(config: dict[str, Any], at: int = place) -> None:
            plain: dict[str, Any] = {"annotations": {}}
            only_hook(node)(plain)
            config["hooks"]["createRuntime"].insert(at, plain["hooks"]["createRuntime"][0])

        edit = with_devices(node, ("mine", "gpu"), edit=beside)
        arguments = ["/usr/bin/probe", "fill"]
        container = start(node, f"directory-{place}", arguments, edit, {"capabilities": "compute"})
        (seen,) = known(node, container)
        assert [one["uid"] for one in seen["claims"]] == ["mine"]
        wait_for((container.out / "full").exists, "a full GPU")
        finish(node, container)
        assert sorted(outcomes(node, container)) == ["prepared", "prepared-already"]
