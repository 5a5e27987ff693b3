/*
 * Replaces the driver's answers when a program looks functions up with cuGetProcAddress.
 *
 * The driver answers. If its answer is a function that the control library hooks, the program gets
 * the hook instead. Every other function is the driver's own. The functions that functions.toml
 * names need no accounting, and the program calls them directly. For functions of a later driver,
 * which functions.toml does not name, the node's configuration decides what happens
 * (unknown_functions). A form of a function that has to be hooked counts as unknown too, if that
 * form is not hooked.
 *
 * A look-up with dlsym is not seen here: the loader itself finds the function.
 */
#include "control.h"
#include "known.gen.h"

#include <stdio.h>
#include <string.h>

enum lookup_kind {
    LOOKUP_KNOWN,
    LOOKUP_HOOKED, /* every form of it has to be hooked */
    LOOKUP_UNKNOWN,
};

#define LOOKUP_LACKED "cuTidegateLacksThisFunction" /* a name that no driver has */

/* The names that were looked up. They are kept for the life of the process: most programs look
 * functions up before they call cuInit, and a process that moves to another ledger leaves behind
 * what it reported before. */
static char names[LAYOUT_N_UNKNOWN][LAYOUT_UNKNOWN_SIZE];
static unsigned n_names;
static struct os_lock names_lock; /* for the names, and for this process's writes to the ledger */

static uint64_t lookup_hash(const char *name, size_t length)
{
    uint64_t hash = 0xcbf29ce484222325ull;

    for (size_t i = 0; i < length; i++)
        hash = (hash ^ (unsigned char)name[i]) * 0x100000001b3ull;
    return hash;
}

/* Returns the length of a name without the suffix of a form, such as _v2 or _ptsz. */
static size_t lookup_base(const char *name)
{
    size_t length = strlen(name);
    size_t digits;

    if (length > 5 && (!strcmp(name + length - 5, "_ptsz") || !strcmp(name + length - 5, "_ptds")))
        length -= 5;
    digits = length;
    while (digits && name[digits - 1] >= '0' && name[digits - 1] <= '9')
        digits--;
    if (digits < length && digits > 2 && !strncmp(name + digits - 2, "_v", 2))
        length = digits - 2;
    return length;
}

static enum lookup_kind lookup_find(const char *name)
{
    uint64_t hash = lookup_hash(name, lookup_base(name));
    size_t from = 0, to = CONTROL_N_KNOWN;

    while (from < to) {
        size_t middle = (from + to) / 2;

        if (control_known[middle] >> 1 == hash >> 1)
            return control_known[middle] & 1 ? LOOKUP_HOOKED : LOOKUP_KNOWN;
        if (control_known[middle] < hash)
            from = middle + 1;
        else
            to = middle;
    }
    return LOOKUP_UNKNOWN;
}

/* ---- reports to the governor ---- */

/* Called with the lock held. */
static void lookup_report(const char *name)
{
    struct ledger_header *ledger = pages_ledger();
    uint32_t place;

    for (place = 0; place < LAYOUT_N_UNKNOWN; place++)
        if (!strncmp((char *)ledger->unknown + place * LAYOUT_UNKNOWN_SIZE, name,
                     LAYOUT_UNKNOWN_SIZE - 1))
            return;
    if (atomic_load_relaxed(&ledger->n_unknown) >= LAYOUT_N_UNKNOWN)
        return;
    place = atomic_add_relaxed(&ledger->n_unknown, 1);
    if (place < LAYOUT_N_UNKNOWN) {
        uint8_t *to = ledger->unknown + place * LAYOUT_UNKNOWN_SIZE;

        memcpy(to + 1, name + 1, LAYOUT_UNKNOWN_SIZE - 1);
        atomic_store_release(to, (uint8_t)name[0]);
    }
}

/* Called with the lock held. */
static void lookup_keep(const char *name)
{
    for (unsigned i = 0; i < n_names; i++)
        if (!strcmp(names[i], name))
            return;
    if (n_names < LAYOUT_N_UNKNOWN)
        memcpy(names[n_names++], name, LAYOUT_UNKNOWN_SIZE);
}

void lookups_joined(void)
{
    os_lock(&names_lock);
    for (unsigned i = 0; i < n_names && pages_slot(); i++)
        lookup_report(names[i]);
    os_unlock(&names_lock);
}

void lookups_after_fork(void)
{
    names_lock.word = 0;
}

/* For a form that is not hooked, the requested version follows the name. */
static void lookup_note(const char *symbol, int version, enum lookup_kind kind)
{
    char name[LAYOUT_UNKNOWN_SIZE] = {0};

    if (kind == LOOKUP_HOOKED)
        snprintf(name, sizeof name, "%s@%d", symbol, version);
    else
        snprintf(name, sizeof name, "%s", symbol);
    os_lock(&names_lock);
    lookup_keep(name);
    if (pages_slot())
        lookup_report(name);
    os_unlock(&names_lock);
}

/* Logs only the first refusal: the number of lines that a process may log is limited, and other
 * lines may matter more. */
static cold void lookup_log(const char *symbol)
{
    static uint32_t logged;
    char line[240];

    if (atomic_exchange_acq_rel(&logged, 1))
        return;
    snprintf(line, sizeof line,
             "%.80s was refused, because the control library does not know it "
             "(unknown_functions: refuse); tidegate inspect on the node lists all such functions",
             symbol);
    control_log(line);
}

/* ---- answers ---- */

/* Decides on an answer from the driver. Returns whether the program gets it, replaced or not. */
static bool lookup_passes(const char *symbol, void **pfn, int version)
{
    struct ledger_slot *slot = pages_slot();
    const struct grant_header *grant;
    enum lookup_kind kind;
    uint32_t policy;
    void *hook;

    if (!symbol || !pfn || !*pfn)
        return true;
    hook = origin_replace(*pfn);
    if (likely(hook != *pfn)) {
        *pfn = hook;
        if (slot)
            atomic_add_relaxed(&slot->lookups, 1);
        return true;
    }
    kind = lookup_find(symbol);
    if (likely(kind == LOOKUP_KNOWN))
        return true;
    grant = pages_peek();
    policy = grant ? atomic_load_relaxed(&grant->unknown_functions) : UNKNOWN_FORWARD;
    if (policy != UNKNOWN_COUNT && policy != UNKNOWN_REFUSE)
        return true;
    lookup_note(symbol, version, kind);
    if (policy == UNKNOWN_COUNT)
        return true;
    lookup_log(symbol);
    *pfn = NULL;
    return false;
}

/* A refused look-up gets the driver's own answer for a name that the driver lacks. */
CONTROL_EXPORT CUresult cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion,
                                         cuuint64_t flags)
{
    CUresult result = real->cuGetProcAddress(symbol, pfn, cudaVersion, flags);

    if (result == CUDA_SUCCESS && !lookup_passes(symbol, pfn, cudaVersion))
        result = real->cuGetProcAddress(LOOKUP_LACKED, pfn, cudaVersion, flags);
    return result;
}

CONTROL_EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion,
                                            cuuint64_t flags,
                                            CUdriverProcAddressQueryResult *symbolStatus)
{
    CUresult result = real->cuGetProcAddress_v2(symbol, pfn, cudaVersion, flags, symbolStatus);

    if (result == CUDA_SUCCESS && !lookup_passes(symbol, pfn, cudaVersion))
        result = real->cuGetProcAddress_v2(LOOKUP_LACKED, pfn, cudaVersion, flags, symbolStatus);
    return result;
}
