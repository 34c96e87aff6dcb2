// SPDX-License-Identifier: Apache-2.0
//
// config.c - knobs: the only place that reads the environment.
//
// knobs.def is expanded into a table of descriptions and a table of (kind, place in config_t); a
// kind knows how to parse, print and describe its values. Parsing is strict: the whole value must
// be understood and in range, or loading fails with the knob, the value and what is allowed. An
// empty value counts as not set. Numbers are read and printed in the C locale whatever the program
// has chosen. A HOROVOD_ name nobody knows gets a warning with the nearest name that exists.
//
// Cost: knobs x environment string compares, once. Any thread, as long as no other changes the
// environment meanwhile. A loaded config_t owns its texts until config_free().
#define _GNU_SOURCE
#include "base/base.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>
#include <unistd.h>

#define NAME_PREFIX "HOROVOD_"
#define NAME_PREFIX_BYTES (sizeof(NAME_PREFIX) - 1)
#define LONGEST_NAME ((size_t)64) // longer names are not compared with ours
#define SHOWN_VALUE_BYTES 200     // of a wrong value, in its error sentence
#define DIGITS_OF_DOUBLE 17       // enough to tell any two apart

typedef struct knob_kind {
    // Writes *field only on success.
    hvd_status_t (*parse)(const knob_info_t *info, const char *text, void *field);
    void (*format)(const knob_info_t *info, const void *field, char *text, size_t bytes);
    void (*allowed)(const knob_info_t *info, char *text, size_t bytes);
} knob_kind_t;

// --- Numbers in the C locale --------------------------------------------------------------------

// A program may have chosen a decimal comma. glibc's C locale is a constant: nothing to free.
static locale_t c_locale(void)
{
    return newlocale(LC_ALL_MASK, "C", (locale_t)0);
}

static bool parse_int64(const char *text, int64_t *value_p)
{
    char *end;
    if (!isdigit((unsigned char)text[text[0] == '-' || text[0] == '+'])) {
        return false;
    }
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (errno != 0 || *end != '\0') {
        return false;
    }
    *value_p = value;
    return true;
}

static bool parse_double(const char *text, double *value_p)
{
    char *end;
    // Leaves out what strtod also takes: blanks in front, hexadecimal, infinity, nan.
    if (text[0] == '\0' || text[strspn(text, "0123456789.eE+-")] != '\0') {
        return false;
    }
    errno = 0;
    double value = strtod_l(text, &end, c_locale());
    if (errno != 0 || *end != '\0') {
        return false;
    }
    *value_p = value;
    return true;
}

// With as few digits as read back as the same number.
static void format_double(double value, char *text, size_t bytes)
{
    locale_t previous = uselocale(c_locale());
    for (int digits = 6; digits <= DIGITS_OF_DOUBLE; digits++) {
        snprintf(text, bytes, "%.*g", digits, value);
        if (strtod(text, NULL) == value) {
            break;
        }
    }
    uselocale(previous);
}

static void describe_range(const knob_info_t *info, const char *what, char *text, size_t bytes)
{
    char min[32], max[32];
    format_double(info->min, min, sizeof min);
    format_double(info->max, max, sizeof max);
    snprintf(text, bytes, "%s from %s to %s", what, min, max);
}

static bool in_range(const knob_info_t *info, double value)
{
    return value >= info->min && value <= info->max;
}

// --- Kinds --------------------------------------------------------------------------------------

static hvd_status_t bool_parse(const knob_info_t *info, const char *text, void *field)
{
    static const char *const words[][2] = {{"false", "true"}, {"no", "yes"}, {"off", "on"}};
    bool *value_p = field;
    int64_t number;
    (void)info;
    if (parse_int64(text, &number)) {
        *value_p = number > 0;
        return HVD_OK;
    }
    for (size_t i = 0; i < N_ELEMENTS(words); i++) {
        for (int value = 0; value < 2; value++) {
            if (strcasecmp(text, words[i][value]) == 0) {
                *value_p = value;
                return HVD_OK;
            }
        }
    }
    return HVD_INVALID_ARGUMENT;
}

static void bool_format(const knob_info_t *info, const void *field, char *text, size_t bytes)
{
    (void)info;
    snprintf(text, bytes, "%d", *(const bool *)field);
}

static void bool_allowed(const knob_info_t *info, char *text, size_t bytes)
{
    (void)info;
    snprintf(text, bytes, "0 or 1, true or false, yes or no, on or off");
}

static hvd_status_t int_parse(const knob_info_t *info, const char *text, void *field)
{
    int64_t value;
    if (!parse_int64(text, &value) || !in_range(info, (double)value)) {
        return HVD_INVALID_ARGUMENT;
    }
    *(int64_t *)field = value;
    return HVD_OK;
}

static void int_format(const knob_info_t *info, const void *field, char *text, size_t bytes)
{
    (void)info;
    snprintf(text, bytes, "%lld", (long long)*(const int64_t *)field);
}

static void int_allowed(const knob_info_t *info, char *text, size_t bytes)
{
    describe_range(info, "a whole number", text, bytes);
}

static hvd_status_t bytes_parse(const knob_info_t *info, const char *text, void *field)
{
    static const char suffixes[] = "KMG"; // each 1024 times the one before
    char *end;
    if (!isdigit((unsigned char)text[0])) {
        return HVD_INVALID_ARGUMENT;
    }
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    const char *suffix = *end == '\0' ? NULL : strchr(suffixes, toupper((unsigned char)*end));
    unsigned shift = suffix == NULL ? 0 : 10 * (unsigned)(suffix - suffixes + 1);

    end += suffix != NULL;
    if (errno != 0 || *end != '\0' || value > ULLONG_MAX >> shift || value << shift > SIZE_MAX ||
        !in_range(info, (double)(value << shift))) {
        return HVD_INVALID_ARGUMENT;
    }
    *(size_t *)field = (size_t)(value << shift);
    return HVD_OK;
}

static void bytes_format(const knob_info_t *info, const void *field, char *text, size_t bytes)
{
    (void)info;
    snprintf(text, bytes, "%zu", *(const size_t *)field);
}

static void bytes_allowed(const knob_info_t *info, char *text, size_t bytes)
{
    describe_range(info, "a number of bytes (K, M and G may follow it)", text, bytes);
}

static hvd_status_t real_parse(const knob_info_t *info, const char *text, void *field)
{
    double value;
    if (!parse_double(text, &value) || !in_range(info, value)) {
        return HVD_INVALID_ARGUMENT;
    }
    *(double *)field = value;
    return HVD_OK;
}

static void real_format(const knob_info_t *info, const void *field, char *text, size_t bytes)
{
    (void)info;
    format_double(*(const double *)field, text, bytes);
}

static void real_allowed(const knob_info_t *info, char *text, size_t bytes)
{
    describe_range(info, "a number", text, bytes);
}

static hvd_status_t text_parse(const knob_info_t *info, const char *text, void *field)
{
    char *copy = strdup(text);
    (void)info;
    if (copy == NULL) {
        return HVD_NO_MEMORY;
    }
    *(char **)field = copy;
    return HVD_OK;
}

static void text_format(const knob_info_t *info, const void *field, char *text, size_t bytes)
{
    (void)info;
    snprintf(text, bytes, "%s", *(char *const *)field);
}

static void text_allowed(const knob_info_t *info, char *text, size_t bytes)
{
    (void)info;
    snprintf(text, bytes, "any text");
}

// Choice number `index` of "a|b|c", or NULL behind the last.
static const char *choice_at(const char *choices, int index, size_t *bytes_p)
{
    const char *choice = choices;
    for (; index > 0 && choice != NULL; index--) {
        const char *bar = strchr(choice, '|');
        choice = bar == NULL ? NULL : bar + 1;
    }
    if (choice != NULL) {
        *bytes_p = strcspn(choice, "|");
    }
    return choice;
}

static hvd_status_t choice_parse(const knob_info_t *info, const char *text, void *field)
{
    const char *choice;
    size_t bytes = 0;
    for (int i = 0; (choice = choice_at(info->choices, i, &bytes)) != NULL; i++) {
        if (strlen(text) == bytes && strncasecmp(text, choice, bytes) == 0) {
            *(int *)field = i;
            return HVD_OK;
        }
    }
    return HVD_INVALID_ARGUMENT;
}

static void choice_format(const knob_info_t *info, const void *field, char *text, size_t bytes)
{
    size_t choice_bytes = 0;
    const char *choice = choice_at(info->choices, *(const int *)field, &choice_bytes);
    snprintf(text, bytes, "%.*s", (int)choice_bytes, choice == NULL ? "" : choice);
}

static void choice_allowed(const knob_info_t *info, char *text, size_t bytes)
{
    snprintf(text, bytes, "one of %s", info->choices);
}

static const knob_kind_t kind_of_BOOL = {bool_parse, bool_format, bool_allowed};
static const knob_kind_t kind_of_INT = {int_parse, int_format, int_allowed};
static const knob_kind_t kind_of_BYTES = {bytes_parse, bytes_format, bytes_allowed};
static const knob_kind_t kind_of_REAL = {real_parse, real_format, real_allowed};
static const knob_kind_t kind_of_TEXT = {text_parse, text_format, text_allowed};
static const knob_kind_t kind_of_CHOICE = {choice_parse, choice_format, choice_allowed};

// --- Tables from knobs.def ----------------------------------------------------------------------

#define KIND_NAME_BOOL "bool"
#define KIND_NAME_INT "int"
#define KIND_NAME_BYTES "bytes"
#define KIND_NAME_REAL "real"
#define KIND_NAME_TEXT "text"
#define KIND_NAME_CHOICE "choice"

const knob_info_t knob_infos[N_KNOBS] = {
#define KNOB(kind_, field_, env_, flag_, yaml_, default_, choices_, min_, max_, unit_, help_)      \
    [KNOB_##field_] = {.kind = KIND_NAME_##kind_,                                                  \
                       .env = env_,                                                                \
                       .flag = flag_,                                                              \
                       .yaml = yaml_,                                                              \
                       .default_text = default_,                                                   \
                       .choices = choices_,                                                        \
                       .unit = unit_,                                                              \
                       .help = help_,                                                              \
                       .min = min_,                                                                \
                       .max = max_},
#include "base/knobs.def"
#undef KNOB
};

static const struct {
    const knob_kind_t *kind;
    size_t offset;
} places[N_KNOBS] = {
#define KNOB(kind_, field_, ...) [KNOB_##field_] = {&kind_of_##kind_, offsetof(config_t, field_)},
#include "base/knobs.def"
#undef KNOB
};

const char *const launch_var_names[N_LAUNCH_VARS] = {
#define LAUNCH_VAR(name) [SEEN_##name] = #name,
#include "base/launchers.def"
#undef LAUNCH_VAR
};

// Names that other parts read, or that mattered to other builds; a * stands for any ending.
static const char *const foreign_names[] = {
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE",
    "HOROVOD_ALLOW_MIXED_GPU_IMPL",
    "HOROVOD_AUTOTUNE*",
    "HOROVOD_BATCH_D2D_MEMCOPIES",
    "HOROVOD_BUILD_*",
    "HOROVOD_CCL_*",
    "HOROVOD_CMAKE",
    "HOROVOD_DEBUG",
    "HOROVOD_DISABLE_NVTX_RANGES",
    "HOROVOD_ELASTIC",
    "HOROVOD_ELASTIC_*",
    "HOROVOD_ENABLE_*",
    "HOROVOD_GLOO_RENDEZVOUS_*",
    "HOROVOD_GPU_ALL*",
    "HOROVOD_GPU_BROADCAST",
    "HOROVOD_GPU_REDUCESCATTER",
    "HOROVOD_LOCAL_VERSION",
    "HOROVOD_MPI_THREADS_DISABLE",
    "HOROVOD_NCCL_HOME",
    "HOROVOD_NCCL_INCLUDE",
    "HOROVOD_NCCL_LIB",
    "HOROVOD_NCCL_LINK",
    "HOROVOD_NUM_NCCL_STREAMS",
    "HOROVOD_NVTX_INCLUDE",
    "HOROVOD_RUN_*",
    "HOROVOD_SKIP_COMPILE",
    "HOROVOD_SPARK_*",
    "HOROVOD_VERSION",
    "HOROVOD_WITH*",
};

// Settings that work with other builds and do nothing here; nobody shall think they do. The first
// row with a name that fits counts. NULL as value: any but one that switches off; as advice: not
// worth a word.
static const struct idle_row {
    const char *names[5], *value, *advice;
} idle_rows[] = {
    // NCCL reads its own; others say how the original is built.
    {.names = {"NCCL_*", "HOROVOD_NCCL*", "HOROVOD_GPU*"}},
    {.names = {"HOROVOD_AUTOTUNE*"},
     .advice = "there is no autotuning: set HOROVOD_FUSION_THRESHOLD, HOROVOD_SEGMENT_BYTES or "
               "HOROVOD_ALGORITHM by hand"},
    {.names = {"HOROVOD_ENABLE_XLA_OPS"},
     .advice = "XLA cannot compile collectives: use jit_compile=False in model.compile() and "
               "tf.function"},
    {.names = {"HOROVOD_CPU_OPERATIONS"},
     .value = "ccl",
     .advice = "oneCCL is not supported: Horovod's own collectives are used; set it to MPI for "
               "those of mpirun"},
    {.names = {"CCL_*", "HOROVOD_CCL_*"},
     .advice = "oneCCL is not supported: use HOROVOD_TRANSPORTS and HOROVOD_ALGORITHM instead"},
    {.names = {"DDL_OPTIONS"}, .advice = "DDL is not supported: unset it"},
    {.names = {"HOROVOD_TORUS_ALLREDUCE", "HOROVOD_HIERARCHICAL_*"},
     .advice = "algorithms on two levels are chosen where they are faster: HOROVOD_ALGORITHM "
               "forces another"},
    {.names = {"HOROVOD_NUM_NCCL_STREAMS"},
     .advice = "one stream has all collectives of NCCL, in one order on all ranks"},
};

// --- Loading ------------------------------------------------------------------------------------

static void *field_of(config_t *config, enum knob_id id)
{
    return (char *)config + places[id].offset;
}

// The value of a name as getenv would give it; NULL if it is not there or empty.
static const char *env_value(const char *const *env, const char *name)
{
    size_t name_bytes = strlen(name);
    for (; *env != NULL; env++) {
        if (strncmp(*env, name, name_bytes) == 0 && (*env)[name_bytes] == '=') {
            const char *value = *env + name_bytes + 1;
            return *value == '\0' ? NULL : value;
        }
    }
    return NULL;
}

static const knob_kind_t *kind_of(const knob_info_t *info)
{
    static const struct {
        const char *name;
        const knob_kind_t *kind;
    } kinds[] = {
        {KIND_NAME_BOOL, &kind_of_BOOL},     {KIND_NAME_INT, &kind_of_INT},
        {KIND_NAME_BYTES, &kind_of_BYTES},   {KIND_NAME_REAL, &kind_of_REAL},
        {KIND_NAME_CHOICE, &kind_of_CHOICE},
    };

    for (size_t i = 0; i < N_ELEMENTS(kinds); i++) {
        if (strcmp(info->kind, kinds[i].name) == 0) {
            return kinds[i].kind;
        }
    }
    return &kind_of_TEXT;
}

hvd_status_t knob_parse(const knob_info_t *info, const char *said_as, const char *text, void *field,
                        err_t *err)
{
    const knob_kind_t *kind = kind_of(info);
    hvd_status_t status = kind->parse(info, text, field);
    char allowed[256];
    if (status == HVD_INVALID_ARGUMENT) {
        kind->allowed(info, allowed, sizeof allowed);
        return fail(err, status, "%s must be %s%s%s, not \"%.*s\" (%s)", said_as, allowed,
                    info->unit[0] != '\0' ? ", in " : "", info->unit, SHOWN_VALUE_BYTES, text,
                    info->help);
    }
    if (status != HVD_OK) {
        return fail(err, status, "no memory for the value of %s", said_as);
    }
    return HVD_OK;
}

static hvd_status_t load_knob(config_t *config, enum knob_id id, const char *const *env, err_t *err)
{
    const knob_info_t *info = &knob_infos[id];
    const char *from_env = env_value(env, info->env);
    config->origin[id] = from_env != NULL ? FROM_ENVIRONMENT : FROM_DEFAULT;
    return knob_parse(info, info->env, from_env != NULL ? from_env : info->default_text,
                      field_of(config, id), err);
}

// The environment may change later: the texts are ours.
static hvd_status_t load_launch_vars(config_t *config, const char *const *env, err_t *err)
{
    for (int i = 0; i < N_LAUNCH_VARS; i++) {
        const char *value = env_value(env, launch_var_names[i]);
        config->seen[i] = value != NULL ? strdup(value) : NULL;
        if (value != NULL && config->seen[i] == NULL) {
            return fail(err, HVD_NO_MEMORY, "no memory for the value of %s", launch_var_names[i]);
        }
    }
    return HVD_OK;
}

// --- Names nobody knows -------------------------------------------------------------------------

size_t edit_distance(const char *a, const char *b)
{
    size_t row[LONGEST_NAME + 1];
    size_t a_bytes = strlen(a), b_bytes = strlen(b);
    if (b_bytes > LONGEST_NAME) {
        return SIZE_MAX;
    }
    for (size_t j = 0; j <= b_bytes; j++) {
        row[j] = j;
    }
    for (size_t i = 1; i <= a_bytes; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b_bytes; j++) {
            bool same = toupper((unsigned char)a[i - 1]) == toupper((unsigned char)b[j - 1]);
            size_t changed = diagonal + !same;
            diagonal = row[j];
            row[j] = MIN(changed, MIN(row[j], row[j - 1]) + 1);
        }
    }
    return row[b_bytes];
}

// Both names start with NAME_PREFIX.
static void keep_nearer(const char *name, const char *candidate, size_t *distance,
                        const char **nearest)
{
    size_t other = edit_distance(name + NAME_PREFIX_BYTES, candidate + NAME_PREFIX_BYTES);
    if (other < *distance) {
        *distance = other;
        *nearest = candidate;
    }
}

// The known name that `name` most likely meant, or NULL if none is near.
static const char *nearest_name(const char *name)
{
    const char *nearest = NULL;
    size_t distance = (strlen(name) - NAME_PREFIX_BYTES) / 3 + 1; // a third may be wrong
    for (size_t i = 0; i < N_KNOBS; i++) {
        keep_nearer(name, knob_infos[i].env, &distance, &nearest);
    }
    for (size_t i = 0; i < N_ELEMENTS(foreign_names); i++) {
        if (strchr(foreign_names[i], '*') == NULL) {
            keep_nearer(name, foreign_names[i], &distance, &nearest);
        }
    }
    return nearest;
}

// Does a name, which ends with \0 or =, fit a pattern, which may end with *?
static bool fits(const char *name, const char *pattern)
{
    size_t bytes = strcspn(pattern, "*");
    return strncmp(name, pattern, bytes) == 0 &&
           (pattern[bytes] == '*' || name[bytes] == '\0' || name[bytes] == '=');
}

bool config_is_foreign_name(const char *name)
{
    for (size_t i = 0; i < N_ELEMENTS(foreign_names); i++) {
        if (fits(name, foreign_names[i])) {
            return true;
        }
    }
    return false;
}

static bool is_knob_name(const char *name)
{
    for (size_t i = 0; i < N_KNOBS; i++) {
        if (strcmp(name, knob_infos[i].env) == 0) {
            return true;
        }
    }
    return false;
}

// `entry` is NAME=value. All ranks of a host see the same names: the first one warns, the others
// only say it when asked for more.
static void warn_if_unknown(const char *entry, int64_t local_rank, const log_t *log)
{
    log_level_t level = local_rank == 0 ? LOG_WARN : LOG_DEBUG;
    char name[LONGEST_NAME + 1];
    size_t name_bytes = strcspn(entry, "=");
    if (strncmp(entry, NAME_PREFIX, NAME_PREFIX_BYTES) != 0 || name_bytes > LONGEST_NAME) {
        return;
    }
    memcpy(name, entry, name_bytes);
    name[name_bytes] = '\0';
    if (is_knob_name(name) || config_is_foreign_name(name)) {
        return;
    }
    const char *nearest = nearest_name(name);
    if (nearest != NULL) {
        log_at(log, level, "config", "%s is not a known setting and is ignored; did you mean %s?",
               name, nearest);
    } else {
        log_at(log, level, "config", "%s is not a known setting and is ignored", name);
    }
}

// --- Settings that do nothing -------------------------------------------------------------------

static bool switches_off(const char *value)
{
    static const char *const words[] = {"", "0", "false", "no", "off"};
    for (size_t i = 0; i < N_ELEMENTS(words); i++) {
        if (strcasecmp(value, words[i]) == 0) {
            return true;
        }
    }
    return false;
}

// `entry` is NAME=value.
static const struct idle_row *idle_row_of(const char *entry)
{
    const char *value = entry + strcspn(entry, "=");
    value += *value == '=';
    for (const struct idle_row *row = idle_rows; row < idle_rows + N_ELEMENTS(idle_rows); row++) {
        for (size_t i = 0; i < N_ELEMENTS(row->names) && row->names[i] != NULL; i++) {
            if (fits(entry, row->names[i]) &&
                (row->value != NULL ? strcasecmp(value, row->value) == 0 : !switches_off(value))) {
                return row;
            }
        }
    }
    return NULL;
}

// One sentence for all of them: names with the same advice stand together before it.
static hvd_status_t load_idle(config_t *config, const char *const *env, err_t *err)
{
    buf_t text = {0};
    for (const struct idle_row *row = idle_rows; row < idle_rows + N_ELEMENTS(idle_rows); row++) {
        size_t n_names = 0;
        for (const char *const *entry = env; row->advice != NULL && *entry != NULL; entry++) {
            if (idle_row_of(*entry) == row) {
                const char *before = n_names++ > 0 ? ", " : text.len > 0 ? "; " : "";
                buf_printf(&text, "%s%.*s", before, (int)strcspn(*entry, "="), *entry);
            }
        }
        if (n_names > 0) {
            buf_printf(&text, " (%s)", row->advice);
        }
    }
    if (text.len > 0) {
        buf_append(&text, "", 1);
    }
    if (text.failed) {
        buf_free(&text);
        return fail(err, HVD_NO_MEMORY, "no memory for a warning about the environment");
    }
    config->idle = (char *)text.data; // NULL if nothing was said
    return HVD_OK;
}

// --- Entrances ----------------------------------------------------------------------------------

hvd_status_t config_load(config_t *config, const char *const *env, const log_t *log, err_t *err)
{
    config_t loaded = {0};
    hvd_status_t status = HVD_OK;
    if (env == NULL) {
        env = (const char *const *)environ;
    }
    for (int id = 0; id < N_KNOBS && status == HVD_OK; id++) {
        status = load_knob(&loaded, (enum knob_id)id, env, err);
    }
    if (status == HVD_OK) {
        status = load_launch_vars(&loaded, env, err);
    }
    if (status == HVD_OK) {
        status = load_idle(&loaded, env, err);
    }
    if (status != HVD_OK) {
        config_free(&loaded);
        return status;
    }
    for (; *env != NULL; env++) {
        warn_if_unknown(*env, loaded.local_rank, log);
    }
    *config = loaded;
    return HVD_OK;
}

void config_free(config_t *config)
{
    for (int id = 0; id < N_KNOBS; id++) {
        if (places[id].kind == &kind_of_TEXT) {
            free(*(char **)field_of(config, (enum knob_id)id));
        }
    }
    for (int i = 0; i < N_LAUNCH_VARS; i++) {
        free(config->seen[i]);
    }
    free(config->idle);
    *config = (config_t){0};
}

void config_format(const config_t *config, enum knob_id id, char *text, size_t bytes)
{
    places[id].kind->format(&knob_infos[id], (const char *)config + places[id].offset, text, bytes);
}
