// SPDX-License-Identifier: Apache-2.0
//
// record.h - encrypted records: the cipher of one direction of a connection, without a socket.
//
//   record = u32 plaintext bytes | u32 zero | ciphertext | 16-byte tag        (little-endian)
//
// The plaintext is filled up with zeros so that a record is a multiple of 16 bytes long: see
// record.c.
//
// The header is authenticated with the ciphertext. Records have no number on the wire: both ends
// count, so one that is dropped, repeated, moved or sent back to its sender does not open. An empty
// record says that its sender goes on with the next key; sealing and opening it does that.
// A record_key_t belongs to one thread at a time and is used for sealing or for opening, not both.
#ifndef HVD_WIRE_RECORD_H
#define HVD_WIRE_RECORD_H

#include "base/base.h"

#include <openssl/types.h>

#define RECORD_HEADER_BYTES ((size_t)8)
#define RECORD_TAG_BYTES ((size_t)16)
#define RECORD_ALIGNMENT ((size_t)16)
#define RECORD_EXTRA_BYTES (RECORD_HEADER_BYTES + RECORD_TAG_BYTES + RECORD_ALIGNMENT) // at most
#define RECORD_MAX_BYTES (64 * KIB) // of plaintext
#define RECORD_SECRET_BYTES 32
#define RECORD_IV_BYTES 12

typedef struct record_key {
    EVP_CIPHER_CTX *cipher; // holds the key; NULL: no key
    bool seals;
    uint64_t number; // of the next record under this key
    uint8_t iv[RECORD_IV_BYTES];
    uint8_t secret[RECORD_SECRET_BYTES]; // the next key comes from it
} record_key_t;

// `secret` is known to the two ends of this direction only. key is {0} or cleared before.
hvd_status_t record_key_init(record_key_t *key, bool seals,
                             const uint8_t secret[RECORD_SECRET_BYTES], err_t *err);
void record_key_clear(record_key_t *key); // wipes; safe on {0}
// True when as much has been sealed as one key is good for: seal an empty record.
bool record_key_is_worn(const record_key_t *key);

// Of a whole record with that much plaintext.
static inline size_t record_bytes(size_t plain_bytes)
{
    return (plain_bytes + RECORD_HEADER_BYTES + RECORD_TAG_BYTES + RECORD_ALIGNMENT - 1) &
           ~(RECORD_ALIGNMENT - 1);
}

// Writes record_bytes(bytes) to record. At most RECORD_MAX_BYTES; the two do not overlap.
hvd_status_t record_seal(record_key_t *key, const void *plain, size_t bytes, uint8_t *record,
                         err_t *err);
// Plaintext bytes announced by a header; RECORD_MAX_BYTES + 1 if it cannot be one. Nothing is
// proved yet: the header may come from anybody.
size_t record_plain_bytes(const uint8_t header[RECORD_HEADER_BYTES]);
// Opens a whole record of that many plaintext bytes. plain may be the ciphertext's own place. On
// failure (HVD_PROTOCOL, no sentence: only the caller knows whose record it was) plain is wiped and
// the key is of no use any more.
hvd_status_t record_open(record_key_t *key, const uint8_t *record, size_t bytes, void *plain);

#endif
