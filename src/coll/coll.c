// SPDX-License-Identifier: Apache-2.0
//
// coll.c - the table of algorithms and the choice between them.
//
// An algorithm is a row of coll_algorithms; when it is taken by default is a row of `choices`. Both
// are read from top to bottom. Whatever decides is known alike to all members: all choose alike.
// Pure functions, any thread.
#include "coll/plan.h"

#include <limits.h>
#include <stdio.h>

const algorithm_t coll_algorithms[] = {
    {HVD_ALLREDUCE, "recursive_doubling", NEEDS_NO_PRESCALE, plan_allreduce_recursive_doubling,
     "short tensors: fewest steps"},
    {HVD_ALLREDUCE, "halving_doubling", NEEDS_NO_PRESCALE, plan_allreduce_halving_doubling,
     "medium tensors, or many members: few steps and few bytes"},
    {HVD_ALLREDUCE, "ring", NEEDS_NO_PRESCALE, plan_allreduce_ring,
     "long tensors: fewest bytes, neighbours only"},
    {HVD_ALLREDUCE, "pairwise", ROUNDS_ONCE, plan_allreduce_pairwise,
     "half types: adds in float32 and rounds once; two steps, everybody to everybody"},
    {HVD_ALLREDUCE, "adasum", NEEDS_NO_PRESCALE | NEEDS_ADASUM, plan_allreduce_adasum, "Adasum"},
    {HVD_ALLGATHER, "bruck", 0, plan_allgather_bruck, "short blocks: fewest steps"},
    {HVD_ALLGATHER, "ring", 0, plan_allgather_ring, "long blocks: pipelined, neighbours only"},
    {HVD_BROADCAST, "binomial", 0, plan_broadcast_binomial, "short tensors: fewest steps"},
    {HVD_BROADCAST, "chain", 0, plan_broadcast_chain,
     "long tensors: pipelined, nobody sends twice"},
    {HVD_ALLTOALL, "pairwise", 0, plan_alltoall_pairwise, "any blocks: fewest bytes"},
    {HVD_ALLTOALL, "bruck", NEEDS_EQUAL_BLOCKS, plan_alltoall_bruck,
     "short equal blocks, many members: fewest steps"},
    {HVD_REDUCESCATTER, "halving", NEEDS_NO_PRESCALE, plan_reducescatter_halving,
     "short tensors: fewest steps"},
    {HVD_REDUCESCATTER, "ring", NEEDS_NO_PRESCALE, plan_reducescatter_ring,
     "long tensors: fewest bytes, neighbours only"},
    {HVD_REDUCESCATTER, "pairwise", ROUNDS_ONCE, plan_reducescatter_pairwise,
     "half types: adds in float32 and rounds once; one step, everybody to everybody"},
};
const int coll_n_algorithms = (int)N_ELEMENTS(coll_algorithms);

// The first row whose operation is asked for, whose bounds hold and whose algorithm can serve the
// request is taken; if none can, the first algorithm that can. Bytes: of the whole tensor; of one
// block in an alltoall.
static const struct {
    hvd_op_t op;
    size_t max_bytes;
    int max_members;
    const char *algorithm;
} choices[] = {
    {HVD_ALLREDUCE, 512 * KIB, 2, "recursive_doubling"}, // two members: one exchange, not two
    {HVD_ALLREDUCE, 16 * KIB, INT_MAX, "recursive_doubling"},
    {HVD_ALLREDUCE, 512 * KIB, INT_MAX, "halving_doubling"},
    {HVD_ALLREDUCE, SIZE_MAX, 16, "ring"},
    {HVD_ALLREDUCE, SIZE_MAX, INT_MAX, "halving_doubling"},
    {HVD_ALLGATHER, 64 * KIB, INT_MAX, "bruck"},
    {HVD_ALLGATHER, SIZE_MAX, INT_MAX, "ring"},
    {HVD_BROADCAST, 64 * KIB, INT_MAX, "binomial"},
    {HVD_BROADCAST, SIZE_MAX, INT_MAX, "chain"},
    {HVD_ALLTOALL, SIZE_MAX, 8, "pairwise"},
    {HVD_ALLTOALL, 1 * KIB, INT_MAX, "bruck"},
    {HVD_ALLTOALL, SIZE_MAX, INT_MAX, "pairwise"},
    {HVD_REDUCESCATTER, 64 * KIB, INT_MAX, "halving"},
    {HVD_REDUCESCATTER, SIZE_MAX, INT_MAX, "ring"},
};

// Names that may be forced too but stand for ways of the engine that need no plan.
static const char *const other_ways[] = {"direct", "stream", "two_level"};

// --- What fits -----------------------------------------------------------------------------------

static bool serves(const algorithm_t *row, const coll_args_t *args)
{
    if (row->op != args->op) {
        return false;
    }
    if ((row->flags & NEEDS_EQUAL_BLOCKS) && !args->equal_blocks) {
        return false;
    }
    if (!op_has(args->op, OP_REDUCES)) {
        return true;
    }
    const bool wants_adasum = args->reduce == HVD_ADASUM;
    const bool is_whole = args->dtype == HVD_FLOAT32 || args->dtype == HVD_FLOAT64;
    if (wants_adasum != ((row->flags & NEEDS_ADASUM) != 0) || (wants_adasum && !is_whole)) {
        return false;
    }
    const bool rounds = args->reduce != HVD_MIN && args->reduce != HVD_MAX;
    return !(dtype_is_half(args->dtype) && rounds) || (row->flags & ROUNDS_ONCE);
}

// What the bounds of `choices` are about.
static size_t deciding_bytes(const coll_args_t *args)
{
    switch (op_infos[args->op].layout) {
    case LAYOUT_GATHERED:
    case LAYOUT_SCATTERED:
        return sum_of(args->blocks, args->size);
    case LAYOUT_EXCHANGED:
        return args->equal_blocks ? args->send_bytes[0] : SIZE_MAX;
    default:
        return args->bytes;
    }
}

const algorithm_t *coll_find(hvd_op_t op, const char *name)
{
    for (int i = 0; i < coll_n_algorithms; i++) {
        if (coll_algorithms[i].op == op && strcmp(coll_algorithms[i].name, name) == 0) {
            return &coll_algorithms[i];
        }
    }
    return NULL;
}

// --- Forcing -------------------------------------------------------------------------------------

// A part of a text.
typedef struct word {
    const char *at;
    size_t length;
} word_t;

static word_t trim(word_t word)
{
    while (word.length > 0 && word.at[0] == ' ') {
        word.at++, word.length--;
    }
    while (word.length > 0 && word.at[word.length - 1] == ' ') {
        word.length--;
    }
    return word;
}

static bool is_word(word_t word, const char *text)
{
    return strlen(text) == word.length && memcmp(word.at, text, word.length) == 0;
}

// The text up to `stop`; *rest_p is what comes after it.
static word_t cut(const char *text, char stop, const char **rest_p)
{
    const char *end = strchr(text, stop);
    const size_t length = end != NULL ? (size_t)(end - text) : strlen(text);
    *rest_p = text + length + (end != NULL);
    return trim((word_t){text, length});
}

// Writes "ring, bruck, ..." for an operation.
static void list_names(hvd_op_t op, char *text, size_t bytes)
{
    size_t at = 0;
    text[0] = '\0';
    for (int i = 0; i < coll_n_algorithms && at < bytes; i++) {
        if (coll_algorithms[i].op == op) {
            at += (size_t)snprintf(text + at, bytes - at, "%s%s", at > 0 ? ", " : "",
                                   coll_algorithms[i].name);
        }
    }
}

// Reads one "operation=algorithm": a plan, or one of the engine's other ways.
static hvd_status_t parse_pair(word_t pair, hvd_op_t *op_p, coll_forced_t *forced_p, err_t *err)
{
    const char *equals = memchr(pair.at, '=', pair.length);
    const size_t left = equals != NULL ? (size_t)(equals - pair.at) : pair.length;
    const word_t op_name = trim((word_t){pair.at, left});
    const word_t name =
        trim((word_t){pair.at + left + 1, equals != NULL ? pair.length - left - 1 : 0});
    int op = 0;
    while (op < HVD_N_OPS && !is_word(op_name, hvd_op_name((hvd_op_t)op))) {
        op++;
    }
    if (equals == NULL || op == HVD_N_OPS) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "HOROVOD_ALGORITHM has '%.*s', which is not operation=algorithm; try "
                    "allreduce=ring,alltoall=bruck",
                    (int)pair.length, pair.at);
    }
    *op_p = (hvd_op_t)op;
    *forced_p = (coll_forced_t){0};
    for (int i = 0; i < coll_n_algorithms; i++) {
        if (coll_algorithms[i].op == *op_p && is_word(name, coll_algorithms[i].name)) {
            forced_p->plan = &coll_algorithms[i];
            return HVD_OK;
        }
    }
    for (size_t i = 0; i < N_ELEMENTS(other_ways); i++) {
        if (is_word(name, other_ways[i])) {
            forced_p->way = other_ways[i];
            return HVD_OK;
        }
    }
    char names[256];
    list_names(*op_p, names, sizeof names);
    return fail(err, HVD_INVALID_ARGUMENT,
                "HOROVOD_ALGORITHM asks for %s by '%.*s', which does not exist; choose from: %s",
                hvd_op_name(*op_p), (int)name.length, name.at,
                names[0] != '\0' ? names : "no choice");
}

hvd_status_t coll_forced(hvd_op_t op, const char *text, coll_forced_t *forced_p, err_t *err)
{
    *forced_p = (coll_forced_t){0};
    while (text != NULL && text[0] != '\0') {
        const word_t pair = cut(text, ',', &text);
        hvd_op_t pair_op;
        coll_forced_t pair_forced;
        if (pair.length == 0) {
            continue;
        }
        const hvd_status_t status = parse_pair(pair, &pair_op, &pair_forced, err);
        if (status != HVD_OK) {
            return status;
        }
        *forced_p = pair_op == op ? pair_forced : *forced_p;
    }
    return HVD_OK;
}

// --- Choice --------------------------------------------------------------------------------------

static const algorithm_t *choose_by_table(const coll_args_t *args)
{
    const size_t bytes = deciding_bytes(args);
    for (size_t i = 0; i < N_ELEMENTS(choices); i++) {
        if (choices[i].op == args->op && bytes <= choices[i].max_bytes &&
            args->size <= choices[i].max_members) {
            const algorithm_t *row = coll_find(args->op, choices[i].algorithm);
            if (row != NULL && serves(row, args)) {
                return row;
            }
        }
    }
    for (int i = 0; i < coll_n_algorithms; i++) {
        if (serves(&coll_algorithms[i], args)) {
            return &coll_algorithms[i];
        }
    }
    return NULL;
}

const algorithm_t *coll_choose(const coll_args_t *args, const char *forced, err_t *err)
{
    coll_forced_t by_user;
    if (coll_forced(args->op, forced, &by_user, err) != HVD_OK) {
        return NULL;
    }
    if (by_user.plan != NULL && serves(by_user.plan, args)) {
        return by_user.plan;
    }
    const algorithm_t *row = choose_by_table(args);
    if (row == NULL) {
        fail(err, HVD_UNSUPPORTED,
             "no algorithm does %s with %s of %s; try another reduction or type",
             hvd_op_name(args->op), hvd_reduce_name(args->reduce), hvd_dtype_name(args->dtype));
    }
    return row;
}

hvd_status_t coll_plan(const algorithm_t *algorithm, const coll_args_t *args, plan_t *plan,
                       err_t *err)
{
    plan_clear(plan);
    if (algorithm->op != args->op || args->member < 0 || args->member >= args->size ||
        args->root < 0 || args->root >= args->size) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "%s by %s cannot be planned for member %d of %d with root %d",
                    hvd_op_name(args->op), algorithm->name, args->member, args->size, args->root);
    }
    const hvd_status_t status = algorithm->plan(args, plan, err);
    if (status == HVD_OK && plan->failed) {
        return fail(err, HVD_NO_MEMORY, "no memory for the plan of %s among %d members",
                    hvd_op_name(args->op), args->size);
    }
    return status;
}
