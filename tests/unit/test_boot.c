// SPDX-License-Identifier: Apache-2.0
//
// test_boot.c - finding the job, the rendezvous client and server, and who they refuse.
//
// Servers listen on loopback at any free port. Ranks are forked before their server's thread
// exists. Every wait has a deadline, so a failure ends too.
#define _GNU_SOURCE
#include "boot/kv_proto.h"
#include "boot/testing.h"
#include "wire/secure.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h> // after ours: it has a macro named fail

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define N_FUZZ_INPUTS 10000
#define N_STRANGERS 300
#define N_FORKED 8

static const uint8_t secret[32] = "thirty-two bytes of test secret";
static const uint8_t other_secret[32] = "thirty-two bytes of wrong secret";

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(2685821657736338717);
}

// --- The protocol --------------------------------------------------------------------------------

static hvd_status_t decode_frame(const buf_t *frame, kv_request_t *request_p)
{
    size_t bytes;
    if (kv_decode_head(frame->data, KV_REQUEST_LIMIT, &bytes, NULL) != HVD_OK ||
        bytes != frame->len - KV_HEAD_BYTES) {
        return HVD_PROTOCOL;
    }
    return kv_decode_request(frame->data + KV_HEAD_BYTES, bytes, request_p, NULL);
}

static kv_request_t sample_request(kv_op_t op)
{
    kv_request_t request = {.op = op, .wait_ms = 1234, .key = "1/step/", .key_bytes = 7};
    if (op == KV_GATHER) {
        request.n = 8;
    }
    if (op == KV_PUT) {
        request.value = (const uint8_t *)"value";
        request.value_bytes = 5;
    }
    return request;
}

static void test_request_round_trip(void **state)
{
    (void)state;
    for (int op = 0; op < KV_N_OPS; op++) {
        kv_request_t request = sample_request((kv_op_t)op), back;
        buf_t frame = {0};
        kv_encode_request(&frame, &request);
        assert_int_equal(decode_frame(&frame, &back), HVD_OK);
        assert_int_equal(back.op, request.op);
        assert_int_equal(back.wait_ms, request.wait_ms);
        assert_int_equal(back.n, request.n);
        assert_int_equal(back.key_bytes, request.key_bytes);
        assert_memory_equal(back.key, request.key, request.key_bytes);
        assert_int_equal(back.value_bytes, request.value_bytes);
        if (back.value_bytes > 0) {
            assert_memory_equal(back.value, request.value, request.value_bytes);
        }
        buf_free(&frame);
    }
}

static void expect_request_refused(kv_request_t request)
{
    buf_t frame = {0};
    kv_encode_request(&frame, &request);
    assert_int_equal(decode_frame(&frame, &request), HVD_PROTOCOL);
    buf_free(&frame);
}

static void test_request_refusals(void **state)
{
    (void)state;
    static char long_key[KV_KEY_LIMIT + 1];
    static uint8_t long_value[KV_VALUE_LIMIT + 1];
    kv_request_t request;

    memset(long_key, 'k', sizeof long_key);
    request = sample_request(KV_PUT);
    request.op = KV_N_OPS;
    expect_request_refused(request);
    request = sample_request(KV_PUT);
    request.key_bytes = 0;
    expect_request_refused(request);
    request = sample_request(KV_PUT);
    request.key = "a key ";
    request.key_bytes = 6;
    expect_request_refused(request);
    request = sample_request(KV_PUT);
    request.key = long_key;
    request.key_bytes = sizeof long_key;
    expect_request_refused(request);
    request = sample_request(KV_PUT);
    request.value = long_value;
    request.value_bytes = sizeof long_value;
    expect_request_refused(request);
    request = sample_request(KV_GET);
    request.value = long_value;
    request.value_bytes = 1;
    expect_request_refused(request);
    request = sample_request(KV_GET);
    request.n = 1;
    expect_request_refused(request);
    request = sample_request(KV_GATHER);
    request.n = 0;
    expect_request_refused(request);
    request = sample_request(KV_GATHER);
    request.n = KV_GATHER_LIMIT + 1;
    expect_request_refused(request);
    request = sample_request(KV_GATHER);
    request.key_bytes = 1; // "1": which number does "12" then have?
    expect_request_refused(request);

    size_t bytes;
    assert_int_equal(kv_decode_head((const uint8_t *)"\0\0\0\0", 10, &bytes, NULL), HVD_PROTOCOL);
    assert_int_equal(kv_decode_head((const uint8_t *)"\x0b\0\0\0", 10, &bytes, NULL), HVD_PROTOCOL);
    assert_int_equal(kv_decode_head((const uint8_t *)"\0\0\0\x80", 10, &bytes, NULL), HVD_PROTOCOL);
    assert_int_equal(kv_decode_head((const uint8_t *)"\x0a\0\0\0", 10, &bytes, NULL), HVD_OK);
    assert_int_equal(bytes, 10);
}

static void test_key_split(void **state)
{
    (void)state;
    size_t prefix;
    uint32_t number;

    assert_true(kv_key_split("1/a/17", 6, &prefix, &number));
    assert_int_equal(prefix, 4);
    assert_int_equal(number, 17);
    assert_true(kv_key_split("x0", 2, &prefix, &number));
    assert_int_equal(number, 0);
    assert_false(kv_key_split("x07", 3, &prefix, &number));
    assert_false(kv_key_split("x", 1, &prefix, &number));
    assert_false(kv_key_split("x12345678", 9, &prefix, &number));
    assert_true(kv_key_split("99", 2, &prefix, &number));
    assert_int_equal(prefix, 0);
}

static void test_missing_ranges(void **state)
{
    (void)state;
    kv_missing_t missing = {0}, back;
    buf_t bytes = {0};
    char text[512];

    kv_missing_add(&missing, 1);
    kv_missing_add(&missing, 3);
    kv_missing_add(&missing, 4);
    kv_missing_add(&missing, 7);
    kv_missing_add(&missing, 8);
    kv_missing_add(&missing, 9);
    kv_encode_missing(&bytes, &missing);
    reader_t r = reader_of(bytes.data, bytes.len);
    assert_int_equal(kv_decode_missing(&r, &back, NULL), HVD_OK);
    kv_missing_format(&back, text, sizeof text);
    assert_string_equal(text, "1, 3, 4, 7-9");

    r = reader_of(bytes.data, bytes.len - 1);
    assert_int_equal(kv_decode_missing(&r, &back, NULL), HVD_PROTOCOL);
    for (uint32_t i = 20; i < 100; i += 2) {
        kv_missing_add(&missing, i);
    }
    kv_missing_format(&missing, text, sizeof text);
    assert_non_null(strstr(text, "1, 3, 4, 7-9, 20, 22,"));
    assert_non_null(strstr(text, " and 27 more"));
    buf_free(&bytes);
}

// Mutated requests and answers: a decoder accepts only what an encoder makes.
static void test_proto_fuzz(void **state)
{
    (void)state;
    uint64_t seed = 4;
    int n_accepted = 0;

    for (int i = 0; i < N_FUZZ_INPUTS; i++) {
        kv_request_t request = sample_request((kv_op_t)(i % KV_N_OPS)), back;
        buf_t frame = {0}, again = {0};
        kv_encode_request(&frame, &request);
        size_t bytes = frame.len;
        for (uint64_t n = next_random(&seed) % 3; n > 0; n--) {
            frame.data[next_random(&seed) % frame.len] = (uint8_t)next_random(&seed);
        }
        if (next_random(&seed) % 4 == 0) {
            bytes = next_random(&seed) % (frame.len + 1);
        }
        uint8_t *copy = malloc(bytes > 0 ? bytes : 1); // exact, for the address sanitizer
        memcpy(copy, frame.data, bytes);
        if (bytes > KV_HEAD_BYTES &&
            kv_decode_request(copy + KV_HEAD_BYTES, bytes - KV_HEAD_BYTES, &back, NULL) == HVD_OK) {
            kv_encode_request(&again, &back);
            assert_int_equal(again.len, bytes);
            assert_memory_equal(again.data + KV_HEAD_BYTES, copy + KV_HEAD_BYTES,
                                bytes - KV_HEAD_BYTES);
            n_accepted++;
        }
        const uint8_t *values[8];
        size_t lengths[8];
        kv_missing_t missing;
        reader_t r = reader_of(copy, bytes);
        kv_decode_values(&r, (int)(next_random(&seed) % 9), values, lengths, NULL);
        r = reader_of(copy, bytes);
        kv_decode_missing(&r, &missing, NULL);
        free(copy);
        buf_free(&frame);
        buf_free(&again);
    }
    assert_true(n_accepted > N_FUZZ_INPUTS / 10 && n_accepted < N_FUZZ_INPUTS);
}

// --- Server and client ---------------------------------------------------------------------------

static hvd_rendezvous_t *start_server(void)
{
    hvd_rendezvous_t *server = NULL;
    char text[HVD_TEXT_BYTES];
    assert_int_equal(hvd_rendezvous_start(NULL, 0, secret, &server, text, sizeof text), HVD_OK);
    assert_string_equal(text, "");
    assert_in_range(hvd_rendezvous_port(server), 1, 65535);
    return server;
}

static kv_client_t *connect_client(const hvd_rendezvous_t *server)
{
    kv_client_t *client = NULL;
    err_t err;
    hvd_status_t status = kv_connect("127.0.0.1", hvd_rendezvous_port(server), secret,
                                     deadline_in_ms(10000), &client, &err);
    if (status != HVD_OK) {
        print_message("%s\n", err.text);
    }
    assert_int_equal(status, HVD_OK);
    return client;
}

static void test_put_get_gather(void **state)
{
    (void)state;
    static uint8_t big[KV_VALUE_LIMIT];
    hvd_rendezvous_t *server = start_server();
    kv_client_t *a = connect_client(server), *b = connect_client(server);
    uint64_t deadline_ns = deadline_in_ms(10000);
    const uint8_t *values[3];
    size_t lengths[3], bytes;
    buf_t storage = {0};
    err_t err;

    memset(big, 0x5a, sizeof big);
    assert_int_equal(kv_put(a, "x/0", "zero", 4, deadline_ns, &err), HVD_OK);
    assert_int_equal(kv_put(b, "x/1", NULL, 0, deadline_ns, &err), HVD_OK);
    assert_int_equal(kv_put(a, "x/2", big, sizeof big, deadline_ns, &err), HVD_OK);
    assert_int_equal(kv_get(b, "x/0", deadline_ns, &storage, &bytes, &err), HVD_OK);
    assert_int_equal(bytes, 4);
    assert_memory_equal(storage.data, "zero", 4);
    for (int again = 0; again < 2; again++) {
        assert_int_equal(kv_gather(b, "x/", 3, deadline_ns, values, lengths, &storage, &err),
                         HVD_OK);
        assert_int_equal(lengths[0], 4);
        assert_int_equal(lengths[1], 0);
        assert_int_equal(lengths[2], sizeof big);
        assert_memory_equal(values[0], again ? "more" : "zero", 4);
        assert_memory_equal(values[2], big, sizeof big);
        // A value put again replaces the first one, also in a gather that was answered before.
        assert_int_equal(kv_put(a, "x/0", "more", 4, deadline_ns, &err), HVD_OK);
    }
    // What the client refuses by itself does not harm the connection.
    assert_int_equal(kv_put(a, "a key", "v", 1, deadline_ns, &err), HVD_INVALID_ARGUMENT);
    assert_int_equal(kv_put(a, "k", big, sizeof big + 1, deadline_ns, &err), HVD_INVALID_ARGUMENT);
    assert_int_equal(kv_gather(a, "x/1", 3, deadline_ns, values, lengths, &storage, &err),
                     HVD_INVALID_ARGUMENT);
    assert_int_equal(kv_gather(a, "x/", 0, deadline_ns, values, lengths, &storage, &err),
                     HVD_INVALID_ARGUMENT);
    assert_int_equal(kv_put(a, "k", "v", 1, deadline_ns, &err), HVD_OK);
    buf_free(&storage);
    kv_disconnect(a);
    kv_disconnect(b);
    assert_int_equal(kv_server_n_refused(server), 0);
    hvd_rendezvous_stop(server);
}

typedef struct getter {
    kv_client_t *client;
    hvd_status_t status;
    uint64_t waited_ns;
    char value[16];
} getter_t;

static void *get_late_key(void *arg)
{
    getter_t *getter = arg;
    buf_t storage = {0};
    size_t bytes = 0;
    uint64_t started_ns = clock_ns();
    getter->status = kv_get(getter->client, "late", deadline_in_ms(10000), &storage, &bytes, NULL);
    getter->waited_ns = clock_ns() - started_ns;
    if (getter->status == HVD_OK) {
        memcpy(getter->value, storage.data, MIN(bytes, sizeof getter->value));
    }
    buf_free(&storage);
    return NULL;
}

static void test_get_waits_for_put(void **state)
{
    (void)state;
    hvd_rendezvous_t *server = start_server();
    kv_client_t *putter = connect_client(server);
    getter_t getters[3];
    pthread_t threads[3];

    for (int i = 0; i < 3; i++) {
        getters[i] = (getter_t){.client = connect_client(server)};
        pthread_create(&threads[i], NULL, get_late_key, &getters[i]);
    }
    poll(NULL, 0, 200);
    assert_int_equal(kv_put(putter, "late", "here", 4, deadline_in_ms(5000), NULL), HVD_OK);
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(getters[i].status, HVD_OK);
        assert_memory_equal(getters[i].value, "here", 4);
        assert_in_range(getters[i].waited_ns, 20 * NS_PER_MS, 5 * NS_PER_S);
        kv_disconnect(getters[i].client);
    }
    kv_disconnect(putter);
    hvd_rendezvous_stop(server);
}

static void test_late_answers(void **state)
{
    (void)state;
    hvd_rendezvous_t *server = start_server();
    kv_client_t *client = connect_client(server);
    const uint8_t *values[8];
    size_t lengths[8], bytes;
    buf_t storage = {0};
    char key[16];
    err_t err;

    assert_int_equal(kv_get(client, "never", deadline_in_ms(600), &storage, &bytes, &err),
                     HVD_TIMEOUT);
    assert_non_null(strstr(err.text, "never"));
    for (int rank = 0; rank < 8; rank++) {
        if (rank != 1 && rank != 5) {
            snprintf(key, sizeof key, "g/%d", rank);
            assert_int_equal(kv_put(client, key, "v", 1, deadline_in_ms(5000), &err), HVD_OK);
        }
    }
    uint64_t started_ns = clock_ns();
    assert_int_equal(
        kv_gather(client, "g/", 8, deadline_in_ms(600), values, lengths, &storage, &err),
        HVD_TIMEOUT);
    assert_true(clock_ns() - started_ns < 2 * NS_PER_S);
    assert_non_null(strstr(err.text, "ranks 1, 5 of 8"));
    assert_non_null(strstr(err.text, "HOROVOD_START_TIMEOUT"));
    // The connection is still good, and what was missing may come.
    assert_int_equal(kv_put(client, "g/1", "v", 1, deadline_in_ms(5000), &err), HVD_OK);
    assert_int_equal(
        kv_gather(client, "g/", 8, deadline_in_ms(600), values, lengths, &storage, &err),
        HVD_TIMEOUT);
    assert_non_null(strstr(err.text, "rank 5 of 8"));
    assert_int_equal(kv_put(client, "g/5", "v", 1, deadline_in_ms(5000), &err), HVD_OK);
    assert_int_equal(
        kv_gather(client, "g/", 8, deadline_in_ms(5000), values, lengths, &storage, &err), HVD_OK);
    buf_free(&storage);
    kv_disconnect(client);
    hvd_rendezvous_stop(server);
}

typedef struct gatherer {
    kv_client_t *client;
    hvd_status_t status;
} gatherer_t;

static void *gather_two(void *arg)
{
    gatherer_t *gatherer = arg;
    const uint8_t *values[2];
    size_t lengths[2];
    buf_t storage = {0};
    gatherer->status = kv_gather(gatherer->client, "d/", 2, deadline_in_ms(10000), values, lengths,
                                 &storage, NULL);
    buf_free(&storage);
    return NULL;
}

// Ranks that were told different sizes find out, instead of waiting for each other.
static void test_gather_of_different_sizes(void **state)
{
    (void)state;
    hvd_rendezvous_t *server = start_server();
    gatherer_t first = {.client = connect_client(server)};
    kv_client_t *second = connect_client(server);
    const uint8_t *values[3];
    size_t lengths[3];
    buf_t storage = {0};
    pthread_t thread;
    err_t err;

    pthread_create(&thread, NULL, gather_two, &first);
    poll(NULL, 0, 300);
    assert_int_equal(
        kv_gather(second, "d/", 3, deadline_in_ms(5000), values, lengths, &storage, &err),
        HVD_INVALID_ARGUMENT);
    assert_non_null(strstr(err.text, "HOROVOD_SIZE"));
    // A number beyond the first one's size does not count for it.
    assert_int_equal(kv_put(second, "d/2", "v", 1, deadline_in_ms(5000), NULL), HVD_OK);
    assert_int_equal(kv_put(second, "d/0", "v", 1, deadline_in_ms(5000), NULL), HVD_OK);
    assert_int_equal(kv_put(second, "d/1", "v", 1, deadline_in_ms(5000), NULL), HVD_OK);
    pthread_join(thread, NULL);
    assert_int_equal(first.status, HVD_OK);
    buf_free(&storage);
    kv_disconnect(first.client);
    kv_disconnect(second);
    hvd_rendezvous_stop(server);
}

static void test_enter(void **state)
{
    (void)state;
    hvd_rendezvous_t *server = start_server();
    kv_client_t *a = connect_client(server), *b = connect_client(server), *c;
    uint64_t turn;
    err_t err;

    assert_int_equal(kv_enter(a, "rank/3", "h", deadline_in_ms(5000), &turn, &err), HVD_OK);
    assert_int_equal(turn, 1);
    assert_int_equal(kv_enter(b, "rank/3", "h", deadline_in_ms(600), &turn, &err),
                     HVD_INVALID_ARGUMENT);
    assert_non_null(strstr(err.text, "127.0.0.1:"));
    assert_non_null(strstr(err.text, "HOROVOD_RANK"));
    assert_int_equal(kv_enter(b, "rank/4", "h", deadline_in_ms(5000), &turn, &err), HVD_OK);
    assert_int_equal(turn, 1);
    kv_disconnect(a);
    c = connect_client(server);
    assert_int_equal(kv_enter(c, "rank/3", "h", deadline_in_ms(5000), &turn, &err), HVD_OK);
    assert_int_equal(turn, 2);
    kv_disconnect(b);
    kv_disconnect(c);
    hvd_rendezvous_stop(server);
}

#define N_CREW 12

typedef struct crew_member {
    kv_client_t *client;
    hvd_status_t status;
    err_t err;
} crew_member_t;

static void crew_enter(const hvd_rendezvous_t *server, crew_member_t *member, int number,
                       uint64_t expected_turn)
{
    uint64_t turn;
    char name[16], who[32];
    snprintf(name, sizeof name, "rank/%d", number);
    snprintf(who, sizeof who, "host h, pid 7%d", number);
    member->client = connect_client(server);
    assert_int_equal(kv_enter(member->client, name, who, deadline_in_ms(5000), &turn, &member->err),
                     HVD_OK);
    assert_int_equal(turn, expected_turn);
}

static void crew_gather(crew_member_t *member, const char *prefix, int n, int ms)
{
    const uint8_t *values[N_CREW + 1];
    size_t lengths[N_CREW + 1];
    buf_t storage = {0};
    member->status = kv_gather(member->client, prefix, n, deadline_in_ms(ms), values, lengths,
                               &storage, &member->err);
    buf_free(&storage);
}

static void *crew_gather_first(void *arg)
{
    crew_gather(arg, "1/a/", 3, 10000);
    return NULL;
}

static void check_left(const crew_member_t *member, const char *who)
{
    assert_int_equal(member->status, HVD_PEER_LOST);
    assert_non_null(strstr(member->err.text, who));
}

// Whoever waits for a rank that has left is told at once, and so is who asks later; of the first
// that left. What was complete stays so, and the next turn begins anew.
static void test_one_leaves(void **state)
{
    (void)state;
    hvd_rendezvous_t *server = start_server();
    crew_member_t members[3];
    uint64_t started_ns = clock_ns();
    pthread_t thread;

    for (int i = 0; i < 3; i++) {
        char key[16];
        crew_enter(server, &members[i], i, 1);
        snprintf(key, sizeof key, "0/a/%d", i);
        assert_int_equal(kv_put(members[i].client, key, "v", 1, deadline_in_ms(5000), NULL),
                         HVD_OK);
    }
    pthread_create(&thread, NULL, crew_gather_first, &members[0]);
    poll(NULL, 0, 300);
    kv_disconnect(members[1].client);
    pthread_join(thread, NULL);
    check_left(&members[0], "rank 1 (host h, pid 71) left");
    kv_disconnect(members[0].client);
    crew_gather(&members[2], "0/a/", 3, 10000);
    assert_int_equal(members[2].status, HVD_OK);
    crew_enter(server, &members[0], 0, 2); // rank 0 begins anew before rank 2 has noticed
    crew_gather(&members[2], "1/a/", 3, 10000);
    check_left(&members[2], "rank 1 (host h, pid 71) left");

    kv_disconnect(members[2].client);
    pthread_create(&thread, NULL, crew_gather_first, &members[0]);
    crew_enter(server, &members[1], 1, 2);
    crew_enter(server, &members[2], 2, 2);
    for (int i = 0; i < 3; i++) {
        char key[16];
        snprintf(key, sizeof key, "1/a/%d", i);
        assert_int_equal(kv_put(members[1].client, key, "v", 1, deadline_in_ms(5000), NULL),
                         HVD_OK);
    }
    pthread_join(thread, NULL);
    assert_int_equal(members[0].status, HVD_OK);
    assert_true(clock_ns() - started_ns < 9 * NS_PER_S); // nobody waited for a deadline
    for (int i = 0; i < 3; i++) {
        kv_disconnect(members[i].client);
    }
    assert_int_equal(kv_server_n_refused(server), 0);
    hvd_rendezvous_stop(server);
}

// The first who gives up waiting for a rank gives up for all: each is told which rank did not come.
static void test_late_together(void **state)
{
    (void)state;
    hvd_rendezvous_t *server = start_server();
    crew_member_t patient, hasty;
    uint64_t started_ns = clock_ns();
    pthread_t thread;

    crew_enter(server, &patient, 0, 1);
    crew_enter(server, &hasty, 1, 1);
    assert_int_equal(kv_put(hasty.client, "1/a/0", "v", 1, deadline_in_ms(5000), NULL), HVD_OK);
    assert_int_equal(kv_put(hasty.client, "1/a/1", "v", 1, deadline_in_ms(5000), NULL), HVD_OK);
    pthread_create(&thread, NULL, crew_gather_first, &patient);
    crew_gather(&hasty, "1/a/", 3, 1000);
    kv_disconnect(hasty.client);
    pthread_join(thread, NULL);
    kv_disconnect(patient.client);
    hvd_rendezvous_stop(server);
    assert_int_equal(hasty.status, HVD_TIMEOUT);
    assert_int_equal(patient.status, HVD_TIMEOUT);
    assert_non_null(strstr(patient.err.text, "s for rank 2 of 3 at step"));
    assert_true(clock_ns() - started_ns < 9 * NS_PER_S);
}

static void *crew_gather_in_vain(void *arg)
{
    crew_gather(arg, "1/a/", N_CREW + 1, 500);
    return NULL;
}

// All give up in the same moment, as ranks that were started together do.
static void test_late_at_once(void **state)
{
    (void)state;
    hvd_rendezvous_t *server = start_server();
    crew_member_t members[N_CREW];
    pthread_t threads[N_CREW];

    for (int i = 0; i < N_CREW; i++) {
        crew_enter(server, &members[i], i, 1);
    }
    for (int i = 0; i < N_CREW; i++) {
        pthread_create(&threads[i], NULL, crew_gather_in_vain, &members[i]);
    }
    for (int i = 0; i < N_CREW; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(members[i].status, HVD_TIMEOUT);
    }
    for (int i = 0; i < N_CREW; i++) { // whoever still waits would hear of the first that leaves
        kv_disconnect(members[i].client);
    }
    assert_int_equal(kv_server_n_refused(server), 0);
    hvd_rendezvous_stop(server);
}

// --- Those who do not belong ---------------------------------------------------------------------

static void test_wrong_secret(void **state)
{
    (void)state;
    hvd_rendezvous_t *server = start_server();
    kv_client_t *client = NULL;
    uint64_t started_ns = clock_ns();
    err_t err;

    hvd_status_t status = kv_connect("127.0.0.1", hvd_rendezvous_port(server), other_secret,
                                     deadline_in_ms(30000), &client, &err);
    assert_int_equal(status, HVD_UNAUTHENTICATED);
    assert_null(client);
    assert_non_null(strstr(err.text, "has a different secret than this rank: 127.0.0.1:"));
    assert_non_null(strstr(err.text, "HOROVOD_SECRET_FILE"));
    assert_true(clock_ns() - started_ns < 5 * NS_PER_S); // not the whole deadline
    assert_true(kv_server_n_refused(server) > 0);
    hvd_rendezvous_stop(server);
}

static int connect_raw(const hvd_rendezvous_t *server)
{
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)hvd_rendezvous_port(server)),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
    return fd;
}

// True if the server ends the connection within the time.
static bool is_cut(int fd, int within_ms)
{
    struct pollfd polled = {.fd = fd, .events = POLLIN};
    uint64_t deadline_ns = deadline_in_ms(within_ms);
    char bytes[256];
    while (clock_ns() < deadline_ns) {
        if (poll(&polled, 1, 50) > 0 && recv(fd, bytes, sizeof bytes, MSG_DONTWAIT) <= 0) {
            return true;
        }
    }
    return false;
}

static void make_hello(uint8_t bytes[HELLO_BYTES], hello_role_t role, const uint8_t *of_secret)
{
    hello_t hello = {.role = role, .encrypted = 1, .nonce = {1, 2, 3}};
    hello_job(of_secret, hello.job);
    hello_encode(&hello, bytes);
}

// What is sent first decides; each is cut at once, except silence, which has two seconds.
static void test_strangers_are_cut(void **state)
{
    (void)state;
    hvd_rendezvous_t *server = start_server();
    uint8_t hello[HELLO_BYTES + 32];
    uint64_t n_refused = 0;

    for (int kind = 0; kind < 4; kind++) {
        size_t bytes = HELLO_BYTES;
        memset(hello, 'G', sizeof hello);
        switch (kind) {
        case 1:
            make_hello(hello, HELLO_KV, other_secret);
            break;
        case 2:
            make_hello(hello, HELLO_LINK, secret);
            break;
        case 3:
            make_hello(hello, HELLO_KV, secret); // and then not TLS
            bytes = sizeof hello;
            break;
        default:
            break;
        }
        int fd = connect_raw(server);
        assert_int_equal(send(fd, hello, bytes, MSG_NOSIGNAL), bytes);
        assert_true(is_cut(fd, 1500));
        close(fd);
        n_refused++;
        assert_int_equal(kv_server_n_refused(server), n_refused);
    }
    int silent = connect_raw(server), half = connect_raw(server);
    assert_int_equal(send(half, hello, 20, MSG_NOSIGNAL), 20);
    assert_true(is_cut(silent, 6000));
    assert_true(is_cut(half, 6000));
    close(silent);
    close(half);
    assert_int_equal(kv_server_n_refused(server), n_refused + 2);
    hvd_rendezvous_stop(server);
}

static void test_idle_strangers_do_not_keep_others_out(void **state)
{
    (void)state;
    hvd_rendezvous_t *server = start_server();
    int strangers[N_STRANGERS];
    uint64_t started_ns;

    for (int i = 0; i < N_STRANGERS; i++) {
        strangers[i] = connect_raw(server);
    }
    started_ns = clock_ns();
    kv_client_t *client = connect_client(server);
    assert_int_equal(kv_put(client, "k", "v", 1, deadline_in_ms(3000), NULL), HVD_OK);
    assert_true(clock_ns() - started_ns < 3 * NS_PER_S);
    // The oldest had to make room, and only so many as was needed or whose time was over.
    assert_true(is_cut(strangers[0], 1000));
    assert_in_range(kv_server_n_refused(server), N_STRANGERS - 256 + 1, N_STRANGERS);
    for (int i = 0; i < N_STRANGERS; i++) {
        close(strangers[i]);
    }
    kv_disconnect(client);
    hvd_rendezvous_stop(server);
}

// A connection that has proved the secret, without the client around it.
typedef struct raw_guest {
    int fd;
    secure_keys_t *keys;
    secure_t *secure;
} raw_guest_t;

static raw_guest_t enter_raw(const hvd_rendezvous_t *server)
{
    raw_guest_t guest = {.fd = connect_raw(server)};
    uint8_t hello[HELLO_BYTES];
    hvd_status_t status;
    make_hello(hello, HELLO_KV, secret);
    assert_int_equal(send(guest.fd, hello, sizeof hello, MSG_NOSIGNAL), sizeof hello);
    fcntl(guest.fd, F_SETFL, O_NONBLOCK);
    assert_int_equal(secure_keys_new(secret, &guest.keys, NULL), HVD_OK);
    assert_int_equal(secure_new(guest.keys, guest.fd, false, hello, &guest.secure, NULL), HVD_OK);
    for (int i = 0; (status = secure_handshake(guest.secure, NULL)) == HVD_IN_PROGRESS && i < 100;
         i++) {
        struct pollfd polled = {.fd = guest.fd, .events = POLLIN};
        poll(&polled, 1, 100);
    }
    assert_int_equal(status, HVD_OK);
    return guest;
}

static void leave_raw(raw_guest_t *guest)
{
    secure_free(guest->secure);
    secure_keys_free(guest->keys);
    close(guest->fd);
}

// Frames that no client makes, from one that has the secret: cut, and nobody else notices.
static void test_bad_frames_are_cut(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        size_t n;
    } frames[] = {
        {"\xff\xff\xff\xff", 4},                         // 4 GiB
        {"\0\0\0\0", 4},                                 // nothing
        {"\x03\0\0\0\x01\x02\x03", 7},                   // too short
        {"\x0c\0\0\0\x09\0\0\0\0\0\0\0\0\x01\0k", 16},   // no such op
        {"\x0c\0\0\0\x01\0\0\0\0\0\0\0\0\xff\xffk", 16}, // key past the end
        {"\x0c\0\0\0\x01\0\0\0\0\0\0\0\0\x01\0\n", 16},  // not a key
        {"\x0c\0\0\0\x01\xff\xff\0\0\0\0\0\0\x01\0k"
         "\x0c\0\0\0\x01",
         21}, // a second before the answer
    };
    hvd_rendezvous_t *server = start_server();
    kv_client_t *client = connect_client(server);

    for (size_t i = 0; i < N_ELEMENTS(frames); i++) {
        raw_guest_t guest = enter_raw(server);
        assert_int_equal(secure_send(guest.secure, frames[i].bytes, frames[i].n, NULL),
                         frames[i].n);
        assert_true(is_cut(guest.fd, 1500));
        leave_raw(&guest);
        assert_int_equal(kv_server_n_refused(server), i + 1);
        assert_int_equal(kv_put(client, "other", "v", 1, deadline_in_ms(3000), NULL), HVD_OK);
    }
    // A frame cut short by a guest that leaves is no offence.
    raw_guest_t guest = enter_raw(server);
    assert_int_equal(secure_send(guest.secure, "\x0c\0\0\0\x01", 5, NULL), 5);
    leave_raw(&guest);
    assert_int_equal(kv_put(client, "other", "v", 1, deadline_in_ms(3000), NULL), HVD_OK);
    kv_disconnect(client);
    hvd_rendezvous_stop(server);
}

// --- Starting, stopping, finding the server ------------------------------------------------------

static void test_server_stops_promptly(void **state)
{
    (void)state;
    hvd_rendezvous_t *server = start_server();
    getter_t getter = {.client = connect_client(server)};
    int stranger = connect_raw(server);
    pthread_t thread;

    pthread_create(&thread, NULL, get_late_key, &getter);
    poll(NULL, 0, 50);
    uint64_t started_ns = clock_ns();
    hvd_rendezvous_stop(server);
    assert_true(clock_ns() - started_ns < 1 * NS_PER_S);
    pthread_join(thread, NULL);
    assert_int_equal(getter.status, HVD_PEER_LOST);
    assert_int_equal(kv_put(getter.client, "k", "v", 1, deadline_in_ms(100), NULL), HVD_PEER_LOST);
    assert_true(is_cut(stranger, 1000));
    close(stranger);
    kv_disconnect(getter.client);
    hvd_rendezvous_stop(NULL);
}

static void test_server_start_errors(void **state)
{
    (void)state;
    hvd_rendezvous_t *server = start_server(), *second = NULL;
    char text[HVD_TEXT_BYTES] = "";

    assert_int_equal(
        hvd_rendezvous_start(NULL, hvd_rendezvous_port(server), secret, &second, text, sizeof text),
        HVD_SYSTEM);
    assert_non_null(strstr(text, "127.0.0.1"));
    assert_null(second);
    assert_int_equal(hvd_rendezvous_start(NULL, 65536, secret, &second, text, sizeof text),
                     HVD_INVALID_ARGUMENT);
    assert_int_equal(hvd_rendezvous_start("999.1.1.1", 0, secret, &second, text, sizeof text),
                     HVD_INVALID_ARGUMENT);
    assert_non_null(strstr(text, "999.1.1.1"));
    assert_int_equal(hvd_rendezvous_start("*", 0, secret, &second, NULL, 0), HVD_OK);
    kv_disconnect(connect_client(second)); // takes IPv4 too
    hvd_rendezvous_stop(second);
    hvd_rendezvous_stop(server);
}

typedef struct late_server {
    int port;
    hvd_rendezvous_t *server;
} late_server_t;

static void *start_late(void *arg)
{
    late_server_t *late = arg;
    poll(NULL, 0, 250);
    hvd_rendezvous_start(NULL, late->port, secret, &late->server, NULL, 0);
    return NULL;
}

static void test_client_waits_for_server(void **state)
{
    (void)state;
    hvd_rendezvous_t *server = start_server();
    late_server_t late = {.port = hvd_rendezvous_port(server)};
    kv_client_t *client = NULL;
    pthread_t thread;
    err_t err;

    hvd_rendezvous_stop(server);
    assert_int_equal(kv_connect("127.0.0.1", late.port, secret, deadline_in_ms(100), &client, &err),
                     HVD_PEER_LOST);
    assert_non_null(strstr(err.text, "HOROVOD_RENDEZVOUS_ADDR"));
    pthread_create(&thread, NULL, start_late, &late);
    assert_int_equal(
        kv_connect("127.0.0.1", late.port, secret, deadline_in_ms(10000), &client, &err), HVD_OK);
    pthread_join(thread, NULL);
    kv_disconnect(client);
    hvd_rendezvous_stop(late.server);
}

// The first address that proves the secret is kept: not one where nobody is, nor another job's.
static void test_several_addresses(void **state)
{
    (void)state;
    hvd_rendezvous_t *server = start_server(), *foreign = NULL;
    int port = hvd_rendezvous_port(server);
    kv_client_t *client = NULL;
    err_t err;

    assert_int_equal(hvd_rendezvous_start("127.0.0.3", port, other_secret, &foreign, NULL, 0),
                     HVD_OK);
    hvd_status_t status = kv_connect("127.0.0.2,127.0.0.3, ::1,,127.0.0.1", port, secret,
                                     deadline_in_ms(10000), &client, &err);
    assert_int_equal(status, HVD_OK);
    assert_int_equal(kv_put(client, "k", "v", 1, deadline_in_ms(3000), &err), HVD_OK);
    kv_disconnect(client);
    assert_int_equal(kv_connect(" ,", port, secret, deadline_in_ms(20), &client, &err),
                     HVD_PEER_LOST);
    // Of two reasons to fail, the refused secret is told.
    status = kv_connect("127.0.0.3,127.0.0.2", port, secret, deadline_in_ms(300), &client, &err);
    assert_int_equal(status, HVD_UNAUTHENTICATED);
    hvd_rendezvous_stop(foreign);
    hvd_rendezvous_stop(server);
}

// --- The environment -----------------------------------------------------------------------------

static char folder[] = "/tmp/test_boot.XXXXXX";
static char secret_path[64];

static void hex_secret(char text[65])
{
    for (size_t i = 0; i < sizeof secret; i++) {
        snprintf(text + 2 * i, 3, "%02x", secret[i]);
    }
}

static void write_secret_file(const char *content, mode_t mode)
{
    unlink(secret_path);
    int fd = open(secret_path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, content, strlen(content)), strlen(content));
    assert_int_equal(fchmod(fd, mode), 0);
    close(fd);
}

static int make_folder(void **state)
{
    (void)state;
    char text[65];
    if (mkdtemp(folder) == NULL) {
        return -1;
    }
    snprintf(secret_path, sizeof secret_path, "%s/secret", folder);
    hex_secret(text);
    write_secret_file(text, 0600);
    return 0;
}

static int remove_folder(void **state)
{
    (void)state;
    unlink(secret_path);
    return rmdir(folder);
}

// boot_open with this environment; the job is closed again.
static hvd_status_t open_with(const char *const *env, boot_job_t *job, err_t *err)
{
    config_t config;
    boot_t *boot = NULL;
    assert_int_equal(config_load(&config, env, NULL, err), HVD_OK);
    hvd_status_t status = boot_open(&config, NULL, job, &boot, err);
    boot_close(boot);
    config_free(&config);
    return status;
}

static void test_world_of_one(void **state)
{
    (void)state;
    const char *const nothing[] = {NULL};
    const char *const size_one[] = {"HOROVOD_RANK=0", "HOROVOD_SIZE=1", NULL};
    const struct {
        const char *const *env;
        const char *how;
    } cases[] = {{nothing, "self"}, {size_one, "env"}};

    for (size_t i = 0; i < N_ELEMENTS(cases); i++) {
        boot_job_t job;
        err_t err;
        assert_int_equal(open_with(cases[i].env, &job, &err), HVD_OK);
        assert_string_equal(job.how, cases[i].how);
        assert_int_equal(job.rank, 0);
        assert_int_equal(job.size, 1);
        assert_int_equal(job.local_rank, 0);
        assert_int_equal(job.local_size, 1);
        assert_int_equal(job.cross_rank, 0);
        assert_int_equal(job.cross_size, 1);
        assert_string_not_equal(job.host, "");
    }
}

static void test_exchange_alone(void **state)
{
    (void)state;
    const char *const nothing[] = {NULL};
    const uint8_t *values[1];
    size_t lengths[1];
    buf_t storage = {0};
    config_t config;
    boot_job_t job;
    boot_t *boot;

    assert_int_equal(config_load(&config, nothing, NULL, NULL), HVD_OK);
    assert_int_equal(boot_open(&config, NULL, &job, &boot, NULL), HVD_OK);
    assert_int_equal(boot_exchange(boot, "a", "mine", 4, values, lengths, &storage, NULL), HVD_OK);
    assert_int_equal(lengths[0], 4);
    assert_memory_equal(values[0], "mine", 4);
    assert_int_equal(boot_exchange(boot, "b", NULL, 0, values, lengths, &storage, NULL), HVD_OK);
    assert_int_equal(lengths[0], 0);
    buf_free(&storage);
    boot_close(boot);
    boot_close(NULL);
    config_free(&config);
}

// Each mistake has its sentence.
static void test_environment_errors(void **state)
{
    (void)state;
    static const struct {
        const char *env[8];
        const char *says;
    } cases[] = {
        {{"HOROVOD_RANK=0"}, "HOROVOD_SIZE is not"},
        {{"HOROVOD_SIZE=2"}, "HOROVOD_RANK is not"},
        {{"HOROVOD_RANK=2", "HOROVOD_SIZE=2"}, "HOROVOD_RANK=2 must be less than HOROVOD_SIZE=2"},
        {{"HOROVOD_RANK=1", "HOROVOD_SIZE=1"}, "HOROVOD_RANK=1 must be less than HOROVOD_SIZE=1"},
        {{"HOROVOD_RANK=0", "HOROVOD_SIZE=2", "HOROVOD_LOCAL_RANK=1"}, "HOROVOD_LOCAL_SIZE is not"},
        {{"HOROVOD_RANK=0", "HOROVOD_SIZE=4", "HOROVOD_LOCAL_RANK=3", "HOROVOD_LOCAL_SIZE=3"},
         "HOROVOD_LOCAL_RANK=3 must be less"},
        {{"HOROVOD_RANK=0", "HOROVOD_SIZE=4", "HOROVOD_LOCAL_RANK=3", "HOROVOD_LOCAL_SIZE=5"},
         "HOROVOD_LOCAL_SIZE=5 must not be more"},
        {{"HOROVOD_RANK=0", "HOROVOD_SIZE=4", "HOROVOD_CROSS_RANK=2", "HOROVOD_CROSS_SIZE=2"},
         "HOROVOD_CROSS_RANK=2 must be less"},
        {{"HOROVOD_RANK=0", "HOROVOD_SIZE=2"}, "HOROVOD_RENDEZVOUS_ADDR"},
        {{"HOROVOD_RANK=0", "HOROVOD_SIZE=2", "HOROVOD_GLOO_RENDEZVOUS_ADDR=10.0.0.1"},
         "the launcher is one for another Horovod"},
        {{"HOROVOD_RANK=0", "HOROVOD_SIZE=2", "HOROVOD_RENDEZVOUS_ADDR=127.0.0.1"},
         "HOROVOD_RENDEZVOUS_PORT"},
        {{"HOROVOD_RANK=0", "HOROVOD_SIZE=2", "HOROVOD_RENDEZVOUS_ADDR=127.0.0.1",
          "HOROVOD_RENDEZVOUS_PORT=1"},
         "HOROVOD_SECRET_FILE"},
        {{"HOROVOD_RANK=0", "HOROVOD_SIZE=2", "HOROVOD_RENDEZVOUS_ADDR=127.0.0.1",
          "HOROVOD_RENDEZVOUS_PORT=1", "HOROVOD_SECRET_FILE=/nowhere/at/all"},
         "/nowhere/at/all"},
        {{"HOROVOD_RANK=0", "HOROVOD_SIZE=2", "HOROVOD_RENDEZVOUS_ADDR=127.0.0.1",
          "HOROVOD_RENDEZVOUS_PORT=1", "HOROVOD_SECRET_FILE=/dev/null"},
         "regular file"},
        {{"HOROVOD_RANK=0", "HOROVOD_SIZE=2", "HOROVOD_RENDEZVOUS_ADDR=127.0.0.1",
          "HOROVOD_RENDEZVOUS_PORT=1", "HOROVOD_SECRET_FD=1000"},
         "HOROVOD_SECRET_FD"},
    };
    for (size_t i = 0; i < N_ELEMENTS(cases); i++) {
        boot_job_t job;
        err_t err;
        assert_true(open_with(cases[i].env, &job, &err) < 0);
        if (strstr(err.text, cases[i].says) == NULL) {
            print_message("case %zu: %s\n", i, err.text);
        }
        assert_non_null(strstr(err.text, cases[i].says));
    }
}

static hvd_status_t open_with_secret(const hvd_rendezvous_t *server, const char *variable,
                                     err_t *err)
{
    char port[48];
    const char *env[] = {"HOROVOD_RANK=0",
                         "HOROVOD_SIZE=2",
                         "HOROVOD_RENDEZVOUS_ADDR=127.0.0.1",
                         port,
                         "HOROVOD_START_TIMEOUT=1",
                         variable,
                         NULL};
    boot_job_t job;
    snprintf(port, sizeof port, "HOROVOD_RENDEZVOUS_PORT=%d", hvd_rendezvous_port(server));
    return open_with(env, &job, err);
}

static void test_secret_files(void **state)
{
    (void)state;
    hvd_rendezvous_t *server = start_server();
    char variable[96], good[65], changed[80];
    static const mode_t bad_modes[] = {0640, 0604, 0660, 0644, 0620, 0601};
    err_t err;

    snprintf(variable, sizeof variable, "HOROVOD_SECRET_FILE=%s", secret_path);
    hex_secret(good);
    for (size_t i = 0; i < N_ELEMENTS(bad_modes); i++) {
        write_secret_file(good, bad_modes[i]);
        assert_int_equal(open_with_secret(server, variable, &err), HVD_INVALID_ARGUMENT);
        assert_non_null(strstr(err.text, "chmod 600"));
        assert_non_null(strstr(err.text, secret_path));
    }
    for (int kind = 0; kind < 5; kind++) {
        snprintf(changed, sizeof changed, "%s%s", good, kind == 0 ? "0" : kind == 1 ? "\n\n" : "");
        changed[10] = kind == 2 ? 'g' : changed[10];
        changed[63] = kind == 3 ? '\0' : changed[63];
        changed[0] = kind == 4 ? '\0' : changed[0];
        write_secret_file(changed, 0600);
        assert_int_equal(open_with_secret(server, variable, &err), HVD_INVALID_ARGUMENT);
        assert_non_null(strstr(err.text, "64 hexadecimal digits"));
        assert_null(strstr(err.text, "7468697274")); // the sentence does not show the secret
    }
    snprintf(changed, sizeof changed, "%s\n", good);
    changed[4] = (char)(changed[4] >= 'a' ? changed[4] - 'a' + 'A' : changed[4]);
    write_secret_file(changed, 0400);
    assert_int_equal(open_with_secret(server, variable, &err), HVD_OK);
    write_secret_file(good, 0600);
    hvd_rendezvous_stop(server);
}

static void test_secret_descriptor(void **state)
{
    (void)state;
    hvd_rendezvous_t *server = start_server();
    char variable[96], good[65];
    int pipe_fds[2];
    err_t err;

    hex_secret(good);
    assert_int_equal(pipe(pipe_fds), 0);
    assert_int_equal(write(pipe_fds[1], good, 64), 64); // the writing end stays open
    snprintf(variable, sizeof variable, "HOROVOD_SECRET_FD=%d", pipe_fds[0]);
    assert_int_equal(open_with_secret(server, variable, &err), HVD_OK);
    assert_int_equal(fcntl(pipe_fds[0], F_GETFD), -1); // closed after reading
    assert_int_equal(open_with_secret(server, variable, &err), HVD_SYSTEM);
    assert_non_null(strstr(err.text, "once"));
    close(pipe_fds[1]);

    // An empty pipe that nobody fills: the start timeout ends the wait.
    assert_int_equal(pipe(pipe_fds), 0);
    snprintf(variable, sizeof variable, "HOROVOD_SECRET_FD=%d", pipe_fds[0]);
    assert_int_equal(open_with_secret(server, variable, &err), HVD_SYSTEM);
    close(pipe_fds[1]);

    assert_int_equal(pipe(pipe_fds), 0);
    assert_int_equal(write(pipe_fds[1], good, 63), 63);
    close(pipe_fds[1]);
    snprintf(variable, sizeof variable, "HOROVOD_SECRET_FD=%d", pipe_fds[0]);
    assert_int_equal(open_with_secret(server, variable, &err), HVD_INVALID_ARGUMENT);
    hvd_rendezvous_stop(server);
}

// --- Whole jobs ----------------------------------------------------------------------------------

typedef struct rank_env {
    char texts[6][96];
    const char *env[7];
} rank_env_t;

static void make_env(rank_env_t *env, int rank, int size, int port, int timeout_s)
{
    snprintf(env->texts[0], 96, "HOROVOD_RANK=%d", rank);
    snprintf(env->texts[1], 96, "HOROVOD_SIZE=%d", size);
    snprintf(env->texts[2], 96, "HOROVOD_RENDEZVOUS_ADDR=127.0.0.1");
    snprintf(env->texts[3], 96, "HOROVOD_RENDEZVOUS_PORT=%d", port);
    snprintf(env->texts[4], 96, "HOROVOD_SECRET_FILE=%s", secret_path);
    snprintf(env->texts[5], 96, "HOROVOD_START_TIMEOUT=%d", timeout_s);
    for (int i = 0; i < 6; i++) {
        env->env[i] = env->texts[i];
    }
    env->env[6] = NULL;
}

// One exchange whose values have a length and content of their own for every rank and round.
static bool exchange_once(boot_t *boot, const boot_job_t *job, const char *round, int mark)
{
    const uint8_t *values[N_FORKED];
    size_t lengths[N_FORKED];
    uint8_t mine[400];
    buf_t storage = {0};
    size_t bytes = (size_t)(job->rank * 50);
    err_t err;
    memset(mine, mark + job->rank, sizeof mine);
    hvd_status_t status = boot_exchange(boot, round, mine, bytes, values, lengths, &storage, &err);
    bool good = status == HVD_OK;
    if (!good) {
        print_message("rank %d: %s\n", job->rank, err.text);
    }
    for (int r = 0; r < job->size && good; r++) {
        good = lengths[r] == (size_t)(r * 50) &&
               (r == 0 || (values[r][0] == (uint8_t)(mark + r) &&
                           values[r][lengths[r] - 1] == (uint8_t)(mark + r)));
    }
    buf_free(&storage);
    return good;
}

// A rank's whole life, twice: the second turn must not see values of the first.
static bool live_as_rank(int rank, int size, int port)
{
    rank_env_t env;
    config_t config;
    bool good = true;
    make_env(&env, rank, size, port, 20);
    if (config_load(&config, env.env, NULL, NULL) != HVD_OK) {
        return false;
    }
    for (int turn = 0; turn < 2 && good; turn++) {
        boot_job_t job;
        boot_t *boot = NULL;
        err_t err;
        if (boot_open(&config, NULL, &job, &boot, &err) != HVD_OK) {
            print_message("rank %d: %s\n", rank, err.text);
            return false;
        }
        good = job.rank == rank && job.size == size && job.local_rank == -1 &&
               memcmp(job.secret, secret, sizeof secret) == 0 &&
               exchange_once(boot, &job, "addresses", 10 * turn) &&
               exchange_once(boot, &job, "ready", 10 * turn + 100);
        boot_close(boot);
    }
    config_free(&config);
    return good;
}

static void test_forked_ranks_exchange(void **state)
{
    (void)state;
    pid_t children[N_FORKED];
    int port_pipe[2];

    assert_int_equal(pipe(port_pipe), 0);
    for (int rank = 0; rank < N_FORKED; rank++) {
        children[rank] = fork();
        assert_true(children[rank] >= 0);
        if (children[rank] == 0) {
            int port = 0;
            bool good = read(port_pipe[0], &port, sizeof port) == sizeof port &&
                        live_as_rank(rank, N_FORKED, port);
            _exit(good ? 0 : 1);
        }
    }
    hvd_rendezvous_t *server = start_server();
    int port = hvd_rendezvous_port(server);
    for (int rank = 0; rank < N_FORKED; rank++) {
        assert_int_equal(write(port_pipe[1], &port, sizeof port), sizeof port);
    }
    for (int rank = 0; rank < N_FORKED; rank++) {
        int status = -1;
        assert_int_equal(waitpid(children[rank], &status, 0), children[rank]);
        assert_int_equal(status, 0);
    }
    assert_int_equal(kv_server_n_refused(server), 0);
    close(port_pipe[0]);
    close(port_pipe[1]);
    hvd_rendezvous_stop(server);
}

static void test_exchange_names_missing_ranks(void **state)
{
    (void)state;
    hvd_rendezvous_t *server = start_server();
    const uint8_t *values[4];
    size_t lengths[4];
    buf_t storage = {0};
    rank_env_t env;
    config_t config;
    boot_job_t job;
    boot_t *boot;
    err_t err;

    make_env(&env, 1, 4, hvd_rendezvous_port(server), 1);
    assert_int_equal(config_load(&config, env.env, NULL, NULL), HVD_OK);
    assert_int_equal(boot_open(&config, NULL, &job, &boot, &err), HVD_OK);
    uint64_t started_ns = clock_ns();
    assert_int_equal(boot_exchange(boot, "addresses", "v", 1, values, lengths, &storage, &err),
                     HVD_TIMEOUT);
    assert_true(clock_ns() - started_ns < 3 * NS_PER_S);
    assert_non_null(strstr(err.text, "ranks 0, 2, 3 of 4"));
    assert_non_null(strstr(err.text, "addresses"));

    // A second process with the same rank is told so.
    boot_t *second = NULL;
    assert_int_equal(boot_open(&config, NULL, &job, &second, &err), HVD_INVALID_ARGUMENT);
    assert_non_null(strstr(err.text, "rank/1"));
    assert_null(second);
    buf_free(&storage);
    boot_close(boot);
    config_free(&config);
    hvd_rendezvous_stop(server);
}

// --- Places --------------------------------------------------------------------------------------

static void test_host_identity(void **state)
{
    (void)state;
    const char *const nothing[] = {NULL};
    const char *const named[] = {"HOROVOD_HOSTNAME=node-7", NULL};
    char first[256], again[256], other[256];
    config_t config;

    assert_int_equal(config_load(&config, nothing, NULL, NULL), HVD_OK);
    boot_host_identity(&config, first);
    boot_host_identity(&config, again);
    config_free(&config);
    assert_string_equal(first, again);
    assert_true(strlen(first) > 10);
    assert_int_equal(config_load(&config, named, NULL, NULL), HVD_OK);
    boot_host_identity(&config, other);
    config_free(&config);
    assert_string_not_equal(first, other);
    assert_non_null(strstr(other, "node-7"));
    size_t kernel = boot_kernel_bytes(first);
    assert_true(kernel > 0 && kernel == boot_kernel_bytes(other));
    assert_memory_equal(first, other, kernel);
}

static void test_place(void **state)
{
    (void)state;
    static const int host_of[] = {0, 0, 0, 1, 1, 2, 0};
    static const int local_ranks[] = {0, 1, 2, 0, 1, 0, 3};
    static const int local_sizes[] = {4, 4, 4, 2, 2, 1, 4};
    static const int cross_ranks[] = {0, 0, 0, 1, 1, 2, 0};
    static const int cross_sizes[] = {3, 2, 1, 3, 2, 3, 1};

    for (int rank = 0; rank < 7; rank++) {
        boot_job_t job = {.rank = rank,
                          .size = 7,
                          .local_rank = -1,
                          .local_size = -1,
                          .cross_rank = -1,
                          .cross_size = -1};
        int host_sizes[3] = {0};
        boot_place(&job, host_of, host_sizes);
        assert_int_equal(host_sizes[0], 4);
        assert_int_equal(host_sizes[1], 2);
        assert_int_equal(host_sizes[2], 1);
        assert_int_equal(job.local_rank, local_ranks[rank]);
        assert_int_equal(job.local_size, local_sizes[rank]);
        assert_int_equal(job.cross_rank, cross_ranks[rank]);
        assert_int_equal(job.cross_size, cross_sizes[rank]);
    }
    boot_job_t told = {
        .rank = 1, .size = 7, .local_rank = 5, .local_size = 6, .cross_rank = -1, .cross_size = -1};
    int host_sizes[3] = {0};
    boot_place(&told, host_of, host_sizes);
    assert_int_equal(told.local_rank, 5);
    assert_int_equal(told.local_size, 6);
    assert_int_equal(told.cross_size, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forked_ranks_exchange),
        cmocka_unit_test(test_request_round_trip),
        cmocka_unit_test(test_request_refusals),
        cmocka_unit_test(test_key_split),
        cmocka_unit_test(test_missing_ranges),
        cmocka_unit_test(test_proto_fuzz),
        cmocka_unit_test(test_put_get_gather),
        cmocka_unit_test(test_get_waits_for_put),
        cmocka_unit_test(test_late_answers),
        cmocka_unit_test(test_gather_of_different_sizes),
        cmocka_unit_test(test_enter),
        cmocka_unit_test(test_one_leaves),
        cmocka_unit_test(test_late_together),
        cmocka_unit_test(test_late_at_once),
        cmocka_unit_test(test_wrong_secret),
        cmocka_unit_test(test_strangers_are_cut),
        cmocka_unit_test(test_idle_strangers_do_not_keep_others_out),
        cmocka_unit_test(test_bad_frames_are_cut),
        cmocka_unit_test(test_server_stops_promptly),
        cmocka_unit_test(test_server_start_errors),
        cmocka_unit_test(test_client_waits_for_server),
        cmocka_unit_test(test_several_addresses),
        cmocka_unit_test(test_world_of_one),
        cmocka_unit_test(test_exchange_alone),
        cmocka_unit_test(test_environment_errors),
        cmocka_unit_test(test_secret_files),
        cmocka_unit_test(test_secret_descriptor),
        cmocka_unit_test(test_exchange_names_missing_ranks),
        cmocka_unit_test(test_host_identity),
        cmocka_unit_test(test_place),
    };
    return cmocka_run_group_tests_name("boot", tests, make_folder, remove_folder);
}
