// SPDX-License-Identifier: Apache-2.0
//
// boot.h - who am I and how do I reach my peers.
//
// Owns: finding the job (our environment, another launcher's, or a world of one), the job's secret,
// the client of the rendezvous server, and that server (kv_server.c). Called during hvd_init and
// hvd_shutdown only, from that thread; every call blocks at most until its deadline.
#ifndef HVD_BOOT_H
#define HVD_BOOT_H

#include "base/base.h"
#include "wire/door.h"

// This process's place in the job, filled by the launcher that was recognised.
typedef struct boot_job {
    int rank, size;
    int local_rank, local_size; // -1 where the environment does not say: see boot_place
    int cross_rank, cross_size; // likewise
    char host[256];             // equal for ranks that may share memory; see boot_host_identity
    uint8_t secret[32];         // wiped by whoever has made keys of it; zeros in a world of one
    char how[32];               // the launcher's name: "self", "env", "pmi"
} boot_job_t;

typedef struct boot boot_t;

// Finds the job and, in a job of more than one, connects to the rendezvous.
hvd_status_t boot_open(const config_t *config, const log_t *log, boot_job_t *job_p, boot_t **boot_p,
                       err_t *err);

// Gives this rank's value and returns everyone's, by rank: an allgather of small blobs (at most
// 64 KiB each). `round` names the exchange (printable, no blanks) and must not repeat between one
// boot_open and its boot_close. Blocks until all ranks have given, one that had come has left, or
// the start timeout passes; the error then names who left, or the missing ranks.
// values[r] has lengths[r] bytes and points into `storage`, which is overwritten.
hvd_status_t boot_exchange(boot_t *boot, const char *round, const void *value, size_t bytes,
                           const uint8_t **values, size_t *lengths, buf_t *storage, err_t *err);

// The first rank for which boot_exchange has waited in vain; -1: none. Safe on NULL.
int boot_missing(const boot_t *boot);

// Leaves the rendezvous after a start that succeeded. Where rank 0 hosts it, all leave together.
void boot_leave(boot_t *boot);
// Leaves it at once, as after a failure. Safe on NULL.
void boot_close(boot_t *boot);

// The launcher that boot_open would join the job by: its name as in boot_job_t, and its title.
void boot_describe(const config_t *config, const char **name_p, const char **title_p);

// Fills the local and cross values that are -1 from the host index of every rank, as a launcher
// would have set them: ranks of a host are counted in order, and so are hosts by first rank.
// host_sizes: zeros, which become the number of ranks on each host.
void boot_place(boot_job_t *job, const int *host_of, int *host_sizes);

// Text that is equal for two processes exactly if they may share memory: kernel boot id, the
// identity of /dev/shm (device and inode of its root mount) and HOROVOD_HOSTNAME where set.
void boot_host_identity(const config_t *config, char text[256]);
// How much of that text, from its beginning, is equal for all processes of one kernel.
size_t boot_kernel_bytes(const char *identity);
// The part of that text by which people know the host.
const char *boot_host_name(const char *identity);
// Who listens at a port, as "python3 (pid 77)"; "" if that cannot be seen.
void boot_port_holder(int port, char *text, size_t bytes);

// --- Key-value store -----------------------------------------------------------------------------
// Requests and answers travel over a secure channel (role HELLO_KV). Keys are printable, without
// blanks, at most 256 bytes; values are opaque bytes, at most 64 KiB. A request that fails for
// another reason than HVD_TIMEOUT or HVD_INVALID_ARGUMENT leaves the connection unusable.

typedef struct kv_client kv_client_t;

// Tries every address of the comma-separated list (names, IPv4, IPv6) until one proves the secret;
// again and again, since the server may not be up yet. A server that refuses the secret ends it
// earlier. Looking up a name is bounded by the resolver's own time limits.
hvd_status_t kv_connect(const char *addresses, int port, const uint8_t secret[32],
                        uint64_t deadline_ns, kv_client_t **client_p, err_t *err);
hvd_status_t kv_put(kv_client_t *client, const char *key, const void *value, size_t bytes,
                    uint64_t deadline_ns, err_t *err);
// Waits on the server until the key exists. The value is in storage->data, *bytes_p long.
hvd_status_t kv_get(kv_client_t *client, const char *key, uint64_t deadline_ns, buf_t *storage,
                    size_t *bytes_p, err_t *err);
// All values of keys "<prefix>0".."<prefix>n-1" in one answer, when all exist (server-side wait).
// The prefix must not end in a digit. On HVD_TIMEOUT the sentence names the missing ranks. Once
// somebody has left who held the same name with another number (see kv_enter), in the same turn,
// what is not complete yet never will be: that is HVD_PEER_LOST, and the sentence names it.
hvd_status_t kv_gather(kv_client_t *client, const char *prefix, int n, uint64_t deadline_ns,
                       const uint8_t **values, size_t *lengths, buf_t *storage, err_t *err);
int kv_missing(const kv_client_t *client); // the first of them; -1: there was none
// Holds `name` until disconnected, and says how many times it has been taken (1 at first). Waits
// for another holder to leave; if it does not, HVD_INVALID_ARGUMENT names it. One name a client.
// `who`, up to 128 bytes, is what others are told when this client leaves.
hvd_status_t kv_enter(kv_client_t *client, const char *name, const char *who, uint64_t deadline_ns,
                      uint64_t *turn_p, err_t *err);
void kv_disconnect(kv_client_t *client); // safe on NULL

// A channel to somebody who has come in by a door of the role HELLO_CHANNEL. Takes its secure_t
// over, also when there is no memory: NULL. The descriptor stays the caller's.
hvd_channel_t *channel_of_guest(const guest_t *guest);
size_t channel_pending(const hvd_channel_t *channel); // bytes inside: poll() does not show them

#endif
