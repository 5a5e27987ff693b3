"""The machine of a benchmark on a real GPU: overlays of this machine's root file system; no GPU is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.machine import Nvidia


@pytest.fixture
def machine(tmp_path: Path, build_dir: Path, require: Callable[..., None]) -> Iterator[Nvidia]:
    require("runc")
    machine = Nvidia(tmp_path, build_dir)
    yield machine
    machine.close()


def test_the_layers_of_a_container_go_with_its_bundle(machine: Nvidia, tmp_path: Path) -> None:
    layers = Path("/run") / f"tidegate-layers-{os.getpid()}"
    bundles = [tmp_path / name / "a" for name in ("one", "two", "three")]
    for bundle in bundles[:2]:
        machine.make_rootfs(bundle / "rootfs")
    machine.remove_bundle(bundles[0])
    assert len(list(layers.iterdir())) == 1
    machine.make_rootfs(bundles[2] / "rootfs")
    machine.make_rootfs(bundles[0] / "rootfs")
    assert len(list(layers.iterdir())) == 3
    for bundle in bundles:
        machine.remove_bundle(bundle)
        assert not bundle.exists()
    assert list(layers.iterdir()) == []
