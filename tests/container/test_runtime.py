"""The wrapper runtime and Podman's precreate: config.json is edited, and then the real runtime
runs.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.container.bundles import GPU, ContainerResult, DiskBundle, Runtime, base_config
from tests.container.conftest import ForkServer, HookNode

OURS = {"tidegate.gpu/memory": "8Gi", "tidegate.gpu/compute": "50"}
NODES = (("nvidiactl", 195, 255), ("nvidia-uvm", 507, 0), ("nvidia0", 195, 0), ("nvidia1", 195, 1))


class WrappedRuntime(Runtime):
    """runc or crun behind the wrapper."""

    settings: Path
    program: Path

    def command(self, *arguments: str) -> list[str]:
        """Return the command line for a command of the runtime."""
        command = super().command(*arguments)
        at = command.index(self.name)
        return [
            *command[:at],
            str(self.program),
            "--tidegate-config",
            str(self.settings),
            *command[at + 1 :],
        ]


def path_of(name: str) -> str:
    """Return the path of a runtime."""
    return next(p for p in (f"/usr/sbin/{name}", f"/usr/bin/{name}") if os.access(p, os.X_OK))


@pytest.fixture(params=["script", "front"])
def node(node: HookNode, fronts: Path, request: pytest.FixtureRequest) -> Iterator[HookNode]:
    """A node with the Python scripts, or with the C programs and a fork server."""
    if request.param == "script":
        yield node
        return
    node.program = fronts / "tidegate-hook"
    server = ForkServer(node.base / "run")
    yield node
    server.stop()


@pytest.fixture
def wrapper(node: HookNode) -> str:
    """The path of the wrapper runtime."""
    return str(node.program.with_name("tidegate-runtime"))


@pytest.fixture
def dev(node: HookNode) -> Path:
    """Device nodes as on a host with two GPUs; no test opens them."""
    directory = node.base / "dev"
    directory.mkdir()
    for name, major, minor in NODES:
        os.mknod(directory / name, stat.S_IFCHR | 0o666, os.makedev(major, minor))
    node.governor.minor = 0
    return directory


@pytest.fixture
def wrapped(node: HookNode, dev: Path, runtime: Runtime) -> WrappedRuntime:
    made = WrappedRuntime(runtime.name, runtime.state)
    made.program = node.program.with_name("tidegate-runtime")
    made.settings = node.base / "runtime.conf"
    write_settings(made.settings, node, dev, path_of(runtime.name))
    return made


def write_settings(path: Path, node: HookNode, dev: Path, real: str, *more: str) -> None:
    """Write the settings that are in /etc/tidegate/runtime on a node."""
    arguments = " ".join((*node.hook[1:], "--dev-dir", str(dev)))
    lines = [
        "# the node's settings",
        f"runtime {real}",
        f"hook {node.hook[0]}",
        f"hook-arguments {arguments}",
        f"runtime-dir {node.base / 'run'}",
        f"dev-dir {dev}",
        f"log {node.base / 'runtime.log'}",
        *more,
    ]
    path.write_text("\n".join(lines) + "\n")


def plain(node: HookNode, command: str, annotations: dict[str, str] | None = None) -> DiskBundle:
    """Return a bundle as an engine makes it, without an entry for the hook."""
    bundle = node.bundle(command)
    bundle.config = base_config(command, annotations=OURS if annotations is None else annotations)
    bundle.config["process"]["env"] += ["NVIDIA_VISIBLE_DEVICES=all"]
    return bundle


def written(bundle: DiskBundle) -> dict[str, Any]:
    """Return the current config.json."""
    config: dict[str, Any] = json.loads((bundle.path / "config.json").read_text())
    return config


def test_a_container_gets_its_gpu_s_nodes_and_the_hook(
    node: HookNode, wrapped: WrappedRuntime
) -> None:
    bundle = plain(node, "ls /dev; ls -A /run/tidegate; echo $NVIDIA_VISIBLE_DEVICES")
    bundle.config["x-unknown"] = {"kept": [1, 2.5, "ü"]}
    bundle.config["linux"]["devices"] = [
        {"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1},
        {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229},
    ]
    ran = wrapped.run(bundle)
    assert (ran.status, ran.stderr) == (0, "")
    words = ran.stdout.split()
    assert {"nvidia0", "nvidiactl", "nvidia-uvm", "fuse", "grant", "void"} <= set(words)
    assert "nvidia1" not in words
    node.governor.wait_idle()
    reserve, admit, confirm = node.governor.requests
    assert [reserve["op"], admit["op"], confirm["op"]] == ["reserve", "admit", "confirm"]
    assert admit["reservation"] == "token1"
    assert (admit["annotations"], admit["nodes"], admit["exact"]) == (OURS, [0], False)
    config = written(bundle)
    assert config["x-unknown"] == {"kept": [1, 2.5, "ü"]}
    rules = [(r["major"], r["minor"], r["allow"]) for r in config["linux"]["resources"]["devices"]]
    assert sorted(rules) == [(195, 0, True), (195, 255, True), (507, 0, True)]
    assert all(entry["env"] for stage in config["hooks"].values() for entry in stage)


def test_a_bundle_that_was_edited_is_edited_again(node: HookNode, wrapped: WrappedRuntime) -> None:
    """This is a restart: the recorded reservation is replaced, and nothing is added twice."""
    bundle = plain(node, "true")
    assert wrapped.run(bundle).status == 0
    first = written(bundle)
    bundle.config = first
    assert wrapped.run(bundle).status == 0
    second = written(bundle)
    assert second["annotations"].pop("tidegate.gpu/reservation") == "token4"
    assert first["annotations"].pop("tidegate.gpu/reservation") == "token1"
    assert second == first
    assert node.governor.requests[3]["replaces"] == "token1"


def test_a_container_that_asks_for_nothing_is_untouched(
    node: HookNode, wrapped: WrappedRuntime
) -> None:
    bundle = plain(node, "ls /dev; echo $NVIDIA_VISIBLE_DEVICES", annotations={"other/name": "x"})
    ran = wrapped.run(bundle)
    assert ran.status == 0, ran.stderr
    assert "nvidia" not in ran.stdout
    assert "all" in ran.stdout.split()
    assert written(bundle) == bundle.config
    assert node.governor.requests == []


@pytest.mark.parametrize(
    ("annotations", "line"),
    [
        ({"tidegate.gpu/memry": "8Gi"}, "annotation tidegate.gpu/memry is unknown"),
        ({"tidegate.gpu/memory": "8 GB"}, "annotation tidegate.gpu/memory is '8 GB'"),
    ],
)
def test_an_error_is_reported_where_the_engine_looks(
    node: HookNode, wrapped: WrappedRuntime, annotations: dict[str, str], line: str
) -> None:
    bundle = plain(node, "true", annotations=annotations)
    bundle.write()
    before = (bundle.path / "config.json").read_bytes()
    log = node.base / "log.json"
    done = subprocess.run(
        wrapped.command(
            "--log", str(log), "--log-format", "json", "run", "-b", str(bundle.path), "wrong"
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 64
    assert line in done.stderr
    assert line in json.loads(log.read_text().splitlines()[-1])["msg"]
    assert (bundle.path / "config.json").read_bytes() == before
    assert node.governor.requests == []
    event = json.loads((node.base / "runtime.log").read_text())
    assert (event["stage"], event["outcome"], event["id"]) == ("runtime", "failed", "wrong")


def test_a_refusal_starts_nothing(node: HookNode, wrapped: WrappedRuntime) -> None:
    node.governor.mode = "refuse"
    bundle = plain(node, "touch /started")
    ran = wrapped.run(bundle)
    assert ran.status == 77
    assert "8Gi asked, 2Gi free" in ran.stderr
    assert not (bundle.rootfs / "started").exists()
    assert written(bundle) == bundle.config


def test_a_missing_device_node_is_named(node: HookNode, wrapped: WrappedRuntime, dev: Path) -> None:
    (dev / "nvidia-uvm").unlink()
    ran = wrapped.run(plain(node, "true"))
    assert ran.status == 73
    assert "nvidia-uvm: No such file or directory" in ran.stderr
    assert "nvidia-modprobe" in ran.stderr


def test_the_environment_counts_only_if_the_node_allows_it(
    node: HookNode, wrapped: WrappedRuntime, dev: Path
) -> None:
    bundle = plain(node, "ls -A /run", annotations={})
    bundle.config["process"]["env"] += ["TIDEGATE_MEMORY=8Gi", "TIDEGATE_COMPUTE=50"]
    assert "tidegate" not in wrapped.run(bundle).stdout
    write_settings(wrapped.settings, node, dev, path_of(wrapped.name), "environment allow")
    ran = wrapped.run(bundle)
    assert "tidegate" in ran.stdout, ran.stderr
    assert node.governor.requests[0]["annotations"] == OURS


@pytest.mark.parametrize(
    ("variables", "annotations", "line"),
    [
        (["TIDEGATE_MEMORY=8GB"], {}, "tidegate: variable TIDEGATE_MEMORY is '8GB', but must be"),
        (
            ["TIDEGATE_COMPUTE_LIMIT=20"],
            {"tidegate.gpu/compute": "30", "tidegate.gpu/memory": "8Gi"},
            "tidegate: variable TIDEGATE_COMPUTE_LIMIT is 20, below tidegate.gpu/compute, which is 30;",
        ),
        (
            ["TIDEGATE_MEMORY=8Gi", "TIDEGATE_CLASS=fast"],
            {},
            "tidegate: variable TIDEGATE_CLASS is 'fast', but must be",
        ),
    ],
)  # fmt: skip
def test_an_error_of_the_environment_names_the_variable(
    node: HookNode,
    wrapped: WrappedRuntime,
    dev: Path,
    *,
    variables: list[str],
    annotations: dict[str, str],
    line: str,
) -> None:
    bundle = plain(node, "true", annotations=annotations)
    bundle.config["process"]["env"] += variables
    write_settings(wrapped.settings, node, dev, path_of(wrapped.name), "environment allow")
    ran = wrapped.run(bundle)
    assert ran.status == 64
    assert line in ran.stderr


def test_nvidia_s_own_injection_is_refused(node: HookNode, wrapped: WrappedRuntime) -> None:
    """Both injections would provide a driver, and chance would decide which one is found."""
    bundle = plain(node, "true")
    bundle.config["hooks"] = {"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook"}]}
    ran = wrapped.run(bundle)
    assert ran.status == 66
    assert "nvidia-container-runtime-hook" in ran.stderr


def test_other_commands_are_passed_to_the_real_runtime(
    node: HookNode, wrapped: WrappedRuntime
) -> None:
    done = subprocess.run(wrapped.command("--version"), capture_output=True, text=True, check=True)
    command = [wrapped.name, "--root", str(wrapped.state), "--version"]
    real = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == real.stdout
    assert node.governor.requests == []


def precreate(node: HookNode, dev: Path, data: bytes) -> ContainerResult:
    """Run the stage precreate as Podman does."""
    done = subprocess.run(
        [*node.hook, "--dev-dir", str(dev), "precreate"],
        input=data,
        capture_output=True,
        check=False,
    )
    return ContainerResult(done.returncode, done.stdout.decode(), done.stderr.decode())


def test_precreate_edits_its_standard_input(node: HookNode, dev: Path, runc: Runtime) -> None:
    bundle = plain(node, "ls /dev; ls -A /run/tidegate")
    answer = precreate(node, dev, json.dumps(bundle.config).encode())
    assert (answer.status, answer.stderr) == (0, "")
    bundle.config = json.loads(answer.stdout)
    ran = runc.run(bundle)
    assert {"nvidia0", "nvidiactl", "grant"} <= set(ran.stdout.split()), ran.stderr
    assert [r["op"] for r in node.governor.requests[:3]] == ["reserve", "admit", "confirm"]


def test_precreate_returns_a_config_without_a_request_unchanged(node: HookNode, dev: Path) -> None:
    data = b'{"annotations": {"a": "b"},\n "process": {}}\n'
    answer = precreate(node, dev, data)
    assert (answer.status, answer.stdout) == (0, data.decode())
    assert node.governor.requests == []


def test_the_hook_reports_what_precreate_refuses(node: HookNode, dev: Path, runc: Runtime) -> None:
    """If precreate fails, Podman shows only its status."""
    bundle = plain(node, "true", annotations={"tidegate.gpu/x": "y"})
    answer = precreate(node, dev, json.dumps(bundle.config).encode())
    assert answer.status == 0
    bundle.config = json.loads(answer.stdout)
    ran = runc.run(bundle)
    assert ran.status != 0
    assert "annotation tidegate.gpu/x is unknown" in ran.stderr
    assert node.governor.requests == []


def test_precreate_without_a_config_fails_with_one_line(node: HookNode, dev: Path) -> None:
    answer = precreate(node, dev, b'{"annotations": {"tidegate.gpu/x"')
    assert (answer.status, answer.stdout) == (66, "")
    assert answer.stderr.startswith("tidegate: config.json on stdin is not JSON")


def test_a_granted_gpu_without_its_node_is_refused(
    node: HookNode, dev: Path, runc: Runtime
) -> None:
    """config.json was not edited: programs would find no GPU and print an obscure message."""
    assert dev
    bundle = node.bundle("true")
    ran = runc.run(bundle)
    assert ran.status != 0
    assert "lacks the device node of a GPU that it was granted: /dev/nvidia0" in ran.stderr
    assert GPU not in node.governor.admitted


def test_an_annotation_cannot_skip_the_edits(node: HookNode, wrapped: WrappedRuntime) -> None:
    bundle = plain(node, "ls -A /run/tidegate", OURS | {"tidegate.gpu/reservation": "guess"})
    ran = wrapped.run(bundle)
    assert "grant" in ran.stdout, ran.stderr
    assert node.governor.requests[0]["replaces"] == "guess"
    assert node.governor.requests[1]["reservation"] == "token1"


def test_a_wrong_configuration_is_reported(node: HookNode, wrapped: WrappedRuntime) -> None:
    wrapped.settings.write_text("runtim /usr/bin/runc\n")
    ran = wrapped.run(plain(node, "true"))
    assert ran.status == 78
    assert (
        f"{wrapped.settings}:1: invalid line 'runtim /usr/bin/runc'; the settings are" in ran.stderr
    )


@pytest.mark.parametrize("settings", ["runtim /usr/bin/runc\n", "runtime /usr/bin/gone\n"])
def test_a_wrong_configuration_is_reported_where_engines_look(
    tmp_path: Path, wrapper: str, settings: str
) -> None:
    """containerd's shim shows the runtime's log, and nothing of its standard error."""
    file, log = tmp_path / "settings", tmp_path / "log.json"
    file.write_text(settings)
    (tmp_path / "config.json").write_text('{"ociVersion": "1.0.2"}')
    ran = subprocess.run(
        [
            *(wrapper, "--tidegate-config", str(file), "--root", "/run/none"),
            *("--log", str(log), "--log-format", "json", "create", "x"),
        ],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 78
    assert ran.stderr == f"{json.loads(log.read_text())['msg']}\n"


@pytest.mark.parametrize("wrong", [b"log\n", b"environment often\n", b"#\xff\n"])
def test_containers_can_be_ended_with_a_wrong_configuration(
    tmp_path: Path, wrapper: str, wrong: bytes
) -> None:
    file, runtime = tmp_path / "settings", tmp_path / "runtime"
    runtime.write_text('#!/bin/sh\necho "$@"\n')
    runtime.chmod(0o755)
    file.write_bytes(wrong + f"runtime {runtime}\nruntime-dir {tmp_path}\n".encode())
    for command in ("state", "kill", "delete", "list"):
        call = [wrapper, "--tidegate-config", str(file), command, "x"]
        ran = subprocess.run(call, capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{command} x\n", "")


def printing(path: Path, word: str) -> Path:
    """Make a program that takes the place of a runtime, and prints `word` and its arguments."""
    path.write_text(f'#!/bin/sh\necho {word} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("words", "who"),
    [
        (("--root", "/run/crun", "kill", "x"), "crun"),
        (("--root=/run/crun", "--log", "delete", "state", "x"), "crun"),
        (("--log", "/x", "--root=/run/crun", "list"), "crun"),
        (("--root", "/run/crun/below", "state", "x"), "other"),
        (("state", "--root", "/run/crun"), "other"),
        (("--root",), "other"),
        (("--version",), "other"),
        (("features",), "other"),
    ],
)
def test_a_state_directory_has_the_runtime_that_the_settings_name_for_it(
    tmp_path: Path, wrapper: str, words: tuple[str, ...], who: str
) -> None:
    file = tmp_path / "settings"
    crun, other = (printing(tmp_path / name, name) for name in ("crun", "other"))
    file.write_text(
        f"runtime {other}\nruntime-for /run/crun {crun}\nruntime-for /run/runc /usr/bin/gone\n"
    )
    command = [wrapper, "--tidegate-config", str(file), *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, f"{' '.join((who, *words))}\n"), ran.stderr


@pytest.mark.parametrize("line", ["runtime-for /run/crun", "runtime-for run/crun /usr/bin/crun"])
def test_a_state_directory_without_a_runtime_is_reported(
    tmp_path: Path, wrapper: str, line: str
) -> None:
    file, runtime = tmp_path / "settings", printing(tmp_path / "runtime", "it")
    file.write_text(f"runtime {runtime}\n{line}\n")
    call = [wrapper, "--tidegate-config", str(file), "--root", "/run/crun"]
    ran = subprocess.run([*call, "create", "x"], capture_output=True, text=True, check=False)
    said = f"{file}:2: invalid line '{line}'; write `runtime-for /state/directory /path/to/runtime`"
    assert (ran.returncode, ran.stderr) == (78, f"tidegate-runtime: {said}\n")
    ran = subprocess.run([*call, "kill", "x"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "it --root /run/crun kill x\n")


def test_a_wrong_configuration_is_in_the_nodes_log(tmp_path: Path, wrapper: str) -> None:
    file, log = tmp_path / "settings", tmp_path / "log"
    file.write_text(f"runtime /usr/bin/gone\nlog {log}\n")
    command = [wrapper, "--tidegate-config", str(file), "create", "-b", str(tmp_path), "one"]
    (tmp_path / "config.json").write_text("{}")
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 78, ran.stderr
    event = json.loads(log.read_text())
    assert (event["id"], event["outcome"], event["code"]) == ("one", "failed", "config")
    assert event["hint"] == f"write `runtime /path/to/runtime` to {file}"


def test_precreate_refuses_a_config_beyond_the_limit(node: HookNode, dev: Path) -> None:
    answer = precreate(node, dev, b'{"a": "' + b"x" * (5 << 20) + b'"}')
    assert (answer.status, answer.stdout) == (66, "")
    assert "config.json on stdin is larger than 4194304 bytes" in answer.stderr


def test_a_container_of_a_claim_is_left_as_the_engine_made_it(
    node: HookNode, wrapped: WrappedRuntime
) -> None:
    """CDI has added the device nodes and the hook, and the GPUs are already booked, so there is
    nothing to reserve.
    """
    bundle = plain(node, "ls -A /run/tidegate", {"tidegate.gpu/capabilities": "compute"})
    claim = [*node.hook, "--claim", "a-b", "--share"]
    entries = [
        {"path": node.hook[0], "args": [*claim, name, "createRuntime"], "env": ["LC_ALL=C"]}
        for name in ("gpu/0", "gpu/1")
    ]
    bundle.config["hooks"] = {"createRuntime": entries}
    bundle.config["linux"]["devices"] = [
        {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}
    ]
    bundle.write()
    before = written(bundle)
    ran = wrapped.run(bundle)
    assert (ran.status, ran.stderr) == (0, "")
    assert "grant" in ran.stdout.split()
    assert written(bundle) == before
    node.governor.wait_idle()
    admit, confirm = node.governor.requests
    assert [admit["op"], confirm["op"]] == ["admit", "confirm"]
    assert admit["claims"] == [{"uid": "a-b", "shares": ["gpu/0", "gpu/1"]}]
    assert [event["outcome"] for event in node.events()] == ["prepared", "prepared-already"]
