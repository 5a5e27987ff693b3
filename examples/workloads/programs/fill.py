"""Allocates memory with PyTorch until the quota is used up, frees it, and repeats that."""

from __future__ import annotations

import torch
from driver_api import MIB
from program import ProgramCheck

SEGMENT = 64 * MIB
CONTEXT = 520 * MIB
"""Approximate size of a context; without a quota, PyTorch's own cap is lower by this much."""


def fill(limit: int) -> list[torch.Tensor]:
    """Allocate blocks until memory is used up, or until too many (`limit` bytes) are held."""
    held: list[torch.Tensor] = []
    try:
        while len(held) * SEGMENT < limit:
            held.append(torch.empty(SEGMENT, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        pass
    return held


def fill_twice(program: ProgramCheck, slack: int) -> None:
    """Check that two fills take no more than the quota, and leave less than `slack` bytes of it."""
    _, total = torch.cuda.mem_get_info()
    cap = program.quota - CONTEXT
    if program.governed:
        program.check("total memory is as expected", total == program.quota, total)
    else:
        program.check("total memory is as expected", total > program.quota, total)
        torch.cuda.set_per_process_memory_fraction(cap / total)
    counts = []
    for _ in range(2):
        held = fill(2 * program.quota)
        counts.append(len(held))
        reserved = torch.cuda.memory_reserved()
        left = torch.cuda.mem_get_info()[0] if program.governed else cap - reserved
        program.check("no more than the quota is taken", reserved <= program.quota, reserved)
        program.check("all but a segment of the quota is taken", left < slack, left)
        if held:
            held.pop()
            held[0].fill_(3)
            # Only a part is summed: for the whole block, a copy eight times as large would be made.
            found = held[0][-4096:].sum(dtype=torch.int64).item()
            program.check("what was taken can be used", found == 3 * 4096, found)
        held.clear()
        torch.cuda.empty_cache()
    program.check("the second fill gets as much", abs(counts[0] - counts[1]) <= 1, counts)
    program.note("segments", counts)
    torch.manual_seed(6)
    a = torch.randn(1024, 1024).cuda()
    program.value("a product afterwards", (a @ a).abs().mean().item(), 1e-2)
    program.launches = 4
