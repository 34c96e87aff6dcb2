// SPDX-License-Identifier: Apache-2.0
//
// Tests of what a rank knows about itself: recorder, counters, timeline, and who comes last. Ranks
// here are worlds of one, or coordinators without a network; tests/ranks/test_live.c has real jobs.
#define _GNU_SOURCE
#include "coord_world.h"

#include "../json_check.h"
#include "engine/engine.h"
#include "observe/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define SAFELY_MS 60000

// --- A world of one -----------------------------------------------------------------------------

typedef struct lines {
    pthread_mutex_t lock;
    char text[64 * 1024];
} lines_t;

static void keep_line(void *arg, int level, const char *line)
{
    lines_t *lines = arg;
    (void)level;
    pthread_mutex_lock(&lines->lock);
    size_t len = strlen(lines->text);
    snprintf(lines->text + len, sizeof lines->text - len, "%s\n", line);
    pthread_mutex_unlock(&lines->lock);
}

static int count(const char *text, const char *part)
{
    int n = 0;
    size_t bytes = strlen(part);
    for (; *text != '\0'; text++) { // by hand: sanitizers make strstr look at all that follows
        n += *text == *part && strncmp(text, part, bytes) == 0;
    }
    return n;
}

static int count_lines(lines_t *lines, const char *part)
{
    pthread_mutex_lock(&lines->lock);
    int n = count(lines->text, part);
    pthread_mutex_unlock(&lines->lock);
    return n;
}

static hvd_ctx_t *open_alone(const char *const *env, lines_t *lines)
{
    hvd_ctx_t *ctx;
    char text[HVD_TEXT_BYTES];
    static const char *const plain[] = {NULL};
    hvd_options_t options = {.env = env != NULL ? env : plain};
    if (lines != NULL) {
        pthread_mutex_init(&lines->lock, NULL);
        options.log = keep_line;
        options.log_arg = lines;
    }
    if (hvd_init(&options, &ctx, text, sizeof text) != HVD_OK) {
        fail_msg("%s", text);
    }
    return ctx;
}

static hvd_handle_t start_sum(hvd_ctx_t *ctx, const char *name, float *values, int64_t n,
                              unsigned flags)
{
    hvd_handle_t handle;
    char text[HVD_TEXT_BYTES];
    hvd_tensor_t tensor = {.input = values, .output = values, .n_dims = 1, .shape = &n};
    hvd_request_t request = {
        .op = HVD_ALLREDUCE,
        .name = name,
        .dtype = HVD_FLOAT32,
        .reduce = HVD_SUM,
        .tensors = &tensor,
        .n_tensors = 1,
        .flags = flags,
        .where = "train.py:17",
    };
    if (hvd_submit(ctx, &request, &handle, text, sizeof text) != HVD_OK) {
        fail_msg("%s", text);
    }
    return handle;
}

static void sum(hvd_ctx_t *ctx, const char *name, int64_t n)
{
    float *values = calloc((size_t)n, sizeof *values);
    hvd_handle_t handle = start_sum(ctx, name, values, n, HVD_WAITS);
    assert_int_equal(hvd_wait(ctx, handle, SAFELY_MS), HVD_OK);
    hvd_release(ctx, handle);
    free(values);
}

// --- Recorder and counters ----------------------------------------------------------------------

static void counters_add_up(void **state)
{
    (void)state;
    hvd_ctx_t *ctx = open_alone(NULL, NULL);
    hvd_counters_t c;
    for (int i = 0; i < 10; i++) {
        sum(ctx, "small", 2);
        sum(ctx, "large", 100000);
    }
    assert_int_equal(hvd_counters(ctx, &c, sizeof c), HVD_OK);
    assert_int_equal(c.operations[HVD_ALLREDUCE], 20);
    assert_int_equal(c.operations[HVD_BROADCAST], 0);
    assert_int_equal(c.bytes[HVD_ALLREDUCE], 10 * 4 * (2 + 100000));
    assert_int_equal(c.failed, 0);
    assert_int_equal(c.riding, 10);
    assert_int_equal(c.batched, 10);
    assert_true(c.batches > 0 && c.batches <= c.batched);
    assert_int_equal(c.in_flight, 0);
    assert_int_equal(c.in_flight_max, 1);
    assert_true(c.run_ns > 0 && c.run_ns < 60 * NS_PER_S);
    // An older caller knows fewer fields: nothing beyond them is written.
    struct {
        uint64_t operations[HVD_N_OPS];
        uint64_t canary;
    } old = {.canary = 42};
    assert_int_equal(hvd_counters(ctx, (hvd_counters_t *)&old, sizeof old.operations), HVD_OK);
    assert_int_equal(old.operations[HVD_ALLREDUCE], 20);
    assert_int_equal(old.canary, 42);
    assert_int_equal(hvd_counters(NULL, &c, sizeof c), HVD_NOT_INITIALIZED);
    assert_int_equal(hvd_stragglers(ctx, NULL, 0), 0);
    hvd_shutdown(ctx);
}

static void the_recorder_keeps_the_last_operations(void **state)
{
    (void)state;
    hvd_ctx_t *ctx = open_alone(NULL, NULL);
    snapshot_t *s = malloc(sizeof *s);
    recorder_snapshot(ctx->observe, s);
    assert_null(snapshot_last(s));
    assert_string_equal(snapshot_state(s), "idle");
    int n = RECORDED_OPERATIONS + 100;
    for (int i = 0; i < n; i++) {
        char name[128];
        snprintf(name, sizeof name, "%d.%s", i, "a name that is longer than there is room for it");
        sum(ctx, name, 1);
    }
    recorder_snapshot(ctx->observe, s);
    assert_int_equal(s->recorder.n, n);
    for (int i = n - RECORDED_OPERATIONS; i < n; i++) {
        const record_t *r = &s->recorder.ring[i % RECORDER_SLOTS];
        assert_int_equal(strtol(r->name, NULL, 10), i);
        assert_true(strlen(r->name) <= RECORDED_NAME_BYTES);
        assert_int_equal(r->status, HVD_OK);
        assert_int_equal(r->bytes, 4);
        assert_true(r->submitted <= r->agreed && r->agreed <= r->finished);
    }
    assert_ptr_equal(snapshot_last(s), &s->recorder.ring[(n - 1) % RECORDER_SLOTS]);
    buf_t page = {0};
    snapshot_page(ctx->observe, s, &page, NULL);
    buf_append(&page, "", 1);
    assert_int_equal(count((char *)page.data, "longer than"), RECORDED_OPERATIONS);
    buf_free(&page);
    free(s);
    hvd_shutdown(ctx);
}

static size_t stack_of(void *arg, uint64_t thread, char *text, size_t bytes)
{
    assert_int_equal(thread, *(uint64_t *)arg);
    return (size_t)snprintf(text, bytes, "in train.py:17\nin main.py:3");
}

// A cycle time holds the batch back, so that there is something in flight.
static void what_is_in_flight_is_told(void **state)
{
    (void)state;
    static const char *const env[] = {"HOROVOD_CYCLE_TIME=10000", NULL};
    static lines_t lines;
    static float values[1000];
    uint64_t me = (uint64_t)(uintptr_t)pthread_self();
    hvd_ctx_t *ctx = open_alone(env, &lines);
    hvd_set_stack_source(ctx, stack_of, &me);
    for (int i = 0; i < 100; i++) {
        char name[32];
        snprintf(name, sizeof name, "held\tback.%d", i);
        start_sum(ctx, name, values, 1000, 0);
    }
    snapshot_t *s = malloc(sizeof *s);
    recorder_snapshot(ctx->observe, s);
    assert_int_equal(s->n_in_flight, 100);
    assert_int_equal(s->n_flights, MAX_FLIGHTS);
    for (int i = 0; i < MAX_FLIGHTS; i++) { // the oldest, and no tab that would end a cell
        char name[32];
        snprintf(name, sizeof name, "held back.%d", i);
        assert_string_equal(s->flights[i].name, name);
        assert_string_equal(s->flights[i].state, "waiting");
    }
    observe_dump(ctx->observe, DUMP_STALL);
    for (int i = 0; i < SAFELY_MS && count_lines(&lines, "in main.py:3") == 0; i++) {
        usleep(1000);
    }
    hvd_shutdown(ctx);
    free(s);
    assert_int_equal(count(lines.text, "stall: 100 in flight: allreduce 'held back.0' waiting"), 1);
    assert_int_equal(count(lines.text, "from train.py:17"), 5);
    assert_int_equal(count(lines.text, "in main.py:3"), 1);
    assert_int_equal(count(lines.text, "nothing finished yet"), 1);
}

// A child that has joined a job of its own dumps on a signal; the parent was not meant.
static void signals_reach_one_process(void **state)
{
    (void)state;
    static lines_t lines;
    int code;
    hvd_ctx_t *ctx = open_alone(NULL, &lines);
    pid_t child = fork();
    if (child == 0) {
        hvd_ctx_t *own = open_alone(NULL, &lines);
        raise(SIGUSR2);
        hvd_shutdown(own);                      // what was asked before is done
        _exit(count_lines(&lines, "signal: ")); // of what was in flight, or lost by the end
    }
    assert_int_equal(waitpid(child, &code, 0), child);
    assert_true(WIFEXITED(code));
    assert_int_equal(WEXITSTATUS(code), 1);
    hvd_shutdown(ctx);
    assert_int_equal(count_lines(&lines, "signal: "), 0);
}

// A dump into a pipe that nobody reads hangs as one on a dead network disk does.
static void shutdown_does_not_wait_for_a_disk_that_hangs(void **state)
{
    (void)state;
    lines_t lines = {.text = ""};
    char folder[] = "/tmp/hvd-unit-hangs-XXXXXX", knob[64], path[128];
    assert_non_null(mkdtemp(folder));
    snprintf(knob, sizeof knob, "HOROVOD_RECORDER_DIR=%s", folder);
    snprintf(path, sizeof path, "%s/hvd-stall-rank-0-pid-%d.txt", folder, (int)getpid());
    assert_int_equal(mkfifo(path, 0600), 0);
    const char *const env[] = {knob, NULL};
    hvd_ctx_t *ctx = open_alone(env, &lines);
    observe_dump(ctx->observe, DUMP_STALL);
    uint64_t started_ns = clock_ns();
    assert_int_equal(hvd_shutdown(ctx), HVD_OK);
    assert_in_range(clock_ns() - started_ns, 9 * NS_PER_S, 20 * NS_PER_S);
    assert_int_equal(count_lines(&lines, "writing the timeline or a recorder dump"), 1);
    char *late = read_text_file(path); // the disk is back; whom the log was for may be gone
    assert_non_null(strstr(late, "in flight: 0"));
    free(late);
    usleep(100000);
    assert_int_equal(count_lines(&lines, "stall: "), 0);
    unlink(path);
    rmdir(folder);
}

static void metrics_are_prometheus_text(void **state)
{
    (void)state;
    hvd_ctx_t *ctx = open_alone(NULL, NULL);
    buf_t page = {0};
    int n_values = 0;
    sum(ctx, "some", 1000);
    counters_page(ctx->observe, METRICS_PROMETHEUS, &page);
    buf_append(&page, "", 1);
    char *text = (char *)page.data;
    assert_non_null(strstr(text, "\nhvd_operations_total{operation=\"allreduce\"} 1\n"));
    assert_non_null(strstr(text, "\nhvd_bytes_total{operation=\"allreduce\"} 4000\n"));
    for (char *save = NULL, *line = strtok_r(text, "\n", &save); line != NULL;
         line = strtok_r(NULL, "\n", &save)) {
        char name[64];
        char type[16];
        if (line[0] == '#') {
            bool is_type = sscanf(line, "# TYPE %63s %15s", name, type) == 2;
            assert_true(is_type || strncmp(line, "# HELP ", 7) == 0);
            continue;
        }
        size_t n = strspn(line, "abcdefghijklmnopqrstuvwxyz_");
        char *value = strrchr(line, ' ');
        char *end;
        assert_true(n > 4 && (line[n] == ' ' || line[n] == '{') && value != NULL);
        assert_true(strtod(value, &end) >= 0 && *end == '\0');
        n_values++;
    }
    assert_true(n_values > 20);
    buf_free(&page);
    hvd_shutdown(ctx);
}

// OpenMetrics differs where its parsers insist: the family of a counter, and the end.
static void metrics_have_both_forms(void **state)
{
    (void)state;
    hvd_ctx_t *ctx = open_alone(NULL, NULL);
    buf_t page = {0};
    const int64_t step = 7;
    const double loss = NAN, samples = 2.5;
    assert_int_equal(hvd_report(ctx, &step, &loss, &samples), HVD_OK);
    assert_int_equal(hvd_report(ctx, NULL, NULL, &samples), HVD_OK);
    counters_page(ctx->observe, METRICS_OPEN, &page);
    buf_append(&page, "", 1);
    const char *text = (const char *)page.data;
    assert_non_null(strstr(text, "\n# TYPE hvd_operations counter\nhvd_operations_total{"));
    assert_non_null(strstr(text, "\n# TYPE hvd_in_flight gauge\nhvd_in_flight 0\n"));
    assert_non_null(strstr(text, "\nhvd_report_step 7\n"));
    assert_non_null(strstr(text, "\nhvd_report_loss NaN\n"));
    assert_non_null(strstr(text, "\nhvd_report_samples_total 5\n"));
    assert_string_equal(text + page.len - 7, "# EOF\n");
    char small[16];
    size_t bytes = hvd_metrics(ctx, small, sizeof small);
    assert_true(bytes > 1000 && strlen(small) == sizeof small - 1);
    buf_free(&page);
    hvd_shutdown(ctx);
}

static void counters_pack_in_a_line(void **state)
{
    (void)state;
    hvd_counters_t counters = {.failed = 3, .strangers = UINT64_MAX}, read;
    buf_t line = {0};
    counters.operations[HVD_N_OPS - 1] = 11;
    metrics_pack(&line, &counters);
    buf_append(&line, "", 1);
    assert_true(metrics_unpack((const char *)line.data, &read));
    assert_memory_equal(&counters, &read, sizeof read);
    line.data[line.len - 2] = 'x';
    assert_false(metrics_unpack((const char *)line.data, &read));
    assert_false(metrics_unpack("1 2 3", &read));
    buf_free(&line);
}

// --- Timeline -----------------------------------------------------------------------------------

typedef struct trace_file {
    char path[64];
    char knob[128];
} trace_file_t;

static trace_file_t new_trace(void)
{
    trace_file_t t;
    snprintf(t.path, sizeof t.path, "/tmp/hvd-unit-trace-%d.json", (int)getpid());
    snprintf(t.knob, sizeof t.knob, "HOROVOD_TIMELINE=%s", t.path);
    return t;
}

// What the library calls instead of the C library's, in this program: the file is looked at before
// and after everything that is done to files, which are the moments a kill can leave behind, if
// each write to it stays inside a page.
static const char *watched_path; // NULL: nobody looks
static int n_looks;

static void look_at_trace(void)
{
    if (watched_path != NULL && access(watched_path, F_OK) == 0) {
        n_looks++;
        assert_true(json_file_is_valid(watched_path));
    }
}

static bool is_watched(int fd)
{
    struct stat of_fd, of_path;
    return watched_path != NULL && fstat(fd, &of_fd) == 0 && stat(watched_path, &of_path) == 0 &&
           of_fd.st_ino == of_path.st_ino;
}

ssize_t pwrite(int fd, const void *data, size_t bytes, off_t at)
{
    if (is_watched(fd)) {
        assert_int_equal(at / 4096, (at + (off_t)bytes - 1) / 4096);
    }
    look_at_trace();
    ssize_t n = syscall(SYS_pwrite64, fd, data, bytes, at);
    look_at_trace();
    return n;
}

int rename(const char *from, const char *to)
{
    look_at_trace();
    int result = renameat(AT_FDCWD, from, AT_FDCWD, to);
    look_at_trace();
    return result;
}

static void add_event(hvd_ctx_t *ctx, timeline_t *timeline, const trace_t *trace,
                      const record_t *record)
{
    lock_take(ctx->observe->job.lock);
    timeline_add(ctx->observe, timeline, trace, record);
    lock_release(ctx->observe->job.lock);
}

// Through several sizes of the file, with events of all lengths, from beginning to end.
static void the_file_parses_at_every_moment(void **state)
{
    (void)state;
    trace_file_t t = new_trace();
    hvd_ctx_t *ctx = open_alone(NULL, NULL);
    timeline_t *timeline;
    err_t err;
    char name[600];
    record_t record = {.submitted = 1, .agreed = 2, .started = 3, .finished = 4};
    const signature_t signature = {.op = HVD_BARRIER};
    trace_t trace = {.signature = &signature, .name = name};
    watched_path = t.path;
    n_looks = 0;
    assert_int_equal(timeline_open(ctx->observe, t.path, false, &timeline, &err), HVD_OK);
    for (int i = 0; i < 600; i++) {
        memset(name, 'a' + i % 26, sizeof name);
        name[1 + i % 500] = '\0';
        add_event(ctx, timeline, &trace, &record);
        if (i % 7 == 0) {
            timeline_write(ctx->observe, timeline);
        }
    }
    timeline_close(ctx->observe, timeline);
    watched_path = NULL;
    assert_true(n_looks > 200);
    char *text = read_text_file(t.path);
    assert_int_equal(count(text, "\"NEGOTIATE_ALLREDUCE\""), 600);
    assert_true(strlen(text) > 256 * 1024); // it has been made anew three times
    assert_string_equal(text + strlen(text) - 4, "}\n]\n");
    free(text);
    unlink(t.path);
    strcat(t.path, ".new");
    assert_int_not_equal(access(t.path, F_OK), 0);
    hvd_shutdown(ctx);
}

static void only_files_are_replaced(void **state)
{
    (void)state;
    trace_file_t t = new_trace();
    hvd_ctx_t *ctx = open_alone(NULL, NULL);
    timeline_t *timeline;
    char link[sizeof t.path + 8];
    struct stat seen;
    err_t err;
    assert_int_equal(timeline_open(ctx->observe, "/dev/null", false, &timeline, &err), HVD_SYSTEM);
    assert_non_null(strstr(err.text, "'/dev/null': it is not a regular file"));
    snprintf(link, sizeof link, "%s.link", t.path);
    int fd = open(t.path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    assert_true(fd >= 0 && symlink(t.path, link) == 0);
    close(fd);
    assert_int_equal(timeline_open(ctx->observe, link, false, &timeline, &err), HVD_OK);
    timeline_close(ctx->observe, timeline);
    assert_true(lstat(link, &seen) == 0 && S_ISLNK(seen.st_mode));
    assert_true(json_file_is_valid(t.path));
    unlink(link);
    unlink(t.path);
    hvd_shutdown(ctx);
}

static void names_of_all_kinds_are_json(void **state)
{
    (void)state;
    trace_file_t t = new_trace();
    const char *env[] = {t.knob, "HOROVOD_TIMELINE_MARK_CYCLES=1", NULL};
    static const char *const names[] = {
        "plain", "\"quoted\"",       "back\\slash", "new\nline", "tab\t",        "\x01\x02",
        "grüße", "\xf0\x9f\x98\x80", "\xff\xfe",    "\xc3",      "\xe0\x80\x80", "\xed\xa0\x80",
        "",
    };
    char long_name[3000];
    memset(long_name, '"', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = '\0';
    hvd_ctx_t *ctx = open_alone(env, NULL);
    for (size_t i = 0; i < N_ELEMENTS(names); i++) {
        sum(ctx, names[i], 1);
        sum(ctx, names[i], 5000);
    }
    sum(ctx, long_name, 1);
    hvd_shutdown(ctx);
    char *text = read_text_file(t.path);
    assert_non_null(text);
    assert_true(json_is_valid(text));
    assert_int_equal(count(text, "\"NEGOTIATE_ALLREDUCE\", \"ph\": \"X\""),
                     2 * (int)N_ELEMENTS(names) + 1);
    assert_int_equal(count(text, "\"RIDING_ALLREDUCE\""), (int)N_ELEMENTS(names) + 1);
    assert_int_equal(count(text, "\"LOCAL_ALLREDUCE\""), (int)N_ELEMENTS(names));
    assert_int_equal(count(text, "\"shape\": \"[5000]\""), (int)N_ELEMENTS(names));
    assert_int_equal(count(text, "\"ph\": \"B\"") + count(text, "\"ph\": \"E\""), 0);
    assert_int_equal(count(text, "CYCLE_START"), 2 * (int)N_ELEMENTS(names) + 1);
    assert_int_equal(count(text, "start_time_since_epoch_in_micros"), 1);
    assert_non_null(strstr(text, "grüße"));
    assert_non_null(strstr(text, "\\u00ff\\u00fe"));
    free(text);
    unlink(t.path);
}

static off_t size_of(const char *path)
{
    struct stat seen;
    assert_int_equal(stat(path, &seen), 0);
    return seen.st_size;
}

static void the_file_is_bounded(void **state)
{
    (void)state;
    trace_file_t t = new_trace();
    const char *env[] = {t.knob, "HOROVOD_TIMELINE_MAX_BYTES=64K", NULL};
    static lines_t lines;
    lines.text[0] = '\0';
    hvd_ctx_t *ctx = open_alone(env, &lines);
    for (int i = 0; i < 1000; i++) {
        sum(ctx, "again", 1);
    }
    hvd_shutdown(ctx);
    assert_true(json_file_is_valid(t.path));
    assert_true(size_of(t.path) > 32 * 1024 && size_of(t.path) <= 64 * 1024);
    char *text = read_text_file(t.path);
    assert_int_equal(count(text, "TIMELINE_FULL"), 1);
    free(text);
    assert_int_equal(count(lines.text, "has reached 65536 bytes"), 1);
    unlink(t.path);
}

// More operations than can wait to be written: some are left out, and the file says how many.
static void a_flood_is_counted(void **state)
{
    (void)state;
    trace_file_t t = new_trace();
    hvd_ctx_t *ctx = open_alone(NULL, NULL);
    timeline_t *timeline;
    err_t err;
    record_t record = {.submitted = 1, .agreed = 2, .started = 3, .finished = 4};
    const signature_t signature = {.op = HVD_BARRIER};
    trace_t trace = {.signature = &signature, .name = "flood"};
    assert_int_equal(timeline_open(ctx->observe, t.path, false, &timeline, &err), HVD_OK);
    for (int i = 0; i < 20000; i++) {
        add_event(ctx, timeline, &trace, &record);
    }
    timeline_write(ctx->observe, timeline);
    add_event(ctx, timeline, &trace, &record);
    timeline_close(ctx->observe, timeline);
    char *text = read_text_file(t.path);
    assert_true(json_is_valid(text));
    const char *dropped = strstr(text, "\"DROPPED_EVENTS\"");
    assert_non_null(dropped);
    int n_dropped = (int)strtol(strstr(dropped, "\"events\": ") + 10, NULL, 10);
    assert_true(n_dropped > 0);
    assert_int_equal(count(text, "\"NEGOTIATE_ALLREDUCE\""), 20001 - n_dropped);
    free(text);
    unlink(t.path);
    hvd_shutdown(ctx);
}

static void it_starts_and_stops(void **state)
{
    (void)state;
    trace_file_t t = new_trace();
    static const char *const env[] = {"HOROVOD_TIMELINE=DYNAMIC", NULL};
    hvd_ctx_t *ctx = open_alone(env, NULL);
    for (int turn = 0; turn < 3; turn++) {
        sum(ctx, "not seen", 1);
        assert_int_equal(hvd_timeline_start(ctx, t.path, false, NULL, 0), HVD_OK);
        sum(ctx, "seen", 1);
        assert_int_equal(hvd_timeline_stop(ctx), HVD_OK);
        sum(ctx, "not seen", 1);
        char *text = read_text_file(t.path);
        assert_true(json_is_valid(text));
        assert_int_equal(count(text, "\"seen\""), 1);
        assert_int_equal(count(text, "not seen"), 0);
        free(text);
    }
    char why[HVD_TEXT_BYTES];
    assert_int_equal(hvd_timeline_start(ctx, "/nonexistent/trace.json", false, why, sizeof why),
                     HVD_SYSTEM);
    assert_non_null(strstr(why, "/nonexistent/trace.json"));
    assert_non_null(strstr(why, "No such file or directory"));
    assert_int_equal(hvd_timeline_stop(ctx), HVD_OK);
    unlink(t.path);
    hvd_shutdown(ctx);
    ctx = open_alone(NULL, NULL);
    assert_int_equal(hvd_timeline_start(ctx, t.path, false, NULL, 0), HVD_UNSUPPORTED);
    hvd_shutdown(ctx);
}

static void the_reader_of_json_is_strict(void **state)
{
    (void)state;
    static const char *const wrong[] = {"",          "[",        "[1,]",      "[1 2]",
                                        "{\"a\" 1}", "[\"\n\"]", "[\"\\x\"]", "[1]]",
                                        "[1],",      "{\"a\":}", "\"open",    "[nul]"};
    static const char *const right[] = {"[]",
                                        " [1, -2.5e3, {\"a\": [true, null]}, \"\\u00e4\"] \n"};
    for (size_t i = 0; i < N_ELEMENTS(wrong); i++) {
        assert_false(json_is_valid(wrong[i]));
    }
    for (size_t i = 0; i < N_ELEMENTS(right); i++) {
        assert_true(json_is_valid(right[i]));
    }
}

// --- Who comes last -----------------------------------------------------------------------------

#define LATE_NS (120 * NS_PER_MS)

// A step of several tensors, in which one rank comes late with all of them.
static void step(world_t *world, int late)
{
    static const char *const names[] = {"a", "b", "c"};
    for (int n = 0; n < 3; n++) {
        for (int rank = 0; rank < world->size; rank++) {
            if (rank != late) {
                submit(world, rank, (ask_t){.name = names[n]});
            }
        }
    }
    world_settle(world);
    world_tick(world, LATE_NS);
    for (int n = 0; n < 3; n++) {
        submit(world, late, (ask_t){.name = names[n]});
    }
    world_settle(world);
    world_tick(world, NS_PER_MS);
}

static void the_last_rank_is_known(void **state)
{
    (void)state;
    static const int parent[] = {-1, 0, 0, 0};
    world_t *world = world_new_tree(4, parent, world_params());
    coord_straggler_t late;
    for (int i = 0; i < 101; i++) {
        step(world, i % 10 == 5 ? 1 : 3);
        world_forget(world);
        assert_int_equal(coord_worst_straggler(world->ranks[0], &late), i == 100);
    }
    assert_int_equal(late.rank, 3);
    assert_int_equal(late.n_ranks, 1);
    assert_int_equal(late.n_last, 90);
    assert_int_equal(late.n_steps, 100);
    assert_int_equal(late.late_ns, 90 * LATE_NS);
    assert_true(late.elapsed_ns >= late.late_ns);
    assert_false(coord_worst_straggler(world->ranks[0], &late)); // once is enough
    assert_int_equal(coord_straggler(world->ranks[0], 1).n_last, 10);
    assert_int_equal(coord_straggler(world->ranks[0], 0).n_last, 0);
    assert_int_equal(coord_counters(world->ranks[0]).n_steps, 100);
    assert_int_equal(coord_counters(world->ranks[3]).n_steps, 0); // a leaf waits for nobody
    world_free(world);
}

// Rank 0 may be the last itself; and of a branch it only knows the top.
static void branches_are_told_apart(void **state)
{
    (void)state;
    static const int parent[] = {-1, 0, 0, 2, 2};
    static const struct {
        int late, branch, rank, n_ranks;
    } cases[] = {{0, 0, 0, 1}, {1, 1, 1, 1}, {2, 2, 2, 3}, {4, 2, 2, 3}};
    for (size_t i = 0; i < N_ELEMENTS(cases); i++) {
        world_t *world = world_new_tree(5, parent, world_params());
        for (int n = 0; n < 11; n++) {
            step(world, cases[i].late);
        }
        coord_straggler_t late = coord_straggler(world->ranks[0], cases[i].branch);
        assert_int_equal(late.n_last, 10);
        assert_int_equal(late.rank, cases[i].rank);
        assert_int_equal(late.n_ranks, cases[i].n_ranks);
        assert_int_equal(late.late_ns, 10 * LATE_NS);
        world_free(world);
    }
}

static void known_names_are_counted(void **state)
{
    (void)state;
    world_t *world = world_new(3, world_params());
    for (int n = 0; n < 5; n++) {
        submit(world, ALL_RANKS, (ask_t){.name = "again"});
        world_settle(world);
    }
    for (int rank = 0; rank < 3; rank++) {
        assert_int_equal(coord_counters(world->ranks[rank]).n_new, 1);
        assert_int_equal(coord_counters(world->ranks[rank]).n_known, 4);
    }
    world_free(world);
}

static void note_arrival(void *arg, const char *name, int rank)
{
    char *seen = arg;
    size_t len = strlen(seen);
    snprintf(seen + len, 64 - len, "%s%d ", name, rank);
}

static void arrivals_are_told(void **state)
{
    (void)state;
    static const int parent[] = {-1, 0, 0};
    char seen[64] = "";
    world_t *world = world_new_tree(3, parent, world_params());
    coord_on_arrival(world->ranks[0], note_arrival, seen);
    submit(world, 2, (ask_t){.name = "x"});
    world_settle(world);
    submit(world, 0, (ask_t){.name = "x"});
    submit(world, 1, (ask_t){.name = "x"});
    world_settle(world);
    assert_string_equal(seen, "x2 x0 x1 ");
    coord_on_arrival(world->ranks[0], NULL, NULL);
    submit(world, ALL_RANKS, (ask_t){.name = "x"});
    world_settle(world);
    assert_string_equal(seen, "x2 x0 x1 ");
    world_free(world);
}

// --- Where ranks show themselves ----------------------------------------------------------------

#define NOBODY 65534

static void full_name(char name[LIVE_NAME_BYTES], const char *job)
{
    snprintf(name, LIVE_NAME_BYTES, LIVE_NAME, (unsigned)geteuid(), job, 0);
}

// What a rank at that name says; "": it cuts us off.
static void ask_status(const char *name, char *answer, size_t bytes)
{
    static const char request[] = "GET /status HTTP/1.0\r\n\r\n";
    struct timeval limit = {.tv_sec = SAFELY_MS / 1000};
    size_t len = 0;
    ssize_t n;
    int fd = live_connect(name);
    assert_true(fd >= 0);
    fcntl(fd, F_SETFL, 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    (void)!send(fd, request, strlen(request), MSG_NOSIGNAL); // it may have cut us already
    while ((n = recv(fd, answer + len, bytes - 1 - len, 0)) > 0) {
        len += (size_t)n;
    }
    assert_true(n == 0 || errno == ECONNRESET);
    answer[len] = '\0';
    close(fd);
}

static void names_tell_user_job_and_rank(void **state)
{
    (void)state;
    char job[64], knob[96], name[LIVE_NAME_BYTES];
    snprintf(job, sizeof job, "a_job_.._x.%d", (int)getpid());
    snprintf(knob, sizeof knob, "HOROVOD_JOB_ID=a job/../x.%d", (int)getpid());
    const char *env[] = {knob, NULL};
    hvd_ctx_t *first = open_alone(env, NULL);
    hvd_ctx_t *second = open_alone(env, NULL); // a job of the same name
    full_name(name, job);
    assert_string_equal(hvd_monitor_path(first), name);
    strcat(job, "-2");
    full_name(name, job);
    assert_string_equal(hvd_monitor_path(second), name);
    hvd_shutdown(first);
    hvd_ctx_t *third = open_alone(env, NULL); // the first has left nothing behind
    job[strlen(job) - 2] = '\0';
    full_name(name, job);
    assert_string_equal(hvd_monitor_path(third), name);
    hvd_shutdown(second);
    hvd_shutdown(third);
    assert_int_equal(live_connect(name), -1);
    assert_int_equal(errno, ECONNREFUSED);
}

static void long_names_are_cut(void **state)
{
    (void)state;
    char knob[256] = "HOROVOD_JOB_ID=", answer[4096];
    memset(knob + strlen(knob), 'x', 200);
    const char *env[] = {knob, NULL};
    hvd_ctx_t *ctx = open_alone(env, NULL);
    assert_non_null(strstr(hvd_monitor_path(ctx), "xxx/rank-0"));
    ask_status(hvd_monitor_path(ctx), answer, sizeof answer);
    assert_non_null(strstr(answer, "\nrank\t0\n"));
    hvd_shutdown(ctx);
}

static void it_can_be_done_without(void **state)
{
    (void)state;
    static lines_t lines;
    hvd_ctx_t *ctx = open_alone((const char *[]){"HOROVOD_MONITOR=0", NULL}, NULL);
    assert_string_equal(hvd_monitor_path(ctx), "");
    hvd_shutdown(ctx);
    // Users may still have this one set; nothing is said about it, and nothing made there.
    ctx = open_alone((const char *[]){"HOROVOD_MONITOR_DIR=/nonexistent/live", NULL}, &lines);
    assert_string_not_equal(hvd_monitor_path(ctx), "");
    hvd_shutdown(ctx);
    assert_string_equal(lines.text, "");
}

// Anybody may take our names; then there is no live state, and the job runs all the same.
static void taken_names_are_told(void **state)
{
    (void)state;
    static lines_t lines;
    char knob[64], job[64];
    hvd_ctx_t *others[8];
    snprintf(job, sizeof job, "taken-%d", (int)getpid());
    snprintf(knob, sizeof knob, "HOROVOD_JOB_ID=%s", job);
    const char *env[] = {knob, "HOROVOD_LOG_LEVEL=info", NULL};
    for (int i = 0; i < 8; i++) {
        others[i] = open_alone(env, NULL);
    }
    hvd_ctx_t *ctx = open_alone(env, &lines);
    assert_string_equal(hvd_monitor_path(ctx), "");
    sum(ctx, "works", 1000);
    hvd_shutdown(ctx);
    assert_int_equal(count(lines.text, "no live state at 'hvd-"), 1);
    assert_int_equal(count(lines.text, "Address already in use"), 1);
    for (int i = 0; i < 8; i++) {
        hvd_shutdown(others[i]);
    }
}

// Runs it in a process of its own, as that user; its exit code.
static int run_as(uid_t uid, int (*run)(const char *name), const char *name)
{
    int code;
    pid_t child = fork();
    if (child == 0) {
        _exit(setresuid(uid, uid, uid) == 0 ? run(name) : 99);
    }
    assert_int_equal(waitpid(child, &code, 0), child);
    assert_true(WIFEXITED(code));
    return WEXITSTATUS(code);
}

static int is_answered(const char *name)
{
    char answer[4096];
    ask_status(name, answer, sizeof answer);
    return strncmp(answer, "HTTP/1.0 200 OK\r\n", 17) == 0;
}

static void only_its_user_is_answered(void **state)
{
    (void)state;
    static lines_t lines;
    if (geteuid() != 0) {
        skip(); // only root can be somebody else
    }
    const char *env[] = {"HOROVOD_LOG_LEVEL=info", NULL};
    hvd_ctx_t *ctx = open_alone(env, &lines);
    assert_int_equal(run_as(NOBODY, is_answered, hvd_monitor_path(ctx)), 0);
    assert_int_equal(run_as(0, is_answered, hvd_monitor_path(ctx)), 1);
    assert_int_equal(count_lines(&lines, "refused a client of another user: process "), 1);
    hvd_shutdown(ctx);
}

// Ranks of another user answer root; and whose they are, the other side sees too.
static void root_is_answered(void **state)
{
    (void)state;
    char name[LIVE_NAME_BYTES], knob[64];
    int ends[2];
    live_peer_t peer;
    if (geteuid() != 0) {
        skip();
    }
    snprintf(knob, sizeof knob, "HOROVOD_JOB_ID=root-%d", (int)getpid());
    const char *env[] = {knob, NULL};
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) {
        if (setresuid(NOBODY, NOBODY, NOBODY) == 0) {
            const char *path = hvd_monitor_path(open_alone(env, NULL));
            (void)!write(ends[1], path, strlen(path) + 1);
            pause();
        }
        _exit(1);
    }
    assert_true(read(ends[0], name, sizeof name) > 0);
    assert_int_equal(strncmp(name, "hvd-65534/root-", 15), 0);
    assert_true(is_answered(name));
    int fd = live_connect(name);
    assert_true(live_peer_is(fd, NOBODY, &peer));
    assert_int_equal(peer.pid, child);
    assert_int_equal(peer.uid, NOBODY);
    assert_false(live_peer_is(fd, NOBODY - 1, &peer));
    close(fd);
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, NULL, 0), child);
    assert_int_equal(live_connect(name), -1); // a killed rank leaves nothing
    assert_int_equal(errno, ECONNREFUSED);
    close(ends[0]);
    close(ends[1]);
}

// A child that the program forks has none of it.
static void forked_children_do_not_keep_the_name(void **state)
{
    (void)state;
    char name[LIVE_NAME_BYTES];
    hvd_ctx_t *ctx = open_alone(NULL, NULL);
    snprintf(name, sizeof name, "%s", hvd_monitor_path(ctx));
    pid_t child = fork();
    if (child == 0) {
        pause();
        _exit(0);
    }
    hvd_shutdown(ctx);
    assert_int_equal(live_connect(name), -1);
    assert_int_equal(errno, ECONNREFUSED);
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, NULL, 0), child);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counters_add_up),
        cmocka_unit_test(the_recorder_keeps_the_last_operations),
        cmocka_unit_test(what_is_in_flight_is_told),
        cmocka_unit_test(signals_reach_one_process),
        cmocka_unit_test(metrics_are_prometheus_text),
        cmocka_unit_test(metrics_have_both_forms),
        cmocka_unit_test(counters_pack_in_a_line),
        cmocka_unit_test(the_reader_of_json_is_strict),
        cmocka_unit_test(the_file_parses_at_every_moment),
        cmocka_unit_test(only_files_are_replaced),
        cmocka_unit_test(names_of_all_kinds_are_json),
        cmocka_unit_test(the_file_is_bounded),
        cmocka_unit_test(a_flood_is_counted),
        cmocka_unit_test(it_starts_and_stops),
        cmocka_unit_test(the_last_rank_is_known),
        cmocka_unit_test(branches_are_told_apart),
        cmocka_unit_test(known_names_are_counted),
        cmocka_unit_test(arrivals_are_told),
        cmocka_unit_test(names_tell_user_job_and_rank),
        cmocka_unit_test(long_names_are_cut),
        cmocka_unit_test(it_can_be_done_without),
        cmocka_unit_test(taken_names_are_told),
        cmocka_unit_test(only_its_user_is_answered),
        cmocka_unit_test(root_is_answered),
        cmocka_unit_test(forked_children_do_not_keep_the_name),
        cmocka_unit_test(shutdown_does_not_wait_for_a_disk_that_hangs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
