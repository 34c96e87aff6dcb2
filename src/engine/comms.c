// SPDX-License-Identifier: Apache-2.0
//
// comms.c - communicators of NCCL by process set, and how its members decide whether they use one.
//
// The first batch of a set whose tensors are all on GPUs waits for an exchange, in the order of the
// log and therefore of all members at once. Each tells the others, over the links of the job, which
// NCCL it has and which GPU it uses; one of them, how to find each other. If nothing is against it,
// all make a communicator, and tell each other whether that has worked. Everybody has heard the
// same, and decides alike: the set uses NCCL from then on, or never, with a reason that is logged
// once. Nothing here blocks: the batches behind wait, the engine does not.
//
// Threads: the holder of the engine, but comms_may_take. Communicators end on a thread of their
// own, since NCCL may never come back from that.
#define _GNU_SOURCE
#include "engine/run.h"
#include "engine/staging.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define FACTS_BYTES sizeof(gpu_facts_t)

// --- By set --------------------------------------------------------------------------------------

static set_comm_t *find_set(staging_t *staging, int set)
{
    set_comm_t *found = staging->comms;
    while (found != NULL && found->set != set) {
        found = found->next;
    }
    return found;
}

set_comm_t *comms_of_set(staging_t *staging, int set)
{
    lock_take(&staging->lock);
    set_comm_t *found = find_set(staging, set);
    if (found == NULL && (found = calloc(1, sizeof *found)) != NULL) {
        found->set = set;
        found->next = staging->comms;
        staging->comms = found;
    }
    lock_release(&staging->lock);
    return found;
}

static bool is_refused(staging_t *staging, int set)
{
    lock_take(&staging->lock);
    const set_comm_t *found = find_set(staging, set);
    bool refused = found != NULL && atomic_load(&found->choice) == CHOICE_HOST;
    lock_release(&staging->lock);
    return refused;
}

bool comms_may_take(hvd_ctx_t *ctx, const request_t *request)
{
    const signature_t *sig = &request->signature;
    if (ctx->config.gpu_operations == GPU_OPERATIONS_HOST ||
        ctx->config.encrypt == ENCRYPT_ALWAYS) {
        return false;
    }
    lock_take(&ctx->lock);
    const process_set_t *set = set_find(ctx, request->process_set);
    int n = set != NULL ? set->n : 1;
    lock_release(&ctx->lock);
    finish_t finish = signature_finish(sig, n);
    hvd_reduce_t reduce = sig->reduce == HVD_AVERAGE ? HVD_SUM : sig->reduce;
    return n > 1 &&
           nccl_takes(sig->op, sig->dtype, reduce,
                      sig->prescale * finish.factor / (double)finish.divisor) &&
           !is_refused(ctx->staging, request->process_set);
}

// --- Their end -----------------------------------------------------------------------------------

typedef struct comm_ending {
    staging_t *staging;
    comm_t *comm;
    bool ended_well;
} comm_ending_t;

static void *end_comm(void *arg)
{
    comm_ending_t *ending = arg;
    comm_end(ending->comm, ending->ended_well);
    atomic_fetch_sub(&ending->staging->n_ending, 1); // the last touch
    free(ending);
    return NULL;
}

// One that cannot be ended is left behind, as is all that it may still use.
static void end_on_a_thread(staging_t *staging, comm_t *comm, bool ended_well)
{
    pthread_t thread;
    comm_ending_t *ending = malloc(sizeof *ending);
    atomic_fetch_add(&staging->n_ending, 1);
    if (ending == NULL) {
        return;
    }
    *ending = (comm_ending_t){staging, comm, ended_well};
    if (thread_start(&thread, "hvd-nccl-end", end_comm, ending) == 0) {
        pthread_detach(thread);
    } else {
        free(ending);
    }
}

void comms_end(staging_t *staging, int set, bool ended_well)
{
    lock_take(&staging->lock);
    for (set_comm_t *at = staging->comms; at != NULL; at = at->next) {
        if (at->set == set || set < 0) {
            atomic_store(&at->choice, CHOICE_OPEN);
            if (at->comm != NULL) {
                end_on_a_thread(staging, at->comm, ended_well);
                at->comm = NULL;
            }
        }
    }
    lock_release(&staging->lock);
}

bool comms_have_ended(staging_t *staging, uint64_t deadline_ns)
{
    while (atomic_load(&staging->n_ending) > 0 && clock_ns() < deadline_ns) {
        nanosleep(&(struct timespec){.tv_nsec = (long)NS_PER_MS}, NULL);
    }
    return atomic_load(&staging->n_ending) == 0;
}

hvd_status_t comms_health(staging_t *staging, err_t *err)
{
    hvd_status_t status = HVD_OK;
    for (const set_comm_t *at = staging->comms; at != NULL && status == HVD_OK; at = at->next) {
        status = at->comm != NULL ? comm_poll(at->comm, err) : HVD_OK;
        status = status == HVD_IN_PROGRESS ? HVD_OK : status;
    }
    return status;
}

// --- The exchange --------------------------------------------------------------------------------

// Of this rank, as all members get to see it.
static void fill_facts(hvd_ctx_t *ctx, runner_t *r, gpu_facts_t *facts)
{
    staging_t *staging = ctx->staging;
    err_t err = {.status = HVD_OK};
    *facts = (gpu_facts_t){0};
    if (staging->device == NULL) {
        facts->is_passing = 1;
        fail(&err, HVD_UNSUPPORTED, "it has joined, and had no tensor on a GPU before");
    } else if (staging->nccl == NULL) {
        nccl_open(staging->device, ctx->config.nccl_library, &staging->nccl, &err);
    }
    if (err.status == HVD_OK) {
        device_uuid(staging->device, facts->uuid);
    }
    if (err.status == HVD_OK && r->task.args.member == 0) {
        nccl_make_id(staging->nccl, facts->id, &err);
    }
    facts->version = err.status == HVD_OK ? (uint32_t)nccl_version(staging->nccl) : 0;
    snprintf(facts->why_not, sizeof facts->why_not, "%s", err.status != HVD_OK ? err.text : "");
}

// All members' facts to all, over the job's own links.
static hvd_status_t exchange(hvd_ctx_t *ctx, runner_t *r, err_t *err) REQUIRES(ctx->baton)
{
    nccl_init_t *init = &r->nccl_init;
    size_t n = (size_t)r->task.args.size;
    uint8_t *memory = scratch(&init->memory, n * FACTS_BYTES + n * sizeof(size_t));
    vec_clear(&init->in);
    vec_clear(&init->out);
    if (memory == NULL || !vec_add(&init->in, &init->mine, FACTS_BYTES) ||
        !vec_add(&init->out, memory, n * FACTS_BYTES)) {
        return fail(err, HVD_NO_MEMORY, "no memory to agree on NCCL");
    }
    init->facts = (gpu_facts_t *)(void *)memory;
    size_t *blocks = (size_t *)(void *)(memory + n * FACTS_BYTES);
    for (size_t i = 0; i < n; i++) {
        blocks[i] = FACTS_BYTES;
    }
    coll_task_t task = r->task;
    task.args.op = HVD_ALLGATHER;
    task.args.dtype = HVD_UINT8;
    task.args.reduce = HVD_SUM;
    task.args.scale_after = false;
    task.args.blocks = blocks;
    task.in = &init->in;
    task.out = &init->out;
    task.prescale = 1.0;
    task.finish = FINISH_NOTHING;
    task.number += (uint64_t)init->phase;
    return way_plan_start(ctx, r, &task, err);
}

// What is against it, the same on all members; "": nothing.
static void find_reason(const hvd_ctx_t *ctx, const runner_t *r, char *reason, size_t bytes)
{
    const gpu_facts_t *facts = r->nccl_init.facts;
    char who[PEER_TEXT_BYTES], other[PEER_TEXT_BYTES];
    reason[0] = '\0';
    for (int m = 0; m < r->task.args.size; m++) {
        if (facts[m].version == 0) {
            snprintf(reason, bytes, "%s: %.*s", peer_name(&ctx->peers, r->task.ranks[m], who),
                     (int)sizeof facts[m].why_not, facts[m].why_not);
            return;
        }
    }
    for (int m = 1; m < r->task.args.size; m++) {
        peer_name(&ctx->peers, r->task.ranks[m], who);
        if (facts[m].version != facts[0].version) {
            snprintf(reason, bytes,
                     "%s has NCCL %u.%u.%u and %s %u.%u.%u: install the same one on all hosts",
                     peer_name(&ctx->peers, r->task.ranks[0], other), facts[0].version / 10000,
                     facts[0].version / 100 % 100, facts[0].version % 100, who,
                     facts[m].version / 10000, facts[m].version / 100 % 100,
                     facts[m].version % 100);
            return;
        }
        for (int before = 0; before < m; before++) {
            if (memcmp(facts[m].uuid, facts[before].uuid, sizeof facts[m].uuid) == 0) {
                snprintf(reason, bytes,
                         "%s and %s use the same GPU: call "
                         "torch.cuda.set_device(hvd.local_rank()) before the first tensor is made",
                         peer_name(&ctx->peers, r->task.ranks[before], other), who);
                return;
            }
        }
    }
}

static bool is_passing(const runner_t *r)
{
    bool passes = false;
    for (int m = 0; m < r->task.args.size; m++) {
        passes |= r->nccl_init.facts[m].is_passing != 0;
    }
    return passes;
}

static void warn_about_encryption(const hvd_ctx_t *ctx)
{
    if (ctx->config.encrypt == ENCRYPT_AUTO && ctx->n_hosts > 1 && ctx->job.rank == 0) {
        log_warn(&ctx->log, "device",
                 "GPU tensors between hosts travel by NCCL, which does not encrypt them; "
                 "HOROVOD_ENCRYPT=always sends them through host memory, encrypted, and "
                 "HOROVOD_ENCRYPT=never silences this warning");
    }
}

// The exchange is over: the set uses NCCL, or not.
static void decide(hvd_ctx_t *ctx, runner_t *r, const char *reason)
{
    set_comm_t *set = r->nccl_init.set;
    bool agreed = reason[0] == '\0';
    if (!agreed && r->nccl_init.comm != NULL) {
        end_on_a_thread(ctx->staging, r->nccl_init.comm, false);
    }
    lock_take(&ctx->staging->lock);
    set->comm = agreed ? r->nccl_init.comm : NULL;
    bool is_final = agreed || !is_passing(r);
    atomic_store(&set->choice, !is_final ? CHOICE_OPEN : agreed ? CHOICE_NCCL : CHOICE_HOST);
    lock_release(&ctx->staging->lock);
    r->nccl_init.comm = NULL;
    if (agreed) {
        log_info(&ctx->log, "device", "GPU tensors of process set %d travel by NCCL %u.%u.%u",
                 set->set, r->nccl_init.mine.version / 10000, r->nccl_init.mine.version / 100 % 100,
                 r->nccl_init.mine.version % 100);
        warn_about_encryption(ctx);
    } else if (r->task.args.member == 0) {
        log_warn(&ctx->log, "device",
                 "GPU tensors of process set %d travel through host memory, not by NCCL: %s",
                 set->set, reason);
    }
}

hvd_status_t way_init_nccl_start(hvd_ctx_t *ctx, runner_t *r, const coll_task_t *task, err_t *err)
{
    HELD(ctx);
    (void)task;
    nccl_init_t *init = &r->nccl_init;
    init->phase = PHASE_FACTS;
    init->comm = NULL;
    init->staging = ctx->staging;
    init->set = comms_of_set(ctx->staging, r->batch->set->id);
    if (init->set == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to agree on NCCL");
    }
    if (atomic_load(&init->set->choice) == CHOICE_HOST) { // submitted before that was known
        init->phase = PHASE_OVER;
        return HVD_OK;
    }
    fill_facts(ctx, r, &init->mine);
    return exchange(ctx, r, err);
}

// All facts are here: makes a communicator, if nothing is against it.
static hvd_status_t connect_gpus(hvd_ctx_t *ctx, runner_t *r)
{
    nccl_init_t *init = &r->nccl_init;
    char reason[HVD_TEXT_BYTES];
    find_reason(ctx, r, reason, sizeof reason);
    if (reason[0] != '\0') {
        decide(ctx, r, reason);
        init->phase = PHASE_OVER;
        return HVD_OK;
    }
    const coll_args_t *a = &r->task.args;
    init->deadline_ns = clock_ns() + (uint64_t)(ctx->config.start_timeout * (double)NS_PER_S);
    init->failure.status = HVD_OK;
    comm_start(ctx->staging->nccl, init->facts[0].id, a->member, a->size, &init->comm,
               &init->failure);
    init->phase = PHASE_CONNECTING;
    return HVD_IN_PROGRESS;
}

static hvd_status_t await_gpus(hvd_ctx_t *ctx, runner_t *r, err_t *err) REQUIRES(ctx->baton)
{
    nccl_init_t *init = &r->nccl_init;
    hvd_status_t status = init->failure.status == HVD_OK ? comm_poll(init->comm, &init->failure)
                                                         : init->failure.status;
    ctx->staging->asks_nccl = status == HVD_IN_PROGRESS;
    if (status == HVD_IN_PROGRESS && clock_ns() < init->deadline_ns) {
        return HVD_IN_PROGRESS;
    }
    ctx->staging->asks_nccl = false;
    if (status == HVD_IN_PROGRESS) {
        status = fail(&init->failure, HVD_TIMEOUT,
                      "NCCL has not connected the GPUs within %g s (HOROVOD_START_TIMEOUT); "
                      "NCCL_DEBUG=INFO shows what it tries",
                      ctx->config.start_timeout);
    }
    if (status != HVD_OK) {
        init->mine.version = 0;
        snprintf(init->mine.why_not, sizeof init->mine.why_not, "%s", init->failure.text);
    }
    init->phase = PHASE_OUTCOMES;
    return exchange(ctx, r, err);
}

hvd_status_t way_init_nccl_progress(hvd_ctx_t *ctx, runner_t *r, bool *moved_p, err_t *err)
{
    HELD(ctx);
    nccl_init_t *init = &r->nccl_init;
    char reason[HVD_TEXT_BYTES];
    if (init->phase == PHASE_OVER) {
        return HVD_OK;
    }
    if (init->phase == PHASE_CONNECTING) {
        hvd_status_t status = await_gpus(ctx, r, err);
        return status == HVD_OK ? HVD_IN_PROGRESS : status;
    }
    hvd_status_t status = way_plan_progress(ctx, r, moved_p, err);
    if (status != HVD_OK) {
        return status;
    }
    if (init->phase == PHASE_FACTS) {
        *moved_p = true;
        return connect_gpus(ctx, r);
    }
    find_reason(ctx, r, reason, sizeof reason);
    decide(ctx, r, reason);
    init->phase = PHASE_OVER;
    return HVD_OK;
}

void way_init_nccl_abandon(runner_t *r)
{
    nccl_init_t *init = &r->nccl_init;
    init->staging->asks_nccl = false;
    if (init->comm != NULL) {
        end_on_a_thread(init->staging, init->comm, false);
        init->comm = NULL;
    }
}
