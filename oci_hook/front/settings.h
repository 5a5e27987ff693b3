/* Reads the settings in /etc/tidegate/runtime that the wrapper runtime's C program needs. */
#pragma once

#include <limits.h>
#include <stdbool.h>

struct settings {
    const char *root;                /* the state directory that --root names; "" if none */
    char runtime[PATH_MAX];          /* the OCI runtime to execute */
    char runtime_for_root[PATH_MAX]; /* the one that `runtime-for` names for `root`; "" if none */
    char runtime_dir[PATH_MAX];      /* where the governor and the fork server listen */
    bool environment;                /* whether TIDEGATE_* variables may request a GPU */
    double timeout;                  /* seconds: deadline of the hook, and of the Python script */
};

/*
 * Reads the settings; a missing file means the defaults. `root` is the directory that --root names,
 * by which `runtime-for` chooses the runtime: "" if none, NULL if the command line has an unknown
 * form. Returns false if a line in the file is not in the expected form, or if no runtime is found;
 * the wrapper runtime's Python script then handles the call, or reports the error.
 */
bool settings_read(const char *path, const char *root, struct settings *settings);
