/*
 * A driver of a future version: the simulated one, with a function for every name that begins with
 * "cu", and a variant of each function that was introduced with version 99.0. Each of them returns
 * 99.
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

static int new_function(void)
{
    return 99;
}

/* No driver has a function with the prefix cuTidegate. The control library looks up such a name to
 * learn what the driver answers if it lacks a function. */
static int is_new(const char *name, int version, int result)
{
    return (result == NOT_FOUND || version >= 99000) && !strncmp(name, "cu", 2) &&
           strncmp(name, "cuTidegate", 10) != 0;
}

int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags)
{
    int result = NEXT(cuGetProcAddress)(name, function, version, flags);

    if (!is_new(name, version, result))
        return result;
    *function = (void *)new_function;
    return 0;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    int result = NEXT(cuGetProcAddress_v2)(name, function, version, flags, status);

    if (!is_new(name, version, result))
        return result;
    if (status)
        *status = 0;
    *function = (void *)new_function;
    return 0;
}
