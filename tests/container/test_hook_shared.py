"""Containers that share a root file system, as with Podman's `--rootfs`: several of them start and
end at the same time.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.container.bundles import ContainerResult, DiskBundle, Runtime, add_hook, base_config
from tests.container.conftest import HookNode
from tests.container.test_hook_start import FOUND, PROBE, everything, tree

AT_ONCE = 8
ROUNDS = 3
ASKED = {"tidegate.gpu/memory": "8Gi", "tidegate.gpu/compute": "50"}
# Check that the container has its files at its start, and still after others started and ended.
LOOKS = (
    f"{PROBE}; stat -c %s /run/tidegate/grant; sleep {{}}; {PROBE}; stat -c %s /run/tidegate/grant"
)
SERVED = f"{FOUND}4096\n" * 2


@pytest.fixture
def shared(node: HookNode) -> Path:
    """A root with an ld.so.cache, whose mode, owner and time show whether it was replaced by
    another file.
    """
    root = node.bundle("").rootfs
    cache = root / "etc/ld.so.cache"
    cache.chmod(0o640)
    os.chown(cache, 7, 8)
    os.utime(cache, ns=(1, 1))
    return root


def make(node: HookNode, root: Path, number: int, command: str, capabilities: str) -> DiskBundle:
    """Make a separate bundle over the shared root."""
    path = node.base / f"shared{number}"
    path.mkdir(exist_ok=True)
    asked = ASKED | {"tidegate.gpu/capabilities": capabilities}
    bundle = DiskBundle(path, root, base_config(command, annotations=asked))
    bundle.config["root"]["path"] = str(root)
    add_hook(bundle.config, node.hook, stage="createRuntime")
    bundle.write()
    return bundle


def run(runtime: Runtime, bundle: DiskBundle, name: str) -> ContainerResult:
    done = subprocess.run(
        runtime.command("run", "--bundle", str(bundle.path), name),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return ContainerResult(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    "capabilities", ["different", pytest.param("the same", marks=pytest.mark.slow)]
)
def test_concurrent_starts_and_ends_on_one_root(
    node: HookNode, runtime: Runtime, shared: Path, capabilities: str
) -> None:
    """No start fails, no container loses files that it uses, and the end of the last one removes
    all of them; ids are reused.
    """
    node.timeout = 40.0
    before, kept = tree(shared), everything(shared / "etc/ld.so.cache")
    together = threading.Barrier(AT_ONCE)

    def work(number: int) -> list[str]:
        errors = []
        together.wait()
        for turn in range(ROUNDS):
            wanted = "all" if capabilities == "different" and (number + turn) % 2 else "utility"
            pause = (number * 7 + turn * 3) % 5 / 10
            bundle = make(node, shared, number, LOOKS.format(pause), wanted)
            ran = run(runtime, bundle, f"shared-{os.getpid()}-{number}")
            if (ran.status, ran.stdout) != (0, SERVED):
                errors.append(f"{number}.{turn}: {ran}")
        return errors

    with ThreadPoolExecutor(AT_ONCE) as pool:
        wrong = list(itertools.chain(*pool.map(work, range(AT_ONCE))))
    assert wrong == []
    assert tree(shared) == before
    assert everything(shared / "etc/ld.so.cache") == kept
    assert list((node.base / "run/traces").iterdir()) == []


def test_a_failed_start_removes_nothing_of_another_on_its_root(
    node: HookNode, runtime: Runtime, shared: Path
) -> None:
    """The second start begins when the first has made its files. Then the first is refused, and
    removes its files.
    """
    node.timeout = 20.0
    before, kept = tree(shared), everything(shared / "etc/ld.so.cache")
    governor = node.governor
    usual = governor.mode
    second: list[ContainerResult] = []
    other = threading.Thread(
        target=lambda: second.append(
            run(
                runtime,
                make(node, shared, 2, LOOKS.format(1), "utility"),
                f"shared-{os.getpid()}-b",
            )
        )
    )

    def refuse_the_first() -> None:
        if other.ident is None:
            other.start()
            other.join(1.0)
            governor.mode = "deny-confirm"
        else:
            governor.mode = usual

    governor.before_confirm = refuse_the_first
    first = run(runtime, make(node, shared, 1, "true", "all"), f"shared-{os.getpid()}-a")
    governor.mode = usual
    other.join()
    assert first.status != 0
    assert [(ran.status, ran.stdout) for ran in second] == [(0, SERVED)]
    assert tree(shared) == before
    assert everything(shared / "etc/ld.so.cache") == kept
    assert list((node.base / "run/traces").iterdir()) == []
