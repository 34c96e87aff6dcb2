// SPDX-License-Identifier: Apache-2.0
//
// board.c - the shortest way for a small operation among ranks of one host.
//
// A synchronous allreduce of a few hundred bytes, repeated under one name, is over in the time it
// takes two cores to exchange a cache line, if ranks call it at about the same moment. So the ranks
// of a host share a board: a place for each such tensor, with one word and room for everyone's
// contribution. A rank writes its contribution and counts itself in the word; when all have, each
// reads the others' and adds up (or takes what it gets: board_move.c). Neither engine nor agreement
// is involved.
//
// The board is only an attempt. Any rank may close a round that does not fill (it has waited long
// enough, or somebody joined, stalled, died or submitted something else); closing and filling are
// one atomic word, so exactly one of them happens, on all ranks alike. A closed round takes the
// ordinary way through the agreement, which knows how to explain all those cases; when it is done,
// the place is opened again. A place belongs to a hash of everything that must be equal (name, set,
// dtype, shape, ...), so ranks that disagree never meet on the board.
//
//   word: round << 32 | closed << 31 | count
//
// Contributions lie in two halves used by odd and even rounds: a rank that is already in the next
// round cannot overwrite what a slower one still reads, and nobody can be two rounds ahead. A few
// bytes lie in the cache line of the word itself: a round then costs no more than the journeys of
// that line from core to core.
//
// Larger operations use the board too: there the ranks only agree, without a message, that all have
// come, which number their stream through shared memory shall have, and how large everyone's block
// is; then the engine runs it at once. That is safe because a rank comes with such a one only if
// nothing else is in flight, and starts nothing else before it is decided: no order with other
// batches can differ. Who moves blocks always comes in that way: some of them may be too large.
// Threads: arrive under the context's lock; wait by the thread that waits.
#define _GNU_SOURCE
#include "engine/run.h"

#include <sched.h>
#include <stdlib.h>

#define N_SEEN 1024              // names met before, by hash: the first meeting takes the long way
#define PROBES 4                 // places tried for a hash
#define PATIENCE_SPINS 3000      // about ten microseconds: late ranks are met in the agreement
#define PATIENCE_CROWDED_SPINS 3 // on a host with more ranks than cores, then yield
#define PATIENCE_YIELDS 200
#define LONGEST_PATIENCE_NS NS_PER_MS // yields take long where many want the core
#define LOOK_AFTER_SPINS 100 // then it is worth asking whether the others wait on this core
#define FREE_MISSES 2
#define LONGEST_SUSPENSION 10 // as a power of two
// Longer sums are faster by a stream, in which each adds up a part of them; later so where each of
// its stages waits for the scheduler.
#define MOST_SUM_BYTES KIB         // of each member
#define MOST_ADDED_BYTES (8 * KIB) // of all together, if that is more
#define MOST_CROWDED_SUM_BYTES (16 * KIB)

#define CLOSED ((uint64_t)1 << 31)
#define ROUND_OF(word) ((word) >> 32)
#define COUNT_OF(word) ((word) & (CLOSED - 1))

struct board_seen {
    uint64_t hash;
    uint32_t n_suspended; // times to go the long way before trying again
    uint32_t n_closed;    // rounds in a row that did not fill
    board_place_t *place; // once found
};

struct board {
    domain_t *shm;
    runner_t *runner;    // of blocks that are moved, under board_lock
    size_t bytes_each;   // room for one contribution
    size_t bytes_beside; // and for one beside the word
    board_seen_t seen[N_SEEN];
};

// Numbers stay aligned: 8 bytes each, or 4, or none when the ranks of the host are too many.
static size_t bytes_beside(int n_local)
{
    size_t n = (size_t)MIN(n_local, BOARD_MEMBERS);
    size_t each = sizeof(((board_place_t *)NULL)->beside) / (2 * n);
    return each >= 8 ? 8 : each >= 4 ? 4 : 0;
}

hvd_status_t board_new(hvd_ctx_t *ctx, board_t **board_p, err_t *err)
{
    domain_t *shm = net_domain(ctx->net, &transport_shm);
    *board_p = NULL;
    if (shm_slot_bytes(shm) == 0) {
        return HVD_OK;
    }
    board_t *x = calloc(1, sizeof *x);
    if (x == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to start");
    }
    x->shm = shm;
    x->bytes_each = shm_board_bytes_each(shm);
    x->bytes_beside = bytes_beside(shm_n_local(shm));
    *board_p = x;
    return runner_new(ctx, &x->runner, err);
}

void board_free(board_t *x)
{
    if (x != NULL) {
        runner_free(x->runner);
        free(x);
    }
}

// --- Places -------------------------------------------------------------------------------------

// Everything that must be equal on all members, in one number.
static uint64_t hash_of(const request_t *r, const process_set_t *set)
{
    const signature_t *a = &r->signature;
    struct {
        uint64_t name, set;
        double prescale, postscale;
        uint16_t op, dtype, reduce, unused;
        int32_t root;
        uint32_t n_tensors;
    } key = {r->hash,
             set->hash,
             a->prescale,
             a->postscale,
             (uint16_t)a->op,
             (uint16_t)a->dtype,
             (uint16_t)a->reduce,
             0,
             a->root,
             (uint32_t)a->n_tensors};
    uint64_t hash = hash_bytes(r->signature.dims,
                               (size_t)r->signature.n_dims_words * sizeof *r->signature.dims, 0);
    return hash_bytes(&key, sizeof key, hash);
}

// The place of a hash, taken for it if nobody has; NULL when its corner of the board is full.
static board_place_t *find_place(board_t *x, uint64_t hash)
{
    int n = shm_n_places(x->shm);
    for (int i = 0; i < PROBES; i++) {
        board_place_t *place = shm_place(x->shm, (int)((hash + (uint64_t)i) % (uint64_t)n));
        uint_fast64_t owner = atomic_load_explicit(&place->owner, memory_order_acquire);
        if (owner == 0 && atomic_compare_exchange_strong(&place->owner, &owner, hash)) {
            return place;
        }
        if (owner == hash) {
            return place;
        }
    }
    return NULL;
}

// Who meets there, under which hash: an object that stands for the same again knows it.
static uint64_t find_hash(request_t *r, const process_set_t *set)
{
    if (UNLIKELY(r->board.hash == 0)) {
        r->board.hash = hash_of(r, set);
        r->board.n_members = set->n;
        r->board.member = set->member;
        memcpy(r->board.ranks, set->ranks, (size_t)set->n * sizeof *set->ranks);
    }
    return r->board.hash;
}

// Where this request should be tried, or NULL for the long way.
static board_seen_t *look_up(hvd_ctx_t *ctx, request_t *r, const process_set_t *set)
    REQUIRES(ctx->lock)
{
    board_t *x = ctx->board;
    uint64_t hash = find_hash(r, set);
    board_seen_t *seen = &x->seen[hash % N_SEEN];
    if (UNLIKELY(seen->hash != hash)) {
        *seen = (board_seen_t){.hash = hash};
        return NULL;
    }
    if (UNLIKELY(seen->n_suspended > 0)) {
        seen->n_suspended--;
        return NULL;
    }
    if (UNLIKELY(seen->place == NULL) && (seen->place = find_place(x, hash)) == NULL) {
        seen->n_suspended = 1u << LONGEST_SUSPENSION;
        return NULL;
    }
    return seen;
}

// It moves blocks, or adds up what members have brought; a longer sum only agrees here.
static bool moves(const request_t *r)
{
    return !op_is_allreduce(r->signature.op);
}

// Where contributions to this request lie.
static void find_contributions(const board_t *x, request_t *r, board_place_t *place)
{
    size_t bytes = r->board.adds_up ? r->board.sum_bytes : sizeof(uint64_t);
    bool beside = bytes <= x->bytes_beside && !moves(r);
    r->board.contributions = beside ? place->beside : place->bytes;
    r->board.stride = beside ? x->bytes_beside : x->bytes_each;
}

static uint8_t *contribution(const request_t *r, int member, uint64_t round)
{
    return r->board.contributions + ((size_t)member * 2 + (round & 1)) * r->board.stride;
}

// Ranks that keep missing each other should not wait for each other. Every member sees how every
// round ended, so all of them suspend the board for the same number of times.
static void note(board_seen_t *seen, bool full)
{
    seen->n_closed = full ? 0 : seen->n_closed + 1;
    if (seen->n_closed > FREE_MISSES) {
        seen->n_suspended = 1u << MIN(seen->n_closed - FREE_MISSES, LONGEST_SUSPENSION);
    }
}

// --- Arriving -----------------------------------------------------------------------------------

static bool serves(hvd_op_t op, hvd_reduce_t reduce)
{
    return stream_serves(op) && reduce != HVD_ADASUM;
}

// Whether members add up here, rather than only agree; all of them find the same.
static bool adds_up(const hvd_ctx_t *ctx, const request_t *r, int n_members)
{
    const signature_t *s = &r->signature;
    size_t most = MAX(MOST_ADDED_BYTES / (size_t)n_members, MOST_SUM_BYTES);
    if (net_oversubscribed(ctx->net)) {
        most = MOST_CROWDED_SUM_BYTES;
    }
    // What rides has accumulators of its own; anything else must need none.
    bool has_room =
        r->payload != NULL || (s->reduce != HVD_ADASUM && s->n_tensors == 1 &&
                               acc_dtype(s->dtype) == s->dtype && ctx->config.algorithm[0] == '\0');
    return !moves(r) && has_room && r->board.sum_bytes <= MIN(most, ctx->board->bytes_each);
}

// A short sum always does. Whatever may have to be streamed needs a rank that does nothing else.
static bool fits(hvd_ctx_t *ctx, const request_t *r, int n_members)
{
    return r->board.adds_up ||
           (serves(r->signature.op, r->signature.reduce) &&
            atomic_load_explicit(&ctx->requests.n_in_flight, memory_order_relaxed) == 0 &&
            !board_is_busy(ctx) && ctx->config.algorithm[0] == '\0' &&
            (!moves(r) || board_may_move(r, n_members)));
}

static bool is_eligible(hvd_ctx_t *ctx, const request_t *r, const process_set_t *set,
                        unsigned flags)
{
    return ctx->board != NULL && (flags & HVD_WAITS) != 0 && set->on_this_host && set->n > 1 &&
           set->n <= BOARD_MEMBERS && fits(ctx, r, set->n);
}

bool board_takes(const way_case_t *given)
{
    const coll_args_t *a = given->args;
    return given->is_waited_for && given->one_host && given->has_stream && a->size > 1 &&
           a->size <= BOARD_MEMBERS && serves(a->op, a->reduce) && given->algorithm[0] == '\0';
}

static void contribute(hvd_ctx_t *ctx, const request_t *r, uint8_t *to)
{
    uint64_t clock = atomic_load_explicit(&ctx->stream_clock, memory_order_relaxed);
    if (r->board.adds_up) {
        request_load(r, to);
    } else if (moves(r)) {
        board_bring(r, clock, ctx->board->bytes_each, to);
    } else {
        memcpy(to, &clock, sizeof clock);
    }
}

bool board_arrive(hvd_ctx_t *ctx, request_t *r, const process_set_t *set, unsigned flags)
{
    LOCKED(ctx);
    board_t *x = ctx->board;
    r->board.place = NULL;
    r->board.closed = 0;
    r->board.sum_bytes = r->payload != NULL ? r->payload_bytes : r->trace.bytes;
    r->board.adds_up = x != NULL && adds_up(ctx, r, set->n);
    if (!is_eligible(ctx, r, set, flags)) {
        return false;
    }
    board_seen_t *seen = look_up(ctx, r, set);
    if (seen == NULL) {
        return false;
    }
    board_place_t *place = seen->place;
    r->board.place = place;
    r->board.seen = seen;
    find_contributions(x, r, place);
    uint_fast64_t word = atomic_load_explicit(&place->word, memory_order_acquire);
    uint64_t next;
    do {
        if ((word & CLOSED) != 0) {
            r->board.closed = word; // to be opened again when the long way is through
            note(seen, false);
            return false;
        }
        bool fresh = COUNT_OF(word) == 0 || COUNT_OF(word) == (uint64_t)set->n;
        next = fresh ? (ROUND_OF(word) + 1) << 32 | 1 : word + 1;
        contribute(ctx, r, contribution(r, set->member, ROUND_OF(next)));
    } while (!atomic_compare_exchange_weak_explicit(&place->word, &word, next, memory_order_acq_rel,
                                                    memory_order_acquire));
    r->board.round = (uint32_t)ROUND_OF(next);
    if (!r->board.adds_up) {
        atomic_store(&ctx->board_busy, true);
    }
    return true;
}

// --- Waiting ------------------------------------------------------------------------------------

// Full, or already left behind by a faster rank: what we wait for has happened.
static bool is_full(const request_t *r, uint64_t word)
{
    return (uint32_t)ROUND_OF(word) != r->board.round ||
           ((word & CLOSED) == 0 && COUNT_OF(word) == (uint64_t)r->board.n_members);
}

static bool wait_until_full(hvd_ctx_t *ctx, request_t *r)
{
    bool crowded = net_oversubscribed(ctx->net);
    int spins = crowded ? PATIENCE_CROWDED_SPINS : PATIENCE_SPINS;
    int patience = spins + (crowded ? PATIENCE_YIELDS : 0);
    uint64_t deadline_ns = 0;
    uint_fast64_t word = atomic_load_explicit(&r->board.place->word, memory_order_acquire);
    for (int i = 0; i < patience; i++) {
        if (is_full(r, word)) {
            return true;
        }
        if ((word & CLOSED) != 0) {
            return false;
        }
        if (i < spins) {
            cpu_relax();
        } else {
            uint64_t now_ns = clock_ns();
            deadline_ns = deadline_ns == 0 ? now_ns + LONGEST_PATIENCE_NS : deadline_ns;
            patience = now_ns < deadline_ns ? patience : i;
            sched_yield();
        }
        if (i == LOOK_AFTER_SPINS && net_core_use(ctx->net) == CORE_SHARED) {
            net_part_cores(ctx->net, clock_ns());
            spins = i;
            patience = spins + PATIENCE_YIELDS;
        }
        word = atomic_load_explicit(&r->board.place->word, memory_order_acquire);
    }
    while (!is_full(r, word) && (word & CLOSED) == 0) { // close it, unless it fills first
        if (atomic_compare_exchange_weak(&r->board.place->word, &word, word | CLOSED)) {
            return false;
        }
    }
    return is_full(r, word);
}

// Of all members, in their order, so that every rank computes the same bits.
static void list_contributions(const request_t *r, const uint8_t *contributions[BOARD_MEMBERS])
{
    for (int m = 0; m < r->board.n_members; m++) {
        contributions[m] = contribution(r, m, r->board.round);
    }
}

// False: no memory for the result.
static bool add_up(request_t *r, const uint8_t *const *contributions)
{
    int n_members = r->board.n_members;
    hvd_dtype_t acc = acc_dtype(r->signature.dtype);
    hvd_reduce_t op = r->signature.reduce == HVD_AVERAGE ? HVD_SUM : r->signature.reduce;
    size_t n = r->board.sum_bytes / hvd_dtype_bytes(acc);
    const void *inputs[BOARD_MEMBERS];
    for (int m = 0; m < n_members; m++) {
        inputs[m] = contributions[m];
    }
    if (r->signature.n_tensors > 1 || acc != r->signature.dtype) {
        reduce_many(acc, op, r->payload, NULL, inputs, n_members, n, 1.0, FINISH_NOTHING);
        return request_store(r, r->payload, n_members);
    }
    void *output = request_output(r, 0);
    if (output != NULL) {
        finish_t finish = signature_finish(&r->signature, n_members);
        reduce_many(acc, op, output, NULL, inputs, n_members, n, 1.0, finish);
    }
    return output != NULL || n == 0;
}

// The number after the highest any member stands at; 0 when there is none left before the next
// batch of the log.
static uint64_t agreed_number(const request_t *r, const uint8_t *const *contributions)
{
    uint64_t highest = 0;
    for (int m = 0; m < r->board.n_members; m++) {
        uint64_t clock;
        memcpy(&clock, contributions[m], sizeof clock);
        highest = MAX(highest, clock);
    }
    uint64_t next =
        MAX(highest + 1, highest / STREAMS_PER_BATCH * STREAMS_PER_BATCH + PHASES_PER_BATCH);
    return next / STREAMS_PER_BATCH == highest / STREAMS_PER_BATCH ? next : 0;
}

typedef enum board_end {
    MET_RESULT, // the output has it
    MET_STREAM, // `stream` is the number of the stream to run
    MET_NOBODY, // it must go the long way
    MET_NO_MEMORY,
} board_end_t;

static board_end_t meet(hvd_ctx_t *ctx, request_t *r)
{
    const uint8_t *contributions[BOARD_MEMBERS];
    if (UNLIKELY(!wait_until_full(ctx, r))) {
        r->board.closed = atomic_load(&r->board.place->word);
        return MET_NOBODY;
    }
    list_contributions(r, contributions);
    if (r->board.adds_up) {
        return add_up(r, contributions) ? MET_RESULT : MET_NO_MEMORY;
    }
    if (moves(r) && board_all_brought(r, contributions)) {
        bool moved = board_move(ctx, ctx->board->runner, r, contributions);
        return moved ? MET_RESULT : MET_NO_MEMORY;
    }
    r->board.stream = agreed_number(r, contributions);
    return r->board.stream != 0 ? MET_STREAM : MET_NOBODY;
}

void board_note(hvd_ctx_t *ctx, request_t *r, bool full)
{
    LOCKED(ctx);
    if (r->board.seen->place == r->board.place) { // still about the same hash
        note(r->board.seen, full);
    }
}

void board_reopen(request_t *r)
{
    if (r->board.place != NULL && r->board.closed != 0) {
        uint_fast64_t word = r->board.closed;
        uint64_t open = ROUND_OF(word) << 32; // count 0: the next to arrive starts a round
        atomic_compare_exchange_strong(&r->board.place->word, &word, open);
        r->board.closed = 0;
    }
}

// --- In hvd_wait ---------------------------------------------------------------------------------

static void go_on_to_engine(hvd_ctx_t *ctx, request_t *request, bool full)
{
    lock_take(&ctx->lock);
    board_note(ctx, request, full);
    bool over = ctx->ended.status != HVD_OK;
    if (over) {
        atomic_store(&ctx->board_busy, false);
    } else {
        request_enqueue(ctx, request);
    }
    lock_release(&ctx->lock);
    if (over) {
        request_complete(ctx, request, ctx->ended.status, ctx->ended.text);
    } else {
        engine_nudge(ctx);
    }
}

// A request on the board is looked after by whoever asks for it first: it ends there, or goes on
// to the engine. Two threads that wait for one handle take turns here.
void board_finish(hvd_ctx_t *ctx, request_t *request)
{
    lock_take(&ctx->board_lock);
    if (atomic_load(&request->board.waits)) {
        bool was_alone = !request->board.adds_up;
        board_end_t met = meet(ctx, request);
        if (observe_has_timeline(ctx->observe)) {
            atomic_store_explicit(&request->trace.started, ticks_now(), memory_order_relaxed);
        }
        if (was_alone && met != MET_STREAM) { // else run_board_stream says so
            atomic_store(&ctx->board_busy, false);
        }
        if (met == MET_STREAM || met == MET_NOBODY) {
            go_on_to_engine(ctx, request, met == MET_STREAM);
        } else {
            atomic_store_explicit(&request->trace.way, WAY_BOARD, memory_order_relaxed);
            request_complete(ctx, request, met == MET_RESULT ? HVD_OK : HVD_NO_MEMORY, NULL);
        }
    }
    lock_release(&ctx->board_lock);
}
