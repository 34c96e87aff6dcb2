// SPDX-License-Identifier: Apache-2.0
//
// output.h - what ranks print: prefixes, files, results, and the thread that writes it.
//
// output.c; only the sink has a thread.
#ifndef HVD_LAUNCH_OUTPUT_H
#define HVD_LAUNCH_OUTPUT_H

#include "agent/process.h"

typedef struct sink sink_t;

sink_t *sink_start(void); // NULL: no memory or no thread
void sink_write(sink_t *sink, int stream, const void *data, size_t bytes);
void sink_say(sink_t *sink, int stream, const char *format, ...) PRINTF_LIKE(3, 4);
// A line on the terminal, below the output; "": none. Only where stderr is a terminal.
void sink_status(sink_t *sink, const char *text);
bool sink_is_full(sink_t *sink);   // the reader of our output is slow: read no more from ranks
bool sink_is_broken(sink_t *sink); // the reader of our output is gone
void sink_stop(sink_t *sink); // writes everything first, for as long as it takes; NULL: nothing

#define TAIL_LINES 8
#define TAIL_BYTES 400

// Puts prefixes before the lines of one stream of one rank.
typedef struct splitter {
    buf_t partial;
    bool after_cr;
    char tail[TAIL_LINES][TAIL_BYTES]; // last lines, for the report of a failure
    int n_tail;
    bool has_traceback; // of Python
} splitter_t;

typedef struct prefix_style {
    bool timestamp, color;
    bool is_off; // lines stay as they are
} prefix_style_t;

void prefix_make(const prefix_style_t *style, int rank, int stream, char *text, size_t bytes);
// "[0-3,7]<stderr>:"; ranks in ascending order.
void prefix_make_for(const prefix_style_t *style, const int *ranks, int n, int stream, char *text,
                     size_t bytes);
// Whole lines (ending in \n or \r), each with the prefix, are appended to out.
void splitter_feed(splitter_t *splitter, const char *prefix, const void *data, size_t bytes,
                   buf_t *out);
void splitter_finish(splitter_t *splitter, const char *prefix,
                     buf_t *out); // the last, unended line
void splitter_free(splitter_t *splitter);

// Files of --output-filename.
typedef struct output_files {
    int *fds; // rank * N_STREAMS + stream
    int n_ranks;
    char *directory;
    int failed_code; // errno of the first write that failed
    bool has_warned;
} output_files_t;

hvd_status_t output_files_open(const char *directory, int n_ranks, output_files_t *files_p,
                               err_t *err);
void output_files_write(output_files_t *files, int rank, int stream, const void *data,
                        size_t bytes);
// The first failure in a sentence, once; NULL: there is nothing to tell.
const char *output_files_warning(output_files_t *files, char *text, size_t bytes);
void output_files_close(output_files_t *files);
// Appends to DIRECTORY/rank.<N>, which is made anew if *fd_p is -1.
hvd_status_t result_write(const char *directory, int rank, int *fd_p, const void *data,
                          size_t bytes, err_t *err);
// For who started us to get --results: "rank code" of the rank that failed first, in a file there.
void note_first_failure(const char *results, int rank, int code);

#endif
