// SPDX-License-Identifier: Apache-2.0
//
// launch.h - horovodrun: from a command line to ranks on hosts, their output and their end.
//
// Owns: options, hosts, the plan of ranks, the agents that start them, output, exit codes. The
// program is one process with one loop (job.c), a thread that writes output (sink.c) and the
// library's rendezvous server; on every host an agent, the same binary (agent.c), starts the ranks
// and reports. docs/launcher.md has the picture. Only main.c and tests call the rest.
#ifndef HVD_LAUNCH_H
#define HVD_LAUNCH_H

#include "base/base.h"
#include "wire/codec.h"

#include <stdio.h>
#include <sys/types.h>

#define SECRET_BYTES 32
#define PROGRAM "horovodrun"

// --- Exit codes of our own; a failed rank's own code goes before them. docs/launcher.md ----------

enum {
    EXIT_USAGE = 2,        // the command line or a file it names
    EXIT_UNREACHABLE = 69, // a host, or its agent
    EXIT_INTERNAL = 70,    // out of memory, out of descriptors
    EXIT_OUTPUT = 74,      // output cannot be written
    EXIT_START_TIMEOUT = 75,
    EXIT_NOT_EXECUTABLE = 126,
    EXIT_NOT_FOUND = 127,
    EXIT_BY_SIGNAL = 128, // plus the signal's number
};

// --- Options (options.c) -------------------------------------------------------------------------

enum { EXPORTED = 1, HIDDEN = 2, TWO_WORDS = 4, ACTION = 8, LIST = 16 };

typedef enum origin { BY_DEFAULT, BY_ENVIRONMENT, BY_FILE, BY_FLAG } origin_t;

enum option_id {
#define OPTION(kind, field, ...) OPTION_##field,
#include "launch/options.def"
#undef OPTION
    N_OWN_OPTIONS
};

#define N_OPTIONS (N_OWN_OPTIONS + N_KNOBS) // knobs follow; those without a flag stay unused

typedef struct option {
    knob_info_t info;
    const char *synonyms; // separated by blanks
    const char *group, *placeholder;
    unsigned traits;
} option_t;

typedef struct options {
#define OPTION(kind, field, ...) KNOB_TYPE_##kind field;
#include "launch/options.def"
#undef OPTION
    double start_timeout, peer_timeout; // of the knobs, in seconds
    char *texts[N_OPTIONS];             // as the environment would have it; NULL: default
    origin_t origins[N_OPTIONS];
    char **command; // points into argv
    int n_command;
} options_t;

enum { CONTROLLER_AUTO, CONTROLLER_GLOO, CONTROLLER_MPI, CONTROLLER_JSRUN };
enum { COLOR_AUTO, COLOR_ALWAYS, COLOR_NEVER };
enum { COMPLETION_NONE, COMPLETION_BASH, COMPLETION_ZSH, COMPLETION_FISH };

// Row i; one without a flag (an inner knob) is no option.
option_t option_at(int i);
const char *origin_name(origin_t origin);
// Reads environment, configuration file and arguments, and checks them. env NULL: the process's.
hvd_status_t options_read(int argc, char **argv, const char *const *env, options_t *options_p,
                          err_t *err);
void options_free(options_t *options);
// For the file reader: sets the option with this YAML key. HVD_INVALID_ARGUMENT with the nearest
// key if there is none.
hvd_status_t options_set_yaml(options_t *options, const char *key, const char *text,
                              const char *file, err_t *err);
// Value of an option as text, default included.
const char *option_text(const options_t *options, int i);
bool options_want_color(const options_t *options);
// A variable of the process environment that is no option: NULL if unset or empty.
const char *environment(const char *name);

hvd_status_t config_file_read(const char *path, options_t *options, err_t *err); // yaml.c

// help.c
void help_print(FILE *out);
void man_print(FILE *out);
void completion_print(int shell, FILE *out);
void config_print(const options_t *options, FILE *out);

// --- Hosts (hosts.c) -----------------------------------------------------------------------------

typedef struct host {
    char *name;     // without user: HOROVOD_HOSTNAME
    char *target;   // for ssh: user@name
    char *address;  // where it is, if not where its name leads; NULL: there
    int agent_port; // of an agent that waits; 0: --agent-port
    int slots;
    bool is_local;
} host_t;

typedef struct hosts {
    host_t *list;
    int n;
    bool knows_local; // which are local is known without looking names up
} hosts_t;

hvd_status_t hosts_parse(const char *text, int bare_slots, hosts_t *hosts_p, err_t *err);
hvd_status_t hostfile_parse(const char *text, const char *path, int bare_slots, hosts_t *hosts_p,
                            err_t *err);
// From the options: --pai, -H, a hostfile, or localhost with -np slots.
hvd_status_t hosts_choose(const options_t *options, hosts_t *hosts_p, err_t *err);
void hosts_find_local(hosts_t *hosts); // looks names up: may take as long as the resolver does
void hosts_free(hosts_t *hosts);
// Addresses of this machine that others may reach, separated by commas. nics "": all that are up.
hvd_status_t own_addresses(const char *nics, buf_t *list, err_t *err);

// --- Plan (plan.c): pure -------------------------------------------------------------------------

typedef struct rank_place {
    int rank, host;
    int local_rank, local_size, cross_rank, cross_size;
} rank_place_t;

typedef struct job_plan {
    rank_place_t *places; // by rank
    int n_ranks;
    int n_hosts; // hosts in use: the first ones
} job_plan_t;

// np 0: every slot.
hvd_status_t job_plan_make(const hosts_t *hosts, int np, job_plan_t *plan_p, err_t *err);
void job_plan_free(job_plan_t *plan);
// What a rank is told beside the launcher's own environment: NAME=value after NAME=value, each with
// its '\0'.
void job_plan_environment(const job_plan_t *plan, const rank_place_t *place, const char *host_name,
                          buf_t *list);

// --- Environment of ranks (environ.c) ------------------------------------------------------------

typedef struct job_info {
    char id[32];
    char *addresses; // of the rendezvous server
    int port;
} job_info_t;

// What every rank of the job gets: the exportable part of this process's environment, options, and
// where to meet. Appended as in job_plan_environment.
void environ_of_job(const options_t *options, const job_info_t *job, buf_t *list);
// Appends NAME=value, printed, with its '\0'.
void environ_put(buf_t *list, const char *format, ...) PRINTF_LIKE(2, 3);
// Is this variable carried to other hosts?
bool environ_is_exportable(const char *name);
// Its value in such a list, NULL if it has none.
const char *environ_find(const uint8_t *list, size_t bytes, const char *name);
// Base with changes laid over it: a NULL-terminated array for exec, one block to free.
char **environ_merge(char *const *base, const uint8_t *changes, size_t bytes);

// --- Frames between launcher and agent (frame.c) -------------------------------------------------

enum frame_type {
    FRAME_HELLO = 1, // agent: version
    FRAME_PLAN,      // launcher: what to start
    FRAME_STARTED,   // agent: rank, pid
    FRAME_OUTPUT,    // agent: rank, stream, bytes
    FRAME_RESULT,    // agent: rank, bytes of its result file
    FRAME_EXITED,    // agent: rank, code, signal, was it out of memory, was it halted
    FRAME_PROBLEM,   // agent: rank or -1, exit code, sentence
    FRAME_STOP,      // launcher: signal, grace in ms
    FRAME_EXAMINE,   // launcher: the doctor asks; addresses and port to try
    FRAME_FINDING,   // agent: one line of the doctor's report
    FRAME_PING,      // both, when there is nothing else to say
    FRAME_DONE,      // agent: nothing of the job is left on this host
    FRAME_PLACE,     // launcher, elastic: rank, its environment in the next generation
    FRAME_NEWS,      // launcher, elastic: number, whether hosts were added or removed
    FRAME_READY,     // agent, elastic: rank, the generation it has left
};

#define FRAME_LIMIT ((size_t)1 << 30)
#define OUTPUT_CHUNK ((size_t)64 * 1024)

typedef struct frame {
    uint8_t type;
    const uint8_t *data; // in the channel's input, until the next channel_receive
    size_t bytes;
} frame_t;

// A non-blocking byte stream with frames on it. fd in may equal fd out.
typedef struct channel {
    int in_fd, out_fd;
    buf_t in, out;
    size_t in_used, out_sent;
    bool is_closed; // the other side is gone
} channel_t;

void channel_open(channel_t *channel, int in_fd, int out_fd);
void channel_close(channel_t *channel);               // closes the descriptors
size_t frame_begin(channel_t *channel, uint8_t type); // append to channel->out, then
void frame_end(channel_t *channel, size_t begin);
bool channel_wants_write(const channel_t *channel);
void channel_send(channel_t *channel);    // what can be written now
void channel_receive(channel_t *channel); // what can be read now
// false: no whole frame is there. A frame that cannot be sets is_closed.
bool channel_next(channel_t *channel, frame_t *frame_p);
void put_text(buf_t *buf, const char *text);
// Points into the frame and ends in '\0' there; "" (and bad) if it does not.
const char *get_text(reader_t *reader);

// --- Output (output.c: pure; sink.c: the thread that writes) -------------------------------------

enum { STREAM_STDOUT = 0, STREAM_STDERR = 1, N_STREAMS };

typedef struct sink sink_t;

sink_t *sink_start(void); // NULL: no memory or no thread
void sink_write(sink_t *sink, int stream, const void *data, size_t bytes);
void sink_say(sink_t *sink, int stream, const char *format, ...) PRINTF_LIKE(3, 4);
bool sink_is_full(sink_t *sink);   // the reader of our output is slow: read no more from ranks
bool sink_is_broken(sink_t *sink); // the reader of our output is gone
void sink_stop(sink_t *sink);      // writes everything first, for as long as it takes

#define TAIL_LINES 8
#define TAIL_BYTES 400

// Puts prefixes before the lines of one stream of one rank.
typedef struct splitter {
    buf_t partial;
    bool after_cr;
    char tail[TAIL_LINES][TAIL_BYTES]; // last lines, for the report of a failure
    int n_tail;
} splitter_t;

typedef struct prefix_style {
    bool timestamp, color;
} prefix_style_t;

void prefix_make(const prefix_style_t *style, int rank, int stream, char *text, size_t bytes);
// Whole lines (ending in \n or \r), each with the prefix, are appended to out.
void splitter_feed(splitter_t *splitter, const char *prefix, const void *data, size_t bytes,
                   buf_t *out);
void splitter_finish(splitter_t *splitter, const char *prefix,
                     buf_t *out); // the last, unended line
void splitter_free(splitter_t *splitter);

// Files of --output-filename.
typedef struct output_files {
    int *fds; // rank * N_STREAMS + stream
    int n_ranks;
    char *directory;
    int failed_code; // errno of the first write that failed
    bool has_warned;
} output_files_t;

hvd_status_t output_files_open(const char *directory, int n_ranks, output_files_t *files_p,
                               err_t *err);
void output_files_write(output_files_t *files, int rank, int stream, const void *data,
                        size_t bytes);
// The first failure in a sentence, once; NULL: there is nothing to tell.
const char *output_files_warning(output_files_t *files, char *text, size_t bytes);
void output_files_close(output_files_t *files);
// Appends to DIRECTORY/rank.<N>, which is made anew if *fd_p is -1.
hvd_status_t result_write(const char *directory, int rank, int *fd_p, const void *data,
                          size_t bytes, err_t *err);
// For who started us to get --results: "rank code" of the rank that failed first, in a file there.
void note_first_failure(const char *results, int rank, int code);

// --- Processes (spawn.c) -------------------------------------------------------------------------

typedef struct child {
    pid_t pid;
    int fds[N_STREAMS]; // our ends of its stdout and stderr
} child_t;

// Starts a rank in a session of its own, dying with this thread. *code_p: errno of the step that
// failed, which is named in *step_p.
bool spawn_rank(char *const *argv, char **env, const char *directory, child_t *child_p, int *code_p,
                const char **step_p);
// Starts a helper (ssh, an agent) in a session of its own, talking over one socket.
hvd_status_t spawn_helper(char *const *argv, child_t *child_p, int *socket_p, err_t *err);
// Runs a program to its end and keeps what it prints, at most `bytes`; its exit status. -1: it
// cannot be started, was killed, or is late and has been killed.
int run_program(char *const *argv, int timeout_ms, char *text, size_t bytes);
bool own_path(char *path, size_t bytes); // of this program
bool set_nonblocking(int fd);
void kill_group(pid_t pid, int signo);
bool group_is_empty(pid_t pid);
const char *signal_name(int signo, char text[16]); // "SIGKILL"
// A descriptor that tells of these signals (the last is 0), which are blocked from here on: beside
// others (SIG_BLOCK), or alone (SIG_SETMASK). -1: errno.
int signals_open(int how, const int *signals);

// --- The agent of a host (agent.c), and who looks after it (keeper.c) ----------------------------

int agent_main(void);

#define AGENT_DIRECTORY "hvd-agent-" // the name begins with it

typedef struct keeper {
    int fd;
    pid_t pid;
} keeper_t;

// A small process that outlives the agent: when the agent is gone it kills the groups it was told
// of, and removes the directory.
hvd_status_t keeper_start(const char *directory, keeper_t *keeper_p, err_t *err);
void keeper_add(keeper_t *keeper, pid_t group);
void keeper_remove(keeper_t *keeper, pid_t group);
void keeper_stop(keeper_t *keeper); // it acts, and has ended when this returns

// Notes between the agent and ranks of an elastic job (notes.c). The descriptor is readable when
// there may be something for notes_read.
typedef void (*ready_fn)(void *arg, int id, uint32_t generation);
hvd_status_t notes_watch(const char *directory, int *fd_p, err_t *err);
void notes_read(int fd, const char *directory, ready_fn ready, void *arg);
bool notes_write_place(const char *directory, int id, const uint8_t *env, size_t bytes);
bool notes_write_news(const char *directory, uint32_t number, uint32_t what);

// Checks of the doctor on this host; a finding for each through report().
typedef void (*finding_fn)(void *arg, bool is_fault, const char *what, const char *found,
                           const char *fix);
uint64_t oom_kills(void); // by the kernel, on this host or in this group, so far (oom.c)
void examine_host(const char *addresses, int port, int64_t launcher_time_s, finding_fn report,
                  void *arg);

// --- Ending (ending.c): pure ---------------------------------------------------------------------

typedef struct rank_end {
    bool has_ended, was_oom, was_stopped; // stopped: after we had asked it to end
    bool was_halted;                      // as by SIGSTOP, when we asked
    int code;                             // of the process; 128 + signal
    int signo;                            // 0: none
    pid_t pid;
    uint64_t time_ns;
} rank_end_t;

// The rank whose failure is the cause, or -1: the first that failed, but one that a signal killed
// within a moment of it goes before one that gave up because of that.
int ending_cause(const rank_end_t *ends, int n);
// Who is to blame: the cause itself, or a rank that was halted and that its last lines are about.
int ending_blamed(const rank_end_t *ends, int n, int cause, const splitter_t *tail);
// The block that closes a failed job: at most 15 lines. The host is of who is to blame, the tail of
// the cause.
void ending_report(const rank_end_t *ends, int n, int blamed, int cause, const char *host,
                   const splitter_t *tail, buf_t *out);

// --- Launchers -----------------------------------------------------------------------------------

// Each returns an exit code.
int job_run(const options_t *options);
int elastic_run(const options_t *options);
int mpi_run(const options_t *options);
int jsrun_run(const options_t *options);
int doctor_run(const options_t *options);
int doctor_rank(void);
int relay_serve(const options_t *options); // relay.c: agents that wait, without ssh
// The same at this port until the first has come, within timeout_s, and the last has left.
int relay_serve_until_left(const options_t *options, int port, int timeout_s);
int relay_dial(const options_t *options);
int check_build(FILE *out);

// remote.c: the command that starts an agent, and what its failure means.
char **remote_command(const options_t *options, const host_t *host, const char *own_path);
// The same with other arguments than --agent, which need no quoting; over ssh only.
char **remote_program(const options_t *options, const host_t *host, const char *own_path,
                      const char *arguments);
void free_words(char **words);
typedef struct remote_fault {
    const char *what, *fix;
    bool is_passing; // trying again may help
} remote_fault_t;
remote_fault_t remote_explain(const char *ssh_said, int code);

// Words of a text as a shell would take them: quotes and backslashes, nothing else. NULL: no end
// of a quote, or no memory.
char **split_words(const char *text);
// The other way: one word, quoted where a shell needs it.
void quote_word(const char *word, buf_t *out);

// mpi.c
typedef enum mpi_flavor { MPI_NONE, MPI_OPEN, MPI_SPECTRUM, MPI_MPICH, MPI_INTEL } mpi_flavor_t;
mpi_flavor_t mpi_flavor_of(const char *version_text);
mpi_flavor_t mpi_find(void); // the mpirun in PATH; MPI_NONE: there is none, and it was said
// The words of the mpirun command; NULL with err.
char **mpi_command(const options_t *options, mpi_flavor_t flavor, const hosts_t *hosts, int np,
                   char *const *env, err_t *err);

// say.c: sentences of the launcher itself, to stderr.
void say(const char *format, ...) PRINTF_LIKE(1, 2);

#endif
