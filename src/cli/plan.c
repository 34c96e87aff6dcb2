// SPDX-License-Identifier: Apache-2.0
//
// plan.c - which ranks run where, and what each is told: places, and the environment of ranks.
//
// Hosts are filled in order, all slots of one before the next, until there are np ranks. A rank's
// cross rank is its host's position among the hosts that have its local rank. Pure, nothing is
// looked up. Cost: ranks + hosts.
//
// This is the one place where the environment of a rank is put together, in the order in which
// later ones win: what the agent has (the launcher's own environment on this host, that of an ssh
// session on others); what all ranks of the job are told (environ_of_job: the launcher's exportable
// variables, then options, then where to meet); what the agent was told to keep of its own
// (environ_keep); what makes a process this rank (environ_of_rank); what only its host knows
// (environ_of_host). A list of changes is NAME=value after NAME=value, each with its '\0'.
#define _GNU_SOURCE
#include "cli/cli.h"

#include <fnmatch.h>
#include <stdlib.h>
#include <unistd.h>

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

// --- The environment of ranks --------------------------------------------------------------------

// Variables that belong to this machine, this session or this shell, not to the job.
static const char *const not_exported[] = {
    "BASH_FUNC_*",
    "OLDPWD",
    "PWD",
    "SHLVL",
    "_",
    "*CUDA_VISIBLE_DEVICES",
    "_HOROVOD_SECRET_KEY",
    "HOSTNAME",
    "SSH_*",
    "DISPLAY",
    "XAUTHORITY",
    "XDG_RUNTIME_DIR",
    "XDG_SESSION_*",
    "DBUS_SESSION_BUS_ADDRESS",
    "TERM_*",
    "TMUX*",
    "HOROVODRUN_*",
    "NVIDIA_VISIBLE_DEVICES",
    "SLURMD_NODENAME",
    "PAI_CURRENT_*",
    "PAI_CONTAINER_*",
    "PAI_TASK_INDEX",
    "PAI_TASK_ROLE_INDEX",
    "PAI_TASK_ROLE_NAME",
    "FC_TASK*",
};

bool environ_is_exportable(const char *name)
{
    for (size_t i = 0; i < N_ELEMENTS(not_exported); i++) {
        if (fnmatch(not_exported[i], name, 0) == 0) {
            return false;
        }
    }
    return true;
}

static void put(buf_t *list, const char *name, const char *value)
{
    buf_append(list, name, strlen(name));
    buf_append(list, "=", 1);
    buf_append(list, value, strlen(value) + 1);
}

static void put_own_environment(buf_t *list)
{
    char name[256];
    for (char **at = environ; *at != NULL; at++) {
        size_t bytes = strcspn(*at, "=");
        if (bytes == 0 || (*at)[bytes] != '=' || bytes >= sizeof name) {
            continue;
        }
        memcpy(name, *at, bytes);
        name[bytes] = '\0';
        if (environ_is_exportable(name)) {
            buf_append(list, *at, strlen(*at) + 1);
        }
    }
}

void environ_put(buf_t *list, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    buf_vprintf(list, format, args);
    va_end(args);
    buf_append(list, "", 1);
}

// Who moves tensors is not the environment's to say: no MPI is there where we start the ranks.
static void put_gloo(buf_t *list, enum knob_id id)
{
    const knob_info_t *knob = &knob_infos[id];
    const char *asked = environment(knob->env);
    int choice;
    if (asked != NULL && (strcasecmp(asked, "mpi") == 0 || strcasecmp(asked, "ccl") == 0 ||
                          knob_parse(knob, knob->env, asked, &choice, NULL) != HVD_OK)) {
        say("%s=%.100s has no effect: ranks that %s starts itself use Horovod's own collectives; "
            "use --mpi for those of MPI, or unset it",
            knob->env, asked, PROGRAM);
    }
    put(list, knob->env, "gloo");
}

void environ_of_job(const options_t *options, const char *addresses, bool is_elastic, bool exports,
                    buf_t *list)
{
    if (exports) {
        put_own_environment(list);
        put_gloo(list, KNOB_controller);
        put_gloo(list, KNOB_cpu_operations);
        put(list, "PYTHONUNBUFFERED", "1");
    }
    for (int i = 0; i < N_OPTIONS; i++) {
        option_t option = option_at(i);
        if ((option.traits & EXPORTED) != 0 && options->origins[i] > BY_ENVIRONMENT) {
            put(list, option.info.env, options->texts[i]);
        }
    }
    put(list, "HOROVOD_RENDEZVOUS_ADDR", addresses);
    put(list, "HOROVOD_GLOO_RENDEZVOUS_ADDR", addresses);
    if (options->network_interfaces[0] != '\0') {
        put(list, "HOROVOD_GLOO_IFACE", options->network_interfaces);
        put(list, "NCCL_SOCKET_IFNAME", options->network_interfaces);
    }
    if (is_elastic) {
        put(list, "HOROVOD_ELASTIC", "1");
        // Who waits longer for the others leaves: the next generation is formed without them.
        environ_put(list, "HOROVOD_START_TIMEOUT=%g", options->start_timeout);
        environ_put(list, "HOROVOD_ELASTIC_TIMEOUT=%lld", (long long)options->elastic_timeout);
    }
}

void environ_of_rank(const rank_info_t *rank, buf_t *list)
{
    const rank_place_t *place = rank->place;
    if (place != NULL) {
        environ_put(list, "HOROVOD_RANK=%d", place->rank);
        environ_put(list, "HOROVOD_SIZE=%d", rank->n_ranks);
        environ_put(list, "HOROVOD_LOCAL_RANK=%d", place->local_rank);
        environ_put(list, "HOROVOD_LOCAL_SIZE=%d", place->local_size);
        environ_put(list, "HOROVOD_CROSS_RANK=%d", place->cross_rank);
        environ_put(list, "HOROVOD_CROSS_SIZE=%d", place->cross_size);
        environ_put(list, "HOROVOD_HOSTNAME=%s", rank->host_name);
    } else {
        environ_put(list, "HOROVOD_RANK=-1");
    }
    environ_put(list, "HOROVOD_RENDEZVOUS_PORT=%d", rank->job->port);
    environ_put(list, "HOROVOD_GLOO_RENDEZVOUS_PORT=%d", rank->job->port);
    environ_put(list, "HOROVOD_JOB_ID=%s", rank->job->id);
    if (rank->generation > 0) {
        environ_put(list, "HOROVOD_ELASTIC_WORKER=%d", rank->id);
        environ_put(list, "HOROVOD_ELASTIC_GENERATION=%u", rank->generation);
    }
}

// The launcher as this host sees it is the best address of all: it is how ssh got here.
static void prefer_address(const char *seen, buf_t *list)
{
    const char *name = "HOROVOD_RENDEZVOUS_ADDR";
    const char *given = environ_find(list->data, list->len, name);
    char *before = given != NULL ? strdup(given) : NULL;
    if (before != NULL) {
        environ_put(list, "%s=%.*s,%s", name, (int)strcspn(seen, " "), seen, before);
    }
    free(before);
}

void environ_of_host(const rank_host_t *host, buf_t *list)
{
    environ_put(list, "HOROVOD_SECRET_FILE=%s/secret", host->directory);
    environ_put(list, "HOROVOD_SECRET_FD=-1");
    environ_put(list, "HOROVOD_RUN_PROGRAM=%s", host->program);
    environ_put(list, "HOROVOD_BLAME_FILE=%s", host->blame);
    if (host->has_payload) {
        environ_put(list, "HOROVOD_RUN_PAYLOAD=%s/payload", host->directory);
    }
    if (host->is_elastic) {
        environ_put(list, "HOROVOD_ELASTIC_DIR=%s", host->directory);
    }
    if (host->result[0] != '\0') {
        environ_put(list, "HOROVOD_RUN_RESULT=%s", host->result);
        environ_put(list, "HOROVOD_RUN_READY=%s/ready.%d", host->directory, host->id);
    }
    if (host->launcher != NULL) {
        prefer_address(host->launcher, list);
    }
}

void environ_keep(const char *names, buf_t *list)
{
    char name[256];
    for (; *names != '\0'; names += strspn(names, ",")) {
        size_t bytes = strcspn(names, ",");
        snprintf(name, sizeof name, "%.*s", (int)bytes, names);
        const char *value = environment(name);
        if (value != NULL) {
            environ_put(list, "%s=%s", name, value);
        }
        names += bytes;
    }
}

// --- Merging -------------------------------------------------------------------------------------

static bool same_name(const char *a, const char *b)
{
    size_t bytes = strcspn(a, "=");
    return strncmp(a, b, bytes) == 0 && b[bytes] == '=';
}

const char *environ_find(const uint8_t *list, size_t bytes, const char *name)
{
    const char *at = (const char *)list, *end = at + bytes, *stop, *value = NULL;
    size_t n = strlen(name);
    for (; at < end && (stop = memchr(at, '\0', (size_t)(end - at))) != NULL; at = stop + 1) {
        if (strncmp(at, name, n) == 0 && at[n] == '=') {
            value = at + n + 1; // the last one counts
        }
    }
    return value;
}

static size_t count_entries(const uint8_t *changes, size_t bytes)
{
    size_t n = 0;
    for (size_t i = 0; i < bytes; i++) {
        n += changes[i] == '\0';
    }
    return n;
}

char **environ_merge(char *const *base, const uint8_t *changes, size_t bytes)
{
    size_t n_base = 0, n = 0;
    while (base[n_base] != NULL) {
        n_base++;
    }
    size_t pointers = (n_base + count_entries(changes, bytes) + 1) * sizeof(char *);
    char **merged = malloc(pointers + bytes);
    if (merged == NULL) {
        return NULL;
    }
    char *texts = (char *)merged + pointers;
    if (bytes > 0) {
        memcpy(texts, changes, bytes);
    }
    for (; n < n_base; n++) {
        merged[n] = base[n];
    }
    for (char *at = texts; at < texts + bytes; at += strlen(at) + 1) {
        size_t place = 0;
        while (place < n && !same_name(at, merged[place])) {
            place++;
        }
        merged[place] = at;
        n += place == n;
    }
    merged[n] = NULL;
    return merged;
}
