// SPDX-License-Identifier: Apache-2.0
//
// test_local.c - what ranks of one host do without messages: blocks copied straight from process to
// process, and operations that meet on the board; also where that is refused, or somebody is late.
#include "cases.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static int members[MAX_RANKS];

static void open_all(rank_t *r)
{
    for (int m = 0; m < r->size; m++) {
        members[m] = m;
    }
    rank_open(r);
}

// Blocks that go straight from process to process.
static void run_moves(rank_t *r, uint64_t seed)
{
    static const hvd_op_t ops[] = {HVD_ALLGATHER, HVD_BROADCAST, HVD_ALLTOALL};
    dice_t dice = {.state = seed};
    for (int k = 0; k < FEWER(60); k++) {
        op_case_t c = op_random(&dice, 0, members, r->size, 200 * KIB);
        c.op = ops[dice_below(&dice, N_ELEMENTS(ops))];
        c.reduce = HVD_SUM;
        c.pre = c.post = 1;
        c.rounding = false;
        c.root = (int)dice_below(&dice, (size_t)r->size);
        c.n_dims = 1;
        c.columns = 1;
        c.n_tensors = c.op != HVD_ALLTOALL ? 1 + (int)dice_below(&dice, 3) : 1;
        c.rows = (40 * KIB + dice_below(&dice, k % 10 == 0 ? 8 * MIB : 300 * KIB)) /
                 hvd_dtype_bytes(c.dtype) * (c.op == HVD_ALLTOALL ? (size_t)r->size : 1);
        char text[STEP_BYTES];
        op_describe(&c, text, sizeof text);
        rank_step(r, "%s", text);
        op_run(r, &c, NULL);
    }
}

static void moves(rank_t *r, void *arg)
{
    (void)arg;
    open_all(r);
    run_moves(r, 11);
    rank_close(r);
}

// One rank does not let others into its memory: all must go through windows.
static void moves_unless_one_refuses(rank_t *r, void *arg)
{
    (void)arg;
    rank_setenv(r, "HOROVOD_DIRECT_COPY", r->rank == r->size - 1 ? "0" : "1");
    open_all(r);
    run_moves(r, 12);
    rank_close(r);
}

// The kernel answers `number` with EPERM from now on, as containers make it.
static void forbid(rank_t *r, unsigned number)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = N_ELEMENTS(code), .filter = code};
    CHECK_INT(r, prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
    CHECK_INT(r, prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

// It worked at the start, and no longer does, for some ranks and for one direction first.
static void moves_until_forbidden(rank_t *r, void *arg)
{
    (void)arg;
    open_all(r);
    run_moves(r, 13);
    if (r->rank == 0) {
        forbid(r, SYS_process_vm_writev);
    }
    run_moves(r, 14);
    if (r->rank == 1) {
        forbid(r, SYS_process_vm_readv);
    }
    run_moves(r, 15);
    rank_close(r);
}

// The same names again and again, each waited for at once: they meet on the board, unless a rank is
// late. Blocks differ from member to member and from time to time, and some are long.
static void meetings(rank_t *r, void *arg)
{
    (void)arg;
    enum { N_NAMES = 12 };
    static const hvd_op_t ops[] = {HVD_ALLGATHER, HVD_BROADCAST, HVD_ALLTOALL, HVD_REDUCESCATTER,
                                   HVD_ALLREDUCE};
    open_all(r);
    dice_t dice = {.state = r->options->seed};
    dice_t own = {.state = (uint64_t)r->rank + 100};
    op_case_t cases[N_NAMES];
    for (int i = 0; i < N_NAMES; i++) {
        do {
            cases[i] = op_random(&dice, 0, members, r->size, 6 * KIB);
        } while (cases[i].op != ops[i % N_ELEMENTS(ops)] || cases[i].reduce == HVD_ADASUM);
    }
    for (int k = 0; k < FEWER(3000); k++) {
        int i = (int)dice_below(&dice, N_NAMES);
        op_case_t c = cases[i];
        char name[32], text[STEP_BYTES];
        snprintf(name, sizeof name, "meeting.%d", i);
        c.salt = (unsigned)dice_below(&dice, 12);
        c.root = i % r->size;
        c.rows *= dice_below(&dice, 20) == 0 ? 30 : 1;
        if (c.op == HVD_ALLTOALL && c.salt % 4 == 0) {
            c.rows = c.rows / (size_t)r->size * (size_t)r->size; // even splits
        }
        op_describe(&c, text, sizeof text);
        rank_step(r, "%d: %s: %s", k, name, text);
        if (dice_below(&own, 50) == 0) {
            usleep((useconds_t)dice_below(&own, 500));
        }
        op_run(r, &c, name);
    }
    rank_close(r);
}

// Also where ranks share cores, and small blocks.
#define DIRECT "HOROVOD_ALGORITHM=allgather=direct,broadcast=direct,alltoall=direct"

static const subtest_t subtests[] = {
    {.name = "moves", .fn = moves},
    {.name = "moves, forced", .fn = moves, .env = {DIRECT}},
    {.name = "moves, through windows", .fn = moves, .env = {"HOROVOD_DIRECT_COPY=0"}},
    {.name = "moves, one refuses", .fn = moves_unless_one_refuses, .env = {DIRECT}},
    {.name = "moves, until forbidden", .fn = moves_until_forbidden, .env = {DIRECT}},
    {.name = "meetings", .fn = meetings},
    {.name = "small moves, forced", .fn = meetings, .env = {DIRECT}},
    {.name = "meetings, through windows", .fn = meetings, .env = {"HOROVOD_DIRECT_COPY=0"}},
};

int main(int argc, char **argv)
{
    return ranks_main(argc, argv, subtests, (int)N_ELEMENTS(subtests));
}
