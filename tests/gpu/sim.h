// SPDX-License-Identifier: Apache-2.0
//
// sim.h - the inside of the simulated GPU: what its files share.
//
//   sim.c       settings, mistakes, which device a thread uses, errors that stick
//   memory.c    device and pinned memory: mapped so that a host access to the former is a fault
//   stream.c    streams and events: when queued work runs, by a schedule chosen with a seed
//   driver.c    the driver API (cu*)         runtime.c  the runtime API (cuda*)
//   nccl.c, nccl_wait.c, nccl_math.c   collectives between processes
//
// It stands in for libcuda, libcudart and libnccl under real programs, PyTorch among them, on
// machines without a GPU. It is made to find mistakes in ordering and in the life of memory, which
// a real GPU hides most of the time; it says nothing about speed. README.md tells what the
// environment chooses.
//
// Threads: every function may be called by any thread; one lock, sim_lock, guards all state.
#ifndef GPU_SIM_H
#define GPU_SIM_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SIM_DEVICES 8
#define EXPORT __attribute__((visibility("default")))

// The numbers that CUDA's driver and runtime share.
enum {
    SIM_OK = 0,
    SIM_INVALID_VALUE = 1,
    SIM_OUT_OF_MEMORY = 2,
    SIM_NO_DEVICE = 100,
    SIM_INVALID_DEVICE = 101,
    SIM_INVALID_CONTEXT = 201,
    SIM_INVALID_HANDLE = 400,
    SIM_NOT_FOUND = 500,
    SIM_NOT_READY = 600,
    SIM_ILLEGAL_ADDRESS = 700,
    SIM_NOT_SUPPORTED = 801,
    SIM_CAPTURE_UNSUPPORTED = 900,
    SIM_CAPTURE_INVALIDATED = 901,
};

typedef enum sim_schedule {
    SCHEDULE_EAGER,     // at once
    SCHEDULE_RANDOM,    // after a delay that seed, stream and number decide
    SCHEDULE_LAZY,      // not before somebody waits for it, or its time is up
    SCHEDULE_USER_LAZY, // so for default streams; the others at once
} sim_schedule_t;

typedef struct sim_settings {
    int n_devices;
    sim_schedule_t schedule;
    uint64_t seed;
    unsigned delay_us;     // random: at most
    unsigned lazy_ms;      // lazy: at most
    size_t memory_bytes;   // of each device
    const char *fail_call; // "name:n": the nth call of it finds no memory
    const char *log_path, *replay_path;
    bool one_kernel;        // collectives of a device exclude each other
    bool abort_hangs;       // ncclCommAbort never returns
    unsigned deadlock_ms;   // a collective looks for a cycle after so long
    unsigned nccl_init_ms;  // a communicator that does not block takes up to so long to make
    int nccl_version;       // 0: the simulation's own
    unsigned host_alloc_ms; // pinned memory takes so long to get, as after a device's work
} sim_settings_t;

extern pthread_mutex_t sim_lock;
extern pthread_cond_t sim_news; // something has ended, or is wanted
extern sim_settings_t sim;

typedef struct sim_stream sim_stream_t;
typedef struct sim_event sim_event_t;

// --- sim.c ---------------------------------------------------------------------------------------

void sim_setup(void); // reads the settings, once
uint64_t sim_now_ns(void);
uint64_t sim_random(uint64_t a, uint64_t b); // the same for the same seed
// The program has made a mistake: a sentence on stderr, and it counts. Returns code.
int sim_mistake(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
EXPORT int gpusim_timed_events(void);
EXPORT int gpusim_mistakes(void); // so many, and the last of them
EXPORT const char *gpusim_last_mistake(void);
bool sim_call_fails(const char *name); // by fail_call
const char *sim_error_name(int code);

// The device of the calling thread, as the driver API sees it; -1: no context is current.
int sim_current(void);
void sim_set_current(int device);
int sim_push_current(int device); // code
int sim_pop_current(int *device_p);
// Errors that stick: every later call on the device returns them.
void sim_break_device(int device, int code);
int sim_device_error(int device);

// --- memory.c ------------------------------------------------------------------------------------

int sim_malloc(int device, size_t bytes, void **memory_p);
int sim_free(void *memory);
int sim_host_alloc(size_t bytes, void **memory_p);
int sim_host_free(void *memory);
int sim_host_register(void *memory, size_t bytes);
int sim_host_unregister(void *memory);
void sim_memory_info(int device, size_t *free_p, size_t *total_p);
bool sim_is_device(const void *address); // anything the devices' memory spans
bool sim_is_pinned(const void *address);
int sim_device_of(const void *address); // -1: no living memory of a device
// Where the simulation reads and writes it. NULL, and a mistake, if [address, +bytes) is of a
// device but not within one living piece of it.
void *sim_touch(const void *address, size_t bytes, const char *who);

// --- stream.c ------------------------------------------------------------------------------------

typedef void (*sim_work_fn)(void *arg); // arg is malloc'ed, and freed afterwards

struct sim_event {
    int device;
    unsigned flags;
    sim_stream_t *on; // NULL: never recorded
    uint64_t number;  // of what must have ended there
    uint64_t recorded_ns;
    bool captured; // in a stream that was being captured
    struct sim_event *next_destroyed;
};

enum { STREAM_NON_BLOCKING = 1 };
enum { CAPTURE_NONE, CAPTURE_ACTIVE, CAPTURE_INVALIDATED };

sim_stream_t *sim_stream_new(int device, unsigned flags, int priority);
void sim_stream_free(sim_stream_t *stream);
// A handle of the API: NULL, 1 and 2 are the default stream of the device.
sim_stream_t *sim_stream_of(void *handle, int device);
int sim_stream_device(const sim_stream_t *stream);
int sim_stream_priority(const sim_stream_t *stream);
bool sim_stream_exists(const sim_stream_t *stream);
// Queues work; arg becomes the stream's, whatever comes of it.
int sim_push(sim_stream_t *stream, const char *what, sim_work_fn work, void *arg);
int sim_wait_stream(sim_stream_t *stream); // blocks
int sim_wait_device(int device);           // blocks
int sim_query_stream(sim_stream_t *stream);
int sim_copy(void *to, const void *from, size_t bytes, sim_stream_t *stream, bool blocks);
int sim_set(void *to, int value, size_t width, size_t bytes, sim_stream_t *stream);

sim_event_t *sim_event_new(int device, unsigned flags);
void sim_event_free(sim_event_t *event);
bool sim_event_exists(const sim_event_t *event);
int sim_record(sim_event_t *event, sim_stream_t *stream);
int sim_order(sim_stream_t *stream, const sim_event_t *event);
int sim_record_context(sim_event_t *event); // behind all that its device has been given
int sim_order_context(const sim_event_t *event);
int sim_query_event(sim_event_t *event);
int sim_elapsed(float *ms_p, const sim_event_t *from, const sim_event_t *to);
int sim_wait_event(sim_event_t *event); // blocks

int sim_capture_begin(sim_stream_t *stream);
int sim_capture_end(sim_stream_t *stream);
int sim_capture_state(const sim_stream_t *stream);

#endif
