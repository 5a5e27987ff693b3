/*
 * The parts of the driver's memory API that the simulated driver lacks, loaded in front of it: the
 * variants of functions from the first CUDA versions, and functions that need hardware or another
 * process. They take memory of the simulated GPU where its driver can provide it, and none
 * otherwise. The tests check the charges.
 *
 * Built as libcuda-origin.so.1 and linked against the simulated driver.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

typedef unsigned long long address;
typedef struct {
    int pool[22]; /* CUmemPoolProps */
    const void *access;
    size_t n_access, size;
    address at;
} alloc_node;
_Static_assert(sizeof(alloc_node) == 120, "CUDA_MEM_ALLOC_NODE_PARAMS");

/* Returns the next definition of a function. The first one is in the control library, which is
 * loaded in front of this file. */
#define NEXT(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))

int cuMemAlloc_v2(address *at, size_t size);
int cuMemAllocPitch_v2(address *at, size_t *pitch, size_t width, size_t height, unsigned element);
int cuMemFree_v2(address at);
int cuMemGetInfo_v2(size_t *left, size_t *total);
int cuDeviceTotalMem_v2(size_t *bytes, int device);
int cuCtxCreate_v2(void **context, unsigned flags, int device);
int cuCtxDestroy_v2(void *context);
int cuCtxGetCurrent(void **context);
int cuCtxPopCurrent_v2(void **context);
int cuCtxPushCurrent_v2(void *context);
int cuStreamCreate(void **stream, unsigned flags);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuDevicePrimaryCtxRelease_v2(int device);
int cuDevicePrimaryCtxReset_v2(int device);
int cuArrayCreate_v2(void **array, const void *descriptor);
int cuArray3DCreate_v2(void **array, const void *descriptor);
int cuMemRelease(address handle);
int cuMemRetainAllocationHandle(address *handle, void *at);
int cuLibraryGetKernel(void **kernel, void *library, const char *name);
int cuLibraryGetModule(void **module, void *library);
int cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags);
int cuGraphAddMemAllocNode(void **node, void *graph, void *const *from, size_t n,
                           alloc_node *params);

/* ---- 32-bit addresses ---- */

static address low[1024];

static unsigned int shorten(address at)
{
    for (unsigned int i = 1; i < 1024; i++)
        if (!low[i]) {
            low[i] = at;
            return i << 8;
        }
    abort();
}

int cuMemAlloc(unsigned int *at, unsigned int size)
{
    address wide = 0;
    int r = NEXT(cuMemAlloc_v2)(&wide, size);

    if (!r)
        *at = shorten(wide);
    return r;
}

int cuMemAllocPitch(unsigned int *at, unsigned int *pitch, unsigned int width, unsigned int height,
                    unsigned int element)
{
    address wide = 0;
    size_t wide_pitch;
    int r = NEXT(cuMemAllocPitch_v2)(&wide, &wide_pitch, width, height, element);

    if (!r) {
        *at = shorten(wide);
        *pitch = (unsigned int)wide_pitch;
    }
    return r;
}

int cuMemFree(unsigned int at)
{
    int r = at >> 8 < 1024 && low[at >> 8] ? NEXT(cuMemFree_v2)(low[at >> 8]) : 1;

    if (!r)
        low[at >> 8] = 0;
    return r;
}

static unsigned int clamp(size_t size)
{
    return size < UINT32_MAX ? (unsigned int)size : UINT32_MAX;
}

int cuMemGetInfo(unsigned int *left, unsigned int *total)
{
    size_t wide_left, wide_total;
    int r = NEXT(cuMemGetInfo_v2)(&wide_left, &wide_total);

    if (!r) {
        *left = clamp(wide_left);
        *total = clamp(wide_total);
    }
    return r;
}

int cuDeviceTotalMem(unsigned int *bytes, int device)
{
    size_t wide;
    int r = NEXT(cuDeviceTotalMem_v2)(&wide, device);

    if (!r)
        *bytes = clamp(wide);
    return r;
}

int cuArrayCreate(void **array, const unsigned int *d)
{
    struct {
        size_t width, height;
        unsigned int format, channels;
    } wide = {d[0], d[1], d[2], d[3]};

    return NEXT(cuArrayCreate_v2)(array, &wide);
}

int cuArray3DCreate(void **array, const unsigned int *d)
{
    struct {
        size_t width, height, depth;
        unsigned int format, channels, flags;
    } wide = {d[0], d[1], d[2], d[3], d[4], d[5]};

    return NEXT(cuArray3DCreate_v2)(array, &wide);
}

/* ---- contexts ---- */

static int attached;

int cuCtxCreate(void **context, unsigned int flags, int device)
{
    return NEXT(cuCtxCreate_v2)(context, flags, device);
}

int cuCtxDestroy(void *context)
{
    return NEXT(cuCtxDestroy_v2)(context);
}

int cuCtxAttach(void **context, unsigned int flags)
{
    (void)flags;
    attached++;
    return NEXT(cuCtxGetCurrent)(context);
}

int cuCtxDetach(void *context)
{
    return attached-- ? 0 : (attached = 0, NEXT(cuCtxDestroy_v2)(context));
}

int cuDevicePrimaryCtxRelease(int device)
{
    return NEXT(cuDevicePrimaryCtxRelease_v2)(device);
}

int cuDevicePrimaryCtxReset(int device)
{
    return NEXT(cuDevicePrimaryCtxReset_v2)(device);
}

int cuGLCtxCreate_v2(void **context, unsigned int flags, int device)
{
    return NEXT(cuCtxCreate_v2)(context, flags, device);
}

int cuGreenCtxCreate(int **green, void *description, int device, unsigned int flags)
{
    void *primary;

    (void)description;
    (void)flags;
    *green = malloc(sizeof **green);
    **green = device;
    return NEXT(cuDevicePrimaryCtxRetain)(&primary, device);
}

int cuGreenCtxDestroy(int *green)
{
    int device = *green;

    free(green);
    return NEXT(cuDevicePrimaryCtxRelease_v2)(device);
}

int cuGreenCtxStreamCreate(void **stream, int *green, unsigned int flags, int priority)
{
    void *primary;
    int r;

    (void)priority;
    r = NEXT(cuDevicePrimaryCtxRetain)(&primary, *green);
    if (!r)
        r = NEXT(cuCtxPushCurrent_v2)(primary);
    if (!r) {
        r = NEXT(cuStreamCreate)(stream, flags);
        NEXT(cuCtxPopCurrent_v2)(&primary);
    }
    NEXT(cuDevicePrimaryCtxRelease_v2)(*green);
    return r;
}

/* ---- memory of other processes ---- */

int cuImportExternalMemory(void **memory, const void *descriptor)
{
    return descriptor ? *memory = malloc(1), 0 : 1;
}

int cuDestroyExternalMemory(void *memory)
{
    free(memory);
    return 0;
}

int cuMemPoolImportFromShareableHandle(void **pool, void *handle, int type,
                                       unsigned long long flags)
{
    (void)handle;
    (void)type;
    (void)flags;
    *pool = malloc(1);
    return 0;
}

int cuMemPoolImportPointer(address *at, void *pool, void *data)
{
    (void)pool;
    (void)data;
    return NEXT(cuMemAlloc_v2)(at, 10 << 20);
}

int cuMemMapArrayAsync(void *list, unsigned int count, void *stream)
{
    (void)list;
    (void)count;
    (void)stream;
    return 0;
}

/* ---- libraries and graphs ---- */

static void *kernels[64], *libraries[64];
static unsigned int n_kernels;

int cuLibraryGetKernel(void **kernel, void *library, const char *name)
{
    int r = NEXT(cuLibraryGetKernel)(kernel, library, name);

    if (!r) {
        kernels[n_kernels] = *kernel;
        libraries[n_kernels++] = library;
    }
    return r;
}

int cuKernelGetLibrary(void **library, void *kernel)
{
    for (unsigned int i = n_kernels; i-- > 0;)
        if (kernels[i] == kernel)
            return *library = libraries[i], 0;
    return 400;
}

int cuLibraryGetGlobal(address *at, size_t *size, void *library, const char *name)
{
    void *module;

    (void)at;
    (void)size;
    (void)name;
    return NEXT(cuLibraryGetModule)(&module, library);
}

int cuLibraryGetManaged(address *at, size_t *size, void *library, const char *name)
{
    return cuLibraryGetGlobal(at, size, library, name);
}

int cuLibraryGetUnifiedFunction(void **function, void *library, const char *symbol)
{
    return cuLibraryGetGlobal((address *)function, NULL, library, symbol);
}

int cuFuncLoad(void *function)
{
    return !function;
}

static struct {
    void *graph;
    alloc_node params;
} nodes[256];
static uintptr_t n_nodes;

int cuGraphAddMemAllocNode(void **node, void *graph, void *const *from, size_t n,
                           alloc_node *params)
{
    int r = NEXT(cuGraphAddMemAllocNode)(node, graph, from, n, params);

    if (!r) {
        nodes[n_nodes].graph = graph;
        nodes[n_nodes++].params = *params;
    }
    return r;
}

int cuGraphAddNode(void **node, void *graph, void *const *from, size_t n, int *params)
{
    alloc_node own;
    int r;

    if (params[0] != 10)
        return 801;
    memcpy(&own, params + 4, sizeof own);
    r = cuGraphAddMemAllocNode(node, graph, from, n, &own);
    memcpy(params + 4, &own, sizeof own);
    return r;
}

int cuGraphAddNode_v2(void **node, void *graph, void *const *from, void *edges, size_t n,
                      int *params)
{
    (void)edges;
    return cuGraphAddNode(node, graph, from, n, params);
}

int cuGraphAddNode_v3(void **node, void *graph, void *const *from, void *edges, size_t n,
                      int *params)
{
    (void)edges;
    return cuGraphAddNode(node, graph, from, n, params);
}

int cuGraphGetNodes(void *graph, void **found, size_t *n)
{
    size_t count = 0;

    for (uintptr_t i = 0; i < n_nodes; i++)
        if (nodes[i].graph == graph) {
            if (found && count < *n)
                found[count] = (void *)(i + 1);
            count++;
        }
    *n = count;
    return 0;
}

int cuGraphNodeGetType(void *node, int *type)
{
    (void)node;
    *type = 10;
    return 0;
}

int cuGraphMemAllocNodeGetParams(void *node, alloc_node *params)
{
    *params = nodes[(uintptr_t)node - 1].params;
    return 0;
}

int cuGraphInstantiate(void **exec, void *graph, void **node, char *log, size_t n)
{
    (void)node;
    (void)log;
    (void)n;
    return NEXT(cuGraphInstantiateWithFlags)(exec, graph, 0);
}

int cuGraphInstantiate_v2(void **exec, void *graph, void **node, char *log, size_t n)
{
    return cuGraphInstantiate(exec, graph, node, log, n);
}

int cuGraphInstantiateWithParams(void **exec, void *graph, void *params)
{
    (void)params;
    return NEXT(cuGraphInstantiateWithFlags)(exec, graph, 0);
}

/* ---- descriptors and multicast objects ---- */

/* The real driver's descriptors can be polled. Those of the simulated driver cannot. */
int cuMemExportToShareableHandle(void *shareable, address handle, int type,
                                 unsigned long long flags)
{
    (void)handle, (void)flags;
    *(int *)shareable = eventfd(0, EFD_CLOEXEC);
    return type == 1 ? 0 : 1;
}

#define FIRST_OBJECT 0x4d00000000000000ull
static address n_objects;

int cuMulticastCreate(address *object, const void *properties)
{
    (void)properties;
    *object = FIRST_OBJECT + ++n_objects;
    return 0;
}

int cuMulticastBindMem(address object, size_t at, address handle, size_t from, size_t size,
                       unsigned long long flags)
{
    (void)at, (void)handle, (void)from, (void)flags;
    return object > FIRST_OBJECT && size ? 0 : 1;
}

int cuMulticastBindAddr(address object, size_t at, address from, size_t size,
                        unsigned long long flags)
{
    (void)at, (void)from, (void)flags;
    return object > FIRST_OBJECT && size ? 0 : 1;
}

int cuMulticastBindMem_v2(address object, int device, size_t at, address handle, size_t from,
                          size_t size, unsigned long long flags)
{
    return device ? 1 : cuMulticastBindMem(object, at, handle, from, size, flags);
}

int cuMulticastBindAddr_v2(address object, int device, size_t at, address from, size_t size,
                           unsigned long long flags)
{
    return device ? 1 : cuMulticastBindAddr(object, at, from, size, flags);
}

int cuMulticastUnbind(address object, int device, size_t at, size_t size)
{
    (void)device, (void)at;
    return object > FIRST_OBJECT && size ? 0 : 1;
}

static address object_at;

int cuMemMap(address at, size_t size, size_t from, address handle, unsigned long long flags)
{
    if (handle <= FIRST_OBJECT)
        return NEXT(cuMemMap)(at, size, from, handle, flags);
    object_at = at;
    return 0;
}

int cuMemUnmap(address at, size_t size)
{
    if (!object_at || at != object_at)
        return NEXT(cuMemUnmap)(at, size);
    object_at = 0;
    return 0;
}

int cuMemRelease(address handle)
{
    return handle > FIRST_OBJECT ? 0 : NEXT(cuMemRelease)(handle);
}

/* ---- logical endpoints: those with numbers 1 to 99 exist ---- */

static int endpoint(unsigned int id, int device, size_t size)
{
    return id && id < 100 && !device && size ? 0 : 1;
}

int cuLogicalEndpointBindMem(unsigned int id, int device, uint64_t at, address handle,
                             uint64_t from, uint64_t size, unsigned long long flags)
{
    (void)at, (void)handle, (void)from, (void)flags;
    return endpoint(id, device, size);
}

int cuLogicalEndpointBindAddr(unsigned int id, int device, uint64_t at, void *from, uint64_t size,
                              unsigned long long flags)
{
    (void)at, (void)from, (void)flags;
    return endpoint(id, device, size);
}

int cuLogicalEndpointUnbind(unsigned int id, int device, uint64_t at, uint64_t size)
{
    (void)at;
    return endpoint(id, device, size);
}

int cuLogicalEndpointDestroy(unsigned int id)
{
    return endpoint(id, 0, 1);
}

/* ---- locality domains: parts of the simulated GPU's memory ---- */

#define DEVICE 1
#define DOMAIN 6

int cuMemCreate(address *handle, size_t size, const int *prop, unsigned long long flags);
int cuMemPoolCreate(void **pool, const int *props);
int cuMemGetDefaultMemPool(void **pool, const int *location, int type);
int cuMemPoolGetAttribute(void *pool, int attribute, void *value);

static void *domain_pool;

/* The properties of allocations and of pools have the location at the same offset. */
static void widen(int *to, const int *from, size_t size)
{
    memcpy(to, from, size);
    if (to[2] == DOMAIN) {
        to[2] = DEVICE;
        to[3] &= 0xff;
    }
}

int cuMemCreate(address *handle, size_t size, const int *prop, unsigned long long flags)
{
    int wide[8];

    widen(wide, prop, sizeof wide);
    return NEXT(cuMemCreate)(handle, size, wide, flags);
}

int cuMemPoolCreate(void **pool, const int *props)
{
    int wide[22];

    widen(wide, props, sizeof wide);
    return NEXT(cuMemPoolCreate)(pool, wide);
}

int cuMemGetDefaultMemPool(void **pool, const int *location, int type)
{
    int props[22] = {1, 0, DEVICE, location[1] & 0xff};
    int r = 0;

    if (location[0] != DOMAIN)
        return NEXT(cuMemGetDefaultMemPool)(pool, location, type);
    if (!domain_pool)
        r = NEXT(cuMemPoolCreate)(&domain_pool, props);
    *pool = domain_pool;
    return r;
}

int cuMemPoolGetAttribute(void *pool, int attribute, void *value)
{
    if (pool != domain_pool || attribute < 9)
        return NEXT(cuMemPoolGetAttribute)(pool, attribute, value);
    *(int *)value = attribute == 9 ? 1 : attribute == 12 ? DOMAIN : 0;
    return 0;
}
