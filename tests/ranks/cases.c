// SPDX-License-Identifier: Apache-2.0
//
// cases.c - see cases.h.
//
// The value of element i of tensor t on member m is a function of (m, t, i modulo PERIOD, salt), so
// the expected output is a table of PERIOD elements a tensor, and checking costs a comparison
// an element. Expectations are computed here, in double, and only for Adasum by the library's
// reference. Every buffer lies between guard bytes.
#include "cases.h"

#include "coll/testing.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>

#define PERIOD 251
#define GUARD_BYTES 64
#define GUARD 0xA5
#define CALL_MS (60000 * PATIENCE)

// --- Values -------------------------------------------------------------------------------------

static bool is_half(hvd_dtype_t dtype)
{
    return dtype == HVD_FLOAT16 || dtype == HVD_BFLOAT16;
}

static bool is_floating(hvd_dtype_t dtype)
{
    return is_half(dtype) || dtype == HVD_FLOAT32 || dtype == HVD_FLOAT64;
}

static bool is_unsigned(hvd_dtype_t dtype)
{
    return dtype == HVD_UINT8 || dtype == HVD_UINT16 || dtype == HVD_BOOL;
}

static bool op_reduces(hvd_op_t op)
{
    return op == HVD_ALLREDUCE || op == HVD_REDUCESCATTER;
}

// One large number and many that are half a unit of its last place: rounding after each sum loses
// all of them.
static double rounding_value(hvd_dtype_t dtype, int member, unsigned j)
{
    double large = dtype == HVD_FLOAT16 ? 2048 : 256;
    return member == 0 ? large : 1 + (j & 1) * 2;
}

static double value_of(const op_case_t *c, int member, int tensor, size_t i)
{
    unsigned j = (unsigned)(i % PERIOD);
    unsigned m = (unsigned)member;
    unsigned mixed = j * j + 3 * j * (m + 1) + 5 * (unsigned)tensor + 7 * m + c->salt * 11;
    if (c->dtype == HVD_BOOL) {
        return mixed % 5 == 0;
    }
    if (op_reduces(c->op) && c->rounding) {
        return rounding_value(c->dtype, member, j);
    }
    if (op_reduces(c->op) && c->reduce == HVD_PRODUCT) {
        double magnitude = 1 + (mixed % 3 == 0);
        return mixed % 7 == 0 && !is_unsigned(c->dtype) ? -magnitude : magnitude;
    }
    double small = mixed % 13;
    return is_unsigned(c->dtype) ? small : small - 6;
}

// Integers wrap, floating types round once.
static void store(hvd_dtype_t dtype, double value, void *at)
{
    int64_t whole = is_floating(dtype) ? 0 : (int64_t)value;
    float single = (float)value;
    switch (dtype) {
    case HVD_FLOAT16:
    case HVD_BFLOAT16:
        acc_store(dtype, at, &single, 1, FINISH_NOTHING);
        break;
    case HVD_FLOAT32:
        memcpy(at, &single, sizeof single);
        break;
    case HVD_FLOAT64:
        memcpy(at, &value, sizeof value);
        break;
    case HVD_BOOL:
        *(uint8_t *)at = whole != 0;
        break;
    default:
        memcpy(at, &whole, hvd_dtype_bytes(dtype)); // little-endian, as the library requires
    }
}

static double load(hvd_dtype_t dtype, const void *at)
{
    union {
        uint8_t u8;
        int8_t i8;
        uint16_t u16;
        int16_t i16;
        int32_t i32;
        int64_t i64;
        float f32;
        double f64;
    } v = {0};
    memcpy(&v, at, hvd_dtype_bytes(dtype));
    switch (dtype) {
    case HVD_INT8:
        return v.i8;
    case HVD_UINT16:
        return v.u16;
    case HVD_INT16:
        return v.i16;
    case HVD_INT32:
        return v.i32;
    case HVD_INT64:
        return (double)v.i64;
    case HVD_FLOAT32:
        return v.f32;
    case HVD_FLOAT64:
        return v.f64;
    case HVD_FLOAT16:
    case HVD_BFLOAT16: {
        float wide;
        acc_load(dtype, &wide, at, 1, 1.0);
        return wide;
    }
    default:
        return v.u8;
    }
}

static void fill(const op_case_t *c, int member, int tensor, size_t n, uint8_t *at)
{
    size_t element = hvd_dtype_bytes(c->dtype);
    for (size_t i = 0; i < MIN(n, PERIOD); i++) {
        store(c->dtype, value_of(c, member, tensor, i), at + i * element);
    }
    for (size_t done = PERIOD; done < n; done += MIN(done, n - done)) {
        memcpy(at + done * element, at, MIN(done, n - done) * element);
    }
}

// --- What comes out -----------------------------------------------------------------------------

// The dtype's own arithmetic on exact doubles: what a store and a load would leave.
static double as_dtype(hvd_dtype_t dtype, double value)
{
    uint8_t at[8];
    store(dtype, value, at);
    return load(dtype, at);
}

static double combine(const op_case_t *c, double a, double b)
{
    switch (c->reduce) {
    case HVD_MIN:
        return MIN(a, b);
    case HVD_MAX:
        return MAX(a, b);
    case HVD_PRODUCT:
        return a * b;
    default:
        return a + b;
    }
}

// A factor as float32 and half types have it, on a value that the type can hold. On an integer:
// multiplied in double, cut toward zero, and of an int32 (or int64, for that type; the least one if
// it does not fit) the bits that the type has.
static double scale(const op_case_t *c, double value, double factor, int divisor)
{
    if (is_floating(c->dtype)) {
        double own = c->dtype == HVD_FLOAT64 ? factor : (double)(float)factor;
        value = factor == 1.0 ? value / divisor : as_dtype(c->dtype, value / divisor) * own;
        return factor == 1.0 ? value : as_dtype(c->dtype, value);
    }
    double scaled = value * factor / divisor;
    if (scaled == value) {
        return value;
    }
    double beyond = c->dtype == HVD_INT64 ? 0x1p63 : 0x1p31;
    double whole = trunc(scaled);
    return as_dtype(c->dtype, whole >= -beyond && whole < beyond ? whole : -beyond);
}

static double reduced_value(const op_case_t *c, int tensor, size_t i)
{
    double result = scale(c, value_of(c, 0, tensor, i), c->pre, 1);
    for (int m = 1; m < c->n_members; m++) {
        double next = combine(c, result, scale(c, value_of(c, m, tensor, i), c->pre, 1));
        result = is_floating(c->dtype) ? next : as_dtype(c->dtype, next);
    }
    return scale(c, result, c->post, c->reduce == HVD_AVERAGE ? c->n_members : 1);
}

// Sums of small numbers are exact, as are powers of two as factors. What remains is one rounding
// by other factors, and Adasum, whose dot products may be added up in any order.
static double tolerance(const op_case_t *c)
{
    static const double one_ulp[HVD_N_DTYPES] = {
        [HVD_FLOAT16] = 1e-3, [HVD_BFLOAT16] = 8e-3, [HVD_FLOAT32] = 2e-7, [HVD_FLOAT64] = 4e-16};
    static const double adasum[HVD_N_DTYPES] = {
        [HVD_FLOAT16] = 2e-3, [HVD_BFLOAT16] = 2e-2, [HVD_FLOAT32] = 2e-5, [HVD_FLOAT64] = 1e-11};
    bool power = (c->n_members & (c->n_members - 1)) == 0;
    if (!op_reduces(c->op)) {
        return 0;
    }
    if (c->reduce == HVD_ADASUM) {
        return adasum[c->dtype];
    }
    return c->reduce == HVD_AVERAGE && !power ? one_ulp[c->dtype] : 0;
}

static bool close_enough(const op_case_t *c, const uint8_t *got, const uint8_t *expected)
{
    double a = load(c->dtype, got);
    double b = load(c->dtype, expected);
    // Adasum subtracts: its error belongs to the size of what went in.
    return fabs(a - b) <= tolerance(c) * MAX(fabs(b), c->reduce == HVD_ADASUM ? 6 : 0);
}

typedef struct checker {
    rank_t *r;
    const op_case_t *c;
    int tensor;
    uint8_t table[PERIOD * 8]; // expected elements
} checker_t;

static void differs(const checker_t *k, size_t i, const uint8_t *got, const uint8_t *expected)
{
    char text[256];
    op_describe(k->c, text, sizeof text);
    check_failed(k->r, __FILE__, __LINE__, "%s: tensor %d, element %zu: expected %.17g, got %.17g",
                 text, k->tensor, i, load(k->c->dtype, expected), load(k->c->dtype, got));
}

// n elements at `got` (numbered from `number` in messages) must be the table's from `first` on.
static void check_run(const checker_t *k, const uint8_t *got, size_t n, size_t first, size_t number)
{
    size_t element = hvd_dtype_bytes(k->c->dtype);
    size_t j = first % PERIOD;
    for (size_t i = 0; i < n;) {
        size_t run = MIN(PERIOD - j, n - i);
        if (memcmp(got + i * element, k->table + j * element, run * element) != 0) {
            for (size_t e = 0; e < run; e++) {
                const uint8_t *at = got + (i + e) * element;
                const uint8_t *expected = k->table + (j + e) * element;
                if (memcmp(at, expected, element) != 0 && !close_enough(k->c, at, expected)) {
                    differs(k, number + i + e, at, expected);
                }
            }
        }
        i += run;
        j = 0;
    }
}

static void expect_copy_of(checker_t *k, int member)
{
    fill(k->c, member, k->tensor, PERIOD, k->table);
}

static void expect_reduced(checker_t *k)
{
    size_t element = hvd_dtype_bytes(k->c->dtype);
    for (size_t i = 0; i < PERIOD; i++) {
        store(k->c->dtype, reduced_value(k->c, k->tensor, i), k->table + i * element);
    }
}

// --- Shapes -------------------------------------------------------------------------------------

static size_t columns_of(const op_case_t *c)
{
    return c->n_dims < 2 ? 1 : c->columns;
}

// Rows that tensor t has on a member.
static int64_t rows_on(const op_case_t *c, int member, int tensor)
{
    int64_t rows = (int64_t)c->rows + (c->rows > 0 ? tensor : 0);
    if (c->n_dims == 0) {
        return 1;
    }
    if (c->op == HVD_ALLGATHER && rows > 0) {
        unsigned turn = (unsigned)member + (unsigned)tensor + c->salt;
        return turn % 5 == 4 ? 0 : rows + turn % 3;
    }
    return rows;
}

static bool splits_evenly(const op_case_t *c)
{
    return c->salt % 4 == 0;
}

// Rows that member `from` sends to member `to`: every third nothing, the others unevenly.
static int64_t split(const op_case_t *c, int from, int to)
{
    int64_t share = (int64_t)c->rows / c->n_members;
    if (splits_evenly(c)) {
        return share;
    }
    unsigned turn = (unsigned)from + 2 * (unsigned)to + c->salt;
    return c->rows == 0 || turn % 3 == 0 ? 0 : share + turn % 4;
}

// Splits need not use up all rows: one is left over now and then.
static int64_t exchanged_rows(const op_case_t *c, int member)
{
    int64_t rows = 0;
    for (int to = 0; to < c->n_members; to++) {
        rows += split(c, member, to);
    }
    return rows + (!splits_evenly(c) && c->salt % 3 == 0);
}

static int64_t scattered_rows(const op_case_t *c, int member, int tensor)
{
    int64_t rows = rows_on(c, 0, tensor);
    return rows / c->n_members + (member < rows % c->n_members);
}

static int64_t rows_in(const op_run_t *run, int tensor)
{
    return run->c.op == HVD_ALLTOALL ? exchanged_rows(&run->c, run->member)
                                     : rows_on(&run->c, run->member, tensor);
}

static int64_t rows_out(const op_run_t *run, int tensor)
{
    const op_case_t *c = &run->c;
    int64_t rows = 0;
    if (c->op == HVD_REDUCESCATTER) {
        return scattered_rows(c, run->member, tensor);
    }
    if (c->op != HVD_ALLGATHER && c->op != HVD_ALLTOALL) {
        return rows_in(run, tensor);
    }
    for (int m = 0; m < c->n_members; m++) {
        rows += c->op == HVD_ALLGATHER ? rows_on(c, m, tensor) : split(c, m, run->member);
    }
    return rows;
}

// --- Submitting ---------------------------------------------------------------------------------

static uint8_t *guarded(rank_t *r, size_t bytes, uint8_t **memory_p)
{
    *memory_p = malloc(bytes + 2 * GUARD_BYTES);
    CHECK(r, *memory_p != NULL);
    memset(*memory_p, GUARD, bytes + 2 * GUARD_BYTES);
    return *memory_p + GUARD_BYTES;
}

static void check_guards(rank_t *r, const uint8_t *memory, size_t bytes)
{
    for (size_t i = 0; i < GUARD_BYTES; i++) {
        CHECK_INT(r, memory[i], GUARD);
        CHECK_INT(r, memory[GUARD_BYTES + bytes + i], GUARD);
    }
}

static void *give_memory(void *arg, int tensor, int n_dims, const int64_t *shape)
{
    op_run_t *run = arg;
    case_tensor_t *t = &run->tensors[tensor];
    if (n_dims != run->c.n_dims || (n_dims > 0 && shape[0] != t->rows_out) || t->output != NULL) {
        return NULL; // and so the operation fails
    }
    t->output_memory = malloc(t->n_out * hvd_dtype_bytes(run->c.dtype) + 2 * GUARD_BYTES);
    if (t->output_memory == NULL) {
        return NULL;
    }
    memset(t->output_memory, GUARD, t->n_out * hvd_dtype_bytes(run->c.dtype) + 2 * GUARD_BYTES);
    t->output = t->output_memory + GUARD_BYTES;
    return t->output;
}

static void note_done(void *arg, hvd_handle_t handle, hvd_status_t status)
{
    op_run_t *run = arg;
    (void)handle;
    run->done_with = status;
    atomic_fetch_add(&run->n_done, 1);
}

static void prepare_tensor(rank_t *r, op_run_t *run, int t)
{
    const op_case_t *c = &run->c;
    case_tensor_t *tensor = &run->tensors[t];
    size_t element = hvd_dtype_bytes(c->dtype);
    size_t columns = columns_of(c);
    int64_t rows = rows_in(run, t);
    tensor->rows_out = rows_out(run, t);
    tensor->n_in = (size_t)rows * columns;
    tensor->n_out = (size_t)tensor->rows_out * columns;
    tensor->shape[0] = rows;
    tensor->shape[1] = (int64_t)columns;
    tensor->shape[2] = 1;
    tensor->input = guarded(r, tensor->n_in * element, &tensor->input_memory);
    fill(c, run->member, t, tensor->n_in, tensor->input);
    bool fits = c->op != HVD_ALLGATHER && c->op != HVD_ALLTOALL;
    if (c->form == FORM_IN_PLACE && fits) {
        tensor->output = tensor->input;
    } else if (c->form == FORM_IN_PLACE || c->form == FORM_OUT_OF_PLACE) {
        tensor->output = guarded(r, tensor->n_out * element, &tensor->output_memory);
    }
}

static int member_of(rank_t *r, const op_case_t *c)
{
    for (int m = 0; m < c->n_members; m++) {
        if (c->members[m] == r->rank) {
            return m;
        }
    }
    check_failed(r, __FILE__, __LINE__, "rank %d is no member of the case", r->rank);
}

void op_submit(rank_t *r, const op_case_t *c, const char *name, unsigned flags, op_run_t *run)
{
    bool forgets = run->forgets;
    *run = (op_run_t){.c = *c, .member = member_of(r, c), .forgets = forgets};
    run->n_tensors = c->op == HVD_BARRIER ? 0 : c->n_tensors;
    hvd_tensor_t tensors[MAX_GROUP];
    for (int t = 0; t < run->n_tensors; t++) {
        prepare_tensor(r, run, t);
        tensors[t] = (hvd_tensor_t){
            .input = run->tensors[t].input,
            .output = run->tensors[t].output,
            .n_dims = c->n_dims,
            .shape = run->tensors[t].shape,
        };
    }
    for (int m = 0; m < c->n_members; m++) {
        run->splits[m] = c->op == HVD_ALLTOALL ? (int32_t)split(c, run->member, m) : 0;
    }
    bool has_splits = c->op == HVD_ALLTOALL && !splits_evenly(c);
    hvd_request_t request = {
        .op = c->op,
        .name = name,
        .dtype = c->dtype,
        .reduce = c->reduce,
        .root = c->members[c->root],
        .process_set = c->set,
        .prescale = c->pre,
        .postscale = c->post,
        .tensors = run->n_tensors > 0 ? tensors : NULL,
        .n_tensors = run->n_tensors,
        .splits = has_splits ? run->splits : NULL,
        .n_splits = has_splits ? c->n_members : 0,
        .flags = flags | (c->pre != 1.0 || c->post != 1.0 ? HVD_SCALED : 0),
        .alloc = c->form == FORM_CALLBACK ? give_memory : NULL,
        .done = note_done,
        .arg = run,
    };
    CHECK_OK(r, hvd_submit(r->ctx, &request, &run->handle, r->text, sizeof r->text));
    if (run->forgets) {
        hvd_release(r->ctx, run->handle);
    }
}

// --- Checking -----------------------------------------------------------------------------------

static void wait_forgotten(rank_t *r, op_run_t *run)
{
    uint64_t deadline_ns = deadline_in_ms(CALL_MS);
    while (atomic_load(&run->n_done) == 0) {
        CHECK(r, clock_ns() < deadline_ns);
        sched_yield();
    }
    CHECK_STATUS(r, run->done_with, HVD_OK);
}

static void wait_handle(rank_t *r, op_run_t *run)
{
    hvd_status_t status = hvd_wait(r->ctx, run->handle, CALL_MS);
    hvd_result_t result;
    if (hvd_result(r->ctx, run->handle, &result) == HVD_OK) {
        snprintf(r->text, sizeof r->text, "%s", result.text);
        CHECK_INT(r, result.n_tensors, run->n_tensors);
    }
    if (status != HVD_OK) {
        char text[256];
        op_describe(&run->c, text, sizeof text);
        check_failed(r, __FILE__, __LINE__, "%s: %s (%s)", text, hvd_status_name(status), r->text);
    }
}

static void check_splits(rank_t *r, const op_run_t *run)
{
    hvd_result_t result;
    CHECK_OK(r, hvd_result(r->ctx, run->handle, &result));
    CHECK_INT(r, result.n_splits, run->c.n_members);
    for (int m = 0; m < run->c.n_members; m++) {
        CHECK_INT(r, result.received_splits[m], split(&run->c, m, run->member));
    }
}

static void check_shape(rank_t *r, op_run_t *run, int t)
{
    case_tensor_t *tensor = &run->tensors[t];
    void *data;
    int64_t shape[HVD_MAX_DIMS];
    CHECK_OK(r, hvd_output(r->ctx, run->handle, t, &data, shape));
    if (tensor->output == NULL) {
        tensor->output = data; // the handle's own
    }
    CHECK(r, data == tensor->output);
    if (run->c.n_dims > 0) {
        CHECK_INT(r, shape[0], tensor->rows_out);
    }
    for (int d = 1; d < run->c.n_dims; d++) {
        CHECK_INT(r, shape[d], tensor->shape[d]);
    }
}

// Member after member, each with its own values from its own place on.
static void check_blocks(checker_t *k, const op_run_t *run, const uint8_t *output)
{
    const op_case_t *c = k->c;
    size_t columns = columns_of(c);
    size_t number = 0;
    for (int m = 0; m < c->n_members; m++) {
        size_t first = 0;
        for (int to = 0; c->op == HVD_ALLTOALL && to < run->member; to++) {
            first += (size_t)split(c, m, to) * columns;
        }
        int64_t rows = c->op == HVD_ALLTOALL ? split(c, m, run->member) : rows_on(c, m, k->tensor);
        expect_copy_of(k, m);
        check_run(k, output + number * hvd_dtype_bytes(c->dtype), (size_t)rows * columns, first,
                  number);
        number += (size_t)rows * columns;
    }
}

// The dot products run over the whole tensor, so this one is computed whole.
static void check_adasum(checker_t *k, const case_tensor_t *tensor)
{
    const op_case_t *c = k->c;
    size_t bytes = tensor->n_in * hvd_dtype_bytes(c->dtype);
    uint8_t *inputs[MAX_RANKS];
    uint8_t *expected = malloc(bytes + 1);
    for (int m = 0; m < c->n_members; m++) {
        inputs[m] = malloc(bytes + 1);
        CHECK(k->r, inputs[m] != NULL && expected != NULL);
        fill(c, m, k->tensor, tensor->n_in, inputs[m]);
    }
    coll_args_t args = {
        .op = c->op,
        .dtype = c->dtype,
        .reduce = c->reduce,
        .scale_after = c->post != 1.0,
        .size = c->n_members,
        .bytes = bytes,
    };
    reference_run(&args, (const void *const *)inputs, c->pre, c->post, expected);
    for (size_t i = 0; i < tensor->n_in; i++) {
        const uint8_t *got = tensor->output + i * hvd_dtype_bytes(c->dtype);
        const uint8_t *wanted = expected + i * hvd_dtype_bytes(c->dtype);
        if (!close_enough(c, got, wanted)) {
            differs(k, i, got, wanted);
        }
    }
    for (int m = 0; m < c->n_members; m++) {
        free(inputs[m]);
    }
    free(expected);
}

static void check_output(rank_t *r, const op_run_t *run, int t)
{
    const op_case_t *c = &run->c;
    const case_tensor_t *tensor = &run->tensors[t];
    checker_t k = {.r = r, .c = c, .tensor = t};
    size_t first = 0;
    switch (c->op) {
    case HVD_ALLGATHER:
    case HVD_ALLTOALL:
        check_blocks(&k, run, tensor->output);
        return;
    case HVD_BROADCAST:
        expect_copy_of(&k, c->root);
        break;
    default:
        if (c->reduce == HVD_ADASUM) {
            check_adasum(&k, tensor);
            return;
        }
        expect_reduced(&k);
        for (int m = 0; c->op == HVD_REDUCESCATTER && m < run->member; m++) {
            first += (size_t)scattered_rows(c, m, t) * columns_of(c);
        }
    }
    check_run(&k, tensor->output, tensor->n_out, first, 0);
}

static void check_input_kept(rank_t *r, const op_run_t *run, int t)
{
    const case_tensor_t *tensor = &run->tensors[t];
    checker_t k = {.r = r, .c = &run->c, .tensor = t};
    expect_copy_of(&k, run->member);
    check_run(&k, tensor->input, tensor->n_in, 0, 0);
}

static void check_tensor(rank_t *r, op_run_t *run, int t)
{
    case_tensor_t *tensor = &run->tensors[t];
    size_t element = hvd_dtype_bytes(run->c.dtype);
    if (!run->forgets) {
        check_shape(r, run, t);
    }
    check_output(r, run, t);
    check_guards(r, tensor->input_memory, tensor->n_in * element);
    if (tensor->output_memory != NULL) {
        check_guards(r, tensor->output_memory, tensor->n_out * element);
    }
    if (tensor->output != tensor->input) {
        check_input_kept(r, run, t);
    }
}

void op_check(rank_t *r, op_run_t *run)
{
    if (run->forgets) {
        wait_forgotten(r, run);
    } else {
        wait_handle(r, run);
    }
    if (run->c.op == HVD_ALLTOALL && !run->forgets) {
        check_splits(r, run);
    }
    for (int t = 0; t < run->n_tensors; t++) {
        check_tensor(r, run, t);
    }
    if (!run->forgets) {
        hvd_release(r->ctx, run->handle);
        wait_forgotten(r, run); // the callback may run just after the wait ends
        CHECK_STATUS(r, hvd_poll(r->ctx, run->handle), HVD_UNKNOWN_HANDLE);
    }
    CHECK_INT(r, atomic_load(&run->n_done), 1);
    for (int t = 0; t < run->n_tensors; t++) {
        free(run->tensors[t].input_memory);
        free(run->tensors[t].output_memory);
    }
}

void op_run(rank_t *r, const op_case_t *c, const char *name)
{
    op_run_t run = {0};
    op_submit(r, c, name, HVD_WAITS, &run);
    op_check(r, &run);
}

// --- Describing and inventing -------------------------------------------------------------------

void op_describe(const op_case_t *c, char *text, size_t bytes)
{
    static const char *const forms[N_FORMS] = {"in place", "out of place", "library's output",
                                               "callback's output"};
    snprintf(text, bytes,
             "%s %s %s of %d x %zu x %zu (%d dims), %s, pre %g, post %g, root %d, set %d of %d, "
             "salt %u%s",
             hvd_op_name(c->op), op_reduces(c->op) ? hvd_reduce_name(c->reduce) : "",
             hvd_dtype_name(c->dtype), c->n_tensors, c->rows, columns_of(c), c->n_dims,
             forms[c->form], c->pre, c->post, c->root, c->set, c->n_members, c->salt,
             c->rounding ? ", rounding" : "");
}

static hvd_reduce_t random_reduce(dice_t *dice, const op_case_t *c)
{
    if (c->op == HVD_REDUCESCATTER) {
        return dice_below(dice, 2) ? HVD_SUM : HVD_AVERAGE;
    }
    hvd_reduce_t reduce = (hvd_reduce_t)dice_below(dice, HVD_N_REDUCES);
    return reduce == HVD_ADASUM ? HVD_SUM : reduce;
}

op_case_t op_random(dice_t *dice, int set, const int *members, int n_members, size_t max_bytes)
{
    static const hvd_op_t ops[] = {HVD_ALLREDUCE, HVD_ALLREDUCE, HVD_ALLREDUCE,     HVD_ALLGATHER,
                                   HVD_BROADCAST, HVD_ALLTOALL,  HVD_REDUCESCATTER, HVD_BARRIER};
    static const double factors[] = {1.0, 1.0, 1.0, 0.5, 2.0};
    op_case_t c = {
        .op = ops[dice_below(dice, N_ELEMENTS(ops))],
        .dtype = (hvd_dtype_t)dice_below(dice, HVD_N_DTYPES),
        .form = (form_t)dice_below(dice, N_FORMS),
        .set = set,
        .members = members,
        .n_members = n_members,
        .root = dice_below(dice, n_members),
        .pre = 1.0,
        .post = 1.0,
        .salt = (unsigned)dice_below(dice, 1000),
    };
    c.reduce = random_reduce(dice, &c);
    bool reduces = op_reduces(c.op);
    if (reduces && c.dtype != HVD_BOOL) {
        c.pre = factors[dice_below(dice, N_ELEMENTS(factors))];
        c.post = factors[dice_below(dice, N_ELEMENTS(factors))];
    }
    if (reduces && c.dtype == HVD_BOOL && c.reduce == HVD_AVERAGE) {
        c.reduce = HVD_SUM;
    }
    c.n_tensors = c.op == HVD_ALLTOALL || dice_below(dice, 4) > 0 ? 1 : 2 + dice_below(dice, 2);
    bool scalar = c.op == HVD_ALLREDUCE || c.op == HVD_BROADCAST;
    c.n_dims = scalar ? dice_below(dice, 4) : 1 + dice_below(dice, 3);
    c.columns = c.n_dims < 2 ? 1 : (size_t)dice_below(dice, 8);
    // Mostly small: the exponent is even, not the size.
    size_t limit = max_bytes / hvd_dtype_bytes(c.dtype) / MAX(c.columns, 1) / (size_t)c.n_tensors;
    int n_bits = 1;
    while (((size_t)2 << n_bits) <= limit) {
        n_bits++;
    }
    c.rows = dice_next(dice) % ((size_t)1 << dice_below(dice, n_bits + 1));
    if (c.op == HVD_ALLTOALL && splits_evenly(&c)) {
        c.rows = c.rows / (size_t)n_members * (size_t)n_members;
    }
    return c;
}
