// SPDX-License-Identifier: Apache-2.0
//
// pmix.c - launched by mpirun of Open MPI, or by srun --mpi=pmix: a PMIx library, found at run
// time, leads to the launcher's daemon on this host. Nothing is linked, no header of it is needed.
//
// Rank 0 hosts the rendezvous and publishes its ticket; after a fence the others read it. A PMIx
// library starts threads, has waits without end and survives only one init and finalize, so a
// forked child talks to it, hands the answer up through a pipe and ends: the user's process stays
// as it was, and a child that hangs is killed at the deadline. Where PMIx already runs in this
// process (an MPI library did it) it is used here, since a forked copy of it has lost its threads.
// The ticket is kept for an init after a shutdown: daemons on several hosts do not fence again with
// a rank that has finalised.
//
// The library next to the launcher is tried first: it speaks the same version.
// Threads: the one that calls hvd_init; the child has one.
#define _GNU_SOURCE
#include "boot/launcher.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define TICKET_KEY "hvd-ticket"
#define FENCE_MARGIN_S 1

// --- What we use of the PMIx interface -----------------------------------------------------------

#define PMIX_OK 0
#define PMIX_TYPE_BOOL 1
#define PMIX_TYPE_STRING 3
#define PMIX_TYPE_INT 6
#define PMIX_TYPE_UINT32 14
#define PMIX_SCOPE_GLOBAL 3
#define PMIX_EVERY_RANK (UINT32_MAX - 1)

typedef struct pmix_proc {
    char nspace[256];
    uint32_t rank;
} pmix_proc_t;

typedef struct pmix_value {
    uint16_t type;
    union {
        bool flag;
        int integer;
        uint32_t uint32;
        char *string;
        uint64_t room[3]; // the largest member of the interface
    } data;
} pmix_value_t;

typedef struct pmix_info {
    char key[512];
    uint32_t flags;
    pmix_value_t value;
} pmix_info_t;

_Static_assert(sizeof(pmix_proc_t) == 260 && sizeof(pmix_value_t) == 32 &&
                   sizeof(pmix_info_t) == 552,
               "laid out as in the PMIx interface since version 3");

typedef struct pmix_lib {
    void *handle;
    int (*initialized)(void);
    int (*init)(pmix_proc_t *me_p, pmix_info_t *info, size_t n_info);
    int (*finalize)(const pmix_info_t *info, size_t n_info);
    int (*put)(uint8_t scope, const char *key, pmix_value_t *value);
    int (*commit)(void);
    int (*fence)(const pmix_proc_t *procs, size_t n_procs, const pmix_info_t *info, size_t n_info);
    int (*get)(const pmix_proc_t *proc, const char *key, const pmix_info_t *info, size_t n_info,
               pmix_value_t **value_p);
} pmix_lib_t;

static const struct {
    const char *name;
    size_t offset;
} functions[] = {
    {"PMIx_Initialized", offsetof(pmix_lib_t, initialized)},
    {"PMIx_Init", offsetof(pmix_lib_t, init)},
    {"PMIx_Finalize", offsetof(pmix_lib_t, finalize)},
    {"PMIx_Put", offsetof(pmix_lib_t, put)},
    {"PMIx_Commit", offsetof(pmix_lib_t, commit)},
    {"PMIx_Fence", offsetof(pmix_lib_t, fence)},
    {"PMIx_Get", offsetof(pmix_lib_t, get)},
};

#define LIBRARY "libpmix.so.2"

static bool pmix_looks_right(const config_t *config)
{
    return config->seen[SEEN_PMIX_NAMESPACE] != NULL || config->seen[SEEN_PMIX_RANK] != NULL;
}

// --- The library ---------------------------------------------------------------------------------

static bool find_functions(pmix_lib_t *lib)
{
    for (size_t i = 0; i < N_ELEMENTS(functions); i++) {
        void *symbol = dlsym(lib->handle, functions[i].name);
        if (symbol == NULL) {
            return false;
        }
        memcpy((char *)lib + functions[i].offset, &symbol, sizeof symbol);
    }
    return true;
}

static bool open_library(const char *path, int flags, pmix_lib_t *lib)
{
    lib->handle = dlopen(path, RTLD_NOW | flags);
    if (lib->handle != NULL && find_functions(lib)) {
        return true;
    }
    if (lib->handle != NULL) {
        dlclose(lib->handle);
    }
    *lib = (pmix_lib_t){0};
    return false;
}

// Beside the Open MPI that launched us, then wherever the system has one.
static bool load_library(const config_t *config, pmix_lib_t *lib)
{
    static const struct {
        enum launch_var prefix;
        const char *below;
    } places[] = {
        {SEEN_OPAL_PREFIX, "lib/openmpi"}, {SEEN_PMIX_PREFIX, "lib/openmpi"},
        {SEEN_PMIX_PREFIX, "lib"},         {SEEN_OPAL_PREFIX, "lib"},
        {SEEN_PMIX_PREFIX, "lib64"},       {SEEN_OPAL_PREFIX, "lib64"},
    };
    char path[4096];

    for (size_t i = 0; i < N_ELEMENTS(places); i++) {
        const char *prefix = config->seen[places[i].prefix];
        if (prefix != NULL) {
            snprintf(path, sizeof path, "%s/%s/" LIBRARY, prefix, places[i].below);
            if (open_library(path, 0, lib)) {
                return true;
            }
        }
    }
    return open_library(LIBRARY, 0, lib);
}

// --- The conversation ----------------------------------------------------------------------------

// What goes up the pipe.
typedef struct answer {
    enum { ANSWERED, NO_LIBRARY, FAILED } outcome;
    const char *step; // FAILED: which call; a constant, so it is the same on both sides of a fork
    int code;         // what it returned
    uint32_t rank, size;
    char ticket[TICKET_BYTES];
} answer_t;

static bool did(answer_t *answer, const char *step, int code)
{
    answer->outcome = code == PMIX_OK ? ANSWERED : FAILED;
    answer->step = step;
    answer->code = code;
    return code == PMIX_OK;
}

static bool ask_size(const pmix_lib_t *lib, const pmix_proc_t *everyone, answer_t *answer)
{
    pmix_value_t *value = NULL;
    if (!did(answer, "PMIx_Get of the job's size",
             lib->get(everyone, "pmix.job.size", NULL, 0, &value))) {
        return false;
    }
    if (value == NULL || value->type != PMIX_TYPE_UINT32) {
        return did(answer, "PMIx_Get of the job's size", -1);
    }
    answer->size = value->data.uint32;
    return true;
}

static bool give_ticket(const pmix_lib_t *lib, answer_t *answer)
{
    pmix_value_t value = {.type = PMIX_TYPE_STRING, .data.string = answer->ticket};
    return did(answer, "PMIx_Put", lib->put(PMIX_SCOPE_GLOBAL, TICKET_KEY, &value)) &&
           did(answer, "PMIx_Commit", lib->commit());
}

static bool fence(const pmix_lib_t *lib, const pmix_proc_t *everyone, int timeout_s,
                  answer_t *answer)
{
    const pmix_info_t info[] = {
        {.key = "pmix.collect", .value = {.type = PMIX_TYPE_BOOL, .data.flag = true}},
        {.key = "pmix.timeout", .value = {.type = PMIX_TYPE_INT, .data.integer = timeout_s}},
    };
    return did(answer, "PMIx_Fence", lib->fence(everyone, 1, info, N_ELEMENTS(info)));
}

static bool take_ticket(const pmix_lib_t *lib, const pmix_proc_t *host, int timeout_s,
                        answer_t *answer)
{
    const pmix_info_t info[] = {
        {.key = "pmix.timeout", .value = {.type = PMIX_TYPE_INT, .data.integer = timeout_s}},
    };
    pmix_value_t *value = NULL;
    if (!did(answer, "PMIx_Get of what rank 0 left",
             lib->get(host, TICKET_KEY, info, N_ELEMENTS(info), &value))) {
        return false;
    }
    if (value == NULL || value->type != PMIX_TYPE_STRING || value->data.string == NULL ||
        strlen(value->data.string) >= sizeof answer->ticket) {
        return did(answer, "PMIx_Get of what rank 0 left", -1);
    }
    snprintf(answer->ticket, sizeof answer->ticket, "%s", value->data.string);
    return true;
}

// Rank 0 has its ticket in the answer already.
static void converse(const pmix_lib_t *lib, uint64_t deadline_ns, answer_t *answer)
{
    uint64_t now_ns = clock_ns();
    int timeout_s = (int)((MAX(deadline_ns, now_ns) - now_ns) / NS_PER_S) + FENCE_MARGIN_S;
    pmix_proc_t me = {.rank = 0};
    if (!did(answer, "PMIx_Init", lib->init(&me, NULL, 0))) {
        return;
    }
    pmix_proc_t everyone = me, host = me;
    everyone.rank = PMIX_EVERY_RANK;
    host.rank = 0;
    answer->rank = me.rank;
    if (ask_size(lib, &everyone, answer) && answer->size > 1) {
        if (me.rank != 0 || give_ticket(lib, answer)) {
            if (fence(lib, &everyone, timeout_s, answer) && me.rank != 0) {
                take_ticket(lib, &host, timeout_s, answer);
            }
        }
    }
    lib->finalize(NULL, 0); // a goodbye that fails does no harm
}

// --- The child -----------------------------------------------------------------------------------

static bool is_running_here(pmix_lib_t *lib)
{
    if (!open_library(LIBRARY, RTLD_NOLOAD, lib)) {
        return false;
    }
    if (lib->initialized() != 0) {
        return true;
    }
    dlclose(lib->handle);
    return false;
}

// Never returns: nothing of the user's program (exit handlers, buffered output) may run twice.
static void be_child(const config_t *config, uint64_t deadline_ns, int fd, answer_t *answer)
{
    pmix_lib_t lib = {0};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (load_library(config, &lib)) {
        converse(&lib, deadline_ns, answer);
    } else {
        answer->outcome = NO_LIBRARY;
    }
    ssize_t n = write(fd, answer, sizeof *answer); // smaller than PIPE_BUF: whole or not at all
    for (;;) {
        syscall(SYS_exit_group, n == sizeof *answer ? 0 : 1);
    }
}

static bool read_answer(int fd, uint64_t deadline_ns, answer_t *answer)
{
    for (;;) {
        struct pollfd polled = {.fd = fd, .events = POLLIN};
        uint64_t now_ns = clock_ns();
        if (now_ns >= deadline_ns) {
            errno = ETIMEDOUT;
            return false;
        }
        uint64_t ms = (deadline_ns - now_ns) / NS_PER_MS + 1;
        if (poll(&polled, 1, (int)MIN(ms, 1000)) <= 0) {
            continue;
        }
        ssize_t n = read(fd, answer, sizeof *answer);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        errno = n >= 0 ? ECHILD : errno;
        return n == (ssize_t)sizeof *answer;
    }
}

_Static_assert(sizeof(answer_t) < 4096, "written to a pipe in one piece");

static hvd_status_t fail_silent(const config_t *config, int code, err_t *err)
{
    const char *rank = config->seen[SEEN_PMIX_RANK];
    if (code == ETIMEDOUT) {
        return fail(err, HVD_TIMEOUT,
                    "rank %.20s: the ranks that were started did not all call init in time, or the "
                    "daemon of %s does not answer; let every rank call init, with the same "
                    "HOROVOD_CPU_OPERATIONS, or raise HOROVOD_START_TIMEOUT",
                    rank, launcher_pmix.title);
    }
    return fail(err, HVD_SYSTEM,
                "rank %.20s: the child that asks PMIx for the other ranks ended without an answer; "
                "is " LIBRARY " the one of %s? PMIX_PREFIX names the folder it is installed in",
                rank, launcher_pmix.title);
}

static hvd_status_t ask_by_child(const config_t *config, uint64_t deadline_ns, answer_t *answer,
                                 err_t *err)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
        return fail_errno(err, errno, "cannot create a pipe");
    }
    pid_t child = fork();
    if (child == 0) {
        be_child(config, deadline_ns, ends[1], answer);
    }
    int code = errno;
    close(ends[1]);
    if (child < 0) {
        close(ends[0]);
        return fail_errno(err, code, "cannot fork the child that asks PMIx");
    }
    bool answered = read_answer(ends[0], deadline_ns, answer);
    code = errno;
    close(ends[0]);
    kill(child, SIGKILL); // it has said all, or is late
    while (waitpid(child, NULL, 0) < 0 && errno == EINTR) {
    }
    return answered ? HVD_OK : fail_silent(config, code, err);
}

static hvd_status_t ask_pmix(const config_t *config, uint64_t deadline_ns, answer_t *answer,
                             err_t *err)
{
    pmix_lib_t lib = {0};
    if (is_running_here(&lib)) {
        converse(&lib, deadline_ns, answer);
        dlclose(lib.handle);
        return HVD_OK;
    }
    return ask_by_child(config, deadline_ns, answer, err);
}

// --- Joining -------------------------------------------------------------------------------------

static hvd_status_t check_answer(const answer_t *answer, int rank, err_t *err)
{
    if (answer->outcome == FAILED) {
        return fail(
            err, HVD_SYSTEM,
            "rank %d: %s failed with PMIx code %d; this process seems to have been launched by %s; "
            "do all ranks run the same program, with the same HOROVOD_CPU_OPERATIONS?",
            rank, answer->step, answer->code, launcher_pmix.title);
    }
    if (answer->outcome == NO_LIBRARY) {
        return fail(err, HVD_SYSTEM,
                    "rank %d seems to have been launched by %s, but " LIBRARY
                    " cannot be loaded; install it "
                    "(Debian: libpmix2) or set PMIX_PREFIX to the folder it is installed in",
                    rank, launcher_pmix.title);
    }
    if (answer->rank != (uint32_t)rank || answer->rank >= answer->size) {
        return fail(err, HVD_PROTOCOL, "PMIX_RANK is %d, but PMIx says rank %u of %u", rank,
                    answer->rank, answer->size);
    }
    return HVD_OK;
}

static hvd_status_t find_rank(const config_t *config, int *rank_p, err_t *err)
{
    static const enum launch_var needed[] = {SEEN_PMIX_NAMESPACE, SEEN_PMIX_RANK};
    for (size_t i = 0; i < N_ELEMENTS(needed); i++) {
        if (config->seen[needed[i]] == NULL) {
            return fail(err, HVD_INVALID_ARGUMENT,
                        "this process seems to have been launched by %s, but %s is not set; start "
                        "every rank with the launcher and pass its environment on, or unset its "
                        "variables to run alone",
                        launcher_pmix.title, launch_var_names[needed[i]]);
        }
    }
    if (!place_parse(config->seen[SEEN_PMIX_RANK], 1048575, rank_p)) {
        return fail(err, HVD_INVALID_ARGUMENT, "PMIX_RANK is \"%.60s\", not a rank",
                    config->seen[SEEN_PMIX_RANK]);
    }
    return HVD_OK;
}

// As Open MPI tells its processes, or Slurm.
static bool is_on_one_host(const config_t *config)
{
    const char *n_local = config->seen[SEEN_OMPI_COMM_WORLD_LOCAL_SIZE];
    const char *n_ranks = config->seen[SEEN_OMPI_COMM_WORLD_SIZE];
    const char *n_nodes = config->seen[SEEN_SLURM_STEP_NUM_NODES];
    return n_local != NULL && n_ranks != NULL ? strcmp(n_local, n_ranks) == 0
                                              : n_nodes != NULL && strcmp(n_nodes, "1") == 0;
}

static hvd_status_t meet(const config_t *config, uint64_t deadline_ns, boot_job_t *job,
                         rendezvous_t *rendezvous, err_t *err)
{
    answer_t answer = {.size = 0};
    ticket_t ticket = {.port = 0};
    hvd_status_t status;
    if (job->rank == 0) {
        TRY(rendezvous_host(config, is_on_one_host(config), &ticket, rendezvous, err), out);
        ticket_encode(&ticket, answer.ticket);
    }
    TRY(ask_pmix(config, deadline_ns, &answer, err), out);
    if (answer.outcome == NO_LIBRARY && launcher_openmpi.looks_right(config)) {
        rendezvous_close(rendezvous);
        status =
            launcher_openmpi.join(&launcher_openmpi, config, deadline_ns, job, rendezvous, err);
        goto out;
    }
    TRY(check_answer(&answer, job->rank, err), out);
    job->size = (int)answer.size;
    if (job->size == 1) {
        rendezvous_close(rendezvous);
        goto out;
    }
    TRY(ticket_decode(answer.ticket, &ticket, err), out);
    ticket_keep(answer.ticket, job->size);
    TRY(rendezvous_join(&ticket, deadline_ns, job, rendezvous, err), out);
out:
    wipe(&answer, sizeof answer);
    wipe(&ticket, sizeof ticket);
    return status;
}

static hvd_status_t pmix_join(const launcher_t *launcher, const config_t *config,
                              uint64_t deadline_ns, boot_job_t *job, rendezvous_t *rendezvous,
                              err_t *err)
{
    bool joined_before;
    hvd_status_t status;
    (void)launcher;
    job->local_rank = job->local_size = job->cross_rank = job->cross_size = -1;
    TRY(find_rank(config, &job->rank, err), out);
    TRY(rendezvous_rejoin(deadline_ns, job, rendezvous, &joined_before, err), out);
    if (!joined_before) {
        TRY(meet(config, deadline_ns, job, rendezvous, err), out);
    }
out:
    return status;
}

const launcher_t launcher_pmix = {.name = "pmix",
                                  .title = "mpirun of Open MPI, or srun --mpi=pmix",
                                  .looks_right = pmix_looks_right,
                                  .join = pmix_join};
