"""Test when samples become a violation, with artificial samples on a virtual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from governor.violations import (
    COMPUTE,
    EVIDENCE_NS,
    KINDS,
    LATE_NS,
    LEAST_PERCENT,
    LONGEST_S,
    MAX_EPISODES,
    MEMORY,
    SETTLE_NS,
    UNREGISTERED,
    WORKLESS_NS,
    Episode,
    Facts,
    Findings,
    ProcessSample,
    ViolationDetector,
    allowed_memory,
    next_freeze,
)
from tests.conftest import examples

MIB, GIB = 1 << 20, 1 << 30
MS, S = 1_000_000, 1_000_000_000
LOOK = 250 * MS
HONEST = Facts(now_ns=0, allowed=GIB, memory={7: GIB})


class Play:
    """Samples of a container, four times a second, and the violations that they reported."""

    def __init__(self) -> None:
        self.judge = ViolationDetector("GPU-0")
        self.now = 100 * S
        self.told: list[tuple[str, bool, int]] = []  # kind, whether it began, time
        self.episodes: list[Episode] = []

    def look(self, facts: Facts, passed: int = LOOK) -> list[tuple[str, bool]]:
        self.now += passed
        told = self.judge.observe(replace(facts, now_ns=self.now))
        self.told += [(episode.kind, began, self.now) for episode, began in told]
        self.episodes += [episode for episode, began in told if began]
        return [(episode.kind, began) for episode, began in told]

    def looks(self, facts: Facts, ns: int) -> None:
        end = self.now + ns
        while self.now < end:
            self.look(facts)

    def idle(self, ns: int, *, percent: int = 0, frozen: bool = False, pid: int = 7) -> None:
        """Leave the container without a grant for `ns`; samples show work of `percent` if that is
        not 0.
        """
        end = self.now + ns
        while self.now < end:
            at = self.now + LOOK - 10 * MS
            samples = (ProcessSample(at, pid, percent),) if percent else ()
            self.look(replace(HONEST, idle=True, frozen=frozen, samples=samples))


def test_an_allowance_is_the_quota_libraries_and_a_part_of_a_context() -> None:
    assert allowed_memory(8 * GIB, 520 * MIB) == 8 * GIB + 258 * MIB


def test_memory_over_the_quota_is_reported_once_after_a_second() -> None:
    play = Play()
    play.looks(HONEST, S)
    begin = play.now
    over = replace(HONEST, memory={7: GIB // 2, 8: GIB // 2 + 1})
    play.looks(over, 10 * S)
    assert [(kind, began) for kind, began, _ in play.told] == [(MEMORY, True)]
    assert play.told[0][2] - begin <= 1.5 * S
    assert play.episodes == [Episode(MEMORY, "GPU-0", 8, GIB + 1, GIB)]
    assert play.judge.accuses
    play.looks(HONEST, S)
    assert [(kind, began) for kind, began, _ in play.told[1:]] == [(MEMORY, False)]
    assert not play.judge.accuses


def test_occasional_wrong_samples_are_no_violation() -> None:
    """Two processes exchange the whole quota, so that a few samples count it for both."""
    play = Play()
    over = replace(HONEST, memory={7: GIB, 8: GIB}, unregistered=frozenset({8}))
    for i in range(1000):
        play.look(HONEST if i % 12 else over)
    assert play.told == []


@pytest.mark.parametrize(
    ("held", "on", "off", "within"),
    [
        (5 * GIB, 900 * MS, 300 * MS, 1500 * MS),
        (2 * GIB, 900 * MS, 300 * MS, 2 * S),
        (2 * GIB, 500 * MS, 500 * MS, 3 * S),
        (GIB + GIB // 4, 900 * MS, 300 * MS, 6 * S),
        (5 * GIB, 250 * MS, 2 * S, 5 * S),
    ],
)
def test_memory_beyond_the_quota_adds_up_over_bursts(
    held: int, on: int, off: int, within: int
) -> None:
    """Otherwise a program could free the memory each time before it has held it for a second."""
    play = Play()
    play.looks(HONEST, S)
    begin = play.now
    while not play.told:
        phase = (play.now + LOOK - begin - 1) % (on + off)
        play.look(replace(HONEST, memory={7: held if phase < on else 0}))
        assert play.now - begin <= within
    assert [(kind, began) for kind, began, _ in play.told] == [(MEMORY, True)]
    play.looks(HONEST, S)
    assert [(kind, began) for kind, began, _ in play.told[1:]] == [(MEMORY, False)]


def test_bursts_continue_a_violation_and_later_one_sample_is_enough() -> None:
    play = Play()
    play.looks(replace(HONEST, memory={7: 5 * GIB}), 2 * S)
    for _ in range(10):
        play.look(HONEST)
        play.look(replace(HONEST, memory={7: 5 * GIB}))
    assert len(play.told) == 1
    play.looks(HONEST, S)
    assert play.look(replace(HONEST, memory={7: 5 * GIB})) == [(MEMORY, True)]
    play.looks(HONEST, 30 * S)  # the earlier excess no longer counts
    assert play.look(replace(HONEST, memory={7: 5 * GIB})) == []


def test_short_lived_unregistered_processes_add_up() -> None:
    play = Play()
    play.looks(HONEST, S)
    begin = play.now
    pids = iter(range(100, 200))
    while not play.told:
        play.look(replace(HONEST, unregistered=frozenset({next(pids)})))
        play.look(HONEST)
        play.look(HONEST)
        assert play.now - begin <= 3 * S
    assert [(kind, began) for kind, began, _ in play.told[:1]] == [(UNREGISTERED, True)]


def test_many_samples_at_once_count_as_one() -> None:
    play = Play()
    over = replace(HONEST, memory={7: 2 * GIB})
    for _ in range(40):
        play.look(over, 20 * MS)
    assert play.told == []


def test_the_time_between_samples_far_apart_is_no_evidence() -> None:
    play = Play()
    for _ in range(3):
        play.look(replace(HONEST, memory={7: 2 * GIB}), 10 * S)
    assert play.told == []


def test_an_unregistered_process_is_reported_after_half_a_second() -> None:
    play = Play()
    stranger = replace(HONEST, unregistered=frozenset({9}), memory={7: 1, 9: 5})
    assert play.look(stranger) == []
    assert play.look(stranger) == []
    assert play.look(stranger) == [(UNREGISTERED, True)]
    assert play.episodes == [Episode(UNREGISTERED, "GPU-0", 9, 5, 0)]
    # If another process takes its place, the same violation continues.
    play.looks(replace(stranger, unregistered=frozenset({10})), 3 * S)
    play.looks(HONEST, S)
    assert [(kind, began) for kind, began, _ in play.told[1:]] == [(UNREGISTERED, False)]


def test_work_without_a_grant_is_reported_within_two_seconds() -> None:
    play = Play()
    play.idle(3 * S)
    begin = play.now
    play.idle(10 * S, percent=99)
    assert [(kind, began) for kind, began, _ in play.told] == [(COMPUTE, True)]
    assert play.told[0][2] - begin <= S
    assert play.episodes[0].pid == 7
    assert play.episodes[0].found == 99
    end = play.now
    play.idle(5 * S)
    assert [(kind, began) for kind, began, _ in play.told[1:]] == [(COMPUTE, False)]
    assert play.told[-1][2] - end <= WORKLESS_NS + LOOK


def test_a_container_that_works_on_without_a_grant_is_reported_within_two_seconds() -> None:
    play = Play()
    play.looks(HONEST, 5 * S)  # the container is not idle: it has grants
    begin = play.now
    play.idle(10 * S, percent=50)
    assert [(kind, began) for kind, began, _ in play.told] == [(COMPUTE, True)]
    assert play.told[0][2] - begin <= 2 * S


def test_samples_of_earlier_work_are_no_violation() -> None:
    """NVML's samples cover the last second, and the same ones are returned repeatedly."""
    play = Play()
    play.looks(HONEST, S)
    old = tuple(ProcessSample(play.now + i * 100 * MS, 7, 99) for i in range(1, 9))
    for _ in range(40):
        play.look(replace(HONEST, idle=True, samples=old))
    assert play.told == []


def test_samples_with_future_times_are_no_violation() -> None:
    play = Play()
    play.idle(3 * S)
    for i in range(40):
        ahead = ProcessSample(play.now + 3600 * S + i, 7, 99)
        play.look(replace(HONEST, idle=True, samples=(ahead,)))
    assert play.told == []


def test_a_repeated_sample_counts_once() -> None:
    play = Play()
    play.idle(3 * S)
    sample = ProcessSample(play.now, 7, 99)
    for _ in range(8):
        play.look(replace(HONEST, idle=True, samples=(sample,)))
    assert play.told == []


@pytest.mark.parametrize("percent", [LEAST_PERCENT - 1, 101, 2**32 - 1])
def test_low_and_invalid_percentages_are_no_evidence(percent: int) -> None:
    play = Play()
    play.idle(20 * S, percent=percent)
    assert play.told == []


def test_the_time_between_late_samples_is_not_judged() -> None:
    """The governor was stopped, and the container granted itself its share in the meantime."""
    play = Play()
    play.idle(5 * S)
    for _ in range(20):
        play.now += LATE_NS
        play.idle(1, percent=99)
    assert play.told == []


@pytest.mark.parametrize("work_every", [2, 3, 4])
def test_a_container_with_occasional_grants_is_not_accused(work_every: int) -> None:
    play = Play()
    for i in range(80):
        at = play.now + LOOK - 10 * MS
        busy = i % work_every == 0
        play.look(replace(HONEST, idle=not busy, samples=(ProcessSample(at, 7, 99),)))
    assert play.told == []


def test_a_violation_of_compute_outlasts_a_freeze() -> None:
    """A frozen container does nothing.

    Its work after the thaw continues the same violation; without such work the violation ends.
    """
    play = Play()
    play.idle(3 * S)
    play.idle(2 * S, percent=99)
    play.idle(32 * S, frozen=True)
    play.idle(S)  # the container needs some time to begin again
    assert len(play.told) == 1
    play.idle(5 * S, percent=99)
    assert len(play.told) == 1
    play.idle(8 * S, frozen=True)
    play.idle(WORKLESS_NS + LOOK)
    assert [(kind, began) for kind, began, _ in play.told] == [(COMPUTE, True), (COMPUTE, False)]


def test_samples_from_before_a_freeze_are_no_violation_after_it() -> None:
    play = Play()
    play.idle(3 * S)
    play.idle(500 * MS, percent=99)  # not enough for a report
    play.idle(1 * S, frozen=True, percent=99)
    play.idle(500 * MS, percent=99)
    assert play.told == []


facts = st.builds(
    Facts,
    now_ns=st.just(0),
    allowed=st.just(GIB),
    memory=st.dictionaries(st.integers(1, 3), st.integers(0, 2 * GIB), max_size=3),
    unregistered=st.frozensets(st.integers(1, 3)),
    samples=st.lists(
        st.builds(ProcessSample, st.integers(0, 200 * S), st.integers(1, 3), st.integers(0, 200)),
        max_size=4,
    ),
    idle=st.booleans(),
    frozen=st.booleans(),
)


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(facts, st.integers(0, 2 * S)), max_size=60))
def test_begin_and_end_alternate(looks: list[tuple[Facts, int]]) -> None:
    play = Play()
    for one, passed in looks:
        play.look(one, passed)
    for kind in KINDS:
        turns = [began for told, began, _ in play.told if told == kind]
        assert turns == [i % 2 == 0 for i in range(len(turns))]
    for episode in play.episodes:
        assert episode.found > episode.allowed or episode.kind == UNREGISTERED
        assert episode.found >= 0
        assert episode.kind != COMPUTE or episode.found <= 100


@settings(max_examples=examples(300))
@given(st.lists(facts, max_size=30))
def test_no_single_sample_is_a_violation(looks: list[Facts]) -> None:
    """One bad sample in twelve is no violation if it shows at most twice the allowed memory."""
    play = Play()
    for one in looks:
        play.look(replace(one, memory={7: min(sum(one.memory.values()), 2 * GIB)}))
        play.looks(HONEST, 11 * LOOK)
    assert play.told == []


def test_the_duration_of_a_freeze_doubles_up_to_a_maximum() -> None:
    times = [next_freeze(None)]
    while len(times) < 8:
        times.append(next_freeze(times[-1]))
    assert times == [1, 2, 4, 8, 16, 32, 32, 32]
    assert LONGEST_S == 32


def test_findings_are_bounded_and_described_as_plain_values() -> None:
    findings = Findings(2)
    for i in range(2 * MAX_EPISODES):
        findings.add(Episode(MEMORY, "GPU-1", i, 2, 1, began=1.23456, ended=2.0))
    assert len(findings.describe()["violations"]) == MAX_EPISODES
    assert not findings.lasts("GPU-1", MEMORY)
    findings.add(Episode(MEMORY, "GPU-1", 5, 2, 1, began=1.23456))
    assert findings.lasts("GPU-1", MEMORY)
    assert not findings.lasts("GPU-0", MEMORY)
    assert not findings.lasts("GPU-1", COMPUTE)
    assert findings.describe()["violations"][-1] == {
        "kind": "memory", "gpu": "GPU-1", "pid": 5, "found": 2, "allowed": 1, "began": 1.235, "ended": None,
    }  # fmt: skip
    assert (findings.seen, findings.frozen) == ([0, 0], False)


def test_an_ongoing_violation_is_not_dropped_for_others() -> None:
    findings = Findings(1)
    findings.add(Episode(MEMORY, "GPU-0", 1, 2, 1))
    for i in range(2 * MAX_EPISODES):
        findings.add(Episode(COMPUTE, "GPU-0", i, 9, 0, ended=2.0))
    assert findings.lasts("GPU-0", MEMORY)
    assert len(findings.episodes) == MAX_EPISODES
    assert findings.episodes[-1].pid == 2 * MAX_EPISODES - 1


def test_the_delays_of_a_report_add_up_to_two_seconds_at_most() -> None:
    """After the last legitimate work, the samples have to settle; after that, three readings have
    to find new samples.
    """
    assert SETTLE_NS + 3 * LOOK <= 2 * S
    assert SETTLE_NS < EVIDENCE_NS
