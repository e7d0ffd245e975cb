"""Futexes, locks that prove life, and the timer thread of csrc/process.h; waiting and waking on top of them.

A waiters' word: bit 0 "somebody may sleep here", above it a count that every wake bumps. Nothing to repair after a death:
a wake that finds nobody asleep takes the bit away, a waiter sets it again before each sleep.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from subetha._atomics cimport (
    cas_seq_cst_u32, cpu_pause, fence_after_rmw, fence_seq_cst, fetch_or_seq_cst_u32, load_seq_cst_u32, private_get,
    private_set,
)
from subetha._layout cimport CLOSED, EMPTY, FULL, OK, SIGNAL, TIMEOUT, WAITERS_BIT, WAKE_STEP, Code

cdef extern from "process.h" nogil:
    ctypedef struct registration:
        int lock_fd
        int64_t lost
        int64_t unlinked
        int64_t inherited
    int64_t monotonic_ns()
    void *map_private(int fd, int64_t offset, size_t length)
    int keep_private(void *at, size_t length)
    int munmap(void *at, size_t length)
    int64_t realtime_ns()
    void futex_wait_u32(uint32_t *word, uint32_t value, int64_t ns)
    int futex_wake_u32(uint32_t *word, int most)
    int lock_test(int fd, int64_t byte)
    int lock_take(int fd, int64_t byte)
    int64_t fork_generation()
    int count_forks()
    void watch_parent(int pid)
    bint registration_is_good(registration *r)
    int file_is_unlinked(int fd)
    int sync_bytes(const void *at, uint64_t length)
    int registration_lock(registration *r, int fd, int64_t byte)
    int registration_watch(
        registration *r, uint64_t *status, uint64_t expected, uint64_t *last_seen, const uint64_t *epoch, int auto_beat
    )
    void registration_look(registration *r, int (*look)(void *) noexcept nogil, void *at)
    void registration_end(registration *r)

cdef extern from "sched.h" nogil:
    int sched_yield()

cdef extern from "errno.h" nogil:
    enum:
        EAGAIN
        EIO

cdef enum:
    SPIN_CHECKS = 200
    YIELD_NS = 20000
    LONGEST_SLEEP_MS = 480
    LOOK_PERIOD_MS = 5000

# Is there something to do? OK, EMPTY or FULL (not yet), or a code that ends the wait. Thorough before a sleep.
ctypedef Code (*Check)(void *context, bint thorough) noexcept nogil


cdef inline void wake_some(uint32_t *word, int most) noexcept nogil:
    cdef uint32_t seen
    cdef int _tries
    for _tries in range(16):
        seen = load_seq_cst_u32(word)
        if cas_seq_cst_u32(word, seen, seen + WAKE_STEP):
            # counted up again when the bit goes, else a waiter that saw the bit before could sleep on a word that came back
            if futex_wake_u32(word, most) < 1 and cas_seq_cst_u32(
                word, seen + WAKE_STEP, (seen + 2 * WAKE_STEP) & ~<uint32_t> WAITERS_BIT
            ):
                # for whoever fell asleep between the wake and the CAS
                futex_wake_u32(word, 0x7FFFFFFF)
            return
    futex_wake_u32(word, most)


cdef inline void wake_up_to(uint32_t *word, int n) noexcept nogil:
    """Called after a locked instruction that made `n` things available."""
    # W1: pairs with W2; either this load sees the waiter's bit or the waiter's check sees what was made available
    fence_after_rmw()
    if load_seq_cst_u32(word) & WAITERS_BIT:
        wake_some(word, n)


cdef inline void wake_one(uint32_t *word) noexcept nogil:
    wake_up_to(word, 1)


cdef inline void wake_many(uint32_t *word, int n) noexcept nogil:
    """Called after plain stores that made `n` things available."""
    fence_seq_cst()
    # W1: pairs with W2, as in wake_one
    if load_seq_cst_u32(word) & WAITERS_BIT:
        wake_some(word, n)


cdef inline bint is_time_to_look(int64_t *looked_ns) noexcept nogil:
    """Once in five seconds for each handle that is about to sleep: a hint that is wrong and yet plausible must not last."""
    cdef int64_t now = monotonic_ns()
    # several threads may wait on one handle
    if now - private_get(looked_ns) < LOOK_PERIOD_MS * <int64_t> 1000000:
        return False
    private_set(looked_ns, now)
    return True


cdef inline Code look_for(
    Check check, void *context, int64_t *closed, int checks, int64_t yield_ns, int64_t *late_ns
) noexcept nogil:
    """Look so many times in a row, then for `yield_ns` between turns of whoever else wants this processor. SIGNAL: not yet.

    Where something was there when this one's turn came again, `late_ns` says how long the others' turn before that was.
    """
    cdef int64_t began, before, now
    cdef int _n
    cdef Code code
    for _n in range(checks):
        code = check(context, False)
        if code != EMPTY and code != FULL:
            return code
        if private_get(closed):
            return CLOSED
        cpu_pause()
    # whoever was woken for this may be waiting for our processor; where others are, one turn of theirs ends this
    began = now = monotonic_ns()
    while now - began < yield_ns:
        sched_yield()
        code = check(context, False)
        before = now
        now = monotonic_ns()
        if code != EMPTY and code != FULL:
            late_ns[0] = now - before
            return code
    return SIGNAL


cdef inline Code wait_for(
    uint32_t *word, Check check, void *context, int64_t *closed, int64_t deadline, int *stage
) noexcept nogil:
    """One step of a wait: the first one spins briefly, the others sleep, each for a bounded time.

    SIGNAL says "not yet": the caller lets Python look at signals and comes again. `deadline` is in ns on the monotonic clock
    (< 0: none); `stage` is the caller's, 0 at first.
    """
    return wait_with_wakes(word, check, context, closed, deadline, NULL, stage)


cdef inline Code wait_with_wakes(
    uint32_t *word, Check check, void *context, int64_t *closed, int64_t deadline, int64_t *wakes_at, int *stage
) noexcept nogil:
    """`wait_for` that sleeps no longer than until `wakes_at` (monotonic ns), which its check may set; a past one is none."""
    cdef uint32_t seen
    cdef int64_t ns, began
    cdef int64_t late = 0
    cdef Code code
    if stage[0] == 0:
        stage[0] = 1
        return look_for(check, context, closed, SPIN_CHECKS, YIELD_NS, &late)
    began = monotonic_ns()
    # W2: pairs with W1
    seen = fetch_or_seq_cst_u32(word, WAITERS_BIT) | WAITERS_BIT
    fence_after_rmw()
    code = check(context, True)
    if code != EMPTY and code != FULL:
        return code
    if private_get(closed):
        return CLOSED
    ns = LONGEST_SLEEP_MS * <int64_t> 1000000
    if deadline >= 0:
        if deadline - monotonic_ns() < ns:
            ns = deadline - monotonic_ns()
        if ns <= 0:
            return TIMEOUT
    if wakes_at != NULL and private_get(wakes_at) >= began:
        # set by the last look, or by another thread's; whoever puts something due from now on wakes us
        ns = min(ns, private_get(wakes_at) - monotonic_ns())
        if ns <= 0:
            return SIGNAL
    futex_wait_u32(word, seen, ns)
    return SIGNAL
