"""docs/reference/metrics.md from the description of the metrics in governor/metrics.py.

`python tools/metrics_reference.py` writes the page; `--check` fails if it is stale.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from governor.httpd import MOST_CONNECTIONS, REQUEST_S  # noqa: E402
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

The governor serves metrics for Prometheus where `metrics.listen` says
([configuration](configuration.md)): `off` by default, `unix` for a socket, or a port of this
machine. `GET /metrics` answers in Prometheus's text format or in OpenMetrics, gzipped where that is
asked for. There is neither a password nor TLS, so nothing but the socket and this machine's own
addresses is accepted. `curl --unix-socket /run/tidegate/metrics.sock http://tidegate/metrics` shows
them.

A connection is for one request and ends after {REQUEST_S:g} s; {MOST_CONNECTIONS} are served at a
time. Scrapes within {SAME_S:g} s of each other get the same numbers.

Series with a `container` label end with the container; until then they do not go back, whichever of
its processes end. Sums over containers lose what ended: for a GPU or the node take the series
without that label, which count on from the governor's start. `gpu` is the GPU's UUID, `index` its
number on the node, `container` the id that the runtime gave. Under Kubernetes `namespace` and `pod`
name its pod, and `claim` (NAMESPACE/NAME) the claim that its quota comes from; elsewhere they are
empty. Containers that use the same shares of a claim are one series, by the one that came first.

A wait for a grant begins when the governor sees that a container wants the GPU and ends with its
grant, by the governor's clock. On a GPU that is steered (`tidegate_gpu_steered`) there are none:
work waits on the GPU, where nothing counts it.

What a container counts itself (launches, waits, refused allocations, peak) is as true as its
program is honest. GPU time, what NVML sees and violations are the governor's own.

The words mean what the [glossary](../glossary.md#the-words-for-numbers) says, and the numbers are
those of `tidegate inspect` and of [the page](../howto/see-what-happens.md#the-page).

Under `timeslice` the hand-over is what was held less what was charged. Under `mps` a container's
work runs on beside the next one's, and is charged although its grant is over: charged may be more
than held. There look at what is charged, and at `handover` by itself.
"""

TAIL = """
## Questions

```promql
# Part of a GPU that containers get, and what is lost to hand-overs
rate(tidegate_gpu_charged_seconds_total[5m])
rate(tidegate_gpu_handover_seconds_total[5m])

# What a hand-over costs on average, seconds
rate(tidegate_gpu_handover_seconds_total[5m]) / rate(tidegate_gpu_grants_total[5m])

# Containers that get less than 90 % of their guarantee although they wait
rate(tidegate_container_charged_seconds_total[5m])
    < 0.9 * tidegate_container_compute_guarantee_ratio
  and rate(tidegate_container_wait_seconds_total[5m]) > 0

# How long 99 % of a container's waits for a grant were at most, seconds
histogram_quantile(0.99, rate(tidegate_container_grant_wait_seconds_bucket[5m]))

# Containers near their memory quota
tidegate_container_memory_used_bytes / tidegate_container_memory_limit_bytes > 0.95

# Containers that go around their quota now: see docs/howto/violations.md
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
