# QueueHandle: the queue directory's core (algorithms: _queue.pxd, _blocks.pxd). jobqueue.py makes the files and the JobQueue.

cdef uint64_t JOB_CELL_BYTES = layout.JOB_CELL.itemsize
cdef extern from "unistd.h" nogil:
    int usleep(unsigned int us)
cdef extern from "fcntl.h" nogil:
    int posix_fallocate(int fd, int64_t offset, int64_t length)

cdef enum:
    ROOM_TRIES = 64         # at a place in the table that others make room in
    LONG_FRAME = 65536      # bytes that are not copied under the GIL
    CANCEL_MS = 1000        # for a job that runs to be ended
    LIVE_SHARE = 10         # in each tenth of `unknown_after` it is found out once what others know
    ANSWERING_MS = 10       # for so long at most jobs that nobody knows are answered before a claim goes on
    ANSWERING_SHARE = 10    # so many times as long as that took none is, unless nothing else is there to be done
    PROOFS = 3              # so many looks in a row that find nothing of a job are proof that there is none
    MAPPINGS = 4            # are kept for later jobs
    LONGEST_MAPPING = 134217728     # bytes
    IDLE_QUOTA_MS = 2000    # at its quota, with every job finished and nobody collecting: then Full is said

cdef str QUOTA_TEXT = (
    "this client holds its quota of {quota} cells (jobs waiting or running, results not collected); collect results with "
    "recv(), or create the queue with a larger quota"
)

# between two looks for a result: at first, and at most unless a look takes long
cdef int64_t SHORTEST_PAUSE_NS = 200_000
cdef int64_t LONGEST_PAUSE_NS = 20_000_000
# a look that took longer proves nothing: in that time a job may move on more than twice
cdef int64_t PROOF_NS = 1_000_000_000
cdef double LONGEST_BACKOFF_S = 3600.0
cdef double LATEST_S = 9e9      # as a time in seconds since 1970; ns of it fit 64 bits


cdef uint64_t due_ns_of(object due) except 0:
    """A wall-clock time, as `time.time()` gives it or as an aware datetime, in ns since 1970."""
    cdef double seconds
    if isinstance(due, datetime):
        if due.utcoffset() is None:
            raise ValueError(
                f"due: expected an aware datetime, found {due!r} without a time zone; give it one, as datetime.now(timezone.utc) "
                "has, or say that it is local time: due.astimezone()"
            )
        due = due.timestamp()
    elif isinstance(due, bool) or not isinstance(due, (int, float)):
        raise TypeError(
            f"due: expected seconds since 1970, as time.time() gives them, or an aware datetime, found {type(due).__name__}"
        )
    if not -LATEST_S <= due <= LATEST_S:
        raise ValueError(f"due: expected seconds from {-LATEST_S:g} to {LATEST_S:g}, found {due}")
    seconds = due
    return <uint64_t> (seconds * 1e9) if seconds > 1e-9 else 1


cdef uint32_t milliseconds_of(str name, object seconds) except 0:
    if not seconds > 0:
        raise ValueError(f"{name}: expected None or seconds > 0, found {seconds}")
    # nobody waits longer than that
    return max(1, <uint32_t> min(<double> seconds * 1e3, 0xFFFFFFFF))


cdef uint32_t whole_seconds_of(str name, object seconds) except 0:
    if not seconds > 0:
        raise ValueError(f"{name}: expected None or seconds > 0, found {seconds}")
    return <uint32_t> ceil(min(<double> seconds, 0xFFFFFFFF))


cdef int put_backoff(JobOptions *options, object backoff) except -1:
    cdef double factor
    if isinstance(backoff, tuple) and len(backoff) != 2:
        raise ValueError(f"backoff: expected seconds, or those of the first and of the longest one, found {backoff}")
    first, longest = backoff if isinstance(backoff, tuple) else (backoff, max(backoff, LONGEST_BACKOFF_S))
    options.backoff_ms = milliseconds_of("backoff", first)
    if not longest >= first:
        raise ValueError(f"backoff: expected the longest one not to be shorter than the first, found {backoff}")
    factor = longest / first
    options.doublings = 0
    while factor >= 2 and options.doublings < MOST_DOUBLINGS:
        factor /= 2
        options.doublings += 1
    return 0


cdef int put_options(
    JobOptions *options, object priority, object timeout, object max_attempts, object backoff, object result_ttl
) except -1:
    """What `JobQueue.submit` takes, checked; it may start at once."""
    check_number("priority", priority, 0, LEVELS - 1)
    check_number("max_attempts", max_attempts, 1, 65_535)
    options.priority = priority
    options.max_attempts = max_attempts
    options.timeout_ms = options.keep_s = options.backoff_ms = options.doublings = 0
    options.due_ns = 0
    if timeout is not None:
        options.timeout_ms = milliseconds_of("timeout", timeout)
    if backoff is not None:
        put_backoff(options, backoff)
    if result_ttl is not None:
        options.keep_s = whole_seconds_of("result_ttl", result_ttl)
    return 0


@cython.final
cdef class SubmitOptions:
    """Options of `JobQueue.submit`, checked once for many jobs."""

    cdef JobOptions options

    def __init__(self, priority=1, timeout=None, max_attempts=3, backoff=None, result_ttl=None):
        put_options(&self.options, priority, timeout, max_attempts, backoff, result_ttl)


cdef struct PrivateMap:
    # of a part of the arena, read-only and this process's own
    void *at
    uint64_t offset
    uint64_t length


@cython.final
cdef class _Pieces:
    """Buffers that make up the data of one frame together."""

    cdef Piece *pieces
    cdef Py_buffer *views
    cdef uint64_t count
    cdef uint64_t length

    def __cinit__(self, buffers):
        cdef tuple held = tuple(buffers)
        cdef Py_ssize_t n = len(held)
        self.views = <Py_buffer *> malloc((n + 1) * sizeof(Py_buffer))
        self.pieces = <Piece *> malloc((n + 1) * sizeof(Piece))
        if self.views == NULL or self.pieces == NULL:
            raise MemoryError
        for buffer in held:
            PyObject_GetBuffer(buffer, &self.views[self.count], PyBUF_SIMPLE)
            self.pieces[self.count].data = <const uint8_t *> self.views[self.count].buf
            self.pieces[self.count].length = self.views[self.count].len
            self.length += self.views[self.count].len
            self.count += 1

    cdef void put(self, Frame *frame) noexcept:
        frame.data = NULL
        frame.pieces = self.pieces
        frame.pieces_count = self.count
        frame.data_length = self.length

    def __dealloc__(self):
        cdef uint64_t n
        for n in range(self.count):
            PyBuffer_Release(&self.views[n])
        free(self.views)
        free(self.pieces)


@cython.final
cdef class _IdArray:
    """Closure ids in order, for the core."""

    cdef Ids ids
    cdef uint32_t *array

    def __cinit__(self, closure_ids):
        cdef list found = sorted(set(closure_ids))
        self.array = <uint32_t *> malloc((len(found) + 1) * sizeof(uint32_t))
        if self.array == NULL:
            raise MemoryError
        for n, closure_id in enumerate(found):
            self.array[<int> n] = as_u32(closure_id, "closure_id")
        self.ids.first = self.array
        self.ids.count = len(found)

    def __dealloc__(self):
        free(self.array)


cdef inline void copy_frame(
    char *data, uint8_t *head, const uint8_t *frame, uint64_t length, uint64_t head_length, bint owned
) noexcept:
    """A result frame's head and data; nothing where it is damaged (NULL)."""
    if frame != NULL and not owned:
        copy_unowned(head, frame, head_length)
        copy_unowned(data, frame + head_length, length - head_length)
    elif frame != NULL:
        memcpy(head, frame, head_length)
        memcpy(data, frame + head_length, length - head_length)


cdef class WorkState:
    """What a worker's loop tells of itself: base of `WorkerLoop`."""

    cdef public object claim
    cdef public bint _stopping
    cdef public int64_t completed, failed, malformed, released, retried, lost

    def _end(self, claim, token, result, error=None):
        """Answer a job that was run, where that is not a matter of course: `error` is what the first try has raised."""
        raise NotImplementedError


@cython.no_gc_clear
cdef class QueueHandle(Mapped):
    """What JobQueue is made of: every file of a queue directory, mapped. Not made directly."""

    cdef Queue queue
    cdef Inbox inbox
    cdef Watch watch
    cdef readonly object heartbeat
    cdef object role
    cdef object directory
    cdef list parts             # numpy.memmap of each of the other files
    cdef Number number
    cdef bint has_mailbox
    cdef int mail_fd
    cdef uint64_t mail_offset
    cdef int64_t generation
    cdef uint32_t own_slot
    cdef uint32_t sequence
    cdef int64_t collecting     # threads inside recv
    cdef uint64_t cells_offset
    cdef set pending            # sequences of jobs whose results have not come
    cdef int64_t refused_results    # results of claims that had been taken away
    cdef int64_t is_condemned       # 1: a job of this handle ran out of time, so its process is to be ended
    cdef int64_t run_again      # results received whose jobs had been started before, by workers that died
    cdef Look look
    cdef int64_t is_looking     # 1: a thread of this handle is in `look`
    cdef _IdArray known          # the closure ids that this handle runs; None: all
    cdef _IdArray live           # those that any live participant runs, a while ago
    cdef int64_t live_ns        # when that is to be found out again
    cdef uint64_t declared_as   # who is known to the others to run them: `block_owner`
    cdef int64_t answers_ns     # none of those that nobody knows is answered before it (monotonic), unless nothing else is to do
    cdef int64_t answered_unknown   # jobs that this handle has answered since nobody knew them
    cdef int64_t dropped        # results that were dropped because one had come before
    cdef PrivateMap mappings[MAPPINGS]     # of blocks that jobs were read in
    cdef int next_mapping

    def __cinit__(self):
        self.parts = []
        self.mail_fd = self.queue.arena.fd = -1
        self.pending = set()
        self.look.knows_all = True
        self.look.unknown_after_ns = <int64_t> (layout.UNKNOWN_AFTER_S * 1e9)
        self.wakes_at = &self.queue.wakes_at

    def __init__(self):
        raise TypeError("use JobQueue.create(path), JobQueue.open(path) or JobQueue.open_or_create(path)")

    # ---- files ----

    @staticmethod
    def _pool_sizes(cells, job_bytes, result_bytes):
        """Offset of the cells, stride of a cell, and size of the pool file (bytes)."""
        offset = LINES + layout.POOL_LINES.itemsize
        stride = layout.align(JOB_CELL_BYTES + job_bytes + result_bytes, layout.LINE)
        return offset, stride, offset + cells * stride

    @staticmethod
    def _references_size(cells):
        """Size of a file with a ring of references (bytes)."""
        return LINES + layout.RING_LINES.itemsize + 2 * cells * 8

    @staticmethod
    def _arena_sizes(limit):
        """Per size class the number of blocks, the offset of their words and that of their data; the words' end and the file's."""
        return arena_sizes(limit, LINES)

    @staticmethod
    def _mail_sizes(cells, participants):
        """Offset of the first mailbox, bytes from one to the next, and size of the mail file (bytes)."""
        first = layout.align(LINES + 4 * participants, layout.MIN_BLOCK_BYTES)
        stride = layout.align(layout.RING_LINES.itemsize + 2 * cells * 8, layout.MIN_BLOCK_BYTES)
        return first, stride, first + participants * stride

    cdef uint8_t *map_part(self, str name, object kind, uint64_t size, int *fd) except NULL:
        """Map another file of the directory and keep it; its descriptor goes to `fd`, or is closed where that is NULL."""
        cdef const uint8_t[::1] bytes
        path = os.path.join(self.directory, os.fsencode(name))
        part, header, opened = files.open_mapped(path, kind, self.is_readonly)
        self.parts.append(part)
        if fd != NULL:
            fd[0] = opened
        else:
            os.close(opened)
        files.check_size(path, size, part.shape[0])
        files.check_belongs(path, int(self.file_header["created_ns"]), header)
        bytes = part
        return <uint8_t *> &bytes[0]

    cdef int map_references(self, str name, Refs *refs) except -1:
        cdef uint8_t *base = self.map_part(name, Kind.REFERENCES, QueueHandle._references_size(self.queue.cells.count), NULL)
        refs_init(refs, <RingLines *> (base + LINES), <uint64_t *> (base + LINES + sizeof(RingLines)), self.queue.cells.bits)
        return 0

    cdef int map_mail(self) except -1:
        cdef uint8_t *base
        first, stride, size = QueueHandle._mail_sizes(self.queue.cells.count, self.queue.records.count)
        base = self.map_part("mail", Kind.MAIL, size, &self.mail_fd)
        self.queue.mail_made = <uint32_t *> (base + LINES)
        self.queue.mail = base + <uint64_t> first
        self.queue.mail_stride = stride
        self.mail_offset = first
        return 0

    cdef int map_arena(self, uint64_t limit) except -1:
        cdef Arena *arena = &self.queue.arena
        *_, size = arena_sizes(limit, LINES)
        return arena_attach(arena, self.map_part("arena", Kind.ARENA, size, &arena.fd), limit, LINES)

    @classmethod
    def _attach(cls, directory, readonly, role):
        """Map every file of a queue directory that is whole."""
        cdef QueueHandle handle = cls.__new__(cls)
        directory = os.fsencode(directory)
        handle.map_file(os.path.join(directory, b"pool"), Kind.POOL, readonly)
        handle.directory = directory
        handle.file_path = os.fsdecode(directory)
        handle.role = Role(role)
        try:
            handle.attach()
        except BaseException:
            handle.close()
            raise
        return handle

    cdef int attach(self) except -1:
        cdef HeartbeatTable table
        cdef uint32_t level
        geometry = QueueHandle._geometry(self.file_path, self.map, self.file_header)
        cells = int(self.file_header["capacity"])
        self.queue.cells.bits = cells.bit_length() - 1
        offset, stride, size = QueueHandle._pool_sizes(cells, int(geometry["job_bytes"]), int(geometry["result_bytes"]))
        files.check_size(self.file_path, size, self.bytes.shape[0])
        self.cells_offset = offset
        self.queue.cells.base = self.base + self.cells_offset
        self.queue.cells.count = cells
        self.queue.cells.stride = stride
        self.queue.reserve = geometry["reserve"]
        self.queue.job_bytes = geometry["job_bytes"]
        self.queue.result_bytes = geometry["result_bytes"]
        self.queue.quota = geometry["quota"]
        self.queue.hint = self.queue.reserve
        self.queue.lines = <PoolLines *> (self.base + LINES)
        self.queue.is_durable = int(self.file_header["flags"]) & layout.FLAG_DISK
        for level in range(<uint32_t> LEVELS):
            self.map_references(f"back-{level}", &self.queue.back[level])
            self.map_references(f"submit-{level}", &self.queue.submit[level])
        self.map_arena(geometry["arena_bytes"])
        table = HeartbeatTable.open(os.path.join(self.directory, b"table"), self.is_readonly)
        self.heartbeat = table
        table.is_queues = True
        if table.file_header["extra"] != self.file_header["created_ns"] or table.records.count != geometry["participants"]:
            raise errors.LayoutMismatch(
                f"{table.file_path}: expected {geometry['participants']} participants of the queue made at "
                f"{self.file_header['created_ns']} ns, found {table.records.count} of one made at {table.file_header['extra']} ns; "
                "put the right file back, or make a new queue"
            )
        self.queue.records = table.records
        self.queue.table_fd = table.fd
        self.queue.lock_base = table.bytes.shape[0]
        self.map_mail()
        return 0

    @staticmethod
    def _geometry(path, contents, header):
        """The second line of a pool, checked.

        Raises
        ------
        LayoutMismatch
            The pool is cut, or the line is damaged, or it holds a number outside its limits.
        """
        cells = int(header["capacity"])
        if contents.shape[0] < 2 * layout.LINE:
            files.check_size(path, 2 * layout.LINE, contents.shape[0])
        raw = contents[layout.LINE:2 * layout.LINE].tobytes()
        geometry = np.frombuffer(raw, layout.QUEUE_GEOMETRY)[0]
        found = zlib.crc32(raw[:layout.LINE - 4])
        if int(geometry["crc32"]) != found:
            raise errors.LayoutMismatch(
                f"{os.fsdecode(path)}: expected geometry CRC-32 {found:#010x}, found {geometry['crc32']:#010x}; the pool is damaged"
            )
        fault = layout.geometry_fault(cells, {name: int(geometry[name]) for name in layout.GEOMETRY_NAMES})
        if fault is None and int(geometry["reserve"]) != layout.reserve_of(cells):
            fault = f"reserve: expected {layout.reserve_of(cells)}, found {geometry['reserve']}"
        if fault is not None:
            raise errors.LayoutMismatch(f"{os.fsdecode(path)}: {fault}; the pool is damaged")
        return geometry

    # ---- taking part ----

    @cython.final
    cdef inline int join(self) except -1:
        """Have a number of this process's own; nearly always it is there already."""
        if self.queue.owner != 0 and self.generation == fork_generation():
            return 0
        return self.join_anew()

    @cython.final
    cdef int join_anew(self) except -1:
        cdef HeartbeatTable table = self.heartbeat
        cdef Number number
        cdef uint32_t pid = os.getpid()
        self.refuse_readonly()
        self.check_lock()
        slot = self.take_slot()
        number = table.numbers[slot]
        if not synced(&self.queue, number.record, sizeof(Participant)):
            # its jobs would have the ids of another one's, should the disk go back to an earlier incarnation
            table.unregister(slot)
            self.check_synced()
        with cython.critical_section(self):
            if self.queue.owner != 0 and self.generation == fork_generation():
                # another thread was faster
                table.unregister(slot)
            else:
                self.number = number
                self.own_slot = table.queue_slot = slot
                self.queue.pid = pid
                self.queue.client = <uint64_t> (slot + 1) << 16 | (status_incarnation(number.status) & 0xFFFF)
                self.queue.block_owner = status_incarnation(number.status) << 16 | <uint64_t> (slot + 1)
                self.sequence = 0
                self.pending = set()
                self.queue.held = 0
                self.collecting = 0
                private_set(&self.is_condemned, 0)
                self.has_mailbox = False
                self.generation = fork_generation()
                self.queue.owner = slot + 1
                self.watch.queue = &self.queue
                self.watch.unlinked = &number.kept.unlinked
                self.watch.pool_fd = self.fd
                self.watch.mail_fd = self.mail_fd
                self.watch.epoch = table.epoch
                self.watch.leader = table.epoch + 1
                self.watch.looked_ns = self.watch.suspected_ns = self.watch.parked_ns = 0
                private_set(&self.is_looking, 0)
                registration_look(&number.kept, queue_watch, &self.watch)
        return 0

    @cython.final
    cdef object take_slot(self):
        """A slot of the table; where all are taken, one that a dead participant had."""
        cdef HeartbeatTable table = self.heartbeat
        cdef int tries = 0
        while True:
            try:
                return table.register(os.getpid(), self.role, auto_beat=True)
            except errors.TableFull:
                tries += 1
                if tries > ROOM_TRIES or not self.make_room():
                    raise

    @cython.final
    cdef bint make_room(self) except -1:
        """Rescue in the name of a dead participant, whose byte this process locks meanwhile. False: there is none dead."""
        cdef Queue queue = self.queue
        cdef Number number
        cdef uint64_t slot, status
        cdef int64_t rescued
        cdef bint others_do = False
        for slot in range(queue.records.count):
            if not is_dead(&queue.records, queue.table_fd, queue.lock_base, slot, &status):
                continue
            number = Number()
            if registration_lock(&number.kept, queue.table_fd, queue.lock_base + <int64_t> slot) != 0 or (
                not death_of_mine(&queue.records, slot, &status)
            ):
                # somebody is rescuing it, or has: there may be room now
                others_do = True
                continue
            queue.owner = slot + 1
            queue.block_owner = status_incarnation(status) << 16 | (slot + 1)
            with nogil:
                rescued = queue_rescue(&queue, slot, status, UNKNOWN_CAUSE)
            if rescued < 0:
                raise MemoryError(f"{self.file_path}: {queue.cells.count} bytes are needed for a rescue")
            return status_state(load_acquire_u64(&queue.records.first[slot].status)) == SLOT_FREE
        return others_do

    @cython.final
    cdef int join_as_client(self) except -1:
        """`join`, with a mailbox."""
        cdef uint32_t *made
        cdef int why = 0
        self.join()
        if not self.has_mailbox:
            made = &self.queue.mail_made[self.own_slot]
            if load_acquire_u32(made) != 1:
                why = posix_fallocate(
                    self.mail_fd, self.mail_offset + self.own_slot * self.queue.mail_stride, self.queue.mail_stride
                )
                if why != 0:
                    raise OSError(
                        why, f"{os.strerror(why)}: {self.queue.mail_stride} bytes are needed for this client's mailbox",
                        self.file_path,
                    )
                # M2: pairs with M1
                store_release_u32(made, 1)
            self.inbox.queue = &self.queue
            queue_mailbox(&self.queue, self.queue.owner, &self.inbox.box)
            self.has_mailbox = True
        return 0

    @cython.final
    cdef inline int check_lock(self) except -1:
        """Raise where this handle's number is not good any more: its lock, or a file of the queue, is gone."""
        if self.number is not None and self.generation == fork_generation() and not registration_is_good(&self.number.kept):
            self.number.refuse(self.file_path)
        return 0

    @cython.final
    cdef inline int check_synced(self) except -1:
        """Raise where the disk has refused something since the last look; all of it stands in the page cache."""
        cdef int why
        if self.queue.is_durable:
            why = <int> private_swap(&self.queue.sync_errno, 0)
            if why != 0:
                raise OSError(
                    why, f"{os.strerror(why)}: the disk did not take a change of this queue; every process sees it, and it is lost "
                    "only with the power; look at the disk", self.file_path,
                )
        return 0

    @cython.final
    cdef uint32_t frame_crc32(self, Frame *frame, uint64_t area, object job) except? 0:
        """The CRC-32 of a durable queue's frame, as it will lie in its area or in a block; `job`: the numbers of job_crc32."""
        cdef const uint8_t *header = frame.header
        cdef uint64_t n
        if not self.queue.is_durable:
            return 0
        if frame.header_length + frame.data_length > area:
            header = frame.block_header
        parts = [PyBytes_FromStringAndSize(<const char *> header, frame.header_length)]
        if frame.data != NULL:
            parts.append(PyMemoryView_FromMemory(<char *> frame.data, frame.data_length, PyBUF_READ))
        else:
            for n in range(frame.pieces_count):
                parts.append(PyMemoryView_FromMemory(<char *> frame.pieces[n].data, frame.pieces[n].length, PyBUF_READ))
        return layout.result_crc32(*parts) if job is None else layout.job_crc32(job, *parts)

    @cython.final
    cdef bint job_is_whole(self, uint64_t index, const uint8_t *data, uint64_t length) except -1:
        """Are a claimed job's bytes those that were handed in, as far as a durable queue can tell?"""
        cdef JobCell *cell = job_cell(&self.queue, index)
        return not self.queue.is_durable or cell.job_crc32 == layout.job_crc32(
            (
                cell.job_id, length, cell.timeout_ms, cell.keep_s, cell.backoff_ms, cell.max_attempts, cell.priority,
                cell.doublings,
            ),
            PyMemoryView_FromMemory(<char *> data, length, PyBUF_READ),
        )

    def close(self):
        """Close the handle: wakes its waiters, puts its claims back uncharged, gives up its number. Idempotent."""
        Mapped.close(self)
        registrations = getattr(self, "_registrations", None)
        if registrations is not None:
            registrations.close()

    cdef int give_up(self) except -1:
        cdef HeartbeatTable table = self.heartbeat
        cdef uint64_t i, word
        cdef bint clean = True
        if self.number is not None and self.number.is_mine():
            if self.declared_as == self.queue.block_owner:
                try:
                    self._forget()
                except Exception:
                    # what cannot be taken back now is removed by whoever meets it
                    pass
            registration_look(&self.number.kept, NULL, NULL)
            for i in range(self.queue.cells.count):
                word = load_acquire_u64(cell_word(&self.queue.cells, i))
                if word_owner(word) == self.queue.owner and word_state(word) == TAKEN:
                    clean = queue_put_back(&self.queue, i, word) == OK and clean
                    word = load_acquire_u64(cell_word(&self.queue.cells, i))
                if word_owner(word) == self.queue.owner and word_is_one_of(word, 1 << FENCED | 1 << OVERDUE):
                    job_discard(&self.queue, i, word)
            if self.has_mailbox:
                # P2: pairs with P1; from here on publishers free what they bring, and the drain gets the rest
                cas_seq_cst_u64(
                    &self.number.record.status, self.number.status,
                    status_pack(status_incarnation(self.number.status), SLOT_DYING),
                )
                self.number.status = status_pack(status_incarnation(self.number.status), SLOT_DYING)
                clean = queue_drain(&self.queue, &self.inbox.box) == EMPTY and clean
            # with something left undone the record stays, for whoever rescues the dead
            self.number.give_up(clean)
        if table is not None:
            table.is_queues = False
            table.close()
        for fd in (self.mail_fd, self.queue.arena.fd):
            if fd >= 0:
                os.close(fd)
        return 0

    cdef int unmap_parts(self) except -1:
        self.drop_mappings()
        self.parts.clear()
        return 0

    # ---- mappings of long jobs: made anew each time they would cost as much as a copy ----

    @cython.final
    cdef int take_mapping(self, uint64_t offset, uint64_t length, PrivateMap *mapping) except -1:
        """A mapping of this part of the arena at least: one that was put back, or a new one."""
        cdef int n
        with cython.critical_section(self):
            for n in range(MAPPINGS):
                if self.mappings[n].at != NULL and self.mappings[n].offset == offset and self.mappings[n].length >= length:
                    mapping[0] = self.mappings[n]
                    self.mappings[n].at = NULL
                    return 0
        mapping.offset = offset
        mapping.length = length
        mapping.at = map_private(self.queue.arena.fd, offset, length)
        if mapping.at == NULL:
            raise MemoryError(f"{self.file_path}: no room to map {length} bytes")
        return 0

    @cython.final
    cdef int put_mapping(self, PrivateMap *mapping) except -1:
        """Keep it for a later job in the same block; the one that has been kept for longest goes."""
        cdef PrivateMap oldest = mapping[0]
        with cython.critical_section(self):
            if mapping.length <= LONGEST_MAPPING and not private_get(&self.is_closed):
                oldest = self.mappings[self.next_mapping]
                self.mappings[self.next_mapping] = mapping[0]
                self.next_mapping = (self.next_mapping + 1) % MAPPINGS
        if oldest.at != NULL:
            munmap(oldest.at, oldest.length)
        return 0

    @cython.final
    cdef int drop_mappings(self) except -1:
        cdef PrivateMap dropped
        cdef int n
        for n in range(MAPPINGS):
            with cython.critical_section(self):
                dropped = self.mappings[n]
                self.mappings[n].at = NULL
            if dropped.at != NULL:
                munmap(dropped.at, dropped.length)
        return 0

    cdef int wake_all(self) except -1:
        if not self.is_readonly and self.queue.lines != NULL:
            wake_some(&self.queue.lines.items, 0x7FFFFFFF)
            wake_some(&self.queue.lines.space, 0x7FFFFFFF)
            if self.has_mailbox:
                wake_some(&self.inbox.box.lines.items, 0x7FFFFFFF)
        return 0

    @property
    def slot(self):
        """This handle's slot in `heartbeat`; registers it where that has not happened yet."""
        self.enter()
        try:
            self.join()
            return self.own_slot
        finally:
            self.leave()

    @property
    def cells_total(self):
        """Cells of the pool."""
        return self.queue.cells.count

    @property
    def quota(self):
        """Cells that one client may hold at one time."""
        return self.queue.quota

    @property
    def reserve(self):
        """Cells kept back from submitters."""
        return self.queue.reserve

    @property
    def job_bytes(self):
        """Bytes for a job's frame inside its cell; longer ones go to a block."""
        return self.queue.job_bytes

    @property
    def result_bytes(self):
        """Bytes for a result's frame inside its cell; longer ones go to a block."""
        return self.queue.result_bytes

    @property
    def durability(self):
        """What an accepted job survives: the death of any "process", or also the power ("disk")."""
        return "disk" if self.queue.is_durable else "process"

    @property
    def arena_bytes(self):
        """Bytes of blocks that may be in use at one time."""
        return self.queue.arena.limit

    @property
    def arena_backed_bytes(self):
        """Bytes of blocks that have disk or memory behind them (counted block by block)."""
        self.enter()
        try:
            return arena_count_backed(&self.queue.arena)
        finally:
            self.leave()

    def cells(self):
        """Every cell's header, for looking.

        Returns
        -------
        numpy.ndarray of JOB_CELL fields and `closure_id` (u32), shape (cells,), read-only
            It changes under the reader and keeps the mapping alive. `closure_id` says nothing where `job_block` is not 0.
        """
        self.enter()
        try:
            kind = np.dtype({
                "names": [*layout.JOB_CELL.names, "closure_id"],
                "formats": [*(layout.JOB_CELL.fields[name][0] for name in layout.JOB_CELL.names), "<u4"],
                "offsets": [*(layout.JOB_CELL.fields[name][1] for name in layout.JOB_CELL.names), layout.JOB_CELL.itemsize],
                "itemsize": self.queue.cells.stride,
            })
            view = np.asarray(self.map[self.cells_offset:]).view(kind)
            view.flags.writeable = False
            return view
        finally:
            self.leave()

    def _waiting(self):
        """References in each ring of a priority: back and submit together, highest priority first; stale ones counted."""
        self.enter()
        try:
            return [
                refs_length(&self.queue.back[level]) + refs_length(&self.queue.submit[level]) for level in range(LEVELS)
            ]
        finally:
            self.leave()

    @property
    def redelivered(self):
        """Results received by this handle whose jobs had been started more than once, since a worker died over them."""
        return private_get(&self.run_again)

    @property
    def duplicates(self):
        """Results that this handle has dropped, since it had received one for the same job before."""
        return private_get(&self.dropped)

    @property
    def refused(self):
        """Answers of this handle that were refused, since their claims had been taken away meanwhile."""
        return private_get(&self.refused_results)

    @property
    def _sequence(self):
        """The sequence of the last job id; set by tests of its wrap."""
        return self.sequence

    @_sequence.setter
    def _sequence(self, value):
        self.enter()
        try:
            self.join_as_client()
            self.sequence = value
        finally:
            self.leave()

    # ---- submit ----

    def _new_job_id(self):
        """A job id for `submit` to use, so that it can be told before the job is there."""
        self.enter()
        try:
            self.join_as_client()
            return self.queue.client << 32 | self.next_sequence()
        finally:
            self.leave()

    @cython.final
    cdef uint32_t next_sequence(self) except? 0:
        """The next token: u32, not 0, skipped while a job with it is pending. It is pending from here on."""
        cdef uint32_t chosen
        with cython.critical_section(self):
            if len(self.pending) > 4 * <Py_ssize_t> self.queue.cells.count:
                self.forget_acknowledged()
            self.sequence += 1
            while self.sequence == 0 or self.sequence in self.pending:
                self.sequence += 1
            chosen = self.sequence
            self.pending.add(chosen)
        return chosen

    @cython.final
    cdef int forget_acknowledged(self) except -1:
        """Of a job that its worker only acknowledged nothing comes back: what no cell holds is not pending."""
        cdef uint64_t i
        cdef set held = set()
        for i in range(self.queue.cells.count):
            if load_relaxed_u64(&job_cell(&self.queue, i).job_id) >> 32 == self.queue.client and not word_is_one_of(
                load_acquire_u64(cell_word(&self.queue.cells, i)), 1 << FREE | 1 << KEPT
            ):
                held.add(<uint32_t> load_relaxed_u64(&job_cell(&self.queue, i).job_id))
        self.pending &= held
        return 0

    @cython.final
    cdef bint is_pending_still(self, uint32_t sequence) except -1:
        """Is the result of the job with this token still to come? Not any more after this."""
        cdef bint found
        with cython.critical_section(self):
            found = sequence in self.pending
            self.pending.discard(sequence)
        return found

    @cython.final
    cdef bint ended(self, uint32_t sequence) except -1:
        """A job of this client holds its cell no more; False where that was known."""
        if not self.is_pending_still(sequence):
            return False
        private_add(&self.queue.held, -1)
        return True

    @cython.final
    cdef bint quota_is_used_up(self) noexcept:
        if <uint64_t> private_get(&self.queue.held) <= self.queue.quota:
            return False
        # the caller has counted the cell that it is about to take
        private_set(&self.queue.held, queue_count_held(&self.queue, HELD) + 1)
        return <uint64_t> private_get(&self.queue.held) > self.queue.quota

    @cython.final
    cdef int raise_arena(self, Code code, uint64_t length) except -1:
        cdef uint64_t largest = <uint64_t> 1 << (BLOCK_SHIFT + self.queue.arena.classes - 1)
        if code == NO_DISK:
            text = f"the disk has no room for a block of {length} bytes; make room, or lay the queue elsewhere"
        elif length > largest:
            raise errors.ArenaTooSmall(
                f"{self.file_path}: {length} bytes are more than the largest block ({largest} bytes) of the arena of "
                f"{self.queue.arena.limit} bytes; create the queue with larger arena_bytes"
            )
        else:
            text = (
                f"no block for {length} bytes is left in the arena of {self.queue.arena.limit} bytes; wait for jobs to end, or "
                "create the queue with larger arena_bytes"
            )
        raise_code(code, self.file_path, text)
        return 0

    @cython.final
    cdef uint64_t submit_frame(
        self, Frame *frame, uint32_t closure_id, JobOptions *options, object wait, uint64_t job_id
    ) except 0:
        """Submit, waiting up to `wait` for a cell; the job id, which is a new one where `job_id` is 0."""
        cdef int64_t deadline = deadline_of(wait)
        self.join_as_client()
        frame.header_length = SUBMIT_HEADER
        if job_id == 0:
            job_id = self.queue.client << 32 | self.next_sequence()
        try:
            return self.submit_as(job_id, frame, closure_id, options, wait, deadline)
        except BaseException:
            self.is_pending_still(<uint32_t> job_id)
            raise

    @cython.final
    cdef uint64_t submit_as(
        self, uint64_t job_id, Frame *frame, uint32_t closure_id, JobOptions *options, object wait, int64_t deadline
    ) except 0:
        cdef int64_t idle = 0      # since when (ns) it has been at its quota with nobody collecting
        cdef int stage = 0
        cdef int repairs = 0
        cdef Code code
        while True:
            self.check_lock()
            # counted before it is there, so that threads together keep the quota
            private_add(&self.queue.held, 1)
            code = QUOTA if self.quota_is_used_up() else OK
            if code == OK:
                put_submit_header(frame.header, closure_id, <uint32_t> job_id, frame.data_length)
                put_submit_header(frame.block_header, closure_id, <uint32_t> job_id, REST_OF_FRAME)
                frame.crc32 = self.frame_crc32(
                    frame, self.queue.job_bytes,
                    (
                        job_id, frame.header_length + frame.data_length, options.timeout_ms, options.keep_s, options.backoff_ms,
                        options.max_attempts, options.priority, options.doublings,
                    ),
                )
                if self.queue.is_durable or frame.data_length >= LONG_FRAME:
                    with nogil:
                        code = queue_submit(&self.queue, frame, job_id, options)
                else:
                    code = queue_submit(&self.queue, frame, job_id, options)
            if code == OK:
                self.observe(OP_PUSH, 0, 1)
                return job_id
            private_add(&self.queue.held, -1)
            if code == NOT_SYNCED:
                self.check_synced()
                # another thread has been told already
                raise OSError(EIO, f"{os.strerror(EIO)}: the disk did not take the job; it was not accepted", self.file_path)
            if code == NO_BLOCK or code == NO_DISK:
                self.raise_arena(code, frame.data_length + SUBMIT_HEADER)
            if code == FULL and self.free_expired():
                continue
            if code != FULL and code != QUOTA:
                repairs += 1
                if repairs > REPAIRS:
                    raise_code(code, self.file_path, "")
                self.repair()
                continue
            self.observe(OP_PUSH, 1, 0)
            self.wait_for_room(code, deadline, wait, &stage, &idle)

    @cython.final
    cdef bint free_expired(self) noexcept:
        cdef uint64_t n
        with nogil:
            n = kept_free_expired(&self.queue)
        return n > 0

    @cython.final
    cdef int wait_for_room(self, Code code, int64_t deadline, object wait, int *stage, int64_t *idle) except -1:
        """Sleep until a cell comes free; raises Full at the deadline, or where only this client's own recv() could make room."""
        cdef Code woken
        full = (
            QUOTA_TEXT.format(quota=self.queue.quota) if code == QUOTA else
            f"all {self.queue.cells.count - self.queue.reserve} cells for jobs are in use "
            f"({self.queue.reserve} more are kept for rescue)"
        )
        if wait is not None and wait == 0:
            raise_code(code, self.file_path, full)
        with nogil:
            woken = wait_for(
                &self.queue.lines.space, queue_has_quota if code == QUOTA else queue_has_space, &self.queue,
                &self.is_closed, deadline, stage,
            )
        if woken == CLOSED:
            raise_code(CLOSED, self.file_path, "")
        PyErr_CheckSignals()
        if deadline >= 0 and monotonic_ns() >= deadline:
            raise_code(code, self.file_path, f"{full}; no room came in {wait} s")
        if code == QUOTA:
            if idle[0] == 0 or private_get(&self.collecting):
                idle[0] = monotonic_ns()
            elif (
                monotonic_ns() - idle[0] > IDLE_QUOTA_MS * <int64_t> 1000000
                and queue_count_held(&self.queue, 1 << DONE) >= self.queue.quota
            ):
                raise_code(code, self.file_path, f"{full}; every one is a finished job and nobody collects")
        return 0

    def submit(
        self, Pass pass_ not None, *, priority=1, timeout=None, max_attempts=3, backoff=None, due=None, result_ttl=None,
        wait=None
    ):
        """Hand a job in. When this returns, the job survives any process's death.

        Parameters
        ----------
        pass_ : Pass
        priority : int
            0 (first), 1 or 2.
        timeout : float, optional
            Longest run in seconds (to the millisecond, up to 49 days); stored with the job.
        max_attempts : int
            Runs that may end in the worker's death, or in `JobClaim.retry`, from 1 to 65,535; stored with the job.
        backoff : float or (float, float), optional
            For how many seconds the job rests after such a run, doubled for each further one; and what it is not doubled
            beyond, an hour unless it is said. A random part of it, up to half, is left out. None: it does not rest.
        due : float or datetime, optional
            When it may run at the earliest: seconds since 1970 on the wall clock, as `time.time()` gives them, or an aware
            datetime. None, or a time that has passed: at once.
        result_ttl : float, optional
            For how many seconds (rounded up to whole ones, up to 136 years) the result is kept for `result`, from when this
            handle has received it, or has gone. It keeps its cell, and its block, for so long. None: it is this handle's alone.
        wait : float, optional
            Seconds to wait for room; None waits for ever, 0 does not wait.

        Returns
        -------
        int
            The job id, 64 bits.

        Raises
        ------
        Full
            No cell at the end of `wait`; or the client's quota is used up by results that nobody collects.
        ArenaFull
            The arguments need a block and none is left.
        ValueError
            An option outside its limits, or the handle is closed.
        """
        cdef JobOptions options
        put_options(&options, priority, timeout, max_attempts, backoff, result_ttl)
        return self.submit_data(pass_.closure_id, pass_.args, &options, due, wait, 0)

    def _submit(
        self, uint32_t closure_id, data, SubmitOptions options not None, due=None, wait=None, uint64_t job_id=0
    ):
        """As `submit`, for modules of this package.

        Parameters
        ----------
        data : bytes, or sequence of contiguous buffers
            The arguments, or their pieces.
        job_id : int
            From `_new_job_id`; 0: a new one.
        """
        cdef JobOptions chosen = options.options
        return self.submit_data(closure_id, data, &chosen, due, wait, job_id)

    @cython.final
    cdef uint64_t submit_data(
        self, uint32_t closure_id, object data, JobOptions *options, object due, object wait, uint64_t job_id
    ) except 0:
        cdef Frame frame
        cdef _Pieces pieces
        if due is not None:
            options.due_ns = due_ns_of(due)
            if options.due_ns <= due_now(&self.queue):
                options.due_ns = 0
        if PyBytes_CheckExact(data):
            frame.data = <const uint8_t *> PyBytes_AS_STRING(data)
            frame.data_length = PyBytes_GET_SIZE(data)
        else:
            pieces = _Pieces(data)
            pieces.put(&frame)
        self.enter()
        try:
            return self.submit_frame(&frame, closure_id, options, wait, job_id)
        finally:
            self.leave()

    def _push_frame(self, frame, wait):
        """Submit a job given as a submit frame; its token is replaced by the job id's lower half."""
        cdef Text text
        cdef JobOptions options
        cdef Frame held
        put_options(&options, 1, None, 3, None, None)
        self.enter()
        try:
            text_of(frame, &text)
            try:
                if text.length < SUBMIT_HEADER or (
                    get_u16(text.data + 8) != text.length - SUBMIT_HEADER and get_u16(text.data + 8) != REST_OF_FRAME
                ):
                    decode_submit(frame)
                held.data = text.data + SUBMIT_HEADER
                held.data_length = text.length - SUBMIT_HEADER
                return self.submit_frame(&held, get_u32(text.data), &options, wait, 0)
            finally:
                text_done(&text)
        finally:
            self.leave()

    def cancel_running(self, job_id):
        """End a job that runs: its submitter gets `JobCancelled`, and its worker's supervisor kills that process.

        As with a job that ran out of time: what the worker answers later is refused, it claims nothing more, and whoever
        started it ends it (`overdue_pids`). The job may have done some of its work.

        Parameters
        ----------
        job_id : int
            What `submit` gave back.

        Returns
        -------
        bool
            False: it does not run (it waits, is done, or is not known).

        Raises
        ------
        TransportError
            It could not be done in a second: the queue has no spare cell, or its worker was stopped between claiming and starting
            it.
        """
        cdef uint64_t wanted = self.checked_job_id(job_id)
        cdef int64_t deadline = monotonic_ns() + CANCEL_MS * <int64_t> 1000000
        cdef Code code
        self.enter()
        try:
            self.join()
            while True:
                self.check_lock()
                with nogil:
                    code = queue_cancel_running(&self.queue, wanted)
                if code != LOST:
                    break
                PyErr_CheckSignals()
                if monotonic_ns() >= deadline:
                    raise errors.TransportError(
                        f"{self.file_path}: job {job_id} could not be cancelled in {CANCEL_MS / 1000} s: no spare cell is free, or "
                        "its worker was stopped before it started it; try again"
                    )
                with nogil:
                    usleep(200)
            self.check_synced()
            return code == OK
        finally:
            self.leave()

    def cancel(self, job_id):
        """Take a waiting job back.

        Parameters
        ----------
        job_id : int
            What `submit` gave back.

        Returns
        -------
        bool
            True: it will not run and no result comes. False: it runs, has run, or is not known.
        """
        cdef uint64_t wanted = self.checked_job_id(job_id)
        cdef uint64_t n
        self.enter()
        try:
            self.refuse_readonly()
            with nogil:
                n = queue_cancel(&self.queue, wanted)
            if n and wanted >> 32 == self.queue.client:
                self.ended(<uint32_t> wanted)
            self.check_synced()
            return n > 0
        finally:
            self.leave()

    @cython.final
    cdef uint64_t checked_job_id(self, object job_id) except 0:
        if isinstance(job_id, bool) or not isinstance(job_id, int):
            raise TypeError(f"job_id: expected the int that submit() gave back, found {type(job_id).__name__}")
        if not 0 < job_id < 1 << 64:
            raise ValueError(f"job_id: expected the 64-bit int that submit() gave back, found {job_id}")
        return job_id

    def drop_dead(self, job_id):
        """Drop a dead letter, or a quarantined job: it will not run again.

        Returns
        -------
        bool
            Was there one?
        """
        cdef uint64_t wanted = self.checked_job_id(job_id)
        cdef uint64_t n
        self.enter()
        try:
            self.join()
            with nogil:
                n = queue_drop_letter(&self.queue, wanted)
            self.check_synced()
            return n > 0
        finally:
            self.leave()

    def retry_dead(self, job_id):
        """Let a dead letter run again, with all its attempts, before the jobs that wait at its priority.

        A submitter that has received WorkerDied for it gets no second result.

        Returns
        -------
        bool
            Was there one?
        """
        cdef uint64_t wanted = self.checked_job_id(job_id)
        cdef Code code
        self.enter()
        try:
            self.join()
            with nogil:
                code = queue_retry_letter(&self.queue, wanted)
            if code != OK and code != EMPTY:
                self.repair()
            self.check_synced()
            return code != EMPTY
        finally:
            self.leave()

    # ---- kept results ----

    def result(self, job_id, timeout=None):
        """The result of a job that was submitted with `result_ttl`, by any handle of any process; it stays where it is.

        It is there as soon as the job is done, and until it expires or is forgotten. For a dead letter, or a quarantined job,
        this is the error that its submitter gets, with or without `result_ttl`.

        Parameters
        ----------
        job_id : int
            What `submit` gave back.
        timeout : float, optional
            Seconds on the monotonic clock to wait for a job that is not done; None waits for ever, 0 does not wait.

        Returns
        -------
        bytes or PassError
            As `SubmittedResult.result`: an error is not raised.

        Raises
        ------
        UnknownJob
            There is no such job: it was never submitted, its result has expired or was forgotten, or it was submitted without
            `result_ttl` and is done.
        TimeoutError
            It was not done at the timeout.
        OSError
            A durable queue: the disk did not take the result, which is there, and lost with the power.
        ValueError
            The handle is closed, or was closed while this waited.
        """
        cdef uint64_t wanted = self.checked_job_id(job_id)
        cdef int64_t deadline = deadline_of(timeout)
        cdef int64_t began, now, pause
        cdef int64_t longest_pause = SHORTEST_PAUSE_NS
        cdef uint64_t index = self.queue.cells.count
        cdef uint64_t word
        cdef Sight sight
        cdef int absent = 0
        cdef int moved = 0
        self.enter()
        try:
            while True:
                began = monotonic_ns()
                with nogil:
                    sight = queue_sight(&self.queue, wanted, &index, &word)
                now = monotonic_ns()
                if sight == READABLE:
                    found = self.read_kept(index, word, wanted)
                    if found is not None:
                        return found
                    moved += 1
                    if moved < PROOFS:
                        # collected at this moment
                        continue
                elif sight == OTHERS:
                    raise errors.UnknownJob(
                        f"{self.file_path}: job {job_id} is done, and its result is its submitter's alone; results are kept only "
                        "for jobs submitted with result_ttl"
                    )
                absent = absent + 1 if sight == ABSENT and now - began < PROOF_NS else 0
                if absent == PROOFS:
                    raise errors.UnknownJob(
                        f"{self.file_path}: no cell has job {job_id} or a result of it: it was never submitted here, was "
                        "cancelled, or has ended, and its result was not kept (results are kept only for jobs submitted with "
                        "result_ttl), has expired, or was forgotten"
                    )
                if deadline >= 0 and now >= deadline and absent == 0:
                    raise TimeoutError(f"{self.file_path}: job {job_id} was not done in {timeout} s")
                pause = SHORTEST_PAUSE_NS
                if absent == 0:
                    pause = max(longest_pause, LOOK_SHARE * min(now - began, LONGEST_PAUSE_NS))
                    longest_pause = min(2 * longest_pause, LONGEST_PAUSE_NS)
                    if deadline >= 0:
                        pause = min(pause, deadline - now)
                with nogil:
                    usleep(<unsigned int> (pause // 1000) + 1)
                PyErr_CheckSignals()
                if private_get(&self.is_closed):
                    raise_code(CLOSED, self.file_path, "")
        finally:
            self.leave()

    @cython.final
    cdef object read_kept(self, uint64_t index, uint64_t word, uint64_t job_id):
        """The result in a cell that had this word a moment ago; None where it has moved on meanwhile."""
        cdef JobCell *cell = job_cell(&self.queue, index)
        cdef uint32_t crc = load_relaxed_u32(&cell.result_crc32)
        cdef uint64_t length = load_relaxed_u64(&cell.result_length)
        cdef uint32_t attempts = load_relaxed_u16(&cell.attempts)
        cdef const uint8_t *data = kept_frame(&self.queue, index, word, length)
        cdef bytes copy
        cdef uint8_t header[7]
        if data == NULL or length < RESULT_HEADER:
            data = NULL
            length = RESULT_HEADER
        copy = PyBytes_FromStringAndSize(NULL, length - RESULT_HEADER)
        copy_frame(PyBytes_AS_STRING(copy), header, data, length, RESULT_HEADER, False)
        # F1: pairs with C3 and C4; what was copied was read before this
        fence_seq_cst()
        if load_acquire_u64(cell_word(&self.queue.cells, index)) != word:
            return None
        if self.queue.is_durable and (word_state(word) == DONE or (word_state(word) == KEPT and word_owner(word))):
            # whoever has finished it may not have come so far
            with nogil:
                cell_synced(&self.queue, index)
            self.check_synced()
        if data == NULL and word_state(word) == DEAD:
            # a start of the machine has left nothing of the text
            return errors.WorkerDied(f"job {job_id} is a dead letter: its worker died in the last of {attempts} attempts")
        if data == NULL and word_state(word) == QUARANTINED:
            return errors.ExecutionError(f"the job's bytes were damaged; cell {index} is quarantined")
        copy = self.whole_data(<uint32_t> job_id, index, header, RESULT_HEADER, copy, length, data != NULL, crc)
        return result_from(header, copy)

    def forget(self, job_id):
        """Drop a kept result before it expires; its cell is free.

        Parameters
        ----------
        job_id : int
            What `submit` gave back.

        Returns
        -------
        bool
            Was there one? Not, where its submitter is still to receive it: it is kept from then on.
        """
        cdef uint64_t wanted = self.checked_job_id(job_id)
        cdef uint64_t n
        self.enter()
        try:
            self.join()
            with nogil:
                n = queue_forget(&self.queue, wanted)
            self.check_synced()
            return n > 0
        finally:
            self.leave()

    # ---- claim ----

    @cython.final
    cdef inline Code take(self, Ref *ref) except *:
        """The next job, where nothing is parked at the cost of one load."""
        if load_acquire_u64(&self.queue.lines.due) == 0:
            return queue_take(&self.queue, ref)
        return self.take_any(ref)

    @cython.final
    cdef Code take_any(self, Ref *ref) except *:
        cdef Code code
        cdef _IdArray known, live
        if private_swap(&self.is_looking, 1):
            # another thread is at it
            return queue_take(&self.queue, ref)
        try:
            if self.look.strangers.count and monotonic_ns() >= self.answers_ns:
                self.answer_strangers()
            if self.known is not None and load_acquire_u64(&self.queue.lines.due) & UNKNOWN_BIT:
                self.find_live()
            # held while the core goes by them without the GIL
            known, live = self.known, self.live
            self.look.knows_all = known is None
            self.look.known = known.ids if known is not None else Ids(NULL, 0)
            self.look.live = live.ids if live is not None else Ids(NULL, 0)
            with nogil:
                code = queue_take_any(&self.queue, &self.look, ref)
            while code == EMPTY and self.look.strangers.count:
                self.answer_strangers()
                # meanwhile there may be something to run
                code = queue_take(&self.queue, ref)
            return code
        finally:
            private_set(&self.is_looking, 0)

    @cython.final
    cdef Code take_mending(self, Ref *ref) except *:
        cdef Code code = self.take(ref)
        cdef int _tries
        for _tries in range(REPAIRS):
            if code != CORRUPT:
                break
            self.repair()
            code = self.take(ref)
        return code

    # ---- closure ids that nobody knows ----

    @cython.final
    cdef int64_t unknown_clock(self) noexcept:
        """Monotonic ns, by which a job is unknown for so long."""
        return monotonic_ns() + private_get(&self.queue.shift_ns)

    @cython.final
    cdef int find_live(self) except -1:
        """Find out what others know, unless that was done a moment ago."""
        cdef int64_t now = self.unknown_clock()
        if now >= self.live_ns:
            self.live = _IdArray(self._live_closure_ids())
            self.live_ns = now + max(self.look.unknown_after_ns // LIVE_SHARE, UNKNOWN_LOOK_MS * <int64_t> 1000000)
        return 0

    @cython.final
    cdef int answer_strangers(self) except -1:
        """Answer jobs that no live participant has known for so long, by what is known just now; at least one of them."""
        cdef ParkedJob job
        cdef Ref ref
        cdef int64_t began = monotonic_ns()
        cdef int64_t took = 0
        cdef int64_t now
        cdef JobClaim claim
        live = self._live_closure_ids()
        while self.look.strangers.count and took < ANSWERING_MS * <int64_t> 1000000:
            self.look.strangers.count -= 1
            job = self.look.strangers.jobs[self.look.strangers.count]
            now = self.unknown_clock()
            if job.closure_id in live:
                # a CAS: the cell may be another job's by now
                cas_acq_rel_u64(&job_cell(&self.queue, job.cell).unknown_ns, job.since, <uint64_t> now | WAS_KNOWN)
                continue
            ref.cell = job.cell
            ref.word = word_pack(word_version(job.word), TAKEN, self.queue.owner)
            # C7: pairs with C5 and C6
            if not cas_seq_cst_u64(cell_word(&self.queue.cells, job.cell), job.word, ref.word):
                continue
            claim = self.claim_taken(&ref)
            if claim is None:
                continue
            seconds = (now - <int64_t> job.since) / 1e9
            try:
                claim.reply(encode_result(
                    0, errors.UnknownClosureId(
                        f"closure id {job.closure_id}: no live worker has registered a handler for {seconds:.1f} s"
                    ), self.queue.result_bytes,
                ))
            except errors.TransportError:
                # taken away: this one was stopped for long, and the job goes on elsewhere
                continue
            private_add(&self.answered_unknown, 1)
            took = monotonic_ns() - began
        took = monotonic_ns() - began
        self.answers_ns = began + took + ANSWERING_SHARE * took
        return 0

    def _live_closure_ids(self):
        """The closure ids that live participants have declared."""
        raise NotImplementedError

    def _declare(self):
        """Let others know what this handle runs."""
        raise NotImplementedError

    def _forget(self):
        """Take back what `_declare` has said."""
        raise NotImplementedError

    def _set_known(self, closure_ids):
        """Claim only jobs with these closure ids, None: with any; nothing is said to others."""
        cdef _IdArray known = None if closure_ids is None else _IdArray(closure_ids)
        self.enter()
        try:
            self.join()
            self.known = known
            self.live_ns = 0
            # look at once: there may be some for this handle
            private_set(&self.queue.unknown_look_ns, 0)
        finally:
            self.leave()

    def _set_declared(self):
        """From here on the others know what this handle runs, under the number that it has now."""
        self.declared_as = self.queue.block_owner

    @property
    def _created_ns(self):
        """When the queue was made; all of its files have it."""
        return int(self.file_header["created_ns"])

    @property
    def identity(self):
        """Number and incarnation of this handle in the table."""
        self.enter()
        try:
            self.join()
            return self.queue.owner, self.queue.block_owner >> 16
        finally:
            self.leave()

    def is_alive(self, number, incarnation):
        """Does this incarnation of a participant live?"""
        cdef uint64_t slot, status
        self.enter()
        try:
            if not 0 < number <= self.queue.records.count:
                return False
            if number == self.queue.owner and incarnation == self.queue.block_owner >> 16:
                return True
            slot = number - 1
            # the status is read before the lock is tested: who has come since has another incarnation
            return (
                not is_dead(&self.queue.records, self.queue.table_fd, self.queue.lock_base, slot, &status)
                and status_state(status) == SLOT_USED and status_incarnation(status) == <uint64_t> incarnation
            )
        finally:
            self.leave()

    @property
    def unknown_after(self):
        """Seconds for which no live participant must have known a job's closure id until it is answered with UnknownClosureId."""
        return self.look.unknown_after_ns / 1e9

    @unknown_after.setter
    def unknown_after(self, seconds):
        if not 0 <= seconds <= 1e9:
            raise ValueError(f"unknown_after: expected seconds from 0 to 1e9, found {seconds}")
        self.look.unknown_after_ns = <int64_t> (seconds * 1e9)

    @property
    def unknown_answered(self):
        """How many jobs this handle has answered with UnknownClosureId, since nobody knew them."""
        return private_get(&self.answered_unknown)

    @property
    def _clock_shift_ns(self):
        """What is added to the clocks by which jobs are due, and unknown for so long; set by tests in place of waiting."""
        return private_get(&self.queue.shift_ns)

    @_clock_shift_ns.setter
    def _clock_shift_ns(self, value):
        private_set(&self.queue.shift_ns, value)

    def try_claim(self):
        """Claim the job that is next: by priority, jobs put back before the others, first in first out.

        Returns
        -------
        JobClaim

        Raises
        ------
        Empty
        """
        return self.claim(0)

    def claim(self, timeout=None):
        """Claim the job that is next, waiting for one.

        Parameters
        ----------
        timeout : float, optional
            Seconds on the monotonic clock; None waits for ever, 0 does not wait.

        Returns
        -------
        JobClaim

        Raises
        ------
        Empty
            At the timeout.
        ValueError
            The handle is closed, or was closed while this waited.
        """
        return self.next_claim(timeout, None)

    @cython.final
    cdef JobClaim next_claim(self, object timeout, WorkState state):
        """As `claim`; Empty also where `state` is to stop."""
        cdef Ref ref
        cdef Code code
        cdef int64_t deadline = deadline_of(timeout)
        cdef int stage = 0
        cdef JobClaim claim
        self.enter()
        try:
            self.join()
            while True:
                self.check_lock()
                if private_get(&self.is_condemned):
                    raise errors.HeartbeatError(
                        f"{self.file_path}: a job of this process ran out of time, or was cancelled, and its supervisor may end "
                        "the process at any moment; claim nothing more and exit"
                    )
                if self.known is not None and self.declared_as != self.queue.block_owner:
                    self._declare()
                code = self.take_mending(&ref)
                if code == OK:
                    self.end_gap(0)
                    claim = self.claim_taken(&ref)
                    if claim is not None and self.knows(claim) and self.has_rested(claim):
                        self.observe(OP_CLAIM, 0, 1)
                        return claim
                    # as many of these may wait as there are cells
                    PyErr_CheckSignals()
                    if timeout is not None and timeout > 0 and 0 < deadline <= monotonic_ns():
                        raise_code(EMPTY, self.file_path, f"no job for this handle came in {timeout} s")
                    continue
                if code != EMPTY:
                    raise_code(code, self.file_path, "")
                if timeout is not None and timeout == 0:
                    self.observe(OP_CLAIM, 1, 0)
                    raise_code(EMPTY, self.file_path, "no job waits")
                with nogil:
                    code = self.wait_for_more(&self.queue.lines.items, queue_has_jobs, &self.queue, deadline, &stage)
                if code == SIGNAL:
                    PyErr_CheckSignals()
                    if state is not None and state._stopping:
                        raise_code(EMPTY, self.file_path, "the loop is to stop")
                elif code == TIMEOUT:
                    raise_code(EMPTY, self.file_path, f"no job came in {timeout} s")
                elif code == CLOSED:
                    raise_code(code, self.file_path, "")
        finally:
            self.leave()

    @cython.final
    cdef inline bint knows(self, JobClaim claim) except -1:
        """Does this handle run the job? Else it is parked, for others."""
        return self.known is None or self.knows_id_of(claim)

    @cython.final
    cdef inline bint has_rested(self, JobClaim claim) except -1:
        """Has its backoff passed since its worker died? Else it is parked until then."""
        cdef JobCell *cell = job_cell(&self.queue, claim.cell)
        return not job_has_to_rest(cell) or self.let_rest(claim)

    @cython.final
    cdef bint let_rest(self, JobClaim claim) except -1:
        cdef Code code
        claim.begin_end()
        with nogil:
            code = queue_rest(&self.queue, claim.cell, claim.word, self.dice())
        if code == LOST:
            claim_lost(&self.queue, claim.cell, claim.word)
        return False

    @cython.final
    cdef inline uint64_t dice(self) noexcept nogil:
        return <uint64_t> monotonic_ns() * <uint64_t> 0x9E3779B97F4A7C15 >> 20

    @cython.final
    cdef bint knows_id_of(self, JobClaim claim) except -1:
        cdef _IdArray known = self.known
        cdef Code code
        if known is None or ids_have(&known.ids, get_u32(claim.data)):
            return True
        claim.begin_end()
        with nogil:
            code = queue_park(&self.queue, claim.cell, claim.word, 0, False)
        if code == LOST:
            claim_lost(&self.queue, claim.cell, claim.word)
        return False

    @cython.final
    cdef JobClaim claim_taken(self, Ref *ref):
        """The claim of a cell just taken; None where the job is damaged (its client gets an error instead)."""
        cdef JobCell *cell = job_cell(&self.queue, ref.cell)
        # read once: another process may change them between the check and a use
        cdef uint64_t length = load_relaxed_u64(&cell.job_length)
        cdef const uint8_t *data = frame_at(
            &self.queue, job_area(&self.queue, ref.cell), self.queue.job_bytes, length,
            load_relaxed_u64(&cell.job_block), ref.cell, word_version(ref.word),
        )
        cdef JobClaim claim = JobClaim.__new__(JobClaim)
        claim.holder = self
        claim.cell = ref.cell
        claim.word = ref.word
        claim.generation = self.generation
        claim.job_id = cell.job_id
        claim.data = <uint8_t *> data
        claim.length = length
        if data != NULL and length >= SUBMIT_HEADER and not self.job_is_whole(ref.cell, data, length):
            if quarantine_job(&self.queue, ref.cell, ref.word) != OK:
                self.repair()
            return None
        private_set(&claim.is_over, 0)
        if data == NULL or length < SUBMIT_HEADER:
            claim.length = 0
            # short enough for any cell, so that it needs no block
            claim.reply(encode_result(
                0, errors.ExecutionError(f"the job in cell {ref.cell} was damaged"), self.queue.result_bytes
            ))
            return None
        return claim

    # ---- results ----

    @cython.final
    cdef inline object whole_data(
        self, uint32_t token, uint64_t index, uint8_t *header, uint64_t head_length, object copy, uint64_t length, bint found,
        uint32_t crc
    ):
        """The data of a result that was copied; where they are damaged those of an error that says so, with its header."""
        if found and result_is_well_formed(header, length) and (
            crc == 0 or crc == layout.result_crc32(PyBytes_FromStringAndSize(<const char *> header, head_length), copy)
        ):
            return copy
        text = error_text(errors.ExecutionError(f"the result in cell {index} was damaged by another process"), None)
        put_result_header(header, token, STATUS_ERROR, len(text))
        return text

    @cython.final
    cdef object collect(self, bint as_frame, bint writable=False):
        """The oldest result, or None: as SubmittedResult, or as a result frame.

        `writable`: a long one's data as a bytearray; or as WholeBytes, where they are bytes themselves.
        """
        cdef Ref ref
        cdef Code code
        cdef JobCell *cell
        cdef uint64_t length, job_id, collected
        cdef const uint8_t *data
        cdef object copy
        cdef char *at
        cdef uint8_t header[8]
        cdef uint64_t head_length
        cdef bint was_run_again, is_first, is_kept
        cdef uint32_t crc
        cdef int repairs = 0
        while True:
            code = queue_next_result(&self.queue, &self.inbox.box, &ref)
            if code == CORRUPT and repairs < REPAIRS:
                repairs += 1
                self.repair()
                continue
            if code == EMPTY:
                return None
            if code != OK:
                return raise_code(code, self.file_path, "")
            cell = job_cell(&self.queue, ref.cell)
            job_id = load_relaxed_u64(&cell.job_id)
            was_run_again = load_relaxed_u16(&cell.attempts) > 1
            crc = load_relaxed_u32(&cell.result_crc32)
            length = load_relaxed_u64(&cell.result_length)
            data = frame_at(
                &self.queue, result_area(&self.queue, ref.cell), self.queue.result_bytes, length,
                load_relaxed_u64(&cell.result_block), ref.cell, word_version(ref.word),
            )
            if data == NULL or length < RESULT_HEADER:
                data = NULL
                length = RESULT_HEADER
            # memory first: a cell that is COLLECTED must not wait for it
            head_length = RESULT_HEADER
            if writable and length >= LONG_FRAME and data[RESULT_HEADER] == RESULT_WHOLE:
                head_length += 1
            if writable and length >= LONG_FRAME and head_length == RESULT_HEADER:
                copy = PyByteArray_FromStringAndSize(NULL, length - head_length)
                at = PyByteArray_AS_STRING(copy)
            else:
                copy = PyBytes_FromStringAndSize(NULL, length - head_length)
                at = PyBytes_AS_STRING(copy)
            if is_letter(ref.word):
                # the letter stays where it is; who has told its submitter is decided after the copy
                copy_frame(at, header, data, length, head_length, False)
                if not letter_told(&self.queue, ref.cell, ref.word):
                    continue
                is_first = self.ended(<uint32_t> job_id)
                refs_pass(&self.inbox.box.refs, &ref)
            else:
                is_kept = load_relaxed_u32(&cell.keep_s) != 0
                collected = word_pack(word_version(ref.word), KEPT if is_kept else COLLECTED, self.queue.owner)
                # C9: pairs with C8; one collector wins
                if not cas_seq_cst_u64(cell_word(&self.queue.cells, ref.cell), ref.word, collected):
                    continue
                copy_frame(at, header, data, length, head_length, True)
                # before the cell is free, so that a submitter woken by that finds its quota
                is_first = self.ended(<uint32_t> job_id)
                if not is_kept:
                    job_free_if(&self.queue, ref.cell, collected)
                else:
                    self.keep(ref.cell, collected, is_first)
                refs_pass(&self.inbox.box.refs, &ref)
                store_relaxed_u64(&self.queue.hint, ref.cell)
            if not is_first:
                # a double: the job was put back while its first worker was only slow, and both have answered
                private_add(&self.dropped, 1)
                continue
            private_add(&self.run_again, was_run_again)
            if head_length > RESULT_HEADER and header[RESULT_HEADER] != RESULT_WHOLE:
                # changed meanwhile, by nobody who may
                data = NULL
            found = self.whole_data(<uint32_t> job_id, ref.cell, header, head_length, copy, length, data != NULL, crc)
            if as_frame:
                return PyBytes_FromStringAndSize(<const char *> header, RESULT_HEADER) + found
            if head_length > RESULT_HEADER and found is copy:
                return new_result(job_id, new_whole(copy))
            return new_result(job_id, result_from(header, found))

    @cython.final
    cdef int keep(self, uint64_t index, uint64_t mine, bint is_first) except -1:
        """Of a result collected as KEPT(me): keep it, unless another one of the same job was there before."""
        with nogil:
            if is_first:
                kept_settle(&self.queue, index, mine)
            else:
                job_free_if(&self.queue, index, mine)
        return 0

    @cython.final
    cdef object collect_waiting(self, bint as_frame, object timeout, bint writable=False):
        cdef Code code
        cdef int64_t deadline = deadline_of(timeout)
        cdef int stage = 0
        self.enter()
        private_add(&self.collecting, 1)
        try:
            self.join_as_client()
            while True:
                self.check_lock()
                found = self.collect(as_frame, writable)
                if found is not None:
                    self.observe(OP_POP, 0, 1)
                    return found
                if timeout is not None and timeout == 0:
                    self.observe(OP_POP, 1, 0)
                    raise_code(EMPTY, self.file_path, "no result is there")
                with nogil:
                    code = wait_for(
                        &self.inbox.box.lines.items, inbox_has_results, &self.inbox, &self.is_closed, deadline, &stage
                    )
                if code == SIGNAL:
                    PyErr_CheckSignals()
                elif code == TIMEOUT:
                    raise_code(EMPTY, self.file_path, f"no result came in {timeout} s")
                elif code == CLOSED:
                    raise_code(code, self.file_path, "")
        finally:
            private_add(&self.collecting, -1)
            self.leave()

    def try_recv(self):
        """Take a result that is there.

        Returns
        -------
        SubmittedResult
            Its `token` is the job id.

        Raises
        ------
        Empty
        """
        return self.collect_waiting(False, 0)

    def recv(self, timeout=None):
        """Take the next result of this handle's jobs, in the order they ended, waiting for one.

        Parameters
        ----------
        timeout : float, optional
            Seconds on the monotonic clock; None waits for ever, 0 does not wait.

        Returns
        -------
        SubmittedResult
            Its `token` is the job id; its `result` the bytes, or a PassError (not raised).

        Raises
        ------
        Empty
            At the timeout.
        ValueError
            The handle is closed, or was closed while this waited.
        """
        return self.collect_waiting(False, timeout)

    def recv_many(self, n):
        """Take up to `n` results that are there now.

        Returns
        -------
        list of SubmittedResult
            Empty where there is none.
        """
        cdef list taken = []
        if n < 0:
            raise ValueError(f"n: expected 0 or more, found {n}")
        self.enter()
        try:
            self.join_as_client()
            while len(taken) < n:
                try:
                    found = self.collect(False)
                except BaseException:
                    # what was collected exists nowhere else; the next call meets the error
                    if not taken:
                        raise
                    break
                if found is None:
                    break
                taken.append(found)
            self.observe(OP_POP, not taken, <uint64_t> len(taken))
            return taken
        finally:
            self.leave()

    def _recv_into(self, list taken not None, n, timeout):
        """Append the results that are there to `taken`, up to `n`, waiting for the first: what is collected is in the list.

        A long one as a bytearray, of which arrays can be made that may be written to; or as WholeBytes.

        Whatever a signal's handler raises comes before anything was collected, or after all.
        """
        self.enter()
        try:
            taken.append(self.collect_waiting(False, timeout, True))
            while n > 1:
                try:
                    found = self.collect(False, True)
                except Exception:
                    # the next call meets it
                    break
                if found is None:
                    break
                taken.append(found)
                n -= 1
        finally:
            self.leave()

    def _pop_frame(self, timeout):
        """The next result as a result frame; its token is the job id's lower half."""
        return self.collect_waiting(True, timeout)

    def repair(self):
        """Make hints, places, cells and blocks agree again, and publish every job and result that no place leads to.

        For a queue whose bytes another process has damaged; calls that meet a contradiction run it themselves. Others may
        work, or repair, meanwhile. Jobs found again run in the order of their cells.

        Returns
        -------
        int
            How many jobs and results were found again.
        """
        cdef int64_t found
        self.enter()
        try:
            self.join()
            with nogil:
                found = queue_repair(&self.queue)
            if found < 0:
                raise MemoryError(f"{self.file_path}: {self.queue.cells.count} bytes are needed for a repair")
            return found
        finally:
            self.leave()

    def rescue(self, exit_codes=None):
        """Move on what dead participants have left.

        Their jobs run again (or become dead letters after `max_attempts` deaths), results they were about to hand over are
        delivered, their cells, blocks and slots are free. It runs by itself twice a second in every process that takes part;
        a process that sees another one end may call it at once.

        Parameters
        ----------
        exit_codes : dict of int to int, optional
            How processes ended that the caller has seen end: pid to exit code, negative for a signal, as
            `subprocess.Popen.returncode` has it. It is kept with the jobs that they were running.

        Returns
        -------
        int
            How many dead participants there were.
        """
        cdef uint64_t slot, status
        cdef int64_t rescued
        cdef int64_t n = 0
        cdef int32_t code
        self.enter()
        try:
            self.join()
            for slot in range(self.queue.records.count):
                if slot + 1 == self.queue.owner or not is_dead(
                    &self.queue.records, self.queue.table_fd, self.queue.lock_base, slot, &status
                ):
                    continue
                code = UNKNOWN_CAUSE
                if exit_codes is not None:
                    code = exit_codes.get(load_relaxed_u32(&self.queue.records.first[slot].pid), code)
                with nogil:
                    rescued = queue_rescue(&self.queue, slot, status, code)
                if rescued < 0:
                    raise MemoryError(f"{self.file_path}: {self.queue.cells.count} bytes are needed for a rescue")
                n += rescued
            return n
        finally:
            self.leave()

    def _watch(self):
        """One look of the timer's, in this thread; the timer itself looks no more. For tests that end it at an instruction."""
        self.enter()
        try:
            self.join()
            registration_look(&self.number.kept, NULL, NULL)
            with nogil:
                queue_watch(&self.watch)
        finally:
            self.leave()


@cython.final
cdef class WholeBytes:
    """A result that is bytes, and nothing else. Not made directly.

    Attributes
    ----------
    value : bytes
    """

    cdef readonly bytes value

    def __init__(self):
        raise TypeError("it comes from a queue")


cdef inline WholeBytes new_whole(bytes value):
    cdef WholeBytes made = WholeBytes.__new__(WholeBytes)
    made.value = value
    return made


@cython.final
@cython.no_gc_clear
cdef class MappedPayload:
    """A job's bytes in a mapping of their own, read-only; a buffer. Not made directly: `JobClaim.map_payload`."""

    cdef QueueHandle holder
    cdef PrivateMap mapping
    cdef uint64_t length
    cdef int64_t exports
    cdef bint is_kept
    cdef bint is_changed        # some of its pages may be copies of their own

    def __init__(self):
        raise TypeError("a mapped payload comes from a claim")

    def __len__(self):
        return self.length

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.mapping.at, self.length, 1, flags)
        private_add(&self.exports, 1)

    def __releasebuffer__(self, Py_buffer *buffer):
        private_add(&self.exports, -1)

    def view(self):
        """Read-only memoryview (uint8, shape (length,)) of it."""
        return memoryview(self)

    def keep(self):
        """See to it that what is used of it for longer than the claim lives stays as it is; to be called before the claim's end.

        Returns
        -------
        bool
            Whether anything is. Then this has made a copy of all.

        Raises
        ------
        MemoryError
            There is no room for that.
        """
        if private_get(&self.exports) == 0:
            return False
        if not self.is_kept:
            self.is_changed = True
            if keep_private(self.mapping.at, self.mapping.length) != 0:
                raise MemoryError(f"no room to keep {self.length} bytes of a job that are still in use")
            self.is_kept = True
        return True

    def __dealloc__(self):
        if self.mapping.at == NULL:
            return
        if self.is_changed:
            munmap(self.mapping.at, self.mapping.length)
        else:
            # nobody can see it any more, and it shows what the file has
            self.holder.put_mapping(&self.mapping)


@cython.final
cdef class JobClaim(Claim):
    """A job claimed from a queue: its payload is the submit frame; `reply` sends a result frame to its client."""

    cdef readonly uint64_t job_id
    cdef MappedPayload mapped

    @property
    def attempts(self):
        """How often the job was started."""
        self.check()
        self.holder.enter()
        try:
            return job_cell(&(<QueueHandle> self.holder).queue, self.cell).attempts
        finally:
            self.holder.leave()

    @property
    def max_attempts(self):
        """How often it may end in its worker's death."""
        self.check()
        self.holder.enter()
        try:
            return job_cell(&(<QueueHandle> self.holder).queue, self.cell).max_attempts
        finally:
            self.holder.leave()

    @cython.final
    cdef int check_held(self, QueueHandle handle) except -1:
        """Raise where the cell is not this claim's any more, before anything is written into it."""
        handle.check_lock()
        if load_acquire_u64(cell_word(&handle.queue.cells, self.cell)) != self.word:
            private_set(&self.is_over, 1)
            self.lose(handle)
        return 0

    @cython.final
    cdef int lose(self, QueueHandle handle) except -1:
        """The claim was taken away: say so."""
        cdef uint32_t how
        if self.mapped is not None:
            # the handler goes on reading it
            self.mapped.keep()
        how = claim_lost(&handle.queue, self.cell, self.word)
        private_add(&handle.refused_results, 1)
        if how == OVERDUE:
            private_set(&handle.is_condemned, 1)
            raise errors.TransportError(
                f"{handle.file_path}: this claim was taken away, its job ran out of time or was cancelled; drop the result, and "
                "end this process"
            )
        raise_code(LOST, handle.file_path, "")

    def started(self):
        """Say that the job is being run: counts an attempt (once), and writes since when.

        Raises
        ------
        TransportError
            The claim was taken away; it is over.
        ValueError
            As `ack`.
        """
        cdef QueueHandle handle = <QueueHandle> self.holder
        self.check()
        handle.enter()
        try:
            self.start(handle)
        finally:
            handle.leave()

    @cython.final
    cdef int start(self, QueueHandle handle) except -1:
        self.check_held(handle)
        job_start(&handle.queue, job_cell(&handle.queue, self.cell), self.word)
        return 0

    @cython.final
    cdef int answer_bytes(self, bytes value) except -1:
        """As `reply`, with the frame of this value."""
        cdef Frame frame
        self.check()
        self.holder.enter()
        try:
            frame.data = <const uint8_t *> PyBytes_AS_STRING(value)
            frame.data_length = PyBytes_GET_SIZE(value)
            self.answer(&frame, STATUS_OK)
        finally:
            self.holder.leave()
        return 0

    def progress(self, done, total):
        """Say how far the job is; others read it from its cell. Does not block.

        Parameters
        ----------
        done, total : int
            Any unit, u32 each.

        Raises
        ------
        TransportError, ValueError
            As `started`.
        """
        cdef QueueHandle handle = <QueueHandle> self.holder
        cdef uint64_t said = <uint64_t> as_u32(done, "done") << 32 | as_u32(total, "total")
        self.check()
        handle.enter()
        try:
            self.check_held(handle)
            store_relaxed_u64(&job_cell(&handle.queue, self.cell).progress, said)
        finally:
            handle.leave()

    def reply(self, payload):
        """Answer the client that submitted the job, and be over.

        Parameters
        ----------
        payload : contiguous buffer
            A result frame (`encode_result`); its token is replaced by the job's.

        Raises
        ------
        ArenaFull
            The result needs a block and none is left; the claim is still held.
        TransportError
            The frame is malformed (the claim is still held), or the claim was taken away (it is over).
        ValueError, BufferError
            As `ack`.
        """
        cdef Text text
        cdef Frame frame
        self.check()
        self.holder.enter()
        try:
            text_of(payload, &text)
            try:
                if not result_is_well_formed(text.data, text.length):
                    decode_result(payload)
                frame.data = text.data + RESULT_HEADER
                frame.data_length = text.length - RESULT_HEADER
                self.answer(&frame, text.data[4])
            finally:
                text_done(&text)
        finally:
            self.holder.leave()

    def map_payload(self):
        """The payload in a mapping of its own, which costs no copy, and outlives the claim where it is used for longer.

        Returns
        -------
        MappedPayload or None
            None where the payload lies in the job's cell.

        Raises
        ------
        MemoryError
            It could not be mapped.
        """
        cdef QueueHandle handle = <QueueHandle> self.holder
        cdef Arena *arena = &handle.queue.arena
        cdef MappedPayload made
        self.check()
        handle.enter()
        try:
            if not arena.base <= self.data < arena.base + arena_end(arena):
                return None
            made = MappedPayload.__new__(MappedPayload)
            made.holder = handle
            made.length = self.length
            handle.take_mapping(self.data - arena.base, self.length, &made.mapping)
            self.mapped = made
            return made
        finally:
            handle.leave()

    def reply_in_pieces(self, pieces):
        """As `reply`, with a value whose bytes lie in several buffers, one behind the other."""
        cdef Frame frame
        cdef _Pieces held = _Pieces(pieces)
        self.check()
        self.holder.enter()
        try:
            held.put(&frame)
            self.answer(&frame, STATUS_OK)
        finally:
            self.holder.leave()

    @cython.final
    cdef int answer(self, Frame *frame, uint32_t status) except -1:
        cdef QueueHandle handle = <QueueHandle> self.holder
        cdef Mailbox box
        cdef Mailbox *to = NULL
        cdef Code code
        self.check_held(handle)
        self.begin_end()
        if queue_mailbox(&handle.queue, self.job_id >> 48, &box):
            to = &box
        if to != NULL or load_relaxed_u32(&job_cell(&handle.queue, self.cell).keep_s):
            frame.header_length = RESULT_HEADER
            put_result_header(frame.header, <uint32_t> self.job_id, status, frame.data_length)
            put_result_header(frame.block_header, <uint32_t> self.job_id, status, REST_OF_FRAME)
            frame.crc32 = handle.frame_crc32(frame, handle.queue.result_bytes, None)
            if handle.queue.is_durable or frame.data_length >= LONG_FRAME:
                with nogil:
                    code = queue_finish(&handle.queue, to, self.job_id, self.cell, self.word, frame)
            else:
                code = queue_finish(&handle.queue, to, self.job_id, self.cell, self.word, frame)
        else:
            # nobody can have submitted this
            code = OK if job_free_if(&handle.queue, self.cell, self.word) else LOST
        if code == NO_BLOCK or code == NO_DISK:
            private_set(&self.is_over, 0)
            handle.raise_arena(code, frame.data_length + RESULT_HEADER)
        if code == LOST:
            self.lose(handle)
        if code != OK:
            handle.repair()
        handle.check_synced()
        return 0

    cdef int finish(self, bint back) except -1:
        """End the claim without a result."""
        cdef QueueHandle handle = <QueueHandle> self.holder
        cdef Code code
        self.check()
        handle.enter()
        try:
            self.begin_end()
            if handle.queue.is_durable:
                with nogil:
                    code = queue_end(&handle.queue, self.cell, self.word, back)
            else:
                code = queue_end(&handle.queue, self.cell, self.word, back)
            if code == LOST:
                self.lose(handle)
            if code != OK:
                handle.repair()
            handle.check_synced()
        finally:
            handle.leave()
        return 0

    def ack(self):
        """Done, and no result is sent.

        Raises
        ------
        ValueError
            The claim is over, its handle closed, or it belongs to a parent process.
        BufferError
            A view of the payload is still in use.
        TransportError
            The claim was taken away; it is over.
        """
        self.finish(False)

    def release(self):
        """Put the job back, before those that wait at its priority; the attempt is not charged.

        Raises
        ------
        ValueError, BufferError, TransportError
            As `ack`.
        """
        self.finish(True)

    def retry(self):
        """Put the job back for another attempt, after the backoff that its submitter has asked for. This one is counted.

        Returns
        -------
        bool
            False: this was its last attempt; the claim is still held, for an answer.

        Raises
        ------
        ValueError, BufferError, TransportError
            As `ack`.
        """
        cdef QueueHandle handle = <QueueHandle> self.holder
        cdef JobCell *cell
        cdef Code code
        self.check()
        handle.enter()
        try:
            self.check_held(handle)
            cell = job_cell(&handle.queue, self.cell)
            if load_relaxed_u16(&cell.attempts) >= load_relaxed_u16(&cell.max_attempts):
                return False
            self.begin_end()
            with nogil:
                code = queue_retry(&handle.queue, self.cell, self.word, handle.dice())
            if code == LOST:
                self.lose(handle)
            handle.check_synced()
            return True
        finally:
            handle.leave()

    def leave_to_others(self):
        """Put the job back, uncharged, for whoever runs it, as one that this handle does not know (`JobQueue.runs`).

        Raises
        ------
        ValueError, BufferError, TransportError
            As `ack`.
        """
        cdef QueueHandle handle = <QueueHandle> self.holder
        self.check()
        handle.enter()
        try:
            self.begin_end()
            self.put_aside(handle, 0, False)
        finally:
            handle.leave()

    @cython.final
    cdef int put_aside(self, QueueHandle handle, uint64_t due_ns, bint charged) except -1:
        cdef Code code
        with nogil:
            code = queue_park(&handle.queue, self.cell, self.word, due_ns, charged)
        if code == LOST:
            self.lose(handle)
        handle.check_synced()
        return 0

    def park(self, due, charged=False):
        """Put the job back, not to run before a certain time.

        Parameters
        ----------
        due : float or datetime
            Seconds since 1970 on the wall clock, as `time.time()` gives them, or an aware datetime.
        charged : bool
            Whether the attempt counts, where the job was started. Whether it may have another one is for the caller to say.

        Raises
        ------
        TypeError, ValueError
            `due` is no such time (the claim is still held).
        ValueError, BufferError, TransportError
            As `ack`.
        """
        cdef QueueHandle handle = <QueueHandle> self.holder
        cdef uint64_t due_ns = due_ns_of(due)
        cdef bint counts = charged
        self.check()
        handle.enter()
        try:
            self.begin_end()
            self.put_aside(handle, due_ns, counts)
        finally:
            handle.leave()

    def __del__(self):
        if (
            not private_get(&self.is_over) and self.generation == fork_generation()
            and not private_get(&self.holder.is_closed)
        ):
            # nobody ends this claim any more; what still looks at the payload keeps the mapping, not the message
            self.view = self.shown = None
            try:
                self.finish(True)
            except errors.TransportError:
                # taken away meanwhile, so there is nothing to give back; that is counted
                pass
