// SPDX-License-Identifier: Apache-2.0
//
// ofi_link.c - a byte stream over a connected endpoint of libfabric.
//
// Bytes are copied into registered buffers that both sides keep for the life of the link, so the
// memory of tensors never needs to be pinned. A message may only be sent where the peer has a
// receive posted for it: that is what credits count. A receiver gives credits back with its own
// messages, or in an empty one when half of them have gathered; the last credit is kept for that.
//
// Cost: one copy on each side; no system call in the way on RDMA hardware.
// Thread: the holder of the engine.
#define _GNU_SOURCE
#include "net/net.h"

#if __has_include(<rdma/fabric.h>)
#include "net/ofi.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>

#define HEAD_BYTES offsetof(ofi_message_t, payload)
#define RESERVED_CREDITS 1 // for a message that only gives credits back

// --- The end -------------------------------------------------------------------------------------

void ofi_link_fail(ofi_link_t *link, const char *why)
{
    if (link->base.err.status == HVD_OK) {
        fail(&link->base.err, HVD_PEER_LOST, "lost the connection to rank %d over ofi (%s): %s",
             link->base.peer, link->domain->provider, why);
    }
    link->ended = true;
    if (link->domain->broken.status == HVD_OK) {
        link->domain->broken = link->base.err;
    }
}

// --- Buffers -------------------------------------------------------------------------------------

static hvd_status_t fail_registration(const ofi_link_t *link, long code, err_t *err)
{
    struct rlimit limit = {0};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    return fail(err, HVD_SYSTEM,
                "cannot register %zu KiB of memory with the %s provider: %s; this process may lock "
                "%llu KiB: raise it (ulimit -l unlimited; in a container --ulimit memlock=-1 or "
                "the capability IPC_LOCK)",
                sizeof *link->messages * 2 * OFI_BUFFERS / KIB, link->domain->provider,
                ofi_text(link->domain, code), (unsigned long long)limit.rlim_cur / KIB);
}

static hvd_status_t register_memory(ofi_link_t *link, err_t *err)
{
    domain_t *d = link->domain;
    size_t bytes = sizeof *link->messages * 2 * OFI_BUFFERS;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return fail(err, HVD_NO_MEMORY, "no memory for the buffers to rank %d", link->base.peer);
    }
    madvise(memory, bytes, MADV_DONTFORK); // a child must not share pages a device writes to
    link->messages = memory;
    if (d->info->domain_attr->mr_mode & FI_MR_LOCAL) {
        int code = fi_mr_reg(d->domain, memory, bytes, FI_SEND | FI_RECV, 0, 0, 0, &link->mr, NULL);
        if (code != 0) {
            return fail_registration(link, code, err);
        }
    }
    return HVD_OK;
}

static bool post_receive(ofi_link_t *link, ofi_buffer_t *buffer)
{
    void *descriptor = link->mr != NULL ? fi_mr_desc(link->mr) : NULL;
    long code = fi_recv(link->ep, buffer->message, sizeof *buffer->message, descriptor, 0, buffer);
    if (code != 0) {
        ofi_link_fail(link, ofi_text(link->domain, code));
    }
    return code == 0;
}

ofi_link_t *ofi_link_new(domain_t *domain, int peer, err_t *err)
{
    ofi_link_t *link = calloc(1, sizeof *link);
    if (link == NULL) {
        fail(err, HVD_NO_MEMORY, "no memory for a link to rank %d", peer);
        return NULL;
    }
    link->domain = domain;
    link->base.peer = peer;
    link->base.lane = LANE_DATA;
    link->base.transport = transport_ofi.name;
    link->credits = OFI_BUFFERS;
    link->ready_last = &link->ready;
    return link;
}

hvd_status_t ofi_link_equip(ofi_link_t *link, struct fi_info *info, err_t *err)
{
    domain_t *d = link->domain;
    hvd_status_t status = register_memory(link, err);
    if (status != HVD_OK) {
        return status;
    }
    int code = fi_endpoint(d->domain, info, &link->ep, link);
    code = code != 0 ? code : fi_ep_bind(link->ep, &d->eq->fid, 0);
    code = code != 0 ? code : fi_ep_bind(link->ep, &d->cq->fid, FI_TRANSMIT | FI_RECV);
    code = code != 0 ? code : fi_enable(link->ep);
    if (code != 0) {
        return fail(err, HVD_SYSTEM, "cannot make an endpoint to rank %d with the %s provider: %s",
                    link->base.peer, d->provider, ofi_text(d, code));
    }
    for (int i = 0; i < 2 * OFI_BUFFERS; i++) {
        ofi_buffer_t *buffer = &link->buffers[i];
        *buffer = (ofi_buffer_t){
            .link = link, .message = &link->messages[i], .receives = i < OFI_BUFFERS};
        if (!buffer->receives) {
            buffer->next = link->free_sends;
            link->free_sends = buffer;
        } else if (!post_receive(link, buffer)) {
            *err = link->base.err;
            return err->status;
        }
    }
    return HVD_OK;
}

void ofi_link_free(ofi_link_t *link)
{
    if (link->ep != NULL) {
        fi_shutdown(link->ep, 0);
        fi_close(&link->ep->fid);
    }
    if (link->mr != NULL) {
        fi_close(&link->mr->fid);
    }
    if (link->messages != NULL) {
        munmap(link->messages, sizeof *link->messages * 2 * OFI_BUFFERS);
    }
    link->domain->links[link->base.peer] = NULL;
    free(link);
}

// --- Sending -------------------------------------------------------------------------------------

// Sends the message of a buffer that has been filled. False: not now.
static bool post_send(ofi_link_t *link, ofi_buffer_t *buffer, size_t bytes)
{
    void *descriptor = link->mr != NULL ? fi_mr_desc(link->mr) : NULL;
    buffer->message->bytes = (uint32_t)bytes;
    buffer->message->credits = link->owed;
    long code = fi_send(link->ep, buffer->message, HEAD_BYTES + bytes, descriptor, 0, buffer);
    if (code != 0) {
        if (code != -FI_EAGAIN) {
            ofi_link_fail(link, ofi_text(link->domain, code));
        }
        return false;
    }
    link->free_sends = buffer->next;
    link->owed = 0;
    link->credits--;
    return true;
}

static ssize_t ofi_send(net_link_t *base, const void *data, size_t bytes)
{
    ofi_link_t *link = (ofi_link_t *)base;
    size_t sent = 0;
    if (UNLIKELY(base->err.status != HVD_OK)) {
        return base->err.status;
    }
    while (link->connected && sent < bytes && link->credits > RESERVED_CREDITS &&
           link->free_sends != NULL) {
        ofi_buffer_t *buffer = link->free_sends;
        size_t n = MIN(bytes - sent, OFI_BUFFER_BYTES);
        memcpy(buffer->message->payload, (const uint8_t *)data + sent, n);
        if (!post_send(link, buffer, n)) {
            break;
        }
        sent += n;
    }
    return sent > 0 ? (ssize_t)sent : (ssize_t)base->err.status;
}

static void give_back_credits(ofi_link_t *link)
{
    if (link->owed >= OFI_BUFFERS / 2 && link->credits > 0 && link->free_sends != NULL) {
        post_send(link, link->free_sends, 0);
    }
}

// --- Receiving -----------------------------------------------------------------------------------

static ssize_t ofi_peek(net_link_t *base, const void **data_p)
{
    ofi_link_t *link = (ofi_link_t *)base;
    if (link->ready == NULL) {
        return link->ended ? (ssize_t)base->err.status : 0;
    }
    *data_p = link->ready->message->payload + link->ready_at;
    return (ssize_t)(link->ready->message->bytes - link->ready_at);
}

static void ofi_consume(net_link_t *base, size_t bytes)
{
    ofi_link_t *link = (ofi_link_t *)base;
    ofi_buffer_t *buffer = link->ready;
    link->ready_at += bytes;
    if (link->ready_at < buffer->message->bytes) {
        return;
    }
    link->ready = buffer->next;
    link->ready_at = 0;
    if (link->ready == NULL) {
        link->ready_last = &link->ready;
    }
    if (!link->ended && post_receive(link, buffer)) {
        link->owed++;
        give_back_credits(link);
    }
}

static ssize_t ofi_recv(net_link_t *base, void *data, size_t bytes)
{
    size_t got = 0;
    const void *from = NULL;
    ssize_t n = 0;
    while (got < bytes && (n = ofi_peek(base, &from)) > 0) {
        size_t part = MIN((size_t)n, bytes - got);
        memcpy((uint8_t *)data + got, from, part);
        ofi_consume(base, part);
        got += part;
    }
    return got > 0 ? (ssize_t)got : n;
}

static void ofi_link_close(net_link_t *base)
{
    ((ofi_link_t *)base)->is_open = false; // the domain closes endpoints, when the job is over
}

// --- Completions ---------------------------------------------------------------------------------

static void take_message(ofi_link_t *link, ofi_buffer_t *buffer, size_t bytes)
{
    const ofi_message_t *message = buffer->message;
    if (bytes < HEAD_BYTES || message->bytes != bytes - HEAD_BYTES ||
        link->credits + message->credits > OFI_BUFFERS) {
        ofi_link_fail(link, "it sent a message that cannot be");
        return;
    }
    link->credits += message->credits;
    if (message->bytes == 0) { // only credits; its buffer is free at once
        if (post_receive(link, buffer)) {
            link->owed++;
        }
        return;
    }
    buffer->next = NULL;
    *link->ready_last = buffer;
    link->ready_last = &buffer->next;
}

static void complete(ofi_buffer_t *buffer, size_t bytes)
{
    ofi_link_t *link = buffer->link;
    if (buffer->receives) {
        take_message(link, buffer, bytes);
    } else {
        buffer->next = link->free_sends;
        link->free_sends = buffer;
    }
    if (link->connected && !link->ended) {
        give_back_credits(link);
    }
}

static void complete_badly(domain_t *d)
{
    struct fi_cq_err_entry entry = {0};
    if (fi_cq_readerr(d->cq, &entry, 0) != 1 || entry.op_context == NULL) {
        return;
    }
    ofi_link_t *link = ((ofi_buffer_t *)entry.op_context)->link;
    if (entry.err != FI_ECANCELED || link->connected) {
        ofi_link_fail(link, ofi_text(d, entry.err));
    }
}

int ofi_link_completions(domain_t *d)
{
    struct fi_cq_msg_entry entries[OFI_BUFFERS];
    int n_all = 0;
    for (;;) {
        ssize_t n = fi_cq_read(d->cq, entries, OFI_BUFFERS);
        if (n == -FI_EAVAIL) {
            complete_badly(d);
            n_all++;
            continue;
        }
        for (ssize_t i = 0; i < n; i++) {
            complete(entries[i].op_context, entries[i].len);
        }
        n_all += n > 0 ? (int)n : 0;
        if (n < OFI_BUFFERS) {
            return n_all;
        }
    }
}

const link_ops_t ofi_link_ops = {
    .send = ofi_send,
    .recv = ofi_recv,
    .peek = ofi_peek,
    .consume = ofi_consume,
    .close = ofi_link_close,
};

#endif
