/*
 * Gangs: containers that use several GPUs and are granted them together.
 *
 * A collective's kernel on one GPU spins until its counterpart runs on another. A container that
 * uses several GPUs, a gang, therefore has its turn on all of them together. The turn
 * begins when the arbiter of each of these GPUs would choose the gang, and it ends on all of them
 * at the same time. While it lasts, no other gang that uses one of these GPUs has a turn. A gang
 * that is waiting for another gang's GPU thus holds none itself, and no two gangs wait for each
 * other. Containers with one GPU wait for no other GPU; they run where no turn is in progress.
 *
 * A GPU counts as used for a second after the container's last work or wait there: a container that
 * uses only one of its GPUs is not a gang.
 *
 * Like the arbiter, this policy has no clock, no threads and no locks. gangs_step() steps one GPU's
 * arbiter, and returns which other GPUs have to be stepped as a result.
 */
#pragma once

#include "arbiter.h"

#define GANGS_N_GPUS 32 /* of a node; a set of them is a bit mask in one word */
#define GANGS_N      256
#define GANGS_N_OWN  16 /* GPUs of one gang */

struct gangs;

ARBITER_EXPORT struct gangs *gangs_new(const struct arbiter_config *config);
ARBITER_EXPORT struct gangs *gangs_free(struct gangs *gangs);
ARBITER_EXPORT int32_t gangs_add(struct gangs *gangs, const uint32_t *gpus, const int32_t *tenants,
                                 uint32_t n);
ARBITER_EXPORT void gangs_remove(struct gangs *gangs, int32_t gang);
ARBITER_EXPORT void gangs_leave(struct gangs *gangs, uint32_t gpu);
bool gangs_concern(struct gangs *gangs, uint32_t gpu);
ARBITER_EXPORT uint64_t gangs_step(struct gangs *gangs, uint32_t gpu, struct arbiter *arbiter,
                                   uint64_t now, struct arbiter_view *viewp);
