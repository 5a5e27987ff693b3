/* The wrapper runtime's settings, /etc/tidegate/runtime, as far as the C front needs them. */
#pragma once

#include <limits.h>
#include <stdbool.h>

struct settings {
    char runtime[PATH_MAX];     /* the OCI runtime to execute */
    char runtime_dir[PATH_MAX]; /* where governor and fork server listen */
    bool environment;           /* whether TIDEGATE_* variables of a container count */
};

/*
 * Reads them; a file that is not there leaves the defaults. False where the file has anything
 * that is not understood, or no runtime is found: the script says what is wrong.
 */
bool settings_read(const char *path, struct settings *settings);
