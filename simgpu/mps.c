/*
 * A client of the stand-in for MPS (mps_control.c): whether there is a daemon, and its clients'
 * end.
 *
 * Nothing is shared by it: contexts take turns as they do without. The way to the daemon, the
 * greeting and who is told of a fault are those of the driver.
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

/* The credentials go with the greeting: the daemon believes what the kernel lets through. */
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
        return CUDA_SUCCESS; /* no daemon: like any process */
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

/* The fault of a client is everybody's; so is the server's end. */
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
