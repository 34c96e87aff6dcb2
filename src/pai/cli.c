// SPDX-License-Identifier: Apache-2.0
//
// cli.c - `horovodrun pai init|check|submit|status|logs|stop`: what was asked for, with what.
//
// Commands and options are rows (options.def); help comes from the same rows. A job that init
// writes and a job that submit sends are held against the rules first (check.c), so what is wrong
// is told with its place before a server is asked. Results go to stdout, everything else to stderr.
#include "pai/internal.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#define KIND_NAME_BOOL "bool"
#define KIND_NAME_INT "int"
#define KIND_NAME_REAL "real"
#define KIND_NAME_TEXT "text"
#define KIND_NAME_CHOICE "choice"

typedef struct pai_row {
    knob_info_t info;
    unsigned verbs;
    const char *placeholder;
    size_t place;
} pai_row_t;

static const pai_row_t rows[] = {
#define PAI_OPTION(kind_, field_, flag_, env_, default_, choices_, min_, max_, verbs_,             \
                   placeholder_, help_)                                                            \
    {.info = {.kind = KIND_NAME_##kind_,                                                           \
              .env = env_,                                                                         \
              .flag = flag_,                                                                       \
              .yaml = "",                                                                          \
              .default_text = default_,                                                            \
              .choices = choices_,                                                                 \
              .unit = "",                                                                          \
              .help = help_,                                                                       \
              .min = min_,                                                                         \
              .max = max_},                                                                        \
     .verbs = verbs_,                                                                              \
     .placeholder = placeholder_,                                                                  \
     .place = offsetof(pai_options_t, field_)},
#include "pai/options.def"
#undef PAI_OPTION
};

// --- Commands ------------------------------------------------------------------------------------

static void print_findings(const pai_findings_t *findings, FILE *out)
{
    if (findings->text.len > 0) {
        fwrite(findings->text.data, 1, findings->text.len, out);
    }
}

// Reads and checks; true: nothing is wrong. What there is to say has been said; *n_warnings_p may
// be NULL.
static bool read_job(const pai_options_t *options, const char *file, buf_t *text,
                     pai_document_t **document_p, pai_format_t *format_p, int *n_warnings_p)
{
    err_t err = {0};
    if ((text->len == 0 && pai_file_read(file, text, &err) != HVD_OK) ||
        pai_document_read((const char *)text->data, text->len, file, document_p, &err) != HVD_OK) {
        say("%s", err.text);
        return false;
    }
    pai_findings_t findings = {.file = file};
    *format_p = options->format == PAI_AUTO ? pai_format_of(*document_p, file)
                                            : (pai_format_t)options->format;
    if (*format_p == PAI_V1 &&
        pai_json_check((const char *)text->data, text->len, file, &err) != HVD_OK) {
        say("%s", err.text);
        pai_document_free(*document_p);
        *document_p = NULL;
        return false;
    }
    pai_check(*document_p, *format_p, &findings);
    print_findings(&findings, stderr);
    buf_free(&findings.text);
    if (n_warnings_p != NULL) {
        *n_warnings_p = findings.n_warnings;
    }
    if (findings.n_errors > 0) {
        say("%s: %d problem%s found", file, findings.n_errors, findings.n_errors > 1 ? "s" : "");
        pai_document_free(*document_p);
        *document_p = NULL;
    }
    return findings.n_errors == 0;
}

static int write_job(const char *path, const buf_t *text)
{
    FILE *file = path[0] != '\0' ? fopen(path, "we") : stdout;
    bool is_written =
        file != NULL && fwrite(text->data, 1, text->len, file) == text->len && fflush(file) == 0;
    if (!is_written) {
        say("cannot write %s: %s", path[0] != '\0' ? path : "to stdout", strerror(errno));
    }
    if (file != NULL && file != stdout) {
        fclose(file);
    }
    return is_written ? 0 : EXIT_OUTPUT;
}

static int init(const pai_options_t *options)
{
    pai_format_t format = options->format == PAI_AUTO ? PAI_V2 : (pai_format_t)options->format;
    pai_document_t *document = NULL;
    buf_t text = {0};
    int code = EXIT_USAGE;
    if (options->image[0] == '\0' || options->n_words == 0) {
        say("the image or the command is missing, as in: %s pai init --image IMAGE --workers 3 "
            "python train.py",
            PROGRAM);
        return EXIT_USAGE;
    }
    pai_write(options, format, &text);
    if (text.failed) {
        say("cannot write the job: its names and its command must be UTF-8");
    } else if (read_job(options, "the job", &text, &document, &format, NULL)) {
        code = write_job(options->output, &text);
    }
    pai_document_free(document);
    buf_free(&text);
    return code;
}

static int check_file(const pai_options_t *options, const char *file)
{
    pai_document_t *document = NULL;
    pai_format_t format = PAI_AUTO;
    buf_t text = {0};
    int n_warnings = 0;
    bool is_right = read_job(options, file, &text, &document, &format, &n_warnings);
    const char *form = format == PAI_V1 ? "v1" : "v2";
    if (is_right && n_warnings == 0) {
        fprintf(stdout, "%s: no problems found in this %s job\n", file, form);
    } else if (is_right) {
        fprintf(stdout, "%s: %d warning%s, no errors in this %s job\n", file, n_warnings,
                n_warnings > 1 ? "s" : "", form);
    }
    pai_document_free(document);
    buf_free(&text);
    return is_right ? 0 : EXIT_USAGE;
}

static int check(const pai_options_t *options)
{
    int code = 0;
    for (int i = 0; i < options->n_words; i++) {
        int one = check_file(options, options->words[i]);
        code = code != 0 ? code : one;
    }
    return code;
}

static int submit(const pai_options_t *options)
{
    pai_document_t *document = NULL;
    pai_format_t format = PAI_AUTO;
    buf_t text = {0};
    int code = EXIT_USAGE;
    if (read_job(options, options->words[0], &text, &document, &format, NULL)) {
        code = pai_submit(options, (const char *)text.data, format, document);
    }
    pai_document_free(document);
    buf_free(&text);
    return code;
}

static const struct {
    const char *name;
    unsigned verb;
    int (*act)(const pai_options_t *);
    int min_words, max_words;
    const char *words, *help;
} verbs[] = {
    {"init", INIT, init, 0, 100000, "COMMAND...", "write a job file: one master and some workers"},
    {"check", CHECK, check, 1, 100000, "FILE...", "check job files and report every problem"},
    {"submit", SUBMIT, submit, 1, 1, "FILE", "check a job file and submit it to the cluster"},
    {"status", STATUS, pai_status, 1, 1, "[USER~]JOB", "show the state of a job and its tasks"},
    {"logs", LOGS, pai_logs, 1, 1, "[USER~]JOB", "print the logs of a job's tasks"},
    {"stop", STOP, pai_stop, 1, 1, "[USER~]JOB", "stop a job"},
};

// --- Help ----------------------------------------------------------------------------------------

static void print_help(FILE *out)
{
    fprintf(out, "usage: %s pai COMMAND [options] ...\n\n", PROGRAM);
    for (size_t i = 0; i < N_ELEMENTS(verbs); i++) {
        fprintf(out, "  %-7s %-12s %s\n", verbs[i].name, verbs[i].words, verbs[i].help);
    }
    for (size_t i = 0; i < N_ELEMENTS(verbs); i++) {
        fprintf(out, "\noptions of %s:\n", verbs[i].name);
        for (size_t r = 0; r < N_ELEMENTS(rows); r++) {
            const knob_info_t *info = &rows[r].info;
            char flag[64];
            snprintf(flag, sizeof flag, "%s %s", info->flag, rows[r].placeholder);
            if ((rows[r].verbs & verbs[i].verb) != 0) {
                fprintf(out, "  %-24s %s%s%s\n", flag, info->help, info->env[0] != '\0' ? "; " : "",
                        info->env);
            }
        }
    }
}

// --- Options -------------------------------------------------------------------------------------

static hvd_status_t set(const pai_row_t *row, const char *said_as, const char *text,
                        pai_options_t *options, err_t *err)
{
    void *place = (char *)options + row->place;
    if (strcmp(row->info.kind, KIND_NAME_TEXT) == 0) {
        free(*(char **)place);
        *(char **)place = NULL;
    }
    return knob_parse(&row->info, said_as, text, place, err);
}

static void free_options(pai_options_t *options)
{
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        if (strcmp(rows[i].info.kind, KIND_NAME_TEXT) == 0) {
            free(*(char **)((char *)options + rows[i].place));
        }
    }
}

static const pai_row_t *find_row(const char *flag, size_t bytes, unsigned verb)
{
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        if ((rows[i].verbs & verb) != 0 && strlen(rows[i].info.flag) == bytes &&
            strncmp(rows[i].info.flag, flag, bytes) == 0) {
            return &rows[i];
        }
    }
    return NULL;
}

static hvd_status_t fail_unknown(const char *word, unsigned verb, const char *verb_name, err_t *err)
{
    char name[64];
    const char *meant = NULL;
    snprintf(name, sizeof name, "%.*s", (int)MIN(strcspn(word, "="), sizeof name - 1), word);
    size_t nearest = strlen(name) / 3 + 1;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        size_t distance = edit_distance(name, rows[i].info.flag);
        if ((rows[i].verbs & verb) != 0 && distance < nearest) {
            nearest = distance;
            meant = rows[i].info.flag;
        }
    }
    return fail(err, HVD_INVALID_ARGUMENT,
                "pai %s has no option %s%s%s%s %s pai --help lists all of them", verb_name, name,
                meant != NULL ? "; did you mean " : ";", meant != NULL ? meant : "",
                meant != NULL ? "?" : "", PROGRAM);
}

static hvd_status_t read_flags(int argc, char **argv, unsigned verb, const char *verb_name,
                               pai_options_t *options, err_t *err)
{
    int at = 0;
    while (at < argc && argv[at][0] == '-' && strcmp(argv[at], "--") != 0) {
        size_t bytes = strcspn(argv[at], "=");
        const pai_row_t *row = find_row(argv[at], bytes, verb);
        const char *value = argv[at][bytes] == '=' ? argv[at] + bytes + 1 : NULL;
        if (row == NULL) {
            return fail_unknown(argv[at], verb, verb_name, err);
        }
        at++;
        if (value == NULL && strcmp(row->info.kind, KIND_NAME_BOOL) == 0) {
            value = "1";
        } else if (value == NULL) {
            if (at >= argc) {
                return fail(err, HVD_INVALID_ARGUMENT, "%s needs a value: %s %s", row->info.flag,
                            row->info.flag, row->placeholder);
            }
            value = argv[at++];
        }
        hvd_status_t status = set(row, row->info.flag, value, options, err);
        if (status != HVD_OK) {
            return status;
        }
    }
    at += at < argc && strcmp(argv[at], "--") == 0;
    options->words = argv + at;
    options->n_words = argc - at;
    return HVD_OK;
}

static hvd_status_t read_options(int argc, char **argv, unsigned verb, const char *verb_name,
                                 pai_options_t *options, err_t *err)
{
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        const knob_info_t *info = &rows[i].info;
        const char *said = info->env[0] != '\0' ? environment(info->env) : NULL;
        hvd_status_t status = set(&rows[i], said != NULL ? info->env : info->flag,
                                  said != NULL ? said : info->default_text, options, err);
        if (status != HVD_OK) {
            return status;
        }
    }
    return read_flags(argc, argv, verb, verb_name, options, err);
}

int pai_main(int argc, char **argv)
{
    pai_options_t options = {0};
    err_t err = {0};
    size_t i = 0;
    int code = EXIT_USAGE;
    for (int word = 2; word < argc && argv[word][0] == '-'; word++) {
        if (strcmp(argv[word], "--help") == 0 || strcmp(argv[word], "-h") == 0) {
            print_help(stdout);
            return 0;
        }
    }
    while (argc > 2 && i < N_ELEMENTS(verbs) && strcmp(verbs[i].name, argv[2]) != 0) {
        i++;
    }
    if (argc <= 2 || i == N_ELEMENTS(verbs)) {
        say("pai %s: %s; use init, check, submit, status, logs or stop (%s pai --help says more)",
            argc > 2 ? argv[2] : "COMMAND", argc > 2 ? "no such command" : "the command is missing",
            PROGRAM);
        return EXIT_USAGE;
    }
    if (argc > 3 && strcmp(argv[3], "--help") == 0) {
        print_help(stdout);
        return 0;
    }
    if (read_options(argc - 3, argv + 3, verbs[i].verb, verbs[i].name, &options, &err) != HVD_OK) {
        say("%s", err.text);
    } else if (options.n_words < verbs[i].min_words || options.n_words > verbs[i].max_words) {
        say("pai %s takes %s, but got %d arguments; %s pai --help says more", verbs[i].name,
            verbs[i].words, options.n_words, PROGRAM);
    } else {
        code = verbs[i].act(&options);
    }
    free_options(&options);
    return code;
}
