"""`python -m bench.nvml_cost LIBRARY UUID ROUNDS`: measures the cost of an NVML sample of a GPU.

It prints a line of JSON: how many processes NVML listed, how often NVML did not answer, and the
times of each round in microseconds. `utilisation` is nvmlDeviceGetProcessUtilization, `list` is
nvmlDeviceGetComputeRunningProcesses, and `samples` is both. `look` is everything that the governor
reads in one sample: the memory, three lists of processes, the memory again, and the utilisation of
processes.
"""

from __future__ import annotations

import json
import sys
import time

from vdriver.errors import NvmlError
from vdriver.nvml import Nvml

PAUSE_S = 0.02
SINCE_US = 1_000_000


def ask_use(nvml: Nvml, uuid: str, since_us: int) -> bool:
    """Ask for the utilisation of processes, and return whether there was an answer.

    NVML may fail if the driver adds utilisation samples while NVML is counting them.
    """
    try:
        nvml.utilisation(uuid, since_us)
    except NvmlError:
        return False
    return True


def main() -> int:
    path, uuid, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    us: dict[str, list[float]] = {"utilisation": [], "list": [], "samples": [], "look": []}
    n = n_failed = 0
    with Nvml(path) as nvml:
        import pynvml

        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        for _ in range(rounds):
            time.sleep(PAUSE_S)
            since_us = time.time_ns() // 1000 - SINCE_US
            begin = time.perf_counter_ns()
            n_failed += not ask_use(nvml, uuid, since_us)
            between = time.perf_counter_ns()
            n = max(n, len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)))
            end = time.perf_counter_ns()
            nvml.memory_used(uuid)
            nvml.processes(uuid)
            nvml.memory_used(uuid)
            n_failed += not ask_use(nvml, uuid, since_us)
            last = time.perf_counter_ns()
            us["utilisation"].append((between - begin) / 1000)
            us["list"].append((end - between) / 1000)
            us["samples"].append((end - begin) / 1000)
            us["look"].append((last - end) / 1000)
    rounded = {name: [round(one, 1) for one in taken] for name, taken in us.items()}
    print(json.dumps({"processes": n, "failed": n_failed, "us": rounded}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
