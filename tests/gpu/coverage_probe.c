/*
 * The coverage probe: calls every function that cuda.h declares, in every form, and reports
 * the effect of each call on the GPU.
 *
 *   coverage_probe --list                       lists names, variants and reasons; calls nothing
 *   coverage_probe [--block MiB] [--only NAME]  prints a JSON line for each call
 *
 * The coverage probe does not use libcontrol's table. Memory is what NVML reports before and after
 * a call. GPU time is measured by events that are recorded through the original driver, while
 * the legacy stream is held until the call has returned. In a container with a quota the program
 * also reports how the process's slot of the ledger changed. tests/gpu/coverage_probe.py runs the
 * program on the bare machine and in a container, and compares the results.
 *
 * Calls share a process until one of them leaves the context unusable, kills the process or hangs,
 * or needs a separate process (OWN). The calls themselves are in coverage_probe_calls.h.
 */
#define _GNU_SOURCE
/* Declares each form under the name by which the driver exports it. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#if CUDA_VERSION < 13000
#error "the calls are those of cuda.h 13.0 and later"
#endif

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "layout.gen.h"

#define MIB     (1024ull * 1024)
#define TAKE    (64 * MIB) /* size of an allocation */
#define HUNG_MS 20000      /* a call without output for longer is killed */
#define HOLD_NS 30000000   /* a call that takes longer waits for the GPU */
#define SETTLE_NS                                                                                  \
    1000000000ull /* time in which the account must show what the driver did on its own */
#define SETTLED_NS 1200000000ull /* findings without a change for this long have settled */
#define SMALL      (4 << 20)     /* bytes that the driver may take for itself in any call */
#define TOOK       (2 << 20)     /* smallest change of memory that counts, in bytes */
#define WORKED_US  40
#define ROUNDS     3 /* repetitions of a call that waits: the fastest counts */
#define ABSENT     ((CUresult) - 1)
#define CONTROLLED "tidegate-ledger"

enum {
    PTDS = 1 << 0,  /* the form for the per-thread default stream exists, with suffix _ptds */
    PTSZ = 1 << 1,  /* the same, with suffix _ptsz */
    OWN = 1 << 2,   /* needs a separate process */
    BARE = 1 << 3,  /* needs to run without a context; implies OWN */
    OLD = 1 << 4,   /* needs a context of the 32-bit interface */
    SIZED = 1 << 5, /* may be repeated, and does as much work as `work_size` says */
    FREE = 1 << 6,  /* GPU time is ignored: the call cannot be put between two events */
    HOST = 1 << 7,  /* moves bytes between host and device */
    PAID = 1 << 8,  /* the memory was charged before, or belongs to another process */
    LATE = 1 << 9, /* the driver loads code or frees memory on its own: a sample of NVML finds it */
};

struct one {
    const char *name;
    const char *variant; /* distinguishes several calls of the function */
    const char *reason;  /* why it cannot be called here, or NULL */
    unsigned place;      /* line in coverage_probe_calls.h, for the order of the calls */
    unsigned flags;
    void (*prepare)(void);
    CUresult (*call)(void *target);
};

/* Shared by the calls, and made once per process. */
static struct {
    CUdevice device;
    CUcontext context;
    CUstream stream;
    CUevent event;
    CUmodule module;
    CUfunction burn;
    CUdeviceptr a, b; /* blocks of `block` bytes, made on first use */
    char *host;       /* pinned, HOST_SIZE bytes */
} w;

static size_t block = 1024 * MIB;
static size_t work_size; /* bytes that a SIZED call copies or fills */
static uint64_t work_ns; /* duration of a SIZED kernel */
static const char *self; /* this program, for helpers */
static pid_t helper;     /* another process with memory to share, 0 if none */
static void *cuda, *origin_cuda;
static jmp_buf unprepared; /* target after a preparation has failed */
static char failure[256];
static char detail[1024]; /* what a call reports besides its result */

#define HOST_SIZE (64 * MIB)
#define MOST(n)   (work_size < (n) ? work_size : (n))

/* --- the driver ------------------------------------------------------------------------------ */

static CUresult absent(void)
{
    return ABSENT;
}

static void *find(const char *name)
{
    void *found = dlsym(cuda, name);

    return found ? found : (void *)absent;
}

static void *find_original(const char *name)
{
    void *found = dlsym(origin_cuda, name);

    return found ? found : (void *)absent;
}

/* A function as a program finds it, and as the original driver exports it. */
#define CU(name)     ((typeof(&name))find(#name))
#define DRIVER(name) ((typeof(&name))find_original(#name))

static void need(int result, const char *what)
{
    if (!result)
        return;
    snprintf(failure, sizeof failure, "%s answered %d", what, result);
    for (char *c = failure; *c; c++)
        if (*c == '"' || *c == '\\') /* inside a JSON string */
            *c = '\'';
    longjmp(unprepared, 1);
}
#define NEED(call) need((int)(call), #call)

/* Repeats a copy that is too small to be measured once. */
#define AGAIN(times, call)                                                                         \
    ({                                                                                             \
        CUresult r_ = 0;                                                                           \
        for (int i_ = 0; i_ < (times) && !r_; i_++)                                                \
            r_ = (call);                                                                           \
        r_;                                                                                        \
    })

static uint64_t now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

#include "coverage_probe_cases.h"

/* --- what NVML sees -------------------------------------------------------------------------- */

struct nvml_memory {
    unsigned long long total, free, used;
};

struct nvml_process {
    unsigned int pid;
    unsigned long long used;
    unsigned int gpu_instance, compute_instance;
};

static struct {
    void *device;
    int (*memory)(void *, struct nvml_memory *);
    int (*processes)(void *, unsigned int *, struct nvml_process *);
} nvml;

static void nvml_open(void)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW), *original;
    int (*init)(void), (*by_index)(unsigned int, void **);

    original = dlopen("libnvidia-ml-origin.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (original)
        library = original;
    if (!library)
        return;
    init = (int (*)(void))dlsym(library, "nvmlInit_v2");
    by_index = (int (*)(unsigned int, void **))dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
    if (!init || !by_index || init() || by_index(0, &nvml.device))
        return;
    nvml.memory = (int (*)(void *, struct nvml_memory *))dlsym(library, "nvmlDeviceGetMemoryInfo");
    nvml.processes = (int (*)(void *, unsigned int *, struct nvml_process *))dlsym(
        library, "nvmlDeviceGetComputeRunningProcesses_v3");
}

struct memory {
    int64_t processes; /* sum over the processes that NVML lists, -1 if it lists none */
    int64_t device;    /* in use on the device, -1 if NVML does not say */
};

static struct memory memory_now(void)
{
    struct memory m = {-1, -1};
    struct nvml_memory info;
    struct nvml_process list[64];
    unsigned int n = 64;

    if (nvml.memory && nvml.memory(nvml.device, &info) == 0)
        m.device = (int64_t)info.used;
    /* No other program runs, so the sum is taken without pids, which differ in a container. */
    if (nvml.processes && nvml.processes(nvml.device, &n, list) == 0 && n) {
        m.processes = 0;
        for (unsigned int i = 0; i < n; i++)
            m.processes += (int64_t)list[i].used;
    }
    return m;
}

/* --- what the ledger says -------------------------------------------------------------------- */

static const struct ledger_device *ledger;
static const struct grant_device *granted;

static void ledger_find(void)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[1024];

    while ((!ledger || !granted) && maps && fgets(line, sizeof line, maps)) {
        char *base;

        if (strstr(line, "/run/tidegate/grant") && !granted)
            granted = (const struct grant_device *)(strtoull(line, NULL, 16) + GRANT_DEVICES);
        if (!strstr(line, CONTROLLED))
            continue;
        base = (char *)strtoull(line, NULL, 16);
        for (size_t i = 0; i < LAYOUT_N_SLOTS; i++) {
            char *slot = base + LEDGER_SLOTS + i * sizeof(struct ledger_slot);
            const struct ledger_slot *owner = (const struct ledger_slot *)slot;

            if (owner->state == 1 && owner->pid == (uint32_t)getpid())
                ledger = (const struct ledger_device *)(slot + LEDGER_SLOT_DEVICES);
        }
    }
    if (maps)
        fclose(maps);
}

/* The counters that a call may change, by name. */
#define COUNTERS(X)                                                                                \
    X(memory)                                                                                      \
    X(unseen)                                                                                      \
    X(provisional)                                                                                 \
    X(provisional_ns) X(launches) X(transfers) X(transfer_bytes) X(small) X(contexts) X(refused)

struct counters {
#define X(name) int64_t name;
    COUNTERS(X)
#undef X
    int64_t overhead; /* memory that the governor found beyond the ledgers */
};

static struct counters counters_now(void)
{
    struct counters c = {0};

    if (!ledger)
        return c;
#define X(name) c.name = (int64_t)__atomic_load_n(&ledger->name, __ATOMIC_SEQ_CST);
    COUNTERS(X)
#undef X
    if (granted)
        c.overhead = (int64_t)__atomic_load_n(&granted->memory_overhead, __ATOMIC_SEQ_CST);
    return c;
}

/* --- a process of calls ---------------------------------------------------------------------- */

static FILE *out;

static struct {
    CUevent before, after;
    volatile uint32_t *word; /* the legacy stream is held while it is 0 */
    CUdeviceptr word_address;
    bool ready;
} gate;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t until; /* 0: no call waits */
    bool fired;
} watch = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

/* Opens the gate for a call that waits for the held stream. */
static void *watch_thread(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&watch.lock);
    for (;;) {
        struct timespec ts;

        if (!watch.until) {
            pthread_cond_wait(&watch.changed, &watch.lock);
            continue;
        }
        if (now_ns() >= watch.until) {
            *gate.word = 1;
            watch.fired = true;
            watch.until = 0;
            continue;
        }
        clock_gettime(CLOCK_REALTIME, &ts);
        ts.tv_nsec += 2000000;
        ts.tv_sec += ts.tv_nsec / 1000000000;
        ts.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&watch.changed, &watch.lock, &ts);
    }
    return NULL;
}

static bool watch_set(uint64_t until)
{
    bool fired;

    pthread_mutex_lock(&watch.lock);
    fired = watch.fired;
    watch.until = until;
    if (until)
        watch.fired = false;
    pthread_cond_signal(&watch.changed);
    pthread_mutex_unlock(&watch.lock);
    return fired;
}

/* The events and the word are created by the original driver, so that they are not governed. */
static void gate_make(void)
{
    pthread_t thread;
    void *word;

    if (DRIVER(cuEventCreate)(&gate.before, 0) || DRIVER(cuEventCreate)(&gate.after, 0) ||
        DRIVER(cuMemHostAlloc)(&word, 4096, CU_MEMHOSTALLOC_DEVICEMAP))
        return;
    gate.word = word;
    gate.word_address = (CUdeviceptr)(uintptr_t)word;
    *gate.word = 1;
    gate.ready = pthread_create(&thread, NULL, watch_thread, NULL) == 0;
}

static bool gate_close(void)
{
    *gate.word = 0;
    if (DRIVER(cuStreamWaitValue32_v2)(CU_STREAM_LEGACY, gate.word_address, 1,
                                       CU_STREAM_WAIT_VALUE_GEQ) ||
        DRIVER(cuEventRecord)(gate.before, CU_STREAM_LEGACY)) {
        *gate.word = 1;
        return false;
    }
    watch_set(now_ns() + HOLD_NS);
    return true;
}

static CUresult between(float *ms)
{
    CUresult r = DRIVER(cuEventSynchronize)(gate.after);

    return r ? r : DRIVER(cuEventElapsedTime)(ms, gate.before, gate.after);
}

/* Returns the shortest time of several calls with the work of `size` and `ns`, or -1 if one failed.
 */
static double ungated_us(const struct one *one, void *target, size_t size, uint64_t ns)
{
    double best = -1;

    work_size = size;
    work_ns = ns;
    for (int i = 0; i < ROUNDS; i++) {
        float ms;

        if (DRIVER(cuCtxSynchronize)() || DRIVER(cuEventRecord)(gate.before, CU_STREAM_LEGACY) ||
            one->call(target) || DRIVER(cuEventRecord)(gate.after, CU_STREAM_LEGACY) ||
            between(&ms))
            return -1;
        if (best < 0 || ms * 1e3 < best)
            best = ms * 1e3;
    }
    return best;
}

static void print_counters(const char *name, struct counters from, struct counters to)
{
    const char *separator = "";

    fprintf(out, ", \"%s\": {", name);
#define X(counter)                                                                                 \
    if (to.counter != from.counter) {                                                              \
        fprintf(out, "%s\"%s\": %lld", separator, #counter,                                        \
                (long long)(to.counter - from.counter));                                           \
        separator = ", ";                                                                          \
    }
    COUNTERS(X)
    X(overhead)
#undef X
        (void) separator;
    fprintf(out, "}");
}

static void print_head(const struct one *one, const char *suffix, const char *outcome)
{
    fprintf(out, "{\"name\": \"%s%s\", \"variant\": \"%s\", \"outcome\": \"%s\"", one->name, suffix,
            one->variant, outcome);
    fprintf(out, ", \"host\": %s, \"paid\": %s, \"late\": %s", one->flags & HOST ? "true" : "false",
            one->flags & PAID ? "true" : "false", one->flags & LATE ? "true" : "false");
}

static void print_reason(const struct one *one, const char *suffix, const char *outcome,
                         const char *reason)
{
    print_head(one, suffix, outcome);
    fprintf(out, ", \"reason\": \"%s\"}\n", reason);
    fflush(out);
}

/* Returns whether the call can be made; if not, `failure` says what went wrong. */
static bool prepare(const struct one *one)
{
    memset(&v, 0, sizeof v);
    detail[0] = '\0';
    work_size = block;
    work_ns = 1000000;
    if (setjmp(unprepared))
        return false;
    one->prepare();
    return true;
}

static int64_t memory_moved(const struct memory memory[2])
{
    int64_t process = memory[1].processes - memory[0].processes;

    return process ? process : memory[1].device - memory[0].device;
}

/* Returns whether the account has at least half of the change, with its sign; see
 * coverage_probe.py. */
static bool accounted(int64_t moved, const struct counters *from, const struct counters *to,
                      bool late)
{
    int64_t sign = moved < 0 ? -1 : 1;
    int64_t provisional = sign * (to->provisional - from->provisional);
    int64_t found = sign * (to->memory - from->memory);
    int64_t attributed = found - sign * (to->unseen - from->unseen);

    if (attributed > found)
        found = attributed;
    if (provisional > 0)
        found += provisional;
    if (late)
        found += sign * (to->overhead - from->overhead);
    return 2 * found >= sign * moved;
}

/* Waits until the governor's findings stop changing: a sample may be up to a second old. */
static void settle(void)
{
    uint64_t begin = now_ns(), since = begin;
    int64_t before = counters_now().overhead;

    while (now_ns() - since < SETTLED_NS && now_ns() - begin < 5 * SETTLED_NS) {
        int64_t overhead;

        usleep(20000);
        overhead = counters_now().overhead;
        if (overhead != before)
            since = now_ns();
        before = overhead;
    }
}

/* Returns whether memory was taken or freed, or the GPU worked, and no counter shows it yet. */
static bool unnoticed(const struct counters *from, const struct counters *to,
                      const struct memory memory[2], double gpu_us, bool late)
{
    int64_t moved = memory_moved(memory);

    late = late || (moved >= -SMALL && moved <= SMALL);
    if ((moved >= TOOK || moved <= -TOOK) && !accounted(moved, from, to, late))
        return true;
    return gpu_us > WORKED_US && to->launches == from->launches && to->small == from->small &&
           to->transfers == from->transfers;
}

/* Returns whether the process can continue with the next call. */
static bool judge(const struct one *one, const char *suffix)
{
    struct memory memory[2];
    struct counters counters[3];
    bool gated = false, waited = false;
    double gpu_us = -1;
    char name[128];
    void *target;
    uint64_t start, wall;
    CUresult r;

    snprintf(name, sizeof name, "%s%s", one->name, suffix);
    target = dlsym(cuda, name);
    if (!target) {
        print_reason(one, suffix, "absent", "the driver has no such symbol");
        return true;
    }
    if (!prepare(one)) {
        print_reason(one, suffix, "unprepared", failure);
        return !(one->flags & (OWN | BARE)) && w.context && DRIVER(cuCtxSynchronize)() == 0;
    }
    /* A call that is FREE may itself wait, and a pool frees memory at the first wait. */
    if (w.context && !(one->flags & FREE))
        DRIVER(cuCtxSynchronize)();
    if (ledger && one->flags & LATE)
        settle();
    memory[0] = memory_now();
    if (gate.ready && !(one->flags & (FREE | BARE)))
        gated = gate_close();
    counters[0] = counters_now();
    start = now_ns();
    r = one->call(target);
    wall = now_ns() - start;
    counters[1] = counters_now();
    if (w.context)
        DRIVER(cuCtxSetCurrent)(w.context);
    if (gated) {
        CUresult recorded = DRIVER(cuEventRecord)(gate.after, CU_STREAM_LEGACY);
        float ms;

        waited = watch_set(0);
        *gate.word = 1;
        if (!recorded && !between(&ms))
            gpu_us = ms * 1e3;
        if (waited) {
            /* The time between the events includes host time; only the part that grows with the
             * work is GPU time. */
            gpu_us = -1;
            if ((one->flags & SIZED) && !r) {
                double most = ungated_us(one, target, block, 2000000);
                double least = ungated_us(one, target, 65536, 1000);

                if (most >= 0 && least >= 0)
                    gpu_us = most - least;
            }
        }
    }
    if (v.capturing) {
        CUgraph graph;

        DRIVER(cuStreamEndCapture)(v.capturing, &graph);
    }
    if (w.context)
        DRIVER(cuCtxSynchronize)();
    memory[1] = memory_now();
    counters[2] = counters_now();
    /* Memory that a call takes itself must be charged at once. Memory that the driver takes or
     * frees on its own is found by a later sample, and launches are counted a little later. */
    if (ledger) {
        uint64_t end = now_ns() + SETTLE_NS;

        while (unnoticed(&counters[0], &counters[2], memory, gpu_us, one->flags & LATE) &&
               now_ns() < end) {
            usleep(10000);
            counters[2] = counters_now();
        }
    }
    print_head(one, suffix, "ran");
    fprintf(out, ", \"result\": %d, \"wall_us\": %.1f, \"gpu_us\": %.1f, \"waited\": %s", (int)r,
            (double)wall / 1e3, gpu_us, waited ? "true" : "false");
    if (detail[0])
        fprintf(out, ", \"detail\": \"%s\"", detail);
    /* Omitted if NVML lists no process, or lists this one only before or only afterwards. */
    if (memory[0].processes >= 0 && memory[1].processes >= 0)
        fprintf(out, ", \"process\": %lld", (long long)(memory[1].processes - memory[0].processes));
    if (memory[0].device >= 0 && memory[1].device >= 0)
        fprintf(out, ", \"device\": %lld", (long long)(memory[1].device - memory[0].device));
    if (ledger) {
        print_counters("returned", counters[0], counters[1]);
        print_counters("after", counters[0], counters[2]);
    }
    fprintf(out, "}\n");
    fflush(out);
    return !(one->flags & (OWN | BARE)) && w.context && DRIVER(cuCtxSynchronize)() == 0;
}

/* Creates what the calls of a kind need; on failure, `failure` says why. */
static bool child_start(unsigned kind)
{
    if (setjmp(unprepared))
        return false;
    nvml_open();
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    need(!cuda, "dlopen of libcuda.so.1");
    origin_cuda = dlopen("libcuda-origin.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (!origin_cuda)
        origin_cuda = cuda;
    NEED(CU(cuInit)(0));
    NEED(CU(cuDeviceGet)(&w.device, 0));
    ledger_find();
    if (kind & BARE)
        return true;
    if (kind & OLD)
        NEED(CU(cuCtxCreate)(&w.context, 0, w.device));
    else
        NEED(CU(cuDevicePrimaryCtxRetain)(&w.context, w.device));
    NEED(CU(cuCtxSetCurrent)(w.context));
    make_shared();
    gate_make();
    return true;
}

struct step {
    const struct one *one;
    const char *suffix;
};

static unsigned kind_of(const struct step *step)
{
    return step->one->flags & (OLD | BARE);
}

/* Runs the steps of one kind from `first` on, announcing each so that the parent knows the last
 * one. */
static _Noreturn void child(const struct step *steps, size_t n, size_t first, int fd)
{
    unsigned kind = kind_of(&steps[first]);

    out = fdopen(fd, "w");
    fprintf(out, "begin %zu\n", first);
    fflush(out);
    if (!child_start(kind)) {
        print_reason(steps[first].one, steps[first].suffix, "unprepared", failure);
        _exit(0);
    }
    for (size_t i = first; i < n; i++) {
        /* A call that needs a separate process must be the first in it. */
        if (kind_of(&steps[i]) != kind || (i != first && steps[i].one->flags & (OWN | BARE)))
            break;
        fprintf(out, "begin %zu\n", i);
        fflush(out);
        if (!judge(steps[i].one, steps[i].suffix))
            break;
    }
    fflush(out);
    if (helper > 0) {
        kill(helper, SIGKILL);
        waitpid(helper, NULL, 0);
    }
    _exit(0);
}

/* --- the parent ------------------------------------------------------------------------------ */

/* Forwards a child's lines. Returns its status, or -1 if it was silent for too long. */
static int follow(pid_t pid, int fd, size_t *last)
{
    FILE *in = fdopen(fd, "r");
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    char *line = NULL;
    size_t size = 0;
    int status;

    /* The stream has no buffer, so that poll sees what has not been read yet. */
    setvbuf(in, NULL, _IONBF, 0);
    for (;;) {
        int ready = poll(&wait, 1, HUNG_MS);

        if (ready < 0 && errno == EINTR)
            continue;
        if (ready <= 0) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            fclose(in);
            free(line);
            return -1;
        }
        if (getline(&line, &size, in) < 0)
            break;
        if (sscanf(line, "begin %zu", last) != 1)
            fputs(line, stdout);
    }
    fclose(in);
    free(line);
    waitpid(pid, &status, 0);
    return status;
}

static void run(const struct step *steps, size_t n)
{
    size_t next = 0;

    prctl(PR_SET_CHILD_SUBREAPER, 1);
    while (next < n) {
        size_t last = next;
        char reason[64];
        int pipes[2], status;
        pid_t pid;

        fflush(stdout);
        if (steps[next].one->reason) {
            out = stdout;
            print_reason(steps[next].one, steps[next].suffix, "not called",
                         steps[next].one->reason);
            next++;
            continue;
        }
        if (pipe2(pipes, O_CLOEXEC)) {
            perror("coverage_probe: pipe2");
            exit(1);
        }
        pid = fork();
        if (pid == 0) {
            close(pipes[0]);
            child(steps, n, next, pipes[1]);
        }
        close(pipes[1]);
        if (pid < 0) {
            perror("coverage_probe: fork");
            exit(1);
        }
        status = follow(pid, pipes[0], &last);
        /* The helper was killed with the child; its memory is free before the next call is
         * measured. */
        while (waitpid(-1, NULL, 0) > 0 || errno == EINTR)
            continue;
        out = stdout;
        if (status) {
            if (status == -1)
                snprintf(reason, sizeof reason, "no answer for %d s", HUNG_MS / 1000);
            else if (WIFSIGNALED(status))
                snprintf(reason, sizeof reason, "signal %d", WTERMSIG(status));
            else
                snprintf(reason, sizeof reason, "exit status %d", WEXITSTATUS(status));
            print_reason(steps[last].one, steps[last].suffix, status == -1 ? "hung" : "crashed",
                         reason);
        }
        next = last + 1;
    }
}

static const char *option(int argc, char **argv, const char *name, const char *otherwise)
{
    for (int i = 1; i + 1 < argc; i++)
        if (!strcmp(argv[i], name))
            return argv[i + 1];
    return otherwise;
}

static int by_kind(const void *x, const void *y)
{
    const struct step *a = x, *b = y;
    unsigned ka = a->one->flags & (OLD | BARE | OWN), kb = b->one->flags & (OLD | BARE | OWN);

    if (!!a->one->reason != !!b->one->reason)
        return a->one->reason ? 1 : -1;
    if (ka != kb)
        return ka < kb ? -1 : 1;
    if (a->one->place != b->one->place)
        return a->one->place < b->one->place ? -1 : 1;
    return strcmp(a->suffix, b->suffix);
}

int main(int argc, char **argv)
{
    const char *only = option(argc, argv, "--only", NULL);
    size_t n = 0;
    struct step *steps;

    self = "/proc/self/exe";
    if (argc > 1 && !strcmp(argv[1], "--share"))
        return share();
    block = strtoull(option(argc, argv, "--block", "1024"), NULL, 10) * MIB;
    steps = calloc(3 * (size_t)(__stop_cases - __start_cases), sizeof *steps);
    for (const struct one *const *at = __start_cases; at < __stop_cases; at++) {
        const struct one *one = *at;
        const char *suffixes[] = {"", "_ptds", "_ptsz"};
        const unsigned wanted[] = {0, PTDS, PTSZ};

        for (int i = 0; i < 3; i++) {
            char name[128];

            snprintf(name, sizeof name, "%s%s", one->name, suffixes[i]);
            if ((one->flags & wanted[i]) == wanted[i] && (!only || !strcmp(only, name)))
                steps[n++] = (struct step){one, suffixes[i]};
        }
    }
    qsort(steps, n, sizeof *steps, by_kind);
    if (argc > 1 && !strcmp(argv[1], "--list"))
        for (size_t i = 0; i < n; i++)
            printf("%s%s\t%s\t%s\n", steps[i].one->name, steps[i].suffix, steps[i].one->variant,
                   steps[i].one->reason ? steps[i].one->reason : "");
    else
        run(steps, n);
    free(steps);
    return 0;
}
