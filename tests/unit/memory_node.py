"""Run processes with the control library on a simulated GPU, without a container; the test acts as the governor.

`MemoryNode` makes the pages and answers at the socket. `Agent` is a process that sees them at
/run/tidegate, in a separate mount namespace, and runs the programs that the test sends. The ledger
is reconciled with the GPU only when the test calls `sample`, or while it is in `looking`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from libcontrol import layout, pages
from simgpu import simgpu
from simgpu.testing import CudaError
from tests.conftest import ROOT, lack, need

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CONTEXT = 64 * MIB
SECOND = 1_000_000_000

PRELUDE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUSER, REC, PRIVATE, BIND = 0x20000, 0x10000000, 0x4000, 1 << 18, 0x1000
uid, gid = os.getuid(), os.getgid()
def must(status):
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
must(libc.unshare(NEWNS | (NEWUSER if uid else 0)))
if uid:
    open('/proc/self/setgroups', 'w').write('deny')
    open('/proc/self/uid_map', 'w').write(f'{uid} {uid} 1')
    open('/proc/self/gid_map', 'w').write(f'{gid} {gid} 1')
must(libc.mount(b'none', b'/', None, REC | PRIVATE, None))
here = os.open(sys.argv[2], os.O_PATH)
must(libc.mount(b'tmpfs', b'/run', b'tmpfs', 0, None))
os.mkdir('/run/tidegate')
must(libc.mount(f'/proc/self/fd/{here}'.encode(), b'/run/tidegate', None, BIND, None))
"""

AGENT = """
import json, threading, time
from simgpu.testing import CudaError, SimulatedDriver

class Governed(SimulatedDriver):
    def __init__(self, path):
        self.path = path
        self.library = ctypes.CDLL(path)

driver = Governed(sys.argv[1])
answers = os.fdopen(os.dup(1), 'w', buffering=1)
scope = globals()
for line in sys.stdin:
    try:
        program = json.loads(line)
        try:
            code = compile(program, 'agent', 'eval')
        except SyntaxError:
            code = compile(program, 'agent', 'exec')
        answer = {'value': eval(code, scope)}
    except CudaError as error:
        answer = {'error': error.name, 'call': str(error), 'code': error.code}
    answers.write(json.dumps(answer) + '\\n')
"""


LAUNCH = """
import time
mod, f = ctypes.c_void_p(), ctypes.c_void_p()
driver.call('cuModuleLoadData', ctypes.byref(mod), b'')
driver.call('cuModuleGetFunction', ctypes.byref(f), mod, b'burn')
def launch(ns, stream=0):
    value = ctypes.c_uint64(ns)
    address = ctypes.cast(ctypes.pointer(value), ctypes.c_void_p)
    driver.call('cuLaunchKernel', f, 1, 1, 1, 1, 1, 1, 0, stream, (ctypes.c_void_p * 1)(address), None)
"""
"""A program that defines launch(ns, stream), which launches a kernel that runs for `ns`."""


STOP = """
word = driver.get('cuMemHostAlloc', 4096, 0)
def stop(stream=0):
    ctypes.c_uint32.from_address(word).value = 0
    driver.call('cuStreamWaitValue32_v2', stream, word, 1, 0)
def go_on():
    ctypes.c_uint32.from_address(word).value = 1
"""
"""A program that defines stop(stream), after which the stream's work waits until go_on()."""


ANSWER_S = 120.0

IN_TIME_S = 0.9
"""Longest time in seconds between sending a program and publishing a sample: a refusal waits 1.2 s
for one. If a busy machine takes longer, the refusal of the process may have been correct."""


class Agent:
    """A process of the container; `run` evaluates Python in it, with `driver` in scope."""

    def __init__(self, node: MemoryNode, slot: int | None, process: subprocess.Popen[str]) -> None:
        self.node = node
        self.slot = slot
        self.process = process

    def send(self, program: str) -> None:
        """Send `program` without waiting for its result."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(program) + "\n")
        self.process.stdin.flush()

    def answer(self) -> object:
        """Return what the program evaluated to, or raise the driver's error."""
        assert self.process.stdout is not None
        # A process that never answers fails only its own test.
        timer = threading.Timer(ANSWER_S, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        assert line, f"the process ended with {self.process.wait()}"
        answer = json.loads(line)
        if "error" in answer:
            raise CudaError(answer["call"].split(":")[0], answer["code"], answer["error"])
        return answer["value"]

    def run(self, program: str) -> object:
        self.send(program)
        return self.answer()

    def number(self, program: str) -> int:
        value = self.run(program)
        assert isinstance(value, int)
        return value

    def refuses(self, program: str) -> bool:
        """Return whether the program fails because memory is short."""
        try:
            self.run(program)
        except CudaError as error:
            if error.name != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            return True
        return False

    def field(self, name: str, device: int = 0) -> int:
        """Read a field of this process's part of the ledger."""
        assert self.slot is not None
        base = layout.ledger_device(self.slot, device)
        return pages.read(self.node.ledger, base, "ledger_device", name)

    def describe(self) -> str:
        """Return the state of the process as text: its fields, the grant, and where its threads are."""
        names = ("want", "active_epoch", "released_epoch", "launches")
        state = {name: self.field(name) for name in names}
        state |= {name: self.node.read(name) for name in ("epoch", "deadline_ns", "standby_ns")}
        beat = pages.read(self.node.grant, 0, "grant_header", "heartbeat_ns")
        age_ms = (time.monotonic_ns() - beat) // 1_000_000
        threads = [
            " ".join((task / name).read_text().strip() for name in ("comm", "wchan", "syscall"))
            for task in Path(f"/proc/{self.process.pid}/task").iterdir()
        ]
        return f"{state}, heartbeat {age_ms} ms old, threads: {'; '.join(threads)}"

    @property
    def charged(self) -> int:
        """The part of the charge, in bytes, that NVML attributes to the process."""
        return self.field("memory") - self.field("unseen")

    @property
    def seen(self) -> int:
        """Bytes that the process holds according to the GPU."""
        return self.node.seen().get(self.process.pid, 0)

    def free(self) -> tuple[int, int]:
        """Return the answer of cuMemGetInfo: free and total bytes."""
        value = self.run("memory_info()")
        assert isinstance(value, list)
        return value[0], value[1]

    def kill(self) -> None:
        """Kill the process and clear its slot, as the governor does when the pidfd becomes readable."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.node.ended(self)


HELPERS = """
def memory_info():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    driver.call('cuMemGetInfo_v2', ctypes.byref(free), ctypes.byref(total))
    return [free.value, total.value]
def out(name, *arguments):
    return driver.get(name, *arguments)
def prop(kind=1, identity=0, handles=1):
    return ctypes.create_string_buffer(__import__('struct').pack('<iiiiQ8x', 1, handles, kind, identity, 0))
def pool_props(kind=1, identity=0):
    return ctypes.create_string_buffer(__import__('struct').pack('<iiiiQQH54x', 1, 1, kind, identity, 0, 0, 0))
def info(pool, attribute):
    value = ctypes.c_uint64()
    driver.call('cuMemPoolGetAttribute', pool, attribute, ctypes.byref(value))
    return value.value
"""


class MemoryNode:
    """A container with a quota of `limit` bytes on each of its simulated GPUs."""

    def __init__(
        self,
        build: Path,
        work: Path,
        limit: int,
        *,
        memory: int = 64 * GIB,
        shim: Path | None = None,
        devices: int = 1,
    ) -> None:
        self.work = work
        self.limit = limit
        self.environment = {"SIMGPU_DIR": str(work / "gpus"), "PYTHONPATH": str(ROOT)}
        self.agents: list[Agent] = []
        self.answer_size = 4
        self._slots: dict[int, int] = {}  # slot to pid
        lib = work / "lib"
        (lib / "origin").mkdir(parents=True)
        self.library = shutil.copy(build / "libcontrol" / "libcuda.so.1", lib)
        origin = lib / "origin" / "libcuda-origin.so.1"
        if shim is None:
            shutil.copy(build / "simgpu" / "libcuda.so.1", origin)
        else:  # a driver in front of the simulated one
            shutil.copy(build / "simgpu" / "libcuda.so.1", origin.with_name("libsimgpu.so"))
            compile_shim(shim, origin)
        self.gpus = simgpu.create(
            work / "gpus", memory=memory, context_memory=CONTEXT, devices=devices
        )
        # In memory, like the governor's: on a disk, a write to a mapped page waits for the disk.
        shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._runtime = tempfile.TemporaryDirectory(prefix="tg", dir=shared)
        self.runtime = Path(self._runtime.name)
        self.runtime.chmod(0o755)
        self.grant = self._make_grant()
        self._ledger_fd = os.memfd_create("tidegate-ledger", os.MFD_CLOEXEC)
        os.ftruncate(self._ledger_fd, layout.LEDGER_SIZE)
        self.ledger = mmap.mmap(self._ledger_fd, layout.LEDGER_SIZE)
        pages.init_ledger(self.ledger)
        # The socket is bound by a short name: a socket's path has at most 107 bytes.
        directory = os.open(self.runtime, os.O_PATH)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"/proc/self/fd/{directory}/governor.sock")
        os.close(directory)
        self._listener.listen(64)
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self.returned: list[int] = []  # pids that connected again, as if to another governor
        self.given_fd: int | None = None  # ledger that they get instead of their present one
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self._closing = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()

    def _make_grant(self) -> mmap.mmap:
        path = self.runtime / "grant"
        path.write_bytes(bytes(layout.GRANT_SIZE))
        with path.open("r+b") as file:
            page = mmap.mmap(file.fileno(), layout.GRANT_SIZE)
        pages.init_grant(
            page,
            settings={"heartbeat_ns": time.monotonic_ns(), "marker_ns": 250_000},
            devices=[
                {
                    "uuid": uuid.UUID(simgpu.status(gpu).uuid.removeprefix("GPU-")).bytes,
                    "memory_limit": self.limit,
                    "context_bytes": CONTEXT,
                    "compute": 1_000_000,
                    "compute_limit": 1_000_000,
                    "deadline_ns": layout.OPEN,
                }
                for gpu in self.gpus
            ],
        )
        return page

    def go_away(self) -> None:
        """Make the governor appear to be away from now on."""
        self._closing.set()
        self._beating.join()
        pages.write(self.grant, 0, "grant_header", "heartbeat_ns", time.monotonic_ns() - 5 * SECOND)

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Make the governor appear to be away for so long that a starting process does not wait."""
        path = self.runtime / "governor.sock"
        path.rename(self.runtime / "elsewhere")
        self.go_away()
        long_ago = time.monotonic_ns() - 20 * SECOND
        pages.write(self.grant, 0, "grant_header", "heartbeat_ns", long_ago)
        try:
            yield
        finally:
            (self.runtime / "elsewhere").rename(path)
            self._closing.clear()
            self._beating = threading.Thread(target=self._beat, daemon=True)
            self._beating.start()

    @contextlib.contextmanager
    def other_ledger(self, slot: int) -> Iterator[mmap.mmap]:
        """Give the process of `slot` another ledger when it connects again while the block runs."""
        fd = os.memfd_create("tidegate-ledger", os.MFD_CLOEXEC)
        os.ftruncate(fd, layout.LEDGER_SIZE)
        with mmap.mmap(fd, layout.LEDGER_SIZE) as ledger:
            pages.init_ledger(ledger)
            pages.write(ledger, pages.slot_base(slot), "ledger_slot", "state", 1)
            pages.write(ledger, 0, "ledger_header", "n_slots", 1 + slot)
            self.given_fd = fd
            yield ledger
        self.given_fd = None
        os.close(fd)

    def _beat(self) -> None:
        # The library accepts heartbeats up to a second ahead of the time that it has read. With half
        # a second, this process may be delayed for 1.4 s before the governor counts as lost, and a
        # thread of the program for 0.5 s between reading the time and reading the heartbeat.
        while not self._closing.wait(0.05):
            ahead = time.monotonic_ns() + 500_000_000
            pages.write(self.grant, 0, "grant_header", "heartbeat_ns", ahead)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            request = connection.recv(1)
            if request == layout.AGAIN:
                self._answer_again(connection)
                continue
            if request != layout.REGISTER:
                connection.close()
                continue
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            with self._lock:
                slot = next(i for i in range(layout.N_SLOTS) if i not in self._slots)
                pages.clear_slot(self.ledger, slot)
                pages.write(self.ledger, pages.slot_base(slot), "ledger_slot", "state", 1)
                ever = pages.read(self.ledger, 0, "ledger_header", "n_slots")
                pages.write(self.ledger, 0, "ledger_header", "n_slots", max(ever, slot + 1))
                self._slots[slot] = struct.unpack("3i", peer)[0]
                self._connections.append(connection)
            answer = struct.pack("I", slot)[: self.answer_size]
            with contextlib.suppress(OSError):  # the process may be gone
                socket.send_fds(connection, [answer], [self._ledger_fd, *self.more_fds(slot)])

    def more_fds(self, slot: int) -> list[int]:
        """Return the descriptors that the process of a slot gets in addition to the ledger."""
        del slot
        return []

    def _answer_again(self, connection: socket.socket) -> None:
        """Answer a process that has a slot already, as a restarted governor does."""
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid = struct.unpack("3i", peer)[0]
        with self._lock:
            slot = next((i for i, own in self._slots.items() if own == pid), layout.NO_SLOT)
            self._connections.append(connection)
        fds = [] if slot == layout.NO_SLOT else [self.given_fd or self._ledger_fd]
        socket.send_fds(connection, [struct.pack("I", slot)], fds)
        self.returned.append(pid)

    def hang_up(self) -> None:
        """Close the connections, as a killed governor does. Its successor is available immediately."""
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections.clear()

    def poked(self) -> int:
        """Return how many bytes processes have sent on their connections since the last call."""
        count = 0
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(BlockingIOError):
                    count += len(connection.recv(1 << 16, socket.MSG_DONTWAIT))
        return count

    def agent(self, *, context: bool = True, alone: bool = False, bare: bool = False) -> Agent:
        """Start a new process, initialised, and with a context unless `context` is false.

        With `alone`, the process finds no governor and has no slot. With `bare`, it has only loaded
        the library.
        """
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + HELPERS + AGENT, self.library, str(self.runtime)],
            env=os.environ | self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        agent = Agent(self, None, process)
        self.agents.append(agent)
        if bare:
            return agent
        agent.run("driver.call('cuInit', 0)")
        agent.slot = None if alone else self.slot_of(process.pid)
        if context:
            agent.run("context = driver.get('cuCtxCreate_v2', 0, 0)")
            self.sample()
        return agent

    def slot_of(self, pid: int) -> int:
        with self._lock:
            return next(slot for slot, owner in self._slots.items() if owner == pid)

    def ended(self, agent: Agent) -> None:
        self.agents.remove(agent)
        self.clear(agent.process.pid)

    def clear(self, pid: int) -> None:
        with self._lock:
            for slot in [slot for slot, owner in self._slots.items() if owner == pid]:
                pages.clear_slot(self.ledger, slot)
                del self._slots[slot]

    def seen(self, device: int = 0) -> dict[int, int]:
        """Return the bytes that a GPU reports for each process."""
        status = simgpu.status(self.gpus[device])
        return {process.pid: process.memory for process in status.processes}

    def write(self, field: str, value: int, device: int = 0) -> None:
        """Store a field of a GPU's part of the grant page."""
        pages.write(self.grant, layout.grant_device(device), "grant_device", field, value)

    def read(self, field: str, device: int = 0) -> int:
        """Read a field of a GPU's part of the grant page."""
        return pages.read(self.grant, layout.grant_device(device), "grant_device", field)

    def sample(self) -> int:
        """Do what the governor does four times a second, and return the overhead of the first GPU."""
        for device in range(len(self.gpus)):
            began = time.monotonic_ns()
            with self._lock:
                slots = dict(self._slots)
            # What is charged or given back while the GPU is read is attributed to the driver.
            before = {slot: self._charged(slot, device) for slot in slots}
            status = simgpu.status(self.gpus[device])
            seen = {process.pid: process.memory for process in status.processes}
            overhead = sum(
                max(0, seen.get(pid, 0) - min(before[slot], self._charged(slot, device)))
                for slot, pid in slots.items()
            )
            self.write("memory_overhead", overhead, device)
            self.write("overhead_last", overhead, device)
            unseen = sum(self._unseen(slot, device) for slot in slots)
            unattributed = status.used - sum(seen.values()) - unseen
            self.write("unattributed", unattributed % 2**64, device)
            self.write("unattributed_ns", began, device)
            self.write("reconciled_ns", began, device)
        return self.read("memory_overhead")

    def _charged(self, slot: int, device: int) -> int:
        base = layout.ledger_device(slot, device)
        memory = pages.read(self.ledger, base, "ledger_device", "memory")
        return memory - pages.read(self.ledger, base, "ledger_device", "unseen")

    def _unseen(self, slot: int, device: int) -> int:
        base = layout.ledger_device(slot, device)
        return pages.read(self.ledger, base, "ledger_device", "unseen")

    @contextlib.contextmanager
    def looking(self, interval: float = 0.005) -> Iterator[None]:
        """Reconcile continuously, as a governor would."""
        with repeating(self.sample, interval):
            yield

    def used(self, device: int = 0) -> int:
        """Return the bytes charged plus the driver's overhead, computed as `account_used` does."""
        reconciled = self.read("reconciled_ns", device)
        total = self.read("memory_overhead", device)
        for slot in range(pages.read(self.ledger, 0, "ledger_header", "n_slots")):
            base = layout.ledger_device(slot, device)
            total += pages.read(self.ledger, base, "ledger_device", "memory")
            if pages.read(self.ledger, base, "ledger_device", "provisional_ns") > reconciled:
                total += pages.read(self.ledger, base, "ledger_device", "provisional")
        return total

    @property
    def peak(self) -> int:
        return pages.read(self.ledger, 0, "ledger_header", "memory_peak", 0)

    def close(self) -> None:
        """Kill every process and close the socket."""
        self._closing.set()
        self._beating.join()
        for agent in list(self.agents):
            agent.kill()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for connection in self._connections:
            connection.close()
        os.close(self._ledger_fd)
        self.ledger.close()
        self.grant.close()
        self._runtime.cleanup()


@contextlib.contextmanager
def repeating(work: Callable[[], object], interval: float = 0.005) -> Iterator[None]:
    """Repeat `work` in a separate thread while the block runs."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(interval):
            work()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def compile_shim(source: Path, library: Path) -> None:
    """Build a shim that implements some functions and passes the others to the simulated driver next to it.

    The linker records the soname of the library that it links, so it is given an empty library with
    the intended soname.
    """
    need("gcc")
    empty = library.parent / "empty" / "libsimgpu.so"
    empty.parent.mkdir()
    shared = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror"]
    named = [*shared, "-x", "c", "/dev/null", "-o", str(empty), f"-Wl,-soname,{empty.name}"]
    subprocess.run(named, check=True)
    link = ["-Wl,--no-as-needed", str(empty), "-ldl", "-Wl,-rpath,$ORIGIN,-Bsymbolic"]
    subprocess.run([*shared, str(source), "-o", str(library), *link], check=True)


def need_namespaces() -> None:
    """Skip the test if a process cannot create a mount namespace."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE, "-", "/tmp"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        lack(f"needs a mount namespace: {done.stderr.splitlines()[-1]}")
