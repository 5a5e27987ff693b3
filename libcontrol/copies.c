/*
 * Gates or counts copies and fills. Those within the GPU's memory are work, like kernels, and pass
 * the gate. Those to and from the host are only counted, and so are small copies by calls that do
 * not specify the direction, because the driver would have to be queried for it.
 *
 * On an H200 a 4 MiB copy takes 7 us, of which 5 us are the same for any size. Beyond that, the
 * rate is 2 TB/s for a copy and 4 TB/s for a fill.
 */
#include "copies.h"

#include "parking.h"
#include "pass.h"

#define COPY_SMALL   (1ull << 20) /* smaller copies take no longer than an empty kernel */
#define COPY_BASE_NS 5000
#define COPY_PER_NS  2000 /* bytes */
#define FILL_PER_NS  4000
#define COPY_KIND    1 /* no function of a module has this address */
#define FILL_KIND    2
#define CU_POINTER_ATTRIBUTE_MEMORY_TYPE 2

/* Sizes with the same three leading bits are one kind of work. They differ by a quarter at most. */
static uint64_t copy_class(uint64_t bytes)
{
    unsigned bits = 63 - (unsigned)__builtin_clzll(bytes | 1);

    return bits < 3 ? bytes : (uint64_t)bits << 8 | (bytes >> (bits - 2) & 3);
}

static void copy_count(struct ledger_device *ledger, struct copy copy)
{
    if (copy.flow == COPY_HOST) {
        atomic_add_relaxed(&ledger->transfers, 1);
        atomic_add_relaxed(&ledger->transfer_bytes, copy.bytes);
    } else {
        atomic_add_relaxed(&ledger->small, 1);
    }
}

CUresult copy_enter(struct gate_ticket *ticket, struct copy copy, CUstream stream)
{
    bool fill = copy.flow == COPY_FILL;
    struct gate_work work = {.stream = stream};
    int device;

    ticket->device = -1;
    ticket->inside = false;
    if (unlikely(!pages_slot()))
        return CUDA_SUCCESS;
    if (copy.bytes && (fill || copy.flow == COPY_DEVICE)) {
        work.key = fill ? FILL_KIND : COPY_KIND;
        work.blocks = copy_class(copy.bytes);
        if (likely(pass_launch(stream, work.key, work.blocks, false)))
            return CUDA_SUCCESS;
        work.guess_ns = COPY_BASE_NS + copy.bytes / (fill ? FILL_PER_NS : COPY_PER_NS);
        return gate_enter(ticket, &work);
    }
    device = pages_n_devices() == 1 ? 0 : pages_index_current();
    if (device >= 0)
        copy_count(pages_ledger_device((unsigned)device), copy);
    ticket->inside = parking_applies();
    if (ticket->inside)
        parking_enter(PARKING_MEMORY);
    return CUDA_SUCCESS;
}

/* Counts a call that neither launches nor copies, and does too little work to matter. */
void copy_note_small(void)
{
    struct gate_ticket ticket;

    copy_enter(&ticket, (struct copy){COPY_OTHER, 0}, NULL);
    gate_leave(&ticket, CUDA_SUCCESS);
}

/* ---- size and direction of a copy ---- */

/* The driver knows of host memory only if it is pinned, so memory that it does not know of counts
 * as host memory. */
static bool copy_on_device(CUdeviceptr address)
{
    struct parking_block parked; /* the driver does not know the address of a parked block */
    unsigned int type = 0;

    if (parking_applies() && parking_find(address, &parked))
        return true;
    return driver->cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) ==
               CUDA_SUCCESS &&
           type == CU_MEMORYTYPE_DEVICE;
}

struct copy copy_any(CUdeviceptr to, CUdeviceptr from, uint64_t bytes)
{
    struct copy copy = {COPY_OTHER, bytes};

    if (bytes >= COPY_SMALL && pages_slot())
        copy.flow = copy_on_device(to) && copy_on_device(from) ? COPY_DEVICE : COPY_HOST;
    return copy;
}

/* Classifies a copy by the memory types that the structures of 2D and 3D copies specify. */
static struct copy copy_typed(unsigned to, CUdeviceptr to_address, unsigned from,
                              CUdeviceptr from_address, uint64_t bytes)
{
    struct copy copy = {COPY_DEVICE, bytes};

    if (to == CU_MEMORYTYPE_HOST || from == CU_MEMORYTYPE_HOST)
        copy.flow = COPY_HOST;
    else if (bytes < COPY_SMALL && (to == CU_MEMORYTYPE_UNIFIED || from == CU_MEMORYTYPE_UNIFIED))
        copy.flow = COPY_OTHER;
    else if ((to == CU_MEMORYTYPE_UNIFIED && !copy_on_device(to_address)) ||
             (from == CU_MEMORYTYPE_UNIFIED && !copy_on_device(from_address)))
        copy.flow = COPY_HOST;
    return copy;
}

#define COPY_2D(p)                                                                                 \
    copy_typed((p)->dstMemoryType, (p)->dstDevice, (p)->srcMemoryType, (p)->srcDevice,             \
               account_product((p)->WidthInBytes, (p)->Height))
#define COPY_3D(p)                                                                                 \
    copy_typed((p)->dstMemoryType, (p)->dstDevice, (p)->srcMemoryType, (p)->srcDevice,             \
               account_product(account_product((p)->WidthInBytes, (p)->Height), (p)->Depth))

static const struct copy copy_nothing = {COPY_OTHER, 0};

struct copy copy_2d(const CUDA_MEMCPY2D *p)
{
    return p ? COPY_2D(p) : copy_nothing;
}

struct copy copy_2d_v1(const CUDA_MEMCPY2D_v1 *p)
{
    return p ? COPY_2D(p) : copy_nothing;
}

struct copy copy_3d(const CUDA_MEMCPY3D *p)
{
    return p ? COPY_3D(p) : copy_nothing;
}

struct copy copy_3d_v1(const CUDA_MEMCPY3D_v1 *p)
{
    return p ? COPY_3D(p) : copy_nothing;
}

struct copy copy_3d_peer(const CUDA_MEMCPY3D_PEER *p)
{
    return p ? COPY_3D(p) : copy_nothing;
}

/* Counts all copies of a call as one copy with the total size of those within the device. Small
 * copies are included if they add up to COPY_SMALL or more. Once a small copy is found to be within
 * the device, the other small copies are assumed to be within it too, so that the driver is not
 * queried twice for each. */
struct copy copy_batch(const CUdeviceptr *to, const CUdeviceptr *from, const size_t *sizes,
                       size_t count)
{
    struct copy copy = copy_nothing;
    bool small_within = false;
    uint64_t small = 0;

    if (!to || !from || !sizes || !pages_slot())
        return copy;
    for (size_t i = 0; i < count; i++)
        small += sizes[i] < COPY_SMALL ? sizes[i] : 0;
    for (size_t i = 0; i < count; i++) {
        bool is_small = sizes[i] < COPY_SMALL;

        if (!sizes[i] || (is_small && small < COPY_SMALL))
            continue;
        if (!(is_small && small_within) && !(copy_on_device(to[i]) && copy_on_device(from[i])))
            continue;
        small_within = small_within || is_small;
        copy = (struct copy){COPY_DEVICE, copy.bytes + sizes[i]};
    }
    return copy;
}

/* The extent is in elements of the array or in bytes, and each element counts as one byte. Larger
 * elements are underestimated until their duration is learned. */
struct copy copy_batch_3d(const CUDA_MEMCPY3D_BATCH_OP *ops, size_t count)
{
    struct copy copy = {COPY_DEVICE, 0};

    if (!ops || !pages_slot())
        return copy_nothing;
    for (size_t i = 0; i < count; i++) {
        const CUmemcpy3DOperand *ends[] = {&ops[i].dst, &ops[i].src};
        bool host = false;

        for (unsigned end = 0; end < 2; end++)
            host = host || (ends[end]->type == CU_MEMCPY_OPERAND_TYPE_POINTER &&
                            !copy_on_device(ends[end]->op.ptr.ptr));
        if (!host)
            copy.bytes += account_product(
                account_product(ops[i].extent.width, ops[i].extent.height), ops[i].extent.depth);
    }
    return copy;
}

/* A logical endpoint is memory on a GPU, here or elsewhere in the fabric. */
struct copy copy_fabric(const CUDA_FABRIC_COPY_BATCH_OP *ops, size_t count)
{
    struct copy copy = {COPY_DEVICE, 0};

    if (!ops || !pages_slot())
        return copy_nothing;
    for (size_t i = 0; i < count; i++) {
        const CUfabricCpyOperand *ends[] = {&ops[i].dst, &ops[i].src};
        bool host = false;

        for (unsigned end = 0; end < 2; end++)
            host = host || (ends[end]->type == CU_FABRIC_COPY_OPERAND_TYPE_POINTER &&
                            !copy_on_device(ends[end]->op.ptr.ptr));
        if (!host && __builtin_add_overflow(copy.bytes, ops[i].size, &copy.bytes))
            copy.bytes = UINT64_MAX;
    }
    return copy;
}

struct copy copy_host_batch(const size_t *sizes, size_t count)
{
    struct copy copy = {COPY_HOST, 0};

    for (size_t i = 0; sizes && i < count; i++)
        copy.bytes += sizes[i];
    return copy;
}

struct copy copy_decompress(const CUmemDecompressParams *params, size_t count)
{
    struct copy copy = {COPY_DEVICE, 0};

    for (size_t i = 0; params && i < count; i++)
        copy.bytes += params[i].dstNumBytes;
    return copy;
}
