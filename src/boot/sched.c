// SPDX-License-Identifier: Apache-2.0
//
// sched.c - launched by something that sets variables and nothing else: torchrun, srun without
// --mpi, mpirun of Open MPI where no PMIx library is found.
//
// Rank and size are in variables, and rank 0 hosts the rendezvous. What these launchers lack is a
// channel for a secret. On one host the ranks hand it over a local socket (local.c), and nothing is
// needed. On several, all ranks must find it in a file (HOROVOD_SECRET_FILE); rank 0's host is
// named by the launcher or HOROVOD_RENDEZVOUS_ADDR, and its port is HOROVOD_RENDEZVOUS_PORT, or
// follows from the job's name: below the range kernels take ports from, so nearly always free.
//
// A launcher is a row. Threads: the one that calls hvd_init.
#define _GNU_SOURCE
#include "boot/sched.h"
#include "boot/local.h"

#include <stdio.h>

#define FIRST_PORT 16384
#define N_PORTS 16384
#define MAX_IDS 3
#define JOB_TEXT_BYTES 512

typedef struct sched {
    const launcher_t *launcher;
    place_vars_t place;
    enum launch_var n_hosts;      // or NOT_SEEN
    enum launch_var host;         // of rank 0, or NOT_SEEN
    enum launch_var ids[MAX_IDS]; // together they name the job
} sched_t;

#define TORCH_PLACE {SEEN_RANK, SEEN_WORLD_SIZE, SEEN_LOCAL_RANK, SEEN_LOCAL_WORLD_SIZE}

static const sched_t scheds[] = {
    {.launcher = &launcher_torchrun,
     .place = TORCH_PLACE,
     .n_hosts = NOT_SEEN,
     .host = SEEN_MASTER_ADDR,
     .ids = {SEEN_TORCHELASTIC_RUN_ID, SEEN_MASTER_PORT, SEEN_TORCHELASTIC_RESTART_COUNT}},
    {.launcher = &launcher_torch_env,
     .place = TORCH_PLACE,
     .n_hosts = NOT_SEEN,
     .host = SEEN_MASTER_ADDR,
     .ids = {SEEN_MASTER_ADDR, SEEN_MASTER_PORT, NOT_SEEN}},
    {.launcher = &launcher_openmpi,
     .place = {SEEN_OMPI_COMM_WORLD_RANK, SEEN_OMPI_COMM_WORLD_SIZE,
               SEEN_OMPI_COMM_WORLD_LOCAL_RANK, SEEN_OMPI_COMM_WORLD_LOCAL_SIZE},
     .n_hosts = NOT_SEEN,
     .host = NOT_SEEN,
     .ids = {SEEN_OMPI_MCA_orte_hnp_uri, SEEN_PMIX_NAMESPACE, NOT_SEEN}},
    {.launcher = &launcher_slurm,
     .place = {SEEN_SLURM_PROCID, SEEN_SLURM_STEP_NUM_TASKS, NOT_SEEN, NOT_SEEN},
     .n_hosts = SEEN_SLURM_STEP_NUM_NODES,
     .host = SEEN_SLURM_STEP_NODELIST,
     .ids = {SEEN_SLURM_JOB_ID, SEEN_SLURM_STEP_ID, NOT_SEEN}},
};

static const char *seen(const config_t *config, enum launch_var var)
{
    return var == NOT_SEEN ? NULL : config->seen[var];
}

static bool has_text(const char *text)
{
    return text != NULL && text[0] != '\0';
}

// --- Hosts ---------------------------------------------------------------------------------------

void sched_first_host(const char *list, char *host, size_t bytes)
{
    size_t len = 0;
    while (*list != '\0' && *list != ',' && len + 1 < bytes) {
        if (*list == '[') {
            size_t number_bytes = strcspn(++list, "-,]");
            number_bytes = MIN(number_bytes, bytes - 1 - len);
            memcpy(host + len, list, number_bytes);
            len += number_bytes;
            list += strcspn(list, "]");
            list += *list == ']';
        } else {
            host[len++] = *list++;
        }
    }
    host[len] = '\0';
}

static bool is_loopback_name(const char *host)
{
    return host != NULL && (strcmp(host, "localhost") == 0 || strcmp(host, "::1") == 0 ||
                            strncmp(host, "127.", 4) == 0);
}

static bool is_on_one_host(const sched_t *sched, const config_t *config, const boot_job_t *job)
{
    const char *n_hosts = seen(config, sched->n_hosts);
    return job->local_size == job->size || (n_hosts != NULL && strcmp(n_hosts, "1") == 0) ||
           is_loopback_name(seen(config, sched->host));
}

// --- Joining -------------------------------------------------------------------------------------

static void name_job(const sched_t *sched, const config_t *config, char text[JOB_TEXT_BYTES])
{
    const char *ids[MAX_IDS];
    for (int i = 0; i < MAX_IDS; i++) {
        ids[i] = seen(config, sched->ids[i]);
        ids[i] = ids[i] != NULL ? ids[i] : "";
    }
    snprintf(text, JOB_TEXT_BYTES, "%s/%s/%s/%s", sched->launcher->name, ids[0], ids[1], ids[2]);
}

static hvd_status_t meet_on_host(const config_t *config, const char *job_text, uint64_t deadline_ns,
                                 boot_job_t *job, rendezvous_t *rendezvous, err_t *err)
{
    char text[TICKET_BYTES] = "";
    ticket_t ticket = {.port = 0};
    hvd_status_t status;
    if (job->rank == 0) {
        TRY(rendezvous_host(config, true, &ticket, rendezvous, err), out);
        ticket_encode(&ticket, text);
        TRY(local_give(job_text, text, job->size - 1, deadline_ns, err), out);
    } else {
        TRY(local_take(job_text, deadline_ns, text, err), out);
        TRY(ticket_decode(text, &ticket, err), out);
    }
    TRY(rendezvous_join(&ticket, deadline_ns, job, rendezvous, err), out);
out:
    wipe(text, sizeof text);
    wipe(&ticket, sizeof ticket);
    return status;
}

// Everything on the ticket is known to everyone beforehand.
static hvd_status_t make_ticket(const sched_t *sched, const config_t *config, const char *job_text,
                                uint64_t deadline_ns, ticket_t *ticket, err_t *err)
{
    const char *host = seen(config, sched->host);
    if (has_text(config->rendezvous_addr)) {
        snprintf(ticket->addresses, sizeof ticket->addresses, "%s", config->rendezvous_addr);
    } else if (host != NULL) {
        sched_first_host(host, ticket->addresses, sizeof ticket->addresses);
    } else {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "launched by %s, which does not say where rank 0 is; set "
                    "HOROVOD_RENDEZVOUS_ADDR to the name or address of its host",
                    sched->launcher->title);
    }
    ticket->port = (int)config->rendezvous_port;
    if (ticket->port == 0) {
        ticket->port = FIRST_PORT + (int)(hash_bytes(job_text, strlen(job_text), 0) % N_PORTS);
    }
    return secret_find(config, deadline_ns, ticket->secret, err);
}

static hvd_status_t meet_across(const sched_t *sched, const config_t *config, const char *job_text,
                                uint64_t deadline_ns, boot_job_t *job, rendezvous_t *rendezvous,
                                err_t *err)
{
    ticket_t ticket = {.port = 0};
    hvd_status_t status;
    if (!secret_is_given(config)) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "launched by %s, on several hosts: the ranks need a secret that all of them "
                    "can read. Create one in a folder that all hosts share: (umask 077; openssl "
                    "rand -hex 32 > hvd.secret), and set HOROVOD_SECRET_FILE to its path; or start "
                    "the job with horovodrun, mpirun, or srun --mpi=pmix, which need none",
                    sched->launcher->title);
    }
    TRY(make_ticket(sched, config, job_text, deadline_ns, &ticket, err), out);
    if (job->rank == 0) {
        TRY(rendezvous_host_at(&ticket, rendezvous, err), out);
    }
    TRY(rendezvous_join(&ticket, deadline_ns, job, rendezvous, err), out);
out:
    wipe(&ticket, sizeof ticket);
    return status;
}

static hvd_status_t sched_join(const launcher_t *launcher, const config_t *config,
                               uint64_t deadline_ns, boot_job_t *job, rendezvous_t *rendezvous,
                               err_t *err)
{
    const sched_t *sched = scheds;
    char job_text[JOB_TEXT_BYTES];
    while (sched->launcher != launcher) {
        sched++;
    }
    snprintf(job->how, sizeof job->how, "%s", launcher->name);
    hvd_status_t status = place_read(launcher, config, &sched->place, job, err);
    if (status != HVD_OK || job->size == 1) {
        return status;
    }
    name_job(sched, config, job_text);
    if (is_on_one_host(sched, config, job) && !secret_is_given(config)) {
        return meet_on_host(config, job_text, deadline_ns, job, rendezvous, err);
    }
    return meet_across(sched, config, job_text, deadline_ns, job, rendezvous, err);
}

// --- Rows ----------------------------------------------------------------------------------------

static bool torchrun_looks_right(const config_t *config)
{
    return config->seen[SEEN_TORCHELASTIC_RUN_ID] != NULL;
}

// RANK alone is too common a name to mean anything.
static bool torch_env_looks_right(const config_t *config)
{
    return config->seen[SEEN_RANK] != NULL && config->seen[SEEN_WORLD_SIZE] != NULL;
}

static bool openmpi_looks_right(const config_t *config)
{
    return config->seen[SEEN_OMPI_COMM_WORLD_RANK] != NULL ||
           config->seen[SEEN_OMPI_COMM_WORLD_SIZE] != NULL;
}

// A batch script has SLURM_PROCID too, but is not a step of srun.
static bool slurm_looks_right(const config_t *config)
{
    return config->seen[SEEN_SLURM_PROCID] != NULL && config->seen[SEEN_SLURM_STEP_ID] != NULL;
}

const launcher_t launcher_torchrun = {.name = "torchrun",
                                      .title = "torchrun",
                                      .looks_right = torchrun_looks_right,
                                      .join = sched_join};

const launcher_t launcher_torch_env = {.name = "torch-env",
                                       .title = "a launcher that sets RANK and WORLD_SIZE",
                                       .looks_right = torch_env_looks_right,
                                       .join = sched_join};

const launcher_t launcher_openmpi = {.name = "openmpi",
                                     .title = "mpirun of Open MPI, without PMIx",
                                     .looks_right = openmpi_looks_right,
                                     .join = sched_join};

const launcher_t launcher_slurm = {.name = "slurm",
                                   .title = "srun without --mpi",
                                   .looks_right = slurm_looks_right,
                                   .join = sched_join};
