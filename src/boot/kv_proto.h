// SPDX-License-Identifier: Apache-2.0
//
// kv_proto.h - what the rendezvous client and server say to each other, inside the secure channel.
//
// A connection carries one request at a time: the client sends a message and waits for one message.
// A message is a u32 body length and the body; all integers are little-endian.
//
//     request   op u8, wait_ms u32, n u32, key length u16, key, value (the rest)
//               value: put: to be stored; enter: who enters, for sentences
//     answer    kv_code_t u8, then
//               KV_OK       put: nothing; get: the value; gather: n times (u32 length, value);
//                           enter: turn u64
//               KV_LATE     gather: u32 missing in all, u8 k, k times (u32 first, u32 last)
//               KV_HELD     the holder's address, as text
//               KV_DIFFERS  u32: the n that other ranks gather
//               KV_LEFT     u32: the number in the name of who left first, and who that was
//
// Every length is checked before memory is taken. Pure functions; any thread. Decoded pointers
// point into the body.
#ifndef HVD_BOOT_KV_PROTO_H
#define HVD_BOOT_KV_PROTO_H

#include "wire/codec.h"

#define KV_KEY_LIMIT ((size_t)256)
#define KV_VALUE_LIMIT (64 * KIB)
#define KV_KEYS_LIMIT ((size_t)1048576)
#define KV_STORED_LIMIT (1024 * MIB)
#define KV_GATHER_LIMIT ((uint32_t)1048576)
#define KV_WHO_LIMIT ((size_t)128)
#define KV_HEAD_BYTES ((size_t)4)
#define KV_REQUEST_HEAD_BYTES ((size_t)11)
#define KV_REQUEST_LIMIT (KV_REQUEST_HEAD_BYTES + KV_KEY_LIMIT + KV_VALUE_LIMIT)
#define KV_ANSWER_LIMIT (KV_STORED_LIMIT + 16 * MIB)

typedef enum kv_op { KV_PUT, KV_GET, KV_GATHER, KV_ENTER, KV_N_OPS } kv_op_t;

typedef enum kv_code {
    KV_OK,
    KV_LATE,    // wait_ms passed
    KV_FULL,    // a limit of the store
    KV_HELD,    // enter: another connection holds the name
    KV_DIFFERS, // gather: others gather another number under this prefix
    KV_LEFT,    // gather: it will not be complete, since one of the asker's group has left
    KV_N_CODES
} kv_code_t;

typedef struct kv_request {
    kv_op_t op;
    uint32_t wait_ms;
    uint32_t n;      // gather
    const char *key; // not terminated
    size_t key_bytes;
    const uint8_t *value; // put, enter
    size_t value_bytes;
} kv_request_t;

// Somebody who left: the number in the name it held, and who it said it was.
typedef struct kv_left {
    uint32_t number;
    char who[KV_WHO_LIMIT + 1];
} kv_left_t;

// Which numbers of a gather have not come: as ranges, as many as fit.
typedef struct kv_missing {
    uint32_t n_missing;
    unsigned n_ranges;
    struct {
        uint32_t first, last;
    } ranges[16];
} kv_missing_t;

// Appends a whole message.
void kv_encode_request(buf_t *out, const kv_request_t *request);
hvd_status_t kv_decode_request(const void *body, size_t bytes, kv_request_t *request_p, err_t *err);
// The body length a message head announces, if it is from 1 to limit.
hvd_status_t kv_decode_head(const uint8_t head[KV_HEAD_BYTES], size_t limit, size_t *bytes_p,
                            err_t *err);

// What follows KV_OK in the answer to a gather of n.
hvd_status_t kv_decode_values(reader_t *r, int n, const uint8_t **values, size_t *lengths,
                              err_t *err);

void kv_missing_add(kv_missing_t *missing, uint32_t number); // in ascending order
void kv_encode_missing(buf_t *out, const kv_missing_t *missing);
hvd_status_t kv_decode_missing(reader_t *r, kv_missing_t *missing_p, err_t *err);
// "0, 3-5 and 2 more"
void kv_missing_format(const kv_missing_t *missing, char *text, size_t bytes);

// What follows KV_LEFT.
void kv_encode_left(buf_t *out, const kv_left_t *left);
hvd_status_t kv_decode_left(reader_t *r, kv_left_t *left_p, err_t *err);

// A key is printable ASCII without blanks.
bool kv_key_is_valid(const char *key, size_t bytes);
// Splits "prefix17" into the length of "prefix" and 17. False if the key does not end in a number
// as kv_gather counts them: decimal, no leading zeros.
bool kv_key_split(const char *key, size_t bytes, size_t *prefix_bytes_p, uint32_t *number_p);

#endif
