"""Format the node's containers for `tidegate ps`, `top` and `inspect`.

The governor's values for each container are combined with its name in its engine, and shown as rows
of a table and as lines for ongoing violations.
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from governor.client import ask
from governor.config import Config
from governor.errors import RequestError
from governor.names import Name, find_name
from governor.quota import THROUGHPUT

MIB = 1 << 20
SHORT = 12
"""Number of characters shown of an id that is a digest, as many as engines show; more if two ids
share this prefix.
"""

HEAD = (
    *("CONTAINER", "NAME", "POD", "CLAIM", "GPU"),
    *("MEMORY USED/LIMIT", "COMPUTE NOW/GUARANTEED/LIMIT", "WAITING", "CLASS", "STRATEGY", "STATE"),
)
ID, NAME, POD, CLAIM, CLASS, STRATEGY = 0, 1, 2, 3, 8, 9
OPTIONAL = (NAME, POD, CLAIM, CLASS)
"""Columns that are omitted if they are empty for all containers."""


class Listing:
    """Queries the governor, and caches names, which do not change while a container runs."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._names: dict[str, Name] = {}

    def containers(self) -> list[dict[str, Any]]:
        """Return the governor's description of each container, with `engine`, `name` and `pod`."""
        answer: list[dict[str, Any]] = ask(self._config, "list")["containers"]
        known, self._names = self._names, {}
        for one in answer:
            # An older governor, which runs until it is restarted, does not send these fields.
            one.setdefault("elsewhere", [])
            for device in one["devices"]:
                for name in ("delivered", "lent", "waited", "waiting"):
                    device.setdefault(name, None)
            key = str(one["key"])
            self._names[key] = known.get(key) or find_name(
                str(one["id"]), str(one.get("bundle", "")), one.get("identity", {})
            )
            one.update(self._names[key]._asdict())
        return answer

    def gpus(self) -> list[dict[str, Any]]:
        """Return the governor's description of each GPU."""
        answer: list[dict[str, Any]] = ask(self._config, "gpus")["gpus"]
        return answer


def find(wanted: str, containers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the container with that id, or else the only one with that name, pod or id prefix.

    Raise RequestError if there is not exactly one.
    """
    for one in containers:
        if one["id"] == wanted:
            return one
    begins = [one for one in containers if wanted and str(one["id"]).startswith(wanted)]
    named = [
        one
        for one in containers
        if wanted and wanted in (one["name"], one["pod"], one["pod"].rpartition("/")[2])
    ]
    # A tenant chooses the name, which may be a prefix of another container's id.
    found = begins + [one for one in named if one not in begins]
    if len(found) == 1:
        return found[0]
    shown = repr(wanted[:64])
    if not found:
        what = f"no container has the id or name {shown}"
    elif not named:
        what = f"{len(found)} containers have an id that begins with {shown}"
    elif not begins:
        what = f"{len(found)} containers are named {shown}"
    else:
        what = f"{len(found)} containers have the name {shown} or an id that begins with it"
    raise RequestError(what, hint="tidegate ps lists them")


def safe(text: object) -> str:
    """Return untrusted text without characters that control a terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


def cell(text: object) -> str:
    """Return untrusted text for a line that may be cut off: each character is one column wide.

    A two-column character would make lines wrap, and push other lines off the screen.
    """
    return "".join(c if _is_narrow(c) else "?" for c in safe(text))


def _is_narrow(char: str) -> bool:
    return char.isascii() or (
        unicodedata.east_asian_width(char) not in ("W", "F")
        and unicodedata.category(char) not in ("Mn", "Me", "Mc")
    )


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def table(containers: Sequence[dict[str, Any]], width: int | None = None) -> list[str]:
    """Return the heading, and a line for each container and GPU.

    If the table is wider than `width`, dispensable columns are dropped, as many as needed. The
    state, which comes last, may be cut to the width of its heading.
    """
    short = short_ids([str(one["id"]) for one in containers])
    rows = [row for one in containers for row in _rows(one, short[str(one["id"])])]
    left_out = {i for i in OPTIONAL if not any(row[i] for row in rows)}
    # A container with a name or a pod can be identified without its id.
    dispensable = [STRATEGY, CLAIM, *_names(rows)]
    while True:
        shown = [[cell for i, cell in enumerate(row) if i not in left_out] for row in (HEAD, *rows)]
        least = columns([[*row[:-1], row[-1][: len(HEAD[-1])]] for row in shown])
        if width is None or max(map(len, least)) <= width or not dispensable:
            return columns(shown)
        left_out.add(dispensable.pop(0))


def _names(rows: Sequence[tuple[str, ...]]) -> list[int]:
    """Return the columns of names that can be dropped while each container stays identifiable."""
    for kept in (NAME, POD, ID):
        names = {row[kept]: row[ID] for row in rows if row[kept]}
        if len(names) == len({row[ID] for row in rows}) and all(row[kept] for row in rows):
            return [i for i in (ID, POD, NAME) if i != kept]
    return []


def short_ids(ids: Sequence[str]) -> dict[str, str]:
    """Return the part of each id that is shown, which is unique for `find`."""
    short = {}
    for one in ids:
        length = SHORT if len(one) == 64 else 40
        while length < len(one) and sum(other.startswith(one[:length]) for other in ids) > 1:
            length += 1
        short[one] = cell(one[:length])
    return short


def _rows(container: dict[str, Any], short: str) -> list[tuple[str, ...]]:
    shares = f"{container['compute']}/{container['compute_limit']} %"
    return [
        (
            short,
            cell(container["name"]),
            cell(container["pod"]),
            claims_of(container),
            str(device["index"]),
            f"{_mebibytes(device['memory_used'])}/{_mebibytes(device['memory_limit'])} MiB",
            f"{percent(device['delivered'])}/{shares}",
            waiting(device),
            "" if container.get("class") == THROUGHPUT else str(container.get("class", "")),
            str(container["strategy"]),
            state(container, device["uuid"]),
        )
        for device in container["devices"]
    ]


CLAIMS_HEAD = (
    *("CLAIM", "SHARE", "GPU", "MEMORY USED/LIMIT", "COMPUTE GUARANTEED/LIMIT", "STRATEGY"),
    *("CONTAINERS", "STATE"),
)


def claims_table(claims: Sequence[dict[str, Any]]) -> list[str]:
    """Return the heading, and a line for each claim's share."""
    rows = [
        (
            cell(f"{claim['namespace']}/{claim['name']}"),
            cell(share["name"]),
            "gone" if share["index"] is None else str(share["index"]),
            f"{_mebibytes(share['memory_used'])}/{_mebibytes(share['memory'])} MiB",
            f"{share['compute']}/{share['compute_limit']} %",
            str(share["strategy"]),
            str(len(share["containers"])),
            claim_state(claim),
        )
        for claim in claims
        for share in claim["shares"]
    ]
    return columns([CLAIMS_HEAD, *rows])


def claim_state(claim: dict[str, Any]) -> str:
    """Return the state of a claim."""
    if claim["leaving"]:
        return "leaving"
    return "used" if any(share["containers"] for share in claim["shares"]) else "booked"


def claims_of(container: dict[str, Any]) -> str:
    """Return the claims from which a container has its quota; empty if it has none."""
    claims = container.get("claims", ())
    return cell(", ".join(f"{claim['namespace']}/{claim['name']}" for claim in claims))


def find_claim(wanted: str, claims: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the claim with that uid, NAMESPACE/NAME or name, if there is exactly one."""
    found = [
        claim
        for claim in claims
        if wanted in (claim["uid"], claim["name"], f"{claim['namespace']}/{claim['name']}")
    ]
    return found[0] if len(found) == 1 else None


def percent(value: float | None) -> str:
    """Return a rate as a whole number; `?` while it is not known yet."""
    return "?" if value is None else f"{value:.0f}"


def waiting(device: dict[str, Any]) -> str:
    """Return the percentage of time in which calls waited, 100 at most."""
    waited = device["waited"]
    return "?" if waited is None else f"{min(100, waited):.0f} %"


def lasting(container: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the ongoing violations."""
    return [one for one in container["violations"] if one["ended"] is None]


def state(container: dict[str, Any], gpu: str | None = None) -> str:
    """Return the state of a container, on one GPU or on all."""
    kinds = [one["kind"] for one in lasting(container) if gpu in (None, one["gpu"])]
    words = ["frozen"] if container["frozen"] else []
    # An earlier version of the governor does not send this field.
    words += [container["suspension"]] if container.get("suspension") else []
    parking = container.get("parking") or {}
    words += [parking["residency"]] if parking.get("residency", "resident") != "resident" else []
    words += [f"violation: {', '.join(dict.fromkeys(kinds))}"] if kinds else []
    others = sorted({one["index"] for one in container.get("elsewhere", ())})
    if others:
        words.append(f"uses GPU {', '.join(map(str, others))} (not its own)")
    if not container["confirmed"]:
        words.append("starting")
    return ", ".join(words) or "ok"


def trouble_lines(containers: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each ongoing violation, and for each process on a GPU not granted to it."""
    return [*violation_lines(containers), *elsewhere_lines(containers)]


def elsewhere_lines(containers: Iterable[dict[str, Any]]) -> list[str]:
    """Return a line for each process that is using a GPU that its container was not granted."""
    said: dict[tuple[Any, ...], str] = {}
    for one in containers:
        for use in one.get("elsewhere", ()):
            line = f"not its own: {cell(one['name'] or one['id'][:40])}: {describe_elsewhere(use)}"
            said.setdefault((one["key"], use["gpu"], use["pid"]), line)
    return list(said.values())


def describe_elsewhere(use: dict[str, Any]) -> str:
    """Return a process's memory on a GPU that its container was not granted, as text."""
    held = _mebibytes(use["memory"])
    return f"{held} MiB held outside its quota, GPU {use['index']}, process {use['pid']}"


def violation_lines(containers: Iterable[dict[str, Any]]) -> list[str]:
    """Return a line for each ongoing violation; containers with the same shares get one line."""
    now = time.time()
    said: dict[tuple[Any, ...], str] = {}
    for one in containers:
        for episode in lasting(one):
            line = (
                f"violation: {cell(one['name'] or one['id'][:40])}: "
                f"{describe_violation(one, episode)}, for {max(0, now - episode['began']):.0f} s"
            )
            said.setdefault((one["key"], *episode.values()), line)
    return list(said.values())


def unknown_lines(containers: Iterable[dict[str, Any]]) -> list[str]:
    """Return a line for each container that looked up unknown driver functions."""
    said: dict[tuple[Any, ...], str] = {}
    for one in containers:
        # An older governor, which runs until it is restarted, does not send this field.
        names = one.get("unknown_functions", ())
        if names:
            line = f"unknown functions: {cell(one['name'] or one['id'][:40])}: {unknown_of(one)}"
            said.setdefault((one["key"], *names), line)
    return list(said.values())


def unknown_of(container: dict[str, Any]) -> str:
    """Return the functions that its programs looked up but the control library lacks."""
    return cell(", ".join(str(name) for name in container.get("unknown_functions", ())))


def describe_violation(container: dict[str, Any], episode: dict[str, Any]) -> str:
    """Return the finding and the limit of a violation, as text."""
    index = next(
        (str(d["index"]) for d in container["devices"] if d["uuid"] == episode["gpu"]), "?"
    )
    found, allowed = episode["found"], episode["allowed"]
    if episode["kind"] == "memory":
        said = f"{_mebibytes(found)} MiB of memory held, {_mebibytes(allowed)} MiB allowed"
    elif episode["kind"] == "unregistered":
        said = f"an unregistered process uses the GPU and holds {_mebibytes(found)} MiB"
    else:
        said = f"work without a grant, {found} % of the GPU"
    return f"{said}, GPU {index}, process {episode['pid']}"


def _mebibytes(amount: int) -> str:
    return f"{amount / MIB:.0f}"
