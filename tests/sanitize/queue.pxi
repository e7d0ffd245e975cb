# A queue: clients, workers that run some of the closure ids each, readers of kept results, mortals, rescuers, one who fences,
# one who clears letters away, and the timer.

cdef enum:
    Q_SUBMITTED
    Q_ANSWERED
    Q_TOLD          # letters and timeouts
    Q_CANCELLED
    Q_DROPPED       # second results
    Q_FINISHED
    Q_RELEASED
    Q_REFUSED       # answers of those whose claim had been taken away
    Q_BLOCKS        # frames in blocks
    Q_NO_BLOCK
    Q_DIED
    Q_RESCUED
    Q_REPAIRED
    Q_FENCED
    Q_LETTERS       # retried or dropped
    Q_PARKED
    Q_CUT           # frames whose data lay in pieces
    Q_KEPT          # results that their clients have collected, and which stay
    Q_READ          # kept results and letters, by those whose they are not
    Q_MOVED         # that went while they were being read
    Q_FORGOTTEN
    Q_EXPIRED
    Q_UNKNOWN       # jobs that a worker has left to those that run them
    Q_STRANGERS     # answered since nobody runs them
    Q_RETRIED
    Q_RESTED        # jobs that a worker died of, put aside until their backoff has passed
    Q_ENDED         # cancelled while they ran
    QUEUE_COUNTS

QUEUE_NAMES = (
    "submitted answered told cancelled dropped finished released refused blocks no_block died rescued repaired fenced letters "
    "parked cut kept read moved forgotten expired unknown strangers retried rested ended"
).split()

cdef enum:
    TOKENS = 1 << 22        # jobs of one client at most
    JOB_HEADER = 10         # closure id u32 | token u32, then its bytes
    RESULT_HEAD = 7         # token u32 | status u8 | length u16
    LONGEST = 12000         # three classes of blocks
    FEW = 4                 # jobs that a client has under way
    SOON_NS = 1000000
    LAST_MS = 30000         # for the results of what was submitted
    PIECES = 3
    KEEP_S = 1
    LAST_S = 3600           # of a result that its client alone forgets
    LATER_S = 2             # a clock so far ahead finds the other ones expired
    UNKNOWN_NS = 20000000   # so long a job waits for somebody that runs it

cdef enum:
    # closure ids: everybody runs the first one, each worker one of the next two, only who asks for no closure id the last one
    ALL_RUN
    SOME_RUN
    OTHERS_RUN
    NOBODY_RUNS


ctypedef struct Client:
    Inbox inbox
    uint8_t *state          # of each token: 1 pending, 2 over
    uint64_t token
    uint64_t held


cdef uint32_t closure_of(uint64_t job_id) noexcept nogil:
    cdef uint32_t token = <uint32_t> job_id
    if token & 63 == 63:
        return NOBODY_RUNS
    return token & 7 if token & 7 <= OTHERS_RUN else ALL_RUN


cdef bint lasts(uint64_t job_id) noexcept nogil:
    """Is its result to stay until its client has read it there?"""
    return job_id & 63 == 3


cdef class QueueWorld(World):
    """A queue directory's files, as QueueHandle maps them."""

    cdef Queue queue
    cdef uint64_t *leader
    cdef int pool_fd
    cdef int mail_fd
    cdef int64_t submitting
    cdef uint32_t runs[2][2]    # the closure ids of each kind of worker, in order
    cdef uint32_t live[3]       # those of anybody

    def __init__(self, dict files, dict fds, dict sizes, dict geometry, int clients):
        """`files`: name to contents, writable; `sizes`: name to what _core.QueueHandle says of it."""
        cdef const uint8_t[::1] contents
        cdef uint8_t *at
        cdef uint64_t i
        cdef uint64_t stride, first, count
        cdef int level, c
        cdef Queue *q = &self.queue
        self.maps = files
        self.submitting = clients
        self.runs[0][0] = self.runs[1][0] = self.live[0] = ALL_RUN
        self.runs[0][1] = self.live[1] = SOME_RUN
        self.runs[1][1] = self.live[2] = OTHERS_RUN
        # the pool
        contents = files["pool"]
        at = <uint8_t *> &contents[0]
        first, stride, _ = sizes["pool"]
        q.cells.base = at + first
        q.cells.count = geometry["cells"]
        q.cells.bits = geometry["cells"].bit_length() - 1
        q.cells.stride = stride
        q.reserve = geometry["reserve"]
        q.job_bytes = geometry["job_bytes"]
        q.result_bytes = geometry["result_bytes"]
        q.quota = geometry["quota"]
        q.is_durable = geometry["durability"] == "disk"
        q.hint = q.reserve
        q.lines = <PoolLines *> (at + 128)
        self.pool_fd = fds["pool"]
        self.poison(at, 128)
        for i in range(q.cells.count):
            count = sizeof(JobCell) + q.job_bytes + q.result_bytes
            self.poison(q.cells.base + i * stride + count, stride - count)
        # the rings
        for level in range(LEVELS):
            self.references(files[f"back-{level}"], &q.back[level])
            self.references(files[f"submit-{level}"], &q.submit[level])
        # the table
        contents = files["table"]
        at = <uint8_t *> &contents[0]
        first = sizes["table"][0]
        self.epoch_at = <uint64_t *> (at + 128)
        self.leader = self.epoch_at + 1
        q.records.first = <Participant *> (at + first)
        q.records.count = geometry["participants"]
        self.records = q.records
        self.fd = q.table_fd = fds["table"]
        self.lock_base = q.lock_base = contents.shape[0]
        # the mailboxes
        contents = files["mail"]
        at = <uint8_t *> &contents[0]
        first, stride, _ = sizes["mail"]
        q.mail_made = <uint32_t *> (at + 128)
        q.mail = at + first
        q.mail_stride = stride
        self.mail_fd = fds["mail"]
        self.poison(at, 128)
        for i in range(q.records.count):
            store_release_u32(&q.mail_made[i], 1)
            count = sizeof(RingLines) + 16 * q.cells.count
            self.poison(q.mail + i * stride + count, stride - count)
        # the arena
        contents = files["arena"]
        at = <uint8_t *> &contents[0]
        counts, words, data, end, _ = sizes["arena"]
        q.arena.base = at
        q.arena.fd = fds["arena"]
        q.arena.limit = geometry["arena_bytes"]
        q.arena.lines = <ArenaLines *> (at + 128)
        q.arena.classes = len(counts)
        for c in range(len(counts)):
            q.arena.counts[c] = counts[c]
            q.arena.words[c] = <uint64_t *> (at + <uint64_t> words[c])
            q.arena.data[c] = data[c]
            first = words[c] + 8 * counts[c]
            self.poison(at + first, (words[c + 1] if c + 1 < len(counts) else end) - first)
        self.poison(at, 128)

    cdef void references(self, const uint8_t[::1] contents, Refs *refs):
        cdef uint8_t *at = <uint8_t *> &contents[0]
        refs_init(refs, <RingLines *> (at + 128), <uint64_t *> (at + 128 + sizeof(RingLines)), self.queue.cells.bits)
        self.poison(at, 128)

    # ---- participants ----

    cdef bint sit_down(self, Queue *q, Holder *me) noexcept nogil:
        """As join_anew of _queue.pxi."""
        cdef uint64_t incarnation
        q[0] = self.queue
        if not self.join(me, 1, True):
            return False
        incarnation = status_incarnation(me.status)
        q.owner = me.slot + 1
        q.pid = <uint32_t> q.owner
        q.client = q.owner << 16 | (incarnation & 0xFFFF)
        q.block_owner = incarnation << 16 | q.owner
        return True

    cdef void stand_up(self, Queue *q, Holder *me, Mailbox *box) noexcept nogil:
        """As give_up of _queue.pxi; `box`: NULL where this is no client."""
        cdef uint64_t i, word
        cdef bint clean = True
        for i in range(q.cells.count):
            word = load_acquire_u64(cell_word(&q.cells, i))
            if word_owner(word) == q.owner and word_state(word) == TAKEN:
                clean = queue_put_back(q, i, word) == OK and clean
                word = load_acquire_u64(cell_word(&q.cells, i))
            if word_owner(word) == q.owner and word_is_one_of(word, 1 << FENCED | 1 << OVERDUE):
                job_discard(q, i, word)
        if box != NULL:
            # P2: as in give_up
            cas_seq_cst_u64(
                &me.record.status, me.status, status_pack(status_incarnation(me.status), SLOT_DYING)
            )
            me.status = status_pack(status_incarnation(me.status), SLOT_DYING)
            clean = queue_drain(q, box) == EMPTY and clean
        if clean:
            record_leave(me.record, me.status)
        else:
            death_comes(self.lock_base + <int64_t> me.slot)
        registration_end(&me.kept)

    cdef void mend(self, Queue *q) noexcept nogil:
        if queue_repair(q) < 0:
            self.fault()
        self.count(Q_REPAIRED)

    cdef void sleep(self, uint32_t *word, Check check, void *context) noexcept nogil:
        cdef int stage = 0
        cdef int64_t deadline = monotonic_ns() + PAUSE_MS * 1000000
        while wait_for(word, check, context, &self.never_closed, deadline, &stage) == SIGNAL:
            pass

    # ---- frames ----

    cdef void cut(self, Frame *frame, Piece *pieces, uint64_t *random) noexcept nogil:
        """As _Pieces of _queue.pxi: the data in several buffers, each in memory of its own."""
        cdef uint8_t *piece
        cdef const uint8_t *at = frame.data
        cdef uint64_t left = frame.data_length
        cdef uint64_t length
        cdef int i
        for i in range(PIECES):
            length = left if i == PIECES - 1 else next_random(random) % (left + 1)
            piece = <uint8_t *> malloc(length + (length == 0))
            memcpy(piece, at, length)
            pieces[i].data = piece
            pieces[i].length = length
            at += length
            left -= length
        pieces[PIECES - 1].length += PIECE_PAST_THE_END
        frame.data = NULL
        frame.pieces = pieces
        frame.pieces_count = PIECES
        self.count(Q_CUT)

    cdef void cut_ends(self, Frame *frame, Piece *pieces) noexcept nogil:
        cdef int i
        if frame.data == NULL:
            for i in range(PIECES):
                free(<void *> pieces[i].data)

    # ---- clients ----

    cdef Code submit(self, Queue *q, uint64_t job_id, uint64_t *random) noexcept nogil:
        cdef uint8_t data[LONGEST]
        cdef Piece pieces[PIECES]
        cdef Frame frame
        cdef JobOptions options
        cdef Code code
        cdef uint32_t closure_id = closure_of(job_id)
        cdef uint32_t token = <uint32_t> job_id
        cdef uint64_t how = next_random(random)
        frame.crc32 = 0
        frame.header_length = JOB_HEADER
        memcpy(frame.header, &closure_id, 4)
        memcpy(frame.header + 4, &token, 4)
        fill_bytes(frame.header + 8, job_id, JOB_HEADER - 8)
        memcpy(frame.block_header, frame.header, JOB_HEADER)
        # now and then as long as an area or longer than one
        frame.data_length = q.job_bytes - JOB_HEADER
        if how & 3 == 0:
            frame.data_length = next_random(random) % (q.job_bytes - JOB_HEADER)
        elif how & 7 == 1:
            frame.data_length = next_random(random) % LONGEST
        fill_bytes(data, job_id, frame.data_length)
        frame.data = data
        if frame.data_length + JOB_HEADER > q.job_bytes:
            self.count(Q_BLOCKS)
        options.priority = <uint8_t> (next_random(random) % LEVELS)
        options.max_attempts = 1 + (how >> 9 & 1)
        options.timeout_ms = 1 + SOON_NS // 1000000 if how & 0x60 == 0x20 else 0
        options.keep_s = LAST_S if lasts(job_id) else KEEP_S if how & 0x18000 == 0x8000 else 0
        options.backoff_ms = how >> 13 & 1
        options.doublings = 1
        options.due_ns = due_now(q) + how % SOON_NS if how & 0x1C00 == 0x400 else 0
        if how & 0x60000 == 0x20000:
            self.cut(&frame, pieces, random)
        code = queue_submit(q, &frame, job_id, &options)
        self.cut_ends(&frame, pieces)
        return code

    cdef void submit_one(self, Queue *q, Client *client, uint64_t *random) noexcept nogil:
        cdef Code code
        cdef uint64_t expired
        # before it is there: its result may come at once
        client.state[client.token] = 1
        client.held += 1
        code = self.submit(q, q.client << 32 | client.token, random)
        if code == OK:
            self.count(Q_SUBMITTED)
            client.token += 1
            return
        client.state[client.token] = 0
        client.held -= 1
        if code == FULL:
            expired = kept_free_expired(q)
            count_add(&self.counts[Q_EXPIRED], expired)
            if expired == 0:
                self.sleep(&q.lines.space, queue_has_space, q)
        elif code == NO_BLOCK or code == NO_DISK:
            self.count(Q_NO_BLOCK)
        else:
            self.mend(q)

    cdef void check_result(self, const uint8_t *text, uint64_t job_id, uint64_t length) noexcept nogil:
        cdef uint32_t token = 0
        memcpy(&token, text, 4)
        if token != <uint32_t> job_id or (
            text[4] == 0 and not bytes_agree(text + RESULT_HEAD, job_id + 1, length - RESULT_HEAD)
        ):
            self.fault()

    cdef void keep(self, Queue *q, uint64_t index, uint64_t mine, bint is_first, uint64_t *random) noexcept nogil:
        """As keep of _queue.pxi."""
        if not is_first:
            job_free_if(q, index, mine)
            return
        kept_settle(q, index, mine)
        self.count(Q_KEPT)
        if next_random(random) & 15 == 0:
            # stopped here, while others free the cell, and use it for another job
            pause(5 * SOON_NS)

    cdef bint collect(self, Queue *q, Client *client, uint64_t *random) noexcept nogil:
        """As collect of _queue.pxi. False: nothing is there."""
        cdef Ref ref
        cdef uint8_t text[LONGEST + RESULT_HEAD + 1]
        cdef JobCell *cell
        cdef uint64_t length, job_id, collected, token
        cdef bint is_first
        cdef bint is_kept = False
        cdef const uint8_t *data
        cdef Code code = queue_next_result(q, &client.inbox.box, &ref)
        if code == CORRUPT:
            self.mend(q)
        if code != OK:
            return False
        cell = job_cell(q, ref.cell)
        job_id = load_relaxed_u64(&cell.job_id)
        length = load_relaxed_u64(&cell.result_length)
        data = frame_at(
            q, result_area(q, ref.cell), q.result_bytes, length, load_relaxed_u64(&cell.result_block), ref.cell,
            word_version(ref.word),
        )
        if data == NULL or length < RESULT_HEAD or length > LONGEST + RESULT_HEAD:
            length = 0
        token = <uint32_t> job_id
        is_first = token < TOKENS and client.state[token] == 1
        if is_letter(ref.word):
            copy_unowned(text, data, length)
            if not letter_told(q, ref.cell, ref.word):
                return True
            refs_pass(&client.inbox.box.refs, &ref)
        else:
            is_kept = load_relaxed_u32(&cell.keep_s) != 0
            collected = word_pack(word_version(ref.word), KEPT if is_kept else COLLECTED, q.owner)
            # C9: as in _queue.pxi
            if not cas_seq_cst_u64(cell_word(&q.cells, ref.cell), ref.word, collected):
                return True
            memcpy(text, data, length)
            if not is_kept:
                job_free_if(q, ref.cell, collected)
            else:
                self.keep(q, ref.cell, collected, is_first, random)
            refs_pass(&client.inbox.box.refs, &ref)
            store_relaxed_u64(&q.hint, ref.cell)
        if length == 0 or token >= TOKENS or client.state[token] == 0:
            # damaged, or nobody's
            self.fault()
        elif not is_first:
            self.count(Q_DROPPED)
        else:
            client.state[token] = 2
            client.held -= 1
            self.check_result(text, job_id, length)
            self.count(Q_ANSWERED if text[4] == 0 else Q_TOLD)
            if is_kept and lasts(job_id):
                # nobody else forgets it, and it does not expire
                if not self.read_kept(q, job_id, ref.cell, random) or queue_forget(q, job_id) == 0:
                    self.fault()
        return True

    cdef void cancel_one(self, Queue *q, Client *client, uint64_t *random) noexcept nogil:
        cdef uint64_t token
        if client.token == 0:
            return
        token = client.token - 1 - next_random(random) % (client.token if client.token < FEW else FEW)
        if queue_cancel(q, q.client << 32 | token):
            if client.state[token] == 1:
                client.state[token] = 2
                client.held -= 1
                self.count(Q_CANCELLED)
        elif queue_cancel_running(q, q.client << 32 | token) == OK:
            # that is its result
            self.count(Q_ENDED)

    def serve(self, uint64_t seed):
        """A client: submits, collects, keeps, cancels; at the end every job that was accepted must have its result."""
        cdef Queue q
        cdef Holder me
        cdef Client client
        cdef int64_t last
        with nogil:
            memset(&client, 0, sizeof(client))
            client.state = <uint8_t *> calloc(TOKENS, 1)
            if not self.sit_down(&q, &me):
                self.fault()
            client.inbox.queue = &q
            queue_mailbox(&q, q.owner, &client.inbox.box)
            while self.goes_on() and client.token < TOKENS:
                if client.held < FEW:
                    self.submit_one(&q, &client, &seed)
                elif not self.collect(&q, &client, &seed):
                    self.sleep(&client.inbox.box.lines.items, inbox_has_results, &client.inbox)
                if next_random(&seed) & 63 == 0:
                    self.cancel_one(&q, &client, &seed)
            last = monotonic_ns() + LAST_MS * <int64_t> 1000000
            while client.held and monotonic_ns() < last:
                if not self.collect(&q, &client, &seed):
                    self.sleep(&client.inbox.box.lines.items, inbox_has_results, &client.inbox)
            if client.held:
                # a job was lost
                self.fault()
            self.stand_up(&q, &me, &client.inbox.box)
            free(client.state)
            count_add(&self.submitting, -1)

    # ---- readers of kept results ----

    cdef bint read_kept(self, Queue *q, uint64_t job_id, uint64_t index, uint64_t *random) noexcept nogil:
        """As one look of `result`, and read_kept, of _queue.pxi. False: it is not there to be read, or not any more."""
        cdef uint8_t text[LONGEST + RESULT_HEAD + 1]
        cdef JobCell *cell
        cdef uint64_t length
        cdef uint64_t word = 0
        cdef const uint8_t *data
        if queue_sight(q, job_id, &index, &word) != READABLE:
            return False
        cell = job_cell(q, index)
        length = load_relaxed_u64(&cell.result_length)
        data = kept_frame(q, index, word, length)
        if next_random(random) & 63 == 0:
            # stopped here, while others go on with the cell
            pause(SOON_NS)
        if data == NULL or length < RESULT_HEAD or length > LONGEST + RESULT_HEAD:
            data = NULL
        else:
            copy_unowned(text, data, length)
        # F1: as in _queue.pxi
        fence_seq_cst()
        if LOOKS_AGAIN and load_acquire_u64(cell_word(&q.cells, index)) != word:
            self.count(Q_MOVED)
            return False
        if q.is_durable and (word_state(word) == DONE or (word_state(word) == KEPT and word_owner(word))):
            cell_synced(q, index)
        if data == NULL:
            self.fault()
        else:
            self.check_result(text, job_id, length)
            self.count(Q_READ)
        return True

    def read_and_forget(self, uint64_t seed):
        """Read what any cell says to be kept; forget some of it, and now and then free it as if its time had passed."""
        cdef Queue q
        cdef Holder me
        cdef uint64_t i, job_id, how
        cdef int _n
        with nogil:
            if not self.sit_down(&q, &me):
                self.fault()
            while count_get(&self.submitting):
                for _n in range(4):
                    how = next_random(&seed)
                    i = (how >> 8) % q.cells.count
                    job_id = load_relaxed_u64(&job_cell(&q, i).job_id)
                    self.read_kept(&q, job_id, i if how & 1 else q.cells.count, &seed)
                    if how & 6 == 0 and not lasts(job_id):
                        count_add(&self.counts[Q_FORGOTTEN], queue_forget(&q, job_id))
                if next_random(&seed) & 31 == 0:
                    q.shift_ns = LATER_S * <int64_t> 1000000000
                    count_add(&self.counts[Q_EXPIRED], kept_free_expired(&q))
                    q.shift_ns = 0
                pause(50000)
            self.stand_up(&q, &me, NULL)

    # ---- workers ----

    cdef void check_job(self, Queue *q, Ref *ref, uint64_t job_id) noexcept nogil:
        """Every byte of the job in hand, where it lies."""
        cdef JobCell *cell = job_cell(q, ref.cell)
        cdef uint64_t length = load_relaxed_u64(&cell.job_length)
        cdef uint32_t closure_id = 0
        cdef uint32_t token = 0
        cdef const uint8_t *at = frame_at(
            q, job_area(q, ref.cell), q.job_bytes, length, load_relaxed_u64(&cell.job_block), ref.cell, word_version(ref.word)
        )
        if at == NULL or length < JOB_HEADER:
            self.fault()
            return
        memcpy(&closure_id, at, 4)
        memcpy(&token, at + 4, 4)
        if (
            closure_id != closure_of(job_id) or token != <uint32_t> job_id or not bytes_agree(at + 8, job_id, JOB_HEADER - 8)
            or not bytes_agree(at + JOB_HEADER, job_id, length - JOB_HEADER)
        ):
            self.fault()

    cdef bint still_held(self, Queue *q, Ref *ref) noexcept nogil:
        """As check_held of _queue.pxi."""
        if load_acquire_u64(cell_word(&q.cells, ref.cell)) == ref.word:
            return True
        claim_lost(q, ref.cell, ref.word)
        self.count(Q_REFUSED)
        return False

    cdef void let_go(self, Queue *q, Ref *ref, Code code) noexcept nogil:
        """After a claim was put aside with `code`."""
        if code == LOST:
            claim_lost(q, ref.cell, ref.word)

    cdef void answer(self, Queue *q, Ref *ref, uint64_t job_id, uint8_t status, uint64_t *random) noexcept nogil:
        """As reply and reply_in_pieces of _queue.pxi."""
        cdef uint8_t data[LONGEST]
        cdef Piece pieces[PIECES]
        cdef Frame frame
        cdef Mailbox box
        cdef Code code
        cdef uint32_t token = <uint32_t> job_id
        frame.crc32 = 0
        frame.header_length = RESULT_HEAD
        memset(frame.header, 0, sizeof(frame.header))
        memcpy(frame.header, &token, 4)
        frame.header[4] = status
        memcpy(frame.block_header, frame.header, RESULT_HEAD)
        frame.data_length = q.result_bytes - RESULT_HEAD
        if next_random(random) & 7 == 0:
            frame.data_length = next_random(random) % LONGEST
        fill_bytes(data, job_id + 1, frame.data_length)
        frame.data = data
        if not self.still_held(q, ref):
            return
        if not queue_mailbox(q, job_id >> 48, &box):
            self.fault()
            return
        if next_random(random) & 3 == 0:
            self.cut(&frame, pieces, random)
        code = queue_finish(q, &box, job_id, ref.cell, ref.word, &frame)
        self.cut_ends(&frame, pieces)
        if code == NO_BLOCK or code == NO_DISK:
            self.count(Q_NO_BLOCK)
            frame.data = data
            frame.data_length = 8
            code = queue_finish(q, &box, job_id, ref.cell, ref.word, &frame)
        if code == LOST:
            claim_lost(q, ref.cell, ref.word)
            self.count(Q_REFUSED)
        elif code == OK:
            self.count(Q_FINISHED)
        else:
            self.mend(q)

    cdef void answer_strangers(self, Queue *q, Look *look, uint64_t *random) noexcept nogil:
        """As answer_strangers of _queue.pxi."""
        cdef ParkedJob job
        cdef Ref ref
        cdef uint64_t job_id
        while look.strangers.count:
            look.strangers.count -= 1
            job = look.strangers.jobs[look.strangers.count]
            ref.cell = job.cell
            ref.word = word_pack(word_version(job.word), TAKEN, q.owner)
            # C7: as in _queue.pxi
            if not cas_seq_cst_u64(cell_word(&q.cells, job.cell), job.word, ref.word):
                continue
            job_id = load_relaxed_u64(&job_cell(q, ref.cell).job_id)
            self.check_job(q, &ref, job_id)
            if closure_of(job_id) != NOBODY_RUNS:
                self.fault()
            self.answer(q, &ref, job_id, 1, random)
            self.count(Q_STRANGERS)

    cdef void begin_looking(self, Look *look, int kind) noexcept nogil:
        """`kind`: 0 runs everything, 1 and 2 what `runs` says."""
        memset(look, 0, sizeof(look[0]))
        look.knows_all = kind == 0
        look.unknown_after_ns = UNKNOWN_NS
        look.live.first = self.live
        look.live.count = 3
        if kind:
            look.known.first = self.runs[kind - 1]
            look.known.count = 2

    cdef Code claim(self, Queue *q, Look *look, Ref *ref, uint64_t *random) noexcept nogil:
        """As claim and take_any of _queue.pxi. EMPTY: nothing is there; LOST: what was there was put aside."""
        cdef JobCell *cell
        cdef uint64_t job_id
        cdef Code code
        if next_random(random) & 1:
            # as _set_known: look at once
            private_set(&q.unknown_look_ns, 0)
        code = queue_take_any(q, look, ref)
        while code == EMPTY and look.strangers.count:
            self.answer_strangers(q, look, random)
            code = queue_take(q, ref)
        if code == CORRUPT:
            self.mend(q)
        if code != OK:
            return EMPTY
        cell = job_cell(q, ref.cell)
        job_id = load_relaxed_u64(&cell.job_id)
        self.check_job(q, ref, job_id)
        if not look.knows_all and not ids_have(&look.known, closure_of(job_id)):
            self.let_go(q, ref, queue_park(q, ref.cell, ref.word, 0, False))
            self.count(Q_UNKNOWN)
            return LOST
        if job_has_to_rest(cell):
            self.let_go(q, ref, queue_rest(q, ref.cell, ref.word, next_random(random)))
            self.count(Q_RESTED)
            return LOST
        return OK

    cdef bint work_once(self, Queue *q, Look *look, uint64_t *random) noexcept nogil:
        cdef Ref ref
        cdef JobCell *cell
        cdef uint64_t job_id
        cdef Code code = self.claim(q, look, &ref, random)
        if code != OK:
            return code == LOST
        cell = job_cell(q, ref.cell)
        job_id = load_relaxed_u64(&cell.job_id)
        if next_random(random) & 15 == 0:
            code = queue_put_back(q, ref.cell, ref.word)
            if code == LOST:
                claim_lost(q, ref.cell, ref.word)
            elif code != OK:
                self.mend(q)
            self.count(Q_RELEASED)
            return True
        if next_random(random) & 15 == 1:
            # now and then as one that does not know it
            self.let_go(q, &ref, queue_park(
                q, ref.cell, ref.word, due_now(q) + next_random(random) % SOON_NS if next_random(random) & 3 else 0, False
            ))
            self.count(Q_PARKED)
            return True
        if not self.still_held(q, &ref):
            return True
        job_start(q, cell, ref.word)
        if next_random(random) & 7 == 0 and load_relaxed_u16(&cell.attempts) < load_relaxed_u16(&cell.max_attempts):
            self.let_go(q, &ref, queue_retry(q, ref.cell, ref.word, next_random(random)))
            self.count(Q_RETRIED)
            return True
        if next_random(random) & 31 == 0:
            # long enough to be fenced; where it has a timeout, to be overdue
            pause(5 * SOON_NS if cell.timeout_ms else 200000)
        self.check_job(q, &ref, job_id)
        self.answer(q, &ref, job_id, 0, random)
        return True

    def work(self, uint64_t seed, int kind=0, bint watches=False):
        """A worker, until all clients have ended; one that `watches` has the timer look as every process's does."""
        cdef Queue q
        cdef Holder me
        cdef Look look
        cdef Watch watch
        with nogil:
            memset(&watch, 0, sizeof(watch))
            self.begin_looking(&look, kind)
            if not self.sit_down(&q, &me):
                self.fault()
            if watches:
                watch.queue = &q
                watch.unlinked = &me.kept.unlinked
                watch.pool_fd = self.pool_fd
                watch.mail_fd = self.mail_fd
                watch.epoch = self.epoch_at
                watch.leader = self.leader
                registration_look(&me.kept, queue_watch, &watch)
            while count_get(&self.submitting):
                if not self.work_once(&q, &look, &seed):
                    self.sleep(&q.lines.items, queue_has_jobs, &q)
            if watches:
                registration_look(&me.kept, NULL, NULL)
            self.stand_up(&q, &me, NULL)

    # ---- mortals ----

    cdef void live_briefly(self, Queue *q, uint64_t *random) noexcept nogil:
        """Stop half-way through a call."""
        cdef Ref ref
        cdef Look look
        cdef Mailbox box
        cdef uint64_t index, word, ref_of_block
        cdef uint64_t how = next_random(random) % 8
        cdef int _n
        self.begin_looking(&look, 0)
        for _n in range(next_random(random) & 3):
            self.work_once(q, &look, random)
        if how == 0:
            # submit, before READY, its block not linked yet
            cells_acquire(&q.cells, q.reserve, &q.hint, q.owner, &index, &word)
            block_allocate(&q.arena, &q.cells, 5000, q.block_owner, &ref_of_block)
        elif how == 1:
            # a client with jobs that wait
            for _n in range(3):
                self.submit(q, q.client << 32 | <uint64_t> _n, random)
        elif how == 2:
            # collect, before the cell is freed or the result's time is there
            self.submit(q, q.client << 32 | 1, random)
            queue_mailbox(q, q.owner, &box)
            for _n in range(20):
                if queue_next_result(q, &box, &ref) == OK:
                    if word_state(ref.word) == DONE:
                        word = word_pack(
                            word_version(ref.word), KEPT if load_relaxed_u32(&job_cell(q, ref.cell).keep_s) else COLLECTED, q.owner
                        )
                        cas_seq_cst_u64(cell_word(&q.cells, ref.cell), ref.word, word)
                    break
                self.work_once(q, &look, random)
        elif self.claim(q, &look, &ref, random) == OK:
            # 3: claim, after the CAS
            if how > 3:
                job_start(q, job_cell(q, ref.cell), ref.word)
            if how == 5:
                # release, after the CAS
                block_relink(&q.arena, job_cell(q, ref.cell).job_block, ref.cell, word_version(ref.word))
                cas_seq_cst_u64(
                    cell_word(&q.cells, ref.cell), ref.word, word_pack(word_version(ref.word) + 1, RETRY, q.owner)
                )
            elif how == 6:
                # reply, after DONE
                self.write_short_result(q, &ref)
                cas_seq_cst_u64(
                    cell_word(&q.cells, ref.cell), ref.word, word_pack(word_version(ref.word), DONE, q.owner)
                )

    cdef void write_short_result(self, Queue *q, Ref *ref) noexcept nogil:
        cdef JobCell *cell = job_cell(q, ref.cell)
        cdef uint8_t *at = result_area(q, ref.cell)
        memset(at, 0, RESULT_HEAD)
        memcpy(at, &cell.job_id, 4)
        result_write(cell, 0, RESULT_HEAD, 0)

    def die_again_and_again(self, uint64_t seed):
        cdef Queue q
        cdef Holder me
        with nogil:
            while self.goes_on():
                if self.sit_down(&q, &me):
                    self.live_briefly(&q, &seed)
                    self.die(&me)
                    self.count(Q_DIED)
                pause(200000)

    # ---- menders ----

    cdef void rescue(self, Queue *q, int32_t code) noexcept nogil:
        cdef uint64_t slot, status
        for slot in range(q.records.count):
            if slot + 1 != q.owner and is_dead(&q.records, q.table_fd, q.lock_base, slot, &status):
                if queue_rescue(q, slot, status, code) == 1:
                    self.count(Q_RESCUED)

    cdef void rescue_in_its_name(self, Queue *q) noexcept nogil:
        """As make_room of _queue.pxi: of one who is dead, whose byte is locked meanwhile."""
        cdef Queue other = q[0]
        cdef registration kept
        cdef uint64_t slot, status
        for slot in range(q.records.count):
            if slot + 1 == q.owner or not is_dead(&q.records, q.table_fd, q.lock_base, slot, &status):
                continue
            if registration_lock(&kept, q.table_fd, q.lock_base + <int64_t> slot) != 0:
                continue
            if death_of_mine(&q.records, slot, &status):
                other.owner = slot + 1
                other.block_owner = status_incarnation(status) << 16 | (slot + 1)
                if queue_rescue(&other, slot, status, UNKNOWN_CAUSE) == 1:
                    self.count(Q_RESCUED)
            death_comes(self.lock_base + <int64_t> slot)
            registration_end(&kept)
            return

    def look_after(self, uint64_t seed):
        """Rescue the dead; now and then call for a repair that nothing is the reason of."""
        cdef Queue q
        cdef Holder me
        cdef uint64_t how
        with nogil:
            if not self.sit_down(&q, &me):
                self.fault()
            while count_get(&self.submitting):
                how = next_random(&seed)
                if how & 6 == 0:
                    self.rescue_in_its_name(&q)
                else:
                    self.rescue(&q, UNKNOWN_CAUSE if how & 1 else -9)
                if how & 0xFF0 == 0x10:
                    refs_call_for_repair(&q.submit[how % LEVELS] if how & 8 else &q.back[how % LEVELS])
                    self.mend(&q)
                pause(100000)
            self.stand_up(&q, &me, NULL)

    cdef uint64_t busy_one(self, Queue *q, uint64_t first) noexcept nogil:
        """Somebody who has a job in hand; 0: nobody has."""
        cdef uint64_t i, word
        for i in range(q.cells.count):
            word = load_acquire_u64(cell_word(&q.cells, (first + i) % q.cells.count))
            if word_state(word) == TAKEN:
                return word_owner(word)
        return 0

    def fence(self, uint64_t seed):
        """Take those who work for lapsed, and end what is out of time, as a leader does; clear letters away."""
        cdef Queue q
        cdef Holder me
        cdef uint64_t i, word, job_id, number
        with nogil:
            if not self.sit_down(&q, &me):
                self.fault()
            while count_get(&self.submitting):
                number = self.busy_one(&q, next_random(&seed))
                if number != 0 and number != q.owner:
                    count_add(&self.counts[Q_FENCED], queue_lapse(&q, number))
                queue_end_overdue(&q, monotonic_ns())
                for i in range(q.cells.count):
                    word = load_acquire_u64(cell_word(&q.cells, i))
                    if word_state(word) != DEAD:
                        continue
                    self.count(Q_LETTERS)
                    job_id = load_relaxed_u64(&job_cell(&q, i).job_id)
                    if next_random(&seed) & 1:
                        queue_drop_letter(&q, job_id)
                    elif queue_retry_letter(&q, job_id) == CORRUPT:
                        self.mend(&q)
                pause(300000)
            self.stand_up(&q, &me, NULL)

    def finish(self, uint64_t seed):
        """After all threads: rescue, mend, run what is left, free what is kept; then all cells, records and blocks must be free."""
        cdef Queue q
        cdef Holder me
        cdef Look look
        cdef uint64_t i, word
        cdef uint32_t c
        with nogil:
            if not self.sit_down(&q, &me):
                self.fault()
            self.begin_looking(&look, 0)
            for i in range(2):
                q.shift_ns = LATER_S * <int64_t> 1000000000
                self.rescue(&q, -9)
                self.mend(&q)
                while self.work_once(&q, &look, &seed):
                    pass
                for i in range(q.cells.count):
                    word = load_acquire_u64(cell_word(&q.cells, i))
                    if word_state(word) == DEAD:
                        queue_drop_letter(&q, job_cell(&q, i).job_id)
                # later than what has been kept just now
                q.shift_ns = 2 * LAST_S * <int64_t> 1000000000
                kept_free_expired(&q)
            self.stand_up(&q, &me, NULL)
            for i in range(q.cells.count):
                if word_state(load_acquire_u64(cell_word(&q.cells, i))) != FREE:
                    self.fault()
            for i in range(q.records.count):
                if status_state(load_acquire_u64(&q.records.first[i].status)) != SLOT_FREE:
                    self.fault()
            for c in range(q.arena.classes):
                for i in range(q.arena.counts[c]):
                    word = load_acquire_u64(&q.arena.words[c][i])
                    if word & 0xF == OWNED or (word & 0xF == LINKED and not block_is_orphan(&q.cells, word)):
                        self.fault()
        return {name: self.counts[i] for i, name in enumerate(QUEUE_NAMES)}
