// SPDX-License-Identifier: Apache-2.0
//
// doctor.c - horovodrun --doctor: checks hosts before a job is started on them, each with its fix.
//
// A session without ranks: an agent on every host checks it (examine_host) and reports one finding
// per line. Python is the one that the ranks would get, with their environment and directory; its
// versions are then compared between hosts. If nothing is wrong, a trial job of one rank per host
// (two on a single host) tests secret, rendezvous, addresses and transports (tools/trial.c). The
// exit code is 0 if no fault was found.
//
// --check-build, at the end, tries each framework in a Python of its own, since importing one may
// take long or crash.
#define _GNU_SOURCE
#include "launch/session.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define EXAMINE_TIMEOUT_MS 180000
#define IMPORT_TIMEOUT_MS 60000

// --- The trial job -------------------------------------------------------------------------------

static int run_trial(const options_t *options, const hosts_t *hosts)
{
    static char *command[] = {"sh", "-c", "exec \"$HOROVOD_RUN_PROGRAM\" --doctor-rank", NULL};
    options_t trial = *options;
    buf_t list = {0};
    for (int i = 0; i < hosts->n; i++) {
        buf_append(&list, ",", i > 0);
        buf_append(&list, hosts->list[i].target, strlen(hosts->list[i].target));
        buf_append(&list, hosts->n == 1 ? ":2" : ":1", 2);
    }
    buf_append(&list, "", 1);
    if (list.failed) {
        buf_free(&list);
        return EXIT_INTERNAL;
    }
    trial.hosts = (char *)list.data;
    trial.hostfile = "";
    trial.output_filename = "";
    trial.num_proc = 0;
    trial.command = command;
    trial.n_command = 3;
    int code = job_run(&trial);
    buf_free(&list);
    return code;
}

// --- The round -----------------------------------------------------------------------------------

// A port at every address for hosts to knock at; nobody answers. -1: none.
static int listen_anywhere(int *port_p)
{
    struct sockaddr_in6 address = {.sin6_family = AF_INET6, .sin6_addr = in6addr_any};
    socklen_t bytes = sizeof address;
    int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) { // a host without IPv6
        struct sockaddr_in v4 = {.sin_family = AF_INET};
        memcpy(&address, &v4, sizeof v4);
        bytes = sizeof v4;
        fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    }
    if (fd >= 0 && bind(fd, (struct sockaddr *)&address, bytes) == 0 && listen(fd, 1024) == 0 &&
        getsockname(fd, (struct sockaddr *)&address, &bytes) == 0) {
        *port_p = ntohs(address.sin6_port); // at the same place in both kinds
        return fd;
    }
    if (fd >= 0) {
        close(fd);
    }
    return -1;
}

typedef struct doctor {
    session_t session; // first: the policy finds the doctor by it
    const char *addresses;
    const char *python; // the command's, see FRAME_EXAMINE
    const char *script;
    bool is_module, needs_horovod;
    int port, n_faults;
    uint64_t deadline_ns;
    buf_t *findings; // by host
    buf_t versions;  // of version_t
} doctor_t;

typedef struct version {
    char what[16], text[64];
    int place; // of the host in the list
    const char *host;
} version_t;

static int place_of(const doctor_t *doctor, const agent_link_t *link)
{
    int i = 0;
    while (doctor->session.links[i] != link) {
        i++;
    }
    return i;
}

static buf_t *findings_of(doctor_t *doctor, const agent_link_t *link)
{
    return &doctor->findings[place_of(doctor, link)];
}

static void note_fault(doctor_t *doctor, const agent_link_t *link, const char *what)
{
    buf_printf(findings_of(doctor, link), "  FAULT  %s\n", what);
    doctor->n_faults++;
}

static void on_ready(session_t *session, agent_link_t *link)
{
    doctor_t *doctor = (doctor_t *)session;
    double answer_s = (double)(link->heard_ns - link->started_ns) / 1e9;
    buf_printf(findings_of(doctor, link), "  ok     %s: answers after %.2f s, version %s\n",
               reach_name(link_reach(link->host, session->options)), answer_s, hvd_version());
    command_examine(link, &(frame_t){.kind = FRAME_EXAMINE,
                                     .examine = {.addresses = doctor->addresses,
                                                 .port = doctor->port,
                                                 .time_s = time(NULL),
                                                 .directory = session->directory,
                                                 .env = {session->env.data, session->env.len},
                                                 .python = doctor->python,
                                                 .script = doctor->script,
                                                 .is_module = doctor->is_module,
                                                 .needs_horovod = doctor->needs_horovod}});
}

static void on_frame(session_t *session, agent_link_t *link, const frame_t *frame)
{
    doctor_t *doctor = (doctor_t *)session;
    buf_t *text = findings_of(doctor, link);
    const finding_t *finding = &frame->finding;
    if (frame->kind != FRAME_FINDING) {
        return;
    }
    buf_printf(text, "  %s  %s: %s\n", finding->is_fault ? "FAULT" : "ok   ", finding->what,
               finding->found);
    if (finding->is_fault) {
        buf_printf(text, "         fix: %s\n", finding->fix);
    }
    if (finding->version[0] != '\0') {
        version_t version = {.place = place_of(doctor, link), .host = link->host->name};
        snprintf(version.what, sizeof version.what, "%s", finding->what);
        snprintf(version.text, sizeof version.text, "%s",
                 strcmp(finding->version, "-") == 0 ? "not installed" : finding->version);
        buf_append(&doctor->versions, &version, sizeof version);
    }
    doctor->n_faults += finding->is_fault;
}

// "1.0.0 on a, c; 1.0.1 on b": false if it is the same everywhere.
static bool list_versions(const version_t *all, size_t n, const char *what, buf_t *list)
{
    size_t n_kinds = 0;
    for (size_t i = 0; i < n; i++) {
        bool is_new = strcmp(all[i].what, what) == 0;
        for (size_t k = 0; k < i && is_new; k++) {
            is_new = strcmp(all[k].what, what) != 0 || strcmp(all[k].text, all[i].text) != 0;
        }
        if (!is_new) {
            continue;
        }
        buf_printf(list, "%s%s on %s", n_kinds++ > 0 ? "; " : "", all[i].text, all[i].host);
        for (size_t k = i + 1; k < n; k++) {
            if (strcmp(all[k].what, what) == 0 && strcmp(all[k].text, all[i].text) == 0) {
                buf_printf(list, ", %s", all[k].host);
            }
        }
    }
    return n_kinds > 1;
}

static int by_place(const void *a, const void *b)
{
    return ((const version_t *)a)->place - ((const version_t *)b)->place;
}

static void compare_versions(doctor_t *doctor)
{
    version_t *all = (version_t *)(void *)doctor->versions.data;
    size_t n = doctor->versions.len / sizeof *all;
    if (n > 0) {
        qsort(all, n, sizeof *all, by_place); // hosts answer in any order
    }
    for (const char *const *name = examined_packages; *name != NULL; name++) {
        buf_t list = {0};
        if (list_versions(all, n, *name, &list)) {
            fprintf(stdout, "  FAULT  %s differs between hosts: %.*s\n", *name, (int)list.len,
                    (const char *)list.data);
            fprintf(stdout, "         fix: install the same version on all hosts, or use an "
                            "environment that they share\n");
            doctor->n_faults++;
        }
        buf_free(&list);
    }
}

static void on_lost(session_t *session, agent_link_t *link, const char *how)
{
    note_fault((doctor_t *)session, link,
               how == NULL ? link->problem : "the agent: no longer answers");
}

// Once all have come, or never will, the session ends with their examination.
static uint64_t on_time(session_t *session, uint64_t now_ns)
{
    doctor_t *doctor = (doctor_t *)session;
    bool are_coming = false;
    for (int i = 0; i < session->n_links; i++) {
        link_phase_t phase = session->links[i]->phase;
        are_coming |= link_is_coming(session->links[i]);
        if (phase == LINK_READY && now_ns >= doctor->deadline_ns) {
            session_lose(session, session->links[i], "it takes too long");
        }
    }
    session->is_finishing = !are_coming;
    return doctor->deadline_ns;
}

static const session_policy_t policy = {.look_ms = 1000,
                                        .on_ready = on_ready,
                                        .on_frame = on_frame,
                                        .on_lost = on_lost,
                                        .on_time = on_time};

// Brings up all agents and prints what they find.
static hvd_status_t examine_all(doctor_t *doctor, const hosts_t *hosts, err_t *err)
{
    session_t *session = &doctor->session;
    doctor->findings = calloc((size_t)hosts->n, sizeof *doctor->findings);
    if (doctor->findings == NULL || session_add_hosts(session, hosts, hosts->n, err) != HVD_OK) {
        return fail(err, HVD_NO_MEMORY, "no memory for %d hosts", hosts->n);
    }
    session_loop(session);
    for (int i = 0; i < hosts->n; i++) {
        fprintf(stdout, "host %s\n%.*s", hosts->list[i].name, (int)doctor->findings[i].len,
                (const char *)doctor->findings[i].data);
        buf_free(&doctor->findings[i]);
    }
    compare_versions(doctor);
    buf_free(&doctor->versions);
    fflush(stdout);
    return HVD_OK;
}

static hvd_status_t choose_hosts(const options_t *options, hosts_t *hosts_p, err_t *err)
{
    bool is_here = options->hosts[0] == '\0' && options->hostfile[0] == '\0';
    return is_here ? hosts_parse("localhost", 1, hosts_p, err)
                   : hosts_choose(options, hosts_p, err);
}

// What Python runs: the first word behind its options, or what follows -m; those may share a word,
// as in -um. Nothing for -c and standard input.
static void choose_script(doctor_t *doctor, char *const *words, int n)
{
    doctor->script = "";
    for (int i = 1; i < n; i++) {
        const char *letters = words[i] + 1;
        const char *takes_value = strpbrk(letters, "cmWX");
        if (words[i][0] != '-') {
            doctor->script = words[i];
            return;
        }
        if (letters[0] == '\0') {
            return;
        }
        if (letters[0] == '-' || takes_value == NULL) {
            i += strcmp(words[i], "--check-hash-based-pycs") == 0;
            continue;
        }
        const char *value = takes_value[1] != '\0' ? takes_value + 1 : i + 1 < n ? words[++i] : "";
        if (*takes_value == 'c' || *takes_value == 'm') {
            doctor->is_module = *takes_value == 'm';
            doctor->script = doctor->is_module ? value : "";
            return;
        }
    }
}

// A command that is no Python may still start one, but need not have Horovod for it.
static void choose_python(doctor_t *doctor, const options_t *options)
{
    const char *first = options->n_command > 0 ? options->command[0] : "";
    const char *slash = strrchr(first, '/');
    bool is_python = strncmp(slash != NULL ? slash + 1 : first, "python", 6) == 0;
    doctor->python = is_python ? first : "";
    doctor->needs_horovod = is_python || first[0] == '\0';
    doctor->script = "";
    if (is_python) {
        choose_script(doctor, options->command, options->n_command);
    }
}

// As the ranks of a job have it.
static hvd_status_t prepare_environment(doctor_t *doctor, const options_t *options, err_t *err)
{
    session_t *session = &doctor->session;
    session->directory = get_current_dir_name();
    environ_of_job(options, doctor->addresses, false, true, &session->env);
    return session->directory != NULL && !session->env.failed
               ? HVD_OK
               : fail(err, HVD_NO_MEMORY, "no memory for the environment of ranks");
}

static void try_all(doctor_t *doctor, const options_t *options, const hosts_t *hosts)
{
    fprintf(stdout, hosts->n == 1 ? "trial job: 2 ranks on %s" : "trial job: rank 0 on %s",
            hosts->list[0].name);
    for (int i = 1; i < hosts->n; i++) {
        fprintf(stdout, ", rank %d on %s", i, hosts->list[i].name);
    }
    fprintf(stdout, "\n");
    fflush(stdout);
    doctor->n_faults += run_trial(options, hosts) != 0;
}

int doctor_run(const options_t *options)
{
    hosts_t hosts = {0};
    buf_t addresses = {0};
    err_t err = {0};
    doctor_t doctor = {.session = {.signal_fd = -1}};
    int listener = listen_anywhere(&doctor.port);
    hvd_status_t status;
    choose_python(&doctor, options);
    TRY(choose_hosts(options, &hosts, &err), out);
    hosts_find_local(options, &hosts);
    if (own_addresses(options->network_interfaces, &addresses, &err) != HVD_OK) {
        fprintf(stdout, "  FAULT  this host: %s\n", err.text);
        doctor.n_faults++;
        buf_clear(&addresses);
        buf_append(&addresses, "127.0.0.1", sizeof "127.0.0.1");
    }
    if (listener < 0) {
        status = fail_errno(&err, errno, "cannot listen on any port");
        goto out;
    }
    doctor.addresses = (const char *)addresses.data;
    doctor.deadline_ns =
        deadline_in_ms((int64_t)(options->start_timeout * 1000) + EXAMINE_TIMEOUT_MS);
    TRY(session_init(&doctor.session, options, &policy, &err), out);
    doctor.session.silence_ns = NEVER_NS; // an agent that looks around says nothing meanwhile
    TRY(prepare_environment(&doctor, options, &err), out);
    TRY(examine_all(&doctor, &hosts, &err), out);
    session_close(&doctor.session);
    if (doctor.n_faults == 0) {
        try_all(&doctor, options, &hosts);
    }
    fprintf(stdout, doctor.n_faults == 0 ? "no faults found\n" : "%d fault%s found\n",
            doctor.n_faults, plural(doctor.n_faults));
out:
    if (status != HVD_OK) {
        say("%s", err.text);
    }
    session_close(&doctor.session);
    free(doctor.findings);
    if (listener >= 0) {
        close(listener);
    }
    buf_free(&addresses);
    hosts_free(&hosts);
    return status == HVD_OK && doctor.n_faults == 0 ? 0 : status == HVD_OK ? 1 : EXIT_USAGE;
}

// --- What this installation has ------------------------------------------------------------------

// The library needs no MPI and has its own operations, which take the place of Gloo's.

static bool can_import(const char *python, const char *module)
{
    char code[128], text[64];
    char *argv[] = {(char *)python, "-c", code, NULL};
    snprintf(code, sizeof code, "import %s", module);
    return run_program(argv, IMPORT_TIMEOUT_MS, text, sizeof text) == 0;
}

// The interpreter that would run a script here.
static const char *find_python(void)
{
    static const char *const names[] = {"python", "python3"};
    char text[64];
    for (size_t i = 0; i < N_ELEMENTS(names); i++) {
        char *argv[] = {(char *)names[i], "-c", "", NULL};
        if (run_program(argv, IMPORT_TIMEOUT_MS, text, sizeof text) == 0) {
            return names[i];
        }
    }
    return NULL;
}

static void item(FILE *out, bool is_there, const char *name)
{
    fprintf(out, "    [%s] %s\n", is_there ? "X" : " ", name);
}

int check_build(FILE *out)
{
    hvd_gpu_t gpu;
    hvd_gpu(NULL, &gpu);
    // A framework counts when both it and our binding to it can be imported.
    static const char *const frameworks[][2] = {{"TensorFlow", "horovod.tensorflow"},
                                                {"PyTorch", "horovod.torch"},
                                                {"MXNet", "horovod.mxnet"}};
    const struct {
        const char *name;
        bool is_there;
    } operations[] = {{"NCCL", gpu.nccl_version != 0},
                      {"DDL", false},
                      {"CCL", false},
                      {"MPI", true},
                      {"Gloo", false},
                      {"Horovod's own, over TCP, shared memory and libfabric", true}};
    const char *python = find_python();

    fprintf(out, "Horovod v%s:\n\nAvailable Frameworks:\n", hvd_version());
    for (size_t i = 0; i < N_ELEMENTS(frameworks); i++) {
        item(out, python != NULL && can_import(python, frameworks[i][1]), frameworks[i][0]);
    }
    fprintf(out, "\nAvailable Controllers:\n");
    item(out, true, "MPI");
    item(out, true, "Gloo");
    fprintf(out, "\nAvailable Tensor Operations:\n");
    for (size_t i = 0; i < N_ELEMENTS(operations); i++) {
        item(out, operations[i].is_there, operations[i].name);
    }
    return 0;
}
