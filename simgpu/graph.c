/*
 * Executable graphs
 *
 * Each launch submits the graph's commands again, in order.
 */
#include "graph.h"

#include <stdlib.h>
#include <string.h>

struct graph_exec {
    struct object object;
    struct command *commands;
    size_t n;
    struct graph_memory *memory;
    bool free_again; /* a launch may end the allocations of the previous launch */
};

static struct pool execs_pool = POOL(graph_exec, 0x47584530);

bool graph_exec_valid(const struct graph_exec *exec)
{
    return pool_owns(&execs_pool, exec);
}

/* The copy has its own staged bytes, because the same command is performed more than once. */
static bool command_copy(struct command *to, const struct command *from)
{
    *to = *from;
    if (!from->staged)
        return true;
    to->staged = malloc(command_bytes(from));
    if (!to->staged)
        return false;
    memcpy(to->staged, from->staged, command_bytes(from));
    to->from = to->staged;
    return true;
}

CUresult graph_instantiate(const struct graph *graph, bool free_again, struct graph_exec **execp)
{
    struct graph_exec *exec = pool_take(&execs_pool);
    CUresult r;

    if (!exec)
        return CUDA_ERROR_OUT_OF_MEMORY;
    r = graph->memory ? graphmem_instantiate(graph->memory) : CUDA_SUCCESS;
    if (r) {
        pool_give(&execs_pool, exec);
        return r;
    }
    exec->memory = graph->memory;
    exec->free_again = free_again;
    exec->commands = calloc(graph->n ? graph->n : 1, sizeof(*exec->commands));
    if (!exec->commands) {
        graph_exec_free(exec);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    for (; exec->n < graph->n; exec->n++) {
        if (!command_copy(&exec->commands[exec->n], &graph->commands[exec->n])) {
            graph_exec_free(exec);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    *execp = exec;
    return CUDA_SUCCESS;
}

/** graph_upload() - take the memory that a launch would take */
CUresult graph_upload(struct graph_exec *exec)
{
    return exec->memory ? graphmem_take(exec->memory) : CUDA_SUCCESS;
}

/** graph_launch() - submit the graph's commands to a stream; each takes a place in the queue */
CUresult graph_launch(struct graph_exec *exec, struct stream *stream)
{
    if (exec->memory) {
        CUresult r = stream->capture ? CUDA_ERROR_NOT_SUPPORTED
                                     : graphmem_launch(exec->memory, exec->free_again);

        if (r)
            return r;
    }
    for (size_t i = 0; graph_exec_valid(exec) && i < exec->n; i++) {
        struct command command;
        CUresult r;

        if (!command_copy(&command, &exec->commands[i]))
            return CUDA_ERROR_OUT_OF_MEMORY;
        if (command.kind == COMMAND_EVENT)
            event_renew(command.event, stream->context, &command);
        r = stream_submit(stream, &command);
        if (r)
            return r;
    }
    return CUDA_SUCCESS;
}

CUresult graph_exec_free(struct graph_exec *exec)
{
    if (exec->memory)
        graphmem_leave(exec->memory, true);
    commands_free(exec->commands, exec->n);
    pool_give(&execs_pool, exec);
    return CUDA_SUCCESS;
}
