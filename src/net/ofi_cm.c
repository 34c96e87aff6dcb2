// SPDX-License-Identifier: Apache-2.0
//
// ofi_cm.c - connected endpoints of libfabric: calling, answering, and what becomes of the calls.
//
// Of two ranks the lower one calls and shows the token of the other, which it has from the
// encrypted rendezvous; the answer holds the token of the caller. So both have proved that they
// belong to the job before a byte of a tensor passes. A call that shows anything else is refused.
//
// Thread: the holder of the engine. Endpoints belong to links, which the domain owns.
#define _GNU_SOURCE
#include "net/net.h"

#if __has_include(<rdma/fabric.h>)
#include "net/ofi.h"

#include <stdlib.h>

// What both ends of a connection show each other.
typedef struct ofi_call {
    uint8_t token[OFI_TOKEN_BYTES]; // of the one it is shown to
    uint32_t rank;                  // of the one who shows it
} ofi_call_t;

// --- Connecting ----------------------------------------------------------------------------------

int ofi_cm_open(domain_t *d)
{
    struct fi_eq_attr eq = {.wait_obj = FI_WAIT_FD};
    int code = fi_eq_open(d->fabric, &eq, &d->eq, NULL);
    code = code != 0 ? code : fi_passive_ep(d->fabric, d->info, &d->pep, NULL);
    code = code != 0 ? code : fi_pep_bind(d->pep, &d->eq->fid, 0);
    return code != 0 ? code : fi_listen(d->pep);
}

static ofi_call_t call_for(const domain_t *d, int peer)
{
    ofi_call_t call = {.rank = (uint32_t)d->job->rank};
    memcpy(call.token, d->peers[peer].token, OFI_TOKEN_BYTES);
    return call;
}

// Was this shown by rank `from`, to us?
static bool call_is_ours(const domain_t *d, const ofi_call_t *call, size_t bytes)
{
    volatile uint8_t differs = 0; // every byte is looked at
    if (bytes < sizeof *call) {
        return false;
    }
    for (int i = 0; i < OFI_TOKEN_BYTES; i++) {
        differs |= (uint8_t)(call->token[i] ^ d->token[i]);
    }
    return differs == 0 && call->rank < (uint32_t)d->job->size;
}

hvd_status_t ofi_cm_call(ofi_link_t *link, err_t *err)
{
    domain_t *d = link->domain;
    const ofi_peer_t *peer = &d->peers[link->base.peer];
    struct fi_info *info = d->lib.dupinfo(d->info);
    void *address = malloc(peer->address_bytes);
    if (info == NULL || address == NULL) {
        free(address);
        return fail(err, HVD_NO_MEMORY, "no memory to connect to rank %d", link->base.peer);
    }
    memcpy(address, peer->address, peer->address_bytes);
    free(info->dest_addr);
    info->dest_addr = address; // freed with info
    info->dest_addrlen = peer->address_bytes;
    hvd_status_t status = ofi_link_equip(link, info, err);
    if (status == HVD_OK) {
        ofi_call_t call = call_for(d, link->base.peer);
        int code = fi_connect(link->ep, peer->address, &call, sizeof call);
        if (code != 0) {
            status = fail(err, HVD_PEER_LOST, "cannot call rank %d over %s: %s", link->base.peer,
                          d->provider, ofi_text(d, code));
        }
    }
    d->lib.freeinfo(info);
    return status;
}

// --- Events of connections -----------------------------------------------------------------------

// The entry ends in the caller's bytes; some providers hand over more than was sent.
typedef union cm_event {
    struct fi_eq_cm_entry entry;
    uint8_t room[sizeof(struct fi_eq_cm_entry) + sizeof(ofi_call_t) + 64];
} cm_event_t;

static void answer_call(domain_t *d, cm_event_t *event, size_t bytes)
{
    err_t err;
    ofi_call_t answer;
    const ofi_call_t *call = (const ofi_call_t *)event->entry.data;
    ofi_link_t *link = NULL;
    if (call_is_ours(d, call, bytes) && (int)call->rank < d->job->rank &&
        d->peers[call->rank].is_there) {
        link = ofi_link_of(d, (int)call->rank, &err);
    }
    if (link == NULL || link->ep != NULL) { // a stranger, or one who calls twice
        fi_reject(d->pep, event->entry.info->handle, NULL, 0);
    } else if (ofi_link_equip(link, event->entry.info, &err) != HVD_OK) {
        ofi_link_fail(link, err.text);
    } else {
        answer = call_for(d, link->base.peer);
        int code = fi_accept(link->ep, &answer, sizeof answer);
        if (code != 0) {
            ofi_link_fail(link, ofi_text(d, code));
        }
    }
    d->lib.freeinfo(event->entry.info);
}

static void note_connected(domain_t *d, const cm_event_t *event, size_t bytes)
{
    ofi_link_t *link = event->entry.fid->context;
    bool called = d->job->rank < link->base.peer;
    const ofi_call_t *answer = (const ofi_call_t *)event->entry.data;
    // The one who was called has seen the caller's token already.
    if (called && (!call_is_ours(d, answer, bytes) || (int)answer->rank != link->base.peer)) {
        ofi_link_fail(link, "the process that answered does not belong to the job");
        return;
    }
    link->connected = true;
}

static void take_error(domain_t *d)
{
    struct fi_eq_err_entry entry = {0};
    if (fi_eq_readerr(d->eq, &entry, 0) > 0 && entry.fid != NULL && entry.fid != &d->pep->fid) {
        ofi_link_fail(entry.fid->context, ofi_text(d, entry.err));
    }
}

int ofi_cm_events(domain_t *d)
{
    int n_events = 0;
    for (;; n_events++) {
        cm_event_t event;
        uint32_t kind;
        ssize_t n = fi_eq_read(d->eq, &kind, &event, sizeof event, 0);
        if (n == -FI_EAVAIL) {
            take_error(d);
            continue;
        }
        if (n < 0) {
            return n_events;
        }
        size_t bytes = (size_t)n - MIN((size_t)n, sizeof event.entry);
        if (kind == FI_CONNREQ) {
            answer_call(d, &event, bytes);
        } else if (kind == FI_CONNECTED) {
            note_connected(d, &event, bytes);
        } else if (kind == FI_SHUTDOWN) {
            ofi_link_completions(d); // what it sent before comes first
            ofi_link_fail(event.entry.fid->context, "its process ended");
        }
    }
}

#endif
