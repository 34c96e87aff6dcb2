// SPDX-License-Identifier: Apache-2.0
//
// test_door.c - somebody without the secret at everything that listens: each of `targets` is called
// with each of `attacks`, and then crowded.
//
// A stranger is cut in time, gets no answer but a TLS alert, is counted once and told of in one
// line of the log; somebody who has the secret gets in before, meanwhile and after.
#define _GNU_SOURCE
#include "boot/testing.h"
#include "net/tcp.h"
#include "wire/secret.h"

#include "net_world.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define ANSWER_BYTES 7 // a TLS alert is all that is ever said
#define SLACK_MS 8000
#define CROWD 300
#define MAX_CHANNELS 64

static const char secret_text[SECRET_BYTES + 1] = "the secret"; // zeros follow
static const uint8_t *const secret = (const uint8_t *)secret_text;
static secure_keys_t *keys, *other_keys;

// --- Targets -------------------------------------------------------------------------------------

// Whatever is running, one at a time.
static struct {
    int port;
    hello_t hello; // of somebody who may come in
    door_t *door;
    guest_t guests[8];
    int n_guests;
    log_t log;
    hvd_rendezvous_t *server;
    place_t places[2];
    domain_t *domains[2];
    int listener;
    int fds[MAX_CHANNELS];
    hvd_channel_t *channels[MAX_CHANNELS];
    int n_channels;
    uint64_t n_refused;
    pid_t pid;
    char folder[32];
    int n_log_lines;
} here;

typedef struct target {
    const char *name;
    void (*start)(void);
    void (*serve)(void); // NULL: it has a thread or process of its own
    void (*stop)(void);
    uint64_t (*n_refused)(void); // NULL: only its log tells
    int patience_ms;             // 0: it leaves that to its caller, and limits as well
} target_t;

static void keep_guest(void *owner, const guest_t *guest)
{
    (void)owner;
    assert_in_range(here.n_guests, 0, 7);
    here.guests[here.n_guests++] = *guest;
}

static void count_line(void *arg, int level, const char *line)
{
    (void)arg;
    (void)level;
    assert_non_null(strstr(line, "turned away"));
    here.n_log_lines++;
}

static void door_start(void)
{
    here.log = (log_t){.level = LOG_WARN, .rank = -1, .sink = count_line};
    const door_rules_t rules = {
        .name = "test", .log = &here.log, .keys = keys, .role = HELLO_CHANNEL, .enter = keep_guest};
    struct sockaddr_storage at = {.ss_family = AF_INET};
    socklen_t bytes = sizeof(struct sockaddr_in);
    ((struct sockaddr_in *)&at)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    assert_int_equal(door_open(&rules, &here.door, NULL), HVD_OK);
    assert_int_equal(door_listen(here.door, &at, &bytes), 0);
    here.port = ntohs(((struct sockaddr_in *)&at)->sin_port);
    here.hello = (hello_t){.role = HELLO_CHANNEL, .encrypted = 1};
}

static void door_serve(void)
{
    door_progress(here.door);
    assert_true(door_n_strangers(here.door) <= DOOR_STRANGERS);
}

static void door_stop(void)
{
    for (int i = 0; i < here.n_guests; i++) {
        secure_free(here.guests[i].secure);
        fd_close(here.guests[i].fd);
    }
    door_close(here.door);
    assert_int_equal(here.n_log_lines, 1);
}

static uint64_t door_refused(void)
{
    return door_n_refused(here.door);
}

static void rendezvous_start(void)
{
    assert_int_equal(hvd_rendezvous_start(NULL, 0, secret, &here.server, NULL, 0), HVD_OK);
    here.port = hvd_rendezvous_port(here.server);
    here.hello = (hello_t){.role = HELLO_KV, .encrypted = 1};
}

static void rendezvous_stop(void)
{
    hvd_rendezvous_stop(here.server);
}

static uint64_t rendezvous_refused(void)
{
    return kv_server_n_refused(here.server);
}

static void tcp_start(void)
{
    const uint8_t *data[2];
    size_t bytes[2];
    buf_t addresses[2] = {{0}, {0}};
    for (int r = 0; r < 2; r++) {
        place_init(&here.places[r], r, 2, NULL, secret_text);
        assert_int_equal(transport_tcp.open(&here.places[r].job, &here.domains[r], NULL), HVD_OK);
        assert_int_equal(transport_tcp.address(here.domains[r], &addresses[r], NULL), HVD_OK);
        data[r] = addresses[r].data;
        bytes[r] = addresses[r].len;
    }
    assert_int_equal(transport_tcp.attach(here.domains[1], data, bytes, NULL), HVD_OK);
    buf_free(&addresses[0]);
    buf_free(&addresses[1]);
    here.port = here.domains[1]->ifaces[0].addr.port;
    here.hello = (hello_t){.role = HELLO_LINK, .to = 1, .encrypted = 1};
    memcpy(here.hello.nonce, here.domains[1]->token, TCP_TOKEN_BYTES);
}

// Two friends come in, each on a lane of its own.
static void tcp_serve(void)
{
    transport_tcp.progress(here.domains[1]);
    here.hello.lane = here.domains[1]->seats[LANE_CONTROL].kept != NULL ? LANE_DATA : LANE_CONTROL;
    here.hello.encrypted = tcp_encrypts(here.domains[1], 0, (lane_t)here.hello.lane);
}

static void tcp_stop(void)
{
    assert_int_equal(here.places[1].n_log_lines, 1);
    for (int r = 0; r < 2; r++) {
        transport_tcp.close(here.domains[r]);
        place_free(&here.places[r]);
    }
}

static uint64_t tcp_refused(void)
{
    return transport_tcp.n_foreign(here.domains[1]);
}

static int listen_on_loopback(int *port_p)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(listen(fd, 100), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&at, &bytes), 0);
    *port_p = ntohs(at.sin_port);
    return fd;
}

static void channel_start(void)
{
    here.listener = listen_on_loopback(&here.port);
    here.hello = (hello_t){.role = HELLO_CHANNEL, .encrypted = 1};
}

static void channel_serve(void)
{
    int fd = accept4(here.listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
        assert_in_range(here.n_channels, 0, MAX_CHANNELS - 1);
        here.fds[here.n_channels] = fd;
        assert_int_equal(
            hvd_channel_open(fd, true, secret, &here.channels[here.n_channels++], NULL, 0), HVD_OK);
    }
    for (int i = 0; i < here.n_channels; i++) {
        if (here.channels[i] != NULL && hvd_channel_shake(here.channels[i], NULL, 0) < 0) {
            hvd_channel_close(here.channels[i]);
            here.channels[i] = NULL;
            close(here.fds[i]);
            here.n_refused++;
        }
    }
}

static void channel_stop(void)
{
    for (int i = 0; i < here.n_channels; i++) {
        if (here.channels[i] != NULL) {
            hvd_channel_close(here.channels[i]);
            close(here.fds[i]);
        }
    }
    close(here.listener);
}

static uint64_t channel_refused(void)
{
    return here.n_refused;
}

static void path_in_folder(const char *name, char path[64])
{
    snprintf(path, 64, "%s/%s", here.folder, name);
}

static void agents_start(void)
{
    char program[512], path[64], log_path[64], port[16], digits[SECRET_DIGITS + 1];
    snprintf(here.folder, sizeof here.folder, "/tmp/test_door.XXXXXX");
    assert_non_null(mkdtemp(here.folder));
    path_in_folder("secret", path);
    path_in_folder("log", log_path);
    secret_encode(secret, digits);
    assert_int_equal(secret_write_file(path, digits, SECRET_DIGITS, NULL), HVD_OK);
    close(listen_on_loopback(&here.port));
    snprintf(port, sizeof port, "%d", here.port);
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 20);
    assert_true(n > 0);
    program[n] = '\0';
    strcpy(strrchr(program, '/'), "/../horovodrun");
    here.pid = fork();
    if (here.pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(open(log_path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600), STDERR_FILENO);
        execl(program, program, "--serve-agents", "--agent-port", port, "--secret-file", path,
              (char *)NULL);
        _exit(1);
    }
    here.hello = (hello_t){.role = HELLO_CHANNEL, .encrypted = 1};
}

static void agents_stop(void)
{
    char path[64], line[1024];
    int status, n_lines = 0;
    kill(here.pid, SIGTERM);
    assert_int_equal(waitpid(here.pid, &status, 0), here.pid);
    assert_int_equal(status, 0);
    path_in_folder("log", path);
    FILE *log = fopen(path, "r");
    assert_non_null(log);
    while (fgets(line, sizeof line, log) != NULL) {
        assert_non_null(strstr(line, "turned away"));
        n_lines++;
    }
    fclose(log);
    assert_int_equal(n_lines, 1);
    unlink(path);
    path_in_folder("secret", path);
    unlink(path);
    assert_int_equal(rmdir(here.folder), 0);
}

static const target_t targets[] = {
    {"a door", door_start, door_serve, door_stop, door_refused, 2000},
    {"the rendezvous", rendezvous_start, NULL, rendezvous_stop, rendezvous_refused, 2000},
    {"a rank's port", tcp_start, tcp_serve, tcp_stop, tcp_refused, 2000},
    {"a channel", channel_start, channel_serve, channel_stop, channel_refused, 0},
    {"the agents' port", agents_start, NULL, agents_stop, NULL, 10000},
};

// --- Strangers and friends -----------------------------------------------------------------------

typedef enum kind { BYTES, OTHER_JOB, OTHER_ROLE, REPLAYED } kind_t;

typedef struct attack {
    const char *name;
    kind_t kind;
    const char *tail; // sent after the hello, if there is one
    size_t n_tail;
    bool waits; // cut only when its time is over
} attack_t;

#define TAIL(text) (text), sizeof(text) - 1

static const attack_t attacks[] = {
    {"HTTP", BYTES,
     TAIL("GET /rendezvous/rank_0 HTTP/1.1\r\nHost: a.example\r\nAccept: */*\r\n"
          "Connection: close\r\n\r\n"),
     false},
    {"a TLS client", BYTES,
     TAIL("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
          "0123456789abcdef0123456789abcdef\x20"
          "0123456789abcdef0123456789abcdef\x00\x04\x13\x01"),
     false},
    {"ssh", BYTES,
     TAIL("SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n"
          "and a key exchange that is long enough"),
     false},
    {"our magic, another version", BYTES,
     TAIL("\x8bhvd\r\n\x1a\n\xff\xff\xff\xff\xff\xff\xff\xff"
          "0123456789abcdef0123456789abcdef0123456789abcdef"),
     false},
    {"another job", OTHER_JOB, TAIL(""), false},
    {"another role", OTHER_ROLE, TAIL(""), false},
    {"a hello that was overheard, then HTTP", REPLAYED, TAIL("GET / HTTP/1.1\r\n\r\n"), false},
    {"a hello that was overheard, then 16 KiB announced", REPLAYED,
     TAIL("\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03"), true},
    {"a hello that was overheard, then silence", REPLAYED, TAIL(""), true},
    {"half a hello", BYTES, TAIL("\x8bhvd\r\n\x1a\n"), true},
    {"silence", BYTES, TAIL(""), true},
};

static void serve(const target_t *target)
{
    if (target->serve != NULL) {
        target->serve();
    }
}

static int call(const target_t *target)
{
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)here.port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    uint64_t deadline_ns = deadline_in_ms(SLACK_MS);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    while (connect(fd, (struct sockaddr *)&to, sizeof to) != 0) { // a process may still start
        assert_true(clock_ns() < deadline_ns);
        serve(target);
        nap_us(5000);
    }
    assert_int_equal(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
    return fd;
}

static int attack(const target_t *target, const attack_t *a)
{
    uint8_t bytes[HELLO_BYTES];
    hello_t hello = here.hello;
    int fd = call(target);
    memcpy(hello.job, secure_keys_job(a->kind == OTHER_JOB ? other_keys : keys), sizeof hello.job);
    hello.role = a->kind != OTHER_ROLE    ? hello.role
                 : hello.role == HELLO_KV ? HELLO_CHANNEL
                                          : HELLO_KV;
    hello_encode(&hello, bytes);
    if (a->kind != BYTES) {
        assert_int_equal(send(fd, bytes, sizeof bytes, MSG_NOSIGNAL), sizeof bytes);
    }
    assert_int_equal(send(fd, a->tail, a->n_tail, MSG_NOSIGNAL), a->n_tail);
    return fd;
}

static void expect_cut(const target_t *target, int fd, const char *what)
{
    uint64_t deadline_ns = deadline_in_ms(target->patience_ms + SLACK_MS);
    size_t n_answer = 0;
    for (;;) {
        uint8_t data[256];
        ssize_t n = recv(fd, data, sizeof data, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN)) {
            break;
        }
        n_answer += n > 0 ? (size_t)n : 0;
        if (clock_ns() > deadline_ns || n_answer > ANSWER_BYTES) {
            fail_msg("%s at %s: %zu bytes of an answer, and not cut", what, target->name, n_answer);
        }
        serve(target);
        nap_us(500);
    }
    close(fd);
}

// Comes in with the secret, and hangs up. Pushed out by a crowd, it dials again as ranks do.
static void expect_welcome(const target_t *target)
{
    uint64_t deadline_ns = deadline_in_ms(SLACK_MS);
    hvd_status_t status = HVD_PEER_LOST;
    while (status != HVD_OK) {
        err_t err = {0};
        greeting_t greeting = {.fd = call(target), .keys = keys, .hello = here.hello};
        assert_int_equal(greeting_prepare(&greeting, TCP_TOKEN_BYTES, NULL), HVD_OK);
        while ((status = greeting_step(&greeting, &err)) == HVD_IN_PROGRESS) {
            if (clock_ns() > deadline_ns) {
                fail_msg("a friend does not get in at %s", target->name);
            }
            serve(target);
            nap_us(200);
        }
        assert_true(clock_ns() < deadline_ns);
        for (int i = 0; i < 20; i++) { // the last bytes of the proof are on their way
            serve(target);
            nap_us(500);
        }
        secure_free(greeting.secure);
        close(greeting.fd);
    }
}

static void attack_all(const target_t *target)
{
    int fds[N_ELEMENTS(attacks)];
    uint64_t n_expected = target->n_refused != NULL ? target->n_refused() : 0;
    for (size_t i = 0; i < N_ELEMENTS(attacks); i++) {
        bool is_tried = target->patience_ms > 0 || !attacks[i].waits;
        fds[i] = is_tried ? attack(target, &attacks[i]) : -1;
        n_expected += is_tried;
        serve(target);
    }
    for (size_t i = 0; i < N_ELEMENTS(attacks); i++) {
        if (fds[i] >= 0) {
            expect_cut(target, fds[i], attacks[i].name);
        }
    }
    if (target->n_refused != NULL) {
        assert_int_equal(target->n_refused(), n_expected);
    }
}

static void crowd(const target_t *target)
{
    int fds[CROWD];
    for (int i = 0; i < CROWD; i++) {
        fds[i] = call(target);
        serve(target);
    }
    expect_welcome(target);
    expect_cut(target, fds[0], "the oldest of a crowd");
    for (int i = 1; i < CROWD; i++) {
        close(fds[i]);
    }
}

static void strangers_stay_outside(void **state)
{
    const target_t *target = *state;
    memset(&here, 0, sizeof here);
    target->start();
    if (target->serve != NULL) {
        target->serve();
    }
    attack_all(target);
    expect_welcome(target);
    if (target->patience_ms > 0) {
        crowd(target);
    }
    target->stop();
}

int main(void)
{
    uint8_t other_secret[SECRET_BYTES] = {1};
    struct CMUnitTest tests[N_ELEMENTS(targets)];
    assert_int_equal(secure_keys_new(secret, &keys, NULL), HVD_OK);
    assert_int_equal(secure_keys_new(other_secret, &other_keys, NULL), HVD_OK);
    for (size_t i = 0; i < N_ELEMENTS(targets); i++) {
        tests[i] = (struct CMUnitTest){.name = targets[i].name,
                                       .test_func = strangers_stay_outside,
                                       .initial_state = (void *)(uintptr_t)&targets[i]};
    }
    int n_failed = cmocka_run_group_tests(tests, NULL, NULL);
    secure_keys_free(keys);
    secure_keys_free(other_keys);
    return n_failed;
}
