// SPDX-License-Identifier: Apache-2.0
//
// ofi.h - what the files of the libfabric transport share.
//
//   ofi.c         the library, the provider, opening, addresses
//   ofi_cm.c      connected endpoints (FI_EP_MSG): calling and answering
//   ofi_link.c    a byte stream to one peer: buffers, credits, completions
//   ofi_memory.c  registered memory, kept for the next who needs it
//
// Providers without connections (shm, efa) have one endpoint for all peers (FI_EP_RDM); messages
// then find their link by tag. libfabric is found at run time; where its headers were absent at
// build time the transport says so and is left out. Threads: the holder of the engine.
#ifndef HVD_NET_OFI_H
#define HVD_NET_OFI_H

#include "net/net.h"

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_tagged.h>

#define OFI_TOKEN_BYTES 16
#define OFI_BUFFERS 4 // in each direction of a link: with more, what is sent leaves the caches
#define OFI_BUFFER_BYTES ((size_t)256 * 1024)

// One message: its number of payload bytes, the receive buffers given back, its place in the order
// of messages (without connections they may complete in another), then the payload.
typedef struct ofi_message {
    uint32_t bytes;
    uint32_t credits;
    uint32_t number;
    uint32_t zero; // keeps the payload aligned
    uint8_t payload[OFI_BUFFER_BYTES];
} ofi_message_t;

typedef struct ofi_link ofi_link_t;

// Registered memory for the buffers of one direction of a link.
typedef struct ofi_slab {
    struct ofi_slab *next;
    uint8_t *memory;   // pages
    struct fid_mr *mr; // NULL: the provider needs none
} ofi_slab_t;

// Payloads begin at cache lines, and in the middle of pages. What is sent the kernel copies to the
// beginning of pages of its own, by an instruction (rep movsb) that many processors run twenty
// times slower when it writes a few bytes further into a page than it reads.
#define OFI_PAGE_BYTES ((size_t)4096)
#define OFI_LEAD_BYTES (OFI_PAGE_BYTES / 2 - offsetof(ofi_message_t, payload))
#define OFI_STRIDE_BYTES                                                                           \
    ((sizeof(ofi_message_t) + OFI_PAGE_BYTES - 1) / OFI_PAGE_BYTES * OFI_PAGE_BYTES)
#define OFI_SLAB_BYTES (OFI_LEAD_BYTES + OFI_BUFFERS * OFI_STRIDE_BYTES)

typedef struct ofi_buffer {
    struct fi_context2 context; // first: completions bring its address
    ofi_link_t *link;
    ofi_message_t *message;
    bool receives;
    struct ofi_buffer *next;
} ofi_buffer_t;

struct ofi_link {
    net_link_t base;
    domain_t *domain;
    struct fid_ep *ep; // NULL: the peer has not called yet; the domain's if that has one
    fi_addr_t address; // of the peer, and
    uint64_t tags[2];  // of what is received and sent: only where the domain has an endpoint
    ofi_slab_t *receives;
    ofi_slab_t *sends;                     // NULL while nothing is sent for a while
    ofi_buffer_t buffers[2 * OFI_BUFFERS]; // receive buffers first
    ofi_buffer_t *free_sends;
    size_t begun; // bytes in the first of these that wait for what follows them
    int n_sending;
    int n_quiet_ticks;                 // since something was sent
    ofi_buffer_t *early[OFI_BUFFERS];  // came before one with a lower number; by number
    ofi_buffer_t *ready, **ready_last; // received, oldest first
    size_t ready_at;                   // consumed of the oldest
    uint32_t next_in, next_out;        // numbers
    unsigned credits;                  // receive buffers the peer has for us
    unsigned owed;                     // ours that it does not know to be free again
    bool connected;
    bool ended;           // the peer is gone: what is ready may still be read
    bool is_open;         // handed out by connect()
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

// What we know of a provider.
typedef struct ofi_kind {
    const char *name;
    bool is_rdma;     // taken without being named
    bool has_no_ip;   // its addresses are not those of the network
    bool is_one_host; // reaches no other
} ofi_kind_t;

// What a rank tells the others, through the encrypted rendezvous. The token proves to both ends of
// a connection that the other belongs to the job; without connections the tags are made of it.
typedef struct ofi_peer {
    bool is_there;
    uint8_t token[OFI_TOKEN_BYTES];
    uint8_t address[255];
    size_t address_bytes;
} ofi_peer_t;

struct domain {
    const net_job_t *job;
    ofi_library_t lib;
    const ofi_kind_t *kind;
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_cq *cq;
    struct fid_eq *eq;   // with connections: events of them, and
    struct fid_pep *pep; // where we listen
    struct fid_av *av;   // without: addresses of peers, and
    struct fid_ep *ep;   // the endpoint of all links
    int epoll;           // -1: the provider must be asked again and again
    char provider[32];
    uint8_t token[OFI_TOKEN_BYTES];
    ofi_peer_t *peers;
    ofi_link_t **links; // by rank
    ofi_slab_t *spare;  // last given back first
    size_t spare_bytes;
    size_t registered_bytes; // of all slabs
    int n_begun;             // links with a message that waits for more
    unsigned n_idle;         // rounds without a completion
    uint64_t next_tick_ns;
    err_t broken;
    int broken_peer;
};

// "No such device" for a code of libfabric, which may be negative.
const char *ofi_text(const domain_t *domain, long code);

// --- ofi_cm.c ------------------------------------------------------------------------------------

int ofi_cm_open(domain_t *domain); // 0, or a code of libfabric
// Calls the peer of a link; the answer comes as an event.
hvd_status_t ofi_cm_call(ofi_link_t *link, err_t *err);
int ofi_cm_events(domain_t *domain); // how many there were

// --- ofi_link.c ----------------------------------------------------------------------------------

extern const link_ops_t ofi_link_ops;

// The link to a rank, made at first use.
ofi_link_t *ofi_link_of(domain_t *domain, int peer, err_t *err);
// Gives the link an endpoint made from `info`, with its receives posted.
hvd_status_t ofi_link_equip(ofi_link_t *link, struct fi_info *info, err_t *err);
// Gives it the endpoint of the domain: it is connected at once.
hvd_status_t ofi_link_join(ofi_link_t *link, err_t *err);
void ofi_link_fail(ofi_link_t *link, const char *why);
int ofi_link_completions(domain_t *domain); // how many there were
// Now and then: gives buffers back that have not been used for a while.
void ofi_link_tick(ofi_link_t *link);
// Sends what has waited in vain for more.
void ofi_link_flush(ofi_link_t *link);
void ofi_link_free(ofi_link_t *link);

// --- ofi_memory.c --------------------------------------------------------------------------------

ofi_slab_t *ofi_slab_take(domain_t *domain, err_t *err); // NULL: err says why
void ofi_slab_give(domain_t *domain, ofi_slab_t *slab);  // NULL will do
// Where the i-th message of a slab lies.
ofi_message_t *ofi_slab_message(const ofi_slab_t *slab, int i);
void ofi_slabs_free(domain_t *domain); // the spare ones

#endif
