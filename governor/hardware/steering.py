"""Carry out the policy on one GPU: read its usage, decide, switch channels and set time slices.

A step takes as long as its driver calls, so it runs on a separate thread. Containers are switched
on before others are switched off, so that the GPU does not idle in between.
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
"""GPU time in one step, in nanoseconds, above which a process that is off is taken to be on
again."""


ACTIVE = 1_000_000_000
"""A process that has not used the GPU for this long, in nanoseconds, has no part of its
container's slice."""


class Held(Protocol):
    """What a process has on a GPU: `n_groups` channel groups, each with a separate slice."""

    @property
    def pid(self) -> int:
        """The process."""

    @property
    def key(self) -> int:
        """Identity on the GPU, independent of the process that has it."""

    @property
    def n_groups(self) -> int:
        """Number of channel groups."""


H = TypeVar("H", bound=Held)


class Hardware(Protocol[H]):
    """One GPU with a scheduler that can be steered."""

    def find(self, pid: int, pidfd: int, *, thorough: bool = False) -> Sequence[H]:
        """Return what a process has on the GPU; nothing if the process is gone or has no context.

        It is called from the finder's thread. A `thorough` search takes seconds.
        """

    @property
    def elsewhere_s(self) -> float:
        """Processor time, in seconds, that searches have taken so far in other processes."""

    def switch(self, held: Sequence[H], *, on: bool) -> None:
        """Switch the channels of these holdings on or off.

        Calls are counted: a channel that was switched off twice must be switched on twice.
        Switching on a channel that is on has no effect.
        """

    def set_slice(self, held: H, ns: int) -> None:
        """Set the time slice of each channel group."""

    def used_ns(self) -> Mapping[int, int]:
        """Return how long each process has been on the GPU since the last call, by pid."""

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
        """Return JSON values by which the watchdog process can switch these holdings on."""


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

        `announce` is called with everything that will be off, before it is switched off, in each
        step while anything is off, and once more when nothing is. `samples` returns NVML's samples
        since a given time, or None if NVML has none; all times are on `clock`. The `board`
        coordinates containers with several GPUs; `gpu` is this GPU's number on it.
        """
        self._announce = announce
        self._announced = False  # whether the last announcement listed anything
        self._hardware, self._clock = hardware, clock
        self._policy = Policy(clock())
        self._samples, self._activity = samples, Activity(clock())
        self._board, self._gpu = board or Board(), gpu
        self._gangs: dict[int, int] = {}  # by container, for those with several GPUs
        self._on_since: dict[int, int] = {}  # for a gang: when it was switched on
        self._spans: dict[int, tuple[int, int]] = {}  # for a gang: when it was last on
        self._held: dict[int, list[H]] = {}
        self._tenants: dict[int, int] = {}  # by pid
        self._settings: dict[int, Setting] = {}
        self._worked: dict[int, int] = {}  # when each process was last on the GPU
        self._groups: dict[int, int] = {}  # groups that share their container's slice, by container
        self._searched: set[int] = set()  # containers for which a search has ended
        self._hidden: dict[int, int] = {}  # GPU time of processes that were not found
        self.strangers: set[int] = set()
        """Processes that used the GPU in the last step through channels that are not known."""
        self.returned: set[int] = set()
        """Processes that used the GPU in the last step although they are off: through other
        channels, or because something switched them on again."""
        # GPU time by container, since the container was added. The time never decreases: an
        # overcharge is offset against later time.
        self.used_ns: Counter[int] = Counter()
        self._overcharged: dict[int, int] = {}

    def add(self, tenant: int, share: Share, *, is_adopted: bool = False) -> None:
        """Let a container share the GPU, or change its share.

        If `is_adopted` is true, an earlier governor or Steering may have set its slices.
        """
        self._policy.add(tenant, share, self._clock(), is_adopted=is_adopted)
        self._held.setdefault(tenant, [])

    def join(self, tenant: int, gang: int) -> None:
        """Run a container on this GPU at the same time as on its other GPUs, as gang `gang`."""
        if tenant in self._held:
            self._gangs[tenant] = gang

    def remove(self, tenant: int) -> None:
        """Forget a container; what it still has on the GPU is switched on."""
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
        self.used_ns.pop(tenant, None)  # another container may get the number
        self._overcharged.pop(tenant, None)
        self._searched.discard(tenant)
        self._policy.remove(tenant)

    def enter(self, tenant: int, pid: int) -> None:
        """Charge a process's time to a container, even before its channels are found."""
        self._tenants[pid] = tenant

    def take(self, tenant: int, pid: int, found: Sequence[H]) -> None:
        """Steer the channels that a search found for a process; they replace those known before.

        A channel that was found in another process before belongs to this process now, because
        handles are reused and the driver has just confirmed it. Two containers thus never switch
        the same channels.
        """
        if self._tenants.get(pid) != tenant:
            return  # the process has ended in the meantime
        self._searched.add(tenant)
        if not found:
            return
        known = [one for one in self._held[tenant] if one.pid == pid]
        if list(found) == known and pid not in self.returned:
            return  # each driver call takes host-wide locks
        keys = {one.key for one in found}
        missed = [one for one in known if one.key not in keys]
        for owner, held in self._held.items():
            self._held[owner] = [one for one in held if one.pid != pid and one.key not in keys]
        self._held[tenant] += found
        self._hidden.pop(pid, None)
        setting = self._settings.get(tenant)
        # The channels may be off: an earlier governor may have died, or they were known already.
        # Those that this search missed are in no later announcement, so they must not stay off.
        self._hardware.switch([*missed, *found], on=True)
        if setting and not setting.on:
            self._announce_off(self._settings)
            self._hardware.switch(found, on=False)
        if setting:
            self._set_slice(tenant, setting)

    def miss(self, pid: int) -> None:
        """Record that a thorough search found nothing: the process's GPU time is now hidden."""
        known = {one.pid for held in self._held.values() for one in held}
        if pid in self._tenants and pid not in known:
            self._hidden.setdefault(pid, 0)

    def forget(self, tenant: int, pid: int) -> None:
        """Forget a process that has ended, or that is no longer to be steered."""
        gone = [one for one in self._held.get(tenant, []) if one.pid == pid]
        setting = self._settings.get(tenant)
        if gone and setting and not setting.on:
            self._hardware.switch(gone, on=True)  # it may be alive, and would otherwise stay off
        for one in gone:
            self._held[tenant].remove(one)
        if self._tenants.get(pid) == tenant:
            del self._tenants[pid]
            self._hidden.pop(pid, None)
        if gone and setting:
            self._set_slice(tenant, setting)

    def step(self) -> int:
        """Account for use, decide and act; return the time of the next step, on the clock."""
        used: Counter[int] = Counter()
        times = self._hardware.used_ns()
        now = self._clock()
        self._find_strangers(times)
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
        """Return, by gang, the loads of containers with several GPUs on this GPU."""
        return {
            gang: self._policy.load(i, now)._replace(span=self._spans.get(i, (0, 0)))
            for i, gang in self._gangs.items()
        }

    def _count_used(self, used: Mapping[int, int]) -> None:
        for tenant, ns in used.items():
            left = ns - self._overcharged.pop(tenant, 0)
            self.used_ns[tenant] += max(0, left)
            if left < 0:
                self._overcharged[tenant] = -left

    def _count_groups(self, now: int, times: Mapping[int, int]) -> dict[int, int]:
        """Return the number of working channel groups of each container that was searched."""
        self._worked |= {pid: now for pid, ns in times.items() if ns}
        self._worked = {pid: at for pid, at in self._worked.items() if now - at < ACTIVE}
        found = {
            tenant: max(1, sum(one.n_groups for one in held if one.pid in self._worked))
            for tenant, held in self._held.items()
            if held
        }
        return dict.fromkeys(self._searched, 0) | found

    def _find_strangers(self, times: Mapping[int, int]) -> None:
        """Record processes that use the GPU through unknown channels, or although they are off."""
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
        """Largest GPU time of any process through channels that a search did not find."""
        return max(self._hidden.values(), default=0)

    def all_on(self) -> None:
        """Switch every container on."""
        failed: Exception | None = None
        for tenant, held in self._held.items():
            try:
                if held:
                    self._hardware.switch(held, on=True)
            except Exception as e:  # noqa: BLE001 - the others must still be switched on
                failed = e
            else:
                if tenant in self._settings:
                    self._settings[tenant] = self._settings[tenant]._replace(on=True)
        if failed:
            raise failed
        self._announced = False
        self._announce([])

    def setting(self, tenant: int) -> Setting | None:
        """Return the setting in force for a container; None before the first step with it."""
        return self._settings.get(tenant)

    def _apply(self, settings: dict[int, Setting], changed: Collection[int]) -> None:
        before = self._settings
        on = {i for i, setting in settings.items() if setting.on}
        was_on = {i for i in settings if i not in before or before[i].on}
        # If a container cannot be switched on, the next step tries again.
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
        n_groups = max(1, self._groups.get(tenant, 1))
        for one in self._held.get(tenant, []):
            self._hardware.set_slice(one, setting.slice_ns // n_groups)
