"""Contains the explanations in docs/benchmarks.md; the figures come from bench/results."""

from __future__ import annotations

HEAD = """\
<!-- Written by `python -m bench.report_docs` from bench/results/*.json. Do not edit. -->

# Benchmarks

Every figure on this page comes from a file in `bench/results`, which has the raw data, the
command, the commit and the machine. `python -m bench.run --suite NAME --from DIR` makes such a
file from the output of a run (`python -m bench.demo`, `bench.quota`, ...) in DIR.
`python -m bench.report_docs` makes this page from the files.
"""


SHARES = """\
## Delivered shares

Each job stamps the end of every unit of its work (at most 2 ms) with the GPU's clock. A run of the
job alone shows how long a unit takes. In a run alongside other jobs, each finished unit counts
for that time.

The delivered share is this progress divided by the time that passed. Neither the governor's own
accounting nor the driver's utilisation figure is used. The error is the mean distance between
delivered share and quota over all windows, averaged over the containers, in percentage points.

A job that reaches the GPU's power limit when it runs alone runs faster if it has the GPU for only
part of the time. On an H200, a GEMM with a cap of 45 % and no other container alongside it gets
45 % of the time and completes 50.7 % of the work that it completes alone. It is shown with more
than its quota, which is not an error.
"""


MIRROR = """\
## The mirror of a driver

`python -m bench.mirror` does the following. Times are medians.

- It compares every library and program of a node's driver with the output of readelf.
- It mirrors the driver from scratch and then refreshes the mirror. Each of these runs is a complete
  `tidegate refresh` command.
- It runs `tidegate verify`, which loads each library with only the mirror on the search path.
- It starts containers that have no driver other than the mirror.
"""


OVERHEAD = """\
## What a call costs

`python -m bench.overhead` runs one C program natively and in a container with a quota, in turn
(A B B A), each time as a new process. The figure for a run is the median of its batches of calls.
The difference is the median of the differences of the pairs of runs, which is not the difference
of the medians next to it. The 95 % interval is bootstrapped from the pairs.

- `launch` is the mean over a batch of launches, `launch-median` the median launch.
- `alloc-async` is `cuMemAllocAsync` and `cuMemFreeAsync`.
- `alloc` is `cuMemAlloc` and `cuMemFree`. `alloc-1000` is the same with 1,000 live blocks, and so
  on.
- `memory-info` is `cuMemGetInfo`.
- `look-up-ours` is `cuGetProcAddress` for a function that the control library replaces, `look-up`
  the same call for a function that it does not replace.
- `load` is `dlopen` of libcuda.so.1 in a new process.

Rows with "alone" were measured while the container had the GPU to itself. Rows with "while another
container waits" were measured with grants that end, as they do when another container wants the
GPU. Rows with "both in one process" were measured in one governed process that has the control
library and the driver's libcuda behind it, and calls each in turn. This excludes differences
between processes.

The stub is a driver with functions that return at once. The difference with the stub is the control
library's own cost, without a container around it.
"""


HOOK = """\
## What a start costs

`python -m bench.hook` runs a static program under runc and crun, in each of these ways in turn:

- "alone": without a hook.
- "trivial": with a hook in C that does nothing.
- "no request": with Tidegate's hook, in a container that requests nothing.
- "governed": with Tidegate's hook, in a container that requests a share.
- "wrapper, no request" and "wrapper, governed": the same two under `tidegate-runtime`.

The hook and the runtime are the C programs with the
[fork server](reference/runtime.md#the-fork-server) behind them. "Added ms" is the median of the
differences from the start without a hook in the same round. After that, containers that request a
share are started eight at a time.

The aims are 5 ms for a container that requests nothing and 30 ms for one that requests a share.
"""


STARTS_BY_ENGINE = """\
## What a start costs with each engine

`python -m tests.container.start_times` starts one container at a time with real engines, in three
ways: natively, with Tidegate's runtime or hooks in a container that requests nothing, and with them
in a container that requests a share. Successive rounds go through all orders of the three.

A start lasts from the engine's command, or from the first CRI call, to its return with the
container running. The figures are the medians of the differences from the native start in the same
round, with their standard error.

The aims are 5 ms for a container that requests nothing and 30 ms for one that requests a share.
"""


LATENCY = """\
## Requests beside work that never ends

`python -m bench.latency` runs a service alongside jobs that always have work. The service's
requests arrive at random (a Poisson process, the same in every arm), and each is 20 kernels of
0.1 ms. The jobs run units of 0.5 ms. If a title names a model, the requests run that model
(`decode-graph`: tokens by CUDA graphs), or the jobs train it.

The arms:

- `alone`: only the service, without Tidegate.
- `governed`: only the service, under Tidegate, with a cap of 70 % and the class `latency`.
- `native`: the service and the jobs, without Tidegate.
- `gate`: grants, for which each launch waits, divide the time.
- `hardware`: the GPU's own scheduler divides the time.
- `latency`: as `hardware`, but the service has the class `latency` and the cap.

The service is guaranteed the share that its requests need plus ten percentage points (20 % with
a request every 20 ms). The jobs share the rest, and all containers may use idle time. If an arm's
name ends in two numbers, the guarantees of the service and of all jobs together are these numbers
instead. If there are several services, they share the requests and the guarantee.

The work of the jobs is given as a percentage of what one job does alone.
"""


RESTARTS = """\
## A governor that is killed

`python -m bench.restarts` repeatedly kills the governor with SIGKILL under the GPU's own scheduler,
and starts the next governor at once or up to 3 s later. Throughout, three containers with caps of
45, 30 and 15 % have work.

A container that has used its cap is switched off until the period ends, so each container pauses
even without a kill. The longest pauses with kills are measured from the kill until one second
after the next governor answers.
"""


SUSPENSION = """\
## A container that is suspended

`python -m bench.suspension` suspends a container with known contents in its memory and resumes it a
second later, repeatedly, alongside a container that always has work. The governor is killed and
started again before every third resume. All contents were intact at the end of each run.

The rows without Tidegate are the driver's calls alone, for the same program with the GPU to itself.
*Also freed* is the memory that suspending freed beyond what the program had allocated: its context.
The neighbour's speed is given as a percentage of its speed while the container is suspended.
"""

CHURN = """\
## Containers that come and go

`python -m bench.churn` keeps up to eight containers with random shares and kinds of work running
alongside one that always has work and whose guarantee and cap are 20 %. Some end by themselves
after a few seconds; others are killed with SIGKILL. All guarantees together fit on the GPU.

The share of a container is its work from one second after its first unit, as a percentage of what
it does alone in that time. It is measured for containers that always have work and live for at
least two seconds. "Below" is how far the worst container was below its guarantee, in points.
"Seconds" are the shares, in windows of one second, of the container that always has work.
There is no run without Tidegate, which would guarantee nothing.
"""


PROGRAMS = """\
## Programs, alone and governed

`python -m bench.programs` runs each program natively, and then in a container with a memory
quota and 50 % of the GPU's time. It compares the exit status, named checks, values and printed
lines. "The same" means bit-identical; otherwise the difference is within the program's own
tolerance. Launches, replaced look-ups and the peak of charged memory are what the governor counted
for the container.
"""


STEP = """\
## What a step costs

`python -m bench.overhead --step` compares a native process with a process in a container that is
alone and has the whole GPU. Both are warm and stay on the same processors. In turn (A B B A), each
process runs steps for a fifth of a second while the other is idle. The figure for a turn is its
median step, because other load on the machine sometimes preempts the process. Results without
a median have the mean instead.

Any two processes differ by up to a percent for as long as they live, whichever program they run.
Therefore there are several rounds, each with new processes. "Slower" is the mean over the rounds
of the median of a round's pairs. The true value lies below the upper bound with 95 % confidence
(a bootstrap of the rounds and of the pairs in them).

`train` is a step of a transformer. `decode` is a token from a 24-layer model in eager mode, some
300 launches, and is limited by the host. `decode-graph` is the same token as one CUDA graph.
"""


MEMORY = """\
## A memory quota under attack

`python -m bench.memory` runs processes in one container that allocate and free memory at random, in
eight threads each and in every possible way. Some of them are killed. After that, one process
takes all the memory that it can get.

The memory in use on the GPU is read from the driver's own NVML every 10 ms or slightly less often.
Memory of a context that NVML attributes to no process is subtracted, once for each process that may
be running.
"""


API_COVERAGE = """\
## Every function of the driver API

`python -m tests.gpu.coverage_probe` calls each function that `cuda.h` declares, natively and under
a quota. It observes the effect by means that do not depend on Tidegate: memory through NVML, GPU
time through the driver's own events.

A call that takes memory has to change the container's account, by at least half of what NVML saw
and in the same direction. A call that makes the GPU work has to pass the gate or be counted.
"Found within a second" lists calls for which the driver takes memory on its own. The governor
finds that memory through NVML.
"""
