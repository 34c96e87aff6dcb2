// SPDX-License-Identifier: Apache-2.0
//
// shm.c - the shared-memory transport: one segment per host.
//
// The lowest rank of a host (its leader) creates the segment under a random name in /dev/shm, the
// others map it, and the name is removed once all have: nothing is left behind when ranks die. For
// the moment in between the leader holds a lock on it, so that the next job of this user on the
// host can tell a segment whose ranks were killed just then, and removes it.
// Memory is taken at once (fallocate), so a full /dev/shm is an answer at start and not a bus error
// later. Between processes that cannot map it the next transport serves.
//
//   header | per rank: wake word, window counters | rings | windows | cards | board
//
// A ring is a byte stream from one rank to one other: the sender owns `head`, the receiver `tail`.
// Control rings join the leader with each rank (the tree inside a host is a star), data rings join
// every pair. A sender that finds its receiver asleep rings the receiver's wake word (net.h).
#include "net/shm.h"

#include "wire/codec.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#define SHM_MAGIC 0x6d68735f64766831ull
#define SHM_NAME_BYTES 64
#define SHM_PREFIX "hvd-"
#define ABANDONED_SECONDS 60 // younger ones may belong to a job that starts just now
#define CONTROL_RING_BYTES (32 * KIB)
#define MAX_DATA_RING_BYTES (256 * KIB)
#define MIN_DATA_RING_BYTES (4 * KIB)
#define MAX_SLOT_BYTES (256 * KIB)
#define MIN_SLOT_BYTES (4 * KIB)
#define N_SLOTS 6
#define N_PLACES 64
#define BOARD_BYTES_EACH (16 * KIB) // of data; of less the more ranks there are, which ends at
#define BOARD_BYTES (64 * KIB)      // for all of them in one round
#define BOARD_TOLD_BYTES 256        // beside the data

typedef struct ring {
    _Alignas(2 * CACHE_LINE) atomic_uint_fast64_t head; // bytes ever written
    _Alignas(2 * CACHE_LINE) atomic_uint_fast64_t tail; // bytes ever read
    _Alignas(2 * CACHE_LINE) uint8_t bytes[];
} ring_t;

typedef struct shm_rank {
    _Alignas(2 * CACHE_LINE) atomic_uint wake;
    _Alignas(2 * CACHE_LINE) atomic_int core; // see cores.h
    memory_id_t memory;
    window_counters_t counters;
} shm_rank_t;

typedef struct shm_header {
    uint64_t magic;
    uint8_t nonce[16];
    uint64_t total_bytes;
    shm_rank_t ranks[];
} shm_header_t;

// Where everything lies; the same arithmetic on every rank.
typedef struct layout {
    int n_local;
    size_t control_ring, data_ring; // bytes of each ring, header not counted
    size_t slot;
    size_t place;   // bytes of one place of the board
    size_t board;   // and of one contribution there
    size_t through; // bytes of what all tell one rank
    size_t control_at, data_at, windows_at, cards_at, through_at, board_at, total;
} layout_t;

struct domain {
    const net_job_t *job;
    int *local_of; // index on this host of every rank; -1: another host
    int *rank_of;  // the ranks of this host, ascending
    layout_t layout;
    shm_header_t *segment;
    char name[SHM_NAME_BYTES]; // set on the leader while the segment has a name
    uint8_t nonce[16];
    uint64_t own_word; // by which others recognise the memory of this process
    bool reaches_memory;
    bool attached;
    err_t trouble; // why this host has no shared memory
};

typedef struct shm_link {
    net_link_t base;
    ring_t *out, *in;
    uint64_t out_bytes, in_bytes;  // ring sizes
    uint64_t head, tail;           // ours: written so far on out, read so far on in
    uint64_t seen_head, seen_tail; // the peer's, as last read
    atomic_uint *peer_wake;
} shm_link_t;

// --- Layout -------------------------------------------------------------------------------------

static size_t round_up(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

static size_t clamp_power_of_two(size_t bytes, size_t low, size_t high)
{
    size_t result = low;
    while (result * 2 <= MIN(bytes, high)) {
        result *= 2;
    }
    return result;
}

static layout_t layout_of(int n_local, size_t bytes_per_rank)
{
    layout_t l = {.n_local = n_local};
    size_t n = (size_t)n_local;
    l.control_ring = CONTROL_RING_BYTES;
    l.slot = clamp_power_of_two(bytes_per_rank / 2 / N_SLOTS, MIN_SLOT_BYTES, MAX_SLOT_BYTES);
    l.data_ring =
        clamp_power_of_two(bytes_per_rank / 4 / n, MIN_DATA_RING_BYTES, MAX_DATA_RING_BYTES);
    l.control_at = round_up(sizeof(shm_header_t) + n * sizeof(shm_rank_t), 4 * KIB);
    l.data_at = l.control_at + 2 * (n - 1) * (sizeof(ring_t) + l.control_ring);
    l.windows_at = round_up(l.data_at + n * (n - 1) * (sizeof(ring_t) + l.data_ring), 4 * KIB);
    l.cards_at = l.windows_at + n * N_SLOTS * l.slot;
    l.through = round_up(n * sizeof(atomic_uint_fast64_t), 2 * CACHE_LINE);
    l.through_at = l.cards_at + n * sizeof(memory_card_t);
    l.board_at = round_up(l.through_at + n * l.through, 4 * KIB);
    size_t n_members = MIN(n, BOARD_MOST_MEMBERS);
    l.board = round_up(MIN(BOARD_BYTES_EACH, BOARD_BYTES / n_members) + BOARD_TOLD_BYTES,
                       2 * CACHE_LINE); // as places are aligned
    l.place = sizeof(board_place_t) + n_members * 2 * l.board;
    l.total = l.board_at + N_PLACES * l.place;
    return l;
}

// Control rings: for each rank but the leader, one down to it and one up from it.
static ring_t *control_ring(const domain_t *d, int from, int to)
{
    const layout_t *l = &d->layout;
    if (from != 0 && to != 0) {
        return NULL;
    }
    size_t index = from == 0 ? 2 * (size_t)(to - 1) : 2 * (size_t)(from - 1) + 1;
    return (ring_t *)((uint8_t *)d->segment + l->control_at +
                      index * (sizeof(ring_t) + l->control_ring));
}

static ring_t *data_ring(const domain_t *d, int from, int to)
{
    const layout_t *l = &d->layout;
    size_t index = (size_t)from * (size_t)(l->n_local - 1) + (size_t)(to > from ? to - 1 : to);
    return (ring_t *)((uint8_t *)d->segment + l->data_at + index * (sizeof(ring_t) + l->data_ring));
}

// --- The segment --------------------------------------------------------------------------------

static hvd_status_t refuse(domain_t *d, const char *what, int code)
{
    size_t needed = d->layout.total / MIB + 1;
    struct statvfs fs;
    size_t free_mib = statvfs("/dev/shm", &fs) == 0 ? (size_t)fs.f_bavail * fs.f_frsize / MIB : 0;
    return fail(
        &d->trouble, HVD_UNSUPPORTED,
        "cannot %s %zu MiB of shared memory (%s; /dev/shm has %zu MiB free): ranks of this host "
        "use sockets instead. Enlarge /dev/shm (docker: --shm-size) or lower HOROVOD_SHM_BYTES",
        what, needed, strerror(code), free_mib);
}

static hvd_status_t map_segment(domain_t *d, int fd)
{
    void *at = mmap(NULL, d->layout.total, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) {
        return refuse(d, "map", errno);
    }
    madvise(at, d->layout.total, MADV_DONTFORK); // a forked child must not write into rings
    d->segment = at;
    return HVD_OK;
}

// The lock of a segment goes with the last process that maps it through the leader's descriptor.
static void remove_if_abandoned(const char *name)
{
    int fd = shm_open(name, O_RDWR | O_CLOEXEC, 0);
    struct stat seen;
    bool is_old = fd >= 0 && fstat(fd, &seen) == 0 && seen.st_uid == geteuid() &&
                  time(NULL) - seen.st_mtime > ABANDONED_SECONDS;
    if (is_old && flock(fd, LOCK_EX | LOCK_NB) == 0) {
        shm_unlink(name);
    }
    if (fd >= 0) {
        close(fd);
    }
}

static void remove_abandoned(void)
{
    DIR *folder = opendir("/dev/shm");
    const struct dirent *entry;
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        char name[SHM_NAME_BYTES];
        bool is_ours = strncmp(entry->d_name, SHM_PREFIX, strlen(SHM_PREFIX)) == 0;
        if (is_ours && strlen(entry->d_name) < sizeof name - 1) {
            snprintf(name, sizeof name, "/%.*s", (int)sizeof name - 2, entry->d_name);
            remove_if_abandoned(name);
        }
    }
    if (folder != NULL) {
        closedir(folder);
    }
}

// Whether the others can reach this process's memory, shm_settle asks.
static void introduce_memory(domain_t *d)
{
    err_t unheard;
    if (d->job->config->direct_copy &&
        random_bytes(&d->own_word, sizeof d->own_word, &unheard) == HVD_OK) {
        d->segment->ranks[d->local_of[d->job->rank]].memory = memory_introduce(&d->own_word);
    }
}

static hvd_status_t create_segment(domain_t *d)
{
    uint8_t id[16];
    hvd_status_t status = random_bytes(id, sizeof id, &d->trouble);
    if (status == HVD_OK) {
        status = random_bytes(d->nonce, sizeof d->nonce, &d->trouble);
    }
    if (status != HVD_OK) {
        return status;
    }
    remove_abandoned();
    int used = snprintf(d->name, sizeof d->name, "/" SHM_PREFIX);
    for (size_t i = 0; i < sizeof id; i++) {
        used += snprintf(d->name + used, sizeof d->name - (size_t)used, "%02x", id[i]);
    }
    int fd = shm_open(d->name, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0) {
        d->name[0] = '\0';
        return refuse(d, "create", errno);
    }
    flock(fd, LOCK_SH | LOCK_NB); // kept by the mapping; without it the name might go early
    int code = posix_fallocate(fd, 0, (off_t)d->layout.total);
    status = code != 0 ? refuse(d, "allocate", code) : map_segment(d, fd);
    close(fd);
    if (status != HVD_OK) {
        shm_unlink(d->name);
        d->name[0] = '\0';
        return status;
    }
    d->segment->total_bytes = d->layout.total;
    memcpy(d->segment->nonce, d->nonce, sizeof d->nonce);
    d->segment->magic = SHM_MAGIC;
    d->attached = true;
    introduce_memory(d);
    return HVD_OK;
}

static hvd_status_t open_segment(domain_t *d, const char *name, const uint8_t nonce[16])
{
    int fd = shm_open(name, O_RDWR | O_CLOEXEC, 0);
    if (fd < 0) {
        return refuse(d, "open", errno);
    }
    off_t bytes = lseek(fd, 0, SEEK_END);
    hvd_status_t status =
        bytes == (off_t)d->layout.total ? map_segment(d, fd) : refuse(d, "use", EINVAL);
    close(fd);
    if (status != HVD_OK) {
        return status;
    }
    if (d->segment->magic != SHM_MAGIC || memcmp(d->segment->nonce, nonce, 16) != 0) {
        munmap(d->segment, d->layout.total);
        d->segment = NULL;
        return refuse(d, "recognise", EINVAL);
    }
    d->attached = true;
    introduce_memory(d);
    return HVD_OK;
}

// --- Transport ----------------------------------------------------------------------------------

static void shm_close(domain_t *d)
{
    if (d == NULL) {
        return;
    }
    if (d->name[0] != '\0') {
        shm_unlink(d->name);
    }
    if (d->segment != NULL) {
        memory_withdraw();
        munmap(d->segment, d->layout.total);
    }
    free(d->local_of);
    free(d->rank_of);
    free(d);
}

static hvd_status_t index_host(domain_t *d, const net_job_t *job)
{
    d->local_of = malloc((size_t)job->size * sizeof *d->local_of);
    d->rank_of = malloc((size_t)job->size * sizeof *d->rank_of);
    if (d->local_of == NULL || d->rank_of == NULL) {
        return HVD_NO_MEMORY;
    }
    int n_local = 0;
    for (int r = 0; r < job->size; r++) {
        bool here = job->host_of[r] == job->host_of[job->rank];
        d->local_of[r] = here ? n_local : -1;
        if (here) {
            d->rank_of[n_local++] = r;
        }
    }
    d->layout = layout_of(n_local, job->config->shm_bytes);
    return HVD_OK;
}

static hvd_status_t shm_open_domain(const net_job_t *job, domain_t **domain_p, err_t *err)
{
    domain_t *d = calloc(1, sizeof *d);
    if (d == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for the shared-memory transport");
    }
    d->job = job;
    hvd_status_t status = index_host(d, job);
    if (status != HVD_OK) {
        shm_close(d);
        return fail(err, status, "no memory for the shared-memory transport");
    }
    if (d->layout.n_local < 2) {
        shm_close(d);
        return fail(err, HVD_UNSUPPORTED, "this rank is alone on its host");
    }
    if (d->local_of[job->rank] == 0 && create_segment(d) != HVD_OK) {
        log_warn(job->log, "shm", "%s", d->trouble.text); // peers learn it from the empty address
    }
    *domain_p = d;
    return HVD_OK;
}

static hvd_status_t shm_address(domain_t *d, buf_t *out, err_t *err)
{
    (void)err;
    if (d->name[0] != '\0') {
        put_bytes(out, d->nonce, sizeof d->nonce);
        put_bytes(out, d->name, strlen(d->name) + 1);
    }
    return HVD_OK;
}

static hvd_status_t shm_attach(domain_t *d, const uint8_t *const *addresses, const size_t *lengths,
                               err_t *err)
{
    (void)err;
    int leader = d->rank_of[0];
    if (d->job->rank == leader) {
        return HVD_OK;
    }
    size_t bytes = addresses[leader] != NULL ? lengths[leader] : 0;
    if (bytes <= 16 || bytes > 16 + SHM_NAME_BYTES || addresses[leader][bytes - 1] != '\0') {
        fail(&d->trouble, HVD_UNSUPPORTED, "rank %d, the first of this host, has no shared memory",
             leader);
        return HVD_OK;
    }
    if (open_segment(d, (const char *)addresses[leader] + 16, addresses[leader]) != HVD_OK) {
        log_warn(d->job->log, "shm", "%s", d->trouble.text);
    }
    return HVD_OK;
}

static void probe_memory(domain_t *d)
{
    d->reaches_memory = d->attached && d->own_word != 0;
    for (int i = 0; d->reaches_memory && i < d->layout.n_local; i++) {
        d->reaches_memory = memory_is_reached(&d->segment->ranks[i].memory);
        if (!d->reaches_memory) {
            log_debug(d->job->log, "shm",
                      "rank %d's memory cannot be read directly: copies go through windows",
                      d->rank_of[i]);
        }
    }
}

// Shared memory serves a host only if every rank of it has mapped the segment; by now all have
// said so, and the name has done its work.
static void shm_settle(domain_t *d, const uint8_t *attached)
{
    for (int i = 0; i < d->layout.n_local; i++) {
        if (!attached[d->rank_of[i]] && d->attached) {
            fail(&d->trouble, HVD_UNSUPPORTED, "rank %d of this host could not map it",
                 d->rank_of[i]);
            d->attached = false;
        }
    }
    if (d->name[0] != '\0') {
        shm_unlink(d->name);
        d->name[0] = '\0';
    }
    probe_memory(d);
}

static bool shm_is_attached(domain_t *d)
{
    return d->attached;
}

static bool shm_reaches(domain_t *d, int peer, char *why, size_t why_bytes)
{
    if (d->local_of[peer] < 0) {
        snprintf(why, why_bytes, "on another host");
        return false;
    }
    if (!d->attached) {
        snprintf(why, why_bytes, "%s", d->trouble.text);
    }
    return d->attached;
}

static atomic_uint *shm_wake_word(domain_t *d)
{
    return d->attached ? &d->segment->ranks[d->local_of[d->job->rank]].wake : NULL;
}

// --- Links --------------------------------------------------------------------------------------

static ssize_t shm_send(net_link_t *link, const void *data, size_t bytes)
{
    shm_link_t *l = (shm_link_t *)link;
    uint64_t capacity = l->out_bytes;
    if (capacity - (l->head - l->seen_tail) < bytes) {
        l->seen_tail = atomic_load_explicit(&l->out->tail, memory_order_acquire);
    }
    INVARIANT(l->head - l->seen_tail <= capacity && atomic_load(&l->out->head) == l->head);
    size_t n = (size_t)MIN(bytes, capacity - (l->head - l->seen_tail));
    if (n == 0) {
        return 0;
    }
    size_t at = (size_t)(l->head & (capacity - 1));
    size_t first = MIN(n, capacity - at);
    memcpy(l->out->bytes + at, data, first);
    memcpy(l->out->bytes, (const uint8_t *)data + first, n - first);
    l->head += n;
    atomic_store_explicit(&l->out->head, l->head, memory_order_release);
    wake_ring(l->peer_wake);
    return (ssize_t)n;
}

static ssize_t shm_peek(net_link_t *link, const void **data_p)
{
    shm_link_t *l = (shm_link_t *)link;
    if (l->seen_head == l->tail) {
        l->seen_head = atomic_load_explicit(&l->in->head, memory_order_acquire);
        if (l->seen_head == l->tail) {
            return 0;
        }
    }
    INVARIANT(l->seen_head - l->tail <= l->in_bytes);
    size_t at = (size_t)(l->tail & (l->in_bytes - 1));
    *data_p = l->in->bytes + at;
    return (ssize_t)MIN(l->seen_head - l->tail, l->in_bytes - at);
}

static void shm_consume(net_link_t *link, size_t bytes)
{
    shm_link_t *l = (shm_link_t *)link;
    INVARIANT(bytes <= l->seen_head - l->tail && atomic_load(&l->in->tail) == l->tail);
    l->tail += bytes;
    atomic_store_explicit(&l->in->tail, l->tail, memory_order_release);
    // A sender that sleeps found its ring full, so by the time its last bytes are seen here at
    // least half of the ring is still to be read: emptier rings need no ringing.
    if (l->seen_head - l->tail + bytes >= l->in_bytes / 2) {
        wake_ring(l->peer_wake);
    }
}

static ssize_t shm_recv(net_link_t *link, void *data, size_t bytes)
{
    size_t done = 0;
    while (done < bytes) {
        const void *piece;
        ssize_t available = shm_peek(link, &piece);
        if (available == 0) {
            break;
        }
        size_t n = MIN((size_t)available, bytes - done);
        memcpy((uint8_t *)data + done, piece, n);
        shm_consume(link, n);
        done += n;
    }
    return (ssize_t)done;
}

static void shm_link_close(net_link_t *link)
{
    free(link);
}

static const link_ops_t shm_link_ops = {
    .send = shm_send,
    .recv = shm_recv,
    .peek = shm_peek,
    .consume = shm_consume,
    .close = shm_link_close,
};

static hvd_status_t shm_connect(domain_t *d, int peer, lane_t lane, net_link_t **link_p, err_t *err)
{
    int me = d->local_of[d->job->rank];
    int other = d->local_of[peer];
    bool control = lane == LANE_CONTROL;
    ring_t *out = control ? control_ring(d, me, other) : data_ring(d, me, other);
    if (out == NULL) {
        return fail(err, HVD_UNSUPPORTED, "no control ring between ranks %d and %d of one host",
                    d->job->rank, peer);
    }
    shm_link_t *l = calloc(1, sizeof *l);
    if (l == NULL) {
        return fail(err, HVD_NO_MEMORY, "no memory for a link to rank %d", peer);
    }
    l->base = (net_link_t){.ops = &shm_link_ops, .transport = "shm", .peer = peer, .lane = lane};
    l->out = out;
    l->in = control ? control_ring(d, other, me) : data_ring(d, other, me);
    l->out_bytes = l->in_bytes = control ? d->layout.control_ring : d->layout.data_ring;
    l->peer_wake = &d->segment->ranks[other].wake;
    *link_p = &l->base;
    return HVD_OK;
}

const transport_t transport_shm = {
    .name = "shm",
    .open = shm_open_domain,
    .address = shm_address,
    .attach = shm_attach,
    .is_attached = shm_is_attached,
    .settle = shm_settle,
    .reaches = shm_reaches,
    .connect = shm_connect,
    .wake_word = shm_wake_word,
    .close = shm_close,
};

// --- Windows ------------------------------------------------------------------------------------

size_t shm_segment_bytes(int n_ranks, size_t bytes_per_rank)
{
    return layout_of(n_ranks, bytes_per_rank).total;
}

size_t shm_slot_bytes(const domain_t *d)
{
    return d != NULL && d->attached ? d->layout.slot : 0;
}

int shm_n_slots(const domain_t *d)
{
    return d != NULL && d->attached ? N_SLOTS : 0;
}

bool shm_window(domain_t *d, int rank, window_t *window_p)
{
    if (d == NULL || !d->attached || d->local_of[rank] < 0) {
        return false;
    }
    size_t i = (size_t)d->local_of[rank];
    *window_p = (window_t){
        .counters = &d->segment->ranks[i].counters,
        .wake = &d->segment->ranks[i].wake,
        .slots = (uint8_t *)d->segment + d->layout.windows_at + i * N_SLOTS * d->layout.slot,
    };
    return true;
}

// --- Cards --------------------------------------------------------------------------------------

memory_card_t *shm_card(domain_t *d, int rank)
{
    memory_card_t *cards = (memory_card_t *)((uint8_t *)d->segment + d->layout.cards_at);
    return &cards[d->local_of[rank]];
}

atomic_uint_fast64_t *shm_through(domain_t *d, int to, int from)
{
    uint8_t *row =
        (uint8_t *)d->segment + d->layout.through_at + (size_t)d->local_of[to] * d->layout.through;
    return (atomic_uint_fast64_t *)row + d->local_of[from];
}

int64_t shm_process(const domain_t *d, int rank)
{
    return d->reaches_memory ? d->segment->ranks[d->local_of[rank]].memory.pid : -1;
}

// --- The board ----------------------------------------------------------------------------------

int shm_n_local(const domain_t *d)
{
    return d->layout.n_local;
}

atomic_int *shm_core_word(domain_t *d, int local_index)
{
    return &d->segment->ranks[local_index].core;
}

int shm_n_places(const domain_t *d)
{
    (void)d;
    return N_PLACES;
}

size_t shm_board_bytes_each(const domain_t *d)
{
    return d->layout.board;
}

board_place_t *shm_place(domain_t *d, int i)
{
    return (board_place_t *)((uint8_t *)d->segment + d->layout.board_at +
                             (size_t)i * d->layout.place);
}

int shm_local_index(const domain_t *d, int rank)
{
    return d->local_of[rank];
}
