/* The policy for containers with several GPUs; see gangs.h. */
#include "gangs.h"

#include <stdlib.h>
#include <string.h>

#define IN_USE_NS 1000000000ull /* a GPU counts as used for this long after the last use */
#define RECENT_NS 100000000ull  /* and is granted without a request for this long */
#define QUIET_NS  300000ull     /* with no GPU wanted or held for this long, the turn is over */
/* How long a GPU that a gang gave back is kept for it while it holds another: a kernel of a
 * collective may be running on that other GPU. */
#define SPLIT_NS        500000ull
#define SPLIT_LENGTH_NS 500000ull /* length of the grant for that kernel's counterpart */

/* One GPU of a gang. */
struct member {
    uint32_t gpu;
    int32_t tenant;
    struct arbiter_standing standing; /* as of its arbiter's last step */
    uint64_t seen_ns;                 /* the last sign of use */
    bool seen;
    /* In this turn: */
    bool granted;
    bool done;           /* it was given back for good */
    uint64_t split_ns;   /* end of the grant for a counterpart; 0: none */
    uint64_t changed_ns; /* when it was given back */
};

struct gang {
    bool used;
    bool turn;
    bool contended;    /* another container is waiting for the end of the turn */
    uint64_t end;      /* of the turn; ARBITER_NEVER: open */
    uint64_t quiet_ns; /* when any of its GPUs was last wanted or held */
    uint64_t gpus;     /* all of its GPUs */
    uint32_t n;
    struct member members[GANGS_N_OWN];
};

struct gangs {
    struct arbiter_config config;
    struct gang gangs[GANGS_N];
    uint32_t n;     /* highest index in use, plus one */
    uint64_t stale; /* GPUs from which a gang has been removed since their last step */
    uint64_t now;   /* time of the last step */
    uint64_t wake;  /* a step is due by then */
    uint64_t poked; /* GPUs to step again, because what gangs may do there has changed */
};

struct gangs *gangs_new(const struct arbiter_config *config)
{
    struct gangs *gangs = calloc(1, sizeof *gangs);

    if (gangs)
        gangs->config = *config;
    return gangs;
}

struct gangs *gangs_free(struct gangs *gangs)
{
    free(gangs);
    return NULL;
}

/* Returns the gang's member for a GPU; NULL if it has none. */
static struct member *member_on(struct gang *g, uint32_t gpu)
{
    for (uint32_t i = 0; g->used && i < g->n; i++)
        if (g->members[i].gpu == gpu)
            return &g->members[i];
    return NULL;
}

/* Makes a gang of a container's tenants, one for each GPU. Returns the gang's number, or
 * ARBITER_NONE if no gang can be made: the GPUs are then granted one by one. */
int32_t gangs_add(struct gangs *gangs, const uint32_t *gpus, const int32_t *tenants, uint32_t n)
{
    if (n > GANGS_N_OWN)
        return ARBITER_NONE;
    for (uint32_t i = 0; i < n; i++)
        if (gpus[i] >= GANGS_N_GPUS)
            return ARBITER_NONE;
    for (int32_t i = 0; i < GANGS_N; i++) {
        struct gang *g = &gangs->gangs[i];

        if (g->used)
            continue;
        memset(g, 0, sizeof *g);
        g->used = true;
        g->n = n;
        for (uint32_t m = 0; m < n; m++) {
            g->members[m].gpu = gpus[m];
            g->members[m].tenant = tenants[m];
            g->gpus |= 1ull << gpus[m];
        }
        if ((uint32_t)i >= gangs->n)
            gangs->n = (uint32_t)i + 1;
        return i;
    }
    return ARBITER_NONE;
}

void gangs_remove(struct gangs *gangs, int32_t gang)
{
    struct gang *g = &gangs->gangs[gang];

    gangs->stale |= g->gpus;
    gangs->poked |= g->gpus;
    g->used = false;
    g->turn = false;
}

/* Ends the turns of all gangs that have this GPU, and excludes the GPU from them until its next
 * step. */
void gangs_leave(struct gangs *gangs, uint32_t gpu)
{
    for (uint32_t i = 0; i < gangs->n; i++) {
        struct gang *g = &gangs->gangs[i];
        struct member *m = member_on(g, gpu);

        if (!m)
            continue;
        *m = (struct member){.gpu = gpu, .tenant = m->tenant};
        g->turn = false;
        gangs->poked |= g->gpus;
    }
}

/* Whether a GPU has to be stepped by gangs_step(): a gang has it, or had it at its last step. */
bool gangs_concern(struct gangs *gangs, uint32_t gpu)
{
    for (uint32_t i = 0; i < gangs->n; i++)
        if (member_on(&gangs->gangs[i], gpu))
            return true;
    return gangs->stale & 1ull << gpu;
}

/* ---- queries ---- */

static bool is_in_use(const struct gangs *gangs, const struct member *m)
{
    return m->standing.want || m->standing.holds ||
           (m->seen && gangs->now < m->seen_ns + IN_USE_NS);
}

/* Returns the GPUs that the container uses. If there are several, it is a gang. */
static uint64_t gpus_in_use(const struct gangs *gangs, const struct gang *g)
{
    uint64_t gpus = 0;

    for (uint32_t i = 0; i < g->n; i++)
        if (is_in_use(gangs, &g->members[i]))
            gpus |= 1ull << g->members[i].gpu;
    return gpus;
}

static bool is_gang(const struct gangs *gangs, const struct gang *g)
{
    uint64_t gpus = gpus_in_use(gangs, g);

    return g->used && (g->turn || (gpus & (gpus - 1)));
}

/* Whether the gang is waiting for a GPU; with `anew`, for a GPU not yet given back in this turn. */
static bool wants(const struct gang *g, bool anew)
{
    for (uint32_t i = 0; i < g->n; i++)
        if (g->members[i].standing.want && !(anew && g->members[i].done))
            return true;
    return false;
}

static bool holds(const struct gang *g)
{
    for (uint32_t i = 0; i < g->n; i++)
        if (g->members[i].standing.holds)
            return true;
    return false;
}

/* Requests a step at `at`, if that is in the future. */
static void wake_at(struct gangs *gangs, uint64_t at)
{
    if (at > gangs->now && at < gangs->wake)
        gangs->wake = at;
}

/* Returns the time from which the gang's turn may begin on all of its GPUs; ARBITER_NEVER: another
 * container goes before it. */
static uint64_t begins_at(const struct gangs *gangs, const struct gang *g)
{
    uint64_t at = 0;

    for (uint32_t i = 0; i < g->n; i++) {
        const struct member *m = &g->members[i];

        if (!is_in_use(gangs, m))
            continue;
        if (m->standing.stuck || m->standing.first_ns == ARBITER_NEVER)
            return ARBITER_NEVER;
        if (m->standing.ready_ns > at)
            at = m->standing.ready_ns;
        if (m->standing.first_ns > at)
            at = m->standing.first_ns;
    }
    return at;
}

/* Returns when the gang's quota allows its turn to begin. */
static uint64_t ready_at(const struct gangs *gangs, const struct gang *g)
{
    uint64_t at = 0;

    for (uint32_t i = 0; i < g->n; i++)
        if (is_in_use(gangs, &g->members[i]) && g->members[i].standing.ready_ns > at)
            at = g->members[i].standing.ready_ns;
    return at;
}

/* Whether another gang is waiting for the end of `g`'s turn and may begin by `end`. */
static bool has_rival(const struct gangs *gangs, const struct gang *g, uint64_t end)
{
    for (uint32_t i = 0; i < gangs->n; i++) {
        const struct gang *other = &gangs->gangs[i];

        if (other != g && is_gang(gangs, other) && wants(other, false) &&
            gpus_in_use(gangs, other) & gpus_in_use(gangs, g) && ready_at(gangs, other) <= end)
            return true;
    }
    return false;
}

/* ---- turns ---- */

static void begin_turn(struct gangs *gangs, struct gang *g)
{
    for (uint32_t i = 0; i < g->n; i++) {
        g->members[i].granted = g->members[i].done = false;
        g->members[i].split_ns = 0;
    }
    g->turn = true;
    g->contended = true;
    /* Beginning and ending a turn on several GPUs costs more, so a turn is as long as the longest
     * grant. */
    g->end = gangs->now + gangs->config.most_ns + gangs->config.switch_ns;
    g->quiet_ns = gangs->now;
    gangs->poked |= g->gpus;
}

static void end_turn(struct gangs *gangs, struct gang *g)
{
    g->turn = false;
    gangs->poked |= g->gpus;
}

/* Whether a gang's turn has been over for so long that its GPUs are no longer waited for. */
static bool is_given_up(const struct gangs *gangs, const struct gang *g)
{
    return g->end != ARBITER_NEVER && gangs->now >= g->end + gangs->config.overdue_ns;
}

/* Whether a GPU is no longer granted in the gang's turn, except for the counterpart of a kernel on
 * another GPU. */
static bool is_over(const struct gangs *gangs, const struct gang *g, const struct member *m)
{
    return m->done || (g->end != ARBITER_NEVER && gangs->now >= g->end);
}

/* Whether the gang gave the GPU back, wants it again and still holds others: work on those may be
 * waiting for its counterpart on this GPU. */
static bool is_split(const struct gangs *gangs, const struct gang *g, const struct member *m)
{
    return g->turn && holds(g) && !is_given_up(gangs, g) && m->split_ns <= gangs->now &&
           m->standing.want && !m->standing.holds && is_over(gangs, g, m);
}

static uint64_t split_since(const struct gang *g, const struct member *m)
{
    return m->done ? m->changed_ns : g->end;
}

/* Makes a short grant on a GPU that was given back, if the gang still holds another GPU after
 * SPLIT_NS. No such grant is made later than `overdue_ns` after the end of the turn. */
static void mend_split(struct gangs *gangs, struct gang *g)
{
    for (uint32_t i = 0; i < g->n; i++) {
        struct member *m = &g->members[i];
        uint64_t since = split_since(g, m);

        if (!is_split(gangs, g, m))
            continue;
        if (gangs->now < since + SPLIT_NS) {
            wake_at(gangs, since + SPLIT_NS);
            continue;
        }
        m->done = false;
        m->split_ns = gangs->now + SPLIT_LENGTH_NS;
        gangs->poked |= 1ull << m->gpu;
    }
}

/* Lets the turn end if another container is waiting, and otherwise extends it on all GPUs without a
 * drain. */
static void extend_turn(struct gangs *gangs, struct gang *g)
{
    bool others = false, whole = true, may_continue = true, done = false, contended = false;
    uint64_t end = g->end == ARBITER_NEVER || g->end < gangs->now ? gangs->now : g->end;

    for (uint32_t i = 0; i < g->n; i++) {
        const struct member *m = &g->members[i];

        if (!is_in_use(gangs, m))
            continue;
        others = others || m->standing.others;
        contended = contended || m->standing.rivals;
        whole = whole && m->standing.whole;
        may_continue = may_continue && m->standing.may_continue;
        done = done || m->done || m->split_ns;
    }
    contended = contended || has_rival(gangs, g, end);
    others = others || has_rival(gangs, g, ARBITER_NEVER);
    if (contended != g->contended) {
        g->contended = contended;
        gangs->poked |= g->gpus;
    }
    if (g->end == ARBITER_NEVER) {
        if (others || !whole) {
            g->end = gangs->now + (contended ? 0 : gangs->config.quantum_ns);
            gangs->poked |= g->gpus;
        }
        return;
    }
    if (gangs->now + gangs->config.lead_ns < g->end) {
        wake_at(gangs, g->end - gangs->config.lead_ns);
    } else if (!contended && may_continue && !done && holds(g) && gangs->now < g->end) {
        g->end = !others && whole ? ARBITER_NEVER : g->end + gangs->config.quantum_ns;
        gangs->poked |= g->gpus;
        wake_at(gangs, g->end - gangs->config.lead_ns);
    }
}

/* Whether the gang has given all of its GPUs back: it could get nothing more in this turn, and
 * would only delay the turns of others. */
static bool is_spent(const struct gangs *gangs, const struct gang *g)
{
    for (uint32_t i = 0; i < g->n; i++)
        if (is_in_use(gangs, &g->members[i]) && !g->members[i].done)
            return false;
    return true;
}

static void keep_turn(struct gangs *gangs, struct gang *g)
{
    bool ending = g->end != ARBITER_NEVER && gangs->now + gangs->config.lead_ns >= g->end;

    if (wants(g, true) || holds(g))
        g->quiet_ns = gangs->now;
    else
        wake_at(gangs, g->quiet_ns + QUIET_NS);
    if (!holds(g) && (ending || is_spent(gangs, g) || gangs->now >= g->quiet_ns + QUIET_NS)) {
        end_turn(gangs, g);
        return;
    }
    if (!holds(g))
        wake_at(gangs, g->end - gangs->config.lead_ns);
    extend_turn(gangs, g);
    mend_split(gangs, g);
}

/* Whether a gang's turn may begin now. The gang has to hold at least one of its GPUs, or to want
 * one that is free or at the end of a grant. */
static bool may_begin(struct gangs *gangs, const struct gang *g)
{
    uint64_t own = gpus_in_use(gangs, g), at = begins_at(gangs, g);
    bool anywhere = false;

    for (uint32_t i = 0; i < g->n; i++) {
        const struct arbiter_standing *s = &g->members[i].standing;

        anywhere = anywhere || s->holds || (s->want && (s->free || s->deadline_ns <= gangs->now));
    }
    for (uint32_t i = 0; i < gangs->n; i++) {
        const struct gang *other = &gangs->gangs[i];

        if (other != g && other->used && other->turn && gpus_in_use(gangs, other) & own)
            return false;
    }
    if (at > gangs->now) {
        if (at != ARBITER_NEVER)
            wake_at(gangs, at);
        return false;
    }
    return anywhere;
}

/* Whether gang `a` goes before gang `b`. A gang that would have to be lent time goes after one that
 * is owed time. Otherwise, the gang that has had less of its share goes first; each is judged by
 * the GPU on which it has had the most. */
static bool goes_before(const struct gangs *gangs, const struct gang *a, const struct gang *b)
{
    double due[2] = {0, 0}, tag[2] = {0, 0};
    bool lent[2] = {false, false};
    const struct gang *both[2] = {a, b};

    for (int side = 0; side < 2; side++)
        for (uint32_t i = 0; i < both[side]->n; i++) {
            const struct member *m = &both[side]->members[i];

            if (!is_in_use(gangs, m))
                continue;
            lent[side] = lent[side] || m->standing.lent;
            if (m->standing.due > due[side])
                due[side] = m->standing.due;
            if (m->standing.tag > tag[side])
                tag[side] = m->standing.tag;
        }
    if (lent[0] != lent[1])
        return lent[1];
    return lent[0] ? tag[0] < tag[1] : due[0] < due[1];
}

/* Decides which turns begin and end. */
static void decide(struct gangs *gangs)
{
    struct gang *next;

    for (uint32_t i = 0; i < gangs->n; i++)
        if (gangs->gangs[i].used && gangs->gangs[i].turn)
            keep_turn(gangs, &gangs->gangs[i]);
    do {
        next = NULL;
        for (uint32_t i = 0; i < gangs->n; i++) {
            struct gang *g = &gangs->gangs[i];

            if (is_gang(gangs, g) && !g->turn && wants(g, false) && may_begin(gangs, g) &&
                (!next || goes_before(gangs, g, next)))
                next = g;
        }
        if (next)
            begin_turn(gangs, next);
    } while (next);
}

/* ---- one GPU ---- */

static void observe(struct gangs *gangs, struct gang *g, struct member *m,
                    const struct arbiter *arbiter)
{
    bool held = m->standing.holds;
    double busy = m->standing.busy;

    arbiter_look(arbiter, m->tenant, gangs->now, &m->standing);
    /* Holding the GPU is not a sign of use: it may have been granted without a request. */
    if (m->standing.want || m->standing.busy > busy) {
        m->seen = true;
        m->seen_ns = gangs->now;
    }
    if (!g->turn)
        return;
    m->granted = m->granted || m->standing.holds;
    if (held && !m->standing.holds) {
        m->changed_ns = gangs->now;
        gangs->poked |= g->gpus; /* its other GPUs are kept until the turn is over */
        m->done = m->standing.want ||
                  (g->end != ARBITER_NEVER && gangs->now + gangs->config.lead_ns >= g->end);
        m->split_ns = 0;
    }
}

/* Sets what the gang may do on the arbiter's GPU. */
static void set_turn(struct gangs *gangs, const struct gang *g, const struct member *m,
                     struct arbiter *arbiter)
{
    struct arbiter_turn turn = {.role = ARBITER_BARRED};

    if (!is_gang(gangs, g)) {
        turn.role = ARBITER_ALONE;
    } else if (g->turn &&
               (m->standing.holds || !is_over(gangs, g, m) || m->split_ns > gangs->now)) {
        turn.role = ARBITER_CALLED;
        turn.contended = g->contended;
        turn.until_ns = m->split_ns > g->end ? m->split_ns : g->end;
        turn.unasked = !m->granted && m->seen && gangs->now < m->seen_ns + RECENT_NS;
    }
    arbiter_turn(arbiter, m->tenant, &turn, gangs->now);
}

/* Whether a gang still holds a GPU long after the end of its turn, or of its grant if it has no
 * turn, and is waiting for another GPU. Another gang may hold the other GPU and be waiting for this
 * one. */
static bool is_crossed(struct gangs *gangs, const struct gang *g, const struct member *m)
{
    uint64_t at = m->standing.deadline_ns;

    if (!m->standing.holds || !is_gang(gangs, g) || at == ARBITER_NEVER ||
        (g->turn && g->end == ARBITER_NEVER))
        return false;
    at = g->turn ? g->end + gangs->config.overdue_ns : at + SPLIT_NS;
    if (gangs->now < at) {
        wake_at(gangs, at);
        return false;
    }
    for (uint32_t i = 0; i < g->n; i++)
        if (g->members[i].standing.want && !g->members[i].standing.holds)
            return true;
    return false;
}

/* Returns when the next turn on this GPU is expected to begin; ARBITER_NEVER: none is. */
static uint64_t next_turn_at(const struct gangs *gangs, uint32_t gpu)
{
    uint64_t first = ARBITER_NEVER;

    for (uint32_t i = 0; i < gangs->n; i++) {
        const struct gang *g = &gangs->gangs[i];
        uint64_t at;

        if (!is_gang(gangs, g) || g->turn || !wants(g, false) ||
            !(gpus_in_use(gangs, g) & 1ull << gpu))
            continue;
        at = ready_at(gangs, g);
        for (uint32_t m = 0; m < g->n; m++) {
            const struct arbiter_standing *s = &g->members[m].standing;

            if (g->members[m].gpu != gpu && is_in_use(gangs, &g->members[m]) && !s->free &&
                s->deadline_ns > at)
                at = s->deadline_ns;
        }
        if (at > gangs->now && at < first)
            first = at;
    }
    return first;
}

/* Returns the time until which a GPU is granted to no other container, because a gang may need it
 * for the counterpart of a kernel. Another container would run there for a whole grant, while
 * that kernel spins. */
static uint64_t kept_until(struct gangs *gangs, uint32_t gpu)
{
    for (uint32_t i = 0; i < gangs->n; i++) {
        struct gang *g = &gangs->gangs[i];
        const struct member *m = member_on(g, gpu);

        if (m && is_split(gangs, g, m))
            return split_since(g, m) + SPLIT_NS;
    }
    return 0;
}

/* Steps one GPU's arbiter. Returns a bit mask of the other GPUs that have to be stepped as a
 * result. */
uint64_t gangs_step(struct gangs *gangs, uint32_t gpu, struct arbiter *arbiter, uint64_t now,
                    struct arbiter_view *viewp)
{
    uint64_t here = 1ull << gpu, poked;
    struct member *m;

    if (now > gangs->now)
        gangs->now = now;
    gangs->wake = ARBITER_NEVER;
    if (gangs->stale & here) {
        const struct arbiter_turn alone = {.role = ARBITER_ALONE};

        for (int32_t i = 0; i < ARBITER_N_TENANTS; i++)
            arbiter_turn(arbiter, i, &alone, now);
        gangs->stale &= ~here;
    }
    for (int pass = 0;; pass++) {
        for (uint32_t i = 0; i < gangs->n; i++)
            if ((m = member_on(&gangs->gangs[i], gpu)))
                observe(gangs, &gangs->gangs[i], m, arbiter);
        decide(gangs);
        /* The next iteration sees what the step changed, which may end or begin a turn. */
        if (pass == 3 || (pass && !(gangs->poked & here)))
            break;
        gangs->poked &= ~here;
        for (uint32_t i = 0; i < gangs->n; i++) {
            struct gang *g = &gangs->gangs[i];

            if (!(m = member_on(g, gpu)))
                continue;
            if (is_crossed(gangs, g, m)) {
                arbiter_take(arbiter, now);
                observe(gangs, g, m, arbiter);
            }
            set_turn(gangs, g, m, arbiter);
        }
        arbiter_align(arbiter, next_turn_at(gangs, gpu));
        arbiter_keep(arbiter, kept_until(gangs, gpu));
        arbiter_step(arbiter, now, viewp);
    }
    if (gangs->wake < viewp->wake_ns)
        viewp->wake_ns = gangs->wake;
    poked = gangs->poked & ~here;
    gangs->poked &= here;
    if (gangs->poked)
        viewp->wake_ns = now;
    return poked;
}
