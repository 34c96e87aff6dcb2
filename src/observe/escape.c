// SPDX-License-Identifier: Apache-2.0
//
// escape.c - names as text of JSON: those that users have chosen, and our own in upper case.
//
// Whatever bytes a name has, what comes out is a valid string. Pure; any thread.
#include "observe/internal.h"

#include <ctype.h>
#include <stdio.h>

// Bytes of the UTF-8 character at text, if it is one beyond ASCII; else 0.
static size_t utf8_bytes(const unsigned char *text)
{
    size_t n = text[0] >= 0xc2 && text[0] < 0xe0   ? 2
               : text[0] >= 0xe0 && text[0] < 0xf0 ? 3
               : text[0] >= 0xf0 && text[0] < 0xf5 ? 4
                                                   : 0;
    for (size_t i = 1; i < n; i++) {
        if ((text[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    bool overlong = (text[0] == 0xe0 && text[1] < 0xa0) || (text[0] == 0xf0 && text[1] < 0x90);
    bool unused = (text[0] == 0xed && text[1] >= 0xa0) || (text[0] == 0xf4 && text[1] >= 0x90);
    return n == 0 || overlong || unused ? 0 : n;
}

void escape_name(const char *name, char *out, size_t bytes)
{
    size_t n = 0;
    for (; *name != '\0' && n + 7 < bytes; name++) {
        unsigned char c = (unsigned char)*name;
        size_t character = utf8_bytes((const unsigned char *)name);
        if (character > 0) {
            memcpy(out + n, name, character);
            n += character;
            name += character - 1;
        } else if (c == '"' || c == '\\') {
            out[n++] = '\\';
            out[n++] = (char)c;
        } else if (c < 0x20 || c >= 0x7f) {
            n += (size_t)snprintf(out + n, bytes - n, "\\u%04x", c);
        } else {
            out[n++] = (char)c;
        }
    }
    out[n] = '\0';
}

void upper_case(const char *text, char *out, size_t bytes)
{
    size_t n = 0;
    for (; text[n] != '\0' && n + 1 < bytes; n++) {
        out[n] = (char)toupper((unsigned char)text[n]);
    }
    out[n] = '\0';
}
