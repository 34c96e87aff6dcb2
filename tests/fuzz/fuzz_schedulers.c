// SPDX-License-Identifier: Apache-2.0
//
// fuzz_schedulers.c - lists of hosts, as schedulers leave them in variables and files.
//
// The first byte chooses the scheduler; the text up to the first '\0' is its list, the one behind
// it every other variable it reads. What is taken has names that ssh cannot mistake for options,
// and slots that can be added up; what is refused is an argument's fault.
#include "cli/schedulers.h"
#include "fuzz.h"

static const char *other; // what all other variables have

static const char *get(const char *name)
{
    (void)name;
    return other;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes == 0) {
        return 0;
    }
    char *text = malloc(bytes); // exactly as long, so that reading past it is seen
    MUST(text != NULL);
    memcpy(text, data + 1, bytes - 1);
    text[bytes - 1] = '\0';
    size_t used = strlen(text) + 1;
    other = used < bytes ? text + used : NULL;
    hosts_t hosts = {0};
    err_t err = {0};
    const scheduler_t *scheduler = &schedulers[data[0] % n_schedulers];
    const host_list_t list = {.source = scheduler->source, .text = text, .get = get};
    hvd_status_t status = scheduler->read(&list, &hosts, &err);
    MUST(status == HVD_OK || (status == HVD_INVALID_ARGUMENT && err.text[0] != '\0'));
    for (int i = 0; status == HVD_OK && i < hosts.n; i++) {
        const host_t *host = &hosts.list[i];
        MUST(host->name[0] != '\0' && host->name[0] != '-' &&
             strpbrk(host->name, " \n;$`'") == NULL);
        MUST(host->slots >= 1 && host->slots <= 1048576);
    }
    hosts_free(&hosts);
    free(text);
    return 0;
}
