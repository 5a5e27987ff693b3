/*
 * Wraps what the control library and the arbiter need from the operating system and the compiler.
 *
 * The library is mapped into foreign processes, in images with glibc 2.17 or newer. Symbols that
 * moved between glibc's libraries are therefore bound to their oldest version here. System calls
 * are made directly, because errno belongs to the application and because most of glibc's wrappers
 * are cancellation points: they would end a cancelled thread while it holds a lock.
 */
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define likely(x)   __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
#define cold        __attribute__((cold, __noinline__))
#define noinline    __attribute__((__noinline__))

#if defined(__x86_64__)
#define OS_OLDEST "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define OS_OLDEST "GLIBC_2.17"
#else
#error "tidegate supports x86_64 and aarch64"
#endif

#ifdef OS_INTERPOSED
__asm__(".symver dlopen,dlopen@" OS_OLDEST);
__asm__(".symver dlsym,dlsym@" OS_OLDEST);
__asm__(".symver pthread_create,pthread_create@" OS_OLDEST);
__asm__(".symver pthread_detach,pthread_detach@" OS_OLDEST);
#endif

#define NS_PER_US 1000ull
#define NS_PER_MS 1000000ull
#define NS_PER_S  1000000000ull

/* The memory order is part of the name, so that it is visible at the call. */
#define atomic_load_relaxed(p)     __atomic_load_n((p), __ATOMIC_RELAXED)
#define atomic_load_acquire(p)     __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define atomic_load_seq_cst(p)     __atomic_load_n((p), __ATOMIC_SEQ_CST)
#define atomic_store_relaxed(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define atomic_store_release(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define atomic_store_seq_cst(p, v) __atomic_store_n((p), (v), __ATOMIC_SEQ_CST)
/* For a word that only the holder of a lock writes: readers see no torn value, and no locked
 * instruction is needed. */
#define atomic_bump(p, v)             atomic_store_relaxed((p), atomic_load_relaxed(p) + (v))
#define atomic_add_relaxed(p, v)      __atomic_fetch_add((p), (v), __ATOMIC_RELAXED)
#define atomic_add_seq_cst(p, v)      __atomic_fetch_add((p), (v), __ATOMIC_SEQ_CST)
#define atomic_sub_seq_cst(p, v)      __atomic_fetch_sub((p), (v), __ATOMIC_SEQ_CST)
#define atomic_exchange_acq_rel(p, v) __atomic_exchange_n((p), (v), __ATOMIC_ACQ_REL)

/* Makes a system call. Returns what the kernel returns: a negative errno on error. */
#define os_call(number, ...) os_call_fill(number, __VA_ARGS__, 0, 0, 0, 0, 0)
#define os_call_fill(number, a, b, c, d, e, f, ...)                                                \
    os_call_raw(number, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))

static inline long os_call_raw(long number, long a, long b, long c, long d, long e, long f)
{
#if defined(__x86_64__)
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    long result;

    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
#else
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;

    __asm__ volatile("svc 0"
                     : "+r"(x0)
                     : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5)
                     : "memory");
    return x0;
#endif
}

/* Returns NULL on failure. */
static inline void *os_map(size_t size, int protection, int flags, int fd)
{
    long address = os_call(SYS_mmap, NULL, size, protection, flags, fd, 0);

    return address < 0 && address > -4096 ? NULL : (void *)address;
}

static inline void *os_map_memory(size_t size)
{
    return os_map(size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
}

static inline void os_unmap(void *address, size_t size)
{
    os_call(SYS_munmap, address, size);
}

/* Returns the descriptor, or a negative errno. */
static inline int os_open(const char *path)
{
    return (int)os_call(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
}

static inline void os_close(int fd)
{
    os_call(SYS_close, fd);
}

static inline int os_pid(void)
{
    return (int)os_call(SYS_getpid, 0);
}

static inline uint64_t os_now(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * NS_PER_S + (uint64_t)ts.tv_nsec;
}

static inline void os_sleep(uint64_t ns)
{
    struct timespec ts = {(time_t)(ns / NS_PER_S), (long)(ns % NS_PER_S)};

    os_call(SYS_nanosleep, &ts, NULL);
}

static inline void os_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

/*
 * Waits for at most `ns` nanoseconds while *word equals `expected`. Works on read-only shared
 * mappings. Returns nothing, because all causes of a wake-up look the same; the caller checks its
 * condition again.
 */
static inline void os_futex_wait(const uint32_t *word, uint32_t expected, uint64_t ns)
{
    struct timespec ts = {(time_t)(ns / NS_PER_S), (long)(ns % NS_PER_S)};

    os_call(SYS_futex, word, FUTEX_WAIT, expected, &ts);
}

static inline void os_futex_wake(uint32_t *word)
{
    os_call(SYS_futex, word, FUTEX_WAKE, INT_MAX);
}

/* A lock with three states (free, held, held with waiters): Drepper, "Futexes are tricky", 2011. */
struct os_lock {
    uint32_t word;
};

static inline bool os_trylock(struct os_lock *lock)
{
    uint32_t zero = 0;

    return __atomic_compare_exchange_n(&lock->word, &zero, 1, false, __ATOMIC_ACQUIRE,
                                       __ATOMIC_RELAXED);
}

static inline void os_lock(struct os_lock *lock)
{
    if (likely(os_trylock(lock)))
        return;
    while (atomic_exchange_acq_rel(&lock->word, 2) != 0)
        os_call(SYS_futex, &lock->word, FUTEX_WAIT_PRIVATE, 2, NULL);
}

static inline void os_unlock(struct os_lock *lock)
{
    if (atomic_exchange_acq_rel(&lock->word, 0) == 2)
        os_call(SYS_futex, &lock->word, FUTEX_WAKE_PRIVATE, 1);
}
