// SPDX-License-Identifier: Apache-2.0
//
// plan.c - hosts and a number of ranks become places: pure, nothing is looked up.
//
// Hosts are filled in order, all slots of one before the next, until there are np ranks. A rank's
// cross rank is its host's position among the hosts that have its local rank. Cost: ranks + hosts.
#include "launch/plan.h"

#include <stdlib.h>

static int64_t count_slots(const hosts_t *hosts)
{
    int64_t n = 0;
    for (int i = 0; i < hosts->n; i++) {
        n += hosts->list[i].slots;
    }
    return n;
}

// Hosts have at most as many ranks as slots, and only the last in use may have fewer.
static void fill(const hosts_t *hosts, job_plan_t *plan)
{
    for (int host = 0, rank = 0; rank < plan->n_ranks; host++) {
        int n = MIN(hosts->list[host].slots, plan->n_ranks - rank);
        plan->n_hosts = host + 1;
        for (int local = 0; local < n; local++, rank++) {
            plan->places[rank] =
                (rank_place_t){.rank = rank, .host = host, .local_rank = local, .local_size = n};
        }
    }
}

// seen: for each local rank, the hosts that have it.
static void fill_cross(job_plan_t *plan, int *seen)
{
    for (int i = 0; i < plan->n_ranks; i++) {
        plan->places[i].cross_rank = seen[plan->places[i].local_rank]++;
    }
    for (int i = 0; i < plan->n_ranks; i++) {
        plan->places[i].cross_size = seen[plan->places[i].local_rank];
    }
}

hvd_status_t job_plan_make(const hosts_t *hosts, int np, job_plan_t *plan_p, err_t *err)
{
    int64_t n_slots = count_slots(hosts);
    int n_ranks = np > 0 ? np : (int)MIN(n_slots, 1048576);
    if (n_ranks > n_slots) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "Requested more processes (%d) than there are available slots (%lld); give the "
                    "hosts more slots, as in -H host:%d, or start fewer with -np",
                    n_ranks, (long long)n_slots, n_ranks);
    }
    job_plan_t plan = {.places = calloc((size_t)n_ranks, sizeof(rank_place_t)), .n_ranks = n_ranks};
    int *seen = calloc((size_t)n_ranks, sizeof *seen);
    if (plan.places == NULL || seen == NULL) {
        free(seen);
        job_plan_free(&plan);
        return fail(err, HVD_NO_MEMORY, "no memory to plan %d ranks", n_ranks);
    }
    fill(hosts, &plan);
    fill_cross(&plan, seen);
    free(seen);
    *plan_p = plan;
    return HVD_OK;
}

void job_plan_free(job_plan_t *plan)
{
    free(plan->places);
    *plan = (job_plan_t){0};
}
