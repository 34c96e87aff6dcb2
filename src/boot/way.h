// SPDX-License-Identifier: Apache-2.0
//
// way.h - one way to be launched, as boot.c sees it. Private to boot/.
//
// A way knows from the environment whether it is the one, and then joins the job: who this process
// is, the job's secret, and a connection to where the ranks meet. To add one: write
// src/boot/<name>.c with a boot_way_t at its end, and a row in boot.c.
//
// Where nobody has started a rendezvous, rank 0 hosts it. What the others need to get there is the
// card, one word of text: the job's secret, a port and addresses. A way that can hand a word from
// rank 0 to all others (PMI, PMIx, a local socket) needs nothing else.
//
// Threads: the one that calls hvd_init.
#ifndef HVD_BOOT_WAY_H
#define HVD_BOOT_WAY_H

#include "boot/boot.h"
#include "wire/secret.h"

// Where the ranks of a job of more than one meet. Both are NULL in a world of one.
typedef struct meeting {
    kv_client_t *client;
    hvd_rendezvous_t *server; // rank 0, where no launcher runs one
    bool is_hosted;           // by rank 0: on every rank of such a job
} meeting_t;

typedef struct boot_way boot_way_t;

struct boot_way {
    const char *name;
    const char *launcher; // in sentences: "launched by <launcher>"
    bool (*looks_right)(const config_t *config);
    // Fills rank, size, local and cross and, if size > 1, the secret and the meeting.
    hvd_status_t (*join)(const boot_way_t *way, const config_t *config, uint64_t deadline_ns,
                         boot_job_t *job, meeting_t *meeting, err_t *err);
};

extern const boot_way_t boot_way_env, boot_way_torchrun, boot_way_pmix, boot_way_pmi,
    boot_way_openmpi, boot_way_slurm, boot_way_torch_env, boot_way_self;

// --- What launchers say in variables (place.c) ---------------------------------------------------

#define NOT_SEEN N_LAUNCH_VARS // for a place's cell: this launcher has no such variable

typedef struct place_vars {
    enum launch_var rank, size, local_rank, local_size;
} place_vars_t;

// Fills rank, size and, where both are there, local rank and size; the rest is -1, except in a
// world of one. The error names the launcher and the variable that is missing or wrong.
hvd_status_t place_read(const boot_way_t *way, const config_t *config, const place_vars_t *vars,
                        boot_job_t *job, err_t *err);
// A whole number from 0 to max, digits only.
bool place_parse(const char *text, int max, int *value_p);

// --- Meetings that rank 0 hosts (meeting.c) ------------------------------------------------------

#define CARD_BYTES ((size_t)1000) // with its '\0'; PMI-1 promises values of 1023

typedef struct card {
    uint8_t secret[SECRET_BYTES];
    int port;
    char addresses[840]; // separated by commas
} card_t;

// A new secret, and a server at any free port of every interface.
hvd_status_t meeting_host(const config_t *config, card_t *card_p, meeting_t *meeting, err_t *err);
// Hosts where the card says; the port must be free.
hvd_status_t meeting_host_at(const card_t *card, meeting_t *meeting, err_t *err);
// The connection every rank has, rank 0 included; fills job->secret.
hvd_status_t meeting_join(const card_t *card, uint64_t deadline_ns, boot_job_t *job,
                          meeting_t *meeting, err_t *err);
// Meets as this process has before, by the card it kept; job->rank is known, job->size is filled.
hvd_status_t meeting_again(uint64_t deadline_ns, boot_job_t *job, meeting_t *meeting,
                           bool *met_before_p, err_t *err);
// Leaves and ends what is there. Safe on what is empty.
void meeting_close(meeting_t *meeting);

// A launcher hands a card over once in the life of a process; an init after a shutdown needs it
// again. It is kept in sealed memory behind a descriptor that is not inherited by programs.
void card_keep(const char text[CARD_BYTES], int size);
bool card_find_kept(char text[CARD_BYTES], int *size_p);

// Printable, without blanks and '='.
void card_encode(const card_t *card, char text[CARD_BYTES]);
// Takes nothing that card_encode would not write.
hvd_status_t card_decode(const char *text, card_t *card_p, err_t *err);

#endif
