// SPDX-License-Identifier: Apache-2.0
//
// sim.c - settings of the simulated GPU, the mistakes it has found, and which device a thread uses.
//
// Settings come from the environment, once; README.md lists them. A mistake is what no schedule
// excuses, such as memory used after it was freed: it is told on stderr, counted for tests, and
// breaks the device it happened on, as a real one would be.
#define _GNU_SOURCE
#include "sim.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_CONTEXTS 64

pthread_mutex_t sim_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t sim_news;
sim_settings_t sim;

static struct {
    int n_mistakes;
    char last[512];
    int broken[SIM_DEVICES]; // code; 0: whole
    int n_calls;             // of the call that is to fail
} state;

static __thread struct {
    int stack[MAX_CONTEXTS];
    int depth;
} contexts;

// --- Settings ------------------------------------------------------------------------------------

static unsigned long number_of(const char *name, unsigned long otherwise)
{
    const char *text = getenv(name);
    return text != NULL ? strtoul(text, NULL, 0) : otherwise;
}

static sim_schedule_t schedule_of(const char *name)
{
    static const char *const names[] = {"eager", "random", "lazy", "user-lazy"};
    for (int i = 0; name != NULL && i < 4; i++) {
        if (strcmp(name, names[i]) == 0) {
            return (sim_schedule_t)i;
        }
    }
    if (name != NULL) {
        fprintf(stderr, "gpusim: no schedule \"%s\": eager, random, lazy or user-lazy\n", name);
        abort();
    }
    return SCHEDULE_EAGER;
}

static void read_settings(void)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&sim_news, &monotonic);
    unsigned long n = number_of("GPUSIM_DEVICES", 2);
    sim = (sim_settings_t){
        .n_devices = n < SIM_DEVICES ? (int)n : SIM_DEVICES,
        .schedule = schedule_of(getenv("GPUSIM_SCHEDULE")),
        .seed = number_of("GPUSIM_SEED", 1),
        .delay_us = (unsigned)number_of("GPUSIM_DELAY_US", 500),
        .lazy_ms = (unsigned)number_of("GPUSIM_LAZY_MS", 20),
        .memory_bytes = number_of("GPUSIM_MEMORY_MB", 8192) << 20,
        .fail_call = getenv("GPUSIM_FAIL"),
        .log_path = getenv("GPUSIM_LOG"),
        .replay_path = getenv("GPUSIM_REPLAY"),
        .one_kernel = number_of("GPUSIM_ONE_KERNEL", 0) != 0,
        .abort_hangs = number_of("GPUSIM_ABORT_HANGS", 0) != 0,
        .deadlock_ms = (unsigned)number_of("GPUSIM_DEADLOCK_MS", 2000),
        .nccl_init_ms = (unsigned)number_of("GPUSIM_NCCL_INIT_MS", 5),
        .nccl_version = (int)number_of("GPUSIM_NCCL_VERSION", 0),
        .host_alloc_ms = (unsigned)number_of("GPUSIM_HOST_ALLOC_MS", 0),
    };
}

void sim_setup(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_settings);
}

uint64_t sim_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

// splitmix64 over all three.
uint64_t sim_random(uint64_t a, uint64_t b)
{
    uint64_t x = sim.seed * 0x9e3779b97f4a7c15u ^ a * 0xbf58476d1ce4e5b9u ^ b * 0x94d049bb133111ebu;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// --- Mistakes ------------------------------------------------------------------------------------

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

int sim_mistake(int code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    pthread_mutex_lock(&one_at_a_time);
    vsnprintf(state.last, sizeof state.last, format, args);
    state.n_mistakes++;
    fprintf(stderr, "gpusim: process %d: %s\n", (int)getpid(), state.last);
    pthread_mutex_unlock(&one_at_a_time);
    va_end(args);
    return code;
}

int gpusim_mistakes(void)
{
    pthread_mutex_lock(&one_at_a_time);
    int n = state.n_mistakes;
    pthread_mutex_unlock(&one_at_a_time);
    return n;
}

const char *gpusim_last_mistake(void)
{
    static __thread char last[sizeof state.last];
    pthread_mutex_lock(&one_at_a_time);
    memcpy(last, state.last, sizeof last);
    pthread_mutex_unlock(&one_at_a_time);
    return last;
}

bool sim_call_fails(const char *name)
{
    const char *colon = sim.fail_call != NULL ? strchr(sim.fail_call, ':') : NULL;
    size_t length = colon != NULL ? (size_t)(colon - sim.fail_call) : 0;
    if (length == 0 || strlen(name) != length || strncmp(name, sim.fail_call, length) != 0) {
        return false;
    }
    return __atomic_add_fetch(&state.n_calls, 1, __ATOMIC_RELAXED) == atoi(colon + 1);
}

const char *sim_error_name(int code)
{
    static const struct {
        int code;
        const char *name;
    } names[] = {
        {SIM_OK, "no error"},
        {SIM_INVALID_VALUE, "invalid argument"},
        {SIM_OUT_OF_MEMORY, "out of memory"},
        {SIM_NO_DEVICE, "no CUDA-capable device is detected"},
        {SIM_INVALID_DEVICE, "invalid device ordinal"},
        {SIM_INVALID_CONTEXT, "invalid device context"},
        {SIM_INVALID_HANDLE, "invalid resource handle"},
        {SIM_NOT_FOUND, "named symbol not found"},
        {SIM_NOT_READY, "device not ready"},
        {SIM_ILLEGAL_ADDRESS, "an illegal memory access was encountered"},
        {SIM_NOT_SUPPORTED, "operation not supported"},
        {SIM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"},
        {SIM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (names[i].code == code) {
            return names[i].name;
        }
    }
    return "unknown error";
}

// --- Devices -------------------------------------------------------------------------------------

int sim_current(void)
{
    return contexts.depth > 0 ? contexts.stack[contexts.depth - 1] : -1;
}

void sim_set_current(int device)
{
    contexts.depth = contexts.depth > 0 ? contexts.depth : 1;
    contexts.stack[contexts.depth - 1] = device;
}

int sim_push_current(int device)
{
    if (contexts.depth == MAX_CONTEXTS) {
        return sim_mistake(SIM_INVALID_CONTEXT, "contexts are pushed and never popped");
    }
    contexts.stack[contexts.depth++] = device;
    return SIM_OK;
}

int sim_pop_current(int *device_p)
{
    if (contexts.depth == 0) {
        return sim_mistake(SIM_INVALID_CONTEXT, "a context is popped that was not pushed");
    }
    *device_p = contexts.stack[--contexts.depth];
    return SIM_OK;
}

void sim_break_device(int device, int code)
{
    int whole = 0;
    __atomic_compare_exchange_n(&state.broken[device], &whole, code, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
}

int sim_device_error(int device)
{
    return __atomic_load_n(&state.broken[device], __ATOMIC_RELAXED);
}
