#!/usr/bin/env python3
"""Tests every way to find a function of the driver: the library's names, dlsym, cuGetProcAddress.

All ways have to lead to one library. If that is the control library, no way may bypass it: a
function that it exports must never be found in the driver behind it.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

from driver_api import MIB, AddressPlace, Cuda, address_of, place_of
from program import ProgramCheck, child_environment, run

RTLD_DEEPBIND = 8

GOVERNED = (
    "cuInit", "cuGetProcAddress", "cuCtxCreate", "cuCtxDestroy", "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem", "cuMemGetInfo", "cuMemAlloc", "cuMemAllocPitch", "cuMemAllocManaged",
    "cuMemFree", "cuMemAllocAsync", "cuMemFreeAsync", "cuLaunchKernel", "cuLaunchKernelEx",
    "cuLaunchCooperativeKernel", "cuGraphLaunch", "cuStreamDestroy",
)  # fmt: skip
"""Functions that have to be found in the control library in any case."""

OTHERS = (
    "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetUuid", "cuCtxGetDevice", "cuCtxSynchronize",
    "cuMemAllocFromPoolAsync", "cuMemCreate", "cuMemcpyDtoHAsync", "cuMemsetD32Async",
    "cuStreamCreate", "cuStreamSynchronize", "cuEventRecord", "cuModuleLoadData",
    "cuLibraryLoadData", "cuGreenCtxCreate", "cuNoSuchFunction",
)  # fmt: skip

VERSIONS = (11030, 12000, 13000)
FLAGS = (0, 1, 2)  # default, legacy stream, per-thread default stream

SHOW = (
    "import ctypes, json, sys; sys.path.insert(0, sys.argv[1])\n"
    "from driver_api import *\n"
    "cuda = Cuda()\n"
    "print(json.dumps([place_of(address_of(cuda.library, 'cuInit')).file, cuda.total_memory()]))"
)


def names_of_the_library(program: ProgramCheck, first: Cuda, home: str) -> None:
    """Check that each name of the library, in every mode, opens the same library as `first`."""
    wanted = address_of(first.library, "cuInit")
    modes = {
        "local": os.RTLD_LOCAL | os.RTLD_NOW,
        "global": os.RTLD_GLOBAL | os.RTLD_LAZY,
        "deepbind": os.RTLD_LOCAL | os.RTLD_NOW | RTLD_DEEPBIND,
    }
    for name, (mode, flags) in product(("libcuda.so.1", "libcuda.so", home), modes.items()):
        label = "its full path" if name == home else name
        try:
            found = address_of(ctypes.CDLL(name, flags), "cuInit")
        except OSError as e:
            program.check(f"{label} opens, {mode}", False, e)
            continue
        program.check(f"{label} opens, {mode}", found == wanted, place_of(found))


def look_up(query: int, name: str, version: int, flags: int) -> tuple[int, int]:
    """Call a cuGetProcAddress with five parameters; return its result and the address."""
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int,
        ctypes.c_uint64, ctypes.POINTER(ctypes.c_int),
    )  # fmt: skip
    found, status = ctypes.c_void_p(), ctypes.c_int()
    code = kind(query)(name.encode(), ctypes.byref(found), version, flags, ctypes.byref(status))
    return code, found.value or 0


def look_up_old(query: int, name: str, version: int, flags: int) -> tuple[int, int]:
    """Call the first version of cuGetProcAddress, which has four parameters."""
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        ctypes.c_uint64,
    )
    found = ctypes.c_void_p()
    code = kind(query)(name.encode(), ctypes.byref(found), version, flags)
    return code, found.value or 0


def bypasses(cuda: Cuda, home: str, place: AddressPlace) -> bool:
    """Return whether a function was found elsewhere although the library `home` exports it."""
    if place.file == home or not place.symbol:
        return False
    return place_of(address_of(cuda.library, place.symbol)).file == home


def lookups(program: ProgramCheck, cuda: Cuda, home: str) -> None:
    """Look up each name with each version and flag, in three ways."""
    new = address_of(cuda.library, "cuGetProcAddress_v2")
    old = address_of(cuda.library, "cuGetProcAddress")
    _, again = look_up(new, "cuGetProcAddress", 12000, 0)
    program.check("cuGetProcAddress finds itself", place_of(again).file == home, place_of(again))
    nothing, past, elsewhere, found = [], [], [], 0
    for name, version, flags in product((*GOVERNED, *OTHERS), VERSIONS, FLAGS):
        ways = {
            "new": look_up(new, name, version, flags),
            "itself": look_up(again, name, version, flags),
            "old": look_up_old(old, name, version, flags),
        }
        for way, (code, address) in ways.items():
            label = f"{name} {version} {flags} {way}"
            if code or not address:
                nothing.append(f"{label}: {cuda.error_name(code)}{' found' if address else ''}")
            if not address:
                continue
            found += 1
            place = place_of(address)
            if bypasses(cuda, home, place):
                past.append(f"{label} leads to {place}")
            if name in GOVERNED and place.file != home:
                elsewhere.append(f"{label} leads to {place}")
    program.check("no function of the library is bypassed", not past, past[:8])
    program.check("what must be governed is in the library", not elsewhere, elsewhere[:8])
    program.value("look-ups that find nothing", nothing)
    program.value("look-ups that find something", found, 0)


def by_dlsym(program: ProgramCheck, cuda: Cuda, home: str) -> None:
    """Look up the exported names with dlsym."""
    places = {name: place_of(address_of(cuda.library, name)) for name in EXPORTED}
    lost = {name: place for name, place in places.items() if place.file != home}
    program.check("dlsym finds the governed functions in the library", not lost, lost)
    behind = place_of(address_of(cuda.library, "cuDeviceGetName"))
    program.check("dlsym finds the others", bool(behind.file), behind)
    program.note("the others are in", behind.file)


EXPORTED = (
    "cuInit", "cuGetProcAddress", "cuGetProcAddress_v2", "cuMemAlloc_v2", "cuMemFree_v2",
    "cuMemGetInfo_v2", "cuDeviceTotalMem_v2", "cuLaunchKernel", "cuLaunchKernel_ptsz",
    "cuLaunchKernelEx", "cuGraphLaunch", "cuCtxCreate_v2", "cuDevicePrimaryCtxRetain",
)  # fmt: skip


def show_child(command: list[str], **more: str) -> tuple[str, int] | str:
    """Run a child that prints the library of its cuInit and the GPU's memory.

    Return these two, or the text of its failure.
    """
    done = subprocess.run(
        command,
        env=child_environment(**more),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if done.returncode:
        return done.stderr or f"status {done.returncode}"
    file, total = json.loads(done.stdout)
    return str(Path(file).resolve()), total


def by_search_path(program: ProgramCheck, wanted: tuple[str, int]) -> None:
    """Set LD_LIBRARY_PATH to the library's directory and to directories around it."""
    directory = Path(wanted[0]).parent
    parts = directory.parts
    above = Path(*parts[: parts.index("glibc-hwcaps")]) if "glibc-hwcaps" in parts else directory
    before = os.environ.get("LD_LIBRARY_PATH")
    for where in dict.fromkeys((directory, above, directory / "origin")):
        found = show_child(
            [sys.executable, "-c", SHOW, str(Path(__file__).parent)],
            LD_LIBRARY_PATH=f"{where}:{before}" if before else str(where),
        )
        program.check("LD_LIBRARY_PATH leads to the same library", found == wanted, (where, found))


def body(program: ProgramCheck) -> None:
    cuda = Cuda()
    home = place_of(address_of(cuda.library, "cuInit")).file
    program.note("library", home)
    cuda.start()
    names_of_the_library(program, cuda, home)
    by_dlsym(program, cuda, home)
    lookups(program, cuda, home)
    total = cuda.total_memory()
    by_search_path(program, (home, total))
    linked = program.tool("linked")
    if linked:
        found = show_child([str(linked)])
        program.check(
            "a program with an RPATH finds the same library", found == (home, total), found
        )
    program.check(
        "total memory equals the quota", not program.governed or total == program.quota, total
    )
    program.check("cuMemGetInfo agrees", cuda.memory()[1] == total, cuda.memory())
    # Calls through the pointers that were looked up.
    query = address_of(cuda.library, "cuGetProcAddress_v2")
    _, allocate = look_up(query, "cuMemAlloc", 12000, 0)
    free, _ = cuda.memory()
    block = ctypes.c_uint64()
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t)
    code = kind(allocate)(ctypes.byref(block), 64 * MIB)
    program.check("a pointer that was looked up allocates", code == 0, cuda.error_name(code))
    program.check("and its memory is counted", free - cuda.memory()[0] >= 64 * MIB, cuda.memory())
    for _ in range(10):
        cuda.burn(200_000)
    cuda.call("cuCtxSynchronize")
    cuda.call("cuMemFree_v2", block.value)
    program.launches = 10


if __name__ == "__main__":
    run(body)
