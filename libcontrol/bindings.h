/*
 * Records the allocations that are bound to a multicast object or a logical endpoint. A binding
 * keeps its allocation alive.
 */
#pragma once

#include "control.h"

struct binding_range {
    uint64_t object;
    uint32_t count; /* the ordinal of the device plus 1; 0: bindings of all devices */
    uint64_t from;
    uint64_t size;
    uint64_t handle; /* of the binding that was found */
};

/* Returns false if the binding cannot be recorded. */
bool binding_put(uint64_t object, uint64_t offset, uint64_t device, uint64_t handle);

/* These remove a binding and return the allocation, or 0 if no recorded allocation is bound
 * there. */
uint64_t binding_take(uint64_t object, uint64_t offset, uint64_t device);
uint64_t binding_take_any(struct binding_range range);
