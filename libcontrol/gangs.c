/* Containers with several GPUs are granted together; see gangs.h. */
#include "gangs.h"

#include <stdlib.h>
#include <string.h>

#define PLAY_NS   1000000000ull /* a GPU counts as used for so long after the last sign */
#define RECENT_NS 100000000ull  /* and is granted unasked for so long */
#define QUIET_NS  300000ull     /* nobody of the gang wants or holds a GPU: its turn is over */
#define SPLIT_NS  500000ull     /* a GPU given back, the other not: half of something runs there */
#define SPLIT_LENGTH_NS 500000ull /* of the grant in which the other half begins */

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
    uint64_t split_ns;   /* end of the grant for the other half; 0: none */
    uint64_t changed_ns; /* when it was given back */
};

struct gang {
    bool used;
    bool turn;
    bool contended;    /* somebody waits for the end of the turn */
    uint64_t end;      /* of the turn; ARBITER_NEVER: open */
    uint64_t quiet_ns; /* the last sign of any */
    uint32_t n;
    struct member members[GANGS_N_OWN];
};

struct gangs {
    struct arbiter_config config;
    struct gang gangs[GANGS_N];
    uint32_t n;         /* highest in use, plus one */
    uint64_t concerned; /* GPUs of a gang */
    uint64_t stale;     /* GPUs on which a gang has ended since their last step */
    uint64_t now;       /* of the last step */
    uint64_t wake;      /* somebody's step is due by then */
    uint64_t poked;     /* GPUs whose gangs may do something else than at their last step */
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

static uint64_t bit(const struct member *m)
{
    return 1ull << m->gpu;
}

static uint64_t gpus_of(const struct gang *g)
{
    uint64_t gpus = 0;

    for (uint32_t i = 0; i < g->n; i++)
        gpus |= bit(&g->members[i]);
    return gpus;
}

/* Makes a gang of a container's tenants, one a GPU. Returns its number, or ARBITER_NOBODY: then its
 * GPUs are granted one by one. */
int32_t gangs_add(struct gangs *gangs, const uint32_t *gpus, const int32_t *tenants, uint32_t n)
{
    if (n > GANGS_N_OWN)
        return ARBITER_NOBODY;
    for (uint32_t i = 0; i < n; i++)
        if (gpus[i] >= GANGS_N_GPUS)
            return ARBITER_NOBODY;
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
        }
        gangs->concerned |= gpus_of(g);
        if ((uint32_t)i >= gangs->n)
            gangs->n = (uint32_t)i + 1;
        return i;
    }
    return ARBITER_NOBODY;
}

void gangs_remove(struct gangs *gangs, int32_t gang)
{
    struct gang *g = &gangs->gangs[gang];

    gangs->stale |= gpus_of(g);
    gangs->poked |= gpus_of(g);
    g->used = false;
    g->turn = false;
    gangs->concerned = 0;
    for (uint32_t i = 0; i < gangs->n; i++)
        if (gangs->gangs[i].used)
            gangs->concerned |= gpus_of(&gangs->gangs[i]);
}

/* Whether a GPU has to be stepped with the gangs. */
bool gangs_concern(const struct gangs *gangs, uint32_t gpu)
{
    return (gangs->concerned | gangs->stale) & 1ull << gpu;
}

/* ---- what is known ---- */

static bool is_played(const struct gangs *gangs, const struct member *m)
{
    return m->standing.want || m->standing.holds || (m->seen && gangs->now < m->seen_ns + PLAY_NS);
}

/* The GPUs that it uses; it is a gang if they are several. */
static uint64_t played(const struct gangs *gangs, const struct gang *g)
{
    uint64_t gpus = 0;

    for (uint32_t i = 0; i < g->n; i++)
        if (is_played(gangs, &g->members[i]))
            gpus |= bit(&g->members[i]);
    return gpus;
}

static bool is_gang(const struct gangs *gangs, const struct gang *g)
{
    uint64_t gpus = played(gangs, g);

    return g->used && (g->turn || (gpus & (gpus - 1)));
}

static bool wants(const struct gang *g)
{
    for (uint32_t i = 0; i < g->n; i++)
        if (g->members[i].standing.want)
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

/* Calls for a step at `at`, if that is still to come. */
static void wake_at(struct gangs *gangs, uint64_t at)
{
    if (at > gangs->now && at < gangs->wake)
        gangs->wake = at;
}

/* From when on each of its GPUs lets it begin; ARBITER_NEVER: somebody goes before it. */
static uint64_t begins_at(const struct gangs *gangs, const struct gang *g)
{
    uint64_t at = 0;

    for (uint32_t i = 0; i < g->n; i++) {
        const struct member *m = &g->members[i];

        if (!is_played(gangs, m))
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

/* When its quota allows it to begin. */
static uint64_t ready_at(const struct gangs *gangs, const struct gang *g)
{
    uint64_t at = 0;

    for (uint32_t i = 0; i < g->n; i++)
        if (is_played(gangs, &g->members[i]) && g->members[i].standing.ready_ns > at)
            at = g->members[i].standing.ready_ns;
    return at;
}

/* Whether another gang waits for the end of `g`'s turn, and may begin by `end`. */
static bool has_rival(const struct gangs *gangs, const struct gang *g, uint64_t end)
{
    for (uint32_t i = 0; i < gangs->n; i++) {
        const struct gang *other = &gangs->gangs[i];

        if (other != g && is_gang(gangs, other) && wants(other) &&
            played(gangs, other) & played(gangs, g) && ready_at(gangs, other) <= end)
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
    /* What begins and ends on several GPUs costs more: it is as long as a grant may be. */
    g->end = gangs->now + gangs->config.most_ns + gangs->config.switch_ns;
    g->quiet_ns = gangs->now;
    gangs->poked |= gpus_of(g);
}

static void end_turn(struct gangs *gangs, struct gang *g)
{
    g->turn = false;
    gangs->poked |= gpus_of(g);
}

/* A gang that still waits for a GPU of its own so long after its turn is not waited for. */
static bool is_given_up(const struct gangs *gangs, const struct gang *g)
{
    return g->end != ARBITER_NEVER && gangs->now >= g->end + gangs->config.overdue_ns;
}

/* Whether a GPU of the gang's turn is not granted any more, but for half of something. */
static bool is_over(const struct gangs *gangs, const struct gang *g, const struct member *m)
{
    return m->done || (g->end != ARBITER_NEVER && gangs->now >= g->end);
}

/* Whether it has been given back while the rest of the gang still holds its GPUs, and more is to
 * be done: the other half of what runs there may be waiting for this one. */
static bool is_split(const struct gangs *gangs, const struct gang *g, const struct member *m)
{
    return g->turn && holds(g) && !is_given_up(gangs, g) && m->split_ns <= gangs->now &&
           m->standing.want && !m->standing.holds && is_over(gangs, g, m);
}

static uint64_t split_since(const struct gang *g, const struct member *m)
{
    return m->done ? m->changed_ns : g->end;
}

/* If the rest does not come to an end either it gets a short grant, for 20 ms at most. */
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
        gangs->poked |= bit(m);
    }
}

/* Somebody waits: the turn ends. Nobody does: it goes on everywhere, without a drain. */
static void extend_turn(struct gangs *gangs, struct gang *g)
{
    bool others = false, whole = true, may_continue = true, done = false, contended = false;
    uint64_t end = g->end == ARBITER_NEVER || g->end < gangs->now ? gangs->now : g->end;

    for (uint32_t i = 0; i < g->n; i++) {
        const struct member *m = &g->members[i];

        if (!is_played(gangs, m))
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
        gangs->poked |= gpus_of(g);
    }
    if (g->end == ARBITER_NEVER) {
        if (others || !whole) {
            g->end = gangs->now + (contended ? 0 : gangs->config.quantum_ns);
            gangs->poked |= gpus_of(g);
        }
        return;
    }
    if (gangs->now + gangs->config.lead_ns < g->end) {
        wake_at(gangs, g->end - gangs->config.lead_ns);
    } else if (!contended && may_continue && !done && holds(g) && gangs->now < g->end) {
        g->end = !others && whole ? ARBITER_NEVER : g->end + gangs->config.quantum_ns;
        gangs->poked |= gpus_of(g);
        wake_at(gangs, g->end - gangs->config.lead_ns);
    }
}

/* Whether it waits for a GPU that it has not given back in this turn. */
static bool waits(const struct gang *g)
{
    for (uint32_t i = 0; i < g->n; i++)
        if (g->members[i].standing.want && !g->members[i].done)
            return true;
    return false;
}

/* Whether it has given everything back: it could have no more in this turn, and keep others from
 * theirs. */
static bool is_spent(const struct gangs *gangs, const struct gang *g)
{
    for (uint32_t i = 0; i < g->n; i++)
        if (is_played(gangs, &g->members[i]) && !g->members[i].done)
            return false;
    return true;
}

static void keep_turn(struct gangs *gangs, struct gang *g)
{
    bool ending = g->end != ARBITER_NEVER && gangs->now + gangs->config.lead_ns >= g->end;

    if (waits(g) || holds(g))
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

/* Whether a gang's turn may begin now; `anywhere`: because one of its GPUs is free, or its own. */
static bool may_begin(struct gangs *gangs, const struct gang *g)
{
    uint64_t mine = played(gangs, g), at = begins_at(gangs, g);
    bool anywhere = false;

    for (uint32_t i = 0; i < g->n; i++) {
        const struct arbiter_standing *s = &g->members[i].standing;

        anywhere = anywhere || s->holds || (s->want && (s->free || s->deadline_ns <= gangs->now));
    }
    for (uint32_t i = 0; i < gangs->n; i++) {
        const struct gang *other = &gangs->gangs[i];

        if (other != g && other->used && other->turn && played(gangs, other) & mine)
            return false;
    }
    if (at > gangs->now) {
        if (at != ARBITER_NEVER)
            wake_at(gangs, at);
        return false;
    }
    return anywhere;
}

/* Those who would have to be lent time go behind those who are owed it; among them goes first who
 * has the least of what it should have, on the GPU where it has the most. */
static bool goes_before(const struct gangs *gangs, const struct gang *a, const struct gang *b)
{
    double due[2] = {0, 0}, tag[2] = {0, 0};
    bool lent[2] = {false, false};
    const struct gang *both[2] = {a, b};

    for (int side = 0; side < 2; side++)
        for (uint32_t i = 0; i < both[side]->n; i++) {
            const struct member *m = &both[side]->members[i];

            if (!is_played(gangs, m))
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

/* Decides whose turn begins and ends. */
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

            if (is_gang(gangs, g) && !g->turn && wants(g) && may_begin(gangs, g) &&
                (!next || goes_before(gangs, g, next)))
                next = g;
        }
        if (next)
            begin_turn(gangs, next);
    } while (next);
}

/* ---- one GPU ---- */

static void look(struct gangs *gangs, struct gang *g, struct member *m,
                 const struct arbiter *arbiter)
{
    bool held = m->standing.holds;
    double busy = m->standing.busy;

    arbiter_look(arbiter, m->tenant, gangs->now, &m->standing);
    /* Who holds it may have been granted it unasked. */
    if (m->standing.want || m->standing.busy > busy) {
        m->seen = true;
        m->seen_ns = gangs->now;
    }
    if (!g->turn)
        return;
    m->granted = m->granted || m->standing.holds;
    if (held && !m->standing.holds) {
        m->changed_ns = gangs->now;
        gangs->poked |= gpus_of(g); /* others are kept until all is over */
        m->done = m->standing.want ||
                  (g->end != ARBITER_NEVER && gangs->now + gangs->config.lead_ns >= g->end);
        m->split_ns = 0;
    }
}

/* Tells the arbiter what the gang may do on its GPU. */
static void order(struct gangs *gangs, const struct gang *g, const struct member *m,
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

/* A gang that waits for one of its GPUs holds another past the end of its grant, and its turn is
 * long over or another gang's: perhaps what it waits for waits for what it holds. */
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

/* When the next turn on this GPU is expected to begin. */
static uint64_t expected(const struct gangs *gangs, uint32_t gpu)
{
    uint64_t first = ARBITER_NEVER;

    for (uint32_t i = 0; i < gangs->n; i++) {
        const struct gang *g = &gangs->gangs[i];
        uint64_t at;

        if (!is_gang(gangs, g) || g->turn || !wants(g) || !(played(gangs, g) & 1ull << gpu))
            continue;
        at = ready_at(gangs, g);
        for (uint32_t m = 0; m < g->n; m++) {
            const struct arbiter_standing *s = &g->members[m].standing;

            if (g->members[m].gpu != gpu && is_played(gangs, &g->members[m]) && !s->free &&
                s->deadline_ns > at)
                at = s->deadline_ns;
        }
        if (at > gangs->now && at < first)
            first = at;
    }
    return first;
}

/* Until when a GPU is granted to nobody else, because a gang may need it for a half of something:
 * who is let in there runs for as long as a grant, and the other half spins meanwhile. */
static uint64_t kept(const struct gangs *gangs, uint32_t gpu)
{
    for (uint32_t i = 0; i < gangs->n; i++) {
        const struct gang *g = &gangs->gangs[i];

        for (uint32_t m = 0; g->used && m < g->n; m++)
            if (g->members[m].gpu == gpu && is_split(gangs, g, &g->members[m]))
                return split_since(g, &g->members[m]) + SPLIT_NS;
    }
    return 0;
}

/* Steps one GPU's arbiter. Returns the other GPUs that have to be stepped because of it, as bits.
 */
uint64_t gangs_step(struct gangs *gangs, uint32_t gpu, struct arbiter *arbiter, uint64_t now,
                    struct arbiter_view *viewp)
{
    uint64_t here = 1ull << gpu, poked;

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
            for (uint32_t m = 0; gangs->gangs[i].used && m < gangs->gangs[i].n; m++)
                if (gangs->gangs[i].members[m].gpu == gpu)
                    look(gangs, &gangs->gangs[i], &gangs->gangs[i].members[m], arbiter);
        decide(gangs);
        /* What the step changes is seen in the next pass; it may end or begin a turn. */
        if (pass == 3 || (pass && !(gangs->poked & here)))
            break;
        gangs->poked &= ~here;
        for (uint32_t i = 0; i < gangs->n; i++)
            for (uint32_t m = 0; gangs->gangs[i].used && m < gangs->gangs[i].n; m++) {
                const struct gang *g = &gangs->gangs[i];

                if (g->members[m].gpu != gpu)
                    continue;
                if (is_crossed(gangs, g, &g->members[m])) {
                    arbiter_take(arbiter, now);
                    look(gangs, &gangs->gangs[i], &gangs->gangs[i].members[m], arbiter);
                }
                order(gangs, g, &g->members[m], arbiter);
            }
        arbiter_align(arbiter, expected(gangs, gpu));
        arbiter_keep(arbiter, kept(gangs, gpu));
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
