// SPDX-License-Identifier: Apache-2.0
//
// status.c - what each status is called, means and reaches; how an error gets its sentence.
//
// status.def is turned into a switch, so the compiler itself proves that every enumerator has
// exactly one row: a missing one is -Wswitch, a second one a duplicate case. Values that are not
// in it (they can come from a peer or from a caller's cast) answer as "unknown", with the widest
// scope. Any thread; no memory is taken; an err_t belongs to its caller.
#define _GNU_SOURCE
#include "base/base.h"

#include <errno.h>
#include <stdio.h>

typedef struct status_row {
    const char *name, *text, *hint;
    hvd_scope_t scope;
} status_row_t;

static const status_row_t *status_row(hvd_status_t status)
{
    static const status_row_t unknown = {"unknown status", "unknown status", "", HVD_SCOPE_JOB};
    switch (status) {
#define STATUS(code, reach, sentence, try_this)                                                    \
    case code: {                                                                                   \
        static const status_row_t row = {#code, sentence, try_this, HVD_SCOPE_##reach};            \
        return &row;                                                                               \
    }
#include "base/status.def"
#undef STATUS
    }
    return &unknown;
}

const char *hvd_status_name(hvd_status_t status)
{
    return status_row(status)->name;
}

const char *hvd_status_text(hvd_status_t status)
{
    return status_row(status)->text;
}

const char *hvd_status_hint(hvd_status_t status)
{
    return status_row(status)->hint;
}

hvd_scope_t hvd_status_scope(hvd_status_t status)
{
    return status_row(status)->scope;
}

// The sentence is made apart and then copied: its arguments may point into err->text, so that an
// error can be told again with more in front of it.
static void err_set(err_t *err, hvd_status_t status, const char *reason, const char *format,
                    va_list args)
{
    char text[HVD_TEXT_BYTES];
    size_t reason_bytes = strlen(reason);
    size_t room = sizeof text - MIN(reason_bytes, sizeof text / 2);
    // On truncation the reason is kept and the sentence is cut.
    int wanted = vsnprintf(text, room, format, args);
    size_t len = wanted < 0 ? 0 : MIN((size_t)wanted, room - 1);

    snprintf(text + len, sizeof text - len, "%s", reason);
    memcpy(err->text, text, sizeof text);
    err->status = status;
}

hvd_status_t fail(err_t *err, hvd_status_t status, const char *format, ...)
{
    va_list args;
    if (err != NULL) {
        va_start(args, format);
        err_set(err, status, "", format, args);
        va_end(args);
    }
    return status;
}

hvd_status_t fail_errno(err_t *err, int code, const char *format, ...)
{
    hvd_status_t status = code == ENOMEM ? HVD_NO_MEMORY : HVD_SYSTEM;
    char described[128], reason[160];
    va_list args;
    if (err != NULL) {
        snprintf(reason, sizeof reason, ": %s", strerror_r(code, described, sizeof described));
        va_start(args, format);
        err_set(err, status, reason, format, args);
        va_end(args);
    }
    return status;
}

hvd_status_t err_export(const err_t *err, hvd_status_t status, char *text, size_t text_bytes)
{
    if (text != NULL && text_bytes > 0) {
        bool has_sentence = err != NULL && err->status == status && err->text[0] != '\0';
        const char *sentence = has_sentence ? err->text : hvd_status_text(status);
        snprintf(text, text_bytes, "%s", status == HVD_OK ? "" : sentence);
    }
    return status;
}
