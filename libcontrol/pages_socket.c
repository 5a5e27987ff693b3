/*
 * Handles the connection to the governor through the container's socket.
 *
 * The socket stays open for the life of the process: a byte on it tells the arbiter to read the
 * ledger.
 */
#include "pages.h"

#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

int governor_fd = -1;
uint64_t governor_inode;

bool pages_identify(int fd, uint64_t *inodep, uint64_t *sizep)
{
    struct stat st;

    if (os_call(SYS_fstat, fd, &st) < 0)
        return false;
    if (inodep)
        *inodep = st.st_ino;
    if (sizep)
        *sizep = (uint64_t)st.st_size;
    return true;
}

bool pages_identify_file(int fd, struct pages_file *filep)
{
    struct stat st;

    if (os_call(SYS_fstat, fd, &st) < 0)
        return false;
    filep->device = st.st_dev;
    filep->inode = st.st_ino;
    return true;
}

long pages_send(int fd, const char *byte, int flags)
{
    return os_call(SYS_sendto, fd, byte, 1, MSG_NOSIGNAL | flags, NULL, 0);
}

int pages_high(int fd)
{
    int high = (int)os_call(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 500);

    if (high < 0)
        return fd;
    os_close(fd);
    return high;
}

int pages_socket(int flags)
{
    int fd = (int)os_call(SYS_socket, AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | flags, 0);

    return fd < 0 ? -1 : pages_high(fd);
}

long pages_connect(int fd)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX,
                                  .sun_path = PAGES_DIRECTORY "/governor.sock"};

    return os_call(SYS_connect, fd, &address, sizeof address);
}

/* Reads the answer: the number of a slot, and the descriptors. Returns what recvmsg returns. */
long pages_receive(int fd, int flags, uint32_t *slotp, int fds[PAGES_N_FDS])
{
    union {
        char bytes[CMSG_SPACE(PAGES_N_FDS * sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    struct iovec iov = {slotp, sizeof *slotp};
    struct msghdr message = {
        .msg_iov = &iov,
        .msg_iovlen = 1,
        .msg_control = control.bytes,
        .msg_controllen = sizeof control.bytes,
    };
    struct cmsghdr *header;
    long n = os_call(SYS_recvmsg, fd, &message, MSG_CMSG_CLOEXEC | flags);

    for (unsigned i = 0; i < PAGES_N_FDS; i++)
        fds[i] = -1;
    if (n < 0)
        return n;
    header = CMSG_FIRSTHDR(&message);
    if (header && header->cmsg_type == SCM_RIGHTS &&
        header->cmsg_len <= CMSG_LEN(PAGES_N_FDS * sizeof(int)))
        memcpy(fds, CMSG_DATA(header), header->cmsg_len - CMSG_LEN(0));
    return n;
}

/* Returns whether the descriptor is still the library's. A program that closes every descriptor has
 * closed it, and may since have opened another file under its number. */
bool pages_is_ours(int fd, uint64_t own_inode)
{
    uint64_t inode = 0;

    return fd >= 0 && pages_identify(fd, &inode, NULL) && inode == own_inode;
}

bool pages_still_ours(void)
{
    return pages_is_ours(atomic_load_relaxed(&governor_fd), atomic_load_relaxed(&governor_inode));
}

void pages_poke(void)
{
    if (pages_still_ours())
        pages_send(atomic_load_relaxed(&governor_fd), "p", MSG_DONTWAIT);
}
