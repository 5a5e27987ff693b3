"""Podman 6 starts containers by quota: the tests of test_engines.py that concern Podman, on a
different kind of node.

Podman 6 refuses control groups of version 1, so its node has only version 2. Debian has it in experimental.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.container import test_engines as others
from tests.container.engines import Engine, Podman, PodmanCrun
from tests.container.test_engines import EngineSite, make_site, used

pytestmark = pytest.mark.slow

# Each of these tests uses the fixtures `site` and `engine`, which this module defines for itself.
test_governed = others.test_a_container_with_annotations_is_governed
test_named = others.test_a_container_is_shown_under_its_engines_name
test_plain = others.test_a_container_without_annotations_is_the_same_as_without_tidegate
test_refused = others.test_a_wrong_annotation_fails_the_start_with_our_line
test_optional = others.test_an_optional_driver_is_mounted_if_the_image_supports_it
test_executed = others.test_a_program_executed_in_a_container_is_governed
test_cdi = others.test_a_device_of_cdi_is_governed_without_our_runtime


@pytest.fixture(scope="module")
def site(
    tmp_path_factory: pytest.TempPathFactory, build_dir: Path, require: Callable[..., None]
) -> Iterator[EngineSite]:
    require("gcc", "nsenter", "unshare", "setpriv")
    yield from make_site("experimental", tmp_path_factory.mktemp("e"), build_dir, cgroup2_only=True)


@pytest.fixture(params=[Podman, PodmanCrun], ids=lambda kind: kind.name)
def engine(site: EngineSite, request: pytest.FixtureRequest) -> Iterator[Engine]:
    yield from used(site, request.param)


def test_a_restarted_container_is_governed_again(site: EngineSite, engine: Engine) -> None:
    others.test_a_restarted_container_is_governed_again(site, engine)


def test_a_commit_of_an_ended_container_contains_nothing_of_ours(
    site: EngineSite, engine: Engine
) -> None:
    others.test_a_commit_of_an_ended_container_contains_nothing_of_ours(site, engine)
