/* Entry points: linear and 2D fills; see copy.h for the fills that take time. */
#include "copy.h"

/* Fills of device memory return before they are done, even those without "Async". */
static CUresult set(CUdeviceptr to, size_t pitch, uint32_t value, size_t width, size_t n,
                    size_t rows, CUstream handle)
{
    struct command command = {.kind = COMMAND_SET,
                              .to = ADDRESS(to),
                              .fill = value,
                              .width = width,
                              .n = n * width,
                              .rows = rows,
                              .planes = 1,
                              .to_pitch = pitch};
    struct stream *stream;
    CUresult r = stream_enter(handle, &stream);

    if (r)
        return r;
    if (n == 0 || rows == 0)
        return driver_leave(CUDA_SUCCESS);
    if (n > SIZE_MAX / width || to % width || (rows > 1 && (pitch % width || pitch < n * width)) ||
        !memory_find(command.to, command_to_span(&command)))
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    if (on_device(command.to) && command_bytes(&command) >= TIMED)
        command.duration = OVERHEAD + command_bytes(&command) / FILL_PER_NS;
    return driver_leave(stream_submit(stream, &command));
}

ENTRY(cuMemsetD8_v2, CUdeviceptr to, unsigned char value, size_t n)
{
    return set(to, 0, value, 1, n, 1, NULL);
}

ENTRY(cuMemsetD8_v2_ptds, CUdeviceptr to, unsigned char value, size_t n)
{
    return set(to, 0, value, 1, n, 1, CU_STREAM_PER_THREAD);
}

ENTRY(cuMemsetD8Async, CUdeviceptr to, unsigned char value, size_t n, CUstream stream)
{
    return set(to, 0, value, 1, n, 1, stream);
}

ENTRY(cuMemsetD8Async_ptsz, CUdeviceptr to, unsigned char value, size_t n, CUstream stream)
{
    return set(to, 0, value, 1, n, 1, PER_THREAD(stream));
}

ENTRY(cuMemsetD16_v2, CUdeviceptr to, unsigned short value, size_t n)
{
    return set(to, 0, value, 2, n, 1, NULL);
}

ENTRY(cuMemsetD16_v2_ptds, CUdeviceptr to, unsigned short value, size_t n)
{
    return set(to, 0, value, 2, n, 1, CU_STREAM_PER_THREAD);
}

ENTRY(cuMemsetD16Async, CUdeviceptr to, unsigned short value, size_t n, CUstream stream)
{
    return set(to, 0, value, 2, n, 1, stream);
}

ENTRY(cuMemsetD16Async_ptsz, CUdeviceptr to, unsigned short value, size_t n, CUstream stream)
{
    return set(to, 0, value, 2, n, 1, PER_THREAD(stream));
}

ENTRY(cuMemsetD32_v2, CUdeviceptr to, unsigned int value, size_t n)
{
    return set(to, 0, value, 4, n, 1, NULL);
}

ENTRY(cuMemsetD32_v2_ptds, CUdeviceptr to, unsigned int value, size_t n)
{
    return set(to, 0, value, 4, n, 1, CU_STREAM_PER_THREAD);
}

ENTRY(cuMemsetD32Async, CUdeviceptr to, unsigned int value, size_t n, CUstream stream)
{
    return set(to, 0, value, 4, n, 1, stream);
}

ENTRY(cuMemsetD32Async_ptsz, CUdeviceptr to, unsigned int value, size_t n, CUstream stream)
{
    return set(to, 0, value, 4, n, 1, PER_THREAD(stream));
}

ENTRY(cuMemsetD2D8_v2, CUdeviceptr to, size_t pitch, unsigned char value, size_t n, size_t rows)
{
    return set(to, pitch, value, 1, n, rows, NULL);
}

ENTRY(cuMemsetD2D8_v2_ptds, CUdeviceptr to, size_t pitch, unsigned char value, size_t n,
      size_t rows)
{
    return set(to, pitch, value, 1, n, rows, CU_STREAM_PER_THREAD);
}

ENTRY(cuMemsetD2D8Async, CUdeviceptr to, size_t pitch, unsigned char value, size_t n, size_t rows,
      CUstream stream)
{
    return set(to, pitch, value, 1, n, rows, stream);
}

ENTRY(cuMemsetD2D8Async_ptsz, CUdeviceptr to, size_t pitch, unsigned char value, size_t n,
      size_t rows, CUstream stream)
{
    return set(to, pitch, value, 1, n, rows, PER_THREAD(stream));
}

ENTRY(cuMemsetD2D16_v2, CUdeviceptr to, size_t pitch, unsigned short value, size_t n, size_t rows)
{
    return set(to, pitch, value, 2, n, rows, NULL);
}

ENTRY(cuMemsetD2D16_v2_ptds, CUdeviceptr to, size_t pitch, unsigned short value, size_t n,
      size_t rows)
{
    return set(to, pitch, value, 2, n, rows, CU_STREAM_PER_THREAD);
}

ENTRY(cuMemsetD2D16Async, CUdeviceptr to, size_t pitch, unsigned short value, size_t n, size_t rows,
      CUstream stream)
{
    return set(to, pitch, value, 2, n, rows, stream);
}

ENTRY(cuMemsetD2D16Async_ptsz, CUdeviceptr to, size_t pitch, unsigned short value, size_t n,
      size_t rows, CUstream stream)
{
    return set(to, pitch, value, 2, n, rows, PER_THREAD(stream));
}

ENTRY(cuMemsetD2D32_v2, CUdeviceptr to, size_t pitch, unsigned int value, size_t n, size_t rows)
{
    return set(to, pitch, value, 4, n, rows, NULL);
}

ENTRY(cuMemsetD2D32_v2_ptds, CUdeviceptr to, size_t pitch, unsigned int value, size_t n,
      size_t rows)
{
    return set(to, pitch, value, 4, n, rows, CU_STREAM_PER_THREAD);
}

ENTRY(cuMemsetD2D32Async, CUdeviceptr to, size_t pitch, unsigned int value, size_t n, size_t rows,
      CUstream stream)
{
    return set(to, pitch, value, 4, n, rows, stream);
}

ENTRY(cuMemsetD2D32Async_ptsz, CUdeviceptr to, size_t pitch, unsigned int value, size_t n,
      size_t rows, CUstream stream)
{
    return set(to, pitch, value, 4, n, rows, PER_THREAD(stream));
}
