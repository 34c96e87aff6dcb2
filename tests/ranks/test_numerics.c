// SPDX-License-Identifier: Apache-2.0
//
// test_numerics.c - HOROVOD_CHECK_NUMERICS: what is NaN or infinite on one rank is named there,
// with its tensor, and nowhere else; numbers of every type that are just finite are left alone.
#include "cases.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>

#define N 1000

static struct {
    pthread_mutex_t lock;
    char text[16 * 1024];
} lines = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void keep_line(void *arg, int level, const char *line)
{
    (void)arg;
    (void)level;
    pthread_mutex_lock(&lines.lock);
    size_t len = strlen(lines.text);
    snprintf(lines.text + len, sizeof lines.text - len, "%s\n", line);
    pthread_mutex_unlock(&lines.lock);
}

static int n_lines_with(const char *part)
{
    int n = 0;
    pthread_mutex_lock(&lines.lock);
    for (const char *at = lines.text; (at = strstr(at, part)) != NULL; at++) {
        n++;
    }
    pthread_mutex_unlock(&lines.lock);
    return n;
}

static void open_with_log(rank_t *r)
{
    lines.text[0] = '\0';
    rank_step(r, "init");
    CHECK_OK(r, rank_try_open(r, &(hvd_options_t){.log = keep_line}));
}

static void sum(rank_t *r, const char *name, hvd_dtype_t dtype, void *data, int64_t n)
{
    const hvd_tensor_t tensor = {.input = data, .output = data, .shape = &n, .n_dims = 1};
    const hvd_request_t request = {.op = HVD_ALLREDUCE,
                                   .reduce = HVD_SUM,
                                   .dtype = dtype,
                                   .name = name,
                                   .where = "train.py:41",
                                   .tensors = &tensor,
                                   .n_tensors = 1};
    CHECK_OK(r, rank_call(r, &request));
}

// The last rank has the bad numbers; all get them, only that one is told.
static void named_where_it_begins(rank_t *r, void *arg)
{
    (void)arg;
    bool is_bad = r->rank == r->size - 1;
    float values[N];
    double doubles[N];
    open_with_log(r);
    for (int i = 0; i < N; i++) {
        values[i] = (float)i;
        doubles[i] = i;
    }
    sum(r, "good", HVD_FLOAT32, values, N);
    CHECK_INT(r, n_lines_with("NaN or infinite"), 0);
    values[17] = is_bad ? NAN : 17;
    values[18] = is_bad ? -INFINITY : 18;
    doubles[N - 1] = is_bad ? INFINITY : 0;
    sum(r, "gradient", HVD_FLOAT32, values, N);
    CHECK(r, isnan(values[17]) && isinf(values[18]));
    sum(r, "later", HVD_FLOAT64, doubles, N);
    CHECK_INT(r, n_lines_with("NaN or infinite"), is_bad);
    CHECK_INT(r,
              n_lines_with("'gradient' with 2 of 1000 elements NaN or infinite, the first at 17, "
                           "submitted at train.py:41"),
              is_bad);
    rank_close(r);
}

// Whatever the type: the largest finite number is one, the next one is not.
static void every_type(rank_t *r, void *arg)
{
    (void)arg;
    static const struct {
        hvd_dtype_t dtype;
        uint64_t finite, infinite;
    } types[] = {{HVD_FLOAT16, 0x7bff, 0x7c00},
                 {HVD_BFLOAT16, 0x7f7f, 0x7f80},
                 {HVD_FLOAT32, 0x7f7fffff, 0x7f800000},
                 {HVD_FLOAT64, 0x7fefffffffffffff, 0x7ff0000000000000},
                 {HVD_INT32, 0x7f7fffff, 0x7f800000}};
    for (size_t i = 0; i < N_ELEMENTS(types); i++) {
        uint64_t finite = r->rank == 0 ? types[i].finite : 0;
        uint64_t infinite = r->rank == 0 ? types[i].infinite : 0;
        open_with_log(r);
        sum(r, "finite", types[i].dtype, &finite, 1);
        CHECK_INT(r, n_lines_with("NaN or infinite"), 0);
        sum(r, "infinite", types[i].dtype, &infinite, 1);
        CHECK_INT(r, n_lines_with("'infinite' with 1 of 1"),
                  r->rank == 0 && types[i].dtype != HVD_INT32);
        rank_close(r);
    }
}

static const subtest_t subtests[] = {
    {.name = "named where it begins", .fn = named_where_it_begins, .min_ranks = 2},
    {.name = "every type", .fn = every_type},
};

int main(int argc, char **argv)
{
    return ranks_main(argc, argv, subtests, (int)N_ELEMENTS(subtests));
}
