/*
 * Measures the shares of honest containers on a GPU, on a virtual clock, next to containers that
 * write arbitrary values into their ledgers.
 *
 * `ledger_hour SECONDS SEED QUANTUM_NS MAX_NS LONGEST_NS SWITCH_NS LOOKAHEAD_NS REMAINS`. The
 * arbiter and the runner are the real ones, without the runner's thread: this program calls it
 * whenever the thread would wake. Two honest containers always have work, with 50 % and 20 % as
 * guarantee and limit. Six others, with 5 % each, write to their ledgers and never use the GPU; how
 * many of them do so, and how each behaves, changes every few seconds. A behaviour is a plausible
 * false report (never release the grant, release it at once, report time that was not used ...) or
 * arbitrary values. If REMAINS is not 0, they may also report that their work continues after its
 * grant.
 *
 * The program prints, as JSON, the least and the greatest share of each honest container over 10
 * seconds, with the behaviours of the others at the end of that time.
 */
#include "os.h"

static uint64_t clock_ns;

#define os_now()         clock_ns
#define os_futex_wake(p) ((void)(p))
#include "runner.c"
#include "runner_pages.c"

#include <stdio.h>

#define N_HONEST  2
#define N_LIARS   6
#define WAKE_NS   (25 * NS_PER_US) /* delay until a thread that was woken runs */
#define BUCKET_NS NS_PER_S
#define N_BUCKETS 10
#define NEVER     UINT64_MAX

enum behaviour {
    SILENT,    /* requests nothing */
    UNUSED,    /* requests the GPU, updates `alive_ns`, and begins no work */
    HOLD,      /* never releases the grant, and updates `alive_ns` */
    STOPPED,   /* never releases the grant, and does not update `alive_ns` */
    AT_ONCE,   /* releases the grant at once */
    LATE,      /* releases the grant after its end, and updates `alive_ns` */
    NAP,       /* requests the GPU repeatedly, for very short periods */
    RESIDUAL,  /* releases the grant, and reports an invented time for which its work continues */
    OVERHANGS, /* reports work that runs although its grant has ended */
    BUSY,      /* reports GPU time that it did not use */
    NONSENSE,
    N_BEHAVIOURS,
};

static const char *const names[] = {"silent", "unused",   "hold",      "stopped", "at once", "late",
                                    "nap",    "residual", "overhangs", "busy",    "nonsense"};

struct container {
    char *grant, *ledger;
    int32_t tenant;
    uint32_t signal;  /* of its grant page, at its last action */
    uint64_t next_ns; /* when it acts next, unless its grant page changes earlier */
    /* honest */
    bool works;
    uint32_t epoch;
    uint64_t since_ns;
    uint64_t used_ns;
    uint64_t buckets[N_BUCKETS];
    /* a liar */
    enum behaviour behaviour;
    bool away;           /* silent until the next draw in main() */
    uint64_t stretch_ns; /* when its behaviour ends */
    uint64_t give_ns;    /* when it releases its grant */
};

struct extreme {
    double share;
    uint64_t at_ns;
    enum behaviour liars[N_LIARS];
};

static struct runner *runner;
static struct container honest[N_HONEST], liars[N_LIARS];
static uint64_t seed, wake_ns;
static bool remains; /* liars may report that their work continues after its grant */

static uint64_t draw(uint64_t below)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed % below;
}

/* Returns a time from 2^least to 2^most ns; each power of two is equally likely. */
static uint64_t some_time(unsigned int least, unsigned int most)
{
    unsigned int bits = least + (unsigned int)draw(most - least);

    return (1ull << bits) + draw(1ull << bits);
}

static struct grant_device *grant_of(const struct container *c)
{
    return (struct grant_device *)(c->grant + GRANT_DEVICES);
}

static struct ledger_slot *slot_of(const struct container *c, uint32_t slot)
{
    return (struct ledger_slot *)(c->ledger + LEDGER_SLOTS) + slot;
}

static struct ledger_device *entry_of(const struct container *c, uint32_t slot)
{
    return (struct ledger_device *)((char *)slot_of(c, slot) + LEDGER_SLOT_DEVICES);
}

static void begin(struct container *c, uint32_t share)
{
    c->grant = calloc(1, GRANT_SIZE);
    c->ledger = calloc(1, LEDGER_SIZE);
    ((struct ledger_header *)c->ledger)->n_slots = 1;
    slot_of(c, 0)->state = 1;
    c->tenant = runner_add(runner, share, share, c->grant, 0, c->ledger);
    if (c->tenant == ARBITER_NONE)
        abort();
}

/* Wakes the runner after WAKE_NS, as a byte on its socket does. */
static void poke_runner(void)
{
    if (wake_ns > clock_ns + WAKE_NS)
        wake_ns = clock_ns + WAKE_NS;
}

/* Acts as an honest container: it always wants the GPU, and works while its grant lasts. */
static void work(struct container *c)
{
    struct grant_device *grant = grant_of(c);
    struct ledger_device *entry = entry_of(c, 0);

    entry->seen_ns = clock_ns;
    if (c->works) {
        uint64_t deadline = grant->epoch == c->epoch ? grant->deadline_ns : 0;

        entry->alive_ns = clock_ns;
        if (clock_ns < deadline) {
            c->next_ns = deadline < clock_ns + NS_PER_MS ? deadline : clock_ns + NS_PER_MS;
            return;
        }
        c->works = false;
        c->used_ns += clock_ns - c->since_ns;
        entry->busy_ns += clock_ns - c->since_ns;
        entry->release_ns = clock_ns;
        entry->residual_ns = 0;
        entry->released_epoch = c->epoch;
        poke_runner();
    }
    if (grant->deadline_ns > clock_ns && grant->epoch != entry->released_epoch) {
        c->works = true;
        c->epoch = entry->active_epoch = grant->epoch;
        c->since_ns = clock_ns;
        entry->alive_ns = clock_ns;
        c->next_ns = clock_ns;
        return;
    }
    if (!entry->want) {
        entry->want = 1;
        poke_runner();
    }
    c->next_ns = clock_ns + 2 * NS_PER_MS;
}

static uint64_t nonsense(const struct container *c)
{
    switch (draw(12)) {
    case 0:
        return 0;
    case 1:
        return 1;
    case 2:
        return clock_ns;
    case 3:
        return clock_ns + some_time(10, 40);
    case 4:
        return clock_ns - some_time(10, 40);
    case 5:
        return UINT64_MAX - draw(3);
    case 6:
        return 1ull << draw(64);
    case 7:
    case 8:
        return grant_of(c)->epoch;
    case 9:
        return (uint64_t)grant_of(c)->epoch << 32 | 1;
    case 10:
        return some_time(4, 40);
    default:
        return draw(UINT64_MAX);
    }
}

static void scribble(struct container *c)
{
    static const size_t words[] = {
        offsetof(struct ledger_device, want),
        offsetof(struct ledger_device, active_epoch),
        offsetof(struct ledger_device, released_epoch),
        offsetof(struct ledger_device, seen_ns),
        offsetof(struct ledger_device, release_ns),
        offsetof(struct ledger_device, residual_ns),
        offsetof(struct ledger_device, busy_ns),
        offsetof(struct ledger_device, alive_ns),
    };
    uint64_t value = nonsense(c);
    uint32_t slot = draw(8) ? (uint32_t)draw(4) : (uint32_t)draw(LAYOUT_N_SLOTS);
    size_t word = words[draw(sizeof words / sizeof *words)];

    switch (draw(16)) {
    case 0:
        memcpy(c->ledger + draw(LEDGER_SIZE - sizeof value), &value, sizeof value);
        break;
    case 1:
        ((struct ledger_header *)c->ledger)->n_slots = (uint32_t)value;
        break;
    case 2:
        ((struct ledger_header *)c->ledger)->n_slots = 4;
        break;
    case 3:
        slot_of(c, slot)->state = draw(4) != 0;
        break;
    case 4:
    case 5:
        entry_of(c, slot)->want = 1;
        break;
    case 6:
        slot_of(c, slot)->overruns[draw(LAYOUT_N_DEVICES)] = (uint8_t)draw(256);
        break;
    default:
        memcpy((char *)entry_of(c, slot) + word, &value,
               word <= offsetof(struct ledger_device, released_epoch) ? 4 : 8);
    }
}

static void give_back(struct container *c, uint64_t release_ns, uint64_t residual_ns)
{
    struct ledger_device *entry = entry_of(c, 0);

    entry->active_epoch = grant_of(c)->epoch;
    entry->release_ns = release_ns;
    entry->residual_ns = residual_ns;
    entry->released_epoch = grant_of(c)->epoch;
    poke_runner();
}

static void new_behaviour(struct container *c)
{
    do
        c->behaviour = c->away ? SILENT : (enum behaviour)draw(N_BEHAVIOURS);
    while (!remains && (c->behaviour == OVERHANGS || c->behaviour == RESIDUAL));
    c->stretch_ns = clock_ns + some_time(24, 34);
    memset(c->ledger + LEDGER_SLOTS, 0, LEDGER_SIZE - LEDGER_SLOTS);
    ((struct ledger_header *)c->ledger)->n_slots = 1;
    slot_of(c, 0)->state = 1;
}

static void lie(struct container *c)
{
    struct grant_device *grant = grant_of(c);
    struct ledger_device *entry = entry_of(c, 0);
    bool holds, new;

    if (clock_ns >= c->stretch_ns)
        new_behaviour(c);
    holds = grant->deadline_ns > clock_ns && grant->epoch != entry->released_epoch;
    new = holds && entry->active_epoch != grant->epoch;
    c->next_ns = clock_ns + some_time(14, 22);
    if (c->behaviour == SILENT) {
        entry->want = 0;
        c->next_ns = clock_ns + 50 * NS_PER_MS;
        return;
    }
    if (c->behaviour == NONSENSE) {
        for (uint64_t n = draw(64); n; n--)
            scribble(c);
        for (uint32_t slot = 0; !remains && slot < LAYOUT_N_SLOTS; slot++) {
            memset(slot_of(c, slot)->overruns, 0, sizeof slot_of(c, slot)->overruns);
            entry_of(c, slot)->residual_ns = 0;
        }
        if (draw(4) == 0)
            poke_runner();
        c->next_ns = clock_ns + some_time(10, 24);
        return;
    }
    if (!entry->want && (c->behaviour != NAP || draw(2))) {
        entry->want = 1;
        poke_runner();
    }
    if (c->behaviour != STOPPED)
        entry->seen_ns = entry->alive_ns = clock_ns;
    if (c->behaviour == BUSY)
        entry->busy_ns += some_time(10, 30);
    if (c->behaviour == OVERHANGS)
        slot_of(c, 0)->overruns[0] = draw(8) != 0;
    if (c->behaviour == UNUSED)
        return;
    if (new) {
        entry->active_epoch = grant->epoch;
        c->give_ns = clock_ns;
        if (c->behaviour == LATE)
            c->give_ns = grant->deadline_ns + some_time(14, 28);
        else if (c->behaviour == HOLD || c->behaviour == STOPPED)
            c->give_ns = NEVER;
        else if (c->behaviour != AT_ONCE)
            c->give_ns = clock_ns + some_time(10, 23);
        if (c->give_ns < c->next_ns)
            c->next_ns = c->give_ns;
        if (c->give_ns > clock_ns)
            return;
    }
    if (entry->active_epoch == grant->epoch && entry->released_epoch != grant->epoch &&
        clock_ns >= c->give_ns) {
        if (c->behaviour == NAP)
            entry->want = 0;
        give_back(c, draw(4) ? clock_ns : nonsense(c),
                  c->behaviour == RESIDUAL ? some_time(10, 40) : 0);
    }
}

static void act(struct container *c, bool lies)
{
    c->signal = grant_of(c)->signal;
    if (lies)
        lie(c);
    else
        work(c);
}

/* Wakes a container after WAKE_NS if its grant page has changed. */
static void notice(struct container *c)
{
    if (grant_of(c)->signal != c->signal && c->next_ns > clock_ns + WAKE_NS)
        c->next_ns = clock_ns + WAKE_NS;
}

static void judge(struct extreme *least, struct extreme *most, uint64_t round)
{
    for (int i = 0; i < N_HONEST; i++) {
        struct container *c = &honest[i];
        uint64_t sum = 0;
        double share;

        if (c->works) {
            c->used_ns += clock_ns - c->since_ns;
            entry_of(c, 0)->busy_ns += clock_ns - c->since_ns;
            c->since_ns = clock_ns;
        }
        c->buckets[round % N_BUCKETS] = c->used_ns;
        c->used_ns = 0;
        if (round + 1 < N_BUCKETS)
            continue;
        for (int k = 0; k < N_BUCKETS; k++)
            sum += c->buckets[k];
        share = 100.0 * (double)sum / (double)(N_BUCKETS * BUCKET_NS);
        for (int k = 0; k < 2; k++) {
            struct extreme *e = k ? &most[i] : &least[i];

            if (k ? share <= e->share : share >= e->share)
                continue;
            e->share = share;
            e->at_ns = clock_ns;
            for (int j = 0; j < N_LIARS; j++)
                e->liars[j] = liars[j].behaviour;
        }
    }
}

static void print(const char *name, const struct extreme *extremes)
{
    printf("\"%s\": [", name);
    for (int i = 0; i < N_HONEST; i++) {
        printf("%s{\"share\": %.2f, \"at_s\": %llu, \"liars\": [", i ? ", " : "", extremes[i].share,
               (unsigned long long)(extremes[i].at_ns / NS_PER_S));
        for (int j = 0; j < N_LIARS; j++)
            printf("%s\"%s\"", j ? ", " : "", names[extremes[i].liars[j]]);
        printf("]}");
    }
    printf("]");
}

int main(int argc, char **argv)
{
    struct runner_config config = {.arbiter = {.overdue_ns = 20 * NS_PER_MS,
                                               .lead_ns = 400 * NS_PER_US,
                                               .overhead_ns = 500 * NS_PER_US},
                                   .unused_ns = 5 * NS_PER_MS};
    struct extreme least[N_HONEST] = {{.share = 1e9}, {.share = 1e9}}, most[N_HONEST] = {0};
    uint64_t seconds, round = 0, stretch_ns = 0;

    if (argc < 9)
        return 2;
    seconds = strtoull(argv[1], NULL, 0);
    seed = strtoull(argv[2], NULL, 0) * 2654435761u + 88172645463325252ull;
    config.arbiter.quantum_ns = strtoull(argv[3], NULL, 0);
    config.arbiter.most_ns = strtoull(argv[4], NULL, 0);
    config.arbiter.longest_ns = strtoull(argv[5], NULL, 0);
    config.arbiter.switch_ns = strtoull(argv[6], NULL, 0);
    config.lookahead_ns = strtoull(argv[7], NULL, 0);
    remains = atoi(argv[8]);
    clock_ns = 1000 * NS_PER_S;
    runner = runner_new(&config, NULL);
    if (!runner)
        abort();
    begin(&honest[0], ARBITER_WHOLE / 2);
    begin(&honest[1], ARBITER_WHOLE / 5);
    for (int i = 0; i < N_LIARS; i++)
        begin(&liars[i], ARBITER_WHOLE * 3 / 10 / N_LIARS);
    for (uint64_t end = clock_ns + seconds * NS_PER_S, next_bucket = clock_ns + BUCKET_NS;
         clock_ns < end;) {
        uint64_t next = wake_ns < next_bucket ? wake_ns : next_bucket;
        struct container *actor = NULL;

        for (int i = 0; i < N_HONEST + N_LIARS; i++) {
            struct container *c = i < N_HONEST ? &honest[i] : &liars[i - N_HONEST];

            if (c->next_ns < next) {
                next = c->next_ns;
                actor = c;
            }
        }
        if (next > clock_ns)
            clock_ns = next;
        if (actor) {
            act(actor, actor >= liars && actor < liars + N_LIARS);
            continue;
        }
        if (clock_ns >= next_bucket) {
            judge(least, most, round++);
            next_bucket += BUCKET_NS;
            if (clock_ns >= stretch_ns) {
                stretch_ns = clock_ns + some_time(33, 36);
                for (int i = 0; i < N_LIARS; i++) {
                    liars[i].away = draw(3) == 0;
                    if (liars[i].away)
                        liars[i].stretch_ns = clock_ns;
                }
            }
            continue;
        }
        wake_ns = pass(runner, clock_ns);
        if (wake_ns > clock_ns + HEARTBEAT_NS)
            wake_ns = clock_ns + HEARTBEAT_NS;
        if (wake_ns <= clock_ns)
            wake_ns = clock_ns + NS_PER_US;
        for (int i = 0; i < N_HONEST; i++)
            notice(&honest[i]);
        for (int i = 0; i < N_LIARS; i++)
            notice(&liars[i]);
    }
    printf("{");
    print("least", least);
    printf(", ");
    print("most", most);
    printf("}\n");
    for (int i = 0; i < N_HONEST + N_LIARS; i++) {
        struct container *c = i < N_HONEST ? &honest[i] : &liars[i - N_HONEST];

        runner_remove(runner, c->tenant);
        free(c->grant);
        free(c->ledger);
    }
    runner_free(runner);
    return 0;
}
