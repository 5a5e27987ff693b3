"""Tests of vdriver/libraries.toml and its schema: misspelt keys, and the error lines of a damaged file."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tomllib

import jsonschema
import pytest

from tools.driver_tables import SCHEMA, TABLES, faults
from vdriver.errors import DriverError
from vdriver.tables import parse_tables, read_tables

CAPABILITIES = "['compute', 'display', 'graphics', 'ngx', 'utility', 'video']"
TRIPLETS = r"'^/([^{}]|\\{triplet\\}|\\{alternative\\})*$'"
HINT = "correct it according to vdriver/libraries.schema.json, or reinstall Tidegate"
MISSPELT = [
    (
        ["kapability"],
        {},
        "the file: Additional properties are not allowed ('kapability' was unexpected)",
    ),
    (
        ["capability", "graphix"],
        {"libraries": ["libGL"], "source": "a test"},
        "capability: 'graphix' is not one of " + CAPABILITIES,
    ),
    (
        ["capability", "video", "librarys"],
        ["libnvcuvid"],
        "capability, video: Additional properties are not allowed ('librarys' was unexpected)",
    ),
    (
        ["capability", "video", "libraries", 0],
        "libnvcuvid.so.1",
        "capability, video, libraries, entry 1: 'libnvcuvid.so.1' does not match '^lib[^/.]+$'",
    ),
    (
        ["capabilities", "implies", "display"],
        ["graphic"],
        "capabilities, implies, display, entry 1: 'graphic' is not one of " + CAPABILITIES,
    ),
    (["companions", "source"], "", "companions, source: '' should be non-empty"),
    (
        ["layout", 0, "libraries"],
        "/usr/lib64",
        "[[layout]] NVIDIA in a directory of its own, libraries: '/usr/lib64' is not of type 'array'",
    ),
    (
        ["layout", 1, "libraries", 0],
        "/usr/lib/{triple}",
        "[[layout]] Debian and Ubuntu, libraries, entry 1: '/usr/lib/{triple}' does not match "
        + TRIPLETS,
    ),
    (["place", 0, "looks"], "al", "[[place]] vulkan-icd, looks: 'al' is not one of ['all', 'one']"),
    (
        ["place", 0, "containers"],
        ["/etc/vulkan/icd.d"],
        "[[place]] vulkan-icd: Additional properties are not allowed ('containers' was unexpected)",
    ),
    (
        ["socket", 0, "capability"],
        "utilities",
        "[[socket]] /run/nvidia-persistenced, capability: 'utilities' is not one of "
        + CAPABILITIES,
    ),
    (
        ["branch", 0, "teir"],
        "slow",
        "[[branch]] 535.309.01: Additional properties are not allowed ('teir' was unexpected)",
    ),
    (
        ["branch", 0, "version"],
        535.309,
        "[[branch]] 535.309, version: 535.309 is not of type 'string'",
    ),
]


@pytest.fixture
def document():
    return copy.deepcopy(tomllib.loads(TABLES.read_text()))


def put(document, path, value):
    """Put a value into the document, or delete the key if the value is None."""
    for step in path[:-1]:
        document = document[step]
    if value is None:
        del document[path[-1]]
    else:
        document[path[-1]] = value


def objects(value):
    """Yield every object of a JSON document."""
    if isinstance(value, dict):
        yield value
    for one in value.values() if isinstance(value, dict) else value:
        if isinstance(one, dict | list):
            yield from objects(one)


def test_the_file_matches_its_schema(document):
    assert faults(document) == []


def test_the_schema_closes_every_table_and_requires_a_source():
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    tables = [o for o in objects(schema) if o.get("type") == "object"]
    closed = [t for t in tables if t["additionalProperties"] is False]
    # implies, capability and otherwise have free keys, and the schema describes the values.
    assert (len(tables), len(closed)) == (14, 11)
    assert all(t["additionalProperties"] for t in tables if t not in closed)
    sourceless = [t for t in closed if "source" not in t["required"]]
    assert sourceless == [schema, schema["properties"]["branch"]["items"]]


@pytest.mark.parametrize(("path", "value", "fault"), MISSPELT)
def test_the_schema_refuses_misspelt_names(document, path, value, fault):
    put(document, path, value)
    # Before 4.21, as in Debian 12, jsonschema prints "is too short".
    found = [one.replace("is too short", "should be non-empty") for one in faults(document)]
    assert found == [fault]


def test_a_table_without_a_source_is_refused(document):
    del document["place"][1]["source"]
    assert faults(document) == ["[[place]] vulkan-layers: 'source' is a required property"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["layout"], None, "the file has no layout"),
        (["wsl", "store"], None, "[wsl] has no store"),
        (["capability", "ngx", "libraries"], None, "[capability.ngx] has no libraries"),
        (
            ["capability", "ngx", "libraries"],
            "libnvidia-ngx",
            "[capability.ngx], libraries: must be a list of strings, not 'libnvidia-ngx'",
        ),
        (["capability", "ngx"], 3, "[capability], ngx: must be a table, not 3"),
        (["place", 2, "looks"], None, "[[place]] number 3 has no looks"),
        (
            ["place", 2, "otherwise", "10_nvidia.json"],
            1,
            "[[place]] number 3, otherwise, 10_nvidia.json: must be a string, not 1",
        ),
        (["refused"], {}, "refused: must be tables, each under [[refused]], not {}"),
    ],
)
def test_a_missing_key_or_a_wrong_type_is_reported_in_one_line(document, path, value, message):
    put(document, path, value)
    with pytest.raises(DriverError) as e:
        parse_tables(document)
    assert str(e.value) == f"vdriver/libraries.toml: {message}; {HINT}"


def test_invalid_toml_is_reported_in_one_line(tmp_path):
    file = tmp_path / "libraries.toml"
    file.write_text('[companions]\npatterns = ["libnvidia-nvvm.so.4.*"\nsource = "a test"\n')
    with pytest.raises(DriverError) as e:
        read_tables(file)
    reason = "Unclosed array (at line 3, column 1)"
    assert str(e.value) == f"vdriver/libraries.toml: {reason}; {HINT}"


def test_an_unreadable_file_is_reported_in_one_line(tmp_path):
    with pytest.raises(DriverError) as e:
        read_tables(tmp_path / "libraries.toml")
    assert str(e.value) == f"vdriver/libraries.toml: No such file or directory; {HINT}"


def test_the_tables_are_read_without_jsonschema():
    """jsonschema takes 60 ms to import, which every refresh would pay."""
    code = "import sys, vdriver.tables; vdriver.tables.read_tables(); print('jsonschema' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
