// SPDX-License-Identifier: Apache-2.0
//
// options.c - the table of options, and reading it from arguments, a file and the environment.
//
// options.def and the knobs of the core that have a flag form one table; help, man page, completion
// and --print-config (help.c) walk the same. A value is kept as text in the form the environment
// has, whatever it came from, and is checked by the parser of its kind (base/config.c). Flags win
// over the file, the file over the environment. The first word that is not an option begins the
// command. The only file of the launcher that reads the environment.
#define _GNU_SOURCE
#include "cli/cli.h"

#include <stdlib.h>
#include <unistd.h>

#define LONGEST_FLAG 64

#define KIND_NAME_BOOL "bool"
#define KIND_NAME_INT "int"
#define KIND_NAME_BYTES "bytes"
#define KIND_NAME_REAL "real"
#define KIND_NAME_TEXT "text"
#define KIND_NAME_CHOICE "choice"

static const option_t own_options[N_OWN_OPTIONS] = {
#define OPTION(kind_, field_, flag_, synonyms_, env_, yaml_, default_, choices_, min_, max_,       \
               unit_, traits_, group_, placeholder_, help_)                                        \
    [OPTION_##field_] = {.info = {.kind = KIND_NAME_##kind_,                                       \
                                  .env = env_,                                                     \
                                  .flag = flag_,                                                   \
                                  .yaml = yaml_,                                                   \
                                  .default_text = default_,                                        \
                                  .choices = choices_,                                             \
                                  .unit = unit_,                                                   \
                                  .help = help_,                                                   \
                                  .min = min_,                                                     \
                                  .max = max_},                                                    \
                         .synonyms = synonyms_,                                                    \
                         .group = group_,                                                          \
                         .placeholder = placeholder_,                                              \
                         .traits = traits_},
#include "cli/options.def"
#undef OPTION
};

static const size_t places[N_OWN_OPTIONS] = {
#define OPTION(kind_, field_, ...) [OPTION_##field_] = offsetof(options_t, field_),
#include "cli/options.def"
#undef OPTION
};

// Flags that are another option with a value.
static const struct {
    const char *flag;
    const char *option;
    const char *value;
} shorthands[] = {
    {"--gloo", "--controller", "gloo"},
    {"--mpi", "--controller", "mpi"},
    {"--jsrun", "--controller", "jsrun"},
    {"--log-with-timestamp", "--log-hide-timestamp", "0"},
    {"--log-without-timestamp", "--log-hide-timestamp", "1"},
};

// Options that cannot be given together.
static const char *const exclusive[][2] = {
    {"--hosts", "--hostfile"},
    {"--hosts", "--host-discovery-script"},
    {"--hostfile", "--host-discovery-script"},
};

option_t option_at(int i)
{
    if (i < N_OWN_OPTIONS) {
        return own_options[i];
    }
    option_t option = {.info = knob_infos[i - N_OWN_OPTIONS],
                       .synonyms = "",
                       .group = "knobs",
                       .placeholder = "X",
                       .traits = EXPORTED};
    if (strcmp(option.info.kind, KIND_NAME_TEXT) == 0) {
        option.placeholder = "TEXT";
    }
    return option;
}

const char *origin_name(origin_t origin)
{
    static const char *const names[] = {"default", "environment", "file", "flag"};
    return names[origin];
}

const char *environment(const char *name)
{
    const char *value = getenv(name);
    return value != NULL && value[0] != '\0' ? value : NULL;
}

const char *option_text(const options_t *options, int i)
{
    return options->texts[i] != NULL ? options->texts[i] : option_at(i).info.default_text;
}

static bool is_kind(const option_t *option, const char *kind)
{
    return strcmp(option->info.kind, kind) == 0;
}

static bool starts_with(const char *text, const char *start)
{
    return strncmp(text, start, strlen(start)) == 0;
}

static bool ends_with(const char *text, const char *end)
{
    size_t bytes = strlen(text), end_bytes = strlen(end);
    return bytes >= end_bytes && strcmp(text + bytes - end_bytes, end) == 0;
}

// --- One value -----------------------------------------------------------------------------------

// Flags and keys named after mebibytes set a number of bytes.
static bool takes_mebibytes(const option_t *option)
{
    return is_kind(option, KIND_NAME_BYTES) && ends_with(option->info.flag, "-mb");
}

static hvd_status_t check_value(const option_t *option, const char *said_as, const char *text,
                                err_t *err)
{
    union {
        bool as_bool;
        int64_t as_int;
        size_t as_bytes;
        double as_real;
        char *as_text;
        int as_choice;
    } value;
    hvd_status_t status = option_parse(option, said_as, text, &value, err);

    if (status == HVD_OK && is_kind(option, KIND_NAME_TEXT)) {
        free(value.as_text);
    }
    return status;
}

// `text` as the environment has it; said_as: the name the user wrote.
static hvd_status_t set_text(options_t *options, int i, const char *text, const char *said_as,
                             origin_t origin, err_t *err)
{
    option_t option = option_at(i);
    bool adds_up =
        (option.traits & LIST) != 0 && options->origins[i] == origin && options->texts[i] != NULL;
    char *copy = NULL;
    hvd_status_t status = check_value(&option, said_as, text, err);
    if (status != HVD_OK) {
        return status;
    }
    if (adds_up) {
        if (asprintf(&copy, "%s,%s", options->texts[i], text) < 0) {
            copy = NULL;
        }
    } else {
        copy = strdup(text);
    }
    if (copy == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for the value of %s", said_as);
    }
    free(options->texts[i]);
    options->texts[i] = copy;
    options->origins[i] = origin;
    return HVD_OK;
}

hvd_status_t options_set(options_t *options, int i, const char *text, const char *said_as,
                         origin_t origin, err_t *err)
{
    option_t option = option_at(i);
    char bytes_text[48];
    if (takes_mebibytes(&option)) {
        if (text[0] == '\0' || text[strspn(text, "0123456789")] != '\0' || strlen(text) > 12) {
            return fail(err, HVD_INVALID_ARGUMENT,
                        "%s must be a whole number of MiB, not \"%.100s\" (%s)", said_as, text,
                        option.info.help);
        }
        snprintf(bytes_text, sizeof bytes_text, "%llu",
                 strtoull(text, NULL, 10) * (unsigned long long)MIB);
        text = bytes_text;
    }
    return set_text(options, i, text, said_as, origin, err);
}

// --- Flags ---------------------------------------------------------------------------------------

typedef struct match {
    int option;
    const char *value; // of a shorthand or a negation; NULL: not told by the flag itself
} match_t;

static bool is_synonym(const char *synonyms, const char *flag, size_t bytes)
{
    while (*synonyms != '\0') {
        size_t word = strcspn(synonyms, " ");
        if (word == bytes && strncmp(synonyms, flag, bytes) == 0) {
            return true;
        }
        synonyms += word + strspn(synonyms + word, " ");
    }
    return false;
}

// The opposite of a BOOL flag: --no-x of --x, --x of --no-x.
static void opposite_of(const char *flag, char text[LONGEST_FLAG])
{
    if (starts_with(flag, "--no-")) {
        snprintf(text, LONGEST_FLAG, "--%s", flag + strlen("--no-"));
    } else {
        snprintf(text, LONGEST_FLAG, "--no-%s", flag + strlen("--"));
    }
}

static bool find_option(const char *flag, size_t bytes, match_t *match_p)
{
    for (int i = 0; i < N_OPTIONS; i++) {
        option_t option = option_at(i);
        char opposite[LONGEST_FLAG];
        if (option.info.flag[0] == '\0') {
            continue;
        }
        bool is_flag =
            strlen(option.info.flag) == bytes && strncmp(option.info.flag, flag, bytes) == 0;
        if (is_flag || is_synonym(option.synonyms, flag, bytes)) {
            *match_p = (match_t){i, is_kind(&option, KIND_NAME_BOOL) ? "1" : NULL};
            return true;
        }
        opposite_of(option.info.flag, opposite);
        if (is_kind(&option, KIND_NAME_BOOL) && strlen(opposite) == bytes &&
            strncmp(opposite, flag, bytes) == 0) {
            *match_p = (match_t){i, "0"};
            return true;
        }
    }
    return false;
}

static bool find_flag(const char *flag, size_t bytes, match_t *match_p)
{
    for (size_t i = 0; i < N_ELEMENTS(shorthands); i++) {
        if (strlen(shorthands[i].flag) == bytes && strncmp(shorthands[i].flag, flag, bytes) == 0) {
            find_option(shorthands[i].option, strlen(shorthands[i].option), match_p);
            match_p->value = shorthands[i].value;
            return true;
        }
    }
    return find_option(flag, bytes, match_p);
}

void keep_nearer(const char *name, const char *candidate, size_t *distance, const char **nearest)
{
    size_t other = edit_distance(name, candidate);
    if (candidate[0] != '\0' && other < *distance) {
        *distance = other;
        *nearest = candidate;
    }
}

static hvd_status_t fail_unknown_flag(const char *word, err_t *err)
{
    char name[LONGEST_FLAG];
    const char *nearest = NULL;
    size_t distance = SIZE_MAX;
    snprintf(name, sizeof name, "%.*s", (int)MIN(strcspn(word, "="), sizeof name - 1), word);
    distance = strlen(name) / 3 + 1; // a third may be wrong
    for (int i = 0; i < N_OPTIONS; i++) {
        option_t option = option_at(i);
        if ((option.traits & HIDDEN) == 0) {
            keep_nearer(name, option.info.flag, &distance, &nearest);
        }
    }
    for (size_t i = 0; i < N_ELEMENTS(shorthands); i++) {
        keep_nearer(name, shorthands[i].flag, &distance, &nearest);
    }
    const char *instead = hint_for_flag(name);
    return fail(err, HVD_INVALID_ARGUMENT,
                instead != NULL   ? "unknown option %s; %s"
                : nearest != NULL ? "unknown option %s, did you mean %s?"
                                  : "unknown option %s; %s --help lists them all",
                name,
                instead != NULL   ? instead
                : nearest != NULL ? nearest
                                  : PROGRAM);
}

// Two flags that say different things about one option; a value may be given again.
static hvd_status_t check_contradiction(const options_t *options, const match_t *match,
                                        const char *flag, err_t *err)
{
    if (match->value != NULL && options->origins[match->option] == BY_FLAG &&
        strcmp(options->texts[match->option], match->value) != 0) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "%s contradicts an earlier flag about %s; give only one of them", flag,
                    option_at(match->option).info.flag);
    }
    return HVD_OK;
}

// One option at argv[at]; how many words it took in *n_words_p.
static hvd_status_t read_flag(options_t *options, char **argv, int n_left, int *n_words_p,
                              err_t *err)
{
    size_t flag_bytes = strcspn(argv[0], "=");
    const char *after = argv[0][flag_bytes] == '=' ? argv[0] + flag_bytes + 1 : NULL;
    char flag[LONGEST_FLAG * 2], two_words[256];
    match_t match;
    *n_words_p = 1;
    if (!find_flag(argv[0], flag_bytes, &match)) {
        return fail_unknown_flag(argv[0], err);
    }
    option_t option = option_at(match.option);
    snprintf(flag, sizeof flag, "%.*s", (int)flag_bytes, argv[0]);
    if (match.value != NULL) {
        if (after != NULL) {
            return fail(err, HVD_INVALID_ARGUMENT, "%s takes no value", flag);
        }
        hvd_status_t status = check_contradiction(options, &match, flag, err);
        return status != HVD_OK ? status
                                : set_text(options, match.option, match.value, flag, BY_FLAG, err);
    }
    int n_needed = (option.traits & TWO_WORDS) != 0 ? 2 : 1;
    if (after == NULL && (option.traits & BARE) == 0) {
        if (n_left <= n_needed) {
            return fail(err, HVD_INVALID_ARGUMENT, "%s needs a value: %s %s", flag, flag,
                        option.placeholder);
        }
        *n_words_p = 1 + n_needed;
        after = argv[1];
        if (n_needed == 2) {
            snprintf(two_words, sizeof two_words, "%s %s", argv[1], argv[2]);
            after = two_words;
        }
    }
    return options_set(options, match.option, after != NULL ? after : "0", flag, BY_FLAG, err);
}

static hvd_status_t read_flags(options_t *options, int argc, char **argv, err_t *err)
{
    int at = 1, n_words;
    while (at < argc && argv[at][0] == '-' && argv[at][1] != '\0') {
        if (strcmp(argv[at], "--") == 0) {
            at++;
            break;
        }
        hvd_status_t status = read_flag(options, argv + at, argc - at, &n_words, err);
        if (status != HVD_OK) {
            return status;
        }
        at += n_words;
    }
    options->command = argv + at;
    options->n_command = argc - at;
    return HVD_OK;
}

// --- All together --------------------------------------------------------------------------------

static const char *env_value(const char *const *env, const char *name)
{
    size_t bytes = strlen(name);
    for (; bytes > 0 && *env != NULL; env++) {
        if (strncmp(*env, name, bytes) == 0 && (*env)[bytes] == '=' && (*env)[bytes + 1] != '\0') {
            return *env + bytes + 1;
        }
    }
    return NULL;
}

// Fills in what neither a flag nor the file has said.
static hvd_status_t read_environment(options_t *options, const char *const *env, err_t *err)
{
    for (int i = 0; i < N_OPTIONS; i++) {
        option_t option = option_at(i);
        const char *value = env_value(env, option.info.env);
        if (options->origins[i] != BY_DEFAULT || value == NULL || option.info.flag[0] == '\0') {
            continue;
        }
        hvd_status_t status = set_text(options, i, value, option.info.env, BY_ENVIRONMENT, err);
        if (status != HVD_OK) {
            return status;
        }
    }
    return HVD_OK;
}

static hvd_status_t parse_knob(const options_t *options, int knob, double *value_p, err_t *err)
{
    return knob_parse(&knob_infos[knob], knob_infos[knob].flag,
                      option_text(options, N_OWN_OPTIONS + knob), value_p, err);
}

// Texts to the typed fields.
static hvd_status_t parse_fields(options_t *options, err_t *err)
{
    for (int i = 0; i < N_OWN_OPTIONS; i++) {
        hvd_status_t status = knob_parse(&own_options[i].info, own_options[i].info.flag,
                                         option_text(options, i), (char *)options + places[i], err);
        if (status != HVD_OK) {
            return status;
        }
    }
    hvd_status_t status;
    TRY(parse_knob(options, KNOB_start_timeout, &options->start_timeout, err), out);
    TRY(parse_knob(options, KNOB_peer_timeout, &options->peer_timeout, err), out);
out:
    return status;
}

static hvd_status_t check_exclusive(const options_t *options, err_t *err)
{
    for (size_t i = 0; i < N_ELEMENTS(exclusive); i++) {
        match_t one, other;
        find_option(exclusive[i][0], strlen(exclusive[i][0]), &one);
        find_option(exclusive[i][1], strlen(exclusive[i][1]), &other);
        if (options->origins[one.option] == BY_FLAG && options->origins[other.option] == BY_FLAG) {
            return fail(err, HVD_INVALID_ARGUMENT,
                        "%s and %s exclude each other; give only one of them", exclusive[i][0],
                        exclusive[i][1]);
        }
    }
    return HVD_OK;
}

// A flag for one way to name hosts silences a file or an environment that names another.
static void settle_hosts(options_t *options)
{
    static const int ways[] = {OPTION_hosts, OPTION_hostfile, OPTION_host_discovery_script};
    origin_t strongest = BY_DEFAULT;
    int winner = -1;
    for (size_t i = 0; i < N_ELEMENTS(ways); i++) {
        if (options->texts[ways[i]] != NULL && options->origins[ways[i]] > strongest) {
            strongest = options->origins[ways[i]];
            winner = ways[i];
        }
    }
    for (size_t i = 0; winner >= 0 && i < N_ELEMENTS(ways); i++) {
        if (ways[i] != winner && options->origins[ways[i]] < strongest) {
            free(options->texts[ways[i]]);
            options->texts[ways[i]] = NULL;
            options->origins[ways[i]] = BY_DEFAULT;
        }
    }
}

hvd_status_t options_read(int argc, char **argv, const char *const *env, options_t *options_p,
                          err_t *err)
{
    options_t options = {0};
    hvd_status_t status;
    env = env != NULL ? env : (const char *const *)environ;
    TRY(read_flags(&options, argc, argv, err), undo);
    const char *file = options.texts[OPTION_config_file];
    file = file != NULL ? file : env_value(env, own_options[OPTION_config_file].info.env);
    if (file != NULL) {
        TRY(config_file_read(file, &options, err), undo);
    }
    TRY(read_environment(&options, env, err), undo);
    TRY(check_exclusive(&options, err), undo);
    settle_hosts(&options);
    TRY(parse_fields(&options, err), undo);
    *options_p = options;
    return HVD_OK;
undo:
    options_free(&options);
    return status;
}

void options_free(options_t *options)
{
    for (int i = 0; i < N_OPTIONS; i++) {
        free(options->texts[i]);
        if (i < N_OWN_OPTIONS && strcmp(own_options[i].info.kind, KIND_NAME_TEXT) == 0) {
            free(*(char **)((char *)options + places[i]));
        }
    }
    *options = (options_t){0};
}

bool options_want_color(const options_t *options)
{
    if (options->color == COLOR_AUTO) {
        return isatty(STDOUT_FILENO) && isatty(STDERR_FILENO) && environment("NO_COLOR") == NULL;
    }
    return options->color == COLOR_ALWAYS;
}

bool options_want_elastic(const options_t *options)
{
    return options->host_discovery_script[0] != '\0' || options->min_num_proc > 0 ||
           options->max_num_proc > 0 || options->reset_limit > 0;
}
