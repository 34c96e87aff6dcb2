// SPDX-License-Identifier: Apache-2.0
//
// test_reduce.c - the arithmetic, for every instruction set of this processor, against reference.c.
//
// Whole numbers where results must be exact; random ones where a bound on the error is enough; all
// 65536 values of the half types where conversion is the point.
#include "coll/reduce_kernels.h"
#include "coll/testing.h"

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>
#undef fail // cmocka's; base.h has another

enum { MAX_K = 5, MAX_N = 1031, GUARD_BYTES = 64, ROOM_BYTES = MAX_N * 8 + 2 * GUARD_BYTES };

static const size_t counts[] = {0, 1, 7, 15, 16, 64, 67, 1000, MAX_N};
static const hvd_reduce_t reduces[] = {HVD_SUM, HVD_MIN, HVD_MAX, HVD_PRODUCT, HVD_AVERAGE};
static const fold_t fold_of[HVD_N_REDUCES] = {
    [HVD_SUM] = FOLD_SUM,
    [HVD_MIN] = FOLD_MIN,
    [HVD_MAX] = FOLD_MAX,
    [HVD_PRODUCT] = FOLD_PRODUCT,
};

static uint64_t next_random(void)
{
    static uint64_t state = 42; // tests run in order: the same numbers every time
    uint64_t x = (state += 0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

// A value of the half type with magnitude 0 .. 3.
static uint16_t small_half(hvd_dtype_t dtype, int value)
{
    static const uint16_t float16[] = {0, 0x3c00, 0x4000, 0x4200},
                          bfloat16[] = {0, 0x3f80, 0x4000, 0x4040};
    const uint16_t magnitude = (dtype == HVD_FLOAT16 ? float16 : bfloat16)[abs(value)];
    return (uint16_t)(magnitude | (value < 0 ? 0x8000 : 0));
}

static void fill(hvd_dtype_t dtype, char *data, size_t n)
{
    const size_t elem_bytes = hvd_dtype_bytes(dtype);
    for (size_t i = 0; i < n; i++) {
        const uint64_t bits = next_random();
        const int value = (int)(bits >> 40) % 7 - 3;
        const float as_float = (float)value;
        const double as_double = value;
        const uint16_t as_half = small_half(dtype, value);
        const void *from = dtype == HVD_FLOAT32   ? (const void *)&as_float
                           : dtype == HVD_FLOAT64 ? (const void *)&as_double
                           : dtype_is_half(dtype) ? (const void *)&as_half
                                                  : (const void *)&bits;
        memcpy(data + i * elem_bytes, from, elem_bytes);
    }
}

// The same by reference.c: an allreduce among k members.
static void expect(hvd_dtype_t dtype, hvd_reduce_t reduce, const void *const *inputs, int k,
                   size_t n, double pre, double post, void *out)
{
    const coll_args_t args = {.op = HVD_ALLREDUCE,
                              .dtype = dtype,
                              .reduce = reduce,
                              .size = k,
                              .bytes = n * hvd_dtype_bytes(dtype)};
    reference_run(&args, inputs, pre, post, out);
}

// --- Every type, operation, number of inputs and length ------------------------------------------

static char inputs_memory[MAX_K][ROOM_BYTES], also_memory[ROOM_BYTES];
static char result_memory[ROOM_BYTES] __attribute__((aligned(CACHE_LINE)));
static char expected[ROOM_BYTES];

// Unaligned on purpose, with guards on both sides.
static char *place(char *memory, size_t shift)
{
    return memory + GUARD_BYTES / 2 + shift;
}

static void check_guards(const char *result, size_t bytes, const char *what)
{
    for (int i = 1; i <= 8; i++) {
        if (result[-i] != 0x55 || result[bytes + (size_t)i - 1] != 0x55) {
            print_error("%s writes beside its result\n", what);
            assert_true(!"guards");
        }
    }
}

static void check_bytes(const void *result, size_t bytes, const char *kernels, hvd_dtype_t dtype,
                        hvd_reduce_t reduce, int k, size_t n)
{
    if (memcmp(result, expected, bytes) != 0) {
        print_error("%s: %s of %d times %zu %s is wrong\n", kernels, hvd_reduce_name(reduce), k, n,
                    hvd_dtype_name(dtype));
        assert_true(!"equal");
    }
}

static void test_every_kernel(void **state)
{
    (void)state;
    const kernels_t *tables[MAX_KERNEL_TABLES];
    const int n_tables = kernels_supported(tables);
    for (int dtype = 0; dtype < HVD_N_DTYPES; dtype++) {
        for (size_t c = 0; c < N_ELEMENTS(counts); c++) {
            const size_t n = counts[c], bytes = n * hvd_dtype_bytes((hvd_dtype_t)dtype);
            const void *inputs[MAX_K];
            for (int j = 0; j < MAX_K; j++) {
                inputs[j] = place(inputs_memory[j], (size_t)j % 3);
                fill((hvd_dtype_t)dtype, place(inputs_memory[j], (size_t)j % 3), n);
            }
            for (int i = 0; i < 4 * MAX_K * n_tables; i++) {
                const int k = i / 4 % MAX_K + 1;
                const kernels_t *table = tables[i / 4 / MAX_K];
                const bool raw_flags = dtype == HVD_BOOL && k == 1; // a single input stays as it is
                char *result = place(result_memory, 1);
                char *also = i % 2 ? place(also_memory, 3) : NULL;
                memset(result_memory, 0x55, sizeof result_memory);
                memset(also_memory, 0x55, sizeof also_memory);
                expect((hvd_dtype_t)dtype, reduces[i % 4], inputs, k, n, 1, 1, expected);
                table->fold[dtype][fold_of[reduces[i % 4]]](result, also, inputs, k, n, 1);
                if (!raw_flags) {
                    check_bytes(result, bytes, table->name, (hvd_dtype_t)dtype, reduces[i % 4], k,
                                n);
                }
                check_guards(result, bytes, table->name);
                if (also != NULL) {
                    assert_memory_equal(also, result, bytes);
                    check_guards(also, bytes, table->name);
                }
            }
        }
    }
}

static void test_factors(void **state)
{
    (void)state;
    static const double factors[] = {1, 0.5, 3, 1.0 / 3, -2};
    enum { N = 333 };
    for (int dtype = 0; dtype < HVD_N_DTYPES; dtype++) {
        const void *inputs[3];
        for (int j = 0; j < 3; j++) {
            inputs[j] = place(inputs_memory[j], 0);
            fill((hvd_dtype_t)dtype, place(inputs_memory[j], 0), N);
        }
        const size_t bytes = N * hvd_dtype_bytes((hvd_dtype_t)dtype);
        for (size_t i = 0; i < N_ELEMENTS(reduces) * 25; i++) {
            const hvd_reduce_t reduce = reduces[i / 25];
            const double pre = factors[i / 5 % 5], post = factors[i % 5];
            // A third before the sum is not exact in float32: bounds are another test's business.
            if (dtype == HVD_FLOAT32 && pre == 1.0 / 3) {
                continue;
            }
            expect((hvd_dtype_t)dtype, reduce, inputs, 3, N, pre, post, expected);
            reduce_many((hvd_dtype_t)dtype, reduce, place(result_memory, 0), place(also_memory, 0),
                        inputs, 3, N, pre, (finish_t){post, 1});
            check_bytes(place(result_memory, 0), bytes, "reduce_many", (hvd_dtype_t)dtype, reduce,
                        3, N);
            assert_memory_equal(place(also_memory, 0), expected, bytes);
        }
    }
}

static void test_result_in_place_of_an_input(void **state)
{
    (void)state;
    enum { N = 150 };
    static char own[ROOM_BYTES];
    for (int dtype = 0; dtype < HVD_N_DTYPES; dtype++) {
        const size_t bytes = N * hvd_dtype_bytes((hvd_dtype_t)dtype);
        for (int target = 0; target < 3; target++) {
            for (int scaled = 0; scaled < 2; scaled++) {
                const double pre = scaled ? 0.5 : 1;
                const void *inputs[3];
                for (int j = 0; j < 3; j++) {
                    inputs[j] = j == target ? own : inputs_memory[j];
                    fill((hvd_dtype_t)dtype, j == target ? own : inputs_memory[j], N);
                }
                expect((hvd_dtype_t)dtype, HVD_SUM, inputs, 3, N, pre, 1, expected);
                reduce_many((hvd_dtype_t)dtype, HVD_SUM, own, NULL, inputs, 3, N, pre,
                            FINISH_NOTHING);
                check_bytes(own, bytes, "in place", (hvd_dtype_t)dtype, HVD_SUM, 3, N);
            }
        }
    }
}

static void test_accumulators(void **state)
{
    (void)state;
    enum { N = 1031 };
    static char acc[N * 8];
    for (int d = 0; d < HVD_N_DTYPES; d++) {
        const hvd_dtype_t dtype = (hvd_dtype_t)d;
        const void *inputs[3] = {inputs_memory[0], inputs_memory[1] + 1, inputs_memory[2]};
        for (int j = 0; j < 3; j++) {
            fill(dtype, inputs_memory[j] + j % 2, N);
        }
        for (size_t i = 0; i < 4; i++) {
            const double pre = i % 2 ? 0.5 : 1, post = i < 2 ? 1 : 1.0 / 3;
            acc_load(dtype, acc, inputs[0], N, pre);
            acc_add_scaled(dtype, reduces[i], acc, inputs[1], N, pre);
            if (pre == 1) {
                acc_add_scaled(dtype, reduces[i], acc, inputs[2], N, 1.0);
            } else {
                acc_add_scaled(dtype, reduces[i], acc, inputs[2], N, pre);
            }
            acc_store(dtype, result_memory, acc, N, (finish_t){post, 1});
            expect(dtype, reduces[i], inputs, 3, N, pre, post, expected);
            check_bytes(result_memory, N * hvd_dtype_bytes(dtype), "accumulators", dtype,
                        reduces[i], 3, N);
        }
    }
}

// --- Errors of floating sums ---------------------------------------------------------------------

static void test_sums_of_floats_are_near(void **state)
{
    (void)state;
    enum { N = 500 };
    static float in32[MAX_K][N], out32[N], want32[N];
    static double in64[MAX_K][N], out64[N], want64[N];
    const void *inputs32[MAX_K], *inputs64[MAX_K];
    for (int j = 0; j < MAX_K; j++) {
        inputs32[j] = in32[j];
        inputs64[j] = in64[j];
        for (int i = 0; i < N; i++) {
            in64[j][i] = (double)(int64_t)next_random() * 0x1p-60;
            in32[j][i] = (float)in64[j][i];
        }
    }
    const double pre = 0.7, post = 1.0 / MAX_K;
    const finish_t finish = {post, 1};
    reduce_many(HVD_FLOAT32, HVD_SUM, out32, NULL, inputs32, MAX_K, N, pre, finish);
    reduce_many(HVD_FLOAT64, HVD_SUM, out64, NULL, inputs64, MAX_K, N, pre, finish);
    expect(HVD_FLOAT32, HVD_SUM, inputs32, MAX_K, N, pre, post, want32);
    expect(HVD_FLOAT64, HVD_SUM, inputs64, MAX_K, N, pre, post, want64);
    for (int i = 0; i < N; i++) {
        double magnitude = 0;
        for (int j = 0; j < MAX_K; j++) {
            magnitude += fabs(in64[j][i]) * pre * post;
        }
        assert_true(fabs((double)out32[i] - (double)want32[i]) <=
                    (MAX_K + 2) * 0x1p-24 * magnitude);
        assert_true(fabs(out64[i] - want64[i]) <= (MAX_K + 2) * 0x1p-53 * magnitude);
    }
}

static void test_an_average_of_equal_floats_is_that_float(void **state)
{
    (void)state;
    float nine[3] = {9, 21, 33};
    reduce_finish(HVD_FLOAT32, nine, nine, 3, (finish_t){1, 3});
    assert_true(nine[0] == 3 && nine[1] == 7 && nine[2] == 11);
}

// For 49, 1 / n * n is not 1.
static void test_an_average_of_equal_integers_is_that_integer(void **state)
{
    (void)state;
    for (int32_t n = 1; n < 3000; n++) {
        int32_t values[2] = {n, -7 * n};
        reduce_finish(HVD_INT32, values, values, 2, (finish_t){1, n});
        assert_int_equal(values[0], 1);
        assert_int_equal(values[1], -7);
    }
}

static float random_float(void)
{
    return (float)(int32_t)next_random() * 0x1p-20f;
}

// A factor does what `tensor * factor` does, where the factor is a float32.
static void test_factors_of_float32_multiply_like_float32(void **state)
{
    (void)state;
    static const double factors[] = {0.1, 1.0 / 3, 3.7, -0.3};
    enum { N = 77 };
    float a[N], b[N], before[N], after[N];
    const void *inputs[2] = {a, b};
    for (size_t f = 0; f < N_ELEMENTS(factors); f++) {
        for (int i = 0; i < N; i++) {
            a[i] = random_float();
            b[i] = random_float();
        }
        const float factor = (float)factors[f];
        reduce_many(HVD_FLOAT32, HVD_SUM, after, NULL, inputs, 2, N, 1, (finish_t){factors[f], 1});
        reduce_many(HVD_FLOAT32, HVD_SUM, before, NULL, inputs, 2, N, factors[f], FINISH_NOTHING);
        for (int i = 0; i < N; i++) {
            const volatile float sum = a[i] + b[i], scaled_a = a[i] * factor,
                                 scaled_b = b[i] * factor;
            assert_true(after[i] == sum * factor);
            assert_true(before[i] == scaled_a + scaled_b);
        }
    }
}

// The sum of half types is a tensor of half types before it is multiplied.
static void test_factors_of_halves_multiply_what_a_tensor_can_hold(void **state)
{
    (void)state;
    static const hvd_dtype_t halves[] = {HVD_FLOAT16, HVD_BFLOAT16};
    enum { N = 77 };
    uint16_t a[N], b[N], sum[N], got[N];
    const void *inputs[2] = {a, b};
    for (int h = 0; h < 2; h++) {
        for (int i = 0; i < N; i++) {
            const float x = random_float() * 0x1p-9f, y = random_float() * 0x1p-9f;
            acc_store(halves[h], a + i, &x, 1, FINISH_NOTHING);
            acc_store(halves[h], b + i, &y, 1, FINISH_NOTHING);
        }
        reduce_many(halves[h], HVD_SUM, sum, NULL, inputs, 2, N, 1, FINISH_NOTHING);
        reduce_scale(halves[h], sum, sum, N, 0.1);
        reduce_many(halves[h], HVD_SUM, got, NULL, inputs, 2, N, 1, (finish_t){0.1, 1});
        assert_memory_equal(got, sum, sizeof sum);
        reduce_many(halves[h], HVD_SUM, got, NULL, inputs, 2, N, 0.1, FINISH_NOTHING);
        reduce_scale(halves[h], a, a, N, 0.1);
        reduce_scale(halves[h], b, b, N, 0.1);
        reduce_many(halves[h], HVD_SUM, sum, NULL, inputs, 2, N, 1, FINISH_NOTHING);
        assert_memory_equal(got, sum, sizeof sum);
    }
}

// --- Half types ----------------------------------------------------------------------------------

static bool is_half_nan(hvd_dtype_t dtype, uint16_t bits)
{
    return (bits & 0x7fff) > (dtype == HVD_FLOAT16 ? 0x7c00 : 0x7f80);
}

static bool same_half(hvd_dtype_t dtype, uint16_t a, uint16_t b)
{
    return a == b ||
           (is_half_nan(dtype, a) && is_half_nan(dtype, b) && (a & 0x8000) == (b & 0x8000));
}

static const hvd_dtype_t halves[] = {HVD_FLOAT16, HVD_BFLOAT16};
enum { ALL_HALVES = 65536 };
static uint16_t all_halves[ALL_HALVES], half_results[ALL_HALVES], half_expected[ALL_HALVES];
static float widened[ALL_HALVES];

static void check_halves(hvd_dtype_t dtype, const char *kernels, const char *what,
                         const uint16_t *want)
{
    for (int i = 0; i < ALL_HALVES; i++) {
        if (!same_half(dtype, half_results[i], want[i])) {
            print_error("%s: %s of %s %#x gives %#x, not %#x\n", kernels, what,
                        hvd_dtype_name(dtype), i, half_results[i], want[i]);
            assert_true(!"equal");
        }
    }
}

static void test_every_half_survives_widening(void **state)
{
    (void)state;
    const kernels_t *tables[MAX_KERNEL_TABLES];
    const int n_tables = kernels_supported(tables);
    for (int i = 0; i < ALL_HALVES; i++) {
        all_halves[i] = (uint16_t)i;
    }
    for (int t = 0; t < n_tables; t++) {
        for (size_t h = 0; h < N_ELEMENTS(halves); h++) {
            tables[t]->widen[halves[h]](widened, all_halves, ALL_HALVES, 1);
            tables[t]->narrow[halves[h]](half_results, widened, ALL_HALVES, 1);
            check_halves(halves[h], tables[t]->name, "widening and narrowing", all_halves);
        }
    }
}

// Factors bring results of every kind: rounded up, down and to even, denormal, infinite.
static void test_every_half_times_a_factor(void **state)
{
    (void)state;
    static const double factors[] = {1.0 / 3, 0.5, 0x1p-12, 1.0009765625, 4097, 0x1p-24, 1e30};
    const kernels_t *tables[MAX_KERNEL_TABLES];
    const int n_tables = kernels_supported(tables);
    const void *inputs[1] = {all_halves};
    for (size_t h = 0; h < N_ELEMENTS(halves); h++) {
        for (size_t f = 0; f < N_ELEMENTS(factors); f++) {
            expect(halves[h], HVD_SUM, inputs, 1, ALL_HALVES, 1, factors[f], half_expected);
            for (int t = 0; t < n_tables; t++) {
                tables[t]->scale[halves[h]](half_results, all_halves, ALL_HALVES, factors[f]);
                check_halves(halves[h], tables[t]->name, "scaling", half_expected);
                tables[t]->fold[halves[h]][FOLD_SUM](half_results, NULL, inputs, 1, ALL_HALVES,
                                                     factors[f]);
                check_halves(halves[h], tables[t]->name, "folding and scaling", half_expected);
            }
        }
    }
}

// A float exactly between two neighbours goes to the even one, a little less or more to the nearer.
static void test_ties_go_to_even(void **state)
{
    (void)state;
    const kernels_t *tables[MAX_KERNEL_TABLES];
    const int n_tables = kernels_supported(tables);
    for (size_t h = 0; h < N_ELEMENTS(halves); h++) {
        const int infinity = halves[h] == HVD_FLOAT16 ? 0x7c00 : 0x7f80;
        tables[0]->widen[halves[h]](widened, all_halves, ALL_HALVES, 1);
        for (int i = 0; i + 1 < infinity; i++) {
            const float middle =
                widened[i] / 2 + widened[i + 1] / 2; // exact: one bit more than a half has
            const float near_[3] = {nextafterf(middle, 0), middle, nextafterf(middle, INFINITY)};
            const uint16_t want[3] = {(uint16_t)i, (uint16_t)(i + i % 2), (uint16_t)(i + 1)};
            for (int t = 0; t < n_tables; t++) {
                uint16_t got[3];
                tables[t]->narrow[halves[h]](got, near_, 3, 1);
                const bool is_exact = middle != widened[i] && middle != widened[i + 1];
                if (is_exact && memcmp(got, want, sizeof got) != 0) {
                    print_error("%s rounds between %s %#x and the next wrongly\n", tables[t]->name,
                                hvd_dtype_name(halves[h]), i);
                    assert_true(!"ties");
                }
            }
        }
    }
}

static void test_nans_stay_nans(void **state)
{
    (void)state;
    static const uint32_t nans[] = {0x7f800001, 0x7fffffff, 0xff800001,
                                    0xffffffff, 0x7fc00000, 0x7f80ffff};
    const kernels_t *tables[MAX_KERNEL_TABLES];
    const int n_tables = kernels_supported(tables);
    for (int t = 0; t < n_tables; t++) {
        for (size_t h = 0; h < N_ELEMENTS(halves); h++) {
            uint16_t got[N_ELEMENTS(nans)];
            tables[t]->narrow[halves[h]](got, nans, N_ELEMENTS(nans), 1);
            for (size_t i = 0; i < N_ELEMENTS(nans); i++) {
                assert_true(is_half_nan(halves[h], got[i]));
            }
        }
    }
}

static void test_halves_round_once(void **state)
{
    (void)state;
    // 2048 + 1 is halfway and would stay 2048 if rounded at each step; so for bfloat16 with 256.
    const uint16_t big[2] = {0x6800, 0x4380}, one[2] = {0x3c00, 0x3f80}, want[2] = {0x6801, 0x4381};
    for (size_t h = 0; h < N_ELEMENTS(halves); h++) {
        const void *inputs[3] = {&big[h], &one[h], &one[h]};
        uint16_t sum;
        reduce_many(halves[h], HVD_SUM, &sum, NULL, inputs, 3, 1, 1, FINISH_NOTHING);
        assert_int_equal(sum, want[h]);
    }
}

// --- Corners -------------------------------------------------------------------------------------

static void test_a_nan_wins_min_and_max(void **state)
{
    (void)state;
    const float numbers[17] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    float nans[17], result[17];
    const kernels_t *tables[MAX_KERNEL_TABLES];
    const int n_tables = kernels_supported(tables);
    for (int i = 0; i < 17; i++) {
        nans[i] = NAN;
    }
    for (int i = 0; i < 4 * n_tables; i++) {
        const void *inputs[2] = {i % 2 ? nans : numbers, i % 2 ? numbers : nans};
        tables[i / 4]->fold[HVD_FLOAT32][i & 2 ? FOLD_MIN : FOLD_MAX](result, NULL, inputs, 2, 17,
                                                                      1);
        assert_true(isnan(result[0]) && isnan(result[16]));
    }
}

static void test_any_byte_but_zero_is_true(void **state)
{
    (void)state;
    const uint8_t a[4] = {2, 2, 0, 0}, b[4] = {1, 0, 4, 0}, either[4] = {1, 1, 1, 0},
                  both[4] = {1, 0, 0, 0};
    uint8_t result[4];
    reduce_pair(HVD_BOOL, HVD_SUM, result, a, b, 4);
    assert_memory_equal(result, either, 4);
    reduce_pair(HVD_BOOL, HVD_PRODUCT, result, a, b, 4);
    assert_memory_equal(result, both, 4);
}

// As PyTorch and NumPy convert a double: by int32 and its low bits, or by int64.
static void test_integer_factors_truncate_and_wrap(void **state)
{
    (void)state;
    const int32_t values[6] = {7, -7, 1, INT32_MAX, INT32_MIN, 0};
    int32_t result[6];
    reduce_scale(HVD_INT32, result, values, 6, 0.5);
    assert_true(result[0] == 3 && result[1] == -3 && result[2] == 0);
    reduce_scale(HVD_INT32, result, values, 6, 4);
    assert_true(result[3] == INT32_MIN && result[4] == INT32_MIN && result[0] == 28);
    reduce_scale(HVD_INT32, result, values, 6, NAN);
    assert_true(result[0] == INT32_MIN && result[4] == INT32_MIN);
    const uint8_t small[2] = {200, 3};
    uint8_t scaled[2];
    reduce_scale(HVD_UINT8, scaled, small, 2, 2);
    assert_true(scaled[0] == (200 * 2) % 256 && scaled[1] == 6);
    reduce_scale(HVD_UINT8, scaled, small, 2, -1);
    assert_true(scaled[0] == 256 - 200 && scaled[1] == 256 - 3);
    reduce_scale(HVD_UINT8, scaled, small, 2, 1e10);
    assert_true(scaled[0] == 0 && scaled[1] == 0);
    const int64_t large = INT64_MAX;
    int64_t kept;
    reduce_scale(HVD_INT64, &kept, &large, 1, 2);
    assert_true(kept == INT64_MIN);
}

static void test_adasum(void **state)
{
    (void)state;
    enum { N = 37 };
    double a[N], b[N], sum[N], zero[N] = {0};
    float a32[N], b32[N], sum32[N];
    for (int i = 0; i < N; i++) {
        a[i] = i % 2 ? i : 0;
        b[i] = i % 2 ? 0 : i + 1;
        a32[i] = (float)a[i];
        b32[i] = (float)b[i];
    }
    reduce_adasum(HVD_FLOAT64, sum, a, b, N); // orthogonal: they add up
    reduce_adasum(HVD_FLOAT32, sum32, a32, b32, N);
    for (int i = 0; i < N; i++) {
        assert_true(sum[i] == a[i] + b[i] && (double)sum32[i] == a[i] + b[i]);
    }
    reduce_adasum(HVD_FLOAT64, sum, a, a, N); // equal: nothing new
    assert_memory_equal(sum, a, sizeof a);
    reduce_adasum(HVD_FLOAT64, sum, a, zero, N);
    assert_memory_equal(sum, a, sizeof a);
    reduce_adasum(HVD_FLOAT64, sum, zero, zero, N);
    assert_memory_equal(sum, zero, sizeof zero);
    for (int i = 0; i < N; i++) {
        b[i] = i * 0.37 - 3;
    }
    reduce_adasum(HVD_FLOAT64, sum, a, b, N);
    reduce_adasum(HVD_FLOAT64, b, a, b, N); // in place of an operand
    assert_memory_equal(sum, b, sizeof b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_kernel),
        cmocka_unit_test(test_factors),
        cmocka_unit_test(test_result_in_place_of_an_input),
        cmocka_unit_test(test_accumulators),
        cmocka_unit_test(test_sums_of_floats_are_near),
        cmocka_unit_test(test_an_average_of_equal_floats_is_that_float),
        cmocka_unit_test(test_an_average_of_equal_integers_is_that_integer),
        cmocka_unit_test(test_factors_of_float32_multiply_like_float32),
        cmocka_unit_test(test_factors_of_halves_multiply_what_a_tensor_can_hold),
        cmocka_unit_test(test_every_half_survives_widening),
        cmocka_unit_test(test_every_half_times_a_factor),
        cmocka_unit_test(test_ties_go_to_even),
        cmocka_unit_test(test_nans_stay_nans),
        cmocka_unit_test(test_halves_round_once),
        cmocka_unit_test(test_a_nan_wins_min_and_max),
        cmocka_unit_test(test_any_byte_but_zero_is_true),
        cmocka_unit_test(test_integer_factors_truncate_and_wrap),
        cmocka_unit_test(test_adasum),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
