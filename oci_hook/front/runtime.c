/*
 * tidegate-runtime: the wrapper that engines execute in place of runc or crun. It usually ends by
 * executing the real runtime.
 *
 * Every command from an engine passes through this program. A command that neither creates nor
 * deletes a container, or creates one that requests nothing, goes to the runtime at once. For other
 * containers config.json is edited first, by the fork server or by the Python script of the same
 * name.
 *
 * Only command lines in the form that engines write are parsed here: known options, not
 * abbreviated. The script handles all other forms, and parses them as runc and crun do.
 */
#include "handover.h"
#include "requests.h"
#include "settings.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define CONFIG         "/etc/tidegate/runtime"
#define END_DEADLINE_S 6 /* as in oci_hook/runtime.py */
#define LOST                                                                                       \
    "tidegate-runtime: the fork server's process ended before the container was prepared; start "  \
    "the container again, and see the log of tidegate-forkserver\n"

extern char **environ;

struct call {
    const char *command;
    const char *bundle;
    const char *ident;
    bool elsewhere; /* --config is given: the file need not be the bundle's */
};

enum kind { UNKNOWN, FLAG, VALUE };

static bool is_among(const char *word, const char *const names[])
{
    for (; *names; names++)
        if (strcmp(word, *names) == 0)
            return true;
    return false;
}

/* Returns the kind of an option. It precedes the command if `command` is NULL; otherwise it belongs
 * to that command, which is `delete` or creates a container. */
static enum kind kind_of(const char *name, const char *command)
{
    static const char *const values[] = {"cgroup-manager", "criu", "log",      "log-format",
                                         "log-level",      "root", "rootless", NULL};
    static const char *const flags[] = {"debug", "systemd-cgroup", NULL};
    static const char *const delete_flags[] = {"force", NULL};
    static const char *const making_values[] = {"bundle",
                                                "config",
                                                "console-socket",
                                                "image-path",
                                                "lsm-mount-context",
                                                "lsm-profile",
                                                "pid-file",
                                                "pidfd-socket",
                                                "preserve-fds",
                                                "work-path",
                                                "manage-cgroups-mode",
                                                "empty-ns",
                                                NULL};
    static const char *const making_flags[] = {
        "auto-dedup",      "detach",   "ext-unix-sk",  "file-locks",     "keep",      "lazy-pages",
        "network-lock",    "no-pivot", "no-subreaper", "no-new-keyring", "shell-job", "tcp-close",
        "tcp-established", NULL};

    if (!command)
        return is_among(name, values) ? VALUE : is_among(name, flags) ? FLAG : UNKNOWN;
    if (strcmp(command, "delete") == 0)
        return is_among(name, delete_flags) ? FLAG : UNKNOWN;
    return is_among(name, making_values) ? VALUE : is_among(name, making_flags) ? FLAG : UNKNOWN;
}

static void take(struct call *call, const char *name, const char *value)
{
    if (strcmp(name, "bundle") == 0)
        call->bundle = *value ? value : "."; /* as in runc and crun */
    else if (strcmp(name, "config") == 0)
        call->elsewhere = true;
}

/* Parses a command line in the form that engines write; false for any other form. */
static bool parse(char *const arguments[], struct call *call)
{
    *call = (struct call){.bundle = "."};
    for (; *arguments; arguments++) {
        const char *word = *arguments, *value = NULL;
        char name[32];
        size_t length;
        enum kind kind;

        if (*word != '-') {
            if (call->ident)
                return false;
            if (call->command)
                call->ident = word;
            else
                call->command = word;
            continue;
        }
        if (strcmp(word, "-b") == 0 && call->command && strcmp(call->command, "delete") != 0)
            word = "--bundle";
        if (strncmp(word, "--", 2) != 0)
            return false;
        length = strcspn(word + 2, "=");
        if (length >= sizeof(name))
            return false;
        memcpy(name, word + 2, length);
        name[length] = '\0';
        kind = kind_of(name, call->command);
        if (word[2 + length] == '=')
            value = word + 2 + length + 1;
        if (kind == UNKNOWN || (kind == FLAG && value))
            return false;
        if (kind == VALUE && !value)
            value = *++arguments;
        if (kind == VALUE && !value)
            return false;
        if (kind == VALUE && call->command)
            take(call, name, value);
    }
    return call->command != NULL;
}

/* Returns the directory that --root names, "" if none; NULL if the options have another form. */
static const char *state_root(char *const arguments[])
{
    const char *root = "";

    for (; *arguments && **arguments == '-'; arguments++) {
        const char *word = *arguments, *value = strchr(word, '=');
        char name[32];
        size_t length = value ? (size_t)(value - word) : strlen(word);

        if (strncmp(word, "--", 2) != 0 || length - 2 >= sizeof(name))
            return NULL;
        memcpy(name, word + 2, length - 2);
        name[length - 2] = '\0';
        if (kind_of(name, NULL) == FLAG && !value)
            continue;
        if (kind_of(name, NULL) != VALUE)
            return NULL;
        value = value ? value + 1 : *++arguments;
        if (!value)
            return NULL;
        if (strcmp(name, "root") == 0 && !*root)
            root = value;
    }
    return root;
}

static bool makes(const char *command)
{
    static const char *const making[] = {"create", "run", "restore", NULL};

    return is_among(command, making);
}

/* Whether no word is a command that needs more than the runtime. */
static bool is_plain(char *const arguments[])
{
    for (; *arguments; arguments++)
        if (makes(*arguments) || strcmp(*arguments, "delete") == 0)
            return false;
    return true;
}

/* Whether the container to be created certainly requests nothing. */
static bool requests_nothing(const struct call *call, const struct settings *settings)
{
    char path[PATH_MAX];
    struct text config;

    if (call->elsewhere ||
        (size_t)snprintf(path, sizeof(path), "%s/config.json", call->bundle) >= sizeof(path) ||
        !text_read_file(path, &config) || text_may_request(&config))
        return false;
    return !settings->environment || !memmem(config.data, config.size, "TIDEGATE_", 9);
}

/* Whether the hook has noted files to be removed at the container's end. */
static bool has_traces(const struct call *call, const struct settings *settings)
{
    char path[PATH_MAX];
    struct stat status;

    if (!call->ident || !*call->ident || strchr(call->ident, '/') ||
        strcmp(call->ident, ".") == 0 || strcmp(call->ident, "..") == 0)
        return false;
    if ((size_t)snprintf(path, sizeof(path), "%s/traces/%s", settings->runtime_dir, call->ident) >=
        sizeof(path))
        return false;
    return stat(path, &status) == 0;
}

/* Returns only if the runtime cannot be executed; the script reports that to the engine. */
static void become_runtime(const struct settings *settings, char *argv[])
{
    char *own = argv[0];

    argv[0] = (char *)settings->runtime;
    execve(settings->runtime, argv, environ);
    argv[0] = own;
}

/*
 * Has the runtime delete a container, and then has the fork server or the script remove the files
 * that its start created. Returns the runtime's status.
 */
static int delete(const struct settings *settings, char *argv[], char *const arguments[])
{
    int server, status, done = HANDOVER_DECLINED;
    pid_t pid = fork();

    if (pid == 0) {
        /* An engine that gives up kills only the process that it started: the parent. */
        prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        become_runtime(settings, argv);
        handover_execute("tidegate-runtime", NULL, arguments, environ);
        _exit(STATUS_CONFIG);
    }
    if (pid < 0)
        handover_fail(
            STATUS_OS_ERROR,
            "tidegate-runtime: cannot create a process for the runtime; free some memory\n");
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            handover_fail(STATUS_OS_ERROR, "tidegate-runtime: the runtime's status was lost\n");
    /* This is done whatever the status: a nonexistent container has ended, and a running one keeps
     * its files. */
    server = handover_connect(settings->runtime_dir); /* not earlier: the server's timeout is 1 s */
    if (server >= 0)
        done = handover_run(server, "deleted", arguments, END_DEADLINE_S);
    if (done == HANDOVER_DECLINED || done == HANDOVER_LOST) {
        pid = fork();
        if (pid == 0) {
            handover_execute("tidegate-runtime", "--tidegate-deleted", arguments, environ);
            _exit(STATUS_OS_ERROR);
        }
        while (pid > 0 && waitpid(pid, NULL, 0) < 0 && errno == EINTR)
            continue;
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int main(int argc, char *argv[])
{
    const char *config = CONFIG;
    char *const *arguments = argv + (argc > 0);
    struct settings settings;
    struct call call;
    int server, status;
    bool deletes;

    if (argc < 1) /* kernels before 5.18 allow an empty argument list */
        goto script;
    if (argc > 2 && strcmp(argv[1], "--tidegate-config") == 0) {
        config = argv[2];
        argv += 2;
    }
    if (!settings_read(config, state_root(argv + 1), &settings))
        goto script;
    if (is_plain(argv + 1)) {
        become_runtime(&settings, argv);
        goto script;
    }
    if (!parse(argv + 1, &call))
        goto script;
    deletes = strcmp(call.command, "delete") == 0;
    if (!deletes && !makes(call.command))
        goto script;
    if (deletes ? !has_traces(&call, &settings) : requests_nothing(&call, &settings)) {
        become_runtime(&settings, argv);
        goto script;
    }
    if (deletes)
        return delete(&settings, argv, arguments);
    server = handover_connect(settings.runtime_dir);
    if (server < 0)
        goto script;
    status = handover_run(server, "runtime", arguments, settings.timeout);
    if (status == 0)
        become_runtime(&settings, argv);
    else if (status > 0)
        return status;
    else if (status == HANDOVER_LOST)
        handover_fail(STATUS_OS_ERROR, LOST);
    else if (status == HANDOVER_LATE)
        handover_execute("tidegate-runtime", "--tidegate-late", arguments, environ);
script:
    handover_execute("tidegate-runtime", NULL, arguments, environ);
    handover_fail(STATUS_OS_ERROR,
                  "tidegate-runtime: oci_hook/tidegate-runtime in this installation "
                  "cannot be executed; install Tidegate and python3 again\n");
}
