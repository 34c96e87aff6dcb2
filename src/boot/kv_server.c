// SPDX-License-Identifier: Apache-2.0
//
// kv_server.c - the rendezvous server: one thread, one epoll, non-blocking sockets.
//
// A connection is first a newcomer, then a guest. A newcomer must send its 64-byte hello and finish
// the TLS handshake within NEWCOMER_MS of being accepted; until then it costs a descriptor and,
// after a hello that names this job, what a handshake needs. A guest has proved the secret and may
// ask, one request at a time; while its answer waits in the store or leaves, nothing more is read.
//
// At most NEWCOMER_LIMIT newcomers are held. When more knock, the oldest is dropped, but not before
// NEWCOMER_GRACE_MS: until then the rest wait in the kernel's queue. So a thousand ranks that start
// together all get in, and idle strangers are pushed out by those who come after them.
//
// What strangers do is counted and reported at most once a minute. The thread blocks all signals.
// Everything here is touched by that thread only, except n_refused and the eventfd that ends it.
#define _GNU_SOURCE
#include "boot/boot.h"
#include "boot/kv_store.h"
#include "wire/secure.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define NEWCOMER_MS 2000
#define NEWCOMER_GRACE_MS 100
#define NEWCOMER_LIMIT 256
#define ACCEPT_PAUSE_MS 100
#define BACKLOG 4096
#define REPORT_EVERY_S 60
#define EVENTS_AT_ONCE 64

typedef enum kv_conn_state {
    NEWCOMER_HELLO,
    NEWCOMER_SHAKING,
    GUEST_ASKING,
    GUEST_WAITING,
    GUEST_ANSWERED
} kv_conn_state_t;

typedef struct kv_conn {
    kv_waiter_t waiter; // first: the store hands it back, and it is then the connection
    kv_conn_state_t state;
    int fd;
    uint32_t events;                // what epoll watches
    bool doomed;                    // closed after the current round of events
    struct kv_conn *next, **back_p; // of newcomers (oldest first) or of guests
    uint64_t deadline_ns;           // newcomer: to be a guest; waiting guest: to be answered
    secure_t *secure;
    uint8_t hello[HELLO_BYTES];
    size_t hello_len;
    buf_t frame;          // the request, head included
    kv_request_t request; // GUEST_WAITING: points into frame
    kv_answer_t *answer;
    size_t answer_at;
} kv_conn_t;

typedef struct conn_list {
    kv_conn_t *first, **end_p;
    size_t n;
} conn_list_t;

struct hvd_rendezvous {
    int listen_fd, epoll_fd, stop_fd;
    int port;
    pthread_t thread;
    secure_keys_t *keys;
    kv_store_t *store;
    conn_list_t newcomers, guests, doomed;
    bool is_listening;         // epoll watches the listener
    bool is_full;              // not listening because there are too many newcomers
    uint64_t listen_again_ns;  // when not listening: at the latest
    uint64_t next_deadline_ns; // no waiting guest is due before
    atomic_uint_fast64_t n_refused;
    uint64_t next_report_ns;
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

static bool is_newcomer(const kv_conn_t *conn)
{
    return conn->state <= NEWCOMER_SHAKING;
}

static conn_list_t *list_of(hvd_rendezvous_t *server, const kv_conn_t *conn)
{
    return conn->doomed        ? &server->doomed
           : is_newcomer(conn) ? &server->newcomers
                               : &server->guests;
}

// --- Ends ----------------------------------------------------------------------------------------

// Others may still have events for it in this round, so it is freed after it.
static void conn_doom(hvd_rendezvous_t *server, kv_conn_t *conn)
{
    if (conn->doomed) {
        return;
    }
    list_take(list_of(server, conn), conn);
    conn->doomed = true;
    list_append(&server->doomed, conn);
    kv_store_leave(server->store, &conn->waiter);
    epoll_ctl(server->epoll_fd, EPOLL_CTL_DEL, conn->fd, NULL);
}

static void conn_free(kv_conn_t *conn)
{
    kv_answer_drop(conn->answer);
    secure_free(conn->secure);
    buf_free(&conn->frame);
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

// Strangers must not be able to fill the log.
static bool report_is_due(hvd_rendezvous_t *server)
{
    uint64_t now_ns = clock_ns();
    if (now_ns < server->next_report_ns) {
        return false;
    }
    server->next_report_ns = now_ns + REPORT_EVERY_S * NS_PER_S;
    return true;
}

// Counts a client that has no business here, and says so now and then.
static void conn_refuse(hvd_rendezvous_t *server, kv_conn_t *conn, const char *why)
{
    unsigned long long n = atomic_fetch_add(&server->n_refused, 1) + 1;
    if (report_is_due(server)) {
        log_warn(&server->log, "rendezvous",
                 "refused %llu connections so far, the latest from %s: %s", n, conn->waiter.address,
                 why);
    }
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
    if (answer == NULL || answer->frame.failed) {
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
    const buf_t *frame = &conn->answer->frame;
    while (conn->answer_at < frame->len) {
        ssize_t n = secure_send(conn->secure, frame->data + conn->answer_at,
                                frame->len - conn->answer_at, NULL);
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
    buf_clear(&conn->frame);
    conn->state = GUEST_ASKING;
    return true;
}

// Reads towards `bytes` of the frame; true when they are there.
static bool read_frame_to(hvd_rendezvous_t *server, kv_conn_t *conn, size_t bytes)
{
    err_t err;
    while (conn->frame.len < bytes) {
        if (!buf_reserve(&conn->frame, bytes - conn->frame.len)) {
            conn_doom(server, conn);
            return false;
        }
        ssize_t n = secure_recv(conn->secure, conn->frame.data + conn->frame.len,
                                bytes - conn->frame.len, &err);
        if (n == HVD_PEER_LOST) {
            conn_doom(server, conn); // the normal end of a guest
        } else if (n < 0) {
            conn_refuse(server, conn, err.text);
        }
        if (n <= 0) {
            return false;
        }
        conn->frame.len += (size_t)n;
    }
    return true;
}

// True when a request is complete and decoded.
static bool read_request(hvd_rendezvous_t *server, kv_conn_t *conn)
{
    size_t body_bytes;
    err_t err;
    if (!read_frame_to(server, conn, KV_FRAME_HEAD_BYTES)) {
        return false;
    }
    if (kv_decode_head(conn->frame.data, KV_REQUEST_LIMIT, &body_bytes, &err) != HVD_OK) {
        conn_refuse(server, conn, err.text);
        return false;
    }
    if (!read_frame_to(server, conn, KV_FRAME_HEAD_BYTES + body_bytes)) {
        return false;
    }
    if (kv_decode_request(conn->frame.data + KV_FRAME_HEAD_BYTES, body_bytes, &conn->request,
                          &err) != HVD_OK) {
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

// --- Newcomers -----------------------------------------------------------------------------------

// True when the hello is complete and names this job.
static bool read_hello(hvd_rendezvous_t *server, kv_conn_t *conn)
{
    hello_t hello;
    err_t err;
    ssize_t n =
        recv(conn->fd, conn->hello + conn->hello_len, HELLO_BYTES - conn->hello_len, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return false;
    }
    if (n <= 0) {
        conn_refuse(server, conn, "it left before it said hello");
        return false;
    }
    conn->hello_len += (size_t)n;
    if (conn->hello_len < HELLO_BYTES) {
        return false;
    }
    if (hello_decode(conn->hello, &hello, &err) != HVD_OK) {
        conn_refuse(server, conn, err.text);
        return false;
    }
    if (hello.role != HELLO_KV ||
        memcmp(hello.job, secure_keys_job(server->keys), sizeof hello.job) != 0) {
        secure_refuse(conn->fd);
        conn_refuse(server, conn, "it belongs to another job");
        return false;
    }
    if (secure_new(server->keys, conn->fd, true, conn->hello, &conn->secure, &err) != HVD_OK) {
        conn_refuse(server, conn, err.text);
        return false;
    }
    return true;
}

static void welcome(hvd_rendezvous_t *server, kv_conn_t *conn)
{
    list_take(&server->newcomers, conn);
    conn->state = GUEST_ASKING;
    list_append(&server->guests, conn);
    advance_guest(server, conn);
}

static void advance_newcomer(hvd_rendezvous_t *server, kv_conn_t *conn)
{
    err_t err;
    if (conn->state == NEWCOMER_HELLO) {
        if (!read_hello(server, conn)) {
            return;
        }
        conn->state = NEWCOMER_SHAKING;
    }
    hvd_status_t status = secure_handshake(conn->secure, &err);
    if (status == HVD_OK) {
        welcome(server, conn);
    } else if (status == HVD_IN_PROGRESS) {
        watch(server, conn, secure_wants_write(conn->secure) ? EPOLLOUT : EPOLLIN);
    } else {
        conn_refuse(server, conn, err.text);
    }
}

// --- Accepting -----------------------------------------------------------------------------------

static void set_listening(hvd_rendezvous_t *server, bool on)
{
    struct epoll_event event = {.events = on ? EPOLLIN : 0, .data.ptr = &server->listen_fd};
    if (server->is_listening != on) {
        server->is_listening = on;
        epoll_ctl(server->epoll_fd, EPOLL_CTL_MOD, server->listen_fd, &event);
    }
}

static void pause_listening(hvd_rendezvous_t *server, uint64_t until_ns, bool is_full)
{
    set_listening(server, false);
    server->listen_again_ns = until_ns;
    server->is_full = is_full;
}

static void resume_listening(hvd_rendezvous_t *server, uint64_t now_ns)
{
    bool has_room = server->is_full && server->newcomers.n < NEWCOMER_LIMIT;
    if (has_room || now_ns >= server->listen_again_ns) {
        set_listening(server, true);
    }
}

static void admit(hvd_rendezvous_t *server, int fd)
{
    struct epoll_event event = {.events = EPOLLIN};
    kv_conn_t *conn = calloc(1, sizeof *conn);
    int on = 1;
    if (conn == NULL) {
        close(fd);
        return;
    }
    fd_not_for_children(fd);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    conn->fd = fd;
    conn->events = event.events;
    conn->deadline_ns = deadline_in_ms(NEWCOMER_MS);
    secure_peer_name(fd, conn->waiter.address, sizeof conn->waiter.address);
    event.data.ptr = conn;
    if (epoll_ctl(server->epoll_fd, EPOLL_CTL_ADD, fd, &event) != 0) {
        conn_free(conn);
        return;
    }
    list_append(&server->newcomers, conn);
}

// Room for one more newcomer, by dropping the oldest if it has had its chance.
static bool make_room(hvd_rendezvous_t *server, uint64_t now_ns)
{
    if (server->newcomers.n < NEWCOMER_LIMIT) {
        return true;
    }
    kv_conn_t *oldest = server->newcomers.first;
    uint64_t had_its_chance_ns =
        oldest->deadline_ns - (NEWCOMER_MS - NEWCOMER_GRACE_MS) * NS_PER_MS;
    if (now_ns < had_its_chance_ns) {
        pause_listening(server, had_its_chance_ns, true);
        return false;
    }
    conn_refuse(server, oldest, "it did not prove the job's secret while others were waiting");
    return true;
}

static void accept_some(hvd_rendezvous_t *server)
{
    for (int i = 0; i < EVENTS_AT_ONCE && make_room(server, clock_ns()); i++) {
        int fd = accept4(server->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            admit(server, fd);
        } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            if (report_is_due(server)) {
                log_warn(&server->log, "rendezvous",
                         "cannot accept connections for lack of descriptors or "
                         "memory, with %zu guests inside; raise the limit of open files",
                         server->guests.n);
            }
            pause_listening(server, deadline_in_ms(ACCEPT_PAUSE_MS), false);
            return;
        } else if (errno == EAGAIN) {
            return;
        }
    }
}

// --- The thread ----------------------------------------------------------------------------------

static void expire_newcomers(hvd_rendezvous_t *server, uint64_t now_ns)
{
    while (server->newcomers.first != NULL && server->newcomers.first->deadline_ns <= now_ns) {
        conn_refuse(server, server->newcomers.first,
                    "it did not prove the job's secret within 2 s");
    }
}

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
    if (server->newcomers.first != NULL) {
        until_ns = MIN(until_ns, server->newcomers.first->deadline_ns);
    }
    if (!server->is_listening) {
        until_ns = MIN(until_ns, server->listen_again_ns);
    }
    if (until_ns == NEVER_NS) {
        return -1;
    }
    uint64_t now_ns = clock_ns();
    return until_ns <= now_ns ? 0
                              : (int)MIN((until_ns - now_ns + NS_PER_MS - 1) / NS_PER_MS, 60000);
}

static void handle(hvd_rendezvous_t *server, void *who)
{
    if (who == &server->listen_fd) {
        accept_some(server);
        return;
    }
    kv_conn_t *conn = who;
    if (conn->doomed) {
        return;
    }
    if (is_newcomer(conn)) {
        advance_newcomer(server, conn);
    } else if (conn->state == GUEST_WAITING) {
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
        expire_newcomers(server, now_ns);
        expire_guests(server, now_ns);
        advance_ready(server);
        bury_doomed(server);
        resume_listening(server, now_ns);
    }
}

// --- Start and stop ------------------------------------------------------------------------------

static int listen_at(const struct addrinfo *at, int *errno_p)
{
    int on = 1, off = 0;
    int fd = socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        *errno_p = errno;
        return -1;
    }
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (at->ai_family == AF_INET6) {
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    }
    if (bind(fd, at->ai_addr, at->ai_addrlen) != 0 || listen(fd, BACKLOG) != 0) {
        *errno_p = errno;
        close(fd);
        return -1;
    }
    return fd;
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
    for (size_t i = 0; i < N_ELEMENTS(hosts) && hosts[i] != NULL && server->listen_fd < 0; i++) {
        struct addrinfo *list = NULL;
        int found = getaddrinfo(hosts[i], service, &hints, &list);
        if (found != 0 && !everywhere) {
            return fail(err, HVD_INVALID_ARGUMENT,
                        "the rendezvous server cannot listen at \"%s\": %s", hosts[i],
                        gai_strerror(found));
        }
        for (struct addrinfo *at = list; at != NULL && server->listen_fd < 0; at = at->ai_next) {
            server->listen_fd = listen_at(at, &code);
        }
        if (list != NULL) {
            freeaddrinfo(list);
        }
    }
    char holder[96] = "";
    if (server->listen_fd < 0 && code == EADDRINUSE) {
        boot_port_holder(port, holder, sizeof holder);
    }
    if (holder[0] != '\0') {
        return fail(err, HVD_SYSTEM,
                    "the rendezvous server cannot listen at %s port %d: it is in use by %s; end "
                    "that, or choose another port (0: any that is free)",
                    address != NULL ? address : "127.0.0.1", port, holder);
    }
    if (server->listen_fd < 0) {
        return fail_errno(err, code, "the rendezvous server cannot listen at %s port %d",
                          address != NULL ? address : "127.0.0.1", port);
    }
    return HVD_OK;
}

static int port_of(int fd)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } name;
    socklen_t bytes = sizeof name;
    if (getsockname(fd, &name.any, &bytes) != 0) {
        return 0;
    }
    return ntohs(name.any.sa_family == AF_INET6 ? name.v6.sin6_port : name.v4.sin_port);
}

static hvd_status_t open_polling(hvd_rendezvous_t *server, err_t *err)
{
    struct epoll_event listener = {.events = EPOLLIN, .data.ptr = &server->listen_fd};
    struct epoll_event stop = {.events = EPOLLIN, .data.ptr = &server->stop_fd};
    server->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    server->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (server->epoll_fd < 0 || server->stop_fd < 0 ||
        epoll_ctl(server->epoll_fd, EPOLL_CTL_ADD, server->listen_fd, &listener) != 0 ||
        epoll_ctl(server->epoll_fd, EPOLL_CTL_ADD, server->stop_fd, &stop) != 0) {
        return fail_errno(err, errno, "the rendezvous server cannot set up epoll");
    }
    fd_not_for_children(server->listen_fd);
    server->is_listening = true;
    return HVD_OK;
}

static hvd_status_t start_thread(hvd_rendezvous_t *server, err_t *err)
{
    int code = thread_start(&server->thread, "hvd-rendezvous", serve, server);
    return code == 0 ? HVD_OK : thread_failed(err, code, "the thread of the rendezvous server");
}

static void close_if_open(int fd)
{
    if (fd >= 0) {
        fd_close(fd);
    }
}

static void server_free(hvd_rendezvous_t *server)
{
    conn_list_t *lists[] = {&server->newcomers, &server->guests};
    for (size_t i = 0; i < N_ELEMENTS(lists); i++) {
        while (lists[i]->first != NULL) {
            conn_doom(server, lists[i]->first);
        }
    }
    bury_doomed(server);
    close_if_open(server->listen_fd);
    close_if_open(server->epoll_fd);
    close_if_open(server->stop_fd);
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
    server->listen_fd = server->epoll_fd = server->stop_fd = -1;
    server->newcomers.end_p = &server->newcomers.first;
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
    TRY(open_listener(server, address, port, err), out);
    server->port = port_of(server->listen_fd);
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
    return atomic_load(&server->n_refused);
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
