// SPDX-License-Identifier: Apache-2.0
//
// fuzz_coord.c - the agreement with one member of the tree who has the secret and lies.
//
// Four coordinators in a tree; the first byte says which of them is the liar. The input is a
// script: the liar sends a frame to a neighbour, honest ranks submit, ask for sets, shut down, time
// passes, messages travel. Whoever cannot read a frame ends the job, as the engine would. Nothing
// may crash, loop, or hold memory out of proportion to what came in; every decision can be read.
#include "coord/testing.h"
#include "fuzz.h"
#include "wire/control.h"

#define N_RANKS 4
#define MAX_STEPS 200
#define MAX_ROUNDS 200
#define FIXED_MEMORY (4 * MIB)
#define MEMORY_PER_BYTE 4096 // a name of one byte costs an entry on every rank

typedef struct world {
    coord_t *ranks[N_RANKS]; // NULL: the liar
    int liar;
    size_t inline_bytes;
    bool cut; // the liar's links are closed
    uint64_t now_ns, next_tag;
    volatile uint64_t touched; // keeps the reads of decisions
} world_t;

static const int parents[N_RANKS] = {-1, 0, 1, 1};

// Touches what a real reduction would.
static void reduce(hvd_dtype_t dtype, hvd_reduce_t op, void *dst, const void *a, const void *b,
                   size_t n)
{
    const uint8_t *x = a, *y = b;
    uint8_t *to = dst;
    MUST(op != HVD_AVERAGE && op != HVD_ADASUM);
    for (size_t i = 0; i < n * hvd_dtype_bytes(dtype); i++) {
        to[i] = x[i] ^ y[i];
    }
}

static void touch(world_t *world, const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        world->touched += ((const uint8_t *)data)[i];
    }
}

// --- Messages ------------------------------------------------------------------------------------

static void deliver(world_t *world, int from, int to, const uint8_t *body, size_t bytes)
{
    err_t err = {0};
    coord_t *rank = world->ranks[to];
    if (coord_receive(rank, from, body, bytes, world->now_ns, &err) != HVD_OK) {
        MUST(err.text[0] != '\0');
        coord_abort(rank, err.status, -1, err.text);
        world->cut = world->cut || from == world->liar;
    }
}

// The whole frames that `from` has for its i-th neighbour.
static bool move(world_t *world, int from, int i)
{
    const void *out;
    coord_form_batches(world->ranks[from]);
    size_t n = coord_outgoing(world->ranks[from], i, &out), at = 0;
    int to = coord_neighbour(world->ranks[from], i);
    if (n == 0) {
        return false;
    }
    uint8_t *copy = malloc(n);
    MUST(copy != NULL);
    memcpy(copy, out, n);
    coord_sent(world->ranks[from], i, n);
    while (at < n && to != world->liar) {
        size_t body_bytes;
        MUST(frame_read(copy + at, n - at, &body_bytes, NULL) == HVD_OK);
        deliver(world, from, to, copy + at + FRAME_HEADER_BYTES, body_bytes);
        at += FRAME_HEADER_BYTES + body_bytes;
    }
    free(copy);
    return true;
}

static bool decide(world_t *world, int rank)
{
    const decision_t *decision;
    bool any = false;
    while (coord_form_batches(world->ranks[rank]),
           (decision = coord_next(world->ranks[rank])) != NULL) {
        bool rides = decision->n_entries > 0 && decision->entries[0].result != NULL;
        for (int i = 0; i < decision->n_entries; i++) {
            const decision_entry_t *entry = &decision->entries[i];
            touch(world, entry->name, strlen(entry->name));
            touch(world, entry->sizes, (size_t)entry->n_sizes * sizeof(int64_t));
            touch(world, entry->signature->dims,
                  (size_t)entry->signature->n_dims_words * sizeof(int64_t));
            touch(world, entry->result, entry->result != NULL ? entry->result_bytes : 0);
            MUST((entry->result != NULL) == rides);
        }
        if (decision->text != NULL) {
            touch(world, decision->text, strlen(decision->text));
        }
        if (decision->kind == DECIDE_RUN && !rides) {
            coord_batch_done(world->ranks[rank], decision->batch, world->now_ns);
        }
        any = true;
    }
    return any;
}

static void settle(world_t *world)
{
    bool moved = true;
    for (int round = 0; moved; round++) {
        MUST(round < MAX_ROUNDS);
        moved = false;
        for (int rank = 0; rank < N_RANKS; rank++) {
            for (int i = 0; rank != world->liar && i < coord_n_neighbours(world->ranks[rank]);
                 i++) {
                moved |= move(world, rank, i);
            }
        }
        for (int rank = 0; rank < N_RANKS; rank++) {
            moved |= rank != world->liar && decide(world, rank);
        }
    }
}

// --- The script ----------------------------------------------------------------------------------

static void lie(world_t *world, input_t *in)
{
    // Its neighbours in the tree: the parent and up to two children.
    int neighbours[N_RANKS], n = 0;
    for (int rank = 0; rank < N_RANKS; rank++) {
        if (parents[world->liar] == rank || parents[rank] == world->liar) {
            neighbours[n++] = rank;
        }
    }
    int to = neighbours[take_u8(in) % n];
    size_t bytes = take_u16(in);
    uint8_t *body = take_copy(in, &bytes);
    if (!world->cut) {
        deliver(world, world->liar, to, body, bytes);
    }
    free(body);
}

static void submit(world_t *world, coord_t *rank, input_t *in)
{
    static const char *const names[] = {"a", "b", "weights/0", "weights/1"};
    static const int64_t payload[64];
    int64_t dims[] = {1, 1 + take_u8(in) % 8}, sizes[N_RANKS];
    uint8_t what = take_u8(in);
    const char *name = names[what % 4];
    hvd_op_t op = (hvd_op_t)(what / 4 % HVD_N_OPS);
    bool plain = op == HVD_BARRIER || op == HVD_JOIN;
    bool uneven = op == HVD_ALLGATHER || op == HVD_ALLTOALL;
    size_t ride_bytes;
    err_t err;
    for (int i = 0; i < N_RANKS; i++) {
        sizes[i] = 1;
    }
    if (uneven) {
        dims[1] = -1;
    }
    signature_t signature = {.op = op,
                             .dtype = HVD_FLOAT32,
                             .reduce = HVD_SUM,
                             .prescale = 1,
                             .postscale = 1,
                             .n_tensors = plain ? 0 : 1,
                             .dims = dims,
                             .n_dims_words = plain ? 0 : 2};
    coord_request_t request = {
        .set = take_u8(in) % 4 == 3 ? 1 : 0,
        .name = name,
        .name_bytes = strlen(name),
        .signature = &signature,
        .sizes = uneven ? sizes : NULL,
        .n_sizes = op == HVD_ALLGATHER  ? 1
                   : op == HVD_ALLTOALL ? N_RANKS
                                        : 0,
        .tag = ++world->next_tag,
    };
    if (signature_rides(&signature, world->inline_bytes, &ride_bytes)) {
        MUST(ride_bytes <= sizeof payload);
        request.payload = payload;
        request.payload_bytes = ride_bytes;
    }
    if (coord_submit(rank, &request, world->now_ns, &err) != HVD_OK) {
        MUST(err.text[0] != '\0');
    }
}

static void change_sets(world_t *world, coord_t *rank, input_t *in)
{
    uint8_t what = take_u8(in);
    int ranks[2] = {what % N_RANKS, what / N_RANKS % N_RANKS};
    err_t err;
    if (what < 128) {
        coord_add_set(rank, ranks, 2, ++world->next_tag, world->now_ns, &err);
    } else {
        coord_remove_set(rank, what % 3, ++world->next_tag, world->now_ns, &err);
    }
}

static void step(world_t *world, input_t *in)
{
    uint8_t what = take_u8(in);
    coord_t *rank = world->ranks[what % N_RANKS];
    switch (what / N_RANKS % 8) {
    case 0:
    case 1:
    case 2:
        lie(world, in);
        break;
    case 3:
        settle(world);
        break;
    case 4:
        world->now_ns += (1 + take_u8(in)) * (NS_PER_S / 8);
        for (int i = 0; i < N_RANKS; i++) {
            if (i != world->liar) {
                coord_tick(world->ranks[i], world->now_ns);
            }
        }
        break;
    case 5:
        if (rank != NULL) {
            change_sets(world, rank, in);
        }
        break;
    case 6:
        if (rank != NULL && take_u8(in) == 0xff) {
            coord_shutdown(rank, "", world->now_ns);
        }
        break;
    default:
        if (rank != NULL) {
            submit(world, rank, in);
        }
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    input_t in = {data, bytes};
    uint8_t head = take_u8(&in);
    world_t world = {
        .liar = head % N_RANKS, .inline_bytes = (head & 4) != 0 ? 64 : 0, .now_ns = NS_PER_S};
    coord_params_t params = {.size = N_RANKS,
                             .parent = parents,
                             .fusion_bytes = 1 << 20,
                             .inline_bytes = world.inline_bytes,
                             .cache_capacity = (head & 8) != 0 ? 2 : 1000,
                             .dynamic_sets = true,
                             .stall_warn_ns = NS_PER_S,
                             .stall_fail_ns = 60 * NS_PER_S,
                             .reduce = reduce};
    for (int rank = 0; rank < N_RANKS; rank++) {
        params.rank = rank;
        MUST(rank == world.liar || coord_new(&params, &world.ranks[rank], NULL) == HVD_OK);
    }
    for (int i = 0; i < MAX_STEPS && in.left > 0; i++) {
        step(&world, &in);
    }
    settle(&world);
    for (int rank = 0; rank < N_RANKS; rank++) {
        if (rank != world.liar) {
            MUST(coord_memory(world.ranks[rank]) <= FIXED_MEMORY + MEMORY_PER_BYTE * bytes);
            coord_free(world.ranks[rank]);
        }
    }
    return 0;
}
