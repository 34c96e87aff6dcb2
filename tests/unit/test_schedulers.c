// SPDX-License-Identifier: Apache-2.0
//
// test_schedulers.c - lists of hosts as Slurm, LSF, PBS, SkyPilot and the MPI Operator leave them.
//
// Tables: what is in the variables, and the hosts with their slots, or a part of the refusal. The
// values are what these schedulers set. Jobs that run there are in tests/launch/test_schedulers.py.
#define _GNU_SOURCE
#include "cli/schedulers.h"
#include "launch/launch.h"

#include <setjmp.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

// Variables of the row that is being tested: NAME=value, separated by blanks.
static const char *variables;

static const char *get(const char *name)
{
    static char value[256];
    size_t bytes = strlen(name);
    for (const char *at = variables; at != NULL && *at != '\0';) {
        size_t word = strcspn(at, " ");
        if (strncmp(at, name, bytes) == 0 && at[bytes] == '=') {
            snprintf(value, sizeof value, "%.*s", (int)(word - bytes - 1), at + bytes + 1);
            return value;
        }
        at += word + strspn(at + word, " ");
    }
    return NULL;
}

static const scheduler_t *scheduler_with(const char *source)
{
    for (int i = 0; i < n_schedulers; i++) {
        if (strcmp(schedulers[i].source, source) == 0) {
            return &schedulers[i];
        }
    }
    return NULL;
}

static void describe(const hosts_t *hosts, buf_t *text)
{
    for (int i = 0; i < hosts->n; i++) {
        buf_printf(text, "%s%s:%d", i > 0 ? " " : "", hosts->list[i].name, hosts->list[i].slots);
    }
    buf_append(text, "", 1);
}

typedef struct list_row {
    const char *source, *text, *variables, *expected;
} list_row_t;

static void check_row(const list_row_t *row)
{
    const scheduler_t *scheduler = scheduler_with(row->source);
    const host_list_t list = {.source = row->source, .text = row->text, .get = get};
    hosts_t hosts = {0};
    buf_t text = {0};
    err_t err = {0};
    assert_non_null(scheduler);
    variables = row->variables;
    hvd_status_t status = scheduler->read(&list, &hosts, &err);
    if (status == HVD_OK) {
        describe(&hosts, &text);
        assert_string_equal(text.data, row->expected);
    } else {
        assert_int_equal(status, HVD_INVALID_ARGUMENT);
        if (strstr(err.text, row->expected) == NULL) {
            fail_msg("%s: not in \"%s\"", row->expected, err.text);
        }
    }
    hosts_free(&hosts);
    buf_free(&text);
}

#define SLURM "SLURM_JOB_NODELIST"
#define TASKS(counts) "SLURM_TASKS_PER_NODE=" counts

static void test_slurm(void **state)
{
    static const list_row_t rows[] = {
        {SLURM, "node1", TASKS("4"), "node1:4"},
        {SLURM, "node[1-2]", TASKS("2(x2)"), "node1:2 node2:2"},
        {SLURM, "gnode[10,20,25,37]", TASKS("1(x4)"), "gnode10:1 gnode20:1 gnode25:1 gnode37:1"},
        {SLURM, "node[1-3,7],gpu-[08-11]", TASKS("2(x3),1,4(x4)"),
         "node1:2 node2:2 node3:2 node7:1 gpu-08:4 gpu-09:4 gpu-10:4 gpu-11:4"},
        {SLURM, "hvd-l-a,hvd-l-b", TASKS("3,1"), "hvd-l-a:3 hvd-l-b:1"},
        {SLURM, "r[1-2]n[098-100]", TASKS("1(x6)"),
         "r1n098:1 r1n099:1 r1n100:1 r2n098:1 r2n099:1 r2n100:1"},
        {SLURM, "n[1-2]-ib0.site.org", TASKS("8(x2)"), "n1-ib0.site.org:8 n2-ib0.site.org:8"},
        {SLURM, "c[1,3]-[0-1]x,d", TASKS("1(x5)"), "c1-0x:1 c1-1x:1 c3-0x:1 c3-1x:1 d:1"},
        {SLURM, "node[099-101]", TASKS("1(x3)"), "node099:1 node100:1 node101:1"},
        {SLURM, "node[9-10]", TASKS("1(x2)"), "node9:1 node10:1"},
        // Inside srun -n 1 the counts are about that step.
        {SLURM, "a,b", TASKS("1") " SLURM_NTASKS=1 SLURM_NTASKS_PER_NODE=2", "a:2 b:2"},
        {SLURM, "a,b", TASKS("1") " SLURM_NTASKS=1 SLURM_JOB_CPUS_PER_NODE=3,1", "a:3 b:1"},
        {SLURM, "a,b", "SLURM_JOB_CPUS_PER_NODE=8(x2) SLURM_CPUS_PER_TASK=4", "a:2 b:2"},
        {SLURM, "a,b", "SLURM_JOB_CPUS_PER_NODE=2(x2) SLURM_CPUS_PER_TASK=4", "a:1 b:1"},
        {SLURM, "a,b,c", "SLURM_NTASKS=7", "a:3 b:2 c:2"},
        {SLURM, "a,b", "", "a:1 b:1"},
    };
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        check_row(&rows[i]);
    }
}

static void test_bad_slurm(void **state)
{
    static const list_row_t rows[] = {
        {SLURM, "a,node[1-", "", SLURM " has \"node[1-\": the bracket is not closed"},
        {SLURM, "node[1-3", "", "the bracket is not closed"},
        {SLURM, "node[3-1]", "", "has \"node[3-1]\": expected numbers"},
        {SLURM, "node[a-c]", "", "expected numbers"},
        {SLURM, "node[]", "", "expected numbers"},
        {SLURM, "node[1,]", "", "expected numbers"},
        {SLURM, "node[1-2-3]", "", "expected numbers"},
        {SLURM, "node[[1-2]]", "", "expected numbers"},
        {SLURM, "node1]", "", "not a name of a host"},
        {SLURM, "a,,b", "", "has \"\": not a name of a host"},
        {SLURM, "-oProxyCommand=x", "", "not a name of a host"},
        {SLURM, "a b", "", "has \"a b\": not a name of a host"},
        {SLURM, "node[1-99999999999]", "", "has \"node[1-99999999999]\": expected numbers"},
        {SLURM, "node[1-999999999]", "", "has \"node[1-999999999]\": too many hosts"},
        {SLURM, "n[1-1000]-[1-1000]", "", "has \"n[1-1000]-[1-1000]\": too many hosts"},
        {SLURM, "node1", TASKS("x"), "SLURM_TASKS_PER_NODE has \"x\": not a count"},
        {SLURM, "node1", TASKS("0"), "SLURM_TASKS_PER_NODE has \"0\": not a count"},
        {SLURM, "node1", TASKS("2(x"), "SLURM_TASKS_PER_NODE has \"2(x\": not a count"},
        {SLURM, "node1", TASKS("2(x1"), "not a count"},
        {SLURM, "node1", TASKS("2(x1)3"), "not a count"},
        {SLURM, "node1", TASKS("2(x99999999)"), "not a count"},
        {SLURM, "node1", TASKS("99999999999"), "not a count"},
        {SLURM, "node1", TASKS("99999999"), "has \"node1\": more than 1048576 slots"},
        {SLURM, "node1", "SLURM_NTASKS=two", "SLURM_NTASKS has \"two\": not a number"},
        {SLURM, "a,a", TASKS("1048576(x2)"), "has \"a\": host a has more than 1048576 slots"},
    };
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        check_row(&rows[i]);
    }
}

static void test_names_are_limited(void **state)
{
    char text[600] = "";
    const list_row_t row = {SLURM, text, "", "the name of a host is too long"};
    (void)state;
    memset(text, 'a', 300);
    check_row(&row);
    for (int i = 0; i < 280; i += 3) {
        memcpy(text + i, "[1]", 4);
    }
    memset(text + 282, 'a', 250);
    check_row(&row);
}

#define PBS "PBS_NODEFILE"
#define SKYPILOT "SKYPILOT_NODE_IPS"
#define OPERATOR "/etc/mpi/hostfile"

static void test_others(void **state)
{
    static const list_row_t rows[] = {
        {"LSB_DJOB_HOSTFILE", "hostA\nhostA\nhostB\nhostB\n", "", "hostA:2 hostB:2"},
        {"LSB_MCPU_HOSTS", "hostA 4 hostB 4", "", "hostA:4 hostB:4"},
        {"LSB_MCPU_HOSTS", "lsf01.site.org 16 ", "", "lsf01.site.org:16"},
        {"LSB_MCPU_HOSTS", "hostA 4 hostB", "", "LSB_MCPU_HOSTS has \"hostB\": expected names"},
        {"LSB_MCPU_HOSTS", "hostA x", "", "LSB_MCPU_HOSTS has \"hostA x\": expected names"},
        {"LSB_MCPU_HOSTS", "hostA 0", "", "expected names"},
        {"LSB_MCPU_HOSTS", "hostA 99999999999", "", "expected names"},
        {"LSB_MCPU_HOSTS", "hostA 99999999", "", "has \"hostA\": more than 1048576 slots"},
        {"LSB_HOSTS", "hostA hostA hostB", "", "hostA:2 hostB:1"},
        {PBS, "n1.cluster\nn1.cluster\nn2.cluster\nn2.cluster\n", "PBS_NUM_PPN=2",
         "n1.cluster:2 n2.cluster:2"},
        {PBS, "n1\nn2\n", "PBS_NUM_PPN=4", "n1:4 n2:4"},
        {PBS, "n1\nn2\n", "", "n1:1 n2:1"},
        {PBS, "n1\nn2\nn1\nn2\nn1\n", "", "n1:3 n2:2"},
        {PBS, "n1\nn2/0\n", "", PBS " has \"n2/0\": not a name of a host"},
        {PBS, "n1\n", "PBS_NUM_PPN=many", "PBS_NUM_PPN has \"many\": not a number"},
        {PBS, "n1\n", "PBS_NUM_PPN=999999999", "more than 1048576 slots"},
        {SKYPILOT, "10.0.0.4\n10.0.0.5", "SKYPILOT_NUM_GPUS_PER_NODE=8", "10.0.0.4:8 10.0.0.5:8"},
        {SKYPILOT, "10.0.0.4\n10.0.0.5\n", "SKYPILOT_NUM_GPUS_PER_NODE=0", "10.0.0.4:1 10.0.0.5:1"},
        {SKYPILOT, "fd00::1\nfd00::2", "", "fd00::1:1 fd00::2:1"},
        {SKYPILOT, "10.0.0.4;reboot", "", SKYPILOT " has \"10.0.0.4;reboot\": not a name"},
        {OPERATOR, "pi-worker-0.pi.default.svc slots=2\npi-worker-1.pi.default.svc slots=2\n", "",
         "pi-worker-0.pi.default.svc:2 pi-worker-1.pi.default.svc:2"},
        {OPERATOR, "w-0.w.ns.svc:8\nw-1.w.ns.svc:8\n", "", "w-0.w.ns.svc:8 w-1.w.ns.svc:8"},
        {OPERATOR, "caffe-worker-0 slots=8 max_slots=8\n", "", "caffe-worker-0:8"},
        {OPERATOR, "w-0\nw-1\n", "OMPI_MCA_orte_set_default_slots=4", "w-0:4 w-1:4"},
        {OPERATOR, "w-0 slots=99999999999\n", "", "Invalid host input in " OPERATOR ", line 1"},
    };
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        check_row(&rows[i]);
    }
}

// --- What is chosen ------------------------------------------------------------------------------

static void set_all(const char *const *env, bool is_set)
{
    for (; *env != NULL; env++) {
        char name[64];
        const char *value = strchr(*env, '=');
        snprintf(name, sizeof name, "%.*s", (int)(value - *env), *env);
        assert_int_equal(is_set ? setenv(name, value + 1, 1) : unsetenv(name), 0);
    }
}

static hvd_status_t choose(char **argv, hosts_t *hosts, err_t *err)
{
    static const char *const no_env[] = {NULL};
    options_t options;
    int n = 0;
    while (argv[n] != NULL) {
        n++;
    }
    assert_int_equal(options_read(n, argv, no_env, &options, err), HVD_OK);
    hvd_status_t status = hosts_choose(&options, hosts, err);
    options_free(&options);
    return status;
}

#define TWO_NODES "SLURM_JOB_NODELIST=n[1-2]", "SLURM_TASKS_PER_NODE=2(x2)"

static void test_flags_win(void **state)
{
    static const struct {
        const char *env[4], *flags[4], *expected;
    } rows[] = {
        {{TWO_NODES}, {NULL}, "n1:2 n2:2"},
        {{TWO_NODES}, {"-np", "3"}, "n1:2 n2:2"},
        {{TWO_NODES}, {"-H", "x:4"}, "x:4"},
        {{TWO_NODES}, {"--slots-per-host", "4"}, "n1:4 n2:4"},
        {{TWO_NODES}, {"-np", "2", "--min-np", "1"}, "localhost:2"}, // elastic
        {{"SLURM_JOB_NODELIST=n1", "SLURM_TASKS_PER_NODE=1"}, {"-np", "4"}, "n1:4"},
        // Several copies of horovodrun.
        {{TWO_NODES, "SLURM_STEP_NUM_TASKS=4"}, {"-np", "4"}, "localhost:4"},
        {{TWO_NODES, "SLURM_STEP_NUM_TASKS=1"}, {NULL}, "n1:2 n2:2"},
        {{TWO_NODES, "SLURM_STEP_NUM_TASKS=4"}, {NULL}, "SLURM_STEP_NUM_TASKS is 4"},
        {{"SKYPILOT_NODE_IPS=10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK=1"},
         {NULL},
         "on the node whose SKYPILOT_NODE_RANK is 0"},
        // A container that has not got the file.
        {{"PBS_NODEFILE=/nowhere/1.pbs"}, {"-np", "2"}, "localhost:2"},
        {{"PBS_NODEFILE=/nowhere/1.pbs"}, {NULL}, "PBS_NODEFILE names the file /nowhere/1.pbs"},
        {{"LSB_DJOB_HOSTFILE=/nowhere/1", "LSB_MCPU_HOSTS=a 2 b 2"}, {NULL}, "a:2 b:2"},
        {{"PBS_NODEFILE=/dev/null"}, {NULL}, "PBS_NODEFILE names no hosts"},
        {{NULL}, {NULL}, "the number of ranks is missing"},
        {{NULL}, {"-np", "2"}, "localhost:2"},
    };
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        char *argv[] = {PROGRAM,
                        (char *)rows[i].flags[0],
                        (char *)rows[i].flags[1],
                        (char *)rows[i].flags[2],
                        (char *)rows[i].flags[3],
                        NULL};
        hosts_t hosts = {0};
        buf_t text = {0};
        err_t err = {0};
        set_all(rows[i].env, true);
        if (choose(argv, &hosts, &err) == HVD_OK) {
            describe(&hosts, &text);
            assert_string_equal(text.data, rows[i].expected);
        } else if (strstr(err.text, rows[i].expected) == NULL) {
            fail_msg("%s: not in \"%s\"", rows[i].expected, err.text);
        }
        set_all(rows[i].env, false);
        hosts_free(&hosts);
        buf_free(&text);
    }
}

// Where the scheduler has a program for it, that starts the agents; whatever a user says wins.
static void test_starter(void **state)
{
    static const char *const env[] = {TWO_NODES, "SLURMD_NODENAME=n1", NULL};
    static const char *const no_env[] = {NULL};
    char *argv[] = {PROGRAM, "--ssh-command", "rsh", NULL};
    char file[] = "/tmp/hvd-schedulers-XXXXXX", program[64], path[64];
    (void)state;
    assert_non_null(mkdtemp(file));
    snprintf(program, sizeof program, "%s/srun", file);
    snprintf(path, sizeof path, "/nowhere:%s", file);
    char *old_path = strdup(getenv("PATH"));
    set_all(env, true);
    setenv("PATH", path, 1);
    for (int has_srun = 0; has_srun < 2; has_srun++) {
        for (int n = 1; n <= 3; n += 2) { // with and without the flag
            hosts_t hosts = {0};
            options_t options;
            err_t err = {0};
            assert_int_equal(options_read(n, argv, no_env, &options, &err), HVD_OK);
            assert_int_equal(hosts_choose(&options, &hosts, &err), HVD_OK);
            assert_true(hosts.list[0].is_local && !hosts.list[1].is_local);
            char **words = remote_command(&options, &hosts.list[1], "/bin/x");
            assert_string_equal(words[0], n == 3 ? "rsh" : has_srun ? "sh" : "ssh");
            if (n == 1 && has_srun) {
                assert_non_null(strstr(words[2], "--nodelist=\"$0\""));
                assert_string_equal(words[3], "n2");
                assert_non_null(strstr(words[4], "/bin/x"));
                assert_null(words[5]);
            }
            free_words(words);
            hosts_free(&hosts);
            options_free(&options);
        }
        FILE *made = fopen(program, "w");
        assert_non_null(made);
        fchmod(fileno(made), 0755);
        fclose(made);
    }
    setenv("PATH", old_path, 1);
    set_all(env, false);
    free(old_path);
    unlink(program);
    rmdir(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_slurm),
        cmocka_unit_test(test_bad_slurm),
        cmocka_unit_test(test_names_are_limited),
        cmocka_unit_test(test_others),
        cmocka_unit_test(test_flags_win),
        cmocka_unit_test(test_starter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
