// SPDX-License-Identifier: Apache-2.0
//
// tcp_addr.c - interfaces of this host, what a rank tells others about itself, and the order in
// which a peer's addresses are tried.
//
// A rank offers every address it listens at; nobody can know from here which of them a peer can
// reach. Addresses are also not unique: every host has 127.0.0.1, and hosts with containers often
// share one such as 172.17.0.1. So order is only a matter of speed; what decides is the handshake.
// Pure, except tcp_list_ifaces, which asks the system.
#define _GNU_SOURCE
#include "net/tcp.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <stdio.h>

#define OFFER_VERSION 1

static size_t ip_bytes(int family)
{
    return family == AF_INET6 ? 16 : 4;
}

// --- Text and sockets ----------------------------------------------------------------------------

void tcp_ip_text(const tcp_addr_t *addr, char text[TCP_ADDR_TEXT])
{
    inet_ntop(addr->family, addr->ip, text, TCP_ADDR_TEXT);
}

void tcp_addr_text(const tcp_addr_t *addr, char text[TCP_ADDR_TEXT])
{
    char ip[TCP_ADDR_TEXT];
    tcp_ip_text(addr, ip);
    snprintf(text, TCP_ADDR_TEXT, addr->family == AF_INET6 ? "[%s]:%u" : "%s:%u", ip, addr->port);
}

socklen_t tcp_addr_to_socket(const tcp_addr_t *addr, struct sockaddr_storage *out)
{
    memset(out, 0, sizeof *out);
    if (addr->family == AF_INET) {
        struct sockaddr_in *v4 = (struct sockaddr_in *)out;
        v4->sin_family = AF_INET;
        v4->sin_port = htons(addr->port);
        memcpy(&v4->sin_addr, addr->ip, 4);
        return sizeof *v4;
    }
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)out;
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(addr->port);
    memcpy(&v6->sin6_addr, addr->ip, 16);
    return sizeof *v6;
}

tcp_addr_t tcp_addr_of_socket(const struct sockaddr_storage *in)
{
    tcp_addr_t addr = {.family = in->ss_family == AF_INET6 ? AF_INET6 : AF_INET};
    if (addr.family == AF_INET) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)in;
        addr.port = ntohs(v4->sin_port);
        memcpy(addr.ip, &v4->sin_addr, 4);
    } else {
        const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)in;
        addr.port = ntohs(v6->sin6_port);
        memcpy(addr.ip, &v6->sin6_addr, 16);
    }
    return addr;
}

// --- Interfaces ----------------------------------------------------------------------------------

// Whether a comma-separated list contains a name.
static bool list_has(const char *list, const char *name)
{
    size_t name_bytes = strlen(name);
    while (*(list += strspn(list, ", ")) != '\0') {
        size_t bytes = strcspn(list, ", ");
        if (bytes == name_bytes && memcmp(list, name, bytes) == 0) {
            return true;
        }
        list += bytes;
    }
    return false;
}

// Up, IPv4 or IPv6, and not bound to one cable (link-local needs an interface index to be reached).
static bool is_usable(const struct ifaddrs *entry)
{
    if (entry->ifa_addr == NULL || entry->ifa_netmask == NULL || (entry->ifa_flags & IFF_UP) == 0) {
        return false;
    }
    if (entry->ifa_addr->sa_family == AF_INET6) {
        const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)entry->ifa_addr;
        return !IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr);
    }
    return entry->ifa_addr->sa_family == AF_INET;
}

static tcp_iface_t iface_of(const struct ifaddrs *entry)
{
    struct sockaddr_storage addr = {0}, mask = {0};
    bool is_v4 = entry->ifa_addr->sa_family == AF_INET;
    size_t bytes = is_v4 ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
    tcp_iface_t iface = {.is_loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0};
    memcpy(&addr, entry->ifa_addr, bytes);
    memcpy(&mask, entry->ifa_netmask, bytes);
    mask.ss_family = addr.ss_family;
    snprintf(iface.name, sizeof iface.name, "%s", entry->ifa_name);
    iface.addr = tcp_addr_of_socket(&addr);
    tcp_addr_t mask_ip = tcp_addr_of_socket(&mask);
    for (size_t i = 0; i < ip_bytes(iface.addr.family); i++) {
        iface.prefix_bits += __builtin_popcount(mask_ip.ip[i]);
    }
    return iface;
}

static hvd_status_t fail_no_iface(const struct ifaddrs *entries, const char *wanted, err_t *err)
{
    char names[512] = "";
    size_t len = 0;
    for (const struct ifaddrs *e = entries; e != NULL && len < sizeof names; e = e->ifa_next) {
        if (is_usable(e) && !list_has(names, e->ifa_name)) {
            len += (size_t)snprintf(names + len, sizeof names - len, "%s%s", len > 0 ? ", " : "",
                                    e->ifa_name);
        }
    }
    return fail(err, HVD_INVALID_ARGUMENT,
                "no network interface %s%.200s; up with an address are: %s; "
                "check HOROVOD_GLOO_IFACE",
                wanted[0] != '\0' ? "is called " : "is up", wanted,
                names[0] != '\0' ? names : "none");
}

hvd_status_t tcp_list_ifaces(const char *wanted, bool only_loopback,
                             tcp_iface_t ifaces[TCP_MAX_ADDRS], int *n_p, err_t *err)
{
    struct ifaddrs *entries = NULL;
    hvd_status_t status = HVD_OK;
    int n = 0;
    wanted = wanted != NULL ? wanted : "";
    if (getifaddrs(&entries) != 0) {
        return fail_errno(err, errno, "cannot list the network interfaces");
    }
    for (int loopback = 0; loopback < 2; loopback++) {
        for (const struct ifaddrs *e = entries; e != NULL && n < TCP_MAX_ADDRS; e = e->ifa_next) {
            if (is_usable(e) && ((e->ifa_flags & IFF_LOOPBACK) != 0) == (loopback == 1) &&
                (wanted[0] == '\0' || list_has(wanted, e->ifa_name))) {
                ifaces[n++] = iface_of(e);
            }
        }
    }
    int first = 0;
    while (only_loopback && wanted[0] == '\0' && first < n && !ifaces[first].is_loopback) {
        first++;
    }
    if (n == 0) {
        status = fail_no_iface(entries, wanted, err);
    } else if (first < n) { // else loopback is down, and the others must do
        memmove(ifaces, ifaces + first, (size_t)(n -= first) * sizeof *ifaces);
    }
    *n_p = n;
    freeifaddrs(entries);
    return status;
}

// --- Offers --------------------------------------------------------------------------------------

void tcp_offer_encode(const tcp_offer_t *offer, buf_t *out)
{
    put_u8(out, OFFER_VERSION);
    put_u8(out, (uint8_t)offer->encrypt);
    put_bytes(out, offer->token, sizeof offer->token);
    put_varint(out, (uint64_t)offer->n_addrs);
    for (int i = 0; i < offer->n_addrs; i++) {
        const tcp_addr_t *addr = &offer->addrs[i];
        put_u8(out, addr->family == AF_INET6 ? 6 : 4);
        put_bytes(out, addr->ip, ip_bytes(addr->family));
        put_u16(out, addr->port);
    }
}

hvd_status_t tcp_offer_decode(const uint8_t *data, size_t bytes, int rank, tcp_offer_t *offer_p,
                              err_t *err)
{
    reader_t r = reader_of(data, bytes);
    tcp_offer_t offer = {0};
    bool readable = get_u8(&r) == OFFER_VERSION;
    offer.encrypt = get_u8(&r);
    const uint8_t *token = get_bytes(&r, sizeof offer.token);
    offer.n_addrs = (int)get_count(&r, TCP_MAX_ADDRS);
    for (int i = 0; i < offer.n_addrs; i++) {
        tcp_addr_t *addr = &offer.addrs[i];
        uint8_t family = get_u8(&r);
        addr->family = family == 6 ? AF_INET6 : AF_INET;
        const uint8_t *ip = get_bytes(&r, ip_bytes(addr->family));
        addr->port = get_u16(&r);
        readable = readable && (family == 4 || family == 6);
        if (!r.bad) {
            memcpy(addr->ip, ip, ip_bytes(addr->family));
        }
    }
    if (!readable || r.bad || reader_left(&r) > 0 || offer.n_addrs == 0) {
        return fail(
            err, HVD_PROTOCOL,
            "rank %d sent a malformed TCP address; run the same version of the library everywhere",
            rank);
    }
    memcpy(offer.token, token, sizeof offer.token);
    *offer_p = offer;
    return HVD_OK;
}

// --- Order ---------------------------------------------------------------------------------------

static bool is_loopback(const tcp_addr_t *addr)
{
    static const uint8_t v6_loopback[16] = {[15] = 1};
    return addr->family == AF_INET ? addr->ip[0] == 127 : memcmp(addr->ip, v6_loopback, 16) == 0;
}

static bool in_subnet(const tcp_addr_t *addr, const tcp_iface_t *iface)
{
    if (addr->family != iface->addr.family || iface->is_loopback) {
        return false;
    }
    for (int bit = 0; bit < iface->prefix_bits; bit += 8) {
        int n_bits = MIN(8, iface->prefix_bits - bit);
        uint8_t mask = (uint8_t)(0xff00u >> n_bits);
        if ((addr->ip[bit / 8] ^ iface->addr.ip[bit / 8]) & mask) {
            return false;
        }
    }
    return true;
}

static int distance(const tcp_addr_t *addr, const tcp_iface_t *ifaces, int n_ifaces, bool same_host)
{
    if (is_loopback(addr)) {
        return same_host ? 0 : 3;
    }
    for (int i = 0; i < n_ifaces; i++) {
        if (in_subnet(addr, &ifaces[i])) {
            return 1;
        }
    }
    return 2;
}

// Insertion sort: stable, and the list is short.
void tcp_sort_addrs(tcp_addr_t *addrs, int n, const tcp_iface_t *ifaces, int n_ifaces,
                    bool same_host)
{
    for (int i = 1; i < n; i++) {
        tcp_addr_t moving = addrs[i];
        int moving_distance = distance(&moving, ifaces, n_ifaces, same_host);
        int at = i;
        while (at > 0 && distance(&addrs[at - 1], ifaces, n_ifaces, same_host) > moving_distance) {
            addrs[at] = addrs[at - 1];
            at--;
        }
        addrs[at] = moving;
    }
}
