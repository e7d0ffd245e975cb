"""Parked jobs: not to run yet, or known to nobody who has met them. A parked cell says all; no place leads to it.

    submit   WRITING(me) -> PARKED(0)             accepted, to run at its time
    park     TAKEN(me) -> PARKED(0), version+1    by its worker; or by one that does not know its closure id
    take     PARKED(0) -> TAKEN(me)               by whoever claims: there is nothing to publish
    cancel   PARKED(0) -> FREE

`due` in the pool's lines tells when the first of them is due, so that a claim looks through the cells only then:

    due      0 -> time             by CAS, who parks: the least of both
             time -> LOOKING       by CAS, who is about to look; then it reads the cells
             LOOKING -> time, 0    by CAS, with the least that it has found

Who parks while somebody looks puts its own time there, so the look's end takes the least of both; a look whose end is not to
be seen after 20 ms, and 2 us for each cell, is done by another one. What is lost with one that parks or looks and dies is put
there again from the cells by its rescuer, before its record is free, and by the leader's timer once a second, also where the
word was damaged (models/park.pml). Bit 0 of `due` says that a job is parked since somebody did not know it.

A look that took t is followed by none of the same handle for 10 t, unless nothing else is there to be done; where it has shown
nothing, by none for the jobs that others did not know for 100 ms. It shows the 128 jobs that come first, by priority and due
time. They are hints: a CAS from the very word decides who has one.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memmove

from subetha._atomics cimport (
    cas_acq_rel_u64, cas_seq_cst_u64, copy_unowned, load_acquire_u64, load_relaxed_u64, private_get, private_set,
)
from subetha._cells cimport cell_word, word_owner, word_pack, word_state, word_version
from subetha._layout cimport EMPTY, LOOKING, OK, PARKED, TAKEN, UNKNOWN_BIT, WAS_KNOWN, Code, JobCell
from subetha._process cimport monotonic_ns
from subetha._queue cimport (
    CELL_NS, LOOK_SHARE, Queue, due_now, due_put, due_time, frame_at, job_area, job_cell, job_level, look_is_stale, queue_look,
)
from subetha._ring cimport Ref, Refs, refs_pass

cdef enum:
    SHOWN = 128             # jobs that one look shows at most
    UNKNOWN_LOOK_MS = 100   # how often at least a handle looks for jobs that others did not know
    ID_BYTES = 4            # a job's frame begins with its closure id

ctypedef struct ParkedJob:
    uint64_t cell
    uint64_t word           # PARKED, as read
    uint64_t since          # jobs of one priority go in this order
    uint32_t level
    uint32_t closure_id

ctypedef struct Shown:
    ParkedJob jobs[128]
    int count

ctypedef struct Ids:
    # closure ids, in order
    const uint32_t *first
    uint64_t count

ctypedef struct Look:
    # private: what the last look of this handle has shown
    Shown shown
    int next                # of the shown ones, to be taken
    Shown strangers         # nobody has known them for long
    int64_t next_ns         # no look before it (monotonic), unless there is nothing else to do
    bint rings_turn         # where both have a job of the same priority, they take turns
    bint knows_all          # whatever `known` says
    Ids known               # what this handle runs
    Ids live                # what any live participant has said to run, a while ago
    int64_t unknown_after_ns


cdef inline bint ids_have(Ids *ids, uint32_t closure_id) noexcept nogil:
    cdef uint64_t low = 0
    cdef uint64_t high = ids.count
    cdef uint64_t middle
    while low < high:
        middle = (low + high) // 2
        if ids.first[middle] < closure_id:
            low = middle + 1
        else:
            high = middle
    return low < ids.count and ids.first[low] == closure_id


cdef inline void show(Shown *shown, ParkedJob *job) noexcept nogil:
    """Put a job in its place, by priority and time; where all are taken, the last one goes."""
    cdef int low = 0
    cdef int high = shown.count
    cdef int middle
    cdef ParkedJob *at
    while low < high:
        middle = (low + high) // 2
        at = &shown.jobs[middle]
        if at.level < job.level or (at.level == job.level and at.since <= job.since):
            low = middle + 1
        else:
            high = middle
    if low == SHOWN:
        return
    if shown.count < SHOWN:
        shown.count += 1
    memmove(&shown.jobs[low + 1], &shown.jobs[low], (shown.count - 1 - low) * sizeof(ParkedJob))
    shown.jobs[low] = job[0]


cdef inline bint closure_id_of(Queue *q, uint64_t index, uint64_t word, uint32_t *closure_id) noexcept nogil:
    """Of a parked job. False: it is damaged, or not parked any more."""
    cdef JobCell *cell = job_cell(q, index)
    cdef uint64_t length = load_relaxed_u64(&cell.job_length)
    cdef unsigned char copy[4]
    cdef const unsigned char *at = frame_at(
        q, job_area(q, index), q.job_bytes, length, load_relaxed_u64(&cell.job_block), index, word_version(word)
    )
    if at == NULL or length < ID_BYTES:
        return False
    # the cell may be another job's by now; whoever goes by this takes it by a CAS from the word that was read before
    copy_unowned(copy, at, ID_BYTES)
    closure_id[0] = copy[0] | <uint32_t> copy[1] << 8 | <uint32_t> copy[2] << 16 | <uint32_t> copy[3] << 24
    return True


cdef inline void look_at_unknown(Queue *q, Look *look, ParkedJob *job, int64_t now) noexcept nogil:
    """A job that somebody did not know: this one may; or a live one does, or none has for too long."""
    cdef JobCell *cell = job_cell(q, job.cell)
    cdef uint64_t since
    # what is damaged is for whoever comes first
    if look.knows_all or not closure_id_of(q, job.cell, job.word, &job.closure_id) or ids_have(&look.known, job.closure_id):
        job.since = load_relaxed_u64(&cell.submitted_ns)
        show(&look.shown, job)
        return
    since = load_relaxed_u64(&cell.unknown_ns)
    # by a CAS, since the cell may be another job's by now, for which this time would be too early
    if ids_have(&look.live, job.closure_id):
        cas_acq_rel_u64(&cell.unknown_ns, since, <uint64_t> now | WAS_KNOWN)
    elif since & WAS_KNOWN or since == 0 or since > <uint64_t> now:
        # it counts from here, and not from the last look: who knew it may have gone just now
        cas_acq_rel_u64(&cell.unknown_ns, since, <uint64_t> now & ~<uint64_t> WAS_KNOWN)
    elif <uint64_t> now - since >= <uint64_t> look.unknown_after_ns:
        job.since = since
        show(&look.strangers, job)


cdef inline void look_at_parked(Queue *q, Look *look) noexcept nogil:
    """Look through the cells, and leave in `due` when the next look is worth while."""
    cdef int64_t began = monotonic_ns()
    cdef uint64_t now = due_now(q)
    cdef uint64_t seen = load_acquire_u64(&q.lines.due)
    cdef uint64_t least = 0
    cdef bint unknown = False
    cdef bint some_unknown_shown = False
    cdef int64_t took
    cdef uint64_t i, due
    cdef ParkedJob job
    look.shown.count = look.strangers.count = look.next = 0
    # U2: pairs with U1; where it fails somebody has parked meanwhile, or looks
    cas_seq_cst_u64(&q.lines.due, seen, LOOKING)
    for i in range(q.cells.count):
        # U3: pairs with C5 and C6
        job.word = load_acquire_u64(cell_word(&q.cells, i))
        if word_state(job.word) != PARKED:
            continue
        job.cell = i
        job.level = job_level(job_cell(q, i))
        due = load_relaxed_u64(&job_cell(q, i).due_ns)
        if due == 0:
            unknown = True
            look_at_unknown(q, look, &job, began + private_get(&q.shift_ns))
            continue
        if least == 0 or due < least:
            least = due
        if due <= now:
            job.since = due
            show(&look.shown, &job)
    some_unknown_shown = unknown and look.shown.count > 0
    private_set(&q.looking_ns, 0)
    due_put(q, least, unknown, True)
    took = monotonic_ns() - began
    # while it did not have the processor it cost nothing
    look.next_ns = began + took + LOOK_SHARE * min(took, <int64_t> q.cells.count * CELL_NS)
    # there may be more of those that were shown
    private_set(&q.unknown_look_ns, began if some_unknown_shown else max(
        look.next_ns, began + took + UNKNOWN_LOOK_MS * <int64_t> 1000000
    ))


cdef inline bint is_time_for_parked(Queue *q, Look *look, bint idle) noexcept nogil:
    cdef uint64_t seen = load_acquire_u64(&q.lines.due)
    cdef uint64_t time = due_time(seen)
    cdef int64_t now
    if seen == 0:
        return False
    now = monotonic_ns()
    if time != LOOKING:
        private_set(&q.looking_ns, 0)
    if not idle and now < look.next_ns:
        return False
    if time == LOOKING:
        return look_is_stale(q, now)
    return (time != 0 and time <= due_now(q)) or (seen & UNKNOWN_BIT and private_get(&q.unknown_look_ns) <= now)


cdef inline ParkedJob *next_shown(Queue *q, Look *look) noexcept nogil:
    """The first one shown that is still parked, or NULL."""
    cdef ParkedJob *job
    while look.next < look.shown.count:
        job = &look.shown.jobs[look.next]
        if load_acquire_u64(cell_word(&q.cells, job.cell)) == job.word:
            return job
        look.next += 1
    return NULL


cdef inline Code queue_take_any(Queue *q, Look *look, Ref *ref) noexcept nogil:
    """The job to be claimed next, waiting or parked and due; as `queue_take`."""
    cdef Refs *ring
    cdef ParkedJob *job
    cdef Code code
    cdef uint64_t taken
    cdef uint32_t level = 0
    cdef bint has_looked = is_time_for_parked(q, look, False)
    if has_looked:
        look_at_parked(q, look)
    while True:
        job = next_shown(q, look)
        code = queue_look(q, ref, &ring, &level)
        if code != OK and code != EMPTY:
            return code
        if job == NULL and code == EMPTY:
            if has_looked or not is_time_for_parked(q, look, True):
                return EMPTY
            has_looked = True
            look_at_parked(q, look)
        elif job != NULL and (
            code == EMPTY or job.level < level or (job.level == level and not look.rings_turn)
        ):
            look.next += 1
            taken = word_pack(word_version(job.word), TAKEN, q.owner)
            # C7: pairs with C5 and C6
            if cas_acq_rel_u64(cell_word(&q.cells, job.cell), job.word, taken):
                look.rings_turn = True
                ref.cell = job.cell
                ref.word = taken
                return OK
        else:
            taken = word_pack(word_version(ref.word), TAKEN, q.owner)
            # C7: pairs with C5 and C6; whoever loses finds the place stale
            if cas_acq_rel_u64(cell_word(&q.cells, ref.cell), ref.word, taken):
                look.rings_turn = False
                ref.word = taken
                refs_pass(ring, ref)
                return OK


cdef inline void due_from_cells(Queue *q) noexcept nogil:
    """Put into `due` what the cells say, in case that who was to do so has died, or the word was damaged."""
    cdef uint64_t i, word, due
    cdef uint64_t least = 0
    cdef bint unknown = False
    cdef bint any = False
    for i in range(q.cells.count):
        # U3: pairs with C5 and C6
        word = load_acquire_u64(cell_word(&q.cells, i))
        if word_state(word) == PARKED:
            any = True
            due = load_relaxed_u64(&job_cell(q, i).due_ns)
            unknown = unknown or due == 0
            if due and (least == 0 or due < least):
                least = due
    if any:
        due_put(q, least, unknown, False)


cdef inline void parked_mend(Queue *q, uint64_t index, uint64_t word) noexcept nogil:
    """Nobody owns what is parked."""
    if word_owner(word) != 0:
        # C6: pairs with C7 and U3
        cas_seq_cst_u64(cell_word(&q.cells, index), word, word_pack(word_version(word), PARKED, 0))
