# Messages in a file of their own: what SharedRing and SharedDeque have in common (algorithms: _cells.pxd, _ring.pxd,
# _sharedring.pxd, _shareddeque.pxd).

cdef object RING_CELL_BYTES = layout.RING_CELL.itemsize

cdef enum:
    FULL_LOOK_MS = 20       # a call that finds every cell in use looks for the dead, but not more often
    EMPTY_LOOK_MS = 500     # one that finds nothing waiting
    BATCH = 32      # messages written (or taken) before the first of them is published (or freed)


cdef tuple message_sizes(object kind, object capacity, object payload_bytes, object participants):
    """Offsets of places, records, ends (a deque's) and cells, stride of a cell, and size of the file (bytes)."""
    places = LINES + layout.RING_LINES.itemsize
    records = places + 2 * capacity * 8
    ends = layout.align(records + participants * layout.PARTICIPANT.itemsize, layout.HOT_LINE)
    cells = ends
    if kind == Kind.DEQUE:
        cells = layout.align(ends + layout.DEQUE_LINES.itemsize + 2 * capacity * 8, layout.HOT_LINE)
    stride = layout.align(RING_CELL_BYTES + payload_bytes, layout.LINE)
    return places, records, ends, cells, stride, cells + capacity * stride


cdef int check_message_numbers(object capacity, object payload_bytes) except -1:
    check_cells("capacity", capacity, layout.MIN_CELLS)
    check_number("payload_bytes", payload_bytes, layout.MIN_PAYLOAD_BYTES, layout.MAX_PAYLOAD_BYTES)
    return 0


cdef int create_messages(object path, object kind, object capacity, object payload_bytes, object mode) except -1:
    check_message_numbers(capacity, payload_bytes)
    *_, stride, size = message_sizes(kind, capacity, payload_bytes, layout.RING_PARTICIPANTS)
    files.create(
        path, kind, size, capacity=capacity, cell_bytes=stride, payload_bytes=payload_bytes, extra=layout.RING_PARTICIPANTS,
        mode=mode,
    )
    return 0


cdef object open_messages(object cls, object path, object kind, bint readonly):
    cdef SharedMessages made = cls.__new__(cls)
    made.map_file(path, kind, readonly)
    try:
        made.attach()
        if not readonly and made.somebody_is_dead():
            made.rescue()
    except BaseException:
        made.close()
        raise
    return made


cdef object open_or_create_messages(object cls, object path, object capacity, object payload_bytes, object mode):
    check_message_numbers(capacity, payload_bytes)
    try:
        made = cls.open(path)
    except FileNotFoundError:
        try:
            return cls.create(path, capacity, payload_bytes=payload_bytes, mode=mode)
        except FileExistsError:
            made = cls.open(path)
    if (made.capacity, made.payload_bytes) != (capacity, payload_bytes):
        found = (made.capacity, made.payload_bytes)
        made.close()
        raise errors.LayoutMismatch(
            f"{os.fsdecode(path)}: expected capacity {capacity} and payload_bytes {payload_bytes}, found {found[0]} and "
            f"{found[1]}; open it with open(), or choose another path"
        )
    return made


@cython.no_gc_clear
cdef class SharedMessages(Numbered):
    """Messages in cells of one mapped file: base of `SharedRing` and `SharedDeque`. Not made directly."""

    cdef Ring ring
    cdef uint64_t payload_size
    cdef uint64_t cells_offset

    cdef int attach(self) except -1:
        header = self.file_header
        capacity, payload, slots = int(header["capacity"]), int(header["payload_bytes"]), int(header["extra"])
        try:
            self.ring.cells.bits = check_cells("capacity", capacity, layout.MIN_CELLS)
            check_number("payload_bytes", payload, layout.MIN_PAYLOAD_BYTES, layout.MAX_PAYLOAD_BYTES)
            check_number("participants", slots, 1, layout.MAX_PARTICIPANTS)
        except ValueError as error:
            raise errors.LayoutMismatch(f"{self.file_path}: {error}; the file is damaged") from None
        kind = Kind(int(header["kind"]))
        places, records, ends, cells, stride, size = message_sizes(kind, capacity, payload, slots)
        files.check_size(self.file_path, size, self.bytes.shape[0])
        self.ring.lines = <RingLines *> (self.base + LINES)
        refs_init(
            &self.ring.refs, self.ring.lines, <uint64_t *> (self.base + <uint64_t> places), self.ring.cells.bits
        )
        if kind == Kind.DEQUE:
            ends_init(
                &self.ring.ends, <DequeLines *> (self.base + <uint64_t> ends),
                <uint64_t *> (self.base + <uint64_t> ends + sizeof(DequeLines)), self.ring.cells.bits,
            )
        self.records.first = <Participant *> (self.base + <uint64_t> records)
        self.records.count = slots
        self.cells_offset = cells
        self.ring.cells.base = self.base + self.cells_offset
        self.ring.cells.count = capacity
        self.ring.cells.stride = stride
        self.payload_size = payload
        return 0

    cdef int joined(self, uint64_t number) except -1:
        self.ring.owner = number
        return 0

    cdef int give_up(self) except -1:
        cdef uint64_t i, word
        cdef bint clean = True
        if self.number is None:
            return 0
        if self.number.is_mine():
            for i in range(self.ring.cells.count):
                word = load_acquire_u64(cell_word(&self.ring.cells, i))
                if word_owner(word) == self.ring.owner and word_state(word) == TAKEN:
                    clean = ring_put_back(&self.ring, i, word) == OK and clean
        # with something left undone the record stays, for whoever rescues the dead
        self.number.give_up(clean)
        return 0

    cdef int wake_all(self) except -1:
        if not self.is_readonly and self.ring.lines != NULL:
            wake_some(&self.ring.lines.items, 0x7FFFFFFF)
            wake_some(&self.ring.lines.space, 0x7FFFFFFF)
        return 0

    @property
    def capacity(self):
        """Cells: messages that may wait or be claimed at one time."""
        return self.ring.cells.count

    @property
    def payload_bytes(self):
        """Longest payload in bytes."""
        return self.payload_size

    def __len__(self):
        """Messages waiting (those claimed not counted); exact while nobody pushes or takes."""
        self.enter()
        try:
            return refs_length(&self.ring.refs) + (ends_length(&self.ring.ends) if self.ring.ends.size else 0)
        finally:
            self.leave()

    def __bool__(self):
        return True

    def cells(self):
        """Every cell, for looking.

        Returns
        -------
        numpy.ndarray, shape (capacity,), read-only
            Fields `word` (u8: version << 20 | state << 16 | owner), `length` (u4, bytes) and `payload` (u1, (payload_bytes,)).
            It changes under the reader and keeps the mapping alive.
        """
        self.enter()
        try:
            kind = np.dtype({
                "names": ["word", "length", "payload"],
                "formats": ["<u8", "<u4", ("u1", (self.payload_size,))],
                "offsets": [0, 8, RING_CELL_BYTES],
                "itemsize": self.ring.cells.stride,
            })
            view = np.asarray(self.map[self.cells_offset:]).view(kind)
            view.flags.writeable = False
            return view
        finally:
            self.leave()

    @cython.final
    cdef inline int check_payload(self, Text *text) except -1:
        if unlikely(<uint64_t> text.length > self.payload_size):
            self.refuse_payload(text.length)
        return 0

    @cython.final
    cdef int refuse_payload(self, Py_ssize_t length) except -1:
        raise errors.PayloadTooLarge(
            f"{self.file_path}: expected at most {self.payload_size} bytes, found {length}; send less, or create "
            f"it with a larger payload_bytes (up to {layout.MAX_PAYLOAD_BYTES})"
        )

    @cython.final
    cdef str full_text(self):
        return f"all {self.ring.cells.count} cells hold a message that waits or is claimed"

    cdef Code push_text(self, Text *text) except? LOST:
        raise NotImplementedError

    @cython.final
    cdef int push_waiting(self, object payload, object timeout) except -1:
        """Put one in, waiting for a free cell; raises Full at the timeout."""
        cdef Text text
        cdef Code code
        cdef int64_t deadline = deadline_of(timeout)
        cdef int stage = 0
        text_of(payload, &text)
        try:
            self.check_payload(&text)
            self.join()
            code = self.push_text(&text)
            while code == FULL:
                with nogil:
                    code = wait_for(&self.ring.lines.space, ring_has_space, &self.ring, &self.is_closed, deadline, &stage)
                if code == SIGNAL:
                    PyErr_CheckSignals()
                if code == OK or code == SIGNAL:
                    self.join()
                    code = self.push_text(&text)
                elif code == TIMEOUT:
                    raise_code(FULL, self.file_path, f"{self.full_text()}, and none came free in {timeout} s")
        finally:
            text_done(&text)
        if code != OK:
            raise_code(code, self.file_path, self.full_text())
        return 0

    @cython.final
    cdef inline Code take_mending(self, Ref *ref) except? LOST:
        cdef Code code = take_oldest(&self.ring, ref)
        return code if likely(code == OK) else self.take_mending_on(code, ref)

    @cython.final
    cdef Code take_mending_on(self, Code code, Ref *ref) except? LOST:
        if code == EMPTY and self.rescued_by(EMPTY_LOOK_MS):
            code = take_oldest(&self.ring, ref)
        return code if code != CORRUPT else self.take_after_repair(ref)

    @cython.final
    cdef Code take_after_repair(self, Ref *ref) except? LOST:
        cdef Code code = CORRUPT
        cdef int _tries
        for _tries in range(REPAIRS):
            self.repair()
            code = take_oldest(&self.ring, ref)
            if code != CORRUPT:
                break
        return code

    @cython.final
    cdef int drop_damaged(self, Ref *ref, uint32_t length) except -1:
        free_taken(&self.ring, ref)
        raise errors.TransportError(
            f"{self.file_path}: cell {ref.cell} says {length} bytes where at most {self.payload_size} fit: another process "
            "damaged it; the message was dropped"
        )

    @cython.final
    cdef inline uint32_t length_of(self, Ref *ref) noexcept:
        return load_relaxed_u32(&(<RingCell *> cell_word(&self.ring.cells, ref.cell)).length)

    @cython.final
    cdef bytes pop_taken(self, Ref *ref):
        """Copy the message of a cell just taken, and free cell and place."""
        cdef RingCell *cell = <RingCell *> cell_word(&self.ring.cells, ref.cell)
        cdef uint32_t length = self.length_of(ref)
        cdef bytes payload
        cdef bint copied = False
        if unlikely(length > self.payload_size):
            self.drop_damaged(ref, length)
        try:
            payload = PyBytes_FromStringAndSize(<const char *> cell + sizeof(RingCell), length)
            copied = True
        finally:
            # not `except`, for which every call would save what is being handled by its callers
            if not copied:
                ring_put_back(&self.ring, ref.cell, ref.word)
                pass_taken(&self.ring, ref)
        free_taken(&self.ring, ref)
        return payload

    @cython.final
    cdef int take_waiting(self, Ref *ref, object timeout) except -1:
        """Take a cell, waiting for one; raises Empty at the timeout."""
        cdef Code code
        cdef int64_t deadline = deadline_of(timeout)
        cdef int stage = 0
        self.join()
        code = self.take_mending(ref)
        if code == EMPTY:
            while code == EMPTY:
                with nogil:
                    code = self.wait_for_more(&self.ring.lines.items, has_items, &self.ring, deadline, &stage)
                if code == SIGNAL:
                    PyErr_CheckSignals()
                    self.join()
                if code == OK or code == CORRUPT or code == SIGNAL:
                    code = self.take_mending(ref)
                elif code == TIMEOUT:
                    raise_code(EMPTY, self.file_path, f"no message came in {timeout} s")
        if code != OK:
            raise_code(code, self.file_path, "")
        self.end_gap(0)
        return 0

    @cython.final
    cdef list take_many(self, object n):
        """Take up to `n` messages that wait now, oldest first."""
        cdef Ref refs[BATCH]
        cdef Py_ssize_t wanted = n
        cdef int here, taken
        cdef list payloads = []
        if wanted < 0:
            raise ValueError(f"n: expected 0 or more, found {n}")
        self.enter()
        try:
            self.join()
            while wanted > 0:
                here = min(wanted, BATCH)
                taken = self.take_batch(refs, here, not payloads)
                self.copy_batch(refs, taken, payloads)
                wanted -= taken
                if taken < here:
                    break
            self.observe(OP_POP, not payloads, <uint64_t> len(payloads))
            return payloads
        finally:
            self.leave()

    @cython.final
    cdef int take_batch(self, Ref *refs, int wanted, bint is_first) except -1:
        """Take up to `wanted` cells and pass their places; how many. Where `is_first`, errors are raised."""
        cdef Code code
        cdef int n = 0
        prefetch_oldest(&self.ring, wanted)
        while n < wanted:
            code = take_oldest(&self.ring, &refs[n])
            if unlikely(code != OK):
                if n == 0 and is_first:
                    code = self.take_mending_on(code, &refs[n])
                    if code == CORRUPT:
                        raise_code(code, self.file_path, "")
                if code != OK:
                    break
            if unlikely(self.length_of(&refs[n]) > self.payload_size):
                if n == 0 and is_first:
                    self.drop_damaged(&refs[n], self.length_of(&refs[n]))
                # a later call meets the damaged one alone, so that its error costs nothing that was popped
                ring_put_back(&self.ring, refs[n].cell, refs[n].word)
                pass_taken(&self.ring, &refs[n])
                break
            pass_taken(&self.ring, &refs[n])
            n += 1
        return n

    @cython.final
    cdef int copy_batch(self, Ref *refs, int n, list payloads) except -1:
        """Append the messages of cells just taken, and free these."""
        cdef RingCell *cell
        cdef int copied = 0
        cdef int i
        try:
            while copied < n:
                cell = <RingCell *> cell_word(&self.ring.cells, refs[copied].cell)
                payloads.append(PyBytes_FromStringAndSize(
                    <const char *> cell + sizeof(RingCell), min(<uint64_t> load_relaxed_u32(&cell.length), self.payload_size)
                ))
                cell_free_owned(&self.ring.cells, refs[copied].cell, refs[copied].word)
                copied += 1
        except MemoryError:
            # what was not copied waits again; what was belongs to the caller
            for i in range(copied, n):
                ring_put_back(&self.ring, refs[i].cell, refs[i].word)
            if not payloads:
                raise
        finally:
            if copied:
                store_relaxed_u64(&self.ring.hint, refs[0].cell)
                wake_many(&self.ring.lines.space, copied)
        return 0

    def try_claim(self):
        """Claim the oldest message: it stays in its cell, this process's own, until the claim is ended.

        Returns
        -------
        Claim

        Raises
        ------
        Empty
        """
        cdef Ref ref
        cdef Code code
        self.enter()
        try:
            self.join()
            code = self.take_mending(&ref)
            if code == OK:
                return self.claim_taken(&ref)
            self.observe(OP_CLAIM, 1, 0)
            raise_code(code, self.file_path, "no message waits")
        finally:
            self.leave()

    def claim(self, timeout=None):
        """Claim the oldest message, waiting for one (as `pop`)."""
        cdef Ref ref
        self.enter()
        try:
            self.take_waiting(&ref, timeout)
            return self.claim_taken(&ref)
        finally:
            self.leave()

    @cython.final
    cdef RingClaim claim_taken(self, Ref *ref):
        cdef RingCell *cell = <RingCell *> cell_word(&self.ring.cells, ref.cell)
        cdef RingClaim claim
        # read once: another process may change it between the check and a use
        cdef uint32_t length = load_relaxed_u32(&cell.length)
        if length > self.payload_size:
            self.drop_damaged(ref, length)
        pass_taken(&self.ring, ref)
        claim = RingClaim.__new__(RingClaim)
        claim.holder = self
        claim.cell = ref.cell
        claim.word = ref.word
        claim.data = <uint8_t *> cell + sizeof(RingCell)
        claim.length = length
        claim.generation = self.generation
        private_set(&claim.is_over, 0)
        self.observe(OP_CLAIM, 0, 1)
        return claim

    def repair(self):
        """Make hints, places and cells agree again, and publish every waiting message that no place leads to.

        For a file whose bytes another process has damaged; calls that meet a contradiction run it themselves. Others may
        push and pop meanwhile. Messages keep their contents; their order is that of the cells where places were lost.

        Returns
        -------
        int
            How many messages were found again.

        """
        cdef uint64_t found
        cdef uint8_t[::1] seen
        self.enter()
        try:
            self.join()
            seen = np.zeros(self.ring.cells.count, np.uint8)
            with nogil:
                found = ring_repair(&self.ring, self.records.count, &seen[0])
            return found
        finally:
            self.leave()

    def rescue(self):
        """Move on what dead participants have left: messages they had claimed wait again, their cells and slots are free.

        `open`, a push that finds no free cell, and waits that last do it by themselves. Others may push, pop and rescue
        meanwhile. A message that a dead process was popping comes again.

        Returns
        -------
        int
            How many dead participants there were.
        """
        self.enter()
        try:
            self.join()
            return self.rescue_dead()
        finally:
            self.leave()

    cdef uint64_t rescue_dead(self) except? 0xFFFFFFFF:
        cdef uint64_t rescued
        cdef int64_t lock_base = self.bytes.shape[0]
        cdef uint8_t[::1] seen = np.zeros(self.ring.cells.count, np.uint8)
        with nogil:
            rescued = ring_rescue_dead(&self.ring, &self.records, self.fd, lock_base, &seen[0])
        return rescued

    cdef int rescue_as(self, uint64_t slot, uint64_t status) except -1:
        cdef Ring ring = self.ring
        cdef uint8_t[::1] seen = np.zeros(ring.cells.count, np.uint8)
        ring.owner = slot + 1
        with nogil:
            ring_rescue(&ring, &self.records, slot, status, &seen[0])
        return 0


@cython.final
cdef class RingClaim(Claim):
    """A message claimed from a ring or a deque used alone."""

    cdef int end(self, bint back) except -1:
        cdef SharedMessages ring = <SharedMessages> self.holder
        cdef Code code
        self.check()
        ring.enter()
        try:
            self.begin_end()
            if back:
                code = ring_put_back(&ring.ring, self.cell, self.word)
                if code == LOST:
                    raise_code(LOST, ring.file_path, "")
                if code != OK:
                    ring.repair()
            else:
                # C4: pairs with C1
                if cell_free_if(&ring.ring.cells, self.cell, self.word):
                    store_relaxed_u64(&ring.ring.hint, self.cell)
                    wake_one(&ring.ring.lines.space)
                else:
                    raise_code(LOST, ring.file_path, "")
        finally:
            ring.leave()
        return 0

    def started(self):
        """Nothing is counted in a structure used alone; only that the claim is still held is checked."""
        self.check()
        self.holder.enter()
        self.holder.leave()

    def reply(self, payload):
        """Not from a structure used alone: it has no side for results.

        Raises
        ------
        UnsupportedTransportFamily
        """
        self.check()
        raise errors.UnsupportedTransportFamily(
            f"{self.holder.file_path}: there is no side for results here; push the reply into another ring, then ack()"
        )

    def ack(self):
        """Done: the cell is free again.

        Raises
        ------
        ValueError
            The claim is over, its handle closed, or it belongs to a parent process.
        BufferError
            A view of the payload is still in use.
        """
        self.end(False)

    def release(self):
        """Put the message back: at the end of a ring; in a deque before all that wait, except for other put-backs.

        Raises
        ------
        ValueError, BufferError
            As `ack`.
        """
        self.end(True)

    def __del__(self):
        if (
            not private_get(&self.is_over) and self.generation == fork_generation()
            and not private_get(&self.holder.is_closed)
        ):
            # nobody ends this claim any more; what still looks at the payload keeps the mapping, not the message
            self.view = self.shown = None
            self.end(True)
