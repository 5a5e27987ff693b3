/*
 * Charges physical allocations (cuMemCreate) until their last reference and mapping end.
 *
 * An allocation lives as long as a reference to its handle (from its creation or from
 * cuMemRetainAllocationHandle) or a mapping of it. The driver does not reuse a handle that still
 * has a mapping, so the handle identifies the allocation throughout. A mapping is always of a whole
 * allocation; one call may unmap several. An imported allocation is another process's memory. It is
 * charged when its first mapping shows its size.
 */
#include "bindings.h"
#include "parking.h"

int account_location(const CUmemLocation *location)
{
    return pages_index_of(account_ordinal(location));
}

/* Whether an address is in a block that the library has mapped. To the driver that is a mapping by
 * the application, but to the application it is memory from cuMemAlloc. */
static bool is_ours(CUdeviceptr address)
{
    struct parking_block block;

    return parking_applies() && parking_find(address, &block);
}

static void unlock_handle(CUmemGenericAllocationHandle handle)
{
    blocks_unlock(BLOCK_HANDLE, handle);
}

CONTROL_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                                    const CUmemAllocationProp *prop, unsigned long long flags)
{
    int device = prop ? account_location(&prop->location) : -1;
    struct block block = {.size = account_round(size, ACCOUNT_UNIT),
                          .count = 1,
                          .kind = BLOCK_HANDLE,
                          .device = (int8_t)device,
                          .owner = OWNER_NONE};
    struct block stale = {.device = -1};
    struct block *found;
    CUresult result;

    if (device < 0)
        return real->cuMemCreate(handle, size, prop, flags);
    parking_begin();
    if (!account_claim(device, block.size, false)) {
        parking_end();
        return account_refuse(device);
    }
    result = real->cuMemCreate(handle, size, prop, flags);
    if (result != CUDA_SUCCESS)
        account_give(device, block.size, false);
    account_landed(device, block.size, false);
    parking_end();
    if (result != CUDA_SUCCESS)
        return result;
    block.key = *handle;
    found = blocks_lock(BLOCK_HANDLE, block.key);
    if (unlikely(found)) {
        stale = *found;
        blocks_remove(found);
    }
    blocks_add(&block);
    unlock_handle(block.key);
    if (unlikely(stale.device >= 0))
        account_give(stale.device, stale.size, stale.flags & BLOCK_UNSEEN);
    else
        atomic_add_relaxed(&pages_ledger_device((unsigned)device)->blocks, 1);
    account_note_peak(device);
    return result;
}

/* Notes that the call that releases an allocation is under way, or no longer is. */
static void handle_moves(const struct block *gone, bool moves)
{
    if (!gone->key || gone->device < 0)
        return;
    if (moves)
        account_moves(gone->device, gone->size, gone->flags & BLOCK_UNSEEN);
    else
        account_landed(gone->device, gone->size, gone->flags & BLOCK_UNSEEN);
}

/* Removes a reference or a mapping and, if neither is left, also removes the allocation from the
 * table. */
static bool handle_leave(CUmemGenericAllocationHandle handle, bool mapping, struct block *gone)
{
    struct block *block = blocks_lock(BLOCK_HANDLE, handle);
    bool known = block && (mapping ? block->value : block->count);

    gone->key = 0;
    if (known) {
        if (mapping)
            block->value--;
        else
            block->count--;
        if (!block->count && !block->value) {
            *gone = *block;
            handle_moves(gone, true);
            blocks_remove(block);
        }
    }
    unlock_handle(handle);
    return known;
}

/* Undoes handle_leave(), because the driver did not release the allocation. */
static void handle_return(CUmemGenericAllocationHandle handle, bool mapping, struct block *gone)
{
    struct block *block = blocks_lock(BLOCK_HANDLE, handle);

    handle_moves(gone, false);
    if (!block && gone->key) {
        blocks_add(gone);
        block = blocks_peer(BLOCK_HANDLE, handle);
    }
    if (block && mapping)
        block->value++;
    else if (block)
        block->count++;
    unlock_handle(handle);
}

static void handle_refund(const struct block *gone)
{
    uint64_t bound;

    /* An exported object may live on in another process. Memory that is bound to it stays allocated
     * until it is unbound. */
    if (gone->key && gone->flags & BLOCK_OBJECT && !(gone->flags & BLOCK_EXPORTED))
        while ((bound = binding_take_any((struct binding_range){.object = gone->key})))
            vmm_let_go(bound);
    if (!gone->key || gone->device < 0 || !gone->size)
        return;
    if (unlikely(gone->flags & BLOCK_EXPORTED) && exports_outlive(gone)) {
        handle_moves(gone, false);
        return;
    }
    account_give(gone->device, gone->size, gone->flags & BLOCK_UNSEEN);
    handle_moves(gone, false);
    atomic_add_relaxed(&pages_ledger_device((unsigned)gone->device)->blocks, -1ull);
}

bool vmm_keep(uint64_t handle)
{
    struct block *block = blocks_lock(BLOCK_HANDLE, handle);
    bool known = block;

    if (block)
        block->value++;
    unlock_handle(handle);
    return known;
}

void vmm_let_go(uint64_t handle)
{
    struct block gone;

    handle_leave(handle, true, &gone);
    handle_refund(&gone);
}

/* A multicast object has references and mappings like an allocation, but no size. */
void vmm_note_object(uint64_t handle)
{
    struct block *block = blocks_lock(BLOCK_HANDLE, handle);

    if (block)
        block->count++;
    else
        blocks_add(&(struct block){.key = handle,
                                   .count = 1,
                                   .kind = BLOCK_HANDLE,
                                   .device = -1,
                                   .flags = BLOCK_OBJECT,
                                   .owner = OWNER_NONE});
    unlock_handle(handle);
}

CONTROL_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    struct block gone;
    bool known = handle_leave(handle, false, &gone);
    CUresult result = real->cuMemRelease(handle);

    if (result == CUDA_SUCCESS)
        handle_refund(&gone);
    else if (known)
        handle_return(handle, false, &gone);
    return result;
}

CONTROL_EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle,
                                                    void *addr)
{
    CUresult result;

    if (is_ours((uintptr_t)addr))
        return CUDA_ERROR_INVALID_VALUE;
    result = real->cuMemRetainAllocationHandle(handle, addr);
    if (result == CUDA_SUCCESS) {
        struct block *block = blocks_lock(BLOCK_HANDLE, *handle);

        if (block)
            block->count++;
        unlock_handle(*handle);
    }
    return result;
}

CONTROL_EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle,
                                                       void *osHandle,
                                                       CUmemAllocationHandleType shHandleType)
{
    CUresult result = real->cuMemImportFromShareableHandle(handle, osHandle, shHandleType);
    struct block block = {
        .count = 1, .kind = BLOCK_HANDLE, .device = -1, .flags = BLOCK_UNSEEN, .owner = OWNER_NONE};
    CUmemAllocationProp prop;
    struct block *found;

    if (result != CUDA_SUCCESS || !pages_slot())
        return result;
    /* A handle without properties is not memory but a multicast object. */
    if (driver->cuMemGetAllocationPropertiesFromHandle(&prop, *handle) != CUDA_SUCCESS) {
        vmm_note_object(*handle);
        return result;
    }
    block.device = (int8_t)account_location(&prop.location);
    block.key = *handle;
    found = blocks_lock(BLOCK_HANDLE, block.key);
    if (found)
        found->count++;
    else if (block.device >= 0)
        blocks_add(&block);
    unlock_handle(block.key);
    return result;
}

/* Counts the mapping before the driver makes it, so that a release in the meantime does not end the
 * charge. An import is charged when it is mapped for the first time. */
static CUresult map_enter(CUmemGenericAllocationHandle handle, size_t size, bool *knownp)
{
    struct block *block = blocks_lock(BLOCK_HANDLE, handle);
    struct block first = {0};
    bool is_first;

    *knownp = block;
    if (block) {
        block->value++;
        if (!block->size && !(block->flags & BLOCK_OBJECT))
            first = *block;
    }
    unlock_handle(handle);
    if (!first.key)
        return CUDA_SUCCESS;
    if (!account_claim(first.device, size, true)) {
        handle_leave(handle, true, &first);
        return account_refuse(first.device);
    }
    block = blocks_lock(BLOCK_HANDLE, handle);
    is_first = block && !block->size;
    if (is_first)
        block->size = size;
    unlock_handle(handle);
    if (!is_first) {
        account_give(first.device, size, true); /* another thread was faster */
    } else {
        atomic_add_relaxed(&pages_ledger_device((unsigned)first.device)->blocks, 1);
        account_note_peak(first.device);
    }
    return CUDA_SUCCESS;
}

/* Undoes map_enter(). An import that is no longer mapped loses its size again, because the size of
 * the failed mapping may have been wrong. */
static void map_fails(CUmemGenericAllocationHandle handle)
{
    struct block gone = {0};
    struct block *block;

    handle_leave(handle, true, &gone);
    if (!gone.key) {
        block = blocks_lock(BLOCK_HANDLE, handle);
        if (block && !block->value && block->flags & BLOCK_UNSEEN && block->size) {
            gone = *block;
            block->size = 0;
        }
        unlock_handle(handle);
    }
    handle_refund(&gone);
}

CONTROL_EXPORT CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset,
                                 CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    struct block mapping = {.key = ptr,
                            .size = size,
                            .value = handle,
                            .kind = BLOCK_MAPPING,
                            .device = -1,
                            .owner = OWNER_NONE};
    CUresult result;
    bool known;

    if (is_ours(ptr))
        return CUDA_ERROR_INVALID_VALUE;
    result = map_enter(handle, size, &known);
    if (result != CUDA_SUCCESS)
        return result;
    result = real->cuMemMap(ptr, size, offset, handle, flags);
    if (result != CUDA_SUCCESS) {
        if (known)
            map_fails(handle);
        return result;
    }
    if (!pages_slot())
        return result;
    if (!blocks_lock(BLOCK_MAPPING, ptr))
        blocks_add(&mapping);
    blocks_unlock(BLOCK_MAPPING, ptr);
    return result;
}

/*
 * Walks over the mappings in a range to perform one of three steps. LEAVE comes before the call
 * into the driver, because as soon as the driver has unmapped the last mapping of an allocation,
 * another allocation may get the handle. What has to be refunded is noted in the mappings
 * themselves, because their number is not bounded. END comes after the call, and UNDO after a call
 * that failed.
 */
enum unmap_step { UNMAP_LEAVE, UNMAP_END, UNMAP_UNDO };

#define UNMAP_LEFT 1 /* in `count`: the mapping was taken off its handle */
#define UNMAP_LAST 2 /* and it was the last that kept the allocation alive */

/* Returns this thread's mark: two threads may unmap a range at the same time, and the driver then
 * rejects one of the calls. */
static uint32_t unmap_left(void)
{
    static __thread char here;

    return UNMAP_LEFT | (uint32_t)((uintptr_t)&here >> 6) << 2;
}

static void unmap_one(CUdeviceptr at, struct block mapping, enum unmap_step step)
{
    struct block gone = {0};
    struct block *block;

    if (step == UNMAP_LEAVE) {
        bool first;

        block = blocks_lock(BLOCK_MAPPING, at);
        first = block && !block->count;
        if (first)
            block->count = unmap_left();
        blocks_unlock(BLOCK_MAPPING, at);
        if (!first)
            return;
        handle_leave(mapping.value, true, &gone);
        block = blocks_lock(BLOCK_MAPPING, at);
        if (block) {
            if (gone.key) {
                block->count |= UNMAP_LAST;
                if (gone.size) /* mappings are of whole allocations; an object has no size */
                    block->size = gone.size;
                block->device = gone.device;
                block->flags = gone.flags;
            }
        }
        blocks_unlock(BLOCK_MAPPING, at);
        return;
    }
    if ((mapping.count & ~(uint32_t)UNMAP_LAST) != unmap_left())
        return;
    if (mapping.count & UNMAP_LAST)
        gone = (struct block){.key = mapping.value,
                              .size = mapping.flags & BLOCK_OBJECT ? 0 : mapping.size,
                              .kind = BLOCK_HANDLE,
                              .device = mapping.device,
                              .flags = mapping.flags,
                              .owner = OWNER_NONE};
    block = blocks_lock(BLOCK_MAPPING, at);
    if (block && step == UNMAP_END)
        blocks_remove(block);
    else if (block)
        block->count = 0;
    blocks_unlock(BLOCK_MAPPING, at);
    if (step == UNMAP_END)
        handle_refund(&gone);
    else
        handle_return(mapping.value, true, &gone);
}

static void unmap_range(CUdeviceptr ptr, size_t size, enum unmap_step step)
{
    CUdeviceptr end = ptr + size;

    while (ptr < end) {
        struct block *block = blocks_lock(BLOCK_MAPPING, ptr);
        struct block mapping = block ? *block : (struct block){0};

        blocks_unlock(BLOCK_MAPPING, ptr);
        if (!mapping.size)
            break; /* nothing is mapped there: the driver rejects the range */
        unmap_one(ptr, mapping, step);
        ptr += mapping.size;
    }
}

CONTROL_EXPORT CUresult cuMemUnmap(CUdeviceptr ptr, size_t size)
{
    CUresult result;

    if (is_ours(ptr))
        return CUDA_ERROR_INVALID_VALUE;
    if (pages_slot())
        unmap_range(ptr, size, UNMAP_LEAVE);
    result = real->cuMemUnmap(ptr, size);
    if (pages_slot())
        unmap_range(ptr, size, result == CUDA_SUCCESS ? UNMAP_END : UNMAP_UNDO);
    return result;
}

/* ---- sparse arrays ---- */

static uint32_t n_sparse;

static uint64_t sparse_key(uint64_t array, uint64_t handle)
{
    return array ^ (handle << 17 | handle >> 47);
}

/* An allocation that is mapped into an array lives until the array is destroyed. */
static void sparse_mapped(const CUarrayMapInfo *info)
{
    struct block entry = {.size = (uintptr_t)info->resource,
                          .value = info->memHandle,
                          .kind = BLOCK_SPARSE,
                          .device = -1,
                          .owner = OWNER_NONE};
    bool known;

    entry.key = sparse_key(entry.size, entry.value);
    known = blocks_lock(BLOCK_SPARSE, entry.key);
    if (!known)
        known = !blocks_add(&entry);
    blocks_unlock(BLOCK_SPARSE, entry.key);
    if (!known) {
        atomic_add_relaxed(&n_sparse, 1);
        struct block *block = blocks_lock(BLOCK_HANDLE, entry.value);

        if (block)
            block->value++;
        unlock_handle(entry.value);
    }
}

static bool sparse_visit(const struct block *block, void *data)
{
    struct block *found = data;

    if (block->kind != BLOCK_SPARSE || block->size != found->size || found->key)
        return false;
    *found = *block;
    return true;
}

void vmm_array_ends(uint64_t array)
{
    struct block found, gone;

    while (unlikely(atomic_load_relaxed(&n_sparse))) {
        found = (struct block){.size = array};
        blocks_sweep(sparse_visit, &found);
        if (!found.key)
            break;
        atomic_add_relaxed(&n_sparse, -1u);
        handle_leave(found.value, true, &gone);
        handle_refund(&gone);
    }
}

static CUresult arrays_mapped(const CUarrayMapInfo *list, unsigned int count, CUresult result)
{
    if (result == CUDA_SUCCESS && pages_slot())
        for (unsigned int i = 0; i < count; i++)
            if (list[i].memOperationType == CU_MEM_OPERATION_TYPE_MAP && list[i].memHandle)
                sparse_mapped(&list[i]);
    return result;
}

CONTROL_EXPORT CUresult cuMemMapArrayAsync(CUarrayMapInfo *mapInfoList, unsigned int count,
                                           CUstream hStream)
{
    copy_note_small();
    return arrays_mapped(mapInfoList, count, real->cuMemMapArrayAsync(mapInfoList, count, hStream));
}

CONTROL_EXPORT CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo *mapInfoList, unsigned int count,
                                                CUstream hStream)
{
    copy_note_small();
    return arrays_mapped(mapInfoList, count,
                         real->cuMemMapArrayAsync_ptsz(mapInfoList, count, hStream));
}

CONTROL_EXPORT CUresult cuMemExportToShareableHandle(void *shareableHandle,
                                                     CUmemGenericAllocationHandle handle,
                                                     CUmemAllocationHandleType handleType,
                                                     unsigned long long flags)
{
    /* If another thread releases the handle in the meantime, its entry in the table remains. */
    bool kept =
        handleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && pages_slot() && vmm_keep(handle);
    CUresult result =
        real->cuMemExportToShareableHandle(shareableHandle, handle, handleType, flags);

    if (kept && result == CUDA_SUCCESS)
        exports_note(handle, *(int *)shareableHandle);
    if (kept)
        vmm_let_go(handle);
    return result;
}
