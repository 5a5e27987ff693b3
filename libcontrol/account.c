/*
 * Charges the container's quota for the device memory that its processes hold.
 *
 * Each process keeps its own sum in its slot of the ledger; the container's use is the sum over the
 * slots. To reserve memory, a process first adds to its own slot and then adds up all slots. Two
 * processes that race thus see each other's reservations and never exceed the quota together. A
 * reservation that does not fit is taken back. There is no lock that a killed process could leave
 * held: the governor clears its slot.
 *
 * No call reports what the driver takes on its own (for a context or a module), but NVML shows it.
 * The governor samples NVML and publishes the amount by which NVML's value exceeds the ledger's
 * sums as `memory_overhead`, as of `reconciled_ns`. Until a later sample, a process reports as
 * `provisional` what it expects the driver to have taken.
 */
#include "control.h"
#include "parking.h"

#include <string.h>

#define ACCOUNT_LOST_NS     (1000 * NS_PER_MS) /* the governor is away if the heartbeat is older */
#define ACCOUNT_PATIENCE_NS (60 * NS_PER_MS)   /* longest time that a refusal waits for samples */
#define ACCOUNT_LONG_NS     (1200 * NS_PER_MS) /* the same, for a rare long wait */
#define ACCOUNT_SELDOM_NS   (4 * NS_PER_S)     /* interval between long waits without a result */

struct account_above account_above;

static struct os_lock provisional_locks[LAYOUT_N_DEVICES];

void account_relax(CUstreamCaptureMode *mode)
{
    *mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    driver->cuThreadExchangeStreamCaptureMode(mode);
}

void account_unrelax(CUstreamCaptureMode *mode)
{
    driver->cuThreadExchangeStreamCaptureMode(mode);
}

/* ---- sums ---- */

/* The container's use of a GPU. */
struct use {
    uint64_t sum;     /* what is charged, what the driver took, and what is provisional */
    uint64_t least;   /* what is charged, and the least the driver had taken at the last sample */
    uint64_t sampled; /* when that sample began */
    bool due;         /* a sample is due: the driver may have taken or returned memory since then */
};

static struct use account_use(int device)
{
    const struct grant_device *grant = pages_grant_device((unsigned)device);
    struct ledger_header *ledger = pages_ledger();
    uint32_t n_slots = atomic_load_acquire(&ledger->n_slots);
    /* Read first: what was provisional before a sample is part of the overhead that it found. */
    uint64_t reconciled = atomic_load_acquire(&grant->reconciled_ns);
    uint64_t overhead = atomic_load_relaxed(&grant->memory_overhead);
    uint64_t least = atomic_load_relaxed(&grant->overhead_last);
    struct use use = {
        .sum = overhead, .least = least < overhead ? least : overhead, .sampled = reconciled};

    if (n_slots > LAYOUT_N_SLOTS)
        n_slots = LAYOUT_N_SLOTS;
    for (uint32_t i = 0; i < n_slots; i++) {
        struct ledger_device *entry = pages_slot_device(i, (unsigned)device);
        uint64_t memory = atomic_load_seq_cst(&entry->memory);
        uint64_t provisional = 0;

        if (unlikely(atomic_load_seq_cst(&entry->provisional_ns) > reconciled)) {
            use.due = true;
            provisional = atomic_load_seq_cst(&entry->provisional);
        }
        if (__builtin_add_overflow(use.sum, memory, &use.sum) ||
            __builtin_add_overflow(use.sum, provisional, &use.sum))
            return (struct use){.sum = UINT64_MAX, .least = UINT64_MAX};
        use.least += memory; /* at most the sum */
    }
    return use;
}

uint64_t account_used(int device)
{
    return account_use(device).sum;
}

uint64_t account_returned(int device)
{
    uint32_t n_slots = atomic_load_acquire(&pages_ledger()->n_slots);
    uint64_t sum = 0;

    for (uint32_t i = 0; i < n_slots && i < LAYOUT_N_SLOTS; i++)
        sum += atomic_load_relaxed(&pages_slot_device(i, (unsigned)device)->returned);
    return sum;
}

uint64_t account_limit(int device)
{
    return atomic_load_relaxed(&pages_grant_device((unsigned)device)->memory_limit);
}

uint64_t account_product(uint64_t a, uint64_t b)
{
    uint64_t product;

    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

uint64_t account_round(uint64_t size, uint64_t unit)
{
    uint64_t sum;

    return __builtin_add_overflow(size, unit - 1, &sum) ? UINT64_MAX : sum / unit * unit;
}

/* The driver chooses the pitch. Rows are aligned to 512 bytes on every GPU since Kepler. */
uint64_t account_pitch(uint64_t width, uint64_t height)
{
    return account_product(account_round(width, 512), height);
}

/* A sum beyond the limit includes reservations that other processes are about to take back. */
void account_note_peak(int device)
{
    uint64_t sum = account_used(device);
    uint64_t limit = account_limit(device);
    uint64_t *peak = &pages_ledger()->memory_peak[device];
    uint64_t seen = atomic_load_relaxed(peak);

    if (sum > limit)
        sum = limit;
    while (sum > seen &&
           !__atomic_compare_exchange_n(peak, &seen, sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

/* ---- charges ---- */

/* Lowers the sum, but not below zero, because other processes can reset the page that contains it.
 * Returns the part that was not subtracted. */
static uint64_t lower(uint64_t *sum, uint64_t size)
{
    uint64_t seen = atomic_load_relaxed(sum);

    while (!__atomic_compare_exchange_n(sum, &seen, seen > size ? seen - size : 0, true,
                                        __ATOMIC_SEQ_CST, __ATOMIC_RELAXED))
        ;
    return seen < size ? size - seen : 0;
}

/* Lowers a counter of the ledger. After a move to another ledger, some of what was counted in the
 * old one may not be in the new one yet. That part is lowered in the old ledger, and
 * pages_forward() later subtracts it from the new one. */
static void lower_sum(uint64_t *sum, uint64_t size)
{
    uint64_t rest = lower(sum, size);
    uint64_t *before = rest ? pages_before(sum) : NULL;

    if (before)
        lower(before, rest);
}

/* `unseen` is raised first and lowered last, and the excess is in `taking`: a sample in between
 * attributes neither too much nor too little to the driver. */
void account_add(int device, uint64_t size, bool unseen)
{
    struct ledger_device *entry = pages_ledger_device((unsigned)device);

    if (unseen) {
        atomic_add_seq_cst(&entry->taking, size);
        atomic_add_seq_cst(&entry->unseen, size);
    }
    atomic_add_seq_cst(&entry->memory, size);
    if (unseen)
        lower_sum(&entry->taking, size);
}

void account_give(int device, uint64_t size, bool unseen)
{
    struct ledger_device *entry = pages_ledger_device((unsigned)device);

    if (!size)
        return;
    /* `returned` is raised before the sum is lowered: a sample in between overestimates the
     * charge. */
    atomic_add_seq_cst(unseen ? &entry->taking : &entry->returned, size);
    lower_sum(&entry->memory, size);
    if (unseen) {
        lower_sum(&entry->unseen, size);
        lower_sum(&entry->taking, size);
    }
}

/* Notes that charged memory leaves the GPU and stays charged, or is about to return to it. */
void account_hide(int device, uint64_t size, bool hidden)
{
    struct ledger_device *entry = pages_ledger_device((unsigned)device);

    if (hidden) {
        atomic_add_seq_cst(&entry->returned, size);
        atomic_add_seq_cst(&entry->unseen, size);
    } else {
        lower_sum(&entry->unseen, size);
    }
}

/*
 * Notes that a call under way is taking or giving back `size` charged bytes. Until account_landed()
 * it is not known whether the driver has them. Called before a claim, and before a block is given
 * back.
 */
void account_moves(int device, uint64_t size, bool unseen)
{
    if (!unseen && size)
        atomic_add_seq_cst(&pages_ledger_device((unsigned)device)->moving, size);
}

void account_landed(int device, uint64_t size, bool unseen)
{
    if (!unseen && size)
        lower_sum(&pages_ledger_device((unsigned)device)->moving, size);
}

/* Notes that the call that follows may free everything that is charged. Returns that amount. */
uint64_t account_moves_all(int device)
{
    uint64_t size =
        device < 0 ? 0 : atomic_load_relaxed(&pages_ledger_device((unsigned)device)->memory);

    account_moves(device, size, false);
    return size;
}

/* Notes by how much the charged memory in pools has grown or shrunk. The driver may give back what
 * pools hold at any time. */
void account_pools(int device, uint64_t more, uint64_t less, bool unseen)
{
    struct ledger_device *entry = pages_ledger_device((unsigned)device);

    if (unseen)
        return;
    if (more)
        atomic_add_seq_cst(&entry->pooled, more);
    if (less)
        lower_sum(&entry->pooled, less);
}

/* Notes that pools may have shrunk by `size` bytes since they were last queried. Called after the
 * charge has been lowered: a reader that reads `shrunk` first then sees the change in at least one
 * of the two. */
void account_shrunk(int device, uint64_t size, bool unseen)
{
    if (!unseen && size)
        atomic_add_seq_cst(&pages_ledger_device((unsigned)device)->shrunk, size);
}

/* On success, the claim belongs to a call that is under way until account_landed(). */
bool account_try(int device, uint64_t size, bool unseen)
{
    uint64_t limit = account_limit(device);
    uint64_t sum;

    if (size > limit || unlikely(pages_denied()))
        return false;
    account_moves(device, size, unseen);
    /* Two processes that reserve at the same time may see each other and both back off although one
     * of them would fit. Each of them therefore tries a few more times before it gives up. */
    for (int attempt = 0;; attempt++) {
        account_add(device, size, unseen);
        if (likely(account_used(device) <= limit))
            return true;
        account_give(device, size, unseen);
        sum = account_used(device);
        if (attempt == 3 || __builtin_add_overflow(sum, size, &sum) || sum > limit) {
            account_landed(device, size, unseen);
            return false;
        }
        os_sleep(20 * NS_PER_US * (uint64_t)(1 + (os_pid() + attempt) % 4));
    }
}

/* Returns whether more than `slack` bytes beyond the quota are held, once processes that race have
 * backed off. */
bool account_over(int device, uint64_t slack)
{
    for (int attempt = 0; account_used(device) > account_limit(device) + slack; attempt++) {
        if (attempt == 3)
            return true;
        os_sleep(50 * NS_PER_US);
    }
    return false;
}

cold CUresult account_refuse(int device)
{
    atomic_add_relaxed(&pages_ledger_device((unsigned)device)->refused, 1);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

bool account_alone(void)
{
    return os_now() >= atomic_load_relaxed(&pages_grant()->heartbeat_ns) + ACCOUNT_LOST_NS ||
           pages_alone();
}

/* Waits for a sample that began after `since`. Returns false if none came, or if no governor is
 * sampling. */
cold bool account_await_sample(int device, uint64_t since, uint64_t patience)
{
    const struct grant_device *grant = pages_grant_device((unsigned)device);
    uint64_t end = os_now() + patience;

    while (atomic_load_acquire(&grant->reconciled_ns) < since) {
        if (os_now() >= end || account_alone())
            return false;
        os_sleep(NS_PER_MS);
    }
    return true;
}

/* When the last long wait without a result began. Further threads may join it until shortly before
 * its end. */
static uint64_t account_waited[LAYOUT_N_DEVICES];

/* Returns the time until which a refusal that begins now waits. */
static uint64_t account_wait_begin(int device, uint64_t now)
{
    uint64_t last = atomic_load_relaxed(&account_waited[device]);

    if (last && now - last < ACCOUNT_LONG_NS - ACCOUNT_PATIENCE_NS)
        return last + ACCOUNT_LONG_NS;
    if (last && now - last < ACCOUNT_SELDOM_NS)
        return now + ACCOUNT_PATIENCE_NS;
    __atomic_compare_exchange_n(&account_waited[device], &last, now, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
    return now + ACCOUNT_LONG_NS;
}

/* A wait that began at `began` has produced a result, so the next wait may be long as well. */
static void account_wait_end(int device, uint64_t began)
{
    __atomic_compare_exchange_n(&account_waited[device], &began, 0, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
}

static bool account_fits(int device, uint64_t used, uint64_t size)
{
    return !__builtin_add_overflow(used, size, &used) && used <= account_limit(device);
}

/* Sleeps for 1 ms, during which memory may be parked. Returns how long the memory was away after
 * that, in ns. */
static uint64_t account_nap(void)
{
    uint32_t depth = parking_pause();
    uint64_t began;

    os_sleep(NS_PER_MS);
    began = os_now();
    parking_resume(depth);
    return depth ? os_now() - began : 0;
}

/*
 * Claims as soon as there is room, and returns false as soon as it is certain that there is none.
 *
 * A sample that begins while the container is allocating leaves open how much the driver took, and
 * the published overhead may then be too high. A sample that is due may find that the driver gave
 * memory back. As long as either could make room, this function waits for samples, and requests one
 * if none is due. Meanwhile it claims nothing, because claims that are taken back make a sample
 * uncertain, too.
 */
static cold bool account_await_room(int device, uint64_t size, bool unseen)
{
    uint64_t began = os_now(), end = 0;

    for (;;) {
        struct use use = account_use(device);
        bool claimed = account_fits(device, use.sum, size) && account_try(device, size, unseen);
        bool known = !use.due || use.sampled >= began; /* a sample covers what was given back */

        if (claimed || (known && !account_fits(device, use.least, size))) {
            account_wait_end(device, began);
            return claimed;
        }
        if (!end)
            end = account_wait_begin(device, began);
        if (os_now() >= end || account_alone())
            return false;
        if (!use.due)
            account_driver_takes(device, 0);
        end += account_nap();
    }
}

/* Tries to make room: gives back the unused memory of pools, and waits for samples that may show
 * what the driver gave back. */
static cold bool account_claim_slowly(int device, uint64_t size, bool unseen)
{
    int saved = errno;
    bool claimed = size <= account_limit(device) && !pages_denied();

    if (claimed) {
        claimed = account_above.reclaim(device) && account_try(device, size, unseen);
        claimed = claimed || account_await_room(device, size, unseen);
    }
    errno = saved;
    return claimed;
}

bool account_claim(int device, uint64_t size, bool unseen)
{
    if (parking_applies())
        parking_wait();
    return likely(account_try(device, size, unseen)) || account_claim_slowly(device, size, unseen);
}

/* ---- what the driver takes on its own ---- */

/* If the governor has sampled since the last change, the old amount is part of the overhead, a new
 * amount begins, and the governor is told that a sample is due. */
static void provisional_move(int device, uint64_t more, uint64_t less)
{
    struct ledger_device *entry = pages_ledger_device((unsigned)device);
    const struct grant_device *grant = pages_grant_device((unsigned)device);
    bool first;

    os_lock(&provisional_locks[device]);
    first =
        atomic_load_relaxed(&entry->provisional_ns) <= atomic_load_acquire(&grant->reconciled_ns);
    if (first) {
        atomic_store_seq_cst(&entry->provisional, more);
    } else {
        atomic_add_seq_cst(&entry->provisional, more);
        lower(&entry->provisional, less);
    }
    atomic_add_seq_cst(&entry->took, more);
    atomic_add_seq_cst(&entry->gave, less);
    atomic_store_seq_cst(&entry->provisional_ns, os_now());
    os_unlock(&provisional_locks[device]);
    if (first)
        pages_poke();
}

/*
 * Turns a charge into a provisional amount. A sample that reads the page between the two steps, and
 * subtracts the charge from what it sees, began before the second time stamp and does not count.
 */
void account_convert(int device, uint64_t size, bool unseen)
{
    struct ledger_device *entry = pages_ledger_device((unsigned)device);
    const struct grant_device *grant = pages_grant_device((unsigned)device);
    bool first;

    os_lock(&provisional_locks[device]);
    first =
        atomic_load_relaxed(&entry->provisional_ns) <= atomic_load_acquire(&grant->reconciled_ns);
    if (first)
        atomic_store_seq_cst(&entry->provisional, size);
    else
        atomic_add_seq_cst(&entry->provisional, size);
    atomic_add_seq_cst(&entry->took, size);
    atomic_store_seq_cst(&entry->provisional_ns, os_now());
    account_give(device, size, unseen);
    atomic_store_seq_cst(&entry->provisional_ns, os_now());
    os_unlock(&provisional_locks[device]);
    if (first)
        pages_poke();
}

void account_driver_takes(int device, uint64_t size)
{
    if (device >= 0)
        provisional_move(device, size, 0);
}

void account_driver_gives(int device, uint64_t size)
{
    if (device >= 0)
        provisional_move(device, 0, size);
}

static void account_taken(struct account_charge *charge)
{
    if (charge->taking)
        lower_sum(&pages_ledger_device((unsigned)charge->device)->taking, charge->taking);
    charge->taking = 0;
}

static void account_leave(struct account_charge *charge)
{
    if (charge->inside)
        parking_leave();
    charge->inside = false;
}

/*
 * While the driver takes the memory, the claim counts as a charge for memory that NVML does not
 * attribute to the process. Whether a sample sees nothing, a part or all of it, the sum is never
 * too small.
 */
bool account_begin(struct account_charge *charge, int device, uint64_t size)
{
    *charge = (struct account_charge){.device = device, .flags = BLOCK_UNSEEN};
    if (device < 0)
        return true;
    charge->inside = parking_applies();
    if (charge->inside)
        parking_enter(PARKING_MEMORY);
    if (!size)
        return true;
    if (!account_claim(device, size, true)) {
        account_leave(charge);
        account_refuse(device);
        return false;
    }
    charge->size = charge->taking = size;
    atomic_add_seq_cst(&pages_ledger_device((unsigned)device)->taking, size);
    return true;
}

void account_cancel(struct account_charge *charge)
{
    if (charge->device >= 0) {
        account_give(charge->device, charge->size, charge->flags & BLOCK_UNSEEN);
        account_landed(charge->device, charge->claimed, charge->flags & BLOCK_UNSEEN);
        account_taken(charge);
    }
    charge->size = 0;
    account_leave(charge);
}

void account_end(struct account_charge *charge, CUresult result)
{
    if (charge->device < 0)
        return;
    if (result != CUDA_SUCCESS) {
        account_cancel(charge);
        return;
    }
    account_convert(charge->device, charge->size, true);
    account_taken(charge);
    account_note_peak(charge->device);
    account_leave(charge);
}

void account_refresh(int device)
{
    int saved = errno;

    account_above.refresh(device);
    errno = saved;
}

void account_after_fork(void)
{
    memset(provisional_locks, 0, sizeof provisional_locks);
}
