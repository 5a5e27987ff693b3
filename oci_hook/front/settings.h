/* Reads the wrapper runtime's settings, /etc/tidegate/runtime, as far as the C front needs them. */
#pragma once

#include <limits.h>
#include <stdbool.h>

struct settings {
    const char *root;                /* the state directory that --root names; "" if none */
    char runtime[PATH_MAX];          /* the OCI runtime to execute */
    char runtime_for_root[PATH_MAX]; /* the runtime that `runtime-for` has for `root`, "" if none */
    char runtime_dir[PATH_MAX];      /* where the governor and the fork server listen */
    bool environment;                /* whether TIDEGATE_* variables of a container count */
    double timeout;                  /* seconds: the hook's deadline, and the script's own */
};

/*
 * Reads the settings; a missing file leaves the defaults. `root` is the directory that --root
 * names, "" if none, NULL if the command line is not understood; `runtime-for` chooses the runtime
 * by it. False if the file has anything that is not understood, or if no runtime is found; then the
 * script reports what is wrong.
 */
bool settings_read(const char *path, const char *root, struct settings *settings);
