/*
 * The client of the emulated MPS (mps_control.c): finds the daemon, and detects faults.
 *
 * MPS shares nothing here: contexts take turns as they do without it. The path to the daemon, the
 * greeting, and the set of clients that a fault affects are the same as with the real driver.
 */
#include "mps.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static int server = -1;
static bool faulty;

/* The credentials are sent with the greeting; the kernel vouches for them to the daemon. */
static bool greet(int fd)
{
    union {
        char bytes[CMSG_SPACE(sizeof(struct ucred))];
        struct cmsghdr align;
    } control = {0};
    struct ucred self = {getpid(), getuid(), getgid()};
    struct iovec iov = {(char[]){"OUTBCRED"}, 9};
    struct msghdr message = {.msg_iov = &iov,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    uint32_t type = MPS_CLIENT;

    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_CREDENTIALS;
    header->cmsg_len = CMSG_LEN(sizeof self);
    memcpy(CMSG_DATA(header), &self, sizeof self);
    return sendmsg(fd, &message, MSG_NOSIGNAL) == 9 &&
           send(fd, &type, sizeof type, MSG_NOSIGNAL) == sizeof type;
}

CUresult mps_join(void)
{
    const char *directory = getenv("CUDA_MPS_PIPE_DIRECTORY");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    uint32_t answer = 0;
    char hello[16];
    int fd;

    if (!directory || server >= 0)
        return CUDA_SUCCESS;
    if ((size_t)snprintf(address.sun_path, sizeof address.sun_path, "%s/control", directory) >=
        sizeof address.sun_path)
        return CUDA_SUCCESS;
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return CUDA_SUCCESS;
    if (connect(fd, (struct sockaddr *)&address, sizeof address)) {
        close(fd);
        return CUDA_SUCCESS; /* no daemon: run as a process without MPS */
    }
    if (recv(fd, hello, sizeof hello, 0) <= 0 || !greet(fd) ||
        recv(fd, &answer, sizeof answer, 0) != sizeof answer || answer) {
        close(fd);
        return answer ? (CUresult)answer : CUDA_ERROR_MPS_CONNECTION_FAILED;
    }
    server = fd;
    return CUDA_SUCCESS;
}

bool mps_client(void)
{
    return server >= 0;
}

/* A fault in one client is a fault in all clients, and so is the end of the server. */
CUresult mps_fault(void)
{
    char byte;

    if (server < 0)
        return CUDA_SUCCESS;
    if (!faulty) {
        ssize_t n = recv(server, &byte, 1, MSG_DONTWAIT);

        faulty = n >= 0;
    }
    return faulty ? CUDA_ERROR_LAUNCH_FAILED : CUDA_SUCCESS;
}

void mps_forget(void)
{
    if (server >= 0)
        close(server);
    server = -1;
    faulty = false;
}
