/*
 * The control library is interposed in front of libcuda in a container's processes, and holds the
 * container to its quota. All parts of the library include this header.
 *
 * Terms used throughout:
 *
 *   grant     what the governor allows: limits, and the time until which work may start
 *             (read-only page)
 *   ledger    what the container's processes report: charges and work (memory that they share)
 *   slot      the part of the ledger that belongs to this process
 *   gate      where calls that start work wait for GPU time
 *   account   where calls that take device memory are charged
 *   marker    an event recorded behind submitted work, to learn when it ended and how long it took
 *   original  the driver's own libcuda, loaded under another name by DT_NEEDED
 */
#pragma once

#include "account.h"
#include "cuda_abi.h"
#include "entries.gen.h"
#include "layout.gen.h"
#include "os.h"

#define CONTROL_EXPORT __attribute__((visibility("default")))

/* origin.c: functions of the driver that the library itself calls, in addition to those in the API
 * table. */
struct driver_cuda {
    CUresult (*cuDeviceGetCount)(int *count);
    CUresult (*cuDeviceGet)(CUdevice *device, int ordinal);
    CUresult (*cuDeviceGetUuid)(CUuuid *uuid, CUdevice dev);
    CUresult (*cuDeviceGetUuid_v2)(CUuuid *uuid, CUdevice dev);
    CUresult (*cuCtxGetCurrent)(CUcontext *ctx);
    CUresult (*cuCtxSetCurrent)(CUcontext ctx);
    CUresult (*cuCtxGetDevice)(CUdevice *dev);
    CUresult (*cuStreamIsCapturing)(CUstream stream, CUstreamCaptureStatus *status);
    CUresult (*cuThreadExchangeStreamCaptureMode)(CUstreamCaptureMode *mode);
    CUresult (*cuMemHostAlloc)(void **pointer, size_t size, unsigned int flags);
    CUresult (*cuStreamWaitValue32)(CUstream stream, CUdeviceptr address, uint32_t value,
                                    unsigned int flags);
    CUresult (*cuEventCreate)(CUevent *event, unsigned int flags);
    CUresult (*cuEventRecord)(CUevent event, CUstream stream);
    CUresult (*cuEventQuery)(CUevent event);
    CUresult (*cuEventElapsedTime)(float *ms, CUevent start, CUevent end);
    CUresult (*cuPointerGetAttribute)(void *data, unsigned int attribute, CUdeviceptr address);
    CUresult (*cuCtxFromGreenCtx)(CUcontext *ctx, CUgreenCtx green);
    CUresult (*cuStreamGetCtx)(CUstream stream, CUcontext *ctx);
    CUresult (*cuCtxPushCurrent)(CUcontext ctx);
    CUresult (*cuCtxPopCurrent)(CUcontext *ctx);
    CUresult (*cuDeviceGetAttribute)(int *value, unsigned int attribute, CUdevice dev);
    CUresult (*cuDeviceGetMemPool)(CUmemoryPool *pool, CUdevice dev);
    CUresult (*cuDeviceGetDefaultMemPool)(CUmemoryPool *pool, CUdevice dev);
    CUresult (*cuMemGetDefaultMemPool)(CUmemoryPool *pool, CUmemLocation *location, int type);
    CUresult (*cuMemPoolGetAttribute)(CUmemoryPool pool, int attribute, void *value);
    CUresult (*cuMemPoolTrimTo)(CUmemoryPool pool, size_t keep);
    CUresult (*cuMemFree)(CUdeviceptr pointer);
    CUresult (*cuMemFreeAsync)(CUdeviceptr pointer, CUstream stream);
    CUresult (*cuMemGetInfo)(size_t *free_bytes, size_t *total);
    CUresult (*cuMemGetAddressRange)(CUdeviceptr *base, size_t *size, CUdeviceptr pointer);
    CUresult (*cuMemGetAllocationPropertiesFromHandle)(CUmemAllocationProp *prop,
                                                       CUmemGenericAllocationHandle handle);
    CUresult (*cuCtxGetLimit)(size_t *value, CUlimit limit);
    CUresult (*cuDevicePrimaryCtxGetState)(CUdevice dev, unsigned int *flags, int *active);
    CUresult (*cuDeviceGetGraphMemAttribute)(CUdevice dev, int attribute, void *value);
    CUresult (*cuDeviceGraphMemTrim)(CUdevice dev);
    CUresult (*cuGraphGetNodes)(CUgraph graph, CUgraphNode *nodes, size_t *n);
    CUresult (*cuGraphNodeGetType)(CUgraphNode node, int *type);
    CUresult (*cuGraphChildGraphNodeGetGraph)(CUgraphNode node, CUgraph *graph);
    CUresult (*cuGraphMemAllocNodeGetParams)(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *params);
    CUresult (*cuKernelGetLibrary)(CUlibrary *library, CUkernel kernel);
    CUresult (*cuLibraryGetKernelCount)(unsigned int *count, CUlibrary library);
    CUresult (*cuMemAddressReserve)(CUdeviceptr *address, size_t size, size_t alignment,
                                    CUdeviceptr wanted, unsigned long long flags);
    CUresult (*cuMemAddressFree)(CUdeviceptr address, size_t size);
    CUresult (*cuMemSetAccess)(CUdeviceptr address, size_t size, const CUmemAccessDesc *access,
                               size_t count);
    CUresult (*cuMemHostRegister)(void *pointer, size_t size, unsigned int flags);
    CUresult (*cuMemcpyDtoHAsync)(void *to, CUdeviceptr from, size_t size, CUstream stream);
    CUresult (*cuMemcpyHtoDAsync)(CUdeviceptr to, const void *from, size_t size, CUstream stream);
    CUresult (*cuStreamCreate)(CUstream *stream, unsigned int flags);
    CUresult (*cuStreamDestroy)(CUstream stream);
    CUresult (*cuStreamSynchronize)(CUstream stream);
    CUresult (*cuCtxSynchronize)(void);
};

extern struct real_cuda origin_real;
extern struct driver_cuda origin_driver;
#define real   (&origin_real)
#define driver (&origin_driver)

/* Resolves the driver's functions when the library is loaded. */
struct control_hook;
void origin_resolve(const struct control_hook *hooks);

/* Returns the function that an application gets in place of `found`, the driver's answer to a
 * look-up. */
void *origin_replace(void *found);

/* pages.c, pages_join.c, pages_rejoin.c, pages_socket.c: the grant page and the ledger. */
#define PAGES_DIRECTORY "/run/tidegate"

/* Maps the grant page and registers this process, both only once. Returns true if the container's
 * grant can be read. */
bool pages_start(void);

/* Returns the grant page, or NULL if there is none. Unlike pages_start(), this does not register
 * the process. */
const struct grant_header *pages_peek(void);

/* Matches the driver's devices with those of the grant by UUID. Called after cuInit. */
void pages_match_devices(void);

/* These values are read on every call, so the accessors are inline. */
struct pages {
    const struct grant_header *grant;
    struct ledger_header *ledger;
    struct ledger_slot *slot;
    unsigned n_devices;
    unsigned on_governor_loss;
    bool denied;
    bool alone;
    char *arena; /* host memory for what this process parks; NULL: there is none */
    uint64_t arena_size;
};

extern struct pages pages_now;

/* Returns NULL before pages_start(). */
static inline const struct grant_header *pages_grant(void)
{
    return pages_now.grant;
}

/* Returns whether this process enforces its quota on its own, with or without a governor. */
static inline bool pages_alone(void)
{
    return atomic_load_relaxed(&pages_now.alone);
}

/* `index` is below pages_n_devices(). */
static inline const struct grant_device *pages_grant_device(unsigned index)
{
    return (const struct grant_device *)((const char *)pages_now.grant + GRANT_DEVICES) + index;
}

/* The pointer changes when a process reconnects to a governor, even while other threads use it. */
static inline struct ledger_header *pages_ledger(void)
{
    return atomic_load_relaxed(&pages_now.ledger);
}

/* Returns this process's part of the ledger, or NULL while it has none. Without a slot nothing is
 * governed. */
static inline struct ledger_slot *pages_slot(void)
{
    return atomic_load_acquire(&pages_now.slot);
}

/* Returns the counters of the process in a slot of the container's ledger, for one GPU. */
static inline struct ledger_device *pages_slot_device(uint32_t slot, unsigned index)
{
    char *base = (char *)pages_ledger() + LEDGER_SLOTS + slot * sizeof(struct ledger_slot);

    return (struct ledger_device *)(base + LEDGER_SLOT_DEVICES) + index;
}

static inline struct ledger_device *pages_ledger_device(unsigned index)
{
    return (struct ledger_device *)((char *)pages_slot() + LEDGER_SLOT_DEVICES) + index;
}

static inline unsigned pages_n_devices(void)
{
    return pages_now.n_devices;
}

/* Returns what to do without a governor: 0 enforce the quota locally, 1 deny, 2 allow
 * everything. */
static inline unsigned pages_on_governor_loss(void)
{
    return pages_now.on_governor_loss;
}

/* Index in the grant of a device, or of the current context's device; -1 if it is not governed. */
int pages_index_of(CUdevice dev);
CUdevice pages_device(unsigned index); /* the inverse; -1 if this process does not see the device */
int pages_index_current(void);

/* Denies everything to this process from now on: contexts, memory and launches. */
void pages_deny(void);

static inline bool pages_denied(void)
{
    return atomic_load_relaxed(&pages_now.denied);
}

/* Tells the arbiter that the ledger has changed. Never blocks. */
void pages_poke(void);

/* Reconnects when the governor has been replaced. A helper calls it about ten times a second. Never
 * blocks. */
void pages_rejoin(void);
uint64_t *pages_before(const uint64_t *sum);

/* lookups.c: reports the names that were looked up before the process began to use its slot in the
 * ledger. */
void lookups_joined(void);
void lookups_after_fork(void);

/* custom.c */
void custom_after_fork(void);

/* log.c: writes one line of bounded length to standard error. A process writes at most 16 of
 * them. */
void control_log(const char *message) cold;

/* gate.c, gate_*.c: GPU time. */
struct gate_work {
    uintptr_t key;     /* what is launched; durations are learned under this key */
    uint64_t blocks;   /* size of the launch */
    uint64_t guess_ns; /* expected duration until one is measured; 0: unknown */
    CUstream stream;
    bool together; /* needs work on other GPUs at the same time, so it cannot be held */
    bool single;   /* may be long: its duration is learned under its own key in every grant */
};

struct gate_ticket {
    int device;  /* -1: not governed */
    bool inside; /* the call keeps memory where it is: see parking.h */
    bool mark;   /* record a marker behind the work */
    CUstream stream;
    CUcontext ctx;
    uint32_t era;
};

CUresult gate_enter(struct gate_ticket *ticket, const struct gate_work *work);
void gate_leave(const struct gate_ticket *ticket, CUresult result);
void gate_note_dependency(void);
bool gate_lost(uint64_t now); /* no governor, an invalid page, or pages_alone() */
void gate_forget_stream(CUstream stream);
void gate_forget_context(CUcontext ctx);
bool gate_capturing(CUstream stream);
bool gate_captures(void);
void gate_end_all_passes(void);
extern uint32_t
    gate_lazy_kernels; /* kernels whose launch loads their library: no passes while any exist */

enum gate_capture {
    GATE_CAPTURE_NEW,
    GATE_CAPTURE_KNOWN,   /* the stream is already capturing */
    GATE_CAPTURE_REFUSED, /* it could not be followed, and must not begin */
};

enum gate_capture gate_capture_begin(CUstream stream, bool to_graphics);
void gate_capture_end(CUstream stream);
void gate_join_begin(void);
void gate_join_end(void);
void gate_after_fork(void);
void gate_watch(int device); /* starts the helper even if nothing has been launched yet */

static inline uint64_t gate_blocks(unsigned x, unsigned y, unsigned z)
{
    return (uint64_t)x * y * z;
}

/* The per-thread forms of a function use the per-thread stream where the others use the legacy
 * one. */
static inline CUstream gate_ptsz(CUstream stream)
{
    return stream ? stream : CU_STREAM_PER_THREAD;
}

/* A launch without a configuration counts as one without blocks: the driver rejects it. */
static inline uint64_t gate_config_blocks(const CUlaunchConfig *config)
{
    return config ? gate_blocks(config->gridDimX, config->gridDimY, config->gridDimZ) : 0;
}

static inline CUstream gate_config_stream(const CUlaunchConfig *config)
{
    return config ? config->hStream : NULL;
}

/* copies.c: copies and fills on the device also pass the gate; other copies are only counted. */
enum copy_flow {
    COPY_DEVICE, /* within the GPU's memory */
    COPY_FILL,
    COPY_HOST,  /* to or from the host */
    COPY_OTHER, /* direction unknown, or nothing is copied */
};

struct copy {
    enum copy_flow flow;
    uint64_t bytes;
};

CUresult copy_enter(struct gate_ticket *ticket, struct copy copy, CUstream stream);
void copy_note_small(void);
