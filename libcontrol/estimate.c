/* Learns how long work takes; see estimate.h. */
#include "estimate.h"

#include "os.h"

/* A kind is in one of this many consecutive entries. Its hash selects the first of them. */
#define ESTIMATE_REACH 8

static uint32_t estimate_home(uintptr_t key, uint64_t blocks)
{
    uint64_t hash = ((uint64_t)key ^ blocks * 0xff51afd7ed558ccdull) * 0x9e3779b97f4a7c15ull;

    return (uint32_t)(hash >> 52) % ESTIMATE_N_KINDS;
}

/* Initialises the entry of a kind. Each number is written by one store, because estimate_look()
 * reads concurrently. A reader that finds the key also finds that there are no samples yet, and
 * does not use the duration of the previous kind in this entry. */
static void kind_begin(struct estimate *e, uint32_t kind, uintptr_t key, uint64_t blocks, float ns)
{
    atomic_store_relaxed(&e->kinds[kind].n_samples, 0);
    e->kinds[kind].checked = ESTIMATE_NEVER;
    __atomic_store(&e->kinds[kind].ns, &ns, __ATOMIC_RELAXED);
    atomic_store_relaxed(&e->kinds[kind].blocks, blocks);
    atomic_store_release(&e->kinds[kind].key, key);
}

/*
 * Returns the index of a kind in a table of fixed size. A new kind is added; if all entries that
 * it may use are taken, it replaces the first of them. `guess_ns` is used until the first
 * measurement; 0: unknown.
 */
uint32_t estimate_kind(struct estimate *e, uintptr_t key, uint64_t blocks, uint64_t guess_ns)
{
    float guess = (float)(guess_ns ? guess_ns : ESTIMATE_UNKNOWN_NS);
    uint32_t home = estimate_home(key, blocks);

    for (uint32_t i = 0; i < ESTIMATE_REACH; i++) {
        uint32_t at = (home + i) % ESTIMATE_N_KINDS;

        if (e->kinds[at].key == key && e->kinds[at].blocks == blocks)
            return at;
        if (!e->kinds[at].key) {
            kind_begin(e, at, key, blocks, guess);
            return at;
        }
    }
    kind_begin(e, home, key, blocks, guess);
    return home;
}

/*
 * Looks up a kind and its duration without the lock. Returns false if the kind is not known. While
 * one kind replaces another, the answer may belong to either: it may be wrong once, but the index
 * is always within the table.
 */
bool estimate_look(const struct estimate *e, uintptr_t key, uint64_t blocks, uint32_t *kindp,
                   uint64_t *nsp)
{
    uint32_t home = estimate_home(key, blocks);

    for (uint32_t i = 0; i < ESTIMATE_REACH; i++) {
        uint32_t at = (home + i) % ESTIMATE_N_KINDS;
        uintptr_t found = atomic_load_acquire(&e->kinds[at].key);
        float ns;

        if (!found)
            return false;
        if (found != key || atomic_load_relaxed(&e->kinds[at].blocks) != blocks)
            continue;
        if (atomic_load_acquire(&e->kinds[at].n_samples) < ESTIMATE_N_LEARN)
            return false;
        __atomic_load(&e->kinds[at].ns, &ns, __ATOMIC_RELAXED);
        *kindp = at;
        *nsp = (uint64_t)ns;
        return true;
    }
    return false;
}

uint64_t estimate_ns(const struct estimate *e, uint32_t kind)
{
    return (uint64_t)e->kinds[kind].ns;
}

unsigned estimate_samples(const struct estimate *e, uint32_t kind)
{
    return e->kinds[kind].n_samples;
}

void estimate_add(const struct estimate *e, struct estimate_interval *interval, uint32_t kind,
                  uint32_t count)
{
    for (uint32_t i = 0; i < interval->n_parts; i++) {
        if (interval->parts[i].kind == kind) {
            interval->parts[i].count += count;
            return;
        }
    }
    if (interval->n_parts < ESTIMATE_N_PARTS) {
        interval->parts[interval->n_parts].kind = kind;
        interval->parts[interval->n_parts].count = count;
        interval->n_parts++;
    } else {
        interval->rest_ns += estimate_ns(e, kind) * count;
    }
}

uint64_t estimate_interval_ns(const struct estimate *e, const struct estimate_interval *interval)
{
    uint64_t sum = interval->rest_ns;

    for (uint32_t i = 0; i < interval->n_parts; i++)
        sum += estimate_ns(e, interval->parts[i].kind) * interval->parts[i].count;
    return sum;
}

/* Marks the kinds of an interval as checked, because the interval took no longer than predicted.
 * The mark is valid for ESTIMATE_CHECKED grants. */
void estimate_check(struct estimate *e, const struct estimate_interval *interval, uint32_t grant)
{
    for (uint32_t i = 0; i < interval->n_parts; i++)
        e->kinds[interval->parts[i].kind].checked = grant;
}

bool estimate_unchecked(const struct estimate *e, const struct estimate_interval *interval,
                        uint32_t grant)
{
    for (uint32_t i = 0; i < interval->n_parts; i++)
        if (grant - e->kinds[interval->parts[i].kind].checked > ESTIMATE_CHECKED)
            return true;
    return false;
}

/*
 * Learns from a measured interval. Where kernels wait for each other on several GPUs, or run
 * alongside others' work, a long measurement is mostly waiting. One measurement therefore
 * raises an estimate by the factor `rise` at most, and estimates stay near the shortest
 * measurement. If estimates were means, a collective's kernel would seem too long for a grant,
 * except as its first work.
 */
void estimate_learn(struct estimate *e, const struct estimate_interval *interval,
                    uint64_t measured_ns, float rise)
{
    uint64_t predicted = estimate_interval_ns(e, interval);
    float ratio;

    if (!predicted || !interval->n_parts)
        return;
    ratio = (float)measured_ns / (float)predicted;
    for (uint32_t i = 0; i < interval->n_parts; i++) {
        uint32_t kind = interval->parts[i].kind;
        bool alone = interval->n_parts == 1;
        float gain, step, ns;

        if (!alone && !e->kinds[kind].n_samples)
            continue; /* a kind's first measurement has to be of that kind alone */
        /* The first measurement counts in full, and later ones count for a quarter; a mixture says
         * less about each of its parts. One outlier (a neighbour's time slice, a clock ramp)
         * changes an estimate by a factor of two at most. */
        gain = alone ? (e->kinds[kind].n_samples ? 0.25f : 1.0f) : 0.15f;
        step = 1.0f + gain * (ratio - 1.0f);

        if (e->kinds[kind].n_samples) {
            if (step > rise)
                step = rise;
            if (step < 0.5f)
                step = 0.5f;
        }
        ns = e->kinds[kind].ns * step;
        if (ns < 500.0f)
            ns = 500.0f;
        __atomic_store(&e->kinds[kind].ns, &ns, __ATOMIC_RELAXED);
        /* Stored after the duration, because the first measurements replace a guess. */
        atomic_store_release(&e->kinds[kind].n_samples, e->kinds[kind].n_samples + 1);
    }
}
