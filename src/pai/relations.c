// SPDX-License-Identifier: Apache-2.0
//
// relations.c - what the rows of rules.c cannot say about an OpenPAI job.
//
// Numbers that bound each other, names that must have been declared, and settings that do nothing
// the way they are written. pai_check looks at a whole job: first at the rows, then at these. Pure.
#include "pai/internal.h"

typedef struct walk {
    const pai_document_t *document;
    const pai_node_t *job;
    pai_findings_t *findings;
} walk_t;

static const pai_node_t *get(const walk_t *walk, const pai_node_t *map, const char *key)
{
    return pai_get(walk->document, map, key);
}

// --- v1: JSON ------------------------------------------------------------------------------------

// One number of a role may not be above another.
static void check_at_most(const walk_t *walk, const pai_node_t *role, const char *path,
                          const char *key, const char *limit_key, int64_t limit)
{
    const pai_node_t *value = get(walk, role, key);
    char inner[PAI_PATH_BYTES];
    if (pai_int(value, 0) > limit) {
        snprintf(inner, sizeof inner, "%s.%s", path, key);
        pai_find(walk->findings, value, inner, false, "is %lld, but must be at most %s (%lld)",
                 (long long)pai_int(value, 0), limit_key, (long long)limit);
    }
}

// Entry i of a list has a name that an earlier entry has, too.
static void check_twice(const walk_t *walk, const pai_node_t *list, int i, const char *key,
                        const char *path)
{
    const pai_node_t *name = get(walk, pai_item(walk->document, list, i), key);
    char inner[PAI_PATH_BYTES];
    for (int other = 0; name != NULL && other < i; other++) {
        const pai_node_t *first = get(walk, pai_item(walk->document, list, other), key);
        if (first != NULL && strcmp(pai_text(first), pai_text(name)) == 0) {
            snprintf(inner, sizeof inner, "%s[%d].%s", path, i, key);
            pai_find(walk->findings, name, inner, false, "\"%s\" appears twice, first in line %zu",
                     pai_text(name), pai_line(first));
            return;
        }
    }
}

static int count_list(const walk_t *walk, const pai_node_t *list)
{
    return list != NULL && pai_type(list) == IS_LIST ? pai_count(walk->document, list) : 0;
}

// How many bytes "sleep 1000" takes at the beginning of a command; 0: none is there.
static size_t sleep_bytes(const char *command)
{
    size_t blank = strspn(command, " \t\n");
    size_t word = blank + (strncmp(command + blank, "sleep ", 6) == 0 ? 6 : 0);
    size_t digits = strspn(command + word, "0123456789");
    return word > blank && digits > 0 ? word + digits : 0;
}

// A command that sleeps and goes on hopes that the other tasks are up by then. One that only sleeps
// waits for nobody.
static void warn_of_sleep(const walk_t *walk, const pai_node_t *command, const pai_node_t *next,
                          const char *path)
{
    const char *text = pai_text(command);
    size_t slept = sleep_bytes(text);
    size_t joint = slept + strspn(text + slept, " \t\n;&");
    bool goes_on = joint > slept && text[joint] != '\0';
    bool ends = text[joint] == '\0';
    if (slept > 0 && (goes_on || (ends && next != NULL))) {
        pai_find(walk->findings, command, path, true,
                 "\"%.*s\" guesses when the other tasks are up; \"" PROGRAM
                 " --pai COMMAND\" waits just until they are, if workers run \"" PROGRAM
                 " --pai-worker\"",
                 (int)slept, text);
    }
}

static void check_v1_roles(const walk_t *walk)
{
    const pai_node_t *roles = get(walk, walk->job, "taskRoles");
    for (int i = 0; i < count_list(walk, roles); i++) {
        const pai_node_t *role = pai_item(walk->document, roles, i);
        const pai_node_t *ports = get(walk, role, "portList");
        int64_t n_tasks = pai_int(get(walk, role, "taskNumber"), 1);
        char path[64], ports_path[96], command_path[96];
        snprintf(path, sizeof path, "taskRoles[%d]", i);
        snprintf(ports_path, sizeof ports_path, "%s.portList", path);
        snprintf(command_path, sizeof command_path, "%s.command", path);
        warn_of_sleep(walk, get(walk, role, "command"), NULL, command_path);
        check_twice(walk, roles, i, "name", "taskRoles");
        check_at_most(walk, role, path, "shmMB", "memoryMB",
                      pai_int(get(walk, role, "memoryMB"), 100));
        check_at_most(walk, role, path, "minFailedTaskCount", "taskNumber", n_tasks);
        check_at_most(walk, role, path, "minSucceededTaskCount", "taskNumber", n_tasks);
        for (int p = 0; p < count_list(walk, ports); p++) {
            check_twice(walk, ports, p, "label", ports_path);
        }
    }
}

static void warn_v1(const walk_t *walk)
{
    static const char *const switches[] = {"paiAzRDMA", "isDebug"};
    const pai_node_t *environment = get(walk, walk->job, "jobEnvs");
    const pai_node_t *obsolete = get(walk, walk->job, "killAllOnCompletedTaskNumber");
    for (size_t i = 0; i < N_ELEMENTS(switches); i++) {
        const pai_node_t *value = get(walk, environment, switches[i]);
        char path[64];
        snprintf(path, sizeof path, "jobEnvs.%s", switches[i]);
        if (value != NULL && pai_type(value) != IS_BOOL) {
            pai_find(walk->findings, value, path, true,
                     "does nothing unless it is true without quotes");
        }
    }
    if (obsolete != NULL) {
        pai_find(walk->findings, obsolete, "killAllOnCompletedTaskNumber", true,
                 "is obsolete; use minFailedTaskCount and minSucceededTaskCount of a role");
    }
}

static void check_v1(const walk_t *walk)
{
    check_v1_roles(walk);
    warn_v1(walk);
}

// --- v2: YAML --------------------------------------------------------------------

// Is there a prerequisite of that type (NULL: any) and name?
static bool is_declared(const walk_t *walk, const char *type, const char *name)
{
    const pai_node_t *list = get(walk, walk->job, "prerequisites");
    for (int i = 0; i < count_list(walk, list); i++) {
        const pai_node_t *entry = pai_item(walk->document, list, i);
        if (strcmp(pai_text(get(walk, entry, "name")), name) == 0 &&
            (type == NULL || strcmp(pai_text(get(walk, entry, "type")), type) == 0)) {
            return true;
        }
    }
    return false;
}

static void check_declared(const walk_t *walk, const pai_node_t *value, const char *path,
                           const char *type)
{
    if (value != NULL && pai_text(value)[0] != '\0' && !is_declared(walk, type, pai_text(value))) {
        pai_find(walk->findings, value, path, false, "\"%s\" is not a %s of prerequisites",
                 pai_text(value), type != NULL ? type : "entry");
    }
}

static void check_v2_prerequisites(const walk_t *walk)
{
    const pai_node_t *list = get(walk, walk->job, "prerequisites");
    for (int i = 0; i < count_list(walk, list); i++) {
        const pai_node_t *entry = pai_item(walk->document, list, i);
        const char *type = pai_text(get(walk, entry, "type"));
        const pai_rule_t *rules = strcmp(type, "dockerimage") == 0 ? pai_v2_image
                                  : strcmp(type, "data") == 0      ? pai_v2_data
                                                                   : pai_v2_script;
        char path[64];
        snprintf(path, sizeof path, "prerequisites[%d]", i);
        if (pai_type(entry) == IS_MAP) {
            pai_check_map(walk->document, entry, rules, path, walk->findings);
            check_twice(walk, list, i, "name", "prerequisites");
        }
    }
}

static void check_v2_commands(const walk_t *walk, const char *name, const pai_node_t *commands)
{
    for (int i = 0; i < count_list(walk, commands); i++) {
        char path[PAI_PATH_BYTES];
        bool is_last = i + 1 == count_list(walk, commands);
        snprintf(path, sizeof path, "taskRoles.%.100s.commands[%d]", name, i);
        warn_of_sleep(walk, pai_item(walk->document, commands, i),
                      is_last ? NULL : pai_item(walk->document, commands, i + 1), path);
    }
}

static void check_v2_role(const walk_t *walk, const char *name, const pai_node_t *role)
{
    static const struct {
        const char *key, *type;
    } references[] = {{"dockerImage", "dockerimage"},
                      {"script", "script"},
                      {"data", "data"},
                      {"output", "output"}};
    const pai_node_t *needs = get(walk, role, "prerequisites");
    const pai_node_t *completion = get(walk, role, "completion");
    const pai_node_t *memory = get(walk, get(walk, role, "resourcePerInstance"), "memoryMB");
    int64_t n_tasks = pai_int(get(walk, role, "instances"), 1);
    char path[PAI_PATH_BYTES];

    for (size_t i = 0; i < N_ELEMENTS(references); i++) {
        snprintf(path, sizeof path, "taskRoles.%.100s.%s", name, references[i].key);
        check_declared(walk, get(walk, role, references[i].key), path, references[i].type);
    }
    for (int i = 0; i < count_list(walk, needs); i++) {
        snprintf(path, sizeof path, "taskRoles.%.100s.prerequisites[%d]", name, i);
        check_declared(walk, pai_item(walk->document, needs, i), path, NULL);
    }
    check_v2_commands(walk, name, get(walk, role, "commands"));
    snprintf(path, sizeof path, "taskRoles.%.100s.completion", name);
    check_at_most(walk, completion, path, "minFailedInstances", "instances", n_tasks);
    check_at_most(walk, completion, path, "minSucceededInstances", "instances", n_tasks);
    snprintf(path, sizeof path, "taskRoles.%.100s.extraContainerOptions", name);
    check_at_most(walk, get(walk, role, "extraContainerOptions"), path, "shmMB", "memoryMB",
                  pai_int(memory, INT64_MAX));
}

static void check_v2_deployments(const walk_t *walk)
{
    const pai_node_t *list = get(walk, walk->job, "deployments");
    const pai_node_t *roles = get(walk, walk->job, "taskRoles");
    const pai_node_t *wanted = get(walk, get(walk, walk->job, "defaults"), "deployment");
    bool is_there = wanted == NULL;
    for (int i = 0; i < count_list(walk, list); i++) {
        const pai_node_t *entry = pai_item(walk->document, list, i);
        const pai_node_t *own = get(walk, entry, "taskRoles");
        check_twice(walk, list, i, "name", "deployments");
        is_there |= strcmp(pai_text(get(walk, entry, "name")), pai_text(wanted)) == 0;
        for (int r = 0;
             own != NULL && pai_type(own) == IS_MAP && r < pai_count(walk->document, own); r++) {
            const pai_node_t *role = pai_key(walk->document, own, r);
            char path[PAI_PATH_BYTES];
            snprintf(path, sizeof path, "deployments[%d].taskRoles.%.100s", i, pai_text(role));
            if (get(walk, roles, pai_text(role)) == NULL) {
                pai_find(walk->findings, role, path, false, "the job has no such role");
            }
        }
    }
    if (!is_there) {
        pai_find(walk->findings, wanted, "defaults.deployment", false,
                 "\"%s\" is not one of deployments", pai_text(wanted));
    }
}

static void check_v2(const walk_t *walk)
{
    const pai_node_t *roles = get(walk, walk->job, "taskRoles");
    int n_roles = roles != NULL && pai_type(roles) == IS_MAP ? pai_count(walk->document, roles) : 0;
    check_v2_prerequisites(walk);
    for (int i = 0; i < n_roles; i++) {
        const pai_node_t *role = pai_value(walk->document, roles, i);
        check_v2_role(walk, pai_text(pai_key(walk->document, roles, i)), role);
    }
    check_v2_deployments(walk);
}

// --- A job ---------------------------------------------------------------------------------------

pai_format_t pai_format_of(const pai_document_t *document, const char *file)
{
    size_t bytes = strlen(file);
    if (pai_get(document, pai_root(document), "protocolVersion") != NULL) {
        return PAI_V2;
    }
    if (pai_get(document, pai_root(document), "jobName") != NULL) {
        return PAI_V1;
    }
    return bytes > 5 && strcmp(file + bytes - 5, ".json") == 0 ? PAI_V1 : PAI_V2;
}

void pai_check(const pai_document_t *document, pai_format_t format, pai_findings_t *findings)
{
    walk_t walk = {document, pai_root(document), findings};
    if (walk.job == NULL || pai_type(walk.job) != IS_MAP) {
        pai_find(findings, walk.job, "", false, "this is not a job: it has no keys");
        return;
    }
    pai_check_map(document, walk.job, format == PAI_V1 ? pai_v1_job : pai_v2_job, "", findings);
    (format == PAI_V1 ? check_v1 : check_v2)(&walk);
}
