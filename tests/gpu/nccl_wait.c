// SPDX-License-Identifier: Apache-2.0
//
// nccl_wait.c - how a collective of the simulated NCCL waits for other processes, and what it
// notices meanwhile.
//
// A process that is gone is an asynchronous error, and the collective hangs on until it is aborted,
// as the real one does. Where collectives of a device exclude each other (GPUSIM_ONE_KERNEL),
// communicators that two ranks use in different orders wait for each other for ever: each process
// tells on a board what its collective waits for, and whoever waits long follows the boards. If
// they lead back to it, the cycle is told by name.
#define _GNU_SOURCE
#include "nccl.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define BREATH_US 50
#define LOOK_NS 10000000u // at other processes
#define MAX_HOPS 16

const char *const nccl_kinds[] = {"allreduce", "broadcast", "allgather", "reducescatter",
                                  "reduce",    "send",      "receive"};

static struct {
    pthread_once_t once;
    process_t me;
    board_t *board;
} own = {.once = PTHREAD_ONCE_INIT};

static void make_board(void)
{
    own.me.pid = getpid();
    own.me.board = memfd_create("gpusim-board", MFD_CLOEXEC);
    if (own.me.board < 0 || ftruncate(own.me.board, sizeof *own.board) != 0) {
        perror("gpusim: board");
    }
    void *memory =
        mmap(NULL, sizeof *own.board, PROT_READ | PROT_WRITE, MAP_SHARED, own.me.board, 0);
    own.board = memory != MAP_FAILED ? memory : NULL;
}

process_t nccl_process(void)
{
    pthread_once(&own.once, make_board);
    return own.me;
}

void nccl_board_begin(const comm_t *comm, const call_t *call)
{
    nccl_process();
    own.board->kind = call->kind;
    own.board->number = call->number;
    own.board->communicator = comm->id;
    own.board->waits_for = (process_t){0};
    atomic_store(&own.board->busy, 1);
}

void nccl_board_end(void)
{
    atomic_store(&own.board->busy, 0);
}

static bool is_gone(process_t process)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", process.pid, process.board);
    return process.pid != 0 && access(path, F_OK) != 0; // one that nobody has waited for, too
}

// A copy of another process's board; false: it is gone, or waits for nobody.
static bool read_board(process_t process, board_t *board_p)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", process.pid, process.board);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    bool whole = file >= 0 && pread(file, board_p, sizeof *board_p, 0) == sizeof *board_p;
    if (file >= 0) {
        close(file);
    }
    return whole && atomic_load(&board_p->busy) != 0 && board_p->waits_for.pid != 0;
}

static bool find_cycle(char *text, size_t bytes)
{
    process_t at = own.me;
    size_t used = 0;
    text[0] = '\0';
    for (int hop = 0; hop < MAX_HOPS; hop++) {
        board_t board;
        if (!read_board(at, &board)) {
            return false;
        }
        int n = snprintf(text + used, bytes - used,
                         "%sprocess %d is in %s %lu of communicator %lx and waits for process %d",
                         hop > 0 ? "; " : "", at.pid, nccl_kinds[board.kind], board.number,
                         board.communicator, board.waits_for.pid);
        used = used + (size_t)n < bytes ? used + (size_t)n : bytes - 1;
        at = board.waits_for;
        if (at.pid == own.me.pid) {
            return true;
        }
    }
    return false;
}

static void look_around(comm_t *comm, const call_t *call, int missing, patience_t *patience)
{
    uint64_t now_ns = sim_now_ns();
    if (patience->since_ns == 0) {
        patience->since_ns = patience->looked_ns = now_ns;
    }
    if (now_ns - patience->looked_ns < LOOK_NS) {
        return;
    }
    patience->looked_ns = now_ns;
    process_t other = comm->shared->processes[missing];
    own.board->waits_for = other;
    if (is_gone(other) && !patience->told) {
        patience->told = true;
        atomic_store(&comm->async, NCCL_REMOTE_ERROR);
        fprintf(stderr, "gpusim: rank %d is gone while rank %d is in %s %lu\n", missing, comm->rank,
                nccl_kinds[call->kind], call->number);
    }
    char cycle[400];
    if (!patience->told && now_ns - patience->since_ns > sim.deadlock_ms * 1000000ul &&
        find_cycle(cycle, sizeof cycle)) {
        patience->told = true;
        sim_mistake(0, "collectives wait for each other for ever: %s", cycle);
        atomic_store(&comm->async, NCCL_INTERNAL_ERROR);
    }
}

bool nccl_breathe(comm_t *comm, const call_t *call, int missing, patience_t *patience)
{
    look_around(comm, call, missing, patience);
    usleep(BREATH_US);
    return !atomic_load(&comm->aborted);
}

static int first_missing(const comm_t *comm, unsigned generation)
{
    for (int r = 0; r < comm->n; r++) {
        if (atomic_load(&comm->shared->arrived_at[r]) != generation + 1) {
            return r;
        }
    }
    return comm->rank;
}

bool nccl_barrier(comm_t *comm, const call_t *call)
{
    shared_t *shared = comm->shared;
    unsigned generation = atomic_load(&shared->generation);
    atomic_store(&shared->arrived_at[comm->rank], generation + 1);
    if (atomic_fetch_add(&shared->n_arrived, 1) + 1 == comm->n) {
        atomic_store(&shared->n_arrived, 0);
        atomic_store(&shared->generation, generation + 1);
        return true;
    }
    patience_t patience = {0};
    while (atomic_load(&shared->generation) == generation) {
        if (!nccl_breathe(comm, call, first_missing(comm, generation), &patience)) {
            return false;
        }
    }
    return true;
}
