// SPDX-License-Identifier: Apache-2.0
//
// buf.c - growable bytes: the part of buf_t that takes memory. The rest is inline in base.h.
//
// Capacity at least doubles, so n appended bytes cost at most 2n copied. A failure to grow sticks
// until buf_clear(): what was appended before stays readable, nothing is appended after. The
// buffer belongs to one caller at a time.
#include "base/base.h"

#include <stdio.h>
#include <stdlib.h>

#define SMALLEST_BUF_BYTES ((size_t)64)

void buf_free(buf_t *buf)
{
    free(buf->data);
    *buf = (buf_t){0};
}

bool buf_grow(buf_t *buf, size_t more)
{
    if (buf->failed || more > SIZE_MAX - buf->len) {
        buf->failed = true;
        return false;
    }
    size_t doubled = buf->cap <= SIZE_MAX / 2 ? buf->cap * 2 : SIZE_MAX;
    size_t cap = MAX(MAX(doubled, buf->len + more), SMALLEST_BUF_BYTES);
    uint8_t *data = realloc(buf->data, cap);

    if (data == NULL) {
        buf->failed = true;
        return false;
    }
    buf->data = data;
    buf->cap = cap;
    return true;
}

void buf_vprintf(buf_t *buf, const char *format, va_list args)
{
    va_list again;
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    if (n > 0 && buf_reserve(buf, (size_t)n + 1)) {
        vsnprintf((char *)buf->data + buf->len, (size_t)n + 1, format, again);
        buf->len += (size_t)n;
    }
    va_end(again);
}

void buf_printf(buf_t *buf, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    buf_vprintf(buf, format, args);
    va_end(args);
}
