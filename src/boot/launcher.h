// SPDX-License-Identifier: Apache-2.0
//
// launcher.h - what starts the ranks of a job, as boot.c sees it. Private to boot/.
//
// A launcher's row recognises its environment and then joins the job: who this process is, the
// job's secret, and a connection to the rendezvous. To add one: write src/boot/<name>.c with a
// launcher_t at its end, and a row in boot.c.
//
// Where nobody has started a rendezvous, rank 0 hosts it. The others need a ticket to get in, one
// word of text: the job's secret, a port and addresses. Whatever can hand a word from rank 0 to all
// others (PMI, PMIx, a local socket) is enough to launch a job.
//
// Threads: the one that calls hvd_init.
#ifndef HVD_BOOT_LAUNCHER_H
#define HVD_BOOT_LAUNCHER_H

#include "boot/boot.h"
#include "wire/secret.h"

// This rank's part in the rendezvous. Both pointers are NULL in a world of one.
typedef struct rendezvous {
    kv_client_t *client;
    hvd_rendezvous_t *server; // rank 0, where no launcher runs one
    bool is_hosted;           // by rank 0: on every rank of such a job
} rendezvous_t;

typedef struct launcher launcher_t;

struct launcher {
    const char *name;
    const char *title; // in sentences: "launched by <title>"
    bool (*looks_right)(const config_t *config);
    // Fills rank, size, local and cross and, if size > 1, the secret and the rendezvous.
    hvd_status_t (*join)(const launcher_t *launcher, const config_t *config, uint64_t deadline_ns,
                         boot_job_t *job, rendezvous_t *rendezvous, err_t *err);
};

extern const launcher_t launcher_env, launcher_torchrun, launcher_pmix, launcher_pmi,
    launcher_openmpi, launcher_slurm, launcher_torch_env, launcher_self;

// --- What launchers say in variables (place.c) ---------------------------------------------------

#define NOT_SEEN N_LAUNCH_VARS // for a place's cell: this launcher has no such variable

typedef struct place_vars {
    enum launch_var rank, size, local_rank, local_size;
} place_vars_t;

// Fills rank, size and, where both are there, local rank and size; the rest is -1, except in a
// world of one. The error names the launcher and the variable that is missing or wrong.
hvd_status_t place_read(const launcher_t *launcher, const config_t *config,
                        const place_vars_t *vars, boot_job_t *job, err_t *err);
// A whole number from 0 to max, digits only.
bool place_parse(const char *text, int max, int *value_p);

// --- A rendezvous that rank 0 hosts (rendezvous.c) -----------------------------------------------

#define TICKET_BYTES ((size_t)1000) // with its '\0'; PMI-1 promises values of 1023

typedef struct ticket {
    uint8_t secret[SECRET_BYTES];
    int port;
    char addresses[840]; // separated by commas
} ticket_t;

// A new secret, and a server at any free port of every interface, or only of loopback.
hvd_status_t rendezvous_host(const config_t *config, bool on_one_host, ticket_t *ticket_p,
                             rendezvous_t *rendezvous, err_t *err);
// Hosts where the ticket says; the port must be free.
hvd_status_t rendezvous_host_at(const ticket_t *ticket, rendezvous_t *rendezvous, err_t *err);
// The connection every rank has, rank 0 included; fills job->secret.
hvd_status_t rendezvous_join(const ticket_t *ticket, uint64_t deadline_ns, boot_job_t *job,
                             rendezvous_t *rendezvous, err_t *err);
// With the ticket this process kept, if it has joined before; needs job->rank, fills job->size.
hvd_status_t rendezvous_rejoin(uint64_t deadline_ns, boot_job_t *job, rendezvous_t *rendezvous,
                               bool *joined_before_p, err_t *err);
// Leaves and ends what is there. Safe on what is empty.
void rendezvous_close(rendezvous_t *rendezvous);

// A launcher hands a ticket over once in the life of a process; an init after a shutdown needs it
// again. It is kept in sealed memory behind a descriptor that is not inherited by programs.
void ticket_keep(const char text[TICKET_BYTES], int size);
bool ticket_find_kept(char text[TICKET_BYTES], int *size_p);

// Printable, without blanks and '='.
void ticket_encode(const ticket_t *ticket, char text[TICKET_BYTES]);
// Takes nothing that ticket_encode would not write.
hvd_status_t ticket_decode(const char *text, ticket_t *ticket_p, err_t *err);

#endif
