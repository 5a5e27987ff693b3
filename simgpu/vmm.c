/*
 * Virtual memory management: physical allocations, address reservations, and mappings
 *
 * An allocation is a range of a memfd, so that it can be mapped more than once and by other
 * processes. Each exportable allocation has its own file, whose last page describes it; all other
 * allocations share one file. The process that created an allocation is charged for it until that
 * process's handles and mappings are gone. A process that imported it keeps the contents alive, but
 * is not charged, which matches what NVML reports.
 */
#include "driver.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define GRANULARITY (2ull << 20)
#define LABEL_PAGE  4096
#define LABEL_MAGIC 0x4d454d5f55504753ull /* "SGPU_MEM" in memory */
#define CLOSE_EXEC  1u                    /* MFD_CLOEXEC */

/* The last page of a file that may be exported. */
struct label {
    uint64_t magic;
    uint64_t size;
    uint8_t uuid[16];
    CUmemAllocationProp prop;
};

struct backing {
    struct backing *next;
    unsigned int n_handles;
    int fd; /* its own file, or -1 if it is in the shared file */
    off_t offset;
    size_t size;
    size_t charged;
    struct device *device; /* the device that is charged */
    dev_t file_device;
    ino_t file;
};

struct handle {
    struct object object;
    struct backing *backing;
    CUmemAllocationProp prop;
    unsigned int epoch; /* of the driver when the handle was made */
    unsigned int references;
    unsigned int mappings; /* keep the memory even when no references are left */
};

struct reservation {
    struct reservation *next;
    uintptr_t base;
    size_t size;
};

static struct pool handles_pool = POOL(handle, 0x484e4430);
static struct backing *backings;
static struct reservation *reservations;
static int shared_file = -1;
static off_t shared_end;

/** handle_valid() - check whether this is a handle that still has references */
bool handle_valid(const struct handle *handle)
{
    return pool_owns(&handles_pool, handle) && handle->epoch == driver.epoch &&
           handle->references > 0;
}

size_t vmm_granularity(void)
{
    return GRANULARITY;
}

/* A system call, because memfd_create() needs a newer C library than the real driver does. */
static int memory_file(void)
{
    return (int)syscall(SYS_memfd_create, "simgpu", CLOSE_EXEC);
}

static int backing_file(const struct backing *backing)
{
    return backing->fd < 0 ? shared_file : backing->fd;
}

/* Create a file for this memory alone, with the label after the contents. */
static bool backing_open(struct backing *backing, const struct handle *handle)
{
    struct label label = {.magic = LABEL_MAGIC, .size = backing->size, .prop = handle->prop};
    struct stat status;

    if (handle->prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        memcpy(label.uuid, driver.devices[handle->prop.location.id]->gpu->config.uuid,
               sizeof(label.uuid));
    backing->fd = memory_file();
    if (backing->fd < 0)
        return false;
    if (ftruncate(backing->fd, (off_t)(backing->size + LABEL_PAGE)) < 0 ||
        pwrite(backing->fd, &label, sizeof(label), (off_t)backing->size) != sizeof(label) ||
        fstat(backing->fd, &status) < 0) {
        close(backing->fd);
        return false;
    }
    backing->file_device = status.st_dev;
    backing->file = status.st_ino;
    return true;
}

/* Append a piece to the shared file; its offsets are not reused. */
static bool backing_append(struct backing *backing)
{
    if (shared_file < 0) {
        shared_file = memory_file();
        shared_end = 0;
    }
    if (shared_file < 0 || ftruncate(shared_file, shared_end + (off_t)backing->size) < 0)
        return false;
    backing->fd = -1;
    backing->offset = shared_end;
    shared_end += (off_t)backing->size;
    return true;
}

static void backing_free(struct backing *backing)
{
    struct backing **link = &backings;

    while (*link != backing)
        link = &(*link)->next;
    *link = backing->next;
    if (backing->fd >= 0)
        close(backing->fd);
    else
        (void)fallocate(shared_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, backing->offset,
                        (off_t)backing->size);
    memory_refund(backing->device, backing->charged);
    free(backing);
}

static void handle_end(struct handle *handle)
{
    if (handle->references || handle->mappings)
        return;
    if (--handle->backing->n_handles == 0)
        backing_free(handle->backing);
    pool_give(&handles_pool, handle);
}

/* Set up a handle to memory, and add the memory to the list if it is not there yet. */
static void handle_begin(struct handle *handle, struct backing *backing)
{
    handle->backing = backing;
    handle->epoch = driver.epoch;
    handle->references = 1;
    if (backing->n_handles++ == 0) {
        backing->next = backings;
        backings = backing;
    }
}

/** handle_new() - create host memory, or device memory, which is charged at once */
CUresult handle_new(struct handle **handlep, size_t size, const CUmemAllocationProp *prop)
{
    bool exported = prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    struct backing *backing;
    struct handle *handle;
    CUresult r;

    if (size == 0 || size % GRANULARITY)
        return CUDA_ERROR_INVALID_VALUE;
    if (size > SIZE_MAX / 4)
        return CUDA_ERROR_OUT_OF_MEMORY;
    backing = calloc(1, sizeof(*backing));
    handle = backing ? pool_take(&handles_pool) : NULL;
    if (!handle) {
        free(backing);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    handle->prop = *prop;
    backing->size = size;
    if (!location_host(&prop->location)) {
        backing->device = driver.devices[prop->location.id];
        backing->charged = size;
    }
    r = backing->charged ? memory_charge(backing->device, size) : CUDA_SUCCESS;
    if (!r && !(exported ? backing_open(backing, handle) : backing_append(backing))) {
        memory_refund(backing->device, backing->charged);
        r = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (r) {
        pool_give(&handles_pool, handle);
        free(backing);
        return r;
    }
    handle_begin(handle, backing);
    *handlep = handle;
    return CUDA_SUCCESS;
}

/** handle_release() - drop one reference */
void handle_release(struct handle *handle)
{
    handle->references--;
    handle_end(handle);
}

/** handle_retain() - take another reference to the handle of the memory mapped at an address */
CUresult handle_retain(struct handle **handlep, uintptr_t address)
{
    const struct allocation *item = memory_at(address);

    if (!item || item->kind != ALLOCATION_MAPPED)
        return CUDA_ERROR_INVALID_VALUE;
    item->handle->references++;
    *handlep = item->handle;
    return CUDA_SUCCESS;
}

const CUmemAllocationProp *handle_prop(const struct handle *handle)
{
    return &handle->prop;
}

/** handle_export() - a new descriptor for the memory, which another process may import */
CUresult handle_export(const struct handle *handle, int *fdp)
{
    if (handle->backing->fd < 0)
        return CUDA_ERROR_INVALID_VALUE;
    *fdp = (int)syscall(SYS_fcntl, handle->backing->fd, F_DUPFD_CLOEXEC, 0);
    return *fdp < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

static bool label_read(int fd, struct label *label, struct stat *status)
{
    return fstat(fd, status) == 0 && status->st_size > LABEL_PAGE &&
           pread(fd, label, sizeof(*label), status->st_size - LABEL_PAGE) == sizeof(*label) &&
           label->magic == LABEL_MAGIC && label->size == (uint64_t)status->st_size - LABEL_PAGE;
}

/** handle_import() - a new handle to exported memory; the caller's descriptor stays open */
CUresult handle_import(struct handle **handlep, int fd)
{
    struct backing *backing = backings;
    struct handle *handle;
    struct stat status;
    struct label label;
    int ordinal = 0;

    if (!label_read(fd, &label, &status))
        return CUDA_ERROR_INVALID_VALUE;
    while (ordinal < driver.n_devices &&
           memcmp(driver.devices[ordinal]->gpu->config.uuid, label.uuid, sizeof(label.uuid)) != 0)
        ordinal++;
    if (label.prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
        if (ordinal == driver.n_devices)
            return CUDA_ERROR_INVALID_DEVICE;
        label.prop.location.id = ordinal;
    }
    handle = pool_take(&handles_pool);
    if (!handle)
        return CUDA_ERROR_OUT_OF_MEMORY;
    handle->prop = label.prop;
    while (backing && (backing->fd < 0 || backing->file != status.st_ino ||
                       backing->file_device != status.st_dev))
        backing = backing->next;
    if (!backing) {
        backing = calloc(1, sizeof(*backing));
        if (backing)
            backing->fd = (int)syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 0);
        if (!backing || backing->fd < 0) {
            free(backing);
            pool_give(&handles_pool, handle);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        backing->size = label.size;
        backing->file_device = status.st_dev;
        backing->file = status.st_ino;
    }
    handle_begin(handle, backing);
    *handlep = handle;
    return CUDA_SUCCESS;
}

/** vmm_reserve() - reserve addresses without memory, at `wanted` if those are free */
CUresult vmm_reserve(uintptr_t *basep, size_t size, size_t alignment, uintptr_t wanted)
{
    struct reservation *reservation;
    uintptr_t base;

    if (alignment < GRANULARITY)
        alignment = GRANULARITY;
    if (size == 0 || size % GRANULARITY || alignment & (alignment - 1))
        return CUDA_ERROR_INVALID_VALUE;
    if (size > SIZE_MAX / 4 || alignment > SIZE_MAX / 4)
        return CUDA_ERROR_OUT_OF_MEMORY;
    reservation = calloc(1, sizeof(*reservation));
    if (!reservation)
        return CUDA_ERROR_OUT_OF_MEMORY;
    base = wanted % alignment == 0 && wanted ? memory_range(wanted, size, false) : 0;
    if (base != wanted || !base) {
        uintptr_t whole;

        if (base)
            munmap((void *)base, size);
        whole = memory_range(0, size + alignment, false);
        if (!whole) {
            free(reservation);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        base = (whole + alignment - 1) / alignment * alignment;
        if (base > whole)
            munmap((void *)whole, base - whole);
        munmap((void *)(base + size), whole + alignment - base);
    }
    reservation->base = base;
    reservation->size = size;
    reservation->next = reservations;
    reservations = reservation;
    *basep = base;
    return CUDA_SUCCESS;
}

static bool range_empty(uintptr_t base, size_t size)
{
    const struct allocation *after = memory_after(base);

    return !memory_at(base) && (!after || after->base >= base + size);
}

/** vmm_unreserve() - free a whole reservation; nothing may be mapped into it */
CUresult vmm_unreserve(uintptr_t base, size_t size)
{
    for (struct reservation **link = &reservations; *link; link = &(*link)->next) {
        struct reservation *reservation = *link;

        if (reservation->base != base)
            continue;
        if (reservation->size != size || !range_empty(base, size))
            return CUDA_ERROR_INVALID_VALUE;
        *link = reservation->next;
        munmap((void *)base, size);
        free(reservation);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

/** vmm_unmapped() - release a mapping that was removed from the table; keep its addresses */
static void vmm_unmapped(const struct allocation *item)
{
    memory_range(item->base, item->size, true);
    item->handle->mappings--;
    handle_end(item->handle);
}

/** vmm_map() - map the whole of a handle's memory at reserved addresses, as the driver requires */
CUresult vmm_map(uintptr_t base, size_t size, size_t offset, struct handle *handle)
{
    const struct reservation *in = reservations;
    struct allocation item = {.kind = ALLOCATION_MAPPED,
                              .ordinal = handle->prop.location.id,
                              .base = base,
                              .bytes = size,
                              .size = size,
                              .handle = handle,
                              .returned = vmm_unmapped};

    if (base % GRANULARITY || size == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (offset || size != handle->backing->size)
        return CUDA_ERROR_NOT_SUPPORTED;
    while (in &&
           (base < in->base || base - in->base > in->size || in->size - (base - in->base) < size))
        in = in->next;
    if (!in || !range_empty(base, size))
        return CUDA_ERROR_INVALID_VALUE;
    if (mmap((void *)base, size, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
             backing_file(handle->backing), handle->backing->offset) == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!memory_add(&item)) {
        memory_range(base, size, true);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    handle->mappings++;
    return CUDA_SUCCESS;
}

/* Checks whether these bytes consist of whole, adjacent mappings. */
static bool whole_mappings(uintptr_t base, size_t size)
{
    uintptr_t end = base + size;

    if (size == 0 || end < base)
        return false;
    while (base < end) {
        const struct allocation *item = memory_at(base);

        if (!item || item->kind != ALLOCATION_MAPPED || item->base != base ||
            item->size > end - base)
            return false;
        base += item->size;
    }
    return true;
}

/** vmm_unmap() - remove whole mappings, after all work that may use them */
CUresult vmm_unmap(uintptr_t base, size_t size)
{
    CUresult r;

    if (!whole_mappings(base, size))
        return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < driver.n_devices; i++) {
        r = context_drain(i);
        if (r)
            return r;
    }
    if (!whole_mappings(base, size)) /* another thread unmapped them while this one slept */
        return CUDA_ERROR_INVALID_VALUE;
    for (uintptr_t at = base; at < base + size;) {
        size_t step = memory_at(at)->size;

        r = memory_release(at);
        if (r)
            return r;
        at += step;
    }
    return CUDA_SUCCESS;
}

/** vmm_access() - set one location's access to whole mappings; other locations keep theirs */
CUresult vmm_access(uintptr_t base, size_t size, const CUmemAccessDesc *wanted)
{
    bool host = location_host(&wanted->location);
    struct device *device;

    if (!host && location_device(&wanted->location, &device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!whole_mappings(base, size) ||
        wanted->flags & ~(unsigned int)CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        return CUDA_ERROR_INVALID_VALUE;
    while (size) {
        struct allocation *item = memory_at(base);
        unsigned int shift = 2 * (unsigned int)wanted->location.id;

        if (!host) {
            item->access &= ~(3ull << shift);
            item->access |= (uint64_t)wanted->flags << shift;
        }
        /* This process accesses memory on behalf of the simulated devices, so memory is readable
         * and writable here as soon as any device may access it at all. */
        if (mprotect((void *)base, item->size,
                     item->access || (host && wanted->flags) ? PROT_READ | PROT_WRITE : PROT_NONE))
            return CUDA_ERROR_OUT_OF_MEMORY;
        base += item->size;
        size -= item->size;
    }
    return CUDA_SUCCESS;
}

/** vmm_forget() - end all handles; `owns_mappings` is false if the address space is the parent's */
void vmm_forget(bool owns_mappings)
{
    while (backings) {
        struct backing *backing = backings;

        backings = backing->next;
        if (backing->fd >= 0)
            close(backing->fd);
        free(backing);
    }
    while (reservations) {
        struct reservation *reservation = reservations;

        reservations = reservation->next;
        if (owns_mappings)
            munmap((void *)reservation->base, reservation->size);
        free(reservation);
    }
    if (shared_file >= 0)
        close(shared_file);
    shared_file = -1;
}
