// SPDX-License-Identifier: Apache-2.0
//
// observe.c - bringing up what a rank can tell about itself, and down.
//
// Everything is there before the first operation and stays until the monitor thread has ended, so
// nobody asks whether it is. Thread: the one that starts or ends the job.
#include "observe/internal.h"

#include <stdlib.h>

static hvd_status_t begin_timeline(observe_t *o, err_t *err)
{
    const config_t *config = o->job.config;
    const char *path = config->timeline;
    if (path == NULL || path[0] == '\0' || strcmp(path, "DYNAMIC") == 0 || o->job.rank != 0) {
        return HVD_OK;
    }
    hvd_status_t status = timeline_open(o, path, config->timeline_mark_cycles, &o->timeline, err);
    atomic_store(&o->timeline_on, status == HVD_OK);
    return status;
}

hvd_status_t observe_open(const observe_job_t *job, observe_t **observe_p, err_t *err)
{
    hvd_status_t status;
    observe_t *o = calloc(1, sizeof *o);
    if (o == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to start");
    }
    o->job = *job;
    o->origin = ticks_origin();
    o->opened_ns = clock_ns();
    o->opened_by = (uint64_t)pthread_self();
    o->recorder = recorder_new();
    o->counters = counters_new(job->n_branches);
    if (o->recorder == NULL || o->counters == NULL) {
        status = fail(err, HVD_NO_MEMORY, "no memory to start");
        goto free_all;
    }
    TRY(begin_timeline(o, err), free_all);
    TRY(monitor_start(o, err), free_all);
    *observe_p = o;
    return HVD_OK;

free_all:
    timeline_close(o, o->timeline);
    observe_free(o);
    return status;
}

void observe_free(observe_t *o)
{
    if (o != NULL) {
        free(o->recorder);
        counters_free(o->counters);
        free(o);
    }
}
