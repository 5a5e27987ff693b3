/*
 * The start and the end of the process's use of the driver, and the end of contexts
 *
 * This is the top layer: the end of a context also ends everything that other files keep for it.
 */
#include "driver.h"
#include "mps.h"

#include <stdlib.h>
#include <string.h>

/** context_free() - end a context, its pending work, its memory and its streams */
void context_free(struct context *context)
{
    struct device *device = context->device;
    struct context **link = &driver.contexts;

    while (context->streams)
        stream_free(context->streams);
    capture_drop_stream(&context->legacy);
    if (device_enter(device)) {
        if (device->gpu->contexts[context->index].serial == context->serial)
            atomic_store(&device->gpu->contexts[context->index].serial, 0);
        device_leave(device);
    }
    for (unsigned int i = 0; i < GPU_QUEUE; i++) {
        while (context->places[i].first) {
            struct effect *effect = context->places[i].first;

            context->places[i].first = effect->next;
            free(effect->command.staged);
            free(effect);
        }
    }
    memory_release_context(context);
    memory_refund(device, context->stacks);
    while (*link != context)
        link = &(*link)->next;
    *link = context->next;
    mempool_context_ended(context->ordinal);
    pool_give(&contexts_pool, context);
}

static void after_fork(void)
{
    /* The parent's lock may have been held by a thread that does not exist here. */
    pthread_mutex_init(&driver.lock, NULL);
    driver_forget(false);
}

/* Index of the device that an entry names, by number or by the start of its UUID; -1 if none. */
static int visible_index(struct device *const devices[DEVICES], int n, const char *entry,
                         size_t length)
{
    char *end;
    long number = strtol(entry, &end, 10);

    if (length && end == entry + length)
        return number >= 0 && number < n ? (int)number : -1;
    for (int i = 0; i < n; i++) {
        char uuid[41];

        if (!devices[i])
            continue;
        device_uuid_text(devices[i], uuid);
        if (length >= 5 && length <= 40 && strncmp(entry, uuid, length) == 0)
            return i;
    }
    return -1;
}

/*
 * Select the devices that `list` names, in the order of the list, up to the first entry that names
 * no device, or one that is already selected.
 */
static int visible(struct device *devices[DEVICES], int n, const char *list)
{
    struct device *kept[DEVICES] = {NULL};
    int n_kept = 0;

    for (;;) {
        size_t length = strcspn(list, ",");
        int i = visible_index(devices, n, list, length);

        if (i < 0 || !devices[i])
            break;
        kept[n_kept++] = devices[i];
        devices[i] = NULL;
        if (!list[length])
            break;
        list += length + 1;
    }
    for (int i = 0; i < n; i++) {
        if (devices[i])
            device_detach(devices[i]);
    }
    memcpy(devices, kept, sizeof(kept));
    return n_kept;
}

/** driver_init() - find the devices; CUDA_VISIBLE_DEVICES selects and orders them */
CUresult driver_init(void)
{
    static bool fork_handled;
    const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
    CUresult r;

    if (driver.initialised)
        return CUDA_SUCCESS;
    if (!fork_handled && pthread_atfork(NULL, NULL, after_fork) == 0)
        fork_handled = true;
    driver.n_devices = 0;
    for (unsigned int minor = 0; minor < DEVICES; minor++) {
        if (device_open(&driver.devices[driver.n_devices], device_directory(), minor, false) == 0)
            driver.n_devices++;
    }
    if (wanted)
        driver.n_devices = visible(driver.devices, driver.n_devices, wanted);
    if (driver.n_devices == 0)
        return CUDA_ERROR_NO_DEVICE;
    r = mps_join();
    if (r) {
        while (driver.n_devices)
            device_detach(driver.devices[--driver.n_devices]);
        return r;
    }
    driver.initialised = true;
    return CUDA_SUCCESS;
}

/**
 * driver_forget() - return to the state before cuInit
 *
 * `owner` is false after fork, when the devices belong to the parent process.
 */
void driver_forget(bool owner)
{
    while (driver.contexts) {
        if (owner) {
            context_free(driver.contexts);
        } else {
            struct context *context = driver.contexts;

            driver.contexts = context->next;
            context->object.magic = 0;
        }
    }
    mempool_forget(owner);
    vmm_forget(owner);
    graphmem_forget(owner);
    memory_forget();
    for (int i = 0; i < driver.n_devices; i++) {
        if (owner)
            device_detach(driver.devices[i]);
        else
            device_abandon(driver.devices[i]);
        driver.primaries[i] = NULL;
        driver.primary_references[i] = 0;
    }
    mps_forget();
    driver.captures = NULL;
    driver.host_calls = NULL;
    driver.n_devices = 0;
    driver.initialised = false;
    driver.epoch++;
}
