/* Functions that determine the size and direction of a call that copies or fills. The generated
 * entries use them. */
#pragma once

#include "control.h"

struct copy copy_any(CUdeviceptr to, CUdeviceptr from, uint64_t bytes);
struct copy copy_2d(const CUDA_MEMCPY2D *p);
struct copy copy_2d_v1(const CUDA_MEMCPY2D_v1 *p);
struct copy copy_3d(const CUDA_MEMCPY3D *p);
struct copy copy_3d_v1(const CUDA_MEMCPY3D_v1 *p);
struct copy copy_3d_peer(const CUDA_MEMCPY3D_PEER *p);
struct copy copy_batch(const CUdeviceptr *to, const CUdeviceptr *from, const size_t *sizes,
                       size_t count);
struct copy copy_batch_3d(const CUDA_MEMCPY3D_BATCH_OP *ops, size_t count);
struct copy copy_fabric(const CUDA_FABRIC_COPY_BATCH_OP *ops, size_t count);
struct copy copy_host_batch(const size_t *sizes, size_t count);
struct copy copy_decompress(const CUmemDecompressParams *params, size_t count);

static inline struct copy copy_device(uint64_t bytes)
{
    return (struct copy){COPY_DEVICE, bytes};
}

static inline struct copy copy_host(uint64_t bytes)
{
    return (struct copy){COPY_HOST, bytes};
}

static inline struct copy copy_fill(uint64_t count, unsigned width)
{
    return (struct copy){COPY_FILL, account_product(count, width)};
}

static inline struct copy copy_fill_2d(uint64_t count, uint64_t height, unsigned width)
{
    return copy_fill(account_product(count, height), width);
}
