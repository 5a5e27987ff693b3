"""Calls to libcuda through ctypes, with errors as exceptions, and the PTX for two kernels.

`burn` keeps the GPU busy for a given time, `add_one` increments each word of an array. The
simulated GPU computes nothing: it recognises `burn` by its name, but not `add_one`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

MIB = 1 << 20

BURN_PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry burn(.param .u64 duration, .param .u64 unused)
{
    .reg .u64 %begin, %now, %wanted;
    .reg .pred %more;
    ld.param.u64 %wanted, [duration];
    mov.u64 %begin, %globaltimer;
AGAIN:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %begin;
    setp.lt.u64 %more, %now, %wanted;
    @%more bra AGAIN;
    ret;
}
.visible .entry add_one(.param .u64 words, .param .u64 count)
{
    .reg .u64 %address, %n, %i, %offset;
    .reg .u32 %block, %size, %thread, %index, %word;
    .reg .pred %beyond;
    ld.param.u64 %address, [words];
    ld.param.u64 %n, [count];
    mov.u32 %block, %ctaid.x;
    mov.u32 %size, %ntid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.u32 %index, %block, %size, %thread;
    cvt.u64.u32 %i, %index;
    setp.ge.u64 %beyond, %i, %n;
    @%beyond ret;
    shl.b64 %offset, %i, 2;
    add.u64 %address, %address, %offset;
    ld.global.u32 %word, [%address];
    add.u32 %word, %word, 1;
    st.global.u32 [%address], %word;
    ret;
}
"""


class CallError(Exception):
    """A call did not return CUDA_SUCCESS; `code` is its CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.code = code
        self.name = name


class DlInfo(ctypes.Structure):
    """Dl_info, which dladdr(3) fills in."""

    _fields_ = (
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    )


class AddressPlace(NamedTuple):
    """The file that an address belongs to, and the symbol if the address is its start."""

    file: str
    symbol: str


_libc = ctypes.CDLL(None)
_dladdr = _libc.dladdr if hasattr(_libc, "dladdr") else ctypes.CDLL("libdl.so.2").dladdr
_dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(DlInfo)]


def place_of(address: int) -> AddressPlace:
    """Return the library and the symbol of an address."""
    info = DlInfo()
    if not _dladdr(address, ctypes.byref(info)):
        return AddressPlace("", "")
    name = info.dli_sname.decode() if info.dli_sname and info.dli_saddr == address else ""
    return AddressPlace(str(Path(info.dli_fname.decode()).resolve()), name)


def address_of(library: ctypes.CDLL, name: str) -> int:
    """Return the address that dlsym finds for a function; 0 if it finds none."""
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    except AttributeError:
        return 0


class Cuda:
    """The driver's library, opened by name as any program opens it."""

    def __init__(self, name: str = "libcuda.so.1", mode: int = ctypes.DEFAULT_MODE) -> None:
        self.library = ctypes.CDLL(name, mode)

    def attempt(self, name: str, *arguments: Any) -> int:
        """Call a function, with integers passed as 64 bits; return its CUresult."""
        passed = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments]
        return int(getattr(self.library, name)(*passed))

    def error_name(self, code: int) -> str:
        """Return the driver's name for a CUresult, such as CUDA_ERROR_OUT_OF_MEMORY."""
        text = ctypes.c_char_p()
        self.library.cuGetErrorName(code, ctypes.byref(text))
        return (text.value or str(code).encode()).decode()

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function, and raise CallError if it fails."""
        code = self.attempt(name, *arguments)
        if code:
            raise CallError(name, code, self.error_name(code))

    def get(self, name: str, *arguments: Any) -> int:
        """Call a function that writes its result to its first parameter; return the result."""
        result = ctypes.c_uint64()
        self.call(name, ctypes.byref(result), *arguments)
        return result.value

    def start(self) -> None:
        """Initialise, make the first GPU's primary context current, and load the kernels."""
        self.call("cuInit", 0)
        self.context = self.get("cuDevicePrimaryCtxRetain", self.get("cuDeviceGet", 0))
        self.call("cuCtxSetCurrent", self.context)
        self.load()

    def load(self) -> None:
        """Load the kernels into the current context."""
        self.module = self.get("cuModuleLoadData", ctypes.c_char_p(BURN_PTX))
        self.burner = self.function("burn")

    def function(self, name: str) -> int:
        """Return the handle of a kernel."""
        return self.get("cuModuleGetFunction", self.module, ctypes.c_char_p(name.encode()))

    def launch(
        self,
        kernel: int,
        first: int,
        second: int,
        *,
        blocks: int = 1,
        threads: int = 1,
        stream: int = 0,
    ) -> None:
        """Launch a kernel that takes two 64-bit parameters."""
        words = [ctypes.c_uint64(first), ctypes.c_uint64(second)]
        parameters = (ctypes.c_void_p * 2)(*[ctypes.addressof(word) for word in words])
        self.call(
            "cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, None
        )  # fmt: skip

    def burn(self, nanoseconds: int, stream: int = 0) -> None:
        """Keep the GPU busy for this many nanoseconds."""
        self.launch(self.burner, nanoseconds, 0, stream=stream)

    def add_one(self, address: int, count: int) -> int:
        """Add one to each word of an array; its length is a multiple of 256.

        Return the number that was added: 1, or 0 on the simulated GPU, which only spends the time.
        """
        function = ctypes.c_uint64()
        name = ctypes.c_char_p(b"add_one")
        if self.attempt("cuModuleGetFunction", ctypes.byref(function), self.module, name):
            self.burn(100_000)
            return 0
        self.launch(function.value, address, count, blocks=count // 256, threads=256)
        return 1

    def memory(self) -> tuple[int, int]:
        """Return the free and the total memory that cuMemGetInfo reports, in bytes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def total_memory(self) -> int:
        """Return the memory that cuDeviceTotalMem reports, in bytes; needs no context."""
        self.call("cuInit", 0)
        return self.get("cuDeviceTotalMem_v2", self.get("cuDeviceGet", 0))

    def words(self, address: int, count: int) -> list[int]:
        """Copy 32-bit words of device memory to the host, and return them."""
        words = (ctypes.c_uint32 * count)()
        self.call("cuMemcpyDtoH_v2", words, address, 4 * count)
        return list(words)
