// SPDX-License-Identifier: Apache-2.0
//
// door.c - listening, and what becomes of those who knock.
//
// One epoll descriptor holds listeners, strangers and a timer, which ticks while there are any
// strangers or while nobody can be accepted. In a round strangers go first, and each can only end
// or enter itself; only then are others accepted, expired or pushed out, so no event of the round
// points to one who is gone.
// The door owns listeners and strangers; a guest belongs to the door's owner.
#define _GNU_SOURCE
#include "wire/door.h"

#include <errno.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define EVENTS_AT_ONCE 64
#define MAX_ACCEPTS 256 // in one go
#define BACKLOG 4096    // the kernel lowers it to somaxconn
// A friend on a busy host may connect and then not run for a while, or try at a second address as
// the first does not answer at once. So this many who have said nothing, or a hello of this job and
// no more, or were not needed, are counted, but not called strangers in the log.
#define FEW_QUIET 16
#define TICK_NS (50 * NS_PER_MS)
#define LOG_EVERY_NS (60 * NS_PER_S) // what strangers or a full table can cause over and over

typedef struct stranger {
    greeting_t greeting;
    uint64_t since_ns, expires_ns;
    uint32_t events; // what epoll watches
    char address[DOOR_ADDRESS_BYTES];
    struct stranger *prev, *next;
} stranger_t;

struct door {
    door_rules_t rules;
    int epoll_fd, timer_fd;
    bool timer_runs;
    int listeners[DOOR_LISTENERS];
    int n_listeners;
    bool is_paused;           // no room for strangers, or no descriptors: until the next tick
    stranger_t *first, *last; // the oldest first
    int n_strangers;
    uint64_t looked_ns; // when the owner last came
    atomic_uint_fast64_t n_refused;
    uint64_t refused_logged_ns, full_logged_ns;
    int n_quiet; // cut without a line in the log
};

// --- Strangers -----------------------------------------------------------------------------------

static bool watch(const door_t *door, int how, int fd, uint32_t events, void *who)
{
    struct epoll_event event = {.events = events, .data.ptr = who};
    return epoll_ctl(door->epoll_fd, how, fd, &event) == 0;
}

static void admit(door_t *door, int fd)
{
    const door_rules_t *rules = &door->rules;
    stranger_t *s = calloc(1, sizeof *s);
    if (s == NULL || !watch(door, EPOLL_CTL_ADD, fd, EPOLLIN, s)) {
        free(s);
        close(fd);
        return;
    }
    fd_not_for_children(fd);
    s->greeting = (greeting_t){.fd = fd,
                               .is_server = true,
                               .is_silent = rules->is_silent,
                               .keys = rules->keys,
                               .hello.role = rules->role,
                               .admit = rules->admit,
                               .owner = rules->owner};
    s->events = EPOLLIN;
    s->since_ns = clock_ns();
    s->expires_ns = s->since_ns + rules->patience_ns;
    secure_peer_name(fd, s->address, sizeof s->address);
    s->prev = door->last;
    *(s->prev != NULL ? &s->prev->next : &door->first) = s;
    door->last = s;
    door->n_strangers++;
}

// Frees it; the socket stays open.
static void forget(door_t *door, stranger_t *s)
{
    *(s->prev != NULL ? &s->prev->next : &door->first) = s->next;
    *(s->next != NULL ? &s->next->prev : &door->last) = s->prev;
    door->n_strangers--;
    // Closing alone would leave it watched if somebody else still has the descriptor.
    watch(door, EPOLL_CTL_DEL, s->greeting.fd, 0, NULL);
    free(s);
}

static void cut(door_t *door, stranger_t *s)
{
    int fd = s->greeting.fd;
    secure_free(s->greeting.secure);
    forget(door, s);
    fd_close(fd);
}

static bool time_to_log(uint64_t *last_ns)
{
    uint64_t now_ns = clock_ns();
    bool due = *last_ns == 0 || now_ns - *last_ns >= LOG_EVERY_NS;
    *last_ns = due ? now_ns : *last_ns;
    return due;
}

void door_refuse(door_t *door, const char *address, const char *why)
{
    uint64_t n = atomic_fetch_add(&door->n_refused, 1) + 1;
    if (time_to_log(&door->refused_logged_ns)) {
        log_warn(door->rules.log, door->rules.name,
                 "turned away a client at %s (%" PRIu64 " so far): %s", address, n, why);
    }
}

static void turn_away(door_t *door, stranger_t *s, const err_t *err)
{
    bool is_lost = err->status == HVD_PEER_LOST;
    // A peer closes the attempts it does not need, after its greeting; that is no stranger.
    bool has_given_up = is_lost && s->greeting.secure != NULL;
    bool was_spare = is_lost && s->greeting.n_bytes == HELLO_BYTES; // says the owner: admit
    bool was_probe = is_lost && s->greeting.n_bytes == 0 && door->rules.is_probed;
    log_debug(door->rules.log, door->rules.name, "closed %s: %s", s->address, err->text);
    if (!has_given_up && was_spare && door->n_quiet++ < FEW_QUIET) {
        atomic_fetch_add(&door->n_refused, 1);
    } else if (!has_given_up && !was_probe) {
        door_refuse(door, s->address, err->text);
    }
    cut(door, s);
}

static void enter(door_t *door, stranger_t *s)
{
    guest_t guest = {.fd = s->greeting.fd,
                     .secure = s->greeting.secure,
                     .hello = s->greeting.hello,
                     .since_ns = s->since_ns};
    memcpy(guest.address, s->address, sizeof guest.address);
    forget(door, s);
    door->rules.enter(door->rules.owner, &guest);
}

// True if it is still a stranger, and there.
static bool advance(door_t *door, stranger_t *s)
{
    err_t err;
    hvd_status_t status = greeting_step(&s->greeting, &err);
    if (status == HVD_OK) {
        enter(door, s);
    } else if (status != HVD_IN_PROGRESS) {
        turn_away(door, s, &err);
    } else {
        uint32_t events = greeting_wants_write(&s->greeting) ? EPOLLOUT : EPOLLIN;
        if (events != s->events && watch(door, EPOLL_CTL_MOD, s->greeting.fd, events, s)) {
            s->events = events;
        }
    }
    return status == HVD_IN_PROGRESS;
}

// The owner is called every tick while there are strangers. What it is late, because its process
// was held up, is not theirs to answer for; a tick of it is, so nobody stays for ever.
static void forgive(door_t *door, uint64_t now_ns)
{
    uint64_t gap_ns = now_ns - door->looked_ns;
    for (stranger_t *s = door->first; s != NULL && gap_ns > 2 * TICK_NS; s = s->next) {
        s->expires_ns += gap_ns - TICK_NS;
    }
    door->looked_ns = now_ns;
}

// A peer believes in its connection once it has sent the last bytes of the handshake. They may have
// come while this process was held up: they are read before anybody is cut.
static void expire(door_t *door, uint64_t now_ns)
{
    err_t err;
    stranger_t *s;
    while ((s = door->first) != NULL && now_ns >= s->expires_ns) {
        if (!advance(door, s)) {
            continue;
        }
        bool may_be_friend = s->greeting.n_bytes == 0 || s->greeting.secure != NULL;
        if (may_be_friend && door->n_quiet++ < FEW_QUIET) {
            atomic_fetch_add(&door->n_refused, 1);
            cut(door, s);
        } else {
            fail(&err, HVD_UNAUTHENTICATED, "it did not prove the job's secret in time");
            turn_away(door, s, &err);
        }
    }
}

// --- Accepting -----------------------------------------------------------------------------------

// Whom to push out: the oldest that has not even said hello, else the oldest. NULL: none has had
// its grace.
static stranger_t *victim(const door_t *door, uint64_t now_ns)
{
    stranger_t *oldest = door->first;
    for (stranger_t *s = oldest; s != NULL && now_ns - s->since_ns >= DOOR_GRACE_NS; s = s->next) {
        if (s->greeting.secure == NULL) {
            return s;
        }
    }
    return now_ns - oldest->since_ns >= DOOR_GRACE_NS ? oldest : NULL;
}

static bool make_room(door_t *door)
{
    err_t err;
    if (door->n_strangers < DOOR_STRANGERS) {
        return true;
    }
    stranger_t *s = victim(door, clock_ns());
    if (s == NULL) {
        return false;
    }
    fail(&err, HVD_UNAUTHENTICATED, "it did not prove the job's secret while others were waiting");
    turn_away(door, s, &err);
    return true;
}

// Out of descriptors or memory: false, and it goes on with the next tick. Else it was that client's
// own failure.
static bool survives(door_t *door, int code)
{
    bool is_full = code == EMFILE || code == ENFILE || code == ENOBUFS || code == ENOMEM;
    if (is_full && time_to_log(&door->full_logged_ns)) {
        err_t err;
        fail_errno(&err, code,
                   "cannot accept connections; raise the limit of open files (ulimit -n)");
        log_warn(door->rules.log, door->rules.name, "%s", err.text);
    }
    return !is_full;
}

// False: nobody can be let in before the next tick.
static bool accept_at(door_t *door, int listener)
{
    for (int i = 0; i < MAX_ACCEPTS; i++) {
        if (!make_room(door)) {
            return false;
        }
        int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            admit(door, fd);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return true;
        } else if (!survives(door, errno)) {
            return false;
        }
    }
    return true;
}

static void set_paused(door_t *door, bool is_paused)
{
    for (int i = 0; is_paused != door->is_paused && i < door->n_listeners; i++) {
        watch(door, EPOLL_CTL_MOD, door->listeners[i], is_paused ? 0 : EPOLLIN, NULL);
    }
    door->is_paused = is_paused;
}

static void set_timer(door_t *door)
{
    bool wanted = door->n_strangers > 0 || door->is_paused;
    struct itimerspec ticks = {.it_value.tv_nsec = wanted ? (long)TICK_NS : 0,
                               .it_interval.tv_nsec = wanted ? (long)TICK_NS : 0};
    if (wanted != door->timer_runs && timerfd_settime(door->timer_fd, 0, &ticks, NULL) == 0) {
        door->timer_runs = wanted;
    }
}

int door_progress(door_t *door)
{
    struct epoll_event events[EVENTS_AT_ONCE];
    uint64_t n_ticks;
    bool is_called = false; // by the timer or at a listener
    forgive(door, clock_ns());
    int n = epoll_wait(door->epoll_fd, events, EVENTS_AT_ONCE, 0);
    for (int i = 0; i < n; i++) {
        is_called |= events[i].data.ptr == NULL;
        if (events[i].data.ptr != NULL) {
            advance(door, events[i].data.ptr);
        }
    }
    if (is_called) {
        bool ticks = read(door->timer_fd, &n_ticks, sizeof n_ticks) == sizeof n_ticks;
        bool has_room = ticks || !door->is_paused;
        expire(door, clock_ns());
        for (int i = 0; has_room && i < door->n_listeners; i++) {
            has_room = accept_at(door, door->listeners[i]);
        }
        set_paused(door, !has_room);
    }
    set_timer(door);
    return MAX(n, 0);
}

// --- Life ----------------------------------------------------------------------------------------

hvd_status_t door_open(const door_rules_t *rules, door_t **door_p, err_t *err)
{
    door_t *door = calloc(1, sizeof *door);
    if (door == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for a listening socket");
    }
    door->rules = *rules;
    door->rules.patience_ns = rules->patience_ns > 0 ? rules->patience_ns : DOOR_PATIENCE_NS;
    door->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    door->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (door->epoll_fd < 0 || door->timer_fd < 0 ||
        !watch(door, EPOLL_CTL_ADD, door->timer_fd, EPOLLIN, NULL)) {
        int code = errno;
        door_close(door);
        return fail_errno(err, code,
                          "cannot watch sockets; raise the limit of open files (ulimit -n)");
    }
    fd_not_for_children(door->epoll_fd);
    fd_not_for_children(door->timer_fd);
    *door_p = door;
    return HVD_OK;
}

// Whoever is accepted has the options of the socket at which it came.
static void set_options(const door_t *door, int fd, const struct sockaddr_storage *at)
{
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)at;
    int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (at->ss_family == AF_INET6) {
        int only_v6 = !IN6_IS_ADDR_UNSPECIFIED(&v6->sin6_addr);
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &only_v6, sizeof only_v6);
    }
    if (door->rules.prepare != NULL) {
        door->rules.prepare(door->rules.owner, fd);
    }
}

int door_listen(door_t *door, struct sockaddr_storage *at_p, socklen_t *bytes_p)
{
    struct sockaddr *at = (struct sockaddr *)at_p;
    int fd = socket(at_p->ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0 || door->n_listeners == DOOR_LISTENERS) {
        int code = fd < 0 ? errno : EMFILE;
        fd_close(fd);
        return code;
    }
    set_options(door, fd, at_p);
    if (bind(fd, at, *bytes_p) != 0 || listen(fd, BACKLOG) != 0 ||
        getsockname(fd, at, bytes_p) != 0 || !watch(door, EPOLL_CTL_ADD, fd, EPOLLIN, NULL)) {
        int code = errno;
        close(fd);
        return code;
    }
    fd_not_for_children(fd);
    door->listeners[door->n_listeners++] = fd;
    return 0;
}

int door_fd(const door_t *door)
{
    return door->epoll_fd;
}

int door_n_strangers(const door_t *door)
{
    return door->n_strangers;
}

uint64_t door_n_refused(const door_t *door)
{
    return atomic_load(&door->n_refused);
}

void door_close(door_t *door)
{
    if (door == NULL) {
        return;
    }
    while (door->first != NULL) {
        cut(door, door->first);
    }
    for (int i = 0; i < door->n_listeners; i++) {
        watch(door, EPOLL_CTL_DEL, door->listeners[i], 0, NULL);
        fd_close(door->listeners[i]);
    }
    fd_close(door->timer_fd);
    fd_close(door->epoll_fd);
    free(door);
}
