// SPDX-License-Identifier: Apache-2.0
//
// tcp_dial.c - which of a peer's addresses works.
//
// A peer offers several addresses; some are unreachable from here, some answer with silence, some
// belong to another host altogether. So the most promising one is tried first, the next after
// STAGGER_NS or as soon as one fails, up to N_ATTEMPTS at a time. Several may finish the handshake,
// which only the right rank of the right job can; that rank lets in the first and no other
// (greeting.c), so both sides mean the same connection. One that has proved the secret may have
// been let in already: it is not given up before it ends. When all have failed the list is tried
// again after a pause, until the link's deadline: a full backlog looks like a refusal.
// Cost: one socket in the usual case. The link owns its dial, the dial its attempts.
#include "net/tcp.h"

#include <stdio.h>
#include <stdlib.h>

#define N_ATTEMPTS 4
#define STAGGER_NS (200 * NS_PER_MS)
#define SHORTEST_PAUSE_NS (50 * NS_PER_MS)
#define LONGEST_PAUSE_NS NS_PER_S
// An attempt that says nothing for this long gives its place to an address not tried yet.
#define MUTE_NS NS_PER_S
#define WHY_BYTES 160

struct dial {
    tcp_offer_t offer; // addresses in the order of trying
    conn_t *attempts[N_ATTEMPTS];
    int next; // address to try next; n_addrs: all tried
    uint64_t next_ns;
    uint64_t pause_ns;
    char why[TCP_MAX_ADDRS][WHY_BYTES]; // each address's last failure; "": none yet
};

hvd_status_t dial_new(tcp_link_t *link, err_t *err)
{
    domain_t *domain = link->domain;
    dial_t *dial = calloc(1, sizeof *dial);
    if (dial == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to connect to rank %d", link->base.peer);
    }
    hvd_status_t status = tcp_offer_of(domain, link->base.peer, &dial->offer, err);
    if (status != HVD_OK) {
        free(dial);
        return status;
    }
    tcp_sort_addrs(dial->offer.addrs, dial->offer.n_addrs, domain->ifaces, domain->n_ifaces,
                   tcp_same_host(domain, link->base.peer));
    dial->pause_ns = SHORTEST_PAUSE_NS;
    link->dial = dial;
    return HVD_OK;
}

void dial_free(tcp_link_t *link)
{
    dial_t *dial = link->dial;
    for (int i = 0; dial != NULL && i < N_ATTEMPTS; i++) {
        if (dial->attempts[i] != NULL) {
            conn_close(dial->attempts[i]);
        }
    }
    free(dial);
    link->dial = NULL;
}

static int slot_of(const dial_t *dial, const conn_t *conn)
{
    for (int i = 0; i < N_ATTEMPTS; i++) {
        if (dial->attempts[i] == conn) {
            return i;
        }
    }
    return -1;
}

// Begins with the next address in a free slot.
static void begin_attempt(tcp_link_t *link, int slot, uint64_t now_ns)
{
    dial_t *dial = link->dial;
    int address = dial->next++;
    err_t err;
    conn_t *conn = conn_dial(link, &dial->offer.addrs[address], dial->offer.token, &err);
    if (conn == NULL) {
        snprintf(dial->why[address], WHY_BYTES, "%.*s", WHY_BYTES - 1, err.text);
        return;
    }
    conn->address = address;
    dial->attempts[slot] = conn;
    dial->next_ns = now_ns + STAGGER_NS;
}

static void give_up(dial_t *dial, conn_t *conn, const char *why)
{
    snprintf(dial->why[conn->address], WHY_BYTES, "%.*s", WHY_BYTES - 1, why);
    dial->attempts[slot_of(dial, conn)] = NULL;
    conn_close(conn);
}

static bool has_attempts(const dial_t *dial)
{
    bool any = false;
    for (int i = 0; i < N_ATTEMPTS; i++) {
        any |= dial->attempts[i] != NULL;
    }
    return any;
}

// The oldest whom nobody can have let in yet; NULL: there is none.
static conn_t *oldest_unproved(const dial_t *dial)
{
    conn_t *oldest = NULL;
    for (int i = 0; i < N_ATTEMPTS; i++) {
        conn_t *conn = dial->attempts[i];
        if (conn != NULL && !conn->greeting.has_proved &&
            (oldest == NULL || conn->started_ns < oldest->started_ns)) {
            oldest = conn;
        }
    }
    return oldest;
}

void dial_tick(tcp_link_t *link, uint64_t now_ns)
{
    dial_t *dial = link->dial;
    while (dial->next < dial->offer.n_addrs && now_ns >= dial->next_ns) {
        int slot = slot_of(dial, NULL);
        if (slot < 0) {
            conn_t *oldest = oldest_unproved(dial);
            if (oldest == NULL || now_ns - oldest->started_ns < MUTE_NS) {
                return;
            }
            slot = slot_of(dial, oldest);
            give_up(dial, oldest, "no answer");
        }
        begin_attempt(link, slot, now_ns);
    }
    if (dial->next == dial->offer.n_addrs && !has_attempts(dial)) {
        dial->next = 0;
        dial->next_ns = now_ns + dial->pause_ns;
        dial->pause_ns = MIN(2 * dial->pause_ns, LONGEST_PAUSE_NS);
    }
}

void dial_failed(conn_t *conn, const err_t *err)
{
    tcp_link_t *link = conn->link;
    uint64_t now_ns = clock_ns();
    give_up(link->dial, conn, err->text);
    link->dial->next_ns = MIN(link->dial->next_ns, now_ns);
    dial_tick(link, now_ns);
}

void dial_won(conn_t *conn)
{
    tcp_link_t *link = conn->link;
    link->dial->attempts[slot_of(link->dial, conn)] = NULL;
    dial_free(link);
    tcp_link_ready(link, conn);
}

// Why an address has not worked so far.
static const char *reason(const dial_t *dial, int address)
{
    for (int i = 0; i < N_ATTEMPTS; i++) {
        if (dial->attempts[i] != NULL && dial->attempts[i]->address == address) {
            return "no answer";
        }
    }
    return dial->why[address][0] != '\0' ? dial->why[address] : "not tried";
}

void dial_explain(const tcp_link_t *link, char *text, size_t bytes)
{
    const dial_t *dial = link->dial;
    size_t len = 0;
    text[0] = '\0';
    for (int i = 0; i < dial->offer.n_addrs && len < bytes; i++) {
        char name[TCP_ADDR_TEXT];
        tcp_addr_text(&dial->offer.addrs[i], name);
        int n =
            snprintf(text + len, bytes - len, "%s%s: %s", i > 0 ? "; " : "", name, reason(dial, i));
        len += n > 0 ? (size_t)n : 0;
    }
}
