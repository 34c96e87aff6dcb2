// SPDX-License-Identifier: Apache-2.0
//
// host_pool.c - which hosts an elastic job may use, and how its ranks are shared among them.
//
// Hosts keep their order for as long as the job lives; new ones come after. A host on which a rank
// failed is barred: for good, or for a while that doubles with every failure. Hosts that have ranks
// get places before those that have none, so rank 0 is always one that has the state of the job,
// unless none is left. Pure but for memory.
#include "launch/host_pool.h"

#include <stdlib.h>

#define MIN_COOLDOWN_S 1
#define MAX_COOLDOWN_S 3600

hvd_status_t host_pool_read_cooldown(host_pool_t *pool, const char *text, err_t *err)
{
    char *end = NULL;
    double min_s = strtod(text, &end), max_s = strtod(end, &end);
    if (text[0] == '\0') {
        return HVD_OK;
    }
    if (*end != '\0' || min_s < MIN_COOLDOWN_S || max_s > MAX_COOLDOWN_S || min_s > max_s) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "--blacklist-cooldown-range is \"%.60s\": give two numbers of seconds, the "
                    "smaller first, from %d to %d",
                    text, MIN_COOLDOWN_S, MAX_COOLDOWN_S);
    }
    pool->cooldown_min_s = min_s;
    pool->cooldown_max_s = max_s;
    return HVD_OK;
}

static pool_host_t *find(const host_pool_t *pool, const char *target)
{
    for (int i = 0; i < pool->n_hosts; i++) {
        if (strcmp(pool->hosts[i]->host.target, target) == 0) {
            return pool->hosts[i];
        }
    }
    return NULL;
}

pool_host_t *host_pool_find(const host_pool_t *pool, const host_t *host)
{
    int i = 0;
    while (&pool->hosts[i]->host != host) {
        i++;
    }
    return pool->hosts[i];
}

static bool append(host_pool_t *pool, const host_t *host)
{
    size_t n = (size_t)pool->n_hosts + 1;
    pool_host_t *made = calloc(1, sizeof *made);
    pool_host_t **hosts = realloc(pool->hosts, n * sizeof(pool_host_t *));
    pool->hosts = hosts != NULL ? hosts : pool->hosts;
    pool_host_t **order = realloc(pool->order, n * sizeof(pool_host_t *));
    pool->order = order != NULL ? order : pool->order;
    if (made != NULL) {
        made->host = (host_t){.name = strdup(host->name),
                              .target = strdup(host->target),
                              .address = host->address != NULL ? strdup(host->address) : NULL,
                              .agent_port = host->agent_port,
                              .slots = host->slots,
                              .is_local = host->is_local};
        made->is_there = true;
    }
    if (made == NULL || hosts == NULL || order == NULL || made->host.name == NULL ||
        made->host.target == NULL || (host->address != NULL && made->host.address == NULL)) {
        if (made != NULL) {
            free(made->host.name);
            free(made->host.target);
            free(made->host.address);
        }
        free(made);
        return false;
    }
    pool->hosts[pool->n_hosts++] = made;
    return true;
}

bool host_pool_update(host_pool_t *pool, const hosts_t *found)
{
    for (int i = 0; i < pool->n_hosts; i++) {
        pool->hosts[i]->is_there = false;
    }
    for (int i = 0; i < found->n; i++) {
        pool_host_t *known = find(pool, found->list[i].target);
        if (known != NULL) {
            known->is_there = true;
            known->host.slots = found->list[i].slots;
        } else if (!append(pool, &found->list[i])) {
            return false;
        }
    }
    return true;
}

void host_pool_bar(host_pool_t *pool, pool_host_t *host, uint64_t now_ns, uint32_t random)
{
    if (pool->cooldown_max_s <= 0) {
        host->barred_until_ns = NEVER_NS;
        return;
    }
    double delay_s = pool->cooldown_min_s * (1 + random / 4294967296.0);
    for (int i = 0; i < host->n_failures && delay_s < pool->cooldown_max_s; i++) {
        delay_s *= 2;
    }
    host->n_failures++;
    host->barred_until_ns = now_ns + (uint64_t)(MIN(delay_s, pool->cooldown_max_s) * 1e9);
}

static bool is_usable(const pool_host_t *host, uint64_t now_ns)
{
    return host->is_there && host->barred_until_ns <= now_ns;
}

int host_pool_share(host_pool_t *pool, int max_ranks, uint64_t now_ns)
{
    int n_ranks = 0;
    pool->n_order = 0;
    for (int i = 0; i < pool->n_hosts; i++) {
        pool->hosts[i]->quota = 0;
    }
    for (int has_ranks = 1; has_ranks >= 0; has_ranks--) {
        for (int i = 0; i < pool->n_hosts; i++) {
            pool_host_t *host = pool->hosts[i];
            int left = max_ranks > 0 ? max_ranks - n_ranks : host->host.slots;
            if ((host->n_alive > 0) == (has_ranks == 1) && is_usable(host, now_ns) && left > 0) {
                host->quota = MIN(host->host.slots, left);
                n_ranks += host->quota;
                pool->order[pool->n_order++] = host;
            }
        }
    }
    return n_ranks;
}

unsigned host_pool_news(const host_pool_t *pool)
{
    unsigned news = 0;
    for (int i = 0; i < pool->n_hosts; i++) {
        news |= pool->hosts[i]->quota < pool->hosts[i]->n_alive ? NEWS_REMOVED : 0;
        news |= pool->hosts[i]->quota > pool->hosts[i]->n_alive ? NEWS_ADDED : 0;
    }
    return news;
}

bool host_pool_may_grow(const host_pool_t *pool)
{
    for (int i = 0; i < pool->n_hosts; i++) {
        if (pool->hosts[i]->is_there && pool->hosts[i]->barred_until_ns != 0 &&
            pool->hosts[i]->barred_until_ns != NEVER_NS) {
            return true;
        }
    }
    return false;
}

void host_pool_free(host_pool_t *pool)
{
    for (int i = 0; i < pool->n_hosts; i++) {
        free(pool->hosts[i]->host.name);
        free(pool->hosts[i]->host.target);
        free(pool->hosts[i]->host.address);
        free(pool->hosts[i]);
    }
    free(pool->hosts);
    free(pool->order);
    *pool = (host_pool_t){0};
}
