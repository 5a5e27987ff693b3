/*
 * Memory that moves: the blocks of a container whose memory may be parked in host memory while
 * other containers need the memory of the GPU.
 *
 *   parking.c         whether the memory is on the GPU, and the calls that wait until it is
 *   parking_blocks.c  the blocks that can be moved
 *   parking_table.c   the table of these blocks
 *   parking_move.c    a thread that moves them
 *   parking_copy.c    the copies of their contents
 *   parking_ipc.c     CUDA IPC for such blocks
 *
 * Such a block is a separate physical allocation (cuMemCreate), mapped at addresses that stay
 * reserved until the block is freed. To park it, its contents are copied to host memory and the
 * physical allocation is released; no pointer to it changes.
 *
 * The governor orders the moves (grant_device.resident). Calls that use device memory are counted
 * while they run, and wait while the memory is away. So when no such call is under way and the GPU
 * has finished what was submitted, nothing uses the memory until the state changes back.
 */
#pragma once

#include "control.h"

enum parking_state {
    PARKING_RESIDENT,
    PARKING_CLOSING, /* new calls wait; calls under way and submitted work are about to end */
    PARKING_OUT,     /* memory is being moved to the host */
    PARKING_PARKED,
    PARKING_IN, /* memory is being moved back */
};

enum parking_need {
    PARKING_MEMORY, /* the call uses device memory: it waits until that is resident */
    PARKING_STILL,  /* the call waits only while memory is being moved */
};

/* ---- parking.c ---- */

extern uint32_t parking_on; /* 1: the container's memory may be parked */

static inline bool parking_applies(void)
{
    return unlikely(atomic_load_relaxed(&parking_on));
}

/* These enclose a call. A thread's calls may be nested; only the outermost one waits.
 * parking_try() never waits: if it would have to, it returns false and has no effect. */
void parking_enter(enum parking_need need);
bool parking_try(enum parking_need need);
void parking_leave(void);

/* These enclose a wait in a call that has entered, so that memory may be parked during the wait.
 * parking_pause() returns what parking_resume() needs; 0: the call has not entered. */
uint32_t parking_pause(void);
void parking_resume(uint32_t paused);

/* These enclose any call that uses device memory, at little cost where none is ever parked. */
static inline void parking_begin(void)
{
    if (parking_applies())
        parking_enter(PARKING_MEMORY);
}

static inline void parking_end(void)
{
    if (parking_applies())
        parking_leave();
}

void parking_exempt(void); /* this thread's calls never wait */

/* Waits until device memory may be allocated. Called before it is charged to the account. */
void parking_wait(void);

/* Called by cuInit, once the driver is initialised. Returns false if the memory of this process may
 * have to be moved, but cannot be. */
bool parking_start(void);
enum parking_state parking_now(void);
bool parking_must_leave(void);         /* the governor has ordered the memory to be parked */
bool parking_close(uint64_t patience); /* from RESIDENT; false: calls outlast `patience` ns */
bool parking_turn(enum parking_state from, enum parking_state to);
/* Waits until all calls that entered before have ended. Returns false if one takes too long. */
bool parking_settle(void);
void parking_expire(void);  /* ends a CLOSING that takes too long; a helper calls this */
void parking_publish(void); /* writes the totals to the ledger */
void parking_note_bytes(uint64_t bytes);         /* the size of the blocks that can be moved */
void parking_count(uint64_t bytes, uint64_t ns); /* a move took this long */
void parking_after_fork(void);

/* A thread holds this lock while it may end a context, or uses one of the application's
 * contexts. */
void parking_lock_contexts(void);
bool parking_trylock_contexts(void);
void parking_unlock_contexts(void);

/* Number of synchronisations by the library that are under way. They would invalidate a capture, so
 * a call that begins a capture waits for them, until the time `ends` at the latest. */
extern uint32_t parking_n_syncs;
void parking_await_syncs(uint64_t ends);

/* Set by lifecycle.c: starts the thread that moves memory, and returns whether there is one. */
extern bool (*parking_watch)(void);

/* ---- pointers.c ---- */

extern uint32_t parking_copies_end; /* 1: calls that copy without a stream wait for the copy */

cold void parking_await_copy(CUstream stream, CUresult *resultp);

/* Called after such a copy. */
static inline void parking_end_copy(CUstream stream, CUresult *resultp)
{
    if (unlikely(atomic_load_relaxed(&parking_copies_end)))
        parking_await_copy(stream, resultp);
}

/* ---- parking_blocks.c ---- */

/* A block of another process, which this process has opened through CUDA IPC. */
struct parking_origin {
    uint64_t process; /* the random number by which that process is identified; never 0 */
    uint64_t serial;  /* of the block in that process */
};

struct parking_block {
    uint64_t base;   /* address */
    uint64_t size;   /* bytes mapped */
    uint64_t bytes;  /* bytes requested */
    uint64_t handle; /* the physical allocation; 0: it is parked */
    uint64_t offset; /* in the arena, while it is parked */
    uint64_t serial; /* distinguishes it from an earlier block at the same address */
    uint64_t buffer; /* the driver's number for the block; 0: not asked for yet */
    CUcontext ctx;   /* in which it was allocated */
    uint8_t owner;   /* number of the context with which it ends; see context_table.c */
    bool fixed;      /* it stays on the GPU, because something outside the GPU accesses it */
    bool freed;      /* the application has freed it, and its memory is still to be released */
    bool arriving;   /* it is being moved to the GPU: its contents in host memory are valid */
    bool exported;   /* other processes may open it */
    struct parking_origin origin; /* for memory of another process; otherwise zero */
    uint32_t n_opened;            /* how many times it was opened, if it is such memory */
    bool charged; /* its last use has ended, and it is charged until its mapping ends */
};

static inline bool parking_is_import(const struct parking_block *block)
{
    return block->origin.process;
}

CUresult parking_allocate(CUdeviceptr *addressp, size_t bytes);
CUresult parking_allocate_pitch(CUdeviceptr *addressp, size_t *pitchp, size_t width, size_t height,
                                unsigned int element);

/* These return false if the address is not that of a block that they can end; the driver then has
 * to carry out the call. */
bool parking_free(CUdeviceptr address, CUresult *resultp);
bool parking_free_async(CUdeviceptr address, CUstream stream, CUresult *resultp);
bool parking_close_import(CUdeviceptr address, CUresult *resultp);

void parking_context_gone(uint8_t owner);

/* Releases blocks that could not be released when they were freed. With `idle`, the caller has
 * ensured that no work uses them. Returns whether there were any. */
bool parking_reap(bool idle);

/* The context in which the library works on a block. */
CUcontext parking_context(const struct parking_block *block);

/* These enclose a synchronisation of a context by the library. parking_sync_begin() returns false
 * if a stream is capturing. */
bool parking_sync_begin(void);
void parking_sync_end(void);

/* Maps physical memory at a block's addresses, or unmaps and releases it. */
CUresult parking_map(struct parking_block *block);
CUresult parking_map_handle(const struct parking_block *block, CUmemGenericAllocationHandle handle);
void parking_unmap(struct parking_block *block);

/* ---- parking_table.c ---- */

/* Adds a block. Returns false if the table cannot grow. */
bool parking_table_add(const struct parking_block *block);

/* Removes the block of which `taken` is a copy, and updates the copy. Returns false if the block is
 * no longer in the table. */
bool parking_table_take(struct parking_block *taken);
bool parking_table_take_owned(uint8_t owner, struct parking_block *taken); /* any of the owner's */

/* Marks a block as freed, and charges it once more. Returns false if there is none at `base`. */
bool parking_table_free(uint64_t base);

/* Replaces the copy of a block with one of the next freed block. Returns false if there is none. */
bool parking_table_next_freed(struct parking_block *block);
bool parking_table_has_freed(void);

/* Copies the block that contains an address. Returns false if there is none. */
bool parking_find(uint64_t address, struct parking_block *found);
bool parking_first(struct parking_block *found); /* any that can be moved */
void parking_note_buffer(uint64_t base, uint64_t number);
void parking_fix(uint64_t base); /* the block stays on the GPU from now on */

/* Marks the block that contains an address as one that other processes may open, and copies it.
 * Used between parking_enter() and parking_leave(). Returns false if there is none. */
bool parking_export(uint64_t address, struct parking_block *found);

/* Returns a file descriptor for a block that other processes may open, or -1. */
int parking_descriptor(uint64_t serial);

/* Counts one more, or one less, use of a block of another process. Returns false if the block is
 * not in the table. After its last use, the block is marked as freed; with `later`, its mapping
 * cannot end yet, and the block is charged once more until it does. */
bool parking_use(const struct parking_origin *origin, uint64_t *basep);
bool parking_unuse(uint64_t base, bool later, struct parking_block *found);

/* The blocks, ordered by address. Only for the thread that moves them, while no call is under
 * way. */
struct parking_block *parking_blocks(size_t *np);
uint64_t parking_bytes(void); /* total size of those that can be moved */
void parking_table_after_fork(void);

/* ---- parking_ipc.c ---- */

/* Whether a handle was given out by the library, in this process or another. */
bool parking_ipc_knows(const CUipcMemHandle *handle);
CUresult parking_ipc_open(CUdeviceptr *addressp, const CUipcMemHandle *handle, unsigned int flags);
bool parking_ipc_close(CUdeviceptr address, CUresult *resultp);
void parking_ipc_after_fork(void);

/* ---- parking_copy.c ---- */

/* How a move ended. */
enum parking_moved {
    PARKING_MOVED,
    PARKING_MOVED_BACK,  /* nothing has changed, and it may be tried again */
    PARKING_MOVED_PART,  /* some blocks are parked, and others are not */
    PARKING_MOVE_FAILED, /* the driver returned an error that would occur again */
};

/*
 * The thread that moves blocks calls these. They move all blocks, in a stream of the current
 * context.
 *
 * parking_move_out() moves them to the host. If one cannot be moved, those before it are moved
 * back. Once `*hurryp` is 1, it waits for no other process. parking_move_in() moves the parked
 * blocks to the GPU. If one cannot be moved, all of these are parked again: their contents in host
 * memory are still valid.
 */
enum parking_moved parking_move_out(CUstream stream, const uint32_t *hurryp);
enum parking_moved parking_move_in(CUstream stream);

/* ---- parking_move.c ---- */

bool parking_move_start(void);
void parking_move_after_fork(void);
