// SPDX-License-Identifier: Apache-2.0
//
// test_wiretap.c - two ranks whose only way to each other leads through somebody who changes,
// repeats and turns back what they say.
//
// The ranks are TCP domains of one process; the one in the middle owns the address that rank 1 is
// believed to have. One thread drives all three in turn. Whatever is done to the stream, a rank
// gets either exactly what the other sent or an error with a sentence.
#define _GNU_SOURCE
#include "net_world.h"

#include "net/tcp.h"
#include "wire/record.h"

#include <errno.h>
#include <malloc.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#define PATIENCE_MS 8000
#define MESSAGE_BYTES 400
#define N_MESSAGES 3 // each way
#define MEMORY_BYTES (32 * MIB)

enum { TO_SERVER, TO_CLIENT, N_WAYS };

// What is done to one connection: the first that comes.
typedef struct plot {
    int way;         // -1: nothing
    size_t at;       // number of the byte in its direction
    uint8_t change;  // xor
    bool turns_back; // from that byte on, to its own sender
} plot_t;

typedef struct tap {
    int listen_fd;
    tcp_addr_t real; // rank 1
    int fds[N_WAYS]; // where each way leads: to the server, to the client; -1: nobody is there
    buf_t seen[N_WAYS];
    plot_t plot;
    int n_connections;
} tap_t;

typedef struct world {
    place_t places[2];
    domain_t *domains[2];
    net_link_t *links[2];
    uint64_t n_sent[2], n_got[2];
    tap_t tap;
} world_t;

// --- The one in the middle -----------------------------------------------------------------------

static int open_listener(tcp_addr_t *addr_p)
{
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_storage bound;
    socklen_t bytes = sizeof bound;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&name, sizeof name), 0);
    assert_int_equal(listen(fd, 16), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&bound, &bytes), 0);
    *addr_p = tcp_addr_of_socket(&bound);
    return fd;
}

static int call(const tcp_addr_t *addr)
{
    struct sockaddr_storage name;
    socklen_t name_bytes = tcp_addr_to_socket(addr, &name);
    int fd = socket(addr->family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&name, name_bytes), 0);
    return fd;
}

static void tap_hang_up(tap_t *tap)
{
    for (int way = 0; way < N_WAYS; way++) {
        if (tap->fds[way] >= 0) {
            close(tap->fds[way]);
        }
        tap->fds[way] = -1;
    }
}

static void tap_answer(tap_t *tap)
{
    int client = accept4(tap->listen_fd, NULL, NULL, SOCK_CLOEXEC);
    if (client < 0) {
        return;
    }
    tap_hang_up(tap);
    tap->fds[TO_CLIENT] = client;
    tap->fds[TO_SERVER] = call(&tap->real);
    buf_clear(&tap->seen[TO_SERVER]);
    buf_clear(&tap->seen[TO_CLIENT]);
    tap->n_connections++;
}

// Where a byte goes, changed or not.
static void tap_pass(tap_t *tap, int way, uint8_t *data, size_t n)
{
    const plot_t *plot = &tap->plot;
    size_t first = tap->seen[way].len;
    bool is_plotted = plot->way == way && tap->n_connections == 1;
    size_t n_before = is_plotted && plot->at > first ? MIN(plot->at - first, n) : 0;
    assert_non_null(buf_append(&tap->seen[way], data, n));
    if (is_plotted && plot->at >= first && plot->at - first < n) {
        data[plot->at - first] ^= plot->change;
    }
    if (!is_plotted || !plot->turns_back) {
        n_before = n;
    }
    (void)!send(tap->fds[way], data, n_before, MSG_NOSIGNAL);
    (void)!send(tap->fds[!way], data + n_before, n - n_before, MSG_NOSIGNAL);
}

static void tap_move(tap_t *tap)
{
    uint8_t data[4096];
    tap_answer(tap);
    for (int way = 0; way < N_WAYS && tap->fds[TO_CLIENT] >= 0; way++) {
        ssize_t n = recv(tap->fds[!way], data, sizeof data, MSG_DONTWAIT);
        if (n > 0) {
            tap_pass(tap, way, data, (size_t)n);
        } else if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) {
            tap_hang_up(tap); // one side has gone: so does the other
        }
    }
}

// --- The ranks -----------------------------------------------------------------------------------

static void world_open(world_t *w, const char *encrypt, plot_t plot)
{
    const char *const knobs[] = {encrypt, NULL};
    buf_t addresses[2] = {{0}, {0}};
    tcp_offer_t offer;
    err_t err = {0};
    *w = (world_t){.tap = {.fds = {-1, -1}, .plot = plot}};
    for (int r = 0; r < 2; r++) {
        place_init(&w->places[r], r, 2, knobs, "the secret");
        must(transport_tcp.open(&w->places[r].job, &w->domains[r], &err), &err);
        must(transport_tcp.address(w->domains[r], &addresses[r], &err), &err);
    }
    // Rank 0 dials, and is told a wrong number.
    must(tcp_offer_decode(addresses[1].data, addresses[1].len, 1, &offer, &err), &err);
    w->tap.real = offer.addrs[0];
    offer.n_addrs = 1;
    w->tap.listen_fd = open_listener(&offer.addrs[0]);
    buf_clear(&addresses[1]);
    tcp_offer_encode(&offer, &addresses[1]);
    const uint8_t *data[2] = {addresses[0].data, addresses[1].data};
    size_t bytes[2] = {addresses[0].len, addresses[1].len};
    for (int r = 0; r < 2; r++) {
        must(transport_tcp.attach(w->domains[r], data, bytes, &err), &err);
        must(transport_tcp.connect(w->domains[r], !r, LANE_DATA, &w->links[r], &err), &err);
    }
    buf_free(&addresses[0]);
    buf_free(&addresses[1]);
}

static void world_close(world_t *w)
{
    for (int r = 0; r < 2; r++) {
        link_close(w->links[r]);
        transport_tcp.close(w->domains[r]);
        place_free(&w->places[r]);
    }
    tap_hang_up(&w->tap);
    close(w->tap.listen_fd);
    buf_free(&w->tap.seen[TO_SERVER]);
    buf_free(&w->tap.seen[TO_CLIENT]);
}

static void world_move(world_t *w)
{
    tap_move(&w->tap);
    for (int r = 0; r < 2; r++) {
        transport_tcp.progress(w->domains[r]);
    }
}

// Sends and receives on one side; what arrives must be what was sent, byte for byte. Both go on
// talking: a length that was made greater must not be able to wait for ever.
static bool talk(world_t *w, int r)
{
    net_link_t *link = w->links[r];
    uint8_t data[MESSAGE_BYTES];
    for (size_t i = 0; i < sizeof data; i++) {
        data[i] = stream_byte((uint64_t)r, w->n_sent[r] + i);
    }
    ssize_t n = link_send(link, data, sizeof data);
    w->n_sent[r] += n > 0 ? (uint64_t)n : 0;
    n = link_recv(link, data, sizeof data);
    for (ssize_t i = 0; i < n; i++) {
        if (data[i] != stream_byte((uint64_t)!r, w->n_got[r]++)) {
            return false;
        }
    }
    return true;
}

typedef enum outcome { WORKED, REFUSED, WRONG_DATA } outcome_t;

// Until both have enough, one has an error, or the plotted connection has been given up for a
// new one.
static outcome_t world_run(world_t *w)
{
    uint64_t deadline_ns = deadline_in_ms(PATIENCE_MS);
    const uint64_t total = MESSAGE_BYTES * N_MESSAGES;
    while (w->n_got[0] < total || w->n_got[1] < total) {
        assert_true(clock_ns() < deadline_ns);
        world_move(w);
        if (!talk(w, 0) || !talk(w, 1)) {
            return WRONG_DATA;
        }
        for (int r = 0; r < 2; r++) {
            const err_t *err = &w->links[r]->err;
            if (err->status != HVD_OK) {
                assert_true(err->status == HVD_PROTOCOL || err->status == HVD_PEER_LOST);
                assert_non_null(strstr(err->text, r == 0 ? "rank 1" : "rank 0"));
                return REFUSED;
            }
        }
        if (w->tap.n_connections > 0 && w->tap.fds[TO_CLIENT] < 0) {
            return REFUSED;
        }
    }
    return WORKED;
}

// --- Tests ---------------------------------------------------------------------------------------

// How many bytes an honest conversation of N_MESSAGES has in each direction.
static void measure(const char *encrypt, size_t n_bytes[N_WAYS])
{
    world_t w;
    world_open(&w, encrypt, (plot_t){.way = -1});
    assert_int_equal(world_run(&w), WORKED);
    assert_int_equal(w.tap.n_connections, 1);
    for (int i = 0; i < 50; i++) {
        tap_move(&w.tap); // what is still under way
    }
    bool is_encrypted = ((tcp_link_t *)w.links[0])->conn->secure != NULL;
    for (int way = 0; way < N_WAYS; way++) {
        uint64_t n_more = w.n_sent[way] / MESSAGE_BYTES - N_MESSAGES;
        n_bytes[way] = w.tap.seen[way].len -
                       n_more * (is_encrypted ? record_bytes(MESSAGE_BYTES) : MESSAGE_BYTES);
    }
    world_close(&w);
}

static outcome_t run_plot(const char *encrypt, plot_t plot)
{
    world_t w;
    world_open(&w, encrypt, plot);
    outcome_t outcome = world_run(&w);
    world_close(&w);
    return outcome;
}

// The version in the header of the server's first TLS record, which every reader has to ignore.
static bool means_nothing(int way, size_t at)
{
    return way == TO_CLIENT && at == 2;
}

// Every byte of the hello, of the handshake and of the records, one conversation each.
static void no_changed_bit_gets_through(void **state)
{
    size_t n_bytes[N_WAYS];
    (void)state;

    measure("HOROVOD_ENCRYPT=always", n_bytes);
    for (int way = 0; way < N_WAYS; way++) {
        for (size_t at = 0; at < n_bytes[way]; at++) {
            plot_t plot = {.way = way, .at = at, .change = (uint8_t)(1u << (at * 5 + 1) % 8)};
            outcome_t expected = means_nothing(way, at) ? WORKED : REFUSED;
            if (run_plot("HOROVOD_ENCRYPT=always", plot) != expected) {
                fail_msg("a change of byte %zu of %zu went unnoticed, way %d", at, n_bytes[way],
                         way);
            }
        }
    }
}

// So that the test above can fail: without encryption the last bytes are tensors, and unprotected.
static void without_encryption_they_do(void **state)
{
    size_t n_bytes[N_WAYS];
    (void)state;

    measure("HOROVOD_ENCRYPT=never", n_bytes);
    for (int way = 0; way < N_WAYS; way++) {
        plot_t plot = {.way = way, .at = n_bytes[way] - 10, .change = 1};
        assert_int_equal(run_plot("HOROVOD_ENCRYPT=never", plot), WRONG_DATA);
    }
}

static void what_is_turned_back_is_refused(void **state)
{
    size_t n_bytes[N_WAYS];
    (void)state;

    measure("HOROVOD_ENCRYPT=always", n_bytes);
    for (int way = 0; way < N_WAYS; way++) {
        for (size_t at = 0; at < n_bytes[way]; at += n_bytes[way] / 12) {
            plot_t plot = {.way = way, .at = at, .turns_back = true};
            assert_int_equal(run_plot("HOROVOD_ENCRYPT=always", plot), REFUSED);
        }
    }
}

// Until the stranger has been cut.
static void expect_cut(world_t *w, int fd)
{
    uint64_t deadline_ns = deadline_in_ms(PATIENCE_MS);
    uint8_t data[4096];
    ssize_t n;
    while ((n = recv(fd, data, sizeof data, MSG_DONTWAIT)) != 0 &&
           (n > 0 || errno == EAGAIN || errno == EWOULDBLOCK)) {
        assert_true(clock_ns() < deadline_ns);
        world_move(w);
    }
    close(fd);
}

static void say_again(world_t *w, const buf_t *said)
{
    uint64_t n_foreign = door_n_refused(w->domains[1]->door);
    int fd = call(&w->tap.real);
    assert_int_equal(send(fd, said->data, said->len, MSG_NOSIGNAL), said->len);
    expect_cut(w, fd);
    assert_int_equal(door_n_refused(w->domains[1]->door), n_foreign + 1);
}

// A whole conversation, said again to the same process: while the link is there, and when its place
// is free.
static void what_was_overheard_is_of_no_use(void **state)
{
    world_t w;
    err_t err = {0};
    (void)state;

    world_open(&w, "HOROVOD_ENCRYPT=always", (plot_t){.way = -1});
    assert_int_equal(world_run(&w), WORKED);
    buf_t said[N_WAYS] = {{0}, {0}};
    for (int way = 0; way < N_WAYS; way++) {
        put_bytes(&said[way], w.tap.seen[way].data, w.tap.seen[way].len);
        say_again(&w, &said[way]);
    }
    must(w.links[1]->err.status, &w.links[1]->err);

    for (int r = 0; r < 2; r++) {
        link_close(w.links[r]);
        w.links[r] = NULL;
    }
    tap_hang_up(&w.tap);
    must(transport_tcp.connect(w.domains[1], 0, LANE_DATA, &w.links[1], &err), &err);
    for (int way = 0; way < N_WAYS; way++) {
        say_again(&w, &said[way]);
        buf_free(&said[way]);
    }
    assert_null(((tcp_link_t *)w.links[1])->conn);
    must(transport_tcp.connect(w.domains[0], 1, LANE_DATA, &w.links[0], &err), &err);
    memset(w.n_got, 0, sizeof w.n_got);
    memset(w.n_sent, 0, sizeof w.n_sent);
    w.tap.n_connections = 0;
    assert_int_equal(world_run(&w), WORKED);
    world_close(&w);
}

// A real greeting, then lengths that would need gigabytes. None of it is believed.
static void great_claims_take_no_memory(void **state)
{
    static const uint8_t claims[][12] = {
        {0x16, 3, 1, 0xff, 0xff, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff},
        {0x16, 3, 1, 0x40, 0x00, 1, 0x00, 0x3f, 0xfc},
        {0xff, 0xff, 0xff, 0x7f, 0, 0, 0, 0},
        {0x17, 3, 3, 0xff, 0xff},
    };
    enum { N = 1000 };
    world_t w;
    (void)state;

    world_open(&w, "HOROVOD_ENCRYPT=always", (plot_t){.way = -1});
    hello_t hello = {.role = HELLO_LINK, .lane = LANE_DATA, .encrypted = 1, .from = 0, .to = 1};
    uint8_t said[HELLO_BYTES + sizeof claims[0]];
    memcpy(hello.job, secure_keys_job(w.places[1].keys), sizeof hello.job);
    memcpy(hello.nonce, w.domains[1]->token, TCP_TOKEN_BYTES);
    hello_encode(&hello, said);
    size_t before = mallinfo2().uordblks, most = before;
    for (int i = 0; i < N; i++) {
        memcpy(said + HELLO_BYTES, claims[i % (int)N_ELEMENTS(claims)], sizeof claims[0]);
        int fd = call(&w.tap.real);
        assert_int_equal(send(fd, said, sizeof said, MSG_NOSIGNAL), sizeof said);
        transport_tcp.progress(w.domains[1]);
        most = MAX(most, mallinfo2().uordblks);
        expect_cut(&w, fd);
    }
    assert_true(most - before < MEMORY_BYTES);
    assert_true(w.places[1].n_log_lines <= 1); // a minute
    assert_int_equal(world_run(&w), WORKED);
    world_close(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_changed_bit_gets_through),
        cmocka_unit_test(without_encryption_they_do),
        cmocka_unit_test(what_is_turned_back_is_refused),
        cmocka_unit_test(what_was_overheard_is_of_no_use),
        cmocka_unit_test(great_claims_take_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
