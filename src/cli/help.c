// SPDX-License-Identifier: Apache-2.0
//
// help.c - what horovodrun can do, in words: help, man page, completions, --print-config.
//
// All of them walk option_at(); a new row appears in each. Pure but for the FILE.
#define _GNU_SOURCE
#include "cli/cli.h"

#include <stdlib.h>

#define INDENT 30
#define WIDTH 96

static const struct {
    const char *group, *title;
} groups[] = {
    {"job", "What to run, and where"},
    {"hosts", "Reaching hosts"},
    {"output", "Output"},
    {"watching", "Watching the job"},
    {"knobs", "Knobs of the library, given to every rank"},
    {"tuning", "More settings given to every rank"},
    {"mpi", "With --mpi or --jsrun"},
    {"openpai", "In a job of OpenPAI (\"horovodrun pai --help\" has what is done outside of it)"},
    {"elastic", "Elastic jobs"},
    {"other", "Instead of running a job"},
};

static const char usage[] = "horovodrun -np N [-H HOST:SLOTS,...] [options] command [arguments]";

static bool is_shown(const option_t *option)
{
    return option->info.flag[0] != '\0' && (option->traits & HIDDEN) == 0;
}

static bool is_in(const option_t *option, const char *group)
{
    return is_shown(option) && strcmp(option->group, group) == 0;
}

static bool is_bool(const option_t *option)
{
    return strcmp(option->info.kind, "bool") == 0;
}

// "-np, -n, --num-proc N"
static void spell(const option_t *option, char *text, size_t bytes)
{
    const char *at = option->synonyms;
    size_t len = 0;
    text[0] = '\0';
    while (*at != '\0' && len < bytes) {
        size_t word = strcspn(at, " ");
        len += (size_t)snprintf(text + len, bytes - len, "%.*s, ", (int)word, at);
        at += word + strspn(at + word, " ");
    }
    if (len < bytes) {
        bool is_bare = (option->traits & BARE) != 0;
        snprintf(text + len, bytes - len, "%s%s%s%s", option->info.flag,
                 is_bare           ? "[="
                 : is_bool(option) ? ""
                                   : " ",
                 is_bool(option) ? "" : option->placeholder, is_bare ? "]" : "");
    }
}

// Where else it can be set, and its default.
static void spell_origin(const option_t *option, char *text, size_t bytes)
{
    size_t len = 0;
    text[0] = '\0';
    if (option->info.choices[0] != '\0') {
        len += (size_t)snprintf(text + len, bytes - len, " One of %s.", option->info.choices);
    }
    bool in_mebibytes = strcmp(option->info.kind, "bytes") == 0;
    if (in_mebibytes && len < bytes) {
        len += (size_t)snprintf(text + len, bytes - len, " Default %llu MiB.",
                                strtoull(option->info.default_text, NULL, 10) / MIB);
    } else if (!is_bool(option) && option->info.default_text[0] != '\0' &&
               strcmp(option->info.default_text, "0") != 0 && len < bytes) {
        len +=
            (size_t)snprintf(text + len, bytes - len, " Default %s%s%s.", option->info.default_text,
                             option->info.unit[0] != '\0' ? " " : "", option->info.unit);
    }
    if (option->info.env[0] != '\0' && len < bytes) {
        snprintf(text + len, bytes - len, " [%s%s%s]", option->info.env,
                 option->info.yaml[0] != '\0' ? ", " : "", option->info.yaml);
    }
}

static void print_wrapped(FILE *out, const char *text, size_t column)
{
    while (*text != '\0') {
        size_t word = strcspn(text, " ");
        if (column + word > WIDTH) {
            fprintf(out, "\n%*s", INDENT, "");
            column = INDENT;
        }
        fprintf(out, "%.*s", (int)word, text);
        column += word;
        text += word;
        if (*text == ' ') {
            fprintf(out, " ");
            column++;
            text++;
        }
    }
    fprintf(out, "\n");
}

static void print_option(FILE *out, const option_t *option)
{
    char name[256], origin[512], text[1024];
    spell(option, name, sizeof name);
    spell_origin(option, origin, sizeof origin);
    snprintf(text, sizeof text, "%s.%s", option->info.help, origin);
    fprintf(out, "  %-*s", INDENT - 2, name);
    if (strlen(name) > INDENT - 3) {
        fprintf(out, "\n%*s", INDENT, "");
    }
    print_wrapped(out, text, INDENT);
}

void help_print(FILE *out)
{
    fprintf(out,
            "usage: %s\n\nStarts N copies of a command on one or more hosts and lets them train "
            "together.\n",
            usage);
    for (size_t g = 0; g < N_ELEMENTS(groups); g++) {
        fprintf(out, "\n%s:\n", groups[g].title);
        for (int i = 0; i < N_OPTIONS; i++) {
            option_t option = option_at(i);
            if (is_in(&option, groups[g].group)) {
                print_option(out, &option);
            }
        }
    }
    fprintf(out,
            "\n--gloo, --mpi and --jsrun stand for --controller with that name. A flag that is "
            "on or off\nhas an opposite, --no-<name>. In brackets: environment variable, key "
            "of the --config-file.\nThe exit code is that of the rank that failed first; 128 "
            "plus the signal that killed it.\n");
}

// --- Man page ------------------------------------------------------------------------------------

static void print_roff(FILE *out, const char *text)
{
    for (; *text != '\0'; text++) {
        fprintf(out, "%s%c", *text == '-' || *text == '\\' ? "\\" : "", *text);
    }
}

void man_print(FILE *out)
{
    char name[256], origin[512];
    fprintf(out,
            ".TH HOROVODRUN 1 \"\" \"%s\" \"Horovod\"\n.SH NAME\nhorovodrun \\- start a "
            "distributed training job\n.SH SYNOPSIS\n",
            hvd_version());
    print_roff(out, usage);
    fprintf(out,
            "\n.SH DESCRIPTION\nStarts N copies of a command, the ranks, on one or more hosts, "
            "prints their output line by line with the rank in front, and ends with the exit "
            "code of the rank that failed first.\n");
    for (size_t g = 0; g < N_ELEMENTS(groups); g++) {
        fprintf(out, ".SH %s\n", groups[g].title);
        for (int i = 0; i < N_OPTIONS; i++) {
            option_t option = option_at(i);
            if (!is_in(&option, groups[g].group)) {
                continue;
            }
            spell(&option, name, sizeof name);
            spell_origin(&option, origin, sizeof origin);
            fprintf(out, ".TP\n.B ");
            print_roff(out, name);
            fprintf(out, "\n");
            print_roff(out, option.info.help);
            fprintf(out, ".");
            print_roff(out, origin);
            fprintf(out, "\n");
        }
    }
}

// --- Completion ----------------------------------------------------------------------------------

static void print_bash(FILE *out)
{
    fprintf(out, "# bash completion of horovodrun: source it\n_horovodrun() {\n"
                 "    local cur=${COMP_WORDS[COMP_CWORD]}\n"
                 "    if [[ $cur == -* ]]; then\n        COMPREPLY=($(compgen -W \"-np -H -p -i -h "
                 "-v -cb");
    for (int i = 0; i < N_OPTIONS; i++) {
        option_t option = option_at(i);
        if (is_shown(&option)) {
            fprintf(out, " %s", option.info.flag);
        }
    }
    fprintf(out, " --gloo --mpi --jsrun");
    fprintf(out, "\" -- \"$cur\"))\n    else\n        COMPREPLY=($(compgen -f -c -- \"$cur\"))\n"
                 "    fi\n}\ncomplete -o filenames -F _horovodrun horovodrun\n");
}

// A help text inside single quotes and brackets.
static void print_zsh(FILE *out)
{
    fprintf(out, "#compdef horovodrun\n_arguments -s \\\n");
    for (int i = 0; i < N_OPTIONS; i++) {
        option_t option = option_at(i);
        if (!is_shown(&option)) {
            continue;
        }
        fprintf(out, "    '%s%s[", option.info.flag, is_bool(&option) ? "" : "=");
        for (const char *at = option.info.help; *at != '\0'; at++) {
            if (strchr("'[]:", *at) == NULL) {
                fprintf(out, "%c", *at);
            }
        }
        fprintf(out, "]%s' \\\n", is_bool(&option) ? "" : ":value:_files");
    }
    fprintf(out, "    '--gloo' '--mpi' '--jsrun' '-np[ranks]:N:' '-H[hosts]:hosts:_hosts' \\\n"
                 "    '*::command:_normal'\n");
}

static void print_fish(FILE *out)
{
    for (int i = 0; i < N_OPTIONS; i++) {
        option_t option = option_at(i);
        if (!is_shown(&option)) {
            continue;
        }
        fprintf(out, "complete -c horovodrun -l %s%s -d '", option.info.flag + 2,
                is_bool(&option) ? "" : " -r");
        for (const char *at = option.info.help; *at != '\0'; at++) {
            if (*at != '\'' && *at != '\\') {
                fprintf(out, "%c", *at);
            }
        }
        fprintf(out, "'\n");
    }
    fprintf(out, "complete -c horovodrun -l gloo\ncomplete -c horovodrun -l mpi\n"
                 "complete -c horovodrun -l jsrun\ncomplete -c horovodrun -o np -r\n"
                 "complete -c horovodrun -s H -r\n");
}

void completion_print(int shell, FILE *out)
{
    static void (*const printers[])(FILE *) = {[COMPLETION_BASH] = print_bash,
                                               [COMPLETION_ZSH] = print_zsh,
                                               [COMPLETION_FISH] = print_fish};

    if (shell != COMPLETION_NONE) {
        printers[shell](out);
    }
}

// --- What holds ----------------------------------------------------------------------------------

void config_print(const options_t *options, FILE *out)
{
    fprintf(out, "%-38s %-24s %s\n", "option", "value", "from");
    for (int i = 0; i < N_OPTIONS; i++) {
        option_t option = option_at(i);
        if (is_shown(&option) && (option.traits & ACTION) == 0) {
            const char *text = option_text(options, i);
            fprintf(out, "%-38s %-24s %s%s%s\n", option.info.flag, text[0] != '\0' ? text : "-",
                    origin_name(options->origins[i]),
                    options->origins[i] == BY_ENVIRONMENT ? " " : "",
                    options->origins[i] == BY_ENVIRONMENT ? option.info.env : "");
        }
    }
}
