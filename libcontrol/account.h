/*
 * Accounting of device memory: what this process holds, and what the container may hold.
 *
 *   account.c     charges: the sum over the container's processes against the quota
 *   account_blocks.c   the charges for blocks of memory, from their allocation to their end
 *   blocks.c      the live allocations of this process
 *   held.c        the charge for what one of the driver's pools holds
 *   pools.c, pool_allocations.c   stream-ordered allocation
 *   graphs.c      memory of graphs
 *   vmm.c         physical allocations and their mappings
 *   exports.c     physical allocations that a descriptor keeps alive
 *   multicast.c, bindings.c   physical allocations bound to multicast objects or endpoints
 *   contexts.c, primary.c, context_charges.c   what contexts take, and what ends with them
 *   context_table.c   the contexts of this process, and the owner of an allocation
 *   modules.c, loads.c, hidden.c   modules and libraries
 *   arrays.c      sizes of arrays
 *   memory.c      memory of other processes, opened through CUDA IPC
 */
#pragma once

#include "cuda_abi.h"
#include "layout.gen.h"
#include "os.h"

/* ---- blocks.c ---- */

enum block_kind {
    BLOCK_MEMORY, /* by device address: cuMemAlloc and everything that cuMemFree accepts */
    BLOCK_SLAB,   /* by device address: 2 MiB that the driver cuts small blocks from */
    BLOCK_ARRAY,
    BLOCK_EXTERNAL,
    BLOCK_IPC,     /* by device address: memory of another process */
    BLOCK_HANDLE,  /* a physical allocation; `value`: number of mappings, `count`: of references */
    BLOCK_MAPPING, /* by device address; `value`: the handle that is mapped there */
    BLOCK_SPARSE,  /* `value`: a handle that the array in `size` keeps alive */
    BLOCK_BINDING, /* `value`: a handle that the object in `size` keeps alive */
    BLOCK_EXPORT,  /* by handle; `value`: identifier of its descriptors */
    BLOCK_LINGERING, /* by that identifier: an allocation that only descriptors keep alive */
    BLOCK_LIBRARY,   /* `value`: bit mask of the contexts into which it was loaded */
    BLOCK_KERNEL,    /* of a library that is not in any context yet; `value`: the library */
    BLOCK_LOADED,    /* by module or library; `value`: bytes that the driver took for the load */
    BLOCK_GREEN,     /* a green context; `value`: the driver's ordinal of its GPU */
    BLOCK_HIDDEN,    /* by module or library: the memory that NVML attributes to no process */
    BLOCK_EXEC, /* an executable graph; `size`: what its nodes allocate, `value`: bytes reserved */
};

#define BLOCK_SMALL    1  /* part of a slab; the slab is charged instead */
#define BLOCK_UNSEEN   2  /* NVML does not attribute it to this process */
#define BLOCK_EXPORTED 4  /* it was exported as a descriptor */
#define BLOCK_OBJECT   8  /* not memory but a multicast object */
#define BLOCK_FOR_EVER 16 /* the closing of its descriptor cannot be observed */

struct block {
    uint64_t key;   /* an address or a handle, never 0 */
    uint64_t size;  /* bytes charged */
    uint64_t value; /* depends on the kind */
    uint32_t count; /* references */
    uint8_t kind;
    int8_t device; /* index in the grant; -1: nothing is charged */
    uint8_t flags;
    uint8_t owner; /* the context with which it ends: see contexts_owner() */
};

/* Locks the part of the table to which (kind, key) belongs. Returns the entry, or NULL. The caller
 * makes no driver call before blocks_unlock(). The pointer is valid until then, or until the table
 * is changed. */
struct block *blocks_lock(enum block_kind kind, uint64_t key);
void blocks_unlock(enum block_kind kind, uint64_t key);

/* These are called with that part locked. blocks_add() adds an entry that is not in the table yet,
 * and returns false if there is no memory for it. */
bool blocks_add(const struct block *block);
void blocks_remove(struct block *block);
struct block *blocks_peer(enum block_kind kind, uint64_t key); /* an entry of the same part */

/* Calls `visit` for each entry, with one part locked at a time. Removes the entries for which
 * `visit` returns true. */
void blocks_sweep(bool (*visit)(const struct block *block, void *data), void *data);
void blocks_after_fork(void);

/* ---- account.c, account_blocks.c ---- */

#define ACCOUNT_SMALL (1ull << 20) /* bytes; smaller blocks are cut from slabs */
#define ACCOUNT_UNIT  (2ull << 20)

enum account_kind {
    ACCOUNT_BLOCK,
    ACCOUNT_MANAGED,
    ACCOUNT_ARRAY,
    ACCOUNT_EXTERNAL,
    ACCOUNT_IPC,
};

struct account_charge {
    int device; /* index in the grant; -1: not governed */
    uint8_t kind;
    uint8_t flags;
    uint8_t owner;
    uint64_t size;    /* bytes charged */
    uint64_t claimed; /* bytes claimed by the call that is under way */
    uint64_t taking;  /* bytes that the driver is about to take on its own */
    bool inside;      /* the call keeps memory where it is: see parking.h */
    bool shared;      /* the call closes a block that is open more than once */
};

/* What the container uses of a GPU, and its quota, in bytes. The use is what its processes are
 * charged plus what the driver took. */
uint64_t account_used(int device);
uint64_t account_limit(int device);

/* Charge `size` bytes or nothing. account_claim() tries to make room before it refuses. A claim is
 * under way until account_landed(). */
bool account_try(int device, uint64_t size, bool unseen);
bool account_claim(int device, uint64_t size, bool unseen);
void account_add(int device, uint64_t size, bool unseen);
void account_give(int device, uint64_t size, bool unseen);
void account_hide(int device, uint64_t size, bool hidden);
void account_moves(int device, uint64_t size, bool unseen);
void account_landed(int device, uint64_t size, bool unseen);
uint64_t account_moves_all(int device);
void account_pools(int device, uint64_t more, uint64_t less, bool unseen);
void account_shrunk(int device, uint64_t size, bool unseen);
uint64_t account_returned(int device); /* total bytes that its processes have given back */
void account_note_peak(int device);
bool account_over(int device, uint64_t slack);
CUresult account_refuse(int device);

/* Record that the driver takes memory on its own, or gives it back. The amount counts until the
 * governor has sampled. */
void account_driver_takes(int device, uint64_t size);
void account_driver_gives(int device, uint64_t size);
void account_convert(int device, uint64_t size, bool unseen); /* a charge becomes such memory */
bool account_await_sample(int device, uint64_t since, uint64_t patience);
bool account_alone(void);

/* Begin and end a claim for memory that the driver is about to take on its own. */
bool account_begin(struct account_charge *charge, int device, uint64_t size);
void account_end(struct account_charge *charge, CUresult result);

/* Around an allocation: reserve, call the driver, then cancel or (settle and) record. */
CUresult account_reserve(struct account_charge *charge, enum account_kind kind, uint64_t size);
void account_cancel(struct account_charge *charge);
void account_settle(struct account_charge *charge, enum account_kind kind, uint64_t size);
void account_record(const struct account_charge *charge, uint64_t key);

/* Around a free: account_forget(), the call into the driver, then account_forgotten(). */
void account_forget(struct account_charge *charge, enum account_kind kind, uint64_t key);
void account_forgotten(struct account_charge *charge, uint64_t key, CUresult result);

/* Charges memory of another process that was opened here: once, however often it is opened. */
CUresult account_open(enum block_kind kind, int device, uint64_t key, uint64_t size);
bool account_sweep(int device, uint8_t owner);

uint64_t account_product(uint64_t a, uint64_t b);
uint64_t account_round(uint64_t size, uint64_t unit);
uint64_t account_pitch(uint64_t width, uint64_t height);

/* Functions of higher layers that the account calls; lifecycle.c sets them when the library is
 * loaded. */
extern struct account_above {
    bool (*reclaim)(int device); /* gives back what is not needed; false: nothing was given back */
    void (*refresh)(int device);
    void (*watch)(int device);
} account_above;

/* Queries the driver for changes that no call to this library caused. A helper calls this
 * regularly. */
void account_refresh(int device);

/* Starts the helper of a GPU even if nothing has been launched there yet. */
static inline void account_watch(int device)
{
    account_above.watch(device);
}

void account_after_fork(void);

/* Called around driver calls that the library adds, which must not invalidate a capture of the
 * application. */
void account_relax(CUstreamCaptureMode *mode);
void account_unrelax(CUstreamCaptureMode *mode);

/* ---- contexts.c, context_charges.c ---- */

#define OWNER_PRIMARY 0
#define OWNER_LAST    254
#define OWNER_NONE    0xff /* the block does not end with a context */

uint8_t contexts_owner(void);                /* owner of what is allocated in the current context */
bool contexts_several(void);                 /* whether contexts other than the primary one exist */
int contexts_device(CUcontext context);      /* index in the grant; -1: unknown */
int contexts_stream_device(CUstream stream); /* need not be that of the current context */
void contexts_stream_gone(int device);       /* a stream of this GPU was destroyed */
void contexts_after_fork(void);

/* ---- modules.c, hidden.c ---- */

void modules_after_fork(void);
CUresult modules_launch(uint64_t function);

void modules_context_gone(uint8_t owner);
void modules_refresh(int device);

/* ---- pools.c ---- */

void pools_refresh(int device);
bool pools_squeeze(int device);
void pools_hand_over(int device);
void pools_after_fork(void);

/* ---- graphs.c ---- */

/*
 * The code that lets a launch of an executable graph through calls account_graph_before() before
 * the launch and, unless that call refused the launch, account_graph_after() afterwards, whatever
 * the result. Each call costs one load while no graph of the process owns memory.
 */
CUresult account_graph_before(CUgraphExec exec);
void account_graph_after(CUgraphExec exec);

extern uint32_t graphs_in_use;

static inline bool account_graphs(void)
{
    return unlikely(atomic_load_relaxed(&graphs_in_use));
}

void graphs_note_memory(void); /* a graph of this process owns memory */
void graphs_refresh(int device);
bool graphs_squeeze(int device);
void graphs_after_fork(void);

/* ---- exports.c ---- */

void exports_note(uint64_t handle, int fd);
long exports_follow(uint64_t handle, int fd, bool for_ever);
bool exports_outlive(const struct block *gone);
bool exports_refresh(void);
void exports_after_fork(void);

/* ---- vmm.c, arrays.c ---- */

/* Returns the ordinal of the GPU whose memory a location names, or -1 if the location is not in a
 * GPU's memory. A locality domain is a part of a GPU's memory. */
static inline CUdevice account_ordinal(const CUmemLocation *location)
{
    if (location->type == CU_MEM_LOCATION_TYPE_DEVICE)
        return location->id;
    return location->type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN ? location->id & 0xff : -1;
}

/* Returns the GPU's index in the grant; -1: nothing is charged there. */
int account_location(const CUmemLocation *location);

void vmm_array_ends(uint64_t array);
bool vmm_keep(uint64_t handle); /* keeps it alive as a mapping does; false: unknown handle */
void vmm_let_go(uint64_t handle);
void vmm_note_object(uint64_t handle);
uint64_t array_size_v1(const CUDA_ARRAY_DESCRIPTOR_v1 *desc);
uint64_t array_size(const CUDA_ARRAY_DESCRIPTOR *desc);
uint64_t array_size_3d_v1(const CUDA_ARRAY3D_DESCRIPTOR_v1 *desc);
uint64_t array_size_3d(const CUDA_ARRAY3D_DESCRIPTOR *desc);
uint64_t array_size_mipmapped(const CUDA_ARRAY3D_DESCRIPTOR *desc, unsigned int levels);

/* ---- held.c ---- */

/*
 * The charge for what one of the driver's pools holds. Several threads change that amount, and
 * only the driver knows it. One word holds the amount and a version, so that an older answer never
 * replaces a later one: see held_settle().
 */
struct held {
    uint64_t word;
};

#define HELD_UNIT 65536ull
#define HELD_BITS 28 /* bits of the amount, for 16 TiB; the others are the version */
#define HELD_MASK ((1ull << HELD_BITS) - 1)

static inline uint64_t held_bytes(const struct held *held)
{
    return (atomic_load_acquire(&held->word) & HELD_MASK) * HELD_UNIT;
}

/* Replaces the charge with what `query` returns, and gives back a claim of `claimed` bytes. */
void held_settle(struct held *held, int device, bool unseen, uint64_t claimed,
                 bool (*query)(const void *pool, uint64_t *bytes), const void *pool);
uint64_t held_clear(struct held *held);
