// SPDX-License-Identifier: Apache-2.0
//
// test_capture.c - what somebody who hears every packet of a job can read.
//
// In the program's own network namespace (scene.h) the job's traffic is all there is. A listener at
// its only interface hears two hosts (a rank each) exchange tensors of known bytes under a known
// name. Encrypted: nothing of it is heard. With HOROVOD_ENCRYPT=never tensors are
// heard, so the ears work, but names and what rides with the agreement still are not.
//
// Needs root, or a kernel that lets users make namespaces; without either it says so and fails. The
// namespace goes with the last process in it.
#define _GNU_SOURCE
#include "harness.h"
#include "scene.h"

#include <arpa/inet.h>
#include <errno.h>
#include <net/if.h>
#include <netpacket/packet.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define ETHERTYPE_ALL 3 // as in linux/if_ether.h
#define LARGE_BYTES MIB
#define N_STEPS 8
#define SMALL_BYTES 64 // rides with the agreement

// Numbers that all ranks and the listener see.
enum { LISTENS, IS_OVER, N_KIB, FIRST_HITS };

typedef struct secret_thing {
    const char *what;
    const char *pattern;
} secret_thing_t;

enum { LARGE_TENSOR, SMALL_TENSOR, NAME, N_THINGS };

static const secret_thing_t things[N_THINGS] = {
    [LARGE_TENSOR] = {"a tensor", "weights-of-model"},
    [SMALL_TENSOR] = {"a small tensor", "loss-and-metrics"},
    [NAME] = {"a name", "the.layer.with.the.trick"},
};

// --- The listener --------------------------------------------------------------------------------

static int count_hits(const uint8_t *data, size_t n, const char *pattern)
{
    size_t pattern_bytes = strlen(pattern);
    int n_hits = 0;
    for (const uint8_t *at = data;
         (at = memmem(at, n - (size_t)(at - data), pattern, pattern_bytes)) != NULL;
         at += pattern_bytes) {
        n_hits++;
    }
    return n_hits;
}

static void listen_to_all(const rank_t *r)
{
    static uint8_t packet[1 << 17];
    struct sockaddr_ll place = {.sll_family = AF_PACKET,
                                .sll_protocol = htons(ETHERTYPE_ALL),
                                .sll_ifindex = (int)if_nametoindex("lo")};
    int fd = socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, htons(ETHERTYPE_ALL));
    int buffer = 256 << 20;
    uint64_t n_bytes = 0, deadline_ns = deadline_in_ms(60000 * PATIENCE);
    if (fd < 0 || bind(fd, (struct sockaddr *)&place, sizeof place) != 0) {
        fprintf(stderr, "cannot listen to packets: %s\n", strerror(errno));
        _exit(1);
    }
    setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &buffer, sizeof buffer);
    atomic_store(rank_shared(r, LISTENS), 1);
    for (bool over = false; clock_ns() < deadline_ns;) {
        struct pollfd polled = {.fd = fd, .events = POLLIN};
        if (poll(&polled, 1, 50) <= 0) {
            if (over) {
                break;
            }
            over = atomic_load(rank_shared(r, IS_OVER)) == r->size; // then once more
            continue;
        }
        struct sockaddr_ll from;
        socklen_t from_bytes = sizeof from;
        ssize_t n = recvfrom(fd, packet, sizeof packet, 0, (struct sockaddr *)&from, &from_bytes);
        if (n <= 0 || from.sll_pkttype == PACKET_OUTGOING) { // every packet of lo comes twice
            continue;
        }
        n_bytes += (uint64_t)n;
        for (int i = 0; i < N_THINGS; i++) {
            atomic_fetch_add(rank_shared(r, FIRST_HITS + i),
                             count_hits(packet, (size_t)n, things[i].pattern));
        }
    }
    atomic_store(rank_shared(r, N_KIB), (int)(n_bytes / KIB));
    close(fd);
}

// --- The job -------------------------------------------------------------------------------------

// The largest of equal bytes are these bytes.
static void exchange(rank_t *r, const char *name, const char *pattern, size_t n)
{
    int64_t shape[1] = {(int64_t)n};
    uint8_t *values = malloc(n), *expected = malloc(n);
    CHECK(r, values != NULL && expected != NULL);
    for (size_t i = 0; i < n; i++) {
        values[i] = expected[i] = (uint8_t)pattern[i % strlen(pattern)];
    }
    hvd_tensor_t tensor = {.input = values, .output = values, .n_dims = 1, .shape = shape};
    CHECK_OK(r, rank_call(r, &(hvd_request_t){.op = HVD_ALLREDUCE,
                                              .name = name,
                                              .dtype = HVD_UINT8,
                                              .reduce = HVD_MAX,
                                              .tensors = &tensor,
                                              .n_tensors = 1}));
    CHECK(r, memcmp(values, expected, n) == 0);
    free(values);
    free(expected);
}

static const bool heard_when_encrypted[N_THINGS];
static const bool heard_without[N_THINGS] = {[LARGE_TENSOR] = true};

static void check_heard(rank_t *r, const bool *expected)
{
    CHECK(r, atomic_load(rank_shared(r, N_KIB)) > (int)(N_STEPS * LARGE_BYTES / KIB / 2));
    for (int i = 0; i < N_THINGS; i++) {
        int n_hits = atomic_load(rank_shared(r, FIRST_HITS + i));
        if ((n_hits > 0) != expected[i]) {
            check_failed(r, __FILE__, __LINE__, "%s was heard %d times", things[i].what, n_hits);
        }
    }
}

// arg: which things are heard.
static void capture(rank_t *r, void *arg)
{
    pid_t listener = r->rank == 0 ? fork() : 0;
    CHECK(r, listener >= 0);
    if (r->rank == 0 && listener == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        listen_to_all(r);
        _exit(0);
    }
    rank_wait_for(r, rank_shared(r, LISTENS), 1);
    rank_open(r);
    for (int step = 0; step < N_STEPS; step++) {
        char name[64];
        rank_step(r, "step %d", step);
        snprintf(name, sizeof name, "%s.%d", things[NAME].pattern, step);
        exchange(r, name, things[LARGE_TENSOR].pattern, LARGE_BYTES);
        exchange(r, things[NAME].pattern, things[SMALL_TENSOR].pattern, SMALL_BYTES);
    }
    rank_close(r);
    atomic_fetch_add(rank_shared(r, IS_OVER), 1);
    if (r->rank == 0) {
        int state;
        rank_step(r, "what was heard");
        CHECK(r, waitpid(listener, &state, 0) == listener && state == 0);
        check_heard(r, arg);
    }
}

// --- Table ---------------------------------------------------------------------------------------

#define CAPTURE(name_, layout_, heard, ...)                                                        \
    {                                                                                              \
        .name = name_, .fn = capture, .arg = (void *)heard, .min_ranks = 2,                        \
        .layouts = ONLY_LAYOUT(layout_), .env = {"HOROVOD_TRANSPORTS=tcp", __VA_ARGS__}            \
    }

int main(int argc, char **argv)
{
    const subtest_t subtests[] = {
        CAPTURE("between hosts, as it comes", LAYOUT_APART, heard_when_encrypted),
        CAPTURE("between hosts, always", LAYOUT_APART, heard_when_encrypted,
                "HOROVOD_ENCRYPT=always"),
        CAPTURE("inside a host, always", LAYOUT_ONE, heard_when_encrypted,
                "HOROVOD_ENCRYPT=always"),
        CAPTURE("between hosts, never", LAYOUT_APART, heard_without, "HOROVOD_ENCRYPT=never"),
    };
    if (!scene_make()) {
        fprintf(stderr, "%s needs root, or the right to make namespaces: nothing was tested\n",
                argv[0]);
        return 1;
    }
    return ranks_main(argc, argv, subtests, (int)N_ELEMENTS(subtests));
}
