"""What starts work on the GPU, and what the model of its queues has to know."""

from __future__ import annotations

from libcontrol.api.row import Fn, with_ptsz

_LAUNCH = (
    "CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, "
    "unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ, "
    "unsigned int sharedMemBytes, CUstream hStream, void **kernelParams"
)
_GRID = "gate_blocks(gridDimX, gridDimY, gridDimZ)"
_CONFIG_GRID = "gate_blocks(config->gridDimX, config->gridDimY, config->gridDimZ)"

ROWS: tuple[Fn, ...] = (
    Fn("cuStreamDestroy_v2", "CUstream hStream", "custom"),
    *with_ptsz(
        Fn("cuStreamWaitEvent", "CUstream hStream, CUevent hEvent, unsigned int Flags", "custom")
    ),
    *with_ptsz(
        Fn(
            "cuLaunchKernel",
            _LAUNCH + ", void **extra",
            "gate",
            key="f",
            blocks=_GRID,
            stream="hStream",
        )
    ),
    *with_ptsz(
        Fn(
            "cuLaunchKernelEx",
            "const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra",
            "gate",
            key="f",
            blocks=_CONFIG_GRID,
            stream="config->hStream",
        )
    ),
    *with_ptsz(
        Fn(
            "cuLaunchCooperativeKernel",
            _LAUNCH,
            "gate",
            key="f",
            blocks=_GRID,
            stream="hStream",
        )
    ),
    *with_ptsz(
        Fn(
            "cuGraphLaunch",
            "CUgraphExec hGraphExec, CUstream hStream",
            "gate",
            key="hGraphExec",
            stream="hStream",
        )
    ),
)
