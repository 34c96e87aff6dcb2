// SPDX-License-Identifier: Apache-2.0
//
// server.c - shows the job to browsers: a small HTTP/1.1 server with five pages, in a thread.
//
// Who may ask: whoever has the token, in the URL once and in a cookie from then on, or as a bearer;
// and this user at the Unix socket. A request must name a host that is ours, which a page of
// another site that points its name here cannot, and must not come from another site. Nothing can
// be changed through the server.
//
// What it costs is bounded: WEB_CLIENTS connections, each with PATIENCE_NS to finish a request or
// to take what it is sent. Who has not shown the token is pushed out when others wait, the oldest
// first, but not within GRACE_NS; until then the others wait in the kernel's queue. A picture of
// the job is drawn once a second for all who look, and not at all if nobody does.
//
// One thread with an epoll descriptor; it shares the model, under its lock, and two flags.
#define _GNU_SOURCE
#include "web/client.h"
#include "web/web.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define WEB_CLIENTS 64
#define WEB_STREAMS 48
#define MAX_EVENTS 64
#define MAX_ACCEPTS 64
#define BACKLOG 128
#define GRACE_NS (100 * NS_PER_MS)
#define PATIENCE_NS (5 * NS_PER_S)
#define KEEP_NS (30 * NS_PER_S) // a connection that asks for nothing
#define TICK_NS (1 * NS_PER_S)
#define LARGE_TICK_NS (2 * NS_PER_S) // of a job with more than LARGE ranks
#define LARGE 256
#define LOOKING_NS (10 * NS_PER_S)
#define FAREWELL_NS (500 * NS_PER_MS)

struct web {
    web_rules_t rules;
    char token[HTTP_TOKEN_BYTES], cookie[32], address[64], host[256];
    page_t page;
    SSL_CTX *tls;
    int epoll_fd, bell_fd, tcp_fd, local_fd, port;
    pthread_t thread;
    bool has_thread, is_paused;
    atomic_bool is_stopping;
    atomic_uint_fast64_t asked_ns; // somebody has, last
    web_client_t *first, *last;    // the oldest first
    int n_clients, n_streams;
    uint64_t drawn_ns;
};

// --- Answers -------------------------------------------------------------------------------------

static void put_head(const web_t *web, web_client_t *c, int status, const char *type, size_t bytes)
{
    buf_printf(&c->out,
               "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nCache-Control: no-store\r\n"
               "X-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\n"
               "Referrer-Policy: no-referrer\r\nCross-Origin-Resource-Policy: same-origin\r\n"
               "Cross-Origin-Opener-Policy: same-origin\r\nContent-Security-Policy: %s\r\n",
               status, http_reason(status), type, web->page.policy);
    if (bytes != SIZE_MAX) {
        buf_printf(&c->out, "Content-Length: %zu\r\n", bytes);
    }
    if (c->is_closing) {
        buf_printf(&c->out, "Connection: close\r\n");
    }
}

static void answer(const web_t *web, web_client_t *c, const http_request_t *r, int status,
                   const char *type, const buf_t *body)
{
    put_head(web, c, status, type, body->len);
    buf_append(&c->out, "\r\n", 2);
    if (!r->is_head) {
        buf_append(&c->out, body->data, body->len);
    }
}

static void refuse(const web_t *web, web_client_t *c, const http_request_t *r, int status,
                   const char *text)
{
    buf_t body = {0};
    buf_printf(&body, "%s\n", text);
    c->is_closing |= status != 404;
    answer(web, c, r, status, "text/plain; charset=utf-8", &body);
    buf_free(&body);
}

static void show_page(web_t *web, web_client_t *c, const http_request_t *r)
{
    if (r->token[0] == '\0') {
        answer(web, c, r, 200, "text/html; charset=utf-8", &web->page.html);
        return;
    }
    // The token leaves the address bar, and with it histories and screenshots.
    put_head(web, c, 303, "text/plain", 0);
    buf_printf(&c->out,
               "Location: /\r\nSet-Cookie: %s=%s; Path=/; HttpOnly; SameSite=Strict%s\r\n\r\n",
               web->cookie, web->token, c->tls != NULL ? "; Secure" : "");
}

static void show_metrics(web_t *web, web_client_t *c, const http_request_t *r)
{
    buf_t body = {0};
    metrics_form_t form = r->wants_open_metrics ? METRICS_OPEN : METRICS_PROMETHEUS;
    model_metrics(web->rules.model, form, &body);
    answer(web, c, r, 200, metrics_types[form], &body);
    buf_free(&body);
}

static void show_rank(web_t *web, web_client_t *c, const http_request_t *r)
{
    buf_t body = {0};
    model_rank_json(web->rules.model, r->id, &body);
    answer(web, c, r, 200, "application/json", &body);
    buf_free(&body);
}

static void show_text(web_t *web, web_client_t *c, const http_request_t *r)
{
    buf_t body = {0};
    model_text(web->rules.model, r->columns > 0 ? r->columns : 120, r->rows > 0 ? r->rows : 1 << 20,
               &body);
    answer(web, c, r, 200, "text/plain; charset=utf-8", &body);
    buf_free(&body);
}

static void put_event(model_t *model, bool has_history, buf_t *out)
{
    buf_printf(out, "data: ");
    model_json(model, has_history, out);
    buf_append(out, "\n\n", 2);
}

static void show_events(web_t *web, web_client_t *c, const http_request_t *r)
{
    if (web->n_streams == WEB_STREAMS) {
        refuse(web, c, r, 503, "too many look at this job already; try again later");
        return;
    }
    put_head(web, c, 200, "text/event-stream", SIZE_MAX);
    buf_append(&c->out, "\r\n", 2);
    put_event(web->rules.model, true, &c->out);
    c->streams = true;
    web->n_streams++;
}

static const struct {
    const char *path;
    void (*show)(web_t *web, web_client_t *c, const http_request_t *r);
} pages[] = {
    {"/", show_page},           {"/events", show_events}, {"/rank", show_rank},
    {"/metrics", show_metrics}, {"/text", show_text},
};

// --- Who may ask ---------------------------------------------------------------------------------

static bool is_token(const web_t *web, const char *said)
{
    size_t bytes = strlen(web->token);
    return strlen(said) == bytes && CRYPTO_memcmp(said, web->token, bytes) == 0;
}

static bool is_our_host(const web_t *web, const char *host)
{
    const char *const loopback[] = {"127.0.0.1", "localhost", "[::1]"};
    for (size_t i = 0; i < N_ELEMENTS(loopback); i++) {
        if (strcasecmp(host, loopback[i]) == 0) {
            return true;
        }
    }
    return (web->address[0] != '\0' && strcasecmp(host, web->address) == 0) ||
           (web->host[0] != '\0' && strcasecmp(host, web->host) == 0);
}

// The address at which this client has reached us, as Prometheus calls pods. Another site's name
// can lead here, but is not it.
static bool is_own_address(const web_client_t *c, const char *host)
{
    struct sockaddr_storage own;
    socklen_t bytes = sizeof own;
    char text[NI_MAXHOST], bracketed[NI_MAXHOST + 2];
    if (getsockname(c->fd, (struct sockaddr *)&own, &bytes) != 0 ||
        getnameinfo((struct sockaddr *)&own, bytes, text, sizeof text, NULL, 0, NI_NUMERICHOST) !=
            0) {
        return false;
    }
    snprintf(bracketed, sizeof bracketed, "[%s]", text);
    return strcasecmp(host, own.ss_family == AF_INET6 ? bracketed : text) == 0;
}

// "http://HOST:PORT" of a page of ours.
static bool is_our_origin(const web_t *web, const char *origin)
{
    char host[256];
    const char *at = strstr(origin, "://");
    if (at == NULL) {
        return false;
    }
    at += 3;
    const char *end = at[0] == '[' ? strchr(at, ']') : at + strcspn(at, ":/");
    size_t n = end == NULL ? 0 : (size_t)(end - at) + (at[0] == '[');
    snprintf(host, sizeof host, "%.*s", (int)MIN(n, sizeof host - 1), at);
    return is_our_host(web, host);
}

// 0: it may; else the status to refuse it with.
static int check(const web_t *web, web_client_t *c, const http_request_t *r, const char **why_p)
{
    // A link with the token may be followed from anywhere: it is how people come.
    bool is_entry = strcmp(r->path, "/") == 0 && r->token[0] != '\0';
    if (c->is_local) {
        return 0;
    }
    *why_p = "this server does not go by that name";
    if (!is_our_host(web, r->host) && !is_own_address(c, r->host)) {
        return 421;
    }
    *why_p = "requests of other sites are refused";
    if ((r->is_cross_site && !is_entry) ||
        (r->origin[0] != '\0' && !is_our_origin(web, r->origin))) {
        return 403;
    }
    *why_p = "the token is missing or wrong; open the address that horovodrun has printed";
    c->has_proved = is_token(web, r->token) || is_token(web, r->bearer) || is_token(web, r->cookie);
    return c->has_proved ? 0 : 401;
}

// One request, if a whole one is there; false: there is none.
static bool take_request(web_t *web, web_client_t *c)
{
    http_request_t r = {.id = -1};
    size_t used = 0;
    const char *why = "";
    int status = http_read(c->in, c->n_in, web->cookie, &r, &used);
    if (status == 0) {
        return false;
    }
    c->deadline_ns = clock_ns() + PATIENCE_NS;
    if (status != 200) {
        c->is_closing = true;
        c->n_in = 0;
        refuse(web, c, &r, status, http_reason(status));
        return true;
    }
    memmove(c->in, c->in + used, c->n_in - used);
    c->n_in -= used;
    c->is_closing = !r.keeps_alive;
    status = check(web, c, &r, &why);
    if (status != 0) {
        refuse(web, c, &r, status, why);
        return true;
    }
    atomic_store(&web->asked_ns, clock_ns());
    for (size_t i = 0; i < N_ELEMENTS(pages); i++) {
        if (strcmp(pages[i].path, r.path) == 0) {
            pages[i].show(web, c, &r);
            return true;
        }
    }
    refuse(web, c, &r, 404, "there is /, /events, /rank?id=N, /metrics and /text");
    return true;
}

// --- Clients -------------------------------------------------------------------------------------

static bool watch(const web_t *web, int how, int fd, uint32_t events, void *who)
{
    struct epoll_event event = {.events = events, .data.ptr = who};
    return epoll_ctl(web->epoll_fd, how, fd, &event) == 0;
}

static void drop(web_t *web, web_client_t *c)
{
    *(c->prev != NULL ? &c->prev->next : &web->first) = c->next;
    *(c->next != NULL ? &c->next->prev : &web->last) = c->prev;
    web->n_clients--;
    web->n_streams -= c->streams;
    watch(web, EPOLL_CTL_DEL, c->fd, 0, NULL);
    client_free(c);
}

// Reads, answers, writes, as far as it goes now; false: it is through.
static bool serve(web_t *web, web_client_t *c)
{
    bool moved = false, is_there;
    c->wants_read = c->wants_write = false;
    is_there = client_receive(c);
    do {
        while (!client_has_output(c) && !c->is_closing && !c->streams && take_request(web, c)) {
        }
        if (!client_send(c, &moved)) {
            return false;
        }
    } while (!client_has_output(c) && !c->is_closing && !c->streams && c->n_in > 0 &&
             take_request(web, c));
    c->n_in = c->streams ? 0 : c->n_in; // nothing more is expected of it
    if (c->out.failed || (c->is_closing && !client_has_output(c)) ||
        (!is_there && !client_has_output(c))) {
        return false;
    }
    if (moved) {
        c->deadline_ns = clock_ns() + (client_has_output(c) ? PATIENCE_NS : KEEP_NS);
    }
    bool writes = client_has_output(c) ? c->tls == NULL || !c->wants_read : c->wants_write;
    // Who has gone, but for what it is still sent, must not wake us again and again.
    uint32_t events = (writes ? EPOLLOUT : 0) | (is_there && c->n_in < sizeof c->in ? EPOLLIN : 0);
    if (events != c->events && watch(web, EPOLL_CTL_MOD, c->fd, events, c)) {
        c->events = events;
    }
    return true;
}

static bool make_room(web_t *web)
{
    uint64_t now_ns = clock_ns();
    if (web->n_clients < WEB_CLIENTS) {
        return true;
    }
    for (web_client_t *c = web->first; c != NULL && now_ns - c->since_ns >= GRACE_NS; c = c->next) {
        if (!c->has_proved || (!c->streams && !client_has_output(c) && c->n_in == 0)) {
            drop(web, c);
            return true;
        }
    }
    return false;
}

static void admit(web_t *web, int fd, bool is_local)
{
    live_peer_t peer;
    fd_not_for_children(fd);
    if (is_local && !live_peer_is(fd, geteuid(), &peer)) {
        fd_close(fd);
        return;
    }
    web_client_t *c = client_new(fd, is_local ? NULL : web->tls, is_local);
    if (c == NULL) {
        return;
    }
    c->deadline_ns = c->since_ns + PATIENCE_NS;
    c->events = EPOLLIN;
    c->prev = web->last;
    *(c->prev != NULL ? &c->prev->next : &web->first) = c;
    web->last = c;
    web->n_clients++;
    if (!watch(web, EPOLL_CTL_ADD, fd, EPOLLIN, c)) {
        drop(web, c);
    }
}

// False: no room, or no descriptors, before the next tick.
static bool accept_at(web_t *web, int listener)
{
    for (int i = 0; listener >= 0 && i < MAX_ACCEPTS; i++) {
        if (!make_room(web)) {
            return false;
        }
        int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            return errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;
        }
        admit(web, fd, listener == web->local_fd);
    }
    return true;
}

static void set_paused(web_t *web, bool is_paused)
{
    int listeners[] = {web->tcp_fd, web->local_fd};
    for (int i = 0; is_paused != web->is_paused && i < 2; i++) {
        if (listeners[i] >= 0) {
            watch(web, EPOLL_CTL_MOD, listeners[i], is_paused ? 0 : EPOLLIN, NULL);
        }
    }
    web->is_paused = is_paused;
}

// --- Pictures ------------------------------------------------------------------------------------

static void draw(web_t *web)
{
    shot_t *shot = web->n_streams > 0 ? shot_new() : NULL;
    web->drawn_ns = clock_ns();
    if (shot == NULL) {
        return;
    }
    atomic_store(&web->asked_ns, web->drawn_ns);
    put_event(web->rules.model, false, &shot->text);
    for (web_client_t *c = web->first, *next; c != NULL && !shot->text.failed; c = next) {
        next = c->next;
        if (c->streams && !client_has_output(c)) {
            shot->n_users++;
            c->shot = shot;
            c->n_shot = 0;
            c->deadline_ns = web->drawn_ns + PATIENCE_NS;
            if (!serve(web, c)) {
                drop(web, c);
            }
        }
    }
    shot_release(shot);
}

static void expire(web_t *web, uint64_t now_ns)
{
    for (web_client_t *c = web->first, *next; c != NULL; c = next) {
        next = c->next;
        if (now_ns >= c->deadline_ns && (!c->streams || client_has_output(c))) {
            drop(web, c);
        }
    }
}

static void *serve_all(void *arg)
{
    web_t *web = arg;
    struct epoll_event events[MAX_EVENTS];
    uint64_t end_ns = NEVER_NS;
    setpriority(PRIO_PROCESS, 0, 10); // this thread: ranks may need the processor
    while (clock_ns() < end_ns && (end_ns == NEVER_NS || web->first != NULL)) {
        int wait_ms = end_ns != NEVER_NS ? 20 : web->is_paused ? 50 : web->first != NULL ? 200 : -1;
        int n = epoll_wait(web->epoll_fd, events, MAX_EVENTS, wait_ms);
        bool is_called = web->is_paused;
        for (int i = 0; i < n; i++) {
            web_client_t *c = events[i].data.ptr;
            is_called |= c == NULL;
            if (c != NULL && !serve(web, c)) {
                drop(web, c);
            }
        }
        uint64_t now_ns = clock_ns();
        expire(web, now_ns);
        if (is_called && end_ns == NEVER_NS) {
            bool has_room = accept_at(web, web->tcp_fd) && accept_at(web, web->local_fd);
            set_paused(web, !has_room);
        }
        bool is_last = end_ns == NEVER_NS && atomic_load(&web->is_stopping);
        end_ns = is_last ? now_ns + FAREWELL_NS : end_ns;
        uint64_t tick_ns = web->rules.model->n_ranks > LARGE ? LARGE_TICK_NS : TICK_NS;
        if (is_last || now_ns - web->drawn_ns >= tick_ns) {
            draw(web);
        }
        for (web_client_t *c = end_ns != NEVER_NS ? web->first : NULL, *next; c != NULL; c = next) {
            next = c->next;
            if (!client_has_output(c)) {
                drop(web, c);
            }
        }
    }
    return NULL;
}

// --- Up and down ---------------------------------------------------------------------------------

static bool is_loopback(const struct addrinfo *at)
{
    const struct sockaddr_in *v4 = (const struct sockaddr_in *)(const void *)at->ai_addr;
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)(const void *)at->ai_addr;
    return at->ai_family == AF_INET    ? ntohl(v4->sin_addr.s_addr) >> 24 == 127
           : at->ai_family == AF_INET6 ? IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr)
                                       : false;
}

static hvd_status_t open_tls(web_t *web, err_t *err)
{
    const char *path = web->rules.certificate;
    web->tls = SSL_CTX_new(TLS_server_method());
    if (web->tls == NULL || SSL_CTX_set_min_proto_version(web->tls, TLS1_2_VERSION) != 1 ||
        SSL_CTX_use_certificate_chain_file(web->tls, path) != 1 ||
        SSL_CTX_use_PrivateKey_file(web->tls, path, SSL_FILETYPE_PEM) != 1) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "cannot use the certificate %s for the job page: it must have the certificate "
                    "and its key, in PEM",
                    path);
    }
    SSL_CTX_set_mode(web->tls, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    return HVD_OK;
}

static hvd_status_t listen_at(web_t *web, const struct addrinfo *at, err_t *err)
{
    struct sockaddr_storage bound;
    socklen_t bytes = sizeof bound;
    int on = 1;
    if (!is_loopback(at) && web->rules.certificate[0] == '\0') {
        return fail(
            err, HVD_INVALID_ARGUMENT,
            "the job page is not shown at %s in the clear: give --dashboard-certificate, or "
            "leave it at loopback and use ssh -L",
            web->rules.address);
    }
    web->tcp_fd = socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    fd_not_for_children(web->tcp_fd);
    if (web->tcp_fd < 0 || setsockopt(web->tcp_fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
        bind(web->tcp_fd, at->ai_addr, at->ai_addrlen) != 0 || listen(web->tcp_fd, BACKLOG) != 0 ||
        getsockname(web->tcp_fd, (struct sockaddr *)&bound, &bytes) != 0) {
        return fail_errno(err, errno,
                          "cannot show the job page at %s, port %d; try another --dashboard=PORT",
                          web->rules.address, web->rules.port);
    }
    web->port = ntohs(bound.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&bound)->sin6_port
                                                  : ((struct sockaddr_in *)&bound)->sin_port);
    return HVD_OK;
}

static hvd_status_t open_port(web_t *web, err_t *err)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST}, *at = NULL;
    char port[16];
    hvd_status_t status = HVD_OK;
    snprintf(port, sizeof port, "%d", web->rules.port);
    if (getaddrinfo(web->rules.address, port, &hints, &at) != 0) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "\"%s\" is not an address of this host, such as 127.0.0.1", web->rules.address);
    }
    if (web->rules.certificate[0] != '\0') {
        status = open_tls(web, err);
    }
    status = status == HVD_OK ? listen_at(web, at, err) : status;
    freeaddrinfo(at);
    return status;
}

// Where only this user is answered.
static void open_local(web_t *web)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX}; // a NUL in front makes it abstract
    size_t bytes = strnlen(web->rules.local, sizeof at.sun_path - 1);
    memcpy(at.sun_path + 1, web->rules.local, bytes);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    socklen_t used = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + bytes);
    if (fd >= 0 && (bind(fd, (struct sockaddr *)&at, used) != 0 || listen(fd, BACKLOG) != 0)) {
        close(fd);
        fd = -1;
    }
    fd_not_for_children(fd);
    web->local_fd = fd;
}

static hvd_status_t open_all(web_t *web, err_t *err)
{
    hvd_status_t status = HVD_OK;
    web->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    web->bell_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (web->epoll_fd < 0 || web->bell_fd < 0 || !page_make(NULL, &web->page)) {
        return fail(err, HVD_NO_MEMORY, "no memory or descriptors for the job page");
    }
    fd_not_for_children(web->epoll_fd);
    fd_not_for_children(web->bell_fd);
    if (web->rules.address != NULL) {
        snprintf(web->token, sizeof web->token, "%s", web->rules.token);
        snprintf(web->address, sizeof web->address, "%s", web->rules.address);
        snprintf(web->host, sizeof web->host, "%s", web->rules.host);
        TRY(open_port(web, err), out);
    }
    snprintf(web->cookie, sizeof web->cookie, "hvd-%d", web->port);
    if (web->rules.local[0] != '\0') {
        open_local(web);
    }
    const int fds[] = {web->bell_fd, web->tcp_fd, web->local_fd};
    for (size_t i = 0; i < N_ELEMENTS(fds); i++) {
        if (fds[i] >= 0 && !watch(web, EPOLL_CTL_ADD, fds[i], EPOLLIN, NULL)) {
            status = fail_errno(err, errno, "cannot watch the sockets of the job page");
        }
    }
out:
    return status;
}

hvd_status_t web_open(const web_rules_t *rules, web_t **web_p, err_t *err)
{
    web_t *web = calloc(1, sizeof *web);
    hvd_status_t status;
    if (web == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for the job page");
    }
    web->rules = *rules;
    web->epoll_fd = web->bell_fd = web->tcp_fd = web->local_fd = -1;
    TRY(open_all(web, err), undo);
    if (thread_start(&web->thread, "hvd-web", serve_all, web) != 0) {
        status = fail(err, HVD_NO_MEMORY, "cannot start a thread for the job page");
        goto undo;
    }
    web->has_thread = true;
    *web_p = web;
    return HVD_OK;
undo:
    web_close(web);
    return status;
}

int web_port(const web_t *web)
{
    return web->port;
}

bool web_is_watched(const web_t *web)
{
    uint64_t asked_ns = atomic_load(&web->asked_ns);
    return asked_ns != 0 && clock_ns() - asked_ns < LOOKING_NS;
}

void web_close(web_t *web)
{
    const uint64_t one = 1;
    if (web == NULL) {
        return;
    }
    if (web->has_thread) {
        atomic_store(&web->is_stopping, true);
        if (write(web->bell_fd, &one, sizeof one) == sizeof one) {
            pthread_join(web->thread, NULL);
        }
    }
    while (web->first != NULL) {
        drop(web, web->first);
    }
    const int fds[] = {web->tcp_fd, web->local_fd, web->bell_fd, web->epoll_fd};
    for (size_t i = 0; i < N_ELEMENTS(fds); i++) {
        fd_close(fds[i]);
    }
    SSL_CTX_free(web->tls);
    page_free(&web->page);
    wipe(web->token, sizeof web->token);
    free(web);
}
