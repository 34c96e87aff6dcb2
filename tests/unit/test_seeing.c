// SPDX-License-Identifier: Apache-2.0
//
// Tests of what a rank knows about itself: recorder, counters, timeline, and who comes last. Ranks
// here are worlds of one, or coordinators without a network; tests/ranks/test_live.c has real jobs.
#define _GNU_SOURCE
#include "coord_world.h"

#include "../json_check.h"
#include "engine/engine.h"
#include "observe/internal.h"

#include <fcntl.h>
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
    assert_int_equal(count_lines(&lines, "the disk has not taken the timeline or a dump"), 1);
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
    counters_page(ctx->observe, &page);
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
        timeline_add(timeline, &trace, &record);
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
    assert_string_equal(text + strlen(text) - 5, "}}\n]\n");
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
    assert_int_equal(count(text, "\"NEGOTIATE_ALLREDUCE\", \"ph\": \"B\""),
                     2 * (int)N_ELEMENTS(names) + 1);
    assert_int_equal(count(text, "\"RIDING_ALLREDUCE\""), (int)N_ELEMENTS(names) + 1);
    assert_int_equal(count(text, "\"LOCAL_ALLREDUCE\""), (int)N_ELEMENTS(names));
    assert_int_equal(count(text, "\"shape\": \"[5000]\""), (int)N_ELEMENTS(names));
    assert_int_equal(count(text, "\"ph\": \"B\""), count(text, "\"ph\": \"E\""));
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
    assert_int_equal(count(lines.text, "is full at 65536 bytes"), 1);
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
        timeline_add(timeline, &trace, &record);
    }
    timeline_write(ctx->observe, timeline);
    timeline_add(timeline, &trace, &record);
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
    coord_watch(world->ranks[0], note_arrival, seen);
    submit(world, 2, (ask_t){.name = "x"});
    world_settle(world);
    submit(world, 0, (ask_t){.name = "x"});
    submit(world, 1, (ask_t){.name = "x"});
    world_settle(world);
    assert_string_equal(seen, "x2 x0 x1 ");
    coord_watch(world->ranks[0], NULL, NULL);
    submit(world, ALL_RANKS, (ask_t){.name = "x"});
    world_settle(world);
    assert_string_equal(seen, "x2 x0 x1 ");
    world_free(world);
}

// --- Where ranks show themselves ----------------------------------------------------------------

static void dead_sockets_are_removed(void **state)
{
    (void)state;
    char base[64];
    char knob[96];
    char dead[LIVE_PATH_BYTES + 32];
    char alive[LIVE_PATH_BYTES];
    snprintf(base, sizeof base, "/tmp/hvd-unit-live-%d", (int)getpid());
    snprintf(knob, sizeof knob, "HOROVOD_MONITOR_DIR=%s", base);
    const char *env[] = {knob, "HOROVOD_JOB_ID=a job/../x", NULL};
    hvd_ctx_t *first = open_alone(env, NULL);
    hvd_ctx_t *second = open_alone(env, NULL); // a job of the same name
    snprintf(alive, sizeof alive, "%s", hvd_monitor_path(first));
    assert_non_null(strstr(alive, "/a_job_.._x/rank-0.sock"));
    assert_non_null(strstr(hvd_monitor_path(second), "/a_job_.._x-2/rank-0.sock"));
    // What a killed process leaves: a name that nobody listens at.
    snprintf(dead, sizeof dead, "%s/a_job_.._x/rank-7.sock", base);
    assert_int_equal(link(alive, dead), 0);
    assert_false(live_remove_if_dead(dead)); // somebody does
    hvd_shutdown(second);
    hvd_shutdown(first);
    assert_int_equal(access(alive, F_OK), -1);
    assert_int_equal(access(dead, F_OK), 0);
    hvd_ctx_t *next = open_alone(env, NULL);
    assert_int_equal(access(dead, F_OK), -1);
    hvd_shutdown(next);
    assert_int_equal(rmdir(base), 0); // nothing is left in it
}

static void make_file(const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    close(fd);
}

static void make_dir(const char *path)
{
    assert_int_equal(mkdir(path, 0700), 0);
}

// What a killed process leaves: a name that nobody listens at.
static void make_dead_socket(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    close(fd);
}

static int pid_of_nobody(void)
{
    pid_t pid = fork();
    if (pid == 0) {
        _exit(0);
    }
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    return (int)pid;
}

static void only_our_own_files_are_removed(void **state)
{
    (void)state;
    char at[64], knob[96], hidden[32], busy[32];
    snprintf(at, sizeof at, "/tmp/hvd-unit-theirs-%d", (int)getpid());
    snprintf(knob, sizeof knob, "HOROVOD_MONITOR_DIR=%s", at);
    snprintf(hidden, sizeof hidden, "dead/.3-%d", pid_of_nobody());
    snprintf(busy, sizeof busy, "soon/.3-%d", (int)getpid()); // it does not listen yet
    const struct {
        const char *name;
        void (*make)(const char *path);
        bool stays;
    } files[] = {
        {"ckpt", make_dir, true},
        {"ckpt/rank-0.pt", make_file, true},
        {"ckpt/rank-0.sock", make_file, true}, // our name, but no socket
        {"ckpt/.3-1", make_file, true},
        {"ckpt/rank-01.sock", make_dead_socket, true}, // a socket, but not our name
        {"ckpt/rank-0.sock2", make_dead_socket, true},
        {"ckpt/rank--1.sock", make_dead_socket, true},
        {"ckpt/deeper", make_dir, true},
        {"ckpt/deeper/rank-0.sock", make_dead_socket, true}, // no job is that deep
        {"empty", make_dir, true},
        {"soon", make_dir, true},
        {busy, make_dead_socket, true},
        {"dead", make_dir, false},
        {"dead/rank-7.sock", make_dead_socket, false},
        {hidden, make_dead_socket, false},
        {"mixed", make_dir, true},
        {"mixed/rank-7.sock", make_dead_socket, false},
        {"mixed/rank-7.pt", make_file, true},
    };
    make_dir(at);
    assert_int_equal(chdir(at), 0);
    for (size_t i = 0; i < N_ELEMENTS(files); i++) {
        files[i].make(files[i].name);
    }
    assert_int_equal(symlink("ckpt/deeper", "link"), 0);
    make_dir("open");
    make_dead_socket("open/rank-0.sock");
    assert_int_equal(chmod("open", 0755), 0); // we would not have listened there
    hvd_shutdown(open_alone((const char *[]){knob, NULL}, NULL));
    for (size_t i = N_ELEMENTS(files); i-- > 0;) {
        if ((access(files[i].name, F_OK) == 0) != files[i].stays) {
            fail_msg("%s %s", files[i].name, files[i].stays ? "is gone" : "is still there");
        }
        remove(files[i].name);
    }
    assert_int_equal(unlink("open/rank-0.sock"), 0);
    assert_int_equal(rmdir("open"), 0);
    assert_int_equal(unlink("link"), 0);
    assert_int_equal(chdir("/"), 0);
    assert_int_equal(rmdir(at), 0);
}

// Anybody may have put a link where our directory would be in /tmp.
static void nothing_is_removed_through_a_link(void **state)
{
    (void)state;
    char at[] = "/tmp/hvd-unit-link-XXXXXX";
    assert_non_null(mkdtemp(at));
    assert_int_equal(chdir(at), 0);
    make_dir("home");
    make_dir("home/job");
    make_dead_socket("home/job/rank-0.sock");
    assert_int_equal(symlink("home", "link"), 0);
    live_clean("link", NULL);
    assert_int_equal(access("home/job/rank-0.sock", F_OK), 0);
    live_clean("home", NULL);
    assert_int_equal(rmdir("home"), 0);
    assert_int_equal(unlink("link"), 0);
    assert_int_equal(chdir("/"), 0);
    assert_int_equal(rmdir(at), 0);
}

static void other_peoples_directories_are_not_used(void **state)
{
    (void)state;
    char base[64];
    char knob[96];
    static lines_t lines;
    lines.text[0] = '\0';
    snprintf(base, sizeof base, "/tmp/hvd-unit-open-%d", (int)getpid());
    snprintf(knob, sizeof knob, "HOROVOD_MONITOR_DIR=%s", base);
    const char *env[] = {knob, NULL};
    const char *off[] = {knob, "HOROVOD_MONITOR=0", NULL};
    assert_int_equal(mkdir(base, 0700), 0);
    assert_int_equal(chmod(base, 0755), 0);
    hvd_ctx_t *ctx = open_alone(env, &lines);
    assert_string_equal(hvd_monitor_path(ctx), "");
    assert_int_equal(count(lines.text, "must be a directory of mode 0700"), 1);
    hvd_shutdown(ctx);
    assert_int_equal(chmod(base, 0700), 0);
    ctx = open_alone(off, NULL);
    assert_string_equal(hvd_monitor_path(ctx), "");
    hvd_shutdown(ctx);
    assert_int_equal(rmdir(base), 0);
}

// Whoever has named one is told why it is not used.
static void unusable_directories_are_told(void **state)
{
    (void)state;
    char long_name[160];
    memset(long_name, 'x', sizeof long_name - 1);
    memcpy(long_name, "/tmp/", 5);
    long_name[sizeof long_name - 1] = '\0';
    const struct {
        const char *directory, *why;
    } cases[] = {
        {"/nonexistent/live", "the directory above it is not there"},
        {long_name, "the path of a socket has at most 107 bytes"},
        {"/proc/self", "must be a directory of mode 0700"},
        {"/dev/null/live", "must be a directory of mode 0700"},
    };
    for (size_t i = 0; i < N_ELEMENTS(cases); i++) {
        static lines_t lines;
        char knob[256];
        lines.text[0] = '\0';
        snprintf(knob, sizeof knob, "HOROVOD_MONITOR_DIR=%s", cases[i].directory);
        hvd_ctx_t *ctx = open_alone((const char *[]){knob, NULL}, &lines);
        assert_string_equal(hvd_monitor_path(ctx), "");
        hvd_shutdown(ctx);
        assert_int_equal(count(lines.text, cases[i].directory), 1);
        assert_int_equal(count(lines.text, cases[i].why), 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counters_add_up),
        cmocka_unit_test(the_recorder_keeps_the_last_operations),
        cmocka_unit_test(what_is_in_flight_is_told),
        cmocka_unit_test(signals_reach_one_process),
        cmocka_unit_test(metrics_are_prometheus_text),
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
        cmocka_unit_test(dead_sockets_are_removed),
        cmocka_unit_test(only_our_own_files_are_removed),
        cmocka_unit_test(nothing_is_removed_through_a_link),
        cmocka_unit_test(other_peoples_directories_are_not_used),
        cmocka_unit_test(unusable_directories_are_told),
        cmocka_unit_test(shutdown_does_not_wait_for_a_disk_that_hangs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
