/* Runs the arbiter on the real clock, with one thread per GPU; see runner.c. */
#pragma once

#include "gangs.h"

#define RUNNER_EXPORT __attribute__((visibility("default")))

struct runner_config {
    struct arbiter_config arbiter;
    uint64_t lookahead_ns; /* as in the grant pages */
    uint64_t spin_ns;      /* how long to watch for the end of a grant without sleeping; 0: never */
    uint64_t unused_ns;    /* a grant in which nothing is started for this long is taken back */
};

/* How long a container waited for its grants, from when it was seen to want the GPU. The first
 * count includes waits of at most RUNNER_WAIT_LEAST_NS; the bound doubles with each further count,
 * and the last count includes all longer waits. */
#define RUNNER_WAIT_LEAST_NS 250000u
#define RUNNER_N_WAITS       14

struct runner_waits {
    uint64_t counts[RUNNER_N_WAITS];
    uint64_t ns; /* of all waits together */
};

struct runner;
struct runners;

struct runners *runners_new(const struct runner_config *config);
struct runners *runners_free(struct runners *runners);
int32_t runners_add(struct runners *runners, struct runner *const *each, const int32_t *tenants,
                    uint32_t n);
void runners_remove(struct runners *runners, int32_t gang);
struct runner *runner_new(const struct runner_config *config, struct runners *runners);
int runner_start(struct runner *runner);
struct runner *runner_free(struct runner *runner);
int32_t runner_add(struct runner *runner, uint32_t guarantee, uint32_t limit, void *grant_page,
                   uint32_t device, void *ledger);
void runner_set(struct runner *runner, int32_t tenant, uint32_t guarantee, uint32_t limit);
void runner_pause(struct runner *runner, int32_t tenant, bool paused);
void runner_remove(struct runner *runner, int32_t tenant);
void runner_open(struct runner *runner, bool open);
int runner_watch(struct runner *runner, int fd, struct runner *const *others, uint32_t n);
bool runner_due(struct runner *runner);
int runner_due_fd(const struct runner *runner);
void runner_stats(struct runner *runner, int32_t tenant, struct arbiter_stats *statsp);
void runner_waits(struct runner *runner, int32_t tenant, struct runner_waits *waitsp);
void runner_fence(void);
