// SPDX-License-Identifier: Apache-2.0
//
// env.c - launched by horovodrun, Spark, a Kubernetes job or by hand: the environment says which
// rank this is and where the rendezvous server is; a file or a descriptor holds the job's secret.
//
// What a user can get wrong is checked here, one sentence each, naming the variable and what it
// should be. The secret's text is wiped as soon as it is decoded and appears in no sentence.
#define _GNU_SOURCE
#include "boot/way.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#define HOW_TO_START                                                                               \
    "start the job with \"horovodrun -np N command\", which sets everything, or unset "            \
    "HOROVOD_RANK and HOROVOD_SIZE to run alone"

static bool is_set(const config_t *config, enum knob_id id)
{
    return config->origin[id] == FROM_ENVIRONMENT;
}

static bool env_looks_right(const config_t *config)
{
    return is_set(config, KNOB_rank) || is_set(config, KNOB_size);
}

// --- The secret ----------------------------------------------------------------------------------

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

static hvd_status_t check_secret_file(int fd, const char *path, err_t *err)
{
    struct stat seen;
    if (fstat(fd, &seen) != 0) {
        return fail_errno(err, errno, "cannot access the secret file %s (HOROVOD_SECRET_FILE)",
                          path);
    }
    if (!S_ISREG(seen.st_mode)) {
        return fail(err, HVD_INVALID_ARGUMENT, "HOROVOD_SECRET_FILE=%s is not a regular file",
                    path);
    }
    if ((seen.st_mode & 077) != 0) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "the secret file %s can be read or changed by other users "
                    "(mode %04o); run: chmod 600 %s",
                    path, (unsigned)seen.st_mode & 07777, path);
    }
    if (seen.st_uid != geteuid() && seen.st_uid != 0) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "the secret file %s belongs to another user (uid %u); it must belong to the "
                    "user of this process",
                    path, (unsigned)seen.st_uid);
    }
    return HVD_OK;
}

static hvd_status_t read_secret_file(const char *path, uint64_t deadline_ns,
                                     uint8_t secret[SECRET_BYTES], err_t *err)
{
    char text[SECRET_DIGITS + 2];
    // Not to hang in open() if it is a named pipe.
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return fail_errno(err, errno, "cannot open the secret file %s (HOROVOD_SECRET_FILE)", path);
    }
    hvd_status_t status = check_secret_file(fd, path, err);
    if (status == HVD_OK) {
        ssize_t n = read_until(fd, text, sizeof text, deadline_ns);
        if (n < 0) {
            status = fail_errno(err, errno, "cannot read the secret file %s", path);
        } else if (!secret_decode(text, (size_t)n, secret)) {
            status = fail(err, HVD_INVALID_ARGUMENT,
                          "the secret file %s must hold exactly 64 hexadecimal "
                          "digits; make one with: openssl rand -hex 32",
                          path);
        }
    }
    wipe(text, sizeof text);
    close(fd);
    return status;
}

// The descriptor is read once and closed, so no child of the user's program inherits the secret.
static hvd_status_t read_secret_fd(int fd, uint64_t deadline_ns, uint8_t secret[SECRET_BYTES],
                                   err_t *err)
{
    char text[SECRET_DIGITS];
    hvd_status_t status = HVD_OK;
    ssize_t n = fcntl(fd, F_GETFD) < 0 ? -1 : read_until(fd, text, sizeof text, deadline_ns);
    if (n < 0) {
        status = fail_errno(
            err, errno,
            "cannot read the job's secret from descriptor %d (HOROVOD_SECRET_FD); it can be read "
            "only once: programs that call init again need HOROVOD_SECRET_FILE",
            fd);
    } else if (!secret_decode(text, (size_t)n, secret)) {
        status = fail(err, HVD_INVALID_ARGUMENT,
                      "descriptor %d (HOROVOD_SECRET_FD) must give 64 hexadecimal digits; it gave "
                      "something else, or only %zd bytes",
                      fd, n);
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
        return read_secret_fd((int)config->secret_fd, deadline_ns, secret, err);
    }
    return read_secret_file(config->secret_file, deadline_ns, secret, err);
}

// --- The numbers ---------------------------------------------------------------------------------

// A rank and a size that belong together.
typedef struct env_place {
    enum knob_id rank_id, size_id;
    int64_t rank, size;
} env_place_t;

static hvd_status_t check_place(const config_t *config, const env_place_t *place, int64_t size,
                                err_t *err)
{
    const char *rank_name = knob_infos[place->rank_id].env,
               *size_name = knob_infos[place->size_id].env;
    bool has_rank = is_set(config, place->rank_id), has_size = is_set(config, place->size_id);
    if (has_rank != has_size) {
        return fail(err, HVD_INVALID_ARGUMENT, "%s is set but %s is not; " HOW_TO_START,
                    has_rank ? rank_name : size_name, has_rank ? size_name : rank_name);
    }
    if (has_rank && place->rank >= place->size) {
        return fail(err, HVD_INVALID_ARGUMENT, "%s=%lld must be less than %s=%lld", rank_name,
                    (long long)place->rank, size_name, (long long)place->size);
    }
    if (has_rank && place->size > size) {
        return fail(err, HVD_INVALID_ARGUMENT, "%s=%lld must not be more than HOROVOD_SIZE=%lld",
                    size_name, (long long)place->size, (long long)size);
    }
    return HVD_OK;
}

static hvd_status_t check_places(const config_t *config, err_t *err)
{
    const env_place_t places[] = {
        {KNOB_rank, KNOB_size, config->rank, config->size},
        {KNOB_local_rank, KNOB_local_size, config->local_rank, config->local_size},
        {KNOB_cross_rank, KNOB_cross_size, config->cross_rank, config->cross_size},
    };
    for (size_t i = 0; i < N_ELEMENTS(places); i++) {
        hvd_status_t status = check_place(config, &places[i], config->size, err);
        if (status != HVD_OK) {
            return status;
        }
    }
    return HVD_OK;
}

// What a job of more than one cannot do without.
static hvd_status_t check_needs(const config_t *config, err_t *err)
{
    const struct {
        bool is_there;
        const char *name;
        const char *what;
    } needs[] = {
        {config->rendezvous_addr != NULL && config->rendezvous_addr[0] != '\0',
         "HOROVOD_RENDEZVOUS_ADDR", "where the rendezvous server is"},
        {config->rendezvous_port > 0, "HOROVOD_RENDEZVOUS_PORT", "its port"},
        {secret_is_given(config), "HOROVOD_SECRET_FILE", "the file with the job's secret"},
    };
    for (size_t i = 0; i < N_ELEMENTS(needs); i++) {
        if (!needs[i].is_there) {
            return fail(err, HVD_INVALID_ARGUMENT,
                        "HOROVOD_SIZE=%lld but %s (%s) is not set; " HOW_TO_START,
                        (long long)config->size, needs[i].name, needs[i].what);
        }
    }
    return HVD_OK;
}

static hvd_status_t env_find(const config_t *config, uint64_t deadline_ns, boot_job_t *job,
                             err_t *err)
{
    // In a world of one there is nothing to derive.
    bool alone = config->size == 1;
    bool has_local = alone || is_set(config, KNOB_local_rank);
    bool has_cross = alone || is_set(config, KNOB_cross_rank);
    hvd_status_t status;
    TRY(check_places(config, err), out);
    job->rank = (int)config->rank;
    job->size = (int)config->size;
    job->local_rank = has_local ? (int)config->local_rank : -1;
    job->local_size = has_local ? (int)config->local_size : -1;
    job->cross_rank = has_cross ? (int)config->cross_rank : -1;
    job->cross_size = has_cross ? (int)config->cross_size : -1;
    if (!alone) {
        TRY(check_needs(config, err), out);
        TRY(secret_find(config, deadline_ns, job->secret, err), out);
    }
out:
    return status;
}

static hvd_status_t env_join(const boot_way_t *way, const config_t *config, uint64_t deadline_ns,
                             boot_job_t *job, meeting_t *meeting, err_t *err)
{
    hvd_status_t status;
    (void)way;
    TRY(env_find(config, deadline_ns, job, err), out);
    if (job->size > 1) {
        TRY(kv_connect(config->rendezvous_addr, (int)config->rendezvous_port, job->secret,
                       deadline_ns, &meeting->client, err),
            out);
    }
out:
    return status;
}

const boot_way_t boot_way_env = {.name = "env",
                                 .launcher = "horovodrun (HOROVOD_RANK and HOROVOD_SIZE)",
                                 .looks_right = env_looks_right,
                                 .join = env_join};
