/* The calls of the coverage probe, grouped by the sections of the driver API's reference.
 * coverage_probe_cases.h describes their syntax.
 */
#pragma once

// clang-format off: a table

#define KERNEL_ARGUMENTS 1, 1, 1, 1, 1, 1, 0, w.stream, burn_arguments()
#define EACH_STREAM(expression) \
    ({ CUresult r_ = 0; for (int i_ = 0; i_ < 256 && !r_; i_++) { CUstream *s = &v.streams[i_]; r_ = (expression); } r_; })
#define GRAPHICS "needs a resource of OpenGL, EGL or VDPAU"
#define SECOND   "needs a second GPU"
#define SWITCH   "needs several GPUs behind a switch"
#define SEMAPHORE "needs a semaphore of Vulkan or Direct3D"
#define CIG       "needs a context that was created for Vulkan or Direct3D"
#define ENDPOINTS "needs a platform with logical endpoints"

/* Error handling, initialization, version */
CASE(cuGetErrorString, 0, (), fn(2, &v.text));
CASE(cuGetErrorName, 0, (), fn(2, &v.text));
CASE(cuInit, BARE, (), fn(0));
CASE(cuDriverGetVersion, 0, (), fn(&v.i));

/* Devices */
CASE(cuDeviceGet, 0, (), fn(&v.i, 0));
CASE(cuDeviceGetCount, 0, (), fn(&v.i));
CASE(cuDeviceGetName, 0, (), fn(v.buffer, 256, w.device));
CASE(cuDeviceGetUuid, 0, (), fn(&v.uuid, w.device));
CASE(cuDeviceGetUuid_v2, 0, (), fn(&v.uuid, w.device));
NOT_HERE(cuDeviceGetLuid, 0, "exists on Windows only");
CASE(cuDeviceTotalMem, 0, (), fn(&v.u, w.device));
CASE(cuDeviceTotalMem_v2, 0, (), fn(&v.n, w.device));
CASE(cuDeviceGetTexture1DLinearMaxWidth, 0, (), fn(&v.n, CU_AD_FORMAT_FLOAT, 4, w.device));
CASE(cuDeviceGetAttribute, 0, (), fn(&v.i, CU_DEVICE_ATTRIBUTE_WARP_SIZE, w.device));
CASE(cuDeviceGetHostAtomicCapabilities, 0, (), ({ CUatomicOperation op = CU_ATOMIC_OPERATION_INTEGER_ADD; fn(&v.u, &op, 1, w.device); }));
NOT_HERE(cuDeviceGetNvSciSyncAttributes, 0, "needs NvSci");
CASE(cuDeviceSetMemPool, 0, (NEED(CU(cuDeviceGetDefaultMemPool)(&v.pool, w.device))), fn(w.device, v.pool));
CASE(cuDeviceGetMemPool, 0, (), fn(&v.pool, w.device));
CASE(cuDeviceGetDefaultMemPool, 0, (), fn(&v.pool, w.device));
CASE(cuDeviceGetExecAffinitySupport, 0, (), fn(&v.i, CU_EXEC_AFFINITY_TYPE_SM_COUNT, w.device));
CASE(cuFlushGPUDirectRDMAWrites, 0, (), fn(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER));
CASE(cuDeviceGetProperties, 0, (), fn((CUdevprop *)v.buffer, w.device));
CASE(cuDeviceComputeCapability, 0, (), fn(&v.i, &v.j, w.device));

/* Primary contexts */
CASE(cuDevicePrimaryCtxRetain, BARE, (), fn(&v.context, w.device));
CASE(cuDevicePrimaryCtxRelease, BARE, (need_retained()), fn(w.device));
CASE(cuDevicePrimaryCtxRelease_v2, BARE, (need_retained()), fn(w.device));
CASE(cuDevicePrimaryCtxReset, BARE, (need_retained()), fn(w.device));
CASE(cuDevicePrimaryCtxReset_v2, BARE, (need_retained()), fn(w.device));
CASE(cuDevicePrimaryCtxSetFlags, BARE, (), fn(w.device, CU_CTX_SCHED_YIELD));
CASE(cuDevicePrimaryCtxSetFlags_v2, BARE, (), fn(w.device, CU_CTX_SCHED_YIELD));
CASE(cuDevicePrimaryCtxGetState, 0, (), fn(w.device, &v.u, &v.i));

/* Contexts */
CASE(cuCtxCreate, BARE, (), fn(&v.context, 0, w.device));
CASE(cuCtxCreate_v2, BARE, (), fn(&v.context, 0, w.device));
CASE(cuCtxCreate_v3, BARE, (), fn(&v.context, NULL, 0, 0, w.device));
CASE(cuCtxCreate_v4, BARE, (), fn(&v.context, NULL, 0, w.device));
CASE(cuCtxDestroy, BARE, (need_old_context()), fn(v.context));
CASE(cuCtxDestroy_v2, BARE, (need_context()), fn(v.context));
CASE(cuCtxPushCurrent, OLD | FREE, (NEED(CU(cuCtxPopCurrent)(&v.context))), fn(v.context));
CASE(cuCtxPushCurrent_v2, FREE, (), fn(w.context));
CASE(cuCtxPopCurrent, OLD | FREE | OWN, (), fn(&v.context));
CASE(cuCtxPopCurrent_v2, FREE, (NEED(CU(cuCtxPushCurrent_v2)(w.context))), fn(&v.context));
CASE(cuCtxSetCurrent, 0, (), fn(w.context));
CASE(cuCtxGetCurrent, 0, (), fn(&v.context));
CASE(cuCtxGetDevice, 0, (), fn(&v.i));
CASE(cuCtxGetDevice_v2, 0, (), fn(&v.i, w.context));
CASE(cuCtxGetFlags, 0, (), fn(&v.u));
CASE(cuCtxSetFlags, 0, (), fn(CU_CTX_SCHED_AUTO));
CASE(cuCtxGetId, 0, (), fn(w.context, &v.flags));
CASE(cuCtxSynchronize, 0, (), fn());
CASE(cuCtxSynchronize_v2, 0, (), fn(w.context));
CASE(cuCtxSetLimit, OWN, (), fn(CU_LIMIT_STACK_SIZE, 16384));
VARIANT(cuCtxSetLimit, "heap", OWN, (), fn(CU_LIMIT_MALLOC_HEAP_SIZE, 256 * MIB));
VARIANT(cuCtxSetLimit, "printf", OWN, (), fn(CU_LIMIT_PRINTF_FIFO_SIZE, 64 * MIB));
VARIANT(cuCtxSetLimit, "back", OWN, (NEED(CU(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 16384))), fn(CU_LIMIT_STACK_SIZE, 1024));
CASE(cuCtxGetLimit, 0, (), fn(&v.n, CU_LIMIT_STACK_SIZE));
CASE(cuCtxGetCacheConfig, 0, (), ({ CUfunc_cache c; fn(&c); }));
CASE(cuCtxSetCacheConfig, 0, (), fn(CU_FUNC_CACHE_PREFER_NONE));
CASE(cuCtxGetApiVersion, 0, (), fn(w.context, &v.u));
CASE(cuCtxGetStreamPriorityRange, 0, (), fn(&v.i, &v.j));
CASE(cuCtxResetPersistingL2Cache, 0, (), fn());
CASE(cuCtxGetExecAffinity, 0, (), ({ CUexecAffinityParam p; fn(&p, CU_EXEC_AFFINITY_TYPE_SM_COUNT); }));
CASE(cuCtxRecordEvent, 0, (), fn(w.context, w.event));
CASE(cuCtxWaitEvent, 0, (need_event()), fn(w.context, v.event));
CASE(cuCtxAttach, BARE, (need_context()), fn(&v.context2, 0));
CASE(cuCtxDetach, BARE, (need_context(); NEED(CU(cuCtxAttach)(&v.context2, 0))), fn(v.context));
VARIANT(cuCtxDetach, "the last", BARE, (need_context()), fn(v.context));
CASE(cuCtxGetSharedMemConfig, 0, (), ({ CUsharedconfig c; fn(&c); }));
CASE(cuCtxSetSharedMemConfig, 0, (), fn(CU_SHARED_MEM_CONFIG_DEFAULT_BANK_SIZE));

/* Modules */
CASE(cuModuleLoad, LATE, (need_file(large_ptx)), fn(&v.module, v.buffer));
CASE(cuModuleLoadData, LATE, (), fn(&v.module, large_ptx));
VARIANT(cuModuleLoadData, "stack", OWN | LATE, (), fn(&v.module, stack_ptx));
VARIANT(cuModuleLoadData, "heap", OWN | LATE, (NEED(CU(cuCtxSetLimit)(CU_LIMIT_MALLOC_HEAP_SIZE, 256 * MIB))), fn(&v.module, heap_ptx));
VARIANT(cuModuleLoadData, "managed", LATE, (), fn(&v.module, managed_ptx));
CASE(cuModuleLoadDataEx, LATE, (), fn(&v.module, large_ptx, 0, NULL, NULL));
CASE(cuModuleLoadFatBinary, LATE, (need_fatbin()), fn(&v.module, v.ptr));
CASE(cuModuleUnload, LATE, (NEED(CU(cuModuleLoadData)(&v.module, large_ptx))), fn(v.module));
CASE(cuModuleGetLoadingMode, 0, (), ({ CUmoduleLoadingMode m; fn(&m); }));
CASE(cuModuleGetFunction, 0, (), fn(&v.function, w.module, "burn"));
VARIANT(cuModuleGetFunction, "stack", OWN | LATE, (NEED(CU(cuModuleLoadData)(&v.module, stack_ptx))), fn(&v.function, v.module, "deep"));
CASE(cuModuleGetFunctionCount, 0, (), fn(&v.u, w.module));
CASE(cuModuleEnumerateFunctions, 0, (), fn(&v.function, 1, w.module));
CASE(cuModuleGetGlobal, OLD, (NEED(CU(cuModuleLoadData)(&v.module, large_ptx))), ({ CUdeviceptr_v1 p; fn(&p, &v.u, v.module, "large"); }));
CASE(cuModuleGetGlobal_v2, 0, (NEED(CU(cuModuleLoadData)(&v.module, large_ptx))), fn(&v.p, &v.n, v.module, "large"));
CASE(cuLinkCreate, 0, (), fn(0, NULL, NULL, &v.link));
CASE(cuLinkCreate_v2, 0, (), fn(0, NULL, NULL, &v.link));
CASE(cuLinkAddData, 0, (need_link()), fn(v.link, CU_JIT_INPUT_PTX, (void *)empty_ptx, sizeof empty_ptx, "x", 0, NULL, NULL));
CASE(cuLinkAddData_v2, 0, (need_link()), fn(v.link, CU_JIT_INPUT_PTX, (void *)empty_ptx, sizeof empty_ptx, "x", 0, NULL, NULL));
CASE(cuLinkAddFile, 0, (need_link(); need_file(empty_ptx)), fn(v.link, CU_JIT_INPUT_PTX, v.buffer, 0, NULL, NULL));
CASE(cuLinkAddFile_v2, 0, (need_link(); need_file(empty_ptx)), fn(v.link, CU_JIT_INPUT_PTX, v.buffer, 0, NULL, NULL));
CASE(cuLinkComplete, 0, (need_linked()), fn(v.link, &v.link_image, &v.n));
CASE(cuLinkDestroy, 0, (need_linked()), fn(v.link));
CASE(cuModuleGetTexRef, 0, (NEED(CU(cuModuleLoadData)(&v.module, texture_ptx))), fn(&v.texref, v.module, "picture"));
CASE(cuModuleGetSurfRef, 0, (NEED(CU(cuModuleLoadData)(&v.module, texture_ptx))), fn(&v.surfref, v.module, "canvas"));

/* Libraries */
CASE(cuLibraryLoadData, 0, (), fn(&v.library, large_ptx, NULL, NULL, 0, NULL, NULL, 0));
CASE(cuLibraryLoadFromFile, 0, (need_file(large_ptx)), fn(&v.library, v.buffer, NULL, NULL, 0, NULL, NULL, 0));
CASE(cuLibraryUnload, LATE, (need_kernel(large_ptx); NEED(CU(cuKernelGetFunction)(&v.function, v.kernel))), fn(v.library));
CASE(cuLibraryGetKernel, 0, (need_library(large_ptx)), fn(&v.kernel, v.library, "burn"));
CASE(cuLibraryGetKernelCount, 0, (need_library(large_ptx)), fn(&v.u, v.library));
CASE(cuLibraryEnumerateKernels, 0, (need_library(large_ptx)), fn(&v.kernel, 1, v.library));
CASE(cuLibraryGetModule, LATE, (need_library(large_ptx)), fn(&v.module, v.library));
CASE(cuKernelGetFunction, LATE, (need_kernel(large_ptx)), fn(&v.function, v.kernel));
CASE(cuKernelGetLibrary, 0, (need_kernel(large_ptx)), fn(&v.library, v.kernel));
CASE(cuLibraryGetGlobal, LATE, (need_library(large_ptx)), fn(&v.p, &v.n, v.library, "large"));
CASE(cuLibraryGetManaged, LATE, (need_library(managed_ptx)), fn(&v.p, &v.n, v.library, "shared"));
CASE(cuLibraryGetUnifiedFunction, 0, (need_library(large_ptx)), fn(&v.ptr, v.library, "burn"));
CASE(cuKernelGetAttribute, 0, (need_kernel(large_ptx)), fn(&v.i, CU_FUNC_ATTRIBUTE_NUM_REGS, v.kernel, w.device));
CASE(cuKernelSetAttribute, LATE, (need_kernel(large_ptx)), fn(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1024, v.kernel, w.device));
CASE(cuKernelSetCacheConfig, LATE, (need_kernel(large_ptx)), fn(v.kernel, CU_FUNC_CACHE_PREFER_NONE, w.device));
CASE(cuKernelGetName, 0, (need_kernel(large_ptx)), fn(&v.text, v.kernel));
CASE(cuKernelGetParamInfo, 0, (need_kernel(ptx)), fn(v.kernel, 0, &v.n, &v.n2));

/* Memory */
CASE(cuMemGetInfo, OLD, (), fn(&v.u, &v.u2));
CASE(cuMemGetInfo_v2, 0, (), fn(&v.n, &v.n2));
CASE(cuMemAlloc, OLD, (), ({ CUdeviceptr_v1 p; fn(&p, TAKE); }));
CASE(cuMemAlloc_v2, 0, (), fn(&v.p, TAKE));
CASE(cuMemAllocPitch, OLD, (), ({ CUdeviceptr_v1 p; fn(&p, &v.u, 65536, TAKE / 65536, 16); }));
CASE(cuMemAllocPitch_v2, 0, (), fn(&v.p, &v.n, 65536, TAKE / 65536, 16));
CASE(cuMemFree, OLD, (NEED(CU(cuMemAlloc)(&v.u, TAKE))), fn(v.u));
CASE(cuMemFree_v2, 0, (NEED(CU(cuMemAlloc_v2)(&v.p, TAKE))), fn(v.p));
VARIANT(cuMemFree_v2, "of a pool", OWN, (need_pooled()), fn(v.p));
VARIANT(cuMemFree_v2, "managed", 0, (need_managed()), fn(v.p));
CASE(cuMemGetAddressRange, OLD, (need_old()), ({ CUdeviceptr_v1 p; fn(&p, &v.u, old_a); }));
CASE(cuMemGetAddressRange_v2, 0, (need_blocks()), fn(&v.p, &v.n, w.a));
CASE(cuMemAllocHost, OLD, (), fn(&v.ptr, 16 * MIB));
CASE(cuMemAllocHost_v2, 0, (), fn(&v.ptr, 16 * MIB));
CASE(cuMemFreeHost, 0, (NEED(CU(cuMemHostAlloc)(&v.ptr, 16 * MIB, 0))), fn(v.ptr));
CASE(cuMemHostAlloc, 0, (), fn(&v.ptr, 16 * MIB, CU_MEMHOSTALLOC_DEVICEMAP));
CASE(cuMemHostGetDevicePointer, OLD, (NEED(CU(cuMemHostAlloc)(&v.ptr, MIB, CU_MEMHOSTALLOC_DEVICEMAP))), ({ CUdeviceptr_v1 p; fn(&p, v.ptr, 0); }));
CASE(cuMemHostGetDevicePointer_v2, 0, (need_host()), fn(&v.p, w.host, 0));
CASE(cuMemHostGetFlags, 0, (need_host()), fn(&v.u, w.host));
CASE(cuMemAllocManaged, 0, (), fn(&v.p, TAKE, CU_MEM_ATTACH_GLOBAL));
CASE(cuDeviceRegisterAsyncNotification, 0, (), fn(w.device, notified, NULL, &v.notified));
CASE(cuDeviceUnregisterAsyncNotification, 0, (NEED(CU(cuDeviceRegisterAsyncNotification)(w.device, notified, NULL, &v.notified))), fn(w.device, v.notified));
CASE(cuDeviceGetByPCIBusId, 0, (NEED(CU(cuDeviceGetPCIBusId)(v.buffer, 64, w.device))), fn(&v.i, v.buffer));
CASE(cuDeviceGetPCIBusId, 0, (), fn(v.buffer, 64, w.device));
CASE(cuIpcGetEventHandle, 0, (NEED(CU(cuEventCreate)(&v.event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING))), fn(&v.shared_event, v.event));
CASE(cuIpcOpenEventHandle, OWN, (need_helper()), fn(&v.event, v.shared_event));
CASE(cuIpcGetMemHandle, 0, (NEED(CU(cuMemAlloc_v2)(&v.p, TAKE))), fn(&v.shared_memory, v.p));
CASE(cuIpcOpenMemHandle, OWN, (need_helper()), fn(&v.p, v.shared_memory, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
CASE(cuIpcOpenMemHandle_v2, OWN, (need_helper()), fn(&v.p, v.shared_memory, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
CASE(cuIpcCloseMemHandle, OWN, (need_helper(); NEED(CU(cuIpcOpenMemHandle_v2)(&v.p, v.shared_memory, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS))), fn(v.p));
CASE(cuMemHostRegister, OLD, (v.ptr = mmap(NULL, 16 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)), fn(v.ptr, 16 * MIB, 0));
CASE(cuMemHostRegister_v2, 0, (v.ptr = mmap(NULL, 16 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)), fn(v.ptr, 16 * MIB, 0));
CASE(cuMemHostUnregister, 0, (v.ptr = mmap(NULL, 16 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); NEED(CU(cuMemHostRegister_v2)(v.ptr, 16 * MIB, 0))), fn(v.ptr));

/* Copies */
CASE(cuMemcpy, PTDS | SIZED, (need_blocks()), fn(w.b, w.a, work_size));
VARIANT(cuMemcpy, "to the host", PTDS | SIZED | HOST, (need_host()), fn((CUdeviceptr)w.host, w.a, MOST(HOST_SIZE)));
CASE(cuMemcpyPeer, PTDS | SIZED, (need_blocks()), fn(w.b, w.context, w.a, w.context, work_size));
CASE(cuMemcpyHtoD, OLD | SIZED | HOST, (need_old()), fn(old_a, w.host, OLD_SIZE));
CASE(cuMemcpyHtoD_v2, PTDS | SIZED | HOST, (need_host()), fn(w.a, w.host, MOST(HOST_SIZE)));
CASE(cuMemcpyDtoH, OLD | SIZED | HOST, (need_old()), fn(w.host, old_a, OLD_SIZE));
CASE(cuMemcpyDtoH_v2, PTDS | SIZED | HOST, (need_host()), fn(w.host, w.a, MOST(HOST_SIZE)));
CASE(cuMemcpyDtoD, OLD | SIZED, (need_old()), AGAIN(16, fn(old_b, old_a, OLD_SIZE)));
CASE(cuMemcpyDtoD_v2, PTDS | SIZED, (need_blocks()), fn(w.b, w.a, work_size));
CASE(cuMemcpyDtoA, OLD | SIZED, (need_old_lines()), AGAIN(64, fn(v.array, 0, old_a, (unsigned int)MOST(LINE_SIZE))));
CASE(cuMemcpyDtoA_v2, PTDS | SIZED, (need_lines()), AGAIN(64, fn(v.array, 0, w.a, MOST(LINE_SIZE))));
CASE(cuMemcpyAtoD, OLD | SIZED, (need_old_lines()), AGAIN(64, fn(old_a, v.array, 0, (unsigned int)MOST(LINE_SIZE))));
CASE(cuMemcpyAtoD_v2, PTDS | SIZED, (need_lines()), AGAIN(64, fn(w.a, v.array, 0, MOST(LINE_SIZE))));
CASE(cuMemcpyHtoA, OLD | SIZED | HOST, (need_old_lines()), AGAIN(64, fn(v.array, 0, w.host, (unsigned int)MOST(LINE_SIZE))));
CASE(cuMemcpyHtoA_v2, PTDS | SIZED | HOST, (need_lines()), AGAIN(64, fn(v.array, 0, w.host, MOST(LINE_SIZE))));
CASE(cuMemcpyAtoH, OLD | SIZED | HOST, (need_old_lines()), AGAIN(64, fn(w.host, v.array, 0, (unsigned int)MOST(LINE_SIZE))));
CASE(cuMemcpyAtoH_v2, PTDS | SIZED | HOST, (need_lines()), AGAIN(64, fn(w.host, v.array, 0, MOST(LINE_SIZE))));
CASE(cuMemcpyAtoA, OLD | SIZED, (need_old_lines()), AGAIN(64, fn(v.array2, 0, v.array, 0, (unsigned int)MOST(LINE_SIZE))));
CASE(cuMemcpyAtoA_v2, PTDS | SIZED, (need_lines()), AGAIN(64, fn(v.array2, 0, v.array, 0, MOST(LINE_SIZE))));
CASE(cuMemcpy2D, OLD | SIZED, (need_old()), AGAIN(16, fn(old_copy2())));
CASE(cuMemcpy2D_v2, PTDS | SIZED, (copy2()), fn(TALL(v.copy2)));
VARIANT(cuMemcpy2D_v2, "to the host", PTDS | SIZED | HOST, (copy2(); v.copy2.dstMemoryType = CU_MEMORYTYPE_HOST; v.copy2.dstHost = w.host), ({ v.copy2.Height = MOST(HOST_SIZE) / 65536; fn(&v.copy2); }));
CASE(cuMemcpy2DUnaligned, OLD | SIZED, (need_old()), AGAIN(16, fn(old_copy2())));
CASE(cuMemcpy2DUnaligned_v2, PTDS | SIZED, (copy2()), fn(TALL(v.copy2)));
CASE(cuMemcpy3D, OLD | SIZED, (need_old()), AGAIN(16, fn(old_copy3())));
CASE(cuMemcpy3D_v2, PTDS | SIZED, (copy3()), fn(TALL3(v.copy3)));
CASE(cuMemcpy3DPeer, PTDS | SIZED, (copy_peer()), fn(TALL3(v.peer)));
CASE(cuMemcpyAsync, PTSZ | SIZED, (need_blocks()), fn(w.b, w.a, work_size, w.stream));
CASE(cuMemcpyPeerAsync, PTSZ | SIZED, (need_blocks()), fn(w.b, w.context, w.a, w.context, work_size, w.stream));
CASE(cuMemcpyHtoDAsync, OLD | SIZED | HOST, (need_old()), fn(old_a, w.host, OLD_SIZE, w.stream));
CASE(cuMemcpyHtoDAsync_v2, PTSZ | SIZED | HOST, (need_host()), fn(w.a, w.host, MOST(HOST_SIZE), w.stream));
CASE(cuMemcpyDtoHAsync, OLD | SIZED | HOST, (need_old()), fn(w.host, old_a, OLD_SIZE, w.stream));
CASE(cuMemcpyDtoHAsync_v2, PTSZ | SIZED | HOST, (need_host()), fn(w.host, w.a, MOST(HOST_SIZE), w.stream));
CASE(cuMemcpyDtoDAsync, OLD | SIZED, (need_old()), AGAIN(16, fn(old_b, old_a, OLD_SIZE, w.stream)));
CASE(cuMemcpyDtoDAsync_v2, PTSZ | SIZED, (need_blocks()), fn(w.b, w.a, work_size, w.stream));
CASE(cuMemcpyHtoAAsync, OLD | SIZED | HOST, (need_old_lines()), AGAIN(64, fn(v.array, 0, w.host, (unsigned int)MOST(LINE_SIZE), w.stream)));
CASE(cuMemcpyHtoAAsync_v2, PTSZ | SIZED | HOST, (need_lines()), AGAIN(64, fn(v.array, 0, w.host, MOST(LINE_SIZE), w.stream)));
CASE(cuMemcpyAtoHAsync, OLD | SIZED | HOST, (need_old_lines()), AGAIN(64, fn(w.host, v.array, 0, (unsigned int)MOST(LINE_SIZE), w.stream)));
CASE(cuMemcpyAtoHAsync_v2, PTSZ | SIZED | HOST, (need_lines()), AGAIN(64, fn(w.host, v.array, 0, MOST(LINE_SIZE), w.stream)));
CASE(cuMemcpy2DAsync, OLD | SIZED, (need_old()), AGAIN(16, fn(old_copy2(), w.stream)));
CASE(cuMemcpy2DAsync_v2, PTSZ | SIZED, (copy2()), fn(TALL(v.copy2), w.stream));
CASE(cuMemcpy3DAsync, OLD | SIZED, (need_old()), AGAIN(16, fn(old_copy3(), w.stream)));
CASE(cuMemcpy3DAsync_v2, PTSZ | SIZED, (copy3()), fn(TALL3(v.copy3), w.stream));
CASE(cuMemcpy3DPeerAsync, PTSZ | SIZED, (copy_peer()), fn(TALL3(v.peer), w.stream));
CASE(cuMemcpyBatchAsync, PTSZ | SIZED, (need_blocks()), ({ CUmemcpyAttributes *a = batch_attributes(); fn(&v.pointers[1], &v.pointers[0], v.sizes, 1, a, &v.sizes[1], 1, &v.n, w.stream); }));
CASE(cuMemcpyBatchAsync_v2, PTSZ | SIZED, (need_blocks()), ({ CUmemcpyAttributes *a = batch_attributes(); fn(&v.pointers[1], &v.pointers[0], v.sizes, 1, a, &v.sizes[1], 1, w.stream); }));
CASE(cuMemcpy3DBatchAsync, PTSZ | SIZED, (need_blocks()), fn(1, batch_op(), &v.n, 0, w.stream));
CASE(cuMemcpy3DBatchAsync_v2, PTSZ | SIZED, (need_blocks()), fn(1, batch_op(), 0, w.stream));
CASE(cuMemBatchDecompressAsync, PTSZ, (need_compressed()), fn(&v.decompress, 1, 0, &v.n, w.stream));

/* Fills */
CASE(cuMemsetD8, OLD | SIZED, (need_old()), AGAIN(16, fn(old_a, 1, OLD_SIZE)));
CASE(cuMemsetD8_v2, PTDS | SIZED, (need_blocks()), fn(w.a, 1, work_size));
CASE(cuMemsetD16, OLD | SIZED, (need_old()), AGAIN(16, fn(old_a, 1, OLD_SIZE / 2)));
CASE(cuMemsetD16_v2, PTDS | SIZED, (need_blocks()), fn(w.a, 1, work_size / 2));
CASE(cuMemsetD32, OLD | SIZED, (need_old()), AGAIN(16, fn(old_a, 1, OLD_SIZE / 4)));
CASE(cuMemsetD32_v2, PTDS | SIZED, (need_blocks()), fn(w.a, 1, work_size / 4));
CASE(cuMemsetD2D8, OLD | SIZED, (need_old()), AGAIN(16, fn(old_a, 65536, 1, 65536, OLD_SIZE / 65536)));
CASE(cuMemsetD2D8_v2, PTDS | SIZED, (need_blocks()), fn(w.a, 65536, 1, 65536, work_size / 65536));
CASE(cuMemsetD2D16, OLD | SIZED, (need_old()), AGAIN(16, fn(old_a, 65536, 1, 32768, OLD_SIZE / 65536)));
CASE(cuMemsetD2D16_v2, PTDS | SIZED, (need_blocks()), fn(w.a, 65536, 1, 32768, work_size / 65536));
CASE(cuMemsetD2D32, OLD | SIZED, (need_old()), AGAIN(16, fn(old_a, 65536, 1, 16384, OLD_SIZE / 65536)));
CASE(cuMemsetD2D32_v2, PTDS | SIZED, (need_blocks()), fn(w.a, 65536, 1, 16384, work_size / 65536));
CASE(cuMemsetD8Async, PTSZ | SIZED, (need_blocks()), fn(w.a, 1, work_size, w.stream));
CASE(cuMemsetD16Async, PTSZ | SIZED, (need_blocks()), fn(w.a, 1, work_size / 2, w.stream));
CASE(cuMemsetD32Async, PTSZ | SIZED, (need_blocks()), fn(w.a, 1, work_size / 4, w.stream));
CASE(cuMemsetD2D8Async, PTSZ | SIZED, (need_blocks()), fn(w.a, 65536, 1, 65536, work_size / 65536, w.stream));
CASE(cuMemsetD2D16Async, PTSZ | SIZED, (need_blocks()), fn(w.a, 65536, 1, 32768, work_size / 65536, w.stream));
CASE(cuMemsetD2D32Async, PTSZ | SIZED, (need_blocks()), fn(w.a, 65536, 1, 16384, work_size / 65536, w.stream));

/* Arrays */
CASE(cuArrayCreate, OLD, (), ({ CUDA_ARRAY_DESCRIPTOR_v1 d = {2048, 2048, CU_AD_FORMAT_FLOAT, 4}; fn(&v.array, &d); }));
CASE(cuArrayCreate_v2, 0, (square()), fn(&v.array, &v.two));
CASE(cuArrayGetDescriptor, OLD, (need_old_lines()), ({ CUDA_ARRAY_DESCRIPTOR_v1 d; fn(&d, v.array); }));
CASE(cuArrayGetDescriptor_v2, 0, (need_square()), fn(&v.two, v.array));
CASE(cuArrayGetSparseProperties, 0, (need_sparse()), fn(&v.sparse, v.array));
CASE(cuMipmappedArrayGetSparseProperties, 0, (square(); v.three.Flags = CUDA_ARRAY3D_SPARSE; NEED(CU(cuMipmappedArrayCreate)(&v.mip, &v.three, 4))), fn(&v.sparse, v.mip));
CASE(cuArrayGetMemoryRequirements, 0, (square(); v.three.Flags = CUDA_ARRAY3D_DEFERRED_MAPPING; NEED(CU(cuArray3DCreate_v2)(&v.array, &v.three))), fn(&v.wants, v.array, w.device));
CASE(cuMipmappedArrayGetMemoryRequirements, 0, (square(); v.three.Flags = CUDA_ARRAY3D_DEFERRED_MAPPING; NEED(CU(cuMipmappedArrayCreate)(&v.mip, &v.three, 4))), fn(&v.wants, v.mip, w.device));
CASE(cuArrayGetPlane, 0, (v.three = (CUDA_ARRAY3D_DESCRIPTOR){2048, 2048, 0, CU_AD_FORMAT_NV12, 3, CUDA_ARRAY3D_SURFACE_LDST}; NEED(CU(cuArray3DCreate_v2)(&v.array, &v.three))), fn(&v.array2, v.array, 0));
CASE(cuArrayDestroy, 0, (need_square()), fn(v.array));
CASE(cuArray3DCreate, OLD, (), ({ CUDA_ARRAY3D_DESCRIPTOR_v1 d = {2048, 2048, 0, CU_AD_FORMAT_FLOAT, 4, 0}; fn(&v.array, &d); }));
CASE(cuArray3DCreate_v2, 0, (square()), fn(&v.array, &v.three));
VARIANT(cuArray3DCreate_v2, "sparse", 0, (square(); v.three.Flags = CUDA_ARRAY3D_SPARSE), fn(&v.array, &v.three));
VARIANT(cuArray3DCreate_v2, "deferred", 0, (square(); v.three.Flags = CUDA_ARRAY3D_DEFERRED_MAPPING), fn(&v.array, &v.three));
CASE(cuArray3DGetDescriptor, OLD, (need_old_lines()), ({ CUDA_ARRAY3D_DESCRIPTOR_v1 d; fn(&d, v.array); }));
CASE(cuArray3DGetDescriptor_v2, 0, (need_square()), fn(&v.three, v.array));
CASE(cuMipmappedArrayCreate, 0, (square()), fn(&v.mip, &v.three, 4));
CASE(cuMipmappedArrayGetLevel, 0, (need_mip()), fn(&v.array, v.mip, 1));
CASE(cuMipmappedArrayDestroy, 0, (need_mip()), fn(v.mip));
CASE(cuMemGetHandleForAddressRange, 0, (NEED(CU(cuMemAlloc_v2)(&v.p, TAKE))), fn(&v.fd, v.p, TAKE, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));

/* Virtual memory */
CASE(cuMemAddressReserve, 0, (), fn(&v.p, 1024 * MIB, 0, 0, 0));
CASE(cuMemAddressFree, 0, (NEED(CU(cuMemAddressReserve)(&v.p, 1024 * MIB, 0, 0, 0))), fn(v.p, 1024 * MIB));
CASE(cuMemCreate, 0, (properties()), fn(&v.handle, TAKE, &v.prop, 0));
VARIANT(cuMemCreate, "on the host", 0, (properties(); v.prop.location = (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_HOST_NUMA, .id = 0}), fn(&v.handle, TAKE, &v.prop, 0));
CASE(cuMemRelease, 0, (properties(); NEED(CU(cuMemCreate)(&v.handle, TAKE, &v.prop, 0))), fn(v.handle));
VARIANT(cuMemRelease, "mapped", 0, (need_mapped()), fn(v.handle));
VARIANT(cuMemRelease, "exported", 0, (need_exported()), fn(v.handle));
CASE(cuMemMap, 0, (need_handle()), fn(v.p, TAKE, 0, v.handle, 0));
CASE(cuMemMapArrayAsync, PTSZ, (
        need_sparse();
        properties();
        v.prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
        v.prop.allocFlags.usage = CU_MEM_CREATE_USAGE_TILE_POOL;
        NEED(CU(cuMemCreate)(&v.handle, 2 * MIB, &v.prop, 0));
        v.map.resourceType = CU_RESOURCE_TYPE_ARRAY;
        v.map.resource.array = v.array;
        v.map.subresourceType = CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL;
        v.map.subresource.sparseLevel.extentWidth = v.sparse.tileExtent.width;
        v.map.subresource.sparseLevel.extentHeight = v.sparse.tileExtent.height;
        v.map.subresource.sparseLevel.extentDepth = 1;
        v.map.memOperationType = CU_MEM_OPERATION_TYPE_MAP;
        v.map.memHandleType = CU_MEM_HANDLE_TYPE_GENERIC;
        v.map.memHandle.memHandle = v.handle;
        v.map.deviceBitMask = 1), fn(&v.map, 1, w.stream));
CASE(cuMemUnmap, 0, (need_mapped()), fn(v.p, TAKE));
VARIANT(cuMemUnmap, "the last", 0, (need_mapped(); NEED(CU(cuMemRelease)(v.handle))), fn(v.p, TAKE));
CASE(cuMemSetAccess, 0, (need_handle(); NEED(CU(cuMemMap)(v.p, TAKE, 0, v.handle, 0))), fn(v.p, TAKE, &v.access, 1));
CASE(cuMemGetAccess, 0, (need_mapped()), fn(&v.flags, &v.location, v.p));
CASE(cuMemExportToShareableHandle, 0, (need_handle()), fn(&v.fd, v.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
CASE(cuMemImportFromShareableHandle, 0, (need_exported()), fn(&v.handle2, (void *)(uintptr_t)v.fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
CASE(cuMemGetAllocationGranularity, 0, (properties()), fn(&v.n, &v.prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
CASE(cuMemGetAllocationPropertiesFromHandle, 0, (need_handle()), fn(&v.prop, v.handle));
CASE(cuMemRetainAllocationHandle, 0, (need_mapped()), fn(&v.handle2, (void *)v.p));

/* Stream-ordered memory */
CASE(cuMemFreeAsync, PTSZ | OWN, (need_pooled()), fn(v.p, w.stream));
CASE(cuMemAllocAsync, PTSZ | OWN, (), fn(&v.p, TAKE, w.stream));
CASE(cuMemPoolTrimTo, OWN, (need_kept()), fn(v.pool, 0));
CASE(cuMemPoolSetAttribute, OWN, (need_kept(); v.id = 0), fn(v.pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &v.id));
CASE(cuMemPoolGetAttribute, 0, (need_pool()), fn(v.pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &v.id));
CASE(cuMemPoolSetAccess, 0, (need_pool()), fn(v.pool, &v.access, 1));
CASE(cuMemPoolGetAccess, 0, (need_pool()), ({ CUmemAccess_flags f; fn(&f, v.pool, &v.location); }));
CASE(cuMemPoolCreate, 0, (properties()), fn(&v.pool, &v.pool_props));
CASE(cuMemPoolDestroy, OWN, (need_kept()), fn(v.pool));
CASE(cuMemGetDefaultMemPool, 0, (properties()), fn(&v.pool, &v.location, CU_MEM_ALLOCATION_TYPE_PINNED));
CASE(cuMemGetMemPool, 0, (properties()), fn(&v.pool, &v.location, CU_MEM_ALLOCATION_TYPE_PINNED));
CASE(cuMemSetMemPool, OWN, (need_pool()), fn(&v.location, CU_MEM_ALLOCATION_TYPE_PINNED, v.pool));
CASE(cuMemAllocFromPoolAsync, PTSZ | OWN, (need_pool()), fn(&v.p, TAKE, v.pool, w.stream));
CASE(cuMemPoolExportToShareableHandle, 0, (need_pool()), fn(&v.fd, v.pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
CASE(cuMemPoolImportFromShareableHandle, OWN, (need_pool_import()), fn(&v.pool2, (void *)(uintptr_t)v.fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
CASE(cuMemPoolExportPointer, OWN, (need_pool(); NEED(CU(cuMemAllocFromPoolAsync)(&v.p, TAKE, v.pool, w.stream))), fn(&v.shared_pointer, v.p));
CASE(cuMemPoolImportPointer, OWN, (need_pool_import(); NEED(CU(cuMemPoolImportFromShareableHandle)(&v.pool2, (void *)(uintptr_t)v.fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0))), fn(&v.q, v.pool2, &v.shared_pointer));

/* Multicast */
NOT_HERE(cuMulticastCreate, 0, SWITCH);
NOT_HERE(cuMulticastAddDevice, 0, SWITCH);
NOT_HERE(cuMulticastBindMem, 0, SWITCH);
NOT_HERE(cuMulticastBindAddr, 0, SWITCH);
NOT_HERE(cuMulticastUnbind, 0, SWITCH);
NOT_HERE(cuMulticastGetGranularity, 0, SWITCH);

/* Unified addressing */
CASE(cuPointerGetAttribute, 0, (need_blocks()), fn(&v.context, CU_POINTER_ATTRIBUTE_CONTEXT, w.a));
CASE(cuPointerGetAttributes, 0, (need_blocks()), ({ CUpointer_attribute a = CU_POINTER_ATTRIBUTE_CONTEXT; void *d = &v.context; fn(1, &a, &d, w.a); }));
CASE(cuPointerSetAttribute, 0, (NEED(CU(cuMemAlloc_v2)(&v.p, TAKE)); v.i = 1), fn(&v.i, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, v.p));
CASE(cuMemPrefetchAsync, PTSZ | HOST | PAID, (need_managed()), fn(v.p, TAKE, w.device, w.stream));
CASE(cuMemPrefetchAsync_v2, PTSZ | HOST | PAID, (need_managed()), fn(v.p, TAKE, v.location, 0, w.stream));
CASE(cuMemAdvise, PAID, (need_managed()), fn(v.p, TAKE, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, w.device));
CASE(cuMemAdvise_v2, PAID, (need_managed()), fn(v.p, TAKE, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, v.location));
CASE(cuMemPrefetchBatchAsync, PTSZ | HOST | PAID, (need_managed()), fn(v.pointers, v.sizes, 1, &v.location, &v.sizes[1], 1, 0, w.stream));
CASE(cuMemDiscardBatchAsync, PTSZ | HOST | PAID, (need_managed()), fn(v.pointers, v.sizes, 1, 0, w.stream));
CASE(cuMemDiscardAndPrefetchBatchAsync, PTSZ | HOST | PAID, (need_managed()), fn(v.pointers, v.sizes, 1, &v.location, &v.sizes[1], 1, 0, w.stream));
CASE(cuMemRangeGetAttribute, 0, (need_managed()), fn(&v.i, 4, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, v.p, TAKE));
CASE(cuMemRangeGetAttributes, 0, (need_managed()), ({ CUmem_range_attribute a = CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY; void *d = &v.i; size_t n = 4; fn(&d, &n, &a, 1, v.p, TAKE); }));

/* Streams */
CASE(cuStreamCreate, LATE, (), EACH_STREAM(fn(s, 0)));
CASE(cuStreamCreateWithPriority, LATE, (), EACH_STREAM(fn(s, 0, 0)));
CASE(cuStreamGetPriority, PTSZ, (), fn(w.stream, &v.i));
CASE(cuStreamGetDevice, PTSZ, (), fn(w.stream, &v.i));
CASE(cuStreamGetFlags, PTSZ, (), fn(w.stream, &v.u));
CASE(cuStreamGetId, PTSZ, (), fn(w.stream, &v.flags));
CASE(cuStreamGetCtx, PTSZ, (), fn(w.stream, &v.context));
CASE(cuStreamGetCtx_v2, PTSZ, (), fn(w.stream, &v.context, &v.green));
CASE(cuStreamWaitEvent, PTSZ, (need_event()), fn(w.stream, v.event, 0));
CASE(cuStreamAddCallback, PTSZ, (), fn(w.stream, called_back, NULL, 0));
CASE(cuStreamBeginCapture, OWN | FREE, (need_capturable()), fn(v.capturing));
CASE(cuStreamBeginCapture_ptsz, OWN | FREE, (need_capturable()), fn(v.capturing));
CASE(cuStreamBeginCapture_v2, PTSZ | FREE, (need_capturable()), fn(v.capturing, CU_STREAM_CAPTURE_MODE_RELAXED));
CASE(cuStreamBeginCaptureToGraph, PTSZ | FREE, (need_capturable(); need_graph()), fn(v.capturing, v.graph, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_RELAXED));
CASE(cuThreadExchangeStreamCaptureMode, FREE, (v.mode = CU_STREAM_CAPTURE_MODE_GLOBAL), fn(&v.mode));
CASE(cuStreamEndCapture, PTSZ | FREE, (need_capture(); v.stream = v.capturing), ({ v.capturing = NULL; fn(v.stream, &v.graph); }));
CASE(cuStreamIsCapturing, PTSZ | FREE, (need_capture()), fn(v.capturing, &v.status));
CASE(cuStreamGetCaptureInfo, FREE, (need_capture()), fn(v.capturing, &v.status, &v.id));
CASE(cuStreamGetCaptureInfo_ptsz, FREE, (need_capture()), fn(v.capturing, &v.status, &v.id));
CASE(cuStreamGetCaptureInfo_v2, PTSZ | FREE, (need_capture()), fn(v.capturing, &v.status, &v.id, &v.graph, &v.found, &v.n));
CASE(cuStreamGetCaptureInfo_v3, PTSZ | FREE, (need_capture()), fn(v.capturing, &v.status, &v.id, &v.graph, &v.found, &v.found_edges, &v.n));
CASE(cuStreamUpdateCaptureDependencies, PTSZ | FREE, (need_capture()), fn(v.capturing, NULL, 0, CU_STREAM_SET_CAPTURE_DEPENDENCIES));
CASE(cuStreamUpdateCaptureDependencies_v2, PTSZ | FREE, (need_capture()), fn(v.capturing, NULL, NULL, 0, CU_STREAM_SET_CAPTURE_DEPENDENCIES));
CASE(cuStreamAttachMemAsync, PTSZ | PAID, (need_managed()), fn(w.stream, v.p, 0, CU_MEM_ATTACH_GLOBAL));
CASE(cuStreamQuery, PTSZ | FREE, (), fn(w.stream));
CASE(cuStreamSynchronize, PTSZ, (), fn(w.stream));
VARIANT(cuStreamSynchronize, "a pool releases memory", PTSZ | OWN | FREE, (need_pooled(); NEED(CU(cuMemFreeAsync)(v.p, w.stream))), fn(w.stream));
CASE(cuStreamDestroy, 0, (EACH_STREAM((NEED(CU(cuStreamCreate)(s, 0)), CUDA_SUCCESS))), EACH_STREAM(fn(*s)));
CASE(cuStreamDestroy_v2, LATE, (EACH_STREAM((NEED(CU(cuStreamCreate)(s, 0)), CUDA_SUCCESS))), EACH_STREAM(fn(*s)));
CASE(cuStreamCopyAttributes, PTSZ, (NEED(CU(cuStreamCreate)(&v.stream, 0))), fn(v.stream, w.stream));
CASE(cuStreamGetAttribute, PTSZ, (), fn(w.stream, CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY, &v.attribute));
CASE(cuStreamSetAttribute, PTSZ, (v.attribute.syncPolicy = CU_SYNC_POLICY_AUTO), fn(w.stream, CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY, &v.attribute));

/* Events */
CASE(cuEventCreate, 0, (), AGAIN(4096, fn(&v.event, 0)));
CASE(cuEventRecord, PTSZ, (), fn(w.event, w.stream));
CASE(cuEventRecordWithFlags, PTSZ, (), fn(w.event, w.stream, 0));
CASE(cuEventQuery, 0, (need_event()), fn(v.event));
CASE(cuEventSynchronize, 0, (need_event()), fn(v.event));
CASE(cuEventDestroy, 0, (need_event()), fn(v.event));
CASE(cuEventDestroy_v2, 0, (need_event()), fn(v.event));
CASE(cuEventElapsedTime, 0, (need_event()), fn(&v.f, v.event, v.event2));
CASE(cuEventElapsedTime_v2, 0, (need_event()), fn(&v.f, v.event, v.event2));

/* External resources */
CASE(cuImportExternalMemory, OWN, (need_external()), fn(&v.external, &v.external_of));
CASE(cuExternalMemoryGetMappedBuffer, OWN, (need_imported()), fn(&v.q, v.external, &v.buffer_of));
CASE(cuExternalMemoryGetMappedMipmappedArray, OWN, (need_imported()), fn(&v.mip, v.external, &v.array_of));
CASE(cuDestroyExternalMemory, OWN, (need_imported()), fn(v.external));
NOT_HERE(cuImportExternalSemaphore, 0, SEMAPHORE);
NOT_HERE(cuSignalExternalSemaphoresAsync, PTSZ, SEMAPHORE);
NOT_HERE(cuWaitExternalSemaphoresAsync, PTSZ, SEMAPHORE);
NOT_HERE(cuDestroyExternalSemaphore, 0, SEMAPHORE);

/* Memory operations in streams */
CASE(cuStreamWaitValue32, PTSZ, (need_blocks()), fn(w.stream, w.a, 0, CU_STREAM_WAIT_VALUE_GEQ));
CASE(cuStreamWaitValue32_v2, PTSZ, (need_blocks()), fn(w.stream, w.a, 0, CU_STREAM_WAIT_VALUE_GEQ));
CASE(cuStreamWaitValue64, PTSZ, (need_blocks()), fn(w.stream, w.a, 0, CU_STREAM_WAIT_VALUE_GEQ));
CASE(cuStreamWaitValue64_v2, PTSZ, (need_blocks()), fn(w.stream, w.a, 0, CU_STREAM_WAIT_VALUE_GEQ));
CASE(cuStreamWriteValue32, PTSZ, (need_blocks()), fn(w.stream, w.a, 1, 0));
CASE(cuStreamWriteValue32_v2, PTSZ, (need_blocks()), fn(w.stream, w.a, 1, 0));
CASE(cuStreamWriteValue64, PTSZ, (need_blocks()), fn(w.stream, w.a, 1, 0));
CASE(cuStreamWriteValue64_v2, PTSZ, (need_blocks()), fn(w.stream, w.a, 1, 0));
CASE(cuStreamBatchMemOp, PTSZ, (memops()), fn(w.stream, 1, v.memops, 0));
CASE(cuStreamBatchMemOp_v2, PTSZ, (memops()), fn(w.stream, 1, v.memops, 0));

/* Execution */
CASE(cuFuncGetAttribute, 0, (), fn(&v.i, CU_FUNC_ATTRIBUTE_NUM_REGS, w.burn));
CASE(cuFuncSetAttribute, 0, (), fn(w.burn, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1024));
CASE(cuFuncSetCacheConfig, 0, (), fn(w.burn, CU_FUNC_CACHE_PREFER_NONE));
CASE(cuFuncGetModule, 0, (), fn(&v.module, w.burn));
CASE(cuFuncGetName, 0, (), fn(&v.text, w.burn));
CASE(cuFuncGetParamInfo, 0, (), fn(w.burn, 0, &v.n, &v.n2));
CASE(cuFuncIsLoaded, 0, (), ({ CUfunctionLoadingState s; fn(&s, w.burn); }));
CASE(cuFuncLoad, LATE, (NEED(CU(cuModuleLoadData)(&v.module, empty_ptx)); NEED(CU(cuModuleGetFunction)(&v.function, v.module, "burn"))), fn(v.function));
VARIANT(cuFuncLoad, "stack", OWN | LATE, (NEED(CU(cuModuleLoadData)(&v.module, stack_ptx)); NEED(CU(cuModuleGetFunction)(&v.function, v.module, "deep"))), fn(v.function));
CASE(cuLaunchKernel, PTSZ | SIZED, (), fn(w.burn, KERNEL_ARGUMENTS, NULL));
VARIANT(cuLaunchKernel, "of a library", PTSZ | LATE, (need_kernel(large_ptx)), fn((CUfunction)v.kernel, KERNEL_ARGUMENTS, NULL));
VARIANT(cuLaunchKernel, "stack", PTSZ | OWN | LATE, (NEED(CU(cuModuleLoadData)(&v.module, stack_ptx)); NEED(CU(cuModuleGetFunction)(&v.function, v.module, "deep")); v.arguments[0] = &v.id), fn(v.function, 1, 1, 1, 1, 1, 1, 0, w.stream, v.arguments, NULL));
CASE(cuLaunchKernelEx, PTSZ | SIZED, (), fn(launch_config(), w.burn, burn_arguments(), NULL));
CASE(cuLaunchCooperativeKernel, PTSZ | SIZED, (), fn(w.burn, KERNEL_ARGUMENTS));
CASE(cuLaunchCooperativeKernelMultiDevice, SIZED, (), ({ v.launch = (CUDA_LAUNCH_PARAMS){w.burn, KERNEL_ARGUMENTS}; fn(&v.launch, 1, 0); }));
CASE(cuLaunchHostFunc, PTSZ, (), fn(w.stream, do_nothing, NULL));
CASE(cuFuncSetBlockShape, 0, (), fn(w.burn, 1, 1, 1));
CASE(cuFuncSetSharedSize, 0, (), fn(w.burn, 0));
CASE(cuParamSetSize, 0, (), fn(w.burn, 8));
CASE(cuParamSeti, 0, (), fn(w.burn, 0, 1));
CASE(cuParamSetf, 0, (), fn(w.burn, 0, 1));
CASE(cuParamSetv, 0, (), fn(w.burn, 0, &v.ns, 8));
CASE(cuLaunch, 0, (old_parameters()), fn(w.burn));
CASE(cuLaunchGrid, 0, (old_parameters()), fn(w.burn, 1, 1));
CASE(cuLaunchGridAsync, 0, (old_parameters()), fn(w.burn, 1, 1, w.stream));
CASE(cuParamSetTexRef, 0, (need_texref()), fn(w.burn, CU_PARAM_TR_DEFAULT, v.texref));
CASE(cuFuncSetSharedMemConfig, 0, (), fn(w.burn, CU_SHARED_MEM_CONFIG_DEFAULT_BANK_SIZE));

/* Graphs */
CASE(cuGraphCreate, 0, (), fn(&v.graph, 0));
CASE(cuGraphAddKernelNode, 0, (need_graph()), fn(&v.node, v.graph, NULL, 0, &v.kernel_node1));
CASE(cuGraphAddKernelNode_v2, 0, (need_graph()), fn(&v.node, v.graph, NULL, 0, &v.kernel_node));
CASE(cuGraphKernelNodeGetParams, 0, (need_kernel_node()), fn(v.node, &v.kernel_node1));
CASE(cuGraphKernelNodeGetParams_v2, 0, (need_kernel_node()), fn(v.node, &v.kernel_node));
CASE(cuGraphKernelNodeSetParams, 0, (need_kernel_node()), fn(v.node, &v.kernel_node1));
CASE(cuGraphKernelNodeSetParams_v2, 0, (need_kernel_node()), fn(v.node, &v.kernel_node));
CASE(cuGraphAddMemcpyNode, 0, (need_graph(); copy3()), fn(&v.node, v.graph, NULL, 0, &v.copy3, w.context));
CASE(cuGraphMemcpyNodeGetParams, 0, (need_copy_node()), fn(v.node, &v.copy3));
CASE(cuGraphMemcpyNodeSetParams, 0, (need_copy_node()), fn(v.node, &v.copy3));
CASE(cuGraphAddMemsetNode, 0, (need_fill_node()), fn(&v.node, v.graph, NULL, 0, &v.fill_node, w.context));
CASE(cuGraphMemsetNodeGetParams, 0, (need_fill_node()), fn(v.node, &v.fill_node));
CASE(cuGraphMemsetNodeSetParams, 0, (need_fill_node()), fn(v.node, &v.fill_node));
CASE(cuGraphAddHostNode, 0, (need_graph()), fn(&v.node, v.graph, NULL, 0, &v.host_node));
CASE(cuGraphHostNodeGetParams, 0, (need_host_node()), fn(v.node, &v.host_node));
CASE(cuGraphHostNodeSetParams, 0, (need_host_node()), fn(v.node, &v.host_node));
CASE(cuGraphAddChildGraphNode, 0, (need_child_node()), fn(&v.node, v.graph, NULL, 0, v.graph2));
CASE(cuGraphChildGraphNodeGetGraph, 0, (need_child_node()), fn(v.node, &v.graph2));
CASE(cuGraphAddEmptyNode, 0, (need_graph()), fn(&v.node, v.graph, NULL, 0));
CASE(cuGraphAddEventRecordNode, 0, (need_graph()), fn(&v.node, v.graph, NULL, 0, w.event));
CASE(cuGraphEventRecordNodeGetEvent, 0, (need_record_node()), fn(v.node, &v.event));
CASE(cuGraphEventRecordNodeSetEvent, 0, (need_record_node()), fn(v.node, w.event));
CASE(cuGraphAddEventWaitNode, 0, (need_graph()), fn(&v.node, v.graph, NULL, 0, w.event));
CASE(cuGraphEventWaitNodeGetEvent, 0, (need_wait_node()), fn(v.node, &v.event));
CASE(cuGraphEventWaitNodeSetEvent, 0, (need_wait_node()), fn(v.node, w.event));
NOT_HERE(cuGraphAddExternalSemaphoresSignalNode, 0, SEMAPHORE);
NOT_HERE(cuGraphExternalSemaphoresSignalNodeGetParams, 0, SEMAPHORE);
NOT_HERE(cuGraphExternalSemaphoresSignalNodeSetParams, 0, SEMAPHORE);
NOT_HERE(cuGraphAddExternalSemaphoresWaitNode, 0, SEMAPHORE);
NOT_HERE(cuGraphExternalSemaphoresWaitNodeGetParams, 0, SEMAPHORE);
NOT_HERE(cuGraphExternalSemaphoresWaitNodeSetParams, 0, SEMAPHORE);
CASE(cuGraphAddBatchMemOpNode, 0, (need_graph(); memops()), fn(&v.node, v.graph, NULL, 0, &v.memop_node));
CASE(cuGraphBatchMemOpNodeGetParams, 0, (need_memop_node()), fn(v.node, &v.memop_node));
CASE(cuGraphBatchMemOpNodeSetParams, 0, (need_memop_node()), fn(v.node, &v.memop_node));
CASE(cuGraphExecBatchMemOpNodeSetParams, 0, (need_exec(need_memop_node)), fn(v.exec, v.node, &v.memop_node));
CASE(cuGraphAddMemAllocNode, OWN, (need_graph(); alloc_node()), fn(&v.node, v.graph, NULL, 0, &v.alloc_node));
CASE(cuGraphMemAllocNodeGetParams, 0, (need_alloc_node()), fn(v.node, &v.alloc_node));
CASE(cuGraphAddMemFreeNode, OWN, (need_alloc_node()), fn(&v.nodes[1], v.graph, &v.node, 1, v.alloc_node.dptr));
CASE(cuGraphMemFreeNodeGetParams, 0, (need_free_node()), fn(v.node, &v.p));
CASE(cuDeviceGraphMemTrim, OWN, (need_exec(need_free_node); NEED(CU(cuGraphLaunch)(v.exec, w.stream)); NEED(CU(cuStreamSynchronize)(w.stream))), fn(w.device));
CASE(cuDeviceGetGraphMemAttribute, 0, (), fn(w.device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &v.id));
CASE(cuDeviceSetGraphMemAttribute, 0, (), fn(w.device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH, &v.id));
CASE(cuGraphClone, 0, (need_kernel_node()), fn(&v.graph2, v.graph));
CASE(cuGraphNodeFindInClone, 0, (need_kernel_node(); NEED(CU(cuGraphClone)(&v.graph2, v.graph))), fn(&v.nodes[0], v.node, v.graph2));
CASE(cuGraphNodeGetType, 0, (need_kernel_node()), fn(v.node, &v.type));
CASE(cuGraphGetNodes, 0, (need_edge()), fn(v.graph, v.nodes, &v.n));
CASE(cuGraphGetRootNodes, 0, (need_edge()), fn(v.graph, v.nodes, &v.n));
CASE(cuGraphGetEdges, 0, (need_edge()), fn(v.graph, v.nodes, v.nodes + 8, &v.n));
CASE(cuGraphGetEdges_v2, 0, (need_edge()), fn(v.graph, v.nodes, v.nodes + 8, v.edges, &v.n));
CASE(cuGraphNodeGetDependencies, 0, (need_edge()), fn(v.node, v.nodes, &v.n));
CASE(cuGraphNodeGetDependencies_v2, 0, (need_edge()), fn(v.node, v.nodes, v.edges, &v.n));
CASE(cuGraphNodeGetDependentNodes, 0, (need_edge()), fn(v.nodes[0], v.nodes + 8, &v.n));
CASE(cuGraphNodeGetDependentNodes_v2, 0, (need_edge()), fn(v.nodes[0], v.nodes + 8, v.edges, &v.n));
CASE(cuGraphAddDependencies, 0, (need_two()), fn(v.graph, v.nodes, v.nodes + 1, 1));
CASE(cuGraphAddDependencies_v2, 0, (need_two()), fn(v.graph, v.nodes, v.nodes + 1, v.edges, 1));
CASE(cuGraphRemoveDependencies, 0, (need_edge()), fn(v.graph, v.nodes, v.nodes + 1, 1));
CASE(cuGraphRemoveDependencies_v2, 0, (need_edge()), fn(v.graph, v.nodes, v.nodes + 1, v.edges, 1));
CASE(cuGraphDestroyNode, 0, (need_kernel_node()), fn(v.node));
CASE(cuGraphInstantiate, 0, (need_kernel_node()), fn(&v.exec, v.graph, &v.node, v.buffer, sizeof v.buffer));
CASE(cuGraphInstantiate_v2, 0, (need_kernel_node()), fn(&v.exec, v.graph, &v.node, v.buffer, sizeof v.buffer));
CASE(cuGraphInstantiateWithFlags, 0, (need_kernel_node()), fn(&v.exec, v.graph, 0));
VARIANT(cuGraphInstantiateWithFlags, "memory", OWN, (need_free_node()), fn(&v.exec, v.graph, 0));
VARIANT(cuGraphInstantiateWithFlags, "of a library", LATE, (need_library_node()), fn(&v.exec, v.graph, 0));
VARIANT(cuGraphInstantiateWithFlags, "on the device", OWN | LATE, (need_kernel_node()), fn(&v.exec, v.graph, CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH));
CASE(cuGraphInstantiateWithParams, PTSZ, (need_kernel_node()), fn(&v.exec, v.graph, &v.instantiate));
VARIANT(cuGraphInstantiateWithParams, "upload", PTSZ | OWN, (need_free_node(); v.instantiate.flags = CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD; v.instantiate.hUploadStream = w.stream), fn(&v.exec, v.graph, &v.instantiate));
CASE(cuGraphExecGetFlags, 0, (need_exec(need_kernel_node)), fn(v.exec, &v.id));
CASE(cuGraphExecKernelNodeSetParams, 0, (need_exec(need_kernel_node)), fn(v.exec, v.node, &v.kernel_node1));
CASE(cuGraphExecKernelNodeSetParams_v2, 0, (need_exec(need_kernel_node)), fn(v.exec, v.node, &v.kernel_node));
CASE(cuGraphExecMemcpyNodeSetParams, 0, (need_exec(need_copy_node)), fn(v.exec, v.node, &v.copy3, w.context));
CASE(cuGraphExecMemsetNodeSetParams, 0, (need_exec(need_fill_node)), fn(v.exec, v.node, &v.fill_node, w.context));
CASE(cuGraphExecHostNodeSetParams, 0, (need_exec(need_host_node)), fn(v.exec, v.node, &v.host_node));
CASE(cuGraphExecChildGraphNodeSetParams, 0, (need_exec(need_child_node)), fn(v.exec, v.node, v.graph2));
CASE(cuGraphExecEventRecordNodeSetEvent, 0, (need_exec(need_record_node)), fn(v.exec, v.node, w.event));
CASE(cuGraphExecEventWaitNodeSetEvent, 0, (need_exec(need_wait_node)), fn(v.exec, v.node, w.event));
NOT_HERE(cuGraphExecExternalSemaphoresSignalNodeSetParams, 0, SEMAPHORE);
NOT_HERE(cuGraphExecExternalSemaphoresWaitNodeSetParams, 0, SEMAPHORE);
CASE(cuGraphNodeSetEnabled, 0, (need_exec(need_kernel_node)), fn(v.exec, v.node, 0));
CASE(cuGraphNodeGetEnabled, 0, (need_exec(need_kernel_node)), fn(v.exec, v.node, &v.u));
CASE(cuGraphUpload, PTSZ, (need_exec(need_kernel_node)), fn(v.exec, w.stream));
VARIANT(cuGraphUpload, "memory", PTSZ | OWN, (need_exec(need_free_node)), fn(v.exec, w.stream));
CASE(cuGraphLaunch, PTSZ, (need_exec(need_kernel_node)), fn(v.exec, w.stream));
VARIANT(cuGraphLaunch, "copy", PTSZ, (need_exec(need_copy_node)), fn(v.exec, w.stream));
VARIANT(cuGraphLaunch, "fill", PTSZ, (need_exec(need_fill_node)), fn(v.exec, w.stream));
VARIANT(cuGraphLaunch, "child", PTSZ, (need_exec(need_child_node)), fn(v.exec, w.stream));
VARIANT(cuGraphLaunch, "memory", PTSZ | OWN, (need_exec(need_free_node)), fn(v.exec, w.stream));
VARIANT(cuGraphLaunch, "memory that stays", PTSZ | OWN, (need_exec(need_alloc_node)), fn(v.exec, w.stream));
CASE(cuGraphExecDestroy, 0, (need_exec(need_kernel_node)), fn(v.exec));
VARIANT(cuGraphExecDestroy, "memory", OWN, (need_exec(need_free_node); NEED(CU(cuGraphUpload)(v.exec, w.stream)); NEED(CU(cuStreamSynchronize)(w.stream))), fn(v.exec));
CASE(cuGraphDestroy, 0, (need_kernel_node()), fn(v.graph));
CASE(cuGraphExecUpdate, 0, (need_exec(need_kernel_node)), fn(v.exec, v.graph, &v.node, &v.update_result));
CASE(cuGraphExecUpdate_v2, 0, (need_exec(need_kernel_node)), fn(v.exec, v.graph, &v.update));
CASE(cuGraphKernelNodeCopyAttributes, 0, (need_kernel_node(); NEED(CU(cuGraphAddKernelNode_v2)(&v.nodes[0], v.graph, NULL, 0, &v.kernel_node))), fn(v.nodes[0], v.node));
CASE(cuGraphKernelNodeGetAttribute, 0, (need_kernel_node()), fn(v.node, CU_LAUNCH_ATTRIBUTE_PRIORITY, &v.attribute));
CASE(cuGraphKernelNodeSetAttribute, 0, (need_kernel_node()), fn(v.node, CU_LAUNCH_ATTRIBUTE_PRIORITY, &v.attribute));
CASE(cuGraphDebugDotPrint, 0, (need_kernel_node()), fn(v.graph, "/dev/null", 0));
CASE(cuUserObjectCreate, 0, (), fn(&v.object, NULL, do_nothing, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
CASE(cuUserObjectRetain, 0, (need_object()), fn(v.object, 1));
CASE(cuUserObjectRelease, 0, (need_object()), fn(v.object, 1));
CASE(cuGraphRetainUserObject, 0, (need_graph(); need_object()), fn(v.graph, v.object, 1, 0));
CASE(cuGraphReleaseUserObject, 0, (need_graph(); need_object(); NEED(CU(cuGraphRetainUserObject)(v.graph, v.object, 1, 0))), fn(v.graph, v.object, 1));
CASE(cuGraphAddNode, 0, (need_graph()), fn(&v.node, v.graph, NULL, 0, kernel_params()));
CASE(cuGraphAddNode_v2, 0, (need_graph()), fn(&v.node, v.graph, NULL, NULL, 0, kernel_params()));
CASE(cuGraphNodeSetParams, 0, (need_kernel_node()), fn(v.node, kernel_params()));
CASE(cuGraphExecNodeSetParams, 0, (need_exec(need_kernel_node)), fn(v.exec, v.node, kernel_params()));
CASE(cuGraphConditionalHandleCreate, 0, (need_graph()), fn(&v.condition, v.graph, w.context, 0, 0));

/* Occupancy */
CASE(cuOccupancyMaxActiveBlocksPerMultiprocessor, 0, (), fn(&v.i, w.burn, 32, 0));
VARIANT(cuOccupancyMaxActiveBlocksPerMultiprocessor, "of a library", LATE, (need_kernel(large_ptx)), fn(&v.i, (CUfunction)v.kernel, 32, 0));
CASE(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 0, (), fn(&v.i, w.burn, 32, 0, 0));
CASE(cuOccupancyMaxPotentialBlockSize, 0, (), fn(&v.i, &v.j, w.burn, NULL, 0, 0));
CASE(cuOccupancyMaxPotentialBlockSizeWithFlags, 0, (), fn(&v.i, &v.j, w.burn, NULL, 0, 0, 0));
CASE(cuOccupancyAvailableDynamicSMemPerBlock, 0, (), fn(&v.n, w.burn, 1, 32));
CASE(cuOccupancyMaxPotentialClusterSize, 0, (), fn(&v.i, w.burn, launch_config()));
CASE(cuOccupancyMaxActiveClusters, 0, (), ({ CUlaunchAttribute a = {.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, .value.clusterDim = {1, 1, 1}}; CUlaunchConfig *c = launch_config(); c->attrs = &a; c->numAttrs = 1; fn(&v.i, w.burn, c); }));

/* Textures and surfaces */
CASE(cuTexRefSetArray, 0, (need_texref(); need_square()), fn(v.texref, v.array, CU_TRSA_OVERRIDE_FORMAT));
CASE(cuTexRefSetMipmappedArray, 0, (need_texref(); need_mip()), fn(v.texref, v.mip, CU_TRSA_OVERRIDE_FORMAT));
CASE(cuTexRefSetAddress, OLD, (need_old(); need_texref()), fn(&v.u, v.texref, old_a, 65536));
CASE(cuTexRefSetAddress_v2, 0, (need_blocks(); need_texref()), fn(&v.n, v.texref, w.a, 65536));
CASE(cuTexRefSetAddress2D, OLD, (need_old(); need_texref()), ({ CUDA_ARRAY_DESCRIPTOR_v1 d = {512, 16, CU_AD_FORMAT_FLOAT, 4}; fn(v.texref, &d, old_a, 8192); }));
CASE(cuTexRefSetAddress2D_v2, 0, (need_blocks(); need_texref(); v.two = (CUDA_ARRAY_DESCRIPTOR){512, 16, CU_AD_FORMAT_FLOAT, 4}), fn(v.texref, &v.two, w.a, 8192));
CASE(cuTexRefSetAddress2D_v3, 0, (need_blocks(); need_texref(); v.two = (CUDA_ARRAY_DESCRIPTOR){512, 16, CU_AD_FORMAT_FLOAT, 4}), fn(v.texref, &v.two, w.a, 8192));
CASE(cuTexRefSetFormat, 0, (need_texref()), fn(v.texref, CU_AD_FORMAT_FLOAT, 4));
CASE(cuTexRefSetAddressMode, 0, (need_texref()), fn(v.texref, 0, CU_TR_ADDRESS_MODE_CLAMP));
CASE(cuTexRefSetFilterMode, 0, (need_texref()), fn(v.texref, CU_TR_FILTER_MODE_POINT));
CASE(cuTexRefSetMipmapFilterMode, 0, (need_texref()), fn(v.texref, CU_TR_FILTER_MODE_POINT));
CASE(cuTexRefSetMipmapLevelBias, 0, (need_texref()), fn(v.texref, 0));
CASE(cuTexRefSetMipmapLevelClamp, 0, (need_texref()), fn(v.texref, 0, 1));
CASE(cuTexRefSetMaxAnisotropy, 0, (need_texref()), fn(v.texref, 1));
CASE(cuTexRefSetBorderColor, 0, (need_texref()), ({ float c[4] = {0}; fn(v.texref, c); }));
CASE(cuTexRefSetFlags, 0, (need_texref()), fn(v.texref, 0));
CASE(cuTexRefGetAddress, OLD, (need_old(); need_texref(); NEED(CU(cuTexRefSetAddress)(&v.u, v.texref, old_a, 65536))), ({ CUdeviceptr_v1 p; fn(&p, v.texref); }));
CASE(cuTexRefGetAddress_v2, 0, (need_blocks(); need_texref(); NEED(CU(cuTexRefSetAddress_v2)(&v.n, v.texref, w.a, 65536))), fn(&v.p, v.texref));
CASE(cuTexRefGetArray, 0, (need_texref(); need_square(); NEED(CU(cuTexRefSetArray)(v.texref, v.array, CU_TRSA_OVERRIDE_FORMAT))), fn(&v.array2, v.texref));
CASE(cuTexRefGetMipmappedArray, 0, (need_texref(); need_mip(); NEED(CU(cuTexRefSetMipmappedArray)(v.texref, v.mip, CU_TRSA_OVERRIDE_FORMAT))), fn(&v.mip, v.texref));
CASE(cuTexRefGetAddressMode, 0, (need_texref()), ({ CUaddress_mode m; fn(&m, v.texref, 0); }));
CASE(cuTexRefGetFilterMode, 0, (need_texref()), ({ CUfilter_mode m; fn(&m, v.texref); }));
CASE(cuTexRefGetFormat, 0, (need_texref()), ({ CUarray_format f; fn(&f, &v.i, v.texref); }));
CASE(cuTexRefGetMipmapFilterMode, 0, (need_texref()), ({ CUfilter_mode m; fn(&m, v.texref); }));
CASE(cuTexRefGetMipmapLevelBias, 0, (need_texref()), fn(&v.f, v.texref));
CASE(cuTexRefGetMipmapLevelClamp, 0, (need_texref()), ({ float f; fn(&f, &v.f, v.texref); }));
CASE(cuTexRefGetMaxAnisotropy, 0, (need_texref()), fn(&v.i, v.texref));
CASE(cuTexRefGetBorderColor, 0, (need_texref()), ({ float c[4]; fn(c, v.texref); }));
CASE(cuTexRefGetFlags, 0, (need_texref()), fn(&v.u, v.texref));
CASE(cuTexRefCreate, 0, (), fn(&v.texref));
CASE(cuTexRefDestroy, 0, (need_texref()), fn(v.texref));
CASE(cuSurfRefSetArray, 0, (need_square(); NEED(CU(cuModuleLoadData)(&v.module, texture_ptx)); NEED(CU(cuModuleGetSurfRef)(&v.surfref, v.module, "canvas"))), fn(v.surfref, v.array, 0));
CASE(cuSurfRefGetArray, 0, (need_square(); NEED(CU(cuModuleLoadData)(&v.module, texture_ptx)); NEED(CU(cuModuleGetSurfRef)(&v.surfref, v.module, "canvas")); NEED(CU(cuSurfRefSetArray)(v.surfref, v.array, 0))), fn(&v.array2, v.surfref));
CASE(cuTexObjectCreate, 0, (need_texture()), fn(&v.texture, &v.texture_of, &v.sampler, &v.view));
CASE(cuTexObjectDestroy, 0, (need_texture(); NEED(CU(cuTexObjectCreate)(&v.texture, &v.texture_of, &v.sampler, &v.view))), fn(v.texture));
CASE(cuTexObjectGetResourceDesc, 0, (need_texture(); NEED(CU(cuTexObjectCreate)(&v.texture, &v.texture_of, &v.sampler, &v.view))), fn(&v.texture_of, v.texture));
CASE(cuTexObjectGetTextureDesc, 0, (need_texture(); NEED(CU(cuTexObjectCreate)(&v.texture, &v.texture_of, &v.sampler, &v.view))), fn(&v.sampler, v.texture));
CASE(cuTexObjectGetResourceViewDesc, 0, (need_texture(); NEED(CU(cuTexObjectCreate)(&v.texture, &v.texture_of, &v.sampler, &v.view))), fn(&v.view, v.texture));
CASE(cuSurfObjectCreate, 0, (need_texture()), fn(&v.surface, &v.texture_of));
CASE(cuSurfObjectDestroy, 0, (need_texture(); NEED(CU(cuSurfObjectCreate)(&v.surface, &v.texture_of))), fn(v.surface));
CASE(cuSurfObjectGetResourceDesc, 0, (need_texture(); NEED(CU(cuSurfObjectCreate)(&v.surface, &v.texture_of))), fn(&v.texture_of, v.surface));

/* Tensor maps */
#define TILES (const cuuint64_t[]){256, 256, 16, 16}, (const cuuint64_t[]){1024, 262144, 4194304}
#define ONES  (const cuuint32_t[]){1, 1, 1, 1}
CASE(cuTensorMapEncodeTiled, 0, (need_blocks()), fn(&v.tensor, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, (void *)w.a, TILES, (const cuuint32_t[]){16, 16}, ONES, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
CASE(cuTensorMapEncodeIm2col, 0, (need_blocks()), fn(&v.tensor, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, (void *)w.a, TILES, (const int[]){0, 0}, (const int[]){0, 0}, 16, 16, ONES, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
CASE(cuTensorMapEncodeIm2colWide, 0, (need_blocks()), fn(&v.tensor, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, (void *)w.a, TILES, 0, 0, 16, 16, ONES, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_IM2COL_WIDE_MODE_W, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
CASE(cuTensorMapReplaceAddress, 0, (need_blocks(); NEED(CU(cuTensorMapEncodeTiled)(&v.tensor, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, (void *)w.a, TILES, (const cuuint32_t[]){16, 16}, ONES, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))), fn(&v.tensor, (void *)w.b));

/* Peers */
CASE(cuDeviceCanAccessPeer, 0, (), fn(&v.i, w.device, w.device));
NOT_HERE(cuCtxEnablePeerAccess, 0, SECOND);
NOT_HERE(cuCtxDisablePeerAccess, 0, SECOND);
NOT_HERE(cuDeviceGetP2PAttribute, 0, SECOND);
NOT_HERE(cuDeviceGetP2PAtomicCapabilities, 0, SECOND);

/* Graphics */
NOT_HERE(cuGraphicsUnregisterResource, 0, GRAPHICS);
NOT_HERE(cuGraphicsSubResourceGetMappedArray, 0, GRAPHICS);
NOT_HERE(cuGraphicsResourceGetMappedMipmappedArray, 0, GRAPHICS);
NOT_HERE(cuGraphicsResourceGetMappedPointer, 0, GRAPHICS);
NOT_HERE(cuGraphicsResourceGetMappedPointer_v2, 0, GRAPHICS);
NOT_HERE(cuGraphicsResourceSetMapFlags, 0, GRAPHICS);
NOT_HERE(cuGraphicsResourceSetMapFlags_v2, 0, GRAPHICS);
NOT_HERE(cuGraphicsMapResources, PTSZ, GRAPHICS);
NOT_HERE(cuGraphicsUnmapResources, PTSZ, GRAPHICS);

/* Look-up */
CASE(cuGetProcAddress, 0, (), fn("cuMemAlloc", &v.ptr, 12000, 0));
CASE(cuGetProcAddress_v2, 0, (), ({ CUdriverProcAddressQueryResult s; fn("cuMemAlloc", &v.ptr, 13000, 0, &s); }));
VARIANT(cuGetProcAddress, "of everything", FREE, (looked_up = find("cuGetProcAddress")), count_leaks(look));
VARIANT(cuGetProcAddress_v2, "of everything", FREE, (looked_up = find("cuGetProcAddress_v2")), count_leaks(look_v2));
CASE(cuGetExportTable, 0, (memcpy(v.uuid.bytes, "\x6b\xd5\xfb\x6c\x5b\xf4\xe7\x4a\x89\x87\xd9\x39\x12\xfd\x9d\xf9", 16)), fn(&v.table, &v.uuid));

/* Core dumps */
CASE(cuCoredumpGetAttribute, 0, (v.n = sizeof v.i), fn(CU_COREDUMP_LIGHTWEIGHT, &v.i, &v.n));
CASE(cuCoredumpGetAttributeGlobal, 0, (v.n = sizeof v.i), fn(CU_COREDUMP_LIGHTWEIGHT, &v.i, &v.n));
CASE(cuCoredumpSetAttribute, OWN, (v.n = 1), fn(CU_COREDUMP_LIGHTWEIGHT, &v.i, &v.n));
CASE(cuCoredumpSetAttributeGlobal, OWN, (v.n = 1), fn(CU_COREDUMP_LIGHTWEIGHT, &v.i, &v.n));

/* Green contexts */
CASE(cuGreenCtxCreate, OWN | FREE, (need_green()), fn(&v.green, v.description, w.device, CU_GREEN_CTX_DEFAULT_STREAM));
CASE(cuGreenCtxDestroy, OWN | FREE, (need_green_context()), fn(v.green));
CASE(cuCtxFromGreenCtx, OWN | FREE, (need_green_context()), fn(&v.context, v.green));
CASE(cuDeviceGetDevResource, 0, (), fn(w.device, &v.resource, CU_DEV_RESOURCE_TYPE_SM));
CASE(cuCtxGetDevResource, 0, (), fn(w.context, &v.resource, CU_DEV_RESOURCE_TYPE_SM));
CASE(cuGreenCtxGetDevResource, OWN | FREE, (need_green_context()), fn(v.green, &v.resource, CU_DEV_RESOURCE_TYPE_SM));
CASE(cuDevSmResourceSplitByCount, 0, (NEED(CU(cuDeviceGetDevResource)(w.device, &v.resource, CU_DEV_RESOURCE_TYPE_SM)); v.u = 1), fn(v.resources, &v.u, &v.resource, NULL, 0, 8));
CASE(cuDevResourceGenerateDesc, 0, (need_green()), fn(&v.description, v.resources, 1));
CASE(cuGreenCtxRecordEvent, OWN | FREE, (need_green_context()), fn(v.green, w.event));
CASE(cuGreenCtxWaitEvent, OWN | FREE, (need_green_context(); need_event()), fn(v.green, v.event));
CASE(cuStreamGetGreenCtx, OWN | FREE, (), fn(w.stream, &v.green));
CASE(cuGreenCtxStreamCreate, OWN | FREE, (need_green_context()), EACH_STREAM(fn(s, v.green, CU_STREAM_NON_BLOCKING, 0)));
CASE(cuGreenCtxGetId, OWN | FREE, (need_green_context()), fn(v.green, &v.flags));

/* Logs */
CASE(cuLogsRegisterCallback, OWN, (), fn(logged, NULL, &v.logs));
CASE(cuLogsUnregisterCallback, OWN, (NEED(CU(cuLogsRegisterCallback)(logged, NULL, &v.logs))), fn(v.logs));
CASE(cuLogsCurrent, 0, (), fn(&v.log, 0));
CASE(cuLogsDumpToFile, 0, (NEED(CU(cuLogsCurrent)(&v.log, 0))), fn(&v.log, "/dev/null", 0));
CASE(cuLogsDumpToMemory, 0, (NEED(CU(cuLogsCurrent)(&v.log, 0)); v.n = sizeof v.buffer), fn(&v.log, v.buffer, &v.n, 0));

/* Checkpoints of another process */
#define CHECKPOINT (OWN | FREE | PAID)
CASE(cuCheckpointProcessGetRestoreThreadId, CHECKPOINT, (need_helper()), fn(v.pid, &v.i));
CASE(cuCheckpointProcessGetState, CHECKPOINT, (need_helper()), fn(v.pid, &v.state));
CASE(cuCheckpointProcessLock, CHECKPOINT, (need_helper()), fn(v.pid, NULL));
CASE(cuCheckpointProcessCheckpoint, CHECKPOINT, (need_helper(); NEED(CU(cuCheckpointProcessLock)(v.pid, NULL))), fn(v.pid, NULL));
CASE(cuCheckpointProcessRestore, CHECKPOINT, (need_helper(); NEED(CU(cuCheckpointProcessLock)(v.pid, NULL)); NEED(CU(cuCheckpointProcessCheckpoint)(v.pid, NULL))), fn(v.pid, NULL));
CASE(cuCheckpointProcessUnlock, CHECKPOINT, (need_helper(); NEED(CU(cuCheckpointProcessLock)(v.pid, NULL))), fn(v.pid, NULL));

/* ---- since CUDA 13.1 ---- */

#if CUDA_VERSION >= 13010
CASE(cuDevSmResourceSplit, 0, (NEED(CU(cuDeviceGetDevResource)(w.device, &v.resource, CU_DEV_RESOURCE_TYPE_SM))), ({ CU_DEV_SM_RESOURCE_GROUP_PARAMS p = {.smCount = 8}; fn(v.resources, 1, &v.resource, NULL, 0, &p); }));
CASE(cuStreamGetDevResource, PTSZ, (), fn(w.stream, &v.resource, CU_DEV_RESOURCE_TYPE_SM));
CASE(cuGraphGetId, 0, (need_graph()), fn(v.graph, &v.u));
CASE(cuGraphExecGetId, 0, (need_exec(need_kernel_node)), fn(v.exec, &v.u));
CASE(cuGraphNodeGetContainingGraph, 0, (need_kernel_node()), ({ CUgraph g; fn(v.node, &g); }));
CASE(cuGraphNodeGetLocalId, 0, (need_kernel_node()), fn(v.node, &v.u));
CASE(cuGraphNodeGetToolsId, 0, (need_kernel_node()), fn(v.node, &v.flags));
NOT_HERE(cuMulticastBindMem_v2, 0, SWITCH);
NOT_HERE(cuMulticastBindAddr_v2, 0, SWITCH);
#endif

/* ---- since CUDA 13.2 ---- */

#if CUDA_VERSION >= 13020
CASE(cuMemcpyWithAttributesAsync, PTSZ | SIZED, (need_blocks()), fn(w.b, w.a, work_size, batch_attributes(), w.stream));
VARIANT(cuMemcpyWithAttributesAsync, "to the host", PTSZ | SIZED | HOST, (need_host()), fn((CUdeviceptr)w.host, w.a, MOST(HOST_SIZE), batch_attributes(), w.stream));
CASE(cuMemcpy3DWithAttributesAsync, PTSZ | SIZED, (need_blocks()), fn(batch_op(), 0, w.stream));
CASE(cuLaunchHostFunc_v2, PTSZ, (), fn(w.stream, do_nothing, NULL, CU_HOST_TASK_BLOCKING));
CASE(cuFuncGetParamCount, 0, (), fn(w.burn, &v.n));
CASE(cuKernelGetParamCount, 0, (need_kernel(ptx)), fn(v.kernel, &v.n));
CASE(cuGraphNodeGetParams, 0, (need_kernel_node()), fn(v.node, &v.params));
CASE(cuCoredumpRegisterStartCallback, OWN, (), ({ CUcoredumpCallbackHandle h; fn(dumped, NULL, &h); }));
CASE(cuCoredumpRegisterCompleteCallback, OWN, (), ({ CUcoredumpCallbackHandle h; fn(dumped, NULL, &h); }));
CASE(cuCoredumpDeregisterStartCallback, OWN, (NEED(CU(cuCoredumpRegisterStartCallback)(dumped, NULL, (void *)&v.ptr))), fn(v.ptr));
CASE(cuCoredumpDeregisterCompleteCallback, OWN, (NEED(CU(cuCoredumpRegisterCompleteCallback)(dumped, NULL, (void *)&v.ptr))), fn(v.ptr));
NOT_HERE(cuStreamBeginCaptureToCig, PTSZ, CIG);
NOT_HERE(cuStreamEndCaptureToCig, PTSZ, CIG);
#endif

/* ---- since CUDA 13.3 ---- */

#if CUDA_VERSION >= 13030
CASE(cuStreamBeginRecaptureToGraph, PTSZ | FREE, (need_capturable(); need_graph()), fn(v.capturing, CU_STREAM_CAPTURE_MODE_RELAXED, v.graph, NULL, NULL));
NOT_HERE(cuLogicalEndpointIdReserve, 0, ENDPOINTS);
NOT_HERE(cuLogicalEndpointIdRelease, 0, ENDPOINTS);
NOT_HERE(cuLogicalEndpointCreate, 0, ENDPOINTS);
NOT_HERE(cuLogicalEndpointAddDevice, 0, ENDPOINTS);
NOT_HERE(cuLogicalEndpointDestroy, 0, ENDPOINTS);
NOT_HERE(cuLogicalEndpointBindAddr, 0, ENDPOINTS);
NOT_HERE(cuLogicalEndpointBindMem, 0, ENDPOINTS);
NOT_HERE(cuLogicalEndpointUnbind, 0, ENDPOINTS);
NOT_HERE(cuLogicalEndpointExport, 0, ENDPOINTS);
NOT_HERE(cuLogicalEndpointImport, 0, ENDPOINTS);
NOT_HERE(cuLogicalEndpointGetLimits, 0, ENDPOINTS);
NOT_HERE(cuLogicalEndpointQuery, 0, ENDPOINTS);
#endif

/* ---- since CUDA 13.4 ---- */

#if CUDA_VERSION >= 13040
CASE(cuDeviceGetFabricClusterUuid, 0, (), fn(&v.uuid, w.device));
CASE(cuDeviceGetCliqueCount, 0, (), fn(&v.n, w.device));
CASE(cuDeviceGetCliqueInfo, 0, (v.n = 8), ({ CUcliqueInfo c[8]; fn(c, &v.n, w.device); }));
CASE(cuMemGetLocationInfo, 0, (need_managed()), fn(v.p, TAKE, TAKE, 0, &v.location));
CASE(cuGraphAddNode_v3, 0, (need_graph()), fn(&v.node, v.graph, NULL, NULL, 0, kernel_params()));
CASE(cuGraphNodeSetParams_v2, 0, (need_kernel_node()), fn(v.node, kernel_params()));
NOT_HERE(cuCheckpointOperationComplete, 0, "needs a checkpoint to the program's own storage");
#endif

/* ---- since CUDA 13.5 ---- */

#if CUDA_VERSION >= 13050
CASE(cuTensorMapSetAllocationClass, 0, (need_blocks(); NEED(CU(cuTensorMapEncodeTiled)(&v.tensor, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, (void *)w.a, TILES, (const cuuint32_t[]){16, 16}, ONES, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))), fn(&v.tensor, CU_TENSOR_MAP_ALLOC_CLASS_SMALL, NULL));
NOT_HERE(cuFabricCpyBatchAsync, PTSZ, ENDPOINTS);
#endif
