"""Tests of the edits of config.json, the wrapper runtime's command line, and the CDI specification."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import stat
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from governor.cdi import make_spec
from governor.errors import SetupError
from governor.quota import Device
from governor.verbs.cdi import write
from oci_hook import runtime
from oci_hook.edits import (
    RESERVATION,
    DeviceNode,
    HookEntry,
    edit,
    foreign_driver,
    gives_gpu,
    gpu_nodes,
    host_nodes,
    require_no_gpu,
    take_reservation,
)
from oci_hook.errors import BundleError, DeviceError, HookError, UnservedImageError
from oci_hook.log import RunEvent
from oci_hook.runtime import EngineCall, left_traces, parse_call, replace_file
from tests.conftest import lack

NODES = (DeviceNode("/dev/nvidiactl", 195, 255), DeviceNode("/dev/nvidia0", 195, 0))
ENTRY = HookEntry("/usr/bin/tidegate-hook", ("--driver-dir", "/d"))


def edited(document: dict[str, Any]) -> dict[str, Any]:
    document = copy.deepcopy(document)
    edit(document, annotations={"a": "b"}, reservation="r", nodes=NODES, entry=ENTRY)
    return document


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
PARTS = st.fixed_dictionaries(
    {},
    optional={
        "annotations": st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3) | JSON,
        "hooks": st.dictionaries(st.sampled_from(["prestart", "poststop"]), JSON, max_size=2)
        | JSON,
        "linux": st.fixed_dictionaries({}, optional={"devices": JSON, "resources": JSON}) | JSON,
        "process": st.fixed_dictionaries({}, optional={"env": JSON}) | JSON,
        "mounts": JSON,
        "x": JSON,
    },
)


@given(PARTS)
def test_a_second_edit_changes_nothing(document: dict[str, Any]) -> None:
    """This holds for any config.json. Everything else in it is kept, or the edit is refused."""
    try:
        once = edited(document)
    except HookError as e:
        assert isinstance(e, BundleError)  # noqa: PT017
        return
    assert edited(once) == once
    assert once.get("x") == document.get("x")
    assert once.get("mounts") == document.get("mounts")
    assert gpu_nodes(once) == (0,)
    foreign_driver(once)


def test_a_second_edit_gives_the_same_bytes() -> None:
    """A stage that is null counts as absent, so the first edit already appends the hook at the end."""
    once = edited({"hooks": {"createRuntime": None, "poststop": [{"path": "/usr/bin/other"}]}})
    assert list(once["hooks"]) == ["poststop", "createRuntime"]
    assert json.dumps(edited(once)) == json.dumps(once)


def test_the_hook_has_one_entry_after_an_edit() -> None:
    ours = {"path": ENTRY.path, "args": ["x", "--governed", "prestart"]}
    other = {"path": "/usr/bin/other"}
    hooks = edited({"hooks": {"prestart": [ours], "createRuntime": [other, ours]}})["hooks"]
    assert set(hooks) == {"createRuntime"}
    assert [hook["path"] for hook in hooks["createRuntime"]] == [other["path"], ENTRY.path]
    assert hooks["createRuntime"][1]["args"] == [
        "tidegate-hook",
        "--driver-dir",
        "/d",
        "--governed",
        "createRuntime",
    ]


def test_a_rule_for_all_gpus_is_removed() -> None:
    """`docker run --device-cgroup-rule "c 195:* rwm"` gives access if the container creates nodes."""
    ours = {"allow": True, "type": "c", "access": "rw"}
    rules = [
        {"allow": False, "access": "rwm"},
        {"allow": True, "type": "c", "major": 195, "minor": -1, "access": "rwm"},
        {"allow": True, "type": "c", "major": 195, "access": "rwm"},
        {"allow": True, "type": "c", "major": 195, "minor": 7, "access": "rw"},
        {"allow": True, "type": "c", "major": -1, "minor": -1, "access": "m"},
        {"allow": True, "type": "c", "major": 10, "minor": -1, "access": "rwm"},
    ]
    document = {"linux": {"resources": {"devices": rules}}}
    assert gives_gpu(document)
    assert edited(document)["linux"]["resources"]["devices"] == [
        rules[0],
        *rules[4:],
        {**ours, "major": 195, "minor": 255},
        {**ours, "major": 195, "minor": 0},
    ]


DENIED = {"allow": False, "access": "rwm"}


@pytest.mark.parametrize(
    ("rule", "counts"),
    [
        # From `docker run --device-cgroup-rule "c *:* rwm"` or "a *:* rwm", or from --privileged.
        ({"type": "c", "major": -1, "minor": -1, "access": "rwm"}, True),
        ({"type": "a", "major": -1, "minor": -1, "access": "rwm"}, True),
        ({"type": "c", "access": "r"}, True),
        ({"access": "rwm"}, True),
        ({}, True),
        ({"type": "c", "major": -1, "minor": 0, "access": "w"}, True),
        # Every container has these.
        ({"type": "c", "major": -1, "minor": -1, "access": "m"}, False),
        ({"type": "b", "major": -1, "minor": -1, "access": "rwm"}, False),
        ({"type": "c", "major": -1, "minor": 255, "access": "rw"}, False),
        ({"type": "c", "major": 1, "access": "rwm"}, False),
    ],
)
def test_a_rule_for_all_devices_counts_as_a_gpu_and_is_kept(
    *, rule: dict[str, Any], counts: bool
) -> None:
    """Without a driver, a container with this rule does not start. Privileged containers need the rule."""
    document = {"linux": {"resources": {"devices": [DENIED, {"allow": True, **rule}]}}}
    assert gives_gpu(document) == counts
    why = UnservedImageError("the image is built on musl", hint="")
    with pytest.raises(UnservedImageError) if counts else contextlib.nullcontext():
        require_no_gpu(document, why)
    assert edited(document)["linux"]["resources"]["devices"][:2] == [
        DENIED,
        {"allow": True, **rule},
    ]


def test_a_sandbox_of_a_privileged_pod_gives_no_gpu() -> None:
    """containerd and CRI-O create it without devices, and without the rules of the pod's containers."""
    usual = {"allow": True, "type": "c", "major": 1, "minor": 3, "access": "rwm"}
    assert not gives_gpu({"linux": {"resources": {"devices": [DENIED]}}})
    assert not gives_gpu({"linux": {"resources": {"devices": [DENIED, usual]}}})


GO, GETOPT = False, True


@pytest.mark.parametrize(
    ("like_crun", "arguments", "bundle"),
    [
        (GO, "run -b=/b id", "/b"),
        (GO, "run --b /b id", "/b"),
        (GO, "run -bundle /b id", "/b"),
        (GO, "run -bundle=/b id", "/b"),
        (GO, "run id -b /b", "/b"),
        (GO, "run -b /a --bundle /b id", "/b"),
        (GO, "run --pid-file --bundle -b /b id", "/b"),
        (GO, "run --pid-file --bundle id", ""),
        (GO, "run -b /b -- id", "/b"),
        (GO, "run -- -b /b", ""),
        (GO, "-- run -b /b id", "/b"),
        (GO, "--root run create -b /b id", "/b"),
        (GO, "-root create run -b /b id", "/b"),
        (GO, "--platform systrap run -b /b id", "/b"),
        (GO, "run --no-pivot -b /b id", "/b"),
        (GO, "run --no-pivot=false -b /b id", "/b"),
        (GETOPT, "run -b/b id", "/b"),
        (GETOPT, "run -db /b id", "/b"),
        (GETOPT, "run -db/b id", "/b"),
        (GETOPT, "run -b=/b id", "=/b"),
        (GETOPT, "run -bundle id", "undle"),
        (GETOPT, "run --bund /b id", "/b"),
        (GETOPT, "run --b=/b id", "/b"),
        (GETOPT, "run --pid -b -b /b id", "/b"),
        (GETOPT, "--log-f create run -b /b id", "/b"),
        (GETOPT, "--cgroup-man create run -b /b id", "/b"),
        (GETOPT, "run --no-piv -b /b id", "/b"),
    ],
)
def test_command_lines_are_parsed_as_each_runtime_parses_them(
    *, like_crun: bool, arguments: str, bundle: str
) -> None:
    """tests/container/test_fronts.py runs each real runtime with these command lines."""
    call = parse_call(arguments.split(), like_crun=like_crun)
    assert (call.command in ("run", "create"), call.bundle) == (True, bundle)
    assert call.command == ("create" if "--root run create" in arguments else "run")


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("create --bundle /b id", ("create", "/b", "id", "")),
        ("--root /r --log /l --log-format json create -b /b id", ("create", "/b", "id", "/l")),
        ("--log=file:/l run --bundle=/b --pid-file create id", ("run", "/b", "id", "/l")),
        (
            "--systemd-cgroup create --console-socket /s -b /b --pid-file /p id",
            ("create", "/b", "id", ""),
        ),
        ("state id", ("state", "", "id", "")),
        ("--root /r delete --force id", ("delete", "", "id", "")),
        ("delete -f id", ("delete", "", "id", "")),
        ("delete id -f", ("delete", "", "id", "")),
        ("delete -- id", ("delete", "", "id", "")),
        ("--version", ("", "", "", "")),
        ("", ("", "", "", "")),
        ("--log", ("", "", "", "")),
    ],
)
def test_command_lines_are_parsed_alike_for_all_runtimes(
    arguments: str, found: tuple[str, str, str, str]
) -> None:
    for like_crun in (False, True):
        call = parse_call(arguments.split(), like_crun=like_crun)
        assert (call.command, call.bundle, call.ident, call.log) == found


WORDS = st.text(max_size=12) | st.sampled_from(["--", "-", "--bundle", "-b", "run", "--log", "-db"])


@given(st.lists(WORDS, max_size=8), st.integers(0, 1))
def test_any_command_line_can_be_parsed(arguments: list[str], like_crun: int) -> None:
    parse_call(arguments, like_crun=bool(like_crun))


def test_a_file_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("old")
    path.chmod(0o640)
    replace_file(str(path), b"new" * 100_000)
    assert path.read_bytes() == b"new" * 100_000
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_a_replaced_link_gets_the_mode_of_its_target(tmp_path: Path) -> None:
    """The mode of a link itself is 777."""
    real = tmp_path / "real.json"
    real.write_text("old")
    real.chmod(0o600)
    path = tmp_path / "config.json"
    path.symlink_to(real)
    replace_file(str(path), b"new")
    assert (path.read_text(), real.read_text()) == ("new", "old")
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600


def test_a_file_that_cannot_be_replaced_stays_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_text("old")

    def full(_fd: int, _data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(str(path), b"new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    if os.geteuid() != 0:
        lack("device nodes need root")
    for name, major, minor in (
        ("nvidiactl", 195, 255),
        ("nvidia-uvm", 507, 0),
        ("nvidia0", 195, 0),
        ("nvidia3", 195, 3),
    ):
        os.mknod(tmp_path / name, stat.S_IFCHR | 0o666, os.makedev(major, minor))
    return tmp_path


def test_the_hosts_device_nodes(dev: Path) -> None:
    assert host_nodes(str(dev), (3,)) == (
        ("/dev/nvidiactl", 195, 255),
        ("/dev/nvidia-uvm", 507, 0),
        ("/dev/nvidia3", 195, 3),
    )
    with pytest.raises(DeviceError, match="nvidia7: No such file"):
        host_nodes(str(dev), (7,))
    (dev / "nvidia7").touch()
    with pytest.raises(DeviceError, match="nvidia7 is not a character device"):
        host_nodes(str(dev), (7,))


def test_simulated_gpus_have_no_nodes(tmp_path: Path) -> None:
    assert host_nodes(str(tmp_path), ()) == ()


GPUS = [Device(0, "GPU-a", "one", 1 << 34, 3), Device(1, "GPU-b", "other", 1 << 34, 0)]


def test_the_gpus_are_cdi_devices_named_by_index_and_uuid_and_as_all(dev: Path) -> None:
    spec = make_spec(GPUS, arguments=["--driver-dir", "/d"], dev_dir=str(dev))
    assert (spec["cdiVersion"], spec["kind"]) == ("0.5.0", "tidegate.gpu/shared")
    nodes = {
        device["name"]: [node["path"] for node in device["containerEdits"]["deviceNodes"]]
        for device in spec["devices"]
    }
    assert nodes == {
        "0": ["/dev/nvidia3"],
        "1": ["/dev/nvidia0"],
        "GPU-a": ["/dev/nvidia3"],
        "GPU-b": ["/dev/nvidia0"],
        "all": ["/dev/nvidia3", "/dev/nvidia0"],
    }
    assert [n["path"] for n in spec["containerEdits"]["deviceNodes"]] == [
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
    ]
    create, stop = spec["containerEdits"]["hooks"]
    assert (create["hookName"], stop["hookName"]) == ("createRuntime", "poststop")
    assert stop["args"] == [*create["args"][:-1], "poststop"]
    assert create["args"] == ["tidegate-hook", "--driver-dir", "/d", "--governed", "createRuntime"]
    assert create["env"]


def test_a_missing_device_node_is_reported(dev: Path) -> None:
    (dev / "nvidia3").unlink()
    with pytest.raises(DeviceError, match="nvidia3: No such file"):
        make_spec(GPUS, dev_dir=str(dev))


def test_every_cdi_device_has_edits(tmp_path: Path) -> None:
    """Engines refuse a specification as a whole if one of its devices has no edits."""
    spec = make_spec([replace(gpu, minor=None) for gpu in GPUS], dev_dir=str(tmp_path))
    assert all(device["containerEdits"] for device in spec["devices"])


def test_a_specification_is_written_atomically(tmp_path: Path) -> None:
    path = tmp_path / "cdi" / "tidegate.json"
    write(path, {"kind": "x"})
    path.chmod(0o600)  # as if edited by an operator: rootless engines could not read it
    write(path, {"kind": "y"})
    assert json.loads(path.read_text()) == {"kind": "y"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [p.name for p in path.parent.iterdir()] == ["tidegate.json"]
    (tmp_path / "file").touch()
    with pytest.raises(
        SetupError, match=r"file is not a directory; move it away, or name another --output$"
    ):
        write(tmp_path / "file" / "tidegate.json", {})


@pytest.mark.parametrize("token", ["", "../x", "a b", "a" * 65, "\u0661", "\u00e4", "a\n"])
def test_a_malformed_reservation_is_ignored(token: str) -> None:
    """The token is read from an untrusted config.json and sent to the governor."""
    annotations = {RESERVATION: token, "tidegate.gpu/memory": "1Gi"}
    assert take_reservation(annotations) == ""
    assert annotations == {"tidegate.gpu/memory": "1Gi"}
    assert take_reservation({RESERVATION: "aB3"}) == "aB3"


@pytest.mark.parametrize("ident", ["", ".", "..", "../c1", "/c1", "a/../../c1"])
def test_the_wrapper_does_not_accept_a_path_as_an_id(tmp_path: Path, ident: str) -> None:
    (tmp_path / "traces/a").mkdir(parents=True)
    for place in (tmp_path / "c1", tmp_path / "traces/c1"):
        place.touch()
    call, node = EngineCall(), runtime.NodeSettings()
    call.command, node.runtime_dir = "delete", str(tmp_path)
    call.ident = "c1"
    assert left_traces(call, node)
    call.ident = ident
    assert not left_traces(call, node)


@pytest.mark.parametrize("writer", ["hook", "wrapper"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_log_that_is_a_link_or_a_pipe_is_not_written(
    tmp_path: Path, kind: str, writer: str
) -> None:
    """Other users may write to the log's directory; they must not be able to misuse the hook with a
    link or a pipe.
    """
    log, other = tmp_path / "log", tmp_path / "other"
    other.write_text("as it was\n")
    log.symlink_to(other) if kind == "link" else os.mkfifo(log)
    call = EngineCall()
    call.log = str(log)
    if writer == "hook":
        write = partial(RunEvent("prestart", str(log)).emit, "failed")
    else:
        write = partial(runtime._tell_engine, call, "a line")
    ends = threading.Thread(target=write, daemon=True)
    ends.start()
    ends.join(5)
    assert not ends.is_alive()
    assert other.read_text() == "as it was\n"


@pytest.mark.parametrize("kind", ["link", "file"])
def test_an_existing_temporary_file_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path, other = tmp_path / "config.json", tmp_path / "other"
    path.write_text("old")
    other.write_text("as it was")
    monkeypatch.setattr(os, "getpid", lambda: 7)
    temporary = tmp_path / ".config.json.tidegate-7"
    temporary.symlink_to(other) if kind == "link" else os.link(other, temporary)
    with pytest.raises(FileExistsError):
        replace_file(str(path), b"new")
    assert (path.read_text(), other.read_text()) == ("old", "as it was")
