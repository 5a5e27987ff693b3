/*
 * Estimates of how long a piece of work takes when it has the GPU to itself.
 *
 * Work is identified by what is launched (a function or an executable graph) and by the size of the
 * launch. Its duration is learned from intervals between two markers of one stream. An interval
 * with work of one kind gives the duration of that kind directly. In an interval with several kinds
 * the error of the prediction is divided among them in proportion, which converges on the kinds'
 * own durations as mixtures vary.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define ESTIMATE_N_KINDS    4096
#define ESTIMATE_UNKNOWN_NS 50000 /* assumed before the first measurement */
#define ESTIMATE_N_PARTS    8
#define ESTIMATE_N_LEARN    2  /* measurements until a kind is known */
#define ESTIMATE_CHECKED    32 /* grants for which a check of a kind's duration is valid */

#define ESTIMATE_NEVER 0x80000000u /* never checked; no process has that many grants */

/* Maximum factor by which one measurement raises the duration of a kind, because it may include
 * other containers' time. Where containers run at the same time, one measurement in four is too
 * long by a tenth or more for that reason (on an H200; only the recognised cases are counted). Work
 * that has become slower is recognised within a hundred measurements. */
#define ESTIMATE_RISE        2.0f
#define ESTIMATE_RISE_WAITS  1.02f /* it may wait for another GPU */
#define ESTIMATE_RISE_BESIDE 1.01f /* others' work may run alongside it */

/* What was launched between two markers. */
struct estimate_interval {
    uint32_t n_parts;
    uint64_t rest_ns; /* predicted for work of further kinds, whose estimates stay as they are */
    struct {
        uint32_t kind;
        uint32_t count;
    } parts[ESTIMATE_N_PARTS];
};

/* What is known about the work on one GPU. It is guarded by the lock of the GPU's gate, except that
 * estimate_look() reads it without the lock. */
struct estimate {
    struct {
        uintptr_t key;
        uint64_t blocks;
        float ns;
        uint32_t n_samples;
        uint32_t checked; /* last grant in which a longer duration would have been noticed */
    } kinds[ESTIMATE_N_KINDS];
};

uint32_t estimate_kind(struct estimate *e, uintptr_t key, uint64_t blocks, uint64_t guess_ns);
bool estimate_look(const struct estimate *e, uintptr_t key, uint64_t blocks, uint32_t *kindp,
                   uint64_t *nsp);
uint64_t estimate_ns(const struct estimate *e, uint32_t kind);
unsigned estimate_samples(const struct estimate *e, uint32_t kind);
void estimate_add(const struct estimate *e, struct estimate_interval *interval, uint32_t kind,
                  uint32_t count);
uint64_t estimate_interval_ns(const struct estimate *e, const struct estimate_interval *interval);
void estimate_check(struct estimate *e, const struct estimate_interval *interval, uint32_t grant);
bool estimate_unchecked(const struct estimate *e, const struct estimate_interval *interval,
                        uint32_t grant);
void estimate_learn(struct estimate *e, const struct estimate_interval *interval,
                    uint64_t measured_ns, float rise);
