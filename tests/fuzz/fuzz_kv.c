// SPDX-License-Identifier: Apache-2.0
//
// fuzz_kv.c - requests and answers of the rendezvous, as bytes.
//
// The first byte chooses the decoder. Whatever it accepts, the encoder makes the same bytes of.
#include "boot/kv_proto.h"
#include "fuzz.h"

#define MAX_VALUES 64

static void fuzz_request(const uint8_t *body, size_t bytes)
{
    kv_request_t request;
    buf_t again = {0};
    err_t err;
    if (kv_decode_request(body, bytes, &request, &err) == HVD_OK) {
        size_t prefix_bytes;
        uint32_t number;
        if (kv_key_split(request.key, request.key_bytes, &prefix_bytes, &number)) {
            MUST(prefix_bytes < request.key_bytes && number <= 9999999);
        }
        kv_encode_request(&again, &request);
        MUST(again.len == KV_HEAD_BYTES + bytes);
        MUST(memcmp(again.data + KV_HEAD_BYTES, body, bytes) == 0);
    }
    buf_free(&again);
}

static void fuzz_head(const uint8_t *body, size_t bytes)
{
    uint8_t head[KV_HEAD_BYTES] = {0};
    size_t claimed;
    memcpy(head, body, MIN(bytes, sizeof head));
    if (kv_decode_head(head, KV_REQUEST_LIMIT, &claimed, NULL) == HVD_OK) {
        MUST(claimed >= 1 && claimed <= KV_REQUEST_LIMIT);
    }
}

static void fuzz_values(const uint8_t *body, size_t bytes)
{
    const uint8_t *values[MAX_VALUES];
    size_t lengths[MAX_VALUES], total = 0;
    int n = bytes > 0 ? body[0] % (MAX_VALUES + 1) : 0;
    reader_t reader = reader_of(body + MIN(bytes, 1), bytes - MIN(bytes, 1));
    if (kv_decode_values(&reader, n, values, lengths, NULL) == HVD_OK) {
        for (int i = 0; i < n; i++) {
            total += 4 + lengths[i];
            MUST(lengths[i] == 0 || values[i] + lengths[i] <= body + bytes);
        }
        MUST(total == bytes - MIN(bytes, 1));
    }
}

static void fuzz_missing(const uint8_t *body, size_t bytes)
{
    reader_t reader = reader_of(body, bytes);
    kv_missing_t missing;
    buf_t again = {0};
    char text[200];
    if (kv_decode_missing(&reader, &missing, NULL) == HVD_OK) {
        for (size_t room = 64; room <= sizeof text; room += 17) {
            kv_missing_format(&missing, text, room);
            MUST(strlen(text) < room);
        }
        kv_encode_missing(&again, &missing);
        MUST(again.len == bytes && memcmp(again.data, body, bytes) == 0);
    }
    buf_free(&again);
}

static void fuzz_left(const uint8_t *body, size_t bytes)
{
    reader_t reader = reader_of(body, bytes);
    kv_left_t left;
    buf_t again = {0};
    if (kv_decode_left(&reader, &left, NULL) == HVD_OK) {
        kv_encode_left(&again, &left);
        MUST(again.len == bytes && memcmp(again.data, body, bytes) == 0);
    }
    buf_free(&again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static void (*const decoders[])(const uint8_t *, size_t) = {
        fuzz_request, fuzz_head, fuzz_values, fuzz_missing, fuzz_left};
    input_t in = {data, bytes};
    uint8_t which = take_u8(&in);
    size_t n = in.left;
    uint8_t *body = take_copy(&in, &n);

    decoders[which % N_ELEMENTS(decoders)](body, n);
    free(body);
    return 0;
}
