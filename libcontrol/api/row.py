"""The type of a row in the API table: a function of the driver API and its method.

- `gate`     starts work on the GPU, and may do so only while the container has the grant. `key` is
             an expression that identifies the work and the duration that is learned for it,
             `blocks` distinguishes sizes of the same work, and `stream` is the stream to which the
             work is submitted. `before` is an expression that may refuse the call, and `after`
             follows the call. The fast path skips both, and is not taken while `needed` is true.
- `copy`     copies or fills: `copy` is an expression for its size and direction (copies.h). A copy
             or fill within the GPU's memory passes the gate. Others are counted, and so are small
             copies by calls that do not specify the direction.
- `charge`   takes device memory: `size` is reserved before the driver is called, and `pointer`
             names the block afterwards. `settle` (optional) is the size once the driver has
             answered, and `kind` is one of account.h's kinds. `instead` (optional) is called in
             place of the driver where memory may be parked.
- `refund`   gives device memory back: `pointer` names the block, and `kind` is its kind. `instead`
             (optional) is a condition: if it is true, the call has been made, with `result`.
             `{stream}` in it stands for the stream.
- `use`      uses device memory, or has the driver check that memory is present, but neither starts
             work nor takes memory: it waits while the container's memory is parked.
- `custom`   is written by hand in C.

Parameters are as in NVIDIA's cuda.h 13.5.
"""

from __future__ import annotations

from typing import NamedTuple


class Fn(NamedTuple):
    """One function of the driver API or of NVML, with C declarations and expressions as text."""

    name: str
    params: str
    method: str
    key: str = ""
    blocks: str = "1"
    stream: str = ""
    needed: str = ""
    before: str = ""
    after: str = ""
    copy: str = ""
    size: str = ""
    settle: str = ""
    pointer: str = ""
    instead: str = ""
    kind: str = "ACCOUNT_BLOCK"


def with_ptsz(fn: Fn) -> tuple[Fn, Fn]:
    """Return the row and that of its form for the per-thread default stream."""
    stream = f"gate_ptsz({fn.stream})" if fn.stream else ""
    return fn, fn._replace(name=fn.name + "_ptsz", stream=stream)


def with_ptds(fn: Fn) -> tuple[Fn, Fn]:
    """Return the row of a call without a stream, and that of its per-thread form."""
    return fn, fn._replace(name=fn.name + "_ptds", stream="CU_STREAM_PER_THREAD")
