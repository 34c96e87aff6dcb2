// SPDX-License-Identifier: Apache-2.0
//
// record.c - AES-128-GCM over counted records, with a chain of keys.
//
// Why not TLS's own records: OpenSSL copies every byte once more on either side, cuts at 16 KiB and
// takes microseconds for a message of a few bytes; kTLS would help but is often not in the kernel.
// Here the cipher reads the caller's memory and writes the staging buffer, or the other way round,
// and that is the only pass over the bytes.
//
// Why it is sound: it uses the cipher as TLS 1.3 does (RFC 8446, 5.2 to 5.5 and 7.2).
// - The secret comes from the exporter of a TLS 1.3 handshake: fresh for each connection, known to
//   its two ends only, and another one for each direction.
// - The nonce is a static IV xor the record's number, so it is never used twice under a key, and a
//   record opens only in its place. The header is additional data.
// - A key is left long before AES-GCM wears out: RFC 8446 allows 2^24.5 records of 16 KiB, that is
//   2^38.5 bytes. The next secret is HKDF-Expand of the last one, which is wiped: one-way, so a key
//   that leaks does not open what was sent before.
//
// Why multiples of 16: the kernel puts what a thread sends, on all its sockets, one after the other
// into pages, and copies with an instruction that takes sixteen times as long on some processors
// (Zen 4) when it writes 1 to 15 bytes further into a page than it reads. A control message of 30
// bytes would put the tensor that follows on another link there.
//
// Cost: a quarter of a microsecond per record plus AES-GCM. The cipher keeps its key schedule; a
// record sets the nonce only. Thread and ownership: see the header.
#include "wire/record.h"

#include "wire/codec.h"

#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#define KEY_BYTES 16
#define BYTES_PER_KEY ((uint64_t)1 << 38)
#define RECORDS_PER_KEY (BYTES_PER_KEY / RECORD_MAX_BYTES)

// --- Keys ----------------------------------------------------------------------------------------

// HKDF-Expand (RFC 5869) with SHA-256, for one block or less of output.
static bool expand(const uint8_t secret[RECORD_SECRET_BYTES], const char *label, uint8_t *out,
                   size_t bytes)
{
    uint8_t block[EVP_MAX_MD_SIZE];
    uint8_t info[32];
    size_t label_bytes = strlen(label);
    memcpy(info, label, label_bytes);
    info[label_bytes] = 1; // the number of the block
    bool ok =
        HMAC(EVP_sha256(), secret, RECORD_SECRET_BYTES, info, label_bytes + 1, block, NULL) != NULL;
    if (ok) {
        memcpy(out, block, bytes);
    }
    wipe(block, sizeof block);
    return ok;
}

// Gives the cipher the key that belongs to key->secret.
static bool load_key(record_key_t *key)
{
    uint8_t bytes[KEY_BYTES];
    bool ok = expand(key->secret, "hvd record key", bytes, sizeof bytes) &&
              expand(key->secret, "hvd record iv", key->iv, sizeof key->iv) &&
              EVP_CipherInit_ex(key->cipher, EVP_aes_128_gcm(), NULL, bytes, NULL, key->seals);
    wipe(bytes, sizeof bytes);
    key->number = 0;
    return ok;
}

static bool load_next_key(record_key_t *key)
{
    return expand(key->secret, "hvd record next", key->secret, sizeof key->secret) && load_key(key);
}

hvd_status_t record_key_init(record_key_t *key, bool seals,
                             const uint8_t secret[RECORD_SECRET_BYTES], err_t *err)
{
    key->cipher = EVP_CIPHER_CTX_new();
    key->seals = seals;
    memcpy(key->secret, secret, sizeof key->secret);
    if (key->cipher == NULL || !load_key(key)) {
        record_key_clear(key);
        ERR_clear_error();
        return fail(err, HVD_SYSTEM, "OpenSSL cannot set up AES-128-GCM for a connection");
    }
    return HVD_OK;
}

void record_key_clear(record_key_t *key)
{
    EVP_CIPHER_CTX_free(key->cipher);
    wipe(key, sizeof *key);
}

bool record_key_is_worn(const record_key_t *key)
{
    return key->number >= RECORDS_PER_KEY;
}

// --- Records -------------------------------------------------------------------------------------

static void write_header(uint8_t header[RECORD_HEADER_BYTES], size_t bytes)
{
    buf_t out = {.data = header, .cap = RECORD_HEADER_BYTES};
    put_u32(&out, (uint32_t)bytes);
    put_u32(&out, 0);
}

size_t record_plain_bytes(const uint8_t header[RECORD_HEADER_BYTES])
{
    reader_t reader = reader_of(header, RECORD_HEADER_BYTES);
    size_t bytes = get_u32(&reader);
    return get_u32(&reader) == 0 && bytes <= RECORD_MAX_BYTES ? bytes : RECORD_MAX_BYTES + 1;
}

static size_t padding_of(size_t bytes)
{
    return record_bytes(bytes) - bytes - RECORD_HEADER_BYTES - RECORD_TAG_BYTES;
}

// A record's text and its padding; they need not lie together.
typedef struct halves {
    uint8_t *text, *padding;
} halves_t;

// Everything before the tag. Counts the record.
static bool run_cipher(record_key_t *key, const uint8_t *header, halves_t from, size_t bytes,
                       halves_t to)
{
    uint8_t nonce[RECORD_IV_BYTES];
    uint64_t number = key->number++;
    int n = 0;
    memcpy(nonce, key->iv, sizeof nonce);
    for (size_t i = 0; i < sizeof number; i++) {
        nonce[sizeof nonce - 1 - i] ^= (uint8_t)(number >> 8 * i);
    }
    return EVP_CipherInit_ex(key->cipher, NULL, NULL, NULL, nonce, key->seals) &&
           EVP_CipherUpdate(key->cipher, NULL, &n, header, (int)RECORD_HEADER_BYTES) &&
           (bytes == 0 || EVP_CipherUpdate(key->cipher, to.text, &n, from.text, (int)bytes)) &&
           EVP_CipherUpdate(key->cipher, to.padding, &n, from.padding, (int)padding_of(bytes));
}

hvd_status_t record_seal(record_key_t *key, const void *plain, size_t bytes, uint8_t *record,
                         err_t *err)
{
    uint8_t *ciphertext = record + RECORD_HEADER_BYTES;
    uint8_t *tag = record + record_bytes(bytes) - RECORD_TAG_BYTES;
    uint8_t zeros[RECORD_ALIGNMENT] = {0};
    int n = 0;
    write_header(record, bytes);
    if (!run_cipher(key, record, (halves_t){(uint8_t *)plain, zeros}, bytes,
                    (halves_t){ciphertext, ciphertext + bytes}) ||
        !EVP_CipherFinal_ex(key->cipher, tag, &n) ||
        !EVP_CIPHER_CTX_ctrl(key->cipher, EVP_CTRL_AEAD_GET_TAG, (int)RECORD_TAG_BYTES, tag) ||
        (bytes == 0 && !load_next_key(key))) {
        ERR_clear_error();
        return fail(err, HVD_SYSTEM, "OpenSSL cannot encrypt");
    }
    return HVD_OK;
}

hvd_status_t record_open(record_key_t *key, const uint8_t *record, size_t bytes, void *plain)
{
    uint8_t *ciphertext = (uint8_t *)record + RECORD_HEADER_BYTES;
    uint8_t tag[RECORD_TAG_BYTES], padding[RECORD_ALIGNMENT], unused[1];
    int n = 0;
    memcpy(tag, record + record_bytes(bytes) - sizeof tag, sizeof tag);
    if (!run_cipher(key, record, (halves_t){ciphertext, ciphertext + bytes}, bytes,
                    (halves_t){plain, padding}) ||
        !EVP_CIPHER_CTX_ctrl(key->cipher, EVP_CTRL_AEAD_SET_TAG, (int)sizeof tag, tag) ||
        EVP_CipherFinal_ex(key->cipher, unused, &n) <= 0 || (bytes == 0 && !load_next_key(key))) {
        ERR_clear_error();
        wipe(plain, bytes);
        return HVD_PROTOCOL;
    }
    return HVD_OK;
}
