// SPDX-License-Identifier: Apache-2.0
//
// master.c - the master of an OpenPAI job: waits for every task, runs the job, tells how it ended.
//
// Containers of a job start when they like. A session (launch/session.h) has an agent on every
// task: over ssh, again every second where nobody answers yet, or one that dials (--secret-file). A
// line tells who is missing and why, and a deadline ends it with the same list. When all are there
// the job runs over the interfaces that own the addresses OpenPAI has given the tasks: its ranks
// are the session's own (launch/job.c), or those of mpirun, which is its child (launch/mpi_run.c).
// Agents stay to the end: one that goes means a lost task. They pass the exit code, which is ours,
// on to the workers (gate.c). One thread, the session's.
#define _GNU_SOURCE
#include "launch/session.h"
#include "pai/internal.h"

#include <poll.h>
#include <signal.h>
#include <stdlib.h>

#define AGAIN_MS 1000
#define LOOK_MS 200
#define TELL_MS 10000    // between lines of progress while nothing changes
#define END_MS 3000      // for agents to pass the last word on
#define RETURN_MS 10000  // for a task that is coming again when the job ends
#define LAST_LOOK_MS 300 // for us to see what the launcher has seen
#define MORE_S 60        // longer than we wait, so that only we give up
#define MAX_SHOWN 16     // of those that are missing
#define MANY_ATTEMPTS 1000000

typedef struct master {
    session_t session; // first: the policy finds the master by it
    session_policy_t policy;
    options_t options; // with what the variables say; fields belong to the caller's
    hosts_t tasks;
    char **gates; // what the agent of each task is told
    job_plan_t plan;
    int (*launcher)(const options_t *); // in a child; NULL: none
    bool has_begun;
    bool awaits_return; // the job is over, but tasks that were lost may be about to hear of it
    uint64_t begin_ns, give_up_at_ns, tell_at_ns;
    int n_told;
    char *interfaces, *list; // of hosts, for the launcher
} master_t;

static master_t *master_of(session_t *session)
{
    return (master_t *)session;
}

static const session_policy_t *base_policy(const master_t *master)
{
    return master->launcher == NULL ? &job_policy : &mpi_policy;
}

// --- Waiting -------------------------------------------------------------------------------------

static bool is_here(const agent_link_t *link)
{
    return link->host->is_local || !link_is_coming(link);
}

static int count_here(const master_t *master)
{
    int n = 0;
    for (int i = 0; i < master->tasks.n; i++) {
        n += is_here(master->session.links[i]);
    }
    return n;
}

// "worker-1 at 10.0.0.5 (nothing listens on its ssh port), worker-2 ..."; not all of a thousand.
static void put_missing(master_t *master, buf_t *text)
{
    int n_left = master->tasks.n - count_here(master), n_shown = 0;
    for (int i = 0; i < master->tasks.n && n_shown < MAX_SHOWN; i++) {
        agent_link_t *link = master->session.links[i];
        if (!is_here(link)) {
            const char *reason = link_reason(link, &master->options);
            buf_printf(text, "%s%s at %s (%.200s)", n_shown > 0 ? ", " : "", link->host->name,
                       link->host->address, reason[0] != '\0' ? reason : "no answer yet");
            n_shown++;
        }
    }
    if (n_left > n_shown) {
        buf_printf(text, " and %d more", n_left - n_shown);
    }
    buf_append(text, "", 1);
}

static void tell_progress(master_t *master, uint64_t now_ns)
{
    int n_here = count_here(master);
    buf_t missing = {0};
    if (n_here == master->n_told && now_ns < master->tell_at_ns) {
        return;
    }
    master->n_told = n_here;
    master->tell_at_ns = now_ns + TELL_MS * NS_PER_MS;
    put_missing(master, &missing);
    if (n_here == master->tasks.n) {
        say("all %d tasks are ready", master->tasks.n);
    } else if (!missing.failed) {
        say("%d of %d tasks are ready after %d s of %d (--pai-timeout); missing: %.1000s", n_here,
            master->tasks.n, (int)((now_ns - master->begin_ns) / NS_PER_S),
            (int)master->options.pai_timeout, (const char *)missing.data);
    }
    buf_free(&missing);
}

static void give_up(master_t *master)
{
    const char *advice = master->session.awaited != NULL
                             ? "with the same --secret-file, and can they reach this task"
                             : "and is there an sshd in the image";
    buf_t missing = {0};
    put_missing(master, &missing);
    session_fail(&master->session, EXIT_START_TIMEOUT,
                 "%d of %d tasks did not answer within %d s (--pai-timeout): %.800s. Look at their "
                 "logs: does their command run \"%s --pai-worker\", %s?",
                 master->tasks.n - count_here(master), master->tasks.n,
                 (int)master->options.pai_timeout, missing.failed ? "" : (char *)missing.data,
                 PROGRAM, advice);
    session_stop(&master->session, SIGTERM, 0);
    buf_free(&missing);
}

// --- Running -------------------------------------------------------------------------------------

static bool knows_all_interfaces(const master_t *master)
{
    for (int i = 0; i < master->tasks.n; i++) {
        const agent_link_t *link = master->session.links[i];
        if (link->about[0] == '\0' && !link->host->is_local) {
            return false;
        }
    }
    return true;
}

// Appends the names that are new: this task's, then those of the others.
static void list_interfaces(const master_t *master, const char *own, buf_t *list)
{
    buf_append(list, own, strlen(own));
    for (int i = 0; i < master->tasks.n; i++) {
        const char *name = master->session.links[i]->about;
        bool is_new = name[0] != '\0' && strcmp(name, own) != 0;
        for (int other = 0; is_new && other < i; other++) {
            is_new = strcmp(name, master->session.links[other]->about) != 0;
        }
        if (is_new) {
            buf_printf(list, ",%s", name);
        }
    }
    buf_append(list, "", 1);
}

// The interfaces that own the tasks' addresses. All ranks get the same list, so where a task has
// not told its own, they choose by themselves. The mpiruns that need one (Intel MPI, MPICH) want
// this task's, and take no list: where names differ they are told in their environment.
static hvd_status_t choose_interfaces(master_t *master, err_t *err)
{
    static const char *const of_mpirun[] = {"I_MPI_HYDRA_IFACE", "HYDRA_IFACE"};
    char own[64];
    buf_t list = {0};
    if (master->options.network_interfaces[0] != '\0' || !knows_all_interfaces(master) ||
        !pai_interface(master->tasks.list[0].address, own, sizeof own)) {
        return HVD_OK;
    }
    list_interfaces(master, own, &list);
    if (list.failed) {
        buf_free(&list);
        return fail(err, HVD_NO_MEMORY, "no memory for the names of interfaces");
    }
    master->interfaces = (char *)list.data;
    if (master->launcher == NULL || strchr(master->interfaces, ',') == NULL) {
        master->options.network_interfaces = master->interfaces;
        return HVD_OK;
    }
    for (size_t i = 0; i < N_ELEMENTS(of_mpirun); i++) {
        setenv(of_mpirun[i], own, 0);
    }
    setenv("HOROVOD_GLOO_IFACE", master->interfaces, 0);
    setenv("NCCL_SOCKET_IFNAME", master->interfaces, 0);
    return HVD_OK;
}

// The tasks as -H has them; this one by its other name for a launcher that starts ranks here.
static hvd_status_t list_hosts(master_t *master, err_t *err)
{
    buf_t list = {0};
    for (int i = 0; i < master->tasks.n; i++) {
        const host_t *task = &master->tasks.list[i];
        bool is_here = task->is_local && master->launcher == elastic_run;
        buf_printf(&list, "%s%s:%d", i > 0 ? "," : "", is_here ? "localhost" : task->name,
                   task->slots);
    }
    buf_append(&list, "", 1);
    master->list = (char *)list.data;
    master->options.hosts = master->list;
    master->options.num_proc = master->plan.n_ranks;
    master->options.pai = false;
    return list.failed ? fail(err, HVD_NO_MEMORY, "no memory for the hosts") : HVD_OK;
}

// All tasks are here.
static void begin(master_t *master)
{
    session_t *session = &master->session;
    err_t err = {0};
    hvd_status_t status;
    master->has_begun = true;
    tell_progress(master, clock_ns());
    TRY(choose_interfaces(master, &err), out);
    TRY(session_prepare(session, master->tasks.n == 1, master->plan.n_ranks, &err), out);
    if (master->launcher != NULL) {
        TRY(list_hosts(master, &err), out);
        pai_choose_fabric(&master->options);
        options_t options = master->options;
        options.await_agents = -1; // the session has those
        mpi_start_child(session, master->launcher, &options);
        return;
    }
    TRY(session_meet(session, &err), out);
out:
    if (status != HVD_OK) {
        session_fail(session, session->problem_code != 0 ? session->problem_code : EXIT_INTERNAL,
                     "%s", err.text);
        session_stop(session, SIGTERM, 0);
    }
}

// --- What happens --------------------------------------------------------------------------------

static void on_ready(session_t *session, agent_link_t *link)
{
    master_t *master = master_of(session);
    for (int i = 0; i < session->n_links; i++) {
        if (link_is_coming(session->links[i])) {
            return;
        }
    }
    if (!master->has_begun) {
        begin(master);
    }
    if (!session->is_stopping) {
        base_policy(master)->on_ready(session, link);
    }
}

// Before the job begins it may come again, and whenever it likes if the job is elastic.
static void on_lost(session_t *session, agent_link_t *link, const char *how)
{
    master_t *master = master_of(session);
    const char *task = link->host->name;
    bool goes_on = master->has_begun && master->launcher == elastic_run;
    if (how != NULL && (!master->has_begun || goes_on) && !session->is_stopping) {
        link_close(link);
        link->phase = LINK_WAITING;
        link->retry_at_ns = deadline_in_ms(AGAIN_MS);
        if (goes_on) {
            link->deadline_ns = NEVER_NS;
            say("task %s was lost; the job goes on without it", task);
        }
    } else if (how != NULL && master->launcher == NULL) {
        session_fail(session, EXIT_UNREACHABLE,
                     "lost the agent on host %s: %s; task %s was lost: look at its log", task, how,
                     task);
    } else {
        base_policy(master)->on_lost(session, link, how);
    }
}

static void on_problem(session_t *session, agent_link_t *link, worker_t *worker, int code,
                       const char *text)
{
    master_t *master = master_of(session);
    if (worker != NULL && master->launcher == NULL) {
        job_policy.on_problem(session, link, worker, code, text);
    } else if (worker != NULL) {
        session_end_worker(session, worker, &(rank_end_t){.code = code, .blames = -1});
    } else if (!master->has_begun || master->launcher != NULL) {
        session_lose(session, link, text);
    } else {
        session_fail(session, EXIT_UNREACHABLE,
                     "lost the agent on host %s: the command of its container has ended; task %s "
                     "is gone: look at its log",
                     link->host->name, link->host->name);
    }
}

// A task that came again may run ranks before we have our own agent on it; it has a worker then,
// which would wait for us long after the end. Each task that is missing gets one more attempt.
static void on_child(session_t *session, int status)
{
    master_t *master = master_of(session);
    base_policy(master)->on_child(session, status);
    if (session->is_stopping || master->launcher != elastic_run) {
        return;
    }
    for (int i = 0; i < session->n_links; i++) {
        agent_link_t *link = session->links[i];
        if (link->phase == LINK_WAITING) {
            link->retry_at_ns = 0;
        }
        master->awaits_return |= link_is_coming(link);
    }
    if (master->awaits_return) {
        session->stop_at_ns = deadline_in_ms(RETURN_MS);
    }
}

static void stop_when_tried(master_t *master, uint64_t now_ns)
{
    session_t *session = &master->session;
    for (int i = 0; i < session->n_links; i++) {
        const agent_link_t *link = session->links[i];
        if (link_is_coming(link) && (link->phase != LINK_WAITING || link->retry_at_ns <= now_ns)) {
            return;
        }
    }
    master->awaits_return = false;
    session->stop_at_ns = now_ns + LAST_LOOK_MS * NS_PER_MS;
}

static uint64_t on_time(session_t *session, uint64_t now_ns)
{
    master_t *master = master_of(session);
    if (master->awaits_return) {
        stop_when_tried(master, now_ns);
    }
    if (master->has_begun || session->is_stopping) {
        return base_policy(master)->on_time != NULL ? base_policy(master)->on_time(session, now_ns)
                                                    : NEVER_NS;
    }
    if (now_ns >= master->give_up_at_ns) {
        give_up(master);
        return NEVER_NS;
    }
    tell_progress(master, now_ns);
    return MIN(master->tell_at_ns, master->give_up_at_ns);
}

static int conclude(session_t *session)
{
    master_t *master = master_of(session);
    if (session->lost != NULL) {
        say("task %s was lost: look at its log", session->lost->host->name);
    }
    return base_policy(master)->conclude(session);
}

// --- The end -------------------------------------------------------------------------------------

// Those who stay are told; they leave when they have passed it on.
static void tell_end(master_t *master, int code)
{
    uint64_t deadline_ns = deadline_in_ms(END_MS);
    bool are_there = true;
    for (int i = 0; i < master->session.n_links; i++) {
        agent_link_t *link = master->session.links[i];
        if (!link->channel.is_closed && !link->host->is_local && !link_is_coming(link)) {
            command_end(link, code);
        }
    }
    while (are_there && clock_ns() < deadline_ns) {
        are_there = false;
        for (int i = 0; i < master->session.n_links; i++) {
            agent_link_t *link = master->session.links[i];
            if (!link->channel.is_closed && !link->host->is_local && !link_is_coming(link)) {
                channel_send(&link->channel);
                channel_receive(&link->channel);
                are_there = true;
            }
        }
        poll(NULL, 0, 5);
    }
}

// --- All together --------------------------------------------------------------------------------

static hvd_status_t check_options(const options_t *options, int (*launcher)(const options_t *),
                                  err_t *err)
{
    if (options->hosts[0] != '\0' || options->hostfile[0] != '\0') {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "%s contradicts --pai, which runs on the tasks of the job; leave it out (-np "
                    "and --slots-per-host say how many ranks)",
                    options->hosts[0] != '\0' ? "--hosts" : "--hostfile");
    }
    if (options->secret_file[0] != '\0' && launcher != NULL && launcher != mpi_run) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "on OpenPAI, an elastic job and --jsrun reach the tasks by ssh; leave out "
                    "--secret-file");
    }
    return HVD_OK;
}

// How each task is reached: by an agent that dials, or over ssh, where the agent is a gate, too.
static hvd_status_t choose_reach(master_t *master, err_t *err)
{
    options_t *options = &master->options;
    hosts_t *tasks = &master->tasks;
    master->gates = calloc((size_t)tasks->n + 1, sizeof(char *));
    if (options->secret_file[0] != '\0') {
        int port = tasks->list[0].agent_port;
        options->await_agents = port > 0 ? port : options->agent_port;
        if (options->await_agents == 0) {
            return fail(err, HVD_INVALID_ARGUMENT,
                        "--secret-file needs a port at which workers dial: --agent-port, or a port "
                        "labelled horovod in the job file for the master");
        }
    }
    options->agent_port = 0;
    for (int i = 0; i < tasks->n && master->gates != NULL; i++) {
        host_t *task = &tasks->list[i];
        if (asprintf(&master->gates[i], "--pai-gate %s@%s", task->name, task->address) < 0) {
            return fail(err, HVD_NO_MEMORY, "no memory for %d tasks", tasks->n);
        }
        task->arguments = master->gates[i];
        // mpirun reaches this task by ssh like the others, unless its commands are carried.
        task->is_local &= master->launcher != mpi_run || options->await_agents >= 0;
    }
    return master->gates != NULL ? HVD_OK
                                 : fail(err, HVD_NO_MEMORY, "no memory for %d tasks", tasks->n);
}

static hvd_status_t add_ranks(master_t *master, err_t *err)
{
    session_t *session = &master->session;
    const job_plan_t *plan = &master->plan;
    hvd_status_t status = session_add_hosts(session, &master->tasks, master->tasks.n, err);
    for (int i = 0; i < plan->n_ranks && status == HVD_OK && master->launcher == NULL; i++) {
        const rank_place_t *place = &plan->places[i];
        if (session_add_worker(session, session->links[place->host], place) == NULL) {
            status = fail(err, HVD_NO_MEMORY, "no memory for %d ranks", plan->n_ranks);
        }
    }
    session->n_ranks = plan->n_ranks;
    return status;
}

static hvd_status_t open_master(master_t *master, err_t *err)
{
    options_t *options = &master->options;
    hvd_status_t status;
    TRY(check_options(options, master->launcher, err), out);
    TRY(pai_tasks(options, &master->tasks, err), out);
    TRY(choose_reach(master, err), out);
    TRY(job_plan_make(&master->tasks, (int)options->num_proc, &master->plan, err), out);
    options->start_timeout = (double)options->pai_timeout + MORE_S;
    options->ssh_attempts = MANY_ATTEMPTS;
    master->policy = *base_policy(master);
    master->policy.is_patient = true;
    master->policy.look_ms = LOOK_MS;
    master->policy.on_ready = on_ready;
    master->policy.on_lost = on_lost;
    master->policy.on_problem = on_problem;
    master->policy.on_time = on_time;
    master->policy.on_child = on_child;
    master->policy.conclude = conclude;
    TRY(session_init(&master->session, options, &master->policy, err), out);
    TRY(add_ranks(master, err), out);
    master->begin_ns = clock_ns();
    master->n_told = count_here(master);
    master->give_up_at_ns = deadline_in_ms(options->pai_timeout * 1000);
    master->tell_at_ns = deadline_in_ms(AGAIN_MS); // no line for those who come at once
out:
    return status;
}

int pai_run(const options_t *options, int (*launcher)(const options_t *))
{
    master_t master = {.session = {.signal_fd = -1}, .options = *options, .launcher = launcher};
    err_t err = {0};
    int code;
    if (launcher == mpi_run && mpi_find() == MPI_NONE) {
        return EXIT_NOT_FOUND; // better before the others are waited for
    }
    if (open_master(&master, &err) == HVD_OK) {
        code = session_run(&master.session);
        tell_end(&master, code);
        session_close(&master.session);
    } else {
        code = session_refuse(&master.session, &err);
    }
    for (int i = 0; master.gates != NULL && master.gates[i] != NULL; i++) {
        free(master.gates[i]);
    }
    free(master.gates);
    free(master.interfaces);
    free(master.list);
    job_plan_free(&master.plan);
    hosts_free(&master.tasks);
    return code;
}
