/*
 * Entry points: arrays
 *
 * The size of an array was measured on an H200: rows are rounded up to a multiple of 64 bytes, and
 * their number to a multiple of 8. The number of planes, unless they are layers or faces of a cube,
 * is rounded up to a multiple of 16, or, below 16, to a power of two. The result is charged like
 * any other allocation. The elements are stored row by row.
 */
#include "driver.h"

#include <string.h>

#define LEVELS 32

struct mipmapped {
    struct object object;
    struct context *context;
    uint64_t context_serial;
    CUDA_ARRAY3D_DESCRIPTOR shape;
    uintptr_t base;
    unsigned int n_levels;
    struct array *levels[LEVELS]; /* created on first use */
};

static struct pool arrays_pool = POOL(array, 0x41525230);
static struct pool mipmapped_pool = POOL(mipmapped, 0x4d495030);

/** array_valid() - whether the array and its context exist */
bool array_valid(const struct array *array)
{
    return pool_owns(&arrays_pool, array) && context_valid(array->context) &&
           array->context->serial == array->context_serial;
}

static size_t element_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
    size_t channel;

    if (shape->NumChannels != 1 && shape->NumChannels != 2 && shape->NumChannels != 4)
        return 0;
    switch (shape->Format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        channel = 1;
        break;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
        channel = 2;
        break;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
        channel = 4;
        break;
    default:
        return 0;
    }
    return channel * shape->NumChannels;
}

static CUresult shape_check(const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
    const size_t most = 1u << 19; /* per dimension: the size in bytes fits in 64 bits */

    if (!shape || !shape->Width || !element_bytes(shape) || shape->Width > most ||
        shape->Height > most || shape->Depth > most)
        return CUDA_ERROR_INVALID_VALUE;
    if (shape->Depth && !shape->Height && !(shape->Flags & CUDA_ARRAY3D_LAYERED))
        return CUDA_ERROR_INVALID_VALUE;
    if (shape->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING))
        return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

static size_t up_to(size_t n, size_t unit)
{
    return (n + unit - 1) / unit * unit;
}

static size_t taken(const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
    size_t row = up_to(shape->Width * element_bytes(shape), 64);
    size_t rows = shape->Height ? up_to(shape->Height, 8) : 1;
    size_t planes = shape->Depth ? shape->Depth : 1;
    size_t unit = 1;

    while (unit < planes && unit < 16)
        unit *= 2;
    if (!(shape->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)))
        planes = up_to(planes, unit);
    return row * rows * planes;
}

static struct array *array_new(struct context *context, const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
    struct array *array = pool_take(&arrays_pool);

    if (!array)
        return NULL;
    array->context = context;
    array->context_serial = context->serial;
    array->shape = *shape;
    array->pitch = shape->Width * element_bytes(shape);
    array->rows = shape->Height ? shape->Height : 1;
    array->planes = shape->Depth ? shape->Depth : 1;
    return array;
}

ENTRY(cuArray3DCreate_v2, CUarray *arrayp, const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
    struct context *context;
    struct array *array;
    CUresult r = driver_enter_context(&context);

    if (r)
        return r;
    r = arrayp ? shape_check(shape) : CUDA_ERROR_INVALID_VALUE;
    if (!r)
        r = capture_check_unsafe();
    if (r)
        return driver_leave(r);
    array = array_new(context, shape);
    if (!array)
        return driver_leave(CUDA_ERROR_OUT_OF_MEMORY);
    r = memory_allocate(context, ALLOCATION_HIDDEN, taken(shape), &array->base);
    if (r)
        pool_give(&arrays_pool, array);
    else
        *arrayp = array;
    return driver_leave(r);
}

ENTRY(cuArrayCreate_v2, CUarray *arrayp, const CUDA_ARRAY_DESCRIPTOR *shape)
{
    CUDA_ARRAY3D_DESCRIPTOR full;

    if (!shape)
        return CUDA_ERROR_INVALID_VALUE;
    full = (CUDA_ARRAY3D_DESCRIPTOR){.Width = shape->Width,
                                     .Height = shape->Height,
                                     .Format = shape->Format,
                                     .NumChannels = shape->NumChannels};
    return cuArray3DCreate_v2(arrayp, &full);
}

ENTRY(cuArrayDestroy, CUarray array)
{
    struct context *context;
    uintptr_t base;
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!array_valid(array))
        return driver_leave(CUDA_ERROR_INVALID_HANDLE);
    if (array->level) /* it is destroyed with the array of which it is a level */
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    r = capture_check_unsafe();
    if (r)
        return driver_leave(r);
    context = array->context;
    base = array->base;
    pool_give(&arrays_pool, array);
    r = context_wait(context, context_tail(context));
    return driver_leave(r ? r : memory_release(base));
}

ENTRY(cuArray3DGetDescriptor_v2, CUDA_ARRAY3D_DESCRIPTOR *shape, CUarray array)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!shape)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    if (!array_valid(array))
        return driver_leave(CUDA_ERROR_INVALID_HANDLE);
    *shape = array->shape;
    return driver_leave(CUDA_SUCCESS);
}

ENTRY(cuArrayGetDescriptor_v2, CUDA_ARRAY_DESCRIPTOR *shape, CUarray array)
{
    CUDA_ARRAY3D_DESCRIPTOR full;
    CUresult r;

    if (!shape)
        return CUDA_ERROR_INVALID_VALUE;
    r = cuArray3DGetDescriptor_v2(&full, array);
    if (!r)
        *shape = (CUDA_ARRAY_DESCRIPTOR){.Width = full.Width,
                                         .Height = full.Height,
                                         .Format = full.Format,
                                         .NumChannels = full.NumChannels};
    return r;
}

static size_t half(size_t n, unsigned int times)
{
    return n && !(n >> times) ? 1 : n >> times;
}

static CUDA_ARRAY3D_DESCRIPTOR level_shape(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned int level)
{
    CUDA_ARRAY3D_DESCRIPTOR descriptor = *shape;

    descriptor.Width = half(shape->Width, level);
    descriptor.Height = half(shape->Height, level);
    if (!(shape->Flags & CUDA_ARRAY3D_LAYERED))
        descriptor.Depth = half(shape->Depth, level);
    return descriptor;
}

/* The offset of a level. If `level` is the number of levels, this is the size of all of them. */
static size_t level_offset(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned int level)
{
    size_t offset = 0;

    for (unsigned int i = 0; i < level; i++) {
        CUDA_ARRAY3D_DESCRIPTOR descriptor = level_shape(shape, i);

        offset += taken(&descriptor);
    }
    return offset;
}

static bool mipmapped_valid(const struct mipmapped *array)
{
    return pool_owns(&mipmapped_pool, array) && context_valid(array->context) &&
           array->context->serial == array->context_serial;
}

ENTRY(cuMipmappedArrayCreate, CUmipmappedArray *arrayp, const CUDA_ARRAY3D_DESCRIPTOR *shape,
      unsigned int n_levels)
{
    struct mipmapped *array;
    struct context *context;
    unsigned int most = 1;
    CUresult r = driver_enter_context(&context);

    if (r)
        return r;
    r = arrayp ? shape_check(shape) : CUDA_ERROR_INVALID_VALUE;
    if (!r)
        r = capture_check_unsafe();
    if (r)
        return driver_leave(r);
    while (shape->Width >> most || shape->Height >> most || shape->Depth >> most)
        most++;
    array = pool_take(&mipmapped_pool);
    if (!array)
        return driver_leave(CUDA_ERROR_OUT_OF_MEMORY);
    array->context = context;
    array->context_serial = context->serial;
    array->shape = *shape;
    array->n_levels = n_levels > most ? most : n_levels ? n_levels : 1;
    r = memory_allocate(context, ALLOCATION_HIDDEN, level_offset(shape, array->n_levels),
                        &array->base);
    if (r)
        pool_give(&mipmapped_pool, array);
    else
        *arrayp = array;
    return driver_leave(r);
}

ENTRY(cuMipmappedArrayGetLevel, CUarray *levelp, CUmipmappedArray array, unsigned int level)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!mipmapped_valid(array))
        return driver_leave(CUDA_ERROR_INVALID_HANDLE);
    if (!levelp || level >= array->n_levels)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    if (!array->levels[level]) {
        CUDA_ARRAY3D_DESCRIPTOR descriptor = level_shape(&array->shape, level);
        struct array *made = array_new(array->context, &descriptor);

        if (!made)
            return driver_leave(CUDA_ERROR_OUT_OF_MEMORY);
        made->level = true;
        made->base = array->base + level_offset(&array->shape, level);
        array->levels[level] = made;
    }
    *levelp = array->levels[level];
    return driver_leave(CUDA_SUCCESS);
}

ENTRY(cuMipmappedArrayDestroy, CUmipmappedArray array)
{
    struct context *context;
    uintptr_t base;
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!mipmapped_valid(array))
        return driver_leave(CUDA_ERROR_INVALID_HANDLE);
    r = capture_check_unsafe();
    if (r)
        return driver_leave(r);
    context = array->context;
    base = array->base;
    for (unsigned int i = 0; i < array->n_levels; i++) {
        if (array->levels[i])
            pool_give(&arrays_pool, array->levels[i]);
    }
    pool_give(&mipmapped_pool, array);
    r = context_wait(context, context_tail(context));
    return driver_leave(r ? r : memory_release(base));
}
