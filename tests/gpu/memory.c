// SPDX-License-Identifier: Apache-2.0
//
// memory.c - memory of the simulated devices, and pinned memory of the host.
//
// All device memory is one file in memory, mapped twice: where programs see it nothing may be read
// or written, so a host access to a device pointer is a fault at the very instruction; the
// simulation itself uses the second mapping. Addresses are never given out twice, so a piece that
// was freed is told from its successors. Fresh memory is filled with 0xA5: what was never written
// does not look like zeros.
#define _GNU_SOURCE
#include "sim.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SPAN_BYTES ((size_t)64 << 30)
#define PIECE_ALIGN ((size_t)512)
#define PINNED_ALIGN ((size_t)4096)
#define FRESH 0xA5

typedef struct piece {
    uintptr_t at;
    size_t bytes;
    int device; // -1: pinned memory of the host
    struct piece *next;
} piece_t;

static struct {
    uintptr_t base;       // as programs see it
    unsigned char *inner; // as the simulation sees it
    int file;
    size_t n_given; // bytes of the span
    size_t used[SIM_DEVICES];
    piece_t *living; // of devices
    piece_t *pinned;
} memory;

static void map_span(void)
{
    memory.file = memfd_create("gpusim", MFD_CLOEXEC);
    if (memory.file < 0 || ftruncate(memory.file, (off_t)SPAN_BYTES) != 0) {
        perror("gpusim: memory");
        abort();
    }
    int flags = MAP_SHARED | MAP_NORESERVE;
    void *inner = mmap(NULL, SPAN_BYTES, PROT_READ | PROT_WRITE, flags, memory.file, 0);
    void *outer = mmap(NULL, SPAN_BYTES, PROT_NONE, flags, memory.file, 0);
    if (inner == MAP_FAILED || outer == MAP_FAILED) {
        perror("gpusim: mmap");
        abort();
    }
    memory.inner = inner;
    memory.base = (uintptr_t)outer;
}

static void open_memory(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    sim_setup();
    pthread_once(&once, map_span);
}

// The piece that has the address; under lock.
static piece_t **find(piece_t **list, uintptr_t at)
{
    piece_t **link = list;
    while (*link != NULL && at - (*link)->at >= (*link)->bytes) {
        link = &(*link)->next;
    }
    return link;
}

static void add(piece_t **list, uintptr_t at, size_t bytes, int device)
{
    piece_t *piece = malloc(sizeof *piece);
    *piece = (piece_t){.at = at, .bytes = bytes, .device = device, .next = *list};
    *list = piece;
}

// False: no piece begins there.
static bool take_out(piece_t **list, uintptr_t at, piece_t *piece_p)
{
    piece_t **link = find(list, at);
    piece_t *piece = *link;
    if (piece == NULL || piece->at != at) {
        return false;
    }
    *link = piece->next;
    *piece_p = *piece;
    free(piece);
    return true;
}

// --- Devices -------------------------------------------------------------------------------------

int sim_malloc(int device, size_t bytes, void **memory_p)
{
    open_memory();
    size_t whole = (bytes + PIECE_ALIGN - 1) & ~(PIECE_ALIGN - 1);
    if (bytes == 0) {
        *memory_p = NULL;
        return SIM_OK;
    }
    pthread_mutex_lock(&sim_lock);
    bool fits = memory.used[device] + whole <= sim.memory_bytes &&
                memory.n_given + whole + PIECE_ALIGN <= SPAN_BYTES;
    size_t at = memory.n_given;
    if (fits) {
        memory.n_given += whole + PIECE_ALIGN; // a gap: running over the end is noticed
        memory.used[device] += whole;
        add(&memory.living, memory.base + at, whole, device);
    }
    pthread_mutex_unlock(&sim_lock);
    if (!fits) {
        return SIM_OUT_OF_MEMORY;
    }
    memset(memory.inner + at, FRESH, whole);
    *memory_p = (void *)(memory.base + at);
    return SIM_OK;
}

int sim_free(void *given)
{
    if (given == NULL) {
        return SIM_OK;
    }
    open_memory();
    int device = sim_device_of(given);
    if (device >= 0) {
        sim_wait_device(device); // as the real one does
    }
    piece_t piece;
    pthread_mutex_lock(&sim_lock);
    bool lived = take_out(&memory.living, (uintptr_t)given, &piece);
    if (lived) {
        memory.used[piece.device] -= piece.bytes;
        fallocate(memory.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  (off_t)(piece.at - memory.base), (off_t)piece.bytes);
    }
    pthread_mutex_unlock(&sim_lock);
    return lived ? SIM_OK
                 : sim_mistake(SIM_INVALID_VALUE,
                               "%p is freed, but no piece of device memory "
                               "begins there, or it was freed before",
                               given);
}

void sim_memory_info(int device, size_t *free_p, size_t *total_p)
{
    open_memory();
    *total_p = sim.memory_bytes;
    *free_p = sim.memory_bytes - memory.used[device];
}

bool sim_is_device(const void *address)
{
    return memory.base != 0 && (uintptr_t)address - memory.base < SPAN_BYTES;
}

int sim_device_of(const void *address)
{
    pthread_mutex_lock(&sim_lock);
    const piece_t *piece = *find(&memory.living, (uintptr_t)address);
    int device = piece != NULL ? piece->device : -1;
    pthread_mutex_unlock(&sim_lock);
    return device;
}

void *sim_touch(const void *address, size_t bytes, const char *who)
{
    if (!sim_is_device(address)) {
        return (void *)(uintptr_t)address;
    }
    pthread_mutex_lock(&sim_lock);
    const piece_t *piece = *find(&memory.living, (uintptr_t)address);
    size_t left = piece != NULL ? piece->bytes - ((uintptr_t)address - piece->at) : 0;
    pthread_mutex_unlock(&sim_lock);
    if (piece == NULL || left < bytes) {
        sim_mistake(0, "%s uses %zu bytes at %p: %s", who, bytes, address,
                    piece == NULL ? "that memory was freed, or never given out"
                                  : "that is more than there is");
        return NULL;
    }
    return memory.inner + ((uintptr_t)address - memory.base);
}

// --- Pinned --------------------------------------------------------------------------------------

int sim_host_alloc(size_t bytes, void **memory_p)
{
    open_memory();
    void *given = NULL;
    if (sim_call_fails("host_alloc") ||
        posix_memalign(&given, PINNED_ALIGN, bytes > 0 ? bytes : 1) != 0) {
        return SIM_OUT_OF_MEMORY;
    }
    usleep(sim.host_alloc_ms * 1000);
    memset(given, FRESH, bytes);
    sim_host_register(given, bytes > 0 ? bytes : 1);
    *memory_p = given;
    return SIM_OK;
}

int sim_host_register(void *given, size_t bytes)
{
    pthread_mutex_lock(&sim_lock);
    add(&memory.pinned, (uintptr_t)given, bytes, -1);
    pthread_mutex_unlock(&sim_lock);
    return SIM_OK;
}

int sim_host_unregister(void *given)
{
    piece_t piece;
    pthread_mutex_lock(&sim_lock);
    bool lived = take_out(&memory.pinned, (uintptr_t)given, &piece);
    pthread_mutex_unlock(&sim_lock);
    return lived ? SIM_OK
                 : sim_mistake(SIM_INVALID_VALUE, "%p is unpinned, but was not pinned", given);
}

int sim_host_free(void *given)
{
    for (int device = 0; device < sim.n_devices; device++) {
        sim_wait_device(device); // as the real one does
    }
    int code = sim_host_unregister(given);
    if (code == SIM_OK) {
        free(given);
    }
    return code;
}

bool sim_is_pinned(const void *address)
{
    pthread_mutex_lock(&sim_lock);
    bool pinned = *find(&memory.pinned, (uintptr_t)address) != NULL;
    pthread_mutex_unlock(&sim_lock);
    return pinned;
}
