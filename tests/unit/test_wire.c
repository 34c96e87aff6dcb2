// SPDX-License-Identifier: Apache-2.0
//
// test_wire.c - codec, hello, records and the secure channel: round trips, and all that must be
// refused.
//
// Both ends of a channel live in this thread on a socketpair and are driven in turn, so nothing
// depends on timing. Random inputs come from a fixed seed.
#define _GNU_SOURCE
#include "wire/codec.h"
#include "wire/record.h"
#include "wire/secure.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h> // after ours: it has a macro named fail

#include <errno.h>
#include <fcntl.h>
#include <openssl/core_names.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/params.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#define N_FUZZ_INPUTS 10000
#define N_FUZZ_HANDSHAKES 200
#define STREAM_BYTES (3 * MIB + 12345)

enum { CLIENT, SERVER };

static const uint8_t secret[32] = "thirty-two bytes of test secret";
static const uint8_t other_secret[32] = "thirty-two bytes of wrong secret";

// xorshift64*, seeded: the same inputs in every run.
static uint64_t next_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(2685821657736338717);
}

static hello_t sample_hello(void)
{
    hello_t hello = {.role = HELLO_LINK, .lane = 1, .encrypted = 1, .from = 7, .to = 0x01020304};
    hello_job(secret, hello.job);
    for (size_t i = 0; i < sizeof hello.nonce; i++) {
        hello.nonce[i] = (uint8_t)(i * 17 + 3);
    }
    return hello;
}

// --- Codec ---------------------------------------------------------------------------------------

static void test_codec_round_trip(void **state)
{
    (void)state;
    static const uint64_t varints[] = {0, 1, 127, 128, 300, UINT32_MAX, UINT64_MAX};
    buf_t b = {0};

    put_u8(&b, 0xab);
    put_u16(&b, 0xcdef);
    put_u32(&b, 0x12345678);
    put_u64(&b, UINT64_C(0x1122334455667788));
    put_f64(&b, -0.125);
    for (size_t i = 0; i < N_ELEMENTS(varints); i++) {
        put_varint(&b, varints[i]);
    }
    put_bytes(&b, "xyz", 3);
    assert_false(b.failed);
    assert_int_equal(b.data[1], 0xef); // little-endian

    reader_t r = reader_of(b.data, b.len);
    assert_int_equal(get_u8(&r), 0xab);
    assert_int_equal(get_u16(&r), 0xcdef);
    assert_int_equal(get_u32(&r), 0x12345678);
    assert_true(get_u64(&r) == UINT64_C(0x1122334455667788));
    assert_true(get_f64(&r) == -0.125);
    for (size_t i = 0; i < N_ELEMENTS(varints); i++) {
        assert_true(get_varint(&r) == varints[i]);
    }
    assert_memory_equal(get_bytes(&r, 3), "xyz", 3);
    assert_false(r.bad);
    assert_int_equal(reader_left(&r), 0);
    buf_free(&b);
}

static void test_codec_refuses(void **state)
{
    (void)state;
    uint8_t endless[11];
    memset(endless, 0x80, sizeof endless);

    reader_t r = reader_of("abc", 3);
    assert_int_equal(get_u32(&r), 0);
    assert_true(r.bad);
    assert_int_equal(get_u8(&r), 0); // bad stays bad
    assert_null(get_bytes(&r, 0));

    r = reader_of(endless, sizeof endless);
    assert_int_equal(get_varint(&r), 0);
    assert_true(r.bad);

    r = reader_of("\x0a", 1);
    assert_int_equal(get_count(&r, 9), 0);
    assert_true(r.bad);
    r = reader_of("\x0a", 1);
    assert_int_equal(get_count(&r, 10), 10);
    assert_false(r.bad);

    r = reader_of("abc", 3);
    assert_null(get_bytes(&r, SIZE_MAX));
    assert_true(r.bad);

    r = reader_of(NULL, 0); // a body that is empty may be nowhere
    assert_int_equal(reader_left(&r), 0);
    assert_int_equal(get_u8(&r), 0);
    assert_true(r.bad);
}

// Reads whatever comes, in an order the input itself decides. The reader must stay within it.
static void test_codec_fuzz(void **state)
{
    (void)state;
    uint64_t seed = 1;
    uint8_t input[48];

    for (int i = 0; i < N_FUZZ_INPUTS; i++) {
        size_t bytes = next_random(&seed) % (sizeof input + 1);
        for (size_t k = 0; k < bytes; k++) {
            input[k] = (uint8_t)next_random(&seed);
        }
        // A copy of the exact size, so that the address sanitizer sees one byte too many.
        uint8_t *copy = malloc(bytes > 0 ? bytes : 1);
        memcpy(copy, input, bytes);
        reader_t r = reader_of(copy, bytes);
        size_t before = bytes + 1;
        while (!r.bad && reader_left(&r) < before) {
            before = reader_left(&r);
            switch (get_u8(&r) % 5) {
            case 0:
                get_u64(&r);
                break;
            case 1:
                get_varint(&r);
                break;
            case 2:
                get_bytes(&r, get_u16(&r));
                break;
            case 3:
                get_count(&r, 100);
                break;
            default:
                get_f64(&r);
            }
        }
        assert_true(r.at <= r.end);
        assert_true(r.bad || reader_left(&r) == 0);
        free(copy);
    }
}

// --- Hello ---------------------------------------------------------------------------------------

static void test_hello_round_trip(void **state)
{
    (void)state;
    hello_t hello = sample_hello(), back;
    uint8_t bytes[HELLO_BYTES], job[16], other_job[16];
    err_t err;

    hello_encode(&hello, bytes);
    assert_int_equal(hello_decode(bytes, &back, &err), HVD_OK);
    assert_memory_equal(back.job, hello.job, sizeof hello.job);
    assert_memory_equal(back.nonce, hello.nonce, sizeof hello.nonce);
    assert_int_equal(back.role, hello.role);
    assert_int_equal(back.lane, hello.lane);
    assert_int_equal(back.encrypted, hello.encrypted);
    assert_int_equal(back.from, hello.from);
    assert_int_equal(back.to, hello.to);

    hello_job(secret, job);
    hello_job(other_secret, other_job);
    assert_memory_equal(job, hello.job, sizeof job);
    assert_memory_not_equal(job, other_job, sizeof job);
}

// Each flipped bit either makes the hello invalid or changes what it says: no bit is ignored.
static void test_hello_flipped_bits(void **state)
{
    (void)state;
    hello_t hello = sample_hello(), back;
    uint8_t good[HELLO_BYTES], bytes[HELLO_BYTES], again[HELLO_BYTES];
    int n_refused = 0;
    err_t err;

    hello_encode(&hello, good);
    for (size_t bit = 0; bit < 8 * HELLO_BYTES; bit++) {
        memcpy(bytes, good, sizeof bytes);
        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
        if (hello_decode(bytes, &back, &err) != HVD_OK) {
            assert_int_equal(err.status, HVD_PROTOCOL);
            n_refused++;
            continue;
        }
        hello_encode(&back, again);
        assert_memory_equal(again, bytes, sizeof bytes);
    }
    // Magic, version, padding, role (no single flip makes one valid role of another), encrypted.
    assert_int_equal(n_refused, 64 + 16 + 88 + 8 + 7);
}

static void test_hello_fuzz(void **state)
{
    (void)state;
    uint64_t seed = 2;
    hello_t hello = sample_hello(), back;
    uint8_t good[HELLO_BYTES], bytes[HELLO_BYTES], again[HELLO_BYTES];
    err_t err;

    hello_encode(&hello, good);
    for (int i = 0; i < N_FUZZ_INPUTS; i++) {
        memcpy(bytes, good, sizeof bytes);
        for (uint64_t n = next_random(&seed) % 4 + 1; n > 0; n--) {
            bytes[next_random(&seed) % HELLO_BYTES] = (uint8_t)next_random(&seed);
        }
        if (hello_decode(bytes, &back, &err) == HVD_OK) {
            hello_encode(&back, again);
            assert_memory_equal(again, bytes, sizeof bytes);
        }
    }
}

// --- Records -------------------------------------------------------------------------------------

static void fill(uint8_t *data, size_t bytes, uint64_t seed)
{
    for (size_t i = 0; i < bytes; i++) {
        data[i] = (uint8_t)(seed + i * 31 + (i >> 9));
    }
}

typedef struct keys {
    record_key_t sealing, opening;
} keys_t;

static keys_t keys_of(const uint8_t secret_bytes[RECORD_SECRET_BYTES])
{
    keys_t keys = {0};
    assert_int_equal(record_key_init(&keys.sealing, true, secret_bytes, NULL), HVD_OK);
    assert_int_equal(record_key_init(&keys.opening, false, secret_bytes, NULL), HVD_OK);
    return keys;
}

static void keys_free(keys_t *keys)
{
    record_key_clear(&keys->sealing);
    record_key_clear(&keys->opening);
    assert_int_equal(ERR_peek_error(), 0);
}

static void seal(keys_t *keys, const char *text, uint8_t record[64])
{
    assert_int_equal(record_seal(&keys->sealing, text, strlen(text), record, NULL), HVD_OK);
}

static hvd_status_t open_text(keys_t *keys, const uint8_t *record, char text[64])
{
    size_t bytes = record_plain_bytes(record);
    memset(text, 0, 64);
    return record_open(&keys->opening, record, bytes, text);
}

static void test_record_round_trip(void **state)
{
    (void)state;
    static const size_t sizes[] = {
        1, 15, 16, 17, 1000, 16384, RECORD_MAX_BYTES - 1, RECORD_MAX_BYTES};
    static uint8_t plain[RECORD_MAX_BYTES], got[RECORD_MAX_BYTES];
    static uint8_t record[RECORD_MAX_BYTES + RECORD_EXTRA_BYTES];
    keys_t keys = keys_of(secret);

    for (size_t i = 0; i < 2 * N_ELEMENTS(sizes); i++) {
        size_t bytes = sizes[i / 2];
        fill(plain, bytes, i);
        assert_int_equal(record_seal(&keys.sealing, plain, bytes, record, NULL), HVD_OK);
        assert_int_equal(record_plain_bytes(record), bytes);
        uint8_t *to = i % 2 == 0 ? got : record + RECORD_HEADER_BYTES;
        assert_int_equal(record_open(&keys.opening, record, bytes, to), HVD_OK);
        assert_memory_equal(to, plain, bytes);
    }
    keys_free(&keys);
}

static void test_record_headers(void **state)
{
    (void)state;
    const size_t refused = RECORD_MAX_BYTES + 1;
    assert_int_equal(record_plain_bytes((const uint8_t *)"\0\0\0\0\0\0\0\0"), 0);
    assert_int_equal(record_plain_bytes((const uint8_t *)"\2\1\0\0\0\0\0\0"), 258);
    assert_int_equal(record_plain_bytes((const uint8_t *)"\0\0\1\0\0\0\0\0"), 65536);
    assert_int_equal(record_plain_bytes((const uint8_t *)"\1\0\1\0\0\0\0\0"), refused);
    assert_int_equal(record_plain_bytes((const uint8_t *)"\377\377\377\377\0\0\0\0"), refused);
    for (size_t i = 4; i < RECORD_HEADER_BYTES; i++) {
        uint8_t header[RECORD_HEADER_BYTES] = {5};
        header[i] = 1;
        assert_int_equal(record_plain_bytes(header), refused);
    }
}

static void test_record_flipped_bits(void **state)
{
    (void)state;
    static const char text[] = "twenty bytes of text";
    const size_t bytes = strlen(text);
    uint8_t record[64];
    char got[64];

    for (size_t bit = 0; bit < 8 * record_bytes(bytes); bit++) {
        static const char none[64];
        keys_t keys = keys_of(secret);
        seal(&keys, text, record);
        record[bit / 8] ^= (uint8_t)(1 << bit % 8);
        // As if the length were known from elsewhere: the cipher notices a changed header too.
        memset(got, 'x', sizeof got);
        assert_int_equal(record_open(&keys.opening, record, bytes, got), HVD_PROTOCOL);
        assert_memory_equal(got, none, bytes); // nothing that was not proved is left there
        keys_free(&keys);
    }
}

// Each record opens once, in its place, for its receiver.
static void test_record_order(void **state)
{
    (void)state;
    uint8_t first[64], second[64];
    char got[64];
    keys_t keys = keys_of(secret);

    seal(&keys, "first", first);
    seal(&keys, "second", second);
    assert_int_equal(open_text(&keys, first, got), HVD_OK);
    assert_string_equal(got, "first");
    assert_int_equal(open_text(&keys, first, got), HVD_PROTOCOL); // repeated
    keys_free(&keys);

    keys = keys_of(secret);
    seal(&keys, "first", first);
    seal(&keys, "second", second);
    assert_int_equal(open_text(&keys, second, got), HVD_PROTOCOL); // the first was dropped
    keys_free(&keys);

    keys = keys_of(secret);
    seal(&keys, "first", first);
    keys_t other = keys_of(other_secret);
    assert_int_equal(open_text(&other, first, got), HVD_PROTOCOL);
    keys_free(&other);
    keys_free(&keys);
}

static void test_record_key_change(void **state)
{
    (void)state;
    uint8_t empty[64], record[64], fresh[64];
    char got[64];
    keys_t keys = keys_of(secret);

    seal(&keys, "x", fresh);
    assert_int_equal(open_text(&keys, fresh, got), HVD_OK);
    for (int i = 0; i < 3; i++) {
        keys_t before = keys;
        seal(&keys, "", empty);
        assert_int_equal(open_text(&keys, empty, got), HVD_OK);
        assert_memory_not_equal(keys.sealing.secret, before.sealing.secret, RECORD_SECRET_BYTES);
        assert_memory_equal(keys.sealing.secret, keys.opening.secret, RECORD_SECRET_BYTES);
        assert_memory_not_equal(keys.sealing.iv, before.sealing.iv, RECORD_IV_BYTES);
        seal(&keys, "x", record);
        assert_memory_not_equal(record, fresh, 9); // the same text as number 0 of another key
        assert_int_equal(open_text(&keys, record, got), HVD_OK);
        assert_string_equal(got, "x");
    }
    // A receiver that missed the change cannot read on.
    seal(&keys, "", empty);
    seal(&keys, "x", record);
    assert_int_equal(open_text(&keys, record, got), HVD_PROTOCOL);
    keys_free(&keys);
}

// 2^38 bytes in full records is what a key is good for.
static void test_record_wear(void **state)
{
    (void)state;
    uint8_t record[64];
    keys_t keys = keys_of(secret);

    keys.sealing.number = (UINT64_C(1) << 38) / RECORD_MAX_BYTES - 1;
    assert_false(record_key_is_worn(&keys.sealing));
    seal(&keys, "x", record);
    assert_true(record_key_is_worn(&keys.sealing));
    seal(&keys, "", record);
    assert_false(record_key_is_worn(&keys.sealing));
    keys_free(&keys);
}

static void hkdf_expand(const uint8_t *key, const char *info, uint8_t *out, size_t bytes)
{
    int mode = EVP_KDF_HKDF_MODE_EXPAND_ONLY;
    EVP_KDF *kdf = EVP_KDF_fetch(NULL, "HKDF", NULL);
    EVP_KDF_CTX *context = EVP_KDF_CTX_new(kdf);
    OSSL_PARAM params[] = {
        OSSL_PARAM_construct_int(OSSL_KDF_PARAM_MODE, &mode),
        OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, (char *)"SHA256", 0),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY, (void *)(uintptr_t)key, 32),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_INFO, (void *)(uintptr_t)info,
                                          strlen(info)),
        OSSL_PARAM_construct_end(),
    };
    assert_int_equal(EVP_KDF_derive(context, out, bytes, params), 1);
    EVP_KDF_CTX_free(context);
    EVP_KDF_free(kdf);
}

// What record.h says, computed by other means: HKDF, nonce, additional data, layout.
static void test_record_format(void **state)
{
    (void)state;
    static const char text[] = "format";
    static const uint8_t padded[8] = "format";
    uint8_t key[16], iv[12], record[64], expected[64] = {6};
    keys_t keys = keys_of(secret);
    EVP_CIPHER_CTX *cipher = EVP_CIPHER_CTX_new();
    int n;

    hkdf_expand(secret, "hvd record key", key, sizeof key);
    hkdf_expand(secret, "hvd record iv", iv, sizeof iv);
    keys.sealing.number = UINT64_C(0x0102030405060708);
    for (int i = 0; i < 8; i++) {
        iv[4 + i] ^= (uint8_t)(i + 1);
    }
    assert_true(EVP_EncryptInit_ex(cipher, EVP_aes_128_gcm(), NULL, key, iv));
    assert_true(EVP_EncryptUpdate(cipher, NULL, &n, expected, 8));
    assert_true(EVP_EncryptUpdate(cipher, expected + 8, &n, padded, sizeof padded));
    assert_true(EVP_EncryptFinal_ex(cipher, expected + 16, &n));
    assert_true(EVP_CIPHER_CTX_ctrl(cipher, EVP_CTRL_AEAD_GET_TAG, 16, expected + 16));
    seal(&keys, text, record);
    assert_int_equal(record_bytes(6), 32);
    assert_memory_equal(record, expected, 32);
    EVP_CIPHER_CTX_free(cipher);
    keys_free(&keys);
}

// --- Two ends of a channel -----------------------------------------------------------------------

typedef struct pair {
    int fds[2];
    secure_keys_t *keys[2];
    secure_t *ends[2];
    hvd_status_t status[2];
    err_t errs[2];
} pair_t;

static void make_sockets(int fds[2])
{
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
}

static void pair_new(pair_t *pair, const uint8_t *client_secret, const uint8_t *server_secret,
                     const uint8_t client_hello[HELLO_BYTES],
                     const uint8_t server_hello[HELLO_BYTES])
{
    memset(pair, 0, sizeof *pair);
    make_sockets(pair->fds);
    assert_int_equal(secure_keys_new(client_secret, &pair->keys[CLIENT], NULL), HVD_OK);
    assert_int_equal(secure_keys_new(server_secret, &pair->keys[SERVER], NULL), HVD_OK);
    assert_int_equal(secure_new(pair->keys[CLIENT], pair->fds[CLIENT], false, client_hello,
                                &pair->ends[CLIENT], NULL),
                     HVD_OK);
    assert_int_equal(secure_new(pair->keys[SERVER], pair->fds[SERVER], true, server_hello,
                                &pair->ends[SERVER], NULL),
                     HVD_OK);
    pair->status[CLIENT] = pair->status[SERVER] = HVD_IN_PROGRESS;
}

static void pair_free(pair_t *pair)
{
    for (int i = 0; i < 2; i++) {
        secure_free(pair->ends[i]);
        secure_keys_free(pair->keys[i]);
        if (pair->fds[i] >= 0) {
            close(pair->fds[i]);
        }
    }
    assert_int_equal(ERR_peek_error(), 0); // nothing is left behind for others of this thread
}

static void shake(pair_t *pair)
{
    for (int turn = 0; turn < 20; turn++) {
        for (int i = 0; i < 2; i++) {
            if (pair->status[i] == HVD_IN_PROGRESS) {
                pair->status[i] = secure_handshake(pair->ends[i], &pair->errs[i]);
            }
        }
    }
}

static void pair_ready(pair_t *pair)
{
    hello_t hello = sample_hello();
    uint8_t bytes[HELLO_BYTES];
    hello_encode(&hello, bytes);
    pair_new(pair, secret, secret, bytes, bytes);
    shake(pair);
    assert_int_equal(pair->status[CLIENT], HVD_OK);
    assert_int_equal(pair->status[SERVER], HVD_OK);
}

// Sends `bytes` from one end to the other and compares.
static void expect_transfer(pair_t *pair, int from, size_t bytes, size_t piece)
{
    uint8_t *sent = malloc(bytes + 1), *got = malloc(bytes + 1);
    size_t n_sent = 0, n_got = 0;
    fill(sent, bytes, bytes);
    for (int idle = 0; n_got < bytes && idle < 1000; idle++) {
        size_t want = MIN(piece, bytes - n_sent);
        ssize_t n = secure_send(pair->ends[from], sent + n_sent, want, &pair->errs[from]);
        assert_true(n >= 0);
        n_sent += (size_t)n;
        ssize_t m = secure_recv(pair->ends[!from], got + n_got, bytes - n_got, &pair->errs[!from]);
        assert_true(m >= 0);
        n_got += (size_t)m;
        idle = n + m > 0 ? 0 : idle;
    }
    assert_int_equal(n_got, bytes);
    assert_memory_equal(got, sent, bytes);
    free(sent);
    free(got);
}

// What the client sends with these calls, as it lies on the wire.
static size_t capture(pair_t *pair, const void *data, size_t bytes, uint8_t *wire, size_t limit)
{
    size_t n_sent = 0, n_wire = 0;
    while (n_sent < bytes || secure_wants_write(pair->ends[CLIENT])) {
        ssize_t n =
            secure_send(pair->ends[CLIENT], (const uint8_t *)data + n_sent, bytes - n_sent, NULL);
        assert_true(n >= 0);
        n_sent += (size_t)n;
        while ((n = recv(pair->fds[SERVER], wire + n_wire, limit - n_wire, 0)) > 0) {
            n_wire += (size_t)n;
        }
    }
    return n_wire;
}

static void inject(pair_t *pair, int to, const void *wire, size_t bytes)
{
    assert_int_equal(send(pair->fds[!to], wire, bytes, MSG_NOSIGNAL), bytes);
}

static void test_secure_transfers(void **state)
{
    (void)state;
    static const size_t sizes[] = {1,     2,     100,    16384,  65511,       65535,
                                   65536, 65537, 131072, 200001, STREAM_BYTES};
    pair_t pair;
    pair_ready(&pair);
    char got[64];
    assert_int_equal(secure_send(pair.ends[CLIENT], "raw bytes", 9, NULL), 9);
    assert_true(recv(pair.fds[SERVER], got, sizeof got, MSG_PEEK) > 9); // a record
    assert_int_equal(secure_recv(pair.ends[SERVER], got, sizeof got, NULL), 9);
    for (size_t i = 0; i < N_ELEMENTS(sizes); i++) {
        expect_transfer(&pair, CLIENT, sizes[i], sizes[i]);
        expect_transfer(&pair, SERVER, sizes[i], 5000);
    }
    pair_free(&pair);
}

// Ciphertext on the socket does not show the text.
static void test_secure_hides(void **state)
{
    (void)state;
    char seen[512];
    pair_t pair;
    pair_ready(&pair);
    assert_int_equal(secure_send(pair.ends[CLIENT], "visible words", 13, NULL), 13);
    ssize_t n = recv(pair.fds[SERVER], seen, sizeof seen, MSG_PEEK);
    assert_true(n > 13);
    assert_null(memmem(seen, (size_t)n, "visible", 7));
    pair_free(&pair);
}

// Both ends send more than the sockets hold; neither may wait for the other for ever.
static void test_secure_both_directions(void **state)
{
    (void)state;
    uint8_t *data = malloc(STREAM_BYTES), *got[2] = {malloc(STREAM_BYTES), malloc(STREAM_BYTES)};
    size_t n_sent[2] = {0, 0}, n_got[2] = {0, 0};
    pair_t pair;

    pair_ready(&pair);
    fill(data, STREAM_BYTES, 5);
    for (int turn = 0; turn < 100000 && (n_got[0] < STREAM_BYTES || n_got[1] < STREAM_BYTES);
         turn++) {
        for (int i = 0; i < 2; i++) {
            ssize_t n = secure_send(pair.ends[i], data + n_sent[i], STREAM_BYTES - n_sent[i], NULL);
            assert_true(n >= 0);
            n_sent[i] += (size_t)n;
        }
        for (int i = 0; i < 2; i++) {
            ssize_t n = secure_recv(pair.ends[i], got[i] + n_got[i], STREAM_BYTES - n_got[i], NULL);
            assert_true(n >= 0);
            n_got[i] += (size_t)n;
        }
    }
    for (int i = 0; i < 2; i++) {
        assert_int_equal(n_got[i], STREAM_BYTES);
        assert_memory_equal(got[i], data, STREAM_BYTES);
        free(got[i]);
    }
    free(data);
    pair_free(&pair);
}

// A full socket: what was taken stays inside, wants_write says so, and flush brings it out.
static void test_secure_full_socket(void **state)
{
    (void)state;
    static uint8_t data[MIB], got[MIB];
    size_t n_sent = 0, n_got = 0;
    pair_t pair;
    ssize_t n;

    pair_ready(&pair);
    fill(data, sizeof data, 1);
    while ((n = secure_send(pair.ends[CLIENT], data + n_sent, sizeof data - n_sent, NULL)) > 0) {
        n_sent += (size_t)n;
    }
    assert_int_equal(n, 0);
    assert_true(n_sent < sizeof data);
    assert_true(secure_wants_write(pair.ends[CLIENT]));
    assert_int_equal(secure_flush(pair.ends[CLIENT], NULL), HVD_IN_PROGRESS);
    while (n_got < n_sent) {
        n = secure_recv(pair.ends[SERVER], got + n_got, sizeof got - n_got, NULL);
        assert_true(n >= 0);
        n_got += (size_t)n;
        assert_true(secure_flush(pair.ends[CLIENT], NULL) >= 0);
    }
    assert_false(secure_wants_write(pair.ends[CLIENT]));
    assert_int_equal(n_got, n_sent);
    assert_memory_equal(got, data, n_got);
    pair_free(&pair);
}

// What may wait leaves with what comes next, in order; a flush lets it go alone.
static void test_secure_send_later(void **state)
{
    (void)state;
    char got[8];
    pair_t pair;
    pair_ready(&pair);
    for (int flushes = 0; flushes < 2; flushes++) {
        assert_int_equal(secure_send_later(pair.ends[CLIENT], "head", 4, NULL), 4);
        assert_int_equal(secure_recv(pair.ends[SERVER], got, sizeof got, NULL), 0);
        assert_true(secure_wants_write(pair.ends[CLIENT]));
        if (flushes) {
            assert_int_equal(secure_flush(pair.ends[CLIENT], NULL), HVD_OK);
        } else {
            assert_int_equal(secure_send(pair.ends[CLIENT], "tail", 4, NULL), 4);
        }
        assert_false(secure_wants_write(pair.ends[CLIENT]));
        assert_int_equal(secure_recv(pair.ends[SERVER], got, 4, NULL), 4);
        assert_memory_equal(got, "head", 4);
        if (!flushes) {
            assert_int_equal(secure_recv(pair.ends[SERVER], got, 4, NULL), 4);
            assert_memory_equal(got, "tail", 4);
        }
    }
    pair_free(&pair);
}

// Bytes that poll() cannot see are announced, and gone when secure_recv says there are none.
static void test_secure_pending(void **state)
{
    (void)state;
    uint8_t byte;
    pair_t pair;
    pair_ready(&pair);
    assert_int_equal(secure_pending(pair.ends[SERVER]), 0);
    assert_int_equal(secure_send(pair.ends[CLIENT], "ab", 2, NULL), 2);
    assert_int_equal(secure_send(pair.ends[CLIENT], "c", 1, NULL), 1);
    for (const char *want = "abc"; *want != '\0'; want++) {
        assert_int_equal(secure_recv(pair.ends[SERVER], &byte, 1, NULL), 1);
        assert_int_equal(byte, *want);
        assert_true((secure_pending(pair.ends[SERVER]) > 0) == (want[1] != '\0'));
    }
    assert_int_equal(secure_recv(pair.ends[SERVER], &byte, 1, NULL), 0);
    assert_int_equal(secure_pending(pair.ends[SERVER]), 0);
    pair_free(&pair);
}

// Records come in pieces that fit none of their parts.
static void test_secure_drip(void **state)
{
    (void)state;
    enum { BYTES = 70000 };
    static uint8_t data[BYTES], wire[BYTES + 1024], got[BYTES];
    static const size_t pieces[] = {1, 7, 9, 100, 65559, 65561};

    fill(data, sizeof data, 3);
    for (size_t i = 0; i < N_ELEMENTS(pieces); i++) {
        pair_t pair;
        pair_ready(&pair);
        size_t n_got = 0, at = 0, n = 0;
        n = capture(&pair, data, 10, wire, sizeof wire);
        n += capture(&pair, data + 10, i < 3 ? 200 : BYTES - 10, wire + n, sizeof wire - n);
        while (at < n) {
            inject(&pair, SERVER, wire + at, MIN(pieces[i], n - at));
            at += MIN(pieces[i], n - at);
            ssize_t m = secure_recv(pair.ends[SERVER], got + n_got, sizeof got - n_got, NULL);
            assert_true(m >= 0);
            assert_true(secure_drained(pair.ends[SERVER]));
            n_got += (size_t)m;
        }
        assert_int_equal(n_got, i < 3 ? 210 : BYTES);
        assert_memory_equal(got, data, n_got);
        pair_free(&pair);
    }
}

// peek and recv share one stream; what is shown stays until it is consumed.
static void test_secure_peek(void **state)
{
    (void)state;
    const char *shown;
    char got[8];
    pair_t pair;

    pair_ready(&pair);
    secure_t *server = pair.ends[SERVER];
    assert_int_equal(secure_peek(server, (const void **)&shown, NULL), 0);
    assert_int_equal(secure_send(pair.ends[CLIENT], "abcdef", 6, NULL), 6);
    assert_int_equal(secure_rekey(pair.ends[CLIENT], NULL), HVD_OK);
    assert_int_equal(secure_send(pair.ends[CLIENT], "ghi", 3, NULL), 3);
    for (int again = 0; again < 2; again++) {
        assert_int_equal(secure_peek(server, (const void **)&shown, NULL), 6);
        assert_memory_equal(shown, "abcdef", 6);
    }
    secure_consume(server, 2);
    assert_int_equal(secure_pending(server), 4);
    assert_int_equal(secure_recv(server, got, 3, NULL), 3);
    assert_memory_equal(got, "cde", 3);
    assert_int_equal(secure_peek(server, (const void **)&shown, NULL), 1);
    assert_int_equal(*shown, 'f');
    secure_consume(server, 1);
    assert_false(secure_drained(server)); // the next record is inside
    assert_int_equal(secure_peek(server, (const void **)&shown, NULL), 3);
    assert_memory_equal(shown, "ghi", 3);
    secure_consume(server, 3);
    assert_true(secure_drained(server));
    assert_int_equal(secure_peek(server, (const void **)&shown, NULL), 0);
    pair_free(&pair);
}

static void test_secure_rekey(void **state)
{
    (void)state;
    pair_t pair;
    pair_ready(&pair);
    for (int i = 0; i < 10; i++) {
        assert_int_equal(secure_rekey(pair.ends[i % 2], NULL), HVD_OK);
        expect_transfer(&pair, i % 2, 40000, 40000);
        expect_transfer(&pair, !(i % 2), 40000, 40000);
    }
    pair_free(&pair);
}

// Raw bytes that follow the client's last handshake bytes at once are not swallowed: a data link
// without encryption leaves the object there, and uses the socket.
static void test_secure_left_for_the_socket(void **state)
{
    (void)state;
    hello_t hello = sample_hello();
    uint8_t bytes[HELLO_BYTES];
    pair_t pair;

    hello_encode(&hello, bytes);
    pair_new(&pair, secret, secret, bytes, bytes);
    while (pair.status[CLIENT] == HVD_IN_PROGRESS) {
        pair.status[CLIENT] = secure_handshake(pair.ends[CLIENT], NULL);
        if (pair.status[CLIENT] == HVD_IN_PROGRESS) {
            pair.status[SERVER] = secure_handshake(pair.ends[SERVER], NULL);
        }
    }
    assert_int_equal(pair.status[CLIENT], HVD_OK);
    assert_int_equal(pair.status[SERVER], HVD_IN_PROGRESS);
    assert_false(secure_wants_write(pair.ends[CLIENT]));
    assert_int_equal(send(pair.fds[CLIENT], "raw bytes", 9, 0), 9);
    assert_int_equal(secure_handshake(pair.ends[SERVER], NULL), HVD_OK);
    assert_false(secure_wants_write(pair.ends[SERVER]));
    assert_int_equal(secure_pending(pair.ends[SERVER]), 0);
    char got[16];
    assert_int_equal(recv(pair.fds[SERVER], got, sizeof got, 0), 9);
    assert_memory_equal(got, "raw bytes", 9);
    assert_int_equal(send(pair.fds[SERVER], "and back", 8, 0), 8);
    assert_int_equal(secure_pending(pair.ends[CLIENT]), 0);
    assert_int_equal(recv(pair.fds[CLIENT], got, sizeof got, 0), 8);
    assert_memory_equal(got, "and back", 8);
    pair_free(&pair);
}

// --- Refusals ------------------------------------------------------------------------------------

static void test_secure_wrong_secret(void **state)
{
    (void)state;
    hello_t hello = sample_hello();
    uint8_t bytes[HELLO_BYTES];
    pair_t pair;

    hello_encode(&hello, bytes);
    pair_new(&pair, other_secret, secret, bytes, bytes);
    shake(&pair);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pair.status[i], HVD_UNAUTHENTICATED);
        assert_non_null(strstr(pair.errs[i].text, "HOROVOD_SECRET_FILE"));
        assert_int_equal(secure_send(pair.ends[i], "x", 1, NULL), 0); // never opens
    }
    pair_free(&pair);
}

// The hello is part of the key: an attacker who changes any byte of it breaks the handshake.
static void test_secure_flipped_hello(void **state)
{
    (void)state;
    hello_t hello = sample_hello();
    uint8_t bytes[HELLO_BYTES], flipped[HELLO_BYTES];

    hello_encode(&hello, bytes);
    for (size_t i = 0; i < HELLO_BYTES; i++) {
        pair_t pair;
        memcpy(flipped, bytes, sizeof bytes);
        flipped[i] ^= (uint8_t)(1 << i % 8);
        pair_new(&pair, secret, secret, bytes, flipped);
        shake(&pair);
        assert_int_equal(pair.status[CLIENT], HVD_UNAUTHENTICATED);
        assert_int_equal(pair.status[SERVER], HVD_UNAUTHENTICATED);
        pair_free(&pair);
    }
}

static void test_secure_peer_closes(void **state)
{
    (void)state;
    hello_t hello = sample_hello();
    uint8_t bytes[HELLO_BYTES], data[64];
    pair_t pair;
    ssize_t n;

    // During the handshake, either side.
    for (int gone = 0; gone < 2; gone++) {
        hello_encode(&hello, bytes);
        pair_new(&pair, secret, secret, bytes, bytes);
        secure_handshake(pair.ends[CLIENT], NULL);
        close(pair.fds[gone]);
        pair.fds[gone] = -1;
        hvd_status_t status = HVD_IN_PROGRESS;
        for (int i = 0; i < 5 && status == HVD_IN_PROGRESS; i++) {
            status = secure_handshake(pair.ends[!gone], &pair.errs[!gone]);
        }
        assert_int_equal(status, HVD_PEER_LOST);
        assert_string_not_equal(pair.errs[!gone].text, "");
        pair_free(&pair);
    }
    // Afterwards: what was sent before is still read; writing raises no signal.
    pair_ready(&pair);
    assert_int_equal(secure_send(pair.ends[CLIENT], "last", 4, NULL), 4);
    close(pair.fds[CLIENT]);
    pair.fds[CLIENT] = -1;
    while ((n = secure_send(pair.ends[SERVER], data, sizeof data, &pair.errs[SERVER])) >= 0) {
    }
    assert_int_equal(n, HVD_PEER_LOST);
    assert_int_equal(secure_recv(pair.ends[SERVER], data, sizeof data, NULL), 4);
    assert_memory_equal(data, "last", 4);
    for (int again = 0; again < 2; again++) {
        n = secure_recv(pair.ends[SERVER], data, sizeof data, &pair.errs[SERVER]);
        assert_int_equal(n, HVD_PEER_LOST);
        assert_int_equal(pair.errs[SERVER].status, HVD_PEER_LOST);
    }
    pair_free(&pair);
}

static void test_secure_refuse(void **state)
{
    (void)state;
    hello_t hello = sample_hello();
    uint8_t bytes[HELLO_BYTES];
    pair_t pair;

    hello_encode(&hello, bytes);
    // The refusal comes before or after the client's first flight.
    for (int early = 0; early < 2; early++) {
        pair_new(&pair, secret, secret, bytes, bytes);
        if (!early) {
            assert_int_equal(secure_handshake(pair.ends[CLIENT], NULL), HVD_IN_PROGRESS);
        }
        secure_refuse(pair.fds[SERVER]);
        close(pair.fds[SERVER]);
        pair.fds[SERVER] = -1;
        shake(&pair);
        assert_int_equal(pair.status[CLIENT], HVD_UNAUTHENTICATED);
        pair_free(&pair);
    }
}

// The end gives no byte and a negative status, now and for ever.
static hvd_status_t expect_dead(pair_t *pair, int end)
{
    uint8_t got[64];
    const void *shown;
    ssize_t status = 0;
    for (int i = 0; i < 3 && status >= 0; i++) {
        status = secure_recv(pair->ends[end], got, sizeof got, &pair->errs[end]);
        assert_true(status <= 0);
    }
    assert_true(status < 0);
    assert_int_equal(secure_recv(pair->ends[end], got, sizeof got, NULL), status);
    assert_int_equal(secure_peek(pair->ends[end], &shown, NULL), status);
    return (hvd_status_t)status;
}

// One flipped bit anywhere in a record: the receiver notices and stays closed.
static void test_secure_tampered(void **state)
{
    (void)state;
    uint8_t wire[128];

    for (size_t byte = 0;; byte++) {
        pair_t pair;
        pair_ready(&pair);
        size_t n = capture(&pair, "transfer 100", 12, wire, sizeof wire);
        assert_int_equal(n, record_bytes(12));
        if (byte >= n) {
            pair_free(&pair);
            break;
        }
        wire[byte] ^= 0x10;
        inject(&pair, SERVER, wire, n);
        shutdown(pair.fds[CLIENT], SHUT_WR);
        // A changed length may also read as a record cut short.
        hvd_status_t status = expect_dead(&pair, SERVER);
        assert_true(status == HVD_PROTOCOL || (status == HVD_PEER_LOST && byte < 2));
        assert_string_not_equal(pair.errs[SERVER].text, "");
        pair_free(&pair);
    }
}

// A length that cannot be is refused at once, before its bytes come or memory is taken for them.
static void test_secure_impossible_length(void **state)
{
    (void)state;
    static const uint8_t huge[8] = {0xff, 0xff, 0xff, 0x7f};
    pair_t pair;
    pair_ready(&pair);
    inject(&pair, SERVER, huge, sizeof huge);
    assert_int_equal(expect_dead(&pair, SERVER), HVD_PROTOCOL);
    assert_non_null(strstr(pair.errs[SERVER].text, "not a record"));
    pair_free(&pair);
}

// In a long stream, everything before the changed record arrives and nothing after it.
static void test_secure_tampered_stream(void **state)
{
    (void)state;
    enum { BYTES = 300000 };
    static uint8_t data[BYTES], wire[BYTES + 4096], got[BYTES];
    const size_t whole = record_bytes(RECORD_MAX_BYTES);
    uint64_t seed = 4;

    fill(data, sizeof data, 9);
    for (int i = 0; i < 20; i++) {
        pair_t pair;
        pair_ready(&pair);
        size_t n = capture(&pair, data, sizeof data, wire, sizeof wire);
        size_t flipped = next_random(&seed) % n, at = 0, n_got = 0;
        wire[flipped] ^= (uint8_t)(1 << i % 8);
        ssize_t m = 0;
        while (m >= 0 && n_got < sizeof got) {
            ssize_t fed = at < n ? send(pair.fds[CLIENT], wire + at, n - at, MSG_NOSIGNAL) : 0;
            at += fed > 0 ? (size_t)fed : 0;
            if (at == n) {
                shutdown(pair.fds[CLIENT], SHUT_WR);
            }
            size_t want = MIN(1 + next_random(&seed) % 100000, sizeof got - n_got);
            m = secure_recv(pair.ends[SERVER], got + n_got, want, &pair.errs[SERVER]);
            n_got += m > 0 ? (size_t)m : 0;
        }
        assert_true(m == HVD_PROTOCOL || m == HVD_PEER_LOST);
        assert_int_equal(n_got, flipped / whole * RECORD_MAX_BYTES);
        assert_memory_equal(got, data, n_got);
        pair_free(&pair);
    }
}

// Records of this very connection, but not where they belong.
static void test_secure_misplaced_records(void **state)
{
    (void)state;
    uint8_t first[64], second[64], got[64];
    pair_t pair;

    pair_ready(&pair); // repeated
    size_t n = capture(&pair, "one", 3, first, sizeof first);
    inject(&pair, SERVER, first, n);
    assert_int_equal(secure_recv(pair.ends[SERVER], got, sizeof got, NULL), 3);
    inject(&pair, SERVER, first, n);
    assert_int_equal(expect_dead(&pair, SERVER), HVD_PROTOCOL);
    pair_free(&pair);

    pair_ready(&pair); // in another order
    n = capture(&pair, "one", 3, first, sizeof first);
    assert_int_equal(capture(&pair, "two", 3, second, sizeof second), n);
    inject(&pair, SERVER, second, n);
    inject(&pair, SERVER, first, n);
    assert_int_equal(expect_dead(&pair, SERVER), HVD_PROTOCOL);
    pair_free(&pair);

    pair_ready(&pair); // sent back to its sender
    n = capture(&pair, "one", 3, first, sizeof first);
    inject(&pair, CLIENT, first, n);
    assert_int_equal(expect_dead(&pair, CLIENT), HVD_PROTOCOL);
    pair_free(&pair);

    pair_ready(&pair); // of another connection with the same secret and hello
    inject(&pair, SERVER, first, n);
    assert_int_equal(expect_dead(&pair, SERVER), HVD_PROTOCOL);
    pair_free(&pair);
}

// The stream ends inside a record, at any byte of it.
static void test_secure_truncated(void **state)
{
    (void)state;
    uint8_t wire[64];

    for (size_t kept = 0; kept < record_bytes(5); kept++) {
        pair_t pair;
        pair_ready(&pair);
        capture(&pair, "short", 5, wire, sizeof wire);
        inject(&pair, SERVER, wire, kept);
        shutdown(pair.fds[CLIENT], SHUT_WR);
        assert_int_equal(expect_dead(&pair, SERVER), HVD_PEER_LOST);
        pair_free(&pair);
    }
}

static hvd_status_t feed_server(const void *data, size_t bytes)
{
    hello_t hello = sample_hello();
    uint8_t encoded[HELLO_BYTES];
    pair_t pair;
    hello_encode(&hello, encoded);
    pair_new(&pair, secret, secret, encoded, encoded);
    assert_int_equal(send(pair.fds[CLIENT], data, bytes, 0), bytes);
    hvd_status_t status = secure_handshake(pair.ends[SERVER], &pair.errs[SERVER]);
    pair_free(&pair);
    return status;
}

// A client that claims a huge ClientHello, or speaks something else, is gone after nine bytes.
static void test_secure_foreign_clients(void **state)
{
    (void)state;
    assert_int_equal(feed_server("\x16\x03\x01\x40\x00\x01\x00\x3f\xfc", 9), HVD_UNAUTHENTICATED);
    assert_int_equal(feed_server("\x16\x03\x01\x00\x10\x01\x02\x00\x00", 9), HVD_UNAUTHENTICATED);
    assert_int_equal(feed_server("\x16\x03\x01\x00\x10\x02\x00\x00\x0c", 9), HVD_UNAUTHENTICATED);
    assert_int_equal(feed_server("GET / HTTP/1.1\r\n", 16), HVD_UNAUTHENTICATED);
    assert_int_equal(feed_server("\x16\x03\x01\x00\x10\x01\x00\x00", 8), HVD_IN_PROGRESS);
    assert_int_equal(feed_server("\x16\x03\x01\x00\x10\x01\x00\x00\x0c", 9), HVD_IN_PROGRESS);
}

static void test_secure_fuzz_client_hello(void **state)
{
    (void)state;
    hello_t hello = sample_hello();
    uint8_t encoded[HELLO_BYTES], good[2048], bad[2048];
    uint64_t seed = 3;
    pair_t pair;

    hello_encode(&hello, encoded);
    pair_new(&pair, secret, secret, encoded, encoded);
    assert_int_equal(secure_handshake(pair.ends[CLIENT], NULL), HVD_IN_PROGRESS);
    ssize_t n = recv(pair.fds[SERVER], good, sizeof good, 0);
    assert_true(n > 100);
    pair_free(&pair);

    // Replayed as it is, it is a valid beginning, and no more than that.
    assert_int_equal(feed_server(good, (size_t)n), HVD_IN_PROGRESS);
    for (int i = 0; i < N_FUZZ_HANDSHAKES; i++) {
        memcpy(bad, good, (size_t)n);
        for (uint64_t k = next_random(&seed) % 3 + 1; k > 0; k--) {
            bad[9 + next_random(&seed) % ((uint64_t)n - 9)] ^=
                (uint8_t)(1 + next_random(&seed) % 255);
        }
        if (memcmp(bad, good, (size_t)n) != 0) {
            assert_int_equal(feed_server(bad, (size_t)n), HVD_UNAUTHENTICATED);
        }
    }
}

// --- Against an ordinary TLS implementation ------------------------------------------------------

// A client that knows TLS 1.3 but not the secret.
static void test_secure_no_psk_client(void **state)
{
    (void)state;
    hello_t hello = sample_hello();
    uint8_t encoded[HELLO_BYTES];
    pair_t pair;
    SSL_CTX *context = SSL_CTX_new(TLS_client_method());
    SSL *tls = SSL_new(context);

    hello_encode(&hello, encoded);
    pair_new(&pair, secret, secret, encoded, encoded);
    SSL_set_fd(tls, pair.fds[CLIENT]);
    for (int i = 0; i < 5 && pair.status[SERVER] == HVD_IN_PROGRESS; i++) {
        SSL_connect(tls);
        pair.status[SERVER] = secure_handshake(pair.ends[SERVER], &pair.errs[SERVER]);
    }
    assert_int_equal(pair.status[SERVER], HVD_UNAUTHENTICATED);
    SSL_free(tls);
    SSL_CTX_free(context);
    ERR_clear_error();
    pair_free(&pair);
}

static void use_certificate(SSL_CTX *context)
{
    EVP_PKEY *key = EVP_EC_gen("P-256");
    X509 *certificate = X509_new();
    X509_gmtime_adj(X509_getm_notBefore(certificate), 0);
    X509_gmtime_adj(X509_getm_notAfter(certificate), 3600);
    X509_set_pubkey(certificate, key);
    X509_sign(certificate, key, EVP_sha256());
    assert_int_equal(SSL_CTX_use_certificate(context, certificate), 1);
    assert_int_equal(SSL_CTX_use_PrivateKey(context, key), 1);
    X509_free(certificate);
    EVP_PKEY_free(key);
}

// A server that offers a certificate because it does not know the secret.
static void test_secure_certificate_server(void **state)
{
    (void)state;
    hello_t hello = sample_hello();
    uint8_t encoded[HELLO_BYTES];
    pair_t pair;
    SSL_CTX *context = SSL_CTX_new(TLS_server_method());
    use_certificate(context);
    SSL *tls = SSL_new(context);

    hello_encode(&hello, encoded);
    pair_new(&pair, secret, secret, encoded, encoded);
    SSL_set_fd(tls, pair.fds[SERVER]);
    for (int i = 0; i < 5 && pair.status[CLIENT] == HVD_IN_PROGRESS; i++) {
        pair.status[CLIENT] = secure_handshake(pair.ends[CLIENT], &pair.errs[CLIENT]);
        SSL_accept(tls);
    }
    assert_int_equal(pair.status[CLIENT], HVD_UNAUTHENTICATED);
    SSL_free(tls);
    SSL_CTX_free(context);
    ERR_clear_error();
    pair_free(&pair);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_codec_round_trip),
        cmocka_unit_test(test_codec_refuses),
        cmocka_unit_test(test_codec_fuzz),
        cmocka_unit_test(test_hello_round_trip),
        cmocka_unit_test(test_hello_flipped_bits),
        cmocka_unit_test(test_hello_fuzz),
        cmocka_unit_test(test_record_round_trip),
        cmocka_unit_test(test_record_headers),
        cmocka_unit_test(test_record_flipped_bits),
        cmocka_unit_test(test_record_order),
        cmocka_unit_test(test_record_key_change),
        cmocka_unit_test(test_record_wear),
        cmocka_unit_test(test_record_format),
        cmocka_unit_test(test_secure_transfers),
        cmocka_unit_test(test_secure_hides),
        cmocka_unit_test(test_secure_both_directions),
        cmocka_unit_test(test_secure_full_socket),
        cmocka_unit_test(test_secure_pending),
        cmocka_unit_test(test_secure_drip),
        cmocka_unit_test(test_secure_send_later),
        cmocka_unit_test(test_secure_peek),
        cmocka_unit_test(test_secure_rekey),
        cmocka_unit_test(test_secure_left_for_the_socket),
        cmocka_unit_test(test_secure_wrong_secret),
        cmocka_unit_test(test_secure_flipped_hello),
        cmocka_unit_test(test_secure_peer_closes),
        cmocka_unit_test(test_secure_refuse),
        cmocka_unit_test(test_secure_tampered),
        cmocka_unit_test(test_secure_impossible_length),
        cmocka_unit_test(test_secure_tampered_stream),
        cmocka_unit_test(test_secure_misplaced_records),
        cmocka_unit_test(test_secure_truncated),
        cmocka_unit_test(test_secure_foreign_clients),
        cmocka_unit_test(test_secure_fuzz_client_hello),
        cmocka_unit_test(test_secure_no_psk_client),
        cmocka_unit_test(test_secure_certificate_server),
    };
    return cmocka_run_group_tests_name("wire", tests, NULL, NULL);
}
