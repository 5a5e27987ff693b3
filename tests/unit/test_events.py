"""Test `tidegate events` on lines from the journal, from syslog files and from Tidegate's logs."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from governor import cli, events
from governor.events import journal_command, parse_journal, parse_line, read_files
from oci_hook import log

FAILED = {
    "event": "hook-done",
    "stage": "createRuntime",
    "id": "4f3a99",
    "timestamp": "2026-11-22T09:13:51Z",
    "outcome": "failed",
    "code": "governor",
    "message": "the governor is not reachable at /run/tidegate/governor.sock",
    "hint": "start tidegate-governor",
    "ms": {"state": 1.5},
    "total_ms": 3.0,
}
PREPARED = {
    **FAILED,
    "outcome": "prepared",
    "id": "77aa",
    "key": "b1",
    "plan": ["bind /a -> /b (ro)"],
}
REFUSED = {
    "event": "request-refused",
    "container": "4f3a99",
    "code": "refused",
    "message": "GPU 0 has 10 % of its time left",
    "hint": "ask for less",
    "level": "info",
    "timestamp": "2026-11-22T09:13:50.5Z",
}
ENDED = {
    "event": "container-ended",
    "container": "77aa",
    "why": "ended",
    "level": "info",
    "timestamp": "t",
}

FAILED_LINE = (
    "2026-11-22T09:13:51Z     hook     failed 4f3a99: governor: the governor is not reachable at "
    "/run/tidegate/governor.sock; start tidegate-governor"
)
REFUSED_LINE = "2026-11-22T09:13:50.5Z   governor request-refused 4f3a99: refused: GPU 0 has 10 % of its time left; ask for less"


def put(path: Path, *lines: object) -> Path:
    text = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{line}\n" for line in text))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    assert cli.main(["events", *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def test_failures_are_shown_from_files_of_json_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hook = put(tmp_path / "hook.log", PREPARED, FAILED)
    governor = put(
        tmp_path / "governor.log", ENDED, REFUSED, "no JSON", "[1]", '{"a": 1}', '{"half'
    )
    assert run(capsys, "--log", hook, "--log", governor) == [FAILED_LINE, REFUSED_LINE]
    assert run(capsys, "--log", hook, "--log", governor, "--container", "4f3") == [
        FAILED_LINE,
        REFUSED_LINE,
    ]
    assert run(capsys, "--log", hook, "--log", governor, "--container", "77aa") == []
    shown = run(capsys, "--log", hook, "--log", governor, "--container", "77aa", "--all")
    assert [line.split()[2] for line in shown] == ["prepared", "container-ended"]
    assert [json.loads(line) for line in run(capsys, "--log", hook, "--json")] == [FAILED]


def test_moves_of_memory_are_shown_on_request_and_failures_always(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"container": "77aa", "timestamp": "t"}
    moved = {**about, "memory": 1 << 30, "seconds": 0.35, "level": "info"}
    stays = {
        **about,
        "event": "container-not-parked",
        "message": "its work does not end, and other containers are waiting for its memory",
        "hint": "set tidegate.gpu/parking to never if it always behaves like this",
        "level": "warning",
    }
    governor = put(
        tmp_path / "governor.log",
        {"event": "container-parked", **moved},
        {"event": "container-resident", **moved},
        stays,
    )
    [failure] = run(capsys, "--log", governor)
    assert failure == (
        f"{'t':24} governor container-not-parked 77aa: its work does not end, and other containers"
        " are waiting for its memory; set tidegate.gpu/parking to never if it always behaves like this"
    )
    assert run(capsys, "--log", governor, "--container", "77", "--all") == [
        f"{'t':24} governor container-parked 77aa: memory 1073741824, seconds 0.35",
        f"{'t':24} governor container-resident 77aa: memory 1073741824, seconds 0.35",
        failure,
    ]


def test_pods_and_claims_are_named_and_can_be_selected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = {"pod": "ml/train-0", "claims": ["ml/train"]}
    claim = {**REFUSED, "claim": "ml/other", "uid": "4c6e"}
    del claim["container"]
    log = put(tmp_path / "log", {**REFUSED, **owner}, claim, REFUSED)
    [refused] = run(capsys, "--log", log, "--container", "ml/train-0")
    assert refused == f"{REFUSED_LINE} (pod ml/train-0, claim ml/train)"
    assert run(capsys, "--log", log, "--container", "ml/train") == [refused]
    [other] = run(capsys, "--log", log, "--container", "4c6e")
    assert other.endswith("ask for less (claim ml/other)")
    assert run(capsys, "--log", log, "--container", "ml/trai") == []
    assert len(run(capsys, "--log", log)) == 3


def test_the_absence_of_failures_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hook = put(tmp_path / "hook.log", PREPARED)
    assert cli.main(["events", "--log", str(hook), "--container", "77"]) == 0
    out, error = capsys.readouterr()
    assert (out, error) == ("", f"no failures for 77 in {hook}\n")
    assert cli.main(["events", "--log", str(hook), "--container", "web"]) == 0
    assert capsys.readouterr().err == (
        f"no failures for web in {hook}; containers are found by their ids: tidegate ps,"
        " docker ps --all, podman ps --all\n"
    )


@pytest.mark.parametrize(
    ("line", "time"),
    [
        ("Nov 22 09:13:51 node7 tidegate-hook[4711]: {}", "Nov 22 09:13:51"),
        (
            "2026-11-22T09:13:51.123456+00:00 node7 tidegate-hook[4711]: {}",
            "2026-11-22T09:13:51.123456+00:00",
        ),
        ("Nov  2 09:13:51 node7 tidegate-hook: {}", "Nov  2 09:13:51"),
    ],
)
def test_lines_of_a_syslog_daemon_are_read(line: str, time: str) -> None:
    fields = {name: value for name, value in FAILED.items() if name != "timestamp"}
    event = parse_line(line.format(json.dumps(fields)))
    assert event is not None
    assert (event.time, event.source, event.name, event.container) == (
        time,
        "hook",
        "failed",
        "4f3a99",
    )


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "7",
        "Nov 22 09:13:51 node7 sshd[1]: {}",
        "tidegate-hook: {",
        "{" * 100_000,
        '{"event": 7}',
    ],
)
def test_other_lines_are_left_out(line: str) -> None:
    assert parse_line(line) is None


def entry(message: Any, tag: str = "tidegate-hook", **fields: Any) -> str:
    base = {
        "__REALTIME_TIMESTAMP": "1795338831250000",
        "SYSLOG_IDENTIFIER": tag,
        "MESSAGE": message,
    }
    return json.dumps({**base, **fields})


def test_entries_of_the_journal_are_read() -> None:
    fields = {name: value for name, value in FAILED.items() if name != "timestamp"}
    event = parse_journal(entry(json.dumps(fields)))
    assert event is not None
    assert (event.time, event.source, event.name) == ("2026-11-22T09:13:51.250Z", "hook", "failed")
    # The journal gives a message with unprintable characters as an array of numbers.
    assert parse_journal(entry(list(json.dumps(fields).encode()))) == event
    event = parse_journal(
        entry(json.dumps(REFUSED), "python3", _SYSTEMD_UNIT="tidegate-governor.service")
    )
    assert event is not None
    assert (event.time, event.source, event.failure) == (REFUSED["timestamp"], "governor", True)


def test_a_user_other_than_root_is_named_in_the_journal() -> None:
    """Any user may write to the journal under any tag, so entries are attributed to their user."""
    for tag in ("tidegate-hook", "tidegate-governor"):
        forged = parse_journal(entry(json.dumps({**FAILED, "stage": "runtime"}), tag, _UID="1000"))
        assert forged is not None
        assert forged.source == "user 1000"
    said = parse_journal(entry(json.dumps(FAILED), _UID="0"))
    assert said is not None
    assert said.source == "hook"
    start = "tidegate-governor: it cannot start; call 0900"
    assert parse_journal(entry(start, "tidegate-governor", _UID="1000")) is None


def test_events_of_the_wrapper_runtime_are_attributed_to_it() -> None:
    event = parse_line(json.dumps({**FAILED, "stage": "runtime"}))
    assert event is not None
    assert event.source == "runtime"


def test_a_governor_that_did_not_start_is_a_failure() -> None:
    event = parse_journal(
        entry(
            "tidegate-governor: the mirror has no NVML; run tidegate refresh", "tidegate-governor"
        )
    )
    assert event is not None
    assert event.failure
    assert event.text() == "the mirror has no NVML; run tidegate refresh"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "7",
        entry(None),
        entry(["x"]),
        entry([300]),
        entry("Started."),
        "{}",
        entry("{}", __REALTIME_TIMESTAMP="x"),
    ],
)
def test_other_entries_are_left_out(line: str) -> None:
    assert parse_journal(line) is None


def test_the_journal_is_queried_for_whole_messages_of_tidegate() -> None:
    command = journal_command("today", follow=True)
    assert "--all" in command  # without it, a message of more than 4096 bytes is null
    assert command[command.index("--lines=all") + 1 :] == [
        "SYSLOG_IDENTIFIER=tidegate-hook", "+",
        "SYSLOG_IDENTIFIER=tidegate-governor", "+", "_SYSTEMD_UNIT=tidegate-governor.service",
    ]  # fmt: skip
    assert "--since=today" in command


def test_journalctl_is_run_and_its_failure_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = tmp_path / "journalctl"
    lines = "\n".join([entry("Started."), entry(json.dumps(PREPARED)), entry(json.dumps(FAILED))])
    put(tmp_path / "journal", lines)
    stand_in.write_text(f"#!/bin/sh\ncat {tmp_path}/journal\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(events, "has_journal", lambda: True)
    assert run(capsys) == [FAILED_LINE]
    stand_in.write_text("#!/bin/sh\necho No permission >&2\nexit 1\n")
    assert cli.main(["events"]) == 65
    assert (
        capsys.readouterr().err
        == "tidegate: journalctl: No permission; run it as root, or name a file with --log\n"
    )


def test_a_node_without_any_log_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(events, "has_journal", lambda: False)
    monkeypatch.setattr(events, "SYSLOG_FILES", (str(tmp_path / "syslog"),))
    assert cli.main(["events"]) == 65
    assert capsys.readouterr().err.startswith("tidegate: this node has no journal and none of ")
    put(tmp_path / "syslog", f"Nov 22 09:13:51 node7 tidegate-hook[1]: {json.dumps(FAILED)}")
    assert run(capsys) == [FAILED_LINE]
    assert cli.main(["events", "--since", "today"]) == 65
    assert cli.main(["events", "--log", str(tmp_path / "gone")]) == 65


def test_files_are_followed_across_truncation_and_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "POLL_S", 0.01)
    path = put(tmp_path / "hook.log", {**FAILED, "id": "1"})
    seen: list[str] = []
    came = threading.Condition()

    def follow() -> None:
        for event in read_files([path], follow=True):
            with came:
                seen.append(event.container)
                came.notify_all()
                if event.container == "5":
                    return

    def expect(*ids: str) -> None:
        with came:
            assert came.wait_for(lambda: seen == list(ids), timeout=20), seen

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    expect("1")
    with path.open("a") as file:
        file.write(
            json.dumps({**FAILED, "id": "2"}) + "\n" + json.dumps({**FAILED, "id": "3"})[:20]
        )
        file.flush()
        expect("1", "2")
        file.write(json.dumps({**FAILED, "id": "3"})[20:] + "\n")
    expect("1", "2", "3")
    path.write_text(json.dumps({**FAILED, "id": "4"}) + "\n")
    expect("1", "2", "3", "4")
    path.rename(tmp_path / "hook.log.1")
    put(path, {**FAILED, "id": "5"})
    expect("1", "2", "3", "4", "5")
    thread.join(20)


def test_lines_that_come_between_two_reads_survive_a_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path / "hook.log", {**FAILED, "id": "1"})

    def rotate(_: float) -> None:
        with path.open("a") as file:
            file.write(json.dumps({**FAILED, "id": "2"}) + "\n")
        path.rename(tmp_path / "hook.log.1")
        put(path, {**FAILED, "id": "3"})

    monkeypatch.setattr("time.sleep", rotate)
    lines = read_files([path], follow=True)
    assert [next(lines).container for _ in range(3)] == ["1", "2", "3"]


def test_half_a_line_is_forgotten_with_the_file_that_is_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path / "hook.log", {**FAILED, "id": "1"})
    with path.open("a") as file:
        file.write(json.dumps(FAILED)[:-1])
    changes = [{**FAILED, "id": "2"}]
    monkeypatch.setattr("time.sleep", lambda _: put(path, changes.pop()))
    lines = read_files([path], follow=True)
    assert [next(lines).container for _ in range(2)] == ["1", "2"]


def test_the_log_that_the_hook_writes_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    event = log.RunEvent("createRuntime", str(tmp_path / "hook.log"))
    event.fields["id"] = "4f3a99"
    event.emit("failed", code="image", message="the image has no glibc", hint="take another")
    [line] = run(capsys, "--log", tmp_path / "hook.log")
    time, *rest = line.split(maxsplit=1)
    assert time.endswith("Z")
    assert rest == ["hook     failed 4f3a99: image: the image has no glibc; take another"]


def test_the_name_of_a_container_cannot_break_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = put(tmp_path / "hook.log", {**FAILED, "id": "a\nb\x1b[31m"})
    [line] = run(capsys, "--log", path)
    assert "\x1b" not in line
