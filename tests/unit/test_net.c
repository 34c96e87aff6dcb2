// SPDX-License-Identifier: Apache-2.0
//
// test_net.c - all transports of a context: choice, lifelines, sleeping, and the hook.
//
// Whole contexts live side by side in this process; boot's part, carrying bytes between ranks, is
// done by hand. The rank that must die is a forked child. All traffic is on loopback.
#define _GNU_SOURCE
#include "net_world.h"

#include "net/sleeper.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define PATIENCE_MS 8000
#define LOST_MS 4000 // a sleep that lasts this long missed its wake-up

typedef struct world {
    int size;
    const int *host_of;
    const peers_t *peers;
    place_t places[MAX_PLACES];
    net_t *nets[MAX_PLACES];
    buf_t addresses[MAX_PLACES];
    uint8_t attached[MAX_PLACES];
} world_t;

static const char *const only_tcp[] = {"HOROVOD_TRANSPORTS=tcp", NULL};

static world_t *world_new(int size)
{
    world_t *w = calloc(1, sizeof *w);
    assert_non_null(w);
    w->size = size;
    w->host_of = one_host;
    return w;
}

static void world_open(world_t *w, int rank, const char *const *knobs)
{
    err_t err = {0};
    place_init(&w->places[rank], rank, w->size, knobs, "the secret");
    w->places[rank].job.host_of = w->host_of;
    w->places[rank].job.peers = w->peers;
    must(net_open(&w->places[rank].job, &w->nets[rank], &err), &err);
    must(net_address(w->nets[rank], &w->addresses[rank], &err), &err);
}

static hvd_status_t attach_one(world_t *w, int rank, err_t *err)
{
    const uint8_t *data[MAX_PLACES];
    size_t bytes[MAX_PLACES];
    for (int r = 0; r < w->size; r++) {
        data[r] = w->addresses[r].data;
        bytes[r] = w->addresses[r].len;
    }
    return net_attach(w->nets[rank], data, bytes, err);
}

static void world_settle(world_t *w)
{
    err_t err = {0};
    for (int r = 0; r < w->size; r++) {
        must(attach_one(w, r, &err), &err);
        w->attached[r] = net_attached(w->nets[r]);
    }
    for (int r = 0; r < w->size; r++) {
        must(net_settle(w->nets[r], w->attached, &err), &err);
    }
}

static world_t *world_of(int size, const char *const *knobs)
{
    world_t *w = world_new(size);
    for (int r = 0; r < size; r++) {
        world_open(w, r, knobs);
    }
    world_settle(w);
    return w;
}

static void world_free(world_t *w)
{
    for (int r = 0; r < w->size; r++) {
        net_close(w->nets[r]);
        if (w->places[r].keys != NULL) {
            place_free(&w->places[r]);
        }
        buf_free(&w->addresses[r]);
    }
    free(w);
}

static void world_progress(world_t *w)
{
    for (int r = 0; r < w->size; r++) {
        net_progress(w->nets[r]);
    }
}

static net_link_t *link_of(world_t *w, int from, int to, lane_t lane)
{
    err_t err = {0};
    net_link_t *link = net_link(w->nets[from], to, lane, &err);
    if (link == NULL) {
        fail_msg("no link: %s", err.text);
    }
    return link;
}

// Sends `bytes` from one side and takes them from the other.
static void pass(world_t *w, net_link_t *a, net_link_t *b, size_t bytes)
{
    uint8_t out[512], in[512];
    size_t sent = 0, received = 0;
    uint64_t deadline_ns = deadline_in_ms(PATIENCE_MS);
    while (received < bytes) {
        assert_true(clock_ns() < deadline_ns);
        size_t n_out = MIN(sizeof out, bytes - sent);
        for (size_t i = 0; i < n_out; i++) {
            out[i] = stream_byte(7, sent + i);
        }
        ssize_t n = link_send(a, out, n_out);
        assert_true(n >= 0);
        sent += (size_t)n;
        n = link_recv(b, in, sizeof in);
        assert_true(n >= 0);
        for (ssize_t i = 0; i < n; i++) {
            assert_int_equal(in[i], stream_byte(7, received + (size_t)i));
        }
        received += (size_t)n;
        world_progress(w);
    }
}

// --- Choice --------------------------------------------------------------------------------------

static void a_rank_reaches_itself(void **state)
{
    static uint8_t big[2 * MIB];
    const void *data;
    (void)state;

    world_t *w = world_of(1, NULL);
    net_link_t *link = link_of(w, 0, 0, LANE_DATA);
    assert_string_equal(link->transport, "self");
    assert_ptr_equal(link, link_of(w, 0, 0, LANE_DATA));
    assert_ptr_not_equal(link, link_of(w, 0, 0, LANE_CONTROL));
    pass(w, link, link, 100000);
    ssize_t n = link_send(link, big, sizeof big);
    assert_true(n > 0 && n < (ssize_t)sizeof big);
    assert_int_equal(link_send(link, big, 1), 0);
    assert_int_equal(link_peek(link, &data), n);
    link_consume(link, (size_t)n);
    assert_int_equal(link_send(link, big, 1), 1);
    world_free(w);
}

static void unknown_transport_is_an_error(void **state)
{
    static const char *const knobs[] = {"HOROVOD_TRANSPORTS=tcp,pigeon", NULL};
    place_t place;
    net_t *net = NULL;
    err_t err = {0};
    (void)state;

    place_init(&place, 0, 2, knobs, "the secret");
    assert_int_equal(net_open(&place.job, &net, &err), HVD_INVALID_ARGUMENT);
    assert_null(net);
    assert_non_null(strstr(err.text, "\"pigeon\""));
    assert_non_null(strstr(err.text, "self, shm, ofi, tcp"));
    place_free(&place);
}

static void knob_restricts_transports(void **state)
{
    char why[256];
    (void)state;

    world_t *w = world_of(2, only_tcp);
    assert_string_equal(net_transport_name(w->nets[0], 1, why, sizeof why), "tcp");
    assert_string_equal(net_transport_name(w->nets[0], 0, why, sizeof why), "self");
    assert_null(net_domain(w->nets[0], &transport_shm));
    assert_non_null(net_domain(w->nets[0], &transport_tcp));
    pass(w, link_of(w, 0, 1, LANE_DATA), link_of(w, 1, 0, LANE_DATA), 50000);
    pass(w, link_of(w, 1, 0, LANE_CONTROL), link_of(w, 0, 1, LANE_CONTROL), 5000);
    assert_null(net_link(w->nets[0], 2, LANE_DATA, &(err_t){0}));
    world_free(w);
}

static void no_transport_is_explained(void **state)
{
    static const char *const only_shm[] = {"HOROVOD_TRANSPORTS=shm", NULL};
    static const int two_hosts[] = {0, 1};
    char why[256];
    err_t err = {0};
    (void)state;

    world_t *w = world_new(2);
    for (int r = 0; r < 2; r++) {
        place_init(&w->places[r], r, 2, only_shm, "the secret");
        w->places[r].job.host_of = two_hosts;
        must(net_open(&w->places[r].job, &w->nets[r], &err), &err);
        must(net_address(w->nets[r], &w->addresses[r], &err), &err);
    }
    world_settle(w);
    assert_string_equal(net_transport_name(w->nets[0], 1, why, sizeof why), "none");
    assert_null(net_link(w->nets[0], 1, LANE_DATA, &err));
    assert_int_equal(err.status, HVD_PEER_LOST);
    assert_non_null(strstr(err.text, "shm: "));
    assert_non_null(strstr(err.text, "tcp: not in HOROVOD_TRANSPORTS"));
    world_free(w);
}

// Ranks with different knobs still agree, by the order of the lower one.
static void choice_is_symmetric(void **state)
{
    static const char *const orders[][2] = {{"HOROVOD_TRANSPORTS=tcp,shm", NULL},
                                            {"HOROVOD_TRANSPORTS=shm,tcp", NULL},
                                            {NULL, NULL},
                                            {"HOROVOD_TRANSPORTS=tcp", NULL}};
    (void)state;

    for (size_t i = 0; i < N_ELEMENTS(orders); i++) {
        for (size_t k = 0; k < N_ELEMENTS(orders); k++) {
            world_t *w = world_new(2);
            world_open(w, 0, orders[i]);
            world_open(w, 1, orders[k]);
            world_settle(w);
            const char *name = net_transport_name(w->nets[0], 1, NULL, 0);
            assert_string_equal(name, net_transport_name(w->nets[1], 0, NULL, 0));
            if (i == 0 || i == 3 || k == 3) {
                assert_string_equal(name, "tcp");
            }
            pass(w, link_of(w, 0, 1, LANE_DATA), link_of(w, 1, 0, LANE_DATA), 3000);
            world_free(w);
        }
    }
}

// A rank that says it could not attach is not reached that way, by anybody.
static void unattached_transports_are_not_used(void **state)
{
    static const char *const left[] = {"tcp", "none"}; // without shm, then without tcp too
    err_t err = {0};
    char why[256];
    (void)state;

    for (int i = 0; i < 2; i++) {
        world_t *w = world_new(2);
        world_open(w, 0, NULL);
        world_open(w, 1, NULL);
        for (int r = 0; r < 2; r++) {
            must(attach_one(w, r, &err), &err);
            w->attached[r] = net_attached(w->nets[r]);
        }
        assert_true(w->attached[1] & 1u << 3); // bits are rows: self, shm, ofi, tcp
        w->attached[1] &= i == 0 ? 1u << 0 | 1u << 3 : 1u << 0;
        for (int r = 0; r < 2; r++) {
            must(net_settle(w->nets[r], w->attached, &err), &err);
            assert_string_equal(net_transport_name(w->nets[r], 1 - r, why, sizeof why), left[i]);
            assert_non_null(strstr(why, "shm: "));
            assert_string_equal(net_transport_name(w->nets[r], r, NULL, 0), "self");
        }
        world_free(w);
    }
}

// --- Encryption ----------------------------------------------------------------------------------

// Which ranks have the provider, on which hosts they are, and who says that tensors travel
// unencrypted: the lowest rank that really sends them to another host so, once in a job.
static void unencrypted_links_are_told(void **state)
{
    static const char *const with[] = {"HOROVOD_OFI_PROVIDER=tcp", NULL};
    static const char *const meant[] = {"HOROVOD_OFI_PROVIDER=tcp", "HOROVOD_ENCRYPT=never", NULL};
    static const char *const last[] = {"HOROVOD_OFI_PROVIDER=tcp", "HOROVOD_TRANSPORTS=tcp,ofi",
                                       NULL};
    static const struct {
        const char *const *knobs[4];
        int host_of[4];
        int told_by; // -1: nobody
    } rows[] = {
        {{with, with, with, with}, {0, 0, 1, 1}, 0},
        {{NULL, with, with, with}, {0, 1, 2, 3}, 1},
        {{NULL, NULL, with, with}, {0, 0, 1, 2}, 2},
        {{with, with, with, with}, {0, 1, 1, 1}, 0},
        {{with, with, NULL, NULL}, {0, 0, 1, 1}, -1},
        {{with, NULL, NULL, NULL}, {0, 1, 2, 3}, -1},
        {{with, with, with, with}, {0, 0, 0, 0}, -1},
        {{last, with, with, NULL}, {0, 1, 1, 2}, -1},
        {{meant, meant, meant, meant}, {0, 0, 1, 1}, -1},
    };
    (void)state;

    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        world_t *w = world_new(4);
        w->host_of = rows[i].host_of;
        for (int r = 0; r < 4; r++) {
            world_open(w, r, rows[i].knobs[r]);
        }
        world_settle(w);
        for (int r = 0; r < 4; r++) {
            const char *said = strstr(w->places[r].last_log, "libfabric (tcp), which does not enc");
            assert_int_equal(said != NULL, r == rows[i].told_by);
        }
        world_free(w);
    }
}

static void broken_addresses_are_refused(void **state)
{
    err_t err = {0};
    (void)state;

    world_t *w = world_new(2);
    world_open(w, 0, only_tcp);
    world_open(w, 1, only_tcp);
    size_t whole = w->addresses[1].len;
    for (size_t n = 0; n < whole; n++) {
        world_t *reader = world_new(2);
        world_open(reader, 0, only_tcp);
        buf_append(&reader->addresses[1], w->addresses[1].data, MAX(n, 1));
        reader->addresses[1].len = n;
        assert_int_equal(attach_one(reader, 0, &err), HVD_PROTOCOL);
        assert_non_null(strstr(err.text, "rank 1"));
        world_free(reader);
    }
    world_free(w);
}

// Whether rank 0 takes cores to be scarce; every rank says of its cores what rank 0 says.
static bool finds_cores_scarce(int size, const int *host_of, const peers_t *peers)
{
    err_t err = {0};
    world_t *w = world_new(size);
    w->host_of = host_of;
    w->peers = peers;
    world_open(w, 0, only_tcp);
    for (int r = 1; r < size; r++) {
        buf_append(&w->addresses[r], w->addresses[0].data, w->addresses[0].len);
    }
    must(attach_one(w, 0, &err), &err);
    bool scarce = net_oversubscribed(w->nets[0]);
    world_free(w);
    return scarce;
}

static void oversubscription_counts_cores(void **state)
{
    cpu_set_t cpus;
    int own_host[MAX_PLACES];
    peer_id_t one_kernel[MAX_PLACES] = {0}, own_kernel[MAX_PLACES] = {0};
    (void)state;

    assert_int_equal(sched_getaffinity(0, sizeof cpus, &cpus), 0);
    int n_cpus = CPU_COUNT(&cpus);
    for (int r = 0; r < MAX_PLACES; r++) {
        own_host[r] = r;
        one_kernel[r].kernel = 7;
        own_kernel[r].kernel = (uint64_t)r;
    }
    for (int extra = 0; extra < 2; extra++) {
        int size = MAX(n_cpus + extra, 2);
        if (size > MAX_PLACES) {
            print_message("note: too many cores for this test, left out\n");
            return;
        }
        peers_t containers = {.size = size, .host_of = own_host, .of = one_kernel};
        peers_t machines = {.size = size, .host_of = own_host, .of = own_kernel};
        assert_int_equal(finds_cores_scarce(size, one_host, NULL), size > n_cpus);
        assert_int_equal(finds_cores_scarce(size, own_host, &containers), size > n_cpus);
        assert_int_equal(finds_cores_scarce(size, own_host, &machines), n_cpus < 1);
    }
}

// --- Lifelines -----------------------------------------------------------------------------------

static void hand_over(int fd, const void *mine, size_t bytes, buf_t *theirs)
{
    uint8_t data[8192];
    assert_int_equal(write(fd, mine, bytes), bytes);
    ssize_t n = read(fd, data, sizeof data);
    assert_true(n > 0);
    buf_clear(theirs);
    buf_append(theirs, data, (size_t)n);
}

// One of two ranks in processes of their own; `fd` leads to the other.
static void meet_other(world_t *w, int rank, int fd)
{
    static const char *const only_shm[] = {"HOROVOD_TRANSPORTS=shm", NULL};
    buf_t answer = {0};
    err_t err = {0};
    world_open(w, rank, only_shm);
    hand_over(fd, w->addresses[rank].data, w->addresses[rank].len, &w->addresses[1 - rank]);
    must(attach_one(w, rank, &err), &err);
    w->attached[rank] = net_attached(w->nets[rank]);
    hand_over(fd, &w->attached[rank], 1, &answer);
    w->attached[1 - rank] = answer.data[0];
    buf_free(&answer);
    must(net_settle(w->nets[rank], w->attached, &err), &err);
}

// Drives this rank for a while, asleep when there is nothing to do.
static hvd_status_t drive_for(net_t *net, int64_t ms, int *peer_p, err_t *err)
{
    uint64_t deadline_ns = deadline_in_ms(ms);
    hvd_status_t status = HVD_OK;
    while (clock_ns() < deadline_ns &&
           (status = net_health(net, LANE_CONTROL, peer_p, err)) == HVD_OK) {
        unsigned ticket = net_before_sleep(net);
        if (net_progress(net) == 0) {
            net_sleep(net, ticket, deadline_ns);
        }
        net_after_sleep(net);
        net_progress(net);
    }
    return status;
}

static void run_lifeline(int dying)
{
    int fds[2], lost = -1;
    err_t err = {0};
    char name[16];
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, fds), 0);
    world_t *w = world_new(2);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        meet_other(w, dying, fds[1]);
        drive_for(w->nets[dying], 10000, &lost, &err);
        _exit(0);
    }
    meet_other(w, 1 - dying, fds[0]);
    must(drive_for(w->nets[1 - dying], 300, &lost, &err), &err); // long enough to be connected
    kill(child, SIGKILL);
    uint64_t killed_ns = clock_ns();
    assert_int_equal(drive_for(w->nets[1 - dying], 3000, &lost, &err), HVD_PEER_LOST);
    assert_int_equal(lost, dying);
    assert_true(clock_ns() - killed_ns < NS_PER_S);
    snprintf(name, sizeof name, "rank %d", dying);
    assert_non_null(strstr(err.text, name));
    assert_int_equal(waitpid(child, NULL, 0), child);
    world_free(w);
    close(fds[0]);
    close(fds[1]);
}

static void lifeline_tells_of_a_killed_process(void **state)
{
    (void)state;
    run_lifeline(1);
    run_lifeline(0);
}

// --- Sleeping ------------------------------------------------------------------------------------

typedef struct stress {
    sleeper_t *sleeper;
    atomic_uint word;
    bool shared;
    int pipe_out;
    uint64_t seed;
    int n_rings;
    atomic_int by_word, by_wake, by_pipe; // made so far
} stress_t;

static void random_pause(uint64_t *random)
{
    uint64_t r = test_random(random);
    if (r % 4 == 0) {
        nap_us((unsigned)(r >> 8) % 120);
    }
    for (unsigned i = 0; i < (r >> 20) % 400; i++) {
        cpu_relax();
    }
}

static void *ring_with_word(void *arg)
{
    stress_t *s = arg;
    uint64_t random = s->seed;
    for (int i = 0; i < s->n_rings; i++) {
        random_pause(&random);
        atomic_fetch_add(&s->by_word, 1);
        s->shared ? wake_ring(&s->word) : sleeper_wake(s->sleeper);
    }
    return NULL;
}

static void *ring_with_wake(void *arg)
{
    stress_t *s = arg;
    uint64_t random = s->seed + 1;
    for (int i = 0; i < s->n_rings; i++) {
        random_pause(&random);
        atomic_fetch_add(&s->by_wake, 1);
        sleeper_wake(s->sleeper);
    }
    return NULL;
}

static void *ring_with_pipe(void *arg)
{
    stress_t *s = arg;
    uint64_t random = s->seed + 2;
    for (int i = 0; i < s->n_rings; i++) {
        random_pause(&random);
        if (write(s->pipe_out, "x", 1) != 1) {
            return arg;
        }
    }
    return NULL;
}

static int drain(int fd)
{
    char bytes[256];
    ssize_t n = read(fd, bytes, sizeof bytes);
    return n > 0 ? (int)n : 0;
}

// Sleeps until all rings have been seen. Each ring by itself must end a sleep; none may be lost.
static void consume_rings(stress_t *s, int total, int pipe_in)
{
    int seen = 0;
    uint64_t random = s->seed + 3;
    while (seen < total) {
        random_pause(&random);
        unsigned ticket = sleeper_announce(s->sleeper);
        s->by_pipe += drain(pipe_in);
        int now = s->by_word + s->by_wake + s->by_pipe;
        if (now == seen) {
            uint64_t before_ns = clock_ns();
            sleeper_sleep(s->sleeper, ticket, before_ns + LOST_MS * NS_PER_MS);
            assert_true(clock_ns() - before_ns < (LOST_MS - 100) * NS_PER_MS);
        }
        sleeper_end(s->sleeper);
        seen = now;
    }
    assert_int_equal(seen, total);
}

typedef void *(*ring_fn)(void *arg);

static void run_stress(bool shared, const ring_fn *rings, int n_sources, int n_rings)
{
    pthread_t threads[3];
    int fds[2];
    err_t err = {0};
    stress_t s = {.shared = shared, .seed = 12345, .n_rings = n_rings};
    assert_int_equal(pipe(fds), 0);
    fcntl(fds[0], F_SETFL, O_NONBLOCK);
    s.pipe_out = fds[1];
    must(sleeper_new(&s.sleeper, &err), &err);
    must(sleeper_watch(s.sleeper, fds[0], &err), &err);
    if (shared) {
        must(sleeper_share(s.sleeper, &s.word, &err), &err);
    }
    for (int i = 0; i < n_sources; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, rings[i], &s), 0);
    }
    consume_rings(&s, n_sources * n_rings, fds[0]);
    for (int i = 0; i < n_sources; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    }
    uint64_t before_ns = clock_ns();
    sleeper_free(s.sleeper);
    assert_true(clock_ns() - before_ns < NS_PER_S);
    close(fds[0]);
    close(fds[1]);
}

static const ring_fn all_rings[] = {ring_with_word, ring_with_wake, ring_with_pipe};

static void no_wakeup_is_lost(void **state)
{
    (void)state;
    run_stress(false, all_rings, 3, 4000);
    run_stress(true, all_rings, 3, 4000);
}

// One source at a time, so that nothing else can cover for a lost wake-up.
static void each_source_wakes_by_itself(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        run_stress(false, &all_rings[i], 1, 3000);
        run_stress(true, &all_rings[i], 1, 3000);
    }
}

typedef struct late {
    sleeper_t *sleeper;
    unsigned ticket;
    atomic_bool back;
} late_t;

static void *sleep_late(void *arg)
{
    late_t *late = arg;
    sleeper_sleep(late->sleeper, late->ticket, deadline_in_ms(LOST_MS));
    atomic_store(&late->back, true);
    return NULL;
}

// A thread announces, hands the sleeper over and falls asleep; the next owner ends without a ring.
static void late_sleeper_is_not_forgotten(void **state)
{
    (void)state;
    for (int shared = 0; shared < 2; shared++) {
        atomic_uint word = 0;
        late_t late = {0};
        pthread_t thread;
        err_t err = {0};
        must(sleeper_new(&late.sleeper, &err), &err);
        if (shared) {
            must(sleeper_share(late.sleeper, &word, &err), &err);
        }
        late.ticket = sleeper_announce(late.sleeper);
        assert_int_equal(pthread_create(&thread, NULL, sleep_late, &late), 0);
        nap_us(30000);
        assert_false(atomic_load(&late.back));
        sleeper_announce(late.sleeper);
        sleeper_end(late.sleeper);
        uint64_t before_ns = clock_ns();
        assert_int_equal(pthread_join(thread, NULL), 0);
        assert_true(clock_ns() - before_ns < NS_PER_S);
        // And the bell does not go on ringing.
        for (int i = 0; i < 3; i++) {
            before_ns = clock_ns();
            sleeper_sleep(late.sleeper, sleeper_announce(late.sleeper), before_ns + 20 * NS_PER_MS);
            sleeper_end(late.sleeper);
        }
        assert_true(clock_ns() - before_ns >= 19 * NS_PER_MS);
        sleeper_free(late.sleeper);
    }
}

static void sleep_ends_at_its_deadline(void **state)
{
    (void)state;
    for (int shared = 0; shared < 2; shared++) {
        sleeper_t *sleeper;
        atomic_uint word = 0;
        err_t err = {0};
        must(sleeper_new(&sleeper, &err), &err);
        if (shared) {
            must(sleeper_share(sleeper, &word, &err), &err);
        }
        uint64_t before_ns = clock_ns();
        unsigned ticket = sleeper_announce(sleeper);
        sleeper_sleep(sleeper, ticket, before_ns + 20 * NS_PER_MS);
        sleeper_end(sleeper);
        uint64_t took_ns = clock_ns() - before_ns;
        assert_true(took_ns >= 19 * NS_PER_MS && took_ns < NS_PER_S);
        sleeper_free(sleeper);
    }
}

typedef struct thread_status {
    char name[64];
    unsigned long long blocked; // signals
    long n_switches;            // times it went to wait
    unsigned long user_ticks, system_ticks;
} thread_status_t;

static void read_status(const char *task, thread_status_t *status)
{
    char path[300], line[256];
    snprintf(path, sizeof path, "/proc/self/task/%s/status", task);
    FILE *file = fopen(path, "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        sscanf(line, "Name: %63s", status->name);
        sscanf(line, "SigBlk: %llx", &status->blocked);
        sscanf(line, "voluntary_ctxt_switches: %ld", &status->n_switches);
    }
    if (file != NULL) {
        fclose(file);
    }
    snprintf(path, sizeof path, "/proc/self/task/%s/stat", task);
    file = fopen(path, "r");
    if (file != NULL && fgets(line, sizeof line, file) != NULL && strrchr(line, ')') != NULL) {
        sscanf(strrchr(line, ')') + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu",
               &status->user_ticks, &status->system_ticks);
    }
    if (file != NULL) {
        fclose(file);
    }
}

// Whether the poller's thread exists, and how it is doing.
static bool poller_status(thread_status_t *status)
{
    DIR *tasks = opendir("/proc/self/task");
    struct dirent *entry;
    bool found = false;
    assert_non_null(tasks);
    while (!found && (entry = readdir(tasks)) != NULL) {
        *status = (thread_status_t){0};
        read_status(entry->d_name, status);
        found = strcmp(status->name, "hvd-poll") == 0;
    }
    closedir(tasks);
    return found;
}

static void poller_rests_while_the_owner_is_awake(void **state)
{
    sleeper_t *sleeper;
    atomic_uint word = 0;
    int fds[2];
    err_t err = {0};
    thread_status_t before, after;
    (void)state;

    assert_int_equal(pipe(fds), 0);
    must(sleeper_new(&sleeper, &err), &err);
    must(sleeper_watch(sleeper, fds[0], &err), &err);
    must(sleeper_share(sleeper, &word, &err), &err);
    sleeper_announce(sleeper);
    sleeper_end(sleeper);
    nap_us(50000);
    assert_true(poller_status(&before));
    assert_true((before.blocked & 1ull << (SIGINT - 1)) != 0);
    assert_true((before.blocked & 1ull << (SIGTERM - 1)) != 0);
    for (int i = 0; i < 1000; i++) { // a busy socket, nobody asleep
        assert_int_equal(write(fds[1], "x", 1), 1);
    }
    nap_us(100000);
    assert_true(poller_status(&after));
    assert_true(after.n_switches - before.n_switches <= 2);
    assert_true(after.user_ticks + after.system_ticks - before.user_ticks - before.system_ticks <=
                2);
    sleeper_free(sleeper);
    assert_false(poller_status(&after));
    close(fds[0]);
    close(fds[1]);
}

static void *send_after_a_while(void *arg)
{
    world_t *w = arg;
    uint64_t deadline_ns = deadline_in_ms(PATIENCE_MS);
    net_link_t *link = net_link(w->nets[1], 0, LANE_DATA, NULL);
    nap_us(30000);
    while (link != NULL && clock_ns() < deadline_ns) {
        net_progress(w->nets[1]);
        if (link_send(link, "wake", 4) == 4) {
            return NULL;
        }
        nap_us(100);
    }
    return arg;
}

static void data_ends_a_sleep(void **state)
{
    static const char *const knobs[][2] = {{"HOROVOD_TRANSPORTS=tcp", NULL}, {NULL, NULL}};
    (void)state;

    for (size_t i = 0; i < N_ELEMENTS(knobs); i++) {
        world_t *w = world_of(2, knobs[i]);
        pthread_t thread;
        char word[5] = "";
        ssize_t n = 0;
        net_link_t *link = link_of(w, 0, 1, LANE_DATA);
        uint64_t before_ns = clock_ns();
        assert_int_equal(pthread_create(&thread, NULL, send_after_a_while, w), 0);
        while (n == 0) {
            net_progress(w->nets[0]);
            unsigned ticket = net_before_sleep(w->nets[0]);
            n = link_recv(link, word, 4);
            if (n == 0) {
                net_sleep(w->nets[0], ticket, deadline_in_ms(LOST_MS));
            }
            net_after_sleep(w->nets[0]);
            assert_true(clock_ns() - before_ns < LOST_MS * NS_PER_MS);
        }
        assert_string_equal(word, "wake");
        void *failed = NULL;
        assert_int_equal(pthread_join(thread, &failed), 0);
        assert_null(failed);
        world_free(w);
    }
}

// --- Hook ----------------------------------------------------------------------------------------

static void hook_refuses_unknown_rules(void **state)
{
    static const char *const rules[] = {"delay",   "delay=", "delay=1x",
                                        "trace=1", "dorp=3", "cut=-1"};
    (void)state;

    for (size_t i = 0; i < N_ELEMENTS(rules); i++) {
        world_t *w = world_of(1, NULL);
        net_link_t *inner = NULL, *link = NULL;
        err_t err = {0};
        must(transport_self.connect(net_domain(w->nets[0], &transport_self), 0, LANE_DATA, &inner,
                                    &err),
             &err);
        assert_int_equal(hook_wrap(inner, rules[i], &w->places[0].job, &link, &err),
                         HVD_INVALID_ARGUMENT);
        assert_null(link);
        assert_non_null(strstr(err.text, rules[i]));
        world_free(w);
    }
}

static void hook_delays_and_keeps_order(void **state)
{
    static const char *const knobs[] = {"HOROVOD_TRANSPORTS=tcp", "HOROVOD_HOOK=delay=4000,seed=5",
                                        NULL};
    uint8_t byte;
    (void)state;

    world_t *w = world_of(2, knobs);
    net_link_t *a = link_of(w, 0, 1, LANE_DATA), *b = link_of(w, 1, 0, LANE_DATA);
    assert_string_equal(a->transport, "tcp");
    pass(w, a, b, 20000); // connected, and everything in order
    uint64_t before_ns = clock_ns();
    assert_int_equal(link_send(a, "x", 1), 1);
    while (link_recv(b, &byte, 1) == 0) {
        assert_true(clock_ns() - before_ns < NS_PER_S);
        world_progress(w);
    }
    assert_true(clock_ns() - before_ns >= 2 * NS_PER_MS);
    world_free(w);
}

// Data that is held back must leave although its rank goes to sleep.
static void hook_delay_ends_a_sleep(void **state)
{
    static const char *const knobs[] = {"HOROVOD_TRANSPORTS=tcp", "HOROVOD_HOOK=delay=3000", NULL};
    uint8_t byte;
    (void)state;

    world_t *w = world_of(2, knobs);
    net_link_t *a = link_of(w, 0, 1, LANE_DATA), *b = link_of(w, 1, 0, LANE_DATA);
    pass(w, a, b, 100);
    assert_int_equal(link_send(a, "x", 1), 1);
    uint64_t before_ns = clock_ns();
    while (link_recv(b, &byte, 1) == 0) {
        unsigned ticket = net_before_sleep(w->nets[0]);
        net_sleep(w->nets[0], ticket, deadline_in_ms(LOST_MS));
        net_after_sleep(w->nets[0]);
        world_progress(w);
        assert_true(clock_ns() - before_ns < NS_PER_S);
    }
    world_free(w);
}

static void hook_cuts_the_link_on_both_sides(void **state)
{
    static const char *const cut[] = {"HOROVOD_TRANSPORTS=tcp", "HOROVOD_HOOK=cut=10000", NULL};
    static uint8_t data[700];
    ssize_t n = 0, m = 0;
    (void)state;

    world_t *w = world_new(2);
    world_open(w, 0, cut);
    world_open(w, 1, only_tcp);
    world_settle(w);
    net_link_t *a = link_of(w, 0, 1, LANE_DATA), *b = link_of(w, 1, 0, LANE_DATA);
    size_t n_sent = 0;
    uint64_t deadline_ns = deadline_in_ms(PATIENCE_MS);
    while (n >= 0 || m >= 0) {
        assert_true(clock_ns() < deadline_ns);
        n = link_send(a, data, sizeof data);
        n_sent += n > 0 ? (size_t)n : 0;
        m = link_recv(b, data, sizeof data);
        world_progress(w);
    }
    assert_int_equal(n, HVD_PEER_LOST);
    assert_int_equal(m, HVD_PEER_LOST);
    assert_true(n_sent >= 9000 && n_sent < 10000);
    assert_non_null(strstr(a->err.text, "cut by HOROVOD_HOOK"));
    assert_non_null(strstr(b->err.text, "rank 0"));
    assert_int_equal(link_recv(a, data, 1), HVD_PEER_LOST);
    world_free(w);
}

// Sends a stream from rank 0 under a rule until the receiver notices or finds wrong bytes. True if
// it found wrong bytes first.
static bool damage_gets_through(const char *hook, const char *encrypt)
{
    const char *const damaging[] = {"HOROVOD_TRANSPORTS=tcp", encrypt, hook, NULL};
    const char *const honest[] = {"HOROVOD_TRANSPORTS=tcp", encrypt, NULL};
    uint8_t data[1000], got[1000];
    uint64_t n_sent = 0, n_got = 0;
    bool wrong = false;
    world_t *w = world_new(2);
    world_open(w, 0, damaging);
    world_open(w, 1, honest);
    world_settle(w);
    net_link_t *a = link_of(w, 0, 1, LANE_DATA), *b = link_of(w, 1, 0, LANE_DATA);
    uint64_t deadline_ns = deadline_in_ms(PATIENCE_MS);
    while (!wrong && b->err.status == HVD_OK) {
        assert_true(clock_ns() < deadline_ns);
        for (size_t i = 0; i < sizeof data; i++) {
            data[i] = stream_byte(3, n_sent + i);
        }
        ssize_t n = link_send(a, data, sizeof data);
        n_sent += n > 0 ? (size_t)n : 0;
        ssize_t m = link_recv(b, got, sizeof got);
        for (ssize_t i = 0; i < m && !wrong; i++) {
            wrong = got[i] != stream_byte(3, n_got++);
        }
        world_progress(w);
    }
    if (!wrong) {
        assert_int_equal(b->err.status, HVD_PROTOCOL);
        assert_non_null(strstr(b->err.text, "rank 0"));
        assert_non_null(strstr(b->err.text, "changed, repeated or lost on the way"));
    }
    world_free(w);
    return wrong;
}

static void hook_damage_is_noticed_behind_encryption(void **state)
{
    static const char *const hooks[] = {
        "HOROVOD_HOOK=flip=20000,seed=%d",
        "HOROVOD_HOOK=drop=20000,seed=%d",
        "HOROVOD_HOOK=reorder=20000,seed=%d",
        "HOROVOD_HOOK=flip=9000,drop=9000,reorder=9000,delay=50,seed=%d",
    };
    (void)state;

    for (size_t i = 0; i < N_ELEMENTS(hooks); i++) {
        for (int seed = 1; seed <= 4; seed++) {
            char hook[100];
            snprintf(hook, sizeof hook, hooks[i], seed);
            assert_false(damage_gets_through(hook, "HOROVOD_ENCRYPT=always"));
            // Without encryption it arrives: the hook does what it says.
            assert_true(damage_gets_through(hook, "HOROVOD_ENCRYPT=never"));
        }
    }
}

static void count_trace(void *arg, int level, const char *line)
{
    *(int *)arg += level == LOG_TRACE && strstr(line, "send peer 0 lane 1 bytes 3") != NULL;
}

static void hook_traces(void **state)
{
    static const char *const knobs[] = {"HOROVOD_HOOK=trace", NULL};
    int n_lines = 0;
    char text[4] = "";
    (void)state;

    world_t *w = world_of(1, knobs);
    w->places[0].log = (log_t){.level = LOG_TRACE, .sink = count_trace, .arg = &n_lines};
    net_link_t *link = link_of(w, 0, 0, LANE_DATA);
    assert_int_equal(link_send(link, "abc", 3), 3);
    assert_int_equal(link_recv(link, text, 3), 3);
    assert_string_equal(text, "abc");
    assert_int_equal(n_lines, 1);
    world_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_rank_reaches_itself),
        cmocka_unit_test(unknown_transport_is_an_error),
        cmocka_unit_test(knob_restricts_transports),
        cmocka_unit_test(no_transport_is_explained),
        cmocka_unit_test(choice_is_symmetric),
        cmocka_unit_test(unattached_transports_are_not_used),
        cmocka_unit_test(unencrypted_links_are_told),
        cmocka_unit_test(broken_addresses_are_refused),
        cmocka_unit_test(oversubscription_counts_cores),
        cmocka_unit_test(lifeline_tells_of_a_killed_process),
        cmocka_unit_test(no_wakeup_is_lost),
        cmocka_unit_test(each_source_wakes_by_itself),
        cmocka_unit_test(late_sleeper_is_not_forgotten),
        cmocka_unit_test(sleep_ends_at_its_deadline),
        cmocka_unit_test(poller_rests_while_the_owner_is_awake),
        cmocka_unit_test(data_ends_a_sleep),
        cmocka_unit_test(hook_refuses_unknown_rules),
        cmocka_unit_test(hook_delays_and_keeps_order),
        cmocka_unit_test(hook_delay_ends_a_sleep),
        cmocka_unit_test(hook_cuts_the_link_on_both_sides),
        cmocka_unit_test(hook_damage_is_noticed_behind_encryption),
        cmocka_unit_test(hook_traces),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
