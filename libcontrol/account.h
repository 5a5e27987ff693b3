/*
 * Device memory: what this process holds of it, and what the container may hold.
 *
 *   account.c   charges: the sum over the container's processes against the quota
 *   blocks.c    the live allocations of this process
 *   pools.c     stream-ordered allocation: what the driver's pools hold
 *   graphs.c    memory of graphs
 *   vmm.c       physical allocations and their mappings
 *   exports.c   those that live on in a descriptor
 *   multicast.c those that are bound to a multicast object
 *   contexts.c  what contexts take, and what goes with them
 *   arrays.c, memory.c, modules.c   the rest
 */
#pragma once

#include "cuda_abi.h"
#include "layout.gen.h"
#include "prim.h"

/* ---- blocks.c ---- */

enum block_kind {
    BLOCK_MEMORY, /* by device address: cuMemAlloc and what cuMemFree takes */
    BLOCK_SLAB,   /* by device address: 2 MiB of the driver's that small blocks are cut from */
    BLOCK_ARRAY,
    BLOCK_EXTERNAL,
    BLOCK_IPC,       /* by device address: memory of another process */
    BLOCK_HANDLE,    /* a physical allocation; `value`: its mappings, `count`: references to it */
    BLOCK_MAPPING,   /* by device address; `value`: the handle that is mapped there */
    BLOCK_SPARSE,    /* `value`: a handle that the array `size` keeps alive */
    BLOCK_BINDING,   /* `value`: a handle that the multicast object `size` keeps alive */
    BLOCK_EXPORT,    /* by handle; `value`: the number of its descriptors */
    BLOCK_LINGERING, /* by that number: an allocation that only descriptors keep alive */
    BLOCK_LIBRARY,   /* `value`: the contexts that it was loaded into, a bit each */
    BLOCK_KERNEL,    /* of a library that is in no context yet; `value`: the library */
    BLOCK_LOADED,    /* by module or library; `value`: what it took when it was loaded */
    BLOCK_GREEN,     /* a green context; `value`: its GPU, as the driver counts */
    BLOCK_HIDDEN,    /* by module or library: what it has that NVML attributes to nobody */
    BLOCK_EXEC,      /* an executable graph; `size`: what its nodes allocate, `value`: reserved */
};

#define BLOCK_SMALL    1  /* part of a slab, which is charged instead */
#define BLOCK_UNSEEN   2  /* NVML does not attribute it to this process */
#define BLOCK_EXPORTED 4  /* a descriptor of it was made */
#define BLOCK_OBJECT   8  /* no memory: a multicast object */
#define BLOCK_FOR_EVER 16 /* nobody can tell when the descriptor is closed */

struct block {
    uint64_t key;   /* an address or a handle, never 0 */
    uint64_t size;  /* what is charged for it */
    uint64_t value; /* by kind */
    uint32_t count; /* references */
    uint8_t kind;
    int8_t device; /* the grant's index; -1: nothing is charged */
    uint8_t flags;
    uint8_t owner; /* the context that it ends with: see contexts_owner() */
};

/* Locks the part of the table where (kind, key) belongs. Returns the entry, or NULL. No driver call
 * until blocks_unlock(); the pointer is good until then or until the table is changed. */
struct block *blocks_lock(enum block_kind kind, uint64_t key);
void blocks_unlock(enum block_kind kind, uint64_t key);

/* With the lock of that part: adds an entry that is not there; false without memory for it. */
bool blocks_add(const struct block *block);
void blocks_remove(struct block *block);
struct block *blocks_peer(enum block_kind kind, uint64_t key); /* in the same part */

/* Calls `visit` for each entry with every part locked in turn; where it answers true, the entry is
 * removed. */
void blocks_sweep(bool (*visit)(const struct block *block, void *data), void *data);
void blocks_after_fork(void);

/* ---- account.c ---- */

#define ACCOUNT_SMALL (1ull << 20) /* smaller blocks are cut from slabs */
#define ACCOUNT_UNIT  (2ull << 20)

enum account_kind {
    ACCOUNT_BLOCK,
    ACCOUNT_MANAGED,
    ACCOUNT_ARRAY,
    ACCOUNT_EXTERNAL,
    ACCOUNT_IPC,
};

struct account_charge {
    int device; /* the grant's index, -1: not governed */
    uint8_t kind;
    uint8_t flags;
    uint8_t owner;
    uint64_t size;    /* bytes charged */
    uint64_t claimed; /* bytes that are under way */
    uint64_t taking;  /* bytes that the driver is about to take by itself */
};

/* What the container holds of a GPU: what its processes are charged, and what the driver took. */
uint64_t account_used(int device);
uint64_t account_limit(int device);

/* Charges so many bytes, or not at all. `account_claim` does what it can before it says no. What is
 * claimed is under way until account_landed(). */
bool account_try(int device, uint64_t size, bool unseen);
bool account_claim(int device, uint64_t size, bool unseen);
void account_add(int device, uint64_t size, bool unseen);
void account_give(int device, uint64_t size, bool unseen);
void account_moves(int device, uint64_t size, bool unseen);
void account_landed(int device, uint64_t size, bool unseen);
uint64_t account_moves_all(int device);
void account_pools(int device, uint64_t more, uint64_t less, bool unseen);
void account_shrunk(int device, uint64_t size, bool unseen);
uint64_t account_returned(int device); /* by the container's processes, ever */
void account_note_peak(int device);
bool account_over(int device, uint64_t slack);
CUresult account_refuse(int device);

/* The driver takes memory by itself, or gives it back: counted until the governor has looked. */
void account_driver_takes(int device, uint64_t size);
void account_driver_gives(int device, uint64_t size);
void account_convert(int device, uint64_t size, bool unseen); /* a charge into what it takes */
bool account_await_look(int device, uint64_t since, uint64_t patience);
bool account_alone(void);

/* A claim for what the driver is about to take by itself, and its end. */
bool account_begin(struct account_charge *charge, int device, uint64_t size);
void account_end(struct account_charge *charge, CUresult result);

/* Around an allocation: reserve, the driver, then cancel or (settle and) record. */
CUresult account_reserve(struct account_charge *charge, enum account_kind kind, uint64_t size);
void account_cancel(struct account_charge *charge);
void account_settle(struct account_charge *charge, enum account_kind kind, uint64_t size);
void account_record(const struct account_charge *charge, uint64_t key);

/* Around its end: forget, the driver, then forgotten. */
void account_forget(struct account_charge *charge, enum account_kind kind, uint64_t key);
void account_forgotten(struct account_charge *charge, uint64_t key, CUresult result);

/* Memory of somebody else that was opened: charged once, however often it is opened. */
CUresult account_open(enum block_kind kind, int device, uint64_t key, uint64_t size);
bool account_sweep(int device, uint8_t owner);

uint64_t account_product(uint64_t a, uint64_t b);
uint64_t account_round(uint64_t size, uint64_t unit);
uint64_t account_pitch(uint64_t width, uint64_t height);

/* Asks the driver what changed without a call of ours; another thread calls it now and then. */
void account_refresh(int device);

/* In a forked child: it holds nothing. */
void account_after_fork(void);

/* Driver calls of ours must not invalidate a capture of the application. */
void account_relax(CUstreamCaptureMode *mode);
void account_unrelax(CUstreamCaptureMode *mode);

/* ---- contexts.c ---- */

#define OWNER_PRIMARY 0
#define OWNER_LAST    62
#define OWNER_NONE    0xff /* ends with no context */

uint8_t contexts_owner(void);           /* of what is allocated in the current context */
bool contexts_several(void);            /* there are others than the primary one */
int contexts_device(CUcontext context); /* the grant's index, -1: unknown */
void contexts_stream_gone(void);        /* one of the current context's */
void contexts_after_fork(void);

/* ---- modules.c ---- */

void modules_after_fork(void);
CUresult modules_launch(uint64_t function);

extern uint32_t modules_kernels; /* kernels whose launch would load their library */
void modules_context_gone(uint8_t owner);
void modules_refresh(int device);

/* ---- pools.c ---- */

void pools_refresh(int device);
bool pools_squeeze(int device);
void pools_hand_over(int device);
void pools_after_fork(void);

/* ---- graphs.c ---- */

/*
 * Around a launch of an executable graph, by whoever lets it through: before it, and after it
 * whatever became of it (unless `before` refused). They cost a load while no graph of the process
 * has memory of its own.
 */
CUresult account_graph_before(CUgraphExec exec);
void account_graph_after(CUgraphExec exec);

extern uint32_t graphs_in_use;

static inline bool account_graphs(void)
{
    return unlikely(atomic_load_relaxed(&graphs_in_use));
}

void graphs_note_memory(void); /* a graph of this process has memory of its own */
void graphs_refresh(int device);
bool graphs_squeeze(int device);
void graphs_after_fork(void);

/* ---- exports.c, multicast.c ---- */

bool exports_outlive(const struct block *gone);
bool exports_refresh(void);
void exports_after_fork(void);
void multicast_ends(uint64_t object);

/* ---- vmm.c, arrays.c ---- */

void vmm_array_ends(uint64_t array);
bool vmm_keep(uint64_t handle); /* like a mapping; false: it is not one of ours */
void vmm_let_go(uint64_t handle);
void vmm_note_object(uint64_t handle);
uint64_t array_size_v1(const CUDA_ARRAY_DESCRIPTOR_v1 *desc);
uint64_t array_size(const CUDA_ARRAY_DESCRIPTOR *desc);
uint64_t array_size_3d_v1(const CUDA_ARRAY3D_DESCRIPTOR_v1 *desc);
uint64_t array_size_3d(const CUDA_ARRAY3D_DESCRIPTOR *desc);
uint64_t array_size_mipmapped(const CUDA_ARRAY3D_DESCRIPTOR *desc, unsigned int levels);

/*
 * What a pool of the driver holds, charged: a number that changes under several threads and is only
 * known by asking. One word has the amount and a version, so that an answer never replaces a later
 * one: see held_settle().
 */
struct held {
    uint64_t word;
};

#define HELD_UNIT 65536ull
#define HELD_BITS 28 /* of the amount: 16 TiB; the rest is the version */
#define HELD_MASK ((1ull << HELD_BITS) - 1)

static inline uint64_t held_bytes(const struct held *held)
{
    return (atomic_load_acquire(&held->word) & HELD_MASK) * HELD_UNIT;
}

/* Charges what `ask` answers in the place of what was charged before, and gives back a claim. */
void held_settle(struct held *held, int device, bool unseen, uint64_t claimed,
                 bool (*ask)(const void *whom, uint64_t *bytes), const void *whom);
uint64_t held_clear(struct held *held);
