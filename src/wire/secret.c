// SPDX-License-Identifier: Apache-2.0
//
// secret.c - the job's secret in files, at descriptors, as text and in memory.
//
// A secret that stays lies in pages of its own, which no core dump, no swap and no forked child
// gets to see, as far as the kernel is willing.
#define _GNU_SOURCE
#include "wire/secret.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

// --- Text ----------------------------------------------------------------------------------------

static void encode(const uint8_t *bytes, size_t n_digits, char *digits)
{
    for (size_t i = 0; i < n_digits; i++) {
        digits[i] = "0123456789abcdef"[bytes[i / 2] >> (i % 2 == 0 ? 4 : 0) & 15];
    }
    digits[n_digits] = '\0';
}

void secret_encode(const uint8_t secret[SECRET_BYTES], char digits[SECRET_DIGITS + 1])
{
    encode(secret, SECRET_DIGITS, digits);
}

hvd_status_t secret_make_token(char *token, size_t size, err_t *err)
{
    uint8_t bytes[SECRET_BYTES];
    INVARIANT(size % 2 == 1 && size <= SECRET_DIGITS + 1);
    hvd_status_t status = random_bytes(bytes, sizeof bytes, err);
    encode(bytes, size - 1, token);
    wipe(bytes, sizeof bytes);
    return status;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    c |= 0x20; // lower case
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool secret_decode(const char *text, size_t bytes, uint8_t secret[SECRET_BYTES])
{
    if (bytes == SECRET_DIGITS + 1 && text[SECRET_DIGITS] == '\n') {
        bytes--;
    }
    if (bytes != SECRET_DIGITS) {
        return false;
    }
    for (size_t i = 0; i < SECRET_BYTES; i++) {
        int high = hex_digit(text[2 * i]), low = hex_digit(text[2 * i + 1]);
        if (high < 0 || low < 0) {
            wipe(secret, SECRET_BYTES);
            return false;
        }
        secret[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

// --- Reading -------------------------------------------------------------------------------------

// Reads until `bytes` are there, the end, or the deadline (a pipe may be filled late).
static ssize_t read_until(int fd, char *data, size_t bytes, uint64_t deadline_ns)
{
    size_t got = 0;
    while (got < bytes) {
        struct pollfd polled = {.fd = fd, .events = POLLIN};
        uint64_t now_ns = clock_ns();
        if (now_ns >= deadline_ns) {
            errno = ETIMEDOUT;
            return -1;
        }
        if (poll(&polled, 1, (int)MIN((deadline_ns - now_ns) / NS_PER_MS + 1, 1000)) <= 0) {
            continue;
        }
        ssize_t n = read(fd, data + got, bytes - got);
        if (n < 0 && errno != EINTR && errno != EAGAIN) {
            return -1;
        }
        if (n == 0) {
            break;
        }
        got += n > 0 ? (size_t)n : 0;
    }
    return (ssize_t)got;
}

static hvd_status_t check_file(int fd, const char *path, const char *setting,
                               secret_readers_t readers, err_t *err)
{
    struct stat seen;
    if (fstat(fd, &seen) != 0) {
        return fail_errno(err, errno, "cannot access the secret file %s (%s)", path, setting);
    }
    if (readers == SECRET_FOR_OWNER && !S_ISREG(seen.st_mode)) {
        return fail(err, HVD_INVALID_ARGUMENT, "%s=%s is not a regular file", setting, path);
    }
    if ((seen.st_mode & readers) != 0) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "the secret file %s can be read or changed by other users (mode %04o); run: "
                    "chmod %s %s",
                    path, (unsigned)seen.st_mode & 07777,
                    readers == SECRET_FOR_OWNER ? "600" : "o-rwx", path);
    }
    if (readers == SECRET_FOR_OWNER && seen.st_uid != geteuid() && seen.st_uid != 0) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "the secret file %s belongs to another user (uid %u); it must belong to the "
                    "user of this process",
                    path, (unsigned)seen.st_uid);
    }
    return HVD_OK;
}

// Up to `size` bytes of the file; *n_p: how many. The caller wipes them.
static hvd_status_t read_file(const char *path, const char *setting, secret_readers_t readers,
                              uint64_t deadline_ns, char *text, size_t size, size_t *n_p,
                              err_t *err)
{
    if (path[0] == '\0') {
        return fail(err, HVD_INVALID_ARGUMENT, "no secret file is named (%s)", setting);
    }
    // Not to hang in open() if it is a named pipe.
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return fail_errno(err, errno, "cannot open the secret file %s (%s)", path, setting);
    }
    hvd_status_t status = check_file(fd, path, setting, readers, err);
    if (status == HVD_OK) {
        ssize_t n = read_until(fd, text, size, deadline_ns);
        *n_p = n < 0 ? 0 : (size_t)n;
        status = n < 0 ? fail_errno(err, errno, "cannot read the secret file %s", path) : HVD_OK;
    }
    close(fd);
    return status;
}

hvd_status_t secret_read_file(const char *path, const char *setting, secret_readers_t readers,
                              uint64_t deadline_ns, uint8_t secret[SECRET_BYTES], err_t *err)
{
    char text[SECRET_DIGITS + 2];
    size_t n = 0;
    hvd_status_t status =
        read_file(path, setting, readers, deadline_ns, text, sizeof text, &n, err);
    if (status == HVD_OK && !secret_decode(text, n, secret)) {
        status = fail(err, HVD_INVALID_ARGUMENT,
                      "the secret file %s must hold exactly 64 hexadecimal digits; make one with: "
                      "openssl rand -hex 32",
                      path);
    }
    wipe(text, sizeof text);
    return status;
}

hvd_status_t secret_read_token(const char *path, const char *setting, secret_readers_t readers,
                               uint64_t deadline_ns, char *token, size_t size, err_t *err)
{
    size_t n = 0;
    hvd_status_t status = read_file(path, setting, readers, deadline_ns, token, size - 1, &n, err);
    token[n] = '\0';
    return status;
}

// The descriptor is read once and closed, so no child of the user's program inherits the secret.
hvd_status_t secret_read_fd(int fd, const char *setting, uint64_t deadline_ns,
                            uint8_t secret[SECRET_BYTES], err_t *err)
{
    char text[SECRET_DIGITS];
    hvd_status_t status = HVD_OK;
    ssize_t n = fcntl(fd, F_GETFD) < 0 ? -1 : read_until(fd, text, sizeof text, deadline_ns);
    if (n < 0) {
        status = fail_errno(err, errno,
                            "cannot read the job's secret from descriptor %d (%s); it can be read "
                            "only once: programs that call init again need HOROVOD_SECRET_FILE",
                            fd, setting);
    } else if (!secret_decode(text, (size_t)n, secret)) {
        status = fail(err, HVD_INVALID_ARGUMENT,
                      "descriptor %d (%s) must give 64 hexadecimal digits; it gave something else, "
                      "or only %zd bytes",
                      fd, setting, n);
    }
    wipe(text, sizeof text);
    close(fd);
    return status;
}

bool secret_is_given(const config_t *config)
{
    return config->secret_fd >= 0 ||
           (config->secret_file != NULL && config->secret_file[0] != '\0');
}

hvd_status_t secret_find(const config_t *config, uint64_t deadline_ns, uint8_t secret[SECRET_BYTES],
                         err_t *err)
{
    if (config->secret_fd >= 0) {
        return secret_read_fd((int)config->secret_fd, "HOROVOD_SECRET_FD", deadline_ns, secret,
                              err);
    }
    return secret_read_file(config->secret_file, "HOROVOD_SECRET_FILE", SECRET_FOR_OWNER,
                            deadline_ns, secret, err);
}

// --- Writing -------------------------------------------------------------------------------------

hvd_status_t secret_write_file(const char *path, const void *data, size_t bytes, err_t *err)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    const uint8_t *at = data;
    ssize_t n = 0;
    while (fd >= 0 && bytes > 0 && (n = write(fd, at, bytes)) >= 0) {
        at += n;
        bytes -= (size_t)n;
    }
    int code = errno;
    if (fd >= 0) {
        close(fd);
    }
    return fd < 0 || bytes > 0 ? fail_errno(err, code, "cannot write %s", path) : HVD_OK;
}

// --- Memory --------------------------------------------------------------------------------------

void *secret_new(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return NULL;
    }
    // Each is an extra; a kernel or a limit that refuses one is not a reason to fail.
    (void)madvise(memory, bytes, MADV_DONTDUMP);
    (void)madvise(memory, bytes, MADV_WIPEONFORK);
    (void)mlock(memory, bytes);
    return memory;
}

void secret_free(void *memory, size_t bytes)
{
    if (memory != NULL) {
        wipe(memory, bytes);
        munmap(memory, bytes);
    }
}
