// SPDX-License-Identifier: Apache-2.0
//
// tasks.c - the tasks of an OpenPAI job as hosts, from the variables every container has.
//
// Four kinds of variables are the same in all versions of OpenPAI: the list of roles, how many
// tasks each has, and address and ports of every task. A task is reached by ssh under its alias
// "role-index", which is in ssh's configuration there and in no resolver, or dials the master at a
// port of the master's. Which task this is, the variables say: two tasks may share a machine and
// its address. This task comes first, so that rank 0 is the master's. Pure but for the environment.
#define _GNU_SOURCE
#include "pai/internal.h"

#include <stdlib.h>

#define MAX_TASKS 100000
#define MASTER "master-0"
#define NO_JOB "is this a container of an OpenPAI job?"

// PAI_..._<role>, or with an index behind; NULL: not set. Names may have dots and tildes in them.
static const char *variable(const char *start, const char *role, int index, const char *end)
{
    char name[512], number[16] = "";
    if (index >= 0) {
        snprintf(number, sizeof number, "_%d", index);
    }
    snprintf(name, sizeof name, "%s_%s%s%s", start, role, number, end);
    return environment(name);
}

// The first number of a list like "4,8,1024"; -1: none.
static int first_number(const char *text)
{
    char *end;
    if (text == NULL || text[0] < '0' || text[0] > '9') {
        return -1;
    }
    long value = strtol(text, &end, 10);
    return (*end == '\0' || *end == ',') && value <= MAX_TASKS ? (int)value : -1;
}

// Ranks of a task: as asked for, else its GPUs, else one. The older versions tell a task about the
// resources of its own role only; the others are taken to be alike.
static int slots_of(const options_t *options, const char *role)
{
    if (options->origins[OPTION_slots_per_host] != BY_DEFAULT) {
        return (int)options->slots_per_host;
    }
    const char *resources = variable("PAI_RESOURCE", role, -1, "");
    resources = resources != NULL ? resources : environment("PAI_RESOURCE");
    return MAX(first_number(resources), 1);
}

static hvd_status_t add_task(const options_t *options, const char *role, int index, bool is_self,
                             hosts_t *hosts, err_t *err)
{
    const char *address = variable("PAI_HOST_IP", role, index, "");
    // Where its agents dial, if it is the master: OpenPAI gives every task a port for http.
    const char *ports = variable("PAI_PORT_LIST", role, index, "_horovod");
    ports = ports != NULL ? ports : variable("PAI_PORT_LIST", role, index, "_http");
    host_t host = {.slots = slots_of(options, role),
                   .is_local = is_self,
                   .agent_port = MIN(MAX(first_number(ports), 0), 65535)};
    if (address == NULL) {
        return fail(err, HVD_INVALID_ARGUMENT, "PAI_HOST_IP_%s_%d is not set; " NO_JOB, role,
                    index);
    }
    if (asprintf(&host.name, "%s-%d", role, index) < 0) {
        host.name = NULL;
    }
    host.target = host.name != NULL ? strdup(host.name) : NULL;
    host.address = strdup(address);
    host_t *list = realloc(hosts->list, ((size_t)hosts->n + 1) * sizeof *list);
    hosts->list = list != NULL ? list : hosts->list;
    if (list == NULL || host.target == NULL || host.address == NULL) {
        free(host.name);
        free(host.target);
        free(host.address);
        return fail(err, HVD_NO_MEMORY, "no memory for the tasks of the job");
    }
    int place = is_self ? 0 : hosts->n;
    memmove(list + place + 1, list + place, (size_t)(hosts->n - place) * sizeof *list);
    list[place] = host;
    hosts->n++;
    return HVD_OK;
}

static hvd_status_t add_role(const options_t *options, const char *role, hosts_t *hosts, err_t *err)
{
    const char *own_role = environment("PAI_CURRENT_TASK_ROLE_NAME");
    const char *own_index = environment("PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX");
    int n = first_number(variable("PAI_TASK_ROLE_TASK_COUNT", role, -1, ""));
    hvd_status_t status = HVD_OK;
    own_index = own_index != NULL ? own_index : environment("PAI_TASK_INDEX");
    if (n < 0 || own_role == NULL || first_number(own_index) < 0) {
        return fail(err, HVD_INVALID_ARGUMENT, "%s%s is not set, or is not a number; " NO_JOB,
                    n < 0              ? "PAI_TASK_ROLE_TASK_COUNT_"
                    : own_role == NULL ? "PAI_CURRENT_TASK_ROLE_NAME"
                                       : "PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX",
                    n < 0 ? role : "");
    }
    for (int i = 0; i < n && status == HVD_OK; i++) {
        bool is_self = strcmp(role, own_role) == 0 && i == first_number(own_index);
        status = add_task(options, role, i, is_self, hosts, err);
    }
    return status;
}

hvd_status_t pai_tasks(const options_t *options, hosts_t *hosts_p, err_t *err)
{
    const char *roles = environment("PAI_TASK_ROLE_LIST");
    hosts_t hosts = {.knows_local = true};
    hvd_status_t status = HVD_OK;
    char role[256];
    if (roles == NULL) {
        return fail(err, HVD_INVALID_ARGUMENT, "PAI_TASK_ROLE_LIST is not set; " NO_JOB);
    }
    while (*roles != '\0' && status == HVD_OK) {
        size_t bytes = strcspn(roles, ",");
        snprintf(role, sizeof role, "%.*s", (int)MIN(bytes, sizeof role - 1), roles);
        status = add_role(options, role, &hosts, err);
        roles += bytes + (roles[bytes] == ',');
    }
    if (status == HVD_OK && (hosts.n == 0 || !hosts.list[0].is_local)) {
        status = fail(err, HVD_INVALID_ARGUMENT,
                      "PAI_CURRENT_TASK_ROLE_NAME and ..._CURRENT_TASK_INDEX do not name a task of "
                      "PAI_TASK_ROLE_LIST; " NO_JOB);
    }
    if (status != HVD_OK) {
        hosts_free(&hosts);
        return status;
    }
    *hosts_p = hosts;
    return HVD_OK;
}

// Without the index.
static size_t role_bytes(const host_t *host)
{
    return (size_t)(strrchr(host->name, '-') - host->name);
}

static int count_role(const hosts_t *tasks, const host_t *of)
{
    size_t bytes = role_bytes(of);
    int n = 0;
    for (int i = 0; i < tasks->n; i++) {
        n += role_bytes(&tasks->list[i]) == bytes &&
             strncmp(tasks->list[i].name, of->name, bytes) == 0;
    }
    return n;
}

const host_t *pai_master(const hosts_t *tasks)
{
    const host_t *found = NULL;
    for (int i = 1; i < tasks->n; i++) {
        const host_t *task = &tasks->list[i];
        if (strcmp(task->name, MASTER) == 0) {
            return task;
        }
        found = found == NULL && count_role(tasks, task) == 1 ? task : found;
    }
    return found;
}
