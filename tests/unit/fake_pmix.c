// SPDX-License-Identifier: Apache-2.0
//
// fake_pmix.c - a PMIx library for tests: the daemon is a folder (FAKE_PMIX_DIR).
//
// Has just the functions that src/boot/pmix.c uses, with the same types by size. A value that is
// put becomes a file; a fence is a file per rank, waited for. FAKE_PMIX says what goes wrong:
// "init" a call that fails, "hang" one that never returns, "crash", "type" a value of a wrong type.
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct proc {
    char nspace[256];
    uint32_t rank;
} proc_t;

typedef struct value {
    uint16_t type;
    union {
        uint32_t uint32;
        char *string;
        uint64_t room[3];
    } data;
} value_t;

int PMIx_Initialized(void);
int PMIx_Init(proc_t *me, void *info, size_t n_info);
int PMIx_Finalize(const void *info, size_t n_info);
int PMIx_Put(uint8_t scope, const char *key, value_t *value);
int PMIx_Commit(void);
int PMIx_Fence(const proc_t *procs, size_t n_procs, const void *info, size_t n_info);
int PMIx_Get(const proc_t *proc, const char *key, const void *info, size_t n_info,
             value_t **value_p);

static char path[512];

static bool goes_wrong(const char *how)
{
    const char *wish = getenv("FAKE_PMIX");
    return wish != NULL && strcmp(wish, how) == 0;
}

static uint32_t number(const char *name)
{
    const char *text = getenv(name);
    return text != NULL ? (uint32_t)strtoul(text, NULL, 10) : 0;
}

static const char *in_folder(const char *kind, uint32_t turn, uint32_t rank)
{
    snprintf(path, sizeof path, "%s/%s.%u.%u", getenv("FAKE_PMIX_DIR"), kind, turn, rank);
    return path;
}

// How many times this rank has been through a fence.
static uint32_t turns(void)
{
    uint32_t turn = 0;
    while (access(in_folder("fence", turn, number("PMIX_RANK")), F_OK) == 0) {
        turn++;
    }
    return turn;
}

int PMIx_Initialized(void)
{
    return 0;
}

int PMIx_Init(proc_t *me, void *info, size_t n_info)
{
    (void)info;
    (void)n_info;
    snprintf(me->nspace, sizeof me->nspace, "%s", getenv("PMIX_NAMESPACE"));
    me->rank = number("PMIX_RANK");
    if (goes_wrong("crash")) {
        kill(getpid(), SIGKILL);
    }
    return goes_wrong("init") ? -25 : 0;
}

int PMIx_Finalize(const void *info, size_t n_info)
{
    (void)info;
    (void)n_info;
    return -1; // as after a lost daemon: must not matter
}

int PMIx_Put(uint8_t scope, const char *key, value_t *value)
{
    (void)scope;
    FILE *file = fopen(in_folder(key, turns(), 0), "w");
    if (file == NULL) {
        return -1;
    }
    fputs(value->data.string, file);
    return fclose(file);
}

int PMIx_Commit(void)
{
    return 0;
}

int PMIx_Fence(const proc_t *procs, size_t n_procs, const void *info, size_t n_info)
{
    uint32_t turn = turns();
    FILE *mine = fopen(in_folder("fence", turn, number("PMIX_RANK")), "w");
    (void)procs;
    (void)n_procs;
    (void)info;
    (void)n_info;
    if (mine == NULL) {
        return -1;
    }
    fclose(mine);
    while (goes_wrong("hang")) {
        pause();
    }
    for (uint32_t rank = 0; rank < number("FAKE_PMIX_SIZE"); rank++) {
        while (access(in_folder("fence", turn, rank), F_OK) != 0) {
            usleep(1000);
        }
    }
    return 0;
}

int PMIx_Get(const proc_t *proc, const char *key, const void *info, size_t n_info,
             value_t **value_p)
{
    static value_t value;
    static char text[2000];
    (void)proc;
    (void)info;
    (void)n_info;
    *value_p = &value;
    if (strcmp(key, "pmix.job.size") == 0) {
        value.type = goes_wrong("type") ? 3 : 14;
        value.data.uint32 = number("FAKE_PMIX_SIZE");
        return 0;
    }
    FILE *file = fopen(in_folder(key, turns() - 1, 0), "r");
    size_t len = file != NULL ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file != NULL) {
        fclose(file);
    }
    text[len] = '\0';
    value.type = 3;
    value.data.string = text;
    return len > 0 ? 0 : -46;
}
