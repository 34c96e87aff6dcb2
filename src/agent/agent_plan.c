// SPDX-License-Identifier: Apache-2.0
//
// agent_plan.c - the agent gets the plan of its host: makes a directory, starts the ranks, and
// passes on what they write.
//
// The directory holds the secret, in a file that only this user can read, the payload and the
// results. Nothing of the plan is trusted beyond its length.
#define _GNU_SOURCE
#include "agent/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#define OUTPUT_CHUNK (64 * KIB)

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

static void report_misfortune(agent_t *agent, const char *directory, const char *program, int rank,
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
             misfortune.step == STEP_CHDIR ? directory : program, strerror(misfortune.code),
             advice_for(misfortune));
    agent_report_problem(agent, rank,
                         misfortune.code == ENOENT ? EXIT_NOT_FOUND : EXIT_NOT_EXECUTABLE, text);
}

// The environment of a rank on this host, for exec; NULL: no memory.
static char **environment_of(const agent_t *agent, const frame_t *plan, const agent_rank_t *rank,
                             bytes_t own)
{
    const rank_host_t host = {.directory = agent->directory,
                              .program = agent->program,
                              .result = rank->result,
                              .blame = rank->blame,
                              .id = rank->rank,
                              .launcher = plan->plan.is_remote ? agent->launcher : NULL,
                              .has_payload = plan->plan.payload.len > 0,
                              .is_elastic = plan->plan.is_elastic};
    buf_t list = {0};
    put_bytes(&list, plan->plan.env.data, plan->plan.env.len);
    environ_keep(agent->keeps, &list);
    put_bytes(&list, own.data, own.len);
    environ_of_host(&host, &list);
    char **env = list.failed ? NULL : environ_merge(environ, list.data, list.len);
    buf_free(&list);
    return env;
}

static bool start_rank(agent_t *agent, const frame_t *plan, char *const *argv, const frame_t *place)
{
    misfortune_t misfortune = {.step = STEP_MEMORY, .code = ENOMEM};
    agent_rank_t *rank = &agent->ranks[agent->n_ranks++];
    *rank = (agent_rank_t){
        .rank = place->place.rank, .child = {.fds = {-1, -1}}, .live = {.fd = -1}, .result_fd = -1};
    snprintf(rank->blame, sizeof rank->blame, "%s/blame.%d", agent->directory, rank->rank);
    if (plan->plan.wants_results) {
        snprintf(rank->result, sizeof rank->result, "%s/result.%d", agent->directory, rank->rank);
    }
    char **env = environment_of(agent, plan, rank, place->place.env);
    rank->is_running =
        env != NULL && spawn_rank(argv, env, plan->plan.directory, &rank->child, &misfortune);
    free(env);
    if (!rank->is_running) {
        rank->is_told = true;
        report_misfortune(agent, plan->plan.directory, argv[0], rank->rank, misfortune);
        return false;
    }
    agent->n_running++;
    supervisor_add(&agent->supervisor, rank->child.pid);
    agent_report(agent, &(frame_t){.kind = FRAME_STARTED,
                                   .started = {.rank = rank->rank, .pid = rank->child.pid}});
    return true;
}

static hvd_status_t prepare(agent_t *agent, const frame_t *plan, err_t *err)
{
    bytes_t payload = plan->plan.payload;
    char path[128];
    hvd_status_t status;
    TRY(make_directory(agent, err), out);
    TRY(supervisor_start(agent->directory, &agent->supervisor, err), out);
    agent->has_supervisor = true;
    TRY(write_secret(agent, plan->plan.secret.data, err), out);
    if (plan->plan.is_elastic || plan->plan.wants_results) {
        TRY(mailbox_watch(agent->directory, &agent->mailbox_fd, err), out);
    }
    if (payload.len > 0) {
        snprintf(path, sizeof path, "%s/payload", agent->directory);
        TRY(secret_write_file(path, payload.data, payload.len, err), out);
    }
out:
    return status;
}

// The words of a list, pointing into it; NULL: there are none, or no memory.
static char **words_of(bytes_t list)
{
    size_t n = 0;
    for (size_t i = 0; i < list.len; i++) {
        n += list.data[i] == '\0';
    }
    char **words = n > 0 ? calloc(n + 1, sizeof *words) : NULL;
    char *at = (char *)list.data;
    for (size_t i = 0; words != NULL && i < n; i++, at += strlen(at) + 1) {
        words[i] = at;
    }
    return words;
}

static size_t count_places(reader_t reader)
{
    frame_t place;
    size_t n = 0;
    while (frame_get(&reader, &place) == HVD_OK && place.kind == FRAME_PLACE) {
        n++;
    }
    return reader_left(&reader) == 0 ? n : 0;
}

void agent_start_plan(agent_t *agent, const frame_t *plan)
{
    reader_t places = reader_of(plan->plan.ranks.data, plan->plan.ranks.len);
    size_t n_ranks = count_places(places);
    char **argv = words_of(plan->plan.command);
    frame_t place;
    err_t err = {0};
    agent->has_plan = true;
    agent->silence_ns = (uint64_t)MAX(plan->plan.silence_ms, 0) * NS_PER_MS;
    if (agent->silence_ns > 0) {
        agent->ping_ns = MIN(agent->ping_ns, agent->silence_ns / 4);
        agent->ping_at_ns = clock_ns() + agent->ping_ns;
    }
    agent->oom_at_start = oom_kills();
    agent->ranks = n_ranks > 0 ? calloc(n_ranks, sizeof *agent->ranks) : NULL;
    if (agent->ranks == NULL || argv == NULL || plan->plan.secret.len != SECRET_BYTES) {
        agent_report_problem(agent, -1, EXIT_INTERNAL, "the agent cannot read its commands");
    } else if (prepare(agent, plan, &err) != HVD_OK) {
        agent_report_problem(agent, -1, EXIT_INTERNAL, err.text);
    } else {
        while (frame_get(&places, &place) == HVD_OK && start_rank(agent, plan, argv, &place)) {
        }
    }
    free(argv);
}

// --- Output --------------------------------------------------------------------------------------

bool agent_forward(agent_t *agent, agent_rank_t *rank, int stream)
{
    uint8_t data[OUTPUT_CHUNK];
    ssize_t n = read(rank->child.fds[stream], data, sizeof data);
    if (n > 0) {
        agent_report(agent, &(frame_t){.kind = FRAME_OUTPUT,
                                       .output = {.rank = rank->rank,
                                                  .stream = stream,
                                                  .data = {.data = data, .len = (size_t)n}}});
    } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
        close(rank->child.fds[stream]);
        rank->child.fds[stream] = -1;
    }
    return n > 0 || (n < 0 && errno == EINTR);
}

static void close_result(agent_rank_t *rank)
{
    close(rank->result_fd);
    rank->result_fd = -1;
}

// False: something is left.
static bool forward_output(agent_t *agent, agent_rank_t *rank)
{
    for (int stream = 0; stream < N_STREAMS; stream++) {
        while (rank->child.fds[stream] >= 0 && agent_has_room(agent) &&
               agent_forward(agent, rank, stream)) {
        }
    }
    return agent_has_room(agent);
}

static bool forward_result(agent_t *agent, agent_rank_t *rank)
{
    uint8_t data[OUTPUT_CHUNK];
    while (rank->result_fd >= 0 && agent_has_room(agent)) {
        ssize_t n = read(rank->result_fd, data, sizeof data);
        if (n > 0) {
            agent_report(agent, &(frame_t){.kind = FRAME_RESULT,
                                           .result = {.rank = rank->rank,
                                                      .data = {.data = data, .len = (size_t)n}}});
        } else if (n == 0 || errno != EINTR) {
            close_result(rank);
        }
    }
    return rank->result_fd < 0;
}

bool agent_forward_rest(agent_t *agent, agent_rank_t *rank)
{
    if (agent->channel.is_closed && rank->result_fd >= 0) {
        close_result(rank);
    }
    return agent->channel.is_closed || (forward_output(agent, rank) && forward_result(agent, rank));
}
