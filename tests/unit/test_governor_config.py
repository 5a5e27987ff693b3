"""The node's configuration: schema and dataclass say the same, and a wrong file is one line that names the option."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from governor.config import (
    MIB,
    SCHEMA_FILE,
    Config,
    Defaults,
    Metrics,
    describe,
    parse_config,
    parse_quantity,
    read_config,
)
from governor.errors import ConfigError

SCHEMA = json.loads(SCHEMA_FILE.read_text())
OPTIONS = SCHEMA["properties"]


def names(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def line(error: ConfigError) -> str:
    text = str(error)
    assert "\n" not in text
    assert len(text) < 500
    assert error.status == 78
    return text


def test_schema_and_dataclass_have_the_same_options() -> None:
    assert set(OPTIONS) == names(Config)
    assert set(OPTIONS["defaults"]["properties"]) == names(Defaults)
    assert set(OPTIONS["metrics"]["properties"]) == names(Metrics)


@pytest.mark.parametrize("option", sorted(set(OPTIONS) - {"defaults", "metrics"}))
def test_every_default_is_one_that_the_file_may_say(option: str) -> None:
    value = getattr(Config(), option)
    assert getattr(parse_config(json.dumps({option: value})), option) == value
    assert OPTIONS[option]["description"]


def test_what_is_described_is_accepted_again() -> None:
    config = parse_config(
        "quantum_ms: 2.5\ndefaults: {memory: 4Gi, compute: 5}\nplacement: pack\nmetrics: {listen: unix}\n"
    )
    assert config.metrics == Metrics("unix")
    assert (config.quantum_ms, config.placement) == (2.5, "pack")
    assert config.defaults == Defaults(memory=4 << 30, compute=5, compute_limit=100)
    assert parse_config(json.dumps(describe(config))) == config


@pytest.mark.parametrize("text", ["", "---\n", "# nothing\n", "{}"])
def test_an_empty_file_means_the_defaults(text: str) -> None:
    assert parse_config(text) == Config()


def test_a_container_without_memory_of_its_own_needs_no_default() -> None:
    assert describe(Config())["defaults"]["memory"] is None


@pytest.mark.parametrize(
    ("text", "names_"),
    [
        ("quantum_ms: [", "not YAML"),
        ("a: b: c", "not YAML"),
        ("\ttabs: 1", "not YAML"),
        ("\x00", "not YAML"),
        ("!!python/object/apply:os.system ['true']", "not YAML"),
        ("just text", "the file"),
        ("[1, 2]", "the file"),
        ("quantum: 4", "quantum"),
        ("quantum_ms: fast", "quantum_ms"),
        ("quantum_ms: 0.5", "quantum_ms"),
        ("quantum_ms: 21", "quantum_ms"),
        ("quantum_ms: .nan", "quantum_ms"),
        ("quantum_ms: .inf", "quantum_ms"),
        ("quantum_ms: true", "quantum_ms"),
        ("lookahead_us: -1", "lookahead_us"),
        ("lookahead_us: 1.5", "lookahead_us"),
        ("hold_launches: 1", "hold_launches"),
        ("runtime_dir: run/tidegate", "runtime_dir"),
        ("driver_dir: ''", "driver_dir"),
        ("library_dir: null", "library_dir"),
        ("on_governor_loss: stop", "on_governor_loss"),
        ("placement: anywhere", "placement"),
        ("memory_reserve: 1.5Gi", "memory_reserve"),
        ("memory_reserve: -1", "memory_reserve"),
        ("context_memory: 1GB", "context_memory"),
        ("context_memory: '1 Gi'", "context_memory"),
        ("context_memory: ''", "context_memory"),
        ("defaults: 4Gi", "defaults"),
        ("defaults: {memory: lots}", "defaults.memory"),
        ("defaults: {compute: 0}", "defaults.compute"),
        ("defaults: {compute: 101}", "defaults.compute"),
        ("defaults: {compute_limit: half}", "defaults.compute_limit"),
        ("defaults: {cpu: 1}", "cpu"),
        ("1: 2", "1"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_the_option(text: str, names_: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "/etc/tidegate/config.yaml")
    assert names_ in line(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("placements: pack", "node.yaml: placements is no option; did you mean placement?"),
        (
            "metrics.listen: unix",
            "node.yaml: metrics.listen is no option; write metrics: and listen: below it, indented",
        ),
        (
            "defaults: {mem: 1Gi, compute: 5}",
            "node.yaml: defaults.mem is no option; did you mean defaults.memory?",
        ),
        (
            "weather: fine",
            "node.yaml: weather is no option; docs/reference/configuration.md lists the options",
        ),
        (
            "memory_reserve: 1G",
            (
                "node.yaml: memory_reserve is '1G', accepted are bytes or a whole number with Ki,"
                " Mi, Gi or Ti; write it like 512Mi"
            ),
        ),
    ],
)
def test_what_is_no_option_is_answered_with_what_was_meant(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "node.yaml")
    assert line(caught.value) == says


def test_a_whole_number_may_be_written_with_a_point() -> None:
    config = parse_config("spin_us: 20.0\ndefaults: {compute: 5.0}\nquantum_ms: 4.0\n")
    assert isinstance(config.spin_us, int)
    assert isinstance(config.defaults.compute, int)
    assert config == Config(spin_us=20, quantum_ms=4.0, defaults=Defaults(compute=5))


def test_files(tmp_path: Path) -> None:
    good = tmp_path / "config.yaml"
    good.write_text("placement: pack\n")
    assert read_config(good).placement == "pack"
    for path, says in (
        (tmp_path / "absent.yaml", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "binary.yaml", "not UTF-8"),
    ):
        (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError) as caught:
            read_config(path)
        assert str(path) in line(caught.value)
        assert says in line(caught.value)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("1Ki", 1024),
        ("520Mi", 520 * MIB),
        ("8Gi", 8 << 30),
        ("2Ti", 2 << 40),
    ],
)
def test_quantities(value: str | int, size: int) -> None:
    assert parse_quantity(value, "option") == size


@pytest.mark.parametrize(
    "value", ["", "Mi", "1 Mi", "1.5Gi", "-1", "+1", "1M", "1mi", "1MiB", "0x10", "1e3", "9" * 16]
)
def test_quantities_that_are_none(value: str) -> None:
    with pytest.raises(ConfigError, match="memory_reserve is"):
        parse_quantity(value, "memory_reserve")


def test_a_gpu_has_its_own_strategy_by_index_or_uuid() -> None:
    uuid = "GPU-6d0b7ab0-2f4f-4d5e-9b3a-0c2d9d2a7f10"
    text = f"strategies: [mps, timeslice]\ngpus: {{1: {{strategy: timeslice}}, {uuid}: {{strategy: timeslice}}}}\ndefaults: {{memory: 1Gi}}\n"
    config = parse_config(text)
    assert [config.strategy_of(i, "GPU-x") for i in range(3)] == ["mps", "timeslice", "mps"]
    assert config.strategy_of(7, uuid) == "timeslice"
    assert parse_config(json.dumps(describe(config))) == config


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("gpus: {1: {strategy: mps}}", "gpus.1.strategy is mps, strategies allows timeslice"),
        ("strategies: []", "strategies"),
        ("strategies: [mps, mps]", "strategies"),
        ("strategies: [passthrough]", "strategies"),
        ("gpus: {-1: {strategy: timeslice}}", "gpus"),
        ("gpus: {1: timeslice}", "gpus.1"),
        ("gpus: {1: {}}", "gpus.1"),
        ("gpus: [1]", "gpus"),
        ("mps_quantum_ms: .nan", "mps_quantum_ms"),
    ],
)
def test_a_wrong_strategy_is_an_error_that_names_it(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    assert named in line(caught.value)
