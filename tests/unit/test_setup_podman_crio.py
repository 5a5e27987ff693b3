"""`tidegate setup podman` and `crio`: hooks and a drop-in are written to directories that the
engine reads and that no other program reads.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from governor.setup.files import Root
from governor.setup.plan import Validation
from governor.setup.validate import validate
from oci_hook.edits import HOOK_ENV, HOOK_TIMEOUT
from oci_hook.quick import STAGES
from tests.unit.setup_tree import (
    put,
    put_crio_programs,
    put_monitor,
    put_programs,
    put_service,
    setup,
    snapshot,
    text,
)

PACKAGING = Path(__file__).resolve().parents[2] / "packaging"
HOOKS = "/etc/tidegate/hooks.d"
NAMES = ("50-tidegate-devices.json", "50-tidegate-end.json", "50-tidegate.json")
# Buildah reads this directory as well. Earlier versions of setup wrote the hooks to it.
FORMER = "/etc/containers/oci/hooks.d"
CONF = "/etc/containers/containers.conf.d/50-tidegate.conf"


@pytest.fixture
def root(tmp_path):
    put_programs(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("50-tidegate.json", "createRuntime"),
        ("50-tidegate-devices.json", "precreate"),
        ("50-tidegate-end.json", "poststop"),
    ],
)
def test_the_hooks_conform_to_oci_hooks_1_0_0(name, stage):
    hook = json.loads((PACKAGING / "hooks.d" / name).read_text())
    assert set(hook) == {"version", "hook", "when", "stages"}
    assert hook["version"] == "1.0.0"
    assert hook["stages"] == [stage]
    assert hook["hook"]["path"] == "/usr/bin/tidegate-hook"
    assert hook["hook"]["args"] == ["tidegate-hook", stage]
    # Without `env`, a hook gets runc's own environment, or before runc 1.3, at some stages, that of
    # the image.
    assert hook["hook"]["env"] == ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"] == list(HOOK_ENV)
    # The hook's own deadline is 20 s, and its error line must still be read.
    assert hook["hook"]["timeout"] == 30 == HOOK_TIMEOUT
    ((key, value),) = hook["when"]["annotations"].items()
    assert re.search(key, "tidegate.gpu/memory")
    assert re.search(value, "")
    for other in ("x/tidegate.gpu/memory", "tidegateXgpu/memory", "tidegate.gpu"):
        assert not re.search(key, other)
    assert stage in STAGES


def test_the_hooks_are_ordered_by_their_names():
    names = sorted(p.name.lower() for p in (PACKAGING / "hooks.d").iterdir())
    assert names == ["50-tidegate-devices.json", "50-tidegate-end.json", "50-tidegate.json"]


def test_podman_gets_the_files_of_the_package(root, capsys):
    before = snapshot(root)
    assert setup(root, "podman") == 0
    for path in (PACKAGING / "hooks.d").iterdir():
        assert text(root, f"{HOOKS}/{path.name}") == path.read_text()
    assert "to do: nothing, because Podman reads the hooks" in capsys.readouterr().out
    second = snapshot(root)
    assert setup(root, "podman") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert snapshot(root) == second
    assert setup(root, "podman", "--undo") == 0
    assert snapshot(root) == before


def test_the_hooks_name_the_program_in_a_checkout(root, capsys):
    put_programs(root, "/srv/tidegate/oci_hook")
    assert setup(root, "podman", "--bin-dir", "/srv/tidegate/oci_hook") == 0
    for name in ("50-tidegate.json", "50-tidegate-devices.json", "50-tidegate-end.json"):
        hook = json.loads(text(root, f"{HOOKS}/{name}"))["hook"]
        assert hook["path"] == "/srv/tidegate/oci_hook/tidegate-hook"
    assert "note:" not in capsys.readouterr().out


def test_a_new_version_of_the_package_replaces_its_hooks_and_no_others(root, monkeypatch):
    setup(root, "podman")
    edited = text(root, f"{HOOKS}/50-tidegate.json").replace("30", "60")
    put(root, f"{HOOKS}/50-tidegate.json", edited)
    newer = (PACKAGING / "hooks.d/50-tidegate.json").read_text().replace("30", "40")
    monkeypatch.setattr("governor.setup.podman.packaged", lambda _name: newer)
    assert setup(root, "podman") == 0
    assert text(root, f"{HOOKS}/50-tidegate-devices.json") == newer
    assert text(root, f"{HOOKS}/50-tidegate.json") == edited


def test_a_hook_that_was_edited_is_set_aside(root, capsys):
    setup(root, "podman")
    edited = text(root, f"{HOOKS}/50-tidegate.json").replace("30", "60")
    put(root, f"{HOOKS}/50-tidegate.json", edited)
    assert setup(root, "podman", "--undo") == 0
    assert "has been edited since: it is kept as" in capsys.readouterr().out
    # It does not end in .json, so it is not read as a hook.
    assert [p.name for p in (root / HOOKS.lstrip("/")).iterdir()] == ["50-tidegate.json.edited"]
    assert text(root, f"{HOOKS}/50-tidegate.json.edited") == edited
    setup(root, "podman")
    put(root, f"{HOOKS}/50-tidegate.json", edited)
    assert setup(root, "podman", "--undo") == 73
    assert "50-tidegate.json.edited already exists" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "[]", '{"hook": {"path": "/opt/other"}}'])
def test_a_foreign_hook_of_that_name_is_refused(root, capsys, content):
    put(root, f"{HOOKS}/50-tidegate.json", content)
    before = snapshot(root)
    assert setup(root, "podman") == 73
    assert "50-tidegate.json" in capsys.readouterr().err
    assert snapshot(root) == before


def test_a_drop_in_adds_the_directory_to_those_that_podman_reads(root):
    """By default, Podman reads only the directory in /usr/share, which CRI-O reads as well."""
    setup(root, "podman")
    assert text(root, CONF) == (
        "# Written by `tidegate setup podman`; `tidegate setup podman --undo` takes it out.\n"
        f'[engine]\nhooks_dir = ["/usr/share/containers/oci/hooks.d", "{HOOKS}"]\n'
    )
    setup(root, "podman", "--undo")
    put(root, "/etc/containers/containers.conf", '[engine]\nhooks_dir = ["/a/"]\n')
    put(
        root,
        "/etc/containers/containers.conf.d/10.conf",
        '[engine]\nhooks_dir = ["/b", {append = true}]\n',
    )
    put(root, "/etc/containers/containers.conf.d/README", "[")
    before = snapshot(root)
    assert setup(root, "podman") == 0
    assert tomllib.loads(text(root, CONF)) == {"engine": {"hooks_dir": ["/a", "/b", HOOKS]}}
    second = snapshot(root)
    assert setup(root, "podman") == 0
    assert snapshot(root) == second
    assert setup(root, "podman", "--undo") == 0
    assert snapshot(root) == before
    assert setup(root, "podman", "--hooks-dir", "/b") == 0
    assert not (root / CONF.lstrip("/")).exists()
    assert (root / "b/50-tidegate.json").exists()


def test_a_later_drop_in_that_would_take_precedence_is_named(root, capsys):
    put(root, "/etc/containers/containers.conf.d/99.conf", '[engine]\nhooks_dir = ["/a"]\n')
    before = snapshot(root)
    assert setup(root, "podman") == 73
    err = capsys.readouterr().err
    assert "containers.conf.d/99.conf makes Podman read hooks from /a; write " in err
    assert snapshot(root) == before
    put(root, CONF, "[engine]\n")
    (root / "etc/containers/containers.conf.d/99.conf").unlink()
    assert setup(root, "podman") == 73
    assert "50-tidegate.conf makes Podman read" in capsys.readouterr().err


def test_an_edited_drop_in_of_podman_leaves_what_is_not_ours(root):
    setup(root, "podman")
    put(root, CONF, text(root, CONF) + 'runtime = "crun"\n# mine\n[network]\n')
    assert setup(root, "podman") == 0
    assert setup(root, "podman", "--undo") == 0
    assert text(root, CONF) == '[engine]\nruntime = "crun"\n# mine\n[network]\n'
    (root / CONF.lstrip("/")).unlink()
    setup(root, "podman")
    put(root, CONF, text(root, CONF) + "\n")
    setup(root, "podman", "--undo")
    assert not (root / CONF.lstrip("/")).exists()


def set_up_formerly(root: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Set Podman up as earlier versions did: with the same hooks, drop-in and journal, but with the
    hooks in the directory of oci-hooks(5).
    """
    with monkeypatch.context() as patch:
        patch.setattr("governor.setup.podman.HOOKS_DIR", FORMER)
        patch.setattr("governor.setup.podman.BUILDAH", ())
        assert setup(root, "podman", *words) == 0
    assert sorted(p.name for p in (root / FORMER.lstrip("/")).iterdir()) == list(NAMES)


@pytest.mark.parametrize("conf", ["", '[engine]\nhooks_dir = ["/a"]\n'])
def test_a_second_run_moves_hooks_out_of_the_directory_that_buildah_reads(root, monkeypatch, conf):
    put(root, "/etc/containers/containers.conf", conf)
    before = snapshot(root)
    set_up_formerly(root, monkeypatch)
    assert setup(root, "podman") == 0
    assert not (root / "etc/containers/oci").exists()
    assert sorted(p.name for p in (root / HOOKS.lstrip("/")).iterdir()) == list(NAMES)
    read = ["/a"] if conf else ["/usr/share/containers/oci/hooks.d"]
    assert tomllib.loads(text(root, CONF)) == {"engine": {"hooks_dir": [*read, HOOKS]}}
    second = snapshot(root)
    assert setup(root, "podman") == 0
    assert snapshot(root) == second
    assert setup(root, "podman", "--undo") == 0
    assert snapshot(root) == before


def test_a_directory_with_hooks_of_others_stays_when_ours_move(root, monkeypatch):
    set_up_formerly(root, monkeypatch)
    put(root, f"{FORMER}/other.json", '{"hook": {"path": "/usr/bin/other"}}')
    assert setup(root, "podman") == 0
    assert [p.name for p in (root / FORMER.lstrip("/")).iterdir()] == ["other.json"]


def test_a_move_that_fails_leaves_everything_as_it_was(root, monkeypatch):
    set_up_formerly(root, monkeypatch)
    before = snapshot(root)
    from governor.setup.files import Root

    real = Root.remove

    def remove(self: Root, path: str) -> None:
        if path == f"{FORMER}/{NAMES[1]}":
            raise OSError(28, "No space left on device")
        real(self, path)

    monkeypatch.setattr(Root, "remove", remove)
    with pytest.raises(OSError, match="No space"):
        setup(root, "podman")
    assert snapshot(root) == before


def test_a_hook_that_was_edited_is_not_moved_but_named(root, monkeypatch, capsys):
    set_up_formerly(root, monkeypatch)
    edited = text(root, f"{FORMER}/{NAMES[2]}").replace("30", "60")
    put(root, f"{FORMER}/{NAMES[2]}", edited)
    before = snapshot(root)
    assert setup(root, "podman") == 73
    assert capsys.readouterr().err.endswith(
        f"{FORMER}/{NAMES[2]} must be moved to {root}{HOOKS}, but has been edited since setup wrote it; "
        "move it there by hand, and run the command again\n"
    )
    assert snapshot(root) == before
    (root / HOOKS.lstrip("/")).mkdir(parents=True)
    (root / f"{FORMER}/{NAMES[2]}".lstrip("/")).rename(root / f"{HOOKS}/{NAMES[2]}".lstrip("/"))
    assert setup(root, "podman") == 0
    assert text(root, f"{HOOKS}/{NAMES[2]}") == edited


def test_a_drop_in_that_was_edited_is_not_overwritten_but_named(root, monkeypatch, capsys):
    set_up_formerly(root, monkeypatch)
    put(root, CONF, text(root, CONF) + 'runtime = "crun"\n')
    before = snapshot(root)
    assert setup(root, "podman") == 73
    assert capsys.readouterr().err.endswith(
        f"{CONF} makes Podman read hooks from /usr/share/containers/oci/hooks.d, {FORMER}; "
        f'write "{HOOKS}" instead of "{FORMER}" to hooks_dir there, and run the command again\n'
    )
    assert snapshot(root) == before
    put(root, CONF, text(root, CONF).replace(FORMER, HOOKS))
    assert setup(root, "podman") == 0
    second = snapshot(root)
    assert setup(root, "podman") == 0
    assert snapshot(root) == second
    assert setup(root, "podman", "--undo") == 0
    assert text(root, CONF) == '[engine]\nruntime = "crun"\n'


def test_a_hooks_directory_from_an_option_remains_in_use(root):
    assert setup(root, "podman", "--hooks-dir", "/srv/hooks") == 0
    second = snapshot(root)
    assert setup(root, "podman") == 0
    assert snapshot(root) == second
    assert setup(root, "podman", "--hooks-dir", HOOKS) == 0
    assert not (root / "srv/hooks").exists()
    assert (root / f"{HOOKS}/{NAMES[0]}".lstrip("/")).exists()


@pytest.mark.parametrize("directory", ["/usr/share/containers/oci/hooks.d", f"{FORMER}/"])
def test_buildah_never_finds_the_stage_precreate(root, capsys, directory):
    before = snapshot(root)
    assert setup(root, "podman", "--hooks-dir", directory) == 73
    assert "Buildah also reads hooks from" in capsys.readouterr().err
    assert snapshot(root) == before


def test_buildah_finds_no_hook_of_ours_through_a_link(root, capsys):
    (root / "etc/tidegate/hooks.d").mkdir(parents=True)
    (root / "etc/containers/oci").mkdir(parents=True)
    (root / FORMER.lstrip("/")).symlink_to(HOOKS)
    before = snapshot(root)
    assert setup(root, "podman") == 73
    assert "Buildah also reads hooks from" in capsys.readouterr().err
    assert snapshot(root) == before


def test_a_directory_that_others_cannot_read_is_refused(root, capsys):
    """test_rootless.py shows how rootless Podman treats such a directory."""
    (root / "etc/tidegate").mkdir(parents=True)
    for path, mode in (("etc/tidegate", 0o750), ("etc/tidegate/hooks.d", 0o711)):
        (root / path).mkdir(exist_ok=True)
        (root / path).chmod(mode)
        before = snapshot(root)
        assert setup(root, "podman") == 73
        assert f"other users cannot read {root}/{path}, so their Podman" in capsys.readouterr().err
        assert snapshot(root) == before
        (root / path).chmod(0o755)
    assert setup(root, "podman") == 0


def test_a_hook_that_podman_would_run_twice_is_named(root, capsys):
    put(
        root, "/usr/share/containers/oci/hooks.d/t.json", '{"hook": {"path": "/opt/tidegate-hook"}}'
    )
    put(root, "/usr/share/containers/oci/hooks.d/broken.json", "{")
    put(root, f"{FORMER}/elsewhere.json", '{"hook": {"path": "/opt/tidegate-hook"}}')
    before = snapshot(root)
    assert setup(root, "podman") == 73
    assert "t.json already adds the hook to every container" in capsys.readouterr().err
    assert snapshot(root) == before
    (root / "usr/share/containers/oci/hooks.d/t.json").unlink()
    assert setup(root, "podman") == 0


def test_append_remains_in_effect_for_later_files(root):
    put(
        root,
        "/etc/containers/containers.conf.d/10.conf",
        '[engine]\nhooks_dir = ["/a", {append = true}]\n',
    )
    put(root, "/etc/containers/containers.conf.d/90.conf", '[engine]\nhooks_dir = ["/z"]\n')
    assert setup(root, "podman") == 0
    read = ["/usr/share/containers/oci/hooks.d", "/a", HOOKS]
    assert tomllib.loads(text(root, CONF)) == {"engine": {"hooks_dir": read}}


@pytest.mark.parametrize(
    "directory",
    ["/usr/share/containers/containers.conf.d", "/etc/containers/containers.rootful.conf.d"],
)
def test_drop_ins_of_podman_6_are_considered_if_podman_cannot_be_queried(root, capsys, directory):
    put(root, f"{directory}/99.conf", '[engine]\nhooks_dir = ["/a"]\n')
    assert setup(root, "podman") == 73
    assert "99.conf makes Podman read hooks from /a; write " in capsys.readouterr().err


def test_a_running_api_service_is_named_with_the_command_that_restarts_it(root, capsys):
    put_service(root, 4711, unit=True)
    put_service(root, 4712, unit=False, command="/opt/bin/podman system service -t 0")
    put_service(root, 4713, unit=False, command="podman system prune")
    put_service(root, 4714, unit=False, command="vi podman system service")
    put_service(root, 4715, unit=False)
    (root / "proc/4715/root").unlink()
    (root / "proc/4715/root").symlink_to("/")
    todo = [
        "to do: systemctl restart podman.service    # containers keep running",
        "to do: kill 4712, and start `podman system service` again; containers keep running",
    ]
    for words in (("--dry-run",), ()):
        assert setup(root, "podman", *words) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if line.startswith("to do")] == todo
    # Later runs print notes until the services have been restarted.
    put_service(root, 4716, unit=False, age_s=-100, command="podman system service")
    assert setup(root, "podman") == 0
    notes = capsys.readouterr().out.splitlines()
    assert [line.partition(" started before ")[0] for line in notes[:-1]] == [
        "note: podman.service",
        "note: process 4712 (podman system service)",
    ]
    assert notes[-1] == "podman: already set up, nothing to do"


def test_a_container_that_would_restart_without_the_hooks_is_named(root, capsys):
    """Only Podman's database has the restart policies, so setup names every such container."""
    ours, former = {"tidegate.gpu/memory": "4Gi", "x": "y"}, ("/usr/share/containers/oci/hooks.d",)
    put_monitor(root, 4711, "trainer", former, ours)
    put_monitor(root, 4712, "another", (*former, FORMER), ours)
    put_monitor(root, 4713, "plain", former, {"x": "y"})
    put_monitor(root, 4714, "knows", (*former, f"{HOOKS}/"), ours)
    put_monitor(root, 4715, "podman-4", (), ours)
    put_monitor(root, 4716, "gone", former, ours)
    (root / "var/lib/containers/storage/overlay-containers/gone/userdata/config.json").unlink()
    assert setup(root, "podman") == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "to do: podman restart another trainer    # if a restart policy restarts them, they run without the hooks"
    )
    assert setup(root, "podman") == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "note: another, trainer started before the hooks were set up, and if a restart "
        "policy restarts them, they run without the hooks: podman restart another trainer"
    )


def test_broken_containers_conf_is_refused(root, capsys):
    put(root, "/etc/containers/containers.conf", "[engine\n")
    assert setup(root, "podman") == 73
    assert "containers.conf is not TOML" in capsys.readouterr().err


def test_cri_o_never_finds_the_stage_precreate(root, capsys):
    put(root, "/etc/crio/crio.conf", f'[crio.runtime]\nhooks_dir = ["{HOOKS}"]\n')
    assert setup(root, "podman") == 73
    assert "does not start if one of the hooks has the stage precreate" in capsys.readouterr().err
    put(
        root,
        "/etc/crio/crio.conf.d/99.conf",
        '[crio.runtime]\nhooks_dir = ["/usr/share/containers/oci/hooks.d"]\n',
    )
    assert setup(root, "podman") == 0


def test_the_journal_is_removed_when_the_last_engine_is_undone(root):
    """Directories that one engine's setup created remain while other engines use them."""
    engines = ("docker", "podman", "containerd", "crio")
    put_crio_programs(root)
    before = snapshot(root)
    for order in (engines, engines[::-1], ("podman", "crio", "docker", "containerd")):
        for engine in engines:
            assert setup(root, engine) == 0
        for engine in order:
            assert (root / "var/lib/tidegate/setup/journal.json").exists()
            assert setup(root, engine, "--undo") == 0
        assert snapshot(root) == before


def test_directories_that_others_use_stay(root):
    setup(root, "podman")
    put(root, f"{HOOKS}/other.json", "{}")
    put(root, "/var/lib/tidegate/state.db", "")
    setup(root, "podman", "--undo")
    assert [p.name for p in (root / HOOKS.lstrip("/")).iterdir()] == ["other.json"]
    assert [p.name for p in (root / "var/lib/tidegate").iterdir()] == ["state.db"]


def test_files_of_an_engine_that_is_not_installed_are_reported_as_unchecked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    edits: Any = ["an edit"]
    assert validate(Root("/"), Validation(("podman", "--help")), edits) == [
        "podman is not installed, so the new files were not checked"
    ]
    assert validate(Root("/"), Validation(("podman", "--help")), []) == []
