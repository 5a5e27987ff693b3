/*
 * Measures what calls to the driver API cost the caller, with any libcuda.so.1
 *
 *   overhead MEASURE... [--samples N] [--calls N] [--bytes N] [--leave-file F] [--against LIBRARY]
 *
 * Measures:
 *
 * - launch: cuLaunchKernel with an empty kernel, mean of a batch;
 * - launch-median: the median of the means of a batch's groups of eight, which excludes waits;
 * - alloc-async: cuMemAllocAsync and cuMemFreeAsync;
 * - alloc: cuMemAlloc and cuMemFree, while the program holds no other block;
 * - alloc-1000, alloc-100000: the same while it holds that many other blocks;
 * - memory-info: cuMemGetInfo;
 * - look-up-ours, look-up: cuGetProcAddress for a function that the control library replaces
 *   (cuLaunchKernel), and for one that it does not (cuEventQuery);
 * - load: dlopen of libcuda.so.1, each time in a new process.
 *
 * A sample is the mean time in ns of one call (or pair of calls) in a batch of --calls. Waiting
 * for the work of a batch is not part of the measured time. With --against each sample is a pair:
 * one for the named library, which libcuda.so.1 must have loaded, and one for libcuda.so.1 itself,
 * in the same process and in alternating order (A B B A); `load` is meaningless then. The program
 * prints one JSON object: a list of --samples numbers for each measure. Like the burner, it needs
 * no CUDA toolkit and does not depend on Tidegate.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef void *handle;

/* Name in this file, symbol in the library, parameters. */
#define FUNCTIONS(F)                                                                               \
    F(cuInit, cuInit, (unsigned))                                                                  \
    F(cuDeviceGet, cuDeviceGet, (int *, int))                                                      \
    F(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (handle *, int))                         \
    F(cuCtxSetCurrent, cuCtxSetCurrent, (handle))                                                  \
    F(cuModuleLoadData, cuModuleLoadData, (handle *, const void *))                                \
    F(cuModuleGetFunction, cuModuleGetFunction, (handle *, handle, const char *))                  \
    F(cuStreamCreate, cuStreamCreate, (handle *, unsigned))                                        \
    F(cuStreamSynchronize, cuStreamSynchronize, (handle))                                          \
    F(cuMemAlloc, cuMemAlloc_v2, (unsigned long long *, size_t))                                   \
    F(cuMemFree, cuMemFree_v2, (unsigned long long))                                               \
    F(cuMemAllocAsync, cuMemAllocAsync, (unsigned long long *, size_t, handle))                    \
    F(cuMemFreeAsync, cuMemFreeAsync, (unsigned long long, handle))                                \
    F(cuMemGetInfo, cuMemGetInfo_v2, (size_t *, size_t *))                                         \
    F(cuGetProcAddress, cuGetProcAddress_v2, (const char *, void **, int, uint64_t, int *))        \
    F(cuLaunchKernel, cuLaunchKernel,                                                              \
      (handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle,       \
       void **, void **))

#define POINTER(name, symbol, parameters) static int(*name) parameters;
FUNCTIONS(POINTER)

/* The functions of both libraries, when two are compared. */
static struct functions {
#define MEMBER(name, symbol, parameters) int(*name) parameters;
    FUNCTIONS(MEMBER)
} original, governed;

/* The simulated GPU recognises this name and parameter. */
static const char ptx[] = ".version 7.0\n.target sm_70\n.address_size 64\n"
                          ".visible .entry burn(.param .u64 ns)\n{\n  ret;\n}\n";

#define GROUP 8
static handle stream, empty;
static unsigned n_samples = 30, n_calls = 200, n_blocks;
static size_t n_bytes = 65536;
static const char *against;

static void check(int result, const char *call)
{
    if (result) {
        fprintf(stderr, "overhead: %s returned %d\n", call, result);
        exit(1);
    }
}

static uint64_t now(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void load(void *library, void *variable, const char *name)
{
    void *found = dlsym(library, name);

    if (!found) {
        fprintf(stderr, "overhead: the library has no symbol %s\n", name);
        exit(1);
    }
    memcpy(variable, &found, sizeof found);
}

static void *open_library(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

    if (!library) {
        fprintf(stderr, "overhead: %s\n", dlerror());
        exit(1);
    }
    return library;
}

static void start(void)
{
    void *library = open_library();
    handle context, module;
    int device;

#define LOAD(name, symbol, parameters)                                                             \
    load(library, (void *)&governed.name, #symbol);                                                \
    name = governed.name;
    FUNCTIONS(LOAD)
    check(cuInit(0), "cuInit");
    check(cuDeviceGet(&device, 0), "cuDeviceGet");
    check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    check(cuModuleLoadData(&module, ptx), "cuModuleLoadData");
    check(cuModuleGetFunction(&empty, module, "burn"), "cuModuleGetFunction");
    check(cuStreamCreate(&stream, 1), "cuStreamCreate");
}

/* Finds the functions in the library `name`, which libcuda.so.1 must have loaded. */
static void start_against(const char *name)
{
    void *library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);

    if (!library) {
        fprintf(stderr, "overhead: %s is not loaded\n", name);
        exit(1);
    }
#define LOAD_ORIGINAL(name, symbol, parameters) load(library, (void *)&original.name, #symbol);
    FUNCTIONS(LOAD_ORIGINAL)
}

static void use(const struct functions *which)
{
#define USE(name, symbol, parameters) name = which->name;
    FUNCTIONS(USE)
}

/* ---- the measured operations: one call, or one pair of calls ---- */

static void do_launch(void)
{
    uint64_t ns = 1000;
    void *parameters[] = {&ns};

    check(cuLaunchKernel(empty, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL), "cuLaunchKernel");
}

static void do_alloc_async(void)
{
    unsigned long long block;

    check(cuMemAllocAsync(&block, n_bytes, stream), "cuMemAllocAsync");
    check(cuMemFreeAsync(block, stream), "cuMemFreeAsync");
}

static void do_alloc(void)
{
    unsigned long long block;

    check(cuMemAlloc(&block, n_bytes), "cuMemAlloc");
    check(cuMemFree(block), "cuMemFree");
}

static void do_memory_info(void)
{
    size_t left, total;

    check(cuMemGetInfo(&left, &total), "cuMemGetInfo");
}

static void look_up(const char *name)
{
    void *found;
    int status;

    check(cuGetProcAddress(name, &found, 12000, 0, &status), "cuGetProcAddress");
}

static void do_look_up_ours(void)
{
    look_up("cuLaunchKernel");
}

static void do_look_up(void)
{
    look_up("cuEventQuery");
}

/* ---- measuring ---- */

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double batch(void (*call)(void))
{
    uint64_t began = now();

    for (unsigned i = 0; i < n_calls; i++)
        call();
    return (double)(now() - began) / n_calls;
}

static double batch_median(void (*call)(void), double *groups)
{
    unsigned n = (n_calls + GROUP - 1) / GROUP;

    for (unsigned i = 0; i < n; i++) {
        uint64_t began = now();

        for (unsigned k = 0; k < GROUP; k++)
            call();
        groups[i] = (double)(now() - began) / GROUP;
    }
    qsort(groups, n, sizeof *groups, by_size);
    return groups[n / 2];
}

/* Allocates small blocks until there are `n`; they are freed when the process ends. */
static void keep_blocks(unsigned n)
{
    for (; n_blocks < n; n_blocks++) {
        unsigned long long block;

        check(cuMemAlloc(&block, 512), "cuMemAlloc");
    }
}

/* Returns how long the first dlopen in a new process takes, in ns, as that process prints it. */
static double load_once(char *self)
{
    char text[64] = "";
    int ends[2], status = 1;
    ssize_t n;
    pid_t pid;

    check(pipe(ends), "pipe");
    pid = fork();
    if (pid == 0) {
        dup2(ends[1], 1);
        execl("/proc/self/exe", self, "--load-once", (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    n = read(ends[0], text, sizeof text - 1);
    close(ends[0]);
    if (pid < 0 || waitpid(pid, &status, 0) != pid || status || n <= 0) {
        fprintf(stderr, "overhead: a process that loads libcuda.so.1 failed\n");
        exit(1);
    }
    return atof(text);
}

static const struct measure {
    const char *name;
    void (*call)(void); /* NULL for `load` */
    unsigned blocks;
    int median;
} measures[] = {
    {"launch", do_launch, 0, 0},
    {"launch-median", do_launch, 0, 1},
    {"alloc-async", do_alloc_async, 0, 0},
    {"memory-info", do_memory_info, 0, 0},
    {"look-up-ours", do_look_up_ours, 0, 0},
    {"look-up", do_look_up, 0, 0},
    {"load", NULL, 0, 0},
    /* After the others, because the blocks stay alive. */
    {"alloc", do_alloc, 0, 0},
    {"alloc-1000", do_alloc, 1000, 0},
    {"alloc-100000", do_alloc, 100000, 0},
};

static double sample(const struct measure *m, char *self, double *groups)
{
    double result;

    if (!m->call)
        return load_once(self);
    result = m->median ? batch_median(m->call, groups) : batch(m->call);
    check(cuStreamSynchronize(stream), "cuStreamSynchronize");
    return result;
}

static void run(const struct measure *m, char *self)
{
    double *groups = calloc(n_calls, sizeof *groups);

    keep_blocks(m->blocks);
    for (unsigned i = 0; i < n_samples + 2; i++) {
        const char *separator = i == 2 ? "" : ", ";
        double of[2];

        if (against) {
            for (unsigned k = 0; k < 2; k++) {
                unsigned which = (i + k) % 2;

                use(which ? &governed : &original);
                of[which] = sample(m, self, groups);
            }
            use(&governed);
        } else {
            of[0] = sample(m, self, groups);
        }
        if (i < 2) /* warm-up */
            continue;
        if (against)
            printf("%s[%.1f, %.1f]", separator, of[0], of[1]);
        else
            printf("%s%.1f", separator, of[0]);
    }
    free(groups);
}

int main(int argc, char **argv)
{
    const char *separator = "{", *leave_file = NULL;

    if (argc == 2 && !strcmp(argv[1], "--load-once")) {
        uint64_t began = now();

        open_library();
        printf("%llu\n", (unsigned long long)(now() - began));
        return 0;
    }
    for (int i = 1; i + 1 < argc; i++) {
        if (!strcmp(argv[i], "--against"))
            against = argv[i + 1];
        if (!strcmp(argv[i], "--leave-file"))
            leave_file = argv[i + 1];
        if (!strcmp(argv[i], "--samples"))
            n_samples = (unsigned)atoi(argv[i + 1]);
        if (!strcmp(argv[i], "--calls"))
            n_calls = (unsigned)atoi(argv[i + 1]);
        if (!strcmp(argv[i], "--bytes"))
            n_bytes = strtoull(argv[i + 1], NULL, 10);
    }
    if (!n_samples || !n_calls || !n_bytes) {
        fprintf(stderr, "overhead: --samples, --calls and --bytes must be above 0\n");
        return 64;
    }
    start();
    if (against)
        start_against(against);
    for (size_t k = 0; k < sizeof measures / sizeof *measures; k++) {
        for (int i = 1; i < argc; i++) {
            if (strcmp(argv[i], measures[k].name))
                continue;
            printf("%s\"%s\": [", separator, measures[k].name);
            run(&measures[k], argv[0]);
            printf("]");
            separator = ", ";
            break;
        }
    }
    if (*separator == '{') {
        fprintf(stderr,
                "overhead: no measure was given; see the comment at the top of overhead.c\n");
        return 64;
    }
    printf("}\n");
    fflush(stdout);
    if (leave_file) {
        char ready[4096];

        snprintf(ready, sizeof ready, "%s.ready", leave_file);
        close(open(ready, O_CREAT | O_WRONLY | O_CLOEXEC, 0644));
        while (access(leave_file, F_OK))
            usleep(1000);
    }
    return 0;
}
