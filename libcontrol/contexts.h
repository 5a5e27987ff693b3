/*
 * What the files on contexts share: those that the application creates (contexts.c), the primary
 * one and green ones (primary.c), and what all of them take (context_charges.c).
 */
#pragma once

#include "control.h"

/* ---- primary.c ---- */

struct primary {
    CUcontext handle;
    uint32_t alive;
    uint32_t n_retained; /* references that this process holds */
};

extern struct primary primaries[LAYOUT_N_DEVICES];

/* ---- context_charges.c ---- */

/* Claims what a context on this device will take. Returns false if it does not fit. */
bool context_begin(struct account_charge *charge, CUdevice dev);
void context_count(int device, int change);
void context_told_elsewhere(void) cold;
void context_gone(int device, uint8_t owner);
void context_last_leaves(int device);
