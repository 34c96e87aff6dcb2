// SPDX-License-Identifier: Apache-2.0
//
// model.c - what is known of a job while it runs: hosts, ranks, events, the last failure.
//
// Memory is bounded: a rank has a ring of operations, the end of what it printed and a minute of
// history; events push out older ones. Ranks of earlier generations stay, marked, until the job is
// over. All functions take the lock themselves unless web.h says that they REQUIRE it.
#include "web/web.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define LATE_LEAST 0.1 // of the time: less is nobody's fault

int64_t model_now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

model_t *model_new(char *const *command, int n_command)
{
    model_t *m = calloc(1, sizeof *m);
    size_t len = 0;
    if (m == NULL) {
        return NULL;
    }
    lock_init(&m->lock);
    snprintf(m->state, sizeof m->state, "starting");
    gethostname(m->host, sizeof m->host - 1);
    m->begun_ms = model_now_ms();
    for (int i = 0; i < n_command && len + 1 < sizeof m->command; i++) {
        len += (size_t)snprintf(m->command + len, sizeof m->command - len, "%s%s", i > 0 ? " " : "",
                                command[i]);
    }
    return m;
}

void model_free(model_t *m)
{
    if (m == NULL) {
        return;
    }
    for (int i = 0; i < m->n; i++) {
        buf_free(&m->ranks[i]->stack);
        buf_free(&m->ranks[i]->log);
        free(m->ranks[i]->operations);
        free(m->ranks[i]);
    }
    free(m->ranks);
    buf_free(&m->failure);
    lock_free(&m->lock);
    free(m);
}

// --- Ranks ---------------------------------------------------------------------------------------

// Ids are given in order, so a rank stands where its id says.
model_rank_t *model_find(const model_t *m, int id)
{
    MODEL_LOCKED(m);
    return id >= 0 && id < m->n ? m->ranks[id] : NULL;
}

static model_rank_t *find_or_add(model_t *m, int id) REQUIRES(m->lock)
{
    while (id >= m->n && id < (1 << 20)) {
        model_rank_t **larger = realloc(m->ranks, ((size_t)m->n + 1) * sizeof *larger);
        model_rank_t *rank = larger != NULL ? calloc(1, sizeof *rank) : NULL;
        m->ranks = larger != NULL ? larger : m->ranks;
        if (rank == NULL) {
            return NULL;
        }
        rank->id = m->n;
        rank->rank = -1;
        snprintf(rank->seen.state, sizeof rank->seen.state, "starting");
        m->ranks[m->n++] = rank;
    }
    return model_find(m, id);
}

void model_place(model_t *m, int id, int rank, const char *host, int pid)
{
    lock_take(&m->lock);
    model_rank_t *r = find_or_add(m, id);
    if (r != NULL) {
        r->rank = rank;
        r->pid = pid;
        r->is_there = true;
        snprintf(r->host, sizeof r->host, "%s", host);
    }
    lock_release(&m->lock);
}

void model_gone(model_t *m, int id)
{
    lock_take(&m->lock);
    model_rank_t *r = model_find(m, id);
    if (r != NULL) {
        r->is_there = false;
    }
    lock_release(&m->lock);
}

void model_end(model_t *m, int id, int code, int signo)
{
    lock_take(&m->lock);
    model_rank_t *r = model_find(m, id);
    if (r != NULL && !r->has_ended) {
        r->has_ended = true;
        r->code = code;
        r->signo = signo;
        r->operations_s = r->bytes_s = r->samples_s = r->cpu = 0;
        snprintf(r->seen.state, sizeof r->seen.state, code == 0 ? "done" : "failed");
    }
    lock_release(&m->lock);
}

void model_output(model_t *m, int id, const void *data, size_t bytes)
{
    const uint8_t *at = data;
    lock_take(&m->lock);
    model_rank_t *r = model_find(m, id);
    if (r != NULL) {
        size_t kept = MIN(bytes, MODEL_LOG_BYTES);
        if (r->log.len + kept > 2 * MODEL_LOG_BYTES) { // moved now and then only
            size_t cut = r->log.len - MIN(r->log.len, MODEL_LOG_BYTES - kept);
            memmove(r->log.data, r->log.data + cut, r->log.len - cut);
            r->log.len -= cut;
        }
        buf_append(&r->log, at + (bytes - kept), kept);
    }
    lock_release(&m->lock);
}

// --- The job -------------------------------------------------------------------------------------

void model_hosts(model_t *m, int n_ready, int n_hosts, const char *missing)
{
    lock_take(&m->lock);
    m->n_ready = n_ready;
    m->n_hosts = n_hosts;
    snprintf(m->missing, sizeof m->missing, "%s", missing);
    lock_release(&m->lock);
}

void model_generation(model_t *m, unsigned generation, int n_ranks)
{
    lock_take(&m->lock);
    bool is_new = generation != m->generation || n_ranks != m->n_ranks;
    bool was_any = m->n_ranks > 0;
    m->generation = generation;
    m->n_ranks = n_ranks;
    lock_release(&m->lock);
    if (is_new && generation > 0) {
        model_event(m, 'i', "generation %u begins with %d rank%s", generation, n_ranks,
                    plural(n_ranks));
    } else if (is_new && !was_any) {
        model_event(m, 'i', "the job begins with %d rank%s", n_ranks, plural(n_ranks));
    }
}

void model_event(model_t *m, char kind, const char *format, ...)
{
    va_list args;
    lock_take(&m->lock);
    if (m->n_events == MODEL_EVENTS) {
        memmove(m->events, m->events + 1, (MODEL_EVENTS - 1) * sizeof *m->events);
        m->n_events--;
    }
    model_event_t *event = &m->events[m->n_events++];
    event->time_ms = model_now_ms();
    event->kind = kind;
    va_start(args, format);
    vsnprintf(event->text, sizeof event->text, format, args);
    va_end(args);
    lock_release(&m->lock);
}

void model_failure(model_t *m, const void *text, size_t bytes)
{
    lock_take(&m->lock);
    buf_clear(&m->failure);
    buf_append(&m->failure, text, MIN(bytes, 8 * KIB));
    lock_release(&m->lock);
}

void model_over(model_t *m, int code)
{
    lock_take(&m->lock);
    snprintf(m->state, sizeof m->state, "over");
    m->code = code;
    lock_release(&m->lock);
    model_event(m, code == 0 ? 'i' : 'f', "the job has ended with exit code %d", code);
}

// --- Numbers -------------------------------------------------------------------------------------

model_sums_t model_sums(const model_t *m)
{
    MODEL_LOCKED(m);
    model_sums_t sums = {0};
    for (int i = 0; i < m->n; i++) {
        const model_rank_t *r = m->ranks[i];
        const progress_t *p = &r->seen.progress;
        if (!r->is_there) {
            continue;
        }
        sums.n_there++;
        sums.n_started += r->seen.was_told && strcmp(r->seen.state, "starting") != 0;
        sums.n_silent += strcmp(r->seen.state, "no answer") == 0;
        sums.operations_s += r->operations_s;
        sums.bytes_s += r->bytes_s;
        sums.samples_s += r->samples_s;
        sums.memory_bytes += r->seen.memory_bytes;
        if (p->has_step && (!sums.has_step || p->step >= sums.step)) {
            sums.has_step = true;
            sums.step = p->step;
        }
        sums.step_s = MAX(sums.step_s, r->step_s);
        if (p->has_loss && (!sums.has_loss || r->rank == 0)) {
            sums.has_loss = true;
            sums.loss = p->loss;
        }
    }
    return sums;
}

static bool has_flight(const model_rank_t *r, const model_flight_t *wanted)
{
    for (int i = 0; i < r->seen.n_flights; i++) {
        const model_flight_t *f = &r->seen.flights[i];
        if (f->set == wanted->set && strcmp(f->name, wanted->name) == 0) {
            return true;
        }
    }
    return r->seen.n_in_flight > r->seen.n_flights; // more than it told: it may well
}

#define MAX_NAMED 3

void model_waits_for(const model_t *m, const model_rank_t *rank, char *text, size_t bytes)
{
    const model_flight_t *oldest = &rank->seen.flights[0];
    size_t len = 0;
    int n = 0;
    text[0] = '\0';
    if (!rank->is_there || rank->has_ended || strcmp(rank->seen.state, "waiting") != 0 ||
        rank->seen.n_flights == 0) {
        return;
    }
    if (oldest->set != 0) {
        snprintf(text, bytes, "process set %d", oldest->set);
        return;
    }
    char names[MODEL_NAME_BYTES] = "";
    for (int i = 0; i < m->n; i++) {
        const model_rank_t *other = m->ranks[i];
        if (!other->is_there || other == rank || has_flight(other, oldest)) {
            continue;
        }
        if (n++ < MAX_NAMED && len < sizeof names) {
            len += (size_t)snprintf(names + len, sizeof names - len, "%s%d", n > 1 ? ", " : "",
                                    other->rank);
        }
    }
    if (n > MAX_NAMED) {
        snprintf(text, bytes, "ranks %s and %d more", names, n - MAX_NAMED);
    } else if (n > 0) {
        snprintf(text, bytes, "rank%s %s", plural(n), names);
    }
}

double model_lateness(const model_t *m, const model_rank_t *rank)
{
    double most = 0;
    for (int i = 0; i < m->n; i++) {
        const model_seen_t *seen = &m->ranks[i]->seen;
        for (int k = 0; m->ranks[i]->is_there && k < seen->n_late; k++) {
            bool is_it = seen->late[k].rank == rank->rank && seen->late[k].n_ranks == 1;
            most = is_it ? MAX(most, seen->late[k].share) : most;
        }
    }
    return most >= LATE_LEAST && rank->is_there && !rank->has_ended ? MIN(most, 1.0) : 0;
}
