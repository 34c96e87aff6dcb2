// SPDX-License-Identifier: Apache-2.0
//
// map.c - hash map from bytes to pointers.
//
// Open addressing with linear probing in a table that is at most three quarters full. A slot is
// empty when its value is NULL. Deletion shifts the entries behind the hole back instead of leaving
// a tombstone, so probes stay as short as if the key had never been there. A look-up costs a
// multiplication and, mostly, one cache line; growing doubles the table. The map owns copies of its
// keys; values are the caller's. One caller at a time.
#include "base/base.h"

#include <endian.h>
#include <stdlib.h>

#define SMALLEST_MAP_SLOTS ((size_t)16)

// Odd constants with bits well spread: the golden ratio, and the roots of 2 and 3.
#define MIX_A UINT64_C(0x9e3779b97f4a7c15)
#define MIX_B UINT64_C(0x6a09e667f3bcc909)
#define MIX_C UINT64_C(0xbb67ae8584caa73b)

// Both halves of the product, folded: every input bit reaches every output bit.
static inline uint64_t mix(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t load_64(const uint8_t *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return le64toh(word);
}

static inline uint64_t load_32(const uint8_t *bytes)
{
    uint32_t word;
    memcpy(&word, bytes, sizeof word);
    return le32toh(word);
}

uint64_t hash_bytes(const void *data, size_t bytes, uint64_t seed)
{
    const uint8_t *next = data;
    size_t left = bytes;
    uint64_t state = seed ^ MIX_A;
    uint64_t low = 0, high = 0;
    for (; left > 16; left -= 16, next += 16) {
        state = mix(load_64(next) ^ MIX_B, load_64(next + 8) ^ state);
    }
    // The tail is read with overlapping loads instead of byte by byte; since the length is mixed
    // in, reading some bytes twice loses nothing.
    if (left >= 8) {
        low = load_64(next);
        high = load_64(next + left - 8);
    } else if (left >= 4) {
        low = load_32(next);
        high = load_32(next + left - 4);
    } else if (left > 0) {
        low = (uint64_t)next[0] | (uint64_t)next[left / 2] << 8 | (uint64_t)next[left - 1] << 16;
    }
    uint64_t hash = mix(mix(low ^ MIX_B, high ^ state), (uint64_t)bytes ^ MIX_C);
    return hash == 0 ? MIX_A : hash;
}

// The caller's hash need not be ours, so the slot comes from its mixed bits.
static inline size_t home_of(const map_t *map, uint64_t hash)
{
    return (size_t)(hash * MIX_A >> 32) & (map->n_slots - 1);
}

// The slot of the key, or the empty slot where it belongs. The table has slots, and one is empty.
static map_slot_t *find_slot(const map_t *map, uint64_t hash, const void *key, size_t key_bytes)
{
    size_t mask = map->n_slots - 1;
    for (size_t i = home_of(map, hash);; i = (i + 1) & mask) {
        map_slot_t *slot = &map->slots[i];
        if (slot->value == NULL || (slot->hash == hash && slot->key_bytes == key_bytes &&
                                    memcmp(slot->key, key, key_bytes) == 0)) {
            return slot;
        }
    }
}

static bool map_grow(map_t *map)
{
    map_t bigger = {.n_slots = MAX(map->n_slots * 2, SMALLEST_MAP_SLOTS), .n_used = map->n_used};
    bigger.slots = calloc(bigger.n_slots, sizeof *bigger.slots);
    if (bigger.slots == NULL) {
        return false;
    }
    for (size_t i = 0; i < map->n_slots; i++) {
        const map_slot_t *slot = &map->slots[i];
        if (slot->value != NULL) {
            *find_slot(&bigger, slot->hash, slot->key, slot->key_bytes) = *slot;
        }
    }
    free(map->slots);
    *map = bigger;
    return true;
}

void *map_get(const map_t *map, uint64_t hash, const void *key, size_t key_bytes)
{
    return map->n_used == 0 ? NULL : find_slot(map, hash, key, key_bytes)->value;
}

bool map_put(map_t *map, uint64_t hash, const void *key, size_t key_bytes, void *value)
{
    if ((map->n_used + 1) * 4 > map->n_slots * 3 && !map_grow(map)) {
        return false;
    }
    map_slot_t *slot = find_slot(map, hash, key, key_bytes);

    if (slot->value == NULL) {
        char *copy = malloc(key_bytes + 1);
        if (copy == NULL) {
            return false;
        }
        memcpy(copy, key, key_bytes);
        copy[key_bytes] = '\0'; // keys that are texts can be printed
        *slot = (map_slot_t){.hash = hash, .key = copy, .key_bytes = key_bytes};
        map->n_used++;
    }
    slot->value = value;
    return true;
}

// Fills the hole with the nearest later entry that may lie there, which makes a new hole, and so
// on until a free slot ends the run. An entry may move back to the hole unless its home lies
// between the two.
static void close_hole(map_t *map, size_t hole)
{
    size_t mask = map->n_slots - 1;
    for (size_t i = (hole + 1) & mask; map->slots[i].value != NULL; i = (i + 1) & mask) {
        size_t from_home = (i - home_of(map, map->slots[i].hash)) & mask;
        if (from_home >= ((i - hole) & mask)) {
            map->slots[hole] = map->slots[i];
            hole = i;
        }
    }
    map->slots[hole] = (map_slot_t){0};
}

void *map_remove(map_t *map, uint64_t hash, const void *key, size_t key_bytes)
{
    if (map->n_used == 0) {
        return NULL;
    }
    map_slot_t *slot = find_slot(map, hash, key, key_bytes);
    void *value = slot->value;

    if (value != NULL) {
        free(slot->key);
        close_hole(map, (size_t)(slot - map->slots));
        map->n_used--;
    }
    return value;
}

void map_free(map_t *map)
{
    for (size_t i = 0; i < map->n_slots; i++) {
        free(map->slots[i].key);
    }
    free(map->slots);
    *map = (map_t){0};
}
