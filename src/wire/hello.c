// SPDX-License-Identifier: Apache-2.0
//
// hello.c - the 64 bytes that open every connection.
//
// Every byte has one meaning and one valid form, so decode(encode(h)) and encode(decode(b)) are
// both identities: a hello that decodes cannot hide anything in bits nobody looks at.
//
//     0  magic          8 bytes, with bytes that text protocols and line-end conversions damage
//     8  wire version   u16
//    10  role           u8, hello_role_t
//    11  lane           u8
//    12  encrypted      u8, 0 or 1
//    13  zeros          3 bytes
//    16  job            16 bytes
//    32  from           u32
//    36  to             u32
//    40  zeros          8 bytes
//    48  nonce          16 bytes
//
// Pure functions; any thread.
#include "wire/hello.h"
#include "wire/codec.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

static const uint8_t magic[8] = {0x8b, 'h', 'v', 'd', '\r', '\n', 0x1a, '\n'};
static const uint8_t zeros[8];

static uint8_t *store(uint8_t *at, const void *data, size_t bytes)
{
    memcpy(at, data, bytes);
    return at + bytes;
}

static uint8_t *store_u32(uint8_t *at, uint32_t v)
{
    uint8_t p[4] = {(uint8_t)v, (uint8_t)(v >> 8), (uint8_t)(v >> 16), (uint8_t)(v >> 24)};
    return store(at, p, sizeof p);
}

void hello_encode(const hello_t *hello, uint8_t bytes[HELLO_BYTES])
{
    uint8_t kind[5] = {WIRE_VERSION & 0xff, WIRE_VERSION >> 8, (uint8_t)hello->role, hello->lane,
                       hello->encrypted};
    uint8_t *at = store(bytes, magic, sizeof magic);
    at = store(at, kind, sizeof kind);
    at = store(at, zeros, 3);
    at = store(at, hello->job, sizeof hello->job);
    at = store_u32(at, hello->from);
    at = store_u32(at, hello->to);
    at = store(at, zeros, sizeof zeros);
    store(at, hello->nonce, sizeof hello->nonce);
}

hvd_status_t hello_decode(const uint8_t bytes[HELLO_BYTES], hello_t *hello_p, err_t *err)
{
    reader_t r = reader_of(bytes, HELLO_BYTES);
    hello_t hello;
    if (memcmp(get_bytes(&r, sizeof magic), magic, sizeof magic) != 0) {
        return fail(err, HVD_PROTOCOL,
                    "a connection did not begin with a hello; something other than a rank, such as "
                    "a port scanner or a web client, called this port");
    }
    unsigned version = get_u16(&r);
    if (version != WIRE_VERSION) {
        return fail(err, HVD_PROTOCOL,
                    "a peer speaks wire version %u, this side %u; install the same "
                    "release of the library on every host",
                    version, WIRE_VERSION);
    }
    hello.role = get_u8(&r);
    hello.lane = get_u8(&r);
    hello.encrypted = get_u8(&r);
    bool padding_is_zero = memcmp(get_bytes(&r, 3), zeros, 3) == 0;
    memcpy(hello.job, get_bytes(&r, sizeof hello.job), sizeof hello.job);
    hello.from = get_u32(&r);
    hello.to = get_u32(&r);
    padding_is_zero &= memcmp(get_bytes(&r, sizeof zeros), zeros, sizeof zeros) == 0;
    memcpy(hello.nonce, get_bytes(&r, sizeof hello.nonce), sizeof hello.nonce);

    bool role_is_known =
        hello.role == HELLO_KV || hello.role == HELLO_LINK || hello.role == HELLO_CHANNEL;
    if (!role_is_known || hello.encrypted > 1 || !padding_is_zero) {
        return fail(err, HVD_PROTOCOL,
                    "a peer opened a connection with a damaged hello (role %u, "
                    "encrypted %u, padding %s)",
                    (unsigned)hello.role, hello.encrypted, padding_is_zero ? "zero" : "not zero");
    }
    *hello_p = hello;
    return HVD_OK;
}

void hello_job(const uint8_t secret[32], uint8_t job[16])
{
    static const char label[] = "hvd job";
    uint8_t digest[EVP_MAX_MD_SIZE] = {0};
    // A failure of OpenSSL leaves zeros, which secure_keys_new refuses.
    HMAC(EVP_sha256(), secret, 32, (const uint8_t *)label, sizeof label - 1, digest, NULL);
    memcpy(job, digest, 16);
}
