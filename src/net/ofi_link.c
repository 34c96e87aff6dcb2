// SPDX-License-Identifier: Apache-2.0
//
// ofi_link.c - a byte stream over an endpoint of libfabric.
//
// Bytes are copied into registered buffers, so the memory of tensors never needs to be pinned:
// those to receive in are kept for the life of the link, those to send from while it sends. A
// message may only be sent where the peer has a receive posted for it: that is what credits count.
// A receiver gives credits back with its own messages, or in an empty one when half of them have
// gathered; the last credit is kept for that. The head of what follows at once waits for it, so
// that both are one message.
//
// On a connection messages come in order. Without, all links share an endpoint: a message finds its
// link by its tag, made of the receiver's token (which strangers do not know) and the sender's
// rank, and its place in the order by its number.
//
// Cost: one copy on each side; no system call in the way on RDMA hardware.
// Thread: the holder of the engine.
#define _GNU_SOURCE
#include "net/net.h"

#if __has_include(<rdma/fabric.h>)
#include "net/ofi.h"

#include <stdio.h>
#include <stdlib.h>

#define HEAD_BYTES offsetof(ofi_message_t, payload)
#define QUIET_TICKS 10
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
        link->domain->broken_peer = link->base.peer;
    }
}

// --- Buffers -------------------------------------------------------------------------------------

static void *descriptor_of(const ofi_slab_t *slab)
{
    return slab->mr != NULL ? fi_mr_desc(slab->mr) : NULL;
}

static bool post_receive(ofi_link_t *link, ofi_buffer_t *buffer)
{
    void *descriptor = descriptor_of(link->receives);
    size_t bytes = sizeof *buffer->message;
    long code = link->domain->ep == NULL
                    ? fi_recv(link->ep, buffer->message, bytes, descriptor, 0, buffer)
                    : fi_trecv(link->ep, buffer->message, bytes, descriptor, FI_ADDR_UNSPEC,
                               link->tags[0], 0, buffer);
    if (code != 0) {
        ofi_link_fail(link, ofi_text(link->domain, code));
    }
    return code == 0;
}

ofi_link_t *ofi_link_of(domain_t *d, int peer, err_t *err)
{
    if (d->links[peer] != NULL) {
        return d->links[peer];
    }
    ofi_link_t *link = calloc(1, sizeof *link);
    if (link == NULL) {
        fail(err, HVD_NO_MEMORY, "no memory for a link to rank %d", peer);
        return NULL;
    }
    link->domain = d;
    link->base.ops = &ofi_link_ops;
    link->base.peer = peer;
    link->base.lane = LANE_DATA;
    link->base.transport = transport_ofi.name;
    link->credits = OFI_BUFFERS;
    link->ready_last = &link->ready;
    link->deadline_ns = clock_ns() + (uint64_t)(d->job->config->peer_timeout * (double)NS_PER_S);
    d->links[peer] = link;
    return link;
}

static hvd_status_t post_receives(ofi_link_t *link, err_t *err)
{
    for (int i = 0; i < OFI_BUFFERS; i++) {
        ofi_buffer_t *buffer = &link->buffers[i];
        *buffer = (ofi_buffer_t){
            .link = link, .message = ofi_slab_message(link->receives, i), .receives = true};
        if (!post_receive(link, buffer)) {
            *err = link->base.err;
            return err->status;
        }
    }
    return HVD_OK;
}

hvd_status_t ofi_link_equip(ofi_link_t *link, struct fi_info *info, err_t *err)
{
    domain_t *d = link->domain;
    link->receives = ofi_slab_take(d, err);
    if (link->receives == NULL) {
        return err->status;
    }
    int code = fi_endpoint(d->domain, info, &link->ep, link);
    code = code != 0 ? code : fi_ep_bind(link->ep, &d->eq->fid, 0);
    code = code != 0 ? code : fi_ep_bind(link->ep, &d->cq->fid, FI_TRANSMIT | FI_RECV);
    code = code != 0 ? code : fi_enable(link->ep);
    if (code != 0) {
        return fail(err, HVD_SYSTEM,
                    "cannot create an endpoint to rank %d with the %s provider: %s",
                    link->base.peer, d->provider, ofi_text(d, code));
    }
    return post_receives(link, err);
}

// Tags have as many bits as the provider offers.
static uint64_t tag_of(const domain_t *d, const uint8_t *token, int sender)
{
    uint64_t format = d->info->ep_attr->mem_tag_format, tag;
    memcpy(&tag, token, sizeof tag);
    uint64_t usable = format == 0 ? UINT64_MAX : UINT64_MAX >> __builtin_clzll(format);
    return (tag ^ (uint64_t)sender) & usable;
}

hvd_status_t ofi_link_join(ofi_link_t *link, err_t *err)
{
    domain_t *d = link->domain;
    const ofi_peer_t *peer = &d->peers[link->base.peer];
    link->receives = ofi_slab_take(d, err);
    if (link->receives == NULL) {
        return err->status;
    }
    int n = fi_av_insert(d->av, peer->address, 1, &link->address, 0, NULL);
    if (n != 1) {
        return fail(err, HVD_PEER_LOST, "cannot reach rank %d with the %s provider: %s",
                    link->base.peer, d->provider, n < 0 ? ofi_text(d, n) : "its address is bad");
    }
    link->tags[0] = tag_of(d, d->token, link->base.peer);
    link->tags[1] = tag_of(d, peer->token, d->job->rank);
    link->ep = d->ep;
    link->connected = true;
    return post_receives(link, err);
}

void ofi_link_free(ofi_link_t *link)
{
    if (link->ep != NULL && link->domain->ep == NULL) {
        fi_shutdown(link->ep, 0);
        fi_close(&link->ep->fid);
    }
    ofi_slab_give(link->domain, link->receives);
    ofi_slab_give(link->domain, link->sends);
    link->domain->links[link->base.peer] = NULL;
    free(link);
}

// --- Sending -------------------------------------------------------------------------------------

static void free_send(ofi_link_t *link, ofi_buffer_t *buffer)
{
    buffer->next = link->free_sends;
    link->free_sends = buffer;
}

// A buffer to send from, or NULL: not now.
static ofi_buffer_t *send_buffer(ofi_link_t *link)
{
    err_t err = {0};
    if (link->sends == NULL) {
        link->sends = ofi_slab_take(link->domain, &err);
        if (link->sends == NULL) {
            ofi_link_fail(link, err.text);
            return NULL;
        }
        for (int i = 0; i < OFI_BUFFERS; i++) {
            ofi_buffer_t *buffer = &link->buffers[OFI_BUFFERS + i];
            *buffer = (ofi_buffer_t){.link = link, .message = ofi_slab_message(link->sends, i)};
            free_send(link, buffer);
        }
    }
    return link->free_sends;
}

void ofi_link_tick(ofi_link_t *link)
{
    if (link->sends != NULL && link->n_sending == 0 && link->begun == 0 &&
        ++link->n_quiet_ticks > QUIET_TICKS) {
        ofi_slab_give(link->domain, link->sends);
        link->sends = NULL;
        link->free_sends = NULL;
    }
}

static void set_begun(ofi_link_t *link, size_t bytes)
{
    link->domain->n_begun += (bytes > 0) - (link->begun > 0);
    link->begun = bytes;
}

// Sends the message of a buffer that has been filled. False: not now.
static bool post_send(ofi_link_t *link, ofi_buffer_t *buffer, size_t bytes)
{
    void *descriptor = descriptor_of(link->sends);
    ofi_message_t *message = buffer->message;
    message->bytes = (uint32_t)bytes;
    message->credits = link->owed;
    message->number = link->next_out;
    message->zero = 0;
    bytes += HEAD_BYTES;
    long code = link->domain->ep == NULL ? fi_send(link->ep, message, bytes, descriptor, 0, buffer)
                                         : fi_tsend(link->ep, message, bytes, descriptor,
                                                    link->address, link->tags[1], buffer);
    if (code != 0) {
        if (code != -FI_EAGAIN) {
            ofi_link_fail(link, ofi_text(link->domain, code));
        }
        return false;
    }
    link->free_sends = buffer->next;
    link->n_sending++;
    link->n_quiet_ticks = 0;
    link->next_out++;
    link->owed = 0;
    link->credits--;
    set_begun(link, 0);
    return true;
}

static ssize_t ofi_send(net_link_t *base, const void *data, size_t bytes)
{
    ofi_link_t *link = (ofi_link_t *)base;
    size_t sent = 0;
    if (UNLIKELY(base->err.status != HVD_OK)) {
        return base->err.status;
    }
    ofi_buffer_t *buffer;
    while (link->connected && sent < bytes && link->credits > RESERVED_CREDITS &&
           (buffer = send_buffer(link)) != NULL) {
        size_t n = MIN(bytes - sent, OFI_BUFFER_BYTES - link->begun);
        memcpy(buffer->message->payload + link->begun, (const uint8_t *)data + sent, n);
        bool waits = base->more && link->begun + n < OFI_BUFFER_BYTES;
        if (waits) {
            set_begun(link, link->begun + n);
        } else if (!post_send(link, buffer, link->begun + n)) {
            break;
        }
        sent += n;
    }
    return sent > 0 ? (ssize_t)sent : (ssize_t)base->err.status;
}

static void give_back_credits(ofi_link_t *link)
{
    if (link->owed >= OFI_BUFFERS / 2 && link->credits > 0) {
        ofi_buffer_t *buffer = send_buffer(link);
        if (buffer != NULL) {
            post_send(link, buffer, link->begun);
        }
    }
}

void ofi_link_flush(ofi_link_t *link)
{
    if (link->begun > 0 && !link->ended && link->credits > RESERVED_CREDITS) {
        post_send(link, link->free_sends, link->begun);
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

// In their order.
static void take_message(ofi_link_t *link, ofi_buffer_t *buffer)
{
    const ofi_message_t *message = buffer->message;
    if (link->credits + message->credits > OFI_BUFFERS) {
        ofi_link_fail(link, "it sent a malformed message (more credits than buffers)");
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

static void sort_message(ofi_link_t *link, ofi_buffer_t *buffer, size_t bytes)
{
    const ofi_message_t *message = buffer->message;
    bool is_whole = bytes >= HEAD_BYTES && message->bytes == bytes - HEAD_BYTES;
    ofi_buffer_t **place = &link->early[is_whole ? message->number % OFI_BUFFERS : 0];
    if (!is_whole || message->number - link->next_in >= OFI_BUFFERS || *place != NULL) {
        ofi_link_fail(link, "it sent a malformed message (wrong length or number)");
        return;
    }
    *place = buffer;
    while (*(place = &link->early[link->next_in % OFI_BUFFERS]) != NULL && !link->ended) {
        buffer = *place;
        *place = NULL;
        link->next_in++;
        take_message(link, buffer);
    }
}

static void complete(ofi_buffer_t *buffer, size_t bytes)
{
    ofi_link_t *link = buffer->link;
    if (buffer->receives) {
        sort_message(link, buffer, bytes);
    } else {
        free_send(link, buffer);
        link->n_sending--;
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
