"""Parsing the version of an engine or a runtime, as Debian's, Docker's and upstream's builds print it."""

from __future__ import annotations

import pytest

from governor.setup import plan
from governor.versions import parse_version


@pytest.mark.parametrize(
    ("said", "version"),
    [
        # Debian 12, 13 and the next one
        ("Docker version 20.10.24+dfsg1, build 297e128", (20, 10, 24)),
        ("Docker version 26.1.5+dfsg1, build 411e817", (26, 1, 5)),
        ("Docker version 28.5.2+dfsg4, build 3ef3c07c883be49a2e8097bcf6d2952fce1d70eb", (28, 5, 2)),
        (
            "containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u3\n",
            (1, 6, 20),
        ),
        (
            "containerd github.com/containerd/containerd 1.7.24~ds1 1.7.24~ds1-6+deb13u1\n",
            (1, 7, 24),
        ),
        ("containerd github.com/containerd/containerd/v2 2.1.9+unknown \n", (2, 1, 9)),
        ("podman version 4.3.1\n", (4, 3, 1)),
        ("podman version 5.8.6\n", (5, 8, 6)),
        ("runc version 1.1.5+ds1\ncommit: 1.1.5+ds1-1+deb12u1\nspec: 1.0.2-dev", (1, 1, 5)),
        ("runc version 1.3.6+ds1\ncommit: 1.3.6+ds1-1\nspec: 1.2.1", (1, 3, 6)),
        ("crun version 1.8.1\ncommit: f8a096be060b22ccd3d5f3ebe44108517fbf6c30", (1, 8, 1)),
        ("crun version 1.28\ncommit: 1.28-1", (1, 28, 0)),
        # Ubuntu 24.04
        ("containerd github.com/containerd/containerd 1.7.12 ", (1, 7, 12)),
        ("Docker version 24.0.7, build 24.0.7-0ubuntu4", (24, 0, 7)),
        # Docker's own packages
        ("Docker version 29.7.2, build d9be8d3", (29, 7, 2)),
        ("containerd containerd.io 1.7.24 88bf19b2105c8b17560993bee28a01ddc2f97182", (1, 7, 24)),
        ("containerd containerd.io v2.1.5 fcd43222d6b07379a4be9786bda52438f0dd16a1", (2, 1, 5)),
        # Upstream's releases, and builds from a checkout
        ("containerd github.com/containerd/containerd v1.7.27 05044ec0a9a75232cad4", (1, 7, 27)),
        ("containerd github.com/containerd/containerd/v2 v2.3.4 abc", (2, 3, 4)),
        ("containerd github.com/containerd/containerd/v2 v2.4.0-beta.0-12-gabc1.2", (2, 4, 0)),
        ("crio version 1.36.3\nVersion:        1.36.3\nGitCommit: unknown", (1, 36, 3)),
        ("podman version 6.1.1", (6, 1, 1)),
        ("podman version 6.0.0-dev", (6, 0, 0)),
        ("runc version 1.4.0\ncommit: v1.4.0-0-g8bd78a99", (1, 4, 0)),
        ("crun version 1.29.1\ncommit: 1.29.1", (1, 29, 1)),
        ("nerdctl version 2.0.3", (2, 0, 3)),
        ("containerd github.com/containerd/containerd/v2 dev abc1234", None),
        ("unknown", None),
        ("", None),
    ],
)
def test_versions_are_read_as_programs_print_them(
    said: str, version: tuple[int, ...] | None
) -> None:
    assert parse_version(said) == version
    assert plan.version(said) == (version and version[:2])


def test_a_missing_program_has_no_version() -> None:
    assert plan.version(None) is None
