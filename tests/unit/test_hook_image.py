"""What the hook looks for in an image, and what can be in the way.

Real images are in tests/container/test_images.py.
"""

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


def test_an_endless_link_is_nothing(tmp_path: Path, rootfd: int) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("/one")
    assert image._find(rootfd, "one", as_loader=True) is None
    assert image._find(rootfd, "one/lib", as_loader=True) is None


def test_what_is_not_there_is_nothing_whatever_leads_there(tmp_path: Path, rootfd: int) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/up").symlink_to("../../../a/./b/none")
    (tmp_path / "a/file").write_text("")
    (tmp_path / "a/proc").symlink_to("b/proc/self")
    for path in ("a/up", "/a/up/lib", "a/file/x", "a/b/../none", "a/proc/root", "none/proc/self"):
        assert image._find(rootfd, path, as_loader=True) is None, path


@pytest.mark.parametrize("path", ["proc/self", "/proc//self/root/a", "a/../proc/none", "link/x"])
def test_a_way_through_proc_is_refused_where_it_ends_for_us(
    tmp_path: Path, rootfd: int, path: str
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("/a/../proc/self")
    with pytest.raises(ImageError, match="leads through /proc"):
        image._find(rootfd, path, as_loader=True)


def test_a_link_to_where_a_process_is_is_refused() -> None:
    """This applies wherever a list of processes is mounted."""
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
