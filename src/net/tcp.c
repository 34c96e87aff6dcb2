// SPDX-License-Identifier: Apache-2.0
//
// tcp.c - the TCP transport: where it listens, who may come in, and its event loop.
//
// One door (wire/door.h) with a listening socket for each address of the chosen interfaces, at a
// port the kernel picks; never the wildcard address. Whoever connects must name a link that this
// rank expects; foreign clients are cut without an answer. Peers that are cut with them, because
// too many came at once, dial again.
//
// One epoll descriptor holds everything: the door, connections, and a timer that runs only while
// something has a deadline. So sleeping is polling one descriptor, and progress is one system call,
// or none: see tcp_progress.
// Thread: the holder of the engine. The domain owns the door and connections without a link;
// links own theirs.
#define _GNU_SOURCE
#include "net/tcp.h"

#include <errno.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define MAX_EVENTS 64
#define FEW_LINKS 2 // to be asked without epoll
#define ROUNDS_PER_LOOK 16

// --- Small questions -----------------------------------------------------------------------------

uint64_t tcp_peer_timeout_ns(const domain_t *domain)
{
    return (uint64_t)(domain->job->config->peer_timeout * (double)NS_PER_S);
}

bool tcp_same_host(const domain_t *domain, int rank)
{
    const int *host_of = domain->job->host_of;
    return host_of == NULL || host_of[rank] == host_of[domain->job->rank];
}

bool tcp_encrypts(const domain_t *domain, int peer, lane_t lane)
{
    int policy = domain->job->config->encrypt;
    return lane == LANE_CONTROL || policy == ENCRYPT_ALWAYS ||
           (policy == ENCRYPT_AUTO && !tcp_same_host(domain, peer));
}

static seat_t *seat_of(domain_t *domain, int peer, lane_t lane)
{
    return &domain->seats[(size_t)peer * N_LANES + (size_t)lane];
}

// --- The event loop ------------------------------------------------------------------------------

hvd_status_t tcp_watch(domain_t *domain, watch_t *watch, uint32_t events, err_t *err)
{
    struct epoll_event event = {.events = events, .data.ptr = watch};
    if (epoll_ctl(domain->epoll, EPOLL_CTL_ADD, watch->fd, &event) != 0) {
        return fail_errno(err, errno, "cannot watch a descriptor");
    }
    fd_not_for_children(watch->fd);
    return HVD_OK;
}

void tcp_unwatch(domain_t *domain, watch_t *watch)
{
    // Closing alone would leave it watched if somebody else still has the descriptor.
    epoll_ctl(domain->epoll, EPOLL_CTL_DEL, watch->fd, NULL);
    fd_close(watch->fd);
    watch->fd = -1;
}

// The timer ticks exactly while somebody has a deadline.
static void set_timer(domain_t *domain)
{
    bool wanted = domain->opening != NULL;
    struct itimerspec ticks = {.it_value.tv_nsec = wanted ? (long)TCP_TICK_NS : 0,
                               .it_interval.tv_nsec = wanted ? (long)TCP_TICK_NS : 0};
    if (wanted != domain->timer_runs && timerfd_settime(domain->timer.fd, 0, &ticks, NULL) == 0) {
        domain->timer_runs = wanted;
    }
}

void tcp_opening_add(tcp_link_t *link)
{
    domain_t *domain = link->domain;
    link->next = domain->opening;
    if (link->next != NULL) {
        link->next->prev = link;
    }
    domain->opening = link;
    set_timer(domain);
}

void tcp_opening_remove(tcp_link_t *link)
{
    if (link->prev != NULL) {
        link->prev->next = link->next;
    } else if (link->domain->opening == link) {
        link->domain->opening = link->next;
    }
    if (link->next != NULL) {
        link->next->prev = link->prev;
    }
    link->prev = link->next = NULL;
}

static void bury(domain_t *domain)
{
    while (domain->graveyard != NULL) {
        conn_t *conn = domain->graveyard;
        domain->graveyard = conn->next;
        free(conn);
    }
}

// --- Coming in -----------------------------------------------------------------------------------

static bool is_taken(const seat_t *seat)
{
    return seat->kept != NULL || (seat->link != NULL && (seat->link->conn != NULL ||
                                                         seat->link->base.err.status != HVD_OK));
}

// Whether a link of this rank may begin with such a hello.
static hvd_status_t admit(void *owner, const hello_t *hello, err_t *err)
{
    domain_t *domain = owner;
    const net_job_t *job = domain->job;
    if (hello->to != (uint32_t)job->rank || hello->from >= hello->to || hello->lane >= N_LANES ||
        memcmp(hello->nonce, domain->token, TCP_TOKEN_BYTES) != 0) {
        return fail(err, HVD_UNAUTHENTICATED,
                    "a greeting from rank %" PRIu32 " meant for rank %" PRIu32
                    " of another process",
                    hello->from, hello->to);
    }
    if (domain->seats == NULL || is_taken(seat_of(domain, (int)hello->from, (lane_t)hello->lane))) {
        // At another address, for the first did not answer at once; the peer takes the first.
        return fail(err, HVD_PEER_LOST, "a second connection from rank %" PRIu32, hello->from);
    }
    if (hello->encrypted != tcp_encrypts(domain, (int)hello->from, (lane_t)hello->lane)) {
        return fail(err, HVD_UNAUTHENTICATED,
                    "rank %" PRIu32 " wants a link %s encryption, this rank does "
                    "not; give all ranks the same HOROVOD_ENCRYPT",
                    hello->from, hello->encrypted ? "with" : "without");
    }
    return HVD_OK;
}

// Has proved the secret, and its place was free a moment before.
static void enter(void *owner, const guest_t *guest)
{
    domain_t *domain = owner;
    seat_t *seat = seat_of(domain, (int)guest->hello.from, (lane_t)guest->hello.lane);
    conn_t *conn = conn_accepted(domain, guest, NULL);
    if (conn == NULL) {
        return;
    }
    INVARIANT(!is_taken(seat));
    if (seat->link != NULL) {
        tcp_link_ready(seat->link, conn);
    } else {
        seat->kept = conn;
    }
}

// --- Progress ------------------------------------------------------------------------------------

static void tick(domain_t *domain)
{
    uint64_t n_ticks;
    uint64_t now_ns = clock_ns();
    if (read(domain->timer.fd, &n_ticks, sizeof n_ticks) < 0 && errno != EAGAIN) {
        log_debug(domain->job->log, "tcp", "the timer cannot be read: errno %d", errno);
    }
    for (tcp_link_t *link = domain->opening, *next; link != NULL; link = next) {
        next = link->next;
        tcp_link_tick(link, now_ns);
    }
}

// Begins a round: whoever spins calls tcp_progress and then the movers, over and over. To ask epoll
// in each round and the socket only after that would put two system calls before the first byte. So
// while only a few links are asked for data, they ask their sockets directly; and while nobody
// waits to send or to connect, epoll is then asked only now and then: for strangers, for hangups
// and for links that nobody reads. True if it is to be asked now.
static bool begin_round(domain_t *domain)
{
    domain->direct = domain->n_asked > 0 && domain->n_asked <= FEW_LINKS;
    bool look = !domain->direct || domain->waits || domain->timer_runs ||
                door_n_strangers(domain->door) > 0 || domain->n_rounds++ % ROUNDS_PER_LOOK == 0;

    domain->round++;
    domain->n_asked = 0;
    domain->waits = false;
    return look;
}

static int tcp_progress(domain_t *domain)
{
    struct epoll_event events[MAX_EVENTS];
    int n = begin_round(domain) ? epoll_wait(domain->epoll, events, MAX_EVENTS, 0) : 0;
    int n_news = 0;
    for (int i = 0; i < n; i++) {
        watch_t *watch = events[i].data.ptr;
        switch (watch->kind) {
        case WATCH_TIMER:
            tick(domain);
            n_news++;
            break;
        case WATCH_DOOR:
            n_news += door_progress(domain->door);
            break;
        case WATCH_CONN:
            n_news += conn_event((conn_t *)watch, events[i].events);
            break;
        }
    }
    if (n > 0) {
        set_timer(domain);
        bury(domain);
    }
    return n_news;
}

static bool tcp_wait_fd(domain_t *domain, int *fd_p)
{
    *fd_p = domain->epoll;
    return true;
}

static uint64_t tcp_n_foreign(const domain_t *domain)
{
    return door_n_refused(domain->door);
}

static hvd_status_t tcp_health(domain_t *domain, lane_t lane, int *peer_p, err_t *err)
{
    const err_t *broken = &domain->broken[lane];
    tcp_probe(domain, clock_ns());
    if (broken->status != HVD_OK) {
        *err = *broken;
        *peer_p = domain->broken_peers[lane];
    }
    return broken->status;
}

static bool tcp_is_opening(domain_t *domain)
{
    return domain->opening != NULL;
}

#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44 // Linux 6.15: longest time before it sends again
#endif
#define RTO_MAX_MS 1000 // the least that it takes

// --- Listening -----------------------------------------------------------------------------------

void tcp_set_options(const domain_t *domain, int fd)
{
    int timeout_ms = (int)MIN(tcp_peer_timeout_ns(domain) / NS_PER_MS, (uint64_t)INT32_MAX);
    int buffer = (int)MIN(domain->job->config->tcp_buffer, (size_t)INT32_MAX);
    // With a user timeout, that and not the number of probes decides when a silent peer is lost;
    // the probes are what it must fail to answer.
    const struct {
        int level, name, value;
        bool set;
    } options[] = {
        {IPPROTO_TCP, TCP_NODELAY, 1, true},
        {IPPROTO_TCP, TCP_USER_TIMEOUT, timeout_ms, true},
        {SOL_SOCKET, SO_KEEPALIVE, 1, true},
        {IPPROTO_TCP, TCP_KEEPIDLE, 2, true},
        {IPPROTO_TCP, TCP_KEEPINTVL, 1, true},
        {IPPROTO_TCP, TCP_KEEPCNT, 3, true},
        {IPPROTO_TCP, TCP_RTO_MAX_MS, RTO_MAX_MS, true}, // see tcp_probe.c; and for older kernels:
        {IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, 1, true},
        {SOL_SOCKET, SO_SNDBUF, buffer, buffer > 0},
        {SOL_SOCKET, SO_RCVBUF, buffer, buffer > 0},
    };

    for (size_t i = 0; i < N_ELEMENTS(options); i++) {
        // Each of them only makes a good thing better: a kernel without one still works.
        if (options[i].set) {
            setsockopt(fd, options[i].level, options[i].name, &options[i].value, sizeof(int));
        }
    }
}

static void prepare(const void *owner, int fd)
{
    tcp_set_options(owner, fd);
}

static hvd_status_t listen_at(domain_t *domain, const tcp_iface_t *iface, err_t *err)
{
    struct sockaddr_storage name;
    socklen_t name_bytes = tcp_addr_to_socket(&iface->addr, &name);
    int code = door_listen(domain->door, &name, &name_bytes);
    if (code != 0) {
        return fail_errno(err, code, "cannot listen on interface %s", iface->name);
    }
    domain->ifaces[domain->n_ifaces] = *iface;
    domain->ifaces[domain->n_ifaces++].addr = tcp_addr_of_socket(&name);
    return HVD_OK;
}

// An address that cannot be listened at (one that is being set up or torn down) is left out.
static hvd_status_t listen_everywhere(domain_t *domain, err_t *err)
{
    const door_rules_t rules = {.name = "tcp",
                                .log = domain->job->log,
                                .keys = domain->job->keys,
                                .role = HELLO_LINK,
                                .is_silent = true,
                                .is_probed = true, // as tcp_probe.c does
                                .owner = domain,
                                .admit = admit,
                                .prepare = prepare,
                                .enter = enter};
    tcp_iface_t ifaces[TCP_MAX_ADDRS];
    hvd_status_t status, last = HVD_OK;
    int n_ifaces = 0;
    TRY(tcp_list_ifaces(domain->job->config->iface, domain->job->share_loopback, ifaces, &n_ifaces,
                        err),
        out);
    TRY(door_open(&rules, &domain->door, err), out);
    domain->door_watch = (watch_t){.kind = WATCH_DOOR, .fd = door_fd(domain->door)};
    TRY(tcp_watch(domain, &domain->door_watch, EPOLLIN, err), out);
    for (int i = 0; i < n_ifaces; i++) {
        err_t why;
        status = listen_at(domain, &ifaces[i], &why);
        if (status != HVD_OK) {
            log_info(domain->job->log, "tcp", "%s", why.text);
            last = fail(err, status, "%s", why.text);
        }
    }
    status = domain->n_ifaces > 0 ? HVD_OK : last;
out:
    return status;
}

// --- Life ----------------------------------------------------------------------------------------

static void tcp_close(domain_t *domain)
{
    door_close(domain->door);
    for (size_t i = 0; domain->seats != NULL && i < (size_t)domain->job->size * N_LANES; i++) {
        if (domain->seats[i].kept != NULL) {
            conn_close(domain->seats[i].kept);
        }
    }
    bury(domain);
    if (domain->timer.fd >= 0) {
        tcp_unwatch(domain, &domain->timer);
    }
    if (domain->epoll >= 0) {
        close(domain->epoll);
    }
    free(domain->offers);
    free(domain->offer_at);
    free(domain->seats);
    free(domain);
}

static hvd_status_t open_epoll(domain_t *domain, err_t *err)
{
    domain->epoll = epoll_create1(EPOLL_CLOEXEC);
    domain->timer.fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (domain->epoll < 0 || domain->timer.fd < 0) {
        return fail_errno(err, errno,
                          "cannot watch sockets; raise the limit of open files (ulimit -n)");
    }
    return tcp_watch(domain, &domain->timer, EPOLLIN | EPOLLET, err);
}

static hvd_status_t tcp_open(const net_job_t *job, domain_t **domain_p, err_t *err)
{
    hvd_status_t status;
    if (job->size == 1 || job->keys == NULL) {
        return fail(err, HVD_UNSUPPORTED, "the job has only one rank");
    }
    domain_t *domain = calloc(1, sizeof *domain);
    if (domain == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for the TCP transport");
    }
    domain->job = job;
    domain->epoll = -1;
    domain->timer = (watch_t){.kind = WATCH_TIMER, .fd = -1};
    TRY(random_bytes(domain->token, sizeof domain->token, err), close_domain);
    TRY(open_epoll(domain, err), close_domain);
    TRY(listen_everywhere(domain, err), close_domain);
    *domain_p = domain;
    return HVD_OK;

close_domain:
    tcp_close(domain);
    return status;
}

static hvd_status_t tcp_address(domain_t *domain, buf_t *out, err_t *err)
{
    tcp_offer_t offer = {.encrypt = domain->job->config->encrypt, .n_addrs = domain->n_ifaces};
    memcpy(offer.token, domain->token, sizeof offer.token);
    for (int i = 0; i < domain->n_ifaces; i++) {
        offer.addrs[i] = domain->ifaces[i].addr;
    }
    tcp_offer_encode(&offer, out);
    return out->failed ? fail(err, HVD_NO_MEMORY, "no memory for this rank's TCP addresses")
                       : HVD_OK;
}

// --- Peers ---------------------------------------------------------------------------------------

hvd_status_t tcp_offer_of(const domain_t *domain, int rank, tcp_offer_t *offer_p, err_t *err)
{
    const uint8_t *data = domain->offers + domain->offer_at[rank];
    size_t bytes = domain->offer_at[rank + 1] - domain->offer_at[rank];
    return tcp_offer_decode(data, bytes, rank, offer_p, err);
}

// Both sides of a pair would refuse each other's links: better said once, here, with the reason.
static hvd_status_t check_policy(const domain_t *domain, int rank, err_t *err)
{
    static const char *const policies[] = {"auto", "always", "never"};
    int mine = domain->job->config->encrypt;
    tcp_offer_t offer;
    hvd_status_t status = tcp_offer_of(domain, rank, &offer, err);
    if (status == HVD_OK && offer.encrypt != mine) {
        bool known = offer.encrypt >= 0 && offer.encrypt < (int)N_ELEMENTS(policies);
        status = fail(err, HVD_INVALID_ARGUMENT,
                      "rank %d has HOROVOD_ENCRYPT=%s, rank %d has %s; give all "
                      "ranks the same",
                      rank, known ? policies[offer.encrypt] : "something unknown",
                      domain->job->rank, policies[mine]);
    }
    return status;
}

static hvd_status_t keep_offers(domain_t *domain, const uint8_t *const *addresses,
                                const size_t *lengths, err_t *err)
{
    size_t size = (size_t)domain->job->size;
    size_t total = 0;
    for (size_t r = 0; r < size; r++) {
        total += addresses[r] != NULL ? lengths[r] : 0;
    }
    domain->offers = malloc(MAX(total, 1));
    domain->offer_at = calloc(size + 1, sizeof *domain->offer_at);
    domain->seats = calloc(size * N_LANES, sizeof *domain->seats);
    if (domain->offers == NULL || domain->offer_at == NULL || domain->seats == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for the addresses of %zu ranks", size);
    }
    for (size_t r = 0; r < size; r++) {
        size_t bytes = addresses[r] != NULL ? lengths[r] : 0;
        if (bytes > 0) {
            memcpy(domain->offers + domain->offer_at[r], addresses[r], bytes);
        }
        domain->offer_at[r + 1] = domain->offer_at[r] + bytes;
    }
    return HVD_OK;
}

static bool has_offer(const domain_t *domain, int rank)
{
    return domain->offer_at != NULL && domain->offer_at[rank + 1] > domain->offer_at[rank];
}

static hvd_status_t tcp_attach(domain_t *domain, const uint8_t *const *addresses,
                               const size_t *lengths, err_t *err)
{
    hvd_status_t status = keep_offers(domain, addresses, lengths, err);
    for (int r = 0; status == HVD_OK && r < domain->job->size; r++) {
        if (has_offer(domain, r)) {
            status = check_policy(domain, r, err);
        }
    }
    return status;
}

static bool tcp_reaches(domain_t *domain, int peer, char *why, size_t why_bytes)
{
    if (peer == domain->job->rank) {
        snprintf(why, why_bytes, "this rank itself");
        return false;
    }
    if (!has_offer(domain, peer)) {
        snprintf(why, why_bytes, "rank %d has no TCP address", peer);
        return false;
    }
    return true;
}

// Starts the way to a peer: take what has come already, dial, or wait. On the data lane the side
// that waits has no deadline: a peer comes when its own work has got that far, and whether it is
// alive is known from the control lane.
static hvd_status_t begin_link(tcp_link_t *link, seat_t *seat, err_t *err)
{
    domain_t *domain = link->domain;
    bool dials = link->base.peer > domain->job->rank;
    uint64_t now_ns = clock_ns();
    if (seat->kept != NULL) {
        conn_t *conn = seat->kept;
        seat->kept = NULL;
        tcp_link_ready(link, conn);
        return HVD_OK;
    }
    if (dials) {
        hvd_status_t status = dial_new(link, err);
        if (status != HVD_OK) {
            return status;
        }
        dial_tick(link, now_ns);
    }
    if (dials || link->base.lane == LANE_CONTROL) {
        link->deadline_ns = now_ns + tcp_peer_timeout_ns(domain);
        tcp_opening_add(link);
    }
    return HVD_OK;
}

static hvd_status_t tcp_connect(domain_t *domain, int peer, lane_t lane, net_link_t **link_p,
                                err_t *err)
{
    char why[160];
    tcp_link_t *link;
    if (!tcp_reaches(domain, peer, why, sizeof why)) {
        return fail(err, HVD_UNSUPPORTED, "no TCP link: %s", why);
    }
    seat_t *seat = seat_of(domain, peer, lane);
    if (seat->link != NULL) {
        return fail(err, HVD_INVALID_ARGUMENT, "there is already a TCP link to rank %d", peer);
    }
    hvd_status_t status = tcp_link_new(domain, peer, lane, &link, err);
    if (status != HVD_OK) {
        return status;
    }
    status = begin_link(link, seat, err);
    if (status != HVD_OK) {
        link_close(&link->base);
        return status;
    }
    seat->link = link;
    *link_p = &link->base;
    return HVD_OK;
}

void tcp_seat_free(tcp_link_t *link)
{
    seat_t *seat = seat_of(link->domain, link->base.peer, link->base.lane);
    if (seat->link == link) {
        seat->link = NULL;
    }
}

const transport_t transport_tcp = {
    .name = "tcp",
    .open = tcp_open,
    .address = tcp_address,
    .attach = tcp_attach,
    .reaches = tcp_reaches,
    .connect = tcp_connect,
    .progress = tcp_progress,
    .wait_fd = tcp_wait_fd,
    .health = tcp_health,
    .n_foreign = tcp_n_foreign,
    .is_opening = tcp_is_opening,
    .close = tcp_close,
};
