// SPDX-License-Identifier: Apache-2.0
//
// kv_store.h - what the rendezvous server knows: keys, names that are held, and who waits for what.
//
// No I/O and no clock: the server hands in decoded requests and sends the answers that come out.
// A request that cannot be answered yet leaves its waiter at a gate; when what it waits for happens
// the waiter turns up in kv_store_next_ready and its request is run again. Time is the server's: a
// waiter that is too late is answered with kv_store_late. One thread; a waiter belongs to its
// connection and must leave before it goes.
#ifndef HVD_BOOT_KV_STORE_H
#define HVD_BOOT_KV_STORE_H

#include "boot/kv_proto.h"

typedef struct kv_store kv_store_t;
typedef struct kv_gate kv_gate_t;
typedef struct kv_lease kv_lease_t;

// A ready message, shared by all who are to get it.
typedef struct kv_answer {
    int n_holders;
    buf_t message;
} kv_answer_t;

void kv_answer_drop(kv_answer_t *answer); // safe on NULL

// The part of a connection that the store knows.
typedef struct kv_waiter {
    struct kv_waiter *next, **back_p; // of the gate's list, or of the ready list
    kv_gate_t *gate;                  // where it waits, or NULL
    kv_lease_t *lease;                // the name it holds, or NULL
    bool is_late;                     // one of its group, who waited for the same, has given up
    char address[64];                 // for sentences
    char who[KV_WHO_LIMIT + 1];       // likewise, as it said when it took the name
} kv_waiter_t;

kv_store_t *kv_store_new(uint64_t hash_seed); // NULL: no memory
void kv_store_free(kv_store_t *store);        // every waiter has left

// The answer, to be dropped by the caller; or NULL: the waiter now waits. The message of an answer
// may have failed for lack of memory.
kv_answer_t *kv_store_run(kv_store_t *store, kv_waiter_t *waiter, const kv_request_t *request);
// The answer to a waiter at a gate whose time is over; it no longer waits. Others who waited there
// may be ready afterwards. NULL: no memory.
kv_answer_t *kv_store_late(kv_store_t *store, kv_waiter_t *waiter, const kv_request_t *request);
// A waiter whose gate has opened, taken off the list; its request is to be run again.
kv_waiter_t *kv_store_next_ready(kv_store_t *store);
// Forgets the waiter: where it waits and the name it holds. Others of its group then wait in vain.
void kv_store_leave(kv_store_t *store, kv_waiter_t *waiter);

#endif
