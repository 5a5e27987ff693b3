/*
 * Answers queries about the addresses of blocks that may be parked; see parking.h.
 *
 * To the application, such a block is memory from cuMemAlloc; to the driver, it is a mapping of a
 * physical allocation. The driver's answers about it differ in a few attributes from those about
 * memory from cuMemAlloc, and change when the memory is parked and moved back.
 */
#include "parking.h"

#define CU_POINTER_ATTRIBUTE_CONTEXT                    1
#define CU_POINTER_ATTRIBUTE_SYNC_MEMOPS                6
#define CU_POINTER_ATTRIBUTE_BUFFER_ID                  7
#define CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE 10
#define CU_POINTER_ATTRIBUTE_RANGE_START_ADDR           11
#define CU_POINTER_ATTRIBUTE_RANGE_SIZE                 12
#define CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES       14
#define CU_POINTER_ATTRIBUTE_MAPPING_SIZE               18
#define CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR          19

/* Replaces the driver's answer about an attribute if it would be different for memory from
 * cuMemAlloc. */
static void correct(void *data, CUpointer_attribute attribute, const struct parking_block *block)
{
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)data = block->ctx;
        break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: /* identifies the block for its whole life */
        if (block->buffer)
            *(unsigned long long *)data = block->buffer;
        else
            parking_note_buffer(block->base, *(unsigned long long *)data);
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
        *(CUdeviceptr *)data = block->base;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
        *(size_t *)data = block->bytes;
        break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: /* the driver stored a 0 of any width */
        *(char *)data = !parking_is_import(block);
        break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: /* the driver stored a 1 of any width */
        *(char *)data = 0;
        break;
    default:
        break;
    }
}

static bool find(CUdeviceptr address, struct parking_block *found)
{
    return parking_applies() && parking_find(address, found);
}

CONTROL_EXPORT CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute,
                                              CUdeviceptr ptr)
{
    struct parking_block block;
    CUresult result;

    if (!find(ptr, &block))
        return real->cuPointerGetAttribute(data, attribute, ptr);
    parking_enter(PARKING_MEMORY);
    result = real->cuPointerGetAttribute(data, attribute, ptr);
    parking_leave();
    if (result == CUDA_SUCCESS)
        correct(data, attribute, &block);
    return result;
}

CONTROL_EXPORT CUresult cuPointerGetAttributes(unsigned int numAttributes,
                                               CUpointer_attribute *attributes, void **data,
                                               CUdeviceptr ptr)
{
    struct parking_block block;
    CUresult result;

    if (!find(ptr, &block))
        return real->cuPointerGetAttributes(numAttributes, attributes, data, ptr);
    parking_enter(PARKING_MEMORY);
    result = real->cuPointerGetAttributes(numAttributes, attributes, data, ptr);
    parking_leave();
    for (unsigned int i = 0; result == CUDA_SUCCESS && i < numAttributes; i++)
        correct(data[i], attributes[i], &block);
    return result;
}

/* ---- copies that have ended when the call returns ---- */

uint32_t parking_copies_end;

/* A synchronisation would invalidate a capture. */
void parking_await_copy(CUstream stream, CUresult *resultp)
{
    if (*resultp != CUDA_SUCCESS || !parking_sync_begin())
        return;
    *resultp = driver->cuStreamSynchronize(stream);
    parking_sync_end();
}

/* The driver supports this attribute only for memory from cuMemAlloc. It is set for memory that
 * other devices access, so the block has to stay where it is. From then on, every call that copies
 * without a stream waits for the copy. */
CONTROL_EXPORT CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute,
                                              CUdeviceptr ptr)
{
    struct parking_block block;

    if (!find(ptr, &block) || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS || !value)
        return real->cuPointerSetAttribute(value, attribute, ptr);
    if (!*(const unsigned int *)value)
        return CUDA_SUCCESS;
    parking_enter(PARKING_MEMORY);
    parking_fix(block.base);
    atomic_store_relaxed(&parking_copies_end, 1);
    parking_leave();
    parking_publish();
    return CUDA_SUCCESS;
}

CONTROL_EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)
{
    struct parking_block block;

    if (!find(dptr, &block))
        return real->cuMemGetAddressRange_v2(pbase, psize, dptr);
    if (pbase)
        *pbase = block.base;
    if (psize)
        *psize = block.bytes;
    return CUDA_SUCCESS;
}

/* The descriptor lets devices other than the GPU access the memory, so it has to stay where it
 * is. */
CONTROL_EXPORT CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr dptr, size_t size,
                                                      CUmemRangeHandleType handleType,
                                                      unsigned long long flags)
{
    struct parking_block block;
    CUresult result;

    if (!find(dptr, &block))
        return real->cuMemGetHandleForAddressRange(handle, dptr, size, handleType, flags);
    parking_enter(PARKING_MEMORY);
    result = real->cuMemGetHandleForAddressRange(handle, dptr, size, handleType, flags);
    if (result == CUDA_SUCCESS)
        parking_fix(block.base);
    parking_leave();
    parking_publish();
    return result;
}
