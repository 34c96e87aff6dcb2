// SPDX-License-Identifier: Apache-2.0
//
// replay.c - runs a fuzz target over the files of a directory, once, without libFuzzer.
//
// So that every build, with any compiler and sanitizer, reads the kept inputs again: those that
// reach far, and those that once broke something. Each is also cut short at a few places.
#include "fuzz.h"

#include <dirent.h>
#include <sys/stat.h>

#define MAX_INPUT_BYTES (64 * KIB)

static size_t read_input(const char *directory, const char *name, uint8_t *data)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *file = fopen(path, "rb");
    MUST(file != NULL);
    size_t bytes = fread(data, 1, MAX_INPUT_BYTES, file);
    fclose(file);
    return bytes;
}

int main(int argc, char **argv)
{
    static uint8_t data[MAX_INPUT_BYTES];
    int n_inputs = 0;
    if (argc != 2) {
        fprintf(stderr, "usage: %s CORPUS_DIRECTORY\n", argv[0]);
        return 2;
    }
    DIR *directory = opendir(argv[1]);
    if (directory == NULL) {
        fprintf(stderr, "%s: cannot read %s\n", argv[0], argv[1]);
        return 2;
    }
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        if (entry->d_name[0] == '.') {
            continue;
        }
        size_t bytes = read_input(argv[1], entry->d_name, data);
        for (size_t cut = 0; cut < 4; cut++) {
            LLVMFuzzerTestOneInput(data, bytes - bytes * cut / 4);
        }
        n_inputs++;
    }
    closedir(directory);
    printf("%d inputs\n", n_inputs);
    return n_inputs == 0; // a corpus that has gone is a failure
}
