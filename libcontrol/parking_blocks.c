/*
 * The blocks that can be moved: allocations of at least 1 MiB that cuMemAlloc and cuMemAllocPitch
 * return in a container whose memory may be parked.
 *
 * To the application such a block is like any other from cuMemAlloc. Where the driver would
 * distinguish the two, the library answers in its place (pointers.c). A block that is requested
 * while a stream is capturing is allocated by the driver's cuMemAlloc and cannot be moved, because
 * the driver then allows or refuses the call according to the capture's mode.
 */
#include "parking.h"

#include "contexts.h"

#define BLOCKS_ROOM_NS (5 * NS_PER_S) /* longest wait for other containers or threads */
#define BLOCKS_NAP_NS  (500 * NS_PER_US)

/* ---- physical memory ---- */

CUresult parking_map_handle(const struct parking_block *block, CUmemGenericAllocationHandle handle)
{
    CUmemAccessDesc access = {.location = {CU_MEM_LOCATION_TYPE_DEVICE, pages_device(0)},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUresult result = real->cuMemMap(block->base, block->size, 0, handle, 0);

    if (result != CUDA_SUCCESS)
        return result;
    result = driver->cuMemSetAccess(block->base, block->size, &access, 1);
    if (result != CUDA_SUCCESS)
        real->cuMemUnmap(block->base, block->size);
    return result;
}

/* The allocation can be exported, because the application may share any block through CUDA IPC. */
CUresult parking_map(struct parking_block *block)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, pages_device(0)}};
    CUmemGenericAllocationHandle handle;
    CUresult result = real->cuMemCreate(&handle, block->size, &prop, 0);

    if (result != CUDA_SUCCESS)
        return result;
    result = parking_map_handle(block, handle);
    if (result == CUDA_SUCCESS)
        block->handle = handle;
    else
        real->cuMemRelease(handle);
    return result;
}

void parking_unmap(struct parking_block *block)
{
    real->cuMemUnmap(block->base, block->size);
    real->cuMemRelease(block->handle);
    block->handle = 0;
}

/* ---- allocation ---- */

/* The memory is part of the container's quota, which is reserved on the GPU while the container is
 * resident. If the driver is out of memory, another container is therefore about to leave. */
static CUresult map_patiently(struct parking_block *block)
{
    uint64_t ends = os_now() + BLOCKS_ROOM_NS;
    CUresult result;

    while ((result = parking_map(block)) == CUDA_ERROR_OUT_OF_MEMORY && os_now() < ends)
        os_sleep(BLOCKS_NAP_NS);
    return result;
}

/* Returns false if the driver has to allocate the block. */
static bool block_make(struct parking_block *block, size_t bytes)
{
    CUdeviceptr base;

    *block = (struct parking_block){
        .size = account_round(bytes, ACCOUNT_UNIT), .bytes = bytes, .owner = contexts_owner()};
    if (driver->cuCtxGetCurrent(&block->ctx) != CUDA_SUCCESS || !block->ctx ||
        driver->cuMemAddressReserve(&base, block->size, 0, 0, 0) != CUDA_SUCCESS)
        return false;
    block->base = base;
    if (map_patiently(block) == CUDA_SUCCESS) {
        if (parking_table_add(block))
            return true;
        parking_unmap(block);
    }
    driver->cuMemAddressFree(base, block->size);
    return false;
}

CUresult parking_allocate(CUdeviceptr *addressp, size_t bytes)
{
    struct parking_block block;
    CUresult result = CUDA_SUCCESS;

    parking_enter(PARKING_MEMORY);
    parking_reap(false);
    if (addressp && bytes >= ACCOUNT_SMALL && !gate_captures() && pages_index_current() == 0 &&
        block_make(&block, bytes)) {
        *addressp = block.base;
        parking_publish();
    } else {
        result = real->cuMemAlloc_v2(addressp, bytes);
    }
    parking_leave();
    return result;
}

/* Rows are aligned to 512 bytes, as with the driver on every GPU since Kepler. */
CUresult parking_allocate_pitch(CUdeviceptr *addressp, size_t *pitchp, size_t width, size_t height,
                                unsigned int element)
{
    uint64_t bytes = account_pitch(width, height);
    CUresult result;

    if (!addressp || !pitchp || bytes < ACCOUNT_SMALL || bytes == UINT64_MAX ||
        (element != 4 && element != 8 && element != 16))
        return real->cuMemAllocPitch_v2(addressp, pitchp, width, height, element);
    result = parking_allocate(addressp, bytes);
    if (result == CUDA_SUCCESS)
        *pitchp = account_round(width, 512);
    return result;
}

/* ---- the end of a block ---- */

/* Whether an open descriptor keeps the memory of a released block allocated. The memory is then
 * charged until the descriptor is closed. */
static bool lives_on(const struct parking_block *block, uint64_t handle)
{
    return block->exported &&
           exports_outlive(&(struct block){.key = handle, .size = block->size, .device = 0});
}

/* A block that ends while it is parked is charged as resident again, because the caller gives back
 * the charge of a resident block. */
static void block_end(struct parking_block *block)
{
    uint64_t handle = block->handle;

    if (handle) {
        parking_unmap(block);
        if (lives_on(block, handle))
            account_add(0, block->size, false);
    } else {
        account_add(0, block->size, false);
        account_give(0, block->size, true);
    }
    driver->cuMemAddressFree(block->base, block->size);
    parking_publish();
}

/* ---- synchronisation ---- */

bool parking_sync_begin(void)
{
    atomic_add_seq_cst(&parking_n_syncs, 1);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!gate_captures())
        return true;
    atomic_sub_seq_cst(&parking_n_syncs, 1);
    return false;
}

void parking_sync_end(void)
{
    atomic_sub_seq_cst(&parking_n_syncs, 1);
}

/* A block of a green context belongs to the primary context, and outlives the green one. A
 * synchronisation of the primary context includes its green contexts. */
CUcontext parking_context(const struct parking_block *block)
{
    CUcontext primary = atomic_load_acquire(&primaries[0].handle);

    return block->owner == OWNER_PRIMARY && primary ? primary : block->ctx;
}

static CUresult synchronize(CUcontext ctx)
{
    CUcontext current = NULL;
    CUresult result;

    driver->cuCtxGetCurrent(&current);
    if (current == ctx)
        return driver->cuCtxSynchronize();
    result = driver->cuCtxPushCurrent(ctx);
    if (result != CUDA_SUCCESS)
        return result;
    result = driver->cuCtxSynchronize();
    driver->cuCtxPopCurrent(&current);
    return result;
}

/* ---- blocks whose memory is released later ---- */

/* Marks a block as freed. It stays charged until its memory is released, so the charge that the
 * caller gives back is added once more. */
static bool free_later(uint64_t address)
{
    bool found = parking_table_free(address);

    parking_publish();
    return found;
}

static void release(struct parking_block *block)
{
    uint64_t handle = block->handle;
    bool parked = !handle;

    if (parking_is_import(block)) { /* charged where it was opened; see memory.c */
        parking_unmap(block);
        driver->cuMemAddressFree(block->base, block->size);
        if (block->charged)
            account_give(0, block->size, true);
        return;
    }
    account_moves(0, block->size, parked);
    if (!parked)
        parking_unmap(block);
    driver->cuMemAddressFree(block->base, block->size);
    if (!lives_on(block, handle))
        account_give(0, block->size, parked);
    account_landed(0, block->size, parked);
}

bool parking_reap(bool idle)
{
    struct parking_block block = {.base = 0};
    bool any = false;
    uint64_t ends;

    if (!parking_table_has_freed())
        return false;
    parking_enter(PARKING_STILL);
    ends = os_now() + BLOCKS_ROOM_NS;
    /* A context that another thread is ending must not be used. */
    while (!idle && !parking_trylock_contexts()) {
        if (os_now() >= ends) {
            parking_leave();
            return false;
        }
        os_sleep(BLOCKS_NAP_NS);
    }
    while (parking_table_next_freed(&block)) {
        bool done = idle;

        if (!idle && parking_sync_begin()) {
            done = synchronize(parking_context(&block)) == CUDA_SUCCESS;
            parking_sync_end();
        }
        if (!done || !parking_table_take(&block))
            continue;
        release(&block);
        any = true;
    }
    if (!idle)
        parking_unlock_contexts();
    parking_leave();
    return any;
}

/* ---- cuMemFree ---- */

/*
 * Like the driver's cuMemFree, this waits for the work that may use the block. While a stream is
 * capturing, that would invalidate the capture, so the memory is released later. Returns false if
 * the block is not in the table; the driver then has to free it.
 */
bool parking_free(CUdeviceptr address, CUresult *resultp)
{
    struct parking_block block;
    bool found;

    if (!parking_applies() || !address || !parking_find(address, &block) || block.base != address ||
        parking_is_import(&block))
        return false;
    parking_enter(PARKING_STILL);
    *resultp = CUDA_SUCCESS;
    /* No work uses a parked block. */
    if (parking_now() != PARKING_PARKED) {
        if (!parking_sync_begin()) {
            found = free_later(address);
            parking_leave();
            return found;
        }
        *resultp = synchronize(parking_context(&block));
        parking_sync_end();
    }
    found = *resultp != CUDA_SUCCESS || parking_table_take(&block);
    if (found && *resultp == CUDA_SUCCESS)
        block_end(&block);
    parking_leave();
    return found;
}

/* The memory is released later, when no work can use it any more. */
bool parking_free_async(CUdeviceptr address, CUstream stream, CUresult *resultp)
{
    struct parking_block block;
    bool found;

    (void)stream;
    if (!parking_applies() || !parking_find(address, &block) || block.base != address ||
        parking_is_import(&block))
        return false;
    *resultp = CUDA_SUCCESS;
    parking_enter(PARKING_STILL);
    found = free_later(address);
    parking_leave();
    return found;
}

/* Like the driver, this waits for the work of the context once the last use has ended. While a
 * stream is capturing, the mapping ends later. */
bool parking_close_import(CUdeviceptr address, CUresult *resultp)
{
    struct parking_block block;
    bool still = parking_sync_begin();
    bool found = parking_unuse(address, !still, &block);
    bool ends = found && still && !block.n_opened;

    if (found)
        *resultp = CUDA_SUCCESS;
    if (ends)
        synchronize(parking_context(&block));
    if (still)
        parking_sync_end();
    if (ends && parking_table_take(&block))
        release(&block);
    return found;
}

/* A context has ended, and with it the blocks that were allocated in it. The caller has called
 * parking_enter(). */
void parking_context_gone(uint8_t owner)
{
    struct parking_block block;

    if (!parking_applies() || owner == OWNER_NONE)
        return;
    while (parking_table_take_owned(owner, &block)) {
        if (block.freed || parking_is_import(&block))
            release(&block);
        else
            block_end(&block);
    }
}
