// SPDX-License-Identifier: Apache-2.0
//
// agent_plan.c - the agent gets the plan of its host: makes a directory, starts the ranks.
//
// The directory holds the secret, in a file that only this user can read, the payload and the
// results. Nothing of the plan is trusted beyond its length.
#define _GNU_SOURCE
#include "launch/agent.h"
#include "launch/launch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

static hvd_status_t make_directory(agent_t *agent, err_t *err)
{
    static const char *const places[] = {"/dev/shm", "/tmp", "/var/tmp"};
    for (size_t i = 0; i < N_ELEMENTS(places); i++) {
        snprintf(agent->directory, sizeof agent->directory, "%s/" AGENT_DIRECTORY "XXXXXX",
                 places[i]);
        if (mkdtemp(agent->directory) != NULL) {
            return HVD_OK;
        }
    }
    agent->directory[0] = '\0';
    return fail_errno(err, errno,
                      "cannot create a directory for the job's secret in /dev/shm or /tmp");
}

static hvd_status_t write_secret(agent_t *agent, const uint8_t *secret, err_t *err)
{
    char path[128], digits[SECRET_DIGITS + 1];
    secret_encode(secret, digits);
    snprintf(path, sizeof path, "%s/secret", agent->directory);
    hvd_status_t status = secret_write_file(path, digits, SECRET_DIGITS, err);
    wipe(digits, sizeof digits);
    return status;
}

// The launcher as this host sees it is the best address of all: it is how ssh got here.
static void prefer_ssh_address(buf_t *list)
{
    const char *connection = environment("SSH_CONNECTION");
    const char *name = "HOROVOD_RENDEZVOUS_ADDR";
    const char *given = environ_find(list->data, list->len, name);
    char *before = connection != NULL && given != NULL ? strdup(given) : NULL;
    if (before != NULL) {
        environ_put(list, "%s=%.*s,%s", name, (int)strcspn(connection, " "), connection, before);
    }
    free(before);
}

// What PLAN brings, pointing into the frame.
typedef struct order {
    const uint8_t *secret;
    bool is_remote, wants_results, is_elastic;
    const char *directory;
    char **argv;
    const uint8_t *env, *payload;
    size_t env_bytes, payload_bytes;
} order_t;

static void put_rank_environment(agent_t *agent, const order_t *order, agent_rank_t *rank,
                                 buf_t *list)
{
    environ_put(list, "HOROVOD_SECRET_FILE=%s/secret", agent->directory);
    environ_put(list, "HOROVOD_SECRET_FD=-1");
    environ_put(list, "HOROVOD_RUN_PROGRAM=%s", agent->program);
    if (order->payload_bytes > 0) {
        environ_put(list, "HOROVOD_RUN_PAYLOAD=%s/payload", agent->directory);
    }
    if (order->is_elastic) {
        environ_put(list, "HOROVOD_ELASTIC_DIR=%s", agent->directory);
    }
    if (order->wants_results) {
        snprintf(rank->result, sizeof rank->result, "%s/result.%d", agent->directory, rank->rank);
        environ_put(list, "HOROVOD_RUN_RESULT=%s", rank->result);
    }
}

static const char *advice_for(misfortune_t misfortune)
{
    static const struct {
        int code;
        const char *advice;
    } advices[] = {
        {ENOENT, "is it installed there, and in the same place? The launcher's PATH is used on all "
                 "hosts"},
        {EACCES, "it is not executable; try chmod +x, or start it through its interpreter"},
        {ENOEXEC, "it is not a program for this machine; a script needs a first line like "
                  "#!/usr/bin/env python3"},
        {EAGAIN, "too many processes; raise ulimit -u on that host"},
        {EMFILE, "too many open files; raise ulimit -n on that host"},
    };
    if (misfortune.step == STEP_CHDIR) {
        return "the directory in which horovodrun is started must exist on all hosts: share it, "
               "create it, or start from another one";
    }
    for (size_t i = 0; i < N_ELEMENTS(advices); i++) {
        if (advices[i].code == misfortune.code) {
            return advices[i].advice;
        }
    }
    return "see the reason above";
}

static void report_misfortune(agent_t *agent, const order_t *order, int rank,
                              misfortune_t misfortune)
{
    static const char *const steps[] = {
        [STEP_MEMORY] = "find memory for",
        [STEP_PIPES] = "create pipes for",
        [STEP_FORK] = "fork",
        [STEP_CHDIR] = "change to the directory",
        [STEP_EXEC] = "start",
    };
    char text[HVD_TEXT_BYTES];
    snprintf(text, sizeof text, "cannot %s %s: %s; %s", steps[misfortune.step],
             misfortune.step == STEP_CHDIR ? order->directory : order->argv[0],
             strerror(misfortune.code), advice_for(misfortune));
    agent_report_problem(agent, rank,
                         misfortune.code == ENOENT ? EXIT_NOT_FOUND : EXIT_NOT_EXECUTABLE, text);
}

static bool start_rank(agent_t *agent, const order_t *order, agent_rank_t *rank,
                       const uint8_t *own_env, size_t own_bytes)
{
    buf_t list = {0};
    misfortune_t misfortune = {.step = STEP_MEMORY, .code = ENOMEM};
    bool has_started = false;
    put_bytes(&list, order->env, order->env_bytes);
    put_bytes(&list, own_env, own_bytes);
    put_rank_environment(agent, order, rank, &list);
    if (order->is_remote) {
        prefer_ssh_address(&list);
    }
    char **env = list.failed ? NULL : environ_merge(environ, list.data, list.len);
    if (env != NULL) {
        has_started = spawn_rank(order->argv, env, order->directory, &rank->child, &misfortune);
    }
    free(env);
    buf_free(&list);
    if (has_started) {
        rank->is_running = true;
        agent->n_running++;
        keeper_add(&agent->keeper, rank->child.pid);
        agent_report(agent, FRAME_STARTED, rank->rank, rank->child.pid);
        return true;
    }
    report_misfortune(agent, order, rank->rank, misfortune);
    return false;
}

static bool read_order(reader_t *reader, order_t *order, uint64_t *silence_ns_p)
{
    order->secret = get_bytes(reader, SECRET_BYTES);
    order->is_remote = get_u8(reader);
    *silence_ns_p = get_u32(reader) * NS_PER_MS;
    order->directory = get_text(reader);
    size_t argc = get_u32(reader);
    if (reader->bad || argc == 0 || argc > reader_left(reader)) {
        return false;
    }
    order->argv = calloc(argc + 1, sizeof *order->argv);
    if (order->argv == NULL) {
        return false;
    }
    for (size_t i = 0; i < argc; i++) {
        order->argv[i] = (char *)get_text(reader);
    }
    order->env_bytes = get_u32(reader);
    order->env = get_bytes(reader, order->env_bytes);
    order->wants_results = get_u8(reader);
    order->is_elastic = get_u8(reader);
    order->payload_bytes = get_u32(reader);
    order->payload = get_bytes(reader, order->payload_bytes);
    return !reader->bad;
}

static hvd_status_t prepare(agent_t *agent, const order_t *order, err_t *err)
{
    char path[128];
    hvd_status_t status;
    TRY(make_directory(agent, err), out);
    TRY(keeper_start(agent->directory, &agent->keeper, err), out);
    agent->has_keeper = true;
    TRY(write_secret(agent, order->secret, err), out);
    if (order->is_elastic) {
        TRY(notes_watch(agent->directory, &agent->notes_fd, err), out);
    }
    if (order->payload_bytes > 0) {
        snprintf(path, sizeof path, "%s/payload", agent->directory);
        TRY(secret_write_file(path, order->payload, order->payload_bytes, err), out);
    }
out:
    return status;
}

void agent_start_plan(agent_t *agent, reader_t *reader)
{
    order_t order = {0};
    err_t err = {0};
    bool goes_on = read_order(reader, &order, &agent->silence_ns);
    size_t n_ranks = get_u32(reader);
    agent->has_plan = true;
    if (agent->silence_ns > 0) {
        agent->ping_ns = MIN(agent->ping_ns, agent->silence_ns / 4);
        agent->ping_at_ns = clock_ns() + agent->ping_ns;
    }
    agent->oom_at_start = oom_kills();
    goes_on = goes_on && !reader->bad && n_ranks <= reader_left(reader);
    agent->ranks = goes_on ? calloc(n_ranks + 1, sizeof *agent->ranks) : NULL;
    if (agent->ranks == NULL) {
        agent_report_problem(agent, -1, EXIT_INTERNAL, "the agent cannot read its commands");
    } else if (prepare(agent, &order, &err) != HVD_OK) {
        agent_report_problem(agent, -1, EXIT_INTERNAL, err.text);
    } else {
        for (size_t i = 0; i < n_ranks && goes_on; i++) {
            agent_rank_t *rank = &agent->ranks[agent->n_ranks++];
            *rank = (agent_rank_t){.rank = (int)get_u32(reader), .child = {.fds = {-1, -1}}};
            size_t bytes = get_u32(reader);
            const uint8_t *own_env = get_bytes(reader, bytes);
            goes_on = !reader->bad && start_rank(agent, &order, rank, own_env, bytes);
        }
    }
    free(order.argv);
}
