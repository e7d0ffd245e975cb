/* The only place with compiler atomics. The order stands in the name; callers name the partner of each (docs/design/memory-ordering.md). */
#ifndef SUBETHA_ATOMICS_H
#define SUBETHA_ATOMICS_H

#include <stdint.h>
#include <string.h>

static inline uint64_t load_relaxed_u64(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline uint64_t load_acquire_u64(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline uint64_t load_seq_cst_u64(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
static inline uint8_t load_relaxed_u8(const uint8_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline uint16_t load_relaxed_u16(const uint16_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline uint32_t load_relaxed_u32(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline uint32_t load_acquire_u32(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline uint32_t load_seq_cst_u32(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }

static inline void store_relaxed_u64(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
static inline void store_release_u64(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
static inline void store_seq_cst_u64(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }
static inline void store_release_u32(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
static inline void store_relaxed_u32(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
static inline void store_relaxed_u16(uint16_t *p, uint16_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
static inline void store_relaxed_u8(uint8_t *p, uint8_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }

static inline int cas_acq_rel_u64(uint64_t *p, uint64_t expected, uint64_t desired)
{
    return __atomic_compare_exchange_n(p, &expected, desired, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

static inline int cas_seq_cst_u64(uint64_t *p, uint64_t expected, uint64_t desired)
{
    return __atomic_compare_exchange_n(p, &expected, desired, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static inline int cas_seq_cst_u32(uint32_t *p, uint32_t expected, uint32_t desired)
{
    return __atomic_compare_exchange_n(p, &expected, desired, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static inline uint64_t fetch_add_acq_rel_u64(uint64_t *p, uint64_t v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
static inline uint64_t fetch_or_acq_rel_u64(uint64_t *p, uint64_t v) { return __atomic_fetch_or(p, v, __ATOMIC_ACQ_REL); }
static inline uint64_t fetch_and_acq_rel_u64(uint64_t *p, uint64_t v) { return __atomic_fetch_and(p, v, __ATOMIC_ACQ_REL); }
static inline uint32_t fetch_or_seq_cst_u32(uint32_t *p, uint32_t v) { return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }

/* What may be written meanwhile: of use only where a later look at the word decides whether it counts. */
static inline uint64_t load_unowned_u64(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline uint8_t load_unowned_u8(const uint8_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }

static inline void copy_unowned(void *to, const void *from, uint64_t length)
{
    uint8_t *out = to;
    const uint8_t *in = from;
    for (; length > 0 && (uintptr_t)in % 8 != 0; length--)
        *out++ = load_unowned_u8(in++);
    for (; length >= 8; length -= 8, in += 8, out += 8) {
        uint64_t word = load_unowned_u64((const uint64_t *)in);
        memcpy(out, &word, 8);
    }
    for (; length > 0; length--)
        *out++ = load_unowned_u8(in++);
}

/* What others may copy meanwhile, by words: `to` is aligned to 8, and the rest of the last word becomes zero. */
static inline void copy_shared(void *to, const void *from, uint64_t length)
{
    uint64_t *out = to;
    const uint8_t *in = from;
    uint64_t word;
    for (; length >= 8; length -= 8, in += 8) {
        memcpy(&word, in, 8);
        store_relaxed_u64(out++, word);
    }
    if (length > 0) {
        word = 0;
        memcpy(&word, in, length);
        store_relaxed_u64(out, word);
    }
}

/* Orders every load before it with everything after it. */
static inline void fence_acquire(void) { __atomic_thread_fence(__ATOMIC_ACQUIRE); }

/* Orders everything before it with every store after it. */
static inline void fence_release(void) { __atomic_thread_fence(__ATOMIC_RELEASE); }

/* Orders everything before an atomic read-modify-write with every load after it. The locked instruction of x86 does that by itself. */
static inline void fence_after_rmw(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

/* Orders everything before it with every load after it. */
static inline void fence_seq_cst(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

/* Lines that this core is about to write. Only speed: nothing is read, and a wrong address is no fault. */
static inline void prefetch_write(const void *p) { __builtin_prefetch(p, 1); }

static inline void cpu_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Process-private counters of a handle: the GIL orders those who write where there is one, but others read without it. */
static inline int64_t private_add(int64_t *p, int64_t v)
{
#ifdef Py_GIL_DISABLED
    return __atomic_add_fetch(p, v, __ATOMIC_SEQ_CST);
#else
    int64_t sum = __atomic_load_n(p, __ATOMIC_RELAXED) + v;
    __atomic_store_n(p, sum, __ATOMIC_RELAXED);
    return sum;
#endif
}

static inline int64_t private_swap(int64_t *p, int64_t v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }
static inline int64_t private_get(const int64_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
static inline void private_set(int64_t *p, int64_t v) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }

#endif
