# SharedRing: first in, first out, for many producers and consumers (the rest: _messages.pxi).


@cython.no_gc_clear
cdef class SharedRing(SharedMessages):
    """A bounded queue of byte strings in one mapped file, for many producers and consumers in many processes.

    Made by `create`, `open` or `open_or_create`. First in, first out; a message that was released goes to the end.
    Every call may be made from any thread; none of the `try_` calls blocks. A handle takes a number at its first push, pop
    or claim. A process that dies leaves nobody waiting: what it had pushed is there, what it was pushing is there whole or
    not at all.

    Source: owned cells and references, docs/design/cells.md.
    """

    def __init__(self):
        raise TypeError("use SharedRing.create(path, capacity), SharedRing.open(path) or SharedRing.open_or_create(path, capacity)")

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
        create_messages(path, Kind.RING, capacity, payload_bytes, mode)
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
        return open_messages(cls, path, Kind.RING, readonly)

    @classmethod
    def open_or_create(cls, path, capacity, *, payload_bytes=56, mode=0o600):
        """Open the file, or create it where there is none; any number of processes may do so at once.

        Raises
        ------
        LayoutMismatch
            It exists with another capacity or payload size. Otherwise as `create` and `open`.
        """
        return open_or_create_messages(cls, path, capacity, payload_bytes, mode)

    # ---- push ----

    @cython.final
    cdef inline Code push_now(self, Text *text) except? LOST:
        cdef Filled filled
        cdef Code code = ring_fill(&self.ring, text.data, text.length, &filled)
        if unlikely(code != OK):
            if code == FULL and self.rescued_by(FULL_LOOK_MS):
                code = ring_fill(&self.ring, text.data, text.length, &filled)
            if code != OK:
                return code
        code = ring_publish(&self.ring, &filled)
        if unlikely(code != OK):
            code = self.publish_after_repair(&filled)
        wake_one(&self.ring.lines.items)
        return code

    cdef Code push_text(self, Text *text) except? LOST:
        cdef Code code = self.push_now(text)
        self.observe(OP_PUSH, code != OK, code == OK)
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
                code = self.push_now(&text)
            finally:
                text_done(&text)
            self.observe(OP_PUSH, code != OK, code == OK)
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
        self.enter()
        try:
            self.push_waiting(payload, timeout)
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
            self.observe(OP_PUSH, pushed < len(items), <uint64_t> pushed)
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
            self.observe(OP_POP, code != OK, code == OK)
            if code != OK:
                raise_code(code, self.file_path, "no message waits")
            return self.pop_taken(&ref)
        finally:
            self.leave()

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
            self.observe(OP_POP, 0, 1)
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
        return self.take_many(n)
