"""Test `tidegate setup containerd`.

It adds a handler for CRI, in a drop-in where containerd merges drop-ins, and otherwise in
config.toml.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from governor.setup import plan
from tests.unit.setup_tree import put, put_programs, setup, snapshot, text

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "/etc/containerd/config.toml"
DROP_IN = "/etc/containerd/conf.d/tidegate.toml"
SPEC = "/etc/containerd/tidegate-base-spec.json"
OURS = {
    "runtime_type": "io.containerd.runc.v2",
    "pod_annotations": ["tidegate.gpu/*"],
    "container_annotations": ["tidegate.gpu/*"],
    "options": {"BinaryName": "/usr/bin/tidegate-runtime"},
}
V2, V3 = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"

# This is the file of kubeadm's guides, with comments.
NODE2 = """\
# The node's containerd.
version = 2   # not 1
root = '''/var/lib/containerd'''

[grpc]
  address = "/run/containerd/containerd.sock" # [not a header]

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "registry.k8s.io/pause:3.9"

  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "runc"

    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      pod_annotations = ["example.org/*"]
      privileged_without_host_devices = false

      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = true

# The end.
"""
HANDLER2 = """
# Written by `tidegate setup containerd`; `tidegate setup containerd --undo` takes it out.
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.tidegate]
  runtime_type = "io.containerd.runc.v2"
  pod_annotations = ["example.org/*", "tidegate.gpu/*"]
  container_annotations = ["tidegate.gpu/*"]
  privileged_without_host_devices = false

  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.tidegate.options]
    BinaryName = "/usr/bin/tidegate-runtime"
    SystemdCgroup = true
"""


@pytest.fixture
def root(tmp_path):
    put_programs(tmp_path)
    return tmp_path


def handlers(content, plugin):
    return tomllib.loads(content)["plugins"][plugin]["containerd"]["runtimes"]


def test_for_an_unknown_version_of_containerd_the_handler_is_appended_to_a_file_of_version_2(
    root, capsys
):
    """containerd 1 would use a drop-in's CRI section in place of the whole CRI section of
    the file.
    """
    put(root, CONFIG, NODE2)
    before = snapshot(root)
    assert setup(root, "containerd") == 0
    assert text(root, CONFIG) == NODE2 + HANDLER2
    assert not (root / "etc/containerd/conf.d").exists()
    out = capsys.readouterr().out
    assert "to do: systemctl restart containerd" in out
    assert "note:" not in out
    assert setup(root, "containerd") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert text(root, CONFIG) == NODE2 + HANDLER2
    assert setup(root, "containerd", "--undo") == 0
    assert snapshot(root) == before


def test_crlf_stays_crlf(root):
    put(root, CONFIG, NODE2.replace("\n", "\r\n"))
    setup(root, "containerd")
    assert text(root, CONFIG) == (NODE2 + HANDLER2).replace("\n", "\r\n")
    setup(root, "containerd", "--undo")
    assert text(root, CONFIG) == NODE2.replace("\n", "\r\n")


def test_containerd_1_without_a_file_keeps_runc(root):
    """A CRI section that names one handler leaves containerd 1 with that handler alone, and CRI
    would not start.
    """
    before = snapshot(root)
    assert setup(root, "containerd", "--containerd-version", "1.6.20") == 0
    document = tomllib.loads(text(root, CONFIG))
    assert document["version"] == 2
    assert handlers(text(root, CONFIG), V2) == {
        "tidegate": OURS,
        "runc": {"runtime_type": "io.containerd.runc.v2"},
    }
    assert setup(root, "containerd", "--undo") == 0
    assert snapshot(root) == before


def test_a_file_without_handlers_gets_runc_as_well_and_one_with_another_does_not(root):
    put(root, CONFIG, 'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\nsandbox_image = "x"')
    setup(root, "containerd")
    assert set(handlers(text(root, CONFIG), V2)) == {"runc", "tidegate"}
    setup(root, "containerd", "--undo")
    assert text(root, CONFIG).endswith('sandbox_image = "x"')
    put(
        root,
        CONFIG,
        f"version = 2\n[plugins.'{V2}'.containerd]\ndefault_runtime_name = 'crun'\n"
        f"[plugins.'{V2}'.containerd.runtimes.crun]\nruntime_type = 'io.containerd.runc.v2'\n"
        f"[plugins.'{V2}'.containerd.runtimes.crun.options]\nBinaryName = '/usr/bin/crun'\n",
    )
    setup(root, "containerd")
    assert set(handlers(text(root, CONFIG), V2)) == {"crun", "tidegate"}


def test_another_runtime_of_the_default_handler_is_reported(root, capsys):
    content = (
        f"version = 3\n[plugins.'{V3}'.containerd]\ndefault_runtime_name = 'x'\n"
        f"[plugins.'{V3}'.containerd.runtimes.x]\nruntime_type = 'io.containerd.runc.v2'\n"
        f"[plugins.'{V3}'.containerd.runtimes.x.options]\nBinaryName = '/usr/bin/crun'\n"
    )
    put(root, CONFIG, content)
    setup(root, "containerd", "--dry-run")
    assert "write `runtime /usr/bin/crun` to /etc/tidegate/runtime" in capsys.readouterr().out
    # NVIDIA's runtime would add the driver a second time.
    put(root, CONFIG, content.replace("crun", "nvidia-container-runtime"))
    setup(root, "containerd", "--dry-run")
    assert "note:" not in capsys.readouterr().out
    # Nothing is taken from a handler of another kind.
    put(root, CONFIG, content.replace("runc.v2", "kata.v2") + "X = 1\n")
    setup(root, "containerd")
    assert "nothing is copied from it" in capsys.readouterr().out
    assert handlers(text(root, DROP_IN), V3) == {"tidegate": OURS}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            "version = 3\n",
            'version = 3\nimports = ["/etc/containerd/conf.d/tidegate*.toml"]\n',
            id="no imports",
        ),
        pytest.param(
            "# mine\n\n[grpc] # x\n  uid = 0\n[a]\nversion = 3",
            None,
            id="the version in another table",
        ),
        pytest.param(
            "imports = []   # none\nversion = 3",
            'imports = ["/etc/containerd/conf.d/tidegate*.toml"]   # none\nversion = 3',
            id="an empty array",
        ),
        pytest.param(
            "version = 3\nimports = ['/etc/x/*.toml'] # ]\n[grpc]\n",
            "version = 3\nimports = ['/etc/x/*.toml', \"/etc/containerd/conf.d/tidegate*.toml\"] # ]\n[grpc]\n",
            id="one line",
        ),
        pytest.param(
            'version = 3\n"imports" = [\n  # first\n  "/a]/*.toml", # the ], of a\n  "b.toml",\n]\n',
            'version = 3\n"imports" = [\n  # first\n  "/a]/*.toml", # the ], of a\n  "b.toml",\n'
            '  "/etc/containerd/conf.d/tidegate*.toml",\n]\n',
            id="a line each",
        ),
        pytest.param(
            'version = 3\r\ntext = """\r\nimports = [\r\n""""\r\n[grpc]\r\n',
            'version = 3\r\ntext = """\r\nimports = [\r\n""""\r\nimports = ["/etc/containerd/conf.d/tidegate*.toml"]\r\n[grpc]\r\n',
            id="CRLF, and a string that looks like it",
        ),
    ],
)
def test_a_drop_in_is_imported_where_tables_are_merged(root, capsys, before, after):
    put(root, CONFIG, before)
    whole = snapshot(root)
    if after is None:
        assert setup(root, "containerd") == 73
        assert "has no version, which means version 1" in capsys.readouterr().err
        return
    assert setup(root, "containerd") == 0
    assert text(root, CONFIG) == after
    assert handlers(text(root, DROP_IN), V3) == {"tidegate": OURS}
    assert tomllib.loads(text(root, DROP_IN))["version"] == 3
    second = snapshot(root)
    capsys.readouterr()
    assert setup(root, "containerd") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert snapshot(root) == second
    assert setup(root, "containerd", "--undo") == 0
    assert snapshot(root) == whole


@pytest.mark.parametrize(("spec", "noted"), [("", False), ("/etc/containerd/spec.json", True)])
def test_the_default_handlers_base_spec_is_named_where_it_has_one(root, capsys, spec, noted):
    """`containerd config default` writes an empty base_runtime_spec, which does not count."""
    runc = f"[plugins.'{V3}'.containerd.runtimes.runc]\nbase_runtime_spec = '{spec}'\n"
    put(root, CONFIG, "version = 4\n" + runc)
    assert setup(root, "containerd") == 0
    said = "note: the handler tidegate uses the base_runtime_spec of the handler runc\n"
    assert (said in capsys.readouterr().out) == noted


@pytest.mark.parametrize(
    "imports",
    [
        "/etc/containerd/conf.d/*.toml",
        "conf.d/*.toml",
        "./conf.d/../conf.d/tidegate.toml",
        "/etc/containerd/*/*.toml",
    ],
)
def test_a_directory_that_is_imported_needs_no_import(root, imports):
    content = f'version = 3\nimports = ["{imports}"]\n'
    put(root, CONFIG, content)
    setup(root, "containerd")
    assert text(root, CONFIG) == content
    setup(root, "containerd", "--undo")
    assert not (root / "etc/containerd/conf.d").exists()


def test_containerd_2_with_a_file_of_version_2_gets_a_drop_in_of_version_2(root):
    """A drop-in of a higher version than the main file keeps containerd 2 from starting."""
    put(root, CONFIG, NODE2)
    assert setup(root, "containerd", "--containerd-version", "2.1.4") == 0
    assert tomllib.loads(text(root, DROP_IN))["version"] == 2
    assert handlers(text(root, DROP_IN), V2)["tidegate"]["options"]["SystemdCgroup"] is True
    assert text(root, CONFIG).startswith(
        "# The node's containerd.\nversion = 2   # not 1\nroot = '''/var/lib/containerd'''\n"
        'imports = ["/etc/containerd/conf.d/tidegate*.toml"]\n'
    )


def test_containerd_2_without_a_file_continues_to_read_its_directory(root, capsys):
    put(root, "/etc/containerd/conf.d/other.toml", "version = 3\n")
    before = snapshot(root)
    assert setup(root, "containerd", "--containerd-version", "2.2") == 0
    assert tomllib.loads(text(root, CONFIG)) == {
        "version": 3,
        "imports": ["/etc/containerd/conf.d/*.toml"],
    }
    assert "conf.d/other.toml is imported" in capsys.readouterr().out
    setup(root, "containerd", "--undo")
    assert snapshot(root) == before
    # Versions before 2.2 import nothing by default. Files that were not read must stay unread.
    assert setup(root, "containerd", "--containerd-version", "2.1") == 0
    assert tomllib.loads(text(root, CONFIG))["imports"] == ["/etc/containerd/conf.d/tidegate*.toml"]
    assert "other.toml" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("version = ", "is not TOML: Invalid value"),
        ("[a]\n[a]\n", "is not TOML: "),
        ('disabled_plugins = ["cri"]\n', "has no version, which means version 1"),
        ("version = 1\n", "has version 1"),
        ("version = 9\n", "has version 9"),
        ('version = "3"\n', "has version '3'"),
        ("version = 3\nimports = 3\n", "imports is not an array"),
        (b"version = 3 # \xe9\n", "is not UTF-8"),
        (
            f"version = 2\nplugins = {{'{V2}' = {{containerd = {{}}}}}}\n",
            "no other table can be appended to ",
        ),
        (
            f"version = 2\n[plugins.'{V2}'.containerd.runtimes.tidegate.options]\nBinaryName = '/opt/x'\n",
            "runs /opt/x, not /usr/bin/tidegate-runtime",
        ),
        (
            f"version = 3\n[plugins.'{V3}'.containerd.runtimes.tidegate.options]\nBinaryName = '/usr/bin/tidegate-runtime'\n",
            "has no tidegate.gpu/* among its pod_annotations",
        ),
        (f"version = 3\n[plugins.'{V3}'.containerd.runtimes]\ntidegate = 3\n", "runs None, not"),
    ],
)
def test_a_file_that_is_not_understood_is_refused_in_one_line(root, capsys, content, words):
    put(root, CONFIG, content)
    before = snapshot(root)
    assert setup(root, "containerd") == 73
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert words in err
    assert snapshot(root) == before


def test_a_foreign_drop_in_is_refused(root, capsys):
    put(root, CONFIG, "version = 3\n")
    put(
        root,
        DROP_IN,
        f"[plugins.'{V3}'.containerd.runtimes.tidegate.options]\nBinaryName = '/opt/x'\n",
    )
    assert setup(root, "containerd") == 73
    assert "/opt/x" in capsys.readouterr().err


def test_an_import_that_replaces_the_section_is_refused_with_containerd_1(root, capsys):
    put(root, CONFIG, 'version = 2\nimports = ["conf.d/*.toml"]\n')
    put(
        root,
        "/etc/containerd/conf.d/99-nvidia.toml",
        f"[plugins.'{V2}'.containerd.runtimes.nvidia]\n",
    )
    assert setup(root, "containerd") == 73
    assert "99-nvidia.toml has a CRI section" in capsys.readouterr().err
    assert setup(root, "containerd", "--containerd-version", "2.0") == 0


def test_an_import_by_a_pattern_in_its_directory_is_read_as_containerd_reads_it(root, capsys):
    put(root, CONFIG, 'imports = ["/etc/containerd/*/site.toml"]\n' + NODE2)
    put(root, "/etc/containerd/extra/site.toml", f'version = 2\n[plugins."{V2}"]\n')
    assert setup(root, "containerd", "--containerd-version", "1.7") == 73
    assert "/extra/site.toml has a CRI section" in capsys.readouterr().err


KATA = """\
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.kata]
        runtime_type = "io.containerd.kata.v2"
"""


@pytest.mark.parametrize("systemd", [True, False])
def test_the_driver_of_control_groups_is_that_of_another_handler_where_the_default_has_none(
    root, capsys, systemd
):
    content = NODE2.replace('default_runtime_name = "runc"', 'default_runtime_name = "kata"')
    content = content.replace("\n# The end.", f"\n{KATA}")
    if not systemd:
        content = content.replace("SystemdCgroup = true", "SystemdCgroup = false")
    put(root, CONFIG, content)
    assert setup(root, "containerd") == 0
    assert "nothing is copied from it" in capsys.readouterr().out
    ours = handlers(text(root, CONFIG), V2)["tidegate"]["options"]
    assert ours.get("SystemdCgroup", False) is systemd


def test_the_table_of_containerd_1_for_its_default_is_used(root):
    content = NODE2.replace('    default_runtime_name = "runc"\n', "").replace(
        "containerd.runtimes.runc", "containerd.default_runtime"
    )
    put(root, CONFIG, content)
    assert setup(root, "containerd") == 0
    assert handlers(text(root, CONFIG), V2)["tidegate"]["options"]["SystemdCgroup"] is True


def test_a_disabled_cri_is_reported(root, capsys):
    put(root, CONFIG, f'version = 2\ndisabled_plugins = ["{V2}"]\n')
    assert setup(root, "containerd") == 0
    assert "note: CRI is among disabled_plugins" in capsys.readouterr().out


def test_later_edits_stay_in_config_toml(root, capsys):
    put(root, CONFIG, NODE2)
    setup(root, "containerd")
    edited = (
        text(root, CONFIG)
        .replace("pause:3.9", "pause:3.10")
        .replace("    SystemdCgroup = true\n", "    SystemdCgroup = false\n    Root = '/x'\n")
    )
    edited += "# more\n[plugins.'io.containerd.grpc.v1.cri'.registry]\n  config_path = 'certs.d'\n"
    put(root, CONFIG, edited)
    assert setup(root, "containerd", "--undo") == 0
    assert "has been edited since: only Tidegate's part is removed" in capsys.readouterr().out
    rest = text(root, CONFIG)
    assert "tidegate" not in rest
    assert rest.startswith(
        NODE2.replace("pause:3.9", "pause:3.10").replace(
            "SystemdCgroup = true", "SystemdCgroup = false\n    Root = '/x'"
        )
    )
    assert rest.endswith(
        "# more\n[plugins.'io.containerd.grpc.v1.cri'.registry]\n  config_path = 'certs.d'\n"
    )


def test_runc_stays_if_other_handlers_were_added(root):
    put(root, CONFIG, "version = 2\n")
    setup(root, "containerd")
    put(root, CONFIG, text(root, CONFIG) + f"[plugins.'{V2}'.containerd.runtimes.kata]\n")
    setup(root, "containerd", "--undo")
    assert set(handlers(text(root, CONFIG), V2)) == {"runc", "kata"}
    # The section is removed with our handler if there was none before.
    put(root, CONFIG, "version = 2\n")
    setup(root, "containerd")
    put(root, CONFIG, text(root, CONFIG) + "[grpc]\n")
    setup(root, "containerd", "--undo")
    assert tomllib.loads(text(root, CONFIG)) == {"version": 2, "grpc": {}}


def test_undo_keeps_edits_of_a_drop_in_and_of_imports(root):
    put(root, CONFIG, 'version = 3\nimports = ["/x.toml"]\n')
    setup(root, "containerd")
    put(
        root,
        DROP_IN,
        text(root, DROP_IN) + f"[plugins.'{V3}'.containerd.runtimes.other]\n# other's\n",
    )
    put(root, CONFIG, text(root, CONFIG).replace('"/x.toml"', '"/y.toml"'))
    assert setup(root, "containerd") == 0
    assert setup(root, "containerd", "--undo") == 0
    assert text(root, CONFIG) == 'version = 3\nimports = ["/y.toml"]\n'
    assert text(root, DROP_IN) == (
        f"version = 3\n[plugins.'{V3}'.containerd.runtimes.other]\n# other's\n"
    )
    # A drop-in with nothing else in it is removed, even if our tables in it were edited.
    (root / DROP_IN.lstrip("/")).unlink()
    setup(root, "containerd")
    put(root, DROP_IN, text(root, DROP_IN) + "    SystemdCgroup = true\n")
    setup(root, "containerd", "--undo")
    assert not (root / DROP_IN.lstrip("/")).exists()


def test_a_drop_in_that_is_not_imported_any_more_is_imported_again(root):
    put(root, CONFIG, "version = 3\n")
    setup(root, "containerd")
    put(root, DROP_IN, text(root, DROP_IN) + "    SystemdCgroup = true\n")
    put(root, CONFIG, "version = 3\n# anew\n")
    assert setup(root, "containerd") == 0
    assert "tidegate*.toml" in text(root, CONFIG)
    assert text(root, DROP_IN).endswith("SystemdCgroup = true\n")


def test_containerd_is_queried_where_it_is_installed(root, capsys, monkeypatch):
    """containerd is queried only for the machine's own root. Here the root is a different one, and
    the answers are faked.
    """
    put(root, CONFIG, "version = 3\n")
    said = {
        "--version": "containerd github.com/containerd/containerd/v2 v2.1.4 75cb2b7",
        "dump": f"version = 3\n[plugins.'{V3}'.containerd]\ndefault_runtime_name = 'runc'\n"
        f"[plugins.'{V3}'.containerd.runtimes.runc.options]\nBinaryName = ''\nSystemdCgroup = true\n",
    }
    asked = []

    def answer(_root, *command):
        asked.append(command)
        return said[command[-1]]

    monkeypatch.setattr("governor.setup.containerd.output", answer)
    assert setup(root, "containerd") == 0
    assert asked == [
        ("containerd", "--version"),
        ("containerd", "--config", CONFIG, "config", "dump"),
    ]
    # This is the kubelet's cgroup driver, which only the dump has here.
    assert handlers(text(root, DROP_IN), V3)["tidegate"]["options"] == {
        "BinaryName": "/usr/bin/tidegate-runtime",
        "SystemdCgroup": True,
    }
    setup(root, "containerd", "--undo")
    said["dump"] += (
        f"[plugins.'{V3}'.containerd.runtimes.tidegate.options]\nBinaryName = '/opt/x'\n"
    )
    assert setup(root, "containerd") == 73
    assert "in containerd config dump runs /opt/x" in capsys.readouterr().err


def test_a_base_spec_is_containerds_default_with_the_hook_and_without_what_cri_takes_out(
    root, capsys, monkeypatch
):
    put(root, CONFIG, "version = 3\n")
    before = snapshot(root)
    assert setup(root, "containerd", "--base-spec") == 73
    assert "needs ctr on this node" in capsys.readouterr().err
    default = {
        "ociVersion": "1.1.0",
        "process": {
            "cwd": "/",
            "noNewPrivileges": True,
            "apparmorProfile": "cri-containerd.apparmor.d",
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 1024, "soft": 1024}],
        },
        "linux": {"maskedPaths": ["/proc/kcore"], "seccomp": {"defaultAction": "SCMP_ACT_ERRNO"}},
    }
    said = {"ctr": json.dumps(default), "containerd": None}
    monkeypatch.setattr("governor.setup.containerd.output", lambda _root, *c: said[c[0]])
    assert setup(root, "containerd", "--base-spec") == 0
    assert handlers(text(root, DROP_IN), V3)["tidegate"] == {
        k: v for k, v in OURS.items() if k != "options"
    } | {"base_runtime_spec": SPEC}
    spec = json.loads(text(root, SPEC))
    assert spec["process"] == {"cwd": "/", "noNewPrivileges": True}
    assert spec["linux"] == {"maskedPaths": ["/proc/kcore"]}
    (hook,) = spec["hooks"]["createRuntime"]
    assert hook["args"] == ["tidegate-hook", "createRuntime"]
    assert hook["env"]
    done = snapshot(root)
    assert setup(root, "containerd", "--base-spec") == 0
    assert snapshot(root) == done
    # After an upgrade of containerd, only the spec is written again.
    said["ctr"] = json.dumps({**default, "ociVersion": "1.2.0"})
    assert setup(root, "containerd", "--base-spec") == 0
    assert json.loads(text(root, SPEC))["ociVersion"] == "1.2.0"
    assert {k: v for k, v in snapshot(root).items() if "etc" in k and "spec" not in k} == {
        k: v for k, v in done.items() if "etc" in k and "spec" not in k
    }
    assert setup(root, "containerd") == 73
    assert "--undo first" in capsys.readouterr().err
    assert setup(root, "containerd", "--undo") == 0
    assert snapshot(root) == before
    said["ctr"] = "[]"
    assert setup(root, "containerd", "--base-spec") == 73


def test_the_runtime_class_is_printed(root, capsys):
    assert setup(root, "containerd", "--runtime-class") == 0
    out = capsys.readouterr().out
    assert "kind: RuntimeClass\n" in out
    assert "\nhandler: tidegate\n" in out
    assert not (root / "etc").exists()


def test_a_program_that_fails_is_quoted(tmp_path, monkeypatch):
    from governor.errors import SetupError
    from governor.setup.files import Root

    put(
        tmp_path,
        "/containerd",
        "#!/bin/sh\necho first >&2; echo 'failed to load TOML' >&2; exit 3\n",
        0o755,
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(
        SetupError, match=r"containerd config dump exited with status 3: failed to load TOML"
    ):
        plan.output(Root("/"), "containerd", "config", "dump")
    assert plan.output(Root(str(tmp_path)), "containerd", "config", "dump") is None
    assert plan.output(Root("/"), "no-such-program") is None
