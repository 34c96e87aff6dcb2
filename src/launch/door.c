// SPDX-License-Identifier: Apache-2.0
//
// door.c - hosts without sshd: a door at the host, and how a launcher comes through it.
//
// `horovodrun --serve-agents` waits on a port (door_main). For every caller it forks: the child has
// the caller prove the secret, starts this host's agent (agent.c) and carries bytes between both
// until one of them ends. `horovodrun --reach HOST` (reach_main) is what the launcher runs in the
// place of ssh: it calls, proves the secret, and carries between the door and its own stdin and
// stdout. The secret opens the door only; each job still has one of its own, sent through it.
//
// The server may be the first process of a container: it reaps what it inherits and obeys SIGTERM.
// Processes: one for the door, one for each caller; no threads.
#define _GNU_SOURCE
#include "launch/launch.h"

#include "hvd.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define SHAKE_MS 2000
#define MAX_CALLERS 64
#define CARRY_BYTES ((size_t)256 * 1024)
#define RETRY_MS 200

// --- The secret ----------------------------------------------------------------------------------

static int hex_digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10
                                                                                : -1;
}

static bool decode_secret(const char *text, ssize_t bytes, uint8_t secret[SECRET_BYTES])
{
    while (bytes > 0 && (text[bytes - 1] == '\n' || text[bytes - 1] == ' ')) {
        bytes--;
    }
    for (int i = 0; bytes == 2 * SECRET_BYTES && i < SECRET_BYTES; i++) {
        int high = hex_digit(text[2 * i]);
        int low = hex_digit(text[2 * i + 1]);
        if (high < 0 || low < 0) {
            return false;
        }
        secret[i] = (uint8_t)(high << 4 | low);
    }
    return bytes == 2 * SECRET_BYTES;
}

// A Secret volume belongs to root and is read through the pod's group: only others are kept out.
static hvd_status_t read_secret(const char *path, uint8_t secret[SECRET_BYTES], err_t *err)
{
    char text[2 * SECRET_BYTES + 8];
    struct stat about;
    if (path == NULL || path[0] == '\0') {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "--secret-file is needed: a file of 64 hexadecimal digits that both sides have");
    }
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &about) != 0) {
        hvd_status_t status = fail_errno(err, errno, "cannot read the secret file %s", path);
        if (fd >= 0) {
            close(fd);
        }
        return status;
    }
    ssize_t n = read(fd, text, sizeof text);
    close(fd);
    bool good = decode_secret(text, n, secret);
    wipe(text, sizeof text);
    if ((about.st_mode & 07) != 0) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "the secret file %s is open to everybody on this machine (mode %04o); try "
                    "chmod 600",
                    path, about.st_mode & 07777);
    }
    return good ? HVD_OK
                : fail(err, HVD_INVALID_ARGUMENT,
                       "the secret file %s must hold exactly 64 hexadecimal digits", path);
}

// --- Carrying ------------------------------------------------------------------------------------

typedef struct carrier {
    hvd_channel_t *channel;
    int socket;
    int in_fd, out_fd; // of the near side
    buf_t to_near;     // on their way
    size_t near_at;
    uint8_t *from_near;
    size_t from_len, from_at;
    bool near_ended, far_ended;
} carrier_t;

static void read_near(carrier_t *c)
{
    ssize_t n = read(c->in_fd, c->from_near, CARRY_BYTES);
    if (n > 0) {
        c->from_at = 0;
        c->from_len = (size_t)n;
    } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
        c->near_ended = true;
    }
}

static void send_far(carrier_t *c)
{
    int64_t n = hvd_channel_send(c->channel, c->from_near + c->from_at, c->from_len - c->from_at,
                                 NULL, 0);
    if (n < 0) {
        c->far_ended = true;
        c->from_at = c->from_len = 0;
        return;
    }
    c->from_at += (size_t)n;
}

static void receive_far(carrier_t *c)
{
    buf_clear(&c->to_near);
    c->near_at = 0;
    if (!buf_reserve(&c->to_near, CARRY_BYTES)) {
        c->far_ended = true;
        return;
    }
    int64_t n = hvd_channel_recv(c->channel, c->to_near.data, CARRY_BYTES, NULL, 0);
    if (n < 0) {
        c->far_ended = true;
    } else {
        c->to_near.len = (size_t)n;
    }
}

static void write_near(carrier_t *c)
{
    ssize_t n = write(c->out_fd, c->to_near.data + c->near_at, c->to_near.len - c->near_at);
    if (n > 0) {
        c->near_at += (size_t)n;
    } else if (n < 0 && errno != EAGAIN && errno != EINTR) {
        c->near_ended = true;
        c->near_at = c->to_near.len;
    }
}

// One turn. False when either side has ended and all that had come from it has been handed on.
static bool carry_on(carrier_t *c)
{
    bool owes_near = c->near_at < c->to_near.len;
    bool owes_far = c->from_at < c->from_len || hvd_channel_wants_write(c->channel);
    if ((c->near_ended && !owes_far) || (c->far_ended && !owes_near)) {
        return false;
    }
    struct pollfd fds[] = {
        {.fd = c->near_ended || owes_far ? -1 : c->in_fd, .events = POLLIN},
        {.fd = owes_near ? c->out_fd : -1, .events = POLLOUT},
        {.fd = c->far_ended ? -1 : c->socket,
         .events = (short)((owes_near ? 0 : POLLIN) | (owes_far ? POLLOUT : 0))},
    };
    if (poll(fds, 3, -1) < 0) {
        return errno == EINTR;
    }
    if (fds[0].revents != 0) {
        read_near(c);
    }
    if (c->from_at < c->from_len || (owes_far && fds[2].revents != 0)) {
        send_far(c);
    }
    if (fds[1].revents != 0) {
        write_near(c);
    }
    if (!owes_near && fds[2].revents != 0) {
        receive_far(c);
    }
    return true;
}

static void carry(hvd_channel_t *channel, int socket, int in_fd, int out_fd)
{
    carrier_t c = {.channel = channel, .socket = socket, .in_fd = in_fd, .out_fd = out_fd};
    c.from_near = malloc(CARRY_BYTES);
    set_nonblocking(in_fd);
    set_nonblocking(out_fd);
    while (c.from_near != NULL && carry_on(&c)) {
    }
    free(c.from_near);
    buf_free(&c.to_near);
}

// --- Proving the secret --------------------------------------------------------------------------

static hvd_status_t shake(hvd_channel_t *channel, int fd, int64_t limit_ms, err_t *err)
{
    uint64_t deadline_ns = deadline_in_ms(limit_ms);
    hvd_status_t status;
    while ((status = hvd_channel_shake(channel, err->text, sizeof err->text)) == HVD_IN_PROGRESS) {
        struct pollfd ready = {
            .fd = fd, .events = hvd_channel_wants_write(channel) ? POLLOUT : POLLIN};
        uint64_t now_ns = clock_ns();
        if (now_ns >= deadline_ns) {
            return fail(err, HVD_PEER_LOST, "it did not prove the secret in time");
        }
        poll(&ready, 1, (int)((deadline_ns - now_ns) / NS_PER_MS) + 1);
    }
    return status;
}

static void no_delay(int fd)
{
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

// --- The door ------------------------------------------------------------------------------------

static int listen_on(int port, err_t *err)
{
    struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    struct sockaddr_in any4 = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int on = 1, off = 0;
    int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0) {
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (bind(fd, (struct sockaddr *)&any, sizeof any) == 0 && listen(fd, MAX_CALLERS) == 0) {
            return fd;
        }
        close(fd);
    }
    fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (fd >= 0 && bind(fd, (struct sockaddr *)&any4, sizeof any4) == 0 &&
        listen(fd, MAX_CALLERS) == 0) {
        return fd;
    }
    fail_errno(err, errno, "cannot wait for launchers on port %d", port);
    if (fd >= 0) {
        close(fd);
    }
    return -1;
}

// In a process of its own: one caller, from its first byte to the end of its job.
static int serve_caller(int fd, const uint8_t secret[SECRET_BYTES], char *const *agent)
{
    err_t err = {0};
    hvd_channel_t *channel = NULL;
    child_t child;
    int near;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    set_nonblocking(fd);
    no_delay(fd);
    if (hvd_channel_open(fd, true, secret, &channel, err.text, sizeof err.text) != HVD_OK ||
        shake(channel, fd, SHAKE_MS, &err) != HVD_OK) {
        hvd_channel_close(channel);
        return 1; // a stranger, or a probe: not worth a word
    }
    if (spawn_helper(agent, &child, &near, &err) != HVD_OK) {
        say("%s", err.text);
        hvd_channel_close(channel);
        return EXIT_INTERNAL;
    }
    carry(channel, fd, near, near);
    close(near); // the agent ends what it started, and itself
    hvd_channel_close(channel);
    waitpid(child.pid, NULL, 0);
    return 0;
}

static volatile sig_atomic_t must_end;

static void end_soon(int signo)
{
    must_end = signo;
}

static void set_signals(void)
{
    struct sigaction action = {.sa_handler = end_soon};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
}

static int reap(void)
{
    int n = 0;
    while (waitpid(-1, NULL, WNOHANG) > 0) {
        n++;
    }
    return n;
}

static void answer(int listener, const uint8_t secret[SECRET_BYTES], char *const *agent, int *n)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    pid_t pid = fd >= 0 && *n < MAX_CALLERS ? fork() : -1;
    if (pid == 0) {
        signal(SIGTERM, SIG_DFL);
        signal(SIGINT, SIG_DFL);
        close(listener);
        _exit(serve_caller(fd, secret, agent));
    }
    *n += pid > 0;
    if (fd >= 0) {
        close(fd);
    }
}

int door_main(const options_t *options, const char *own_path)
{
    uint8_t secret[SECRET_BYTES];
    err_t err = {0};
    int n_callers = 0;
    if (read_secret(options->secret_file, secret, &err) != HVD_OK) {
        say("%s", err.text);
        return EXIT_USAGE;
    }
    int listener = listen_on((int)options->agent_port, &err);
    if (listener < 0) {
        say("%s", err.text);
        return EXIT_UNREACHABLE;
    }
    char *agent[] = {(char *)(uintptr_t)own_path, "--agent", NULL};
    set_signals();
    say("waiting for launchers on port %d", (int)options->agent_port);
    while (!must_end) {
        struct pollfd ready = {.fd = listener, .events = POLLIN};
        int n = poll(&ready, 1, 1000); // also looks now and then for children that have ended
        n_callers = MAX(0, n_callers - reap());
        if (n > 0) {
            answer(listener, secret, agent, &n_callers);
        }
    }
    close(listener);
    wipe(secret, sizeof secret);
    return 0; // callers' processes die with this one
}

// --- Coming through it ---------------------------------------------------------------------------

// Connects to one address. -1: err says why.
static int call_address(const struct addrinfo *at, err_t *err)
{
    int fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        fail_errno(err, errno, "no socket");
        return -1;
    }
    int code = connect(fd, at->ai_addr, at->ai_addrlen) == 0 ? 0 : errno;
    if (code == EINPROGRESS) {
        struct pollfd ready = {.fd = fd, .events = POLLOUT};
        socklen_t bytes = sizeof code;
        code = ETIMEDOUT;
        if (poll(&ready, 1, SHAKE_MS) == 1) {
            getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &bytes);
        }
    }
    if (code == 0) {
        no_delay(fd);
        return fd;
    }
    close(fd);
    fail_errno(err, code, "it does not answer");
    return -1;
}

// A channel that has proved the secret to the agent's door on `host`; *fd_p its socket.
static hvd_status_t call_host(const char *host, int port, const uint8_t secret[SECRET_BYTES],
                              hvd_channel_t **channel_p, int *fd_p, err_t *err)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    struct addrinfo *list = NULL;
    hvd_status_t status = HVD_PEER_LOST;
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    int found = getaddrinfo(host, service, &hints, &list);
    if (found != 0) {
        return fail(err, HVD_PEER_LOST, "its name has no address: %s", gai_strerror(found));
    }
    for (struct addrinfo *at = list; at != NULL && status == HVD_PEER_LOST; at = at->ai_next) {
        int fd = call_address(at, err);
        if (fd < 0) {
            continue;
        }
        status = hvd_channel_open(fd, false, secret, channel_p, err->text, sizeof err->text);
        status = status == HVD_OK ? shake(*channel_p, fd, SHAKE_MS, err) : status;
        if (status == HVD_OK) {
            *fd_p = fd;
        } else {
            hvd_channel_close(*channel_p);
            *channel_p = NULL;
            close(fd);
        }
    }
    freeaddrinfo(list);
    return status;
}

int reach_main(const options_t *options)
{
    uint8_t secret[SECRET_BYTES];
    err_t err = {0};
    hvd_channel_t *channel = NULL;
    int fd = -1;
    if (read_secret(options->secret_file, secret, &err) != HVD_OK) {
        say("%s", err.text);
        return EXIT_USAGE;
    }
    uint64_t deadline_ns = deadline_in_ms((int64_t)(options->start_timeout * 1000));
    int port = (int)options->agent_port;
    hvd_status_t status;
    // Its host may still be starting; a refused secret will not get better.
    while ((status = call_host(options->reach, port, secret, &channel, &fd, &err)) != HVD_OK &&
           status != HVD_UNAUTHENTICATED && clock_ns() < deadline_ns) {
        usleep(RETRY_MS * 1000);
    }
    wipe(secret, sizeof secret);
    if (status != HVD_OK) {
        say("no agent of %s lets us in on port %d: %s", options->reach, port, err.text);
        return EXIT_UNREACHABLE;
    }
    signal(SIGPIPE, SIG_IGN);
    carry(channel, fd, STDIN_FILENO, STDOUT_FILENO);
    hvd_channel_close(channel);
    close(fd);
    return 0;
}
