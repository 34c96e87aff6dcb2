// SPDX-License-Identifier: Apache-2.0
//
// test_tcp.c - the TCP transport: streams, strangers, wrong doors and sudden ends.
//
// Ranks are domains of one process, driven in turn by one thread, so that runs repeat; where a
// process must die, it is a forked child. All traffic is on loopback.
#define _GNU_SOURCE
#include "net_world.h"

#include "net/tcp.h"

#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define PATIENCE_MS 8000

typedef struct world {
    int size;
    place_t places[MAX_PLACES];
    domain_t *domains[MAX_PLACES]; // NULL: this rank is elsewhere, or gone
    buf_t addresses[MAX_PLACES];
} world_t;

static const char *const quick[] = {"HOROVOD_GLOO_TIMEOUT_SECONDS=0.5", NULL};

// --- Building ------------------------------------------------------------------------------------

static world_t *world_new(int size)
{
    world_t *w = calloc(1, sizeof *w);
    assert_non_null(w);
    w->size = size;
    return w;
}

static void world_open(world_t *w, int rank, const char *const *knobs, const char *secret)
{
    err_t err = {0};
    place_init(&w->places[rank], rank, w->size, knobs, secret);
    must(transport_tcp.open(&w->places[rank].job, &w->domains[rank], &err), &err);
    must(transport_tcp.address(w->domains[rank], &w->addresses[rank], &err), &err);
}

static hvd_status_t world_attach_one(world_t *w, int rank, err_t *err)
{
    const uint8_t *data[MAX_PLACES];
    size_t bytes[MAX_PLACES];
    for (int r = 0; r < w->size; r++) {
        data[r] = w->addresses[r].data;
        bytes[r] = w->addresses[r].len;
    }
    return transport_tcp.attach(w->domains[rank], data, bytes, err);
}

static void world_attach(world_t *w)
{
    err_t err = {0};
    for (int r = 0; r < w->size; r++) {
        if (w->domains[r] != NULL) {
            must(world_attach_one(w, r, &err), &err);
        }
    }
}

static world_t *world_of(int size, const char *const *knobs)
{
    world_t *w = world_new(size);
    for (int r = 0; r < size; r++) {
        world_open(w, r, knobs, "the secret");
    }
    world_attach(w);
    return w;
}

static void world_free(world_t *w)
{
    for (int r = 0; r < w->size; r++) {
        if (w->domains[r] != NULL) {
            transport_tcp.close(w->domains[r]);
        }
        if (w->places[r].keys != NULL) {
            place_free(&w->places[r]);
        }
        buf_free(&w->addresses[r]);
    }
    free(w);
}

static int world_progress(world_t *w)
{
    int n = 0;
    for (int r = 0; r < w->size; r++) {
        n += w->domains[r] != NULL ? transport_tcp.progress(w->domains[r]) : 0;
    }
    return n;
}

static net_link_t *world_link(world_t *w, int from, int to, lane_t lane)
{
    net_link_t *link = NULL;
    err_t err = {0};
    must(transport_tcp.connect(w->domains[from], to, lane, &link, &err), &err);
    return link;
}

static bool is_ready(const net_link_t *link)
{
    return ((const tcp_link_t *)link)->conn != NULL;
}

// Until both are ready, or one has failed.
static void world_meet(world_t *w, const net_link_t *a, const net_link_t *b)
{
    uint64_t deadline_ns = deadline_in_ms(PATIENCE_MS);
    while (!(is_ready(a) && is_ready(b)) && a->err.status == HVD_OK && b->err.status == HVD_OK) {
        assert_true(clock_ns() < deadline_ns);
        if (world_progress(w) == 0) {
            nap_us(100);
        }
    }
}

static hvd_status_t health_of(world_t *w, int rank, err_t *err)
{
    int peer;
    hvd_status_t status = transport_tcp.health(w->domains[rank], LANE_CONTROL, &peer, err);
    return status != HVD_OK ? status
                            : transport_tcp.health(w->domains[rank], LANE_DATA, &peer, err);
}

// Rewrites what a rank told others.
static void world_readdress(world_t *w, int rank, void (*change)(tcp_offer_t *offer, void *arg),
                            void *arg)
{
    tcp_offer_t offer;
    err_t err = {0};
    buf_t *buf = &w->addresses[rank];
    must(tcp_offer_decode(buf->data, buf->len, rank, &offer, &err), &err);
    change(&offer, arg);
    buf_clear(buf);
    tcp_offer_encode(&offer, buf);
}

// --- Streams -------------------------------------------------------------------------------------

typedef struct half {
    net_link_t *link;
    uint64_t seed_out, seed_in, sent, received, random;
    bool peeks;
} half_t;

static void half_send(half_t *h, uint64_t total)
{
    static uint8_t data[300000];
    size_t want = test_random(&h->random) % 3 == 0 ? test_random(&h->random) % 16
                                                   : test_random(&h->random) % sizeof data;
    size_t n_bytes = MIN(want, total - h->sent);
    for (size_t i = 0; i < n_bytes; i++) {
        data[i] = stream_byte(h->seed_out, h->sent + i);
    }
    ssize_t n = link_send(h->link, data, n_bytes);
    assert_true(n >= 0 && (size_t)n <= n_bytes);
    h->sent += (uint64_t)n;
}

static void check_bytes(half_t *h, const uint8_t *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        if (data[i] != stream_byte(h->seed_in, h->received + i)) {
            fail_msg("byte %zu of the stream is wrong", (size_t)h->received + i);
        }
    }
    h->received += bytes;
}

static void half_receive(half_t *h)
{
    static uint8_t data[300000];
    const void *staged;
    bool peeks = h->peeks && test_random(&h->random) % 2 == 0;
    ssize_t n = peeks ? link_peek(h->link, &staged)
                      : link_recv(h->link, data, test_random(&h->random) % sizeof data);
    assert_true(n >= 0);
    if (peeks && n > 0) {
        size_t taken = 1 + test_random(&h->random) % (size_t)n;
        check_bytes(h, staged, taken);
        link_consume(h->link, taken);
    } else {
        check_bytes(h, data, (size_t)n);
    }
}

// Both directions at once; returns when both sides have everything.
static void exchange(world_t *w, net_link_t *a, net_link_t *b, uint64_t total, bool peeks)
{
    half_t halves[2] = {{.link = a, .seed_out = 1, .seed_in = 2, .random = 11, .peeks = peeks},
                        {.link = b, .seed_out = 2, .seed_in = 1, .random = 22, .peeks = peeks}};
    uint64_t deadline_ns = deadline_in_ms(5 * PATIENCE_MS);
    while (halves[0].received < total || halves[1].received < total) {
        assert_true(clock_ns() < deadline_ns);
        for (int i = 0; i < 2; i++) {
            half_send(&halves[i], total);
            half_receive(&halves[i]);
        }
        world_progress(w);
    }
}

static void run_streams(const char *const *knobs, lane_t lane, bool encrypted)
{
    world_t *w = world_of(2, knobs);
    net_link_t *a = world_link(w, 0, 1, lane), *b = world_link(w, 1, 0, lane);
    world_meet(w, a, b);
    must(a->err.status, &a->err);
    assert_int_equal(((tcp_link_t *)a)->conn->secure != NULL, encrypted);
    assert_int_equal(((tcp_link_t *)b)->conn->secure != NULL, encrypted);
    exchange(w, a, b, 3 * MIB + 17, false);
    exchange(w, a, b, 2 * MIB + 5, true);
    link_close(a);
    link_close(b);
    world_free(w);
}

static void streams_plain(void **state)
{
    (void)state;
    run_streams(NULL, LANE_DATA, false); // auto: same host
}

static void streams_encrypted(void **state)
{
    static const char *const always[] = {"HOROVOD_ENCRYPT=always", NULL};
    (void)state;
    run_streams(always, LANE_DATA, true);
}

static void streams_control_is_always_encrypted(void **state)
{
    static const char *const never[] = {"HOROVOD_ENCRYPT=never", NULL};
    (void)state;
    run_streams(never, LANE_CONTROL, true);
}

static void streams_tiny_buffers(void **state)
{
    static const char *const tiny[] = {"HOROVOD_TCP_BUFFER=4096", "HOROVOD_ENCRYPT=always", NULL};
    (void)state;
    run_streams(tiny, LANE_DATA, true);
    run_streams(tiny, LANE_DATA, true);
}

static void auto_encrypts_between_hosts(void **state)
{
    static const int two_hosts[] = {0, 1};
    (void)state;
    world_t *w = world_new(2);
    for (int r = 0; r < 2; r++) {
        world_open(w, r, NULL, "the secret");
        w->places[r].job.host_of = two_hosts;
    }
    world_attach(w);
    net_link_t *a = world_link(w, 0, 1, LANE_DATA), *b = world_link(w, 1, 0, LANE_DATA);
    world_meet(w, a, b);
    must(a->err.status, &a->err);
    assert_non_null(((tcp_link_t *)a)->conn->secure);
    link_close(a);
    link_close(b);
    world_free(w);
}

// While few links are asked, a mover asks its socket although epoll has said nothing; while many
// are, it waits for epoll.
static void few_links_are_asked_directly(void **state)
{
    static const char *const policies[][2] = {{"HOROVOD_ENCRYPT=never", NULL},
                                              {"HOROVOD_ENCRYPT=always", NULL}};
    enum { N_SENDERS = 3, RECEIVER = N_SENDERS };
    net_link_t *out[N_SENDERS], *in[N_SENDERS];
    char got[8];
    (void)state;

    for (int i = 0; i < 2; i++) {
        world_t *w = world_of(N_SENDERS + 1, policies[i]);
        domain_t *receiver = w->domains[RECEIVER];
        for (int r = 0; r < N_SENDERS; r++) {
            out[r] = world_link(w, r, RECEIVER, LANE_DATA);
            in[r] = world_link(w, RECEIVER, r, LANE_DATA);
            world_meet(w, out[r], in[r]);
            must(out[r]->err.status, &out[r]->err);
            exchange(w, out[r], in[r], 1000, false);
        }
        for (int k = 0; k < 40; k++) {
            world_progress(w);
            assert_int_equal(link_recv(in[0], got, sizeof got), 0); // until all edges are used up
        }
        assert_true(receiver->direct);
        assert_int_equal(link_send(out[0], "direct", 6), 6);
        nap_us(1000);
        assert_int_equal(link_recv(in[0], got, sizeof got), 6);
        assert_memory_equal(got, "direct", 6);
        transport_tcp.progress(receiver);
        assert_true(receiver->direct); // data came, and the next round need not ask epoll

        for (int r = 0; r < N_SENDERS; r++) {
            while (link_recv(in[r], got, sizeof got) > 0) {
            }
        }
        transport_tcp.progress(receiver);
        assert_false(receiver->direct);
        assert_int_equal(link_send(out[0], "edge", 4), 4);
        nap_us(1000);
        assert_int_equal(link_recv(in[0], got, sizeof got), 0);
        transport_tcp.progress(receiver);
        assert_int_equal(link_recv(in[0], got, sizeof got), 4);
        for (int r = 0; r < N_SENDERS; r++) {
            link_close(out[r]);
            link_close(in[r]);
        }
        world_free(w);
    }
}

// Where epoll's flag decides, it stays up while something can be had without an edge.
static void what_lies_inside_needs_no_edge(void **state)
{
    static const char *const always[] = {"HOROVOD_ENCRYPT=always", NULL};
    const void *shown;
    char got[8];
    (void)state;

    world_t *w = world_of(2, always);
    net_link_t *a = world_link(w, 0, 1, LANE_DATA), *b = world_link(w, 1, 0, LANE_DATA);
    world_meet(w, a, b);
    must(a->err.status, &a->err);
    exchange(w, a, b, 1000, false);
    for (const char *at = "abcd"; *at != '\0'; at++) {
        assert_int_equal(link_send(a, at, 1), 1);
    }
    nap_us(1000);
    for (int k = 0; k < 20; k++) {
        world_progress(w);
    }
    w->domains[1]->direct = false;
    assert_int_equal(link_recv(b, got, 1), 1);
    assert_int_equal(got[0], 'a');
    for (const char *want = "bc"; *want != '\0'; want++) {
        assert_int_equal(link_peek(b, &shown), 1);
        assert_int_equal(*(const char *)shown, *want);
        link_consume(b, 1);
    }
    assert_int_equal(link_recv(b, got, sizeof got), 1);
    assert_int_equal(got[0], 'd');
    assert_false(((tcp_link_t *)b)->conn->readable);
    link_close(a);
    link_close(b);
    world_free(w);
}

// --- Addresses -----------------------------------------------------------------------------------

static void keep_family(tcp_offer_t *offer, void *arg)
{
    int n = 0;
    for (int i = 0; i < offer->n_addrs; i++) {
        if (offer->addrs[i].family == *(int *)arg) {
            offer->addrs[n++] = offer->addrs[i];
        }
    }
    offer->n_addrs = n;
}

static void run_family(int family)
{
    world_t *w = world_new(2);
    world_open(w, 0, NULL, "the secret");
    world_open(w, 1, NULL, "the secret");
    world_readdress(w, 1, keep_family, &family);
    world_attach(w);
    net_link_t *a = world_link(w, 0, 1, LANE_DATA), *b = world_link(w, 1, 0, LANE_DATA);
    world_meet(w, a, b);
    must(a->err.status, &a->err);
    assert_int_equal(((tcp_link_t *)a)->conn->remote.family, family);
    exchange(w, a, b, 100000, false);
    link_close(a);
    link_close(b);
    world_free(w);
}

static bool has_ipv6_loopback(void)
{
    struct sockaddr_in6 name = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int fd = socket(AF_INET6, SOCK_STREAM, 0);
    bool works = fd >= 0 && bind(fd, (struct sockaddr *)&name, sizeof name) == 0;
    if (fd >= 0) {
        close(fd);
    }
    return works;
}

static void ipv4_and_ipv6(void **state)
{
    (void)state;
    run_family(AF_INET);
    if (has_ipv6_loopback()) {
        run_family(AF_INET6);
    } else {
        print_message("note: no IPv6 loopback on this machine, that half was left out\n");
    }
}

// A bound socket that either refuses (not listening) or accepts in the kernel and says nothing.
static int dead_end(bool mute, uint16_t *port_p)
{
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof name;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&name, sizeof name), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&name, &bytes), 0);
    if (mute) {
        assert_int_equal(listen(fd, 64), 0);
    }
    *port_p = ntohs(name.sin_port);
    return fd;
}

static void put_first(tcp_offer_t *offer, void *arg)
{
    memmove(offer->addrs + 1, offer->addrs, sizeof offer->addrs[0] * (size_t)offer->n_addrs);
    offer->addrs[0] =
        (tcp_addr_t){.family = AF_INET, .port = *(uint16_t *)arg, .ip = {127, 0, 0, 1}};
    offer->n_addrs++;
}

static void replace_by_two(tcp_offer_t *offer, void *arg)
{
    uint16_t *ports = arg;
    offer->n_addrs = 0;
    put_first(offer, &ports[1]);
    put_first(offer, &ports[0]);
}

// Rank 2's true address comes after n_dead others, one of which belongs to rank 1.
static uint64_t run_dead_ends(int n_mute)
{
    world_t *w = world_new(3);
    int fds[8], n_fds = 0;
    uint16_t port;
    for (int r = 0; r < 3; r++) {
        world_open(w, r, NULL, "the secret");
    }
    for (; n_fds < n_mute; n_fds++) {
        fds[n_fds] = dead_end(true, &port);
        world_readdress(w, 2, put_first, &port);
    }
    world_readdress(w, 2, put_first, &w->domains[1]->ifaces[0].addr.port); // a wrong rank
    fds[n_fds++] = dead_end(false, &port);                                 // refuses
    world_readdress(w, 2, put_first, &port);
    world_attach(w);
    uint64_t before_ns = clock_ns();
    net_link_t *a = world_link(w, 0, 2, LANE_DATA), *b = world_link(w, 2, 0, LANE_DATA);
    world_meet(w, a, b);
    uint64_t took_ns = clock_ns() - before_ns;
    must(a->err.status, &a->err);
    assert_int_equal(door_n_refused(w->domains[1]->door), 1);
    exchange(w, a, b, 100000, false);
    link_close(a);
    link_close(b);
    world_free(w);
    while (n_fds > 0) {
        close(fds[--n_fds]);
    }
    return took_ns;
}

static void unreachable_addresses_are_passed(void **state)
{
    (void)state;
    run_dead_ends(0);                                 // refusals cost nothing
    assert_true(run_dead_ends(1) >= 150 * NS_PER_MS); // silence costs one stagger
    assert_true(run_dead_ends(5) >= 900 * NS_PER_MS); // and gives way when all places are taken
}

static void unreachable_is_an_error_with_all_addresses(void **state)
{
    uint16_t ports[2];
    int fds[2] = {dead_end(false, &ports[0]), dead_end(true, &ports[1])};
    char text[2][64];
    (void)state;

    world_t *w = world_new(2);
    world_open(w, 0, quick, "the secret");
    world_open(w, 1, quick, "the secret");
    world_readdress(w, 1, replace_by_two, ports);
    world_attach(w);
    net_link_t *a = world_link(w, 0, 1, LANE_DATA);
    uint64_t before_ns = clock_ns();
    while (a->err.status == HVD_OK && clock_ns() - before_ns < PATIENCE_MS * NS_PER_MS) {
        world_progress(w);
        nap_us(1000);
    }
    assert_int_equal(a->err.status, HVD_PEER_LOST);
    assert_int_equal(link_send(a, "x", 1), HVD_PEER_LOST);
    assert_true(clock_ns() - before_ns >= 500 * NS_PER_MS);
    snprintf(text[0], sizeof text[0], "127.0.0.1:%u: cannot connect: Connection refused", ports[0]);
    snprintf(text[1], sizeof text[1], "127.0.0.1:%u: no answer", ports[1]);
    assert_non_null(strstr(a->err.text, "rank 1 "));
    assert_non_null(strstr(a->err.text, text[0]));
    assert_non_null(strstr(a->err.text, text[1]));
    err_t err;
    assert_int_equal(health_of(w, 0, &err), HVD_PEER_LOST);
    link_close(a);
    world_free(w);
    close(fds[0]);
    close(fds[1]);
}

static tcp_addr_t v4(uint8_t a, uint8_t b, uint8_t c, uint8_t d)
{
    return (tcp_addr_t){.family = AF_INET, .port = 1, .ip = {a, b, c, d}};
}

static void addresses_are_sorted(void **state)
{
    const tcp_iface_t ifaces[] = {
        {.name = "eth0", .addr = v4(10, 1, 2, 3), .prefix_bits = 20},
        {.name = "lo", .addr = v4(127, 0, 0, 1), .prefix_bits = 8, .is_loopback = true}};
    const tcp_addr_t given[] = {v4(127, 0, 0, 1), v4(10, 1, 16, 1), v4(192, 168, 0, 1),
                                v4(10, 1, 15, 1)};
    const int near[] = {0, 3, 1, 2}, far[] = {3, 1, 2, 0};
    tcp_addr_t addrs[4];
    (void)state;

    for (int same_host = 0; same_host < 2; same_host++) {
        memcpy(addrs, given, sizeof addrs);
        tcp_sort_addrs(addrs, 4, ifaces, 2, same_host);
        for (int i = 0; i < 4; i++) {
            int expected = same_host ? near[i] : far[i];
            assert_memory_equal(addrs[i].ip, given[expected].ip, 4);
        }
    }
}

static void short_offers_are_refused(void **state)
{
    (void)state;
    world_t *w = world_new(2);
    world_open(w, 0, NULL, "the secret");
    const buf_t *buf = &w->addresses[0];
    tcp_offer_t offer;
    err_t err;
    for (size_t n = 0; n < buf->len; n++) {
        uint8_t *copy = malloc(MAX(n, 1)); // its own block, so that reading past it is seen
        assert_non_null(copy);
        memcpy(copy, buf->data, n);
        assert_int_equal(tcp_offer_decode(copy, n, 0, &offer, &err), HVD_PROTOCOL);
        free(copy);
    }
    must(tcp_offer_decode(buf->data, buf->len, 0, &offer, &err), &err);
    assert_int_equal(offer.n_addrs, w->domains[0]->n_ifaces);
    world_free(w);
}

static void unknown_interface_is_named(void **state)
{
    static const char *const knobs[] = {"HOROVOD_GLOO_IFACE=nosuch0", NULL};
    place_t place;
    domain_t *domain;
    err_t err = {0};
    (void)state;

    place_init(&place, 0, 2, knobs, "the secret");
    assert_int_equal(transport_tcp.open(&place.job, &domain, &err), HVD_INVALID_ARGUMENT);
    assert_non_null(strstr(err.text, "nosuch0"));
    assert_non_null(strstr(err.text, "lo"));
    place_free(&place);
}

static void listeners_are_never_wildcards(void **state)
{
    static const char *const all[] = {"HOROVOD_GLOO_IFACE=", NULL};
    static const uint8_t any[16];
    (void)state;

    world_t *w = world_new(2);
    world_open(w, 0, all, "the secret");
    assert_true(w->domains[0]->n_ifaces > 0);
    for (int i = 0; i < w->domains[0]->n_ifaces; i++) {
        const tcp_addr_t *addr = &w->domains[0]->ifaces[i].addr;
        assert_memory_not_equal(addr->ip, any, addr->family == AF_INET ? 4 : 16);
        assert_true(addr->port != 0);
    }
    world_free(w);
}

// --- Who may come in -----------------------------------------------------------------------------

// Rank 0 dials rank 1, which must not take it; both sides must say so in time.
static void expect_refused(world_t *w)
{
    world_attach(w);
    net_link_t *a = world_link(w, 0, 1, LANE_CONTROL), *b = world_link(w, 1, 0, LANE_CONTROL);
    uint64_t deadline_ns = deadline_in_ms(PATIENCE_MS);

    while (a->err.status == HVD_OK || b->err.status == HVD_OK) {
        assert_true(clock_ns() < deadline_ns);
        world_progress(w);
        nap_us(500);
    }
    assert_int_equal(a->err.status, HVD_PEER_LOST);
    assert_non_null(strstr(a->err.text, "127.0.0.1:"));
    assert_non_null(strstr(b->err.text, "rank 0 did not connect"));
    assert_true(door_n_refused(w->domains[1]->door) >= 1);
    assert_int_equal(w->places[1].n_log_lines, 1); // at most one a minute
    assert_non_null(strstr(w->places[1].last_log, "turned away"));
    link_close(a);
    link_close(b);
    world_free(w);
}

static void wrong_secret_is_refused(void **state)
{
    (void)state;
    world_t *w = world_new(2);
    world_open(w, 0, quick, "the secret");
    world_open(w, 1, quick, "another secret");
    expect_refused(w);
}

static void other_token(tcp_offer_t *offer, void *arg)
{
    (void)arg;
    offer->token[0] ^= 1;
}

static void another_process_is_refused(void **state)
{
    (void)state;
    world_t *w = world_new(2);
    world_open(w, 0, quick, "the secret");
    world_open(w, 1, quick, "the secret");
    world_readdress(w, 1, other_token, NULL); // as if the port had belonged to an earlier process
    expect_refused(w);
}

static int knock(const world_t *w, int rank, const void *data, size_t bytes)
{
    struct sockaddr_storage name;
    socklen_t name_bytes = tcp_addr_to_socket(&w->domains[rank]->ifaces[0].addr, &name);
    int fd = socket(name.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&name, name_bytes), 0);
    assert_int_equal(send(fd, data, bytes, MSG_NOSIGNAL), bytes);
    return fd;
}

static void strangers_are_ignored(void **state)
{
    static const char http[] = "GET / HTTP/1.1\r\nHost: example.org\r\n"
                               "User-Agent: nobody in particular\r\n\r\n";
    uint8_t noise[4096];
    int fds[40];
    int n = 0;
    char byte;
    (void)state;

    world_t *w = world_of(2, NULL);
    for (size_t i = 0; i < sizeof noise; i++) {
        noise[i] = stream_byte(99, i);
    }
    for (; n < 30; n++) {
        fds[n] = n % 3 == 0   ? knock(w, 1, http, sizeof http)
                 : n % 3 == 1 ? knock(w, 1, noise, sizeof noise)
                              : knock(w, 1, noise, 10); // too little: waits for its deadline
    }
    net_link_t *a = world_link(w, 0, 1, LANE_DATA), *b = world_link(w, 1, 0, LANE_DATA);
    world_meet(w, a, b);
    must(a->err.status, &a->err);
    exchange(w, a, b, 200000, false);
    assert_int_equal(door_n_refused(w->domains[1]->door), 20);
    uint64_t deadline_ns = deadline_in_ms(PATIENCE_MS);
    while (door_n_refused(w->domains[1]->door) < 30) {
        assert_true(clock_ns() < deadline_ns);
        world_progress(w);
        nap_us(1000);
    }
    assert_int_equal(door_n_strangers(w->domains[1]->door), 0);
    assert_int_equal(w->places[1].n_log_lines, 1);
    exchange(w, a, b, 200000, false);
    while (n > 0) {
        assert_true(recv(fds[--n], &byte, 1, MSG_DONTWAIT) <= 0); // cut without an answer
        close(fds[n]);
    }
    link_close(a);
    link_close(b);
    world_free(w);
}

// Until the other end has closed.
static void expect_cut(world_t *w, int fd)
{
    uint64_t deadline_ns = deadline_in_ms(PATIENCE_MS);
    char byte;
    while (recv(fd, &byte, 1, MSG_DONTWAIT) < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        assert_true(clock_ns() < deadline_ns);
        world_progress(w);
        nap_us(1000);
    }
}

static void too_many_strangers_push_out_the_oldest(void **state)
{
    enum { N = 300 };
    int fds[N];
    (void)state;

    world_t *w = world_of(2, NULL);
    for (int i = 0; i < N; i++) {
        fds[i] = knock(w, 1, "x", 1);
        world_progress(w);
        assert_true(door_n_strangers(w->domains[1]->door) <= 256);
    }
    expect_cut(w, fds[0]);
    assert_true(door_n_strangers(w->domains[1]->door) <= 256);
    net_link_t *a = world_link(w, 0, 1, LANE_DATA), *b = world_link(w, 1, 0, LANE_DATA);
    world_meet(w, a, b);
    must(a->err.status, &a->err);
    for (int i = 0; i < N; i++) {
        close(fds[i]);
    }
    assert_int_equal(w->places[1].n_log_lines, 1);
    link_close(a);
    link_close(b);
    world_free(w);
}

// Whoever listens on the wire can repeat a greeting. It opens a handshake, which then gets nowhere:
// silent ones are cut when their time is over, and the real peer comes in all the same.
static void overheard_greetings_gain_nothing(void **state)
{
    enum { N = 20 };
    uint8_t bytes[HELLO_BYTES];
    int fds[N];
    (void)state;

    world_t *w = world_of(2, NULL);
    hello_t hello = {.role = HELLO_LINK, .lane = LANE_DATA, .encrypted = 0, .from = 0, .to = 1};
    memcpy(hello.job, secure_keys_job(w->places[1].keys), sizeof hello.job);
    memcpy(hello.nonce, w->domains[1]->token, TCP_TOKEN_BYTES);
    hello_encode(&hello, bytes);
    uint64_t started_ns = clock_ns();
    for (int i = 0; i < N; i++) {
        fds[i] = knock(w, 1, bytes, sizeof bytes);
    }
    world_progress(w);
    net_link_t *a = world_link(w, 0, 1, LANE_DATA), *b = world_link(w, 1, 0, LANE_DATA);
    world_meet(w, a, b);
    must(a->err.status, &a->err);
    for (int i = 0; i < N; i++) {
        expect_cut(w, fds[i]);
        close(fds[i]);
    }
    assert_true(clock_ns() - started_ns < 12 * NS_PER_S); // 2 s, and a busy machine
    assert_int_equal(door_n_strangers(w->domains[1]->door), 0);
    exchange(w, a, b, 200000, false);
    link_close(a);
    link_close(b);
    world_free(w);
}

// A rank that was held up in the middle of its greeting is cut meanwhile. It tries again, even if
// it has said its last words by then: it believes in its connection only when it is let in.
static void held_up_rank_tries_again(void **state)
{
    (void)state;

    for (int n_turns = 1; n_turns <= 3; n_turns++) {
        world_t *w = world_of(2, NULL);
        net_link_t *a = world_link(w, 0, 1, LANE_DATA), *b = world_link(w, 1, 0, LANE_DATA);
        uint64_t deadline_ns = deadline_in_ms(PATIENCE_MS);
        while (door_n_strangers(w->domains[1]->door) == 0) {
            assert_true(clock_ns() < deadline_ns);
            transport_tcp.progress(w->domains[0]);
            transport_tcp.progress(w->domains[1]);
        }
        for (int i = 0; i < n_turns; i++) {
            nap_us(2000);
            transport_tcp.progress(w->domains[0]);
            nap_us(2000);
            transport_tcp.progress(w->domains[1]);
        }
        uint64_t until_ns = clock_ns() + DOOR_PATIENCE_NS + DOOR_PATIENCE_NS / 4;
        while (clock_ns() < until_ns) {
            transport_tcp.progress(w->domains[1]);
            nap_us(2000);
        }
        world_meet(w, a, b);
        must(a->err.status, &a->err);
        exchange(w, a, b, 200000, false);
        link_close(a);
        link_close(b);
        world_free(w);
    }
}

static void running_out_of_descriptors_is_survived(void **state)
{
    struct rlimit limit, low;
    int family = AF_INET; // one address: no second attempt may come to help
    (void)state;

    world_t *w = world_new(2);
    world_open(w, 0, NULL, "the secret");
    world_open(w, 1, NULL, "the secret");
    world_readdress(w, 1, keep_family, &family);
    world_attach(w);
    net_link_t *b = world_link(w, 1, 0, LANE_DATA), *a = world_link(w, 0, 1, LANE_DATA);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    int next_fd = dup(0);
    assert_true(next_fd >= 0);
    close(next_fd);
    low = limit;
    low.rlim_cur = (rlim_t)next_fd;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
    uint64_t until_ns = deadline_in_ms(150);
    while (clock_ns() < until_ns) {
        world_progress(w);
        nap_us(1000);
    }
    bool came_in = is_ready(b);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
    assert_false(came_in);
    assert_int_equal(w->places[1].n_log_lines, 1);
    assert_non_null(strstr(w->places[1].last_log, "ulimit -n"));
    world_meet(w, a, b);
    must(a->err.status, &a->err);
    exchange(w, a, b, 1000, false);
    link_close(a);
    link_close(b);
    world_free(w);
}

// A client that has the secret but no business here any more.
static void second_connection_is_refused(void **state)
{
    uint8_t hello_bytes[HELLO_BYTES];
    char byte;
    (void)state;

    world_t *w = world_of(2, NULL);
    net_link_t *a = world_link(w, 0, 1, LANE_DATA), *b = world_link(w, 1, 0, LANE_DATA);
    world_meet(w, a, b);
    must(a->err.status, &a->err);
    hello_t hello = ((tcp_link_t *)a)->conn->hello;
    hello.nonce[15] ^= 1;
    hello_encode(&hello, hello_bytes);
    int fd = knock(w, 1, hello_bytes, sizeof hello_bytes);
    uint64_t deadline_ns = deadline_in_ms(PATIENCE_MS);
    while (door_n_refused(w->domains[1]->door) == 0) {
        assert_true(clock_ns() < deadline_ns);
        world_progress(w);
    }
    assert_true(recv(fd, &byte, 1, 0) <= 0);
    exchange(w, a, b, 100000, false);
    close(fd);
    link_close(a);
    link_close(b);
    world_free(w);
}

// As a rank makes that tries two addresses of a peer.
static greeting_t begin_greeting(const world_t *w, int fd)
{
    greeting_t g = {.fd = fd,
                    .keys = w->places[0].keys,
                    .hello = {.role = HELLO_LINK,
                              .lane = LANE_CONTROL,
                              .encrypted = tcp_encrypts(w->domains[0], 1, LANE_CONTROL),
                              .from = 0,
                              .to = 1}};
    memcpy(g.hello.nonce, w->domains[1]->token, TCP_TOKEN_BYTES);
    assert_int_equal(greeting_prepare(&g, TCP_TOKEN_BYTES, NULL), HVD_OK);
    return g;
}

// Both go on as far as they can, then the rank they call.
static void greet_in_turn(world_t *w, greeting_t *both, hvd_status_t *status)
{
    err_t err;
    for (int i = 0; i < 2; i++) {
        status[i] = status[i] == HVD_IN_PROGRESS ? greeting_step(&both[i], &err) : status[i];
    }
    nap_us(2000);
    for (int i = 0; i < 20 && !(both[0].has_proved && both[1].has_proved); i++) {
        transport_tcp.progress(w->domains[1]);
        nap_us(100);
    }
}

// A rank that was held up itself blames nobody for it: whoever waited at its door meanwhile goes on
// where it was.
static void held_up_door_forgives(void **state)
{
    uint64_t deadline_ns = deadline_in_ms(PATIENCE_MS);
    hvd_status_t status = HVD_IN_PROGRESS;
    err_t err = {0};
    (void)state;

    world_t *w = world_of(2, NULL);
    greeting_t greeting = begin_greeting(w, knock(w, 1, NULL, 0));
    assert_int_equal(greeting_step(&greeting, &err), HVD_IN_PROGRESS);
    while (door_n_strangers(w->domains[1]->door) == 0) {
        assert_true(clock_ns() < deadline_ns);
        transport_tcp.progress(w->domains[1]);
    }
    nap_us((unsigned)((DOOR_PATIENCE_NS + DOOR_PATIENCE_NS / 4) / 1000));
    for (int i = 0; i < 5; i++) { // so far it has got nothing but time
        transport_tcp.progress(w->domains[1]);
        assert_int_equal(door_n_strangers(w->domains[1]->door), 1);
    }
    while (status == HVD_IN_PROGRESS) {
        assert_true(clock_ns() < deadline_ns);
        transport_tcp.progress(w->domains[1]);
        nap_us(200);
        status = greeting_step(&greeting, &err);
    }
    must(status, &err);
    secure_free(greeting.secure);
    close(greeting.fd);
    world_free(w);
}

// On a busy machine the second attempt is through with the handshake before the first is let in.
// Both sides must mean the same one.
static void one_of_two_attempts_is_let_in(void **state)
{
    hvd_status_t status[2] = {HVD_IN_PROGRESS, HVD_IN_PROGRESS};
    uint64_t deadline_ns = deadline_in_ms(PATIENCE_MS);
    (void)state;

    world_t *w = world_of(2, NULL);
    greeting_t both[2] = {begin_greeting(w, knock(w, 1, NULL, 0)),
                          begin_greeting(w, knock(w, 1, NULL, 0))};
    while (!both[0].has_proved || !both[1].has_proved) {
        assert_true(clock_ns() < deadline_ns);
        greet_in_turn(w, both, status);
    }
    assert_int_equal(status[0], HVD_IN_PROGRESS);
    assert_int_equal(status[1], HVD_IN_PROGRESS);
    while (status[0] == HVD_IN_PROGRESS || status[1] == HVD_IN_PROGRESS) {
        assert_true(clock_ns() < deadline_ns);
        transport_tcp.progress(w->domains[1]);
        greet_in_turn(w, both, status);
    }
    int winner = status[0] == HVD_OK ? 0 : 1;
    assert_int_equal(status[winner], HVD_OK);
    assert_int_equal(status[1 - winner], HVD_PEER_LOST);
    struct sockaddr_in name;
    socklen_t bytes = sizeof name;
    const conn_t *kept = w->domains[1]->seats[LANE_CONTROL].kept;
    assert_non_null(kept);
    assert_int_equal(getsockname(both[winner].fd, (struct sockaddr *)&name, &bytes), 0);
    assert_int_equal(kept->remote.port, ntohs(name.sin_port));
    for (int i = 0; i < 2; i++) {
        secure_free(both[i].secure);
        close(both[i].fd);
    }
    world_free(w);
}

static void different_policies_are_told(void **state)
{
    static const char *const always[] = {"HOROVOD_ENCRYPT=always", NULL};
    static const char *const never[] = {"HOROVOD_ENCRYPT=never", NULL};
    err_t err = {0};
    (void)state;

    world_t *w = world_new(2);
    world_open(w, 0, always, "the secret");
    world_open(w, 1, never, "the secret");
    for (int r = 0; r < 2; r++) {
        assert_int_equal(world_attach_one(w, r, &err), HVD_INVALID_ARGUMENT);
        assert_non_null(strstr(err.text, "always"));
        assert_non_null(strstr(err.text, "never"));
        assert_non_null(strstr(err.text, "HOROVOD_ENCRYPT"));
    }
    world_free(w);
}

// --- Coming and going ----------------------------------------------------------------------------

static void dialler_may_come_first(void **state)
{
    char got[6] = "";
    (void)state;

    world_t *w = world_of(2, NULL);
    net_link_t *a = world_link(w, 0, 1, LANE_DATA);
    uint64_t deadline_ns = deadline_in_ms(PATIENCE_MS);
    while (w->domains[1]->seats[0 * N_LANES + LANE_DATA].kept == NULL || !is_ready(a)) {
        assert_true(clock_ns() < deadline_ns);
        world_progress(w);
    }
    while (link_send(a, "early", 5) == 0) {
        assert_true(clock_ns() < deadline_ns);
        world_progress(w);
    }
    nap_us(1000);
    world_progress(w);
    net_link_t *b = world_link(w, 1, 0, LANE_DATA);
    assert_true(is_ready(b));
    assert_int_equal(link_recv(b, got, sizeof got), 5);
    assert_string_equal(got, "early");
    link_close(a);
    link_close(b);
    world_free(w);
}

static void waiting_for_data_has_no_deadline(void **state)
{
    (void)state;
    world_t *w = world_of(2, quick);
    net_link_t *b = world_link(w, 1, 0, LANE_DATA);
    uint64_t until_ns = deadline_in_ms(600);
    while (clock_ns() < until_ns) {
        world_progress(w);
        nap_us(1000);
    }
    assert_int_equal(b->err.status, HVD_OK);
    net_link_t *a = world_link(w, 0, 1, LANE_DATA);
    world_meet(w, a, b);
    must(a->err.status, &a->err);
    exchange(w, a, b, 1000, false);
    link_close(a);
    link_close(b);
    world_free(w);
}

static void last_words_are_read_before_the_end(void **state)
{
    static const char *const policies[][2] = {{"HOROVOD_ENCRYPT=never", NULL},
                                              {"HOROVOD_ENCRYPT=always", NULL}};
    static uint8_t data[600000];
    err_t err = {0};
    (void)state;

    for (int i = 0; i < 2; i++) {
        world_t *w = world_of(2, policies[i]);
        net_link_t *a = world_link(w, 0, 1, LANE_DATA), *b = world_link(w, 1, 0, LANE_DATA);
        world_meet(w, a, b);
        must(a->err.status, &a->err);
        ssize_t n_sent = link_send(a, data, sizeof data);
        assert_true(n_sent > 0);
        link_close(a);
        must(health_of(w, 0, &err), &err); // closed by us: no error
        for (int k = 0; k < 20; k++) {
            nap_us(500);
            world_progress(w);
        }
        must(health_of(w, 1, &err), &err); // there is still something to read
        ssize_t n_got = 0, n;
        while ((n = link_recv(b, data, sizeof data)) > 0 || (n == 0 && n_got < n_sent)) {
            n_got += n;
            world_progress(w);
        }
        assert_int_equal(n_got, n_sent);
        assert_int_equal(n, HVD_PEER_LOST);
        assert_int_equal(health_of(w, 1, &err), HVD_PEER_LOST);
        assert_non_null(strstr(err.text, "rank 0"));
        assert_non_null(strstr(err.text, "127.0.0.1:"));
        link_close(b);
        world_free(w);
    }
}

static world_t *encrypted_pair(net_link_t **a_p, net_link_t **b_p)
{
    static const char *const always[] = {"HOROVOD_ENCRYPT=always", NULL};
    world_t *w = world_of(2, always);
    *a_p = world_link(w, 0, 1, LANE_DATA);
    *b_p = world_link(w, 1, 0, LANE_DATA);
    world_meet(w, *a_p, *b_p);
    must((*a_p)->err.status, &(*a_p)->err);
    return w;
}

// Rank 1 does not read the link, and yet learns how it ended.
static hvd_status_t health_soon(world_t *w, err_t *err)
{
    uint64_t deadline_ns = deadline_in_ms(PATIENCE_MS);
    while (health_of(w, 1, err) == HVD_OK && clock_ns() < deadline_ns) {
        world_progress(w);
        nap_us(100);
    }
    return health_of(w, 1, err);
}

static void end_inside_a_record_is_noticed(void **state)
{
    static const uint8_t head[8] = {100}; // a record of 100 bytes begins, and that is all
    net_link_t *a, *b;
    err_t err = {0};
    (void)state;

    for (size_t kept = 0; kept <= sizeof head; kept += 4) {
        world_t *w = encrypted_pair(&a, &b);
        assert_int_equal(send(((tcp_link_t *)a)->conn->watch.fd, head, kept, MSG_NOSIGNAL), kept);
        link_close(a);
        assert_int_equal(health_soon(w, &err), HVD_PEER_LOST);
        assert_non_null(strstr(err.text, "rank 0"));
        link_close(b);
        world_free(w);
    }
}

static void changed_bytes_kill_the_link(void **state)
{
    static const uint8_t forged[64] = {40}; // a whole record whose tag is not right
    net_link_t *a, *b;
    const void *shown;
    char got[64];
    err_t err = {0};
    (void)state;

    world_t *w = encrypted_pair(&a, &b);
    exchange(w, a, b, 1000, true);
    int fd = ((tcp_link_t *)a)->conn->watch.fd;
    assert_int_equal(send(fd, forged, sizeof forged, MSG_NOSIGNAL), sizeof forged);
    uint64_t deadline_ns = deadline_in_ms(PATIENCE_MS);
    ssize_t n = 0;
    while (n == 0 && clock_ns() < deadline_ns) {
        world_progress(w);
        n = link_peek(b, &shown);
    }
    assert_int_equal(n, HVD_PROTOCOL);
    assert_int_equal(link_recv(b, got, sizeof got), HVD_PROTOCOL);
    assert_int_equal(link_send(b, "x", 1), HVD_PROTOCOL);
    assert_int_equal(health_of(w, 1, &err), HVD_PROTOCOL);
    assert_non_null(strstr(err.text, "rank 0"));
    assert_non_null(strstr(err.text, "does not decrypt"));
    link_close(a);
    link_close(b);
    world_free(w);
}

static void write_all(int fd, const void *data, size_t bytes)
{
    assert_int_equal(write(fd, data, bytes), bytes);
}

// The child is rank 1 of two; it answers, then waits to be killed.
static void child_main(world_t *w, int to_parent, int from_parent, lane_t lane)
{
    uint8_t bytes[4096];
    place_free(&w->places[1]);
    world_open(w, 1, NULL, "the secret");
    write_all(to_parent, w->addresses[1].data, w->addresses[1].len);
    ssize_t n = read(from_parent, bytes, sizeof bytes);
    if (n <= 0) {
        _exit(2);
    }
    buf_clear(&w->addresses[0]);
    buf_append(&w->addresses[0], bytes, (size_t)n);
    world_attach(w);
    net_link_t *link = world_link(w, 1, 0, lane);
    bool spoke = false;
    for (;;) {
        transport_tcp.progress(w->domains[1]);
        spoke = spoke || link_send(link, "here", 4) == 4;
        nap_us(200);
    }
}

static void run_death(lane_t lane)
{
    int up[2], down[2];
    uint8_t bytes[4096];
    char word[8];
    err_t err = {0};
    world_t *w = world_new(2);
    place_init(&w->places[1], 1, 2, NULL, "the secret");
    assert_int_equal(pipe(up), 0);
    assert_int_equal(pipe(down), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        child_main(w, up[1], down[0], lane);
        _exit(1);
    }
    world_open(w, 0, NULL, "the secret");
    ssize_t n = read(up[0], bytes, sizeof bytes);
    assert_true(n > 0);
    buf_append(&w->addresses[1], bytes, (size_t)n);
    write_all(down[1], w->addresses[0].data, w->addresses[0].len);
    world_attach(w);
    net_link_t *link = world_link(w, 0, 1, lane);
    uint64_t deadline_ns = deadline_in_ms(PATIENCE_MS);
    while ((n = link_recv(link, word, 4)) == 0) {
        assert_true(clock_ns() < deadline_ns);
        world_progress(w);
    }
    assert_int_equal(n, 4);
    kill(child, SIGKILL);
    uint64_t killed_ns = clock_ns();
    while (health_of(w, 0, &err) == HVD_OK) {
        assert_true(clock_ns() - killed_ns < NS_PER_S);
        world_progress(w);
        nap_us(100);
    }
    assert_int_equal(err.status, HVD_PEER_LOST);
    assert_non_null(strstr(err.text, "rank 1"));
    assert_int_equal(link_recv(link, word, 4), HVD_PEER_LOST);
    assert_int_equal(waitpid(child, NULL, 0), child);
    link_close(link);
    world_free(w);
    for (int i = 0; i < 2; i++) {
        close(up[i]);
        close(down[i]);
    }
}

static void killed_peer_is_noticed(void **state)
{
    (void)state;
    run_death(LANE_DATA);
    run_death(LANE_CONTROL);
}

// --- Many ----------------------------------------------------------------------------------------

static void forty_peers(void **state)
{
    enum { N = 41 };
    static net_link_t *links[N][N_LANES], *back[N][N_LANES];
    uint64_t deadline_ns = deadline_in_ms(3 * PATIENCE_MS);
    int n_ready = 0;
    (void)state;

    world_t *w = world_of(N, NULL);
    for (int r = 0; r < N - 1; r++) { // the last rank accepts from everybody
        for (lane_t lane = 0; lane < N_LANES; lane++) {
            links[r][lane] = world_link(w, r, N - 1, lane);
            back[r][lane] = r % 2 == 0 ? world_link(w, N - 1, r, lane) : NULL; // others come later
        }
    }
    while (n_ready < (N - 1) * N_LANES) {
        assert_true(clock_ns() < deadline_ns);
        world_progress(w);
        n_ready = 0;
        for (int r = 0; r < N - 1; r++) {
            for (lane_t lane = 0; lane < N_LANES; lane++) {
                must(links[r][lane]->err.status, &links[r][lane]->err);
                n_ready += is_ready(links[r][lane]);
            }
        }
    }
    for (int r = 0; r < N - 1; r++) {
        for (lane_t lane = 0; lane < N_LANES; lane++) {
            if (back[r][lane] == NULL) {
                back[r][lane] = world_link(w, N - 1, r, lane);
            }
            world_meet(w, links[r][lane], back[r][lane]);
            exchange(w, links[r][lane], back[r][lane], 5000, lane == LANE_DATA);
        }
    }
    for (int r = 0; r < N - 1; r++) {
        for (lane_t lane = 0; lane < N_LANES; lane++) {
            link_close(links[r][lane]);
            link_close(back[r][lane]);
        }
    }
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(streams_plain),
        cmocka_unit_test(streams_encrypted),
        cmocka_unit_test(streams_control_is_always_encrypted),
        cmocka_unit_test(streams_tiny_buffers),
        cmocka_unit_test(auto_encrypts_between_hosts),
        cmocka_unit_test(few_links_are_asked_directly),
        cmocka_unit_test(what_lies_inside_needs_no_edge),
        cmocka_unit_test(ipv4_and_ipv6),
        cmocka_unit_test(unreachable_addresses_are_passed),
        cmocka_unit_test(unreachable_is_an_error_with_all_addresses),
        cmocka_unit_test(addresses_are_sorted),
        cmocka_unit_test(short_offers_are_refused),
        cmocka_unit_test(unknown_interface_is_named),
        cmocka_unit_test(listeners_are_never_wildcards),
        cmocka_unit_test(wrong_secret_is_refused),
        cmocka_unit_test(another_process_is_refused),
        cmocka_unit_test(strangers_are_ignored),
        cmocka_unit_test(too_many_strangers_push_out_the_oldest),
        cmocka_unit_test(overheard_greetings_gain_nothing),
        cmocka_unit_test(held_up_rank_tries_again),
        cmocka_unit_test(running_out_of_descriptors_is_survived),
        cmocka_unit_test(second_connection_is_refused),
        cmocka_unit_test(held_up_door_forgives),
        cmocka_unit_test(one_of_two_attempts_is_let_in),
        cmocka_unit_test(different_policies_are_told),
        cmocka_unit_test(dialler_may_come_first),
        cmocka_unit_test(waiting_for_data_has_no_deadline),
        cmocka_unit_test(last_words_are_read_before_the_end),
        cmocka_unit_test(end_inside_a_record_is_noticed),
        cmocka_unit_test(changed_bytes_kill_the_link),
        cmocka_unit_test(killed_peer_is_noticed),
        cmocka_unit_test(forty_peers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
