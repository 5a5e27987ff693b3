"""`tidegate setup docker`: daemon.json gets one more runtime and keeps its formatting."""

from __future__ import annotations

import base64
import json
import os

import pytest

from governor.errors import SetupError
from governor.setup import apply
from governor.setup.files import Root
from tests.conftest import lack
from tests.unit.setup_tree import (
    put,
    put_crio_programs,
    put_process,
    put_programs,
    setup,
    snapshot,
    text,
)

CONFIG = "/etc/docker/daemon.json"
JOURNAL = "/var/lib/tidegate/setup/journal.json"
OURS = {"path": "/usr/bin/tidegate-runtime"}


@pytest.fixture
def root(tmp_path):
    put_programs(tmp_path)
    return tmp_path


def test_a_missing_daemon_json_is_created_and_undo_removes_it(root, capsys):
    before = snapshot(root)
    assert setup(root, "docker") == 0
    assert text(root, CONFIG) == (
        '{\n  "runtimes": {\n    "tidegate": {\n      "path": "/usr/bin/tidegate-runtime"\n    }\n  }\n}\n'
    )
    out = capsys.readouterr().out
    assert f"--- /dev/null\n+++ {root}{CONFIG}\n" in out
    assert "to do: systemctl reload docker" in out
    assert "note:" not in out
    assert (root / "etc/docker/daemon.json").stat().st_mode & 0o777 == 0o644
    assert (root / JOURNAL.lstrip("/")).stat().st_mode & 0o777 == 0o600
    assert (root / "var/lib/tidegate/setup").stat().st_mode & 0o777 == 0o700
    assert setup(root, "docker", "--undo") == 0
    assert snapshot(root) == before
    assert f"docker: {root}{CONFIG} removed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            '{\n    "debug": true,\n    "log-opts": {"max-size": "10m"}\n}',
            '{\n    "debug": true,\n    "log-opts": {"max-size": "10m"},\n    "runtimes": {\n        "tidegate": {\n'
            '            "path": "/usr/bin/tidegate-runtime"\n        }\n    }\n}',
            id="four spaces, no newline at the end",
        ),
        pytest.param(
            '{\n\t"runtimes": {\n\t\t"nvidia": {"args": [], "path": "nvidia-container-runtime"}\n\t},\n\t"debug" : false\n}\n',
            '{\n\t"runtimes": {\n\t\t"nvidia": {"args": [], "path": "nvidia-container-runtime"},\n\t\t"tidegate": {\n'
            '\t\t\t"path": "/usr/bin/tidegate-runtime"\n\t\t}\n\t},\n\t"debug" : false\n}\n',
            id="tabs, and an existing runtime",
        ),
        pytest.param(
            '{"debug":true,"hosts":["unix:///run/docker.sock"]}\n',
            '{"debug":true,"hosts":["unix:///run/docker.sock"],"runtimes":{"tidegate":{"path":"/usr/bin/tidegate-runtime"}}}\n',
            id="one line",
        ),
        pytest.param(
            '{\r\n  "debug": true\r\n}\r\n',
            '{\r\n  "debug": true,\r\n  "runtimes": {\r\n    "tidegate": {\r\n      "path": "/usr/bin/tidegate-runtime"\r\n'
            "    }\r\n  }\r\n}\r\n",
            id="CRLF",
        ),
        pytest.param(
            '\ufeff{ "runtimes": {} }',
            '\ufeff{ "runtimes": {"tidegate": {"path": "/usr/bin/tidegate-runtime"}} }',
            id="a byte order mark, and no runtimes yet",
        ),
        pytest.param(
            '{ "a }": "{ \\" : ,",\n  "labels": ["x",\n     "y"] }',
            '{ "a }": "{ \\" : ,",\n  "labels": ["x",\n     "y"],\n  "runtimes": {\n    "tidegate": {\n'
            '      "path": "/usr/bin/tidegate-runtime"\n    }\n  } }',
            id="odd, with braces in strings",
        ),
        pytest.param(
            " \n",
            '{\n  "runtimes": {\n    "tidegate": {\n      "path": "/usr/bin/tidegate-runtime"\n    }\n  }\n} \n',
            id="empty",
        ),
    ],
)
def test_existing_content_keeps_its_formatting(root, capsys, before, after):
    put(root, CONFIG, before, 0o600)
    whole = snapshot(root)
    assert setup(root, "docker") == 0
    assert text(root, CONFIG) == after
    assert (root / "etc/docker/daemon.json").stat().st_mode & 0o777 == 0o600
    capsys.readouterr()
    second = snapshot(root)
    assert setup(root, "docker") == 0
    assert capsys.readouterr().out == "docker: already set up, nothing to do\n"
    assert snapshot(root) == second
    assert setup(root, "docker", "--undo") == 0
    assert snapshot(root) == whole


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON: Expecting property name"),
        ('{"debug": true,}', "is not JSON: "),
        ("[]", "is not JSON: it is not a JSON object"),
        ('{"debug": NaN}', "is not JSON: NaN is not JSON"),
        ('{"runtimes": {}, "runtimes": {}}', 'is not JSON: "runtimes" occurs twice'),
        ('{"a": ' * 100_000, "is not JSON: it is nested too deeply"),
        (b'{"debug": "\xff"}', "is not UTF-8 at byte 11"),
        ('{"runtimes": null}', '"runtimes" in'),
        ('{"runtimes": {"tidegate": {"path": "/opt/other"}}}', "not /usr/bin/tidegate-runtime"),
        ('{"runtimes": {"tidegate": "x"}}', "not /usr/bin/tidegate-runtime"),
        (b" " * ((4 << 20) + 1), "is larger than 4 MiB"),
    ],
)
def test_an_invalid_file_or_a_foreign_runtime_is_refused_in_one_line(root, capsys, content, words):
    put(root, CONFIG, content)
    before = snapshot(root)
    assert setup(root, "docker") == 73
    err = capsys.readouterr().err
    assert err.startswith("tidegate: ")
    assert err.count("\n") == 1
    assert words in err
    assert CONFIG in err
    assert snapshot(root) == before


def test_a_dry_run_shows_the_difference_and_writes_nothing(root, capsys):
    put(root, CONFIG, '{\n  "debug": true\n}\n')
    before = snapshot(root)
    assert setup(root, "docker", "--dry-run") == 0
    assert capsys.readouterr().out == (
        f'--- {root}{CONFIG}\n+++ {root}{CONFIG}\n@@ -1,3 +1,8 @@\n {{\n-  "debug": true\n+  "debug": true,\n'
        '+  "runtimes": {\n+    "tidegate": {\n+      "path": "/usr/bin/tidegate-runtime"\n+    }\n+  }\n }\n'
        f"docker: {root}{CONFIG} would be written\n"
        "to do: systemctl reload docker    # dockerd rereads its runtimes; containers keep running\n"
    )
    assert snapshot(root) == before
    setup(root, "docker")
    capsys.readouterr()
    before = snapshot(root)
    assert setup(root, "docker", "--undo", "--dry-run") == 0
    assert f"{CONFIG} would be written" in capsys.readouterr().out
    assert snapshot(root) == before


def test_a_runtime_of_ours_with_arguments_is_kept(root, capsys):
    put(root, CONFIG, json.dumps({"runtimes": {"tidegate": {**OURS, "runtimeArgs": ["--debug"]}}}))
    before = snapshot(root)
    assert setup(root, "docker") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert snapshot(root) == before


def test_the_default_runtime_goes_back_to_what_it_was(root):
    put(root, CONFIG, '{"default-runtime": "nvidia", "debug": true}')
    before = snapshot(root)
    assert setup(root, "docker", "--default") == 0
    assert json.loads(text(root, CONFIG)) == {
        "default-runtime": "tidegate",
        "debug": True,
        "runtimes": {"tidegate": OURS},
    }
    edited = json.loads(text(root, CONFIG)) | {"live-restore": True}
    done = snapshot(root)
    setup(root, "docker", "--undo")
    assert snapshot(root) == before
    # The file has been edited since: only our part is removed, and the former default restored.
    setup(root, "docker", "--default")
    assert snapshot(root) == done
    put(root, CONFIG, json.dumps(edited))
    assert setup(root, "docker", "--undo") == 0
    assert (
        text(root, CONFIG) == '{"default-runtime": "nvidia", "debug": true, "live-restore": true}'
    )


def test_a_missing_runtime_does_not_become_the_default(tmp_path, capsys):
    assert setup(tmp_path, "docker", "--default") == 73
    assert "with --default no container would start; install it first" in capsys.readouterr().err
    assert setup(tmp_path, "docker") == 0
    assert "note: " in capsys.readouterr().out


def test_later_edits_stay_and_are_reported(root, capsys):
    put(root, CONFIG, '{\n  "debug": true\n}\n')
    setup(root, "docker")
    edited = (
        text(root, CONFIG)
        .replace('"tidegate": {', '"kata": {"path": "/usr/bin/kata"},\n    "tidegate": {')
        .replace('"debug": true', '"debug": false')
    )
    put(root, CONFIG, edited)
    capsys.readouterr()
    assert setup(root, "docker", "--undo") == 0
    assert "has been edited since: only Tidegate's part is removed" in capsys.readouterr().out
    assert text(root, CONFIG) == (
        '{\n  "debug": false,\n  "runtimes": {\n    "kata": {"path": "/usr/bin/kata"}\n  }\n}\n'
    )
    assert not (root / "var").exists()


def test_a_file_of_ours_that_others_have_edited_stays(root):
    setup(root, "docker")
    put(root, CONFIG, json.dumps({**json.loads(text(root, CONFIG)), "debug": True}, indent=2))
    assert setup(root, "docker", "--undo") == 0
    assert text(root, CONFIG) == '{\n  "debug": true\n}'
    # A file that differs only in its formatting is removed as well.
    (root / "etc/docker/daemon.json").unlink()
    setup(root, "docker")
    put(root, CONFIG, json.dumps(json.loads(text(root, CONFIG))))
    setup(root, "docker", "--undo")
    assert not (root / "etc/docker/daemon.json").exists()


def test_a_file_that_has_become_invalid_is_left_and_so_is_the_journal(root, capsys):
    put(root, CONFIG, "{}")
    setup(root, "docker")
    put(root, CONFIG, text(root, CONFIG) + "}")
    before = snapshot(root)
    assert setup(root, "docker", "--undo") == 73
    assert "Tidegate's part cannot be told from the rest" in capsys.readouterr().err
    assert snapshot(root) == before


def test_a_file_that_was_removed_in_the_meantime_is_not_created_again(root):
    put(root, CONFIG, '{"debug": true}')
    setup(root, "docker")
    (root / "etc/docker/daemon.json").unlink()
    assert setup(root, "docker", "--undo") == 0
    assert not (root / "etc/docker/daemon.json").exists()
    assert not (root / "var").exists()


def test_undo_after_two_runs_with_an_edit_between_restores_the_edit(root):
    put(root, CONFIG, '{"debug": true}')
    setup(root, "docker")
    put(root, CONFIG, text(root, CONFIG).replace("true", "false"))
    setup(root, "docker", "--default")
    assert setup(root, "docker", "--undo") == 0
    assert text(root, CONFIG) == '{"debug": false}'


def test_undo_without_a_setup_does_nothing(root, capsys):
    before = snapshot(root)
    assert setup(root, "docker", "--undo") == 0
    assert "not set up by this command, nothing to undo" in capsys.readouterr().out
    assert snapshot(root) == before


def test_a_link_is_followed_below_the_root_and_stays_a_link(root):
    real = put(root, "/srv/conf/daemon.json", "{}")
    (root / "etc/docker").mkdir(parents=True)
    # An absolute link leads to the path below the node's root.
    (root / "etc/docker/daemon.json").symlink_to("/srv/conf/daemon.json")
    before = snapshot(root)
    assert setup(root, "docker") == 0
    assert (root / "etc/docker/daemon.json").is_symlink()
    assert json.loads(real.read_text()) == {"runtimes": {"tidegate": OURS}}
    assert setup(root, "docker", "--undo") == 0
    assert snapshot(root) == before


def test_a_link_out_of_the_root_leads_nowhere(root, tmp_path_factory, capsys):
    outside = tmp_path_factory.mktemp("outside") / "daemon.json"
    outside.write_text("{}")
    (root / "etc/docker").mkdir(parents=True)
    for target in (str(outside), os.path.relpath(outside, root / "etc/docker")):
        (root / "etc/docker/daemon.json").unlink(missing_ok=True)
        (root / "etc/docker/daemon.json").symlink_to(target)
        assert setup(root, "docker") == 73
        assert "is a symbolic link that does not point to a file under" in capsys.readouterr().err
    (root / "etc/docker/daemon.json").unlink()
    (root / "etc/docker").rmdir()
    (root / "etc/docker").symlink_to(outside.parent)
    assert setup(root, "docker") == 73
    assert outside.read_text() == "{}"
    assert list(outside.parent.iterdir()) == [outside]


@pytest.mark.parametrize("kind", ["fifo", "directory"])
def test_a_file_that_is_not_regular_is_refused(root, capsys, kind):
    (root / "etc/docker").mkdir(parents=True)
    place = root / "etc/docker/daemon.json"
    os.mkfifo(place) if kind == "fifo" else place.mkdir()
    assert setup(root, "docker") == 73
    assert "is not a regular file" in capsys.readouterr().err


def test_dockerd_is_not_given_its_default_twice(root, capsys):
    unit = put(
        root,
        "/etc/systemd/system/docker.service.d/run.conf",
        "[Service]\nExecStart=/usr/bin/dockerd --default-runtime=kata --add-runtime kata=/usr/bin/kata\n",
    )
    before = snapshot(root)
    assert setup(root, "docker", "--default") == 73
    assert "starts dockerd with --default-runtime" in capsys.readouterr().err
    assert snapshot(root) == before
    assert setup(root, "docker") == 0
    unit.write_text("# ExecStart=/usr/bin/dockerd --default-runtime=kata\n")
    assert setup(root, "docker", "--default") == 0


@pytest.mark.parametrize(
    ("files", "where"),
    [
        (
            {
                "/run/systemd/system/docker.service": "[Service]\nExecStart=dockerd --default-runtime runc\n"
            },
            "/run/systemd/system/docker.service",
        ),
        (
            {
                "/run/systemd/system/docker.service.d/e.conf": "[Service]\nEnvironmentFile=-/etc/docker/opts\n",
                "/etc/docker/opts": "OPTIONS='--default-runtime=runc'\n",
            },
            "/etc/docker/opts",
        ),
        (
            {
                "/usr/local/lib/systemd/system/docker.service": "[Service]\nEnvironmentFile=/etc/opts/*.env\n",
                "/etc/opts/a.env": "#--default-runtime=runc\n",
                "/etc/opts/b.env": "O=--default-runtime=runc\n",
            },
            "/etc/opts/b.env",
        ),
        ({"/etc/conf.d/docker": 'DOCKER_OPTS="--default-runtime=runc"\n'}, "/etc/conf.d/docker"),
    ],
)
def test_a_default_is_found_wherever_dockerd_gets_it_from(root, capsys, files, where):
    for path, content in files.items():
        put(root, path, content)
    assert setup(root, "docker", "--default") == 73
    assert f"{root}{where} starts dockerd with --default-runtime" in capsys.readouterr().err


def test_a_running_dockerd_with_its_own_default_is_found(root, capsys):
    put_process(root, 4711, "/usr/bin/dockerd", "--host=fd://", "--default-runtime=runc")
    assert setup(root, "docker", "--default") == 73
    assert "process 4711 starts dockerd with --default-runtime" in capsys.readouterr().err
    put_process(root, 4712, "/usr/bin/dockerd", "--host=fd://")
    (root / "proc/4711/cmdline").write_text("/usr/bin/other\0--default-runtime=runc\0")
    assert setup(root, "docker", "--default") == 0


def test_a_masked_unit_is_ignored(root):
    (root / "etc/systemd/system").mkdir(parents=True)
    (root / "etc/systemd/system/docker.service").symlink_to("/dev/null")
    assert setup(root, "docker", "--default") == 0


def test_setup_advises_that_the_wrapper_add_the_hook_of_the_same_directory(root, capsys):
    put_programs(root, "/opt/bin")
    put_crio_programs(root)
    for engine in ("docker", "containerd", "crio"):
        setup(root, engine, "--bin-dir", "/opt/bin", "--dry-run")
        assert (
            "note: the wrapper runtime adds /usr/bin/tidegate-hook: write `hook /opt/bin/tidegate-hook` "
            f"to {root}/etc/tidegate/runtime\n"
        ) in capsys.readouterr().out
    put(root, "/etc/tidegate/runtime", "# here\nhook /opt/bin/tidegate-hook\n")
    setup(root, "docker", "--bin-dir", "/opt/bin", "--dry-run")
    assert "note:" not in capsys.readouterr().out


def test_options_choose_another_program_directory_and_another_file(root):
    put_programs(root, "/opt/tidegate/bin")
    config = "/home/u/.config/docker/daemon.json"
    assert setup(root, "docker", "--bin-dir", "/opt/tidegate/bin/", "--config", config) == 0
    assert json.loads(text(root, config)) == {
        "runtimes": {"tidegate": {"path": "/opt/tidegate/bin/tidegate-runtime"}}
    }
    assert not (root / "etc").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("docker", "--base-spec"),
        ("podman", "--default"),
        ("docker", "--bin-dir", "x"),
        ("podman", "--config", "/x"),
    ],
)
def test_options_of_other_engines_are_refused(root, capsys, words):
    assert setup(root, *words) == 65
    assert capsys.readouterr().err.count("\n") == 1


def test_after_a_failed_write_all_changes_are_undone(root, monkeypatch):
    """The drop-in is written, but config.toml cannot be."""
    put(root, "/etc/containerd/config.toml", "version = 3\n")
    before = snapshot(root)
    real = Root.write

    def fail(self, path, data, *, mode=0o644):
        if path.endswith("config.toml"):
            assert (root / "etc/containerd/conf.d/tidegate.toml").exists()
            raise SetupError("no room", hint="make some")
        real(self, path, data, mode=mode)

    monkeypatch.setattr(Root, "write", fail)
    assert setup(root, "containerd") == 73
    assert snapshot(root) == before


def test_a_file_that_changes_during_planning_is_not_overwritten(root):
    put(root, CONFIG, '{"debug": true}')
    put(root, "/var/lib/tidegate/state.db", "")
    before = snapshot(root)
    with pytest.raises(
        SetupError, match="was changed by another program in the meantime; run the command again"
    ):
        apply.set_up(Root(str(root)), "docker", [apply.Edit(CONFIG, b"{}", b'{"runtimes": {}}')])
    assert snapshot(root) == before
    setup(root, "docker")
    done = snapshot(root)
    with pytest.raises(SetupError, match="was changed by another program in the meantime"):
        apply.undo(Root(str(root)), "docker", [apply.Edit(CONFIG, b"{}", b"{}")])
    assert snapshot(root) == done


def test_owner_and_labels_stay(root):
    file = put(root, CONFIG, "{}", 0o640)
    if os.geteuid() == 0:
        os.chown(file, 12, 34)
    owner = file.stat().st_uid, file.stat().st_gid
    try:
        os.setxattr(file, "user.label", b"x")
    except OSError:
        lack("the file system has no attributes")
    for words in (("docker",), ("docker", "--undo")):
        setup(root, *words)
        assert (file.stat().st_uid, file.stat().st_gid) == owner
        assert os.getxattr(file, "user.label") == b"x"


def test_a_setup_that_was_killed_can_be_undone(root):
    """The setup was killed after it wrote the journal and before it wrote the file."""
    put(root, CONFIG, '{"debug": true}')
    before = snapshot(root)
    setup(root, "docker")
    put(root, CONFIG, '{"debug": true}')
    setup(root, "docker", "--undo")
    assert snapshot(root) == before


def test_a_damaged_journal_is_refused(root, capsys):
    for content in (
        "",
        "{}",
        '{"version": 2}',
        "[]",
        '{"version": 1, "engines": {"docker": [1]}, "directories": {}}',
    ):
        put(root, JOURNAL, content)
        assert setup(root, "docker") == 73
        assert JOURNAL in capsys.readouterr().err


def test_the_journal_contains_the_original_bytes(root):
    put(root, CONFIG, '{"debug": true}')
    setup(root, "docker")
    (entry,) = json.loads(text(root, JOURNAL))["engines"]["docker"]
    assert entry["path"] == CONFIG
    assert base64.b64decode(entry["steps"][0]["before"]) == b'{"debug": true}'
    assert base64.b64decode(entry["steps"][0]["after"]).decode() == text(root, CONFIG)
