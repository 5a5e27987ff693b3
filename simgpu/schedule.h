/* The order in which the GPU serves its contexts; see schedule.c. */
#pragma once

#include "layout.h"

struct gpu_timeline *schedule_current(struct gpu *gpu);
void schedule_advance(struct gpu *gpu, uint64_t now);
uint64_t schedule_predict(const struct gpu *gpu, uint32_t index, uint64_t need,
                          struct gpu_timeline *scratch);
uint64_t schedule_duration(const struct gpu_config *config, uint64_t serial, uint64_t sequence,
                           uint64_t duration);
