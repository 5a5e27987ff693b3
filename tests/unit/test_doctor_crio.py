"""Test the findings of `tidegate doctor` about CRI-O: its configuration, and Tidegate's handler."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.doctor_nodes import Host
from tests.unit.test_setup_crio import CONF_D, HOOKS_DIR, LIBEXEC, OLD, SETTINGS, handler, packages

RUNTIME = "/usr/bin/tidegate-runtime"
NOT_HERE = "note: CRI-O is not set up here: it has no configuration"
OURS = f"{CONF_D}/50-tidegate.conf"
RIGHT = OLD + f'runtime_root = "/run/crun"\nmonitor_path = "{LIBEXEC}/conmon"\n'
STARTS = "ok: CRI-O finds everything that /etc/crio/crio.conf and /etc/crio/crio.conf.d name"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A node with CRI-O's own packages, set up for Tidegate."""
    host = Host(tmp_path / "root")
    for name in ("conmon", "crun", "runc"):
        host.program(f"{LIBEXEC}/{name}")
    for name in ("tidegate-hook", "tidegate-runtime"):
        host.program(f"/usr/bin/{name}")
    host.put(f"{CONF_D}/10-crio.conf", packages())
    host.put(OURS, RIGHT)
    host.put(SETTINGS, f"runtime-for /run/crun {LIBEXEC}/crun\n")
    return host


def test_that_cri_o_is_not_set_up_is_only_noted(tmp_path: Path) -> None:
    host = Host(tmp_path / "root")
    assert host.check("crio.configuration") == host.check("crio.handler") == [NOT_HERE]


def test_the_files_that_setup_writes_are_ok(host: Host) -> None:
    assert host.check("crio.configuration") == [STARTS]
    assert host.check("crio.handler") == [
        f"ok: CRI-O's handler tidegate, {RUNTIME}",
        f"ok: CRI-O's handler tidegate: the wrapper executes {LIBEXEC}/crun",
    ]
    host.remove(OURS)
    assert host.check("crio.handler") == [
        "note: CRI-O has no handler tidegate -> tidegate setup crio"
    ]


def test_a_handler_whose_monitor_cannot_be_found_is_wrong(host: Host) -> None:
    host.put(OURS, OLD)
    assert host.check("crio.configuration") == [
        (
            f"wrong: CRI-O does not start: the handler tidegate ({OURS}) names no monitor_path, and conmon "
            "is not in any program directory -> tidegate setup crio"
        )
    ]
    host.program("usr/bin/conmon")
    assert host.check("crio.configuration") == [STARTS]
    host.put(OURS, RIGHT.replace(f"{LIBEXEC}/conmon", "/opt/conmon"))
    assert host.check("crio.configuration")[0].startswith(
        f"wrong: CRI-O does not start: the handler tidegate ({OURS}) has the monitor /opt/conmon, which is missing"
    )


def test_other_handlers_that_keep_cri_o_from_starting_have_their_own_remedy(
    host: Host,
) -> None:
    host.program("usr/bin/nvidia-container-runtime")
    host.put(
        f"{CONF_D}/99.conf", handler("nvidia", runtime_path="/usr/bin/nvidia-container-runtime")
    )
    [line] = host.check("crio.configuration")
    assert line.endswith("-> install conmon, or correct the monitor_path of the handler nvidia")
    host.put(f"{CONF_D}/99.conf", '[crio.runtime]\ndefault_runtime = "kata"\n')
    assert host.check("crio.configuration") == [
        (
            "wrong: CRI-O does not start: default_runtime is kata, but no file has a handler of that name"
            " -> write [crio.runtime.runtimes.kata], or correct default_runtime"
        )
    ]


def test_a_runtime_that_is_not_found_is_wrong(host: Host) -> None:
    host.remove(f"{LIBEXEC}/crun")
    assert host.check("crio.configuration")[0].startswith(
        "wrong: CRI-O does not start: the default handler crun (/etc/crio/crio.conf.d/10-crio.conf) runs "
        f"{LIBEXEC}/crun, which is missing"
    )
    assert host.check("crio.handler")[1] == (
        f"wrong: CRI-O's handler tidegate: the wrapper executes {LIBEXEC}/crun, which is missing"
        " -> install it, or correct /etc/tidegate/runtime"
    )
    host.remove(f"{LIBEXEC}/runc")
    host.remove(SETTINGS)
    assert host.check("crio.handler")[1] == (
        "wrong: CRI-O's handler tidegate: the wrapper has no runtime to execute -> tidegate setup crio"
    )


def test_a_runtime_other_than_the_default_handlers_is_a_warning(host: Host) -> None:
    host.remove(SETTINGS)
    assert host.check("crio.handler")[1].startswith("ok: ")  # the wrapper searches there by default
    host.program("usr/bin/runc")
    assert host.check("crio.handler")[1] == (
        "warning: CRI-O's handler tidegate: the wrapper executes /usr/bin/runc, but the default handler "
        f"crun executes {LIBEXEC}/crun -> tidegate setup crio"
    )
    host.put(SETTINGS, "runtime /usr/bin/runc\n")
    assert host.check("crio.handler")[1].endswith("-> correct /etc/tidegate/runtime")
    host.remove(f"{LIBEXEC}/crun")
    (host.root / f"{LIBEXEC}/crun".lstrip("/")).symlink_to("/usr/bin/runc")
    assert host.check("crio.handler")[1].startswith("ok: ")


def test_a_handler_that_is_not_the_wrapper_is_wrong(host: Host) -> None:
    host.put(OURS, RIGHT.replace(RUNTIME, "/opt/tidegate-gone"))
    assert host.check("crio.handler")[0].startswith(
        "wrong: CRI-O's handler tidegate, /opt/tidegate-gone is missing"
    )
    host.put(OURS, "[crio.runtime.runtimes.tidegate]\nruntime_type = 'vm'\n")
    assert host.check("crio.handler")[0].startswith(
        "wrong: CRI-O's handler tidegate specifies no program"
    )


@pytest.mark.parametrize(
    ("program", "remedy"),
    [
        ("/usr/bin/tidegate-hook", "rm /opt/hooks.d/x.json && tidegate setup podman"),
        ("/usr/bin/other", "remove /opt/hooks.d from CRI-O's hooks_dir, or move the file"),
    ],
)
def test_a_hook_of_a_stage_that_cri_o_does_not_know_is_wrong(
    host: Host, program: str, remedy: str
) -> None:
    """Only the directories that CRI-O's own files name are checked."""
    for path in ("/opt/hooks.d/x.json", f"{HOOKS_DIR}/x.json"):
        host.json(path, {"hook": {"path": program}, "stages": ["poststop", "precreate"]})
    host.put(f"{CONF_D}/60.conf", '[crio.runtime]\nhooks_dir = ["/opt/hooks.d/"]\n')
    assert host.check("crio.configuration") == [
        (
            "wrong: CRI-O does not start: /opt/hooks.d/x.json names the stage precreate, which CRI-O does not support"
            f" -> {remedy}"
        )
    ]
    host.json("/opt/hooks.d/x.json", {"hook": {"path": program}, "stages": ["createRuntime"]})
    assert host.check("crio.configuration") == [STARTS]
    host.put("/opt/hooks.d/x.json", "{")
    assert host.check("crio.configuration") == [STARTS]
    assert any("/opt/hooks.d/x.json is not JSON" in line for line in host.check("hooks.in-force"))


def test_files_that_cri_o_reads_are_checked_whatever_their_name(host: Host) -> None:
    host.put(f"{CONF_D}/60/README", OLD)
    assert (
        f"the handler tidegate ({CONF_D}/60/README) names no" in host.check("crio.configuration")[0]
    )
