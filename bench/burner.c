/*
 * A burner for a real GPU: units of work of a known length, each stamped by the GPU's own clock.
 *
 *   burner --unit-us U --seconds S --out FILE [--form FORM] [--iterations N] [--depth D]
 *          [--gap-us G] [--bursts SEED] [--duty PERCENT] [--wait-file F] [--block BYTES]
 *          [--allocate BYTES] [--stream own|null] [--requests MEAN_US] [--units N] [--seed S]
 *          [--processes N] [--driver FILE]
 *
 * A unit is work of one of these forms, followed by a one-thread kernel that writes %globaltimer
 * into pinned host memory:
 *
 * - burn: a kernel of dependent multiply-adds on every multiprocessor;
 * - cooperative: the same, launched cooperatively; at its end all blocks wait for each other;
 * - persistent: one block per multiprocessor, which runs for the whole unit; this kernel writes
 *   64 stamps, and no other kernel follows;
 * - graph: 20 kernels as one CUDA graph;
 * - copy: copies of a block (128 MiB) within the device, and 8 MiB from the host at the same time;
 * - sync: a kernel, and then the host waits for the stream;
 * - sweep: a kernel that reads and writes a block (256 MiB) over and over;
 * - tiny: very short kernels of one block, as many as the host launches in a unit's time.
 *
 * The number of iterations (or copies, or launches) is calibrated at the start (for a job alone) or
 * given (so that a governed job does the same work). With --bursts the burner alternates between
 * working for 0.2 to 2 s and resting, so that it works for --duty percent of the time (default 70);
 * the last line has the first and the last unit of each burst. FILE gets records of two
 * little-endian u64: the time of the stamp, and 0. The last line on standard output is JSON;
 * "clock_ns" is how far the GPU's clock is ahead of CLOCK_MONOTONIC.
 *
 * With --requests the burner is a service. Requests of --units units (default 20) arrive at random,
 * one every MEAN_US microseconds on average, at times that --seed (default 1) determines, whether
 * or not the earlier requests are done. Each is launched on its arrival or when the previous one
 * has ended, and the host waits for it to end. FILE gets records of two u64 in ns: the time from
 * the start to the request's arrival, and the time from its arrival to its end.
 *
 * The burner uses the driver API through dlopen, needs no CUDA toolkit, and does not depend on
 * Tidegate. With --driver it loads that file as the driver's library, which may bypass Tidegate's.
 */
#include "burner_kernels.h"
#include "processes.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef void *handle;

static int (*cuInit)(unsigned);
static int (*cuDeviceGet)(int *, int);
static int (*cuDeviceGetAttribute)(int *, int, int);
static int (*cuDevicePrimaryCtxRetain)(handle *, int);
static int (*cuCtxSetCurrent)(handle);
static int (*cuModuleLoadData)(handle *, const void *);
static int (*cuModuleGetFunction)(handle *, handle, const char *);
static int (*cuStreamCreate)(handle *, unsigned);
static int (*cuStreamSynchronize)(handle);
static int (*cuEventCreate)(handle *, unsigned);
static int (*cuEventRecord)(handle, handle);
static int (*cuEventSynchronize)(handle);
static int (*cuMemAlloc)(unsigned long long *, size_t);
static int (*cuMemHostAlloc)(void **, size_t, unsigned);
static int (*cuMemsetD8)(unsigned long long, unsigned char, size_t);
static int (*cuMemcpyDtoDAsync)(unsigned long long, unsigned long long, size_t, handle);
static int (*cuMemcpyHtoDAsync)(unsigned long long, const void *, size_t, handle);
static int (*cuStreamBeginCapture)(handle, int);
static int (*cuStreamEndCapture)(handle, handle *);
static int (*cuGraphInstantiateWithFlags)(handle *, handle, unsigned long long);
static int (*cuGraphExecDestroy)(handle);
static int (*cuGraphDestroy)(handle);
static int (*cuGraphLaunch)(handle, handle);
static int (*cuLaunchCooperativeKernel)(handle, unsigned, unsigned, unsigned, unsigned, unsigned,
                                        unsigned, unsigned, handle, void **);
static int (*cuLaunchKernel)(handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                             unsigned, handle, void **, void **);

enum form { BURN, COOPERATIVE, PERSISTENT, GRAPH, COPY, SYNC, SWEEP, TINY, N_FORMS };

static const char *const form_names[N_FORMS] = {
    [BURN] = "burn",
    [COOPERATIVE] = "cooperative",
    [PERSISTENT] = "persistent",
    [GRAPH] = "graph",
    [COPY] = "copy",
    [SYNC] = "sync",
    [SWEEP] = "sweep",
    [TINY] = "tiny",
};

#define WITHIN      64 /* stamps by a persistent kernel */
#define GRAPH_NODES 20
#define FROM_HOST   (8u << 20) /* bytes */

#define RING 65536
static volatile uint64_t *ring;
static enum form form;
static unsigned within = 1; /* stamps per unit */
static handle stream, side, burn, stamp, graph_exec;
static unsigned long long sink, blocks_at[2];
static size_t block_bytes;
static void *host_block;
static unsigned blocks, multiprocessors;
static volatile sig_atomic_t stop;

static void on_signal(int number)
{
    (void)number;
    stop = 1;
}

static void check(int result, const char *call)
{
    if (result) {
        fprintf(stderr, "burner: %s returned %d\n", call, result);
        exit(1);
    }
}

static void load(void *library, void *variable, const char *name)
{
    void *found = dlsym(library, name);

    if (!found) {
        fprintf(stderr, "burner: libcuda.so.1 has no %s\n", name);
        exit(1);
    }
    memcpy(variable, &found, sizeof found);
}

static double now(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static void launch(handle function, unsigned grid, unsigned block, void **arguments)
{
    check(cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, stream, arguments, NULL),
          "cuLaunchKernel");
}

static void launch_stamp(volatile uint64_t *slot)
{
    void *arguments[] = {&slot};

    launch(stamp, 1, 1, arguments);
}

static void capture_graph(uint64_t iterations)
{
    void *arguments[] = {&iterations, &sink};
    handle graph;

    if (graph_exec)
        check(cuGraphExecDestroy(graph_exec), "cuGraphExecDestroy");
    check(cuStreamBeginCapture(stream, 2), "cuStreamBeginCapture"); /* relaxed mode */
    for (int i = 0; i < GRAPH_NODES; i++)
        launch(burn, blocks, 256, arguments);
    check(cuStreamEndCapture(stream, &graph), "cuStreamEndCapture");
    check(cuGraphInstantiateWithFlags(&graph_exec, graph, 0), "cuGraphInstantiateWithFlags");
    check(cuGraphDestroy(graph), "cuGraphDestroy");
}

/* Has to be called before units of that many iterations are launched. */
static void prepare(uint64_t iterations)
{
    if (form == GRAPH)
        capture_graph(iterations);
}

static volatile uint64_t *slots_of(uint64_t unit)
{
    return &ring[unit * within % RING];
}

static void launch_unit(uint64_t iterations, uint64_t unit)
{
    volatile uint64_t *slot = slots_of(unit);
    uint64_t bytes = block_bytes, times = within, few = 100;
    void *burn_arguments[] = {&iterations, &sink};
    void *persist_arguments[] = {&iterations, &sink, &slot, &times};
    void *sweep_arguments[] = {&iterations, &blocks_at[0], &bytes};
    void *tiny_arguments[] = {&few, &sink};

    switch (form) {
    case PERSISTENT:
        launch(burn, multiprocessors, 256, persist_arguments);
        return;
    case COOPERATIVE:
        check(cuLaunchCooperativeKernel(burn, multiprocessors * 4, 1, 1, 256, 1, 1, 0, stream,
                                        burn_arguments),
              "cuLaunchCooperativeKernel");
        break;
    case GRAPH:
        check(cuGraphLaunch(graph_exec, stream), "cuGraphLaunch");
        break;
    case COPY:
        check(cuMemcpyHtoDAsync(sink + 4096, host_block, FROM_HOST, side), "cuMemcpyHtoDAsync");
        for (uint64_t i = 0; i < iterations; i++)
            check(cuMemcpyDtoDAsync(blocks_at[!(i % 2)], blocks_at[i % 2], block_bytes, stream),
                  "cuMemcpyDtoDAsync");
        break;
    case SWEEP:
        launch(burn, blocks, 256, sweep_arguments);
        break;
    case TINY:
        for (uint64_t i = 0; i < iterations; i++)
            launch(burn, 1, 32, tiny_arguments);
        break;
    default:
        launch(burn, blocks, 256, burn_arguments);
    }
    launch_stamp(slot);
    if (form == SYNC)
        check(cuStreamSynchronize(stream), "cuStreamSynchronize");
}

static void wait_all(void)
{
    check(cuStreamSynchronize(stream), "cuStreamSynchronize");
    if (side)
        check(cuStreamSynchronize(side), "cuStreamSynchronize");
}

/*
 * Returns the number of iterations with which a unit takes about `unit_us`. A round has few units
 * if they are long; their duration is measured later, from the stamps.
 */
static uint64_t calibrate(double unit_us)
{
    uint64_t iterations = form == COPY || form == TINY ? 4 : form == PERSISTENT ? 1000 : 10000;
    int n = unit_us < 1000 ? 200 : 4 + (int)(100000 / unit_us);

    for (int round = 0; round < 6; round++) {
        double took;

        prepare(iterations);
        for (int warm = 0; warm < n / 2; warm++)
            launch_unit(iterations, 0);
        wait_all();
        took = now();
        for (int i = 0; i < n; i++)
            launch_unit(iterations, 0);
        wait_all();
        took = (now() - took) / n * 1e6;
        iterations = (uint64_t)((double)iterations * unit_us / took) + 1;
    }
    return iterations;
}

static int64_t host_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

/*
 * Returns how many ns the GPU's clock is ahead of this machine's, as measured with the fastest of
 * many stamps.
 */
static int64_t compare_clocks(void)
{
    int64_t best = INT64_MAX, ahead = 0;

    for (int i = 0; i < 64; i++) {
        int64_t before = host_ns(), after;

        launch_stamp(ring);
        check(cuStreamSynchronize(stream), "cuStreamSynchronize");
        after = host_ns();
        if (after - before < best) {
            best = after - before;
            ahead = (int64_t)ring[0] - (before + after) / 2;
        }
    }
    return ahead;
}

/* ---- bursts ---- */

#define N_BURSTS 256
static uint64_t bursts[N_BURSTS][2];
static unsigned n_bursts, draw;
static double burst_end, burst_length, duty;

static void burst_begin(uint64_t unit)
{
    burst_length = 0.2 + 1.8 * (rand_r(&draw) % 10000) / 10000;
    burst_end = now() + burst_length;
    if (n_bursts < N_BURSTS)
        bursts[n_bursts][0] = unit;
}

static void burst_ends(uint64_t unit)
{
    if (n_bursts < N_BURSTS && unit > bursts[n_bursts][0])
        bursts[n_bursts++][1] = unit - 1;
}

static void burst_rest(uint64_t unit, double end)
{
    double until = now() + burst_length * (100 - duty) / duty;

    burst_ends(unit);
    while (!stop && now() < until && now() < end)
        usleep(1000);
}

static const char *option(int argc, char **argv, const char *name, const char *otherwise)
{
    for (int i = 1; i + 1 < argc; i++)
        if (!strcmp(argv[i], name))
            return argv[i + 1];
    return otherwise;
}

static unsigned depth_of(int argc, char **argv)
{
    static const unsigned usual[N_FORMS] = {64, 64, 4, 16, 8, 0, 64, 4};
    char otherwise[16];
    unsigned long depth;

    snprintf(otherwise, sizeof otherwise, "%u", usual[form]);
    depth = strtoul(option(argc, argv, "--depth", otherwise), NULL, 10);
    return depth > 255 ? 255 : (unsigned)depth;
}

static enum form form_of(const char *name)
{
    for (int i = 0; i < N_FORMS; i++) {
        if (!strcmp(name, form_names[i]))
            return (enum form)i;
    }
    fprintf(stderr, "burner: unknown form %s; see the comment at the top of bench/burner.c\n",
            name);
    exit(2);
}

static void get_memory(void)
{
    check(cuMemAlloc(&sink, 4096 + (form == COPY ? FROM_HOST : 0)), "cuMemAlloc");
    check(cuMemsetD8(sink, 0, 4096), "cuMemsetD8");
    for (int i = 0; i < (form == COPY ? 2 : form == SWEEP ? 1 : 0); i++)
        check(cuMemAlloc(&blocks_at[i], block_bytes), "cuMemAlloc");
    if (form == COPY) {
        check(cuMemHostAlloc(&host_block, FROM_HOST, 0), "cuMemHostAlloc");
        check(cuStreamCreate(&side, 1), "cuStreamCreate");
    }
}

static void write_stamps(FILE *file, uint64_t unit)
{
    volatile uint64_t *slots = slots_of(unit);

    for (unsigned i = 0; file && i < within; i++) {
        uint64_t record[2] = {slots[i], 0};

        fwrite(record, sizeof record, 1, file);
    }
}

/* ---- requests ---- */

static void sleep_until(int64_t at)
{
    struct timespec until = {.tv_sec = (time_t)(at / 1000000000), .tv_nsec = at % 1000000000};

    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR && !stop)
        continue;
}

/* Returns the number of requests served. */
static uint64_t serve(double mean_us, unsigned long units, unsigned short seed, double seconds,
                      uint64_t iterations, FILE *file)
{
    unsigned short state[3] = {0x330e, seed, 0};
    int64_t begin = host_ns(), arrival = begin;
    uint64_t served = 0;

    while (!stop) {
        uint64_t record[2];

        arrival += (int64_t)(-log(1 - erand48(state)) * mean_us * 1000) + 1;
        if (arrival > begin + (int64_t)(seconds * 1e9))
            break;
        sleep_until(arrival);
        for (unsigned long i = 0; i < units; i++)
            launch_unit(iterations, i);
        check(cuStreamSynchronize(stream), "cuStreamSynchronize");
        record[0] = (uint64_t)(arrival - begin);
        record[1] = (uint64_t)(host_ns() - arrival);
        if (file)
            fwrite(record, sizeof record, 1, file);
        served++;
    }
    return served;
}

int main(int argc, char **argv)
{
    double requests_us = atof(option(argc, argv, "--requests", "0"));
    double unit_us = atof(option(argc, argv, "--unit-us", "500"));
    double seconds = atof(option(argc, argv, "--seconds", "5"));
    uint64_t iterations = strtoull(option(argc, argv, "--iterations", "0"), NULL, 10);
    double gap_us = atof(option(argc, argv, "--gap-us", "0"));
    const char *out = option(argc, argv, "--out", NULL);
    const char *wait_file = option(argc, argv, "--wait-file", NULL);
    unsigned seed = (unsigned)strtoul(option(argc, argv, "--bursts", "0"), NULL, 10);
    size_t allocate = strtoull(option(argc, argv, "--allocate", "0"), NULL, 10);
    struct processes all =
        processes_fork((unsigned)strtoul(option(argc, argv, "--processes", "1"), NULL, 10));
    void *library = dlopen(option(argc, argv, "--driver", "libcuda.so.1"), RTLD_NOW);
    const char *kernels[N_FORMS] = {
        [COOPERATIVE] = "together", [PERSISTENT] = "persist", [SWEEP] = "sweep"};
    handle context, module, events[256], side_events[256];
    uint64_t launched = 0, harvested = 0;
    int64_t clock_ns;
    void *pinned;
    double end;
    FILE *file;
    unsigned depth;
    int device, count;

    if (!library) {
        fprintf(stderr, "burner: %s\n", dlerror());
        return 1;
    }
    signal(SIGTERM, on_signal);
    form = form_of(option(argc, argv, "--form", "burn"));
    depth = depth_of(argc, argv);
    duty = atof(option(argc, argv, "--duty", "70"));
    block_bytes =
        strtoull(option(argc, argv, "--block", form == COPY ? "134217728" : "268435456"), NULL, 10);
#define LOAD(variable, name) load(library, (void *)&variable, name)
    LOAD(cuInit, "cuInit");
    LOAD(cuDeviceGet, "cuDeviceGet");
    LOAD(cuDeviceGetAttribute, "cuDeviceGetAttribute");
    LOAD(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    LOAD(cuCtxSetCurrent, "cuCtxSetCurrent");
    LOAD(cuModuleLoadData, "cuModuleLoadData");
    LOAD(cuModuleGetFunction, "cuModuleGetFunction");
    LOAD(cuStreamCreate, "cuStreamCreate");
    LOAD(cuStreamSynchronize, "cuStreamSynchronize");
    LOAD(cuEventCreate, "cuEventCreate");
    LOAD(cuEventRecord, "cuEventRecord");
    LOAD(cuEventSynchronize, "cuEventSynchronize");
    LOAD(cuMemAlloc, "cuMemAlloc_v2");
    LOAD(cuMemHostAlloc, "cuMemHostAlloc");
    LOAD(cuLaunchKernel, "cuLaunchKernel");
    LOAD(cuMemsetD8, "cuMemsetD8_v2");
    LOAD(cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2");
    LOAD(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2");
    LOAD(cuStreamBeginCapture, "cuStreamBeginCapture_v2");
    LOAD(cuStreamEndCapture, "cuStreamEndCapture");
    LOAD(cuGraphInstantiateWithFlags, "cuGraphInstantiateWithFlags");
    LOAD(cuGraphExecDestroy, "cuGraphExecDestroy");
    LOAD(cuGraphDestroy, "cuGraphDestroy");
    LOAD(cuGraphLaunch, "cuGraphLaunch");
    LOAD(cuLaunchCooperativeKernel, "cuLaunchCooperativeKernel");
    check(cuInit(0), "cuInit");
    check(cuDeviceGet(&device, 0), "cuDeviceGet");
    check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    if (allocate) {
        unsigned long long block;
        int result = cuMemAlloc(&block, allocate);

        printf("{\"requested\": %zu, \"result\": \"%s\", \"code\": %d}\n", allocate,
               result == 0   ? "CUDA_SUCCESS"
               : result == 2 ? "CUDA_ERROR_OUT_OF_MEMORY"
                             : "another error",
               result);
        return processes_wait(&all) || result;
    }
    check(cuDeviceGetAttribute(&count, 16, device), "cuDeviceGetAttribute");
    multiprocessors = (unsigned)count;
    blocks = multiprocessors * 8;
    check(cuModuleLoadData(&module, ptx), "cuModuleLoadData");
    check(cuModuleGetFunction(&burn, module, kernels[form] ? kernels[form] : "burn"),
          "cuModuleGetFunction");
    check(cuModuleGetFunction(&stamp, module, "stamp"), "cuModuleGetFunction");
    if (strcmp(option(argc, argv, "--stream", "own"), "null"))
        check(cuStreamCreate(&stream, 1), "cuStreamCreate");
    get_memory();
    check(cuMemHostAlloc(&pinned, RING * sizeof *ring, 2), "cuMemHostAlloc");
    ring = pinned;
    for (unsigned i = 0; i < 256; i++) {
        check(cuEventCreate(&events[i], 3), "cuEventCreate");
        check(cuEventCreate(&side_events[i], 3), "cuEventCreate");
    }
    within = form == PERSISTENT ? WITHIN : 1;
    if (!iterations)
        iterations = calibrate(unit_us);
    prepare(iterations);
    clock_ns = compare_clocks();
    file = out ? fopen(processes_path(&all, out), "wb") : NULL;
    if (wait_file) {
        processes_ready(&all, wait_file);
        while (access(wait_file, F_OK) && !stop)
            usleep(1000);
    }
    if (requests_us > 0) {
        unsigned long units = strtoul(option(argc, argv, "--units", "20"), NULL, 10);
        unsigned short order = (unsigned short)atoi(option(argc, argv, "--seed", "1"));
        uint64_t served = serve(requests_us, units, order, seconds, iterations, file);

        if (file)
            fclose(file);
        printf("{\"requests\": %llu, \"iterations\": %llu, \"result\": \"CUDA_SUCCESS\"}\n",
               (unsigned long long)served, (unsigned long long)iterations);
        return processes_wait(&all);
    }
    end = now() + seconds;
    draw = seed;
    if (seed)
        burst_begin(0);
    while (!stop && now() < end) {
        if (seed && now() >= burst_end) {
            check(cuStreamSynchronize(stream), "cuStreamSynchronize");
            burst_rest(launched, end);
            burst_begin(launched);
        }
        launch_unit(iterations, launched);
        check(cuEventRecord(events[launched % 256], stream), "cuEventRecord");
        if (side)
            check(cuEventRecord(side_events[launched % 256], side), "cuEventRecord");
        launched++;
        if (launched - harvested > depth || gap_us > 0) {
            check(cuEventSynchronize(events[harvested % 256]), "cuEventSynchronize");
            if (side)
                check(cuEventSynchronize(side_events[harvested % 256]), "cuEventSynchronize");
            write_stamps(file, harvested);
            harvested++;
            if (harvested % 256 == 0 && file)
                fflush(file);
        }
        if (gap_us > 0)
            usleep((unsigned)gap_us);
    }
    wait_all();
    for (; harvested < launched; harvested++)
        write_stamps(file, harvested);
    if (file)
        fclose(file);
    if (seed)
        burst_ends(launched);
    printf("{\"units\": %llu, \"iterations\": %llu, \"clock_ns\": %lld, \"bursts\": [",
           (unsigned long long)(launched * within), (unsigned long long)iterations,
           (long long)clock_ns);
    for (unsigned i = 0; i < n_bursts; i++)
        printf("%s[%llu, %llu]", i ? ", " : "", (unsigned long long)bursts[i][0],
               (unsigned long long)bursts[i][1]);
    printf("], \"result\": \"CUDA_SUCCESS\"}\n");
    return processes_wait(&all);
}
