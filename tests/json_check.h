// SPDX-License-Identifier: Apache-2.0
//
// json_check.h - is this text JSON? A strict reader of the grammar (RFC 8259) that keeps nothing.
//
// json_is_valid() for a text, json_file_is_valid() for a file. Strings must be UTF-8 in so far as
// no byte of them is a control character; depth is limited by the C stack.
#ifndef TESTS_JSON_CHECK_H
#define TESTS_JSON_CHECK_H

#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool json_value(const char **at);

static void json_blanks(const char **at)
{
    while (**at == ' ' || **at == '\n' || **at == '\r' || **at == '\t') {
        ++*at;
    }
}

static bool json_string(const char **at)
{
    if (*(*at)++ != '"') {
        return false;
    }
    for (; **at != '"'; ++*at) {
        if ((unsigned char)**at < 0x20) {
            return false;
        }
        if (**at != '\\') {
            continue;
        }
        ++*at;
        if (**at == 'u') {
            for (int i = 0; i < 4; i++) {
                if (!isxdigit((unsigned char)*++*at)) {
                    return false;
                }
            }
        } else if (**at == '\0' || strchr("\"\\/bfnrt", **at) == NULL) {
            return false;
        }
    }
    ++*at;
    return true;
}

// Members of an array, or with names those of an object, up to the closing bracket.
static bool json_members(const char **at, char closing, bool named)
{
    ++*at;
    json_blanks(at);
    if (**at == closing) {
        ++*at;
        return true;
    }
    for (;;) {
        json_blanks(at);
        if (named) {
            if (!json_string(at)) {
                return false;
            }
            json_blanks(at);
            if (*(*at)++ != ':') {
                return false;
            }
        }
        if (!json_value(at)) {
            return false;
        }
        json_blanks(at);
        char next = *(*at)++;
        if (next == closing) {
            return true;
        }
        if (next != ',') {
            return false;
        }
    }
}

static bool json_number(const char **at)
{
    char *end;
    bool starts = **at == '-' || isdigit((unsigned char)**at);
    strtod(*at, &end);
    bool ok = starts && end > *at;
    *at = end;
    return ok;
}

static bool json_value(const char **at)
{
    static const char *const words[] = {"true", "false", "null"};
    json_blanks(at);
    switch (**at) {
    case '{':
        return json_members(at, '}', true);
    case '[':
        return json_members(at, ']', false);
    case '"':
        return json_string(at);
    default:
        break;
    }
    for (int i = 0; i < 3; i++) {
        if (strncmp(*at, words[i], strlen(words[i])) == 0) {
            *at += strlen(words[i]);
            return true;
        }
    }
    return json_number(at);
}

static inline bool json_is_valid(const char *text)
{
    const char *at = text;
    bool ok = json_value(&at);
    json_blanks(&at);
    return ok && *at == '\0';
}

// The whole file, terminated; NULL if it cannot be read. The caller frees it.
static inline char *read_text_file(const char *path)
{
    FILE *file = fopen(path, "r");
    size_t len = 0;
    size_t room = 1 << 16;
    char *text = malloc(room);
    while (file != NULL && text != NULL) {
        size_t n = fread(text + len, 1, room - len - 1, file);
        len += n;
        if (n == 0) {
            break;
        }
        if (len + 1 == room) {
            room *= 2;
            text = realloc(text, room);
        }
    }
    if (file == NULL || text == NULL) {
        free(text);
        return NULL;
    }
    fclose(file);
    text[len] = '\0';
    return text;
}

static inline bool json_file_is_valid(const char *path)
{
    char *text = read_text_file(path);
    bool ok = text != NULL && json_is_valid(text);
    free(text);
    return ok;
}

#endif
