// SPDX-License-Identifier: Apache-2.0
//
// test_network.c - networks that are cut, slow, lossy or full of strangers, between real hosts.
//
// Ranks of the second host live in a network namespace of their own, see hosts.h. Packets are
// dropped with nft, connections cut with ss -K.
//
// Needs root, or a kernel that lets users make namespaces; without either it says so and fails.
#define _GNU_SOURCE
#include "hosts.h"
#include "scene.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define READY 0       // numbers all ranks see: the network is as the test wants it,
#define CUT 1         // the fault has been made,
#define TURNED_AWAY 2 // a rank has said so,
#define LISTENS 3     // a stranger does,
#define LAST 4        // the number of steps after which all leave

static void enter_host(rank_t *r)
{
    if (r->rank == 0) {
        CHECK(r, hosts_mend());
        atomic_store(rank_shared(r, READY), 1);
    }
    rank_wait_for(r, rank_shared(r, READY), 1);
    hosts_enter(r);
}

// --- Cut ----------------------------------------------------------------------------------------

typedef struct cut {
    const char *here, *there; // commands in the two namespaces; NULL: none
    size_t n;                 // elements of each operation; 0: nobody does anything
    double seconds;
    int from, to; // hosts between which packets get lost, in this direction only; alike: in both
} cut_t;

static void *cut_later(void *arg)
{
    rank_t *r = ((void **)arg)[0];
    const cut_t *c = ((void **)arg)[1];
    usleep(300000);
    CHECK(r, c->there == NULL || hosts_run(true, c->there));
    CHECK(r, c->here == NULL || hosts_run(false, c->here));
    atomic_store(rank_shared(r, CUT), 1);
    return NULL;
}

// Both sides must name a rank of the other side, and both must know soon.
static void check_named(fault_rank_t *f)
{
    rank_t *r = f->r;
    for (int other = 0; other < r->size; other++) {
        char name[128];
        fault_name(r, other, name);
        if (strstr(r->text, name) != NULL) {
            return;
        }
    }
    check_failed(r, __FILE__, __LINE__, "names no rank: %s", r->text);
}

// "... the network is cut on the way from it to rank 0", or "... from rank 0 to it": "it" is who
// the sentence begins with. Whichever rank wrote it, it must be the way that was cut.
static void check_direction(fault_rank_t *f, const cut_t *c)
{
    rank_t *r = f->r;
    int it, rank;
    const char *start = strstr(r->text, "rank ");
    const char *way = strstr(r->text, "the network is cut on the way from ");
    CHECK_HAS(r, r->text, "HOROVOD_NETWORK_TIMEOUT_SECONDS");
    CHECK_HAS(r, r->text, "cannot be reached: ");
    CHECK(r, way != NULL && start != NULL && sscanf(start, "rank %d", &it) == 1);
    bool from_it = sscanf(way, "the network is cut on the way from it to rank %d", &rank) == 1;
    bool to_it = sscanf(way, "the network is cut on the way from rank %d to it", &rank) == 1;
    CHECK(r, from_it || to_it);
    int from = layout_host(r->layout, from_it ? it : rank, r->size);
    int to = layout_host(r->layout, from_it ? rank : it, r->size);
    if (from == to || (c->from != c->to && (from != c->from || to != c->to))) {
        check_failed(r, __FILE__, __LINE__, "names the wrong way: %s", r->text);
    }
}

static void cut_off(rank_t *r, void *arg)
{
    const cut_t *c = arg;
    pthread_t thread;
    void *pair[2] = {r, arg};
    enter_host(r);
    fault_rank_t *f = fault_open(r);
    rank_barrier(r);
    if (r->rank == 0) {
        CHECK_INT(r, pthread_create(&thread, NULL, cut_later, pair), 0);
    }
    double start = fault_now() + 0.3;
    rank_step(r, "works until the network is cut");
    CHECK_STATUS(r, c->n > 0 ? fault_work(f, c->n, 10) : fault_idle(f, 10), HVD_PEER_LOST);
    CHECK_WITHIN(f, start, c->seconds);
    check_named(f);
    if (c->seconds > 2) {
        check_direction(f, c);
    } else {
        CHECK_HAS(r, r->text, "in the middle of a job");
    }
    if (r->rank == 0) {
        pthread_join(thread, NULL);
    }
    fault_leave(f);
}

// A network that takes small packets only.
static void swallows_large(rank_t *r, void *arg)
{
    (void)arg;
    enter_host(r);
    fault_rank_t *f = fault_open(r);
    rank_barrier(r);
    if (r->rank == 0) {
        CHECK(r, hosts_run(false, HOSTS_DROP_LARGE("va")));
        CHECK(r, hosts_run(true, HOSTS_DROP_LARGE("vb")));
    }
    rank_barrier(r);
    double start = fault_now();
    CHECK_STATUS(r, fault_work(f, 400000, 12), HVD_PEER_LOST);
    CHECK_WITHIN(f, start, 6);
    check_named(f);
    CHECK_HAS(r, r->text, "MTU black hole");
    fault_leave(f);
}

// --- Away ---------------------------------------------------------------------------------------

// Times in milliseconds.
typedef struct outages {
    int n;
    unsigned least_away, most_away, least_back, most_back;
} outages_t;

// A network that is away now and then, each time in another way.
static void *come_and_go(void *arg)
{
    static const struct {
        bool on_second;
        const char *cut, *mend;
    } ways[] = {
        {false, HOSTS_DROP("va"), "nft flush ruleset"},
        {true, HOSTS_DROP("vb"), "nft flush ruleset"},
        {false, "ip link set va down", "ip link set va up"},
    };
    rank_t *r = ((void **)arg)[0];
    const outages_t *o = ((void **)arg)[1];
    dice_t dice = {.state = r->options->seed};
    for (int i = 0; i < o->n; i++) {
        size_t way = dice_next(&dice) % N_ELEMENTS(ways);
        usleep((unsigned)(o->least_back + dice_next(&dice) % (o->most_back - o->least_back)) *
               1000);
        unsigned away =
            (unsigned)(o->least_away + dice_next(&dice) % (o->most_away - o->least_away));
        CHECK(r, hosts_run(ways[way].on_second, ways[way].cut));
        usleep(away * 1000);
        CHECK(r, hosts_run(ways[way].on_second, ways[way].mend));
    }
    atomic_store(rank_shared(r, CUT), 1);
    return NULL;
}

// All of them are shorter than the limit: nobody is lost, and every sum is right.
static void away(rank_t *r, void *arg)
{
    pthread_t thread;
    void *pair[2] = {r, arg};
    enter_host(r);
    fault_rank_t *f = fault_open(r);
    rank_barrier(r);
    if (r->rank == 0) {
        CHECK_INT(r, pthread_create(&thread, NULL, come_and_go, pair), 0);
    }
    // A step keeps the ranks together, so all learn in time which is the last.
    for (int last = 0; last == 0 || f->n_steps < last; last = atomic_load(rank_shared(r, LAST))) {
        CHECK_OK(r, fault_step(f, "goes on", 20000));
        if (r->rank == 0 && last == 0 && atomic_load(rank_shared(r, CUT)) == 1) {
            atomic_store(rank_shared(r, LAST), f->n_steps + 10);
        }
        usleep(1000);
    }
    if (r->rank == 0) {
        pthread_join(thread, NULL);
    }
    fault_leave(f);
}

// --- Lost ---------------------------------------------------------------------------------------

// Data vanishes from some moment on, and nothing else happens: no link ends, everybody is heard.
static void data_vanishes(rank_t *r, void *arg)
{
    (void)arg;
    char who[128];
    enter_host(r);
    fault_rank_t *f = fault_open(r);
    rank_step(r, "works until data is lost");
    double start = fault_now();
    CHECK_STATUS(r, fault_work(f, 100000, 30), HVD_PEER_LOST);
    CHECK_WITHIN(f, start, 3 + 5); // the limit, and what it takes to get there
    CHECK_HAS(r, r->text, " waits in 'work': ");
    CHECK_HAS(r, r->text, "receiving from rank ");
    CHECK_HAS(r, r->text, "data was lost on the way");
    check_named(f);
    snprintf(who, sizeof who, "Rank %d waited in 'work'", r->rank);
    CHECK_HAS(r, r->text, who);
    fault_leave(f);
}

// --- Slow, lossy, odd ---------------------------------------------------------------------------

static void lossy(rank_t *r, void *arg)
{
    (void)arg;
    enter_host(r);
    fault_rank_t *f = fault_open(r);
    rank_barrier(r);
    if (r->rank == 0) {
        CHECK(r, hosts_run(false, HOSTS_LOSE("va", "100")));
        CHECK(r, hosts_run(false, "tc qdisc add dev va root tbf rate 100mbit burst 64kb latency "
                                  "50ms"));
    }
    rank_barrier(r);
    for (int i = 0; i < FEWER(30); i++) {
        CHECK_OK(r, fault_step(f, "slow", 40000));
    }
    CHECK(r, !fault_logged(f, "silent"));
    rank_barrier(r);
    fault_leave(f);
}

// Every listening socket of the namespace belongs to the job: this rank's and the others'.
static int speak_to_ports(rank_t *r)
{
    FILE *file = fopen("/proc/net/tcp", "r");
    char line[256];
    int n = 0;
    dice_t dice = {.state = r->options->seed};
    CHECK(r, file != NULL);
    while (fgets(line, sizeof line, file) != NULL) {
        unsigned address, port, state;
        if (sscanf(line, " %*d: %x:%x %*x:%*x %x", &address, &port, &state) != 3 || state != 0x0a) {
            continue;
        }
        struct sockaddr_in to = {
            .sin_family = AF_INET,
            .sin_port = htons((uint16_t)port),
            .sin_addr.s_addr = address != 0 ? address : htonl(INADDR_LOOPBACK),
        };
        uint8_t bytes[4096];
        for (size_t i = 0; i < sizeof bytes; i++) {
            bytes[i] = (uint8_t)dice_next(&dice);
        }
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        struct timeval limit = {.tv_sec = 5 * LOADED};
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        CHECK_INT(r, connect(fd, (struct sockaddr *)&to, sizeof to), 0);
        (void)!send(fd, bytes, sizeof bytes, MSG_NOSIGNAL);
        CHECK(r, recv(fd, bytes, sizeof bytes, 0) <= 0); // cut off without an answer
        CHECK(r, errno != EAGAIN);
        close(fd);
        n++;
    }
    fclose(file);
    return n;
}

static void strangers(rank_t *r, void *arg)
{
    (void)arg;
    enter_host(r);
    fault_rank_t *f = fault_open(r);
    rank_barrier(r);
    if (r->rank == 0) {
        for (int turn = 0; turn < 5; turn++) {
            CHECK(r, speak_to_ports(r) >= 2);
        }
    }
    for (int i = 0; i < 20; i++) {
        CHECK_OK(r, fault_step(f, "unharmed", 20000));
    }
    if (fault_logged(f, "turned away")) {
        atomic_store(rank_shared(r, TURNED_AWAY), 1);
    }
    CHECK(r, fault_n_logged(f, "turned away") <= 1); // a line a minute at most
    rank_barrier(r);
    CHECK_INT(r, atomic_load(rank_shared(r, TURNED_AWAY)), 1);
    fault_leave(f);
}

// Nobody at any address: each is named with what happened there.
static void wrong_address(rank_t *r, void *arg)
{
    (void)arg;
    enter_host(r);
    rank_setenv(r, "HOROVOD_RENDEZVOUS_ADDR", "127.0.1.1,10.77.0.9");
    rank_setenv(r, "HOROVOD_RENDEZVOUS_PORT", "9");
    double start = fault_now();
    CHECK(r, rank_try_open(r, NULL) != HVD_OK);
    CHECK(r, fault_now() - start < 10 * LOADED);
    CHECK_HAS(r, r->text, "127.0.1.1");
    CHECK_HAS(r, r->text, "10.77.0.9");
}

static void *be_stranger(void *arg)
{
    int listener = *(int *)arg;
    for (int fd; (fd = accept(listener, NULL, NULL)) >= 0; close(fd)) {
        char bytes[256];
        (void)!recv(fd, bytes, sizeof bytes, 0);
        (void)!send(fd, "HTTP/1.0 400 Bad Request\r\n\r\n", 28, MSG_NOSIGNAL);
    }
    return NULL;
}

// The name of the rendezvous host leads to 127.0.1.1 first, as Debian's installer writes it, where
// on the second host somebody else listens: the address that proves the secret is taken.
static void astray(rank_t *r, void *arg)
{
    (void)arg;
    pthread_t thread;
    bool listens = r->rank == r->size - 1;
    struct sockaddr_in name = {.sin_family = AF_INET};
    enter_host(r);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (r->rank == 0) {
        CHECK(r, fault_run("printf '127.0.1.1 head\n%s head\n' > /tmp/hosts && "
                           "mount --bind /tmp/hosts /etc/hosts",
                           HOSTS_ADDRESS_A));
        atomic_store(rank_shared(r, CUT), 1);
    }
    if (listens) {
        name.sin_port = htons((uint16_t)atoi(rank_getenv(r, "HOROVOD_RENDEZVOUS_PORT")));
        CHECK_INT(r, inet_pton(AF_INET, "127.0.1.1", &name.sin_addr), 1);
        CHECK_INT(r, bind(fd, (struct sockaddr *)&name, sizeof name), 0);
        CHECK_INT(r, listen(fd, 16), 0);
        CHECK_INT(r, pthread_create(&thread, NULL, be_stranger, &fd), 0);
        atomic_store(rank_shared(r, LISTENS), 1);
    }
    rank_wait_for(r, rank_shared(r, CUT), 1);
    rank_wait_for(r, rank_shared(r, LISTENS), 1);
    rank_setenv(r, "HOROVOD_RENDEZVOUS_ADDR", "head");
    double start = fault_now();
    fault_rank_t *f = fault_open(r);
    CHECK_WITHIN(f, start, 10);
    rank_barrier(r);
    fault_leave(f);
    if (listens) {
        shutdown(fd, SHUT_RDWR);
        pthread_join(thread, NULL);
    }
    close(fd);
    if (r->rank == 0) {
        CHECK(r, fault_run("umount /etc/hosts && rm /tmp/hosts"));
    }
}

// No interface has the same name on both hosts, but for loopback, and nobody says which to take.
static void names_differ(rank_t *r, void *arg)
{
    (void)arg;
    enter_host(r);
    bool on_second = layout_host(r->layout, r->rank, r->size) == 1;
    CHECK(r, fault_run("grep -q '%s:' /proc/net/dev && ! grep -q '%s:' /proc/net/dev",
                       on_second ? "vb" : "va", on_second ? "va" : "vb"));
    fault_rank_t *f = fault_open(r);
    for (int i = 0; i < 10; i++) {
        CHECK_OK(r, fault_step(f, "just works", 20000));
    }
    rank_barrier(r);
    fault_leave(f);
}

// A process whose clocks are an hour ahead goes on as this rank; false: it has ended, and well. To
// move there oneself is for processes without threads, which sanitizers may have.
static bool move_ahead(rank_t *r)
{
    int state = -1;
    CHECK_INT(r, unshare(CLONE_NEWTIME), 0);
    CHECK(r, scene_write_file("/proc/self/timens_offsets", "monotonic 3600 0\nboottime 3600 0\n"));
    pid_t child = fork();
    CHECK(r, child >= 0);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        return true;
    }
    CHECK_INT(r, waitpid(child, &state, 0), child);
    CHECK_INT(r, state, 0);
    return false;
}

// A host whose clock stands an hour apart: only differences on one rank's own clock count.
static void clock_apart(rank_t *r, void *arg)
{
    (void)arg;
    if (r->rank == 1 && !move_ahead(r)) {
        return;
    }
    enter_host(r);
    fault_rank_t *f = fault_open(r);
    for (int i = 0; i < 75; i++) { // as often on every rank, for more than a second
        CHECK_OK(r, fault_step(f, "apart", 1000));
        usleep(20000);
    }
    CHECK(r, !fault_logged(f, "silent") && !fault_logged(f, "did not run"));
    fault_leave(f);
}

// --- Table --------------------------------------------------------------------------------------

static const cut_t both_ways = {HOSTS_DROP("va"), HOSTS_DROP("vb"), 100000, 5, 0, 0};
static const cut_t both_idle = {HOSTS_DROP("va"), HOSTS_DROP("vb"), 0, 5, 0, 0};
static const cut_t one_way = {NULL, HOSTS_DROP("vb"), 100000, 5, 0, 1};
static const cut_t other_way = {HOSTS_DROP("va"), NULL, 0, 5, 1, 0};
static const cut_t unplugged = {"ip link del va", NULL, 100000, 5, 0, 0};
static const cut_t reset = {"ss -K dst " HOSTS_ADDRESS_B " >/dev/null 2>&1", NULL, 400000, 1, 0, 0};

static const outages_t flaps = {8, 700, 801, 300, 901};
static const outages_t gaps = {4, 100, 2701, 1200, 2001};
static const outages_t long_gaps = {1, 7000, 7001, 500, 501};

#define TWO_HOSTS ONLY_LAYOUT(LAYOUT_BLOCKS)

static const subtest_t subtests[] = {
    {.name = "cut both ways", .fn = cut_off, .arg = (void *)&both_ways, .layouts = TWO_HOSTS},
    {.name = "cut while idle", .fn = cut_off, .arg = (void *)&both_idle, .layouts = TWO_HOSTS},
    {.name = "cut one way", .fn = cut_off, .arg = (void *)&one_way, .layouts = TWO_HOSTS},
    {.name = "cut the other way", .fn = cut_off, .arg = (void *)&other_way, .layouts = TWO_HOSTS},
    {.name = "unplugged", .fn = cut_off, .arg = (void *)&unplugged, .layouts = TWO_HOSTS},
    {.name = "connections reset", .fn = cut_off, .arg = (void *)&reset, .layouts = TWO_HOSTS},
    {.name = "takes small packets only", .fn = swallows_large, .layouts = TWO_HOSTS},
    {.name = "comes and goes", .fn = away, .arg = (void *)&flaps, .layouts = TWO_HOSTS},
    {.name = "away for a while", .fn = away, .arg = (void *)&gaps, .layouts = TWO_HOSTS},
    {
        .name = "away for as long as is allowed",
        .fn = away,
        .arg = (void *)&long_gaps,
        .layouts = TWO_HOSTS,
        .env = {"HOROVOD_NETWORK_TIMEOUT_SECONDS=8", "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS=15"},
    },
    {
        .name = "data vanishes",
        .fn = data_vanishes,
        .layouts = TWO_HOSTS,
        .env = {"HOROVOD_HOOK=hole=40000000,lane=2", "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS=3"},
    },
    {
        .name = "data vanishes, plain",
        .fn = data_vanishes,
        .layouts = TWO_HOSTS,
        .env = {"HOROVOD_HOOK=hole=40000000,lane=2", "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS=3",
                "HOROVOD_ENCRYPT=never"},
    },
    {.name = "lossy and slow", .fn = lossy, .layouts = TWO_HOSTS},
    {.name = "strangers", .fn = strangers, .layouts = TWO_HOSTS},
    {
        .name = "wrong address",
        .fn = wrong_address,
        .layouts = TWO_HOSTS,
        .env = {"HOROVOD_START_TIMEOUT=2"},
    },
    {.name = "name leads astray", .fn = astray, .layouts = TWO_HOSTS},
    {.name = "interface names differ", .fn = names_differ, .layouts = TWO_HOSTS},
    {.name = "clock apart", .fn = clock_apart, .layouts = TWO_HOSTS},
};

int main(int argc, char **argv)
{
    if (!hosts_make(argv[0])) {
        return 1;
    }
    int status = ranks_main(argc, argv, subtests, (int)N_ELEMENTS(subtests));
    hosts_remove();
    return status;
}
