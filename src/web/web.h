// SPDX-License-Identifier: Apache-2.0
//
// web.h - a job to look at: what is known of its ranks, and the small server that shows it.
//
//   model.c       what is known: hosts, ranks, events; fed by the launcher
//   model_read.c  reads the page of a rank into it
//   model_json.c  the same for the job page
//   model_text.c  the same as a table for a terminal, and as metrics
//   json.c        JSON that may stand inside HTML
//   http.c        requests: a strict reader
//   client.c      one connection, in the clear or under TLS
//   server.c      listening, who may see what, and events
//   page.c        the page, made of the files in page/
//
// Owns the model and the server's thread. The launcher's thread feeds the model, the server's reads
// it; one lock is between them, held for as long as it takes to write a picture of the job.
#ifndef HVD_WEB_H
#define HVD_WEB_H

#include "observe/observe.h"

// --- What is known (model.c) ---------------------------------------------------------------------

#define MODEL_NAME_BYTES 128
#define MODEL_FLIGHTS WATCH_FLIGHTS
#define MODEL_OPERATIONS 256       // kept of a rank
#define MODEL_HISTORY 60           // periods kept of a rank
#define MODEL_LOG_BYTES (16 * KIB) // the end of what a rank printed
#define MODEL_EVENTS 64
#define MODEL_LATE 8

typedef struct model_flight {
    int set;
    char name[MODEL_NAME_BYTES];
} model_flight_t;

// In microseconds since 1970; negative: it never got there.
typedef struct model_operation {
    int64_t submitted, agreed, started, finished;
    uint64_t bytes;
    char op[16], name[56];
} model_operation_t;

typedef struct model_late {
    int rank, n_ranks;
    uint64_t n_last;
    double late_s;
    double share; // of the time, lately
} model_late_t;

// What a rank tells of itself, once a period.
typedef struct model_seen {
    bool answers;   // else nothing below is of now, but for the state
    bool was_told;  // there is anything at all
    char state[24]; // "starting", "idle", "waiting", "queued", "running", "no answer", ...
    char doing[MODEL_NAME_BYTES + 64], last[MODEL_NAME_BYTES + 64], ended[400];
    double since_s, last_s;
    int n_in_flight, n_flights;
    model_flight_t flights[MODEL_FLIGHTS];
    double compute, waiting, moving; // shares of the last second
    hvd_counters_t counters;
    progress_t progress;
    uint64_t memory_bytes;
    double cpu_s;
    char process; // its state, as the process table has it
    int n_late;
    model_late_t late[MODEL_LATE];
} model_seen_t;

typedef struct model_rank {
    int id, rank, pid;
    bool is_there; // of the generation that runs
    char host[MODEL_NAME_BYTES];
    model_seen_t seen;
    uint64_t seen_ns;
    double operations_s, bytes_s, samples_s, step_s, cpu; // rates since the snapshot before
    bool has_ended;
    int code, signo;
    buf_t stack, log;
    model_operation_t *operations; // a ring; NULL: none yet
    int64_t n_operations;
    uint8_t history[MODEL_HISTORY][3]; // shares, in percent
    int n_history;
} model_rank_t;

typedef struct model_event {
    int64_t time_ms; // since 1970
    char kind;       // 'i'nformation, 'f'ailure
    char text[400];
} model_event_t;

typedef struct model {
    lock_t lock;
    char command[512], state[16], user[64], host[64]; // state: "starting", "running", "over"
    int64_t begun_ms;
    int code; // once it is over
    int n_ranks;
    unsigned generation;
    model_rank_t **ranks;
    int n, n_ready; // ready: hosts
    int n_hosts;
    char missing[MODEL_NAME_BYTES]; // a host that is awaited; "": none
    buf_t failure;                  // the block that says what has happened; empty: nothing
    model_event_t events[MODEL_EVENTS];
    int n_events;
} model_t;

// This thread has the lock, as REQUIRES says where a function is declared.
#define MODEL_LOCKED(model)                                                                        \
    (RULE("LOCKED", owner_is_me(&(model)->lock.owner)), lock_is_mine(&(model)->lock))

model_t *model_new(char *const *command, int n_command); // NULL: no memory
void model_free(model_t *model);                         // safe on NULL

// By the launcher's thread.
// A rank has this place now; id stays when it gets another.
void model_place(model_t *model, int id, int rank, const char *host, int pid);
void model_gone(model_t *model, int id); // it is not of this generation
void model_end(model_t *model, int id, int code, int signo);
void model_hosts(model_t *model, int n_ready, int n_hosts, const char *missing);
void model_generation(model_t *model, unsigned generation, int n_ranks);
void model_output(model_t *model, int id, const void *data, size_t bytes);
void model_event(model_t *model, char kind, const char *format, ...) PRINTF_LIKE(3, 4);
void model_failure(model_t *model, const void *text, size_t bytes);
void model_over(model_t *model, int code);
// model_read.c: the page of a rank; what cannot be read is left out.
void model_snapshot(model_t *model, int id, const char *page);

// Any thread. NULL: there is none.
model_rank_t *model_find(const model_t *model, int id) REQUIRES(model->lock);
int64_t model_now_ms(void);
// The job in numbers.
typedef struct model_sums {
    int n_there, n_started, n_silent;
    double operations_s, bytes_s, samples_s, step_s, loss;
    bool has_step, has_loss;
    int64_t step;
    uint64_t memory_bytes;
} model_sums_t;
model_sums_t model_sums(const model_t *model) REQUIRES(model->lock);
// "rank 2", "ranks 2, 5 and 7 more"; "": for nobody.
void model_waits_for(const model_t *model, const model_rank_t *rank, char *text, size_t bytes)
    REQUIRES(model->lock);
// How much of the time the others wait for this one, 0..1, as far as it is worth telling.
double model_lateness(const model_t *model, const model_rank_t *rank) REQUIRES(model->lock);

// model_json.c. The job, with the history of its ranks or without; one rank, or null.
void model_json(model_t *model, bool has_history, buf_t *out);
void model_rank_json(model_t *model, int id, buf_t *out);
// Everything, for a page that is read when the job is over.
void model_frozen_json(model_t *model, buf_t *out);
// model_text.c
void model_text(model_t *model, int columns, int rows, buf_t *out);
void model_metrics(model_t *model, metrics_form_t form, buf_t *out);
// "step 120, loss 0.31, 8,400 samples/s"; "": nothing was reported
void model_progress(model_t *model, char *text, size_t bytes);

// --- JSON (json.c) -------------------------------------------------------------------------------

void json_text(buf_t *out, const char *text); // in quotes
void json_bytes(buf_t *out, const void *text, size_t bytes);
void json_number(buf_t *out, double value); // null where JSON has no such number

// --- The page (page.c) ---------------------------------------------------------------------------

typedef struct page {
    buf_t html;
    char policy[512]; // Content-Security-Policy
} page_t;

// data NULL: it asks for it; else a page for a file, with the policy inside.
bool page_make(const buf_t *data, page_t *page_p);
void page_free(page_t *page);

// --- The server (server.c) -----------------------------------------------------------------------

typedef struct web_rules {
    model_t *model;
    const char *address;     // NULL: no port
    int port;                // 0: any free one
    const char *certificate; // PEM, with its key; "": in the clear, at loopback only
    const char *host;        // that clients may call it by, besides the address; "": none
    const char *token;
    const char *local; // abstract Unix socket for this user; "": none
} web_rules_t;

typedef struct web web_t;

#define WEB_TOKEN_BYTES 33 // 128 bits in hex

// Starts the thread.
hvd_status_t web_open(const web_rules_t *rules, web_t **web_p, err_t *err);
int web_port(const web_t *web);
bool web_is_watched(const web_t *web); // somebody has asked within the last seconds
// Shows the last picture to whoever looks, for a moment, and ends. Safe on NULL.
void web_close(web_t *web);

#endif
