// SPDX-License-Identifier: Apache-2.0
//
// doctor.c - horovodrun --doctor: checks hosts before a job is started on them, each with its fix.
//
// A session without ranks: an agent on every host looks around there (examine_host) and reports a
// finding a line. If all hosts answer, a trial job of one rank per host (two on a single host) goes
// all the way: secret, rendezvous, addresses, transports; its first rank prints how fast each host
// sends to the others. The exit code is 0 if no fault was found.
#define _GNU_SOURCE
#include "launch/agent.h"
#include "launch/session.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#define EXAMINE_TIMEOUT_MS 60000
#define CONNECT_TIMEOUT_MS 3000
#define PYTHON_TIMEOUT_MS 15000
#define LEAST_SHM (64 * MIB)
#define LEAST_FILES 1024
#define MOST_SECONDS_APART 5
#define TRIAL_BYTES (8 * MIB)
#define TRIAL_ROUNDS 5

// --- On the host ---------------------------------------------------------------------------------

static bool can_connect(const char *address, int port)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST}, *found;
    struct pollfd polled = {.events = POLLOUT};
    char service[16];
    int code = 1;
    socklen_t bytes = sizeof code;
    snprintf(service, sizeof service, "%d", port);
    if (getaddrinfo(address, service, &hints, &found) != 0) {
        return false;
    }
    polled.fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (polled.fd >= 0 && (connect(polled.fd, found->ai_addr, found->ai_addrlen) == 0 ||
                           (errno == EINPROGRESS && poll(&polled, 1, CONNECT_TIMEOUT_MS) == 1))) {
        getsockopt(polled.fd, SOL_SOCKET, SO_ERROR, &code, &bytes);
    }
    if (polled.fd >= 0) {
        close(polled.fd);
    }
    freeaddrinfo(found);
    return code == 0;
}

static void examine_addresses(const char *addresses, int port, finding_fn report, void *arg)
{
    char text[1024] = "", address[INET6_ADDRSTRLEN + 32];
    size_t len = 0;
    int n_reached = 0;
    for (const char *at = addresses; *at != '\0' && len < sizeof text;) {
        size_t bytes = strcspn(at, ",");
        snprintf(address, sizeof address, "%.*s", (int)bytes, at);
        bool is_reached = can_connect(address, port);
        n_reached += is_reached;
        len += (size_t)snprintf(text + len, sizeof text - len, "%s%s %s", len > 0 ? ", " : "",
                                address, is_reached ? "yes" : "no");
        at += bytes + (at[bytes] == ',');
    }
    report(arg, n_reached == 0, "reaches the launcher at", text,
           "allow TCP between the hosts on all ports, or name an interface that both can reach "
           "with --network-interfaces");
}

static void examine_memory(finding_fn report, void *arg)
{
    struct statvfs disk;
    char text[128];
    if (statvfs("/dev/shm", &disk) != 0) {
        report(arg, true, "shared memory", "/dev/shm does not exist",
               "mount it: mount -t tmpfs tmpfs /dev/shm");
        return;
    }
    uint64_t free_bytes = (uint64_t)disk.f_bavail * disk.f_frsize;
    snprintf(text, sizeof text, "%llu MiB free in /dev/shm",
             (unsigned long long)(free_bytes / MIB));
    report(arg, free_bytes < LEAST_SHM, "shared memory", text,
           "enlarge it: mount -o remount,size=1G /dev/shm; in a container: --shm-size=1g, or an "
           "emptyDir of medium Memory");
}

static void examine_limits(finding_fn report, void *arg)
{
    struct rlimit files = {0}, locked = {0};
    char text[128];
    getrlimit(RLIMIT_NOFILE, &files);
    snprintf(text, sizeof text, "%llu", (unsigned long long)files.rlim_cur);
    report(arg, files.rlim_cur < LEAST_FILES, "open files", text,
           "raise the limit: ulimit -n 65536, or nofile in /etc/security/limits.conf");
    getrlimit(RLIMIT_MEMLOCK, &locked);
    if (locked.rlim_cur == RLIM_INFINITY) {
        snprintf(text, sizeof text, "unlimited");
    } else {
        snprintf(text, sizeof text, "%llu KiB (RDMA needs it unlimited)",
                 (unsigned long long)(locked.rlim_cur / KIB));
    }
    report(arg, false, "locked memory", text, "");
}

static void examine_clock(int64_t launcher_time_s, finding_fn report, void *arg)
{
    int64_t apart_s = (int64_t)time(NULL) - launcher_time_s;
    char text[64];
    snprintf(text, sizeof text, "%+lld s relative to the launcher", (long long)apart_s);
    report(arg, llabs(apart_s) > MOST_SECONDS_APART, "clock", text,
           "synchronise the clocks with NTP; until then, times in logs and timelines do not match");
}

static void examine_python(finding_fn report, void *arg)
{
    static const char *const names[] = {"python", "python3"};
    char text[256];
    for (size_t i = 0; i < N_ELEMENTS(names); i++) {
        char *argv[] = {(char *)names[i], "-c",
                        "import sys; print(sys.version.split()[0], "
                        "sys.executable)",
                        NULL};
        if (run_program(argv, PYTHON_TIMEOUT_MS, text, sizeof text) == 0) {
            text[strcspn(text, "\n")] = '\0';
            report(arg, false, "Python", text, "");
            return;
        }
    }
    report(arg, true, "Python", "neither python nor python3 in PATH",
           "install it there, or activate the environment in the launcher's shell: all hosts get "
           "its PATH");
}

static void examine_name(finding_fn report, void *arg)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    char name[256] = "", address[NI_MAXHOST] = "not known to the resolver", text[600];
    gethostname(name, sizeof name - 1);
    if (getaddrinfo(name, NULL, &hints, &found) == 0) {
        getnameinfo(found->ai_addr, found->ai_addrlen, address, sizeof address, NULL, 0,
                    NI_NUMERICHOST);
        freeaddrinfo(found);
    }
    snprintf(text, sizeof text, "%s, %s (names are not used between ranks)", name, address);
    report(arg, false, "its own name", text, "");
}

void examine_host(const char *addresses, int port, int64_t launcher_time_s, finding_fn report,
                  void *arg)
{
    char text[64];
    snprintf(text, sizeof text, "%ld", sysconf(_SC_NPROCESSORS_ONLN));
    report(arg, false, "cores", text, "");
    examine_name(report, arg);
    examine_addresses(addresses, port, report, arg);
    examine_memory(report, arg);
    examine_limits(report, arg);
    examine_clock(launcher_time_s, report, arg);
    examine_python(report, arg);
}

// --- The trial job -------------------------------------------------------------------------------

static hvd_status_t broadcast(hvd_ctx_t *ctx, int root, void *data, char *text, size_t bytes)
{
    const int64_t shape[] = {TRIAL_BYTES};
    const hvd_tensor_t tensor = {.input = data, .output = data, .n_dims = 1, .shape = shape};
    char name[32];
    hvd_handle_t handle;
    snprintf(name, sizeof name, "trial.%d", root);
    const hvd_request_t request = {.op = HVD_BROADCAST,
                                   .name = name,
                                   .dtype = HVD_UINT8,
                                   .root = root,
                                   .tensors = &tensor,
                                   .n_tensors = 1,
                                   .flags = HVD_WAITS};
    hvd_status_t status = hvd_submit(ctx, &request, &handle, text, bytes);
    if (status == HVD_OK) {
        status = hvd_wait(ctx, handle, HVD_FOREVER);
        hvd_release(ctx, handle);
    }
    return status;
}

static hvd_status_t try_roots(hvd_ctx_t *ctx, void *data, char *text, size_t bytes)
{
    hvd_status_t status = HVD_OK;
    for (int root = 0; root < hvd_size(ctx) && status == HVD_OK; root++) {
        uint64_t best_ns = UINT64_MAX;
        for (int i = 0; i < TRIAL_ROUNDS && status == HVD_OK; i++) {
            uint64_t start_ns = clock_ns();
            status = broadcast(ctx, root, data, text, bytes);
            best_ns = MIN(best_ns, clock_ns() - start_ns);
        }
        if (hvd_rank(ctx) == 0 && status == HVD_OK) {
            fprintf(stdout, "rank %d sends to the others: %.0f MB/s\n", root,
                    (double)TRIAL_BYTES * 1e3 / (double)MAX(best_ns, 1));
        }
    }
    return status;
}

int doctor_rank(void)
{
    char text[HVD_TEXT_BYTES] = "";
    uint64_t start_ns = clock_ns();
    void *data = calloc(1, TRIAL_BYTES);
    hvd_ctx_t *ctx;
    if (data == NULL || hvd_init(NULL, &ctx, text, sizeof text) != HVD_OK) {
        say("the trial job cannot start: %s", text);
        free(data);
        return 1;
    }
    if (hvd_rank(ctx) == 0) {
        fprintf(stdout, "%d ranks met within %.2f s\n", hvd_size(ctx),
                (double)(clock_ns() - start_ns) / 1e9);
    }
    hvd_status_t status = try_roots(ctx, data, text, sizeof text);
    if (status != HVD_OK) {
        say("the trial job failed: %s: %s", hvd_status_name(status), text);
    }
    hvd_shutdown(ctx);
    free(data);
    return status == HVD_OK ? 0 : 1;
}

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
    int port, n_faults;
    uint64_t deadline_ns;
    buf_t *findings; // by host
} doctor_t;

static buf_t *findings_of(doctor_t *doctor, const agent_link_t *link)
{
    int i = 0;
    while (doctor->session.links[i] != link) {
        i++;
    }
    return &doctor->findings[i];
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
    command_examine(link, doctor->addresses, doctor->port);
}

static void on_frame(session_t *session, agent_link_t *link, const frame_t *frame)
{
    doctor_t *doctor = (doctor_t *)session;
    buf_t *text = findings_of(doctor, link);
    bool is_fault = frame->finding.is_fault;
    if (frame->kind != FRAME_FINDING) {
        return;
    }
    buf_printf(text, "  %s  %s: %s\n", is_fault ? "FAULT" : "ok   ", frame->finding.what,
               frame->finding.found);
    if (is_fault) {
        buf_printf(text, "         fix: %s\n", frame->finding.fix);
    }
    doctor->n_faults += is_fault;
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
    fflush(stdout);
    return HVD_OK;
}

static hvd_status_t choose_hosts(const options_t *options, hosts_t *hosts_p, err_t *err)
{
    bool is_here = options->hosts[0] == '\0' && options->hostfile[0] == '\0';
    return is_here ? hosts_parse("localhost", 1, hosts_p, err)
                   : hosts_choose(options, hosts_p, err);
}

static void try_all(doctor_t *doctor, const options_t *options, const hosts_t *hosts)
{
    fprintf(stdout, "trial job over all hosts:");
    for (int i = 0; i < hosts->n; i++) {
        fprintf(stdout, "%s rank %d on %s", i > 0 ? "," : "", i, hosts->list[i].name);
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
    TRY(examine_all(&doctor, &hosts, &err), out);
    session_close(&doctor.session);
    if (doctor.n_faults == 0) {
        try_all(&doctor, options, &hosts);
    }
    fprintf(stdout, doctor.n_faults == 0 ? "no faults found\n" : "%d faults found\n",
            doctor.n_faults);
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
