// SPDX-License-Identifier: Apache-2.0
//
// direct.c - see direct.h.
//
// A rank writes on its card (net/shm.h) where its tensors lie, and then copies what it gets out of
// the memory of each peer whose card is ready:
//
//   op          on the card                   copied
//   allgather   its block                     by each rank, all blocks
//   alltoall    its block for each member     by each rank, the blocks for it
//   broadcast   root: the tensor              by receiver and root: each takes the next part of the
//               others: where it shall go     receiver's tensor that neither has begun
//
// Then it tells every member that it is through, and waits until all have: from then on nobody
// needs its tensors. If anything was refused (the kernel forbids it on some rank, memory of a
// device, too many small pieces), ranks tell each other so in the same word, and all agree to go
// another way.
//
// A rank that gives up while others may write into its tensors claims all that is left of them
// first, and waits for the part that is just being written (direct_abandon).
//
// Cost: each byte is copied once; a system call for each peer, and some 0.1 us for each page.
#include "coll/direct.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>

#define LEAST_PIECE_BYTES (4 * KIB)  // on average: smaller ones cost more than copying twice
#define PAST_CACHE_BYTES (2 * MIB)   // results from this size on do not stay in cache
#define LARGE_PART_BYTES (512 * KIB) // of a broadcast: a system call costs little beside it
#define PARTS 8                      // of a large broadcast, so that both end at the same time
#define PAGE_BYTES ((size_t)4096)
#define N_VECTORS 64 // of a system call
#define ALL_CLAIMED (UINT64_MAX / 2)
#define ABANDON_NS NS_PER_S

// What a member tells at the end: the task's number, and
enum {
    WORD_REFUSED = 1 << 0, // it could not be done
    WORD_WINDOWS = 1 << 1, // this member is for windows
    WORD_BITS = 2
};

struct direct {
    domain_t *shm;
    coll_task_t run;
    int n, me;
    uint64_t turn;      // number of the task, from 1 on: cards begin with 0
    uint8_t *is_served; // by member: nothing is left to copy from there, or to there
    size_t *out_at;     // where each member's block begins in the output
    size_t part_bytes;  // of a broadcast
    bool runs;          // others may use this rank's card
    bool is_refused;    // this rank, or one it has looked at, cannot do it
    bool is_through;    // and has told so
    bool is_for_windows;
    int n_for_windows; // of all members
    vec_t theirs;      // the pieces on a peer's card: never touched, only handed to the kernel
};

bool direct_serves(hvd_op_t op)
{
    return op == HVD_ALLGATHER || op == HVD_ALLTOALL || op == HVD_BROADCAST;
}

hvd_status_t direct_new(domain_t *shm, int n_ranks, direct_t **direct_p, err_t *err)
{
    direct_t *d = calloc(1, sizeof *d);
    if (d != NULL) {
        d->shm = shm;
        d->is_served = calloc((size_t)n_ranks, sizeof *d->is_served);
        d->out_at = calloc((size_t)n_ranks, sizeof *d->out_at);
    }
    if (d == NULL || d->is_served == NULL || d->out_at == NULL) {
        direct_free(d);
        return fail(err, HVD_NO_MEMORY, "no memory for copies inside the host");
    }
    *direct_p = d;
    return HVD_OK;
}

void direct_free(direct_t *d)
{
    if (d != NULL) {
        free(d->is_served);
        free(d->out_at);
        vec_free(&d->theirs);
        free(d);
    }
}

// --- What is lent --------------------------------------------------------------------------------

static memory_card_t *card_of(const direct_t *d, int member)
{
    return shm_card(d->shm, d->run.ranks[member]);
}

static bool is_root(const direct_t *d)
{
    return d->run.args.op == HVD_BROADCAST && d->me == d->run.args.root;
}

// Bytes this rank gets from a member.
static size_t bytes_from(const direct_t *d, int member)
{
    const coll_args_t *a = &d->run.args;
    return a->op == HVD_ALLGATHER ? a->blocks[member] : a->recv_bytes[member];
}

static bool is_cut_small(const vec_t *v)
{
    return v->n > 1 && (v->n > CARD_PIECES || v->bytes / (size_t)v->n < LEAST_PIECE_BYTES);
}

static void list_pieces(memory_card_t *card, const vec_t *v)
{
    card->n_pieces = (uint32_t)v->n;
    for (int i = 0; i < v->n; i++) {
        uint8_t *at;
        size_t bytes = vec_at(v, v->fragments[i].start, &at);
        card->pieces[i] = (memory_piece_t){.at = (uint64_t)(uintptr_t)at, .bytes = bytes};
    }
}

// The input of an alltoall is one tensor.
static void list_blocks(memory_card_t *card, const vec_t *in, const size_t *bytes, int n)
{
    uint64_t at = in->n > 0 ? (uint64_t)(uintptr_t)in->fragments[0].at : 0;
    card->n_pieces = (uint32_t)n;
    for (int m = 0; m < n; m++) {
        card->pieces[m] = (memory_piece_t){.at = at, .bytes = bytes[m]};
        at += bytes[m];
    }
}

static void ring(direct_t *d, int member)
{
    window_t window;
    if (shm_window(d->shm, d->run.ranks[member], &window)) {
        wake_ring(window.wake);
    }
}

static void lend(direct_t *d)
{
    const coll_args_t *a = &d->run.args;
    memory_card_t *card = card_of(d, d->me);
    bool exchanges = a->op == HVD_ALLTOALL;
    card->is_willing = !d->is_refused;
    if (!d->is_refused && exchanges) {
        list_blocks(card, d->run.in, a->send_bytes, d->n);
    } else if (!d->is_refused) {
        list_pieces(card, a->op == HVD_BROADCAST && !is_root(d) ? d->run.out : d->run.in);
    }
    atomic_store_explicit(&card->claimed, 0, memory_order_relaxed);
    INVARIANT(atomic_load(&card->ready) < d->turn);
    atomic_store_explicit(&card->ready, d->turn, memory_order_release);
    for (int m = 0; m < d->n; m++) {
        if (m != d->me) {
            ring(d, m);
        }
    }
}

// --- Copying -------------------------------------------------------------------------------------

// The first bytes of a stretch as vectors of a system call: how many bytes they hold.
static size_t vectors_of(const vec_t *v, size_t at, size_t bytes, struct iovec *vectors,
                         size_t *n_p)
{
    size_t done = 0;
    for (*n_p = 0; done < bytes && *n_p < N_VECTORS; (*n_p)++) {
        uint8_t *piece;
        size_t n = MIN(vec_at(v, at + done, &piece), bytes - done);
        vectors[*n_p] = (struct iovec){.iov_base = piece, .iov_len = n};
        done += n;
    }
    return done;
}

// What the kernel said. A process that has gone is one thing, memory that is refused another.
static hvd_status_t refused(direct_t *d, int member, int code, err_t *err)
{
    if (code == ESRCH) {
        return fail(err, HVD_PEER_LOST, "the process of rank %d has ended", d->run.ranks[member]);
    }
    d->is_refused = true;
    return HVD_OK;
}

// Between `own` and what is in d->theirs.
static hvd_status_t copy(direct_t *d, int member, bool writes, const vec_t *own, size_t own_at,
                         size_t their_at, size_t bytes, err_t *err)
{
    int64_t pid = shm_process(d->shm, d->run.ranks[member]);
    while (bytes > 0 && !d->is_refused) {
        struct iovec ours[N_VECTORS], theirs[N_VECTORS];
        size_t n_ours, n_theirs;
        size_t n = vectors_of(&d->theirs, their_at, bytes, theirs, &n_theirs);
        size_t covered = vectors_of(own, own_at, n, ours, &n_ours);
        if (covered < n) {
            vectors_of(&d->theirs, their_at, covered, theirs, &n_theirs);
        }
        ssize_t moved = memory_copy(pid, writes, ours, n_ours, theirs, n_theirs);
        if (moved <= 0) {
            return refused(d, member, moved < 0 ? errno : EFAULT, err);
        }
        own_at += (size_t)moved;
        their_at += (size_t)moved;
        bytes -= (size_t)moved;
    }
    return HVD_OK;
}

// Both the receiver of a broadcast and its root take parts of the receiver's tensor.
static hvd_status_t copy_parts(direct_t *d, int member, err_t *err)
{
    size_t total = d->run.args.bytes;
    bool writes = is_root(d);
    memory_card_t *card = card_of(d, writes ? member : d->me);
    const vec_t *own = writes ? d->run.in : d->run.out;
    hvd_status_t status = HVD_OK;
    while (status == HVD_OK && !d->is_refused) {
        if (writes) {
            atomic_store(&card->is_written, true); // before the claim: see direct_abandon
        }
        uint64_t at = atomic_fetch_add(&card->claimed, d->part_bytes);
        if (at < total) {
            size_t bytes = MIN(d->part_bytes, total - (size_t)at);
            status = copy(d, member, writes, own, (size_t)at, (size_t)at, bytes, err);
        }
        if (writes) {
            atomic_store(&card->is_written, false);
        }
        if (at >= total) {
            break;
        }
    }
    return status;
}

static hvd_status_t read_card(direct_t *d, int member, size_t bytes, err_t *err)
{
    const memory_card_t *card = card_of(d, member);
    bool exchanges = d->run.args.op == HVD_ALLTOALL;
    uint32_t first = exchanges ? (uint32_t)d->me : 0;
    uint32_t end = exchanges ? first + 1 : card->n_pieces;
    vec_clear(&d->theirs);
    for (uint32_t i = first; i < end && end <= CARD_PIECES; i++) {
        uint8_t *at = (uint8_t *)(uintptr_t)card->pieces[i].at; // a place in the peer's memory
        if (!vec_add(&d->theirs, at, (size_t)card->pieces[i].bytes)) {
            return fail(err, HVD_NO_MEMORY, "no memory to copy from rank %d", d->run.ranks[member]);
        }
    }
    return d->theirs.bytes == bytes
               ? HVD_OK
               : fail(err, HVD_PROTOCOL, "rank %d lends %zu bytes of memory where %zu are expected",
                      d->run.ranks[member], d->theirs.bytes, bytes);
}

// A peer's card is ready.
static hvd_status_t serve(direct_t *d, int member, err_t *err)
{
    bool spreads = d->run.args.op == HVD_BROADCAST;
    size_t bytes = spreads ? d->run.args.bytes : bytes_from(d, member);
    d->is_refused |= !card_of(d, member)->is_willing;
    if (d->is_refused || bytes == 0) {
        return HVD_OK;
    }
    hvd_status_t status = read_card(d, member, bytes, err);
    if (status != HVD_OK) {
        return status;
    }
    return spreads ? copy_parts(d, member, err)
                   : copy(d, member, false, d->run.out, d->out_at[member], 0, bytes, err);
}

// What this rank has itself, from its input to its output.
static void copy_own(direct_t *d)
{
    const coll_args_t *a = &d->run.args;
    bool past_cache = d->run.out->bytes >= PAST_CACHE_BYTES;
    if (a->op == HVD_BROADCAST) {
        vec_copy(d->run.out, 0, d->run.in, 0, is_root(d) ? a->bytes : 0, past_cache);
        return;
    }
    size_t in_at = 0;
    for (int m = 0; a->op == HVD_ALLTOALL && m < d->me; m++) {
        in_at += a->send_bytes[m];
    }
    vec_copy(d->run.out, d->out_at[d->me], d->run.in, in_at, bytes_from(d, d->me), past_cache);
}

// --- Running -------------------------------------------------------------------------------------

static void lay_out(direct_t *d)
{
    const coll_args_t *a = &d->run.args;
    size_t n = (size_t)d->n;
    bool spreads = a->op == HVD_BROADCAST;
    size_t at = 0;
    for (int m = 0; m < d->n; m++) {
        d->is_served[m] = m == d->me || (spreads && !is_root(d) && m != a->root);
        d->out_at[m] = at;
        at += spreads ? 0 : bytes_from(d, m);
    }
    size_t part = MIN(MAX(a->bytes / PARTS, LARGE_PART_BYTES), a->bytes / n + 1);
    d->part_bytes = (part + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

hvd_status_t direct_start(direct_t *d, const coll_task_t *task, bool is_for_windows, err_t *err)
{
    (void)err;
    d->is_for_windows = is_for_windows;
    d->run = *task;
    d->n = task->args.size;
    d->me = task->args.member;
    d->turn = task->number + 1;
    d->is_through = false;
    d->is_refused = shm_process(d->shm, task->ranks[d->me]) < 0 || d->n > CARD_PIECES ||
                    is_cut_small(task->in) || is_cut_small(task->out);
    lay_out(d);
    d->runs = true;
    lend(d);
    if (!d->is_refused) {
        copy_own(d);
    }
    return HVD_OK;
}

static void tell_through(direct_t *d)
{
    uint64_t word = d->turn << WORD_BITS | (d->is_for_windows ? WORD_WINDOWS : 0) |
                    (d->is_refused ? WORD_REFUSED : 0);
    for (int m = 0; m < d->n; m++) {
        if (m != d->me) {
            atomic_store_explicit(shm_through(d->shm, d->run.ranks[m], d->run.ranks[d->me]), word,
                                  memory_order_release);
            ring(d, m);
        }
    }
    d->is_through = true;
}

// Serves those who are ready; true: all are served.
static bool serve_ready(direct_t *d, bool *moved_p, hvd_status_t *status_p, err_t *err)
{
    bool all = true;
    for (int k = 1; k < d->n && *status_p == HVD_OK; k++) { // each begins with another
        int m = (d->me + k) % d->n;
        if (d->is_served[m]) {
            continue;
        }
        uint64_t ready = atomic_load_explicit(&card_of(d, m)->ready, memory_order_acquire);
        if (ready < d->turn) {
            all = false;
            continue;
        }
        *status_p = serve(d, m, err);
        d->is_served[m] = true;
        *moved_p = true;
    }
    return all;
}

hvd_status_t direct_progress(direct_t *d, bool *moved_p, err_t *err)
{
    hvd_status_t status = HVD_OK;
    if (!d->is_through && serve_ready(d, moved_p, &status, err) && status == HVD_OK) {
        tell_through(d);
        *moved_p = true;
    }
    if (status != HVD_OK || !d->is_through) {
        return status != HVD_OK ? status : HVD_IN_PROGRESS;
    }
    bool all_did_it = !d->is_refused;
    d->n_for_windows = d->is_for_windows;
    for (int m = 0; m < d->n; m++) {
        uint64_t word = atomic_load_explicit(
            shm_through(d->shm, d->run.ranks[d->me], d->run.ranks[m]), memory_order_acquire);
        if (m == d->me) {
            continue;
        }
        if (word >> WORD_BITS < d->turn) {
            return HVD_IN_PROGRESS;
        }
        all_did_it &= (word & WORD_REFUSED) == 0;
        d->n_for_windows += (word & WORD_WINDOWS) != 0;
    }
    d->runs = false;
    return all_did_it ? HVD_OK : HVD_UNSUPPORTED;
}

int direct_n_for_windows(const direct_t *d)
{
    return d->n_for_windows;
}

void direct_abandon(direct_t *d)
{
    if (!d->runs) {
        return;
    }
    memory_card_t *card = card_of(d, d->me);
    uint64_t deadline_ns =
        clock_ns() + ABANDON_NS; // whoever was killed while writing never says so
    atomic_store(&card->claimed, ALL_CLAIMED);
    while (atomic_load(&card->is_written) && clock_ns() < deadline_ns) {
        sched_yield();
    }
    d->runs = false;
}
