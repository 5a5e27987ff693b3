/* Types of the driver API that describe device memory; see cuda_abi.h. */
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef unsigned int CUdeviceptr_v1; /* in the forms without a suffix */
typedef struct CUarray_st *CUarray;
typedef struct CUmipmappedArray_st *CUmipmappedArray;
typedef struct CUextMemory_st *CUexternalMemory;
typedef struct CUmod_st *CUmodule;
typedef struct CUlib_st *CUlibrary;
typedef struct CUkern_st *CUkernel;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphNode_st *CUgraphNode;
typedef struct CUgreenCtx_st *CUgreenCtx;
typedef struct CUdevResourceDesc_st *CUdevResourceDesc;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef uint32_t CUlogicalEndpointId; /* chosen by the program from those that it reserved */
typedef int CUmemAllocationHandleType;
typedef int CUmemRangeHandleType;
typedef int CUpointer_attribute;
typedef unsigned long long CUtexObject;
typedef struct CUtexref_st *CUtexref;
typedef struct CUDA_RESOURCE_DESC_st CUDA_RESOURCE_DESC;
typedef struct CUDA_TEXTURE_DESC_st CUDA_TEXTURE_DESC;
typedef struct CUDA_RESOURCE_VIEW_DESC_st CUDA_RESOURCE_VIEW_DESC;
#define CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR 1
typedef int CUlimit;
typedef int CUjit_option;
typedef int CUlibraryOption;

#define CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT           16
#define CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR 39
#define CU_LIMIT_STACK_SIZE                                0
#define CU_MEM_LOCATION_TYPE_NONE                          0
#define CU_MEM_LOCATION_TYPE_DEVICE                        1
#define CU_MEM_LOCATION_TYPE_HOST                          2
#define CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN        6
#define CU_MEM_ALLOCATION_TYPE_PINNED                      1
#define CU_MEM_ACCESS_FLAGS_PROT_READWRITE                 3
#define CU_MEM_ALLOCATION_TYPE_MANAGED                     2
#define CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT               5
#define CU_MEMPOOL_ATTR_USED_MEM_CURRENT                   7
#define CU_MEMPOOL_ATTR_ALLOCATION_TYPE                    9
#define CU_MEMPOOL_ATTR_LOCATION_ID                        11
#define CU_MEMPOOL_ATTR_LOCATION_TYPE                      12
#define CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT             2
#define CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL                9
#define CU_GRAPH_NODE_TYPE_GRAPH                           4
#define CU_GRAPH_NODE_TYPE_MEM_ALLOC                       10
#define CU_MEM_OPERATION_TYPE_MAP                          1
#define CUDA_ARRAY3D_LAYERED                               0x01
#define CUDA_ARRAY3D_CUBEMAP                               0x04
#define CUDA_ARRAY3D_SPARSE                                0x40
#define CUDA_ARRAY3D_DEFERRED_MAPPING                      0x80

/* In a locality domain, the two low bytes of `id` are the GPU's ordinal and the domain's. */
typedef struct CUmemLocation_st {
    int type;
    int id;
} CUmemLocation;

typedef struct CUmemAccessDesc_st {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

typedef struct CUmemAllocationProp_st {
    int type;
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    unsigned char allocFlags[8];
} CUmemAllocationProp;

typedef struct CUmemPoolProps_st {
    int allocType;
    int handleTypes;
    CUmemLocation location;
    void *win32SecurityAttributes;
    size_t maxSize;
    unsigned short usage;
    unsigned char reserved[54];
} CUmemPoolProps;

typedef struct CUmemPoolPtrExportData_st {
    unsigned char reserved[64];
} CUmemPoolPtrExportData;

typedef struct CUipcMemHandle_st {
    char reserved[64];
} CUipcMemHandle;

typedef struct CUDA_ARRAY_DESCRIPTOR_v1_st {
    unsigned int Width, Height;
    int Format;
    unsigned int NumChannels;
} CUDA_ARRAY_DESCRIPTOR_v1;

typedef struct CUDA_ARRAY_DESCRIPTOR_st {
    size_t Width, Height;
    int Format;
    unsigned int NumChannels;
} CUDA_ARRAY_DESCRIPTOR;

typedef struct CUDA_ARRAY3D_DESCRIPTOR_v1_st {
    unsigned int Width, Height, Depth;
    int Format;
    unsigned int NumChannels;
    unsigned int Flags;
} CUDA_ARRAY3D_DESCRIPTOR_v1;

typedef struct CUDA_ARRAY3D_DESCRIPTOR_st {
    size_t Width, Height, Depth;
    int Format;
    unsigned int NumChannels;
    unsigned int Flags;
} CUDA_ARRAY3D_DESCRIPTOR;

/* Only `size` is read. */
typedef struct CUDA_EXTERNAL_MEMORY_HANDLE_DESC_st {
    int type;
    union {
        int fd;
        struct {
            void *handle;
            const void *name;
        } win32;
    } handle;
    unsigned long long size;
    unsigned int flags;
    unsigned int reserved[16];
} CUDA_EXTERNAL_MEMORY_HANDLE_DESC;

typedef struct CUarrayMapInfo_st {
    int resourceType;
    void *resource; /* an array or a mipmapped array */
    int subresourceType;
    union {
        struct {
            unsigned int level, layer, offsetX, offsetY, offsetZ;
            unsigned int extentWidth, extentHeight, extentDepth;
        } sparseLevel;
        struct {
            unsigned int layer;
            unsigned long long offset, size;
        } miptail;
    } subresource;
    int memOperationType;
    int memHandleType;
    CUmemGenericAllocationHandle memHandle;
    unsigned long long offset;
    unsigned int deviceBitMask;
    unsigned int flags;
    unsigned int reserved[2];
} CUarrayMapInfo;

typedef struct CUDA_MEM_ALLOC_NODE_PARAMS_st {
    CUmemPoolProps poolProps;
    const void *accessDescs;
    size_t accessDescCount;
    size_t bytesize;
    CUdeviceptr dptr;
} CUDA_MEM_ALLOC_NODE_PARAMS;

/* Only `type` is read. */
typedef struct CUgraphNodeParams_st {
    int type;
    int reserved0[3];
    long long reserved1[29];
    long long reserved2;
} CUgraphNodeParams;

_Static_assert(sizeof(CUmemAllocationProp) == 32, "CUmemAllocationProp");
_Static_assert(sizeof(CUmemPoolProps) == 88, "CUmemPoolProps");
_Static_assert(offsetof(CUDA_EXTERNAL_MEMORY_HANDLE_DESC, size) == 24, "external memory");
_Static_assert(sizeof(CUarrayMapInfo) == 96, "CUarrayMapInfo");
_Static_assert(offsetof(CUarrayMapInfo, memHandle) == 64, "CUarrayMapInfo.memHandle");
_Static_assert(sizeof(CUDA_MEM_ALLOC_NODE_PARAMS) == 120, "CUDA_MEM_ALLOC_NODE_PARAMS");
