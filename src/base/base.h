// SPDX-License-Identifier: Apache-2.0
//
// base.h - what every module stands on; depends on nothing else in the project.
//
// Owns: error sentences, log lines, the clock, futexes, growable buffers, hash maps, knobs.
// Threads: everything here is either pure, or an object owned by one caller at a time; the
// exceptions (log, futex) say so.
#ifndef HVD_BASE_H
#define HVD_BASE_H

#include "base/guard.h"
#include "base/op.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define plural(n) ((n) == 1 ? "" : "s") // "%d rank%s", n, plural(n)
#define N_ELEMENTS(array) (sizeof array / sizeof((array)[0]))
#define CACHE_LINE 64
#define KIB ((size_t)1024)
#define MIB (KIB * KIB)

#if defined(__GNUC__)
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)
#define PRINTF_LIKE(fmt, args) __attribute__((format(printf, fmt, args)))
#endif

// --- Errors --------------------------------------------------------------------------------------
// The function that finds an error writes the sentence, once; callers pass the status up.

typedef struct err {
    hvd_status_t status;
    char text[HVD_TEXT_BYTES];
} err_t;

// Records status and sentence, returns status: `return fail(err, HVD_SYSTEM, "cannot ...", ...)`.
// err may be NULL.
hvd_status_t fail(err_t *err, hvd_status_t status, const char *format, ...) PRINTF_LIKE(3, 4);
// The same with ": <strerror(code)>" at the end. HVD_NO_MEMORY for ENOMEM, else HVD_SYSTEM.
hvd_status_t fail_errno(err_t *err, int code, const char *format, ...) PRINTF_LIKE(3, 4);
// Copies an error's sentence to a user's buffer (which may be NULL); returns the status. Where err
// has no sentence for this status, the general one of status.def stands in.
hvd_status_t err_export(const err_t *err, hvd_status_t status, char *text, size_t text_bytes);

// The one macro that jumps: run expr; on failure keep its status and go to label.
#define TRY(expr, label)                                                                           \
    do {                                                                                           \
        if (UNLIKELY((status = (expr)) != HVD_OK)) {                                               \
            goto label;                                                                            \
        }                                                                                          \
    } while (0)

// --- Log -----------------------------------------------------------------------------------------
// Any thread. A line is lower case, rank and component in front, values after a space.

typedef enum log_level {
    LOG_TRACE,
    LOG_DEBUG,
    LOG_INFO,
    LOG_WARN,
    LOG_ERROR,
    LOG_FATAL,
    LOG_OFF
} log_level_t;

typedef struct log {
    _Atomic log_level_t level; // another thread may have to say nothing any more
    int rank;                  // -1: not known yet
    bool hide_time;
    // Gets each line without its newline. NULL: stderr, one write per line.
    void (*sink)(void *arg, int level, const char *line);
    void *arg;
} log_t;

void log_write(const log_t *log, log_level_t level, const char *component, const char *format, ...)
    PRINTF_LIKE(4, 5);
log_level_t log_level_parse(const char *text); // case-insensitive; unknown: LOG_WARN

// A level that is off costs one predictable branch.
#define log_at(log, lvl, ...)                                                                      \
    do {                                                                                           \
        if (UNLIKELY((log) != NULL && (log)->level <= (lvl))) {                                    \
            log_write((log), (lvl), __VA_ARGS__);                                                  \
        }                                                                                          \
    } while (0)
#define log_trace(log, ...) log_at(log, LOG_TRACE, __VA_ARGS__)
#define log_debug(log, ...) log_at(log, LOG_DEBUG, __VA_ARGS__)
#define log_info(log, ...) log_at(log, LOG_INFO, __VA_ARGS__)
#define log_warn(log, ...) log_at(log, LOG_WARN, __VA_ARGS__)
#define log_error(log, ...) log_at(log, LOG_ERROR, __VA_ARGS__)

// --- Time ----------------------------------------------------------------------------------------

#define NS_PER_US ((uint64_t)1000)
#define NS_PER_MS ((uint64_t)1000000)
#define NS_PER_S ((uint64_t)1000000000)
#define NEVER_NS UINT64_MAX // a deadline that does not come

uint64_t clock_ns(void); // monotonic
// Deadline `ms` from now; negative: NEVER_NS.
uint64_t deadline_in_ms(int64_t ms);

// Ticks: the cheapest clock there is, for stamps that are only looked at later. On the processors
// this runs on, the counter keeps one pace and is the same on all cores; a difference that turns
// out negative all the same counts as nothing.
static inline uint64_t ticks_now(void)
{
#if defined(__x86_64__) || defined(__i386__)
    return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
    uint64_t ticks;
    __asm__ __volatile__("mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
#else
    return clock_ns();
#endif
}

typedef struct tick_origin {
    uint64_t ticks, ns; // of one moment
} tick_origin_t;

tick_origin_t ticks_origin(void);
double ticks_pace(const tick_origin_t *origin); // nanoseconds a tick, measured since then

// Tells the core that this is a spin loop.
static inline void cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

// --- Futex ---------------------------------------------------------------------------------------
// The word may lie in memory shared between processes. Both may return without a wake.

// Sleeps while *word == expected, until deadline (NEVER_NS: no limit).
void futex_wait(atomic_uint *word, unsigned expected, uint64_t deadline_ns);
void futex_wake(atomic_uint *word, int n_waiters);

// --- Threads -------------------------------------------------------------------------------------

// A thread that no signal of the user's reaches; 0, or an errno. Names have up to 15 characters.
int thread_start(pthread_t *thread_p, const char *name, void *(*run)(void *), void *arg);
// The sentence for that errno: what did not start, how many there may be, where that is set.
hvd_status_t thread_failed(err_t *err, int code, const char *what);

// --- Descriptors ---------------------------------------------------------------------------------

void fd_not_for_children(int fd); // a child closes it as soon as it is forked
void fd_for_children(int fd);     // undoes it
void fd_close(int fd);            // for those

// --- Growable bytes ------------------------------------------------------------------------------
// Keeps its memory when emptied, so steady use allocates nothing. On allocation failure `failed`
// is set and stays set: writers check once at the end.

typedef struct buf {
    uint8_t *data;
    size_t len;
    size_t cap;
    bool failed;
} buf_t;

void buf_free(buf_t *buf);
bool buf_grow(buf_t *buf, size_t more); // the slow half of buf_reserve()

// Room for `more` bytes beyond len.
static inline bool buf_reserve(buf_t *buf, size_t more)
{
    return LIKELY(buf->cap - buf->len >= more && buf->data != NULL && !buf->failed) ||
           buf_grow(buf, more);
}

// Where the bytes now lie, valid until the next append; NULL on failure. data NULL: uninitialised.
static inline void *buf_append(buf_t *buf, const void *data, size_t bytes)
{
    if (UNLIKELY(!buf_reserve(buf, bytes))) {
        return NULL;
    }
    void *place = buf->data + buf->len;
    if (data != NULL) {
        memcpy(place, data, bytes);
    }
    buf->len += bytes;
    return place;
}

void buf_printf(buf_t *buf, const char *format, ...) PRINTF_LIKE(2, 3);
void buf_vprintf(buf_t *buf, const char *format, va_list args) PRINTF_LIKE(2, 0);

static inline void buf_clear(buf_t *buf)
{
    buf->len = 0;
    buf->failed = false;
}

// --- Hash map ------------------------------------------------------------------------------------
// Open addressing; key: bytes (copied, with a '\0' behind). Values are pointers, never NULL.
// Deletion keeps probes short. To visit all: slots with a value, in no order.

typedef struct map_slot {
    uint64_t hash;
    void *value;
    char *key;
    size_t key_bytes;
} map_slot_t;

typedef struct map {
    map_slot_t *slots;
    size_t n_slots; // power of two, or 0
    size_t n_used;
} map_t;

uint64_t hash_bytes(const void *data, size_t bytes, uint64_t seed); // never 0
void *map_get(const map_t *map, uint64_t hash, const void *key, size_t key_bytes);
// Adds the key or replaces its value; false: no memory, and nothing has changed.
bool map_put(map_t *map, uint64_t hash, const void *key, size_t key_bytes, void *value);
void *map_remove(map_t *map, uint64_t hash, const void *key, size_t key_bytes); // value, or NULL
void map_free(map_t *map); // keys and slots, not values

// --- Random bytes --------------------------------------------------------------------------------

void wipe(void *memory, size_t bytes); // not optimised away
hvd_status_t random_bytes(void *memory, size_t bytes, err_t *err);

// --- Knobs ---------------------------------------------------------------------------------------
// One row in knobs.def is a whole knob: the field here, parsing, range, help, docs, origin.
// config.c is the only place that reads the environment.

typedef enum knob_origin { FROM_DEFAULT, FROM_ENVIRONMENT } knob_origin_t;

enum knob_id {
#define KNOB(kind, field, ...) KNOB_##field,
#include "base/knobs.def"
#undef KNOB
    N_KNOBS
};

#define KNOB_TYPE_BOOL bool
#define KNOB_TYPE_INT int64_t
#define KNOB_TYPE_BYTES size_t
#define KNOB_TYPE_REAL double
#define KNOB_TYPE_TEXT char *
#define KNOB_TYPE_CHOICE int // index into the row's choices

// What other launchers tell the processes they start: rows of launchers.def.
enum launch_var {
#define LAUNCH_VAR(name) SEEN_##name,
#include "base/launchers.def"
#undef LAUNCH_VAR
    N_LAUNCH_VARS
};

extern const char *const launch_var_names[N_LAUNCH_VARS];

typedef struct config {
#define KNOB(kind, field, ...) KNOB_TYPE_##kind field;
#include "base/knobs.def"
#undef KNOB
    knob_origin_t origin[N_KNOBS];
    char *seen[N_LAUNCH_VARS]; // NULL: not set, or empty
    char *idle; // settings that do nothing here, each with what does; NULL: there are none
} config_t;

typedef struct knob_info {
    const char *kind; // "bool" "int" "bytes" "real" "text" "choice"
    const char *env, *flag, *yaml;
    const char *default_text, *choices, *unit, *help;
    double min, max;
} knob_info_t;

extern const knob_info_t knob_infos[N_KNOBS];

// Reads every knob from env ("NAME=value" strings; NULL: the process environment). A value that
// does not parse or is out of range is an error naming the knob, the value and what is allowed; an
// empty one counts as not set. Unknown HOROVOD_ names get a warning with the nearest match, on the
// first rank of each host.
hvd_status_t config_load(config_t *config, const char *const *env, const log_t *log, err_t *err);
void config_free(config_t *config);
void config_format(const config_t *config, enum knob_id id, char *text, size_t bytes);
// One value: reads `text` as the row's kind into *field, a KNOB_TYPE_ of that kind, which a TEXT
// then owns. `said_as` is the name the user gave it under, for the error's sentence.
hvd_status_t knob_parse(const knob_info_t *info, const char *said_as, const char *text, void *field,
                        err_t *err);
// How many letters must be changed, added or taken away to make one of the other; upper and lower
// case are the same. SIZE_MAX if b is longer than any name of ours.
size_t edit_distance(const char *a, const char *b);
// Names starting with HOROVOD_ that are not knobs of the core but belong to other parts.
bool config_is_foreign_name(const char *name);

#endif
