/*
 * What hook and wrapper runtime have in common: the way to the fork server and to the interpreter.
 *
 * A start that asks for a GPU is prepared by Python. The fork server (oci_hook/forkserver.py) has
 * the interpreter and the modules loaded, so a forked child of it begins at once. Where the server
 * cannot be reached, is of another version, or lives in other namespaces, the program executes the
 * Python script of the same name, which does the same some 25 ms later.
 */
#pragma once

#include <stdbool.h>

enum {
    HANDOVER_DECLINED = -1, /* nothing was begun: execute the script */
    HANDOVER_LOST = -2,     /* the child ended without a status: what it did is not known */
    STATUS_OS_ERROR = 71,   /* EX_OSERR, as MountError in oci_hook/errors.py */
    STATUS_CONFIG = 78,     /* EX_CONFIG */
};

/* Makes sure that descriptors 0 to 2 are open and closes all others. */
void handover_tidy_descriptors(void);

/* The absolute path by which this program was executed; empty if there is none. */
const char *handover_program(void);

/*
 * Connects to the fork server below `runtime_dir`. Gives a descriptor, or -1 where there is none
 * that root or this user listens on.
 */
int handover_connect(const char *runtime_dir);

/*
 * Has the fork server do what the script would do as `role` with these arguments, a NULL behind
 * the last one. The child has this process's standard descriptors and working directory. Gives its
 * exit status, or HANDOVER_*. Closes `server`.
 */
int handover_run(int server, const char *role, char *const arguments[]);

/*
 * Executes the Python script `name` of this installation with `first`, if it is not NULL, and these
 * arguments. Returns only where that fails, with errno.
 */
void handover_execute(const char *name, const char *first, char *const arguments[],
                      char *const environment[]);

/* Writes a line to standard error and ends the process. */
_Noreturn void handover_fail(int status, const char *line);
