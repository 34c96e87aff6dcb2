// SPDX-License-Identifier: Apache-2.0
//
// host_pool.c - which hosts an elastic job may use, and how its ranks are shared among them.
//
// Hosts keep their order for as long as the job lives; new ones come after. A rank that failed is
// started again on its host, so often; then the host gets no new ones before it is forgiven. A host
// that is lost is barred, for a while that may double with every failure; so is one whose ranks
// fail, if they are not to be started again. Hosts that have ranks get places before those that
// have none, so rank 0 is always one that has the state of the job, unless none is left. Pure but
// for memory.
//
// Where the hosts come from is below: a script, once a second, in a thread, or a list.
#define _GNU_SOURCE
#include "launch/elastic.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#define RESTART_PAUSE_NS NS_PER_S // after the second failure; the first is not waited for
#define MAX_DOUBLINGS 6
#define FORGIVEN_AFTER_NS (600 * NS_PER_S) // without a failure
#define MIN_COOLDOWN_S 1
#define MAX_COOLDOWN_S 3600
#define ASK_EVERY_S 1
#define SCRIPT_TIMEOUT_MS 20000
#define MAX_BYTES (256 * KIB)

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
    for (int i = 0; i < pool->n_hosts; i++) { // one that is named again has come back
        pool->hosts[i]->is_leaving &= pool->hosts[i]->is_there;
    }
    return true;
}

void host_pool_bar(host_pool_t *pool, pool_host_t *host, uint64_t now_ns, uint32_t random)
{
    host->is_given_up = pool->cooldown_max_s <= 0;
    if (host->is_given_up) {
        host->barred_until_ns = pool->max_restarts > 0 ? now_ns + FORGIVEN_AFTER_NS : NEVER_NS;
        return;
    }
    double delay_s = pool->cooldown_min_s * (1 + random / 4294967296.0);
    for (int i = 0; i < host->n_failures && delay_s < pool->cooldown_max_s; i++) {
        delay_s *= 2;
    }
    host->n_failures++;
    host->barred_until_ns = now_ns + (uint64_t)(MIN(delay_s, pool->cooldown_max_s) * 1e9);
}

bool host_pool_restart(const host_pool_t *pool, pool_host_t *host, uint64_t now_ns)
{
    if (host->n_restarts > 0 && now_ns - host->failed_ns >= FORGIVEN_AFTER_NS) {
        host->n_restarts = 0;
    }
    host->failed_ns = now_ns;
    host->n_restarts++;
    host->is_given_up = host->n_restarts > pool->max_restarts;
    if (host->is_given_up) {
        host->restart_at_ns = now_ns + FORGIVEN_AFTER_NS;
        return false;
    }
    int doublings = MIN(host->n_restarts - 2, MAX_DOUBLINGS);
    host->restart_at_ns = doublings < 0 ? 0 : now_ns + (RESTART_PAUSE_NS << doublings);
    return true;
}

// How many ranks it may have: no new ones while it is not to start any, or cannot.
static int places_of(pool_host_t *host, bool starts_none, uint64_t now_ns)
{
    int n_there = MIN(host->n_alive + host->n_spare, host->host.slots);
    host->is_pausing = host->restart_at_ns > now_ns;
    return host->is_pausing || host->is_full || starts_none ? n_there : host->host.slots;
}

static bool is_usable(const pool_host_t *host, uint64_t now_ns)
{
    return host->is_there && !host->is_absent && !host->is_leaving &&
           host->barred_until_ns <= now_ns;
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
            int places = places_of(host, pool->starts_none, now_ns);
            int left = max_ranks > 0 ? max_ranks - n_ranks : places;
            if ((host->n_alive > 0) == (has_ranks == 1) && is_usable(host, now_ns) &&
                MIN(places, left) > 0) {
                host->quota = MIN(places, left);
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
        const pool_host_t *host = pool->hosts[i];
        bool comes_back = host->barred_until_ns != 0 || host->is_absent || host->is_pausing;
        if (host->is_there && comes_back && !host->is_given_up) {
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

// --- Discovery -----------------------------------------------------------------------------------

// The script prints one host, or host:slots, per line; what it prints counts if it exits with 0.
// Names are looked up here too, as resolvers may be slow. A first answer is needed to start; later
// failures are warned of once in a row, and the hosts stay as they were. Without a script the hosts
// of -H or the hostfile are all there ever are.

struct discovery {
    const options_t *options;
    const char *script;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool has_thread, is_stopping, is_new, has_warned;
    hosts_t hosts; // newest, when is_new
    char *text;    // the script's last answer; the thread's alone after the start
};

static bool is_blank(const char *text)
{
    return text[strspn(text, " \t\r\n")] == '\0';
}

// What the script says now. text: MAX_BYTES.
static hvd_status_t ask(const discovery_t *discovery, char *text, hosts_t *hosts_p, err_t *err)
{
    char *argv[] = {(char *)discovery->script, NULL};
    int code = run_program(argv, SCRIPT_TIMEOUT_MS, text, MAX_BYTES);
    if (code != 0) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "Failed to execute discovery script: %s. Exit code: %d; it must be executable, "
                    "print one host or host:slots per line and exit with 0 within %d s",
                    discovery->script, code, SCRIPT_TIMEOUT_MS / 1000);
    }
    if (is_blank(text)) {
        *hosts_p = (hosts_t){0};
        return HVD_OK;
    }
    hvd_status_t status = hostfile_parse(text, discovery->script,
                                         (int)discovery->options->slots_per_host, hosts_p, err);
    if (status == HVD_OK) {
        hosts_find_local(discovery->options, hosts_p);
    }
    return status;
}

static void offer(discovery_t *discovery, hosts_t hosts)
{
    pthread_mutex_lock(&discovery->lock);
    if (discovery->is_new) {
        hosts_free(&discovery->hosts);
    }
    discovery->hosts = hosts;
    discovery->is_new = true;
    pthread_mutex_unlock(&discovery->lock);
}

static void ask_again(discovery_t *discovery, char *text)
{
    hosts_t hosts;
    err_t err = {0};
    if (ask(discovery, text, &hosts, &err) != HVD_OK) {
        if (!discovery->has_warned) {
            say("warning: %s; keeping the current hosts", err.text);
        }
        discovery->has_warned = true;
        return;
    }
    discovery->has_warned = false;
    if (strcmp(text, discovery->text) == 0) {
        hosts_free(&hosts);
        return;
    }
    memcpy(discovery->text, text, strlen(text) + 1);
    offer(discovery, hosts);
}

static bool wait_for_turn(discovery_t *discovery)
{
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    at.tv_sec += ASK_EVERY_S;
    pthread_mutex_lock(&discovery->lock);
    while (!discovery->is_stopping &&
           pthread_cond_timedwait(&discovery->changed, &discovery->lock, &at) != ETIMEDOUT) {
    }
    bool goes_on = !discovery->is_stopping;
    pthread_mutex_unlock(&discovery->lock);
    return goes_on;
}

static void *run(void *arg)
{
    discovery_t *discovery = arg;
    char *text = malloc(MAX_BYTES);
    while (text != NULL && wait_for_turn(discovery)) {
        ask_again(discovery, text);
    }
    free(text);
    return NULL;
}

static hvd_status_t ask_first(discovery_t *discovery, const options_t *options, err_t *err)
{
    hosts_t hosts;
    hvd_status_t status;
    if (discovery->script[0] != '\0') {
        status = ask(discovery, discovery->text, &hosts, err);
    } else {
        status = hosts_choose(options, &hosts, err);
        if (status == HVD_OK) {
            hosts_find_local(options, &hosts);
        }
    }
    if (status == HVD_OK) {
        offer(discovery, hosts);
    }
    return status;
}

hvd_status_t discovery_start(const options_t *options, discovery_t **discovery_p, err_t *err)
{
    discovery_t *discovery = calloc(1, sizeof *discovery);
    char *text = calloc(1, MAX_BYTES);
    if (discovery == NULL || text == NULL) {
        free(discovery);
        free(text);
        return fail(err, HVD_NO_MEMORY, "no memory to look for hosts");
    }
    *discovery =
        (discovery_t){.options = options, .script = options->host_discovery_script, .text = text};
    pthread_mutex_init(&discovery->lock, NULL);
    pthread_cond_init(&discovery->changed, NULL);
    hvd_status_t status = ask_first(discovery, options, err);
    if (status == HVD_OK && discovery->script[0] != '\0') {
        discovery->has_thread = pthread_create(&discovery->thread, NULL, run, discovery) == 0;
        status = discovery->has_thread
                     ? HVD_OK
                     : fail(err, HVD_SYSTEM, "cannot start a thread to look for hosts");
    }
    if (status != HVD_OK) {
        discovery_stop(discovery);
        return status;
    }
    *discovery_p = discovery;
    return HVD_OK;
}

bool discovery_take(discovery_t *discovery, hosts_t *hosts_p)
{
    pthread_mutex_lock(&discovery->lock);
    bool is_new = discovery->is_new;
    if (is_new) {
        *hosts_p = discovery->hosts;
        discovery->hosts = (hosts_t){0};
        discovery->is_new = false;
    }
    pthread_mutex_unlock(&discovery->lock);
    return is_new;
}

bool discovery_goes_on(const discovery_t *discovery)
{
    return discovery->has_thread;
}

void discovery_stop(discovery_t *discovery)
{
    if (discovery == NULL) {
        return;
    }
    pthread_mutex_lock(&discovery->lock);
    discovery->is_stopping = true;
    pthread_cond_signal(&discovery->changed);
    pthread_mutex_unlock(&discovery->lock);
    if (discovery->has_thread) {
        pthread_join(discovery->thread, NULL);
    }
    hosts_free(&discovery->hosts);
    pthread_mutex_destroy(&discovery->lock);
    pthread_cond_destroy(&discovery->changed);
    free(discovery->text);
    free(discovery);
}
