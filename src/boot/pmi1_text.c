// SPDX-License-Identifier: Apache-2.0
//
// pmi1_text.c - reads lines of the PMI-1 protocol.
//
// Words are separated by blanks. A word with '=' is a field; other words continue a message that
// was written with blanks, and are read over. The first field must be cmd. Nothing is copied or
// allocated. Pure; any thread.
#include "boot/pmi1_text.h"

static bool is_printable(const char *text, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        if (text[i] < ' ' || text[i] > '~') {
            return false;
        }
    }
    return true;
}

static bool key_is(const pmi1_field_t *field, const char *key)
{
    return field->key_bytes == strlen(key) && memcmp(field->key, key, field->key_bytes) == 0;
}

static void add_word(pmi1_line_t *line, const char *word, size_t bytes)
{
    const char *equals = memchr(word, '=', bytes);
    if (equals != NULL && equals != word && line->n_fields < PMI1_MAX_FIELDS) {
        size_t key_bytes = (size_t)(equals - word);
        line->fields[line->n_fields++] = (pmi1_field_t){
            .key = word,
            .key_bytes = key_bytes,
            .value = equals + 1,
            .value_bytes = bytes - key_bytes - 1,
        };
    }
}

hvd_status_t pmi1_parse(const char *text, size_t bytes, pmi1_line_t *line_p, err_t *err)
{
    pmi1_line_t line = {.n_fields = 0};
    if (bytes >= PMI1_LINE_LIMIT || !is_printable(text, bytes)) {
        return fail(err, HVD_PROTOCOL, "the process manager sent a line that is not text");
    }
    for (size_t at = 0; at < bytes;) {
        const char *blank = memchr(text + at, ' ', bytes - at);
        size_t end = blank != NULL ? (size_t)(blank - text) : bytes;
        add_word(&line, text + at, end - at);
        at = end + 1;
    }
    if (line.n_fields == 0 || !key_is(&line.fields[0], "cmd")) {
        return fail(
            err, HVD_PROTOCOL,
            "the process manager sent \"%.*s\", which is not an answer of the PMI-1 protocol",
            (int)MIN(bytes, 80), text);
    }
    *line_p = line;
    return HVD_OK;
}

bool pmi1_is(const pmi1_line_t *line, const char *cmd)
{
    const pmi1_field_t *first = &line->fields[0];
    return first->value_bytes == strlen(cmd) && memcmp(first->value, cmd, first->value_bytes) == 0;
}

bool pmi1_value(const pmi1_line_t *line, const char *key, char *value, size_t bytes)
{
    for (int i = 0; i < line->n_fields; i++) {
        const pmi1_field_t *field = &line->fields[i];
        if (key_is(field, key)) {
            if (field->value_bytes >= bytes) {
                return false;
            }
            memcpy(value, field->value, field->value_bytes);
            value[field->value_bytes] = '\0';
            return true;
        }
    }
    return false;
}

bool pmi1_succeeded(const pmi1_line_t *line)
{
    char rc[16] = "0";
    pmi1_value(line, "rc", rc, sizeof rc);
    return strcmp(rc, "0") == 0;
}
