/*
 * A burner for a real GPU: units of work of a known length, each stamped by the GPU's own clock.
 *
 *   burner --unit-us U --seconds S --out FILE [--iterations N] [--depth D] [--gap-us G]
 *          [--bursts SEED] [--wait-file F] [--allocate BYTES] [--stream own|null]
 *
 * A unit is a kernel that runs a fixed number of dependent multiply-adds in every multiprocessor,
 * and a one-thread kernel that writes %globaltimer into pinned host memory. The number of
 * iterations is found at the start (for a job alone) or given (so that a governed job does the same
 * work). With --bursts it works for 0.2 to 2 s and rests for 3/7 as long, in turn; the last line
 * says with which unit each burst began and ended. FILE gets records of two little-endian u64: the
 * time of the stamp, and 0. The last line on standard output is JSON. It speaks the driver API
 * through dlopen, needs no CUDA toolkit, and knows nothing of Tidegate.
 */
#include <dlfcn.h>
#include <fcntl.h>
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
static int (*cuLaunchKernel)(handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                             unsigned, handle, void **, void **);

static const char ptx[] = ".version 7.0\n.target sm_70\n.address_size 64\n"
                          ".visible .entry burn(.param .u64 count, .param .u64 sink)\n{\n"
                          "  .reg .u64 %n, %i, %p;\n  .reg .f32 %a;\n  .reg .pred %q;\n"
                          "  ld.param.u64 %n, [count];\n  ld.param.u64 %p, [sink];\n"
                          "  mov.u64 %i, 0;\n  mov.f32 %a, 0f3F800000;\n"
                          "LOOP:\n  fma.rn.f32 %a, %a, 0f3F7FFFFF, 0f33800000;\n"
                          "  add.u64 %i, %i, 1;\n  setp.lt.u64 %q, %i, %n;\n  @%q bra LOOP;\n"
                          "  setp.eq.f32 %q, %a, 0f00000000;\n  @%q st.global.f32 [%p], %a;\n"
                          "  ret;\n}\n"
                          ".visible .entry stamp(.param .u64 slot)\n{\n"
                          "  .reg .u64 %p, %t;\n  ld.param.u64 %p, [slot];\n"
                          "  mov.u64 %t, %globaltimer;\n  st.global.u64 [%p], %t;\n  ret;\n}\n";

#define RING 65536
static volatile uint64_t *ring;
static handle stream, burn, stamp;
static unsigned long long sink;
static unsigned blocks;
static volatile sig_atomic_t stop;

static void on_signal(int number)
{
    (void)number;
    stop = 1;
}

static void check(int result, const char *what)
{
    if (result) {
        fprintf(stderr, "burner: %s answered %d\n", what, result);
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

static void launch_unit(uint64_t iterations, uint64_t index)
{
    volatile uint64_t *slot = &ring[index % RING];
    void *burn_args[] = {&iterations, &sink};
    void *stamp_args[] = {&slot};

    check(cuLaunchKernel(burn, blocks, 1, 1, 256, 1, 1, 0, stream, burn_args, NULL),
          "cuLaunchKernel");
    check(cuLaunchKernel(stamp, 1, 1, 1, 1, 1, 1, 0, stream, stamp_args, NULL), "cuLaunchKernel");
}

static uint64_t calibrate(double unit_us)
{
    uint64_t iterations = 10000;

    for (int round = 0; round < 6; round++) {
        double took;

        for (int warm = 0; warm < 100; warm++)
            launch_unit(iterations, 0);
        check(cuStreamSynchronize(stream), "cuStreamSynchronize");
        took = now();
        for (int i = 0; i < 200; i++)
            launch_unit(iterations, 0);
        check(cuStreamSynchronize(stream), "cuStreamSynchronize");
        took = (now() - took) / 200 * 1e6;
        iterations = (uint64_t)((double)iterations * unit_us / took) + 1;
    }
    return iterations;
}

/* ---- bursts ---- */

#define N_BURSTS 256
static uint64_t bursts[N_BURSTS][2];
static unsigned n_bursts, draw;
static double burst_end, burst_length;

static void burst_begin(uint64_t unit)
{
    burst_length = 0.2 + 1.8 * (rand_r(&draw) % 10000) / 10000;
    burst_end = now() + burst_length;
    if (n_bursts < N_BURSTS)
        bursts[n_bursts][0] = unit;
}

static void burst_rest(uint64_t unit, double end)
{
    double until = now() + burst_length * 3 / 7;

    if (n_bursts < N_BURSTS && unit > bursts[n_bursts][0])
        bursts[n_bursts++][1] = unit - 1;
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

int main(int argc, char **argv)
{
    double unit_us = atof(option(argc, argv, "--unit-us", "500"));
    double seconds = atof(option(argc, argv, "--seconds", "5"));
    uint64_t iterations = strtoull(option(argc, argv, "--iterations", "0"), NULL, 10);
    uint64_t depth = strtoull(option(argc, argv, "--depth", "64"), NULL, 10);
    double gap_us = atof(option(argc, argv, "--gap-us", "0"));
    const char *out = option(argc, argv, "--out", NULL);
    const char *wait_file = option(argc, argv, "--wait-file", NULL);
    unsigned seed = (unsigned)strtoul(option(argc, argv, "--bursts", "0"), NULL, 10);
    size_t allocate = strtoull(option(argc, argv, "--allocate", "0"), NULL, 10);
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    handle context, module, events[256];
    uint64_t launched = 0, harvested = 0;
    void *pinned;
    double end;
    FILE *file;
    int device, multiprocessors;

    if (!library) {
        fprintf(stderr, "burner: %s\n", dlerror());
        return 1;
    }
    signal(SIGTERM, on_signal);
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
        return result != 0;
    }
    if (depth > 255)
        depth = 255;
    check(cuDeviceGetAttribute(&multiprocessors, 16, device), "cuDeviceGetAttribute");
    blocks = (unsigned)multiprocessors * 8;
    check(cuModuleLoadData(&module, ptx), "cuModuleLoadData");
    check(cuModuleGetFunction(&burn, module, "burn"), "cuModuleGetFunction");
    check(cuModuleGetFunction(&stamp, module, "stamp"), "cuModuleGetFunction");
    if (strcmp(option(argc, argv, "--stream", "own"), "null"))
        check(cuStreamCreate(&stream, 1), "cuStreamCreate");
    check(cuMemAlloc(&sink, 4096), "cuMemAlloc");
    check(cuMemHostAlloc(&pinned, RING * sizeof *ring, 2), "cuMemHostAlloc");
    ring = pinned;
    for (unsigned i = 0; i < 256; i++)
        check(cuEventCreate(&events[i], 3), "cuEventCreate");
    if (!iterations)
        iterations = calibrate(unit_us);
    file = out ? fopen(out, "wb") : NULL;
    if (wait_file) {
        char ready[4096];

        snprintf(ready, sizeof ready, "%s.ready", wait_file);
        close(open(ready, O_CREAT | O_WRONLY, 0644));
        while (access(wait_file, F_OK) && !stop)
            usleep(1000);
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
        ring[launched % RING] = 0;
        launch_unit(iterations, launched);
        check(cuEventRecord(events[launched % 256], stream), "cuEventRecord");
        launched++;
        if (launched - harvested > depth || gap_us > 0) {
            uint64_t record[2];

            check(cuEventSynchronize(events[harvested % 256]), "cuEventSynchronize");
            record[0] = ring[harvested % RING];
            record[1] = 0;
            if (file)
                fwrite(record, sizeof record, 1, file);
            harvested++;
            if (harvested % 256 == 0 && file)
                fflush(file);
        }
        if (gap_us > 0)
            usleep((unsigned)gap_us);
    }
    check(cuStreamSynchronize(stream), "cuStreamSynchronize");
    for (; harvested < launched; harvested++) {
        uint64_t record[2] = {ring[harvested % RING], 0};

        if (file)
            fwrite(record, sizeof record, 1, file);
    }
    if (file)
        fclose(file);
    if (seed && n_bursts < N_BURSTS && launched > bursts[n_bursts][0])
        bursts[n_bursts++][1] = launched - 1;
    printf("{\"units\": %llu, \"iterations\": %llu, \"bursts\": [", (unsigned long long)launched,
           (unsigned long long)iterations);
    for (unsigned i = 0; i < n_bursts; i++)
        printf("%s[%llu, %llu]", i ? ", " : "", (unsigned long long)bursts[i][0],
               (unsigned long long)bursts[i][1]);
    printf("], \"result\": \"CUDA_SUCCESS\"}\n");
    return 0;
}
