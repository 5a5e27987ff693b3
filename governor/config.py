"""Read the node's configuration: YAML files, checked against config.schema.json and merged.

`NAME.yaml` is read first, then `NAME.d/*.yaml` in the order of their names; the last occurrence of
a value wins. Options that are not set have defaults. An invalid file is an error that names the
file and the option; no part of it is used.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from governor import install_paths
from governor.errors import ConfigError
from governor.quota import UNITS

PATH = Path("/etc/tidegate/config.yaml")
SCHEMA_FILE = Path(__file__).with_name("config.schema.json")
MIB = 1 << 20
FILE_LIMIT = 1 << 16
"""Maximum size of a configuration file, in bytes. Parsing a file of this size takes a second; the
limit also guards against endless files."""

LISTED = "tidegate.yaml(5) lists the options"
"""The hint names the manual page, because packages do not contain the documents."""
STRATEGIES = ("timeslice", "mps")
"""The ways to share a GPU; the first is the default of a node."""

_QUANTITY = re.compile(r"([0-9]{1,15})(Ki|Mi|Gi|Ti)?")


def parse_quantity(value: str | int, option: str) -> int:
    """Return a quantity of memory in bytes: a number, or one with Ki, Mi, Gi or Ti."""
    match = _QUANTITY.fullmatch(str(value))
    if not match:
        raise ConfigError(
            f"{option} is {value!r}, but must be a number of bytes, or a whole number followed by"
            " Ki, Mi, Gi or Ti",
            hint="write, for example, 512Mi",
        )
    return int(match[1]) * UNITS[match[2] or ""]


def parse_listen(
    value: str | bool,  # noqa: FBT001 - YAML's
    name: str = "configuration",
    option: str = "metrics.listen",
) -> str:
    """Return where to serve metrics or the page. In YAML 1.1, the word off is read as false."""
    if value is False:
        return "off"
    address = re.fullmatch(r"(?:127\.0\.0\.1|\[::1\]):([1-9][0-9]{0,4})", str(value))
    if value in ("off", "unix") or (address and int(address[1]) < 1 << 16):
        return str(value)
    raise ConfigError(
        f"{name}: {option} is {value!r}, but must be off, unix, 127.0.0.1:PORT or '[::1]:PORT'",
        hint="the page and the metrics show container names: to reach them from other machines, use"
        " a proxy that authenticates clients",
    )


def _spin_us() -> int:
    # A spinning thread occupies a core; on a small machine, that of the thread it is waiting for.
    return 250 if (os.cpu_count() or 1) >= 4 else 0


def _lookahead_us() -> int:
    # The time that a sleeping thread takes to wake up; it is longer if threads may not spin.
    return 120 if _spin_us() else 300


def _library_dir() -> str:
    return str(install_paths.library_dir())


@dataclass(frozen=True)
class Defaults:
    """Defaults for a container that specifies only part of its quota. Shares are percentages."""

    memory: int | None = None
    compute: int = 1
    compute_limit: int = 100


@dataclass(frozen=True)
class Metrics:
    """Where metrics are served: off, unix, or a loopback address."""

    listen: str = "off"


@dataclass(frozen=True)
class Web:
    """Where the page is served: off, unix, or a loopback address."""

    listen: str = "off"


@dataclass(frozen=True)
class MemoryOptions:
    """How much device memory is granted, relative to what a GPU has, and where the rest is kept.

    `host` is the most host memory, in bytes, that is used for parked memory; 0 means half of
    the node's.
    """

    overbook: float = 1.0
    host: int = 0

    @property
    def host_limit(self) -> int:
        """The most host memory that is used for parked memory, in bytes."""
        return self.host or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


@dataclass(frozen=True)
class Config:
    """The configuration in force. Sizes are in bytes; the units of times are in the names.

    The default times come from measurements on an H200 with driver 580: a context switch takes 130
    us, and with 4 ms grants, hand-overs cost about 3 %.
    """

    runtime_dir: str = "/run/tidegate"
    state_dir: str = "/var/lib/tidegate"
    driver_dir: str = "/var/lib/tidegate/driver"
    library_dir: str = field(default_factory=_library_dir)
    scheduling: str = "auto"
    quantum_ms: float = 4.0
    quantum_most_ms: float = 8.0
    lookahead_us: int = field(default_factory=_lookahead_us)
    spin_us: int = field(default_factory=_spin_us)
    switch_us: int = 130
    inflight_us: int = 4000
    idle_release_us: int = 200
    longest_ms: int = 100
    hold_launches: bool = True
    memory_reserve: int = 512 * MIB
    context_memory: int = 520 * MIB
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    on_governor_loss: str = "keep"
    placement: str = "spread"
    on_violation: str = "report"
    unknown_functions: str = "count"
    metrics: Metrics = field(default_factory=Metrics)
    web: Web = field(default_factory=Web)
    strategies: tuple[str, ...] = STRATEGIES[:1]
    gpus: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    mps_quantum_ms: float = 1.0
    mps_fault_s: float = 10.0
    defaults: Defaults = field(default_factory=Defaults)

    def strategy_of(self, index: int, uuid: str) -> str:
        """Return a GPU's strategy: the configured one, otherwise the first one allowed."""
        own = self.gpus.get(uuid) or self.gpus.get(str(index)) or {}
        return own.get("strategy", self.strategies[0])


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration, the files that it was merged from, and which file set which option.

    `origins` maps an option, like `placement` or `defaults.memory`, to a file; an option that is
    not in it has its default.
    """

    config: Config
    files: tuple[str, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)


def parse_config(text: str, name: str = "configuration") -> Config:
    """Return the configuration that `text` describes; raise ConfigError if it is invalid."""
    return merge_config([(name, text)]).config


def merge_config(texts: Iterable[tuple[str, str]]) -> LoadedConfig:
    """Return the merged configuration of several named files; the last value wins.

    Mappings are merged by key; a list replaces an earlier one.
    """
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    names = []
    for name, text in texts:
        document = _read_values(_parse_document(text, name), name)
        names.append(name)
        for option in _options(document):
            origins[option] = name
        _merge(merged, document)
    return LoadedConfig(_build(merged, origins), tuple(names), origins)


def _options(document: Mapping[str, Any]) -> list[str]:
    return [
        option
        for name, value in document.items()
        for option in (
            [f"{name}.{inner}" for inner in value] if isinstance(value, dict) else [name]
        )
    ]


def _merge(into: dict[str, Any], document: Mapping[str, Any]) -> None:
    for name, value in document.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


@functools.cache
def _loader() -> Any:
    """Return the YAML loader, which rejects aliases and duplicate names in a mapping.

    A few lines of nested aliases expand to gigabytes, and a duplicate name is a mistake.
    """
    import yaml
    from yaml.composer import ComposerError
    from yaml.constructor import ConstructorError

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
                raise ComposerError(None, None, "aliases are not accepted", mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002 - YAML's
            names = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in names:
                        what = f"{key.value[:64]} is given twice"
                        raise ConstructorError(None, None, what, key.start_mark)
                    names.add(key.value)
            return super().construct_mapping(node, deep)

    return Loader


def _parse_document(text: str, name: str) -> dict[str, Any]:
    import jsonschema
    import yaml

    try:
        document = yaml.load(text, _loader())  # noqa: S506 - it is a SafeLoader
    except yaml.MarkedYAMLError as e:
        where = f", line {e.problem_mark.line + 1}" if e.problem_mark else ""
        said = " ".join(part for part in (e.problem, e.context) if part)
        raise ConfigError(f"{name}: not YAML{where}: {said}"[:300], hint="correct the file") from e
    except Exception as e:
        # Tags and deep nesting can raise any of Python's exceptions.
        reason = " ".join(str(e).split()) or type(e).__name__
        raise ConfigError(f"{name}: not YAML: {reason}"[:300], hint="correct the file") from e
    document = {} if document is None else document
    try:
        if isinstance(document, dict) and isinstance(document.get("gpus"), dict):
            # An index is parsed as a number by YAML, but the schema expects strings as names.
            document["gpus"] = {str(gpu): own for gpu, own in document["gpus"].items()}
        error = jsonschema.exceptions.best_match(
            jsonschema.Draft202012Validator(read_schema()).iter_errors(document)
        )
    except ValueError as e:  # Python refuses to print a number with thousands of digits
        raise ConfigError(f"{name}: {e}"[:300], hint="correct the file") from e
    if error is not None:
        where = ".".join(str(part) for part in error.absolute_path) or "the file"
        if error.validator == "additionalProperties" and "properties" in error.schema:
            raise _unknown(name, error)
        raise ConfigError(
            f"{name}: {where}: {error.message}"[:300],
            hint=LISTED,
        )
    return dict(_with_integers(document))


@functools.cache
def read_schema() -> dict[str, Any]:
    """Return the schema, which states each option's meaning and when a new value takes effect."""
    schema: dict[str, Any] = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    return schema


EFFECTS = ("now", "next", "restart")
"""When a reloaded value takes effect: at once, for containers and processes that start later, or
after a restart of the governor. An option without `effect` in the schema needs a restart."""


def effect_of(option: str) -> str:
    """Return when a new value of an option takes effect, one of EFFECTS."""
    outer = read_schema()["properties"][option.partition(".")[0]]
    return str(outer.get("effect", "restart"))


def option_schema(option: str) -> dict[str, Any]:
    """Return the schema of an option, like `placement` or `defaults.memory`."""
    found: dict[str, Any] = read_schema()
    for name in option.split("."):
        found = found["properties"][name]
    return found


def show_value(option: str, value: Any) -> str:
    """Return an option's value as it would be written in the file."""
    is_quantity = option_schema(option).get("type") == ["string", "integer"]
    if is_quantity and isinstance(value, int) and value:
        unit, size = next((u, s) for u, s in reversed(UNITS.items()) if value % s == 0)
        return f"{value // size}{unit}"
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(_with_integers(value))


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return the options that differ, with both values, in the order of the options."""
    before, after = describe(old), describe(new)
    found: dict[str, tuple[Any, Any]] = {}
    for name, value in before.items():
        if isinstance(value, dict) and name != "gpus":
            for inner, own in value.items():
                if own != after[name][inner]:
                    found[f"{name}.{inner}"] = own, after[name][inner]
        elif value != after[name]:
            found[name] = value, after[name]
    return found


def _unknown(name: str, error: Any) -> ConfigError:
    """Return the error for an unknown option; its hint names the option probably meant."""
    import difflib

    path = [str(part) for part in error.absolute_path]
    known = error.schema["properties"]
    option = next(str(key) for key in error.instance if key not in known)
    outer, _, inner = option.partition(".")
    close = difflib.get_close_matches(option, known, n=1)
    if inner in known.get(outer, {}).get("properties", {}):
        hint = f"write {outer}: and {inner}: below it, indented"
    elif close:
        hint = f"did you mean {'.'.join([*path, close[0]])}?"
    else:
        hint = LISTED
    return ConfigError(f"{name}: {'.'.join([*path, option])[:200]} is not an option", hint=hint)


def _with_integers(value: Any) -> Any:
    """Return a value with 2.0 replaced by 2, which JSON Schema accepts as an integer."""
    if isinstance(value, dict):
        return {key: _with_integers(inner) for key, inner in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _read_values(document: dict[str, Any], name: str) -> dict[str, Any]:
    """Return one file's values in Config's form, without options that it does not set."""
    values = dict(document)
    for option in ("quantum_ms", "quantum_most_ms", "mps_quantum_ms", "mps_fault_s"):
        if math.isnan(values.get(option, 1)):
            # NaN is neither below the minimum nor above the maximum.
            raise ConfigError(f"{name}: {option}: not a number", hint="write, for example, 4.0")
    for option in ("memory_reserve", "context_memory"):
        if option in values:
            values[option] = parse_quantity(values[option], f"{name}: {option}")
    if "memory" in values:
        if math.isnan(values["memory"].get("overbook", 1)):
            raise ConfigError(
                f"{name}: memory.overbook: not a number", hint="write, for example, 1.5"
            )
        if "host" in values["memory"]:
            host = parse_quantity(values["memory"]["host"], f"{name}: memory.host")
            values["memory"] = {**values["memory"], "host": host}
    if "memory" in values.get("defaults", {}):
        memory = parse_quantity(values["defaults"]["memory"], f"{name}: defaults.memory")
        values["defaults"] = {**values["defaults"], "memory": memory}
    for option in ("metrics", "web"):
        if "listen" in values.get(option, {}):
            listen = parse_listen(values[option]["listen"], name, f"{option}.listen")
            values[option] = {**values[option], "listen": listen}
    return values


def _build(values: dict[str, Any], origins: Mapping[str, str]) -> Config:
    if "strategies" in values:
        values["strategies"] = tuple(values["strategies"])
    allowed = values.get("strategies", Config.strategies)
    for gpu, own in values.get("gpus", {}).items():
        if own["strategy"] not in allowed:
            raise ConfigError(
                f"{origins[f'gpus.{gpu}']}: gpus.{gpu}.strategy is {own['strategy']}, but"
                f" strategies allows only {', '.join(allowed)}",
                hint="add it to strategies, or choose one of those",
            )
    inner: dict[str, Any] = {
        "memory": MemoryOptions(**values.pop("memory", {})),
        "metrics": Metrics(**values.pop("metrics", {})),
        "web": Web(**values.pop("web", {})),
        "defaults": Defaults(**values.pop("defaults", {})),
    }
    return Config(**values, **inner)


def find_files(path: Path) -> list[Path]:
    """Return the files that are merged: the one at `path` if it exists, then its drop-ins.

    The drop-ins of `config.yaml` are `config.d/*.yaml` next to it. Raise ConfigError if they cannot
    be listed.
    """
    found = [path] if os.path.lexists(path) else []
    if path.suffix != ".yaml":
        return found
    directory = path.with_suffix(".d")
    try:
        names = sorted(os.listdir(directory))  # noqa: PTH208
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except OSError as e:
        raise ConfigError(f"{directory}: {e.strerror}", hint="make it readable") from e
    return found + [directory / name for name in names if is_drop_in(name)]


def is_drop_in(name: str) -> bool:
    """Return whether a file with this name is read from the directory of drop-ins."""
    return name.endswith(".yaml") and not name.startswith(".")


def load_config(path: str | Path | None = None) -> LoadedConfig:
    """Read the file at `path` and its drop-ins; without a path, the node's own, if any."""
    file = Path(path or PATH)
    files = find_files(file)
    if path is not None and file not in files:
        files.insert(0, file)  # reading it reports that it does not exist
    return merge_config([(str(one), _read_text(one)) for one in files])


def _read_text(file: Path) -> str:
    try:
        # O_NONBLOCK: if the name is a FIFO, do not wait for a writer.
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            mode = os.fstat(fd).st_mode
            if not stat.S_ISREG(mode):
                what = "Is a directory" if stat.S_ISDIR(mode) else "not a regular file"
                raise ConfigError(f"{file}: {what}", hint="name a readable file")
            data = b""
            while len(data) <= FILE_LIMIT and (part := os.read(fd, FILE_LIMIT)):
                data += part
        finally:
            os.close(fd)
        if len(data) > FILE_LIMIT:
            raise ConfigError(f"{file}: more than {FILE_LIMIT >> 10} KiB", hint="make it smaller")
        return data.decode()
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "not UTF-8"
        raise ConfigError(f"{file}: {reason}", hint="name a readable file") from e


def read_config(path: str | Path | None = None) -> Config:
    """Read the file at `path` and its drop-ins; without a path, the node's own, if any."""
    return load_config(path).config


def describe(config: Config) -> dict[str, Any]:
    """Return the configuration as plain values, in the order of its options."""
    plain: dict[str, Any] = {f.name: getattr(config, f.name) for f in fields(config)}
    plain["memory"] = {f.name: getattr(config.memory, f.name) for f in fields(config.memory)}
    plain["metrics"] = {f.name: getattr(config.metrics, f.name) for f in fields(config.metrics)}
    plain["web"] = {f.name: getattr(config.web, f.name) for f in fields(config.web)}
    plain["strategies"] = list(config.strategies)
    plain["gpus"] = {gpu: dict(own) for gpu, own in config.gpus.items()}
    plain["defaults"] = {f.name: getattr(config.defaults, f.name) for f in fields(config.defaults)}
    return plain
