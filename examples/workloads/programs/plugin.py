#!/usr/bin/env python3
"""Tests a custom allocator in PyTorch: a C library, for all tensors and for one pool.

Engines that move memory themselves give PyTorch such a library. This one calls the driver.
"""

from __future__ import annotations

import ctypes
import gc
import json
import shutil
import subprocess
import sys
import tempfile

import torch
from driver_api import MIB
from program import NotHereError, ProgramCheck, child_environment, run

SOURCE = r"""
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

static int (*current)(void **), (*set)(void *), (*retain)(void **, int), (*sync)(void *);
static int (*allocate)(uint64_t *, size_t), (*release)(uint64_t);
static long counts[3]; /* blocks allocated, blocks freed, bytes held */

static void find(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);

    *(void **)&current = dlsym(library, "cuCtxGetCurrent");
    *(void **)&set = dlsym(library, "cuCtxSetCurrent");
    *(void **)&retain = dlsym(library, "cuDevicePrimaryCtxRetain");
    *(void **)&sync = dlsym(library, "cuStreamSynchronize");
    *(void **)&release = dlsym(library, "cuMemFree_v2");
    *(void **)&allocate = dlsym(library, "cuMemAlloc_v2");
}

void *plugin_alloc(size_t size, int device, void *stream)
{
    void *context = NULL;
    uint64_t address;

    if (!allocate)
        find();
    if (current(&context) || (!context && (retain(&context, device) || set(context))))
        return NULL;
    if (allocate(&address, size))
        return NULL;
    __atomic_add_fetch(&counts[0], 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&counts[2], (long)size, __ATOMIC_RELAXED);
    return (void *)address;
}

void plugin_free(void *block, size_t size, int device, void *stream)
{
    sync(stream);
    if (release((uint64_t)block))
        return;
    __atomic_add_fetch(&counts[1], 1, __ATOMIC_RELAXED);
    __atomic_sub_fetch(&counts[2], (long)size, __ATOMIC_RELAXED);
}

long plugin_count(int which)
{
    return __atomic_load_n(&counts[which], __ATOMIC_RELAXED);
}
"""

ROUNDS = 30


def compile_library(directory: str) -> str:
    """Compile the allocator, and return its path."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        raise NotHereError("there is no C compiler for the allocator")
    path = f"{directory}/plugin.so"
    done = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", path, "-x", "c", "-", "-ldl"],
        input=SOURCE,
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise NotHereError(f"the C compiler fails: {(done.stderr.strip() or '?').splitlines()[-1]}")
    return path


class Plugin:
    """The library: PyTorch's allocator, and its counters."""

    def __init__(self, path: str) -> None:
        self.allocator = torch.cuda.memory.CUDAPluggableAllocator(
            path, "plugin_alloc", "plugin_free"
        )
        self.library = ctypes.CDLL(path)
        self.library.plugin_count.restype = ctypes.c_long
        self.library.plugin_alloc.restype = ctypes.c_void_p
        self.library.plugin_alloc.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]

    def counts(self) -> list[int]:
        """Return the blocks allocated, the blocks freed, and the bytes held."""
        return [self.library.plugin_count(i) for i in range(3)]


def work() -> list[float]:
    """Allocate and free tensors of many sizes, and return results of each round."""
    torch.manual_seed(14)
    kept: list[torch.Tensor] = []
    found = []
    for i in range(ROUNDS):
        a = torch.randn(64 + 37 * i, 256).cuda()
        kept.append((a @ a.t()).softmax(1))
        if len(kept) > 4:
            kept.pop(i % 4)
        found.append(sum(one.square().sum().item() for one in kept))
    return found


def replace_all(path: str) -> dict[str, object]:
    """Use the library for all tensors of this process."""
    plugin = Plugin(path)
    torch.cuda.memory.change_current_allocator(plugin.allocator)
    found = work()
    x = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    held = plugin.counts()[2]
    del x
    gc.collect()
    return {"found": found, "counts": plugin.counts(), "returned": held - plugin.counts()[2]}


def body(program: ProgramCheck) -> None:
    directory = program.until_end.enter_context(tempfile.TemporaryDirectory())
    path = compile_library(directory)
    command = [sys.executable, __file__, "replace", path]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=90, env=child_environment()
    )
    program.check(
        "a process that uses only this allocator succeeds", not done.returncode, done.stderr
    )
    whole = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    plain = work()
    program.check("it gives PyTorch's results", is_near(plain, whole.get("found", [])), whole)
    allocated, freed, _ = whole.get("counts", [0, 0, 0])
    program.check("it allocated all tensors, and freed most", allocated >= freed > ROUNDS, whole)
    program.check("a freed tensor is returned at once", whole.get("returned") == 64 * MIB, whole)

    plugin = Plugin(path)
    pool = torch.cuda.MemPool(plugin.allocator.allocator())
    with torch.cuda.use_mem_pool(pool):
        found = work()
        x = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    program.check("a pool of this allocator gives the same", is_near(plain, found), found)
    program.check(
        "the pool consists of the allocator's memory",
        plugin.counts()[2] >= 64 * MIB,
        plugin.counts(),
    )
    program.value("results", found, 1e-2)
    total = torch.cuda.mem_get_info()[1]
    refused = plugin.library.plugin_alloc(total, 0, None)
    program.check("it gets no more than there is", refused is None, refused)
    program.value("a sum in the pool", x.sum(dtype=torch.int64).item(), 0)
    del x, pool
    gc.collect()
    torch.cuda.empty_cache()
    program.note("blocks allocated and freed, bytes held", plugin.counts())
    program.note("versions", f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}")
    program.launches = 4 * ROUNDS


def is_near(wanted: list[float], found: list[float]) -> bool:
    """Return whether two lists of results agree."""
    return len(wanted) == len(found) and all(
        abs(a - b) <= 1e-3 * abs(a) for a, b in zip(wanted, found, strict=True)
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["replace"]:
        print(json.dumps(replace_all(sys.argv[2])), flush=True)
    else:
        run(body)
