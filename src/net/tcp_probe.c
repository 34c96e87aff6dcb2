// SPDX-License-Identifier: Apache-2.0
//
// tcp_probe.c - notices a cut network while the kernel still hopes.
//
// A kernel goes on sending again for a quarter of an hour. Its own limit (TCP_USER_TIMEOUT) cannot
// be set low: it also ends connections whose receiver is alive but does not read, such as a process
// that is stopped for a while. What tells a cut from that is the peer's kernel, which acknowledges
// as long as packets get through, whatever its processes do. So a few times a second each
// connection is asked how much of what it sent was acknowledged: something is under way and that
// number stands still for HOROVOD_NETWORK_TIMEOUT_SECONDS, then the way there, or the way back, is
// cut. Heartbeats (coord/heartbeat.c) see to it that control links always have something under way.
// Which way it is: a peer whose packets arrive, if only the same again and again, lacks our
// answers. Small packets that get through while large ones do not: neither is cut, but the path
// takes smaller ones than this host believes.
//
// A network may be back while TCP still waits for its turn to try again, which it does after twice
// as long each time. So nobody is given up before a packet must have been sent after the limit, and
// gone without an answer; and where the kernel allows it, it tries once a second (TCP_RTO_MAX_MS).
//
// Cost: one system call per open connection and half second.
// Thread: the holder of the engine.
#include "net/tcp.h"

#include <errno.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <unistd.h>

#define PROBES_PER_TIMEOUT 6
#define UNANSWERED_PROBES 2

static bool ask(const conn_t *conn, struct tcp_info *info_p)
{
    socklen_t bytes = sizeof *info_p;
    memset(info_p, 0, sizeof *info_p);
    return getsockopt(conn->watch.fd, IPPROTO_TCP, TCP_INFO, info_p, &bytes) == 0 &&
           bytes >= offsetof(struct tcp_info, tcpi_notsent_bytes) + sizeof(uint32_t);
}

// --- Knocking ------------------------------------------------------------------------------------

// Asks for one more connection shortly before one is given up: small packets both ways, which any
// path takes.
static void knock(conn_t *conn)
{
    struct sockaddr_storage name;
    socklen_t name_bytes = tcp_addr_to_socket(&conn->remote, &name);
    int fd = socket(conn->remote.family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    bool is_asked = fd >= 0 && connect(fd, (struct sockaddr *)&name, name_bytes) != 0 &&
                    errno == EINPROGRESS; // the answer is looked at later
    if (is_asked) {
        fd_not_for_children(fd);
        conn->knock_fd = fd;
    } else if (fd >= 0) {
        close(fd);
    }
}

// Even "refused" is an answer.
static bool is_answered(const conn_t *conn)
{
    struct pollfd polled = {.fd = conn->knock_fd, .events = POLLOUT};
    int code = 0;
    socklen_t bytes = sizeof code;
    return conn->knock_fd >= 0 && poll(&polled, 1, 0) == 1 &&
           getsockopt(conn->knock_fd, SOL_SOCKET, SO_ERROR, &code, &bytes) == 0 &&
           (code == 0 || code == ECONNREFUSED);
}

void tcp_stop_knocking(conn_t *conn)
{
    if (conn->knock_fd >= 0) {
        fd_close(conn->knock_fd);
        conn->knock_fd = -1;
    }
}

// --- Giving up -----------------------------------------------------------------------------------

// Packets counted at the second probe or later came after the cut.
static void give_up(tcp_link_t *link, const struct tcp_info *info, uint64_t now_ns,
                    uint64_t interval_ns)
{
    const net_job_t *job = link->domain->job;
    const conn_t *conn = link->conn;
    char name[TCP_ADDR_TEXT], who[PEER_TEXT_BYTES];
    double seconds = (double)(now_ns - conn->acked_ns) / (double)NS_PER_S;
    bool is_heard = conn->heard_ns > conn->acked_ns + interval_ns * 3 / 2;
    err_t err;
    tcp_addr_text(&link->conn->remote, name);
    peer_name(job->peers, link->base.peer, who);
    if (is_answered(conn)) {
        fail(&err, HVD_PEER_LOST,
             "%s at %s gets small packets but no large ones: none of %u bytes has been "
             "acknowledged for %.1f s. Something on the way takes only smaller packets and does "
             "not say so (an MTU black hole): lower the MTU of the interface on both hosts (ip "
             "link set dev NAME mtu 1400), or let ICMP pass (HOROVOD_NETWORK_TIMEOUT_SECONDS)",
             who, name, (unsigned)info->tcpi_snd_mss, seconds);
    } else if (is_heard) {
        fail(&err, HVD_PEER_LOST,
             "%s at %s cannot be reached: its packets still arrive, but nothing sent to it has "
             "been acknowledged for %.1f s; the network is cut on the way from rank %d to it. "
             "Look for a firewall or a failed link (HOROVOD_NETWORK_TIMEOUT_SECONDS)",
             who, name, seconds, job->rank);
    } else {
        fail(&err, HVD_PEER_LOST,
             "%s at %s cannot be reached: no packet from it for %.1f s; its host is down, or the "
             "network is cut on the way from it to rank %d. Look for a firewall or a failed link "
             "(HOROVOD_NETWORK_TIMEOUT_SECONDS)",
             who, name, seconds, job->rank);
    }
    tcp_link_cut(link, &err);
}

// Sent and not acknowledged; or, where packets cannot even leave this host, held back while probes
// go unanswered. A receiver that only does not read answers its probes.
static bool has_unanswered(const struct tcp_info *info)
{
    return info->tcpi_unacked > 0 ||
           (info->tcpi_notsent_bytes > 0 && info->tcpi_probes >= UNANSWERED_PROBES);
}

// From the last acknowledgement to when silence is certain: the limit, until the kernel tries
// again, and until that is answered.
static uint64_t patience_ns(const struct tcp_info *info, uint64_t timeout_ns, uint64_t interval_ns)
{
    return timeout_ns + MIN(info->tcpi_rto * NS_PER_US, 2 * timeout_ns) + interval_ns;
}

static void look(tcp_link_t *link, uint64_t now_ns, uint64_t timeout_ns, uint64_t interval_ns)
{
    conn_t *conn = link->conn;
    struct tcp_info info;
    if (!ask(conn, &info)) {
        return;
    }
    if (info.tcpi_segs_in != conn->n_segments) {
        conn->n_segments = info.tcpi_segs_in;
        conn->heard_ns = now_ns;
    }
    if (!has_unanswered(&info) || info.tcpi_bytes_acked != conn->n_acked_bytes ||
        conn->acked_ns == 0) {
        conn->n_acked_bytes = info.tcpi_bytes_acked;
        conn->acked_ns = now_ns;
        tcp_stop_knocking(conn);
        return;
    }
    uint64_t silent_ns = now_ns - conn->acked_ns;
    uint64_t limit_ns = patience_ns(&info, timeout_ns, interval_ns);
    if (silent_ns >= limit_ns) {
        give_up(link, &info, now_ns, interval_ns);
    } else if (silent_ns + 2 * interval_ns >= limit_ns && conn->knock_fd < 0) {
        knock(conn);
    }
}

void tcp_probe(domain_t *domain, uint64_t now_ns)
{
    uint64_t timeout_ns = (uint64_t)(domain->job->config->cut_timeout * (double)NS_PER_S);
    uint64_t interval_ns = timeout_ns / PROBES_PER_TIMEOUT;
    if (now_ns < domain->next_probe_ns || domain->seats == NULL) {
        return;
    }
    domain->next_probe_ns = now_ns + interval_ns;
    for (size_t i = 0; i < (size_t)domain->job->size * N_LANES; i++) {
        tcp_link_t *link = domain->seats[i].link;
        if (link != NULL && link->conn != NULL && link->base.err.status == HVD_OK) {
            look(link, now_ns, timeout_ns, interval_ns);
        }
    }
}
