// SPDX-License-Identifier: Apache-2.0
//
// schedulers.c - the hosts that a scheduler has given to this job, so that nobody has to name them.
//
// Each scheduler leaves its list in a variable or a file, in a form of its own; a row says where it
// is and who reads it. The first row whose list is there counts. What a list says is checked like
// what a user says: lengths, numbers and names, with the offending piece in the error. Cost: hosts
// squared for lists with a line per slot, hence the limit on hosts.
#define _GNU_SOURCE
#include "cli/schedulers.h"
#include "cli/cli.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#define MAX_HOSTS 10000
#define MAX_NAME 253
#define MAX_NUMBER 999999999
#define MAX_SHOWN 3
#define INSTEAD "; name the hosts with -H instead"
#define BLANKS " \t\r\n"

static hvd_status_t refuse(const char *source, const char *piece, size_t bytes, const char *why,
                           err_t *err)
{
    return fail(err, HVD_INVALID_ARGUMENT, "%s has \"%.*s\": %s" INSTEAD, source,
                (int)MIN(bytes, 100), piece, why);
}

static hvd_status_t add(const host_list_t *list, const char *name, size_t bytes, int slots,
                        hosts_t *hosts, err_t *err)
{
    err_t why = {0};
    hvd_status_t status = hosts_add(hosts, name, bytes, slots, &why);
    if (status == HVD_OK && hosts->n > MAX_HOSTS) {
        status = fail(&why, HVD_INVALID_ARGUMENT, "more than %d hosts", MAX_HOSTS);
    }
    return status == HVD_INVALID_ARGUMENT ? refuse(list->source, name, bytes, why.text, err)
           : status != HVD_OK             ? fail(err, status, "%s", why.text)
                                          : HVD_OK;
}

// --- Numbers -------------------------------------------------------------------------------------

// Digits at *at_p; of a number that is too large the last digits are left there.
static bool take_number(const char **at_p, const char *end, int *value_p)
{
    const char *at = *at_p;
    int value = 0;
    while (at < end && *at >= '0' && *at <= '9' && value <= MAX_NUMBER / 10) {
        value = value * 10 + (*at++ - '0');
    }
    bool is_number = at > *at_p && value <= MAX_NUMBER;
    *at_p = at;
    *value_p = value;
    return is_number;
}

// Of another variable; *value_p stays as it is where that is unset.
static hvd_status_t number_of(const host_list_t *list, const char *name, int *value_p, err_t *err)
{
    const char *text = list->get(name), *at = text;
    int value;
    if (text == NULL) {
        return HVD_OK;
    }
    if (!take_number(&at, text + strlen(text), &value) || *at != '\0') {
        return refuse(name, text, strlen(text), "not a number", err);
    }
    *value_p = value;
    return HVD_OK;
}

// "2(x3),1": two on each of three nodes, one on the next. *fits_p: these are n nodes.
static hvd_status_t counts_of(const host_list_t *list, const char *name, int n, int *counts,
                              bool *fits_p, err_t *err)
{
    const char *text = list->get(name);
    int n_seen = 0;
    for (const char *at = text; at != NULL && *at != '\0';) {
        const char *piece = at, *end = at + strcspn(at, ",");
        int count, n_times = 1;
        bool is_right = take_number(&at, end, &count) && count > 0;
        if (is_right && end - at > 2 && strncmp(at, "(x", 2) == 0) {
            at += 2;
            is_right = take_number(&at, end, &n_times) && n_times > 0 && *at++ == ')';
        }
        if (!is_right || at != end || n_times > MAX_HOSTS - n_seen) {
            return refuse(name, piece, (size_t)(end - piece),
                          "not a count of tasks, as 2 or 2(x3) is", err);
        }
        for (; n_times > 0; n_times--, n_seen++) {
            if (n_seen < n) {
                counts[n_seen] = count;
            }
        }
        at = end + (*end == ',');
    }
    *fits_p = n_seen == n;
    return HVD_OK;
}

// --- Slurm ---------------------------------------------------------------------------------------

// The names of a list like node[1-3,07-08],gpu-[1-2]-[a], each with its '\0'.
typedef struct node_names {
    const host_list_t *list;
    const char *piece; // of the list, which is being expanded
    size_t piece_bytes;
    char name[MAX_NAME + 16];
    buf_t all;
    int n;
} node_names_t;

static hvd_status_t refuse_piece(const node_names_t *names, const char *why, err_t *err)
{
    return refuse(names->list->source, names->piece, names->piece_bytes, why, err);
}

static hvd_status_t expand(node_names_t *names, size_t len, const char *at, const char *end,
                           err_t *err);

// One of the ranges in brackets, and for each of its numbers all that follows the brackets.
static hvd_status_t expand_range(node_names_t *names, size_t len, const char *range,
                                 const char *range_end, const char *rest, const char *end,
                                 err_t *err)
{
    const char *at = range;
    int first, last;
    bool is_right = take_number(&at, range_end, &first);
    int width = (int)(at - range); // node[08-11]: zeros in front are part of the names
    last = first;
    if (is_right && at < range_end && *at == '-') {
        at++;
        is_right = take_number(&at, range_end, &last);
    }
    if (!is_right || at != range_end || last < first) {
        return refuse_piece(names, "expected numbers in the brackets, as in node[1-3,7]", err);
    }
    hvd_status_t status = HVD_OK;
    for (int number = first; number <= last && status == HVD_OK; number++) {
        int digits = snprintf(names->name + len, sizeof names->name - len, "%0*d", width, number);
        status = expand(names, len + (size_t)digits, rest, end, err);
    }
    return status;
}

// `len` bytes of the name are there already. As deep as there are brackets, which the length of a
// name limits.
static hvd_status_t expand(node_names_t *names, size_t len, const char *at, const char *end,
                           err_t *err)
{
    const char *bracket = memchr(at, '[', (size_t)(end - at));
    const char *open = bracket != NULL ? bracket : end;
    const char *close = memchr(open, ']', (size_t)(end - open));
    size_t plain = (size_t)(open - at);
    if (len + plain > MAX_NAME) {
        return refuse_piece(names, "the name of a host is too long", err);
    }
    memcpy(names->name + len, at, plain);
    len += plain;
    if (bracket == NULL) {
        buf_append(&names->all, names->name, len);
        buf_append(&names->all, "", 1);
        return ++names->n <= MAX_HOSTS ? HVD_OK : refuse_piece(names, "too many hosts", err);
    }
    if (close == NULL) {
        return refuse_piece(names, "the bracket is not closed", err);
    }
    hvd_status_t status = HVD_OK;
    for (const char *range = open + 1; range <= close && status == HVD_OK;) {
        const char *comma = memchr(range, ',', (size_t)(close - range));
        const char *range_end = comma != NULL ? comma : close;
        status = expand_range(names, len, range, range_end, close + 1, end, err);
        range = range_end + 1;
    }
    return status;
}

// Commas in brackets separate numbers, all others nodes.
static hvd_status_t expand_all(node_names_t *names, err_t *err)
{
    for (const char *at = names->list->text;;) {
        const char *end = at;
        while (*end != '\0' && *end != ',') {
            size_t closed = *end == '[' ? strcspn(end, "]") : 0;
            end += MAX(closed, 1);
        }
        names->piece = at;
        names->piece_bytes = (size_t)(end - at);
        hvd_status_t status = expand(names, 0, at, end, err);
        if (status != HVD_OK || *end == '\0') {
            return status;
        }
        at = end + 1;
    }
}

// Tasks of each node. Inside a step the counts are the step's own, about fewer nodes than the
// allocation has: then what was asked for, then processors.
static hvd_status_t slurm_slots(const host_list_t *list, int n, int *slots, err_t *err)
{
    int per_node = 0, n_tasks = 0, cpus_per_task = 1;
    bool fits;
    hvd_status_t status;
    TRY(counts_of(list, "SLURM_TASKS_PER_NODE", n, slots, &fits, err), out);
    if (fits) {
        return HVD_OK;
    }
    TRY(number_of(list, "SLURM_NTASKS_PER_NODE", &per_node, err), out);
    TRY(number_of(list, "SLURM_NTASKS", &n_tasks, err), out);
    TRY(number_of(list, "SLURM_CPUS_PER_TASK", &cpus_per_task, err), out);
    TRY(counts_of(list, "SLURM_JOB_CPUS_PER_NODE", n, slots, &fits, err), out);
    for (int i = 0; i < n; i++) {
        int by_cpus = fits ? slots[i] / MAX(cpus_per_task, 1) : 1;
        slots[i] = per_node > 0   ? per_node
                   : n_tasks >= n ? n_tasks / n + (i < n_tasks % n)
                                  : MAX(by_cpus, 1);
    }
out:
    return status;
}

static hvd_status_t read_slurm(const host_list_t *list, hosts_t *hosts, err_t *err)
{
    node_names_t names = {.list = list};
    int *slots = NULL;
    hvd_status_t status;
    TRY(expand_all(&names, err), out);
    slots = calloc((size_t)names.n, sizeof *slots);
    if (names.all.failed || slots == NULL) {
        status = fail(err, HVD_NO_MEMORY, "no memory for %d hosts", names.n);
        goto out;
    }
    TRY(slurm_slots(list, names.n, slots, err), out);
    const char *name = (const char *)names.all.data;
    for (int i = 0; i < names.n; i++) {
        TRY(add(list, name, strlen(name), slots[i], hosts, err), out);
        name += strlen(name) + 1;
    }
out:
    free(slots);
    buf_free(&names.all);
    return status;
}

// --- Words ---------------------------------------------------------------------------------------

// A name for each slot: LSB_HOSTS, and the files of LSF and PBS.
static hvd_status_t add_words(const host_list_t *list, int slots, hosts_t *hosts, err_t *err)
{
    hvd_status_t status = HVD_OK;
    for (const char *at = list->text + strspn(list->text, BLANKS); *at != '\0';) {
        size_t bytes = strcspn(at, BLANKS);
        TRY(add(list, at, bytes, slots, hosts, err), out);
        at += bytes + strspn(at + bytes, BLANKS);
    }
out:
    return status;
}

static hvd_status_t read_slots(const host_list_t *list, hosts_t *hosts, err_t *err)
{
    return add_words(list, 1, hosts, err);
}

// LSB_MCPU_HOSTS: "a 4 b 4".
static hvd_status_t read_pairs(const host_list_t *list, hosts_t *hosts, err_t *err)
{
    hvd_status_t status = HVD_OK;
    for (const char *at = list->text + strspn(list->text, BLANKS); *at != '\0';) {
        const char *name = at;
        size_t bytes = strcspn(at, BLANKS);
        int slots;
        at += bytes + strspn(at + bytes, BLANKS);
        const char *end = at + strcspn(at, BLANKS);
        if (!take_number(&at, end, &slots) || at != end || slots == 0) {
            return refuse(list->source, name, (size_t)(end - name),
                          "expected names with their slots, as in \"a 4 b 4\"", err);
        }
        TRY(add(list, name, bytes, slots, hosts, err), out);
        at += strspn(at, BLANKS);
    }
out:
    return status;
}

// A line for each slot. Some sites write each host once, and have its slots in a variable.
static hvd_status_t read_pbs(const host_list_t *list, hosts_t *hosts, err_t *err)
{
    int per_node = 1;
    bool is_once = true;
    hvd_status_t status;
    TRY(number_of(list, "PBS_NUM_PPN", &per_node, err), out);
    TRY(read_slots(list, hosts, err), out);
    for (int i = 0; i < hosts->n; i++) {
        is_once = is_once && hosts->list[i].slots == 1;
    }
    for (int i = 0; is_once && per_node > 1 && i < hosts->n; i++) {
        const char *name = hosts->list[i].name;
        TRY(add(list, name, strlen(name), per_node - 1, hosts, err), out);
    }
out:
    return status;
}

static hvd_status_t read_skypilot(const host_list_t *list, hosts_t *hosts, err_t *err)
{
    int n_gpus = 1;
    hvd_status_t status = number_of(list, "SKYPILOT_NUM_GPUS_PER_NODE", &n_gpus, err);
    return status != HVD_OK ? status : add_words(list, MAX(n_gpus, 1), hosts, err);
}

// As Open MPI or Intel MPI has it; older operators leave the slots to a variable.
static hvd_status_t read_mpi_operator(const host_list_t *list, hosts_t *hosts, err_t *err)
{
    int slots = 1;
    hvd_status_t status = number_of(list, "OMPI_MCA_orte_set_default_slots", &slots, err);
    return status != HVD_OK ? status
                            : hostfile_parse(list->text, list->source, MAX(slots, 1), hosts, err);
}

// --- The table -----------------------------------------------------------------------------------

// Called with a host and a line of shell, as ssh is. A step beside all others, which gets the whole
// node, and bytes as they are.
#define BY_SRUN                                                                                    \
    "sh -c 'exec srun --quiet --overlap --unbuffered --mpi=none --cpu-bind=none --nodes=1 "        \
    "--ntasks=1 --ntasks-per-node=1 --nodelist=\"$0\" sh -c \"$1\"'"

const scheduler_t schedulers[] = {
    // Slurm
    {.source = "SLURM_JOB_NODELIST",
     .read = read_slurm,
     .unit = "task",
     .shows_text = true,
     .own_name = "SLURMD_NODENAME",
     .program = "srun",
     .starter = BY_SRUN,
     .once = "SLURM_STEP_NUM_TASKS",
     .most = 1,
     .how_once = "with srun -n 1, or without srun"},
    // LSF
    {.source = "LSB_DJOB_HOSTFILE", .place = IN_NAMED_FILE, .read = read_slots},
    {.source = "LSB_MCPU_HOSTS", .read = read_pairs},
    {.source = "LSB_HOSTS", .read = read_slots},
    // PBS
    {.source = "PBS_NODEFILE", .place = IN_NAMED_FILE, .read = read_pbs},
    // SkyPilot
    {.source = "SKYPILOT_NODE_IPS",
     .read = read_skypilot,
     .once = "SKYPILOT_NODE_RANK",
     .how_once = "on the node whose SKYPILOT_NODE_RANK is 0"},
    // Kubeflow's MPI Operator
    {.source = "/etc/mpi/hostfile", .place = IN_FILE, .read = read_mpi_operator},
};
const int n_schedulers = N_ELEMENTS(schedulers);

// --- What is there -------------------------------------------------------------------------------

// The row whose list is there, and its text; NULL: none. A file that is not there is as good as no
// list (containers often have the variables but not the files), unless there is nothing else.
static hvd_status_t find_list(bool needs_one, buf_t *text, const scheduler_t **row_p, err_t *err)
{
    err_t missing = {0};
    *row_p = NULL;
    for (const scheduler_t *row = schedulers; row < schedulers + n_schedulers; row++) {
        const char *value = row->place == IN_FILE ? row->source : environment(row->source);
        if (value != NULL && (row->place == IN_VARIABLE || access(value, F_OK) == 0)) {
            *row_p = row;
            return row->place != IN_VARIABLE ? hostfile_text(value, text, err)
                   : buf_append(text, value, strlen(value) + 1) != NULL
                       ? HVD_OK
                       : fail(err, HVD_NO_MEMORY, "no memory for the hosts");
        }
        if (value != NULL && row->place == IN_NAMED_FILE) {
            fail(&missing, HVD_INVALID_ARGUMENT,
                 "%s names the file %s, which does not exist" INSTEAD, row->source, value);
        }
    }
    return needs_one && missing.status != HVD_OK ? fail(err, missing.status, "%s", missing.text)
                                                 : HVD_OK;
}

// Refuses to start where every host would; with -np this is about this machine alone, as ever.
static hvd_status_t check_once(const scheduler_t *row, int np, bool *is_alone_p, err_t *err)
{
    const host_list_t list = {.get = environment};
    int value = 0;
    hvd_status_t status = row->once != NULL ? number_of(&list, row->once, &value, err) : HVD_OK;
    *is_alone_p = value <= row->most;
    if (status == HVD_OK && !*is_alone_p && np == 0) {
        status = fail(err, HVD_INVALID_ARGUMENT,
                      "%s is %d: %s is started several times, and each would start the whole job; "
                      "start it once, %s, or give -np",
                      row->once, value, PROGRAM, row->how_once);
    }
    return status;
}

// --- What is said --------------------------------------------------------------------------------

static void put_names(const hosts_t *hosts, buf_t *text)
{
    for (int i = 0; i < MIN(hosts->n, MAX_SHOWN); i++) {
        buf_printf(text, "%s%s", i > 0 ? ", " : "", hosts->list[i].name);
    }
    if (hosts->n > MAX_SHOWN) {
        buf_printf(text, " and %d more", hosts->n - MAX_SHOWN);
    }
}

static void put_count(int64_t n, const char *noun, buf_t *text)
{
    buf_printf(text, "%lld %s%s", (long long)n, noun, n == 1 ? "" : "s");
}

// 4 ranks on 2 hosts, from SLURM_JOB_NODELIST (node[1-2], 2 tasks each)
static void tell(const scheduler_t *row, const char *list, const hosts_t *hosts, int64_t np)
{
    int64_t n_slots = 0;
    int n_hosts = 0, first = hosts->list[0].slots;
    bool are_equal = true;
    buf_t text = {0};
    for (int i = 0; i < hosts->n; i++) {
        n_hosts += np == 0 || n_slots < np;
        n_slots += hosts->list[i].slots;
        are_equal = are_equal && hosts->list[i].slots == first;
    }
    put_count(np > 0 ? MIN(np, n_slots) : n_slots, np <= n_slots ? "rank" : "slot", &text);
    buf_printf(&text, " on ");
    put_count(n_hosts, "host", &text);
    buf_printf(&text, ", from %s (", row->source);
    if (row->shows_text) {
        buf_printf(&text, "%.100s%s", list, strlen(list) > 100 ? "..." : "");
    } else {
        put_names(hosts, &text);
    }
    if (hosts->n > 1) {
        buf_printf(&text, ", ");
        put_count(are_equal ? first : n_slots, row->unit != NULL ? row->unit : "slot", &text);
        buf_printf(&text, are_equal ? " each" : "");
    }
    say("%.*s)", (int)text.len, (const char *)text.data);
    buf_free(&text);
}

// --- All together --------------------------------------------------------------------------------

// What the options and the scheduler say about hosts besides their names.
static void settle(const scheduler_t *row, const options_t *options, hosts_t *hosts)
{
    const char *own_name = row->own_name != NULL ? environment(row->own_name) : NULL;
    bool has_starter = row->starter != NULL && is_in_path(row->program);
    for (int i = 0; i < hosts->n; i++) {
        host_t *host = &hosts->list[i];
        host->starter = has_starter ? row->starter : NULL;
        host->is_local = own_name != NULL && strcmp(own_name, host->name) == 0;
        if (options->origins[OPTION_slots_per_host] != BY_DEFAULT) {
            host->slots = (int)options->slots_per_host;
        }
    }
}

hvd_status_t scheduler_hosts(const options_t *options, hosts_t *hosts_p, err_t *err)
{
    int np = (int)options->num_proc;
    bool is_alone = false;
    buf_t text = {0};
    hosts_t hosts = {0};
    const scheduler_t *row;
    hvd_status_t status;
    TRY(find_list(np == 0, &text, &row, err), out);
    if (row != NULL) {
        TRY(check_once(row, np, &is_alone, err), out);
    }
    if (!is_alone) {
        goto out;
    }
    const host_list_t list = {
        .source = row->source, .text = (const char *)text.data, .get = environment};
    TRY(row->read(&list, &hosts, err), out);
    if (hosts.n == 0) {
        status = fail(err, HVD_INVALID_ARGUMENT, "%s names no hosts" INSTEAD, list.source);
        goto out;
    }
    settle(row, options, &hosts);
    if (hosts.n == 1) {
        hosts.list[0].slots = MAX(hosts.list[0].slots, np); // one host: -np says it all
    }
    tell(row, list.text, &hosts, np);
    *hosts_p = hosts;
    hosts = (hosts_t){0};
out:
    hosts_free(&hosts);
    buf_free(&text);
    return status;
}
