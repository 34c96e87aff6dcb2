// SPDX-License-Identifier: Apache-2.0
//
// rules.c - what an OpenPAI job may say: both forms of a job file, key by key.
//
// A row is a key: what may stand there, within which limits, whether it must. Keys without a row
// are refused, as the server refuses them. check.c holds a document against the rows; relations.c
// has what rows cannot say.
#include "pai/internal.h"

#define NO_LIMIT INT64_MAX

// --- v1: JSON ------------------------------------------------------------------------------------

static const pai_form_t v1_job_name = {"^[A-Za-z0-9._-]+$",
                                       "made of letters, digits, \"-\", \".\" and \"_\""};
static const pai_form_t v1_name = {"^[A-Za-z0-9._~]+$",
                                   "made of letters, digits, \".\", \"_\" and \"~\" (no \"-\")"};
static const pai_form_t v1_variable = {"^[A-Za-z0-9_]+$", "made of letters, digits and \"_\""};
static const pai_form_t v1_extra = {"^[A-Za-z0-9._]+$", "made of letters, digits, \".\" and \"_\""};

static const pai_rule_t v1_port[] = {
    {.key = "label", .types = IS_TEXT, .is_required = true, .form = &v1_name},
    {.key = "beginAt", .types = IS_INT, .min = 0, .max = 65535},
    {.key = "portNumber", .types = IS_INT, .min = 1, .max = 65535},
    {.key = NULL},
};
static const pai_rule_t v1_port_item = {.types = IS_MAP, .rules = v1_port};

static const pai_rule_t v1_role[] = {
    {.key = "name", .types = IS_TEXT, .is_required = true, .form = &v1_name},
    {.key = "taskNumber", .types = IS_INT, .min = 1, .max = NO_LIMIT},
    {.key = "cpuNumber", .types = IS_INT, .min = 1, .max = NO_LIMIT},
    {.key = "memoryMB", .types = IS_INT, .min = 100, .max = NO_LIMIT},
    {.key = "gpuNumber", .types = IS_INT, .min = 0, .max = NO_LIMIT},
    {.key = "shmMB", .types = IS_INT, .min = 1, .max = NO_LIMIT},
    {.key = "portList", .types = IS_LIST, .item = &v1_port_item},
    {.key = "command", .types = IS_TEXT, .is_required = true, .may_not_be_empty = true},
    {.key = "minFailedTaskCount", .types = IS_INT | IS_NULL, .min = 1, .max = NO_LIMIT},
    {.key = "minSucceededTaskCount", .types = IS_INT | IS_NULL, .min = 1, .max = NO_LIMIT},
    {.key = NULL},
};
static const pai_rule_t v1_role_item = {.types = IS_MAP, .rules = v1_role};

static const pai_rule_t v1_environment[] = {
    {.key = "*", .types = IS_ANYTHING, .key_form = &v1_variable},
    {.key = NULL},
};
static const pai_rule_t v1_extras[] = {
    {.key = "*", .types = IS_ANYTHING, .key_form = &v1_extra},
    {.key = NULL},
};

const pai_rule_t pai_v1_job[] = {
    {.key = "jobName", .types = IS_TEXT, .is_required = true, .form = &v1_job_name},
    {.key = "image", .types = IS_TEXT, .is_required = true, .may_not_be_empty = true},
    {.key = "authFile", .types = IS_TEXT},
    {.key = "dataDir", .types = IS_TEXT},
    {.key = "outputDir", .types = IS_TEXT},
    {.key = "codeDir", .types = IS_TEXT},
    {.key = "virtualCluster", .types = IS_TEXT},
    {.key = "gpuType", .types = IS_TEXT},
    {.key = "retryCount", .types = IS_INT, .min = -2, .max = NO_LIMIT},
    {.key = "killAllOnCompletedTaskNumber", .types = IS_INT},
    {.key = "jobEnvs", .types = IS_MAP, .rules = v1_environment},
    {.key = "extras", .types = IS_MAP, .rules = v1_extras},
    {.key = "taskRoles",
     .types = IS_LIST,
     .is_required = true,
     .may_not_be_empty = true,
     .item = &v1_role_item},
    {.key = NULL},
};

// --- v2: YAML ------------------------------------------------------------------------------------

static const pai_form_t v2_job_name = {"^[A-Za-z0-9_-]{1,255}$",
                                       "made of up to 255 letters, digits, \"-\" and \"_\""};
static const pai_form_t v2_entry_name = {"^[A-Za-z0-9_-]+$",
                                         "made of letters, digits, \"-\" and \"_\""};
static const pai_form_t v2_role_name = {
    "^[A-Za-z_][A-Za-z0-9_]*$",
    "made of letters, digits and \"_\", and not start with a digit (no \"-\")"};

static const pai_rule_t a_text = {.types = IS_TEXT};
static const pai_rule_t a_command = {.types = IS_TEXT, .may_not_be_empty = true};

static const pai_rule_t v2_ports[] = {
    {.key = "*", .types = IS_INT, .min = 1, .max = 65535, .key_form = &v2_role_name},
    {.key = NULL},
};
static const pai_rule_t v2_resources[] = {
    {.key = "cpu", .types = IS_INT, .is_required = true, .min = 1, .max = NO_LIMIT},
    {.key = "memoryMB", .types = IS_INT, .is_required = true, .min = 1, .max = NO_LIMIT},
    {.key = "gpu", .types = IS_INT, .is_required = true, .min = 0, .max = NO_LIMIT},
    {.key = "ports", .types = IS_MAP, .may_not_be_empty = true, .rules = v2_ports},
    {.key = NULL},
};
static const pai_rule_t v2_completion[] = {
    {.key = "minFailedInstances", .types = IS_INT | IS_NULL, .min = -1, .max = NO_LIMIT},
    {.key = "minSucceededInstances", .types = IS_INT | IS_NULL, .min = -1, .max = NO_LIMIT},
    {.key = NULL},
};
static const pai_rule_t v2_container[] = {
    {.key = "shmMB", .types = IS_INT, .min = 1, .max = NO_LIMIT},
    {.key = "infiniband", .types = IS_BOOL},
    {.key = NULL},
};
static const pai_rule_t v2_role[] = {
    {.key = "protocolVersion", .types = IS_TEXT | IS_INT, .choices = "2"},
    {.key = "instances", .types = IS_INT, .min = 1, .max = NO_LIMIT},
    {.key = "completion", .types = IS_MAP, .rules = v2_completion},
    {.key = "taskRetryCount", .types = IS_INT, .min = 0, .max = NO_LIMIT},
    {.key = "dockerImage", .types = IS_TEXT, .is_required = true},
    {.key = "prerequisites", .types = IS_LIST, .item = &a_text},
    {.key = "data", .types = IS_TEXT},
    {.key = "output", .types = IS_TEXT},
    {.key = "script", .types = IS_TEXT},
    {.key = "extraContainerOptions", .types = IS_MAP, .rules = v2_container},
    {.key = "resourcePerInstance", .types = IS_MAP, .is_required = true, .rules = v2_resources},
    {.key = "commands",
     .types = IS_LIST,
     .is_required = true,
     .may_not_be_empty = true,
     .item = &a_command},
    {.key = NULL},
};
static const pai_rule_t v2_roles[] = {
    {.key = "*", .types = IS_MAP, .key_form = &v2_role_name, .rules = v2_role},
    {.key = NULL},
};

static const pai_rule_t v2_auth[] = {
    {.key = "username", .types = IS_TEXT},
    {.key = "password", .types = IS_TEXT},
    {.key = "registryuri", .types = IS_TEXT},
    {.key = NULL},
};
#define PREREQUISITE_TYPES "script|output|data|dockerimage"
#define PREREQUISITE_ROWS                                                                          \
    {.key = "protocolVersion", .types = IS_TEXT | IS_INT, .choices = "2"},                         \
        {.key = "name", .types = IS_TEXT, .is_required = true, .form = &v2_entry_name},            \
        {.key = "type", .types = IS_TEXT, .is_required = true, .choices = PREREQUISITE_TYPES},     \
        {.key = "version", .types = IS_TEXT | IS_REAL}, {.key = "contributor", .types = IS_TEXT},  \
    {                                                                                              \
        .key = "description", .types = IS_TEXT                                                     \
    }

const pai_rule_t pai_v2_image[] = {
    PREREQUISITE_ROWS,
    {.key = "uri", .types = IS_TEXT, .is_required = true, .may_not_be_empty = true},
    {.key = "auth", .types = IS_MAP, .rules = v2_auth},
    {.key = NULL},
};
const pai_rule_t pai_v2_data[] = {
    PREREQUISITE_ROWS,
    {.key = "plugin", .types = IS_TEXT},
    {.key = "require", .types = IS_LIST, .item = &a_text},
    {.key = "uri", .types = IS_LIST, .item = &a_text},
    {.key = "*", .types = IS_ANYTHING},
    {.key = NULL},
};
const pai_rule_t pai_v2_script[] = {
    PREREQUISITE_ROWS,
    {.key = "plugin", .types = IS_TEXT},
    {.key = "require", .types = IS_LIST, .item = &a_text},
    {.key = "uri", .types = IS_TEXT},
    {.key = "*", .types = IS_ANYTHING},
    {.key = NULL},
};
static const pai_rule_t v2_prerequisite_item = {.types = IS_MAP}; // by its type: see below

static const pai_rule_t v2_deployment_role[] = {
    {.key = "preCommands", .types = IS_LIST, .may_not_be_empty = true, .item = &a_text},
    {.key = "postCommands", .types = IS_LIST, .may_not_be_empty = true, .item = &a_text},
    {.key = NULL},
};
static const pai_rule_t v2_deployment_roles[] = {
    {.key = "*", .types = IS_MAP, .rules = v2_deployment_role},
    {.key = NULL},
};
static const pai_rule_t v2_deployment[] = {
    {.key = "protocolVersion", .types = IS_TEXT | IS_INT, .choices = "2"},
    {.key = "name", .types = IS_TEXT, .is_required = true, .form = &v2_entry_name},
    {.key = "taskRoles",
     .types = IS_MAP,
     .is_required = true,
     .may_not_be_empty = true,
     .rules = v2_deployment_roles},
    {.key = "*", .types = IS_ANYTHING},
    {.key = NULL},
};
static const pai_rule_t v2_deployment_item = {.types = IS_MAP, .rules = v2_deployment};

static const pai_rule_t v2_defaults[] = {
    {.key = "deployment", .types = IS_TEXT},
    {.key = "virtualCluster", .types = IS_TEXT},
    {.key = "*", .types = IS_ANYTHING},
    {.key = NULL},
};
static const pai_rule_t v2_plugin[] = {
    {.key = "plugin", .types = IS_TEXT, .is_required = true, .may_not_be_empty = true},
    {.key = "parameters", .types = IS_ANYTHING},
    {.key = "failurePolicy", .types = IS_TEXT, .choices = "ignore|fail"},
    {.key = NULL},
};
static const pai_rule_t v2_plugin_item = {.types = IS_MAP, .rules = v2_plugin};
static const pai_rule_t v2_extras[] = {
    {.key = "com.microsoft.pai.runtimeplugin", .types = IS_LIST, .item = &v2_plugin_item},
    {.key = "gangAllocation", .types = IS_BOOL | IS_TEXT},
    {.key = "*", .types = IS_ANYTHING},
    {.key = NULL},
};

const pai_rule_t pai_v2_job[] = {
    {.key = "protocolVersion", .types = IS_TEXT | IS_INT, .is_required = true, .choices = "2"},
    {.key = "name", .types = IS_TEXT, .is_required = true, .form = &v2_job_name},
    {.key = "type", .types = IS_TEXT, .is_required = true, .choices = "job"},
    {.key = "version", .types = IS_TEXT | IS_REAL},
    {.key = "contributor", .types = IS_TEXT},
    {.key = "description", .types = IS_TEXT},
    {.key = "parameters", .types = IS_MAP},
    {.key = "secrets", .types = IS_MAP},
    {.key = "jobRetryCount", .types = IS_INT, .min = 0, .max = NO_LIMIT},
    {.key = "prerequisites",
     .types = IS_LIST,
     .may_not_be_empty = true,
     .item = &v2_prerequisite_item},
    {.key = "taskRoles",
     .types = IS_MAP,
     .is_required = true,
     .may_not_be_empty = true,
     .rules = v2_roles},
    {.key = "deployments", .types = IS_LIST, .may_not_be_empty = true, .item = &v2_deployment_item},
    {.key = "defaults", .types = IS_MAP, .rules = v2_defaults},
    {.key = "extras", .types = IS_MAP, .rules = v2_extras},
    {.key = NULL},
};
