/*
 * Runs threads that use the driver API in the ways that the control library handles, for a given
 * time.
 *
 *   stress [--seconds S] [--threads N] [--seed N] [--limit-ms N] [--wait-file F]
 *
 * The program is linked with libcuda.so.1 as an application is. Each thread chooses its next action
 * at random: launches into its own streams, a shared one and the per-thread one, allocations of
 * all kinds, capture and replay of graphs, creation and destruction of streams and contexts,
 * queries. A call may report that memory is exhausted; any other error ends the program with
 * status 1. A call that takes longer than --limit-ms ends the program with status 3 and a line that
 * names the call. With --wait-file the program creates F.ready once it is set up, and works until F
 * exists and --seconds are over. The last line of its output is JSON: the number of calls, and the
 * duration and the name of the longest call.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../../simgpu/cuda_abi.h"

CUresult cuInit(unsigned flags);
CUresult cuDeviceGet(CUdevice *device, int ordinal);
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device);
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
CUresult cuCtxDestroy_v2(CUcontext context);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuCtxSynchronize(void);
CUresult cuModuleLoadData(CUmodule *module, const void *image);
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
CUresult cuStreamCreate(CUstream *stream, unsigned flags);
CUresult cuStreamDestroy_v2(CUstream stream);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);
CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode);
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph);
CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags);
CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream);
CUresult cuGraphExecDestroy(CUgraphExec exec);
CUresult cuGraphDestroy(CUgraph graph);
CUresult cuEventCreate(CUevent *event, unsigned flags);
CUresult cuEventRecord(CUevent event, CUstream stream);
CUresult cuEventDestroy_v2(CUevent event);
CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t size);
CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height,
                            unsigned element);
CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t size, unsigned flags);
CUresult cuMemFree_v2(CUdeviceptr pointer);
CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t size, CUstream stream);
CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream);
CUresult cuMemGetInfo_v2(size_t *left, size_t *total);
CUresult cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags,
                             CUdriverProcAddressQueryResult *status);
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared, CUstream stream,
                        void **parameters, void **extra);
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **parameters,
                          void **extra);

#define MAX_THREADS 64
#define BLOCKS      32
#define MAX_BURN    60000u     /* longest kernel, in ns */
#define MAX_BLOCK   (8u << 20) /* largest allocation, in bytes */

struct worker {
    pthread_t thread;
    uint64_t random;
    CUstream streams[2];
    CUevent event;
    CUgraphExec exec;
    CUdeviceptr blocks[BLOCKS];
    bool async[BLOCKS];
    uint64_t n_calls;
    uint64_t longest;
    const char *longest_name;
    /* Read by the watchdog. */
    _Atomic(const char *) call;
    _Atomic uint64_t began;
};

static struct worker workers[MAX_THREADS];
static CUdevice device;
static CUcontext context;
static CUfunction burn;
static CUstream shared;
static _Atomic bool stop;

static uint64_t now(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* xorshift64: the same seed gives the same sequence on every machine, as far as threads permit. */
static uint64_t draw(struct worker *w, uint64_t below)
{
    w->random ^= w->random << 13;
    w->random ^= w->random >> 7;
    w->random ^= w->random << 17;
    return w->random % below;
}

static void begin(struct worker *w, const char *call)
{
    atomic_store(&w->began, now());
    atomic_store(&w->call, call);
}

static bool end(struct worker *w, const char *call, CUresult result)
{
    uint64_t took = now() - atomic_load(&w->began);

    atomic_store(&w->call, NULL);
    w->n_calls++;
    if (took > w->longest) {
        w->longest = took;
        w->longest_name = call;
    }
    if (result == CUDA_SUCCESS)
        return true;
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        return false;
    fprintf(stderr, "stress: %s returned %d\n", call, (int)result);
    _exit(1);
}

/* Makes a call; the value is true unless memory is exhausted. */
#define CALL(w, function, ...) (begin((w), #function), end((w), #function, function(__VA_ARGS__)))

/* ---- actions of a thread ---- */

static void launch(struct worker *w, CUstream stream)
{
    uint64_t ns = draw(w, MAX_BURN);
    void *parameters[] = {&ns};
    CUlaunchConfig config = {
        .gridDimX = 1 + (unsigned)draw(w, 4),
        .gridDimY = 1,
        .gridDimZ = 1,
        .blockDimX = 32,
        .blockDimY = 1,
        .blockDimZ = 1,
        .hStream = stream,
    };

    if (draw(w, 4) == 0)
        CALL(w, cuLaunchKernelEx, &config, burn, parameters, NULL);
    else
        CALL(w, cuLaunchKernel, burn, config.gridDimX, 1, 1, 32, 1, 1, 0, stream, parameters, NULL);
}

static void free_block(struct worker *w, unsigned i)
{
    if (w->async[i])
        CALL(w, cuMemFreeAsync, w->blocks[i], w->streams[0]);
    else
        CALL(w, cuMemFree_v2, w->blocks[i]);
    w->blocks[i] = 0;
}

static void block(struct worker *w)
{
    unsigned i = (unsigned)draw(w, BLOCKS);
    size_t size = 1 + draw(w, MAX_BLOCK), pitch;
    bool got = false;

    if (w->blocks[i]) {
        free_block(w, i);
        return;
    }
    w->async[i] = false;
    switch (draw(w, 5)) {
    case 0:
        got = CALL(w, cuMemAllocPitch_v2, &w->blocks[i], &pitch, 1 + size / 64, 64, 4);
        break;
    case 1:
        got = CALL(w, cuMemAllocManaged, &w->blocks[i], size, 1);
        break;
    case 2:
    case 3:
        w->async[i] = true;
        got = CALL(w, cuMemAllocAsync, &w->blocks[i], size, w->streams[0]);
        break;
    default:
        got = CALL(w, cuMemAlloc_v2, &w->blocks[i], size);
    }
    if (!got)
        w->blocks[i] = 0;
}

static void capture(struct worker *w)
{
    CUgraph graph;

    if (w->exec)
        CALL(w, cuGraphExecDestroy, w->exec);
    CALL(w, cuStreamBeginCapture_v2, w->streams[1], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    for (uint64_t n = 1 + draw(w, 5); n; n--)
        launch(w, w->streams[1]);
    CALL(w, cuStreamEndCapture, w->streams[1], &graph);
    CALL(w, cuGraphInstantiateWithFlags, &w->exec, graph, 0);
    CALL(w, cuGraphDestroy, graph);
}

static void other_context(struct worker *w)
{
    CUcontext other;
    CUstream stream;
    CUmodule module;
    CUfunction function;
    uint64_t ns = 1000;
    void *parameters[] = {&ns};

    if (!CALL(w, cuCtxCreate_v2, &other, 0, device))
        return;
    if (CALL(w, cuModuleLoadData, &module, "")) {
        CALL(w, cuModuleGetFunction, &function, module, "burn");
        CALL(w, cuStreamCreate, &stream, 1);
        for (uint64_t n = 1 + draw(w, 8); n; n--)
            CALL(w, cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL);
        if (draw(w, 2))
            CALL(w, cuStreamDestroy_v2, stream);
    }
    CALL(w, cuCtxDestroy_v2, other);
    CALL(w, cuCtxSetCurrent, context);
}

static void new_stream(struct worker *w)
{
    unsigned i = (unsigned)draw(w, 2);

    /* The stream may still have to free blocks. */
    CALL(w, cuStreamSynchronize, w->streams[i]);
    CALL(w, cuStreamDestroy_v2, w->streams[i]);
    /* The capturing stream, streams[1], must be one that the legacy stream does not wait for: a
     * launch into the legacy stream would end the capture. */
    CALL(w, cuStreamCreate, &w->streams[i], i);
}

static void query_driver(struct worker *w)
{
    static const char *const names[] = {"cuLaunchKernel", "cuEventQuery", "cuMemAlloc"};
    CUdriverProcAddressQueryResult status;
    size_t left, total;
    void *found;

    CALL(w, cuMemGetInfo_v2, &left, &total);
    if (left > total) {
        fprintf(stderr, "stress: %zu bytes are free of %zu\n", left, total);
        _exit(1);
    }
    CALL(w, cuDeviceTotalMem_v2, &total, device);
    for (unsigned i = 0; i < 3; i++)
        CALL(w, cuGetProcAddress_v2, names[i], &found, 12000, 0, &status);
}

static void work(struct worker *w)
{
    uint64_t action = draw(w, 100);

    if (action < 30)
        launch(w, w->streams[draw(w, 2)]);
    else if (action < 38)
        launch(w, shared);
    else if (action < 42)
        launch(w, CU_STREAM_PER_THREAD);
    else if (action < 44)
        launch(w, NULL);
    else if (action < 70)
        block(w);
    else if (action < 78 && w->exec)
        CALL(w, cuGraphLaunch, w->exec, w->streams[draw(w, 2)]);
    else if (action < 82)
        capture(w);
    else if (action < 84)
        new_stream(w);
    else if (action < 85)
        other_context(w);
    else if (action < 90)
        CALL(w, cuStreamSynchronize, w->streams[draw(w, 2)]);
    else if (action < 93) {
        CALL(w, cuEventRecord, w->event, w->streams[0]);
        CALL(w, cuStreamWaitEvent, w->streams[1], w->event, 0);
    } else
        query_driver(w);
}

static void *run(void *argument)
{
    struct worker *w = argument;

    CALL(w, cuCtxSetCurrent, context);
    CALL(w, cuStreamCreate, &w->streams[0], 0);
    CALL(w, cuStreamCreate, &w->streams[1], 1);
    CALL(w, cuEventCreate, &w->event, CU_EVENT_DISABLE_TIMING);
    while (!atomic_load(&stop))
        work(w);
    for (unsigned i = 0; i < BLOCKS; i++)
        if (w->blocks[i])
            free_block(w, i);
    if (w->exec)
        CALL(w, cuGraphExecDestroy, w->exec);
    CALL(w, cuCtxSynchronize);
    CALL(w, cuEventDestroy_v2, w->event);
    for (unsigned i = 0; i < 2; i++)
        CALL(w, cuStreamDestroy_v2, w->streams[i]);
    return NULL;
}

/* ---- the main thread ---- */

static const char *option(int argc, char **argv, const char *name, const char *otherwise)
{
    for (int i = 1; i + 1 < argc; i++)
        if (!strcmp(argv[i], name))
            return argv[i + 1];
    return otherwise;
}

/* Ends the program if a thread has been in one call for too long. */
static void watch(unsigned n_threads, uint64_t limit)
{
    for (unsigned i = 0; i < n_threads; i++) {
        const char *call = atomic_load(&workers[i].call);
        uint64_t began = atomic_load(&workers[i].began);

        /* If another call begins in between, the two words belong to different calls, but then it
         * began recently. */
        if (!call || atomic_load(&workers[i].call) != call || now() < began + limit)
            continue;
        fprintf(stderr, "stress: a thread has been in %s for more than %llu ms\n", call,
                (unsigned long long)(limit / 1000000));
        _exit(3);
    }
}

static void *join_all(void *argument)
{
    for (unsigned i = 0; i < *(unsigned *)argument; i++)
        pthread_join(workers[i].thread, NULL);
    return NULL;
}

int main(int argc, char **argv)
{
    uint64_t length = (uint64_t)(atof(option(argc, argv, "--seconds", "2")) * 1e9);
    unsigned n_threads = (unsigned)atoi(option(argc, argv, "--threads", "4"));
    uint64_t seed = strtoull(option(argc, argv, "--seed", "1"), NULL, 10);
    uint64_t limit = strtoull(option(argc, argv, "--limit-ms", "5000"), NULL, 10) * 1000000u;
    const char *wait_file = option(argc, argv, "--wait-file", NULL);
    struct worker *setup = &workers[MAX_THREADS - 1], total = {.longest_name = "none"};
    CUmodule module;
    pthread_t joiner;
    uint64_t until;

    if (n_threads < 1 || n_threads >= MAX_THREADS)
        return 64;
    CALL(setup, cuInit, 0);
    CALL(setup, cuDeviceGet, &device, 0);
    if (!CALL(setup, cuDevicePrimaryCtxRetain, &context, device)) {
        fprintf(stderr, "stress: there is no room for a context\n");
        return 2;
    }
    CALL(setup, cuCtxSetCurrent, context);
    if (!CALL(setup, cuModuleLoadData, &module, "")) {
        fprintf(stderr, "stress: there is no room for a module\n");
        return 2;
    }
    CALL(setup, cuModuleGetFunction, &burn, module, "burn");
    CALL(setup, cuStreamCreate, &shared, 1);
    for (unsigned i = 0; i < n_threads; i++) {
        workers[i].random = (seed * 1000003u + i) * 0x9e3779b97f4a7c15u | 1;
        pthread_create(&workers[i].thread, NULL, run, &workers[i]);
    }
    if (wait_file) {
        char ready[4096];

        snprintf(ready, sizeof ready, "%s.ready", wait_file);
        close(open(ready, O_CREAT | O_WRONLY | O_CLOEXEC, 0644));
    }
    until = now() + length;
    while (now() < until || (wait_file && access(wait_file, F_OK))) {
        watch(n_threads, limit);
        usleep(2000);
    }
    atomic_store(&stop, true);
    pthread_create(&joiner, NULL, join_all, &n_threads);
    while (pthread_tryjoin_np(joiner, NULL)) {
        watch(n_threads, limit);
        usleep(2000);
    }
    CALL(setup, cuStreamDestroy_v2, shared);
    CALL(setup, cuDevicePrimaryCtxRelease_v2, device);
    for (unsigned i = 0; i < n_threads; i++) {
        total.n_calls += workers[i].n_calls;
        if (workers[i].longest > total.longest) {
            total.longest = workers[i].longest;
            total.longest_name = workers[i].longest_name;
        }
    }
    printf("{\"calls\": %llu, \"longest_ms\": %.1f, \"longest\": \"%s\"}\n",
           (unsigned long long)total.n_calls, (double)total.longest / 1e6, total.longest_name);
    return 0;
}
