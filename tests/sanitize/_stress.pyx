# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
# cython: auto_pickle=False, binding=False
"""The core's nogil functions under load, for ThreadSanitizer and AddressSanitizer; driven by stress.py.

Each thread is a participant with a number, a lock and a handle of its own, as a process would be; but all of them use the same
mapping, so that a sanitizer sees both sides of every access. What the core does with Python objects (_core.pyx and its .pxi
files) is repeated here with plain memory, step by step.

Counters are relaxed and nothing else is shared, so that the driver itself orders nothing.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from subetha._atomics cimport *
from subetha._blocks cimport *
from subetha._cells cimport *
from subetha._deque cimport *
from subetha._handshake cimport *
from subetha._heartbeat cimport *
from subetha._keep cimport *
from subetha._lapse cimport *
from subetha._layout cimport *
from subetha._map cimport *
from subetha._mapvalues cimport *
from subetha._observation cimport *
from subetha._park cimport *
from subetha._process cimport *
from subetha._queue cimport *
from subetha._recovery cimport *
from subetha._repair cimport *
from subetha._rescue cimport *
from subetha._ring cimport *
from subetha._shareddeque cimport *
from subetha._sharedring cimport *
from subetha._watch cimport *

cdef extern from "native.h" nogil:
    int PAST_THE_END        # 1: copy one byte more than a message has
    int PIECE_PAST_THE_END  # 1: say that a piece has one byte more than it has
    int SHIFT_TOO_FAR       # 64: shift by that
    int LOOKS_AGAIN         # 0: who reads a kept result does not look at its word once more
    int64_t count_add(int64_t *p, int64_t n)
    int64_t count_get(const int64_t *p)
    uint8_t bits_or(uint8_t *p, uint8_t bits)
    void death_comes(int64_t byte)
    void __asan_poison_memory_region(const void *address, size_t size)
    void __asan_unpoison_memory_region(const void *address, size_t size)

cdef enum:
    MOST_COUNTS = 40
    MENDS = 64              # tries before a call gives up
    PAUSE_MS = 5            # longest sleep, so that every role sees the end soon


ctypedef struct Holder:
    # a participant's number; it must stay where it is while the number is held
    registration kept
    Participant *record
    uint64_t status
    uint64_t slot


cdef uint64_t next_random(uint64_t *state) noexcept nogil:
    # xorshift64*
    cdef uint64_t x = state[0]
    x ^= x >> 12
    x ^= x << 25
    x ^= x >> 27
    state[0] = x
    return (x * <uint64_t> 0x2545F4914F6CDD1D) >> 16 >> SHIFT_TOO_FAR


cdef uint8_t byte_of(uint64_t key, uint64_t i) noexcept nogil:
    """Byte `i` of the message `key`: every byte derives from it, so that a torn write shows."""
    return <uint8_t> (key * 31 + (key >> 24) + i * 7 + (i >> 8))


cdef void fill_bytes(uint8_t *at, uint64_t key, uint64_t length) noexcept nogil:
    cdef uint64_t i
    for i in range(length):
        at[i] = byte_of(key, i)


cdef bint bytes_agree(const uint8_t *at, uint64_t key, uint64_t length) noexcept nogil:
    cdef uint64_t i
    for i in range(length):
        if at[i] != byte_of(key, i):
            return False
    return True


cdef void pause(int64_t ns) noexcept nogil:
    cdef int64_t until = monotonic_ns() + ns
    while monotonic_ns() < until:
        sched_yield()


cdef class World:
    """What the roles of a world share. A role is a method that runs without the GIL until `stop`, or until all is done."""

    cdef object maps
    cdef Records records
    cdef int fd                 # of the file with the records
    cdef int64_t lock_base
    cdef uint64_t epoch
    cdef uint64_t *epoch_at
    cdef int64_t stopped
    cdef int64_t never_closed
    cdef int64_t counts[MOST_COUNTS]
    cdef int64_t faults
    cdef list poisoned

    def __cinit__(self):
        self.epoch_at = &self.epoch
        self.poisoned = []

    cdef void poison(self, uint8_t *at, uint64_t size):
        __asan_poison_memory_region(at, size)
        self.poisoned.append((<uint64_t> at, size))

    def close(self):
        """Before the mappings go: the addresses may be somebody else's then."""
        for at, size in self.poisoned:
            __asan_unpoison_memory_region(<const void *> <uint64_t> at, size)
        self.poisoned.clear()
        self.maps = None

    def stop(self):
        count_add(&self.stopped, 1)

    @property
    def found_faults(self):
        return count_get(&self.faults)

    cdef bint goes_on(self) noexcept nogil:
        return count_get(&self.stopped) == 0

    cdef void count(self, int what) noexcept nogil:
        count_add(&self.counts[what], 1)

    cdef void fault(self) noexcept nogil:
        count_add(&self.faults, 1)

    cdef bint join(self, Holder *me, uint32_t tag, bint auto_beat) noexcept nogil:
        """Take a number, as take_number of _mapped.pxi does; the record's fields all derive from `tag`."""
        cdef uint64_t slot
        me.kept.lock_fd = -1
        for slot in range(self.records.count):
            if status_state(load_acquire_u64(&self.records.first[slot].status)) != SLOT_FREE:
                continue
            if registration_lock(&me.kept, self.fd, self.lock_base + <int64_t> slot) != 0:
                continue
            me.record = &self.records.first[slot]
            me.slot = slot
            if record_join(me.record, tag, tag & 3, load_acquire_u64(self.epoch_at), tag, tag, &me.status) != OK:
                registration_end(&me.kept)
                continue
            if registration_watch(
                &me.kept, &me.record.status, me.status, &me.record.last_seen_epoch, self.epoch_at, auto_beat
            ) == 0:
                return True
            self.leave(me)
            return False
        return False

    cdef void leave(self, Holder *me) noexcept nogil:
        record_leave(me.record, me.status)
        registration_end(&me.kept)

    cdef void die(self, Holder *me) noexcept nogil:
        """The lock goes and the record stays: what a death is to everybody else."""
        death_comes(self.lock_base + <int64_t> me.slot)
        registration_end(&me.kept)


include "ring.pxi"
include "deque.pxi"
include "map.pxi"
include "table.pxi"
include "queue.pxi"
include "adaptive.pxi"
