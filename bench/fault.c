/*
 * Causes a fatal fault on the GPU: a kernel writes to an unmapped address
 *
 *   fault [--wait-file F]
 *
 * The last line on standard output is JSON with the driver's error code (0 if there was no fault)
 * and, after a fault, the call that returned it.
 * With --wait-file the program creates its context and the file F.ready, and continues when F
 * exists.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void *handle;

static const char ptx[] = ".version 7.0\n.target sm_70\n.address_size 64\n"
                          ".visible .entry fault()\n{\n  .reg .u64 %p;\n  .reg .u32 %v;\n"
                          "  mov.u64 %p, 64;\n  mov.u32 %v, 1;\n  st.global.u32 [%p], %v;\n"
                          "  ret;\n}\n";
static handle cuda;

static void check(int result, const char *call)
{
    if (result) {
        printf("{\"error\": %d, \"where\": \"%s\"}\n", result, call);
        exit(1);
    }
}

static void wait_for(const char *path)
{
    char ready[300];
    int fd;

    snprintf(ready, sizeof ready, "%s.ready", path);
    fd = open(ready, O_CREAT | O_WRONLY | O_CLOEXEC, 0644);
    if (fd >= 0)
        close(fd);
    while (access(path, F_OK))
        usleep(1000);
}

#define FIND(function, symbol) function = (__typeof__(function))dlsym(cuda, symbol)

int main(int argc, char **argv)
{
    int (*init)(unsigned), (*get)(int *, int), (*retain)(handle *, int), (*set)(handle);
    int (*load)(handle *, const void *), (*find)(handle *, handle, const char *), (*wait)(void);
    int (*launch)(handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                  handle, void **, void **);
    handle context, module, function;
    int device;

    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda) {
        fprintf(stderr, "fault: %s\n", dlerror());
        return 1;
    }
    FIND(init, "cuInit");
    FIND(get, "cuDeviceGet");
    FIND(retain, "cuDevicePrimaryCtxRetain");
    FIND(set, "cuCtxSetCurrent");
    FIND(load, "cuModuleLoadData");
    FIND(find, "cuModuleGetFunction");
    FIND(launch, "cuLaunchKernel");
    FIND(wait, "cuCtxSynchronize");
    check(init(0), "cuInit");
    check(get(&device, 0), "cuDeviceGet");
    check(retain(&context, device), "cuDevicePrimaryCtxRetain");
    check(set(context), "cuCtxSetCurrent");
    check(load(&module, ptx), "cuModuleLoadData");
    check(find(&function, module, "fault"), "cuModuleGetFunction");
    if (argc == 3 && !strcmp(argv[1], "--wait-file"))
        wait_for(argv[2]);
    check(launch(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
    check(wait(), "cuCtxSynchronize");
    puts("{\"error\": 0}");
    return 0;
}
