/*
 * Modules and libraries: their code and their global variables take device memory, and nobody says
 * how much.
 *
 * The driver's own cuMemGetInfo, before and after, does, as long as the neighbours are quiet; 4 us
 * each on an H200, beside a load of a millisecond. Little is provisional until the governor has
 * looked. Much is not believed before that: the load waits for a look, and is undone if the
 * container is over its quota then. What the look does not find in the process, although the GPU
 * has more that is nobody's, is managed variables (H200: 128 MiB of them, taken at the load): they
 * are charged until the module ends.
 *
 * A library is loaded into a context when its first kernel is asked for there.
 */
#include "control.h"

#include <string.h>

#define MODULES_MUCH    (16ull << 20)
#define MODULES_WAIT_NS (500 * NS_PER_MS)
#define MODULES_N_LOOKS 3
#define MODULES_N_TRIES 50
#define MODULES_NAP_NS  (100 * NS_PER_US)

static uint32_t n_waiting; /* libraries that were loaded into no context yet */
static uint32_t n_hidden;  /* modules and libraries with memory that NVML does not attribute */

/* What was given back of it since the governor looked, who still tells that it is nobody's. */
static struct {
    uint64_t bytes, ns;
} hidden_given[LAYOUT_N_DEVICES];
static struct prim_lock hidden_lock;

struct load {
    int device;
    size_t before;     /* free on the GPU */
    uint64_t charged;  /* to this process: its other threads allocate meanwhile */
    uint64_t overhead; /* what the governor had found */
    uint64_t nobodys;  /* of the GPU */
    uint64_t hidden;   /* what it charged at last */
};

void modules_after_fork(void)
{
    memset(hidden_given, 0, sizeof hidden_given);
    hidden_lock.word = 0;
    n_waiting = 0;
    n_hidden = 0;
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

static void hidden_give(int device, uint64_t size)
{
    uint64_t looked = atomic_load_acquire(&pages_grant_device((unsigned)device)->reconciled_ns);

    prim_lock(&hidden_lock);
    if (hidden_given[device].ns <= looked)
        hidden_given[device].bytes = 0;
    hidden_given[device].bytes += size;
    hidden_given[device].ns = prim_now();
    prim_unlock(&hidden_lock);
}

static uint64_t nobodys_now(const struct load *load)
{
    uint64_t looked = atomic_load_acquire(&grant_of(load)->reconciled_ns);
    uint64_t nobodys = atomic_load_relaxed(&grant_of(load)->unattributed);
    uint64_t given;

    prim_lock(&hidden_lock);
    given = hidden_given[load->device].ns > looked ? hidden_given[load->device].bytes : 0;
    prim_unlock(&hidden_lock);
    return nobodys > given ? nobodys - given : 0;
}

static void load_begin(struct load *load)
{
    load->device = pages_index_current();
    if (load->device < 0)
        return;
    load->hidden = 0;
    load->overhead = atomic_load_relaxed(&grant_of(load)->memory_overhead);
    load->nobodys = nobodys_now(load);
    load->charged = charged_now(load->device);
    load->before = free_now();
}

/* What is taken of the GPU since, and was not charged to this process. */
static uint64_t load_taken(const struct load *load)
{
    size_t after = free_now();
    uint64_t charged = charged_now(load->device);
    uint64_t taken = load->before > after ? load->before - after : 0;

    charged = charged > load->charged ? charged - load->charged : 0;
    return taken > charged ? taken - charged : 0;
}

static uint64_t above(uint64_t now, uint64_t before)
{
    return now > before ? now - before : 0;
}

/* After a look: what was taken, is not found in the process, and is nobody's in the GPU. */
static uint64_t load_hidden(const struct load *load, uint64_t taken)
{
    uint64_t found = above(atomic_load_relaxed(&grant_of(load)->memory_overhead), load->overhead);
    uint64_t nobodys = above(atomic_load_relaxed(&grant_of(load)->unattributed), load->nobodys);
    uint64_t rest = above(taken, found);

    return rest < nobodys ? rest : nobodys;
}

/* Charges what is hidden. A look during which memory moved says nothing of it: then another. */
static void load_reveal(struct load *load, uint64_t taken)
{
    for (int i = 0; i < MODULES_N_LOOKS; i++) {
        uint64_t hidden = load_hidden(load, taken);

        if (hidden >= ACCOUNT_UNIT) {
            load->hidden = hidden;
            account_add(load->device, hidden, true);
            return;
        }
        if (above(taken, above(atomic_load_relaxed(&grant_of(load)->memory_overhead),
                               load->overhead)) < MODULES_MUCH)
            return;
        account_driver_takes(load->device, 0);
        if (!account_await_look(load->device, prim_now(), MODULES_WAIT_NS))
            return;
    }
}

/* What was charged so ends with the module, or with its context. */
static void hidden_note(const struct load *load, uint64_t key)
{
    struct block block = {.key = key,
                          .size = load->hidden,
                          .kind = BLOCK_HIDDEN,
                          .device = (int8_t)load->device,
                          .flags = BLOCK_UNSEEN,
                          .owner = contexts_owner()};
    struct block *known;

    if (likely(load->device < 0 || !load->hidden))
        return;
    known = blocks_lock(BLOCK_HIDDEN, key);
    if (known)
        known->size += block.size;
    else if (blocks_add(&block))
        atomic_add_relaxed(&n_hidden, 1);
    blocks_unlock(BLOCK_HIDDEN, key);
    if (!known)
        atomic_add_relaxed(&pages_ledger_device((unsigned)load->device)->blocks, 1);
    account_note_peak(load->device);
}

static void hidden_ends(uint64_t key)
{
    struct block gone = {.device = -1};
    struct block *block;

    if (likely(!atomic_load_relaxed(&n_hidden)))
        return;
    block = blocks_lock(BLOCK_HIDDEN, key);
    if (block) {
        gone = *block;
        blocks_remove(block);
    }
    blocks_unlock(BLOCK_HIDDEN, key);
    if (gone.device < 0)
        return;
    atomic_add_relaxed(&n_hidden, -1u);
    atomic_add_relaxed(&pages_ledger_device((unsigned)gone.device)->blocks, -1ull);
    hidden_give(gone.device, gone.size);
    account_give(gone.device, gone.size, true);
}

/* False if the container is over its quota now: then the load has to be undone. */
static bool load_end(struct load *load, CUresult result)
{
    uint64_t now, taken;

    if (load->device < 0 || result != CUDA_SUCCESS)
        return true;
    taken = load_taken(load);
    now = prim_now();
    if (taken < MODULES_MUCH) {
        account_driver_takes(load->device, taken);
        return true;
    }
    account_driver_takes(load->device, 0);
    if (account_await_look(load->device, now, MODULES_WAIT_NS)) {
        load_reveal(load, taken);
    } else {
        /* What another thread frees is charged for a moment longer than it is taken. What a module
         * takes stays. */
        for (int i = 0; i < MODULES_N_TRIES && taken >= MODULES_MUCH; i++) {
            uint64_t again;

            prim_sleep(MODULES_NAP_NS);
            again = load_taken(load);
            taken = again < taken ? again : taken;
        }
        account_driver_takes(load->device, taken);
    }
    return !account_over(load->device);
}

/*
 * What is unloaded is given back, or kept by the driver for the next. The governor's next look
 * tells; while there is none to look, nothing would ever lower what loads have added up to.
 */
static void unload_begin(struct load *load)
{
    load->device = pages_index_current();
    load->before = load->device >= 0 && account_alone() ? free_now() : 0;
}

static void unload_end(struct load *load, CUresult result)
{
    size_t after;

    if (load->device < 0 || result != CUDA_SUCCESS)
        return;
    after = load->before ? free_now() : 0;
    account_driver_gives(load->device, after > load->before ? after - load->before : 0);
}

static CUresult module_loaded(struct load *load, CUresult result, CUmodule *module)
{
    bool fits = load_end(load, result);

    if (result == CUDA_SUCCESS)
        hidden_note(load, (uintptr_t)*module);
    if (likely(fits))
        return result;
    real->cuModuleUnload(*module);
    hidden_ends((uintptr_t)*module);
    *module = NULL;
    account_driver_gives(load->device, 0);
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
    unload_end(&load, result);
    return result;
}

/* ---- libraries ---- */

static void library_note(CUlibrary library)
{
    struct block block = {
        .key = (uintptr_t)library, .kind = BLOCK_LIBRARY, .device = -1, .owner = OWNER_NONE};

    if (!blocks_lock(BLOCK_LIBRARY, block.key) && blocks_add(&block))
        atomic_add_relaxed(&n_waiting, 1);
    blocks_unlock(BLOCK_LIBRARY, block.key);
}

/* True if the library is loaded into the current context by what follows. */
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

/* It does not fit, or could not be loaded. Under the application a library cannot be unloaded; who
 * asks again is told the same until there is room. */
static CUresult library_entered(struct load *load, CUlibrary library, uint64_t bit, CUresult result)
{
    bool fits = load_end(load, result);
    bool loaded = result == CUDA_SUCCESS;
    struct block *block = blocks_lock(BLOCK_LIBRARY, (uintptr_t)library);
    bool refused = block && block->count;

    blocks_unlock(BLOCK_LIBRARY, (uintptr_t)library);
    if (loaded)
        hidden_note(load, (uintptr_t)library);
    if (fits && refused && loaded)
        fits = load->device < 0 || !account_over(load->device);
    if (likely(fits && loaded && !refused))
        return result;
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
    bool fits = load_end(load, result);

    if (result == CUDA_SUCCESS && load->device >= 0) {
        library_note(*library);
        hidden_note(load, (uintptr_t)*library);
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
    bool known = block;

    if (block) {
        if (!block->value)
            atomic_add_relaxed(&n_waiting, -1u);
        blocks_remove(block);
    }
    blocks_unlock(BLOCK_LIBRARY, (uintptr_t)library);
    unload_begin(&load);
    result = real->cuLibraryUnload(library);
    if (result == CUDA_SUCCESS)
        hidden_ends((uintptr_t)library);
    unload_end(&load, result);
    /* It was perhaps loaded on other GPUs, too. */
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

    if (likely(!atomic_load_relaxed(&n_waiting)) || !library_enters(library, &bit))
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

    if (likely(!atomic_load_relaxed(&n_waiting)) || !library_enters(library, &bit))
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

    if (likely(!atomic_load_relaxed(&n_waiting)) || !library_enters(library, &bit))
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

    if (likely(!atomic_load_relaxed(&n_waiting)) || !library_enters(library, &bit))
        return real->cuLibraryGetUnifiedFunction(fptr, library, symbol);
    load_begin(&load);
    result = real->cuLibraryGetUnifiedFunction(fptr, library, symbol);
    return library_entered(&load, library, bit, result);
}

/* Loaded for certain, where the driver would wait for a launch. It cannot be undone. */
CONTROL_EXPORT CUresult cuFuncLoad(CUfunction function)
{
    struct load load;
    CUresult result;

    load_begin(&load);
    result = real->cuFuncLoad(function);
    load_end(&load, result);
    hidden_note(&load, (uintptr_t)function); /* its context ends it */
    return result;
}

CONTROL_EXPORT CUresult cuKernelGetFunction(CUfunction *pFunc, CUkernel kernel)
{
    struct load load;
    CUlibrary library;
    uint64_t bit;
    CUresult result;

    if (likely(!atomic_load_relaxed(&n_waiting)) ||
        driver->cuKernelGetLibrary(&library, kernel) != CUDA_SUCCESS ||
        !library_enters(library, &bit))
        return real->cuKernelGetFunction(pFunc, kernel);
    load_begin(&load);
    result = real->cuKernelGetFunction(pFunc, kernel);
    return library_entered(&load, library, bit, result);
}
