// SPDX-License-Identifier: Apache-2.0
//
// sleeper.c - the two manners of sleeping.
//
// Alone, nothing but the owner exists: ringing writes an eventfd that ppoll() watches, and only if
// the word says that the owner sleeps. Shared, peers ring the futex directly, so sockets need
// somebody who waits for them meanwhile: the poller, a thread with two states.
//   idle    it sleeps on `armed`, a private futex. It costs nothing.
//   armed   it sits in poll(). When something is readable it disarms itself and rings the word.
// The owner arms it before every sleep and never disarms it, so an owner that stays awake causes
// at most one wake of the poller for each time it slept.
//
// Why no socket's wake-up is lost: the owner writes word = 1, then exchanges armed with 1. If the
// poller's exchange with 0 comes before, the owner finds 0 and wakes it, and poll() shows whatever
// is readable by then. If it comes after, the poller has read the owner's 1 in `armed`, so it sees
// word = 1 too and rings it.
//
// A thread may let the engine go and only then call sleeper_sleep, while the next owner already
// announces and ends sleeps of its own: the late one then sleeps on a word that is not about it. So
// sleepers are counted, and an owner that finds one when it ends wakes it.
#define _GNU_SOURCE
#include "net/sleeper.h"

#include "net/net.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

enum { AWAKE = 0, ASLEEP = 1 }; // values of the word
enum { IDLE = 0, ARMED = 1 };   // values of `armed`

struct sleeper {
    atomic_uint own_word;
    atomic_uint *word;
    // What is watched and, last, the bell: it ends a sleep when alone, the poller when shared.
    struct pollfd fds[SLEEPER_MAX_FDS + 1];
    int n_fds;
    int bell;
    atomic_bool bell_rang; // since it was last silenced
    atomic_int n_asleep;
    bool shared;
    bool has_poller;
    pthread_t poller;
    atomic_bool stop;
    atomic_uint armed;
};

// --- The poller thread ---------------------------------------------------------------------------

static void *poller_run(void *arg)
{
    sleeper_t *s = arg;
    while (!atomic_load(&s->stop)) {
        if (atomic_load(&s->armed) == IDLE) {
            futex_wait(&s->armed, IDLE, NEVER_NS);
            continue;
        }
        if (poll(s->fds, (nfds_t)s->n_fds, -1) < 0 && errno != EINTR) {
            // Out of kernel memory at worst. Ringing lets the owner look for itself meanwhile.
            nanosleep(&(struct timespec){.tv_nsec = (long)NS_PER_MS}, NULL);
        }
        if (atomic_exchange(&s->armed, IDLE) == ARMED) {
            wake_ring(s->word);
        }
    }
    return NULL;
}

static hvd_status_t poller_start(sleeper_t *s, err_t *err)
{
    int code = thread_start(&s->poller, "hvd-poll", poller_run, s);
    if (code != 0) {
        return thread_failed(err, code, "the thread that watches sockets");
    }
    s->has_poller = true;
    return HVD_OK;
}

static void ring_bell(sleeper_t *s)
{
    uint64_t one = 1;
    ssize_t n;
    do {
        n = write(s->bell, &one, sizeof one);
    } while (n < 0 && errno == EINTR); // EAGAIN: it rings already
    // In this order: at worst one sleep too many is cut short before the bell is silenced.
    atomic_store(&s->bell_rang, true);
}

static void silence_bell(sleeper_t *s)
{
    uint64_t count;
    if (atomic_exchange(&s->bell_rang, false)) {
        while (read(s->bell, &count, sizeof count) < 0 && errno == EINTR) {
        }
    }
}

static void poller_stop(sleeper_t *s)
{
    if (s->has_poller) {
        atomic_store(&s->stop, true);
        ring_bell(s);
        atomic_exchange(&s->armed, ARMED); // a wait that begins now does not
        futex_wake(&s->armed, 1);
        pthread_join(s->poller, NULL);
    }
}

// --- Life ----------------------------------------------------------------------------------------

hvd_status_t sleeper_new(sleeper_t **sleeper_p, err_t *err)
{
    sleeper_t *s = calloc(1, sizeof *s);
    if (s == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to sleep with");
    }
    s->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (s->bell < 0) {
        free(s);
        return fail_errno(
            err, errno,
            "cannot create an event descriptor; raise the limit of open files (ulimit -n)");
    }
    s->word = &s->own_word;
    s->fds[0] = (struct pollfd){.fd = s->bell, .events = POLLIN};
    s->n_fds = 1;
    *sleeper_p = s;
    return HVD_OK;
}

hvd_status_t sleeper_watch(sleeper_t *s, int fd, err_t *err)
{
    if (s->n_fds > SLEEPER_MAX_FDS || s->has_poller) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "a sleeper watches at most %d descriptors, all given "
                    "before it is shared",
                    SLEEPER_MAX_FDS);
    }
    INVARIANT(s->fds[s->n_fds - 1].fd == s->bell); // the last, always
    s->fds[s->n_fds] = s->fds[s->n_fds - 1];
    s->fds[s->n_fds - 1] = (struct pollfd){.fd = fd, .events = POLLIN};
    s->n_fds++;
    return HVD_OK;
}

hvd_status_t sleeper_share(sleeper_t *s, atomic_uint *word, err_t *err)
{
    s->word = word;
    s->shared = true;
    return s->n_fds > 1 ? poller_start(s, err) : HVD_OK;
}

void sleeper_free(sleeper_t *s)
{
    if (s == NULL) {
        return;
    }
    poller_stop(s);
    close(s->bell);
    free(s);
}

// --- Sleeping ------------------------------------------------------------------------------------

unsigned sleeper_announce(sleeper_t *s)
{
    atomic_store(s->word, ASLEEP);
    atomic_thread_fence(memory_order_seq_cst); // the caller's last look comes after this
    if (s->has_poller && atomic_exchange(&s->armed, ARMED) == IDLE) {
        futex_wake(&s->armed, 1);
    }
    return ASLEEP;
}

static void sleep_alone(sleeper_t *s, uint64_t deadline_ns)
{
    struct timespec left = {0};
    struct pollfd fds[SLEEPER_MAX_FDS + 1]; // its own: a late sleeper may be here too
    memcpy(fds, s->fds, sizeof fds);
    if (deadline_ns != NEVER_NS) {
        uint64_t now_ns = clock_ns();
        uint64_t left_ns = deadline_ns > now_ns ? deadline_ns - now_ns : 0;
        left = (struct timespec){.tv_sec = (time_t)(left_ns / NS_PER_S),
                                 .tv_nsec = (long)(left_ns % NS_PER_S)};
    }
    ppoll(fds, (nfds_t)s->n_fds, deadline_ns != NEVER_NS ? &left : NULL, NULL);
}

void sleeper_sleep(sleeper_t *s, unsigned ticket, uint64_t deadline_ns)
{
    atomic_fetch_add(&s->n_asleep, 1);
    if (s->shared) {
        futex_wait(s->word, ticket, deadline_ns);
    } else if (atomic_load(s->word) == ticket) {
        sleep_alone(s, deadline_ns);
    }
    atomic_fetch_sub(&s->n_asleep, 1);
}

static void end_sleeps(sleeper_t *s)
{
    if (s->shared) {
        futex_wake(s->word, INT32_MAX);
    } else {
        ring_bell(s);
    }
}

void sleeper_end(sleeper_t *s)
{
    atomic_store(s->word, AWAKE);
    silence_bell(s);
    if (UNLIKELY(atomic_load(&s->n_asleep) > 0)) {
        end_sleeps(s);
    }
}

void sleeper_wake(sleeper_t *s)
{
    if (wake_claim(s->word)) {
        end_sleeps(s);
    }
}
