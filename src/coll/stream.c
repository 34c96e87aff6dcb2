// SPDX-License-Identifier: Apache-2.0
//
// stream.c - see stream.h.
//
// A run is cut into slices. For slice i a rank goes through up to three stages:
//
//   share    copy what peers need of slice i from the tensor into a slot of its own window
//   reduce   once all peers have shared: combine its own part of the slice from all windows,
//   straight
//            into its tensor, and also back into the slot of the next member, over the lines it has
//            just read; peers find the result there. (Writing the result over the input, rather
//            than into a place of its own, halves the cache lines that change hands.)
//   collect  once all peers have reduced (or shared, where nothing is reduced): copy the other
//            parts out of the windows into the tensor
//
// in the order share(i), reduce(i-1), collect(i-2) (or i-1 without a reduction), so that a peer
// that is a little late costs nothing. A slot is filled again when everyone who read it has said so
// by its `done` counter.
//
//   op              share                    reduce             collect
//   allreduce       all but the own part     own part           the other parts
//   reducescatter   the peers' blocks        own block          -
//   allgather       own block                -                  the peers' blocks
//   alltoall        the peers' blocks        -                  the own block of each peer
//   broadcast       the tensor (root)        -                  the tensor (others)
//
// Cost for n ranks and B bytes: each rank copies (n-1)/n B in, reduces n parts of B/n, copies
// (n-1)/n B out; all of it in cache but for the tensor itself.
#include "coll/stream.h"

#include <stdlib.h>

#define SLICE_BYTES_LEAST (64 * KIB) // measured best for two ranks: all slots in flight fit in L2
#define MOVE_SLICE_BYTES (128 * KIB) // the same where every rank moves a whole result
#define PAST_CACHE_BYTES (2 * MIB)   // results from this size on do not stay in cache
#define SLICE_BYTES_PER_RANK (16 * KIB)
#define PART_ALIGN ((size_t)64)
#define END_OF_RUN (((uint64_t)1 << SLICE_BITS) - 1)
#define LAG 1

// Who must have finished reading before a slot of this rank may be filled again.
typedef struct slot_guard {
    uint64_t done; // the value their `done` counters must have reached
    int n_readers;
    int *readers; // ranks
} slot_guard_t;

typedef struct member {
    window_t window;
    uint64_t shared, reduced; // counters as last seen
} member_t;

typedef enum stage { SHARE, REDUCE, COLLECT } stage_t;

struct stream {
    domain_t *shm;
    int my_rank, n_ranks;
    size_t slot_bytes;
    int n_slots;
    slot_guard_t *guards; // by slot
    uint64_t *done_seen;  // `done` of every rank, as last seen

    coll_task_t run;
    member_t *members;
    int n, me;
    size_t slice_bytes;
    size_t share_bytes;     // of a slot, for each member (reducescatter, alltoall)
    size_t *in_at, *out_at; // where each member's block begins in the vectors
    const void **inputs;
    uint64_t n_share, n_reduce, n_collect; // slices in each stage
    uint64_t turn;                         // share(turn), reduce(turn - LAG), collect(turn - 2 LAG)
    uint64_t turns;
    stage_t stage;
    uint64_t lag[3]; // turns by which each stage is behind
    void (*scatter)(const vec_t *v, size_t offset, const void *from, size_t bytes);
};

// --- Memory -------------------------------------------------------------------------------------

hvd_status_t stream_new(domain_t *shm, int my_rank, int n_ranks, stream_t **stream_p, err_t *err)
{
    stream_t *s = calloc(1, sizeof *s);
    if (s == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for shared-memory streams");
    }
    size_t n = (size_t)n_ranks;
    s->shm = shm;
    s->my_rank = my_rank;
    s->n_ranks = n_ranks;
    s->slot_bytes = shm_slot_bytes(shm);
    s->n_slots = shm_n_slots(shm);
    s->guards = calloc((size_t)s->n_slots, sizeof *s->guards);
    s->done_seen = calloc(n, sizeof *s->done_seen);
    s->members = calloc(n, sizeof *s->members);
    s->in_at = calloc(n, sizeof *s->in_at);
    s->out_at = calloc(n, sizeof *s->out_at);
    s->inputs = calloc(n, sizeof *s->inputs);
    bool ok = s->guards && s->done_seen && s->members && s->in_at && s->out_at && s->inputs;
    for (int i = 0; ok && i < s->n_slots; i++) {
        ok = (s->guards[i].readers = calloc(n, sizeof(int))) != NULL;
    }
    if (!ok) {
        stream_free(s);
        return fail(err, HVD_NO_MEMORY, "no memory for shared-memory streams");
    }
    *stream_p = s;
    return HVD_OK;
}

void stream_free(stream_t *s)
{
    if (s == NULL) {
        return;
    }
    for (int i = 0; s->guards != NULL && i < s->n_slots; i++) {
        free(s->guards[i].readers);
    }
    free(s->guards);
    free(s->done_seen);
    free(s->members);
    free(s->in_at);
    free(s->out_at);
    free(s->inputs);
    free(s);
}

// --- Geometry: what lies where ------------------------------------------------------------------

static size_t ceil_div(size_t a, size_t b)
{
    return (a + b - 1) / b;
}

static size_t largest(const size_t *values, int n)
{
    size_t most = 0;
    for (int i = 0; i < n; i++) {
        most = MAX(most, values[i]);
    }
    return most;
}

static void sum_up(const size_t *blocks, int n, size_t *at)
{
    size_t sum = 0;
    for (int m = 0; m < n; m++) {
        at[m] = sum;
        sum += blocks[m];
    }
}

// Bytes of a block that fall into slice i, when each slice takes `step` of it.
static size_t bytes_in_slice(size_t block, uint64_t i, size_t step)
{
    size_t from = (size_t)i * step;
    return from < block ? MIN(step, block - from) : 0;
}

// Allreduce: where part m of a slice of `len` bytes begins.
static size_t part_at(const stream_t *s, size_t len, int m)
{
    return m == s->n ? len : len * (size_t)m / (size_t)s->n / PART_ALIGN * PART_ALIGN;
}

static uint8_t *slot_of(const stream_t *s, int member, uint64_t slice)
{
    return s->members[member].window.slots + (size_t)(slice % (uint64_t)s->n_slots) * s->slot_bytes;
}

static void set_stages(stream_t *s, size_t share, size_t reduce, size_t collect)
{
    s->n_share = share;
    s->n_reduce = reduce;
    s->n_collect = collect;
    s->lag[SHARE] = 0;
    s->lag[REDUCE] = LAG;
    s->lag[COLLECT] = reduce > 0 ? 2 * LAG : LAG;
    size_t reduce_turns = reduce > 0 ? reduce + s->lag[REDUCE] : 0;
    size_t collect_turns = collect > 0 ? collect + s->lag[COLLECT] : 0;
    s->turns = MAX(share, MAX(reduce_turns, collect_turns));
}

static void lay_out(stream_t *s)
{
    const coll_args_t *a = &s->run.args;
    size_t n = (size_t)s->n;
    bool exchanges = a->op == HVD_ALLGATHER || a->op == HVD_ALLTOALL;
    size_t least = exchanges ? MOVE_SLICE_BYTES : SLICE_BYTES_LEAST;
    s->slice_bytes = MIN(s->slot_bytes, MAX(least, n * SLICE_BYTES_PER_RANK));
    s->share_bytes = MAX(s->slot_bytes / n / PART_ALIGN * PART_ALIGN, PART_ALIGN);
    s->share_bytes = MIN(s->share_bytes, least);
    // Where every rank writes a whole result it has not read before, the writes are what counts;
    // elsewhere they hit lines in cache or leave the memory idle (measured).
    bool large = s->run.out->bytes >= PAST_CACHE_BYTES;
    s->scatter = large && exchanges ? vec_scatter_past_cache : vec_scatter;
    switch (a->op) {
    case HVD_ALLREDUCE: {
        size_t slices = ceil_div(a->bytes, s->slice_bytes);
        set_stages(s, slices, slices, slices);
        break;
    }
    case HVD_BROADCAST: {
        size_t slices = ceil_div(a->bytes, s->slice_bytes);
        set_stages(s, s->me == a->root ? slices : 0, 0, slices);
        break;
    }
    case HVD_REDUCESCATTER: {
        sum_up(a->blocks, s->n, s->in_at);
        size_t slices = ceil_div(largest(a->blocks, s->n), s->share_bytes);
        set_stages(s, slices, slices, 0);
        break;
    }
    case HVD_ALLGATHER: {
        sum_up(a->blocks, s->n, s->out_at);
        set_stages(s, ceil_div(a->blocks[s->me], s->slice_bytes), 0,
                   ceil_div(largest(a->blocks, s->n), s->slice_bytes));
        break;
    }
    default: // alltoall
        sum_up(a->send_bytes, s->n, s->in_at);
        sum_up(a->recv_bytes, s->n, s->out_at);
        set_stages(s, ceil_div(largest(a->send_bytes, s->n), s->share_bytes), 0,
                   ceil_div(largest(a->recv_bytes, s->n), s->share_bytes));
        break;
    }
}

// --- Counters -----------------------------------------------------------------------------------

static uint64_t key(const stream_t *s, uint64_t slices)
{
    return s->run.number << SLICE_BITS | slices;
}

static void publish(stream_t *s, atomic_uint_fast64_t *counter, uint64_t slices)
{
    INVARIANT(slices <= END_OF_RUN && atomic_load(counter) < key(s, slices)); // they only grow
    atomic_store_explicit(counter, key(s, slices), memory_order_release);
    atomic_thread_fence(memory_order_seq_cst); // before looking who sleeps
    for (int m = 0; m < s->n; m++) {
        atomic_uint *word = s->members[m].window.wake;
        if (m != s->me && UNLIKELY(atomic_load_explicit(word, memory_order_relaxed) == 1)) {
            wake_ring(word);
        }
    }
}

static bool reached(atomic_uint_fast64_t *counter, uint64_t *seen, uint64_t value)
{
    if (*seen < value) {
        *seen = atomic_load_explicit(counter, memory_order_acquire);
    }
    return *seen >= value;
}

static bool peer_shared(stream_t *s, int m, uint64_t slices)
{
    return m == s->me ||
           reached(&s->members[m].window.counters->shared, &s->members[m].shared, key(s, slices));
}

static bool all_shared(stream_t *s, uint64_t slices)
{
    for (int m = 0; m < s->n; m++) {
        if (!peer_shared(s, m, slices)) {
            return false;
        }
    }
    return true;
}

static bool all_reduced(stream_t *s, uint64_t slices)
{
    for (int m = 0; m < s->n; m++) {
        member_t *member = &s->members[m];
        if (m != s->me &&
            !reached(&member->window.counters->reduced, &member->reduced, key(s, slices))) {
            return false;
        }
    }
    return true;
}

// With two members, the only reader of an allreduce's slot besides its owner is the peer that
// reduces it, and the owner has waited for that already.
static bool slots_need_guard(const stream_t *s)
{
    return !(s->run.args.op == HVD_ALLREDUCE && s->n == 2);
}

static bool slot_is_free(stream_t *s, uint64_t slice)
{
    slot_guard_t *guard = &s->guards[slice % (uint64_t)s->n_slots];
    while (guard->n_readers > 0) {
        int rank = guard->readers[guard->n_readers - 1];
        window_t window;
        shm_window(s->shm, rank, &window);
        if (!reached(&window.counters->done, &s->done_seen[rank], guard->done)) {
            return false;
        }
        guard->n_readers--;
    }
    return true;
}

static void guard_slot(stream_t *s, uint64_t slice)
{
    if (!slots_need_guard(s)) {
        return;
    }
    slot_guard_t *guard = &s->guards[slice % (uint64_t)s->n_slots];
    guard->done = key(s, slice + 1);
    guard->n_readers = 0;
    for (int m = 0; m < s->n; m++) {
        if (m != s->me) {
            guard->readers[guard->n_readers++] = s->run.ranks[m];
        }
    }
}

// --- Share --------------------------------------------------------------------------------------

static void share(stream_t *s, uint64_t i)
{
    const coll_args_t *a = &s->run.args;
    const vec_t *in = s->run.in;
    uint8_t *slot = slot_of(s, s->me, i);
    size_t at = (size_t)i * s->slice_bytes;
    switch (a->op) {
    case HVD_ALLREDUCE: {
        size_t len = bytes_in_slice(a->bytes, i, s->slice_bytes);
        size_t own = part_at(s, len, s->me);
        size_t own_end = part_at(s, len, s->me + 1);
        vec_gather(in, at, slot, own);
        vec_gather(in, at + own_end, slot + own_end, len - own_end);
        break;
    }
    case HVD_BROADCAST:
        vec_gather(in, at, slot, bytes_in_slice(a->bytes, i, s->slice_bytes));
        break;
    case HVD_ALLGATHER:
        vec_gather(in, at, slot, bytes_in_slice(a->blocks[s->me], i, s->slice_bytes));
        break;
    default: { // reducescatter, alltoall
        const size_t *blocks = a->op == HVD_REDUCESCATTER ? a->blocks : a->send_bytes;
        for (int m = 0; m < s->n; m++) {
            if (m != s->me) {
                vec_gather(in, s->in_at[m] + (size_t)i * s->share_bytes,
                           slot + (size_t)m * s->share_bytes,
                           bytes_in_slice(blocks[m], i, s->share_bytes));
            }
        }
        break;
    }
    }
}

static bool try_share(stream_t *s, uint64_t i)
{
    if (!slot_is_free(s, i)) {
        return false;
    }
    share(s, i);
    guard_slot(s, i);
    publish(s, &s->members[s->me].window.counters->shared, i + 1);
    return true;
}

// --- Reduce -------------------------------------------------------------------------------------

// Combines `bytes` of every member: the own ones in the tensor at in_at, the peers' in their slots
// at slot_at. The result goes to the tensor at out_at and, if also_at is not NULL, there too.
static void reduce(stream_t *s, uint64_t i, size_t in_at, size_t out_at, size_t slot_at,
                   size_t bytes, uint8_t *also_at)
{
    const coll_args_t *a = &s->run.args;
    size_t element = hvd_dtype_bytes(a->dtype);
    for (size_t done = 0; done < bytes;) {
        uint8_t *source;
        uint8_t *target;
        size_t n = MIN(vec_at(s->run.in, in_at + done, &source), bytes - done);
        n = MIN(vec_at(s->run.out, out_at + done, &target), n);
        for (int m = 0; m < s->n; m++) {
            s->inputs[m] = m == s->me ? source : slot_of(s, m, i) + slot_at + done;
        }
        reduce_many(a->dtype, a->reduce, target, also_at != NULL ? also_at + done : NULL, s->inputs,
                    s->n, n / element, s->run.prescale, s->run.finish);
        done += n;
    }
}

static bool try_reduce(stream_t *s, uint64_t i)
{
    const coll_args_t *a = &s->run.args;
    window_counters_t *mine = s->members[s->me].window.counters;
    if (!all_shared(s, i + 1)) {
        return false;
    }
    if (a->op == HVD_REDUCESCATTER) {
        size_t at = (size_t)i * s->share_bytes;
        reduce(s, i, s->in_at[s->me] + at, at, (size_t)s->me * s->share_bytes,
               bytes_in_slice(a->blocks[s->me], i, s->share_bytes), NULL);
        publish(s, &mine->done, i + 1);
        return true;
    }
    size_t at = (size_t)i * s->slice_bytes;
    size_t len = bytes_in_slice(a->bytes, i, s->slice_bytes);
    size_t own = part_at(s, len, s->me);
    uint8_t *result = slot_of(s, (s->me + 1) % s->n, i) + own;
    reduce(s, i, at + own, at + own, own, part_at(s, len, s->me + 1) - own, result);
    publish(s, &mine->reduced, i + 1);
    return true;
}

// --- Collect ------------------------------------------------------------------------------------

// Has every peer from which slice i brings something shared it?
static bool sources_ready(stream_t *s, uint64_t i)
{
    const coll_args_t *a = &s->run.args;
    if (a->op == HVD_ALLREDUCE) {
        return all_reduced(s, i + 1);
    }
    if (a->op == HVD_BROADCAST) {
        return peer_shared(s, a->root, i + 1);
    }
    const size_t *blocks = a->op == HVD_ALLGATHER ? a->blocks : a->recv_bytes;
    size_t step = a->op == HVD_ALLGATHER ? s->slice_bytes : s->share_bytes;
    for (int m = 0; m < s->n; m++) {
        if (bytes_in_slice(blocks[m], i, step) > 0 && !peer_shared(s, m, i + 1)) {
            return false;
        }
    }
    return true;
}

static void collect_parts(stream_t *s, uint64_t i)
{
    size_t at = (size_t)i * s->slice_bytes;
    size_t len = bytes_in_slice(s->run.args.bytes, i, s->slice_bytes);
    for (int m = 0; m < s->n; m++) {
        if (m != s->me) {
            size_t part = part_at(s, len, m);
            s->scatter(s->run.out, at + part, slot_of(s, (m + 1) % s->n, i) + part,
                       part_at(s, len, m + 1) - part);
        }
    }
}

static void copy_own(stream_t *s, size_t out_at, size_t in_at, size_t bytes)
{
    vec_copy(s->run.out, out_at, s->run.in, in_at, bytes, s->scatter == vec_scatter_past_cache);
}

static void collect_blocks(stream_t *s, uint64_t i)
{
    const coll_args_t *a = &s->run.args;
    bool gather = a->op == HVD_ALLGATHER;
    const size_t *blocks = gather ? a->blocks : a->recv_bytes;
    size_t step = gather ? s->slice_bytes : s->share_bytes;
    size_t slot_at = gather ? 0 : (size_t)s->me * s->share_bytes;
    size_t at = (size_t)i * step;
    for (int m = 0; m < s->n; m++) {
        size_t bytes = bytes_in_slice(blocks[m], i, step);
        if (m == s->me) {
            copy_own(s, s->out_at[m] + at, (gather ? 0 : s->in_at[m]) + at, bytes);
        } else {
            s->scatter(s->run.out, s->out_at[m] + at, slot_of(s, m, i) + slot_at, bytes);
        }
    }
}

static bool try_collect(stream_t *s, uint64_t i)
{
    const coll_args_t *a = &s->run.args;
    if (!sources_ready(s, i)) {
        return false;
    }
    if (a->op == HVD_ALLREDUCE) {
        collect_parts(s, i);
    } else if (a->op == HVD_BROADCAST) {
        size_t at = (size_t)i * s->slice_bytes;
        size_t bytes = bytes_in_slice(a->bytes, i, s->slice_bytes);
        if (s->me == a->root) {
            copy_own(s, at, at, bytes);
        } else {
            s->scatter(s->run.out, at, slot_of(s, a->root, i), bytes);
        }
    } else {
        collect_blocks(s, i);
    }
    if (slots_need_guard(s)) {
        publish(s, &s->members[s->me].window.counters->done, i + 1);
    }
    return true;
}

bool stream_serves(hvd_op_t op)
{
    switch (op) {
    case HVD_ALLREDUCE:
    case HVD_REDUCESCATTER:
    case HVD_ALLGATHER:
    case HVD_ALLTOALL:
    case HVD_BROADCAST:
        return true;
    default:
        return false;
    }
}

// --- Running ------------------------------------------------------------------------------------

hvd_status_t stream_start(stream_t *s, const coll_task_t *run, err_t *err)
{
    s->run = *run;
    s->n = run->args.size;
    s->me = run->args.member;
    for (int m = 0; m < s->n; m++) {
        if (!shm_window(s->shm, run->ranks[m], &s->members[m].window)) {
            return fail(err, HVD_UNSUPPORTED, "rank %d is not on this host", run->ranks[m]);
        }
        s->members[m].shared = 0;
        s->members[m].reduced = 0;
    }
    lay_out(s);
    s->turn = 0;
    s->stage = SHARE;
    return HVD_OK;
}

// One stage of the current turn; true if it is over (done, or nothing to do).
static bool try_stage(stream_t *s)
{
    uint64_t i = s->turn - s->lag[s->stage];
    if (s->turn < s->lag[s->stage]) {
        return true;
    }
    switch (s->stage) {
    case SHARE:
        return i >= s->n_share || try_share(s, i);
    case REDUCE:
        return i >= s->n_reduce || try_reduce(s, i);
    default:
        return i >= s->n_collect || try_collect(s, i);
    }
}

hvd_status_t stream_progress(stream_t *s, bool *moved_p)
{
    while (s->turn < s->turns) {
        if (!try_stage(s)) {
            return HVD_IN_PROGRESS;
        }
        *moved_p = true;
        s->stage = s->stage == COLLECT ? SHARE : s->stage + 1;
        s->turn += s->stage == SHARE;
    }
    publish(s, &s->members[s->me].window.counters->done, END_OF_RUN);
    *moved_p = true;
    return HVD_OK;
}
