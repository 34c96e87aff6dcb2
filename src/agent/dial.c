// SPDX-License-Identifier: Apache-2.0
//
// dial.c - dialling with a secret: the launcher to agents that wait, agents to their launcher; and
// the door at which either of them waits for the other.
//
// An agent may be there long before its launcher, or after it; it tries every address again until
// --start-timeout. Somebody else may have that address, so another secret is no reason to give up
// either. One thread; nothing is left behind.
#define _GNU_SOURCE
#include "agent/dial.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <unistd.h>

#define HANDSHAKE_MS 10000
#define CONNECT_MS 10000
#define CONNECT_EACH_MS 2000 // where there are other addresses to try
#define READ_MS 10000
#define AGAIN_MS 500

hvd_status_t shared_secret(const options_t *options, uint8_t secret[SECRET_BYTES], err_t *err)
{
    uint64_t deadline_ns = deadline_in_ms(READ_MS);
    if (options->secret_fd >= 0) {
        return secret_read_fd((int)options->secret_fd, "--secret-fd", deadline_ns, secret, err);
    }
    return secret_read_file(options->secret_file, "--secret-file", SECRET_FOR_GROUP, deadline_ns,
                            secret, err);
}

// --- Dialling ------------------------------------------------------------------------------------

static int connect_to(const struct addrinfo *at, int timeout_ms)
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
    } else if (poll(&polled, 1, timeout_ms) == 1) {
        getsockopt(polled.fd, SOL_SOCKET, SO_ERROR, &code, &bytes);
    }
    if (code != 0) {
        close(polled.fd);
        errno = code;
        return -1;
    }
    return polled.fd;
}

static hvd_status_t shake(int fd, hvd_channel_t *channel, char *text, size_t text_bytes)
{
    uint64_t deadline_ns = deadline_in_ms(HANDSHAKE_MS);
    hvd_status_t status;
    while ((status = hvd_channel_shake(channel, text, text_bytes)) == HVD_IN_PROGRESS) {
        short writes = hvd_channel_wants_write(channel) ? POLLOUT : 0;
        struct pollfd polled = {.fd = fd, .events = (short)(POLLIN | writes)};
        if (clock_ns() >= deadline_ns) {
            snprintf(text, text_bytes, "it took longer than %d s", HANDSHAKE_MS / 1000);
            return HVD_TIMEOUT;
        }
        poll(&polled, 1, 100);
    }
    return status;
}

// Both sides prove the secret; an exit code, 0 if they have.
static int prove(int fd, const uint8_t secret[SECRET_BYTES], hvd_channel_t **channel_p, char *text,
                 size_t text_bytes)
{
    char why[HVD_TEXT_BYTES] = "";
    hvd_status_t status = hvd_channel_open(fd, false, secret, channel_p, why, sizeof why);
    hvd_channel_t *channel = status == HVD_OK ? *channel_p : NULL;
    status = status == HVD_OK ? shake(fd, channel, why, sizeof why) : status;
    if (status != HVD_OK) {
        bool is_other = status == HVD_UNAUTHENTICATED;
        snprintf(text, text_bytes, "%s: %s",
                 is_other ? "the secret is not the same" : "no handshake", why);
        hvd_channel_close(channel);
        return is_other                ? EXIT_OTHER_SECRET
               : status == HVD_TIMEOUT ? EXIT_NO_ANSWER
                                       : EXIT_UNREACHABLE;
    }
    return 0;
}

static int dial_within(const char *host, const char *port, int timeout_ms,
                       const uint8_t secret[SECRET_BYTES], int *fd_p, hvd_channel_t **channel_p,
                       char *text, size_t text_bytes)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    int fd = -1;
    if (getaddrinfo(host, port, &hints, &found) != 0) {
        snprintf(text, text_bytes, "nobody knows the name %s", host);
        return EXIT_NO_NAME;
    }
    for (struct addrinfo *at = found; at != NULL && fd < 0; at = at->ai_next) {
        fd = connect_to(at, timeout_ms);
    }
    int why = errno;
    freeaddrinfo(found);
    if (fd < 0) {
        snprintf(text, text_bytes, "%s", strerror(why));
        return why == ECONNREFUSED ? EXIT_NO_LISTENER
               : why == ETIMEDOUT  ? EXIT_NO_ANSWER
                                   : EXIT_UNREACHABLE;
    }
    int code = prove(fd, secret, channel_p, text, text_bytes);
    if (code != 0) {
        close(fd);
    } else {
        *fd_p = fd;
    }
    return code;
}

int dial(const char *host, const char *port, const uint8_t secret[SECRET_BYTES], int *fd_p,
         hvd_channel_t **channel_p, char *text, size_t text_bytes)
{
    return dial_within(host, port, CONNECT_MS, secret, fd_p, channel_p, text, text_bytes);
}

const char *peer_address(int fd, char *text, size_t bytes)
{
    struct sockaddr_storage peer;
    socklen_t peer_bytes = sizeof peer;
    char name[NI_MAXHOST];
    if (getpeername(fd, (struct sockaddr *)&peer, &peer_bytes) != 0 ||
        getnameinfo((struct sockaddr *)&peer, peer_bytes, name, sizeof name, NULL, 0,
                    NI_NUMERICHOST) != 0) {
        return NULL;
    }
    snprintf(text, bytes, "%s", strncmp(name, "::ffff:", 7) == 0 ? name + 7 : name);
    return text;
}

// The address at *at_p, without brackets; false: there are no more.
static bool next_address(const char **at_p, const char *end, char *address, size_t bytes)
{
    const char *at = *at_p;
    size_t n = strcspn(at, ",");
    n = MIN(n, (size_t)(end - at));
    *at_p = at + n + (at + n < end);
    bool has_brackets = n > 1 && at[0] == '[' && at[n - 1] == ']';
    snprintf(address, bytes, "%.*s", (int)(has_brackets ? n - 2 : n), at + has_brackets);
    return n > 0;
}

// Each address once. An exit code; of several that failed, that of who has another secret: what
// somebody answers says more than that nobody does.
static int dial_each(const char *addresses, const char *port, const uint8_t secret[SECRET_BYTES],
                     channel_t *channel_p, char *text, size_t text_bytes)
{
    const char *at = addresses;
    char address[256], why[HVD_TEXT_BYTES];
    hvd_channel_t *secure;
    int fd, code = EXIT_UNREACHABLE, worst = 0;
    while (code != 0 && next_address(&at, port, address, sizeof address)) {
        code =
            dial_within(address, port + 1, CONNECT_EACH_MS, secret, &fd, &secure, why, sizeof why);
        if (code != 0 && (worst == 0 || code == EXIT_OTHER_SECRET)) {
            snprintf(text, text_bytes, "%s: %s", address, why);
            worst = code;
        }
    }
    if (code == 0) {
        channel_open_secure(channel_p, fd, secure);
    }
    return code == 0 ? 0 : worst;
}

// Waits a little before it says so.
static bool starter_is_gone(const options_t *options)
{
    struct pollfd life = {.fd = (int)options->life_fd, .events = POLLIN};
    return poll(&life, 1, AGAIN_MS) > 0;
}

int dial_launcher(const options_t *options, channel_t *channel_p)
{
    const char *port = strrchr(options->dial, ':');
    uint64_t deadline_ns = deadline_in_ms((int64_t)(options->start_timeout * 1000));
    char text[HVD_TEXT_BYTES] = "";
    uint8_t secret[SECRET_BYTES];
    err_t err = {0};
    int code;
    if (port == NULL || port == options->dial || port[1] == '\0') {
        say("--dial is \"%.200s\": give an address and a port, as in 10.0.0.1:23023, or several "
            "addresses, as in 10.0.0.1,fe80::1:23023",
            options->dial);
        return EXIT_USAGE;
    }
    if (shared_secret(options, secret, &err) != HVD_OK) {
        say("%s", err.text);
        return EXIT_NO_SECRET;
    }
    while ((code = dial_each(options->dial, port, secret, channel_p, text, sizeof text)) != 0 &&
           clock_ns() < deadline_ns && !starter_is_gone(options)) {
    }
    wipe(secret, sizeof secret);
    if (code != 0) {
        say("no launcher at %s within %g s (%s): %s%s", options->dial, options->start_timeout,
            options->pai_worker ? "--pai-timeout" : "--start-timeout", text,
            code == EXIT_OTHER_SECRET ? "; give both sides the same --secret-file" : "");
    }
    return code;
}

// --- Waiting -------------------------------------------------------------------------------------

static void say_line(void *arg, int level, const char *line)
{
    (void)arg;
    (void)level;
    say("%s", line);
}

static int port_of(const struct sockaddr_storage *at)
{
    struct sockaddr_in6 v6; // the port is at the same place in both kinds
    memcpy(&v6, at, sizeof v6);
    return ntohs(v6.sin6_port);
}

// At a numeric address; 0 or an errno.
static int listen_there(door_t *door, const char *address, int *port_p)
{
    const struct addrinfo hints = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | AI_PASSIVE,
                                   .ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    char port[16];
    snprintf(port, sizeof port, "%d", *port_p);
    if (getaddrinfo(address, port, &hints, &found) != 0) {
        return EADDRNOTAVAIL;
    }
    struct sockaddr_storage at = {0};
    socklen_t bytes = found->ai_addrlen;
    memcpy(&at, found->ai_addr, bytes);
    freeaddrinfo(found);
    int code = door_listen(door, &at, &bytes);
    *port_p = code == 0 ? port_of(&at) : *port_p;
    return code;
}

static hvd_status_t listen_at(door_t *door, const char *address, int *port_p, const char *setting,
                              err_t *err)
{
    const union {
        struct sockaddr_in6 v6;
        struct sockaddr_in v4;
        struct sockaddr_storage storage;
    } everywhere[] = {
        {.v6 = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)*port_p)}},
        {.v4 = {.sin_family = AF_INET, .sin_port = htons((uint16_t)*port_p)}},
    };
    int code = address[0] != '\0' ? listen_there(door, address, port_p) : EAFNOSUPPORT;
    for (size_t i = 0; i < N_ELEMENTS(everywhere) && code == EAFNOSUPPORT; i++) {
        struct sockaddr_storage at = everywhere[i].storage;
        socklen_t bytes = i == 0 ? sizeof everywhere[i].v6 : sizeof everywhere[i].v4;
        code = door_listen(door, &at, &bytes);
        *port_p = code == 0 ? port_of(&at) : *port_p;
    }
    return code == 0 ? HVD_OK
                     : fail_errno(err, code,
                                  "cannot listen on port %d (%s); is another program using it? "
                                  "See: ss -ltnp; end it, or choose another port here and for "
                                  "the other side",
                                  *port_p, setting);
}

hvd_status_t door_at(const options_t *options, int *port_p, const char *setting,
                     door_rules_t *rules, door_t **door_p, err_t *err)
{
    static const log_t log = {.level = LOG_WARN, .rank = -1, .hide_time = true, .sink = say_line};
    uint8_t secret[SECRET_BYTES];
    hvd_status_t status;
    rules->log = &log;
    rules->role = HELLO_CHANNEL;
    rules->patience_ns = HANDSHAKE_MS * NS_PER_MS;
    rules->is_probed = true; // by a kubelet, say
    TRY(shared_secret(options, secret, err), out);
    status = secure_keys_new(secret, &rules->keys, err);
    wipe(secret, sizeof secret);
    TRY(status, out);
    TRY(door_open(rules, door_p, err), out);
    TRY(listen_at(*door_p, options->await_address, port_p, setting, err), out);
out:
    return status;
}
