"""`tidegate doctor` and `tidegate events` on a running node: a real governor, a real mirror, real device nodes."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.machine import Simulated
from bench.node import BenchNode
from governor import cli
from governor.doctor.driver import CONTROL_MINOR, MAJOR
from governor.doctor.programs import HOOK
from simgpu import simgpu
from tests.conftest import lack
from tests.container.nodes import WAIT_S, clear, show_output, wait_for
from tests.unit.doctor_nodes import Host

ROOT = Path(__file__).parents[2]
NOBODY = 65534


@pytest.fixture(scope="module")
def node(
    tmp_path_factory: pytest.TempPathFactory, build_dir: Path, require: Callable[..., None]
) -> Iterator[BenchNode]:
    require("gcc", "runc")
    with BenchNode(Simulated(tmp_path_factory.mktemp("doctor"), build_dir)) as made:
        yield made
        clear(made)


def look(node: BenchNode, *options: str) -> dict[str, list[dict[str, Any]]]:
    """Return doctor's findings on this machine, by the id of the check."""
    found: dict[str, list[dict[str, Any]]] = {}
    command = ["-m", "governor.cli", "doctor", "--json", "--config", str(node.work / "config.yaml")]
    done = subprocess.run(
        [sys.executable, *command, *options],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    document = json.loads(done.stdout)
    assert done.returncode == document["status"]
    for one in document["findings"]:
        found.setdefault(one["id"], []).append(one)
    return found


def states(found: dict[str, list[dict[str, Any]]], check: str) -> list[str]:
    return [one["state"] for one in found[check]]


def test_a_running_node_has_no_faults_in_the_parts_that_are_set_up(node: BenchNode) -> None:
    found = look(node)
    for check in (
        "kernel.calls",
        "cgroup.freezer",
        "driver.module",
        "driver.mps",
        "mirror.in-force",
        "mirror.content",
        "governor.answers",
        "governor.gpus",
        "governor.membership",
        "governor.database",
        "files.python",
        "files.runtime",
        "runc.version",
    ):
        assert set(states(found, check)) == {"ok"}, found[check]
    assert "simulated" in found["mirror.in-force"][0]["found"]
    for check in ("driver.libraries", "driver.nodes", "driver.mig", "driver.compute-mode"):
        assert states(found, check) == ["note"], found[check]  # a simulated GPU has none of these
    if not Path(HOOK).exists():
        assert states(found, "files.programs")[0] == "warning"
        assert (
            f"this checkout has {ROOT}/oci_hook/tidegate-hook"
            in found["files.programs"][0]["found"]
        )
    # Checks that depend on the machine have a finding, and no check fails.
    assert not any("the check failed" in one["found"] for each in found.values() for one in each)


def test_changes_of_a_node_are_reported(node: BenchNode) -> None:
    assert isinstance(node.machine, Simulated)
    gpu = node.machine.directory / "gpu0"
    simgpu.set_lost(gpu, lost=True)
    try:
        wait_for(lambda: states(look(node), "governor.gpus") == ["warning", "wrong"], "the loss")
    finally:
        simgpu.set_lost(gpu, lost=False)
    wait_for(lambda: states(look(node), "governor.gpus") == ["ok"], "the return")
    aside = node.work / "state/state.db.damaged-1"
    aside.touch()
    assert states(look(node), "governor.database") == ["warning"]
    aside.unlink()
    current = node.driver_dir / "current"
    generation = current.readlink()
    current.unlink()
    try:
        found = look(node)
        assert states(found, "mirror.in-force") == ["wrong"]
        assert "refresh" in found["mirror.in-force"][0]["remedy"]
    finally:
        current.symlink_to(generation)
    node.stop_governor()
    try:
        found = look(node)
        assert states(found, "governor.answers") == ["wrong"]
        assert states(found, "governor.gpus") == ["note"]
    finally:
        node.start_governor()
    assert states(look(node), "governor.answers") == ["ok"]


def test_without_root_doctor_reports_what_it_cannot_see(node: BenchNode) -> None:
    # A copy of the configuration, in a directory that an unprivileged user may enter.
    config = Path("/run") / f"tidegate-doctor-{os.getpid()}.yaml"
    config.write_text((node.work / "config.yaml").read_text())
    config.chmod(0o644)
    command = ["-m", "governor.cli", "doctor", "--json", "--config", str(config)]
    # The checkout may be in a directory that only root may enter, so it is mounted on /mnt as well.
    enter = f'mount --bind "$0" /mnt && cd /mnt && exec setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups "$@"'
    python = Path(sys.executable)
    if python.is_relative_to(ROOT):
        python = "/mnt" / python.relative_to(ROOT)
    try:
        done = subprocess.run(
            ["unshare", "-m", "--propagation", "private", "sh", "-c", enter, ROOT, python, *command],
            check=False, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    finally:
        config.unlink()
    assert done.stderr == ""
    found = {one["id"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["kernel.calls"]["state"] == "ok"
    for check in ("mirror.in-force", "mirror.content", "governor.answers"):
        assert found[check]["state"] == "unseen", found[check]
        assert found[check]["remedy"] == "run tidegate doctor as root"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host with a driver and the device nodes of its one GPU, as the driver makes them."""
    host = Host(tmp_path / "root")
    host.put_driver()
    (host.root / "dev").mkdir(mode=0o755)
    for name, major, minor in (
        ("nvidiactl", MAJOR, CONTROL_MINOR),
        ("nvidia0", MAJOR, 0),
        ("nvidia-uvm", 511, 0),
    ):
        with contextlib.suppress(FileExistsError):
            os.mknod(host.root / "dev" / name, stat.S_IFCHR, os.makedev(major, minor))
        (host.root / "dev" / name).chmod(0o666)
    return host


def test_device_nodes_as_the_driver_makes_them_are_right(host: Host) -> None:
    assert host.check("driver.nodes") == ["ok: /dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0"]


def test_device_nodes_with_other_numbers_are_wrong(host: Host) -> None:
    (host.root / "dev/nvidia0").unlink()
    os.mknod(host.root / "dev/nvidia0", 0o666 | stat.S_IFCHR, os.makedev(195, 7))
    assert host.check("driver.nodes")[0] == (
        "wrong: /dev/nvidia0 is 195:7; it must be 195:0 -> rm /dev/nvidia0 && nvidia-modprobe -c 0"
    )
    # The number of nvidia-uvm may change at a reboot.
    host.put("proc/devices", "Character devices:\n195 nvidia\n508 nvidia-uvm\n")
    assert "/dev/nvidia-uvm is 511:0; it must be 508:0" in host.check("driver.nodes")[0]
    host.put("proc/devices", "Character devices:\n195 nvidia\n")
    assert host.check("driver.nodes")[0].endswith(
        "its module nvidia-uvm is not loaded -> modprobe nvidia-uvm"
    )


def test_device_nodes_that_users_may_not_open_cause_a_warning(host: Host) -> None:
    (host.root / "dev/nvidiactl").chmod(0o660)
    assert host.check("driver.nodes")[0].startswith("warning: /dev/nvidiactl has mode 660: ")


def test_programs_owned_by_another_user_are_wrong(tmp_path: Path) -> None:
    host = Host(tmp_path / "root")
    host.put("usr/bin/tidegate-hook", "#!/usr/bin/python3 -ISE\n", 0o755)
    host.put("usr/bin/tidegate-runtime", "#!/usr/bin/python3 -ISE\n", 0o755)
    os.chown(host.root / "usr/bin/tidegate-hook", NOBODY, NOBODY)
    os.chown(host.root / "usr", NOBODY, 0)
    assert [line.partition(" ->")[0] for line in host.check("files.programs")] == [
        "wrong: the hook /usr/bin/tidegate-hook runs as root, but /usr belongs to user 65534",
        "wrong: the wrapper runtime /usr/bin/tidegate-runtime runs as root, but /usr belongs to user 65534",
    ]
    os.chown(host.root / "usr", 0, 0)
    assert [line.partition(" ->")[0] for line in host.check("files.programs")] == [
        "wrong: the hook /usr/bin/tidegate-hook runs as root, but /usr/bin/tidegate-hook belongs to user 65534",
        "ok: the wrapper runtime /usr/bin/tidegate-runtime",
    ]


def test_events_shows_the_line_of_a_failed_start(
    node: BenchNode, capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(node.work / "governor.log")
    refused = node.start("too-much", ["/bin/true"], {"memory": "900Gi", "compute": "10"})
    assert node.wait(refused, WAIT_S) != 0
    assert "tidegate: " in show_output(refused)
    assert cli.main(["events", "--log", log, "--container", refused.identifier]) == 0
    [line] = capsys.readouterr().out.splitlines()
    # The event contains the message that the user saw, word for word.
    assert f"governor request-refused {refused.identifier}: refused: " in line
    shown = next(x for x in show_output(refused).splitlines() if "tidegate: " in x)
    assert line.partition("refused: ")[2].partition(";")[0] in shown


JOURNAL = r"""
set -e
mount -t tmpfs none /run
mkdir -p /run/log/journal
mount -t tmpfs none /var/log
/lib/systemd/systemd-journald &
journald=$!
trap 'kill $journald; wait $journald || true' EXIT
for _ in $(seq 100); do [ -S /run/systemd/journal/dev-log ] && break; sleep 0.1; done
"$1" - <<'END'
from oci_hook import log
log.SYSLOG = "/run/systemd/journal/dev-log"
event = log.RunEvent("createRuntime", None)
event.fields["id"] = "4f3a"
event.emit("failed", code="image", message="no glibc", hint="take another", plan=["x" * 6000])
event = log.RunEvent("createRuntime", None)
event.fields["id"] = "77aa"
event.emit("prepared")
END
journalctl --sync
for options in "" "--container 4f" "--container 77" "--all --since=-1h"; do
    echo "asked: $options"
    "$1" -m governor.cli events $options
done
"""


def test_events_finds_what_the_hook_wrote_to_a_real_journal() -> None:
    if not Path("/lib/systemd/systemd-journald").exists() or not Path("/etc/machine-id").exists():
        lack("needs systemd-journald, and a machine-id")
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "bash", "-c", JOURNAL, "bash", sys.executable],
        check=False, cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # The lines without their times, which the hook has set.
    lines = [line.partition("Z ")[2].strip() or line for line in done.stdout.splitlines()]
    failed = "hook     failed 4f3a: image: no glibc; take another"
    assert lines == [
        "asked: ", failed,
        "asked: --container 4f", failed,
        "asked: --container 77",
        "asked: --all --since=-1h", failed, "hook     prepared 77aa",
    ]  # fmt: skip
    assert "no failures for 77 in the journal" in done.stderr
