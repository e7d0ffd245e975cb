# SharedRing: cells and references in one file (algorithms: _cells.pxd, _ring.pxd).

cdef object RING_CELL_BYTES = layout.RING_CELL.itemsize

cdef enum:
    REPAIRS = 8     # before a call gives up: others may damage or empty the places again
    FULL_LOOK_MS = 20       # a call that finds the ring full looks for the dead, but not more often
    EMPTY_LOOK_MS = 500     # one that finds it empty
    BATCH = 32      # messages written (or taken) before the first of them is published (or freed)


@cython.no_gc_clear
cdef class SharedRing(Mapped):
    """A bounded queue of byte strings in one mapped file, for many producers and consumers in many processes.

    Made by `create`, `open` or `open_or_create`. First in, first out; a message that was released goes to the end.
    Every call may be made from any thread; none of the `try_` calls blocks. A handle takes a number at its first push, pop
    or claim. A process that dies leaves nobody waiting: what it had pushed is there, what it was pushing is there whole or
    not at all.

    Source: owned cells and references, docs/design/cells.md.
    """

    cdef Ring ring
    cdef Records records
    cdef Number number
    cdef int64_t generation
    cdef uint64_t payload_size
    cdef uint64_t cells_offset
    cdef uint64_t no_epoch
    cdef int64_t rescued_ns     # when the dead were last looked for

    def __init__(self):
        raise TypeError("use SharedRing.create(path, capacity), SharedRing.open(path) or SharedRing.open_or_create(path, capacity)")

    @staticmethod
    def _sizes(capacity, payload_bytes, participants):
        """Offsets of places, records and cells, stride of a cell, and size of the file (bytes)."""
        places = LINES + layout.RING_LINES.itemsize
        records = places + 2 * capacity * 8
        cells = layout.align(records + participants * layout.PARTICIPANT.itemsize, layout.HOT_LINE)
        stride = layout.align(RING_CELL_BYTES + payload_bytes, layout.LINE)
        return places, records, cells, stride, cells + capacity * stride

    @classmethod
    def create(cls, path, capacity, *, payload_bytes=56, mode=0o600):
        """Create the file and open it.

        Parameters
        ----------
        path : str, bytes or os.PathLike
        capacity : int
            Cells, that is messages waiting or claimed at one time: a power of two from 2 to 2**20.
        payload_bytes : int
            Longest payload in bytes, from 8 to 4088.
        mode : int
            Permission bits, kept under any umask; a group's bits admit other users.

        Raises
        ------
        ValueError
            A number outside its limits.
        FileExistsError
            The name is taken; that file is untouched.
        OSError
            No space, or no permission; nothing is left behind.
        """
        check_cells("capacity", capacity, layout.MIN_CELLS)
        check_number("payload_bytes", payload_bytes, layout.MIN_PAYLOAD_BYTES, layout.MAX_PAYLOAD_BYTES)
        _, _, _, stride, size = SharedRing._sizes(capacity, payload_bytes, layout.RING_PARTICIPANTS)
        files.create(
            path, Kind.RING, size, capacity=capacity, cell_bytes=stride, payload_bytes=payload_bytes,
            extra=layout.RING_PARTICIPANTS, mode=mode,
        )
        return cls.open(path)

    @classmethod
    def open(cls, path, readonly=False):
        """Open an existing file.

        Raises
        ------
        FileNotFoundError, PermissionError
        LayoutMismatch
            Not a ring of this layout version, or cut, or damaged.
        """
        cdef SharedRing ring = cls.__new__(cls)
        ring.map_file(path, Kind.RING, readonly)
        try:
            ring.attach()
            if not readonly and ring.somebody_is_dead():
                ring.rescue()
        except BaseException:
            ring.close()
            raise
        return ring

    @classmethod
    def open_or_create(cls, path, capacity, *, payload_bytes=56, mode=0o600):
        """Open the file, or create it where there is none; any number of processes may do so at once.

        Raises
        ------
        LayoutMismatch
            It exists with another capacity or payload size. Otherwise as `create` and `open`.
        """
        check_cells("capacity", capacity, layout.MIN_CELLS)
        check_number("payload_bytes", payload_bytes, layout.MIN_PAYLOAD_BYTES, layout.MAX_PAYLOAD_BYTES)
        try:
            ring = cls.open(path)
        except FileNotFoundError:
            try:
                return cls.create(path, capacity, payload_bytes=payload_bytes, mode=mode)
            except FileExistsError:
                ring = cls.open(path)
        if (ring.capacity, ring.payload_bytes) != (capacity, payload_bytes):
            found = (ring.capacity, ring.payload_bytes)
            ring.close()
            raise errors.LayoutMismatch(
                f"{os.fsdecode(path)}: expected capacity {capacity} and payload_bytes {payload_bytes}, found {found[0]} and "
                f"{found[1]}; open it with open(), or choose another path"
            )
        return ring

    cdef int attach(self) except -1:
        header = self.file_header
        capacity, payload, slots = int(header["capacity"]), int(header["payload_bytes"]), int(header["extra"])
        try:
            self.ring.cells.bits = check_cells("capacity", capacity, layout.MIN_CELLS)
            check_number("payload_bytes", payload, layout.MIN_PAYLOAD_BYTES, layout.MAX_PAYLOAD_BYTES)
            check_number("participants", slots, 1, layout.MAX_PARTICIPANTS)
        except ValueError as error:
            raise errors.LayoutMismatch(f"{self.file_path}: {error}; the file is damaged") from None
        places, records, cells, stride, size = SharedRing._sizes(capacity, payload, slots)
        files.check_size(self.file_path, size, self.bytes.shape[0])
        self.ring.lines = <RingLines *> (self.base + LINES)
        refs_init(
            &self.ring.refs, self.ring.lines, <uint64_t *> (self.base + <uint64_t> places), self.ring.cells.bits
        )
        self.records.first = <Participant *> (self.base + <uint64_t> records)
        self.records.count = slots
        self.cells_offset = cells
        self.ring.cells.base = self.base + self.cells_offset
        self.ring.cells.count = capacity
        self.ring.cells.stride = stride
        self.payload_size = payload
        return 0

    @cython.final
    cdef inline int join(self) except -1:
        """Have a number of this process's own; nearly always it is there already."""
        if self.ring.owner != 0 and self.generation == fork_generation() and registration_is_good(&self.number.kept):
            return 0
        return self.join_anew()

    @cython.final
    cdef int join_anew(self) except -1:
        self.refuse_readonly()
        if self.number is not None and not private_get(&self.number.kept.inherited):
            self.number.refuse(self.file_path)
            return 0
        cdef Number taken = None
        while taken is None:
            try:
                taken = take_number(
                    &self.records, self.fd, <int64_t> self.bytes.shape[0], os.getpid(), Role.WORKER, &self.no_epoch, False,
                    self.file_path,
                )
            except errors.TableFull:
                if not self.make_room():
                    raise
        with cython.critical_section(self):
            if self.number is not None and self.number.is_mine():
                # another thread was faster
                taken.give_up(True)
            else:
                self.number = taken
                self.generation = fork_generation()
                self.ring.owner = taken.slot + 1
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
        """Messages waiting (those claimed not counted); exact while nobody pushes or pops."""
        self.enter()
        try:
            return refs_length(&self.ring.refs)
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

    # ---- push ----

    @cython.final
    cdef int check_payload(self, Text *text) except -1:
        if <uint64_t> text.length > self.payload_size:
            raise errors.PayloadTooLarge(
                f"{self.file_path}: expected at most {self.payload_size} bytes, found {text.length}; send less, or create the "
                f"ring with a larger payload_bytes (up to {layout.MAX_PAYLOAD_BYTES})"
            )
        return 0

    @cython.final
    cdef inline Code push_text(self, Text *text) except? LOST:
        cdef Filled filled
        cdef Code code = ring_fill(&self.ring, text.data, text.length, &filled)
        if code == FULL and self.rescued_by(FULL_LOOK_MS):
            code = ring_fill(&self.ring, text.data, text.length, &filled)
        if code != OK:
            return code
        code = ring_publish(&self.ring, &filled)
        if code != OK:
            code = self.publish_after_repair(&filled)
        wake_one(&self.ring.lines.items)
        return code

    @cython.final
    cdef Code publish_after_repair(self, Filled *filled) except? LOST:
        """Where that does not help the message is withdrawn."""
        cdef Code code = CORRUPT
        cdef int _tries
        try:
            for _tries in range(REPAIRS):
                self.repair()
                code = ring_publish(&self.ring, filled)
                if code == OK:
                    break
        finally:
            if code != OK and not ring_withdraw(&self.ring, filled):
                code = OK
        return code

    @cython.final
    cdef str full_text(self):
        return f"all {self.ring.cells.count} cells hold a message that waits or is claimed"

    def try_push(self, payload, /):
        """Append one message.

        Parameters
        ----------
        payload : contiguous buffer, at most `payload_bytes` long
            Given back at its exact length.

        Raises
        ------
        Full, PayloadTooLarge
        """
        cdef Text text
        cdef Code code
        self.enter()
        try:
            text_of(payload, &text)
            try:
                self.check_payload(&text)
                self.join()
                code = self.push_text(&text)
            finally:
                text_done(&text)
            if code != OK:
                raise_code(code, self.file_path, self.full_text())
        finally:
            self.leave()

    def push(self, payload, timeout=None):
        """Append one message, waiting for a free cell.

        Parameters
        ----------
        payload : contiguous buffer, at most `payload_bytes` long
        timeout : float, optional
            Seconds on the monotonic clock; None waits for ever, 0 does not wait.

        Raises
        ------
        Full
            At the timeout.
        PayloadTooLarge
        ValueError
            The handle is closed, or was closed while this waited.
        """
        cdef Text text
        cdef Code code
        cdef int64_t deadline = deadline_of(timeout)
        cdef int stage = 0
        self.enter()
        try:
            text_of(payload, &text)
            try:
                self.check_payload(&text)
                self.join()
                code = self.push_text(&text)
                while code == FULL:
                    with nogil:
                        code = wait_for(
                            &self.ring.lines.space, ring_has_space, &self.ring, &self.is_closed, deadline, &stage
                        )
                    if code == SIGNAL:
                        PyErr_CheckSignals()
                        self.join()
                    if code == OK or code == SIGNAL:
                        code = self.push_text(&text)
                    elif code == TIMEOUT:
                        raise_code(FULL, self.file_path, f"{self.full_text()}, and none came free in {timeout} s")
            finally:
                text_done(&text)
            if code != OK:
                raise_code(code, self.file_path, self.full_text())
        finally:
            self.leave()

    def push_many(self, payloads):
        """Append messages in order until no cell is free.

        Parameters
        ----------
        payloads : sequence of contiguous buffers
            All are checked before the first goes in.

        Returns
        -------
        int
            How many went in, from the front.

        Raises
        ------
        PayloadTooLarge, TypeError
            Nothing went in; unless a payload was changed during the call, then those before it did.
        """
        cdef Text text
        cdef Filled filled[BATCH]
        cdef Py_ssize_t pushed = 0
        cdef int n, wanted
        # a list could be changed meanwhile
        cdef tuple items = tuple(payloads)
        self.enter()
        try:
            for payload in items:
                text_of(payload, &text)
                try:
                    self.check_payload(&text)
                finally:
                    text_done(&text)
            self.join()
            while pushed < len(items):
                wanted = min(len(items) - pushed, BATCH)
                n = self.fill_batch(items, pushed, wanted, filled)
                self.publish_batch(filled, n)
                pushed += n
                if n < wanted:
                    break
            return pushed
        finally:
            self.leave()

    @cython.final
    cdef int fill_batch(self, tuple items, Py_ssize_t first, int wanted, Filled *filled) except -1:
        """Write up to `wanted` messages into cells of their own; how many found one."""
        cdef Text text
        cdef Code code
        cdef int n
        for n in range(wanted):
            cell_prefetch(&self.ring.cells, self.ring.hint + <uint64_t> n)
        n = 0
        try:
            while n < wanted:
                text_of(items[first + n], &text)
                try:
                    # again: a buffer may have grown since, in another thread
                    self.check_payload(&text)
                    code = ring_fill(&self.ring, text.data, text.length, &filled[n])
                finally:
                    text_done(&text)
                if code != OK:
                    if self.rescued_by(FULL_LOOK_MS):
                        continue
                    break
                n += 1
        except BaseException:
            self.publish_batch(filled, n)
            raise
        return n

    @cython.final
    cdef int publish_batch(self, Filled *filled, int n) except -1:
        cdef int published = 0
        cdef int i
        cdef Code code = OK
        try:
            while published < n:
                code = ring_publish(&self.ring, &filled[published])
                if code != OK:
                    code = self.publish_after_repair(&filled[published])
                    if code != OK:
                        break
                published += 1
        finally:
            for i in range(published + (code != OK), n):
                ring_withdraw(&self.ring, &filled[i])
            wake_many(&self.ring.lines.items, published)
        if code != OK:
            raise_code(code, self.file_path, "")
        return 0

    # ---- pop and claim ----

    @cython.final
    cdef inline Code take_mending(self, Ref *ref) except? LOST:
        cdef Code code = ring_take(&self.ring, ref)
        if code == OK:
            return code
        if code == EMPTY and self.rescued_by(EMPTY_LOOK_MS):
            code = ring_take(&self.ring, ref)
        return code if code != CORRUPT else self.take_after_repair(ref)

    @cython.final
    cdef Code take_after_repair(self, Ref *ref) except? LOST:
        cdef Code code = CORRUPT
        cdef int _tries
        for _tries in range(REPAIRS):
            self.repair()
            code = ring_take(&self.ring, ref)
            if code != CORRUPT:
                break
        return code

    @cython.final
    cdef int drop_damaged(self, Ref *ref, uint32_t length) except -1:
        ring_free(&self.ring, ref)
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
        if length > self.payload_size:
            self.drop_damaged(ref, length)
        try:
            payload = PyBytes_FromStringAndSize(<const char *> cell + sizeof(RingCell), length)
        except MemoryError:
            ring_put_back(&self.ring, ref.cell, ref.word)
            refs_pass(&self.ring.refs, ref)
            raise
        ring_free(&self.ring, ref)
        return payload

    def try_pop(self):
        """Take the oldest message.

        Returns
        -------
        bytes

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
            if code != OK:
                raise_code(code, self.file_path, "no message waits")
            return self.pop_taken(&ref)
        finally:
            self.leave()

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
                    code = wait_for(
                        &self.ring.lines.items, ring_has_items, &self.ring, &self.is_closed, deadline, &stage
                    )
                if code == SIGNAL:
                    PyErr_CheckSignals()
                    self.join()
                if code == OK or code == CORRUPT or code == SIGNAL:
                    code = self.take_mending(ref)
                elif code == TIMEOUT:
                    raise_code(EMPTY, self.file_path, f"no message came in {timeout} s")
        if code != OK:
            raise_code(code, self.file_path, "")
        return 0

    def pop(self, timeout=None):
        """Take the oldest message, waiting for one.

        Parameters
        ----------
        timeout : float, optional
            Seconds on the monotonic clock; None waits for ever, 0 does not wait.

        Returns
        -------
        bytes

        Raises
        ------
        Empty
            At the timeout.
        ValueError
            The handle is closed, or was closed while this waited.
        """
        cdef Ref ref
        self.enter()
        try:
            self.take_waiting(&ref, timeout)
            return self.pop_taken(&ref)
        finally:
            self.leave()

    def pop_many(self, n):
        """Take up to `n` messages that wait now, oldest first.

        Returns
        -------
        list of bytes
            Empty where none waits.
        """
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
            return payloads
        finally:
            self.leave()

    @cython.final
    cdef int take_batch(self, Ref *refs, int wanted, bint is_first) except -1:
        """Take up to `wanted` cells and pass their places; how many. Where `is_first`, errors are raised."""
        cdef Code code
        cdef int n = 0
        refs_prefetch(&self.ring.refs, &self.ring.cells, wanted)
        while n < wanted:
            if n == 0 and is_first:
                code = self.take_mending(&refs[n])
                if code == CORRUPT:
                    raise_code(code, self.file_path, "")
            else:
                code = ring_take(&self.ring, &refs[n])
            if code != OK:
                break
            if self.length_of(&refs[n]) > self.payload_size:
                if n == 0 and is_first:
                    self.drop_damaged(&refs[n], self.length_of(&refs[n]))
                # a later call meets the damaged one alone, so that its error costs nothing that was popped
                ring_put_back(&self.ring, refs[n].cell, refs[n].word)
                refs_pass(&self.ring.refs, &refs[n])
                break
            refs_pass(&self.ring.refs, &refs[n])
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
            # to the end of the ring, with what was not copied; what was belongs to the caller
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
        refs_pass(&self.ring.refs, ref)
        claim = RingClaim.__new__(RingClaim)
        claim.holder = self
        claim.cell = ref.cell
        claim.word = ref.word
        claim.data = <uint8_t *> cell + sizeof(RingCell)
        claim.length = length
        claim.generation = self.generation
        private_set(&claim.is_over, 0)
        return claim

    def repair(self):
        """Make hints, places and cells agree again, and publish every waiting message that no place leads to.

        For a ring whose bytes another process has damaged; calls that meet a contradiction run it themselves. Others may
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

    @cython.final
    cdef uint64_t rescue_dead(self) except? 0xFFFFFFFF:
        cdef uint64_t rescued
        cdef int64_t lock_base = self.bytes.shape[0]
        cdef uint8_t[::1] seen = np.zeros(self.ring.cells.count, np.uint8)
        with nogil:
            rescued = ring_rescue_dead(&self.ring, &self.records, self.fd, lock_base, &seen[0])
        return rescued

    @cython.final
    cdef bint somebody_is_dead(self) noexcept:
        cdef uint64_t slot, status
        for slot in range(self.records.count):
            if slot + 1 != self.ring.owner and is_dead(&self.records, self.fd, self.bytes.shape[0], slot, &status):
                return True
        return False

    @cython.final
    cdef bint rescued_by(self, int64_t period_ms) except -1:
        """Rescue, unless that was looked for within the period. True where somebody was dead."""
        cdef int64_t now = monotonic_ns()
        if now - self.rescued_ns < period_ms * 1000000:
            return False
        self.rescued_ns = now
        return self.somebody_is_dead() and self.rescue_dead() > 0

    @cython.final
    cdef bint make_room(self) except -1:
        """Where every number is taken: rescue in the name of a dead one, whose byte this process locks meanwhile."""
        cdef Ring ring = self.ring
        cdef Number number
        cdef uint64_t slot, status
        cdef uint8_t[::1] seen
        for slot in range(self.records.count):
            if not is_dead(&self.records, self.fd, self.bytes.shape[0], slot, &status):
                continue
            number = Number()
            if registration_lock(&number.kept, self.fd, <int64_t> self.bytes.shape[0] + <int64_t> slot) != 0:
                continue
            if not death_of_mine(&self.records, slot, &status):
                continue
            ring.owner = slot + 1
            seen = np.zeros(ring.cells.count, np.uint8)
            with nogil:
                ring_rescue(&ring, &self.records, slot, status, &seen[0])
            return status_state(load_acquire_u64(&self.records.first[slot].status)) == SLOT_FREE
        return False


@cython.final
cdef class RingClaim(Claim):
    """A message claimed from a ring used alone."""

    cdef int end(self, bint back) except -1:
        cdef SharedRing ring = <SharedRing> self.holder
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
        """Nothing is counted in a ring used alone; only that the claim is still held is checked."""
        self.check()
        self.holder.enter()
        self.holder.leave()

    def reply(self, payload):
        """Not from a ring used alone: it has no side for results.

        Raises
        ------
        UnsupportedTransportFamily
        """
        self.check()
        raise errors.UnsupportedTransportFamily(
            f"{self.holder.file_path}: a ring has no side for results; push the reply into another ring, then ack()"
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
        """Put the message back, at the end of the ring.

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
