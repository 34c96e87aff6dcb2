// SPDX-License-Identifier: Apache-2.0
//
// Tests of src/base: status sentences, names, log lines, clock, futexes, growable bytes, the hash
// map, secrets and knobs.
//
// Tables are tested through themselves: every row of status.def and knobs.def is visited, so a new
// row is tested by being there. The map is compared with a plain array under random operations.
// cmocka has a macro fail(), so ours is called as (fail)(...) here.
#define _GNU_SOURCE
#include "base/peer.h"
#include "base/signals.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

#include <errno.h>
#include <locale.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

// --- Status --------------------------------------------------------------------------------------

static const struct {
    hvd_status_t status;
    const char *name;
} statuses[] = {
#define STATUS(code, ...) {code, #code},
#include "base/status.def"
#undef STATUS
};

static void status_rows_are_complete(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(statuses); i++) {
        hvd_status_t status = statuses[i].status;
        bool is_error = status < 0;
        assert_string_equal(hvd_status_name(status), statuses[i].name);
        assert_true(strlen(hvd_status_text(status)) > 0);
        assert_int_equal(hvd_status_scope(status) != HVD_SCOPE_NONE, is_error);
        bool says_what_to_try =
            strlen(hvd_status_hint(status)) > 0 || strchr(hvd_status_text(status), ';') != NULL;
        assert_true(!is_error || status == HVD_SYSTEM || says_what_to_try);
        for (size_t j = 0; j < i; j++) {
            assert_string_not_equal(hvd_status_text(status), hvd_status_text(statuses[j].status));
        }
    }
}

static void status_scopes_follow_the_code(void **state)
{
    (void)state;
    assert_int_equal(hvd_status_scope(HVD_OK), HVD_SCOPE_NONE);
    assert_int_equal(hvd_status_scope(HVD_DUPLICATE_NAME), HVD_SCOPE_ARGUMENT);
    assert_int_equal(hvd_status_scope(HVD_MISMATCH), HVD_SCOPE_OPERATION);
    assert_int_equal(hvd_status_scope(HVD_PEER_LOST), HVD_SCOPE_PEER);
    assert_int_equal(hvd_status_scope(HVD_NO_MEMORY), HVD_SCOPE_JOB);
}

// What to try depends on the case: a stopped peer has no error in its output, and a wait for other
// ranks at init no handle. A hint would contradict the sentences that say so.
static void status_hints_hold_in_every_case(void **state)
{
    (void)state;
    assert_string_equal(hvd_status_hint(HVD_TIMEOUT), "");
    assert_string_equal(hvd_status_hint(HVD_PEER_LOST), "");
    assert_string_equal(hvd_status_hint(HVD_FORKED), "");
}

static void status_that_does_not_exist_is_unknown(void **state)
{
    (void)state;
    hvd_status_t strange = (hvd_status_t)-12345;
    assert_string_equal(hvd_status_name(strange), "unknown status");
    assert_string_equal(hvd_status_hint(strange), "");
    assert_int_equal(hvd_status_scope(strange), HVD_SCOPE_JOB);
}

static void fail_writes_status_and_sentence(void **state)
{
    (void)state;
    err_t err = {0};
    assert_int_equal((fail)(&err, HVD_MISMATCH, "rank %d sent %s", 3, "float32"), HVD_MISMATCH);
    assert_int_equal(err.status, HVD_MISMATCH);
    assert_string_equal(err.text, "rank 3 sent float32");
    assert_int_equal((fail)(NULL, HVD_PROTOCOL, "nobody listens"), HVD_PROTOCOL);
}

static void fail_may_quote_the_earlier_sentence(void **state)
{
    (void)state;
    err_t err = {0};
    (fail)(&err, HVD_SYSTEM, "cannot open the file");
    (fail)(&err, HVD_SYSTEM, "init failed: %s, twice: %s", err.text, err.text);
    assert_string_equal(err.text, "init failed: cannot open the file, twice: cannot open the file");
}

static void fail_errno_ends_with_the_reason(void **state)
{
    (void)state;
    err_t err = {0};
    assert_int_equal(fail_errno(&err, ENOENT, "cannot open %s", "x"), HVD_SYSTEM);
    assert_string_equal(err.text, "cannot open x: No such file or directory");
    assert_int_equal(fail_errno(&err, ENOMEM, "no segment"), HVD_NO_MEMORY);
    assert_int_equal(err.status, HVD_NO_MEMORY);
    assert_int_equal(fail_errno(NULL, ENOENT, "nobody listens"), HVD_SYSTEM);
}

static void long_sentence_is_cut_before_its_reason(void **state)
{
    (void)state;
    char name[2 * HVD_TEXT_BYTES];
    err_t err;
    const char *reason = ": No such file or directory";

    memset(name, 'n', sizeof(name) - 1);
    name[sizeof(name) - 1] = '\0';
    fail_errno(&err, ENOENT, "cannot open %s", name);
    assert_int_equal(strlen(err.text), HVD_TEXT_BYTES - 1);
    assert_string_equal(err.text + strlen(err.text) - strlen(reason), reason);
    (fail)(&err, HVD_SYSTEM, "%s", name);
    assert_int_equal(strlen(err.text), HVD_TEXT_BYTES - 1);
}

static void err_export_copies_what_fits(void **state)
{
    (void)state;
    err_t err = {0};
    char text[8] = "before";

    (fail)(&err, HVD_MISMATCH, "0123456789");
    assert_int_equal(err_export(&err, HVD_MISMATCH, text, sizeof text), HVD_MISMATCH);
    assert_string_equal(text, "0123456");
    assert_int_equal(err_export(&err, HVD_MISMATCH, NULL, 0), HVD_MISMATCH);
    assert_int_equal(err_export(&err, HVD_OK, text, sizeof text), HVD_OK);
    assert_string_equal(text, "");
}

static void err_export_without_sentence_uses_the_table(void **state)
{
    (void)state;
    err_t stale = {0};
    char text[HVD_TEXT_BYTES];

    err_export(NULL, HVD_SHUTDOWN, text, sizeof text);
    assert_string_equal(text, hvd_status_text(HVD_SHUTDOWN));
    (fail)(&stale, HVD_MISMATCH, "something else");
    err_export(&stale, HVD_SHUTDOWN, text, sizeof text);
    assert_string_equal(text, hvd_status_text(HVD_SHUTDOWN));
}

static hvd_status_t try_twice(hvd_status_t first, hvd_status_t second, int *n_run_p)
{
    hvd_status_t status;
    *n_run_p = 0;
    TRY((++*n_run_p, first), out);
    TRY((++*n_run_p, second), out);
out:
    return status;
}

static void try_stops_at_the_first_failure(void **state)
{
    (void)state;
    int n_run;
    assert_int_equal(try_twice(HVD_OK, HVD_OK, &n_run), HVD_OK);
    assert_int_equal(n_run, 2);
    assert_int_equal(try_twice(HVD_TIMEOUT, HVD_OK, &n_run), HVD_TIMEOUT);
    assert_int_equal(n_run, 1);
}

// --- Names ---------------------------------------------------------------------------------------

static void every_value_has_its_own_name(void **state)
{
    (void)state;
    for (int i = 0; i < HVD_N_OPS; i++) {
        assert_string_not_equal(hvd_op_name((hvd_op_t)i), "unknown");
    }
    for (int i = 0; i < HVD_N_REDUCES; i++) {
        assert_string_not_equal(hvd_reduce_name((hvd_reduce_t)i), "unknown");
    }
    for (int i = 0; i < HVD_N_DTYPES; i++) {
        assert_string_not_equal(hvd_dtype_name((hvd_dtype_t)i), "unknown");
        assert_in_range(hvd_dtype_bytes((hvd_dtype_t)i), 1, 8);
    }
}

static void names_are_those_of_the_users(void **state)
{
    (void)state;
    assert_string_equal(hvd_op_name(HVD_REDUCESCATTER), "reducescatter");
    assert_string_equal(hvd_reduce_name(HVD_ADASUM), "adasum");
    assert_string_equal(hvd_dtype_name(HVD_BFLOAT16), "bfloat16");
    assert_int_equal(hvd_dtype_bytes(HVD_BFLOAT16), 2);
    assert_int_equal(hvd_dtype_bytes(HVD_FLOAT64), 8);
}

static void values_outside_are_unknown(void **state)
{
    (void)state;
    assert_string_equal(hvd_op_name((hvd_op_t)HVD_N_OPS), "unknown");
    assert_string_equal(hvd_op_name((hvd_op_t)-1), "unknown");
    assert_string_equal(hvd_reduce_name((hvd_reduce_t)99), "unknown");
    assert_string_equal(hvd_dtype_name((hvd_dtype_t)-7), "unknown");
    assert_int_equal(hvd_dtype_bytes((hvd_dtype_t)HVD_N_DTYPES), 0);
}

static void signals_are_called_what_the_system_calls_them(void **state)
{
    (void)state;
    assert_string_equal(setlocale(LC_ALL, NULL), "C");
    for (int signo = 1; signo < SIGRTMIN - 2; signo++) { // the C library has two for itself
        assert_string_equal(signal_description_of(signo), strsignal(signo));
    }
    assert_string_equal(signal_name_of(SIGSEGV), "SIGSEGV");
    assert_string_equal(signal_name_of(SIGSYS), "SIGSYS");
    const int without[] = {-1, 0, SIGRTMIN, SIGRTMAX, 1 << 20};
    for (size_t i = 0; i < N_ELEMENTS(without); i++) {
        assert_null(signal_name_of(without[i]));
        assert_null(signal_description_of(without[i]));
    }
}

static void version_is_that_of_the_header(void **state)
{
    (void)state;
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", HVD_VERSION_MAJOR, HVD_VERSION_MINOR,
             HVD_VERSION_PATCH);
    assert_string_equal(hvd_version(), version);
}

// --- Log -----------------------------------------------------------------------------------------

typedef struct heard {
    int n_lines;
    int level;
    char line[4096]; // the last
} heard_t;

static void hear(void *arg, int level, const char *line)
{
    heard_t *heard = arg;
    heard->n_lines++;
    heard->level = level;
    snprintf(heard->line, sizeof heard->line, "%s", line);
}

static void log_line_has_rank_component_and_level(void **state)
{
    (void)state;
    heard_t heard = {0};
    log_t log = {.level = LOG_INFO, .rank = 3, .hide_time = true, .sink = hear, .arg = &heard};

    log_warn(&log, "net", "lost rank %d", 5);
    assert_string_equal(heard.line, "[3]<net> warning: lost rank 5");
    assert_int_equal(heard.level, LOG_WARN);
    log.rank = -1;
    log_info(&log, "boot", "hello");
    assert_string_equal(heard.line, "[-]<boot> info: hello");
}

static void log_line_starts_with_the_time(void **state)
{
    (void)state;
    heard_t heard = {0};
    log_t log = {.level = LOG_TRACE, .rank = 0, .sink = hear, .arg = &heard};
    int year, month, day, hour, minute, second, micro, end = 0;

    log_trace(&log, "x", "text");
    int n = sscanf(heard.line, "%4d-%2d-%2d %2d:%2d:%2d.%6d%n", &year, &month, &day, &hour, &minute,
                   &second, &micro, &end);
    assert_int_equal(n, 7);
    assert_int_equal(end, strlen("2026-11-15 22:48:01.123456"));
    assert_string_equal(heard.line + end, " [0]<x> trace: text");
}

static void log_levels_below_are_silent(void **state)
{
    (void)state;
    heard_t heard = {0};
    log_t log = {.level = LOG_WARN, .sink = hear, .arg = &heard};
    int n_evaluated = 0;

    log_info(&log, "x", "%d", ++n_evaluated);
    log_warn((log_t *)NULL, "x", "%d", ++n_evaluated);
    assert_int_equal(heard.n_lines, 0);
    assert_int_equal(n_evaluated, 0);
    log_warn(&log, "x", "%d", ++n_evaluated);
    log_error(&log, "x", "%d", ++n_evaluated);
    assert_int_equal(heard.n_lines, 2);
    log.level = LOG_OFF;
    log_at(&log, LOG_FATAL, "x", "never");
    assert_int_equal(heard.n_lines, 2);
}

static void log_text_cannot_forge_a_line(void **state)
{
    (void)state;
    heard_t heard = {0};
    log_t log = {.hide_time = true, .sink = hear, .arg = &heard};

    log_error(&log, "x", "name %s", "a\n[0]<x> error: b\x1b[2J\x7f");
    assert_string_equal(heard.line, "[0]<x> error: name a [0]<x> error: b [2J ");
}

static void log_line_that_is_too_long_is_cut(void **state)
{
    (void)state;
    heard_t heard = {0};
    log_t log = {.hide_time = true, .sink = hear, .arg = &heard};
    char text[4000];

    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    log_error(&log, "x", "%s", text);
    assert_in_range(strlen(heard.line), 1000, 2047);
}

static void log_goes_to_stderr_in_one_line(void **state)
{
    (void)state;
    log_t log = {.rank = 1, .hide_time = true};
    char got[256] = "";
    int ends[2], saved = dup(STDERR_FILENO);

    assert_int_equal(pipe(ends), 0);
    dup2(ends[1], STDERR_FILENO);
    log_error(&log, "net", "to the screen");
    dup2(saved, STDERR_FILENO);
    close(saved);
    close(ends[1]);
    ssize_t n = read(ends[0], got, sizeof(got) - 1);
    close(ends[0]);
    assert_true(n > 0);
    assert_string_equal(got, "[1]<net> error: to the screen\n");
}

static void log_without_stderr_is_silent_and_keeps_errno(void **state)
{
    (void)state;
    log_t log = {0};
    int saved = dup(STDERR_FILENO);

    close(STDERR_FILENO);
    errno = EBADMSG;
    log_error(&log, "net", "to nobody");
    int errno_after = errno;
    dup2(saved, STDERR_FILENO);
    close(saved);
    assert_int_equal(errno_after, EBADMSG);
}

static void log_level_names_parse(void **state)
{
    (void)state;
    assert_int_equal(log_level_parse("trace"), LOG_TRACE);
    assert_int_equal(log_level_parse("DEBUG"), LOG_DEBUG);
    assert_int_equal(log_level_parse("Info"), LOG_INFO);
    assert_int_equal(log_level_parse("warning"), LOG_WARN);
    assert_int_equal(log_level_parse("error"), LOG_ERROR);
    assert_int_equal(log_level_parse("fatal"), LOG_FATAL);
    assert_int_equal(log_level_parse("verbose"), LOG_WARN);
    assert_int_equal(log_level_parse(""), LOG_WARN);
    assert_int_equal(log_level_parse(NULL), LOG_WARN);
}

// --- Time ----------------------------------------------------------------------------------------

static void clock_goes_forward(void **state)
{
    (void)state;
    uint64_t before = clock_ns();
    usleep(2000);
    uint64_t passed = clock_ns() - before;
    assert_in_range(passed, 2 * NS_PER_MS, 60 * NS_PER_S);
}

static void deadlines_are_in_the_future(void **state)
{
    (void)state;
    uint64_t now = clock_ns();
    uint64_t deadline = deadline_in_ms(1500);
    assert_in_range(deadline, now + 1500 * NS_PER_MS, now + 60 * NS_PER_S);
    assert_true(deadline_in_ms(-1) == NEVER_NS);
    assert_true(deadline_in_ms(INT64_MIN) == NEVER_NS);
    assert_true(deadline_in_ms(INT64_MAX) == NEVER_NS);
}

// --- Futex ---------------------------------------------------------------------------------------

static void futex_wait_ends_at_its_deadline(void **state)
{
    (void)state;
    atomic_uint word = 7;
    uint64_t deadline = deadline_in_ms(10);
    int n_waits = 0;

    // A signal may end a wait early, so wait until the deadline as a real caller does; but a wait
    // that does not sleep would be called thousands of times.
    for (; clock_ns() < deadline; n_waits++) {
        futex_wait(&word, 7, deadline);
    }
    assert_in_range(n_waits, 1, 100);
    assert_in_range(clock_ns(), deadline, deadline + 30 * NS_PER_S);
    futex_wait(&word, 7, clock_ns() - 1);
    futex_wait(&word, 7, 0);
}

static void futex_wait_returns_when_the_word_differs(void **state)
{
    (void)state;
    atomic_uint word = 7;
    futex_wait(&word, 8, NEVER_NS); // would hang
}

static void *wake_soon(void *arg)
{
    atomic_uint *word = arg;
    usleep(2000);
    atomic_store(word, 1);
    futex_wake(word, 1);
    return NULL;
}

static void futex_wakes_a_thread(void **state)
{
    (void)state;
    atomic_uint word = 0;
    uint64_t deadline = deadline_in_ms(20000);
    pthread_t thread;

    assert_int_equal(pthread_create(&thread, NULL, wake_soon, &word), 0);
    while (atomic_load(&word) == 0 && clock_ns() < deadline) {
        futex_wait(&word, 0, deadline);
    }
    pthread_join(thread, NULL);
    assert_true(clock_ns() < deadline);
}

static void futex_wakes_another_process(void **state)
{
    (void)state;
    atomic_uint *word =
        mmap(NULL, sizeof *word, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    uint64_t deadline = deadline_in_ms(20000);
    int exit_status;

    assert_ptr_not_equal(word, MAP_FAILED);
    pid_t child = fork();
    if (child == 0) {
        wake_soon(word);
        _exit(0);
    }
    assert_true(child > 0);
    // The sleep is only ended by the wake: a private futex would lie here until the deadline.
    while (atomic_load(word) == 0 && clock_ns() < deadline) {
        futex_wait(word, 0, deadline);
    }
    assert_int_equal(waitpid(child, &exit_status, 0), child);
    munmap(word, sizeof *word);
    assert_true(clock_ns() < deadline);
    assert_int_equal(exit_status, 0);
}

// --- Growable bytes ------------------------------------------------------------------------------

static void buf_keeps_what_is_appended(void **state)
{
    (void)state;
    buf_t buf = {0};

    for (unsigned i = 0; i < 10000; i++) {
        assert_non_null(buf_append(&buf, &i, sizeof i));
    }
    assert_int_equal(buf.len, 10000 * sizeof(unsigned));
    for (unsigned i = 0; i < 10000; i++) {
        assert_memory_equal(buf.data + i * sizeof i, &i, sizeof i);
    }
    buf_free(&buf);
    assert_null(buf.data);
    assert_int_equal(buf.cap, 0);
}

static void buf_that_is_emptied_keeps_its_memory(void **state)
{
    (void)state;
    buf_t buf = {0};

    assert_non_null(buf_append(&buf, NULL, 5000));
    uint8_t *data = buf.data;
    buf_clear(&buf);
    assert_int_equal(buf.len, 0);
    assert_ptr_equal(buf_append(&buf, NULL, 5000), data);
    buf_free(&buf);
}

static void buf_reserve_makes_room_once(void **state)
{
    (void)state;
    buf_t buf = {0};

    assert_true(buf_reserve(&buf, 1000));
    uint8_t *data = buf.data;
    for (int i = 0; i < 1000; i++) {
        buf_append(&buf, "x", 1);
    }
    assert_ptr_equal(buf.data, data);
    assert_int_equal(buf.len, 1000);
    buf_free(&buf);
}

static void buf_append_of_nothing_succeeds(void **state)
{
    (void)state;
    buf_t buf = {0};

    assert_non_null(buf_append(&buf, NULL, 0));
    assert_non_null(buf_append(&buf, "", 0));
    assert_int_equal(buf.len, 0);
    assert_false(buf.failed);
    buf_free(&buf);
}

static void buf_failure_sticks_until_cleared(void **state)
{
    (void)state;
    buf_t buf = {0};

    buf_append(&buf, "abc", 3);
    assert_null(buf_append(&buf, NULL, SIZE_MAX));
    assert_true(buf.failed);
    assert_null(buf_append(&buf, "d", 1));
    assert_int_equal(buf.len, 3);
    assert_memory_equal(buf.data, "abc", 3);
    buf_clear(&buf);
    assert_non_null(buf_append(&buf, "d", 1));
    buf_free(&buf);
}

// --- Hash and map --------------------------------------------------------------------------------

// A small generator of our own, so that a failure can be repeated.
static uint64_t next_random(uint64_t *random)
{
    *random = *random * 6364136223846793005u + 1442695040888963407u;
    return *random >> 33;
}

static int compare_hashes(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void hash_of_similar_names_differs(void **state)
{
    (void)state;
    enum { N = 20000 };
    uint64_t *hashes = malloc(N * sizeof *hashes);
    char name[64];

    assert_non_null(hashes);
    for (int i = 0; i < N; i++) {
        int len = snprintf(name, sizeof name, "gradient/layer.%d.weight", i);
        hashes[i] = hash_bytes(name, (size_t)len, 0);
        assert_true(hashes[i] != 0);
    }
    qsort(hashes, N, sizeof *hashes, compare_hashes);
    for (int i = 1; i < N; i++) {
        assert_true(hashes[i] != hashes[i - 1]);
    }
    free(hashes);
}

static void hash_depends_on_every_bit_length_and_seed(void **state)
{
    (void)state;
    uint8_t data[70];

    for (size_t bytes = 0; bytes <= sizeof data; bytes++) {
        memset(data, 0, sizeof data);
        uint64_t plain = hash_bytes(data, bytes, 1);
        assert_true(plain == hash_bytes(data, bytes, 1));
        assert_true(plain != hash_bytes(data, bytes, 2));
        assert_true(bytes == 0 || plain != hash_bytes(data, bytes - 1, 1));
        for (size_t bit = 0; bit < 8 * bytes; bit++) {
            data[bit / 8] ^= (uint8_t)(1u << bit % 8);
            assert_true(plain != hash_bytes(data, bytes, 1));
            data[bit / 8] ^= (uint8_t)(1u << bit % 8);
        }
    }
}

static void hash_reads_only_its_bytes(void **state)
{
    (void)state;
    for (size_t bytes = 1; bytes <= 40; bytes++) {
        // Exactly as large as the key: the address sanitizer sees one byte more.
        uint8_t *key = malloc(bytes);
        assert_non_null(key);
        memset(key, 'k', bytes);
        hash_bytes(key, bytes, 0);
        free(key);
    }
}

static void map_replaces_and_removes(void **state)
{
    (void)state;
    map_t map = {0};
    int a, b;
    uint64_t hash = hash_bytes("key", 3, 0);

    assert_null(map_get(&map, hash, "key", 3));
    assert_null(map_remove(&map, hash, "key", 3));
    assert_true(map_put(&map, hash, "key", 3, &a));
    assert_true(map_put(&map, hash, "key", 3, &b));
    assert_int_equal(map.n_used, 1);
    assert_ptr_equal(map_get(&map, hash, "key", 3), &b);
    assert_ptr_equal(map_remove(&map, hash, "key", 3), &b);
    assert_null(map_get(&map, hash, "key", 3));
    assert_int_equal(map.n_used, 0);
    map_free(&map);
}

static void map_copies_keys_as_texts(void **state)
{
    (void)state;
    map_t map = {0};
    char key[] = "tensor";
    int value;

    assert_true(map_put(&map, 1, key, strlen(key), &value));
    key[0] = 'X';
    assert_ptr_equal(map_get(&map, 1, "tensor", 6), &value);
    for (size_t i = 0; i < map.n_slots; i++) {
        assert_true(map.slots[i].value == NULL || strcmp(map.slots[i].key, "tensor") == 0);
    }
    map_free(&map);
}

// Random puts, gets and removals of few keys, compared with an array. `hash_mask` makes hashes
// collide: 0 puts every key into one run.
static void compare_map_with_array(uint64_t hash_mask, int n_steps)
{
    enum { N_KEYS = 200 };
    static char values[N_KEYS]; // only their addresses matter
    void *expected[N_KEYS] = {0};
    size_t n_expected = 0;
    uint64_t random = 42;
    map_t map = {0};

    for (int step = 0; step < n_steps; step++) {
        // Fills up at first and then drains, so that the table is seen both full and thin.
        bool remove = next_random(&random) % 100 < (step < n_steps / 2 ? 30u : 70u);
        int key = (int)(next_random(&random) % N_KEYS);
        uint64_t hash = hash_bytes(&key, sizeof key, 0) & hash_mask;

        if (remove) {
            assert_ptr_equal(map_remove(&map, hash, &key, sizeof key), expected[key]);
            n_expected -= expected[key] != NULL;
            expected[key] = NULL;
        } else {
            void *value = &values[next_random(&random) % N_KEYS];
            assert_true(map_put(&map, hash, &key, sizeof key, value));
            n_expected += expected[key] == NULL;
            expected[key] = value;
        }
        assert_int_equal(map.n_used, n_expected);
        int other = (int)(next_random(&random) % N_KEYS);
        uint64_t other_hash = hash_bytes(&other, sizeof other, 0) & hash_mask;
        assert_ptr_equal(map_get(&map, other_hash, &other, sizeof other), expected[other]);
    }
    for (int key = 0; key < N_KEYS; key++) {
        uint64_t hash = hash_bytes(&key, sizeof key, 0) & hash_mask;
        assert_ptr_equal(map_get(&map, hash, &key, sizeof key), expected[key]);
    }
    map_free(&map);
}

static void map_behaves_like_an_array(void **state)
{
    (void)state;
    compare_map_with_array(UINT64_MAX, 20000);
}

static void map_survives_colliding_hashes(void **state)
{
    (void)state;
    compare_map_with_array(0, 3000);
    compare_map_with_array(7, 5000);
}

// --- Secrets -------------------------------------------------------------------------------------

static void wipe_clears(void **state)
{
    (void)state;
    uint8_t secret[32], zero[32] = {0};
    memset(secret, 0x5a, sizeof secret);
    wipe(secret, 16);
    assert_memory_equal(secret, zero, 16);
    assert_int_equal(secret[16], 0x5a);
    wipe(NULL, 0);
}

static void random_bytes_do_not_repeat(void **state)
{
    (void)state;
    uint8_t a[300] = {0}, b[300] = {0}, zero[32] = {0};
    err_t err;

    assert_int_equal(random_bytes(a, sizeof a, &err), HVD_OK);
    assert_int_equal(random_bytes(b, sizeof b, &err), HVD_OK);
    assert_memory_not_equal(a, b, sizeof a);
    assert_memory_not_equal(a, zero, sizeof zero);
    assert_memory_not_equal(a + sizeof(a) - sizeof zero, zero, sizeof zero);
}

// --- Knobs ---------------------------------------------------------------------------------------

static hvd_status_t load_one(config_t *config, const char *entry, const log_t *log, err_t *err)
{
    const char *env[] = {entry, NULL};
    return config_load(config, env, log, err);
}

// Loads one setting and compares how it prints; expected NULL means it must be refused.
static void check_value(const char *entry, enum knob_id id, const char *expected)
{
    config_t config;
    err_t err = {0};
    char text[64];
    hvd_status_t status = load_one(&config, entry, NULL, &err);
    if (expected == NULL) {
        if (status != HVD_INVALID_ARGUMENT || strstr(err.text, knob_infos[id].env) == NULL) {
            fail_msg("%s gave %s, \"%s\"", entry, hvd_status_name(status), err.text);
        }
        return;
    }
    if (status != HVD_OK) {
        fail_msg("%s was refused: %s", entry, err.text);
    }
    config_format(&config, id, text, sizeof text);
    assert_string_equal(text, expected);
    assert_int_equal(config.origin[id], FROM_ENVIRONMENT);
    config_free(&config);
}

static void every_knob_has_a_valid_default(void **state)
{
    (void)state;
    config_t config;
    err_t err = {0};
    char text[64];

    assert_int_equal(load_one(&config, NULL, NULL, &err), HVD_OK);
    for (int id = 0; id < N_KNOBS; id++) {
        const knob_info_t *info = &knob_infos[id];
        assert_int_equal(config.origin[id], FROM_DEFAULT);
        config_format(&config, (enum knob_id)id, text, sizeof text);
        assert_string_equal(text, info->default_text);
        assert_int_equal(strncmp(info->env, "HOROVOD_", 8), 0);
        assert_true(strlen(info->help) > 0);
        assert_false(config_is_foreign_name(info->env));
    }
    assert_int_equal(config.size, 1);
    assert_int_equal(config.fusion_threshold, 134217728);
    assert_string_equal(config.log_level, "warning");
    config_free(&config);
}

static void no_two_knobs_share_a_name(void **state)
{
    (void)state;
    for (int i = 0; i < N_KNOBS; i++) {
        for (int j = 0; j < i; j++) {
            assert_string_not_equal(knob_infos[i].env, knob_infos[j].env);
        }
    }
}

// Loads "NAME=number" and says whether it was taken.
static bool takes_number(const knob_info_t *info, double number)
{
    config_t config;
    err_t err;
    char entry[128];
    snprintf(entry, sizeof entry, "%s=%.17g", info->env, number);
    if (load_one(&config, entry, NULL, &err) != HVD_OK) {
        return false;
    }
    config_free(&config);
    return true;
}

static void every_number_is_kept_in_its_range(void **state)
{
    (void)state;
    for (int id = 0; id < N_KNOBS; id++) {
        const knob_info_t *info = &knob_infos[id];
        if (strcmp(info->kind, "int") == 0 || strcmp(info->kind, "bytes") == 0 ||
            strcmp(info->kind, "real") == 0) {
            assert_true(info->min < info->max);
            assert_true(takes_number(info, info->min));
            assert_true(takes_number(info, info->max));
            assert_false(takes_number(info, info->min - 1));
            assert_false(takes_number(info, info->max + 1));
        }
    }
}

static void every_knob_that_is_no_text_refuses_nonsense(void **state)
{
    (void)state;
    char entry[128];

    for (int id = 0; id < N_KNOBS; id++) {
        snprintf(entry, sizeof entry, "%s=nonsense", knob_infos[id].env);
        bool is_text = strcmp(knob_infos[id].kind, "text") == 0;
        check_value(entry, (enum knob_id)id, is_text ? "nonsense" : NULL);
    }
}

static void integers_are_read_strictly(void **state)
{
    (void)state;
    check_value("HOROVOD_RANK=5", KNOB_rank, "5");
    check_value("HOROVOD_RANK=+5", KNOB_rank, "5");
    check_value("HOROVOD_SECRET_FD=-1", KNOB_secret_fd, "-1");
    check_value("HOROVOD_RANK= 5", KNOB_rank, NULL);
    check_value("HOROVOD_RANK=5 ", KNOB_rank, NULL);
    check_value("HOROVOD_RANK=5x", KNOB_rank, NULL);
    check_value("HOROVOD_RANK=0x5", KNOB_rank, NULL);
    check_value("HOROVOD_RANK=5.0", KNOB_rank, NULL);
    check_value("HOROVOD_RANK=-", KNOB_rank, NULL);
    check_value("HOROVOD_RANK=99999999999999999999", KNOB_rank, NULL);
}

static void reals_are_read_strictly(void **state)
{
    (void)state;
    check_value("HOROVOD_CYCLE_TIME=2.5", KNOB_cycle_time, "2.5");
    check_value("HOROVOD_CYCLE_TIME=.5", KNOB_cycle_time, "0.5");
    check_value("HOROVOD_CYCLE_TIME=1e3", KNOB_cycle_time, "1000");
    check_value("HOROVOD_CYCLE_TIME=0.123456789", KNOB_cycle_time, "0.123456789");
    check_value("HOROVOD_CYCLE_TIME=0.1234567890123456", KNOB_cycle_time, "0.1234567890123456");
    check_value("HOROVOD_CYCLE_TIME=2,5", KNOB_cycle_time, NULL);
    check_value("HOROVOD_CYCLE_TIME=nan", KNOB_cycle_time, NULL);
    check_value("HOROVOD_CYCLE_TIME=inf", KNOB_cycle_time, NULL);
    check_value("HOROVOD_CYCLE_TIME=0x10", KNOB_cycle_time, NULL);
    check_value("HOROVOD_CYCLE_TIME=1e", KNOB_cycle_time, NULL);
    check_value("HOROVOD_CYCLE_TIME=1e999", KNOB_cycle_time, NULL);
    check_value("HOROVOD_CYCLE_TIME=-0.1", KNOB_cycle_time, NULL);
}

static void bytes_take_suffixes(void **state)
{
    (void)state;
    check_value("HOROVOD_FUSION_THRESHOLD=0", KNOB_fusion_threshold, "0");
    check_value("HOROVOD_FUSION_THRESHOLD=64", KNOB_fusion_threshold, "64");
    check_value("HOROVOD_FUSION_THRESHOLD=3K", KNOB_fusion_threshold, "3072");
    check_value("HOROVOD_FUSION_THRESHOLD=64m", KNOB_fusion_threshold, "67108864");
    check_value("HOROVOD_FUSION_THRESHOLD=2G", KNOB_fusion_threshold, "2147483648");
    check_value("HOROVOD_FUSION_THRESHOLD=1024G", KNOB_fusion_threshold, "1099511627776");
    check_value("HOROVOD_FUSION_THRESHOLD=1025G", KNOB_fusion_threshold, NULL);
    check_value("HOROVOD_FUSION_THRESHOLD=99999999999999999999", KNOB_fusion_threshold, NULL);
    check_value("HOROVOD_FUSION_THRESHOLD=17179869184G", KNOB_fusion_threshold, NULL); // 2^64
    check_value("HOROVOD_FUSION_THRESHOLD=K", KNOB_fusion_threshold, NULL);
    check_value("HOROVOD_FUSION_THRESHOLD=1KB", KNOB_fusion_threshold, NULL);
    check_value("HOROVOD_FUSION_THRESHOLD=1.5K", KNOB_fusion_threshold, NULL);
    check_value("HOROVOD_FUSION_THRESHOLD=-1", KNOB_fusion_threshold, NULL);
}

static void switches_take_numbers_and_words(void **state)
{
    (void)state;
    static const char *const on[] = {"1", "2", "true", "True", "YES", "on"};
    static const char *const off[] = {"0", "-1", "false", "No", "OFF"};
    char entry[128];

    for (size_t i = 0; i < N_ELEMENTS(on); i++) {
        snprintf(entry, sizeof entry, "HOROVOD_LOG_HIDE_TIME=%s", on[i]);
        check_value(entry, KNOB_log_hide_time, "1");
    }
    for (size_t i = 0; i < N_ELEMENTS(off); i++) {
        snprintf(entry, sizeof entry, "HOROVOD_LOG_HIDE_TIME=%s", off[i]);
        check_value(entry, KNOB_log_hide_time, "0");
    }
    check_value("HOROVOD_LOG_HIDE_TIME=maybe", KNOB_log_hide_time, NULL);
    check_value("HOROVOD_LOG_HIDE_TIME=1.5", KNOB_log_hide_time, NULL);
}

static void choices_are_indices(void **state)
{
    (void)state;
    config_t config;
    err_t err;

    check_value("HOROVOD_ENCRYPT=auto", KNOB_encrypt, "auto");
    check_value("HOROVOD_ENCRYPT=Never", KNOB_encrypt, "never");
    check_value("HOROVOD_ENCRYPT=nev", KNOB_encrypt, NULL);
    check_value("HOROVOD_ENCRYPT=neverever", KNOB_encrypt, NULL);
    check_value("HOROVOD_ENCRYPT=auto|always", KNOB_encrypt, NULL);
    check_value("HOROVOD_ENCRYPT=|", KNOB_encrypt, NULL);
    assert_int_equal(load_one(&config, "HOROVOD_ENCRYPT=always", NULL, &err), HVD_OK);
    assert_int_equal(config.encrypt, 1);
    config_free(&config);
}

static void empty_value_counts_as_not_set(void **state)
{
    (void)state;
    config_t config;
    err_t err;
    const char *env[] = {"HOROVOD_SIZE=", "HOROVOD_LOG_LEVEL=", "HOROVOD_ENCRYPT=", NULL};

    assert_int_equal(config_load(&config, env, NULL, &err), HVD_OK);
    assert_int_equal(config.size, 1);
    assert_string_equal(config.log_level, "warning");
    assert_int_equal(config.origin[KNOB_size], FROM_DEFAULT);
    config_free(&config);
}

static void wrong_value_is_explained(void **state)
{
    (void)state;
    config_t config;
    err_t err;

    memset(&config, 0x5a, sizeof config);
    assert_int_equal(load_one(&config, "HOROVOD_CYCLE_TIME=fast", NULL, &err),
                     HVD_INVALID_ARGUMENT);
    assert_string_equal(err.text,
                        "HOROVOD_CYCLE_TIME must be a number from 0 to 10000, in "
                        "ms, not \"fast\" (longest time to hold a batch back for more tensors; 0 "
                        "never waits)");
    assert_int_equal(err.status, HVD_INVALID_ARGUMENT);
    assert_int_equal(((unsigned char *)&config)[0], 0x5a); // written only on success
    load_one(&config, "HOROVOD_ENCRYPT=perhaps", NULL, &err);
    assert_non_null(strstr(err.text, "must be one of auto|always|never"));
    load_one(&config, "HOROVOD_RANK=-3", NULL, &err);
    assert_non_null(strstr(err.text, "must be a whole number from 0 to 1048575, not \"-3\" ("));
}

static void unknown_name_is_warned_about(void **state)
{
    (void)state;
    static const struct {
        const char *entry, *meant; // meant NULL: no name is near
    } rows[] = {
        {"HOROVOD_FUSION_TRESHOLD=1", "HOROVOD_FUSION_THRESHOLD"},
        {"HOROVOD_CYCEL_TIME=1", "HOROVOD_CYCLE_TIME"},
        {"HOROVOD_cycle_time=1", "HOROVOD_CYCLE_TIME"},
        {"HOROVOD_ELASTC=1", "HOROVOD_ELASTIC"},
        {"HOROVOD_WEATHER_FORECAST=rain", NULL},
        {"HOROVOD_=1", NULL},
    };
    heard_t heard = {0};
    log_t log = {.level = LOG_WARN, .hide_time = true, .sink = hear, .arg = &heard};
    config_t config;
    err_t err;
    char expected[256];

    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        size_t name_bytes = strcspn(rows[i].entry, "=");
        assert_int_equal(load_one(&config, rows[i].entry, &log, &err), HVD_OK);
        config_free(&config);
        assert_int_equal(heard.n_lines, i + 1);
        assert_int_equal(heard.level, LOG_WARN);
        if (rows[i].meant != NULL) {
            snprintf(
                expected, sizeof expected,
                "[0]<config> warning: %.*s is not a known setting and is ignored; did you mean %s?",
                (int)name_bytes, rows[i].entry, rows[i].meant);
        } else {
            snprintf(expected, sizeof expected,
                     "[0]<config> warning: %.*s is not a known setting and is ignored",
                     (int)name_bytes, rows[i].entry);
        }
        assert_string_equal(heard.line, expected);
    }
}

static void only_the_first_rank_of_a_host_warns(void **state)
{
    (void)state;
    heard_t heard = {0};
    log_t log = {.level = LOG_WARN, .sink = hear, .arg = &heard};
    config_t config;
    err_t err;
    const char *env[] = {"HOROVOD_CYCLE_TIM=1", "HOROVOD_LOCAL_RANK=1", NULL};

    assert_int_equal(config_load(&config, env, &log, &err), HVD_OK);
    config_free(&config);
    assert_int_equal(heard.n_lines, 0);
    env[1] = "HOROVOD_LOCAL_RANK=0";
    assert_int_equal(config_load(&config, env, &log, &err), HVD_OK);
    config_free(&config);
    assert_int_equal(heard.n_lines, 1);
}

static void settings_that_do_nothing_are_told_with_what_does(void **state)
{
    (void)state;
    static const struct {
        const char *entry, *names, *advice; // NULL: not a word
    } rows[] = {
        {"HOROVOD_AUTOTUNE=1", "HOROVOD_AUTOTUNE (", "HOROVOD_FUSION_THRESHOLD"},
        {"HOROVOD_AUTOTUNE_LOG=x", "HOROVOD_AUTOTUNE_LOG (", "HOROVOD_ALGORITHM"},
        {"HOROVOD_ENABLE_XLA_OPS=1", "HOROVOD_ENABLE_XLA_OPS (", "jit_compile=False"},
        {"HOROVOD_CPU_OPERATIONS=CCL", "HOROVOD_CPU_OPERATIONS (", "oneCCL is not supported"},
        {"HOROVOD_CCL_CACHE=1", "HOROVOD_CCL_CACHE (", "oneCCL is not supported"},
        {"CCL_ATL_TRANSPORT=mpi", "CCL_ATL_TRANSPORT (", "HOROVOD_TRANSPORTS"},
        {"HOROVOD_NUM_NCCL_STREAMS=2", "HOROVOD_NUM_NCCL_STREAMS (", "one stream"},
        {"DDL_OPTIONS=-mode p", "DDL_OPTIONS (", "DDL is not supported"},
        {"HOROVOD_TORUS_ALLREDUCE=1", "HOROVOD_TORUS_ALLREDUCE (", "HOROVOD_ALGORITHM"},
        {"HOROVOD_HIERARCHICAL_ALLREDUCE=1", "HOROVOD_HIERARCHICAL_ALLREDUCE (", "two levels"},
        {"HOROVOD_HIERARCHICAL_ALLGATHER=0", NULL, NULL},
        {"HOROVOD_GPU_OPERATIONS=NCCL", NULL, NULL},
        {"HOROVOD_GPU_OPERATIONS=MPI", NULL, NULL},
        {"NCCL_DEBUG=INFO", NULL, NULL},
        {"HOROVOD_AUTOTUNE=0", NULL, NULL},
        {"HOROVOD_ENABLE_XLA_OPS=", NULL, NULL},
        {"HOROVOD_CPU_OPERATIONS=gloo", NULL, NULL},
        {"NCCL_VERSION=2.20", NULL, NULL},
        {"NCCL_SOCKET_IFNAME=eth0", NULL, NULL},
        {"NCCL_IB_DISABLE=1", NULL, NULL},
        {"HOROVOD_CYCLE_TIME=1", NULL, NULL},
    };
    config_t config;
    err_t err;

    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        assert_int_equal(load_one(&config, rows[i].entry, NULL, &err), HVD_OK);
        assert_int_equal(config.idle != NULL, rows[i].names != NULL);
        if (rows[i].names != NULL) {
            assert_ptr_equal(strstr(config.idle, rows[i].names), config.idle);
            assert_non_null(strstr(config.idle, rows[i].advice));
        }
        config_free(&config);
    }
    const char *env[] = {"CCL_ROOT=/", "HOROVOD_AUTOTUNE=1", "CCL_LOG_LEVEL=info", NULL};
    assert_int_equal(config_load(&config, env, NULL, &err), HVD_OK);
    assert_non_null(strstr(config.idle, "; CCL_ROOT, CCL_LOG_LEVEL (oneCCL is not supported"));
    config_free(&config);
}

static void names_of_other_parts_are_left_alone(void **state)
{
    (void)state;
    heard_t heard = {0};
    log_t log = {.level = LOG_WARN, .sink = hear, .arg = &heard};
    config_t config;
    err_t err;
    char longer_than_any_name[300] = "HOROVOD_";
    const char *env[] = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR=1.2.3.4",
        "HOROVOD_CONTROLLER=gloo",
        "HOROVOD_ELASTIC=1",
        "HOROVOD_AUTOTUNE=1",
        "HOROVOD_AUTOTUNE_LOG=x",
        "HOROVOD_SPARK_PYTHONPATH=x",
        "HOROVOD_WITHOUT_MPI=1",
        "HOROVOD_GPU_OPERATIONS=NCCL",
        "HOROVOD_NCCL_HOME=/",
        "HOROVOD_ENABLE_XLA_OPS=1",
        "HOROVOD_VERSION=1",
        "PATH=/bin",
        "HOROVOD",
        "XHOROVOD_Y=1",
        longer_than_any_name,
        NULL,
    };

    memset(longer_than_any_name + 8, 'X', sizeof(longer_than_any_name) - 9);
    assert_int_equal(config_load(&config, env, &log, &err), HVD_OK);
    config_free(&config);
    assert_int_equal(heard.n_lines, 0);
    assert_true(config_is_foreign_name("HOROVOD_WITH_TENSORFLOW"));
    assert_false(config_is_foreign_name("HOROVOD_CONTROLLERS"));
    assert_false(config_is_foreign_name("HOROVOD_RANK"));
}

static void environment_of_the_process_is_the_default(void **state)
{
    (void)state;
    config_t config;
    err_t err;

    assert_int_equal(setenv("HOROVOD_JOB_ID", "from-the-process", 1), 0);
    hvd_status_t status = config_load(&config, NULL, NULL, &err);
    unsetenv("HOROVOD_JOB_ID");
    assert_int_equal(status, HVD_OK);
    assert_string_equal(config.job_id, "from-the-process");
    config_free(&config);
    assert_null(config.job_id);
}

static void first_of_two_equal_names_counts(void **state)
{
    (void)state;
    config_t config;
    err_t err;
    const char *env[] = {"HOROVOD_RANKS=9", "HOROVOD_RANK=1", "HOROVOD_RANK=2", NULL};

    assert_int_equal(config_load(&config, env, NULL, &err), HVD_OK);
    assert_int_equal(config.rank, 1);
    config_free(&config);
}

static void decimal_comma_of_the_program_does_not_matter(void **state)
{
    (void)state;
    static const char *const with_comma[] = {"de_DE.UTF-8", "de_DE", "fr_FR.UTF-8", "es_ES.UTF-8"};
    bool found = false;

    for (size_t i = 0; i < N_ELEMENTS(with_comma) && !found; i++) {
        found = setlocale(LC_NUMERIC, with_comma[i]) != NULL;
    }
    if (!found) {
        skip(); // no such locale is installed
    }
    check_value("HOROVOD_CYCLE_TIME=2.5", KNOB_cycle_time, "2.5");
    check_value("HOROVOD_CYCLE_TIME=2,5", KNOB_cycle_time, NULL);
    setlocale(LC_NUMERIC, "C");
}

// --- Peers --------------------------------------------------------------------------------------

static void a_peer_is_named_with_host_and_pid(void **state)
{
    int host_of[] = {0, 0, 1};
    peer_id_t of[] = {peer_of_self("a"), peer_of_self("a"), {.pid = 77, .host = "b"}};
    peers_t peers = {.self = 0, .size = 3, .host_of = host_of, .of = of};
    char text[PEER_TEXT_BYTES];
    (void)state;
    assert_string_equal(peer_name(&peers, 2, text), "rank 2 (host b, pid 77)");
    assert_string_equal(peer_name(NULL, 2, text), "rank 2");
    assert_string_equal(peer_state(&peers, 2, text), ""); // on another host
    assert_non_null(strstr(peer_state(&peers, 1, text), "its process is"));
    of[1].started++; // another process has the pid now
    assert_string_equal(peer_state(&peers, 1, text), "");
    assert_string_equal(peer_state(NULL, 1, text), "");
}

// Runs a child to an end or a stop, and asks what the process table says before it is collected.
static void assert_state_of_child(int signal, int exit_status, const char *expected)
{
    int host_of[] = {0, 0};
    peer_id_t of[2] = {peer_of_self("a")};
    peers_t peers = {.size = 2, .host_of = host_of, .of = of, .n_oom_kills = UINT64_MAX};
    char text[PEER_TEXT_BYTES];
    int to_child[2], from_child[2];
    siginfo_t info;
    assert_int_equal(pipe(to_child), 0);
    assert_int_equal(pipe(from_child), 0);
    pid_t pid = fork();
    if (pid == 0) {
        peer_id_t self = peer_of_self("a");
        bool ok = write(from_child[1], &self, sizeof self) == sizeof self &&
                  read(to_child[0], &self, 1) == 1;
        _exit(ok ? exit_status : 99);
    }
    assert_int_equal(read(from_child[0], &of[1], sizeof of[1]), sizeof of[1]);
    assert_int_equal(of[1].pid, pid);
    if (signal != 0) {
        kill(pid, signal);
    } else {
        assert_int_equal(write(to_child[1], "", 1), 1);
    }
    assert_int_equal(waitid(P_PID, (id_t)pid, &info, WEXITED | WSTOPPED | WNOWAIT), 0);
    assert_string_equal(peer_state(&peers, 1, text), expected);
    assert_int_equal(peer_is_gone(&peers, 1), signal != SIGSTOP);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    assert_string_equal(peer_state(&peers, 1, text), "its process has ended");
    assert_true(peer_is_gone(&peers, 1));
    of[1].space++; // its pid means nothing here
    assert_string_equal(peer_state(&peers, 1, text), "");
    assert_false(peer_is_gone(&peers, 1));
    for (int i = 0; i < 2; i++) {
        close(to_child[i]);
        close(from_child[i]);
    }
}

static void the_process_table_tells_how_a_peer_fares(void **state)
{
    (void)state;
    assert_state_of_child(SIGKILL, 0, "its process was killed by signal 9 (Killed)");
    assert_state_of_child(SIGSTOP, 0, "its process is stopped (state T); kill -CONT continues it");
    assert_state_of_child(0, 0, "its process ended normally (exit status 0)");
    assert_state_of_child(0, 3, "its process ended with exit status 3 (its own output says why)");
}

// Both limits give the same errno.
static void the_limit_that_was_met_is_named(void **state)
{
    struct rlimit before, low;
    unsigned long long pages;
    err_t err;
    (void)state;

    FILE *file = fopen("/proc/self/statm", "r");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "%llu", &pages), 1);
    fclose(file);
    assert_int_equal(getrlimit(RLIMIT_AS, &before), 0);
    low = before;
    low.rlim_cur = pages * (rlim_t)sysconf(_SC_PAGESIZE) + 1048576;
    assert_int_equal(setrlimit(RLIMIT_AS, &low), 0);
    hvd_status_t status = thread_failed(&err, EAGAIN, "a thread");
    assert_int_equal(setrlimit(RLIMIT_AS, &before), 0);
    assert_int_equal(status, HVD_NO_MEMORY);
    assert_non_null(strstr(err.text, "ulimit -v"));
    thread_failed(&err, EAGAIN, "a thread");
    assert_null(strstr(err.text, "ulimit -v"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(status_rows_are_complete),
        cmocka_unit_test(status_scopes_follow_the_code),
        cmocka_unit_test(status_hints_hold_in_every_case),
        cmocka_unit_test(status_that_does_not_exist_is_unknown),
        cmocka_unit_test(fail_writes_status_and_sentence),
        cmocka_unit_test(fail_may_quote_the_earlier_sentence),
        cmocka_unit_test(fail_errno_ends_with_the_reason),
        cmocka_unit_test(long_sentence_is_cut_before_its_reason),
        cmocka_unit_test(err_export_copies_what_fits),
        cmocka_unit_test(err_export_without_sentence_uses_the_table),
        cmocka_unit_test(try_stops_at_the_first_failure),
        cmocka_unit_test(every_value_has_its_own_name),
        cmocka_unit_test(names_are_those_of_the_users),
        cmocka_unit_test(values_outside_are_unknown),
        cmocka_unit_test(signals_are_called_what_the_system_calls_them),
        cmocka_unit_test(version_is_that_of_the_header),
        cmocka_unit_test(log_line_has_rank_component_and_level),
        cmocka_unit_test(log_line_starts_with_the_time),
        cmocka_unit_test(log_levels_below_are_silent),
        cmocka_unit_test(log_text_cannot_forge_a_line),
        cmocka_unit_test(log_line_that_is_too_long_is_cut),
        cmocka_unit_test(log_goes_to_stderr_in_one_line),
        cmocka_unit_test(log_without_stderr_is_silent_and_keeps_errno),
        cmocka_unit_test(log_level_names_parse),
        cmocka_unit_test(clock_goes_forward),
        cmocka_unit_test(deadlines_are_in_the_future),
        cmocka_unit_test(futex_wait_ends_at_its_deadline),
        cmocka_unit_test(futex_wait_returns_when_the_word_differs),
        cmocka_unit_test(futex_wakes_a_thread),
        cmocka_unit_test(futex_wakes_another_process),
        cmocka_unit_test(buf_keeps_what_is_appended),
        cmocka_unit_test(buf_that_is_emptied_keeps_its_memory),
        cmocka_unit_test(buf_reserve_makes_room_once),
        cmocka_unit_test(buf_append_of_nothing_succeeds),
        cmocka_unit_test(buf_failure_sticks_until_cleared),
        cmocka_unit_test(hash_of_similar_names_differs),
        cmocka_unit_test(hash_depends_on_every_bit_length_and_seed),
        cmocka_unit_test(hash_reads_only_its_bytes),
        cmocka_unit_test(map_replaces_and_removes),
        cmocka_unit_test(map_copies_keys_as_texts),
        cmocka_unit_test(map_behaves_like_an_array),
        cmocka_unit_test(map_survives_colliding_hashes),
        cmocka_unit_test(wipe_clears),
        cmocka_unit_test(random_bytes_do_not_repeat),
        cmocka_unit_test(every_knob_has_a_valid_default),
        cmocka_unit_test(no_two_knobs_share_a_name),
        cmocka_unit_test(every_number_is_kept_in_its_range),
        cmocka_unit_test(every_knob_that_is_no_text_refuses_nonsense),
        cmocka_unit_test(integers_are_read_strictly),
        cmocka_unit_test(reals_are_read_strictly),
        cmocka_unit_test(bytes_take_suffixes),
        cmocka_unit_test(switches_take_numbers_and_words),
        cmocka_unit_test(choices_are_indices),
        cmocka_unit_test(empty_value_counts_as_not_set),
        cmocka_unit_test(wrong_value_is_explained),
        cmocka_unit_test(unknown_name_is_warned_about),
        cmocka_unit_test(only_the_first_rank_of_a_host_warns),
        cmocka_unit_test(settings_that_do_nothing_are_told_with_what_does),
        cmocka_unit_test(names_of_other_parts_are_left_alone),
        cmocka_unit_test(environment_of_the_process_is_the_default),
        cmocka_unit_test(first_of_two_equal_names_counts),
        cmocka_unit_test(decimal_comma_of_the_program_does_not_matter),
        cmocka_unit_test(a_peer_is_named_with_host_and_pid),
        cmocka_unit_test(the_process_table_tells_how_a_peer_fares),
        cmocka_unit_test(the_limit_that_was_met_is_named),
    };
    return cmocka_run_group_tests_name("base", tests, NULL, NULL);
}
