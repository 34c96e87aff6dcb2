// SPDX-License-Identifier: Apache-2.0
//
// rendezvous.c - a rendezvous that rank 0 hosts: horovodrun has not started one, so rank 0 runs it
// in its own process until every rank has started.
//
// The ticket tells the others how to get there: "hvd1/<secret>/<port>/<address>,<address>,...". It
// offers every address of rank 0's host (HOROVOD_GLOO_IFACE chooses interfaces), loopback last:
// nobody knows which of them a peer can reach, and only the right server can prove the secret.
// Where the launcher says that all ranks are on one host, it offers loopback only. A ticket is a
// secret: it travels through the launcher's own channel and is wiped wherever it was.
//
// Kept tickets are the only thing that outlives a context. The process's table of descriptors holds
// them, where a later init finds them by name: the library has no state of its own.
#define _GNU_SOURCE
#include "boot/launcher.h"
#include "net/tcp.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#define TICKET_MARK "hvd1/"
#define MARK_BYTES (sizeof(TICKET_MARK) - 1)
#define MAX_PORT 65535
#define KEPT_NAME "hvd-ticket"
#define KEPT_LINK "/memfd:" KEPT_NAME " (deleted)" // as /proc shows it
#define SEALS (F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK)

// --- Tickets -------------------------------------------------------------------------------------

void ticket_encode(const ticket_t *ticket, char text[TICKET_BYTES])
{
    size_t len = MARK_BYTES + SECRET_DIGITS;
    memcpy(text, TICKET_MARK, MARK_BYTES);
    secret_encode(ticket->secret, text + MARK_BYTES);
    snprintf(text + len, TICKET_BYTES - len, "/%d/%s", ticket->port, ticket->addresses);
}

// Numeric addresses and names, separated by single commas.
static bool addresses_are_valid(const char *text)
{
    static const char letters[] = "0123456789abcdefghijklmnopqrstuvwxyz"
                                  "ABCDEFGHIJKLMNOPQRSTUVWXYZ.:-_%,";
    size_t bytes = strlen(text);
    return bytes > 0 && strspn(text, letters) == bytes && text[0] != ',' &&
           text[bytes - 1] != ',' && strstr(text, ",,") == NULL;
}

static bool decode(const char *text, ticket_t *ticket)
{
    char port[8];
    if (strncmp(text, TICKET_MARK, MARK_BYTES) != 0) {
        return false;
    }
    text += MARK_BYTES;
    if (strnlen(text, SECRET_DIGITS + 1) <= SECRET_DIGITS || text[SECRET_DIGITS] != '/' ||
        !secret_decode(text, SECRET_DIGITS, ticket->secret)) {
        return false;
    }
    text += SECRET_DIGITS + 1;
    size_t port_bytes = strcspn(text, "/");
    if (port_bytes >= sizeof port || text[port_bytes] != '/') {
        return false;
    }
    memcpy(port, text, port_bytes);
    port[port_bytes] = '\0';
    text += port_bytes + 1;
    if (!place_parse(port, MAX_PORT, &ticket->port) || ticket->port == 0 || port[0] == '0' ||
        strlen(text) >= sizeof ticket->addresses || !addresses_are_valid(text)) {
        return false;
    }
    snprintf(ticket->addresses, sizeof ticket->addresses, "%s", text);
    return true;
}

hvd_status_t ticket_decode(const char *text, ticket_t *ticket_p, err_t *err)
{
    ticket_t ticket = {.port = 0};
    bool ok = decode(text, &ticket);
    if (ok) {
        *ticket_p = ticket;
    }
    wipe(&ticket, sizeof ticket);
    return ok ? HVD_OK
              : fail(err, HVD_PROTOCOL,
                     "what rank 0 left with the launcher for the other ranks cannot be read; run "
                     "the same version of the library on every host");
}

// --- Keeping a ticket ----------------------------------------------------------------------------

typedef struct kept {
    int size;
    char text[TICKET_BYTES];
} kept_t;

// If it cannot, a later init asks the launcher again, and says what it answers.
void ticket_keep(const char text[TICKET_BYTES], int size)
{
    int fd = memfd_create(KEPT_NAME, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    kept_t kept = {.size = size};
    if (fd < 0) {
        return;
    }
    snprintf(kept.text, sizeof kept.text, "%s", text);
    if (write(fd, &kept, sizeof kept) != (ssize_t)sizeof kept ||
        fcntl(fd, F_ADD_SEALS, SEALS) != 0) {
        close(fd);
    }
    wipe(&kept, sizeof kept);
}

static bool read_kept(int fd, char text[TICKET_BYTES], int *size_p)
{
    kept_t kept;
    bool ok = (fcntl(fd, F_GET_SEALS) & SEALS) == SEALS &&
              pread(fd, &kept, sizeof kept, 0) == (ssize_t)sizeof kept;
    if (ok) {
        kept.text[sizeof kept.text - 1] = '\0';
        snprintf(text, TICKET_BYTES, "%s", kept.text);
        *size_p = kept.size;
    }
    wipe(&kept, sizeof kept);
    return ok;
}

bool ticket_find_kept(char text[TICKET_BYTES], int *size_p)
{
    DIR *folder = opendir("/proc/self/fd");
    const struct dirent *entry;
    bool found = false;
    while (folder != NULL && !found && (entry = readdir(folder)) != NULL) {
        char target[64];
        int fd;
        ssize_t bytes = readlinkat(dirfd(folder), entry->d_name, target, sizeof target);
        if (bytes == (ssize_t)strlen(KEPT_LINK) && memcmp(target, KEPT_LINK, (size_t)bytes) == 0 &&
            place_parse(entry->d_name, INT_MAX, &fd)) {
            found = read_kept(fd, text, size_p);
        }
    }
    if (folder != NULL) {
        closedir(folder);
    }
    return found;
}

// --- Hosting -------------------------------------------------------------------------------------

static hvd_status_t list_addresses(const config_t *config, bool on_one_host, ticket_t *ticket,
                                   err_t *err)
{
    tcp_iface_t ifaces[TCP_MAX_ADDRS];
    size_t len = 0;
    int n = 0;
    hvd_status_t status = tcp_list_ifaces(config->iface, on_one_host, ifaces, &n, err);
    for (int i = 0; status == HVD_OK && i < n; i++) {
        char ip[INET6_ADDRSTRLEN] = "";
        inet_ntop(ifaces[i].addr.family, ifaces[i].addr.ip, ip, sizeof ip);
        if (len + strlen(ip) + 2 <= sizeof ticket->addresses) {
            len += (size_t)snprintf(ticket->addresses + len, sizeof ticket->addresses - len, "%s%s",
                                    len > 0 ? "," : "", ip);
        }
    }
    return status;
}

static bool is_loopback(const ticket_t *ticket)
{
    return strcmp(ticket->addresses, "127.0.0.1") == 0 ||
           strcmp(ticket->addresses, "127.0.0.1,::1") == 0;
}

hvd_status_t rendezvous_host_at(const ticket_t *ticket, rendezvous_t *rendezvous, err_t *err)
{
    char text[HVD_TEXT_BYTES] = "";
    hvd_status_t status =
        hvd_rendezvous_start(is_loopback(ticket) ? NULL : "*", ticket->port, ticket->secret,
                             &rendezvous->server, text, sizeof text);
    if (status != HVD_OK) {
        return fail(err, status, "rank 0 cannot host the rendezvous of the job: %.800s", text);
    }
    rendezvous->is_hosted = true;
    return HVD_OK;
}

hvd_status_t rendezvous_host(const config_t *config, bool on_one_host, ticket_t *ticket_p,
                             rendezvous_t *rendezvous, err_t *err)
{
    ticket_t ticket = {.port = (int)config->rendezvous_port};
    hvd_status_t status;
    TRY(list_addresses(config, on_one_host, &ticket, err), out);
    TRY(random_bytes(ticket.secret, sizeof ticket.secret, err), out);
    TRY(rendezvous_host_at(&ticket, rendezvous, err), out);
    ticket.port = hvd_rendezvous_port(rendezvous->server);
    *ticket_p = ticket;
out:
    wipe(&ticket, sizeof ticket);
    return status;
}

hvd_status_t rendezvous_join(const ticket_t *ticket, uint64_t deadline_ns, boot_job_t *job,
                             rendezvous_t *rendezvous, err_t *err)
{
    rendezvous->is_hosted = true;
    memcpy(job->secret, ticket->secret, sizeof job->secret);
    // Rank 0 is at home.
    return kv_connect(rendezvous->server != NULL ? "127.0.0.1,::1" : ticket->addresses,
                      ticket->port, ticket->secret, deadline_ns, &rendezvous->client, err);
}

hvd_status_t rendezvous_rejoin(uint64_t deadline_ns, boot_job_t *job, rendezvous_t *rendezvous,
                               bool *joined_before_p, err_t *err)
{
    char text[TICKET_BYTES];
    ticket_t ticket = {.port = 0};
    hvd_status_t status = HVD_OK;
    *joined_before_p = ticket_find_kept(text, &job->size);
    if (*joined_before_p) {
        TRY(ticket_decode(text, &ticket, err), out);
        if (job->rank == 0) {
            TRY(rendezvous_host_at(&ticket, rendezvous, err), out);
        }
        TRY(rendezvous_join(&ticket, deadline_ns, job, rendezvous, err), out);
    }
out:
    wipe(text, sizeof text);
    wipe(&ticket, sizeof ticket);
    return status;
}

void rendezvous_close(rendezvous_t *rendezvous)
{
    kv_disconnect(rendezvous->client);
    hvd_rendezvous_stop(rendezvous->server);
    *rendezvous = (rendezvous_t){0};
}
