/* The runner's state and the functions that access the pages, shared by its source files. Files
 * outside the runner include runner.h. */
#pragma once

#include "runner.h"

#include "layout.gen.h"

#include <pthread.h>

struct runner_tenant {
    bool used;
    struct grant_header *header;
    struct grant_device *grant;
    struct ledger_header *ledger;
    uint32_t device;
    bool paused;         /* it is granted nothing */
    bool granted;        /* its page has a grant */
    bool together;       /* its page says that its GPUs are granted together */
    uint64_t waiting_ns; /* since when it has been waiting for a grant; 0: it is not waiting */
    struct runner_waits waits;
};

/* All GPUs of a node. */
struct runners {
    pthread_mutex_t mutex; /* taken while a runner's own is held */
    struct gangs *gangs;
    struct runner *each[GANGS_N_GPUS];
};

struct runner {
    struct runner_config config;
    struct runners *runners; /* NULL: it takes part in no gang */
    uint32_t gpu;            /* its index in runners->each */
    pthread_mutex_t mutex;
    pthread_t thread;
    bool running;
    bool stop;
    int epoll_fd;
    int wake_fd;
    int due_fd; /* written when a process begins to wait for a sample */
    bool due;   /* a wait was reported; no other is reported until runner_due() finds none */
    struct arbiter *arbiter;
    struct arbiter_view view;
    struct runner_tenant tenants[ARBITER_N_TENANTS];
    int32_t n_tenants;  /* highest index in use, plus one */
    bool open;          /* all have an open grant: the GPU's own scheduler divides the time */
    uint64_t unused_at; /* when a grant that no process uses is taken back */
    uint64_t held_at;   /* when the holder was last seen still holding its grant */
};

/* The contents of one container's ledger, added up over its processes. */
struct report {
    bool want;
    uint32_t n_active; /* processes that started work in this grant */
    bool released;     /* and all of them gave it back */
    uint64_t release_ns, residual_ns, busy_ns;
    uint64_t alive_ns; /* oldest last sign of life from the processes that still have the grant */
    uint64_t seen_ns;  /* when a helper last read the grant */
    bool overruns;     /* work of a grant that is over is still running */
};

/* runner_pages.c; the runner's mutex is held. */
void runner_read_ledger(const struct runner_tenant *t, uint32_t epoch, uint64_t now,
                        struct report *reportp);
bool runner_tenant_due(const struct runner_tenant *t, uint64_t now);
void runner_close_grant(struct runner_tenant *t);
void runner_apply(struct runner *runner, const struct arbiter_view *view);
void runner_observe(struct runner *runner, uint64_t now);
void runner_open_all(struct runner *runner, uint64_t now);
void runner_close_all(struct runner *runner);
