/*
 * Whether a container asks for a GPU, told from the bytes of its configuration without parsing
 * them.
 *
 * The answer errs on one side only: a text that could spell one of our annotations counts as a
 * request, and the Python hook parses it to be sure. oci_hook/entry.py has the same two functions,
 * and a test holds them against each other.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#define CONFIG_LIMIT (4u << 20) /* bytes of config.json, and of the OCI state on stdin */

/* A text in memory that is freed with it. */
struct text {
    char *data;
    size_t size;
};

/* Reads `fd` to its end. False when it holds more than `limit` bytes or cannot be read. */
bool text_read(int fd, size_t limit, struct text *text);

/* Reads a regular file. False when it is not one, is larger than CONFIG_LIMIT, or cannot be read.
 */
bool text_read_file(const char *path, struct text *text);

/* Whether the text has `tidegate.gpu`, or a JSON escape of one of the prefix's characters. */
bool text_may_request(const struct text *text);

/* Whether an OCI state, and the config.json of its bundle, certainly ask for nothing. */
bool state_requests_nothing(const struct text *state);
