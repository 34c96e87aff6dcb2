// SPDX-License-Identifier: Apache-2.0
//
// shm.h - what the shared-memory transport offers beyond links: windows, cards and the board.
//
// Every rank of a host owns a window, a row of slots that all ranks of the host can read and write.
// The owner puts slices of its tensor there; whoever reduces a part of a slice writes the result
// back into a slot. Three counters per rank say how far it is; coll/stream.c is their only user.
// A counter holds (collective << SLICE_BITS | slices done), so it only ever grows, whatever group
// of ranks runs the collective.
#ifndef HVD_NET_SHM_H
#define HVD_NET_SHM_H

#include "net/net.h"
#include "net/peer_memory.h"

#define SLICE_BITS 22

typedef struct window_counters {
    _Alignas(2 * CACHE_LINE) atomic_uint_fast64_t shared; // slices that lie in the owner's window
    _Alignas(2 *
             CACHE_LINE) atomic_uint_fast64_t reduced; // slices of which the owner reduced its part
    _Alignas(2 * CACHE_LINE) atomic_uint_fast64_t done; // slices the owner read from all windows
} window_counters_t;

typedef struct window {
    window_counters_t *counters;
    atomic_uint *wake; // the owner's wake word
    uint8_t *slots;    // shm_n_slots of shm_slot_bytes each
} window_t;

// What a host of n_ranks allocates in /dev/shm when HOROVOD_SHM_BYTES is bytes_per_rank.
size_t shm_segment_bytes(int n_ranks, size_t bytes_per_rank);
// Size of the windows on this host; 0 where shared memory is not in use.
size_t shm_slot_bytes(const domain_t *domain);
int shm_n_slots(const domain_t *domain);
// The window of a rank of this host; false if the rank has none.
bool shm_window(domain_t *domain, int rank, window_t *window_p);

// Cards (coll/direct.c): which of its memory a rank lends to the others of its host, for as long as
// one collective takes.
#define CARD_PIECES 500

typedef struct memory_piece {
    uint64_t at, bytes;
} memory_piece_t;

typedef struct memory_card {
    _Alignas(2 * CACHE_LINE) atomic_uint_fast64_t claimed; // bytes somebody has begun to copy
    atomic_bool is_written;                                // by another rank, at this moment
    _Alignas(2 * CACHE_LINE) atomic_uint_fast64_t ready;   // number of the collective it is about
    uint32_t is_willing;                                   // false: nothing is lent
    uint32_t n_pieces;
    memory_piece_t pieces[CARD_PIECES];
} memory_card_t;

memory_card_t *shm_card(domain_t *domain, int rank);
// How rank `from` tells rank `to` that it is through with a collective.
atomic_uint_fast64_t *shm_through(domain_t *domain, int to, int from);
// The process of a rank of this host; -1: the memory of some rank here cannot be reached.
int64_t shm_process(const domain_t *domain, int rank);

#define BOARD_MOST_MEMBERS 8 // of the set that meets at a place

// The board (engine/board.c): places where small contributions meet. There is room for two
// contributions of each member: beside the word, so that one cache line carries both, as
// far as they fit there, and in lines of their own.
typedef struct board_place {
    _Alignas(2 * CACHE_LINE) atomic_uint_fast64_t word;
    atomic_uint_fast64_t owner;
    uint8_t beside[CACHE_LINE - 2 * sizeof(atomic_uint_fast64_t)];
    _Alignas(2 * CACHE_LINE) uint8_t bytes[];
} board_place_t;

int shm_n_places(const domain_t *domain);
size_t shm_board_bytes_each(const domain_t *domain); // room for one contribution
board_place_t *shm_place(domain_t *domain, int i);
int shm_n_local(const domain_t *domain);
int shm_local_index(const domain_t *domain,
                    int rank); // among the ranks of this host; -1: elsewhere
// The core a rank of this host was last seen waiting on, plus one (net/cores.c).
atomic_int *shm_core_word(domain_t *domain, int local_index);

#endif
