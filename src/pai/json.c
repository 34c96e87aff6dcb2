// SPDX-License-Identifier: Apache-2.0
//
// json.c - is a text JSON, as RFC 8259 has it? Job files of v1 are read by servers as such.
//
// libyaml, which reads both forms of a job (document.c), takes more: commas before a bracket,
// comments, quotes of one stroke, True, and maps without brackets. What this file refuses is told
// with its line and with what had to stand there. Reads every byte once, keeps nothing. Pure.
#include "pai/internal.h"

typedef struct json {
    const char *at, *end;
    size_t line;
    int depth;
    const char *wanted; // where reading stopped; NULL: all was well so far
} json_t;

static bool stop(json_t *json, const char *wanted)
{
    json->wanted = wanted;
    return false;
}

static bool is_next(const json_t *json, char letter)
{
    return json->at < json->end && *json->at == letter;
}

static bool take(json_t *json, char letter)
{
    bool is_there = is_next(json, letter);
    json->at += is_there;
    return is_there;
}

static bool take_any(json_t *json, const char *letters)
{
    bool is_there = json->at < json->end && *json->at != '\0' && strchr(letters, *json->at) != NULL;
    json->at += is_there;
    return is_there;
}

static bool take_digits(json_t *json)
{
    const char *begin = json->at;
    while (take_any(json, "0123456789")) {
    }
    return json->at > begin;
}

static void skip_blanks(json_t *json)
{
    while (take_any(json, " \t\r\n")) {
        json->line += json->at[-1] == '\n';
    }
}

// --- Values --------------------------------------------------------------------------------------

static bool read_string(json_t *json, const char *wanted)
{
    if (!take(json, '"')) {
        return stop(json, wanted);
    }
    while (!take(json, '"')) {
        bool is_escape = take(json, '\\');
        int n_digits = is_escape && take(json, 'u') ? 4 : 0;
        if (is_escape && n_digits == 0 && !take_any(json, "\"\\/bfnrt")) {
            return stop(json, "one of \" \\ / b f n r t u after the \\");
        }
        for (int i = 0; i < n_digits; i++) {
            if (!take_any(json, "0123456789abcdefABCDEF")) {
                return stop(json, "four hexadecimal digits after \\u");
            }
        }
        if (!is_escape && (json->at == json->end || (unsigned char)*json->at < ' ')) {
            return stop(json, "the \" that ends a text");
        }
        json->at += !is_escape;
    }
    return true;
}

static bool read_number(json_t *json)
{
    take(json, '-');
    if (!take(json, '0') && !take_digits(json)) {
        return stop(json, "a digit");
    }
    if (take(json, '.') && !take_digits(json)) {
        return stop(json, "a digit after the point");
    }
    if (take_any(json, "eE")) {
        take_any(json, "+-");
        if (!take_digits(json)) {
            return stop(json, "a digit of the exponent");
        }
    }
    return true;
}

static bool read_word(json_t *json)
{
    static const char *const words[] = {"true", "false", "null"};
    for (size_t i = 0; i < N_ELEMENTS(words); i++) {
        size_t bytes = strlen(words[i]);
        if ((size_t)(json->end - json->at) >= bytes && memcmp(json->at, words[i], bytes) == 0) {
            json->at += bytes;
            return true;
        }
    }
    return stop(json, "a value: a text in \"\", a number, true, false, null, {} or []");
}

static bool read_value(json_t *json);

static bool read_pair(json_t *json)
{
    if (!read_string(json, "a key in \"\"")) {
        return false;
    }
    skip_blanks(json);
    return take(json, ':') ? read_value(json) : stop(json, "\":\" after a key");
}

// What stands in brackets: items with a comma between each two.
static bool read_items(json_t *json, char closing, bool (*read_item)(json_t *))
{
    if (++json->depth > PAI_MAX_DEPTH) {
        return stop(json, "brackets that are nested less deeply");
    }
    skip_blanks(json);
    bool is_at_end = take(json, closing);
    while (!is_at_end) {
        skip_blanks(json);
        if (!read_item(json)) {
            return false;
        }
        skip_blanks(json);
        is_at_end = take(json, closing);
        if (!is_at_end && !take(json, ',')) {
            return stop(json, closing == '}' ? "\",\" or \"}\"" : "\",\" or \"]\"");
        }
    }
    json->depth--;
    return true;
}

static bool read_value(json_t *json)
{
    skip_blanks(json);
    if (take(json, '{')) {
        return read_items(json, '}', read_pair);
    }
    if (take(json, '[')) {
        return read_items(json, ']', read_value);
    }
    if (is_next(json, '"')) {
        return read_string(json, "");
    }
    bool is_number =
        json->at < json->end && (*json->at == '-' || (*json->at >= '0' && *json->at <= '9'));
    return is_number ? read_number(json) : read_word(json);
}

hvd_status_t pai_json_check(const char *text, size_t bytes, const char *file, err_t *err)
{
    json_t json = {.at = text, .end = text + bytes, .line = 1};
    if (read_value(&json)) {
        skip_blanks(&json);
        json.wanted = json.at < json.end ? "the end of the file" : NULL;
    }
    if (json.wanted == NULL) {
        return HVD_OK;
    }
    int n_shown = (int)MIN((size_t)(json.end - json.at), 20);
    for (int i = 0; i < n_shown; i++) {
        n_shown = (unsigned char)json.at[i] < ' ' ? i : n_shown;
    }
    return fail(err, HVD_INVALID_ARGUMENT, "%s, line %zu: a v1 job is JSON: %s%.*s%s must be %s",
                file, json.line, n_shown > 0 ? "here, at \"" : "here", n_shown, json.at,
                n_shown > 0 ? "\"," : "", json.wanted);
}
