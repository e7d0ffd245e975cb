/* Included before everything else in the stress driver: what the sanitizers cannot see by themselves, and the seeded faults.
 *
 * Nothing of this is part of the package: a fault is a macro over one of the names of atomics.h, in this build alone.
 */
#ifndef STRESS_NATIVE_H
#define STRESS_NATIVE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#include "atomics.h"

/* ---- faults: one of them, by -D ---- */

static inline int cas_relaxed_u64(uint64_t *p, uint64_t expected, uint64_t desired)
{
    return __atomic_compare_exchange_n(p, &expected, desired, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

/* KEPT of _layout.pxd; with an owner, who is about to let everybody have it */
#define KEPT_STATE 12
static inline int cas_kept_relaxed_u64(uint64_t *p, uint64_t expected, uint64_t desired)
{
    if ((expected >> 16 & 15) == KEPT_STATE && (expected & 0xFFFF) != 0)
        return cas_relaxed_u64(p, expected, desired);
    return cas_seq_cst_u64(p, expected, desired);
}

static inline uint64_t fetch_add_relaxed_u64(uint64_t *p, uint64_t v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }

#if defined(FAULT_STORE_RELEASE) /* C3, C5, B1, the link of a block */
#define store_release_u64 store_relaxed_u64
#elif defined(FAULT_LOAD_ACQUIRE) /* C1, R2, R3, B2, B3 */
#define load_acquire_u64 load_relaxed_u64
#elif defined(FAULT_CAS_SEQ_CST) /* C4, C6, C8, C9, R6 */
#define cas_seq_cst_u64 cas_relaxed_u64
#elif defined(FAULT_KEPT) /* N1 */
#define cas_seq_cst_u64 cas_kept_relaxed_u64
#elif defined(FAULT_CAS_ACQ_REL) /* C2, C7, R4, B4 */
#define cas_acq_rel_u64 cas_relaxed_u64
#elif defined(FAULT_FETCH_ADD) /* G3, G5 */
#define fetch_add_acq_rel_u64 fetch_add_relaxed_u64
#endif

#ifdef FAULT_READ_PAST
#define PAST_THE_END 1
#else
#define PAST_THE_END 0
#endif

#ifdef FAULT_PIECE
#define PIECE_PAST_THE_END 1
#else
#define PIECE_PAST_THE_END 0
#endif

#ifdef FAULT_SECOND_LOOK /* F1 */
#define LOOKS_AGAIN 0
#else
#define LOOKS_AGAIN 1
#endif

#ifdef FAULT_SHIFT
#define SHIFT_TOO_FAR 64
#else
#define SHIFT_TOO_FAR 0
#endif

/* ---- counters that order nothing, so that counting hides no race ---- */

static inline int64_t count_add(int64_t *p, int64_t n) { return __atomic_add_fetch(p, n, __ATOMIC_RELAXED); }
static inline int64_t count_get(const int64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline uint8_t bits_or(uint8_t *p, uint8_t bits) { return __atomic_fetch_or(p, bits, __ATOMIC_RELAXED); }

/* ---- what the kernel orders: everything that the dead had done comes before its lock is found free ---- */

#ifdef __SANITIZE_THREAD__
void __tsan_acquire(void *address);
void __tsan_release(void *address);
#else
static inline void __tsan_acquire(void *address) { (void)address; }
static inline void __tsan_release(void *address) { (void)address; }
#endif

static uint64_t lock_order[4096];

/* Called by whoever dies, before its lock goes. */
static inline void death_comes(int64_t byte) { __tsan_release(&lock_order[byte % 4096]); }

static inline int fcntl_of_lock(int fd, int command, struct flock *lock)
{
    int64_t byte = lock->l_start;
    int why = fcntl(fd, command, lock);
    if (why == 0 && (command == F_OFD_SETLK || lock->l_type == F_UNLCK))
        __tsan_acquire(&lock_order[byte % 4096]);
    return why;
}
#define fcntl fcntl_of_lock

/* ---- bytes that nobody may touch: what lies between two areas of a mapped file ---- */

#ifdef __SANITIZE_ADDRESS__
void __asan_poison_memory_region(void const volatile *address, size_t size);
void __asan_unpoison_memory_region(void const volatile *address, size_t size);
#else
static inline void __asan_poison_memory_region(void const volatile *address, size_t size) { (void)address; (void)size; }
static inline void __asan_unpoison_memory_region(void const volatile *address, size_t size) { (void)address; (void)size; }
#endif

#endif
