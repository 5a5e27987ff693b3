/* Prints which libcuda the dynamic loader found for a program that was linked with -lcuda and has
 * an RPATH, and the GPU memory that this library reports. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>

int cuInit(unsigned int flags);
int cuDeviceTotalMem_v2(size_t *bytes, int device);

int main(void)
{
    size_t total = 0;
    Dl_info where;
    int error = cuInit(0);

    if (!error)
        error = cuDeviceTotalMem_v2(&total, 0);
    if (error || !dladdr(dlsym(RTLD_DEFAULT, "cuInit"), &where)) {
        fprintf(stderr, "linked: the driver returned %d\n", error);
        return 1;
    }
    printf("[\"%s\", %zu]\n", where.dli_fname, total);
    return 0;
}
