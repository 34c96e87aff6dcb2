// SPDX-License-Identifier: Apache-2.0
//
// hosts.c - which hosts: -H lists, hostfiles of every kind, and which of them is this machine.
//
// A host is [user@]name[:slots], with an IPv6 address in brackets. Hostfiles have one a line, in
// the form of Open MPI (host slots=2 max_slots=4) or of MPICH and Intel MPI (host:2), with #
// comments. A host named twice has the slots of both. A host is local if its name is this machine's
// or an address of it is; what cannot be looked up may be an alias that only ssh knows, and is
// remote.
#define _GNU_SOURCE
#include "cli/cli.h"
#include "cli/schedulers.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#define MAX_SLOTS 1048576
#define MAX_LOOKUPS 64
#define HOSTFILE_LIMIT (16 * MIB)
#define HOW_TO_NAME_HOSTS "expected host, host:slots or user@host:slots, as in a:2,b:4"

void hosts_free(hosts_t *hosts)
{
    for (int i = 0; i < hosts->n; i++) {
        free(hosts->list[i].name);
        free(hosts->list[i].target);
        free(hosts->list[i].address);
    }
    free(hosts->list);
    *hosts = (hosts_t){0};
}

// --- Parsing -------------------------------------------------------------------------------------

static bool is_name(const char *text, size_t bytes)
{
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                  "._-:%";
    return bytes > 0 && text[0] != '-' && strspn(text, allowed) >= bytes;
}

static bool parse_slots(const char *text, size_t bytes, int *slots_p)
{
    long value = 0;
    for (size_t i = 0; i < bytes; i++) {
        if (text[i] < '0' || text[i] > '9' || value > MAX_SLOTS) {
            return false;
        }
        value = value * 10 + (text[i] - '0');
    }
    *slots_p = (int)value;
    return bytes > 0 && value > 0 && value <= MAX_SLOTS;
}

static hvd_status_t add_host(hosts_t *hosts, const char *user, size_t user_bytes, const char *name,
                             size_t name_bytes, int slots, err_t *err)
{
    if (slots > MAX_SLOTS) {
        return fail(err, HVD_INVALID_ARGUMENT, "more than %d slots", MAX_SLOTS);
    }
    host_t host = {.name = strndup(name, name_bytes), .slots = slots};
    if (asprintf(&host.target, "%.*s%.*s", (int)user_bytes, user, (int)name_bytes, name) < 0) {
        host.target = NULL;
    } else {
        host.target_hash = hash_bytes(host.target, strlen(host.target), 0);
    }
    // From the end: hostfiles with a line for each slot name the same host many times in a row.
    for (int i = hosts->n - 1; host.name != NULL && host.target != NULL && i >= 0; i--) {
        host_t *known = &hosts->list[i];
        if (known->target_hash == host.target_hash && strcmp(known->target, host.target) == 0) {
            bool is_right = slots <= MAX_SLOTS - known->slots;
            known->slots += is_right ? slots : 0;
            free(host.name);
            free(host.target);
            return is_right ? HVD_OK
                            : fail(err, HVD_INVALID_ARGUMENT, "host %s has more than %d slots",
                                   known->name, MAX_SLOTS);
        }
    }
    bool is_full = (hosts->n & (hosts->n - 1)) == 0; // room is for a power of two
    host_t *list = hosts->list;
    if (is_full) {
        list = realloc(list, 2 * (size_t)MAX(hosts->n, 1) * sizeof *list);
    }
    if (list != NULL) {
        hosts->list = list;
    }
    if (list == NULL || host.name == NULL || host.target == NULL) {
        free(host.name);
        free(host.target);
        return fail(err, HVD_NO_MEMORY, "no memory for the list of hosts");
    }
    list[hosts->n++] = host;
    return HVD_OK;
}

hvd_status_t hosts_add(hosts_t *hosts, const char *name, size_t bytes, int slots, err_t *err)
{
    if (!is_name(name, bytes)) {
        return fail(err, HVD_INVALID_ARGUMENT, "not a name of a host");
    }
    return add_host(hosts, name, 0, name, bytes, slots, err);
}

// [user@]name[:slots]; slots_p keeps its value where none are given.
static bool parse_host(const char *text, size_t bytes, const char **name_p, size_t *name_bytes_p,
                       size_t *user_bytes_p, int *slots_p)
{
    const char *end = text + bytes;
    const char *at = memchr(text, '@', bytes);
    const char *name = at != NULL ? at + 1 : text;
    const char *name_end, *rest;
    if (at == text) {
        return false;
    }
    if (name < end && *name == '[') {
        name_end = memchr(name, ']', (size_t)(end - name));
        if (name_end == NULL) {
            return false;
        }
        name++;
        rest = name_end + 1;
    } else {
        name_end = memchr(name, ':', (size_t)(end - name));
        name_end = name_end != NULL ? name_end : end;
        rest = name_end;
    }
    *name_p = name;
    *name_bytes_p = (size_t)(name_end - name);
    *user_bytes_p = at != NULL ? (size_t)(at + 1 - text) : 0;
    bool has_user = at == NULL || is_name(text, (size_t)(at - text));
    if (rest < end && (*rest != ':' || !parse_slots(rest + 1, (size_t)(end - rest - 1), slots_p))) {
        return false;
    }
    return has_user && is_name(name, *name_bytes_p);
}

hvd_status_t hosts_parse(const char *text, int bare_slots, hosts_t *hosts_p, err_t *err)
{
    hosts_t hosts = {0};
    hvd_status_t status = HVD_OK;
    for (const char *at = text; status == HVD_OK;) {
        size_t bytes = strcspn(at, ","), name_bytes, user_bytes;
        const char *name;
        int slots = bare_slots;
        if (!parse_host(at, bytes, &name, &name_bytes, &user_bytes, &slots)) {
            status =
                fail(err, HVD_INVALID_ARGUMENT, "Invalid host input \"%.*s\": " HOW_TO_NAME_HOSTS,
                     (int)MIN(bytes, 100), at);
        } else {
            status = add_host(&hosts, at, user_bytes, name, name_bytes, slots, err);
        }
        if (at[bytes] == '\0') {
            break;
        }
        at += bytes + 1;
    }
    if (status != HVD_OK) {
        hosts_free(&hosts);
        return status;
    }
    *hosts_p = hosts;
    return HVD_OK;
}

// One line without its comment: a host, then words like slots=2.
static hvd_status_t parse_line(hosts_t *hosts, const char *line, size_t bytes, const char *path,
                               int number, int bare_slots, err_t *err)
{
    static const char blanks[] = " \t\r";
    const char *end = line + bytes, *name;
    size_t name_bytes, user_bytes;
    int slots = bare_slots;
    line += strspn(line, blanks);
    if (line >= end) {
        return HVD_OK;
    }
    size_t word = MIN(strcspn(line, " \t\r\n#"), (size_t)(end - line));
    bool is_right = parse_host(line, word, &name, &name_bytes, &user_bytes, &slots);
    for (const char *at = line + word; is_right;) {
        at += strspn(at, blanks);
        if (at >= end) {
            break;
        }
        size_t left = MIN(strcspn(at, " \t\r\n#"), (size_t)(end - at));
        int ignored;
        if (strncmp(at, "slots=", 6) == 0) {
            is_right = parse_slots(at + 6, left - 6, &slots);
        } else {
            is_right = (strncmp(at, "max_slots=", 10) == 0 || strncmp(at, "max-slots=", 10) == 0) &&
                       parse_slots(at + 10, left - 10, &ignored);
        }
        at += left;
    }
    if (!is_right) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "Invalid host input in %s, line %d: \"%.*s\"; expected \"host slots=2\" or "
                    "\"host:2\"",
                    path, number, (int)MIN((size_t)(end - line), 100), line);
    }
    return add_host(hosts, line, user_bytes, name, name_bytes, slots, err);
}

hvd_status_t hostfile_parse(const char *text, const char *path, int bare_slots, hosts_t *hosts_p,
                            err_t *err)
{
    hosts_t hosts = {0};
    int number = 0;
    for (const char *at = text; *at != '\0';) {
        size_t bytes = strcspn(at, "\n");
        size_t without_comment = MIN(bytes, strcspn(at, "#"));
        hvd_status_t status =
            parse_line(&hosts, at, without_comment, path, ++number, bare_slots, err);
        if (status != HVD_OK) {
            hosts_free(&hosts);
            return status;
        }
        at += bytes + (at[bytes] == '\n');
    }
    if (hosts.n == 0) {
        return fail(err, HVD_INVALID_ARGUMENT, "the hostfile %s names no hosts", path);
    }
    *hosts_p = hosts;
    return HVD_OK;
}

hvd_status_t hostfile_text(const char *path, buf_t *text, err_t *err)
{
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return fail_errno(err, errno, "cannot open the hostfile %s", path);
    }
    for (size_t n = 1; n > 0 && text->len < HOSTFILE_LIMIT && buf_reserve(text, 4096);) {
        n = fread(text->data + text->len, 1, 4096, file);
        text->len += n;
    }
    buf_append(text, "", 1);
    bool is_read = !ferror(file) && !text->failed;
    fclose(file);
    return is_read ? HVD_OK : fail(err, HVD_SYSTEM, "cannot read the hostfile %s", path);
}

static hvd_status_t hostfile_read(const char *path, int bare_slots, hosts_t *hosts_p, err_t *err)
{
    buf_t text = {0};
    hvd_status_t status = hostfile_text(path, &text, err);
    if (status == HVD_OK) {
        status = hostfile_parse((const char *)text.data, path, bare_slots, hosts_p, err);
    }
    buf_free(&text);
    return status;
}

hvd_status_t hosts_choose(const options_t *options, hosts_t *hosts_p, err_t *err)
{
    int bare_slots = (int)options->slots_per_host;
    if (options->hostfile[0] != '\0') {
        return hostfile_read(options->hostfile, bare_slots, hosts_p, err);
    }
    if (options->hosts[0] != '\0') {
        return hosts_parse(options->hosts, bare_slots, hosts_p, err);
    }
    if (!options_want_elastic(options)) {
        hosts_t found = {0};
        hvd_status_t status = scheduler_hosts(options, &found, err);
        if (status != HVD_OK || found.n > 0) {
            *hosts_p = found;
            return status;
        }
    }
    if (options->num_proc == 0) {
        return fail(
            err, HVD_INVALID_ARGUMENT,
            "the number of ranks is missing; give -np, for example: %s -np 4 python train.py",
            PROGRAM);
    }
    return hosts_parse("localhost", (int)options->num_proc, hosts_p, err);
}

// --- Which are local -----------------------------------------------------------------------------

static bool same_address(const struct sockaddr *a, const struct sockaddr *b)
{
    if (a == NULL || a->sa_family != b->sa_family) {
        return false;
    }
    if (a->sa_family == AF_INET) {
        const struct sockaddr_in *one = (const void *)a, *other = (const void *)b;
        return one->sin_addr.s_addr == other->sin_addr.s_addr;
    }
    if (a->sa_family == AF_INET6) {
        const struct sockaddr_in6 *one = (const void *)a, *other = (const void *)b;
        return memcmp(&one->sin6_addr, &other->sin6_addr, sizeof one->sin6_addr) == 0;
    }
    return false;
}

static bool is_loopback(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET) {
        const struct sockaddr_in *v4 = (const void *)address;
        return ntohl(v4->sin_addr.s_addr) >> 24 == 127;
    }
    const struct sockaddr_in6 *v6 = (const void *)address;
    return address->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
}

static bool is_own_address(const struct sockaddr *address, const struct ifaddrs *interfaces)
{
    for (; interfaces != NULL; interfaces = interfaces->ifa_next) {
        if (same_address(interfaces->ifa_addr, address)) {
            return true;
        }
    }
    return is_loopback(address);
}

static bool resolves_here(const char *name, const struct ifaddrs *interfaces)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    bool is_here = false;
    if (getaddrinfo(name, NULL, &hints, &found) != 0) {
        return false;
    }
    for (struct addrinfo *at = found; at != NULL && !is_here; at = at->ai_next) {
        is_here = is_own_address(at->ai_addr, interfaces);
    }
    freeaddrinfo(found);
    return is_here;
}

// What the threads that look names up share.
typedef struct lookup {
    hosts_t *hosts;
    const struct ifaddrs *interfaces;
    char own_name[256];
    atomic_int next;
} lookup_t;

static void *look_up(void *arg)
{
    lookup_t *lookup = arg;
    for (int i; (i = atomic_fetch_add(&lookup->next, 1)) < lookup->hosts->n;) {
        host_t *host = &lookup->hosts->list[i];
        host->is_local = host->is_local || strcmp(host->name, "localhost") == 0 ||
                         strcmp(host->name, lookup->own_name) == 0 ||
                         resolves_here(host->name, lookup->interfaces);
    }
    return NULL;
}

// A resolver that does not answer takes its time for every name: ask for many at once.
void hosts_find_local(const options_t *options, hosts_t *hosts)
{
    lookup_t lookup = {.hosts = hosts};
    struct ifaddrs *interfaces = NULL;
    pthread_t threads[MAX_LOOKUPS];
    int n_threads = 0;
    gethostname(lookup.own_name, sizeof lookup.own_name - 1);
    for (int i = 0; i < hosts->n && options->await_agents >= 0; i++) {
        const char *name = hosts->list[i].name;
        hosts->list[i].is_local =
            strcmp(name, "localhost") == 0 || strcmp(name, lookup.own_name) == 0;
    }
    if (hosts->knows_local || options->await_agents >= 0) {
        return;
    }
    if (getifaddrs(&interfaces) != 0) {
        interfaces = NULL;
    }
    lookup.interfaces = interfaces;
    while (n_threads < MIN(hosts->n - 1, MAX_LOOKUPS) &&
           pthread_create(&threads[n_threads], NULL, look_up, &lookup) == 0) {
        n_threads++;
    }
    look_up(&lookup);
    for (int i = 0; i < n_threads; i++) {
        pthread_join(threads[i], NULL);
    }
    freeifaddrs(interfaces);
}

// --- Our own addresses ---------------------------------------------------------------------------

static bool is_listed(const char *name, const char *nics)
{
    size_t bytes = strlen(name);
    if (nics[0] == '\0') {
        return true;
    }
    for (const char *at = nics; *at != '\0';) {
        size_t word = strcspn(at, ",");
        if (word == bytes && strncmp(at, name, bytes) == 0) {
            return true;
        }
        at += word + (at[word] == ',');
    }
    return false;
}

static void add_address(const struct sockaddr *address, buf_t *list)
{
    char text[NI_MAXHOST];
    socklen_t bytes =
        address->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
    if (getnameinfo(address, bytes, text, sizeof text, NULL, 0, NI_NUMERICHOST) == 0) {
        if (list->len > 0) {
            buf_append(list, ",", 1);
        }
        buf_append(list, text, strlen(text));
    }
}

static bool is_usable(const struct ifaddrs *at, int family, const char *nics)
{
    bool is_up =
        (at->ifa_flags & IFF_UP) != 0 && at->ifa_addr != NULL && at->ifa_addr->sa_family == family;
    bool wants_loopback = nics[0] != '\0';
    if (!is_up || !is_listed(at->ifa_name, nics)) {
        return false;
    }
    if (family == AF_INET6) {
        const struct sockaddr_in6 *v6 = (const void *)at->ifa_addr;
        if (IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr)) {
            return false; // its scope has another number on other hosts
        }
    }
    return wants_loopback || !is_loopback(at->ifa_addr);
}

hvd_status_t own_addresses(const char *nics, buf_t *list, err_t *err)
{
    static const int families[] = {AF_INET, AF_INET6};
    struct ifaddrs *interfaces;
    if (getifaddrs(&interfaces) != 0) {
        return fail_errno(err, errno, "cannot list the network interfaces");
    }
    for (size_t f = 0; f < N_ELEMENTS(families); f++) {
        for (struct ifaddrs *at = interfaces; at != NULL; at = at->ifa_next) {
            if (is_usable(at, families[f], nics)) {
                add_address(at->ifa_addr, list);
            }
        }
    }
    freeifaddrs(interfaces);
    if (list->len == 0) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    nics[0] != '\0' ? "none of --network-interfaces %s is up on this host and has "
                                      "an address; \"ip address\" lists the interfaces"
                                    : "no network interface%s of this host is up and has an "
                                      "address that other hosts can reach",
                    nics);
    }
    buf_append(list, "", 1);
    return list->failed ? fail(err, HVD_NO_MEMORY, "no memory for addresses") : HVD_OK;
}

bool options_await_at_one(const options_t *options)
{
    const char *address = options->await_address;
    return address[0] != '\0' && strcmp(address, "0.0.0.0") != 0 && strcmp(address, "::") != 0;
}

hvd_status_t job_addresses(const options_t *options, bool is_local, bool may_be_alone,
                           char **addresses_p, err_t *err)
{
    const char *nics = options->network_interfaces;
    const char *known = options_await_at_one(options) ? options->await_address
                        : is_local && nics[0] == '\0' ? "127.0.0.1"
                                                      : NULL;
    buf_t list = {0};
    if (known == NULL) {
        hvd_status_t status = own_addresses(nics, &list, err);
        if (status != HVD_OK && (nics[0] != '\0' || !may_be_alone)) {
            buf_free(&list);
            return status;
        }
        known = status != HVD_OK ? "127.0.0.1" : NULL;
    }
    if (known != NULL) {
        buf_clear(&list);
        buf_append(&list, known, strlen(known) + 1);
    }
    *addresses_p = (char *)list.data;
    return list.failed ? fail(err, HVD_NO_MEMORY, "no memory for addresses") : HVD_OK;
}
