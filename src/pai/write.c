// SPDX-License-Identifier: Apache-2.0
//
// write.c - a job of one master and some workers, as v1 JSON or v2 YAML, from the same options.
//
// The exit code of the master's command decides the job; workers end with it (gate.c), so their
// own success ends nothing early. Texts are written as JSON strings, which YAML reads alike. In v2
// the tasks reach each other over ssh through the cluster's ssh plugin, in v1 that is always there.
#include "pai/internal.h"

static void put_string(buf_t *out, const char *text)
{
    buf_append(out, "\"", 1);
    for (; *text != '\0'; text++) {
        if (*text == '"' || *text == '\\') {
            buf_printf(out, "\\%c", *text);
        } else if ((unsigned char)*text < 0x20) {
            buf_printf(out, "\\u%04x", (unsigned char)*text);
        } else {
            buf_append(out, text, 1);
        }
    }
    buf_append(out, "\"", 1);
}

// What the master runs. One word may be a whole line; what only a shell understands goes to one.
static void put_command(const pai_options_t *options, buf_t *out)
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
    buf_append(&line, "", 1);
    out->failed |= line.failed;
    if (!line.failed) {
        put_string(out, (const char *)line.data);
    }
    buf_free(&line);
}

static void put_role_command(const pai_options_t *options, bool is_master, buf_t *out)
{
    if (is_master) {
        put_command(options, out);
    } else {
        put_string(out, PROGRAM " --pai-worker");
    }
}

// --- v1 ------------------------------------------------------------------------------------------

static void v1_role(const pai_options_t *options, bool is_master, buf_t *out)
{
    buf_printf(out, "    {\n      \"name\": \"%s\",\n", is_master ? "master" : "worker");
    buf_printf(out, "      \"taskNumber\": %d,\n", is_master ? 1 : (int)options->workers);
    buf_printf(out, "      \"cpuNumber\": %d,\n", (int)options->cpus);
    buf_printf(out, "      \"memoryMB\": %d,\n", (int)options->memory_mb);
    buf_printf(out, "      \"shmMB\": %d,\n", (int)options->shm_mb);
    buf_printf(out, "      \"gpuNumber\": %d,\n", (int)options->gpus);
    buf_printf(out, "      \"minFailedTaskCount\": 1,\n");
    buf_printf(out, "      \"minSucceededTaskCount\": %s,\n", is_master ? "1" : "null");
    buf_printf(out, "      \"command\": ");
    put_role_command(options, is_master, out);
    buf_printf(out, "\n    }%s\n", is_master && options->workers > 0 ? "," : "");
}

static void write_v1(const pai_options_t *options, buf_t *out)
{
    buf_printf(out, "{\n  \"jobName\": ");
    put_string(out, options->name);
    buf_printf(out, ",\n  \"image\": ");
    put_string(out, options->image);
    buf_printf(out, ",\n  \"virtualCluster\": ");
    put_string(out, options->virtual_cluster);
    buf_printf(out, ",\n  \"retryCount\": %d,\n  \"taskRoles\": [\n", (int)options->retries);
    v1_role(options, true, out);
    if (options->workers > 0) {
        v1_role(options, false, out);
    }
    buf_printf(out, "  ]%s\n}\n",
               options->rdma ? ",\n  \"jobEnvs\": {\n    \"paiAzRDMA\": true\n  }" : "");
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
    put_role_command(options, is_master, out);
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
