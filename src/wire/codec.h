// SPDX-License-Identifier: Apache-2.0
//
// codec.h - integers and strings to bytes and back. Little-endian, fixed width or varint.
//
// A writer appends to a buf_t; a failed allocation shows in buf->failed, checked once at the end.
// A reader never reads past its end: the first short read sets `bad`, and everything after yields
// zeros, so a parser may run to its end and check once. Lengths are checked before memory is taken.
#ifndef HVD_WIRE_CODEC_H
#define HVD_WIRE_CODEC_H

#include "base/base.h"

typedef struct reader {
    const uint8_t *at;
    const uint8_t *end;
    bool bad;
} reader_t;

static inline reader_t reader_of(const void *data, size_t bytes)
{
    const uint8_t *at = data; // NULL when there are none, and nothing may be added to that
    return (reader_t){.at = at, .end = bytes > 0 ? at + bytes : at, .bad = false};
}

static inline size_t reader_left(const reader_t *r)
{
    return (size_t)(r->end - r->at);
}

// The next `bytes` bytes in place, or NULL (and bad) if there are fewer.
static inline const uint8_t *get_bytes(reader_t *r, size_t bytes)
{
    if (r->bad || reader_left(r) < bytes) {
        r->bad = true;
        return NULL;
    }
    const uint8_t *at = r->at;
    r->at += bytes;
    return at;
}

static inline uint8_t get_u8(reader_t *r)
{
    const uint8_t *p = get_bytes(r, 1);
    return p != NULL ? p[0] : 0;
}

static inline uint16_t get_u16(reader_t *r)
{
    const uint8_t *p = get_bytes(r, 2);
    return p != NULL ? (uint16_t)(p[0] | p[1] << 8) : 0;
}

static inline uint32_t get_u32(reader_t *r)
{
    const uint8_t *p = get_bytes(r, 4);
    return p != NULL
               ? (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24
               : 0;
}

static inline uint64_t get_u64(reader_t *r)
{
    uint64_t low = get_u32(r);
    return low | (uint64_t)get_u32(r) << 32;
}

static inline double get_f64(reader_t *r)
{
    uint64_t bits = get_u64(r);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Seven bits a byte, low first; at most ten bytes.
static inline uint64_t get_varint(reader_t *r)
{
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
        uint8_t byte = get_u8(r);
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) {
            return value;
        }
    }
    r->bad = true;
    return 0;
}

// A varint that must not exceed max.
static inline uint64_t get_count(reader_t *r, uint64_t max)
{
    uint64_t n = get_varint(r);
    if (n > max) {
        r->bad = true;
        return 0;
    }
    return n;
}

static inline void put_bytes(buf_t *b, const void *data, size_t bytes)
{
    buf_append(b, data, bytes);
}

static inline void put_u8(buf_t *b, uint8_t v)
{
    buf_append(b, &v, 1);
}

static inline void put_u16(buf_t *b, uint16_t v)
{
    uint8_t p[2] = {(uint8_t)v, (uint8_t)(v >> 8)};
    buf_append(b, p, sizeof p);
}

static inline void put_u32(buf_t *b, uint32_t v)
{
    uint8_t p[4] = {(uint8_t)v, (uint8_t)(v >> 8), (uint8_t)(v >> 16), (uint8_t)(v >> 24)};
    buf_append(b, p, sizeof p);
}

static inline void put_u64(buf_t *b, uint64_t v)
{
    put_u32(b, (uint32_t)v);
    put_u32(b, (uint32_t)(v >> 32));
}

static inline void put_f64(buf_t *b, double v)
{
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    put_u64(b, bits);
}

static inline void put_varint(buf_t *b, uint64_t v)
{
    uint8_t p[10];
    size_t n = 0;
    while (v >= 0x80) {
        p[n++] = (uint8_t)(v | 0x80);
        v >>= 7;
    }
    p[n++] = (uint8_t)v;
    buf_append(b, p, n);
}

#endif
