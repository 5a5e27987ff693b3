/*
 * A program of a container that attacks other containers.
 *
 *   hostile prowl HOST KEY        try in every possible way to reach the governor's files for the
 *                                 container KEY, which are in the directory HOST of the host; print
 *                                 what worked, one per line, and finally the number of attempts
 *   hostile knock PID             register at the socket that process PID sees; print the answer
 *   hostile nest                  move to a control group below its own, as systemd does, start a
 *                                 process that registers in another group below it, and stay
 *   hostile scribble [PROGRAM..]  write arbitrary values into its own ledger, and send arbitrary
 *                                 bytes over its own socket, until it is killed; meanwhile run a
 *                                 program of the same container, to damage its slot, too
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "layout.gen.h"

#define OWN "/run/tidegate"

static unsigned long tried;
static const char *const NAMES[] = {"grant", "governor.sock", "devices"};

static void result(int done, const char *what, const char *where)
{
    tried++;
    if (done >= 0)
        printf("WORKED: %s %s\n", what, where);
}

static int knock_at(const char *path, uint32_t *slotp, int *ledgerp)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec part = {slotp, sizeof *slotp};
    struct msghdr message = {
        .msg_iov = &part,
        .msg_iovlen = 1,
        .msg_control = &control,
        .msg_controllen = sizeof control,
    };
    struct timeval patience = {.tv_sec = 10};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (strlen(path) >= sizeof address.sun_path) {
        close(fd);
        return -1;
    }
    strcpy(address.sun_path, path);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    *ledgerp = -1;
    if (connect(fd, (struct sockaddr *)&address, sizeof address) || write(fd, "r", 1) != 1 ||
        recvmsg(fd, &message, MSG_CMSG_CLOEXEC) != sizeof *slotp) {
        close(fd);
        return -1;
    }
    if (CMSG_FIRSTHDR(&message))
        memcpy(ledgerp, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
    return fd;
}

static int connects(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int done, fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (strlen(path) >= sizeof address.sun_path) {
        close(fd);
        return -1;
    }
    strcpy(address.sun_path, path);
    done = connect(fd, (struct sockaddr *)&address, sizeof address);
    close(fd);
    return done;
}

/* Tries every operation on a directory and on the three files that it may contain. */
static void molest(const char *directory)
{
    char path[PATH_MAX], other[PATH_MAX];
    struct stat status;
    static const struct {
        const char *what;
        int flags;
    } WAYS[] = {
        {"path", O_PATH},
        {"read", O_RDONLY | O_NONBLOCK},
        {"write", O_RDWR | O_NONBLOCK},
        {"truncate", O_WRONLY | O_TRUNC | O_NONBLOCK},
        {"append", O_WRONLY | O_APPEND | O_NONBLOCK},
    };

    result(open(directory, O_RDONLY | O_DIRECTORY), "list", directory);
    snprintf(path, sizeof path, "%s/new", directory);
    result(open(path, O_CREAT | O_EXCL | O_WRONLY, 0600), "create", path);
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++) {
        snprintf(path, sizeof path, "%s/%s", directory, NAMES[i]);
        for (size_t j = 0; j < sizeof WAYS / sizeof *WAYS; j++)
            result(open(path, WAYS[j].flags | O_CLOEXEC), WAYS[j].what, path);
        snprintf(other, sizeof other, "/tmp/stolen-%lu", tried);
        result(stat(path, &status), "stat", path);
        result(link(path, other), "link", path);
        result(symlink(path, other) ? -1 : open(other, O_RDONLY | O_NONBLOCK), "follow a link to",
               path);
        unlink(other);
        result(unlink(path), "unlink", path);
        result(rename(path, other), "rename", path);
        result(chmod(path, 0777), "chmod", path);
        result(truncate(path, 0), "truncate", path);
        result(mount(path, "/tmp", NULL, MS_BIND, NULL), "bind", path);
        result(connects(path), "connect to", path);
    }
}

/* Tries operations on the container's own directory: only reading its files is permitted. */
static void keep_to_the_own(void)
{
    char path[PATH_MAX];
    struct dirent *entry;
    DIR *list = opendir(OWN);
    int fd, page;

    while (list && (entry = readdir(list))) {
        int known = entry->d_name[0] == '.';

        for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
            known |= !strcmp(entry->d_name, NAMES[i]);
        result(known ? -1 : 0, "find", entry->d_name);
    }
    page = open(OWN "/grant", O_RDONLY | O_CLOEXEC);
    if (page < 0)
        printf("WORKED: even the container's own page cannot be read\n");
    result(ftruncate(page, 0), "ftruncate", OWN);
    result(fchmod(page, 0777), "fchmod", OWN);
    result(write(page, "x", 1) == 1 ? 0 : -1, "write", OWN);
    result(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, page, 0) == MAP_FAILED ? -1 : 0,
           "map", OWN);
    result(linkat(page, "", AT_FDCWD, "/out/grant", AT_EMPTY_PATH), "link by descriptor", OWN);
    snprintf(path, sizeof path, "/proc/self/fd/%d", page);
    result(linkat(AT_FDCWD, path, AT_FDCWD, "/out/grant", AT_SYMLINK_FOLLOW), "link by /proc", OWN);
    result(open(path, O_RDWR), "open again", OWN);
    result(link(OWN "/grant", "/out/grant"), "link", OWN);
    result(mount("", OWN, NULL, MS_REMOUNT | MS_BIND, NULL), "remount", OWN);
    result(mount(OWN, "/tmp", NULL, MS_BIND, NULL), "bind", OWN);
    result(umount2(OWN, MNT_DETACH), "unmount", OWN);
    fd = (int)syscall(SYS_open_tree, AT_FDCWD, OWN, 1 /* OPEN_TREE_CLONE */);
    result(fd, "clone the mount of", OWN);
}

/* Tries file handles with inode numbers near that of its own page: the number of the other
 * container's page is close to it. */
static void by_handle(void)
{
    struct {
        struct file_handle head;
        unsigned char bytes[MAX_HANDLE_SZ];
    } handle;
    int mount_id, directory = open(OWN, O_RDONLY | O_DIRECTORY);

    for (int off = -64; off <= 64; off++) {
        uint64_t inode;

        handle.head.handle_bytes = MAX_HANDLE_SZ;
        if (name_to_handle_at(AT_FDCWD, OWN "/grant", &handle.head, &mount_id, 0))
            return;
        memcpy(&inode, handle.head.f_handle + 4, sizeof inode);
        inode += (uint64_t)off;
        memcpy(handle.head.f_handle + 4, &inode, sizeof inode);
        result(open_by_handle_at(directory, &handle.head, O_RDWR), "open by handle in", OWN);
    }
    close(directory);
}

/* Tries to open the files of another process: they may include the governor's, or a ledger. */
static void steal(int pid, const char *which)
{
    char path[PATH_MAX], target[PATH_MAX], name[PATH_MAX + 300];
    struct dirent *entry;
    DIR *list;

    snprintf(path, sizeof path, "/proc/%d/%s", pid, which);
    list = opendir(path);
    tried++;
    while (list && (entry = readdir(list))) {
        ssize_t n;

        if (entry->d_name[0] == '.')
            continue;
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        n = readlink(name, target, sizeof target - 1);
        target[n < 0 ? 0 : n] = 0;
        result(n < 0 ? -1 : 0, "read the link", name);
        result(open(name, O_RDWR | O_NONBLOCK), "open", name);
        result(open(name, O_RDONLY | O_NONBLOCK), "open", name);
    }
    if (list)
        closedir(list);
}

static void attack(int pid)
{
    static const char *const ROOTS[] = {"root", "cwd"};
    char path[PATH_MAX], bytes[64];
    struct iovec here = {bytes, sizeof bytes}, there = {(void *)0x400000, sizeof bytes};
    int fd;

    for (size_t i = 0; i < sizeof ROOTS / sizeof *ROOTS; i++) {
        snprintf(path, sizeof path, "/proc/%d/%s" OWN, pid, ROOTS[i]);
        molest(path);
    }
    steal(pid, "fd");
    steal(pid, "map_files");
    snprintf(path, sizeof path, "/proc/%d/mem", pid);
    result(open(path, O_RDWR), "open", path);
    result((int)process_vm_readv(pid, &here, 1, &there, 1, 0), "read the memory of", path);
    result((int)ptrace(PTRACE_SEIZE, pid, 0, 0), "trace", path);
    fd = (int)syscall(SYS_pidfd_open, pid, 0);
    for (int i = 0; i < 64 && fd >= 0; i++)
        result((int)syscall(438 /* pidfd_getfd */, fd, i, 0), "take a descriptor of", path);
    snprintf(path, sizeof path, "/proc/%d/ns/mnt", pid);
    fd = open(path, O_RDONLY);
    result(fd < 0 ? -1 : setns(fd, CLONE_NEWNS), "enter", path);
}

/* In its own user namespace, the process has every capability over what it creates there. */
static void in_a_namespace_of_its_own(const char *host)
{
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS))
        return;
    molest(host);
    by_handle();
    result(umount2(OWN, MNT_DETACH), "unmount", OWN);
    result(mount("", OWN, NULL, MS_REMOUNT | MS_BIND, NULL), "make writable", OWN);
    if (mount(OWN, "/tmp", NULL, MS_BIND, NULL)) /* the bind mount is read-only, too */
        return;
    result(mount("", "/tmp", NULL, MS_REMOUNT | MS_BIND, NULL), "make writable", "a bind mount");
    result(open("/tmp/grant", O_RDWR), "write through", "a bind mount");
    result(truncate("/tmp/grant", 0), "truncate through", "a bind mount");
    result(unlink("/tmp/governor.sock"), "unlink through", "a bind mount");
}

static void prowl(const char *host, const char *key)
{
    char path[PATH_MAX];
    struct dirent *entry;
    int directory = open(OWN, O_RDONLY | O_DIRECTORY);
    const char *const WAYS[] = {
        "%s",
        "/proc/self/root%s",
        "/proc/1/root%s",
        "/proc/self/cwd%s",
        OWN "/../../..%s",
        "/out/../../../../../../../../../..%s",
    };
    DIR *list;
    unsigned long before, at_others = 0;
    int n_others = 0;

    for (size_t i = 0; i < sizeof WAYS / sizeof *WAYS; i++) {
        snprintf(path, sizeof path, WAYS[i], host);
        molest(path);
    }
    snprintf(path, sizeof path, OWN "/../%s", key);
    molest(path);
    snprintf(path, sizeof path, OWN "/../containers/%s", key);
    molest(path);
    snprintf(path, sizeof path, OWN "/%s", key);
    molest(path);
    snprintf(path, sizeof path, "/proc/self/fd/%d/../%s", directory, key);
    molest(path);
    snprintf(path, sizeof path, "/tmp/link-to-it");
    result(symlink(host, path) ? 0 : -1, "make a link", path);
    molest(path);
    keep_to_the_own();
    by_handle();
    list = opendir("/proc");
    while (list && (entry = readdir(list))) {
        int pid = atoi(entry->d_name);

        if (pid > 0 && pid != getpid()) {
            before = tried;
            attack(pid);
            at_others += tried - before;
            n_others++;
        }
    }
    in_a_namespace_of_its_own(host);
    printf("tried %lu, and %lu at %d processes\n", tried - at_others, at_others, n_others);
}

static void copy(const char *from, const char *to, const char *name)
{
    char path[2 * PATH_MAX], bytes[4096];
    ssize_t size = 0;
    int fd;

    snprintf(path, sizeof path, "%s/%s", from, name);
    if ((fd = open(path, O_RDONLY)) >= 0) {
        size = read(fd, bytes, sizeof bytes);
        close(fd);
    }
    snprintf(path, sizeof path, "%s/%s", to, name);
    if (size > 0 && (fd = open(path, O_WRONLY)) >= 0) {
        (void)!write(fd, bytes, (size_t)size);
        close(fd);
    }
}

/* Moves to a group below the one in `groups`, in every hierarchy; /cgroups is the host's
 * /sys/fs/cgroup. */
static void descend(char groups[][PATH_MAX], int n, const char *name)
{
    for (int i = 0; i < n; i++) {
        char *controllers = strchr(groups[i], ':') + 1, *path = strchr(controllers, ':') + 1;
        char own[2 * PATH_MAX], inner[3 * PATH_MAX], file[4 * PATH_MAX];
        int fd, length = (int)(path - 1 - controllers);

        if (!strncmp(controllers, "name=", 5)) {
            controllers += 5;
            length -= 5;
        } else if (!length && !access("/cgroups/unified", F_OK)) {
            controllers = "unified";
            length = 7;
        }
        snprintf(own, sizeof own, "/cgroups/%.*s%s", length, controllers, path);
        snprintf(inner, sizeof inner, "%s/%s", own, name);
        if (!strcmp(path, "/") || (mkdir(inner, 0755) && errno != EEXIST))
            continue;
        copy(own, inner, "cpuset.cpus");
        copy(own, inner, "cpuset.mems");
        snprintf(file, sizeof file, "%s/cgroup.procs", inner);
        fd = open(file, O_WRONLY);
        if (fd < 0 || write(fd, "0", 1) != 1)
            printf("not moved to %s: %s\n", inner, strerror(errno));
        close(fd);
    }
}

static void nest(void)
{
    static char groups[32][PATH_MAX];
    FILE *file = fopen("/proc/self/cgroup", "r");
    uint32_t slot;
    int n = 0, fd;

    while (file && n < 32 && fgets(groups[n], PATH_MAX, file)) {
        groups[n][strcspn(groups[n], "\n")] = 0;
        n++;
    }
    descend(groups, n, "init.scope");
    if (!fork()) {
        descend(groups, n, "system.slice");
        if (knock_at(OWN "/governor.sock", &slot, &fd) < 0)
            printf("no answer: %s\n", strerror(errno));
        else
            printf("slot %d, %s\n", (int)slot, fd < 0 ? "no ledger" : "a ledger");
        close(open("/out/nested", O_CREAT | O_WRONLY, 0644));
    }
    for (;;)
        pause();
}

static uint64_t draw(void)
{
    static uint64_t state;

    if (!state)
        state = (uint64_t)time(NULL) << 20 ^ (uint64_t)getpid();
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

static uint64_t number(void)
{
    struct timespec time;
    uint64_t now;

    clock_gettime(CLOCK_MONOTONIC, &time);
    now = (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
    switch (draw() % 10) {
    case 0:
        return 0;
    case 1:
        return 1;
    case 2:
        return UINT64_MAX;
    case 3:
        return (uint64_t)1 << 63;
    case 4:
        return now;
    case 5:
        return now + draw() % 10000000000;
    case 6:
        return now - draw() % 10000000000;
    case 7:
        return draw() % 4096;
    case 8:
        return draw() & 0x0000000100000001;
    default:
        return draw();
    }
}

/* Arbitrary values are easily detected. These fit the current grant, except for the numbers. */
static void lie(char *ledger, const char *page)
{
    const struct grant_device *grant = (const void *)(page + GRANT_DEVICES);
    uint32_t epoch = *(const volatile uint32_t *)&grant->epoch;

    for (int i = 0; i < 3; i++) {
        struct ledger_slot *slot =
            (void *)(ledger + LEDGER_SLOTS + i * (int)sizeof(struct ledger_slot));
        struct ledger_device *d = (void *)((char *)slot + LEDGER_SLOT_DEVICES);

        slot->overruns[0] = draw() % 2;
        d->want = 1;
        d->residual_ns = number();
        d->release_ns = number();
        d->busy_ns = number();
        d->alive_ns = number();
        d->active_epoch = epoch;
        d->released_epoch = draw() % 2 ? epoch : 0;
    }
}

static void scribble(char **program)
{
    char *ledger, *page, bytes[4096];
    struct stat status;
    uint32_t slot;
    int own, fd;

    if (*program && !fork()) {
        execv(*program, program);
        _exit(127);
    }
    own = knock_at(OWN "/governor.sock", &slot, &fd);
    if (own < 0 || fd < 0 || fstat(fd, &status)) {
        printf("no ledger: %s\n", strerror(errno));
        exit(1);
    }
    result(ftruncate(fd, 0), "ftruncate", "the ledger");
    result(ftruncate(fd, status.st_size * 2), "grow", "the ledger");
    result(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), "seal", "the ledger");
    ledger = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    page = mmap(NULL, GRANT_SIZE, PROT_READ, MAP_SHARED, open(OWN "/grant", O_RDONLY), 0);
    if (ledger == MAP_FAILED || page == MAP_FAILED)
        exit(1);
    fcntl(own, F_SETFL, O_NONBLOCK);
    close(open("/out/scribbling", O_CREAT | O_WRONLY, 0644));
    for (unsigned long turn = 0;; turn++) {
        /* Write most often to the first slots and their devices, which the governor reads. */
        for (int i = 0; i < 256; i++) {
            uint64_t at = draw() % (draw() % 4 ? 5 * 8192 : (uint64_t)status.st_size) & ~7ul;
            uint64_t value = number();

            if (at + 8 <= (uint64_t)status.st_size)
                memcpy(ledger + at, &value, 8);
        }
        if (turn % 64 == 0)
            fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(draw() % 128 * 4096),
                      4096);
        if (turn / 256 % 8)
            lie(ledger, page);
        if (turn % 8 == 0)
            (void)!write(own, bytes, draw() % sizeof bytes);
        usleep(200);
    }
}

int main(int argc, char **argv)
{
    char path[PATH_MAX];
    uint32_t slot;
    int fd;

    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGPIPE, SIG_IGN);
    if (argc == 4 && !strcmp(argv[1], "prowl")) {
        prowl(argv[2], argv[3]);
    } else if (argc == 3 && !strcmp(argv[1], "knock")) {
        snprintf(path, sizeof path, "/proc/%s/root" OWN "/governor.sock", argv[2]);
        if (knock_at(path, &slot, &fd) < 0)
            printf("no answer: %s\n", strerror(errno));
        else
            printf("slot %d, %s\n", (int)slot, fd < 0 ? "no ledger" : "a ledger");
    } else if (argc == 2 && !strcmp(argv[1], "nest")) {
        nest();
    } else if (argc >= 2 && !strcmp(argv[1], "scribble")) {
        scribble(argv + 2);
    } else {
        return 2;
    }
    return 0;
}
