// SPDX-License-Identifier: Apache-2.0
//
// The agreement under a virtual clock: up to a thousand coordinators in one process, a tree of any
// shape, links with seeded random delays, and programs that submit the same tensors on every rank
// in different orders, wait for some of them, join, change process sets, disagree on purpose, and
// end by themselves, by shutdown, by abort or by the death of a rank.
//
// The invariants of docs/agreement.md are checked as things happen:
//   1  members see the same batches of a set, in one order for all sets     check_order
//   2  every submission is run or failed once                               decide_item
//   3  nothing runs before every member that has not joined submitted it    check_complete
//   4  two messages per edge and batch; lines do not grow with the subtree  steady_state_is_cheap
//   5  an abort reaches every live rank along the tree                      aborts_travel_the_tree
//   6  memory follows the names in use, not the operations done             memory_is_bounded
//
// Everything follows from a seed and a number of ranks. A failure prints what repeats it:
//   test_agreement_sim --seed 17 --ranks 64
// The plans of tests/fault/chaos_plan.h, which tests/fault/test_chaos.c does to real processes, run
// here as well, a thousand times as fast: --chaos 17. In half of them one rank gets a core only now
// and then.
#define _GNU_SOURCE
#include "coord_world.h"

#include "../fault/chaos_plan.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define IS_INSTRUMENTED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) ||                         \
    __has_feature(memory_sanitizer)
#define IS_INSTRUMENTED 1
#endif
#endif
#ifndef IS_INSTRUMENTED
#define IS_INSTRUMENTED 0
#endif

#define N_SMALL_WORLDS (IS_INSTRUMENTED ? 250 : 700)
#define N_CHAOS (IS_INSTRUMENTED ? 100 : 300)
#define N_NAMES 8
#define MAX_ITEMS 12
#define MAX_SETS 64
#define MAX_ELEMENTS 64
#define MAX_WORDS 32
#define MAX_EVENTS 20000000

// --- Chance -------------------------------------------------------------------------------------

static uint64_t mix(uint64_t a, uint64_t b)
{
    uint64_t x = a * UINT64_C(0x9e3779b97f4a7c15) + b + UINT64_C(0x632be59bd9b4e019);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static uint64_t rnd(uint64_t *state)
{
    *state += 1;
    return mix(*state, UINT64_C(0x5851f42d4c957f2d));
}

static int below(uint64_t *state, int n)
{
    return (int)(rnd(state) % (uint64_t)n);
}

static bool chance(uint64_t *state, int percent)
{
    return below(state, 100) < percent;
}

// --- The plan: what every rank is going to do ---------------------------------------------------

typedef enum odd_kind {
    ODD_NONE,
    ODD_DTYPE,
    ODD_SHAPE,
    ODD_SCALE,
    ODD_REDUCE,
    ODD_ROOT,
    ODD_OP,
    N_ODD_KINDS
} odd_kind_t;

typedef struct item {
    int set; // index into sim->sets
    int name;
    hvd_op_t op;
    hvd_dtype_t dtype;
    hvd_reduce_t reduce;
    int root, n_tensors, n_dims;
    int64_t dims[3];
    uint64_t sizes_salt, values_salt;
    odd_kind_t odd;
    int odd_rank;
    bool is_orphan; // only some members submit it, and its set is removed meanwhile
    // What happened:
    uint8_t *has;     // per rank: submitted
    uint8_t *decided; // per rank
    bool is_checked;  // by the first rank that was told
    hvd_status_t status;
    uint64_t batch;
    uint64_t run_hash; // without a batch: what was told
    char *text;
    uint8_t *result;
    size_t result_bytes;
} item_t;

typedef enum step_kind { STEP_PLAIN, STEP_ADD_SET, STEP_REMOVE_SET, STEP_JOIN } step_kind_t;

typedef struct step {
    step_kind_t kind;
    int n_items;
    item_t items[MAX_ITEMS];
    int *cuts; // join: per rank, how many of the items it has
    int changed_set;
    int odd_rank; // add: passes other ranks; -1: nobody
    int odd_flip; // the rank it adds or leaves out
    int last_joined;
    int n_decided; // of the change or the join
} step_t;

typedef struct sim_set {
    int n;
    int *ranks;
    uint8_t *is_member;
    int born, dies; // steps: usable in born <= step < dies
    bool is_failed; // never came to be
    int id;         // as the ranks were told; -1: not yet
    uint32_t *log;  // batches, as first seen
    int n_log;
    int *cursors; // per rank
} sim_set_t;

// --- The world ----------------------------------------------------------------------------------

typedef enum action_kind { ACT_SUBMIT, ACT_WAIT, ACT_WAIT_ALL, ACT_JOIN, ACT_CHANGE } action_kind_t;

typedef struct action {
    action_kind_t kind;
    int item;
} action_t;

typedef struct running {
    uint64_t batch;
    int n_tags;
    uint64_t *tags;
} running_t;

typedef struct rank_state {
    coord_t *coord;
    int step, at; // program counter
    action_t actions[MAX_ITEMS * 3 + 8];
    int n_actions;
    bool is_blocked, is_dead, has_ended, has_asked_stop;
    int waits_for;   // item, or -1: all
    int n_undecided; // of this step
    int joined_step; // last step whose join it called
    uint64_t last_batch;
    bool has_batch;
    running_t *queue; // batches to run, in order
    int n_queue, cap_queue;
    bool has_started; // the first of them
    uint64_t tick_ns; // earliest tick under way
    uint64_t chance;
} rank_state_t;

typedef struct frame {
    uint8_t *body;
    size_t bytes;
} frame_t;

typedef struct edge {
    int from, to;
    buf_t stream;
    frame_t *frames; // first in, first out
    int first, n, cap;
    uint64_t last_ns;
    uint64_t speed_ns;
    bool is_cut;            // what is sent is lost
    uint64_t held_until_ns; // nothing arrives before, and nothing is lost
} edge_t;

typedef enum event_kind {
    EVENT_STEP,
    EVENT_DELIVER,
    EVENT_DONE,
    EVENT_TICK,
    EVENT_PUMP,
    EVENT_STOP,
    EVENT_ABORT,
    EVENT_KILL,
    EVENT_LOST,
    EVENT_FREEZE, // a rank stops running, and goes on later
    EVENT_CUT,    // the link to a rank's parent loses everything, in one direction or both
    EVENT_CHAOS   // the next fault of a plan; not about a rank
} event_kind_t;

typedef struct event {
    uint64_t at_ns, order;
    event_kind_t kind;
    int what; // rank or edge
} event_t;

typedef struct batch_info {
    int set; // index; -1: not seen
    uint64_t hash;
    int n_entries, n_started;
} batch_info_t;

typedef enum ending {
    END_BY_ITSELF,
    END_BY_SHUTDOWN,
    END_BY_ABORT,
    END_BY_DEATH,
    END_BY_SILENCE
} ending_t;

typedef struct sim {
    uint64_t seed;
    int size;
    int *parent;
    uint64_t chance;
    uint64_t now_ns, n_events, next_order;
    rank_state_t *ranks;
    edge_t *edges;
    int *edge_base;
    event_t *heap;
    size_t n_heap, cap_heap;
    step_t *steps;
    int n_steps, max_items;
    sim_set_t sets[MAX_SETS];
    int n_sets;
    batch_info_t *batches;
    size_t n_batches;
    ending_t ending;
    hvd_status_t end_status; // expected once something ended the job
    bool may_end;
    int silent[2]; // who may be found silent: a frozen rank, or the ends of a cut link; -1: none
    int frozen;    // a rank that does not run until thaw_ns; -1: none
    uint64_t thaw_ns;
    int busy; // a rank that gets a core only now and then: not before busy_until_ns; -1: none
    uint64_t busy_until_ns;
    const chaos_plan_t *chaos; // NULL: none
    int n_chaos;               // faults made
    uint64_t excused;          // ranks that chaos may have kept from hearing or being heard
    bool has_removed;          // late lines are allowed
    bool reports_allowed;
    bool keeps_sets;                                        // no changes of process sets
    size_t n_runs, n_fused, n_fails, n_reports, n_silences; // as told to all ranks together
    size_t n_unnumbered;                                    // of n_runs: without a batch
    coord_params_t params;
} sim_t;

static void sim_fail(const sim_t *sim, const char *format, ...) PRINTF_LIKE(2, 3);
static void sim_fail(const sim_t *sim, const char *format, ...)
{
    char text[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fail_msg("%s\nrepeat with: test_agreement_sim --seed %llu --ranks %d", text,
             (unsigned long long)sim->seed, sim->size);
}

#define CHECK(sim, condition, ...)                                                                 \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            sim_fail((sim), __VA_ARGS__);                                                          \
        }                                                                                          \
    } while (0)

static void *zeros(size_t n, size_t bytes)
{
    void *memory = calloc(MAX(n, 1), bytes);
    assert_non_null(memory);
    return memory;
}

// --- Trees --------------------------------------------------------------------------------------

enum { TREE_RANDOM, TREE_STAR, TREE_CHAIN, TREE_ARITY_8, TREE_HOSTS, N_TREES };

static void make_tree(int *parent, int size, int kind, uint64_t *state)
{
    int per_host = 2 + below(state, 7);
    for (int rank = 0; rank < size; rank++) {
        int host = rank / per_host;
        bool is_leader = rank % per_host == 0;
        switch (kind) {
        case TREE_RANDOM: // parents may have higher numbers: only rank 0 is fixed
            parent[rank] = rank == 0 ? -1 : below(state, rank);
            break;
        case TREE_STAR:
            parent[rank] = 0;
            break;
        case TREE_CHAIN:
            parent[rank] = rank - 1;
            break;
        case TREE_ARITY_8:
            parent[rank] = (rank - 1) / 8;
            break;
        default:
            parent[rank] = is_leader ? (host - 1) / 8 * per_host : host * per_host;
        }
    }
    parent[0] = -1;
    // Names of the others are exchanged, so that the tree does not follow the order of ranks.
    for (int i = 1; kind == TREE_RANDOM && i + 1 < size; i++) {
        int a = i, b = i + 1 + below(state, size - i - 1);
        for (int rank = 1; rank < size; rank++) {
            parent[rank] = parent[rank] == a ? b : parent[rank] == b ? a : parent[rank];
        }
        int swapped = parent[a];
        parent[a] = parent[b];
        parent[b] = swapped;
    }
}

// --- Making the plan ----------------------------------------------------------------------------

static bool is_usable(const sim_t *sim, int set, int step)
{
    const sim_set_t *known = &sim->sets[set];
    return !known->is_failed && known->born <= step && step < known->dies;
}

static void add_planned_set(sim_t *sim, const uint8_t *is_member, int born)
{
    sim_set_t *set = &sim->sets[sim->n_sets++];
    *set = (sim_set_t){.born = born, .dies = INT32_MAX, .id = -1};
    set->ranks = zeros((size_t)sim->size, sizeof(int));
    set->is_member = zeros((size_t)sim->size, 1);
    set->cursors = zeros((size_t)sim->size, sizeof(int));
    for (int rank = 0; rank < sim->size; rank++) {
        if (is_member[rank]) {
            set->is_member[rank] = 1;
            set->ranks[set->n++] = rank;
        }
    }
}

// Members of a set that does not exist yet; false if chance made none.
static bool choose_members(sim_t *sim, uint64_t *state, int step, uint8_t *is_member)
{
    int percent = 10 + below(state, 85), n = 0;
    for (int rank = 0; rank < sim->size; rank++) {
        is_member[rank] = chance(state, percent);
        n += is_member[rank];
    }
    for (int set = 0; set < sim->n_sets; set++) {
        // One that is being removed in this very step still exists.
        bool exists = is_usable(sim, set, step) || is_usable(sim, set, step - 1);
        if (exists && memcmp(sim->sets[set].is_member, is_member, (size_t)sim->size) == 0) {
            return false;
        }
    }
    return n > 0;
}

static int choose_set(const sim_t *sim, uint64_t *state, int step)
{
    for (int tries = 0; tries < 8; tries++) {
        int set = below(state, sim->n_sets);
        if (is_usable(sim, set, step)) {
            return set;
        }
    }
    return 0;
}

static void plan_signature(const sim_t *sim, item_t *item, uint64_t key, bool for_join)
{
    static const hvd_dtype_t dtypes[] = {HVD_INT32, HVD_INT64, HVD_FLOAT16, HVD_FLOAT32,
                                         HVD_FLOAT64};
    static const hvd_reduce_t reduces[] = {HVD_SUM, HVD_SUM,     HVD_AVERAGE, HVD_MIN,
                                           HVD_MAX, HVD_PRODUCT, HVD_ADASUM};
    uint64_t state = key;
    int kind = below(&state, for_join ? 75 : 100);
    item->op = kind < 60   ? HVD_ALLREDUCE
               : kind < 68 ? HVD_BARRIER
               : kind < 78 ? HVD_ALLGATHER
               : kind < 86 ? HVD_BROADCAST
               : kind < 94 ? HVD_ALLTOALL
                           : HVD_REDUCESCATTER;
    if (item->op == HVD_ALLTOALL && sim->sets[item->set].n > 40) {
        item->op = HVD_BROADCAST;
    }
    item->dtype = dtypes[below(&state, N_ELEMENTS(dtypes))];
    item->reduce = reduces[below(&state, N_ELEMENTS(reduces))];
    if (chance(&state, 60)) { // alike enough to be fused
        item->dtype = HVD_FLOAT32;
        item->reduce = HVD_SUM;
    }
    item->n_tensors = item->op == HVD_BARRIER    ? 0
                      : item->op == HVD_ALLTOALL ? 1
                                                 : 1 + below(&state, 20) / 17 * below(&state, 4);
    item->n_dims = chance(&state, 4) ? 0 : 1 + below(&state, 3);
    for (int d = 0; d < item->n_dims; d++) {
        item->dims[d] = 1 + below(&state, 4);
    }
    if (chance(&state, 40) && item->n_dims > 0) {
        item->dims[item->n_dims - 1] *= 100; // too large to ride
    }
    item->root = item->op == HVD_BROADCAST
                     ? sim->sets[item->set].ranks[below(&state, sim->sets[item->set].n)]
                     : 0;
}

static void plan_item(sim_t *sim, step_t *step, item_t *item, uint64_t *state)
{
    // Mostly what the name always has, sometimes something new.
    uint64_t key = mix(sim->seed, (uint64_t)item->set * 1000 + (uint64_t)item->name);
    plan_signature(sim, item, chance(state, 85) ? key : rnd(state), step->kind == STEP_JOIN);
    item->sizes_salt = chance(state, 70) ? key : rnd(state);
    item->values_salt = rnd(state);
    item->has = zeros((size_t)sim->size, 1);
    item->decided = zeros((size_t)sim->size, 1);
    const sim_set_t *set = &sim->sets[item->set];
    bool may_be_odd = step->kind == STEP_PLAIN && item->op != HVD_BARRIER && set->n >= 2;
    if (may_be_odd && chance(state, 8)) {
        item->odd_rank = set->ranks[below(state, set->n)];
        do {
            item->odd = (odd_kind_t)(1 + below(state, N_ODD_KINDS - 1));
        } while (item->odd == ODD_ROOT && item->op != HVD_BROADCAST);
    }
}

static void plan_items(sim_t *sim, int index, step_t *step, uint64_t *state)
{
    int wanted = 1 + below(state, sim->max_items);
    bool taken[MAX_SETS][N_NAMES] = {{false}};
    for (int tries = 0; step->n_items < wanted && tries < wanted * 4; tries++) {
        int set = choose_set(sim, state, index), name = below(state, N_NAMES);
        if (taken[set][name] || (step->kind == STEP_REMOVE_SET && set == step->changed_set)) {
            continue;
        }
        taken[set][name] = true;
        item_t *item = &step->items[step->n_items++];
        item->set = set;
        item->name = name;
        plan_item(sim, step, item, state);
    }
}

// Tensors that some members submit to a set that is about to be removed.
static void plan_orphans(sim_t *sim, step_t *step, uint64_t *state)
{
    const sim_set_t *set = &sim->sets[step->changed_set];
    if (set->n < 2 || step->n_items == MAX_ITEMS) {
        return;
    }
    item_t *item = &step->items[step->n_items++];
    item->set = step->changed_set;
    item->name = below(state, N_NAMES);
    plan_item(sim, step, item, state);
    item->is_orphan = true;
    item->odd = ODD_NONE;
}

static void plan_change(sim_t *sim, int index, step_t *step, uint64_t *state)
{
    uint8_t *is_member = zeros((size_t)sim->size, 1);
    int victim = below(state, sim->n_sets);
    if (chance(state, 45) && victim != 0 && is_usable(sim, victim, index)) {
        step->kind = STEP_REMOVE_SET;
        step->changed_set = victim;
    } else if (sim->n_sets < MAX_SETS && choose_members(sim, state, index, is_member)) {
        step->kind = STEP_ADD_SET;
        step->changed_set = sim->n_sets;
        add_planned_set(sim, is_member, index + 1);
        // One rank may think of other ranks: then nobody gets the set.
        int odd = below(state, sim->size), flipped = below(state, sim->size);
        is_member[flipped] ^= 1;
        bool exists = false, is_empty = true;
        for (int rank = 0; rank < sim->size; rank++) {
            is_empty &= is_member[rank] == 0;
        }
        for (int set = 0; set < sim->n_sets; set++) {
            exists |= memcmp(sim->sets[set].is_member, is_member, (size_t)sim->size) == 0;
        }
        if (sim->size >= 2 && !exists && !is_empty && chance(state, 15)) {
            step->odd_rank = odd;
            sim->sets[step->changed_set].is_failed = true;
            step->odd_flip = flipped;
        }
    }
    free(is_member);
}

static void plan_step(sim_t *sim, int index)
{
    step_t *step = &sim->steps[index];
    uint64_t state = mix(sim->seed, 77000 + (uint64_t)index);
    int kind = below(&state, 100);
    *step = (step_t){.kind = STEP_PLAIN, .odd_rank = -1, .changed_set = -1, .last_joined = -1};
    if (kind < 18 && !sim->keeps_sets) {
        plan_change(sim, index, step, &state);
    } else if (kind < 32) {
        step->kind = STEP_JOIN;
    }
    plan_items(sim, index, step, &state);
    if (step->kind == STEP_REMOVE_SET) {
        sim->sets[step->changed_set].dies = index;
        if (chance(&state, 60)) {
            plan_orphans(sim, step, &state);
        }
    }
    if (step->kind == STEP_JOIN) {
        step->cuts = zeros((size_t)sim->size, sizeof(int));
        for (int rank = 0; rank < sim->size; rank++) {
            step->cuts[rank] =
                chance(&state, 50) ? step->n_items : below(&state, step->n_items + 1);
        }
    }
}

// Will this rank submit this item?
static bool is_planned(const sim_t *sim, int step_index, int item_index, int rank)
{
    const step_t *step = &sim->steps[step_index];
    const item_t *item = &step->items[item_index];
    if (!sim->sets[item->set].is_member[rank] ||
        (step->kind == STEP_JOIN && step->cuts[rank] <= item_index)) {
        return false;
    }
    const sim_set_t *set = &sim->sets[item->set];
    return !item->is_orphan || (rank != set->ranks[item->values_salt % (uint64_t)set->n] &&
                                mix(item->values_salt, (uint64_t)rank) % 2 == 0);
}

// --- Events -------------------------------------------------------------------------------------

static bool is_before(const event_t *a, const event_t *b)
{
    return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->order < b->order;
}

static void schedule(sim_t *sim, uint64_t at_ns, event_kind_t kind, int what)
{
    if (sim->n_heap == sim->cap_heap) {
        sim->cap_heap = MAX(1024, sim->cap_heap * 2);
        sim->heap = realloc(sim->heap, sim->cap_heap * sizeof(event_t));
        assert_non_null(sim->heap);
    }
    size_t i = sim->n_heap++;
    event_t event = {.at_ns = at_ns, .order = sim->next_order++, .kind = kind, .what = what};
    while (i > 0 && is_before(&event, &sim->heap[(i - 1) / 2])) {
        sim->heap[i] = sim->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    sim->heap[i] = event;
}

static event_t next_event(sim_t *sim)
{
    event_t first = sim->heap[0], last = sim->heap[--sim->n_heap];
    size_t i = 0;
    while (i * 2 + 1 < sim->n_heap) {
        size_t child = i * 2 + 1;
        if (child + 1 < sim->n_heap && is_before(&sim->heap[child + 1], &sim->heap[child])) {
            child++;
        }
        if (!is_before(&sim->heap[child], &last)) {
            break;
        }
        sim->heap[i] = sim->heap[child];
        i = child;
    }
    sim->heap[i] = last;
    return first;
}

static uint64_t soon(sim_t *sim, uint64_t spread_ns)
{
    return sim->now_ns + rnd(&sim->chance) % (spread_ns + 1);
}

// --- Tags ---------------------------------------------------------------------------------------

enum { SLOT_CHANGE = 40, SLOT_JOIN, N_SLOTS = 64 };

static uint64_t tag_of(int step, int slot)
{
    return 1 + (uint64_t)step * N_SLOTS + (uint64_t)slot;
}

static int step_of(uint64_t tag)
{
    return (int)((tag - 1) / N_SLOTS);
}

static int slot_of(uint64_t tag)
{
    return (int)((tag - 1) % N_SLOTS);
}

// --- Submitting ---------------------------------------------------------------------------------

static bool is_sized(hvd_op_t op)
{
    return op == HVD_ALLGATHER || op == HVD_ALLTOALL;
}

static int64_t size_value(const item_t *item, int rank, int index)
{
    return (int64_t)(mix(item->sizes_salt, (uint64_t)rank * 1000 + (uint64_t)index) % 200);
}

static int64_t element_value(const item_t *item, int rank, size_t k)
{
    uint64_t random = mix(item->values_salt, (uint64_t)rank * 100 + k);
    return item->reduce == HVD_PRODUCT ? (random % 2 == 0 ? 1 : -1) : (int64_t)(random % 5) - 2;
}

// What a rank brings to an operation that rides: of a broadcast, bytes or zeros.
static hvd_dtype_t brought_dtype(const item_t *item)
{
    return item->op == HVD_BROADCAST ? HVD_UINT8 : item->dtype;
}

static int64_t brought_value(const item_t *item, int rank, size_t k)
{
    if (item->op != HVD_BROADCAST) {
        return element_value(item, rank, k);
    }
    return rank == item->root ? (uint8_t)element_value(item, rank, k) : 0;
}

static int64_t get_element(hvd_dtype_t dtype, const void *at, size_t k)
{
    int32_t small;
    int64_t whole;
    float single;
    double wide;
    switch (dtype) {
    case HVD_UINT8:
        return ((const uint8_t *)at)[k];
    case HVD_INT32:
        memcpy(&small, (const uint8_t *)at + k * 4, 4);
        return small;
    case HVD_INT64:
        memcpy(&whole, (const uint8_t *)at + k * 8, 8);
        return whole;
    case HVD_FLOAT64:
        memcpy(&wide, (const uint8_t *)at + k * 8, 8);
        return (int64_t)wide;
    default:
        memcpy(&single, (const uint8_t *)at + k * 4, 4);
        return (int64_t)single;
    }
}

static void set_element(hvd_dtype_t dtype, void *at, size_t k, int64_t value)
{
    switch (dtype) {
    case HVD_UINT8:
        ((uint8_t *)at)[k] = (uint8_t)value;
        break;
    case HVD_INT32:
        ((int32_t *)at)[k] = (int32_t)value;
        break;
    case HVD_INT64:
        ((int64_t *)at)[k] = value;
        break;
    case HVD_FLOAT64:
        ((double *)at)[k] = (double)value;
        break;
    default:
        ((float *)at)[k] = (float)value;
    }
}

static size_t acc_bytes(hvd_dtype_t dtype)
{
    return dtype == HVD_UINT8 ? 1 : dtype == HVD_INT64 || dtype == HVD_FLOAT64 ? 8 : 4;
}

typedef struct filled {
    coord_request_t request;
    signature_t signature;
    char name[16];
    int64_t words[MAX_WORDS];
    int64_t sizes[1024];
    int64_t payload[MAX_ELEMENTS];
} filled_t;

// The odd rank's idea of the same tensor.
static void make_odd(item_t *item, int size)
{
    switch (item->odd) {
    case ODD_DTYPE:
        item->dtype = item->dtype == HVD_INT32 ? HVD_FLOAT64 : HVD_INT32;
        break;
    case ODD_SHAPE:
        item->dims[item->n_dims == 0 ? 0 : item->n_dims - 1] += 3;
        item->n_dims += item->n_dims < 2;
        item->dims[1] = item->n_dims == 2 && item->dims[1] == 0 ? 2 : item->dims[1];
        break;
    case ODD_REDUCE:
        item->reduce = item->reduce == HVD_MAX ? HVD_MIN : HVD_MAX;
        break;
    case ODD_ROOT:
        item->root = (item->root + 1) % size;
        break;
    case ODD_OP:
        item->op = item->op == HVD_BROADCAST ? HVD_ALLREDUCE : HVD_BROADCAST;
        break;
    default:
        break;
    }
}

static void fill_request(const sim_t *sim, const item_t *planned, int rank, uint64_t tag,
                         filled_t *filled)
{
    item_t item = *planned;
    const sim_set_t *set = &sim->sets[item.set];
    coord_request_t *request = &filled->request;
    int n_words = 0;
    if (item.odd != ODD_NONE && rank == item.odd_rank) {
        make_odd(&item, sim->size);
    }
    snprintf(filled->name, sizeof filled->name, "name%d", item.name);
    for (int tensor = 0; tensor < item.n_tensors; tensor++) {
        filled->words[n_words++] = item.n_dims;
        for (int d = 0; d < item.n_dims; d++) {
            filled->words[n_words++] = d == 0 && is_sized(item.op) ? -1 : item.dims[d];
        }
    }
    *request = (coord_request_t){
        .set = set->id, .name = filled->name, .name_bytes = strlen(filled->name), .tag = tag};
    filled->signature = (signature_t){.op = item.op,
                                      .dtype = item.dtype,
                                      .reduce = item.reduce,
                                      .root = item.root,
                                      .prescale = 1,
                                      .postscale = 1,
                                      .n_tensors = item.n_tensors,
                                      .dims = filled->words,
                                      .n_dims_words = n_words};
    if (item.odd == ODD_SCALE && rank == item.odd_rank) {
        filled->signature.postscale = 0.5;
    }
    if (is_sized(item.op)) {
        request->n_sizes = item.op == HVD_ALLGATHER ? item.n_tensors : set->n;
        for (int i = 0; i < request->n_sizes; i++) {
            filled->sizes[i] = size_value(&item, rank, i);
        }
        request->sizes = filled->sizes;
    }
    size_t bytes;
    request->signature = &filled->signature;
    if (signature_rides(request->signature, sim->params.inline_bytes, &bytes)) {
        CHECK(sim, bytes <= sizeof filled->payload, "%zu bytes ride", bytes);
        hvd_dtype_t dtype = brought_dtype(&item);
        for (size_t k = 0; k < bytes / acc_bytes(dtype); k++) {
            set_element(dtype, filled->payload, k, brought_value(&item, rank, k));
        }
        request->payload = filled->payload;
        request->payload_bytes = bytes;
    }
}

// False: the job has ended here, and the program stops.
static bool check_submitted(const sim_t *sim, int rank, hvd_status_t status, const err_t *err)
{
    if (status == HVD_OK) {
        return true;
    }
    bool is_end = sim->ranks[rank].has_asked_stop ? status == HVD_SHUTDOWN
                                                  : sim->may_end && status == sim->end_status;
    CHECK(sim, is_end, "rank %d could not submit: %s", rank, err->text);
    return false;
}

static bool submit_item(sim_t *sim, int rank, int index)
{
    rank_state_t *self = &sim->ranks[rank];
    item_t *item = &sim->steps[self->step].items[index];
    static filled_t filled;
    err_t err;
    fill_request(sim, item, rank, tag_of(self->step, index), &filled);
    item->has[rank] = 1; // before: it may complete at once
    self->n_undecided++;
    hvd_status_t status = coord_submit(self->coord, &filled.request, sim->now_ns, &err);
    if (status == HVD_OK) {
        return true;
    }
    item->has[rank] = 0;
    self->n_undecided--;
    // Its set may be gone already.
    return (item->is_orphan && status == HVD_UNKNOWN_SET) ||
           check_submitted(sim, rank, status, &err);
}

static bool submit_join(sim_t *sim, int rank)
{
    rank_state_t *self = &sim->ranks[rank];
    signature_t signature = {.op = HVD_JOIN};
    coord_request_t request = {.name = "join",
                               .name_bytes = 4,
                               .signature = &signature,
                               .tag = tag_of(self->step, SLOT_JOIN)};
    err_t err;
    hvd_status_t status = coord_submit(self->coord, &request, sim->now_ns, &err);
    if (!check_submitted(sim, rank, status, &err)) {
        return false;
    }
    self->joined_step = self->step;
    self->n_undecided++;
    return true;
}

static bool submit_change(sim_t *sim, int rank)
{
    rank_state_t *self = &sim->ranks[rank];
    const step_t *step = &sim->steps[self->step];
    const sim_set_t *set = &sim->sets[step->changed_set];
    uint64_t tag = tag_of(self->step, SLOT_CHANGE);
    hvd_status_t status;
    err_t err;
    if (step->kind == STEP_REMOVE_SET) {
        status = coord_remove_set(self->coord, set->id, tag, sim->now_ns, &err);
    } else {
        int *ranks = zeros((size_t)sim->size, sizeof(int)), n = 0;
        for (int member = sim->size - 1; member >= 0; member--) {
            bool flip = rank == step->odd_rank && member == step->odd_flip;
            if (set->is_member[member] != flip) {
                ranks[n++] = member;
            }
        }
        status = coord_add_set(self->coord, ranks, n, tag, sim->now_ns, &err);
        free(ranks);
    }
    self->n_undecided += status == HVD_OK;
    return check_submitted(sim, rank, status, &err);
}

// --- Programs -----------------------------------------------------------------------------------

// May the rank block on this item? Only if it has submitted all its items of lower index: the
// lowest item that is not done can then never wait for somebody who blocks on another one.
static bool is_safe_wait(const sim_t *sim, int rank, int item, const bool *is_submitted)
{
    for (int i = 0; i < item; i++) {
        if (is_planned(sim, sim->ranks[rank].step, i, rank) && !is_submitted[i]) {
            return false;
        }
    }
    return is_submitted[item] && !sim->steps[sim->ranks[rank].step].items[item].is_orphan;
}

static void write_program(sim_t *sim, int rank)
{
    rank_state_t *self = &sim->ranks[rank];
    const step_t *step = &sim->steps[self->step];
    int order[MAX_ITEMS], n = 0;
    bool is_submitted[MAX_ITEMS] = {false};
    for (int i = 0; i < step->n_items; i++) {
        if (is_planned(sim, self->step, i, rank)) {
            int at = below(&self->chance, n + 1);
            order[n++] = order[at];
            order[at] = i;
        }
    }
    bool has_change = step->kind == STEP_ADD_SET || step->kind == STEP_REMOVE_SET;
    self->n_actions = 0;
    for (int i = 0; i <= n; i++) {
        if (has_change && (i == n || chance(&self->chance, 30))) {
            self->actions[self->n_actions++] = (action_t){ACT_CHANGE, 0};
            has_change = false;
        }
        if (i == n) {
            break;
        }
        self->actions[self->n_actions++] = (action_t){ACT_SUBMIT, order[i]};
        is_submitted[order[i]] = true;
        int other = order[below(&self->chance, i + 1)];
        if (chance(&self->chance, 30) && is_safe_wait(sim, rank, other, is_submitted)) {
            self->actions[self->n_actions++] = (action_t){ACT_WAIT, other};
        }
    }
    if (step->kind == STEP_JOIN) {
        self->actions[self->n_actions++] = (action_t){ACT_JOIN, 0};
    }
    self->actions[self->n_actions++] = (action_t){ACT_WAIT_ALL, 0};
    self->at = 0;
}

static bool is_satisfied(const sim_t *sim, const rank_state_t *self)
{
    int rank = (int)(self - sim->ranks);
    return self->waits_for < 0 ? self->n_undecided == 0
                               : sim->steps[self->step].items[self->waits_for].decided[rank] == 2;
}

// False: blocked, or the program is over.
static bool do_action(sim_t *sim, int rank, const action_t *action)
{
    rank_state_t *self = &sim->ranks[rank];
    switch (action->kind) {
    case ACT_SUBMIT:
        return submit_item(sim, rank, action->item);
    case ACT_JOIN:
        return submit_join(sim, rank);
    case ACT_CHANGE:
        return submit_change(sim, rank);
    case ACT_WAIT:
    case ACT_WAIT_ALL:
        self->waits_for = action->kind == ACT_WAIT ? action->item : -1;
        self->is_blocked = !is_satisfied(sim, self);
        return !self->is_blocked;
    }
    return false;
}

static void run_program(sim_t *sim, int rank)
{
    rank_state_t *self = &sim->ranks[rank];
    while (!self->is_blocked && !self->has_ended && !self->is_dead && self->step < sim->n_steps) {
        if (self->at == self->n_actions) {
            self->n_actions = self->at = 0;
            if (++self->step < sim->n_steps) {
                write_program(sim, rank);
            }
            continue;
        }
        if (!do_action(sim, rank, &self->actions[self->at++])) {
            return;
        }
        if (chance(&self->chance, 35)) {
            schedule(sim, soon(sim, 400), EVENT_STEP, rank);
            return;
        }
    }
}

static void wake(sim_t *sim, int rank)
{
    rank_state_t *self = &sim->ranks[rank];
    if (self->is_blocked && is_satisfied(sim, self)) {
        self->is_blocked = false;
        schedule(sim, soon(sim, 300), EVENT_STEP, rank);
    }
}

// --- Checking decisions -------------------------------------------------------------------------

static item_t *item_of(const sim_t *sim, int rank, uint64_t tag)
{
    CHECK(sim,
          tag != 0 && step_of(tag) == sim->ranks[rank].step &&
              slot_of(tag) < sim->steps[step_of(tag)].n_items,
          "rank %d was told of tag %llu in step %d", rank, (unsigned long long)tag,
          sim->ranks[rank].step);
    return &sim->steps[step_of(tag)].items[slot_of(tag)];
}

// Invariant 2: decided once, and only if submitted.
static void decide_item(sim_t *sim, int rank, item_t *item)
{
    CHECK(sim, item->has[rank] && item->decided[rank] == 0, "rank %d, name%d: has %d, decided %d",
          rank, item->name, item->has[rank], item->decided[rank]);
    item->decided[rank] = 1;
}

static void finish_item(sim_t *sim, int rank, item_t *item)
{
    item->decided[rank] = 2;
    sim->ranks[rank].n_undecided--;
}

static bool lacks_members(const sim_t *sim, int step, int item)
{
    const sim_set_t *set = &sim->sets[sim->steps[step].items[item].set];
    for (int i = 0; i < set->n; i++) {
        if (!is_planned(sim, step, item, set->ranks[i])) {
            return true;
        }
    }
    return false;
}

typedef struct expected {
    hvd_status_t status;
    const char *start;
} expected_t;

static expected_t expect(const sim_t *sim, int step, int index)
{
    static const char *const odd_starts[N_ODD_KINDS] = {
        [ODD_DTYPE] = "Mismatched data types:",
        [ODD_SHAPE] = "Mismatched ",
        [ODD_SCALE] = "Mismatched prescale and/or postscale factors:",
        [ODD_REDUCE] = "Mismatched reduction operation:",
        [ODD_ROOT] = "Mismatched BROADCAST root ranks:",
        [ODD_OP] = "Mismatched operations:",
    };
    const item_t *item = &sim->steps[step].items[index];
    bool joins = item->op == HVD_ALLREDUCE || item->op == HVD_BARRIER;
    bool needs_dims = is_sized(item->op) || item->op == HVD_REDUCESCATTER;
    if (item->is_orphan) {
        return (expected_t){HVD_UNKNOWN_SET, "Process set "};
    }
    if (item->odd != ODD_NONE) {
        return (expected_t){HVD_MISMATCH, odd_starts[item->odd]};
    }
    if (!joins && lacks_members(sim, step, index)) {
        return (expected_t){
            HVD_JOINED, item->op == HVD_ALLGATHER ? "Allgather is not supported with Join" : ""};
    }
    if (needs_dims && item->n_dims == 0) {
        return (expected_t){HVD_MISMATCH, "Process-set rank zero tried to "};
    }
    return (expected_t){HVD_OK, ""};
}

// Invariant 3.
static void check_complete(const sim_t *sim, int step, int index)
{
    const item_t *item = &sim->steps[step].items[index];
    const sim_set_t *set = &sim->sets[item->set];
    for (int i = 0; i < set->n; i++) {
        int rank = set->ranks[i];
        bool has_joined =
            !is_planned(sim, step, index, rank) && sim->ranks[rank].joined_step >= step;
        CHECK(sim, item->has[rank] || has_joined, "name%d of set %d ran before rank %d had it",
              item->name, item->set, rank);
    }
}

static void check_result(const sim_t *sim, int step, int index, const decision_entry_t *entry)
{
    const item_t *item = &sim->steps[step].items[index];
    const sim_set_t *set = &sim->sets[item->set];
    hvd_reduce_t reduce = item->op == HVD_BROADCAST ? HVD_SUM : item->reduce;
    hvd_dtype_t dtype = brought_dtype(item);
    bool has_zeros = lacks_members(sim, step, index);
    for (size_t k = 0; k < entry->result_bytes / acc_bytes(dtype); k++) {
        int64_t total = 0, n = 0;
        for (int i = 0; i < set->n; i++) {
            if (is_planned(sim, step, index, set->ranks[i])) {
                int64_t value = brought_value(item, set->ranks[i], k);
                total = n++ == 0                ? value
                        : reduce == HVD_MIN     ? MIN(total, value)
                        : reduce == HVD_MAX     ? MAX(total, value)
                        : reduce == HVD_PRODUCT ? total * value
                                                : total + value;
            }
        }
        if (has_zeros) {
            total = reduce == HVD_MIN       ? MIN(total, 0)
                    : reduce == HVD_MAX     ? MAX(total, 0)
                    : reduce == HVD_PRODUCT ? 0
                                            : total;
        }
        CHECK(sim, get_element(dtype, entry->result, k) == total, "name%d, element %zu, step %d",
              item->name, k, step);
    }
}

static void check_sizes(const sim_t *sim, const item_t *item, const decision_entry_t *entry)
{
    const sim_set_t *set = &sim->sets[item->set];
    int each = item->op == HVD_ALLGATHER ? item->n_tensors : set->n;
    if (!is_sized(item->op)) {
        CHECK(sim, entry->n_sizes == 0, "sizes without need");
        return;
    }
    CHECK(sim, entry->n_sizes == each * set->n, "%d sizes", entry->n_sizes);
    for (int i = 0; i < entry->n_sizes; i++) {
        CHECK(sim, entry->sizes[i] == size_value(item, set->ranks[i / each], i % each),
              "size %d of name%d", i, item->name);
    }
}

static void check_entry(sim_t *sim, int rank, uint64_t batch, const decision_entry_t *entry)
{
    if (entry->tag == 0) {
        CHECK(sim, sim->ranks[rank].joined_step == sim->ranks[rank].step, "rank %d has not joined",
              rank);
        return;
    }
    item_t *item = item_of(sim, rank, entry->tag);
    int step = step_of(entry->tag), index = slot_of(entry->tag);
    char name[16];

    snprintf(name, sizeof name, "name%d", item->name);
    CHECK(sim,
          strcmp(name, entry->name) == 0 && entry->signature->op == item->op &&
              entry->signature->dtype == item->dtype &&
              entry->signature->n_tensors == item->n_tensors,
          "rank %d was told of %s instead of %s", rank, entry->name, name);
    check_sizes(sim, item, entry);
    decide_item(sim, rank, item);
    if (!item->is_checked) {
        expected_t expected = expect(sim, step, index);
        CHECK(sim, expected.status == HVD_OK, "name%d ran but should fail: %s", item->name,
              expected.start);
        check_complete(sim, step, index);
        if (entry->result != NULL) {
            check_result(sim, step, index, entry);
        }
        item->is_checked = true;
        item->batch = batch;
    }
    CHECK(sim, item->batch == batch, "name%d is in batches %lu and %lu", item->name, item->batch,
          batch);
}

static batch_info_t *batch_info(sim_t *sim, uint64_t batch)
{
    if (batch >= sim->n_batches) {
        size_t n = MAX(256, (size_t)batch * 2);
        sim->batches = realloc(sim->batches, n * sizeof(batch_info_t));
        assert_non_null(sim->batches);
        for (size_t i = sim->n_batches; i < n; i++) {
            sim->batches[i] = (batch_info_t){.set = -1};
        }
        sim->n_batches = n;
    }
    return &sim->batches[batch];
}

static int set_of_id(const sim_t *sim, int rank, int id)
{
    for (int set = sim->n_sets - 1; set >= 0; set--) {
        const sim_set_t *known = &sim->sets[set];
        if (known->id == id && known->is_member[rank] && sim->ranks[rank].step < known->dies) {
            return set;
        }
    }
    sim_fail(sim, "rank %d was told of process set %d", rank, id);
    return -1;
}

static uint64_t hash_of_run(const decision_t *decision)
{
    uint64_t hash = (uint64_t)decision->n_entries;
    for (int i = 0; i < decision->n_entries; i++) {
        const decision_entry_t *entry = &decision->entries[i];
        hash = mix(hash, hash_bytes(entry->name, strlen(entry->name), 1));
        hash = mix(hash,
                   entry->result != NULL ? hash_bytes(entry->result, entry->result_bytes, 2) : 3);
        hash =
            mix(hash,
                entry->sizes != NULL ? hash_bytes(entry->sizes, (size_t)entry->n_sizes * 8, 4) : 5);
        hash = mix(hash, hash_bytes(entry->signature->dims,
                                    (size_t)entry->signature->n_dims_words * 8, 6));
    }
    return hash;
}

// What was agreed without a record has no place in the log; it rides alone, and means the same on
// every rank.
static void check_unnumbered(sim_t *sim, int rank, const decision_t *decision)
{
    uint64_t hash = hash_of_run(decision);
    CHECK(sim, decision->n_entries == 1 && decision->entries[0].result != NULL,
          "rank %d runs %d entries without a number", rank, decision->n_entries);
    CHECK(sim, decision->entries[0].tag != 0, "rank %d has joined, and got an offer", rank);
    item_t *item = item_of(sim, rank, decision->entries[0].tag);
    CHECK(sim, !item->is_checked || item->run_hash == hash, "name%d differs on rank %d", item->name,
          rank);
    item->run_hash = hash;
    sim->n_unnumbered++;
}

// Invariant 1: numbers rise on every rank, a number means the same everywhere, and each set's
// members see the same sequence.
static void check_order(sim_t *sim, int rank, const decision_t *decision)
{
    rank_state_t *self = &sim->ranks[rank];
    int set = set_of_id(sim, rank, decision->set);
    sim_set_t *known = &sim->sets[set];
    batch_info_t *info = batch_info(sim, decision->batch);
    uint64_t hash = hash_of_run(decision);
    CHECK(sim, !self->has_batch || decision->batch > self->last_batch,
          "rank %d: batch %lu after %lu", rank, decision->batch, self->last_batch);
    self->has_batch = true;
    self->last_batch = decision->batch;
    if (info->set < 0) {
        *info = (batch_info_t){.set = set, .hash = hash, .n_entries = decision->n_entries};
    }
    CHECK(sim, info->set == set && info->hash == hash, "batch %lu differs on rank %d",
          decision->batch, rank);
    int at = known->cursors[rank]++;
    if (at == known->n_log) {
        known->log = realloc(known->log, ((size_t)at + 1) * sizeof(uint32_t));
        assert_non_null(known->log);
        known->log[known->n_log++] = decision->batch;
    }
    CHECK(sim, known->log[at] == decision->batch, "rank %d sees batch %lu as number %d of set %d",
          rank, decision->batch, at, set);
}

// --- Running batches ----------------------------------------------------------------------------
// A batch moves only when all members have got to it, as a collective would: if two ranks had
// different orders, both would wait for ever.

static void start_next(sim_t *sim, int rank)
{
    rank_state_t *self = &sim->ranks[rank];
    if (self->has_started || self->n_queue == 0) {
        return;
    }
    self->has_started = true;
    batch_info_t *info = batch_info(sim, self->queue[0].batch);
    const sim_set_t *set = &sim->sets[info->set];
    if (++info->n_started == set->n) {
        for (int i = 0; i < set->n; i++) {
            schedule(sim, soon(sim, 500), EVENT_DONE, set->ranks[i]);
        }
    }
}

static void enqueue(sim_t *sim, int rank, const decision_t *decision)
{
    rank_state_t *self = &sim->ranks[rank];
    if (self->n_queue == self->cap_queue) {
        self->cap_queue = MAX(8, self->cap_queue * 2);
        self->queue = realloc(self->queue, (size_t)self->cap_queue * sizeof(running_t));
        assert_non_null(self->queue);
    }
    running_t *running = &self->queue[self->n_queue++];
    *running = (running_t){.batch = decision->batch, .n_tags = decision->n_entries};
    running->tags = zeros((size_t)decision->n_entries, sizeof(uint64_t));
    for (int i = 0; i < decision->n_entries; i++) {
        running->tags[i] = decision->entries[i].tag;
    }
    start_next(sim, rank);
}

static void finish_batch(sim_t *sim, int rank)
{
    rank_state_t *self = &sim->ranks[rank];
    running_t running = self->queue[0];
    coord_batch_done(self->coord, running.batch, sim->now_ns);
    for (int i = 0; i < running.n_tags; i++) {
        if (running.tags[i] != 0) {
            finish_item(sim, rank, item_of(sim, rank, running.tags[i]));
        }
    }
    free(running.tags);
    self->n_queue--;
    memmove(self->queue, self->queue + 1, (size_t)self->n_queue * sizeof(running_t));
    self->has_started = false;
}

// --- Decisions ----------------------------------------------------------------------------------

static size_t bytes_of_entry(const decision_entry_t *entry)
{
    const int64_t *word = entry->signature->dims;
    size_t bytes = 0, each = hvd_dtype_bytes(entry->signature->dtype);
    for (int tensor = 0; tensor < entry->signature->n_tensors; tensor++) {
        int64_t n_dims = *word++;
        size_t n = 1;
        for (int64_t d = 0; d < n_dims; d++, word++) {
            n *= *word < 0 ? 1 : (size_t)*word;
        }
        int64_t rows = 1;
        if (entry->signature->op == HVD_ALLGATHER) {
            rows = 0;
            for (int i = tensor; i < entry->n_sizes; i += entry->signature->n_tensors) {
                rows += entry->sizes[i];
            }
        }
        bytes += n * each * (size_t)rows;
    }
    return bytes;
}

// Only what may be fused is, and only up to the threshold.
static void check_fusion(const sim_t *sim, const decision_t *decision)
{
    const signature_t *first = decision->entries[0].signature;
    size_t bytes = 0;
    for (int i = 0; i < decision->n_entries; i++) {
        const signature_t *other = decision->entries[i].signature;
        CHECK(sim,
              other->op == first->op && other->dtype == first->dtype &&
                  other->reduce == first->reduce && other->root == first->root &&
                  other->prescale == first->prescale && other->postscale == first->postscale,
              "batch %lu fuses different things", decision->batch);
        CHECK(sim, !sim->params.separate_groups || other->n_tensors <= 1, "a group is fused");
        bytes += bytes_of_entry(&decision->entries[i]);
    }
    bool fuses =
        first->op != HVD_ALLTOALL && !(first->op == HVD_ALLREDUCE && first->reduce == HVD_ADASUM);
    CHECK(sim, fuses && bytes <= sim->params.fusion_bytes, "batch %lu has %zu bytes",
          decision->batch, bytes);
}

static void on_run(sim_t *sim, int rank, const decision_t *decision)
{
    bool rides = decision->entries[0].result != NULL;
    if (decision->batch == COORD_NO_BATCH) {
        check_unnumbered(sim, rank, decision);
    } else {
        check_order(sim, rank, decision);
    }
    if (!rides && decision->n_entries > 1) {
        check_fusion(sim, decision);
        sim->n_fused++;
    }
    for (int i = 0; i < decision->n_entries; i++) {
        const decision_entry_t *entry = &decision->entries[i];
        CHECK(sim, (entry->result != NULL) == rides, "a batch that half rides");
        check_entry(sim, rank, decision->batch, entry);
        if (rides && entry->tag != 0) {
            finish_item(sim, rank, item_of(sim, rank, entry->tag));
        }
    }
    sim->n_runs++;
    if (!rides) {
        enqueue(sim, rank, decision);
    }
}

// Of those that differ, the lowest ranks are named.
static void check_named_ranks(const sim_t *sim, const item_t *item, const char *text)
{
    const sim_set_t *set = &sim->sets[item->set];
    bool odd_is_lowest = item->odd_rank == set->ranks[0];
    char first[32], second[32];
    snprintf(first, sizeof first, "rank %d submitted ", set->ranks[0]);
    snprintf(second, sizeof second, " and rank %d ",
             odd_is_lowest ? set->ranks[1] : item->odd_rank);
    CHECK(sim, strstr(text, first) != NULL && strstr(text, second) != NULL, "%s%s: %s", first,
          second, text);
}

static void on_fail(sim_t *sim, int rank, const decision_t *decision)
{
    int step = step_of(decision->tag), slot = slot_of(decision->tag);
    sim->n_fails++;
    if (sim->may_end && decision->status == sim->end_status) {
        sim->ranks[rank].n_undecided--;
        if (slot < sim->steps[step].n_items) {
            item_t *item = item_of(sim, rank, decision->tag);
            decide_item(sim, rank, item);
            item->decided[rank] = 2;
        }
        return;
    }
    if (slot == SLOT_CHANGE) {
        CHECK(sim, sim->steps[step].odd_rank >= 0 && decision->status == HVD_MISMATCH, "%s",
              decision->text);
        assert_starts(decision->text, "Mismatched process sets:");
        sim->ranks[rank].n_undecided--;
        return;
    }
    item_t *item = item_of(sim, rank, decision->tag);
    expected_t expected = expect(sim, step, slot);
    CHECK(sim, expected.status == decision->status,
          "rank %d, name%d, step %d: expected %d (%s), failed with: %s", rank, item->name, step,
          expected.status, expected.start, decision->text);
    assert_starts(decision->text, expected.start);
    if (item->text == NULL) {
        if (item->odd != ODD_NONE) {
            check_named_ranks(sim, item, decision->text);
        }
        item->text = strdup(decision->text);
        if (!item->is_orphan) {
            check_complete(sim, step, slot);
        }
    }
    CHECK(sim, strcmp(item->text, decision->text) == 0, "two sentences: %s", decision->text);
    decide_item(sim, rank, item);
    finish_item(sim, rank, item);
}

static void on_change(sim_t *sim, int rank, const decision_t *decision)
{
    step_t *step = &sim->steps[sim->ranks[rank].step];
    sim_set_t *set = &sim->sets[step->changed_set];
    bool adds = decision->kind == DECIDE_SET_ADDED;
    CHECK(sim,
          decision->tag == tag_of(sim->ranks[rank].step, SLOT_CHANGE) &&
              step->kind == (adds ? STEP_ADD_SET : STEP_REMOVE_SET) && !set->is_failed,
          "rank %d: process set %d", rank, decision->set);
    CHECK(sim, set->id == -1 || set->id == decision->set, "ids %d and %d", set->id, decision->set);
    set->id = decision->set;
    int n = 0;
    const int *ranks = coord_set_ranks(sim->ranks[rank].coord, decision->set, &n);
    CHECK(sim,
          adds ? ranks != NULL && n == set->n &&
                     memcmp(ranks, set->ranks, (size_t)n * sizeof(int)) == 0
               : true,
          "rank %d: process set %d has other ranks", rank, decision->set);
    sim->has_removed |= !adds;
    sim->ranks[rank].n_undecided--;
}

static void on_joined(sim_t *sim, int rank, const decision_t *decision)
{
    step_t *step = &sim->steps[sim->ranks[rank].step];
    CHECK(sim, step->kind == STEP_JOIN && decision->tag == tag_of(sim->ranks[rank].step, SLOT_JOIN),
          "rank %d", rank);
    CHECK(sim, step->last_joined == -1 || step->last_joined == decision->last_joined,
          "%d and %d joined last", step->last_joined, decision->last_joined);
    for (int other = 0; other < sim->size; other++) {
        CHECK(sim, sim->ranks[other].joined_step >= sim->ranks[rank].step, "rank %d has not joined",
              other);
    }
    step->last_joined = decision->last_joined;
    sim->ranks[rank].n_undecided--;
}

static void on_ended(sim_t *sim, int rank, const decision_t *decision)
{
    rank_state_t *self = &sim->ranks[rank];
    CHECK(sim, sim->may_end && decision->status == sim->end_status, "rank %d ended: %s", rank,
          decision->text);
    self->has_ended = true;
}

// Only neighbours of whoever cannot be heard may say so, and nobody who was away himself.
static void on_silence(sim_t *sim, int rank, const decision_t *decision)
{
    int about = decision->rank;
    if (sim->chaos != NULL) { // a plan tells who may be given up, by who may end the job
        uint64_t both = UINT64_C(1) << rank | UINT64_C(1) << about;
        CHECK(sim, (sim->excused & both) != 0, "rank %d finds rank %d silent", rank, about);
        if (decision->status == HVD_PEER_LOST) {
            sim->n_silences++;
            coord_abort(sim->ranks[rank].coord, HVD_PEER_LOST, -1, "a neighbour is silent");
        }
        return;
    }
    if (about == rank) {
        CHECK(sim, rank == sim->frozen, "rank %d thinks it was away", rank);
        return;
    }
    CHECK(sim, about == sim->silent[0] || about == sim->silent[1], "rank %d finds rank %d silent",
          rank, about);
    CHECK(sim, rank != sim->frozen, "rank %d was away and blames rank %d", rank, about);
    sim->n_silences++;
    if (decision->status == HVD_PEER_LOST) {
        coord_abort(sim->ranks[rank].coord, HVD_PEER_LOST, -1, "a neighbour is silent");
    }
}

static void on_decision(sim_t *sim, int rank, const decision_t *decision)
{
    CHECK(sim, !sim->ranks[rank].has_ended, "rank %d is told more after the end", rank);
    switch (decision->kind) {
    case DECIDE_RUN:
        on_run(sim, rank, decision);
        break;
    case DECIDE_FAIL:
        on_fail(sim, rank, decision);
        break;
    case DECIDE_JOINED:
        on_joined(sim, rank, decision);
        break;
    case DECIDE_SET_ADDED:
    case DECIDE_SET_REMOVED:
        on_change(sim, rank, decision);
        break;
    case DECIDE_REPORT:
        CHECK(sim, sim->reports_allowed, "report: %s", decision->text);
        sim->n_reports++;
        break;
    case DECIDE_SILENT:
        on_silence(sim, rank, decision);
        break;
    case DECIDE_STUCK:
        CHECK(sim, false, "batch %llu is taken for stuck", (unsigned long long)decision->batch);
        break;
    case DECIDE_ENDED:
        on_ended(sim, rank, decision);
        break;
    }
}

// --- Links --------------------------------------------------------------------------------------

static void push_frame(sim_t *sim, int index, const uint8_t *body, size_t bytes)
{
    edge_t *edge = &sim->edges[index];
    if (edge->is_cut) {
        return;
    }
    if (edge->n == edge->cap) {
        edge->cap = MAX(4, edge->cap * 2);
        edge->frames = realloc(edge->frames, (size_t)edge->cap * sizeof(frame_t));
        assert_non_null(edge->frames);
    }
    edge->frames[edge->n++] = (frame_t){copy_of(body, bytes), bytes};
    edge->last_ns = MAX(edge->last_ns, soon(sim, edge->speed_ns));
    schedule(sim, edge->last_ns, EVENT_DELIVER, index);
}

// Cuts whole frames off the stream.
static void cut_frames(sim_t *sim, int index)
{
    edge_t *edge = &sim->edges[index];
    size_t at = 0, bytes;
    while (frame_read(edge->stream.data + at, edge->stream.len - at, &bytes, NULL) == HVD_OK) {
        push_frame(sim, index, edge->stream.data + at + FRAME_HEADER_BYTES, bytes);
        at += FRAME_HEADER_BYTES + bytes;
    }
    edge->stream.len -= at;
    memmove(edge->stream.data, edge->stream.data + at, edge->stream.len);
}

static bool take_bytes(sim_t *sim, int rank, int i)
{
    coord_t *coord = sim->ranks[rank].coord;
    int index = sim->edge_base[rank] + i;
    const void *bytes;
    coord_form_batches(coord);
    size_t n = coord_outgoing(coord, i, &bytes);
    if (n == 0) {
        return false;
    }
    // A socket does not always take everything.
    size_t taken = chance(&sim->chance, 10) ? 1 + rnd(&sim->chance) % n : n;
    buf_append(&sim->edges[index].stream, bytes, taken);
    coord_sent(coord, i, taken);
    if (taken < n) {
        schedule(sim, soon(sim, 100), EVENT_PUMP, rank);
    }
    cut_frames(sim, index);
    return true;
}

// What an engine does after every input.
static void pump(sim_t *sim, int rank)
{
    rank_state_t *self = &sim->ranks[rank];
    const decision_t *decision;
    bool any = true;
    while (any && !self->is_dead) {
        any = false;
        for (int i = 0; i < coord_n_neighbours(self->coord); i++) {
            take_bytes(sim, rank, i);
        }
        while (coord_form_batches(self->coord), (decision = coord_next(self->coord)) != NULL) {
            on_decision(sim, rank, decision);
            any = true;
        }
    }
    wake(sim, rank);
    uint64_t tick_ns = coord_next_tick(self->coord);
    if (tick_ns != NEVER_NS && (self->tick_ns == 0 || tick_ns < self->tick_ns) && !self->is_dead) {
        self->tick_ns = MAX(tick_ns, sim->now_ns + 1);
        schedule(sim, self->tick_ns, EVENT_TICK, rank);
    }
}

static void deliver(sim_t *sim, int index)
{
    edge_t *edge = &sim->edges[index];
    frame_t frame = edge->frames[edge->first++];
    err_t err;
    if (edge->first == edge->n) {
        edge->first = edge->n = 0;
    }
    if (!sim->ranks[edge->to].is_dead) {
        hvd_status_t status = coord_receive(sim->ranks[edge->to].coord, edge->from, frame.body,
                                            frame.bytes, sim->now_ns, &err);
        CHECK(sim, status == HVD_OK, "rank %d: %s", edge->to, err.text);
        pump(sim, edge->to);
    }
    free(frame.body);
}

// --- Ends ---------------------------------------------------------------------------------------

static void kill_rank(sim_t *sim, int rank)
{
    rank_state_t *self = &sim->ranks[rank];
    sim->may_end = true;
    sim->end_status = HVD_PEER_LOST;
    self->is_dead = true;
    for (int i = 0; i < coord_n_neighbours(self->coord); i++) {
        schedule(sim, soon(sim, 2000), EVENT_LOST, coord_neighbour(self->coord, i));
    }
}

static void freeze_rank(sim_t *sim, int rank)
{
    sim->may_end = true;
    sim->end_status = HVD_PEER_LOST;
    sim->frozen = sim->silent[0] = rank;
    // Whoever watches it and is held up itself takes longer to be sure.
    sim->thaw_ns = sim->now_ns + (sim->busy >= 0 ? 40 : 2) * sim->params.heartbeat_fail_ns;
}

static void cut_link(sim_t *sim, int rank)
{
    int parent = sim->parent[rank];
    int which = 1 + below(&sim->chance, 3); // bits: up, down
    sim->may_end = true;
    sim->end_status = HVD_PEER_LOST;
    sim->silent[0] = rank;
    sim->silent[1] = parent;
    for (int i = 0; i < 2 * (sim->size - 1); i++) {
        edge_t *edge = &sim->edges[i];
        edge->is_cut |= (which & 1) != 0 && edge->from == rank && edge->to == parent;
        edge->is_cut |= (which & 2) != 0 && edge->from == parent && edge->to == rank;
    }
}

// --- Chaos --------------------------------------------------------------------------------------

#define CHAOS_MS NS_PER_US // a millisecond of a plan

static bool crosses_hosts(const sim_t *sim, const edge_t *edge)
{
    int half = (sim->size + 1) / 2;
    return (edge->from < half) != (edge->to < half);
}

// On all edges between the hosts; towards_second: only on those that lead there.
static void cut_hosts(sim_t *sim, bool towards_second)
{
    for (int i = 0; i < 2 * (sim->size - 1); i++) {
        edge_t *edge = &sim->edges[i];
        edge->is_cut |= crosses_hosts(sim, edge) && (!towards_second || edge->to > edge->from);
    }
}

static void hold_hosts(sim_t *sim, uint64_t until_ns)
{
    for (int i = 0; i < 2 * (sim->size - 1); i++) {
        if (crosses_hosts(sim, &sim->edges[i])) {
            sim->edges[i].held_until_ns = until_ns;
        }
    }
}

static void reset_hosts(sim_t *sim)
{
    cut_hosts(sim, false);
    for (int i = 0; i < 2 * (sim->size - 1); i++) {
        if (crosses_hosts(sim, &sim->edges[i])) {
            schedule(sim, soon(sim, 2000), EVENT_LOST, sim->edges[i].to);
        }
    }
}

static void make_fault(sim_t *sim)
{
    const planned_t *fault = &sim->chaos->faults[sim->n_chaos++];
    uint64_t lasts_ns = (uint64_t)fault->lasts_ms * CHAOS_MS, over_ns = sim->now_ns;
    bool everybody = fault_kinds[fault->kind].needs_hosts;
    sim->excused |= everybody ? UINT64_MAX : UINT64_C(1) << fault->victim;
    if (fault->kind >= N_SURVIVED) {
        sim->may_end = true;
        sim->end_status = HVD_PEER_LOST;
    }
    switch (fault->kind) {
    case FAULT_STOP:
        sim->frozen = fault->victim;
        over_ns = sim->thaw_ns = sim->now_ns + lasts_ns;
        break;
    case FAULT_SHORT_CUT:
    case FAULT_LOSS: // which delays what is lost
        over_ns = sim->now_ns + lasts_ns / (fault->kind == FAULT_LOSS ? 4 : 1);
        hold_hosts(sim, over_ns);
        break;
    case FAULT_KILL_TWO:
        kill_rank(sim, (fault->victim + 1) % sim->size);
        kill_rank(sim, fault->victim);
        break;
    case FAULT_KILL:
        kill_rank(sim, fault->victim);
        break;
    case FAULT_LONG_STOP:
        freeze_rank(sim, fault->victim);
        break;
    case FAULT_CUT:
    case FAULT_CUT_ONE_WAY:
        cut_hosts(sim, fault->kind == FAULT_CUT_ONE_WAY);
        break;
    case FAULT_RESET:
        reset_hosts(sim);
        break;
    case N_FAULTS:
        break;
    }
    if (sim->n_chaos < sim->chaos->n_faults) {
        uint64_t pause_ns = (uint64_t)sim->chaos->faults[sim->n_chaos].after_ms * CHAOS_MS;
        schedule(sim, over_ns + pause_ns, EVENT_CHAOS, 0);
    }
}

// Mostly for long enough to be noticed by the rank itself, often by others, never by so much that
// it may be given up.
static uint64_t held_up_until(sim_t *sim)
{
    return sim->now_ns + (uint64_t)below(&sim->chance, CHAOS_TIMEOUT_MS / 2) * CHAOS_MS;
}

// Before that time what happens to the rank has to wait; a time that is over: it runs.
static uint64_t runs_from(const sim_t *sim, int rank)
{
    uint64_t frozen_until_ns = rank == sim->frozen ? sim->thaw_ns : 0;
    return MAX(frozen_until_ns, rank == sim->busy ? sim->busy_until_ns : 0);
}

static void handle(sim_t *sim, const event_t *event)
{
    int rank = event->what;
    rank_state_t *self = event->kind == EVENT_DELIVER ? NULL : &sim->ranks[rank];
    int whose = self != NULL ? rank : sim->edges[event->what].to;
    if (event->kind == EVENT_CHAOS) {
        make_fault(sim);
        return;
    }
    if (self == NULL && sim->now_ns < sim->edges[event->what].held_until_ns) {
        schedule(sim, sim->edges[event->what].held_until_ns, event->kind, event->what);
        return;
    }

    if (sim->now_ns < runs_from(sim, whose)) {
        schedule(sim, runs_from(sim, whose), event->kind, event->what);
        return;
    }

    if (self != NULL && self->is_dead) {
        return;
    }
    switch (event->kind) {
    case EVENT_DELIVER:
        deliver(sim, event->what);
        return;
    case EVENT_STEP:
        run_program(sim, rank);
        break;
    case EVENT_DONE:
        finish_batch(sim, rank);
        pump(sim, rank);
        start_next(sim, rank);
        return;
    case EVENT_TICK:
        self->tick_ns = 0;
        coord_tick(self->coord, sim->now_ns);
        sim->busy_until_ns = rank == sim->busy ? held_up_until(sim) : sim->busy_until_ns;
        break;
    case EVENT_PUMP:
        break;
    case EVENT_STOP:
        sim->may_end = true;
        sim->end_status = HVD_SHUTDOWN;
        self->has_asked_stop = true;
        coord_shutdown(self->coord, "", sim->now_ns);
        break;
    case EVENT_ABORT:
        sim->may_end = true;
        sim->end_status = HVD_PEER_LOST;
        coord_abort(self->coord, HVD_PEER_LOST, -1, "a link is lost");
        break;
    case EVENT_LOST:
        coord_abort(self->coord, HVD_PEER_LOST, -1, "a neighbour is lost");
        break;
    case EVENT_KILL:
        kill_rank(sim, rank);
        return;
    case EVENT_FREEZE:
        freeze_rank(sim, rank);
        return;
    case EVENT_CUT:
        cut_link(sim, rank);
        return;
    case EVENT_CHAOS:
        return;
    }
    pump(sim, rank);
}

// --- Making, running and checking a world -------------------------------------------------------

static void choose_params(sim_t *sim)
{
    static const int capacities[] = {0, 1, 3, 8, 1000, 1000};
    static const size_t fusions[] = {0, 600, 4000, 1 << 20, 1 << 20},
                        inlines[] = {0, 8, 128, 256, 256};
    uint64_t *state = &sim->chance;
    sim->params =
        (coord_params_t){.size = sim->size,
                         .parent = sim->parent,
                         .fusion_bytes = fusions[below(state, N_ELEMENTS(fusions))],
                         .inline_bytes = inlines[below(state, N_ELEMENTS(inlines))],
                         .cache_capacity = capacities[below(state, N_ELEMENTS(capacities))],
                         .separate_groups = chance(state, 30),
                         .dynamic_sets = true,
                         .cycle_ns = chance(state, 25) ? 200 : 0,
                         .reduce = plain_reduce};
    if (chance(state, 30)) {
        // So short that reports come all the time; they must not disturb anything. Each takes as
        // many messages as there are ranks.
        sim->reports_allowed = true;
        sim->params.stall_warn_ns =
            (500 + (uint64_t)below(state, 5000)) * (sim->size > 100 ? 20 : 1);
    } else if (chance(state, 50)) {
        sim->params.stall_warn_ns = NS_PER_S;
    }
}

static void make_ranks(sim_t *sim)
{
    err_t err;
    sim->ranks = zeros((size_t)sim->size, sizeof(rank_state_t));
    for (int rank = 0; rank < sim->size; rank++) {
        rank_state_t *self = &sim->ranks[rank];
        sim->params.rank = rank;
        self->chance = mix(sim->seed, 5000 + (uint64_t)rank);
        self->step = -1;
        self->joined_step = -1;
        assert_int_equal(coord_new(&sim->params, &self->coord, &err), HVD_OK);
        for (int set = 1; set < sim->n_sets; set++) {
            const sim_set_t *known = &sim->sets[set];
            if (known->born == 0) {
                int id;
                assert_int_equal(coord_define_set(self->coord, known->ranks, known->n, &id, &err),
                                 HVD_OK);
                assert_int_equal(id, known->id);
            }
        }
        schedule(sim, soon(sim, 1000), EVENT_STEP, rank);
    }
}

static void make_edges(sim_t *sim)
{
    uint64_t spread_ns = (uint64_t)1 << below(&sim->chance, 12);
    int n = 0;
    sim->edge_base = zeros((size_t)sim->size, sizeof(int));
    sim->edges = zeros((size_t)sim->size * 2, sizeof(edge_t));
    for (int rank = 0; rank < sim->size; rank++) {
        sim->edge_base[rank] = n;
        for (int i = 0; i < coord_n_neighbours(sim->ranks[rank].coord); i++) {
            sim->edges[n++] = (edge_t){.from = rank,
                                       .to = coord_neighbour(sim->ranks[rank].coord, i),
                                       .speed_ns = spread_ns * (chance(&sim->chance, 5) ? 50 : 1)};
        }
    }
    assert_int_equal(n, 2 * (sim->size - 1));
}

static void plan(sim_t *sim)
{
    uint8_t *is_member = zeros((size_t)sim->size, 1);
    memset(is_member, 1, (size_t)sim->size);
    add_planned_set(sim, is_member, 0);
    int n_static = below(&sim->chance, 5);
    for (int i = 0; i < n_static; i++) {
        if (choose_members(sim, &sim->chance, 0, is_member)) {
            add_planned_set(sim, is_member, 0);
        }
    }
    for (int set = 0; set < sim->n_sets; set++) {
        sim->sets[set].id = set;
    }
    free(is_member);
    sim->steps = zeros((size_t)sim->n_steps, sizeof(step_t));
    for (int step = 0; step < sim->n_steps; step++) {
        plan_step(sim, step);
    }
}

static void choose_ending(sim_t *sim)
{
    static const event_kind_t kinds[] = {EVENT_STOP, EVENT_STOP,   EVENT_ABORT,
                                         EVENT_KILL, EVENT_FREEZE, EVENT_CUT};
    static const ending_t endings[] = {
        [EVENT_STOP] = END_BY_SHUTDOWN,  [EVENT_ABORT] = END_BY_ABORT, [EVENT_KILL] = END_BY_DEATH,
        [EVENT_FREEZE] = END_BY_SILENCE, [EVENT_CUT] = END_BY_SILENCE,
    };
    uint64_t at_ns = rnd(&sim->chance) % ((uint64_t)1000 << below(&sim->chance, 10));
    int how = below(&sim->chance, 10), rank = below(&sim->chance, sim->size);
    sim->ending = END_BY_ITSELF;
    if (how < (int)N_ELEMENTS(kinds) && endings[kinds[how]] == END_BY_SILENCE) {
        rank = MAX(rank, sim->size > 1); // the first rank has no parent to be cut from
    }
    if (how < (int)N_ELEMENTS(kinds) && sim->size > 1) {
        sim->ending = endings[kinds[how]];
        schedule(sim, at_ns, kinds[how], rank);
    }
}

// The world of a plan: its hosts, and its limits on the clock of the simulation.
static void choose_chaos(sim_t *sim, const chaos_plan_t *chaos)
{
    int second = chaos->has_two_hosts ? (sim->size + 1) / 2 : sim->size;
    for (int rank = 0; rank < sim->size; rank++) {
        sim->parent[rank] = rank == 0 ? -1 : rank > second ? second : 0;
    }
    sim->chaos = chaos;
    sim->ending = chaos->is_fatal ? END_BY_DEATH : END_BY_ITSELF;
    sim->params.stall_warn_ns = NS_PER_S;
    sim->params.heartbeat_ns = CHAOS_HEARTBEAT_MS * CHAOS_MS;
    sim->params.heartbeat_warn_ns = CHAOS_WARNING_MS * CHAOS_MS;
    sim->params.heartbeat_fail_ns = CHAOS_TIMEOUT_MS * CHAOS_MS;
    if (chance(&sim->chance, 50)) {
        sim->busy = below(&sim->chance, sim->size);
        sim->excused = UINT64_C(1) << sim->busy;
    }
    if (chaos->n_faults > 0) {
        schedule(sim, (uint64_t)chaos->faults[0].after_ms * CHAOS_MS, EVENT_CHAOS, 0);
    }
}

static sim_t *sim_new(uint64_t seed, int size, int n_steps, int max_items, bool is_plain,
                      const chaos_plan_t *chaos)
{
    sim_t *sim = zeros(1, sizeof *sim);
    *sim = (sim_t){.seed = seed,
                   .size = size,
                   .n_steps = n_steps,
                   .max_items = max_items,
                   .chance = mix(seed, (uint64_t)size),
                   .keeps_sets = is_plain};
    sim->parent = zeros((size_t)size, sizeof(int));
    make_tree(sim->parent, size, below(&sim->chance, N_TREES), &sim->chance);
    sim->frozen = sim->busy = sim->silent[0] = sim->silent[1] = -1;
    choose_params(sim);
    plan(sim);
    if (!is_plain) {
        choose_ending(sim);
    }
    // Heartbeats never end by themselves, so only worlds that fall silent have them. The slowest
    // links take a fifth of a millisecond; the end is far off for reports that come all the time.
    if (sim->ending == END_BY_SILENCE) {
        sim->params.stall_warn_ns = NS_PER_S;
        sim->params.heartbeat_ns = 50 * NS_PER_US;
        sim->params.heartbeat_warn_ns = 500 * NS_PER_US;
        sim->params.heartbeat_fail_ns = 2 * NS_PER_MS;
    }
    if (chaos != NULL) {
        choose_chaos(sim, chaos);
    }
    make_ranks(sim);
    make_edges(sim);
    return sim;
}

// Heartbeats go on for ever: a plan is over when its faults are made and all have done their work.
static bool is_over(const sim_t *sim)
{
    bool all = sim->chaos != NULL && sim->n_chaos == sim->chaos->n_faults;
    for (int rank = 0; all && rank < sim->size; rank++) {
        const rank_state_t *self = &sim->ranks[rank];
        all = self->is_dead || self->has_ended ||
              (!sim->chaos->is_fatal && self->step >= sim->n_steps && self->n_queue == 0 &&
               self->n_undecided == 0);
    }
    return all;
}

static void sim_run(sim_t *sim)
{
    while (sim->n_heap > 0 && !is_over(sim)) {
        event_t event = next_event(sim);
        sim->now_ns = event.at_ns;
        handle(sim, &event);
        CHECK(sim, ++sim->n_events < MAX_EVENTS, "no end in sight");
    }
}

static void describe_stuck(const sim_t *sim, int rank)
{
    const rank_state_t *self = &sim->ranks[rank];
    sim_fail(sim,
             "rank %d is stuck in step %d of %d (kind %d), action %d of %d, waits for %d, %d "
             "undecided, %d batches queued",
             rank, self->step, sim->n_steps,
             self->step >= 0 && self->step < sim->n_steps ? (int)sim->steps[self->step].kind : -1,
             self->at, self->n_actions, self->waits_for, self->n_undecided, self->n_queue);
}

static void check_logs(const sim_t *sim)
{
    for (int set = 0; set < sim->n_sets; set++) {
        const sim_set_t *known = &sim->sets[set];
        for (int i = 0; i < known->n; i++) {
            CHECK(sim, known->cursors[known->ranks[i]] == known->n_log,
                  "rank %d saw %d of %d batches of set %d", known->ranks[i],
                  known->cursors[known->ranks[i]], known->n_log, set);
        }
    }
}

static void check_world(const sim_t *sim)
{
    for (int rank = 0; rank < sim->size; rank++) {
        const rank_state_t *self = &sim->ranks[rank];
        if (self->is_dead) {
            continue;
        }
        if (sim->ending == END_BY_ITSELF) {
            if (self->step < sim->n_steps) {
                describe_stuck(sim, rank);
            }
            CHECK(sim, self->n_queue == 0 && self->n_undecided == 0, "rank %d has work left", rank);
        } else {
            CHECK(sim, self->has_ended, "rank %d does not know of the end", rank);
        }
        CHECK(sim, coord_pending(self->coord) == 0, "rank %d has %d pending", rank,
              coord_pending(self->coord));
        CHECK(sim, sim->has_removed || coord_counters(self->coord).n_stale_lines == 0,
              "rank %d: stale lines", rank);
        CHECK(sim, coord_next_tick(self->coord) == NEVER_NS || sim->chaos != NULL,
              "rank %d wants ticks", rank);
    }
    if (sim->ending == END_BY_ITSELF || sim->ending == END_BY_SHUTDOWN) {
        check_logs(sim);
    }
}

static void free_plan(sim_t *sim)
{
    for (int step = 0; step < sim->n_steps; step++) {
        for (int i = 0; i < sim->steps[step].n_items; i++) {
            free(sim->steps[step].items[i].has);
            free(sim->steps[step].items[i].decided);
            free(sim->steps[step].items[i].text);
        }
        free(sim->steps[step].cuts);
    }
    for (int set = 0; set < sim->n_sets; set++) {
        free(sim->sets[set].ranks);
        free(sim->sets[set].is_member);
        free(sim->sets[set].cursors);
        free(sim->sets[set].log);
    }
    free(sim->steps);
}

static void sim_free(sim_t *sim)
{
    free_plan(sim);
    for (int rank = 0; rank < sim->size; rank++) {
        for (int i = 0; i < sim->ranks[rank].n_queue; i++) {
            free(sim->ranks[rank].queue[i].tags);
        }
        free(sim->ranks[rank].queue);
        coord_free(sim->ranks[rank].coord);
    }
    for (int i = 0; i < 2 * (sim->size - 1); i++) {
        for (int k = sim->edges[i].first; k < sim->edges[i].n; k++) {
            free(sim->edges[i].frames[k].body);
        }
        free(sim->edges[i].frames);
        buf_free(&sim->edges[i].stream);
    }
    free(sim->ranks);
    free(sim->edges);
    free(sim->edge_base);
    free(sim->heap);
    free(sim->batches);
    free(sim->parent);
    free(sim);
}

// What a test has seen, to show that it has seen enough.
typedef struct totals {
    size_t n_worlds, n_events, n_runs, n_fused, n_unnumbered, n_fails, n_reports, n_silences;
    size_t n_endings[END_BY_SILENCE + 1];
} totals_t;

static void run_world(uint64_t seed, int size, totals_t *totals)
{
    sim_t *sim =
        sim_new(seed, size, size > 100 ? 5 : 12, size > 100 ? 8 : MAX_ITEMS - 1, false, NULL);
    sim_run(sim);
    check_world(sim);
    totals->n_worlds++;
    totals->n_events += sim->n_events;
    totals->n_runs += sim->n_runs;
    totals->n_fused += sim->n_fused;
    totals->n_unnumbered += sim->n_unnumbered;
    totals->n_fails += sim->n_fails;
    totals->n_reports += sim->n_reports;
    totals->n_silences += sim->n_silences;
    totals->n_endings[sim->ending]++;
    sim_free(sim);
}

#define CHAOS_STEPS 40

static void run_chaos(uint64_t seed, totals_t *totals)
{
    chaos_plan_t chaos = chaos_plan(seed);
    sim_t *sim = sim_new(seed, chaos.n_ranks, CHAOS_STEPS, 8, true, &chaos);
    sim_run(sim);
    CHECK(sim, is_over(sim), "chaos %llu has no end", (unsigned long long)seed);
    check_world(sim);
    totals->n_worlds++;
    totals->n_events += sim->n_events;
    totals->n_runs += sim->n_runs;
    totals->n_silences += sim->n_silences;
    totals->n_endings[sim->ending]++;
    sim_free(sim);
}

static void show(const totals_t *totals)
{
    print_message("%zu worlds (%zu shut down, %zu aborted, %zu lost a rank, %zu fell silent), %zu "
                  "events, %zu batches run (%zu fused, %zu met half way), %zu failures, %zu "
                  "reports, %zu silences\n",
                  totals->n_worlds, totals->n_endings[END_BY_SHUTDOWN],
                  totals->n_endings[END_BY_ABORT], totals->n_endings[END_BY_DEATH],
                  totals->n_endings[END_BY_SILENCE], totals->n_events, totals->n_runs,
                  totals->n_fused, totals->n_unnumbered, totals->n_fails, totals->n_reports,
                  totals->n_silences);
}

// --- Tests --------------------------------------------------------------------------------------

static struct {
    bool is_set;
    uint64_t seed;
    uint64_t chaos; // 0: a world of its own
    int ranks;
} replay;

static void replayed_world(void **state)
{
    totals_t totals = {0};
    (void)state;
    if (replay.chaos != 0) {
        run_chaos(replay.chaos, &totals);
    } else {
        run_world(replay.seed, replay.ranks, &totals);
    }
    show(&totals);
}

static void chaos_is_survived_or_explained(void **state)
{
    totals_t totals = {0};
    (void)state;
    for (uint64_t seed = 1; seed <= N_CHAOS; seed++) {
        run_chaos(seed, &totals);
    }
    show(&totals);
    assert_true(totals.n_endings[END_BY_ITSELF] > totals.n_worlds / 20);
    assert_true(totals.n_endings[END_BY_DEATH] > totals.n_worlds / 2);
    assert_true(totals.n_silences > totals.n_worlds / 10); // stops and cuts were noticed as such
}

static void small_worlds_agree(void **state)
{
    totals_t totals = {0};
    (void)state;
    for (uint64_t seed = 1; seed <= N_SMALL_WORLDS; seed++) {
        run_world(seed, 1 + (int)(mix(seed, 9) % 40), &totals);
    }
    show(&totals);
}

static void tiny_worlds_agree(void **state)
{
    totals_t totals = {0};
    (void)state;
    for (uint64_t seed = 1; seed <= N_SMALL_WORLDS; seed++) {
        run_world(seed, 1 + (int)(seed % 5), &totals);
    }
    show(&totals);
}

static void large_worlds_agree(void **state)
{
    totals_t totals = {0};
    (void)state;
    for (uint64_t seed = 1; seed <= (IS_INSTRUMENTED ? 2 : 8); seed++) {
        run_world(seed, 1000, &totals);
    }
    show(&totals);
}

// --- Cost ---------------------------------------------------------------------------------------

// Coordinators that exchange messages in rounds: in a round everything that was written before it
// arrives.
typedef struct lockstep {
    int size;
    int parent[1000];
    coord_t *ranks[1000];
    bool is_dead[1000];
    int ended_in[1000];           // round in which the rank was told of the end; -1: not yet
    int n_up[1000], n_down[1000]; // frames over the edge above each rank
    size_t up_bytes[1000], down_bytes[1000];
    int round;
} lockstep_t;

static lockstep_t *lockstep_new(int size, int tree, uint64_t seed)
{
    lockstep_t *world = zeros(1, sizeof *world);
    coord_params_t params = world_params();
    world->size = size;
    make_tree(world->parent, size, tree, &seed);
    for (int rank = 0; rank < size; rank++) {
        params.rank = rank;
        params.size = size;
        params.parent = world->parent;
        assert_int_equal(coord_new(&params, &world->ranks[rank], NULL), HVD_OK);
        world->ended_in[rank] = -1;
    }
    return world;
}

static void lockstep_free(lockstep_t *world)
{
    for (int rank = 0; rank < world->size; rank++) {
        coord_free(world->ranks[rank]);
    }
    free(world);
}

static void deliver_all(lockstep_t *world, int from, int to, const buf_t *bytes)
{
    err_t err;
    for (size_t at = 0; at < bytes->len;) {
        size_t n;
        assert_int_equal(frame_read(bytes->data + at, bytes->len - at, &n, NULL), HVD_OK);
        if (!world->is_dead[to]) {
            assert_int_equal(coord_receive(world->ranks[to], from,
                                           bytes->data + at + FRAME_HEADER_BYTES, n, 0, &err),
                             HVD_OK);
        }
        at += FRAME_HEADER_BYTES + n;
        bool is_up = world->parent[from] == to;
        *(is_up ? &world->n_up[from] : &world->n_down[to]) += 1;
        *(is_up ? &world->up_bytes[from] : &world->down_bytes[to]) += n;
    }
}

static void take_decisions(lockstep_t *world, int rank)
{
    const decision_t *decision;
    while (coord_form_batches(world->ranks[rank]),
           (decision = coord_next(world->ranks[rank])) != NULL) {
        if (decision->kind == DECIDE_RUN && decision->entries[0].result == NULL) {
            coord_batch_done(world->ranks[rank], decision->batch, 0);
        } else if (decision->kind == DECIDE_ENDED) {
            world->ended_in[rank] = world->round;
        }
    }
}

// One round; false if nothing was under way.
static bool lockstep_round(lockstep_t *world)
{
    buf_t *written = zeros((size_t)world->size * 2, sizeof(buf_t));
    bool any = false;
    for (int phase = 0, n = 0; phase < 2; phase++, n = 0) {
        for (int rank = 0; rank < world->size; rank++) {
            for (int i = 0; i < coord_n_neighbours(world->ranks[rank]); i++, n++) {
                const void *bytes;
                if (phase == 0 && !world->is_dead[rank]) {
                    coord_form_batches(world->ranks[rank]);
                    size_t n_bytes = coord_outgoing(world->ranks[rank], i, &bytes);
                    any |= n_bytes > 0;
                    if (n_bytes > 0) {
                        buf_append(&written[n], bytes, n_bytes);
                    }
                    coord_sent(world->ranks[rank], i, n_bytes);
                } else if (phase == 1) {
                    deliver_all(world, rank, coord_neighbour(world->ranks[rank], i), &written[n]);
                    buf_free(&written[n]);
                }
            }
        }
    }
    free(written);
    world->round++;
    for (int rank = 0; rank < world->size; rank++) {
        if (!world->is_dead[rank]) {
            take_decisions(world, rank);
        }
    }
    return any;
}

static void submit_everywhere(lockstep_t *world, int n_names, bool rides)
{
    int64_t words[] = {1, rides ? 2 : 1000};
    float payload[2] = {1, 2};
    for (int rank = 0; rank < world->size; rank++) {
        for (int i = 0; i < n_names; i++) {
            char name[32];
            int bytes = snprintf(name, sizeof name, "gradient of layer %d", i);
            coord_request_t request = {
                .name = name, .name_bytes = (size_t)bytes, .tag = 1 + (uint64_t)i};
            signature_t signature = {.op = HVD_ALLREDUCE,
                                     .dtype = HVD_FLOAT32,
                                     .reduce = HVD_SUM,
                                     .prescale = 1,
                                     .postscale = 1,
                                     .n_tensors = 1,
                                     .dims = words,
                                     .n_dims_words = 2};
            request.signature = &signature;
            request.payload = rides ? payload : NULL;
            request.payload_bytes = rides ? sizeof payload : 0;
            assert_int_equal(coord_submit(world->ranks[rank], &request, 0, NULL), HVD_OK);
        }
    }
}

static void clear_counts(lockstep_t *world)
{
    memset(world->n_up, 0, sizeof world->n_up);
    memset(world->n_down, 0, sizeof world->n_down);
    memset(world->up_bytes, 0, sizeof world->up_bytes);
    memset(world->down_bytes, 0, sizeof world->down_bytes);
}

// What comes down for N entries: one record; or, if halves of the job met, an offer for each, and a
// record for each to those who had none.
static bool is_cheap(size_t down_bytes, size_t n, size_t payload_bytes)
{
    size_t batched = 4 + n * (2 + payload_bytes), offered = n * (2 + payload_bytes);
    return down_bytes == batched ||
           (payload_bytes > 0 && (down_bytes == offered || down_bytes == offered + 4 * n));
}

// Names are new in the first cycle; from then on an entry costs the same few bytes on every edge,
// whatever is below it.
static void check_steady_state(int size, int tree, bool rides)
{
    enum { N = 5, PAYLOAD_BYTES = 8 };
    lockstep_t *world = lockstep_new(size, tree, 3);

    for (int cycle = 0; cycle < 4; cycle++) {
        clear_counts(world);
        submit_everywhere(world, N, rides);
        while (lockstep_round(world)) {
        }
        for (int rank = 1; rank < size; rank++) {
            assert_int_equal(world->n_up[rank], 1);
            assert_int_equal(world->n_down[rank], 1);
            if (cycle > 0) {
                size_t payload_bytes = rides ? 1 + PAYLOAD_BYTES : 0;
                assert_int_equal(world->up_bytes[rank], N * (2 + payload_bytes));
                assert_true(is_cheap(world->down_bytes[rank], N, payload_bytes));
            }
        }
    }
    lockstep_free(world);
}

// Invariant 4.
static void steady_state_is_cheap(void **state)
{
    static const int sizes[] = {2, 13, 100, 1000};
    (void)state;
    for (int tree = 0; tree < N_TREES; tree++) {
        for (size_t s = 0; s < N_ELEMENTS(sizes) - (tree == TREE_CHAIN); s++) {
            check_steady_state(sizes[s], tree, false);
            check_steady_state(sizes[s], tree, true);
        }
    }
}

static int distance(const lockstep_t *world, int a, int b)
{
    int depth[2] = {0, 0}, at[2] = {a, b}, steps = 0;
    for (int i = 0; i < 2; i++) {
        for (int rank = at[i]; rank != 0; rank = world->parent[rank]) {
            depth[i]++;
        }
    }
    while (at[0] != at[1]) {
        int deeper = depth[0] >= depth[1] ? 0 : 1;
        at[deeper] = world->parent[at[deeper]];
        depth[deeper]--;
        steps++;
    }
    return steps;
}

// Invariant 5: one message time per edge on the way, both if a rank says so and if it dies.
static void aborts_travel_the_tree(void **state)
{
    uint64_t chance_state = 11;
    (void)state;
    for (int tree = 0; tree < N_TREES; tree++) {
        for (int dies = 0; dies < 2; dies++) {
            int size = tree == TREE_CHAIN ? 60 : 500;
            lockstep_t *world = lockstep_new(size, tree, 5);
            int culprit = below(&chance_state, size);
            submit_everywhere(world, 2, true);
            lockstep_round(world);
            int begin = world->round;
            if (dies) {
                world->is_dead[culprit] = true;
                for (int i = 0; i < coord_n_neighbours(world->ranks[culprit]); i++) {
                    coord_abort(world->ranks[coord_neighbour(world->ranks[culprit], i)],
                                HVD_PEER_LOST, -1, "gone");
                }
            } else {
                coord_abort(world->ranks[culprit], HVD_PEER_LOST, -1, "gone");
            }
            while (lockstep_round(world)) {
            }
            for (int rank = 0; rank < size; rank++) {
                if (world->is_dead[rank]) {
                    continue;
                }
                assert_true(world->ended_in[rank] >= 0);
                assert_true(world->ended_in[rank] - begin <=
                            MAX(distance(world, culprit, rank), 1));
            }
            lockstep_free(world);
        }
    }
}

static size_t memory_after(uint64_t seed, int n_steps)
{
    sim_t *sim = sim_new(seed, 12, n_steps, 8, true, NULL);
    size_t bytes = 0;
    sim_run(sim);
    check_world(sim);
    for (int rank = 0; rank < sim->size; rank++) {
        bytes += coord_memory(sim->ranks[rank].coord);
    }
    sim_free(sim);
    return bytes;
}

// Invariant 6.
static void memory_is_bounded(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= (IS_INSTRUMENTED ? 4 : 12); seed++) {
        size_t early = memory_after(seed, 60), late = memory_after(seed, 600);
        assert_true(late <= early + early / 3);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiny_worlds_agree),
        cmocka_unit_test(small_worlds_agree),
        cmocka_unit_test(large_worlds_agree),
        cmocka_unit_test(steady_state_is_cheap),
        cmocka_unit_test(aborts_travel_the_tree),
        cmocka_unit_test(memory_is_bounded),
        cmocka_unit_test(chaos_is_survived_or_explained),
    };
    const struct CMUnitTest one[] = {cmocka_unit_test(replayed_world)};
    replay.ranks = 8;
    for (int i = 1; i + 1 < argc; i += 2) {
        replay.is_set = true;
        if (strcmp(argv[i], "--seed") == 0) {
            replay.seed = strtoull(argv[i + 1], NULL, 10);
        } else if (strcmp(argv[i], "--chaos") == 0) {
            replay.chaos = strtoull(argv[i + 1], NULL, 10);
        } else if (strcmp(argv[i], "--ranks") == 0) {
            replay.ranks = MIN(MAX(atoi(argv[i + 1]), 1), 1000);
        }
    }
    return replay.is_set ? cmocka_run_group_tests(one, NULL, NULL)
                         : cmocka_run_group_tests(tests, NULL, NULL);
}
