// SPDX-License-Identifier: Apache-2.0
//
// fuzz_record.c - encrypted records that somebody on the way changes, repeats, drops and moves.
//
// The input says what is sealed and what becomes of it. Whatever opens must be what was sealed, in
// the order it was sealed; after the first record that does not open, nothing more is asked.
#include "fuzz.h"
#include "wire/record.h"

#define MAX_RECORDS 16
#define MAX_PLAIN_BYTES 300

typedef struct sealed {
    uint8_t record[MAX_PLAIN_BYTES + RECORD_EXTRA_BYTES];
    uint8_t plain[MAX_PLAIN_BYTES];
    size_t bytes;
} sealed_t;

static void seal_all(input_t *in, record_key_t *key, sealed_t *sealed, int n)
{
    for (int i = 0; i < n; i++) {
        size_t bytes = take_u16(in) % (MAX_PLAIN_BYTES + 1);
        uint8_t *plain = take_copy(in, &bytes);
        memcpy(sealed[i].plain, plain, bytes);
        free(plain);
        sealed[i].bytes = bytes;
        MUST(record_seal(key, sealed[i].plain, bytes, sealed[i].record, NULL) == HVD_OK);
    }
}

// The records as they arrive: which one, and with which byte changed.
static void open_all(input_t *in, record_key_t *key, const sealed_t *sealed, int n)
{
    int next = 0;
    bool goes_on = true;
    while (goes_on && in->left > 0) {
        const sealed_t *from = &sealed[take_u8(in) % n];
        size_t whole = record_bytes(from->bytes);
        uint8_t record[sizeof from->record], plain[MAX_PLAIN_BYTES];
        memcpy(record, from->record, whole);
        size_t at = take_u16(in);
        uint8_t change = take_u8(in);
        record[at % whole] ^= change;
        size_t bytes = record_plain_bytes(record);
        if (bytes > MAX_PLAIN_BYTES || record_bytes(bytes) > whole) {
            return; // its reader would wait for more, or refuse the length
        }
        goes_on = record_open(key, record, bytes, plain) == HVD_OK;
        if (goes_on) {
            MUST(next < n && from == &sealed[next] && change == 0 && bytes == from->bytes);
            MUST(memcmp(plain, from->plain, bytes) == 0);
            next++;
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static const uint8_t secret[RECORD_SECRET_BYTES] = "every direction has one";
    static sealed_t sealed[MAX_RECORDS];
    input_t in = {data, bytes};
    record_key_t sealing = {0}, opening = {0};
    MUST(record_key_init(&sealing, true, secret, NULL) == HVD_OK);
    MUST(record_key_init(&opening, false, secret, NULL) == HVD_OK);
    int n = 1 + take_u8(&in) % MAX_RECORDS;
    seal_all(&in, &sealing, sealed, n);
    open_all(&in, &opening, sealed, n);
    record_key_clear(&sealing);
    record_key_clear(&opening);
    return 0;
}
