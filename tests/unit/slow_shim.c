/*
 * A driver that stops in the middle of a call at the test's request: between an allocation and the
 * return of the call, or before a pool is trimmed. The call continues when the test has removed the
 * file that reports where the call has stopped. The pitch of an allocation is twice its width. The
 * functions themselves are the simulated driver's.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))

int cuMemAlloc_v2(unsigned long long *at, size_t size);
int cuMemAllocAsync(unsigned long long *at, size_t size, void *stream);
int cuMemAllocPitch_v2(unsigned long long *at, size_t *pitch, size_t width, size_t height,
                       unsigned element);
int cuMemPoolGetAttribute(void *pool, int attribute, void *value);
int cuMemPoolTrimTo(void *pool, size_t keep);

static void path(char *to, size_t size, const char *call, const char *state)
{
    snprintf(to, size, "%s/%s%s", getenv("SLOW_CALLS"), call, state);
}

static void wait_while(const char *reached)
{
    while (!access(reached, F_OK))
        usleep(1000);
}

/* Stops if there is a file of that name, and renames the file to report that. */
static void stop(const char *call)
{
    char wanted[1024], reached[1024];

    path(wanted, sizeof wanted, call, "");
    path(reached, sizeof reached, call, ".reached");
    if (!rename(wanted, reached))
        wait_while(reached);
}

int cuMemAlloc_v2(unsigned long long *at, size_t size)
{
    int result = NEXT(cuMemAlloc_v2)(at, size);

    stop("allocate");
    return result;
}

int cuMemAllocAsync(unsigned long long *at, size_t size, void *stream)
{
    int result = NEXT(cuMemAllocAsync)(at, size, stream);

    stop("allocate");
    return result;
}

int cuMemAllocPitch_v2(unsigned long long *at, size_t *pitch, size_t width, size_t height,
                       unsigned element)
{
    int result = NEXT(cuMemAllocPitch_v2)(at, pitch, 2 * width, height, element);

    stop("allocate");
    return result;
}

/* Waits while an allocation is stopped, so that no other thread learns of the allocation. */
int cuMemPoolGetAttribute(void *pool, int attribute, void *value)
{
    char reached[1024];

    path(reached, sizeof reached, "allocate", ".reached");
    wait_while(reached);
    return NEXT(cuMemPoolGetAttribute)(pool, attribute, value);
}

int cuMemPoolTrimTo(void *pool, size_t keep)
{
    stop("trim");
    return NEXT(cuMemPoolTrimTo)(pool, keep);
}
