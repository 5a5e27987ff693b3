#!/usr/bin/env python3
"""Starts like a serving engine: sizes its cache by the free memory, and fills all of it.

It is not one of the compared programs: `tests.gpu.starts` runs it. It prints a line of JSON; an
error, such as torch.OutOfMemoryError, ends it with status 1.
"""

from __future__ import annotations

import json

import torch
from kvcache import load, make_cache, profile


def main() -> None:
    """Start once."""
    weights = load()
    cache = make_cache(weights)
    for pages in cache:
        for one in pages:
            one.fill_(1)
    profile(weights)
    stats = torch.cuda.memory_stats()
    failed = stats.get("num_ooms", 0) + stats.get("num_alloc_retries", 0)
    free, total = torch.cuda.mem_get_info()
    blocks = int(cache[0][0].shape[0])
    print(json.dumps({"blocks": blocks, "failed": failed, "free": free, "total": total}))


if __name__ == "__main__":
    main()
