// SPDX-License-Identifier: Apache-2.0
//
// tcp.h - the parts of the TCP transport, for each other.
//
//   tcp_addr.c  which interfaces there are, what a rank tells others, which address to try first
//   tcp_conn.c  one socket, from connect through the greeting (wire/door.h) to ready
//   tcp_dial.c  finding the one address of a peer that works
//   tcp_link.c  the link: movers over a ready connection, and what its end means
//   tcp_probe.c noticing that the network is cut
//   tcp.c       the domain: the event loop, who may come in, the table
//
// For a pair of ranks the lower one connects and the higher one accepts, once for each lane, so
// there is never more than one connection to choose from. Nothing here blocks.
// Thread: the holder of the engine.
#ifndef HVD_NET_TCP_H
#define HVD_NET_TCP_H

#include "net/net.h"
#include "net/tcp_addr.h"
#include "wire/codec.h"
#include "wire/door.h"

#include <net/if.h>
#include <sys/socket.h>

#define TCP_TOKEN_BYTES 8
#define TCP_TICK_NS (50 * NS_PER_MS)
#define TCP_HELD_BYTES 32 // a header

typedef struct conn conn_t;
typedef struct dial dial_t;
typedef struct tcp_link tcp_link_t;

// --- Addresses (tcp_addr.c) ----------------------------------------------------------------------

// What a rank tells all others.
typedef struct tcp_offer {
    int encrypt;                    // its HOROVOD_ENCRYPT
    uint8_t token[TCP_TOKEN_BYTES]; // of this process: a stale or wrong address is noticed at once
    int n_addrs;
    tcp_addr_t addrs[TCP_MAX_ADDRS];
} tcp_offer_t;

socklen_t tcp_addr_to_socket(const tcp_addr_t *addr, struct sockaddr_storage *out);
tcp_addr_t tcp_addr_of_socket(const struct sockaddr_storage *in);
void tcp_offer_encode(const tcp_offer_t *offer, buf_t *out);
hvd_status_t tcp_offer_decode(const uint8_t *data, size_t bytes, int rank, tcp_offer_t *offer_p,
                              err_t *err);
// Most promising first: loopback on the same host, then subnets this rank is in, then the rest, and
// loopback of another host last.
void tcp_sort_addrs(tcp_addr_t *addrs, int n, const tcp_iface_t *ifaces, int n_ifaces,
                    bool same_host);

// --- A connection (tcp_conn.c) -------------------------------------------------------------------

typedef enum watch_kind { WATCH_TIMER, WATCH_DOOR, WATCH_CONN } watch_kind_t;

// First member of everything that epoll points to.
typedef struct watch {
    watch_kind_t kind;
    int fd;
} watch_t;

typedef enum conn_state { CONN_CONNECTING, CONN_GREETING, CONN_READY, CONN_CLOSED } conn_state_t;

struct conn {
    watch_t watch;
    domain_t *domain;
    conn_state_t state;
    // What epoll said last. A mover with its flag down returns without a system call.
    bool readable, writable;
    bool hangup;      // the peer's end is on its way: read until it shows
    secure_t *secure; // NULL: plain, or not ready
    hello_t hello;
    greeting_t greeting; // dialled, until it is ready
    tcp_addr_t remote;
    uint64_t n_acked_bytes, acked_ns; // as tcp_probe saw it grow last
    uint64_t heard_ns;                // likewise, packets that came, also such as came before
    uint32_t n_segments;
    int knock_fd; // -1: not; tcp_probe.c
    uint64_t started_ns;
    tcp_link_t *link; // whom it is for; NULL: accepted and not claimed yet
    int address;      // dialled: index of the address
    conn_t *next;     // closed: the domain's graveyard
};

// Begins to connect for a link. NULL with err set if that fails at once.
conn_t *conn_dial(tcp_link_t *link, const tcp_addr_t *addr, const uint8_t token[TCP_TOKEN_BYTES],
                  err_t *err);
// Takes a guest's descriptor and secure_t over, also when it fails.
conn_t *conn_accepted(domain_t *domain, const guest_t *guest, err_t *err);
// What epoll said of it. True if that was news.
bool conn_event(conn_t *conn, uint32_t events);
// The memory goes at the end of the next tcp_progress, for events of it may be under way.
void conn_close(conn_t *conn);

// --- Dialling (tcp_dial.c) -----------------------------------------------------------------------

hvd_status_t dial_new(tcp_link_t *link, err_t *err);
void dial_tick(tcp_link_t *link, uint64_t now_ns);
void dial_failed(conn_t *conn, const err_t *err); // one attempt; closes it
void dial_won(conn_t *conn);                      // one attempt; closes the others
void dial_free(tcp_link_t *link);                 // and all attempts; safe when there is none
// "10.0.0.2:4711: connection refused; ..." of every address.
void dial_explain(const tcp_link_t *link, char *text, size_t bytes);

// --- A link (tcp_link.c) -------------------------------------------------------------------------

struct tcp_link {
    net_link_t base;
    domain_t *domain;
    conn_t *conn;            // NULL until ready
    bool ended;              // everything received has been read, and no more will come
    uint64_t asked_in;       // the last round in which it was asked for data
    dial_t *dial;            // while this side connects
    uint64_t deadline_ns;    // of becoming ready, if it has one
    tcp_link_t *prev, *next; // the domain's list of links with such a deadline
    uint8_t *stage;          // received, to be peeked at
    size_t stage_at, stage_len;
    uint8_t held[TCP_HELD_BYTES]; // plain, not sent yet: it leaves with what follows
    size_t n_held;
    wire_mangle_fn mangle; // for tests; else NULL
    void *mangle_arg;
};

hvd_status_t tcp_link_new(domain_t *domain, int peer, lane_t lane, tcp_link_t **link_p, err_t *err);
void tcp_link_ready(tcp_link_t *link, conn_t *conn);
void tcp_link_cut(tcp_link_t *link, const err_t *err); // it was ready, and is lost
// Not reached in time, or never will be.
void tcp_link_fail(tcp_link_t *link, const err_t *err);
void tcp_link_tick(tcp_link_t *link, uint64_t now_ns);
void tcp_link_event(tcp_link_t *link); // its connection's flags have changed

// --- Cut networks (tcp_probe.c) ------------------------------------------------------------------

void tcp_probe(domain_t *domain, uint64_t now_ns); // cheap when called too often
void tcp_stop_knocking(conn_t *conn);

// --- The domain (tcp.c) --------------------------------------------------------------------------

// The place of one (peer, lane).
typedef struct seat {
    tcp_link_t *link;
    conn_t *kept; // ready before its link was asked for
} seat_t;

struct domain {
    const net_job_t *job;
    uint8_t token[TCP_TOKEN_BYTES];
    int epoll;
    watch_t timer;
    bool timer_runs;
    door_t *door;
    watch_t door_watch;
    tcp_iface_t ifaces[TCP_MAX_ADDRS]; // where it listens
    int n_ifaces;
    // Of this round; see tcp_progress.
    bool direct; // movers ask their sockets although epoll has said nothing
    uint64_t round;
    int n_asked; // links that were asked for data
    bool waits;  // somebody cannot send
    unsigned n_rounds;
    uint8_t *offers;  // everyone's bytes, one after the other
    size_t *offer_at; // [rank], and the end; equal neighbours: the rank has none
    seat_t *seats;    // [rank * N_LANES + lane]
    conn_t *graveyard;
    tcp_link_t *opening; // links that must become ready in time
    uint64_t next_probe_ns;
    // The first link of a lane that ended by itself: why, and to whom it was.
    err_t broken[N_LANES];
    int broken_peers[N_LANES];
};

uint64_t tcp_peer_timeout_ns(const domain_t *domain);
bool tcp_same_host(const domain_t *domain, int rank);
bool tcp_encrypts(const domain_t *domain, int peer, lane_t lane);
hvd_status_t tcp_offer_of(const domain_t *domain, int rank, tcp_offer_t *offer_p, err_t *err);
hvd_status_t tcp_watch(domain_t *domain, watch_t *watch, uint32_t events, err_t *err);
void tcp_unwatch(domain_t *domain, watch_t *watch); // closes the descriptor too
void tcp_opening_add(tcp_link_t *link);
void tcp_opening_remove(tcp_link_t *link); // safe when it is not there
void tcp_seat_free(tcp_link_t *link);
void tcp_set_options(const domain_t *domain, int fd);

#endif
