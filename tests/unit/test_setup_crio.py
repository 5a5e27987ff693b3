"""`tidegate setup crio`: for each layout of CRI-O, a handler like its default one, or a refusal.

The files are those of CRI-O's own packages (`cri-o/packaging`) and of distributions, laid out below
a root. `governor/setup/crio_config.py` describes how CRI-O reads them. In tests/container, the real
program reads them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from governor.setup import crio
from governor.setup.crio_config import Configuration
from tests.unit.setup_tree import put, put_crio_programs, put_programs, setup, snapshot, text

PACKAGING = Path(__file__).resolve().parents[2] / "packaging"
CONF = "/etc/crio/crio.conf"
CONF_D = "/etc/crio/crio.conf.d"
DROP_IN = f"{CONF_D}/50-tidegate.conf"
SETTINGS = "/etc/tidegate/runtime"
HOOKS_DIR = "/usr/share/containers/oci/hooks.d"
LIBEXEC = "/usr/libexec/crio"
WRITTEN = "# Written by `tidegate setup crio`; `tidegate setup crio --undo` takes it out.\n"
# An older version wrote this drop-in. CRI-O from its own packages does not start with it.
OLD = '[crio.runtime.runtimes.tidegate]\nruntime_path = "/usr/bin/tidegate-runtime"\nruntime_type = "oci"\n'


def handler(name: str, **values: str) -> str:
    """Return the text of a handler in a configuration file."""
    lines = [f'{key} = "{value}"\n' for key, value in values.items()]
    return f"[crio.runtime.runtimes.{name}]\n{''.join(lines)}"


def packages(default: str = "crun") -> str:
    """Return 10-crio.conf with the handlers of CRI-O's packages; their programs are not in PATH."""
    return f'[crio.runtime]\ndefault_runtime = "{default}"\n' + "".join(
        handler(
            name,
            runtime_path=f"{LIBEXEC}/{name}",
            runtime_root=f"/run/{name}",
            monitor_path=f"{LIBEXEC}/conmon",
        )
        for name in ("crun", "runc")
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A node with CRI-O in /usr/bin, as in distributions."""
    put_programs(tmp_path)
    put_crio_programs(tmp_path)
    put(tmp_path, CONF, "[crio]\n")
    return tmp_path


@pytest.fixture
def packaged(tmp_path: Path) -> Path:
    """A node with CRI-O's own packages."""
    put_programs(tmp_path)
    put_crio_programs(tmp_path, LIBEXEC)
    put(tmp_path, f"{LIBEXEC}/runc", "#!/bin/sh\n", 0o755)
    put(tmp_path, "/usr/bin/crio", "#!/bin/sh\n", 0o755)
    put(tmp_path, f"{CONF_D}/10-crio.conf", packages())
    return tmp_path


def loaded(root: Path) -> dict[str, Any]:
    """Return the handler that CRI-O loads."""
    config = Configuration()
    for path in sorted((root / CONF_D.lstrip("/")).iterdir()):
        config.add(str(path), tomllib.loads(path.read_text()))
    return config.handlers["tidegate"]


def refused(root: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a setup that is refused in one line and changes nothing; return the line."""
    before = snapshot(root)
    capsys.readouterr()
    assert setup(root, "crio", *words) == 73
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert snapshot(root) == before
    return err


def test_the_handler_has_the_monitor_and_the_runtime_of_the_packages(packaged, capsys):
    before = snapshot(packaged)
    assert setup(packaged, "crio") == 0
    assert text(packaged, DROP_IN) == WRITTEN + handler(
        "tidegate",
        runtime_path="/usr/bin/tidegate-runtime",
        runtime_type="oci",
        runtime_root="/run/crun",
        monitor_path=f"{LIBEXEC}/conmon",
    )
    assert text(packaged, SETTINGS) == f"{WRITTEN}runtime-for /run/crun {LIBEXEC}/crun\n"
    assert "to do: systemctl restart crio" in capsys.readouterr().out
    second = snapshot(packaged)
    assert setup(packaged, "crio") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert snapshot(packaged) == second
    assert setup(packaged, "crio", "--undo") == 0
    assert snapshot(packaged) == before


def test_a_node_without_cri_o_gets_a_note(packaged, capsys):
    note = "note: CRI-O is not installed, so the new files were not checked"
    assert setup(packaged, "crio", "--dry-run") == 0
    assert note not in capsys.readouterr().out
    (packaged / "usr/bin/crio").unlink()
    assert setup(packaged, "crio") == 0
    assert note in capsys.readouterr().out


def killed(root: Path, at: int, *words: str) -> bool:
    """Run setup in a child that exits before its `at`th change of a file, counted from 0.

    The changes that count are calls of os.fchmod, os.rename and os.unlink. Return whether the child
    got that far.
    """
    pid = os.fork()
    if not pid:
        left = iter(range(at, -1, -1))

        def then(call: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*arguments: Any, **more: Any) -> Any:
                if not next(left):
                    os._exit(9)
                return call(*arguments, **more)

            return counted

        status = 1
        with contextlib.suppress(BaseException), open(os.devnull, "w") as null:  # noqa: PTH123
            sys.stdout = sys.stderr = null
            os.fchmod, os.rename, os.unlink = then(os.fchmod), then(os.rename), then(os.unlink)
            status = setup(root, *words)
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


@pytest.mark.parametrize("words", [("crio",), ("crio", "--undo")])
def test_a_setup_that_is_killed_leaves_no_incomplete_file_that_cri_o_reads(packaged, words):
    """CRI-O reads every file in its directory. The next run removes what the killed run left."""
    (packaged / "var/lib/tidegate").mkdir(parents=True)
    (packaged / "var/lib/tidegate/setup").mkdir(0o700)
    before = snapshot(packaged)
    for at in range(100):
        if words != ("crio",):
            assert setup(packaged, "crio") == 0
        came = killed(packaged, at, *words)
        assert {path.name for path in (packaged / CONF_D.lstrip("/")).iterdir()} <= {
            "10-crio.conf",
            Path(DROP_IN).name,
        }
        assert setup(packaged, "crio") == 0
        loaded(packaged)
        assert setup(packaged, "crio", "--undo") == 0
        assert snapshot(packaged) == before
        if not came:
            break
    assert 2 < at < 99


def test_the_handler_follows_the_default_that_an_administrator_names(packaged, capsys):
    setup(packaged, "crio")
    put(packaged, f"{CONF_D}/90-default.conf", '[crio.runtime]\ndefault_runtime = "runc"\n')
    assert setup(packaged, "crio") == 0
    assert loaded(packaged)["runtime_root"] == "/run/runc"
    assert text(packaged, SETTINGS) == f"{WRITTEN}runtime-for /run/runc {LIBEXEC}/runc\n"
    (packaged / f"{CONF_D}/90-default.conf".lstrip("/")).unlink()
    before = '[crio.runtime]\ndefault_runtime = "runc"\n'
    put(packaged, CONF, before)  # the packages' drop-in is read after it
    assert setup(packaged, "crio") == 0
    assert loaded(packaged)["runtime_root"] == "/run/crun"
    assert "note:" not in capsys.readouterr().out


def test_all_of_the_default_handler_is_copied_except_its_program(packaged):
    own = (
        "[crio.runtime.runtimes.crun]\n"
        f'runtime_path = "{LIBEXEC}/crun"\nruntime_root = "/run/crun"\nmonitor_path = "{LIBEXEC}/conmon"\n'
        'monitor_cgroup = "pod"\nmonitor_env = ["A=\\"b\\"", "C=\\u007f\\\\"]\nno_sync_log = true\n'
        "allowed_annotations = []\ncontainer_create_timeout = 300\n"
        'platform_runtime_paths = {"wasi/wasm" = "/usr/bin/crun-wasm"}\n'
        '[crio.runtime.runtimes.crun.default_annotations]\n"run.oci.x" = "1"\n'
    )
    put(packaged, f"{CONF_D}/20-own.conf", own)
    assert setup(packaged, "crio") == 0
    former = tomllib.loads(own)["crio"]["runtime"]["runtimes"]["crun"]
    del former["platform_runtime_paths"]
    changed = {"runtime_path": "/usr/bin/tidegate-runtime", "runtime_type": "oci"}
    assert loaded(packaged) == {**former, **changed}


def test_a_later_file_replaces_all_of_a_handler(packaged, capsys):
    """As in CRI-O, the monitor that an earlier file names no longer applies."""
    put(packaged, f"{CONF_D}/20-own.conf", handler("crun", runtime_path=f"{LIBEXEC}/crun"))
    assert "the handler crun (/etc/crio/crio.conf.d/20-own.conf) names no monitor_path" in refused(
        packaged, capsys
    )
    put(packaged, "/usr/bin/conmon", "#!/bin/sh\n", 0o755)
    assert setup(packaged, "crio") == 0
    assert "monitor_path" not in loaded(packaged)
    # CRI-O's own default may differ in another version.
    assert loaded(packaged)["runtime_root"] == "/run/crun"


def test_a_node_without_files_has_the_handler_that_is_built_in(root):
    (root / CONF.lstrip("/")).unlink()
    before = snapshot(root)
    assert setup(root, "crio") == 0
    assert text(root, DROP_IN) == (PACKAGING / "crio/50-tidegate.conf").read_text() + (
        'runtime_root = "/run/crun"\n'
    )
    assert text(root, SETTINGS) == f"{WRITTEN}runtime-for /run/crun /usr/bin/crun\n"
    assert setup(root, "crio", "--undo") == 0
    assert snapshot(root) == before
    (root / "usr/bin/crun").rename(root / "usr/bin/runc")
    assert setup(root, "crio") == 0
    assert text(root, SETTINGS) == f"{WRITTEN}runtime-for /run/runc /usr/bin/runc\n"


def test_files_in_subdirectories_are_read_as_cri_o_reads_them(packaged):
    put(packaged, f"{CONF_D}/60/README", '[crio.runtime]\ndefault_runtime = "runc"\n')
    assert setup(packaged, "crio") == 0
    assert text(packaged, SETTINGS) == f"{WRITTEN}runtime-for /run/runc {LIBEXEC}/runc\n"


def test_a_monitor_for_all_handlers_takes_precedence_over_theirs(packaged, capsys):
    put(packaged, f"{CONF_D}/20-own.conf", '[crio.runtime]\nconmon = "/opt/conmon"\n')
    assert "has the monitor /opt/conmon, which is missing; install conmon" in refused(
        packaged, capsys
    )
    put(packaged, "/opt/conmon", "#!/bin/sh\n", 0o755)
    assert setup(packaged, "crio") == 0


def test_the_drop_in_of_an_older_version_is_corrected(packaged, monkeypatch):
    monkeypatch.setattr(crio, "_text", lambda _handler: WRITTEN + OLD)
    assert setup(packaged, "crio") == 0
    assert text(packaged, DROP_IN) == WRITTEN + OLD
    monkeypatch.undo()
    assert setup(packaged, "crio") == 0
    assert loaded(packaged)["monitor_path"] == f"{LIBEXEC}/conmon"


def test_an_administrators_handler_with_which_cri_o_does_not_start_is_refused(packaged, capsys):
    put(packaged, f"{CONF_D}/60-own.conf", OLD)
    line = refused(packaged, capsys)
    assert (
        "CRI-O does not start: the handler tidegate (/etc/crio/crio.conf.d/60-own.conf) names no "
        "monitor_path, and conmon is not in any program directory; install conmon, or correct the "
        "monitor_path of the handler tidegate first"
    ) in line
    put(
        packaged, f"{CONF_D}/60-own.conf", f'{OLD}runtime_root = "/run/own"\nmonitor_path = "{LIBEXEC}/conmon"\n'
    )  # fmt: skip
    assert setup(packaged, "crio") == 0
    assert text(packaged, SETTINGS) == f"{WRITTEN}runtime-for /run/own {LIBEXEC}/crun\n"
    assert not (packaged / DROP_IN.lstrip("/")).exists()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {f"{CONF_D}/20.conf": handler("nvidia", runtime_path="/usr/bin/tidegate-hook")},
            "the handler nvidia (/etc/crio/crio.conf.d/20.conf) names no monitor_path",
        ),
        (
            {f"{CONF_D}/20.conf": '[crio.runtime]\ndefault_runtime = "kata"\n'},
            "default_runtime is kata, but no file has a handler of that name; write",
        ),
        (
            {f"{CONF_D}/20.conf": handler("crun", runtime_path="/opt/crun")},
            "the default handler crun (/etc/crio/crio.conf.d/20.conf) runs /opt/crun, which is missing",
        ),
        (
            {f"{CONF_D}/20.conf": '[crio.runtime]\ndefault_runtime = "crun"\n[crio.runtime.runtimes.crun]\n'},
            "runs crun, which is not in any program directory; install it, or correct the runtime_path",
        ),
        (
            {f"{CONF_D}/20.conf": handler("crun", runtime_path=f"{LIBEXEC}/crun", runtime_type="vm")},
            "default handler crun has runtime_type vm, which has no OCI runtime; set default_runtime to a handler",
        ),
        (
            {f"{HOOKS_DIR}/x.json": '{"hook": {"path": "/usr/bin/x"}, "stages": ["prestart", "precreate"]}'},
            "CRI-O does not start: /ROOT/usr/share/containers/oci/hooks.d/x.json names the stage precreate",
        ),
    ],
    ids=["monitor", "default", "program", "path", "vm", "hook"],
)  # fmt: skip
def test_a_node_on_which_cri_o_does_not_start_is_left_as_it_is(packaged, capsys, files, words):
    for path, content in files.items():
        put(packaged, path, content)
    assert words in refused(packaged, capsys).replace(str(packaged), "/ROOT")


def test_a_handler_whose_program_is_missing_needs_no_monitor(packaged):
    """CRI-O ignores such a handler."""
    put(packaged, f"{CONF_D}/20.conf", handler("kata", runtime_path="/usr/bin/kata"))
    assert setup(packaged, "crio") == 0


def test_our_handler_as_the_default_still_runs_the_packages_runtime(packaged, capsys):
    setup(packaged, "crio")
    put(packaged, f"{CONF_D}/90.conf", '[crio.runtime]\ndefault_runtime = "tidegate"\n')
    after = snapshot(packaged)
    assert setup(packaged, "crio") == 0
    assert snapshot(packaged) == after
    for name in ("crun", "runc"):
        (packaged / f"{LIBEXEC}/{name}".lstrip("/")).unlink()
    assert "CRI-O has no handler besides tidegate that runs crun or runc" in refused(
        packaged, capsys
    )


def test_existing_settings_of_the_wrapper_are_left_alone(packaged, capsys):
    put(packaged, SETTINGS, f"# mine\nruntime {LIBEXEC}/crun\nlog /var/log/x")
    before = snapshot(packaged)
    assert setup(packaged, "crio") == 0
    assert text(packaged, SETTINGS).startswith("# mine\nruntime ")
    assert "runtime-for" not in text(packaged, SETTINGS)
    assert "note:" not in capsys.readouterr().out
    put(packaged, SETTINGS, "runtime-for /run/crun /opt/crun\n")
    assert setup(packaged, "crio") == 0
    assert (
        f"note: {packaged}{SETTINGS} makes the wrapper execute /opt/crun for CRI-O, but CRI-O's default handler "
        f"runs {LIBEXEC}/crun: write `runtime-for /run/crun {LIBEXEC}/crun` there to make them match"
    ) in capsys.readouterr().out
    put(packaged, SETTINGS, f"# mine\nruntime {LIBEXEC}/crun\nlog /var/log/x")
    assert setup(packaged, "crio", "--undo") == 0
    assert snapshot(packaged) == before


def test_lines_that_were_added_to_the_settings_stay(packaged):
    put(packaged, SETTINGS, "log /var/log/x")
    setup(packaged, "crio")
    ours = f"{WRITTEN}runtime-for /run/crun {LIBEXEC}/crun\n"
    assert text(packaged, SETTINGS) == f"log /var/log/x\n{ours}"
    put(packaged, SETTINGS, f"# first\nlog /var/log/x\n{ours}dev-dir /dev\n")
    assert setup(packaged, "crio") == 0
    assert setup(packaged, "crio", "--undo") == 0
    assert text(packaged, SETTINGS) == "# first\nlog /var/log/x\ndev-dir /dev\n"


def test_an_edited_drop_in_leaves_only_what_is_not_ours(packaged):
    setup(packaged, "crio")
    added = '[crio.runtime.runtimes.other]\nruntime_path = "/usr/bin/other"\n'
    put(packaged, DROP_IN, text(packaged, DROP_IN) + "no_sync_log = true\n" + added)
    assert setup(packaged, "crio") == 0
    assert setup(packaged, "crio", "--undo") == 0
    assert text(packaged, DROP_IN) == added
    assert not (packaged / SETTINGS.lstrip("/")).exists()
    (packaged / DROP_IN.lstrip("/")).unlink()
    setup(packaged, "crio")
    put(packaged, DROP_IN, text(packaged, DROP_IN) + "no_sync_log = true\n")
    setup(packaged, "crio", "--undo")
    assert not (packaged / DROP_IN.lstrip("/")).exists()


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        (CONF, "[crio", "crio.conf is not TOML"),
        (
            f"{CONF_D}/README",
            '[crio.runtime.runtimes.tidegate]\nruntime_path = "/opt/x"\n',
            "README is /opt/x, not /usr/bin/tidegate-runtime",
        ),
        (DROP_IN, "[crio.runtime]\n", "exists, but has no handler tidegate"),
        (
            f"{HOOKS_DIR}/t.json",
            '{"hook": {"path": "/usr/libexec/tidegate-hook"}}',
            "t.json, which already adds the hook to every container",
        ),
    ],
)
def test_what_would_clash_with_cri_o_is_refused(root, capsys, path, content, words):
    put(root, f"{CONF_D}/00-default.conf", "[crio]\n")
    put(root, path, content)
    assert words in refused(root, capsys)


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ("[crio", "`crio config` does not print TOML: "),
        (packages(), "CRI-O does not load the handler tidegate: `crio config` does not show it"),
        (packages() + OLD, "CRI-O would not start: the handler tidegate (crio config) names no"),
        (packages() + OLD + f'monitor_path = "{LIBEXEC}/conmon"\n', None),
    ],
)
def test_the_output_of_crio_config_is_compared_with_the_node(said, complaint):
    programs = {f"{LIBEXEC}/{name}" for name in ("conmon", "crun", "runc")}
    found = crio._complaint(said, {*programs, "/usr/bin/tidegate-runtime"}.__contains__)
    assert found is None if complaint is None else (found or "").startswith(complaint)
