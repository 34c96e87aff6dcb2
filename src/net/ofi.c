// SPDX-License-Identifier: Apache-2.0
//
// ofi.c - the transport over libfabric: RDMA between hosts, for data.
//
// libfabric is loaded at run time. Taken by default is a provider that moves bytes by RDMA (verbs,
// efa); HOROVOD_OFI_PROVIDER names any other (tcp and shm, for trials). Connected endpoints are
// preferred; a provider that has none gets one endpoint for all peers. A rank offers its address,
// with a random token, through the encrypted rendezvous: a connection begins with the tokens of
// both sides (ofi_cm.c), and without connections the tag of every message is made of the
// receiver's. What follows is not encrypted; the agreement stays on TCP, which is.
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
#include <signal.h>
#include <sys/epoll.h>
#include <unistd.h>

#define API_VERSION FI_VERSION(1, 11) // old enough for every libfabric of the last years
#define OFFER_VERSION 2
#define TICK_NS (100 * NS_PER_MS)
#define ASK_EVENTS_EVERY 64 // rounds without a completion: it is a system call

// By default only what moves bytes without the kernel is better than our own TCP. The last row is
// for providers that are not listed.
static const ofi_kind_t kinds[] = {
    {.name = "verbs", .is_rdma = true},
    {.name = "efa", .is_rdma = true, .has_no_ip = true},
    {.name = "shm", .has_no_ip = true, .is_one_host = true},
    {.name = "tcp"},
    {.name = ""},
};

const char *ofi_text(const domain_t *d, long code)
{
    return d->lib.strerror((int)(code < 0 ? -code : code));
}

// --- The library ---------------------------------------------------------------------------------

// Code of some providers (psm) puts handlers of its own in place when it is loaded, for Ctrl-C too:
// those of the program stay.
static void *open_library(void)
{
    struct sigaction kept[NSIG], now;
    for (int s = 1; s < NSIG; s++) {
        sigaction(s, NULL, &kept[s]); // some numbers are no signals, now and below
    }
    void *library = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
    for (int s = 1; s < NSIG; s++) {
        if (sigaction(s, NULL, &now) == 0 && now.sa_sigaction != kept[s].sa_sigaction) {
            sigaction(s, &kept[s], NULL);
        }
    }
    return library;
}

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
    lib->handle = open_library();
    if (lib->handle == NULL) {
        return fail(err, HVD_UNSUPPORTED, "libfabric.so.1 is not installed");
    }
    for (size_t i = 0; i < N_ELEMENTS(functions); i++) {
        void *function = dlvsym(lib->handle, functions[i].name, functions[i].version);
        if (function == NULL) {
            return fail(err, HVD_UNSUPPORTED, "libfabric does not have %s in version %s",
                        functions[i].name, functions[i].version);
        }
        memcpy((char *)lib + functions[i].place, &function, sizeof function);
    }
    return HVD_OK;
}

// --- The provider --------------------------------------------------------------------------------

static struct fi_info *make_hints(const domain_t *d, const char *provider, enum fi_ep_type type)
{
    struct fi_info *hints = d->lib.dupinfo(NULL);
    if (hints != NULL) {
        bool connects = type == FI_EP_MSG;
        hints->ep_attr->type = type;
        hints->caps = connects ? FI_MSG : FI_TAGGED;
        hints->tx_attr->msg_order = connects ? 0 : FI_ORDER_SAS;
        hints->rx_attr->msg_order = hints->tx_attr->msg_order;
        hints->mode = FI_CONTEXT | FI_CONTEXT2;
        hints->domain_attr->mr_mode =
            FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
        hints->domain_attr->threading = FI_THREAD_DOMAIN;
        hints->fabric_attr->prov_name = strdup(provider);
    }
    return hints;
}

static bool ask(domain_t *d, const struct fi_info *hints, const char *ip)
{
    int code = d->lib.getinfo(API_VERSION, ip, NULL, ip != NULL ? FI_SOURCE : 0, hints, &d->info);
    if (code != 0) {
        d->info = NULL;
    }
    return code == 0;
}

// The provider at the first of our addresses where it works.
static bool find_info(domain_t *d, const char *provider, enum fi_ep_type type)
{
    tcp_iface_t ifaces[TCP_MAX_ADDRS];
    err_t err;
    int n = 0;
    struct fi_info *hints = make_hints(d, provider, type);
    if (hints == NULL) {
        return false;
    }
    if (d->kind->has_no_ip) {
        ask(d, hints, NULL);
    } else {
        tcp_list_ifaces(d->job->config->iface, false, ifaces, &n, &err);
    }
    for (int i = 0; i < n && d->info == NULL; i++) {
        char ip[TCP_ADDR_TEXT];
        tcp_ip_text(&ifaces[i].addr, ip);
        ask(d, hints, ip);
    }
    d->lib.freeinfo(hints);
    return d->info != NULL;
}

static bool find_provider(domain_t *d, const char *name)
{
    static const enum fi_ep_type types[] = {FI_EP_MSG, FI_EP_RDM}; // connected ones are faster
    const ofi_kind_t *kind = kinds;
    while (kind->name[0] != '\0' && strcmp(kind->name, name) != 0) {
        kind++;
    }
    d->kind = kind;
    snprintf(d->provider, sizeof d->provider, "%s", name);
    for (size_t i = 0; i < N_ELEMENTS(types); i++) {
        if (find_info(d, name, types[i])) {
            return true;
        }
    }
    return false;
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
    if (!asks_for_any(d->job)) {
        return find_provider(d, asked)
                   ? HVD_OK
                   : fail(err, HVD_UNSUPPORTED,
                          "libfabric has no provider %s that works here (HOROVOD_OFI_PROVIDER; try "
                          "fi_info -p %s)",
                          asked, asked);
    }
    for (size_t i = 0; i < N_ELEMENTS(kinds); i++) {
        if (kinds[i].is_rdma && find_provider(d, kinds[i].name)) {
            return HVD_OK;
        }
    }
    return fail(err, HVD_UNSUPPORTED,
                "there is an RDMA device, but libfabric has no provider for it that works (fi_info "
                "-p verbs; are /dev/infiniband/uverbs0 and rdma_cm there?)");
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

// Some providers cannot wake anybody: they are asked again and again.
static int open_queue(domain_t *d)
{
    struct fi_cq_attr cq = {
        .wait_obj = FI_WAIT_FD,
        .format = FI_CQ_FORMAT_MSG,
        .size = MIN((size_t)d->job->size * 2 * OFI_BUFFERS, 16384),
    };
    int code = fi_cq_open(d->domain, &cq, &d->cq, NULL);
    if (code != 0) {
        cq.wait_obj = FI_WAIT_NONE;
        code = fi_cq_open(d->domain, &cq, &d->cq, NULL);
    }
    return code;
}

static int open_endpoint(domain_t *d)
{
    struct fi_av_attr av = {.type = FI_AV_UNSPEC, .count = (size_t)d->job->size};
    int code = fi_av_open(d->domain, &av, &d->av, NULL);
    code = code != 0 ? code : fi_endpoint(d->domain, d->info, &d->ep, NULL);
    code = code != 0 ? code : fi_ep_bind(d->ep, &d->av->fid, 0);
    code = code != 0 ? code : fi_ep_bind(d->ep, &d->cq->fid, FI_TRANSMIT | FI_RECV);
    return code != 0 ? code : fi_enable(d->ep);
}

static hvd_status_t open_fabric(domain_t *d, err_t *err)
{
    int code = d->lib.fabric(d->info->fabric_attr, &d->fabric, NULL);
    code = code != 0 ? code : fi_domain(d->fabric, d->info, &d->domain, NULL);
    code = code != 0 ? code : open_queue(d);
    if (code == 0) {
        code = d->info->ep_attr->type == FI_EP_MSG ? ofi_cm_open(d) : open_endpoint(d);
    }
    return code == 0 ? HVD_OK
                     : fail(err, HVD_UNSUPPORTED, "the %s provider cannot be opened: %s",
                            d->provider, ofi_text(d, code));
}

// A limit of locked memory is better met here, where another transport can be taken.
static hvd_status_t try_memory(domain_t *d, err_t *err)
{
    err_t why = {0};
    ofi_slab_t *slab = ofi_slab_take(d, &why);
    if (slab == NULL) {
        return fail(err, HVD_UNSUPPORTED, "%s", why.text);
    }
    ofi_slab_give(d, slab);
    return HVD_OK;
}

static hvd_status_t open_wait(domain_t *d, err_t *err)
{
    int fd = -1;
    if (fi_control(&d->cq->fid, FI_GETWAIT, &fd) != 0 || fd < 0) {
        return HVD_OK;
    }
    d->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (d->epoll < 0) {
        return fail_errno(err, errno, "no descriptor for the ofi transport");
    }
    watch(d, &d->cq->fid);
    if (d->eq != NULL) {
        watch(d, &d->eq->fid);
    }
    return HVD_OK;
}

static void close_all(struct fid *const *handles, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (handles[i] != NULL) {
            fi_close(handles[i]);
        }
    }
}

#define FID(object) ((object) != NULL ? &(object)->fid : NULL)

static void ofi_close(domain_t *d)
{
    // Endpoints end before the memory they write to, and before what they are bound to.
    close_all((struct fid *[]){FID(d->ep)}, 1);
    for (int r = 0; d->links != NULL && r < d->job->size; r++) {
        if (d->links[r] != NULL) {
            ofi_link_free(d->links[r]);
        }
    }
    ofi_slabs_free(d);
    struct fid *const handles[] = {FID(d->pep), FID(d->av),     FID(d->cq),
                                   FID(d->eq),  FID(d->domain), FID(d->fabric)};
    close_all(handles, N_ELEMENTS(handles));
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

static bool is_first_of_host(const net_job_t *job)
{
    int r = 0;
    while (job->host_of[r] != job->host_of[job->rank]) {
        r++;
    }
    return r == job->rank;
}

// Who has named a provider, or has the hardware, wants to know.
static void say_left_out(const net_job_t *job, const err_t *err)
{
    bool expected = !asks_for_any(job) || has_rdma_device();
    if (err->status == HVD_UNSUPPORTED && expected && is_first_of_host(job)) {
        log_warn(job->log, "ofi", "not used: %s", err->text);
    }
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
    TRY(try_memory(d, err), undo);
    TRY(open_wait(d, err), undo);
    TRY(random_bytes(d->token, sizeof d->token, err), undo);
    *domain_p = d;
    return HVD_OK;
undo:
    say_left_out(job, err);
    ofi_close(d);
    return status;
}

// --- Addresses -----------------------------------------------------------------------------------

static hvd_status_t ofi_address(domain_t *d, buf_t *out, err_t *err)
{
    uint8_t address[sizeof d->peers->address];
    size_t bytes = sizeof address;
    int code = fi_getname(d->ep != NULL ? &d->ep->fid : &d->pep->fid, address, &bytes);
    if (code != 0) {
        return fail(err, HVD_SYSTEM, "the %s provider does not say where it listens: %s",
                    d->provider, ofi_text(d, code));
    }
    put_u8(out, OFFER_VERSION);
    put_u8(out, (uint8_t)d->info->ep_attr->type);
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
    same = get_u8(&r) == (uint8_t)d->info->ep_attr->type && same;
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
                               err_t *err)
{
    (void)err;
    for (int r = 0; r < d->job->size; r++) {
        if (addresses[r] != NULL) {
            learn_peer(d, &d->peers[r], addresses[r], lengths[r]);
        }
    }
    return HVD_OK;
}

static void ofi_warn_unencrypted(domain_t *d)
{
    log_warn(d->job->log, "ofi",
             "tensors between hosts travel by libfabric (%s), which does not encrypt them; "
             "HOROVOD_TRANSPORTS=shm,tcp encrypts, HOROVOD_ENCRYPT=never accepts that",
             d->provider);
}

static bool ofi_reaches(domain_t *d, int peer, char *why, size_t why_bytes)
{
    if (d->kind->is_one_host && d->job->host_of[peer] != d->job->host_of[d->job->rank]) {
        snprintf(why, why_bytes, "the libfabric provider \"%s\" does not reach other hosts",
                 d->provider);
        return false;
    }
    if (d->peers[peer].is_there) {
        return true;
    }
    snprintf(why, why_bytes, "rank %d does not have the libfabric provider \"%s\"", peer,
             d->provider);
    return false;
}

// --- Going on ------------------------------------------------------------------------------------

static hvd_status_t ofi_connect(domain_t *d, int peer, lane_t lane, net_link_t **link_p, err_t *err)
{
    (void)lane; // only data comes here
    hvd_status_t status = HVD_OK;
    ofi_link_t *link = ofi_link_of(d, peer, err);
    if (link == NULL) {
        return err->status;
    }
    if (link->ep == NULL && d->ep != NULL) {
        status = ofi_link_join(link, err);
    } else if (link->ep == NULL && d->job->rank < peer) {
        status = ofi_cm_call(link, err);
    }
    if (status == HVD_OK) {
        link->is_open = true;
        *link_p = &link->base;
    }
    return status;
}

// Links that nobody has answered in time, or that have been quiet for long.
static void tick(domain_t *d, uint64_t now_ns)
{
    for (int r = 0; r < d->job->size; r++) {
        ofi_link_t *link = d->links[r];
        if (link != NULL && link->is_open && !link->connected && !link->ended &&
            now_ns >= link->deadline_ns) {
            ofi_link_fail(link, "it did not connect in time (HOROVOD_GLOO_TIMEOUT_SECONDS)");
        }
        if (link != NULL) {
            ofi_link_tick(link);
        }
    }
    d->next_tick_ns = now_ns + TICK_NS;
}

static void flush(domain_t *d)
{
    for (int r = 0; r < d->job->size; r++) {
        if (d->links[r] != NULL) {
            ofi_link_flush(d->links[r]);
        }
    }
}

static int ofi_progress(domain_t *d)
{
    int n = ofi_link_completions(d);
    if (n == 0 && d->n_begun > 0) {
        flush(d);
    }
    if (n == 0) {
        uint64_t now_ns = clock_ns();
        if (now_ns >= d->next_tick_ns) {
            tick(d, now_ns);
        }
        n = d->eq != NULL && d->n_idle++ % ASK_EVENTS_EVERY == 0 ? ofi_cm_events(d) : 0;
    }
    return n;
}

static void ofi_arm(domain_t *d)
{
    struct fid *queues[] = {&d->cq->fid, FID(d->eq)};
    d->n_idle = 0;       // nothing may be left unread when somebody sleeps
    if (d->epoll >= 0) { // if it fails, progress finds out why
        fi_trywait(d->fabric, queues, d->eq != NULL ? 2 : 1);
    }
}

static bool ofi_wait_fd(domain_t *d, int *fd_p)
{
    *fd_p = d->epoll;
    return d->epoll >= 0;
}

static hvd_status_t ofi_health(domain_t *d, lane_t lane, int *peer_p, err_t *err)
{
    if (lane != LANE_DATA || d->broken.status == HVD_OK) {
        return HVD_OK;
    }
    *err = d->broken;
    *peer_p = d->broken_peer;
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
    .warn_unencrypted = ofi_warn_unencrypted,
    .connect = ofi_connect,
    .progress = ofi_progress,
    .arm = ofi_arm,
    .wait_fd = ofi_wait_fd,
    .health = ofi_health,
    .close = ofi_close,
#endif
};
