// SPDX-License-Identifier: Apache-2.0
//
// meeting.c - meetings that rank 0 hosts: horovodrun has not started a rendezvous, so rank 0
// runs one in its own process until every rank has started.
//
// The card tells the others how to get there: "hvd1/<secret>/<port>/<address>,<address>,...". It
// offers every address of rank 0's host (HOROVOD_GLOO_IFACE chooses interfaces), loopback last:
// nobody knows which of them a peer can reach, and only the right server can prove the secret. A
// card is a secret: it travels through the launcher's own channel and is wiped wherever it was.
//
// Kept cards are the only thing that outlives a context. The process's table of descriptors holds
// them, where a later init finds them by name: the library has no state of its own.
#define _GNU_SOURCE
#include "boot/way.h"
#include "net/tcp.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#define CARD_MARK "hvd1/"
#define MARK_BYTES (sizeof(CARD_MARK) - 1)
#define MAX_PORT 65535
#define KEPT_NAME "hvd-card"
#define KEPT_LINK "/memfd:" KEPT_NAME " (deleted)" // as /proc shows it
#define SEALS (F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK)

// --- Cards ---------------------------------------------------------------------------------------

void card_encode(const card_t *card, char text[CARD_BYTES])
{
    size_t len = MARK_BYTES + SECRET_DIGITS;
    memcpy(text, CARD_MARK, MARK_BYTES);
    secret_encode(card->secret, text + MARK_BYTES);
    snprintf(text + len, CARD_BYTES - len, "/%d/%s", card->port, card->addresses);
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

static bool decode(const char *text, card_t *card)
{
    char port[8];
    if (strncmp(text, CARD_MARK, MARK_BYTES) != 0) {
        return false;
    }
    text += MARK_BYTES;
    if (strnlen(text, SECRET_DIGITS + 1) <= SECRET_DIGITS || text[SECRET_DIGITS] != '/' ||
        !secret_decode(text, SECRET_DIGITS, card->secret)) {
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
    if (!place_parse(port, MAX_PORT, &card->port) || card->port == 0 || port[0] == '0' ||
        strlen(text) >= sizeof card->addresses || !addresses_are_valid(text)) {
        return false;
    }
    snprintf(card->addresses, sizeof card->addresses, "%s", text);
    return true;
}

hvd_status_t card_decode(const char *text, card_t *card_p, err_t *err)
{
    card_t card = {.port = 0};
    bool ok = decode(text, &card);
    if (ok) {
        *card_p = card;
    }
    wipe(&card, sizeof card);
    return ok ? HVD_OK
              : fail(err, HVD_PROTOCOL,
                     "what rank 0 left with the launcher for the other ranks cannot be read; run "
                     "the same version of the library on every host");
}

// --- Keeping a card ------------------------------------------------------------------------------

typedef struct kept {
    int size;
    char text[CARD_BYTES];
} kept_t;

// If it cannot, a later init asks the launcher again, and says what it answers.
void card_keep(const char text[CARD_BYTES], int size)
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

static bool read_kept(int fd, char text[CARD_BYTES], int *size_p)
{
    kept_t kept;
    bool ok = (fcntl(fd, F_GET_SEALS) & SEALS) == SEALS &&
              pread(fd, &kept, sizeof kept, 0) == (ssize_t)sizeof kept;
    if (ok) {
        kept.text[sizeof kept.text - 1] = '\0';
        snprintf(text, CARD_BYTES, "%s", kept.text);
        *size_p = kept.size;
    }
    wipe(&kept, sizeof kept);
    return ok;
}

bool card_find_kept(char text[CARD_BYTES], int *size_p)
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

static hvd_status_t list_addresses(const config_t *config, card_t *card, err_t *err)
{
    tcp_iface_t ifaces[TCP_MAX_ADDRS];
    size_t len = 0;
    int n = 0;
    hvd_status_t status = tcp_list_ifaces(config->iface, ifaces, &n, err);
    for (int i = 0; status == HVD_OK && i < n; i++) {
        char ip[INET6_ADDRSTRLEN] = "";
        inet_ntop(ifaces[i].addr.family, ifaces[i].addr.ip, ip, sizeof ip);
        if (len + strlen(ip) + 2 <= sizeof card->addresses) {
            len += (size_t)snprintf(card->addresses + len, sizeof card->addresses - len, "%s%s",
                                    len > 0 ? "," : "", ip);
        }
    }
    return status;
}

hvd_status_t meeting_host_at(const card_t *card, meeting_t *meeting, err_t *err)
{
    char text[HVD_TEXT_BYTES] = "";
    hvd_status_t status =
        hvd_rendezvous_start("*", card->port, card->secret, &meeting->server, text, sizeof text);
    if (status != HVD_OK) {
        return fail(err, status, "rank 0 cannot host the rendezvous of the job: %.800s", text);
    }
    meeting->is_hosted = true;
    return HVD_OK;
}

hvd_status_t meeting_host(const config_t *config, card_t *card_p, meeting_t *meeting, err_t *err)
{
    card_t card = {.port = (int)config->rendezvous_port};
    hvd_status_t status;
    TRY(list_addresses(config, &card, err), out);
    TRY(random_bytes(card.secret, sizeof card.secret, err), out);
    TRY(meeting_host_at(&card, meeting, err), out);
    card.port = hvd_rendezvous_port(meeting->server);
    *card_p = card;
out:
    wipe(&card, sizeof card);
    return status;
}

hvd_status_t meeting_join(const card_t *card, uint64_t deadline_ns, boot_job_t *job,
                          meeting_t *meeting, err_t *err)
{
    meeting->is_hosted = true;
    memcpy(job->secret, card->secret, sizeof job->secret);
    // Rank 0 is at home.
    return kv_connect(meeting->server != NULL ? "127.0.0.1,::1" : card->addresses, card->port,
                      card->secret, deadline_ns, &meeting->client, err);
}

hvd_status_t meeting_again(uint64_t deadline_ns, boot_job_t *job, meeting_t *meeting,
                           bool *met_before_p, err_t *err)
{
    char text[CARD_BYTES];
    card_t card = {.port = 0};
    hvd_status_t status = HVD_OK;
    *met_before_p = card_find_kept(text, &job->size);
    if (*met_before_p) {
        TRY(card_decode(text, &card, err), out);
        if (job->rank == 0) {
            TRY(meeting_host_at(&card, meeting, err), out);
        }
        TRY(meeting_join(&card, deadline_ns, job, meeting, err), out);
    }
out:
    wipe(text, sizeof text);
    wipe(&card, sizeof card);
    return status;
}

void meeting_close(meeting_t *meeting)
{
    kv_disconnect(meeting->client);
    hvd_rendezvous_stop(meeting->server);
    *meeting = (meeting_t){0};
}
