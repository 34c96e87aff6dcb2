// SPDX-License-Identifier: Apache-2.0
//
// simulate_plan.c - what the plans of all members take together, on a virtual clock.
//
// Method: the plans are written by the algorithm itself, for every member. A message is cut into
// segments, as the executor does. A segment costs the sender's core message_ns, leaves when the
// wire of the host is free, which it takes for byte_ns a byte (times the lanes that share it), is
// on its way for latency_ns, takes the wire of the receiving host for as long again while it
// arrives, and costs the receiver's core message_ns. A step that may follow another byte by byte
// does so by the same number of segments. Sends and receives between two members match in the order
// of their plans.
//
// Cost: O(segments log segments); about 100 bytes a step.
#include "simulate/simulate.h"

#include <stdlib.h>

// So that the price of a long message does not depend on its length; the executor's own segments
// are shorter, and overlap a little better.
#define MOST_SEGMENTS 16

// A step of some member's plan.
typedef struct task {
    int32_t member, step;  // step: in the member's plan
    int32_t match;         // the send of this receive, and the other way around; NO_STEP
    int32_t next_in_queue; // of the same member and peer, of the same direction
    int32_t first_edge;    // lists of those that come after: 2 * task + which
    int32_t next_edge[2];
    int32_t n_segments;
    int32_t n_arrived; // receives: segments that have come; others: that may be begun
    int32_t n_done;
    int32_t n_started;
    int32_t waits_for; // ends of steps
    int32_t is_first;  // of its queue: those before it are over
} sim_task_t;

typedef struct member {
    plan_t plan;
    int32_t first_task;
    double *busy_until_ns; // of its core
} sim_member_t;

// The wire of a host.
typedef struct wire {
    double out_until_ns, in_until_ns;
} wire_t;

typedef struct run {
    const machine_t *m;
    sim_member_t *members;
    int per_host; // members on a host
    wire_t *wires;
    double *busy_until_ns; // of each core
    sim_task_t *tasks;
    int32_t *sends, *receives; // tasks, sorted by sender, receiver and order
    int32_t n_members, n_tasks, n_sends, n_receives, n_left;
    double byte_ns, end_ns;
    events_t events;
} run_t;

enum { READY, ARRIVED, DONE };

static const step_t *step_of(const run_t *run, const sim_task_t *task)
{
    return &run->members[task->member].plan.steps[task->step];
}

static bool is_receive(const step_t *step)
{
    return step->kind == STEP_RECV || step->kind == STEP_RECV_REDUCE || step->kind == STEP_RECV_ACC;
}

// --- The plans of all members -------------------------------------------------------------------

static hvd_status_t write_plans(run_t *run, const algorithm_t *algorithm, coll_args_t args,
                                err_t *err)
{
    for (int i = 0; i < run->n_members; i++) {
        sim_member_t *member = &run->members[i];
        args.member = i;
        hvd_status_t status = coll_plan(algorithm, &args, &member->plan, err);
        if (status != HVD_OK) {
            return status;
        }
        member->first_task = run->n_tasks;
        member->busy_until_ns = &run->busy_until_ns[machine_core_of(run->m, i)];
        if ((int64_t)member->plan.n_steps * run->n_members > SIMULATE_MOST_STEPS) {
            return fail(err, HVD_UNSUPPORTED,
                        "the plans of %d members with %d steps each are too long to simulate",
                        run->n_members, member->plan.n_steps);
        }
        run->n_tasks += member->plan.n_steps;
    }
    return HVD_OK;
}

static void make_task(run_t *run, int member, int step)
{
    int32_t at = run->members[member].first_task + step;
    sim_task_t *task = &run->tasks[at];
    *task = (sim_task_t){.member = member,
                         .step = step,
                         .match = NO_STEP,
                         .next_in_queue = NO_STEP,
                         .first_edge = NO_STEP,
                         .is_first = true};
    const step_t *s = step_of(run, task);
    size_t segments = (s->bytes + run->m->segment_bytes - 1) / run->m->segment_bytes;
    task->n_segments = (int32_t)MAX(1, MIN(segments, MOST_SEGMENTS));
    if (s->kind == STEP_SEND) {
        run->sends[run->n_sends++] = at;
    } else if (is_receive(s)) {
        run->receives[run->n_receives++] = at;
    }
}

static void link_edges(run_t *run, int32_t at)
{
    sim_task_t *task = &run->tasks[at];
    const step_t *s = step_of(run, task);
    for (int i = 0; i < 2; i++) {
        if (s->after[i] != NO_STEP) {
            sim_task_t *before = &run->tasks[run->members[task->member].first_task + s->after[i]];
            task->next_edge[i] = before->first_edge;
            before->first_edge = 2 * at + i;
            task->waits_for++;
        }
    }
}

typedef struct pair_key {
    int32_t from, to, task;
} pair_key_t;

static pair_key_t key_of(const run_t *run, int32_t at)
{
    const sim_task_t *task = &run->tasks[at];
    const step_t *s = step_of(run, task);
    return s->kind == STEP_SEND ? (pair_key_t){task->member, s->peer, at}
                                : (pair_key_t){s->peer, task->member, at};
}

static int compare_keys(const void *a, const void *b)
{
    const pair_key_t *x = a, *y = b;
    int by_from = (x->from > y->from) - (x->from < y->from);
    int by_to = (x->to > y->to) - (x->to < y->to);
    return by_from != 0 ? by_from : by_to != 0 ? by_to : (x->task > y->task) - (x->task < y->task);
}

// Sorts tasks by sender, receiver and order, and lines up those of one pair behind each other.
static bool line_up(run_t *run, int32_t *tasks, int32_t n)
{
    pair_key_t *keys = malloc(((size_t)n + 1) * sizeof *keys);
    if (keys == NULL) {
        return false;
    }
    for (int32_t i = 0; i < n; i++) {
        keys[i] = key_of(run, tasks[i]);
    }
    qsort(keys, (size_t)n, sizeof *keys, compare_keys);
    for (int32_t i = 0; i < n; i++) {
        tasks[i] = keys[i].task;
        if (i > 0 && keys[i].from == keys[i - 1].from && keys[i].to == keys[i - 1].to) {
            run->tasks[keys[i - 1].task].next_in_queue = keys[i].task;
            run->tasks[keys[i].task].is_first = false;
        }
    }
    free(keys);
    return true;
}

static hvd_status_t match(run_t *run, err_t *err)
{
    if (!line_up(run, run->sends, run->n_sends) || !line_up(run, run->receives, run->n_receives)) {
        return fail(err, HVD_NO_MEMORY, "no memory to simulate %d steps", run->n_tasks);
    }
    for (int32_t i = 0; i < MAX(run->n_sends, run->n_receives); i++) {
        bool both = i < run->n_sends && i < run->n_receives;
        pair_key_t send = both ? key_of(run, run->sends[i]) : (pair_key_t){0};
        pair_key_t receive = both ? key_of(run, run->receives[i]) : (pair_key_t){1, 0, 0};
        if (send.from != receive.from || send.to != receive.to) {
            return fail(err, HVD_PROTOCOL, "the plans of the members do not fit each other");
        }
        run->tasks[send.task].match = receive.task;
        run->tasks[receive.task].match = send.task;
    }
    return HVD_OK;
}

static hvd_status_t make_tasks(run_t *run, err_t *err)
{
    size_t n = (size_t)run->n_tasks + 1;
    run->tasks = calloc(n, sizeof *run->tasks);
    run->sends = malloc(n * sizeof *run->sends);
    run->receives = malloc(n * sizeof *run->receives);
    if (run->tasks == NULL || run->sends == NULL || run->receives == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to simulate %d steps", run->n_tasks);
    }
    for (int i = 0; i < run->n_members; i++) {
        for (int s = 0; s < run->members[i].plan.n_steps; s++) {
            make_task(run, i, s);
        }
    }
    for (int32_t at = 0; at < run->n_tasks; at++) {
        link_edges(run, at);
    }
    run->n_left = run->n_tasks;
    return match(run, err);
}

// --- Time ---------------------------------------------------------------------------------------

static double segment_bytes(const run_t *run, const sim_task_t *task)
{
    return (double)step_of(run, task)->bytes / task->n_segments;
}

// Segments of the task that may be begun by what it follows byte by byte, if it does.
static int32_t n_open(const run_t *run, const sim_task_t *task)
{
    const step_t *s = step_of(run, task);
    if (!s->stream || s->after[0] == NO_STEP) {
        return task->n_segments;
    }
    const sim_task_t *before = &run->tasks[run->members[task->member].first_task + s->after[0]];
    if (before->n_done == before->n_segments) {
        return task->n_segments;
    }
    return (int32_t)((int64_t)before->n_done * task->n_segments / before->n_segments);
}

static bool share_host(const run_t *run, int member, int other)
{
    return member / run->per_host == other / run->per_host;
}

static const path_cost_t *cost_between(const run_t *run, int member, int other)
{
    return share_host(run, member, other) ? &run->m->host : &run->m->network;
}

// There is no wire inside a host, nor between hosts that are played on one machine.
static bool is_carried_by_cores(const run_t *run, int member, int other)
{
    return run->m->n_cores > 0 || share_host(run, member, other);
}

static double carry_ns(const run_t *run, const sim_task_t *task, int peer)
{
    bool is_local = share_host(run, task->member, peer);
    return segment_bytes(run, task) * (is_local ? run->m->host.byte_ns : run->byte_ns);
}

static void start_send(run_t *run, int32_t at, double now)
{
    sim_task_t *task = &run->tasks[at];
    sim_member_t *member = &run->members[task->member];
    int peer = step_of(run, task)->peer;
    const path_cost_t *cost = cost_between(run, task->member, peer);
    bool is_carried = is_carried_by_cores(run, task->member, peer);
    double move_ns = carry_ns(run, task, peer);
    *member->busy_until_ns = MAX(*member->busy_until_ns, now) + cost->message_ns;
    if (is_carried) {
        *member->busy_until_ns += move_ns;
        events_add(&run->events, *member->busy_until_ns, DONE, at);
        events_add(&run->events, *member->busy_until_ns + cost->latency_ns, ARRIVED, task->match);
        return;
    }
    wire_t *out = &run->wires[task->member / run->per_host];
    wire_t *in = &run->wires[peer / run->per_host];
    double leaves_ns = MAX(out->out_until_ns, *member->busy_until_ns);
    out->out_until_ns = leaves_ns + move_ns;
    in->in_until_ns = MAX(in->in_until_ns, leaves_ns + cost->latency_ns) + move_ns;
    events_add(&run->events, out->out_until_ns, DONE, at);
    events_add(&run->events, in->in_until_ns, ARRIVED, task->match);
}

static void start_other(run_t *run, int32_t at, double now)
{
    sim_task_t *task = &run->tasks[at];
    const step_t *s = step_of(run, task);
    sim_member_t *member = &run->members[task->member];
    double cost_ns = 0;
    if (is_receive(s)) {
        cost_ns = cost_between(run, task->member, s->peer)->message_ns;
        cost_ns += run->m->n_cores > 0 ? carry_ns(run, task, s->peer) : 0;
    }
    if (s->kind != STEP_RECV) { // it adds up, or copies
        cost_ns += segment_bytes(run, task) * run->m->host.byte_ns;
    }
    *member->busy_until_ns = MAX(*member->busy_until_ns, now) + cost_ns;
    events_add(&run->events, *member->busy_until_ns, DONE, at);
}

// Begins all segments of the task that can be begun.
static void advance(run_t *run, int32_t at, double now)
{
    sim_task_t *task = &run->tasks[at];
    const step_t *s = step_of(run, task);
    if (task->waits_for > 0 || !task->is_first) {
        return;
    }
    int32_t limit = n_open(run, task);
    limit = is_receive(s) ? MIN(limit, task->n_arrived) : limit;
    while (task->n_started < limit) {
        task->n_started++;
        if (s->kind == STEP_SEND) {
            start_send(run, at, now);
        } else {
            start_other(run, at, now);
        }
    }
}

static void release(run_t *run, const sim_task_t *task, double now)
{
    bool has_ended = task->n_done == task->n_segments;
    for (int32_t edge = task->first_edge; edge != NO_STEP;) {
        int32_t at = edge / 2, which = edge % 2;
        sim_task_t *next = &run->tasks[at];
        bool follows = step_of(run, next)->stream && which == 0;
        next->waits_for -= follows ? task->n_done == 1 : has_ended;
        edge = next->next_edge[which];
        advance(run, at, now);
    }
}

static void end_segment(run_t *run, int32_t at, double now)
{
    sim_task_t *task = &run->tasks[at];
    task->n_done++;
    run->end_ns = MAX(run->end_ns, now);
    if (task->n_done == task->n_segments) {
        run->n_left--;
        if (task->next_in_queue != NO_STEP) {
            run->tasks[task->next_in_queue].is_first = true;
            advance(run, task->next_in_queue, now);
        }
    }
    release(run, task, now);
}

static hvd_status_t run_all(run_t *run, err_t *err)
{
    for (int32_t at = 0; at < run->n_tasks; at++) {
        events_add(&run->events, 0, READY, at);
    }
    sim_event_t event;
    while (events_next(&run->events, &event)) {
        if (event.what == DONE) {
            end_segment(run, event.number, event.at_ns);
        } else {
            run->tasks[event.number].n_arrived += event.what == ARRIVED;
            advance(run, event.number, event.at_ns);
        }
    }
    if (run->events.failed) {
        return fail(err, HVD_NO_MEMORY, "no memory to simulate %d steps", run->n_tasks);
    }
    return run->n_left == 0
               ? HVD_OK
               : fail(err, HVD_PROTOCOL, "%d steps of the plans can never run", run->n_left);
}

// --- The whole ----------------------------------------------------------------------------------

hvd_status_t simulate_plan(const machine_t *m, const algorithm_t *algorithm,
                           const coll_args_t *args, int per_host, int lanes, double *ns_p,
                           err_t *err)
{
    size_t n = (size_t)args->size;
    hvd_status_t status;
    run_t run = {.m = m,
                 .members = calloc(n, sizeof(sim_member_t)),
                 .per_host = per_host,
                 .wires = calloc(n, sizeof(wire_t)),
                 .busy_until_ns = calloc(n, sizeof(double)),
                 .n_members = args->size,
                 .byte_ns = m->network.byte_ns * lanes};
    if (run.members == NULL || run.wires == NULL || run.busy_until_ns == NULL) {
        status = fail(err, HVD_NO_MEMORY, "no memory to simulate %d members", args->size);
        goto done;
    }
    TRY(write_plans(&run, algorithm, *args, err), done);
    TRY(make_tasks(&run, err), done);
    TRY(run_all(&run, err), done);
    *ns_p = run.end_ns;
done:
    for (int i = 0; run.members != NULL && i < run.n_members; i++) {
        plan_free(&run.members[i].plan);
    }
    events_free(&run.events);
    free(run.receives);
    free(run.sends);
    free(run.tasks);
    free(run.busy_until_ns);
    free(run.wires);
    free(run.members);
    return status;
}
