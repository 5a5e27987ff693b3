/*
 * Keeps up to date the charge for the memory that one of the driver's pools holds, while several
 * threads make the pool grow and shrink. There is one such charge for each pool of stream-ordered
 * allocations, and one for each GPU's graph memory.
 */
#include "control.h"

static uint64_t held_next(uint64_t word, uint64_t units)
{
    return ((word >> HELD_BITS) + 1) << HELD_BITS | units;
}

void held_settle(struct held *held, int device, bool unseen, uint64_t claimed,
                 bool (*query)(const void *pool, uint64_t *bytes), const void *pool)
{
    uint64_t before, now, bytes, word;

    /* Another thread that replaces the word in the meantime may have queried the pool later than
     * this thread, which then queries the pool again. An answer that changes nothing is written as
     * well, so that no older answer is written after it. */
    do {
        before = now = 0;
        word = atomic_load_acquire(&held->word);
        if (!query(pool, &bytes))
            break;
        before = word & HELD_MASK;
        now = bytes / HELD_UNIT + !!(bytes % HELD_UNIT);
    } while (!__atomic_compare_exchange_n(&held->word, &word, held_next(word, now), false,
                                          __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
    if (now > before) {
        uint64_t grown = (now - before) * HELD_UNIT;

        account_pools(device, grown, 0, unseen);
        if (grown > claimed) {
            account_add(device, grown - claimed, unseen);
        } else {
            account_give(device, claimed - grown, unseen);
            /* The pool may have shrunk before it grew. */
            account_shrunk(device, claimed - grown, unseen);
        }
        account_note_peak(device);
    } else {
        account_give(device, claimed + (before - now) * HELD_UNIT, unseen);
        account_shrunk(device, claimed + (before - now) * HELD_UNIT, unseen);
        account_pools(device, 0, (before - now) * HELD_UNIT, unseen);
    }
    account_landed(device, claimed, unseen);
}

/* Clears the amount and returns it. The caller accounts for what was charged. */
uint64_t held_clear(struct held *held)
{
    uint64_t word = atomic_load_acquire(&held->word);

    while (!__atomic_compare_exchange_n(&held->word, &word, held_next(word, 0), false,
                                        __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        ;
    return (word & HELD_MASK) * HELD_UNIT;
}
