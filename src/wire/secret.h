// SPDX-License-Identifier: Apache-2.0
//
// secret.h - the job's secret: 32 random bytes, written as 64 hexadecimal digits.
//
// The one place that reads, writes and keeps it. What held its text is wiped before these return,
// and no sentence shows any of it. Any thread; the memory is the caller's, who wipes it.
#ifndef HVD_WIRE_SECRET_H
#define HVD_WIRE_SECRET_H

#include "base/base.h"

#define SECRET_BYTES 32
#define SECRET_DIGITS (2 * SECRET_BYTES)

// A token of a service, such as the job page's, is treated alike, but is text: fresh, in as many
// hexadecimal digits as fit in front of the NUL (an odd size).
hvd_status_t secret_make_token(char *token, size_t size, err_t *err);

void secret_encode(const uint8_t secret[SECRET_BYTES], char digits[SECRET_DIGITS + 1]);
// Exactly 64 digits, and at most one newline behind.
bool secret_decode(const char *text, size_t bytes, uint8_t secret[SECRET_BYTES]);

// `setting` is what named the file, for sentences. It must be a regular one, of this user or root,
// that nobody else can read; or, where a system mounts it for a group, one that others cannot read.
typedef enum secret_readers { SECRET_FOR_OWNER = 077, SECRET_FOR_GROUP = 07 } secret_readers_t;
hvd_status_t secret_read_file(const char *path, const char *setting, secret_readers_t readers,
                              uint64_t deadline_ns, uint8_t secret[SECRET_BYTES], err_t *err);
// The first size - 1 bytes at most of such a file, with a NUL behind.
hvd_status_t secret_read_token(const char *path, const char *setting, secret_readers_t readers,
                               uint64_t deadline_ns, char *token, size_t size, err_t *err);
// A descriptor is read once, and closed.
hvd_status_t secret_read_fd(int fd, const char *setting, uint64_t deadline_ns,
                            uint8_t secret[SECRET_BYTES], err_t *err);
// Makes a file that only its owner can read and that was not there before; also for other things
// that are nobody else's business.
hvd_status_t secret_write_file(const char *path, const void *data, size_t bytes, err_t *err);

bool secret_is_given(const config_t *config); // HOROVOD_SECRET_FILE or HOROVOD_SECRET_FD
hvd_status_t secret_find(const config_t *config, uint64_t deadline_ns, uint8_t secret[SECRET_BYTES],
                         err_t *err);

// Zeroed memory for what must not be found later: kept out of core dumps, swap and forked children,
// which find zeros. NULL: no memory. Whole pages, so for few and long-lived things.
void *secret_new(size_t bytes);
void secret_free(void *memory, size_t bytes); // wipes; safe on NULL

#endif
