/*
 * One process's side of the simulated driver
 *
 * Everything here is guarded by one lock, `driver.lock`. It is released only while a thread sleeps
 * and while an application callback runs. Where the device's lock is needed as well, it is
 * taken second and held for one check or one change.
 *
 * Kernels are in the shared queue, and any process that enters the device completes those that are
 * due. The effects of their completion in this process (a time stamp written, an event completed, a
 * copy made) happen at its next call: see context_settle().
 */
#include "driver.h"
#include "mps.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define STACK_DEPTH 64

struct driver driver = {.lock = PTHREAD_MUTEX_INITIALIZER};
struct pool contexts_pool = POOL(context, 0x43545830);

static __thread struct {
    unsigned int epoch;
    unsigned int depth;
    struct context *contexts[STACK_DEPTH];
} stack;

/** pool_take() - take a zeroed object; NULL if there is no memory for it */
void *pool_take(struct pool *pool)
{
    struct object *object = pool->unused;

    if (object) {
        pool->unused = object->next;
        memset(object, 0, pool->size);
    } else {
        object = calloc(1, pool->size);
        if (!object)
            return NULL;
    }
    object->magic = pool->magic;
    return object;
}

void pool_give(struct pool *pool, void *pointer)
{
    struct object *object = pointer;

    object->magic = 0;
    object->next = pool->unused;
    pool->unused = object;
}

bool pool_owns(const struct pool *pool, const void *pointer)
{
    const struct object *object = pointer;

    return object && (uintptr_t)object % _Alignof(struct object) == 0 &&
           object->magic == pool->magic;
}

bool context_valid(const struct context *context)
{
    return pool_owns(&contexts_pool, context);
}

/* The process's attachment to its device `i`, or NULL if it is gone. */
static struct gpu_slot *own_slot(int i)
{
    const struct device *device = driver.devices[i];
    struct gpu_slot *slot = &device->gpu->shared.slots[device->slot];

    return atomic_load(&slot->attached) == device->generation ? slot : NULL;
}

static void calls_end(int n)
{
    for (int i = 0; i < n; i++) {
        struct gpu_slot *slot = own_slot(i);

        if (slot)
            atomic_store(&slot->inside, 0);
    }
}

/* Announce on each device that a thread of this process is in a call. Returns false if the process
 * is locked or checkpointed (cuda_checkpoint.c): the thread then has to wait. */
static bool calls_begin(void)
{
    for (int i = 0; i < driver.n_devices; i++) {
        struct gpu_slot *slot = own_slot(i);

        if (!slot)
            continue;
        atomic_store(&slot->inside, 1);
        if (atomic_load(&slot->state) != CU_PROCESS_STATE_RUNNING) {
            calls_end(i + 1);
            return false;
        }
    }
    return true;
}

/** driver_lock() - take the lock; in a locked process, wait until it is unlocked */
void driver_lock(void)
{
    static const struct timespec nap = {.tv_nsec = 1000000};

    for (;;) {
        pthread_mutex_lock(&driver.lock);
        if (calls_begin())
            return;
        pthread_mutex_unlock(&driver.lock);
        nanosleep(&nap, NULL);
    }
}

void driver_unlock(void)
{
    calls_end(driver.n_devices);
    pthread_mutex_unlock(&driver.lock);
}

/** driver_enter() - take the lock; before cuInit it returns an error, without the lock */
CUresult driver_enter(void)
{
    driver_lock();
    if (driver.initialised)
        return CUDA_SUCCESS;
    driver_unlock();
    return CUDA_ERROR_NOT_INITIALIZED;
}

/** driver_enter_context() - driver_enter(), and check that the thread has a usable context */
CUresult driver_enter_context(struct context **contextp)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    *contextp = current_context();
    if (!*contextp)
        return driver_leave(CUDA_ERROR_INVALID_CONTEXT);
    if (!context_valid(*contextp))
        return driver_leave(CUDA_ERROR_CONTEXT_IS_DESTROYED);
    if ((*contextp)->fault)
        return driver_leave((*contextp)->fault);
    (*contextp)->fault = mps_fault();
    if ((*contextp)->fault)
        return driver_leave((*contextp)->fault);
    return CUDA_SUCCESS;
}

/** driver_leave() - release the lock, run the callbacks that are due, and return `result` */
CUresult driver_leave(CUresult result)
{
    struct host_call *calls = driver.host_calls;

    driver.host_calls = NULL;
    driver.host_calls_last = NULL;
    driver_unlock();
    while (calls) {
        struct host_call *call = calls;

        calls = call->next;
        call->function(call->data);
        free(call);
    }
    return result;
}

CUresult driver_device(CUdevice ordinal, struct device **devicep)
{
    if (ordinal < 0 || ordinal >= driver.n_devices)
        return CUDA_ERROR_INVALID_DEVICE;
    *devicep = driver.devices[ordinal];
    return CUDA_SUCCESS;
}

/** location_host() - is the location host memory? */
bool location_host(const CUmemLocation *location)
{
    return location->type >= CU_MEM_LOCATION_TYPE_HOST &&
           location->type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
}

CUresult location_device(const CUmemLocation *location, struct device **devicep)
{
    if (location->type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    return driver_device(location->id, devicep);
}

static void stack_renew(void)
{
    if (stack.epoch == driver.epoch)
        return;
    stack.epoch = driver.epoch;
    stack.depth = 0;
}

struct context *current_context(void)
{
    stack_renew();
    return stack.depth ? stack.contexts[stack.depth - 1] : NULL;
}

void current_set(struct context *context)
{
    stack_renew();
    if (!context) {
        stack.depth -= stack.depth > 0;
        return;
    }
    if (stack.depth == 0)
        stack.depth = 1;
    stack.contexts[stack.depth - 1] = context;
}

bool current_push(struct context *context)
{
    stack_renew();
    if (stack.depth == STACK_DEPTH)
        return false;
    stack.contexts[stack.depth++] = context;
    return true;
}

bool current_pop(struct context **contextp)
{
    stack_renew();
    if (stack.depth == 0)
        return false;
    *contextp = stack.contexts[--stack.depth];
    return true;
}

/** current_thread() - an address that is unique to the calling thread while it lives */
const void *current_thread(void)
{
    return &stack;
}
