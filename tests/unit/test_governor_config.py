"""Test the node's configuration: the schema and the dataclass agree, and an invalid file yields one
line that names the option.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from governor import cli
from governor.config import (
    EFFECTS,
    FILE_LIMIT,
    MIB,
    SCHEMA_FILE,
    Config,
    Defaults,
    MemoryOptions,
    Metrics,
    describe,
    differences,
    effect_of,
    load_config,
    option_schema,
    parse_config,
    parse_quantity,
    read_config,
    show_value,
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
    assert set(OPTIONS["memory"]["properties"]) == names(MemoryOptions)


@pytest.mark.parametrize("option", sorted(set(OPTIONS) - {"defaults", "memory", "metrics", "web"}))
def test_every_default_is_valid_in_the_file(option: str) -> None:
    value = getattr(Config(), option)
    assert getattr(parse_config(json.dumps({option: value})), option) == value
    assert OPTIONS[option]["description"]


def test_a_described_configuration_is_valid() -> None:
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


def test_there_is_no_default_memory_quota() -> None:
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
def test_an_invalid_file_yields_one_line_that_names_the_option(text: str, names_: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "/etc/tidegate/config.yaml")
    assert names_ in line(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("placements: pack", "node.yaml: placements is not an option; did you mean placement?"),
        (
            "metrics.listen: unix",
            "node.yaml: metrics.listen is not an option; write metrics: and listen: below it, indented",
        ),
        (
            "defaults: {mem: 1Gi, compute: 5}",
            "node.yaml: defaults.mem is not an option; did you mean defaults.memory?",
        ),
        (
            "weather: fine",
            "node.yaml: weather is not an option; tidegate.yaml(5) lists the options",
        ),
        (
            "memory_reserve: 1G",
            (
                "node.yaml: memory_reserve is '1G', but must be a number of bytes, or a whole number"
                " followed by Ki, Mi, Gi or Ti; write, for example, 512Mi"
            ),
        ),
    ],
)
def test_an_unknown_option_is_reported_with_the_probable_one(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "node.yaml")
    assert line(caught.value) == says


def test_a_whole_number_may_be_written_with_a_decimal_point() -> None:
    config = parse_config("spin_us: 20.0\ndefaults: {compute: 5.0}\nquantum_ms: 4.0\n")
    assert isinstance(config.spin_us, int)
    assert isinstance(config.defaults.compute, int)
    assert config == Config(spin_us=20, quantum_ms=4.0, defaults=Defaults(compute=5))


def test_an_error_names_the_file_that_cannot_be_read(tmp_path: Path) -> None:
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
def test_quantities_are_parsed(value: str | int, size: int) -> None:
    assert parse_quantity(value, "option") == size


@pytest.mark.parametrize(
    "value", ["", "Mi", "1 Mi", "1.5Gi", "-1", "+1", "1M", "1mi", "1MiB", "0x10", "1e3", "9" * 16]
)
def test_invalid_quantities_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="memory_reserve is"):
        parse_quantity(value, "memory_reserve")


def test_the_strategy_of_a_gpu_is_set_by_index_or_uuid() -> None:
    uuid = "GPU-6d0b7ab0-2f4f-4d5e-9b3a-0c2d9d2a7f10"
    text = f"strategies: [mps, timeslice]\ngpus: {{1: {{strategy: timeslice}}, {uuid}: {{strategy: timeslice}}}}\ndefaults: {{memory: 1Gi}}\n"
    config = parse_config(text)
    assert [config.strategy_of(i, "GPU-x") for i in range(3)] == ["mps", "timeslice", "mps"]
    assert config.strategy_of(7, uuid) == "timeslice"
    assert parse_config(json.dumps(describe(config))) == config


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "gpus: {1: {strategy: mps}}",
            "gpus.1.strategy is mps, but strategies allows only timeslice",
        ),
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
def test_an_error_names_the_invalid_strategy(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    assert named in line(caught.value)


# ---- several files ----


def put(directory: Path, **texts: str) -> Path:
    """Write config.yaml, if given, and drop-ins by name; return the path of config.yaml."""
    (directory / "config.d").mkdir(exist_ok=True)
    for name, text in texts.items():
        path = directory / "config.yaml" if name == "main" else directory / "config.d" / name
        path.write_text(text)
    return directory / "config.yaml"


def test_drop_ins_take_precedence_in_the_order_of_their_names(tmp_path: Path) -> None:
    main = put(tmp_path, **{
        "main": "placement: pack\ndefaults: {memory: 4Gi, compute: 5}\nstrategies: [timeslice, mps]\n",
        "20-b.yaml": "placement: topology\ndefaults: {compute: 7}\n",
        "10-a.yaml": "placement: spread\ndefaults: {compute: 6, compute_limit: 50}\nstrategies: [mps]\n",
        "30-empty.yaml": "# nothing\n",
        ".hidden.yaml": "placement: pack\n",
        "40-other.yml": "placement: pack\n",
        "50-old.yaml~": "placement: pack\n",
    })  # fmt: skip
    loaded = load_config(main)
    assert loaded.config == Config(
        placement="topology", defaults=Defaults(4 << 30, 7, 50), strategies=("mps",)
    )
    assert [Path(file).name for file in loaded.files] == [
        "config.yaml", "10-a.yaml", "20-b.yaml", "30-empty.yaml"
    ]  # fmt: skip
    named = {option: Path(file).name for option, file in loaded.origins.items()}
    assert named == {
        "placement": "20-b.yaml",
        "defaults.memory": "config.yaml",
        "defaults.compute": "20-b.yaml",
        "defaults.compute_limit": "10-a.yaml",
        "strategies": "10-a.yaml",
    }


def test_drop_ins_need_no_main_file_and_each_main_file_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, **{"a.yaml": "placement: pack\n"})
    monkeypatch.setattr("governor.config.PATH", tmp_path / "config.yaml")
    assert read_config().placement == "pack"
    (tmp_path / "node.yaml").write_text("quantum_ms: 2\n")
    assert read_config(tmp_path / "node.yaml") == Config(quantum_ms=2)
    (tmp_path / "node.d").mkdir()
    (tmp_path / "node.d/x.yaml").write_text("spin_us: 1\n")
    assert read_config(tmp_path / "node.yaml") == Config(quantum_ms=2, spin_us=1)


def test_an_error_names_the_file_that_has_it(tmp_path: Path) -> None:
    main = put(tmp_path, **{"main": "placement: pack\n", "x.yaml": "placemnt: pack\n"})
    with pytest.raises(ConfigError) as caught:
        load_config(main)
    assert line(caught.value) == (
        f"{tmp_path}/config.d/x.yaml: placemnt is not an option; did you mean placement?"
    )
    # Each file alone is valid.
    put(
        tmp_path,
        **{"x.yaml": "gpus: {0: {strategy: mps}}\n", "y.yaml": "strategies: [timeslice]\n"},
    )
    with pytest.raises(ConfigError) as caught:
        load_config(main)
    assert line(caught.value).startswith(f"{tmp_path}/config.d/x.yaml: gpus.0.strategy is mps,")
    put(tmp_path, **{"y.yaml": "strategies: [timeslice, mps]\n"})
    assert load_config(main).config.strategy_of(0, "x") == "mps"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("placement: pack\nplacement: spread\n", "line 2: placement is given twice"),
        ("defaults: {compute: 1, compute: 2}", "line 1: compute is given twice"),
        ("gpus: {0: {strategy: mps}, '0': {strategy: mps}}", "line 1: 0 is given twice"),
        ("a: &a [x]\nplacement: *a\n", "line 2: aliases are not accepted"),
        ("[" * 100_000, "not YAML"),
        ("placement: !!timestamp x", "not YAML"),
        ("placement: !!int ''", "not YAML"),
        ("placement: 2001-99-99", "not YAML"),
        ("quantum_ms: " + "9" * 5000, "not YAML"),
        ("spin_us: 0x" + "f" * 5000, "digits"),
        ("spin_us: 1" + ":59" * 5000, "digits"),
        ("gpus:\n  ? 0x" + "f" * 5000 + "\n  : {}", "digits"),
    ],
)
def test_harmful_or_ambiguous_yaml_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "node.yaml")
    assert says in line(caught.value)


def test_aliases_of_aliases_take_neither_time_nor_memory() -> None:
    levels = "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]\n" for i in range(40))
    with pytest.raises(ConfigError, match="aliases are not accepted"):
        parse_config(f"a0: &a0 [x]\n{levels}placement: *a40\n")


def test_a_special_or_oversized_file_is_refused_at_once(tmp_path: Path) -> None:
    fifo = tmp_path / "config.yaml"
    os.mkfifo(fifo)
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (FILE_LIMIT + 1))
    for path, says in (
        (fifo, "not a regular file"),
        (large, "more than 64 KiB"),
        (Path("/dev/zero"), "not a regular"),
    ):
        with pytest.raises(ConfigError, match=says):
            read_config(path)


def test_every_option_states_when_a_new_value_takes_effect() -> None:
    assert {effect_of(option) for option in OPTIONS} == set(EFFECTS)
    assert {option for option in OPTIONS if effect_of(option) == "now"} == {
        "inflight_us", "idle_release_us", "hold_launches", "on_violation", "mps_fault_s",
        "unknown_functions",
    }  # fmt: skip
    assert effect_of("defaults.memory") == "next"
    assert effect_of("runtime_dir") == "restart"


def test_differences_name_inner_options_and_show_values_as_written() -> None:
    new = parse_config(
        "placement: pack\ndefaults: {memory: 1536Mi}\nmemory: {host: 256Gi}\nmemory_reserve: 1Gi\n"
        "gpus: {0: {strategy: timeslice}}"
    )
    found = differences(Config(), new)
    shown = {o: tuple(show_value(o, v) for v in values) for o, values in found.items()}
    assert shown == {
        "memory_reserve": ("512Mi", "1Gi"),
        "placement": ("spread", "pack"),
        "gpus": ("{}", '{"0": {"strategy": "timeslice"}}'),
        "memory.host": ("0", "256Gi"),
        "defaults.memory": ("none", "1536Mi"),
    }
    assert option_schema("defaults.memory")["description"]
    assert differences(new, new) == {}


def test_check_merges_a_drop_in_with_its_main_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    main = put(tmp_path, **{
        "main": "strategies: [timeslice, mps]\n", "x.yaml": "gpus: {0: {strategy: mps}}\n"
    })  # fmt: skip
    drop_in = tmp_path / "config.d/x.yaml"
    for file in (main, drop_in):
        assert cli.main(["check", str(file)]) == 0
        assert capfd.readouterr().out == f"{main}, {drop_in}: accepted\n"
    drop_in.write_text("gpus: {0: {strategy: none}}\n")
    assert cli.main(["check", str(main)]) == 78
    assert capfd.readouterr().err.startswith(
        f"tidegate: {drop_in}: gpus.0.strategy: 'none' is not one"
    )
    draft = tmp_path / "config.d/x.yaml.new"
    draft.write_text("placement: pack\n")
    assert cli.main(["check", str(draft)]) == 0
    assert capfd.readouterr().out == f"{draft}: accepted\n"


def test_check_accepts_a_relative_path(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = put(tmp_path, **{"main": "quantum_ms: 5\n", "x.yaml": "placement: pack\n"})
    monkeypatch.chdir(tmp_path / "config.d")
    for name in ("x.yaml", "./x.yaml"):
        assert cli.main(["check", name]) == 0
        assert capfd.readouterr().out == f"{main}, {tmp_path}/config.d/x.yaml: accepted\n"
    monkeypatch.chdir(tmp_path)
    for name in ("config.yaml", "config.d/x.yaml"):
        assert cli.main(["check", name]) == 0
        assert "x.yaml: accepted\n" in capfd.readouterr().out
    for name, why in ((".", "Is a directory"), ("/", "Is a directory"), ("/none", "No such file")):
        assert cli.main(["check", name]) == 78
        assert capfd.readouterr().err.startswith(f"tidegate: {name}: {why}")


def test_the_options_for_overbooked_memory_are_parsed() -> None:
    config = parse_config("memory: {overbook: 1.7, host: 256Gi}\n")
    assert config.memory == MemoryOptions(1.7, 256 << 30)
    assert config.memory.host_limit == 256 << 30
    assert Config().memory == MemoryOptions(1.0, 0)
    assert 0 < Config().memory.host_limit < 1 << 50
    assert describe(config)["memory"] == {"overbook": 1.7, "host": 256 << 30}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("memory: {overbook: 0.9}", "memory.overbook: 0.9 is less than the minimum of 1"),
        ("memory: {overbook: 17}", "memory.overbook: 17 is greater than the maximum of 16"),
        ("memory: {overbook: .nan}", "memory.overbook: not a number"),
        ("memory: {host: much}", "memory.host is 'much', but must be a number of bytes"),
        ("memory: {hosts: 1Gi}", "memory.hosts is not an option"),
    ],
)
def test_an_invalid_option_for_overbooked_memory_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    assert says in caught.value.message
