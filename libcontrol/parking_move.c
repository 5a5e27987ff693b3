/*
 * A thread that parks the memory of this process in host memory and moves it back, by order of the
 * governor; see parking.h.
 *
 * Memory is released block by block, so another container can move in while this one moves out
 * (parking_copy.c). A move to the GPU that fails changes nothing: all blocks are parked again.
 */
#include "parking.h"

#include "contexts.h"
#include "gate.h"

#include <sys/mman.h>
#include <sys/prctl.h>

#define MOVE_FIRST_NS (NS_PER_S)        /* time in which calls and work have to end */
#define MOVE_LAST_NS  (64 * NS_PER_S)   /* its maximum; it doubles with each attempt */
#define MOVE_RUN_NS   (50 * NS_PER_MS)  /* time for which the program runs between two attempts */
#define MOVE_RETRY_NS (100 * NS_PER_MS) /* between attempts to move memory back */
#define MOVE_REST_NS  (500 * NS_PER_MS) /* longest sleep without an order */
#define MOVE_NAP_NS   (100 * NS_PER_US)
#define MOVE_END_NS   (5 * NS_PER_S) /* longest time that exit() waits for a move */

#define CU_MEMHOSTREGISTER_PORTABLE 1
#define CU_STREAM_NON_BLOCKING      1

/*
 * Host memory for the contents of parked blocks. It belongs to the governor, so that it is not
 * charged to the container's control group, and is pinned in pieces. No copy extends across two
 * pieces, because the driver may refuse that.
 */
static uint64_t arena_pinned; /* bytes at its beginning that the driver has pinned */
static CUcontext arena_ctx;   /* in which it did so */

static uint32_t started;
static uint32_t ending;  /* the process is exiting: memory moves only for calls that wait for it */
static uint32_t working; /* the thread may be in a call into the driver */
static uint64_t patience = MOVE_FIRST_NS;
static bool given_up; /* memory could not be moved back, for a reason other than lack of room */

/* Each cause of a failure is logged once. */
static cold void move_log(bool *logged, const char *message)
{
    if (!*logged)
        control_log(message);
    *logged = true;
}

/* ---- contexts ---- */

/* Makes the context of a block current, and returns it; NULL if there is no block. Called while no
 * context can end. */
static CUcontext push_context(void)
{
    struct parking_block block;
    CUcontext ctx;

    if (!parking_first(&block))
        return NULL;
    ctx = parking_context(&block);
    return driver->cuCtxPushCurrent(ctx) == CUDA_SUCCESS ? ctx : NULL;
}

/* Waits for the work of a context; the context cannot end meanwhile. Returns false if memory must
 * not move: the work failed, the program has been allowed to continue, or a stream is being
 * captured. */
static bool synchronize(const CUcontext *handlep)
{
    CUresult result = CUDA_SUCCESS;
    CUcontext ctx;
    bool done;

    parking_lock_contexts();
    ctx = atomic_load_acquire(handlep);
    done = parking_now() == PARKING_CLOSING && (!ctx || parking_sync_begin());
    if (done && ctx) {
        result = driver->cuCtxPushCurrent(ctx);
        if (result == CUDA_SUCCESS) {
            result = driver->cuCtxSynchronize();
            driver->cuCtxPopCurrent(&ctx);
        }
        parking_sync_end();
    }
    parking_unlock_contexts();
    return done && result == CUDA_SUCCESS;
}

/* An unknown context cannot be synchronised. */
static bool synchronize_all(void)
{
    bool alive = atomic_load_acquire(&primaries[0].alive);
    bool done = !atomic_load_relaxed(&contexts_lost) &&
                (!alive || atomic_load_acquire(&primaries[0].handle));

    done = done && synchronize(&primaries[0].handle);
    for (uint32_t i = 0; done && i < atomic_load_relaxed(&n_places); i++)
        done = synchronize(&contexts[i].handle);
    return done;
}

/* ---- the arena ---- */

/* What has to be done before a given amount of memory can be parked. */
enum arena_need {
    ARENA_NOTHING,
    ARENA_PIN,  /* the next piece has to be pinned */
    ARENA_WAIT, /* the governor has to make more of the arena ready */
};

static enum arena_need arena_need(uint64_t size)
{
    uint64_t ready = atomic_load_acquire(&pages_slot()->arena);
    static bool logged;

    if (size > pages_now.arena_size) {
        move_log(&logged, "memory is not parked: the host memory for it is missing, or was "
                          "allocated for a smaller quota");
        return ARENA_WAIT;
    }
    if (size <= arena_pinned)
        return ARENA_NOTHING;
    return size <= ready ? ARENA_PIN : ARENA_WAIT;
}

/* Pins the next piece. Memory that cannot be pinned is copied all the same, but more slowly. */
static void arena_pin(void)
{
    uint64_t left = pages_now.arena_size - arena_pinned;
    uint64_t n = left < LAYOUT_ARENA_PIECE ? left : LAYOUT_ARENA_PIECE;
    static bool logged;
    CUresult result;

    result =
        driver->cuMemHostRegister(pages_now.arena + arena_pinned, n, CU_MEMHOSTREGISTER_PORTABLE);
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
        move_log(&logged, "host memory for parked memory cannot be pinned: moves are slow");
    arena_pinned += n;
}

/*
 * Prepares the arena for the existing blocks. Called while the program is running, because it takes
 * up to a second for each GiB the first time. Returns false if the arena is not large enough yet.
 */
static bool prepare(void)
{
    enum arena_need need = ARENA_PIN;
    CUcontext ctx;

    while (need == ARENA_PIN && !atomic_load_seq_cst(&ending)) {
        parking_lock_contexts();
        ctx = push_context();
        if (ctx && arena_ctx != ctx)
            arena_pinned = 0; /* memory is unpinned when the context in which it was pinned ends */
        arena_ctx = ctx ? ctx : arena_ctx;
        need = ctx ? arena_need(parking_bytes()) : ARENA_NOTHING;
        if (need == ARENA_PIN)
            arena_pin();
        if (ctx)
            driver->cuCtxPopCurrent(&ctx);
        parking_unlock_contexts();
    }
    return need == ARENA_NOTHING;
}

/* ---- moves ---- */

static enum parking_moved move_all(bool out)
{
    uint64_t size = parking_bytes(), began = os_now();
    CUcontext ctx = push_context();
    enum parking_moved moved = size ? PARKING_MOVE_FAILED : PARKING_MOVED;
    CUstream stream;
    CUresult result;

    if (ctx) {
        result = driver->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
        if (result == CUDA_SUCCESS) {
            account_moves(0, size, false);
            moved = out ? parking_move_out(stream, &ending) : parking_move_in(stream);
            account_landed(0, size, false);
            driver->cuStreamDestroy(stream);
        } else if (result == CUDA_ERROR_OUT_OF_MEMORY || out) {
            moved = PARKING_MOVED_BACK;
        }
        driver->cuCtxPopCurrent(&ctx);
    } else if (out && size) {
        moved = PARKING_MOVED_BACK;
    }
    if (moved == PARKING_MOVED)
        parking_count(size, os_now() - began);
    return moved;
}

/* Publishes the state, and makes the governor read it. */
static void report(void)
{
    parking_publish();
    pages_poke();
}

/* Waits until the GPU has reached the markers of all launched work, and nothing is held. */
static bool await_queue(void)
{
    struct gate *g = &gate_devices[0];
    bool idle;

    for (;;) {
        gate_lock(g);
        idle = !g->holding && !g->queue.n_markers && !g->n_entering[0] && !g->n_entering[1];
        os_unlock(&g->lock);
        if (idle)
            return true;
        if (parking_now() != PARKING_CLOSING)
            return false;
        parking_expire();
        os_sleep(MOVE_NAP_NS);
    }
}

/* Ends the use of the memory. Returns whether the state is OUT. If it is not, and neither a capture
 * nor the governor is the reason, then work was waiting for a call that was itself made to wait,
 * and the next attempt allows more time. */
static bool close_memory(void)
{
    bool closed;

    if (gate_captures())
        return false;
    closed = parking_close(patience);
    if (closed) {
        report();
        closed = await_queue() && synchronize_all() && parking_turn(PARKING_CLOSING, PARKING_OUT);
    }
    if (closed) {
        patience = MOVE_FIRST_NS;
        return true;
    }
    parking_turn(PARKING_CLOSING, PARKING_RESIDENT);
    report();
    if (!gate_captures() && parking_must_leave())
        patience = 2 * patience < MOVE_LAST_NS ? 2 * patience : MOVE_LAST_NS;
    return false;
}

/* Assigns each block its offset in the arena. Returns the sum of the sizes. */
static uint64_t place_all(void)
{
    struct parking_block *blocks;
    uint64_t end = 0;
    size_t n;

    blocks = parking_blocks(&n);
    for (size_t i = 0; i < n; i++) {
        if (blocks[i].fixed)
            continue;
        blocks[i].offset = end;
        end += blocks[i].size;
    }
    return end;
}

static bool move_out(void)
{
    static bool logged;
    enum parking_moved moved = PARKING_MOVED_BACK;

    /* A governor that is not running would not order the memory back. */
    if (gate_lost(os_now()) || !prepare() || !close_memory())
        return false;
    report();
    parking_reap(true);
    /* Blocks may have been added since the arena was prepared. */
    if (place_all() <= arena_pinned) {
        moved = move_all(true);
        /* If the context has failed, the program's calls return its error. */
        if (moved != PARKING_MOVED)
            move_log(&logged, "memory cannot be parked: a copy failed");
    }
    /* What stays parked is moved back when the governor allows it. */
    parking_turn(PARKING_OUT, moved == PARKING_MOVED_BACK ? PARKING_RESIDENT : PARKING_PARKED);
    report();
    return moved != PARKING_MOVED_BACK;
}

static bool move_in(void)
{
    static bool logged, logged_calls;
    enum parking_moved moved;

    parking_turn(PARKING_PARKED, PARKING_IN);
    if (!parking_settle()) {
        move_log(&logged_calls, "parked memory is not moved back: a call that frees memory has "
                                "not returned");
        parking_turn(PARKING_IN, PARKING_PARKED);
        return false;
    }
    report();
    parking_reap(true);
    moved = move_all(false);
    if (moved == PARKING_MOVED_BACK)
        move_log(&logged, "parked memory cannot be moved back to the GPU: there is no room for it; "
                          "the move will be retried");
    /* The program's calls then return the driver's error. */
    if (moved == PARKING_MOVE_FAILED) {
        given_up = true;
        control_log("parked memory cannot be moved back to the GPU: the driver returns an "
                    "error, and the program's next calls will return it too");
    }
    parking_turn(PARKING_IN, moved == PARKING_MOVED_BACK ? PARKING_PARKED : PARKING_RESIDENT);
    report();
    return moved != PARKING_MOVED_BACK;
}

/* Does what the governor orders. Returns how long to wait for the next order, in ns. */
static uint64_t move_step(bool resident)
{
    uint64_t began = os_now();
    bool done;

    if (resident)
        patience = MOVE_FIRST_NS;
    if (given_up || resident == (parking_now() == PARKING_RESIDENT)) {
        if (resident && !given_up)
            prepare(); /* ahead of the order */
        return MOVE_REST_NS;
    }
    if (!resident && atomic_load_seq_cst(&ending))
        return MOVE_REST_NS;
    done = resident ? move_in() : move_out();
    if (done)
        return MOVE_REST_NS;
    if (resident)
        return MOVE_RETRY_NS;
    /* The program runs for at least as long as it was made to wait. */
    return os_now() - began > MOVE_RUN_NS ? os_now() - began : MOVE_RUN_NS;
}

static void *move_run(void *argument)
{
    const struct grant_device *grant = pages_grant_device(0);
    struct gate_visit visit;

    (void)argument;
    gate_visit_begin(&visit); /* for the life of the thread */
    parking_exempt();
    os_call(SYS_prctl, PR_SET_NAME, "tidegate-move");
    report();
    for (;;) {
        uint32_t order = atomic_load_acquire(&grant->resident);
        uint64_t ns;

        atomic_store_seq_cst(&working, 1);
        ns = move_step(!parking_must_leave());
        parking_publish();
        atomic_store_seq_cst(&working, 0);
        os_futex_wait(&grant->resident, order, ns);
    }
    return NULL;
}

cold bool parking_move_start(void)
{
    if (atomic_exchange_acq_rel(&started, 1))
        return true;
    account_watch(0); /* its helper ends a CLOSING that takes too long */
    if (helper_thread(move_run, NULL))
        return true;
    atomic_store_release(&started, 0);
    control_log("cannot start the thread that moves memory; cuInit fails");
    return false;
}

/*
 * The process is ending through exit(). The driver's destructors, which run after this, must not
 * run while the thread is in one of the driver's functions. Destructors of other libraries may
 * still need the memory, so it is moved to the GPU even now. The call to exit() may have
 * interrupted a call that is counted, so nothing here waits for ever.
 */
__attribute__((destructor)) static void move_finish(void)
{
    uint64_t ends = os_now() + MOVE_END_NS;

    atomic_store_seq_cst(&ending, 1);
    while (atomic_load_seq_cst(&working) && os_now() < ends) {
        parking_turn(PARKING_CLOSING, PARKING_RESIDENT);
        os_sleep(20 * NS_PER_US);
    }
}

void parking_move_after_fork(void)
{
    started = 0;
    ending = 0;
    working = 0;
    given_up = false;
    arena_pinned = 0;
    arena_ctx = NULL;
    patience = MOVE_FIRST_NS;
}
