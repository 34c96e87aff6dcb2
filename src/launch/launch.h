// SPDX-License-Identifier: Apache-2.0
//
// launch.h - horovodrun: from a command line to ranks on hosts, their output and their end.
//
// Owns: options, hosts, the plan of ranks, the agents that start them, output, exit codes. The
// program is one process with one loop (session.c), a thread that writes output (output.c) and the
// library's rendezvous server; on every host an agent, the same binary (agent.c), starts the ranks
// and reports. docs/launcher.md has the picture. options.h, plan.h, frame.h, session.h, output.h,
// process.h and agent.h have the parts; only tools/horovodrun.c, pai/ and tests call the rest.
#ifndef HVD_LAUNCH_H
#define HVD_LAUNCH_H

#include "launch/plan.h"
#include "wire/secret.h"

#include <stdio.h>

#define PROGRAM "horovodrun"

// --- Exit codes of horovodrun itself; a failed rank's own takes precedence. docs/launcher.md -----

enum {
    EXIT_USAGE = 2,        // the command line or a file it names
    EXIT_UNREACHABLE = 69, // a host, or its agent
    EXIT_INTERNAL = 70,    // out of memory, out of descriptors
    EXIT_OUTPUT = 74,      // output cannot be written
    EXIT_START_TIMEOUT = 75,
    EXIT_NO_LISTENER = 76,  // of --dial-agent: no agent waits there
    EXIT_OTHER_SECRET = 77, // of --dial-agent: the agent has another one
    EXIT_NO_SECRET = 78,    // of --dial-agent: it cannot be read
    EXIT_NO_COMMAND = 79,   // of what should have been ssh: there is no such program here
    EXIT_NO_NAME = 80,      // of --dial-agent: nobody knows that name
    EXIT_NO_ANSWER = 81,    // of --dial-agent: nothing comes back from there
    EXIT_NOT_EXECUTABLE = 126,
    EXIT_NOT_FOUND = 127,
    EXIT_BY_SIGNAL = 128, // plus the signal's number
};

// --- Launchers -----------------------------------------------------------------------------------

// Each returns an exit code.
int job_run(const options_t *options);
int elastic_run(const options_t *options);
int shell_main(const options_t *options);
int gather_run(const options_t *options); // on agents that dial, whatever their hosts
int carry_run(const options_t *options);  // such agents as hosts of another launcher
int mpi_run(const options_t *options);
int jsrun_run(const options_t *options);
int doctor_run(const options_t *options);
int relay_serve(const options_t *options); // relay.c: agents that wait, without ssh
int relay_dial(const options_t *options);
int relay_redial(const options_t *options); // an agent that dials, again and again
int check_build(FILE *out);

// remote.c: the command that starts an agent, and what its failure means.
char **remote_command(const options_t *options, const host_t *host, const char *own_path);
// The same with other arguments than --agent, which need no quoting; over ssh only.
char **remote_program(const options_t *options, const host_t *host, const char *own_path,
                      const char *arguments);
void free_words(char **words);
bool is_in_path(const char *program);
typedef struct remote_fault {
    const char *what, *fix;
    enum {
        FAULT_STAYS,
        FAULT_STARTS, // passes if the host is just being started
        FAULT_PASSES, // trying again may help
    } lasts;
    bool is_known; // else its own words say more
} remote_fault_t;
// `code`: exit status of the command, which was ssh or --dial-agent; -1: none. Only ssh has nothing
// but its words to tell by.
remote_fault_t remote_explain(bool has_dialled, const char *ssh_said, int code);
// Printed on the other host in place of an agent: ssh passes on nothing but text and a status that
// shells use too.
#define REMOTE_NOT_INSTALLED "horovodrun-agent: not installed"

// Words of a text as a shell would take them: quotes and backslashes, nothing else. NULL: no end
// of a quote, or no memory.
char **split_words(const char *text);
// The other way: one word, quoted where a shell needs it.
void quote_word(const char *word, buf_t *out);

// mpi.c
typedef enum mpi_flavor { MPI_NONE, MPI_OPEN, MPI_SPECTRUM, MPI_MPICH, MPI_INTEL } mpi_flavor_t;
mpi_flavor_t mpi_flavor_of(const char *version_text);
mpi_flavor_t
mpi_find(void); // mpi_run.c: the mpirun in PATH; MPI_NONE: there is none, and it was said
// The words of the mpirun command; NULL with err.
char **mpi_command(const options_t *options, mpi_flavor_t flavor, const hosts_t *hosts, int np,
                   char *const *env, err_t *err);

// message.c: a sentence of the launcher itself to stderr: one line, one write. Any thread.
void say(const char *format, ...) PRINTF_LIKE(1, 2);
// What to try after a rank has written this before it failed; NULL: nothing is known.
const char *hint_for_line(const char *line);
const char *hint_for_flag(const char *flag); // what there is for one of another launcher; or NULL

#endif
