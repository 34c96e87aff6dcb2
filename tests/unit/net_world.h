// SPDX-License-Identifier: Apache-2.0
//
// net_world.h - small jobs inside one test process, for test_net.c and test_tcp.c.
//
// A place is one rank: knobs, keys, log and what net.h calls a job. Everything runs over loopback.
#ifndef HVD_TESTS_NET_WORLD_H
#define HVD_TESTS_NET_WORLD_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#undef fail // cmocka's macro; ours is a function
#undef fail_msg
#define fail_msg(...)                                                                              \
    do {                                                                                           \
        print_error(__VA_ARGS__);                                                                  \
        print_error("\n");                                                                         \
        _fail(__FILE__, __LINE__);                                                                 \
    } while (0)

#include "net/net.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define MAX_PLACES 48
#define MAX_ENV 8

typedef struct place {
    config_t config;
    log_t log;
    int n_log_lines; // at warning or above
    char last_log[512];
    secure_keys_t *keys;
    net_job_t job;
} place_t;

static const int one_host[MAX_PLACES]; // everybody on host 0

static inline void count_log_line(void *arg, int level, const char *line)
{
    place_t *place = arg;
    if (level >= LOG_WARN) {
        place->n_log_lines++;
        snprintf(place->last_log, sizeof place->last_log, "%s", line);
    }
}

static inline void must(hvd_status_t status, const err_t *err)
{
    if (status != HVD_OK) {
        fail_msg("status %d: %s", (int)status, err->text);
    }
}

// --- Moving bytes --------------------------------------------------------------------------------

static inline ssize_t link_send(net_link_t *l, const void *data, size_t bytes)
{
    return l->ops->send(l, data, bytes);
}

// For the head of what the next call sends: both may leave together.
static inline ssize_t link_send_head(net_link_t *l, const void *data, size_t bytes)
{
    l->more = true;
    ssize_t n = l->ops->send(l, data, bytes);
    l->more = false;
    return n;
}

static inline ssize_t link_recv(net_link_t *l, void *data, size_t bytes)
{
    return l->ops->recv(l, data, bytes);
}

static inline ssize_t link_peek(net_link_t *l, const void **data_p)
{
    return l->ops->peek(l, data_p);
}

static inline void link_consume(net_link_t *l, size_t bytes)
{
    l->ops->consume(l, bytes);
}

// --- Places --------------------------------------------------------------------------------------

// `knobs` are "NAME=value" strings up to a NULL; HOROVOD_GLOO_IFACE is lo unless among them.
static inline void place_init(place_t *place, int rank, int size, const char *const *knobs,
                              const char *secret)
{
    const char *env[MAX_ENV + 2] = {"HOROVOD_GLOO_IFACE=lo"};
    uint8_t secret_bytes[32] = {0};
    int n = 1;
    err_t err = {0};
    for (; knobs != NULL && *knobs != NULL; knobs++) {
        assert_true(n < MAX_ENV);
        if (strncmp(*knobs, "HOROVOD_GLOO_IFACE=", 19) == 0) {
            env[0] = *knobs;
        } else {
            env[n++] = *knobs;
        }
    }
    *place = (place_t){0};
    place->log = (log_t){.level = LOG_INFO, .rank = rank, .sink = count_log_line, .arg = place};
    must(config_load(&place->config, env, &place->log, &err), &err);
    memcpy(secret_bytes, secret, MIN(strlen(secret), sizeof secret_bytes));
    must(secure_keys_new(secret_bytes, &place->keys, &err), &err);
    place->job = (net_job_t){.rank = rank,
                             .size = size,
                             .host_of = one_host,
                             .config = &place->config,
                             .log = &place->log,
                             .keys = place->keys};
}

static inline void place_free(place_t *place)
{
    secure_keys_free(place->keys);
    config_free(&place->config);
}

// Byte number `at` of the stream with this seed.
static inline uint8_t stream_byte(uint64_t seed, uint64_t at)
{
    uint64_t x = (at / 8 + 1) * UINT64_C(0x9e3779b97f4a7c15) + seed * UINT64_C(0xbf58476d1ce4e5b9);
    x ^= x >> 29;
    x *= UINT64_C(0x94d049bb133111eb);
    return (uint8_t)(x >> (at % 8 * 8));
}

static inline uint64_t test_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static inline void nap_us(unsigned us)
{
    nanosleep(&(struct timespec){.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000}, NULL);
}

#endif
