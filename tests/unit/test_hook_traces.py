"""What the hook keeps in mind of containers, on the host's side; what it takes away shows tests/container/test_hook_start.py."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from oci_hook import traces
from oci_hook.traces import Trace, forget, remember, sweep, take_back

PID = 1 << 30  # nobody's


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "rootfs"
    (path / "run/tidegate").mkdir(parents=True)
    (path / "usr/bin").mkdir(parents=True)
    return path


def keep(tmp_path: Path, root: Path, ident: str = "c1", pid: int = PID) -> Path:
    made = [Trace("directory", "run/tidegate"), Trace("file", "usr/bin/nvidia-smi")]
    remember(str(tmp_path), ident, pid, str(root), made)
    return tmp_path / traces.DIRECTORY / ident


def test_only_what_is_empty_goes(tmp_path: Path, root: Path) -> None:
    file = root / "usr/bin/nvidia-smi"
    for directory, content in (("", b""), ("own", b"the container's")):
        (root / "run/tidegate" / directory).mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        record = keep(tmp_path, root)
        assert record.stat().st_mode & 0o777 == 0o600
        assert record.parent.stat().st_mode & 0o777 == 0o700
        take_back(str(tmp_path), "c1")
        assert not record.exists()
        assert (root / "run/tidegate").exists() == file.exists() == bool(content)


def test_nothing_goes_while_the_container_runs(tmp_path: Path, root: Path) -> None:
    """Two engines may have a container of one id; one that has ended and waits for its parent is no more."""
    with subprocess.Popen(["sleep", "100"]) as process:
        try:
            record = keep(tmp_path, root, pid=process.pid)
            take_back(str(tmp_path), "c1")
            assert (root / "run/tidegate").exists()
            assert record.exists()
        finally:
            process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        take_back(str(tmp_path), "c1")
        assert not (root / "run/tidegate").exists()
        assert not record.exists()


@pytest.mark.parametrize("ident", ["", ".", "..", "../c1", "a/b", "~c1", "a" * 201, "a\nb"])
def test_an_id_that_is_no_file_name_keeps_nothing(tmp_path: Path, root: Path, ident: str) -> None:
    remember(str(tmp_path), ident, PID, str(root), [Trace("directory", "run/tidegate")])
    assert not (tmp_path / traces.DIRECTORY).exists()
    take_back(str(tmp_path), ident)
    assert (root / "run/tidegate").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]\n[]", b'["/nowhere", 1073741824]\n[]', b'["/", 1073741824]\n[["directory", "tmp", {}]]', b"[1, 1073741824]\n3",
     b'["/tmp", 1073741824]\n[[]]', b'["/tmp", "x"]\n[]'],
)  # fmt: skip
def test_a_damaged_note_is_forgotten(tmp_path: Path, root: Path, content: bytes) -> None:
    record = keep(tmp_path, root)
    record.write_bytes(content)
    take_back(str(tmp_path), "c1")
    assert not record.exists()
    assert Path("/tmp").is_dir()


def test_notes_of_roots_that_are_gone_go(tmp_path: Path, root: Path) -> None:
    stays, goes = keep(tmp_path, root), keep(tmp_path, root / "usr", "c2")
    goes.write_text(goes.read_text().replace("/usr", "/gone"))
    (stays.parent / "odd").write_text("no note\n")
    sweep(str(tmp_path))
    assert (stays.exists(), goes.exists()) == (True, False)
    assert json.loads(stays.read_text().splitlines()[0]) == [str(root), PID]
    forget(str(tmp_path), "c1")
    forget(str(tmp_path), "c1")
    assert not stays.exists()
