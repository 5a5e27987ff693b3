"""Test reloading the configuration: when options take effect, and that an invalid file does not end the governor.

The governor is a process on the simulated GPU. The command is run as an operator runs it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from governor import cli, daemon
from governor.config import Config, LoadedConfig, effect_of
from governor.container import container_key
from governor.doctor.checks import examine
from governor.doctor.node import open_node
from governor.errors import ConfigError
from governor.settings import SettingsInForce
from tests.unit.doctor_nodes import words
from tests.unit.governor_process import ROOT, GovernorNode, gpus, setting, wait_for

__all__ = ["gpus"]  # a fixture

OUTPUTS = json.loads((ROOT / "governor/outputs.schema.json").read_text())


@pytest.fixture
def node(tmp_path: Path, gpus: tuple[Path, Path], build_dir: Path) -> Iterator[GovernorNode]:
    with GovernorNode(tmp_path, gpus, build_dir) as made:
        yield made


def test_an_unavailable_port_does_not_stop_the_governor(node: GovernorNode) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        node.write(web={"listen": where}, metrics={"listen": where})
        node.stop()
        node.start()
        assert [event["message"] for event in node.events("endpoint-not-served")] == [
            f"{what} cannot be served at {where}: Address already in use"
            for what in ("metrics", "the page")
        ]
        assert node.ask("ping")["ok"]


def tidegate(node: GovernorNode, *arguments: str) -> tuple[int, list[str], str]:
    """Run the command and return its status, its lines and its error."""
    done = subprocess.run(
        [sys.executable, "-m", "governor.cli", *arguments, "--runtime-dir", node.config.runtime_dir],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines(), done.stderr.strip()


def check(verb: str, document: object) -> None:
    """Check a document against the schema of the verb's --json."""
    schema = {"$ref": f"#/$defs/{verb}", "$defs": OUTPUTS["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(document)


def in_force(node: GovernorNode) -> list[str]:
    """Return doctor's findings about the configuration in force."""
    opened = open_node(config_file=str(node.file), runtime_dir=node.config.runtime_dir)
    found = examine(opened, ["governor.in-force"])
    return [words(one) for one in found]


def test_a_reload_reports_when_each_change_takes_effect(
    node: GovernorNode,
) -> None:
    directory = node.container()
    with pytest.raises(LookupError, match="memory is missing"):
        node.container("two", annotations={"compute": "10"})
    assert (setting(directory, "holds"), setting(directory, "on_governor_loss")) == (1, 0)
    assert setting(directory, "unknown_functions") == 1
    node.write(unknown_functions="refuse")
    _, lines, _ = tidegate(node, "reload")
    assert lines[1] == "unknown_functions: count -> refuse: in force now"
    assert setting(directory, "unknown_functions") == 2
    node.write(unknown_functions="forward")
    tidegate(node, "reload")
    assert setting(directory, "unknown_functions") == 0
    node.write()
    tidegate(node, "reload")
    node.write(hold_launches=False, on_governor_loss="deny", quantum_ms=5, spin_us=7)
    (node.drop_ins / "10-defaults.yaml").write_text("defaults: {memory: 1Gi}\n")
    files = f"{node.file}, {node.drop_ins}/10-defaults.yaml"
    before = setting(directory, "spin_ns")

    status, lines, _ = tidegate(node, "reload", "--dry-run")
    assert (status, lines[0]) == (0, f"read: {files}")
    assert "hold_launches: true -> false: would be in force at once" in lines
    assert setting(directory, "holds") == 1
    restart = "restart tidegate-governor"
    if Path("/run/systemd/system").is_dir():
        restart = f"systemctl {restart}"
    assert in_force(node) == [
        "warning: the governor is not using the values of hold_launches, on_governor_loss, defaults.memory in its files -> tidegate reload",
        f"warning: the governor is not using the values of quantum_ms, spin_us in its files -> {restart}",
    ]

    spin = Config().spin_us
    assert tidegate(node, "reload") == (
        0,
        [
            f"read: {files}",
            "quantum_ms: 4 -> 5: needs systemctl restart tidegate-governor",
            f"spin_us: {spin} -> 7: needs systemctl restart tidegate-governor",
            "hold_launches: true -> false: in force now",
            "on_governor_loss: keep -> deny: applies to containers and processes that start from now on",
            "defaults.memory: none -> 1Gi: applies to containers and processes that start from now on",
        ],
        "",
    )
    # These options take effect in the page of a running container; those that need a restart do
    # not.
    assert (setting(directory, "holds"), setting(directory, "on_governor_loss")) == (0, 1)
    assert setting(directory, "spin_ns") == before
    node.container("two", annotations={"compute": "10"})
    listed = {one["id"]: one for one in node.ask("list")["containers"]}
    assert listed["two"]["devices"][0]["memory_limit"] == 1 << 30
    *_, loaded = node.events("configuration-loaded")
    assert (loaded["now"], loaded["restart"]) == (["hold_launches"], ["quantum_ms", "spin_us"])

    # A pending change is reported again until it is in force or reverted.
    _, lines, _ = tidegate(node, "reload", "--json")
    document = json.loads("\n".join(lines))
    check("reload", document)
    assert [one["option"] for one in document["changes"]] == ["quantum_ms", "spin_us"]
    node.write()
    (node.drop_ins / "10-defaults.yaml").unlink()
    assert tidegate(node, "reload")[1] == [
        f"read: {node.file}",
        "hold_launches: false -> true: in force now",
        "on_governor_loss: deny -> keep: applies to containers and processes that start from now on",
        "defaults.memory: 1Gi -> none: applies to containers and processes that start from now on",
    ]
    assert tidegate(node, "reload")[1] == [f"read: {node.file}", "nothing has changed"]
    assert in_force(node) == [
        f"ok: the governor is using the configuration in its files: {node.file}"
    ]


def test_check_lists_the_files_and_conforms_to_the_schema(node: GovernorNode) -> None:
    drop_in = node.drop_ins / "10-a.yaml"
    drop_in.write_text("placement: pack\n")
    _, lines, _ = tidegate(node, "check", "--json", "--config", str(node.file))
    document = json.loads("\n".join(lines))
    check("check", document)
    assert document["files"] == [str(node.file), str(drop_in)]
    assert document["configuration"]["placement"] == "pack"
    assert len(document["gpus"]) == 2
    _, lines, _ = tidegate(node, "check", "--config", str(node.file))
    assert lines[0] == f"configuration: {node.file}, {drop_in}: accepted"


def test_a_change_that_needs_a_restart_applies_after_one(node: GovernorNode) -> None:
    directory = node.container()
    node.write(lookahead_us=77)
    assert "needs systemctl restart" in tidegate(node, "reload")[1][1]
    before = setting(directory, "lookahead_ns")
    assert before != 77_000
    assert node.stop() == 0
    node.start()
    wait_for(lambda: setting(directory, "lookahead_ns") == 77_000, "settings of the next governor")
    assert node.ask("config")["configuration"]["lookahead_us"] == 77


def spoil(node: GovernorNode, how: str) -> None:
    """Make the configuration invalid in this way."""
    bad = node.drop_ins / "50-bad.yaml"
    match how:
        case "misspelt":
            bad.write_text("placemnt: pack\n")
        case "no YAML":
            bad.write_text("placement: [pack\n")
        case "binary":
            bad.write_bytes(bytes(range(256)))
        case "aliases":
            levels = [f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]" for i in range(30)]
            bad.write_text("a0: &a0 [x]\n" + "\n".join(levels))
        case "deep":
            bad.write_text("[" * 60_000)
        case "large":
            bad.write_bytes(b"# \n" * (1 << 16))
        case "fifo":
            os.mkfifo(bad)
        case "link":
            bad.symlink_to("/nonexistent")
        case "endless":
            bad.symlink_to("/dev/zero")
        case "directory":
            bad.mkdir()
        case "gone":
            node.file.unlink()
        case "two that disagree":
            bad.write_text("gpus: {0: {strategy: mps}}\n")


@pytest.mark.parametrize("way", ["reload", "SIGHUP"])
def test_an_invalid_file_changes_nothing_and_is_reported(
    node: GovernorNode, way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert node.process is not None
    directory = node.container()
    node.write(on_violation="stop")
    assert tidegate(node, "reload")[0] == 0
    kinds = [
        *("misspelt", "no YAML", "binary", "aliases", "deep", "large", "fifo", "link", "endless"),
        *("directory", "two that disagree", "gone"),
    ]
    for said, kind in enumerate(kinds, 1):
        spoil(node, kind)
        node_file = str(node.file if kind == "gone" else node.drop_ins / "50-bad.yaml")
        if way == "reload":
            runtime = ["--runtime-dir", node.config.runtime_dir]
            assert cli.main(["reload", *runtime]) == 78, kind
            out, error = capfd.readouterr()
            assert out == ""
            assert error.startswith(f"tidegate: {node_file}: "), error
            assert ": the governor keeps its current configuration; " in error
            assert error.count("\n") == 1
            assert cli.main(["reload", "--dry-run", *runtime]) == 78
            assert capfd.readouterr().err.startswith(f"tidegate: {node_file}: ")
        else:
            node.process.send_signal(signal.SIGHUP)
        refused = wait_for(
            lambda n=said: len(found := node.events("configuration-refused")) == n and found, kind
        )
        assert refused[-1]["message"].startswith(node_file)
        assert refused[-1]["level"] == "error"
        assert node.ask("config")["configuration"]["on_violation"] == "stop", kind
        assert node.process.poll() is None
        if kind == "misspelt":
            [finding] = in_force(node)
            assert finding.startswith(
                f"warning: {node_file}: placemnt is not an option: the governor continues with the"
            )
            assert finding.endswith(
                ", and a restart would fail -> correct it (did you mean placement?), then tidegate reload"
            )
        path = Path(node_file)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        node.write(on_violation="stop")
    assert len(node.ask("list")["containers"]) == 1
    assert setting(directory, "holds") == 1
    # The event is in the list of failures.
    assert cli.main(["events", "--log", str(node.log)]) == 0
    shown = capfd.readouterr().out.splitlines()
    assert sum(" configuration-refused: config: " in line for line in shown) == len(kinds)
    assert cli.main(["events", "--all", "--json", "--log", str(node.log)]) == 0
    for printed in capfd.readouterr().out.splitlines():
        check("events", json.loads(printed))
    # A repaired configuration is put in force.
    node.write(on_violation="throttle")
    node.process.send_signal(signal.SIGHUP)
    wait_for(
        lambda: node.ask("config")["configuration"]["on_violation"] == "throttle",
        "reload by SIGHUP",
    )
    assert node.ask("config")["refused"] is None
    assert in_force(node) == [
        f"ok: the governor is using the configuration in its files: {node.file}"
    ]


def test_a_governor_does_not_start_with_a_bad_file(node: GovernorNode) -> None:
    assert node.stop() == 0
    spoil(node, "misspelt")
    done = subprocess.run(
        [sys.executable, "-m", "governor.daemon", "--config", str(node.file)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 78
    assert done.stderr == (
        f"tidegate-governor: {node.drop_ins}/50-bad.yaml: placemnt is not an option; did you mean placement?\n"
    )
    (node.drop_ins / "50-bad.yaml").unlink()
    node.start()


HANG_UP = """
import asyncio, os, signal, sys
from governor import daemon
run = asyncio.run
def hang_up_first(main):
    os.kill(os.getpid(), signal.SIGHUP)
    return run(main)
asyncio.run = hang_up_first
sys.exit(daemon.main())
"""


def test_a_sighup_before_the_handler_exists_is_pending(node: GovernorNode) -> None:
    """Otherwise the signal would end the process. The files may have changed since they were read."""
    assert node.stop() == 0
    assert node.events("configuration-loaded") == []
    node.start("-c", HANG_UP)
    wait_for(lambda: node.events("configuration-loaded"), "the reload that SIGHUP requested")


def test_simultaneous_reloads_are_done_one_after_the_other(node: GovernorNode) -> None:
    node.write(placement="pack")
    commands = [
        subprocess.Popen(
            [sys.executable, "-m", "governor.cli", "reload", "--json", "--runtime-dir", node.config.runtime_dir],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(4)
    ]  # fmt: skip
    changes = [json.loads(one.communicate()[0])["changes"] for one in commands]
    assert sorted(map(len, changes)) == [0, 0, 0, 1]


# ---- without a governor process ----


def test_a_bug_in_reading_changes_nothing() -> None:
    texts: list[Any] = [Config(placement="pack"), RuntimeError("ours"), Config()]
    told: list[Config] = []

    def load() -> LoadedConfig:
        found = texts.pop(0)
        if isinstance(found, Exception):
            raise found
        return LoadedConfig(found)

    async def scene() -> None:
        settings = SettingsInForce(load)
        settings.tell(lambda _: 1 // 0)  # a listener that fails does not stop the others
        settings.tell(told.append)
        with pytest.raises(ConfigError, match="RuntimeError: the governor keeps"):
            await settings.reload()
        assert settings.config.placement == "pack"
        assert told == []
        assert [one["option"] for one in (await settings.reload())["changes"]] == ["placement"]
        assert told == [Config()]

    asyncio.run(scene())


def test_only_options_that_need_no_restart_are_applied() -> None:
    new = Config(
        runtime_dir="/a", quantum_ms=7, inflight_us=100, mps_fault_s=1, context_memory=1 << 30, placement="pack"
    )  # fmt: skip
    loads = iter([LoadedConfig(Config()), LoadedConfig(new)])

    async def scene() -> None:
        settings = SettingsInForce(lambda: next(loads))
        changes = (await settings.reload())["changes"]
        assert {one["option"]: one["effect"] for one in changes} == {
            option: effect_of(option)
            for option in ("runtime_dir", "quantum_ms", "inflight_us", "context_memory", "placement", "mps_fault_s")
        }  # fmt: skip
        assert settings.config == Config(
            inflight_us=100, mps_fault_s=1, context_memory=1 << 30, placement="pack"
        )

    asyncio.run(scene())


def test_a_runtime_directory_that_is_too_deep_for_sockets_is_refused_at_the_start(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Otherwise the error would appear only with the first container: no process could register."""
    with tempfile.TemporaryDirectory() as short:
        fits = f"{short}/{'d' * (64 - len(short))}"
        assert daemon.main(["--runtime-dir", f"{fits}x"]) == 75
        assert list(Path(short).iterdir()) == []
        assert capfd.readouterr().err == (
            f"tidegate-governor: {fits}x: the sockets of containers would have paths that are too long; "
            "choose a runtime_dir that is shorter by 1 byte\n"
        )
        daemon._make_directories(Path(fits))
        directory = Path(fits, "containers", container_key("one"))
        directory.mkdir()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(directory / "governor.sock"))


def test_a_governor_without_files_refuses_a_reload(
    tmp_path: Path, build_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from tests.unit.test_governor_protocol import GovernorThread

    governor = GovernorThread(tmp_path, build_dir / "libcontrol")
    try:
        began = time.monotonic()
        assert cli.main(["reload", "--runtime-dir", str(tmp_path)]) == 65
        assert capfd.readouterr().err == (
            "tidegate: this governor has no configuration files to reload; start"
            " tidegate-governor, which reads them\n"
        )
        assert time.monotonic() - began < 10
    finally:
        governor.close()
