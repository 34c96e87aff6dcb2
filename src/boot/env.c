// SPDX-License-Identifier: Apache-2.0
//
// env.c - launched by horovodrun, Spark, a Kubernetes job or by hand: the environment says which
// rank this is and where the rendezvous server is; a file or a descriptor holds the job's secret.
//
// What a user can get wrong is checked here, one sentence each, naming the variable and what it
// should be.
#define _GNU_SOURCE
#include "boot/launcher.h"

#include <stdio.h>

#define HOW_TO_START                                                                               \
    "start the job with \"horovodrun -np N command\", which sets everything, or unset "            \
    "HOROVOD_RANK and HOROVOD_SIZE to run alone"

static bool is_set(const config_t *config, enum knob_id id)
{
    return config->origin[id] == FROM_ENVIRONMENT;
}

static bool env_looks_right(const config_t *config)
{
    return is_set(config, KNOB_rank) || is_set(config, KNOB_size);
}

// --- The numbers ---------------------------------------------------------------------------------

// A rank and a size that belong together.
typedef struct env_place {
    enum knob_id rank_id, size_id;
    int64_t rank, size;
} env_place_t;

static hvd_status_t check_place(const config_t *config, const env_place_t *place, int64_t size,
                                err_t *err)
{
    const char *rank_name = knob_infos[place->rank_id].env,
               *size_name = knob_infos[place->size_id].env;
    bool has_rank = is_set(config, place->rank_id), has_size = is_set(config, place->size_id);
    if (has_rank != has_size) {
        return fail(err, HVD_INVALID_ARGUMENT, "%s is set but %s is not; " HOW_TO_START,
                    has_rank ? rank_name : size_name, has_rank ? size_name : rank_name);
    }
    if (has_rank && place->rank >= place->size) {
        return fail(err, HVD_INVALID_ARGUMENT, "%s=%lld must be less than %s=%lld", rank_name,
                    (long long)place->rank, size_name, (long long)place->size);
    }
    if (has_rank && place->size > size) {
        return fail(err, HVD_INVALID_ARGUMENT, "%s=%lld must not be more than HOROVOD_SIZE=%lld",
                    size_name, (long long)place->size, (long long)size);
    }
    return HVD_OK;
}

static hvd_status_t check_places(const config_t *config, err_t *err)
{
    const env_place_t places[] = {
        {KNOB_rank, KNOB_size, config->rank, config->size},
        {KNOB_local_rank, KNOB_local_size, config->local_rank, config->local_size},
        {KNOB_cross_rank, KNOB_cross_size, config->cross_rank, config->cross_size},
    };
    for (size_t i = 0; i < N_ELEMENTS(places); i++) {
        hvd_status_t status = check_place(config, &places[i], config->size, err);
        if (status != HVD_OK) {
            return status;
        }
    }
    return HVD_OK;
}

// What a job of more than one cannot do without.
static hvd_status_t check_needs(const config_t *config, err_t *err)
{
    const struct {
        bool is_there;
        const char *name;
        const char *what;
    } needs[] = {
        {config->rendezvous_addr != NULL && config->rendezvous_addr[0] != '\0',
         "HOROVOD_RENDEZVOUS_ADDR", "where the rendezvous server is"},
        {config->rendezvous_port > 0, "HOROVOD_RENDEZVOUS_PORT", "its port"},
        {secret_is_given(config), "HOROVOD_SECRET_FILE", "the file with the job's secret"},
    };
    const char *foreign = config->seen[SEEN_HOROVOD_GLOO_RENDEZVOUS_ADDR];
    for (size_t i = 0; i < N_ELEMENTS(needs); i++) {
        if (!needs[i].is_there && foreign != NULL) {
            return fail(err, HVD_INVALID_ARGUMENT,
                        "HOROVOD_GLOO_RENDEZVOUS_ADDR=%.100s is set, but %s (%s) is not: the "
                        "launcher is one for another Horovod, whose rendezvous has no "
                        "secret; " HOW_TO_START,
                        foreign, needs[i].name, needs[i].what);
        }
        if (!needs[i].is_there) {
            return fail(err, HVD_INVALID_ARGUMENT,
                        "HOROVOD_SIZE=%lld but %s (%s) is not set; " HOW_TO_START,
                        (long long)config->size, needs[i].name, needs[i].what);
        }
    }
    return HVD_OK;
}

static hvd_status_t env_find(const config_t *config, uint64_t deadline_ns, boot_job_t *job,
                             err_t *err)
{
    // In a world of one there is nothing to derive.
    bool alone = config->size == 1;
    bool has_local = alone || is_set(config, KNOB_local_rank);
    bool has_cross = alone || is_set(config, KNOB_cross_rank);
    hvd_status_t status;
    TRY(check_places(config, err), out);
    job->rank = (int)config->rank;
    job->size = (int)config->size;
    job->local_rank = has_local ? (int)config->local_rank : -1;
    job->local_size = has_local ? (int)config->local_size : -1;
    job->cross_rank = has_cross ? (int)config->cross_rank : -1;
    job->cross_size = has_cross ? (int)config->cross_size : -1;
    if (!alone) {
        TRY(check_needs(config, err), out);
        TRY(secret_find(config, deadline_ns, job->secret, err), out);
    }
out:
    return status;
}

static hvd_status_t env_join(const launcher_t *launcher, const config_t *config,
                             uint64_t deadline_ns, boot_job_t *job, rendezvous_t *rendezvous,
                             err_t *err)
{
    hvd_status_t status;
    (void)launcher;
    TRY(env_find(config, deadline_ns, job, err), out);
    if (job->size > 1) {
        TRY(kv_connect(config->rendezvous_addr, (int)config->rendezvous_port, job->secret,
                       deadline_ns, &rendezvous->client, err),
            out);
    }
out:
    return status;
}

const launcher_t launcher_env = {.name = "env",
                                 .title = "horovodrun (HOROVOD_RANK and HOROVOD_SIZE)",
                                 .looks_right = env_looks_right,
                                 .join = env_join};
