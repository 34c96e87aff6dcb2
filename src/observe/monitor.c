// SPDX-License-Identifier: Apache-2.0
//
// monitor.c - the monitor thread, which never stands in the way of an operation.
//
// It writes the timeline, serves the socket of live.c and dumps the flight recorder when the job
// stalls or fails, or the process gets SIGUSR2. Whatever may take its time (a slow disk, a client
// that does not read, a binding that must wait for its interpreter to tell a stack) happens here
// and not on the thread that drives the engine.
//
// Threads: the monitor thread, with all signals blocked; others reach it by a set of flags and a
// bell (an eventfd). The signal handler does nothing but ring the bells of this process. Which
// those are is the only thing in the library that belongs to the process and not to a context: a
// signal does so as well.
#define _GNU_SOURCE
#include "observe/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define WRITE_EVERY_MS 50 // while a timeline runs
#define ANSWER_NS (30 * NS_PER_S)
#define STOP_NS (10 * NS_PER_S)
#define DUMP_EVERY_NS (10 * NS_PER_S) // while it stalls
#define MAX_BELLS 64
#define SIGNAL_RING ((uint64_t)1 << 32) // added to a bell by the handler, 1 by everyone else

enum {
    ASKED_STOP = 1u << 0,
    ASKED_TIMELINE = 1u << 1,
    ASKED_DUMP = 1u << 2, // shifted by its reason
};

static const char *const reason_names[N_DUMP_REASONS] = {
    [DUMP_SIGNAL] = "signal",
    [DUMP_STALL] = "stall",
    [DUMP_FAILURE] = "failure",
};

struct monitor {
    observe_t *observe;
    pthread_t thread;
    int bell;
    bool hears_signals;
    atomic_uint asked; // ASKED_ flags
    live_t *live;
    snapshot_t *scratch;
    uint64_t next_dump_ns[N_DUMP_REASONS];

    lock_t timeline_lock; // one change at a time
    timeline_t *next_timeline;
    atomic_uint n_changes; // futex: timelines changed so far
    atomic_uint parting;   // futex: who was through first
};

enum { NOBODY_YET, THREAD_ENDED, OTHERS_LEFT };

static void ring(int bell, uint64_t how)
{
    while (write(bell, &how, sizeof how) < 0 && errno == EINTR) {
    }
}

static void ask(monitor_t *m, unsigned what)
{
    atomic_fetch_or(&m->asked, what);
    ring(m->bell, 1);
}

void monitor_wake(observe_t *o)
{
    ask(o->monitor, 0);
}

// --- SIGUSR2 -------------------------------------------------------------------------------------

static struct {
    lock_t lock;
    atomic_int bells[MAX_BELLS]; // eventfd + 1; 0: none
    atomic_int pid;              // whose they are: a forked child must not ring its parent's
    atomic_int n_inside;         // handlers that may still hold a bell
} signalled = {.lock = LOCK_INITIALIZER};

static void on_signal(int number)
{
    int code = errno;
    (void)number;
    atomic_fetch_add(&signalled.n_inside, 1);
    for (int i = 0; i < MAX_BELLS && getpid() == atomic_load(&signalled.pid); i++) {
        int bell = atomic_load(&signalled.bells[i]);
        if (bell > 0) {
            ring(bell - 1, SIGNAL_RING);
        }
    }
    atomic_fetch_sub(&signalled.n_inside, 1);
    errno = code;
}

static bool is_ours(void)
{
    struct sigaction now;
    return sigaction(SIGUSR2, NULL, &now) == 0 && (now.sa_flags & SA_SIGINFO) == 0 &&
           now.sa_handler == on_signal;
}

static bool replace_default(void)
{
    struct sigaction now;
    struct sigaction ours = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    bool is_default = sigaction(SIGUSR2, NULL, &now) == 0 && (now.sa_flags & SA_SIGINFO) == 0 &&
                      now.sa_handler == SIG_DFL;
    return is_default && sigaction(SIGUSR2, &ours, NULL) == 0;
}

// A child has copies of its parent's bells: to ring them would make the parent dump. Handlers that
// other threads of the parent were in are never left here.
static void forget_parents_bells(void)
{
    if (atomic_load(&signalled.pid) == (int)getpid()) {
        return;
    }
    for (int i = 0; i < MAX_BELLS; i++) {
        atomic_store(&signalled.bells[i], 0);
    }
    atomic_store(&signalled.n_inside, 0);
    atomic_store(&signalled.pid, (int)getpid());
}

static void hear_signals(monitor_t *m)
{
    lock_take(&signalled.lock);
    if (is_ours() || replace_default()) {
        forget_parents_bells();
        for (int i = 0; i < MAX_BELLS && !m->hears_signals; i++) {
            int none = 0;
            m->hears_signals =
                atomic_compare_exchange_strong(&signalled.bells[i], &none, m->bell + 1);
        }
    }
    lock_release(&signalled.lock);
}

static void ignore_signals(monitor_t *m)
{
    bool any = false;
    lock_take(&signalled.lock);
    for (int i = 0; m->hears_signals && i < MAX_BELLS; i++) {
        int mine = m->bell + 1;
        atomic_compare_exchange_strong(&signalled.bells[i], &mine, 0);
        any |= atomic_load(&signalled.bells[i]) != 0;
    }
    if (m->hears_signals && !any && is_ours()) {
        struct sigaction usual = {.sa_handler = SIG_DFL};
        sigaction(SIGUSR2, &usual, NULL);
    }
    lock_release(&signalled.lock);
    while (atomic_load(&signalled.n_inside) > 0) { // the bell must outlive its last ring
        sched_yield();
    }
}

// --- Dumps ---------------------------------------------------------------------------------------

void observe_dump(observe_t *o, dump_reason_t reason)
{
    ask(o->monitor, ASKED_DUMP << reason);
}

static hvd_status_t write_file(const char *path, const buf_t *text, err_t *err)
{
    int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) {
        return fail_errno(err, errno, "cannot write '%s'", path);
    }
    size_t done = 0;
    while (done < text->len) {
        ssize_t n = write(fd, text->data + done, text->len - done);
        if (n <= 0 && errno != EINTR) {
            int code = errno;
            close(fd);
            return fail_errno(err, code, "cannot write all of '%s'", path);
        }
        done += n > 0 ? (size_t)n : 0;
    }
    close(fd);
    return HVD_OK;
}

static void log_lines(const observe_t *o, log_level_t level, buf_t *lines)
{
    for (char *save = NULL, *line = strtok_r((char *)lines->data, "\n", &save); line != NULL;
         line = strtok_r(NULL, "\n", &save)) {
        log_at(o->job.log, level, "recorder", "%s", line);
    }
}

static void dump(monitor_t *m, dump_reason_t reason)
{
    observe_t *o = m->observe;
    const char *dir = o->job.config->recorder_dir;
    bool to_file = dir != NULL && dir[0] != '\0';
    uint64_t now_ns = clock_ns();
    if (now_ns < m->next_dump_ns[reason]) {
        return;
    }
    m->next_dump_ns[reason] = reason == DUMP_FAILURE ? NEVER_NS // there is only one end
                              : reason == DUMP_STALL ? now_ns + DUMP_EVERY_NS
                                                     : 0;
    buf_t summary = {0}, page = {0}, stacks = {0};
    char path[4096] = "";
    err_t err = {0};
    recorder_snapshot(o, m->scratch);
    snapshot_summary(m->scratch, &summary);
    snapshot_page(o, m->scratch, &page, &stacks);
    buf_append(&summary, "", 1);
    buf_append(&stacks, "", 1);
    if (to_file && !page.failed) {
        snprintf(path, sizeof path, "%s/hvd-%s-rank-%d-pid-%d.txt", dir, reason_names[reason],
                 o->job.rank, (int)getpid());
        write_file(path, &page, &err);
    }
    // A rank that had nothing to do has little to say about a failure.
    const record_t *last = snapshot_last(m->scratch);
    bool idle = reason == DUMP_FAILURE && (last == NULL || last->status == HVD_OK) && !to_file;
    if (!summary.failed && !stacks.failed) {
        log_at(o->job.log, idle ? LOG_INFO : LOG_WARN, "recorder", "%s: %s%s%s",
               reason_names[reason], (char *)summary.data, to_file ? "; more: " : "",
               err.status == HVD_OK ? path : err.text);
        // The error of a failed operation has the line that submitted it.
        log_lines(o, reason == DUMP_FAILURE ? LOG_INFO : LOG_WARN, &stacks);
    }
    buf_free(&summary);
    buf_free(&page);
    buf_free(&stacks);
}

// --- Timeline ------------------------------------------------------------------------------------

static void change_timeline(monitor_t *m)
{
    observe_t *o = m->observe;
    lock_take(o->job.lock);
    timeline_t *old = o->timeline;
    o->timeline = m->next_timeline;
    atomic_store(&o->timeline_on, o->timeline != NULL);
    lock_release(o->job.lock);
    timeline_close(o, old);
    atomic_fetch_add(&m->n_changes, 1);
    futex_wake(&m->n_changes, INT32_MAX);
}

static hvd_status_t set_timeline(observe_t *o, timeline_t *timeline, err_t *err)
{
    monitor_t *m = o->monitor;
    uint64_t deadline_ns = clock_ns() + ANSWER_NS;
    lock_take(&m->timeline_lock);
    unsigned seen = atomic_load(&m->n_changes);
    m->next_timeline = timeline;
    ask(m, ASKED_TIMELINE);
    while (atomic_load(&m->n_changes) == seen && clock_ns() < deadline_ns) {
        futex_wait(&m->n_changes, seen, deadline_ns);
    }
    bool done = atomic_load(&m->n_changes) != seen;
    lock_release(&m->timeline_lock);
    return done ? HVD_OK
                : fail(err, HVD_TIMEOUT,
                       "writing the pending part of the timeline took more than %d s; the change "
                       "takes effect when it is written",
                       (int)(ANSWER_NS / NS_PER_S));
}

hvd_status_t observe_start_timeline(observe_t *o, const char *path, bool mark_cycles, err_t *err)
{
    timeline_t *timeline;
    hvd_status_t status = timeline_open(o, path, mark_cycles, &timeline, err);
    return status == HVD_OK ? set_timeline(o, timeline, err) : status;
}

hvd_status_t observe_stop_timeline(observe_t *o, err_t *err)
{
    return set_timeline(o, NULL, err);
}

// --- The thread ----------------------------------------------------------------------------------

static int sleep_ms(const monitor_t *m)
{
    uint64_t until_ns = m->live != NULL ? live_deadline_ns(m->live) : NEVER_NS;
    if (atomic_load(&m->observe->timeline_on)) {
        until_ns = MIN(until_ns, clock_ns() + WRITE_EVERY_MS * NS_PER_MS);
    }
    if (until_ns == NEVER_NS) {
        return -1;
    }
    uint64_t now_ns = clock_ns();
    return until_ns <= now_ns ? 0 : (int)((until_ns - now_ns) / NS_PER_MS + 1);
}

static uint64_t take_rings(monitor_t *m)
{
    uint64_t rings;
    return read(m->bell, &rings, sizeof rings) == sizeof rings ? rings : 0;
}

// What has been asked for since the last look. Who asks says what before it rings, so the bell is
// taken first; signals only ring, so it is taken again in the last look.
static unsigned listen_for(monitor_t *m)
{
    struct pollfd fds[2 + LIVE_CLIENTS];
    int n = m->live != NULL ? live_wants(m->live, fds) : 0;
    fds[n] = (struct pollfd){.fd = m->bell, .events = POLLIN};
    poll(fds, (nfds_t)n + 1, sleep_ms(m));
    uint64_t rings = take_rings(m);
    unsigned asked = atomic_exchange(&m->asked, 0);
    if ((asked & ASKED_STOP) != 0) {
        rings += take_rings(m);
    }
    return rings >= SIGNAL_RING ? asked | ASKED_DUMP << DUMP_SIGNAL : asked;
}

static void monitor_free(monitor_t *m)
{
    live_close(m->live);
    if (m->bell >= 0) {
        close(m->bell);
    }
    lock_free(&m->timeline_lock);
    free(m->scratch);
    free(m);
}

static void *monitor_main(void *arg)
{
    monitor_t *m = arg;
    observe_t *o = m->observe;
    unsigned asked = 0;
    while ((asked & ASKED_STOP) == 0) {
        asked = listen_for(m);
        for (int reason = 0; reason < N_DUMP_REASONS; reason++) {
            if ((asked & ASKED_DUMP << reason) != 0) {
                dump(m, (dump_reason_t)reason);
            }
        }
        if ((asked & ASKED_TIMELINE) != 0) {
            change_timeline(m);
        }
        if (o->timeline != NULL) { // only this thread changes it
            timeline_write(o, o->timeline);
        }
        if (m->live != NULL) {
            live_serve(m->live, m->scratch);
        }
    }
    timeline_close(o, o->timeline);
    o->timeline = NULL;
    if (atomic_exchange(&m->parting, THREAD_ENDED) == OTHERS_LEFT) {
        monitor_free(m);
        o->job.free_owner(o->job.owner);
    } else {
        futex_wake(&m->parting, 1);
    }
    return NULL;
}

hvd_status_t monitor_start(observe_t *o, err_t *err)
{
    monitor_t *m = calloc(1, sizeof *m);
    if (m == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to start");
    }
    m->observe = o;
    lock_init(&m->timeline_lock);
    m->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int code = m->bell < 0 ? errno : 0;
    m->scratch = malloc(sizeof *m->scratch);
    code = m->scratch == NULL ? ENOMEM : code;
    if (code == 0) {
        m->live = live_open(o);
        code = thread_start(&m->thread, "hvd-monitor", monitor_main, m);
    }
    if (code != 0) {
        monitor_free(m);
        return thread_failed(err, code, "the monitor thread");
    }
    o->monitor = m;
    if (o->job.config->dump_signal) {
        hear_signals(m);
    }
    return HVD_OK;
}

static void end_monitor(observe_t *o)
{
    pthread_join(o->monitor->thread, NULL);
    monitor_free(o->monitor);
    o->monitor = NULL;
}

bool observe_stop(observe_t *o)
{
    monitor_t *m = o != NULL ? o->monitor : NULL;
    uint64_t deadline_ns = clock_ns() + STOP_NS;
    if (m == NULL) {
        return true;
    }
    ignore_signals(m);
    ask(m, ASKED_STOP);
    while (atomic_load(&m->parting) == NOBODY_YET && clock_ns() < deadline_ns) {
        futex_wait(&m->parting, NOBODY_YET, deadline_ns);
    }
    if (atomic_load(&m->parting) == THREAD_ENDED) {
        end_monitor(o);
        return true;
    }
    log_warn(o->job.log, "monitor",
             "writing the timeline or a recorder dump has not finished for %d s: they may be "
             "incomplete. Look at HOROVOD_TIMELINE and HOROVOD_RECORDER_DIR",
             (int)(STOP_NS / NS_PER_S));
    observe_set_stack_source(o, NULL, NULL); // who gave these may be gone when the disk answers
    o->job.log->level = LOG_OFF;
    return false;
}

bool observe_inherits(observe_t *o)
{
    monitor_t *m = o->monitor;
    pthread_t thread = m->thread;
    unsigned expected = NOBODY_YET;
    if (atomic_compare_exchange_strong(&m->parting, &expected, OTHERS_LEFT)) {
        pthread_detach(thread);
        return true;
    }
    end_monitor(o);
    return false;
}

void observe_set_stack_source(observe_t *o, hvd_stack_fn fn, void *arg)
{
    lock_take(o->job.lock);
    o->stack_of = fn;
    o->stack_arg = arg;
    lock_release(o->job.lock);
}

const char *observe_socket(const observe_t *o)
{
    return live_name(o->monitor->live);
}
