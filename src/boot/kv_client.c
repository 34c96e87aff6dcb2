// SPDX-License-Identifier: Apache-2.0
//
// kv_client.c - a rank's connection to the rendezvous server.
//
// Blocking calls over a non-blocking socket: every step waits in poll() until it can go on or the
// caller's deadline passes. One request is under way at a time. Waiting for keys happens on the
// server, which is told to answer a little before our own deadline, so that its answer (which
// ranks are missing) still arrives.
//
// Connecting tries every address in turn, in passes: each pass gives an attempt more time, and
// between passes it sleeps a little longer. Whoever calls owns the object; one thread at a time.
#define _GNU_SOURCE
#include "boot/boot.h"
#include "boot/kv_proto.h"
#include "wire/door.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#define ATTEMPT_MS_FIRST 1000
#define ATTEMPT_MS_LAST 8000
#define PAUSE_MS_FIRST 10
#define PAUSE_MS_LAST 200
// How long to go on after a server has refused our secret: another address may still be right.
#define REFUSED_PATIENCE_MS 1000
// The longest wait for the former holder of a name: it is the same rank of an earlier init.
#define ENTER_WAIT_MS 2000
#define ANSWER_MARGIN_MS 500

struct kv_client {
    int fd;
    secure_keys_t *keys;
    secure_t *secure;
    buf_t out;
    bool is_broken;   // an answer was not read to its end
    int missing;      // the first that a gather has waited for in vain; -1: none
    char address[64]; // of the server
};

// --- Waiting -------------------------------------------------------------------------------------

static uint64_t left_ms(uint64_t deadline_ns)
{
    uint64_t now_ns = clock_ns();
    return deadline_ns <= now_ns ? 0 : (deadline_ns - now_ns + NS_PER_MS - 1) / NS_PER_MS;
}

// False when the deadline has passed.
static bool wait_until(int fd, short events, uint64_t deadline_ns)
{
    struct pollfd polled = {.fd = fd, .events = events};
    for (;;) {
        uint64_t ms = left_ms(deadline_ns);
        int n = poll(&polled, 1, (int)MIN(ms, 60000));
        if (n > 0) {
            return true;
        }
        if (ms == 0) {
            return false;
        }
    }
}

static bool wait_secure(const kv_client_t *client, uint64_t deadline_ns)
{
    short events = POLLIN;
    if (secure_wants_write(client->secure)) {
        events |= POLLOUT;
    }
    return secure_pending(client->secure) > 0 || wait_until(client->fd, events, deadline_ns);
}

// --- Connecting ----------------------------------------------------------------------------------

static hvd_status_t open_socket(kv_client_t *client, const struct addrinfo *at,
                                uint64_t deadline_ns, err_t *err)
{
    char host[NI_MAXHOST] = "?", service[NI_MAXSERV] = "?";
    int on = 1, code = 0;
    socklen_t code_bytes = sizeof code;
    getnameinfo(at->ai_addr, at->ai_addrlen, host, sizeof host, service, sizeof service,
                NI_NUMERICHOST | NI_NUMERICSERV);
    client->fd = socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (client->fd < 0) {
        return fail_errno(err, errno, "cannot create a socket for %s", host);
    }
    setsockopt(client->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(client->fd, at->ai_addr, at->ai_addrlen) != 0) {
        if (errno != EINPROGRESS) {
            return fail_errno(err, errno, "cannot connect to %s port %s", host, service);
        }
        if (!wait_until(client->fd, POLLOUT, deadline_ns)) {
            return fail(err, HVD_PEER_LOST, "%s port %s does not answer", host, service);
        }
        getsockopt(client->fd, SOL_SOCKET, SO_ERROR, &code, &code_bytes);
        if (code != 0) {
            return fail_errno(err, code, "cannot connect to %s port %s", host, service);
        }
    }
    secure_peer_name(client->fd, client->address, sizeof client->address);
    return HVD_OK;
}

static hvd_status_t greet(kv_client_t *client, uint64_t deadline_ns, err_t *err)
{
    greeting_t greeting = {
        .fd = client->fd, .keys = client->keys, .hello = {.role = HELLO_KV, .encrypted = 1}};
    hvd_status_t status = greeting_prepare(&greeting, 0, err);
    while (status == HVD_OK && (status = greeting_step(&greeting, err)) == HVD_IN_PROGRESS) {
        if (wait_until(client->fd, greeting_wants_write(&greeting) ? POLLOUT : POLLIN,
                       deadline_ns)) {
            status = HVD_OK;
        } else {
            status = fail(err, HVD_PEER_LOST,
                          "%s accepted the connection but did not finish the handshake; is it the "
                          "rendezvous server?",
                          client->address);
        }
    }
    client->secure = greeting.secure;
    return status;
}

static void hang_up(kv_client_t *client)
{
    secure_free(client->secure);
    client->secure = NULL;
    if (client->fd >= 0) {
        close(client->fd);
        client->fd = -1;
    }
}

static hvd_status_t connect_to(kv_client_t *client, const struct addrinfo *at, uint64_t deadline_ns,
                               err_t *err)
{
    hvd_status_t status;
    TRY(open_socket(client, at, deadline_ns, err), undo);
    TRY(greet(client, deadline_ns, err), undo);
    return HVD_OK;
undo:
    hang_up(client);
    return status;
}

// What is known about why connecting fails: a refused secret says more than a silent address.
static void keep_better(err_t *kept, const err_t *err)
{
    if (kept->status != HVD_UNAUTHENTICATED || err->status == HVD_UNAUTHENTICATED) {
        *kept = *err;
    }
}

// Every address that a name stands for.
static hvd_status_t connect_name(kv_client_t *client, const char *name, int port,
                                 uint64_t deadline_ns, uint64_t attempt_ms, err_t *kept)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    struct addrinfo *list = NULL;
    hvd_status_t status = HVD_PEER_LOST;
    char service[16];
    err_t err;
    snprintf(service, sizeof service, "%d", port);
    int found = getaddrinfo(name, service, &hints, &list);
    if (found != 0) {
        fail(&err, HVD_PEER_LOST, "the name \"%s\" has no address: %s", name, gai_strerror(found));
        keep_better(kept, &err);
        return HVD_PEER_LOST;
    }
    for (struct addrinfo *at = list; at != NULL && status != HVD_OK; at = at->ai_next) {
        status =
            connect_to(client, at, MIN(deadline_ns, deadline_in_ms((int64_t)attempt_ms)), &err);
        if (status != HVD_OK) {
            keep_better(kept, &err);
        }
    }
    freeaddrinfo(list);
    return status;
}

// Every name of the list, once.
static hvd_status_t connect_pass(kv_client_t *client, const char *addresses, int port,
                                 uint64_t deadline_ns, uint64_t attempt_ms, err_t *kept)
{
    const char *at = addresses;
    hvd_status_t status = HVD_PEER_LOST;
    char name[NI_MAXHOST];
    while (*at != '\0' && status != HVD_OK) {
        size_t skip = strspn(at, ", ");
        size_t len = strcspn(at + skip, ", ");
        if (len > 0 && len < sizeof name) {
            memcpy(name, at + skip, len);
            name[len] = '\0';
            status = connect_name(client, name, port, deadline_ns, attempt_ms, kept);
        }
        at += skip + len;
    }
    return status;
}

static hvd_status_t fail_connect(const char *addresses, int port, uint64_t started_ns,
                                 const err_t *kept, err_t *err)
{
    double waited_s = (double)(clock_ns() - started_ns) / (double)NS_PER_S;
    if (kept->status == HVD_UNAUTHENTICATED) {
        return fail(err, HVD_UNAUTHENTICATED,
                    "the rendezvous server at %s port %d has a different secret than this rank: %s",
                    addresses, port, kept->text);
    }
    return fail(err, HVD_PEER_LOST,
                "cannot reach the rendezvous server at %s port %d after %.1f s: %s; check that the "
                "launcher is running, that HOROVOD_RENDEZVOUS_ADDR and _PORT are its address and "
                "port, and that no firewall is in the way",
                addresses, port, waited_s,
                kept->text[0] != '\0' ? kept->text : "the address list is empty");
}

hvd_status_t kv_connect(const char *addresses, int port, const uint8_t secret[32],
                        uint64_t deadline_ns, kv_client_t **client_p, err_t *err)
{
    uint64_t attempt_ms = ATTEMPT_MS_FIRST, pause_ms = PAUSE_MS_FIRST, started_ns = clock_ns();
    bool was_refused = false;
    err_t kept = {.status = HVD_OK};
    kv_client_t *client = calloc(1, sizeof *client);
    hvd_status_t status;
    if (client == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for the connection to the rendezvous server");
    }
    client->fd = client->missing = -1;
    TRY(secure_keys_new(secret, &client->keys, err), undo);
    for (;;) {
        status = connect_pass(client, addresses, port, deadline_ns, attempt_ms, &kept);
        if (status == HVD_OK) {
            *client_p = client;
            return HVD_OK;
        }
        if (kept.status == HVD_UNAUTHENTICATED && !was_refused) {
            was_refused = true;
            deadline_ns = MIN(deadline_ns, deadline_in_ms(REFUSED_PATIENCE_MS));
        }
        if (clock_ns() >= deadline_ns) {
            status = fail_connect(addresses, port, started_ns, &kept, err);
            goto undo;
        }
        poll(NULL, 0, (int)MIN(pause_ms, left_ms(deadline_ns)));
        pause_ms = MIN(2 * pause_ms, PAUSE_MS_LAST);
        attempt_ms = MIN(2 * attempt_ms, ATTEMPT_MS_LAST);
    }
undo:
    kv_disconnect(client);
    return status;
}

void kv_disconnect(kv_client_t *client)
{
    if (client == NULL) {
        return;
    }
    hang_up(client);
    secure_keys_free(client->keys);
    buf_free(&client->out);
    free(client);
}

// --- One request ---------------------------------------------------------------------------------

static hvd_status_t fail_silent(kv_client_t *client, err_t *err)
{
    return fail(err, HVD_TIMEOUT,
                "the rendezvous server at %s stopped answering; check its host and the network",
                client->address);
}

static hvd_status_t send_request(kv_client_t *client, uint64_t deadline_ns, err_t *err)
{
    size_t sent = 0;
    while (sent < client->out.len || secure_wants_write(client->secure)) {
        ssize_t n =
            secure_send(client->secure, client->out.data + sent, client->out.len - sent, err);
        if (n < 0) {
            return (hvd_status_t)n;
        }
        sent += (size_t)n;
        if (n == 0 && secure_wants_write(client->secure) &&
            !wait_until(client->fd, POLLOUT, deadline_ns)) {
            return fail_silent(client, err);
        }
    }
    return HVD_OK;
}

static hvd_status_t recv_exactly(kv_client_t *client, void *data, size_t bytes,
                                 uint64_t deadline_ns, err_t *err)
{
    size_t got = 0;
    while (got < bytes) {
        ssize_t n = secure_recv(client->secure, (uint8_t *)data + got, bytes - got, err);
        if (n < 0) {
            return (hvd_status_t)n;
        }
        if (n == 0 && !wait_secure(client, deadline_ns)) {
            return fail_silent(client, err);
        }
        got += (size_t)n;
    }
    return HVD_OK;
}

static hvd_status_t recv_answer(kv_client_t *client, uint64_t deadline_ns, buf_t *storage,
                                err_t *err)
{
    uint8_t head[KV_HEAD_BYTES];
    size_t bytes;
    hvd_status_t status;
    TRY(recv_exactly(client, head, sizeof head, deadline_ns, err), out);
    TRY(kv_decode_head(head, KV_ANSWER_LIMIT, &bytes, err), out);
    buf_clear(storage);
    if (buf_append(storage, NULL, bytes) == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for %zu bytes from the rendezvous server",
                    bytes);
    }
    status = recv_exactly(client, storage->data, bytes, deadline_ns, err);
out:
    return status;
}

// What the server may take of the time that is left.
static uint32_t server_wait_ms(uint64_t deadline_ns)
{
    uint64_t ms = left_ms(deadline_ns);
    return (uint32_t)MIN(ms - MIN(ms / 2, ANSWER_MARGIN_MS), UINT32_MAX);
}

// Sends the request and reads the answer into storage; its code and what follows come back.
static hvd_status_t ask(kv_client_t *client, const kv_request_t *request, uint64_t deadline_ns,
                        buf_t *storage, kv_code_t *code_p, reader_t *body_p, err_t *err)
{
    hvd_status_t status;
    if (!kv_key_is_valid(request->key, request->key_bytes) ||
        request->value_bytes > KV_VALUE_LIMIT) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "a key must be 1 to %zu printable characters and a value at "
                    "most %zu bytes; these have %zu and %zu",
                    KV_KEY_LIMIT, KV_VALUE_LIMIT, request->key_bytes, request->value_bytes);
    }
    if (client->is_broken) {
        return fail(err, HVD_PEER_LOST, "the connection to the rendezvous server failed earlier");
    }
    client->is_broken = true;
    buf_clear(&client->out);
    kv_encode_request(&client->out, request);
    if (client->out.failed) {
        return fail(err, HVD_NO_MEMORY, "no memory for a request to the rendezvous server");
    }
    TRY(send_request(client, deadline_ns, err), out);
    TRY(recv_answer(client, deadline_ns, storage, err), out);
    reader_t r = reader_of(storage->data, storage->len);
    uint8_t code = get_u8(&r);
    if (code >= KV_N_CODES) {
        return fail(err, HVD_PROTOCOL, "the rendezvous server answered with code %u", code);
    }
    client->is_broken = false;
    *code_p = code;
    *body_p = r;
out:
    return status;
}

static hvd_status_t fail_full(const kv_client_t *client, err_t *err)
{
    return fail(err, HVD_NO_MEMORY, "the rendezvous server at %s has no room for more keys",
                client->address);
}

static kv_request_t request_of(kv_op_t op, const char *key, uint64_t deadline_ns)
{
    return (kv_request_t){
        .op = op, .key = key, .key_bytes = strlen(key), .wait_ms = server_wait_ms(deadline_ns)};
}

// --- The requests --------------------------------------------------------------------------------

hvd_status_t kv_put(kv_client_t *client, const char *key, const void *value, size_t bytes,
                    uint64_t deadline_ns, err_t *err)
{
    kv_request_t request = request_of(KV_PUT, key, deadline_ns);
    buf_t answer = {0};
    kv_code_t code;
    reader_t body;
    request.value = value;
    request.value_bytes = bytes;
    hvd_status_t status = ask(client, &request, deadline_ns, &answer, &code, &body, err);
    buf_free(&answer);
    if (status != HVD_OK) {
        return status;
    }
    return code == KV_OK ? HVD_OK : fail_full(client, err);
}

hvd_status_t kv_get(kv_client_t *client, const char *key, uint64_t deadline_ns, buf_t *storage,
                    size_t *bytes_p, err_t *err)
{
    kv_request_t request = request_of(KV_GET, key, deadline_ns);
    kv_code_t code;
    reader_t body;
    hvd_status_t status = ask(client, &request, deadline_ns, storage, &code, &body, err);
    if (status != HVD_OK) {
        return status;
    }
    if (code == KV_LATE) {
        return fail(err, HVD_TIMEOUT, "waited %.1f s for the key \"%s\" at the rendezvous server",
                    request.wait_ms / 1000.0, key);
    }
    if (code != KV_OK) {
        return fail_full(client, err);
    }
    size_t bytes = reader_left(&body);
    memmove(storage->data, body.at, bytes);
    storage->len = bytes;
    *bytes_p = bytes;
    return HVD_OK;
}

static hvd_status_t fail_left(const kv_request_t *request, const kv_left_t *left, err_t *err)
{
    return fail(err, HVD_PEER_LOST,
                "rank %u (%s) left before all ranks had started: its connection to the rendezvous "
                "server was closed, by step \"%.*s\" at the latest; its output says why, or just "
                "ends if it was killed",
                left->number, left->who, (int)request->key_bytes, request->key);
}

static hvd_status_t fail_gather(kv_client_t *client, const kv_request_t *request,
                                uint64_t started_ns, kv_code_t code, reader_t *body, err_t *err)
{
    kv_missing_t missing;
    char text[HVD_TEXT_BYTES / 2];
    kv_left_t left;
    if (code == KV_DIFFERS) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "this rank was started in a job of %u ranks, others in one of "
                    "%u; give every rank the same HOROVOD_SIZE",
                    request->n, get_u32(body));
    }
    if (code == KV_LEFT) {
        hvd_status_t status = kv_decode_left(body, &left, err);
        return status != HVD_OK ? status : fail_left(request, &left, err);
    }
    if (code != KV_LATE) {
        return fail(err, HVD_NO_MEMORY,
                    "the rendezvous server does not have enough memory for all values");
    }
    hvd_status_t status = kv_decode_missing(body, &missing, err);
    if (status != HVD_OK) {
        return status;
    }
    kv_missing_format(&missing, text, sizeof text);
    client->missing = missing.n_ranges > 0 ? (int)missing.ranges[0].first : -1;
    return fail(err, HVD_TIMEOUT,
                "waited %.1f s for rank%s %s of %u at step \"%.*s\"; look for the first "
                "error in the output of these ranks, or raise HOROVOD_START_TIMEOUT",
                (double)(clock_ns() - started_ns) / (double)NS_PER_S,
                missing.n_missing == 1 ? "" : "s", text, request->n, (int)request->key_bytes,
                request->key);
}

hvd_status_t kv_gather(kv_client_t *client, const char *prefix, int n, uint64_t deadline_ns,
                       const uint8_t **values, size_t *lengths, buf_t *storage, err_t *err)
{
    kv_request_t request = request_of(KV_GATHER, prefix, deadline_ns);
    uint64_t started_ns = clock_ns();
    kv_code_t code;
    reader_t body;
    char last = request.key_bytes > 0 ? prefix[request.key_bytes - 1] : '0';
    if (n < 1 || (unsigned)n > KV_GATHER_LIMIT || (last >= '0' && last <= '9')) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "cannot gather %d values under \"%s\": the prefix must not end "
                    "in a digit and the count must be from 1 to %u",
                    n, prefix, KV_GATHER_LIMIT);
    }
    request.n = (uint32_t)n;
    hvd_status_t status = ask(client, &request, deadline_ns, storage, &code, &body, err);
    if (status != HVD_OK) {
        return status;
    }
    if (code != KV_OK) {
        return fail_gather(client, &request, started_ns, code, &body, err);
    }
    return kv_decode_values(&body, n, values, lengths, err);
}

int kv_missing(const kv_client_t *client)
{
    return client != NULL ? client->missing : -1;
}

hvd_status_t kv_enter(kv_client_t *client, const char *name, const char *who, uint64_t deadline_ns,
                      uint64_t *turn_p, err_t *err)
{
    kv_request_t request = request_of(KV_ENTER, name, deadline_ns);
    buf_t answer = {0};
    kv_code_t code;
    reader_t body;
    request.wait_ms = MIN(request.wait_ms, ENTER_WAIT_MS);
    request.value = (const uint8_t *)who;
    request.value_bytes = MIN(strlen(who), KV_WHO_LIMIT);
    hvd_status_t status = ask(client, &request, deadline_ns, &answer, &code, &body, err);
    if (status == HVD_OK && code == KV_OK) {
        *turn_p = get_u64(&body);
    } else if (status == HVD_OK && code == KV_HELD) {
        status = fail(err, HVD_INVALID_ARGUMENT,
                      "the process at %.*s has already registered as %s; was the job started "
                      "twice, or do two processes have the same HOROVOD_RANK?",
                      (int)reader_left(&body), (const char *)body.at, name);
    } else if (status == HVD_OK) {
        status = fail_full(client, err);
    }
    buf_free(&answer);
    return status;
}
