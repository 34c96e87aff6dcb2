// SPDX-License-Identifier: Apache-2.0
//
// bench.c - runs one operation again and again on prepared memory, and times it.
//
// A sample is one blocking call; for each sample the slowest rank counts. Every result is verified.
// One JSON object per line with --json, else a table.
#define _GNU_SOURCE
#include "tools/bench.h"

#include "coll/reduce.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#define HUGE_PAGE ((size_t)2 << 20)
#define MANY_TENSORS 500 // of the size asked for, if no others are listed
#define WARM_UP 5

void bench_die(const bench_rank_t *r, const char *what)
{
    fprintf(stderr, "hvd-bench: rank %d: %s: %s\n", r->rank, what, r->text);
    exit(1);
}

// --- Operations ----------------------------------------------------------------------------------

static void run_request(bench_rank_t *r, hvd_request_t *request)
{
    hvd_handle_t handle;
    request->flags |= HVD_WAITS;
    if (hvd_submit(r->ctx, request, &handle, r->text, sizeof r->text) != HVD_OK) {
        bench_die(r, "submit");
    }
    if (hvd_wait(r->ctx, handle, HVD_FOREVER) != HVD_OK) {
        hvd_result_t result;
        hvd_result(r->ctx, handle, &result);
        snprintf(r->text, sizeof r->text, "%s", result.text);
        bench_die(r, request->name);
    }
    hvd_release(r->ctx, handle);
}

static void barrier(bench_rank_t *r)
{
    run_request(r, &(hvd_request_t){.op = HVD_BARRIER, .name = "bench.barrier"});
}

static void max_over_ranks(bench_rank_t *r, double *values, int n)
{
    int64_t shape[1] = {n};
    hvd_tensor_t tensor = {.input = values, .output = values, .n_dims = 1, .shape = shape};
    char name[64];
    snprintf(name, sizeof name, "bench.max.%d", n);
    run_request(r, &(hvd_request_t){.op = HVD_ALLREDUCE,
                                    .name = name,
                                    .dtype = HVD_FLOAT64,
                                    .reduce = HVD_MAX,
                                    .tensors = &tensor,
                                    .n_tensors = 1});
}

// What is timed: one call of `once` on prepared memory.
typedef struct workload {
    const char *op;
    size_t bytes; // as asked for
    size_t in_bytes, out_bytes;
    uint8_t *in, *out; // out may be in
    hvd_request_t request;
    hvd_tensor_t tensor;
    int64_t shape[1];
    char name[64];
    int n_many; // operations in flight at once; 0: one that is waited for
    size_t many_bytes[MAX_TENSORS];
    hvd_handle_t handles[MAX_TENSORS];
    char many_names[MAX_TENSORS][32];
} workload_t;

static void *memory(size_t bytes)
{
    size_t rounded = (MAX(bytes, 64) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    bool large = bytes >= HUGE_PAGE;
    void *at =
        aligned_alloc(large ? HUGE_PAGE : 64, large ? rounded : (MAX(bytes, 64) + 63) / 64 * 64);
    if (at == NULL) {
        fprintf(stderr, "hvd-bench: no memory for %zu bytes\n", bytes);
        exit(1);
    }
    if (large) {
        madvise(at, rounded, MADV_HUGEPAGE); // as numerical libraries do for their arrays
    }
    memset(at, 0, large ? rounded : bytes);
    return at;
}

static void fill_ones(hvd_dtype_t dtype, uint8_t *at, size_t bytes)
{
    size_t element = hvd_dtype_bytes(dtype);
    uint8_t one[8] = {1};
    const float one_f = 1.0f;
    const double one_d = 1.0;
    const uint16_t one_half = 0x3C00;
    const uint16_t one_bfloat = 0x3F80;
    switch (dtype) {
    case HVD_FLOAT32:
        memcpy(one, &one_f, 4);
        break;
    case HVD_FLOAT64:
        memcpy(one, &one_d, 8);
        break;
    case HVD_FLOAT16:
        memcpy(one, &one_half, 2);
        break;
    case HVD_BFLOAT16:
        memcpy(one, &one_bfloat, 2);
        break;
    default:
        break;
    }
    for (size_t i = 0; i + element <= bytes; i += element) {
        memcpy(at + i, one, element);
    }
}

static bool all_equal_scaled_one(hvd_dtype_t dtype, const uint8_t *at, size_t bytes, int factor)
{
    size_t element = hvd_dtype_bytes(dtype);
    uint8_t ones[8];
    uint8_t want[8];
    fill_ones(dtype, ones, element);
    reduce_scale(dtype, want, ones, 1, factor);
    for (size_t i = 0; i + element <= bytes; i += element) {
        if (memcmp(at + i, want, element) != 0) {
            return false;
        }
    }
    return true;
}

static hvd_op_t op_named(const char *name)
{
    for (int op = 0; op < HVD_N_OPS; op++) {
        if (strcmp(hvd_op_name((hvd_op_t)op), name) == 0) {
            return (hvd_op_t)op;
        }
    }
    return strcmp(name, "many-gather") == 0 ? HVD_ALLGATHER : HVD_ALLREDUCE; // many, memcpy
}

// The tensors of "many" and "many-gather", one behind the other; returns their bytes.
static size_t list_many(const bench_options_t *o, workload_t *w)
{
    size_t element = hvd_dtype_bytes(o->dtype), sum = 0;
    w->n_many = o->n_tensors > 0 ? o->n_tensors : MANY_TENSORS;
    for (int i = 0; i < w->n_many; i++) {
        size_t bytes = o->n_tensors > 0 ? o->tensors[i] : w->bytes;
        w->many_bytes[i] = MAX(bytes / element, 1) * element;
        sum += w->many_bytes[i];
        snprintf(w->many_names[i], sizeof w->many_names[i], "bench.%zu.%d", w->bytes, i);
    }
    return sum;
}

// Sizes as the other libraries' benchmarks count them: allgather by its result, alltoall and
// reducescatter by one rank's input; of many, all together.
static void prepare(bench_rank_t *r, workload_t *w, const char *op, size_t bytes)
{
    const bench_options_t *o = r->options;
    size_t element = hvd_dtype_bytes(o->dtype);
    size_t n = (size_t)r->size;
    size_t whole = MAX(bytes / element, 1) * element;
    size_t share = MAX(whole / element / n, 1) * element;
    *w = (workload_t){.op = op, .bytes = bytes};
    hvd_op_t code = op_named(op);
    op_layout_t layout = op_infos[code].layout;
    bool many = strncmp(op, "many", 4) == 0;
    bool gathers_here = layout == LAYOUT_GATHERED && (!op_has(code, OP_ROOTED) || r->rank == 0);
    w->in_bytes = many                         ? list_many(o, w)
                  : layout == LAYOUT_GATHERED  ? share
                  : layout == LAYOUT_SCATTERED ? share * n
                  : layout == LAYOUT_EXCHANGED ? share * n
                                               : whole;
    w->out_bytes = layout == LAYOUT_GATHERED    ? gathers_here * (many ? w->in_bytes : share) * n
                   : layout == LAYOUT_SCATTERED ? share
                   : layout == LAYOUT_NOTHING   ? 0
                                                : w->in_bytes;
    bool in_place = layout == LAYOUT_WHOLE && !o->out_of_place && strcmp(op, "memcpy") != 0;
    w->in = memory(w->in_bytes);
    w->out = in_place ? w->in : memory(w->out_bytes);
    fill_ones(o->dtype, w->in, w->in_bytes);
    w->shape[0] = (int64_t)(w->in_bytes / element);
    w->bytes = many ? w->in_bytes : bytes;
    w->tensor = (hvd_tensor_t){.input = w->in, .output = w->out, .n_dims = 1, .shape = w->shape};
    snprintf(w->name, sizeof w->name, "bench.%s.%zu", op, bytes);
    w->request = (hvd_request_t){.op = code,
                                 .name = w->name,
                                 .dtype = o->dtype,
                                 .reduce = o->reduce,
                                 .tensors = &w->tensor,
                                 .n_tensors = layout != LAYOUT_NOTHING};
}

static void unprepare(workload_t *w)
{
    if (w->out != w->in) {
        free(w->out);
    }
    free(w->in);
}

static void run_many(bench_rank_t *r, workload_t *w)
{
    size_t element = hvd_dtype_bytes(r->options->dtype);
    size_t gathered = w->request.op == HVD_ALLGATHER ? (size_t)r->size : 1;
    size_t at = 0;
    for (int i = 0; i < w->n_many; i++) {
        int64_t shape[1] = {(int64_t)(w->many_bytes[i] / element)};
        hvd_tensor_t tensor = w->tensor;
        tensor.input = w->in + at;
        tensor.output = w->out + at * gathered;
        tensor.shape = shape;
        hvd_request_t request = w->request;
        request.name = w->many_names[i];
        request.tensors = &tensor;
        if (hvd_submit(r->ctx, &request, &w->handles[i], r->text, sizeof r->text) != HVD_OK) {
            bench_die(r, "submit");
        }
        at += w->many_bytes[i];
    }
    for (int i = 0; i < w->n_many; i++) {
        if (hvd_wait(r->ctx, w->handles[i], HVD_FOREVER) != HVD_OK) {
            bench_die(r, "wait");
        }
        hvd_release(r->ctx, w->handles[i]);
    }
}

static void once(bench_rank_t *r, workload_t *w)
{
    if (strcmp(w->op, "memcpy") == 0) {
        memcpy(w->out, w->in, w->in_bytes);
    } else if (w->n_many > 0) {
        run_many(r, w);
    } else {
        run_request(r, &w->request);
    }
}

static bool verify(bench_rank_t *r, workload_t *w)
{
    hvd_op_t op = op_named(w->op);
    bool reduces = op_has(op, OP_REDUCES) && strcmp(w->op, "memcpy") != 0;
    int factor = reduces && r->options->reduce == HVD_SUM ? r->size : 1;
    return all_equal_scaled_one(r->options->dtype, w->out, w->out_bytes, factor);
}

// --- Measuring -----------------------------------------------------------------------------------

static double now_us(void)
{
    return (double)clock_ns() / 1000.0;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

typedef struct figures {
    double median_us, p99_us, min_us;
    double middle_us; // mean of the middle half: finer than a tick of the clock
    int samples;
    bool ok;
} figures_t;

static int choose_samples(bench_rank_t *r, workload_t *w)
{
    double best = 1e18;
    bool copies = strcmp(w->op, "memcpy") == 0;
    for (int i = 0; i < WARM_UP; i++) {
        if (copies) {
            barrier(r);
        }
        double start = now_us();
        once(r, w);
        best = MIN(best, now_us() - start);
    }
    max_over_ranks(r, &best, 1);
    double n = r->options->budget_s * 1e6 / MAX(best, 0.1);
    return (int)MAX(3, MIN(n, r->options->max_samples));
}

static double mean(const double *values, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) {
        sum += values[i];
    }
    return sum / MAX(n, 1);
}

static figures_t measure(bench_rank_t *r, workload_t *w)
{
    figures_t f = {0};
    once(r, w);
    double wrong = verify(r, w) ? 0 : 1;
    max_over_ranks(r, &wrong, 1);
    f.ok = wrong == 0;
    memset(w->in, 0, w->in_bytes); // sums in place stay finite
    f.samples = choose_samples(r, w);
    double *times = memory((size_t)f.samples * sizeof *times);
    for (int i = 0; i < MIN(20, f.samples / 5); i++) {
        once(r, w);
    }
    barrier(r);
    bool copies = strcmp(w->op, "memcpy") == 0;
    for (int i = 0; i < f.samples; i++) {
        if (copies) {
            barrier(r); // the others are synchronised by what they do
        }
        double start = now_us();
        once(r, w);
        times[i] = now_us() - start;
    }
    max_over_ranks(r, times, f.samples);
    qsort(times, (size_t)f.samples, sizeof *times, compare_doubles);
    f.median_us = times[f.samples / 2];
    f.middle_us = mean(times + f.samples / 4, MAX(f.samples / 2, 1));
    f.p99_us = times[(int)((f.samples - 1) * 0.99)];
    f.min_us = times[0];
    free(times);
    return f;
}

// Bytes that had to cross between ranks, per second: comparable between operations and rank counts.
static double bus_gb_s(const char *op, size_t bytes, int n, double us)
{
    double factor = (n - 1.0) / n;
    factor *= strcmp(op, "allreduce") == 0 ? 2 : 1;
    factor = strcmp(op, "broadcast") == 0 || strcmp(op, "memcpy") == 0 ? 1 : factor;
    return n > 1 || strcmp(op, "memcpy") == 0 ? (double)bytes * factor / us / 1000 : 0;
}

static void print_json(const bench_rank_t *r, const workload_t *w, const figures_t *f)
{
    const bench_options_t *o = r->options;
    printf("{\"op\": \"%s\", \"dtype\": \"%s\", \"bytes\": %zu, \"ranks\": %d, \"hosts\": %d, "
           "\"median_us\": %.3f, \"middle_us\": %.4f, "
           "\"p99_us\": %.3f, \"min_us\": %.3f, \"samples\": %d, \"bus_gb_s\": %.3f, \"ok\": %s}\n",
           w->op, hvd_dtype_name(o->dtype), w->bytes, r->size, o->hosts, f->median_us, f->middle_us,
           f->p99_us, f->min_us, f->samples, bus_gb_s(w->op, w->bytes, r->size, f->median_us),
           f->ok ? "true" : "false");
    fflush(stdout);
}

static void print_row(const bench_rank_t *r, const workload_t *w, const figures_t *f)
{
    printf("%14s  %9s  %12zu  %12.2f  %12.2f  %9.2f  %s\n", w->op,
           hvd_dtype_name(r->options->dtype), w->bytes, f->median_us, f->p99_us,
           bus_gb_s(w->op, w->bytes, r->size, f->median_us), f->ok ? "correct" : "WRONG");
    fflush(stdout);
}

int bench_measure(bench_rank_t *r)
{
    const bench_options_t *o = r->options;
    bool ok = true;
    if (r->rank == 0 && !o->json) {
        printf("%14s  %9s  %12s  %12s  %12s  %9s\n", "operation", "dtype", "bytes", "median us",
               "p99 us", "bus GB/s");
    }
    int n_sizes = o->n_tensors > 0 ? 1 : o->n_bytes;
    for (int i = 0; i < n_sizes; i++) {
        static workload_t w; // large: names of all tensors of "many"
        prepare(r, &w, o->op, o->bytes[i]);
        figures_t f = measure(r, &w);
        if (r->rank == 0) {
            (o->json ? print_json : print_row)(r, &w, &f);
        }
        ok &= f.ok;
        unprepare(&w);
    }
    return ok ? 0 : 1;
}
