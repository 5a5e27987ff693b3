"""Rows of the API table for functions that use device memory, but allocate none and start no work.

They wait while the container's memory is parked in host memory. In these calls, the driver checks
addresses, or writes to them.
"""

from __future__ import annotations

from libcontrol.api.row import Fn

_OLD_AND_NEW = ("", "_ptsz", "_v2", "_v2_ptsz")

_STREAM_OPERATIONS: tuple[Fn, ...] = tuple(
    Fn(
        f"cuStream{what}Value{bits}{form}",
        f"CUstream stream, CUdeviceptr addr, uint{bits}_t value, unsigned int flags",
        "use",
    )
    for what in ("Wait", "Write")
    for bits in (32, 64)
    for form in _OLD_AND_NEW
) + tuple(
    Fn(
        f"cuStreamBatchMemOp{form}",
        "CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray, "
        "unsigned int flags",
        "use",
    )
    for form in _OLD_AND_NEW
)

_NEW_NODE = (
    "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, "
    "size_t numDependencies, const {} *{}"
)
_EXEC_NODE = "CUgraphExec hGraphExec, CUgraphNode hNode, const {} *{}"

_NODES: tuple[Fn, ...] = (
    Fn(
        "cuGraphAddMemcpyNode",
        _NEW_NODE.format("CUDA_MEMCPY3D", "copyParams") + ", CUcontext ctx",
        "use",
    ),
    Fn(
        "cuGraphMemcpyNodeSetParams",
        "CUgraphNode hNode, const CUDA_MEMCPY3D *nodeParams",
        "use",
    ),
    Fn(
        "cuGraphExecMemcpyNodeSetParams",
        _EXEC_NODE.format("CUDA_MEMCPY3D", "copyParams") + ", CUcontext ctx",
        "use",
    ),
    Fn(
        "cuGraphAddMemsetNode",
        _NEW_NODE.format("CUDA_MEMSET_NODE_PARAMS", "memsetParams") + ", CUcontext ctx",
        "use",
    ),
    Fn(
        "cuGraphMemsetNodeSetParams",
        "CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS *nodeParams",
        "use",
    ),
    Fn(
        "cuGraphExecMemsetNodeSetParams",
        _EXEC_NODE.format("CUDA_MEMSET_NODE_PARAMS", "memsetParams") + ", CUcontext ctx",
        "use",
    ),
    Fn(
        "cuGraphAddBatchMemOpNode",
        _NEW_NODE.format("CUDA_BATCH_MEM_OP_NODE_PARAMS", "nodeParams"),
        "use",
    ),
    Fn(
        "cuGraphBatchMemOpNodeSetParams",
        "CUgraphNode hNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams",
        "use",
    ),
    Fn(
        "cuGraphExecBatchMemOpNodeSetParams",
        _EXEC_NODE.format("CUDA_BATCH_MEM_OP_NODE_PARAMS", "nodeParams"),
        "use",
    ),
    Fn(
        "cuGraphExecUpdate",
        "CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode *hErrorNode_out, "
        "CUgraphExecUpdateResult *updateResult_out",
        "use",
    ),
    Fn(
        "cuGraphExecUpdate_v2",
        "CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo *resultInfo",
        "use",
    ),
    Fn(
        "cuGraphExecChildGraphNodeSetParams",
        "CUgraphExec hGraphExec, CUgraphNode hNode, CUgraph childGraph",
        "use",
    ),
    Fn("cuGraphNodeSetParams", "CUgraphNode hNode, CUgraphNodeParams *nodeParams", "use"),
    Fn("cuGraphNodeSetParams_v2", "CUgraphNode hNode, CUgraphNodeParams *nodeParams", "use"),
    Fn(
        "cuGraphExecNodeSetParams",
        "CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeParams *nodeParams",
        "use",
    ),
)

_POINTERS: tuple[Fn, ...] = (
    Fn(
        "cuPointerGetAttribute",
        "void *data, CUpointer_attribute attribute, CUdeviceptr ptr",
        "custom",
    ),
    Fn(
        "cuPointerGetAttributes",
        "unsigned int numAttributes, CUpointer_attribute *attributes, void **data, CUdeviceptr ptr",
        "custom",
    ),
    Fn(
        "cuPointerSetAttribute",
        "const void *value, CUpointer_attribute attribute, CUdeviceptr ptr",
        "custom",
    ),
    Fn(
        "cuMemGetAddressRange_v2",
        "CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr",
        "custom",
    ),
    Fn(
        "cuMemGetHandleForAddressRange",
        "void *handle, CUdeviceptr dptr, size_t size, CUmemRangeHandleType handleType, "
        "unsigned long long flags",
        "custom",
    ),
    Fn("cuIpcGetMemHandle", "CUipcMemHandle *pHandle, CUdeviceptr dptr", "custom"),
    Fn(
        "cuTexObjectCreate",
        "CUtexObject *pTexObject, const CUDA_RESOURCE_DESC *pResDesc, "
        "const CUDA_TEXTURE_DESC *pTexDesc, const CUDA_RESOURCE_VIEW_DESC *pResViewDesc",
        "use",
    ),
    Fn(
        "cuTexRefSetAddress_v2",
        "size_t *ByteOffset, CUtexref hTexRef, CUdeviceptr dptr, size_t bytes",
        "use",
    ),
)

ROWS: tuple[Fn, ...] = (*_STREAM_OPERATIONS, *_NODES, *_POINTERS)
