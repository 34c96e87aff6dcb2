// SPDX-License-Identifier: Apache-2.0
//
// schedulers.h - the hosts that a scheduler has given to this job.
//
// schedulers.c owns the table of schedulers. hosts.c asks it where no flag names hosts; tests and
// fuzz targets call the readers with texts of their own.
#ifndef HVD_CLI_SCHEDULERS_H
#define HVD_CLI_SCHEDULERS_H

#include "cli/plan.h"

// A list of hosts as a scheduler leaves it.
typedef struct host_list {
    const char *source;                   // the variable or file it is in, for errors
    const char *text;                     // what is in it
    const char *(*get)(const char *name); // other variables of that scheduler; NULL: unset
} host_list_t;

// Appends its hosts; those of a list that is refused are the caller's to free, too.
typedef hvd_status_t host_reader_t(const host_list_t *list, hosts_t *hosts, err_t *err);

typedef enum list_place { IN_VARIABLE, IN_NAMED_FILE, IN_FILE } list_place_t;

typedef struct scheduler {
    const char *source; // a variable with the list or with the name of its file; or the file
    list_place_t place;
    host_reader_t *read;
    const char *unit;              // what this scheduler calls a slot; NULL: a slot
    bool shows_text;               // the list is shorter than its names
    const char *own_name;          // variable with the name of the host we are on; NULL: none
    const char *program, *starter; // what runs commands on hosts in place of ssh; NULL: ssh
    // Where every host starts a copy of us, this variable is more than `most`.
    const char *once, *how_once;
    int most;
} scheduler_t;

extern const scheduler_t schedulers[];
extern const int n_schedulers;

// The hosts of the allocation that this process is in, and a line on stderr that says what was
// found. hosts_p stays empty where there is no allocation, or where -np is all there is to go by.
hvd_status_t scheduler_hosts(const options_t *options, hosts_t *hosts_p, err_t *err);

#endif
