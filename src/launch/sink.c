// SPDX-License-Identifier: Apache-2.0
//
// sink.c - writes what ranks and the launcher say, in a thread of its own.
//
// The reader of our output may be slow (a pager, a stopped terminal); the loop must go on, or
// agents would think it dead. So output is queued here, in one order for stdout and stderr, and a
// thread writes it. Above FULL_BYTES the loop reads no more from ranks, which then wait in turn:
// memory is bounded and nothing is lost. The two buffers change places under the lock; records in
// them are stream (u8), length (u32), bytes.
#define _GNU_SOURCE
#include "launch/output.h"
#include "wire/codec.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define FULL_BYTES (4 * MIB)
#define RECORD_HEAD 5

struct sink {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    buf_t filling, leaving; // leaving: the thread's alone
    size_t last_record;     // in filling
    bool is_stopping;
    atomic_bool is_broken;
    atomic_bool is_full;
};

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
    pthread_mutex_lock(&sink->lock);
    while (!sink->is_stopping || sink->filling.len > 0) {
        if (sink->filling.len == 0) {
            pthread_cond_wait(&sink->changed, &sink->lock);
            continue;
        }
        buf_t full = sink->filling;
        sink->filling = sink->leaving;
        sink->leaving = full;
        atomic_store(&sink->is_full, false);
        pthread_mutex_unlock(&sink->lock);
        write_records(sink);
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
