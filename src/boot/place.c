// SPDX-License-Identifier: Apache-2.0
//
// place.c - rank and size as other launchers write them into the environment.
//
// A launcher's names are data (place_vars_t); what can be wrong with their values is the same for
// all, and is said once here: which launcher this looks like, which variable is missing or is not
// what it should be, and what to do. Pure; any thread.
#include "boot/launcher.h"

#include <stdio.h>

#define MAX_RANKS 1048576
#define SHOWN_BYTES 60 // of a wrong value

bool place_parse(const char *text, int max, int *value_p)
{
    int value = 0;
    if (text[0] == '\0') {
        return false;
    }
    for (; *text != '\0'; text++) {
        if (*text < '0' || *text > '9' || value > (max - (*text - '0')) / 10) {
            return false;
        }
        value = value * 10 + (*text - '0');
    }
    *value_p = value;
    return true;
}

static hvd_status_t read_number(const launcher_t *launcher, const config_t *config,
                                enum launch_var var, int max, int *value_p, err_t *err)
{
    const char *text = config->seen[var], *name = launch_var_names[var];
    if (text == NULL) {
        return fail(
            err, HVD_INVALID_ARGUMENT,
            "this process seems to have been launched by %s, but %s is not set; start every rank "
            "with the launcher and pass its environment on, or unset its variables to run alone",
            launcher->title, name);
    }
    if (!place_parse(text, max, value_p)) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "this process seems to have been launched by %s, but %s is \"%.*s\", not a "
                    "number from 0 to %d",
                    launcher->title, name, SHOWN_BYTES, text, max);
    }
    return HVD_OK;
}

// A rank and a size that belong together.
static hvd_status_t read_pair(const launcher_t *launcher, const config_t *config,
                              enum launch_var rank_var, enum launch_var size_var, int max,
                              int *rank_p, int *size_p, err_t *err)
{
    int rank = 0, size = 0;
    hvd_status_t status;
    TRY(read_number(launcher, config, rank_var, max, &rank, err), out);
    TRY(read_number(launcher, config, size_var, max, &size, err), out);
    if (rank >= size) {
        return fail(
            err, HVD_INVALID_ARGUMENT,
            "this process seems to have been launched by %s, but %s=%d is not less than %s=%d",
            launcher->title, launch_var_names[rank_var], rank, launch_var_names[size_var], size);
    }
    *rank_p = rank;
    *size_p = size;
out:
    return status;
}

static bool is_seen(const config_t *config, enum launch_var var)
{
    return var != NOT_SEEN && config->seen[var] != NULL;
}

hvd_status_t place_read(const launcher_t *launcher, const config_t *config,
                        const place_vars_t *vars, boot_job_t *job, err_t *err)
{
    hvd_status_t status;
    job->local_rank = job->local_size = job->cross_rank = job->cross_size = -1;
    TRY(read_pair(launcher, config, vars->rank, vars->size, MAX_RANKS, &job->rank, &job->size, err),
        out);
    if (is_seen(config, vars->local_rank) && is_seen(config, vars->local_size)) {
        TRY(read_pair(launcher, config, vars->local_rank, vars->local_size, job->size,
                      &job->local_rank, &job->local_size, err),
            out);
    }
    if (job->size == 1) {
        job->local_rank = job->cross_rank = 0;
        job->local_size = job->cross_size = 1;
    }
out:
    return status;
}
