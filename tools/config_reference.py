"""Generates docs/reference/configuration.md from governor/config.schema.json and `Config`.

`python tools/config_reference.py` writes the page; `--check` fails if it is stale. The meaning of
an option is its description in the schema; its default is taken from `Config`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from governor.config import SCHEMA_FILE, Config, Defaults, Metrics, Web, effect_of  # noqa: E402
from tools.generated import write_or_check  # noqa: E402

PAGE = ROOT / "docs/reference/configuration.md"
MIB = 1 << 20

HEAD = """\
<!-- Written by `python tools/config_reference.py` from governor/config.schema.json. -->

# Configuration

The governor reads `/etc/tidegate/config.yaml`, then `/etc/tidegate/config.d/*.yaml` in the order of
their names. If an option is given in several files, the last value wins: mappings are merged key by
key, and a list replaces the earlier one. Another file, named by `--config`, has its own drop-ins:
those of `node.yaml` are `node.d/*.yaml` next to it. If there is no file, all defaults apply.

An unknown option, an option that is given twice in one file, and a value that is not accepted are
errors ([`config`, status 78](errors.md)) that name the file and the option. The governor does not
start with such a file, and a running governor keeps its configuration
([how to change it](../howto/configure.md)). YAML's aliases are not accepted.

| a new value | applies to |
| --- | --- |
| now | running containers, once the governor has [reloaded](../howto/configure.md) the file |
| next | containers and processes that start after that |
| restart | the governor once it has been restarted |

Sizes are bytes, or whole numbers with `Ki`, `Mi`, `Gi` or `Ti`. A name with a dot is an option
within another: `defaults.memory` is `memory:` within `defaults:`, as in the [example](#example).

| option | accepted | default | a new value | meaning |
| --- | --- | --- | --- | --- |
"""

EXAMPLE = """
## Example

```yaml
placement: pack
memory_reserve: 1Gi
defaults:
  memory: 4Gi
  compute: 10
metrics:
  listen: unix
```
"""

# Defaults that depend on the machine, in words.
DEPENDS = {
    "library_dir": "`/usr/lib/tidegate`; in a checkout, the checkout's own build directory",
    "spin_us": "`250`; `0` on fewer than 4 cores",
    "lookahead_us": "`120`; `300` where `spin_us` is 0 by default",
}


# Values that the code accepts where the schema is less specific, in words.
ACCEPTED = {"listen": "`off`, `unix`, `127.0.0.1:PORT`, `'[::1]:PORT'`"}


def accepted(name: str, option: dict[str, Any]) -> str:
    """Return the accepted values, in words."""
    if name in ACCEPTED:
        return ACCEPTED[name]
    if "patternProperties" in option:
        return "GPUs"
    if option.get("type") == "array":
        return "list of " + ", ".join(f"`{value}`" for value in option["items"]["enum"])
    if "enum" in option:
        return ", ".join(f"`{value}`" for value in option["enum"])
    if option["type"] == ["string", "integer"]:
        return "size"
    if option["type"] == "boolean":
        return "`true`, `false`"
    if option["type"] == "string":
        return "absolute path"
    kind = "whole number, " if option["type"] == "integer" else ""
    return f"{kind}`{option['minimum']}` to `{option['maximum']}`"


def shown(name: str, value: object, option: dict[str, Any]) -> str:
    """Return a default as the table shows it."""
    if name in DEPENDS:
        return DEPENDS[name]
    if value is None or value == {}:
        return "none"
    if isinstance(value, tuple):
        return f"`[{', '.join(value)}]`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if option.get("type") == ["string", "integer"] and isinstance(value, int):
        return f"`{value // MIB}Mi`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def rows(options: dict[str, Any], values: object, prefix: str = "") -> list[str]:
    """Return one row for each option, in the order of the schema."""
    lines = []
    for name, option in options.items():
        if "properties" in option:
            lines += rows(option["properties"], getattr(values, name), f"{prefix}{name}.")
            continue
        default = shown(name, getattr(values, name), option)
        cells = (f"`{prefix}{name}`", accepted(name, option), default, effect_of(prefix + name))
        lines.append(f"| {' | '.join(cells)} | {option['description']} |")
    return lines


INNER = ((Metrics, "metrics"), (Web, "web"), (Defaults, "defaults"))


def page() -> str:
    """Return the page; raise ValueError if the schema and dataclasses name different options."""
    options = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))["properties"]
    inner = [(kind, options[name]["properties"]) for kind, name in INNER]
    for kind, named in [(Config, options), *inner]:
        if {field.name for field in fields(kind)} != set(named):
            raise ValueError(f"config.schema.json and {kind.__name__} name different options")
    return HEAD + "\n".join(rows(options, Config())) + "\n" + EXAMPLE


if __name__ == "__main__":
    sys.exit(write_or_check({PAGE: page()}, "tools/config_reference.py"))
