// SPDX-License-Identifier: Apache-2.0
//
// self.c - a rank talking to itself: the smallest whole transport, and a good one to read first.
//
// A link is a queue of bytes: what is sent is what is received next. Cost: one copy in, one out.
// At most QUEUE_BYTES wait, so a sender that never receives is told "not now" instead of eating
// memory. Thread: the holder of the engine. The link owns its queue.
#include "net/net.h"

#include <stdio.h>
#include <stdlib.h>

#define QUEUE_BYTES MIB

struct domain {
    int rank;
};

typedef struct self_link {
    net_link_t base;
    buf_t queue;
    size_t at; // bytes of the queue already taken
} self_link_t;

static size_t waiting_bytes(const self_link_t *link)
{
    return link->queue.len - link->at;
}

// --- Link ----------------------------------------------------------------------------------------

static ssize_t self_send(net_link_t *base, const void *data, size_t bytes)
{
    self_link_t *link = (self_link_t *)base;
    size_t n = MIN(bytes, QUEUE_BYTES - link->queue.len);
    if (n > 0 && buf_append(&link->queue, data, n) == NULL) {
        return fail(&base->err, HVD_NO_MEMORY, "no memory for %zu bytes from this rank to itself",
                    n);
    }
    return (ssize_t)n;
}

static ssize_t self_peek(net_link_t *base, const void **data_p)
{
    self_link_t *link = (self_link_t *)base;
    if (waiting_bytes(link) > 0) {
        *data_p = link->queue.data + link->at;
    }
    return (ssize_t)waiting_bytes(link);
}

static void self_consume(net_link_t *base, size_t bytes)
{
    self_link_t *link = (self_link_t *)base;
    link->at += bytes;
    if (waiting_bytes(link) == 0) {
        buf_clear(&link->queue);
        link->at = 0;
    }
}

static ssize_t self_recv(net_link_t *base, void *data, size_t bytes)
{
    self_link_t *link = (self_link_t *)base;
    size_t n = MIN(bytes, waiting_bytes(link));
    if (n > 0) {
        memcpy(data, link->queue.data + link->at, n);
        self_consume(base, n);
    }
    return (ssize_t)n;
}

static void self_link_close(net_link_t *base)
{
    self_link_t *link = (self_link_t *)base;
    buf_free(&link->queue);
    free(link);
}

static const link_ops_t self_ops = {
    .send = self_send,
    .recv = self_recv,
    .peek = self_peek,
    .consume = self_consume,
    .close = self_link_close,
};

// --- Domain --------------------------------------------------------------------------------------

static hvd_status_t self_open(const net_job_t *job, domain_t **domain_p, err_t *err)
{
    domain_t *domain = malloc(sizeof *domain);
    if (domain == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for the transport to this rank itself");
    }
    domain->rank = job->rank;
    *domain_p = domain;
    return HVD_OK;
}

static hvd_status_t self_address(domain_t *domain, buf_t *out, err_t *err)
{
    (void)domain; // nobody else needs to find it
    (void)out;
    (void)err;
    return HVD_OK;
}

static bool self_reaches(domain_t *domain, int peer, char *why, size_t why_bytes)
{
    if (peer != domain->rank) {
        snprintf(why, why_bytes, "another rank");
    }
    return peer == domain->rank;
}

static hvd_status_t self_connect(domain_t *domain, int peer, lane_t lane, net_link_t **link_p,
                                 err_t *err)
{
    self_link_t *link = calloc(1, sizeof *link);
    if (link == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for a link from rank %d to itself",
                    domain->rank);
    }
    link->base = (net_link_t){
        .ops = &self_ops, .transport = transport_self.name, .peer = peer, .lane = lane};
    *link_p = &link->base;
    return HVD_OK;
}

static void self_close(domain_t *domain)
{
    free(domain);
}

const transport_t transport_self = {
    .name = "self",
    .open = self_open,
    .address = self_address,
    .reaches = self_reaches,
    .connect = self_connect,
    .close = self_close,
};
