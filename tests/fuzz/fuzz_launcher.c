// SPDX-License-Identifier: Apache-2.0
//
// fuzz_launcher.c - text that other launchers hand to a rank: a line of the PMI-1 protocol, a
// ticket, a list of hosts, a number.
//
// The first byte says which. A ticket that is taken is written again as it was, except for the case
// of its digits; values of a line never run past it.
#include "boot/pmi1_text.h"
#include "boot/sched.h"
#include "fuzz.h"

#include <strings.h>

static void read_line(const char *text, size_t bytes)
{
    static const char *const keys[] = {"cmd", "rc", "value", "kvsname"};
    pmi1_line_t line;
    char value[64];
    if (pmi1_parse(text, bytes, &line, NULL) != HVD_OK) {
        return;
    }
    MUST(line.n_fields >= 1 && line.n_fields <= PMI1_MAX_FIELDS);
    for (int i = 0; i < line.n_fields; i++) {
        const pmi1_field_t *field = &line.fields[i];
        MUST(field->key >= text && field->key + field->key_bytes < field->value);
        MUST(field->value + field->value_bytes <= text + bytes);
    }
    for (size_t i = 0; i < N_ELEMENTS(keys); i++) {
        if (pmi1_value(&line, keys[i], value, sizeof value)) {
            MUST(strlen(value) < sizeof value);
        }
    }
    pmi1_succeeded(&line);
}

static void read_ticket(const char *text, size_t bytes)
{
    char again[TICKET_BYTES];
    ticket_t ticket;
    if (ticket_decode(text, &ticket, NULL) == HVD_OK) {
        ticket_encode(&ticket, again);
        MUST(strlen(again) == bytes && strcasecmp(again, text) == 0);
    }
}

static void read_host(const char *text, size_t bytes)
{
    char host[64];
    sched_first_host(text, host, sizeof host);
    MUST(strlen(host) < sizeof host && strlen(host) <= bytes);
}

static void read_number(const char *text, size_t bytes)
{
    int value = -1;
    if (place_parse(text, 1048576, &value)) {
        MUST(value >= 0 && value <= 1048576 && bytes > 0);
    } else {
        MUST(value == -1);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static void (*const readers[])(const char *, size_t) = {read_line, read_ticket, read_host,
                                                            read_number};
    if (bytes == 0) {
        return 0;
    }
    char *text = malloc(bytes); // exactly as long, so that reading past it is seen
    MUST(text != NULL);
    memcpy(text, data + 1, bytes - 1);
    text[bytes - 1] = '\0';
    size_t which = data[0] % N_ELEMENTS(readers);
    readers[which](text, which == 0 ? bytes - 1 : strlen(text));
    free(text);
    return 0;
}
