// SPDX-License-Identifier: Apache-2.0
//
// ofi.c - the transport over libfabric: RDMA between hosts, for data.
//
// libfabric is loaded at run time. Taken by default is a provider that moves bytes by RDMA (verbs);
// HOROVOD_OFI_PROVIDER names any other that has connected endpoints (tcp, for trials). A rank
// listens at one address and offers it, with a random token, through the encrypted rendezvous. Of
// two ranks the lower one connects and shows the token of the other, which answers with the token
// of the caller: both have then proved that they belong to the job. What follows is not encrypted;
// the agreement stays on TCP, which is.
//
// Threads: the holder of the engine. After fork() a child must not touch it: fi_* handles are not
// for two processes.
#define _GNU_SOURCE
#include "net/net.h"

#include <stdio.h>
#include <stdlib.h>

#if __has_include(<rdma/fabric.h>)
#include "net/ofi.h"
#include "net/tcp_addr.h"
#include "wire/codec.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <sys/epoll.h>
#include <unistd.h>

#define API_VERSION FI_VERSION(1, 11) // old enough for every libfabric of the last years
#define OFFER_VERSION 1
#define TICK_NS (100 * NS_PER_MS)

extern const link_ops_t ofi_link_ops;

// By default only what moves bytes without the kernel is better than our own TCP.
static const char *const rdma_providers[] = {"verbs"};

// What both ends of a connection show each other.
typedef struct call {
    uint8_t token[OFI_TOKEN_BYTES]; // of the one it is shown to
    uint32_t epoch;
    uint32_t rank; // of the one who shows it
} call_t;

const char *ofi_text(const domain_t *d, long code)
{
    return d->lib.strerror((int)(code < 0 ? -code : code));
}

// --- The library ---------------------------------------------------------------------------------

// Only versions of these functions that take the structures as they are declared here will do.
static hvd_status_t load_library(ofi_library_t *lib, err_t *err)
{
    static const struct {
        const char *name, *version;
        size_t place;
    } functions[] = {
        {"fi_getinfo", "FABRIC_1.3", offsetof(ofi_library_t, getinfo)},
        {"fi_freeinfo", "FABRIC_1.3", offsetof(ofi_library_t, freeinfo)},
        {"fi_dupinfo", "FABRIC_1.3", offsetof(ofi_library_t, dupinfo)},
        {"fi_fabric", "FABRIC_1.1", offsetof(ofi_library_t, fabric)},
        {"fi_strerror", "FABRIC_1.0", offsetof(ofi_library_t, strerror)},
    };
    lib->handle = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
    if (lib->handle == NULL) {
        return fail(err, HVD_UNSUPPORTED, "libfabric.so.1 is not installed");
    }
    for (size_t i = 0; i < N_ELEMENTS(functions); i++) {
        void *function = dlvsym(lib->handle, functions[i].name, functions[i].version);
        if (function == NULL) {
            return fail(err, HVD_UNSUPPORTED, "libfabric has no %s of version %s",
                        functions[i].name, functions[i].version);
        }
        memcpy((char *)lib + functions[i].place, &function, sizeof function);
    }
    return HVD_OK;
}

// --- The provider --------------------------------------------------------------------------------

static struct fi_info *make_hints(const domain_t *d, const char *provider)
{
    struct fi_info *hints = d->lib.dupinfo(NULL);
    if (hints != NULL) {
        hints->ep_attr->type = FI_EP_MSG;
        hints->caps = FI_MSG;
        hints->mode = FI_CONTEXT;
        hints->domain_attr->mr_mode =
            FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
        hints->domain_attr->threading = FI_THREAD_DOMAIN;
        hints->fabric_attr->prov_name = strdup(provider);
    }
    return hints;
}

// The provider at the first of our addresses where it works.
static bool find_info(domain_t *d, const char *provider)
{
    tcp_iface_t ifaces[TCP_MAX_ADDRS];
    err_t err;
    int n = 0;
    tcp_list_ifaces(d->job->config->iface, ifaces, &n, &err);
    struct fi_info *hints = make_hints(d, provider);
    for (int i = 0; hints != NULL && i < n && d->info == NULL; i++) {
        char ip[TCP_ADDR_TEXT];
        tcp_ip_text(&ifaces[i].addr, ip);
        if (d->lib.getinfo(API_VERSION, ip, NULL, FI_SOURCE, hints, &d->info) != 0) {
            d->info = NULL;
        }
    }
    if (hints != NULL) {
        d->lib.freeinfo(hints);
    }
    return d->info != NULL;
}

// Asking libfabric takes its time: only where it can find something.
static bool has_rdma_device(void)
{
    DIR *devices = opendir("/sys/class/infiniband");
    const struct dirent *entry = NULL;
    while (devices != NULL && (entry = readdir(devices)) != NULL && entry->d_name[0] == '.') {
    }
    if (devices != NULL) {
        closedir(devices);
    }
    return entry != NULL;
}

static bool asks_for_any(const net_job_t *job)
{
    return job->config->ofi_provider == NULL || job->config->ofi_provider[0] == '\0';
}

static hvd_status_t choose_provider(domain_t *d, err_t *err)
{
    const char *asked = d->job->config->ofi_provider;
    bool any = asks_for_any(d->job);
    size_t n = any ? N_ELEMENTS(rdma_providers) : 1;
    for (size_t i = 0; i < n && d->info == NULL; i++) {
        const char *name = any ? rdma_providers[i] : asked;
        if (find_info(d, name)) {
            snprintf(d->provider, sizeof d->provider, "%s", name);
            return HVD_OK;
        }
    }
    return any ? fail(err, HVD_UNSUPPORTED,
                      "no RDMA device: libfabric has no working verbs provider here (fi_info -p "
                      "verbs)")
               : fail(err, HVD_UNSUPPORTED,
                      "the provider %s (HOROVOD_OFI_PROVIDER) has no connected endpoints here (try "
                      "fi_info -p %s -t FI_EP_MSG)",
                      asked, asked);
}

static hvd_status_t check_wanted(const net_job_t *job, err_t *err)
{
    if (job->config->encrypt == ENCRYPT_ALWAYS) {
        return fail(err, HVD_UNSUPPORTED, "it cannot encrypt, and HOROVOD_ENCRYPT=always");
    }
    if (asks_for_any(job) && !has_rdma_device()) {
        return fail(err, HVD_UNSUPPORTED, "no RDMA device in /sys/class/infiniband");
    }
    return HVD_OK;
}

// --- Opening -------------------------------------------------------------------------------------

static void watch(domain_t *d, struct fid *queue)
{
    int fd = -1;
    if (fi_control(queue, FI_GETWAIT, &fd) == 0 && fd >= 0) {
        struct epoll_event event = {.events = EPOLLIN};
        epoll_ctl(d->epoll, EPOLL_CTL_ADD, fd, &event);
    }
}

static hvd_status_t open_fabric(domain_t *d, err_t *err)
{
    struct fi_eq_attr eq = {.wait_obj = FI_WAIT_FD};
    struct fi_cq_attr cq = {
        .wait_obj = FI_WAIT_FD,
        .format = FI_CQ_FORMAT_MSG,
        .size = MIN((size_t)d->job->size * 2 * OFI_BUFFERS, 16384),
    };
    int code = d->lib.fabric(d->info->fabric_attr, &d->fabric, NULL);
    code = code != 0 ? code : fi_domain(d->fabric, d->info, &d->domain, NULL);
    code = code != 0 ? code : fi_eq_open(d->fabric, &eq, &d->eq, NULL);
    code = code != 0 ? code : fi_cq_open(d->domain, &cq, &d->cq, NULL);
    code = code != 0 ? code : fi_passive_ep(d->fabric, d->info, &d->pep, NULL);
    code = code != 0 ? code : fi_pep_bind(d->pep, &d->eq->fid, 0);
    code = code != 0 ? code : fi_listen(d->pep);
    if (code != 0) {
        return fail(err, HVD_UNSUPPORTED, "the %s provider cannot be opened: %s", d->provider,
                    ofi_text(d, code));
    }
    d->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (d->epoll < 0) {
        return fail_errno(err, errno, "no descriptor for the ofi transport");
    }
    watch(d, &d->eq->fid);
    watch(d, &d->cq->fid);
    return HVD_OK;
}

static void ofi_close(domain_t *d)
{
    for (int r = 0; d->links != NULL && r < d->job->size; r++) {
        if (d->links[r] != NULL) {
            ofi_link_free(d->links[r]);
        }
    }
    struct fid *const handles[] = {
        d->pep != NULL ? &d->pep->fid : NULL,       d->cq != NULL ? &d->cq->fid : NULL,
        d->eq != NULL ? &d->eq->fid : NULL,         d->domain != NULL ? &d->domain->fid : NULL,
        d->fabric != NULL ? &d->fabric->fid : NULL,
    };
    for (size_t i = 0; i < N_ELEMENTS(handles); i++) {
        if (handles[i] != NULL) {
            fi_close(handles[i]);
        }
    }
    if (d->info != NULL) {
        d->lib.freeinfo(d->info);
    }
    if (d->epoll >= 0) {
        close(d->epoll);
    }
    // The library stays loaded: its providers have threads and exit handlers of their own.
    free(d->links);
    free(d->peers);
    wipe(d->token, sizeof d->token);
    free(d);
}

static hvd_status_t ofi_open(const net_job_t *job, domain_t **domain_p, err_t *err)
{
    hvd_status_t status;
    domain_t *d = calloc(1, sizeof *d);
    if (d == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for the ofi transport");
    }
    d->job = job;
    d->epoll = -1;
    d->peers = calloc((size_t)job->size, sizeof *d->peers);
    d->links = calloc((size_t)job->size, sizeof *d->links);
    if (d->peers == NULL || d->links == NULL) {
        status = fail(err, HVD_NO_MEMORY, "no memory for the ofi transport");
        goto undo;
    }
    TRY(check_wanted(job, err), undo);
    TRY(load_library(&d->lib, err), undo);
    TRY(choose_provider(d, err), undo);
    TRY(open_fabric(d, err), undo);
    TRY(random_bytes(d->token, sizeof d->token, err), undo);
    *domain_p = d;
    return HVD_OK;
undo:
    ofi_close(d);
    return status;
}

// --- Addresses -----------------------------------------------------------------------------------

static hvd_status_t ofi_address(domain_t *d, buf_t *out, err_t *err)
{
    uint8_t address[sizeof d->peers->address];
    size_t bytes = sizeof address;
    int code = fi_getname(&d->pep->fid, address, &bytes);
    if (code != 0) {
        return fail(err, HVD_SYSTEM, "the %s provider does not say where it listens: %s",
                    d->provider, ofi_text(d, code));
    }
    put_u8(out, OFFER_VERSION);
    put_u8(out, (uint8_t)strlen(d->provider));
    put_bytes(out, d->provider, strlen(d->provider));
    put_bytes(out, d->token, sizeof d->token);
    put_u8(out, (uint8_t)bytes);
    put_bytes(out, address, bytes);
    return out->failed ? fail(err, HVD_NO_MEMORY, "no memory for an address") : HVD_OK;
}

// A peer with another provider, or of another version, is simply not reached by this transport.
static void learn_peer(const domain_t *d, ofi_peer_t *peer, const uint8_t *data, size_t bytes)
{
    reader_t r = reader_of(data, bytes);
    bool same = get_u8(&r) == OFFER_VERSION;
    size_t name_bytes = get_u8(&r);
    const void *name = get_bytes(&r, name_bytes);
    const void *token = get_bytes(&r, OFI_TOKEN_BYTES);
    size_t address_bytes = get_u8(&r);
    const void *address = get_bytes(&r, address_bytes);
    same = same && !r.bad && name_bytes == strlen(d->provider) &&
           memcmp(name, d->provider, name_bytes) == 0 && address_bytes <= sizeof peer->address;
    if (same) {
        memcpy(peer->token, token, OFI_TOKEN_BYTES);
        memcpy(peer->address, address, address_bytes);
        peer->address_bytes = address_bytes;
        peer->is_there = true;
    }
}

static hvd_status_t ofi_attach(domain_t *d, const uint8_t *const *addresses, const size_t *lengths,
                               uint64_t deadline_ns, err_t *err)
{
    (void)deadline_ns;
    (void)err;
    for (int r = 0; r < d->job->size; r++) {
        if (addresses[r] != NULL) {
            learn_peer(d, &d->peers[r], addresses[r], lengths[r]);
        }
    }
    if (d->job->rank == 0 && d->job->config->encrypt != ENCRYPT_NEVER) {
        log_warn(d->job->log, "ofi",
                 "tensors between hosts travel by libfabric (%s), which does not encrypt them; "
                 "HOROVOD_TRANSPORTS=shm,tcp does, HOROVOD_ENCRYPT=never says that it is meant so",
                 d->provider);
    }
    return HVD_OK;
}

static bool ofi_reaches(domain_t *d, int peer, char *why, size_t why_bytes)
{
    if (d->peers[peer].is_there) {
        return true;
    }
    snprintf(why, why_bytes, "rank %d has not the provider %s", peer, d->provider);
    return false;
}

// --- Connecting ----------------------------------------------------------------------------------

static ofi_link_t *link_of(domain_t *d, int peer, err_t *err)
{
    if (d->links[peer] == NULL) {
        d->links[peer] = ofi_link_new(d, peer, err);
        if (d->links[peer] != NULL) {
            d->links[peer]->base.ops = &ofi_link_ops;
            d->links[peer]->deadline_ns =
                clock_ns() + (uint64_t)(d->job->config->peer_timeout * (double)NS_PER_S);
        }
    }
    return d->links[peer];
}

static call_t call_for(const domain_t *d, int peer)
{
    call_t call = {.epoch = d->job->epoch, .rank = (uint32_t)d->job->rank};
    memcpy(call.token, d->peers[peer].token, OFI_TOKEN_BYTES);
    return call;
}

// Was this shown by rank `from`, to us?
static bool call_is_ours(const domain_t *d, const call_t *call, size_t bytes)
{
    volatile uint8_t differs = 0; // every byte is looked at
    if (bytes < sizeof *call) {
        return false;
    }
    for (int i = 0; i < OFI_TOKEN_BYTES; i++) {
        differs |= (uint8_t)(call->token[i] ^ d->token[i]);
    }
    return differs == 0 && call->epoch == d->job->epoch && call->rank < (uint32_t)d->job->size;
}

static hvd_status_t call_peer(ofi_link_t *link, err_t *err)
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
        call_t call = call_for(d, link->base.peer);
        int code = fi_connect(link->ep, peer->address, &call, sizeof call);
        if (code != 0) {
            status = fail(err, HVD_PEER_LOST, "cannot call rank %d over %s: %s", link->base.peer,
                          d->provider, ofi_text(d, code));
        }
    }
    d->lib.freeinfo(info);
    return status;
}

static hvd_status_t ofi_connect(domain_t *d, int peer, lane_t lane, net_link_t **link_p, err_t *err)
{
    (void)lane; // only data comes here
    ofi_link_t *link = link_of(d, peer, err);
    if (link == NULL) {
        return err->status;
    }
    if (link->ep == NULL && d->job->rank < peer) {
        hvd_status_t status = call_peer(link, err);
        if (status != HVD_OK) {
            return status;
        }
    }
    link->is_open = true;
    *link_p = &link->base;
    return HVD_OK;
}

// --- Events of connections -----------------------------------------------------------------------

// The entry ends in the caller's bytes; some providers hand over more than was sent.
typedef union cm_event {
    struct fi_eq_cm_entry entry;
    uint8_t room[sizeof(struct fi_eq_cm_entry) + sizeof(call_t) + 64];
} cm_event_t;

static void answer_call(domain_t *d, cm_event_t *event, size_t bytes)
{
    err_t err;
    call_t answer;
    const call_t *call = (const call_t *)event->entry.data;
    ofi_link_t *link = NULL;
    if (call_is_ours(d, call, bytes) && (int)call->rank < d->job->rank &&
        d->peers[call->rank].is_there) {
        link = link_of(d, (int)call->rank, &err);
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
    const call_t *answer = (const call_t *)event->entry.data;
    // The one who was called has seen the caller's token already.
    if (called && (!call_is_ours(d, answer, bytes) || (int)answer->rank != link->base.peer)) {
        ofi_link_fail(link, "whoever answered does not belong to the job");
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

static int take_events(domain_t *d)
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

// Links that nobody has answered in time.
static void tick(domain_t *d, uint64_t now_ns)
{
    for (int r = 0; r < d->job->size; r++) {
        ofi_link_t *link = d->links[r];
        if (link != NULL && link->is_open && !link->connected && !link->ended &&
            now_ns >= link->deadline_ns) {
            ofi_link_fail(link, "it has not connected in time (HOROVOD_GLOO_TIMEOUT_SECONDS)");
        }
    }
    d->next_tick_ns = now_ns + TICK_NS;
}

static int ofi_progress(domain_t *d)
{
    int n = ofi_link_completions(d);
    if (n == 0) {
        uint64_t now_ns = clock_ns();
        if (now_ns >= d->next_tick_ns) {
            tick(d, now_ns);
        }
        n = take_events(d);
    }
    return n;
}

static void ofi_arm(domain_t *d)
{
    struct fid *queues[] = {&d->cq->fid, &d->eq->fid};
    fi_trywait(d->fabric, queues, (int)N_ELEMENTS(queues)); // if it fails, progress finds out why
}

static int ofi_wait_fd(domain_t *d)
{
    return d->epoll;
}

static hvd_status_t ofi_health(domain_t *d, lane_t lane, err_t *err)
{
    if (lane != LANE_DATA || d->broken.status == HVD_OK) {
        return HVD_OK;
    }
    *err = d->broken;
    return err->status;
}

#else // libfabric's headers were not there

static hvd_status_t ofi_open(const net_job_t *job, domain_t **domain_p, err_t *err)
{
    (void)job;
    (void)domain_p;
    return fail(err, HVD_UNSUPPORTED, "this build was made without the headers of libfabric");
}

#endif

const transport_t transport_ofi = {
    .name = "ofi",
    .open = ofi_open,
    .is_for_data = true,
#if __has_include(<rdma/fabric.h>)
    .address = ofi_address,
    .attach = ofi_attach,
    .reaches = ofi_reaches,
    .connect = ofi_connect,
    .progress = ofi_progress,
    .arm = ofi_arm,
    .wait_fd = ofi_wait_fd,
    .health = ofi_health,
    .close = ofi_close,
#endif
};
