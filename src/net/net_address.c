// SPDX-License-Identifier: Apache-2.0
//
// net_address.c - what a rank tells the others of its transports and cores, and what it learns.
//
// The bytes come from other ranks by way of boot: every length is checked before it is used.
// Thread: the holder of the engine.
#define _GNU_SOURCE
#include "net/rows.h"
#include "wire/codec.h"

#include <sched.h>
#include <stdlib.h>

#define ADDRESS_VERSION 1
#define MAX_NAME_BYTES 15
#define MAX_OFFERS 16             // transports in one rank's address, known or not
#define MAX_BLOB_BYTES (16 * KIB) // one transport's address

// --- Cores ---------------------------------------------------------------------------------------

// Bytes of the mask up to the last core this process may use; 0 if the kernel does not say.
static size_t own_cpus(uint8_t mask[CPU_MASK_BYTES])
{
    size_t bytes = CPU_MASK_BYTES;
    memset(mask, 0, CPU_MASK_BYTES);
    if (sched_getaffinity(0, CPU_MASK_BYTES, (cpu_set_t *)mask) != 0) {
        return 0;
    }
    while (bytes > 0 && mask[bytes - 1] == 0) {
        bytes--;
    }
    return bytes;
}

// Hosts may be containers of one machine.
static bool shares_cores(const net_t *net, int rank)
{
    const peers_t *peers = net->job.peers;
    return net_same_host(net, rank) ||
           (peers != NULL && peers->of[rank].kernel == peers->of[net->job.rank].kernel);
}

// Ranks may be bound to cores of their own, so what counts is all cores any of them may use.
static void compare_cores(net_t *net)
{
    int n_ranks = 0, n_cpus = 0;
    for (int r = 0; r < net->job.size; r++) {
        n_ranks += shares_cores(net, r);
    }
    for (size_t i = 0; i < CPU_MASK_BYTES; i++) {
        n_cpus += __builtin_popcount(net->cpus[i]);
    }
    net->oversubscribed = n_cpus > 0 && n_ranks > n_cpus;
    net->has_spare_cores = n_cpus >= 2 * n_ranks;
}

// --- Addresses -----------------------------------------------------------------------------------

// A rank's address: version, core mask, then for each open transport its name, whether it may carry
// links, and its own bytes. A row this build does not know is skipped.
hvd_status_t net_address(net_t *net, buf_t *out, err_t *err)
{
    hvd_status_t status = HVD_OK;
    uint8_t cpus[CPU_MASK_BYTES];
    size_t n_cpu_bytes = own_cpus(cpus);
    buf_t blob = {0};
    int n_open = 0;
    for (int i = 0; i < N_TRANSPORTS; i++) {
        n_open += net->rows[i].domain != NULL;
    }
    put_u8(out, ADDRESS_VERSION);
    put_varint(out, n_cpu_bytes);
    put_bytes(out, cpus, n_cpu_bytes);
    put_varint(out, (uint64_t)n_open);
    for (int i = 0; i < net->n_order; i++) {
        const transport_t *transport = transports[net->order[i]];
        const row_t *row = &net->rows[net->order[i]];
        if (row->domain == NULL) {
            continue;
        }
        buf_clear(&blob);
        TRY(transport->address(row->domain, &blob, err), free_blob);
        put_varint(out, strlen(transport->name));
        put_bytes(out, transport->name, strlen(transport->name));
        put_u8(out, row->carries);
        put_varint(out, blob.len);
        put_bytes(out, blob.data, blob.len);
        if (blob.failed || blob.len > MAX_BLOB_BYTES) {
            status = fail(err, HVD_NO_MEMORY,
                          "the address of transport %s takes %zu bytes; at most "
                          "%zu fit",
                          transport->name, blob.len, MAX_BLOB_BYTES);
            goto free_blob;
        }
    }
    if (out->failed) {
        status = fail(err, HVD_NO_MEMORY, "no memory for this rank's address");
    }
free_blob:
    buf_free(&blob);
    return status;
}

// Where every rank's bytes for each row lie.
typedef struct blobs {
    const uint8_t **data[N_TRANSPORTS]; // [row][rank], NULL: the rank lacks it
    size_t *bytes[N_TRANSPORTS];
} blobs_t;

static hvd_status_t parse_offer(net_t *net, int rank, reader_t *r, blobs_t *blobs, err_t *err)
{
    size_t name_bytes = get_count(r, MAX_NAME_BYTES);
    const char *name = (const char *)get_bytes(r, name_bytes);
    bool carries = get_u8(r) == 1;
    size_t bytes = get_count(r, MAX_BLOB_BYTES);
    const uint8_t *data = get_bytes(r, bytes);
    int row = r->bad ? NO_ROW : net_row_named(name, name_bytes);
    if (row == NO_ROW) {
        return HVD_OK; // too short, which the caller sees, or not known here
    }
    if (blobs->data[row][rank] != NULL) {
        return fail(err, HVD_PROTOCOL, "rank %d sent two addresses for transport %s", rank,
                    transports[row]->name);
    }
    blobs->data[row][rank] = data;
    blobs->bytes[row][rank] = bytes;
    if (carries) {
        offers_t *offers = &net->offers[rank];
        offers->order[offers->n++] = (int8_t)row;
    }
    return HVD_OK;
}

static hvd_status_t parse_address(net_t *net, int rank, const uint8_t *data, size_t bytes,
                                  blobs_t *blobs, err_t *err)
{
    reader_t r = reader_of(data, bytes);
    bool version_known = get_u8(&r) == ADDRESS_VERSION;
    size_t n_cpu_bytes = get_count(&r, CPU_MASK_BYTES);
    const uint8_t *cpus = get_bytes(&r, n_cpu_bytes);
    int n_offers = (int)get_count(&r, MAX_OFFERS);
    for (int i = 0; version_known && i < n_offers; i++) {
        hvd_status_t status = parse_offer(net, rank, &r, blobs, err);
        if (status != HVD_OK) {
            return status;
        }
    }
    if (!version_known || r.bad || reader_left(&r) > 0) {
        return fail(
            err, HVD_PROTOCOL,
            "rank %d sent a malformed address; run the same version of the library everywhere",
            rank);
    }
    for (size_t i = 0; shares_cores(net, rank) && i < n_cpu_bytes; i++) {
        net->cpus[i] |= cpus[i];
    }
    return HVD_OK;
}

static bool blobs_init(blobs_t *blobs, int size)
{
    bool complete = true;
    for (int i = 0; i < N_TRANSPORTS; i++) {
        blobs->data[i] = calloc((size_t)size, sizeof *blobs->data[i]);
        blobs->bytes[i] = calloc((size_t)size, sizeof *blobs->bytes[i]);
        complete = complete && blobs->data[i] != NULL && blobs->bytes[i] != NULL;
    }
    return complete;
}

static void blobs_free(blobs_t *blobs)
{
    for (int i = 0; i < N_TRANSPORTS; i++) {
        free(blobs->data[i]);
        free(blobs->bytes[i]);
    }
}

hvd_status_t net_attach(net_t *net, const uint8_t *const *addresses, const size_t *lengths,
                        err_t *err)
{
    hvd_status_t status = HVD_OK;
    blobs_t blobs = {0};
    if (!blobs_init(&blobs, net->job.size)) {
        status = fail(err, HVD_NO_MEMORY, "no memory for the addresses of %d ranks", net->job.size);
        goto free_blobs;
    }
    for (int r = 0; r < net->job.size; r++) {
        TRY(parse_address(net, r, addresses[r], lengths[r], &blobs, err), free_blobs);
    }
    for (int i = 0; i < N_TRANSPORTS; i++) {
        if (net->rows[i].domain != NULL && transports[i]->attach != NULL) {
            TRY(transports[i]->attach(net->rows[i].domain, blobs.data[i], blobs.bytes[i], err),
                free_blobs);
        }
    }
    compare_cores(net);
free_blobs:
    blobs_free(&blobs);
    return status;
}
