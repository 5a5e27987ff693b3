"""Call the simulated GPU's driver API from tests in Python, with errors as exceptions.

`SimulatedDriver` loads the built library into this process. `SimulatedDriver.attached` attaches it
to a directory of devices and detaches it afterwards, so that one process can run many tests.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MS = 1_000_000  # ns
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2  # CUstreamCaptureMode
LEGACY, PER_THREAD = 1, 2  # predefined streams
NON_BLOCKING = 1
DISABLE_TIMING = 2


class CudaError(Exception):
    """A call that did not return CUDA_SUCCESS; `code` is its CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.code = code
        self.name = name


def environment(build: Path, directory: Path) -> dict[str, str]:
    """Return an environment in which a program finds the built driver and these devices."""
    return os.environ | {
        "SIMGPU_DIR": str(directory),
        "LD_LIBRARY_PATH": str(build / "simgpu"),
        "PYTHONPATH": str(ROOT),
    }


def start_python(build: Path, directory: Path, program: str) -> subprocess.Popen[str]:
    """Start a process that runs `program` with a `driver` in scope.

    The standard input and output of the process are pipes.
    """
    prelude = (
        "from pathlib import Path\n"
        "from simgpu.testing import *\n"
        f"driver = SimulatedDriver(Path({str(build)!r}))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", prelude + program],
        env=environment(build, directory),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


class SimulatedDriver:
    """The libcuda from one build."""

    def __init__(self, build: Path) -> None:
        self.path = build / "simgpu" / "libcuda.so.1"
        self.library = ctypes.CDLL(str(self.path))

    def try_call(self, name: str, *arguments: object) -> int:
        """Call an entry point, passing integers as 64-bit values, and return the CUresult."""
        passed = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments]
        return int(getattr(self.library, name)(*passed))

    def error_name(self, code: int) -> str:
        """Return the name `CUDA_ERROR_...` of a code, as the driver spells it."""
        text = ctypes.c_char_p()
        self.library.cuGetErrorName(code, ctypes.byref(text))
        return (text.value or str(code).encode()).decode()

    def call(self, name: str, *arguments: object) -> None:
        """Call an entry point, and raise CudaError if it fails."""
        code = self.try_call(name, *arguments)
        if code:
            raise CudaError(name, code, self.error_name(code))

    def get(self, name: str, *arguments: object) -> int:
        """Call an entry point that stores a value at its first parameter, and return that value."""
        result = ctypes.c_uint64()
        self.call(name, ctypes.byref(result), *arguments)
        return result.value

    @contextmanager
    def attached(self, directory: Path) -> Iterator[SimulatedDriver]:
        """Initialise the driver on the devices in `directory` until the end of the block."""
        before = os.environ.get("SIMGPU_DIR")
        os.environ["SIMGPU_DIR"] = str(directory)
        try:
            self.call("cuInit", 0)
            yield self
        finally:
            self.try_call("simgpu_detach")
            os.environ.pop("SIMGPU_DIR")
            if before is not None:
                os.environ["SIMGPU_DIR"] = before

    def set_clock(self, now: int, device: int = 0) -> None:
        """Stop a device's clock, and move it to `now` (ns)."""
        self.call("simgpu_clock_set", device, now)

    def clock(self, device: int = 0) -> int:
        """Return the time on a device's clock, in ns."""
        now = ctypes.c_uint64()
        self.call("simgpu_clock_get", device, ctypes.byref(now))
        return now.value

    def context(self, device: int = 0) -> Context:
        """Create a context, which becomes current in the calling thread."""
        return Context(self, self.get("cuCtxCreate_v2", 0, device))

    def allocate(self, size: int) -> int:
        """Allocate device memory in the current context."""
        return self.get("cuMemAlloc_v2", size)

    def free_memory(self) -> int:
        """Return the free bytes that cuMemGetInfo reports for the current context's device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def read_words(self, address: int, n: int) -> list[int]:
        """Copy `n` u64 words of device memory to the host."""
        words = (ctypes.c_uint64 * n)()
        self.call("cuMemcpyDtoH_v2", words, address, 8 * n)
        return list(words)

    def event(self, flags: int = 0) -> int:
        """Create an event."""
        return self.get("cuEventCreate", flags)

    def stream(self, flags: int = NON_BLOCKING) -> int:
        """Create a stream in the current context."""
        return self.get("cuStreamCreate", flags)

    def elapsed(self, start: int, end: int) -> float:
        """Return the time between two events, in milliseconds."""
        milliseconds = ctypes.c_float()
        self.call("cuEventElapsedTime", ctypes.byref(milliseconds), start, end)
        return milliseconds.value


class Context:
    """A context, with two of the kernels that every simulated GPU has."""

    def __init__(self, driver: SimulatedDriver, handle: int) -> None:
        self.driver = driver
        self.handle = handle
        module = driver.get("cuModuleLoadData", ctypes.c_char_p(b"any image"))
        self.burner = driver.get("cuModuleGetFunction", module, ctypes.c_char_p(b"burn"))
        self.stamper = driver.get("cuModuleGetFunction", module, ctypes.c_char_p(b"burn_stamp"))

    def make_current(self) -> None:
        """Make this context current in the calling thread."""
        self.driver.call("cuCtxSetCurrent", self.handle)

    def burn(self, duration: int, *, stamp: int | None = None, stream: int = 0) -> None:
        """Launch a kernel of `duration` ns; with `stamp`, it writes its end time there."""
        code = self.try_burn(duration, stamp=stamp, stream=stream)
        if code:
            raise CudaError("cuLaunchKernel", code, self.driver.error_name(code))

    def try_burn(self, duration: int, *, stamp: int | None = None, stream: int = 0) -> int:
        """Launch as `burn` does, and return the CUresult."""
        self.make_current()
        words = [ctypes.c_uint64(duration), ctypes.c_uint64(stamp or 0)]
        parameters = (ctypes.c_void_p * 2)(*[ctypes.addressof(word) for word in words])
        function = self.burner if stamp is None else self.stamper
        return self.driver.try_call(
            "cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, None
        )

    def synchronize(self) -> None:
        """Wait for all work in this context; a virtual clock advances to the end of the work."""
        self.make_current()
        self.driver.call("cuCtxSynchronize")
