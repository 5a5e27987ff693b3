"""Serve the read-only web page of the node, and the JSON data that it shows.

It is served like the metrics: not at all, on a socket, or on a loopback address. Pages from any
site in a local browser can send requests to such an address. Therefore the Host of a request must
be a name that no other host can have (against DNS rebinding), and the request must not come from a
page of another origin. Container names are untrusted text; the page inserts them only as text,
which the browser enforces (Trusted Types).
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import math
import re
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from email.message import Message
from pathlib import Path
from typing import Any

import structlog

from governor import VERSION, httpd
from governor.config import Config
from governor.container import Container
from governor.counters import wait_bound_ms
from governor.history import STEP_NS, STEP_S, STEPS, History, Use
from governor.names import find_name
from governor.server import Server
from governor.violations import COMPUTE, MEMORY, Episode

log = structlog.get_logger()

MIB = 1 << 20

PAGE = Path(__file__).with_name("page")
"""The directory of the page: page.html, and the style and the scripts that it names."""
STATE, HISTORY = "/api/v1/state", "/api/v1/history"

SAME_S = 0.25
"""Requests that are less than this time apart, in seconds, get the same numbers."""
GZIP_FROM = 1024
"""Minimum size of an answer that is compressed, in bytes."""

_OWN_NAME = re.compile(r"(?:localhost|127\.0\.0\.1|\[::1\])(?::[0-9]{1,5})?", re.IGNORECASE)
_SINCE = re.compile(r"since=([0-9]{1,12})")
_NAMED = re.compile(
    r'<link rel="stylesheet" href="([a-z]+\.css)">|<script src="([a-z]+\.js)"></script>'
)
_INLINE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


def read_page(directory: Path = PAGE) -> str:
    """Return the page as one file, with the style and the scripts of page.html inlined."""

    def put(found: re.Match[str]) -> str:
        style, script = found.groups()
        tag = "style" if style else "script"
        return f"<{tag}>\n{(directory / (style or script)).read_text(encoding='utf-8')}</{tag}>"

    return _NAMED.sub(put, (directory / "page.html").read_text(encoding="utf-8"))


def policy_of(page: str) -> str:
    """Return a Content-Security-Policy that allows only the page's own style and scripts."""
    sources: dict[str, list[str]] = {"style": [], "script": []}
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        sources[kind].append(f"'sha256-{digest}'")
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(sources['script'])}",
            f"style-src {' '.join(sources['style'])}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


class PageEndpoint(httpd.Endpoint):
    """Answers GET requests for the page and for the data that it shows."""

    where = f"the page is at /, its data at {STATE} and {HISTORY}"

    def __init__(self, server: Server, history: History) -> None:
        super().__init__("web")
        self._server = server
        self._history = history
        self._started = time.time()
        page = read_page()
        self._page = page.encode()
        self._state: tuple[float, bytes] | None = None
        self._cuts: dict[int, bytes] = {}  # by `since`, as of the step `_cut_at`
        self._cut_at = -1
        self.headers = "".join(
            f"{name}: {value}\r\n"
            for name, value in (
                ("Content-Security-Policy", policy_of(page)),
                ("X-Content-Type-Options", "nosniff"),
                ("X-Frame-Options", "DENY"),
                ("Referrer-Policy", "no-referrer"),
                ("Cross-Origin-Resource-Policy", "same-origin"),
                ("Cross-Origin-Opener-Policy", "same-origin"),
                ("Cache-Control", "no-store"),
            )
        )

    def has(self, target: str) -> bool:
        """Return whether anything is served at `target`."""
        return target in ("/", STATE, HISTORY)

    async def answer(self, target: str, headers: Message) -> bytes:
        """Return the page, or the data that it shows."""
        hosts = headers.get_all("Host") or []
        if len(hosts) != 1 or not _OWN_NAME.fullmatch(hosts[0].strip()):
            return self.status(
                "421 Misdirected Request", why="use localhost, 127.0.0.1 or [::1] as the host"
            )
        path, _, query = target.partition("?")
        if path == "/":
            return await self._send(self._page, "text/html; charset=utf-8", headers)
        if headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            return self.status("403 Forbidden", why="the request is from a page of another origin")
        since = _SINCE.fullmatch(query)
        if query and not (since and path == HISTORY):
            return self.status("400 Bad Request", why="the only query is ?since=STEP")
        body = await (
            self._state_json() if path == STATE else self._then(int(since[1]) if since else -1)
        )
        return await self._send(body, "application/json", headers)

    async def _send(self, body: bytes, kind: str, headers: Message) -> bytes:
        accepted = re.split(r"[ ,]+", headers.get("Accept-Encoding", ""))
        if len(body) < GZIP_FROM or "gzip" not in accepted:
            return self.content(body, kind)
        packed = await self.in_thread(gzip.compress, body, 5)
        return self.content(packed, kind, "Content-Encoding: gzip\r\n")

    async def _state_json(self) -> bytes:
        now = time.monotonic()
        if self._state is None or now - self._state[0] > SAME_S:
            document = {**self._head(), **describe(self._server)}
            self._state = (now, await self.in_thread(_encode, document))
        return self._state[1]

    async def _then(self, since: int) -> bytes:
        last = self._history.last
        if self._cut_at != last or len(self._cuts) > httpd.MAX_CONNECTIONS:
            self._cut_at = last
            self._cuts.clear()
        if since not in self._cuts:
            cut = self._history.cut(since)
            ended = time.time() - (time.monotonic_ns() - self._history.due_ns() + STEP_NS) / 1e9
            head = {**self._head(), "last": cut.last, "last_ended": round(ended, 3)}
            body = await self.in_thread(
                lambda: _encode_series({**head, "left_out": cut.left_out}, cut.describe())
            )
            if self._cut_at != last:
                return body
            self._cuts[since] = body
        return self._cuts[since]

    def _head(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "started": round(self._started, 3),
            "now": round(time.time(), 3),
            "step_s": STEP_S,
            "steps": STEPS,
        }


def _encode(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _encode_series(head: dict[str, Any], series: list[dict[str, Any]]) -> bytes:
    """Encode the series one by one, because encoding holds the GIL."""
    pieces = b",".join(_encode(one) for one in series)
    return _encode(head)[:-1] + b',"series":[' + pieces + b"]}"


def _text(foreign: str) -> str:
    # Most JSON parsers reject lone surrogates.
    return foreign.encode("utf-8", "replace").decode()


def _name(container: Container) -> str:
    return _text(container.engine_name or "")


def describe(server: Server) -> dict[str, Any]:
    """Return the current state for the page.

    It runs on the governor's event loop.
    """
    allocations = server.allocations.describe()
    shown = ("uuid", "index", "name", "strategy", "memory", "memory_left", "memory_granted",
             "compute_left", "lost", "closed")  # fmt: skip
    tally = server.tally
    return {
        "policy": server.config.on_violation,
        "gpus": [
            {name: gpu[name] for name in shown} | server.scheduling(gpu["uuid"])
            for gpu in allocations["gpus"]
        ],
        "left_out": allocations["left_out"],
        "host_memory": server.host_memory(),
        "containers": [_describe(container) for container in server.containers.values()],
        "admitted": tally.admitted,
        "refused": dict(tally.refused),
        "refusals": [
            {
                "at": round(one.at, 3),
                "id": _text(one.container),
                "code": one.code,
                "message": _text(one.message),
                "hint": _text(one.hint),
            }
            for one in tally.refusals
        ],
        "violations": [
            {"id": _text(identifier), **episode.describe(), "reason": reason_of(episode)}
            for identifier, episode in tally.episodes
        ],
    }


def _describe(container: Container) -> dict[str, Any]:
    devices = []
    for i, device in enumerate(container.devices):
        memory, counted = container.account.memory(i), container.account.counted(i)
        waits = container.gpus.waits(i).counts
        devices.append(
            {
                "gpu": device.uuid,
                "memory_used": memory.used,
                "memory_peak": memory.peak,
                "memory_limit": container.quota.memory,
                "refused": counted["refused"],
                "wait_s": round(counted["wait_ns"] / 1e9, 3),
                "grant_wait_ms": [_finite(wait_bound_ms(waits, part)) for part in (0.5, 0.99)],
            }
        )
    return {
        "key": container.key,
        "id": _text(container.identifier),
        "name": _name(container),
        "guarantee": container.quota.compute,
        "limit": container.quota.compute_limit,
        "class": container.quota.work_class,
        "processes": len(container.pids()),
        "frozen": container.findings.frozen,
        "suspension": container.suspension,
        "parking": _describe_parking(container),
        "elsewhere": container.findings.describe_elsewhere(),
        "devices": devices,
    }


def _describe_parking(container: Container) -> dict[str, Any] | None:
    """Return where a container's memory is, or None if it is never parked."""
    parking = container.describe_parking()
    if parking is None:
        return None
    shown = ("residency", "movable", "parked", "times_parked", "host_memory")
    away_s = round(parking["away_ns"] / 1e9, 3)
    return {**{name: parking[name] for name in shown}, "away_s": away_s}


def _finite(ms: float | None) -> float | None:
    """Return -1 for infinity (a wait beyond the last bound), which JSON cannot represent."""
    return -1 if ms == math.inf else ms


def reason_of(episode: Episode) -> str:
    """Return the finding and the limit of a violation, as text."""
    if episode.kind == MEMORY:
        found, allowed = episode.found // MIB, episode.allowed // MIB
        return f"its processes hold {found} MiB of GPU memory, but {allowed} MiB is allowed"
    if episode.kind == COMPUTE:
        return f"it worked on the GPU without a grant ({episode.found} % in NVML's samples)"
    return "a process uses the GPU but has not registered: it bypasses the control library"


def uses_of(container: Container) -> Iterator[tuple[tuple[Container, str], Use]]:
    """Yield a container's values for the history, for each of its GPUs."""
    times = container.account.gpu_times()
    parked = 0 if container.parking is None else container.parking.report().parked
    for i, device in enumerate(container.devices):
        memory = container.account.memory(i)
        use = Use(
            key=container.key,
            container=_text(container.identifier),
            name=_name(container),
            gpu=device.uuid,
            charged_ns=times[device.uuid].charged_ns,
            guarantee=container.quota.compute,
            limit=container.quota.compute_limit,
            memory=memory.used,
            memory_peak=memory.peak,
            memory_limit=container.quota.memory,
            refused=container.account.counted(i)["refused"],
            parked=parked,  # a container whose memory may be parked has a single GPU
        )
        yield (container, device.uuid), use


async def find_names(server: Server) -> None:
    """Look up the name of each new container in its engine, until cancelled."""
    while True:
        for container in list(server.containers.values()):
            if container.engine_name is not None:
                continue
            owner = container.row.owner
            try:
                # This runs in a thread, because Docker's and Podman's names are in files.
                found = await asyncio.to_thread(
                    find_name, container.identifier, owner.bundle, owner.identity
                )
                container.engine_name = found.whole
            except Exception as e:  # the id is shown instead
                log.exception("page-data-failed", container=container.identifier, error=repr(e))
                container.engine_name = ""
        await asyncio.sleep(1)


async def keep(server: Server, history: History) -> None:
    """Record the containers' use step by step, until cancelled."""

    def part(container: Container) -> None:
        try:
            for who, use in uses_of(container):
                history.part(who, use)
        except Exception as e:  # must not prevent the container's cleanup
            log.exception("page-data-failed", container=container.identifier, error=repr(e))

    server.admissions.on_end = part
    while True:
        await asyncio.sleep(max(0.1, (history.due_ns() - time.monotonic_ns()) / 1e9))
        try:
            containers = list(server.containers.values())
            history.record(
                time.monotonic_ns(), [use for container in containers for use in uses_of(container)]
            )
        except Exception as e:  # a failure to show something must not stop the governor
            log.exception("page-data-failed", error=repr(e))
            await asyncio.sleep(STEP_S)


def listening(config: Config) -> AbstractContextManager[socket.socket | None]:
    """Listen as configured; the value is None if the page is off."""
    path = Path(config.runtime_dir) / "web.sock"
    return httpd.listening(config.web.listen, path, "the page", "web.listen")
