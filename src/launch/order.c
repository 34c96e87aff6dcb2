// SPDX-License-Identifier: Apache-2.0
//
// order.c - what the launcher tells agents: the plan, to stop, that it is still there.
//
// Shared by jobs of fixed size (job.c) and elastic ones (elastic.c). What all agents of a job are
// told alike is gathered once; the frames themselves are written into the link's buffer and leave
// when its socket takes them. One thread.
#define _GNU_SOURCE
#include "launch/launch.h"
#include "launch/link.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#define PAYLOAD_LIMIT (1024 * MIB - MIB)

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

hvd_status_t orders_make(const options_t *options, const job_info_t *job, orders_t *orders_p,
                         err_t *err)
{
    orders_t orders = {.options = options, .directory = get_current_dir_name()};
    hvd_status_t status = read_payload(options->payload, &orders.payload, err);
    environ_of_job(options, job, &orders.env);
    if (status == HVD_OK &&
        (orders.directory == NULL || orders.env.failed || orders.payload.failed)) {
        status = fail(err, HVD_NO_MEMORY, "no memory to start the ranks");
    }
    if (status != HVD_OK) {
        orders_free(&orders);
        return status;
    }
    *orders_p = orders;
    return HVD_OK;
}

void orders_free(orders_t *orders)
{
    free(orders->directory);
    buf_free(&orders->env);
    buf_free(&orders->payload);
    *orders = (orders_t){0};
}

size_t order_plan_begin(agent_link_t *link, const orders_t *orders, const uint8_t *secret,
                        uint32_t n_ranks)
{
    const options_t *options = orders->options;
    const buf_t *env = &orders->env, *payload = &orders->payload;
    buf_t *out = &link->channel.out;
    size_t begin = frame_begin(&link->channel, FRAME_PLAN);
    put_bytes(out, secret, SECRET_BYTES);
    put_u8(out, !link->host->is_local);
    put_u32(out, link->host->is_local ? 0 : (uint32_t)(options->peer_timeout * 1000));
    put_text(out, orders->directory);
    put_u32(out, (uint32_t)options->n_command);
    for (int i = 0; i < options->n_command; i++) {
        put_text(out, options->command[i]);
    }
    put_u32(out, (uint32_t)env->len);
    put_bytes(out, env->data, env->len);
    put_u8(out, options->results[0] != '\0');
    put_u8(out, orders->is_elastic);
    put_u32(out, (uint32_t)payload->len);
    put_bytes(out, payload->len > 0 ? payload->data : (const uint8_t *)"", payload->len);
    put_u32(out, n_ranks);
    return begin;
}

void order_plan_rank(agent_link_t *link, int id, const buf_t *env)
{
    put_u32(&link->channel.out, (uint32_t)id);
    put_u32(&link->channel.out, (uint32_t)env->len);
    put_bytes(&link->channel.out, env->data, env->len);
}

void order_end(agent_link_t *link, size_t begin)
{
    frame_end(&link->channel, begin);
    channel_send(&link->channel);
}

void order_stop(agent_link_t *link, int signo, int grace_ms)
{
    size_t begin = frame_begin(&link->channel, FRAME_STOP);
    put_u32(&link->channel.out, (uint32_t)signo);
    put_u32(&link->channel.out, (uint32_t)grace_ms);
    order_end(link, begin);
}

void order_ping(agent_link_t *link)
{
    order_end(link, frame_begin(&link->channel, FRAME_PING));
}

void order_place(agent_link_t *link, int id, const buf_t *env)
{
    size_t begin = frame_begin(&link->channel, FRAME_PLACE);
    order_plan_rank(link, id, env);
    order_end(link, begin);
}

void order_news(agent_link_t *link, uint32_t number, unsigned what)
{
    size_t begin = frame_begin(&link->channel, FRAME_NEWS);
    put_u32(&link->channel.out, number);
    put_u32(&link->channel.out, what);
    order_end(link, begin);
}
