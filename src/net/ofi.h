// SPDX-License-Identifier: Apache-2.0
//
// ofi.h - what the two files of the libfabric transport share.
//
//   ofi.c       the library, the provider, listening and connecting
//   ofi_link.c  a byte stream over a connected endpoint: buffers, credits, completions
//
// libfabric is found at run time; where its headers were absent at build time the transport says so
// and is left out. Threads: the holder of the engine.
#ifndef HVD_NET_OFI_H
#define HVD_NET_OFI_H

#include "net/net.h"

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>

#define OFI_TOKEN_BYTES 16
#define OFI_BUFFERS 16 // in each direction of a link
#define OFI_BUFFER_BYTES ((size_t)64 * 1024)

// One message: its number of payload bytes and the receive buffers given back, then the payload.
typedef struct ofi_message {
    uint32_t bytes;
    uint32_t credits;
    uint8_t payload[OFI_BUFFER_BYTES];
} ofi_message_t;

typedef struct ofi_link ofi_link_t;

typedef struct ofi_buffer {
    struct fi_context context; // first: completions bring its address
    ofi_link_t *link;
    ofi_message_t *message;
    bool receives;
    struct ofi_buffer *next;
} ofi_buffer_t;

struct ofi_link {
    net_link_t base;
    domain_t *domain;
    struct fid_ep *ep; // NULL: the peer has not called yet
    struct fid_mr *mr;
    ofi_message_t *messages; // the registered memory: receive buffers first
    ofi_buffer_t buffers[2 * OFI_BUFFERS];
    ofi_buffer_t *free_sends;
    ofi_buffer_t *ready, **ready_last; // received, oldest first
    size_t ready_at;                   // consumed of the oldest
    unsigned credits;                  // receive buffers the peer has for us
    unsigned owed;                     // ours that it does not know to be free again
    bool connected;
    bool ended; // the peer is gone: what is ready may still be read
    bool is_open; // handed out by connect()
    uint64_t deadline_ns; // to be connected by
};

// The functions of libfabric that are not inline.
typedef struct ofi_library {
    void *handle;
    int (*getinfo)(uint32_t version, const char *node, const char *service, uint64_t flags,
                   const struct fi_info *hints, struct fi_info **info);
    void (*freeinfo)(struct fi_info *info);
    struct fi_info *(*dupinfo)(const struct fi_info *info);
    int (*fabric)(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context);
    const char *(*strerror)(int code);
} ofi_library_t;

// What a rank tells the others, through the encrypted rendezvous. The token proves to both ends of
// a connection that the other belongs to the job.
typedef struct ofi_peer {
    bool is_there;
    uint8_t token[OFI_TOKEN_BYTES];
    uint8_t address[128];
    size_t address_bytes;
} ofi_peer_t;

struct domain {
    const net_job_t *job;
    ofi_library_t lib;
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_eq *eq;
    struct fid_cq *cq;
    struct fid_pep *pep;
    int epoll;
    char provider[32];
    uint8_t token[OFI_TOKEN_BYTES];
    ofi_peer_t *peers;
    ofi_link_t **links; // by rank
    uint64_t next_tick_ns;
    err_t broken;
};

// "No such device" for a code of libfabric, which may be negative.
const char *ofi_text(const domain_t *domain, long code);

// --- ofi_link.c ----------------------------------------------------------------------------------

ofi_link_t *ofi_link_new(domain_t *domain, int peer, err_t *err);
// Gives the link an endpoint made from `info`, with its receives posted.
hvd_status_t ofi_link_equip(ofi_link_t *link, struct fi_info *info, err_t *err);
void ofi_link_fail(ofi_link_t *link, const char *why);
int ofi_link_completions(domain_t *domain); // how many there were
void ofi_link_free(ofi_link_t *link);

#endif
