// SPDX-License-Identifier: Apache-2.0
//
// hook.c - a link that misbehaves on request, around any other link. For tests and for looking.
//
// HOROVOD_HOOK is a list of rules, one row each in the table below:
//   trace      every call that moved something is a log line at trace level
//   delay=US   what is sent leaves US microseconds later, from half to one and a half times that
//   cut=N      after N bytes in either direction the link breaks, for the peer too
//   flip=N     about once in N bytes sent, one bit changes on the way
//   drop=N     about once in N bytes sent, a few of them vanish on the way
//   reorder=N  about once in N bytes sent, two neighbouring pieces change places on the way
//   hole=N     after about N bytes sent, all that follow vanish on the way
//   lane=N     only links of this lane: 1 for control, 2 for data
//   seed=N     another sequence of everything above
//
// "On the way" is behind the encryption of links that have it, where a faulty or hostile device
// would sit: their peer must notice. On other links nobody can, and results go wrong.
//
// Sent bytes wait in one queue, cut into pieces that know when they are due; the first one holds up
// the others, so nothing overtakes. net_progress comes by to release them (hook_progress). At most
// QUEUE_BYTES and MAX_PIECES wait. A link whose inner side breaks still gives what had arrived.
// Cost: a copy of what is sent; not for production.
// Thread: the holder of the engine. The hook owns the inner link.
#define _GNU_SOURCE
#include "net/net.h"

#include <inttypes.h>
#include <stdlib.h>

#define QUEUE_BYTES MIB
#define MAX_PIECES 1024
#define MAX_DAMAGE_BYTES ((size_t)64) // that vanish or move at once

typedef enum damage { DAMAGE_FLIP, DAMAGE_DROP, DAMAGE_REORDER, DAMAGE_HOLE, N_DAMAGES } damage_t;

typedef struct hook_rules {
    bool trace;
    uint64_t delay_us;
    uint64_t cut_bytes;               // 0: never
    uint64_t damage_bytes[N_DAMAGES]; // how often each comes; 0: never
    uint64_t lane;                    // 1 + the lane meant; 0: all
    uint64_t seed;
} hook_rules_t;

typedef struct delayed {
    uint64_t due_ns;
    size_t bytes;
} delayed_t;

typedef struct hook_link {
    net_link_t base;
    net_link_t *inner; // NULL once dropped
    const log_t *log;
    hook_rules_t rules;
    uint64_t random;
    uint64_t moved_bytes;
    uint64_t damage_in[N_DAMAGES]; // bytes to go until the next
    bool has_hole;                 // nothing that is sent arrives any more
    bool damages_queue;            // the inner link has no protection to get behind
    buf_t queue;
    size_t queue_at;
    delayed_t pieces[MAX_PIECES]; // a ring
    size_t first_piece, n_pieces;
} hook_link_t;

// --- Rules ---------------------------------------------------------------------------------------

static const struct {
    const char *name;
    bool takes_number;
    size_t offset;
} rule_rows[] = {
    {"trace", false, offsetof(hook_rules_t, trace)},
    {"delay", true, offsetof(hook_rules_t, delay_us)},
    {"cut", true, offsetof(hook_rules_t, cut_bytes)},
    {"flip", true, offsetof(hook_rules_t, damage_bytes[DAMAGE_FLIP])},
    {"drop", true, offsetof(hook_rules_t, damage_bytes[DAMAGE_DROP])},
    {"reorder", true, offsetof(hook_rules_t, damage_bytes[DAMAGE_REORDER])},
    {"hole", true, offsetof(hook_rules_t, damage_bytes[DAMAGE_HOLE])},
    {"lane", true, offsetof(hook_rules_t, lane)},
    {"seed", true, offsetof(hook_rules_t, seed)},
};

static bool parse_number(const char *text, size_t bytes, uint64_t *value_p)
{
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; i++) {
        if (text[i] < '0' || text[i] > '9' || value > UINT64_MAX / 10 - 1) {
            return false;
        }
        value = value * 10 + (uint64_t)(text[i] - '0');
    }
    *value_p = value;
    return bytes > 0;
}

// One rule, without the comma.
static bool parse_rule(const char *text, size_t bytes, hook_rules_t *rules)
{
    for (size_t i = 0; i < N_ELEMENTS(rule_rows); i++) {
        size_t name_bytes = strlen(rule_rows[i].name);
        void *field = (char *)rules + rule_rows[i].offset;

        if (bytes < name_bytes || memcmp(text, rule_rows[i].name, name_bytes) != 0) {
            continue;
        }
        if (!rule_rows[i].takes_number && bytes == name_bytes) {
            *(bool *)field = true;
            return true;
        }
        if (rule_rows[i].takes_number && bytes > name_bytes && text[name_bytes] == '=') {
            return parse_number(text + name_bytes + 1, bytes - name_bytes - 1, field);
        }
    }
    return false;
}

static hvd_status_t parse_rules(const char *text, hook_rules_t *rules, err_t *err)
{
    while (*text != '\0') {
        size_t bytes = strcspn(text, ",");
        if (!parse_rule(text, bytes, rules)) {
            return fail(err, HVD_INVALID_ARGUMENT,
                        "HOROVOD_HOOK has an unknown rule \"%.*s\"; the rules are trace, "
                        "delay=MICROSECONDS, cut=BYTES, flip=BYTES, drop=BYTES, reorder=BYTES, "
                        "hole=BYTES, lane=NUMBER, seed=NUMBER",
                        (int)MIN(bytes, 100), text);
        }
        text += bytes + (text[bytes] == ',');
    }
    return HVD_OK;
}

// --- Chance --------------------------------------------------------------------------------------

// xorshift64*: any seed but 0 will do.
static uint64_t next_random(hook_link_t *link)
{
    link->random ^= link->random >> 12;
    link->random ^= link->random << 25;
    link->random ^= link->random >> 27;
    return link->random * UINT64_C(2685821657736338717);
}

// Around `mean`, from half to one and a half times that.
static uint64_t next_about(hook_link_t *link, uint64_t mean)
{
    return mean / 2 + next_random(link) % (mean + 1);
}

// --- Damage --------------------------------------------------------------------------------------
// Each changes n bytes at data, near `at`, and returns how many are left.

static size_t damage_flip(hook_link_t *link, uint8_t *data, size_t n, size_t at)
{
    data[at] ^= (uint8_t)(1u << next_random(link) % 8);
    return n;
}

static size_t damage_drop(hook_link_t *link, uint8_t *data, size_t n, size_t at)
{
    size_t n_gone = 1 + next_random(link) % MIN(n - at, MAX_DAMAGE_BYTES);
    memmove(data + at, data + at + n_gone, n - at - n_gone);
    return n - n_gone;
}

static size_t damage_reorder(hook_link_t *link, uint8_t *data, size_t n, size_t at)
{
    at = n - at < 2 ? 0 : at;
    size_t n_wanted = 1 + next_random(link) % MAX_DAMAGE_BYTES; // once: MIN looks twice
    size_t n_each = MIN((n - at) / 2, n_wanted);
    uint8_t kept[MAX_DAMAGE_BYTES];

    memcpy(kept, data + at, n_each);
    memmove(data + at, data + at + n_each, n_each);
    memcpy(data + at + n_each, kept, n_each);
    return n;
}

static size_t damage_hole(hook_link_t *link, uint8_t *data, size_t n, size_t at)
{
    (void)data;
    (void)n;
    link->has_hole = true;
    return at;
}

static size_t (*const damages[N_DAMAGES])(hook_link_t *, uint8_t *, size_t, size_t) = {
    [DAMAGE_FLIP] = damage_flip,
    [DAMAGE_DROP] = damage_drop,
    [DAMAGE_REORDER] = damage_reorder,
    [DAMAGE_HOLE] = damage_hole,
};

// What is about to leave. At most one damage of each kind a call.
static size_t mangle(void *arg, uint8_t *data, size_t n)
{
    hook_link_t *link = arg;
    n = link->has_hole ? 0 : n;
    for (int kind = 0; kind < N_DAMAGES; kind++) {
        uint64_t every = link->rules.damage_bytes[kind];
        if (every == 0 || n == 0) {
            continue;
        }
        if (link->damage_in[kind] >= n) {
            link->damage_in[kind] -= n;
            continue;
        }
        n = damages[kind](link, data, n, (size_t)link->damage_in[kind]);
        link->damage_in[kind] = next_about(link, every);
    }
    return n;
}

static bool does_damage(const hook_rules_t *rules)
{
    uint64_t any = 0;
    for (int kind = 0; kind < N_DAMAGES; kind++) {
        any |= rules->damage_bytes[kind];
    }
    return any != 0;
}

// --- Delay ---------------------------------------------------------------------------------------

static uint64_t next_due_ns(hook_link_t *link)
{
    return clock_ns() + next_about(link, link->rules.delay_us * NS_PER_US);
}

static ssize_t enqueue(hook_link_t *link, const void *data, size_t bytes)
{
    size_t n = MIN(bytes, QUEUE_BYTES - link->queue.len);
    if (n == 0 || link->n_pieces == MAX_PIECES) {
        return 0;
    }
    uint8_t *held = buf_append(&link->queue, data, n);
    if (held == NULL) {
        return fail(&link->base.err, HVD_NO_MEMORY, "no memory for %zu bytes held back", n);
    }
    size_t left = link->damages_queue ? mangle(link, held, n) : n;
    link->queue.len -= n - left;
    if (left > 0) {
        link->pieces[(link->first_piece + link->n_pieces++) % MAX_PIECES] =
            (delayed_t){.due_ns = next_due_ns(link), .bytes = left};
    }
    return (ssize_t)n;
}

// Sends what it can of the first piece. True if the whole piece has left.
static bool release_piece(hook_link_t *link)
{
    delayed_t *piece = &link->pieces[link->first_piece];
    ssize_t n =
        link->inner->ops->send(link->inner, link->queue.data + link->queue_at, piece->bytes);
    if (n < 0) {
        link->base.err = link->inner->err;
    }
    if (n <= 0) {
        return false;
    }
    piece->bytes -= (size_t)n;
    link->queue_at += (size_t)n;
    if (piece->bytes > 0) {
        return false;
    }
    link->first_piece = (link->first_piece + 1) % MAX_PIECES;
    link->n_pieces--;
    if (link->n_pieces == 0) {
        buf_clear(&link->queue);
        link->queue_at = 0;
    }
    return true;
}

int hook_progress(net_link_t *base, uint64_t *next_ns_p)
{
    hook_link_t *link = (hook_link_t *)base;
    int n_released = 0;
    while (link->n_pieces > 0 && link->base.err.status == HVD_OK) {
        uint64_t due_ns = link->pieces[link->first_piece].due_ns;
        if (due_ns > clock_ns()) {
            *next_ns_p = MIN(*next_ns_p, due_ns);
            break;
        }
        if (!release_piece(link)) {
            break; // the inner link is full, and wakes us by itself when it is not
        }
        n_released++;
    }
    return n_released;
}

// --- Link ----------------------------------------------------------------------------------------

// Counts and traces n bytes that are about to be reported; breaks the link when it has had enough.
static ssize_t account(hook_link_t *link, const char *what, ssize_t n)
{
    if (n < 0) {
        link->base.err = link->inner->err;
    }
    if (n == 0) {
        return 0;
    }
    if (link->rules.trace) {
        log_trace(link->log, "hook", "%s peer %d lane %d bytes %zd", what, link->base.peer,
                  (int)link->base.lane, n);
    }
    link->moved_bytes += n > 0 ? (uint64_t)n : 0;
    if (link->rules.cut_bytes == 0 || link->moved_bytes < link->rules.cut_bytes) {
        return n;
    }
    link_close(link->inner);
    link->inner = NULL;
    return fail(&link->base.err, HVD_PEER_LOST,
                "the link to rank %d was cut by HOROVOD_HOOK after "
                "%" PRIu64 " bytes",
                link->base.peer, link->moved_bytes);
}

static ssize_t hook_send(net_link_t *base, const void *data, size_t bytes)
{
    hook_link_t *link = (hook_link_t *)base;
    if (base->err.status != HVD_OK) {
        return base->err.status;
    }
    if (link->rules.delay_us == 0 && !link->damages_queue) {
        return account(link, "send", link->inner->ops->send(link->inner, data, bytes));
    }
    ssize_t n = enqueue(link, data, bytes);
    return n < 0 ? n : account(link, "send", n);
}

static ssize_t hook_recv(net_link_t *base, void *data, size_t bytes)
{
    hook_link_t *link = (hook_link_t *)base;
    return link->inner == NULL
               ? (ssize_t)base->err.status
               : account(link, "recv", link->inner->ops->recv(link->inner, data, bytes));
}

static ssize_t hook_peek(net_link_t *base, const void **data_p)
{
    hook_link_t *link = (hook_link_t *)base;
    if (link->inner == NULL) {
        return base->err.status;
    }
    ssize_t n = link->inner->ops->peek(link->inner, data_p);
    if (n < 0) {
        base->err = link->inner->err;
    }
    return n;
}

static void hook_consume(net_link_t *base, size_t bytes)
{
    hook_link_t *link = (hook_link_t *)base;
    if (link->inner != NULL) {
        link->inner->ops->consume(link->inner, bytes);
        account(link, "consume", (ssize_t)bytes);
    }
}

static void hook_close(net_link_t *base)
{
    hook_link_t *link = (hook_link_t *)base;
    // What was sent is late, not lost.
    while (link->inner != NULL && link->n_pieces > 0 && release_piece(link)) {
    }
    link_close(link->inner);
    buf_free(&link->queue);
    free(link);
}

static const link_ops_t hook_ops = {
    .send = hook_send,
    .recv = hook_recv,
    .peek = hook_peek,
    .consume = hook_consume,
    .close = hook_close,
};

hvd_status_t hook_wrap(net_link_t *inner, const char *rules, const net_job_t *job,
                       net_link_t **link_p, err_t *err)
{
    hvd_status_t status;
    hook_link_t *link = calloc(1, sizeof *link);
    if (link == NULL) {
        status = fail(err, HVD_NO_MEMORY, "no memory to wrap the link to rank %d", inner->peer);
        goto close_inner;
    }
    TRY(parse_rules(rules, &link->rules, err), free_link);
    if (link->rules.lane != 0 && link->rules.lane != (uint64_t)inner->lane + 1) {
        free(link);
        *link_p = inner;
        return HVD_OK;
    }
    link->base = (net_link_t){
        .ops = &hook_ops, .transport = inner->transport, .peer = inner->peer, .lane = inner->lane};
    link->inner = inner;
    link->log = job->log;
    int place[3] = {job->rank, inner->peer, (int)inner->lane};
    link->random = hash_bytes(place, sizeof place, link->rules.seed);
    for (int kind = 0; kind < N_DAMAGES; kind++) {
        link->damage_in[kind] = next_about(link, link->rules.damage_bytes[kind]);
    }
    link->damages_queue = does_damage(&link->rules) && (inner->ops->on_wire == NULL ||
                                                        !inner->ops->on_wire(inner, mangle, link));
    *link_p = &link->base;
    return HVD_OK;

free_link:
    free(link);
close_inner:
    link_close(inner);
    return status;
}
