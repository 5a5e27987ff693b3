/*
 * A thread that parks the memory of this process in host memory and moves it back, by order of the
 * governor; see parking.h.
 *
 * The copies are made by the GPU's copy engines from and to pinned memory, at the speed of the bus.
 * Memory is released block by block, so another container can come while this one leaves. A move
 * to the GPU that fails changes nothing: all blocks are parked again. Of each block, the copy that
 * was valid is only given up when the other one is complete.
 */
#include "parking.h"

#include "contexts.h"
#include "gate.h"

#include <sys/mman.h>
#include <sys/prctl.h>

#define MOVE_FIRST_NS (NS_PER_S)        /* time in which calls and work have to end, at first */
#define MOVE_LAST_NS  (64 * NS_PER_S)   /* and at most: it doubles with each attempt */
#define MOVE_RUN_NS   (50 * NS_PER_MS)  /* time for which they go on between two attempts */
#define MOVE_ROOM_NS  (5 * NS_PER_S)    /* longest wait for room on the GPU within an attempt */
#define MOVE_RETRY_NS (100 * NS_PER_MS) /* between attempts to move memory back */
#define MOVE_REST_NS  (500 * NS_PER_MS) /* longest sleep without an order */
#define MOVE_NAP_NS   (100 * NS_PER_US)

#define CU_MEMHOSTREGISTER_PORTABLE 1
#define CU_STREAM_NON_BLOCKING      1

/*
 * Host memory for the contents of parked blocks. It is the governor's, so that it is not charged to
 * the container's control group, and is pinned in pieces. A copy does not cross from one into the
 * next, which the driver may refuse.
 */
static uint64_t arena_pinned; /* bytes at its beginning that the driver has pinned */
static CUcontext arena_ctx;   /* in which it did so */

static uint32_t started;
static uint64_t patience = MOVE_FIRST_NS;

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

    if (!parking_first(&block) || driver->cuCtxPushCurrent(block.ctx) != CUDA_SUCCESS)
        return NULL;
    return block.ctx;
}

static bool synchronize(CUcontext ctx)
{
    CUresult result;

    if (!ctx)
        return true;
    if (driver->cuCtxPushCurrent(ctx) != CUDA_SUCCESS)
        return false;
    result = driver->cuCtxSynchronize();
    driver->cuCtxPopCurrent(&ctx);
    return result == CUDA_SUCCESS;
}

static bool synchronize_all(void)
{
    bool done = !atomic_load_acquire(&primaries[0].alive) ||
                synchronize(atomic_load_acquire(&primaries[0].handle));

    for (uint32_t i = 0; done && i < atomic_load_relaxed(&n_places); i++)
        done = synchronize(atomic_load_acquire(&contexts[i].handle));
    return done;
}

/* ---- the arena ---- */

/* What has to be done before so much memory can be parked. */
enum arena_need {
    ARENA_NOTHING,
    ARENA_PIN,  /* the next piece has to be pinned */
    ARENA_WAIT, /* for the governor to make more of it ready */
};

static enum arena_need arena_need(uint64_t size)
{
    uint64_t ready = atomic_load_acquire(&pages_slot()->arena);
    static bool logged;

    if (size > pages_now.arena_size) {
        move_log(&logged, "memory is not parked: the host memory for it was made for a smaller "
                          "quota, or not at all");
        return ARENA_WAIT;
    }
    if (size <= arena_pinned)
        return ARENA_NOTHING;
    return size <= ready ? ARENA_PIN : ARENA_WAIT;
}

/* Pins the next piece. Memory that cannot be pinned is copied all the same, more slowly. */
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
 * Prepares the arena for the blocks that there are. Called while the program goes on, because it
 * takes up to a second for each GiB the first time. Returns false if the arena is not large enough
 * yet.
 */
static bool prepare(void)
{
    enum arena_need need = ARENA_PIN;
    CUcontext ctx;

    while (need == ARENA_PIN) {
        parking_lock_contexts();
        ctx = push_context();
        if (ctx && arena_ctx != ctx)
            arena_pinned = 0; /* pinned memory ends with the context in which it was pinned */
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

static CUresult copy_block(const struct parking_block *block, bool out, CUstream stream)
{
    CUresult result = CUDA_SUCCESS;

    for (uint64_t at = 0; result == CUDA_SUCCESS && at < block->size;) {
        uint64_t place = block->offset + at;
        uint64_t n = LAYOUT_ARENA_PIECE - place % LAYOUT_ARENA_PIECE;
        char *host = pages_now.arena + place;

        n = n < block->size - at ? n : block->size - at;
        result = out ? driver->cuMemcpyDtoHAsync(host, block->base + at, n, stream)
                     : driver->cuMemcpyHtoDAsync(block->base + at, host, n, stream);
        at += n;
    }
    return result;
}

/*
 * Turns the charge for memory that has left the GPU into one that NVML attributes to no process, or
 * the other way round for memory that is about to be there. The quota counts it in both cases.
 * Around this and the move, a sample finds that memory is moving.
 */
static void charge_as(uint64_t size, bool parked)
{
    account_add(0, size, parked);
    account_give(0, size, !parked);
}

/* Copies a block to the host and releases its memory. */
static bool block_out(struct parking_block *block, CUstream stream)
{
    if (copy_block(block, true, stream) != CUDA_SUCCESS ||
        driver->cuStreamSynchronize(stream) != CUDA_SUCCESS)
        return false;
    parking_unmap(block);
    charge_as(block->size, true);
    return true;
}

/* Gives a block memory, for which other containers may be making room right now, and begins to copy
 * it there. Returns false if there is no room, or the order was revoked. */
static bool block_in(struct parking_block *block, CUstream stream, uint64_t ends)
{
    const struct grant_device *grant = pages_grant_device(0);
    CUresult result;

    charge_as(block->size, false);
    while ((result = parking_map(block)) == CUDA_ERROR_OUT_OF_MEMORY && os_now() < ends &&
           atomic_load_acquire(&grant->resident))
        os_sleep(MOVE_NAP_NS);
    if (result == CUDA_SUCCESS && copy_block(block, false, stream) == CUDA_SUCCESS)
        return true;
    if (result == CUDA_SUCCESS)
        parking_unmap(block);
    charge_as(block->size, true);
    return false;
}

/* Moves all blocks, one after the other. If one cannot be moved, those before it are moved back.
 * The contents in host memory are still theirs. */
static bool move_blocks(bool out, CUstream stream)
{
    uint64_t ends = os_now() + MOVE_ROOM_NS;
    struct parking_block *blocks;
    bool done = true;
    size_t n, i;

    blocks = parking_blocks(&n);
    for (i = 0; done && i < n; i++)
        if (!blocks[i].fixed)
            done = out ? block_out(&blocks[i], stream) : block_in(&blocks[i], stream, ends);
    if (driver->cuStreamSynchronize(stream) != CUDA_SUCCESS)
        done = false;
    for (i = 0; !done && i < n; i++) {
        if (blocks[i].fixed)
            continue;
        if (out && !blocks[i].handle) {
            block_in(&blocks[i], stream, ends);
        } else if (!out && blocks[i].handle) {
            parking_unmap(&blocks[i]);
            charge_as(blocks[i].size, true);
        }
    }
    if (!done && out)
        driver->cuStreamSynchronize(stream);
    return done;
}

static bool move_all(bool out)
{
    uint64_t size = parking_bytes(), began = os_now();
    CUcontext ctx = push_context();
    bool done = !size;
    CUstream stream;

    if (ctx && driver->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS) {
        account_moves(0, size, false);
        done = move_blocks(out, stream);
        account_landed(0, size, false);
        driver->cuStreamDestroy(stream);
    }
    if (ctx)
        driver->cuCtxPopCurrent(&ctx);
    if (done)
        parking_count(size, os_now() - began);
    return done;
}

/* Reports the state, and that the governor should look at it. */
static void report(void)
{
    parking_publish();
    pages_poke();
}

/* Waits until what was launched has been reached by markers, and nothing is held. */
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

/* Ends the use of the memory. Returns whether the state is OUT. */
static bool close_memory(void)
{
    if (gate_captures() || !parking_close(patience))
        return false;
    report();
    /* A synchronisation would invalidate a capture that has begun since. */
    if (!gate_captures() && await_queue() && synchronize_all() &&
        parking_turn(PARKING_CLOSING, PARKING_OUT))
        return true;
    parking_turn(PARKING_CLOSING, PARKING_RESIDENT);
    report();
    return false;
}

/* Assigns each block its place in the arena. Returns the sum of the sizes. */
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
    bool done;

    if (!prepare())
        return false;
    if (!close_memory()) {
        patience = patience < MOVE_LAST_NS ? 2 * patience : MOVE_LAST_NS;
        return false;
    }
    patience = MOVE_FIRST_NS;
    report();
    /* Blocks may have been added since the arena was prepared. */
    done = place_all() <= arena_pinned;
    if (done && !move_all(true)) {
        /* If the context has failed, the program's calls return that. */
        move_log(&logged, "memory cannot be parked: a copy failed");
        done = false;
    }
    parking_turn(PARKING_OUT, done ? PARKING_PARKED : PARKING_RESIDENT);
    report();
    return done;
}

static bool move_in(void)
{
    static bool logged;
    bool done;

    parking_turn(PARKING_PARKED, PARKING_IN);
    parking_settle(); /* calls that free memory */
    report();
    done = move_all(false);
    if (!done)
        move_log(&logged, "parked memory cannot be moved back to the GPU: the driver has no room "
                          "for it; this is tried again");
    parking_turn(PARKING_IN, done ? PARKING_RESIDENT : PARKING_PARKED);
    report();
    return done;
}

/* Does what the governor orders. Returns how long to wait for the next order, in ns. */
static uint64_t move_step(bool resident)
{
    bool done;

    if (resident == (parking_now() == PARKING_RESIDENT)) {
        if (resident)
            prepare(); /* ahead of the order */
        return MOVE_REST_NS;
    }
    done = resident ? move_in() : move_out();
    return done ? MOVE_REST_NS : resident ? MOVE_RETRY_NS : MOVE_RUN_NS;
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
        uint32_t resident = atomic_load_acquire(&grant->resident);
        uint64_t ns = move_step(resident);

        parking_publish();
        os_futex_wait(&grant->resident, resident, ns);
    }
    return NULL;
}

cold void parking_move_start(void)
{
    if (atomic_exchange_acq_rel(&started, 1))
        return;
    account_watch(0); /* its helper ends a CLOSING that takes too long */
    if (!helper_thread(move_run, NULL))
        control_log("cannot start a thread for moving memory: the memory stays where it is");
}

void parking_move_after_fork(void)
{
    started = 0;
    arena_pinned = 0;
    arena_ctx = NULL;
    patience = MOVE_FIRST_NS;
}
