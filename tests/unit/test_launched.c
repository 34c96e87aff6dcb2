// SPDX-License-Identifier: Apache-2.0
//
// test_launched.c - under somebody else's launcher: PMI-1 against a fake process manager, PMIx
// against a fake library, torchrun's and Slurm's variables; and what is wrong in any of them.
//
// Ranks are forked; the manager is the parent, one poll loop over the ranks' descriptors. Hostile
// managers are scripts of answers. Everything stays on loopback and every wait has a deadline.
#define _GNU_SOURCE
#include "boot/launcher.h"
#include "boot/local.h"
#include "boot/pmi1_text.h"
#include "boot/sched.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h> // after ours: it has a macro named fail

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define N_FUZZ_INPUTS 20000
#define N_RANKS 3
#define MAX_ENV 16
#define ENV_BYTES 256

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(2685821657736338717);
}

// --- Environments --------------------------------------------------------------------------------

typedef struct env {
    char texts[MAX_ENV][ENV_BYTES];
    const char *pointers[MAX_ENV + 1];
    int n;
} env_t;

static void env_add(env_t *env, const char *format, ...) PRINTF_LIKE(2, 3);

static void env_add(env_t *env, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(env->texts[env->n], ENV_BYTES, format, args);
    va_end(args);
    env->pointers[env->n] = env->texts[env->n];
    env->pointers[++env->n] = NULL;
}

static hvd_status_t open_with(const char *const *env, boot_job_t *job, boot_t **boot_p, err_t *err)
{
    config_t config;
    hvd_status_t status = config_load(&config, env, NULL, err);
    if (status == HVD_OK) {
        status = boot_open(&config, NULL, job, boot_p, err);
        config_free(&config);
    }
    return status;
}

// Joins and leaves `n_turns` times; each time every rank must see what every rank gave.
static bool live(const env_t *env, const char *how, int rank, int size, int n_turns)
{
    for (int turn = 0; turn < n_turns; turn++) {
        boot_job_t job;
        boot_t *boot;
        err_t err = {.status = HVD_OK};
        const uint8_t *values[N_RANKS];
        size_t lengths[N_RANKS];
        buf_t storage = {0};
        int mine = rank * 100 + turn;

        if (open_with(env->pointers, &job, &boot, &err) != HVD_OK ||
            boot_exchange(boot, "test", &mine, sizeof mine, values, lengths, &storage, &err) !=
                HVD_OK) {
            print_error("rank %d turn %d: %s\n", rank, turn, err.text);
            return false;
        }
        bool right = job.rank == rank && job.size == size && strcmp(job.how, how) == 0;
        for (int r = 0; r < size && right; r++) {
            int expected = r * 100 + turn;
            right = lengths[r] == sizeof mine && memcmp(values[r], &expected, sizeof mine) == 0;
        }
        buf_free(&storage);
        boot_leave(boot);
        if (!right) {
            print_error("rank %d turn %d by %s: something else came back\n", rank, turn, job.how);
            return false;
        }
    }
    return true;
}

static void expect_success(const pid_t *pids, int n)
{
    int n_good = 0;
    for (int i = 0; i < n; i++) {
        int code;
        assert_int_equal(waitpid(pids[i], &code, 0), pids[i]);
        n_good += code == 0;
    }
    assert_int_equal(n_good, n);
}

// Forks the ranks; child(rank) says whether all was well.
static void run_ranks(int size, bool (*child)(int rank, void *arg), void *arg, pid_t *pids)
{
    for (int rank = 0; rank < size; rank++) {
        pids[rank] = fork();
        assert_true(pids[rank] >= 0);
        if (pids[rank] == 0) {
            _exit(child(rank, arg) ? 0 : 1);
        }
    }
}

// --- Text ----------------------------------------------------------------------------------------

static void test_pmi_lines(void **state)
{
    (void)state;
    static const char text[] = "cmd=get_result rc=0 msg=all is well value=a=b c= key= =x";
    pmi1_line_t line;
    char value[8];

    assert_int_equal(pmi1_parse(text, strlen(text), &line, NULL), HVD_OK);
    assert_true(pmi1_is(&line, "get_result"));
    assert_false(pmi1_is(&line, "get_resul"));
    assert_true(pmi1_succeeded(&line));
    assert_true(pmi1_value(&line, "value", value, sizeof value));
    assert_string_equal(value, "a=b");
    assert_true(pmi1_value(&line, "c", value, sizeof value));
    assert_string_equal(value, "");
    assert_false(pmi1_value(&line, "val", value, sizeof value));
    assert_false(pmi1_value(&line, "value", value, 3)); // does not fit
    assert_int_equal(pmi1_parse("cmd=x rc=-1", 11, &line, NULL), HVD_OK);
    assert_false(pmi1_succeeded(&line));

    static const char *const refused[] = {
        "", " ", "x", "cmd", "=cmd", "rc=0 cmd=x", "cmd=\x01", "cmd=x\tkey=1", "cmd=x \xff"};
    for (size_t i = 0; i < N_ELEMENTS(refused); i++) {
        assert_int_equal(pmi1_parse(refused[i], strlen(refused[i]), &line, NULL), HVD_PROTOCOL);
    }
    assert_int_equal(pmi1_parse("cmd=x\0y", 7, &line, NULL), HVD_PROTOCOL);
    static char longest[PMI1_LINE_LIMIT];
    memset(longest, 'a', sizeof longest);
    memcpy(longest, "cmd=", 4);
    assert_int_equal(pmi1_parse(longest, sizeof longest, &line, NULL), HVD_PROTOCOL);
    assert_int_equal(pmi1_parse(longest, sizeof longest - 1, &line, NULL), HVD_OK);
}

static void test_pmi_lines_fuzz(void **state)
{
    (void)state;
    static const char alphabet[] = "cmd=rc value-01 =\x01\xff";
    uint64_t seed = 7;
    for (int i = 0; i < N_FUZZ_INPUTS; i++) {
        size_t bytes = next_random(&seed) % 120;
        char *text = malloc(bytes + 1); // exactly as long, so that reading past it is seen
        assert_non_null(text);
        for (size_t at = 0; at < bytes; at++) {
            text[at] = at < 4 && i % 2 == 0 ? "cmd="[at]
                                            : alphabet[next_random(&seed) % (sizeof alphabet - 1)];
        }
        text = realloc(text, MAX(bytes, 1));
        pmi1_line_t line;
        char value[40];
        if (pmi1_parse(text, bytes, &line, NULL) == HVD_OK) {
            assert_in_range(line.n_fields, 1, PMI1_MAX_FIELDS);
            pmi1_value(&line, "rc", value, sizeof value);
            pmi1_succeeded(&line);
        }
        free(text);
    }
}

static void test_tickets(void **state)
{
    (void)state;
    ticket_t ticket = {.port = 12345, .addresses = "10.0.0.1,fd00::2,127.0.0.1"}, back;
    char text[TICKET_BYTES], wrong[TICKET_BYTES + 100];

    memset(ticket.secret, 0xa5, sizeof ticket.secret);
    ticket_encode(&ticket, text);
    assert_int_equal(ticket_decode(text, &back, NULL), HVD_OK);
    assert_memory_equal(back.secret, ticket.secret, sizeof ticket.secret);
    assert_int_equal(back.port, ticket.port);
    assert_string_equal(back.addresses, ticket.addresses);
    assert_null(strchr(text, ' '));
    assert_null(strchr(text, '='));

    for (size_t cut = 0; cut < strlen(text) - strlen(ticket.addresses) + 1; cut++) {
        snprintf(wrong, sizeof wrong, "%.*s", (int)cut, text);
        assert_int_equal(ticket_decode(wrong, &back, NULL), HVD_PROTOCOL);
    }
    static const char *const tails[] = {"/0/a",   "/65536/a", "/-1/a", "/ 1/a", "/01/a",
                                        "//a",    "/1/",      "/1/,a", "/1/a,", "/1/a,,b",
                                        "/1/a b", "/1/a;b",   "/1x/a", "/1/a\n"};
    for (size_t i = 0; i < N_ELEMENTS(tails); i++) {
        snprintf(wrong, sizeof wrong, "%.*s%s", 5 + SECRET_DIGITS, text, tails[i]);
        assert_int_equal(ticket_decode(wrong, &back, NULL), HVD_PROTOCOL);
    }
    memset(wrong, 'a', sizeof wrong);
    memcpy(wrong, text, strlen(text));
    wrong[sizeof wrong - 1] = '\0';
    assert_int_equal(ticket_decode(wrong, &back, NULL), HVD_PROTOCOL); // longer than there is room
}

static void test_first_host(void **state)
{
    (void)state;
    static const char *const rows[][2] = {{"node", "node"},
                                          {"a,b", "a"},
                                          {"n[01-03]", "n01"},
                                          {"n[7,9],m", "n7"},
                                          {"r[1-2]n[5,6]x", "r1n5x"},
                                          {"n[", "n"},
                                          {"n[12", "n12"},
                                          {"", ""},
                                          {"[::1]", "::1"},
                                          {"averyveryverylongname", "averyve"},
                                          {"n[123456789]", "n123456"}};
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        char host[8];
        sched_first_host(rows[i][0], host, sizeof host);
        assert_string_equal(host, rows[i][1]);
    }
}

// --- A process manager ---------------------------------------------------------------------------

typedef struct manager {
    bool spells_rc; // in every answer, and other keys in front, as Slurm does
    int n_in_barrier, n_done;
    char keys[8][300], values[8][1100];
    int n_keys;
} manager_t;

static void answer(const manager_t *manager, int fd, const char *cmd, const char *rest)
{
    char line[2048];
    int bytes =
        snprintf(line, sizeof line, "cmd=%s%s%s\n", cmd, manager->spells_rc ? " rc=0" : "", rest);
    assert_int_equal(send(fd, line, (size_t)bytes, MSG_NOSIGNAL), bytes);
}

static const char *find_value(const manager_t *manager, const char *key)
{
    for (int i = 0; i < manager->n_keys; i++) {
        if (strcmp(manager->keys[i], key) == 0) {
            return manager->values[i];
        }
    }
    return NULL;
}

static void answer_get(manager_t *manager, int fd, const pmi1_line_t *line)
{
    char key[300], rest[1200];
    assert_true(pmi1_value(line, "key", key, sizeof key));
    const char *value = find_value(manager, key);
    if (value == NULL) {
        static const char refusal[] = "cmd=get_result rc=-1 msg=key not found value=unknown\n";
        assert_true(send(fd, refusal, strlen(refusal), MSG_NOSIGNAL) > 0);
        return;
    }
    snprintf(rest, sizeof rest, " msg=success value=%s", value);
    answer(manager, fd, "get_result", rest);
}

static void answer_line(manager_t *manager, const int *fds, int who, const pmi1_line_t *line)
{
    int fd = fds[who];
    if (pmi1_is(line, "init")) {
        answer(manager, fd, "response_to_init", " pmi_version=1 pmi_subversion=1");
    } else if (pmi1_is(line, "get_my_kvsname")) {
        answer(manager, fd, "my_kvsname", " kvsname=kvs_1");
    } else if (pmi1_is(line, "put")) {
        assert_true(pmi1_value(line, "key", manager->keys[manager->n_keys], 300));
        assert_true(pmi1_value(line, "value", manager->values[manager->n_keys], 1024));
        manager->n_keys++;
        answer(manager, fd, "put_result", " msg=success");
    } else if (pmi1_is(line, "get")) {
        answer_get(manager, fd, line);
    } else if (pmi1_is(line, "barrier_in")) {
        manager->n_in_barrier++;
        for (int i = 0; manager->n_in_barrier == N_RANKS && i < N_RANKS; i++) {
            answer(manager, fds[i], "barrier_out", "");
        }
    } else if (pmi1_is(line, "finalize")) {
        answer(manager, fd, "finalize_ack", "");
        manager->n_done++;
    } else {
        fail_msg("a rank asked for something else");
    }
}

// Answers until every rank has finalised. A rank sends one line and waits.
static void manage(manager_t *manager, const int *fds)
{
    while (manager->n_done < N_RANKS) {
        struct pollfd polled[N_RANKS];
        for (int i = 0; i < N_RANKS; i++) {
            polled[i] = (struct pollfd){.fd = fds[i], .events = POLLIN};
        }
        assert_true(poll(polled, N_RANKS, 60000) > 0);
        for (int i = 0; i < N_RANKS; i++) {
            char text[PMI1_LINE_LIMIT];
            pmi1_line_t line;
            if (polled[i].revents == 0) {
                continue;
            }
            ssize_t n = read(fds[i], text, sizeof text);
            assert_true(n > 1 && text[n - 1] == '\n'); // no end of file before finalize
            assert_int_equal(pmi1_parse(text, (size_t)n - 1, &line, NULL), HVD_OK);
            answer_line(manager, fds, i, &line);
            if (manager->n_done == N_RANKS) {
                return;
            }
        }
    }
}

static bool live_under_pmi(int rank, void *arg)
{
    env_t env = {.n = 0};
    env_add(&env, "PMI_FD=%d", ((const int *)arg)[rank]);
    env_add(&env, "PMI_RANK=%d", rank);
    env_add(&env, "PMI_SIZE=%d", N_RANKS);
    env_add(&env, "MPI_LOCALRANKID=%d", rank);
    env_add(&env, "MPI_LOCALNRANKS=%d", N_RANKS);
    env_add(&env, "HOROVOD_GLOO_IFACE=lo");
    return live(&env, "pmi", rank, N_RANKS, 3);
}

// The second and third turn go without the manager: it has closed its ends by then.
static void run_pmi(bool spells_rc)
{
    manager_t *manager = calloc(1, sizeof *manager);
    int ours[N_RANKS], theirs[N_RANKS];
    pid_t pids[N_RANKS];
    assert_non_null(manager);
    manager->spells_rc = spells_rc;
    for (int i = 0; i < N_RANKS; i++) {
        int ends[2];
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
        ours[i] = ends[0];
        theirs[i] = ends[1];
    }
    run_ranks(N_RANKS, live_under_pmi, theirs, pids);
    for (int i = 0; i < N_RANKS; i++) {
        close(theirs[i]);
    }
    manage(manager, ours);
    for (int i = 0; i < N_RANKS; i++) {
        close(ours[i]);
    }
    expect_success(pids, N_RANKS);
    assert_int_equal(manager->n_keys, 1);
    free(manager);
}

static void test_pmi(void **state)
{
    (void)state;
    run_pmi(false);
    run_pmi(true);
}

// --- Hostile managers ----------------------------------------------------------------------------

typedef struct script {
    const char *answers[6]; // to one question each; NULL: hangs up
    hvd_status_t status;
    const char *sentence; // part of it
} script_t;

#define GREETING "cmd=response_to_init rc=0\n"
#define NAMED "cmd=my_kvsname kvsname=k\n"
#define OPEN "cmd=barrier_out\n"

static const script_t scripts[] = {
    {{NULL}, HVD_PEER_LOST, "closed the connection"},
    {{"cmd=response_to_init rc=-1\n"}, HVD_PROTOCOL, "refused \"init\""},
    {{"\x01\x02\x03\n"}, HVD_PROTOCOL, "not text"},
    {{"hello\n"}, HVD_PROTOCOL, "not an answer of the PMI-1 protocol"},
    {{"cmd=my_kvsname rc=0\n"}, HVD_PROTOCOL, "other than \"response_to_init\""},
    {{GREETING GREETING}, HVD_PROTOCOL, "more than one answer"},
    {{GREETING "cmd="}, HVD_PROTOCOL, "more than one answer"},
    {{"cmd=resp", NULL}, HVD_TIMEOUT, "does not answer"},
    {{GREETING, "cmd=my_kvsname\n"}, HVD_PROTOCOL, "did not name a key space"},
    {{GREETING, NAMED, ""}, HVD_TIMEOUT, "the same HOROVOD_CPU_OPERATIONS"},
    {{GREETING, NAMED, OPEN, "cmd=get_result rc=-1\n"},
     HVD_PROTOCOL,
     "rank 0 left nothing with the process manager; do all ranks run the same program, with the "
     "same HOROVOD_CPU_OPERATIONS?"},
    {{GREETING, NAMED, OPEN, "cmd=get_result rc=0 value=hvd1/x/1/a\n", "cmd=finalize_ack\n"},
     HVD_PROTOCOL,
     "cannot be read"},
};

typedef struct hostile {
    const script_t *script;
    int fd;
} hostile_t;

// A line for every line; an empty answer is silence until the rank gives up.
static void *act(void *arg)
{
    hostile_t *hostile = arg;
    char text[PMI1_LINE_LIMIT];
    for (size_t i = 0; i < N_ELEMENTS(hostile->script->answers); i++) {
        const char *line = hostile->script->answers[i];
        if (read(hostile->fd, text, sizeof text) <= 0) {
            break;
        }
        if (line == NULL) {
            break;
        }
        if (send(hostile->fd, line, strlen(line), MSG_NOSIGNAL) < 0) {
            break;
        }
    }
    shutdown(hostile->fd, SHUT_WR);
    return NULL;
}

static void test_hostile_managers(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(scripts); i++) {
        int ends[2];
        pthread_t thread;
        env_t env = {.n = 0};
        boot_job_t job;
        boot_t *boot;
        err_t err = {.status = HVD_OK};

        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
        hostile_t hostile = {&scripts[i], ends[0]};
        assert_int_equal(pthread_create(&thread, NULL, act, &hostile), 0);
        env_add(&env, "PMI_FD=%d", ends[1]);
        env_add(&env, "PMI_RANK=1");
        env_add(&env, "PMI_SIZE=2");
        env_add(&env, "HOROVOD_START_TIMEOUT=1");
        assert_int_equal(open_with(env.pointers, &job, &boot, &err), scripts[i].status);
        if (strstr(err.text, scripts[i].sentence) == NULL) {
            fail_msg("script %zu gave: %s", i, err.text);
        }
        close(ends[1]);
        pthread_join(thread, NULL);
        close(ends[0]);
    }
}

// A line without end must not be read without end.
static void test_endless_line(void **state)
{
    (void)state;
    static char flood[2 * PMI1_LINE_LIMIT];
    int ends[2], room = 4 * (int)PMI1_LINE_LIMIT;
    env_t env = {.n = 0};
    boot_job_t job;
    boot_t *boot;
    err_t err = {.status = HVD_OK};

    memset(flood, 'a', sizeof flood);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    assert_int_equal(send(ends[0], flood, sizeof flood, MSG_DONTWAIT), sizeof flood);
    env_add(&env, "PMI_FD=%d", ends[1]);
    env_add(&env, "PMI_RANK=1");
    env_add(&env, "PMI_SIZE=2");
    assert_int_equal(open_with(env.pointers, &job, &boot, &err), HVD_PROTOCOL);
    assert_non_null(strstr(err.text, "more than one answer"));
    close(ends[0]);
    close(ends[1]);
}

// --- PMIx ----------------------------------------------------------------------------------------

static int remove_one(const char *path, const struct stat *seen, int type, struct FTW *place)
{
    (void)seen;
    (void)type;
    (void)place;
    return remove(path);
}

// The library asks the process's own environment, as the real one does.
static void live_with_pmix(int rank, const char *folder, const char *fault, int size, env_t *env)
{
    char number[16];
    snprintf(number, sizeof number, "%d", rank);
    setenv("PMIX_RANK", number, 1);
    setenv("PMIX_NAMESPACE", "test", 1);
    setenv("FAKE_PMIX_DIR", folder, 1);
    setenv("FAKE_PMIX", fault, 1);
    snprintf(number, sizeof number, "%d", size);
    setenv("FAKE_PMIX_SIZE", number, 1);
    env_add(env, "PMIX_RANK=%d", rank);
    env_add(env, "PMIX_NAMESPACE=test");
    env_add(env, "PMIX_PREFIX=%s", FAKE_PMIX_PREFIX);
    env_add(env, "HOROVOD_GLOO_IFACE=lo");
}

static bool live_under_pmix(int rank, void *folder)
{
    env_t env = {.n = 0};
    live_with_pmix(rank, folder, "", N_RANKS, &env);
    return live(&env, "pmix", rank, N_RANKS, 3);
}

static void test_pmix(void **state)
{
    (void)state;
    char folder[] = "/tmp/hvd-pmix-XXXXXX";
    pid_t pids[N_RANKS];

    assert_non_null(mkdtemp(folder));
    run_ranks(N_RANKS, live_under_pmix, folder, pids);
    expect_success(pids, N_RANKS);
    nftw(folder, remove_one, 8, FTW_DEPTH);
}

static const struct {
    const char *fault;
    int size;
    hvd_status_t status;
    const char *sentence;
} pmix_faults[] = {
    {"init", 2, HVD_SYSTEM, "PMIx_Init failed with PMIx code -25"},
    {"type", 2, HVD_SYSTEM,
     "PMIx_Get of the job's size failed with PMIx code -1; this process seems to have been "
     "launched by mpirun of Open MPI, or srun --mpi=pmix; do all ranks run the same program, with "
     "the same "
     "HOROVOD_CPU_OPERATIONS?"},
    {"crash", 2, HVD_SYSTEM, "ended without an answer"},
    {"hang", 2, HVD_TIMEOUT, "did not all call init in time"},
    {"", 0, HVD_PROTOCOL, "PMIx says rank 0 of 0"},
    {"", 1, HVD_OK, ""},
};

static bool fail_under_pmix(int which, void *folder)
{
    env_t env = {.n = 0};
    boot_job_t job;
    boot_t *boot;
    err_t err = {.status = HVD_OK};
    live_with_pmix(0, folder, pmix_faults[which].fault, pmix_faults[which].size, &env);
    env_add(&env, "HOROVOD_START_TIMEOUT=2");
    hvd_status_t status = open_with(env.pointers, &job, &boot, &err);
    bool right = status == pmix_faults[which].status &&
                 strstr(err.text, pmix_faults[which].sentence) != NULL;
    if (status == HVD_OK) {
        right = right && job.size == 1 && job.rank == 0;
        boot_leave(boot);
    }
    // Nobody of ours is left behind.
    right = right && waitpid(-1, NULL, WNOHANG) < 0 && errno == ECHILD;
    if (!right) {
        print_error("fault %s: %d %s\n", pmix_faults[which].fault, (int)status, err.text);
    }
    return right;
}

static void test_pmix_faults(void **state)
{
    (void)state;
    char folder[] = "/tmp/hvd-pmix-XXXXXX";
    pid_t pids[N_ELEMENTS(pmix_faults)];

    assert_non_null(mkdtemp(folder));
    run_ranks(N_ELEMENTS(pmix_faults), fail_under_pmix, folder, pids);
    expect_success(pids, N_ELEMENTS(pmix_faults));
    nftw(folder, remove_one, 8, FTW_DEPTH);
}

// --- Variables only ------------------------------------------------------------------------------

static bool live_under_torchrun(int rank, void *arg)
{
    env_t env = {.n = 0};
    env_add(&env, "TORCHELASTIC_RUN_ID=test-%d", (int)getppid());
    env_add(&env, "RANK=%d", rank);
    env_add(&env, "WORLD_SIZE=%d", N_RANKS);
    env_add(&env, "LOCAL_RANK=%d", rank);
    env_add(&env, "LOCAL_WORLD_SIZE=%d", N_RANKS);
    env_add(&env, "MASTER_ADDR=127.0.0.1");
    env_add(&env, "MASTER_PORT=29500");
    env_add(&env, "HOROVOD_GLOO_IFACE=lo");
    env_add(&env, "PMI_RANK=0"); // of an srun that started torchrun
    (void)arg;
    return live(&env, "torchrun", rank, N_RANKS, 3);
}

static bool live_under_slurm(int rank, void *secret_file)
{
    env_t env = {.n = 0};
    env_add(&env, "SLURM_JOB_ID=%d", (int)getppid());
    env_add(&env, "SLURM_STEP_ID=0");
    env_add(&env, "SLURM_PROCID=%d", rank);
    env_add(&env, "SLURM_STEP_NUM_TASKS=%d", N_RANKS);
    env_add(&env, "SLURM_STEP_NUM_NODES=%d", N_RANKS);
    env_add(&env, "SLURM_STEP_NODELIST=localhos[t-x]");
    env_add(&env, "HOROVOD_SECRET_FILE=%s", (const char *)secret_file);
    return live(&env, "slurm", rank, N_RANKS, 3);
}

static void test_variables_on_one_host(void **state)
{
    (void)state;
    pid_t pids[N_RANKS];
    run_ranks(N_RANKS, live_under_torchrun, NULL, pids);
    expect_success(pids, N_RANKS);
}

static void test_variables_with_a_secret_file(void **state)
{
    (void)state;
    char path[] = "/tmp/hvd-secret-XXXXXX";
    int fd = mkstemp(path); // mode 0600
    pid_t pids[N_RANKS];

    assert_true(fd >= 0);
    for (int i = 0; i < 64; i++) {
        assert_int_equal(write(fd, "7", 1), 1);
    }
    close(fd);
    run_ranks(N_RANKS, live_under_slurm, path, pids);
    expect_success(pids, N_RANKS);
    unlink(path);
}

static const struct {
    const char *env[6];
    const char *sentence;
} mistakes[] = {
    {{"PMI_RANK=1"}, "MPICH or Intel MPI, or srun --mpi=pmi2, but PMI_SIZE is not set"},
    {{"PMI_SIZE=2"}, "but PMI_RANK is not set"},
    {{"PMI_FD=5"}, "but PMI_RANK is not set"},
    {{"PMI_RANK=0", "PMI_SIZE=2"}, "but PMI_FD is not set; start"},
    {{"PMI_RANK=0", "PMI_SIZE=2", "PMI_PORT=a:1"}, "mpirun without -pmi-port"},
    {{"PMI_RANK=0", "PMI_SIZE=2", "PMI_FD=x"}, "not a file descriptor"},
    {{"PMI_RANK=0", "PMI_SIZE=2", "PMI_FD=987654"}, "descriptor 987654 (PMI_FD) is closed"},
    {{"PMI_RANK=2", "PMI_SIZE=2"}, "PMI_RANK=2 is not less than PMI_SIZE=2"},
    {{"PMI_RANK=-1", "PMI_SIZE=2"}, "PMI_RANK is \"-1\", not a number"},
    {{"PMI_RANK=0", "PMI_SIZE=99999999999999999999"}, "not a number from 0"},
    {{"PMI_RANK=0", "PMI_SIZE=2", "MPI_LOCALRANKID=5", "MPI_LOCALNRANKS=2"}, "MPI_LOCALRANKID=5"},
    {{"PMIX_RANK=0"}, "mpirun of Open MPI, or srun --mpi=pmix, but PMIX_NAMESPACE is not set"},
    {{"PMIX_NAMESPACE=x"}, "but PMIX_RANK is not set"},
    {{"PMIX_NAMESPACE=x", "PMIX_RANK=one"}, "PMIX_RANK is \"one\""},
    {{"OMPI_COMM_WORLD_RANK=0"}, "without PMIx, but OMPI_COMM_WORLD_SIZE is not set"},
    {{"OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=2"}, "HOROVOD_SECRET_FILE"},
    {{"SLURM_PROCID=0", "SLURM_STEP_ID=0"}, "srun without --mpi, but SLURM_STEP_NUM_TASKS"},
    {{"SLURM_PROCID=0", "SLURM_STEP_ID=0", "SLURM_STEP_NUM_TASKS=2", "SLURM_STEP_NUM_NODES=2"},
     "openssl rand -hex 32"},
    {{"TORCHELASTIC_RUN_ID=x", "RANK=0"}, "launched by torchrun, but WORLD_SIZE is not set"},
    {{"RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=a"}, "RANK and WORLD_SIZE, on several hosts"},
    {{"HOROVOD_RANK=0", "PMI_RANK=0", "PMI_SIZE=2", "PMI_FD=5"}, "HOROVOD_SIZE is not"},
};

static void test_mistakes(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(mistakes); i++) {
        boot_job_t job;
        boot_t *boot;
        err_t err = {.status = HVD_OK};
        assert_int_equal(open_with(mistakes[i].env, &job, &boot, &err), HVD_INVALID_ARGUMENT);
        if (strstr(err.text, mistakes[i].sentence) == NULL) {
            fail_msg("expected \"%s\" in: %s", mistakes[i].sentence, err.text);
        }
    }
}

static const struct {
    const char *env[6];
    const char *launcher;
} alone[] = {
    {{NULL}, "self"},
    {{"SLURM_PROCID=0", "SLURM_NTASKS=8"}, "self"}, // a batch script
    {{"RANK=3"}, "self"},
    {{"WORLD_SIZE=3"}, "self"},
    {{"PMI_RANK=0", "PMI_SIZE=1", "PMI_FD=987654"}, "pmi"},
    {{"SLURM_PROCID=0", "SLURM_STEP_ID=0", "SLURM_STEP_NUM_TASKS=1"}, "slurm"},
    {{"RANK=0", "WORLD_SIZE=1"}, "torch-env"},
};

static void test_worlds_of_one(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(alone); i++) {
        boot_job_t job;
        boot_t *boot;
        err_t err = {.status = HVD_OK};
        assert_int_equal(open_with(alone[i].env, &job, &boot, &err), HVD_OK);
        assert_string_equal(job.how, alone[i].launcher);
        assert_int_equal(job.size, 1);
        boot_leave(boot);
    }
}

// --- Collectives by MPI --------------------------------------------------------------------------

// With a library and mpirun: tests/foreign_launchers.
static void test_mpi_without_mpirun(void **state)
{
    (void)state;
    static const struct {
        const char *env[3];
        hvd_status_t status;
        const char *sentence;
    } rows[] = {
        {{"HOROVOD_CPU_OPERATIONS=MPI"},
         HVD_INVALID_ARGUMENT,
         "this process was not started by mpirun"},
        {{"HOROVOD_CONTROLLER=mpi"},
         HVD_INVALID_ARGUMENT,
         "this process was not started by mpirun"},
        {{"HOROVOD_CPU_OPERATIONS=MPI", "HOROVOD_ENCRYPT=always"},
         HVD_INVALID_ARGUMENT,
         "HOROVOD_ENCRYPT is always"},
        {{"HOROVOD_CPU_OPERATIONS=smoke"}, HVD_INVALID_ARGUMENT, "one of native|mpi|gloo|ccl"},
        {{"HOROVOD_CONTROLLER=mpi", "HOROVOD_CPU_OPERATIONS=gloo"}, HVD_OK, ""},
    };
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        const hvd_options_t options = {.env = rows[i].env};
        char text[HVD_TEXT_BYTES] = "";
        hvd_ctx_t *ctx;
        assert_int_equal(hvd_init(&options, &ctx, text, sizeof text), rows[i].status);
        assert_non_null(strstr(text, rows[i].sentence));
        if (rows[i].status == HVD_OK) {
            assert_int_equal(hvd_shutdown(ctx), HVD_OK);
        }
    }
}

// --- The local socket ----------------------------------------------------------------------------

typedef struct giver {
    char job[64];
    hvd_status_t status;
} giver_t;

static void *give(void *arg)
{
    giver_t *giver = arg;
    giver->status = local_give(giver->job, "the ticket", 1, deadline_in_ms(60000), NULL);
    return NULL;
}

static void test_local(void **state)
{
    (void)state;
    giver_t giver = {.status = HVD_IN_PROGRESS};
    pthread_t thread;
    char ticket[TICKET_BYTES];
    err_t err;

    snprintf(giver.job, sizeof giver.job, "test-%d", (int)getpid());
    assert_int_equal(local_take(giver.job, deadline_in_ms(50), ticket, &err), HVD_TIMEOUT);
    assert_int_equal(local_give(giver.job, "x", 1, deadline_in_ms(50), &err), HVD_TIMEOUT);
    assert_non_null(strstr(err.text, "only 1 of 2 ranks"));
    assert_int_equal(pthread_create(&thread, NULL, give, &giver), 0);
    assert_int_equal(local_take(giver.job, deadline_in_ms(60000), ticket, &err), HVD_OK);
    assert_string_equal(ticket, "the ticket");
    pthread_join(thread, NULL);
    assert_int_equal(giver.status, HVD_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pmi), // those that fork come first: there are no threads yet
        cmocka_unit_test(test_pmix),
        cmocka_unit_test(test_pmix_faults),
        cmocka_unit_test(test_variables_on_one_host),
        cmocka_unit_test(test_variables_with_a_secret_file),
        cmocka_unit_test(test_pmi_lines),
        cmocka_unit_test(test_pmi_lines_fuzz),
        cmocka_unit_test(test_tickets),
        cmocka_unit_test(test_first_host),
        cmocka_unit_test(test_mistakes),
        cmocka_unit_test(test_worlds_of_one),
        cmocka_unit_test(test_hostile_managers),
        cmocka_unit_test(test_endless_line),
        cmocka_unit_test(test_local),
        cmocka_unit_test(test_mpi_without_mpirun),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
