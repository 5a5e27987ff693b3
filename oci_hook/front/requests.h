/*
 * Decides from the bytes of a container's configuration, without parsing them, whether the
 * container asks for a GPU.
 *
 * The check has no false negatives: any text that could contain one of Tidegate's annotations
 * counts as a request, and the Python hook parses it to be sure. oci_hook/quick.py implements the
 * same check, and a test compares the two.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#define CONFIG_LIMIT (4u << 20) /* bytes of config.json, and of the OCI state on stdin */

/* A string in memory, which is freed only when the process ends. */
struct text {
    char *data;
    size_t size;
};

/* Reads `fd` to its end. Returns false if it has more than `limit` bytes or cannot be read. */
bool text_read(int fd, size_t limit, struct text *text);

/* Reads a regular file. Returns false if it is not one, is too large (CONFIG_LIMIT), or cannot be
 * read. */
bool text_read_file(const char *path, struct text *text);

/*
 * Reads a deadline in seconds: digits, with or without a fraction. Returns false for any other
 * form, and for less than 1 ms or more than an hour.
 */
bool text_read_deadline(const char *text, double *seconds);

/* Whether the text contains `tidegate.gpu` or a JSON escape of one of the prefix's characters. */
bool text_may_request(const struct text *text);

/* Whether an OCI state and the config.json of its bundle certainly do not ask for a GPU. */
bool state_requests_nothing(const struct text *state);
