// SPDX-License-Identifier: Apache-2.0
//
// gather.c - a job on whatever agents dial in: a session whose hosts are not known before.
//
// Somebody else starts the agents (Spark its tasks), each for one rank, and tells them where to
// dial (--await-agents). An agent says which machine it is on and which of the expected ones it is,
// its slot. When all have come the first generation begins; ranks go host by host. A job of fixed
// size ends with its first failure. An elastic one goes on with those that are left, as long as
// they are enough, and takes in agents that come again. A second agent of a slot is kept waiting:
// it takes over if the first fails, and must not leave before the job ends, or its platform would
// take the slot's work for done. Who does not come within --start-timeout fails the job, unless
// somebody reads the events, who then has a clock of his own.
//
// What happens is told on --events-fd, a line each:
//   open PORT               it listens there
//   agent N SLOT ABOUT      one has come; N are there
//   spare N, gone N         so many wait for the slot of another; one has gone, N are there
//   ranks N, running N      a generation of so many ranks; so many of them run
//   failed RANK CODE SLOT   the failure that explains those of the same moment; CODE -1: its agent
//                           is gone
//   problem KIND N WANTED   why an elastic job cannot go on: late, failed, resets, exhausted
// One thread, the session's.
#define _GNU_SOURCE
#include "launch/gather.h"
#include "launch/elastic.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#define LOOK_MS 1000
#define ARRIVE_MS 500           // at the start: others come soon after those that are enough
#define LEFT_MS 1000            // after the first has left a generation: the others are about to
#define BURST_NS (5 * NS_PER_S) // failures that follow each other within it have one cause
#define LOST (-1)

static gathering_t *gathering_of(session_t *session)
{
    return (gathering_t *)session;
}

void gather_tell(const gathering_t *g, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (g->events >= 0) {
        vdprintf(g->events, format, args);
    }
    va_end(args);
}

// --- Who there is --------------------------------------------------------------------------------

static bool is_waiting(const arrival_t *a)
{
    return a->is_spare && !a->has_failed;
}

int gather_count(const gathering_t *g, bool (*is_one)(const arrival_t *))
{
    int n = 0;
    for (int i = 0; i < g->n_arrivals; i++) {
        n += is_one(g->arrivals[i]);
    }
    return n;
}

static arrival_t *arrival_new(gathering_t *g, const channel_t *channel,
                              const introduction_t *introduction)
{
    agent_link_t *link = session_admit(&g->session, channel, introduction);
    arrival_t *a = link != NULL ? calloc(1, sizeof *a) : NULL;
    if (a == NULL || !session_append(&g->arrivals, &g->n_arrivals, a)) {
        free(a);
        return NULL;
    }
    a->link = link;
    a->slot = link->slot;
    a->has_failed = link->phase != LINK_READY;
    return a;
}

arrival_t *gather_arrival(const gathering_t *g, const agent_link_t *link)
{
    for (int i = 0; i < g->n_arrivals; i++) {
        if (g->arrivals[i]->link == link) {
            return g->arrivals[i];
        }
    }
    return NULL;
}

// --- Failures ------------------------------------------------------------------------------------

// How likely it is that another rank's failure is the cause of this one.
typedef enum doubt { DOUBT_NONE, DOUBT_SOME, DOUBT_MUCH, N_DOUBTS } doubt_t;

// How long to listen for a better cause.
static const int patience_ms[N_DOUBTS] = {
    [DOUBT_NONE] = 100, [DOUBT_SOME] = 500, [DOUBT_MUCH] = 2000};

// A crashed rank has not heard of others; one that gave up because of another says so. What a rank
// raised itself may still be how it noticed that another has crashed.
static doubt_t doubt_of(const worker_t *worker)
{
    const rank_end_t *end = &worker->end;
    if (end->blames >= 0 && end->blames != worker->place.rank) {
        return DOUBT_MUCH;
    }
    return end->signo != 0 && end->signo != SIGTERM ? DOUBT_NONE : DOUBT_SOME;
}

static void note_cause(gathering_t *g, worker_t *worker)
{
    uint64_t now_ns = clock_ns();
    bool is_new = g->cause == NULL || (is_elastic(g) && now_ns - g->failed_ns > BURST_NS);
    if (is_new || doubt_of(worker) < doubt_of(g->cause)) {
        g->cause = worker;
    }
    g->failed_ns = now_ns;
    gather_tell(g, "failed %d %d %d\n", g->cause->place.rank, g->cause->end.code,
                gather_arrival(g, g->cause->link)->slot);
}

static void stop_after(gathering_t *g, int ms)
{
    session_t *session = &g->session;
    if (gather_count(g, is_alive) == 0) {
        session_stop(session, SIGTERM, LEAVE_MS); // nobody is left to be heard
    } else if (!session->is_stopping) {
        session->stop_at_ns = MIN(session->stop_at_ns, deadline_in_ms(ms));
    }
}

static void form_in_ms(gathering_t *g, int ms)
{
    if (!g->session.is_finishing && !g->session.is_stopping) {
        g->form_at_ns = MIN(g->form_at_ns, deadline_in_ms(ms));
    }
}

static void admit(gathering_t *g, arrival_t *a);

// To who has waited for it.
static void pass_slot_on(gathering_t *g, const arrival_t *a)
{
    for (int i = 0; i < g->n_arrivals && !a->is_spare; i++) {
        arrival_t *spare = g->arrivals[i];
        if (is_waiting(spare) && spare->slot == a->slot) {
            admit(g, spare);
            return;
        }
    }
}

static void on_failure(gathering_t *g, arrival_t *a, worker_t *worker)
{
    a->has_failed = true;
    note_cause(g, worker);
    if (!is_elastic(g) || g->session.is_finishing) {
        stop_after(g, MAX(patience_ms[doubt_of(worker)], session_patience_ms(&g->session)));
        return;
    }
    form_in_ms(g, MOMENT_MS);
    pass_slot_on(g, a);
}

static void on_exit_of(session_t *session, worker_t *worker)
{
    gathering_t *g = gathering_of(session);
    arrival_t *a = gather_arrival(g, worker->link);
    bool has_result = session->options->results[0] == '\0' || worker->result_fd >= 0;
    session_flush(session, worker);
    if (worker->end.was_stopped) {
        return;
    }
    if (worker->end.code != 0 || !has_result) {
        on_failure(g, a, worker);
        return;
    }
    a->is_done = true;
    session->is_finishing = true; // the others are about to end too
    g->form_at_ns = g->give_up_at_ns = NEVER_NS;
    if (g->cause != NULL && gather_arrival(g, g->cause->link)->generation == g->generation) {
        stop_after(g, patience_ms[DOUBT_MUCH]);
    }
}

static void tell_news(gathering_t *g)
{
    g->n_news++;
    for (int i = 0; i < g->n_arrivals; i++) {
        if (has_rank(g->arrivals[i])) {
            command_news(g->arrivals[i]->link, g->n_news, NEWS_ADDED);
        }
    }
}

static uint64_t on_time(session_t *session, uint64_t now_ns)
{
    gathering_t *g = gathering_of(session);
    if (session->is_stopping || (session->is_finishing && is_elastic(g))) {
        return NEVER_NS;
    }
    if (g->generation == 0 && now_ns >= g->begin_by_ns) {
        session_fail(
            session, EXIT_START_TIMEOUT,
            "%d of %d agents connected within %g s (--start-timeout); does %s --agent --dial run "
            "for the others, with slots 0 to %d (--agent-slot), and can they reach this host?",
            gather_count(g, is_alive), g->n_begin, session->options->start_timeout, PROGRAM,
            g->n_max - 1);
        session_stop(session, SIGTERM, LEAVE_MS);
        return NEVER_NS;
    }
    if (now_ns >= g->form_at_ns) {
        gather_form(g);
    }
    if (now_ns >= g->give_up_at_ns) {
        gather_give_up(g, "late", gather_count(g, is_alive), g->n_min);
    }
    uint64_t begin_by_ns = g->generation == 0 ? g->begin_by_ns : NEVER_NS;
    return MIN(begin_by_ns, MIN(g->form_at_ns, g->give_up_at_ns));
}

// --- What agents report --------------------------------------------------------------------------

// It is one of those a generation is formed of.
static void admit(gathering_t *g, arrival_t *a)
{
    int n;
    a->is_spare = false;
    n = gather_count(g, is_alive);
    if (g->generation == 0) {
        if (n >= g->n_begin) {
            form_in_ms(g, n == g->n_max ? 0 : ARRIVE_MS);
        }
    } else if (g->give_up_at_ns != NEVER_NS) {
        form_in_ms(g, MOMENT_MS);
    } else if (g->form_at_ns == NEVER_NS && is_elastic(g) && !g->session.is_finishing) {
        tell_news(g);
    }
}

// Somebody else has its slot, or nobody may.
static bool is_taken(const gathering_t *g, const arrival_t *a)
{
    bool taken = a->slot < 0 || a->slot >= g->n_max;
    for (int i = 0; i < g->n_arrivals; i++) {
        const arrival_t *other = g->arrivals[i];
        taken |= other != a && other->slot == a->slot && !other->is_spare && !other->has_failed;
    }
    return taken;
}

arrival_t *gather_welcome(gathering_t *g, const channel_t *channel,
                          const introduction_t *introduction)
{
    arrival_t *a = arrival_new(g, channel, introduction);
    if (a == NULL) {
        session_fail(&g->session, EXIT_INTERNAL, "no memory for the agent of host %s",
                     introduction->host);
        return NULL;
    }
    if (a->has_failed) {
        sink_say(g->session.sink, STREAM_STDERR, "%s: %s", PROGRAM, a->link->problem);
        return NULL;
    }
    a->is_spare = is_taken(g, a);
    return a;
}

static void on_arrival(session_t *session, const channel_t *channel,
                       const introduction_t *introduction)
{
    gathering_t *g = gathering_of(session);
    arrival_t *a = gather_welcome(g, channel, introduction);
    if (a == NULL) {
        return;
    }
    if (!a->is_spare) {
        admit(g, a);
    }
    gather_tell(g, "agent %d %d %s\n", gather_count(g, is_alive), a->slot, introduction->about);
    gather_tell(g, "spare %d\n", gather_count(g, is_waiting));
}

static void on_lost(session_t *session, agent_link_t *link, const char *how)
{
    gathering_t *g = gathering_of(session);
    arrival_t *a = gather_arrival(g, link);
    (void)how;
    if (a != NULL && a->worker != NULL) {
        session_end_worker(session, a->worker, &(rank_end_t){.code = LOST, .blames = -1});
    } else if (a != NULL) {
        a->has_failed = true;
        pass_slot_on(g, a);
        gather_tell(g, "gone %d\n", gather_count(g, is_alive));
    }
    link_close(link);
}

static bool has_begun(const arrival_t *a)
{
    return has_rank(a) && a->has_begun;
}

static bool has_left(const gathering_t *g, const arrival_t *a)
{
    return has_rank(a) && a->worker->has_left == g->generation;
}

static bool all_have_left(const gathering_t *g)
{
    for (int i = 0; i < g->n_arrivals; i++) {
        if (has_rank(g->arrivals[i]) && !has_left(g, g->arrivals[i])) {
            return false;
        }
    }
    return true;
}

static bool stays(const arrival_t *a)
{
    return has_rank(a) && !a->is_leaving;
}

// It has left its generation; its task fails now, so that its platform starts another.
static void let_go(gathering_t *g, arrival_t *a)
{
    a->worker->is_leaving = a->has_failed = true;
    session_stop_link(a->link, SIGTERM, LEAVE_MS);
    gather_tell(g, "gone %d\n", gather_count(g, is_alive));
    pass_slot_on(g, a);
}

// Its task is about to be ended, and another one comes in its place. Others that have the state go
// on with it, after the step that they all finish; without any there is nothing to wait for.
static void on_leaving(gathering_t *g, arrival_t *a)
{
    a->is_leaving = true;
    if (!is_elastic(g) || gather_count(g, stays) == 0) {
        session_stop_link(a->link, SIGTERM, LEAVE_MS);
    } else if (has_left(g, a)) {
        let_go(g, a);
    } else if (!g->session.is_finishing) { // else it ends by itself
        tell_news(g);
    }
}

// A rank has begun, or has left a generation.
static void on_frame(session_t *session, agent_link_t *link, const frame_t *frame)
{
    gathering_t *g = gathering_of(session);
    arrival_t *a = gather_arrival(g, link);
    if (frame->kind == FRAME_LEAVING && a != NULL) {
        on_leaving(g, a);
    }
    if (a == NULL || a->worker == NULL || frame->kind != FRAME_READY ||
        frame->ready.rank != a->worker->id) {
        return;
    }
    if (frame->ready.generation == 0) {
        a->has_begun = true;
        gather_tell(g, "running %d\n", gather_count(g, has_begun));
        return;
    }
    a->worker->has_left = (uint32_t)frame->ready.generation;
    if (has_left(g, a)) {
        if (a->is_leaving) {
            let_go(g, a);
        }
        form_in_ms(g, all_have_left(g) ? 0 : LEFT_MS);
    }
}

// --- Beginning and end ---------------------------------------------------------------------------

static int conclude(session_t *session)
{
    const gathering_t *g = gathering_of(session);
    bool is_well = g->generation > 0;
    for (int i = 0; i < g->n_arrivals; i++) {
        const arrival_t *a = g->arrivals[i];
        is_well &= a->generation != g->generation || a->is_done;
    }
    if (is_well) {
        return 0;
    }
    if (g->events < 0 && g->cause != NULL) { // else who reads the events says what there is to say
        rank_end_t *ends = session_ends(session);
        session_report(session, ends, g->cause);
        free(ends);
    }
    return g->cause != NULL && g->cause->end.code > 0 ? g->cause->end.code : EXIT_UNREACHABLE;
}

#define POLICY                                                                                     \
    .hears_signals = true, .at_home = true, .look_ms = LOOK_MS, .grace_ms = LEAVE_MS,              \
    .on_arrival = on_arrival, .on_exit = on_exit_of, .on_lost = on_lost, .on_frame = on_frame,     \
    .on_time = on_time, .conclude = conclude

static const session_policy_t fixed_policy = {POLICY};
static const session_policy_t elastic_policy = {.is_elastic = true, POLICY};

static hvd_status_t check_numbers(gathering_t *g, const options_t *options, err_t *err)
{
    g->n_begin = (int)options->num_proc;
    g->n_min = options->min_num_proc > 0 ? (int)options->min_num_proc : g->n_begin;
    g->n_max = options->max_num_proc > 0 ? (int)options->max_num_proc : g->n_begin;
    g->n_attempts = (int)options->agent_attempts;
    if (g->n_begin < 1) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "--await-agents needs to know how many: give -np, a rank for each agent, or "
                    "name the hosts with -H");
    }
    if (g->n_min > g->n_begin || g->n_max < g->n_begin) {
        return fail(err, HVD_INVALID_ARGUMENT, "-np %d must be between --min-np %d and --max-np %d",
                    g->n_begin, g->n_min, g->n_max);
    }
    return HVD_OK;
}

static hvd_status_t prepare(gathering_t *g, const options_t *options, err_t *err)
{
    bool has_limits = options->min_num_proc > 0 || options->max_num_proc > 0;
    session_t *session = &g->session;
    hvd_status_t status;
    TRY(check_numbers(g, options, err), out);
    TRY(session_init(session, options,
                     options->carry_commands ? &carry_policy
                     : has_limits            ? &elastic_policy
                                             : &fixed_policy,
                     err),
        out);
    TRY(session_prepare(session, false, g->n_max, err), out);
    snprintf(g->job_name, sizeof g->job_name, "%.8s", session->info.id);
    gather_tell(g, "open %d\n", awaited_port(session->awaited));
out:
    return status;
}

int gather_run(const options_t *options)
{
    bool has_clock = options->events_fd < 0;
    int64_t start_ms = (int64_t)(options->start_timeout * 1000);
    gathering_t g = {.session = {.signal_fd = -1},
                     .events = (int)options->events_fd,
                     .begin_by_ns = has_clock ? deadline_in_ms(start_ms) : NEVER_NS,
                     .form_at_ns = NEVER_NS,
                     .give_up_at_ns = NEVER_NS};
    err_t err = {0};
    int code;
    if (prepare(&g, options, &err) == HVD_OK) {
        code = session_run(&g.session);
        session_close(&g.session);
    } else {
        code = session_refuse(&g.session, &err);
    }
    for (int i = 0; i < g.n_arrivals; i++) {
        free(g.arrivals[i]);
    }
    free(g.arrivals);
    return code;
}
