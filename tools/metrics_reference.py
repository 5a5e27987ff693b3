"""Generates docs/reference/metrics.md from the descriptions of the metrics in governor/metrics.py.

`python tools/metrics_reference.py` writes the page; `--check` fails if it is stale.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from governor.httpd import MAX_CONNECTIONS, REQUEST_S  # noqa: E402
from governor.metrics import (  # noqa: E402
    CLAIM_METRICS,
    CONTAINER_METRICS,
    GPU_METRICS,
    NODE_METRICS,
    SAME_S,
    Described,
)
from tools.generated import write_or_check  # noqa: E402

PAGE = ROOT / "docs/reference/metrics.md"

HEAD = f"""\
<!-- Written by `python tools/metrics_reference.py` from governor/metrics.py. -->

# Metrics

The governor serves metrics for Prometheus at the address that `metrics.listen` specifies
([configuration](configuration.md)): none (`off`, the default), a socket (`unix`), or a port on one
of this machine's loopback addresses. `GET /metrics` answers in Prometheus's text format or in
OpenMetrics, compressed with gzip if the client accepts it. There is no authentication and no TLS,
so only the socket and loopback addresses can be configured. `curl --unix-socket
/run/tidegate/metrics.sock http://tidegate/metrics` shows the metrics.

A connection serves one request and ends after {REQUEST_S:g} s; at most {MAX_CONNECTIONS} are
served at a time. Scrapes within {SAME_S:g} s of each other get the same numbers.

Series with a `container` label end with the container; until then its counters never decrease, even
if a process ends. Sums over containers do not include those that have ended: for a GPU's totals or
the node's, use the series without that label, which keep counting until the governor stops. `gpu`
is the GPU's UUID, `index` its number on the node, and `container` the id that the runtime uses. In
Kubernetes, `namespace` and `pod` name the container's pod, and `claim` (NAMESPACE/NAME) the claim
that its quota comes from; otherwise they are empty. Containers that use the same shares of a claim
have one series, under the id of the one that came first.

A wait for a grant begins when the governor sees that a container wants the GPU, and ends with the
container's grant, by the governor's clock. On a GPU that is steered (`tidegate_gpu_steered`) no
waits are recorded, because work waits on the GPU, where it cannot be observed.

Numbers that a container counts itself (launches, waits, refused allocations, the peak, and what is
parked and moved) can be falsified by its programs. GPU time, what NVML reports, and violations are
observed by the governor itself.

Memory that is [parked](../howto/overbook.md) counts as used, because it counts against the quota.
What a container has on the GPU is its memory in use less what is parked.

The words mean what the [glossary](../glossary.md#the-words-for-numbers) says, and the numbers are
those in `tidegate inspect` and on [the page](../howto/see-what-happens.md#the-page).

Under `timeslice`, the hand-over is the time held less the time used. Under `mps`, a container's
work may continue alongside that of the next container and is charged although its grant is over, so
the time used may exceed the time held. On such GPUs, look at the time used and at the hand-over
separately.
"""

TAIL = """
## Example queries

```promql
# The fraction of a GPU that containers use, and the fraction that hand-overs cost
rate(tidegate_gpu_charged_seconds_total[5m])
rate(tidegate_gpu_handover_seconds_total[5m])

# The average cost of a hand-over, in seconds
rate(tidegate_gpu_handover_seconds_total[5m]) / rate(tidegate_gpu_grants_total[5m])

# Containers that are using less than 90 % of their guarantee although they are waiting
rate(tidegate_container_charged_seconds_total[5m])
    < 0.9 * tidegate_container_compute_guarantee_ratio
  and rate(tidegate_container_wait_seconds_total[5m]) > 0

# The time within which 99 % of a container's waits for a grant ended, in seconds
histogram_quantile(0.99, rate(tidegate_container_grant_wait_seconds_bucket[5m]))

# Containers near their memory quota
tidegate_container_memory_used_bytes / tidegate_container_memory_limit_bytes > 0.95

# The memory granted on each GPU, as a multiple of its own memory
tidegate_gpu_memory_granted_bytes / tidegate_gpu_memory_bytes

# Containers whose calls wait for parked memory for more than a quarter of the time
rate(tidegate_container_away_seconds_total[5m]) > 0.25

# Containers that are bypassing their quota at this moment: see docs/howto/violations.md
tidegate_container_violation == 1
```
"""


def rows(metrics: tuple[Described, ...]) -> list[str]:
    """Return a table of metrics."""
    lines = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "none"
        lines.append(f"| `{metric.shown}` | {metric.kind} | {labels} | {metric.doc} |")
    return lines


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for title, metrics in (
        ("The node", NODE_METRICS),
        ("Each GPU", GPU_METRICS),
        ("Each container", CONTAINER_METRICS),
        ("Each claim", CLAIM_METRICS),
    ):
        parts.append(f"\n## {title}\n\n" + "\n".join(rows(metrics)) + "\n")
    return "".join(parts) + TAIL


if __name__ == "__main__":
    sys.exit(write_or_check({PAGE: page()}, "tools/metrics_reference.py"))
