/*
 * A program that bypasses the control library: it loads the driver's own libcuda from the path
 * at which the test put it.
 *
 *   stray WAY...   each way is a step; the steps run in the given order:
 *     join         register through cuInit of the control library, and create a context there
 *     own          create a context with the driver's own library
 *     take:BYTES   allocate this amount with the library of the last join or own
 *     bursts:BYTES hold this amount for 0.9 s, then nothing for 0.3 s, in an endless loop
 *     burn:MS      keep the GPU busy for this time with the last library, in kernels of 1 ms
 *     began        create the file /out/began
 *     sleep:MS     wait
 *     tick         append a byte to /out/ticks every 10 ms until killed
 *     child        run the following steps in a child, wait for its end, and create /out/ended
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void *cuda;

static void must(int error, const char *call)
{
    if (error) {
        printf("%s: %d\n", call, error);
        exit(1);
    }
}

static int call(const char *name, uintptr_t a, uintptr_t b, uintptr_t c)
{
    int (*function)(uintptr_t, uintptr_t, uintptr_t);

    *(void **)&function = dlsym(cuda, name);
    if (!function) {
        printf("no %s\n", name);
        exit(1);
    }
    return function(a, b, c);
}

static void open_library(const char *path)
{
    static void *context;

    cuda = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!cuda) {
        puts(dlerror());
        exit(1);
    }
    must(call("cuInit", 0, 0, 0), "cuInit");
    must(call("cuDevicePrimaryCtxRetain", (uintptr_t)&context, 0, 0), "cuDevicePrimaryCtxRetain");
    must(call("cuCtxSetCurrent", (uintptr_t)context, 0, 0), "cuCtxSetCurrent");
}

static void hold_in_bursts(size_t size)
{
    uintptr_t address;

    for (;;) {
        must(call("cuMemAlloc_v2", (uintptr_t)&address, size, 0), "cuMemAlloc");
        usleep(900000);
        must(call("cuMemFree_v2", address, 0, 0), "cuMemFree");
        usleep(300000);
    }
}

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void burn(double seconds)
{
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                  void *, void **, void **);
    void *module, *function;
    uint64_t ns = 1000000;
    void *parameters[] = {&ns};
    double end = now() + seconds;

    must(call("cuModuleLoadData", (uintptr_t)&module, (uintptr_t)"", 0), "cuModuleLoadData");
    must(call("cuModuleGetFunction", (uintptr_t)&function, (uintptr_t)module, (uintptr_t)"burn"),
         "cuModuleGetFunction");
    *(void **)&launch = dlsym(cuda, "cuLaunchKernel");
    while (now() < end) {
        for (int i = 0; i < 20; i++)
            must(launch(function, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL), "cuLaunchKernel");
        must(call("cuCtxSynchronize", 0, 0, 0), "cuCtxSynchronize");
    }
}

static void tick(void)
{
    FILE *file = fopen("/out/ticks", "w");

    while (file) {
        fputc('.', file);
        fflush(file);
        usleep(10000);
    }
}

static void step(const char *way)
{
    const char *colon = strchr(way, ':');
    uint64_t amount = colon ? strtoull(colon + 1, NULL, 10) : 0, address;
    int status = 0;

    if (!strcmp(way, "join")) {
        open_library("libcuda.so.1");
    } else if (!strcmp(way, "own")) {
        open_library("/usr/bin/own-driver.so");
    } else if (!strncmp(way, "take:", 5)) {
        must(call("cuMemAlloc_v2", (uintptr_t)&address, amount, 0), "cuMemAlloc");
    } else if (!strncmp(way, "bursts:", 7)) {
        hold_in_bursts(amount);
    } else if (!strncmp(way, "burn:", 5)) {
        burn((double)amount / 1e3);
    } else if (!strcmp(way, "began")) {
        fclose(fopen("/out/began", "w"));
    } else if (!strncmp(way, "sleep:", 6)) {
        usleep((unsigned)amount * 1000);
    } else if (!strcmp(way, "tick")) {
        tick();
    } else if (!strcmp(way, "child")) {
        if (fork()) {
            wait(&status);
            fclose(fopen("/out/ended", "w"));
            sleep(60);
            exit(0);
        }
    } else {
        exit(2);
    }
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IONBF, 0);
    for (int i = 1; i < argc; i++)
        step(argv[i]);
    return 0;
}
