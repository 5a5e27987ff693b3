/*
 * tidegate-hook: the program that OCI runtimes execute as the hook.
 *
 * For a container that requests nothing it exits within a millisecond. All other work is handed
 * over to the Python code (handover.h), with a standard input that can still be read in full.
 *
 * The program is linked statically, so that no environment variable can load code into it, and it
 * passes no variables on.
 */
#include "handover.h"
#include "requests.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#define DEADLINE_S 20 /* as in oci_hook/quick.py */

static char *no_environment[] = {NULL};

/* The options that this program uses; the script handles the others, and reports mistakes. */
struct options {
    const char *runtime_dir;
    const char *stage;
    double timeout; /* seconds */
    bool named;     /* --governed or --claim is given, so the container requests a GPU */
};

static char late[128];               /* error line for a deadline that has passed */
static int failed = STATUS_OS_ERROR; /* exit status if this program fails */

static void expire(int signal)
{
    (void)signal;
    handover_fail(failed, late);
}

/* Sets a deadline for standard input, which a runtime may never close; 0 cancels it. */
static void arm(double seconds)
{
    struct itimerval timer = {.it_value = {.tv_sec = (time_t)seconds}};

    timer.it_value.tv_usec = (suseconds_t)((seconds - (double)timer.it_value.tv_sec) * 1e6);
    if (seconds > 0)
        snprintf(late, sizeof(late),
                 "tidegate: the hook did not finish within %g s; see the hook's log on the node\n",
                 seconds);
    signal(SIGALRM, expire);
    setitimer(ITIMER_REAL, &timer, NULL);
}

static bool takes_value(const char *name)
{
    static const char *const names[] = {"--runtime-dir",    "--driver-dir", "--dev-dir",
                                        "--module-version", "--log",        "--timeout",
                                        "--claim",          "--share"};

    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
        if (strcmp(name, names[i]) == 0)
            return true;
    return false;
}

static bool is_stage(const char *word)
{
    static const char *const stages[] = {"prestart", "createRuntime", "precreate", "poststop"};

    for (size_t i = 0; i < sizeof(stages) / sizeof(*stages); i++)
        if (strcmp(word, stages[i]) == 0)
            return true;
    return false;
}

/* Parses options with their values as separate words; false for other forms and for mistakes. */
static bool parse(char *const arguments[], struct options *options)
{
    bool claim = false, share = false;

    *options = (struct options){.runtime_dir = "/run/tidegate", .timeout = DEADLINE_S};
    for (; *arguments; arguments++) {
        const char *word = *arguments;

        if (takes_value(word)) {
            const char *value = *++arguments;

            if (!value || !*value)
                return false;
            if (strcmp(word, "--runtime-dir") == 0)
                options->runtime_dir = value;
            if (strcmp(word, "--timeout") == 0 && !text_read_deadline(value, &options->timeout))
                return false;
            claim |= strcmp(word, "--claim") == 0;
            share |= strcmp(word, "--share") == 0;
        } else if (strcmp(word, "--governed") == 0) {
            options->named = true;
        } else if (is_stage(word) && !options->stage) {
            options->stage = word;
        } else {
            return false;
        }
    }
    options->named |= claim;
    if (!options->stage || claim != share)
        return false;
    return !claim || strcmp(options->stage, "precreate") != 0;
}

/* Whether nothing is left to do, according to the text that the runtime wrote to standard input. */
static bool is_done(const struct options *options, const struct text *input)
{
    if (strcmp(options->stage, "precreate") != 0)
        return !options->named && state_requests_nothing(input);
    if (text_may_request(input))
        return false;
    /* Podman uses the output as the configuration, so all of it has to arrive. */
    for (size_t done = 0; done < input->size;) {
        ssize_t n = write(STDOUT_FILENO, input->data + done, input->size - done);

        if (n <= 0)
            handover_fail(STATUS_OS_ERROR, "tidegate: config.json could not be written to standard "
                                           "output; check why the engine closed the pipe\n");
        done += (size_t)n;
    }
    return true;
}

/* Makes standard input a copy of the text that was read, for the process that reads it again. */
static bool put_back(const struct text *input)
{
    int fd = memfd_create("tidegate-hook-stdin", MFD_CLOEXEC);

    return fd >= 0 && write(fd, input->data, input->size) == (ssize_t)input->size &&
           lseek(fd, 0, SEEK_SET) == 0 && dup2(fd, STDIN_FILENO) == STDIN_FILENO && close(fd) == 0;
}

int main(int argc, char *argv[])
{
    char *const *arguments = argv + (argc > 0);
    struct options options;
    struct text input;
    int server, status;
    bool is_whole;

    handover_tidy_descriptors();
    signal(SIGPIPE, SIG_IGN); /* as in Python: a write to a closed output is an error */
    umask(022);
    if (parse(arguments, &options)) {
        if (strcmp(options.stage, "poststop") == 0)
            failed = 0; /* the container has ended in any case */
        arm(options.timeout);
        is_whole = text_read(STDIN_FILENO, CONFIG_LIMIT, &input);
        if (is_whole && is_done(&options, &input))
            return 0;
        /* If the input is too large, the part that was read is handed over: the script reports the
         * error. */
        if (!is_whole && input.size <= CONFIG_LIMIT)
            handover_fail(failed, "tidegate: standard input cannot be read to the end; the runtime "
                                  "has to write to it and close it\n");
        if (!put_back(&input))
            handover_fail(failed, "tidegate: standard input cannot be copied; free some memory\n");
        arm(0);
        server = handover_connect(options.runtime_dir);
        if (server >= 0) {
            status = handover_run(server, "hook", arguments, options.timeout);
            if (status >= 0)
                return status;
            if (status == HANDOVER_LATE) {
                lseek(STDIN_FILENO, 0, SEEK_SET);
                handover_execute("tidegate-hook", "--late", arguments, no_environment);
                handover_fail(failed, late);
            }
            if (status == HANDOVER_LOST)
                handover_fail(STATUS_OS_ERROR,
                              "tidegate: the fork server's process ended before the container was "
                              "prepared; start the container again, and see the log of "
                              "tidegate-forkserver\n");
        }
    }
    handover_execute("tidegate-hook", NULL, arguments, no_environment);
    handover_fail(STATUS_OS_ERROR, "tidegate: oci_hook/tidegate-hook in this installation cannot "
                                   "be executed; install Tidegate and python3 again\n");
}
