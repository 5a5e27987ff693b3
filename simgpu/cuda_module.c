/*
 * Entries: modules, functions and launches
 *
 * A module's image is not executed. The kernels that exist are built in, and any image has them:
 *
 *   burn(u64 ns)                   takes that much time of the GPU
 *   burn_stamp(u64 ns, u64 *slot)  and writes the time of its end, on the GPU's clock, to *slot
 *
 * An image may be the text "// tidegate simgpu module" and lines "kernel NAME"; it then has those
 * kernels only, which may be other names for a burn.
 */
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HEADER     "// tidegate simgpu module"
#define IMAGE_MOST (1u << 20) /* bytes of a module file that are looked at */
#define NAME_MOST  128

struct function {
    struct object object;
    struct module *module;
    struct function *next;
    bool stamps;
    char name[NAME_MOST];
};

struct module {
    struct object object;
    struct context *context;
    uint64_t context_serial;
    bool listed; /* the image named its kernels */
    struct function *functions;
};

static struct pool functions_pool = POOL(function, 0x464e4330);
static struct pool modules_pool = POOL(module, 0x4d4f4430);

static struct function *function_add(struct module *module, const char *name, size_t length)
{
    struct function *function;

    if (length == 0 || length >= NAME_MOST)
        return NULL;
    function = pool_take(&functions_pool);
    if (!function)
        return NULL;
    memcpy(function->name, name, length);
    function->stamps = strcmp(function->name, "burn_stamp") == 0;
    function->module = module;
    function->next = module->functions;
    module->functions = function;
    return function;
}

static void module_free(struct module *module)
{
    while (module->functions) {
        struct function *function = module->functions;

        module->functions = function->next;
        pool_give(&functions_pool, function);
    }
    pool_give(&modules_pool, module);
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

static CUresult load(CUmodule *modulep, const char *image)
{
    struct context *context;
    struct module *module;
    CUresult r = driver_enter_context(&context);

    if (r)
        return r;
    r = modulep && image ? capture_check_unsafe() : CUDA_ERROR_INVALID_VALUE;
    if (r)
        return driver_leave(r);
    module = pool_take(&modules_pool);
    if (!module)
        return driver_leave(CUDA_ERROR_OUT_OF_MEMORY);
    module->context = context;
    module->context_serial = context->serial;
    /* Only text of ours is read to its end: of any other image the length is unknown. */
    if (strncmp(image, HEADER, strlen(HEADER)) == 0)
        module_read(module, image);
    *modulep = module;
    return driver_leave(CUDA_SUCCESS);
}

ENTRY(cuModuleLoadData, CUmodule *modulep, const void *image)
{
    return load(modulep, image);
}

ENTRY(cuModuleLoadDataEx, CUmodule *modulep, const void *image, unsigned int n_options,
      void *options, void **values)
{
    (void)options; /* of a compiler that does not exist */
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
    text = calloc(1, IMAGE_MOST + 1);
    n = text ? fread(text, 1, IMAGE_MOST, file) : 0;
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
    r = pool_owns(&modules_pool, module) ? capture_check_unsafe() : CUDA_ERROR_INVALID_HANDLE;
    if (!r)
        module_free(module);
    return driver_leave(r);
}

ENTRY(cuModuleGetFunction, CUfunction *functionp, CUmodule module, const char *name)
{
    struct function *function;
    CUresult r = driver_enter();

    if (r)
        return r;
    if (!functionp || !name)
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    if (!pool_owns(&modules_pool, module))
        return driver_leave(CUDA_ERROR_INVALID_HANDLE);
    for (function = module->functions; function; function = function->next) {
        if (strcmp(function->name, name) == 0)
            break;
    }
    if (!function && !module->listed &&
        (strcmp(name, "burn") == 0 || strcmp(name, "burn_stamp") == 0)) {
        function = function_add(module, name, strlen(name));
        if (!function)
            return driver_leave(CUDA_ERROR_OUT_OF_MEMORY);
    }
    if (!function)
        return driver_leave(CUDA_ERROR_NOT_FOUND);
    *functionp = function;
    return driver_leave(CUDA_SUCCESS);
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

/* The kernel's parameters, from either of the two ways to pass them. */
static CUresult read_parameters(const struct function *function, void **parameters, void **extra,
                                struct command *command)
{
    uint64_t words[2] = {0};
    size_t n = function->stamps ? 2 : 1;

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
    command->duration = words[0];
    command->stamp = (uint64_t *)(uintptr_t)words[1];
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
    CUresult r = stream_enter(handle, &stream);

    if (r)
        return r;
    if (!pool_owns(&functions_pool, function))
        return driver_leave(CUDA_ERROR_INVALID_HANDLE);
    if (!shape_fits(grid, block))
        return driver_leave(CUDA_ERROR_INVALID_VALUE);
    if (function->module->context != stream->context ||
        function->module->context_serial != stream->context->serial)
        return driver_leave(CUDA_ERROR_INVALID_HANDLE);
    r = read_parameters(function, parameters, extra, &command);
    if (!r)
        r = stream_submit(stream, &command);
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
