// SPDX-License-Identifier: Apache-2.0
//
// model_text.c - the job as a table for a terminal, as metrics, and as half a line.
//
// Names come from programs: what is not printable is shown as "?". Any thread; takes the lock.
#include "web/web.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>

// "1.25 GB"
static void in_units(double value, const char *unit, char *text, size_t bytes)
{
    static const char prefixes[] = " kMGTPE";
    int i = 0;
    for (; value >= 999.5 && prefixes[i + 1] != '\0'; i++) {
        value /= 1000;
    }
    if (i == 0) {
        snprintf(text, bytes, "%.3g %s", value, unit);
    } else {
        snprintf(text, bytes, "%.3g %c%s", value, prefixes[i], unit);
    }
}

static void put_plain(buf_t *out, const char *text, int width)
{
    int n = 0;
    for (; text[n] != '\0' && n < width; n++) {
        char c = isprint((unsigned char)text[n]) ? text[n] : '?';
        buf_append(out, &c, 1);
    }
    for (; n < width; n++) {
        buf_append(out, " ", 1);
    }
}

static void put_cell(buf_t *out, int width, const char *format, ...) PRINTF_LIKE(3, 4);

static void put_cell(buf_t *out, int width, const char *format, ...)
{
    char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    put_plain(out, text, width);
    buf_append(out, " ", 1);
}

static void put_progress(const model_sums_t *sums, char *text, size_t bytes)
{
    char samples[32];
    size_t len = 0;
    text[0] = '\0';
    if (sums->has_step) {
        len += (size_t)snprintf(text, bytes, "step %lld", (long long)sums->step);
    }
    if (sums->has_loss && len < bytes) {
        len += (size_t)snprintf(text + len, bytes - len, "%sloss %.4g", len > 0 ? ", " : "",
                                sums->loss);
    }
    if (sums->samples_s > 0 && len < bytes) {
        in_units(sums->samples_s, "samples/s", samples, sizeof samples);
        snprintf(text + len, bytes - len, "%s%s", len > 0 ? ", " : "", samples);
    }
}

void model_progress(model_t *m, char *text, size_t bytes)
{
    lock_take(&m->lock);
    model_sums_t sums = model_sums(m);
    put_progress(&sums, text, bytes);
    lock_release(&m->lock);
}

// --- A table -------------------------------------------------------------------------------------

static void put_head(const model_t *m, int columns, buf_t *out) REQUIRES(m->lock)
{
    char bytes[32], operations[32], progress[128], line[1200];
    model_sums_t sums = model_sums(m);
    in_units(sums.bytes_s, "B/s", bytes, sizeof bytes);
    in_units(sums.operations_s, "operations/s", operations, sizeof operations);
    put_progress(&sums, progress, sizeof progress);
    snprintf(line, sizeof line, "%s  %s", m->state, m->command);
    put_plain(out, line, columns);
    buf_append(out, "\n", 1);
    snprintf(line, sizeof line, "%d of %d rank%s on %d host%s   %s   %s   %s", sums.n_started,
             m->n_ranks, plural(m->n_ranks), m->n_hosts, plural(m->n_hosts), operations, bytes,
             progress);
    put_plain(out, line, columns);
    buf_append(out, "\n\n", 2);
}

static void put_rank(const model_t *m, const model_rank_t *r, int columns, buf_t *out)
    REQUIRES(m->lock)
{
    const model_seen_t *seen = &r->seen;
    char waits_for[MODEL_NAME_BYTES], rate[32], memory[32];
    buf_t row = {0};
    model_waits_for(m, r, waits_for, sizeof waits_for);
    in_units(r->bytes_s, "B/s", rate, sizeof rate);
    in_units((double)seen->memory_bytes, "B", memory, sizeof memory);
    double late = model_lateness(m, r);
    put_cell(&row, 5, "%d", r->rank);
    put_cell(&row, 16, "%s", r->host);
    put_cell(&row, 9, "%s", late > 0 ? "late" : seen->state);
    put_cell(&row, 14, "%3.0f/%3.0f/%3.0f", seen->compute * 100, seen->waiting * 100,
             seen->moving * 100);
    put_cell(&row, 9, "%s", rate);
    put_cell(&row, 9, "%s", memory);
    put_cell(&row, 5, "%.0f%%", r->cpu * 100);
    put_cell(&row, 14, "%s", waits_for);
    put_cell(&row, 60, "%s", seen->doing[0] != '\0' ? seen->doing : seen->last);
    buf_append(&row, "", 1);
    if (!row.failed) {
        put_plain(out, (const char *)row.data, columns);
        buf_append(out, "\n", 1);
    }
    buf_free(&row);
}

// How much a rank needs to be seen when there is not room for all.
static int urgency(const model_t *m, const model_rank_t *r) REQUIRES(m->lock)
{
    return r->has_ended && r->code != 0              ? 3
           : strcmp(r->seen.state, "no answer") == 0 ? 2
           : model_lateness(m, r) > 0                ? 1
                                                     : 0;
}

void model_text(model_t *m, int columns, int rows, buf_t *out)
{
    int n_left = MAX(rows - 5, 1), n_hidden = 0;
    columns = MIN(MAX(columns, 20), 400);
    lock_take(&m->lock);
    put_head(m, columns, out);
    put_plain(out,
              "rank  host             state     comp/wait/mov  bytes     memory    cpu   waits for"
              "      doing",
              columns);
    buf_append(out, "\n", 1);
    for (int level = 3; level >= 0; level--) {
        for (int i = 0; i < m->n; i++) {
            const model_rank_t *r = m->ranks[i];
            if (!r->is_there || urgency(m, r) != level) {
                continue;
            }
            if (n_left > 0) {
                put_rank(m, r, columns, out);
                n_left--;
            } else {
                n_hidden++;
            }
        }
    }
    if (n_hidden > 0) {
        buf_printf(out, "and %d more rank%s\n", n_hidden, plural(n_hidden));
    }
    lock_release(&m->lock);
}

// --- Metrics -------------------------------------------------------------------------------------

// As labels want it: quotes, backslashes and ends of lines.
static void put_label(buf_t *out, const char *text)
{
    for (; *text != '\0'; text++) {
        if (*text == '"' || *text == '\\') {
            buf_append(out, "\\", 1);
        }
        buf_append(out, (unsigned char)*text < ' ' ? " " : text, 1);
    }
}

static void put_job_metrics(const model_t *m, metrics_form_t form, buf_t *out) REQUIRES(m->lock)
{
    model_sums_t sums = model_sums(m);
    const struct {
        const char *name, *help;
        double value;
    } gauges[] = {
        {"hvd_job_ranks", "ranks of the job, or of its generation", m->n_ranks},
        {"hvd_job_ranks_ready", "ranks that have joined the job", sums.n_started},
        {"hvd_job_hosts", "hosts of the job", m->n_hosts},
        {"hvd_job_generation", "the generation of an elastic job", m->generation},
        {"hvd_job_step_seconds", "time of a step, of the slowest rank", sums.step_s},
        {"hvd_job_start_time_seconds", "when the job was started, since 1970",
         (double)m->begun_ms / 1000},
    };
    for (size_t i = 0; i < N_ELEMENTS(gauges); i++) {
        metrics_family(out, form, gauges[i].name, "gauge", gauges[i].help);
        buf_printf(out, "%s %.15g\n", gauges[i].name, gauges[i].value);
    }
}

static void put_rank_gauges(const model_t *m, metrics_form_t form, const rank_numbers_t *numbers,
                            int n, buf_t *out) REQUIRES(m->lock)
{
    static const char *const phases[] = {"compute", "waiting", "moving"};
    int k = 0;
    if (n == 0) {
        return;
    }
    metrics_family(out, form, "hvd_share_ratio", "gauge", "how the last second was spent");
    for (int i = 0; i < m->n && k < n; i++) {
        const model_seen_t *seen = &m->ranks[i]->seen;
        const double shares[] = {seen->compute, seen->waiting, seen->moving};
        if (!m->ranks[i]->is_there || !seen->was_told) {
            continue;
        }
        for (int p = 0; p < 3; p++) {
            buf_printf(out, "hvd_share_ratio{%s,phase=\"%s\"} ", numbers[k].labels, phases[p]);
            metrics_number(out, shares[p]);
        }
        k++;
    }
    metrics_family(out, form, "hvd_late_ratio", "gauge",
                   "share of the time that the others wait for this rank");
    k = 0;
    for (int i = 0; i < m->n && k < n; i++) {
        if (m->ranks[i]->is_there && m->ranks[i]->seen.was_told) {
            buf_printf(out, "hvd_late_ratio{%s} ", numbers[k++].labels);
            metrics_number(out, model_lateness(m, m->ranks[i]));
        }
    }
}

static void put_ranks(const model_t *m, metrics_form_t form, rank_numbers_t *numbers, buf_t *labels,
                      buf_t *out) REQUIRES(m->lock)
{
    int n = 0;
    for (int i = 0; i < m->n; i++) {
        const model_rank_t *r = m->ranks[i];
        if (r->is_there && r->seen.was_told) {
            buf_printf(labels, "rank=\"%d\",host=\"", r->rank);
            put_label(labels, r->host);
            buf_append(labels, "\"", 2);
            numbers[n++] = (rank_numbers_t){.counters = r->seen.counters,
                                            .progress = r->seen.progress,
                                            .resident_bytes = r->seen.memory_bytes,
                                            .cpu_seconds = r->seen.cpu_s};
        }
    }
    const char *label = (const char *)labels->data;
    for (int i = 0; i < n && !labels->failed; i++, label += strlen(label) + 1) {
        numbers[i].labels = label;
    }
    if (!labels->failed) {
        metrics_write(out, form, numbers, n);
        put_rank_gauges(m, form, numbers, n, out);
    }
}

void model_metrics(model_t *m, metrics_form_t form, buf_t *out)
{
    buf_t labels = {0};
    lock_take(&m->lock);
    rank_numbers_t *numbers = calloc((size_t)m->n + 1, sizeof *numbers);
    metrics_family(out, form, "hvd_info", "gauge", "the version of the launcher");
    buf_printf(out, "hvd_info{version=\"%s\"} 1\n", hvd_version());
    put_job_metrics(m, form, out);
    if (numbers != NULL) {
        put_ranks(m, form, numbers, &labels, out);
    }
    metrics_end(out, form);
    lock_release(&m->lock);
    free(numbers);
    buf_free(&labels);
}
