/*
 * Stream capture, and the graphs that it produces
 *
 * A graph is the list of commands that were submitted while capturing, in that order; launching it
 * submits them again. Some calls make a capture invalid. Which calls those are depends on the mode
 * of the capture and of the calling thread, as CUDA documents for
 * cuThreadExchangeStreamCaptureMode.
 */
#include "graph.h"

#include <stdlib.h>
#include <string.h>

/* A node that allocates or frees; anything else that a graph does is a command. */
struct graph_node {
    struct object object;
    struct graph *graph;
    struct graph_node *next;
};

static struct pool graphs_pool = POOL(graph, 0x47524630);
static struct pool nodes_pool = POOL(graph_node, 0x474e4f30);

__thread CUstreamCaptureMode thread_capture_mode;

bool graph_valid(const struct graph *graph)
{
    return pool_owns(&graphs_pool, graph);
}

void commands_free(struct command *commands, size_t n)
{
    for (size_t i = 0; i < n; i++)
        free(commands[i].staged);
    free(commands);
}

/** graph_new() - create an empty graph */
CUresult graph_new(struct graph **graphp)
{
    *graphp = pool_take(&graphs_pool);
    return *graphp ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/** graph_memory() - where a graph keeps the pointer to its memory */
struct graph_memory **graph_memory(struct graph *graph)
{
    return &graph->memory;
}

/** graph_add() - add a node that depends on others in the same graph */
CUresult graph_add(struct graph *graph, struct graph_node *const *dependencies, size_t n,
                   struct graph_node **nodep)
{
    struct graph_node *node;

    if (n && !dependencies)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < n; i++) {
        if (!pool_owns(&nodes_pool, dependencies[i]) || dependencies[i]->graph != graph)
            return CUDA_ERROR_INVALID_VALUE;
    }
    node = pool_take(&nodes_pool);
    if (!node)
        return CUDA_ERROR_OUT_OF_MEMORY;
    node->graph = graph;
    node->next = graph->nodes;
    graph->nodes = node;
    *nodep = node;
    return CUDA_SUCCESS;
}

/** graph_remove_last() - take back the node that was added last */
void graph_remove_last(struct graph *graph)
{
    struct graph_node *node = graph->nodes;

    graph->nodes = node->next;
    pool_give(&nodes_pool, node);
}

void graph_free(struct graph *graph)
{
    while (graph->nodes)
        graph_remove_last(graph);
    if (graph->memory)
        graphmem_leave(graph->memory, false);
    commands_free(graph->commands, graph->n);
    pool_give(&graphs_pool, graph);
}

/* Free a capture after detaching all streams from it; no reference to it remains. */
static void capture_free(struct capture *capture)
{
    struct capture **link = &driver.captures;

    for (struct context *context = driver.contexts; context; context = context->next) {
        for (struct stream *stream = context->streams; stream; stream = stream->next) {
            if (stream->capture == capture)
                stream->capture = NULL;
        }
    }
    while (*link != capture)
        link = &(*link)->next;
    *link = capture->next;
    free(capture);
}

/** capture_find() - the capture in which an event was recorded, or NULL if it has ended */
struct capture *capture_find(uint64_t number)
{
    struct capture *capture = driver.captures;

    while (capture && capture->number != number)
        capture = capture->next;
    return capture;
}

/** capture_begin() - start recording the stream's commands in a graph */
CUresult capture_begin(struct stream *stream, CUstreamCaptureMode mode)
{
    static uint64_t captures;
    struct capture *capture;

    if (mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream == &stream->context->legacy)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    capture = calloc(1, sizeof(*capture));
    if (!capture)
        return CUDA_ERROR_OUT_OF_MEMORY;
    capture->graph = pool_take(&graphs_pool);
    if (!capture->graph) {
        free(capture);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    capture->number = ++captures;
    capture->mode = mode;
    capture->thread = current_thread();
    capture->origin = stream;
    capture->next = driver.captures;
    driver.captures = capture;
    stream->capture = capture;
    return CUDA_SUCCESS;
}

/** capture_end() - end a capture and return its graph, or NULL and an error if it is invalid */
CUresult capture_end(struct stream *stream, struct graph **graphp)
{
    struct capture *capture = stream->capture;
    bool invalid;

    *graphp = NULL;
    if (!capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream)
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != current_thread())
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    invalid = capture->invalid;
    if (invalid)
        graph_free(capture->graph);
    else
        *graphp = capture->graph;
    capture_free(capture);
    return invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

/** capture_add() - append a command to the graph; takes ownership of `command->staged` */
CUresult capture_add(struct capture *capture, const struct command *command)
{
    struct graph *graph = capture->graph;

    if (capture->invalid) {
        free(command->staged);
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    if (graph->n == graph->room) {
        size_t room = graph->room ? 2 * graph->room : 16;
        struct command *commands = realloc(graph->commands, room * sizeof(*commands));

        if (!commands) {
            free(command->staged);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        graph->commands = commands;
        graph->room = room;
    }
    graph->commands[graph->n++] = *command;
    return CUDA_SUCCESS;
}

void capture_invalidate(struct capture *capture)
{
    capture->invalid = true;
}

/** capture_check_unsafe() - check whether the thread may make a call that cannot be captured */
CUresult capture_check_unsafe(void)
{
    CUresult r = CUDA_SUCCESS;

    if (thread_capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_SUCCESS;
    for (struct capture *capture = driver.captures; capture; capture = capture->next) {
        bool own = capture->thread == current_thread();

        if (own ? capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED
                : capture->mode != CU_STREAM_CAPTURE_MODE_GLOBAL ||
                      thread_capture_mode != CU_STREAM_CAPTURE_MODE_GLOBAL)
            continue;
        capture_invalidate(capture);
        r = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return r;
}

/** capture_check_legacy() - fail if the NULL stream would have to wait for a capturing stream */
CUresult capture_check_legacy(const struct context *context)
{
    CUresult r = CUDA_SUCCESS;

    if (!driver.captures)
        return r;
    for (struct stream *stream = context->streams; stream; stream = stream->next) {
        if (!stream->capture || (stream->flags & CU_STREAM_NON_BLOCKING))
            continue;
        capture_invalidate(stream->capture);
        r = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    return r;
}

/** capture_drop_stream() - end the capture that a stream began, when the stream is destroyed */
void capture_drop_stream(const struct stream *stream)
{
    if (!stream->capture || stream->capture->origin != stream)
        return;
    graph_free(stream->capture->graph);
    capture_free(stream->capture);
}
