// SPDX-License-Identifier: Apache-2.0
//
// fuzz_kv_store.c - any order of requests, waits, late answers and departures of a few guests.
//
// The input is a script: who does what. A guest that waits asks nothing more until it is answered,
// as the server sees to. Every answer is a whole message, and nothing is left when all have gone.
#include "boot/kv_store.h"
#include "fuzz.h"

#define N_GUESTS 6
#define MAX_BODY_BYTES 600

typedef struct guest {
    kv_waiter_t waiter; // first: the store hands it back
    kv_request_t request;
    uint8_t *body; // of the request, while it waits
} guest_t;

static void check_answer(kv_answer_t *answer)
{
    size_t bytes;
    MUST(answer != NULL && !answer->message.failed && answer->message.len > KV_HEAD_BYTES);
    MUST(kv_decode_head(answer->message.data, KV_ANSWER_LIMIT, &bytes, NULL) == HVD_OK);
    MUST(bytes == answer->message.len - KV_HEAD_BYTES);
    MUST(answer->message.data[KV_HEAD_BYTES] < KV_N_CODES);
    kv_answer_drop(answer);
}

static void run(kv_store_t *store, guest_t *guest)
{
    kv_answer_t *answer = kv_store_run(store, &guest->waiter, &guest->request);
    if (answer == NULL) {
        MUST(guest->waiter.gate != NULL);
        return;
    }
    check_answer(answer);
    free(guest->body);
    guest->body = NULL;
}

static void wake_ready(kv_store_t *store)
{
    kv_waiter_t *waiter;
    while ((waiter = kv_store_next_ready(store)) != NULL) {
        run(store, (guest_t *)waiter);
    }
}

static void ask(kv_store_t *store, guest_t *guest, input_t *in)
{
    size_t bytes = take_u16(in) % MAX_BODY_BYTES;
    uint8_t *body = take_copy(in, &bytes);
    if (guest->body != NULL || kv_decode_request(body, bytes, &guest->request, NULL) != HVD_OK) {
        free(body);
        return;
    }
    guest->body = body;
    run(store, guest);
}

static void be_late(kv_store_t *store, guest_t *guest)
{
    if (guest->body != NULL && guest->waiter.gate != NULL) {
        check_answer(kv_store_late(store, &guest->waiter, &guest->request));
        MUST(guest->waiter.gate == NULL);
        free(guest->body);
        guest->body = NULL;
    }
}

static void leave(kv_store_t *store, guest_t *guest)
{
    kv_store_leave(store, &guest->waiter);
    free(guest->body);
    guest->body = NULL;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    input_t in = {data, bytes};
    guest_t guests[N_GUESTS] = {0};
    kv_store_t *store = kv_store_new(7);
    MUST(store != NULL);
    for (int i = 0; i < N_GUESTS; i++) {
        snprintf(guests[i].waiter.address, sizeof guests[i].waiter.address, "guest %d", i);
    }
    while (in.left > 0) {
        uint8_t what = take_u8(&in);
        guest_t *guest = &guests[what % N_GUESTS];
        switch (what / N_GUESTS % 8) {
        case 0:
            be_late(store, guest);
            break;
        case 1:
            leave(store, guest);
            break;
        default:
            ask(store, guest, &in);
            break;
        }
        wake_ready(store);
    }
    for (int i = 0; i < N_GUESTS; i++) {
        leave(store, &guests[i]);
        wake_ready(store);
    }
    kv_store_free(store);
    return 0;
}
