/*
 * Functions for copies and captures that CUDA 13.2 to 13.5 introduced, loaded in front of the
 * simulated driver, which has those of 13.0. Each calls an older function with the same effect.
 *
 * Built as libcuda-origin.so.1 and linked against the simulated driver.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

typedef unsigned long long address;

/* Returns the next definition of a function. The first one is in the control library, which is
 * loaded in front of this file. */
#define NEXT(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))

int cuMemcpyAsync(address to, address from, size_t size, void *stream);
int cuStreamBeginCapture_v2(void *stream, int mode);
int cuEventRecord(void *event, void *stream);
int cuStreamWaitValue32_v2(void *stream, address word, uint32_t value, unsigned flags);
int cuLaunchKernel(void *kernel, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **parameters, void **extra);

/* ---- copies ---- */

int cuMemcpyWithAttributesAsync(address to, address from, size_t size, void *attributes,
                                void *stream)
{
    return attributes ? NEXT(cuMemcpyAsync)(to, from, size, stream) : 1;
}

int cuMemcpyWithAttributesAsync_ptsz(address to, address from, size_t size, void *attributes,
                                     void *stream)
{
    return cuMemcpyWithAttributesAsync(to, from, size, attributes, stream ? stream : (void *)2);
}

struct operand3 {
    int type;
    address at;
    size_t row, layer;
    int hint[2];
};
struct op3 {
    struct operand3 from, to;
    size_t width, height, depth;
    int order;
    unsigned flags;
};
_Static_assert(sizeof(struct op3) == 112, "CUDA_MEMCPY3D_BATCH_OP");

int cuMemcpy3DWithAttributesAsync(const struct op3 *op, unsigned long long flags, void *stream)
{
    return flags ? 1
                 : NEXT(cuMemcpyAsync)(op->to.at, op->from.at, op->width * op->height * op->depth,
                                       stream);
}

/* An operand of type 2 is a logical endpoint: a write to it has no effect. */
struct operand {
    int type;
    address at;
    int hint[2];
};
struct op {
    struct operand from, to;
    size_t size;
    unsigned flags;
};
_Static_assert(sizeof(struct op) == 64, "CUDA_FABRIC_COPY_BATCH_OP");

int cuFabricCpyBatchAsync(size_t n, const struct op *ops, unsigned long long flags, void *stream)
{
    int r = flags || !stream;

    for (size_t i = 0; !r && i < n; i++)
        if (ops[i].from.type == 1 && ops[i].to.type == 1)
            r = NEXT(cuMemcpyAsync)(ops[i].to.at, ops[i].from.at, ops[i].size, stream);
    return r;
}

/* ---- captures ---- */

int cuStreamBeginRecaptureToGraph(void *stream, int mode, void *graph, void *callback, void *data)
{
    (void)callback, (void)data;
    return graph ? NEXT(cuStreamBeginCapture_v2)(stream, mode) : 1;
}

/* Launches into this stream are recorded in a command list of a graphics API. */
static void *drawn;
static int n_drawn, n_wrong;

int cuStreamBeginCaptureToCig(void *stream, void *parameters)
{
    if (drawn || !parameters)
        return 1;
    drawn = stream;
    return 0;
}

int cuStreamEndCaptureToCig(void *stream)
{
    if (drawn != stream)
        return 1;
    drawn = NULL;
    return 0;
}

int cuLaunchKernel(void *kernel, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **parameters, void **extra)
{
    if (drawn && stream == drawn)
        return n_drawn++, 0;
    return NEXT(cuLaunchKernel)(kernel, x, y, z, bx, by, bz, shared, stream, parameters, extra);
}

int cuEventRecord(void *event, void *stream)
{
    n_wrong += drawn && stream == drawn;
    return NEXT(cuEventRecord)(event, stream);
}

int cuStreamWaitValue32_v2(void *stream, address word, uint32_t value, unsigned flags)
{
    n_wrong += drawn && stream == drawn;
    return NEXT(cuStreamWaitValue32_v2)(stream, word, value, flags);
}

int shim_n_drawn(void)
{
    return n_drawn;
}

/* Returns the number of calls on such a stream that the control library must not make. */
int shim_n_wrong(void)
{
    return n_wrong;
}

static int n_together;

int cuLaunchCooperativeKernelMultiDevice(void *launches, unsigned n, unsigned flags);
int cuLaunchCooperativeKernelMultiDevice(void *launches, unsigned n, unsigned flags)
{
    (void)launches, (void)n, (void)flags;
    return n_together++, 0;
}

int shim_n_together(void);
int shim_n_together(void)
{
    return n_together;
}
