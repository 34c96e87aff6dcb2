// SPDX-License-Identifier: Apache-2.0
//
// json.c - JSON that may stand inside HTML: "<", ">" and "&" never appear in it.
//
// Texts come from programs and may hold anything: what is not UTF-8 becomes U+FFFD. Pure.
#include "web/web.h"

#include <math.h>
#include <stdio.h>

// Length of the UTF-8 sequence at `at`; 0: there is none.
static size_t sequence(const uint8_t *at, size_t left)
{
    size_t n = at[0] < 0x80                    ? 1
               : at[0] >= 0xc2 && at[0] < 0xe0 ? 2
               : (at[0] & 0xf0) == 0xe0        ? 3
               : at[0] >= 0xf0 && at[0] < 0xf5 ? 4
                                               : 0;
    if (n == 0 || n > left) {
        return 0;
    }
    for (size_t i = 1; i < n; i++) {
        if ((at[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    bool is_overlong = (at[0] == 0xe0 && at[1] < 0xa0) || (at[0] == 0xf0 && at[1] < 0x90);
    bool is_outside = (at[0] == 0xed && at[1] >= 0xa0) || (at[0] == 0xf4 && at[1] >= 0x90);
    return is_overlong || is_outside ? 0 : n;
}

static void put_char(buf_t *out, uint8_t c)
{
    if (c == '"' || c == '\\') {
        buf_printf(out, "\\%c", c);
    } else if (c == '\n') {
        buf_append(out, "\\n", 2);
    } else if (c < ' ' || c == 0x7f || c == '<' || c == '>' || c == '&') {
        buf_printf(out, "\\u%04x", c);
    } else {
        buf_append(out, &c, 1);
    }
}

void json_bytes(buf_t *out, const void *text, size_t bytes)
{
    const uint8_t *at = text;
    buf_append(out, "\"", 1);
    while (bytes > 0) {
        size_t n = sequence(at, bytes);
        // U+2028 and U+2029 end lines in JavaScript.
        bool is_line_end = n == 3 && at[0] == 0xe2 && at[1] == 0x80 && (at[2] & 0xfe) == 0xa8;
        if (n == 1) {
            put_char(out, *at);
        } else if (n == 0 || is_line_end) {
            buf_append(out, "\\ufffd", 6);
        } else {
            buf_append(out, at, n);
        }
        at += MAX(n, 1);
        bytes -= MAX(n, 1);
    }
    buf_append(out, "\"", 1);
}

void json_text(buf_t *out, const char *text)
{
    json_bytes(out, text, strlen(text));
}

void json_number(buf_t *out, double value)
{
    if (isfinite(value)) {
        buf_printf(out, "%.6g", value);
    } else {
        buf_append(out, "null", 4);
    }
}
