/*
 * The table of bindings: which allocation is bound to which multicast object or logical endpoint.
 */
#include "bindings.h"

static uint64_t binding_mark(uint64_t object, uint64_t device)
{
    return object ^ (device + 1) << 56;
}

static uint64_t binding_key(uint64_t object, uint64_t offset, uint64_t device)
{
    return binding_mark(object, device) ^ (offset << 13 | offset >> 51);
}

static uint64_t binding_offset(const struct block *block)
{
    uint64_t turned = block->key ^ binding_mark(block->size, (uint64_t)block->count - 1);

    return turned >> 13 | turned << 51;
}

/* The `size` of an entry is the object, and its `count` is the ordinal of the device plus 1. */
uint64_t binding_take(uint64_t object, uint64_t offset, uint64_t device)
{
    uint64_t key = binding_key(object, offset, device);
    struct block *block = blocks_lock(BLOCK_BINDING, key);
    uint64_t handle = block && block->size == object ? block->value : 0;

    if (handle)
        blocks_remove(block);
    blocks_unlock(BLOCK_BINDING, key);
    return handle;
}

bool binding_put(uint64_t object, uint64_t offset, uint64_t device, uint64_t handle)
{
    struct block entry = {.key = binding_key(object, offset, device),
                          .size = object,
                          .value = handle,
                          .count = (uint32_t)device + 1,
                          .kind = BLOCK_BINDING,
                          .device = -1,
                          .owner = OWNER_NONE};
    bool known = blocks_lock(BLOCK_BINDING, entry.key);
    bool added = !known && blocks_add(&entry);

    blocks_unlock(BLOCK_BINDING, entry.key);
    return added;
}

static bool binding_visit(const struct block *block, void *data)
{
    struct binding_range *range = data;

    if (range->handle || block->kind != BLOCK_BINDING || block->size != range->object)
        return false;
    if (range->count &&
        (block->count != range->count || binding_offset(block) - range->from >= range->size))
        return false;
    range->handle = block->value;
    return true;
}

uint64_t binding_take_any(struct binding_range range)
{
    range.handle = 0;
    blocks_sweep(binding_visit, &range);
    return range.handle;
}
