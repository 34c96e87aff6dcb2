// SPDX-License-Identifier: Apache-2.0
//
// plan.h - hosts, which ranks they get, and what each rank is told.
//
// hosts.c finds the hosts, plan.c places the ranks (pure) and makes their environment.
#ifndef HVD_CLI_PLAN_H
#define HVD_CLI_PLAN_H

#include "cli/options.h"

// --- Hosts (hosts.c) -----------------------------------------------------------------------------

typedef struct host {
    char *name;            // without user: HOROVOD_HOSTNAME
    char *target;          // for ssh: user@name
    char *address;         // where it is, if not where its name leads; NULL: there
    const char *starter;   // what its scheduler starts commands there with; NULL: --ssh-command
    const char *arguments; // what its agent is told on its command line; NULL: nothing
    int agent_port;        // of an agent that waits; 0: --agent-port
    int slots;
    bool is_local;
    uint64_t target_hash; // while lists are read, which may name many hosts
} host_t;

typedef struct hosts {
    host_t *list;
    int n;
    bool knows_local; // which are local is known without looking names up
} hosts_t;

hvd_status_t hosts_parse(const char *text, int bare_slots, hosts_t *hosts_p, err_t *err);
hvd_status_t hostfile_parse(const char *text, const char *path, int bare_slots, hosts_t *hosts_p,
                            err_t *err);
hvd_status_t hostfile_text(const char *path, buf_t *text, err_t *err); // with a '\0' behind
// One more host, or more slots for one that is there.
hvd_status_t hosts_add(hosts_t *hosts, const char *name, size_t bytes, int slots, err_t *err);
// From the options: -H, a hostfile; else from a scheduler, or localhost with -np slots.
hvd_status_t hosts_choose(const options_t *options, hosts_t *hosts_p, err_t *err);
// Looks names up, which may take as long as the resolver does; not those of agents that dial.
void hosts_find_local(const options_t *options, hosts_t *hosts);
void hosts_free(hosts_t *hosts);
// Where ranks find the rendezvous server, as own_addresses has it: where agents are awaited if that
// was said, loopback if everything is on this host. A job that may wait for hosts from anywhere has
// only this one without a network.
hvd_status_t job_addresses(const options_t *options, bool is_local, bool may_be_alone,
                           char **addresses_p, err_t *err);
bool options_await_at_one(const options_t *options); // address, and not at all of them
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

// --- Environment of ranks (plan.c) ---------------------------------------------------------------

// Where the ranks of one generation meet.
typedef struct job_info {
    char id[32];
    char *addresses; // of the rendezvous server
    int port;
} job_info_t;

// What makes a process a rank.
typedef struct rank_info {
    const rank_place_t *place; // NULL: it has none any more
    int n_ranks;
    const char *host_name;
    const job_info_t *job;
    int id;
    uint32_t generation; // 0: there is only one
} rank_info_t;

// What its host adds.
typedef struct rank_host {
    const char *directory, *program;
    const char *result, *blame; // files of this rank; result "": not wanted
    int id;                     // of the rank
    const char *launcher;       // its address as seen from here, up to a blank; NULL: not known
    bool has_payload, is_elastic;
} rank_host_t;

// Each appends NAME=value after NAME=value, with a '\0' after each. For every rank of the job:
// options, where to meet and, if it is to be exported, this process's environment as far as other
// hosts can use it.
void environ_of_job(const options_t *options, const char *addresses, bool is_elastic, bool exports,
                    buf_t *list);
void environ_of_rank(const rank_info_t *rank, buf_t *list);
void environ_of_host(const rank_host_t *host, buf_t *list);
// This process's own values of variables, by their names with commas between; those that it has.
void environ_keep(const char *names, buf_t *list);
// Appends NAME=value, printed, with its '\0'.
void environ_put(buf_t *list, const char *format, ...) PRINTF_LIKE(2, 3);
// Is this variable carried to other hosts?
bool environ_is_exportable(const char *name);
// Its value in such a list, NULL if it has none.
const char *environ_find(const uint8_t *list, size_t bytes, const char *name);
// Base with changes laid over it: a NULL-terminated array for exec, one block to free.
char **environ_merge(char *const *base, const uint8_t *changes, size_t bytes);

#endif
