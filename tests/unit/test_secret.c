// SPDX-License-Identifier: Apache-2.0
//
// test_secret.c - the job's secret as text, in files and in memory. How a rank finds its own is in
// test_boot.c.
#include "wire/secret.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static const uint8_t secret[SECRET_BYTES] = {0x00, 0x01, 0x7f, 0x80, 0xfe, 0xff, 0xa5};
static char path[] = "/tmp/test_secret.XXXXXX";

static void text_and_back(void **state)
{
    char digits[SECRET_DIGITS + 2];
    uint8_t back[SECRET_BYTES];
    (void)state;

    secret_encode(secret, digits);
    assert_int_equal(strlen(digits), SECRET_DIGITS);
    assert_memory_equal(digits, "00017f80feffa500", 16);
    assert_true(secret_decode(digits, SECRET_DIGITS, back));
    assert_memory_equal(back, secret, SECRET_BYTES);
    assert_false(secret_decode(digits, SECRET_DIGITS - 1, back));
    digits[SECRET_DIGITS] = '\n';
    assert_true(secret_decode(digits, SECRET_DIGITS + 1, back));
    digits[SECRET_DIGITS] = ' ';
    assert_false(secret_decode(digits, SECRET_DIGITS + 1, back));
    digits[0] = 'g';
    assert_false(secret_decode(digits, SECRET_DIGITS, back));
}

static hvd_status_t read_it(secret_readers_t readers, err_t *err)
{
    uint8_t back[SECRET_BYTES] = {0};
    hvd_status_t status =
        secret_read_file(path, "--secret-file", readers, deadline_in_ms(1000), back, err);
    if (status == HVD_OK) {
        assert_memory_equal(back, secret, SECRET_BYTES);
    }
    return status;
}

static void files_are_private(void **state)
{
    const struct {
        mode_t mode;
        hvd_status_t for_owner, for_group;
    } cases[] = {
        {0600, HVD_OK, HVD_OK},
        {0400, HVD_OK, HVD_OK},
        {0440, HVD_INVALID_ARGUMENT, HVD_OK},
        {0620, HVD_INVALID_ARGUMENT, HVD_OK},
        {0604, HVD_INVALID_ARGUMENT, HVD_INVALID_ARGUMENT},
        {0602, HVD_INVALID_ARGUMENT, HVD_INVALID_ARGUMENT},
    };
    char digits[SECRET_DIGITS + 1];
    struct stat seen;
    err_t err;
    (void)state;

    assert_true(mkstemp(path) >= 0);
    secret_encode(secret, digits);
    assert_int_equal(secret_write_file(path, digits, SECRET_DIGITS, &err), HVD_SYSTEM); // it exists
    assert_int_equal(unlink(path), 0);
    umask(0);
    assert_int_equal(secret_write_file(path, digits, SECRET_DIGITS, &err), HVD_OK);
    assert_int_equal(stat(path, &seen), 0);
    assert_int_equal(seen.st_mode & 07777, 0600);
    for (size_t i = 0; i < N_ELEMENTS(cases); i++) {
        assert_int_equal(chmod(path, cases[i].mode), 0);
        assert_int_equal(read_it(SECRET_FOR_OWNER, &err), cases[i].for_owner);
        assert_int_equal(read_it(SECRET_FOR_GROUP, &err), cases[i].for_group);
    }
    assert_non_null(strstr(err.text, "chmod o-rwx"));
    assert_int_equal(unlink(path), 0);
    assert_int_equal(read_it(SECRET_FOR_GROUP, &err), HVD_SYSTEM);
    assert_non_null(strstr(err.text, "--secret-file"));
}

static void tokens_are_treated_alike(void **state)
{
    char one[33], other[33], back[33];
    err_t err;
    (void)state;
    assert_int_equal(secret_make_token(one, sizeof one, &err), HVD_OK);
    assert_int_equal(secret_make_token(other, sizeof other, &err), HVD_OK);
    assert_int_equal(strspn(one, "0123456789abcdef"), 32);
    assert_int_equal(strlen(one), 32);
    assert_string_not_equal(one, other);
    assert_int_equal(secret_write_file(path, one, 32, &err), HVD_OK);
    assert_int_equal(secret_read_token(path, "--token-file", SECRET_FOR_GROUP, deadline_in_ms(1000),
                                       back, sizeof back, &err),
                     HVD_OK);
    assert_string_equal(back, one);
    assert_int_equal(secret_read_token(path, "--token-file", SECRET_FOR_GROUP, deadline_in_ms(1000),
                                       back, 9, &err), // no more than there is room for
                     HVD_OK);
    assert_int_equal(strlen(back), 8);
    assert_int_equal(chmod(path, 0644), 0);
    assert_int_equal(secret_read_token(path, "--token-file", SECRET_FOR_GROUP, deadline_in_ms(1000),
                                       back, sizeof back, &err),
                     HVD_INVALID_ARGUMENT);
    assert_string_equal(back, "");
    assert_int_equal(unlink(path), 0);
}

// The flags the kernel has for the mapping that holds `at`, as in "VmFlags: rd wr mr dd".
static void mapping_flags(const void *at, char flags[512])
{
    FILE *file = fopen("/proc/self/smaps", "r");
    char line[512];
    bool here = false;
    flags[0] = '\0';
    assert_non_null(file);
    while (fgets(line, sizeof line, file) != NULL) {
        unsigned long first, last;
        if (sscanf(line, "%lx-%lx ", &first, &last) == 2) {
            here = (unsigned long)at >= first && (unsigned long)at < last;
        } else if (here && strncmp(line, "VmFlags:", 8) == 0) {
            memcpy(flags, line, sizeof line);
        }
    }
    fclose(file);
}

static void secrets_stay_here(void **state)
{
    char flags[512];
    int status;
    (void)state;

    uint8_t *kept = secret_new(32);
    assert_non_null(kept);
    assert_int_equal(kept[31], 0);
    memset(kept, 0x5a, 32);
    mapping_flags(kept, flags);
    assert_non_null(strstr(flags, " dd")); // not in core dumps
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        _exit(kept[0] != 0); // the child finds zeros
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(kept[0], 0x5a);
    secret_free(kept, 32);
    secret_free(NULL, 32);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_and_back),
        cmocka_unit_test(files_are_private),
        cmocka_unit_test(tokens_are_treated_alike),
        cmocka_unit_test(secrets_stay_here),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
