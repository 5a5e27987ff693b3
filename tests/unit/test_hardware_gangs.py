"""Test containers with several GPUs, on a virtual clock: they run on all GPUs at once, within their shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from governor.hardware.gangs import MORE, RECENT, Board
from governor.hardware.policy import Policy
from governor.hardware.tenant import PERIOD, Load, Setting, Share, Window
from tests.unit.test_hardware_policy import SET_SLICE, SWITCH_OFF, SWITCH_ON
from tests.unit.virtual_gpu import MS, VirtualContext, VirtualGpu

S = 1000 * MS
QUANTUM = MS // 10


def load(guarantee, others=0.0, *, limit=None, others_limit=None, busy=True, had=None):
    limit = guarantee if limit is None else limit
    others_limit = others if others_limit is None else others_limit
    had = int(guarantee * PERIOD) if had is None else had
    return Load(guarantee, limit, busy, others, others_limit, had)


class Joined:
    """A GPU on the board."""

    def __init__(self):
        self.joined = []

    def join(self, tenant, gang):
        self.joined.append((tenant, gang))


def add(board, n_gpus=2):
    return board.add([Joined() for _ in range(n_gpus)], range(n_gpus))


def say(board, now, *gangs):
    """Report loads, given as (gang, load by GPU), as if they had not changed for some periods."""
    for gang, loads in gangs:
        if gang in board._gangs:
            board._gangs[gang].used = max(one.had for one in loads.values())
        for gpu, one in loads.items():
            board.say(gpu, now, {gang: one})


# ---- the board ----


def test_each_gpu_is_notified_of_the_container_that_joined():
    board, gpus = Board(), [Joined(), Joined()]
    assert board.add(gpus, [7, 4]) == 0
    assert [gpu.joined for gpu in gpus] == [[(7, 0)], [(4, 0)]]
    assert board.add(gpus, [1, 2]) == 1


def test_a_gang_with_competitors_on_one_gpu_has_a_window_on_all():
    board = Board()
    gang = add(board)
    say(board, 0, (gang, {0: load(0.3, 0.6), 1: load(0.3)}))
    assert board.windows(PERIOD) == {gang: Window(0, 30 * MS)}


def test_a_gang_that_is_alone_or_idle_has_no_window():
    board = Board()
    gang = add(board)
    say(board, 0, (gang, {0: load(0.3), 1: load(0.3)}))
    assert board.windows(PERIOD) == {}
    say(board, PERIOD, (gang, {gpu: load(0.3, 0.6, busy=False) for gpu in (0, 1)}))
    assert board.windows(2 * PERIOD) == {}


def test_a_gang_that_works_on_one_gpu_has_a_window():
    board = Board()
    gang = add(board)
    say(board, 0, (gang, {0: load(0.3, 0.6), 1: load(0.3, 0.6, busy=False, had=0)}))
    assert board.windows(PERIOD) == {gang: Window(0, 30 * MS)}
    say(board, PERIOD, (gang, {0: load(0.3, 0.6), 1: load(0.3, 0.6, busy=False, had=0)}))
    # The gang has no shortfall on the other GPU.
    assert board.windows(2 * PERIOD) == {gang: Window(0, 30 * MS)}


def test_a_gang_with_occasional_work_has_no_window():
    """Other containers would have to wait for it."""
    board = Board()
    gang = add(board)
    has = {}
    for i, had in enumerate([10, 10, 15, 17, 20, 25, 20, 14, 13, 10, 10, 10, 25, 30, 30]):
        loads = {gpu: load(0.3, 0.6, had=had * MS) for gpu in (0, 1)}
        for gpu, one in loads.items():
            board.say(gpu, i * PERIOD, {gang: one})
        has[i] = gang in board.windows((i + 1) * PERIOD)
    assert [i for i in has if has[i]] == [5, 6, 7, 8, 9, 13, 14]


def test_windows_of_gangs_on_the_same_gpus_do_not_overlap():
    board = Board()
    one, two = add(board), add(board)
    loads = {gpu: load(0.45, 0.45) for gpu in (0, 1)}
    say(board, 0, (one, loads), (two, loads))
    # The gap between the windows is for the calls that end the first one.
    later = 4_500_000
    assert board.windows(PERIOD) == {
        one: Window(0, 45 * MS),
        two: Window(45 * MS + later, 90 * MS + later),
    }


def test_gangs_without_a_common_gpu_are_on_at_the_same_time():
    board = Board()
    one, two = add(board), add(board)
    say(board, 0, (one, {0: load(0.5, 0.4), 1: load(0.5, 0.4)}))
    say(board, 0, (two, {2: load(0.4, 0.4), 3: load(0.4, 0.4)}))
    assert board.windows(PERIOD) == {one: Window(0, 50 * MS), two: Window(0, 40 * MS)}


def test_windows_of_gangs_in_a_ring_fit_into_a_period():
    board = Board()
    gangs = [add(board) for _ in range(3)]
    for i, gang in enumerate(gangs):
        say(board, 0, (gang, {i: load(0.5, 0.5), (i + 1) % 3: load(0.5, 0.5)}))
    windows = board.windows(PERIOD)
    assert max(window.end for window in windows.values()) <= PERIOD
    assert all(window.end - window.begin >= PERIOD // 3 for window in windows.values())


@pytest.mark.parametrize("n", [2, 3, 6])
def test_gangs_in_a_chain_have_alternate_halves_of_the_period(n):
    """Each gang shares a GPU with the next one, but the first and the third have no GPU in
    common.
    """
    board = Board()
    gangs = [add(board) for _ in range(n)]
    for i, gang in enumerate(gangs):
        say(board, 0, (gang, {i: load(0.5, 0.5), i + 1: load(0.5, 0.5)}))
    windows = board.windows(PERIOD)
    assert [windows[gang].begin for gang in gangs] == [50 * MS * (i % 2) for i in range(n)]
    assert {window.end - window.begin for window in windows.values()} == {50 * MS}


def test_compensation_takes_nothing_from_guarantees():
    board = Board()
    gang = add(board)
    for i in range(10):
        short = {gpu: load(0.3, 0.69, had=25 * MS) for gpu in (0, 1)}
        say(board, i * PERIOD, (gang, short))
        window = board.windows((i + 1) * PERIOD)[gang]
    assert window == Window(0, 31 * MS, MS)


def test_a_gang_that_does_little_on_one_gpu_gets_no_compensation():
    board = Board()
    gang = add(board)
    for i in range(10):
        say(board, i * PERIOD, (gang, {0: load(0.3, 0.6), 1: load(0.3, 0.6, had=MS)}))
        window = board.windows((i + 1) * PERIOD)[gang]
    assert window == Window(0, 30 * MS)


def test_time_that_others_may_not_have_is_lent_to_the_gang():
    board = Board()
    gang = add(board)
    strict = load(0.3, 0.5, limit=1.0, others_limit=0.5)
    say(board, 0, (gang, {0: strict, 1: strict}))
    assert board.windows(PERIOD) == {gang: Window(0, 50 * MS)}
    borrows = load(0.3, 0.3, limit=1.0, others_limit=1.0)
    say(board, PERIOD, (gang, {0: strict, 1: borrows}))
    assert board.windows(2 * PERIOD)[gang].end in range(50 * MS, 50 * MS + MORE + 1)
    capped = load(0.3, 0.3, limit=0.4, others_limit=0.3)
    say(board, 2 * PERIOD, (gang, {0: capped, 1: capped}))
    assert board.windows(3 * PERIOD)[gang].end <= 40 * MS + MORE


def test_compensation_is_limited_to_the_time_that_calls_take():
    board = Board()
    gang = add(board)
    lengths = []
    for i in range(20):
        say(board, i * PERIOD, (gang, {gpu: load(0.3, 0.6, had=29 * MS) for gpu in (0, 1)}))
        window = board.windows((i + 1) * PERIOD)[gang]
        lengths.append(window.end - window.begin)
    assert lengths[0] == 30 * MS
    assert lengths[-1] == 30 * MS + MORE
    for i in range(20, 40):
        say(board, i * PERIOD, (gang, {gpu: load(0.3, 0.6, had=31 * MS) for gpu in (0, 1)}))
        window = board.windows((i + 1) * PERIOD)[gang]
    assert window.end - window.begin == 30 * MS


@pytest.mark.parametrize(
    ("spans", "more_us"),
    [
        (((0, 30), (1, 31)), 500),  # compensated by half
        (((0, 30), (0, 30)), 0),
        (((0, 30), (-99, -69)), 0),  # spans of different windows
        (((-300, -270), (-299, -269)), 0),  # long ago
        (((0, 30), (0, 0)), 0),  # not switched yet
    ],
)
def test_time_on_only_one_gpu_is_compensated(spans, more_us):
    board = Board()
    gang = add(board)
    for _ in range(2):  # a gang is compensated only once it has a window
        loads = {
            gpu: load(0.3, 0.6)._replace(span=(PERIOD + on * MS, PERIOD + off * MS))
            for gpu, (on, off) in enumerate(spans)
        }
        say(board, PERIOD, (gang, loads))
        window = board.windows(2 * PERIOD if board._windows else PERIOD)[gang]
    assert window == Window(0, 30 * MS + more_us * 1000, more_us * 1000)


def test_windows_do_not_change_within_a_period():
    board = Board()
    one = add(board)
    say(board, 0, (one, {gpu: load(0.3, 0.6) for gpu in (0, 1)}))
    assert board.windows(PERIOD) == {one: Window(0, 30 * MS)}
    say(board, PERIOD + MS, (one, {gpu: load(0.3) for gpu in (0, 1)}))
    assert board.windows(PERIOD + 2 * MS) == {one: Window(0, 30 * MS)}
    assert board.windows(2 * PERIOD) == {}


def test_a_gpu_without_recent_reports_does_not_count():
    """The GPU's thread has ended: this GPU is divided by grants, which have no windows."""
    board = Board()
    gang = add(board)
    say(board, 0, (gang, {0: load(0.3, 0.6), 1: load(0.3, 0.6)}))
    say(board, RECENT, (gang, {0: load(0.3, 0.6)}))
    assert board.windows(RECENT + PERIOD) == {}


def test_a_removed_gang_loses_its_window_at_once():
    board = Board()
    gang = add(board)
    say(board, 0, (gang, {gpu: load(0.3, 0.6) for gpu in (0, 1)}))
    assert board.windows(PERIOD)
    board.remove(gang)
    board.remove(gang)
    assert board.windows(PERIOD) == {}
    say(board, PERIOD, (gang, {0: load(0.3, 0.6)}))
    assert board.windows(2 * PERIOD) == {}


# ---- with the policies of two GPUs ----


def switch(contexts, on, note):
    for one in contexts:
        one.on = on
    note()


def set_slice(context, ns):
    context.slice_ns = ns


@dataclass
class TwoGpuNode:
    """Two GPUs. A container has the same number on both."""

    shares: list[dict[int, Share]]
    gangs: set[int]
    contexts: list[dict[int, VirtualContext]] = field(init=False)

    def __post_init__(self):
        self.contexts = [{i: VirtualContext() for i in shares} for shares in self.shares]
        self.gpus = [VirtualGpu(contexts) for contexts in self.contexts]
        self.policies = [Policy(0) for _ in self.gpus]
        self.before: list[dict[int, Setting]] = [{} for _ in self.gpus]
        self.wakes = [0 for _ in self.gpus]
        # A thread makes one driver call after another. Each entry is the time at which a call
        # returns, and its effect.
        self.calls: list[list[tuple[int, Callable[[], None]]]] = [[] for _ in self.gpus]
        # A call takes a lock of all GPUs of the host, so the calls of two threads do not overlap.
        self.free_at = 0
        self.board = Board()
        self.numbers = {i: add(self.board) for i in sorted(self.gangs)}
        for policy, shares in zip(self.policies, self.shares, strict=True):
            for i, share in shares.items():
                policy.add(i, share, 0)
        self.used: list[dict[int, int]] = [{}, {}]
        self.on_since: list[dict[int, int]] = [{}, {}]
        self.spans: list[dict[int, tuple[int, int]]] = [{}, {}]
        self.worked = dict.fromkeys(self.gangs, 0)  # time for which all GPUs of a gang did its work
        self.now = 0

    def _advance(self, n, until):
        for i, ns in self.gpus[n].advance(until).items():
            self.used[n][i] = self.used[n].get(i, 0) + ns

    def _step(self, n):
        windows = self.board.windows(self.now)
        own = {i: windows[gang] for i, gang in self.numbers.items() if gang in windows}
        used, self.used[n] = self.used[n], {}
        settings, self.wakes[n] = self.policies[n].step(self.now, used, windows=own)
        loads = {
            gang: self.policies[n].load(i, self.now)._replace(span=self.spans[n].get(i, (0, 0)))
            for i, gang in self.numbers.items()
        }
        self.board.say(n, self.now, loads)
        self._call(n, self.before[n], settings)
        self.before[n] = settings

    def _call(self, n, before, settings):
        contexts, at = self.contexts[n], max(self.now, self.free_at)
        was = {i: i not in before or before[i].on for i in settings}
        for on, ns in ((True, SWITCH_ON), (False, SWITCH_OFF)):
            changed = [i for i, one in settings.items() if one.on is on and was[i] is not on]
            if changed:
                at += ns
                note = partial(self._note, n, changed, on, at)
                switched = [contexts[i] for i in changed]
                self.calls[n].append((at, partial(switch, switched, on, note)))
        for i, one in settings.items():
            if i not in before or before[i].slice_ns != one.slice_ns:
                at += SET_SLICE
                self.calls[n].append((at, partial(set_slice, contexts[i], one.slice_ns)))
        self.free_at = max(self.free_at, at)

    def _note(self, n, changed, on, at):
        for i in changed:
            if on:
                self.on_since[n][i] = at
            else:
                self.spans[n][i] = self.on_since[n].get(i, at), at

    def _finish_calls(self, n):
        while self.calls[n] and self.calls[n][0][0] <= self.now:
            self.calls[n].pop(0)[1]()

    def run(self, seconds):
        end = self.now + int(seconds * S)
        while self.now < end:
            for n in range(2):
                self._finish_calls(n)
                if self.now >= self.wakes[n] and not self.calls[n]:
                    self._step(n)
            self.now += QUANTUM
            done = [{i: c.done for i, c in contexts.items()} for contexts in self.contexts]
            for n in range(2):
                self._advance(n, self.now)
            for i in self.gangs:
                self.worked[i] += min(
                    contexts[i].done - before[i]
                    for contexts, before in zip(self.contexts, done, strict=True)
                )


def measure(node, seconds=5, warm=2):
    """Return the percentage of time that each container worked, by GPU, and each gang on both."""
    node.run(warm)
    begun = [{i: c.done for i, c in contexts.items()} for contexts in node.contexts]
    worked = dict(node.worked)
    node.run(seconds)
    had = [
        {i: 100 * (c.done - before[i]) / (seconds * S) for i, c in contexts.items()}
        for contexts, before in zip(node.contexts, begun, strict=True)
    ]
    return had, {i: 100 * (node.worked[i] - worked[i]) / (seconds * S) for i in node.gangs}


@pytest.mark.parametrize("limit", [0.3, 1.0])
def test_a_job_of_two_gpus_beside_hogs_has_its_share_on_both_at_the_same_time(limit):
    """Without windows the job would be on both GPUs at once for some 9 percent of the time."""
    hogs = {1: Share(0.3, limit), 2: Share(0.6, 0.6)}
    had, worked = measure(TwoGpuNode([hogs, dict(hogs)], {1}))
    wanted = 30 if limit == 0.3 else 40  # the hogs may not use more of the rest
    assert worked[1] == pytest.approx(wanted, abs=1)
    for one in had:
        assert one[2] == pytest.approx(60, abs=1) if limit == 0.3 else one[2] > 57


def test_a_job_of_two_gpus_has_its_share_beside_a_hog_on_one_of_them():
    had, worked = measure(
        TwoGpuNode([{1: Share(0.3, 0.3), 2: Share(0.6, 1)}, {1: Share(0.3, 0.3)}], {1})
    )
    assert worked[1] == pytest.approx(30, abs=1)
    assert had[0][2] > 66


def test_two_gangs_on_the_same_gpus_each_have_half_on_both_at_the_same_time():
    shares = {1: Share(0.45, 0.45), 2: Share(0.45, 0.45)}
    _, worked = measure(TwoGpuNode([shares, dict(shares)], {1, 2}))
    # The calls that end the first window delay the second one, on one GPU more than on the other.
    assert worked == {i: pytest.approx(45, abs=0.5) for i in (1, 2)}


def test_other_containers_share_the_remaining_time():
    shares = {1: Share(0.3, 0.3), 2: Share(0.4, 1), 3: Share(0.2, 1)}
    had, worked = measure(TwoGpuNode([shares, dict(shares)], {1}))
    assert worked[1] == pytest.approx(30, abs=1)
    for one in had:
        assert one[2] / one[3] == pytest.approx(2, rel=0.05)
        assert sum(one.values()) > 96


def test_compensation_of_windows_changes_no_slices():
    """Each change is a driver call that takes locks of the whole host."""
    shares = {1: Share(0.3, 0.3), 2: Share(0.4, 1), 3: Share(0.2, 1)}
    node = TwoGpuNode([shares, dict(shares)], {1})
    node.run(2)
    seen = set()
    for _ in range(20):
        node.run(0.1)
        seen.add((node.before[0][2].slice_ns, node.before[0][3].slice_ns))
    assert len(seen) == 1


def test_a_gang_that_is_alone_is_held_to_its_cap():
    _, worked = measure(TwoGpuNode([{1: Share(0.3, 0.3)}, {1: Share(0.3, 0.3)}], {1}))
    assert worked[1] == pytest.approx(30, abs=1)


def test_a_service_is_not_kept_waiting_by_a_window():
    """With class latency, the service goes first wherever it has work."""
    shares = {1: Share(0.5, 0.5), 2: Share(0.2, 1, latency=True)}
    node = TwoGpuNode([shares, {1: Share(0.5, 0.5)}], {1})
    node.contexts[0][2].mean, node.contexts[0][2].length = 20 * MS, 2 * MS
    node.contexts[0][2]._draw(0)
    measure(node)
    waits = node.contexts[0][2].waits[50:]
    assert sum(waits) / len(waits) < 4 * MS


def test_a_gang_of_class_latency_is_served_at_once():
    shares = {1: Share(0.3, 1, latency=True), 2: Share(0.6, 1)}
    node = TwoGpuNode([shares, dict(shares)], {1})
    for contexts in node.contexts:
        contexts[1].mean, contexts[1].length = 20 * MS, 2 * MS
        contexts[1]._draw(0)
    measure(node)
    for contexts in node.contexts:
        waits = contexts[1].waits[50:]
        assert sum(waits) / len(waits) < 4 * MS


def test_when_the_hog_ends_the_gang_continues_alone():
    shares = {1: Share(0.3, 1), 2: Share(0.6, 0.6)}
    node = TwoGpuNode([shares, dict(shares)], {1})
    node.run(2)
    for contexts in node.contexts:  # the hog has no more work
        contexts[2].mean = 1 << 60
        contexts[2].length = 1
        contexts[2].next_at = 1 << 62
    before = node.worked[1]
    node.run(3)
    assert 100 * (node.worked[1] - before) / (3 * S) > 85
