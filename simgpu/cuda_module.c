/*
 * Entry points: modules, functions and launches
 *
 * A module's image is not executed. The kernels are built in, and every image has them unless it
 * lists its own (see below):
 *
 *   burn(u64 ns)                   takes that much GPU time
 *   burn_stamp(u64 ns, u64 *slot)  also writes the time of its end, on the GPU's clock, to *slot
 *   stamp(u64 *slot)               writes that time, and takes 1 us
 *   together, sweep(u64 ns)        other names for burn
 *   persist(u64 ns, u64, u64 *slot, u64 n)
 *                                  burns and stamps n times, into consecutive slots
 *   meet(u64 ns, u32 *own, u32 *other, u64 n)
 *                                  writes n to *own when it begins, spins until *other has reached
 *                                  n, then takes `ns` of GPU time, as a collective's kernel does
 *
 * An image may be the line "// tidegate simgpu module", followed by lines "kernel NAME". Such an
 * image has only those kernels; one whose name is not in the list above behaves like burn. An image
 * that is the text "globals:BYTES" has variables of that size: they take device memory while the
 * module is loaded. A library's module is loaded into a context when one of its functions is first
 * requested there.
 */
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HEADER    "// tidegate simgpu module"
#define GLOBALS   "globals:"
#define MAX_IMAGE (1u << 20) /* maximum number of bytes of a module file that are read */
#define MAX_NAME  128

#define STAMP_TAKES 1000u /* ns */

struct function {
    struct object object;
    struct module *module;
    struct function *next;
    enum { BURNS, BURNS_AND_STAMPS, STAMPS, PERSISTS, MEETS } action;
    char name[MAX_NAME];
};

struct module {
    struct object object;
    struct context *context;
    uint64_t context_serial;
    bool listed; /* the image lists its kernels */
    struct function *functions;
    uintptr_t globals;   /* address of its variables, or 0 */
    struct module *next; /* in the same library */
    bool in_library;
};

struct kernel {
    struct object object;
    struct library *library;
    struct kernel *next;
    char name[MAX_NAME];
};

struct library {
    struct object object;
    char *text; /* the image, if it is text of a known form; otherwise empty */
    struct module *modules;
    struct kernel *kernels;
};

static struct pool functions_pool = POOL(function, 0x464e4330);
static struct pool modules_pool = POOL(module, 0x4d4f4430);
static struct pool libraries_pool = POOL(library, 0x4c494230);
static struct pool kernels_pool = POOL(kernel, 0x4b524e30);

/* The first five are the kernels that bench/burner_kernels.h has in PTX. */
static const struct {
    const char *name;
    int action;
} kernels[] = {
    {"burn", BURNS},  {"stamp", STAMPS},     {"together", BURNS},
    {"sweep", BURNS}, {"persist", PERSISTS}, {"burn_stamp", BURNS_AND_STAMPS},
    {"meet", MEETS},
};

static struct function *function_add(struct module *module, const char *name, size_t length)
{
    struct function *function;

    if (length == 0 || length >= MAX_NAME)
        return NULL;
    function = pool_take(&functions_pool);
    if (!function)
        return NULL;
    memcpy(function->name, name, length);
    for (size_t i = 0; i < sizeof(kernels) / sizeof(kernels[0]); i++) {
        if (strcmp(function->name, kernels[i].name) == 0)
            function->action = kernels[i].action;
    }
    function->module = module;
    function->next = module->functions;
    module->functions = function;
    return function;
}

static void module_free(struct module *module)
{
    bool alive =
        context_valid(module->context) && module->context->serial == module->context_serial;

    if (module->globals && alive)
        (void)memory_release(module->globals);
    while (module->functions) {
        struct function *function = module->functions;

        module->functions = function->next;
        pool_give(&functions_pool, function);
    }
    pool_give(&modules_pool, module);
}

static bool built_in(const char *name)
{
    for (size_t i = 0; i < sizeof(kernels) / sizeof(kernels[0]); i++) {
        if (strcmp(name, kernels[i].name) == 0)
            return true;
    }
    return false;
}

static void module_read(struct module *module, const char *text)
{
    module->listed = true;
    while ((text = strchr(text, '\n'))) {
        text++;
        if (strncmp(text, "kernel ", 7) == 0)
            function_add(module, text + 7, strcspn(text + 7, " \t\r\n"));
    }
}

/* Only text with a known header is read to its end: the length of any other image is unknown. */
static bool is_text(const char *image)
{
    return strncmp(image, HEADER, strlen(HEADER)) == 0 ||
           strncmp(image, GLOBALS, strlen(GLOBALS)) == 0;
}

static CUresult module_new(struct context *context, const char *image, struct module **modulep)
{
    struct module *module = pool_take(&modules_pool);
    size_t globals = 0;
    CUresult r;

    if (!module)
        return CUDA_ERROR_OUT_OF_MEMORY;
    module->context = context;
    module->context_serial = context->serial;
    if (strncmp(image, GLOBALS, strlen(GLOBALS)) == 0)
        globals = strtoull(image + strlen(GLOBALS), NULL, 10);
    else if (is_text(image))
        module_read(module, image);
    r = globals ? memory_allocate(context, ALLOCATION_HIDDEN, globals, &module->globals)
                : CUDA_SUCCESS;
    if (r)
        module_free(module);
    else
        *modulep = module;
    return r;
}

static CUresult load(CUmodule *modulep, const char *image)
{
    struct context *context;
    CUresult r = driver_enter_context(&context);

    if (r)
        return r;
    r = modulep && image ? capture_check_unsafe() : CUDA_ERROR_INVALID_VALUE;
    if (!r)
        r = module_new(context, image, modulep);
    return driver_leave(r);
}

ENTRY(cuModuleLoadData, CUmodule *modulep, const void *image)
{
    return load(modulep, image);
}

ENTRY(cuModuleLoadDataEx, CUmodule *modulep, const void *image, unsigned int n_options,
      void *options, void **values)
{
    (void)options; /* options of a compiler that does not exist here */
    (void)values;
    (void)n_options;
    return load(modulep, image);
}

ENTRY(cuModuleLoad, CUmodule *modulep, const char *path)
{
    char *text;
    FILE *file;
    size_t n;
    CUresult r;

    if (!path)
        return CUDA_ERROR_INVALID_VALUE;
    file = fopen(path, "re");
    if (!file)
        return CUDA_ERROR_FILE_NOT_FOUND;
    text = calloc(1, MAX_IMAGE + 1);
    n = text ? fread(text, 1, MAX_IMAGE, file) : 0;
    fclose(file);
    if (!text)
        return CUDA_ERROR_OUT_OF_MEMORY;
    r = n ? load(modulep, text) : CUDA_ERROR_INVALID_IMAGE;
    free(text);
    return r;
}

ENTRY(cuModuleUnload, CUmodule module)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    r = pool_owns(&modules_pool, module) && !module->in_library ? capture_check_unsafe()
                                                                : CUDA_ERROR_INVALID_HANDLE;
    if (!r)
        module_free(module);
    return driver_leave(r);
}

static CUresult find_function(struct module *module, const char *name, CUfunction *functionp)
{
    struct function *function;

    for (function = module->functions; function; function = function->next) {
        if (strcmp(function->name, name) == 0)
            break;
    }
    if (!function && !module->listed && built_in(name)) {
        function = function_add(module, name, strlen(name));
        if (!function)
            return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (!function)
        return CUDA_ERROR_NOT_FOUND;
    *functionp = function;
    return CUDA_SUCCESS;
}

ENTRY(cuModuleGetFunction, CUfunction *functionp, CUmodule module, const char *name)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!functionp || !name)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    if (!pool_owns(&modules_pool, module))
        return driver_leave(CUDA_ERROR_INVALID_HANDLE);
    return driver_leave(find_function(module, name, functionp));
}

ENTRY(cuLibraryLoadData, CUlibrary *libraryp, const void *image, void *jit_options,
      void **jit_values, unsigned int n_jit_options, void *options, void **values,
      unsigned int n_options)
{
    struct library *library;
    CUresult r = driver_enter();

    (void)jit_options; /* options of a compiler that does not exist here */
    (void)jit_values;
    (void)n_jit_options;
    (void)options;
    (void)values;
    (void)n_options;
    if (r)
        return r;
    if (!libraryp || !image)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    library = pool_take(&libraries_pool);
    if (!library)
        return driver_leave(CUDA_ERROR_OUT_OF_MEMORY);
    library->text = strdup(is_text(image) ? image : "");
    if (!library->text) {
        pool_give(&libraries_pool, library);
        return driver_leave(CUDA_ERROR_OUT_OF_MEMORY);
    }
    *libraryp = library;
    return driver_leave(CUDA_SUCCESS);
}

ENTRY(cuLibraryUnload, CUlibrary library)
{
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!pool_owns(&libraries_pool, library))
        return driver_leave(CUDA_ERROR_INVALID_HANDLE);
    while (library->modules) {
        struct module *module = library->modules;

        library->modules = module->next;
        module_free(module);
    }
    while (library->kernels) {
        struct kernel *kernel = library->kernels;

        library->kernels = kernel->next;
        pool_give(&kernels_pool, kernel);
    }
    free(library->text);
    pool_give(&libraries_pool, library);
    return driver_leave(CUDA_SUCCESS);
}

static bool text_names(const char *text, const char *name)
{
    size_t length = strlen(name);

    if (strncmp(text, HEADER, strlen(HEADER)) != 0)
        return built_in(name);
    while ((text = strchr(text, '\n'))) {
        text++;
        if (strncmp(text, "kernel ", 7) == 0 && strcspn(text + 7, " \t\r\n") == length &&
            strncmp(text + 7, name, length) == 0)
            return true;
    }
    return false;
}

ENTRY(cuLibraryGetKernel, CUkernel *kernelp, CUlibrary library, const char *name)
{
    struct kernel *kernel;
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!kernelp || !name)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    if (!pool_owns(&libraries_pool, library))
        return driver_leave(CUDA_ERROR_INVALID_HANDLE);
    if (strlen(name) >= MAX_NAME || !text_names(library->text, name))
        return driver_leave(CUDA_ERROR_NOT_FOUND);
    kernel = library->kernels;
    while (kernel && strcmp(kernel->name, name) != 0)
        kernel = kernel->next;
    if (!kernel) {
        kernel = pool_take(&kernels_pool);
        if (!kernel)
            return driver_leave(CUDA_ERROR_OUT_OF_MEMORY);
        memcpy(kernel->name, name, strlen(name));
        kernel->library = library;
        kernel->next = library->kernels;
        library->kernels = kernel;
    }
    *kernelp = kernel;
    return driver_leave(CUDA_SUCCESS);
}

/* The library's module in a context, loaded on first use. */
static CUresult library_module(struct library *library, struct context *context, CUmodule *modulep)
{
    CUresult r;

    for (struct module *module = library->modules; module; module = module->next) {
        if (module->context == context && module->context_serial == context->serial) {
            *modulep = module;
            return CUDA_SUCCESS;
        }
    }
    r = module_new(context, library->text, modulep);
    if (r)
        return r;
    (*modulep)->in_library = true;
    (*modulep)->next = library->modules;
    library->modules = *modulep;
    return CUDA_SUCCESS;
}

ENTRY(cuLibraryGetModule, CUmodule *modulep, CUlibrary library)
{
    struct context *context;
    CUresult r = driver_enter_context(&context);

    if (r)
        return r;
    if (!modulep)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    if (!pool_owns(&libraries_pool, library))
        return driver_leave(CUDA_ERROR_INVALID_HANDLE);
    return driver_leave(library_module(library, context, modulep));
}

static CUresult kernel_function(const struct kernel *kernel, struct context *context,
                                CUfunction *functionp)
{
    struct module *module;
    CUresult r = library_module(kernel->library, context, &module);

    return r ? r : find_function(module, kernel->name, functionp);
}

ENTRY(cuKernelGetFunction, CUfunction *functionp, CUkernel kernel)
{
    struct context *context;
    CUresult r = driver_enter_context(&context);

    if (r)
        return r;
    if (!functionp)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    if (!pool_owns(&kernels_pool, kernel))
        return driver_leave(CUDA_ERROR_INVALID_HANDLE);
    return driver_leave(kernel_function(kernel, context, functionp));
}

ENTRY(cuFuncGetAttribute, int *value, CUfunction_attribute attribute, CUfunction function)
{
    static const int values[CU_FUNC_ATTRIBUTE_MAX] = {
        [CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK] = 1024,
        [CU_FUNC_ATTRIBUTE_NUM_REGS] = 16,
        [CU_FUNC_ATTRIBUTE_PTX_VERSION] = 90,
        [CU_FUNC_ATTRIBUTE_BINARY_VERSION] = 90,
    };
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!value || attribute >= CU_FUNC_ATTRIBUTE_MAX)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    if (!pool_owns(&functions_pool, function))
        return driver_leave(CUDA_ERROR_INVALID_HANDLE);
    *value = values[attribute];
    return driver_leave(CUDA_SUCCESS);
}

/* Read the kernel's parameters, which can be passed in two ways. */
static CUresult read_parameters(const struct function *function, void **parameters, void **extra,
                                struct command *command, uint64_t *timesp)
{
    uint64_t words[4] = {0};
    bool four = function->action == PERSISTS || function->action == MEETS;
    size_t n = four ? 4 : function->action == BURNS_AND_STAMPS ? 2 : 1;

    if (parameters) {
        for (size_t i = 0; i < n; i++) {
            if (!parameters[i])
                return CUDA_ERROR_INVALID_VALUE;
            memcpy(&words[i], parameters[i], sizeof(words[i]));
        }
    } else {
        const void *buffer = NULL;
        size_t size = 0;

        for (; extra && *extra != CU_LAUNCH_PARAM_END; extra += 2) {
            if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER)
                buffer = extra[1];
            else if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE)
                size = *(const size_t *)extra[1];
            else
                return CUDA_ERROR_INVALID_VALUE;
        }
        if (!buffer || size < n * sizeof(words[0]))
            return CUDA_ERROR_INVALID_VALUE;
        memcpy(words, buffer, n * sizeof(words[0]));
    }
    *timesp = 1;
    command->duration = words[0];
    switch (function->action) {
    case BURNS:
        break;
    case BURNS_AND_STAMPS:
        command->stamp = (uint64_t *)(uintptr_t)words[1];
        break;
    case STAMPS:
        command->duration = STAMP_TAKES;
        command->stamp = (uint64_t *)(uintptr_t)words[0];
        break;
    case PERSISTS:
        command->stamp = (uint64_t *)(uintptr_t)words[2];
        *timesp = words[3];
        break;
    case MEETS:
        command->kind = COMMAND_MEET;
        command->own = (uint32_t *)(uintptr_t)words[1];
        command->word = (const uint32_t *)(uintptr_t)words[2];
        command->value = (uint32_t)words[3];
        return command->own && command->word ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

static bool shape_fits(const unsigned int grid[3], const unsigned int block[3])
{
    for (int i = 0; i < 3; i++) {
        if (grid[i] == 0 || block[i] == 0 || block[i] > 1024)
            return false;
    }
    return (uint64_t)block[0] * block[1] * block[2] <= 1024;
}

static CUresult launch(CUfunction function, const unsigned int grid[3], const unsigned int block[3],
                       CUstream handle, void **parameters, void **extra)
{
    struct command command = {.kind = COMMAND_KERNEL};
    struct stream *stream;
    uint64_t times = 0;
    CUresult r = stream_enter(handle, &stream);

    if (r)
        return r;
    if (pool_owns(&kernels_pool, function)) /* a CUkernel is accepted, too */
        r = kernel_function((const struct kernel *)function, stream->context, &function);
    if (r)
        return driver_leave(r);
    if (!pool_owns(&functions_pool, function))
        return driver_leave(CUDA_ERROR_INVALID_HANDLE);
    if (!shape_fits(grid, block))
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    if (function->module->context != stream->context ||
        function->module->context_serial != stream->context->serial)
        return driver_leave(CUDA_ERROR_INVALID_HANDLE);
    r = read_parameters(function, parameters, extra, &command, &times);
    for (uint64_t i = 0; !r && i < times; i++) {
        r = stream_submit(stream, &command);
        command.stamp += command.stamp != NULL;
    }
    return driver_leave(r);
}

#define SHAPE                                                                                      \
    unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x,           \
        unsigned int block_y, unsigned int block_z, unsigned int shared
#define GRID  ((const unsigned int[3]){grid_x, grid_y, grid_z})
#define BLOCK ((const unsigned int[3]){block_x, block_y, block_z})

ENTRY(cuLaunchKernel, CUfunction function, SHAPE, CUstream stream, void **parameters, void **extra)
{
    (void)shared;
    return launch(function, GRID, BLOCK, stream, parameters, extra);
}

ENTRY(cuLaunchKernel_ptsz, CUfunction function, SHAPE, CUstream stream, void **parameters,
      void **extra)
{
    (void)shared;
    return launch(function, GRID, BLOCK, PER_THREAD(stream), parameters, extra);
}

ENTRY(cuLaunchCooperativeKernel, CUfunction function, SHAPE, CUstream stream, void **parameters)
{
    (void)shared;
    return launch(function, GRID, BLOCK, stream, parameters, NULL);
}

ENTRY(cuLaunchCooperativeKernel_ptsz, CUfunction function, SHAPE, CUstream stream,
      void **parameters)
{
    (void)shared;
    return launch(function, GRID, BLOCK, PER_THREAD(stream), parameters, NULL);
}

static CUresult launch_config(const CUlaunchConfig *config, CUfunction function, CUstream stream,
                              void **parameters, void **extra)
{
    const unsigned int grid[3] = {config->gridDimX, config->gridDimY, config->gridDimZ};
    const unsigned int block[3] = {config->blockDimX, config->blockDimY, config->blockDimZ};

    return launch(function, grid, block, stream, parameters, extra);
}

ENTRY(cuLaunchKernelEx, const CUlaunchConfig *config, CUfunction function, void **parameters,
      void **extra)
{
    if (!config)
        return CUDA_ERROR_INVALID_VALUE;
    return launch_config(config, function, config->hStream, parameters, extra);
}

ENTRY(cuLaunchKernelEx_ptsz, const CUlaunchConfig *config, CUfunction function, void **parameters,
      void **extra)
{
    if (!config)
        return CUDA_ERROR_INVALID_VALUE;
    return launch_config(config, function, PER_THREAD(config->hStream), parameters, extra);
}
