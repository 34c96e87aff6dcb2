// SPDX-License-Identifier: Apache-2.0
//
// guard.h - rules about threads and states that run: who may be here, what must hold.
//
// Two nets. Clang's thread-safety analysis reads the annotations at compile time: a function that
// REQUIRES a lock cannot be called without it. Where HVD_CHECKS is defined (debug, sanitizer and
// fuzz builds) the same rules, and INVARIANTs besides, are checked as the program runs, and a
// broken one stops it on the spot with its name; in what users get they are compiled, so that they
// stay true to the code, and never evaluated.
#ifndef HVD_BASE_GUARD_H
#define HVD_BASE_GUARD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#if defined(__clang__)
#define THREAD_RULE(rule) __attribute__((rule))
#else
#define THREAD_RULE(rule)
#endif
#define CAPABILITY(name) THREAD_RULE(capability(name))
#define REQUIRES(...) THREAD_RULE(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) THREAD_RULE(locks_excluded(__VA_ARGS__))
#define ACQUIRES(...) THREAD_RULE(acquire_capability(__VA_ARGS__))
#define TRY_ACQUIRES(...) THREAD_RULE(try_acquire_capability(__VA_ARGS__))
#define RELEASES(...) THREAD_RULE(release_capability(__VA_ARGS__))
#define ASSERTS(...) THREAD_RULE(assert_capability(__VA_ARGS__))
#define NOT_ANALYSED THREAD_RULE(no_thread_safety_analysis)

// A rule by its name, and an invariant, which is its own name.
#if defined(HVD_CHECKS)
void rule_broken(const char *rule, const char *function, const char *file, int line);
#define RULE(name, holds) ((holds) ? (void)0 : rule_broken(name, __func__, __FILE__, __LINE__))
#else
#define RULE(name, holds) ((void)(false && (holds)))
#endif
#define INVARIANT(holds) RULE(#holds, holds)

// Which thread has it, as far as checks want to know. 0: none.
typedef struct owner {
    atomic_uintptr_t thread;
} owner_t;

static inline void owner_set(owner_t *owner)
{
#if defined(HVD_CHECKS)
    atomic_store_explicit(&owner->thread, (uintptr_t)pthread_self(), memory_order_relaxed);
#else
    (void)owner;
#endif
}

static inline void owner_clear(owner_t *owner)
{
#if defined(HVD_CHECKS)
    atomic_store_explicit(&owner->thread, 0, memory_order_relaxed);
#else
    (void)owner;
#endif
}

static inline bool owner_is_me(const owner_t *owner)
{
    return atomic_load_explicit(&owner->thread, memory_order_relaxed) == (uintptr_t)pthread_self();
}

// --- A mutex that knows who has it ---------------------------------------------------------------
// One word, so that taking and releasing it while nobody else wants it is one instruction each, in
// line: a small operation does so four times.

enum { LOCK_FREE, LOCK_TAKEN, LOCK_WANTED }; // WANTED: somebody may sleep on it

typedef struct CAPABILITY("mutex") lock {
    atomic_uint word;
    owner_t owner;
} lock_t;

#define LOCK_INITIALIZER {.word = LOCK_FREE}

// futex.c: the slow halves.
void lock_wait(atomic_uint *word);     // until it is free; it is WANTED and the caller's then
void lock_wake_one(atomic_uint *word); // of those that wait

static inline void lock_init(lock_t *lock)
{
    atomic_init(&lock->word, LOCK_FREE);
    owner_clear(&lock->owner);
}

static inline void lock_free(lock_t *lock)
{
    INVARIANT(atomic_load_explicit(&lock->word, memory_order_relaxed) == LOCK_FREE);
    (void)lock;
}

static inline void lock_take(lock_t *lock) ACQUIRES(*lock);
static inline void lock_take(lock_t *lock) NOT_ANALYSED
{
    unsigned was = LOCK_FREE;
    INVARIANT(!owner_is_me(&lock->owner)); // it would wait for itself
    if (!atomic_compare_exchange_strong_explicit(&lock->word, &was, LOCK_TAKEN,
                                                 memory_order_acquire, memory_order_relaxed)) {
        lock_wait(&lock->word);
    }
    owner_set(&lock->owner);
}

static inline void lock_release(lock_t *lock) RELEASES(*lock);
static inline void lock_release(lock_t *lock) NOT_ANALYSED
{
    INVARIANT(owner_is_me(&lock->owner));
    owner_clear(&lock->owner);
    if (atomic_exchange_explicit(&lock->word, LOCK_FREE, memory_order_release) == LOCK_WANTED) {
        lock_wake_one(&lock->word);
    }
}

// Tells the analysis what it cannot follow: a lock that is known by another name.
static inline void lock_is_mine(const lock_t *lock) ASSERTS(*lock);
static inline void lock_is_mine(const lock_t *lock) NOT_ANALYSED
{
    (void)lock;
}

#endif
