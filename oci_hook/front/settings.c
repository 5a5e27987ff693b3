#include "settings.h"

#include "requests.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define DEADLINE_S 20 /* as in oci_hook/quick.py */
#define FILE_LIMIT (64u << 10)

/* Whether a setting is one that only the script reads. */
static bool is_other(const char *name)
{
    static const char *const names[] = {"hook", "dev-dir", "log"};

    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
        if (strcmp(name, names[i]) == 0)
            return true;
    return false;
}

/* Takes `DIRECTORY RUNTIME`: the runtime to use if --root names that state directory. */
static bool take_runtime_for(const char *value, struct settings *settings)
{
    size_t length = strcspn(value, " ");
    const char *program = value + length;

    program += strspn(program, " \t");
    if (!settings->root || *value != '/' || *program != '/')
        return false;
    if (strlen(settings->root) == length && memcmp(settings->root, value, length) == 0)
        strcpy(settings->runtime_for_root, program);
    return true;
}

/* Takes the deadline from the hook's options: --timeout and its value, in one word or two. */
static bool take_hook_arguments(const char *value, struct settings *settings)
{
    static const char option[] = "--timeout";
    const char *at = value;

    while ((at = strstr(at, option))) {
        char seconds[32];
        size_t length;

        at += strlen(option);
        at += *at == '=' ? 1 : strspn(at, " \t");
        length = strcspn(at, " \t");
        if (length >= sizeof(seconds))
            return false;
        memcpy(seconds, at, length);
        seconds[length] = '\0';
        if (!text_read_deadline(seconds, &settings->timeout))
            return false;
    }
    return true;
}

static bool take(const char *name, const char *value, struct settings *settings)
{
    if (strcmp(name, "environment") == 0) {
        settings->environment = strcmp(value, "allow") == 0;
        return settings->environment || strcmp(value, "ignore") == 0;
    }
    if (strlen(value) >= PATH_MAX)
        return false;
    if (strcmp(name, "runtime") == 0)
        strcpy(settings->runtime, value);
    else if (strcmp(name, "runtime-dir") == 0)
        strcpy(settings->runtime_dir, value);
    else if (strcmp(name, "runtime-for") == 0)
        return take_runtime_for(value, settings);
    else if (strcmp(name, "hook-arguments") == 0)
        return take_hook_arguments(value, settings);
    else
        return is_other(name);
    return true;
}

/* Takes one line without its newline: a name, a blank and a value. */
static bool take_line(char *line, struct settings *settings)
{
    char *end, *value;

    for (const char *c = line; *c; c++)
        if ((*c < ' ' && *c != '\t') || *c == 0x7f || (*c & 0x80))
            return false; /* the script decides whether the text is valid */
    line += strspn(line, " \t");
    for (end = line + strlen(line); end > line && strchr(" \t", end[-1]); end--)
        end[-1] = '\0';
    if (!*line || *line == '#')
        return true;
    value = strchr(line, ' ');
    if (!value)
        return false;
    *value++ = '\0';
    value += strspn(value, " \t");
    return *value && take(line, value, settings);
}

static bool find_runtime(struct settings *settings)
{
    static const char *const paths[] = {"/usr/bin/runc",          "/usr/sbin/runc",
                                        "/usr/local/sbin/runc",   "/usr/bin/crun",
                                        "/usr/libexec/crio/crun", "/usr/libexec/crio/runc"};

    if (*settings->runtime_for_root)
        strcpy(settings->runtime, settings->runtime_for_root);

    for (size_t i = 0; i < sizeof(paths) / sizeof(*paths) && !*settings->runtime; i++)
        if (access(paths[i], X_OK) == 0)
            strcpy(settings->runtime, paths[i]);
    return settings->runtime[0] == '/';
}

bool settings_read(const char *path, const char *root, struct settings *settings)
{
    struct text file;
    char *line, *end;

    *settings =
        (struct settings){.runtime_dir = "/run/tidegate", .root = root, .timeout = DEADLINE_S};
    if (access(path, F_OK) != 0)
        return errno == ENOENT && find_runtime(settings);
    if (!text_read_file(path, &file) || file.size > FILE_LIMIT ||
        memchr(file.data, '\0', file.size))
        return false;
    for (line = file.data; line < file.data + file.size; line = end + 1) {
        end = memchr(line, '\n', (size_t)(file.data + file.size - line));
        if (!end)
            return false; /* the last line has no newline, so there is no room for a NUL */
        *end = '\0';
        if (!take_line(line, settings))
            return false;
    }
    return find_runtime(settings);
}
