"""Tiers by directory, who runs beside whom, and what a test may ask for.

A directory of tests/ is a tier: unit, container, gpu, cluster; tests/kubernetes runs with unit.  tests/fuzz is slow,
unless it is named on the command line; in tests/packages each test says whether it is.  What this machine does not have skips a
test with a reason, and fails it where CI=true.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
# tests/kubernetes needs neither root nor a cluster.
TIERS = {
    "unit": "unit",
    "container": "container",
    "gpu": "gpu",
    "kubernetes": "unit",
    "cluster": "cluster",
}

SEARCH = 10
"""How many times as many examples the profile `search` tries of each test."""

# The profiles of random tests. `fixed` has the same examples in every run; `search` looks for new ones and prints the
# decorator that repeats what it finds. Neither looks at a clock. tests/unit/test_examples.py sees to it that no test's
# own settings are otherwise.
PROFILE = settings(
    derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fixed", PROFILE)
settings.register_profile(
    "search",
    PROFILE,
    derandomize=False,
    print_blob=True,
    max_examples=SEARCH * PROFILE.max_examples,
)
settings.load_profile("fixed")

# runc lives in /usr/sbin, which is not on everybody's path.
os.environ["PATH"] += ":/usr/sbin:/sbin"


def examples(number: int) -> int:
    """Return how many examples a test has in this run that has `number` in the profile `fixed`."""
    return number * settings().max_examples // PROFILE.max_examples


def lack(reason: str) -> None:
    """End the test for something that this machine does not have."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}, and CI=true wants it", pytrace=False)
    pytest.skip(reason)


def need(*tools: str) -> None:
    """End the test unless each of the commands is installed."""
    for tool in tools:
        if shutil.which(tool) is None:
            lack(f"needs {tool}")


def driver_answers() -> bool:
    """Whether a kernel module is behind the node; libnvidia-ml makes the node where there is none."""
    try:
        os.close(os.open("/dev/nvidiactl", os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    """A program that a test runs in this process sets its log up, to a file that ends with the test, and holds signals back."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, held)
    structlog.reset_defaults()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test with its directory's tier."""
    fuzz_is_named = any("fuzz" in argument for argument in config.args)
    for item in items:
        tier = item.path.relative_to(TESTS).parts[0]
        if tier == "fuzz":
            item.add_marker("unit" if fuzz_is_named else "slow")
        elif tier in TIERS:
            item.add_marker(TIERS[tier])
        elif tier == "packages":
            # What is slow there installs packages in roots of its own; the rest reads files.
            item.add_marker("container" if item.get_closest_marker("slow") else "unit")
        elif tier == "examples":
            # What plays a story says that it has containers; the rest reads files.
            if not item.get_closest_marker("container"):
                item.add_marker("unit")
        else:
            known = sorted({*TIERS, "fuzz", "packages", "examples"})
            raise pytest.UsageError(f"{item.path}: not below one of {known}")
        marks = [item.get_closest_marker(name) for name in ("slow", "cluster")]
        if (any(marks) or not settings().derandomize) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(3600))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Ask for what a whole tier needs."""
    if item.get_closest_marker("container") and os.geteuid() != 0:
        lack("needs root")
    if item.get_closest_marker("gpu") and not driver_answers():
        lack("needs an NVIDIA GPU and its driver")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give a worker a short directory: a socket's path has 107 bytes, and `popen-gw0` is 9 of them."""
    if hasattr(config, "workerinput") and config.option.basetemp:
        given = Path(config.option.basetemp)
        config.option.basetemp = str(given.with_name(given.name.removeprefix("popen-gw")))


def pytest_sessionstart(session: pytest.Session) -> None:  # noqa: ARG001 - the hook's signature
    """Keep the examples of the profile `fixed` independent of what else is imported.

    Hypothesis draws numbers and strings from the constants of all loaded modules of the project, which differ by the
    tests that run in the same process and change with the code. It has no setting for that.
    """
    if settings().derandomize:
        providers._get_local_constants = Constants


MEASURING = "tests/container"
"""The scope of tests that measure time or look at all containers of the machine: no two of them run side by side."""

FREE = ("test_fronts", "test_hook_", "test_images", "test_runtime", "test_setup_")
"""Beginnings of modules of tests/container that any worker may run: each has a governor, a directory and containers of
its own, asks only whether they are as they should be, and has a GPU's time nowhere."""


def scope_of(nodeid: str) -> str:
    """Name what one worker runs as a whole: a module, or all that measures."""
    module = nodeid.partition("::")[0]
    if module.startswith("tests/examples/test_stories"):
        return MEASURING
    if module.startswith("tests/container/") and not Path(module).name.startswith(FREE):
        return MEASURING
    return module


def waits(scope: str) -> bool:
    """Whether tests take as long on a busy machine: they wait for what is done every few seconds, or stop after a given time."""
    return scope.startswith(
        ("tests/fuzz/", "tests/kubernetes/", "tests/unit/test_control_guest.py")
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give one worker all that measures, and then each of them a module at a time.

    A third worker has what waits, and nothing else: in `make test` that leaves the processors to what measures.
    """
    from xdist.scheduler import LoadScopeScheduling
    from xdist.workermanage import WorkerController

    class ByTier(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

        def _left_for(self, node: WorkerController) -> list[str]:
            waiting = [scope for scope in self.workqueue if waits(scope)]
            if self.nodes[2:3] == [node]:
                return waiting
            # What measures takes the longest, though other scopes have more tests.
            first = [MEASURING] if MEASURING in self.workqueue else []
            return [*first, *(scope for scope in self.workqueue if not waits(scope)), *waiting]

        def _assign_work_unit(self, node: WorkerController) -> None:
            if left := self._left_for(node):
                self.workqueue.move_to_end(left[0], last=False)
                super()._assign_work_unit(node)

        def _reschedule(self, node: WorkerController) -> None:
            if self.workqueue and not self._left_for(node):
                node.shutdown()  # when it has done what it has
            else:
                super()._reschedule(node)

    return ByTier(config, log)


@pytest.fixture(scope="session")
def require() -> Callable[..., None]:
    """`require("crun")` ends the test unless the command is installed."""
    return need


@pytest.fixture(scope="session")
def build_dir() -> Path:
    """Where meson built the C parts."""
    path = Path(os.environ.get("TIDEGATE_BUILD", ROOT / "build" / "meson"))
    if not (path / "build.ninja").exists():
        pytest.fail(f"nothing is built in {path}: run make build", pytrace=False)
    return path
