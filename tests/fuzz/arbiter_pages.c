/*
 * Runs the arbiter's threads for two GPUs and measures the shares of honest containers next to
 * containers that write arbitrary values into their ledgers.
 *
 * `arbiter_pages SECONDS SEED anything|idle|done`. Three containers are honest: one on each GPU and
 * one on both, each with 25 % of its GPUs. Two others, one of them on both GPUs, write random words
 * at random offsets in quick succession, and wake the threads. With `idle` they request the GPU
 * instead and do not use it; with `done` they release each grant immediately. A sixth container is
 * added and removed repeatedly. The program prints, as JSON, the shares of the three, the longest
 * time without a heartbeat, and, for `anything`, the fraction of a processor that the threads used
 * while the ledgers of the two contained arbitrary values and the two did not wake the threads. A
 * sanitizer reports other errors.
 */
#include "layout.gen.h"
#include "os.h"
#include "runner.h"

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define N_GPUS   2
#define SHARE    (ARBITER_WHOLE / 4)
#define N_HONEST 3
#define N_LIARS  2

static const struct runner_config config = {
    .arbiter = {.quantum_ns = 4 * NS_PER_MS,
                .most_ns = 8 * NS_PER_MS,
                .overdue_ns = 20 * NS_PER_MS,
                .longest_ns = 100 * NS_PER_MS,
                .lead_ns = 400 * NS_PER_US,
                .switch_ns = 130 * NS_PER_US,
                .overhead_ns = 500 * NS_PER_US,
                .beside_ns = 120 * NS_PER_US},
    .lookahead_ns = 200 * NS_PER_US,
    .unused_ns = 5 * NS_PER_MS,
};

struct container {
    char *grant, *ledger;
    uint32_t n;
    uint32_t gpus[N_GPUS];
    int32_t tenants[N_GPUS];
    int32_t gang;
    int poke; /* the program's end of its socket */
    uint64_t held_ns[N_GPUS];
    uint64_t seed;
};

struct rank {
    struct container *container;
    uint32_t device;
};

static struct runners *together;
static struct runner *runners[N_GPUS];
static bool ended, resting;
static enum { ANYTHING, IDLE, DONE } how;

static uint64_t draw(uint64_t *seedp)
{
    *seedp ^= *seedp << 13;
    *seedp ^= *seedp >> 7;
    *seedp ^= *seedp << 17;
    return *seedp;
}

static struct grant_device *grant_of(const struct container *c, uint32_t device)
{
    return (struct grant_device *)(c->grant + GRANT_DEVICES) + device;
}

static struct ledger_device *entry_of(const struct container *c, uint32_t slot, uint32_t device)
{
    return (struct ledger_device *)(c->ledger + LEDGER_SLOTS + slot * sizeof(struct ledger_slot) +
                                    LEDGER_SLOT_DEVICES) +
           device;
}

static void begin(struct container *c, uint32_t gpus, uint32_t guarantee, uint32_t limit)
{
    struct runner *each[N_GPUS];
    int pair[2];

    /* Each page has its exact size, so that a sanitizer detects accesses beyond its end. */
    c->grant = calloc(1, GRANT_SIZE);
    c->ledger = calloc(1, LEDGER_SIZE);
    ((struct ledger_header *)c->ledger)->n_slots = 1;
    ((struct ledger_slot *)(c->ledger + LEDGER_SLOTS))->state = 1;
    c->n = 0;
    for (uint32_t gpu = 0; gpu < N_GPUS; gpu++)
        if (gpus >> gpu & 1)
            c->gpus[c->n++] = gpu;
    for (uint32_t i = 0; i < c->n; i++) {
        each[i] = runners[c->gpus[i]];
        c->tenants[i] = runner_add(each[i], guarantee, limit, c->grant, i, c->ledger);
        if (c->tenants[i] == ARBITER_NONE)
            abort();
    }
    c->gang = c->n > 1 ? runners_add(together, each, c->tenants, c->n) : ARBITER_NONE;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) ||
        runner_watch(each[0], pair[1], each + 1, c->n - 1))
        abort();
    c->poke = pair[0];
}

static void end(struct container *c)
{
    close(c->poke);
    if (c->gang != ARBITER_NONE)
        runners_remove(together, c->gang);
    for (uint32_t i = 0; i < c->n; i++)
        runner_remove(runners[c->gpus[i]], c->tenants[i]);
    free(c->grant);
    free(c->ledger);
}

static void poke(const struct container *c)
{
    if (write(c->poke, "p", 1) < 0)
        return; /* full: the thread is already awake */
}

/* A program that always has work for its GPU, and works until its grant ends. */
static void *work(void *argument)
{
    struct rank *rank = argument;
    struct container *c = rank->container;
    struct grant_device *grant = grant_of(c, rank->device);
    struct ledger_device *entry = entry_of(c, 0, rank->device);

    while (!atomic_load_relaxed(&ended)) {
        uint32_t signal = atomic_load_acquire(&grant->signal);
        uint64_t deadline = atomic_load_acquire(&grant->deadline_ns);
        uint32_t epoch = atomic_load_acquire(&grant->epoch);
        uint64_t began = os_now(), now;

        atomic_store_relaxed(&entry->seen_ns, began);
        if (deadline <= began || (epoch == atomic_load_relaxed(&entry->released_epoch))) {
            if (!atomic_load_relaxed(&entry->want)) {
                atomic_store_release(&entry->want, 1);
                poke(c);
            }
            os_futex_wait(&grant->signal, signal, 2 * NS_PER_MS);
            continue;
        }
        atomic_store_seq_cst(&entry->active_epoch, epoch);
        if (atomic_load_acquire(&grant->epoch) != epoch)
            continue;
        do {
            now = os_now();
            deadline = atomic_load_acquire(&grant->deadline_ns);
            atomic_store_relaxed(&entry->seen_ns, now);
            if (now < deadline)
                os_futex_wait(&grant->signal, atomic_load_acquire(&grant->signal),
                              deadline - now < NS_PER_MS ? deadline - now : NS_PER_MS);
        } while (now < deadline && atomic_load_acquire(&grant->epoch) == epoch &&
                 !atomic_load_relaxed(&ended));
        c->held_ns[rank->device] += now - began;
        atomic_bump(&entry->busy_ns, now - began);
        atomic_store_relaxed(&entry->release_ns, now);
        atomic_store_relaxed(&entry->residual_ns, 0);
        atomic_store_release(&entry->released_epoch, epoch);
        poke(c);
    }
    return NULL;
}

static uint64_t nonsense(struct container *c)
{
    uint64_t now = os_now(), *seedp = &c->seed;
    struct grant_device *grant = grant_of(c, (uint32_t)draw(seedp) % c->n);

    switch (draw(seedp) % 12) {
    case 0:
        return 0;
    case 1:
        return 1;
    case 2:
        return now;
    case 3:
        return now + draw(seedp) % (100 * NS_PER_MS);
    case 4:
        return now - draw(seedp) % (100 * NS_PER_MS);
    case 5:
        return UINT64_MAX - draw(seedp) % 3;
    case 6:
        return 1ull << draw(seedp) % 64;
    case 7:
    case 8:
        return atomic_load_relaxed(&grant->epoch);
    case 9:
        return (uint64_t)atomic_load_relaxed(&grant->epoch) << 32 | 1;
    default:
        return draw(seedp);
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
        offsetof(struct ledger_device, provisional_ns),
    };
    uint64_t value = nonsense(c);
    uint32_t slot = draw(&c->seed) % 8 ? (uint32_t)draw(&c->seed) % 4
                                       : (uint32_t)draw(&c->seed) % LAYOUT_N_SLOTS;
    size_t word = words[draw(&c->seed) % (sizeof words / sizeof *words)];

    switch (draw(&c->seed) % 16) {
    case 0:
        memcpy(c->ledger + draw(&c->seed) % (LEDGER_SIZE - sizeof value), &value, sizeof value);
        break;
    case 1:
        ((struct ledger_header *)c->ledger)->n_slots = (uint32_t)value;
        break;
    case 2:
        ((struct ledger_header *)c->ledger)->n_slots = 4;
        break;
    case 3:
        ((struct ledger_slot *)(c->ledger + LEDGER_SLOTS) + slot)->state = draw(&c->seed) % 4 != 0;
        break;
    case 6:
        ((struct ledger_slot *)(c->ledger + LEDGER_SLOTS) + slot)
            ->overruns[draw(&c->seed) % LAYOUT_N_DEVICES] = (uint8_t)draw(&c->seed);
        break;
    case 4:
    case 5:
        atomic_store_release(&entry_of(c, slot, (uint32_t)draw(&c->seed) % c->n)->want, 1);
        break;
    default:
        memcpy((char *)entry_of(c, slot, (uint32_t)draw(&c->seed) % c->n) + word, &value,
               word <= offsetof(struct ledger_device, released_epoch) ? 4 : 8);
    }
}

/* Answers grants as quickly as possible. */
static void answer(struct container *c)
{
    for (uint32_t device = 0; device < c->n; device++) {
        struct ledger_device *entry = entry_of(c, 0, device);
        uint32_t epoch = atomic_load_acquire(&grant_of(c, device)->epoch);

        atomic_store_relaxed(&entry->want, 1);
        atomic_store_relaxed(&entry->seen_ns, os_now());
        if (how == DONE && epoch != atomic_load_relaxed(&entry->released_epoch)) {
            atomic_store_seq_cst(&entry->active_epoch, epoch);
            atomic_store_release(&entry->released_epoch, epoch);
            poke(c);
        }
    }
    os_sleep(20 * NS_PER_US);
}

static void *lie(void *argument)
{
    struct container *c = argument;

    while (!atomic_load_relaxed(&ended)) {
        if (how != ANYTHING) {
            answer(c);
            continue;
        }
        for (uint64_t n = draw(&c->seed) % 64; n; n--)
            scribble(c);
        if (draw(&c->seed) % 4 == 0)
            poke(c);
        os_sleep(draw(&c->seed) % (200 * NS_PER_US));
        while (atomic_load_acquire(&resting) && !atomic_load_relaxed(&ended))
            os_sleep(NS_PER_MS);
    }
    return NULL;
}

/* Returns the processor time of the arbiter's threads, which are found by name. */
static uint64_t used_ns(void)
{
    uint64_t sum = 0;
    DIR *tasks = opendir("/proc/self/task");
    struct dirent *task;

    while (tasks && (task = readdir(tasks))) {
        char path[300], line[400];
        unsigned long long ns = 0;
        FILE *file;

        snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
        file = fopen(path, "r");
        if (!file)
            continue;
        if (!fgets(line, sizeof line, file) || strcmp(line, "tidegate-arb\n") != 0)
            line[0] = 0;
        fclose(file);
        snprintf(path, sizeof path, "/proc/self/task/%s/schedstat", task->d_name);
        file = line[0] ? fopen(path, "r") : NULL;
        if (!file)
            continue;
        if (fscanf(file, "%llu", &ns) == 1)
            sum += ns;
        fclose(file);
    }
    closedir(tasks);
    return sum;
}

int main(int argc, char **argv)
{
    static struct container honest[N_HONEST], liars[N_LIARS], guest;
    static const uint32_t where[N_HONEST] = {1, 2, 3}, lied[N_LIARS] = {1, 3};
    struct rank ranks[] = {{&honest[0], 0}, {&honest[1], 0}, {&honest[2], 0}, {&honest[2], 1}};
    pthread_t workers[4], tellers[N_LIARS];
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) | 1 : 1;
    uint64_t seconds = argc > 1 ? strtoull(argv[1], NULL, 0) : 4;
    uint64_t began = os_now(), until = began + seconds * NS_PER_S, silence = 0;
    uint64_t rested_ns = 0, rested_used_ns = 0;
    bool has_guest = false;

    if (argc > 3)
        how = !strcmp(argv[3], "idle") ? IDLE : !strcmp(argv[3], "done") ? DONE : ANYTHING;
    together = runners_new(&config);
    for (int i = 0; i < N_GPUS; i++) {
        runners[i] = runner_new(&config, together);
        if (!runners[i] || runner_start(runners[i]))
            abort();
    }
    for (int i = 0; i < N_HONEST; i++)
        begin(&honest[i], where[i], SHARE, SHARE);
    for (int i = 0; i < N_LIARS; i++) {
        begin(&liars[i], lied[i], ARBITER_WHOLE / 10, ARBITER_WHOLE);
        liars[i].seed = seed * 7919 + (uint64_t)i;
        pthread_create(&tellers[i], NULL, lie, &liars[i]);
    }
    for (int i = 0; i < 4; i++)
        pthread_create(&workers[i], NULL, work, &ranks[i]);
    for (unsigned round = 0; os_now() < until; round++) {
        uint64_t heartbeat, now;

        os_sleep(draw(&seed) % (20 * NS_PER_MS));
        heartbeat = atomic_load_relaxed(&((struct grant_header *)honest[0].grant)->heartbeat_ns);
        now = os_now();
        if (now > heartbeat && now - heartbeat > silence)
            silence = now - heartbeat;
        runner_due(runners[round % N_GPUS]);
        runner_set(runners[0], liars[0].tenants[0], (uint32_t)draw(&seed) % (ARBITER_WHOLE / 10),
                   ARBITER_WHOLE);
        if (round % 8 == 0) {
            if (has_guest)
                end(&guest);
            else
                begin(&guest, 1 + (uint32_t)draw(&seed) % 3, ARBITER_WHOLE / 20, ARBITER_WHOLE);
            has_guest = !has_guest;
        }
        if (has_guest) {
            guest.seed = seed;
            for (int i = 0; i < 100; i++)
                scribble(&guest);
        }
        if (round % 32 == 31) {
            uint64_t used;

            atomic_store_release(&resting, true);
            os_sleep(5 * NS_PER_MS);
            used = used_ns();
            now = os_now();
            os_sleep(50 * NS_PER_MS);
            rested_used_ns += used_ns() - used;
            rested_ns += os_now() - now;
            atomic_store_release(&resting, false);
        }
    }
    seconds = os_now() - began;
    atomic_store_release(&ended, true);
    for (int i = 0; i < 4; i++)
        pthread_join(workers[i], NULL);
    for (int i = 0; i < N_LIARS; i++)
        pthread_join(tellers[i], NULL);
    if (has_guest)
        end(&guest);
    printf("{\"shares\": [");
    for (int i = 0; i < 4; i++)
        printf("%s%.1f", i ? ", " : "",
               100.0 * (double)ranks[i].container->held_ns[ranks[i].device] / (double)seconds);
    printf("], \"silence_ms\": %.1f, \"resting\": %.3f}\n", (double)silence / 1e6,
           rested_ns ? (double)rested_used_ns / (double)rested_ns : 0.0);
    for (int i = 0; i < N_LIARS; i++)
        end(&liars[i]);
    for (int i = 0; i < N_HONEST; i++)
        end(&honest[i]);
    for (int i = 0; i < N_GPUS; i++)
        runner_free(runners[i]);
    runners_free(together);
    return 0;
}
