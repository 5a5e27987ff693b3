/*
 * A stand-in for nvidia-cuda-mps-control in tests: the part of the daemon that a governor uses
 *
 * It is started with -f, listens on `control` and `control_privileged`, sends the greeting of
 * driver 550, and logs events in the wording of that driver. Its "server" is a child that sleeps.
 * Clients stay connected. SIGUSR1 simulates a fatal fault in the first client: all clients are
 * notified, and new ones are refused until the old ones have disconnected.
 */
#include "mps.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define N_CLIENTS 60

static struct client {
    int fd;
    pid_t pid;
} clients[N_CLIENTS];
static pid_t server;
static bool fault;
static volatile sig_atomic_t fault_requested;
static FILE *server_log;

__attribute__((format(printf, 3, 4))) static void say(FILE *file, const char *source,
                                                      const char *format, ...)
{
    struct timespec now;
    struct tm parts;
    char text[300];
    va_list list;

    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &parts);
    fprintf(file, "[%04d-%02d-%02d %02d:%02d:%02d.%03ld %s %5d] %s\n", parts.tm_year + 1900,
            parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec,
            now.tv_nsec / 1000000, source, getpid(), text);
    fflush(file);
}

#define CONTROL(...) say(stdout, "Control", __VA_ARGS__)
#define SERVER(...)  say(server_log, "Server", __VA_ARGS__)

static void on_fault(int number)
{
    (void)number;
    fault_requested = 1;
}

static int listen_at(const char *directory, const char *name, mode_t mode)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), on = 1;

    snprintf(address.sun_path, sizeof address.sun_path, "%s/%s", directory, name);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 64)) {
        CONTROL("Cannot access CUDA_MPS_PIPE_DIRECTORY=%s", directory);
        exit(1);
    }
    chmod(address.sun_path, mode);
    setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof on);
    return fd;
}

static void start_server(uid_t uid)
{
    pid_t parent = getpid();

    if (server)
        return;
    server = fork();
    if (server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() == parent)
            for (;;)
                pause();
        _exit(0);
    }
    CONTROL("Starting new server %d for user %u", server, uid);
    CONTROL("NEW SERVER %d: Ready", server);
}

static void add_client(int fd, const struct ucred *peer)
{
    uint32_t answer = CUDA_SUCCESS;
    struct client *place = NULL;

    for (int i = 0; i < N_CLIENTS && !place; i++)
        if (!clients[i].fd)
            place = &clients[i];
    start_server(peer->uid);
    CONTROL("NEW CLIENT %d from user %u: Server already exists", peer->pid, peer->uid);
    if (fault || !place) {
        SERVER("Teardown in progress, client creation denied");
        answer = CUDA_ERROR_MPS_SERVER_NOT_READY;
        place = NULL;
    }
    send(fd, &answer, sizeof answer, MSG_NOSIGNAL);
    if (place)
        *place = (struct client){fd, peer->pid};
    else
        close(fd);
}

static void serve_commands(int fd, const struct ucred *peer, bool privileged)
{
    struct timeval patience = {1, 0};
    char text[200];
    uint64_t length;
    ssize_t n;

    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    CONTROL("NEW UI");
    while (recv(fd, &length, sizeof length, 0) == sizeof length && length &&
           (n = recv(fd, text, sizeof text - 1, 0)) > 0) {
        text[n - 1] = '\0'; /* in place of its newline */
        CONTROL("Cmd:%s", text);
        if (!strncmp(text, "quit", 4) && !privileged)
            CONTROL("Not enough privilege to execute quit command");
        else if (!strncmp(text, "quit", 4))
            exit(0);
        else if (!strncmp(text, "shutdown_server", 15) && peer->uid == getuid() && server)
            kill(server, SIGKILL);
    }
    CONTROL("UI closed");
    close(fd);
}

static void accept_connection(int listener, bool privileged)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    struct timeval patience = {1, 0}, none = {0, 0};
    socklen_t size = sizeof(struct ucred);
    struct ucred peer;
    uint32_t type = 0;
    char word[16];

    CONTROL("Accepting connection...");
    if (fd < 0)
        return;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (send(fd, "OUTBHELL", 9, MSG_NOSIGNAL) != 9 || recv(fd, word, sizeof word, 0) != 9 ||
        strcmp(word, "OUTBCRED") || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) ||
        recv(fd, &type, sizeof type, 0) != sizeof type) {
        CONTROL("User did not send valid credentials");
        close(fd);
        return;
    }
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof none);
    if (type == MPS_CLIENT)
        add_client(fd, &peer);
    else if (type == MPS_COMMANDS)
        serve_commands(fd, &peer, privileged);
    else {
        CONTROL("Unknown type of connection");
        close(fd);
    }
}

static void remove_client(struct client *client)
{
    bool left = false;

    close(client->fd);
    SERVER("Client %d disconnected", client->pid);
    client->fd = 0;
    for (int i = 0; i < N_CLIENTS; i++)
        left |= clients[i].fd != 0;
    if (fault && !left) {
        SERVER("Creating server context on device 0 (simulated)");
        fault = false;
    }
}

static void report_fault(void)
{
    fault_requested = 0;
    for (int i = 0; i < N_CLIENTS; i++) {
        if (!clients[i].fd)
            continue;
        if (!fault)
            SERVER("Client process %d encountered a fatal GPU error.", clients[i].pid);
        fault = true;
        send(clients[i].fd, "F", 1, MSG_NOSIGNAL);
    }
    if (fault)
        SERVER("Server is handling a fatal GPU error.");
}

int main(int argc, char **argv)
{
    const char *pipe = getenv("CUDA_MPS_PIPE_DIRECTORY"), *logs = getenv("CUDA_MPS_LOG_DIRECTORY");
    struct sigaction action = {.sa_handler = on_fault};
    struct pollfd polled[2 + N_CLIENTS];
    char path[300];

    if (argc < 2 || strcmp(argv[1], "-f") || !pipe || !logs) {
        puts("Cannot find MPS control daemon process");
        return 1;
    }
    snprintf(path, sizeof path, "%s/server.log", logs);
    server_log = fopen(path, "ae");
    if (!server_log)
        return 1;
    sigaction(SIGUSR1, &action, NULL);
    polled[0].fd = listen_at(pipe, "control", 0666);
    polled[1].fd = listen_at(pipe, "control_privileged", 0755);
    CONTROL("Starting control daemon using socket %s/control", pipe);
    for (;;) {
        pid_t ended;
        int status;

        for (int i = 0; i < 2 + N_CLIENTS; i++) {
            if (i >= 2)
                polled[i].fd = clients[i - 2].fd ? clients[i - 2].fd : -1;
            polled[i].events = POLLIN;
            polled[i].revents = 0;
        }
        if (poll(polled, 2 + N_CLIENTS, 50) < 0 && errno != EINTR)
            return 1;
        if (fault_requested)
            report_fault();
        ended = waitpid(-1, &status, WNOHANG);
        if (ended > 0 && ended == server) {
            CONTROL("Server %d exited with status %d", ended, status);
            server = 0;
            for (int i = 0; i < N_CLIENTS; i++)
                if (clients[i].fd)
                    remove_client(&clients[i]);
            fault = false;
            continue;
        }
        for (int i = 0; i < N_CLIENTS; i++)
            if (polled[i + 2].revents)
                remove_client(&clients[i]);
        for (int i = 0; i < 2; i++)
            if (polled[i].revents)
                accept_connection(polled[i].fd, i == 1);
    }
}
