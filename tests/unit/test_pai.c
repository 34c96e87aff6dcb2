// SPDX-License-Identifier: Apache-2.0
//
// test_pai.c - the parts of horovodrun's OpenPAI that are pure: documents, rules, tasks as hosts.
//
// Whole job files with planted errors are in tests/launch/test_pai.py, jobs in containers in
// tests/launch/test_pai_job.py; here is what needs C, and runs in instrumented builds.
#define _GNU_SOURCE
#include "pai/internal.h"

#include <setjmp.h>
#include <stdlib.h>

#include <cmocka.h>

static pai_document_t *read_text(const char *text)
{
    pai_document_t *document = NULL;
    err_t err = {0};
    if (pai_document_read(text, strlen(text), "t", &document, &err) != HVD_OK) {
        fail_msg("%s", err.text);
    }
    return document;
}

// --- Documents -----------------------------------------------------------------------------------

static void test_types(void **state)
{
    static const struct {
        const char *text;
        unsigned type;
    } rows[] = {
        {"12", IS_INT},      {"-3", IS_INT},
        {"1.5", IS_REAL},    {"1e3", IS_REAL},
        {"\"12\"", IS_TEXT}, {"10.0.0.4", IS_TEXT},
        {"true", IS_BOOL},   {"'true'", IS_TEXT},
        {"yes", IS_TEXT},    {"null", IS_NULL},
        {"~", IS_NULL},      {"-", IS_LIST},
        {"{}", IS_MAP},      {"[]", IS_LIST},
        {"a b", IS_TEXT},    {"99999999999999999999", IS_REAL},
    };
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        pai_document_t *document = read_text(rows[i].text);
        assert_int_equal(pai_type(pai_root(document)), rows[i].type);
        pai_document_free(document);
    }
}

static void test_getting_around(void **state)
{
    pai_document_t *document =
        read_text("{\"a\":{\"b\":[1,\t{\"c\":\"x\\/y\\u00e9\"}]},\"n\":null}");
    const pai_node_t *list = pai_get(document, pai_get(document, pai_root(document), "a"), "b");
    (void)state;
    assert_int_equal(pai_count(document, list), 2);
    assert_int_equal(pai_int(pai_item(document, list, 0), 7), 1);
    assert_string_equal(pai_text(pai_get(document, pai_item(document, list, 1), "c")), "x/y\u00e9");
    assert_null(pai_get(document, list, "c"));
    assert_null(pai_get(document, NULL, "c"));
    assert_int_equal(pai_int(pai_get(document, pai_root(document), "n"), 7), 7);
    assert_string_equal(pai_text(NULL), "");
    pai_document_free(document);
}

static void test_what_cannot_be_read(void **state)
{
    static const char *const texts[] = {"{", "[1,", "a: b: c", "\"", "{\"a\": 1", "\x01", "*x"};
    pai_document_t *document;
    err_t err;
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(texts); i++) {
        assert_int_equal(pai_document_read(texts[i], strlen(texts[i]), "job.json", &document, &err),
                         HVD_INVALID_ARGUMENT);
        assert_non_null(strstr(err.text, "job.json, line "));
    }
}

static void test_json(void **state)
{
    static const struct {
        const char *text;
        const char *sentence; // NULL: it is JSON
    } rows[] = {
        {"{\"a\": [1, -0.5e+3, \"x\\u00e9\\n\", true, null, {}, []]}\n", NULL},
        {"\"text\"", NULL},
        {"[99999999999999999999, \"\\u0000\"]", NULL},
        {"{\"a\": 1,}", "line 1: a v1 job is JSON: here, at column 9, it is not: string or '}'"},
        {"[1,\n2,\n]", "line 3: a v1 job is JSON: here, at column 1, it is not: unexpected token"},
        {"{\n# why\n\"a\": 1}",
         "line 2: a v1 job is JSON: here, at column 1, it is not: string or"},
        {"{'a': 1}",
         "line 1: a v1 job is JSON: here, at column 2, it is not: string or '}' expected"},
        {"{\"a\":\nTrue}", "line 2: a v1 job is JSON: here, at column 4, it is not: invalid token"},
        {"jobName: a\nimage: i\n",
         "line 1: a v1 job is JSON: here, at column 7, it is not: invalid"},
        {"{\"a\": 1 \"b\": 2}", "'}' expected near '\"b\"'"},
        {"{\"a\" 1}", "':' expected near '1'"},
        {"[\"a\tb\"]", "control character 0x9"},
        {"[\"a", "line 1: a v1 job is JSON: here, at column 3, it is not: premature end of input"},
        {"[\"\\x\"]", "invalid escape near '\"\\x'"},
        {"[\"\\u12g4\"]", "invalid escape near '\"\\u12g'"},
        {"[\"\xff\"]", "unable to decode byte 0xff"},
        {"[01]", "invalid token near '0'"},
        {"[1.]", "invalid token near '1.'"},
        {"[+1]", "invalid token near '+'"},
        {"{} {}", "end of file expected near '{'"},
        {"", "near end of file"},
    };
    err_t err;
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        bool is_json = pai_json_check(rows[i].text, strlen(rows[i].text), "j", &err) == HVD_OK;
        assert_int_equal(is_json, rows[i].sentence == NULL);
        if (!is_json && strstr(err.text, rows[i].sentence) == NULL) {
            fail_msg("%s\nis not told as: %s", err.text, rows[i].sentence);
        }
    }
}

// Also what is deep beyond all measure is refused at once.
static void test_depth(void **state)
{
    static char text[400000];
    pai_document_t *document;
    err_t err;
    (void)state;
    for (int depth = PAI_MAX_DEPTH; depth <= (int)sizeof text / 2; depth += 20000) {
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        uint64_t begin_ns = clock_ns();
        hvd_status_t wanted = depth > PAI_MAX_DEPTH ? HVD_INVALID_ARGUMENT : HVD_OK;
        assert_int_equal(pai_json_check(text, (size_t)depth * 2, "j", &err), wanted);
        assert_int_equal(pai_document_read(text, (size_t)depth * 2, "j", &document, &err), wanted);
        assert_true(clock_ns() - begin_ns < NS_PER_S);
        if (wanted == HVD_OK) {
            pai_document_free(document);
        } else {
            assert_non_null(strstr(err.text, "j, line 1: maps and lists are nested more than 64"));
        }
    }
}

// --- Rules ---------------------------------------------------------------------------------------

static void test_findings(void **state)
{
    static const struct {
        const char *text;
        pai_format_t format;
        const char *expected;
    } rows[] = {
        {"", PAI_V2, "t:1: this is not a job: it has no keys\n"},
        {"[]", PAI_V1, "t:1: this is not a job: it has no keys\n"},
        {"{jobName: a, image: i, taskRoles: [{name: m, command: c}]}", PAI_V1, ""},
        {"jobName: a\nimage: i\ntaskRoles:\n- name: m\n  command: c\n  shmMB: 101\n", PAI_V1,
         "t:6: taskRoles[0].shmMB: is 101, but must be at most memoryMB (100)\n"},
        {"jobName: a\nimage: i\ntaskRoles: [7]\n", PAI_V1,
         "t:3: taskRoles[0]: is a whole number, but must be a map of keys\n"},
        {"protocolVersion: '2'\nname: a\ntype: job\ntaskRoles: {}\n", PAI_V2,
         "t:4: taskRoles: is empty, but needs at least one entry\n"},
        {"protocolVersion: 2\nname: a\ntype: job\ntaskRoles:\n  m:\n    dockerImage: i\n"
         "    commands: [c]\n    resourcePerInstance: {cpu: 1, memoryMB: 1, gpu: 0, ports: {}}\n"
         "prerequisites: [{name: i, type: dockerimage, uri: u}]\n",
         PAI_V2,
         "t:8: taskRoles.m.resourcePerInstance.ports: is empty, but needs at least one entry\n"},
    };
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        pai_document_t *document = read_text(rows[i].text);
        pai_findings_t findings = {.file = "t"};
        pai_check(document, rows[i].format, &findings);
        buf_append(&findings.text, "", 1);
        assert_string_equal((const char *)findings.text.data, rows[i].expected);
        buf_free(&findings.text);
        pai_document_free(document);
    }
}

static void test_formats(void **state)
{
    static const struct {
        const char *text, *file;
        pai_format_t format;
    } rows[] = {
        {"{jobName: a}", "x.yaml", PAI_V1},
        {"{protocolVersion: 2}", "x.json", PAI_V2},
        {"{a: b}", "x.json", PAI_V1},
        {"{a: b}", "x.yaml", PAI_V2},
        {"{jobName: a, protocolVersion: 2}", "x", PAI_V2},
    };
    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        pai_document_t *document = read_text(rows[i].text);
        assert_int_equal(pai_format_of(document, rows[i].file), rows[i].format);
        pai_document_free(document);
    }
}

// --- Tasks ---------------------------------------------------------------------------------------

static const char *const names[] = {
    "PAI_TASK_ROLE_LIST=w.1,master",
    "PAI_TASK_ROLE_TASK_COUNT_w.1=2",
    "PAI_TASK_ROLE_TASK_COUNT_master=1",
    "PAI_CURRENT_TASK_ROLE_NAME=master",
    "PAI_TASK_INDEX=0",
    "PAI_HOST_IP_w.1_0=10.0.0.4",
    "PAI_HOST_IP_w.1_1=10.0.0.4",
    "PAI_HOST_IP_master_0=10.0.0.4",
    "PAI_PORT_LIST_w.1_1_horovod=15001,15002",
};

static void set_all(bool is_set)
{
    for (size_t i = 0; i < N_ELEMENTS(names); i++) {
        char *name = strndup(names[i], strcspn(names[i], "="));
        assert_non_null(name);
        if (is_set) {
            assert_int_equal(setenv(name, strchr(names[i], '=') + 1, 1), 0);
        } else {
            unsetenv(name);
        }
        free(name);
    }
    unsetenv("PAI_RESOURCE");
    unsetenv("PAI_RESOURCE_w.1");
}

// All tasks on one machine, with roles as v1 allows them.
static void test_tasks_are_hosts(void **state)
{
    options_t options = {0};
    hosts_t hosts;
    err_t err;
    (void)state;
    set_all(true);
    setenv("PAI_RESOURCE_w.1", "4,8,1024,64", 1);
    setenv("PAI_RESOURCE", "2,8,1024,64", 1);
    assert_int_equal(pai_tasks(&options, &hosts, &err), HVD_OK);
    assert_int_equal(hosts.n, 3);
    assert_true(hosts.knows_local);
    static const struct {
        const char *name;
        int slots, port;
    } expected[] = {{"master-0", 2, 0}, {"w.1-0", 4, 0}, {"w.1-1", 4, 15001}};
    for (int i = 0; i < 3; i++) {
        assert_string_equal(hosts.list[i].name, expected[i].name);
        assert_string_equal(hosts.list[i].target, expected[i].name);
        assert_string_equal(hosts.list[i].address, "10.0.0.4");
        assert_int_equal(hosts.list[i].slots, expected[i].slots);
        assert_int_equal(hosts.list[i].agent_port, expected[i].port);
        assert_int_equal(hosts.list[i].is_local, i == 0);
    }
    hosts_free(&hosts);
    options.slots_per_host = 3;
    options.origins[OPTION_slots_per_host] = BY_FLAG;
    assert_int_equal(pai_tasks(&options, &hosts, &err), HVD_OK);
    assert_int_equal(hosts.list[1].slots, 3);
    hosts_free(&hosts);
    set_all(false);
}

static void test_variables_that_are_wrong(void **state)
{
    static const struct {
        const char *name, *value, *said; // value NULL: not set
    } rows[] = {
        {"PAI_TASK_ROLE_LIST", NULL, "PAI_TASK_ROLE_LIST is not set"},
        {"PAI_TASK_ROLE_TASK_COUNT_w.1", "many",
         "PAI_TASK_ROLE_TASK_COUNT_w.1 is not set, or is not a number"},
        {"PAI_TASK_ROLE_TASK_COUNT_w.1", "99999999999999999999", "or is not a number"},
        {"PAI_CURRENT_TASK_ROLE_NAME", NULL, "PAI_CURRENT_TASK_ROLE_NAME is not set"},
        {"PAI_CURRENT_TASK_ROLE_NAME", "other", "do not name a task"},
        {"PAI_TASK_INDEX", "7", "do not name a task"},
        {"PAI_TASK_INDEX", "-1", "CURRENT_TASK_INDEX is not set"},
        {"PAI_HOST_IP_w.1_1", NULL, "PAI_HOST_IP_w.1_1 is not set"},
    };
    options_t options = {0};
    hosts_t hosts;
    err_t err;

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(rows); i++) {
        set_all(true);
        if (rows[i].value != NULL) {
            setenv(rows[i].name, rows[i].value, 1);
        } else {
            unsetenv(rows[i].name);
        }
        assert_int_equal(pai_tasks(&options, &hosts, &err), HVD_INVALID_ARGUMENT);
        assert_non_null(strstr(err.text, rows[i].said));
    }
    set_all(false);
}

static void test_interface_of_an_address(void **state)
{
    char name[64];
    (void)state;
    assert_true(pai_interface("127.0.0.1", name, sizeof name));
    assert_string_equal(name, "lo");
    assert_false(pai_interface("192.0.2.77", name, sizeof name));
    assert_false(pai_interface("", name, sizeof name));
    assert_false(pai_interface("localhost", name, sizeof name));
}

// --- Writing -------------------------------------------------------------------------------------

static void test_what_is_written_is_right(void **state)
{
    char *words[] = {"a", "b \"c\"\n\\"};
    pai_options_t options = {.name = "n",
                             .image = "i\"\\",
                             .virtual_cluster = "",
                             .workers = 2,
                             .cpus = 1,
                             .memory_mb = 100,
                             .shm_mb = 64,
                             .words = words,
                             .n_words = 2};
    (void)state;
    for (pai_format_t format = PAI_V1; format <= PAI_V2; format++) {
        pai_findings_t findings = {.file = "t"};
        buf_t text = {0};
        pai_write(&options, format, &text);
        buf_append(&text, "", 1);
        assert_false(text.failed);
        pai_document_t *document = read_text((const char *)text.data);
        assert_int_equal(pai_format_of(document, "t"), format);
        pai_check(document, format, &findings);
        assert_int_equal(findings.n_errors + findings.n_warnings, 0);
        pai_document_free(document);
        buf_free(&text);
    }
}

static void test_what_is_not_utf8_is_not_written(void **state)
{
    char *words[] = {"a\xff"};
    pai_options_t options = {.name = "n",
                             .image = "i",
                             .virtual_cluster = "",
                             .workers = 2,
                             .rdma = true,
                             .words = words,
                             .n_words = 1};
    (void)state;
    for (pai_format_t format = PAI_V1; format <= PAI_V2; format++) {
        buf_t text = {0};
        pai_write(&options, format, &text);
        assert_true(text.failed);
        buf_free(&text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_types),
        cmocka_unit_test(test_getting_around),
        cmocka_unit_test(test_what_cannot_be_read),
        cmocka_unit_test(test_json),
        cmocka_unit_test(test_depth),
        cmocka_unit_test(test_findings),
        cmocka_unit_test(test_formats),
        cmocka_unit_test(test_tasks_are_hosts),
        cmocka_unit_test(test_variables_that_are_wrong),
        cmocka_unit_test(test_interface_of_an_address),
        cmocka_unit_test(test_what_is_written_is_right),
        cmocka_unit_test(test_what_is_not_utf8_is_not_written),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
