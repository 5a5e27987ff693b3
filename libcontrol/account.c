/*
 * Charges device memory that the container's processes hold against the container's quota.
 *
 * Each process keeps its own sum in its slot of the ledger; the container's use is the sum over the
 * slots. To reserve memory, a process first adds to its own slot and then sums up; two processes
 * that race thus see each other and never exceed the quota. A reservation that does not fit is
 * taken back. No process can die with a lock held, because there is none: when a process is
 * killed, the governor clears its slot.
 *
 * No call reports what the driver takes on its own (for a context or a module), but NVML shows it.
 * The governor samples NVML and publishes the amount beyond the ledger as `memory_overhead`, as of
 * `reconciled_ns`. Until a later sample, a process reports what it expects the driver to have taken
 * as `provisional`.
 */
#include "control.h"

#include <string.h>

#define ACCOUNT_LOST_NS     (1000 * NS_PER_MS) /* no governor samples if the heartbeat is older */
#define ACCOUNT_PATIENCE_NS (60 * NS_PER_MS)   /* longest wait of a refusal for a sample */
#define ACCOUNT_KEPT_NS     (1200 * NS_PER_MS) /* longest wait for lower overhead: a few samples */
#define ACCOUNT_SELDOM_NS   (4 * NS_PER_S)     /* minimum interval between such waits that fail */

struct account_above account_above;

static struct prim_lock provisional_locks[LAYOUT_N_DEVICES];

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

/* Returns the sum, and whether the driver may have taken or given back memory since the last
 * sample. */
static uint64_t account_sum(int device, bool *duep)
{
    const struct grant_device *grant = pages_grant_device((unsigned)device);
    struct ledger_header *ledger = pages_ledger();
    uint32_t n_slots = atomic_load_acquire(&ledger->n_slots);
    /* Read first: what was provisional before a sample is part of the overhead that it found. */
    uint64_t reconciled = atomic_load_acquire(&grant->reconciled_ns);
    uint64_t sum = atomic_load_relaxed(&grant->memory_overhead);

    *duep = false;
    if (n_slots > LAYOUT_N_SLOTS)
        n_slots = LAYOUT_N_SLOTS;
    for (uint32_t i = 0; i < n_slots; i++) {
        struct ledger_device *entry = pages_slot_device(i, (unsigned)device);

        if (__builtin_add_overflow(sum, atomic_load_seq_cst(&entry->memory), &sum))
            return UINT64_MAX;
        if (likely(atomic_load_seq_cst(&entry->provisional_ns) <= reconciled))
            continue;
        *duep = true;
        if (__builtin_add_overflow(sum, atomic_load_seq_cst(&entry->provisional), &sum))
            return UINT64_MAX;
    }
    return sum;
}

uint64_t account_used(int device)
{
    bool due;

    return account_sum(device, &due);
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

/* `unseen` is raised first and lowered last, and what it has too much is in `taking`: a sample in
 * between attributes neither too much nor too little to the driver. */
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

/*
 * Notes that a call is under way that takes or gives back `size` charged bytes. Until
 * account_landed() it is not known whether the driver has them. Called before a claim, and before a
 * block is given back.
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
 * charge was lowered: a reader that reads `shrunk` first then sees the change in at least one of
 * the two. */
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
    /* Two processes that reserve at once may see each other and both step back although one of them
     * fits. So the loser tries a few more times before it gives up. */
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
        prim_sleep(20 * NS_PER_US * (uint64_t)(1 + (prim_pid() + attempt) % 4));
    }
}

/* Returns whether more than `slack` bytes beyond the quota are held, once processes that race have
 * stepped back. */
bool account_over(int device, uint64_t slack)
{
    for (int attempt = 0; account_used(device) > account_limit(device) + slack; attempt++) {
        if (attempt == 3)
            return true;
        prim_sleep(50 * NS_PER_US);
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
    return prim_now() >= atomic_load_relaxed(&pages_grant()->heartbeat_ns) + ACCOUNT_LOST_NS ||
           pages_alone();
}

/* Waits for a sample that began after `since`. Returns false if none came, or if no governor is
 * sampling. */
cold bool account_await_sample(int device, uint64_t since, uint64_t patience)
{
    const struct grant_device *grant = pages_grant_device((unsigned)device);
    uint64_t end = prim_now() + patience;

    while (atomic_load_acquire(&grant->reconciled_ns) < since) {
        if (prim_now() >= end || account_alone())
            return false;
        prim_sleep(NS_PER_MS);
    }
    return true;
}

/*
 * The published overhead may be too high for a moment: the governor keeps an earlier figure until
 * the upper bound of a sample is below it, and memory that the driver gave back on its own shows up
 * late. So where the last sample alone would leave room, a refusal waits for further ones, but only
 * now and then.
 */
static cold bool account_wait_for_less(int device, uint64_t size, bool unseen)
{
    static uint64_t waited[LAYOUT_N_DEVICES];
    const struct grant_device *grant = pages_grant_device((unsigned)device);
    uint64_t begin = prim_now(), last = atomic_load_relaxed(&waited[device]);

    if ((last && begin - last < ACCOUNT_SELDOM_NS) ||
        !__atomic_compare_exchange_n(&waited[device], &last, begin, false, __ATOMIC_RELAXED,
                                     __ATOMIC_RELAXED))
        return false;
    while (prim_now() - begin < ACCOUNT_KEPT_NS && !account_alone()) {
        uint64_t overhead = atomic_load_relaxed(&grant->memory_overhead);
        uint64_t least = atomic_load_relaxed(&grant->overhead_last);
        uint64_t used = account_used(device);

        if (used < overhead || least >= overhead ||
            used - overhead + least + size > account_limit(device))
            break;
        prim_sleep(5 * NS_PER_MS);
        if (account_try(device, size, unseen))
            return true;
    }
    /* The overhead was not the reason, so the next refusal may wait again. */
    if (prim_now() - begin < ACCOUNT_KEPT_NS)
        atomic_store_relaxed(&waited[device], 0);
    return false;
}

/* Tries to make room: gives back what pools hold unused, and waits for a sample that shows what the
 * driver gave back. */
static cold bool account_claim_slowly(int device, uint64_t size, bool unseen)
{
    int saved = errno;
    bool due;
    bool claimed = size <= account_limit(device) && !pages_denied();

    if (claimed) {
        claimed = account_above.reclaim(device) && account_try(device, size, unseen);
        if (!claimed && (account_sum(device, &due), due)) {
            account_await_sample(device, prim_now(), ACCOUNT_PATIENCE_NS);
            claimed = account_try(device, size, unseen);
        }
        claimed = claimed || account_wait_for_less(device, size, unseen);
    }
    errno = saved;
    return claimed;
}

bool account_claim(int device, uint64_t size, bool unseen)
{
    return likely(account_try(device, size, unseen)) || account_claim_slowly(device, size, unseen);
}

/* ---- what the driver takes on its own ---- */

/* If the governor has sampled since, the old amount is part of the overhead and a new one
 * begins. */
static void provisional_move(int device, uint64_t more, uint64_t less)
{
    struct ledger_device *entry = pages_ledger_device((unsigned)device);
    const struct grant_device *grant = pages_grant_device((unsigned)device);

    prim_lock(&provisional_locks[device]);
    if (atomic_load_relaxed(&entry->provisional_ns) <= atomic_load_acquire(&grant->reconciled_ns)) {
        atomic_store_seq_cst(&entry->provisional, more);
    } else {
        atomic_add_seq_cst(&entry->provisional, more);
        lower(&entry->provisional, less);
    }
    atomic_add_seq_cst(&entry->took, more);
    atomic_add_seq_cst(&entry->gave, less);
    atomic_store_seq_cst(&entry->provisional_ns, prim_now());
    prim_unlock(&provisional_locks[device]);
}

/*
 * Turns a charge into a provisional amount. A sample that reads the page between the two steps, and
 * subtracts the charge from what it sees, began before the second time stamp and does not count.
 */
void account_convert(int device, uint64_t size, bool unseen)
{
    struct ledger_device *entry = pages_ledger_device((unsigned)device);
    const struct grant_device *grant = pages_grant_device((unsigned)device);

    prim_lock(&provisional_locks[device]);
    if (atomic_load_relaxed(&entry->provisional_ns) <= atomic_load_acquire(&grant->reconciled_ns))
        atomic_store_seq_cst(&entry->provisional, size);
    else
        atomic_add_seq_cst(&entry->provisional, size);
    atomic_add_seq_cst(&entry->took, size);
    atomic_store_seq_cst(&entry->provisional_ns, prim_now());
    account_give(device, size, unseen);
    atomic_store_seq_cst(&entry->provisional_ns, prim_now());
    prim_unlock(&provisional_locks[device]);
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

/*
 * While the driver takes the memory, the claim is a charge that NVML does not attribute. Whether a
 * sample sees nothing, a part or all of it, the sum is never too small.
 */
bool account_begin(struct account_charge *charge, int device, uint64_t size)
{
    *charge = (struct account_charge){.device = device, .flags = BLOCK_UNSEEN};
    if (device < 0 || !size)
        return true;
    if (!account_claim(device, size, true)) {
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
