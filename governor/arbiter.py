"""Python bindings of the arbiter library, which decides which container has a GPU.

`Arbiter` is the pure policy, for tests on a virtual clock and what-if runs. `Runner` is the thread
that applies the policy to containers' pages. The structures mirror libcontrol/arbiter.h and
runner.h.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any, Protocol, Self

from governor.config import Config
from governor.errors import GovernorError
from libcontrol import pages

NEVER = 2**64 - 1
NO_TENANT = -1
WHOLE = 1_000_000


class ArbiterConfig(ctypes.Structure):
    """struct arbiter_config, in nanoseconds."""

    _fields_ = (
        ("quantum_ns", ctypes.c_uint64),
        ("most_ns", ctypes.c_uint64),
        ("overdue_ns", ctypes.c_uint64),
        ("longest_ns", ctypes.c_uint64),
        ("lead_ns", ctypes.c_uint64),
        ("switch_ns", ctypes.c_uint64),
        ("overhead_ns", ctypes.c_uint64),
        ("beside_ns", ctypes.c_uint64),
        ("prepare_ns", ctypes.c_uint64),
    )


class View(ctypes.Structure):
    """struct arbiter_view: the holder of the GPU, its deadline, and the time of the next step."""

    _fields_ = (
        ("holder", ctypes.c_int32),
        ("epoch", ctypes.c_uint32),
        ("start_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("contended", ctypes.c_uint32),
        ("beside", ctypes.c_uint32),
        ("standby", ctypes.c_int32),
        ("expected", ctypes.c_uint32),
        ("standby_ns", ctypes.c_uint64),
        ("wake_ns", ctypes.c_uint64),
    )


class Stats(ctypes.Structure):
    """struct arbiter_stats of one container."""

    _fields_ = (
        ("grants", ctypes.c_uint64),
        ("charged_ns", ctypes.c_uint64),
        ("lent_ns", ctypes.c_uint64),
        ("held_ns", ctypes.c_uint64),
        ("overdue", ctypes.c_uint64),
        ("handover_ns", ctypes.c_uint64),
        ("since_ns", ctypes.c_uint64),
        ("open", ctypes.c_uint64),
    )


WAIT_LEAST_NS = 250_000
N_WAITS = 14
WAIT_BOUNDS_NS = tuple(WAIT_LEAST_NS << i for i in range(N_WAITS - 1))
"""Upper bounds of the counts in `Waits`, in nanoseconds. The last count has no bound and includes
all longer waits."""


class Waits(ctypes.Structure):
    """struct runner_waits of one container: its grants, counted by how long it waited for each."""

    _fields_ = (
        ("counts", ctypes.c_uint64 * N_WAITS),
        ("ns", ctypes.c_uint64),
    )


class RunnerConfig(ctypes.Structure):
    """struct runner_config."""

    _fields_ = (
        ("arbiter", ArbiterConfig),
        ("lookahead_ns", ctypes.c_uint64),
        ("spin_ns", ctypes.c_uint64),
        ("unused_ns", ctypes.c_uint64),
    )


PREPARE_NS = 10_000_000
"""Time in nanoseconds after the expected beginning of its grant until which a container may prepare
work on a GPU that uses MPS. It is longer than most delays of a grant, because a thread that waits
for the grant spins in the last 2 ms of this time."""


def arbiter_config(config: Config, strategy: str = "timeslice") -> ArbiterConfig:
    """Return the arbiter's part of the node's configuration, for a GPU with this strategy."""
    if strategy == "mps":
        # Clients of one server share its context: a hand-over needs no context switch, so grants
        # can be short. The next holder is decided at most half a grant ahead.
        quantum_ns = int(config.mps_quantum_ms * 1e6)
        return ArbiterConfig(
            quantum_ns=quantum_ns,
            most_ns=quantum_ns,
            overdue_ns=20_000_000,
            longest_ns=config.longest_ms * 1_000_000,
            lead_ns=min(400_000, quantum_ns // 2),
            switch_ns=0,
            overhead_ns=min(500_000, quantum_ns // 8),
            # Work that is still queued when a hand-over begins runs concurrently with the next
            # holder's.
            beside_ns=min(config.lookahead_us * 1000, quantum_ns // 4),
            prepare_ns=PREPARE_NS,
        )
    return ArbiterConfig(
        quantum_ns=int(config.quantum_ms * 1e6),
        most_ns=int(max(config.quantum_ms, config.quantum_most_ms) * 1e6),
        overdue_ns=20_000_000,
        longest_ns=config.longest_ms * 1_000_000,
        lead_ns=400_000,
        switch_ns=config.switch_us * 1000,
        overhead_ns=500_000,
    )


def load_library(directory: str | Path) -> ctypes.CDLL:
    """Load libtidegate-arbiter.so from `directory` and declare its functions."""
    path = Path(directory) / "libtidegate-arbiter.so"
    try:
        library = ctypes.CDLL(str(path), use_errno=True)
    except OSError as e:
        raise GovernorError(
            f"the arbiter library cannot be loaded: {e}", hint="run make build, or set library_dir"
        ) from e
    pointer, u32, i32, u64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64
    prototypes: dict[str, tuple[object, tuple[object, ...]]] = {
        "arbiter_new": (pointer, (ctypes.POINTER(ArbiterConfig),)),
        "arbiter_free": (pointer, (pointer,)),
        "arbiter_add": (i32, (pointer, u32, u32, u64)),
        "arbiter_begin": (None, (pointer, u32)),
        "arbiter_set": (None, (pointer, i32, u32, u32)),
        "arbiter_remove": (None, (pointer, i32, u64)),
        "arbiter_want": (None, (pointer, i32, ctypes.c_bool, u64)),
        "arbiter_released": (None, (pointer, u64, u64, u32)),
        "arbiter_alive": (None, (pointer, u64)),
        "arbiter_sign": (None, (pointer, i32, u64)),
        "arbiter_overrun": (None, (pointer, i32, ctypes.c_bool, u64)),
        "arbiter_busy": (None, (pointer, i32, u64)),
        "arbiter_step": (None, (pointer, u64, ctypes.POINTER(View))),
        "arbiter_stats": (None, (pointer, i32, ctypes.POINTER(Stats))),
        "gangs_new": (pointer, (ctypes.POINTER(ArbiterConfig),)),
        "gangs_free": (pointer, (pointer,)),
        "gangs_add": (i32, (pointer, ctypes.POINTER(u32), ctypes.POINTER(i32), u32)),
        "gangs_remove": (None, (pointer, i32)),
        "gangs_leave": (None, (pointer, u32)),
        "gangs_step": (u64, (pointer, u32, pointer, u64, ctypes.POINTER(View))),
        "runners_new": (pointer, (ctypes.POINTER(RunnerConfig),)),
        "runners_free": (pointer, (pointer,)),
        "runners_add": (i32, (pointer, ctypes.POINTER(pointer), ctypes.POINTER(i32), u32)),
        "runners_remove": (None, (pointer, i32)),
        "runner_new": (pointer, (ctypes.POINTER(RunnerConfig), pointer)),
        "runner_start": (ctypes.c_int, (pointer,)),
        "runner_free": (pointer, (pointer,)),
        "runner_add": (i32, (pointer, u32, u32, pointer, u32, pointer)),
        "runner_set": (None, (pointer, i32, u32, u32)),
        "runner_pause": (None, (pointer, i32, ctypes.c_bool)),
        "runner_remove": (None, (pointer, i32)),
        "runner_open": (None, (pointer, ctypes.c_bool)),
        "runner_watch": (
            ctypes.c_int,
            (pointer, ctypes.c_int, ctypes.POINTER(pointer), u32),
        ),
        "runner_due": (ctypes.c_bool, (pointer,)),
        "runner_due_fd": (ctypes.c_int, (pointer,)),
        "runner_stats": (None, (pointer, i32, ctypes.POINTER(Stats))),
        "runner_waits": (None, (pointer, i32, ctypes.POINTER(Waits))),
        "runner_fence": (None, ()),
    }
    for name, (result, arguments) in prototypes.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    pages.use_fence(library.runner_fence)
    return library


class Arbiter:
    """The policy for one GPU, on the caller's clock. Shares are parts per million."""

    def __init__(self, library: ctypes.CDLL, config: ArbiterConfig) -> None:
        self._library = library
        self._self = library.arbiter_new(ctypes.byref(config))
        if not self._self:
            raise MemoryError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.arbiter_free(self._self)
        self._self = None

    @property
    def pointer(self) -> int:
        """Address of the object, for the library."""
        return int(self._self)

    def add(self, guarantee: int, limit: int, now: int) -> int:
        """Add a tenant and return its number, or NO_TENANT if all numbers are taken."""
        return int(self._library.arbiter_add(self._self, guarantee, limit, now))

    def begin(self, epoch: int) -> None:
        """Continue after `epoch`, the number of an earlier arbiter's grant.

        Later grants have higher numbers.
        """
        self._library.arbiter_begin(self._self, epoch)

    def set(self, tenant: int, guarantee: int, limit: int, *, latency: bool = False) -> None:  # noqa: ARG002
        """Change a tenant's shares."""
        self._library.arbiter_set(self._self, tenant, guarantee, limit)

    def remove(self, tenant: int, now: int) -> None:
        """Forget a tenant; the GPU becomes free if the tenant held it."""
        self._library.arbiter_remove(self._self, tenant, now)

    def want(self, tenant: int, now: int, *, want: bool) -> None:
        """Report whether a tenant is waiting for GPU time."""
        self._library.arbiter_want(self._self, tenant, want, now)

    def released(
        self, release_ns: int, residual_ns: int = 0, *, used: bool = True, processes: int = 1
    ) -> None:
        """Report that the holder gave the grant back with `residual_ns` of its work left.

        `processes` is the number of its processes that worked during the grant; it counts as 0
        unless `used`.
        """
        n_active = processes if used else 0
        self._library.arbiter_released(self._self, release_ns, residual_ns, n_active)

    def alive(self, alive_ns: int) -> None:
        """Report when the holder last signalled that work in its overdue grant is still running."""
        self._library.arbiter_alive(self._self, alive_ns)

    def sign(self, tenant: int, sign_ns: int) -> None:
        """Report when a tenant last showed a sign of life."""
        self._library.arbiter_sign(self._self, tenant, sign_ns)

    def overrun(self, tenant: int, now: int, *, overruns: bool) -> None:
        """Report whether work of a tenant is still running although its grant is over."""
        self._library.arbiter_overrun(self._self, tenant, overruns, now)

    def busy(self, tenant: int, busy_ns: int) -> None:
        """Report how much GPU time a tenant has used in total, by the GPU's clock."""
        self._library.arbiter_busy(self._self, tenant, busy_ns)

    def step(self, now: int) -> View:
        """Advance to `now`, and return the view that is then in force."""
        view = View()
        self._library.arbiter_step(self._self, now, ctypes.byref(view))
        return view

    def stats(self, tenant: int) -> Stats:
        """Return a tenant's counters."""
        stats = Stats()
        self._library.arbiter_stats(self._self, tenant, ctypes.byref(stats))
        return stats


class Gangs:
    """The policy for containers with several GPUs; GPUs have numbers below 32. See gangs.h."""

    def __init__(self, library: ctypes.CDLL, config: ArbiterConfig) -> None:
        self._library = library
        self._self = library.gangs_new(ctypes.byref(config))
        if not self._self:
            raise MemoryError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.gangs_free(self._self)
        self._self = None

    def add(self, tenants: Mapping[int, int]) -> int:
        """Add a gang: a container's tenants by GPU; return the gang's number, or NO_TENANT."""
        return int(self._library.gangs_add(self._self, *_gang(tenants)))

    def remove(self, gang: int) -> None:
        """Forget a gang; its tenants are then granted one by one."""
        self._library.gangs_remove(self._self, gang)

    def leave(self, gpu: int) -> None:
        """Leave a GPU out of all gangs until its next step."""
        self._library.gangs_leave(self._self, gpu)

    def step(self, gpu: int, arbiter: Arbiter, now: int) -> tuple[View, list[int]]:
        """Step one GPU's arbiter; return its view, and the other GPUs that need a step."""
        view = View()
        poked = int(
            self._library.gangs_step(self._self, gpu, arbiter.pointer, now, ctypes.byref(view))
        )
        return view, [i for i in range(32) if poked >> i & 1]


def _gang(tenants: Mapping[int, int]) -> tuple[object, object, int]:
    n = len(tenants)
    return (ctypes.c_uint32 * n)(*tenants), (ctypes.c_int32 * n)(*tenants.values()), n


def runner_config(config: Config, strategy: str = "timeslice") -> RunnerConfig:
    """Return the part of the node's configuration that the threads need."""
    return RunnerConfig(
        arbiter=arbiter_config(config, strategy),
        lookahead_ns=config.lookahead_us * 1000,
        spin_ns=config.spin_us * 1000,
        unused_ns=5_000_000,
    )


class Runners:
    """State shared by the threads of all GPUs: the containers with several GPUs."""

    def __init__(self, library: ctypes.CDLL, config: Config) -> None:
        self._library = library
        self._self = library.runners_new(ctypes.byref(runner_config(config)))
        if not self._self:
            raise MemoryError

    @property
    def pointer(self) -> int:
        """Address of the object, for the library."""
        return int(self._self)

    def close(self) -> None:
        """Free the object, after the last of the threads has stopped."""
        self._library.runners_free(self._self)
        self._self = None

    def add(self, runners: Sequence[Runner], tenants: Sequence[int]) -> int:
        """Form a gang of a container's tenants; return its number, or NO_TENANT."""
        n = len(tenants)
        pointers = (ctypes.c_void_p * n)(*[runner.pointer for runner in runners])
        return int(
            self._library.runners_add(self._self, pointers, (ctypes.c_int32 * n)(*tenants), n)
        )

    def remove(self, gang: int) -> None:
        """Dissolve a gang: its GPUs are granted one by one again.

        Call this before the gang's tenants are removed.
        """
        if self._self:
            self._library.runners_remove(self._self, gang)


class Together(Protocol):
    """Coordinator of containers that run on several GPUs at once."""

    def add(self, runners: Sequence[Any], tenants: Sequence[int], /) -> int:
        """Run a container on all these GPUs at once; return its gang number, or NO_TENANT."""

    def remove(self, gang: int, /) -> None:
        """Forget a container; call it before the container's tenants are removed."""


class Runner:
    """The thread that shares one GPU among containers according to a strategy."""

    def __init__(
        self,
        library: ctypes.CDLL,
        config: Config,
        strategy: str = "timeslice",
        together: Runners | None = None,
    ) -> None:
        self._library = library
        self.together: Together | None = together
        self._pages: dict[int, tuple[object, object]] = {}
        settings = runner_config(config, strategy)
        self._self = library.runner_new(
            ctypes.byref(settings), together.pointer if together else None
        )
        if not self._self:
            raise GovernorError(
                "the arbiter cannot be created", hint="raise the limit on open files"
            )
        error = library.runner_start(self._self)
        if error:
            raise GovernorError(
                f"the arbiter's thread cannot be started: {os.strerror(error)}",
                hint="raise the limit on processes",
            )

    @property
    def pointer(self) -> int:
        """Address of the object, for the library."""
        return int(self._self)

    def close(self) -> None:
        """Stop the thread. Containers keep their last grant."""
        if self._self:
            self._library.runner_free(self._self)
            self._self = None
            self._pages.clear()

    def add(
        self,
        guarantee: int,
        limit: int,
        grant: mmap,
        device: int,
        ledger: mmap,
        *,
        latency: bool = False,  # noqa: ARG002
        is_adopted: bool = False,  # noqa: ARG002
    ) -> int:
        """Add the container with these pages; `device` is the GPU's index in them.

        `is_adopted` is true if an earlier governor admitted the container.
        """
        views = (ctypes.c_char.from_buffer(grant), ctypes.c_char.from_buffer(ledger))
        tenant = int(
            self._library.runner_add(
                self._self,
                guarantee,
                limit,
                ctypes.addressof(views[0]),
                device,
                ctypes.addressof(views[1]),
            )
        )
        if tenant == NO_TENANT:
            raise GovernorError("256 containers already share this GPU", hint="use another GPU")
        self._pages[tenant] = views
        return tenant

    def set(self, tenant: int, guarantee: int, limit: int, *, latency: bool = False) -> None:  # noqa: ARG002
        """Change a container's shares."""
        self._library.runner_set(self._self, tenant, guarantee, limit)

    def remove(self, tenant: int) -> None:
        """Forget a container; its pages are no longer accessed once this returns."""
        if self._self:
            self._library.runner_remove(self._self, tenant)
        self._pages.pop(tenant, None)

    def pause(self, tenant: int, *, is_paused: bool) -> None:
        """End a container's grant at once and give it no more, or resume giving it grants."""
        self._library.runner_pause(self._self, tenant, is_paused)

    not_steered = ""
    """Reason why grants divide the time although the node is configured for the GPU's own
    scheduler; empty otherwise."""

    @property
    def is_steered(self) -> bool:
        """Whether the GPU's own scheduler divides its time: no, because grants do."""
        return False

    def enter(
        self, tenant: int, slot: int, pid: int, pidfd: int, contexts: Callable[[], int]
    ) -> None:
        """Do nothing: grants need no list of a container's processes."""

    def leave(self, tenant: int, slot: int) -> None:
        """Do nothing, as `enter` does."""

    def open(self, *, is_open: bool) -> None:
        """Give all containers an open grant, or grant the GPU to them in turn."""
        self._library.runner_open(self._self, is_open)

    def watch(self, fd: int, others: Sequence[Runner] = ()) -> None:
        """Wake the threads of a process's GPUs when the process writes to its socket.

        The threads are this one and those of `others`. The descriptor is duplicated. Raise OSError
        if the process cannot be watched.
        """
        copy = os.dup(fd)
        pointers = (ctypes.c_void_p * len(others))(*[runner.pointer for runner in others])
        error = self._library.runner_watch(self._self, copy, pointers, len(others))
        if error:
            os.close(copy)
            raise OSError(error, os.strerror(error))

    def due(self) -> bool:
        """Return whether a process on this GPU is waiting for an NVML sample.

        Once it has returned False, `due_fd` becomes readable when another process begins to wait.
        """
        return bool(self._library.runner_due(self._self))

    @property
    def due_fd(self) -> int:
        """An eventfd that becomes readable when a process begins to wait for a sample."""
        return int(self._library.runner_due_fd(self._self))

    def stats(self, tenant: int) -> Stats:
        """Return a container's counters."""
        stats = Stats()
        self._library.runner_stats(self._self, tenant, ctypes.byref(stats))
        return stats

    def waits(self, tenant: int) -> Waits:
        """Return the container's waits for its grants."""
        waits = Waits()
        self._library.runner_waits(self._self, tenant, ctypes.byref(waits))
        return waits
