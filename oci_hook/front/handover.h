/*
 * Hands the start of a container over to the Python code, for the C programs of the hook and the
 * wrapper runtime.
 *
 * The start of a container that asks for a GPU is prepared by Python code. The fork server
 * (oci_hook/forkserver.py) has the interpreter and the modules loaded, so its forked child begins
 * at once. If the server cannot be reached, has another version, or runs in other namespaces, the
 * program executes the Python script of the same name, which does the same work about 25 ms later.
 */
#pragma once

#include <stdbool.h>

enum {
    HANDOVER_DECLINED = -1, /* no work was begun: execute the script */
    HANDOVER_LOST = -2,     /* the child ended without a status: its work may be incomplete */
    HANDOVER_LATE = -3,     /* the child is stuck, for instance in a stalled root file system */
    STATUS_OS_ERROR = 71,   /* EX_OSERR, as for MountError in oci_hook/errors.py */
    STATUS_CONFIG = 78,     /* EX_CONFIG */
};

/* Makes sure that descriptors 0 to 2 are open, and closes all others. */
void handover_tidy_descriptors(void);

/* Returns the absolute path by which this program was executed; empty if it is unknown. */
const char *handover_program(void);

/*
 * Connects to the fork server below `runtime_dir`. Returns a descriptor, or -1 if no server run
 * by root or by this user listens there.
 */
int handover_connect(const char *runtime_dir);

/*
 * Has the fork server do the work of `role` with these arguments, which end with a NULL. The
 * server's child has this process's standard input and working directory. When the child has ended,
 * its output is copied to standard output and standard error. `seconds` is the child's deadline:
 * 2 s later the child is abandoned, and ends when it can. Returns the child's exit status, or
 * HANDOVER_*. Closes `server`.
 */
int handover_run(int server, const char *role, char *const arguments[], double seconds);

/*
 * Executes the Python script `name` in this installation with `first`, if it is not NULL, and these
 * arguments. Returns only if that fails.
 */
void handover_execute(const char *name, const char *first, char *const arguments[],
                      char *const environment[]);

/* Writes a line to standard error and ends the process. */
_Noreturn void handover_fail(int status, const char *line);
