// SPDX-License-Identifier: Apache-2.0
//
// kv_proto.c - requests and answers of the rendezvous, to bytes and back.
//
// A decoder accepts exactly what the encoder can make: unknown ops, keys with odd characters,
// values where none belong and bytes left over are all refused. Cost is linear in the message;
// nothing is allocated.
#include "boot/kv_proto.h"

#include <stdio.h>

bool kv_key_is_valid(const char *key, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        if (key[i] < 0x21 || key[i] > 0x7e) {
            return false;
        }
    }
    return bytes > 0 && bytes <= KV_KEY_LIMIT;
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

bool kv_key_split(const char *key, size_t bytes, size_t *prefix_bytes_p, uint32_t *number_p)
{
    size_t at = bytes;
    uint64_t number = 0;
    while (at > 0 && is_digit(key[at - 1])) {
        at--;
    }
    size_t n_digits = bytes - at;
    if (n_digits == 0 || n_digits > 7 || (key[at] == '0' && n_digits > 1)) {
        return false;
    }
    for (size_t i = at; i < bytes; i++) {
        number = number * 10 + (uint64_t)(key[i] - '0');
    }
    *prefix_bytes_p = at;
    *number_p = (uint32_t)number;
    return true;
}

void kv_encode_request(buf_t *out, const kv_request_t *request)
{
    size_t bytes = KV_REQUEST_HEAD_BYTES + request->key_bytes + request->value_bytes;
    put_u32(out, (uint32_t)bytes);
    put_u8(out, (uint8_t)request->op);
    put_u32(out, request->wait_ms);
    put_u32(out, request->n);
    put_u16(out, (uint16_t)request->key_bytes);
    put_bytes(out, request->key, request->key_bytes);
    if (request->value_bytes > 0) {
        put_bytes(out, request->value, request->value_bytes);
    }
}

hvd_status_t kv_decode_request(const void *body, size_t bytes, kv_request_t *request_p, err_t *err)
{
    reader_t r = reader_of(body, bytes);
    kv_request_t request;
    request.op = get_u8(&r);
    request.wait_ms = get_u32(&r);
    request.n = get_u32(&r);
    request.key_bytes = get_u16(&r);
    request.key = (const char *)get_bytes(&r, request.key_bytes);
    request.value_bytes = reader_left(&r);
    request.value = get_bytes(&r, request.value_bytes);
    if (r.bad || request.op >= KV_N_OPS || !kv_key_is_valid(request.key, request.key_bytes)) {
        return fail(err, HVD_PROTOCOL, "a rendezvous request of %zu bytes is malformed", bytes);
    }
    // A prefix that ends in a digit would make two readings of one key.
    bool n_fits = request.op == KV_GATHER ? request.n >= 1 && request.n <= KV_GATHER_LIMIT &&
                                                !is_digit(request.key[request.key_bytes - 1])
                                          : request.n == 0;
    size_t value_limit = request.op == KV_PUT     ? KV_VALUE_LIMIT
                         : request.op == KV_ENTER ? KV_WHO_LIMIT
                                                  : 0;
    bool value_fits = request.value_bytes <= value_limit;
    if (!n_fits || !value_fits) {
        return fail(err, HVD_PROTOCOL, "a rendezvous request (op %d) has an invalid count or value",
                    (int)request.op);
    }
    *request_p = request;
    return HVD_OK;
}

hvd_status_t kv_decode_head(const uint8_t head[KV_HEAD_BYTES], size_t limit, size_t *bytes_p,
                            err_t *err)
{
    reader_t r = reader_of(head, KV_HEAD_BYTES);
    size_t bytes = get_u32(&r);
    if (bytes < 1 || bytes > limit) {
        return fail(err, HVD_PROTOCOL,
                    "a rendezvous message claims %zu bytes; at most %zu are allowed", bytes, limit);
    }
    *bytes_p = bytes;
    return HVD_OK;
}

hvd_status_t kv_decode_values(reader_t *r, int n, const uint8_t **values, size_t *lengths,
                              err_t *err)
{
    for (int i = 0; i < n; i++) {
        lengths[i] = get_u32(r);
        if (lengths[i] > KV_VALUE_LIMIT) {
            r->bad = true;
        }
        values[i] = get_bytes(r, lengths[i]);
    }
    if (r->bad || reader_left(r) != 0) {
        return fail(err, HVD_PROTOCOL, "the rendezvous server's answer does not hold %d values", n);
    }
    return HVD_OK;
}

void kv_missing_add(kv_missing_t *missing, uint32_t number)
{
    unsigned last = missing->n_ranges - 1;
    missing->n_missing++;
    if (missing->n_ranges > 0 && missing->ranges[last].last + 1 == number) {
        missing->ranges[last].last = number;
    } else if (missing->n_ranges < N_ELEMENTS(missing->ranges)) {
        missing->ranges[missing->n_ranges].first = number;
        missing->ranges[missing->n_ranges++].last = number;
    }
}

void kv_encode_missing(buf_t *out, const kv_missing_t *missing)
{
    put_u32(out, missing->n_missing);
    put_u8(out, (uint8_t)missing->n_ranges);
    for (unsigned i = 0; i < missing->n_ranges; i++) {
        put_u32(out, missing->ranges[i].first);
        put_u32(out, missing->ranges[i].last);
    }
}

hvd_status_t kv_decode_missing(reader_t *r, kv_missing_t *missing_p, err_t *err)
{
    kv_missing_t missing = {0};
    missing.n_missing = get_u32(r);
    missing.n_ranges = get_u8(r);
    r->bad |= missing.n_missing > KV_GATHER_LIMIT || missing.n_ranges > N_ELEMENTS(missing.ranges);
    for (unsigned i = 0; i < missing.n_ranges && !r->bad; i++) {
        missing.ranges[i].first = get_u32(r);
        missing.ranges[i].last = get_u32(r);
        r->bad |= missing.ranges[i].first > missing.ranges[i].last ||
                  missing.ranges[i].last >= KV_GATHER_LIMIT;
    }
    if (r->bad || reader_left(r) != 0) {
        return fail(err, HVD_PROTOCOL,
                    "the rendezvous server's list of missing ranks is malformed");
    }
    *missing_p = missing;
    return HVD_OK;
}

void kv_missing_format(const kv_missing_t *missing, char *text, size_t bytes)
{
    size_t len = 0;
    uint32_t n_named = 0;
    text[0] = '\0';
    for (unsigned i = 0; i < missing->n_ranges; i++) {
        uint32_t first = missing->ranges[i].first, last = missing->ranges[i].last;
        char item[32];
        int n = first == last ? snprintf(item, sizeof item, "%u", first)
                              : snprintf(item, sizeof item, "%u%s%u", first,
                                         last == first + 1 ? ", " : "-", last);
        // Room is kept for the words at the end.
        if (len + (size_t)n + 32 > bytes) {
            break;
        }
        len += (size_t)snprintf(text + len, bytes - len, "%s%s", i > 0 ? ", " : "", item);
        n_named += last - first + 1;
    }
    if (n_named < missing->n_missing) {
        snprintf(text + len, bytes - len, " and %u more", missing->n_missing - n_named);
    }
}

void kv_encode_left(buf_t *out, const kv_left_t *left)
{
    put_u32(out, left->number);
    put_bytes(out, left->who, strlen(left->who));
}

hvd_status_t kv_decode_left(reader_t *r, kv_left_t *left_p, err_t *err)
{
    kv_left_t left = {.number = get_u32(r)};
    size_t bytes = reader_left(r);
    const uint8_t *who = get_bytes(r, bytes);
    if (r->bad || bytes > KV_WHO_LIMIT || memchr(who, '\0', bytes) != NULL) {
        return fail(err, HVD_PROTOCOL,
                    "the rendezvous server's report of a rank that left is malformed");
    }
    memcpy(left.who, who, bytes);
    *left_p = left;
    return HVD_OK;
}
