/* Tracks whether the container's memory is on the GPU, and makes calls wait until it is; see
 * parking.h. */
#include "parking.h"

#include <pthread.h>
#include <string.h>

#define PARKING_NAP_NS    (50 * NS_PER_MS) /* longest sleep between two checks of the state */
#define PARKING_SETTLE_NS (10 * NS_PER_S)  /* longest wait for calls that free memory */

uint32_t parking_on;
bool (*parking_watch)(void);
uint32_t parking_n_syncs;

static uint32_t state;        /* futex word: an enum parking_state */
static uint32_t n_inside;     /* calls under way that have entered, in all threads */
static uint64_t closing_ends; /* when a CLOSING has taken too long */

static struct os_lock use_of_contexts;
static struct os_lock publish_lock;

/* What the process reports. All of it is written to the ledger each time, and again from time to
 * time, because the ledger may have been replaced (pages_rejoin.c). */
static struct {
    uint32_t awaiting;
    uint64_t movable, away_ns, moved, move_ns;
} totals;

/* Number of nested parking_enter() calls of this thread, and whether it could be cancelled before
 * them. A thread that was cancelled inside the driver would be counted for ever. */
static __thread uint32_t depth;
static __thread int cancel_before;
static __thread bool exempt;

enum parking_state parking_now(void)
{
    return (enum parking_state)atomic_load_acquire(&state);
}

bool parking_turn(enum parking_state from, enum parking_state to)
{
    uint32_t seen = (uint32_t)from;

    if (!__atomic_compare_exchange_n(&state, &seen, (uint32_t)to, false, __ATOMIC_SEQ_CST,
                                     __ATOMIC_RELAXED))
        return false;
    os_futex_wake(&state);
    return true;
}

/* Called by threads of the library, without a matching parking_leave(): their calls never wait, nor
 * do calls from the application's callbacks that the driver runs on these threads. */
void parking_exempt(void)
{
    depth++;
    exempt = true;
}

/* The memory of several GPUs would have to be parked and resident together, and the memory of an
 * MPS server's clients belongs to the server's contexts. The governor allows parking in neither
 * case. */
bool parking_start(void)
{
    const struct grant_device *grant = pages_grant_device(0);

    if (atomic_load_relaxed(&parking_on) || pages_n_devices() != 1 || !pages_slot() ||
        !atomic_load_relaxed(&grant->parking) ||
        atomic_load_relaxed(&grant->strategy) == STRATEGY_MPS)
        return true;
    if (parking_must_leave())
        atomic_store_seq_cst(&state, (uint32_t)PARKING_PARKED);
    atomic_store_seq_cst(&parking_on, 1);
    if (parking_watch())
        return true;
    atomic_store_seq_cst(&parking_on, 0);
    atomic_store_seq_cst(&state, (uint32_t)PARKING_RESIDENT);
    return false;
}

/* A page that does not allow parking gives no orders. If it allowed parking when the process
 * started, it has been damaged since. */
bool parking_must_leave(void)
{
    const struct grant_device *grant = pages_grant_device(0);

    return !atomic_load_acquire(&grant->resident) && atomic_load_relaxed(&grant->parking);
}

static bool is_enough(uint32_t seen, enum parking_need need)
{
    return seen == PARKING_RESIDENT || (seen == PARKING_PARKED && need == PARKING_STILL);
}

/* Either this sees a state that has begun to change, or parking_settle() sees the call. */
static bool enter(enum parking_need need, uint32_t *seenp)
{
    atomic_add_seq_cst(&n_inside, 1);
    *seenp = atomic_load_seq_cst(&state);
    if (likely(is_enough(*seenp, need)))
        return true;
    atomic_sub_seq_cst(&n_inside, 1);
    return false;
}

/* The governor moves the memory back for threads that are counted in `awaiting`. */
static cold void await(enum parking_need need)
{
    bool counts = need == PARKING_MEMORY;
    uint64_t began = os_now();
    int saved = errno;
    uint32_t seen;

    atomic_add_seq_cst(&totals.awaiting, counts);
    parking_publish();
    if (counts)
        pages_poke();
    while (!enter(need, &seen))
        os_futex_wait(&state, seen, PARKING_NAP_NS);
    atomic_sub_seq_cst(&totals.awaiting, counts);
    atomic_add_relaxed(&totals.away_ns, counts ? os_now() - began : 0);
    parking_publish();
    errno = saved;
}

void parking_enter(enum parking_need need)
{
    uint32_t seen;
    int before;

    if (!depth) {
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
        if (unlikely(!enter(need, &seen)))
            await(need);
        cancel_before = before;
    }
    depth++;
}

bool parking_try(enum parking_need need)
{
    uint32_t seen;
    int before;

    if (!depth) {
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
        if (!enter(need, &seen)) {
            pthread_setcancelstate(before, NULL);
            return false;
        }
        cancel_before = before;
    }
    depth++;
    return true;
}

void parking_leave(void)
{
    if (!depth || --depth)
        return;
    atomic_sub_seq_cst(&n_inside, 1);
    pthread_setcancelstate(cancel_before, NULL);
}

uint32_t parking_pause(void)
{
    uint32_t paused = exempt ? 0 : depth;

    if (!paused)
        return 0;
    depth = 1;
    parking_leave();
    return paused;
}

void parking_resume(uint32_t paused)
{
    if (!paused)
        return;
    parking_enter(PARKING_MEMORY);
    depth = paused;
}

/* Does not wait in a thread that is already inside a call, which keeps the memory where it is. */
void parking_wait(void)
{
    parking_enter(PARKING_MEMORY);
    parking_leave();
}

bool parking_settle(void)
{
    uint64_t ends = os_now() + PARKING_SETTLE_NS;

    while (atomic_load_seq_cst(&n_inside)) {
        if (os_now() >= ends)
            return false;
        os_sleep(20 * NS_PER_US);
    }
    return true;
}

bool parking_close(uint64_t patience)
{
    uint64_t ends = os_now() + patience;

    atomic_store_release(&closing_ends, ends);
    if (!parking_turn(PARKING_RESIDENT, PARKING_CLOSING))
        return false;
    while (atomic_load_seq_cst(&n_inside)) {
        if (os_now() >= ends || !parking_must_leave()) {
            parking_turn(PARKING_CLOSING, PARKING_RESIDENT);
            return false;
        }
        os_sleep(20 * NS_PER_US);
    }
    return true;
}

/*
 * Work on the GPU may depend on a call that is waiting here: a kernel, for example, may be waiting
 * for a flag that the next copy sets. So after a time the calls continue, and the move is tried
 * again later. The thread that moves memory may be blocked in the driver until that work has ended,
 * so another thread ends the CLOSING.
 */
void parking_expire(void)
{
    if (parking_applies() && atomic_load_relaxed(&state) == PARKING_CLOSING &&
        (os_now() >= atomic_load_acquire(&closing_ends) || !parking_must_leave()) &&
        parking_turn(PARKING_CLOSING, PARKING_RESIDENT))
        parking_publish();
}

void parking_await_syncs(uint64_t ends)
{
    while (atomic_load_seq_cst(&parking_n_syncs) && os_now() < ends)
        os_sleep(20 * NS_PER_US);
}

void parking_publish(void)
{
    struct ledger_slot *slot = pages_slot();
    uint64_t movable;
    uint32_t now;

    os_lock(&publish_lock);
    now = atomic_load_seq_cst(&state);
    movable = atomic_load_relaxed(&totals.movable);
    atomic_store_relaxed(&slot->movable, movable);
    atomic_store_relaxed(&slot->parked, now == PARKING_PARKED || now == PARKING_IN ? movable : 0);
    atomic_store_relaxed(&slot->moved, atomic_load_relaxed(&totals.moved));
    atomic_store_relaxed(&slot->move_ns, atomic_load_relaxed(&totals.move_ns));
    atomic_store_relaxed(&slot->away_ns, atomic_load_relaxed(&totals.away_ns));
    atomic_store_release(&slot->residency, now);
    atomic_store_release(&slot->awaiting, atomic_load_seq_cst(&totals.awaiting));
    os_unlock(&publish_lock);
}

void parking_note_bytes(uint64_t bytes)
{
    atomic_store_relaxed(&totals.movable, bytes);
}

void parking_count(uint64_t bytes, uint64_t ns)
{
    atomic_bump(&totals.moved, bytes);
    atomic_bump(&totals.move_ns, ns);
}

void parking_lock_contexts(void)
{
    os_lock(&use_of_contexts);
}

bool parking_trylock_contexts(void)
{
    return os_trylock(&use_of_contexts);
}

void parking_unlock_contexts(void)
{
    os_unlock(&use_of_contexts);
}

void parking_after_fork(void)
{
    use_of_contexts.word = 0;
    publish_lock.word = 0;
    memset(&totals, 0, sizeof totals);
    parking_on = 0;
    state = PARKING_RESIDENT;
    n_inside = 0;
    parking_n_syncs = 0;
    depth = 0;
    exempt = false;
}
