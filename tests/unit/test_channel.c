// SPDX-License-Identifier: Apache-2.0
//
// test_channel.c - the channel between a launcher and an agent: who gets in, and that all arrives.
//
// Both ends live in this thread on a socketpair and are driven in turn, so nothing depends on
// timing.
#define _GNU_SOURCE
#include "hvd.h"
#include "wire/hello.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h> // after ours: it has a macro named fail

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define STREAM_BYTES ((size_t)3 * 1024 * 1024 + 77)
#define MANY_TURNS 100000

enum { CLIENT, SERVER };

static const uint8_t secret[32] = "thirty-two bytes of test secret";
static const uint8_t other_secret[32] = "thirty-two bytes of wrong secret";

typedef struct pair {
    int fds[2];
    hvd_channel_t *ends[2];
    char text[HVD_TEXT_BYTES];
} pair_t;

static void pair_open(pair_t *pair, const uint8_t *server_secret)
{
    memset(pair, 0, sizeof *pair);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair->fds), 0);
    assert_int_equal(hvd_channel_open(pair->fds[CLIENT], false, secret, &pair->ends[CLIENT],
                                      pair->text, sizeof pair->text),
                     HVD_OK);
    assert_int_equal(hvd_channel_open(pair->fds[SERVER], true, server_secret, &pair->ends[SERVER],
                                      pair->text, sizeof pair->text),
                     HVD_OK);
}

static void pair_close(pair_t *pair)
{
    for (int i = 0; i < 2; i++) {
        hvd_channel_close(pair->ends[i]);
        close(pair->fds[i]);
    }
}

// Drives both ends until neither is in progress; leaves each one's status.
static void shake_both(pair_t *pair, hvd_status_t statuses[2])
{
    statuses[CLIENT] = statuses[SERVER] = HVD_IN_PROGRESS;
    for (int turn = 0; turn < MANY_TURNS; turn++) {
        for (int i = 0; i < 2; i++) {
            if (statuses[i] == HVD_IN_PROGRESS) {
                statuses[i] = hvd_channel_shake(pair->ends[i], pair->text, sizeof pair->text);
            }
        }
        if (statuses[CLIENT] != HVD_IN_PROGRESS && statuses[SERVER] != HVD_IN_PROGRESS) {
            return;
        }
        if (statuses[CLIENT] < 0 || statuses[SERVER] < 0) {
            return;
        }
    }
}

static void test_a_stream_arrives_whole(void **state)
{
    (void)state;
    pair_t pair;
    hvd_status_t statuses[2];
    uint8_t *sent = malloc(STREAM_BYTES), *received = malloc(STREAM_BYTES);
    size_t n_sent = 0, n_received = 0;

    assert_non_null(sent);
    assert_non_null(received);
    for (size_t i = 0; i < STREAM_BYTES; i++) {
        sent[i] = (uint8_t)(i * 31 + i / 4096);
    }
    pair_open(&pair, secret);
    shake_both(&pair, statuses);
    assert_int_equal(statuses[CLIENT], HVD_OK);
    assert_int_equal(statuses[SERVER], HVD_OK);
    for (int turn = 0; turn < MANY_TURNS && n_received < STREAM_BYTES; turn++) {
        int64_t n = hvd_channel_send(pair.ends[CLIENT], sent + n_sent, STREAM_BYTES - n_sent,
                                     pair.text, sizeof pair.text);
        assert_true(n >= 0);
        n_sent += (size_t)n;
        n = hvd_channel_recv(pair.ends[SERVER], received + n_received, STREAM_BYTES - n_received,
                             pair.text, sizeof pair.text);
        assert_true(n >= 0);
        n_received += (size_t)n;
    }
    assert_int_equal(n_received, STREAM_BYTES);
    assert_memory_equal(sent, received, STREAM_BYTES);
    assert_false(hvd_channel_wants_write(pair.ends[CLIENT]));
    pair_close(&pair);
    free(sent);
    free(received);
}

static void test_another_secret_gets_nowhere(void **state)
{
    (void)state;
    pair_t pair;
    hvd_status_t statuses[2];

    pair_open(&pair, other_secret);
    shake_both(&pair, statuses);
    assert_int_equal(statuses[SERVER], HVD_UNAUTHENTICATED);
    assert_int_not_equal(statuses[CLIENT], HVD_OK);
    pair_close(&pair);
}

// A hello that names the job but is for the rendezvous server must not open a channel.
static void test_another_role_is_refused(void **state)
{
    (void)state;
    pair_t pair;
    hello_t hello = {.role = HELLO_KV, .encrypted = 1};
    uint8_t bytes[HELLO_BYTES];

    pair_open(&pair, secret);
    hello_job(secret, hello.job);
    hello_encode(&hello, bytes);
    assert_int_equal(send(pair.fds[CLIENT], bytes, sizeof bytes, 0), sizeof bytes);
    assert_int_equal(hvd_channel_shake(pair.ends[SERVER], pair.text, sizeof pair.text),
                     HVD_UNAUTHENTICATED);
    assert_non_null(strstr(pair.text, "another job"));
    pair_close(&pair);
}

static void test_strangers_are_refused_at_64_bytes(void **state)
{
    (void)state;
    pair_t pair;
    char request[HELLO_BYTES] = "GET / HTTP/1.1\r\nHost: example\r\n\r\n";

    pair_open(&pair, secret);
    assert_int_equal(send(pair.fds[CLIENT], request, 10, 0), 10);
    assert_int_equal(hvd_channel_shake(pair.ends[SERVER], pair.text, sizeof pair.text),
                     HVD_IN_PROGRESS);
    assert_int_equal(send(pair.fds[CLIENT], request + 10, sizeof request - 10, 0),
                     sizeof request - 10);
    assert_int_equal(hvd_channel_shake(pair.ends[SERVER], pair.text, sizeof pair.text),
                     HVD_PROTOCOL);
    pair_close(&pair);
}

static void test_nothing_moves_before_the_proof(void **state)
{
    (void)state;
    pair_t pair;
    char byte = 0;

    pair_open(&pair, secret);
    assert_int_equal(hvd_channel_send(pair.ends[CLIENT], &byte, 1, pair.text, sizeof pair.text),
                     HVD_INVALID_ARGUMENT);
    assert_int_equal(hvd_channel_recv(pair.ends[SERVER], &byte, 1, pair.text, sizeof pair.text),
                     HVD_INVALID_ARGUMENT);
    pair_close(&pair);
}

static void test_the_end_is_told(void **state)
{
    (void)state;
    pair_t pair;
    hvd_status_t statuses[2];
    char byte = 0;

    pair_open(&pair, secret);
    shake_both(&pair, statuses);
    assert_int_equal(hvd_channel_recv(pair.ends[SERVER], &byte, 1, pair.text, sizeof pair.text), 0);
    shutdown(pair.fds[CLIENT], SHUT_RDWR);
    assert_int_equal(hvd_channel_recv(pair.ends[SERVER], &byte, 1, pair.text, sizeof pair.text),
                     HVD_PEER_LOST);
    pair_close(&pair);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_stream_arrives_whole),
        cmocka_unit_test(test_another_secret_gets_nowhere),
        cmocka_unit_test(test_another_role_is_refused),
        cmocka_unit_test(test_strangers_are_refused_at_64_bytes),
        cmocka_unit_test(test_nothing_moves_before_the_proof),
        cmocka_unit_test(test_the_end_is_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
