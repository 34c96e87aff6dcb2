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

bool session_append(void *array_p, int *n_p, void *item)
{
    void ***array = array_p, **larger = realloc(*array, ((size_t)*n_p + 1) * sizeof *larger);
    if (larger != NULL) {
        *array = larger;
        larger[(*n_p)++] = item;
    }
    return larger != NULL;
}

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
    worker->accuses = -1;
    worker->result_fd = -1;
    return worker;
}

void session_free_worker(worker_t *worker)
{
    for (int stream = 0; stream < N_STREAMS; stream++) {
        splitter_free(&worker->splitters[stream]);
    }
    buf_free(&worker->held.bytes);
    if (worker->result_fd >= 0) {
        close(worker->result_fd);
    }
    free(worker);
}

bool session_has_workers(const session_t *session, const agent_link_t *link)
{
    for (int i = 0; i < session->n_workers; i++) {
        if (session->workers[i]->link == link) {
            return true;
        }
    }
    return false;
}

// --- Output --------------------------------------------------------------------------------------

static void print_lines(session_t *session, int stream)
{
    sink_write(session->sink, stream, session->lines.data, session->lines.len);
    buf_clear(&session->lines);
}

void session_print(session_t *session, worker_t *worker, int stream, bytes_t data)
{
    char prefix[96];
    prefix_make(&session->style, worker->place.rank, stream, prefix, sizeof prefix);
    splitter_feed(&worker->splitters[stream], prefix, data.data, data.len, &session->lines);
    print_lines(session, stream);
}

static void on_output(session_t *session, worker_t *worker, int stream, bytes_t data)
{
    char text[5120];
    bool may_fold = stream == STREAM_STDERR && session->n_ranks > 1 && !session->style.is_off;
    if (session->policy->on_output != NULL) {
        session->policy->on_output(session, worker, stream, data);
        return;
    }
    watch_output(session, worker, data);
    output_files_write(&session->files, worker->place.rank, stream, data.data, data.len);
    if (may_fold) {
        data.len = fold_hold(session, worker, data);
    }
    session_print(session, worker, stream, data);
    const char *warning = output_files_warning(&session->files, text, sizeof text);
    if (warning != NULL) {
        sink_say(session->sink, STREAM_STDERR, "%s", warning);
    }
}

void session_flush(session_t *session, worker_t *worker)
{
    char prefix[96];
    fold_release(session, NEVER_NS);
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
    watch_end(session, worker);
    session->policy->on_exit(session, worker);
}

static void on_exited(session_t *session, const frame_t *frame, worker_t *worker)
{
    rank_end_t end = {.code = frame->exited.code,
                      .signo = frame->exited.signo,
                      .was_oom = frame->exited.was_oom,
                      .was_halted = frame->exited.was_halted,
                      .blames = frame->exited.blames};
    snprintf(end.what, sizeof end.what, "%s", frame->exited.what);
    session_end_worker(session, worker, &end);
}

// The one the frame is about, if it runs there.
static worker_t *worker_of(const session_t *session, const agent_link_t *link, int32_t id)
{
    bool is_right = id >= 0 && id < session->n_workers && session->workers[id]->link == link;
    return is_right ? session->workers[id] : NULL;
}

// The rank ends with the code, or the agent counts as lost, unless the policy knows better.
static void on_problem(session_t *session, agent_link_t *link, const frame_t *frame)
{
    worker_t *worker = worker_of(session, link, frame->problem.rank);
    int code = frame->problem.code;
    const char *text = frame->problem.text;
    if (session->policy->on_problem != NULL) {
        session->policy->on_problem(session, link, worker, code, text);
        return;
    }
    sink_say(session->sink, STREAM_STDERR, "%s: host %s: %s", PROGRAM, link->host->name, text);
    if (worker != NULL) {
        session_end_worker(session, worker, &(rank_end_t){.code = code, .blames = -1});
    } else if (!link->is_stopping && !session->is_stopping) {
        session_lose(session, link, text);
    }
}

void session_hear(session_t *session, agent_link_t *link, const frame_t *frame)
{
    worker_t *worker;
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
    case FRAME_SNAPSHOT:
        if ((worker = worker_of(session, link, frame->snapshot.rank)) != NULL) {
            watch_hear(session, worker, frame->snapshot.text);
        }
        break;
    case FRAME_PROBLEM:
        on_problem(session, link, frame);
        break;
    case FRAME_WHERE:
        sink_say(session->sink, STREAM_STDERR, "%s: rank %d was %s", PROGRAM, frame->where.rank,
                 frame->where.text);
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

// --- The end of a session ------------------------------------------------------------------------

int session_patience_ms(const session_t *session)
{
    int patience_ms = 0;
    for (int i = 0; i < session->n_workers; i++) {
        const rank_end_t *end = &session->workers[i]->end;
        const worker_t *blamed = end->has_ended && end->code != 0 && end->blames >= 0
                                     ? session_worker_at(session, end->blames)
                                     : NULL;
        if (blamed != NULL && !blamed->end.has_ended) {
            patience_ms = MAX(patience_ms, end->what[0] != '\0' ? CULPRIT_MS : LOST_MS);
        }
    }
    return patience_ms;
}

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

// Of the rank that is to blame, unless it ended well, or only because we stopped it.
static int exit_code_of(const rank_end_t *blamed, const rank_end_t *cause)
{
    bool is_ours = blamed->was_stopped && blamed->signo != 0;
    return blamed->code != 0 && !is_ours ? blamed->code : cause->code;
}

int session_report(session_t *session, const rank_end_t *ends, const worker_t *cause)
{
    int rank = cause->place.rank;
    int blamed = ends != NULL ? ending_blamed(ends, session->n_ranks, rank) : rank;
    const worker_t *guilty = blamed == rank ? cause : session_worker_at(session, blamed);
    int code = exit_code_of(&guilty->end, &cause->end);
    if (ends != NULL) {
        const worker_t *speaker = guilty->end.was_halted ? cause : guilty;
        ending_report(ends, session->n_ranks, blamed, rank, guilty->link->host->name,
                      &speaker->splitters[STREAM_STDERR], &session->lines);
        watch_failure(session, (bytes_t){session->lines.data, session->lines.len});
        print_lines(session, STREAM_STDERR);
    }
    note_first_failure(session->options->results, blamed, code);
    return code;
}
