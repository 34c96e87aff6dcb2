// SPDX-License-Identifier: Apache-2.0
//
// pmi1_text.h - lines of the PMI-1 protocol, as a process manager answers them.
//
// A line is "cmd=<word> <key>=<value> <key>=<value>...". Managers differ in the order of keys and
// in what they add, so fields are found by key. What comes from the other side is not trusted:
// everything is bounded, and bytes that no manager sends are refused. Pure; any thread.
#ifndef HVD_BOOT_PMI1_TEXT_H
#define HVD_BOOT_PMI1_TEXT_H

#include "base/base.h"

#define PMI1_LINE_LIMIT (8 * KIB) // values are at most 4 KiB, keys 256 bytes
#define PMI1_MAX_FIELDS 16        // more are read over

typedef struct pmi1_field {
    const char *key, *value; // not terminated; they point into the line
    size_t key_bytes, value_bytes;
} pmi1_field_t;

typedef struct pmi1_line {
    pmi1_field_t fields[PMI1_MAX_FIELDS]; // the first is cmd
    int n_fields;
} pmi1_line_t;

// A line without its newline.
hvd_status_t pmi1_parse(const char *text, size_t bytes, pmi1_line_t *line_p, err_t *err);
bool pmi1_is(const pmi1_line_t *line, const char *cmd);
// The value of the first field of this key, terminated. False: no such field, or it does not fit.
bool pmi1_value(const pmi1_line_t *line, const char *key, char *value, size_t bytes);
// Whether the manager did what it was asked: no field rc, or rc=0.
bool pmi1_succeeded(const pmi1_line_t *line);

#endif
