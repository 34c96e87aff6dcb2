// SPDX-License-Identifier: Apache-2.0
//
// info_gpu_rank.c - a rank of the self test on GPUs: operations on known numbers, compared.
//
// Numbers are small and whole, so that results are exact in every type and in every order of
// additions. Tensors are still being written by their stream, over values that are wrong, when an
// operation is submitted, and results are read in the order of that stream: nothing waits, so a
// wait that is missing shows. A rank that stays away is ended by an alarm.
#define _GNU_SOURCE
#include "tools/info_gpu.h"

#include "coll/reduce.h"
#include "device/nccl.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define WAIT_MS 60000
#define ALARM_S 180 // longer than every wait below
#define OLD 0xA7    // in every byte that is not written
#define SPEED_ROUNDS 7
#define BUSY_BYTES (4 * MIB) // that the stream copies before the tensors' values
#define BY_NCCL "travel by NCCL"
#define NOT_BY_NCCL "not by NCCL: "

const selftest_row_t selftest_rows[SELFTEST_ROWS] = {
    {"allreduce, sum", HVD_ALLREDUCE, HVD_SUM},
    {"allreduce, average", HVD_ALLREDUCE, HVD_AVERAGE},
    {"allreduce, smallest", HVD_ALLREDUCE, HVD_MIN},
    {"allreduce, largest", HVD_ALLREDUCE, HVD_MAX},
    {"allreduce, product", HVD_ALLREDUCE, HVD_PRODUCT},
    {"allreduce, Adasum", HVD_ALLREDUCE, HVD_ADASUM},
    {"allgather", HVD_ALLGATHER, HVD_SUM},
    {"broadcast", HVD_BROADCAST, HVD_SUM},
    {"alltoall", HVD_ALLTOALL, HVD_SUM},
    {"reducescatter, sum", HVD_REDUCESCATTER, HVD_SUM},
};
const size_t selftest_sizes[SELFTEST_SIZES] = {1, 1000, 300001};
const size_t selftest_speeds[SELFTEST_SPEEDS] = {64 * KIB, MIB, 16 * MIB, 64 * MIB};

typedef struct tester {
    selftest_t *test;
    selftest_part_t *part;
    int rank, size;
    hvd_ctx_t *ctx;
    device_t *device;
    block_t *in, *out;              // on the device
    block_t *old, *values, *result; // pinned
    uint8_t *expected;
    err_t err;
} tester_t;

// One case: what is done, with how many elements.
typedef struct exercise {
    const selftest_row_t *row;
    hvd_dtype_t dtype;
    size_t n;
    size_t in_n, out_n; // of this rank
    int32_t splits[SELFTEST_RANKS];
} exercise_t;

// --- Numbers -------------------------------------------------------------------------------------

// Element i of what a rank brings.
static int value_of(const exercise_t *exercise, int rank, size_t i)
{
    hvd_reduce_t reduce = exercise->row->reduce;
    int any = (int)((i + (size_t)rank) % 5);
    if (exercise->dtype == HVD_BOOL) {
        return any % 2;
    }
    return reduce == HVD_PRODUCT   ? 1 + any % 2
           : reduce == HVD_AVERAGE ? (int)(i % 5) + 2 * rank // their average is whole
           : reduce == HVD_ADASUM  ? 1 + (int)(i % 5)        // of equal vectors: the vector
                                   : 1 + any;
}

// Of all ranks' elements i.
static int reduced(const tester_t *t, const exercise_t *exercise, size_t i)
{
    int sum = 0, product = 1, least = INT32_MAX, most = 0;
    for (int m = 0; m < t->size; m++) {
        int value = value_of(exercise, m, i);
        sum += value;
        product *= value;
        least = MIN(least, value);
        most = MAX(most, value);
    }
    switch (exercise->row->reduce) {
    case HVD_AVERAGE:
        return sum / t->size;
    case HVD_MIN:
    case HVD_ADASUM:
        return least;
    case HVD_MAX:
        return most;
    case HVD_PRODUCT:
        return product;
    default:
        return sum;
    }
}

// In the type: integers are cut as sums of them are.
static void encode(hvd_dtype_t dtype, int value, uint8_t *to)
{
    const int64_t whole = dtype == HVD_BOOL ? value != 0 : value;
    const float narrow = (float)value;
    const double real = value;
    if (dtype_is_half(dtype)) {
        acc_store(dtype, to, &narrow, 1, FINISH_NOTHING);
    } else if (dtype_is_floating(dtype)) {
        memcpy(to, dtype == HVD_FLOAT32 ? (const void *)&narrow : &real, hvd_dtype_bytes(dtype));
    } else {
        memcpy(to, &whole, hvd_dtype_bytes(dtype));
    }
}

static double decode(hvd_dtype_t dtype, const uint8_t *from)
{
    float narrow;
    double real;
    int64_t whole = 0;
    size_t bytes = hvd_dtype_bytes(dtype);
    bool is_signed = dtype == HVD_INT8 || dtype == HVD_INT16 || dtype == HVD_INT32;
    switch (dtype) {
    case HVD_FLOAT16:
    case HVD_BFLOAT16:
    case HVD_FLOAT32:
        acc_load(dtype, &narrow, from, 1, 1.0);
        return (double)narrow;
    case HVD_FLOAT64:
        memcpy(&real, from, sizeof real);
        return real;
    default:
        memcpy(&whole, from, bytes);
        if (is_signed) {
            int shift = 64 - 8 * (int)bytes;
            whole = (int64_t)((uint64_t)whole << shift) >> shift;
        }
        return (double)whole;
    }
}

// --- What goes in and comes out ------------------------------------------------------------------

// Rows of a member, of sizes that members may choose.
static size_t rows_of(const exercise_t *exercise, int member)
{
    return exercise->n + exercise->n % 2 * (size_t)member;
}

static void size_up(const tester_t *t, exercise_t *exercise)
{
    size_t all = 0;
    for (int m = 0; m < t->size; m++) {
        exercise->splits[m] = (int32_t)rows_of(exercise, m);
        all += rows_of(exercise, m);
    }
    size_t mine = rows_of(exercise, t->rank), odd = exercise->n % 2;
    switch (op_infos[exercise->row->op].layout) {
    case LAYOUT_GATHERED:
        exercise->in_n = mine;
        exercise->out_n = all;
        break;
    case LAYOUT_EXCHANGED:
        exercise->in_n = all;
        exercise->out_n = mine * (size_t)t->size;
        break;
    case LAYOUT_SCATTERED: // the first members get a row more
        exercise->in_n = exercise->n * (size_t)t->size + odd;
        exercise->out_n = exercise->n + (t->rank == 0 ? odd : 0);
        break;
    default:
        exercise->in_n = exercise->out_n = exercise->n;
    }
}

// Element i of the result on this rank.
static int expected_of(const tester_t *t, const exercise_t *exercise, size_t i)
{
    size_t at = 0, mine = rows_of(exercise, t->rank);
    int member = 0;
    switch (op_infos[exercise->row->op].layout) {
    case LAYOUT_GATHERED:
        while (i >= at + rows_of(exercise, member)) {
            at += rows_of(exercise, member++);
        }
        return value_of(exercise, member, i - at);
    case LAYOUT_EXCHANGED: // each member's block for this rank
        for (int m = 0; m < t->rank; m++) {
            at += rows_of(exercise, m);
        }
        return value_of(exercise, (int)(i / mine), at + i % mine);
    case LAYOUT_SCATTERED:
        at = (size_t)t->rank * exercise->n + (t->rank > 0 ? exercise->n % 2 : 0);
        return reduced(t, exercise, at + i);
    default:
        return op_has(exercise->row->op, OP_ROOTED) ? value_of(exercise, t->size - 1, i)
                                                    : reduced(t, exercise, i);
    }
}

// --- The device ----------------------------------------------------------------------------------

static void on_arrived(void *arg)
{
    atomic_store((atomic_bool *)arg, true);
}

// Copies n bytes from the device behind what its default stream has to do, and waits.
static hvd_status_t fetch(tester_t *t, void *from, void *to, size_t bytes)
{
    // Static: the driver may still call after this has given up.
    static atomic_bool has_arrived;
    mark_t *mark;
    device_copy_t copy = {.host = to, .device = from, .bytes = bytes};
    hvd_status_t status = device_mark(t->device, NULL, false, &mark, &t->err);
    if (status != HVD_OK) {
        return status;
    }
    atomic_store(&has_arrived, false);
    status = device_fetch(t->device, mark, &copy, 1, on_arrived, &has_arrived, NULL, &t->err);
    uint64_t deadline_ns = deadline_in_ms(WAIT_MS);
    while (status == HVD_OK && !atomic_load(&has_arrived)) {
        usleep(20);
        status = device_health(t->device, &t->err);
        if (status == HVD_OK && clock_ns() > deadline_ns) {
            status = fail(&t->err, HVD_TIMEOUT,
                          "a copy from GPU %d has not arrived within %d s: something in its stream "
                          "does not end",
                          device_ordinal(t->device), WAIT_MS / 1000);
        }
    }
    device_unmark(t->device, mark);
    return status;
}

static hvd_status_t store(tester_t *t, block_t *from, block_t *to, size_t bytes)
{
    device_copy_t copy = {.host = from->data, .device = to->data, .bytes = bytes};
    return device_store_on(t->device, &copy, NULL, from, &t->err);
}

static hvd_status_t take_memory(tester_t *t)
{
    size_t elements = (size_t)t->size * (selftest_sizes[SELFTEST_SIZES - 1] + (size_t)t->size);
    size_t bytes = MAX(elements * 8, selftest_speeds[SELFTEST_SPEEDS - 1]);
    block_t **blocks[] = {&t->in, &t->out, &t->old, &t->values, &t->result};
    hvd_status_t status = HVD_OK;
    for (size_t i = 0; i < N_ELEMENTS(blocks) && status == HVD_OK; i++) {
        status = device_take(t->device, bytes, i < 2, blocks[i], &t->err);
    }
    t->expected = malloc(bytes);
    if (status == HVD_OK && t->expected == NULL) {
        status = fail(&t->err, HVD_NO_MEMORY, "no memory for what is expected");
    }
    if (status == HVD_OK) {
        memset(t->old->data, OLD, bytes);
    }
    return status;
}

// --- One case ------------------------------------------------------------------------------------

// Runs it; results are in `out` then, in the order of the default stream.
static hvd_status_t run_request(tester_t *t, hvd_request_t *request, void *out)
{
    hvd_handle_t handle;
    hvd_result_t result;
    request->flags = HVD_ON_DEVICE;
    request->device = device_ordinal(t->device);
    hvd_status_t status = hvd_submit(t->ctx, request, &handle, t->err.text, sizeof t->err.text);
    if (status != HVD_OK) {
        return status;
    }
    status = hvd_wait_on(t->ctx, handle, NULL, WAIT_MS);
    if (status == HVD_TIMEOUT) {
        fail(&t->err, status, "it has not ended within %d s", WAIT_MS / 1000);
    } else if (status != HVD_OK && hvd_result(t->ctx, handle, &result) == HVD_OK) {
        fail(&t->err, status, "%s", result.text[0] != '\0' ? result.text : hvd_status_text(status));
    }
    if (status == HVD_OK && request->tensors[0].output == NULL) {
        status = hvd_fetch(t->ctx, handle, 0, out, NULL);
    }
    hvd_release(t->ctx, handle);
    return status;
}

static hvd_status_t run_exercise(tester_t *t, const exercise_t *exercise)
{
    size_t element = hvd_dtype_bytes(exercise->dtype);
    bool in_place = op_infos[exercise->row->op].layout == LAYOUT_WHOLE;
    block_t *out = in_place ? t->in : t->out;
    int64_t shape[] = {(int64_t)exercise->in_n};
    hvd_tensor_t tensor = {
        .input = t->in->data, .output = in_place ? t->in->data : NULL, .n_dims = 1, .shape = shape};
    hvd_request_t request = {.op = exercise->row->op,
                             .name = t->part->doing,
                             .dtype = exercise->dtype,
                             .reduce = exercise->row->reduce,
                             .root = t->size - 1,
                             .tensors = &tensor,
                             .n_tensors = 1};
    if (op_infos[exercise->row->op].layout == LAYOUT_EXCHANGED) {
        request.splits = exercise->splits;
        request.n_splits = t->size;
    }
    for (size_t i = 0; i < exercise->in_n; i++) {
        encode(exercise->dtype, value_of(exercise, t->rank, i), t->values->data + i * element);
    }
    hvd_status_t status = store(t, t->old, t->in, MAX(exercise->in_n * element, BUSY_BYTES));
    status = status == HVD_OK ? store(t, t->old, t->out, exercise->out_n * element) : status;
    status = status == HVD_OK ? store(t, t->values, t->in, exercise->in_n * element) : status;
    status = status == HVD_OK ? run_request(t, &request, t->out->data) : status;
    return status == HVD_OK ? fetch(t, out->data, t->result->data, exercise->out_n * element)
                            : status;
}

// NCCL multiplies by 1/n before it adds: exact, unless n is no power of two.
static bool is_near(const tester_t *t, const exercise_t *exercise, double got, double expected)
{
    bool rounds = exercise->row->reduce == HVD_AVERAGE && (t->size & (t->size - 1)) != 0;
    double unit = exercise->dtype == HVD_FLOAT32 ? 0x1p-23 : 0x1p-52;
    return rounds && t->test->wants_nccl && dtype_is_floating(exercise->dtype) &&
           fabs(got - expected) <= t->size * unit * fabs(expected);
}

// What is there now must not be believed if the device's work was cut short meanwhile.
static hvd_status_t check_landed(tester_t *t)
{
    hvd_status_t status = hvd_settle(t->ctx, WAIT_MS);
    if (status != HVD_OK && hvd_health(t->ctx, t->err.text, sizeof t->err.text) == HVD_OK) {
        fail(&t->err, status, "%s", hvd_status_text(status));
    }
    return status;
}

// The first element that is wrong; out_n: none.
static size_t first_wrong(tester_t *t, const exercise_t *exercise)
{
    size_t element = hvd_dtype_bytes(exercise->dtype);
    for (size_t i = 0; i < exercise->out_n; i++) {
        encode(exercise->dtype, expected_of(t, exercise, i), t->expected + i * element);
    }
    if (memcmp(t->expected, t->result->data, exercise->out_n * element) == 0) {
        return exercise->out_n;
    }
    for (size_t i = 0; i < exercise->out_n; i++) {
        const uint8_t *got = t->result->data + i * element, *want = t->expected + i * element;
        if (memcmp(got, want, element) != 0 &&
            !is_near(t, exercise, decode(exercise->dtype, got), decode(exercise->dtype, want))) {
            return i;
        }
    }
    return exercise->out_n;
}

static void begin(tester_t *t, const char *what)
{
    snprintf(t->part->doing, sizeof t->part->doing, "%s", what);
    alarm(ALARM_S);
}

static void note_failure(tester_t *t, const char *why)
{
    if (t->part->failure[0] == '\0') {
        snprintf(t->part->failure, sizeof t->part->failure, "%s: rank %d: %.450s", t->part->doing,
                 t->rank, why);
    }
}

// False: nothing more can be tried.
static bool try_case(tester_t *t, int row, hvd_dtype_t dtype, size_t n)
{
    exercise_t exercise = {.row = &selftest_rows[row], .dtype = dtype, .n = n};
    char text[256];
    snprintf(text, sizeof text, "%s of %s, %zu element%s", exercise.row->name,
             hvd_dtype_name(dtype), n, plural(n));
    begin(t, text);
    size_up(t, &exercise);
    hvd_status_t status = run_exercise(t, &exercise);
    status = status == HVD_OK ? check_landed(t) : status;
    size_t element = hvd_dtype_bytes(dtype),
           wrong = status == HVD_OK ? first_wrong(t, &exercise) : 0;
    bool is_right = status == HVD_OK && wrong == exercise.out_n;
    if (status != HVD_OK) {
        note_failure(t, t->err.text);
    } else if (!is_right) {
        snprintf(text, sizeof text, "element %zu is %.9g, expected %.9g", wrong,
                 decode(dtype, t->result->data + wrong * element),
                 decode(dtype, t->expected + wrong * element));
        note_failure(t, text);
    }
    uint8_t *cell = &t->part->cells[row][dtype];
    *cell = is_right && *cell != CELL_WRONG ? CELL_RIGHT : CELL_WRONG;
    t->part->n_results++;
    t->part->n_wrong += !is_right;
    return status == HVD_OK || hvd_health(t->ctx, NULL, 0) == HVD_OK;
}

// Is there such a combination, and does it belong to this way?
static bool is_wanted(const tester_t *t, const selftest_row_t *row, hvd_dtype_t dtype)
{
    bool averages = row->reduce == HVD_AVERAGE;
    if ((averages && dtype == HVD_BOOL) ||
        (row->reduce == HVD_ADASUM && !dtype_is_floating(dtype))) {
        return false;
    }
    return !t->test->wants_nccl || nccl_takes(row->op, dtype, averages ? HVD_SUM : row->reduce,
                                              averages ? 1.0 / t->size : 1.0);
}

static bool try_all(tester_t *t)
{
    for (int row = 0; row < SELFTEST_ROWS; row++) {
        for (int dtype = 0; dtype < HVD_N_DTYPES; dtype++) {
            for (int size = 0; size < SELFTEST_SIZES; size++) {
                if (is_wanted(t, &selftest_rows[row], (hvd_dtype_t)dtype) &&
                    !try_case(t, row, (hvd_dtype_t)dtype, selftest_sizes[size])) {
                    return false;
                }
            }
        }
    }
    return true;
}

// --- Speeds --------------------------------------------------------------------------------------

static int compare_times(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Of an allreduce of float32, from its submission until the device is done; the median.
static bool time_allreduce(tester_t *t, size_t bytes, double *us_p)
{
    double took_us[SPEED_ROUNDS];
    char text[64];
    snprintf(text, sizeof text, "allreduce of %zu KiB, timed", bytes / KIB);
    begin(t, text);
    int64_t shape[] = {(int64_t)(bytes / sizeof(float))};
    hvd_tensor_t tensor = {
        .input = t->in->data, .output = t->in->data, .n_dims = 1, .shape = shape};
    hvd_request_t request = {.op = HVD_ALLREDUCE,
                             .name = t->part->doing,
                             .dtype = HVD_FLOAT32,
                             .reduce = HVD_SUM,
                             .tensors = &tensor,
                             .n_tensors = 1};
    memset(t->values->data, 0, bytes);
    hvd_status_t status = store(t, t->values, t->in, bytes);
    for (int i = -2; i < SPEED_ROUNDS && status == HVD_OK; i++) { // two to warm up
        uint64_t since_ns = clock_ns();
        status = run_request(t, &request, NULL);
        status = status == HVD_OK ? fetch(t, t->in->data, t->result->data, 1) : status;
        took_us[MAX(i, 0)] = (double)(clock_ns() - since_ns) / 1e3;
    }
    if (status != HVD_OK) {
        note_failure(t, t->err.text);
        return false;
    }
    qsort(took_us, SPEED_ROUNDS, sizeof *took_us, compare_times);
    *us_p = took_us[SPEED_ROUNDS / 2];
    return true;
}

// Of pinned memory, there and back.
static bool time_copies(tester_t *t)
{
    size_t bytes = selftest_speeds[SELFTEST_SPEEDS - 1];
    begin(t, "copies, timed");
    hvd_status_t status = fetch(t, t->in->data, t->result->data, 1);
    uint64_t start_ns = clock_ns();
    status = status == HVD_OK ? store(t, t->values, t->in, bytes) : status;
    status = status == HVD_OK ? fetch(t, t->in->data, t->result->data, 1) : status;
    uint64_t there_ns = clock_ns();
    status = status == HVD_OK ? fetch(t, t->in->data, t->result->data, bytes) : status;
    uint64_t back_ns = clock_ns();
    if (status != HVD_OK) {
        note_failure(t, t->err.text);
        return false;
    }
    t->part->to_device_gbs = (double)bytes / (double)(there_ns - start_ns);
    t->part->to_host_gbs = (double)bytes / (double)(back_ns - there_ns);
    return true;
}

static bool time_all(tester_t *t)
{
    for (int i = 0; i < SELFTEST_SPEEDS; i++) {
        if (!time_allreduce(t, selftest_speeds[i], &t->part->speeds_us[i])) {
            return false;
        }
    }
    return time_copies(t);
}

// --- A rank --------------------------------------------------------------------------------------

// The log tells which way tensors take, and why.
static void on_log(void *arg, int level, const char *line)
{
    selftest_part_t *part = arg;
    const char *why = strstr(line, NOT_BY_NCCL);
    (void)level;
    part->by_nccl |= strstr(line, BY_NCCL) != NULL;
    if (why != NULL) {
        snprintf(part->why_host, sizeof part->why_host, "%.*s",
                 (int)strcspn(why + strlen(NOT_BY_NCCL), "\n"), why + strlen(NOT_BY_NCCL));
    }
}

static bool open_all(tester_t *t, const char *const *env)
{
    hvd_options_t options = {.env = env, .log = on_log, .log_arg = t->part};
    begin(t, "opening the GPU");
    hvd_status_t status = device_open(t->rank % t->test->n_gpus, &t->device, &t->err);
    if (status == HVD_OK) {
        device_name(t->device, t->part->gpu, sizeof t->part->gpu);
        status = take_memory(t);
    }
    if (status == HVD_OK) {
        begin(t, "meeting the other ranks");
        status = hvd_init(&options, &t->ctx, t->err.text, sizeof t->err.text);
    }
    if (status != HVD_OK) {
        note_failure(t, t->err.text);
    }
    return status == HVD_OK;
}

static void close_all(tester_t *t)
{
    block_t *const blocks[] = {t->in, t->out, t->old, t->values, t->result};
    for (size_t i = 0; i < N_ELEMENTS(blocks); i++) {
        device_give_back(t->device, blocks[i]);
    }
    device_close(t->device);
    free(t->expected);
}

int selftest_rank(void *selftest, int rank, const char *const *env)
{
    selftest_t *test = selftest;
    tester_t t = {.test = test, .part = &test->parts[rank], .rank = rank, .size = test->ranks};
    if (!open_all(&t, env)) {
        close_all(&t);
        return 1;
    }
    bool goes_on = try_case(&t, 0, HVD_FLOAT32, 1); // whereby they find out which way it is
    if (goes_on && (!test->wants_nccl || t.part->by_nccl)) {
        goes_on = try_all(&t) && time_all(&t);
    }
    if (goes_on) {
        begin(&t, "leaving");
    }
    hvd_shutdown(t.ctx);
    close_all(&t);
    t.part->is_over = goes_on;
    return goes_on ? 0 : 1;
}
