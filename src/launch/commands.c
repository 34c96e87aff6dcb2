// SPDX-License-Identifier: Apache-2.0
//
// commands.c - what the launcher tells agents: the plan, to stop, that it is still there.
//
// What all agents of a session are told alike is gathered once. Frames are written into the link's
// buffer and leave when its socket takes them. One thread.
#define _GNU_SOURCE
#include "launch/session.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#define PAYLOAD_LIMIT (1024 * MIB - MIB)
#define LATE_MS 10000 // for agents to finish after ranks must be dead

static hvd_status_t read_payload(const char *path, buf_t *payload, err_t *err)
{
    FILE *file = path[0] == '\0' ? NULL : fopen(path, "re");
    size_t n = 1;
    if (path[0] == '\0') {
        return HVD_OK;
    }
    if (file == NULL) {
        return fail_errno(err, errno, "cannot open %s", path);
    }
    while (n > 0 && payload->len <= PAYLOAD_LIMIT && buf_reserve(payload, MIB)) {
        n = fread(payload->data + payload->len, 1, MIB, file);
        payload->len += n;
    }
    bool is_whole = feof(file) && !ferror(file) && payload->len <= PAYLOAD_LIMIT;
    fclose(file);
    return is_whole ? HVD_OK
                    : fail(err, HVD_INVALID_ARGUMENT,
                           "cannot read all of %s: is it larger than 1 GiB?", path);
}

hvd_status_t commands_prepare(session_t *session, err_t *err)
{
    const options_t *options = session->options;
    hvd_status_t status = read_payload(options->payload, &session->payload, err);
    session->directory = session->policy->at_home ? strdup("") : get_current_dir_name();
    for (int i = 0; i < options->n_command; i++) {
        buf_append(&session->command, options->command[i], strlen(options->command[i]) + 1);
    }
    environ_of_job(options, session->info.addresses, session->policy->is_elastic,
                   !session->policy->at_home, &session->env);
    bool has_memory = session->directory != NULL && !session->command.failed &&
                      !session->env.failed && !session->payload.failed;
    return status != HVD_OK || has_memory ? status
                                          : fail(err, HVD_NO_MEMORY, "no memory to start ranks");
}

static bytes_t bytes_of(const buf_t *buf)
{
    return (bytes_t){.data = buf->data, .len = buf->len};
}

static void tell(agent_link_t *link, const frame_t *frame)
{
    channel_put(&link->channel, frame);
    channel_send(&link->channel);
}

static frame_t place_of(const session_t *session, const worker_t *worker, buf_t *list)
{
    bool has_place = !worker->is_leaving && !worker->is_coming;
    const rank_info_t rank = {.place = has_place ? &worker->place : NULL,
                              .n_ranks = session->n_ranks,
                              .host_name = worker->link->host->name,
                              .job = &session->info,
                              .id = worker->id,
                              .generation = session->generation};
    buf_clear(list);
    environ_of_rank(&rank, list);
    return (frame_t){.kind = FRAME_PLACE, .place = {.rank = worker->id, .env = bytes_of(list)}};
}

void command_place(session_t *session, worker_t *worker)
{
    buf_t list = {0};
    const frame_t frame = place_of(session, worker, &list);
    tell(worker->link, &frame);
    buf_free(&list);
}

void command_plan(session_t *session, agent_link_t *link)
{
    const options_t *options = session->options;
    bool is_remote = !link->host->is_local;
    buf_t ranks = {0}, list = {0};
    for (int i = 0; i < session->n_workers; i++) {
        if (session->workers[i]->link == link) {
            const frame_t place = place_of(session, session->workers[i], &list);
            frame_put(&ranks, &place);
        }
    }
    const frame_t frame = {
        .kind = FRAME_PLAN,
        .plan = {.secret = {.data = session->secret, .len = SECRET_BYTES},
                 .is_remote = is_remote,
                 .silence_ms = is_remote ? (int32_t)(options->peer_timeout * 1000) : 0,
                 .directory = session->directory,
                 .command = bytes_of(&session->command),
                 .env = bytes_of(&session->env),
                 .wants_results = options->results[0] != '\0',
                 .is_elastic = session->policy->is_elastic,
                 .payload = bytes_of(&session->payload),
                 .ranks = bytes_of(&ranks)}};
    link->channel.is_closed |= ranks.failed || list.failed;
    tell(link, &frame);
    link->has_plan = true;
    link->heard_ns = clock_ns();
    buf_free(&ranks);
    buf_free(&list);
}

void command_stop(agent_link_t *link, int signo, int grace_ms)
{
    tell(link, &(frame_t){.kind = FRAME_STOP,
                          .stop = {.rank = -1, .signo = signo, .grace_ms = grace_ms}});
}

void command_stop_rank(agent_link_t *link, int id, int signo)
{
    tell(link, &(frame_t){.kind = FRAME_STOP, .stop = {.rank = id, .signo = signo}});
}

void command_ping(agent_link_t *link)
{
    tell(link, &(frame_t){.kind = FRAME_PING});
}

void command_end(agent_link_t *link, int code)
{
    tell(link, &(frame_t){.kind = FRAME_END, .end = {.code = code}});
}

void command_news(agent_link_t *link, int number, int what)
{
    tell(link, &(frame_t){.kind = FRAME_NEWS, .news = {.number = number, .what = what}});
}

void command_watch(agent_link_t *link, int period_ms)
{
    tell(link, &(frame_t){.kind = FRAME_WATCH, .watch = {.period_ms = period_ms}});
}

void command_examine(agent_link_t *link, const frame_t *frame)
{
    tell(link, frame);
    link->has_plan = true;
}

// --- Stopping ------------------------------------------------------------------------------------

void session_stop_link(agent_link_t *link, int signo, int grace_ms)
{
    if (link_is_running(link)) {
        command_stop(link, signo, grace_ms);
    }
    link->is_stopping = true;
}

void session_ask_where(session_t *session)
{
    for (int i = 0; i < session->n_links; i++) {
        if (link_is_running(session->links[i]) && !session->links[i]->is_stopping) {
            tell(session->links[i],
                 &(frame_t){.kind = FRAME_WHERE, .where = {.rank = -1, .text = ""}});
        }
    }
}

void session_stop(session_t *session, int signo, int grace_ms)
{
    for (int i = 0; i < session->n_links; i++) {
        session_stop_link(session->links[i], signo, grace_ms);
    }
    if (session->child > 0) {
        kill(session->child, signo);
    }
    session->is_stopping = true;
    session->stop_at_ns = NEVER_NS;
    session->late_at_ns = deadline_in_ms(grace_ms + LATE_MS);
}

void session_stop_soon(session_t *session)
{
    uint64_t now_ns = clock_ns();
    if (session->is_stopping) {
        return;
    }
    session->failed_ns = session->failed_ns != 0 ? session->failed_ns : now_ns;
    uint64_t patience_ns = (uint64_t)session_patience_ms(session) * NS_PER_MS;
    session->stop_at_ns = patience_ns > 0
                              ? session->failed_ns + patience_ns
                              : MIN(session->stop_at_ns, now_ns + MOMENT_MS * NS_PER_MS);
}

void session_fail(session_t *session, int code, const char *format, ...)
{
    va_list args;
    if (session->problem_code == 0) {
        va_start(args, format);
        vsnprintf(session->problem, sizeof session->problem, format, args);
        va_end(args);
        session->problem_code = code;
    }
    session_stop_soon(session);
}
