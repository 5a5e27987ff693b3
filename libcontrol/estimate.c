/* Durations of work, learned; see estimate.h. */
#include "estimate.h"

#include "prim.h"

/*
 * A table of fixed size: a kind that finds its neighbourhood full takes the place of the first.
 * `guess_ns` is used until the first measurement; 0 for no idea.
 */
uint32_t estimate_kind(struct estimate *e, uintptr_t key, uint64_t blocks, uint64_t guess_ns)
{
    float guess = (float)(guess_ns ? guess_ns : ESTIMATE_UNKNOWN_NS);
    uint64_t hash = ((uint64_t)key ^ blocks * 0xff51afd7ed558ccdull) * 0x9e3779b97f4a7c15ull;
    uint32_t home = (uint32_t)(hash >> 52) % ESTIMATE_N_KINDS;

    for (uint32_t i = 0; i < 8; i++) {
        uint32_t at = (home + i) % ESTIMATE_N_KINDS;

        if (e->kinds[at].key == key && e->kinds[at].blocks == blocks)
            return at;
        if (!e->kinds[at].key) {
            e->kinds[at].key = key;
            e->kinds[at].blocks = blocks;
            e->kinds[at].ns = guess;
            return at;
        }
    }
    e->kinds[home].key = key;
    e->kinds[home].blocks = blocks;
    e->kinds[home].ns = guess;
    e->kinds[home].n_samples = 0;
    return home;
}

uint64_t estimate_ns(const struct estimate *e, uint32_t kind)
{
    return (uint64_t)e->kinds[kind].ns;
}

unsigned estimate_samples(const struct estimate *e, uint32_t kind)
{
    return e->kinds[kind].n_samples;
}

void estimate_add(struct estimate_interval *interval, uint32_t kind)
{
    for (uint32_t i = 0; i < interval->n_parts; i++) {
        if (interval->parts[i].kind == kind) {
            interval->parts[i].count++;
            return;
        }
    }
    if (interval->n_parts < ESTIMATE_N_PARTS) {
        interval->parts[interval->n_parts].kind = kind;
        interval->parts[interval->n_parts].count = 1;
        interval->n_parts++;
    }
}

uint64_t estimate_interval_ns(const struct estimate *e, const struct estimate_interval *interval)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < interval->n_parts; i++)
        sum += estimate_ns(e, interval->parts[i].kind) * interval->parts[i].count;
    return sum;
}

void estimate_learn(struct estimate *e, const struct estimate_interval *interval,
                    uint64_t measured_ns)
{
    uint64_t predicted = estimate_interval_ns(e, interval);
    float ratio;

    if (!predicted || !interval->n_parts)
        return;
    ratio = (float)measured_ns / (float)predicted;
    for (uint32_t i = 0; i < interval->n_parts; i++) {
        uint32_t kind = interval->parts[i].kind;
        bool alone = interval->n_parts == 1;
        float gain, step;

        if (!alone && !e->kinds[kind].n_samples)
            continue; /* a first measurement is of the kind alone */
        /* The first measurement counts whole, later ones a quarter; a mixture says less about each
         * of its parts. One outlier (a neighbour's slice, a clock ramp) moves an estimate by
         * twofold at most. */
        gain = alone ? (e->kinds[kind].n_samples ? 0.25f : 1.0f) : 0.15f;
        step = 1.0f + gain * (ratio - 1.0f);

        if (e->kinds[kind].n_samples) {
            if (step > 2.0f)
                step = 2.0f;
            if (step < 0.5f)
                step = 0.5f;
        }
        e->kinds[kind].ns *= step;
        if (e->kinds[kind].ns < 500.0f)
            e->kinds[kind].ns = 500.0f;
        e->kinds[kind].n_samples++;
    }
}
