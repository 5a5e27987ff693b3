"""Carry out the policy on one GPU: read what was used, decide, switch and set slices.

A step takes as long as its driver calls, so it runs on a thread of its own. Containers are switched
on before others are switched off. In between both are scheduled, so the GPU never idles for it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from governor.hardware.activity import Activity, Full, Sample
from governor.hardware.gangs import Board
from governor.hardware.policy import Policy
from governor.hardware.tenant import Load, Setting, Share

BLIP = 2_000_000
"""GPU time in one step above which a process that is off counts as on again, in nanoseconds."""


ACTIVE = 1_000_000_000
"""Time since its last use of the GPU after which a process has no part of its container's slice."""


class Held(Protocol):
    """What a process has on a GPU: `n_groups` channel groups, each with a slice of its own."""

    @property
    def pid(self) -> int:
        """The process."""

    @property
    def key(self) -> int:
        """What identifies it on the GPU, whichever process has it."""

    @property
    def n_groups(self) -> int:
        """Number of channel groups."""


H = TypeVar("H", bound=Held)


class Hardware(Protocol[H]):
    """One GPU with a scheduler that can be steered."""

    def find(self, pid: int, pidfd: int, *, thorough: bool = False) -> Sequence[H]:
        """Return what a process has on the GPU; nothing if it is gone or has no context.

        Called from a thread of its own. A `thorough` search takes seconds.
        """

    def switch(self, held: Sequence[H], *, on: bool) -> None:
        """Let the GPU schedule these from now on, or not at all.

        Calls are counted: what was switched off twice is on after two calls that switch it on.
        Switching on what is on changes nothing.
        """

    def set_slice(self, held: H, ns: int) -> None:
        """Give each channel group this time slice."""

    def used_ns(self) -> Mapping[int, int]:
        """Return how long each process was on the GPU since the last call, by pid."""

    @property
    def returned_ns(self) -> Mapping[int, int]:
        """The part of that time from turns that began while the process was off, by pid."""

    @property
    def early_turns(self) -> Mapping[int, int]:
        """Number of turns in that time that ended for lack of work, by pid."""

    @property
    def full_turns(self) -> Sequence[Full]:
        """Turns in that time that ended with their slice."""

    @property
    def n_lost(self) -> int:
        """Number of trace records ever lost. Their time is charged to no container."""

    def tokens(self, held: Sequence[H]) -> list[Any]:
        """Return JSON values that identify these to another process, which is to switch them on."""


class Steering(Generic[H]):
    """Steers one GPU and its containers; every method is called from one thread."""

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
        """Set up a GPU without containers.

        `announce` is told what will be off before it is switched off, in each step while anything
        is off, and once more when nothing is. `samples` returns NVML's samples since a time, both
        on the clock; None if NVML has none. On the `board` GPUs agree when containers with several
        of them are on; `gpu` is this one's number there.
        """
        self._announce = announce
        self._announced = False  # whether anything is off by the last announcement
        self._hardware, self._clock = hardware, clock
        self._policy = Policy(clock())
        self._samples, self._activity = samples, Activity(clock())
        self._board, self._gpu = board or Board(), gpu
        self._gangs: dict[int, int] = {}  # by container, for those with several GPUs
        self._on_since: dict[int, int] = {}  # when these were switched on, while they are on
        self._spans: dict[int, tuple[int, int]] = {}  # the last time for which these were on
        self._held: dict[int, list[H]] = {}
        self._tenants: dict[int, int] = {}  # by pid
        self._settings: dict[int, Setting] = {}
        self._worked: dict[int, int] = {}  # when each process was last on the GPU
        self._groups: dict[int, int] = {}  # with a part of their container's slice, by container
        self._hidden: dict[int, int] = {}  # GPU time of processes that were not found
        self.strangers: set[int] = set()
        """Processes that were on the GPU in the last step through channels that are not known."""
        self.returned: set[int] = set()
        """Processes that were on it although they are off: through other channels, or on again."""
        # GPU time by container, since it was added. It never falls: later time offsets what was
        # charged too much.
        self.used_ns: Counter[int] = Counter()
        self._over: dict[int, int] = {}

    def add(self, tenant: int, share: Share) -> None:
        """Let a container share the GPU, or change what it may have."""
        self._policy.add(tenant, share, self._clock())
        self._held.setdefault(tenant, [])

    def join(self, tenant: int, gang: int) -> None:
        """Run a container on this GPU when it is on its others; `gang` is its number there."""
        if tenant in self._held:
            self._gangs[tenant] = gang

    def remove(self, tenant: int) -> None:
        """Forget a container, and leave what it still has on the GPU switched on."""
        setting = self._settings.get(tenant)
        held = self._held.get(tenant, [])
        if setting and not setting.on and held:
            self._hardware.switch(held, on=True)  # if this fails, `all_on` tries again
        for pid in [pid for pid, owner in self._tenants.items() if owner == tenant]:
            del self._tenants[pid]
            self._hidden.pop(pid, None)
        self._held.pop(tenant, None)
        self._settings.pop(tenant, None)
        self._groups.pop(tenant, None)
        self._gangs.pop(tenant, None)
        self._on_since.pop(tenant, None)
        self._spans.pop(tenant, None)
        self.used_ns.pop(tenant, None)  # another container may get the number next
        self._over.pop(tenant, None)
        self._policy.remove(tenant)

    def enter(self, tenant: int, pid: int) -> None:
        """Charge a process's time to a container, even before anything is known of it."""
        self._tenants[pid] = tenant

    def take(self, tenant: int, pid: int, found: Sequence[H]) -> None:
        """Steer what a process was found to have, which replaces what was known of it.

        What was found with another process before belongs to this one now: the driver has just
        answered for it, and handles are reused. So two containers never switch the same channels.
        """
        if self._tenants.get(pid) != tenant or not found:
            return  # it has ended in the meantime
        known = [one for one in self._held[tenant] if one.pid == pid]
        if list(found) == known and pid not in self.returned:
            return  # each driver call takes locks of the whole host
        keys = {one.key for one in found}
        for owner, held in self._held.items():
            self._held[owner] = [one for one in held if one.pid != pid and one.key not in keys]
        self._held[tenant] += found
        self._hidden.pop(pid, None)
        setting = self._settings.get(tenant)
        # An earlier governor may have died while it was off. Or it is known already, and off.
        self._hardware.switch(found, on=True)
        if setting and not setting.on:
            self._announce_off(self._settings)
            self._hardware.switch(found, on=False)
        if setting:
            self._set_slice(tenant, setting)

    def miss(self, pid: int) -> None:
        """Note that a search for a process found nothing: what it uses from now on is hidden."""
        known = {one.pid for held in self._held.values() for one in held}
        if pid in self._tenants and pid not in known:
            self._hidden.setdefault(pid, 0)

    def forget(self, tenant: int, pid: int) -> None:
        """Forget a process that has ended, or that is not to be steered any more."""
        gone = [one for one in self._held.get(tenant, []) if one.pid == pid]
        setting = self._settings.get(tenant)
        if gone and setting and not setting.on:
            self._hardware.switch(gone, on=True)  # it may be alive, and would stay off
        for one in gone:
            self._held[tenant].remove(one)
        if self._tenants.get(pid) == tenant:
            del self._tenants[pid]
            self._hidden.pop(pid, None)
        if gone and setting:
            self._set_slice(tenant, setting)

    def step(self) -> int:
        """Account, decide and carry out; return when to do so again, on the clock."""
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
        self._count_used(used)
        groups = self._count_groups(now, times)
        early: Counter[int] = Counter()
        for pid, n in self._hardware.early_turns.items():
            if pid in self._tenants:
                early[self._tenants[pid]] += n
        windows = self._board.windows(now) if self._gangs else {}
        own = {i: windows[gang] for i, gang in self._gangs.items() if gang in windows}
        settings, wake = self._policy.step(now, used, groups, early, own)
        changed = {i for i in settings if groups.get(i) != self._groups.get(i)}
        self._groups = groups
        self._apply(settings, changed)
        if self._gangs:
            self._board.say(self._gpu, now, self._loads(now))
        return wake

    def _loads(self, now: int) -> dict[int, Load]:
        """Return what containers with several GPUs do on this one, by their numbers there."""
        return {
            gang: self._policy.load(i, now)._replace(span=self._spans.get(i, (0, 0)))
            for i, gang in self._gangs.items()
        }

    def _count_used(self, used: Mapping[int, int]) -> None:
        for tenant, ns in used.items():
            left = ns - self._over.pop(tenant, 0)
            self.used_ns[tenant] += max(0, left)
            if left < 0:
                self._over[tenant] = -left

    def _count_groups(self, now: int, times: Mapping[int, int]) -> dict[int, int]:
        """Return the number of working channel groups of each container that was found."""
        self._worked |= {pid: now for pid, ns in times.items() if ns}
        self._worked = {pid: at for pid, at in self._worked.items() if now - at < ACTIVE}
        return {
            tenant: max(1, sum(one.n_groups for one in held if one.pid in self._worked))
            for tenant, held in self._held.items()
            if held
        }

    def _notice(self, times: Mapping[int, int]) -> None:
        """Note processes on the GPU through channels that are not known, or that are off."""
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
        """Largest GPU time that any process has had through what a search did not find."""
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
        self._announced = False
        self._announce([])

    def setting(self, tenant: int) -> Setting | None:
        """Return what is in force for a container; None before the first step with it."""
        return self._settings.get(tenant)

    def _apply(self, settings: dict[int, Setting], changed: Collection[int]) -> None:
        before = self._settings
        on = {i for i, setting in settings.items() if setting.on}
        was_on = {i for i in settings if i not in before or before[i].on}
        # A container that could not be switched on is tried again in the next step.
        self._switch(sorted(on - was_on), on=True)
        self._settings = {i: s if i in on else s._replace(on=True) for i, s in settings.items()}
        if len(on) < len(settings) or self._announced:
            self._announce_off(settings)
        self._switch(sorted(was_on - on), on=False)
        for i, setting in settings.items():
            if i not in before or before[i].slice_ns != setting.slice_ns or i in changed:
                self._set_slice(i, setting)
        self._settings = settings

    def _announce_off(self, settings: Mapping[int, Setting]) -> None:
        off = [i for i, setting in settings.items() if not setting.on]
        held = [one for i in off for one in self._held.get(i, [])]
        self._announced = bool(held)
        self._announce(self._hardware.tokens(held))

    def _switch(self, tenants: Sequence[int], *, on: bool) -> None:
        held = [one for tenant in tenants for one in self._held.get(tenant, [])]
        if not held:
            return
        self._hardware.switch(held, on=on)
        for tenant in self._gangs.keys() & set(tenants):
            if on:
                self._on_since[tenant] = self._clock()
            elif tenant in self._on_since:
                self._spans[tenant] = self._on_since.pop(tenant), self._clock()

    def _set_slice(self, tenant: int, setting: Setting) -> None:
        n_groups = self._groups.get(tenant, 1)
        for one in self._held.get(tenant, []):
            self._hardware.set_slice(one, setting.slice_ns // n_groups)
