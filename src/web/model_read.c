// SPDX-License-Identifier: Apache-2.0
//
// model_read.c - reads the page that a rank shows (observe/watch.c), and what its agent adds.
//
// A row for each key. Lines that cannot be read are left out: a rank of another version may say
// more. From two pages follow rates. By the launcher's thread, under the model's lock.
#include "web/web.h"

#include <stdio.h>
#include <stdlib.h>

#define STACK_LIMIT_BYTES (8 * KIB)
#define LATE_LEAST_S 0.005 // on average; less is nobody's fault

typedef struct page_reading {
    model_rank_t *rank;
    model_seen_t *seen;
    int64_t now_us;                            // of the rank's clock; 0: not said
    int64_t last_us;                           // what finished before is known
    model_operation_t fresh[WATCH_OPERATIONS]; // the newest first
    int n_fresh;
} page_reading_t;

static void take_state(page_reading_t *in, const char *value)
{
    snprintf(in->seen->state, sizeof in->seen->state, "%s", value);
}

static void take_in_flight(page_reading_t *in, const char *value)
{
    in->seen->n_in_flight = MAX((int)strtol(value, NULL, 10), 0);
}

static void take_flight(page_reading_t *in, const char *value)
{
    model_seen_t *seen = in->seen;
    model_flight_t f;
    char state[16], op[16];
    double age_s;
    if (seen->n_flights < MODEL_FLIGHTS && sscanf(value, "%15[^\t]\t%lf\t%15[^\t]\t%d\t%127[^\n]",
                                                  state, &age_s, op, &f.set, f.name) == 5) {
        if (seen->n_flights == 0) {
            snprintf(seen->doing, sizeof seen->doing, "%s %s", op, f.name);
            seen->since_s = age_s;
        }
        seen->flights[seen->n_flights++] = f;
    }
}

static void take_finished(page_reading_t *in, const char *value)
{
    char op[16], name[MODEL_NAME_BYTES];
    if (sscanf(value, "%lf\t%15[^\t]\t%127[^\n]", &in->seen->last_s, op, name) == 3) {
        snprintf(in->seen->last, sizeof in->seen->last, "%s %s", op, name);
    }
}

static void take_ended(page_reading_t *in, const char *value)
{
    snprintf(in->seen->ended, sizeof in->seen->ended, "%s", value);
}

static void take_now(page_reading_t *in, const char *value)
{
    in->now_us = strtoll(value, NULL, 10);
    in->seen->answers = true;
}

static void take_share(page_reading_t *in, const char *value)
{
    double compute, waiting, moving;
    if (sscanf(value, "%lf\t%lf\t%lf", &compute, &waiting, &moving) == 3) {
        in->seen->compute = compute;
        in->seen->waiting = waiting;
        in->seen->moving = moving;
    }
}

static void take_step(page_reading_t *in, const char *value)
{
    long long step;
    if (sscanf(value, "%lld\t%lf", &step, &in->seen->progress.step_s) == 2) {
        in->seen->progress.step = step;
        in->seen->progress.has_step = true;
    }
}

static void take_loss(page_reading_t *in, const char *value)
{
    in->seen->progress.loss = strtod(value, NULL);
    in->seen->progress.has_loss = true;
}

static void take_samples(page_reading_t *in, const char *value)
{
    in->seen->progress.samples = strtod(value, NULL);
    in->seen->progress.has_samples = true;
}

static void take_late(page_reading_t *in, const char *value)
{
    model_late_t late = {0};
    unsigned long long n_last;
    if (in->seen->n_late < MODEL_LATE &&
        sscanf(value, "%d\t%d\t%llu\t%lf", &late.rank, &late.n_ranks, &n_last, &late.late_s) == 4) {
        late.n_last = n_last;
        in->seen->late[in->seen->n_late++] = late;
    }
}

static void take_counters(page_reading_t *in, const char *value)
{
    metrics_unpack(value, &in->seen->counters);
}

static void take_operation(page_reading_t *in, const char *value)
{
    long long ago[4];
    unsigned long long bytes;
    model_operation_t *op = &in->fresh[MIN(in->n_fresh, WATCH_OPERATIONS - 1)];
    if (in->n_fresh == WATCH_OPERATIONS || in->now_us == 0 ||
        sscanf(value, "%lld\t%lld\t%lld\t%lld\t%llu\t%15[^\t]\t%55[^\n]", &ago[0], &ago[1], &ago[2],
               &ago[3], &bytes, op->op, op->name) != 7) {
        return;
    }
    int64_t *at[] = {&op->submitted, &op->agreed, &op->started, &op->finished};
    for (int i = 0; i < 4; i++) {
        *at[i] = ago[i] >= 0 ? in->now_us - ago[i] : -1;
    }
    op->bytes = bytes;
    in->n_fresh += op->finished > in->last_us;
}

static void take_stack(page_reading_t *in, const char *value)
{
    if (in->rank->stack.len < STACK_LIMIT_BYTES) {
        buf_printf(&in->rank->stack, "%s\n", value);
    }
}

static void take_process(page_reading_t *in, const char *value)
{
    in->seen->process = value[0];
}

static void take_cpu(page_reading_t *in, const char *value)
{
    in->seen->cpu_s = strtod(value, NULL);
}

static void take_memory(page_reading_t *in, const char *value)
{
    in->seen->memory_bytes = strtoull(value, NULL, 10);
}

static const struct {
    const char *key;
    void (*take)(page_reading_t *in, const char *value);
} keys[] = {
    {"state", take_state},       {"in_flight", take_in_flight}, {"flight", take_flight},
    {"finished", take_finished}, {"ended", take_ended},         {"now", take_now},
    {"share", take_share},       {"step", take_step},           {"loss", take_loss},
    {"samples", take_samples},   {"late", take_late},           {"counters", take_counters},
    {"op", take_operation},      {"stack", take_stack},         {"process", take_process},
    {"cpu", take_cpu},           {"memory", take_memory},
};

static void read_line(page_reading_t *in, char *line)
{
    char *value = strchr(line, '\t');
    if (value == NULL) {
        return;
    }
    *value++ = '\0';
    for (size_t i = 0; i < N_ELEMENTS(keys); i++) {
        if (strcmp(keys[i].key, line) == 0) {
            keys[i].take(in, value);
            return;
        }
    }
}

// --- What follows from two pages -----------------------------------------------------------------

static uint64_t sum_of(const uint64_t counts[HVD_N_OPS])
{
    uint64_t sum = 0;
    for (int op = 0; op < HVD_N_OPS; op++) {
        sum += counts[op];
    }
    return sum;
}

static double rate(uint64_t before, uint64_t now, double seconds)
{
    return now > before ? (double)(now - before) / seconds : 0;
}

// Who is last now and then, or only by a little, keeps nobody waiting: as the warning of a
// straggler has it. Averaged, since steps may be longer than the time between two pages.
static void find_lateness(const model_late_t *before, uint64_t n_steps, double seconds,
                          model_late_t *late)
{
    double n_last = (double)(late->n_last - MIN(before->n_last, late->n_last));
    double late_s = MAX(late->late_s - before->late_s, 0.0);
    bool is_usual = n_last * 2 > (double)n_steps && late_s >= n_last * LATE_LEAST_S;
    double share = is_usual ? MIN(late_s / seconds, 1.0) : 0;
    // In a job that stands still nobody is late any more: it is forgotten, but not between steps.
    late->share = n_steps > 0 ? 0.6 * before->share + 0.4 * share : 0.9 * before->share;
}

static void find_rates(model_rank_t *r, const model_seen_t *before, double seconds)
{
    const hvd_counters_t *was = &before->counters;
    model_seen_t *is = &r->seen;
    if (!before->answers || !is->answers || seconds <= 0) {
        r->operations_s = r->bytes_s = r->samples_s = 0;
        return;
    }
    uint64_t n_steps = is->counters.steps - MIN(was->steps, is->counters.steps);
    r->operations_s = rate(sum_of(was->operations), sum_of(is->counters.operations), seconds);
    r->bytes_s = rate(sum_of(was->bytes), sum_of(is->counters.bytes), seconds);
    r->samples_s = MAX(is->progress.samples - before->progress.samples, 0.0) / seconds;
    r->step_s = is->progress.has_step ? is->progress.step_s
                : n_steps > 0         ? seconds / (double)n_steps
                                      : r->step_s;
    r->cpu = MAX(is->cpu_s - before->cpu_s, 0.0) / seconds;
    for (int i = 0; i < is->n_late; i++) {
        for (int k = 0; k < before->n_late; k++) {
            if (is->late[i].rank == before->late[k].rank) {
                find_lateness(&before->late[k], n_steps, seconds, &is->late[i]);
            }
        }
    }
}

static void keep_history(model_rank_t *r)
{
    const double shares[3] = {r->seen.compute, r->seen.waiting, r->seen.moving};
    if (r->n_history == MODEL_HISTORY) {
        memmove(r->history, r->history + 1, sizeof r->history - sizeof r->history[0]);
        r->n_history--;
    }
    for (int i = 0; i < 3; i++) {
        r->history[r->n_history][i] = (uint8_t)(MIN(MAX(shares[i], 0.0), 1.0) * 100);
    }
    r->n_history++;
}

static void keep_operations(model_rank_t *r, const page_reading_t *in)
{
    if (in->n_fresh > 0 && r->operations == NULL) {
        r->operations = calloc(MODEL_OPERATIONS, sizeof *r->operations);
    }
    for (int i = in->n_fresh - 1; i >= 0 && r->operations != NULL; i--) {
        r->operations[r->n_operations++ % MODEL_OPERATIONS] = in->fresh[i];
    }
}

static void read_page(model_rank_t *r, char *page)
{
    const model_seen_t before = r->seen;
    uint64_t now_ns = clock_ns();
    page_reading_t in = {.rank = r, .seen = &r->seen};
    if (r->n_operations > 0) {
        in.last_us = r->operations[(r->n_operations - 1) % MODEL_OPERATIONS].finished;
    }
    r->seen = (model_seen_t){.was_told = true,
                             .counters = before.counters,
                             .progress = before.progress,
                             .memory_bytes = before.memory_bytes};
    buf_clear(&r->stack);
    char *save = NULL;
    for (char *line = strtok_r(page, "\n", &save); line != NULL;
         line = strtok_r(NULL, "\n", &save)) {
        read_line(&in, line);
    }
    find_rates(r, &before, (double)(now_ns - r->seen_ns) / (double)NS_PER_S);
    r->seen_ns = now_ns;
    keep_history(r);
    keep_operations(r, &in);
}

void model_snapshot(model_t *m, int id, const char *page)
{
    char *text = strdup(page);
    lock_take(&m->lock);
    model_rank_t *r = model_find(m, id);
    if (r != NULL && !r->has_ended && text != NULL) {
        read_page(r, text);
        if (strcmp(m->state, "starting") == 0 && r->seen.answers) {
            snprintf(m->state, sizeof m->state, "running");
        }
    }
    lock_release(&m->lock);
    free(text);
}
