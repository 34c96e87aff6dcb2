// SPDX-License-Identifier: Apache-2.0
//
// test_dial.c - agents that dial: who is taken for which host, and who is forgotten.
//
// The agents are processes that only say hello; the launcher's side is this one.
#define _GNU_SOURCE
#include "launch/launch.h"
#include "launch/link.h"

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define DIGITS "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"

typedef struct scene {
    char directory[64], secret_file[96], place_file[96], place[256];
    options_t options;
    awaited_t *awaited;
} scene_t;

static int set_up(void **state)
{
    static scene_t scene;
    err_t err = {0};
    scene = (scene_t){.directory = "/tmp/hvd-test-dial-XXXXXX"};
    assert_non_null(mkdtemp(scene.directory));
    snprintf(scene.secret_file, sizeof scene.secret_file, "%s/secret", scene.directory);
    snprintf(scene.place_file, sizeof scene.place_file, "%s/place", scene.directory);
    assert_int_equal(secret_write_file(scene.secret_file, DIGITS, SECRET_DIGITS, &err), HVD_OK);
    scene.options = (options_t){.secret_file = scene.secret_file,
                                .await_file = scene.place_file,
                                .await_address = "",
                                .network_interfaces = "lo",
                                .dial = scene.place,
                                .start_timeout = 1,
                                .secret_fd = -1,
                                .life_fd = -1,
                                .events_fd = -1};
    assert_int_equal(awaited_open(&scene.options, &scene.awaited, &err), HVD_OK);
    int fd = open(scene.place_file, O_RDONLY | O_CLOEXEC);
    ssize_t n = read(fd, scene.place, sizeof scene.place - 1);
    close(fd);
    assert_true(n > 0 && scene.place[n - 1] == '\n');
    scene.place[n - 1] = '\0';
    signal(SIGPIPE, SIG_IGN);
    *state = &scene;
    return 0;
}

static int tear_down(void **state)
{
    scene_t *scene = *state;
    awaited_close(scene->awaited);
    unlink(scene->secret_file);
    unlink(scene->place_file);
    rmdir(scene->directory);
    return 0;
}

// A process that dials, says this, and lives until it is killed.
static pid_t start_agent(const scene_t *scene, const frame_t *hello)
{
    pid_t pid = fork();
    if (pid == 0) {
        channel_t channel;
        int code = dial_launcher(&scene->options, &channel);
        if (code != 0) {
            _exit(code);
        }
        if (hello != NULL) {
            channel_put(&channel, hello);
            channel_send(&channel);
        }
        pause();
    }
    return pid;
}

static void end_agent(pid_t pid)
{
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}

static bool take_within(scene_t *scene, const char *host, int timeout_ms, introduction_t *said_p)
{
    uint64_t deadline_ns = deadline_in_ms(timeout_ms);
    channel_t channel;
    do {
        awaited_progress(scene->awaited);
        if (awaited_take(scene->awaited, host, &channel, said_p)) {
            channel_close(&channel);
            return true;
        }
        usleep(1000);
    } while (clock_ns() < deadline_ns);
    return false;
}

// Until all that have dialled are known to have said something.
static void let_come(scene_t *scene, int ms)
{
    uint64_t deadline_ns = deadline_in_ms(ms);
    while (clock_ns() < deadline_ns) {
        awaited_progress(scene->awaited);
        usleep(1000);
    }
}

static void test_the_lowest_slot_of_a_name_is_taken_first(void **state)
{
    static const frame_t hellos[] = {
        {.kind = FRAME_HELLO, .hello = {.version = "1", .host = "x", .slot = 2, .about = "two"}},
        {.kind = FRAME_HELLO, .hello = {.version = "1", .host = "x", .slot = 1, .about = "one"}},
        {.kind = FRAME_HELLO, .hello = {.version = "2", .host = "y", .slot = 0, .about = "why"}},
    };
    scene_t *scene = *state;
    introduction_t said;
    pid_t agents[N_ELEMENTS(hellos)];
    for (size_t i = 0; i < N_ELEMENTS(hellos); i++) {
        agents[i] = start_agent(scene, &hellos[i]);
    }
    let_come(scene, 1500);
    assert_true(take_within(scene, "x", 5000, &said));
    assert_string_equal(said.about, "one");
    assert_true(take_within(scene, "x", 5000, &said));
    assert_string_equal(said.about, "two");
    assert_false(take_within(scene, "x", 50, &said));
    assert_true(take_within(scene, "y", 5000, &said));
    assert_string_equal(said.version, "2");
    for (size_t i = 0; i < N_ELEMENTS(hellos); i++) {
        end_agent(agents[i]);
    }
}

// Not an agent that was called, not one without a hello, not one that is gone.
static void test_others_are_not_taken(void **state)
{
    static const frame_t nameless = {.kind = FRAME_HELLO, .hello = {.version = "1"}};
    static const frame_t other = {.kind = FRAME_PING};
    static const frame_t right = {.kind = FRAME_HELLO, .hello = {.version = "1", .host = "x"}};
    scene_t *scene = *state;
    introduction_t said;
    const pid_t agents[] = {start_agent(scene, &nameless), start_agent(scene, &other),
                            start_agent(scene, NULL)};
    assert_false(take_within(scene, "", 1500, &said));
    pid_t gone = start_agent(scene, &right);
    let_come(scene, 500);
    end_agent(gone);
    let_come(scene, 500);
    assert_false(take_within(scene, "x", 50, &said));
    for (size_t i = 0; i < N_ELEMENTS(agents); i++) {
        end_agent(agents[i]);
    }
}

static void test_another_secret(void **state)
{
    scene_t *scene = *state, other = *scene;
    uint8_t secret[SECRET_BYTES] = {7};
    char digits[SECRET_DIGITS + 1], path[96];
    introduction_t said;
    err_t err = {0};
    int status;
    secret_encode(secret, digits);
    snprintf(path, sizeof path, "%s/other", scene->directory);
    assert_int_equal(secret_write_file(path, digits, SECRET_DIGITS, &err), HVD_OK);
    other.options.secret_file = path;
    pid_t agent = start_agent(&other, NULL);
    assert_false(take_within(scene, "x", 2500, &said));
    assert_int_equal(waitpid(agent, &status, 0), agent);
    assert_int_equal(WEXITSTATUS(status), EXIT_OTHER_SECRET);
    unlink(path);
}

static void test_wrong_addresses_are_refused(void **state)
{
    static char *const wrong[] = {"", "10.0.0.1", ":23", "10.0.0.1:"};
    scene_t *scene = *state;
    channel_t channel;
    for (size_t i = 0; i < N_ELEMENTS(wrong); i++) {
        options_t options = scene->options;
        options.dial = wrong[i];
        assert_int_equal(dial_launcher(&options, &channel), EXIT_USAGE);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_the_lowest_slot_of_a_name_is_taken_first, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_others_are_not_taken, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_another_secret, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_wrong_addresses_are_refused, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
