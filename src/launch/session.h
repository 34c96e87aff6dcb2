// SPDX-License-Identifier: Apache-2.0
//
// session.h - the launcher at work: agents, ranks, output, signals and the clock, in one loop.
//
// session.c runs the loop and owns what is in session_t; ranks.c takes what agents report,
// commands.c tells them what to do. What a job does when something happens is a policy: job.c has
// one generation of ranks, elastic.c many, doctor.c none. One thread; output and the rendezvous
// server have threads of their own.
#ifndef HVD_LAUNCH_SESSION_H
#define HVD_LAUNCH_SESSION_H

#include "launch/launch.h"
#include "launch/link.h"

#define GRACE_MS 5000 // between SIGTERM and SIGKILL
#define MOMENT_MS 250 // between a failure and what follows: others may fail for the same reason

#define CULPRIT_MS 10000 // a rank that has left may need to end, when others wait for it no more
#define LOST_MS 1000     // the same for one that is lost

// How a rank ended.
typedef struct rank_end {
    bool has_ended, was_oom, was_stopped; // stopped: after we had asked it to end
    bool was_halted;                      // as by SIGSTOP, when we asked
    int code;                             // of the process; 128 + signal
    int signo;                            // 0: none
    int blames;                           // the rank that made it give up, itself perhaps; -1: none
    char what[BLAME_BYTES];               // that one did; "": it was lost
    pid_t pid;
    uint64_t time_ns;
} rank_end_t;

// What a rank wrote to stderr that others may be about to write too (fold.c).
typedef struct held_output {
    buf_t bytes;
    uint64_t until_ns;
    bool is_line_begun; // what came before has not ended its line
    bool is_folded;
} held_output_t;

// A rank of the job, from its place to its end.
typedef struct worker {
    int id; // stays, while its rank may change
    agent_link_t *link;
    rank_place_t place;
    bool is_leaving;             // told to go: how it ends does not matter
    int wants;                   // WANTS_..., added up
    uint32_t joined;             // the last generation it has a place in; 0: none yet
    bool is_coming;              // it starts, to have a place in a later one
    uint32_t has_left;           // the last generation it has left
    int accuses;                 // the worker because of which it has; -1: none
    uint64_t condemned_until_ns; // its agent has been asked to end it; 0: not
    uint32_t condemned_in;       // that generation
    rank_end_t end;
    splitter_t splitters[N_STREAMS];
    held_output_t held;
    int result_fd;
} worker_t;

typedef struct session session_t;
typedef struct job_watch job_watch_t; // watch.c
typedef struct errand errand_t;       // a command that is carried: carry.c

// What NULL stands for does not happen in that kind of session.
typedef struct session_policy {
    bool is_elastic, hears_signals;
    bool at_home;    // ranks keep the directory and the environment of their agents
    int look_ms;     // longest sleep of the loop
    int grace_ms;    // between SIGTERM and SIGKILL; 0: GRACE_MS
    bool is_patient; // hosts are just being started: most faults pass
    // An agent has dialled that nobody awaits by name. Takes the channel.
    void (*on_arrival)(session_t *session, const channel_t *channel,
                       const introduction_t *introduction);
    // An agent has said hello and waits for its plan.
    void (*on_ready)(session_t *session, agent_link_t *link);
    // A rank has ended, as worker->end says.
    void (*on_exit)(session_t *session, worker_t *worker);
    // What a rank prints; NULL: lines, with the rank in front.
    void (*on_output)(session_t *session, const worker_t *worker, int stream, bytes_t data);
    // An agent is gone. how NULL: it never came, and link->problem says why.
    void (*on_lost)(session_t *session, agent_link_t *link, const char *how);
    // An agent cannot do what it was told; worker NULL: none of its ranks can run. May be NULL: the
    // rank has failed, or the agent is lost.
    void (*on_problem)(session_t *session, agent_link_t *link, worker_t *worker, int code,
                       const char *text);
    // session->child has ended, with this wait status.
    void (*on_child)(session_t *session, int status);
    // Other frames.
    void (*on_frame)(session_t *session, agent_link_t *link, const frame_t *frame);
    // Called in every turn of the loop; when it must be called again at the latest.
    uint64_t (*on_time)(session_t *session, uint64_t now_ns);
    // A signal asks for the end, for the first time: true if ranks end by themselves soon.
    bool (*hands_over)(session_t *session);
    // Everything has ended, neither by a signal nor by a problem: the exit code.
    int (*conclude)(session_t *session);
} session_policy_t;

struct session {
    const options_t *options;
    const session_policy_t *policy;
    awaited_t *awaited; // agents that have dialled; NULL: none may
    agent_link_t **links;
    worker_t **workers; // by id
    errand_t **errands;
    int n_links, n_workers, n_errands;
    pid_t child;        // a launcher that is the job, in place of ranks: mpi_run.c; 0: none
    int child_code;     // with which it has ended; -1: it has not
    agent_link_t *lost; // the first, while it ran
    char shell[32];     // the directory of its remote shell; "": none
    // The generation that runs.
    job_info_t info;
    hvd_rendezvous_t *server;
    uint8_t secret[SECRET_BYTES];
    int n_ranks;
    uint32_t generation; // 0: there is only one
    // What all agents are told alike.
    char *directory;
    buf_t command, env, payload;
    // Output.
    sink_t *sink;
    prefix_style_t style;
    output_files_t files;
    buf_t lines;
    // Ending.
    bool is_stopping;    // everything was told to stop
    bool is_finishing;   // nothing new is started: the session ends with the agents that run
    uint64_t failed_ns;  // when a rank, or something else, failed first; 0: nothing has
    uint64_t fold_at_ns; // NEVER_NS: nothing is held
    uint64_t stop_at_ns, late_at_ns, ping_at_ns, silence_ns, looked_ns;
    int signal_fd, signo; // signo: that asked us to end
    job_watch_t *watch;   // NULL: not a job to look at
    int problem_code;     // 0: none
    char problem[HVD_TEXT_BYTES + 300];
    struct pollfd *polled;
};

// An empty session, without secret and ranks.
hvd_status_t session_init(session_t *session, const options_t *options,
                          const session_policy_t *policy, err_t *err);
// All that ranks need: files for n_files ranks, the secret, addresses (loopback if
// everything is on this host), what agents are told. On failure problem_code may be set.
hvd_status_t session_prepare(session_t *session, bool is_local, int n_files, err_t *err);
// A rendezvous server of its own for the next generation; the old one ends, which frees ranks that
// still wait there.
hvd_status_t session_meet(session_t *session, err_t *err);
// NULL: no memory. The host must outlive the session.
agent_link_t *session_add_link(session_t *session, const host_t *host);
hvd_status_t session_add_hosts(session_t *session, const hosts_t *hosts, int n, err_t *err);
// The same for an agent that has dialled and that nobody awaits by name. Takes the channel.
agent_link_t *session_admit(session_t *session, const channel_t *channel,
                            const introduction_t *introduction);
// Runs until everything has ended, and says what there is to say: the exit code.
int session_run(session_t *session);
void session_loop(session_t *session); // the same without the last words
void session_close(session_t *session);
int session_refuse(session_t *session, const err_t *err); // it cannot begin: says why, closes

// commands.c
// Ranks say where they are, each in a line; before they are stopped.
void session_ask_where(session_t *session);
void session_stop(session_t *session, int signo, int grace_ms);
void session_stop_link(agent_link_t *link, int signo, int grace_ms);
void session_stop_soon(session_t *session);
// The first problem is the one that counts; stops soon.
void session_fail(session_t *session, int code, const char *format, ...) PRINTF_LIKE(3, 4);
void session_lose(session_t *session, agent_link_t *link, const char *how); // session.c
bool session_append(void *array_p, int *n_p, void *item); // to an array of pointers

// --- Ranks (ranks.c) -----------------------------------------------------------------------------

// NULL: no memory.
worker_t *session_add_worker(session_t *session, agent_link_t *link, const rank_place_t *place);
bool session_has_workers(const session_t *session, const agent_link_t *link);
void session_free_worker(worker_t *worker);
void session_hear(session_t *session, agent_link_t *link, const frame_t *frame);
// Notes how it ended, once, and tells the policy. Of `end` only how, not when and why.
void session_end_worker(session_t *session, worker_t *worker, const rank_end_t *end);
void session_flush(session_t *session, worker_t *worker); // its last, unended lines
// What it wrote, as lines with its rank in front.
void session_print(session_t *session, worker_t *worker, int stream, bytes_t data);

// --- What it shows of itself (watch.c) -----------------------------------------------------------
// Nothing happens in a session that has no job_watch_t.

#define WATCH_NAME "hvd-%u/launcher-%d" // abstract socket: user, pid

hvd_status_t watch_open(session_t *session, err_t *err); // says where the page is
void watch_tick(session_t *session);                     // in every turn of the loop
void watch_hear(session_t *session, const worker_t *worker, const char *page);
void watch_output(session_t *session, const worker_t *worker, bytes_t data);
void watch_end(session_t *session, const worker_t *worker);
void watch_failure(session_t *session, bytes_t block); // what closes a failed job
uint64_t watch_next_ns(const session_t *session);      // when at the latest
int watch_over(session_t *session, int code);          // writes the report; the code
void watch_close(session_t *session);

// --- Equal tracebacks (fold.c) -------------------------------------------------------------------

// Holds back what a rank wrote to stderr, from the beginning of a traceback on. So many bytes
// before it are to be printed.
size_t fold_hold(session_t *session, worker_t *worker, bytes_t data);
void fold_release(session_t *session, uint64_t now_ns); // prints what is due; NEVER_NS: everything

// --- How it ended (ranks.c) ----------------------------------------------------------------------

// Pure.
// The rank that failed first, or -1; but one that a signal killed within a moment of it goes before
// one that gave up because of that.
int ending_cause(const rank_end_t *ends, int n);
// Who is to blame: the cause itself, or the rank because of which it gave up, as the library has
// noted.
int ending_blamed(const rank_end_t *ends, int n, int cause);
// The block that closes a failed job: at most 15 lines. The host is of who is to blame; the tail is
// of the cause if the blamed one was halted.
void ending_report(const rank_end_t *ends, int n, int blamed, int cause, const char *host,
                   const splitter_t *tail, buf_t *out);
// Ends by rank, for ending_cause; NULL: no memory. The caller frees them.
rank_end_t *session_ends(const session_t *session);
worker_t *session_worker_at(const session_t *session, int rank); // that has it now, or had it last
// How long after the first failure to wait for the end of a rank because of which others have
// ended, in milliseconds; 0: there is none that still runs.
int session_patience_ms(const session_t *session);
// The block that names the cause; the exit code of who is to blame. ends NULL: of the cause.
int session_report(session_t *session, const rank_end_t *ends, const worker_t *cause);

// --- Commands that other launchers have carried to hosts (carry.c) -------------------------------

bool carry_is_asked(const introduction_t *introduction); // who has dialled is a remote shell
// Such a shell has come: its command is run as soon as an agent of that host is free.
void carry_take(session_t *session, const channel_t *channel, const introduction_t *introduction);
// Starts what can be started, refuses what has waited for --start-timeout; when to call it again.
uint64_t carry_serve(session_t *session);
// What the policy hears of it. carry_lose: an agent, or a shell, is gone.
void carry_pass_on(session_t *session, const worker_t *worker, int stream, bytes_t data);
void carry_end(session_t *session, const worker_t *worker);
void carry_lose(session_t *session, const agent_link_t *link);
void carry_free(session_t *session);
// on_arrival of a policy that takes whoever comes.
void carry_arrival(session_t *session, const channel_t *channel,
                   const introduction_t *introduction);

extern const session_policy_t job_policy; // job.c: one generation of ranks

// --- Another launcher as the job (mpi_run.c) -----------------------------------------------------

// Hosts are held by agents while it runs in a child process: mpirun, where the options say so. A
// host that is lost ends it, if it does not notice by itself.
extern const session_policy_t mpi_policy;
// Starts it. Where hosts are reached by agents that dial, mpirun is told to have its commands
// carried to them.
void mpi_start_child(session_t *session, int (*launcher)(const options_t *),
                     const options_t *options);
void mpi_hear_child(session_t *session); // it may have ended
void mpi_free(session_t *session);

// --- Commands to agents (commands.c) -------------------------------------------------------------

hvd_status_t commands_prepare(session_t *session, err_t *err); // gathers what all are told alike
void command_plan(session_t *session, agent_link_t *link);     // with all its workers
void command_place(session_t *session, worker_t *worker);
void command_stop(agent_link_t *link, int signo, int grace_ms);
void command_stop_rank(agent_link_t *link, int id, int signo); // only this one
void command_ping(agent_link_t *link);
void command_end(agent_link_t *link, int code);
void command_news(agent_link_t *link, int number, int what);
void command_watch(agent_link_t *link, int period_ms);
void command_examine(agent_link_t *link, const frame_t *frame); // FRAME_EXAMINE

#endif
