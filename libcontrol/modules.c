/*
 * Modules and libraries: their code and their global variables take device memory, and no call
 * tells how much.
 *
 * The driver's own cuMemGetInfo, before and after a load, shows it as long as other containers are
 * quiet. Each call takes 4 us on an H200, and a load a millisecond. A small amount is provisional
 * until the governor has sampled. A large amount is not believed before that: the load waits for a
 * sample, and is undone if the container is over its quota then. If the sample does not find the
 * memory in the process, but more of the GPU's memory belongs to no process, then it is managed
 * variables (H200: 128 MiB of them, taken at the load). They are charged until the module ends.
 * While other containers come and go this cannot be determined. It is noted then, and charged as
 * soon as it can be.
 *
 * A library is loaded into a context when its first kernel is requested there. Programs do not
 * expect that to fail for lack of memory, and the code of a framework is large. So a load that
 * leaves the container a little over its quota is debt, like everything that the driver takes on
 * its own. Managed variables are not.
 */
#include "control.h"

#include <string.h>

#define MODULES_MUCH    (16ull << 20)
#define MODULES_DEBT    (128ull << 20) /* how far a library may exceed the quota, at first use */
#define MODULES_WAIT_NS (2000 * NS_PER_MS)
#define MODULES_N_LOOKS 8
#define MODULES_N_TRIES 50
#define MODULES_N_READS 8
#define MODULES_N_OPEN  16
#define MODULES_NAP_NS  (100 * NS_PER_US)

static uint32_t n_waiting; /* libraries that are not loaded into any context yet */
uint32_t modules_kernels;
static bool hidden_any; /* a module or library has memory that NVML does not attribute */

struct load {
    int device;
    size_t before;     /* bytes free on the GPU at the start */
    uint64_t charged;  /* charged to this process at the start; its other threads go on */
    uint64_t overhead; /* memory_overhead at the start */
    bool told;         /* whether the next two are known */
    uint64_t nobodys;  /* memory of no process: see grant_device.unattributed */
    uint32_t n_processes;
    uint64_t returned; /* what the container's processes ever gave back */
    uint64_t hidden;   /* found at the end: what was charged as memory of no process */
    uint64_t missing;  /* what may have to be charged, but cannot be determined yet */
    uint64_t taken;    /* what it took apart from `hidden` */
};

/* A load for which it is not known yet how much of it NVML attributes to no process. */
struct open_load {
    uint64_t handle; /* 0: none */
    uint8_t owner;
    uint64_t since;
    struct load load;
};

static struct open_load open_loads[MODULES_N_OPEN];
static uint32_t n_open;
static struct prim_lock open_lock;

void modules_after_fork(void)
{
    n_waiting = 0;
    modules_kernels = 0;
    hidden_any = false;
    memset(open_loads, 0, sizeof open_loads);
    n_open = 0;
    open_lock.word = 0;
}

static size_t free_now(void)
{
    CUstreamCaptureMode mode;
    size_t free_bytes = 0, total;

    account_relax(&mode);
    if (driver->cuMemGetInfo(&free_bytes, &total) != CUDA_SUCCESS)
        free_bytes = 0;
    account_unrelax(&mode);
    return free_bytes;
}

static uint64_t charged_now(int device)
{
    return atomic_load_relaxed(&pages_ledger_device((unsigned)device)->memory);
}

static const struct grant_device *grant_of(const struct load *load)
{
    return pages_grant_device((unsigned)load->device);
}

/* Reads both as of one moment, because the memory of other threads is charged a little longer than
 * it is taken. */
static void look_now(int device, size_t *free_bytes, uint64_t *charged)
{
    uint64_t before;

    *charged = charged_now(device);
    for (int i = 0; i < MODULES_N_READS; i++) {
        before = *charged;
        *free_bytes = free_now();
        *charged = charged_now(device);
        if (likely(*charged == before))
            return;
    }
}

/* Reads how much memory belongs to no process, and the number of processes, both from the same
 * sample. Returns false if there was no sample yet. */
static bool nobodys_now(const struct grant_device *grant, uint64_t *nobodys, uint32_t *n_processes)
{
    bool told = false;

    for (int i = 0; i < MODULES_N_READS; i++) {
        uint64_t since = atomic_load_acquire(&grant->unattributed_ns);

        *nobodys = atomic_load_acquire(&grant->unattributed);
        *n_processes = atomic_load_acquire(&grant->n_processes);
        told = since;
        if (likely(atomic_load_acquire(&grant->unattributed_ns) == since))
            break;
    }
    return told;
}

static void load_begin(struct load *load)
{
    load->device = pages_index_current();
    load->hidden = load->missing = load->taken = 0;
    if (load->device < 0)
        return;
    load->overhead = atomic_load_relaxed(&grant_of(load)->memory_overhead);
    load->told = nobodys_now(grant_of(load), &load->nobodys, &load->n_processes);
    load->returned = account_returned(load->device);
    look_now(load->device, &load->before, &load->charged);
}

/* Returns by how much the memory of no process has grown since the load began, less what new
 * processes brought. */
static uint64_t load_grown(const struct load *load)
{
    const struct grant_device *grant = grant_of(load);
    uint64_t each = atomic_load_relaxed(&grant->unattributed_each);
    uint64_t nobodys;
    uint32_t n_processes;
    int64_t grown;

    nobodys_now(grant, &nobodys, &n_processes);
    grown = (int64_t)(nobodys - load->nobodys) -
            (int64_t)(each * (uint64_t)((int64_t)n_processes - (int64_t)load->n_processes));
    return grown > 0 ? (uint64_t)grown : 0;
}

/*
 * Returns what was taken of the GPU since the load began and is not charged to this process, while
 * its other threads allocate and free. If `freed`, what they free counts as well. It must not where
 * no sample will correct the result: memory of a thread that was freeing when the load began, and
 * that is charged a moment longer, would look like memory that the load took.
 */
static uint64_t load_taken(const struct load *load, bool freed)
{
    uint64_t charged;
    size_t after;
    int64_t taken, more;

    look_now(load->device, &after, &charged);
    taken = (int64_t)(load->before - after);
    more = (int64_t)(charged - load->charged);
    if (!freed && taken < 0)
        taken = 0;
    if (!freed && more < 0)
        more = 0;
    return taken > more ? (uint64_t)(taken - more) : 0;
}

/* The same, less what other threads are freeing and are still charged for at the moment. */
static uint64_t load_taken_for_long(const struct load *load, uint64_t taken, bool freed)
{
    for (int i = 0; i < MODULES_N_TRIES && taken >= MODULES_MUCH; i++) {
        uint64_t again;

        prim_sleep(MODULES_NAP_NS);
        again = load_taken(load, freed);
        taken = again < taken ? again : taken;
    }
    return taken;
}

/* Returns the part that no sample has found in the process. */
static uint64_t load_missing(const struct load *load, uint64_t taken)
{
    int64_t found =
        (int64_t)(atomic_load_relaxed(&grant_of(load)->memory_overhead) - load->overhead);

    if (found < 0)
        found = 0;
    return taken > (uint64_t)found ? taken - (uint64_t)found : 0;
}

/* Waits for a sample that shows how much memory belongs to no process. Samples during which the
 * GPU's memory changed do not. */
static bool load_await_told(const struct load *load, uint64_t since)
{
    const struct grant_device *grant = grant_of(load);

    for (int i = 0; i < MODULES_N_LOOKS && atomic_load_acquire(&grant->unattributed_ns) < since;
         i++) {
        account_driver_takes(load->device, 0);
        if (!account_await_look(load->device, prim_now(), MODULES_WAIT_NS))
            break;
    }
    return atomic_load_acquire(&grant->unattributed_ns) >= since;
}

/*
 * Called after a sample that did not find the memory in the process: charges what belongs to no
 * process. If that cannot be determined because the container itself takes and gives back memory
 * all the time, everything that is missing is charged; if because other containers do, nothing for
 * now.
 */
static void load_reveal(struct load *load, uint64_t taken, uint64_t since)
{
    uint64_t missing, grown;
    bool told;

    if (load_missing(load, taken) < MODULES_MUCH)
        return;
    told = load_await_told(load, since) && load->told;
    missing = load_missing(load, taken);
    if (missing < MODULES_MUCH)
        return;
    grown = load_grown(load);
    if (told)
        load->hidden = grown < missing ? grown : missing;
    else if ((int64_t)(account_returned(load->device) - load->returned) >= (int64_t)MODULES_MUCH)
        load->hidden = load_missing(load, load_taken_for_long(load, taken, true));
    else
        load->missing = load_missing(load, load_taken_for_long(load, taken, true));
    if (load->hidden < ACCOUNT_UNIT) {
        load->hidden = 0;
        return;
    }
    account_add(load->device, load->hidden, true);
    /* The next load begins with a sample that includes this charge. */
    load_await_told(load, prim_now());
}

static uint64_t hidden_key(uint64_t handle, uint8_t owner)
{
    return handle ^ (uint64_t)(owner + 1) << 56;
}

/* Such a charge ends with the module or with its context. */
static void hidden_add(const struct load *load, uint64_t handle, uint8_t owner)
{
    struct block block = {.key = hidden_key(handle, owner),
                          .size = load->hidden,
                          .value = handle,
                          .kind = BLOCK_HIDDEN,
                          .device = (int8_t)load->device,
                          .flags = BLOCK_UNSEEN,
                          .owner = owner};
    struct block *known;

    known = blocks_lock(BLOCK_HIDDEN, block.key);
    if (known)
        known->size += block.size;
    else if (blocks_add(&block))
        atomic_store_relaxed(&hidden_any, true);
    blocks_unlock(BLOCK_HIDDEN, block.key);
    if (!known)
        atomic_add_relaxed(&pages_ledger_device((unsigned)load->device)->blocks, 1);
    account_note_peak(load->device);
}

/* If there is no free place, the load that has been open longest makes room: the program has loaded
 * sixteen others since. */
static void open_add(const struct load *load, uint64_t handle, uint8_t owner)
{
    struct open_load *place = open_loads;

    prim_lock(&open_lock);
    for (struct open_load *o = open_loads; o < open_loads + MODULES_N_OPEN; o++)
        if (!o->handle || (place->handle && o->since < place->since))
            place = o;
    if (!place->handle)
        atomic_add_relaxed(&n_open, 1);
    *place =
        (struct open_load){.handle = handle, .owner = owner, .since = prim_now(), .load = *load};
    prim_unlock(&open_lock);
    gate_watch(load->device);
}

static void open_close(struct open_load *o)
{
    o->handle = 0;
    atomic_add_relaxed(&n_open, -1u);
}

void modules_refresh(int device)
{
    uint64_t told = atomic_load_acquire(&pages_grant_device((unsigned)device)->unattributed_ns);

    if (likely(!atomic_load_relaxed(&n_open)))
        return;
    prim_lock(&open_lock);
    for (struct open_load *o = open_loads; o < open_loads + MODULES_N_OPEN; o++) {
        uint64_t grown;

        if (!o->handle || o->load.device != device || told < o->since)
            continue;
        grown = load_grown(&o->load);
        o->load.hidden = grown < o->load.missing ? grown : o->load.missing;
        if (o->load.hidden >= ACCOUNT_UNIT) {
            account_add(device, o->load.hidden, true);
            hidden_add(&o->load, o->handle, o->owner);
        }
        open_close(o);
    }
    prim_unlock(&open_lock);
}

static void hidden_note(const struct load *load, uint64_t handle)
{
    if (likely(load->device < 0))
        return;
    if (load->hidden)
        hidden_add(load, handle, contexts_owner());
    if (load->missing && load->told)
        open_add(load, handle, contexts_owner());
}

/* Nothing is charged any more for a module, library or context that ends. */
static void open_forget(uint64_t handle, int owner)
{
    if (likely(!atomic_load_relaxed(&n_open)))
        return;
    prim_lock(&open_lock);
    for (struct open_load *o = open_loads; o < open_loads + MODULES_N_OPEN; o++)
        if (o->handle && (handle ? o->handle == handle : o->owner == owner))
            open_close(o);
    prim_unlock(&open_lock);
}

struct hidden_end {
    uint64_t handle;
    uint64_t bytes[LAYOUT_N_DEVICES];
};

static bool hidden_visit(const struct block *block, void *data)
{
    struct hidden_end *end = data;

    if (block->kind != BLOCK_HIDDEN || block->value != end->handle)
        return false;
    end->bytes[block->device] += block->size;
    atomic_add_relaxed(&pages_ledger_device((unsigned)block->device)->blocks, -1ull);
    return true;
}

/* Ends the charges for a module or library, in all contexts. */
static void hidden_ends(uint64_t handle)
{
    struct hidden_end end = {.handle = handle};

    open_forget(handle, 0);
    if (likely(!atomic_load_relaxed(&hidden_any)))
        return;
    blocks_sweep(hidden_visit, &end);
    for (int device = 0; device < (int)pages_n_devices(); device++)
        account_give(device, end.bytes[device], true);
}

/* Returns false if the container is over its quota now by more than `debt`. Then the load has to be
 * undone as far as possible. */
static bool load_end(struct load *load, CUresult result, uint64_t debt)
{
    uint64_t now, taken;

    if (load->device < 0 || result != CUDA_SUCCESS)
        return true;
    load->taken = taken = load_taken(load, true);
    now = prim_now();
    if (taken < MODULES_MUCH) {
        account_driver_takes(load->device, taken);
        /* Many small loads add up, but what others gave back may not be known yet. */
        if (likely(!account_over(load->device, MODULES_DEBT)))
            return true;
        account_await_look(load->device, now, MODULES_WAIT_NS);
        return !account_over(load->device, MODULES_DEBT);
    }
    account_driver_takes(load->device, 0);
    if (account_await_look(load->device, now, MODULES_WAIT_NS))
        load_reveal(load, taken, now);
    else
        account_driver_takes(load->device, load_taken_for_long(load, taken, false));
    load->taken -= load->hidden < load->taken ? load->hidden : load->taken;
    return !account_over(load->device, load->hidden ? 0 : debt);
}

/* What a load took is given back when it ends. Otherwise modules that come and go would add up. */
static void loaded_note(const struct load *load, uint64_t handle)
{
    struct block block = {.key = handle,
                          .value = load->taken,
                          .kind = BLOCK_LOADED,
                          .device = -1,
                          .owner = OWNER_NONE};
    struct block *known;

    if (load->device < 0 || !load->taken)
        return;
    known = blocks_lock(BLOCK_LOADED, handle);
    if (known)
        known->value += block.value;
    else
        blocks_add(&block);
    blocks_unlock(BLOCK_LOADED, handle);
}

static uint64_t loaded_forget(uint64_t handle)
{
    struct block *known = blocks_lock(BLOCK_LOADED, handle);
    uint64_t taken = known ? known->value : 0;

    if (known)
        blocks_remove(known);
    blocks_unlock(BLOCK_LOADED, handle);
    return taken;
}

/*
 * The driver gives back what is unloaded, or keeps it for the next load. The governor's next sample
 * shows which. While no governor samples, it is measured here, because nothing else would ever
 * lower what loads have added up to.
 */
static void unload_begin(struct load *load)
{
    load->device = pages_index_current();
    load->before = load->device >= 0 && account_alone() ? free_now() : 0;
}

static void unload_end(struct load *load, uint64_t handle, CUresult result)
{
    uint64_t given;
    size_t after;

    if (result != CUDA_SUCCESS)
        return;
    given = loaded_forget(handle);
    if (load->device < 0)
        return;
    if (load->before) {
        after = free_now();
        given = after > load->before ? after - load->before : 0;
    }
    account_driver_gives(load->device, given);
}

static CUresult module_loaded(struct load *load, CUresult result, CUmodule *module)
{
    bool fits = load_end(load, result, 0);

    if (result == CUDA_SUCCESS) {
        hidden_note(load, (uintptr_t)*module);
        loaded_note(load, (uintptr_t)*module);
    }
    if (likely(fits))
        return result;
    real->cuModuleUnload(*module);
    hidden_ends((uintptr_t)*module);
    account_driver_gives(load->device, loaded_forget((uintptr_t)*module));
    *module = NULL;
    return account_refuse(load->device);
}

CONTROL_EXPORT CUresult cuModuleLoad(CUmodule *module, const char *fname)
{
    struct load load;

    load_begin(&load);
    return module_loaded(&load, real->cuModuleLoad(module, fname), module);
}

CONTROL_EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    struct load load;

    load_begin(&load);
    return module_loaded(&load, real->cuModuleLoadData(module, image), module);
}

CONTROL_EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image,
                                           unsigned int numOptions, CUjit_option *options,
                                           void **optionValues)
{
    struct load load;

    load_begin(&load);
    return module_loaded(
        &load, real->cuModuleLoadDataEx(module, image, numOptions, options, optionValues), module);
}

CONTROL_EXPORT CUresult cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin)
{
    struct load load;

    load_begin(&load);
    return module_loaded(&load, real->cuModuleLoadFatBinary(module, fatCubin), module);
}

CONTROL_EXPORT CUresult cuModuleUnload(CUmodule hmod)
{
    struct load load;
    CUresult result;

    unload_begin(&load);
    result = real->cuModuleUnload(hmod);
    if (result == CUDA_SUCCESS)
        hidden_ends((uintptr_t)hmod);
    unload_end(&load, (uintptr_t)hmod, result);
    return result;
}

/* ---- libraries ---- */

/* Returns whether the call that follows may load a library into a context. */
static bool libraries_wait(void)
{
    return atomic_load_relaxed(&n_waiting) || contexts_several();
}

static void library_note(CUlibrary library)
{
    struct block block = {
        .key = (uintptr_t)library, .kind = BLOCK_LIBRARY, .device = -1, .owner = OWNER_NONE};

    if (!blocks_lock(BLOCK_LIBRARY, block.key) && blocks_add(&block))
        atomic_add_relaxed(&n_waiting, 1);
    blocks_unlock(BLOCK_LIBRARY, block.key);
}

/* Returns true if the call that follows loads the library into the current context. */
static bool library_enters(CUlibrary library, uint64_t *bitp)
{
    struct block *block;
    bool first = false;

    *bitp = 1ull << contexts_owner();
    block = blocks_lock(BLOCK_LIBRARY, (uintptr_t)library);
    if (block) {
        first = !(block->value & *bitp);
        if (!block->value)
            atomic_add_relaxed(&n_waiting, -1u);
        block->value |= *bitp;
    }
    blocks_unlock(BLOCK_LIBRARY, (uintptr_t)library);
    return first;
}

/*
 * A kernel's handle can be launched directly, which loads its library unnoticed. So the kernel is
 * in the table until the library is loaded somewhere, and a launch of it requests its function
 * first. Until then no launch takes the fast path.
 */
static void kernel_note(CUkernel kernel, CUlibrary library)
{
    struct block entry = {.key = (uintptr_t)kernel,
                          .value = (uintptr_t)library,
                          .kind = BLOCK_KERNEL,
                          .device = -1,
                          .owner = OWNER_NONE};
    struct block *block = blocks_lock(BLOCK_LIBRARY, (uintptr_t)library);
    bool waits = block && !block->value;

    blocks_unlock(BLOCK_LIBRARY, (uintptr_t)library);
    if (!waits)
        return;
    if (!blocks_lock(BLOCK_KERNEL, entry.key) && blocks_add(&entry))
        atomic_add_seq_cst(&modules_kernels, 1);
    blocks_unlock(BLOCK_KERNEL, entry.key);
    gate_end_all_passes();
}

/* Asks the table first, because older drivers cannot tell. */
static bool kernel_library(CUkernel kernel, CUlibrary *libraryp)
{
    struct block *block = blocks_lock(BLOCK_KERNEL, (uintptr_t)kernel);
    bool known = block;

    if (block)
        *libraryp = (CUlibrary)(uintptr_t)block->value;
    blocks_unlock(BLOCK_KERNEL, (uintptr_t)kernel);
    return known || driver->cuKernelGetLibrary(libraryp, kernel) == CUDA_SUCCESS;
}

static bool kernel_visit(const struct block *block, void *data)
{
    if (block->kind != BLOCK_KERNEL || block->value != *(const uint64_t *)data)
        return false;
    atomic_sub_seq_cst(&modules_kernels, 1);
    return true;
}

static void kernels_forget(CUlibrary library)
{
    uint64_t value = (uintptr_t)library;

    if (unlikely(atomic_load_relaxed(&modules_kernels)))
        blocks_sweep(kernel_visit, &value);
}

/* Called before a launch while there are such kernels. */
cold CUresult modules_launch(uint64_t function)
{
    struct block *block = blocks_lock(BLOCK_KERNEL, function);
    bool known = block;
    CUfunction loaded;

    blocks_unlock(BLOCK_KERNEL, function);
    return known ? cuKernelGetFunction(&loaded, (CUkernel)(uintptr_t)function) : CUDA_SUCCESS;
}

CONTROL_EXPORT CUresult cuLibraryGetKernel(CUkernel *pKernel, CUlibrary library, const char *name)
{
    CUresult result = real->cuLibraryGetKernel(pKernel, library, name);

    if (result == CUDA_SUCCESS && atomic_load_relaxed(&n_waiting))
        kernel_note(*pKernel, library);
    return result;
}

CONTROL_EXPORT CUresult cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int numKernels,
                                                  CUlibrary lib)
{
    CUresult result = real->cuLibraryEnumerateKernels(kernels, numKernels, lib);
    unsigned int count = 0;

    /* The elements behind the last kernel are unchanged. */
    if (result == CUDA_SUCCESS && atomic_load_relaxed(&n_waiting) &&
        driver->cuLibraryGetKernelCount(&count, lib) == CUDA_SUCCESS)
        for (unsigned int i = 0; i < numKernels && i < count; i++)
            kernel_note(kernels[i], lib);
    return result;
}

/* Ends a load of a library into a context. A library that does not fit cannot be unloaded while the
 * application uses it. So each later request is refused as well, until there is room. */
static CUresult library_entered(struct load *load, CUlibrary library, uint64_t bit, CUresult result)
{
    bool fits = load_end(load, result, MODULES_DEBT);
    bool loaded = result == CUDA_SUCCESS;
    struct block *block = blocks_lock(BLOCK_LIBRARY, (uintptr_t)library);
    bool refused = block && block->count;

    blocks_unlock(BLOCK_LIBRARY, (uintptr_t)library);
    if (loaded) {
        hidden_note(load, (uintptr_t)library);
        loaded_note(load, (uintptr_t)library);
    }
    if (fits && refused && loaded)
        fits = load->device < 0 || !account_over(load->device, 0);
    if (likely(fits && loaded && !refused)) {
        kernels_forget(library);
        return result;
    }
    block = blocks_lock(BLOCK_LIBRARY, (uintptr_t)library);
    if (block) {
        block->count = loaded && !fits;
        if (!(fits && loaded)) {
            block->value &= ~bit;
            if (!block->value)
                atomic_add_relaxed(&n_waiting, 1);
        }
    }
    blocks_unlock(BLOCK_LIBRARY, (uintptr_t)library);
    return fits ? result : account_refuse(load->device);
}

static CUresult library_loaded(struct load *load, CUresult result, CUlibrary *library)
{
    bool fits = load_end(load, result, 0);

    if (result == CUDA_SUCCESS && pages_slot()) {
        library_note(*library);
        hidden_note(load, (uintptr_t)*library);
        loaded_note(load, (uintptr_t)*library);
    }
    if (likely(fits))
        return result;
    cuLibraryUnload(*library);
    *library = NULL;
    return account_refuse(load->device);
}

CONTROL_EXPORT CUresult cuLibraryLoadData(CUlibrary *library, const void *code,
                                          CUjit_option *jitOptions, void **jitOptionsValues,
                                          unsigned int numJitOptions,
                                          CUlibraryOption *libraryOptions,
                                          void **libraryOptionValues,
                                          unsigned int numLibraryOptions)
{
    struct load load;

    load_begin(&load);
    return library_loaded(&load,
                          real->cuLibraryLoadData(library, code, jitOptions, jitOptionsValues,
                                                  numJitOptions, libraryOptions,
                                                  libraryOptionValues, numLibraryOptions),
                          library);
}

CONTROL_EXPORT CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *fileName,
                                              CUjit_option *jitOptions, void **jitOptionsValues,
                                              unsigned int numJitOptions,
                                              CUlibraryOption *libraryOptions,
                                              void **libraryOptionValues,
                                              unsigned int numLibraryOptions)
{
    struct load load;

    load_begin(&load);
    return library_loaded(
        &load,
        real->cuLibraryLoadFromFile(library, fileName, jitOptions, jitOptionsValues, numJitOptions,
                                    libraryOptions, libraryOptionValues, numLibraryOptions),
        library);
}

CONTROL_EXPORT CUresult cuLibraryUnload(CUlibrary library)
{
    struct block *block = blocks_lock(BLOCK_LIBRARY, (uintptr_t)library);
    struct load load;
    CUresult result;
    struct block gone = {0};
    bool known = block;

    if (block) {
        gone = *block;
        if (!block->value)
            atomic_add_relaxed(&n_waiting, -1u);
        blocks_remove(block);
    }
    blocks_unlock(BLOCK_LIBRARY, (uintptr_t)library);
    unload_begin(&load);
    result = real->cuLibraryUnload(library);
    if (result == CUDA_SUCCESS) {
        kernels_forget(library);
        hidden_ends((uintptr_t)library);
    } else if (known) {
        if (!blocks_lock(BLOCK_LIBRARY, gone.key) && blocks_add(&gone) && !gone.value)
            atomic_add_relaxed(&n_waiting, 1);
        blocks_unlock(BLOCK_LIBRARY, gone.key);
    }
    unload_end(&load, (uintptr_t)library, result);
    /* It may have been loaded on other GPUs as well. */
    if (known && result == CUDA_SUCCESS)
        for (int device = 0; device < (int)pages_n_devices(); device++)
            if (device != load.device)
                account_driver_gives(device, 0);
    return result;
}

CONTROL_EXPORT CUresult cuLibraryGetModule(CUmodule *pMod, CUlibrary library)
{
    struct load load;
    uint64_t bit;
    CUresult result;

    if (likely(!libraries_wait()) || !library_enters(library, &bit))
        return real->cuLibraryGetModule(pMod, library);
    load_begin(&load);
    result = real->cuLibraryGetModule(pMod, library);
    return library_entered(&load, library, bit, result);
}

CONTROL_EXPORT CUresult cuLibraryGetGlobal(CUdeviceptr *dptr, size_t *bytes, CUlibrary library,
                                           const char *name)
{
    struct load load;
    uint64_t bit;
    CUresult result;

    if (likely(!libraries_wait()) || !library_enters(library, &bit))
        return real->cuLibraryGetGlobal(dptr, bytes, library, name);
    load_begin(&load);
    result = real->cuLibraryGetGlobal(dptr, bytes, library, name);
    return library_entered(&load, library, bit, result);
}

CONTROL_EXPORT CUresult cuLibraryGetManaged(CUdeviceptr *dptr, size_t *bytes, CUlibrary library,
                                            const char *name)
{
    struct load load;
    uint64_t bit;
    CUresult result;

    if (likely(!libraries_wait()) || !library_enters(library, &bit))
        return real->cuLibraryGetManaged(dptr, bytes, library, name);
    load_begin(&load);
    result = real->cuLibraryGetManaged(dptr, bytes, library, name);
    return library_entered(&load, library, bit, result);
}

CONTROL_EXPORT CUresult cuLibraryGetUnifiedFunction(void **fptr, CUlibrary library,
                                                    const char *symbol)
{
    struct load load;
    uint64_t bit;
    CUresult result;

    if (likely(!libraries_wait()) || !library_enters(library, &bit))
        return real->cuLibraryGetUnifiedFunction(fptr, library, symbol);
    load_begin(&load);
    result = real->cuLibraryGetUnifiedFunction(fptr, library, symbol);
    return library_entered(&load, library, bit, result);
}

/* Loads at once, where the driver would otherwise wait for a launch. This cannot be undone. */
CONTROL_EXPORT CUresult cuFuncLoad(CUfunction function)
{
    struct load load;
    CUresult result;

    load_begin(&load);
    result = real->cuFuncLoad(function);
    load_end(&load, result, 0);
    hidden_note(&load, (uintptr_t)function); /* ends with its context */
    return result;
}

CONTROL_EXPORT CUresult cuKernelGetFunction(CUfunction *pFunc, CUkernel kernel)
{
    struct load load;
    CUlibrary library;
    uint64_t bit;
    CUresult result;

    if (likely(!libraries_wait()) || !kernel_library(kernel, &library) ||
        !library_enters(library, &bit))
        return real->cuKernelGetFunction(pFunc, kernel);
    load_begin(&load);
    result = real->cuKernelGetFunction(pFunc, kernel);
    return library_entered(&load, library, bit, result);
}

static bool owner_visit(const struct block *block, void *data)
{
    struct block *library = (struct block *)block;
    uint64_t bit = 1ull << *(const uint8_t *)data;

    if (block->kind == BLOCK_LIBRARY && block->value & bit) {
        library->value &= ~bit;
        if (!library->value)
            atomic_add_relaxed(&n_waiting, 1);
    }
    return false;
}

/* Libraries that were loaded into the context no longer are, and another context may get its
 * number. */
void modules_context_gone(uint8_t owner)
{
    open_forget(0, owner);
    blocks_sweep(owner_visit, &owner);
}
