/*
 * The contexts of this process, and the owner of what is allocated in any of them.
 *
 * What is allocated in a context ends with it, so each block records the number of its owner: a
 * created context's position in the table below, counted from 1, or 0 for the primary context.
 * Green contexts allocate in the primary one. contexts.c and primary.c, which replace the calls
 * that create and end contexts, maintain the table.
 *
 * An owner's number has eight bits. What is allocated in a context for which no owner number is
 * left stays charged after the end of the context, unless the program frees it first.
 */
#include "contexts.h"

#include <string.h>

struct context contexts[MAX_CONTEXTS];
uint32_t n_places;
uint32_t n_contexts;
bool contexts_lost;
struct os_lock contexts_lock;
struct primary primaries[LAYOUT_N_DEVICES];

bool context_is_primary(CUcontext handle)
{
    for (unsigned i = 0; handle && i < pages_n_devices(); i++)
        if (atomic_load_acquire(&primaries[i].handle) == handle)
            return true;
    return false;
}

struct context *context_find(CUcontext handle)
{
    if (!handle || !atomic_load_relaxed(&n_contexts))
        return NULL;
    for (struct context *c = contexts; c < contexts + atomic_load_relaxed(&n_places); c++)
        if (atomic_load_acquire(&c->handle) == handle)
            return c;
    return NULL;
}

uint8_t context_owner(const struct context *c)
{
    size_t owner = (size_t)(c - contexts) + 1;

    return owner <= OWNER_LAST ? (uint8_t)owner : OWNER_NONE;
}

uint8_t contexts_owner(void)
{
    struct context *c;
    CUcontext current = NULL;

    if (likely(!atomic_load_relaxed(&n_contexts)))
        return OWNER_PRIMARY;
    driver->cuCtxGetCurrent(&current);
    c = context_find(current);
    if (c)
        return context_owner(c);
    if (unlikely(atomic_load_relaxed(&contexts_lost)) && !context_is_primary(current))
        return OWNER_NONE;
    return OWNER_PRIMARY;
}

bool contexts_several(void)
{
    return atomic_load_relaxed(&n_contexts);
}

int contexts_device(CUcontext handle)
{
    struct context *c = context_find(handle);

    if (c)
        return c->device;
    for (unsigned i = 0; i < pages_n_devices(); i++)
        if (handle && atomic_load_acquire(&primaries[i].handle) == handle)
            return (int)i;
    return -1;
}

void contexts_after_fork(void)
{
    memset(contexts, 0, n_places * sizeof *contexts);
    memset(primaries, 0, sizeof primaries);
    n_places = 0;
    n_contexts = 0;
    contexts_lost = false;
    contexts_lock.word = 0;
}
