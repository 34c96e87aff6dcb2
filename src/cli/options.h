// SPDX-License-Identifier: Apache-2.0
//
// options.h - the options of horovodrun: read, checked, explained.
//
// options.c owns them; yaml.c reads the configuration file, help.c prints. Read once, by the thread
// that starts; constant from then on.
#ifndef HVD_CLI_OPTIONS_H
#define HVD_CLI_OPTIONS_H

#include "base/base.h"

#include <stdio.h>

enum {
    EXPORTED = 1,
    HIDDEN = 2,
    TWO_WORDS = 4,
    ACTION = 8,
    LIST = 16,
    BARE = 32,
    UNSAID_IS_0 = 64
};

typedef enum origin { BY_DEFAULT, BY_ENVIRONMENT, BY_FILE, BY_FLAG } origin_t;

enum option_id {
#define OPTION(kind, field, ...) OPTION_##field,
#include "cli/options.def"
#undef OPTION
    N_OWN_OPTIONS
};

#define N_OPTIONS (N_OWN_OPTIONS + N_KNOBS) // knobs follow; those without a flag stay unused

typedef struct option {
    knob_info_t info;
    const char *synonyms; // separated by blanks
    const char *group, *placeholder;
    unsigned traits;
} option_t;

// knob_parse(), of what a user said.
static inline hvd_status_t option_parse(const option_t *option, const char *said_as,
                                        const char *text, void *field, err_t *err)
{
    knob_info_t info = option->info;
    info.min = (option->traits & UNSAID_IS_0) != 0 ? 1 : info.min;
    return knob_parse(&info, said_as, text, field, err);
}

typedef struct options {
#define OPTION(kind, field, ...) KNOB_TYPE_##kind field;
#include "cli/options.def"
#undef OPTION
    double start_timeout, peer_timeout; // of the knobs, in seconds
    char *texts[N_OPTIONS];             // as the environment would have it; NULL: default
    origin_t origins[N_OPTIONS];
    char **command; // points into argv
    int n_command;
} options_t;

enum { CONTROLLER_AUTO, CONTROLLER_GLOO, CONTROLLER_MPI, CONTROLLER_JSRUN };
enum { COLOR_AUTO, COLOR_ALWAYS, COLOR_NEVER };
enum { COMPLETION_NONE, COMPLETION_BASH, COMPLETION_ZSH, COMPLETION_FISH };

// Row i; one without a flag (an inner knob) is not an option.
option_t option_at(int i);
const char *origin_name(origin_t origin);
// Reads environment, configuration file and arguments, and checks them. env NULL: the process's.
hvd_status_t options_read(int argc, char **argv, const char *const *env, options_t *options_p,
                          err_t *err);
void options_free(options_t *options);
// From a flag or a key, which is said_as; mebibytes become bytes.
hvd_status_t options_set(options_t *options, int i, const char *text, const char *said_as,
                         origin_t origin, err_t *err);
// For "did you mean": the candidate, if it is nearer to the name.
void keep_nearer(const char *name, const char *candidate, size_t *distance, const char **nearest);
// Value of an option as text, default included.
const char *option_text(const options_t *options, int i);
bool options_want_color(const options_t *options);
bool options_want_elastic(const options_t *options);
// A variable of the process environment that is not an option: NULL if unset or empty.
const char *environment(const char *name);

hvd_status_t config_file_read(const char *path, options_t *options, err_t *err); // yaml.c

// help.c
void help_print(FILE *out);
void man_print(FILE *out);
void completion_print(int shell, FILE *out);
void config_print(const options_t *options, FILE *out);

#endif
