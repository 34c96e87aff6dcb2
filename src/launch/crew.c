// SPDX-License-Identifier: Apache-2.0
//
// crew.c - which hosts an elastic job may use, and how its ranks are shared among them.
//
// Hosts keep their order for as long as the job lives; new ones come after. A host on which a rank
// failed is barred: for good, or for a while that doubles with every failure. Hosts that have ranks
// get places before those that have none, so rank 0 is always one that has the state of the job,
// unless none is left. Pure but for memory.
#include "launch/crew.h"

#include <stdlib.h>

#define MIN_COOLDOWN_S 1
#define MAX_COOLDOWN_S 3600

hvd_status_t crew_read_cooldown(crew_t *crew, const char *text, err_t *err)
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
    crew->cooldown_min_s = min_s;
    crew->cooldown_max_s = max_s;
    return HVD_OK;
}

static crew_host_t *find(const crew_t *crew, const char *target)
{
    for (int i = 0; i < crew->n_hosts; i++) {
        if (strcmp(crew->hosts[i]->host.target, target) == 0) {
            return crew->hosts[i];
        }
    }
    return NULL;
}

crew_host_t *crew_host_of(const crew_t *crew, const host_t *host)
{
    int i = 0;
    while (&crew->hosts[i]->host != host) {
        i++;
    }
    return crew->hosts[i];
}

static bool append(crew_t *crew, const host_t *host)
{
    size_t n = (size_t)crew->n_hosts + 1;
    crew_host_t *made = calloc(1, sizeof *made);
    crew_host_t **hosts = realloc(crew->hosts, n * sizeof(crew_host_t *));
    crew->hosts = hosts != NULL ? hosts : crew->hosts;
    crew_host_t **order = realloc(crew->order, n * sizeof(crew_host_t *));
    crew->order = order != NULL ? order : crew->order;
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
    crew->hosts[crew->n_hosts++] = made;
    return true;
}

bool crew_update(crew_t *crew, const hosts_t *found)
{
    for (int i = 0; i < crew->n_hosts; i++) {
        crew->hosts[i]->is_there = false;
    }
    for (int i = 0; i < found->n; i++) {
        crew_host_t *known = find(crew, found->list[i].target);
        if (known != NULL) {
            known->is_there = true;
            known->host.slots = found->list[i].slots;
        } else if (!append(crew, &found->list[i])) {
            return false;
        }
    }
    return true;
}

void crew_bar(crew_t *crew, crew_host_t *host, uint64_t now_ns, uint32_t random)
{
    if (crew->cooldown_max_s <= 0) {
        host->barred_until_ns = NEVER_NS;
        return;
    }
    double delay_s = crew->cooldown_min_s * (1 + random / 4294967296.0);
    for (int i = 0; i < host->n_failures && delay_s < crew->cooldown_max_s; i++) {
        delay_s *= 2;
    }
    host->n_failures++;
    host->barred_until_ns = now_ns + (uint64_t)(MIN(delay_s, crew->cooldown_max_s) * 1e9);
}

static bool is_usable(const crew_host_t *host, uint64_t now_ns)
{
    return host->is_there && host->barred_until_ns <= now_ns;
}

int crew_share(crew_t *crew, int max_ranks, uint64_t now_ns)
{
    int n_ranks = 0;
    crew->n_order = 0;
    for (int i = 0; i < crew->n_hosts; i++) {
        crew->hosts[i]->quota = 0;
    }
    for (int has_ranks = 1; has_ranks >= 0; has_ranks--) {
        for (int i = 0; i < crew->n_hosts; i++) {
            crew_host_t *host = crew->hosts[i];
            int left = max_ranks > 0 ? max_ranks - n_ranks : host->host.slots;
            if ((host->n_alive > 0) == (has_ranks == 1) && is_usable(host, now_ns) && left > 0) {
                host->quota = MIN(host->host.slots, left);
                n_ranks += host->quota;
                crew->order[crew->n_order++] = host;
            }
        }
    }
    return n_ranks;
}

unsigned crew_news(const crew_t *crew)
{
    unsigned news = 0;
    for (int i = 0; i < crew->n_hosts; i++) {
        news |= crew->hosts[i]->quota < crew->hosts[i]->n_alive ? NEWS_REMOVED : 0;
        news |= crew->hosts[i]->quota > crew->hosts[i]->n_alive ? NEWS_ADDED : 0;
    }
    return news;
}

bool crew_may_grow(const crew_t *crew)
{
    for (int i = 0; i < crew->n_hosts; i++) {
        if (crew->hosts[i]->is_there && crew->hosts[i]->barred_until_ns != 0 &&
            crew->hosts[i]->barred_until_ns != NEVER_NS) {
            return true;
        }
    }
    return false;
}

void crew_free(crew_t *crew)
{
    for (int i = 0; i < crew->n_hosts; i++) {
        free(crew->hosts[i]->host.name);
        free(crew->hosts[i]->host.target);
        free(crew->hosts[i]->host.address);
        free(crew->hosts[i]);
    }
    free(crew->hosts);
    free(crew->order);
    *crew = (crew_t){0};
}
