"""Test the page's endpoint without a browser: accepted requests, headers, and the JSON data."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from governor import web
from governor.config import Config, MemoryOptions, Web, parse_config
from governor.counters import MAX_REMEMBERED, TEXT_LIMIT, Tally
from governor.errors import ConfigError, GovernorError
from governor.history import STEP_NS, History
from governor.names import Name, find_name
from governor.violations import Episode
from libcontrol import layout, pages
from tests.unit.governor_world import GIB, UUID, MetricsWorld, until

MIB = 1 << 20
S = 1_000_000_000
SCHEMA = json.loads((Path(web.__file__).with_name("web.schema.json")).read_text())
HOST = b"Host: localhost\r\n"

Scene = Callable[[MetricsWorld, History], Awaitable[None]]


@pytest.fixture
def play(
    tmp_path: Path, build_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Scene], None]:
    monkeypatch.setattr("governor.web.SAME_S", -1.0)  # no caching between requests

    def run(scene: Scene) -> None:
        async def whole() -> None:
            world = MetricsWorld(tmp_path, build_dir / "libcontrol")
            world.path = tmp_path / "web.sock"
            history = History(0)
            try:
                with web.listening(world.config) as listener:
                    assert listener
                    endpoint = web.PageEndpoint(world.server, history)
                    task = asyncio.create_task(endpoint.serve(listener))
                    try:
                        await asyncio.wait_for(scene(world, history), 60)
                    finally:
                        task.cancel()
                        await asyncio.gather(task, return_exceptions=True)
            finally:
                world.close()

        asyncio.run(whole())

    return run


async def get(
    world: MetricsWorld, target: str, head: bytes = HOST
) -> tuple[str, dict[str, str], bytes]:
    """Return the status, the headers and the body."""
    answer = await world.raw(f"GET {target} HTTP/1.1\r\n".encode() + head + b"\r\n")
    top, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = top.decode("latin-1").split("\r\n")
    pairs = [line.partition(": ") for line in lines]
    assert len({name for name, _, _ in pairs}) == len(pairs)
    return status.removeprefix("HTTP/1.1 "), {name: value for name, _, value in pairs}, body


async def document(world: MetricsWorld, target: str) -> dict[str, Any]:
    status, headers, body = await get(world, target)
    assert (status, headers["Content-Type"]) == ("200 OK", "application/json")
    answer: dict[str, Any] = json.loads(body)
    kind = "state" if "state" in target else "history"
    jsonschema.Draft202012Validator({**SCHEMA, "$ref": f"#/$defs/{kind}"}).validate(answer)
    return answer


def test_the_state_has_the_governors_data(play: Callable[[Scene], None]) -> None:
    async def scene(world: MetricsWorld, _: History) -> None:
        one = await world.admit("one", compute="40", compute_limit="70")
        with pytest.raises(LookupError, match="refused"):
            await world.admit("two", memory="100Gi")
        await world.join(one)
        base = layout.ledger_device(0, 0)
        for name, value in (("memory", GIB), ("refused", 5), ("wait_ns", 2 * S)):
            pages.write(one.ledger, base, "ledger_device", name, value)
        one.findings.frozen = True
        episode = Episode("memory", UUID, 4711, 5 * GIB, 4 * GIB, began=1000.0)
        world.server.tally.violate("one", episode)
        found = await document(world, "/api/v1/state")
        assert found["version"] == "0.1.0"
        assert found["policy"] == "report"
        assert found["gpus"] == [
            {
                "uuid": UUID, "index": 0, "name": 'a "GPU" \\ of ours', "strategy": "timeslice",
                "memory": 16 * GIB - 512 * MIB, "memory_left": 12 * GIB - 512 * MIB,
                "memory_granted": 4 * GIB,
                "compute_left": 60, "lost": None, "closed": None,
                "scheduling": "gate", "not_steered": "",
            }
        ]  # fmt: skip
        assert found["containers"] == [
            {
                "key": one.key, "id": "one", "name": "", "guarantee": 40, "limit": 70, "class": "throughput",
                "processes": 1, "frozen": True, "suspension": "", "parking": None, "elsewhere": [],
                "devices": [
                    {
                        "gpu": UUID, "memory_used": GIB, "memory_peak": GIB, "memory_limit": 4 * GIB,
                        "refused": 5, "wait_s": 2.0, "grant_wait_ms": [None, None],
                    }
                ],
            }
        ]  # fmt: skip
        (refusal,) = found["refusals"]
        assert (refusal["id"], refusal["code"]) == ("two", "refused")
        assert "102400 MiB was requested" in refusal["message"]
        assert "ask for" in refusal["hint"]
        assert (found["admitted"], found["refused"]) == (1, {"refused": 1})
        (violation,) = found["violations"]
        assert violation == {
            "id": "one", "kind": "memory", "gpu": UUID, "pid": 4711, "found": 5 * GIB,
            "allowed": 4 * GIB, "began": 1000.0, "ended": None,
            "reason": "its processes hold 5120 MiB of GPU memory, but 4096 MiB is allowed",
        }  # fmt: skip
        episode.ended = 1010.0
        found = await document(world, "/api/v1/state")
        assert found["violations"][0]["ended"] == 1010.0

    play(scene)


def test_the_state_and_the_history_show_where_memory_is(
    play: Callable[[Scene], None],
) -> None:
    async def scene(world: MetricsWorld, history: History) -> None:
        memory = MemoryOptions(overbook=2.0, host=100 * GIB)
        world.server.configure(replace(world.config, memory=memory))
        one = await world.admit("one", memory="12Gi")
        await world.admit("two", memory="8Gi", compute="10")
        await world.join(one)
        assert one.parking
        one.parking.arenas._arenas[0].ready = 3 * GIB
        pages.write(one.ledger, layout.ledger_device(0, 0), "ledger_device", "memory", 9 * GIB)
        for name, value in (("movable", 8 * GIB), ("parked", 8 * GIB), ("away_ns", 3 * S // 2)):
            pages.write(one.ledger, pages.slot_base(0), "ledger_slot", name, value)
        one.residency, one.times_parked = "coming", 2
        found = await document(world, "/api/v1/state")
        assert found["containers"][0]["parking"] == {
            "residency": "coming", "movable": 8 * GIB, "parked": 8 * GIB, "times_parked": 2,
            "host_memory": 3 * GIB, "away_s": 1.5,
        }  # fmt: skip
        assert found["containers"][1]["parking"]["residency"] == "parked"
        assert found["host_memory"] == {"taken": 3 * GIB, "needed": 20 * GIB, "limit": 100 * GIB}
        assert found["gpus"][0]["memory_granted"] == 20 * GIB
        history.record(STEP_NS, web.uses_of(one))
        pages.write(one.ledger, pages.slot_base(0), "ledger_slot", "parked", 0)
        history.record(2 * STEP_NS, web.uses_of(one))
        (series,) = (await document(world, "/api/v1/history"))["series"]
        assert (series["memory"], series["parked"]) == ([9 * GIB] * 2, [8 * GIB, 0])

    play(scene)


def test_the_history_after_a_given_step_is_returned(play: Callable[[Scene], None]) -> None:
    async def scene(world: MetricsWorld, history: History) -> None:
        one = await world.admit("one")
        empty = await document(world, "/api/v1/history")
        assert (empty["last"], empty["series"]) == (-1, [])
        for step in range(1, 4):
            history.record(step * STEP_NS, web.uses_of(one))
        whole = await document(world, "/api/v1/history")
        assert (whole["last"], whole["step_s"], whole["steps"]) == (2, 5, 180)
        assert whole["series"][0]["guarantee"] == [40, 40, 40]
        assert whole["series"][0]["key"] == one.key
        later = await document(world, "/api/v1/history?since=1")
        assert (later["series"][0]["first"], later["series"][0]["guarantee"]) == (2, [40])
        again = await document(world, "/api/v1/history?since=1")
        assert again["series"] == later["series"]
        history.record(4 * STEP_NS, web.uses_of(one))
        assert (await document(world, "/api/v1/history?since=1"))["last"] == 3

    play(scene)


def test_the_use_of_a_container_is_kept_when_it_ends(
    play: Callable[[Scene], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here, the governor's own clock drives the history."""
    monkeypatch.setattr("governor.history.STEP_NS", S // 5)
    monkeypatch.setattr("governor.web.STEP_NS", S // 5)

    async def scene(world: MetricsWorld, _: History) -> None:
        history = History(time.monotonic_ns())
        task = asyncio.create_task(web.keep(world.server, history))
        try:
            await asyncio.sleep(0)
            one = await world.admit("one", compute="100")
            await world.join(one)
            pages.write(one.ledger, layout.ledger_device(0, 0), "ledger_device", "want", 1)
            last = history.last
            await until(lambda: history.last >= last + 4)
            world.children[0].kill()
            await until(lambda: not world.server.containers)
            await until(lambda: history.cut(-1).describe()[0]["ended"])
            (series,) = history.cut(-1).describe()
            assert max(series["used"]) > 50
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    play(scene)


def test_a_failed_reading_ends_neither_the_governor_nor_a_container(
    play: Callable[[Scene], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(world: MetricsWorld, history: History) -> None:
        def fail(_: object) -> None:
            raise ValueError("a page that cannot be read")

        await world.admit("one")
        monkeypatch.setattr("governor.web.uses_of", fail)
        monkeypatch.setattr("governor.web.STEP_S", 0.01)
        task = asyncio.create_task(web.keep(world.server, history))
        await asyncio.sleep(0.5)
        assert not task.done()
        world.children[0].kill()
        await until(lambda: not world.server.containers)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    play(scene)


GUARDS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",
}


@pytest.mark.parametrize(
    "target", ["/", "/api/v1/state", "/api/v1/history", "/none", "/api/v1/state?x"]
)
def test_every_answer_has_the_security_headers(play: Callable[[Scene], None], target: str) -> None:
    async def scene(world: MetricsWorld, _: History) -> None:
        _, headers, _ = await get(world, target)
        assert {name: headers[name] for name in GUARDS} == GUARDS
        assert "Set-Cookie" not in headers
        assert not [name for name in headers if name.startswith("Access-Control-")]
        policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
        assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["frame-ancestors"] == "'none'"
        assert policy["connect-src"] == "'self'"
        assert (policy["require-trusted-types-for"], policy["trusted-types"]) == (
            "'script'",
            "'none'",
        )
        assert "unsafe" not in headers["Content-Security-Policy"]

    play(scene)


def test_the_policy_allows_only_the_pages_own_content(play: Callable[[Scene], None]) -> None:
    async def scene(world: MetricsWorld, _: History) -> None:
        _, headers, body = await get(world, "/")
        page = body.decode()
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        for kind in ("script", "style"):
            texts = re.findall(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
            assert len(texts) == {"script": 4, "style": 1}[kind]
            digests = [
                base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts
            ]
            allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
            assert f"{kind}-src {allowed};" in headers["Content-Security-Policy"]

    play(scene)


def test_the_page_consists_of_all_files_of_its_directory() -> None:
    page = web.read_page()
    files = sorted(path.name for path in web.PAGE.iterdir())
    assert files == ["charts.js", "data.js", "page.css", "page.html", "page.js", "text.js"]
    for name in files:
        if name != "page.html":
            assert (web.PAGE / name).read_text() in page, name


def test_the_page_loads_nothing_from_elsewhere() -> None:
    page = web.read_page()
    assert re.findall(r"""(?:src|href)=["']?([^"'> ]+)""", page) == ["data:,"]
    # This URL is the name of a namespace, not an address.
    assert re.findall(r"https?://[^\s\"']+", page) == ["http://www.w3.org/2000/svg"]
    assert "@import" not in page
    assert not re.search(r"\bstyle=|\bon[a-z]+=", page)
    for sink in (
        "innerHTML =",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "cookie",
    ):
        assert sink not in page, sink


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "LOCALHOST", "localhost:9465", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:9465",
    ],
)  # fmt: skip
def test_a_request_that_names_this_machine_is_answered(
    play: Callable[[Scene], None], host: str
) -> None:
    async def scene(world: MetricsWorld, _: History) -> None:
        for target in ("/", "/api/v1/state", "/api/v1/history"):
            status, _, _ = await get(world, target, f"Host: {host}\r\n".encode())
            assert status == "200 OK"

    play(scene)


@pytest.mark.parametrize(
    "head",
    [
        b"", b"Host: \r\n", b"Host: evil.example\r\n", b"Host: evil.example:9465\r\n",
        b"Host: localhost.evil.example\r\n", b"Host: 127.0.0.1.evil.example\r\n",
        b"Host: evil.example@localhost\r\n", b"Host: localhost, evil.example\r\n",
        b"Host: localhost\r\nHost: evil.example\r\n", b"Host: localhost:80:80\r\n",
        b"Host: [::1]evil\r\n", b"Host: ::1\r\n", b"Host: 127.1\r\n", b"Host: 2130706433\r\n",
        b"Host: 192.168.1.1\r\n", b"Host: 0.0.0.0\r\n", b"Host: localhost\xc2\xa0\r\n",
        b"Host: tidegate\r\n", b"X-Forwarded-Host: localhost\r\nHost: evil.example\r\n",
    ],
)  # fmt: skip
def test_a_request_for_another_host_name_is_refused(
    play: Callable[[Scene], None], head: bytes
) -> None:
    """An attacker's DNS server can make its own name resolve to this machine."""

    async def scene(world: MetricsWorld, _: History) -> None:
        for target in ("/", "/api/v1/state", "/api/v1/history"):
            status, _, body = await get(world, target, head)
            assert status.startswith("421 ")
            assert (
                body == b"421 Misdirected Request; use localhost, 127.0.0.1 or [::1] as the host\n"
            )

    play(scene)


@pytest.mark.parametrize(
    ("site", "status"),
    [
        ("same-origin", "200"),
        ("none", "200"),
        ("cross-site", "403"),
        ("same-site", "403"),
        ("", "403"),
    ],
)
def test_a_page_of_another_origin_gets_no_data(
    play: Callable[[Scene], None], site: str, status: str
) -> None:
    async def scene(world: MetricsWorld, _: History) -> None:
        head = HOST + f"Sec-Fetch-Site: {site}\r\n".encode()
        for target in ("/api/v1/state", "/api/v1/history"):
            assert (await get(world, target, head))[0].startswith(status)
        assert (await get(world, "/", head))[0] == "200 OK"  # other pages may link here

    play(scene)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /api/v1/history?since=-1 HTTP/1.1\r\n", b"400"),
        (b"GET /api/v1/history?since=1&since=2 HTTP/1.1\r\n", b"400"),
        (b"GET /api/v1/history?since=1234567890123 HTTP/1.1\r\n", b"400"),
        (b"GET /api/v1/history?since=\xd9\xa1 HTTP/1.1\r\n", b"400"),
        (b"GET /api/v1/state?since=1 HTTP/1.1\r\n", b"400"),
        (b"GET /api/v2/state HTTP/1.1\r\n", b"404"),
        (b"GET //api/v1/state HTTP/1.1\r\n", b"404"),
        (b"GET /page.html HTTP/1.1\r\n", b"404"),
        (b"GET /../config.py HTTP/1.1\r\n", b"404"),
        (b"GET /%2e%2e/config.py HTTP/1.1\r\n", b"404"),
        (b"GET http://localhost/ HTTP/1.1\r\n", b"404"),
        (b"POST /api/v1/state HTTP/1.1\r\n", b"405"),
        (b"PUT / HTTP/1.1\r\n", b"405"),
        (b"DELETE / HTTP/1.1\r\n", b"405"),
        (b"OPTIONS /api/v1/state HTTP/1.1\r\n", b"405"),
        (b"HEAD / HTTP/1.1\r\n", b"405"),
    ],
)
def test_any_other_request_is_refused(
    play: Callable[[Scene], None], request_: bytes, status: bytes
) -> None:
    async def scene(world: MetricsWorld, _: History) -> None:
        answer = await world.raw(request_ + HOST + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 " + status + b" ")

    play(scene)


def test_names_are_text_whatever_they_contain(play: Callable[[Scene], None]) -> None:
    name = "</script><script>alert(1)</script>\u202e\ud83d\ude00\n\x00".encode(
        "utf-16", "surrogatepass"
    ).decode("utf-16")

    async def scene(world: MetricsWorld, history: History) -> None:
        one = await world.admit(name)
        history.record(STEP_NS, web.uses_of(one))
        for target in ("/api/v1/state", "/api/v1/history"):
            _, _, body = await get(world, target)
            assert body.isascii()
            assert b"\n" not in body
        assert (await document(world, "/api/v1/state"))["containers"][0]["id"] == name
        one.members[0].identifier = "half \udc80"
        assert (await document(world, "/api/v1/state"))["containers"][0]["id"] == "half ?"
        with pytest.raises(LookupError):
            await world.admit("\u202e" * 1024, memory="100Gi")
        refusal = (await document(world, "/api/v1/state"))["refusals"][0]
        assert refusal["id"] == "\u202e" * 1024

    play(scene)


def test_an_answer_is_compressed_if_the_client_accepts_it(play: Callable[[Scene], None]) -> None:
    async def scene(world: MetricsWorld, _: History) -> None:
        _, headers, body = await get(world, "/", HOST + b"Accept-Encoding: br, gzip\r\n")
        assert headers["Content-Encoding"] == "gzip"
        assert headers["Content-Length"] == str(len(body))
        assert gzip.decompress(body) == web.read_page().encode()
        _, headers, body = await get(world, "/")
        assert "Content-Encoding" not in headers
        assert body == web.read_page().encode()

    play(scene)


def test_many_requests_for_parts_take_bounded_memory(play: Callable[[Scene], None]) -> None:
    async def scene(world: MetricsWorld, history: History) -> None:
        endpoint = web.PageEndpoint(world.server, history)
        for since in range(100):
            await endpoint._then(since)
        assert len(endpoint._cuts) <= 9
        assert sum(map(sys.getsizeof, endpoint._cuts.values())) < 10_000

    play(scene)


def test_only_the_last_refusals_are_remembered_with_truncated_texts() -> None:
    tally = Tally()
    for i in range(100):
        tally.refuse(float(i), "x" * 5000, "refused", "m" * 5000, "h" * 5000)
        tally.violate(str(i), Episode("compute", UUID, 1, 50, 0))
    assert tally.refused["refused"] == 100
    assert len(tally.refusals) == len(tally.episodes) == MAX_REMEMBERED == 64
    assert [one.at for one in tally.refusals][:2] == [36.0, 37.0]
    assert {len(one.container) + len(one.message) for one in tally.refusals} == {2 * TEXT_LIMIT}


@pytest.mark.parametrize(
    ("episode", "reason"),
    [
        (Episode("memory", UUID, 1, 3 * GIB, 2 * GIB),
         "its processes hold 3072 MiB of GPU memory, but 2048 MiB is allowed"),
        (Episode("compute", UUID, 1, 87, 0),
         "it worked on the GPU without a grant (87 % in NVML's samples)"),
        (Episode("unregistered", UUID, 1, GIB, 0),
         "a process uses the GPU but has not registered: it bypasses the control library"),
    ],
)  # fmt: skip
def test_a_violation_has_a_reason(episode: Episode, reason: str) -> None:
    assert web.reason_of(episode) == reason


@pytest.mark.parametrize(
    ("identity", "name"),
    [
        ({}, ""),
        ({"name": "web"}, "web"),
        ({"namespace": "default", "name": "web"}, "web"),
        ({"namespace": "ml", "pod": "train-0", "container": "main"}, "ml/train-0/main"),
        ({"pod": "train-0", "pod_uid": "x"}, "train-0"),
        ({"pod": "p" * 1000}, "p" * 128),
    ],
)
def test_the_name_of_a_container_is_shown_as_text(identity: dict[str, str], name: str) -> None:
    assert find_name("", "", identity).whole == name


def test_names_are_looked_up_once_and_a_failure_does_not_end_the_task(
    play: Callable[[Scene], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def find(identifier: str, bundle: str, identity: dict[str, str]) -> Name:
        asked.append((identifier, bundle, identity))
        if identifier == "two":
            raise RuntimeError("a mistake")
        return Name("docker", "trainer\ud800")

    monkeypatch.setattr("governor.web.find_name", find)

    async def scene(world: MetricsWorld, _history: History) -> None:
        one, two = [await world.admit(name, compute="10") for name in ("one", "two")]
        ((_, use),) = web.uses_of(one)
        assert use.name == ""
        task = asyncio.create_task(web.find_names(world.server))
        await until(lambda: two.engine_name is not None)
        three = await world.admit("three", compute="10")
        await until(lambda: three.engine_name is not None)
        assert not task.done()
        task.cancel()
        assert asked == [(name, "/bundle", {}) for name in ("one", "two", "three")]
        ((_, use),) = web.uses_of(one)
        assert use.name == "trainer?"
        state = await document(world, web.STATE)
        assert [one["name"] for one in state["containers"]] == ["trainer?", "", "trainer?"]

    play(scene)


def test_the_socket_is_for_root_and_its_group(tmp_path: Path) -> None:
    config = Config(runtime_dir=str(tmp_path), web=Web("unix"))
    with web.listening(config):
        assert (tmp_path / "web.sock").stat().st_mode & 0o7777 == 0o660
    with web.listening(replace(config, web=Web())) as listener:
        assert listener is None
    assert os.listdir(tmp_path) == []  # noqa: PTH208


def test_the_page_is_served_on_a_port_of_this_machine(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = Config(runtime_dir=str(tmp_path), web=Web(f"127.0.0.1:{port}"))
    with web.listening(config) as listener:
        assert listener
        assert listener.getsockname() == ("127.0.0.1", port)


def test_a_port_on_which_another_program_begins_to_listen_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have bound their sockets, which SO_REUSEADDR allows as long as none listens."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{other.getsockname()[1]}"

        class OvertakenSocket(socket.socket):
            def bind(self, address: Any) -> None:
                super().bind(address)
                other.listen()

        monkeypatch.setattr("governor.httpd.socket.socket", OvertakenSocket)
        config = Config(runtime_dir=str(tmp_path), web=Web(where))
        with pytest.raises(GovernorError, match="page cannot be served at"):
            web.listening(config).__enter__()


@pytest.mark.parametrize(
    ("listen", "means"),
    [
        ("off", "off"),
        ("unix", "unix"),
        ("127.0.0.1:9465", "127.0.0.1:9465"),
        ("'[::1]:1'", "[::1]:1"),
    ],
)
def test_where_the_page_may_be_served(listen: str, means: str) -> None:
    config = parse_config(f"web: {{listen: {listen}}}")
    assert (config.web.listen, config.metrics.listen) == (means, "off")
    assert parse_config("{}").web.listen == "off"


@pytest.mark.parametrize(
    "listen", ["on", "0.0.0.0:9465", "':9465'", "localhost:9465", "127.0.0.1:0", "'[::]:1'"]
)
def test_where_the_page_may_not_be_served(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"config.yaml: web\.listen is "):
        parse_config(f"web: {{listen: {listen}}}", "config.yaml")


def test_the_urls_of_the_howto_exist(play: Callable[[Scene], None]) -> None:
    howto = Path(__file__).resolve().parents[2] / "docs/howto/see-what-happens.md"
    asked = re.findall(
        r"^curl --unix-socket /run/tidegate/web\.sock '?http://([^\s/]+)(/[^\s']*)'?$",
        howto.read_text(),
        re.MULTILINE,
    )
    assert len(asked) == 3

    async def scene(world: MetricsWorld, history: History) -> None:
        one = await world.admit("one")
        history.record(STEP_NS, web.uses_of(one))
        for host, target in asked:
            status, _, _ = await get(world, target, f"Host: {host}\r\n".encode())
            assert status == "200 OK"

    play(scene)
