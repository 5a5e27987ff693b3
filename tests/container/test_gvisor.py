"""gVisor's runsc instead of runc: a container that asks for a GPU is refused in one line, and
other containers run as they would without Tidegate.

runsc is from Debian's package, which is in the root file systems of the engines. It runs containers
on its default platform, ptrace in bookworm and systrap in trixie, without the network and, outside
of a node, without control groups. Newer packages (forky, resolute, stonking) have the same source
as trixie's (July 2024), but their Go version makes gVisor confuse goroutines: of 40 containers with
six processes, 15 to 19 ended with gVisor's "panic: running on goroutine", and none with bookworm's
or trixie's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from tests.container.bundles import HOOK, DiskBundle, Runtime
from tests.container.conftest import HookNode
from tests.container.engine_host import machine
from tests.container.engines import Docker, Engine, Podman, Started, StartError
from tests.container.test_engines import (
    GOOD,
    IDLE,
    EngineSite,
    OldDocker,
    make_site,
    old_docker,
    unpacked,
    used,
)
from tests.container.test_runtime import WrappedRuntime, plain, write_settings

WRAPPER = HOOK.with_name("tidegate-runtime")
REFUSAL = (
    "tidegate: the runtime {} (gVisor) is not supported: its containers have a kernel of their own, which mounts"
    " and devices of the host do not reach; start containers that ask for a GPU with runc or crun"
)
KERNEL = "Linux version 4.4.0 "  # version that gVisor's kernel reports


class Runsc(Runtime):
    """runsc, with a state directory of its own."""

    def command(self, *arguments: str) -> list[str]:
        """Return the command line for a command of runsc."""
        options = ["--root", str(self.state), "--ignore-cgroups", "--network=none"]
        return [self.name, *options, *arguments]


class WrappedRunsc(WrappedRuntime, Runsc):
    """runsc behind the wrapper."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(suite, marks=[] if suite == machine() else [pytest.mark.slow])
        for suite in ("bookworm", "trixie")
    ],
)
def suite(request: pytest.FixtureRequest) -> str:
    """A release of Debian."""
    found: str = request.param
    return found


@pytest.fixture
def program(suite: str) -> str:
    """The release's runsc, which is linked statically."""
    return str(unpacked(suite) / "usr/bin/runsc")


def test_the_hook_reports_that_runsc_is_not_supported(
    node: HookNode, program: str, tmp_path: Path
) -> None:
    ran = Runsc(program, tmp_path / "state").run(node.bundle("true"))
    assert ran.status == 128
    assert f"\nstderr: {REFUSAL.format('runsc')}\n" in ran.stderr
    failed, ended = node.events()
    assert failed["code"] == "bundle"
    assert ended["stage"] == "poststop"
    assert [request["op"] for request in node.governor.requests] == ["release"]
    assert not list((tmp_path / "state").iterdir())


def test_the_hook_lets_runsc_start_a_container_that_asks_for_nothing(
    node: HookNode, program: str, tmp_path: Path
) -> None:
    bundle = node.bundle("cat /proc/version", annotations={})
    ran = Runsc(program, tmp_path / "state").run(bundle)
    assert (ran.status, ran.stderr) == (0, "")
    assert ran.stdout.startswith(KERNEL)


@pytest.fixture
def wrapped(node: HookNode, program: str, tmp_path: Path) -> WrappedRunsc:
    (tmp_path / "dev").mkdir()
    wrapper = WrappedRunsc(program, tmp_path / "state")
    wrapper.program = WRAPPER
    wrapper.settings = tmp_path / "runtime.conf"
    write_settings(wrapper.settings, node, tmp_path / "dev", program, "environment allow")
    return wrapper


def by_annotations(node: HookNode) -> DiskBundle:
    return plain(node, "true")


def by_the_environment(node: HookNode) -> DiskBundle:
    bundle = plain(node, "true", {})
    bundle.config["process"]["env"] += ["TIDEGATE_MEMORY=8Gi"]
    return bundle


@pytest.mark.parametrize("asking", [by_annotations, by_the_environment])
def test_the_wrapper_refuses_before_runsc_starts(
    node: HookNode, program: str, wrapped: WrappedRunsc, asking: Callable[[HookNode], DiskBundle]
) -> None:
    ran = wrapped.run(asking(node))
    assert (ran.status, ran.stderr) == (66, REFUSAL.format(program) + "\n")
    assert node.governor.requests == []
    assert not wrapped.state.exists()


def test_the_wrapper_lets_runsc_start_a_container_that_asks_for_nothing(
    node: HookNode, wrapped: WrappedRunsc
) -> None:
    ran = wrapped.run(plain(node, "cat /proc/version", {"tidegate.example/x": "1"}))
    assert (ran.status, ran.stderr) == (0, "")
    assert ran.stdout.startswith(KERNEL)


SETTINGS = "/etc/tidegate/runtime-gvisor"


class GVisorDocker(Docker):
    """Docker with our runtime in front of runsc."""

    settings: ClassVar = {
        "runtimes": {
            "tidegate": {
                "path": "/usr/bin/tidegate-runtime",
                "runtimeArgs": ["--tidegate-config", SETTINGS, "--network=none"],
            }
        }
    }
    runtime = "/usr/bin/runsc"  # the path on the line `runtime`

    def start(self, image: Path) -> None:
        """Write the settings, and start dockerd."""
        self.host.write(SETTINGS, f"runtime {self.runtime}\nenvironment allow\n")
        super().start(image)


class OldGVisorDocker(GVisorDocker, OldDocker):
    """Docker before version 24, which has no annotations; environment variables replace them."""


class GVisorPodman(Podman):
    """Podman with runsc, and our hooks."""

    runtime = "runsc"

    def _command(self, *arguments: str, ours: bool = True) -> list[str]:
        podman, *words = super()._command(*arguments, ours=ours)
        return [podman, "--runtime-flag=network=none", *words]


@pytest.fixture(scope="module")
def site(
    suite: str,
    tmp_path_factory: pytest.TempPathFactory,
    build_dir: Path,
    require: Callable[..., None],
) -> Iterator[EngineSite]:
    require("gcc", "nsenter", "unshare", "setpriv")
    yield from make_site(suite, tmp_path_factory.mktemp("e"), build_dir)


@pytest.fixture(params=[GVisorDocker, GVisorPodman], ids=lambda kind: kind.name)
def engine(
    site: EngineSite, request: pytest.FixtureRequest
) -> Iterator[GVisorDocker | GVisorPodman]:
    kind = request.param
    if kind is GVisorDocker and old_docker(site.host):
        kind = OldGVisorDocker
    for one in used(site, kind):
        assert isinstance(one, GVisorDocker | GVisorPodman)
        yield one


def kernel(engine: Engine, started: Started) -> str:
    """Return the kernel version that a container sees."""
    return engine.exec(started, "cat", "/proc/version").stdout


def test_engines_with_runsc_start_containers_without_a_request_and_refuse_others(
    site: EngineSite, engine: GVisorDocker | GVisorPodman
) -> None:
    started = engine.run(*IDLE)
    assert kernel(engine, started).startswith(KERNEL)
    engine.remove(started)
    before = site.traces()
    with pytest.raises(StartError) as caught:
        engine.run(*IDLE, annotations=GOOD)
    text = str(caught.value)
    assert text.count("tidegate: ") == 1, text
    assert REFUSAL.format(engine.runtime) in text
    assert not site.books()
    assert site.traces() <= before
