"""The node's configuration: one YAML file, checked against config.schema.json.

A file that is absent means the defaults; one that is wrong is an error that names the option.
Nothing is guessed from a wrong file.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from governor.errors import ConfigError

PATH = Path("/etc/tidegate/config.yaml")
SCHEMA_FILE = Path(__file__).with_name("config.schema.json")
MIB = 1 << 20

STRATEGIES = ("timeslice", "mps")
"""How a GPU can be shared; the first is what a node does that says nothing."""

_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_QUANTITY = re.compile(r"([0-9]{1,15})(Ki|Mi|Gi|Ti)?")


def parse_quantity(value: str | int, option: str) -> int:
    """Return a quantity of memory in bytes: a number, or one with Ki, Mi, Gi or Ti."""
    match = _QUANTITY.fullmatch(str(value))
    if not match:
        raise ConfigError(
            f"{option} is {value!r}, accepted are bytes or a whole number with Ki, Mi, Gi or Ti",
            hint="write it like 512Mi",
        )
    return int(match[1]) * _UNITS[match[2] or ""]


def parse_listen(value: str | bool, name: str = "configuration") -> str:  # noqa: FBT001 - YAML's
    """Return where to serve metrics. To YAML 1.1 the word off is false."""
    if value is False:
        return "off"
    address = re.fullmatch(r"(?:127\.0\.0\.1|\[::1\]):([1-9][0-9]{0,4})", str(value))
    if value in ("off", "unix") or (address and int(address[1]) < 1 << 16):
        return str(value)
    raise ConfigError(
        f"{name}: metrics.listen is {value!r}, "
        "accepted are off, unix, 127.0.0.1:PORT and '[::1]:PORT'",
        hint="metrics name containers: to show them elsewhere put a proxy that asks who it is"
        " in front",
    )


def _spin_us() -> int:
    # A thread that spins takes a core: on a small machine from the one that it waits for.
    return 250 if (os.cpu_count() or 1) >= 4 else 0


def _lookahead_us() -> int:
    # How long a thread that slept takes to answer; where none may spin it is the longer.
    return 120 if _spin_us() else 300


def _library_dir() -> str:
    checkout = Path(__file__).resolve().parent.parent / "build/meson/libcontrol"
    return str(checkout) if checkout.is_dir() else "/usr/lib/tidegate"


@dataclass(frozen=True)
class Defaults:
    """What a container gets that names only a part of its quota. Shares are percent."""

    memory: int | None = None
    compute: int = 1
    compute_limit: int = 100


@dataclass(frozen=True)
class Metrics:
    """Where metrics are served: off, unix, or an address of this machine's own."""

    listen: str = "off"


@dataclass(frozen=True)
class Config:
    """The configuration in force. Sizes are bytes, the units of times are in the names.

    The defaults of times come from measurements on an H200 with driver 580: a change of context
    takes 130 us, a grant of 4 ms keeps the loss of hand-overs near 3 %.
    """

    runtime_dir: str = "/run/tidegate"
    state_dir: str = "/var/lib/tidegate"
    driver_dir: str = "/var/lib/tidegate/driver"
    library_dir: str = field(default_factory=_library_dir)
    quantum_ms: float = 4.0
    quantum_most_ms: float = 8.0
    lookahead_us: int = field(default_factory=_lookahead_us)
    spin_us: int = field(default_factory=_spin_us)
    switch_us: int = 130
    inflight_us: int = 4000
    idle_release_us: int = 200
    longest_ms: int = 1000
    hold_launches: bool = True
    memory_reserve: int = 512 * MIB
    context_memory: int = 520 * MIB
    on_governor_loss: str = "keep"
    placement: str = "spread"
    on_violation: str = "report"
    metrics: Metrics = field(default_factory=Metrics)
    strategies: tuple[str, ...] = STRATEGIES[:1]
    gpus: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    mps_quantum_ms: float = 1.0
    mps_fault_s: float = 10.0
    defaults: Defaults = field(default_factory=Defaults)

    def strategy_of(self, index: int, uuid: str) -> str:
        """Return how a GPU is shared: as the node says of it, otherwise the first it allows."""
        own = self.gpus.get(uuid) or self.gpus.get(str(index)) or {}
        return own.get("strategy", self.strategies[0])


def parse_config(text: str, name: str = "configuration") -> Config:
    """Return the configuration that `text` describes; ConfigError names what is wrong with it."""
    import jsonschema
    import yaml

    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as e:
        reason = " ".join(str(e).split())
        raise ConfigError(f"{name}: not YAML: {reason}", hint="correct the file") from e
    document = {} if document is None else document
    if isinstance(document, dict) and isinstance(document.get("gpus"), dict):
        # An index is a number in YAML and a name in JSON.
        document["gpus"] = {str(gpu): own for gpu, own in document["gpus"].items()}
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    error = jsonschema.exceptions.best_match(
        jsonschema.Draft202012Validator(schema).iter_errors(document)
    )
    if error is not None:
        where = ".".join(str(part) for part in error.absolute_path) or "the file"
        if error.validator == "additionalProperties" and "properties" in error.schema:
            raise _unknown(name, error)
        raise ConfigError(
            f"{name}: {where}: {error.message}"[:300],
            hint="docs/reference/configuration.md lists the options",
        )
    return _build(_whole(document), name)


def _unknown(name: str, error: Any) -> ConfigError:
    """Return the error for an option that is none, with the one that was probably meant."""
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
        hint = "docs/reference/configuration.md lists the options"
    return ConfigError(f"{name}: {'.'.join([*path, option])[:200]} is no option", hint=hint)


def _whole(value: Any) -> Any:
    """Return a value with 2.0 as 2: JSON Schema takes it for an integer, the arbiter does not."""
    if isinstance(value, dict):
        return {key: _whole(inner) for key, inner in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _build(document: dict[str, Any], name: str) -> Config:
    values = dict(document)
    for option in ("quantum_ms", "quantum_most_ms", "mps_quantum_ms", "mps_fault_s"):
        if math.isnan(values.get(option, 1)):
            # Neither below the minimum nor above the maximum.
            raise ConfigError(f"{name}: {option}: not a number", hint="write it like 4.0")
    for option in ("memory_reserve", "context_memory"):
        if option in values:
            values[option] = parse_quantity(values[option], f"{name}: {option}")
    if "strategies" in values:
        values["strategies"] = tuple(values["strategies"])
    allowed = values.get("strategies", Config.strategies)
    for gpu, own in values.get("gpus", {}).items():
        if own["strategy"] not in allowed:
            raise ConfigError(
                f"{name}: gpus.{gpu}.strategy is {own['strategy']}, strategies allows"
                f" {', '.join(allowed)}",
                hint="add it to strategies, or choose one of those",
            )
    defaults = dict(values.pop("defaults", {}))
    if "memory" in defaults:
        defaults["memory"] = parse_quantity(defaults["memory"], f"{name}: defaults.memory")
    metrics = Metrics(parse_listen(values.pop("metrics", {}).get("listen", "off"), name))
    return Config(**values, metrics=metrics, defaults=Defaults(**defaults))


def read_config(path: str | Path | None = None) -> Config:
    """Read the file at `path`; without one, the node's own if it exists."""
    if path is None and not PATH.exists():
        return Config()
    file = Path(path or PATH)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "not UTF-8"
        raise ConfigError(f"{file}: {reason}", hint="name a readable file") from e
    return parse_config(text, str(file))


def describe(config: Config) -> dict[str, Any]:
    """Return the configuration as plain values, in the order of its options."""
    plain: dict[str, Any] = {f.name: getattr(config, f.name) for f in fields(config)}
    plain["metrics"] = {f.name: getattr(config.metrics, f.name) for f in fields(config.metrics)}
    plain["strategies"] = list(config.strategies)
    plain["gpus"] = {gpu: dict(own) for gpu, own in config.gpus.items()}
    plain["defaults"] = {f.name: getattr(config.defaults, f.name) for f in fields(config.defaults)}
    return plain
