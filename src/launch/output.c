// SPDX-License-Identifier: Apache-2.0
//
// output.c - whose line is it: prefixes for the output of ranks, a file for each of them, and the
// thread that writes it all.
//
// Bytes of one stream of one rank come in pieces of any size; whole lines go out, each with its
// prefix in front. A line ends in \n or in \r, so a progress bar that draws itself over keeps its
// prefix. Nothing is cut inside a line, so characters of several bytes stay whole; what a rank has
// not ended when it goes is let out as it is. A line longer than LONGEST_LINE is let out in parts.
// Pure but for the files. One thread, but for the sink, which any may use.
#define _GNU_SOURCE
#include "launch/output.h"
#include "launch/launch.h"
#include "wire/codec.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#define LONGEST_LINE (16 * MIB)
#define N_COLORS 6
#define FULL_BYTES (4 * MIB)
#define RECORD_HEAD 5
#define STATUS_BYTES 160

static bool write_all(int fd, const uint8_t *data, size_t bytes)
{
    while (bytes > 0) {
        ssize_t n = write(fd, data, bytes);
        if (n < 0 && errno == EAGAIN) {
            usleep(1000); // somebody else made the terminal non-blocking
            continue;
        }
        if (n < 0 && errno != EINTR) {
            return false;
        }
        data += n > 0 ? n : 0;
        bytes -= n > 0 ? (size_t)n : 0;
    }
    return true;
}

// "0-3,7"; what has no room is "...".
static void name_ranks(const int *ranks, int n, char *text, size_t bytes)
{
    size_t len = 0;
    for (int first = 0, last; first < n; first = last + 1) {
        for (last = first; last + 1 < n && ranks[last + 1] == ranks[last] + 1; last++) {
        }
        if (len + 24 > bytes) {
            snprintf(text + len, bytes - len, ",...");
            return;
        }
        len += (size_t)snprintf(text + len, bytes - len, last > first ? "%s%d-%d" : "%s%d",
                                first > 0 ? "," : "", ranks[first], ranks[last]);
    }
}

void prefix_make_for(const prefix_style_t *style, const int *ranks, int n, int stream, char *text,
                     size_t bytes)
{
    static const char *const names[N_STREAMS] = {"stdout", "stderr"};
    char when[32] = "", whose[64] = "";
    time_t now = time(NULL);
    struct tm parts;
    text[0] = '\0';
    if (style->is_off || n == 0) {
        return;
    }
    name_ranks(ranks, n, whose, sizeof whose);
    if (style->timestamp && localtime_r(&now, &parts) != NULL) {
        strftime(when, sizeof when, "%a %b %e %H:%M:%S %Y", &parts);
    }
    if (style->color) {
        snprintf(text, bytes, "%s\033[%dm[%s]<%s>:\033[0m", when, 31 + ranks[0] % N_COLORS, whose,
                 names[stream]);
    } else {
        snprintf(text, bytes, "%s[%s]<%s>:", when, whose, names[stream]);
    }
}

void prefix_make(const prefix_style_t *style, int rank, int stream, char *text, size_t bytes)
{
    prefix_make_for(style, &rank, 1, stream, text, bytes);
}

// --- Lines ---------------------------------------------------------------------------------------

// Keeps the last lines that say something.
static void keep_tail(splitter_t *splitter, const uint8_t *line, size_t bytes)
{
    char *place = splitter->tail[splitter->n_tail % TAIL_LINES];
    size_t n = 0;
    while (bytes > 0 && (line[bytes - 1] == '\n' || line[bytes - 1] == '\r')) {
        bytes--;
    }
    for (size_t i = 0; i < bytes && n < TAIL_BYTES - 1; i++) {
        if (line[i] >= ' ' || line[i] == '\t') {
            place[n++] = line[i] == '\t' ? ' ' : (char)line[i];
        }
    }
    place[n] = '\0';
    splitter->n_tail += n > 0;
    splitter->has_traceback |= strncmp(place, "Traceback (", strlen("Traceback (")) == 0;
}

static void emit(splitter_t *splitter, const char *prefix, const uint8_t *line, size_t bytes,
                 buf_t *out)
{
    buf_append(out, prefix, strlen(prefix));
    if (splitter->partial.len > 0) {
        buf_append(&splitter->partial, line, bytes);
        buf_append(out, splitter->partial.data, splitter->partial.len);
        keep_tail(splitter, splitter->partial.data, splitter->partial.len);
        buf_clear(&splitter->partial);
    } else {
        buf_append(out, line, bytes);
        keep_tail(splitter, line, bytes);
    }
}

// Where the line that starts at data ends (behind its terminator), or NULL. \r\n is one terminator.
static const uint8_t *line_end(const uint8_t *data, const uint8_t *end)
{
    for (; data < end; data++) {
        if (*data == '\n') {
            return data + 1;
        }
        if (*data == '\r') {
            return data + 1 < end && data[1] == '\n' ? data + 2 : data + 1;
        }
    }
    return NULL;
}

void splitter_feed(splitter_t *splitter, const char *prefix, const void *data, size_t bytes,
                   buf_t *out)
{
    const uint8_t *at = data, *end = at + bytes, *next;
    if (bytes > 0 && splitter->after_cr && *at == '\n') {
        buf_append(out, at++, 1); // the second half of a \r\n that came in two pieces
    }
    splitter->after_cr = bytes > 0 && end[-1] == '\r';
    while ((next = line_end(at, end)) != NULL) {
        emit(splitter, prefix, at, (size_t)(next - at), out);
        at = next;
    }
    if (at < end) {
        buf_append(&splitter->partial, at, (size_t)(end - at));
    }
    if (splitter->partial.len > LONGEST_LINE) {
        splitter_finish(splitter, prefix, out);
    }
}

void splitter_finish(splitter_t *splitter, const char *prefix, buf_t *out)
{
    if (splitter->partial.len > 0) {
        emit(splitter, prefix, (const uint8_t *)"", 0, out);
    }
}

void splitter_free(splitter_t *splitter)
{
    buf_free(&splitter->partial);
}

// --- Files ---------------------------------------------------------------------------------------

static int digits_of(int number)
{
    int n = 1;
    for (; number >= 10; number /= 10) {
        n++;
    }
    return n;
}

static hvd_status_t make_directory(const char *path, err_t *err)
{
    if (mkdir(path, 0777) != 0 && errno != EEXIST) {
        return fail_errno(err, errno, "cannot create the directory %s for --output-filename", path);
    }
    return HVD_OK;
}

static hvd_status_t open_rank(output_files_t *files, int rank, err_t *err)
{
    static const char *const names[N_STREAMS] = {"stdout", "stderr"};
    int n_zeros = digits_of(files->n_ranks - 1) - digits_of(rank);
    char path[4096], name[32];
    hvd_status_t status;
    snprintf(name, sizeof name, "%.*s%d", n_zeros, "0000000000", rank);
    snprintf(path, sizeof path, "%s/rank.%s", files->directory, name);
    status = make_directory(path, err);
    for (int stream = 0; status == HVD_OK && stream < N_STREAMS; stream++) {
        snprintf(path, sizeof path, "%s/rank.%s/%s", files->directory, name, names[stream]);
        int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
        files->fds[rank * N_STREAMS + stream] = fd;
        if (fd < 0) {
            status = fail_errno(err, errno, "cannot open %s for --output-filename", path);
        }
    }
    return status;
}

// A disk that is full now is better told now than after the first hour.
static hvd_status_t check_space(const char *directory, err_t *err)
{
    struct statvfs disk;
    if (statvfs(directory, &disk) == 0 && disk.f_blocks > 0 && disk.f_bavail == 0) {
        return fail(err, HVD_SYSTEM,
                    "no space left on the disk of %s (--output-filename); free some, or choose a "
                    "directory on another disk",
                    directory);
    }
    return HVD_OK;
}

hvd_status_t output_files_open(const char *directory, int n_ranks, output_files_t *files_p,
                               err_t *err)
{
    output_files_t files = {.n_ranks = n_ranks, .directory = strdup(directory)};
    hvd_status_t status;
    files.fds = malloc((size_t)n_ranks * N_STREAMS * sizeof *files.fds);
    if (files.fds == NULL || files.directory == NULL) {
        free(files.fds);
        free(files.directory);
        return fail(err, HVD_NO_MEMORY, "no memory for the output files of %d ranks", n_ranks);
    }
    for (int i = 0; i < n_ranks * N_STREAMS; i++) {
        files.fds[i] = -1;
    }
    TRY(make_directory(directory, err), undo);
    TRY(check_space(directory, err), undo);
    for (int rank = 0; rank < n_ranks; rank++) {
        TRY(open_rank(&files, rank, err), undo);
    }
    *files_p = files;
    return HVD_OK;
undo:
    output_files_close(&files);
    return status;
}

void output_files_write(output_files_t *files, int rank, int stream, const void *data, size_t bytes)
{
    int fd = rank < files->n_ranks ? files->fds[rank * N_STREAMS + stream] : -1;
    if (fd >= 0 && !write_all(fd, data, bytes) && files->failed_code == 0) {
        files->failed_code = errno;
    }
}

const char *output_files_warning(output_files_t *files, char *text, size_t bytes)
{
    if (files->failed_code == 0 || files->has_warned) {
        return NULL;
    }
    files->has_warned = true;
    snprintf(text, bytes,
             "%s: warning: cannot write to %s (--output-filename): %s; the files are incomplete; "
             "free some space. The job goes on",
             PROGRAM, files->directory, strerror(files->failed_code));
    return text;
}

hvd_status_t result_write(const char *directory, int rank, int *fd_p, const void *data,
                          size_t bytes, err_t *err)
{
    char path[4096];
    if (*fd_p < 0) {
        snprintf(path, sizeof path, "%s/rank.%d", directory, rank);
        *fd_p = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    }
    if (*fd_p < 0 || !write_all(*fd_p, data, bytes)) {
        return fail_errno(err, errno, "cannot write the result of rank %d to %s", rank, directory);
    }
    return HVD_OK;
}

void output_files_close(output_files_t *files)
{
    for (int i = 0; files->fds != NULL && i < files->n_ranks * N_STREAMS; i++) {
        if (files->fds[i] >= 0) {
            close(files->fds[i]);
        }
    }
    free(files->fds);
    free(files->directory);
    *files = (output_files_t){0};
}

void note_first_failure(const char *results, int rank, int code)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/first_failure", results);
    FILE *file = results[0] != '\0' ? fopen(path, "we") : NULL;
    if (file != NULL) {
        fprintf(file, "%d %d\n", rank, code);
        fclose(file);
    }
}

// --- The sink ------------------------------------------------------------------------------------

// The reader of our output may be slow (a pager, a stopped terminal); the loop must go on, or
// agents would think it dead. So output is queued here, in one order for stdout and stderr, and a
// thread writes it. Above FULL_BYTES the loop reads no more from ranks, which then wait in turn:
// memory is bounded and nothing is lost. The two buffers change places under the lock; records in
// them are stream (u8), length (u32), bytes.

struct sink {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    buf_t filling, leaving; // leaving: the thread's alone
    size_t last_record;     // in filling
    bool is_stopping;
    char status[STATUS_BYTES];
    bool has_news; // of the status
    atomic_bool is_broken;
    atomic_bool is_full;
};

static void say_to_terminal(const char *text)
{
    write_all(STDERR_FILENO, (const uint8_t *)text, strlen(text));
}

static void write_records(sink_t *sink)
{
    reader_t reader = reader_of(sink->leaving.data, sink->leaving.len);
    while (reader_left(&reader) > 0) {
        int stream = get_u8(&reader);
        size_t bytes = get_u32(&reader);
        const uint8_t *data = get_bytes(&reader, bytes);
        int fd = stream == STREAM_STDOUT ? STDOUT_FILENO : STDERR_FILENO;
        if (data == NULL) {
            break;
        }
        if (!write_all(fd, data, bytes) && stream == STREAM_STDOUT) {
            atomic_store(&sink->is_broken, true);
        }
    }
    buf_clear(&sink->leaving);
}

static void *sink_thread(void *arg)
{
    sink_t *sink = arg;
    char shown[STATUS_BYTES] = "", status[STATUS_BYTES];
    pthread_mutex_lock(&sink->lock);
    while (!sink->is_stopping || sink->filling.len > 0 || sink->has_news) {
        if (sink->filling.len == 0 && !sink->has_news) {
            pthread_cond_wait(&sink->changed, &sink->lock);
            continue;
        }
        buf_t full = sink->filling;
        sink->filling = sink->leaving;
        sink->leaving = full;
        atomic_store(&sink->is_full, false);
        sink->has_news = false;
        memcpy(status, sink->status, sizeof status);
        pthread_mutex_unlock(&sink->lock);
        if (shown[0] != '\0') {
            say_to_terminal("\r\033[K");
        }
        write_records(sink);
        say_to_terminal(status);
        memcpy(shown, status, sizeof shown);
        pthread_mutex_lock(&sink->lock);
    }
    pthread_mutex_unlock(&sink->lock);
    return NULL;
}

sink_t *sink_start(void)
{
    sink_t *sink = calloc(1, sizeof *sink);
    if (sink == NULL) {
        return NULL;
    }
    pthread_mutex_init(&sink->lock, NULL);
    pthread_cond_init(&sink->changed, NULL);
    if (thread_start(&sink->thread, "hvd-sink", sink_thread, sink) != 0) {
        free(sink);
        return NULL;
    }
    return sink;
}

void sink_write(sink_t *sink, int stream, const void *data, size_t bytes)
{
    if (bytes == 0) {
        return;
    }
    pthread_mutex_lock(&sink->lock);
    buf_t *filling = &sink->filling;
    bool continues = filling->len > 0 && filling->data[sink->last_record] == stream;
    if (!continues) {
        sink->last_record = filling->len;
        put_u8(filling, (uint8_t)stream);
        put_u32(filling, 0);
    }
    put_bytes(filling, data, bytes);
    if (!filling->failed) {
        size_t length = filling->len - sink->last_record - RECORD_HEAD;
        for (int i = 0; i < 4; i++) {
            filling->data[sink->last_record + 1 + (size_t)i] = (uint8_t)(length >> (8 * i));
        }
    }
    atomic_store(&sink->is_full, filling->len > FULL_BYTES);
    pthread_cond_signal(&sink->changed);
    pthread_mutex_unlock(&sink->lock);
}

void sink_say(sink_t *sink, int stream, const char *format, ...)
{
    char line[HVD_TEXT_BYTES * 2];
    va_list args;
    va_start(args, format);
    int wanted = vsnprintf(line, sizeof line - 1, format, args);
    va_end(args);
    size_t len = wanted < 0 ? 0 : MIN((size_t)wanted, sizeof line - 2);
    line[len++] = '\n';
    sink_write(sink, stream, line, len);
}

void sink_status(sink_t *sink, const char *text)
{
    pthread_mutex_lock(&sink->lock);
    if (strncmp(sink->status, text, sizeof sink->status - 1) != 0) {
        snprintf(sink->status, sizeof sink->status, "%s", text);
        sink->has_news = true;
        pthread_cond_signal(&sink->changed);
    }
    pthread_mutex_unlock(&sink->lock);
}

bool sink_is_full(sink_t *sink)
{
    return atomic_load(&sink->is_full);
}

bool sink_is_broken(sink_t *sink)
{
    return atomic_load(&sink->is_broken);
}

void sink_stop(sink_t *sink)
{
    if (sink == NULL) {
        return;
    }
    pthread_mutex_lock(&sink->lock);
    sink->is_stopping = true;
    pthread_cond_signal(&sink->changed);
    pthread_mutex_unlock(&sink->lock);
    pthread_join(sink->thread, NULL);
    pthread_cond_destroy(&sink->changed);
    pthread_mutex_destroy(&sink->lock);
    buf_free(&sink->filling);
    buf_free(&sink->leaving);
    free(sink);
}
