"""Tests of path resolution in oci_hook.image. tests/container/test_images.py uses real images."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from oci_hook import image
from oci_hook.errors import ImageError


@pytest.fixture
def rootfd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_a_loop_of_links_is_not_found(tmp_path: Path, rootfd: int) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("/one")
    assert image._find(rootfd, "one", as_loader=True) is None
    assert image._find(rootfd, "one/lib", as_loader=True) is None


def test_a_missing_path_is_not_found_behind_any_link(tmp_path: Path, rootfd: int) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/up").symlink_to("../../../a/./b/none")
    (tmp_path / "a/file").write_text("")
    (tmp_path / "a/proc").symlink_to("b/proc/self")
    for path in ("a/up", "/a/up/lib", "a/file/x", "a/b/../none", "a/proc/root", "none/proc/self"):
        assert image._find(rootfd, path, as_loader=True) is None, path


@pytest.mark.parametrize("path", ["proc/self", "/proc//self/root/a", "a/../proc/none", "link/x"])
def test_a_path_through_proc_is_refused(tmp_path: Path, rootfd: int, path: str) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("/a/../proc/self")
    with pytest.raises(ImageError, match="leads through /proc"):
        image._find(rootfd, path, as_loader=True)


def test_a_link_to_a_root_or_directory_of_a_process_is_refused() -> None:
    """This applies to any directory on which procfs is mounted."""
    rootfd = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    try:
        for path in ("self/root/none", f"{os.getpid()}/cwd", "self/root"):
            with pytest.raises(ImageError, match="leads through /proc"):
                image._find(rootfd, path, as_loader=True)
        found = image._find(rootfd, "self/status", as_loader=True)
        assert found is not None
        os.close(found)
    finally:
        os.close(rootfd)
