// SPDX-License-Identifier: Apache-2.0
//
// boot.c - finds the job by the first launcher that looks right, and meets the other ranks.
//
// A rank enters the rendezvous under the name "rank/<r>" and holds it until it has started: two
// processes that claim one rank are found out there, and so is one that dies meanwhile. How often
// the name has been taken (the turn) goes into every key, so a rank that leaves and comes back
// (shutdown and init again) does not read what was said the time before. Keys of an exchange are
// "<turn>/<round>/<rank>"; an exchange costs each rank two round trips. Where rank 0 hosts the
// rendezvous it waits at the end until every rank has said that it no longer needs it.
#include "boot/launcher.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

// In order: ours, then the launcher that is nearest to the process (torchrun may run under srun,
// mpirun inside an allocation of Slurm); the last always matches.
static const launcher_t *const launchers[] = {
    &launcher_env,     &launcher_torchrun, &launcher_pmix,      &launcher_pmi,
    &launcher_openmpi, &launcher_slurm,    &launcher_torch_env, &launcher_self,
};

#define GOODBYE_MS 10000

struct boot {
    int rank, size;
    double timeout_s;
    rendezvous_t rendezvous; // empty in a world of one
    uint64_t turn;
};

static uint64_t deadline_of(double timeout_s)
{
    return deadline_in_ms((int64_t)(timeout_s * 1000));
}

static const launcher_t *find_launcher(const config_t *config)
{
    const launcher_t *const *launcher = launchers;
    while (!(*launcher)->looks_right(config)) {
        launcher++;
    }
    return *launcher;
}

void boot_describe(const config_t *config, const char **name_p, const char **title_p)
{
    const launcher_t *launcher = find_launcher(config);
    *name_p = launcher->name;
    *title_p = launcher->title;
}

static hvd_status_t enter(boot_t *boot, const boot_job_t *job, uint64_t deadline_ns, err_t *err)
{
    char name[32], who[96];
    snprintf(name, sizeof name, "rank/%d", job->rank);
    snprintf(who, sizeof who, "host %.64s, pid %d", boot_host_name(job->host), (int)getpid());
    return kv_enter(boot->rendezvous.client, name, who, deadline_ns, &boot->turn, err);
}

hvd_status_t boot_open(const config_t *config, const log_t *log, boot_job_t *job_p, boot_t **boot_p,
                       err_t *err)
{
    uint64_t deadline_ns = deadline_of(config->start_timeout);
    const launcher_t *launcher = find_launcher(config);
    boot_job_t job = {0};
    hvd_status_t status;
    boot_t *boot = calloc(1, sizeof *boot);
    if (boot == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to start");
    }
    snprintf(job.how, sizeof job.how, "%s", launcher->name);
    boot_host_identity(config, job.host);
    TRY(launcher->join(launcher, config, deadline_ns, &job, &boot->rendezvous, err), undo);
    boot->rank = job.rank;
    boot->size = job.size;
    boot->timeout_s = config->start_timeout;
    if (job.size > 1) {
        TRY(enter(boot, &job, deadline_ns, err), undo);
    }
    log_debug(log, "boot", "rank %d of %d by %s, turn %llu, host %s", job.rank, job.size, job.how,
              (unsigned long long)boot->turn, job.host);
    *job_p = job;
    *boot_p = boot;
    wipe(job.secret, sizeof job.secret);
    return HVD_OK;
undo:
    wipe(job.secret, sizeof job.secret);
    boot_close(boot);
    return status;
}

// A world of one gets back what it gave.
static hvd_status_t exchange_alone(const void *value, size_t bytes, const uint8_t **values,
                                   size_t *lengths, buf_t *storage, err_t *err)
{
    buf_clear(storage);
    if (bytes > 0) {
        buf_append(storage, value, bytes);
    }
    if (storage->failed) {
        return fail(err, HVD_NO_MEMORY, "no memory for %zu bytes", bytes);
    }
    values[0] = storage->data;
    lengths[0] = bytes;
    return HVD_OK;
}

hvd_status_t boot_exchange(boot_t *boot, const char *round, const void *value, size_t bytes,
                           const uint8_t **values, size_t *lengths, buf_t *storage, err_t *err)
{
    uint64_t deadline_ns = deadline_of(boot->timeout_s);
    char prefix[192], key[208];
    hvd_status_t status;
    if (boot->rendezvous.client == NULL) {
        return exchange_alone(value, bytes, values, lengths, storage, err);
    }
    int len = snprintf(prefix, sizeof prefix, "%llu/%s/", (unsigned long long)boot->turn, round);
    if (len >= (int)sizeof prefix) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "the name of an exchange is too long: %zu characters", strlen(round));
    }
    snprintf(key, sizeof key, "%s%d", prefix, boot->rank);
    TRY(kv_put(boot->rendezvous.client, key, value, bytes, deadline_ns, err), out);
    TRY(kv_gather(boot->rendezvous.client, prefix, boot->size, deadline_ns, values, lengths,
                  storage, err),
        out);
out:
    return status;
}

int boot_missing(const boot_t *boot)
{
    return boot != NULL ? kv_missing(boot->rendezvous.client) : -1;
}

// Everyone says that it no longer needs the rendezvous; rank 0 hears all and ends it, and that is
// what the others wait for: a rank that comes back at once must not find the old one. Whatever goes
// wrong here, this rank has all it needs.
static void say_goodbye(boot_t *boot)
{
    uint64_t deadline_ns = deadline_in_ms(GOODBYE_MS);
    kv_client_t *client = boot->rendezvous.client;
    const uint8_t **values = calloc((size_t)boot->size, sizeof *values);
    size_t *lengths = calloc((size_t)boot->size, sizeof *lengths);
    buf_t storage = {0};
    size_t bytes;
    char key[48];
    snprintf(key, sizeof key, "goodbye/%d", boot->rank);
    hvd_status_t status = kv_put(client, key, key, strlen(key), deadline_ns, NULL);
    if (boot->rank != 0) {
        if (status == HVD_OK) {
            kv_get(client, "never", deadline_ns, &storage, &bytes, NULL);
        }
    } else if (status == HVD_OK && values != NULL && lengths != NULL) {
        kv_gather(client, "goodbye/", boot->size, deadline_ns, values, lengths, &storage, NULL);
    }
    free(values);
    free(lengths);
    buf_free(&storage);
}

void boot_leave(boot_t *boot)
{
    if (boot->rendezvous.is_hosted) {
        say_goodbye(boot);
    }
    boot_close(boot);
}

void boot_close(boot_t *boot)
{
    if (boot != NULL) {
        rendezvous_close(&boot->rendezvous);
        free(boot);
    }
}

void boot_place(boot_job_t *job, const int *host_of, int *host_sizes)
{
    int local_rank = 0, cross_rank = 0, cross_size = 0;
    for (int r = 0; r < job->rank; r++) {
        local_rank += host_of[r] == host_of[job->rank];
    }
    // Ranks with this local rank, one on each host that is large enough.
    for (int r = 0; r < job->size; r++) {
        int local = host_sizes[host_of[r]]++;
        cross_size += local == local_rank;
        cross_rank += local == local_rank && r < job->rank;
    }
    int local_size = host_sizes[host_of[job->rank]];
    job->local_rank = job->local_rank >= 0 ? job->local_rank : local_rank;
    job->local_size = job->local_size >= 0 ? job->local_size : local_size;
    job->cross_rank = job->cross_rank >= 0 ? job->cross_rank : cross_rank;
    job->cross_size = job->cross_size >= 0 ? job->cross_size : cross_size;
}
