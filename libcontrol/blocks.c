/*
 * The table of the live allocations of this process, by address or handle.
 *
 * There are sixteen open-addressing tables (parts), each with its own lock. Two threads rarely
 * contend for a lock, and an allocation costs the same with ten blocks as with a hundred thousand.
 * A removal leaves no tombstone, because the entries after the removed one move up. All entries of
 * one slab of 2 MiB are in the same part, so a small block and its slab change under one lock.
 *
 * The tables are in separate mappings: malloc belongs to the application, and may have hooks or
 * hold locks.
 */
#include "control.h"

#include <string.h>
#include <sys/mman.h>

#define BLOCKS_N_PARTS 16
#define BLOCKS_FIRST   256 /* initial capacity of a part */

static struct part {
    struct os_lock lock;
    size_t n;
    size_t capacity; /* a power of two, at least twice n while memory suffices */
    struct block *places;
} parts[BLOCKS_N_PARTS];

static uint64_t mix(uint64_t x)
{
    x *= 0x9e3779b97f4a7c15ull;
    return x ^ x >> 32;
}

static struct part *part_of(enum block_kind kind, uint64_t key)
{
    return &parts[mix(kind <= BLOCK_SLAB ? key / ACCOUNT_UNIT : key) % BLOCKS_N_PARTS];
}

static size_t home_of(const struct part *part, unsigned kind, uint64_t key)
{
    return mix(mix(key) + kind) >> 8 & (part->capacity - 1);
}

static void part_put(struct part *part, const struct block *block)
{
    size_t at = home_of(part, block->kind, block->key);

    while (part->places[at].key)
        at = (at + 1) & (part->capacity - 1);
    part->places[at] = *block;
}

static cold bool part_grow(struct part *part)
{
    struct part larger = {.capacity = part->capacity ? 2 * part->capacity : BLOCKS_FIRST};

    larger.places = os_map_memory(larger.capacity * sizeof *larger.places);
    if (!larger.places)
        return false;
    for (size_t i = 0; i < part->capacity; i++)
        if (part->places[i].key)
            part_put(&larger, &part->places[i]);
    if (part->places)
        os_unmap(part->places, part->capacity * sizeof *part->places);
    part->places = larger.places;
    part->capacity = larger.capacity;
    return true;
}

static struct block *part_find(struct part *part, enum block_kind kind, uint64_t key)
{
    if (!part->n)
        return NULL;
    for (size_t at = home_of(part, kind, key); part->places[at].key;
         at = (at + 1) & (part->capacity - 1))
        if (part->places[at].key == key && part->places[at].kind == kind)
            return &part->places[at];
    return NULL;
}

struct block *blocks_lock(enum block_kind kind, uint64_t key)
{
    struct part *part = part_of(kind, key);

    os_lock(&part->lock);
    return key ? part_find(part, kind, key) : NULL;
}

void blocks_unlock(enum block_kind kind, uint64_t key)
{
    os_unlock(&part_of(kind, key)->lock);
}

bool blocks_add(const struct block *block)
{
    struct part *part = part_of(block->kind, block->key);

    if (unlikely((part->n + 1) * 2 > part->capacity) && !part_grow(part) &&
        part->n + 1 >= part->capacity)
        return false;
    part_put(part, block);
    part->n++;
    return true;
}

/* Entries after the removed one move up if that brings them nearer to the position that their hash
 * selects. */
void blocks_remove(struct block *block)
{
    struct part *part = part_of(block->kind, block->key);
    size_t mask = part->capacity - 1;
    size_t hole = (size_t)(block - part->places);

    part->n--;
    for (size_t at = (hole + 1) & mask; part->places[at].key; at = (at + 1) & mask) {
        size_t home = home_of(part, part->places[at].kind, part->places[at].key);

        if (((at - home) & mask) < ((at - hole) & mask))
            continue;
        part->places[hole] = part->places[at];
        hole = at;
    }
    part->places[hole].key = 0;
}

/* A removal may move other entries to positions that have already been visited, so each part is
 * visited again until nothing is removed. */
void blocks_sweep(bool (*visit)(const struct block *block, void *data), void *data)
{
    for (size_t i = 0; i < BLOCKS_N_PARTS; i++) {
        struct part *part = &parts[i];
        bool again;

        os_lock(&part->lock);
        do {
            again = false;
            for (size_t at = 0; at < part->capacity; at++)
                while (part->places[at].key && visit(&part->places[at], data)) {
                    blocks_remove(&part->places[at]);
                    again = true;
                }
        } while (again);
        os_unlock(&part->lock);
    }
}

/* Called with a part locked. Finds another entry that belongs to the same part. */
struct block *blocks_peer(enum block_kind kind, uint64_t key)
{
    return part_find(part_of(kind, key), kind, key);
}

/* The tables describe the parent's allocations. Another thread of the parent may have been changing
 * them at the time of the fork, so the child does not touch their memory. */
void blocks_after_fork(void)
{
    memset(parts, 0, sizeof parts);
}
