#include "requests.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PREFIX         "tidegate.gpu/"
#define FIRST_SIZE     (64u << 10) /* bytes; most configurations are smaller */
#define MAX_DEADLINE_S 3600        /* as in oci_hook/quick.py */

bool text_read(int fd, size_t limit, struct text *text)
{
    size_t room = FIRST_SIZE;

    *text = (struct text){malloc(room), 0};
    while (text->data) {
        ssize_t n = read(fd, text->data + text->size, room - text->size);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n == 0;
        text->size += (size_t)n;
        if (text->size > limit)
            return false;
        if (text->size == room) {
            room *= 4;
            text->data = realloc(text->data, room);
        }
    }
    return false;
}

bool text_read_file(const char *path, struct text *text)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    struct stat status;
    bool read_whole;

    if (fd < 0)
        return false;
    read_whole =
        fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && text_read(fd, CONFIG_LIMIT, text);
    close(fd);
    return read_whole;
}

bool text_read_deadline(const char *text, double *seconds)
{
    char *end;

    if (strspn(text, "0123456789.") != strlen(text))
        return false;
    *seconds = strtod(text, &end);
    return end != text && !*end && *seconds >= 1e-3 && *seconds <= MAX_DEADLINE_S;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Whether `at` is an escape, \u00 and two digits, for a character in the prefix. */
static bool escapes_prefix(const char *at, const char *end)
{
    int high, low;

    if (end - at < 6 || (at[1] | 0x20) != 'u' || at[2] != '0' || at[3] != '0')
        return false;
    high = hex_digit(at[4]);
    low = hex_digit(at[5]);
    return high >= 0 && low >= 0 && high * 16 + low != 0 && strchr(PREFIX, high * 16 + low);
}

bool text_may_request(const struct text *text)
{
    const char *at = text->data, *end = text->data + text->size;

    if (memmem(text->data, text->size, PREFIX, strlen(PREFIX) - 1))
        return true;
    /* Go escapes "&", "<" and ">", which many command lines contain, but the prefix does not. */
    while ((at = memchr(at, '\\', (size_t)(end - at)))) {
        if (escapes_prefix(at, end))
            return true;
        at++;
    }
    return false;
}

static const char *find(const char *from, const char *end, const char *word)
{
    return memmem(from, (size_t)(end - from), word, strlen(word));
}

bool state_requests_nothing(const struct text *state)
{
    static const char suffix[] = "/config.json";
    const char *end = state->data + state->size, *at, *quote;
    char path[PATH_MAX];
    struct text config;
    size_t length;

    if (text_may_request(state) || find(state->data, end, "\\u00"))
        return false;
    at = find(state->data, end, "\"bundle\"");
    if (!at)
        return false;
    at += strlen("\"bundle\"");
    if (find(at, end, "\"bundle\""))
        return false; /* one of them could be a value */
    while (at < end && *at && strchr(" \t\n\r\v\f", *at))
        at++;
    if (at == end || *at++ != ':')
        return false;
    while (at < end && *at && strchr(" \t\n\r\v\f", *at))
        at++;
    if (at == end || *at++ != '"')
        return false;
    quote = memchr(at, '"', (size_t)(end - at));
    if (!quote || *at != '/')
        return false;
    length = (size_t)(quote - at);
    if (length + sizeof(suffix) > sizeof(path) || memchr(at, '\\', length) ||
        memchr(at, '\0', length))
        return false;
    memcpy(path, at, length);
    memcpy(path + length, suffix, sizeof(suffix));
    return text_read_file(path, &config) && !text_may_request(&config);
}
