/*
 * Runs processes that compete for device memory: they allocate and free at random, in several
 * threads and in up to three ways, while some of the processes are killed
 *
 *   oom_stress [--processes N] [--threads N] [--seconds S] [--kill-every MS] [--most BYTES]
 *         [--seed N]
 *         [--ways MASK]        1 cuMemAlloc, 2 cuMemAllocAsync, 4 cuMemCreate and cuMemMap
 *                              (default: 7, all)
 *         [--end-file PATH]    the processes end early once this file exists
 *
 * After that it measures how soon after the end of a process its memory is available to another
 * process, and how much memory a process gets if it takes all it can. It prints one JSON object.
 * The program uses libcuda.so.1 through dlopen and does not depend on Tidegate.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MIB           (1ull << 20)
#define OUT_OF_MEMORY 2
#define N_BLOCKS      64
#define N_PROCESSES   64
#define N_THREADS     64

typedef unsigned long long address;
typedef void *handle;

/* CUmemAllocationProp in cuda.h 13.0: pinned memory on device 0. */
struct properties {
    int type, handle_types, location_type, location_id;
    void *meta;
    unsigned char flags[8];
};

struct access {
    int location_type, location_id, flags;
};

static int (*cuInit)(unsigned);
static int (*cuDeviceGet)(int *, int);
static int (*cuDevicePrimaryCtxRetain)(handle *, int);
static int (*cuCtxSetCurrent)(handle);
static int (*cuStreamCreate)(handle *, unsigned);
static int (*cuStreamSynchronize)(handle);
static int (*cuMemAlloc)(address *, size_t);
static int (*cuMemFree)(address);
static int (*cuMemAllocAsync)(address *, size_t, handle);
static int (*cuMemFreeAsync)(address, handle);
static int (*cuMemGetInfo)(size_t *, size_t *);
static int (*cuMemCreate)(address *, size_t, const struct properties *, address);
static int (*cuMemRelease)(address);
static int (*cuMemAddressReserve)(address *, size_t, size_t, address, address);
static int (*cuMemAddressFree)(address, size_t);
static int (*cuMemMap)(address, size_t, size_t, address, address);
static int (*cuMemUnmap)(address, size_t);

enum way { BLOCK, ASYNC, MAPPED };

struct block {
    enum way way;
    address at;
    size_t size;
};

/* Shared by all processes. */
static struct shared {
    volatile int stop;
    volatile int ready;     /* last step that a process has reached; see wait_for() */
    volatile uint64_t died; /* ns: when the parent saw the end of the killed process */
    volatile uint64_t back; /* ns: when another process saw that memory become free */
    volatile uint64_t filled, left, total;
    uint64_t allocations, refused, wrong;
    int error; /* of the first call that failed */
    char call[32];
} *shared;

static handle context;
static unsigned n_processes = 8, n_threads = 8, kill_every = 500, seconds = 5, seed = 1, ways = 7;
static size_t most = 256 * MIB;
static const char *end_file;

static uint64_t now(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void nap(unsigned us)
{
    struct timespec ts = {us / 1000000, (long)(us % 1000000) * 1000};

    nanosleep(&ts, NULL);
}

/* Returns whether a call succeeded. Records an error other than a lack of memory. */
static bool succeeded(int result, const char *call)
{
    if (result && result != OUT_OF_MEMORY) {
        if (__atomic_add_fetch(&shared->wrong, 1, __ATOMIC_RELAXED) == 1) {
            shared->error = result;
            snprintf(shared->call, sizeof shared->call, "%s", call);
        }
    }
    return !result;
}

static void load(void *library, void *variable, const char *name)
{
    void *found = dlsym(library, name);

    if (!found) {
        fprintf(stderr, "oom_stress: libcuda.so.1 has no %s\n", name);
        _exit(1);
    }
    memcpy(variable, &found, sizeof found);
}

static void start(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    int device, result;

    if (!library) {
        fprintf(stderr, "oom_stress: %s\n", dlerror());
        _exit(1);
    }
#define LOAD(variable, name) load(library, (void *)&variable, name)
    LOAD(cuInit, "cuInit");
    LOAD(cuDeviceGet, "cuDeviceGet");
    LOAD(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    LOAD(cuCtxSetCurrent, "cuCtxSetCurrent");
    LOAD(cuStreamCreate, "cuStreamCreate");
    LOAD(cuStreamSynchronize, "cuStreamSynchronize");
    LOAD(cuMemAlloc, "cuMemAlloc_v2");
    LOAD(cuMemFree, "cuMemFree_v2");
    LOAD(cuMemAllocAsync, "cuMemAllocAsync");
    LOAD(cuMemFreeAsync, "cuMemFreeAsync");
    LOAD(cuMemGetInfo, "cuMemGetInfo_v2");
    LOAD(cuMemCreate, "cuMemCreate");
    LOAD(cuMemRelease, "cuMemRelease");
    LOAD(cuMemAddressReserve, "cuMemAddressReserve");
    LOAD(cuMemAddressFree, "cuMemAddressFree");
    LOAD(cuMemMap, "cuMemMap");
    LOAD(cuMemUnmap, "cuMemUnmap");
    if (!succeeded(cuInit(0), "cuInit") || !succeeded(cuDeviceGet(&device, 0), "cuDeviceGet"))
        _exit(1);
    /* A context needs memory as well, and the other processes may hold all of it. */
    while ((result = cuDevicePrimaryCtxRetain(&context, device)) == OUT_OF_MEMORY && !shared->stop)
        nap(20000);
    if (result == OUT_OF_MEMORY)
        _exit(0);
    if (!succeeded(result, "cuDevicePrimaryCtxRetain") ||
        !succeeded(cuCtxSetCurrent(context), "cuCtxSetCurrent"))
        _exit(1);
}

/* ---- allocating and freeing at random ---- */

static int take_mapped(struct block *b)
{
    struct properties p = {.type = 1, .location_type = 1};
    address memory;
    int result;

    b->size = (b->size + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
    result = cuMemCreate(&memory, b->size, &p, 0);
    if (result)
        return result;
    result = cuMemAddressReserve(&b->at, b->size, 0, 0, 0);
    if (succeeded(result, "cuMemAddressReserve")) {
        result = cuMemMap(b->at, b->size, 0, memory, 0);
        if (!succeeded(result, "cuMemMap"))
            cuMemAddressFree(b->at, b->size);
    }
    /* The mapping keeps the memory allocated. */
    succeeded(cuMemRelease(memory), "cuMemRelease");
    return result;
}

static bool take(struct block *b, handle stream)
{
    static const char *const calls[] = {"cuMemAlloc", "cuMemAllocAsync", "cuMemCreate"};
    int result;

    switch (b->way) {
    case BLOCK:
        result = cuMemAlloc(&b->at, b->size);
        break;
    case ASYNC:
        result = cuMemAllocAsync(&b->at, b->size, stream);
        break;
    default:
        result = take_mapped(b);
    }
    if (!result || result == OUT_OF_MEMORY)
        __atomic_add_fetch(result ? &shared->refused : &shared->allocations, 1, __ATOMIC_RELAXED);
    return succeeded(result, calls[b->way]);
}

static void give(const struct block *b, handle stream)
{
    switch (b->way) {
    case BLOCK:
        succeeded(cuMemFree(b->at), "cuMemFree");
        break;
    case ASYNC:
        succeeded(cuMemFreeAsync(b->at, stream), "cuMemFreeAsync");
        break;
    default:
        succeeded(cuMemUnmap(b->at, b->size), "cuMemUnmap");
        succeeded(cuMemAddressFree(b->at, b->size), "cuMemAddressFree");
    }
}

static void *oom_stress(void *argument)
{
    unsigned draw = (unsigned)(uintptr_t)argument;
    struct block blocks[N_BLOCKS];
    unsigned n = 0;
    handle stream;

    if (!succeeded(cuCtxSetCurrent(context), "cuCtxSetCurrent") ||
        !succeeded(cuStreamCreate(&stream, 1), "cuStreamCreate"))
        return NULL;
    while (!shared->stop) {
        if (n < N_BLOCKS && rand_r(&draw) % 5 < 3) {
            struct block *b = &blocks[n];

            do
                b->way = (enum way)(rand_r(&draw) % 3);
            while (!(ways >> b->way & 1));
            /* Each halving of `most` is equally likely, so that small sizes are frequent, too. */
            b->size = most >> rand_r(&draw) % 18;
            b->size = b->size / 2 + (size_t)rand_r(&draw) % (b->size / 2 + 1) + 1;
            if (take(b, stream))
                n++;
            else
                for (unsigned half = n / 2; n > half;)
                    give(&blocks[--n], stream);
        } else if (n) {
            unsigned i = (unsigned)rand_r(&draw) % n;

            give(&blocks[i], stream);
            blocks[i] = blocks[--n];
        }
        if (rand_r(&draw) % 64 == 0)
            succeeded(cuStreamSynchronize(stream), "cuStreamSynchronize");
    }
    while (n)
        give(&blocks[--n], stream);
    succeeded(cuStreamSynchronize(stream), "cuStreamSynchronize");
    return NULL;
}

static void run_process(unsigned number)
{
    pthread_t threads[N_THREADS];

    start();
    for (unsigned i = 0; i < n_threads; i++)
        if (pthread_create(&threads[i], NULL, oom_stress,
                           (void *)(uintptr_t)(seed * 1000003 + number * 1009 + i)))
            _exit(1);
    for (unsigned i = 0; i < n_threads; i++)
        pthread_join(threads[i], NULL);
    _exit(0);
}

static pid_t spawn(void (*run)(unsigned), unsigned number)
{
    pid_t pid = fork();

    if (pid == 0) {
        run(number);
        _exit(0);
    }
    if (pid < 0) {
        perror("oom_stress: fork");
        exit(1);
    }
    return pid;
}

static unsigned compete(void)
{
    pid_t processes[N_PROCESSES];
    unsigned n_killed = 0, n_started = 0;
    uint64_t end = now() + seconds * 1000000000ull;

    for (unsigned i = 0; i < n_processes; i++)
        processes[i] = spawn(run_process, n_started++);
    while (now() < end && (!end_file || access(end_file, F_OK))) {
        unsigned which;

        nap((kill_every ? kill_every : 100) * 1000);
        if (!kill_every)
            continue;
        which = (unsigned)rand_r(&seed) % n_processes;
        kill(processes[which], SIGKILL);
        waitpid(processes[which], NULL, 0);
        n_killed++;
        processes[which] = spawn(run_process, n_started++);
    }
    shared->stop = 1;
    for (unsigned i = 0; i < n_processes; i++) {
        int status;

        waitpid(processes[i], &status, 0);
        if (status) {
            fprintf(stderr, "oom_stress: a process ended with status %#x\n", (unsigned)status);
            exit(1);
        }
    }
    shared->stop = 0;
    return n_killed;
}

/* ---- how soon the memory of a dead process is available ---- */

static void hold_much(unsigned unused)
{
    address at;

    (void)unused;
    start();
    while (cuMemAlloc(&at, 64 * MIB) == 0)
        ;
    shared->ready = 1;
    for (;;)
        pause();
}

static void watch_memory(unsigned unused)
{
    size_t before, left, total;

    (void)unused;
    start();
    shared->ready = 2;
    while (shared->ready != 3)
        nap(1000);
    succeeded(cuMemGetInfo(&before, &total), "cuMemGetInfo");
    shared->ready = 4;
    do {
        succeeded(cuMemGetInfo(&left, &total), "cuMemGetInfo");
        nap(200);
    } while (left < before + 64 * MIB && now() < shared->died + 5000000000ull);
    shared->back = now();
    _exit(0);
}

static void wait_for(int state)
{
    uint64_t end = now() + 60000000000ull;

    while (shared->ready != state) {
        if (now() > end) {
            fprintf(stderr, "oom_stress: a process did not become ready\n");
            exit(1);
        }
        nap(1000);
    }
}

static double return_ms(void)
{
    pid_t watcher, holder;

    shared->died = ~0ull - 5000000000ull;
    watcher = spawn(watch_memory, 0);
    wait_for(2);
    holder = spawn(hold_much, 0);
    wait_for(1);
    shared->ready = 3;
    wait_for(4);
    kill(holder, SIGKILL);
    waitpid(holder, NULL, 0);
    shared->died = now();
    waitpid(watcher, NULL, 0);
    return shared->back > shared->died ? (double)(shared->back - shared->died) / 1e6 : 0;
}

/* ---- how much memory there is ---- */

static void fill(unsigned unused)
{
    size_t left, total;
    address at;

    (void)unused;
    start();
    /* The governor has to take a sample before it knows how much memory the context takes. */
    nap(1500000);
    for (size_t size = 64 * MIB; size >= 2 * MIB; size /= 2)
        while (cuMemAlloc(&at, size) == 0)
            shared->filled += size;
    succeeded(cuMemGetInfo(&left, &total), "cuMemGetInfo");
    shared->left = left;
    shared->total = total;
    shared->ready = 5;
    nap(1000000); /* for observers outside this process */
    _exit(0);
}

int main(int argc, char **argv)
{
    unsigned n_killed;
    double returned;

    for (int i = 1; i + 1 < argc; i += 2) {
        unsigned long long value = strtoull(argv[i + 1], NULL, 10);

        if (!strcmp(argv[i], "--processes"))
            n_processes = (unsigned)value;
        else if (!strcmp(argv[i], "--threads"))
            n_threads = (unsigned)value;
        else if (!strcmp(argv[i], "--seconds"))
            seconds = (unsigned)value;
        else if (!strcmp(argv[i], "--kill-every"))
            kill_every = (unsigned)value;
        else if (!strcmp(argv[i], "--most"))
            most = value;
        else if (!strcmp(argv[i], "--ways"))
            ways = (unsigned)value & 7;
        else if (!strcmp(argv[i], "--seed"))
            seed = (unsigned)value;
        else if (!strcmp(argv[i], "--end-file"))
            end_file = argv[i + 1];
        else
            n_processes = 0;
    }
    if (!n_processes || n_processes > N_PROCESSES || !n_threads || n_threads > N_THREADS ||
        most < 2 * MIB || !ways) {
        fprintf(stderr,
                "oom_stress: 1 to 64 processes and threads, --most of 2 MiB or more; see the "
                "comment at the top of bench/oom_stress.c\n");
        return 64;
    }
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    n_killed = compete();
    returned = return_ms();
    waitpid(spawn(fill, 0), NULL, 0);
    printf("{\"allocations\": %llu, \"refused\": %llu, \"killed\": %u, \"wrong\": %llu, \"call\": "
           "\"%s\", \"error\": %d, \"returned_ms\": %.1f, \"filled\": %llu, \"left\": %llu, "
           "\"total\": %llu}\n",
           (unsigned long long)shared->allocations, (unsigned long long)shared->refused, n_killed,
           (unsigned long long)shared->wrong, shared->call, shared->error, returned,
           (unsigned long long)shared->filled, (unsigned long long)shared->left,
           (unsigned long long)shared->total);
    return 0;
}
