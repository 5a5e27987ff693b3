"""Test the metrics over HTTP: parsed by Prometheus's own parser, and compared with the governor's data."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gzip
import math
import os
import select
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics import parser as openmetrics

from governor import account, web
from governor.arbiter import N_WAITS, Stats, Waits
from governor.arenas import Arenas
from governor.config import Config, MemoryOptions, Metrics, parse_config
from governor.container import Container
from governor.counters import Counters, GpuTime, Tally, gpu_time, wait_bound_ms
from governor.errors import ConfigError, GovernorError
from governor.history import History
from governor.httpd import HEAD_LIMIT, MAX_CONNECTIONS, Offer
from governor.metrics import CLAIM_METRICS, METRICS, OWNER, MetricsEndpoint, collect, listening
from governor.mps import Mps, Tools
from governor.parking import Parking
from governor.quota import Device, Quota
from governor.violations import Episode
from libcontrol import layout, pages
from tests.conftest import lack
from tests.unit.governor_world import GIB, SCRAPE, UUID, MetricsWorld, Samples, until
from tools import metrics_reference

MIB = 1 << 20
S = 1_000_000_000
QUOTA = Quota(4 * GIB, 40, 100)

Scene = Callable[[MetricsWorld], Awaitable[None]]


@pytest.fixture
def play(
    tmp_path: Path, build_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Scene], None]:
    monkeypatch.setattr("governor.metrics.SAME_S", -1.0)  # no caching between scrapes

    def run(scene: Scene) -> None:
        async def whole() -> None:
            world = MetricsWorld(tmp_path, build_dir / "libcontrol")
            try:
                with listening(world.config) as listener:
                    assert listener
                    endpoint = MetricsEndpoint(lambda: collect(world.server))
                    task = asyncio.create_task(endpoint.serve(listener))
                    try:
                        await asyncio.wait_for(scene(world), 60)
                    finally:
                        task.cancel()
                        await asyncio.gather(task, return_exceptions=True)
            finally:
                world.close()

        asyncio.run(whole())

    return run


def of(samples: Samples, name: str, /, **labels: str) -> float:
    if "container" in labels:
        labels = {**dict.fromkeys(OWNER, ""), **labels}
    return samples["tidegate_" + name, tuple(sorted(labels.items()))]


def write(container: Container, slot: int, **values: int) -> None:
    base = layout.ledger_device(slot, 0)
    for name, value in values.items():
        pages.write(container.ledger, base, "ledger_device", name, value)


def test_a_scrape_has_the_governors_data(play: Callable[[Scene], None]) -> None:
    async def scene(world: MetricsWorld) -> None:
        one = await world.admit("one")
        await world.admit('odd "name"\n', memory="2Gi", compute="10")
        with pytest.raises(LookupError, match="refused"):
            await world.admit("three", memory="100Gi")
        with pytest.raises(LookupError, match="annotation"):
            await world.admit("four", memory="much")
        await world.join(one)
        write(one, 0, memory=GIB, launches=7, waits=3, wait_ns=2 * S, refused=5)
        pages.write(one.ledger, 0, "ledger_header", "memory_peak", 3 * GIB, index=0)
        one.findings.seen[0] = 2 * GIB
        one.findings.episodes.append(Episode("memory", UUID, 1, 5 * GIB, 4 * GIB))
        one.findings.counts[0]["memory"] = 1
        world.server.tally.violations["memory"] = 1
        world.server.tally.looked(UUID, 0.5, failed=True)
        mps = Mps(one.devices[0], Tools(Path("/"), "", "", multiuser=True), Config(), print)
        mps.state, mps.counts.faults = "running", 2
        world.server.mps[UUID] = mps
        one.parking = Parking(one.grant, one.ledger, {}, Arenas(one.ledger), 16 * GIB)
        found = await world.scrape()
        gpu = {"gpu": UUID, "index": "0"}
        assert of(found, "build_info", version="0.1.0") == 1
        assert of(found, "containers") == 2
        assert of(found, "admissions_total") == 2
        assert of(found, "admissions_refused_total", code="refused") == 1
        assert of(found, "admissions_refused_total", code="annotation") == 1
        assert of(found, "admissions_refused_total", code="request") == 0
        assert of(found, "violations_total", kind="memory") == 1
        assert of(found, "violations_total", kind="compute") == 0
        assert of(found, "gpu_info", **gpu, name='a "GPU" \\ of ours', strategy="timeslice") == 1
        assert of(found, "gpu_containers", **gpu) == 2
        assert of(found, "gpu_memory_bytes", **gpu) == 16 * GIB
        assert of(found, "gpu_memory_grantable_bytes", **gpu) == 10 * GIB - 512 * MIB
        assert of(found, "gpu_memory_granted_bytes", **gpu) == 6 * GIB
        assert of(found, "gpu_time_grantable_ratio", **gpu) == 0.5
        assert of(found, "gpu_lost", **gpu) == 0
        assert of(found, "gpu_looks_total", **gpu) == 1
        assert of(found, "gpu_looks_failed_total", **gpu) == 1
        assert of(found, "gpu_look_seconds_total", **gpu) == 0.5
        assert of(found, "gpu_mps_running", **gpu) == 1
        assert of(found, "gpu_mps_faults_total", **gpu) == 2
        own = {"container": "one", "gpu": UUID}
        assert of(found, "container_processes", container="one") == 1
        assert of(found, "container_compute_guarantee_ratio", **own) == 0.4
        assert of(found, "container_compute_limit_ratio", **own) == 0.4
        assert of(found, "container_launches_total", **own) == 7
        assert of(found, "container_waits_total", **own) == 3
        assert of(found, "container_wait_seconds_total", **own) == 2
        assert of(found, "container_allocations_refused_total", **own) == 5
        assert of(found, "container_memory_limit_bytes", **own) == 4 * GIB
        assert of(found, "container_memory_charged_bytes", **own) == GIB
        assert of(found, "container_memory_used_bytes", **own) == GIB
        assert of(found, "container_memory_peak_bytes", **own) == 3 * GIB
        assert of(found, "container_memory_seen_bytes", **own) == 2 * GIB
        assert of(found, "container_violations_total", **own, kind="memory") == 1
        assert of(found, "container_violation", **own, kind="memory") == 1
        assert of(found, "container_violation", **own, kind="compute") == 0
        odd = {"container": 'odd "name"\n', "gpu": UUID}
        assert of(found, "container_memory_limit_bytes", **odd) == 2 * GIB
        world.server.allocations.set_lost(UUID, "GPU is lost")
        lost = await world.scrape()
        assert of(lost, "gpu_lost", **gpu) == 1
        assert of(lost, "gpu_memory_grantable_bytes", **gpu) == 0
        assert of(lost, "gpu_time_grantable_ratio", **gpu) == 0
        # Every metric in the table is exported, and no other.
        shown = {
            name for metric in METRICS if metric not in CLAIM_METRICS for name in metric.samples
        }
        assert {name for name, _ in found} == shown

    play(scene)


def test_the_metrics_of_parked_memory_equal_the_numbers_of_ps(
    play: Callable[[Scene], None],
) -> None:
    async def scene(world: MetricsWorld) -> None:
        memory = MemoryOptions(overbook=2.0, host=100 * GIB)
        world.server.configure(replace(world.config, memory=memory))
        one = await world.admit("one", memory="12Gi")
        await world.admit("two", memory="10Gi", compute="10")
        await world.admit("never", memory="1Gi", compute="10", parking="never")
        await world.join(one)
        assert one.parking
        one.parking.arenas._arenas[0].ready = GIB
        for name, value in (
            ("movable", 9 * GIB), ("parked", 8 * GIB), ("moved", 20 * GIB), ("move_ns", 2 * S),
            ("away_ns", 3 * S), ("awaiting", 1),
        ):  # fmt: skip
            pages.write(one.ledger, pages.slot_base(0), "ledger_slot", name, value)
        one.residency, one.times_parked = "leaving", 5
        found = await world.scrape()
        assert of(found, "memory_overbook_ratio") == 2
        assert of(found, "host_memory_taken_bytes") == GIB
        assert of(found, "host_memory_needed_bytes") == 22 * GIB
        assert of(found, "host_memory_limit_bytes") == 100 * GIB
        assert of(found, "gpu_memory_granted_bytes", gpu=UUID, index="0") == 23 * GIB
        own = {"container": "one", "gpu": UUID}
        states = ("resident", "leaving", "parked", "coming")
        assert [of(found, "container_residency", **own, state=name) for name in states] == [
            0,
            1,
            0,
            0,
        ]
        two = {"container": "two", "gpu": UUID}
        assert of(found, "container_residency", **two, state="parked") == 1
        told = one.describe()[0]["parking"]
        for field, name, expected in (
            ("movable", "memory_movable_bytes", 9 * GIB),
            ("parked", "memory_parked_bytes", 8 * GIB),
            ("host_memory", "host_memory_bytes", GIB),
            ("times_parked", "times_parked_total", 5),
            ("moved", "moved_bytes_total", 20 * GIB),
            ("awaiting", "awaiting_calls", 1),
        ):
            assert told[field] == of(found, f"container_{name}", **own) == expected, field
        for field, name, seconds in (
            ("move_ns", "move_seconds_total", 2),
            ("away_ns", "away_seconds_total", 3),
        ):
            assert told[field] / S == of(found, f"container_{name}", **own) == seconds, field
        # A container that is never parked has none of these series.
        of_never = {name for name, labels in found if ("container", "never") in labels}
        assert "tidegate_container_memory_used_bytes" in of_never
        assert not of_never & {
            "tidegate_container_residency",
            "tidegate_container_away_seconds_total",
        }

    play(scene)


def test_waits_for_grants_are_a_histogram(play: Callable[[Scene], None]) -> None:
    async def scene(world: MetricsWorld) -> None:
        one = await world.admit("one")
        waits = Waits((3, 0, 1, *[0] * (N_WAITS - 4), 2), 5 * S)
        one.gpus.waits = lambda _: waits  # type: ignore[method-assign]
        found = await world.scrape()
        own = {"container": "one", "gpu": UUID}
        name = "container_grant_wait_seconds"
        bounds = ("0.00025", "0.0005", "0.001", "0.002", "1.024", "+Inf")
        assert [of(found, f"{name}_bucket", **own, le=le) for le in bounds] == [3, 3, 4, 4, 4, 6]
        assert of(found, f"{name}_count", **own) == 6
        assert of(found, f"{name}_sum", **own) == 5

    play(scene)


def test_counters_of_a_container_include_ended_processes_and_end_with_it(
    play: Callable[[Scene], None],
) -> None:
    async def scene(world: MetricsWorld) -> None:
        one = await world.admit("one")
        first, second = await world.join(one), await world.join(one)
        write(one, 0, launches=100)
        write(one, 1, launches=20)
        own = {"container": "one", "gpu": UUID}
        assert of(await world.scrape(), "container_launches_total", **own) == 120
        first.kill()
        await until(lambda: len(one.pids()) == 1)
        write(one, 1, launches=30)
        assert of(await world.scrape(), "container_launches_total", **own) == 130
        write(one, 1, launches=2)  # the program writes arbitrary values
        assert of(await world.scrape(), "container_launches_total", **own) == 130
        write(one, 1, launches=2**64 - 1)
        assert of(await world.scrape(), "container_launches_total", **own) == 2**62
        second.kill()
        world.children[0].kill()
        await until(lambda: not world.server.containers)
        found = await world.scrape()
        assert not any(dict(labels).get("container") for _, labels in found)

    play(scene)


def test_a_gpus_counters_do_not_decrease_when_a_container_ends(
    play: Callable[[Scene], None],
) -> None:
    """The only container wants the GPU for a while: it holds an open grant, and ends."""

    async def scene(world: MetricsWorld) -> None:
        one = await world.admit("one", compute="100")
        await world.join(one)
        write(one, 0, want=1)
        await until(lambda: one.account.gpu_times()[UUID].held_ns)
        gpu = {"gpu": UUID, "index": "0"}
        last: Samples = {}
        held = []
        for step in range(40):
            found = await world.scrape()
            for (name, labels), value in found.items():
                if name.startswith("tidegate_gpu_") and name.endswith("_total"):
                    assert value >= last.get((name, labels), 0), name
            last = found
            held.append(of(found, "gpu_held_seconds_total", **gpu))
            if step == 30:
                assert of(found, "gpu_grants_total", **gpu) >= 1
                world.children[0].kill()
                await until(lambda: not world.server.containers)
            await asyncio.sleep(0.01)
        assert held[30] > held[20] > held[10] > 0  # an open grant counts before its end
        assert held[39] == held[31] >= held[30]

    play(scene)


def test_gpu_time_includes_the_current_grant() -> None:
    stats = Stats(grants=3, charged_ns=5, lent_ns=2, held_ns=9, overdue=1, handover_ns=4)
    assert gpu_time(stats, 100) == GpuTime(9, 5, 0, 4, 3, 1)
    stats.since_ns = 60
    assert gpu_time(stats, 100) == GpuTime(49, 5, 0, 4, 3, 1)
    stats.open = 1
    assert gpu_time(stats, 100) == GpuTime(49, 45, 0, 4, 3, 1)
    assert gpu_time(stats, 50) == GpuTime(9, 5, 0, 4, 3, 1)  # the grant begins when the GPU is free


@given(
    st.lists(st.tuples(st.booleans(), *[st.integers(0, 2**64 - 1)] * 3), min_size=2, max_size=20)
)
def test_a_containers_time_never_decreases(looks: list[tuple[bool, int, int, int]]) -> None:
    counters = Counters(1)
    before = GpuTime()
    for is_open, held, charged, since in looks:
        stats = Stats(held_ns=held, charged_ns=charged, since_ns=since, open=is_open)
        now = counters.time(0, stats, 2**63, QUOTA)
        assert now.held_ns >= before.held_ns
        assert now.charged_ns >= before.charged_ns
        before = now


def test_moves_of_memory_stay_counted_when_a_process_ends() -> None:
    counters = Counters(1)
    with mmap(-1, layout.LEDGER_SIZE) as ledger:
        pages.init_ledger(ledger)

        def put(slot: int, **values: int) -> None:
            for name, value in values.items():
                pages.write(ledger, pages.slot_base(slot), "ledger_slot", name, value)

        put(0, moved=3 * GIB, move_ns=5, away_ns=7)
        put(1, moved=GIB, move_ns=1, away_ns=2)
        both = {"moved": 4 * GIB, "move_ns": 6, "away_ns": 9}
        assert counters.moves(ledger, (0, 1)) == both
        counters.process_ended(ledger, 0)
        pages.clear_slot(ledger, 0)
        assert counters.moves(ledger, (1,)) == both
        put(1, moved=0, move_ns=3, away_ns=2**64 - 1)  # the program writes arbitrary values
        assert counters.moves(ledger, (1,)) == {"moved": 4 * GIB, "move_ns": 8, "away_ns": 2**62}


def test_lent_time_is_counted_for_each_second() -> None:
    counters = Counters(1)
    lent = []
    for now, charged in ((0, 0), (0.5, 0.5), (1.0, 0.6), (1.9, 1.4), (3.0, 1.5), (4.0, 1.5)):
        stats = Stats(charged_ns=int(charged * S), lent_ns=7 * S)
        lent.append(counters.time(0, stats, 9 * S + int(now * S), QUOTA).lent_ns / S)
    # The container uses 60 % in the first second. Then it uses 45 % over two seconds, although 80 %
    # in the first of these. Then it uses nothing.
    assert lent == pytest.approx([0, 0, 0.2, 0.2, 0.3, 0.3])
    strict = Counters(1)
    for now in range(3):
        stats = Stats(charged_ns=now * S // 2)
        assert strict.time(0, stats, now * S, replace(QUOTA, compute_limit=40)).lent_ns == 0


def test_lent_time_is_counted_even_if_nothing_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now, charged = [0], [0]
    monkeypatch.setattr(
        account, "time", SimpleNamespace(monotonic_ns=lambda: now[0], time_ns=time.time_ns)
    )
    gpus = SimpleNamespace(
        stats=lambda _: Stats(charged_ns=charged[0]),
        waits=lambda _: Waits(),
        is_steered=lambda _: False,
    )
    ledger = mmap(-1, layout.LEDGER_SIZE)
    pages.init_ledger(ledger)
    one = account.Account(
        grant=mmap(-1, layout.GRANT_FILE_SIZE),
        ledger=ledger,
        devices=[Device(0, UUID, "made up", 16 << 30)],
        quota=QUOTA,
        processes={},
        gpus=cast("Any", gpus),
        context_memory=0,
        is_adopted=False,
    )
    for _ in range(41):
        one.reconcile(0, {}, account.GpuSample(now[0], {}))
        now[0] += S // 4
        # The container alternates between a second with 80 % of the GPU and one with 20 %; it is
        # guaranteed 40 %.
        charged[0] += S // 5 if (now[0] - 1) // S % 2 else S // 20
    assert one.describe(0)["lent_ns"] / S == pytest.approx(2.0)


def test_a_word_is_the_same_number_in_ps_in_the_metrics_and_on_the_page(
    play: Callable[[Scene], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [S]
    clock = SimpleNamespace(monotonic_ns=lambda: now[0], time_ns=time.time_ns)
    monkeypatch.setattr("governor.account.time", clock)

    async def scene(world: MetricsWorld) -> None:
        container = await world.admit("one", compute="40", compute_limit="100")
        history = History(now[0])
        charged = [0]
        # The time that the arbiter granted beyond the guarantee is a different number, and is not
        # shown.
        container.gpus.stats = lambda _: Stats(  # type: ignore[method-assign]
            grants=1, since_ns=S, lent_ns=7 * S, charged_ns=charged[0], overdue=2
        )
        base = layout.ledger_device(0, 0)
        for name, value in (("wait_ns", 3 * S), ("launches", 9), ("waits", 4), ("refused", 1)):
            pages.write(container.ledger, base, "ledger_device", name, value)
        container.account.count_ended(0)
        for name in ("wait_ns", "launches", "waits", "refused"):
            pages.write(container.ledger, base, "ledger_device", name, 0)
        pages.write(container.ledger, 0, "ledger_header", "memory_peak", 2**60)
        for _ in range(20):
            now[0] += S // 4
            charged[0] += 6 * S // 40
            device = container.describe()[0]["devices"][0]
        history.record(now[0], [(container.key, use) for _, use in web.uses_of(container)])
        (step,) = history.cut(-1).describe()
        (shown,) = web.describe(world.server)["containers"][0]["devices"]
        found = await world.scrape()
        owner = {"container": "one", "gpu": UUID, "namespace": "", "pod": "", "claim": ""}

        def metric(name: str) -> float:
            return of(found, f"container_{name}", **owner)

        assert (device["delivered"], device["lent"]) == (60.0, 20.0)
        assert (step["used"], step["lent"]) == ([60.0], [20.0])
        for field, name, expected in (
            ("charged_ns", "charged_seconds_total", 3.0),
            ("lent_ns", "lent_seconds_total", pytest.approx(0.8)),
            ("held_ns", "held_seconds_total", 5.0),
            ("wait_ns", "wait_seconds_total", 3.0),
        ):
            assert device[field] / S == metric(name) == expected, field
        assert shown["wait_s"] == 3.0
        for field, name in (
            ("grants", "grants_total"),
            ("overdue", "grants_overdue_total"),
            ("launches", "launches_total"),
            ("waits", "waits_total"),
            ("refused", "allocations_refused_total"),
            ("memory_used", "memory_used_bytes"),
            ("memory_peak", "memory_peak_bytes"),
            ("memory_limit", "memory_limit_bytes"),
        ):
            assert device[field] == metric(name), field
        assert step["memory_peak"] == shown["memory_peak"] == device["memory_peak"] == 16 * GIB
        assert shown["refused"] == device["refused"] == 1

    play(scene)


def test_a_tally_keeps_the_times_of_ended_containers() -> None:
    class Ended:
        def gpu_times(self) -> dict[str, GpuTime]:
            return {UUID: GpuTime(held_ns=10, grants=1)}

    tally = Tally()
    tally.container_ended(Ended())
    tally.container_ended(Ended())
    assert tally.gpu_times([Ended().gpu_times()]) == {UUID: GpuTime(held_ns=30, grants=3)}


def test_a_scrape_may_request_openmetrics_and_gzip(play: Callable[[Scene], None]) -> None:
    async def scene(world: MetricsWorld) -> None:
        await world.admit("one")
        accept = b"Accept: application/openmetrics-text; version=1.0.0\r\n"
        answer = await world.raw(SCRAPE + accept + b"Accept-Encoding: gzip\r\n\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"Content-Encoding: gzip" in head
        assert f"Content-Length: {len(body)}\r\n".encode() in head
        families = list(openmetrics.text_string_to_metric_families(gzip.decompress(body).decode()))
        assert {family.name for family in families} == {metric.name for metric in METRICS}
        plain = await world.raw(SCRAPE.replace(b"/metrics", b"/metrics?name[]=x") + b"\r\n")
        assert plain.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=")

    play(scene)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /metrics/../etc HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", b"405"),
        (b"\r\n\r\n", b"400"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/2.0\r\n\r\n", b"400"),
        (
            b"GET /metrics HTTP/1.1\nHost:evil\r\n\r\n",
            b"400",
        ),  # a proxy may read this as two lines
        (b"\xff\x00 \xfe \xfd\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 120 + b"\r\n", b"400"),
        (
            b"GET /metrics HTTP/1.1\r\nContent-Type: multipart/x; boundary*"
            + b"1" * 5000
            + b"=x\r\n\r\n",
            b"400",
        ),
        (b"GET /metrics HTTP/1.1\r\nContent-Type: multipart/x; boundary*=\0''x\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nA: " + b"b" * 2 * HEAD_LIMIT + b"\r\n\r\n", b"431"),
        (b"b" * 4 * HEAD_LIMIT, b"431"),
    ],
)
def test_requests_other_than_a_scrape_are_refused(
    play: Callable[[Scene], None], request_: bytes, status: bytes
) -> None:
    async def scene(world: MetricsWorld) -> None:
        answer = await world.raw(request_)
        assert answer.startswith(b"HTTP/1.1 " + status)
        await world.scrape()

    play(scene)


Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect_silently(world: MetricsWorld, n: int) -> list[Client]:
    """Connect clients of which half send a part of a request, and the others nothing."""
    clients = [await asyncio.open_unix_connection(str(world.path)) for _ in range(n)]
    for i, (_, writer) in enumerate(clients):
        writer.write(b"GET" if i % 2 else b"")
    return clients


def test_others_are_served_while_silent_clients_leave_room(
    play: Callable[[Scene], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("governor.httpd.REQUEST_S", 60.0)

    async def scene(world: MetricsWorld) -> None:
        silent = await connect_silently(world, MAX_CONNECTIONS - 1)
        await world.scrape()
        silent += await connect_silently(world, 1)
        await asyncio.sleep(0.1)
        assert (await world.raw(SCRAPE + b"\r\n")).startswith(b"HTTP/1.1 503")
        for _, writer in silent:
            writer.close()

    play(scene)


def test_silent_clients_are_disconnected(
    play: Callable[[Scene], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("governor.httpd.REQUEST_S", 1.0)

    async def scene(world: MetricsWorld) -> None:
        silent = await connect_silently(world, MAX_CONNECTIONS)
        begin = time.monotonic()
        for reader, writer in silent:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        assert time.monotonic() - begin < 20
        await world.scrape()

    play(scene)


def test_the_number_of_connections_is_limited(
    play: Callable[[Scene], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("governor.httpd.REQUEST_S", 120.0)

    async def scene(world: MetricsWorld) -> None:
        def descriptors() -> int:
            return len(list(Path("/proc/self/fd").iterdir()))

        before = descriptors()
        opened = [await asyncio.open_unix_connection(str(world.path)) for _ in range(200)]
        try:
            async with asyncio.timeout(50):  # the connections would time out after two minutes
                while descriptors() > before + 200 + 2 * MAX_CONNECTIONS:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        finally:
            for _, writer in opened:
                writer.close()

    play(scene)


def test_a_client_that_does_not_read_is_disconnected(
    play: Callable[[Scene], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("governor.httpd.REQUEST_S", 3.0)

    async def scene(world: MetricsWorld) -> None:
        for i in range(30):
            await world.admit(f"{i}-" + "x" * 1000, memory="520Mi", compute="1")
        # The answer exceeds a socket's buffer. The governor must not wait for the reader.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            client.connect(str(world.path))
            client.sendall(SCRAPE + b"\r\n")
            assert len(await world.scrape()) > 30 * len(METRICS) // 2
            poll = select.poll()
            poll.register(client, select.POLLHUP)
            await until(lambda: poll.poll(0))
            client.settimeout(20)
            got = b""
            with contextlib.suppress(ConnectionError):
                while data := await asyncio.to_thread(client.recv, 1 << 16):
                    got += data
            whole = int(got.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
            assert len(got) < whole

    play(scene)


def test_scrapes_in_quick_succession_get_the_same_numbers(
    play: Callable[[Scene], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(world: MetricsWorld) -> None:
        monkeypatch.setattr("governor.metrics.SAME_S", 60.0)
        assert of(await world.scrape(), "containers") == 0
        await world.admit("one")
        assert of(await world.scrape(), "containers") == 0
        monkeypatch.setattr("governor.metrics.SAME_S", 0.0)
        assert of(await world.scrape(), "containers") == 1

    play(scene)


def test_the_socket_is_for_root_and_its_group(tmp_path: Path) -> None:
    config = Config(runtime_dir=str(tmp_path), metrics=Metrics("unix"))
    (tmp_path / "metrics.sock").write_text("of one that died")
    with listening(config):
        assert (tmp_path / "metrics.sock").stat().st_mode & 0o7777 == 0o660
    assert not (tmp_path / "metrics.sock").exists()
    with listening(replace(config, metrics=Metrics("off"))) as listener:
        assert listener is None
    assert list(tmp_path.iterdir()) == []


def test_a_client_that_sends_too_much_over_tcp_gets_the_answer() -> None:
    """The rest of the request is read, because a reset would discard the answer."""

    async def scene() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        task = asyncio.create_task(MetricsEndpoint(list).serve(listener))
        reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        writer.write(b"GET /metrics HTTP/1.1\r\nA: " + b"b" * (1 << 20))
        writer.write_eof()
        await writer.drain()
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
        writer.close()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(scene())


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_port_of_this_machine(tmp_path: Path, family: socket.AddressFamily) -> None:
    host = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}[family]
    with socket.socket(family) as taken:
        try:
            taken.bind((host, 0))
        except OSError:
            lack(f"needs an address {host}")
        taken.listen()
        port = taken.getsockname()[1]
        where = f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
        config = Config(runtime_dir=str(tmp_path), metrics=Metrics(where))
        with (
            pytest.raises(GovernorError, match=f"cannot be served at .*{port}: Address already"),
            listening(config),
        ):
            pass
    with listening(config) as listener:
        assert listener
        assert listener.getsockname()[:2] == (host, port)


def test_a_port_that_is_free_again_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("governor.httpd.AGAIN_S", 0.01)

    async def scene(config: Config, taken: socket.socket, port: int) -> None:
        with contextlib.closing(Offer(lambda: listening(config))) as offer:
            task = asyncio.create_task(offer.serve(MetricsEndpoint(list)))
            await asyncio.sleep(0.1)  # about ten tries
            taken.close()
            async with asyncio.timeout(10):
                while True:
                    with contextlib.suppress(ConnectionRefusedError):
                        reader, writer = await asyncio.open_connection("127.0.0.1", port)
                        break
                    await asyncio.sleep(0.01)
                writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
                assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            writer.close()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = Config(runtime_dir=str(tmp_path), metrics=Metrics(f"127.0.0.1:{port}"))
        asyncio.run(scene(config, taken, port))
    said = capfd.readouterr().out
    assert said.count("endpoint-not-served") == 1
    assert f"metrics cannot be served at 127.0.0.1:{port}: Address already in use" in said


def test_a_port_that_the_sandbox_forbids_is_reported_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(_: str) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr("governor.httpd._listen_address", forbid)
    config = Config(runtime_dir=str(tmp_path), metrics=Metrics("127.0.0.1:9464"))
    with pytest.raises(GovernorError) as caught, listening(config):
        pass
    assert caught.value.hint.startswith("use unix, or let the unit open a port: ")


@pytest.mark.parametrize(
    ("listen", "means"),
    [
        ("off", "off"),  # YAML reads it as false
        ("'off'", "off"),
        ("unix", "unix"),
        ("127.0.0.1:9464", "127.0.0.1:9464"),
        ("'[::1]:65535'", "[::1]:65535"),
    ],
)
def test_valid_addresses_of_metrics_are_accepted(listen: str, means: str) -> None:
    assert parse_config(f"metrics: {{listen: {listen}}}").metrics.listen == means
    assert parse_config("{}").metrics.listen == "off"


@pytest.mark.parametrize(
    "listen",
    [
        "on", "0.0.0.0:9464", "':9464'", "localhost:9464", "127.0.0.1", "127.0.0.1:0", "127.0.0.2:1",
        "127.0.0.1:65536", "'[::]:9464'", "'::1:9464'", "192.168.1.1:80", "/run/metrics.sock", "''",
        '"127.0.0.1:80\\n"', "9464",
    ],
)  # fmt: skip
def test_invalid_addresses_of_metrics_are_refused(listen: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(f"metrics: {{listen: {listen}}}", "config.yaml")
    assert "metrics.listen" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_reference_page_lists_the_served_metrics() -> None:
    assert metrics_reference.PAGE.read_text() == metrics_reference.page()


def test_names_of_metrics_follow_the_conventions() -> None:
    for metric in METRICS:
        assert metric.name.startswith("tidegate_")
        assert not metric.name.endswith("_total")
        assert ("_ns" in metric.name, "percent" in metric.name) == (False, False)
        assert metric.doc[0].isupper() or metric.doc[0] == "1"
        assert not metric.doc.endswith(".")
        assert set(metric.labels) <= {
            "container",
            "gpu",
            "index",
            "kind",
            "code",
            "version",
            "name",
            "strategy",
            "namespace",
            "pod",
            "claim",
            "uid",
            "share",
            "state",
        }
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_a_bound_covers_the_given_fraction_of_waits() -> None:
    none = [0] * N_WAITS
    assert wait_bound_ms(none, 0.5) is None
    waits = [50, 48, *none[2:-1], 2]
    assert (wait_bound_ms(waits, 0.5), wait_bound_ms(waits, 0.98)) == (0.25, 0.5)
    assert wait_bound_ms(waits, 0.99) == math.inf
    assert wait_bound_ms([*none[:-2], 1, 0], 0.5) == 1024
