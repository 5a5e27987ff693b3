"""Test the findings of `tidegate doctor` about Tidegate's own files, and about users who could
change them.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from governor.doctor.node import ExaminedNode
from governor.doctor.programs import not_trusted
from tests.unit.doctor_nodes import Host


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(tmp_path / "root")
    host.program("usr/bin/python3", "3.11.2\n")
    host.put("usr/bin/tidegate-hook", "#!/usr/bin/python3 -ISE\n", 0o755)
    host.put("usr/bin/tidegate-runtime", "#!/usr/bin/python3 -ISE\n", 0o755)
    host.program("usr/sbin/runc")
    return host


RIGHT = ["ok: the hook /usr/bin/tidegate-hook", "ok: the wrapper runtime /usr/bin/tidegate-runtime"]
EVERYBODY = "wrong: the hook /usr/bin/tidegate-hook runs as root, but "


def test_programs_that_only_root_can_change_are_ok(host: Host) -> None:
    assert host.check("files.programs") == RIGHT


def test_programs_that_are_missing_are_wrong(host: Host) -> None:
    host.remove("usr/bin/tidegate-hook")
    host.remove("usr/bin/tidegate-runtime")
    assert host.check("files.programs") == [
        "wrong: the hook /usr/bin/tidegate-hook is missing -> install the package tidegate",
        "wrong: the wrapper runtime /usr/bin/tidegate-runtime is missing -> install the package tidegate",
    ]


@pytest.mark.parametrize(
    ("path", "mode", "said"),
    [
        (
            "usr/bin/tidegate-hook",
            0o757,
            f"{EVERYBODY}/usr/bin/tidegate-hook has mode 0757: all users may write to it",
        ),
        ("usr/bin", 0o777, f"{EVERYBODY}/usr/bin has mode 0777: all users may write to it"),
        ("usr", 0o777, f"{EVERYBODY}/usr has mode 0777: all users may write to it"),
        (".", 0o777, f"{EVERYBODY}/ has mode 0777: all users may write to it"),
        (
            "usr/bin/tidegate-hook",
            0o644,
            "wrong: the hook /usr/bin/tidegate-hook has mode 0644: it cannot be run",
        ),
        (
            "usr/bin/tidegate-hook",
            0o744,
            "wrong: the hook /usr/bin/tidegate-hook has mode 0744: it cannot be run",
        ),
    ],
)
def test_programs_that_others_could_change_or_that_cannot_run_are_wrong(
    host: Host, path: str, mode: int, said: str
) -> None:
    (host.root / path).chmod(mode)
    assert host.check("files.programs")[0].startswith(said)


def test_files_in_a_sticky_directory_cannot_be_replaced(host: Host) -> None:
    (host.root / "usr").chmod(0o1777)
    assert host.check("files.programs") == RIGHT


def test_the_target_of_a_link_is_checked_with_its_directories(host: Host) -> None:
    host.put("opt/tidegate/tidegate-hook", "#!/usr/bin/python3 -ISE\n", 0o755)
    host.remove("usr/bin/tidegate-hook")
    (host.root / "usr/bin/tidegate-hook").symlink_to("/opt/tidegate/tidegate-hook")
    assert host.check("files.programs") == RIGHT
    (host.root / "opt").chmod(0o777)
    assert host.check("files.programs")[0].startswith(f"{EVERYBODY}/opt has mode 0777")


def test_every_link_of_a_chain_is_checked(host: Host) -> None:
    host.put("opt/tidegate-hook", "#!/usr/bin/python3 -ISE\n", 0o755)
    host.remove("usr/bin/tidegate-hook")
    (host.root / "usr/bin/tidegate-hook").symlink_to("../../srv/alternatives/hook")
    (host.root / "srv/alternatives").mkdir(parents=True, mode=0o755)
    (host.root / "srv/alternatives/hook").symlink_to("/opt/tidegate-hook")
    assert host.check("files.programs") == RIGHT
    (host.root / "srv/alternatives").chmod(0o777)
    assert host.check("files.programs")[0].startswith(f"{EVERYBODY}/srv/alternatives has mode 0777")


def test_the_interpreter_of_the_shebang_is_checked_for_its_modules(host: Host) -> None:
    assert host.check("files.python") == [
        "ok: /usr/bin/python3 is Python 3.11.2, and has the modules that the hook needs"
    ]
    [command] = host.ran
    # The environment is ignored, and nothing is written, not even a bytecode cache.
    assert command[:3] == ("/usr/bin/python3", "-ISEB", "-c")
    assert command[-1] == f"{host.root}/usr"


def test_an_interpreter_that_does_not_run_the_hook_is_wrong(host: Host) -> None:
    host.commands["python3"] = "3.9.2\n"
    assert host.check("files.python") == [
        "wrong: /usr/bin/python3 is Python 3.9.2, but the hook needs 3.11 -> install a newer python3"
    ]
    del host.commands["python3"]
    assert host.check("files.python")[0].startswith("wrong: /usr/bin/python3 cannot run the hook: ")
    host.remove("usr/bin/python3")
    assert host.check("files.python")[0].startswith(
        "wrong: /usr/bin/python3, which runs /usr/bin/tidegate-hook, is missing"
    )
    host.put("usr/bin/tidegate-hook", "import os\n", 0o755)
    assert host.check("files.python")[0].startswith(
        "wrong: /usr/bin/tidegate-hook does not begin with #!"
    )
    host.remove("usr/bin/tidegate-hook")
    assert host.check("files.python")[0].startswith("unseen: /usr/bin/tidegate-hook is missing")


@pytest.mark.parametrize("path", ["usr/bin/python3", "usr/bin/tidegate-hook"])
def test_a_program_that_others_could_have_changed_is_not_run(host: Host, path: str) -> None:
    (host.root / path).chmod(0o777)
    [found] = host.check("files.python")
    assert found.startswith(("wrong: ", "unseen: "))
    assert not host.ran


def test_the_runtime_that_the_wrapper_runs_is_reported(host: Host) -> None:
    assert host.check("files.runtime") == ["ok: the wrapper's runtime /usr/sbin/runc"]
    host.program("usr/bin/runc")
    assert host.check("files.runtime") == ["ok: the wrapper's runtime /usr/bin/runc"]
    host.put("etc/tidegate/runtime", "# by hand\nruntime /usr/bin/crun\n")
    assert host.check("files.runtime")[0].startswith(
        "wrong: the runtime in /etc/tidegate/runtime, /usr/bin/crun is missing"
        " -> install it, or correct `runtime` in /etc/tidegate/runtime"
    )
    host.program("usr/bin/crun")
    assert host.check("files.runtime") == [
        "ok: the runtime in /etc/tidegate/runtime, /usr/bin/crun"
    ]


@pytest.mark.parametrize(
    "text", ["/usr/bin/crun", "runtime", "runtme /usr/bin/crun", "environment maybe"]
)
def test_settings_that_the_wrapper_would_not_accept_are_wrong(host: Host, text: str) -> None:
    host.put("etc/tidegate/runtime", text)
    assert host.check("files.runtime")[0].startswith("wrong: /etc/tidegate/runtime:")


def test_a_configured_hook_of_the_wrapper_is_examined(host: Host) -> None:
    host.put("etc/tidegate/runtime", "hook /opt/tidegate-hook\n")
    assert host.check("files.runtime")[0].startswith(
        "wrong: the hook in /etc/tidegate/runtime, /opt/tidegate-hook is missing"
        " -> install it, or correct `hook` in /etc/tidegate/runtime"
    )
    host.program("opt/tidegate-hook")
    assert (
        host.check("files.runtime")[0]
        == "ok: the hook in /etc/tidegate/runtime, /opt/tidegate-hook"
    )


def test_no_runtime_at_all_is_a_warning(host: Host) -> None:
    host.remove("usr/sbin/runc")
    assert host.check("files.runtime")[0].startswith("warning: none of /usr/bin/runc, ")


def test_a_runtime_for_a_state_directory_is_examined(host: Host) -> None:
    host.put("etc/tidegate/runtime", "runtime-for /run/crun /usr/libexec/crio/crun\n")
    [first, second] = host.check("files.runtime")
    assert first == (
        "wrong: the runtime in /etc/tidegate/runtime for /run/crun, /usr/libexec/crio/crun is missing"
        " -> install it, or correct `runtime-for /run/crun` in /etc/tidegate/runtime"
    )
    assert second == "ok: the wrapper's runtime /usr/sbin/runc"
    host.program("usr/libexec/crio/crun")
    host.remove("usr/sbin/runc")
    host.program("usr/libexec/crio/runc")
    assert [line.partition(":")[0] for line in host.check("files.runtime")] == ["ok", "ok"]


def test_control_libraries_are_required_for_a_refresh(host: Host) -> None:
    assert host.check("files.control")[0].startswith(
        "wrong: /usr/lib/tidegate/x86_64-linux-gnu has no libcuda.so.1 and no "
    )
    host.put_driver()
    host.put_mirror()
    assert host.check("files.control") == [
        "ok: the control libraries are in /usr/lib/tidegate/x86_64-linux-gnu"
    ]
    host.remove("usr/lib/tidegate/x86_64-linux-gnu/libnvidia-ml.so.1")
    assert host.check("files.control")[0].startswith("warning: ")  # a mirror has copies


def test_a_configuration_that_others_could_change_is_wrong(host: Host) -> None:
    host.put("etc/tidegate/config.yaml")
    assert host.check("files.owners") == ["ok: only root can change configuration and state"]
    drop_in = host.put("etc/tidegate/config.d/x.yaml")
    drop_in.chmod(0o666)
    assert host.check("files.owners")[0].startswith(
        "wrong: root relies on /etc/tidegate/config.d/x.yaml, "
    )
    drop_in.chmod(0o644)
    drop_in.parent.chmod(0o777)
    assert "but /etc/tidegate/config.d has mode 0777" in host.check("files.owners")[0]
    drop_in.parent.chmod(0o755)
    (host.root / "etc/tidegate/config.yaml").chmod(0o666)
    assert host.check("files.owners")[0].startswith(
        "wrong: root relies on /etc/tidegate/config.yaml, but /etc/tidegate/config.yaml has mode 0666"
    )


def test_a_writable_mode_on_a_read_only_mount_is_ok(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory of a ConfigMap in a pod, for example, has mode 0777. The mount is faked."""
    host = Host(tmp_path / "root")
    host.put("etc/tidegate/config.yaml", "")
    (host.root / "etc/tidegate").chmod(0o777)
    node = ExaminedNode(str(host.root))
    assert "0777: all users may write to it" in str(not_trusted(node, "/etc/tidegate/config.yaml"))
    read_only = SimpleNamespace(f_flag=os.ST_RDONLY)
    monkeypatch.setattr("governor.doctor.programs.os.statvfs", lambda _path: read_only)
    assert not_trusted(node, "/etc/tidegate/config.yaml") is None
