"""Named atomic operations of csrc/atomics.h."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "atomics.h" nogil:
    uint64_t load_relaxed_u64(const uint64_t *p)
    uint64_t load_acquire_u64(const uint64_t *p)
    uint64_t load_seq_cst_u64(const uint64_t *p)
    uint8_t load_relaxed_u8(const uint8_t *p)
    uint32_t load_relaxed_u32(const uint32_t *p)
    uint32_t load_seq_cst_u32(const uint32_t *p)
    void store_relaxed_u64(uint64_t *p, uint64_t v)
    void store_release_u64(uint64_t *p, uint64_t v)
    void store_relaxed_u32(uint32_t *p, uint32_t v)
    bint cas_acq_rel_u64(uint64_t *p, uint64_t expected, uint64_t desired)
    bint cas_seq_cst_u64(uint64_t *p, uint64_t expected, uint64_t desired)
    bint cas_seq_cst_u32(uint32_t *p, uint32_t expected, uint32_t desired)
    uint64_t fetch_add_acq_rel_u64(uint64_t *p, uint64_t v)
    uint64_t fetch_or_acq_rel_u64(uint64_t *p, uint64_t v)
    uint64_t fetch_and_acq_rel_u64(uint64_t *p, uint64_t v)
    uint32_t fetch_or_seq_cst_u32(uint32_t *p, uint32_t v)
    void fence_after_rmw()
    void cpu_pause()
    int64_t private_add(int64_t *p, int64_t v)
    int64_t private_swap(int64_t *p, int64_t v)
    int64_t private_get(const int64_t *p)
    void private_set(int64_t *p, int64_t v)
