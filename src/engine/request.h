// SPDX-License-Identifier: Apache-2.0
//
// request.h - one submission of this rank, and the table of them.
//
// A request object is recycled, never freed before the context ends. hvd_submit() fills it under
// the lock; then it belongs to the board, or to the holder of the engine, until it is done; then to
// whoever has its handle. At rest it keeps what it was about: asked for the same again, it needs
// only the new addresses.
#ifndef HVD_ENGINE_REQUEST_H
#define HVD_ENGINE_REQUEST_H

#include "net/shm.h"
#include "observe/observe.h"

#define BOARD_MEMBERS BOARD_MOST_MEMBERS // larger sets gain nothing from the board
#define BOARD_SIZES 64                   // that all members together may tell there

typedef enum request_state {
    REQUEST_FREE,
    REQUEST_IN_FLIGHT,
    REQUEST_DONE,
} request_state_t;

typedef struct board_seen board_seen_t;

// What board.c knows of a request it has tried.
typedef struct board_try {
    uint64_t hash; // of everything that must be equal; 0: that and the next are not known
    int n_members, member;
    int ranks[BOARD_MEMBERS];
    bool adds_up;           // what members have brought
    size_t sum_bytes;       // of what each has, then
    board_place_t *place;   // NULL: it was not tried
    board_seen_t *seen;     // what is known of that place
    uint8_t *contributions; // there: two of `stride` bytes for each member
    size_t stride;
    uint64_t closed; // the word of a round that was closed; 0: none
    uint32_t round;
    atomic_bool waits;          // counted in a round, and not yet given to the engine
    uint64_t stream;            // number of the stream its members agreed on there; 0: none
    int64_t sizes[BOARD_SIZES]; // that they told, member after member
} board_try_t;

typedef struct staged staged_t; // staging.c

typedef struct request request_t;
struct request {
    _Atomic hvd_handle_t handle; // generation << 32 | index + 1
    atomic_int state;            // request_state_t; DONE is the release of everything below
    atomic_bool released;        // the user let go of it
    request_t *next;             // in the queue, then among those at rest
    request_t *previous;         // at rest

    // Names in flight, and those that are remembered: chained by hash. 0: not in the table.
    uint64_t hash;
    request_t *next_same_hash;
    bool is_remembered; // at rest it keeps its name and everything below that was asked for

    // What was asked for. Pointers lead into `storage`.
    signature_t
        signature; // op OP_ADD_SET, OP_REMOVE_SET: asked by process_sets.c, with set_ranks and set
    const char *name;
    const char *where; // the user's source line; NULL: not given
    int process_set;
    uint64_t set_hash; // of the members
    hvd_alloc_fn alloc;
    hvd_done_fn done;
    void *arg;
    hvd_tensor_t *tensors;
    void **owned; // outputs the library allocated, by tensor; NULL entries otherwise
    int64_t *sizes;
    int n_sizes;
    void *payload; // room for accumulators that ride along; NULL if it does not
    size_t payload_bytes;
    int *set_ranks;
    int n_set_ranks;
    buf_t storage;

    board_try_t board;
    staged_t *staged;           // its tensors are a GPU's: staging.c; else NULL
    atomic_bool held_by_device; // their copies have not arrived: not the engine's yet
    trace_t trace;

    // Result.
    hvd_status_t status;
    char *text; // malloc'ed on failure
    int last_joined;
    int set;                  // which was added, or is to be removed
    int32_t *received_splits; // malloc'ed
};

#define N_REQUEST_CHUNKS 20
#define FIRST_CHUNK 64

// request.c. Objects lie in chunks that never move, each twice as large as the last.
typedef struct request_table {
    request_t *_Atomic chunks[N_REQUEST_CHUNKS];
    atomic_uint n;
    atomic_int n_in_flight;   // in the engine's hands, and not yet done
    request_t *_Atomic queue; // submitted and not yet seen by coord, newest first
    // Under lock:
    request_t *rest_first, *rest_last; // those to be used again first, and last
    request_t **by_name;
    int n_by_name;        // power of two
    uint64_t n_submitted; // operations, and the last of them: see failure_text.c
    const request_t *newest;
} request_table_t;

// --- request.c -----------------------------------------------------------------------------------

// What a thread must have for the rest of request.c says engine.h.
request_t *request_find(hvd_ctx_t *ctx, hvd_handle_t handle); // any thread; NULL: unknown, released

static inline uint64_t tag_of(request_t *request)
{
    return (uint64_t)(uintptr_t)request;
}
static inline request_t *request_of_tag(uint64_t tag) // NULL for tag 0
{
    return (request_t *)(uintptr_t)tag;
}

// The user's output, or memory taken for it; NULL: there is none.
void *request_output(request_t *request, int t);
// The accumulators of a small allreduce, from its tensors; and results to its outputs. False: no
// memory for them.
void request_load(const request_t *request, void *accumulators);
bool request_store(request_t *request, const void *result, int n_members);
void requests_wake(hvd_ctx_t *ctx); // threads that wait for what has been completed
// Cuts memory, aligned, from the request's storage, which must have been reserved whole.
static inline void *request_cut(request_t *request, size_t bytes)
{
    buf_t *storage = &request->storage;
    size_t pad = -storage->len & 7;
    storage->len += pad + bytes;
    INVARIANT(storage->len <= storage->cap);
    return storage->data + storage->len - bytes;
}

#endif
