// SPDX-License-Identifier: Apache-2.0
//
// model_json.c - the job as the page wants it.
//
// Once a second for every rank, so rows are arrays, in the order that page/page.js knows; the rest,
// which is small, has names. What only one rank's panel shows is asked for by itself.
#include "web/web.h"

#include <stdio.h>

static void put_member(buf_t *out, const char *name, const char *text)
{
    buf_printf(out, "\"%s\":", name);
    json_text(out, text);
    buf_append(out, ",", 1);
}

static void put_value(buf_t *out, const char *name, double value)
{
    buf_printf(out, "\"%s\":", name);
    json_number(out, value);
    buf_append(out, ",", 1);
}

static void end_list(buf_t *out, char bracket)
{
    if (out->len > 0 && out->data[out->len - 1] == ',') {
        out->len--;
    }
    buf_append(out, &bracket, 1);
}

// A minute of shares, two characters a period: how much of it was waiting, and moving, as a letter
// each from 'A', 0 %, to 'U', 100 %.
static void put_history(buf_t *out, const model_rank_t *r)
{
    buf_append(out, "\"", 1);
    for (int i = 0; i < r->n_history; i++) {
        char pair[2] = {(char)('A' + r->history[i][1] / 5), (char)('A' + r->history[i][2] / 5)};
        buf_append(out, pair, 2);
    }
    buf_append(out, "\"", 1);
}

static void put_row(buf_t *out, const model_t *m, const model_rank_t *r, bool has_history)
    REQUIRES(m->lock)
{
    const model_seen_t *seen = &r->seen;
    char waits_for[MODEL_NAME_BYTES];
    model_waits_for(m, r, waits_for, sizeof waits_for);
    buf_printf(out, "[%d,%d,", r->id, r->rank);
    json_text(out, r->host);
    buf_append(out, ",", 1);
    json_text(out, seen->state);
    buf_append(out, ",", 1);
    json_text(out, r->has_ended ? "" : seen->doing[0] != '\0' ? seen->doing : "");
    buf_append(out, ",", 1);
    json_text(out, waits_for);
    const double numbers[] = {
        seen->doing[0] != '\0' ? seen->since_s : -1,
        r->operations_s,
        r->bytes_s,
        r->samples_s,
        r->step_s,
        seen->compute,
        seen->waiting,
        seen->moving,
        (double)seen->memory_bytes,
        r->cpu,
        model_lateness(m, r),
        r->has_ended ? r->code : -1,
    };
    for (size_t i = 0; i < N_ELEMENTS(numbers); i++) {
        buf_append(out, ",", 1);
        json_number(out, numbers[i]);
    }
    if (has_history) {
        buf_append(out, ",", 1);
        put_history(out, r);
    }
    buf_append(out, "],", 2);
}

static void put_events(buf_t *out, const model_t *m)
{
    buf_printf(out, "\"events\":[");
    for (int i = 0; i < m->n_events; i++) {
        const model_event_t *e = &m->events[i];
        buf_printf(out, "[%lld,\"%c\",", (long long)e->time_ms, e->kind);
        json_text(out, e->text);
        buf_append(out, "],", 2);
    }
    end_list(out, ']');
    buf_append(out, ",", 1);
}

static void put_sums(buf_t *out, const model_t *m) REQUIRES(m->lock)
{
    model_sums_t sums = model_sums(m);
    put_value(out, "ready", sums.n_started);
    put_value(out, "operations_s", sums.operations_s);
    put_value(out, "bytes_s", sums.bytes_s);
    put_value(out, "samples_s", sums.samples_s);
    put_value(out, "step_s", sums.step_s);
    put_value(out, "memory", (double)sums.memory_bytes);
    if (sums.has_step) {
        put_value(out, "step", (double)sums.step);
    }
    if (sums.has_loss) {
        put_value(out, "loss", sums.loss);
    }
}

static void put_job(const model_t *m, bool has_history, buf_t *out) REQUIRES(m->lock)
{
    buf_append(out, "{", 1);
    put_member(out, "command", m->command);
    put_member(out, "host", m->host);
    put_member(out, "state", m->state);
    put_member(out, "missing", m->missing);
    put_member(out, "version", hvd_version());
    buf_printf(out, "\"begun\":%lld,\"now\":%lld,\"code\":%d,\"ranks\":%d,\"generation\":%u,",
               (long long)m->begun_ms, (long long)model_now_ms(), m->code, m->n_ranks,
               m->generation);
    buf_printf(out, "\"hosts\":%d,\"hosts_ready\":%d,", m->n_hosts, m->n_ready);
    put_sums(out, m);
    buf_printf(out, "\"failure\":");
    json_bytes(out, m->failure.data != NULL ? m->failure.data : (const void *)"", m->failure.len);
    buf_append(out, ",", 1);
    put_events(out, m);
    buf_printf(out, "\"rows\":[");
    for (int i = 0; i < m->n; i++) {
        if (m->ranks[i]->is_there) {
            put_row(out, m, m->ranks[i], has_history);
        }
    }
    end_list(out, ']');
    buf_append(out, "}", 1);
}

static void put_operations(buf_t *out, const model_rank_t *r)
{
    int64_t n = MIN(r->n_operations, MODEL_OPERATIONS);
    buf_printf(out, "\"operations\":[");
    for (int64_t i = r->n_operations - n; i < r->n_operations; i++) {
        const model_operation_t *op = &r->operations[i % MODEL_OPERATIONS];
        buf_printf(out, "[%lld,%lld,%lld,%lld,%llu,", (long long)op->submitted,
                   (long long)op->agreed, (long long)op->started, (long long)op->finished,
                   (unsigned long long)op->bytes);
        json_text(out, op->op);
        buf_append(out, ",", 1);
        json_text(out, op->name);
        buf_append(out, "],", 2);
    }
    end_list(out, ']');
    buf_append(out, ",", 1);
}

static void put_rank(buf_t *out, const model_rank_t *r)
{
    size_t cut = r->log.len - MIN(r->log.len, MODEL_LOG_BYTES);
    buf_printf(out, "{\"id\":%d,\"rank\":%d,\"pid\":%d,", r->id, r->rank, r->pid);
    put_member(out, "host", r->host);
    put_member(out, "state", r->seen.state);
    put_member(out, "doing", r->seen.doing);
    put_member(out, "last", r->seen.last);
    put_member(out, "ended", r->seen.ended);
    put_value(out, "since", r->seen.since_s);
    put_value(out, "last_s", r->seen.last_s);
    put_value(out, "in_flight", r->seen.n_in_flight);
    put_value(out, "code", r->has_ended ? r->code : -1);
    put_operations(out, r);
    buf_printf(out, "\"stack\":");
    json_bytes(out, r->stack.data != NULL ? r->stack.data : (const void *)"", r->stack.len);
    buf_printf(out, ",\"log\":");
    json_bytes(out, r->log.data != NULL ? r->log.data + cut : (const void *)"", r->log.len - cut);
    buf_append(out, "}", 1);
}

void model_json(model_t *m, bool has_history, buf_t *out)
{
    lock_take(&m->lock);
    put_job(m, has_history, out);
    lock_release(&m->lock);
}

void model_rank_json(model_t *m, int id, buf_t *out)
{
    lock_take(&m->lock);
    const model_rank_t *r = model_find(m, id);
    if (r != NULL) {
        put_rank(out, r);
    } else {
        buf_printf(out, "null");
    }
    lock_release(&m->lock);
}

void model_frozen_json(model_t *m, buf_t *out)
{
    lock_take(&m->lock);
    buf_printf(out, "{\"job\":");
    put_job(m, true, out);
    buf_printf(out, ",\"ranks\":{");
    for (int i = 0; i < m->n; i++) {
        buf_printf(out, "\"%d\":", i);
        put_rank(out, m->ranks[i]);
        buf_append(out, ",", 1);
    }
    end_list(out, '}');
    buf_append(out, "}", 1);
    lock_release(&m->lock);
}
