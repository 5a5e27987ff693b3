/*
 * A driver of tomorrow: the simulated one, with functions that it has by any name that begins with
 * "cu", and a form of each function that comes with version 99.0. Each returns 99.
 *
 * Built as libcuda-origin.so.1 and linked against the simulated driver.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define NEXT(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))
#define NOT_FOUND  500

int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags);
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                        int *status);

static int tomorrow(void)
{
    return 99;
}

/* No driver has what begins so: with this, the control library asks for the answer to a name that
 * the driver lacks. */
static int has(const char *name, int version, int result)
{
    return (result == NOT_FOUND || version >= 99000) && !strncmp(name, "cu", 2) &&
           strncmp(name, "cuTidegate", 10) != 0;
}

int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags)
{
    int result = NEXT(cuGetProcAddress)(name, function, version, flags);

    if (!has(name, version, result))
        return result;
    *function = (void *)tomorrow;
    return 0;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    int result = NEXT(cuGetProcAddress_v2)(name, function, version, flags, status);

    if (!has(name, version, result))
        return result;
    if (status)
        *status = 0;
    *function = (void *)tomorrow;
    return 0;
}
