"""Test tiers, the distribution of tests over pytest-xdist workers, and checks for what a test needs.

A directory of tests/ is a tier: unit, container, gpu, cluster; tests/kubernetes runs with unit.
tests/fuzz is slow, unless it is named on the command line. In tests/packages and tests/examples
each test declares whether it is slow or needs containers. A test that needs something that this
machine lacks is skipped with a reason; with CI=true it fails instead.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
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

ONE_RUNTIME = ("test_hook_rules", "test_hook_steps", "test_images")
"""Modules of tests/container that test what the hook itself does. Their tests with crun are slow;
the other modules run with both runtimes in `make test`.
"""

SEARCH = 10
"""Factor by which the profile `search` increases the number of examples of each test."""

# Profiles of random tests. `fixed` uses the same examples in every run; `search` looks for new ones and prints the decorator
# that reproduces a failure. Neither depends on a clock. tests/unit/test_examples.py checks that no test's own settings override
# these.
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

# runc is in /usr/sbin, which is not on every user's PATH.
os.environ["PATH"] += ":/usr/sbin:/sbin"
# Thousands of processes that the tests start import the same modules; without cached bytecode, each
# of them compiles the modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# If a test forks in a process in which another one has used gRPC, gRPC's handlers abort the child.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


def examples(number: int) -> int:
    """Return the number of examples for this run of a test that has `number` of them in the profile `fixed`."""
    return number * settings().max_examples // PROFILE.max_examples


def lack(reason: str) -> None:
    """Skip the test, or fail it with CI=true, because this machine lacks something."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}, and CI=true requires it", pytrace=False)
    pytest.skip(reason)


def need(*tools: str) -> None:
    """Skip or fail the test unless all of the commands are installed."""
    for tool in tools:
        if shutil.which(tool) is None:
            lack(f"needs {tool}")


def driver_answers() -> bool:
    """Return whether the driver's kernel module is loaded. This opens /dev/nvidiactl, because libnvidia-ml creates the
    node even without a module.
    """
    try:
        os.close(os.open("/dev/nvidiactl", os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class DescriptorLogger:
    """Writes log lines to the descriptor of standard output, and not to `sys.stdout`.

    At the end of a test's call, pytest closes the file that `capfd` has put there, while a governor
    that the test runs on another thread may still be writing. A file that another thread closes
    during a write corrupts the interpreter's memory. A descriptor does not.
    """

    def msg(self, message: str) -> None:
        """Write a line."""
        os.write(1, message.encode() + b"\n")

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


def reset_logs() -> None:
    """Configure the logs of code that runs in this process."""
    structlog.reset_defaults()
    structlog.configure(logger_factory=lambda *_: DescriptorLogger())


reset_logs()


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    """Restore the signal mask and the log configuration. A Tidegate program that a test runs in
    this process blocks signals, and sends its log to a file that is removed after the test.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, held)
    reset_logs()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test with its directory's tier."""
    fuzz_is_named = any("fuzz" in argument for argument in config.args)
    for item in items:
        tier = item.path.relative_to(TESTS).parts[0]
        call = getattr(item, "callspec", None)
        if item.path.stem in ONE_RUNTIME and call and call.params.get("runtime") == "crun":
            item.add_marker("slow")
        if tier == "fuzz":
            item.add_marker("unit" if fuzz_is_named else "slow")
        elif tier in TIERS:
            item.add_marker(TIERS[tier])
        elif tier == "packages":
            # The slow tests there install packages in separate roots; the others only read files.
            item.add_marker("container" if item.get_closest_marker("slow") else "unit")
        elif tier == "examples":
            # Tests that run an example are marked as needing containers; the others only read files.
            if not item.get_closest_marker("container"):
                item.add_marker("unit")
        else:
            known = sorted({*TIERS, "fuzz", "packages", "examples"})
            raise pytest.UsageError(f"{item.path}: not below one of {known}")
        marks = [item.get_closest_marker(name) for name in ("slow", "cluster")]
        if (any(marks) or not settings().derandomize) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(3600))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip or fail a test if this machine lacks something that its tier needs."""
    if item.get_closest_marker("container") and os.geteuid() != 0:
        lack("needs root")
    if item.get_closest_marker("gpu") and not driver_answers():
        lack("needs an NVIDIA GPU and its driver")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give a worker a short directory name: the path of a socket is limited to 107 bytes, and `popen-gw0` takes 9 of them."""
    if hasattr(config, "workerinput") and config.option.basetemp:
        given = Path(config.option.basetemp)
        config.option.basetemp = str(given.with_name(given.name.removeprefix("popen-gw")))


def pytest_sessionstart(session: pytest.Session) -> None:  # noqa: ARG001 - the hook's signature
    """Make the examples of the profile `fixed` independent of the other modules that are imported.

    Hypothesis draws numbers and strings from the constants of all loaded modules of the project. These depend on the tests that
    run in the same process, and change with the code. Hypothesis has no setting for this.
    """
    if settings().derandomize:
        providers._get_local_constants = Constants


MEASURING = "tests/container"
"""Scope of the tests that measure time or examine all containers of the machine: no two of them
run at the same time.
"""

FREE = (
    *("test_crio", "test_crun_line", "test_engines", "test_forkserver", "test_fronts"),
    *("test_gvisor", "test_hook_", "test_images", "test_mirror_disk", "test_rootless"),
    *("test_runtime", "test_setup_"),
)
"""Prefixes of the modules of tests/container that any worker may run. Each of these modules has its
own governor, directory and containers, checks only those, and does not measure GPU time.
"""

MUTANTS = "tests/container/test_mutants.py"
"""A module whose tests take up to eight minutes each, and run tests of FREE modules. Any worker may
run any one of them.
"""

LONG = (
    MUTANTS,
    "tests/unit/test_control_memory_programs.py",
    "tests/packages/test_deb.py",
    "tests/packages/test_image.py",
)
"""Modules that begin first, in this order: in `make test-full` each takes up to ten minutes, for
which the other workers would wait at the end.
"""


def scope_of(nodeid: str) -> str:
    """Return the name of the unit that one worker runs: a module, a mutant's rule, or all tests that measure."""
    module = nodeid.partition("::")[0]
    if module == MUTANTS:
        return nodeid
    if module.startswith("tests/examples/test_stories"):
        return MEASURING
    if module.startswith("tests/container/") and not Path(module).name.startswith(FREE):
        return MEASURING
    return module


def waits(scope: str) -> bool:
    """Return whether the tests of a scope take the same time on a busy machine, because they wait
    for periodic work or stop after a given time. The third worker begins with these.
    """
    return scope.startswith(
        (
            "tests/container/test_hook_stall.py",
            "tests/fuzz/",
            "tests/kubernetes/",
            "tests/unit/test_control_process.py",
        )
    )


def rank(scope: str) -> int:
    """Return the place of a scope among those that do not wait; a lower one begins earlier."""
    return next((i for i, name in enumerate(LONG) if scope.startswith(name)), len(LONG))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give all measuring tests to one worker, and then one module at a time to each worker.

    The third worker begins with the tests that mostly wait. The tests that measure take the longest
    in `make test`, and by their end the others have left them the processors.
    """
    from xdist.scheduler import LoadScopeScheduling
    from xdist.workermanage import WorkerController

    class ByTier(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

        def _left_for(self, node: WorkerController) -> list[str]:
            # The measuring tests take the longest, although other scopes have more tests; then come
            # the other long ones.
            first = [MEASURING] if MEASURING in self.workqueue else []
            waiting = [scope for scope in self.workqueue if waits(scope)]
            others = [s for s in self.workqueue if s != MEASURING and not waits(s)]
            others.sort(key=rank)
            if self.nodes[2:3] == [node]:
                return [*waiting, *others, *first]
            return [*first, *others, *waiting]

        def _assign_work_unit(self, node: WorkerController) -> None:
            if left := self._left_for(node):
                self.workqueue.move_to_end(left[0], last=False)
                super()._assign_work_unit(node)

        def remove_node(self, node: WorkerController) -> str | None:
            # The base class queues all units of a crashed worker again; a unit that has no tests
            # left would never finish.
            units = self.assigned_work[node]
            for scope in [scope for scope, tests in units.items() if all(tests.values())]:
                del units[scope]
            return super().remove_node(node)

        def _reschedule(self, node: WorkerController) -> None:
            # A worker that replaces one that crashed is still collecting tests.
            if node in self.registered_collections:
                super()._reschedule(node)

    return ByTier(config, log)


@pytest.fixture(scope="session")
def require() -> Callable[..., None]:
    """Return a function: `require("crun")` skips or fails the test unless the command is installed."""
    return need


@pytest.fixture(scope="session")
def build_dir() -> Path:
    """Return the directory in which meson built the C parts."""
    path = Path(os.environ.get("TIDEGATE_BUILD", ROOT / "build" / "meson"))
    if not (path / "build.ninja").exists():
        pytest.fail(f"nothing is built in {path}: run make build", pytrace=False)
    return path
