// SPDX-License-Identifier: Apache-2.0
//
// net.h - moving bytes between ranks.
//
// A transport is a table of functions (transport_t) and a row in net.c, in order of preference.
// A link is an ordered, reliable, non-blocking byte stream to one peer on one lane. Nothing here
// blocks after net_open, except net_sleep.
//
// Lanes: LANE_CONTROL carries frames of the agreement along the tree; LANE_DATA carries tensors
// as plans say. Both sides know from the plan what comes next, so data needs no matching.
//
// Threads: the holder of the engine calls everything, except net_wake, which any thread may.
#ifndef HVD_NET_H
#define HVD_NET_H

#include "base/peer.h"
#include "wire/secure.h"

typedef enum lane { LANE_CONTROL, LANE_DATA, N_LANES } lane_t;

enum { ENCRYPT_AUTO, ENCRYPT_ALWAYS, ENCRYPT_NEVER }; // the choices of HOROVOD_ENCRYPT

typedef struct net_link net_link_t;
typedef struct net net_t;

// What a transport may know of the job.
typedef struct net_job {
    int rank, size;
    const int *host_of;  // host index of every rank: ranks of one host may share memory
    bool share_loopback; // no rank needs another interface
    const config_t *config;
    const log_t *log;
    secure_keys_t *keys;  // NULL in a world of one
    const peers_t *peers; // who they are, for sentences; may be NULL
} net_job_t;

// --- A link -------------------------------------------------------------------------------------

// Return values of the four movers: bytes moved; 0 for "not now"; negative hvd_status_t when the
// link is broken, with the sentence in link->err.
typedef struct link_ops {
    ssize_t (*send)(net_link_t *link, const void *data, size_t bytes);
    ssize_t (*recv)(net_link_t *link, void *data, size_t bytes);
    // What has arrived and lies in memory at *data_p; valid until consume.
    ssize_t (*peek)(net_link_t *link, const void **data_p);
    void (*consume)(net_link_t *link, size_t bytes);
    void (*close)(net_link_t *link);
    // For tests, may be NULL. On a link that protects its bytes: whatever leaves passes through fn
    // behind the protection, and true. False: what is given to `send` is what goes over the wire.
    bool (*on_wire)(net_link_t *link, wire_mangle_fn fn, void *arg);
} link_ops_t;

struct net_link {
    const link_ops_t *ops;
    const char *transport; // name, for reports
    int peer;
    lane_t lane;
    bool more; // during a send: the next follows at once, and this one may wait for it
    err_t err;
};

static inline void link_close(net_link_t *l)
{
    if (l != NULL) {
        l->ops->close(l);
    }
}

// --- A transport --------------------------------------------------------------------------------

typedef struct domain domain_t; // a transport's state in one context; each transport has its own

// attach, is_attached, settle, warn_unencrypted, progress, wait_fd, wake_word, health, n_foreign,
// is_opening and arm may be NULL.
typedef struct transport {
    const char *name;
    // May answer HVD_UNSUPPORTED with the reason in err: the transport is then left out.
    hvd_status_t (*open)(const net_job_t *job, domain_t **domain_p, err_t *err);
    // What peers need to reach this rank; appended to `out`. Exchanged once, by boot.
    hvd_status_t (*address)(domain_t *domain, buf_t *out, err_t *err);
    // All addresses are known (addresses[r] is NULL where rank r lacks this transport).
    // Set-up that needs them happens here; it waits for nobody.
    hvd_status_t (*attach)(domain_t *domain, const uint8_t *const *addresses, const size_t *lengths,
                           err_t *err);
    // Optional. After attach every rank tells all others whether it is attached; settle then gets
    // everyone's answer (1 or 0 by rank), so that both sides of a pair decide alike.
    bool (*is_attached)(domain_t *domain);
    void (*settle)(domain_t *domain, const uint8_t *attached);
    // Can this rank and `peer` use it? If not, `why` gets a short reason. Both sides of a pair must
    // answer alike: decide from what all ranks know (addresses, host_of, settle), never from what
    // only this rank has seen.
    bool (*reaches)(domain_t *domain, int peer, char *why, size_t why_bytes);
    // Only of a transport that cannot encrypt. Asked of the lowest rank that it links to another
    // host, unless HOROVOD_ENCRYPT=never.
    void (*warn_unencrypted)(domain_t *domain);
    // A link object at once; it may still be connecting, its movers then return 0.
    hvd_status_t (*connect)(domain_t *domain, int peer, lane_t lane, net_link_t **link_p,
                            err_t *err);
    // Accepts, shakes hands, flushes. How many things happened; cheap when nothing did.
    int (*progress)(domain_t *domain);
    // The descriptor that polls readable when progress has work. False: this domain has none, so
    // whoever sleeps must ask it now and then.
    bool (*wait_fd)(domain_t *domain, int *fd_p);
    // The word peers ring when this rank sleeps (see net_before_sleep), or NULL.
    atomic_uint *(*wake_word)(domain_t *domain);
    // The first link of this lane that ended by itself, and to whom it was; HVD_OK if none did.
    hvd_status_t (*health)(domain_t *domain, lane_t lane, int *peer_p, err_t *err);
    uint64_t (*n_foreign)(const domain_t *domain); // clients cut off: they are not of this job
    bool (*is_opening)(domain_t *domain);          // links are being made
    void (*close)(domain_t *domain);
    // About to sleep: wait_fd must tell of everything from here on.
    void (*arm)(domain_t *domain);
    bool is_for_data; // the agreement, which is always encrypted, goes another way
} transport_t;

extern const transport_t transport_self, transport_shm, transport_ofi, transport_tcp;

// A wake word is 1 while its rank sleeps. Whoever makes work visible to that rank calls wake_ring
// after. wake_claim is its first half: true for exactly one caller, who must then end the sleep.
static inline bool wake_claim(atomic_uint *word)
{
    atomic_thread_fence(memory_order_seq_cst); // the work must be visible before the word is read
    return UNLIKELY(atomic_load_explicit(word, memory_order_relaxed) == 1) &&
           atomic_exchange(word, 0) == 1;
}

static inline void wake_ring(atomic_uint *word)
{
    if (wake_claim(word)) {
        futex_wake(word,
                   INT32_MAX); // the engine thread may sleep on it beside the thread that drives
    }
}

// Wraps a link for tests: traces, delays or damages by the rules of HOROVOD_HOOK. Takes the link
// over, also when it fails. A link that no rule concerns comes back as it is.
hvd_status_t hook_wrap(net_link_t *inner, const char *rules, const net_job_t *job,
                       net_link_t **link_p, err_t *err);
// Releases what a wrapped link holds back and is due; how many times. *next_ns_p is lowered to the
// time of the next release.
int hook_progress(net_link_t *link, uint64_t *next_ns_p);

// --- All transports of a context ----------------------------------------------------------------

hvd_status_t net_open(const net_job_t *job, net_t **net_p, err_t *err);
// This rank's addresses on all transports, and everyone's back (boot carries them between).
hvd_status_t net_address(net_t *net, buf_t *out, err_t *err);
hvd_status_t net_attach(net_t *net, const uint8_t *const *addresses, const size_t *lengths,
                        err_t *err);
// After net_attach: this rank's answers for all transports, one byte (bits by table row, and
// whether its tensors reach another host unencrypted), and everyone's back; only then are links
// made.
uint8_t net_attached(net_t *net);
uint8_t net_attached_bit(const transport_t *transport);
hvd_status_t net_settle(net_t *net, const uint8_t *attached_by_rank, err_t *err);
void net_close(net_t *net);

// The link to a peer on a lane, made at first use through the first transport that reaches it.
// NULL with err set if none does. It belongs to net, which closes it.
net_link_t *net_link(net_t *net, int peer, lane_t lane, err_t *err);
// Name of the transport between this rank and peer ("shm"), and why better ones were not taken.
const char *net_transport_name(net_t *net, int peer, char *why_not, size_t bytes);
// The domain of a transport in this context, or NULL if it was left out.
domain_t *net_domain(net_t *net, const transport_t *transport);

int net_progress(net_t *net);
hvd_status_t net_health(net_t *net, lane_t lane, int *peer_p, err_t *err);
uint64_t net_n_foreign(const net_t *net); // clients cut off so far
bool net_is_opening(net_t *net);          // some link is on its way, and has a deadline

// Sleeping: announce, look once more whether there is something to do, then sleep.
//     unsigned ticket = net_before_sleep(net);
//     if (nothing_to_do()) { net_sleep(net, ticket, deadline); }
//     net_after_sleep(net);
// A peer that sends through shared memory, a socket that turns readable and net_wake all end it.
// net_sleep may be entered after the engine was let go.
unsigned net_before_sleep(net_t *net);
void net_sleep(net_t *net, unsigned ticket, uint64_t deadline_ns);
void net_after_sleep(net_t *net);
void net_wake(net_t *net); // any thread

// True if more ranks run on this machine, be it as several hosts, than it has cores: waits then
// yield instead of spinning.
bool net_oversubscribed(const net_t *net);
// True if each rank on this machine has a second core, for its engine thread.
bool net_has_spare_cores(const net_t *net);

typedef enum core_use {
    CORE_UNKNOWN, // somebody we wait for may run here: not all ranks can be asked
    CORE_OWN,     // no other rank of the job waits here
    CORE_SHARED,
} core_use_t;

// The core on which the caller waits (cores.h). Ranks that share one make room at once, and may
// part: the later of two then moves to another core.
core_use_t net_core_use(net_t *net);
void net_part_cores(net_t *net, uint64_t now_ns);

#endif
