// SPDX-License-Identifier: Apache-2.0
//
// ending.c - how a job ended: whose fault it was, and the block that says so.
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

#define REPORT_LINES 15
#define MOMENT_NS (500 * NS_PER_MS)
#define NOT_TAIL_LINES 5 // of the block
#define MAX_OTHERS 12    // told one by one

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
    return tail->has_traceback ? "see the traceback above; HOROVOD_LOG_LEVEL=debug shows more"
           : tail->n_tail > 0  ? "see what it wrote above; HOROVOD_LOG_LEVEL=debug shows more"
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
