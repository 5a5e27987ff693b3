/*
 * Runs, in a fixed order, what the parts of the library have to do when the library is loaded, when
 * the process forks, when memory runs short, and when a helper queries the driver for changes.
 *
 * No other file refers to this one. Lower layers call higher ones through pointers that are set
 * here, so that no two files need each other.
 *
 * Locks are taken in this order: start_lock (pages_join.c); the gate's lock of one GPU;
 * passes_lock; table_lock (parking_table.c); exports_lock or open_lock (hidden.c); a part of the
 * table of blocks. Each of the other locks (contexts_lock, captures_lock, pools_lock, names_lock,
 * provisional_locks, and publish_lock of parked memory) is held alone or taken last.
 *
 * Some locks are held across calls into the driver: start_lock; use_of_contexts (parking.c),
 * open_lock and serve_lock (parking_ipc.c), which are taken before all others; and table_lock for
 * the export of an allocation, in a function that makes no callbacks.
 */
#include "pages.h"
#include "parking.h"

/* Gives back memory that is held for later or no longer needed. Returns whether there was any. */
static cold bool lifecycle_reclaim(int device)
{
    bool returned = exports_refresh();

    if (parking_applies() && parking_reap(false))
        returned = true;
    return pools_squeeze(device) || returned;
}

static void lifecycle_refresh(int device)
{
    pools_refresh(device);
    graphs_refresh(device);
    exports_refresh();
    modules_refresh(device);
    parking_expire();
}

/* Resets the library in a forked child, which has none of the other threads and holds no device
 * memory, and which no longer uses the parent's pages. */
static void lifecycle_forked(void)
{
    pages_after_fork();
    gate_after_fork();
    account_after_fork();
    blocks_after_fork();
    contexts_after_fork();
    pools_after_fork();
    graphs_after_fork();
    exports_after_fork();
    modules_after_fork();
    lookups_after_fork();
    custom_after_fork();
    parking_after_fork();
    parking_table_after_fork();
    parking_ipc_after_fork();
    parking_move_after_fork();
}

extern int __register_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void),
                             void *dso);
extern void *__dso_handle;

/*
 * Starts no thread, takes none of the library's locks and makes no CUDA call. The fork handler is
 * registered here because even the first call into the library may take a lock, before any cuInit,
 * and another thread may fork at that time.
 */
__attribute__((constructor)) static void lifecycle_loaded(void)
{
    origin_resolve(control_hooks);
    account_above = (struct account_above){
        .reclaim = lifecycle_reclaim,
        .refresh = lifecycle_refresh,
        .watch = gate_watch,
    };
    pages_changed = lookups_joined;
    parking_watch = parking_move_start;
    __register_atfork(NULL, NULL, lifecycle_forked, &__dso_handle);
}
