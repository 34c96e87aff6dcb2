// SPDX-License-Identifier: Apache-2.0
//
// test_launch.c - the parts of horovodrun that are pure: options, hosts, plan, output, endings,
// environment, frames, and the commands for ssh and mpirun.
//
// Tables of input and expected result; options are walked row by row, so a new one is tested the
// moment it is written. Whole jobs are tested in tests/launch.
#define _GNU_SOURCE
#include "launch/elastic.h"
#include "launch/gather.h"
#include "launch/launch.h"

#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

static const char *const no_env[] = {NULL};

// --- Options -------------------------------------------------------------------------------------

static hvd_status_t read_words(const char *line, const char *const *env, options_t *options,
                               char ***words_p, err_t *err)
{
    int n = 0;
    *words_p = split_words(line);
    assert_non_null(*words_p);
    while ((*words_p)[n] != NULL) {
        n++;
    }
    return options_read(n, *words_p, env, options, err);
}

static void write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

// "a.b" and value as nested maps.
static void nest(const char *key, const char *value, char *text, size_t bytes)
{
    const char *dot = strchr(key, '.');
    if (dot != NULL) {
        snprintf(text, bytes, "%.*s:\n  %s: %s\n", (int)(dot - key), key, dot + 1, value);
    } else {
        snprintf(text, bytes, "%s: %s\n", key, value);
    }
}

// Some value that is allowed and not the default, as a flag has it and as the environment has it.
static void pick_value(const option_t *option, char flag[64], char env[64])
{
    const char *kind = option->info.kind;
    snprintf(flag, 64, "%s", "words");
    if (strcmp(kind, "int") == 0) {
        snprintf(flag, 64, "%d", (int)MIN(option->info.min + 7, option->info.max));
    } else if (strcmp(kind, "real") == 0) {
        snprintf(flag, 64, "%g", MIN(option->info.min + 0.5, option->info.max));
    } else if (strcmp(kind, "choice") == 0) {
        snprintf(flag, 64, "%s", strchr(option->info.choices, '|') + 1);
        flag[strcspn(flag, "|")] = '\0';
    } else if (strcmp(kind, "bool") == 0) {
        snprintf(flag, 64, "1");
    } else if (strcmp(kind, "bytes") == 0) {
        snprintf(flag, 64, "3");
    } else if ((option->traits & TWO_WORDS) != 0) {
        snprintf(flag, 64, "1 2");
    }
    snprintf(env, 64, "%s", strcmp(kind, "bytes") == 0 ? "3145728" : flag);
}

static void assert_option(int i, const char *line, const char *const *env, const char *expected,
                          origin_t origin)
{
    options_t options;
    char **words;
    err_t err = {0};
    if (read_words(line, env, &options, &words, &err) != HVD_OK) {
        fail_msg("%s: %s", line, err.text);
    }
    assert_string_equal(option_text(&options, i), expected);
    assert_int_equal(options.origins[i], origin);
    options_free(&options);
    free_words(words);
}

static void test_flag_environment_and_file_agree(void **state)
{
    char path[] = "/tmp/test_launch.XXXXXX";
    int n_tested = 0;
    (void)state;
    close(mkstemp(path));
    for (int i = 0; i < N_OPTIONS; i++) {
        option_t option = option_at(i);
        char flag[64], env[64], line[256], entry[256], yaml[256];
        if (option.info.flag[0] == '\0' || option.info.yaml[0] == '\0') {
            continue;
        }
        bool is_bool = strcmp(option.info.kind, "bool") == 0;
        bool is_inverted = is_bool && strncmp(option.info.flag, "--no-", 5) == 0;
        pick_value(&option, flag, env);
        assert_string_not_equal(env, option.info.default_text);

        bool is_bare = (option.traits & BARE) != 0;
        snprintf(line, sizeof line, "x %s%s%s", option.info.flag,
                 is_bool   ? ""
                 : is_bare ? "="
                           : " ",
                 is_bool ? "" : flag);
        assert_option(i, line, no_env, env, BY_FLAG);
        if (!is_bool && (option.traits & TWO_WORDS) == 0) {
            snprintf(line, sizeof line, "x %s=%s command --with words", option.info.flag, flag);
            assert_option(i, line, no_env, env, BY_FLAG);
        }
        snprintf(entry, sizeof entry, "%s=%s", option.info.env, env);
        const char *const environment_list[] = {"A=b", entry, NULL};
        assert_option(i, "x", environment_list, env, BY_ENVIRONMENT);

        nest(option.info.yaml, is_inverted ? "false" : flag, yaml, sizeof yaml);
        write_file(path, yaml);
        snprintf(line, sizeof line, "x --config-file %s", path);
        assert_option(i, line, environment_list, env, BY_FILE);
        if (is_bare) {
            snprintf(line, sizeof line, "x %s 7", option.info.flag);
            assert_option(i, line, environment_list, "0", BY_FLAG);
        }
        n_tested++;
    }
    assert_true(n_tested > 40);
    unlink(path);
}

static void test_flags_win_over_file_over_environment(void **state)
{
    char path[] = "/tmp/test_launch.XXXXXX", line[256];
    const char *const env[] = {"HOROVOD_CYCLE_TIME=1", "HOROVODRUN_HOSTS=from:1", NULL};
    options_t options;
    char **words;
    err_t err;
    (void)state;
    close(mkstemp(path));
    write_file(path, "# comment\nparams:\n  cycle_time_ms: 2\n  cache_capacity: 9\n"
                     "logging: {level: debug, with_timestamp: false}\nhosts: [a:1, b:2]\n");
    snprintf(line, sizeof line, "x --cycle-time-ms 3 --config-file %s python -np 9", path);
    assert_int_equal(read_words(line, env, &options, &words, &err), HVD_OK);
    assert_string_equal(option_text(&options, N_OWN_OPTIONS + KNOB_cycle_time), "3");
    assert_string_equal(option_text(&options, N_OWN_OPTIONS + KNOB_cache_capacity), "9");
    assert_string_equal(option_text(&options, N_OWN_OPTIONS + KNOB_log_hide_time), "1");
    assert_string_equal(options.hosts, "a:1,b:2");
    assert_int_equal(options.n_command, 3);
    assert_string_equal(options.command[1], "-np");
    assert_int_equal(options.num_proc, 0);
    options_free(&options);
    free_words(words);
    unlink(path);
}

static void test_synonyms_and_opposites(void **state)
{
    (void)state;
    assert_option(OPTION_num_proc, "x -np 4 c", no_env, "4", BY_FLAG);
    assert_option(OPTION_num_proc, "x -n 4 c", no_env, "4", BY_FLAG);
    assert_option(OPTION_controller, "x --mpi c", no_env, "mpi", BY_FLAG);
    assert_option(OPTION_controller, "x --gloo -- c", no_env, "gloo", BY_FLAG);
    assert_option(OPTION_min_num_proc, "x --min-np 2 c", no_env, "2", BY_FLAG);
    assert_option(OPTION_autotune, "x --no-autotune c", no_env, "0", BY_FLAG);
    assert_option(OPTION_network_interfaces, "x --network-interface a --network-interface b c",
                  no_env, "a,b", BY_FLAG);
    assert_option(N_OWN_OPTIONS + KNOB_stall_check_disable, "x --stall-check c", no_env, "0",
                  BY_FLAG);
    assert_option(N_OWN_OPTIONS + KNOB_log_hide_time, "x --log-with-timestamp c", no_env, "0",
                  BY_FLAG);
    assert_option(N_OWN_OPTIONS + KNOB_fusion_threshold, "x --fusion-threshold-mb 2 c", no_env,
                  "2097152", BY_FLAG);
}

static void test_wrong_options_are_explained(void **state)
{
    static const struct {
        const char *line, *part;
    } rows[] = {
        {"x --hostz a c", "did you mean --hosts?"},
        {"x --verbos c", "did you mean --verbose?"},
        {"x --nothing-like-it-at-all c", "--help"},
        {"x -np", "-np needs a value"},
        {"x -np two c", "-np must be a whole number from 1 to 1048576, not \"two\""},
        {"x -np 0 c", "-np must be a whole number from 1 to 1048576, not \"0\""},
        {"x -np -1 c", "not \"-1\""},
        {"x --verbose=1 c", "takes no value"},
        {"x --gloo --mpi c", "--mpi contradicts"},
        {"x --autotune --no-autotune c", "contradicts"},
        {"x --log-with-timestamp --log-hide-timestamp c", "contradicts"},
        {"x -H a:1 --hostfile f c", "exclude each other"},
        {"x --color blue c", "auto|always|never"},
        {"x --cycle-time-ms -1 c", "from 0 to"},
        {"x --autotune-gaussian-process-noise 1.5 c", "from 0 to 1"},
        {"x --fusion-threshold-mb 1.5 c", "whole number of MiB"},
        {"x --config-file /nosuch/file c", "/nosuch/file"},
    };
    options_t options;
    char **words;

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        err_t err = {0};
        assert_int_not_equal(read_words(rows[i].line, no_env, &options, &words, &err), HVD_OK);
        if (strstr(err.text, rows[i].part) == NULL) {
            fail_msg("%s: \"%s\" does not say \"%s\"", rows[i].line, err.text, rows[i].part);
        }
        free_words(words);
    }
}

static void test_wrong_files_are_explained(void **state)
{
    static const struct {
        const char *yaml, *part;
    } rows[] = {
        {"params:\n  cycle_tim_ms: 2\n", "did you mean params.cycle_time_ms?"},
        {"controller: smoke\n", "controller in"},
        {"params: [{a: b}]\n", "does not belong"},
        {"a: {b\n", "line"},
        {"- a\n- b\n", "does not belong"},
        {"just text\n", "expected"},
        {"hosts: *x\n", "line"},
    };
    char path[] = "/tmp/test_launch.XXXXXX", line[128];
    options_t options;
    char **words;

    (void)state;
    close(mkstemp(path));
    snprintf(line, sizeof line, "x --config-file %s c", path);
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        err_t err = {0};
        write_file(path, rows[i].yaml);
        assert_int_equal(read_words(line, no_env, &options, &words, &err), HVD_INVALID_ARGUMENT);
        if (strstr(err.text, rows[i].part) == NULL) {
            fail_msg("%s: \"%s\" does not say \"%s\"", rows[i].yaml, err.text, rows[i].part);
        }
        free_words(words);
    }
    unlink(path);
}

static char *printed(void (*print)(FILE *))
{
    char *text = NULL;
    size_t bytes;
    FILE *file = open_memstream(&text, &bytes);
    print(file);
    fclose(file);
    return text;
}

static void print_bash(FILE *out)
{
    completion_print(COMPLETION_BASH, out);
}

static void print_zsh(FILE *out)
{
    completion_print(COMPLETION_ZSH, out);
}

static void print_fish(FILE *out)
{
    completion_print(COMPLETION_FISH, out);
}

// Every option is in the help, the man page (with escaped dashes) and the completions.
static void test_every_option_is_told_everywhere(void **state)
{
    char *help = printed(help_print), *man = printed(man_print);
    char *shells[] = {printed(print_bash), printed(print_zsh), printed(print_fish)};
    (void)state;
    for (int i = 0; i < N_OPTIONS; i++) {
        option_t option = option_at(i);
        if (option.info.flag[0] == '\0' || (option.traits & HIDDEN) != 0) {
            continue;
        }
        assert_non_null(strstr(help, option.info.flag));
        assert_non_null(option.info.env[0] == '\0' ? help : strstr(help, option.info.env));
        char escaped[128] = "";
        for (const char *at = option.info.flag; *at != '\0'; at++) {
            char piece[3] = {*at == '-' ? '\\' : *at, *at == '-' ? '-' : '\0', '\0'};
            strncat(escaped, piece, sizeof escaped - strlen(escaped) - 1);
        }
        assert_non_null(strstr(man, escaped));
        for (size_t s = 0; s < N_ELEMENTS(shells); s++) {
            assert_non_null(strstr(shells[s], option.info.flag + 2));
        }
    }
    assert_null(strstr(help, "--doctor-rank"));
    free(help);
    free(man);
    for (size_t s = 0; s < N_ELEMENTS(shells); s++) {
        free(shells[s]);
    }
}

// --- Hosts and plan ------------------------------------------------------------------------------

// "target/name/slots ..."
static void describe_hosts(const hosts_t *hosts, char *text, size_t bytes)
{
    size_t len = 0;
    text[0] = '\0';
    for (int i = 0; i < hosts->n; i++) {
        len += (size_t)snprintf(text + len, bytes - len, "%s%s/%s/%d", i > 0 ? " " : "",
                                hosts->list[i].target, hosts->list[i].name, hosts->list[i].slots);
    }
}

static void test_host_lists(void **state)
{
    static const struct {
        const char *text, *expected; // NULL: refused
    } rows[] = {
        {"a:2,b:4", "a/a/2 b/b/4"},
        {"a", "a/a/1"},
        {"a,a,b", "a/a/2 b/b/1"},
        {"user@node-1.example.org:3", "user@node-1.example.org/node-1.example.org/3"},
        {"10.0.0.1:2", "10.0.0.1/10.0.0.1/2"},
        {"[fe80::1]:2,[::1]", "fe80::1/fe80::1/2 ::1/::1/1"},
        {"me@[fe80::1%eth0]:2", "me@fe80::1%eth0/fe80::1%eth0/2"},
        {"", NULL},
        {"a:", NULL},
        {"a:0", NULL},
        {"a:-1", NULL},
        {"a:2x", NULL},
        {"a:99999999", NULL},
        {"a,,b", NULL},
        {"a:2,", NULL},
        {"@a", NULL},
        {"[::1:2", NULL},
        {"-oProxyCommand=x:1", NULL},
        {"a b:2", NULL},
        {"a;b", NULL},
    };
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        hosts_t hosts = {0};
        char text[512] = "";
        err_t err = {0};
        hvd_status_t status = hosts_parse(rows[i].text, 1, &hosts, &err);
        if (rows[i].expected == NULL) {
            assert_int_equal(status, HVD_INVALID_ARGUMENT);
            assert_non_null(strstr(err.text, "Invalid host input"));
            continue;
        }
        assert_int_equal(status, HVD_OK);
        describe_hosts(&hosts, text, sizeof text);
        assert_string_equal(text, rows[i].expected);
        hosts_free(&hosts);
    }
}

static void test_hostfiles(void **state)
{
    static const struct {
        const char *text, *expected;
    } rows[] = {
        {"a slots=2\nb slots=4\n", "a/a/2 b/b/4"},
        {"# hosts\n\n  a   slots=2 max_slots=3 # first\n\tb:4\r\nuser@c", "a/a/2 b/b/4 user@c/c/1"},
        {"a\na\n", "a/a/2"},
        {"[::1]:2\n", "::1/::1/2"},
        {"", NULL},
        {"# nothing\n", NULL},
        {"a slots=x\n", NULL},
        {"a slot=2\n", NULL},
        {"a slots=2 b\n", NULL},
        {"a slots=99999999999\n", NULL},
        {"a slots=1048576\na\n", NULL},
    };
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        hosts_t hosts = {0};
        char text[512] = "";
        err_t err = {0};
        hvd_status_t status = hostfile_parse(rows[i].text, "file", 1, &hosts, &err);
        assert_int_equal(status, rows[i].expected == NULL ? HVD_INVALID_ARGUMENT : HVD_OK);
        if (rows[i].expected == NULL) {
            continue;
        }
        describe_hosts(&hosts, text, sizeof text);
        assert_string_equal(text, rows[i].expected);
        hosts_free(&hosts);
    }
}

static void test_plans(void **state)
{
    // For each rank: host.local_rank/local_size.cross_rank/cross_size
    static const struct {
        const char *hosts;
        int np;
        const char *expected;
    } rows[] = {
        {"a:2,b:2", 4, "0.0/2.0/2 0.1/2.0/2 1.0/2.1/2 1.1/2.1/2"},
        {"a:2,b:2", 0, "0.0/2.0/2 0.1/2.0/2 1.0/2.1/2 1.1/2.1/2"},
        {"a:2,b:2", 3, "0.0/2.0/2 0.1/2.0/1 1.0/1.1/2"},
        {"a:1,b:3", 4, "0.0/1.0/2 1.0/3.1/2 1.1/3.0/1 1.2/3.0/1"},
        {"a:4,b:4", 2, "0.0/2.0/1 0.1/2.0/1"},
        {"a:1", 2, NULL},
    };
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        hosts_t hosts;
        job_plan_t plan;
        err_t err = {0};
        char text[512] = "";
        size_t len = 0;
        assert_int_equal(hosts_parse(rows[i].hosts, 1, &hosts, &err), HVD_OK);
        hvd_status_t status = job_plan_make(&hosts, rows[i].np, &plan, &err);
        hosts_free(&hosts);
        if (rows[i].expected == NULL) {
            assert_int_equal(status, HVD_INVALID_ARGUMENT);
            assert_non_null(strstr(err.text,
                                   "Requested more processes (2) than there are available "
                                   "slots (1)"));
            continue;
        }
        assert_int_equal(status, HVD_OK);
        for (int r = 0; r < plan.n_ranks; r++) {
            const rank_place_t *p = &plan.places[r];
            len += (size_t)snprintf(text + len, sizeof text - len, "%s%d.%d/%d.%d/%d",
                                    r > 0 ? " " : "", p->host, p->local_rank, p->local_size,
                                    p->cross_rank, p->cross_size);
        }
        assert_string_equal(text, rows[i].expected);
        job_plan_free(&plan);
    }
}

// --- Output --------------------------------------------------------------------------------------

static void see_hosts(host_pool_t *pool, const char *text)
{
    hosts_t hosts;
    err_t err;
    assert_int_equal(hosts_parse(text, 1, &hosts, &err), HVD_OK);
    assert_true(host_pool_update(pool, &hosts));
    hosts_free(&hosts);
}

// Those that have ranks come first; news tell how the next generation would differ.
static void test_host_pool_shares_places(void **state)
{
    host_pool_t pool = {0};
    (void)state;

    see_hosts(&pool, "a:2,b:1");
    assert_int_equal(host_pool_share(&pool, 0, 1), 3);
    assert_int_equal(host_pool_news(&pool), NEWS_ADDED);
    pool.hosts[0]->n_alive = 2;
    pool.hosts[1]->n_alive = 1;
    assert_int_equal(host_pool_share(&pool, 0, 1), 3);
    assert_int_equal(host_pool_news(&pool), 0);
    see_hosts(&pool, "c:4,b:1"); // a is gone
    assert_int_equal(host_pool_share(&pool, 3, 1), 3);
    assert_int_equal(host_pool_news(&pool), NEWS_ADDED | NEWS_REMOVED);
    assert_int_equal(pool.n_order, 2);
    assert_string_equal(pool.order[0]->host.name, "b");
    assert_string_equal(pool.order[1]->host.name, "c");
    assert_int_equal(pool.order[1]->quota, 2);
    see_hosts(&pool, "a:1,b:1"); // back, smaller
    assert_int_equal(host_pool_share(&pool, 0, 1), 2);
    assert_int_equal(host_pool_news(&pool), NEWS_REMOVED);
    host_pool_free(&pool);
}

static void test_host_pool_bars_hosts(void **state)
{
    host_pool_t pool = {0};
    err_t err;
    (void)state;

    see_hosts(&pool, "a:1,b:1");
    host_pool_bar(&pool, pool.hosts[0], 5, 0);
    assert_int_equal(host_pool_share(&pool, 0, NEVER_NS - 1), 1);
    assert_false(host_pool_may_grow(&pool));
    assert_int_equal(host_pool_read_cooldown(&pool, "2 9", &err), HVD_OK);
    for (uint64_t delay_s = 2; delay_s < 20; delay_s *= 2) { // 2, 4, 8, then the longest
        uint64_t until_ns = MIN(delay_s, 9) * NS_PER_S;
        host_pool_bar(&pool, pool.hosts[1], 0, 0);
        assert_int_equal(pool.hosts[1]->barred_until_ns, until_ns);
        assert_int_equal(host_pool_share(&pool, 0, until_ns - 1), 0);
        assert_true(host_pool_may_grow(&pool));
        assert_int_equal(host_pool_share(&pool, 0, until_ns), 1);
    }
    // With restarts a host that is lost is forgiven, but a job that has too few does not wait.
    pool = (host_pool_t){.max_restarts = 1, .hosts = pool.hosts, .order = pool.order, .n_hosts = 2};
    pool.hosts[0]->barred_until_ns = pool.hosts[1]->barred_until_ns = 0;
    host_pool_bar(&pool, pool.hosts[0], 5, 0);
    assert_int_equal(host_pool_share(&pool, 0, 6), 1);
    assert_false(host_pool_may_grow(&pool));
    assert_int_equal(host_pool_share(&pool, 0, 5 + 600 * NS_PER_S), 2);
    static const char *const wrong[] = {"9 2", "0 5", "1 4000", "1", "x y", "1 2 3"};
    for (size_t i = 0; i < N_ELEMENTS(wrong); i++) {
        assert_int_equal(host_pool_read_cooldown(&pool, wrong[i], &err), HVD_INVALID_ARGUMENT);
    }
    host_pool_free(&pool);
}

// A rank that failed is started again at once, then after pauses that double, then not before the
// host is forgiven; ranks that run there stay.
static void test_host_pool_restarts_ranks(void **state)
{
    static const struct {
        uint64_t failed_s, pause_s;
        bool may_restart;
    } rows[] = {{10, 0, true},   {20, 1, true},      {30, 2, true},     {40, 600, false},
                {700, 0, true},  {710, 1, true},     {2000, 0, true},   {2001, 1, true},
                {2002, 2, true}, {2003, 600, false}, {2004, 600, false}};
    host_pool_t pool = {.max_restarts = 3};
    (void)state;

    see_hosts(&pool, "a:3");
    pool_host_t *host = pool.hosts[0];
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        uint64_t failed_ns = rows[i].failed_s * NS_PER_S;
        uint64_t again_ns = failed_ns + rows[i].pause_s * NS_PER_S;
        host->n_alive = 2;
        assert_int_equal(host_pool_restart(&pool, host, failed_ns), rows[i].may_restart);
        assert_int_equal(host_pool_share(&pool, 0, again_ns), 3);
        if (rows[i].pause_s > 0) {
            assert_int_equal(host_pool_share(&pool, 0, again_ns - 1), 2);
            assert_int_equal(host_pool_may_grow(&pool), rows[i].may_restart);
            host->n_alive = 0;
            assert_int_equal(host_pool_share(&pool, 0, again_ns - 1), 0);
        }
    }
    host->n_alive = 1;
    host->is_full = true; // it could start some, but its agent is busy
    assert_int_equal(host_pool_share(&pool, 0, NEVER_NS - 1), 1);
    host->is_full = false;
    assert_int_equal(host_pool_share(&pool, 0, NEVER_NS - 1), 3);
    host_pool_free(&pool);
}

static void test_lines_survive_any_cut(void **state)
{
    static const struct {
        const char *text, *expected;
    } rows[] = {
        {"", ""},
        {"one\n", ">one\n"},
        {"one\ntwo\n", ">one\n>two\n"},
        {"no end", ">no end"},
        {"10%\r20%\r30%\n", ">10%\r>20%\r>30%\n"},
        {"dos\r\nend\r\n", ">dos\r\n>end\r\n"},
        {"\n\n", ">\n>\n"},
        {"\xc3\xa4\xe2\x82\xac\n", ">\xc3\xa4\xe2\x82\xac\n"},
    };
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        size_t bytes = strlen(rows[i].text);
        for (size_t cut = 0; cut <= bytes; cut++) {
            splitter_t splitter = {0};
            buf_t out = {0};
            splitter_feed(&splitter, ">", rows[i].text, cut, &out);
            splitter_feed(&splitter, ">", rows[i].text + cut, bytes - cut, &out);
            splitter_finish(&splitter, ">", &out);
            buf_append(&out, "", 1);
            assert_string_equal((char *)out.data, rows[i].expected);
            splitter_free(&splitter);
            buf_free(&out);
        }
    }
}

static void test_prefixes(void **state)
{
    char text[96];
    (void)state;
    prefix_make(&(prefix_style_t){0}, 3, STREAM_STDERR, text, sizeof text);
    assert_string_equal(text, "[3]<stderr>:");
    prefix_make(&(prefix_style_t){.timestamp = true}, 0, STREAM_STDOUT, text, sizeof text);
    assert_int_equal(strlen(text), strlen("Mon Nov 16 02:18:46 2026[0]<stdout>:"));
    prefix_make(&(prefix_style_t){.color = true}, 0, STREAM_STDOUT, text, sizeof text);
    assert_non_null(strstr(text, "\033["));
}

// --- Agents that dial ----------------------------------------------------------------------------

// Hosts by slot, a letter each, and what is wanted: the slots in the order of their ranks, and
// local_rank, cross_rank of each, of cross_size.
static void test_ranks_of_agents_that_dial_go_host_by_host(void **state)
{
    static const struct {
        const char *hosts;
        bool is_elastic;
        const char *slots, *local, *cross, *cross_sizes;
    } rows[] = {
        // As Spark deals its partitions: the host of slot 0 first, the others by name, going round.
        {"cadb", false, "0213", "0000", "0123", "4444"},
        {"cadbcadb", false, "04261537", "01010101", "00112233", "44444444"},
        {"babb", false, "0231", "0120", "0001", "2112"},
        // In the order they come in.
        {"cadb", true, "0123", "0000", "0123", "4444"},
        {"bacb", true, "0312", "0100", "0012", "3133"},
    };
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        char names[16][2];
        host_t hosts[16];
        agent_link_t links[16];
        arrival_t arrivals[16], *members[16];
        job_plan_t plan = {0};
        err_t err = {0};
        int n = (int)strlen(rows[i].hosts);
        for (int k = 0; k < n; k++) {
            names[k][0] = rows[i].hosts[k];
            names[k][1] = '\0';
            hosts[k] = (host_t){.name = names[k], .slots = 1};
            links[k] = (agent_link_t){.host = &hosts[k]};
            arrivals[k] = (arrival_t){.link = &links[k], .slot = k};
            members[n - 1 - k] = &arrivals[k]; // they come in any order
        }
        assert_int_equal(gather_place(members, n, rows[i].is_elastic, &plan, &err), HVD_OK);
        assert_int_equal(plan.n_ranks, n);
        for (int rank = 0; rank < n; rank++) {
            const rank_place_t *place = &plan.places[rank];
            assert_int_equal(members[rank]->slot, rows[i].slots[rank] - '0');
            assert_int_equal(place->rank, rank);
            assert_int_equal(place->local_rank, rows[i].local[rank] - '0');
            assert_int_equal(place->cross_rank, rows[i].cross[rank] - '0');
            assert_int_equal(place->cross_size, rows[i].cross_sizes[rank] - '0');
        }
        job_plan_free(&plan);
    }
}

// Who goes on keeps the order of the generation before, and comes before who is new.
static void test_ranks_that_go_on_come_first(void **state)
{
    worker_t first = {.place = {.rank = 1}}, second = {.place = {.rank = 3}};
    host_t hosts[] = {{.name = "a"}, {.name = "b"}};
    agent_link_t a = {.host = &hosts[0]}, b = {.host = &hosts[1]};
    arrival_t arrivals[] = {
        {.link = &a, .slot = 0},
        {.link = &b, .slot = 1, .worker = &second},
        {.link = &b, .slot = 2},
        {.link = &a, .slot = 7, .worker = &first},
    };
    arrival_t *members[] = {&arrivals[0], &arrivals[1], &arrivals[2], &arrivals[3]};
    job_plan_t plan = {0};
    err_t err = {0};
    (void)state;
    assert_int_equal(gather_place(members, 4, true, &plan, &err), HVD_OK);
    assert_ptr_equal(members[0], &arrivals[3]);
    assert_ptr_equal(members[1], &arrivals[0]);
    assert_ptr_equal(members[2], &arrivals[1]);
    assert_ptr_equal(members[3], &arrivals[2]);
    job_plan_free(&plan);
}

// --- Endings -------------------------------------------------------------------------------------

#define MS(n) ((n) * NS_PER_MS)

static void test_cause_of_an_ending(void **state)
{
    static const struct {
        rank_end_t ends[3];
        int cause;
    } rows[] = {
        {{{.has_ended = true}, {.has_ended = true}, {.has_ended = true}}, -1},
        {{{.has_ended = true, .code = 1, .time_ns = MS(20)},
          {.has_ended = true, .code = 2, .time_ns = MS(10)}},
         1},
        // Killed, and noticed by the others a moment earlier than the launcher heard of it.
        {{{.has_ended = true, .code = 1, .time_ns = MS(10)},
          {.has_ended = true, .code = 137, .signo = SIGKILL, .time_ns = MS(12)}},
         1},
        {{{.has_ended = true, .code = 1, .time_ns = MS(10)},
          {.has_ended = true, .code = 137, .signo = SIGKILL, .time_ns = MS(5000)}},
         0},
        {{{.has_ended = true, .code = 143, .signo = SIGTERM, .was_stopped = true},
          {.has_ended = true, .code = 3, .time_ns = MS(10)}},
         1},
    };
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        assert_int_equal(ending_cause(rows[i].ends, 3), rows[i].cause);
    }
}

static void test_halted_ranks_are_blamed_if_others_say_so(void **state)
{
    static const struct {
        int blames[3];
        int blamed;
    } rows[] = {
        {{2, -1, -1}, 2},  // who failed first gave up waiting for it
        {{-1, 2, -1}, 2},  // another did, and told the first
        {{1, -1, -1}, 1},  // it ran, and failed by itself
        {{1, 2, -1}, 2},   // it ran, and failed because of the halted one
        {{1, 0, -1}, 0},   // each says that the other did it
        {{20, -1, -1}, 0}, // there is none
        {{-1, -1, -1}, 0}, // halted for another reason
    };
    rank_end_t ends[] = {{.has_ended = true, .code = 1, .time_ns = MS(10)},
                         {.has_ended = true, .code = 1, .time_ns = MS(11)},
                         {.has_ended = true,
                          .code = 143,
                          .signo = SIGTERM,
                          .was_stopped = true,
                          .was_halted = true,
                          .pid = 77}};
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        for (int rank = 0; rank < 3; rank++) {
            ends[rank].blames = rows[i].blames[rank];
        }
        assert_int_equal(ending_blamed(ends, 3, 0), rows[i].blamed);
    }
}

static void test_report_is_short_and_names_the_cause(void **state)
{
    rank_end_t ends[40];
    splitter_t tail = {0};
    buf_t out = {0};
    int n_lines = 0;
    (void)state;
    for (int i = 0; i < 40; i++) {
        ends[i] = (rank_end_t){.has_ended = true, .code = 1, .blames = -1, .time_ns = MS(100)};
        splitter_feed(&tail, "", "line of the traceback\n", strlen("line of the traceback\n"),
                      &out);
    }
    buf_clear(&out);
    splitter_feed(&tail, "", "ValueError: bad\n", strlen("ValueError: bad\n"), &out);
    buf_clear(&out);
    ends[7] = (rank_end_t){.has_ended = true,
                           .code = 137,
                           .signo = SIGKILL,
                           .was_oom = true,
                           .blames = -1,
                           .pid = 4711,
                           .time_ns = MS(90)};
    assert_int_equal(ending_cause(ends, 40), 7);
    assert_int_equal(ending_blamed(ends, 40, 7), 7);
    ending_report(ends, 40, 7, 7, "node7", &tail, &out);
    buf_append(&out, "", 1);
    for (const char *at = (char *)out.data; *at != '\0'; at++) {
        n_lines += *at == '\n';
    }
    assert_true(n_lines <= 15);
    static const char *const parts[] = {
        "rank 7", "node7", "4711", "SIGKILL", "out of memory", "ValueError: bad", "smaller batch"};
    for (size_t i = 0; i < N_ELEMENTS(parts); i++) {
        assert_non_null(strstr((char *)out.data, parts[i]));
    }
    buf_free(&out);
    splitter_free(&tail);
}

// --- Environment and words -----------------------------------------------------------------------

static void test_environment(void **state)
{
    static const uint8_t changes[] = "B=new\0C=3\0A=\0C=4";
    char *base[] = {"A=1", "B=2", "BB=5", NULL};
    char **merged = environ_merge(base, changes, sizeof changes);
    (void)state;
    assert_string_equal(merged[0], "A=");
    assert_string_equal(merged[1], "B=new");
    assert_string_equal(merged[2], "BB=5");
    assert_string_equal(merged[3], "C=4");
    assert_null(merged[4]);
    free(merged);
    assert_string_equal(environ_find(changes, sizeof changes, "C"), "4");
    assert_string_equal(environ_find(changes, sizeof changes, "A"), "");
    assert_null(environ_find(changes, sizeof changes, "BB"));
    assert_null(environ_find(changes, sizeof changes - 2, "new"));
    assert_string_equal(environ_find(changes, sizeof changes - 1, "C"), "3"); // the last has no end
    assert_true(environ_is_exportable("PATH"));
    assert_true(environ_is_exportable("HOROVOD_CYCLE_TIME"));
    assert_false(environ_is_exportable("BASH_FUNC_module%%"));
    assert_false(environ_is_exportable("OLDPWD"));
    assert_false(environ_is_exportable("CUDA_VISIBLE_DEVICES"));
    assert_false(environ_is_exportable("NV_CUDA_VISIBLE_DEVICES"));
    assert_false(environ_is_exportable("_HOROVOD_SECRET_KEY"));
    assert_false(environ_is_exportable("SSH_CONNECTION"));
}

static void test_words(void **state)
{
    static const char *const texts[] = {"plain", "two words",    "it's", "",
                                        "a\"b",  "$HOME `x` \\", "~"};
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(texts); i++) {
        buf_t quoted = {0};
        quote_word(texts[i], &quoted);
        buf_append(&quoted, "", 1);
        char **words = split_words((char *)quoted.data);
        assert_string_equal(words[0], texts[i]);
        assert_null(words[1]);
        free_words(words);
        buf_free(&quoted);
    }
    char **words = split_words("  -a \"b c\"'d' e\\ f ");
    assert_string_equal(words[0], "-a");
    assert_string_equal(words[1], "b cd");
    assert_string_equal(words[2], "e f");
    assert_null(words[3]);
    free_words(words);
    assert_null(split_words("'no end"));
}

// --- Frames --------------------------------------------------------------------------------------

#define TEXT_BYTES(text) {.data = (const uint8_t *)text, .len = sizeof text}

// One of every kind, no two fields alike.
static const frame_t all_frames[] = {
    {.kind = FRAME_HELLO, .hello = {.version = "1.2", .host = "a", .slot = 3, .about = "pod 7"}},
    {.kind = FRAME_PLAN,
     .plan = {.secret = TEXT_BYTES("0123"),
              .is_remote = true,
              .silence_ms = 30000,
              .directory = "/work",
              .command = TEXT_BYTES("sh\0-c\0"),
              .env = TEXT_BYTES("A=1\0B=2"),
              .is_elastic = true,
              .payload = TEXT_BYTES("payload"),
              .ranks = {0}}},
    {.kind = FRAME_STARTED, .started = {.rank = 1, .pid = 4711}},
    {.kind = FRAME_OUTPUT, .output = {.rank = 1, .stream = 1, .data = TEXT_BYTES("line\n")}},
    {.kind = FRAME_RESULT, .result = {.rank = 1, .data = {0}}},
    {.kind = FRAME_EXITED,
     .exited = {.rank = 1, .code = 137, .signo = 9, .was_oom = true, .blames = -1, .what = ""}},
    {.kind = FRAME_PROBLEM, .problem = {.rank = -1, .code = 127, .text = ""}},
    {.kind = FRAME_STOP, .stop = {.rank = -1, .signo = 15, .grace_ms = 5000}},
    {.kind = FRAME_WHERE, .where = {.rank = 1, .text = "at train.py:7"}},
    {.kind = FRAME_EXAMINE,
     .examine = {.addresses = "::1",
                 .port = 65535,
                 .time_s = INT64_MIN,
                 .directory = "/d",
                 .env = {(const uint8_t *)"A=1", 4},
                 .python = "p",
                 .script = "s.py",
                 .is_module = true,
                 .needs_horovod = true}},
    {.kind = FRAME_FINDING,
     .finding = {.is_fault = true, .what = "a", .found = "bb", .fix = "ccc", .version = "4"}},
    {.kind = FRAME_PING},
    {.kind = FRAME_DONE},
    {.kind = FRAME_PLACE, .place = {.rank = 7, .env = TEXT_BYTES("HOROVOD_RANK=7")}},
    {.kind = FRAME_NEWS, .news = {.number = 2, .what = 3}},
    {.kind = FRAME_READY, .ready = {.rank = 5, .generation = 6, .blames = 3}},
    {.kind = FRAME_WATCH, .watch = {.period_ms = 1000}},
    {.kind = FRAME_SNAPSHOT, .snapshot = {.rank = 3, .text = "rank\t3\n"}},
    {.kind = FRAME_END, .end = {.code = 7}},
    {.kind = FRAME_LEAVING},
    {.kind = FRAME_WANTS, .wants = {.rank = 4, .what = 3}},
};

static hvd_status_t read_frame(const buf_t *buf, size_t bytes, frame_t *frame_p)
{
    reader_t reader = reader_of(buf->data, bytes);
    return frame_get(&reader, frame_p);
}

static void test_every_frame_is_read_as_written(void **state)
{
    (void)state;
    assert_int_equal(N_ELEMENTS(all_frames), FRAME_N_KINDS - 1);
    for (size_t i = 0; i < N_ELEMENTS(all_frames); i++) {
        buf_t once = {0}, twice = {0};
        frame_t frame;
        assert_int_equal(all_frames[i].kind, i + 1);
        assert_true(frame_put(&once, &all_frames[i]));
        assert_int_equal(read_frame(&once, once.len, &frame), HVD_OK);
        assert_int_equal(frame.kind, all_frames[i].kind);
        assert_true(frame_put(&twice, &frame));
        assert_int_equal(once.len, twice.len);
        assert_memory_equal(once.data, twice.data, once.len);
        buf_free(&once);
        buf_free(&twice);
    }
}

// Cut short in transit, cut short by its writer, or with something behind.
static void test_no_other_frame_is_read(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(all_frames); i++) {
        bool may_vary = all_frames[i].kind == FRAME_HELLO;
        buf_t buf = {0};
        frame_t frame;
        assert_true(frame_put(&buf, &all_frames[i]));
        size_t bytes = buf.len - 4; // of what follows the length; less than 256
        for (size_t n = 0; n < buf.len; n++) {
            assert_int_equal(read_frame(&buf, n, &frame), HVD_IN_PROGRESS);
        }
        for (size_t n = 1; n < bytes; n++) {
            buf.data[0] = (uint8_t)n;
            hvd_status_t status = read_frame(&buf, buf.len, &frame);
            assert_true(status == HVD_PROTOCOL || (may_vary && status == HVD_OK));
        }
        put_u8(&buf, 0);
        buf.data[0] = (uint8_t)(bytes + 1);
        assert_int_equal(read_frame(&buf, buf.len, &frame), may_vary ? HVD_OK : HVD_PROTOCOL);
        buf.data[4] = FRAME_N_KINDS;
        assert_int_equal(read_frame(&buf, buf.len, &frame), HVD_PROTOCOL);
        buf_free(&buf);
    }
}

static void test_a_hello_of_another_version(void **state)
{
    static const uint8_t old[] = "\x0a\0\0\0\x01\x05\0\0\0"
                                 "0.01";
    static const uint8_t wrong[] = "\x0a\0\0\0\x01\x05\0\0\0"
                                   "00001"; // a text without an end
    reader_t reader = reader_of(old, sizeof old);
    frame_t frame;
    (void)state;
    assert_int_equal(frame_get(&reader, &frame), HVD_OK);
    assert_string_equal(frame.hello.version, "0.01");
    assert_string_equal(frame.hello.host, "");
    reader = reader_of(wrong, sizeof wrong);
    assert_int_equal(frame_get(&reader, &frame), HVD_PROTOCOL);
}

static void test_channel(void **state)
{
    int ends[2];
    channel_t one, other;
    frame_t frame;
    (void)state;
    assert_int_equal(pipe(ends), 0);
    assert_true(set_nonblocking(ends[0]) && set_nonblocking(ends[1]));
    channel_open(&one, -1, ends[1]);
    channel_open(&other, ends[0], -1);
    for (int i = 0; i < 3; i++) {
        channel_put(&one,
                    &(frame_t){.kind = FRAME_PROBLEM, .problem = {.rank = i, .text = "text"}});
    }
    channel_send(&one);
    channel_receive(&other);
    for (int i = 0; i < 3; i++) {
        assert_true(channel_next(&other, &frame));
        assert_int_equal(frame.kind, FRAME_PROBLEM);
        assert_int_equal(frame.problem.rank, i);
        assert_string_equal(frame.problem.text, "text");
    }
    assert_false(channel_next(&other, &frame));
    assert_false(other.is_closed);
    // A length nobody sends: refused before memory is taken.
    assert_int_equal(write(ends[1], "\xff\xff\xff\xff\x01", 5), 5);
    channel_receive(&other);
    assert_false(channel_next(&other, &frame));
    assert_true(other.is_closed);
    channel_close(&one);
    channel_close(&other);
}

// Nobody is kept by a reader that takes all there is: to a file, which never has enough.
static void test_a_channel_sends_a_piece_at_a_time(void **state)
{
    static uint8_t data[3 * MIB];
    channel_t channel;
    off_t sent = 0;
    int file = memfd_create("test", MFD_CLOEXEC), n_sent = 0;
    (void)state;
    assert_true(file >= 0);
    channel_open(&channel, -1, file);
    channel_put(&channel, &(frame_t){.kind = FRAME_RESULT,
                                     .result = {.data = {.data = data, .len = sizeof data}}});
    for (; channel_wants_write(&channel); n_sent++) {
        channel_send(&channel);
        off_t end = lseek(file, 0, SEEK_END);
        assert_in_range(end - sent, 1, MIB / 2);
        sent = end;
    }
    assert_true(sent > (off_t)sizeof data && n_sent >= 6);
    channel_close(&channel);
}

// --- Other launchers -----------------------------------------------------------------------------

static void test_what_ssh_says_is_understood(void **state)
{
    static const struct {
        const char *said, *what;
        int lasts, code;
    } rows[] = {
        {"ssh: connect to host b port 22: Connection refused\r\n", "nothing listens", FAULT_PASSES,
         255},
        {"ssh: Could not resolve hostname b: Name or service not known", "cannot be resolved here",
         FAULT_PASSES, 255},
        {"Host key verification failed.", "does not trust", FAULT_STARTS, 255},
        {"b: Permission denied (publickey).", "denied access", FAULT_STARTS, 255},
        {"ssh: connect to host b port 22: No route to host", "cannot be reached", FAULT_PASSES,
         255},
        {"ssh: connect to host b port 22: Connection timed out", "does not answer", FAULT_PASSES,
         255},
        {"horovodrun-agent: not installed", "not installed there", FAULT_STAYS, 255},
        {"something else", "did not start", FAULT_STARTS, 255},
        // What has dialled tells by its exit code, whatever it says; ssh does not.
        {"Permission denied", "no agent is waiting", FAULT_PASSES, EXIT_NO_LISTENER},
        {"Permission denied", "a different secret", FAULT_STAYS, EXIT_OTHER_SECRET},
        {"Permission denied", "cannot be read", FAULT_STAYS, EXIT_NO_SECRET},
        {"Permission denied", "cannot be resolved", FAULT_PASSES, EXIT_NO_NAME},
        {"Permission denied", "does not answer", FAULT_PASSES, EXIT_NO_ANSWER},
        {"Permission denied", "cannot be reached", FAULT_PASSES, EXIT_UNREACHABLE},
        {"Permission denied", "did not start", FAULT_STARTS, 1},
    };
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        bool has_dialled = rows[i].code != 255;
        remote_fault_t fault = remote_explain(has_dialled, rows[i].said, rows[i].code);
        assert_non_null(strstr(fault.what, rows[i].what));
        assert_int_equal(fault.lasts, rows[i].lasts);
        assert_true(strlen(fault.fix) > 10);
    }
}

static char *command_line(char **words)
{
    buf_t text = {0};
    for (char **at = words; *at != NULL; at++) {
        quote_word(*at, &text);
        buf_append(&text, " ", at[1] != NULL);
    }
    buf_append(&text, "", 1);
    return (char *)text.data;
}

static void test_mpi_commands(void **state)
{
    static const struct {
        mpi_flavor_t flavor;
        const char *options, *expected; // expected NULL: refused
    } rows[] = {
        {MPI_OPEN, "-np 4 -H a:2,b:2 -p 2222 --network-interfaces eth0 --mpi-args '--report x'",
         "mpirun --allow-run-as-root --tag-output -np 4 -H a:2,b:2 --bind-to none --map-by slot "
         "-mca pml ob1 -mca btl ^openib -mca plm_rsh_args '-p 2222' -mca btl_tcp_if_include eth0 "
         "-x NCCL_SOCKET_IFNAME=eth0 -x A -x PATH --report x python 't r.py'"},
        {MPI_SPECTRUM, "-np 2 -H a:2 --tcp",
         "mpirun --allow-run-as-root --tag-output -np 2 -H a:2 -bind-to socket -map-by socket "
         "-rank-by core -tcp -x A -x PATH python 't r.py'"},
        {MPI_INTEL, "-np 4 -H a:2,b:2 -i key --network-interface ib0",
         "mpirun -l -np 4 -ppn 2 -hosts a,b -bootstrap=ssh -bootstrap-exec-args '-i key' -iface "
         "ib0 "
         "-genv NCCL_SOCKET_IFNAME=ib0 python 't r.py'"},
        {MPI_MPICH, "-np 3 -H a:2,b:1", NULL},
        {MPI_MPICH, "-np 2 -H a:1,b:1 --network-interfaces a,b", NULL},
    };
    char *env[] = {"PATH=x", "A=1", "OLDPWD=y", NULL};

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        char line[512], **words;
        options_t options;
        hosts_t hosts;
        err_t err = {0};
        snprintf(line, sizeof line, "x %s python 't r.py'", rows[i].options);
        assert_int_equal(read_words(line, no_env, &options, &words, &err), HVD_OK);
        assert_int_equal(hosts_choose(&options, &hosts, &err), HVD_OK);
        char **command =
            mpi_command(&options, rows[i].flavor, &hosts, (int)options.num_proc, env, &err);
        if (rows[i].expected == NULL) {
            assert_null(command);
        } else {
            char *text = command_line(command);
            assert_string_equal(text, rows[i].expected);
            free(text);
        }
        free_words(command);
        hosts_free(&hosts);
        options_free(&options);
        free_words(words);
    }
    assert_int_equal(mpi_flavor_of("mpirun (Open MPI) 4.1.4"), MPI_OPEN);
    assert_int_equal(mpi_flavor_of("Intel(R) MPI Library for Linux* OS, Version 2021.18"),
                     MPI_INTEL);
    assert_int_equal(mpi_flavor_of("HYDRA build details:"), MPI_MPICH);
    assert_int_equal(mpi_flavor_of("something"), MPI_NONE);
}

static void test_ssh_command(void **state)
{
    host_t host = {.name = "b", .target = "me@b"};
    options_t options;
    char **words;
    err_t err = {0};
    (void)state;
    assert_int_equal(
        read_words("x -p 2222 -i /k --ssh-command 'ssh -F cfg' c", no_env, &options, &words, &err),
        HVD_OK);
    char **command = remote_command(&options, &host, "/opt/it's/horovodrun");
    char *text = command_line(command);
    assert_non_null(strstr(text, "ssh -F cfg -o BatchMode=yes"));
    assert_non_null(strstr(text, "-p 2222 -i /k me@b "));
    assert_null(strstr(text, "StrictHostKeyChecking"));
    free(text);
    free_words(command);
    options_free(&options);
    free_words(words);
}

static int run_shell(const char *script, int timeout_ms, char *text, size_t bytes)
{
    return run_program((char *[]){"sh", "-c", (char *)script, NULL}, timeout_ms, text, bytes);
}

static void test_programs_run_to_their_end(void **state)
{
    char text[64];
    (void)state;
    assert_int_equal(run_shell("echo hello; exit 3", 20000, text, sizeof text), 3);
    assert_string_equal(text, "hello\n");
    assert_int_equal(run_shell("kill -9 $$", 20000, text, sizeof text), -1);
    // Late: with its output open, and with its output closed.
    uint64_t start_ns = clock_ns();
    assert_int_equal(run_shell("sleep 60", 200, text, sizeof text), -1);
    assert_int_equal(run_shell("exec sleep 60 >&- 2>&-", 200, text, sizeof text), -1);
    assert_true(clock_ns() - start_ns < 30 * NS_PER_S);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_flag_environment_and_file_agree),
        cmocka_unit_test(test_flags_win_over_file_over_environment),
        cmocka_unit_test(test_synonyms_and_opposites),
        cmocka_unit_test(test_wrong_options_are_explained),
        cmocka_unit_test(test_wrong_files_are_explained),
        cmocka_unit_test(test_every_option_is_told_everywhere),
        cmocka_unit_test(test_host_lists),
        cmocka_unit_test(test_hostfiles),
        cmocka_unit_test(test_plans),
        cmocka_unit_test(test_host_pool_shares_places),
        cmocka_unit_test(test_host_pool_bars_hosts),
        cmocka_unit_test(test_host_pool_restarts_ranks),
        cmocka_unit_test(test_ranks_of_agents_that_dial_go_host_by_host),
        cmocka_unit_test(test_ranks_that_go_on_come_first),
        cmocka_unit_test(test_lines_survive_any_cut),
        cmocka_unit_test(test_prefixes),
        cmocka_unit_test(test_cause_of_an_ending),
        cmocka_unit_test(test_halted_ranks_are_blamed_if_others_say_so),
        cmocka_unit_test(test_report_is_short_and_names_the_cause),
        cmocka_unit_test(test_environment),
        cmocka_unit_test(test_words),
        cmocka_unit_test(test_programs_run_to_their_end),
        cmocka_unit_test(test_every_frame_is_read_as_written),
        cmocka_unit_test(test_no_other_frame_is_read),
        cmocka_unit_test(test_a_hello_of_another_version),
        cmocka_unit_test(test_channel),
        cmocka_unit_test(test_a_channel_sends_a_piece_at_a_time),
        cmocka_unit_test(test_what_ssh_says_is_understood),
        cmocka_unit_test(test_mpi_commands),
        cmocka_unit_test(test_ssh_command),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
