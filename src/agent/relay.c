// SPDX-License-Identifier: Apache-2.0
//
// relay.c - agents without ssh: hosts that wait for horovodrun at a port, knocking there, and hosts
// that dial it again and again.
//
// `horovodrun --serve-agents` has a door (wire/door.h); whoever proves the secret of --secret-file
// there gets a process and an agent of its own, and the bytes between the two are passed on. On the
// other side `horovodrun --dial-agent HOST` takes the place of ssh: it connects and passes its
// stdin and stdout on. So launcher and agent know nothing of this. A guest's process dies with the
// server, and there are at most MAX_GUESTS: others wait at the door. When either end goes, the
// other is closed, and the agent cleans up as it always does.
#define _GNU_SOURCE
#include "agent/agent.h"

#include "boot/boot.h"

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

#define MAX_GUESTS 256
#define ROOM (256 * KIB)
#define LOOK_MS 500
#define REDIAL_MS 200

// Secrets pass through the memory of all of these: no core file of them is written. Those they fork
// inherit that; the agents, which are programs of their own, do the same.
static void keep_out_of_cores(void)
{
    prctl(PR_SET_DUMPABLE, 0);
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

// Passes on between a channel whose peer has proved the secret and two descriptors. Takes the
// channel over.
static hvd_status_t relay_run(int net_fd, hvd_channel_t *channel, int in_fd, int out_fd)
{
    relay_t *relay = channel != NULL ? secret_new(sizeof *relay) : NULL; // a plan passes through it
    if (relay != NULL) {
        relay->net_fd = net_fd;
        relay->channel = channel;
        relay->in_fd = in_fd;
        relay->out_fd = out_fd;
        pass_on(relay);
        secret_free(relay, sizeof *relay);
    }
    hvd_channel_close(channel);
    return relay != NULL ? HVD_OK : HVD_NO_MEMORY;
}

// --- Knocking ------------------------------------------------------------------------------------

int relay_dial(const options_t *options)
{
    char port[16], text[HVD_TEXT_BYTES];
    uint8_t secret[SECRET_BYTES];
    err_t err = {0};
    hvd_channel_t *channel;
    int fd;
    keep_out_of_cores();
    signal(SIGPIPE, SIG_IGN);
    if (shared_secret(options, secret, &err) != HVD_OK) {
        say("agent port: %s", err.text);
        return EXIT_NO_SECRET;
    }
    snprintf(port, sizeof port, "%d", (int)options->agent_port);
    int code = dial(options->dial_agent, port, secret, &fd, &channel, text, sizeof text);
    wipe(secret, sizeof secret);
    if (code != 0) {
        say("agent port: %s", text);
        return code;
    }
    set_nonblocking(STDIN_FILENO);
    set_nonblocking(STDOUT_FILENO);
    hvd_status_t status = relay_run(fd, channel, STDIN_FILENO, STDOUT_FILENO);
    close(fd);
    return status == HVD_OK ? 0 : EXIT_UNREACHABLE;
}

// --- Dialling again ------------------------------------------------------------------------------

// The exit code of an agent in a process of its own, which ends with us; *is_told_p: we are to.
// Orphans are reaped too, as this may be the first process of a container.
static int serve_once(const options_t *options, int signal_fd, bool *is_told_p)
{
    struct signalfd_siginfo info;
    int status = 0;
    pid_t ended = 0, agent = fork();
    if (agent == 0) {
        sigset_t none;
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        close(signal_fd);
        _exit(agent_main(options));
    }
    while (agent > 0 && ended != agent) {
        struct pollfd polled = {.fd = signal_fd, .events = POLLIN};
        poll(&polled, 1, LOOK_MS);
        while (read(signal_fd, &info, sizeof info) == sizeof info) {
            if (info.ssi_signo != SIGCHLD) {
                *is_told_p = true;
                kill(agent, SIGTERM);
            }
        }
        while (ended != agent && (ended = waitpid(-1, &status, WNOHANG)) > 0) {
        }
    }
    return agent > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_INTERNAL;
}

int relay_redial(const options_t *options)
{
    int signal_fd = signals_open(SIG_SETMASK, (const int[]){SIGCHLD, SIGTERM, SIGINT, 0});
    bool is_told = false;
    int code;
    keep_out_of_cores();
    do {
        code = serve_once(options, signal_fd, &is_told);
        struct pollfd polled = {.fd = is_told ? -1 : signal_fd, .events = POLLIN};
        poll(&polled, 1, is_told ? 0 : REDIAL_MS);
    } while (!is_told && code != EXIT_USAGE && code != EXIT_NO_SECRET);
    close(signal_fd);
    return is_told ? 0 : code;
}

// --- Waiting -------------------------------------------------------------------------------------

typedef struct guests {
    pid_t pids[MAX_GUESTS];
    int n;
} guests_t;

// Those who have left, and orphans if this is the first process of a container.
static void reap_guests(guests_t *guests)
{
    pid_t pid;
    while ((pid = waitpid(-1, NULL, WNOHANG)) > 0) {
        for (int i = 0; i < guests->n; i++) {
            if (guests->pids[i] == pid) {
                guests->pids[i] = guests->pids[--guests->n];
            }
        }
    }
}

// As sshd does, so that the agent knows which of the launcher's addresses works from here.
static void tell_peer(int fd)
{
    char name[NI_MAXHOST], text[NI_MAXHOST + 16];
    if (peer_address(fd, name, sizeof name) != NULL) {
        snprintf(text, sizeof text, "%s 0 0 0", name);
        setenv("SSH_CONNECTION", text, 1);
    }
}

static volatile sig_atomic_t guest_agent; // of this process; 0: none yet

// The server is to end: agents of elastic jobs hand over first.
static void on_term(int signo)
{
    if (guest_agent > 0) {
        kill((pid_t)guest_agent, signo);
    }
}

// Starts the agent and passes on what it and the other end say; it ends with the connection. In a
// process of its own, which dies with the server and has no descriptor of the door.
_Noreturn static void serve_guest(const guest_t *guest)
{
    char path[4096];
    char *command[] = {path, "--agent", NULL};
    child_t agent;
    err_t err = {0};
    sigset_t none;
    int socket;
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    tell_peer(guest->fd);
    if (!own_path(path, sizeof path) || spawn_helper(command, &agent, &socket, &err) != HVD_OK) {
        say("cannot start an agent: %s", err.text);
        _exit(0);
    }
    guest_agent = agent.pid;
    signal(SIGTERM, on_term);
    relay_run(guest->fd, channel_of_guest(guest), socket, socket);
    close(socket); // the agent ends its ranks and itself
    waitpid(agent.pid, NULL, 0);
    _exit(0);
}

// Somebody has proved the secret.
static void enter(void *owner, const guest_t *guest)
{
    guests_t *guests = owner;
    fd_for_children(guest->fd);
    pid_t pid = guests->n < MAX_GUESTS ? fork() : -1;
    if (pid == 0) {
        serve_guest(guest);
    }
    if (pid > 0) {
        guests->pids[guests->n++] = pid;
    } else {
        say("refused %s: too many agents are running already", guest->address);
    }
    secure_free(guest->secure);
    close(guest->fd);
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

// Agents of elastic jobs hand over before they end; a second signal does not wait for that.
static void dismiss_guests(int signal_fd, guests_t *guests)
{
    for (int i = 0; i < guests->n; i++) {
        kill(guests->pids[i], SIGTERM);
    }
    while (guests->n > 0 && hear_signals(signal_fd, guests)) {
        struct pollfd polled = {.fd = signal_fd, .events = POLLIN};
        poll(&polled, 1, LOOK_MS);
    }
}

// Until a signal.
static int serve_at(const options_t *options, int port)
{
    guests_t guests = {.n = 0};
    door_rules_t rules = {.name = "agent port", .owner = &guests, .enter = enter};
    door_t *door = NULL;
    err_t err = {0};
    int signal_fd = signals_open(SIG_SETMASK, (const int[]){SIGCHLD, SIGTERM, SIGINT, 0});
    if (door_at(options, &port, "--agent-port", &rules, &door, &err) != HVD_OK) {
        say("%s", err.text);
        door_close(door);
        secure_keys_free(rules.keys);
        close(signal_fd);
        return EXIT_USAGE;
    }
    do {
        struct pollfd polled[] = {
            {.fd = signal_fd, .events = POLLIN},
            {.fd = guests.n < MAX_GUESTS ? door_fd(door) : -1, .events = POLLIN},
        };
        if (poll(polled, N_ELEMENTS(polled), -1) > 0 && polled[1].revents != 0) {
            door_progress(door);
        }
    } while (hear_signals(signal_fd, &guests));
    door_close(door);
    dismiss_guests(signal_fd, &guests);
    secure_keys_free(rules.keys);
    close(signal_fd);
    return 0;
}

int relay_serve(const options_t *options)
{
    if (options->agent_port == 0 || options->secret_file[0] == '\0') {
        say("--serve-agents needs --agent-port and --secret-file");
        return EXIT_USAGE;
    }
    keep_out_of_cores();
    return serve_at(options, (int)options->agent_port);
}
