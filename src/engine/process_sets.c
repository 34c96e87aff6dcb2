// SPDX-License-Identifier: Apache-2.0
//
// process_sets.c - process sets, as the engine and the API see them.
//
// coord owns them; here is a copy that any thread may look at under the lock. Adding and removing
// one is agreed upon by all ranks, like an operation.
#include "engine/staging.h"

#include <stdlib.h>

process_set_t *set_find(const hvd_ctx_t *ctx, int id)
{
    RULE("LOCKED or HELD", owner_is_me(&ctx->lock.owner) || owner_is_me(&ctx->baton.holder));
    for (int i = 0; i < ctx->n_sets; i++) {
        if (ctx->sets[i]->id == id) {
            return ctx->sets[i];
        }
    }
    return NULL;
}

series_t *set_series(process_set_t *set, const char *name)
{
    series_t **at = &set->series;
    while (*at != NULL && strcmp((*at)->name, name) != 0) {
        at = &(*at)->next;
    }
    size_t bytes = strlen(name) + 1;
    if (*at == NULL && (*at = calloc(1, sizeof **at + bytes)) != NULL) {
        memcpy((*at)->name, name, bytes);
    }
    return *at;
}

void sets_count_anew(hvd_ctx_t *ctx)
{
    HELD(ctx);
    lock_take(&ctx->lock);
    ctx->n_joins++;
    for (int i = 0; i < ctx->n_sets; i++) {
        for (series_t *series = ctx->sets[i]->series; series != NULL; series = series->next) {
            memset(series->n, 0, sizeof series->n);
        }
    }
    lock_release(&ctx->lock);
}

static void split_by_hosts(const hvd_ctx_t *ctx, process_set_t *set, int *n_on_host)
{
    host_split_t *split = &set->split;
    int my_host = ctx->host_of[ctx->job.rank];
    for (int m = 0; m < set->n; m++) {
        int host = ctx->host_of[set->ranks[m]];
        if (host == my_host) {
            split->local_member = m == set->member ? split->n_local : split->local_member;
            split->local_ranks[split->n_local++] = set->ranks[m];
        }
    }
    for (int m = 0; m < set->n; m++) {
        int place = n_on_host[ctx->host_of[set->ranks[m]]]++;
        if (place == split->local_member) {
            split->cross_member = m == set->member ? split->n_cross : split->cross_member;
            split->cross_ranks[split->n_cross++] = set->ranks[m];
        }
    }
    split->fewest = set->n;
    for (int host = 0; host < ctx->n_hosts; host++) {
        int n = n_on_host[host];
        split->fewest = n > 0 ? MIN(split->fewest, n) : split->fewest;
        split->most = MAX(split->most, n);
    }
    set->on_this_host = split->n_local == set->n;
}

static process_set_t *set_copy(hvd_ctx_t *ctx, int id)
{
    int n;
    const int *ranks = coord_set_ranks(ctx->coord, id, &n);
    process_set_t *set = malloc(sizeof *set + 3 * (size_t)n * sizeof *ranks);
    int *n_on_host = calloc((size_t)ctx->n_hosts, sizeof *n_on_host);
    if (set == NULL || n_on_host == NULL) {
        free(set);
        free(n_on_host);
        return NULL;
    }
    int *memory = (int *)(set + 1);
    *set = (process_set_t){.id = id,
                           .n = n,
                           .ranks = memory,
                           .member = -1,
                           .split = {.local_ranks = memory + n, .cross_ranks = memory + 2 * n}};
    for (int i = 0; i < n; i++) {
        set->ranks[i] = ranks[i];
        set->member = ranks[i] == ctx->job.rank ? i : set->member;
    }
    split_by_hosts(ctx, set, n_on_host);
    free(n_on_host);
    set->hash = hash_bytes(ranks, (size_t)n * sizeof *ranks, (uint64_t)id);
    return set;
}

static void set_free(process_set_t *set)
{
    while (set != NULL && set->series != NULL) {
        series_t *first = set->series;
        set->series = first->next;
        free(first);
    }
    free(set);
}

bool set_register(hvd_ctx_t *ctx, int id)
{
    HELD(ctx);
    process_set_t *set = set_copy(ctx, id);
    lock_take(&ctx->lock);
    process_set_t **sets = realloc(ctx->sets, (size_t)(ctx->n_sets + 1) * sizeof *sets);
    if (sets != NULL) {
        ctx->sets = sets;
    }
    bool ok = set != NULL && sets != NULL;
    if (ok) {
        ctx->sets[ctx->n_sets++] = set;
    } else {
        set_free(set);
    }
    lock_release(&ctx->lock);
    return ok;
}

void set_forget(hvd_ctx_t *ctx, int id)
{
    HELD(ctx);
    comms_end(ctx->staging, id, true);
    lock_take(&ctx->lock);
    for (int i = 0; i < ctx->n_sets; i++) {
        if (ctx->sets[i]->id == id) {
            set_free(ctx->sets[i]);
            ctx->sets[i] = ctx->sets[--ctx->n_sets];
            break;
        }
    }
    lock_release(&ctx->lock);
}

void process_sets_free(hvd_ctx_t *ctx)
{
    for (int i = 0; i < ctx->n_sets; i++) {
        set_free(ctx->sets[i]);
    }
    free(ctx->sets);
}

// --- What users ask for --------------------------------------------------------------------------

// Waits for what coord must agree to and lets go of the request; *set_p: the set it was about.
static hvd_status_t ask_and_wait(hvd_ctx_t *ctx, request_t *request, int *set_p, err_t *err)
{
    hvd_handle_t handle = atomic_load(&request->handle);
    engine_wait(ctx, &request->state, NEVER_NS);
    hvd_status_t status = request->status;
    *set_p = request->set;
    if (status != HVD_OK) {
        fail(err, status, "%s", request->text);
    }
    hvd_release(ctx, handle);
    return status;
}

static int compare_ints(const void *a, const void *b)
{
    int x = *(const int *)a;
    int y = *(const int *)b;
    return (x > y) - (x < y);
}

static hvd_status_t check_set_ranks(const hvd_ctx_t *ctx, const int *ranks, int n, err_t *err)
{
    if (n < 1 || ranks == NULL) {
        return fail(err, HVD_INVALID_ARGUMENT, "a process set needs at least one rank");
    }
    for (int i = 0; i < n; i++) {
        if (ranks[i] < 0 || ranks[i] >= ctx->job.size) {
            return fail(err, HVD_INVALID_ARGUMENT,
                        "a process set names rank %d; the job has ranks 0 to %d", ranks[i],
                        ctx->job.size - 1);
        }
        if (i > 0 && ranks[i] == ranks[i - 1]) {
            return fail(err, HVD_INVALID_ARGUMENT, "a process set names rank %d twice", ranks[i]);
        }
    }
    return HVD_OK;
}

// A request object that asks coord for something else than an operation.
static request_t *new_question(hvd_ctx_t *ctx, hvd_op_t op, const int *ranks, int n, err_t *err)
    REQUIRES(ctx->lock)
{
    if (check_running(ctx, err) != HVD_OK) {
        return NULL;
    }
    request_t *request = request_new(ctx);
    if (request != NULL) {
        buf_clear(&request->storage);
    }
    size_t bytes = (size_t)n * sizeof(int);
    if (request == NULL || !buf_reserve(&request->storage, bytes + 32)) {
        fail(err, HVD_NO_MEMORY, "no memory for a process set");
        return NULL;
    }
    request->signature = (signature_t){.op = op};
    request->name = "";
    request->where = NULL;
    request->process_set = 0;
    request->done = NULL;
    request->n_set_ranks = n;
    trace_describe(&request->trace, &request->signature, NULL, request->name, NULL, 0);
    request->set_ranks = request_cut(request, bytes);
    if (n > 0) {
        memcpy(request->set_ranks, ranks, bytes);
    }
    request->hash = 1;
    return request;
}

hvd_status_t hvd_process_set_add(hvd_ctx_t *ctx, const int *ranks, int n_ranks, int *id_p,
                                 char *text, size_t text_bytes)
{
    err_t err = {0};
    hvd_status_t status = check_context(ctx, &err);
    if (status != HVD_OK) {
        return err_export(&err, status, text, text_bytes);
    }
    int *sorted = malloc((size_t)MAX(n_ranks, 1) * sizeof *sorted);
    if (sorted == NULL) {
        return HVD_NO_MEMORY;
    }
    if (ranks != NULL && n_ranks > 0) {
        memcpy(sorted, ranks, (size_t)n_ranks * sizeof *sorted);
        qsort(sorted, (size_t)n_ranks, sizeof *sorted, compare_ints);
    }
    status = check_set_ranks(ctx, ranks != NULL ? sorted : NULL, n_ranks, &err);
    request_t *request = NULL;
    if (status == HVD_OK) {
        lock_take(&ctx->lock);
        request = new_question(ctx, OP_ADD_SET, sorted, n_ranks, &err);
        if (request != NULL) {
            request_register(ctx, request);
            request_enqueue(ctx, request);
        } else {
            status = err.status;
        }
        lock_release(&ctx->lock);
    }
    free(sorted);
    int id;
    if (request != NULL && (status = ask_and_wait(ctx, request, &id, &err)) == HVD_OK) {
        *id_p = id;
    }
    return err_export(&err, status, text, text_bytes);
}

hvd_status_t hvd_process_set_remove(hvd_ctx_t *ctx, int id, char *text, size_t text_bytes)
{
    err_t err = {0};
    hvd_status_t status = check_context(ctx, &err);
    if (status != HVD_OK) {
        return err_export(&err, status, text, text_bytes);
    }
    lock_take(&ctx->lock);
    request_t *request = NULL;
    if (id == 0 || set_find(ctx, id) == NULL) {
        status = fail(&err, HVD_UNKNOWN_SET, "process set %d cannot be removed: %s", id,
                      id == 0 ? "it holds all ranks" : "it does not exist");
    } else if ((request = new_question(ctx, OP_REMOVE_SET, NULL, 0, &err)) == NULL) {
        status = err.status;
    } else {
        request->set = id;
        request_register(ctx, request);
        request_enqueue(ctx, request);
    }
    lock_release(&ctx->lock);
    if (request != NULL) {
        status = ask_and_wait(ctx, request, &id, &err);
    }
    return err_export(&err, status, text, text_bytes);
}

int hvd_process_set_count(hvd_ctx_t *ctx)
{
    lock_take(&ctx->lock);
    int n = ctx->n_sets;
    lock_release(&ctx->lock);
    return n;
}

hvd_status_t hvd_process_set_ids(hvd_ctx_t *ctx, int *ids, int n_ids)
{
    lock_take(&ctx->lock);
    bool fits = n_ids >= ctx->n_sets;
    for (int i = 0; fits && i < ctx->n_sets; i++) {
        ids[i] = ctx->sets[i]->id;
    }
    lock_release(&ctx->lock);
    return fits ? HVD_OK : HVD_INVALID_ARGUMENT;
}

int hvd_process_set_size(hvd_ctx_t *ctx, int id)
{
    lock_take(&ctx->lock);
    const process_set_t *set = set_find(ctx, id);
    int n = set != NULL ? set->n : HVD_UNKNOWN_SET;
    lock_release(&ctx->lock);
    return n;
}

int hvd_process_set_rank(hvd_ctx_t *ctx, int id)
{
    lock_take(&ctx->lock);
    const process_set_t *set = set_find(ctx, id);
    int member = set == NULL ? HVD_UNKNOWN_SET : set->member < 0 ? HVD_NOT_MEMBER : set->member;
    lock_release(&ctx->lock);
    return member;
}

hvd_status_t hvd_process_set_ranks(hvd_ctx_t *ctx, int id, int *ranks, int n_ranks)
{
    lock_take(&ctx->lock);
    const process_set_t *set = set_find(ctx, id);
    hvd_status_t status = set == NULL        ? HVD_UNKNOWN_SET
                          : n_ranks < set->n ? HVD_INVALID_ARGUMENT
                                             : HVD_OK;
    if (status == HVD_OK) {
        memcpy(ranks, set->ranks, (size_t)set->n * sizeof *ranks);
    }
    lock_release(&ctx->lock);
    return status;
}
