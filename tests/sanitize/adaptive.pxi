# An adaptive instance: operations under way while strategies change, and observations while a reader drains them.

cdef enum:
    A_OPERATIONS
    A_MIGRATIONS
    A_RECORDED
    A_DROPPED
    A_TAKEN
    ADAPTIVE_COUNTS
    STRATEGY_WORDS = 8      # whole ones: of single bytes ThreadSanitizer forgets too many readers
    MOST_WRITERS = 4

ADAPTIVE_NAMES = "operations migrations recorded dropped taken".split()


cdef class AdaptiveWorld(World):
    """The strategy of tag n is the memory n & 1, which a migration writes anew with n after the drain."""

    cdef Handshake header
    cdef Observations ring
    cdef uint64_t strategies[2][STRATEGY_WORDS]
    cdef uint64_t next_of[MOST_WRITERS]     # the reader's: the least number that a writer's next record may have

    def __init__(self, int bits):
        handshake_init(&self.header, 0)
        self.ring.bits = bits
        self.ring.size = <uint64_t> 1 << bits
        self.ring.records = <Observation *> calloc(self.ring.size, sizeof(Observation))
        if self.ring.records == NULL:
            raise MemoryError
        observations_arm(&self.ring, ~<uint64_t> 0)

    def __dealloc__(self):
        free(self.ring.records)

    cdef bint is_whole(self, uint64_t tag) noexcept nogil:
        cdef int i
        for i in range(STRATEGY_WORDS):
            if self.strategies[tag & 1][i] != tag * <uint64_t> (i + 1):
                return False
        return True

    def operate(self, uint64_t seed):
        """Use the strategy that the operation has; it must be whole."""
        cdef uint64_t parity, tag
        with nogil:
            while self.goes_on():
                parity = handshake_enter(&self.header)
                tag = handshake_tag_of(&self.header, parity)
                if not self.is_whole(tag):
                    self.fault()
                if not next_random(&seed) & 63:
                    sched_yield()
                if not handshake_exit(&self.header, parity):
                    self.fault()
                self.count(A_OPERATIONS)

    def migrate(self):
        """Write the next strategy over the one before the current, once nobody uses that, and publish it."""
        cdef uint64_t tag = 0
        cdef int i, stage
        with nogil:
            while self.goes_on():
                stage = 0
                while handshake_is_drained(&self.header, True) != OK:
                    # seldom: to sleep and be woken orders what the counts alone have to order
                    if tag & 15:
                        sched_yield()
                        continue
                    wait_for(
                        &self.header.drained, handshake_is_drained, &self.header, &self.never_closed,
                        monotonic_ns() + PAUSE_MS * 1000000, &stage,
                    )
                tag += 1
                for i in range(STRATEGY_WORDS):
                    self.strategies[tag & 1][i] = tag * <uint64_t> (i + 1)
                # whoever has read the generation long ago is counted for a moment
                while handshake_migrate(&self.header, tag) != OK:
                    sched_yield()
                self.count(A_MIGRATIONS)

    def observe(self, uint64_t writer):
        cdef uint64_t n = 0
        cdef uint64_t value
        with nogil:
            while self.goes_on():
                value = writer << 48 | n
                n += 1
                if observation_put(&self.ring, <uint16_t> (value * 7), <uint16_t> (value * 13), value):
                    self.count(A_RECORDED)
                else:
                    self.count(A_DROPPED)
                    sched_yield()

    cdef void take_ready(self, Observation *to) noexcept nogil:
        cdef uint64_t n = observations_ready(&self.ring)
        cdef uint64_t i, value, writer, number
        observations_take(&self.ring, to, n)
        for i in range(n):
            value = to[i].value
            writer = value >> 48
            number = value << 16 >> 16
            if to[i].op != <uint16_t> (value * 7) or to[i].flags != <uint16_t> (value * 13) or writer >= MOST_WRITERS:
                self.fault()
            elif number < self.next_of[writer]:
                self.fault()
            else:
                self.next_of[writer] = number + 1
        count_add(&self.counts[A_TAKEN], <int64_t> n)

    def drain(self):
        """Each record must be whole, and of each writer come in its order."""
        cdef Observation *to = <Observation *> calloc(self.ring.size, sizeof(Observation))
        if to == NULL:
            raise MemoryError
        with nogil:
            self.take_ready(to)
            while self.goes_on():
                self.take_ready(to)
                sched_yield()
        free(to)

    def finish(self):
        self.drain()
        if (
            self.counts[A_TAKEN] != self.counts[A_RECORDED]
            or self.counts[A_DROPPED] != <int64_t> load_relaxed_u64(&self.ring.dropped)
            or self.header.in_flight[0] != 0 or self.header.in_flight[1] != 0
        ):
            self.fault()
        return {name: self.counts[i] for i, name in enumerate(ADAPTIVE_NAMES)}
