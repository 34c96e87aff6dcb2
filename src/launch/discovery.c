// SPDX-License-Identifier: Apache-2.0
//
// discovery.c - asks for the hosts of an elastic job: a script, once a second, in a thread.
//
// The script prints one host, or host:slots, per line; what it prints counts if it exits with 0.
// Names are looked up here too, as resolvers may be slow. A first answer is needed to start; later
// failures are warned of once in a row, and the hosts stay as they were. Without a script the hosts
// of -H or the hostfile are all there ever are.
#define _GNU_SOURCE
#include "launch/host_pool.h"
#include "launch/launch.h"
#include "launch/process.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#define ASK_EVERY_S 1
#define SCRIPT_TIMEOUT_MS 20000
#define MAX_BYTES (256 * KIB)

struct discovery {
    const options_t *options;
    const char *script;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool has_thread, is_stopping, is_new, has_warned;
    hosts_t hosts; // newest, when is_new
    char *text;    // the script's last answer; the thread's alone after the start
};

static bool is_blank(const char *text)
{
    return text[strspn(text, " \t\r\n")] == '\0';
}

// What the script says now. text: MAX_BYTES.
static hvd_status_t ask(const discovery_t *discovery, char *text, hosts_t *hosts_p, err_t *err)
{
    char *argv[] = {(char *)discovery->script, NULL};
    int code = run_program(argv, SCRIPT_TIMEOUT_MS, text, MAX_BYTES);
    if (code != 0) {
        return fail(err, HVD_INVALID_ARGUMENT,
                    "Failed to execute discovery script: %s. Exit code: %d; it must be executable, "
                    "print one host or host:slots per line and exit with 0 within %d s",
                    discovery->script, code, SCRIPT_TIMEOUT_MS / 1000);
    }
    if (is_blank(text)) {
        *hosts_p = (hosts_t){0};
        return HVD_OK;
    }
    hvd_status_t status = hostfile_parse(text, discovery->script,
                                         (int)discovery->options->slots_per_host, hosts_p, err);
    if (status == HVD_OK) {
        hosts_find_local(discovery->options, hosts_p);
    }
    return status;
}

static void offer(discovery_t *discovery, hosts_t hosts)
{
    pthread_mutex_lock(&discovery->lock);
    if (discovery->is_new) {
        hosts_free(&discovery->hosts);
    }
    discovery->hosts = hosts;
    discovery->is_new = true;
    pthread_mutex_unlock(&discovery->lock);
}

static void ask_again(discovery_t *discovery, char *text)
{
    hosts_t hosts;
    err_t err = {0};
    if (ask(discovery, text, &hosts, &err) != HVD_OK) {
        if (!discovery->has_warned) {
            say("warning: %s; the hosts stay as they are", err.text);
        }
        discovery->has_warned = true;
        return;
    }
    discovery->has_warned = false;
    if (strcmp(text, discovery->text) == 0) {
        hosts_free(&hosts);
        return;
    }
    memcpy(discovery->text, text, strlen(text) + 1);
    offer(discovery, hosts);
}

static bool wait_for_turn(discovery_t *discovery)
{
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    at.tv_sec += ASK_EVERY_S;
    pthread_mutex_lock(&discovery->lock);
    while (!discovery->is_stopping &&
           pthread_cond_timedwait(&discovery->changed, &discovery->lock, &at) != ETIMEDOUT) {
    }
    bool goes_on = !discovery->is_stopping;
    pthread_mutex_unlock(&discovery->lock);
    return goes_on;
}

static void *run(void *arg)
{
    discovery_t *discovery = arg;
    char *text = malloc(MAX_BYTES);
    while (text != NULL && wait_for_turn(discovery)) {
        ask_again(discovery, text);
    }
    free(text);
    return NULL;
}

static hvd_status_t ask_first(discovery_t *discovery, const options_t *options, err_t *err)
{
    hosts_t hosts;
    hvd_status_t status;
    if (discovery->script[0] != '\0') {
        status = ask(discovery, discovery->text, &hosts, err);
    } else {
        status = hosts_choose(options, &hosts, err);
        if (status == HVD_OK) {
            hosts_find_local(options, &hosts);
        }
    }
    if (status == HVD_OK) {
        offer(discovery, hosts);
    }
    return status;
}

hvd_status_t discovery_start(const options_t *options, discovery_t **discovery_p, err_t *err)
{
    discovery_t *discovery = calloc(1, sizeof *discovery);
    char *text = calloc(1, MAX_BYTES);
    if (discovery == NULL || text == NULL) {
        free(discovery);
        free(text);
        return fail(err, HVD_NO_MEMORY, "no memory to look for hosts");
    }
    *discovery =
        (discovery_t){.options = options, .script = options->host_discovery_script, .text = text};
    pthread_mutex_init(&discovery->lock, NULL);
    pthread_cond_init(&discovery->changed, NULL);
    hvd_status_t status = ask_first(discovery, options, err);
    if (status == HVD_OK && discovery->script[0] != '\0') {
        discovery->has_thread = pthread_create(&discovery->thread, NULL, run, discovery) == 0;
        status = discovery->has_thread
                     ? HVD_OK
                     : fail(err, HVD_SYSTEM, "cannot start a thread to look for hosts");
    }
    if (status != HVD_OK) {
        discovery_stop(discovery);
        return status;
    }
    *discovery_p = discovery;
    return HVD_OK;
}

bool discovery_take(discovery_t *discovery, hosts_t *hosts_p)
{
    pthread_mutex_lock(&discovery->lock);
    bool is_new = discovery->is_new;
    if (is_new) {
        *hosts_p = discovery->hosts;
        discovery->hosts = (hosts_t){0};
        discovery->is_new = false;
    }
    pthread_mutex_unlock(&discovery->lock);
    return is_new;
}

bool discovery_goes_on(const discovery_t *discovery)
{
    return discovery->has_thread;
}

void discovery_stop(discovery_t *discovery)
{
    if (discovery == NULL) {
        return;
    }
    pthread_mutex_lock(&discovery->lock);
    discovery->is_stopping = true;
    pthread_cond_signal(&discovery->changed);
    pthread_mutex_unlock(&discovery->lock);
    if (discovery->has_thread) {
        pthread_join(discovery->thread, NULL);
    }
    hosts_free(&discovery->hosts);
    pthread_mutex_destroy(&discovery->lock);
    pthread_cond_destroy(&discovery->changed);
    free(discovery->text);
    free(discovery);
}
