/*
 * Internal declarations of the files that map the grant page and the ledger. The first cuInit
 * (pages_join.c) and the connection to another governor (pages_rejoin.c) use the socket
 * (pages_socket.c) and set what the rest of the library reads (pages.c).
 */
#pragma once

#include "control.h"

#define PAGES_TRY_NS (100 * NS_PER_MS) /* interval between two attempts to connect */

/* ---- pages.c ---- */

struct pages_file {
    uint64_t device, inode;
};

extern uint32_t pages_started;        /* 0 not yet, 1 ready, 2 no grant or refused */
extern struct pages_file ledger_file; /* the file of the ledger in use */

/* ---- pages_socket.c ---- */

extern int governor_fd;
extern uint64_t governor_inode; /* of the socket, by which pages_is_ours() recognises it */

bool pages_identify(int fd, uint64_t *inodep, uint64_t *sizep);
bool pages_identify_file(int fd, struct pages_file *filep);
int pages_socket(int flags);
/* Moves a descriptor to a high number, because some programs manage low ones themselves. */
int pages_high(int fd);
long pages_connect(int fd);
long pages_send(int fd, const char *byte, int flags);

/* The descriptors in an answer: the ledger's and, where memory may be parked, the arena's; or -1.
 */
enum { PAGES_LEDGER, PAGES_ARENA, PAGES_N_FDS };

long pages_receive(int fd, int flags, uint32_t *slotp, int fds[PAGES_N_FDS]);
bool pages_is_ours(int fd, uint64_t own_inode);
bool pages_still_ours(void);

/* ---- pages_join.c ---- */

void pages_after_fork(void);

/* ---- pages_rejoin.c ---- */

void pages_note_own_ledger(void);   /* the ledger in use belongs to this process alone */
extern void (*pages_changed)(void); /* called after a move to another ledger; set by lifecycle.c */
void pages_rejoin_after_fork(void);
