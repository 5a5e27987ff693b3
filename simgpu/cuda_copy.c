/*
 * Entry points: linear, 2D and 3D copies
 *
 * Every copy is treated as a 3D copy: a linear copy has one plane, which has one row. See
 * copy.h for the copies that take time.
 */
#include "copy.h"

#include <stdlib.h>
#include <string.h>

/* One end of a copy. A device address must lie in this process's device memory. */
struct end {
    void *address;
    bool on_device;
    size_t pitch, plane; /* bytes from one row, or plane, to the next */
};

struct extent {
    size_t n; /* bytes per row */
    size_t rows, planes;
};

/** on_device() - whether this is device or managed memory, rather than host memory */
bool on_device(const void *address)
{
    const struct allocation *item = memory_at((uintptr_t)address);

    return item && item->kind != ALLOCATION_HOST;
}

/*
 * Pageable host memory is read or written before the call returns, as with the real driver. Pinned
 * memory is accessed when the stream reaches the copy.
 */
static bool stage(struct command *command)
{
    size_t total = command_bytes(command);

    command->staged = malloc(total);
    if (!command->staged)
        return false;
    copy_bytes(&(struct command){.to = command->staged,
                                 .from = command->from,
                                 .n = command->n,
                                 .rows = command->rows,
                                 .planes = command->planes,
                                 .to_pitch = command->n,
                                 .to_plane = command->n * command->rows,
                                 .from_pitch = command->from_pitch,
                                 .from_plane = command->from_plane});
    command->from = command->staged;
    command->from_pitch = command->n;
    command->from_plane = command->n * command->rows;
    return true;
}

/* `synchronous`: return when the copy has been made, unless both ends are on the device. */
static CUresult copy(struct end to, struct end from, struct extent extent, CUstream handle,
                     bool synchronous)
{
    struct command command = {.kind = COMMAND_COPY,
                              .to = to.address,
                              .from = from.address,
                              .n = extent.n,
                              .rows = extent.rows,
                              .planes = extent.planes,
                              .to_pitch = to.pitch,
                              .to_plane = to.plane,
                              .from_pitch = from.pitch,
                              .from_plane = from.plane};
    struct stream *stream;
    CUresult r = stream_enter(handle, &stream);

    if (r)
        return r;
    if (command_bytes(&command) == 0)
        return driver_leave(CUDA_SUCCESS);
    command.device_to = memory_find(to.address, command_to_span(&command));
    command.device_from = memory_find(from.address, command_from_span(&command));
    if ((to.on_device && !command.device_to) || (from.on_device && !command.device_from) ||
        !to.address || !from.address)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    if (on_device(to.address) && on_device(from.address) && command_bytes(&command) >= TIMED)
        command.duration = OVERHEAD + command_bytes(&command) / COPY_PER_NS;
    if (to.on_device && from.on_device)
        synchronous = false;
    if (synchronous) {
        r = capture_check_unsafe();
        if (r)
            return driver_leave(r);
    } else if (!command.device_from && !stage(&command)) {
        return driver_leave(CUDA_ERROR_OUT_OF_MEMORY);
    }
    r = stream_submit(stream, &command);
    if (!r && !stream->capture && (synchronous || !command.device_to))
        r = context_wait(stream->context, stream_need(stream));
    return driver_leave(r);
}

static CUresult copy_line(void *to, bool to_device, const void *from, bool from_device,
                          size_t bytes, CUstream stream, bool synchronous)
{
    return copy((struct end){.address = to, .on_device = to_device},
                (struct end){.address = ADDRESS(from), .on_device = from_device},
                (struct extent){bytes, 1, 1}, stream, synchronous);
}

ENTRY(cuMemcpyHtoD_v2, CUdeviceptr to, const void *from, size_t bytes)
{
    return copy_line(ADDRESS(to), true, from, false, bytes, NULL, true);
}

ENTRY(cuMemcpyHtoD_v2_ptds, CUdeviceptr to, const void *from, size_t bytes)
{
    return copy_line(ADDRESS(to), true, from, false, bytes, CU_STREAM_PER_THREAD, true);
}

ENTRY(cuMemcpyHtoDAsync_v2, CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
    return copy_line(ADDRESS(to), true, from, false, bytes, stream, false);
}

ENTRY(cuMemcpyHtoDAsync_v2_ptsz, CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
    return copy_line(ADDRESS(to), true, from, false, bytes, PER_THREAD(stream), false);
}

ENTRY(cuMemcpyDtoH_v2, void *to, CUdeviceptr from, size_t bytes)
{
    return copy_line(to, false, ADDRESS(from), true, bytes, NULL, true);
}

ENTRY(cuMemcpyDtoH_v2_ptds, void *to, CUdeviceptr from, size_t bytes)
{
    return copy_line(to, false, ADDRESS(from), true, bytes, CU_STREAM_PER_THREAD, true);
}

ENTRY(cuMemcpyDtoHAsync_v2, void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    return copy_line(to, false, ADDRESS(from), true, bytes, stream, false);
}

ENTRY(cuMemcpyDtoHAsync_v2_ptsz, void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    return copy_line(to, false, ADDRESS(from), true, bytes, PER_THREAD(stream), false);
}

ENTRY(cuMemcpyDtoD_v2, CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    return copy_line(ADDRESS(to), true, ADDRESS(from), true, bytes, NULL, true);
}

ENTRY(cuMemcpyDtoD_v2_ptds, CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    return copy_line(ADDRESS(to), true, ADDRESS(from), true, bytes, CU_STREAM_PER_THREAD, true);
}

ENTRY(cuMemcpyDtoDAsync_v2, CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    return copy_line(ADDRESS(to), true, ADDRESS(from), true, bytes, stream, false);
}

ENTRY(cuMemcpyDtoDAsync_v2_ptsz, CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    return copy_line(ADDRESS(to), true, ADDRESS(from), true, bytes, PER_THREAD(stream), false);
}

/* The kind of memory at each end follows from its address. */
static CUresult copy_unified(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream,
                             bool synchronous)
{
    bool to_device, from_device;
    CUresult r = driver_enter();

    if (r)
        return r;
    to_device = on_device(ADDRESS(to));
    from_device = on_device(ADDRESS(from));
    (void)driver_leave(CUDA_SUCCESS);
    return copy_line(ADDRESS(to), to_device, ADDRESS(from), from_device, bytes, stream,
                     synchronous);
}

ENTRY(cuMemcpy, CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    return copy_unified(to, from, bytes, NULL, true);
}

ENTRY(cuMemcpy_ptds, CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    return copy_unified(to, from, bytes, CU_STREAM_PER_THREAD, true);
}

ENTRY(cuMemcpyAsync, CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    return copy_unified(to, from, bytes, stream, false);
}

ENTRY(cuMemcpyAsync_ptsz, CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    return copy_unified(to, from, bytes, PER_THREAD(stream), false);
}

static CUresult contexts_check(const struct context *to, const struct context *from)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    return driver_leave(context_valid(to) && context_valid(from) ? CUDA_SUCCESS
                                                                 : CUDA_ERROR_INVALID_CONTEXT);
}

static CUresult copy_peer(CUdeviceptr to, CUcontext to_context, CUdeviceptr from,
                          CUcontext from_context, size_t bytes, CUstream stream)
{
    CUresult r = contexts_check(to_context, from_context);

    return r ? r : copy_line(ADDRESS(to), true, ADDRESS(from), true, bytes, stream, false);
}

ENTRY(cuMemcpyPeer, CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
      size_t bytes)
{
    return copy_peer(to, to_context, from, from_context, bytes, NULL);
}

ENTRY(cuMemcpyPeer_ptds, CUdeviceptr to, CUcontext to_context, CUdeviceptr from,
      CUcontext from_context, size_t bytes)
{
    return copy_peer(to, to_context, from, from_context, bytes, CU_STREAM_PER_THREAD);
}

ENTRY(cuMemcpyPeerAsync, CUdeviceptr to, CUcontext to_context, CUdeviceptr from,
      CUcontext from_context, size_t bytes, CUstream stream)
{
    return copy_peer(to, to_context, from, from_context, bytes, stream);
}

ENTRY(cuMemcpyPeerAsync_ptsz, CUdeviceptr to, CUcontext to_context, CUdeviceptr from,
      CUcontext from_context, size_t bytes, CUstream stream)
{
    return copy_peer(to, to_context, from, from_context, bytes, PER_THREAD(stream));
}

/* One end of a copy of rows and planes, as described by the caller. */
struct place_of {
    CUmemorytype type;
    void *host;
    CUdeviceptr device;
    CUarray array;
    size_t x, y, z, pitch, height, level;
};

static CUresult find_end(const struct place_of *place, const struct extent *extent, struct end *end)
{
    size_t pitch = place->pitch;
    size_t rows = place->height;

    switch (place->type) {
    case CU_MEMORYTYPE_HOST:
        end->address = place->host;
        break;
    case CU_MEMORYTYPE_DEVICE:
        end->address = ADDRESS(place->device);
        end->on_device = true;
        break;
    case CU_MEMORYTYPE_UNIFIED:
        end->address = ADDRESS(place->device);
        end->on_device = on_device(end->address);
        break;
    case CU_MEMORYTYPE_ARRAY:
        if (!array_valid(place->array))
            return CUDA_ERROR_INVALID_HANDLE;
        pitch = place->array->pitch;
        rows = place->array->rows;
        if (place->z + extent->planes > place->array->planes)
            return CUDA_ERROR_INVALID_VALUE;
        end->address = ADDRESS(place->array->base);
        end->on_device = true;
        break;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (place->level) /* must be 0: a copy of a mipmapped array names the array of a level */
        return CUDA_ERROR_INVALID_VALUE;
    if (!end->address)
        return CUDA_ERROR_INVALID_VALUE;
    /* If there is only one row, or one plane, the caller may pass 0 as the distance to the next. */
    if (extent->rows == 1 && extent->planes == 1 && pitch == 0)
        pitch = place->x + extent->n;
    if (extent->planes == 1 && rows == 0)
        rows = place->y + extent->rows;
    if (pitch < place->x + extent->n || rows < place->y + extent->rows)
        return CUDA_ERROR_INVALID_VALUE;
    end->pitch = pitch;
    end->plane = pitch * rows;
    end->address = (char *)end->address + place->z * end->plane + place->y * pitch + place->x;
    return CUDA_SUCCESS;
}

static CUresult copy_places(const struct place_of *to, const struct place_of *from,
                            struct extent extent, CUstream stream, bool synchronous)
{
    struct end to_end = {0};
    struct end from_end = {0};
    CUresult r = driver_enter();

    if (r)
        return r;
    if (extent.n && extent.rows && extent.planes) {
        r = find_end(to, &extent, &to_end);
        if (!r)
            r = find_end(from, &extent, &from_end);
    }
    r = driver_leave(r);
    return r ? r : copy(to_end, from_end, extent, stream, synchronous);
}

static CUresult copy_2d(const CUDA_MEMCPY2D *description, CUstream stream, bool synchronous)
{
    struct place_of to, from;

    if (!description)
        return CUDA_ERROR_INVALID_VALUE;
    to = (struct place_of){.type = description->dstMemoryType,
                           .host = description->dstHost,
                           .device = description->dstDevice,
                           .array = description->dstArray,
                           .x = description->dstXInBytes,
                           .y = description->dstY,
                           .pitch = description->dstPitch};
    from = (struct place_of){.type = description->srcMemoryType,
                             .host = (void *)(uintptr_t)description->srcHost,
                             .device = description->srcDevice,
                             .array = description->srcArray,
                             .x = description->srcXInBytes,
                             .y = description->srcY,
                             .pitch = description->srcPitch};
    return copy_places(&to, &from,
                       (struct extent){description->WidthInBytes, description->Height, 1}, stream,
                       synchronous);
}

static CUresult copy_3d(const CUDA_MEMCPY3D *description, CUstream stream, bool synchronous)
{
    struct place_of to, from;

    if (!description)
        return CUDA_ERROR_INVALID_VALUE;
    to = (struct place_of){.type = description->dstMemoryType,
                           .host = description->dstHost,
                           .device = description->dstDevice,
                           .array = description->dstArray,
                           .x = description->dstXInBytes,
                           .y = description->dstY,
                           .z = description->dstZ,
                           .pitch = description->dstPitch,
                           .height = description->dstHeight,
                           .level = description->dstLOD};
    from = (struct place_of){.type = description->srcMemoryType,
                             .host = (void *)(uintptr_t)description->srcHost,
                             .device = description->srcDevice,
                             .array = description->srcArray,
                             .x = description->srcXInBytes,
                             .y = description->srcY,
                             .z = description->srcZ,
                             .pitch = description->srcPitch,
                             .height = description->srcHeight,
                             .level = description->srcLOD};
    return copy_places(
        &to, &from,
        (struct extent){description->WidthInBytes, description->Height, description->Depth}, stream,
        synchronous);
}

/* The same description, with a context in place of each reserved word. */
static CUresult copy_3d_peer(const CUDA_MEMCPY3D *description, CUstream stream, bool synchronous)
{
    CUresult r;

    if (!description)
        return CUDA_ERROR_INVALID_VALUE;
    r = contexts_check(description->dstContext, description->srcContext);
    return r ? r : copy_3d(description, stream, synchronous);
}

ENTRY(cuMemcpy2D_v2, const CUDA_MEMCPY2D *description)
{
    return copy_2d(description, NULL, true);
}

ENTRY(cuMemcpy2D_v2_ptds, const CUDA_MEMCPY2D *description)
{
    return copy_2d(description, CU_STREAM_PER_THREAD, true);
}

ENTRY(cuMemcpy2DAsync_v2, const CUDA_MEMCPY2D *description, CUstream stream)
{
    return copy_2d(description, stream, false);
}

ENTRY(cuMemcpy2DAsync_v2_ptsz, const CUDA_MEMCPY2D *description, CUstream stream)
{
    return copy_2d(description, PER_THREAD(stream), false);
}

ENTRY(cuMemcpy2DUnaligned_v2, const CUDA_MEMCPY2D *description)
{
    return copy_2d(description, NULL, true);
}

ENTRY(cuMemcpy2DUnaligned_v2_ptds, const CUDA_MEMCPY2D *description)
{
    return copy_2d(description, CU_STREAM_PER_THREAD, true);
}

ENTRY(cuMemcpy3D_v2, const CUDA_MEMCPY3D *description)
{
    return copy_3d(description, NULL, true);
}

ENTRY(cuMemcpy3D_v2_ptds, const CUDA_MEMCPY3D *description)
{
    return copy_3d(description, CU_STREAM_PER_THREAD, true);
}

ENTRY(cuMemcpy3DAsync_v2, const CUDA_MEMCPY3D *description, CUstream stream)
{
    return copy_3d(description, stream, false);
}

ENTRY(cuMemcpy3DAsync_v2_ptsz, const CUDA_MEMCPY3D *description, CUstream stream)
{
    return copy_3d(description, PER_THREAD(stream), false);
}

ENTRY(cuMemcpy3DPeer, const CUDA_MEMCPY3D *description)
{
    return copy_3d_peer(description, NULL, true);
}

ENTRY(cuMemcpy3DPeer_ptds, const CUDA_MEMCPY3D *description)
{
    return copy_3d_peer(description, CU_STREAM_PER_THREAD, true);
}

ENTRY(cuMemcpy3DPeerAsync, const CUDA_MEMCPY3D *description, CUstream stream)
{
    return copy_3d_peer(description, stream, false);
}

ENTRY(cuMemcpy3DPeerAsync_ptsz, const CUDA_MEMCPY3D *description, CUstream stream)
{
    return copy_3d_peer(description, PER_THREAD(stream), false);
}
