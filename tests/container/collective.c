/*
 * A program with kernels on two GPUs that wait for each other, as those of a collective do.
 *
 *   collective one N        one process, one thread: a kernel on each GPU, N times
 *   collective each N       a process for each GPU
 *   collective RANK N       one half: another process, in another container, runs the other half
 *
 * An iteration is 100 us of work on each GPU, and a kernel that spins until its counterpart runs
 * and then works for 50 us. A thread keeps querying the simulated GPU, because the simulation
 * advances a kernel's effects only in calls of its process. The program waits for the GPUs after
 * every fourth iteration. Each process creates /out/ready-RANK, and begins when /out/begin exists.
 * It prints the total time and the time of the longest four iterations, in seconds.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define WORDS "/dev/tidegate-simgpu/words"

static void *cuda;
static volatile uint32_t *words; /* progress of each rank */

struct half {
    void *context, *burn, *meet;
    unsigned rank;
};

static void must(int error, const char *call)
{
    if (error) {
        printf("%s: %d\n", call, error);
        exit(1);
    }
}

static int (*find(const char *name))()
{
    int (*found)() = (int (*)())dlsym(cuda, name);

    must(!found, name);
    return found;
}

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void open_driver(void)
{
    char own[1024];
    FILE *file = fopen("/run/tidegate/devices", "r");

    must(!file || !fgets(own, sizeof(own), file), "/run/tidegate/devices");
    own[strcspn(own, "\n")] = 0;
    setenv("CUDA_VISIBLE_DEVICES", own, 1);
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    must(!cuda, "dlopen");
    must(find("cuInit")(0), "cuInit");
}

static void begin_half(struct half *half, int device, unsigned rank)
{
    void *module;

    half->rank = rank;
    must(find("cuDevicePrimaryCtxRetain")(&half->context, device), "cuDevicePrimaryCtxRetain");
    must(find("cuCtxSetCurrent")(half->context), "cuCtxSetCurrent");
    must(find("cuModuleLoadData")(&module, "image"), "cuModuleLoadData");
    must(find("cuModuleGetFunction")(&half->burn, module, "burn"), "cuModuleGetFunction");
    must(find("cuModuleGetFunction")(&half->meet, module, "meet"), "cuModuleGetFunction");
}

static void launch(void *function, void **parameters)
{
    int (*call)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                void *, void **, void **) = (void *)find("cuLaunchKernel");

    must(call(function, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL), "cuLaunchKernel");
}

static void iterate(const struct half *half, uint64_t n)
{
    uint64_t work = 100000, together = 50000;
    volatile uint32_t *own = &words[half->rank], *other = &words[!half->rank];
    void *worked[] = {&work}, *met[] = {&together, &own, &other, &n};

    must(find("cuCtxSetCurrent")(half->context), "cuCtxSetCurrent");
    launch(half->burn, worked);
    launch(half->meet, met);
}

static struct half halves[2];
static int n_halves;

static void *look(void *unused)
{
    for (;; usleep(100))
        for (int h = 0; h < n_halves; h++) {
            find("cuCtxSetCurrent")(halves[h].context);
            find("cuStreamQuery")(NULL);
        }
    return unused;
}

static void run(int n_run, uint64_t n, FILE *out)
{
    double begin, last, longest = 0;
    char ready[32];
    pthread_t thread;

    n_halves = n_run;
    pthread_create(&thread, NULL, look, NULL);
    snprintf(ready, sizeof(ready), "/out/ready-%u", halves[0].rank);
    fclose(fopen(ready, "w"));
    while (access("/out/begin", F_OK))
        usleep(2000);
    begin = last = now();
    for (uint64_t i = 1; i <= n; i++) {
        for (int h = 0; h < n_halves; h++)
            iterate(&halves[h], i);
        if (i % 4)
            continue;
        for (int h = 0; h < n_halves; h++) {
            must(find("cuCtxSetCurrent")(halves[h].context), "cuCtxSetCurrent");
            must(find("cuCtxSynchronize")(), "cuCtxSynchronize");
        }
        if (now() - last > longest)
            longest = now() - last;
        last = now();
    }
    if (out)
        fprintf(out, "{\"seconds\": %f, \"longest\": %f}\n", now() - begin, longest);
}

int main(int argc, char **argv)
{
    int fd = -1, status = 0, other = 0;
    uint64_t n;

    if (argc != 3)
        return 2;
    n = strtoull(argv[2], NULL, 10);
    if (argv[1][0] == '0' || argv[1][0] == '1')
        fd = open(WORDS, O_RDWR);
    words = mmap(NULL, 4096, PROT_READ | PROT_WRITE,
                 fd < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED, fd, 0);
    must(words == MAP_FAILED, "mmap");
    if (!strcmp(argv[1], "one")) {
        open_driver();
        begin_half(&halves[0], 0, 0);
        begin_half(&halves[1], 1, 1);
        run(2, n, stdout);
    } else if (!strcmp(argv[1], "each")) {
        pid_t child = fork();

        open_driver();
        begin_half(&halves[0], !child, !child);
        run(1, n, child ? stdout : NULL);
        fflush(stdout);
        if (!child)
            _exit(0);
        waitpid(child, &other, 0);
        status = other != 0;
    } else {
        open_driver();
        begin_half(&halves[0], 0, argv[1][0] == '1');
        run(1, n, stdout);
    }
    fflush(stdout);
    return status;
}
