"""Test `tidegate ps`, `top` and `inspect`, with a governor on the simulated GPU.

`top` runs in a pseudo-terminal. The names of containers are read from files in the engines'
formats.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, cast

import jsonschema
import pytest

from governor import cli
from governor.arbiter import N_WAITS
from governor.container import container_key
from governor.counters import MAX_RATE, RATE_NS, Rates
from governor.errors import RequestError
from governor.listing import Listing, find, short_ids, table, trouble_lines, violation_lines
from governor.names import MAX_FILE, MAX_NAME, Name, find_name
from governor.verbs import inspect, top
from governor.violations import Episode
from tests.unit.governor_process import ROOT, GovernorNode, OwnTenant, gpus, wait_for
from tests.unit.test_governor_protocol import (
    UUID,
    GovernorClient,
    GovernorThread,
    governor,
    pidfd,
    sleeper,
)

__all__ = ["governor", "gpus", "pidfd", "sleeper"]  # fixtures

MIB, GIB, S = 1 << 20, 1 << 30, 1_000_000_000
OUTPUTS = json.loads((ROOT / "governor/outputs.schema.json").read_text())
POD = {"namespace": "ml", "pod": "train-0", "pod_uid": "8c1f", "container": "main"}
ADMIT: dict[str, Any] = {
    "v": 1, "op": "admit", "id": "one", "pid": 4711, "bundle": "/bundle", "identity": {},
    "annotations": {"tidegate.gpu/memory": "4Gi", "tidegate.gpu/compute": "30"},
}  # fmt: skip
OPEN, CLOSE = "\x1b[?1049h", "\x1b[?1049l"


def check(verb: str, document: object) -> None:
    """Check a document against the schema of the verb's --json."""
    schema = {"$ref": f"#/$defs/{verb}", "$defs": OUTPUTS["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(document)


def test_the_schema_of_the_outputs_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(OUTPUTS)


@pytest.fixture(scope="module")
def node(
    tmp_path_factory: pytest.TempPathFactory, gpus: tuple[Path, Path], build_dir: Path
) -> Iterator[GovernorNode]:
    """A node that runs a container of a pod and a container without one."""
    with GovernorNode(tmp_path_factory.mktemp("n"), gpus, build_dir) as made:
        made.container("a" * 64, identity=POD)
        made.container(
            "plain", annotations={"memory": "2Gi", "compute": "20", "compute-limit": "90"}
        )
        yield made


def command(node: GovernorNode, *arguments: str) -> list[str]:
    return [
        *(sys.executable, "-m", "governor.cli", *arguments),
        *("--runtime-dir", node.config.runtime_dir),
    ]


def tidegate(node: GovernorNode, *arguments: str) -> str:
    """Return the command's output."""
    done = subprocess.run(
        command(node, *arguments), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# ---- ps ----


def test_ps_shows_each_containers_use(node: GovernorNode) -> None:
    wait_for(lambda: "?" not in tidegate(node, "ps"), "rates")
    head, *rows = tidegate(node, "ps").splitlines()
    assert re.split("  +", head) == [
        "CONTAINER", "NAME", "POD", "GPU", "MEMORY USED/LIMIT", "COMPUTE NOW/GUARANTEED/LIMIT", "WAITING",
        "STRATEGY", "STATE",
    ]  # fmt: skip
    one, two = rows
    assert re.split("  +", one)[:5] == ["a" * 12, "main", "ml/train-0", "0", "0/4096 MiB"]
    assert re.split("  +", one)[5:] == ["0/40/40 %", "0 %", "timeslice", "ok"]
    assert re.split("  +", two) == [
        "plain",
        "1",
        "0/2048 MiB",
        "0/20/90 %",
        "0 %",
        "timeslice",
        "ok",
    ]
    # A column begins where its heading does.
    assert [one.index("ml/"), one.index("0/4096"), one.index("timeslice")] == [
        head.index("POD"), head.index("MEMORY"), head.index("STRATEGY")
    ]  # fmt: skip


def test_ps_as_json_conforms_to_the_schema(node: GovernorNode) -> None:
    document = json.loads(tidegate(node, "ps", "--json"))
    check("ps", document)
    one = next(each for each in document if each["id"] == "a" * 64)
    assert (one["name"], one["pod"], one["identity"]) == ("main", "ml/train-0", POD)
    assert one["bundle"] == "/bundles/" + "a" * 64
    broken = [{**one, "devices": [{**one["devices"][0], "delivered": "much"}]}]
    with pytest.raises(jsonschema.ValidationError):
        check("ps", broken)


def test_use_and_waiting_are_shown(node: GovernorNode) -> None:
    """The values come from the arbiter's grants, and from the process's counts in the ledger."""
    directory = Path(node.config.runtime_dir, "containers", container_key("plain"))

    def device() -> dict[str, Any]:
        [one] = [one for one in node.ask("list")["containers"] if one["id"] == "plain"]
        return dict(one["devices"][0])

    with OwnTenant(directory) as tenant:
        tenant.write(want=1)
        wait_for(lambda: device()["waiting"] == 1, "process that waits")
        began = time.monotonic()
        # By the library's count, calls waited half of the time.
        while not 30 < (device()["waited"] or 0) < 70:
            assert time.monotonic() - began < 20
            tenant.write(wait_ns=int((time.monotonic() - began) * S / 2))
            time.sleep(0.05)
        assert "plain" in tidegate(node, "inspect", "plain")
        assert f"process         {os.getpid()} " in tidegate(node, "inspect", "plain")
        tenant.write(want=0)
    wait_for(lambda: not device()["waiting"], "end of the wait")


def test_a_containers_pod_is_known_after_a_restart(
    tmp_path: Path, gpus: tuple[Path, Path], build_dir: Path
) -> None:
    with GovernorNode(tmp_path, gpus, build_dir) as node:
        node.container("one", identity=POD)
        before = json.loads(tidegate(node, "ps", "--json"))
        for number in (signal.SIGKILL, signal.SIGTERM):
            node.stop(number)
            node.start()
            [one] = json.loads(tidegate(node, "ps", "--json"))
            assert [one[n] for n in ("id", "bundle", "identity", "pod")] == [
                before[0][n] for n in ("id", "bundle", "identity", "pod")
            ]
        assert len(node.events("container-adopted")) == 2


@pytest.mark.parametrize("verb", [["ps"], ["inspect", "one"], ["top", "--count", "1"]])
def test_violations_are_shown(
    governor: GovernorThread, pidfd: int, verb: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with GovernorClient(governor) as client:
        assert client.ask({**ADMIT, "identity": {"name": "trainer"}}, pidfd)["ok"]
        findings = governor.server.containers[container_key("one")].findings
        now = time.time()
        findings.add(Episode("compute", UUID, 11, 40, 0, began=now - 90, ended=now - 80))
        findings.add(Episode("memory", UUID, 4711, 3584 * MIB, 2306 * MIB, began=now - 12))
        findings.frozen = True
        assert cli.main([*verb, "--runtime-dir", str(governor.directory)]) == 0
        out = capfd.readouterr().out
        assert "frozen, violation: memory" in out
        what = "3584 MiB of memory held, 2306 MiB allowed, GPU 0, process 4711"
        if verb[0] == "inspect":
            assert re.search(
                rf"^violation       memory: {what}, from .*Z, ongoing$", out, re.MULTILINE
            )
            assert re.search(r"^violation       compute: .* 40 % .*, until .*Z$", out, re.MULTILINE)
        else:
            assert re.search(rf"^violation: trainer: {what}, for 1[2-9] s$", out, re.MULTILINE)
            assert "40 %" not in out
        findings.episodes[-1].ended, findings.frozen = now, False
        assert cli.main(["ps", "--runtime-dir", str(governor.directory)]) == 0
        out = capfd.readouterr().out
        assert "violation" not in out
        assert out.splitlines()[1].split()[-1] == "starting"  # it was not confirmed


def test_control_characters_do_not_reach_a_terminal(
    governor: GovernorThread, pidfd: int, capfd: pytest.CaptureFixture[str]
) -> None:
    evil = "x\x1b]0;owned\x07\x1b[2J\n\rviolation: you: \u202e"
    with GovernorClient(governor) as client:
        identity = {"namespace": evil, "pod": evil, "container": evil}
        assert client.ask({**ADMIT, "id": evil, "bundle": evil, "identity": identity}, pidfd)["ok"]
        findings = governor.server.containers[container_key(evil)].findings
        findings.add(Episode("memory", UUID, 1, 2, 1, began=time.time()))
        changed = ["set", "x", "--compute-limit", "90"]
        for verb in (["ps"], ["top", "--count", "1"], ["inspect", evil], changed):
            assert cli.main([*verb, "--runtime-dir", str(governor.directory)]) == 0
            out = capfd.readouterr().out
            assert all(char.isprintable() for char in out.replace("\n", ""))
            assert out.count("\nviolation: ") == (verb[0] in ("ps", "top"))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_the_encoding_lacks_are_escaped(
    governor: GovernorThread, pidfd: int, encoding: str
) -> None:
    """A container's name must not break the table for the other containers."""
    with GovernorClient(governor) as client:
        identity = {"name": "\u0101b"}
        assert client.ask({**ADMIT, "id": "w\u00e9b", "identity": identity}, pidfd)["ok"]
        done = subprocess.run(
            [sys.executable, "-m", "governor.cli", "ps", "--runtime-dir", str(governor.directory)],
            cwd=ROOT,
            env={**os.environ, "PYTHONIOENCODING": encoding},
            capture_output=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")
    _, shown = done.stdout.decode(encoding).splitlines()
    assert (
        shown.split()[:2]
        == {
            "utf-8": ["w\u00e9b", "\u0101b"],
            "latin-1": ["w\u00e9b", "\\u0101b"],
            "ascii": ["w\\xe9b", "\\u0101b"],
        }[encoding]
    )


def test_a_character_of_two_columns_wraps_no_line() -> None:
    """`top` fills the screen and shows violations in the last lines, so no line may wrap."""
    wide = {"key": "k", **row("\u5b57" * 3, "\u5b57" * MAX_NAME, "e\u0301\uff21\U0001f4a9")}
    wide["violations"] = [
        {"kind": "memory", "gpu": "GPU-0", "found": 1, "allowed": 1, "pid": 1, "began": 0, "ended": None}
    ]  # fmt: skip
    head, shown = table([wide])
    assert re.split("  +", shown)[:3] == ["???", "?" * MAX_NAME, "e???"]
    assert head.index("POD") == shown.index("e???")
    assert violation_lines([wide])[0].startswith(f"violation: {'?' * MAX_NAME}: ")


def test_control_characters_in_an_error_do_not_reach_a_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The file to be checked may come from an untrusted source."""
    evil = tmp_path / "evil.yaml"
    for text in ('"\\e]0;owned\\a\\e[2J\\u202e": 1\n', '"\\e[2J": 1\n"\\e[2J": 2\n'):
        evil.write_text(text)
        assert cli.main(["check", str(evil)]) == 78
        said = capfd.readouterr().err
        assert "?[2J" in said
        assert all(char.isprintable() for char in said.removesuffix("\n"))


def test_an_invalid_file_does_not_stop_the_listing(
    node: GovernorNode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The governor keeps its old configuration, and an operator who repairs the file must still be
    able to list containers.
    """
    bad = tmp_path / "config.yaml"
    bad.write_text("placemnt: pack\n")
    monkeypatch.setattr("governor.config.PATH", bad)
    assert cli.main(["ps", "--runtime-dir", node.config.runtime_dir]) == 0
    assert "ml/train-0" in capfd.readouterr().out
    assert cli.main(["ps", "--config", str(bad)]) == 78
    assert cli.main(["ps"]) in (0, 75)


def row(identifier: str, name: str, pod: str) -> dict[str, Any]:
    device = {
        "uuid": "GPU-0", "index": 0, "memory_used": 100 * MIB, "memory_limit": 2048 * MIB, "delivered": 40.2, "waited": 3.0,
    }  # fmt: skip
    return {
        "id": identifier, "name": name, "pod": pod, "compute": 40, "compute_limit": 100, "strategy": "timeslice",
        "frozen": False, "confirmed": True, "violations": [], "devices": [device],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("containers", "heads"),
    [
        # Containers are distinguished by name, by pod if two have the same name, and by id if one
        # has neither.
        ([row("a" * 64, "main", "ml/x"), row("b" * 64, "side", "")], "NAME GPU"),
        ([row("a" * 64, "main", "ml/x"), row("b" * 64, "main", "ml/y")], "POD GPU"),
        ([row("a" * 64, "main", "ml/x"), row("b" * 64, "", "")], "CONTAINER GPU"),
    ],
)
def test_a_narrow_table_keeps_a_distinguishing_column(
    containers: list[dict[str, Any]], heads: str
) -> None:
    wide = table(containers)
    assert wide == table(containers, 200)
    narrow = table(containers, 76)
    assert re.split(" +", narrow[0])[:2] == heads.split()
    assert "STRATEGY" not in narrow[0]
    assert "COMPUTE NOW/GUARANTEED/LIMIT" in narrow[0]
    assert heads.startswith("CONTAINER") or max(map(len, narrow)) <= 76
    # No more is dropped than necessary.
    assert table(containers, len(wide[0]))[0] == wide[0]
    assert table(containers, len(wide[0]) - 6)[0] == wide[0].replace("STRATEGY   ", "")
    assert table([], 20)[0].endswith("WAITING  STATE")


def test_a_process_on_a_gpu_that_is_not_its_container_s_is_named() -> None:
    lost = row("a" * 64, "lo\nst", "")
    assert trouble_lines([lost]) == []
    assert table([lost])[1].endswith("  ok")
    used = {"gpu": "GPU-1", "index": 1, "pid": 4711, "memory": 514 * MIB}
    lost |= {
        "key": "k",
        "elsewhere": [used, {**used, "pid": 4712}, {**used, "gpu": "GPU-3", "index": 3}],
    }
    other = {
        **lost,
        "id": "b" * 64,
        "name": "other",
    }  # uses the same claim, so it has the same processes
    assert table([lost])[1].endswith("  uses GPU 1, 3 (not its own)")
    assert trouble_lines([lost, other]) == [
        "not its own: lo?st: 514 MiB held outside its quota, GPU 1, process 4711",
        "not its own: lo?st: 514 MiB held outside its quota, GPU 1, process 4712",
        "not its own: lo?st: 514 MiB held outside its quota, GPU 3, process 4711",
    ]


# ---- rates ----


def test_a_rate_covers_the_last_two_seconds() -> None:
    rates = Rates()
    assert rates.update(0, given=0) == {"given": None}
    assert rates.update(S // 20, given=0) == {"given": None}
    assert rates.update(S, given=S // 2) == {"given": 50.0}
    for tenth in range(11, 61):
        found = rates.update(tenth * S // 10, given=S // 2)
    assert found == {"given": 0.0}
    # A reading that is too old is not used for the rate.
    assert rates.update(6 * S + RATE_NS, given=S // 2 + RATE_NS) == {"given": 100.0}
    assert rates.update(7 * S + RATE_NS, given=0) == {"given": 0.0}  # a counter that decreases
    assert rates.update(8 * S + RATE_NS, given=2**62) == {"given": MAX_RATE}


def test_frequent_requests_get_the_same_rates() -> None:
    often, rarely = Rates(), Rates()
    for ms in range(10_000):
        found = often.update(ms * 1_000_000, given=ms * 250_000)
        if ms % 250 == 0:
            rare = rarely.update(ms * 1_000_000, given=ms * 250_000)
    assert found == rare == {"given": 25.0}
    assert len(often._looks) < 30


# ---- finding a container ----


def listed(*ones: tuple[str, str, str]) -> list[dict[str, Any]]:
    return [{"id": i, "name": name, "pod": pod} for i, name, pod in ones]


def test_a_container_is_found_by_id_name_or_pod() -> None:
    known = listed(("abc1", "train", "ml/train-0"), ("abe2", "", ""), ("zz", "web", "shop/web-1"))
    for wanted, found in (
        ("abc1", "abc1"), ("abe", "abe2"), ("train", "abc1"), ("ml/train-0", "abc1"), ("train-0", "abc1"),
        ("web", "zz"), ("z", "zz"),
    ):  # fmt: skip
        assert find(wanted, known)["id"] == found
    for wanted, words in (
        ("ab", "2 containers have an id that begins with 'ab'"),
        ("none", "no container has the id or name 'none'"), ("", "no container has the id or name ''"),
    ):  # fmt: skip
        with pytest.raises(RequestError) as caught:
            find(wanted, known)
        assert str(caught.value) == f"{words}; tidegate ps lists them"


def test_a_name_that_is_a_prefix_of_another_id_is_ambiguous() -> None:
    """A user must not be able to choose a name such that a quota meant for another container goes
    to the user's container.
    """
    known = listed(("abc1", "", ""), ("ff", "abc", ""))
    with pytest.raises(
        RequestError, match="2 containers have the name 'abc' or an id that begins with it"
    ):
        find("abc", known)
    assert find("abc1", known)["id"] == "abc1"
    with pytest.raises(RequestError, match="2 containers are named 'x'"):
        find("x", listed(("a", "x", ""), ("b", "x", "")))


def test_ids_are_shortened_only_as_far_as_they_stay_distinct() -> None:
    one, two = "a" * 64, "a" * 20 + "b" * 44
    assert short_ids([one, two, "short", "x" * 50]) == {
        one: "a" * 21, two: "a" * 20 + "b", "short": "short", "x" * 50: "x" * 40
    }  # fmt: skip


# ---- names given by engines ----

ID = "4f3a" * 16


def put(path: Path, document: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def docker(base: Path, **settings: object) -> str:
    """Write a container's files as Docker does, outside of /var/lib/docker, and return its bundle."""
    bundle = base / "io.containerd.runtime.v2.task/moby" / ID
    own = base / "data/containers" / ID
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/etc/hosts", "type": "bind", "source": str(own / "hosts")},
    ]
    put(bundle / "config.json", {"mounts": mounts})
    put(own / "config.v2.json", {"ID": ID, "Name": "/trainer", **settings})
    return str(bundle)


def podman(base: Path, file: str = "containers.json") -> str:
    put(
        base / "overlay-containers" / file, [{"id": "0"}, {"id": ID, "names": ["trainer", "other"]}]
    )
    return str(base / "overlay-containers" / ID / "userdata")


def test_names_of_docker_and_podman_are_read_from_their_files(tmp_path: Path) -> None:
    assert find_name(ID, docker(tmp_path), {}) == Name("docker", "trainer")
    for file in ("containers.json", "volatile-containers.json"):
        assert find_name(ID, podman(tmp_path / file, file), {}) == Name("podman", "trainer")


def test_kubernetes_and_nerdctl_pass_the_name_themselves() -> None:
    bundle = f"/run/containerd/io.containerd.runtime.v2.task/k8s.io/{ID}"
    assert find_name(ID, bundle, POD) == Name("containerd", "main", "ml/train-0")
    assert find_name(ID, bundle, {"pod": "p"}) == Name("containerd", "", "p")
    storage = f"/run/containers/storage/overlay-containers/{ID}/userdata"
    assert find_name(ID, storage, POD) == Name("cri-o", "main", "ml/train-0")
    named = {"name": "trainer", "namespace": "default"}
    assert find_name(ID, bundle.replace("k8s.io", "default"), named) == Name("nerdctl", "trainer")
    assert find_name("one", "/bundles/one", {}) == Name()
    assert find_name("one", "", {}) == Name()
    assert len(find_name("one", "", {"pod": "x" * 1000}).pod) == MAX_NAME


def test_files_with_unexpected_contents_yield_no_name(tmp_path: Path) -> None:
    assert find_name(ID, docker(tmp_path / "a", ID="another"), {}).name == ""
    for name in (7, None, {}, ""):
        assert find_name(ID, docker(tmp_path / "b", Name=name), {}).name == ""
    bundle = docker(tmp_path / "c")
    for text in ("", "{", "[]", "[" * 100_000, '{"mounts": 1}', '{"mounts": [1, {}]}', '"\\ud800"'):
        Path(bundle, "config.json").write_text(text)
        assert find_name(ID, bundle, {}) == Name("docker")
    # A user's file takes the place of Docker's.
    mine = tmp_path / "mine"
    put(mine / "config.v2.json", {"ID": ID, "Name": "/root"})
    mounts = [{"destination": "/etc/hosts", "source": str(mine / "hosts")}]
    put(Path(bundle, "config.json"), {"mounts": mounts})
    assert find_name(ID, bundle, {}) == Name("docker")
    # A FIFO is not waited for, a link is not followed, and a file that is too large is not read.
    other = podman(tmp_path / "d")
    names = tmp_path / "d/overlay-containers/containers.json"
    for make in (os.mkfifo, lambda p: p.symlink_to("/dev/zero"), lambda p: p.write_bytes(b"")):
        names.unlink()
        make(names)
        assert find_name(ID, other, {}) == Name("podman")
    os.truncate(names, MAX_FILE + 1)
    assert find_name(ID, other, {}) == Name("podman")
    for listed_ in (
        [{"id": ID}],
        [{"id": ID, "names": []}],
        [{"id": ID, "names": [{}]}],
        {"id": ID},
        [7],
    ):
        put(names, listed_)
        assert find_name(ID, other, {}) == Name("podman")


# ---- inspect ----


def test_inspect_shows_all_that_is_known(node: GovernorNode) -> None:
    document = json.loads(tidegate(node, "inspect", "train-0", "--json"))
    check("inspect", document)
    assert document["id"] == "a" * 64
    assert document["directory"] == f"{node.config.runtime_dir}/containers/{document['key']}"
    assert document["devices"][0]["name"] == "Tidegate Simulated GPU"
    lines = tidegate(node, "inspect", "aaa").splitlines()
    fields = dict(re.split("  +", line.strip(), maxsplit=1) for line in lines if line)
    assert fields["container"] == "a" * 64
    assert fields["pod"] == "ml/train-0"
    assert fields["quota"] == "4096 MiB of memory, 40 % of the time guaranteed, 40 % at most"
    assert fields["first process"] == f"{document['pid']} sleep 120"
    assert fields["GPU 0"].startswith("Tidegate Simulated GPU, GPU-")


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ([0] * N_WAITS, None),
        (
            [9, 0, 1, *[0] * (N_WAITS - 3)],
            "median wait at most 0.25 ms, 99th percentile at most 1 ms",
        ),
        (
            [1, *[0] * (N_WAITS - 2), 2],
            "median wait longer than 1 s, 99th percentile longer than 1 s",
        ),
    ],
)
def test_inspect_shows_the_waits_for_grants(
    node: GovernorNode, counts: list[int], said: str | None
) -> None:
    document = json.loads(tidegate(node, "inspect", "train-0", "--json"))
    device = {**document["devices"][0], "grant_waits": counts}
    fields = {name.strip(): value for name, value in inspect._device_fields(device)}
    assert fields.get("for a grant") == said


PARKING: dict[str, Any] = {
    "residency": "parked", "movable": 60 * MIB, "parked": 60 * MIB, "times_parked": 1, "moved": 300 * MIB,
    "move_ns": 2 * S, "away_ns": 3 * S // 2, "awaiting": 0, "host_memory": 64 * MIB,
}  # fmt: skip


def test_inspect_shows_where_memory_is_and_what_moving_it_cost(node: GovernorNode) -> None:
    document = json.loads(tidegate(node, "inspect", "train-0", "--json"))
    assert document["parking"] is None
    check("inspect", {**document, "parking": PARKING})
    assert list(inspect._parking_fields(None)) == []
    assert dict(inspect._parking_fields(PARKING)) == {
        "memory is": "parked: 60 MiB can be parked; 64 MiB of host memory is ready for that",
        "moved": "300 MiB in 2.0 s, parked 1 time; calls waited 1.5 s for it",
    }
    more = {**PARKING, "residency": "resident", "times_parked": 2}
    fields = dict(inspect._parking_fields(more))
    assert fields["memory is"].startswith("resident: ")
    assert ", parked 2 times; " in fields["moved"]


def test_inspect_shows_lent_time_in_the_unit_of_used_time(node: GovernorNode) -> None:
    document = json.loads(tidegate(node, "inspect", "train-0", "--json"))
    device = document["devices"][0]
    device |= {"delivered": 60.0, "lent": 20.0, "waited": 340.0}
    device |= {"charged_ns": 42 * S, "lent_ns": 12 * S, "wait_ns": 3 * S}
    fields = {name.strip(): value for name, value in inspect._device_fields(device)}
    used = "60 % of the GPU used (40 % of its own, 20 % lent); calls waited 100 %"
    assert fields["last 2 s"] == used
    assert fields["in total"] == "42.0 s used (30.0 s of its own, 12.0 s lent); calls waited 3.0 s"
    device |= {"delivered": None, "lent": None, "waited": None}
    fields = {name.strip(): value for name, value in inspect._device_fields(device)}
    used = "? % of the GPU used (? % of its own, ? % lent); calls waited ?"
    assert fields["last 2 s"] == used


# ---- top ----


def test_parked_memory_is_not_on_the_gpu() -> None:
    """Parked memory still counts against the quota of its container."""
    parked = {"key": "a", **row("a", "model", ""), "parking": PARKING}
    other = {"key": "b", **row("b", "other", ""), "parking": None}
    gpu = {
        "uuid": "GPU-0", "index": 0, "name": "made up", "memory": 16 * GIB, "memory_left": GIB,
        "compute_left": 20, "lost": None, "closed": None,
    }  # fmt: skip
    [line] = top._gpu_lines({"gpus": [gpu], "containers": [parked, other]})
    assert re.split("  +", line)[3:] == [
        "memory [" + "." * 20 + "] 140/16384 MiB", "left 20 % 1024 MiB", "parked 60 MiB"
    ]  # fmt: skip
    head, first, second = table([parked, other])
    assert re.split("  +", head)[-1] == "STATE"
    assert re.split("  +", first)[3] == re.split("  +", second)[3] == "100/2048 MiB"
    assert (re.split("  +", first)[-1], re.split("  +", second)[-1]) == ("parked", "ok")
    for residency, shown in (("leaving", "leaving"), ("coming", "coming"), ("resident", "ok")):
        moving = {**parked, "parking": {**PARKING, "residency": residency, "parked": 0}}
        assert table([moving])[1].endswith(f"  {shown}")
    # A suspended container has nothing on the GPU.
    away = {**parked, "suspension": "suspended"}
    assert table([away])[1].endswith("  suspended, parked")
    [line] = top._gpu_lines({"gpus": [{**gpu, "lost": "gone"}], "containers": [away]})
    assert "] 0/16384 MiB" in line
    assert line.endswith("  parked 60 MiB, lost")


def test_top_prints_plain_lines_into_a_pipe(node: GovernorNode) -> None:
    out = tidegate(node, "top", "--interval", "0.1", "--count", "3")
    assert "\x1b" not in out
    lines = out.splitlines()
    stamps = [line for line in lines if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", line)]
    assert len(stamps) == 3
    assert len(lines) == 3 * (1 + 2 + 3)
    assert lines[1].startswith("GPU 0  Tidegate Simulated GPU  time [")
    assert "left 60 % 11776 MiB" in lines[1]


def test_top_as_json_prints_one_document_per_line(node: GovernorNode) -> None:
    lines = tidegate(node, "top", "--interval", "0.1", "--count", "2", "--json").splitlines()
    assert len(lines) == 2
    for line in lines:
        document = json.loads(line)
        check("top", document)
        assert len(document["containers"]) == len(document["gpus"]) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--interval", "0"],
        ["--interval", "nan"],
        ["--interval", "x"],
        ["--count", "0"],
        ["--count", "-1"],
    ],
)
def test_top_refuses_an_invalid_interval_or_count(
    arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["top", *arguments])
    assert caught.value.code == 2
    assert "is no" in capfd.readouterr().err


def hear_all() -> None:
    """Restore the default actions of signals that the test runner may ignore or block."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


class Terminal:
    """`tidegate top` in a separate pseudo-terminal."""

    def __init__(self, node: GovernorNode, *arguments: str, kind: str = "xterm") -> None:
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (30, 120))
        self.slave = slave
        self.before = termios.tcgetattr(slave)
        self.shown = ""
        self.process = subprocess.Popen(
            command(node, "top", *arguments), cwd=ROOT, env={**os.environ, "TERM": kind}, stdin=slave, stdout=slave,
            stderr=slave, start_new_session=True, preexec_fn=hear_all,  # noqa: PLW1509 - hear_all takes no locks
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self.slave)
        os.close(self.master)

    def read(self, seconds: float = 0.05) -> str:
        """Return all output so far."""
        while select.select([self.master], [], [], seconds)[0]:
            self.shown += os.read(self.master, 1 << 16).decode()
        return self.shown

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def end(self) -> int:
        """Wait for the end and return the exit status."""
        wait_for(lambda: self.read() is not None and self.process.poll() is not None, "end of top")
        self.read()
        return self.process.returncode

    def frames(self) -> int:
        return self.read().count("\x1b[H")

    def is_as_before(self) -> bool:
        return termios.tcgetattr(self.slave) == self.before


def test_top_takes_over_the_terminal_and_restores_it(node: GovernorNode) -> None:
    with Terminal(node, "--interval", "60") as terminal:
        wait_for(lambda: "ml/train-0" in terminal.read(), "screen")
        assert terminal.shown.startswith(OPEN)
        assert not terminal.is_as_before()
        terminal.type(b" ")  # redraws at once, though a minute has not passed
        wait_for(lambda: terminal.frames() >= 2, "second screen")
        termios.tcsetwinsize(terminal.slave, (30, 40))
        terminal.process.send_signal(signal.SIGWINCH)
        wait_for(lambda: terminal.frames() >= 3, "narrower screen")
        last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.shown.rpartition("\x1b[H")[2])
        assert max(map(len, last.splitlines())) <= 40
        terminal.type(b"q")
        assert terminal.end() == 0
        assert terminal.shown.endswith(CLOSE)
        assert terminal.is_as_before()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_top_restores_the_terminal_however_it_ends(
    node: GovernorNode, number: signal.Signals, status: int
) -> None:
    with Terminal(node, "--interval", "60") as terminal:
        wait_for(lambda: "ml/train-0" in terminal.read(), "screen")
        terminal.process.send_signal(number)
        assert terminal.end() == status
        assert terminal.shown.endswith(CLOSE)
        assert "Traceback" not in terminal.shown
        assert terminal.is_as_before()


def test_top_counts_screens_and_waits_for_a_governor_that_is_away(
    tmp_path: Path, gpus: tuple[Path, Path], build_dir: Path
) -> None:
    with GovernorNode(tmp_path, gpus, build_dir) as node:
        node.container("one")
        with Terminal(node, "--interval", "0.1", "--count", "2") as terminal:
            assert terminal.end() == 0
            assert terminal.frames() == 2
        with Terminal(node, "--interval", "0.1") as terminal:
            wait_for(lambda: "one" in terminal.read(), "screen")
            node.stop()
            wait_for(lambda: "the governor does not answer" in terminal.read(), "message from top")
            terminal.shown = ""
            node.start()
            wait_for(lambda: "0/4096 MiB" in terminal.read(), "row from the new governor")
            terminal.type(b"q")
            assert terminal.end() == 0


def test_top_prints_plain_lines_in_a_dumb_terminal(node: GovernorNode) -> None:
    with Terminal(node, "--count", "1", kind="dumb") as terminal:
        assert terminal.end() == 0
        assert "ml/train-0" in terminal.shown
        assert "\x1b" not in terminal.shown


def test_violations_are_shown_on_a_small_screen(
    node: GovernorNode, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rows that do not fit are omitted from the end of the table.

    Ongoing violations are always shown.
    """
    found = json.loads(tidegate(node, "ps", "--json")) * 20
    episode = Episode("memory", found[-1]["devices"][0]["uuid"], 1, 3 * GIB, GIB, began=time.time())
    found[-1] = {**found[-1], "violations": [episode.describe()]}

    class FullRunner:
        def gpus(self) -> list[dict[str, Any]]:
            return list(node.ask("gpus")["gpus"])

        def containers(self) -> list[dict[str, Any]]:
            return found

    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "12")
    top._draw(cast("Listing", FullRunner()), 1.0)
    lines = capfd.readouterr().out.split("\r\n")
    assert len(lines) == 12
    assert lines[-1].startswith("\x1b[7mviolation: ")
