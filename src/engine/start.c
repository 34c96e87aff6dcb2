// SPDX-License-Identifier: Apache-2.0
//
// start.c - bringing a context up and down.
//
// Up: knobs -> boot (who am I) -> exchange who sits on which host -> open transports -> exchange
// addresses -> attach -> exchange who is attached -> agreement tree -> engine thread -> neighbours
// in the tree heard. Three exchanges through the rendezvous, whatever the number of ranks; after
// that it is not needed. A rank that has come up is linked to its neighbours on both sides, so
// whatever ends it from then on is noticed by them at once.
// Down: agree to stop, drain, and undo in reverse. A failed start undoes what was done and says
// why.
#define _GNU_SOURCE
#include "engine/staging.h"

#include "wire/codec.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#define DRAIN_NS (5 * NS_PER_S)
#define SHUTDOWN_NS (10 * NS_PER_S)

// Choices of the knobs.
#define OPERATIONS_MPI 1
#define CONTROLLER_MPI 1

// --- Who is where --------------------------------------------------------------------------------

#define PROCESS_BYTES 28 // pid, start and namespaces of the process, behind the host

// What each rank tells all others before anything else: its host, its process, and the process sets
// it was given.
static void put_introduction(const hvd_ctx_t *ctx, const hvd_options_t *options, buf_t *out)
{
    peer_id_t self = peer_of_self("");
    put_bytes(out, ctx->job.host, strlen(ctx->job.host) + 1);
    put_u32(out, (uint32_t)self.pid);
    put_u64(out, self.started);
    put_u64(out, self.space);
    put_u64(out, self.network);
    int n_sets = options != NULL ? options->n_process_sets : 0;
    put_u32(out, (uint32_t)n_sets);
    for (int s = 0; s < n_sets; s++) {
        put_u32(out, (uint32_t)options->process_set_sizes[s]);
        for (int i = 0; i < options->process_set_sizes[s]; i++) {
            put_u32(out, (uint32_t)options->process_sets[s][i]);
        }
    }
}

static void note_peer(hvd_ctx_t *ctx, int rank, const char *host, const uint8_t *process)
{
    reader_t in = reader_of(process, PROCESS_BYTES);
    peer_id_t *peer = &ctx->peers.of[rank];
    peer->pid = (int)get_u32(&in);
    peer->started = get_u64(&in);
    peer->space = get_u64(&in);
    peer->network = get_u64(&in);
    peer->kernel = hash_bytes(host, boot_kernel_bytes(host), 0);
    snprintf(peer->host, sizeof peer->host, "%s", boot_host_name(host));
}

// Hosts are numbered in the order of their lowest ranks; `hosts` has the number of that rank's.
static bool number_host(hvd_ctx_t *ctx, int rank, const char *host, map_t *hosts)
{
    size_t bytes = strlen(host);
    uint64_t hash = hash_bytes(host, bytes, 0);
    int *known = map_get(hosts, hash, host, bytes);
    ctx->host_of[rank] = known != NULL ? *known : ctx->n_hosts++;
    return known != NULL || map_put(hosts, hash, host, bytes, &ctx->host_of[rank]);
}

static hvd_status_t number_hosts(hvd_ctx_t *ctx, const uint8_t *const *told, const size_t *lengths,
                                 map_t *hosts, err_t *err)
{
    int size = ctx->job.size;
    for (int r = 0; r < size; r++) {
        size_t host_bytes = strnlen((const char *)told[r], lengths[r]) + 1 + PROCESS_BYTES;
        size_t mine = strlen(ctx->job.host) + 1 + PROCESS_BYTES;
        if (host_bytes > lengths[r]) {
            return fail(err, HVD_PROTOCOL, "rank %d sent a malformed introduction", r);
        }
        size_t my_bytes = lengths[ctx->job.rank] - mine;
        if (lengths[r] - host_bytes != my_bytes ||
            memcmp(told[r] + host_bytes, told[ctx->job.rank] + mine, my_bytes) != 0) {
            return fail(err, HVD_INVALID_ARGUMENT,
                        "ranks %d and %d were started with different process sets: pass the same "
                        "list, in the same order, to init on every rank",
                        ctx->job.rank, r);
        }
        note_peer(ctx, r, (const char *)told[r], told[r] + host_bytes - PROCESS_BYTES);
        if (!number_host(ctx, r, (const char *)told[r], hosts)) {
            return fail(err, HVD_NO_MEMORY, "no memory for the hosts of %d ranks", size);
        }
    }
    ctx->config.inline_bytes = way_inline_bytes(&ctx->config, ctx->job.size, ctx->n_hosts);
    return HVD_OK;
}

static void check_homogeneous(hvd_ctx_t *ctx)
{
    ctx->homogeneous = true;
    for (int host = 0; host < ctx->n_hosts; host++) {
        ctx->homogeneous &= ctx->host_sizes[host] == ctx->host_sizes[0];
    }
}

typedef struct answers {
    const uint8_t **values;
    size_t *lengths;
    buf_t storage;
} answers_t;

static hvd_status_t exchange(hvd_ctx_t *ctx, const char *round, const void *value, size_t bytes,
                             answers_t *answers, err_t *err)
{
    buf_clear(&answers->storage);
    return boot_exchange(ctx->boot, round, value, bytes, answers->values, answers->lengths,
                         &answers->storage, err);
}

static hvd_status_t meet(hvd_ctx_t *ctx, const hvd_options_t *options, answers_t *answers,
                         err_t *err)
{
    buf_t introduction = {0};
    put_introduction(ctx, options, &introduction);
    hvd_status_t status =
        introduction.failed ? fail(err, HVD_NO_MEMORY, "no memory to start") : HVD_OK;
    if (status == HVD_OK) {
        status = exchange(ctx, "introduction", introduction.data, introduction.len, answers, err);
    }
    map_t hosts = {0};
    if (status == HVD_OK) {
        status = number_hosts(ctx, answers->values, answers->lengths, &hosts, err);
    }
    if (status == HVD_OK) {
        boot_place(&ctx->job, ctx->host_of, ctx->host_sizes);
        check_homogeneous(ctx);
    }
    map_free(&hosts);
    buf_free(&introduction);
    return status;
}

// --- Descriptors ---------------------------------------------------------------------------------

#define OWN_DESCRIPTORS 12 // listeners, event loop, wake-ups, and a few to spare
#define MOST_PEERS 32      // a rank rarely speaks to more of them directly

static int count_open_files(void)
{
    DIR *folder = opendir("/proc/self/fd");
    int n = 0;
    while (folder != NULL && readdir(folder) != NULL) {
        n++;
    }
    if (folder != NULL) {
        closedir(folder);
    }
    return MAX(n - 3, 0); // ".", ".." and the folder itself
}

// Better now, in a sentence with numbers, than in the middle of the work.
static hvd_status_t check_descriptors(const hvd_ctx_t *ctx, err_t *err)
{
    int needed = OWN_DESCRIPTORS + 2 * MIN(ctx->job.size - 1, MOST_PEERS);
    int open = count_open_files();
    struct rlimit limit;
    if (ctx->job.size > 1 && getrlimit(RLIMIT_NOFILE, &limit) == 0 &&
        (rlim_t)open + (rlim_t)needed > limit.rlim_cur && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = MIN(limit.rlim_max, 2 * ((rlim_t)open + (rlim_t)needed));
        (void)setrlimit(RLIMIT_NOFILE, &limit);
    }
    if (ctx->job.size == 1 || getrlimit(RLIMIT_NOFILE, &limit) != 0 ||
        limit.rlim_cur == RLIM_INFINITY || (rlim_t)open + (rlim_t)needed <= limit.rlim_cur) {
        return HVD_OK;
    }
    return fail(err, HVD_SYSTEM,
                "rank %d needs about %d file descriptors, but %d of the %llu it may have are in "
                "use: raise the limit (ulimit -n %d, LimitNOFILE= or docker --ulimit nofile) or "
                "close files before init",
                ctx->job.rank, needed, open, (unsigned long long)limit.rlim_cur,
                MAX(1024, 2 * (open + needed)));
}

// --- Links ---------------------------------------------------------------------------------------

// Does every host with several ranks share memory? All ranks must know, to choose routes alike.
static bool hosts_share_memory(const hvd_ctx_t *ctx, const uint8_t *attached)
{
    uint8_t shm = net_attached_bit(&transport_shm);
    for (int r = 0; r < ctx->job.size; r++) {
        if (ctx->host_sizes[ctx->host_of[r]] > 1 && (attached[r] & shm) == 0) {
            return false;
        }
    }
    return true;
}

static hvd_status_t settle(hvd_ctx_t *ctx, answers_t *answers, err_t *err)
{
    const uint8_t mine[] = {net_attached(ctx->net), ctx->mpi != NULL};
    hvd_status_t status = exchange(ctx, "attached", mine, sizeof mine, answers, err);
    if (status != HVD_OK) {
        return status;
    }
    uint8_t *everyone = calloc((size_t)ctx->job.size, 1);
    if (everyone == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to start");
    }
    for (int r = 0; r < ctx->job.size && status == HVD_OK; r++) {
        bool whole = answers->lengths[r] == sizeof mine;
        everyone[r] = whole ? answers->values[r][0] : 0;
        if (whole && answers->values[r][1] != mine[1]) {
            status = fail(err, HVD_INVALID_ARGUMENT,
                          "ranks %d and %d disagree about HOROVOD_CPU_OPERATIONS: one uses MPI, "
                          "the other does not; set it to the same value on all ranks",
                          ctx->job.rank, r);
        }
    }
    if (status == HVD_OK) {
        status = net_settle(ctx->net, everyone, err);
    }
    ctx->shm_on_all_hosts = hosts_share_memory(ctx, everyone);
    free(everyone);
    return status;
}

// Every rank reaches every other through the loopback interface.
static bool share_loopback(const hvd_ctx_t *ctx)
{
    const peer_id_t *of = ctx->peers.of;
    bool shared = ctx->n_hosts == 1 && of[0].network != 0;
    for (int r = 1; r < ctx->job.size; r++) {
        shared = shared && of[r].network == of[0].network;
    }
    return shared;
}

static hvd_status_t connect_ranks(hvd_ctx_t *ctx, answers_t *answers, err_t *err)
{
    net_job_t job = {
        .rank = ctx->job.rank,
        .size = ctx->job.size,
        .host_of = ctx->host_of,
        .share_loopback = share_loopback(ctx),
        .config = &ctx->config,
        .log = &ctx->log,
        .keys = ctx->keys,
        .peers = &ctx->peers,
    };
    hvd_status_t status;
    buf_t mine = {0};
    TRY(net_open(&job, &ctx->net, err), out);
    TRY(net_address(ctx->net, &mine, err), out);
    TRY(exchange(ctx, "address", mine.data, mine.len, answers, err), out);
    TRY(net_attach(ctx->net, answers->values, answers->lengths, err), out);
    status = settle(ctx, answers, err);
out:
    buf_free(&mine);
    return status;
}

// --- The agreement -------------------------------------------------------------------------------

// Ranks of a host under its lowest rank; those leaders under rank 0 in a tree of the given arity.
static void plant_tree(const hvd_ctx_t *ctx, int *parent, int *leaders)
{
    int n_leaders = 0;
    for (int r = 0; r < ctx->job.size; r++) {
        int host = ctx->host_of[r]; // hosts are numbered in the order of their lowest ranks
        if (host == n_leaders) {
            leaders[n_leaders] = r;
            parent[r] = host == 0 ? -1 : leaders[(host - 1) / (int)ctx->config.tree_arity];
            n_leaders++;
        } else {
            parent[r] = leaders[host];
        }
    }
}

static void reduce_riding(hvd_dtype_t dtype, hvd_reduce_t op, void *dst, const void *a,
                          const void *b, size_t n)
{
    reduce_pair(acc_dtype(dtype), op == HVD_AVERAGE ? HVD_SUM : op, dst, a, b, n);
}

static hvd_status_t open_coord(hvd_ctx_t *ctx, err_t *err)
{
    const config_t *config = &ctx->config;
    int *parent = malloc((size_t)ctx->job.size * 2 * sizeof *parent);
    if (parent == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to start");
    }
    plant_tree(ctx, parent, parent + ctx->job.size);
    coord_params_t params = {
        .rank = ctx->job.rank,
        .size = ctx->job.size,
        .parent = parent,
        .fusion_bytes = config->fusion_threshold,
        .inline_bytes = config->inline_bytes,
        .cache_capacity = (int)config->cache_capacity,
        .separate_groups = config->disable_group_fusion,
        .dynamic_sets = config->dynamic_process_sets,
        .cycle_ns = (uint64_t)(config->cycle_time * (double)NS_PER_MS),
        .stall_warn_ns = config->stall_check_disable
                             ? 0
                             : (uint64_t)(config->stall_check_time * (double)NS_PER_S),
        .stall_fail_ns = (uint64_t)(config->stall_shutdown_time * (double)NS_PER_S),
        .heartbeat_ns = (uint64_t)(config->heartbeat_interval * (double)NS_PER_S),
        .heartbeat_warn_ns = (uint64_t)(config->heartbeat_warning * (double)NS_PER_S),
        .heartbeat_fail_ns = (uint64_t)(config->heartbeat_timeout * (double)NS_PER_S),
        .heartbeat_first_ns = (uint64_t)(config->peer_timeout * (double)NS_PER_S),
        .reduce = reduce_riding,
        .log = &ctx->log,
    };
    hvd_status_t status = coord_new(&params, &ctx->coord, err);
    free(parent);
    return status;
}

static hvd_status_t define_sets(hvd_ctx_t *ctx, const hvd_options_t *options, err_t *err)
    REQUIRES(ctx->baton)
{
    bool ok = set_register(ctx, 0);
    for (int s = 0; ok && options != NULL && s < options->n_process_sets; s++) {
        int id;
        hvd_status_t status = coord_define_set(ctx->coord, options->process_sets[s],
                                               options->process_set_sizes[s], &id, err);
        if (status != HVD_OK) {
            return status;
        }
        ok = set_register(ctx, id);
    }
    return ok ? HVD_OK : fail(err, HVD_NO_MEMORY, "no memory for process sets");
}

static hvd_status_t link_tree(hvd_ctx_t *ctx, err_t *err)
{
    int n = coord_n_neighbours(ctx->coord);
    ctx->control = calloc((size_t)MAX(n, 1), sizeof *ctx->control);
    if (ctx->control == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory to start");
    }
    for (int i = 0; i < n; i++) {
        control_link_t *c = &ctx->control[i];
        c->peer = coord_neighbour(ctx->coord, i);
        c->link = net_link(ctx->net, c->peer, LANE_CONTROL, err);
        if (c->link == NULL) {
            return err->status;
        }
        ctx->n_control = i + 1;
    }
    return HVD_OK;
}

// --- Up and down ---------------------------------------------------------------------------------

static void take_down(hvd_ctx_t *ctx) REQUIRES(ctx->baton)
{
    bool is_alone = observe_stop(ctx->observe);
    if (ctx->runner != NULL) {
        batches_drop(ctx);
    }
    batches_free(ctx);
    runner_free(ctx->runner);
    runner_free(ctx->rider);
    board_free(ctx->board);
    for (int i = 0; i < ctx->n_control; i++) {
        buf_free(&ctx->control[i].partial);
    }
    free(ctx->control);
    coord_free(ctx->coord);
    net_close(ctx->net);
    mpi_close(ctx->mpi, ctx->ended_well);
    secure_keys_free(ctx->keys);
    boot_close(ctx->boot);
    if (is_alone || !observe_inherits(ctx->observe)) {
        context_free(ctx);
    }
}

void context_free(hvd_ctx_t *ctx)
{
    requests_free(ctx);
    staging_free(ctx->staging);
    process_sets_free(ctx);
    observe_free(ctx->observe);
    free(ctx->host_of);
    free(ctx->host_sizes);
    free(ctx->peers.of);
    config_free(&ctx->config);
    wipe(&ctx->job, sizeof ctx->job);
    if (ctx->alive != NULL) {
        munmap(ctx->alive, (size_t)sysconf(_SC_PAGESIZE));
    }
    lock_free(&ctx->board_lock);
    lock_free(&ctx->lock);
    free(ctx);
}

// A page that reads as zero in a forked child, which so learns that the context is not its own.
static hvd_status_t mark_alive(hvd_ctx_t *ctx, err_t *err)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *at = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
        return fail(err, HVD_NO_MEMORY, "no memory to start");
    }
    ctx->alive = at;
    madvise(at, page, MADV_WIPEONFORK);
    atomic_store(ctx->alive, 1);
    return HVD_OK;
}

static hvd_status_t read_knobs(hvd_ctx_t *ctx, const hvd_options_t *options, err_t *err)
{
    ctx->log.level = LOG_WARN;
    ctx->log.rank = -1;
    if (options != NULL) {
        ctx->log.sink = options->log;
        ctx->log.arg = options->log_arg;
    }
    hvd_status_t status =
        config_load(&ctx->config, options != NULL ? options->env : NULL, &ctx->log, err);
    if (status == HVD_OK) {
        ctx->log.level = log_level_parse(ctx->config.log_level);
        ctx->log.hide_time = ctx->config.log_hide_time;
    }
    return status;
}

// Once for the job: its ranks were given the same.
static void warn_of_idle_settings(const hvd_ctx_t *ctx)
{
    if (ctx->job.rank == 0 && ctx->config.idle != NULL) {
        log_warn(&ctx->log, "start", "these settings have no effect: %s", ctx->config.idle);
    }
}

// "shm", "TLS": what carries tensors from this rank to the first other one on this host, or on
// another one; NULL: there is none.
static const char *carrier(const hvd_ctx_t *ctx, bool is_here)
{
    int peer = 0;
    while (
        peer < ctx->job.size &&
        (peer == ctx->job.rank || is_here != (ctx->host_of[peer] == ctx->host_of[ctx->job.rank]))) {
        peer++;
    }
    const char *name = peer < ctx->job.size ? net_transport_name(ctx->net, peer, NULL, 0) : NULL;
    bool is_encrypted =
        ctx->config.encrypt == ENCRYPT_ALWAYS || (ctx->config.encrypt == ENCRYPT_AUTO && !is_here);
    return name == NULL || strcmp(name, "tcp") != 0 ? name : is_encrypted ? "TLS" : "TCP";
}

// One line for the job: "4 ranks on 2 hosts, shm + TLS, version 1.0.0".
static void announce(const hvd_ctx_t *ctx)
{
    if (ctx->job.rank == 0 && ctx->log.level <= LOG_INFO) {
        const char *here = carrier(ctx, true), *away = carrier(ctx, false);
        log_info(&ctx->log, "start", "%d rank%s on %d host%s%s%s%s%s, version %s", ctx->job.size,
                 plural(ctx->job.size), ctx->n_hosts, plural(ctx->n_hosts),
                 here != NULL || away != NULL ? ", " : "", here != NULL ? here : "",
                 here != NULL && away != NULL ? " + " : "", away != NULL ? away : "",
                 hvd_version());
    }
}

// MPI comes first where it is used, before the ranks can compare that: it must be the first whom
// the launcher serves. Open MPI 5 fails where PMIx is initialised already, Open MPI 4 where a child
// of its process has been a client of PMIx.
static hvd_status_t open_mpi(hvd_ctx_t *ctx, err_t *err)
{
    const config_t *config = &ctx->config;
    bool by_controller =
        config->controller == CONTROLLER_MPI && config->origin[KNOB_cpu_operations] == FROM_DEFAULT;
    return config->cpu_operations == OPERATIONS_MPI || by_controller
               ? mpi_open(config, &ctx->mpi, err)
               : HVD_OK;
}

static hvd_status_t attach_mpi(hvd_ctx_t *ctx, const hvd_options_t *options, err_t *err)
{
    uintptr_t comm = options != NULL ? options->mpi_comm : 0;
    uint64_t deadline = deadline_in_ms((int64_t)(ctx->config.start_timeout * 1000));
    if (ctx->mpi == NULL) {
        return HVD_OK;
    }
    log_debug(&ctx->log, "start", "collectives by %s", mpi_library_name(ctx->mpi));
    if (ctx->config.encrypt == ENCRYPT_AUTO && ctx->n_hosts > 1 && ctx->job.rank == 0) {
        log_warn(
            &ctx->log, "start",
            "tensors between hosts travel by %s, which does not encrypt them; without "
            "HOROVOD_CPU_OPERATIONS=MPI they are encrypted, and HOROVOD_ENCRYPT=never silences "
            "this warning",
            mpi_library_name(ctx->mpi));
    }
    return mpi_attach(ctx->mpi, comm, ctx->job.rank, ctx->job.size, net_has_spare_cores(ctx->net),
                      deadline, err);
}

static bool has_ended(hvd_ctx_t *ctx)
{
    lock_take(&ctx->lock);
    bool ended = ctx->ended.status != HVD_OK;
    lock_release(&ctx->lock);
    return ended;
}

// Links that cannot be made end the job after HOROVOD_GLOO_TIMEOUT_SECONDS. Whoever is only slow
// beyond that is left to its heartbeats.
static hvd_status_t
hear_neighbours(hvd_ctx_t *ctx, err_t *err) NOT_ANALYSED // takes the engine back only if it fails
{
    uint64_t deadline = clock_ns() + (uint64_t)(2 * ctx->config.peer_timeout * (double)NS_PER_S);
    while (!atomic_load(&ctx->hears_all) && !has_ended(ctx) && clock_ns() < deadline) {
        engine_wait_a_little(ctx);
    }
    if (atomic_load(&ctx->hears_all) || !has_ended(ctx) || ctx->ended.status == HVD_SHUTDOWN) {
        return HVD_OK; // of a neighbour that has come and gone the first operation tells
    }
    engine_stop(ctx);
    engine_drain(ctx, clock_ns() + DRAIN_NS);
    *err = ctx->ended;
    return err->status;
}

static hvd_status_t bring_up(hvd_ctx_t *ctx, const hvd_options_t *options, err_t *err)
    REQUIRES(ctx->baton)
{
    hvd_status_t status;
    answers_t answers = {0};
    TRY(mark_alive(ctx, err), out);
    TRY(read_knobs(ctx, options, err), out);
    forget_blame(ctx);
    TRY(open_mpi(ctx, err), out);
    TRY(boot_open(&ctx->config, &ctx->log, &ctx->job, &ctx->boot, err), out);
    ctx->log.rank = ctx->job.rank;
    warn_of_idle_settings(ctx);
    TRY(check_descriptors(ctx, err), out);
    size_t n = (size_t)ctx->job.size;
    ctx->host_of = calloc(n, sizeof *ctx->host_of);
    ctx->host_sizes = calloc(n, sizeof *ctx->host_sizes);
    ctx->peers = (peers_t){
        .self = ctx->job.rank,
        .size = ctx->job.size,
        .host_of = ctx->host_of,
        .of = calloc(n, sizeof *ctx->peers.of),
        .n_oom_kills = peer_oom_kills(),
    };
    answers.values = calloc(n, sizeof *answers.values);
    answers.lengths = calloc(n, sizeof *answers.lengths);
    if (ctx->host_of == NULL || ctx->host_sizes == NULL || ctx->peers.of == NULL ||
        answers.values == NULL || answers.lengths == NULL) {
        status = fail(err, HVD_NO_MEMORY, "no memory for a job of %d ranks", ctx->job.size);
        goto out;
    }
    if (ctx->job.size > 1) {
        TRY(secure_keys_new(ctx->job.secret, &ctx->keys, err), out);
    }
    wipe(ctx->job.secret, sizeof ctx->job.secret);
    TRY(meet(ctx, options, &answers, err), out);
    TRY(connect_ranks(ctx, &answers, err), out);
    TRY(attach_mpi(ctx, options, err), out);
    TRY(open_coord(ctx, err), out);
    TRY(define_sets(ctx, options, err), out);
    TRY(link_tree(ctx, err), out);
    TRY(staging_new(&ctx->staging, err), out);
    TRY(runner_new(ctx, &ctx->runner, err), out);
    TRY(rider_new(&ctx->rider, err), out);
    TRY(board_new(ctx, &ctx->board, err), out);
    boot_leave(ctx->boot);
    ctx->boot = NULL;
    TRY(observed_start(ctx, err), out);
    TRY(engine_start(ctx, err), out);
    status = hear_neighbours(ctx, err);
out:
    if (status == HVD_TIMEOUT) {
        blame_missing(ctx, boot_missing(ctx->boot));
    }
    free(answers.values);
    free(answers.lengths);
    buf_free(&answers.storage);
    return status;
}

hvd_status_t hvd_init(const hvd_options_t *options, hvd_ctx_t **ctx_p, char *text,
                      size_t text_bytes) NOT_ANALYSED // holds the engine until engine_start
{
    err_t err = {0};
    hvd_ctx_t *ctx =
        aligned_alloc(CACHE_LINE, (sizeof *ctx + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
    if (ctx == NULL) {
        fail(&err, HVD_NO_MEMORY, "no memory to start");
        return err_export(&err, HVD_NO_MEMORY, text, text_bytes);
    }
    memset(ctx, 0, sizeof *ctx);
    lock_init(&ctx->lock);
    lock_init(&ctx->board_lock);
    ctx->running_last = &ctx->running;
    baton_take(ctx);
    ctx->now_ns = clock_ns();
    hvd_status_t status = bring_up(ctx, options, &err);
    if (status != HVD_OK) {
        log_debug(&ctx->log, "start", "%s", err.text);
        take_down(ctx);
        return err_export(&err, status, text, text_bytes);
    }
    announce(ctx);
    *ctx_p = ctx;
    return HVD_OK;
}

hvd_status_t hvd_stop(hvd_ctx_t *ctx)
{
    if (ctx == NULL) {
        return HVD_NOT_INITIALIZED;
    }
    if (atomic_load(ctx->alive) == 0) {
        return HVD_FORKED; // the parent's context stays the parent's
    }
    atomic_store(&ctx->stop_requested, true);
    engine_notify(ctx);
    uint64_t deadline = clock_ns() + SHUTDOWN_NS;
    while (!has_ended(ctx) && clock_ns() < deadline) {
        engine_wait_a_little(ctx);
    }
    return has_ended(ctx) ? HVD_OK : HVD_TIMEOUT;
}

hvd_status_t hvd_shutdown(hvd_ctx_t *ctx) NOT_ANALYSED // the baton ends with the context
{
    hvd_status_t status = hvd_stop(ctx);
    if (status != HVD_OK && status != HVD_TIMEOUT) {
        return status;
    }
    engine_stop(ctx);
    if (ctx->config.summary && ctx->job.rank == 0) {
        observe_summarize(ctx->observe, ctx->coord);
    }
    ctx->ended_well = ctx->ended.status == HVD_SHUTDOWN;
    requests_end(ctx, HVD_SHUTDOWN, "Horovod has been shut down.");
    staging_close(ctx, ctx->ended_well);
    engine_drain(ctx, clock_ns() + DRAIN_NS);
    take_down(ctx);
    return HVD_OK;
}
