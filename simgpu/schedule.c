/*
 * The timeline of a simulated GPU
 *
 * This code is pure: it uses no clock, no lock and no system call. The holder of the device's lock
 * passes the time to advance to. The same arrivals give the same history, regardless of which
 * process advances it and in how many steps.
 *
 * These rules were measured on an H200 without MPS. Contexts with pending work run round-robin, for
 * one slice each (2 ms). Each context switch on the GPU takes 130 us, during which nothing
 * executes. A context that runs out of work gives way at once. A context that is alone keeps the
 * GPU and pays nothing; so does one that returns before another context has used the GPU. A slice
 * begins when its context takes the GPU. If it ends while no other context is waiting, the next
 * slice begins when another context starts to wait: on the H200 a newcomer does not interrupt the
 * last 0.1 ms of 4 ms of work. A kernel is interrupted at the end of a slice and resumes later
 * where it stopped. Each context has one queue: one kernel at a time, in order of submission,
 * regardless of streams. A context may have its own slice length. A context that is switched off is
 * interrupted at once and does not run until it is switched on (measured on an H100 and an H200).
 */
#include "schedule.h"

#include <stdbool.h>
#include <string.h>

/* Maximum number of steps in one prediction; a step is a slice, a switch or a kernel. */
#define PREDICTION_STEPS 256

/** schedule_current() - the current timeline */
struct gpu_timeline *schedule_current(struct gpu *gpu)
{
    return &gpu->shared.timelines[atomic_load(&gpu->shared.current) & 1];
}

static bool lane_pending(const struct gpu *gpu, const struct gpu_timeline *line, uint32_t index)
{
    const struct gpu_context *context = &gpu->contexts[index];

    return atomic_load_explicit(&context->serial, memory_order_relaxed) != 0 &&
           !atomic_load_explicit(&context->off, memory_order_relaxed) &&
           line->lanes[index].head < atomic_load_explicit(&context->tail, memory_order_relaxed) &&
           !(context->queue[line->lanes[index].head % GPU_QUEUE].duration & GPU_HELD);
}

/* The next context with work, round-robin, starting after the resident one; -1 if there is none. */
static int next_pending(const struct gpu *gpu, const struct gpu_timeline *line)
{
    uint32_t n = gpu->shared.n_contexts;
    uint32_t first = line->resident ? line->resident_index + 1 : 0;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t index = (first + i) % n;

        if (lane_pending(gpu, line, index))
            return (int)index;
    }
    return -1;
}

static uint64_t slice_of(const struct gpu *gpu, uint32_t index)
{
    uint64_t own = atomic_load_explicit(&gpu->contexts[index].slice, memory_order_relaxed);

    return own ? own : gpu->config.slice;
}

/* Let time pass. The resident context has the GPU, with or without work, unless switched off. */
static void pass(const struct gpu *gpu, struct gpu_timeline *line, uint64_t until)
{
    uint32_t index = line->resident_index;
    uint64_t from = line->now > line->switch_end ? line->now : line->switch_end;

    if (line->resident && gpu->contexts[index].serial == line->resident && until > from &&
        !atomic_load_explicit(&gpu->contexts[index].off, memory_order_relaxed))
        line->lanes[index].resident += until - from;
    line->now = until;
}

static void count_full(const struct gpu_timeline *line, struct gpu_lane *lane, uint64_t length)
{
    lane->full += length;
    lane->ended = line->now;
}

/* Another context takes the GPU from the resident one. */
static void end_turn(const struct gpu *gpu, struct gpu_timeline *line)
{
    uint32_t index = line->resident_index;
    struct gpu_lane *lane = &line->lanes[index];
    uint64_t length = lane->resident - lane->before;

    if (gpu->contexts[index].serial != line->resident)
        return;
    if (atomic_load_explicit(&gpu->contexts[index].off, memory_order_relaxed)) {
        if (lane->fills) /* the context was interrupted and did not give up the GPU */
            count_full(line, lane, length);
    } else if (line->now < line->slice_end) {
        lane->early++;
        lane->fills = 0;
    } else if (length <= slice_of(gpu, index) * 13 / 10) {
        count_full(line, lane, length);
        lane->fills = 1;
    }
}

static void take_gpu(const struct gpu *gpu, struct gpu_timeline *line, uint32_t index)
{
    uint64_t cost = line->resident ? gpu->config.switch_cost : 0;

    if (line->resident && index != line->resident_index)
        end_turn(gpu, line);
    line->switches += line->resident != 0;
    line->resident = gpu->contexts[index].serial;
    line->resident_index = index;
    line->switch_end = line->now + cost;
    line->slice_end = line->switch_end + slice_of(gpu, index);
    line->overtime = 0;
    line->lanes[index].slices++;
    line->lanes[index].before = line->lanes[index].resident;
}

/*
 * Advance the history by one step, but not beyond `target`. Returns false when nothing is left to
 * decide before it. `completed` is set when the command at the head of the resident context ends.
 */
static bool step(const struct gpu *gpu, struct gpu_timeline *line, uint64_t target, bool *completed)
{
    uint32_t index = line->resident_index;
    bool resident = line->resident && gpu->contexts[index].serial == line->resident;
    bool pending = resident && lane_pending(gpu, line, index);
    struct gpu_lane *lane = &line->lanes[index];
    uint64_t length;

    *completed = false;
    if (line->now >= target)
        return false;

    if (!pending || line->now >= line->slice_end) {
        int next = next_pending(gpu, line);

        if (next < 0) {
            pass(gpu, line, target);
            return false;
        }
        if (!pending || (uint32_t)next != index) {
            take_gpu(gpu, line, (uint32_t)next);
            return true;
        }
        line->slice_end = line->now + slice_of(gpu, index);
        line->overtime = 1;
    }

    if (line->now < line->switch_end) {
        line->now = line->switch_end < target ? line->switch_end : target;
        return true;
    }

    length = gpu->contexts[index].queue[lane->head % GPU_QUEUE].duration - lane->progress;
    if (length > line->slice_end - line->now)
        length = line->slice_end - line->now;
    if (length > target - line->now)
        length = target - line->now;
    pass(gpu, line, line->now + length);
    line->busy += length;
    lane->busy += length;
    lane->progress += length;
    if (lane->progress == gpu->contexts[index].queue[lane->head % GPU_QUEUE].duration) {
        lane->head++;
        lane->progress = 0;
        *completed = true;
    }
    return true;
}

static void timeline_copy(const struct gpu *gpu, struct gpu_timeline *to,
                          const struct gpu_timeline *from)
{
    memcpy(to, from,
           offsetof(struct gpu_timeline, lanes) + gpu->shared.n_contexts * sizeof(from->lanes[0]));
}

/**
 * schedule_advance() - decide everything that happens before `now`
 *
 * The completion times of commands are in the queue before the new heads become visible. If the
 * caller is killed before it is done, the old timeline stays current, and the next caller makes
 * the same decisions again. Time does not go back: an earlier `now` changes nothing.
 */
void schedule_advance(struct gpu *gpu, uint64_t now)
{
    uint32_t current = atomic_load(&gpu->shared.current) & 1;
    struct gpu_timeline *line = &gpu->shared.timelines[!current];
    bool completed;

    if (gpu->shared.timelines[current].now >= now)
        return;
    timeline_copy(gpu, line, &gpu->shared.timelines[current]);
    while (step(gpu, line, now, &completed)) {
        struct gpu_lane *lane = &line->lanes[line->resident_index];

        if (completed)
            gpu->contexts[line->resident_index].queue[(lane->head - 1) % GPU_QUEUE].completed =
                line->now;
    }
    /*
     * Commands are submitted after the timeline has been advanced to the time of their arrival.
     * Therefore, if a command of another context arrives now, the overdue slice of the resident
     * context begins here.
     */
    if (line->resident && next_pending(gpu, line) == (int)line->resident_index) {
        line->overtime |= now >= line->slice_end;
        if (line->overtime)
            line->slice_end = now + slice_of(gpu, line->resident_index);
    }
    atomic_store(&gpu->shared.current, !current);
}

/**
 * schedule_predict() - predict when a context will have completed `need` commands
 *
 * Returns the time on the GPU's clock, in ns, on the assumption that no process submits more work,
 * or an earlier time if that time is far away. New contexts make the time later, never earlier; a
 * context that ends makes it earlier.
 */
uint64_t schedule_predict(const struct gpu *gpu, uint32_t index, uint64_t need,
                          struct gpu_timeline *scratch)
{
    bool completed;

    timeline_copy(gpu, scratch, &gpu->shared.timelines[atomic_load(&gpu->shared.current) & 1]);
    for (int i = 0; i < PREDICTION_STEPS && scratch->lanes[index].head < need; i++) {
        if (!step(gpu, scratch, UINT64_MAX, &completed))
            break;
    }
    return scratch->now;
}

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

/**
 * schedule_duration() - time that a kernel takes, including the device's jitter, in ns
 *
 * The result depends only on the device's seed, the context and the kernel's number in it. It is at
 * least 1 ns, so that each kernel ends later than the previous one.
 */
uint64_t schedule_duration(const struct gpu_config *config, uint64_t serial, uint64_t sequence,
                           uint64_t duration)
{
    uint64_t span;

    /* If the end were so far away that the clock overflowed, the kernel would end at once. */
    if (duration > 1ull << 60)
        duration = 1ull << 60;
    span = duration / 1000 * config->jitter;
    if (span && config->jitter <= 1000)
        duration =
            duration - span + mix(mix(config->seed ^ mix(serial)) + sequence) % (2 * span + 1);
    return duration ? duration : 1;
}
