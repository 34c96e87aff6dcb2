// SPDX-License-Identifier: Apache-2.0
//
// info_transports.c - hvd-info --transports: which transports a job here would use, and why.
//
// Asks a job that is opened for a moment, with this process as its first rank. Started as a rank of
// a job, it joins that job and tells what it found there.
#define _GNU_SOURCE
#include "engine/engine.h"
#include "net/shm.h"
#include "tools/info.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/statvfs.h>

#define MAX_OWN_DESCRIPTORS 1024

// --- A job that could be started here ------------------------------------------------------------

static const void *ip_of(const struct sockaddr *address, size_t *bytes_p)
{
    bool is_v6 = address->sa_family == AF_INET6;
    *bytes_p = is_v6 ? sizeof(struct in6_addr) : sizeof(struct in_addr);
    return is_v6 ? (const void *)&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr
                 : (const void *)&((const struct sockaddr_in *)(const void *)address)->sin_addr;
}

// Does this process listen at the address? Its own sockets know best.
static bool listens_at(const struct sockaddr *address)
{
    size_t ip_bytes;
    const void *ip = ip_of(address, &ip_bytes);
    for (int fd = 0; fd < MAX_OWN_DESCRIPTORS; fd++) {
        int listening = 0;
        socklen_t bytes = sizeof listening;
        struct sockaddr_storage own;
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &bytes) != 0 || listening == 0) {
            continue;
        }
        bytes = sizeof own;
        if (getsockname(fd, (struct sockaddr *)&own, &bytes) == 0 &&
            own.ss_family == address->sa_family &&
            memcmp(ip_of((struct sockaddr *)&own, &ip_bytes), ip, ip_bytes) == 0) {
            return true;
        }
    }
    return false;
}

// To be called while the job is open.
static void print_interfaces(const config_t *config)
{
    table_t table = {.n_columns = 3};
    struct ifaddrs *all = NULL;
    char text[NI_MAXHOST];
    if (getifaddrs(&all) != 0) {
        return;
    }
    for (const struct ifaddrs *at = all; at != NULL; at = at->ifa_next) {
        int family = at->ifa_addr != NULL ? at->ifa_addr->sa_family : AF_UNSPEC;
        socklen_t bytes =
            family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
        if ((family != AF_INET && family != AF_INET6) ||
            getnameinfo(at->ifa_addr, bytes, text, sizeof text, NULL, 0, NI_NUMERICHOST) != 0) {
            continue;
        }
        table_add(&table, "%s", at->ifa_name);
        table_add(&table, "%s", text);
        table_add(&table, "%s",
                  listens_at(at->ifa_addr)        ? "listens"
                  : (at->ifa_flags & IFF_UP) == 0 ? "not used: down"
                                                  : "not used");
    }
    freeifaddrs(all);
    bool all_wanted = config->iface == NULL || config->iface[0] == '\0';
    printf("tcp (HOROVOD_GLOO_IFACE %s)\n",
           all_wanted ? "not set: every usable address" : config->iface);
    table_print(&table);
}

static void print_shared_memory(const config_t *config, int ranks_here)
{
    struct statvfs fs;
    char size[32] = "?", free_now[32] = "?", needed[32];
    if (statvfs("/dev/shm", &fs) == 0) {
        info_size_text((size_t)fs.f_blocks * fs.f_frsize, size);
        info_size_text((size_t)fs.f_bavail * fs.f_frsize, free_now);
    }
    puts("shared memory");
    printf("  /dev/shm has %s, %s free; a host of %d rank%s takes %s (HOROVOD_SHM_BYTES %zu)\n",
           size, free_now, ranks_here, plural(ranks_here),
           info_size_text(shm_segment_bytes(ranks_here, config->shm_bytes), needed),
           config->shm_bytes);
}

static void add_peer(table_t *table, net_t *net, int peer, const char *what)
{
    char why_not[1024];
    table_add(table, "%s", what);
    table_add(table, "%s", net_transport_name(net, peer, why_not, sizeof why_not));
    table_add(table, "%s%s", why_not[0] != '\0' ? "not " : "", why_not);
}

// Opens the network of a job in which every rank has this process's addresses.
static hvd_status_t open_alone(const net_job_t *job, net_t **net_p, err_t *err)
{
    size_t n = (size_t)job->size;
    const uint8_t **addresses = calloc(n, sizeof *addresses);
    size_t *lengths = calloc(n, sizeof *lengths);
    uint8_t *attached = calloc(n, 1);
    hvd_status_t status = HVD_NO_MEMORY;
    buf_t mine = {0};
    if (addresses == NULL || lengths == NULL || attached == NULL) {
        goto out;
    }
    TRY(net_open(job, net_p, err), out);
    TRY(net_address(*net_p, &mine, err), out);
    for (size_t r = 0; r < n; r++) {
        addresses[r] = mine.data;
        lengths[r] = mine.len;
    }
    TRY(net_attach(*net_p, addresses, lengths, err), out);
    memset(attached, net_attached(*net_p), n);
    status = net_settle(*net_p, attached, err);
out:
    free(addresses);
    free(lengths);
    free(attached);
    buf_free(&mine);
    return status;
}

// A job of `ranks_here` ranks on this host, of which this is the first, and one elsewhere.
static int try_transports(const config_t *config, int ranks_here)
{
    table_t table = {.n_columns = 3};
    int *host_of = calloc((size_t)ranks_here + 1, sizeof *host_of);
    net_job_t job = {.size = ranks_here + 1, .host_of = host_of, .config = config};
    uint8_t secret[32];
    net_t *net = NULL;
    hvd_status_t status;
    err_t err = {.text = "out of memory"};
    if (host_of == NULL) {
        return 1;
    }
    host_of[ranks_here] = 1;
    TRY(random_bytes(secret, sizeof secret, &err), out);
    TRY(secure_keys_new(secret, &job.keys, &err), out);
    TRY(open_alone(&job, &net, &err), out);
    if (ranks_here > 1) {
        add_peer(&table, net, 1, "to ranks on this host");
    }
    add_peer(&table, net, ranks_here, "to ranks on other hosts");
    puts("transports of a job started here");
    table_print(&table);
    print_shared_memory(config, ranks_here);
    print_interfaces(config);
out:
    if (status != HVD_OK) {
        printf("no job can start here: %s\n", err.text);
    }
    net_close(net);
    secure_keys_free(job.keys);
    free(host_of);
    return 0;
}

// --- The job this is a rank of -------------------------------------------------------------------

static int print_own_job(void)
{
    table_t table = {.n_columns = 3};
    char text[HVD_TEXT_BYTES];
    char what[64];
    hvd_ctx_t *ctx;
    if (hvd_init(NULL, &ctx, text, sizeof text) != HVD_OK) {
        fprintf(stderr, "hvd-info: %s\n", text);
        return 1;
    }
    for (int r = 0; r < hvd_size(ctx); r++) {
        if (r != hvd_rank(ctx)) {
            snprintf(what, sizeof what, "from rank %d to rank %d", hvd_rank(ctx), r);
            add_peer(&table, ctx->net, r, what);
        }
    }
    printf("transports of rank %d of %d\n", hvd_rank(ctx), hvd_size(ctx));
    table_print(&table);
    if (ctx->mpi != NULL) {
        printf("collectives by %s; the links carry the agreement, and what MPI cannot do\n",
               mpi_library_name(ctx->mpi));
    }
    hvd_shutdown(ctx);
    return 0;
}

int info_transports(const info_options_t *options)
{
    const char *name, *title;
    config_t config;
    if (!info_load_knobs(&config)) {
        return 1;
    }
    boot_describe(&config, &name, &title);
    bool is_alone = strcmp(name, "self") == 0 || (strcmp(name, "env") == 0 && config.size == 1);
    int per_host = (options->ranks + options->hosts - 1) / options->hosts;
    int code = is_alone ? try_transports(&config, per_host) : print_own_job();
    config_free(&config);
    return code;
}
