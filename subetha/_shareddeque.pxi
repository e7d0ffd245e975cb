# SharedDeque: one owner, any number of thieves (the rest: _messages.pxi).


@cython.no_gc_clear
cdef class SharedDeque(SharedMessages):
    """A bounded deque of byte strings in one mapped file: its owner pushes and pops, any process steals.

    Made by `create`, `open`, `open_or_create`, or for a thief by `open_as_thief`. The owner takes what it pushed last, everyone
    else what was pushed first; what was put back goes before both. Every call may be made from any thread, of the owner too.
    No call waits unless it is given a timeout. A process that dies leaves nobody waiting, and what it had in hand waits again;
    a batch that it was pushing is there whole or not at all.

    A handle becomes the owner by `create`, or at its first push or pop, where nobody is: the last owner has closed its handle, or
    is dead (and what it had in hand is moved on first).

    Source: D. Chase, Y. Lev, Dynamic circular work-stealing deque (2005), over owned cells: docs/design/cells.md.
    """

    cdef bint is_thief
    cdef uint64_t mine          # what the owner's word is while this handle is the owner

    def __init__(self):
        raise TypeError(
            "use SharedDeque.create(path, capacity), SharedDeque.open(path), SharedDeque.open_or_create(path, capacity) or "
            "SharedDeque.open_as_thief(path)"
        )

    @classmethod
    def create(cls, path, capacity, payload_bytes=56, *, mode=0o600):
        """Create the file and open it, as its owner (unless another process was so fast as to open it and push before).

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
        cdef SharedDeque made
        create_messages(path, Kind.DEQUE, capacity, payload_bytes, mode)
        made = cls.open(path)
        try:
            made.own()
        except errors.NotOwner:
            # somebody has opened it and pushed already; this handle is as any other that comes later
            return made
        except BaseException:
            made.close()
            raise
        return made

    @classmethod
    def open(cls, path, readonly=False):
        """Open an existing file; the handle may push and pop where nobody else owns the deque.

        Raises
        ------
        FileNotFoundError, PermissionError
        LayoutMismatch
            Not a deque of this layout version, or cut, or damaged.
        """
        return open_messages(cls, path, Kind.DEQUE, readonly)

    @classmethod
    def open_as_thief(cls, path):
        """Open an existing file to steal and claim from; a push or pop of this handle raises NotOwner.

        Raises
        ------
        FileNotFoundError, PermissionError, LayoutMismatch
            As `open`.
        """
        cdef SharedDeque made = open_messages(cls, path, Kind.DEQUE, False)
        made.is_thief = True
        return made

    @classmethod
    def open_or_create(cls, path, capacity, payload_bytes=56, *, mode=0o600):
        """Open the file, or create it where there is none; any number of processes may do so at once.

        Raises
        ------
        LayoutMismatch
            It exists with another capacity or payload size. Otherwise as `create` and `open`.
        """
        return open_or_create_messages(cls, path, capacity, payload_bytes, mode)

    # ---- the owner ----

    cdef int joined(self, uint64_t number) except -1:
        SharedMessages.joined(self, number)
        self.mine = status_incarnation(self.number.status) << 16 | number
        return 0

    @cython.final
    cdef inline int be_owner(self) except -1:
        self.join()
        if self.is_thief or not deque_is_owned(&self.ring, self.mine):
            self.take_over()
        return 0

    @cython.final
    cdef int take_over(self) except -1:
        """Become the owner where nobody is, after the rescue of a dead one; else NotOwner."""
        cdef uint64_t seen
        cdef bint done
        cdef int _tries
        for _tries in range(REPAIRS):
            # O1: pairs with O2
            seen = load_acquire_u64(self.ring.ends.owner)
            if self.is_thief:
                raise errors.NotOwner(
                    f"{self.file_path}: a thief's handle neither pushes nor pops; {self.owner_text(seen)}"
                )
            if self.owner_is_there(seen):
                if self.owner_lives(seen):
                    raise errors.NotOwner(
                        f"{self.file_path}: this handle is not the owner; {self.owner_text(seen)}; steal(), or push into a deque "
                        "of your own"
                    )
                self.rescue_dead()
                if self.owner_is_there(seen):
                    # its rescue could not end
                    continue
            # in one go for other threads of this handle: who sees itself as the owner finds top and bottom settled
            with cython.critical_section(self):
                done = deque_is_owned(&self.ring, self.mine) or deque_own(&self.ring, seen, self.mine)
            if done:
                return 0
        raise errors.NotOwner(
            f"{self.file_path}: what the last owner left could not be moved on yet, since others are at it; "
            f"{self.owner_text(seen)}; try again"
        )

    @cython.final
    cdef bint owner_is_there(self, uint64_t owner) noexcept:
        """Is the participant that an owner's word names alive, or dead and not rescued to the end?"""
        cdef uint64_t number = owner & 0xFFFF
        cdef uint64_t status
        if number == 0 or number > self.records.count:
            return False
        status = load_seq_cst_u64(&self.records.first[number - 1].status)
        # of whichever incarnation: who rescues in the dead one's own name has moved it on
        if status_state(status) == SLOT_DYING:
            return True
        return status_state(status) != SLOT_FREE and (status_incarnation(status) ^ owner >> 16) << 16 == 0

    @cython.final
    cdef bint owner_lives(self, uint64_t owner) noexcept:
        """Of one that is there."""
        cdef uint64_t status
        if is_dead(&self.records, self.fd, self.bytes.shape[0], (owner & 0xFFFF) - 1, &status):
            return False
        return status_state(status) == SLOT_USED and self.owner_is_there(owner)

    @cython.final
    cdef str owner_text(self, uint64_t owner):
        if not self.owner_is_there(owner):
            return "nobody owns it at the moment; open it with open() to push"
        number = owner & 0xFFFF
        pid = load_relaxed_u32(&self.records.first[number - 1].pid)
        if not self.owner_lives(owner):
            return f"its owner, participant {number} (process {pid}), is dead; open it with open() to take its place"
        return f"its owner is participant {number} (process {pid})"

    def own(self):
        """Become the owner now, and not at the first push or pop.

        Raises
        ------
        NotOwner
            Somebody else is, and lives; or this is a thief's handle.
        """
        self.enter()
        try:
            self.be_owner()
        finally:
            self.leave()

    cdef int give_up(self) except -1:
        if self.number is not None and self.number.is_mine():
            deque_disown(&self.ring, self.mine)
        return SharedMessages.give_up(self)

    # ---- push ----

    @cython.final
    cdef inline Code push_now(self, Text *text) except? LOST:
        cdef Filled filled
        cdef Code code = self.write(text, &filled)
        if likely(code == OK):
            self.show(&filled, 1)
        self.observe(OP_PUSH, code != OK, code == OK)
        return code

    cdef Code push_text(self, Text *text) except? LOST:
        return self.push_now(text)

    @cython.final
    cdef inline Code write(self, Text *text, Filled *filled) except? LOST:
        cdef Code code = ring_write(&self.ring, text.data, text.length, filled)
        if unlikely(code == FULL) and self.rescued_by(FULL_LOOK_MS):
            code = ring_write(&self.ring, text.data, text.length, filled)
        return code

    @cython.final
    cdef inline int show(self, const Filled *filled, Py_ssize_t n) except -1:
        """Show messages that were written, all at once; where this is not the owner any more they are withdrawn."""
        cdef bint done
        with cython.critical_section(self):
            done = deque_push(&self.ring, filled, <uint64_t> n, self.mine)
        if unlikely(not done):
            self.show_as_owner(filled, n)
        wake_up_to(&self.ring.lines.items, <int> n)
        return 0

    @cython.final
    cdef int show_as_owner(self, const Filled *filled, Py_ssize_t n) except -1:
        """`show`, of who has to become the owner before that."""
        cdef bint done = False
        cdef int _tries
        try:
            for _tries in range(REPAIRS):
                self.be_owner()
                with cython.critical_section(self):
                    done = deque_push(&self.ring, filled, <uint64_t> n, self.mine)
                if done:
                    break
        finally:
            if not done:
                self.withdraw(filled, n)
        if not done:
            raise_code(CORRUPT, self.file_path, "")
        return 0

    @cython.final
    cdef int withdraw(self, const Filled *filled, Py_ssize_t n) except -1:
        cdef Py_ssize_t i
        for i in range(n):
            # by CAS: where this process's lock is lost others may have taken it for dead, and have the cell
            # C4: pairs with C1
            cell_free_if(&self.ring.cells, filled[i].cell, filled[i].word)
        wake_up_to(&self.ring.lines.space, <int> n)
        return 0

    def push(self, payload, timeout=0):
        """Put one message at the owner's end.

        Parameters
        ----------
        payload : contiguous buffer, at most `payload_bytes` long
            Given back at its exact length.
        timeout : float, optional
            Seconds on the monotonic clock to wait for a free cell; 0 does not wait, None waits for ever.

        Raises
        ------
        Full
            Every cell holds a message; or still does at the timeout.
        NotOwner, PayloadTooLarge
        ValueError
            The handle is closed, or was closed while this waited.
        """
        cdef Text text
        cdef Code code
        self.enter()
        try:
            self.be_owner()
            if timeout is not ZERO:
                self.push_waiting(payload, timeout)
                return
            text_of(payload, &text)
            try:
                self.check_payload(&text)
                code = self.push_now(&text)
            finally:
                text_done(&text)
            if code != OK:
                raise_code(code, self.file_path, self.full_text())
        finally:
            self.leave()

    def try_push(self, payload, /):
        """`push` without waiting: the name that every transport has."""
        self.push(payload)

    def push_batch(self, items):
        """Put several messages at the owner's end, all of them at once: the last one is the newest.

        Nobody sees a part of the batch, also if this process dies on the way: then none of it is there.

        Parameters
        ----------
        items : iterable of contiguous buffers

        Returns
        -------
        int
            How many there were.

        Raises
        ------
        Full
            Not enough cells are free; nothing went in.
        NotOwner, PayloadTooLarge, TypeError
            Nothing went in.
        """
        cdef Text text
        cdef Code code = OK
        cdef Py_ssize_t n = 0
        cdef bint shown = False
        cdef Filled *filled
        # a list could be changed meanwhile
        cdef tuple payloads = tuple(items)
        self.enter()
        try:
            self.be_owner()
            if len(payloads) > <Py_ssize_t> self.ring.cells.count:
                raise errors.Full(
                    f"{self.file_path}: a batch of {len(payloads)} messages never fits {self.ring.cells.count} cells; push it in "
                    "parts, or into a deque of a larger capacity"
                )
            filled = <Filled *> malloc(max(1, len(payloads)) * sizeof(Filled))
            if filled == NULL:
                raise MemoryError
            try:
                while n < len(payloads):
                    text_of(payloads[n], &text)
                    try:
                        self.check_payload(&text)
                        code = self.write(&text, &filled[n])
                    finally:
                        text_done(&text)
                    if code != OK:
                        self.observe(OP_PUSH, 1, 0)
                        raise_code(
                            code, self.file_path,
                            f"{n} cells are free where a batch of {len(payloads)} messages needs as many; the others hold "
                            "messages that wait or are claimed",
                        )
                    n += 1
                if n:
                    shown = True
                    self.show(filled, n)
            finally:
                if not shown and n:
                    self.withdraw(filled, n)
                free(filled)
            self.observe(OP_PUSH, 0, <uint64_t> n)
            return n
        finally:
            self.leave()

    # ---- pop, by the owner ----

    @cython.final
    cdef inline Code pop_once(self, Ref *ref) except? LOST:
        cdef Code code
        self.join()
        with cython.critical_section(self):
            code = deque_pop(&self.ring, ref, self.mine)
        return code if likely(code == OK) else self.pop_on(code, ref)

    @cython.final
    cdef Code pop_on(self, Code code, Ref *ref) except? LOST:
        """After a pop that was not OK: become the owner, or repair, and try again."""
        cdef int _tries
        for _tries in range(REPAIRS):
            if code == OK or code == EMPTY:
                break
            if code == CORRUPT:
                self.repair()
            self.be_owner()
            with cython.critical_section(self):
                code = deque_pop(&self.ring, ref, self.mine)
        return code

    def pop(self):
        """Take the newest message; one that was put back goes first.

        Returns
        -------
        bytes

        Raises
        ------
        Empty
        NotOwner
        """
        cdef Ref ref
        cdef Code code
        self.enter()
        try:
            code = self.pop_once(&ref)
            if unlikely(code == EMPTY) and self.rescued_by(EMPTY_LOOK_MS):
                code = self.pop_once(&ref)
            self.observe(OP_POP, code != OK, code == OK)
            if code != OK:
                raise_code(code if code != LOST else CORRUPT, self.file_path, "no message waits")
            return self.pop_taken(&ref)
        finally:
            self.leave()

    # ---- steal, by anyone ----

    def steal(self, timeout=0):
        """Take the oldest message.

        Parameters
        ----------
        timeout : float, optional
            Seconds on the monotonic clock to wait for one; 0 does not wait, None waits for ever.

        Returns
        -------
        bytes

        Raises
        ------
        Empty
            None waits, and not only because another thief was faster; or none came until the timeout.
        ValueError
            The handle is closed, or was closed while this waited.
        """
        cdef Ref ref
        cdef Code code
        self.enter()
        try:
            if timeout is ZERO:
                self.join()
                code = self.take_mending(&ref)
                self.observe(OP_POP, code != OK, code == OK)
                if code != OK:
                    raise_code(code, self.file_path, "no message waits")
            else:
                self.take_waiting(&ref, timeout)
                self.observe(OP_POP, 0, 1)
            return self.pop_taken(&ref)
        finally:
            self.leave()

    def try_pop(self):
        """`steal` without waiting: the name that every transport has."""
        return self.steal()

    def steal_many(self, n):
        """Take up to `n` messages that wait now, oldest first.

        Returns
        -------
        list of bytes
            Empty where none waits.
        """
        return self.take_many(n)
