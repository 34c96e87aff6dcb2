// SPDX-License-Identifier: Apache-2.0
//
// ranks.c - the ranks of a session: what their agents report of them, and how they ended.
//
// Output becomes lines with the rank in front and goes to the sink, and to files; results are
// written as they come. A rank that has ended is the policy's business (session.h). One thread, the
// session's.
#include "launch/session.h"

#include <stdlib.h>
#include <unistd.h>

worker_t *session_add_worker(session_t *session, agent_link_t *link, const rank_place_t *place)
{
    worker_t *worker = calloc(1, sizeof *worker);
    if (worker == NULL || !session_append(&session->workers, &session->n_workers, worker)) {
        free(worker);
        return NULL;
    }
    worker->id = session->n_workers - 1;
    worker->link = link;
    worker->place = *place;
    worker->end.blames = -1;
    worker->result_fd = -1;
    return worker;
}

void session_free_worker(worker_t *worker)
{
    for (int stream = 0; stream < N_STREAMS; stream++) {
        splitter_free(&worker->splitters[stream]);
    }
    if (worker->result_fd >= 0) {
        close(worker->result_fd);
    }
    free(worker);
}

// --- Output --------------------------------------------------------------------------------------

static void print_lines(session_t *session, int stream)
{
    sink_write(session->sink, stream, session->lines.data, session->lines.len);
    buf_clear(&session->lines);
}

static void on_output(session_t *session, worker_t *worker, int stream, bytes_t data)
{
    char prefix[96], text[5120];
    if (session->policy->on_output != NULL) {
        session->policy->on_output(session, worker, stream, data);
        return;
    }
    output_files_write(&session->files, worker->place.rank, stream, data.data, data.len);
    prefix_make(&session->style, worker->place.rank, stream, prefix, sizeof prefix);
    splitter_feed(&worker->splitters[stream], prefix, data.data, data.len, &session->lines);
    print_lines(session, stream);
    const char *warning = output_files_warning(&session->files, text, sizeof text);
    if (warning != NULL) {
        sink_say(session->sink, STREAM_STDERR, "%s", warning);
    }
}

void session_flush(session_t *session, worker_t *worker)
{
    char prefix[96];
    for (int stream = 0; stream < N_STREAMS; stream++) {
        prefix_make(&session->style, worker->place.rank, stream, prefix, sizeof prefix);
        splitter_finish(&worker->splitters[stream], prefix, &session->lines);
        print_lines(session, stream);
    }
}

static void on_result(session_t *session, worker_t *worker, bytes_t data)
{
    err_t err;
    if (session->options->results[0] != '\0' && !worker->is_leaving && // else another has its rank
        result_write(session->options->results, worker->place.rank, &worker->result_fd, data.data,
                     data.len, &err) != HVD_OK) {
        session_fail(session, EXIT_OUTPUT, "%s", err.text);
    }
}

void session_end_worker(session_t *session, worker_t *worker, const rank_end_t *end)
{
    pid_t pid = worker->end.pid;
    if (worker->end.has_ended) {
        return;
    }
    worker->end = *end;
    worker->end.pid = pid;
    worker->end.was_stopped = worker->is_leaving || session->is_stopping;
    worker->end.time_ns = clock_ns();
    worker->end.has_ended = true;
    session->policy->on_exit(session, worker);
}

static void on_exited(session_t *session, const frame_t *frame, worker_t *worker)
{
    const rank_end_t end = {.code = frame->exited.code,
                            .signo = frame->exited.signo,
                            .was_oom = frame->exited.was_oom,
                            .was_halted = frame->exited.was_halted,
                            .blames = frame->exited.blames};
    session_end_worker(session, worker, &end);
}

// The one the frame is about, if it runs there.
static worker_t *worker_of(const session_t *session, const agent_link_t *link, int32_t id)
{
    bool is_right = id >= 0 && id < session->n_workers && session->workers[id]->link == link;
    return is_right ? session->workers[id] : NULL;
}

void session_hear(session_t *session, agent_link_t *link, const frame_t *frame)
{
    worker_t *worker;
    link->heard_ns = clock_ns();
    switch (frame->kind) {
    case FRAME_STARTED:
        if ((worker = worker_of(session, link, frame->started.rank)) != NULL) {
            worker->end.pid = frame->started.pid;
        }
        break;
    case FRAME_OUTPUT:
        if ((worker = worker_of(session, link, frame->output.rank)) != NULL) {
            on_output(session, worker, frame->output.stream & 1, frame->output.data);
        }
        break;
    case FRAME_RESULT:
        if ((worker = worker_of(session, link, frame->result.rank)) != NULL) {
            on_result(session, worker, frame->result.data);
        }
        break;
    case FRAME_EXITED:
        if ((worker = worker_of(session, link, frame->exited.rank)) != NULL) {
            on_exited(session, frame, worker);
        }
        break;
    case FRAME_PROBLEM:
        worker = worker_of(session, link, frame->problem.rank);
        session->policy->on_problem(session, link, worker, frame->problem.code,
                                    frame->problem.text);
        break;
    case FRAME_DONE:
        link->phase = LINK_DONE;
        break;
    default:
        if (session->policy->on_frame != NULL) {
            session->policy->on_frame(session, link, frame);
        }
        break;
    }
}

// --- Who is to blame -----------------------------------------------------------------------------

rank_end_t *session_ends(const session_t *session)
{
    rank_end_t *ends = calloc((size_t)session->n_ranks + 1, sizeof *ends);
    for (int i = 0; ends != NULL && i < session->n_workers; i++) {
        const worker_t *worker = session->workers[i];
        if (worker->place.rank < session->n_ranks && worker->end.has_ended) {
            ends[worker->place.rank] = worker->end;
        }
    }
    return ends;
}

worker_t *session_worker_at(const session_t *session, int rank)
{
    worker_t *found = NULL;
    for (int i = 0; i < session->n_workers; i++) {
        found = session->workers[i]->place.rank == rank ? session->workers[i] : found;
    }
    return found;
}

int session_report(session_t *session, const rank_end_t *ends, const worker_t *cause)
{
    int rank = cause->place.rank;
    if (ends != NULL) {
        int blamed = ending_blamed(ends, session->n_ranks, rank);
        const worker_t *guilty = blamed == rank ? cause : session_worker_at(session, blamed);
        ending_report(ends, session->n_ranks, blamed, rank, guilty->link->host->name,
                      &cause->splitters[STREAM_STDERR], &session->lines);
        print_lines(session, STREAM_STDERR);
    }
    note_first_failure(session->options->results, rank, cause->end.code);
    return cause->end.code;
}
