"""A queue: one pool of cells, a job a cell; rings `back` and `submit` for each priority, a mailbox ring for each client.

    submit    FREE -> WRITING(me), write the job, READY(me), publish in submit[priority]
    claim     READY, RETRY -> TAKEN(me), from back[0], submit[0], back[1], ...; pass the place
    reply     write the result beside the job, TAKEN(me) -> DONE(me), publish in the client's mailbox, look at the client again
    collect   DONE -> COLLECTED(me), copy, FREE, pass the place
    keep      or DONE -> KEPT(me), copy, when it expires, KEPT(0); then for anyone who asks, and FREE after that time (_keep.pxd)
    release   TAKEN(me) -> RETRY(me) version+1, publish in back[priority]
    park      TAKEN(me) -> PARKED(0) version+1, or by a submit for later WRITING(me) -> PARKED(0); no place leads to it (_park.pxd)
    cancel    READY, RETRY, PARKED -> FREE, wherever the job id stands

A durable queue has a cell on the disk before anybody is told of what it says: READY (its block before it) before the reference
that submit publishes, DONE and DEAD before the mailbox hears of them, FREE before ack or cancel returns and before the cell's
blocks are anybody else's. What only moves a job (TAKEN, RETRY) is not waited for: any image of a cell with its job in it is one
that the job can be run from. References, mailboxes and block links are found again from the cells (reboot.py).

A job id is client number 16 | incarnation 16 | sequence 32. A job's bytes stay untouched until its cell is freed.

Others read some of a cell's fields before its word tells them whether these count: all are written by relaxed stores.

What a death leaves: WRITING, TAKEN, COLLECTED or KEPT with a dead owner; READY or RETRY that no place leads to; DONE that its
client's mailbox does not hold; blocks OWNED by the dead, or linked to versions that have passed; a PARKED cell that the pool's word
`due` does not tell of.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from subetha._atomics cimport (
    cas_acq_rel_u64, cas_seq_cst_u64, load_acquire_u32, load_acquire_u64, load_relaxed_u8, load_relaxed_u16, load_relaxed_u32,
    fence_seq_cst, load_relaxed_u64, private_get, private_set, store_relaxed_u8, store_relaxed_u16, store_relaxed_u32,
    store_relaxed_u64, store_release_u32, store_release_u64,
)
from subetha._blocks cimport Arena, block_allocate, block_data, block_free, block_link, block_of, block_relink
from subetha._cells cimport (
    Cells, cell_free_if, cell_publish, cell_word, cells_acquire, word_is_one_of, word_owner, word_pack, word_state,
    word_version,
)
from subetha._heartbeat cimport Records, record_is
from subetha._layout cimport (
    CLAIMABLE, COLLECTABLE, COLLECTED, CORRUPT, DEAD, DONE, EMPTY, FENCED, FREE, FULL, KEPT, LOOKING, LOST, NO_PLACE, NOT_SYNCED,
    OK, OVERDUE, PARKED, QUARANTINED, READY, RETRY, TAKEN, UNKNOWN_BIT, WAS_KNOWN, Cause, Code, JobCell, PoolLines,
    RingLines,
)
from subetha._process cimport (
    LONGEST_SLEEP_MS, is_time_to_look, monotonic_ns, realtime_ns, sync_bytes, wake_one, wake_up_to,
)
from subetha._repair cimport refs_call_for_repair, refs_look
from subetha._ring cimport Ref, Refs, refs_init, refs_pass, refs_peek, refs_publish

cdef enum:
    LEVELS = 3      # priorities
    MOST_DOUBLINGS = 31
    UNKNOWN_CAUSE = -2147483648
    RAISED_CAUSE = -2147483647
    CAUSES = 4
    CELL_NS = 200   # of a look at the parked cells that took longer than this for each the rest was other processes' time
    LOOK_MS = 20    # such a look that takes longer, and LOOK_SHARE times CELL_NS for each cell, may be one of the dead
    LOOK_SHARE = 10     # so many times as long as a look took there is no other one of the same handle
    # states of which an image on the disk would let the job run, or be listed, again
    HAS_JOB = 1 << READY | 1 << TAKEN | 1 << RETRY | 1 << PARKED | 1 << DEAD | 1 << QUARANTINED

ctypedef struct Mailbox:
    Refs refs
    RingLines *lines

ctypedef struct Queue:
    Cells cells
    uint64_t reserve        # cells below it are kept for copies
    uint64_t job_bytes
    uint64_t result_bytes
    PoolLines *lines
    Refs back[3]
    Refs submit[3]
    Arena arena
    Records records
    uint32_t *mail_made     # one a participant: 1 once its mailbox has its disk space
    uint8_t *mail           # the mailboxes, `mail_stride` bytes each
    uint64_t mail_stride
    uint64_t owner          # this handle's number
    uint64_t client         # number << 16 | incarnation: the upper half of its job ids
    uint64_t block_owner    # incarnation << 16 | number: what it owns blocks as
    uint32_t pid
    int table_fd
    int64_t lock_base       # offset of the participants' bytes in the table's file
    uint64_t hint           # private: where a free cell may be
    int64_t held            # private: cells this client holds; counted in the cells before it is believed
    uint64_t quota          # most cells that one client may hold
    int64_t looked_ns       # private: when the hints were last looked for in the places
    bint is_durable         # the disk has a cell before anybody is told of it
    int64_t sync_errno      # private: why the disk did not take something, until somebody is told
    int64_t shift_ns        # private: what tests add to the clocks by which jobs are due and unknown
    int64_t wakes_at        # private: when a claim that waits has to look again (monotonic ns); not, where that has passed
    int64_t unknown_look_ns     # private: when to look next (monotonic) for jobs that others did not know
    int64_t looking_ns      # private: since when (monotonic) somebody seems to be looking at the parked cells; 0: nobody

ctypedef struct JobOptions:
    uint64_t due_ns         # when it may run (realtime); 0: at once
    uint32_t timeout_ms     # 0: none
    uint32_t keep_s
    uint32_t backoff_ms
    uint16_t max_attempts
    uint8_t priority
    uint8_t doublings       # of the backoff

ctypedef struct Piece:
    const uint8_t *data
    uint64_t length

ctypedef struct Frame:
    # headers made beforehand (the second one for a block: "the data is all that follows"), and the data
    uint8_t header[10]
    uint8_t block_header[10]
    uint64_t header_length
    const uint8_t *data     # NULL: it lies in pieces
    const Piece *pieces
    uint64_t pieces_count
    uint64_t data_length    # of all of it
    uint32_t crc32          # of a durable queue's job or result, else 0


cdef inline JobCell *job_cell(Queue *q, uint64_t index) noexcept nogil:
    return <JobCell *> cell_word(&q.cells, index)


cdef inline uint8_t *job_area(Queue *q, uint64_t index) noexcept nogil:
    return <uint8_t *> cell_word(&q.cells, index) + sizeof(JobCell)


cdef inline uint8_t *result_area(Queue *q, uint64_t index) noexcept nogil:
    return job_area(q, index) + q.job_bytes


cdef inline uint32_t job_level(JobCell *cell) noexcept nogil:
    # read once: another process may change it between a check and a use
    cdef uint32_t level = load_relaxed_u8(&cell.priority)
    return level if level < LEVELS else LEVELS - 1


cdef inline uint32_t job_charge(uint64_t word) noexcept nogil:
    """What `charged` says once the claim with this word has been started: never 0, and another one after every put-back."""
    return <uint32_t> (word_version(word) << 1 | 1)


cdef inline void deadline_put(Queue *q, uint64_t deadline) noexcept nogil:
    """Let whoever leads look at `deadline` (monotonic ns) at the latest."""
    cdef uint64_t seen
    cdef int _tries
    for _tries in range(64):
        seen = load_acquire_u64(&q.lines.deadline)
        if seen != 0 and seen <= deadline:
            return
        if cas_seq_cst_u64(&q.lines.deadline, seen, deadline):
            return


cdef inline uint64_t due_time(uint64_t word) noexcept nogil:
    return word & ~<uint64_t> UNKNOWN_BIT


cdef inline uint64_t due_now(Queue *q) noexcept nogil:
    """The time by which jobs are due."""
    return <uint64_t> (realtime_ns() + private_get(&q.shift_ns))


cdef inline void due_put(Queue *q, uint64_t due, bint unknown, bint looked) noexcept nogil:
    """Let whoever claims look at the parked cells at `due` (realtime ns; 0: not for that), and now and then for what is `unknown`.

    Called after the cell is PARKED, or with what a look has found, which ends that (`looked`).
    """
    cdef uint64_t seen, put, time
    cdef bint is_sooner
    cdef int _tries
    # U1: pairs with U2; either this sees that somebody looks, or has looked, or the look sees the cell
    fence_seq_cst()
    for _tries in range(64):
        seen = load_acquire_u64(&q.lines.due)
        time = due_time(seen)
        if time == LOOKING and (looked or due):
            time = 0
        is_sooner = due != 0 and (time == 0 or due < time)
        # a time is even, and not one of those that mean something else
        put = (max(due_time(due), <uint64_t> LOOKING + 2) if is_sooner else time) | seen & UNKNOWN_BIT | unknown
        if put == seen:
            return
        if cas_seq_cst_u64(&q.lines.due, seen, put):
            if looked and due_time(seen) == LOOKING:
                # who saw that comes again soon
                return
            if put & UNKNOWN_BIT > seen & UNKNOWN_BIT or (
                is_sooner and due < due_now(q) + LONGEST_SLEEP_MS * <uint64_t> 1000000
            ):
                # others may sleep longer than that; those who sleep at all wake in time for what is due later
                wake_up_to(&q.lines.items, 0x7FFFFFFF)
            return


cdef inline void cause_write(Cause *cause, uint64_t when_ns, uint32_t pid, int32_t code) noexcept nogil:
    store_relaxed_u64(&cause.when_ns, when_ns)
    store_relaxed_u32(&cause.pid, pid)
    store_relaxed_u32(<uint32_t *> &cause.code, <uint32_t> code)


cdef inline void job_start(Queue *q, JobCell *cell, uint64_t word) noexcept nogil:
    """Count an attempt, once a claim; from here on its time runs."""
    cdef uint64_t now
    cdef uint64_t deadline = 0
    cdef uint16_t attempts
    if load_relaxed_u32(&cell.charged) != job_charge(word):
        # in this order: a death in between has charged, and nobody releases after a death. First what is known of the death,
        # should this be the one: its rescuer may die before it writes more
        attempts = load_relaxed_u16(&cell.attempts)
        now = <uint64_t> realtime_ns()
        cause_write(&cell.causes[attempts % CAUSES], now, q.pid, UNKNOWN_CAUSE)
        store_relaxed_u16(&cell.attempts, attempts + 1)
        store_relaxed_u64(&cell.started_ns, now)
        store_relaxed_u64(&cell.progress, 0)
        if cell.timeout_ms:
            deadline = <uint64_t> monotonic_ns() + <uint64_t> cell.timeout_ms * 1000000
        store_relaxed_u64(&cell.deadline_ns, deadline)
        # J1: pairs with J2
        store_release_u32(&cell.charged, job_charge(word))
        if deadline:
            # last: the leader looks only at what is charged
            deadline_put(q, deadline)


cdef inline void result_write(JobCell *cell, uint64_t block, uint64_t length, uint32_t crc32) noexcept nogil:
    store_relaxed_u64(&cell.result_block, block)
    store_relaxed_u64(&cell.result_length, length)
    store_relaxed_u32(&cell.result_crc32, crc32)


cdef inline bint queue_mailbox(Queue *q, uint64_t number, Mailbox *box) noexcept nogil:
    """The mailbox of a participant's number (read from shared memory); False where it has none."""
    cdef uint8_t *at
    # M1: pairs with M2
    if number == 0 or number > q.records.count or load_acquire_u32(&q.mail_made[number - 1]) != 1:
        return False
    at = q.mail + (number - 1) * q.mail_stride
    box.lines = <RingLines *> at
    refs_init(&box.refs, box.lines, <uint64_t *> (at + sizeof(RingLines)), q.cells.bits)
    return True


cdef inline bint client_is_there(Queue *q, uint64_t job_id) noexcept nogil:
    """Has the incarnation that submitted the job not moved on? Looked at after a publish (seq_cst)."""
    # P1: pairs with P2; either this sees the mark of who leaves, or its drain sees the reference
    return record_is(&q.records.first[(job_id >> 48) - 1], (job_id >> 32) & 0xFFFF)


cdef inline bint client_has_gone(Queue *q, uint64_t job_id) noexcept nogil:
    """Is the incarnation that submitted the job (its id read from shared memory) there no more?"""
    cdef uint64_t number = job_id >> 48
    return number == 0 or number > q.records.count or not client_is_there(q, job_id)


cdef inline void free_blocks(Queue *q, uint64_t index, uint64_t version, uint64_t job_block, uint64_t result_block) noexcept nogil:
    if job_block:
        block_free(&q.arena, job_block, index, version)
    if result_block:
        block_free(&q.arena, result_block, index, version)


cdef inline bint synced(Queue *q, const void *at, uint64_t length) noexcept nogil:
    """In a durable queue: on the disk when this returns. False: the disk did not take it."""
    cdef int why
    if not q.is_durable:
        return True
    why = sync_bytes(at, length)
    if why != 0:
        private_set(&q.sync_errno, why)
    return why == 0


cdef inline bint cell_synced(Queue *q, uint64_t index) noexcept nogil:
    return synced(q, cell_word(&q.cells, index), q.cells.stride)


cdef inline bint block_synced(Queue *q, uint64_t block, uint64_t length) noexcept nogil:
    """A block that this process has just written."""
    return block == 0 or synced(q, block_data(&q.arena, block), length)


cdef inline bint is_letter(uint64_t word) noexcept nogil:
    """Set aside for somebody to look at; with an owner its submitter has still to be told."""
    return word_is_one_of(word, 1 << DEAD | 1 << QUARANTINED)


cdef inline bint cell_and_blocks_free(Queue *q, uint64_t index, uint64_t word) noexcept nogil:
    """FREE with the next version if the word is still the one read; then the blocks linked to the version that it has now."""
    cdef JobCell *cell = job_cell(q, index)
    cdef uint64_t job_block = load_relaxed_u64(&cell.job_block)
    cdef uint64_t result_block = load_relaxed_u64(&cell.result_block)
    if not cell_free_if(&q.cells, index, word):
        return False
    if word_is_one_of(word, HAS_JOB):
        cell_synced(q, index)
    free_blocks(q, index, word_version(word), job_block, result_block)
    wake_one(&q.lines.space)
    return True


cdef inline bint job_discard(Queue *q, uint64_t index, uint64_t word) noexcept nogil:
    """FREE by way of COLLECTED(me), version+1: where somebody was about to put the job back, its block has that version already."""
    cdef uint64_t mine = word_pack(word_version(word) + 1, COLLECTED, q.owner)
    cdef uint64_t result_block = load_relaxed_u64(&job_cell(q, index).result_block)
    block_relink(&q.arena, load_relaxed_u64(&job_cell(q, index).job_block), index, word_version(word))
    # C6: pairs with R3
    if not cas_seq_cst_u64(cell_word(&q.cells, index), word, mine):
        return False
    if word_is_one_of(word, HAS_JOB):
        cell_synced(q, index)
    free_blocks(q, index, word_version(word), 0, result_block)
    return cell_and_blocks_free(q, index, mine)


cdef inline bint job_free_if(Queue *q, uint64_t index, uint64_t word) noexcept nogil:
    """FREE if the word is still the one read; then its blocks."""
    if word_is_one_of(word, 1 << DONE | 1 << COLLECTED | 1 << KEPT) and load_relaxed_u64(&job_cell(q, index).job_block):
        # perhaps a letter, dropped just when somebody was about to tell of it or to let it run again
        return job_discard(q, index, word)
    return cell_and_blocks_free(q, index, word)


cdef inline uint32_t claim_lost(Queue *q, uint64_t index, uint64_t word) noexcept nogil:
    """After a claim's CAS from `word` failed: free the cell where it was fenced; how it was lost: FENCED, OVERDUE or FREE."""
    cdef uint64_t seen = load_acquire_u64(cell_word(&q.cells, index))
    cdef uint32_t state = word_state(seen)
    if (state == FENCED or state == OVERDUE) and seen == word_pack(word_version(word), state, q.owner):
        job_discard(q, index, seen)
        return state
    return FREE


cdef inline Code frame_store(
    Queue *q, Frame *frame, uint8_t *area, uint64_t area_bytes, uint64_t index, uint64_t version, uint64_t *block
) noexcept nogil:
    """Put a frame into its area, or into a block linked to (cell, version) where it is longer."""
    cdef uint64_t length = frame.header_length + frame.data_length
    cdef uint8_t *at = area
    cdef uint8_t *header = frame.header
    cdef uint64_t n
    cdef Code code
    block[0] = 0
    if length > area_bytes:
        code = block_allocate(&q.arena, &q.cells, length, q.block_owner, block)
        if code != OK:
            block[0] = 0
            return code
        at = block_data(&q.arena, block[0])
        header = frame.block_header
    memcpy(at, header, frame.header_length)
    at += frame.header_length
    if frame.data != NULL:
        memcpy(at, frame.data, frame.data_length)
    else:
        for n in range(frame.pieces_count):
            memcpy(at, frame.pieces[n].data, frame.pieces[n].length)
            at += frame.pieces[n].length
    if block[0]:
        block_link(&q.arena, block[0], index, version)
    return OK


cdef inline const uint8_t *frame_at(
    Queue *q, const uint8_t *area, uint64_t area_bytes, uint64_t length, uint64_t block, uint64_t index, uint64_t version
) noexcept nogil:
    """Where a frame of `length` bytes lies, or NULL where lengths and blocks (read from shared memory) cannot be true."""
    if block:
        return block_of(&q.arena, block, length, index, version)
    return area if length <= area_bytes else NULL


cdef inline Code queue_publish_job(Queue *q, uint64_t index, uint64_t version, uint32_t level) noexcept nogil:
    """Into submit[level]; where only cancelled jobs behind an old one fill the ring, the old ones go to `back`, in order."""
    cdef Code code
    cdef Ref ref
    cdef uint64_t taken, _n
    for _n in range(q.cells.count + 1):
        code = refs_publish(&q.submit[level], &q.cells, CLAIMABLE, version, index)
        if code != NO_PLACE:
            return code
        if refs_peek(&q.submit[level], &q.cells, CLAIMABLE, &ref) == OK:
            taken = word_pack(word_version(ref.word), TAKEN, q.owner)
            if cas_acq_rel_u64(cell_word(&q.cells, ref.cell), ref.word, taken):
                refs_pass(&q.submit[level], &ref)
                if queue_give_back(q, ref.cell, taken) != OK:
                    refs_call_for_repair(&q.back[level])
    return NO_PLACE


cdef inline Code queue_submit_parked(Queue *q, uint64_t index, uint64_t word, uint64_t due_ns) noexcept nogil:
    """WRITING(me) -> PARKED(0): from here on it is accepted, whoever dies."""
    cdef uint64_t parked = word_pack(word_version(word), PARKED, 0)
    # C5: pairs with C7 and U3
    store_release_u64(cell_word(&q.cells, index), parked)
    # withdrawn; where that fails somebody has it already, so it was submitted
    if not cell_synced(q, index) and job_free_if(q, index, parked):
        return NOT_SYNCED
    due_put(q, due_ns, False, False)
    return OK


cdef inline Code queue_submit(Queue *q, Frame *frame, uint64_t job_id, JobOptions *options) noexcept nogil:
    cdef uint64_t index, word, block
    cdef JobCell *cell
    cdef Code code = cells_acquire(&q.cells, q.reserve, &q.hint, q.owner, &index, &word)
    if code != OK:
        return code
    cell = job_cell(q, index)
    code = frame_store(q, frame, job_area(q, index), q.job_bytes, index, word_version(word), &block)
    if code == OK and not block_synced(q, block, frame.header_length + frame.data_length):
        block_free(&q.arena, block, index, word_version(word))
        code = NOT_SYNCED
    if code != OK:
        cell_free_if(&q.cells, index, word)
        wake_one(&q.lines.space)
        return code
    store_relaxed_u64(&cell.job_id, job_id)
    store_relaxed_u64(&cell.job_length, frame.header_length + frame.data_length)
    result_write(cell, 0, 0, 0)
    store_relaxed_u64(&cell.job_block, block)
    store_relaxed_u32(&cell.job_crc32, frame.crc32)
    store_relaxed_u16(&cell.attempts, 0)
    store_relaxed_u16(&cell.max_attempts, options.max_attempts)
    store_relaxed_u8(&cell.priority, options.priority)
    store_relaxed_u8(&cell.doublings, options.doublings)
    store_relaxed_u32(&cell.timeout_ms, options.timeout_ms)
    store_relaxed_u32(&cell.keep_s, options.keep_s)
    store_relaxed_u64(&cell.submitted_ns, <uint64_t> realtime_ns())
    store_relaxed_u64(&cell.started_ns, 0)
    store_relaxed_u64(&cell.due_ns, options.due_ns)
    store_relaxed_u64(&cell.deadline_ns, 0)
    store_relaxed_u64(&cell.progress, 0)
    store_relaxed_u32(&cell.backoff_ms, options.backoff_ms)
    store_relaxed_u32(&cell.charged, 0)
    if options.due_ns:
        return queue_submit_parked(q, index, word, options.due_ns)
    cell_publish(&q.cells, index, word, READY)
    code = NOT_SYNCED
    if cell_synced(q, index):
        code = queue_publish_job(q, index, word_version(word), options.priority)
    if code != OK:
        # withdrawn; where that fails somebody has it already, so it was submitted
        if job_free_if(q, index, word_pack(word_version(word), READY, q.owner)):
            return code
    wake_one(&q.lines.items)
    return OK


cdef inline Code queue_look(Queue *q, Ref *ref, Refs **ring, uint32_t *level) noexcept nogil:
    """The job in the rings to be claimed next; a damaged ring does not hide the others."""
    cdef Code code
    cdef Code result = EMPTY
    cdef uint32_t n
    for n in range(2 * LEVELS):
        ring[0] = &q.submit[n >> 1] if n & 1 else &q.back[n >> 1]
        code = refs_peek(ring[0], &q.cells, CLAIMABLE, ref)
        if code == OK:
            level[0] = n >> 1
            return OK
        if code == CORRUPT:
            result = CORRUPT
    return result


cdef inline Code queue_take(Queue *q, Ref *ref) noexcept nogil:
    """READY or RETRY -> TAKEN(me); `ref.word` is the word held then."""
    cdef Refs *ring
    cdef uint32_t level
    cdef Code code
    cdef uint64_t taken
    while True:
        code = queue_look(q, ref, &ring, &level)
        if code != OK:
            return code
        taken = word_pack(word_version(ref.word), TAKEN, q.owner)
        # C7: pairs with C5 and C6; whoever loses finds the place stale
        if cas_acq_rel_u64(cell_word(&q.cells, ref.cell), ref.word, taken):
            ref.word = taken
            refs_pass(ring, ref)
            return OK


cdef inline bint queue_take_back(Queue *q, uint32_t level, Ref *ref) noexcept nogil:
    """Claim the oldest of back[level] and put it back unpublished: two ordinary steps. `ref.word` is its word then."""
    cdef uint64_t taken, retry
    if refs_peek(&q.back[level], &q.cells, CLAIMABLE, ref) != OK:
        return False
    taken = word_pack(word_version(ref.word), TAKEN, q.owner)
    if not cas_acq_rel_u64(cell_word(&q.cells, ref.cell), ref.word, taken):
        return False
    refs_pass(&q.back[level], ref)
    block_relink(&q.arena, load_relaxed_u64(&job_cell(q, ref.cell).job_block), ref.cell, word_version(taken))
    retry = word_pack(word_version(taken) + 1, RETRY, q.owner)
    ref.word = retry
    # C6: pairs with R3
    if cas_seq_cst_u64(cell_word(&q.cells, ref.cell), taken, retry):
        return True
    claim_lost(q, ref.cell, taken)
    return False


cdef inline Code queue_press_back(Queue *q, uint32_t level, uint64_t version, uint64_t index) noexcept nogil:
    """Publish in back[level], and what is taken out for that behind it.

    Each one taken out frees a place; only others who publish at the same time can fill it first, hence the few spare ones.
    """
    cdef Code code
    cdef Ref ref
    cdef uint64_t _n
    cdef uint64_t versions[16]
    cdef uint64_t indexes[16]
    cdef int top = 0
    versions[0] = version
    indexes[0] = index
    for _n in range(4 * q.cells.count + 64):
        code = refs_publish(&q.back[level], &q.cells, CLAIMABLE, versions[top], indexes[top])
        if code == OK:
            if top == 0:
                return OK
            top -= 1
        elif code != NO_PLACE:
            return code
        elif top < 15 and queue_take_back(q, level, &ref):
            top += 1
            versions[top] = word_version(ref.word)
            indexes[top] = ref.cell
    return NO_PLACE


cdef inline Code queue_publish_back(Queue *q, uint32_t level, uint64_t version, uint64_t index) noexcept nogil:
    """Into back[level]. Where stale references behind old jobs fill that ring, the old ones go round once, in order."""
    cdef Ref ref
    cdef uint64_t n
    cdef uint64_t first_cell = 0
    cdef uint64_t first_word = 0
    cdef Code code = refs_publish(&q.back[level], &q.cells, CLAIMABLE, version, index)
    if code != NO_PLACE:
        return code
    for n in range(q.cells.count):
        if n and refs_peek(&q.back[level], &q.cells, CLAIMABLE, &ref) == OK and (
            ref.cell == first_cell and ref.word == first_word
        ):
            break
        if queue_take_back(q, level, &ref):
            if first_word == 0:
                first_cell = ref.cell
                first_word = ref.word
            code = queue_press_back(q, level, word_version(ref.word), ref.cell)
            if code != OK:
                return code
    return queue_press_back(q, level, version, index)


cdef inline void job_uncharge(JobCell *cell, uint64_t word) noexcept nogil:
    """Take back the attempt that the claim with this word was charged with, by its holder."""
    if load_relaxed_u32(&cell.charged) == job_charge(word):
        store_relaxed_u32(&cell.charged, 0)
        store_relaxed_u16(&cell.attempts, load_relaxed_u16(&cell.attempts) - 1)


cdef inline Code queue_park(Queue *q, uint64_t index, uint64_t word, uint64_t due_ns, bint charged) noexcept nogil:
    """TAKEN(me) -> PARKED(0) with the next version, its block's link moved before. `due_ns` 0: until somebody comes who knows it.

    With the same version its next start would be taken for this claim's, and not be charged.
    """
    cdef JobCell *cell = job_cell(q, index)
    cdef uint64_t block = load_relaxed_u64(&cell.job_block)
    if load_acquire_u64(cell_word(&q.cells, index)) != word:
        return LOST
    if block:
        block_relink(&q.arena, block, index, word_version(word))
    if not charged:
        job_uncharge(cell, word)
    store_relaxed_u64(&cell.deadline_ns, 0)
    store_relaxed_u64(&cell.due_ns, due_ns)
    if due_ns == 0:
        # who looks next finds out whether anybody does
        store_relaxed_u64(&cell.unknown_ns, <uint64_t> (monotonic_ns() + private_get(&q.shift_ns)) | WAS_KNOWN)
    # C6: pairs with C7 and U3
    if not cas_seq_cst_u64(cell_word(&q.cells, index), word, word_pack(word_version(word) + 1, PARKED, 0)):
        return LOST
    due_put(q, due_ns, due_ns == 0, False)
    if due_ns:
        # else it has only been moved
        cell_synced(q, index)
    return OK


cdef inline uint64_t job_backoff(JobCell *cell, uint64_t dice) noexcept nogil:
    """For how long (ns) the job rests after its last attempt: from half of what its options say to all of it, by `dice`."""
    cdef uint32_t doublings = load_relaxed_u8(&cell.doublings)
    cdef uint32_t attempts = load_relaxed_u16(&cell.attempts)
    cdef uint64_t longest = <uint64_t> load_relaxed_u32(&cell.backoff_ms) * 1000000
    if attempts > 1:
        longest <<= min(attempts - 1, min(doublings, <uint32_t> MOST_DOUBLINGS))
    return longest // 2 + dice % (longest // 2 + 1)


cdef inline uint64_t rested_at(Queue *q, JobCell *cell, uint64_t dice) noexcept nogil:
    # later than when it was started, by which that it has rested is known
    return max(due_now(q), load_relaxed_u64(&cell.started_ns)) + job_backoff(cell, dice) + 1


cdef inline bint job_has_to_rest(JobCell *cell) noexcept nogil:
    """Did it not rest since its last attempt? Its worker died, then; one that was to be tried again has been parked until then."""
    return (
        load_relaxed_u32(&cell.backoff_ms) != 0 and load_relaxed_u16(&cell.attempts) != 0
        and load_relaxed_u64(&cell.due_ns) <= load_relaxed_u64(&cell.started_ns)
    )


cdef inline Code queue_rest(Queue *q, uint64_t index, uint64_t word, uint64_t dice) noexcept nogil:
    """TAKEN(me) and not started -> PARKED(0), until its backoff has passed."""
    # not from when its worker died, which nobody may have seen
    return queue_park(q, index, word, rested_at(q, job_cell(q, index), dice), False)


cdef inline Code queue_retry(Queue *q, uint64_t index, uint64_t word, uint64_t dice) noexcept nogil:
    """TAKEN(me) -> PARKED(0), to be tried again after its backoff; no worker died of this attempt."""
    cdef JobCell *cell = job_cell(q, index)
    cdef uint64_t now = <uint64_t> realtime_ns()
    if load_acquire_u64(cell_word(&q.cells, index)) != word:
        return LOST
    if load_relaxed_u32(&cell.charged) == job_charge(word):
        cause_write(&cell.causes[(load_relaxed_u16(&cell.attempts) - 1) % CAUSES], now, q.pid, RAISED_CAUSE)
    return queue_park(q, index, word, rested_at(q, cell, dice), True)


cdef inline Code queue_put_back(Queue *q, uint64_t index, uint64_t word) noexcept nogil:
    """TAKEN(me) -> RETRY(me) with the next version and uncharged, its block's link moved before; then published in `back`."""
    cdef JobCell *cell = job_cell(q, index)
    cdef uint64_t back = word_pack(word_version(word) + 1, RETRY, q.owner)
    cdef uint32_t level = job_level(cell)
    cdef Code code
    cdef uint64_t block = load_relaxed_u64(&cell.job_block)
    if load_acquire_u64(cell_word(&q.cells, index)) != word:
        return LOST
    if block:
        block_relink(&q.arena, block, index, word_version(word))
    job_uncharge(cell, word)
    # the next claim's time has not begun
    store_relaxed_u64(&cell.deadline_ns, 0)
    # C6: pairs with R3
    if not cas_seq_cst_u64(cell_word(&q.cells, index), word, back):
        return LOST
    code = queue_publish_back(q, level, word_version(back), index)
    wake_one(&q.lines.items)
    return code


cdef inline Code queue_end(Queue *q, uint64_t index, uint64_t word, bint back) noexcept nogil:
    """End a claim without a result: put the job back, or free its cell. LOST: it was taken away."""
    if back:
        return queue_put_back(q, index, word)
    return OK if job_free_if(q, index, word) else LOST


cdef inline Code queue_give_back(Queue *q, uint64_t index, uint64_t word) noexcept nogil:
    """`queue_put_back` where no claim would learn of a loss: a cell fenced meanwhile is freed, its job goes on elsewhere."""
    cdef Code code = queue_put_back(q, index, word)
    if code == LOST:
        claim_lost(q, index, word)
        return OK
    return code


cdef inline bint letter_told(Queue *q, uint64_t index, uint64_t word) noexcept nogil:
    """DEAD(r) -> DEAD(0), version+1: its submitter knows, or has gone. The letter stays until somebody drops or retries it."""
    block_relink(&q.arena, load_relaxed_u64(&job_cell(q, index).job_block), index, word_version(word))
    # C9: pairs with C8; one collector tells
    return cas_seq_cst_u64(cell_word(&q.cells, index), word, word_pack(word_version(word) + 1, word_state(word), 0))


cdef inline void kept_settle(Queue *q, uint64_t index, uint64_t mine) noexcept nogil:
    """KEPT(me) -> KEPT(0), to expire in `keep_s` from now. Its arguments' block is needed no more."""
    cdef JobCell *cell = job_cell(q, index)
    cdef uint64_t block = load_relaxed_u64(&cell.job_block)
    if block:
        # the disk has no job in this cell any more before its bytes may be another one's
        cell_synced(q, index)
        # moved first: it may have been a letter that somebody was about to tell of when it was dropped
        block_relink(&q.arena, block, index, word_version(mine))
        block_free(&q.arena, block, index, word_version(mine) + 1)
        store_relaxed_u64(&cell.job_block, 0)
    store_relaxed_u64(&cell.due_ns, due_now(q) + <uint64_t> load_relaxed_u32(&cell.keep_s) * 1000000000)
    # N1: pairs with N2
    cas_seq_cst_u64(cell_word(&q.cells, index), mine, word_pack(word_version(mine), KEPT, 0))


cdef inline bint result_keep(Queue *q, uint64_t index, uint64_t word) noexcept nogil:
    """DONE -> KEPT(me) -> KEPT(0), of a result that nobody collects."""
    cdef uint64_t mine = word_pack(word_version(word), KEPT, q.owner)
    # C9: pairs with C8
    if not cas_seq_cst_u64(cell_word(&q.cells, index), word, mine):
        return False
    # who was to do so may have died before
    cell_synced(q, index)
    kept_settle(q, index, mine)
    return True


cdef inline void result_ended(Queue *q, uint64_t index, uint64_t word) noexcept nogil:
    """A result or letter whose submitter has gone. A letter stays, unless it is just being dropped; a result is kept or freed."""
    if is_letter(word):
        if letter_told(q, index, word):
            return
        word = word_pack(word_version(word), DONE, word_owner(word))
    if load_relaxed_u32(&job_cell(q, index).keep_s):
        result_keep(q, index, word)
    else:
        job_free_if(q, index, word)


cdef inline Code queue_delivered(
    Queue *q, Mailbox *box, uint64_t job_id, uint64_t index, uint64_t word, Code code
) noexcept nogil:
    """After a publish that gave `code`: look at the client again, wake it."""
    if not client_is_there(q, job_id):
        result_ended(q, index, word)
        return OK
    wake_one(&box.lines.items)
    return code


cdef inline Code queue_deliver(Queue *q, Mailbox *box, uint64_t job_id, uint64_t index, uint64_t word) noexcept nogil:
    """Publish a DONE cell for its client; where the client has moved on meanwhile, it is kept or freed."""
    cdef Code code
    cell_synced(q, index)
    code = refs_publish(&box.refs, &q.cells, COLLECTABLE, word_version(word), index)
    return queue_delivered(q, box, job_id, index, word, code)


cdef inline Code queue_finish(
    Queue *q, Mailbox *box, uint64_t job_id, uint64_t index, uint64_t word, Frame *frame
) noexcept nogil:
    """Write the result beside the job, TAKEN(me) -> DONE(me), deliver. LOST: it was taken away and the result is dropped.

    `box` NULL: its client has gone for long, and its result is to be kept.
    """
    cdef JobCell *cell = job_cell(q, index)
    cdef uint64_t block
    cdef uint64_t done = word_pack(word_version(word), DONE, q.owner)
    cdef Code code = frame_store(q, frame, result_area(q, index), q.result_bytes, index, word_version(word), &block)
    if code != OK:
        return code
    if load_relaxed_u32(&cell.keep_s):
        # it is to be read after the next boot, too
        block_synced(q, block, frame.header_length + frame.data_length)
    result_write(cell, block, frame.header_length + frame.data_length, frame.crc32)
    # C8: pairs with R3, N2 and C9 of the client
    if not cas_seq_cst_u64(cell_word(&q.cells, index), word, done):
        if block:
            block_free(&q.arena, block, index, word_version(word))
        return LOST
    if box == NULL:
        result_ended(q, index, done)
        return OK
    return queue_deliver(q, box, job_id, index, done)


cdef inline void queue_drop_result(Queue *q, Mailbox *box, Ref *ref) noexcept nogil:
    """Free a result that lies in this client's own mailbox; another client's is none of ours, only its place is passed."""
    if load_relaxed_u64(&job_cell(q, ref.cell).job_id) >> 48 == q.owner:
        result_ended(q, ref.cell, ref.word)
    refs_pass(&box.refs, ref)


cdef inline Code queue_next_result(Queue *q, Mailbox *box, Ref *ref) noexcept nogil:
    """The oldest DONE cell of this incarnation in its mailbox; those of earlier ones are freed."""
    cdef Code code
    while True:
        code = refs_peek(&box.refs, &q.cells, COLLECTABLE, ref)
        if code != OK or load_relaxed_u64(&job_cell(q, ref.cell).job_id) >> 32 == q.client:
            return code
        queue_drop_result(q, box, ref)


cdef inline Code queue_drain(Queue *q, Mailbox *box) noexcept nogil:
    """Free what lies in the mailbox of a client that leaves (its record was marked before, P2)."""
    cdef Ref ref
    cdef Code code
    cdef uint64_t _n
    for _n in range(2 * box.refs.size):
        code = refs_peek(&box.refs, &q.cells, COLLECTABLE, &ref)
        if code != OK:
            return code
        queue_drop_result(q, box, &ref)
    return CORRUPT


cdef inline uint64_t queue_cancel(Queue *q, uint64_t job_id) noexcept nogil:
    """Free every waiting cell of the job id; how many there were."""
    cdef uint64_t i, word
    cdef uint64_t n = 0
    for i in range(q.cells.count):
        word = load_acquire_u64(cell_word(&q.cells, i))
        if word_is_one_of(word, 1 << READY | 1 << RETRY | 1 << PARKED) and load_relaxed_u64(&job_cell(q, i).job_id) == job_id:
            n += job_free_if(q, i, word)
    return n


cdef inline uint64_t queue_drop_letter(Queue *q, uint64_t job_id) noexcept nogil:
    """DEAD, QUARANTINED -> FREE; how many such there were. One that its submitter has not been told of ends when it is."""
    cdef uint64_t i, word
    cdef uint64_t n = 0
    for i in range(q.cells.count):
        word = load_acquire_u64(cell_word(&q.cells, i))
        if not is_letter(word) or load_relaxed_u64(&job_cell(q, i).job_id) != job_id:
            continue
        if word_owner(word) == 0:
            n += job_discard(q, i, word)
        else:
            # the reference in the mailbox stays good: the letter is an ordinary result from here on
            # C8: pairs with R3 and C9
            n += cas_seq_cst_u64(
                cell_word(&q.cells, i), word, word_pack(word_version(word), DONE, word_owner(word))
            )
            cell_synced(q, i)
    return n


cdef inline Code queue_retry_letter(Queue *q, uint64_t job_id) noexcept nogil:
    """DEAD -> TAKEN(me), version+1, its attempts forgotten, -> RETRY(me), version+1, published. EMPTY: there is no such letter."""
    cdef uint64_t i, word, mine
    cdef JobCell *cell
    cdef Code code
    cdef int _tries
    for i in range(q.cells.count):
        cell = job_cell(q, i)
        for _tries in range(8):
            # again where its submitter is just being told
            word = load_acquire_u64(cell_word(&q.cells, i))
            if word_state(word) != DEAD or load_relaxed_u64(&cell.job_id) != job_id:
                break
            mine = word_pack(word_version(word) + 1, TAKEN, q.owner)
            block_relink(&q.arena, load_relaxed_u64(&cell.job_block), i, word_version(word))
            # C6: pairs with R3
            if cas_seq_cst_u64(cell_word(&q.cells, i), word, mine):
                store_relaxed_u16(&cell.attempts, 0)
                store_relaxed_u32(&cell.charged, 0)
                code = queue_give_back(q, i, mine)
                cell_synced(q, i)
                return code
    return EMPTY


cdef enum:
    # dead letters do not count, nor does what is kept: their submitter has been told, or will be
    HELD = ~(1 << FREE | 1 << DEAD | 1 << QUARANTINED | 1 << KEPT)


cdef inline uint64_t queue_count_held(Queue *q, uint32_t states) noexcept nogil:
    """Cells in one of `states` with a job of this client."""
    cdef uint64_t i
    cdef uint64_t n = 0
    for i in range(q.cells.count):
        if load_relaxed_u64(&job_cell(q, i).job_id) >> 32 != q.client:
            continue
        if word_is_one_of(load_acquire_u64(cell_word(&q.cells, i)), states):
            n += 1
    return n


cdef inline bint look_is_stale(Queue *q, int64_t now) noexcept nogil:
    """Somebody is looking at the parked cells. For so long that it may have died?"""
    cdef int64_t since = private_get(&q.looking_ns)
    if since == 0:
        private_set(&q.looking_ns, now)
    # early it would set others looking, who take each other for dead
    return since != 0 and now - since > LOOK_MS * <int64_t> 1000000 + LOOK_SHARE * <int64_t> q.cells.count * CELL_NS


cdef inline Code parked_calls(Queue *q) noexcept nogil:
    """Is it time to look at the parked cells? Else `wakes_at` says when it will be, for who sleeps."""
    cdef uint64_t seen = load_acquire_u64(&q.lines.due)
    cdef uint64_t time = due_time(seen)
    cdef int64_t wakes_at = 0
    cdef int64_t now, ahead
    if seen == 0:
        return EMPTY
    now = monotonic_ns()
    if time == LOOKING:
        if look_is_stale(q, now):
            return OK
        wakes_at = now + 1000000
    elif time:
        private_set(&q.looking_ns, 0)
        ahead = <int64_t> (time - due_now(q))
        if ahead <= 0 and time < <uint64_t> 1 << 63:
            return OK
        if 0 < ahead < <int64_t> 1 << 62:
            wakes_at = now + ahead
    if seen & UNKNOWN_BIT and time != LOOKING:
        if private_get(&q.unknown_look_ns) <= now:
            return OK
        if wakes_at == 0 or private_get(&q.unknown_look_ns) < wakes_at:
            wakes_at = private_get(&q.unknown_look_ns)
    if wakes_at:
        private_set(&q.wakes_at, wakes_at)
    return EMPTY


cdef inline Code queue_has_jobs(void *context, bint thorough) noexcept nogil:
    cdef Queue *q = <Queue *> context
    cdef Ref ref
    cdef Refs *ring
    cdef uint32_t level
    cdef Code code
    if thorough and is_time_to_look(&q.looked_ns):
        for level in range(<uint32_t> LEVELS):
            refs_look(&q.back[level])
            refs_look(&q.submit[level])
    code = queue_look(q, &ref, &ring, &level)
    return parked_calls(q) if code == EMPTY else code


cdef inline Code queue_has_space(void *context, bint thorough) noexcept nogil:
    """While spinning only the cell that comes free next is looked at; before a sleep every one."""
    cdef Queue *q = <Queue *> context
    cdef uint64_t i = load_relaxed_u64(&q.hint)
    if i < q.reserve or i >= q.cells.count:
        i = q.reserve
    if word_state(load_acquire_u64(cell_word(&q.cells, i))) == FREE:
        return OK
    if thorough:
        for i in range(q.reserve, q.cells.count):
            if word_state(load_acquire_u64(cell_word(&q.cells, i))) == FREE:
                store_relaxed_u64(&q.hint, i)
                return OK
    return FULL


cdef inline Code queue_has_quota(void *context, bint thorough) noexcept nogil:
    """Other processes free this client's cells too (acknowledged jobs): before a sleep the cells are counted."""
    cdef Queue *q = <Queue *> context
    if private_get(&q.held) < <int64_t> q.quota:
        return OK
    return OK if thorough and queue_count_held(q, HELD) < q.quota else FULL


ctypedef struct Inbox:
    Queue *queue
    Mailbox box
    int64_t looked_ns       # private, as the queue's


cdef inline Code inbox_has_results(void *context, bint thorough) noexcept nogil:
    cdef Inbox *inbox = <Inbox *> context
    cdef Ref ref
    if thorough and is_time_to_look(&inbox.looked_ns):
        refs_look(&inbox.box.refs)
    return queue_next_result(inbox.queue, &inbox.box, &ref)
