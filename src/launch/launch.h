// SPDX-License-Identifier: Apache-2.0
//
// launch.h - horovodrun: from a command line to ranks on hosts, their output and their end.
//
// Owns: sessions (session.h), links to agents (link.h), output (output.h), the kinds of jobs. What
// was asked for is cli/'s. The program is one process with one loop (session.c), a thread that
// writes output (output.c) and the library's rendezvous server; on every host an agent, the same
// binary (agent/), starts the ranks and reports. docs/launcher.md has the picture. Only
// tools/horovodrun.c, pai/ and tests call what is below.
#ifndef HVD_LAUNCH_H
#define HVD_LAUNCH_H

#include "cli/cli.h"

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
int check_build(FILE *out);

// remote.c: the command that starts an agent, and what its failure means.
char **remote_command(const options_t *options, const host_t *host, const char *own_path);
// The same with other arguments than --agent, which need no quoting; over ssh only.
char **remote_program(const options_t *options, const host_t *host, const char *own_path,
                      const char *arguments);
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

// mpi.c
typedef enum mpi_flavor { MPI_NONE, MPI_OPEN, MPI_SPECTRUM, MPI_MPICH, MPI_INTEL } mpi_flavor_t;
mpi_flavor_t mpi_flavor_of(const char *version_text);
mpi_flavor_t
mpi_find(void); // mpi_run.c: the mpirun in PATH; MPI_NONE: there is none, and it was said
// The words of the mpirun command; NULL with err.
char **mpi_command(const options_t *options, mpi_flavor_t flavor, const hosts_t *hosts, int np,
                   char *const *env, err_t *err);

#endif
