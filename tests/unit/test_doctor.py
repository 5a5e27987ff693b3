"""Test `tidegate doctor` as a command: its output and exit status, and that it changes nothing and never fails."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from governor import cli
from governor.doctor import checks
from governor.doctor.checks import CHECKS, OF_NODE, examine
from governor.doctor.finding import Finding, Severity, UnseenError, warning
from governor.doctor.node import MOST, ExaminedNode, open_node, run_command
from tests.unit.doctor_nodes import Host, governor, words

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "governor/doctor/doctor.schema.json").read_text())
PAGE = ROOT / "docs/reference/doctor.md"
NODES = "driver.nodes"  # only root can create device nodes


def states(host: Host) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in examine(host.node()):
        found.setdefault(one.finding.state, []).append(f"{one.id}: {words(one)}")
    return found


def test_a_correct_node_has_no_wrong_finding(tmp_path: Path) -> None:
    host = Host.right(tmp_path / "n")
    with governor(host):
        found = states(host)
    assert [line for line in found.get("wrong", []) if not line.startswith(NODES)] == []
    assert found.get("warning", []) == []
    assert found.get("unseen", []) == []


@pytest.mark.parametrize("check", CHECKS)
def test_on_an_empty_disk_every_check_reports_a_finding(tmp_path: Path, check: str) -> None:
    found = list(examine(open_node(str(tmp_path)), [check]))
    assert found
    assert all(one.finding.found and one.id == check for one in found)
    assert not any("the check failed" in one.finding.found for one in found)


@pytest.mark.parametrize("check", CHECKS)
def test_no_check_fails_on_directories_in_place_of_files(tmp_path: Path, check: str) -> None:
    """An engine creates these if a volume is mounted on a file that does not exist."""
    host = Host.right(tmp_path / "n")
    for path in [
        *(p for p in host.root.rglob("*") if p.is_file() and "var/lib/tidegate" not in str(p)),
    ]:
        path.unlink()
        path.mkdir()
    for one in examine(host.node(), [check]):
        assert "the check failed" not in one.finding.found


def test_fifos_and_huge_files_are_not_read(tmp_path: Path) -> None:
    host = Host(tmp_path / "n")
    fifo = host.root / "proc/sys/kernel/osrelease"
    fifo.parent.mkdir(parents=True)
    os.mkfifo(fifo)
    assert host.check("kernel.calls") == [
        "unseen: /proc/sys/kernel/osrelease is not a regular file"
    ]
    huge = host.put("etc/docker/daemon.json")
    os.truncate(huge, MOST)
    assert host.check("docker.runtime") == ["unseen: /etc/docker/daemon.json is larger than 4 MiB"]


def test_links_are_resolved_below_the_root(tmp_path: Path) -> None:
    host = Host(tmp_path / "n")
    (tmp_path / "daemon.json").write_text("not JSON")
    link = host.put("etc/docker/daemon.json")
    link.unlink()
    link.symlink_to(tmp_path / "daemon.json")
    assert host.check("docker.runtime")[0].startswith("note: Docker is not installed")
    link.unlink()
    link.symlink_to("/opt/daemon.json")
    host.json("opt/daemon.json", {"runtimes": {"tidegate": {"path": "/opt/tidegate-gone"}}})
    assert host.check("docker.runtime")[0].startswith(
        "wrong: Docker's runtime tidegate, /opt/tidegate-gone"
    )


def test_a_check_that_fails_is_reported_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: ExaminedNode) -> Iterator[Finding]:
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setitem(checks.CHECKS, "kernel.calls", broken)
    cli.main(["doctor", "--root", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split(maxsplit=2) == [
        "unseen", "kernel.calls", "the check failed: ZeroDivisionError: division by zero",
    ]  # fmt: skip
    assert lines[-1].endswith(" ok")
    assert {line.split()[1] for line in lines if line[0] != " "} >= set(CHECKS)


def test_nothing_is_run_and_nothing_is_changed_below_a_root(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = Host.right(tmp_path / "n")
    for program in ("podman", "containerd", "nvidia-smi", "dockerd", "docker"):
        # If doctor ran such a program, the program would leave a file.
        host.put(f"usr/bin/{program}", f"#!/bin/sh\ntouch {tmp_path}/ran\n", 0o755)

    def snapshot() -> dict[str, tuple[int, int, int]]:
        found = {}
        for path in sorted(host.root.rglob("*")):
            status = path.lstat()
            found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns)
        return found

    before = snapshot()
    assert cli.main(["doctor", "--root", str(host.root)]) == 1  # no device nodes, no governor
    assert snapshot() == before
    assert not (tmp_path / "ran").exists()
    assert "Traceback" not in "".join(capsys.readouterr())


def test_json_conforms_to_the_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["doctor", "--root", str(tmp_path), "--json"])
    document = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(document, SCHEMA)
    assert document["root"] == str(tmp_path)
    assert document["status"] == status == 1
    assert {one["id"] for one in document["findings"]} == set(CHECKS)
    assert all(
        one["remedy"] for one in document["findings"] if one["state"] in ("warning", "wrong")
    )


@pytest.mark.parametrize(
    ("state", "status", "strict"),
    [("ok", 0, 0), ("note", 0, 0), ("unseen", 0, 1), ("warning", 0, 1), ("wrong", 1, 1)],
)
def test_the_exit_status_reports_whether_something_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, status: int, strict: int
) -> None:
    def one(_: ExaminedNode) -> Iterator[Finding]:
        yield Finding(checks.Severity(state), "found", "remedy")

    for name in list(CHECKS):
        monkeypatch.setitem(checks.CHECKS, name, one)
    assert cli.main(["doctor", "--root", str(tmp_path)]) == status
    assert cli.main(["doctor", "--root", str(tmp_path), "--strict"]) == strict


def test_only_problems_are_printed_if_requested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["doctor", "--root", str(tmp_path), "--problems"])
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[:-1] if line[0] != " "} == {
        "unseen",
        "warning",
        "wrong",
    }
    wrong = sum(line.startswith("wrong") for line in lines)
    assert lines[-1].startswith(f"{wrong} wrong, ")


def test_text_of_files_stays_on_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = Host(tmp_path / "n")
    host.put("proc/sys/kernel/osrelease", "\x1b[2J")
    host.json("etc/docker/daemon.json", {"runtimes": {"tidegate": {"path": "a\nwrong \x1b[31m"}}})
    cli.main(["doctor", "--root", str(host.root)])
    assert "\x1b" not in capsys.readouterr().out


def test_a_broken_configuration_does_not_stop_the_other_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = Host(tmp_path / "n")
    host.put("etc/tidegate/config.yaml", "quantum_ms: never\n")
    assert cli.main(["doctor", "--root", str(host.root)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^wrong +governor.configuration .*quantum_ms", out, re.MULTILINE)
    missing = str(tmp_path / "missing.yaml")
    assert cli.main(["doctor", "--root", str(host.root), "--config", missing]) == 1
    assert "missing.yaml" in capsys.readouterr().out


def test_commands_time_out_and_do_not_get_the_callers_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://elsewhere")
    assert "elsewhere" not in run_command(["env"])
    for command, said in (
        (["sh", "-c", "echo out of order >&2; exit 3"], "sh exited with status 3: out of order"),
        (["sh", "-c", "kill -9 $$"], "sh was killed by signal 9"),
        (["/nonexistent/engine"], "engine cannot be run: No such file or directory"),
    ):
        with pytest.raises(UnseenError, match=said):
            run_command(command)
    monkeypatch.setattr("governor.doctor.node.TIMEOUT", 0.05)
    with pytest.raises(UnseenError, match=r"sleep did not answer within 0\.05 s"):
        run_command(["sleep", "5"])


def test_in_a_pod_missing_engines_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines are not in the container's own tree, so doctor does not report on each of them."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    ids = [name for name in CHECKS if name.startswith(OF_NODE)]
    assert {"engine.any", "containerd.version", "hooks.in-force", "nvidia.cdi"} <= set(ids)
    (found,) = examine(ExaminedNode(), ids)
    assert (found.id, found.finding.state) == ("engine.any", Severity.NOTE)
    assert "--root /proc/1/root" in found.finding.found
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    assert {one.id for one in examine(ExaminedNode(), ["containerd.version"])} == {
        "containerd.version"
    }


@pytest.mark.parametrize(
    ("remedy", "without"),
    [
        (
            "systemctl start tidegate-governor, then journalctl -u tidegate-governor",
            "start tidegate-governor, then read what it prints",
        ),
        ("correct it, then systemctl restart tidegate-governor", "correct it, then restart tidegate-governor"),
        ("systemctl enable --now nvidia-persistenced", "start nvidia-persistenced"),
        ("systemctl disable --now a.path b.service", "stop a.path b.service"),
        ("tidegate reload", "tidegate reload"),
    ],
)  # fmt: skip
def test_without_systemd_no_remedy_is_a_systemd_command(
    monkeypatch: pytest.MonkeyPatch, remedy: str, without: str
) -> None:
    monkeypatch.setitem(CHECKS, "engine.any", lambda _: iter([warning("it is old", remedy)]))
    for has_systemd, expected in ((True, remedy), (False, without)):
        monkeypatch.setattr(ExaminedNode, "has_systemd", has_systemd)
        (found,) = examine(ExaminedNode(), ["engine.any"])
        assert found.finding.remedy == expected


def test_every_check_has_a_row_in_the_reference() -> None:
    """To fix a failure, add the row to docs/reference/doctor.md."""
    rows = re.findall(r"^\| `([a-z]+\.[a-z-]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert rows == list(CHECKS)
