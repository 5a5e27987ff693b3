/*
 * Measures how much of a GPU's memory the load of a module or library takes, which no driver call
 * reports.
 *
 * The driver's own cuMemGetInfo, called before and after a load, shows the amount as long as no
 * other container allocates or frees memory. Each call takes 4 us on an H200, and a load takes a
 * millisecond. A small amount is provisional until the governor has sampled. A large amount is
 * charged only after that: the load waits for a sample, and is undone if the container is then over
 * its quota. If the sample attributes the memory to no process, and the GPU's unattributed memory
 * has grown, the memory is that of managed variables (H200: 128 MiB, taken during the load). They
 * are charged until the module is unloaded. While other containers start and end, the amount cannot
 * be determined. The load is then recorded, and charged as soon as the amount is known.
 */
#pragma once

#include "control.h"

#define LOADS_DEBT (128ull << 20) /* how far a library may exceed the quota, at first use */

struct load {
    int device;
    size_t before;         /* bytes free on the GPU at the start */
    uint64_t charged;      /* charged to this process at the start; other threads may change it */
    uint64_t overhead;     /* memory_overhead at the start */
    bool sampled;          /* whether the next two are known */
    uint64_t unattributed; /* memory that belongs to no process: see grant_device.unattributed */
    uint32_t n_processes;
    uint64_t returned; /* total that the container's processes have given back */
    uint64_t hidden;   /* found at the end: memory that NVML attributes to no process */
    uint64_t missing;  /* what may have to be charged, but cannot be determined yet */
    uint64_t taken;    /* what the load took, without `hidden` */
};

/* ---- loads.c ---- */

/* To load, call load_begin(), the driver, and load_end(). If the load succeeded, call hidden_note()
 * and loaded_note() afterwards, whatever load_end() returns. */
void load_begin(struct load *load);
bool load_end(struct load *load, CUresult result, uint64_t debt);
uint64_t load_grown(const struct load *load);
void loaded_note(const struct load *load, uint64_t handle);
uint64_t loaded_forget(uint64_t handle);

/* Called before and after a module or library is unloaded. */
void unload_begin(struct load *load);
void unload_end(struct load *load, uint64_t handle, CUresult result);

/* ---- hidden.c ---- */

void hidden_note(const struct load *load, uint64_t handle);
void hidden_ends(uint64_t handle);
void hidden_forget(uint64_t handle, int owner);
void hidden_after_fork(void);
