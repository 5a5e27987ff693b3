/*
 * What the calls of the coverage probe need. coverage_probe_calls.h has the calls: one for each
 * function of cuda.h 13.0 to 13.5, and more for a function with several effects. This file is
 * included by coverage_probe.c, which explains the flags.
 *
 *   CASE(form, flags, (preparation), call)            `fn` is the form that is judged
 *   VARIANT(form, "what", flags, (preparation), call) another call of the same function
 *   NOT_HERE(form, flags, "reason")                   not possible on this machine
 *
 * The preparation uses the functions that a program would use, and is not measured.
 */
#pragma once

/* Variables of a call, set by its preparation; all are 0 before the preparation. */
static struct {
    CUdeviceptr p, q, pointers[4];
    CUarray array, array2;
    CUmipmappedArray mip;
    CUmodule module;
    CUlibrary library;
    CUkernel kernel;
    CUfunction function;
    CUlinkState link;
    CUgraph graph, graph2;
    CUgraphNode node, nodes[16];
    CUgraphExec exec;
    CUgraphConditionalHandle condition;
    CUgraphNodeParams params;
    CUgraphEdgeData edges[16];
    CUmemGenericAllocationHandle handle, handle2;
    CUmemAllocationProp prop;
    CUmemAccessDesc access;
    CUmemLocation location;
    CUmemPoolProps pool_props;
    CUmemPoolPtrExportData shared_pointer;
    CUmemoryPool pool, pool2;
    CUdevResource resource, resources[2];
    CUdevResourceDesc description;
    CUgreenCtx green;
    CUcontext context, context2;
    CUstream stream, streams[256];
    CUstream capturing; /* its capture is ended after the call */
    CUevent event, event2;
    CUexternalMemory external;
    CUtexref texref;
    CUsurfref surfref;
    CUtexObject texture;
    CUsurfObject surface;
    CUtensorMap tensor __attribute__((aligned(64)));
    CUuserObject object;
    CUuuid uuid;
    CUipcMemHandle shared_memory;
    CUipcEventHandle shared_event;
    CUasyncCallbackHandle notified;
    CUlogsCallbackHandle logs;
    CUlogIterator log;
    CUDA_ARRAY_DESCRIPTOR two;
    CUDA_ARRAY3D_DESCRIPTOR three;
    CUDA_MEMCPY2D copy2;
    CUDA_MEMCPY3D copy3;
    CUDA_MEMCPY3D_PEER peer;
    CUDA_KERNEL_NODE_PARAMS kernel_node;
    CUDA_KERNEL_NODE_PARAMS_v1 kernel_node1;
    CUDA_MEMSET_NODE_PARAMS fill_node;
    CUDA_HOST_NODE_PARAMS host_node;
    CUDA_BATCH_MEM_OP_NODE_PARAMS memop_node;
    CUDA_MEM_ALLOC_NODE_PARAMS alloc_node;
    CUDA_GRAPH_INSTANTIATE_PARAMS instantiate;
    CUgraphExecUpdateResultInfo update;
    CUgraphExecUpdateResult update_result;
    CUgraphNodeType type;
    CUDA_RESOURCE_DESC texture_of;
    CUDA_TEXTURE_DESC sampler;
    CUDA_RESOURCE_VIEW_DESC view;
    CUDA_ARRAY_SPARSE_PROPERTIES sparse;
    CUDA_ARRAY_MEMORY_REQUIREMENTS wants;
    CUarrayMapInfo map;
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC external_of;
    CUDA_EXTERNAL_MEMORY_BUFFER_DESC buffer_of;
    CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC array_of;
    CUstreamBatchMemOpParams memops[2];
    CUmemDecompressParams decompress;
    CUlaunchConfig config;
    CUDA_LAUNCH_PARAMS launch;
    CUlaunchAttributeValue attribute;
    CUprocessState state;
    CUstreamCaptureMode mode;
    CUstreamCaptureStatus status;
    void *ptr, *arguments[1], *link_image;
    const void *table;
    const char *text;
    const CUgraphNode *found;
    const CUgraphEdgeData *found_edges;
    size_t n, n2, sizes[2];
    cuuint64_t id;
    uint64_t ns;
    unsigned long long flags;
    unsigned int u, u2, list[4];
    int i, j, fd, pid;
    float f;
    char buffer[4096];
} v;

extern const struct one *const __start_cases[], *const __stop_cases[];

#define UNWRAP(...) __VA_ARGS__
#define CASE_(id, form, text, flag, before, ...)                                                   \
    static void before_##id(void)                                                                  \
    {                                                                                              \
        UNWRAP before;                                                                             \
    }                                                                                              \
    static CUresult call_##id(void *target)                                                        \
    {                                                                                              \
        const typeof(&form) fn = (typeof(&form))target;                                            \
        (void)fn;                                                                                  \
        return (__VA_ARGS__);                                                                      \
    }                                                                                              \
    ENTRY_(id, form, text, NULL, flag, before_##id, call_##id)
#define ENTRY_(id, form, text, why, flag, before, call)                                            \
    static const struct one one_##id = {#form, text, why, __LINE__, flag, before, call};           \
    static const struct one *const entry_##id __attribute__((section("cases"), used)) = &one_##id
#define CASE__(id, ...)               CASE_(id, __VA_ARGS__)
#define ENTRY__(id, ...)              ENTRY_(id, __VA_ARGS__)
#define CASE(form, flag, before, ...) CASE__(__COUNTER__, form, "", flag, before, __VA_ARGS__)
#define VARIANT(form, text, flag, before, ...)                                                     \
    CASE__(__COUNTER__, form, text, flag, before, __VA_ARGS__)
#define NOT_HERE(form, flag, why)                                                                  \
    _Static_assert(sizeof(typeof(&form)), "declared");                                             \
    ENTRY__(__COUNTER__, form, "", why, flag, NULL, NULL)

/* --- what preparations share ----------------------------------------------------------------- */

/* `burn` works for `ns` nanoseconds of the GPU's clock; the other kernels do nothing. */
static const char ptx[] = ".version 7.0\n.target sm_70\n.address_size 64\n"
                          ".visible .entry burn(.param .u64 ns)\n{\n"
                          "  .reg .u64 %n, %s, %t;\n  .reg .pred %q;\n"
                          "  ld.param.u64 %n, [ns];\n  mov.u64 %s, %globaltimer;\n"
                          "LOOP:\n  mov.u64 %t, %globaltimer;\n  sub.u64 %t, %t, %s;\n"
                          "  setp.lt.u64 %q, %t, %n;\n  @%q bra LOOP;\n  ret;\n}\n";
static const char empty_ptx[] = ".version 7.0\n.target sm_70\n.address_size 64\n"
                                ".visible .entry burn()\n{\n  ret;\n}\n";
static const char large_ptx[] = ".version 7.0\n.target sm_70\n.address_size 64\n"
                                ".visible .global .align 16 .b8 large[268435456];\n"
                                ".visible .entry burn()\n{\n  ret;\n}\n";
static const char managed_ptx[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .global .attribute(.managed) .align 8 .b8 shared[16777216];\n"
    ".visible .entry burn()\n{\n  ret;\n}\n";
static const char texture_ptx[] = ".version 7.0\n.target sm_70\n.address_size 64\n"
                                  ".global .texref picture;\n.global .surfref canvas;\n"
                                  ".visible .entry burn()\n{\n  ret;\n}\n";
/* 16 KiB of stack for each thread that the GPU can have, which the driver allocates for the
 * context. */
static const char stack_ptx[] = ".version 7.0\n.target sm_70\n.address_size 64\n"
                                ".visible .entry deep(.param .u64 at)\n{\n"
                                "  .local .align 8 .b8 stack[16384];\n"
                                "  .reg .u64 %a, %b;\n  ld.param.u64 %a, [at];\n"
                                "  mov.u64 %b, stack;\n  add.u64 %b, %b, %a;\n"
                                "  st.local.u64 [%b], %a;\n  ld.local.u64 %a, [%b+8];\n"
                                "  st.local.u64 [%b+16], %a;\n  ret;\n}\n";
static const char heap_ptx[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".extern .func (.param .b64 r) malloc (.param .b64 n);\n"
    ".visible .entry heap()\n{\n  .reg .b64 %a;\n"
    "  {\n  .param .b64 n;\n  .param .b64 r;\n  mov.b64 %a, 64;\n  st.param.b64 [n], %a;\n"
    "  call.uni (r), malloc, (n);\n  ld.param.b64 %a, [r];\n  }\n  ret;\n}\n";

static void make_shared(void)
{
    NEED(CU(cuStreamCreate)(&w.stream, 0));
    NEED(CU(cuEventCreate)(&w.event, 0));
    NEED(CU(cuModuleLoadData)(&w.module, ptx));
    NEED(CU(cuModuleGetFunction)(&w.burn, w.module, "burn"));
}

static void need_blocks(void)
{
    if (!w.a)
        NEED(CU(cuMemAlloc_v2)(&w.a, block));
    if (!w.b)
        NEED(CU(cuMemAlloc_v2)(&w.b, block));
}

static void need_host(void)
{
    void *p;

    need_blocks();
    if (!w.host) {
        NEED(CU(cuMemHostAlloc)(&p, HOST_SIZE, 0));
        w.host = p;
    }
}

/* Blocks of the 32-bit interface. */
static CUdeviceptr_v1 old_a, old_b;
#define OLD_SIZE ((unsigned int)MOST(64 * MIB))

static void need_old(void)
{
    if (!old_a)
        NEED(CU(cuMemAlloc)(&old_a, 64 * MIB));
    if (!old_b)
        NEED(CU(cuMemAlloc)(&old_b, 64 * MIB));
    if (!w.host)
        NEED(CU(cuMemHostAlloc)((void **)&w.host, HOST_SIZE, 0));
}

static void **burn_arguments(void)
{
    v.ns = work_ns;
    v.arguments[0] = &v.ns;
    return v.arguments;
}

/* One-dimensional arrays are small: 1 MiB. */
#define LINE      65536u
#define LINE_SIZE ((size_t)LINE * 16)

static void need_lines(void)
{
    need_host();
    v.two = (CUDA_ARRAY_DESCRIPTOR){LINE, 0, CU_AD_FORMAT_FLOAT, 4};
    NEED(CU(cuArrayCreate_v2)(&v.array, &v.two));
    NEED(CU(cuArrayCreate_v2)(&v.array2, &v.two));
}

static void need_old_lines(void)
{
    CUDA_ARRAY_DESCRIPTOR_v1 line = {LINE, 0, CU_AD_FORMAT_FLOAT, 4};

    need_old();
    NEED(CU(cuArrayCreate)(&v.array, &line));
    NEED(CU(cuArrayCreate)(&v.array2, &line));
}

/* Describes an array of 64 MiB. */
static void square(void)
{
    v.two = (CUDA_ARRAY_DESCRIPTOR){2048, 2048, CU_AD_FORMAT_FLOAT, 4};
    v.three =
        (CUDA_ARRAY3D_DESCRIPTOR){2048, 2048, 0, CU_AD_FORMAT_FLOAT, 4, CUDA_ARRAY3D_SURFACE_LDST};
}

static void need_square(void)
{
    square();
    NEED(CU(cuArray3DCreate_v2)(&v.array, &v.three));
}

static void need_mip(void)
{
    square();
    NEED(CU(cuMipmappedArrayCreate)(&v.mip, &v.three, 4));
}

static void need_sparse(void)
{
    square();
    v.three.Flags = CUDA_ARRAY3D_SPARSE;
    NEED(CU(cuArray3DCreate_v2)(&v.array, &v.three));
    NEED(CU(cuArrayGetSparseProperties)(&v.sparse, v.array));
}

static void need_texture(void)
{
    need_square();
    v.texture_of.resType = CU_RESOURCE_TYPE_ARRAY;
    v.texture_of.res.array.hArray = v.array;
    v.view = (CUDA_RESOURCE_VIEW_DESC){
        .format = CU_RES_VIEW_FORMAT_FLOAT_4X32, .width = 2048, .height = 2048};
}

static void need_texref(void)
{
    NEED(CU(cuTexRefCreate)(&v.texref));
}

static void copy2(void)
{
    need_host();
    v.copy2 = (CUDA_MEMCPY2D){.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                              .srcDevice = w.a,
                              .srcPitch = 65536,
                              .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                              .dstDevice = w.b,
                              .dstPitch = 65536,
                              .WidthInBytes = 65536};
}

static void copy3(void)
{
    need_host();
    v.copy3 = (CUDA_MEMCPY3D){.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                              .srcDevice = w.a,
                              .srcPitch = 65536,
                              .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                              .dstDevice = w.b,
                              .dstPitch = 65536,
                              .WidthInBytes = 65536,
                              .Depth = 1};
    v.copy3.Height = v.copy3.srcHeight = v.copy3.dstHeight = work_size / 65536;
}

static void copy_peer(void)
{
    need_blocks();
    v.peer = (CUDA_MEMCPY3D_PEER){.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                                  .srcDevice = w.a,
                                  .srcContext = w.context,
                                  .srcPitch = 65536,
                                  .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                                  .dstDevice = w.b,
                                  .dstContext = w.context,
                                  .dstPitch = 65536,
                                  .WidthInBytes = 65536,
                                  .Depth = 1};
}

#define TALL(copy)  ((copy).Height = work_size / 65536, &(copy))
#define TALL3(copy) ((copy).srcHeight = (copy).dstHeight = work_size / 65536, TALL(copy))

/* Returns a descriptor of the 32-bit interface, for the blocks of need_old(). */
static CUDA_MEMCPY2D_v1 *old_copy2(void)
{
    static CUDA_MEMCPY2D_v1 c;

    c = (CUDA_MEMCPY2D_v1){.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                           .srcDevice = old_a,
                           .srcPitch = 65536,
                           .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                           .dstDevice = old_b,
                           .dstPitch = 65536,
                           .WidthInBytes = 65536,
                           .Height = OLD_SIZE / 65536};
    return &c;
}

static CUDA_MEMCPY3D_v1 *old_copy3(void)
{
    static CUDA_MEMCPY3D_v1 c;

    c = (CUDA_MEMCPY3D_v1){.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                           .srcDevice = old_a,
                           .srcPitch = 65536,
                           .srcHeight = OLD_SIZE / 65536,
                           .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                           .dstDevice = old_b,
                           .dstPitch = 65536,
                           .dstHeight = OLD_SIZE / 65536,
                           .WidthInBytes = 65536,
                           .Height = OLD_SIZE / 65536,
                           .Depth = 1};
    return &c;
}

static CUmemcpyAttributes *batch_attributes(void)
{
    static CUmemcpyAttributes attributes;

    attributes = (CUmemcpyAttributes){.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
    v.pointers[0] = w.a;
    v.pointers[1] = w.b;
    v.sizes[0] = work_size;
    v.sizes[1] = 0;
    return &attributes;
}

static CUDA_MEMCPY3D_BATCH_OP *batch_op(void)
{
    static CUDA_MEMCPY3D_BATCH_OP op;
    CUmemLocation here = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = w.device};

    op = (CUDA_MEMCPY3D_BATCH_OP){
        .src = {.type = CU_MEMCPY_OPERAND_TYPE_POINTER, .op.ptr = {.ptr = w.a, .locHint = here}},
        .dst = {.type = CU_MEMCPY_OPERAND_TYPE_POINTER, .op.ptr = {.ptr = w.b, .locHint = here}},
        .extent = {65536, work_size / 65536, 1},
        .srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
    return &op;
}

/* Stored blocks of Deflate, which contain any data without compression. */
#define STORED       65535u
#define STORED_COUNT 512u

static void need_compressed(void)
{
    char *at;

    need_host();
    at = w.host;
    for (unsigned int i = 0; i < STORED_COUNT; i++) {
        const unsigned char head[] = {i == STORED_COUNT - 1, 0xff, 0xff, 0, 0};

        memcpy(at, head, sizeof head);
        at += sizeof head;
        memset(at, (int)i, STORED);
        at += STORED;
    }
    NEED(CU(cuMemcpyHtoD_v2)(w.a, w.host, (size_t)(at - w.host)));
    NEED(CU(cuMemHostAlloc)(&v.ptr, 4096, CU_MEMHOSTALLOC_DEVICEMAP));
    v.decompress = (CUmemDecompressParams){.srcNumBytes = (size_t)(at - w.host),
                                           .dstNumBytes = (size_t)STORED * STORED_COUNT,
                                           .dstActBytes = v.ptr,
                                           .src = (void *)w.a,
                                           .dst = (void *)w.b,
                                           .algo = CU_MEM_DECOMPRESS_ALGORITHM_DEFLATE};
}

static void properties(void)
{
    v.location = (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = w.device};
    v.prop = (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                   .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                   .location = v.location};
    v.access =
        (CUmemAccessDesc){.location = v.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    v.pool_props = (CUmemPoolProps){.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                    .location = v.location};
}

static void need_handle(void)
{
    properties();
    NEED(CU(cuMemCreate)(&v.handle, TAKE, &v.prop, 0));
    NEED(CU(cuMemAddressReserve)(&v.p, TAKE, 0, 0, 0));
}

static void need_mapped(void)
{
    need_handle();
    NEED(CU(cuMemMap)(v.p, TAKE, 0, v.handle, 0));
    NEED(CU(cuMemSetAccess)(v.p, TAKE, &v.access, 1));
}

static void need_exported(void)
{
    need_handle();
    NEED(CU(cuMemExportToShareableHandle)(&v.fd, v.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                          0));
}

static void need_pool(void)
{
    properties();
    NEED(CU(cuMemPoolCreate)(&v.pool, &v.pool_props));
}

/* A pool that keeps 64 MiB of unused memory. */
static void need_kept(void)
{
    need_pool();
    v.id = ~0ull;
    NEED(CU(cuMemPoolSetAttribute)(v.pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &v.id));
    NEED(CU(cuMemAllocFromPoolAsync)(&v.p, TAKE, v.pool, w.stream));
    NEED(CU(cuMemFreeAsync)(v.p, w.stream));
    NEED(CU(cuStreamSynchronize)(w.stream));
}

static void need_pooled(void)
{
    NEED(CU(cuMemAllocAsync)(&v.p, TAKE, w.stream));
    NEED(CU(cuStreamSynchronize)(w.stream));
}

static void need_pool_import(void)
{
    need_pool();
    NEED(CU(cuMemAllocFromPoolAsync)(&v.p, TAKE, v.pool, w.stream));
    NEED(CU(cuStreamSynchronize)(w.stream));
    NEED(CU(cuMemPoolExportPointer)(&v.shared_pointer, v.p));
    NEED(CU(cuMemPoolExportToShareableHandle)(&v.fd, v.pool,
                                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
}

static void need_managed(void)
{
    properties();
    NEED(CU(cuMemAllocManaged)(&v.p, TAKE, CU_MEM_ATTACH_GLOBAL));
    memset((void *)v.p, 1, TAKE);
    v.pointers[0] = v.p;
    v.sizes[0] = TAKE;
    v.sizes[1] = 0;
}

static void need_external(void)
{
    need_exported();
    v.external_of = (CUDA_EXTERNAL_MEMORY_HANDLE_DESC){
        .type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, .handle.fd = v.fd, .size = TAKE};
    v.buffer_of = (CUDA_EXTERNAL_MEMORY_BUFFER_DESC){.size = TAKE};
    square();
    v.array_of = (CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC){.arrayDesc = v.three, .numLevels = 1};
}

static void need_imported(void)
{
    need_external();
    NEED(CU(cuImportExternalMemory)(&v.external, &v.external_of));
}

static void need_library(const char *image)
{
    NEED(CU(cuLibraryLoadData)(&v.library, image, NULL, NULL, 0, NULL, NULL, 0));
}

static void need_kernel(const char *image)
{
    need_library(image);
    NEED(CU(cuLibraryGetKernel)(&v.kernel, v.library, "burn"));
}

static void need_file(const char *text)
{
    FILE *file;

    snprintf(v.buffer, sizeof v.buffer, "/tmp/coverage_probe-%d.ptx", (int)getpid());
    file = fopen(v.buffer, "we");
    need(!file || fwrite(text, strlen(text) + 1, 1, file) != 1 || fclose(file), "a file in /tmp");
}

static void need_link(void)
{
    NEED(CU(cuLinkCreate_v2)(0, NULL, NULL, &v.link));
}

static void need_linked(void)
{
    need_link();
    NEED(CU(cuLinkAddData_v2)(v.link, CU_JIT_INPUT_PTX, (void *)empty_ptx, sizeof empty_ptx, "x", 0,
                              NULL, NULL));
}

/* A fat binary around a cubin, as the compiler writes it. */
static void need_fatbin(void)
{
    static struct {
        uint32_t magic, version;
        const void *data;
        void *unused;
    } wrapper;
    static _Alignas(16) unsigned char fat[65536];
    int major, minor;

    need_linked();
    NEED(CU(cuLinkComplete)(v.link, &v.link_image, &v.n));
    NEED(CU(cuDeviceGetAttribute)(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, w.device));
    NEED(CU(cuDeviceGetAttribute)(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, w.device));
    need(v.n + 80 > sizeof fat, "room for the cubin");
    memset(fat, 0, sizeof fat);
    *(uint32_t *)fat = 0xba55ed50u;
    *(uint16_t *)(fat + 4) = 1;
    *(uint16_t *)(fat + 6) = 16;
    *(uint64_t *)(fat + 8) = v.n + 64;
    *(uint16_t *)(fat + 16) = 2; /* a cubin */
    *(uint16_t *)(fat + 18) = 0x101;
    *(uint32_t *)(fat + 20) = 64;
    *(uint64_t *)(fat + 24) = v.n;
    *(uint16_t *)(fat + 40) = 8; /* the version of its format, minor and major */
    *(uint16_t *)(fat + 42) = 1;
    *(uint32_t *)(fat + 44) = (uint32_t)(major * 10 + minor);
    *(uint64_t *)(fat + 56) = 0x11; /* 64 bit, Linux */
    memcpy(fat + 80, v.link_image, v.n);
    wrapper.magic = 0x466243b1u;
    wrapper.version = 1;
    wrapper.data = fat;
    v.ptr = &wrapper;
}

static CUlaunchConfig *launch_config(void)
{
    v.config = (CUlaunchConfig){1, 1, 1, 1, 1, 1, 0, w.stream, NULL, 0};
    return &v.config;
}

static void old_parameters(void)
{
    v.ns = work_ns;
    NEED(CU(cuFuncSetBlockShape)(w.burn, 1, 1, 1));
    NEED(CU(cuParamSetv)(w.burn, 0, &v.ns, 8));
    NEED(CU(cuParamSetSize)(w.burn, 8));
}

static void do_nothing(void *unused)
{
    (void)unused;
}

#if CUDA_VERSION >= 13020
static void dumped(void *unused, int pid, CUdevice device)
{
    (void)unused, (void)pid, (void)device;
}
#endif

static void called_back(CUstream stream, CUresult status, void *unused)
{
    (void)stream;
    (void)status;
    (void)unused;
}

static void notified(CUasyncNotificationInfo *info, void *unused, CUasyncCallbackHandle handle)
{
    (void)info;
    (void)unused;
    (void)handle;
}

static void logged(void *unused, CUlogLevel level, char *text, size_t n)
{
    (void)unused;
    (void)level;
    (void)text;
    (void)n;
}

/* Graphs, and nodes of each kind. */
static void need_graph(void)
{
    NEED(CU(cuGraphCreate)(&v.graph, 0));
    v.kernel_node = (CUDA_KERNEL_NODE_PARAMS){.func = w.burn,
                                              .gridDimX = 1,
                                              .gridDimY = 1,
                                              .gridDimZ = 1,
                                              .blockDimX = 1,
                                              .blockDimY = 1,
                                              .blockDimZ = 1,
                                              .kernelParams = burn_arguments()};
    v.kernel_node1 = (CUDA_KERNEL_NODE_PARAMS_v1){.func = w.burn,
                                                  .gridDimX = 1,
                                                  .gridDimY = 1,
                                                  .gridDimZ = 1,
                                                  .blockDimX = 1,
                                                  .blockDimY = 1,
                                                  .blockDimZ = 1,
                                                  .kernelParams = v.arguments};
    v.host_node = (CUDA_HOST_NODE_PARAMS){.fn = do_nothing};
}

static void need_kernel_node(void)
{
    need_graph();
    NEED(CU(cuGraphAddKernelNode_v2)(&v.node, v.graph, NULL, 0, &v.kernel_node));
}

static void need_copy_node(void)
{
    need_graph();
    copy3();
    NEED(CU(cuGraphAddMemcpyNode)(&v.node, v.graph, NULL, 0, &v.copy3, w.context));
}

static void need_fill_node(void)
{
    need_graph();
    need_blocks();
    v.fill_node = (CUDA_MEMSET_NODE_PARAMS){
        .dst = w.a, .pitch = 65536, .elementSize = 4, .width = 16384, .height = work_size / 65536};
    NEED(CU(cuGraphAddMemsetNode)(&v.node, v.graph, NULL, 0, &v.fill_node, w.context));
}

static void need_host_node(void)
{
    need_graph();
    NEED(CU(cuGraphAddHostNode)(&v.node, v.graph, NULL, 0, &v.host_node));
}

static void need_child_node(void)
{
    need_kernel_node();
    v.graph2 = v.graph;
    NEED(CU(cuGraphCreate)(&v.graph, 0));
    NEED(CU(cuGraphAddChildGraphNode)(&v.node, v.graph, NULL, 0, v.graph2));
}

static void need_record_node(void)
{
    need_graph();
    NEED(CU(cuGraphAddEventRecordNode)(&v.node, v.graph, NULL, 0, w.event));
}

static void need_wait_node(void)
{
    need_graph();
    NEED(CU(cuGraphAddEventWaitNode)(&v.node, v.graph, NULL, 0, w.event));
}

static void memops(void)
{
    need_blocks();
    v.memops[0].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    v.memops[0].writeValue.address = w.a;
    v.memops[0].writeValue.value = 1;
    v.memop_node =
        (CUDA_BATCH_MEM_OP_NODE_PARAMS){.ctx = w.context, .count = 1, .paramArray = v.memops};
}

static void need_memop_node(void)
{
    need_graph();
    memops();
    NEED(CU(cuGraphAddBatchMemOpNode)(&v.node, v.graph, NULL, 0, &v.memop_node));
}

static void alloc_node(void)
{
    properties();
    v.pool_props.handleTypes = CU_MEM_HANDLE_TYPE_NONE;
    v.alloc_node = (CUDA_MEM_ALLOC_NODE_PARAMS){.poolProps = v.pool_props,
                                                .accessDescs = &v.access,
                                                .accessDescCount = 1,
                                                .bytesize = TAKE};
}

static void need_alloc_node(void)
{
    need_graph();
    alloc_node();
    NEED(CU(cuGraphAddMemAllocNode)(&v.node, v.graph, NULL, 0, &v.alloc_node));
}

static void need_free_node(void)
{
    need_alloc_node();
    v.nodes[0] = v.node;
    NEED(CU(cuGraphAddMemFreeNode)(&v.node, v.graph, v.nodes, 1, v.alloc_node.dptr));
}

static void need_exec(void (*make)(void))
{
    make();
    NEED(CU(cuGraphInstantiateWithFlags)(&v.exec, v.graph, 0));
}

static void need_edge(void)
{
    need_graph();
    NEED(CU(cuGraphAddEmptyNode)(&v.nodes[0], v.graph, NULL, 0));
    NEED(CU(cuGraphAddEmptyNode)(&v.nodes[1], v.graph, v.nodes, 1));
    v.node = v.nodes[1];
    v.n = 16;
}

static void need_two(void)
{
    need_graph();
    NEED(CU(cuGraphAddEmptyNode)(&v.nodes[0], v.graph, NULL, 0));
    NEED(CU(cuGraphAddEmptyNode)(&v.nodes[1], v.graph, NULL, 0));
}

static CUgraphNodeParams *kernel_params(void)
{
    memset(&v.params, 0, sizeof v.params);
    v.params.type = CU_GRAPH_NODE_TYPE_KERNEL;
    v.params.kernel.func = w.burn;
    v.params.kernel.gridDimX = v.params.kernel.gridDimY = v.params.kernel.gridDimZ = 1;
    v.params.kernel.blockDimX = v.params.kernel.blockDimY = v.params.kernel.blockDimZ = 1;
    v.params.kernel.kernelParams = burn_arguments();
    return &v.params;
}

static void need_library_node(void)
{
    need_kernel(large_ptx);
    NEED(CU(cuGraphCreate)(&v.graph, 0));
    kernel_params();
    v.params.kernel.func = NULL;
    v.params.kernel.kern = v.kernel;
    NEED(CU(cuGraphAddNode_v2)(&v.node, v.graph, NULL, NULL, 0, &v.params));
}

static void need_object(void)
{
    NEED(CU(cuUserObjectCreate)(&v.object, NULL, do_nothing, 2, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
}

/* Relaxed mode allows this process to make other calls during the capture. */
static void need_capture(void)
{
    NEED(CU(cuStreamCreate)(&v.capturing, CU_STREAM_NON_BLOCKING));
    NEED(CU(cuStreamBeginCapture_v2)(v.capturing, CU_STREAM_CAPTURE_MODE_RELAXED));
}

/* For forms that begin a capture themselves: a stream that does not capture yet. */
static void need_capturable(void)
{
    NEED(CU(cuStreamCreate)(&v.capturing, CU_STREAM_NON_BLOCKING));
}

static void need_event(void)
{
    NEED(CU(cuEventCreate)(&v.event, 0));
    NEED(CU(cuEventRecord)(v.event, w.stream));
    NEED(CU(cuEventCreate)(&v.event2, 0));
    NEED(CU(cuEventRecord)(v.event2, w.stream));
    NEED(CU(cuStreamSynchronize)(w.stream));
}

static void need_green(void)
{
    NEED(CU(cuDeviceGetDevResource)(w.device, &v.resource, CU_DEV_RESOURCE_TYPE_SM));
    v.u = 1;
    NEED(CU(cuDevSmResourceSplitByCount)(v.resources, &v.u, &v.resource, NULL, 0, 8));
    NEED(CU(cuDevResourceGenerateDesc)(&v.description, v.resources, 1));
}

static void need_green_context(void)
{
    need_green();
    NEED(CU(cuGreenCtxCreate)(&v.green, v.description, w.device, CU_GREEN_CTX_DEFAULT_STREAM));
}

static void need_retained(void)
{
    NEED(CU(cuDevicePrimaryCtxRetain)(&v.context, w.device));
}

static void need_context(void)
{
    NEED(CU(cuCtxCreate_v2)(&v.context, 0, w.device));
}

static void need_old_context(void)
{
    NEED(CU(cuCtxCreate)(&v.context, 0, w.device));
}

struct shared {
    CUipcMemHandle memory;
    CUipcEventHandle event;
};

/* Runs in another process: shares a block and an event until its input ends. */
static int share(void)
{
    struct shared s = {0};
    CUdevice device;
    CUcontext context;
    CUdeviceptr p;
    CUevent event;
    char byte;

    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda || CU(cuInit)(0) || CU(cuDeviceGet)(&device, 0) ||
        CU(cuDevicePrimaryCtxRetain)(&context, device) || CU(cuCtxSetCurrent)(context) ||
        CU(cuMemAlloc_v2)(&p, TAKE))
        return 1;
    /* If sharing fails here, opening the handle fails as well, and that call is judged. */
    CU(cuIpcGetMemHandle)(&s.memory, p);
    if (CU(cuEventCreate)(&event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING) == 0)
        CU(cuIpcGetEventHandle)(&s.event, event);
    if (write(STDOUT_FILENO, &s, sizeof s) != (ssize_t)sizeof s)
        return 1;
    while (read(STDIN_FILENO, &byte, 1) > 0)
        continue;
    return 0;
}

static void need_helper(void)
{
    static int to[2], from[2];
    struct shared s;

    need(pipe2(to, O_CLOEXEC) || pipe2(from, O_CLOEXEC), "pipe2");
    helper = fork();
    if (helper == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(to[0], STDIN_FILENO);
        dup2(from[1], STDOUT_FILENO);
        execl(self, "coverage_probe", "--share", (char *)NULL);
        _exit(127);
    }
    close(to[0]);
    close(from[1]);
    need(read(from[0], &s, sizeof s) != (ssize_t)sizeof s, "a process that shares memory");
    v.shared_memory = s.memory;
    v.shared_event = s.event;
    v.pid = helper;
}

/* The interface versions in which a function got a new form, and versions between them. */
static const int versions[] = {2000,  2010,  2020,  3000,  3010,  3020,  4000,  4010,  5000,  5050,
                               6000,  6050,  7000,  7050,  8000,  9000,  9020,  10000, 10010, 10020,
                               11000, 11010, 11020, 11030, 11040, 11050, 11060, 11070, 11080, 12000,
                               12010, 12020, 12030, 12040, 12050, 12060, 12080, 12090, 13000};

typedef CUresult lookup(const char *name, int version, cuuint64_t flags, void **found);

/*
 * Returns the number of look-ups that bypass the control library: they return the driver's function
 * although the library that the program loaded exports another one. The result is 0 if no library
 * is interposed.
 */
static CUresult count_leaks(lookup *look)
{
    static struct {
        void *original, *ours;
    } hooked[4096];
    size_t n_hooked = 0, leaks = 0;

    for (const struct one *const *at = __start_cases; at < __stop_cases; at++)
        for (int form = 0; form < 3; form++) {
            static const char *const suffixes[] = {"", "_ptds", "_ptsz"};
            char name[128];
            void *original, *ours;

            snprintf(name, sizeof name, "%s%s", (*at)->name, suffixes[form]);
            original = dlsym(origin_cuda, name);
            ours = dlsym(cuda, name);
            if (original && ours != original && n_hooked < 4096) {
                hooked[n_hooked].original = original;
                hooked[n_hooked++].ours = ours;
            }
        }
    for (const struct one *const *at = __start_cases; at < __stop_cases; at++) {
        char name[128], *suffix;

        snprintf(name, sizeof name, "%s", (*at)->name);
        suffix = strrchr(name, '_');
        if (suffix && suffix[1] == 'v' && suffix[2] >= '0' && suffix[2] <= '9')
            *suffix = '\0';
        for (size_t i = 0; i < 2 * sizeof versions / sizeof *versions; i++) {
            cuuint64_t flags = i % 2 ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM
                                     : CU_GET_PROC_ADDRESS_LEGACY_STREAM;
            void *found = NULL;

            if (look(name, versions[i / 2], flags, &found) || !found)
                continue;
            for (size_t h = 0; h < n_hooked; h++)
                if (found == hooked[h].original) {
                    size_t used = strlen(detail);

                    leaks++;
                    snprintf(detail + used, sizeof detail - used, "%s%s %d", used ? ", " : "", name,
                             versions[i / 2]);
                    break;
                }
        }
    }
    return (CUresult)leaks;
}

static void *looked_up;

static CUresult look(const char *name, int version, cuuint64_t flags, void **found)
{
    typeof(&cuGetProcAddress) fn = (typeof(&cuGetProcAddress))looked_up;

    return fn(name, found, version, flags);
}

static CUresult look_v2(const char *name, int version, cuuint64_t flags, void **found)
{
    typeof(&cuGetProcAddress_v2) fn = (typeof(&cuGetProcAddress_v2))looked_up;
    CUdriverProcAddressQueryResult status;

    return fn(name, found, version, flags, &status);
}

#include "coverage_probe_calls.h"
