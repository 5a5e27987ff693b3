/* A graph: a capture fills it, and launches read it. */
#pragma once

#include "driver.h"

struct graph {
    struct object object;
    struct command *commands;
    size_t n;
    size_t room;
    struct graph_node *nodes;
    struct graph_memory *memory; /* of the graph's allocation nodes, or NULL */
};

void commands_free(struct command *commands, size_t n);
