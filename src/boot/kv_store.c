// SPDX-License-Identifier: Apache-2.0
//
// kv_store.c - keys, held names and gates of the rendezvous server.
//
// Keys live in one hash map and are never deleted. A gate is what requests wait at; there are three
// kinds, found in one map by a kind letter and a text:
//
//     key     opens when the key is put
//     gather  opens when keys <prefix>0 .. <prefix>n-1 are all there; a counter of missing ones is
//             made once, when the gate is, and goes down with each new key
//     name    opens when the holder of the name leaves
//
// Holders of names that differ in their number only ("rank/0", "rank/1", ...) and have the same
// turn are a group. Groups gather what all their members put and leave when that is complete, so a
// gather that still lacks something when the first of them leaves never ends: it is answered at
// once, with who that was. Those who come back have the next turn and are not meant. One whose time
// is over will leave, so all who wait with it are late with it: each hears what was missing, and
// not only that somebody has left.
//
// So a job of P ranks that all put and all gather costs P look-ups to make the gate and one per
// put. The answer to a gather is built once and shared; the latest stays for those who ask
// afterwards. Memory: KV_STORED_LIMIT of keys and values, the answers under way, and what waits.
#include "boot/kv_store.h"

#include <stdlib.h>

// What a key costs beyond its bytes, so that many tiny ones cannot pass the limit on bytes.
#define ENTRY_OVERHEAD ((size_t)64)

typedef struct kv_entry {
    size_t bytes;
    uint8_t data[];
} kv_entry_t;

typedef enum gate_kind { GATE_KEY = 'k', GATE_GATHER = 'g', GATE_NAME = 'n' } gate_kind_t;

typedef struct gate_key {
    char text[1 + KV_KEY_LIMIT];
    size_t bytes;
    uint64_t hash;
} gate_key_t;

struct kv_gate {
    gate_key_t key;
    uint32_t n, n_missing; // GATE_GATHER
    kv_waiter_t *waiters;
};

typedef struct kv_group {
    uint64_t turn_left; // the latest turn that somebody has left; 0: none
    kv_left_t first;    // to leave that turn
} kv_group_t;

struct kv_lease {
    uint64_t turn; // how many times the name has been taken
    kv_waiter_t *holder;
    kv_group_t *group; // NULL: the name has no number
    uint32_t number;
    size_t name_bytes;
    char name[];
};

struct kv_store {
    uint64_t seed;
    map_t entries, leases, groups, gates;
    size_t stored_bytes;
    kv_waiter_t *ready;
    kv_answer_t *last_gather; // NULL, or the answer for this prefix and n
    gate_key_t last_key;
    uint32_t last_n;
};

static uint64_t hash_of(const kv_store_t *store, const char *text, size_t bytes)
{
    return hash_bytes(text, bytes, store->seed);
}

// --- Answers -------------------------------------------------------------------------------------

void kv_answer_drop(kv_answer_t *answer)
{
    if (answer != NULL && --answer->n_holders == 0) {
        buf_free(&answer->message);
        free(answer);
    }
}

static kv_answer_t *answer_new(kv_code_t code)
{
    kv_answer_t *answer = calloc(1, sizeof *answer);
    if (answer != NULL) {
        answer->n_holders = 1;
        put_u32(&answer->message, 0); // the length, when it is known
        put_u8(&answer->message, (uint8_t)code);
    }
    return answer;
}

// Writes the length in front, now that the body is complete.
static kv_answer_t *answer_done(kv_answer_t *answer)
{
    buf_t *message = &answer->message;
    if (!message->failed) {
        uint32_t bytes = (uint32_t)(message->len - KV_HEAD_BYTES);
        for (size_t i = 0; i < KV_HEAD_BYTES; i++) {
            message->data[i] = (uint8_t)(bytes >> (8 * i));
        }
    }
    return answer;
}

static kv_answer_t *answer_code(kv_code_t code)
{
    kv_answer_t *answer = answer_new(code);
    return answer != NULL ? answer_done(answer) : NULL;
}

static kv_answer_t *answer_bytes(kv_code_t code, const void *data, size_t bytes)
{
    kv_answer_t *answer = answer_new(code);
    if (answer == NULL) {
        return NULL;
    }
    if (bytes > 0) {
        put_bytes(&answer->message, data, bytes);
    }
    return answer_done(answer);
}

// --- Gates and waiters ---------------------------------------------------------------------------

static void list_add(kv_waiter_t **head, kv_waiter_t *waiter)
{
    waiter->next = *head;
    waiter->back_p = head;
    if (*head != NULL) {
        (*head)->back_p = &waiter->next;
    }
    *head = waiter;
}

static void list_remove(kv_waiter_t *waiter)
{
    if (waiter->back_p != NULL) {
        *waiter->back_p = waiter->next;
        if (waiter->next != NULL) {
            waiter->next->back_p = waiter->back_p;
        }
    }
    waiter->next = NULL;
    waiter->back_p = NULL;
}

static gate_key_t gate_key(const kv_store_t *store, gate_kind_t kind, const char *text,
                           size_t bytes)
{
    gate_key_t key = {.bytes = bytes + 1};
    key.text[0] = (char)kind;
    memcpy(key.text + 1, text, bytes);
    key.hash = hash_of(store, key.text, key.bytes);
    return key;
}

static kv_gate_t *gate_find(const kv_store_t *store, const gate_key_t *key)
{
    return map_get(&store->gates, key->hash, key->text, key->bytes);
}

static void gate_remove(kv_store_t *store, kv_gate_t *gate)
{
    map_remove(&store->gates, gate->key.hash, gate->key.text, gate->key.bytes);
    free(gate);
}

static kv_gate_t *gate_new(kv_store_t *store, const gate_key_t *key)
{
    kv_gate_t *gate = calloc(1, sizeof *gate);
    if (gate == NULL) {
        return NULL;
    }
    gate->key = *key;
    if (!map_put(&store->gates, key->hash, key->text, key->bytes, gate)) {
        free(gate);
        return NULL;
    }
    return gate;
}

static void gate_join(kv_gate_t *gate, kv_waiter_t *waiter)
{
    waiter->gate = gate;
    list_add(&gate->waiters, waiter);
}

static void gate_leave(kv_store_t *store, kv_waiter_t *waiter)
{
    kv_gate_t *gate = waiter->gate;
    list_remove(waiter);
    waiter->gate = NULL;
    if (gate != NULL && gate->waiters == NULL) {
        gate_remove(store, gate);
    }
}

static void gate_open(kv_store_t *store, kv_gate_t *gate)
{
    while (gate->waiters != NULL) {
        kv_waiter_t *waiter = gate->waiters;
        list_remove(waiter);
        waiter->gate = NULL;
        list_add(&store->ready, waiter);
    }
    gate_remove(store, gate);
}

// Waits at the gate of this kind and text, which is made if there is none. Returns NULL, as the
// caller's answer, unless memory is short.
static kv_answer_t *wait_at(kv_store_t *store, kv_waiter_t *waiter, gate_kind_t kind,
                            const kv_request_t *request)
{
    gate_key_t key = gate_key(store, kind, request->key, request->key_bytes);
    kv_gate_t *gate = gate_find(store, &key);
    if (gate == NULL && (gate = gate_new(store, &key)) == NULL) {
        return answer_code(KV_FULL);
    }
    gate_join(gate, waiter);
    return NULL;
}

kv_waiter_t *kv_store_next_ready(kv_store_t *store)
{
    kv_waiter_t *waiter = store->ready;
    if (waiter != NULL) {
        list_remove(waiter);
    }
    return waiter;
}

// --- Put and get ---------------------------------------------------------------------------------

static void open_gates_of_key(kv_store_t *store, const char *text, size_t bytes)
{
    gate_key_t key = gate_key(store, GATE_KEY, text, bytes);
    kv_gate_t *gate = gate_find(store, &key);
    size_t prefix_bytes;
    uint32_t number;
    if (gate != NULL) {
        gate_open(store, gate);
    }
    if (!kv_key_split(text, bytes, &prefix_bytes, &number)) {
        return;
    }
    key = gate_key(store, GATE_GATHER, text, prefix_bytes);
    gate = gate_find(store, &key);
    if (gate != NULL && number < gate->n && --gate->n_missing == 0) {
        gate_open(store, gate);
    }
}

static void forget_last_gather(kv_store_t *store)
{
    kv_answer_drop(store->last_gather);
    store->last_gather = NULL;
}

static kv_answer_t *run_put(kv_store_t *store, kv_waiter_t *waiter, const kv_request_t *request)
{
    (void)waiter;
    uint64_t hash = hash_of(store, request->key, request->key_bytes);
    kv_entry_t *old = map_get(&store->entries, hash, request->key, request->key_bytes);
    size_t old_cost = old != NULL ? old->bytes : 0;
    size_t cost = request->value_bytes + (old != NULL ? 0 : request->key_bytes + ENTRY_OVERHEAD);

    if (store->stored_bytes - old_cost + cost > KV_STORED_LIMIT ||
        (old == NULL && store->entries.n_used >= KV_KEYS_LIMIT)) {
        return answer_code(KV_FULL);
    }
    kv_entry_t *entry = malloc(sizeof *entry + request->value_bytes);
    if (entry == NULL) {
        return answer_code(KV_FULL);
    }
    entry->bytes = request->value_bytes;
    memcpy(entry->data, request->value, request->value_bytes);
    if (!map_put(&store->entries, hash, request->key, request->key_bytes, entry)) {
        free(entry);
        return answer_code(KV_FULL);
    }
    store->stored_bytes += cost - old_cost;
    if (old != NULL) {
        free(old);
        forget_last_gather(store);
    } else {
        open_gates_of_key(store, request->key, request->key_bytes);
    }
    return answer_code(KV_OK);
}

static kv_answer_t *run_get(kv_store_t *store, kv_waiter_t *waiter, const kv_request_t *request)
{
    uint64_t hash = hash_of(store, request->key, request->key_bytes);
    const kv_entry_t *entry = map_get(&store->entries, hash, request->key, request->key_bytes);
    if (entry == NULL) {
        return wait_at(store, waiter, GATE_KEY, request);
    }
    return answer_bytes(KV_OK, entry->data, entry->bytes);
}

// --- Gather --------------------------------------------------------------------------------------

static const kv_entry_t *numbered_entry(const kv_store_t *store, const kv_request_t *request,
                                        uint32_t number)
{
    char text[KV_KEY_LIMIT + 8];
    char digits[8];
    size_t n_digits = 0, len = request->key_bytes;
    memcpy(text, request->key, len);
    do {
        digits[n_digits++] = (char)('0' + number % 10);
        number /= 10;
    } while (number > 0);
    while (n_digits > 0) {
        text[len++] = digits[--n_digits];
    }
    return map_get(&store->entries, hash_of(store, text, len), text, len);
}

static kv_missing_t find_missing(const kv_store_t *store, const kv_request_t *request)
{
    kv_missing_t missing = {0};
    for (uint32_t i = 0; i < request->n; i++) {
        if (numbered_entry(store, request, i) == NULL) {
            kv_missing_add(&missing, i);
        }
    }
    return missing;
}

static kv_answer_t *build_gather(const kv_store_t *store, const kv_request_t *request)
{
    kv_answer_t *answer = answer_new(KV_OK);
    for (uint32_t i = 0; i < request->n && answer != NULL; i++) {
        const kv_entry_t *entry = numbered_entry(store, request, i);
        put_u32(&answer->message, (uint32_t)entry->bytes);
        put_bytes(&answer->message, entry->data, entry->bytes);
    }
    return answer != NULL ? answer_done(answer) : NULL;
}

static kv_answer_t *answer_differs(uint32_t n)
{
    uint8_t bytes[4] = {(uint8_t)n, (uint8_t)(n >> 8), (uint8_t)(n >> 16), (uint8_t)(n >> 24)};
    return answer_bytes(KV_DIFFERS, bytes, sizeof bytes);
}

static kv_answer_t *answer_left(const kv_left_t *left)
{
    kv_answer_t *answer = answer_new(KV_LEFT);
    if (answer == NULL) {
        return NULL;
    }
    kv_encode_left(&answer->message, left);
    return answer_done(answer);
}

static kv_answer_t *answer_late(const kv_store_t *store, const kv_request_t *request)
{
    kv_missing_t missing = find_missing(store, request);
    kv_answer_t *answer = answer_new(KV_LATE);
    if (answer == NULL) {
        return NULL;
    }
    kv_encode_missing(&answer->message, &missing);
    return answer_done(answer);
}

static bool waits_in_vain(const kv_waiter_t *waiter)
{
    const kv_lease_t *lease = waiter->lease;
    return waiter->is_late ||
           (lease != NULL && lease->group != NULL && lease->group->turn_left >= lease->turn);
}

static kv_answer_t *answer_in_vain(const kv_store_t *store, const kv_waiter_t *waiter,
                                   const kv_request_t *request)
{
    return waiter->is_late ? answer_late(store, request)
                           : answer_left(&waiter->lease->group->first);
}

// Whoever waits at the same gate for the sake of the same group.
static void be_late_together(kv_store_t *store, const kv_waiter_t *waiter)
{
    const kv_lease_t *lease = waiter->lease;
    kv_waiter_t *next;
    for (kv_waiter_t *other = waiter->gate->waiters; other != NULL; other = next) {
        next = other->next;
        if (other != waiter && lease != NULL && lease->group != NULL && other->lease != NULL &&
            other->lease->group == lease->group && other->lease->turn == lease->turn) {
            gate_leave(store, other);
            other->is_late = true;
            list_add(&store->ready, other);
        }
    }
}

static bool is_last_gather(const kv_store_t *store, const gate_key_t *key, uint32_t n)
{
    return store->last_gather != NULL && store->last_n == n &&
           store->last_key.bytes == key->bytes &&
           memcmp(store->last_key.text, key->text, key->bytes) == 0;
}

static kv_answer_t *run_gather(kv_store_t *store, kv_waiter_t *waiter, const kv_request_t *request)
{
    gate_key_t key = gate_key(store, GATE_GATHER, request->key, request->key_bytes);
    kv_gate_t *gate = gate_find(store, &key);
    if (gate != NULL && gate->n != request->n) {
        return answer_differs(gate->n);
    }
    if (gate != NULL && waits_in_vain(waiter)) {
        return answer_in_vain(store, waiter, request);
    }
    if (gate != NULL) {
        gate_join(gate, waiter);
        return NULL;
    }
    if (!is_last_gather(store, &key, request->n)) {
        uint32_t n_missing = find_missing(store, request).n_missing;
        if (n_missing > 0 && waits_in_vain(waiter)) {
            return answer_in_vain(store, waiter, request);
        }
        if (n_missing > 0) {
            if ((gate = gate_new(store, &key)) == NULL) {
                return answer_code(KV_FULL);
            }
            gate->n = request->n;
            gate->n_missing = n_missing;
            gate_join(gate, waiter);
            return NULL;
        }
        forget_last_gather(store);
        store->last_gather = build_gather(store, request);
        store->last_key = key;
        store->last_n = request->n;
    }
    if (store->last_gather == NULL || store->last_gather->message.failed) {
        forget_last_gather(store);
        return answer_code(KV_FULL);
    }
    store->last_gather->n_holders++;
    return store->last_gather;
}

// --- Names ---------------------------------------------------------------------------------------

// The group of names with this prefix, made at first use; NULL: no memory.
static kv_group_t *group_find(kv_store_t *store, const char *prefix, size_t bytes)
{
    uint64_t hash = hash_of(store, prefix, bytes);
    kv_group_t *group = map_get(&store->groups, hash, prefix, bytes);
    if (group == NULL && (group = calloc(1, sizeof *group)) != NULL &&
        !map_put(&store->groups, hash, prefix, bytes, group)) {
        free(group);
        group = NULL;
    }
    return group;
}

// The lease of this name, made at first use; NULL: no memory or too many names.
static kv_lease_t *lease_find(kv_store_t *store, const kv_request_t *request)
{
    uint64_t hash = hash_of(store, request->key, request->key_bytes);
    kv_lease_t *lease = map_get(&store->leases, hash, request->key, request->key_bytes);
    if (lease != NULL || store->leases.n_used >= KV_KEYS_LIMIT) {
        return lease;
    }
    lease = calloc(1, sizeof *lease + request->key_bytes);
    if (lease == NULL) {
        return NULL;
    }
    lease->name_bytes = request->key_bytes;
    memcpy(lease->name, request->key, request->key_bytes);
    size_t prefix_bytes;
    bool is_numbered = kv_key_split(lease->name, lease->name_bytes, &prefix_bytes, &lease->number);
    if (is_numbered) {
        lease->group = group_find(store, lease->name, prefix_bytes);
    }
    if ((is_numbered && lease->group == NULL) ||
        !map_put(&store->leases, hash, lease->name, lease->name_bytes, lease)) {
        free(lease);
        return NULL;
    }
    return lease;
}

static kv_answer_t *run_enter(kv_store_t *store, kv_waiter_t *waiter, const kv_request_t *request)
{
    kv_lease_t *lease = lease_find(store, request);
    uint8_t turn[8];
    if (lease == NULL || waiter->lease != NULL) {
        return answer_code(KV_FULL);
    }
    if (lease->holder != NULL) {
        return wait_at(store, waiter, GATE_NAME, request);
    }
    lease->holder = waiter;
    lease->turn++;
    waiter->lease = lease;
    memcpy(waiter->who, request->value, request->value_bytes);
    waiter->who[request->value_bytes] = '\0';
    for (size_t i = 0; i < sizeof turn; i++) {
        turn[i] = (uint8_t)(lease->turn >> (8 * i));
    }
    return answer_bytes(KV_OK, turn, sizeof turn);
}

// Another gate may move to where one was, so that place is looked at again.
static void open_gathers(kv_store_t *store)
{
    for (size_t i = 0; i < store->gates.n_slots;) {
        kv_gate_t *gate = store->gates.slots[i].value;
        if (gate != NULL && gate->key.text[0] == GATE_GATHER) {
            gate_open(store, gate);
        } else {
            i++;
        }
    }
}

static void leave_group(kv_store_t *store, const kv_waiter_t *waiter)
{
    const kv_lease_t *lease = waiter->lease;
    kv_group_t *group = lease->group;
    if (group != NULL && lease->turn > group->turn_left) {
        group->turn_left = lease->turn;
        group->first.number = lease->number;
        memcpy(group->first.who, waiter->who, sizeof waiter->who);
        open_gathers(store);
    }
}

static void lease_end(kv_store_t *store, kv_lease_t *lease)
{
    gate_key_t key = gate_key(store, GATE_NAME, lease->name, lease->name_bytes);
    kv_gate_t *gate = gate_find(store, &key);
    lease->holder = NULL;
    if (gate != NULL) {
        gate_open(store, gate);
    }
}

// --- All requests --------------------------------------------------------------------------------

kv_answer_t *kv_store_run(kv_store_t *store, kv_waiter_t *waiter, const kv_request_t *request)
{
    static kv_answer_t *(*const runs[KV_N_OPS])(kv_store_t *, kv_waiter_t *,
                                                const kv_request_t *) = {
        [KV_PUT] = run_put,
        [KV_GET] = run_get,
        [KV_GATHER] = run_gather,
        [KV_ENTER] = run_enter,
    };
    kv_answer_t *answer = runs[request->op](store, waiter, request);
    waiter->is_late = false;
    return answer;
}

kv_answer_t *kv_store_late(kv_store_t *store, kv_waiter_t *waiter, const kv_request_t *request)
{
    if (request->op == KV_GATHER) {
        be_late_together(store, waiter);
    }
    gate_leave(store, waiter);
    if (request->op == KV_ENTER) {
        const char *holder = lease_find(store, request)->holder->address;
        return answer_bytes(KV_HELD, holder, strlen(holder));
    }
    return request->op == KV_GATHER ? answer_late(store, request) : answer_code(KV_LATE);
}

void kv_store_leave(kv_store_t *store, kv_waiter_t *waiter)
{
    gate_leave(store, waiter);
    if (waiter->lease != NULL) {
        leave_group(store, waiter);
        lease_end(store, waiter->lease);
        waiter->lease = NULL;
    }
}

// --- Life ----------------------------------------------------------------------------------------

kv_store_t *kv_store_new(uint64_t hash_seed)
{
    kv_store_t *store = calloc(1, sizeof *store);
    if (store != NULL) {
        store->seed = hash_seed;
    }
    return store;
}

static void free_map_and_values(map_t *map)
{
    for (size_t i = 0; i < map->n_slots; i++) {
        free(map->slots[i].value);
    }
    map_free(map);
}

void kv_store_free(kv_store_t *store)
{
    if (store == NULL) {
        return;
    }
    forget_last_gather(store);
    free_map_and_values(&store->entries);
    free_map_and_values(&store->leases);
    free_map_and_values(&store->groups);
    free_map_and_values(&store->gates);
    free(store);
}
