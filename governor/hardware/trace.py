"""Read which process was on a GPU, and when, from the driver's trace of context switches.

The GPU's front end writes a record at the beginning and at the end of a context's turn. The kernel
module delivers the records about 30 times a second, with the process's pid in the host's pid
namespace and the time on the GPU's clock. A flush (0.1 to 0.2 ms) delivers those that are pending.
A context that is not interrupted by another one causes no records, whether it works or not.
Containers cannot influence the records. Only graphics and compute are traced, not copies.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import NamedTuple

from governor.hardware import calls
from governor.hardware.activity import Full
from governor.hardware.driver import DriverCallError, DriverClient, DriverGpu

EARLY = 0.9
"""Fraction of the slice: a turn shorter than this ended for lack of work."""
LATE = 1.3
"""Fraction of the slice: if a turn is longer than this, no other context was waiting when its
slice ended. A turn normally exceeds its slice by RESTORE, and by up to 0.1 ms more (H200)."""
RESTORE = 60_000
"""Time at the beginning of a turn in which the context is restored and nothing runs, in nanoseconds
(H200: a kernel of 1.002 ms takes turns of 1.063 to 1.065 ms). It is charged to no process."""
USUAL_SLICE = 2 * 1024 * 1024
"""Time slice that libcuda requests, in nanoseconds."""
MANY = 1024
"""Largest number of processes or contexts for which state is kept."""
N_RECORDS = 32768
"""Number of records in the buffer; with slices of 0.1 ms there are 8,000 a second (H100)."""
_RECORD = calls.RECORD_HEADER_SIZE + calls.SWITCH_RECORD.size
_FIELDS = calls.SWITCH_RECORD.only("tag", "seqno", "context_id", "pid", "timestamp")
_BEGIN, _END = calls.TAG_BEGIN.value, calls.TAG_END.value
_PAGE = 4096

_REASONS = {
    1: "the GPU is too old for it",
    2: "it is not enabled on this GPU",
    3: "it is not enabled",
    4: "it needs root",
    5: "it needs a capability",
}


class Switch(NamedTuple):
    """The beginning or end of a context's turn; `at_ns` is on the GPU's clock."""

    begins: bool
    pid: int
    context: int
    at_ns: int
    sequence: int


class Trace:
    """The trace of one GPU, from its creation until the driver's client is closed."""

    def __init__(self, driver: DriverClient, gpu: DriverGpu, n_records: int = N_RECORDS) -> None:
        self._driver, self._n = driver, n_records
        header, self._header = driver.map_memory(_PAGE)
        records, self._records = driver.map_memory(n_records * _RECORD)
        self._buffer = driver.allocate(
            driver.client,
            calls.BUFFER,
            calls.BUFFER_ALLOC,
            {
                "recordSize": _RECORD,
                "recordCount": n_records,
                "hSubDevice": gpu.subdevice,
                "hBufferHeader": header,
                "hRecordBuffer": records,
            },
        )
        values = {
            "hEventBuffer": self._buffer,
            "recordSize": calls.SWITCH_RECORD.size,
            "levelOfDetail": calls.DETAIL_SIMPLE,
            "bAllUsers": 1,
        }
        status, answer = driver.ask(calls.BIND_TRACE, gpu.subdevice, values)
        if status:
            assert calls.BIND_TRACE.parameters  # noqa: S101
            reason = _REASONS.get(calls.BIND_TRACE.parameters.get(answer, "reasonCode"), "")
            what = f"the trace of context switches{': ' + reason if reason else ''}"
            raise DriverCallError(what, status)
        values = {"enable": 1, "flags": calls.KEEP_OLDEST.value}
        driver.control(calls.ENABLE_TRACE, self._buffer, values)
        self._get = 0

    @property
    def n_dropped(self) -> int:
        """Number of records ever dropped because the buffer was full."""
        return calls.BUFFER_HEADER.get(self._header, "recordDropcount")

    def flush(self) -> None:
        """Make the kernel module deliver the records that the GPU has written so far."""
        self._driver.control(calls.FLUSH_TRACE, self._buffer, {})

    def read(self) -> list[Switch]:
        """Return the records since the last call, in order."""
        put = calls.BUFFER_HEADER.get(self._header, "recordPut")
        found = []
        get = self._get
        while get != put and put < self._n:
            at = get * _RECORD + calls.RECORD_HEADER_SIZE
            tag, low, high, context, pid, at_ns = _FIELDS.unpack_from(self._records, at)
            if tag in (_BEGIN, _END):
                found.append(Switch(tag == _BEGIN, pid, context, at_ns, high << 8 | low))
            get = (get + 1) % self._n
        if get != self._get:
            self._get = get
            self._driver.control(calls.MOVE_GET, self._buffer, {"recordBufferGet": get})
        return found


class Residency:
    """GPU time by process, added up from a trace; it uses no clock or driver.

    The first `restore_ns` of a turn are not counted, nor is a turn without a begin record. A turn
    without an end record ends where the next turn of any context begins, because the GPU runs one
    context at a time. A context that is switched off while no other has work may cause no end
    record, and no begin record when it is on again, so `switched` has to be called at both times.
    """

    def __init__(self, restore_ns: int = RESTORE) -> None:
        self._restore_ns = restore_ns
        self.ns: dict[int, int] = defaultdict(int)
        self.n_lost = 0
        self.resident: Switch | None = None
        self._since = self._began = 0
        self._sequence: int | None = None
        self._changes: deque[tuple[int, frozenset[int], bool]] = deque()
        self._off: set[int] = set()
        self._back: set[int] = set()  # processes that began a turn while they were off
        self.returned: dict[int, int] = defaultdict(int)
        self._slices: dict[int, int] = {}  # by pid
        # Turns that ended before their slice, for any reason, by context: pid, begin, end.
        self._ended: dict[int, tuple[int, int, int]] = {}
        self._fills: set[int] = set()  # processes that used up the slice of their last turn
        self._early: dict[int, int] = defaultdict(int)
        self._full: list[tuple[int, int, int]] = []  # pid, begin and end

    def switched(self, pids: Iterable[int], at_ns: int, *, on: bool) -> None:
        """Record that processes are switched on or off at `at_ns`.

        Trace records from earlier times may still arrive.
        """
        self._changes.append((at_ns, frozenset(pids), on))

    def add(self, switches: Iterable[Switch]) -> None:
        """Account for records, in their order."""
        for switch in switches:
            if self._sequence is not None:
                self.n_lost += (switch.sequence - self._sequence - 1) & 0xFFFF
            self._sequence = switch.sequence
            self.settle(switch.at_ns)
            if switch.begins:
                self.resident, self._began = switch, switch.at_ns
                self._since = switch.at_ns + self._restore_ns
                # Another turn follows, without a switch in between, so the earlier one ended for
                # lack of work.
                if self._ended.pop(switch.context, (0,))[0] == switch.pid:
                    self._early[switch.pid] += 1
                    self._fills.discard(switch.pid)
                if switch.pid in self._off:  # something switched it on
                    self._off.remove(switch.pid)
                    self._back.add(switch.pid)
            elif self.resident and self.resident.context == switch.context:
                self._end_turn(switch)
                self.resident = None

    def sliced(self, pid: int, ns: int) -> None:
        """Record the time slice of a process."""
        self._slices[pid] = ns

    def _end_turn(self, switch: Switch) -> None:
        part = (switch.at_ns - self._began) / self._slices.get(switch.pid, USUAL_SLICE)
        if part < EARLY:
            self._ended[switch.context] = (switch.pid, self._began, switch.at_ns)
        elif part < LATE:
            self._full.append((switch.pid, self._began, switch.at_ns))
            self._fills.add(switch.pid)

    def take_turns(self, now_ns: int) -> tuple[dict[int, int], list[Full]]:
        """Return the numbers of early turns by pid, and the full turns, since the last call.

        An early turn is one that the process gave up for lack of work, and that was followed by
        another. A turn that ended because the process was switched off counts as full if the
        previous one was full.
        """
        early, full = self._early, self._full
        self._early, self._full = defaultdict(int), []
        for kept in (self._ended, self._fills):
            if len(kept) > MANY:
                kept.clear()
        self._slices = dict(list(self._slices.items())[-MANY:])
        return dict(early), [Full(pid, now_ns - began, now_ns - end) for pid, began, end in full]

    def take(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the times by pid since the last call, and forget them.

        The second result is the part of the first from turns that began while the process was off.
        """
        taken = self.ns, self.returned
        self.ns, self.returned = defaultdict(int), defaultdict(int)
        return taken

    def settle(self, now_ns: int) -> None:
        """Account for the time of the context on the GPU until `now_ns`, on the GPU's clock."""
        while self._changes and self._changes[0][0] <= now_ns:
            at_ns, pids, on = self._changes.popleft()
            self._count(at_ns)
            self._off = self._off - pids if on else self._off | pids
            self._back -= pids
            # A turn that the switch ended was not given up by the process.
            for context in [c for c, turn in self._ended.items() if turn[0] in pids]:
                turn = self._ended.pop(context)
                if turn[0] in self._fills:
                    self._full.append(turn)
        self._count(now_ns)

    def _count(self, now_ns: int) -> None:
        if self.resident and now_ns > self._since:
            if self.resident.pid not in self._off:
                self.ns[self.resident.pid] += now_ns - self._since
            if self.resident.pid in self._back:
                self.returned[self.resident.pid] += now_ns - self._since
            self._since = now_ns
