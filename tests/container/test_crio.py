"""CRI-O in the layout of its own packages: the files with which it starts, and what setup and doctor report about other files.

Debian has no package of CRI-O. `TIDEGATE_ENGINE_BIN` names a directory with its programs (docs/testing.md).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator

import pytest

from tests.container.bundles import ROOT
from tests.container.engine_host import EngineHost
from tests.container.engines import (
    CRIO_ANSWERS,
    ENGINE_BIN,
    LIBEXEC,
    READY_S,
    Crio,
    crio_binds,
    put_crio,
)
from tests.container.nodes import wait_for
from tests.container.test_engines import (
    GOOD,
    SUITES,
    WORKLOAD,
    EngineSite,
    begin,
    site,
    unpacked,
    used,
    wait_ready,
)
from tests.unit.test_setup_crio import CONF_D, DROP_IN, HOOKS_DIR, OLD, SETTINGS

__all__ = ["site"]

pytestmark = pytest.mark.skipif(
    not ENGINE_BIN,
    reason="CRI-O is in no Debian release, and TIDEGATE_ENGINE_BIN names no directory",
)


@pytest.fixture(scope="module", params=SUITES)
def node(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    require: Callable[..., None],
) -> Iterator[EngineHost]:
    """A node with CRI-O's packages, without running daemons."""
    require("nsenter", "unshare", "setpriv")
    base = tmp_path_factory.mktemp("c")
    with EngineHost(unpacked(request.param), base, binds=crio_binds()) as host:
        put_crio(host)
        for program in ("tidegate-hook", "tidegate-runtime"):
            host.path(f"/usr/bin/{program}").symlink_to(ROOT / "oci_hook" / program)
        yield host


@pytest.fixture
def host(node: EngineHost) -> Iterator[EngineHost]:
    """The node, with CRI-O's files as its packages install them, before the test and after it."""
    yield node
    tidegate(node, "setup", "crio", "--undo")
    left = ("50-tidegate.conf", "60-own.conf")
    for path in (*(f"{CONF_D}/{name}" for name in left), f"{HOOKS_DIR}/x.json", SETTINGS):
        node.path(path).unlink(missing_ok=True)


def tidegate(host: EngineHost, *words: str) -> tuple[int, str]:
    """Run a command on the node itself; return its status, and all of its output."""
    ran = host.run("python3", f"{ROOT}/governor/tidegate", *words)
    return ran.status, ran.text


def findings(host: EngineHost, *checks: str) -> dict[str, list[tuple[str, str]]]:
    """Return state and text of doctor's findings about the node, by the id of the check."""
    output = subprocess.run(
        [*(sys.executable, "-m", "governor.cli", "doctor", "--json"), "--root", host.path("/")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    found: dict[str, list[tuple[str, str]]] = {check: [] for check in checks}
    for one in json.loads(output)["findings"]:
        if one["id"] in found:
            found[one["id"]].append((one["state"], one["found"]))
    return found


def starts(host: EngineHost) -> str:
    """Start CRI-O and stop it again; return the last line of its log if it ended on its own, else ""."""
    log = host.work / "crio.log"
    log.unlink(missing_ok=True)
    daemon = host.start("crio", log=log)
    deadline = time.monotonic() + READY_S
    while daemon.poll() is None and host.run(*CRIO_ANSWERS).status:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    ended = daemon.poll() is not None
    host.stop(daemon)
    return log.read_text().splitlines()[-1] if ended else ""


NO_CONMON = (
    'failed to translate monitor fields for runtime tidegate: exec: \\"conmon\\": '
    "executable file not found in $PATH"
)


def test_cri_o_starts_after_setup_but_not_with_the_handler_of_an_older_version(
    host: EngineHost,
) -> None:
    host.write(DROP_IN, OLD)
    assert NO_CONMON in starts(host)
    config = host.run("crio", "config")
    assert config.status == 0  # `crio config` does not check that programs exist
    assert [state for state, _ in findings(host, "crio.configuration")["crio.configuration"]] == [
        "wrong"
    ]
    status, output = tidegate(host, "setup", "crio")
    assert status == 73
    assert "CRI-O does not start: the handler tidegate" in output
    host.path(DROP_IN).unlink()
    status, output = tidegate(host, "setup", "crio")
    assert status == 0, output
    assert "note:" not in output  # `crio config` was run
    assert starts(host) == ""
    found = findings(host, "crio.configuration", "crio.handler", "files.runtime")
    assert {state for each in found.values() for state, _ in each} == {"ok"}, found
    assert tidegate(host, "setup", "crio", "--undo")[0] == 0
    assert starts(host) == ""


def test_cri_o_starts_after_setup_where_its_programs_are_on_the_path(host: EngineHost) -> None:
    """The layout of distributions: no file names a program, and the handlers are built in."""
    packages = host.path(f"{CONF_D}/10-crio.conf")
    text = packages.read_text()
    packages.unlink()
    try:
        status, output = tidegate(host, "setup", "crio")
        assert (status, "conmon is not in any program directory" in output) == (73, True)
        host.check("cp", f"{LIBEXEC}/conmon", "/usr/bin/conmon")
        status, output = tidegate(host, "setup", "crio")
        assert status == 0, output
        assert "runtime-for /run/crun /usr/bin/crun" in host.path(SETTINGS).read_text()
        assert starts(host) == ""
    finally:
        host.path("/usr/bin/conmon").unlink(missing_ok=True)
        packages.write_text(text)


def test_an_error_that_only_cri_o_detects_stops_setup(host: EngineHost) -> None:
    host.write(f"{CONF_D}/60-own.conf", '[crio.runtime]\ndefault_sysctls = ["x"]\n')
    status, output = tidegate(host, "setup", "crio")
    assert status == 73
    assert "with the new files, `crio config` exits with status 1: " in output
    assert "nothing was changed" in output
    assert not host.path(DROP_IN).exists()
    assert not host.path(SETTINGS).exists()


def test_a_hook_of_a_stage_that_cri_o_does_not_know_is_found(host: EngineHost) -> None:
    assert tidegate(host, "setup", "crio")[0] == 0
    hook = {"version": "1.0.0", "hook": {"path": "/usr/bin/true"}, "when": {"always": True}}
    host.write(f"{HOOKS_DIR}/x.json", json.dumps({**hook, "stages": ["precreate"]}))
    assert 'unknown stage \\"precreate\\"' in starts(host)
    [(state, words)] = findings(host, "crio.configuration")["crio.configuration"]
    assert (state, f"{HOOKS_DIR}/x.json names the stage precreate" in words) == ("wrong", True)
    host.write(f"{HOOKS_DIR}/x.json", json.dumps({**hook, "stages": ["poststop"]}))
    assert starts(host) == ""
    assert {s for s, _ in findings(host, "crio.configuration")["crio.configuration"]} == {"ok"}


def test_a_container_runs_under_the_default_handlers_runtime_and_outlives_cri_o(
    site: EngineSite,
) -> None:
    for engine in used(site, Crio):
        assert isinstance(engine, Crio)
        host = site.host
        shown = tomllib.loads(host.check("crio", "status", "config"))
        known = shown["crio"]["runtime"]["runtimes"]["tidegate"]
        assert known["monitor_path"] == f"{LIBEXEC}/conmon"
        assert f"runtime-for /run/crun {LIBEXEC}/crun" in host.path(SETTINGS).read_text()
        started = engine.run(*WORKLOAD, annotations=GOOD)
        wait_ready(started)
        begin(site, started)
        # crun keeps its state there, although runc comes first on this node's PATH.
        assert host.path(f"/run/crun/{started.identifier}").is_dir()
        engine.stop()
        engine.serve()
        assert started.identifier in site.books()
        assert engine.exec(started, "cat", "/proc/1/comm").stdout == "simgpu-workload\n"[:16]
        engine.remove(started)
        wait_for(lambda: not site.books(), "the container to leave the books")
        assert not host.path(f"/run/crun/{started.identifier}").exists()
