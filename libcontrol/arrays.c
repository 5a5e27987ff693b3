/*
 * Computes how much memory the driver takes for an array, which the driver does not report, and
 * ends the charge for an array that is destroyed.
 *
 * Measured on an H200: rows are rounded up to multiples of 64 bytes, heights to multiples of 8
 * rows, depths of more than 16 to multiples of 16, and smaller depths to a power of two. The number
 * of layers of a layered array is not rounded. Sparse arrays, and those to which memory is mapped
 * later, take no memory. An error in the result shows up in NVML's figures, and counts as memory
 * that the driver takes on its own.
 */
#include "control.h"

/* Returns the number of bits of an element. Most formats have one size per channel. Those that hold
 * all channels in one element are listed with the bits of the whole element. */
static uint64_t element_bits(int format, unsigned int channels)
{
    switch (format) {
    case 0x01: /* 8-bit integers */
    case 0x08:
    case 0xc0: /* normalised */
    case 0xc1:
    case 0xc2:
    case 0xc6:
    case 0xc7:
    case 0xc8:
        return 8ull * channels;
    case 0x02: /* 16 bits */
    case 0x09:
    case 0x10:
    case 0xc3:
    case 0xc4:
    case 0xc5:
    case 0xc9:
    case 0xca:
    case 0xcb:
        return 16ull * channels;
    case 0x91: /* compressed in blocks of 4 x 4: BC1, BC4 */
    case 0x92:
    case 0x97:
    case 0x98:
        return 4;
    case 0x93: /* the other block formats */
    case 0x94:
    case 0x95:
    case 0x96:
    case 0x99:
    case 0x9a:
    case 0x9b:
    case 0x9c:
    case 0x9d:
    case 0x9e:
        return 8;
    case 0xb0: /* NV12 */
        return 12;
    case 0xa2: /* NV16, YUY2 */
    case 0xa5:
        return 16;
    case 0x9f: /* P010, P016, 4:4:4 in 8 bits */
    case 0xa1:
    case 0xb2:
    case 0xb4:
        return 24;
    case 0xa3: /* P210, P216, Y210, Y216, AYUV, Y410, 10:10:10:2 */
    case 0xa4:
    case 0xa6:
    case 0xa7:
    case 0xa8:
    case 0xa9:
    case 0x50:
        return 32;
    case 0xb3: /* 4:4:4 in more bits */
    case 0xb5:
        return 48;
    case 0xb1: /* Y416 */
        return 64;
    default:
        return 32ull * channels;
    }
}

static uint64_t depth_of(uint64_t depth)
{
    uint64_t power = 1;

    if (depth > 16)
        return account_round(depth, 16);
    while (power < depth)
        power *= 2;
    return power;
}

static uint64_t level_size(uint64_t bits, uint64_t width, uint64_t height, uint64_t depth,
                           bool layered)
{
    uint64_t row = account_round(account_product(width, bits), 8) / 8;

    row = account_round(row, 64);
    if (height)
        row = account_product(row, account_round(height, 8));
    return depth ? account_product(row, layered ? depth : depth_of(depth)) : row;
}

uint64_t array_size_mipmapped(const CUDA_ARRAY3D_DESCRIPTOR *desc, unsigned int levels)
{
    uint64_t sum = 0;
    bool layered;

    if (!desc || desc->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING))
        return 0;
    layered = desc->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP);
    for (unsigned int i = 0; i < levels && i < 32; i++) {
        uint64_t width = desc->Width >> i, height = desc->Height >> i;
        uint64_t depth = layered ? desc->Depth : desc->Depth >> i;

        if (!width && !height && !depth)
            break;
        if (__builtin_add_overflow(sum,
                                   level_size(element_bits(desc->Format, desc->NumChannels),
                                              width ? width : 1,
                                              desc->Height && !height ? 1 : height,
                                              desc->Depth && !depth ? 1 : depth, layered),
                                   &sum))
            return UINT64_MAX;
    }
    return sum;
}

uint64_t array_size_3d(const CUDA_ARRAY3D_DESCRIPTOR *desc)
{
    return array_size_mipmapped(desc, 1);
}

uint64_t array_size_3d_v1(const CUDA_ARRAY3D_DESCRIPTOR_v1 *desc)
{
    CUDA_ARRAY3D_DESCRIPTOR same;

    if (!desc)
        return 0;
    same = (CUDA_ARRAY3D_DESCRIPTOR){desc->Width,  desc->Height,      desc->Depth,
                                     desc->Format, desc->NumChannels, desc->Flags};
    return array_size_3d(&same);
}

uint64_t array_size(const CUDA_ARRAY_DESCRIPTOR *desc)
{
    return desc ? level_size(element_bits(desc->Format, desc->NumChannels), desc->Width,
                             desc->Height, 0, false)
                : 0;
}

uint64_t array_size_v1(const CUDA_ARRAY_DESCRIPTOR_v1 *desc)
{
    return desc ? level_size(element_bits(desc->Format, desc->NumChannels), desc->Width,
                             desc->Height, 0, false)
                : 0;
}

static CUresult array_destroy(CUresult (*destroy)(void *), void *array)
{
    struct account_charge charge;
    CUresult result;

    account_forget(&charge, ACCOUNT_ARRAY, (uintptr_t)array);
    result = destroy(array);
    account_forgotten(&charge, (uintptr_t)array, result);
    if (result == CUDA_SUCCESS)
        vmm_array_ends((uintptr_t)array);
    return result;
}

CONTROL_EXPORT CUresult cuArrayDestroy(CUarray hArray)
{
    return array_destroy((CUresult (*)(void *))real->cuArrayDestroy, hArray);
}

CONTROL_EXPORT CUresult cuMipmappedArrayDestroy(CUmipmappedArray hMipmappedArray)
{
    return array_destroy((CUresult (*)(void *))real->cuMipmappedArrayDestroy, hMipmappedArray);
}
