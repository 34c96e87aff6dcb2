// SPDX-License-Identifier: Apache-2.0
//
// kv_server.c - the rendezvous server: one thread, one epoll, non-blocking sockets.
//
// Whoever comes has proved the secret at the door (wire/door.h), and is then a guest: it may ask,
// one request at a time; while its answer waits in the store or leaves, nothing more is read.
//
// The thread blocks all signals. Everything here is touched by that thread only, except the count
// of the refused and the eventfd that ends it.
#define _GNU_SOURCE
#include "boot/boot.h"
#include "boot/kv_store.h"
#include "boot/testing.h"
#include "wire/door.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define EVENTS_AT_ONCE 64

typedef enum kv_conn_state { GUEST_ASKING, GUEST_WAITING, GUEST_ANSWERED } kv_conn_state_t;

typedef struct kv_conn {
    kv_waiter_t waiter; // first: the store hands it back, and it is then the connection
    kv_conn_state_t state;
    int fd;
    uint32_t events;                // what epoll watches
    bool doomed;                    // closed after the current round of events
    struct kv_conn *next, **back_p; // of guests or of the doomed
    uint64_t deadline_ns;           // waiting: to be answered
    secure_t *secure;
    buf_t incoming;       // the request, head included
    kv_request_t request; // GUEST_WAITING: points into incoming
    kv_answer_t *answer;
    size_t answer_at;
} kv_conn_t;

typedef struct conn_list {
    kv_conn_t *first, **end_p;
    size_t n;
} conn_list_t;

struct hvd_rendezvous {
    int epoll_fd, stop_fd;
    int port;
    door_t *door;
    pthread_t thread;
    secure_keys_t *keys;
    kv_store_t *store;
    conn_list_t guests, doomed;
    uint64_t next_deadline_ns; // no waiting guest is due before
    log_t log;
};

// --- Lists ---------------------------------------------------------------------------------------

static void list_append(conn_list_t *list, kv_conn_t *conn)
{
    conn->next = NULL;
    conn->back_p = list->end_p;
    *list->end_p = conn;
    list->end_p = &conn->next;
    list->n++;
}

static void list_take(conn_list_t *list, kv_conn_t *conn)
{
    *conn->back_p = conn->next;
    if (conn->next != NULL) {
        conn->next->back_p = conn->back_p;
    } else {
        list->end_p = conn->back_p;
    }
    list->n--;
}

// --- Ends ----------------------------------------------------------------------------------------

// Others may still have events for it in this round, so it is freed after it.
static void conn_doom(hvd_rendezvous_t *server, kv_conn_t *conn)
{
    if (conn->doomed) {
        return;
    }
    list_take(&server->guests, conn);
    conn->doomed = true;
    list_append(&server->doomed, conn);
    kv_store_leave(server->store, &conn->waiter);
    epoll_ctl(server->epoll_fd, EPOLL_CTL_DEL, conn->fd, NULL);
}

static void conn_free(kv_conn_t *conn)
{
    kv_answer_drop(conn->answer);
    secure_free(conn->secure);
    buf_free(&conn->incoming);
    fd_close(conn->fd);
    free(conn);
}

static void bury_doomed(hvd_rendezvous_t *server)
{
    while (server->doomed.first != NULL) {
        kv_conn_t *conn = server->doomed.first;
        list_take(&server->doomed, conn);
        conn_free(conn);
    }
}

// For a guest that does not keep to the rules.
static void conn_refuse(hvd_rendezvous_t *server, kv_conn_t *conn, const char *why)
{
    door_refuse(server->door, conn->waiter.address, why);
    conn_doom(server, conn);
}

// --- Requests and answers ------------------------------------------------------------------------

static const char spoke_too_soon[] = "it sent a second request before the first was answered";

static void watch(hvd_rendezvous_t *server, kv_conn_t *conn, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.ptr = conn};
    if (!conn->doomed && conn->events != events) {
        conn->events = events;
        epoll_ctl(server->epoll_fd, EPOLL_CTL_MOD, conn->fd, &event);
    }
}

static void begin_answer(hvd_rendezvous_t *server, kv_conn_t *conn, kv_answer_t *answer)
{
    if (answer == NULL || answer->message.failed) {
        kv_answer_drop(answer);
        log_warn(&server->log, "rendezvous", "no memory to answer %s", conn->waiter.address);
        conn_doom(server, conn);
        return;
    }
    conn->answer = answer;
    conn->answer_at = 0;
    conn->state = GUEST_ANSWERED;
}

static void run_request(hvd_rendezvous_t *server, kv_conn_t *conn)
{
    kv_answer_t *answer = kv_store_run(server->store, &conn->waiter, &conn->request);
    if (answer != NULL || conn->waiter.gate == NULL) {
        begin_answer(server, conn, answer);
        return;
    }
    if (conn->state != GUEST_WAITING) { // else it waits again
        if (secure_pending(conn->secure) > 0) {
            conn_refuse(server, conn, spoke_too_soon);
            return;
        }
        conn->state = GUEST_WAITING;
        conn->deadline_ns = clock_ns() + conn->request.wait_ms * NS_PER_MS;
        watch(server, conn, EPOLLIN); // to notice that it leaves
    }
    server->next_deadline_ns = MIN(server->next_deadline_ns, conn->deadline_ns);
}

// True when the whole answer is on its way and the next request may be read.
static bool send_answer(hvd_rendezvous_t *server, kv_conn_t *conn)
{
    const buf_t *message = &conn->answer->message;
    while (conn->answer_at < message->len) {
        ssize_t n = secure_send(conn->secure, message->data + conn->answer_at,
                                message->len - conn->answer_at, NULL);
        if (n < 0) {
            conn_doom(server, conn);
            return false;
        }
        if (n == 0) {
            watch(server, conn, EPOLLOUT);
            return false;
        }
        conn->answer_at += (size_t)n;
    }
    kv_answer_drop(conn->answer);
    conn->answer = NULL;
    buf_clear(&conn->incoming);
    conn->state = GUEST_ASKING;
    return true;
}

// Reads towards `bytes` of the message; true when they are there.
static bool read_request_to(hvd_rendezvous_t *server, kv_conn_t *conn, size_t bytes)
{
    err_t err;
    while (conn->incoming.len < bytes) {
        if (!buf_reserve(&conn->incoming, bytes - conn->incoming.len)) {
            conn_doom(server, conn);
            return false;
        }
        ssize_t n = secure_recv(conn->secure, conn->incoming.data + conn->incoming.len,
                                bytes - conn->incoming.len, &err);
        if (n == HVD_PEER_LOST) {
            conn_doom(server, conn); // the normal end of a guest
        } else if (n < 0) {
            conn_refuse(server, conn, err.text);
        }
        if (n <= 0) {
            return false;
        }
        conn->incoming.len += (size_t)n;
    }
    return true;
}

// True when a request is complete and decoded.
static bool read_request(hvd_rendezvous_t *server, kv_conn_t *conn)
{
    size_t body_bytes;
    err_t err;
    if (!read_request_to(server, conn, KV_HEAD_BYTES)) {
        return false;
    }
    if (kv_decode_head(conn->incoming.data, KV_REQUEST_LIMIT, &body_bytes, &err) != HVD_OK) {
        conn_refuse(server, conn, err.text);
        return false;
    }
    if (!read_request_to(server, conn, KV_HEAD_BYTES + body_bytes)) {
        return false;
    }
    if (kv_decode_request(conn->incoming.data + KV_HEAD_BYTES, body_bytes, &conn->request, &err) !=
        HVD_OK) {
        conn_refuse(server, conn, err.text);
        return false;
    }
    return true;
}

// A guest that waits should be silent: it can only be leaving.
static void check_waiting(hvd_rendezvous_t *server, kv_conn_t *conn)
{
    uint8_t byte;
    ssize_t n = secure_recv(conn->secure, &byte, 1, NULL);
    if (n > 0) {
        conn_refuse(server, conn, spoke_too_soon);
    } else if (n < 0) {
        conn_doom(server, conn);
    }
}

// Goes on with a guest until it waits for something.
static void advance_guest(hvd_rendezvous_t *server, kv_conn_t *conn)
{
    while (!conn->doomed) {
        if (conn->state == GUEST_WAITING) {
            return;
        }
        if (conn->state == GUEST_ANSWERED && !send_answer(server, conn)) {
            return;
        }
        if (conn->state == GUEST_ASKING) {
            if (!read_request(server, conn)) {
                break;
            }
            run_request(server, conn);
        }
    }
    // The tail of an answer may still lie in the secure channel.
    watch(server, conn, EPOLLIN | (secure_wants_write(conn->secure) ? EPOLLOUT : 0));
}

// Puts and departures make others ready; their answers may make more.
static void advance_ready(hvd_rendezvous_t *server)
{
    kv_waiter_t *waiter;
    while ((waiter = kv_store_next_ready(server->store)) != NULL) {
        kv_conn_t *conn = (kv_conn_t *)waiter;
        run_request(server, conn);
        advance_guest(server, conn);
    }
}

// --- Coming in -----------------------------------------------------------------------------------

static void enter(void *owner, const guest_t *guest)
{
    hvd_rendezvous_t *server = owner;
    kv_conn_t *conn = calloc(1, sizeof *conn);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = conn};
    if (conn == NULL || epoll_ctl(server->epoll_fd, EPOLL_CTL_ADD, guest->fd, &event) != 0) {
        free(conn);
        secure_free(guest->secure);
        fd_close(guest->fd);
        return;
    }
    conn->fd = guest->fd;
    conn->events = event.events;
    conn->secure = guest->secure;
    snprintf(conn->waiter.address, sizeof conn->waiter.address, "%s", guest->address);
    list_append(&server->guests, conn);
    advance_guest(server, conn); // its first request may have come with the proof
}

// --- The thread ----------------------------------------------------------------------------------

// One guest's end of patience may end what others wait for: those are ready then, no longer at a
// gate, and advance_ready has their answers.
static void expire_guests(hvd_rendezvous_t *server, uint64_t now_ns)
{
    if (now_ns < server->next_deadline_ns) {
        return;
    }
    server->next_deadline_ns = NEVER_NS;
    for (kv_conn_t *conn = server->guests.first, *next; conn != NULL; conn = next) {
        next = conn->next;
        if (conn->state != GUEST_WAITING || conn->waiter.gate == NULL) {
            continue;
        }
        if (conn->deadline_ns > now_ns) {
            server->next_deadline_ns = MIN(server->next_deadline_ns, conn->deadline_ns);
            continue;
        }
        begin_answer(server, conn, kv_store_late(server->store, &conn->waiter, &conn->request));
        advance_guest(server, conn);
    }
}

static int sleep_ms(const hvd_rendezvous_t *server)
{
    uint64_t until_ns = server->next_deadline_ns;
    if (until_ns == NEVER_NS) {
        return -1;
    }
    uint64_t now_ns = clock_ns();
    return until_ns <= now_ns ? 0
                              : (int)MIN((until_ns - now_ns + NS_PER_MS - 1) / NS_PER_MS, 60000);
}

static void handle(hvd_rendezvous_t *server, void *who)
{
    if (who == server->door) {
        door_progress(server->door);
        return;
    }
    kv_conn_t *conn = who;
    if (conn->doomed) {
        return;
    }
    if (conn->state == GUEST_WAITING) {
        check_waiting(server, conn);
    } else {
        advance_guest(server, conn);
    }
}

static void *serve(void *arg)
{
    hvd_rendezvous_t *server = arg;
    struct epoll_event events[EVENTS_AT_ONCE];
    for (;;) {
        int n = epoll_wait(server->epoll_fd, events, EVENTS_AT_ONCE, sleep_ms(server));
        for (int i = 0; i < n; i++) {
            if (events[i].data.ptr == &server->stop_fd) {
                return NULL;
            }
            handle(server, events[i].data.ptr);
            advance_ready(server);
        }
        uint64_t now_ns = clock_ns();
        expire_guests(server, now_ns);
        advance_ready(server);
        bury_doomed(server);
    }
}

// --- Start and stop ------------------------------------------------------------------------------

static int listen_at(hvd_rendezvous_t *server, const struct addrinfo *at)
{
    struct sockaddr_storage name = {0};
    socklen_t bytes = at->ai_addrlen;
    memcpy(&name, at->ai_addr, bytes);
    int code = door_listen(server->door, &name, &bytes);
    server->port = ntohs(name.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&name)->sin6_port
                                                    : ((struct sockaddr_in *)&name)->sin_port);
    return code;
}

// "*" is tried as IPv6 first, which takes IPv4 callers too.
static hvd_status_t open_listener(hvd_rendezvous_t *server, const char *address, int port,
                                  err_t *err)
{
    bool everywhere = address != NULL && strcmp(address, "*") == 0;
    const char *hosts[] = {everywhere        ? "::"
                           : address != NULL ? address
                                             : "127.0.0.1",
                           everywhere ? "0.0.0.0" : NULL};
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    char service[16];
    int code = EADDRNOTAVAIL;
    snprintf(service, sizeof service, "%d", port);
    for (size_t i = 0; i < N_ELEMENTS(hosts) && hosts[i] != NULL && code != 0; i++) {
        struct addrinfo *list = NULL;
        int found = getaddrinfo(hosts[i], service, &hints, &list);
        if (found != 0 && !everywhere) {
            return fail(err, HVD_INVALID_ARGUMENT,
                        "the rendezvous server cannot listen at \"%s\": %s", hosts[i],
                        gai_strerror(found));
        }
        for (struct addrinfo *at = list; at != NULL && code != 0; at = at->ai_next) {
            code = listen_at(server, at);
        }
        if (list != NULL) {
            freeaddrinfo(list);
        }
    }
    char holder[96] = "";
    if (code == EADDRINUSE) {
        boot_port_holder(port, holder, sizeof holder);
    }
    if (holder[0] != '\0') {
        return fail(err, HVD_SYSTEM,
                    "the rendezvous server cannot listen at %s port %d: it is in use by %s; end "
                    "that, or choose another port (0: any that is free)",
                    address != NULL ? address : "127.0.0.1", port, holder);
    }
    if (code != 0) {
        return fail_errno(err, code, "the rendezvous server cannot listen at %s port %d",
                          address != NULL ? address : "127.0.0.1", port);
    }
    return HVD_OK;
}

static hvd_status_t open_polling(hvd_rendezvous_t *server, err_t *err)
{
    struct epoll_event door = {.events = EPOLLIN, .data.ptr = server->door};
    struct epoll_event stop = {.events = EPOLLIN, .data.ptr = &server->stop_fd};
    server->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    server->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (server->epoll_fd < 0 || server->stop_fd < 0 ||
        epoll_ctl(server->epoll_fd, EPOLL_CTL_ADD, door_fd(server->door), &door) != 0 ||
        epoll_ctl(server->epoll_fd, EPOLL_CTL_ADD, server->stop_fd, &stop) != 0) {
        return fail_errno(err, errno,
                          "the rendezvous server cannot watch sockets; raise the limit of open "
                          "files (ulimit -n)");
    }
    return HVD_OK;
}

static hvd_status_t start_thread(hvd_rendezvous_t *server, err_t *err)
{
    int code = thread_start(&server->thread, "hvd-rendezvous", serve, server);
    return code == 0 ? HVD_OK : thread_failed(err, code, "the thread of the rendezvous server");
}

static void server_free(hvd_rendezvous_t *server)
{
    while (server->guests.first != NULL) {
        conn_doom(server, server->guests.first);
    }
    bury_doomed(server);
    door_close(server->door);
    fd_close(server->epoll_fd);
    fd_close(server->stop_fd);
    kv_store_free(server->store);
    secure_keys_free(server->keys);
    free(server);
}

static hvd_rendezvous_t *server_new(void)
{
    hvd_rendezvous_t *server = calloc(1, sizeof *server);
    if (server == NULL) {
        return NULL;
    }
    server->epoll_fd = server->stop_fd = -1;
    server->guests.end_p = &server->guests.first;
    server->doomed.end_p = &server->doomed.first;
    server->next_deadline_ns = NEVER_NS;
    server->log = (log_t){.level = LOG_WARN, .rank = -1};
    return server;
}

static hvd_status_t server_open(hvd_rendezvous_t *server, const char *address, int port,
                                const uint8_t secret[32], err_t *err)
{
    uint64_t seed;
    hvd_status_t status;
    if (port < 0 || port > 65535) {
        return fail(err, HVD_INVALID_ARGUMENT, "%d is not a port number (1 to 65535, or 0 for any)",
                    port);
    }
    TRY(random_bytes(&seed, sizeof seed, err), out);
    TRY(secure_keys_new(secret, &server->keys, err), out);
    if ((server->store = kv_store_new(seed)) == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for the rendezvous server");
    }
    const door_rules_t rules = {.name = "rendezvous",
                                .log = &server->log,
                                .keys = server->keys,
                                .role = HELLO_KV,
                                .owner = server,
                                .enter = enter};
    TRY(door_open(&rules, &server->door, err), out);
    TRY(open_listener(server, address, port, err), out);
    TRY(open_polling(server, err), out);
    TRY(start_thread(server, err), out);
out:
    return status;
}

hvd_status_t hvd_rendezvous_start(const char *bind_address, int port, const uint8_t secret[32],
                                  hvd_rendezvous_t **server_p, char *text, size_t text_bytes)
{
    err_t err = {.status = HVD_OK};
    hvd_rendezvous_t *server = server_new();
    hvd_status_t status = HVD_NO_MEMORY;
    if (server != NULL) {
        status = server_open(server, bind_address, port, secret, &err);
    }
    if (status == HVD_OK) {
        *server_p = server;
    } else if (server != NULL) {
        server_free(server);
    }
    return err_export(&err, status, text, text_bytes);
}

int hvd_rendezvous_port(const hvd_rendezvous_t *server)
{
    return server->port;
}

uint64_t kv_server_n_refused(const hvd_rendezvous_t *server)
{
    return door_n_refused(server->door);
}

void hvd_rendezvous_stop(hvd_rendezvous_t *server)
{
    if (server == NULL) {
        return;
    }
    // An eventfd that holds 0 always takes a 1.
    eventfd_write(server->stop_fd, 1);
    pthread_join(server->thread, NULL);
    server_free(server);
}
