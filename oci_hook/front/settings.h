/* The wrapper runtime's settings, /etc/tidegate/runtime, as far as the C front needs them. */
#pragma once

#include <limits.h>
#include <stdbool.h>

struct settings {
    const char *root;                /* the state directory that --root names; "" if none */
    char runtime[PATH_MAX];          /* the OCI runtime to execute */
    char runtime_for_root[PATH_MAX]; /* what `runtime-for` has for `root`, "" if nothing */
    char runtime_dir[PATH_MAX];      /* where governor and fork server listen */
    bool environment;                /* whether TIDEGATE_* variables of a container count */
};

/*
 * Reads them; a file that is not there leaves the defaults. `root` is what --root names, "" if
 * nothing, NULL if the command line is not understood: `runtime-for` chooses the runtime by it.
 * False where the file has anything that is not understood, or no runtime is found: the script says
 * what is wrong.
 */
bool settings_read(const char *path, const char *root, struct settings *settings);
