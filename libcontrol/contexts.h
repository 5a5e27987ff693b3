/*
 * Declarations shared by the files that handle contexts: the table of contexts (context_table.c),
 * those that the application creates (contexts.c), primary and green ones (primary.c), and their
 * charges (context_charges.c).
 */
#pragma once

#include "control.h"

/* ---- context_table.c ---- */

struct context {
    CUcontext handle; /* NULL: free, or about to be destroyed */
    int device;
    uint32_t n_users; /* 1, plus calls to cuCtxAttach; 0: the entry is free */
    uint64_t moving;  /* charges that may end with it, while it is being destroyed */
};

#define MAX_CONTEXTS 1024 /* places in the table: no GPU has memory for that many contexts */

/* The first OWNER_LAST places also have owner numbers, counted from 1. Places are taken and given
 * back under the lock. */
extern struct context contexts[MAX_CONTEXTS];
extern uint32_t n_places; /* number of places that have ever been taken */
extern uint32_t n_contexts;
extern bool contexts_lost; /* the table was full once: it may lack a context */
extern struct os_lock contexts_lock;

struct primary {
    CUcontext handle;
    uint32_t alive;
    uint32_t n_retained; /* references that this process holds */
};

extern struct primary primaries[LAYOUT_N_DEVICES];

bool context_is_primary(CUcontext handle);
struct context *context_find(CUcontext handle); /* NULL: unknown, or a primary one */
uint8_t context_owner(const struct context *c);

/* ---- context_charges.c ---- */

/* Claims what a context on this device will take. Returns false if it does not fit. */
bool context_begin(struct account_charge *charge, CUdevice dev);
void context_count(int device, int change);

/* Called before and after a call that may end a context. In between, no memory is moved, and the
 * thread that moves memory uses no context. */
void context_destroy_begin(void);
void context_destroy_end(void);
void context_log_ungoverned(void) cold;
void context_gone(int device, uint8_t owner);
void context_last_leaves(int device);
