// SPDX-License-Identifier: Apache-2.0
//
// simulate_agreement.c - the agreement of coord/ on a virtual clock.
//
// Method: each simulated rank has a real coord_t. What it writes for a neighbour costs its core
// message_ns, the wire byte_ns for each byte, and is an event for the neighbour after latency_ns,
// which then costs the neighbour's core message_ns before coord_receive() sees it. A rank looks at
// what it has to send when it has taken all that had come by then, as the engine does.
//
// Of a large job only the longest path from rank 0 is run: the first leader below each leader, and
// one further rank on each of their hosts. Its other children are taken to do what the child on the
// path does: one message from it arrives once for each of them, and what is sent to all of them
// reaches the child on the path last. So memory grows with the depth of the tree times the ranks.
//
// Cost: O(messages log messages). Three operations: the first makes the name known, the third is
// priced.
#include "coord/coord.h"
#include "simulate/simulate.h"
#include "wire/control.h"

#include <stdio.h>
#include <stdlib.h>

#define N_CYCLES 3
#define NOBODY (-1)

// A rank that is run, and how many ranks of the same parent it stands for (itself among them).
typedef struct node {
    int rank, parent; // parent: a node
    int stands_for;
    coord_t *coord;
    double *busy_until_ns; // of its core
    double decided_ns;
    bool is_decided;
    uint64_t batch; // to be told that it is done
} node_t;

// One frame, or several in one piece, on their way.
typedef struct letter {
    int to_node, from_rank;
    uint8_t *data;
    size_t bytes;
} letter_t;

typedef struct agreement {
    const machine_t *m;
    int *parent;  // of each rank
    int *node_of; // each rank's; NOBODY: it is not run
    node_t *nodes;
    int n_nodes;
    double *busy_until_ns; // of each core
    events_t events;
    letter_t *letters;
    size_t n_letters, cap_letters;
    size_t payload_bytes;
    float *payload;
    err_t *err;
    hvd_status_t status;
} agreement_t;

// --- Who is run ---------------------------------------------------------------------------------

static bool same_host(const machine_t *m, int a, int b)
{
    return a / m->per_host == b / m->per_host;
}

static void add_node(agreement_t *a, int rank)
{
    int parent = a->parent[rank];
    a->node_of[rank] = a->n_nodes;
    a->nodes[a->n_nodes++] = (node_t){
        .rank = rank,
        .parent = parent < 0 ? NOBODY : a->node_of[parent],
        .stands_for = 1,
        .busy_until_ns = &a->busy_until_ns[machine_core_of(a->m, rank)],
    };
}

// A rank and, if there are any, one of the others on its host.
static void add_host(agreement_t *a, int host)
{
    int leader = host * a->m->per_host;
    int n_others = MIN(a->m->per_host, a->m->n_ranks - leader) - 1;
    add_node(a, leader);
    if (n_others > 0) {
        add_node(a, leader + 1);
        a->nodes[a->n_nodes - 1].stands_for = n_others;
    }
}

static void choose_path(agreement_t *a)
{
    int arity = a->m->tree_arity, n_hosts = machine_n_hosts(a->m);
    add_host(a, 0);
    for (int above = 0; arity * above + 1 < n_hosts; above = arity * above + 1) {
        int host = arity * above + 1;
        int first = a->n_nodes;
        add_host(a, host);
        a->nodes[first].stands_for = MIN(arity, n_hosts - host);
    }
}

static void choose_nodes(agreement_t *a, int whole_tree_ranks)
{
    for (int rank = 0; rank < a->m->n_ranks; rank++) {
        a->node_of[rank] = NOBODY;
    }
    if (a->m->n_ranks > whole_tree_ranks && a->m->n_cores == 0) {
        choose_path(a);
        return;
    }
    for (int rank = 0; rank < a->m->n_ranks; rank++) {
        add_node(a, rank);
    }
}

static hvd_status_t make_coords(agreement_t *a)
{
    coord_params_t params = {.size = a->m->n_ranks,
                             .parent = a->parent,
                             .fusion_bytes = 1,
                             .inline_bytes = a->payload_bytes,
                             .cache_capacity = 8,
                             .reduce = reduce_pair};
    for (int i = 0; i < a->n_nodes && a->status == HVD_OK; i++) {
        params.rank = a->nodes[i].rank;
        a->status = coord_new(&params, &a->nodes[i].coord, a->err);
    }
    return a->status;
}

// --- Messages -----------------------------------------------------------------------------------

static bool has_room_for_letter(agreement_t *a)
{
    if (a->n_letters < a->cap_letters) {
        return true;
    }
    size_t cap = a->cap_letters > 0 ? 2 * a->cap_letters : 256;
    letter_t *letters = realloc(a->letters, cap * sizeof *letters);
    if (letters == NULL) {
        return false;
    }
    a->letters = letters;
    a->cap_letters = cap;
    return true;
}

static void post(agreement_t *a, int to_node, int from_rank, const void *data, size_t bytes,
                 double at_ns)
{
    uint8_t *copy = has_room_for_letter(a) ? malloc(bytes) : NULL;
    if (copy == NULL) {
        a->status = fail(a->err, HVD_NO_MEMORY, "no memory to simulate %d ranks", a->m->n_ranks);
        return;
    }
    memcpy(copy, data, bytes);
    a->letters[a->n_letters] = (letter_t){to_node, from_rank, copy, bytes};
    events_add(&a->events, at_ns, 0, (int)a->n_letters++);
}

// The ranks that `node` stands for all send the same to its parent.
static void send_up(agreement_t *a, const node_t *node, const void *data, size_t bytes,
                    double at_ns)
{
    const node_t *parent = &a->nodes[node->parent];
    bool is_local = same_host(a->m, node->rank, parent->rank);
    int n = coord_n_neighbours(parent->coord);
    for (int i = 0; i < n; i++) {
        int rank = coord_neighbour(parent->coord, i);
        bool is_child = a->parent[rank] == parent->rank;
        bool is_alike = is_child && same_host(a->m, rank, parent->rank) == is_local;
        if (rank == node->rank || (node->stands_for > 1 && is_alike)) {
            post(a, node->parent, rank, data, bytes, at_ns);
        }
    }
}

static const path_cost_t *cost_between(const agreement_t *a, int rank, int other)
{
    return same_host(a->m, rank, other) ? &a->m->host : &a->m->network;
}

// What it costs to send what waits for neighbour i; *bytes_p 0: nothing does.
static double cost_of_sending(const agreement_t *a, const node_t *node, int i, size_t *bytes_p)
{
    const void *data;
    const path_cost_t *cost = cost_between(a, node->rank, coord_neighbour(node->coord, i));
    *bytes_p = coord_outgoing(node->coord, i, &data);
    return *bytes_p > 0 ? cost->message_ns + (double)*bytes_p * cost->byte_ns : 0;
}

// Sends what the rank has written, neighbour after neighbour. On a path, those that are run get it
// when all whom they stand for have been sent theirs: the last of them is the slowest.
static void send_all(agreement_t *a, node_t *node)
{
    bool is_path = a->n_nodes < a->m->n_ranks;
    int n = coord_n_neighbours(node->coord);
    double now = *node->busy_until_ns, end = now;
    size_t bytes;
    for (int i = 0; i < n; i++) {
        end += cost_of_sending(a, node, i, &bytes);
    }
    for (int i = 0; i < n && a->status == HVD_OK; i++) {
        const void *data;
        int to = coord_neighbour(node->coord, i);
        now += cost_of_sending(a, node, i, &bytes);
        double at_ns = (is_path ? end : now) + cost_between(a, node->rank, to)->latency_ns;
        if (bytes == 0) {
            continue;
        }
        coord_outgoing(node->coord, i, &data);
        if (to == a->parent[node->rank]) {
            send_up(a, node, data, bytes, at_ns);
        } else if (a->node_of[to] != NOBODY) {
            post(a, a->node_of[to], node->rank, data, bytes, at_ns);
        }
        coord_sent(node->coord, i, bytes);
    }
    *node->busy_until_ns = end;
}

// --- Ranks --------------------------------------------------------------------------------------

static void take_decisions(agreement_t *a, node_t *node)
{
    const decision_t *decision;
    coord_form_batches(node->coord);
    while (a->status == HVD_OK && (decision = coord_next(node->coord)) != NULL) {
        if (decision->kind == DECIDE_RUN) {
            node->is_decided = true;
            node->decided_ns = *node->busy_until_ns;
            node->batch = decision->entries[0].result == NULL ? decision->batch : COORD_NO_BATCH;
        } else {
            a->status = fail(a->err, HVD_PROTOCOL, "the simulated agreement ended: %s",
                             decision->text != NULL ? decision->text : "no reason given");
        }
    }
}

static void submit(agreement_t *a, node_t *node)
{
    int64_t dims[] = {1, (int64_t)(a->payload_bytes > 0 ? a->payload_bytes / sizeof(float) : MIB)};
    signature_t signature = {.op = HVD_ALLREDUCE,
                             .dtype = HVD_FLOAT32,
                             .reduce = HVD_SUM,
                             .prescale = 1,
                             .postscale = 1,
                             .n_tensors = 1,
                             .dims = dims,
                             .n_dims_words = 2};
    coord_request_t request = {.name = "gradient",
                               .name_bytes = 8,
                               .signature = &signature,
                               .payload = a->payload_bytes > 0 ? a->payload : NULL,
                               .payload_bytes = a->payload_bytes,
                               .tag = 1};
    node->is_decided = false;
    a->status = coord_submit(node->coord, &request, 0, a->err);
    take_decisions(a, node);
    send_all(a, node);
}

static void take_letter(agreement_t *a, const letter_t *letter, double at_ns)
{
    node_t *node = &a->nodes[letter->to_node];
    const path_cost_t *cost = cost_between(a, node->rank, letter->from_rank);
    *node->busy_until_ns = MAX(*node->busy_until_ns, at_ns) + cost->message_ns;
    for (size_t at = 0; at < letter->bytes && a->status == HVD_OK;) {
        size_t n = 0;
        a->status = frame_read(letter->data + at, letter->bytes - at, &n, a->err);
        if (a->status == HVD_OK) {
            a->status = coord_receive(node->coord, letter->from_rank,
                                      letter->data + at + FRAME_HEADER_BYTES, n, 0, a->err);
        }
        at += FRAME_HEADER_BYTES + n;
    }
    if (a->status == HVD_OK) {
        take_decisions(a, node);
        send_all(a, node);
    }
}

// One operation, from submission to the last decision.
static double run_cycle(agreement_t *a)
{
    double last_ns = 0;
    a->n_letters = 0;
    memset(a->busy_until_ns, 0, (size_t)a->m->n_ranks * sizeof *a->busy_until_ns);
    for (int i = a->n_nodes - 1; i >= 0 && a->status == HVD_OK; i--) {
        submit(a, &a->nodes[i]);
    }
    sim_event_t event;
    while (events_next(&a->events, &event)) {
        letter_t letter = a->letters[event.number];
        if (a->status == HVD_OK) {
            take_letter(a, &letter, event.at_ns);
        }
        free(letter.data);
    }
    for (int i = 0; i < a->n_nodes && a->status == HVD_OK; i++) {
        node_t *node = &a->nodes[i];
        if (!node->is_decided) {
            a->status =
                fail(a->err, HVD_PROTOCOL, "rank %d of the simulated job never agreed", node->rank);
        } else if (node->batch != COORD_NO_BATCH) {
            coord_batch_done(node->coord, node->batch, 0);
        }
        last_ns = MAX(last_ns, node->decided_ns);
    }
    return last_ns;
}

// --- The whole ----------------------------------------------------------------------------------

static void agreement_free(agreement_t *a)
{
    for (int i = 0; i < a->n_nodes; i++) {
        coord_free(a->nodes[i].coord);
    }
    events_free(&a->events);
    free(a->letters);
    free(a->payload);
    free(a->busy_until_ns);
    free(a->nodes);
    free(a->node_of);
    free(a->parent);
}

hvd_status_t simulate_agreement(const machine_t *m, size_t payload_bytes, int whole_tree_ranks,
                                double *ns_p, err_t *err)
{
    size_t n = (size_t)m->n_ranks;
    agreement_t a = {.m = m,
                     .parent = malloc(n * sizeof(int)),
                     .node_of = malloc(n * sizeof(int)),
                     .nodes = calloc(n, sizeof(node_t)),
                     .busy_until_ns = malloc(n * sizeof(double)),
                     .payload = calloc(1, payload_bytes + 1),
                     .payload_bytes = payload_bytes,
                     .err = err};
    double ns = 0;
    if (a.parent == NULL || a.node_of == NULL || a.nodes == NULL || a.payload == NULL ||
        a.busy_until_ns == NULL) {
        a.status = fail(err, HVD_NO_MEMORY, "no memory to simulate %d ranks", m->n_ranks);
    } else {
        machine_tree(m, a.parent);
        choose_nodes(&a, whole_tree_ranks);
        make_coords(&a);
    }
    for (int cycle = 0; cycle < N_CYCLES && a.status == HVD_OK; cycle++) {
        ns = run_cycle(&a);
    }
    if (a.events.failed && a.status == HVD_OK) {
        a.status = fail(err, HVD_NO_MEMORY, "no memory to simulate %d ranks", m->n_ranks);
    }
    agreement_free(&a);
    if (a.status == HVD_OK) {
        *ns_p = ns;
    }
    return a.status;
}
