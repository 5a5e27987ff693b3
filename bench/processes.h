/*
 * Runs a workload as several processes in one container, which do the same work and begin together.
 *
 * processes_fork() has to be called before any use of CUDA. The first process is the one that was
 * started, and it uses the given file names; the k-th process appends ".k" to them. Only the first
 * process writes to standard output, and it ends last.
 */
#ifndef BENCH_PROCESSES_H
#define BENCH_PROCESSES_H

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_PROCESSES 64

struct processes {
    unsigned n;     /* number of processes */
    unsigned index; /* number of this one; 0: the first */
};

static struct processes processes_fork(unsigned n)
{
    struct processes all = {n, 0};

    if (n > MAX_PROCESSES) {
        fprintf(stderr, "--processes: %u is more than %d\n", n, MAX_PROCESSES);
        exit(1);
    }
    for (unsigned k = 1; k < n; k++) {
        pid_t pid = fork();

        if (pid < 0) {
            perror("fork");
            exit(1);
        }
        if (!pid) {
            int null = open("/dev/null", O_WRONLY | O_CLOEXEC);

            if (null < 0 || dup2(null, STDOUT_FILENO) < 0)
                exit(1);
            all.index = k;
            break;
        }
    }
    return all;
}

/* Returns the name of a process's own file; it is never freed. */
static const char *processes_path(const struct processes *all, const char *path)
{
    char *own;

    if (!path || !all->index)
        return path;
    if (asprintf(&own, "%s.%u", path, all->index) < 0)
        exit(1);
    return own;
}

/* Reports that this process is set up; the first one does so once all others have. */
static void processes_ready(const struct processes *all, const char *wait_file)
{
    char ready[4096];
    int fd;

    for (unsigned k = 1; k < all->n && !all->index; k++) {
        snprintf(ready, sizeof ready, "%s.%u.ready", wait_file, k);
        while (access(ready, F_OK)) {
            if (waitpid(-1, NULL, WNOHANG) > 0)
                exit(1); /* a process has failed, and has reported it */
            usleep(1000);
        }
    }
    snprintf(ready, sizeof ready, "%s.ready", processes_path(all, wait_file));
    fd = open(ready, O_CREAT | O_WRONLY | O_CLOEXEC, 0644);
    if (fd < 0) {
        perror(ready);
        exit(1);
    }
    close(fd);
}

/* Waits for the others at the end of the first process; returns 0 if all have succeeded. */
static int processes_wait(const struct processes *all)
{
    int failed = 0, status;

    for (unsigned k = 1; k < all->n && !all->index; k++)
        if (wait(&status) > 0 && status)
            failed = 1;
    return failed;
}

#endif
