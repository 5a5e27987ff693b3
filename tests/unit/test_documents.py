"""Test the parsers of text that reaches the hook, the wrapper runtime and the governor, with a
corpus, with mutations of it, and in real processes.

tests/fuzz/documents.py describes each kind of document. tests/fuzz/test_documents.py runs for
TIDEGATE_FUZZ_SECONDS seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from oci_hook.quick import CONFIG_LIMIT
from tests.conftest import examples
from tests.fuzz.documents import KINDS, bases, corpus, hold, is_valid, mutated, refusal

HOOK = Path(__file__).parents[2] / "oci_hook"
MIB = 1 << 20
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (768 << 20,) * 2)
child = os.posix_spawn(sys.executable, [sys.executable, "-I", "-S", *sys.argv[2:]], os.environ)
_, status, usage = os.wait4(child, 0)
os.write(int(sys.argv[1]), b"%d" % (usage.ru_maxrss << 10))
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""Run a program under a memory limit and report its peak.

A process starts with the peak of the process that spawned it, so that process has to be small.
"""
MOST = 256 * MIB
"""Maximum number of bytes that a hook may use for any input: small objects are 50 times as large in
Python as in JSON.
"""
NOBODY = 4194304
"""One more than the highest possible PID, so that no process has it."""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "edit"])
def test_parser_and_schema_judge_the_corpus_alike(kind: str) -> None:
    entries = corpus(kind)
    assert {entry.good for entry in entries} == {True, False}
    wrong = []
    for entry in entries:
        taken = hold(kind, entry.data)
        # A schema cannot express everything that a parser refuses, but the parser accepts nothing
        # that the schema rejects.
        if taken != entry.good:
            wrong.append((entry.why, refusal(kind, entry.data), is_valid(kind, entry.data)))
    assert wrong == []


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", KINDS)
def test_parser_and_schema_judge_mutations_of_the_corpus_alike(kind: str) -> None:
    @settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=mutated(kind))
    def holds(data: bytes) -> None:
        hold(kind, data)

    holds()


def is_too_deep(depth: int) -> bool:
    """Return whether the parser gives up on nested lists, if it is called from the caller's depth."""
    try:
        json.loads("[" * depth + "]" * depth)
    except RecursionError:
        return True
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_any_depth_of_nesting_is_refused_with_one_line(kind: str) -> None:
    """The depths include the one at which the JSON parser gives up.

    Just below it, the code that judges the document has less stack left than the parser had. The
    parser is called from a different depth of the stack there: it gives up within five levels of
    `limit`.
    """
    limit = next(depth for depth in range(500, 1100) if is_too_deep(depth))
    taken = set()
    for depth in range(limit - 100, limit + 20):
        lists = "[" * depth + "]" * depth
        for text in (
            lists,
            f'{{"v": 1, "op": "admit", "id": "x", "pid": 1, "annotations": {lists}}}',
            f'{{"root": {{"path": "rootfs"}}, "annotations": {lists}, "process": {lists}}}',
            f'{{"ok": true, "more": {lists}, "devices": {lists}}}',
            f'{{"version": "1", "files": {lists}, "tidegate.gpu/memory": {lists}}}',
        ):
            taken.add(refusal(kind, text.encode()) is None)
    assert False in taken


@pytest.mark.parametrize("kind", ["config", "state"])
def test_every_document_of_the_corpus_is_edited_or_refused_with_a_line(kind: str) -> None:
    """The wrapper runtime and `precreate` read config.json as the hook does."""
    for entry in corpus(kind):
        hold("edit", entry.data)


class DocumentRun:
    """The outcome of a run of one of our programs on a document."""

    def __init__(self, name: str, arguments: list[str], data: bytes) -> None:
        with (
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
            tempfile.TemporaryFile() as peak,
        ):
            given.write(data)
            given.seek(0)
            process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", "-c", LIMITED),
                    *(str(peak.fileno()), str(HOOK / name), *arguments),
                ],
                stdin=given, stdout=out, stderr=err, pass_fds=(peak.fileno(),),
            )  # fmt: skip
            self.status = process.wait()
            self.stdout, self.stderr, told = (
                Path(f"/proc/self/fd/{f.fileno()}").read_bytes() for f in (out, err, peak)
            )
            self.peak = int(told)

    def check_result(self) -> None:
        """Check for a documented status and one line with the reason, without a traceback or an internal error."""
        said = self.stderr.decode()
        assert self.status in (0, 64, 65, 66, 69, 71, 72, 75, 77), (self.status, said)
        assert said.count("\n") == (1 if self.status else 0), said
        assert "Traceback" not in said
        assert "report this" not in said, said
        assert self.status == 0 or said.startswith("tidegate: "), said


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    return [
        "--runtime-dir", str(tmp_path / "run"), "--driver-dir", str(tmp_path / "driver"),
        "--log", str(tmp_path / "log"), "--timeout", "20",
    ]  # fmt: skip


def sample(kind: str, step: int) -> Iterator[bytes]:
    """Yield only part of the corpus: each process takes 50 ms."""
    for entry in corpus(kind)[::step]:
        yield entry.data


def test_a_hook_that_is_given_any_state_ends_with_a_status_and_one_line(
    tmp_path: Path, options: list[str]
) -> None:
    """The process does not exist, so even a valid state is refused."""
    (tmp_path / "config.json").write_text(json.dumps(bases("config")[0]))
    for document in sample("state", 3):
        data = document.replace(b'"bundle": "/b"', f'"bundle": "{tmp_path}"'.encode()).replace(
            b'"pid": 42', f'"pid": {NOBODY}'.encode()
        )
        ran = DocumentRun("tidegate-hook", [*options, "--governed", "createRuntime"], data)
        ran.check_result()
        assert ran.status, data


def test_a_hook_that_is_given_any_config_ends_with_a_status_and_one_line(
    tmp_path: Path, options: list[str]
) -> None:
    state = {"id": "c", "pid": NOBODY, "bundle": str(tmp_path)}
    for data in sample("config", 3):
        (tmp_path / "config.json").write_bytes(data)
        DocumentRun(
            "tidegate-hook", [*options, "createRuntime"], json.dumps(state).encode()
        ).check_result()
        ran = DocumentRun("tidegate-hook", [*options, "precreate"], data)
        ran.check_result()
        assert ran.status in (0, 66, 64), ran.stderr
        assert ran.status or ran.stdout or not data


OURS = '"annotations": {"tidegate.gpu/memory": "8Gi"}, "root": {"path": "r"}}'
HUGE = {
    "the smallest objects": ('{"x": [', '{"a":0},', "0], " + OURS),
    "lists": ('{"x": [', "[],", "0], " + OURS),
    "not closed": ("", "[", ""),
    "numbers": ('{"x": [', "1.5,", "0], " + OURS),
    "members": ('{"x": {', '"%07d":0,', '"": 0}, ' + OURS),
    "the same member": ("{", '"a":0,', OURS),
    "annotations": (
        '{"annotations": {',
        '"tidegate.gpu/%07d":"",',
        '"": ""}, "root": {"path": "r"}}',
    ),
    "an environment": ('{"process": {"env": [', '"TIDEGATE_%07d=1",', '""]}, ' + OURS),
    "hooks": ('{"hooks": {"prestart": [', "{},", "{}]}, " + OURS),
    "escapes": ('{"x": "', "\\u0074", '", ' + OURS),
}
QUICK = ("the smallest objects", "not closed")


@pytest.mark.parametrize(
    "what",
    [pytest.param(what, marks=() if what in QUICK else pytest.mark.slow, id=what) for what in HUGE],
)
def test_the_largest_documents_take_bounded_memory(
    tmp_path: Path, options: list[str], what: str
) -> None:
    start, part, end = HUGE[what]
    n = (CONFIG_LIMIT - len(start) - len(end)) // len(part % 0 if "%" in part else part)
    body = "".join(part % i for i in range(n)) if "%" in part else part * n
    data = (start + body + end).encode()
    (tmp_path / "config.json").write_bytes(data)
    state = json.dumps({"id": "c", "pid": NOBODY, "bundle": str(tmp_path)}).encode()
    for ran in (
        DocumentRun("tidegate-hook", [*options, "createRuntime"], state),
        DocumentRun("tidegate-hook", [*options, "precreate"], data),
    ):
        ran.check_result()
        assert ran.peak < MOST, f"{ran.peak // MIB} MiB"
