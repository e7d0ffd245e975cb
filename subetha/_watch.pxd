"""What a participant's timer does for a queue, twice a second and without the GIL: look for the dead, and lead or follow.

    leader word   term << 16 | number      taken over by CAS from a leader that is dead, or has not ticked for LEADER_SILENT_MS

One leader ticks the epoch, once a second. Two leaders at once (an old one that was stopped) cost a tick, and nothing else:
the old one finds another number in the word.
"""

from libc.stdint cimport int64_t, uint64_t

from subetha._atomics cimport cas_seq_cst_u64, fetch_add_acq_rel_u64, load_acquire_u64, private_set
from subetha._heartbeat cimport status_state
from subetha._keep cimport kept_free_expired
from subetha._lapse cimport queue_end_overdue, queue_lapse
from subetha._layout cimport SLOT_USED
from subetha._park cimport due_from_cells
from subetha._process cimport file_is_unlinked, monotonic_ns
from subetha._queue cimport UNKNOWN_CAUSE, Queue
from subetha._recovery cimport queue_rescue
from subetha._rescue cimport is_dead

cdef enum:
    EPOCH_MS = 1000
    LEADER_SILENT_MS = 2500
    SECOND_LOOK_MS = 50     # a death is first left to whoever started the process, and knows how it ended
    GRACE_EPOCHS = 5        # a beat that is further behind is a lapse
    OVERDUE_LOOK_MS = 5000  # every running job's deadline is looked at so often, whatever the pool's line says
    PARKED_LOOK_MS = 1000   # parked and kept cells are gone through so often, or where that takes long, for a hundredth of the time
    LOOKS = 64              # records that one who does not lead looks at each time

ctypedef struct Watch:
    Queue *queue
    int pool_fd
    int mail_fd
    int64_t *unlinked       # set where a file of the queue has no name any more
    uint64_t *epoch
    uint64_t *leader
    uint64_t term_seen      # the leader word and the epoch as last seen, and since when
    uint64_t epoch_seen
    int64_t epoch_seen_ns
    int64_t ticked_ns       # when this one ticked, leading
    uint64_t fresh_epoch    # nobody is lapsed who was silent before it: this one had not looked
    int64_t looked_ns
    int64_t overdue_ns      # when the deadlines of all jobs were last looked at, leading
    int64_t parked_ns       # when to look next at the parked cells, leading
    int64_t suspected_ns    # since when somebody seems dead; 0: nobody does
    uint64_t next_slot


cdef inline bint watch_leads(Watch *w, int64_t now) noexcept nogil:
    """Is this the leader, perhaps from now on?"""
    cdef Queue *q = w.queue
    # L1: pairs with L2
    cdef uint64_t leader = load_acquire_u64(w.leader)
    cdef uint64_t epoch = load_acquire_u64(w.epoch)
    cdef uint64_t number = leader & 0xFFFF
    cdef uint64_t status
    if epoch != w.epoch_seen or leader != w.term_seen or now - w.looked_ns > LEADER_SILENT_MS * <int64_t> 1000000:
        # also where this process was stopped itself: silence that nobody listened to does not count
        w.epoch_seen = epoch
        w.term_seen = leader
        w.epoch_seen_ns = now
    if number == q.owner:
        return True
    if (
        number != 0 and number <= q.records.count
        and now - w.epoch_seen_ns <= LEADER_SILENT_MS * <int64_t> 1000000
        and not is_dead(&q.records, q.table_fd, q.lock_base, number - 1, &status)
        and status & 0xFF != 0
    ):
        return False
    # L2: pairs with L1
    if not cas_seq_cst_u64(w.leader, leader, ((leader >> 16) + 1) << 16 | q.owner):
        return False
    w.ticked_ns = now
    w.fresh_epoch = epoch
    return True


cdef inline void watch_tick(Watch *w, int64_t now) noexcept nogil:
    """The leader's: the next epoch, once a second; one that comes late grants everybody a fresh window."""
    if now - w.ticked_ns < EPOCH_MS * <int64_t> 1000000:
        return
    # T4: pairs with T1
    fetch_add_acq_rel_u64(w.epoch, 1)
    if now - w.ticked_ns > 2 * EPOCH_MS * <int64_t> 1000000:
        w.fresh_epoch = load_acquire_u64(w.epoch)
    w.ticked_ns = now


cdef inline void watch_lapses(Watch *w) noexcept nogil:
    """The leader's: move on the work of whoever is silent for longer than the grace."""
    cdef Queue *q = w.queue
    cdef uint64_t epoch = load_acquire_u64(w.epoch)
    cdef uint64_t slot, seen
    for slot in range(q.records.count):
        if slot + 1 == q.owner or status_state(load_acquire_u64(&q.records.first[slot].status)) != SLOT_USED:
            continue
        # T2: pairs with T1
        seen = load_acquire_u64(&q.records.first[slot].last_seen_epoch)
        if seen < w.fresh_epoch:
            seen = w.fresh_epoch
        if epoch > seen + GRACE_EPOCHS:
            queue_lapse(q, slot + 1)


cdef inline int watch_deadlines(Watch *w, int64_t now) noexcept nogil:
    """The leader's: end the jobs that are out of time. In how many ms the next one is, or 0."""
    cdef Queue *q = w.queue
    cdef uint64_t deadline = load_acquire_u64(&q.lines.deadline)
    if (deadline != 0 and deadline <= <uint64_t> now) or now - w.overdue_ns > OVERDUE_LOOK_MS * <int64_t> 1000000:
        w.overdue_ns = now
        # taken away first: who starts a job meanwhile puts its own deadline there
        cas_seq_cst_u64(&q.lines.deadline, deadline, 0)
        queue_end_overdue(q, now)
        deadline = load_acquire_u64(&q.lines.deadline)
    if deadline == 0 or deadline > <uint64_t> now + 500000000:
        return 0
    return <int> ((deadline - <uint64_t> now) // 1000000) + 1 if deadline > <uint64_t> now else 1


cdef inline void watch_parked(Watch *w, int64_t now) noexcept nogil:
    """The leader's: no parked job is forgotten, whatever the word says, and no result is kept for longer than it is to be."""
    if now >= w.parked_ns:
        due_from_cells(w.queue)
        kept_free_expired(w.queue)
        w.parked_ns = max(now + (PARKED_LOOK_MS - 100) * <int64_t> 1000000, now + 100 * (monotonic_ns() - now))


cdef inline bint watch_rescues(Watch *w, bint leads, int64_t now) noexcept nogil:
    """Look for the dead. True: there is one, to be looked at again soon."""
    cdef Queue *q = w.queue
    cdef bint is_time = w.suspected_ns != 0 and now - w.suspected_ns >= SECOND_LOOK_MS * <int64_t> 900000
    cdef bint suspected = False
    cdef uint64_t _n, status
    cdef uint64_t slot = 0
    cdef uint64_t looks = q.records.count
    if not leads and looks > LOOKS:
        looks = LOOKS
        slot = w.next_slot
    for _n in range(looks):
        if slot >= q.records.count:
            slot = 0
        if slot + 1 != q.owner and is_dead(&q.records, q.table_fd, q.lock_base, slot, &status):
            if not is_time:
                suspected = True
            elif queue_rescue(q, slot, status, UNKNOWN_CAUSE) < 0:
                suspected = True
        slot += 1
    if not suspected:
        w.next_slot = slot
    if suspected and w.suspected_ns == 0:
        w.suspected_ns = now
    elif not suspected:
        w.suspected_ns = 0
    return suspected


cdef inline int queue_watch(void *context) noexcept nogil:
    """One look. In how many ms the next one is wanted, 0: at the usual time."""
    cdef Watch *w = <Watch *> context
    cdef int64_t now = monotonic_ns()
    cdef bint leads
    cdef int soon = 0
    if file_is_unlinked(w.pool_fd) or file_is_unlinked(w.mail_fd) or file_is_unlinked(w.queue.arena.fd):
        private_set(w.unlinked, 1)
        return 0
    leads = watch_leads(w, now)
    if leads:
        watch_tick(w, now)
        watch_lapses(w)
        soon = watch_deadlines(w, now)
        watch_parked(w, now)
    if watch_rescues(w, leads, now) and (soon == 0 or soon > SECOND_LOOK_MS):
        soon = SECOND_LOOK_MS
    w.looked_ns = now
    return soon
