/*
 * The operating system and the compiler, as far as the control library and the arbiter need them.
 *
 * The library is mapped into other people's processes, in images with any glibc since 2.17: symbols
 * that moved between glibc's libraries are bound to their oldest version here, and what has no old
 * symbol is a system call.
 */
#pragma once

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define likely(x)   __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
#define cold        __attribute__((cold, __noinline__))
#define noinline    __attribute__((__noinline__))

#if defined(__x86_64__)
#define PRIM_OLDEST "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define PRIM_OLDEST "GLIBC_2.17"
#else
#error "tidegate supports x86_64 and aarch64"
#endif

#ifdef PRIM_GUEST
__asm__(".symver dlopen,dlopen@" PRIM_OLDEST);
__asm__(".symver dlsym,dlsym@" PRIM_OLDEST);
__asm__(".symver pthread_create,pthread_create@" PRIM_OLDEST);
__asm__(".symver fcntl64,fcntl@" PRIM_OLDEST);
__asm__(".symver pthread_detach,pthread_detach@" PRIM_OLDEST);
#endif

#define NS_PER_US 1000ull
#define NS_PER_MS 1000000ull
#define NS_PER_S  1000000000ull

/* The memory order is in the name, so that a reader sees it at the call. */
#define atomic_load_relaxed(p)     __atomic_load_n((p), __ATOMIC_RELAXED)
#define atomic_load_acquire(p)     __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define atomic_load_seq_cst(p)     __atomic_load_n((p), __ATOMIC_SEQ_CST)
#define atomic_store_relaxed(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define atomic_store_release(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define atomic_store_seq_cst(p, v) __atomic_store_n((p), (v), __ATOMIC_SEQ_CST)
/* Where a lock keeps other writers away: readers see whole numbers, and no bus is locked. */
#define atomic_bump(p, v)             atomic_store_relaxed((p), atomic_load_relaxed(p) + (v))
#define atomic_add_relaxed(p, v)      __atomic_fetch_add((p), (v), __ATOMIC_RELAXED)
#define atomic_add_seq_cst(p, v)      __atomic_fetch_add((p), (v), __ATOMIC_SEQ_CST)
#define atomic_sub_seq_cst(p, v)      __atomic_fetch_sub((p), (v), __ATOMIC_SEQ_CST)
#define atomic_exchange_acq_rel(p, v) __atomic_exchange_n((p), (v), __ATOMIC_ACQ_REL)

static inline uint64_t prim_now(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * NS_PER_S + (uint64_t)ts.tv_nsec;
}

static inline void prim_sleep(uint64_t ns)
{
    struct timespec ts = {(time_t)(ns / NS_PER_S), (long)(ns % NS_PER_S)};

    syscall(SYS_nanosleep, &ts, NULL);
}

static inline void prim_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

/*
 * Waits while *word is expected, for ns nanoseconds at most. Works on read-only shared mappings.
 * The caller looks again for itself: every cause of waking looks the same.
 */
static inline void prim_futex_wait(const uint32_t *word, uint32_t expected, uint64_t ns)
{
    struct timespec ts = {(time_t)(ns / NS_PER_S), (long)(ns % NS_PER_S)};

    syscall(SYS_futex, word, FUTEX_WAIT, expected, &ts, NULL, 0);
}

static inline void prim_futex_wake(uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* A lock of three states (free, held, held with waiters): Drepper, "Futexes are tricky", 2011. */
struct prim_lock {
    uint32_t word;
};

static inline bool prim_trylock(struct prim_lock *lock)
{
    uint32_t zero = 0;

    return __atomic_compare_exchange_n(&lock->word, &zero, 1, false, __ATOMIC_ACQUIRE,
                                       __ATOMIC_RELAXED);
}

static inline void prim_lock(struct prim_lock *lock)
{
    if (likely(prim_trylock(lock)))
        return;
    while (atomic_exchange_acq_rel(&lock->word, 2) != 0)
        syscall(SYS_futex, &lock->word, FUTEX_WAIT_PRIVATE, 2, NULL, NULL, 0);
}

static inline void prim_unlock(struct prim_lock *lock)
{
    if (atomic_exchange_acq_rel(&lock->word, 0) == 2)
        syscall(SYS_futex, &lock->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}
