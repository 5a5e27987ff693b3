/*
 * Hands the start of a container over to the fork server, or executes the Python script.
 *
 * The server gets the command line and the descriptors of this process over its socket, and answers
 * with the exit status of the child that it forked for the start. handover.h has the interface.
 */
#include "handover.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#define N_DESCRIPTORS 5           /* standard ones, the working directory, one end of a pipe */
#define MESSAGE_LIMIT (32u << 10) /* bytes; the script handles longer command lines */
#define CONNECT_MS    500         /* beyond this, executing the script is faster */
#define GRACE_MS      2000        /* as in oci_hook/apart.py */

#ifndef SYS_close_range
#define SYS_close_range 436
#endif

void handover_tidy_descriptors(void)
{
    for (int fd = 0; fd < 3; fd++) {
        /* Otherwise a file that is opened later would become standard error. */
        if (fcntl(fd, F_GETFD) < 0)
            (void)!open("/dev/null", O_RDWR);
    }
    syscall(SYS_close_range, 3, ~0u, 0);
}

const char *handover_program(void)
{
    static char path[PATH_MAX];
    const char *executed = (const char *)getauxval(AT_EXECFN);
    size_t length = 0;

    if (path[0] || !executed)
        return path;
    if (executed[0] != '/') {
        if (!getcwd(path, sizeof(path)))
            return "";
        length = strlen(path);
        path[length++] = '/';
    }
    if (length + strlen(executed) >= sizeof(path)) {
        path[0] = '\0';
        return path;
    }
    strcpy(path + length, executed);
    return path;
}

static void set_timeout(int fd, long milliseconds)
{
    struct timeval limit = {milliseconds / 1000, milliseconds % 1000 * 1000};

    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
}

int handover_connect(const char *runtime_dir)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct ucred peer;
    socklen_t size = sizeof(peer);
    int length, fd;

    length =
        snprintf(address.sun_path, sizeof(address.sun_path), "%s/forkserver.sock", runtime_dir);
    if (length < 0 || (size_t)length >= sizeof(address.sun_path))
        return -1;
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    set_timeout(fd, CONNECT_MS);
    if (connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0 &&
        getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
        (peer.uid == 0 || peer.uid == geteuid()))
        return fd;
    close(fd);
    return -1;
}

/*
 * Stores the directory of the scripts in `path`: the parent of this program's directory, or the
 * source directory if the build is not installed. Returns false if the directory cannot be
 * determined.
 */
static bool find_scripts(char *path, size_t room)
{
    ssize_t length = readlink("/proc/self/exe", path, room - 1);
    char *slash;

    if (length <= 0)
        return false;
    path[length] = '\0';
    for (int up = 0; up < 2; up++) {
        slash = strrchr(path, '/');
        if (!slash)
            return false;
        *slash = '\0';
    }
#ifdef SOURCE_DIRECTORY /* for a build that is not installed */
    slash = path + strlen(path);
    if ((size_t)snprintf(slash, room - (size_t)(slash - path), "/tidegate-hook") >=
        room - (size_t)(slash - path))
        return false;
    if (access(path, X_OK) != 0)
        return (size_t)snprintf(path, room, "%s", SOURCE_DIRECTORY) < room;
    *slash = '\0';
#endif
    return true;
}

/* Appends a word and its NUL to the message; false if there is no room. */
static bool put(char *message, size_t *size, const char *word)
{
    size_t length = strlen(word) + 1;

    if (*size + length > MESSAGE_LIMIT)
        return false;
    memcpy(message + *size, word, length);
    *size += length;
    return true;
}

/*
 * Sends the request with the version and directory of this installation: the server of another
 * installation declines. The descriptors are sent once a child of the server has answered.
 */
static bool send_request(int server, const char *role, char *const arguments[])
{
    static char message[MESSAGE_LIMIT];
    char scripts[PATH_MAX];
    size_t size = 0;
    bool fits;

    fits = find_scripts(scripts, sizeof(scripts)) && put(message, &size, TIDEGATE_VERSION) &&
           put(message, &size, scripts) && put(message, &size, role) &&
           put(message, &size, handover_program());
    for (; fits && *arguments; arguments++)
        fits = put(message, &size, *arguments);
    return fits && send(server, message, size, MSG_NOSIGNAL) == (ssize_t)size;
}

/*
 * Sends standard input, files in place of the outputs, the working directory and one end of a pipe.
 * Returns the other end, or -1 on failure. That end closes when this process ends, and the kernel
 * then signals the server's child. Called only when a child is waiting for the descriptors: in the
 * queue of a stopped server, they would keep the runtime's pipe open.
 *
 * The outputs themselves are not sent: runtimes written in Go wait until every process that has
 * them has ended, even if one is stuck.
 */
static int send_descriptors(int server, const int outputs[2])
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(N_DESCRIPTORS * sizeof(int))];
    } control = {.space = {0}};
    int alive[2], fds[N_DESCRIPTORS] = {STDIN_FILENO, outputs[0], outputs[1],
                                        open(".", O_PATH | O_DIRECTORY | O_CLOEXEC), -1};
    struct iovec part = {(char *)"", 1};
    struct msghdr message = {
        .msg_iov = &part,
        .msg_iovlen = 1,
        .msg_control = control.space,
        .msg_controllen = sizeof(control.space),
    };
    bool sent;

    if (fds[3] < 0 || pipe2(alive, O_CLOEXEC) < 0)
        return -1;
    fds[4] = alive[0];
    control.header.cmsg_level = SOL_SOCKET;
    control.header.cmsg_type = SCM_RIGHTS;
    control.header.cmsg_len = CMSG_LEN(sizeof(fds));
    memcpy(CMSG_DATA(&control.header), fds, sizeof(fds));
    sent = sendmsg(server, &message, MSG_NOSIGNAL) == 1;
    close(fds[3]);
    close(alive[0]);
    if (sent)
        return alive[1];
    close(alive[1]);
    return -1;
}

/* Receives the server's answer, one byte. Returns HANDOVER_LOST or HANDOVER_LATE if none comes. */
static int receive(int server)
{
    unsigned char answer;
    ssize_t n;

    do
        n = recv(server, &answer, sizeof(answer), 0);
    while (n < 0 && errno == EINTR);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return HANDOVER_LATE;
    return n == 1 ? answer : HANDOVER_LOST;
}

/* Copies the content of the file that replaced a standard stream to that stream. */
static bool pass_on(int file, int output)
{
    static char part[64 << 10];
    off_t at = 0;
    ssize_t size;

    while ((size = pread(file, part, sizeof(part), at)) > 0) {
        for (ssize_t done = 0, n; done < size; done += n) {
            n = write(output, part + done, (size_t)(size - done));
            if (n <= 0)
                return false;
        }
        at += size;
    }
    return size == 0;
}

int handover_run(int server, const char *role, char *const arguments[], double seconds)
{
    int outputs[2] = {memfd_create("tidegate-output", MFD_CLOEXEC),
                      memfd_create("tidegate-output", MFD_CLOEXEC)};
    int alive = -1, status = HANDOVER_DECLINED;

    if (outputs[0] >= 0 && outputs[1] >= 0 && send_request(server, role, arguments) &&
        receive(server) == 1)
        alive = send_descriptors(server, outputs);
    /* Without the descriptors the child does no work, so the script can do it instead. */
    if (alive >= 0) {
        set_timeout(server, (long)(seconds * 1e3) + GRACE_MS);
        status = receive(server);
        close(alive);
    }
    if (status >= 0) {
        pass_on(outputs[1], STDERR_FILENO); /* a failure is not fatal: the log has the line, too */
        if (!pass_on(outputs[0], STDOUT_FILENO))
            handover_fail(STATUS_OS_ERROR, "tidegate: config.json could not be written to standard "
                                           "output; check why the engine closed the pipe\n");
    }
    close(server);
    close(outputs[0]);
    close(outputs[1]);
    return status;
}

void handover_execute(const char *name, const char *first, char *const arguments[],
                      char *const environment[])
{
    static char path[PATH_MAX];
    size_t n = 0, count = 0, length;
    char **words;

    if (!find_scripts(path, sizeof(path)))
        return;
    length = strlen(path);
    if ((size_t)snprintf(path + length, sizeof(path) - length, "/%s", name) >=
        sizeof(path) - length)
        return;
    while (arguments[count])
        count++;
    words = calloc(count + 5, sizeof(*words));
    if (!words)
        return;
    words[n++] = path;
    words[n++] = (char *)"--program";
    words[n++] = (char *)handover_program();
    if (first)
        words[n++] = (char *)first;
    memcpy(words + n, arguments, count * sizeof(*words));
    execve(path, words, environment);
    free(words);
}

_Noreturn void handover_fail(int status, const char *line)
{
    (void)!write(STDERR_FILENO, line, strlen(line));
    _exit(status);
}
