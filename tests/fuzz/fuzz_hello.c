// SPDX-License-Identifier: Apache-2.0
//
// fuzz_hello.c - the first 64 bytes of a connection, from anybody.
//
// What decodes has exactly one form: encoding it again gives the same bytes. Version 1 stands for
// this one here, so that the corpus outlives it.
#include "fuzz.h"
#include "wire/hello.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    uint8_t hello_bytes[HELLO_BYTES] = {0}, again[HELLO_BYTES];
    hello_t hello;
    err_t err;
    memcpy(hello_bytes, data, MIN(bytes, sizeof hello_bytes));
    if (hello_bytes[8] == 1 && hello_bytes[9] == 0) {
        hello_bytes[8] = WIRE_VERSION & 0xff;
        hello_bytes[9] = WIRE_VERSION >> 8;
    }
    if (hello_decode(hello_bytes, &hello, &err) == HVD_OK) {
        hello_encode(&hello, again);
        MUST(memcmp(again, hello_bytes, sizeof again) == 0);
    } else {
        MUST(err.status == HVD_PROTOCOL && err.text[0] != '\0');
    }
    return 0;
}
