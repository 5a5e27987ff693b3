"""Test the collection of names of unknown functions that containers write into their ledgers."""

from __future__ import annotations

import asyncio
import json
import mmap
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from structlog.testing import capture_logs

from governor.config import Config
from governor.listing import unknown_lines
from governor.lookups import MOST, UnknownFunctions
from governor.verbs import inspect
from libcontrol import layout, pages
from tests.conftest import ROOT
from tests.unit.governor_world import MetricsWorld

OUTPUTS = json.loads((ROOT / "governor/outputs.schema.json").read_text())


@pytest.fixture
def ledger() -> mmap.mmap:
    page = mmap.mmap(-1, layout.LEDGER_SIZE)
    pages.init_ledger(page)
    return page


def write(page: mmap.mmap, place: int, name: bytes) -> None:
    for i, byte in enumerate(name.ljust(layout.UNKNOWN_SIZE, b"\0")[: layout.UNKNOWN_SIZE]):
        at = place * layout.UNKNOWN_SIZE + i
        pages.write(page, 0, "ledger_header", "unknown", byte, index=at)


def test_a_name_is_found_once(ledger: mmap.mmap) -> None:
    functions = UnknownFunctions()
    assert functions.read(ledger) == []
    write(ledger, 0, b"cuOfTomorrow")
    write(ledger, 3, b"cuMemAlloc@14000")
    write(ledger, 4, b"cuOfTomorrow")
    assert functions.read(ledger) == ["cuOfTomorrow", "cuMemAlloc@14000"]
    assert functions.read(ledger) == []
    write(ledger, 0, b"cuOther")
    assert functions.read(ledger) == ["cuOther"]
    assert functions.names == ("cuOfTomorrow", "cuMemAlloc@14000", "cuOther")


@pytest.mark.parametrize(
    "name",
    [
        b"\0uBeingWritten",
        b"ncclOther",
        b"cu",
        b"cu\x1b[2J",
        b"cuTab\tNewline\n",
        b"cuNewline\n",
        "cuÜber".encode(),
        b"cu\xff\xfe",
        b"cuName@x",
        b"cuName@1234567",
        b"cuName@",
        b"cu" + b"x" * 46,  # no terminator
        b"\xff" * 48,
    ],
)
def test_invalid_names_are_skipped(ledger: mmap.mmap, name: bytes) -> None:
    functions = UnknownFunctions()
    write(ledger, 1, name)
    write(ledger, 2, b"cuAfter")
    assert functions.read(ledger) == ["cuAfter"]


def test_at_most_sixteen_names_of_a_container_are_kept(ledger: mmap.mmap) -> None:
    functions = UnknownFunctions()
    for i in range(100):
        write(ledger, i % layout.N_UNKNOWN, f"cuNumber{i}".encode())
        functions.read(ledger)
    assert functions.names == tuple(f"cuNumber{i}" for i in range(MOST))
    assert MOST == 16


def test_names_are_logged_once_and_shown(tmp_path: Path, build_dir: Path) -> None:
    async def scene() -> None:
        world = MetricsWorld(tmp_path, build_dir / "libcontrol")
        try:
            one = await world.admit("one")
            await world.admit("two", memory="1Gi", compute="10")
            with capture_logs() as logs:
                one.note_unknown()
                write(one.ledger, 0, b"cuOfTomorrow")
                write(one.ledger, 1, b"cuMemAlloc@14000")
                for _ in range(3):
                    one.note_unknown()
                [described] = one.describe()
                write(one.ledger, 2, b"cuLate")
                world.server.admissions.end(one, "test")
            found = [line for line in logs if line["event"] == "unknown-functions"]
            assert [(line["container"], line["functions"]) for line in found] == [
                ("one", ["cuOfTomorrow", "cuMemAlloc@14000"]),
                ("one", ["cuLate"]),
            ]
            assert {line["log_level"] for line in found} == {"warning"}
            assert described["unknown_functions"] == ["cuOfTomorrow", "cuMemAlloc@14000"]
            schema = OUTPUTS["$defs"]["container"]["properties"]["unknown_functions"]
            jsonschema.Draft202012Validator(schema).validate(described["unknown_functions"])
        finally:
            world.close()

    asyncio.run(scene())


def described(**changes: Any) -> dict[str, Any]:
    return {"id": "a" * 64, "key": "k", "name": "", "unknown_functions": [], **changes}


def test_ps_has_a_line_for_each_container_with_unknown_functions() -> None:
    names = ["cuOfTomorrow", "cuMemAlloc@14000"]
    older = described(name="older")
    del older["unknown_functions"]
    both = [described(name=name, key="shared", unknown_functions=names[:1]) for name in ("b", "c")]
    assert unknown_lines([described(), older, described(unknown_functions=names), *both]) == [
        f"unknown functions: {'a' * 40}: cuOfTomorrow, cuMemAlloc@14000",
        "unknown functions: b: cuOfTomorrow",  # b and c share one ledger
    ]
    # The answer may come from another program at the governor's socket.
    evil = described(name="n\x1b[2J", unknown_functions=["cu\x1b[2J"])
    assert unknown_lines([evil]) == ["unknown functions: n?[2J: cu?[2J"]


def test_unknown_functions_are_counted_by_default() -> None:
    assert Config().unknown_functions == "count"


def test_inspect_names_unknown_functions() -> None:
    assert inspect.unknown_of(described(unknown_functions=["cuA", "cuB"])) == "cuA, cuB"
    assert inspect.unknown_of({}) == ""
