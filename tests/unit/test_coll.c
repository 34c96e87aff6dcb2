// SPDX-License-Identifier: Apache-2.0
//
// test_coll.c - every algorithm, for every number of members up to 17, against reference.c.
//
// All members live in this process. Links are rings of a few bytes in memory that take and give a
// random part of what is asked for, members progress in random order, and everything follows from a
// seed that failures print. A round in which nothing moves, with links in a generous mood, is a
// deadlock. Values are whole numbers small enough that sums of floating types are exact.
#include "coll/testing.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>
#undef fail // cmocka's; base.h has another

enum { MAX_MEMBERS = 17 };

// --- Chance --------------------------------------------------------------------------------------

static uint64_t next_random(uint64_t *state)
{
    uint64_t x = (*state += 0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

static size_t random_below(uint64_t *state, size_t n)
{
    return (size_t)(next_random(state) % n);
}

// --- Links in memory -----------------------------------------------------------------------------

typedef struct world world_t;

typedef struct ring {
    uint8_t *data;
    size_t at, filled;
} ring_t;

typedef struct mem_link {
    net_link_t link;
    world_t *world;
    ring_t *out, *in;
    bool is_broken;
} mem_link_t;

struct world {
    int n;
    uint64_t chance;
    size_t ring_bytes;
    bool is_generous;                       // links take and give all they can
    ring_t rings[MAX_MEMBERS][MAX_MEMBERS]; // [from][to]
    mem_link_t links[MAX_MEMBERS][MAX_MEMBERS];
    exec_t *execs[MAX_MEMBERS];
};

static size_t some_of(world_t *world, size_t bytes)
{
    if (world->is_generous || bytes == 0) {
        return bytes;
    }
    return random_below(&world->chance, 4) == 0 ? random_below(&world->chance, bytes + 1) : bytes;
}

static ssize_t mem_send(net_link_t *link, const void *data, size_t bytes)
{
    mem_link_t *mem = (mem_link_t *)link;
    ring_t *ring = mem->out;
    if (mem->is_broken) {
        return fail(&link->err, HVD_PEER_LOST, "the cable is cut");
    }
    bytes = some_of(mem->world, MIN(bytes, mem->world->ring_bytes - ring->filled));
    for (size_t i = 0; i < bytes; i++) {
        ring->data[(ring->at + ring->filled + i) % mem->world->ring_bytes] =
            ((const uint8_t *)data)[i];
    }
    ring->filled += bytes;
    return (ssize_t)bytes;
}

static ssize_t mem_peek(net_link_t *link, const void **data_p)
{
    mem_link_t *mem = (mem_link_t *)link;
    if (mem->is_broken) {
        return fail(&link->err, HVD_PEER_LOST, "the cable is cut");
    }
    *data_p = mem->in->data + mem->in->at;
    return (ssize_t)some_of(mem->world, MIN(mem->in->filled, mem->world->ring_bytes - mem->in->at));
}

static void mem_consume(net_link_t *link, size_t bytes)
{
    mem_link_t *mem = (mem_link_t *)link;
    assert_true(bytes <= mem->in->filled);
    mem->in->at = (mem->in->at + bytes) % mem->world->ring_bytes;
    mem->in->filled -= bytes;
}

static ssize_t mem_recv(net_link_t *link, void *data, size_t bytes)
{
    const void *from = NULL;
    ssize_t n = mem_peek(link, &from);
    if (n > 0) {
        n = (ssize_t)MIN((size_t)n, bytes);
        memcpy(data, from, (size_t)n);
        mem_consume(link, (size_t)n);
    }
    return n;
}

static const link_ops_t mem_ops = {
    .send = mem_send, .recv = mem_recv, .peek = mem_peek, .consume = mem_consume};

static void world_open(world_t *world, int n, size_t ring_bytes, uint64_t seed)
{
    *world = (world_t){.n = n, .chance = seed, .ring_bytes = ring_bytes};
    for (int a = 0; a < n; a++) {
        world->execs[a] = exec_new();
        assert_non_null(world->execs[a]);
        for (int b = 0; b < n; b++) {
            world->rings[a][b].data = malloc(ring_bytes);
            world->links[a][b] = (mem_link_t){
                .link = {.ops = &mem_ops, .transport = "memory", .peer = b, .lane = LANE_DATA},
                .world = world,
                .out = &world->rings[a][b],
                .in = &world->rings[b][a],
            };
        }
    }
}

static void world_close(world_t *world)
{
    for (int a = 0; a < world->n; a++) {
        exec_free(world->execs[a]);
        for (int b = 0; b < world->n; b++) {
            free(world->rings[a][b].data);
        }
    }
}

typedef struct link_arg {
    world_t *world;
    int member;
} link_arg_t;

static net_link_t *link_of(void *arg, int member, err_t *err)
{
    const link_arg_t *link_arg = arg;
    if (member == link_arg->member || member < 0 || member >= link_arg->world->n) {
        fail(err, HVD_INVALID_ARGUMENT, "member %d has no link to %d", link_arg->member, member);
        return NULL;
    }
    return &link_arg->world->links[link_arg->member][member].link;
}

// Lets every member progress, in random order. Returns how many are not finished, or -1 on error.
static int one_round(world_t *world, bool *is_done, bool *moved_p, err_t *err)
{
    int order[MAX_MEMBERS] = {0}, n_left = 0;
    for (int i = 0; i < world->n; i++) {
        const int j = (int)random_below(&world->chance, (size_t)i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    for (int i = 0; i < world->n; i++) {
        const int m = order[i];
        if (is_done[m]) {
            continue;
        }
        const hvd_status_t status = exec_progress(world->execs[m], err);
        if (status != HVD_OK && status != HVD_IN_PROGRESS) {
            return -1;
        }
        is_done[m] = status == HVD_OK;
        n_left += !is_done[m];
        *moved_p |= is_done[m] || exec_moved(world->execs[m]);
    }
    return n_left;
}

// Runs until all are finished. False: `text` has what went wrong.
static bool run_all(world_t *world, char *text, size_t bytes)
{
    bool is_done[MAX_MEMBERS] = {false};
    err_t err = {0};
    for (;;) {
        bool moved = false;
        const int n_left = one_round(world, is_done, &moved, &err);
        if (n_left == 0) {
            return true;
        }
        if (n_left < 0) {
            snprintf(text, bytes, "%s", err.text);
            return false;
        }
        if (moved) {
            world->is_generous = false;
        } else if (!world->is_generous) {
            world->is_generous = true;
        } else {
            break;
        }
    }
    size_t at = (size_t)snprintf(text, bytes, "deadlock: ");
    for (int m = 0; m < world->n && at < bytes; m++) {
        at += (size_t)snprintf(text + at, bytes - at, "[member %d] ", m);
        if (at < bytes && !is_done[m]) {
            exec_describe(world->execs[m], text + at, bytes - at);
            at += strlen(text + at);
        }
    }
    return false;
}

// --- Cases ---------------------------------------------------------------------------------------

typedef struct setting {
    const algorithm_t *algorithm;
    int n;
    size_t elements; // of the tensor, or about that many per block
    hvd_dtype_t dtype;
    hvd_reduce_t reduce;
    bool in_place;
    double pre, post;
    size_t segment_bytes, ring_bytes;
    uint64_t seed;
} setting_t;

typedef struct member {
    coll_args_t args;
    plan_t plan;
    size_t input_bytes, output_bytes;
    uint8_t *input, *output, *tmp, *acc;
    uint8_t *original; // the input as it was
    size_t send_bytes[MAX_MEMBERS], recv_bytes[MAX_MEMBERS];
    link_arg_t link_arg;
} member_t;

typedef struct group {
    member_t members[MAX_MEMBERS];
    size_t blocks[MAX_MEMBERS];
} group_t;

static void report(const setting_t *s, const char *what)
{
    print_error(
        "%s by %s, %d members, %zu elements, %s, %s%s, pre %g, post %g, segment %zu, ring %zu, "
        "seed %#llx: %s\n",
        hvd_op_name(s->algorithm->op), s->algorithm->name, s->n, s->elements,
        hvd_dtype_name(s->dtype), hvd_reduce_name(s->reduce), s->in_place ? ", in place" : "",
        s->pre, s->post, s->segment_bytes, s->ring_bytes, (unsigned long long)s->seed, what);
}

#define CHECK(setting, condition, what)                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            report((setting), (what));                                                             \
            assert_true(!#condition);                                                              \
        }                                                                                          \
    } while (0)

static uint16_t small_half(hvd_dtype_t dtype, int value)
{
    static const uint16_t float16[] = {0, 0x3c00, 0x4000, 0x4200},
                          bfloat16[] = {0, 0x3f80, 0x4000, 0x4040};
    const uint16_t magnitude = (dtype == HVD_FLOAT16 ? float16 : bfloat16)[abs(value)];
    return (uint16_t)(magnitude | (value < 0 ? 0x8000 : 0));
}

// Whole numbers of -3 .. 3 for floating types, any bits for integers.
static void fill(hvd_dtype_t dtype, uint8_t *data, size_t bytes, uint64_t *chance)
{
    const size_t elem_bytes = hvd_dtype_bytes(dtype);
    for (size_t at = 0; at < bytes; at += elem_bytes) {
        const uint64_t bits = next_random(chance);
        const int value = (int)(bits >> 40) % 7 - 3;
        const float as_float = (float)value;
        const double as_double = value;
        const uint16_t as_half = small_half(dtype, value);
        const uint8_t as_flag = bits & 1;
        const void *from = dtype == HVD_FLOAT32   ? (const void *)&as_float
                           : dtype == HVD_FLOAT64 ? (const void *)&as_double
                           : dtype_is_half(dtype) ? (const void *)&as_half
                           : dtype == HVD_BOOL    ? (const void *)&as_flag
                                                  : (const void *)&bits;
        memcpy(data + at, from, elem_bytes);
    }
}

static size_t total(const size_t *sizes, int n)
{
    size_t sum = 0;
    for (int i = 0; i < n; i++) {
        sum += sizes[i];
    }
    return sum;
}

// Sizes of everything, for all members alike.
static void set_sizes(const setting_t *s, group_t *g, uint64_t *chance)
{
    const hvd_op_t op = s->algorithm->op;
    const size_t elem_bytes = hvd_dtype_bytes(s->dtype);
    const int root = (int)random_below(chance, (size_t)s->n);
    const bool equal = (s->algorithm->flags & NEEDS_EQUAL_BLOCKS) != 0;
    for (int i = 0; i < s->n; i++) {
        g->blocks[i] = random_below(chance, s->elements + 1) * elem_bytes;
        for (int j = 0; j < s->n; j++) {
            const size_t n = equal ? s->elements : random_below(chance, s->elements + 1);
            g->members[i].send_bytes[j] = g->members[j].recv_bytes[i] = n * elem_bytes;
        }
    }
    for (int m = 0; m < s->n; m++) {
        member_t *member = &g->members[m];
        const size_t bytes = op == HVD_BARRIER ? 0 : s->elements * elem_bytes;
        member->args = (coll_args_t){
            .op = op,
            .dtype = s->dtype,
            .reduce = s->reduce,
            .scale_after = s->post != 1,
            .member = m,
            .size = s->n,
            .root = root,
            .bytes = bytes,
            .blocks = g->blocks,
            .send_bytes = member->send_bytes,
            .recv_bytes = member->recv_bytes,
            .equal_blocks = equal,
            .segment_bytes = s->segment_bytes,
        };
        const size_t all_blocks = total(g->blocks, s->n);
        member->input_bytes = op == HVD_ALLGATHER       ? g->blocks[m]
                              : op == HVD_REDUCESCATTER ? all_blocks
                              : op == HVD_ALLTOALL      ? total(member->send_bytes, s->n)
                                                        : bytes;
        member->output_bytes = op == HVD_ALLGATHER       ? all_blocks
                               : op == HVD_REDUCESCATTER ? g->blocks[m]
                               : op == HVD_ALLTOALL      ? total(member->recv_bytes, s->n)
                                                         : bytes;
    }
}

// Exactly as many bytes as needed, so that the address sanitizer sees one too many.
static uint8_t *memory(size_t bytes)
{
    uint8_t *data = malloc(MAX(bytes, 1));
    assert_non_null(data);
    memset(data, 0xee, MAX(bytes, 1));
    return data;
}

static void set_up(const setting_t *s, world_t *world, group_t *g)
{
    uint64_t chance = s->seed;
    err_t err = {0};
    set_sizes(s, g, &chance);
    for (int m = 0; m < s->n; m++) {
        member_t *member = &g->members[m];
        CHECK(s, coll_plan(s->algorithm, &member->args, &member->plan, &err) == HVD_OK, err.text);
        const bool gathers = s->algorithm->op == HVD_ALLGATHER;
        member->output = memory(member->output_bytes);
        member->input = !s->in_place ? memory(member->input_bytes)
                        : gathers    ? member->output + total(g->blocks, m)
                                     : member->output;
        member->tmp = memory(member->plan.tmp_bytes);
        member->acc = memory(member->plan.acc_bytes);
        member->original = memory(member->input_bytes);
        fill(s->dtype, member->original, member->input_bytes, &chance);
        memcpy(member->input, member->original, member->input_bytes);
        member->link_arg = (link_arg_t){world, m};
        const exec_run_t run = {
            .plan = &member->plan,
            .buffers = {[BUF_INPUT] = member->input,
                        [BUF_OUTPUT] = member->output,
                        [BUF_TMP] = member->tmp,
                        [BUF_ACC] = member->acc},
            .dtype = s->dtype,
            .reduce = s->reduce,
            .prescale = s->pre,
            .finish = {s->post, 1},
            .batch = (uint32_t)s->seed,
            .segment_bytes = s->segment_bytes,
            .link_of = link_of,
            .arg = &member->link_arg,
        };
        CHECK(s, exec_start(world->execs[m], &run, &err) == HVD_OK, err.text);
    }
}

static void tear_down(const setting_t *s, group_t *g)
{
    for (int m = 0; m < s->n; m++) {
        member_t *member = &g->members[m];
        plan_free(&member->plan);
        if (!s->in_place) {
            free(member->input);
        }
        free(member->output);
        free(member->tmp);
        free(member->acc);
        free(member->original);
    }
}

static bool nearly_equal(hvd_dtype_t dtype, const uint8_t *a, const uint8_t *b, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += hvd_dtype_bytes(dtype)) {
        float af = 0, bf = 0;
        double ad = 0, bd = 0;
        if (dtype == HVD_FLOAT32) {
            memcpy(&af, a + at, sizeof af);
            memcpy(&bf, b + at, sizeof bf);
            ad = af, bd = bf;
        } else {
            memcpy(&ad, a + at, sizeof ad);
            memcpy(&bd, b + at, sizeof bd);
        }
        const double difference = ad > bd ? ad - bd : bd - ad;
        if (!(difference <= 1e-4)) {
            return false;
        }
    }
    return true;
}

static void check_results(const setting_t *s, const world_t *world, const group_t *g)
{
    for (int m = 0; m < s->n; m++) {
        const member_t *member = &g->members[m];
        const void *inputs[MAX_MEMBERS];
        uint8_t *expected = memory(member->output_bytes);
        for (int i = 0; i < s->n; i++) {
            const member_t *other = &g->members[i];
            inputs[i] = other->original +
                        (s->algorithm->op == HVD_ALLTOALL ? total(other->send_bytes, m) : 0);
            CHECK(s, world->rings[m][i].filled == 0, "bytes are left in a link");
        }
        reference_run(&member->args, inputs, s->pre, s->post, expected);
        const bool same =
            s->reduce == HVD_ADASUM
                ? nearly_equal(s->dtype, expected, member->output, member->output_bytes)
                : memcmp(expected, member->output, member->output_bytes) == 0;
        free(expected);
        CHECK(s, same, "wrong result");
        if (s->algorithm->op == HVD_ALLREDUCE) {
            CHECK(s, memcmp(member->output, g->members[0].output, member->output_bytes) == 0,
                  "members differ");
        }
        if (!s->in_place) {
            CHECK(s, memcmp(member->input, member->original, member->input_bytes) == 0,
                  "the input has changed");
        }
    }
}

static void run_setting(const setting_t *s, world_t *world)
{
    static group_t g;
    char text[4096];
    memset(&g, 0, sizeof g);
    world->chance = s->seed;
    set_up(s, world, &g);
    CHECK(s, run_all(world, text, sizeof text), text);
    check_results(s, world, &g);
    tear_down(s, &g);
}

// --- Every algorithm -----------------------------------------------------------------------------

typedef struct kind {
    hvd_dtype_t dtype;
    hvd_reduce_t reduce;
} kind_t;

static const kind_t kinds[] = {
    {HVD_FLOAT32, HVD_SUM},  {HVD_FLOAT32, HVD_MIN},   {HVD_FLOAT64, HVD_AVERAGE},
    {HVD_INT32, HVD_SUM},    {HVD_INT64, HVD_MAX},     {HVD_INT8, HVD_PRODUCT},
    {HVD_UINT8, HVD_SUM},    {HVD_BOOL, HVD_SUM},      {HVD_UINT16, HVD_MIN},
    {HVD_FLOAT16, HVD_SUM},  {HVD_BFLOAT16, HVD_SUM},  {HVD_FLOAT16, HVD_PRODUCT},
    {HVD_BFLOAT16, HVD_MAX}, {HVD_INT16, HVD_PRODUCT}, {HVD_FLOAT64, HVD_PRODUCT},
    {HVD_FLOAT16, HVD_MIN},
};
static const kind_t adasum_kinds[] = {{HVD_FLOAT32, HVD_ADASUM}, {HVD_FLOAT64, HVD_ADASUM}};

// The next kind the algorithm can do exactly.
static kind_t pick_kind(const algorithm_t *algorithm, uint64_t *chance)
{
    if (algorithm->flags & NEEDS_ADASUM) {
        return adasum_kinds[random_below(chance, N_ELEMENTS(adasum_kinds))];
    }
    for (;;) {
        const kind_t kind = kinds[random_below(chance, N_ELEMENTS(kinds))];
        const bool reduces = algorithm->op == HVD_ALLREDUCE || algorithm->op == HVD_REDUCESCATTER;
        const bool rounds =
            dtype_is_half(kind.dtype) && kind.reduce != HVD_MIN && kind.reduce != HVD_MAX;
        if (!reduces || !rounds || (algorithm->flags & ROUNDS_ONCE)) {
            return kind;
        }
    }
}

static void run_sizes(const algorithm_t *algorithm, int n, world_t *world, uint64_t *chance)
{
    const size_t sizes[] = {0, 1, 3, (size_t)n - 1, (size_t)n, 2 * (size_t)n + 1, 61, 300, 1025};
    static const double factors[] = {1, 1, 0.5, 3};
    static const size_t segments[] = {8, 64, 200, 1024, 1 << 20};
    const bool may_be_in_place = algorithm->op == HVD_ALLREDUCE || algorithm->op == HVD_BROADCAST ||
                                 algorithm->op == HVD_ALLGATHER;
    const bool reduces = algorithm->op == HVD_ALLREDUCE || algorithm->op == HVD_REDUCESCATTER;
    const bool may_prescale = reduces && !(algorithm->flags & NEEDS_NO_PRESCALE);
    for (size_t i = 0; i < N_ELEMENTS(sizes); i++) {
        // Short ones are cheap, and where blocks vanish the plans differ most.
        const int n_runs = (may_be_in_place ? 2 : 1) * (sizes[i] < 20 ? 3 : 1);
        for (int run = 0; run < n_runs; run++) {
            const bool in_place = may_be_in_place && run % 2 == 1;
            const kind_t kind = pick_kind(algorithm, chance);
            const setting_t setting = {
                .algorithm = algorithm,
                .n = n,
                .elements = sizes[i],
                .dtype = kind.dtype,
                .reduce = kind.reduce,
                .in_place = in_place,
                .pre = may_prescale ? factors[random_below(chance, N_ELEMENTS(factors))] : 1,
                .post = reduces ? factors[random_below(chance, N_ELEMENTS(factors))] : 1,
                .segment_bytes = segments[random_below(chance, N_ELEMENTS(segments))],
                .ring_bytes = world->ring_bytes,
                .seed = next_random(chance),
            };
            run_setting(&setting, world);
        }
    }
}

static void test_every_algorithm(void **state)
{
    (void)state;
    static const size_t ring_sizes[] = {1, 7, 40, 250, 2000};
    uint64_t chance = 20;
    for (int n = 1; n <= MAX_MEMBERS; n++) {
        for (int i = 0; i < coll_n_algorithms; i++) {
            static world_t world;
            // The smallest rings move a few bytes a round: not with the most members.
            const size_t first = n <= 5 ? 0 : 2;
            const size_t ring =
                ring_sizes[first + random_below(&chance, N_ELEMENTS(ring_sizes) - first)];
            world_open(&world, n, ring, chance);
            run_sizes(&coll_algorithms[i], n, &world, &chance);
            world_close(&world);
        }
    }
}

// Tensors beyond a few segments, windows and short messages.
static void test_longer_tensors(void **state)
{
    (void)state;
    static const int members[] = {2, 3, 5, 8};
    uint64_t chance = 7;
    for (size_t k = 0; k < N_ELEMENTS(members); k++) {
        for (int i = 0; i < coll_n_algorithms; i++) {
            static world_t world;
            const kind_t kind = pick_kind(&coll_algorithms[i], &chance);
            world_open(&world, members[k], 3000, chance);
            const setting_t setting = {
                .algorithm = &coll_algorithms[i],
                .n = members[k],
                .elements = 20011,
                .dtype = kind.dtype,
                .reduce = kind.reduce,
                .pre = 1,
                .post = 1,
                .segment_bytes = 1024,
                .ring_bytes = 3000,
                .seed = next_random(&chance),
            };
            run_setting(&setting, &world);
            world_close(&world);
        }
    }
}

// Where sums are not exact, all members still agree on every bit.
static void test_members_agree_on_rounded_sums(void **state)
{
    (void)state;
    enum { N = 7, ELEMENTS = 500 };
    for (int i = 0; i < coll_n_algorithms; i++) {
        const algorithm_t *algorithm = &coll_algorithms[i];
        if (algorithm->op != HVD_ALLREDUCE) {
            continue;
        }
        static world_t world;
        static group_t g;
        memset(&g, 0, sizeof g);
        world_open(&world, N, 100, 1);
        const setting_t s = {.algorithm = algorithm,
                             .n = N,
                             .elements = ELEMENTS,
                             .dtype = HVD_FLOAT32,
                             .reduce = algorithm->flags & NEEDS_ADASUM ? HVD_ADASUM : HVD_SUM,
                             .pre = 1,
                             .post = 1.0 / N,
                             .segment_bytes = 256,
                             .ring_bytes = 100,
                             .seed = 5};
        set_up(&s, &world, &g);
        uint64_t chance = 11;
        for (int m = 0; m < N; m++) {
            for (int e = 0; e < ELEMENTS; e++) {
                const float value = (float)(int64_t)next_random(&chance) * 1e-12f;
                memcpy(g.members[m].input + 4 * e, &value, sizeof value);
            }
        }
        char text[4096];
        CHECK(&s, run_all(&world, text, sizeof text), text);
        for (int m = 1; m < N; m++) {
            CHECK(&s, memcmp(g.members[m].output, g.members[0].output, 4 * ELEMENTS) == 0,
                  "members differ");
        }
        tear_down(&s, &g);
        world_close(&world);
    }
}

// --- Order in plans ------------------------------------------------------------------------------
// The steps of all members as one graph: what a step comes after, the order of messages between two
// members, and every receive after its send. Two steps of a member that touch the same bytes, one
// of them writing, must be ordered by it, whatever the timing.

enum { MAX_NODES = 3000 };

typedef struct graph {
    int n_nodes, first_node[MAX_MEMBERS + 1];
    const step_t *steps[MAX_NODES];
    int before[MAX_NODES][4];                        // nodes that must end first, or NO_STEP
    uint64_t past[MAX_NODES][(MAX_NODES + 63) / 64]; // all that come before
} graph_t;

static bool is_receive(const step_t *step)
{
    return step->kind == STEP_RECV || step->kind == STEP_RECV_REDUCE || step->kind == STEP_RECV_ACC;
}

// The node of the k-th send to (or receive from) a peer, or NO_STEP.
static int find_message(const graph_t *graph, int member, int peer, bool receives, int k)
{
    for (int node = graph->first_node[member]; node < graph->first_node[member + 1]; node++) {
        const step_t *step = graph->steps[node];
        if (step->peer == peer && (receives ? is_receive(step) : step->kind == STEP_SEND) &&
            k-- == 0) {
            return node;
        }
    }
    return NO_STEP;
}

static void add_messages(const setting_t *s, graph_t *graph, int from, int to)
{
    int last_send = NO_STEP, last_receive = NO_STEP;
    for (int k = 0;; k++) {
        const int send = find_message(graph, from, to, false, k),
                  receive = find_message(graph, to, from, true, k);
        CHECK(s, (send == NO_STEP) == (receive == NO_STEP), "a message has only one end");
        if (send == NO_STEP) {
            return;
        }
        CHECK(s, graph->steps[send]->bytes == graph->steps[receive]->bytes,
              "a message has two sizes");
        graph->before[send][2] = last_send;
        graph->before[receive][2] = last_receive;
        graph->before[receive][3] = send;
        last_send = send;
        last_receive = receive;
    }
}

static void build_graph(const setting_t *s, const group_t *g, graph_t *graph)
{
    graph->n_nodes = 0;
    for (int m = 0; m < s->n; m++) {
        const plan_t *plan = &g->members[m].plan;
        const int first = graph->first_node[m] = graph->n_nodes;
        CHECK(s, first + plan->n_steps <= MAX_NODES, "the graph is too large for this test");
        for (int i = 0; i < plan->n_steps; i++) {
            const step_t *step = &plan->steps[i];
            int *before = graph->before[graph->n_nodes];
            graph->steps[graph->n_nodes++] = step;
            for (int k = 0; k < 2; k++) {
                before[k] = step->after[k] == NO_STEP ? NO_STEP : first + step->after[k];
                before[2 + k] = NO_STEP;
            }
        }
    }
    graph->first_node[s->n] = graph->n_nodes;
    for (int from = 0; from < s->n; from++) {
        for (int to = 0; to < s->n; to++) {
            add_messages(s, graph, from, to);
        }
    }
}

// Fills in all that comes before each node; nodes are taken as soon as theirs are complete.
static void close_graph(const setting_t *s, graph_t *graph)
{
    static bool is_complete[MAX_NODES];
    const size_t n_words = (size_t)(graph->n_nodes + 63) / 64;
    memset(is_complete, 0, sizeof is_complete);
    for (int n_left = graph->n_nodes; n_left > 0;) {
        const int n_before = n_left;
        for (int node = 0; node < graph->n_nodes; node++) {
            bool may = !is_complete[node];
            for (int k = 0; k < 4 && may; k++) {
                may = graph->before[node][k] == NO_STEP || is_complete[graph->before[node][k]];
            }
            if (!may) {
                continue;
            }
            memset(graph->past[node], 0, n_words * sizeof graph->past[node][0]);
            for (int k = 0; k < 4; k++) {
                const int before = graph->before[node][k];
                for (size_t w = 0; before != NO_STEP && w < n_words; w++) {
                    graph->past[node][w] |= graph->past[before][w];
                }
                if (before != NO_STEP) {
                    graph->past[node][before / 64] |= 1ull << before % 64;
                }
            }
            is_complete[node] = true;
            n_left--;
        }
        CHECK(s, n_left < n_before, "steps wait for each other in a circle");
    }
}

// Bytes of memory a step reads or writes. Buffers that are the same memory get the same number.
typedef struct touched {
    int buf;
    size_t at, bytes;
} touched_t;

static touched_t touches(const setting_t *s, const step_t *step, bool writes)
{
    const bool stays =
        step->kind == STEP_COPY && s->in_place && step->src_at == step->dst_at; // nothing to do
    const bool does = stays    ? false
                      : writes ? step->kind != STEP_SEND
                               : step->kind != STEP_RECV && step->kind != STEP_RECV_ACC &&
                                     step->kind != STEP_SCALE;
    const int buf = writes ? step->dst : step->src;
    size_t bytes = does ? step->bytes : 0;
    if (buf == BUF_ACC) {
        bytes = bytes / hvd_dtype_bytes(s->dtype) * hvd_dtype_bytes(acc_dtype(s->dtype));
    }
    return (touched_t){s->in_place && buf == BUF_INPUT ? BUF_OUTPUT : buf,
                       writes ? step->dst_at : step->src_at, bytes};
}

static bool overlap(touched_t a, touched_t b)
{
    return a.buf == b.buf && a.bytes > 0 && b.bytes > 0 && a.at < b.at + b.bytes &&
           b.at < a.at + a.bytes;
}

static void check_order(const setting_t *s, const graph_t *graph)
{
    for (int m = 0; m < s->n; m++) {
        for (int a = graph->first_node[m]; a < graph->first_node[m + 1]; a++) {
            const touched_t written = touches(s, graph->steps[a], true);
            for (int b = graph->first_node[m]; b < graph->first_node[m + 1]; b++) {
                const bool collides = overlap(written, touches(s, graph->steps[b], true)) ||
                                      overlap(written, touches(s, graph->steps[b], false));
                const bool ordered = (graph->past[b][a / 64] >> a % 64 & 1) ||
                                     (graph->past[a][b / 64] >> b % 64 & 1);
                if (a != b && collides && !ordered) {
                    char text[200];
                    snprintf(text, sizeof text,
                             "steps %d and %d of member %d touch the same bytes in any order",
                             a - graph->first_node[m], b - graph->first_node[m], m);
                    CHECK(s, false, text);
                }
            }
        }
    }
}

static void test_steps_that_touch_the_same_bytes_are_ordered(void **state)
{
    (void)state;
    static graph_t graph;
    static group_t g;
    uint64_t chance = 3;
    for (int n = 1; n <= MAX_MEMBERS; n++) {
        for (int i = 0; i < 6 * coll_n_algorithms; i++) {
            const algorithm_t *algorithm = &coll_algorithms[i / 6];
            const size_t elements[] = {1, 2, (size_t)n, 3 * (size_t)n + 1, 5, n <= 8 ? 300 : 7};
            const kind_t kind = pick_kind(algorithm, &chance);
            const bool may_be_in_place =
                algorithm->op == HVD_ALLREDUCE || algorithm->op == HVD_BROADCAST;
            const setting_t s = {.algorithm = algorithm,
                                 .n = n,
                                 .elements = elements[i % 6],
                                 .dtype = kind.dtype,
                                 .reduce = kind.reduce,
                                 .in_place = may_be_in_place,
                                 .pre = 1,
                                 .post = 0.5,
                                 .segment_bytes = 128,
                                 .seed = next_random(&chance)};
            uint64_t sizes = s.seed;
            err_t err = {0};
            memset(&g, 0, sizeof g);
            set_sizes(&s, &g, &sizes);
            for (int m = 0; m < n; m++) {
                CHECK(&s,
                      coll_plan(algorithm, &g.members[m].args, &g.members[m].plan, &err) == HVD_OK,
                      err.text);
            }
            build_graph(&s, &g, &graph);
            close_graph(&s, &graph);
            check_order(&s, &graph);
            for (int m = 0; m < n; m++) {
                plan_free(&g.members[m].plan);
            }
        }
    }
}

// --- What goes wrong -----------------------------------------------------------------------------

// Two members by ring, of which the second does something else.
static hvd_status_t run_two(uint32_t other_batch, size_t other_elements, bool cut, err_t *err)
{
    static world_t world;
    member_t members[2] = {0};
    uint8_t data[2][64] = {0};
    world_open(&world, 2, 1000, 1);
    world.links[0][1].is_broken = cut;
    for (int m = 0; m < 2; m++) {
        members[m].args = (coll_args_t){.op = HVD_ALLREDUCE,
                                        .dtype = HVD_INT32,
                                        .reduce = HVD_SUM,
                                        .member = m,
                                        .size = 2,
                                        .bytes = 4 * (m == 0 ? 16 : other_elements)};
        assert_int_equal(
            coll_plan(coll_find(HVD_ALLREDUCE, "ring"), &members[m].args, &members[m].plan, err),
            HVD_OK);
        members[m].link_arg = (link_arg_t){&world, m};
        const exec_run_t run = {.plan = &members[m].plan,
                                .buffers = {data[m], data[m]},
                                .dtype = HVD_INT32,
                                .reduce = HVD_SUM,
                                .prescale = 1,
                                .finish = FINISH_NOTHING,
                                .batch = m == 0 ? 1 : other_batch,
                                .link_of = link_of,
                                .arg = &members[m].link_arg};
        assert_int_equal(exec_start(world.execs[m], &run, err), HVD_OK);
    }
    hvd_status_t status = HVD_IN_PROGRESS;
    for (int i = 0; i < 100 && status == HVD_IN_PROGRESS; i++) {
        (void)exec_progress(world.execs[1], NULL);
        status = exec_progress(world.execs[0], err);
    }
    if (status != HVD_OK && status != HVD_IN_PROGRESS) { // it stays broken
        assert_int_equal(exec_progress(world.execs[0], NULL), status);
    }
    for (int m = 0; m < 2; m++) {
        plan_free(&members[m].plan);
    }
    world_close(&world);
    return status;
}

static void test_a_message_of_another_batch_is_refused(void **state)
{
    (void)state;
    err_t err = {0};
    assert_int_equal(run_two(1, 16, false, &err), HVD_OK);
    assert_int_equal(run_two(2, 16, false, &err), HVD_PROTOCOL);
    assert_non_null(strstr(err.text, "rank 1"));
    assert_non_null(strstr(err.text, "batch 2"));
    assert_int_equal(run_two(1, 14, false, &err), HVD_PROTOCOL);
    assert_non_null(strstr(err.text, "bytes"));
}

static void test_a_broken_link_ends_the_run(void **state)
{
    (void)state;
    err_t err = {0};
    assert_int_equal(run_two(1, 16, true, &err), HVD_PEER_LOST);
    assert_non_null(strstr(err.text, "the cable is cut"));
    assert_non_null(strstr(err.text, "rank 1"));
}

static void test_a_missing_link_refuses_the_run(void **state)
{
    (void)state;
    static world_t world;
    world_open(&world, 1, 10, 1);
    plan_t plan = {0};
    plan_add(&plan, (step_t){.kind = STEP_SEND, .peer = 4, .after = {NO_STEP, NO_STEP}});
    link_arg_t arg = {&world, 0};
    const exec_run_t run = {.plan = &plan, .dtype = HVD_UINT8, .link_of = link_of, .arg = &arg};
    err_t err = {0};
    assert_int_equal(exec_start(world.execs[0], &run, &err), HVD_INVALID_ARGUMENT);
    assert_non_null(strstr(err.text, "no link to 4"));
    plan_free(&plan);
    world_close(&world);
}

// --- Choice --------------------------------------------------------------------------------------

static const char *choice(coll_args_t args, const char *forced)
{
    err_t err = {0};
    const algorithm_t *row = coll_choose(&args, forced, &err);
    return row != NULL ? row->name : hvd_status_name(err.status);
}

static coll_args_t allreduce_of(size_t bytes, int n, hvd_dtype_t dtype, hvd_reduce_t reduce)
{
    return (coll_args_t){
        .op = HVD_ALLREDUCE, .dtype = dtype, .reduce = reduce, .size = n, .bytes = bytes};
}

static void test_choice_by_size(void **state)
{
    (void)state;
    assert_string_equal(choice(allreduce_of(16 * KIB, 4, HVD_FLOAT32, HVD_SUM), ""),
                        "recursive_doubling");
    assert_string_equal(choice(allreduce_of(16 * KIB + 4, 4, HVD_FLOAT32, HVD_SUM), NULL),
                        "halving_doubling");
    assert_string_equal(choice(allreduce_of(MIB, 4, HVD_FLOAT32, HVD_SUM), NULL), "ring");
    assert_string_equal(choice(allreduce_of(MIB, 17, HVD_FLOAT32, HVD_SUM), NULL),
                        "halving_doubling");
    assert_string_equal(choice(allreduce_of(MIB, 4, HVD_FLOAT32, HVD_ADASUM), NULL), "adasum");
    assert_string_equal(choice(allreduce_of(MIB, 4, HVD_INT32, HVD_ADASUM), NULL),
                        "HVD_UNSUPPORTED");
    const size_t small[16] = {8}, large[16] = {MIB};
    coll_args_t args = {.op = HVD_ALLGATHER, .size = 16, .blocks = small};
    assert_string_equal(choice(args, NULL), "bruck");
    args.blocks = large;
    assert_string_equal(choice(args, NULL), "ring");
    args = (coll_args_t){.op = HVD_ALLTOALL, .size = 16, .send_bytes = small, .recv_bytes = small};
    assert_string_equal(choice(args, NULL), "pairwise");
    args.equal_blocks = true;
    assert_string_equal(choice(args, NULL), "bruck");
    args.size = 8;
    assert_string_equal(choice(args, NULL), "pairwise");
    assert_string_equal(choice((coll_args_t){.op = HVD_JOIN, .size = 2}, NULL), "HVD_UNSUPPORTED");
}

static void test_half_types_take_what_rounds_once(void **state)
{
    (void)state;
    for (size_t bytes = 4; bytes <= MIB; bytes *= 512) {
        assert_string_equal(choice(allreduce_of(bytes, 4, HVD_FLOAT16, HVD_SUM), NULL), "pairwise");
        assert_string_equal(
            choice(allreduce_of(bytes, 4, HVD_BFLOAT16, HVD_PRODUCT), "allreduce=ring"),
            "pairwise");
    }
    assert_string_equal(choice(allreduce_of(MIB, 4, HVD_FLOAT16, HVD_MAX), NULL), "ring");
}

static void test_forced_choice(void **state)
{
    (void)state;
    const coll_args_t args = allreduce_of(4, 4, HVD_FLOAT32, HVD_SUM);
    assert_string_equal(choice(args, "allreduce=ring"), "ring");
    assert_string_equal(choice(args, "alltoall=bruck, allreduce = pairwise"), "pairwise");
    assert_string_equal(choice(args, "alltoall=bruck"), "recursive_doubling");
    assert_string_equal(choice(args, "allreduce=stream"), "recursive_doubling");
    assert_string_equal(choice(args, "allreduce=adasum"),
                        "recursive_doubling"); // does not fit a sum
    static const char *const wrong[] = {"allreduce=rung", "allreduce", "allreducer=ring", "=",
                                        "allreduce=ring,x=y"};
    for (size_t i = 0; i < N_ELEMENTS(wrong); i++) {
        assert_string_equal(choice(args, wrong[i]), "HVD_INVALID_ARGUMENT");
    }
    err_t err = {0};
    assert_null(coll_choose(&args, "allgather=rung", &err));
    assert_non_null(strstr(err.text, "bruck, ring"));
    assert_non_null(strstr(err.text, "rung"));
}

static void test_bruck_refuses_unequal_blocks(void **state)
{
    (void)state;
    const size_t sizes[3] = {4, 8, 4};
    const coll_args_t args = {
        .op = HVD_ALLTOALL, .size = 3, .send_bytes = sizes, .recv_bytes = sizes};
    plan_t plan = {0};
    err_t err = {0};
    assert_int_equal(coll_plan(coll_find(HVD_ALLTOALL, "bruck"), &args, &plan, &err),
                     HVD_INVALID_ARGUMENT);
    plan_free(&plan);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_algorithm),
        cmocka_unit_test(test_longer_tensors),
        cmocka_unit_test(test_members_agree_on_rounded_sums),
        cmocka_unit_test(test_steps_that_touch_the_same_bytes_are_ordered),
        cmocka_unit_test(test_a_message_of_another_batch_is_refused),
        cmocka_unit_test(test_a_broken_link_ends_the_run),
        cmocka_unit_test(test_a_missing_link_refuses_the_run),
        cmocka_unit_test(test_choice_by_size),
        cmocka_unit_test(test_half_types_take_what_rounds_once),
        cmocka_unit_test(test_forced_choice),
        cmocka_unit_test(test_bruck_refuses_unequal_blocks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
