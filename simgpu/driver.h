/* Types and functions that the files of the simulated libcuda share; see driver.c. */
#pragma once

#include <stdbool.h>

#include "cuda_abi.h"
#include "device.h"

/* Declares and begins an exported function. For one without parameters, pass `void`. */
#define ENTRY(name, ...)                                                                           \
    __attribute__((visibility("default"))) CUresult name(__VA_ARGS__);                             \
    CUresult name(__VA_ARGS__)

/* The stream in the per-thread form of a call: there, NULL is the calling thread's own stream. */
#define PER_THREAD(stream) ((stream) ? (stream) : CU_STREAM_PER_THREAD)

/*
 * Handles are addresses of objects, as in the driver. The memory of an object is never returned to
 * the C library, so the use of a stale handle is detected by its magic and does not crash.
 */
struct object {
    uint32_t magic;
    struct object *next;
};

struct pool {
    uint32_t magic;
    size_t size;
    struct object *unused;
};

#define POOL(type, number) {.magic = (number), .size = sizeof(struct type)}

void *pool_take(struct pool *pool);
void pool_give(struct pool *pool, void *object);
bool pool_owns(const struct pool *pool, const void *object);

enum command_kind {
    COMMAND_KERNEL,
    COMMAND_WAIT, /* a kernel of length zero that is held until a word reaches a value */
    COMMAND_MEET, /* a kernel that spins until a word reaches a value, and then takes `duration` */
    COMMAND_EVENT,
    COMMAND_COPY,
    COMMAND_SET,
    COMMAND_FREE,
    COMMAND_HOST,
};

/* One operation in a stream. Only kernels, and large copies and fills, take time on the GPU. */
struct command {
    enum command_kind kind;
    uint64_t duration; /* kernel, copy, set: ns */
    uint64_t *stamp;   /* kernel: where its time of completion is written, or NULL */
    struct event *event;
    uint64_t record; /* event: number of this record; free: number of the allocation */
    void *to;        /* copy, set, free */
    const void *from;
    bool device_to, device_from; /* copy: whether the target, or source, is device memory */
    void *staged;                /* copy: memory owned by the command, freed when it is done */
    size_t n;                    /* copy, set: bytes per row */
    size_t rows, planes;         /* copy, set */
    size_t to_pitch, to_plane;   /* copy, set: bytes from one row, or plane, to the next */
    size_t from_pitch, from_plane;
    size_t width;  /* set: bytes per element */
    uint32_t fill; /* set */
    CUhostFn function;
    void *data;
    const uint32_t *word; /* wait, meet */
    uint32_t *own;        /* meet: set to `value` when the kernel begins */
    uint32_t value;
};

size_t command_bytes(const struct command *command);
size_t command_to_span(const struct command *command);
size_t command_from_span(const struct command *command);
void copy_bytes(const struct command *command);

/* A command that takes no GPU time and waits for kernels. */
struct effect {
    struct effect *next;
    struct command command;
};

/* The process's private data for one place in the shared queue. */
struct place {
    const uint32_t *word; /* wait, meet: held until this reaches `value`; otherwise NULL */
    uint32_t *own;        /* meet: set to `value` when the command begins */
    uint64_t behind;      /* meet: ns that the kernel takes once the word has reached `value` */
    uint32_t value;
    uint64_t *stamp;
    uint64_t completed;
    struct effect *first; /* effects due when this kernel ends, in order */
    struct effect **last;
};

struct stream {
    struct object object;
    struct context *context;
    unsigned int flags;
    int priority;
    uint64_t need; /* kernels that the context must have completed for the stream to be done */
    struct capture *capture;
    const void *thread; /* the thread to which this default stream belongs, or NULL */
    struct stream *next;
};

struct event {
    struct object object;
    struct context *context; /* where it was last recorded, or NULL */
    uint64_t context_serial;
    unsigned int flags;
    uint64_t record;
    uint64_t need;
    bool completed;
    uint64_t time;     /* ns on the GPU's clock */
    uint64_t captured; /* number of the capture in which it was last recorded, or 0 */
};

/* Number of limits (CUlimit) that a context has. */
#define CONTEXT_LIMITS (CU_LIMIT_MALLOC_HEAP_SIZE + 1)

struct context {
    struct object object;
    struct device *device;
    int ordinal;
    bool primary;
    unsigned int flags;
    uint32_t index;         /* in the device file */
    uint64_t serial;        /* in the device file */
    uint64_t head;          /* kernels completed, as of the last check of the device */
    uint64_t settled;       /* kernels with all their effects carried out in this process */
    uint64_t now;           /* GPU time of that check, ns */
    uint64_t legacy_need;   /* `need` of the NULL stream; blocking streams wait for it */
    uint64_t blocking_need; /* largest `need` of blocking streams; the NULL stream waits for it */
    unsigned int n_effects;
    CUresult fault; /* set until the context is destroyed */
    struct stream legacy;
    struct stream *streams;
    struct context *next;
    struct place places[GPU_QUEUE];
    size_t limits[CONTEXT_LIMITS];
    size_t stacks;        /* device memory that stacks take beyond their initial size, bytes */
    unsigned int n_waits; /* commands in the queue that are held */
};

enum allocation_kind {
    ALLOCATION_DEVICE,
    ALLOCATION_HOST, /* pinned */
    ALLOCATION_MANAGED,
    ALLOCATION_HIDDEN, /* device memory that the driver took for an array or a module */
    ALLOCATION_POOL,
    ALLOCATION_GRAPH,    /* everything that the nodes of one graph allocate */
    ALLOCATION_IMPORTED, /* opened through an IPC handle */
    ALLOCATION_MAPPED,   /* a mapping made with the virtual memory management API */
};

struct allocation {
    enum allocation_kind kind;
    int ordinal; /* of the device */
    uint64_t number;
    uintptr_t base;
    size_t bytes;                  /* as requested */
    size_t size;                   /* of address space */
    size_t charged;                /* device memory charged for this allocation alone */
    struct context *context;       /* the allocation ends with this context */
    struct slab *slab;             /* slab of a small allocation, or NULL */
    struct mempool *mempool;       /* pool block: its pool */
    const struct stream *freed_in; /* pool block: the stream that is about to free it, or NULL */
    uint64_t origin;               /* imported: its number in the exporting process */
    uint32_t origin_generation;    /* imported: generation of the exporting process */
    unsigned int opened;           /* imported: number of times it is open here */
    struct handle *handle;         /* mapping: the memory that is mapped */
    uint64_t access;               /* mapping: which devices may use it */
    /* Pool block, mapping: takes back the memory, which outlives the allocation. */
    void (*returned)(const struct allocation *item);
};

struct array {
    struct object object;
    struct context *context;
    uint64_t context_serial;
    bool level; /* a level of a mipmapped array, which owns the memory */
    CUDA_ARRAY3D_DESCRIPTOR shape;
    uintptr_t base;
    size_t pitch; /* bytes per row */
    size_t rows, planes;
};
bool array_valid(const struct array *array);

struct host_call {
    struct host_call *next;
    CUhostFn function;
    void *data;
};

struct driver {
    pthread_mutex_t lock;
    bool initialised;
    unsigned int epoch; /* changes when all handles end together */
    int n_devices;
    struct device *devices[DEVICES];
    struct context *primaries[DEVICES];
    unsigned int primary_references[DEVICES];
    struct context *contexts;
    struct capture *captures;
    struct host_call *host_calls; /* due, to be made without the lock */
    struct host_call **host_calls_last;
};

extern struct driver driver;
extern struct pool contexts_pool;

void driver_lock(void);
void driver_unlock(void);
CUresult driver_enter(void);
CUresult driver_enter_context(struct context **contextp);
CUresult driver_leave(CUresult result);
CUresult driver_device(CUdevice ordinal, struct device **devicep);
bool location_host(const CUmemLocation *location);
CUresult location_device(const CUmemLocation *location, struct device **devicep);

/* The context stack of the calling thread. */
struct context *current_context(void);
void current_set(struct context *context);
bool current_push(struct context *context);
bool current_pop(struct context **contextp);
const void *current_thread(void);

CUresult context_new(struct context **contextp, CUdevice ordinal, unsigned int flags);
bool context_valid(const struct context *context);
CUresult context_look(struct context *context);
CUresult context_wait(struct context *context, uint64_t need);
CUresult context_drain(int ordinal);
uint64_t context_tail(const struct context *context);
CUresult context_reserve(struct context *context);
void context_unhold(struct context *context);
bool context_displaced(const struct context *context);
void context_append(struct context *context, const struct command *command);
void context_settle(struct context *context);
void context_perform(struct context *context, const struct command *command, uint64_t time);

/* lifecycle.c */
CUresult driver_init(void);
void driver_forget(bool owner);
void context_free(struct context *context);

/* stream.c */
extern struct pool streams_pool, events_pool;
extern _Atomic unsigned int driver_record_us; /* time that recording an event takes, us */
CUresult stream_find(CUstream handle, struct context *current, struct stream **streamp);
CUresult stream_enter(CUstream handle, struct stream **streamp);
uint64_t stream_need(const struct stream *stream);
void stream_raise(struct stream *stream, uint64_t need);
CUresult stream_new(struct context *context, unsigned int flags, int priority,
                    struct stream **streamp);
CUresult stream_submit(struct stream *stream, const struct command *command);
void event_renew(struct event *event, struct context *context, struct command *command);
void stream_free(struct stream *stream);

/* memory.c */
CUresult memory_charge(struct device *device, size_t bytes);
void memory_refund(struct device *device, size_t bytes);
CUresult memory_allocate(struct context *context, enum allocation_kind kind, size_t bytes,
                         uintptr_t *addressp);
uintptr_t memory_range(uintptr_t base, size_t size, bool replace);
bool memory_add(const struct allocation *item);
struct allocation *memory_at(uintptr_t address);
struct allocation *memory_after(uintptr_t address);
const struct allocation *memory_find(const void *address, size_t bytes);
struct allocation *memory_freeable(uintptr_t address);
void memory_renumber(struct allocation *item);
CUresult memory_release(uintptr_t address);
CUresult memory_register(struct context *context, uintptr_t base, size_t bytes);
CUresult memory_unregister(uintptr_t base);
void memory_release_context(const struct context *context);
void memory_forget(void);

/* mempool.c */
#define MEMPOOL_ENDED ((const struct stream *)1) /* stands for a stream that has ended */
bool mempool_valid(const struct mempool *pool);
CUresult mempool_new(struct mempool **poolp, int ordinal, bool host, uint64_t most);
CUresult mempool_standard(int ordinal, struct mempool **poolp);
CUresult mempool_chosen(int ordinal, struct mempool **poolp);
CUresult mempool_choose(int ordinal, struct mempool *pool);
CUresult mempool_destroy(struct mempool *pool);
CUresult mempool_allocate(struct mempool *pool, struct stream *stream, size_t bytes,
                          uintptr_t *addressp);
void mempool_forget_stream(const struct stream *stream);
void mempool_trim(struct mempool *pool, uint64_t keep);
void mempool_synchronized(const struct device *device);
void mempool_context_ended(int ordinal);
CUresult mempool_get(const struct mempool *pool, CUmemPool_attribute attribute, void *value);
CUresult mempool_set(struct mempool *pool, CUmemPool_attribute attribute, const void *value);
void mempool_forget(bool owner);

/* vmm.c */
bool handle_valid(const struct handle *handle);
CUresult handle_new(struct handle **handlep, size_t size, const CUmemAllocationProp *prop);
void handle_release(struct handle *handle);
CUresult handle_retain(struct handle **handlep, uintptr_t address);
const CUmemAllocationProp *handle_prop(const struct handle *handle);
CUresult handle_export(const struct handle *handle, int *fdp);
CUresult handle_import(struct handle **handlep, int fd);
size_t vmm_granularity(void);
CUresult vmm_reserve(uintptr_t *basep, size_t size, size_t alignment, uintptr_t wanted);
CUresult vmm_unreserve(uintptr_t base, size_t size);
CUresult vmm_map(uintptr_t base, size_t size, size_t offset, struct handle *handle);
CUresult vmm_unmap(uintptr_t base, size_t size);
CUresult vmm_access(uintptr_t base, size_t size, const CUmemAccessDesc *wanted);
void vmm_forget(bool owns_mappings);

/* graphmem.c */
struct graph_memory;
CUresult graphmem_allocate(struct graph_memory **memoryp, int ordinal, size_t bytes,
                           uintptr_t *addressp);
CUresult graphmem_end(struct graph_memory *memory, uintptr_t address);
bool graphmem_freed(uintptr_t address);
CUresult graphmem_instantiate(struct graph_memory *memory);
CUresult graphmem_take(struct graph_memory *memory);
CUresult graphmem_launch(struct graph_memory *memory, bool again);
void graphmem_leave(struct graph_memory *memory, bool instantiated);
void graphmem_trim(int ordinal);
void graphmem_context_ended(int ordinal);
CUresult graphmem_get(int ordinal, CUgraphMem_attribute attribute, uint64_t *value);
CUresult graphmem_set(int ordinal, CUgraphMem_attribute attribute, uint64_t value);
void graphmem_forget(bool owner);

/* capture.c, graph.c */
struct capture {
    struct capture *next;
    uint64_t number;
    CUstreamCaptureMode mode;
    const void *thread;
    struct stream *origin;
    struct graph *graph;
    bool invalid;
};
extern __thread CUstreamCaptureMode thread_capture_mode;
CUresult capture_begin(struct stream *stream, CUstreamCaptureMode mode);
CUresult capture_end(struct stream *stream, struct graph **graphp);
CUresult capture_add(struct capture *capture, const struct command *command);
CUresult capture_check_unsafe(void);
CUresult capture_check_legacy(const struct context *context);
struct capture *capture_find(uint64_t number);
void capture_invalidate(struct capture *capture);
void capture_drop_stream(const struct stream *stream);
CUresult graph_new(struct graph **graphp);
void graph_free(struct graph *graph);
struct graph_memory **graph_memory(struct graph *graph);
CUresult graph_add(struct graph *graph, struct graph_node *const *dependencies, size_t n,
                   struct graph_node **nodep);
void graph_remove_last(struct graph *graph);
CUresult graph_instantiate(const struct graph *graph, bool free_again, struct graph_exec **execp);
CUresult graph_upload(struct graph_exec *exec);
CUresult graph_launch(struct graph_exec *exec, struct stream *stream);
CUresult graph_exec_free(struct graph_exec *exec);
bool graph_valid(const struct graph *graph);
bool graph_exec_valid(const struct graph_exec *exec);
