// SPDX-License-Identifier: Apache-2.0
//
// ranks.c - the ranks of a session: what their agents report of them, and how they ended.
//
// Output becomes lines with the rank in front and goes to the sink, and to files; results are
// written as they come. A rank that has ended is the policy's business (session.h). One thread, the
// session's.
//
// Why did the job end? When a rank dies the others notice and give up a moment later. Who exits
// first tells little: an interpreter takes longer to end than others take to notice that its rank
// has left. So the library of a rank that fails notes whose fault it is (HOROVOD_BLAME_FILE): its
// own, or that of the rank that has left, is lost or silent. The blame is followed from the first
// that exited, and the session waits for the end of the rank it leads to. Where nothing is noted,
// the first to fail is the cause, with one correction: reports of one moment may change places, and
// a rank that a signal killed did not give up because of others. The block that says so has at most
// REPORT_LINES lines: who, where, how, its last words, what to try, what became of the others.
#include "launch/session.h"

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#define REPORT_LINES 15
#define MOMENT_NS (500 * NS_PER_MS)
#define NOT_TAIL_LINES 5 // of the block
#define MAX_OTHERS 12    // told one by one

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

// --- Who is to blame -----------------------------------------------------------------------------

static bool has_failed(const rank_end_t *end)
{
    return end->has_ended && end->code != 0 && !end->was_stopped;
}

static int first_of(const rank_end_t *ends, int n, bool only_signals, uint64_t before_ns)
{
    int first = -1;
    for (int i = 0; i < n; i++) {
        if (has_failed(&ends[i]) && ends[i].time_ns <= before_ns &&
            (!only_signals || ends[i].signo != 0) &&
            (first < 0 || ends[i].time_ns < ends[first].time_ns)) {
            first = i;
        }
    }
    return first;
}

int ending_cause(const rank_end_t *ends, int n)
{
    int first = first_of(ends, n, false, UINT64_MAX);
    int killed = first < 0 ? -1 : first_of(ends, n, true, ends[first].time_ns + MOMENT_NS);
    return killed >= 0 ? killed : first;
}

// Whom a rank blames, if that one may be: it has ended too, or was halted.
static int blamed_by(const rank_end_t *ends, int n, int rank)
{
    int blamed = ends[rank].has_ended ? ends[rank].blames : -1;
    return blamed >= 0 && blamed < n && ends[blamed].has_ended ? blamed : rank;
}

int ending_blamed(const rank_end_t *ends, int n, int cause)
{
    int rank = cause, n_steps = 0;
    for (; blamed_by(ends, n, rank) != rank && n_steps < n; n_steps++) {
        rank = blamed_by(ends, n, rank);
    }
    for (int i = 0; i < n; i++) { // others may have said it to the first
        int blamed = blamed_by(ends, n, i);
        if (blamed != i && ends[blamed].was_halted) {
            return blamed;
        }
    }
    return n_steps < n ? rank : cause; // else they blame each other
}

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

// --- The block -----------------------------------------------------------------------------------

static void line(buf_t *out, const char *format, ...) PRINTF_LIKE(2, 3);

static void line(buf_t *out, const char *format, ...)
{
    char text[1024];
    va_list args;
    va_start(args, format);
    int wanted = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    buf_append(out, text, wanted < 0 ? 0 : MIN((size_t)wanted, sizeof text - 1));
    buf_append(out, "\n", 1);
}

// For the last of its lines that is known.
static const char *hint_for(const splitter_t *tail)
{
    const char *hint = NULL;
    for (int i = tail->n_tail - 1; i >= MAX(tail->n_tail - TAIL_LINES, 0) && hint == NULL; i--) {
        hint = hint_for_line(tail->tail[i % TAIL_LINES]);
    }
    return hint;
}

static const char *advice_for(const rank_end_t *end, const splitter_t *tail)
{
    static const struct {
        int signo, code;
        const char *advice;
    } advices[] = {
        {SIGSEGV, 0, "a crash in native code; python -X faulthandler shows where"},
        {SIGABRT, 0, "native code called abort(); its last lines should say why"},
        {SIGBUS, 0, "access to memory that does not exist; is /dev/shm full? df -h /dev/shm"},
        {SIGILL, 0, "this processor lacks an instruction; was a package built for another one?"},
        {SIGKILL, 0,
         "killed from outside, by a scheduler, a container's limit or a user; see dmesg"},
        {SIGTERM, 0, "a scheduler or a user asked it to stop"},
        {0, EXIT_NOT_FOUND, "a command was not found; is it installed on that host, in PATH?"},
        {0, EXIT_NOT_EXECUTABLE, "the command cannot be executed; is it executable on that host?"},
    };
    if (end->was_halted) {
        return "find out what halted it (kill -STOP, a debugger, a scheduler); kill -CONT resumes "
               "it";
    }
    if (end->was_oom) {
        return "use a smaller batch, fewer ranks on this host, or a larger memory limit";
    }
    const char *hint = hint_for(tail);
    if (hint != NULL) {
        return hint;
    }
    if (end->was_stopped) { // it went on while the others gave up
        return "all ranks must call the same operations: look for a branch that depends on the "
               "rank, or for what it was busy with";
    }
    for (size_t i = 0; i < N_ELEMENTS(advices); i++) {
        if (advices[i].signo != 0 ? advices[i].signo == end->signo
                                  : end->signo == 0 && advices[i].code == end->code) {
            return advices[i].advice;
        }
    }
    if (end->code == 0) {
        return "every rank must call the same operations, or join() before it ends";
    }
    return tail->n_tail > 0 ? "see the traceback above; HOROVOD_LOG_LEVEL=debug shows more"
                            : "look for what ends it with this exit code; "
                              "HOROVOD_LOG_LEVEL=debug shows more";
}

// What it did that made others give up, as it says itself or as they do; "": nobody says.
static const char *deed_of(const rank_end_t *ends, int n, int rank)
{
    const char *deed = ends[rank].blames == rank ? ends[rank].what : "";
    for (int i = 0; i < n && deed[0] == '\0'; i++) {
        deed = ends[i].has_ended && ends[i].blames == rank ? ends[i].what : deed;
    }
    return deed;
}

static void describe(const rank_end_t *end, char *text, size_t bytes)
{
    char name[16];
    if (end->was_halted) {
        snprintf(text, bytes, "its process was halted (state T)");
    } else if (end->was_stopped) {
        snprintf(text, bytes, "stopped by %s", PROGRAM);
    } else if (end->signo != 0) {
        snprintf(text, bytes, "killed by %s%s", signal_name(end->signo, name),
                 end->was_oom ? ": the host ran out of memory" : "");
    } else {
        snprintf(text, bytes, "exit code %d", end->code);
    }
}

// How many of the last lines are worth repeating: of a traceback, what it ends with.
static int n_worth_telling(const splitter_t *tail, int most)
{
    int n_last = 0, n = MIN(tail->n_tail, most);
    while (n_last < n && tail->tail[(tail->n_tail - n_last - 1) % TAIL_LINES][0] != ' ') {
        n_last++;
    }
    return tail->has_traceback && n_last > 0 ? n_last : n;
}

static void tell_tail(const char *whose, const splitter_t *tail, buf_t *out)
{
    int n = n_worth_telling(tail, MIN(TAIL_LINES, REPORT_LINES - NOT_TAIL_LINES));
    if (n == 0) {
        line(out, "  it wrote nothing to stderr");
        return;
    }
    line(out, "  %s last line%s on stderr:", whose, n == 1 ? "" : "s");
    for (int i = tail->n_tail - n; i < tail->n_tail; i++) {
        line(out, "    | %s", tail->tail[i % TAIL_LINES]);
    }
}

static void tell_others(const rank_end_t *ends, int n, int cause, buf_t *out)
{
    char text[900] = "", how[64];
    size_t len = 0;
    int n_told = 0, n_stopped = 0;
    for (int i = 0; i < n; i++) {
        if (i == cause || !ends[i].has_ended || ends[i].was_stopped || ends[i].code == 0) {
            n_stopped += i != cause && ends[i].was_stopped;
            continue;
        }
        if (n_told++ < MAX_OTHERS && len < sizeof text) {
            describe(&ends[i], how, sizeof how);
            len += (size_t)snprintf(text + len, sizeof text - len, "%srank %d: %s",
                                    len > 0 ? ", " : "", i, how);
        }
    }
    if (n_told > MAX_OTHERS && len < sizeof text) {
        snprintf(text + len, sizeof text - len, ", and %d more", n_told - MAX_OTHERS);
    }
    if (n_stopped > 0) {
        line(out, "  after it: %s%s%d other rank%s stopped", text, n_told > 0 ? "; " : "",
             n_stopped, n_stopped == 1 ? " was" : "s were");
    } else if (n_told > 0) {
        line(out, "  after it: %s", text);
    }
}

void ending_report(const rank_end_t *ends, int n, int blamed, int cause, const char *host,
                   const splitter_t *tail, buf_t *out)
{
    char how[64], whose[64] = "its";
    const rank_end_t *end = &ends[blamed];
    const char *deed = end->was_halted ? "" : deed_of(ends, n, blamed);
    describe(end, how, sizeof how);
    line(out, "%s: the job failed because of rank %d: %s%s%s%s", PROGRAM, blamed,
         deed[0] != '\0' ? "it " : "", deed, deed[0] != '\0' ? "; " : "", how);
    line(out, "  on host %s, pid %d", host, (int)end->pid);
    if (end->was_halted && cause != blamed) {
        snprintf(whose, sizeof whose, "rank %d gave up waiting for it; its", cause);
    }
    if (end->blames != blamed) { // else its traceback has just been printed
        tell_tail(whose, tail, out);
    }
    line(out, "  what to try: %s", advice_for(end, tail));
    tell_others(ends, n, blamed, out);
}

// --- The end of a session ------------------------------------------------------------------------

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
