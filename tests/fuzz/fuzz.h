// SPDX-License-Identifier: Apache-2.0
//
// fuzz.h - what the fuzz targets share: taking an input apart, and saying what must never be.
//
// A target is a file fuzz_<name>.c with LLVMFuzzerTestOneInput and a row in targets.list. The same
// file is built twice: with libFuzzer in build-fuzz, and with replay.c in every other build, where
// it reads its corpus once. What a target proves beyond "no crash" it says with MUST.
#ifndef TESTS_FUZZ_FUZZ_H
#define TESTS_FUZZ_FUZZ_H

#include "base/base.h"

#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

#define MUST(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

// An input, taken from the front. Beyond the end there are zeros.
typedef struct input {
    const uint8_t *at;
    size_t left;
} input_t;

static inline uint8_t take_u8(input_t *in)
{
    if (in->left == 0) {
        return 0;
    }
    in->left--;
    return *in->at++;
}

static inline unsigned take_u16(input_t *in)
{
    unsigned low = take_u8(in);
    return low | (unsigned)take_u8(in) << 8;
}

// The next bytes as memory of their own, so that a read past their end is noticed. *bytes_p is
// lowered to what is left.
static inline uint8_t *take_copy(input_t *in, size_t *bytes_p)
{
    *bytes_p = MIN(*bytes_p, in->left);
    uint8_t *copy = malloc(MAX(*bytes_p, 1));
    MUST(copy != NULL);
    if (*bytes_p > 0) {
        memcpy(copy, in->at, *bytes_p);
    }
    in->at += *bytes_p;
    in->left -= *bytes_p;
    return copy;
}

#endif
