// SPDX-License-Identifier: Apache-2.0
//
// metrics.c - numbers of ranks as text: one row of the table is one metric.
//
// Two forms differ in little: OpenMetrics names a family of counters without "_total", which its
// samples have, and ends with "# EOF". A metric that no rank has is left out. One rank writes its
// own at its socket, the launcher those of all ranks of a job. Pure, but for the page of a rank.
#include "observe/internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

const char *const metrics_types[] = {
    [METRICS_PROMETHEUS] = "text/plain; version=0.0.4; charset=utf-8",
    [METRICS_OPEN] = "application/openmetrics-text; version=1.0.0; charset=utf-8",
};

typedef enum value_kind {
    VALUE_COUNT,        // uint64_t
    VALUE_BY_OPERATION, // uint64_t for each
    VALUE_NS,           // uint64_t, shown as seconds
    VALUE_REAL,         // double
    VALUE_STEP,         // int64_t
} value_kind_t;

typedef struct metric {
    const char *name, *type, *help;
    value_kind_t kind;
    size_t at;    // in rank_numbers_t
    size_t where; // there, a flag that says whether it is known; 0: it is
} metric_t;

#define COUNTER(field, value, metric_name, meaning)                                                \
    {metric_name, "counter", meaning, value, offsetof(rank_numbers_t, counters.field), 0}
#define GAUGE(field, value, metric_name, meaning)                                                  \
    {metric_name, "gauge", meaning, value, offsetof(rank_numbers_t, counters.field), 0}
#define TOLD(field, metric_type, value, metric_name, meaning)                                      \
    {metric_name,                                                                                  \
     metric_type,                                                                                  \
     meaning,                                                                                      \
     value,                                                                                        \
     offsetof(rank_numbers_t, progress.field),                                                     \
     offsetof(rank_numbers_t, progress.has_##field)}

static const metric_t metrics[] = {
    COUNTER(operations, VALUE_BY_OPERATION, "hvd_operations_total", "operations finished"),
    COUNTER(bytes, VALUE_BY_OPERATION, "hvd_bytes_total", "bytes of their tensors"),
    COUNTER(failed, VALUE_COUNT, "hvd_failed_total", "operations that failed"),
    COUNTER(on_board, VALUE_COUNT, "hvd_board_operations_total",
            "operations that needed no agreement"),
    COUNTER(riding, VALUE_COUNT, "hvd_riding_operations_total",
            "operations carried by control messages"),
    COUNTER(batches, VALUE_COUNT, "hvd_batches_total", "batches run"),
    COUNTER(batched, VALUE_COUNT, "hvd_batched_operations_total", "operations run in batches"),
    COUNTER(cache_hits, VALUE_COUNT, "hvd_cache_hits_total", "submissions of known names"),
    COUNTER(cache_misses, VALUE_COUNT, "hvd_cache_misses_total", "submissions of new names"),
    COUNTER(steps, VALUE_COUNT, "hvd_steps_total",
            "steps, as far as names that come again in the agreement tell"),
    GAUGE(in_flight, VALUE_COUNT, "hvd_in_flight", "operations submitted and not finished"),
    GAUGE(in_flight_max, VALUE_COUNT, "hvd_in_flight_max", "most operations in flight so far"),
    COUNTER(negotiate_ns, VALUE_NS, "hvd_negotiate_seconds_total",
            "from submission until all had submitted"),
    COUNTER(queue_ns, VALUE_NS, "hvd_queue_seconds_total", "from then until the batch began"),
    COUNTER(run_ns, VALUE_NS, "hvd_run_seconds_total", "from then until finished"),
    COUNTER(nonfinite, VALUE_COUNT, "hvd_nonfinite_total",
            "elements submitted that are NaN or infinite, with HOROVOD_CHECK_NUMERICS"),
    COUNTER(strangers, VALUE_COUNT, "hvd_strangers_total",
            "clients refused because they do not belong to this job"),
    TOLD(step, "gauge", VALUE_STEP, "hvd_report_step", "the step that the program reported last"),
    TOLD(loss, "gauge", VALUE_REAL, "hvd_report_loss", "the loss that the program reported last"),
    TOLD(samples, "counter", VALUE_REAL, "hvd_report_samples_total",
         "samples that the program has reported"),
    {"hvd_resident_bytes", "gauge", "memory of the process of the rank", VALUE_COUNT,
     offsetof(rank_numbers_t, resident_bytes), offsetof(rank_numbers_t, resident_bytes)},
    {"hvd_cpu_seconds_total", "counter", "processor time of the process of the rank", VALUE_REAL,
     offsetof(rank_numbers_t, cpu_seconds), offsetof(rank_numbers_t, resident_bytes)},
};

static const void *field_of(const rank_numbers_t *rank, size_t at)
{
    return (const char *)rank + at;
}

static bool is_known(const rank_numbers_t *rank, const metric_t *m)
{
    bool is_flag = m->where != offsetof(rank_numbers_t, resident_bytes);
    return m->where == 0 || (is_flag ? *(const bool *)field_of(rank, m->where)
                                     : *(const uint64_t *)field_of(rank, m->where) != 0);
}

void metrics_family(buf_t *out, metrics_form_t form, const char *name, const char *type,
                    const char *help)
{
    static const char suffix[] = "_total";
    size_t n = strlen(name), cut = strlen(suffix);
    bool is_cut = form == METRICS_OPEN && n > cut && strcmp(name + n - cut, suffix) == 0;
    int bytes = (int)(is_cut ? n - cut : n);
    buf_printf(out, "# HELP %.*s %s\n# TYPE %.*s %s\n", bytes, name, help, bytes, name, type);
}

void metrics_number(buf_t *out, double value)
{
    if (isnan(value)) {
        buf_printf(out, "NaN\n");
    } else if (isinf(value)) {
        buf_printf(out, value > 0 ? "+Inf\n" : "-Inf\n");
    } else {
        buf_printf(out, "%.9g\n", value);
    }
}

static void put_name(buf_t *out, const metric_t *m, const rank_numbers_t *rank, int op)
{
    const char *labels = rank->labels;
    bool by_operation = m->kind == VALUE_BY_OPERATION;
    buf_printf(out, "%s", m->name);
    if (by_operation) {
        buf_printf(out, "{%s%soperation=\"%s\"} ", labels, labels[0] != '\0' ? "," : "",
                   hvd_op_name((hvd_op_t)op));
    } else if (labels[0] != '\0') {
        buf_printf(out, "{%s} ", labels);
    } else {
        buf_printf(out, " ");
    }
}

static void put_samples(buf_t *out, const metric_t *m, const rank_numbers_t *rank)
{
    const void *field = field_of(rank, m->at);
    const uint64_t *counts = field;
    int n = m->kind == VALUE_BY_OPERATION ? HVD_N_OPS : 1;
    for (int op = 0; op < n; op++) {
        put_name(out, m, rank, op);
        if (m->kind == VALUE_NS) {
            buf_printf(out, "%.9f\n", (double)*counts / (double)NS_PER_S);
        } else if (m->kind == VALUE_REAL) {
            metrics_number(out, *(const double *)field);
        } else if (m->kind == VALUE_STEP) {
            buf_printf(out, "%lld\n", (long long)*(const int64_t *)field);
        } else {
            buf_printf(out, "%llu\n", (unsigned long long)counts[op]);
        }
    }
}

void metrics_write(buf_t *out, metrics_form_t form, const rank_numbers_t *ranks, int n_ranks)
{
    for (size_t i = 0; i < N_ELEMENTS(metrics); i++) {
        const metric_t *m = &metrics[i];
        bool has_begun = false;
        for (int r = 0; r < n_ranks; r++) {
            if (!is_known(&ranks[r], m)) {
                continue;
            }
            if (!has_begun) {
                metrics_family(out, form, m->name, m->type, m->help);
                has_begun = true;
            }
            put_samples(out, m, &ranks[r]);
        }
    }
}

void metrics_end(buf_t *out, metrics_form_t form)
{
    if (form == METRICS_OPEN) {
        buf_printf(out, "# EOF\n");
    }
}

// --- Counters in a line --------------------------------------------------------------------------

#define N_COUNTERS (sizeof(hvd_counters_t) / sizeof(uint64_t))
_Static_assert(sizeof(hvd_counters_t) % sizeof(uint64_t) == 0, "counters are numbers only");

void metrics_pack(buf_t *out, const hvd_counters_t *counters)
{
    const uint64_t *numbers = (const uint64_t *)(const void *)counters;
    for (size_t i = 0; i < N_COUNTERS; i++) {
        buf_printf(out, "%s%llu", i > 0 ? " " : "", (unsigned long long)numbers[i]);
    }
}

bool metrics_unpack(const char *text, hvd_counters_t *counters_p)
{
    hvd_counters_t counters;
    uint64_t *numbers = (uint64_t *)(void *)&counters;
    char *end;
    for (size_t i = 0; i < N_COUNTERS; i++, text = end) {
        numbers[i] = strtoull(text, &end, 10);
        if (end == text) {
            return false;
        }
    }
    if (*text != '\0') {
        return false;
    }
    *counters_p = counters;
    return true;
}

// --- The page of a rank --------------------------------------------------------------------------

static void put_late(observe_t *o, metrics_form_t form, buf_t *out)
{
    static const struct {
        const char *name, *help;
    } families[] = {
        {"hvd_last_total", "steps in which the rank (or one below it in the tree) came last"},
        {"hvd_late_seconds_total", "how much later than the first it came"},
    };
    int n = observe_stragglers(o, NULL, 0);
    hvd_late_t *late = n > 0 ? calloc((size_t)n, sizeof *late) : NULL;
    n = late != NULL ? MIN(n, observe_stragglers(o, late, n)) : 0;
    for (size_t f = 0; f < N_ELEMENTS(families) && n > 0; f++) {
        metrics_family(out, form, families[f].name, "counter", families[f].help);
        for (int b = 0; b < n; b++) {
            buf_printf(out, "%s{rank=\"%d\",ranks=\"%d\"} ", families[f].name, late[b].rank,
                       late[b].n_ranks);
            if (f == 0) {
                buf_printf(out, "%llu\n", (unsigned long long)late[b].n_last);
            } else {
                buf_printf(out, "%.9f\n", (double)late[b].late_ns / (double)NS_PER_S);
            }
        }
    }
    free(late);
}

void counters_page(observe_t *o, metrics_form_t form, buf_t *out)
{
    const rank_numbers_t numbers = {
        .labels = "", .counters = observe_counters(o), .progress = observe_progress(o)};
    metrics_family(out, form, "hvd_info", "gauge", "which rank this is");
    buf_printf(out, "hvd_info{rank=\"%d\",size=\"%d\",version=\"%s\"} 1\n", o->job.rank,
               o->job.size, hvd_version());
    metrics_write(out, form, &numbers, 1);
    put_late(o, form, out);
    metrics_end(out, form);
}

void observe_metrics(observe_t *o, buf_t *out)
{
    counters_page(o, METRICS_PROMETHEUS, out);
}
