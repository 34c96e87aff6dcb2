// SPDX-License-Identifier: Apache-2.0
//
// tcp_addr.h - IP addresses and the interfaces of this host, for every transport that needs them.
//
// Pure, except tcp_list_ifaces, which asks the system. Any thread.
#ifndef HVD_NET_TCP_ADDR_H
#define HVD_NET_TCP_ADDR_H

#include "base/base.h"

#include <net/if.h>

#define TCP_MAX_ADDRS 32
#define TCP_ADDR_TEXT 56 // "[ipv6]:port"

typedef struct tcp_addr {
    int family; // AF_INET or AF_INET6
    uint16_t port;
    uint8_t ip[16]; // network order; AF_INET uses 4
} tcp_addr_t;

typedef struct tcp_iface {
    char name[IF_NAMESIZE];
    tcp_addr_t addr;
    int prefix_bits;
    bool is_loopback;
} tcp_iface_t;

// Addresses of the interfaces named in `wanted` (empty: all that are up), loopback last.
hvd_status_t tcp_list_ifaces(const char *wanted, bool only_loopback,
                             tcp_iface_t ifaces[TCP_MAX_ADDRS], int *n_p, err_t *err);
void tcp_addr_text(const tcp_addr_t *addr, char text[TCP_ADDR_TEXT]);
void tcp_ip_text(const tcp_addr_t *addr, char text[TCP_ADDR_TEXT]); // without the port

#endif
