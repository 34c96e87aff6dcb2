// SPDX-License-Identifier: Apache-2.0
//
// simulate.c - the price of an operation: its agreement, and the way that moves its bytes.
//
// The way and the algorithm are those that the engine chooses. Inside a host each core moves
// every byte into the window and out of it, and reads it once more to add it up.
#include "simulate/simulate.h"
#include "engine/ways.h"

#include <stdlib.h>

#define COPIED_MOVES 2
#define REDUCED_MOVES 3

int machine_n_hosts(const machine_t *m)
{
    return (m->n_ranks + m->per_host - 1) / m->per_host;
}

int machine_core_of(const machine_t *m, int rank)
{
    return m->n_cores > 0 ? rank % m->n_cores : rank;
}

void machine_tree(const machine_t *m, int *parent)
{
    for (int rank = 0; rank < m->n_ranks; rank++) {
        int host = rank / m->per_host;
        bool is_leader = rank % m->per_host == 0;
        parent[rank] = !is_leader  ? host * m->per_host
                       : host == 0 ? -1
                                   : (host - 1) / m->tree_arity * m->per_host;
    }
}

// Each core moves so many bytes, after it has met the others and before it meets them again.
static double in_memory_ns(const machine_t *m, size_t bytes)
{
    return 2 * m->host.latency_ns + (double)bytes * m->host.byte_ns;
}

static bool has_blocks(hvd_op_t op)
{
    op_layout_t layout = op_infos[op].layout;
    return layout == LAYOUT_GATHERED || layout == LAYOUT_SCATTERED || layout == LAYOUT_EXCHANGED;
}

// `blocks` has an entry for each rank.
static coll_args_t args_of(const machine_t *m, hvd_op_t op, size_t bytes, size_t *blocks)
{
    bool shares = op == HVD_REDUCESCATTER || op == HVD_ALLTOALL;
    size_t block = shares ? MAX(bytes / (size_t)m->n_ranks, sizeof(float)) : bytes;
    for (int r = 0; r < m->n_ranks; r++) {
        blocks[r] = block / sizeof(float) * sizeof(float);
    }
    return (coll_args_t){.op = op,
                         .dtype = HVD_FLOAT32,
                         .reduce = HVD_SUM,
                         .size = m->n_ranks,
                         .bytes = bytes,
                         .blocks = blocks,
                         .send_bytes = blocks,
                         .recv_bytes = blocks,
                         .equal_blocks = true,
                         .segment_bytes = m->segment_bytes};
}

static way_id_t way_of(const machine_t *m, const config_t *config, const coll_args_t *args)
{
    int n_hosts = machine_n_hosts(m);
    size_t n = has_blocks(args->op) && args->op != HVD_REDUCESCATTER ? (size_t)args->size : 1;
    return way_choose(&(way_case_t){
        .args = args,
        .algorithm = config->algorithm,
        .inline_bytes = way_inline_bytes(config, m->n_ranks, n_hosts),
        .one_host = n_hosts == 1,
        .has_stream = true,
        .all_bytes = args->bytes * n,
        .two_levels = m->per_host > 1 && n_hosts > 1,
    });
}

static hvd_status_t price_plan(const machine_t *m, const config_t *config, coll_args_t args,
                               int per_host, int lanes, price_t *price, err_t *err)
{
    double ns = -1;
    const algorithm_t *algorithm = coll_choose(&args, config->algorithm, err);
    if (algorithm == NULL) {
        return err->status;
    }
    price->algorithm = algorithm->name;
    hvd_status_t status = simulate_plan(m, algorithm, &args, per_host, lanes, &ns, err);
    price->data_ns = status == HVD_OK && price->data_ns >= 0 ? price->data_ns + ns : -1;
    return status == HVD_UNSUPPORTED ? HVD_OK : status;
}

static hvd_status_t price_way(const machine_t *m, const config_t *config, const coll_args_t *args,
                              way_id_t way, price_t *price, err_t *err)
{
    switch (way) {
    case WAY_BOARD:
    case WAY_RIDING:
    case WAY_AGREED:
        return HVD_OK; // the agreement has done it
    case WAY_TWO_LEVEL: {
        coll_args_t shard = *args;
        shard.size = machine_n_hosts(m);
        shard.bytes = args->bytes / (size_t)m->per_host / sizeof(float) * sizeof(float);
        price->data_ns = in_memory_ns(m, REDUCED_MOVES * args->bytes);
        return price_plan(m, config, shard, 1, m->per_host, price, err);
    }
    case WAY_PLAN:
        return price_plan(m, config, *args, m->per_host, 1, price, err);
    default:
        price->data_ns = in_memory_ns(
            m, args->bytes * (op_has(args->op, OP_REDUCES) ? REDUCED_MOVES : COPIED_MOVES));
        return HVD_OK;
    }
}

hvd_status_t simulate_operation(const machine_t *m, const config_t *config, hvd_op_t op,
                                size_t bytes, price_t *price_p, err_t *err)
{
    hvd_status_t status;
    size_t *blocks = calloc((size_t)m->n_ranks, sizeof *blocks);
    if (blocks == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to simulate %d ranks", m->n_ranks);
    }
    coll_args_t args = args_of(m, op, bytes, blocks);
    way_id_t way = way_of(m, config, &args);
    price_t price = {.way = ways[way].name, .algorithm = ""};
    TRY(simulate_agreement(m, way == WAY_RIDING ? bytes : 0, SIMULATE_WHOLE_TREE_RANKS,
                           &price.agreement_ns, err),
        done);
    TRY(price_way(m, config, &args, way, &price, err), done);
    *price_p = price;
done:
    free(blocks);
    return status;
}
