/*
 * steps SOCKET PROGRAM [ARGUMENT...]: run a program and stop it before each system call that could
 * harm the host.
 *
 * Each call is reported on SOCKET, with one line before the call and one after it. Before the call,
 * the program is stopped until a byte comes back. During that time a test can change the container,
 * so each run hits a race that would otherwise be hit only by chance. If no process listens on
 * SOCKET, the program is not stopped.
 *
 *   > NUMBER PID NAME NUMBERS... "PATH" "CWD"
 *   < NUMBER RESULT "FILE OF THE RESULTING DESCRIPTOR"
 *
 * Exits with the program's status, or with 128 plus the number of the signal that ended it.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/openat2.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#define N_ENTRIES(array) (sizeof(array) / sizeof((array)[0]))

/* path: index of the path argument, or -1. how: 1 for openat2(2), which takes an open_how. */
static const struct call {
    int number;
    const char *name;
    int path;
    int how;
} calls[] = {
    {SYS_open, "open", 0, 0},
    {SYS_creat, "creat", 0, 0},
    {SYS_openat, "openat", 1, 0},
    {SYS_openat2, "openat2", 1, 1},
    {SYS_open_tree, "open_tree", 1, 0},
    {SYS_move_mount, "move_mount", 3, 0},
    {SYS_mount_setattr, "mount_setattr", 1, 0},
    {SYS_mount, "mount", 1, 0},
    {SYS_umount2, "umount2", 0, 0},
    {SYS_fsopen, "fsopen", 0, 0},
    {SYS_fsmount, "fsmount", -1, 0},
    {SYS_pivot_root, "pivot_root", 0, 0},
    {SYS_chroot, "chroot", 0, 0},
    {SYS_chdir, "chdir", 0, 0},
    {SYS_fchdir, "fchdir", -1, 0},
    {SYS_setns, "setns", -1, 0},
    {SYS_unshare, "unshare", -1, 0},
    {SYS_mkdir, "mkdir", 0, 0},
    {SYS_mkdirat, "mkdirat", 1, 0},
    {SYS_mknod, "mknod", 0, 0},
    {SYS_mknodat, "mknodat", 1, 0},
    {SYS_link, "link", 1, 0},
    {SYS_linkat, "linkat", 3, 0},
    {SYS_symlink, "symlink", 1, 0},
    {SYS_symlinkat, "symlinkat", 2, 0},
    {SYS_unlink, "unlink", 0, 0},
    {SYS_unlinkat, "unlinkat", 1, 0},
    {SYS_rmdir, "rmdir", 0, 0},
    {SYS_rename, "rename", 1, 0},
    {SYS_renameat, "renameat", 3, 0},
    {SYS_renameat2, "renameat2", 3, 0},
    {SYS_truncate, "truncate", 0, 0},
    {SYS_ftruncate, "ftruncate", -1, 0},
    {SYS_chmod, "chmod", 0, 0},
    {SYS_fchmod, "fchmod", -1, 0},
    {SYS_fchmodat, "fchmodat", 1, 0},
    {SYS_chown, "chown", 0, 0},
    {SYS_fchown, "fchown", -1, 0},
    {SYS_lchown, "lchown", 0, 0},
    {SYS_fchownat, "fchownat", 1, 0},
    {SYS_setxattr, "setxattr", 0, 0},
    {SYS_statx, "statx", 1, 0},
    {SYS_getdents64, "getdents64", -1, 0},
    {SYS_connect, "connect", -1, 0},
    {SYS_execve, "execve", 0, 0},
    {SYS_execveat, "execveat", 1, 0},
    {SYS_fork, "fork", -1, 0},
    {SYS_vfork, "vfork", -1, 0},
    {SYS_clone, "clone", -1, 0},
    {SYS_clone3, "clone3", -1, 0},
    {SYS_prctl, "prctl", -1, 0},
};

static int link_fd = -1;

/* Traced processes, and the call that each one is in. The hook forks once. */
static struct process {
    pid_t pid;
    const struct call *call;
    unsigned count;
} processes[16];

static _Noreturn void fail(const char *what)
{
    dprintf(2, "steps: %s: %s\n", what, strerror(errno));
    _exit(125);
}

static void connect_to(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};

    if (strlen(path) >= sizeof address.sun_path)
        return;
    strcpy(address.sun_path, path);
    link_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(link_fd, (struct sockaddr *)&address, sizeof address) < 0) {
        close(link_fd);
        link_fd = -1;
    }
}

static void tell(const char *line, size_t length)
{
    if (link_fd >= 0 && send(link_fd, line, length, MSG_NOSIGNAL) != (ssize_t)length) {
        close(link_fd);
        link_fd = -1;
    }
}

static void wait_for_leave(void)
{
    char byte;

    if (link_fd >= 0 && read(link_fd, &byte, 1) != 1) {
        close(link_fd);
        link_fd = -1;
    }
}

/* Writes text in quotation marks, unprintable characters as \xNN; returns the length. */
static size_t quote(char *to, size_t size, const char *text)
{
    size_t n = 0;

    to[n++] = '"';
    for (; *text && n + 6 < size; text++) {
        unsigned char c = (unsigned char)*text;
        if (c < ' ' || c > '~' || c == '"' || c == '\\')
            n += (size_t)snprintf(to + n, size - n, "\\x%02x", c);
        else
            to[n++] = (char)c;
    }
    to[n++] = '"';
    to[n] = 0;
    return n;
}

static void read_text(pid_t pid, uint64_t from, char *text, size_t size)
{
    size_t n = 0;

    /* One byte at a time, because the page after the text may not be mapped. */
    while (from && n + 1 < size) {
        struct iovec to = {text + n, 1}, at = {(void *)(from + n), 1};
        if (process_vm_readv(pid, &to, 1, &at, 1, 0) != 1 || !text[n])
            break;
        n++;
    }
    text[n] = 0;
}

static void read_link(pid_t pid, const char *what, char *text, size_t size)
{
    char path[64];
    ssize_t n;

    snprintf(path, sizeof path, "/proc/%d/%s", pid, what);
    n = readlink(path, text, size - 1);
    text[n < 0 ? 0 : n] = 0;
}

static const struct call *find_call(uint64_t number)
{
    for (size_t i = 0; i < N_ENTRIES(calls); i++)
        if ((uint64_t)calls[i].number == number)
            return &calls[i];
    return NULL;
}

/* Returns the entry of a process. If it has none, an entry whose process is in no call is reused:
 * few processes are in calls at once. */
static struct process *find_process(pid_t pid)
{
    struct process *free_one = NULL;

    for (size_t i = 0; i < N_ENTRIES(processes); i++) {
        if (processes[i].pid == pid)
            return &processes[i];
        if (!processes[i].call)
            free_one = &processes[i];
    }
    if (!free_one)
        fail("too many processes");
    *free_one = (struct process){.pid = pid};
    return free_one;
}

static void tell_entry(pid_t pid, unsigned count, const struct user_regs_struct *r,
                       const struct call *call)
{
    const uint64_t args[] = {r->rdi, r->rsi, r->rdx, r->r10, r->r8, r->r9};
    uint64_t numbers[4] = {args[0], args[1], args[2], args[3]};
    char line[16384], path[4096] = "", cwd[4096];
    size_t n;

    if (call->path >= 0)
        read_text(pid, args[call->path], path, sizeof path);
    if (call->how) {
        struct open_how how = {0};
        struct iovec to = {&how, sizeof how}, at = {(void *)args[2], sizeof how};
        process_vm_readv(pid, &to, 1, &at, 1, 0);
        numbers[2] = how.flags;
        numbers[3] = how.resolve;
    }
    read_link(pid, "cwd", cwd, sizeof cwd);
    n = (size_t)snprintf(line, sizeof line, "> %u %d %s %lld %lld %lld %lld ", count, pid,
                         call->name, (long long)(int)numbers[0], (long long)numbers[1],
                         (long long)numbers[2], (long long)numbers[3]);
    n += quote(line + n, sizeof line - n - 4096, path);
    line[n++] = ' ';
    n += quote(line + n, sizeof line - n - 2, cwd);
    line[n++] = '\n';
    tell(line, n);
}

static void tell_exit(pid_t pid, unsigned count, const struct call *call)
{
    struct user_regs_struct r;
    char line[8192], what[4096] = "", name[32];
    size_t n;

    if (ptrace(PTRACE_GETREGS, pid, 0, &r) < 0)
        return;
    if ((long long)r.rax >= 0 && strncmp(call->name, "open", 4) == 0) {
        snprintf(name, sizeof name, "fd/%lld", (long long)r.rax);
        read_link(pid, name, what, sizeof what);
    }
    n = (size_t)snprintf(line, sizeof line, "< %u %lld ", count, (long long)r.rax);
    n += quote(line + n, sizeof line - n - 2, what);
    line[n++] = '\n';
    tell(line, n);
}

static _Noreturn void start(char **argv)
{
    struct sock_filter filter[N_ENTRIES(calls) + 3];
    struct sock_fprog program = {.len = N_ENTRIES(filter), .filter = filter};
    size_t n = 0;

    filter[n++] =
        (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (size_t i = 0; i < N_ENTRIES(calls); i++)
        filter[n++] =
            (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)calls[i].number,
                                         (uint8_t)(N_ENTRIES(calls) - i), 0);
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRACE);
    if (ptrace(PTRACE_TRACEME, 0, 0, 0) < 0)
        fail("PTRACE_TRACEME");
    raise(SIGSTOP);
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0)
        fail("PR_SET_SECCOMP");
    execv(argv[0], argv);
    fail(argv[0]);
}

int main(int argc, char **argv)
{
    const long options = PTRACE_O_TRACESECCOMP | PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACEEXEC |
                         PTRACE_O_TRACEFORK | PTRACE_O_TRACEVFORK | PTRACE_O_TRACECLONE |
                         PTRACE_O_EXITKILL;
    unsigned count = 0;
    int status;
    pid_t child;

    if (argc < 3)
        return 125;
    child = fork();
    if (child < 0)
        fail("fork");
    if (child == 0)
        start(argv + 2);
    connect_to(argv[1]); /* after the fork, so that the program does not inherit it */
    if (waitpid(child, &status, 0) < 0 || ptrace(PTRACE_SETOPTIONS, child, 0, options) < 0)
        fail("PTRACE_SETOPTIONS");
    ptrace(PTRACE_CONT, child, 0, 0);
    for (;;) {
        pid_t pid = waitpid(-1, &status, __WALL);
        long signal = 0, how = PTRACE_CONT;
        struct process *process;

        if (pid < 0)
            fail("waitpid");
        process = find_process(pid);
        if (WIFEXITED(status) || WIFSIGNALED(status)) {
            process->call = NULL;
            if (pid != child)
                continue;
            return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        }
        if (status >> 8 == (SIGTRAP | (PTRACE_EVENT_SECCOMP << 8))) {
            struct user_regs_struct r;
            if (ptrace(PTRACE_GETREGS, pid, 0, &r) == 0 &&
                (process->call = find_call(r.orig_rax))) {
                process->count = ++count;
                tell_entry(pid, count, &r, process->call);
                wait_for_leave();
                how = PTRACE_SYSCALL;
            }
        } else if (WSTOPSIG(status) == (SIGTRAP | 0x80)) {
            if (process->call)
                tell_exit(pid, process->count, process->call);
            process->call = NULL;
        } else if (status >> 16) {
            how =
                process->call ? PTRACE_SYSCALL : PTRACE_CONT; /* an event of exec, fork or clone */
        } else if (WSTOPSIG(status) != SIGSTOP || pid == child) {
            signal = WSTOPSIG(status);
        }
        ptrace((enum __ptrace_request)how, pid, 0, signal);
    }
}
