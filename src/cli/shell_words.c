// SPDX-License-Identifier: Apache-2.0
//
// shell_words.c - what a shell would do, without one: text into words, words into text, and looking
// programs up.
//
// Blanks separate words; '...' keeps everything, "..." everything but backslashes, a backslash the
// next character. Nothing is expanded. Results are the caller's.
#include "cli/cli.h"

#include <stdlib.h>
#include <unistd.h>

void free_words(char **words)
{
    for (char **at = words; at != NULL && *at != NULL; at++) {
        free(*at);
    }
    free(words);
}

// The word at *at_p into out; false: a quote does not end.
static bool take_word(const char **at_p, buf_t *out)
{
    const char *at = *at_p;
    char quote = '\0';
    buf_clear(out);
    for (; *at != '\0' && (quote != '\0' || strchr(" \t\n", *at) == NULL); at++) {
        if (quote == '\0' && (*at == '\'' || *at == '"')) {
            quote = *at;
        } else if (*at == quote) {
            quote = '\0';
        } else {
            if (*at == '\\' && quote != '\'' && at[1] != '\0') {
                at++;
            }
            buf_append(out, at, 1);
        }
    }
    buf_append(out, "", 1);
    *at_p = at;
    return quote == '\0' && !out->failed;
}

char **split_words(const char *text)
{
    buf_t words = {0}, word = {0};
    bool is_right = true;
    char *copy;
    text += strspn(text, " \t\n");
    while (*text != '\0' && is_right) {
        is_right = take_word(&text, &word) && (copy = strdup((const char *)word.data)) != NULL &&
                   buf_append(&words, &copy, sizeof copy) != NULL;
        text += strspn(text, " \t\n");
    }
    copy = NULL;
    buf_append(&words, &copy, sizeof copy);
    buf_free(&word);
    if (!is_right || words.failed) {
        free_words((char **)(void *)words.data);
        return NULL;
    }
    return (char **)(void *)words.data;
}

void quote_word(const char *word, buf_t *out)
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                "@%_-+=:,./^";
    if (word[0] != '\0' && word[strspn(word, plain)] == '\0') {
        buf_append(out, word, strlen(word));
        return;
    }
    buf_append(out, "'", 1);
    for (; *word != '\0'; word++) {
        if (*word == '\'') {
            buf_append(out, "'\\''", 4);
        } else {
            buf_append(out, word, 1);
        }
    }
    buf_append(out, "'", 1);
}

bool is_in_path(const char *program)
{
    bool is_found = false;
    char file[4096];
    for (const char *at = environment("PATH"); at != NULL && *at != '\0' && !is_found;) {
        size_t bytes = strcspn(at, ":");
        int len = snprintf(file, sizeof file, "%.*s/%s", (int)bytes, at, program);
        is_found = len < (int)sizeof file && access(file, X_OK) == 0;
        at += bytes + (at[bytes] == ':');
    }
    return is_found;
}
