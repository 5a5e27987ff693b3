"""The private view in which an engine checks its files before `tidegate setup` writes them, with real mount
namespaces.
"""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from governor.errors import SetupError
from governor.setup import view
from governor.setup.apply import Edit
from governor.setup.files import Root
from governor.setup.plan import Validation
from governor.setup.validate import validate
from tests.unit.setup_tree import put, snapshot


def shown(command: str, files: dict[str, bytes | None]) -> str:
    done = view.run(["sh", "-c", command], files)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_only_the_checking_program_sees_the_new_files(tmp_path: Path) -> None:
    put(tmp_path, "/conf.d/old", "old")
    put(tmp_path, "/conf.d/kept", "kept", 0o640)
    put(tmp_path, "/conf.d/gone", "gone")
    put(tmp_path, "/conf.d/deep/below", "below")
    (tmp_path / "conf.d/link").symlink_to("kept")
    before, mounts = snapshot(tmp_path), Path("/proc/self/mountinfo").read_text()
    seen = shown(
        f"cd {tmp_path}; cat conf.d/old conf.d/new conf.d/link conf.d/deep/below made/for/it; ls conf.d; "
        "stat -c %a conf.d conf.d/kept; readlink conf.d/link; cat top",
        {
            f"{tmp_path}/conf.d/old": b"OLD ",
            f"{tmp_path}/conf.d/new": b"NEW ",
            f"{tmp_path}/conf.d/gone": None,
            f"{tmp_path}/made/for/it": b" MADE\n",
            f"{tmp_path}/top": b"TOP\n",
        },
    )
    assert seen == "OLD NEW keptbelow MADE\ndeep\nkept\nlink\nnew\nold\n755\n640\nkept\nTOP\n"
    assert snapshot(tmp_path) == before
    assert Path("/proc/self/mountinfo").read_text() == mounts


def test_a_node_without_private_views_reports_that_nothing_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without CAP_SYS_ADMIN, for instance, the engine checks nothing, and setup continues."""
    monkeypatch.setattr(view, "CLONE_NEWNS", -1)
    edit = Edit(str(tmp_path / "file"), None, b"")
    why = "no private view of them could be created (unshare: Invalid argument)"
    assert validate(Root("/"), Validation(("true",)), [edit]) == [
        f"`true` could not check the new files, because {why}"
    ]


def test_a_file_in_the_root_directory_has_no_view_and_is_not_written() -> None:
    """A process does not see a mount over its own root."""
    file = Path("/tidegate-test-of-views")
    with pytest.raises(view.ViewError, match=r"^/: cannot be covered$"):
        view.run(["true"], {str(file): b""})
    assert not file.exists()


def tell(script: str, tmp_path: Path, **how: object) -> list[str]:
    """Validate one new file with a shell script that stands in for an engine's program."""
    validation = Validation(("sh", "-c", script), **how)  # type: ignore[arg-type]
    return validate(Root("/"), validation, [Edit(str(tmp_path / "d/file"), None, b"new\n")])


def test_the_engines_message_is_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "d/file"
    assert tell(f"test $(cat {path}) = new", tmp_path) == []
    with pytest.raises(SetupError) as caught:
        tell(f"echo usage >&2; echo 'bad' $(cat {path}) >&2; echo >&2; exit 3", tmp_path)
    assert str(caught.value).endswith(
        "exits with status 3: bad new; nothing was changed; correct that first"
    )
    assert str(caught.value).startswith("with the new files, `sh -c ")
    assert not path.parent.exists()


def test_a_version_without_the_command_leaves_the_files_unchecked(tmp_path: Path) -> None:
    script = "echo 'unknown flag: --validate' >&2; exit 125"
    [line] = tell(script, tmp_path, unsupported=("unknown flag",))
    assert line.startswith("this sh does not support `sh -c ")
    assert line.endswith("`, so the new files were not checked")
    with pytest.raises(SetupError, match="exits with status 125: unknown flag"):
        tell(script, tmp_path)


def test_the_engines_output_is_checked(tmp_path: Path) -> None:
    assert tell("echo fine", tmp_path, check=lambda said: None if "fine" in said else "it") == []
    with pytest.raises(SetupError, match="with the new files, the handler is not there; nothing"):
        tell("echo fine", tmp_path, check=lambda _said: "the handler is not there")


def test_a_missing_program_is_reported_and_no_program_runs_for_another_root(
    tmp_path: Path,
) -> None:
    edit = Edit("/etc/engine.conf", None, b"")
    assert validate(Root("/"), Validation(("no-such-engine",)), [edit]) == [
        "no-such-engine is not installed, so the new files were not checked"
    ]
    assert validate(Root(str(tmp_path)), Validation(("false",)), [edit]) == []
    assert validate(Root("/"), Validation(("false",)), []) == []


def test_a_link_is_followed_and_its_target_has_the_new_content(tmp_path: Path) -> None:
    put(tmp_path, "/real/file", "old")
    (tmp_path / "link").symlink_to("real/file")
    script = f"cat {tmp_path}/real/file {tmp_path}/link"
    edit = Edit(str(tmp_path / "link"), b"old", b"new")
    found: list[str] = []
    assert validate(Root("/"), Validation(("sh", "-c", script), check=found.append), [edit]) == []
    assert found == ["newnew"]
    assert stat.S_ISLNK((tmp_path / "link").lstat().st_mode)
    assert (
        subprocess.run(["cat", tmp_path / "link"], check=True, capture_output=True).stdout == b"old"
    )
