// SPDX-License-Identifier: Apache-2.0
//
// relay.c - agents without ssh: hosts that wait for horovodrun at a port, and knocking there.
//
// `horovodrun --serve-agents` listens; whoever proves the secret of --secret-file (hvd_channel_,
// TLS 1.3) gets an agent of its own, and the bytes between the two are passed on. On the other
// side `horovodrun --dial-agent HOST` takes the place of ssh: it connects and passes its stdin and
// stdout on. So launcher and agent know nothing of this. Who connects and says nothing costs one
// descriptor: there are at most MAX_NEWCOMERS, the oldest makes room. Who speaks, as our own do at
// once, gets a process, which dies with the server; until it has proved the secret it has
// HANDSHAKE_MS, and there are at most MAX_GUESTS. When either end goes, the other is closed, and
// the agent cleans up as it always does.
#define _GNU_SOURCE
#include "launch/launch.h"
#include "launch/process.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define HANDSHAKE_MS 10000
#define CONNECT_MS 10000
#define READ_MS 10000
#define MAX_GUESTS 256
#define MAX_NEWCOMERS 256
#define TELL_MS 60000 // between two lines about refused connections
#define ROOM (256 * KIB)
#define LOOK_MS 500

static hvd_status_t read_secret(const options_t *options, uint8_t secret[SECRET_BYTES], err_t *err)
{
    return secret_read_file(options->secret_file, "--secret-file", SECRET_FOR_GROUP,
                            deadline_in_ms(READ_MS), secret, err);
}

// --- Passing bytes on ----------------------------------------------------------------------------

typedef struct flow {
    uint8_t data[ROOM];
    size_t len, sent;
} flow_t;

typedef struct relay {
    int net_fd, in_fd, out_fd;
    hvd_channel_t *channel;
    flow_t to_net, to_local;
    bool net_is_gone, local_is_gone;
} relay_t;

static size_t room_in(flow_t *flow)
{
    if (flow->sent == flow->len) {
        flow->sent = flow->len = 0;
    }
    return sizeof flow->data - flow->len;
}

static bool is_waiting(const flow_t *flow)
{
    return flow->sent < flow->len;
}

static bool would_block(void)
{
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

static void move_local(relay_t *relay)
{
    flow_t *in = &relay->to_net, *out = &relay->to_local;
    size_t room = room_in(in);
    if (room > 0 && !relay->local_is_gone) {
        ssize_t n = read(relay->in_fd, in->data + in->len, room);
        in->len += n > 0 ? (size_t)n : 0;
        relay->local_is_gone = n == 0 || (n < 0 && !would_block());
    }
    if (is_waiting(out)) {
        ssize_t n = write(relay->out_fd, out->data + out->sent, out->len - out->sent);
        out->sent += n > 0 ? (size_t)n : 0;
        if (n < 0 && !would_block()) {
            relay->local_is_gone = true;
            out->sent = out->len;
        }
    }
}

static void move_net(relay_t *relay)
{
    flow_t *in = &relay->to_local, *out = &relay->to_net;
    size_t room;
    while (!relay->net_is_gone && (room = room_in(in)) > 0) {
        int64_t n = hvd_channel_recv(relay->channel, in->data + in->len, room, NULL, 0);
        in->len += n > 0 ? (size_t)n : 0;
        relay->net_is_gone = n < 0;
        if (n <= 0) {
            break;
        }
    }
    if (is_waiting(out) || hvd_channel_wants_write(relay->channel)) {
        int64_t n =
            hvd_channel_send(relay->channel, out->data + out->sent, out->len - out->sent, NULL, 0);
        out->sent += n > 0 ? (size_t)n : 0;
        relay->net_is_gone |= n < 0;
    }
}

// Until either end is gone and what it said has been passed on.
static void pass_on(relay_t *relay)
{
    while (!(relay->net_is_gone && !is_waiting(&relay->to_local)) &&
           !(relay->local_is_gone &&
             (relay->net_is_gone ||
              (!is_waiting(&relay->to_net) && !hvd_channel_wants_write(relay->channel))))) {
        bool writes = is_waiting(&relay->to_net) || hvd_channel_wants_write(relay->channel);
        bool reads_net = room_in(&relay->to_local) > 0;
        bool reads_local = !relay->local_is_gone && room_in(&relay->to_net) > 0;
        struct pollfd polled[] = {
            {.fd = relay->net_is_gone ? -1 : relay->net_fd,
             .events = (short)((reads_net ? POLLIN : 0) | (writes ? POLLOUT : 0))},
            {.fd = reads_local ? relay->in_fd : -1, .events = POLLIN},
            {.fd = is_waiting(&relay->to_local) ? relay->out_fd : -1, .events = POLLOUT},
        };
        poll(polled, N_ELEMENTS(polled), -1);
        move_local(relay);
        move_net(relay);
    }
}

static hvd_status_t shake(int fd, hvd_channel_t *channel, char *text, size_t text_bytes)
{
    uint64_t deadline_ns = deadline_in_ms(HANDSHAKE_MS);
    hvd_status_t status;
    while ((status = hvd_channel_shake(channel, text, text_bytes)) == HVD_IN_PROGRESS) {
        short writes = hvd_channel_wants_write(channel) ? POLLOUT : 0;
        struct pollfd polled = {.fd = fd, .events = (short)(POLLIN | writes)};
        if (clock_ns() >= deadline_ns) {
            snprintf(text, text_bytes, "Connection timed out during the handshake");
            return HVD_TIMEOUT;
        }
        poll(&polled, 1, 100);
    }
    return status;
}

// HVD_OK: the other end has proved the secret.
static hvd_status_t relay_open(int net_fd, bool is_server, const uint8_t *secret, relay_t **relay_p,
                               char *text, size_t text_bytes)
{
    relay_t *relay = calloc(1, sizeof *relay);
    hvd_status_t status = relay == NULL ? HVD_NO_MEMORY : HVD_OK;
    if (status == HVD_OK) {
        relay->net_fd = net_fd;
        status = hvd_channel_open(net_fd, is_server, secret, &relay->channel, text, text_bytes);
    }
    if (status == HVD_OK) {
        status = shake(net_fd, relay->channel, text, text_bytes);
    }
    *relay_p = relay;
    return status;
}

static void relay_free(relay_t *relay)
{
    if (relay != NULL) {
        hvd_channel_close(relay->channel);
        free(relay);
    }
}

// --- Knocking ------------------------------------------------------------------------------------

static int connect_to(const struct addrinfo *at)
{
    struct pollfd polled = {.events = POLLOUT};
    int code = ETIMEDOUT;
    socklen_t bytes = sizeof code;
    polled.fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (polled.fd < 0) {
        return -1;
    }
    if (connect(polled.fd, at->ai_addr, at->ai_addrlen) == 0) {
        code = 0;
    } else if (errno != EINPROGRESS) {
        code = errno;
    } else if (poll(&polled, 1, CONNECT_MS) == 1) {
        getsockopt(polled.fd, SOL_SOCKET, SO_ERROR, &code, &bytes);
    }
    if (code != 0) {
        close(polled.fd);
        errno = code;
        return -1;
    }
    return polled.fd;
}

int relay_dial(const options_t *options)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    uint8_t secret[SECRET_BYTES];
    char port[16], text[HVD_TEXT_BYTES] = "";
    err_t err = {0};
    int fd = -1;
    signal(SIGPIPE, SIG_IGN);
    snprintf(port, sizeof port, "%d", (int)options->agent_port);
    if (read_secret(options, secret, &err) != HVD_OK) {
        say("agent port: %s", err.text);
        return EXIT_USAGE;
    }
    if (getaddrinfo(options->dial_agent, port, &hints, &found) != 0) {
        say("agent port: Could not resolve hostname %s", options->dial_agent);
        return EXIT_UNREACHABLE;
    }
    for (struct addrinfo *at = found; at != NULL && fd < 0; at = at->ai_next) {
        fd = connect_to(at);
    }
    int code = errno;
    freeaddrinfo(found);
    if (fd < 0) {
        say("agent port: %s", strerror(code));
        return EXIT_UNREACHABLE;
    }
    set_nonblocking(STDIN_FILENO);
    set_nonblocking(STDOUT_FILENO);
    relay_t *relay;
    hvd_status_t status = relay_open(fd, false, secret, &relay, text, sizeof text);
    wipe(secret, sizeof secret);
    if (status == HVD_OK) {
        relay->in_fd = STDIN_FILENO;
        relay->out_fd = STDOUT_FILENO;
        pass_on(relay);
    } else {
        say("agent port: %s: %s",
            status == HVD_UNAUTHENTICATED ? "the secret is not the same" : "no handshake", text);
    }
    relay_free(relay);
    close(fd);
    return status == HVD_OK ? 0 : EXIT_UNREACHABLE;
}

// --- Waiting -------------------------------------------------------------------------------------

typedef struct guests {
    pid_t pids[MAX_GUESTS];
    int n;
    uint64_t tell_at_ns; // the next time a refusal is worth a line
    bool had_one;        // that proved the secret, and has left
} guests_t;

// Connected, and silent so far; the oldest first.
typedef struct newcomers {
    int fds[MAX_NEWCOMERS];
    uint64_t leave_at_ns[MAX_NEWCOMERS];
    int n;
} newcomers_t;

static void drop_newcomer(newcomers_t *newcomers, int i)
{
    size_t n_after = (size_t)(--newcomers->n - i);
    memmove(&newcomers->fds[i], &newcomers->fds[i + 1], n_after * sizeof newcomers->fds[0]);
    memmove(&newcomers->leave_at_ns[i], &newcomers->leave_at_ns[i + 1],
            n_after * sizeof newcomers->leave_at_ns[0]);
}

// Those who have left, and orphans if this is the first process of a container.
static void reap_guests(guests_t *guests)
{
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        for (int i = 0; i < guests->n; i++) {
            if (guests->pids[i] == pid) {
                bool was_refused = WIFEXITED(status) && WEXITSTATUS(status) != 0;
                guests->tell_at_ns = was_refused && clock_ns() >= guests->tell_at_ns
                                         ? deadline_in_ms(TELL_MS)
                                         : guests->tell_at_ns;
                guests->pids[i] = guests->pids[--guests->n];
                guests->had_one |= WIFEXITED(status) && WEXITSTATUS(status) == 0;
            }
        }
    }
}

// As sshd does, so that the agent knows which of the launcher's addresses works from here.
static void tell_peer(int fd)
{
    struct sockaddr_storage peer;
    socklen_t bytes = sizeof peer;
    char name[NI_MAXHOST], text[NI_MAXHOST + 16];
    if (getpeername(fd, (struct sockaddr *)&peer, &bytes) == 0 &&
        getnameinfo((struct sockaddr *)&peer, bytes, name, sizeof name, NULL, 0, NI_NUMERICHOST) ==
            0) {
        const char *v4 = strncmp(name, "::ffff:", 7) == 0 ? name + 7 : name;
        snprintf(text, sizeof text, "%s 0 0 0", v4);
        setenv("SSH_CONNECTION", text, 1);
    }
}

// Starts the agent and passes on what it and the other end say; it ends with the connection.
static void serve_agent(relay_t *relay)
{
    char path[4096];
    char *command[] = {path, "--agent", NULL};
    child_t agent;
    err_t err = {0};
    int socket;
    if (!own_path(path, sizeof path) || spawn_helper(command, &agent, &socket, &err) != HVD_OK) {
        say("cannot start an agent: %s", err.text);
        return;
    }
    relay->in_fd = relay->out_fd = socket;
    pass_on(relay);
    close(socket); // the agent ends its ranks and itself
    waitpid(agent.pid, NULL, 0);
}

// In a process of its own, which dies with the server.
static int serve_guest(int fd, const uint8_t *secret, bool tells)
{
    char text[HVD_TEXT_BYTES] = "";
    sigset_t none;
    relay_t *relay;
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    set_nonblocking(fd);
    tell_peer(fd);
    hvd_status_t status = relay_open(fd, true, secret, &relay, text, sizeof text);
    if (status == HVD_OK) {
        serve_agent(relay);
    } else if (tells) {
        say("refused a connection: %s; further ones within a minute are not reported", text);
    }
    relay_free(relay);
    return status == HVD_OK ? 0 : 1;
}

static int listen_at(int port, err_t *err)
{
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_addr = in6addr_any};
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    const int yes = 1;
    int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    bool has_v6 = fd >= 0;
    v6.sin6_port = htons((uint16_t)port);
    fd = has_v6 ? fd : socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0) {
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    }
    if (fd < 0 ||
        bind(fd, has_v6 ? (struct sockaddr *)&v6 : (struct sockaddr *)&v4,
             has_v6 ? sizeof v6 : sizeof v4) != 0 ||
        listen(fd, MAX_GUESTS) != 0) {
        fail_errno(err, errno,
                   "cannot listen on port %d (--agent-port); is another program using it? See: ss "
                   "-ltnp; end it, or choose another port here and for " PROGRAM,
                   port);
        if (fd >= 0) {
            close(fd);
        }
        return -1;
    }
    return fd;
}

// false: asked to end.
static bool hear_signals(int signal_fd, guests_t *guests)
{
    struct signalfd_siginfo info;
    while (read(signal_fd, &info, sizeof info) == sizeof info) {
        if (info.ssi_signo != SIGCHLD) {
            return false;
        }
        reap_guests(guests);
    }
    return true;
}

static void accept_newcomer(int listener, newcomers_t *newcomers)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0) {
        return;
    }
    if (newcomers->n == MAX_NEWCOMERS) {
        close(newcomers->fds[0]);
        drop_newcomer(newcomers, 0);
    }
    newcomers->fds[newcomers->n] = fd;
    newcomers->leave_at_ns[newcomers->n++] = deadline_in_ms(HANDSHAKE_MS);
}

// The process keeps nothing but its own connection: the others could not be cut otherwise.
static void start_guest(int fd, const uint8_t *secret, int listener, const newcomers_t *newcomers,
                        guests_t *guests)
{
    bool tells = clock_ns() >= guests->tell_at_ns;
    pid_t pid = fork();
    if (pid == 0) {
        close(listener);
        for (int i = 0; i < newcomers->n; i++) {
            if (newcomers->fds[i] != fd) {
                close(newcomers->fds[i]);
            }
        }
        _exit(serve_guest(fd, secret, tells));
    }
    if (pid > 0) {
        guests->pids[guests->n++] = pid;
    }
}

// Came and went without a word: somebody, a kubelet say, asks whether the port answers.
static bool has_left(int fd)
{
    char byte;
    return recv(fd, &byte, sizeof byte, MSG_PEEK | MSG_DONTWAIT) == 0;
}

// polled: of the newcomers, in their order. The last first: dropping one moves those after it.
static void serve_newcomers(newcomers_t *newcomers, const struct pollfd *polled,
                            const uint8_t *secret, int listener, guests_t *guests)
{
    uint64_t now_ns = clock_ns();
    for (int i = newcomers->n - 1; i >= 0; i--) {
        bool moves = polled[i].revents != 0 && guests->n < MAX_GUESTS;
        if (moves && !has_left(newcomers->fds[i])) {
            start_guest(newcomers->fds[i], secret, listener, newcomers, guests);
        }
        if (moves || now_ns >= newcomers->leave_at_ns[i]) {
            close(newcomers->fds[i]);
            drop_newcomer(newcomers, i);
        }
    }
}

static int serve_wait_ms(const newcomers_t *newcomers, bool looks)
{
    uint64_t now_ns = clock_ns();
    int most_ms = looks ? LOOK_MS : -1;
    if (newcomers->n == 0) {
        return most_ms;
    }
    int wait_ms = newcomers->leave_at_ns[0] <= now_ns
                      ? 0
                      : (int)((newcomers->leave_at_ns[0] - now_ns) / NS_PER_MS) + 1;
    return looks ? MIN(wait_ms, most_ms) : wait_ms;
}

// Until a signal or, with a time to give up, until the last guest has left.
static int serve_at(const options_t *options, int port, uint64_t give_up_ns)
{
    uint8_t secret[SECRET_BYTES];
    guests_t guests = {.n = 0};
    newcomers_t newcomers = {.n = 0};
    struct pollfd polled[2 + MAX_NEWCOMERS];
    err_t err = {0};
    int listener = -1;
    int signal_fd = signals_open(SIG_SETMASK, (const int[]){SIGCHLD, SIGTERM, SIGINT, 0});
    bool is_left = false;
    if (read_secret(options, secret, &err) != HVD_OK || (listener = listen_at(port, &err)) < 0) {
        say("%s", err.text);
        return EXIT_USAGE;
    }
    do {
        polled[0] = (struct pollfd){.fd = signal_fd, .events = POLLIN};
        polled[1] = (struct pollfd){.fd = listener, .events = POLLIN};
        for (int i = 0; i < newcomers.n; i++) { // while all guests are here they wait their turn
            int fd = guests.n < MAX_GUESTS ? newcomers.fds[i] : -1;
            polled[2 + i] = (struct pollfd){.fd = fd, .events = POLLIN};
        }
        if (poll(polled, 2 + (nfds_t)newcomers.n,
                 serve_wait_ms(&newcomers, give_up_ns != NEVER_NS)) < 0) {
            continue;
        }
        serve_newcomers(&newcomers, polled + 2, secret, listener, &guests);
        if (polled[1].revents != 0) {
            accept_newcomer(listener, &newcomers);
        }
        is_left =
            give_up_ns != NEVER_NS && guests.n == 0 && (guests.had_one || clock_ns() >= give_up_ns);
    } while (hear_signals(signal_fd, &guests) && !is_left);
    wipe(secret, sizeof secret);
    close(signal_fd);
    close(listener);
    return is_left && !guests.had_one ? EXIT_START_TIMEOUT : 0;
}

int relay_serve(const options_t *options)
{
    if (options->agent_port == 0 || options->secret_file[0] == '\0') {
        say("--serve-agents needs --agent-port and --secret-file");
        return EXIT_USAGE;
    }
    return serve_at(options, (int)options->agent_port, NEVER_NS);
}

int relay_serve_until_left(const options_t *options, int port, int timeout_s)
{
    if (port == 0) {
        say("--secret-file needs a port on which agents wait: --agent-port, or a port labelled "
            "horovod in the job file");
        return EXIT_USAGE;
    }
    int code = serve_at(options, port, deadline_in_ms((int64_t)timeout_s * 1000));
    if (code == EXIT_START_TIMEOUT) {
        say("nobody who has the secret connected within %d s", timeout_s);
    }
    return code;
}
