/*
 * Keeps the simulated GPU busy through the driver API, and records when each unit of work ended
 *
 * The program finds the driver as other programs do: dlopen("libcuda.so.1"), dlsym for cuInit and
 * cuGetProcAddress, and the latter for everything else. Up to --depth units are launched ahead, and
 * their end times are read back in groups by a second stream, so that the first always has work.
 * Each record in the --out file is two little-endian u64: the time of the end on the GPU's clock in
 * ns, and 0. With --bursts the program alternates between working for 0.2 to 2 s and resting, so
 * that it works for --duty percent of the time (default 70); the line that it finally prints lists
 * the first and the last unit of each burst.
 */
#include <dlfcn.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../bench/processes.h"
#include "cuda_abi.h"

#define FLUSH_INTERVAL 50000000u /* ns */
#define MAX_GROUPS     64

static struct {
    CUresult (*init)(unsigned int);
    CUresult (*device_get)(CUdevice *, int);
    CUresult (*retain)(CUcontext *, CUdevice);
    CUresult (*set_current)(CUcontext);
    CUresult (*load)(CUmodule *, const void *);
    CUresult (*get_function)(CUfunction *, CUmodule, const char *);
    CUresult (*allocate)(CUdeviceptr *, size_t);
    CUresult (*allocate_host)(void **, size_t, unsigned int);
    CUresult (*stream)(CUstream *, unsigned int);
    CUresult (*stream_sync)(CUstream);
    CUresult (*event)(CUevent *, unsigned int);
    CUresult (*event_record)(CUevent, CUstream);
    CUresult (*event_sync)(CUevent);
    CUresult (*copy_back)(void *, CUdeviceptr, size_t, CUstream);
    CUresult (*launch)(CUfunction, unsigned int, unsigned int, unsigned int, unsigned int,
                       unsigned int, unsigned int, unsigned int, CUstream, void **, void **);
    CUresult (*error_name)(CUresult, const char **);
} cu;

static struct {
    double seconds;
    uint64_t unit;  /* ns */
    uint64_t gap;   /* ns */
    uint64_t depth; /* units */
    uint64_t memory, chunk;
    uint64_t allocate;
    bool allocate_only;
    unsigned seed; /* of the bursts; 0: no rests */
    uint64_t duty; /* percent */
    unsigned processes;
    const char *out;
    const char *wait;
} options = {
    .seconds = 1, .unit = 500000, .depth = 64, .chunk = 256u << 20, .duty = 70, .processes = 1};

static struct processes all;

static volatile sig_atomic_t stopped;

static void stop(int signal)
{
    (void)signal;
    stopped = 1;
}

static uint64_t clock_now(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void sleep_ns(uint64_t ns)
{
    struct timespec time = {.tv_sec = (time_t)(ns / 1000000000u),
                            .tv_nsec = (long)(ns % 1000000000u)};

    nanosleep(&time, NULL);
}

static const char *error_name(CUresult error)
{
    static char number[32];
    const char *name = NULL;

    if (cu.error_name && cu.error_name(error, &name) == CUDA_SUCCESS && name)
        return name;
    snprintf(number, sizeof(number), "error %d", (int)error);
    return number;
}

static void check(CUresult error, const char *call)
{
    if (error == CUDA_SUCCESS)
        return;
    fprintf(stderr, "simgpu-workload: %s: %s\n", call, error_name(error));
    exit(1);
}

#define CALL(entry, call, ...) check(cu.entry(__VA_ARGS__), call)

static void driver_open(void)
{
    CUresult (*find)(const char *, void **, int, uint64_t, CUdriverProcAddressQueryResult *);
    const struct {
        const char *name;
        void *place;
    } entries[] = {
        {"cuDeviceGet", &cu.device_get},           {"cuDevicePrimaryCtxRetain", &cu.retain},
        {"cuCtxSetCurrent", &cu.set_current},      {"cuModuleLoadData", &cu.load},
        {"cuModuleGetFunction", &cu.get_function}, {"cuMemAlloc", &cu.allocate},
        {"cuMemHostAlloc", &cu.allocate_host},     {"cuStreamCreate", &cu.stream},
        {"cuStreamSynchronize", &cu.stream_sync},  {"cuEventCreate", &cu.event},
        {"cuEventRecord", &cu.event_record},       {"cuEventSynchronize", &cu.event_sync},
        {"cuMemcpyDtoHAsync", &cu.copy_back},      {"cuLaunchKernel", &cu.launch},
        {"cuGetErrorName", &cu.error_name},
    };
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

    if (!library) {
        fprintf(stderr, "simgpu-workload: %s\n", dlerror());
        exit(1);
    }
    *(void **)&cu.init = dlsym(library, "cuInit");
    *(void **)&find = dlsym(library, "cuGetProcAddress_v2");
    if (!cu.init || !find) {
        fprintf(stderr, "simgpu-workload: libcuda.so.1 lacks cuInit or cuGetProcAddress_v2\n");
        exit(1);
    }
    for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); i++) {
        CUdriverProcAddressQueryResult status;
        void *found = NULL;

        check(find(entries[i].name, &found, 12000, 0, &status), entries[i].name);
        memcpy(entries[i].place, &found, sizeof(found));
    }
}

static int allocate_only(void)
{
    CUdeviceptr address = 0;
    CUresult r = cu.allocate(&address, options.allocate);

    printf("{\"call\": \"cuMemAlloc\", \"bytes\": %" PRIu64 ", \"result\": \"%s\", \"code\": %d}\n",
           options.allocate, error_name(r), (int)r);
    return r != CUDA_SUCCESS;
}

static uint64_t allocate_memory(void)
{
    uint64_t sum = 0;

    while (sum < options.memory) {
        uint64_t left = options.memory - sum;
        uint64_t size = left < options.chunk ? left : options.chunk;
        CUdeviceptr address;

        CALL(allocate, "cuMemAlloc", &address, size);
        sum += size;
    }
    return sum;
}

static void wait_for_start(void)
{
    if (!options.wait)
        return;
    processes_ready(&all, options.wait);
    while (!stopped && access(options.wait, F_OK) != 0)
        sleep_ns(2000000);
}

/* Units in a ring of slots. The units of a group share one event. */
struct ring {
    CUstream work, back;
    CUfunction burn;
    CUdeviceptr slots;
    uint64_t *ends; /* pinned */
    CUevent events[MAX_GROUPS];
    uint64_t group;    /* units */
    uint64_t groups;   /* in the ring */
    uint64_t launched; /* groups */
    uint64_t read;     /* groups */
    FILE *out;
    uint64_t flushed; /* ns */
};

static void ring_make(struct ring *ring)
{
    CUmodule module;

    /* Groups are small, because a container with a small share would wait a long time for a large
     * group. */
    ring->group = options.gap ? 1 : (options.depth + 15) / 16;
    ring->groups = options.gap ? 1 : (options.depth + ring->group - 1) / ring->group;
    CALL(load, "cuModuleLoadData", &module, "// tidegate simgpu module\nkernel burn_stamp\n");
    CALL(get_function, "cuModuleGetFunction", &ring->burn, module, "burn_stamp");
    CALL(stream, "cuStreamCreate", &ring->work, CU_STREAM_NON_BLOCKING);
    CALL(stream, "cuStreamCreate", &ring->back, CU_STREAM_NON_BLOCKING);
    CALL(allocate, "cuMemAlloc", &ring->slots, ring->groups * ring->group * 8);
    CALL(allocate_host, "cuMemHostAlloc", (void **)&ring->ends, ring->group * 8, 0);
    for (uint64_t i = 0; i < ring->groups; i++)
        CALL(event, "cuEventCreate", &ring->events[i],
             CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
}

static void ring_launch(struct ring *ring)
{
    uint64_t place = ring->launched % ring->groups;

    for (uint64_t i = 0; i < ring->group; i++) {
        uint64_t slot = ring->slots + (place * ring->group + i) * 8;
        void *parameters[] = {&options.unit, &slot};

        CALL(launch, "cuLaunchKernel", ring->burn, 1, 1, 1, 1, 1, 1, 0, ring->work, parameters,
             NULL);
    }
    CALL(event_record, "cuEventRecord", ring->events[place], ring->work);
    ring->launched++;
}

static void ring_flush(struct ring *ring, uint64_t now)
{
    if (ring->out && fflush(ring->out) != 0) {
        fprintf(stderr, "simgpu-workload: %s: %s\n", options.out, strerror(errno));
        exit(1);
    }
    ring->flushed = now;
}

static void ring_read(struct ring *ring)
{
    uint64_t place = ring->read % ring->groups;
    uint64_t now;

    CALL(event_sync, "cuEventSynchronize", ring->events[place]);
    CALL(copy_back, "cuMemcpyDtoHAsync", ring->ends, ring->slots + place * ring->group * 8,
         ring->group * 8, ring->back);
    CALL(stream_sync, "cuStreamSynchronize", ring->back);
    for (uint64_t i = 0; ring->out && i < ring->group; i++) {
        uint64_t record[2] = {ring->ends[i], 0};

        fwrite(record, sizeof(record), 1, ring->out);
    }
    ring->read++;
    now = clock_now();
    if (now - ring->flushed >= FLUSH_INTERVAL)
        ring_flush(ring, now);
}

#define MAX_BURSTS 256

static struct {
    uint64_t units[MAX_BURSTS][2];
    unsigned n, draw;
    uint64_t end, length; /* ns */
} bursts;

static void burst_begin(uint64_t unit)
{
    bursts.length = 200000000u + (uint64_t)(rand_r(&bursts.draw) % 10000) * 180000u;
    bursts.end = clock_now() + bursts.length;
    if (bursts.n < MAX_BURSTS)
        bursts.units[bursts.n][0] = unit;
}

static void burst_ends(uint64_t unit)
{
    if (bursts.n < MAX_BURSTS && unit > bursts.units[bursts.n][0])
        bursts.units[bursts.n++][1] = unit - 1;
}

static void burst_rest(struct ring *ring, uint64_t end)
{
    uint64_t until;

    while (ring->read < ring->launched)
        ring_read(ring);
    burst_ends(ring->launched * ring->group);
    until = clock_now() + bursts.length * (100 - options.duty) / options.duty;
    while (!stopped && clock_now() < until && clock_now() < end)
        sleep_ns(1000000);
    burst_begin(ring->launched * ring->group);
}

static void ring_run(struct ring *ring, uint64_t end)
{
    bursts.draw = options.seed;
    if (options.seed)
        burst_begin(0);
    while (!stopped && clock_now() < end) {
        if (options.seed && clock_now() >= bursts.end)
            burst_rest(ring, end);
        if (ring->launched - ring->read < ring->groups) {
            ring_launch(ring);
            continue;
        }
        ring_read(ring);
        if (options.gap)
            sleep_ns(options.gap);
    }
    while (ring->read < ring->launched)
        ring_read(ring);
    if (options.seed)
        burst_ends(ring->launched * ring->group);
    ring_flush(ring, clock_now());
}

static void usage(void)
{
    fprintf(stderr, "simgpu-workload: --seconds S --unit-us U --gap-us G --depth N --out FILE "
                    "--bursts SEED --duty PERCENT --memory BYTES --chunk BYTES --wait-file FILE "
                    "--processes N --allocate BYTES\n");
    exit(2);
}

static uint64_t number(const char *text)
{
    char *end;
    unsigned long long value;

    errno = 0;
    value = strtoull(text, &end, 10);
    if (errno || end == text || *end)
        usage();
    return value;
}

static void read_options(int argc, char **argv)
{
    static const struct option names[] = {
        {"seconds", required_argument, NULL, 's'},
        {"unit-us", required_argument, NULL, 'u'},
        {"gap-us", required_argument, NULL, 'g'},
        {"depth", required_argument, NULL, 'd'},
        {"out", required_argument, NULL, 'o'},
        {"memory", required_argument, NULL, 'm'},
        {"chunk", required_argument, NULL, 'c'},
        {"wait-file", required_argument, NULL, 'w'},
        {"allocate", required_argument, NULL, 'a'},
        {"bursts", required_argument, NULL, 'b'},
        {"duty", required_argument, NULL, 'y'},
        {"processes", required_argument, NULL, 'p'},
        {0},
    };
    int option;

    while ((option = getopt_long(argc, argv, "", names, NULL)) != -1) {
        switch (option) {
        case 's':
            options.seconds = strtod(optarg, NULL);
            break;
        case 'u':
            options.unit = number(optarg) * 1000;
            break;
        case 'g':
            options.gap = number(optarg) * 1000;
            break;
        case 'd':
            options.depth = number(optarg);
            break;
        case 'o':
            options.out = optarg;
            break;
        case 'b':
            options.seed = (unsigned)number(optarg);
            break;
        case 'y':
            options.duty = number(optarg);
            break;
        case 'm':
            options.memory = number(optarg);
            break;
        case 'c':
            options.chunk = number(optarg);
            break;
        case 'p':
            options.processes = (unsigned)number(optarg);
            break;
        case 'w':
            options.wait = optarg;
            break;
        case 'a':
            options.allocate = number(optarg);
            options.allocate_only = true;
            break;
        default:
            usage();
        }
    }
    if (optind < argc || options.depth == 0 || options.depth > 1000 || options.chunk == 0 ||
        options.duty == 0 || options.duty > 100)
        usage();
}

int main(int argc, char **argv)
{
    struct sigaction action = {.sa_handler = stop};
    struct ring ring = {0};
    CUcontext context;
    CUdevice device;
    uint64_t memory, start;

    read_options(argc, argv);
    all = processes_fork(options.processes);
    options.out = processes_path(&all, options.out);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    driver_open();
    CALL(init, "cuInit", 0);
    CALL(device_get, "cuDeviceGet", &device, 0);
    CALL(retain, "cuDevicePrimaryCtxRetain", &context, device);
    CALL(set_current, "cuCtxSetCurrent", context);
    if (options.allocate_only) {
        int failed = allocate_only();

        return processes_wait(&all) || failed;
    }

    if (options.out) {
        ring.out = fopen(options.out, "ae");
        if (!ring.out) {
            fprintf(stderr, "simgpu-workload: %s: %s\n", options.out, strerror(errno));
            return 1;
        }
    }
    memory = allocate_memory();
    ring_make(&ring);
    wait_for_start();
    start = clock_now();
    ring.flushed = start;
    ring_run(&ring, start + (uint64_t)(options.seconds * 1e9));
    printf("{\"units\": %" PRIu64 ", \"seconds\": %.6f, \"memory\": %" PRIu64 ", \"bursts\": [",
           ring.read * ring.group, (double)(clock_now() - start) / 1e9, memory);
    for (unsigned i = 0; i < bursts.n; i++)
        printf("%s[%" PRIu64 ", %" PRIu64 "]", i ? ", " : "", bursts.units[i][0],
               bursts.units[i][1]);
    printf("], \"result\": \"CUDA_SUCCESS\"}\n");
    return processes_wait(&all);
}
