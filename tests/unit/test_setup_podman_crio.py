"""`tidegate setup podman` and `crio`: hooks and a drop-in, where the engine reads them and nobody else does."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from oci_hook.edits import HOOK_ENV, HOOK_TIMEOUT
from oci_hook.entry import STAGES
from tests.unit.setup_tree import put, put_programs, setup, snapshot, text

PACKAGING = Path(__file__).resolve().parents[2] / "packaging"
HOOKS = "/etc/containers/oci/hooks.d"
CONF = "/etc/containers/containers.conf.d/50-tidegate.conf"
DROP_IN = "/etc/crio/crio.conf.d/50-tidegate.conf"


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
def test_the_hooks_are_of_oci_hooks_1_0_0(name, stage):
    hook = json.loads((PACKAGING / "hooks.d" / name).read_text())
    assert set(hook) == {"version", "hook", "when", "stages"}
    assert hook["version"] == "1.0.0"
    assert hook["stages"] == [stage]
    assert hook["hook"]["path"] == "/usr/bin/tidegate-hook"
    assert hook["hook"]["args"] == ["tidegate-hook", stage]
    # Without one runc gives a hook its own environment, and before 1.3 the image's at some stages.
    assert hook["hook"]["env"] == ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"] == list(HOOK_ENV)
    # The hook's own deadline is 20 s, and its line is to be read.
    assert hook["hook"]["timeout"] == 30 == HOOK_TIMEOUT
    ((key, value),) = hook["when"]["annotations"].items()
    assert re.search(key, "tidegate.gpu/memory")
    assert re.search(value, "")
    for other in ("x/tidegate.gpu/memory", "tidegateXgpu/memory", "tidegate.gpu"):
        assert not re.search(key, other)
    assert stage in STAGES


def test_the_order_is_that_of_their_names():
    names = sorted(p.name.lower() for p in (PACKAGING / "hooks.d").iterdir())
    assert names == ["50-tidegate-devices.json", "50-tidegate-end.json", "50-tidegate.json"]


def test_podman_gets_the_files_of_the_package(root, capsys):
    before = snapshot(root)
    assert setup(root, "podman") == 0
    for path in (PACKAGING / "hooks.d").iterdir():
        assert text(root, f"{HOOKS}/{path.name}") == path.read_text()
    assert "to do: nothing: Podman reads hooks" in capsys.readouterr().out
    second = snapshot(root)
    assert setup(root, "podman") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert snapshot(root) == second
    assert setup(root, "podman", "--undo") == 0
    assert snapshot(root) == before


def test_a_checkout_is_named_in_the_hooks(root, capsys):
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
    assert "was edited since: it is kept as" in capsys.readouterr().out
    # Not .json: nobody reads it as a hook.
    assert [p.name for p in (root / HOOKS.lstrip("/")).iterdir()] == ["50-tidegate.json.edited"]
    assert text(root, f"{HOOKS}/50-tidegate.json.edited") == edited
    setup(root, "podman")
    put(root, f"{HOOKS}/50-tidegate.json", edited)
    assert setup(root, "podman", "--undo") == 73
    assert "50-tidegate.json.edited is there already" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "[]", '{"hook": {"path": "/opt/other"}}'])
def test_a_hook_of_that_name_that_is_somebody_elses_is_refused(root, capsys, content):
    put(root, f"{HOOKS}/50-tidegate.json", content)
    before = snapshot(root)
    assert setup(root, "podman") == 73
    assert "50-tidegate.json" in capsys.readouterr().err
    assert snapshot(root) == before


def test_podman_reads_the_directory_by_a_drop_in_beside_those_that_it_reads_now(root):
    """By itself it reads /usr/share alone, where CRI-O reads as well."""
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


def test_a_later_drop_in_would_win_and_is_named(root, capsys):
    put(root, "/etc/containers/containers.conf.d/99.conf", '[engine]\nhooks_dir = ["/a"]\n')
    before = snapshot(root)
    assert setup(root, "podman") == 73
    err = capsys.readouterr().err
    assert "containers.conf.d/99.conf has Podman read hooks from /a; add " in err
    assert snapshot(root) == before
    put(root, CONF, "[engine]\n")
    (root / "etc/containers/containers.conf.d/99.conf").unlink()
    assert setup(root, "podman") == 73
    assert "50-tidegate.conf has Podman read" in capsys.readouterr().err


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


def test_broken_containers_conf_is_refused(root, capsys):
    put(root, "/etc/containers/containers.conf", "[engine\n")
    assert setup(root, "podman") == 73
    assert "containers.conf is no TOML" in capsys.readouterr().err


def test_cri_o_never_finds_the_stage_precreate(root, capsys):
    put(root, "/etc/crio/crio.conf", f'[crio.runtime]\nhooks_dir = ["{HOOKS}"]\n')
    assert setup(root, "podman") == 73
    assert "does not start with the stage precreate" in capsys.readouterr().err
    put(
        root,
        "/etc/crio/crio.conf.d/99.conf",
        '[crio.runtime]\nhooks_dir = ["/usr/share/containers/oci/hooks.d"]\n',
    )
    assert setup(root, "podman") == 0


def test_crio_gets_a_drop_in(root, capsys):
    put(root, "/etc/crio/crio.conf.d/10-crun.conf", '[crio.runtime]\ndefault_runtime = "crun"\n')
    before = snapshot(root)
    assert setup(root, "crio") == 0
    assert text(root, DROP_IN) == (PACKAGING / "crio/50-tidegate.conf").read_text()
    assert tomllib.loads(text(root, DROP_IN)) == {
        "crio": {
            "runtime": {
                "runtimes": {
                    "tidegate": {"runtime_path": "/usr/bin/tidegate-runtime", "runtime_type": "oci"}
                }
            }
        }
    }
    assert "to do: systemctl restart crio" in capsys.readouterr().out
    second = snapshot(root)
    assert setup(root, "crio") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert snapshot(root) == second
    assert setup(root, "crio", "--undo") == 0
    assert snapshot(root) == before


def test_an_edited_drop_in_of_crio_leaves_only_what_is_not_ours(root):
    setup(root, "crio")
    added = '[crio.runtime.runtimes.other]\nruntime_path = "/usr/bin/other"\n'
    put(root, DROP_IN, text(root, DROP_IN) + 'monitor_path = "/usr/bin/conmon"\n' + added)
    assert setup(root, "crio") == 0
    assert setup(root, "crio", "--undo") == 0
    assert text(root, DROP_IN) == added
    (root / DROP_IN.lstrip("/")).unlink()
    setup(root, "crio")
    put(root, DROP_IN, text(root, DROP_IN) + 'monitor_path = "/usr/bin/conmon"\n')
    setup(root, "crio", "--undo")
    assert not (root / DROP_IN.lstrip("/")).exists()


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        ("/etc/crio/crio.conf", "[crio", "crio.conf is no TOML"),
        (
            "/etc/crio/crio.conf.d/README",
            '[crio.runtime.runtimes.tidegate]\nruntime_path = "/opt/x"\n',
            "README is /opt/x, not /usr/bin/tidegate-runtime",
        ),
        (DROP_IN, "[crio.runtime]\n", "is there, and has no handler tidegate"),
        (
            "/usr/share/containers/oci/hooks.d/t.json",
            '{"hook": {"path": "/usr/libexec/tidegate-hook"}}',
            "t.json, which enters the hook into each container already",
        ),
    ],
)
def test_what_would_clash_with_cri_o_is_refused(root, capsys, path, content, words):
    put(root, "/etc/crio/crio.conf.d/00-default.conf", "[crio]\n")
    put(root, path, content)
    before = snapshot(root)
    assert setup(root, "crio") == 73
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert words in err
    assert snapshot(root) == before


def test_the_journal_goes_with_the_last_engine_that_is_undone(root):
    """Directories that one engine's setup made, and others' use, are left to those."""
    engines = ("docker", "podman", "containerd", "crio")
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
