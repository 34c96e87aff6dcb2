// SPDX-License-Identifier: Apache-2.0
//
// pmi1.c - launched by mpirun of MPICH or Intel MPI, or by srun --mpi=pmi2: a descriptor (PMI_FD)
// leads to the process manager, which answers lines of text. No MPI library is needed.
//
// Rank 0 hosts the rendezvous and leaves its ticket with the manager (put); after a barrier the
// others take it (get). Then this process says that it is done (finalize): a manager kills the job
// when the descriptor of a process that has not is closed. After that it answers no more, so the
// ticket is kept for an init after a shutdown, and rank 0 hosts again at the same port.
//
// Where an MPI library is already initialised in this process it owns the connection: the ticket
// goes through all the same, but greeting and goodbye are left to it.
//
// Every answer has a deadline. Threads: the one that calls hvd_init.
#define _GNU_SOURCE
#include "boot/launcher.h"
#include "boot/pmi1_text.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAX_FD 1048576
#define TICKET_KEY "hvd-ticket"

static const place_vars_t place_vars = {SEEN_PMI_RANK, SEEN_PMI_SIZE, SEEN_MPI_LOCALRANKID,
                                        SEEN_MPI_LOCALNRANKS};

typedef struct pmi {
    int fd, rank, size;
    uint64_t deadline_ns;
    char text[PMI1_LINE_LIMIT]; // the last answer
    pmi1_line_t line;           // points into text
    char kvsname[256];
} pmi_t;

static bool pmi_looks_right(const config_t *config)
{
    return config->seen[SEEN_PMI_FD] != NULL || config->seen[SEEN_PMI_PORT] != NULL ||
           config->seen[SEEN_PMI_RANK] != NULL || config->seen[SEEN_PMI_SIZE] != NULL;
}

// --- The connection ------------------------------------------------------------------------------

static bool wait_fd(const pmi_t *pmi, short events)
{
    for (;;) {
        struct pollfd polled = {.fd = pmi->fd, .events = events};
        uint64_t now_ns = clock_ns();
        if (now_ns >= pmi->deadline_ns) {
            return false;
        }
        uint64_t ms = (pmi->deadline_ns - now_ns) / NS_PER_MS + 1;
        if (poll(&polled, 1, (int)MIN(ms, 1000)) > 0) {
            return true;
        }
    }
}

static hvd_status_t fail_late(const pmi_t *pmi, const char *cmd, err_t *err)
{
    if (strcmp(cmd, "barrier_in") == 0) {
        return fail(
            err, HVD_TIMEOUT,
            "rank %d: the %d ranks that mpirun started did not all call init in time; let every "
            "rank call it, with the same HOROVOD_CPU_OPERATIONS, or raise HOROVOD_START_TIMEOUT",
            pmi->rank, pmi->size);
    }
    return fail(err, HVD_TIMEOUT, "rank %d: the process manager (PMI_FD=%d) does not answer \"%s\"",
                pmi->rank, pmi->fd, cmd);
}

static hvd_status_t fail_lost(const pmi_t *pmi, int code, err_t *err)
{
    return fail(err, HVD_PEER_LOST,
                "rank %d: the process manager (mpirun or srun, PMI_FD=%d) closed the connection: "
                "%s",
                pmi->rank, pmi->fd, code != 0 ? strerror(code) : "end of file");
}

static hvd_status_t send_line(const pmi_t *pmi, const char *cmd, const char *line, size_t bytes,
                              err_t *err)
{
    for (size_t sent = 0; sent < bytes;) {
        if (!wait_fd(pmi, POLLOUT)) {
            return fail_late(pmi, cmd, err);
        }
        ssize_t n = send(pmi->fd, line + sent, bytes - sent, MSG_NOSIGNAL);
        if (n < 0 && errno != EINTR && errno != EAGAIN) {
            return fail_lost(pmi, errno, err);
        }
        sent += n > 0 ? (size_t)n : 0;
    }
    return HVD_OK;
}

// One line, and nothing behind it: the manager only ever answers.
static hvd_status_t receive_line(pmi_t *pmi, const char *cmd, err_t *err)
{
    size_t len = 0;
    for (;;) {
        if (!wait_fd(pmi, POLLIN)) {
            return fail_late(pmi, cmd, err);
        }
        ssize_t n = read(pmi->fd, pmi->text + len, sizeof pmi->text - len);
        if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) {
            return fail_lost(pmi, n < 0 ? errno : 0, err);
        }
        len += n > 0 ? (size_t)n : 0;
        const char *end = memchr(pmi->text, '\n', len);
        if (end != NULL && end == pmi->text + len - 1) {
            return pmi1_parse(pmi->text, len - 1, &pmi->line, err);
        }
        if (end != NULL || len == sizeof pmi->text) {
            return fail(err, HVD_PROTOCOL,
                        "rank %d: the process manager (PMI_FD=%d) sent more than one answer to "
                        "\"%s\"",
                        pmi->rank, pmi->fd, cmd);
        }
    }
}

// Asks and waits for the answer that belongs to it.
static hvd_status_t ask(pmi_t *pmi, const char *cmd, const char *fields, const char *answer,
                        err_t *err)
{
    char line[PMI1_LINE_LIMIT];
    hvd_status_t status;
    int bytes = snprintf(line, sizeof line, "cmd=%s%s\n", cmd, fields);
    TRY(send_line(pmi, cmd, line, (size_t)bytes, err), out);
    TRY(receive_line(pmi, cmd, err), out);
    if (!pmi1_is(&pmi->line, answer)) {
        status = fail(err, HVD_PROTOCOL,
                      "rank %d: the process manager (PMI_FD=%d) answered \"%s\" with something "
                      "other than \"%s\"",
                      pmi->rank, pmi->fd, cmd, answer);
    }
out:
    wipe(line, sizeof line); // a put carries the ticket
    return status;
}

// The same where the manager has no reason to refuse.
static hvd_status_t demand(pmi_t *pmi, const char *cmd, const char *fields, const char *answer,
                           err_t *err)
{
    hvd_status_t status = ask(pmi, cmd, fields, answer, err);
    if (status == HVD_OK && !pmi1_succeeded(&pmi->line)) {
        status = fail(err, HVD_PROTOCOL, "rank %d: the process manager (PMI_FD=%d) refused \"%s\"",
                      pmi->rank, pmi->fd, cmd);
    }
    return status;
}

// --- The ticket ----------------------------------------------------------------------------------

static hvd_status_t get_ticket(pmi_t *pmi, char text[TICKET_BYTES], err_t *err)
{
    char fields[384];
    snprintf(fields, sizeof fields, " kvsname=%s key=" TICKET_KEY, pmi->kvsname);
    hvd_status_t status = ask(pmi, "get", fields, "get_result", err);

    if (status == HVD_OK &&
        !(pmi1_succeeded(&pmi->line) && pmi1_value(&pmi->line, "value", text, TICKET_BYTES))) {
        status = fail(err, HVD_PROTOCOL,
                      "rank %d: rank 0 left nothing with the process manager; do all ranks run the "
                      "same program, with the same HOROVOD_CPU_OPERATIONS?",
                      pmi->rank);
    }
    return status;
}

static hvd_status_t put_ticket(pmi_t *pmi, const char *text, err_t *err)
{
    char fields[384 + TICKET_BYTES];
    snprintf(fields, sizeof fields, " kvsname=%s key=" TICKET_KEY " value=%s", pmi->kvsname, text);
    hvd_status_t status = demand(pmi, "put", fields, "put_result", err);
    wipe(fields, sizeof fields);
    return status;
}

// Rank 0 gives `text`; the others get it there.
static hvd_status_t exchange_ticket(pmi_t *pmi, char text[TICKET_BYTES], err_t *err)
{
    hvd_status_t status;
    TRY(demand(pmi, "get_my_kvsname", "", "my_kvsname", err), out);
    if (!pmi1_value(&pmi->line, "kvsname", pmi->kvsname, sizeof pmi->kvsname)) {
        return fail(err, HVD_PROTOCOL, "rank %d: the process manager did not name a key space",
                    pmi->rank);
    }
    if (pmi->rank == 0) {
        TRY(put_ticket(pmi, text, err), out);
    }
    TRY(demand(pmi, "barrier_in", "", "barrier_out", err), out);
    if (pmi->rank != 0) {
        TRY(get_ticket(pmi, text, err), out);
    }
out:
    return status;
}

// --- An MPI library in this process --------------------------------------------------------------

static bool asks_true(void *library, const char *function)
{
    int flag = 0;
    int (*ask_mpi)(int *) = NULL;
    void *symbol = dlsym(library, function);
    memcpy(&ask_mpi, &symbol, sizeof symbol);
    return ask_mpi != NULL && ask_mpi(&flag) == 0 && flag != 0;
}

// Initialised and not finalised; nothing is loaded to find out.
static bool mpi_is_running(void)
{
    static const char *const names[] = {"libmpi.so.12", "libmpi_abi.so.1", "libmpich.so.12"};
    bool running = false;
    for (size_t i = 0; i < N_ELEMENTS(names) && !running; i++) {
        void *library = dlopen(names[i], RTLD_LAZY | RTLD_NOLOAD);
        if (library != NULL) {
            running = asks_true(library, "MPI_Initialized") && !asks_true(library, "MPI_Finalized");
            dlclose(library);
        }
    }
    return running;
}

// --- Joining -------------------------------------------------------------------------------------

static hvd_status_t find_fd(const config_t *config, pmi_t *pmi, err_t *err)
{
    const char *text = config->seen[SEEN_PMI_FD];
    if (text == NULL) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "this process seems to have been launched by %s, but PMI_FD is not set%s",
                    launcher_pmi.title,
                    config->seen[SEEN_PMI_PORT] != NULL
                        ? " (PMI_PORT is): start mpirun without -pmi-port"
                        : "; start every rank with the launcher and pass its environment on, or "
                          "unset PMI_RANK and PMI_SIZE to run alone");
    }
    if (!place_parse(text, MAX_FD, &pmi->fd)) {
        return fail(err, HVD_INVALID_ARGUMENT, "PMI_FD is \"%.60s\", not a file descriptor", text);
    }
    if (fcntl(pmi->fd, F_GETFD) < 0) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "rank %d was launched by %s, but descriptor %d (PMI_FD) is closed: a program "
                    "between the launcher and this one closed it, or this is not the process that "
                    "was launched; unset PMI_FD, PMI_RANK and PMI_SIZE to run alone",
                    pmi->rank, launcher_pmi.title, pmi->fd);
    }
    return HVD_OK;
}

// Greets, unless MPI has; exchanges the ticket; takes leave, unless MPI will.
static hvd_status_t converse(pmi_t *pmi, char text[TICKET_BYTES], err_t *err)
{
    bool mpi_owns = mpi_is_running();
    hvd_status_t status;
    if (!mpi_owns) {
        TRY(demand(pmi, "init", " pmi_version=1 pmi_subversion=1", "response_to_init", err), out);
    }
    TRY(exchange_ticket(pmi, text, err), out);
    if (!mpi_owns) {
        TRY(demand(pmi, "finalize", "", "finalize_ack", err), out);
    }
out:
    return status;
}

static hvd_status_t meet(const config_t *config, pmi_t *pmi, boot_job_t *job,
                         rendezvous_t *rendezvous, err_t *err)
{
    char text[TICKET_BYTES] = "";
    ticket_t ticket = {.port = 0};
    hvd_status_t status;
    if (pmi->rank == 0) {
        const char *n_local = config->seen[SEEN_MPI_LOCALNRANKS];
        const char *n_ranks = config->seen[SEEN_PMI_SIZE];
        bool on_one_host = n_local != NULL && n_ranks != NULL && strcmp(n_local, n_ranks) == 0;
        TRY(rendezvous_host(config, on_one_host, &ticket, rendezvous, err), out);
        ticket_encode(&ticket, text);
    }
    TRY(find_fd(config, pmi, err), out);
    TRY(converse(pmi, text, err), out);
    TRY(ticket_decode(text, &ticket, err), out);
    ticket_keep(text, pmi->size);
    TRY(rendezvous_join(&ticket, pmi->deadline_ns, job, rendezvous, err), out);
out:
    wipe(text, sizeof text);
    wipe(&ticket, sizeof ticket);
    wipe(pmi->text, sizeof pmi->text);
    return status;
}

static hvd_status_t pmi_join(const launcher_t *launcher, const config_t *config,
                             uint64_t deadline_ns, boot_job_t *job, rendezvous_t *rendezvous,
                             err_t *err)
{
    pmi_t pmi = {.deadline_ns = deadline_ns};
    hvd_status_t status;
    TRY(place_read(launcher, config, &place_vars, job, err), out);
    pmi.rank = job->rank;
    pmi.size = job->size;
    if (job->size > 1) {
        bool joined_before;
        TRY(rendezvous_rejoin(deadline_ns, job, rendezvous, &joined_before, err), out);
        if (!joined_before) {
            TRY(meet(config, &pmi, job, rendezvous, err), out);
        }
    }
out:
    return status;
}

const launcher_t launcher_pmi = {.name = "pmi",
                                 .title = "mpirun of MPICH or Intel MPI, or srun --mpi=pmi2",
                                 .looks_right = pmi_looks_right,
                                 .join = pmi_join};
