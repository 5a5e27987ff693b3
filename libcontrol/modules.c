/*
 * Charges modules and libraries in the calls that load, use and unload them.
 *
 * Their code and their global variables take up device memory. What a load takes is measured
 * (loads.h) and given back when the module or library goes away.
 *
 * A library is loaded into a context when its first kernel is requested there. Programs do not
 * expect this request to fail for lack of memory, and the code of a framework is large. A load that
 * leaves the container a little over its quota is therefore counted as debt, like everything that
 * the driver takes on its own. This does not apply to the memory of managed variables.
 */
#include "loads.h"

static uint32_t n_waiting; /* libraries that are not loaded into any context yet */

void modules_after_fork(void)
{
    n_waiting = 0;
    hidden_after_fork();
}

/* ---- modules ---- */

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

/* A mask has a bit for each of the first owners. The others share the last bit, which does not show
 * into which of them the library was loaded. */
#define LIBRARY_SHARED 63

static uint64_t library_bit(uint8_t owner)
{
    return 1ull << (owner < LIBRARY_SHARED ? owner : LIBRARY_SHARED);
}

/* Returns whether the call that follows loads the library into the current context. */
static bool library_enters(CUlibrary library, uint64_t *bitp)
{
    uint8_t owner = contexts_owner();
    struct block *block;
    bool first = false;

    *bitp = library_bit(owner);
    block = blocks_lock(BLOCK_LIBRARY, (uintptr_t)library);
    if (block) {
        first = !(block->value & *bitp) || owner >= LIBRARY_SHARED;
        if (!block->value)
            atomic_add_relaxed(&n_waiting, -1u);
        block->value |= *bitp;
    }
    blocks_unlock(BLOCK_LIBRARY, (uintptr_t)library);
    return first;
}

static bool kernel_visit(const struct block *block, void *data)
{
    if (block->kind != BLOCK_KERNEL || block->value != *(const uint64_t *)data)
        return false;
    atomic_sub_seq_cst(&gate_lazy_kernels, 1);
    return true;
}

static void kernels_forget(CUlibrary library)
{
    uint64_t value = (uintptr_t)library;

    if (unlikely(atomic_load_relaxed(&gate_lazy_kernels)))
        blocks_sweep(kernel_visit, &value);
}

static bool library_waits(CUlibrary library)
{
    struct block *block = blocks_lock(BLOCK_LIBRARY, (uintptr_t)library);
    bool waits = block && !block->value;

    blocks_unlock(BLOCK_LIBRARY, (uintptr_t)library);
    return waits;
}

/*
 * A kernel can be launched by its handle, which loads its library unnoticed. The kernel is
 * therefore kept in the table until the library is loaded into a context, and its function is
 * requested before the kernel is launched. Until then no launch takes the fast path.
 */
static void kernel_note(CUkernel kernel, CUlibrary library)
{
    struct block entry = {.key = (uintptr_t)kernel,
                          .value = (uintptr_t)library,
                          .kind = BLOCK_KERNEL,
                          .device = -1,
                          .owner = OWNER_NONE};

    if (!library_waits(library))
        return;
    if (!blocks_lock(BLOCK_KERNEL, entry.key) && blocks_add(&entry))
        atomic_add_seq_cst(&gate_lazy_kernels, 1);
    blocks_unlock(BLOCK_KERNEL, entry.key);
    /* Another thread may have loaded the library before the kernel was in the table. */
    if (!library_waits(library))
        kernels_forget(library);
    gate_end_all_passes();
}

/* Consults the table first, because older drivers cannot return a kernel's library. */
static bool kernel_library(CUkernel kernel, CUlibrary *libraryp)
{
    struct block *block = blocks_lock(BLOCK_KERNEL, (uintptr_t)kernel);
    bool known = block;

    if (block)
        *libraryp = (CUlibrary)(uintptr_t)block->value;
    blocks_unlock(BLOCK_KERNEL, (uintptr_t)kernel);
    return known || driver->cuKernelGetLibrary(libraryp, kernel) == CUDA_SUCCESS;
}

/* Called before a launch while the table has kernels whose library may not be loaded yet. */
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

    /* The elements after the last kernel are unchanged. */
    if (result == CUDA_SUCCESS && atomic_load_relaxed(&n_waiting) &&
        driver->cuLibraryGetKernelCount(&count, lib) == CUDA_SUCCESS)
        for (unsigned int i = 0; i < numKernels && i < count; i++)
            kernel_note(kernels[i], lib);
    return result;
}

/* Ends a load of a library into a context. A library that does not fit cannot be unloaded while the
 * application is using it, so each later request is refused as well, until there is room. */
static CUresult library_entered(struct load *load, CUlibrary library, uint64_t bit, CUresult result)
{
    bool fits = load_end(load, result, LOADS_DEBT);
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
        if (!(fits && loaded) && block->value) {
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
    /* The library may have been loaded on other GPUs as well. */
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

/* Loads a function now, rather than at its first launch. This cannot be undone. */
CONTROL_EXPORT CUresult cuFuncLoad(CUfunction function)
{
    struct load load;
    CUresult result;

    load_begin(&load);
    result = real->cuFuncLoad(function);
    load_end(&load, result, 0);
    hidden_note(&load, (uintptr_t)function); /* until its context ends */
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
    uint64_t bit = library_bit(*(const uint8_t *)data);

    if (block->kind == BLOCK_LIBRARY && block->value & bit) {
        library->value &= ~bit;
        if (!library->value)
            atomic_add_relaxed(&n_waiting, 1);
    }
    return false;
}

/* A context has ended. Its libraries are not loaded in it any more, and its number may be given to
 * another context. */
void modules_context_gone(uint8_t owner)
{
    if (owner != OWNER_NONE)
        hidden_forget(0, owner);
    blocks_sweep(owner_visit, &owner);
}
