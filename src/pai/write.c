// SPDX-License-Identifier: Apache-2.0
//
// write.c - a job of one master and some workers, as v1 JSON or v2 YAML, from the same options.
//
// The exit code of the master's command decides the job; workers end with it (gate.c), so their
// own success ends nothing early. jansson writes v1 and the texts in v2, as a string of JSON is one
// of YAML. In v2 the tasks reach each other over ssh through the cluster's ssh plugin; in v1 that
// is always there.
#include "pai/internal.h"

#include <jansson.h>
#include <stdlib.h>

// Appends a value as JSON and gives it up; NULL, as of a text that is not UTF-8, fails the buffer.
static void put_json(buf_t *out, json_t *value, size_t flags)
{
    char *text = json_dumps(value, flags);
    out->failed |= text == NULL;
    if (text != NULL) {
        buf_append(out, text, strlen(text));
    }
    free(text);
    json_decref(value);
}

static void put_string(buf_t *out, const char *text)
{
    put_json(out, json_string(text), JSON_ENCODE_ANY);
}

// What the master runs. One word may be a whole line; what only a shell understands goes to one.
static json_t *command_of_master(const pai_options_t *options)
{
    static const char of_a_shell[] = "|&;<>()$`\\\"'*?[]#~=%{}!\n";
    const char *only = options->n_words == 1 ? options->words[0] : NULL;
    bool needs_shell = only != NULL && strpbrk(only, of_a_shell) != NULL;
    buf_t line = {0};
    buf_printf(&line, "%s --pai%s %s", PROGRAM, options->mpi ? " --mpi" : "",
               needs_shell ? "sh -c " : "");
    if (only != NULL && !needs_shell) {
        buf_append(&line, only, strlen(only));
    }
    for (int i = 0; (only == NULL || needs_shell) && i < options->n_words; i++) {
        quote_word(options->words[i], &line);
        buf_append(&line, " ", i + 1 < options->n_words);
    }
    json_t *text = line.failed ? NULL : json_stringn((const char *)line.data, line.len);
    buf_free(&line);
    return text;
}

static json_t *command_of(const pai_options_t *options, bool is_master)
{
    return is_master ? command_of_master(options) : json_string(PROGRAM " --pai-worker");
}

// --- v1 ------------------------------------------------------------------------------------------

static json_t *v1_role(const pai_options_t *options, bool is_master)
{
    return json_pack("{ss si si si si si si so so}", "name", is_master ? "master" : "worker",
                     "taskNumber", is_master ? 1 : (int)options->workers, "cpuNumber",
                     (int)options->cpus, "memoryMB", (int)options->memory_mb, "shmMB",
                     (int)options->shm_mb, "gpuNumber", (int)options->gpus, "minFailedTaskCount", 1,
                     "minSucceededTaskCount", is_master ? json_integer(1) : json_null(), "command",
                     command_of(options, is_master));
}

static void write_v1(const pai_options_t *options, buf_t *out)
{
    json_t *workers = options->workers > 0 ? v1_role(options, false) : NULL;
    json_t *envs = options->rdma ? json_pack("{sb}", "paiAzRDMA", 1) : NULL;
    json_t *job =
        json_pack("{ss ss ss si s[oo*] so*}", "jobName", options->name, "image", options->image,
                  "virtualCluster", options->virtual_cluster, "retryCount", (int)options->retries,
                  "taskRoles", v1_role(options, true), workers, "jobEnvs", envs);
    put_json(out, job, JSON_INDENT(2));
    buf_append(out, "\n", 1);
}

// --- v2 ------------------------------------------------------------------------------------------

static void v2_role(const pai_options_t *options, bool is_master, buf_t *out)
{
    buf_printf(out, "  %s:\n", is_master ? "master" : "worker");
    buf_printf(out, "    instances: %d\n", is_master ? 1 : (int)options->workers);
    buf_printf(out, "    completion:\n      minFailedInstances: 1\n");
    if (is_master) {
        buf_printf(out, "      minSucceededInstances: 1\n");
    }
    buf_printf(out, "    dockerImage: image\n    resourcePerInstance:\n");
    buf_printf(out, "      cpu: %d\n      memoryMB: %d\n      gpu: %d\n", (int)options->cpus,
               (int)options->memory_mb, (int)options->gpus);
    buf_printf(out, "    extraContainerOptions:\n      shmMB: %d\n", (int)options->shm_mb);
    if (options->rdma) {
        buf_printf(out, "      infiniband: true\n");
    }
    buf_printf(out, "    commands:\n      - ");
    put_json(out, command_of(options, is_master), JSON_ENCODE_ANY);
    buf_printf(out, "\n");
}

static void write_v2(const pai_options_t *options, buf_t *out)
{
    buf_printf(out, "protocolVersion: 2\nname: ");
    put_string(out, options->name);
    buf_printf(out, "\ntype: job\njobRetryCount: %d\n", (int)options->retries);
    buf_printf(out, "prerequisites:\n  - name: image\n    type: dockerimage\n    uri: ");
    put_string(out, options->image);
    buf_printf(out, "\ntaskRoles:\n");
    v2_role(options, true, out);
    if (options->workers > 0) {
        v2_role(options, false, out);
    }
    buf_printf(out, "defaults:\n  virtualCluster: ");
    put_string(out, options->virtual_cluster);
    buf_printf(out, "\nextras:\n  com.microsoft.pai.runtimeplugin:\n    - plugin: ssh\n"
                    "      parameters:\n        jobssh: true\n");
}

void pai_write(const pai_options_t *options, pai_format_t format, buf_t *out)
{
    (format == PAI_V1 ? write_v1 : write_v2)(options, out);
}
