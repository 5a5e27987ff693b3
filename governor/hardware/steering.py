"""Carries out the policy on one GPU: what was used, what follows, switches and slices.

A step takes as long as its driver calls, so it runs on a thread of its own. Containers are switched
on before others are switched off: in between both are scheduled, and the GPU never idles for it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from governor.hardware.activity import Activity, Full, Sample
from governor.hardware.gangs import Board
from governor.hardware.policy import Policy, Setting, Share

BLIP = 2_000_000
"""A process that is off is on the GPU again when it had so much of it in a step."""


ACTIVE = 1_000_000_000
"""A process that has not been on the GPU for so long has no part of its container's slice."""


class Held(Protocol):
    """What a process has on a GPU: `n_groups` that the GPU schedules, each for a slice."""

    @property
    def pid(self) -> int:
        """The process."""

    @property
    def key(self) -> int:
        """What it is to the GPU, whichever process has it."""

    @property
    def n_groups(self) -> int:
        """How many groups."""


H = TypeVar("H", bound=Held)


class Hardware(Protocol[H]):
    """One GPU whose scheduler can be steered."""

    def find(self, pid: int, pidfd: int, *, thorough: bool = False) -> Sequence[H]:
        """Return what a process has on the GPU; nothing where it is gone or has no context.

        Called from a thread of its own. Thorough is what takes seconds.
        """

    def switch(self, held: Sequence[H], *, on: bool) -> None:
        """Let the GPU schedule these from now on, or not at all.

        It counts: what was switched off twice is on after two more calls. What is on stays so.
        """

    def set_slice(self, held: H, ns: int) -> None:
        """Give each group this time slice."""

    def used_ns(self) -> Mapping[int, int]:
        """Return for how long each process was on the GPU since the last call, by pid."""

    @property
    def returned_ns(self) -> Mapping[int, int]:
        """Of that, what processes had by turns that began when they were off, by pid."""

    @property
    def early_turns(self) -> Mapping[int, int]:
        """How many turns of a process ended with its work in that time, by pid."""

    @property
    def full_turns(self) -> Sequence[Full]:
        """Those that ended with their slice."""

    @property
    def n_lost(self) -> int:
        """How many records of the trace were lost, ever: their time is charged to no container."""

    def tokens(self, held: Sequence[H]) -> list[Any]:
        """Return what names these to another process that shall switch them on; it is JSON."""


class Steering(Generic[H]):
    """One GPU and its containers; every method is called from one thread."""

    def __init__(
        self,
        hardware: Hardware[H],
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        announce: Callable[[list[Any]], None] = lambda _: None,
        samples: Callable[[int], Iterable[Sample] | None] = lambda _: None,
        board: Board | None = None,
        gpu: int = 0,
    ) -> None:
        """`announce` is told what will be off, before it is, and in each step while anything is.

        By the board GPUs agree when containers with several of them are on; this is its number.

        `samples` returns NVML's since a time, both on the clock; None where it does not tell.
        """
        self._announce = announce
        self._hardware, self._clock = hardware, clock
        self._policy = Policy(clock())
        self._samples, self._activity = samples, Activity(clock())
        self._board, self._gpu = board or Board(), gpu
        self._gangs: dict[int, int] = {}  # by container, of those with several GPUs
        self._held: dict[int, list[H]] = {}
        self._tenants: dict[int, int] = {}  # by pid
        self._settings: dict[int, Setting] = {}
        self._worked: dict[int, int] = {}  # when a process was last on the GPU
        self._groups: dict[int, int] = {}  # that have a part of a container's slice
        self._hidden: dict[int, int] = {}  # GPU time of processes that were not found
        self.strangers: set[int] = set()
        """Processes that were on the GPU in the last step by something that is not known."""
        self.returned: set[int] = set()
        """Those that were on it although they are switched off: by other channels, or on again."""
        self.used_ns: Counter[int] = Counter()  # GPU time by container, ever

    def add(self, tenant: int, share: Share) -> None:
        """Let a container share the GPU, or change what it may have."""
        self._policy.add(tenant, share, self._clock())
        self._held.setdefault(tenant, [])

    def join(self, tenant: int, gang: int) -> None:
        """Have a container on this GPU when it is on its others: `gang` is its number there."""
        if tenant in self._held:
            self._gangs[tenant] = gang

    def remove(self, tenant: int) -> None:
        """Forget a container, and leave what it still has on the GPU switched on."""
        setting = self._settings.get(tenant)
        held = self._held.get(tenant, [])
        if setting and not setting.on and held:
            self._hardware.switch(held, on=True)  # or it is known on, and `all_on` tries again
        for pid in [pid for pid, owner in self._tenants.items() if owner == tenant]:
            del self._tenants[pid]
            self._hidden.pop(pid, None)
        self._held.pop(tenant, None)
        self._settings.pop(tenant, None)
        self._groups.pop(tenant, None)
        self._gangs.pop(tenant, None)
        self.used_ns.pop(tenant, None)  # the number is another container's next
        self._policy.remove(tenant)

    def enter(self, tenant: int, pid: int) -> None:
        """Charge a process's time to a container, also before anything is known of it."""
        self._tenants[pid] = tenant

    def take(self, tenant: int, pid: int, found: Sequence[H]) -> None:
        """Steer what was found that a process has; it replaces what was known of the process.

        What another process was found with before is this one's now: the driver has just answered
        for it, and handles come round. So nothing is switched by two containers.
        """
        if self._tenants.get(pid) != tenant or not found:
            return  # it has ended meanwhile
        known = [one for one in self._held[tenant] if one.pid == pid]
        if list(found) == known and pid not in self.returned:
            return  # each call of the driver takes locks of the whole host
        keys = {one.key for one in found}
        for owner, held in self._held.items():
            self._held[owner] = [one for one in held if one.pid != pid and one.key not in keys]
        self._held[tenant] += found
        self._hidden.pop(pid, None)
        setting = self._settings.get(tenant)
        # A governor before this one may have died while it was off; and it may be known, and off.
        self._hardware.switch(found, on=True)
        if setting and not setting.on:
            self._announce_off(self._settings)
            self._hardware.switch(found, on=False)
        if setting:
            self._set_slice(tenant, setting)

    def miss(self, pid: int) -> None:
        """Hear that a look for a process has found nothing: what it has from now on is hidden."""
        known = {one.pid for held in self._held.values() for one in held}
        if pid in self._tenants and pid not in known:
            self._hidden.setdefault(pid, 0)

    def forget(self, tenant: int, pid: int) -> None:
        """Forget a process that has ended, or that is not to be steered any more."""
        gone = [one for one in self._held.get(tenant, []) if one.pid == pid]
        setting = self._settings.get(tenant)
        if gone and setting and not setting.on:
            self._hardware.switch(gone, on=True)  # it may live, and would stay off
        for one in gone:
            self._held[tenant].remove(one)
        if self._tenants.get(pid) == tenant:
            del self._tenants[pid]
            self._hidden.pop(pid, None)
        if gone and setting:
            self._set_slice(tenant, setting)

    def step(self) -> int:
        """Account, decide and carry out; return when to do it again, on the clock."""
        used: Counter[int] = Counter()
        times = self._hardware.used_ns()
        now = self._clock()
        self._notice(times)
        wanted = self._activity.wants_samples(now)
        samples = self._samples(self._activity.known) if wanted else None
        charged = self._activity.step(now, times, samples, self._hardware.full_turns)
        for pid, ns in charged.items():
            tenant = self._tenants.get(pid)
            if tenant is not None:
                used[tenant] += ns
        self.used_ns.update(used)
        groups = self._count_groups(now, times)
        early: Counter[int] = Counter()
        for pid, n in self._hardware.early_turns.items():
            if pid in self._tenants:
                early[self._tenants[pid]] += n
        windows = self._board.windows(now) if self._gangs else {}
        own = {i: windows[gang] for i, gang in self._gangs.items() if gang in windows}
        settings, wake = self._policy.step(now, used, groups, early, own)
        if self._gangs:
            loads = {gang: self._policy.load(i, now) for i, gang in self._gangs.items()}
            self._board.say(self._gpu, now, loads)
        changed = {i for i in settings if groups.get(i) != self._groups.get(i)}
        self._groups = groups
        self._apply(settings, changed)
        return wake

    def _count_groups(self, now: int, times: Mapping[int, int]) -> dict[int, int]:
        """Return how many channel groups of each container that was found work."""
        self._worked |= {pid: now for pid, ns in times.items() if ns}
        self._worked = {pid: at for pid, at in self._worked.items() if now - at < ACTIVE}
        return {
            tenant: max(1, sum(one.n_groups for one in held if one.pid in self._worked))
            for tenant, held in self._held.items()
            if held
        }

    def _notice(self, times: Mapping[int, int]) -> None:
        """Note processes that are on the GPU by channels that are not known, or that are off."""
        known = {one.pid for held in self._held.values() for one in held}
        returned = self._hardware.returned_ns
        self.strangers, self.returned = set(), set()
        for pid, ns in times.items():
            tenant = self._tenants.get(pid)
            if tenant is None:
                continue
            setting = self._settings.get(tenant)
            if pid not in known:
                self.strangers.add(pid)
                if pid in self._hidden:
                    self._hidden[pid] += ns
            elif setting is not None and not setting.on and returned.get(pid, 0) > BLIP:
                self.returned.add(pid)

    @property
    def hidden_ns(self) -> int:
        """GPU time of the process that had most of it by what was looked for and not found."""
        return max(self._hidden.values(), default=0)

    def all_on(self) -> None:
        """Switch every container on."""
        failed: Exception | None = None
        for tenant, held in self._held.items():
            try:
                if held:
                    self._hardware.switch(held, on=True)
            except Exception as e:  # noqa: BLE001 - the others are switched on all the same
                failed = e
            else:
                if tenant in self._settings:
                    self._settings[tenant] = self._settings[tenant]._replace(on=True)
        if failed:
            raise failed
        self._announce([])

    def setting(self, tenant: int) -> Setting | None:
        """Return what holds for a container; None before the first step with it."""
        return self._settings.get(tenant)

    def _apply(self, settings: dict[int, Setting], changed: Collection[int]) -> None:
        before = self._settings
        on = {i for i, setting in settings.items() if setting.on}
        was_on = {i for i in settings if i not in before or before[i].on}
        # What was off and could not be switched on is tried again in the next step.
        self._switch(sorted(on - was_on), on=True)
        self._settings = {i: s if i in on else s._replace(on=True) for i, s in settings.items()}
        if len(on) < len(settings) or on != was_on:
            self._announce_off(settings)
        self._switch(sorted(was_on - on), on=False)
        for i, setting in settings.items():
            if i not in before or before[i].slice_ns != setting.slice_ns or i in changed:
                self._set_slice(i, setting)
        self._settings = settings

    def _announce_off(self, settings: Mapping[int, Setting]) -> None:
        off = [i for i, setting in settings.items() if not setting.on]
        held = [one for i in off for one in self._held.get(i, [])]
        self._announce(self._hardware.tokens(held))

    def _switch(self, tenants: Sequence[int], *, on: bool) -> None:
        held = [one for tenant in tenants for one in self._held.get(tenant, [])]
        if held:
            self._hardware.switch(held, on=on)

    def _set_slice(self, tenant: int, setting: Setting) -> None:
        n_groups = self._groups.get(tenant, 1)
        for one in self._held.get(tenant, []):
            self._hardware.set_slice(one, setting.slice_ns // n_groups)
