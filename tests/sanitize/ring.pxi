# A ring used alone, or (deque.pxi) a deque: producers, consumers, mortals, menders.

cdef enum:
    R_PUSHED
    R_POPPED
    R_RELEASED
    R_ACKED
    R_DIED
    R_RESCUED
    R_REPAIRED
    R_WITHDRAWN
    R_SLEPT
    RING_COUNTS

cdef enum:
    NOBODY = 0xFF           # producer of messages that were never accepted
    SEQUENCES = 1 << 22     # messages of one producer at most
    BATCH = 8

RING_NAMES = "pushed popped released acked died rescued repaired withdrawn slept".split()


cdef class RingWorld(World):
    """`handle` gives a handle; a thread has one of its own, or shares one with other threads."""

    cdef Ring ring
    cdef uint64_t payload
    cdef int64_t producing
    cdef uint8_t *delivered     # a bit a message
    cdef uint8_t *accepted
    cdef int producers

    def __init__(self, const uint8_t[::1] contents, int fd, sizes, int capacity, int payload, int slots, int producers):
        cdef uint64_t places, records, ends, cells, stride, i, end
        cdef uint8_t *base = <uint8_t *> &contents[0]
        places, records, ends, cells, stride = sizes
        self.maps = contents
        self.fd = fd
        self.lock_base = contents.shape[0]
        self.payload = payload
        self.ring.cells.bits = capacity.bit_length() - 1
        self.ring.cells.base = base + cells
        self.ring.cells.count = capacity
        self.ring.cells.stride = stride
        self.ring.lines = <RingLines *> (base + 128)
        refs_init(&self.ring.refs, self.ring.lines, <uint64_t *> (base + places), self.ring.cells.bits)
        if ends != cells:
            ends_init(
                &self.ring.ends, <DequeLines *> (base + ends), <uint64_t *> (base + ends + sizeof(DequeLines)), self.ring.cells.bits
            )
        self.records.first = <Participant *> (base + records)
        self.records.count = slots
        self.producers = self.producing = producers
        self.delivered = <uint8_t *> calloc(producers, SEQUENCES // 8)
        self.accepted = <uint8_t *> calloc(producers, SEQUENCES // 8)
        self.poison(base, 128)
        end = records + slots * sizeof(Participant)
        self.poison(base + end, ends - end)
        if ends != cells:
            end = ends + sizeof(DequeLines) + 16 * capacity
            self.poison(base + end, cells - end)
        end = sizeof(RingCell) + self.payload
        for i in range(self.ring.cells.count):
            self.poison(self.ring.cells.base + i * stride + end, stride - end)

    def __dealloc__(self):
        free(self.delivered)
        free(self.accepted)

    cdef bint sit_down(self, Ring *ring, Holder *me) noexcept nogil:
        ring[0] = self.ring
        if not self.join(me, 1, False):
            return False
        ring.owner = me.slot + 1
        return True

    cdef void mend(self, Ring *ring) noexcept nogil:
        cdef uint8_t *seen = <uint8_t *> calloc(ring.cells.count, 1)
        ring_repair(ring, self.records.count, seen)
        free(seen)
        self.count(R_REPAIRED)

    cdef void rescue(self, Ring *ring) noexcept nogil:
        cdef uint8_t *seen = <uint8_t *> calloc(ring.cells.count, 1)
        count_add(&self.counts[R_RESCUED], ring_rescue_dead(ring, &self.records, self.fd, self.lock_base, seen))
        free(seen)

    cdef void sleep(self, Ring *ring, uint32_t *word, Check check) noexcept nogil:
        cdef int stage = 0
        cdef int64_t deadline = monotonic_ns() + PAUSE_MS * 1000000
        self.count(R_SLEPT)
        while wait_for(word, check, ring, &self.never_closed, deadline, &stage) == SIGNAL:
            pass

    # ---- producers ----

    cdef uint64_t compose(self, uint8_t *text, uint64_t producer, uint64_t sequence, uint64_t *random) noexcept nogil:
        """A message that says whose it is; its length."""
        cdef uint64_t key = producer << 32 | sequence
        cdef uint64_t length = self.payload
        # the longest one often
        if next_random(random) & 1:
            length = 8 + next_random(random) % (self.payload - 7)
        memcpy(text, &key, 8)
        fill_bytes(text + 8, key, length - 8)
        return length

    cdef Code fill(self, Ring *ring, uint64_t producer, uint64_t sequence, uint64_t *random, Filled *filled) noexcept nogil:
        cdef uint8_t text[4096]
        return ring_fill(ring, text, self.compose(text, producer, sequence, random), filled)

    cdef bint publish(self, Ring *ring, Filled *filled) noexcept nogil:
        """False: withdrawn."""
        cdef Code code = ring_publish(ring, filled)
        cdef int _n
        for _n in range(MENDS):
            if code == OK:
                return True
            self.mend(ring)
            code = ring_publish(ring, filled)
        if code != OK and ring_withdraw(ring, filled):
            self.count(R_WITHDRAWN)
            return False
        return True

    cdef void accept(self, uint64_t producer, uint64_t sequence) noexcept nogil:
        bits_or(&self.accepted[(producer * SEQUENCES + sequence) // 8], 1 << (sequence & 7))
        self.count(R_PUSHED)

    def produce(self, int number, uint64_t seed):
        """One message, or a batch that is published as push_many does it, at a time."""
        cdef Ring ring
        cdef Holder me
        cdef Filled filled[BATCH]
        cdef uint64_t sequence = 0
        cdef int n, wanted, i
        with nogil:
            if not self.sit_down(&ring, &me):
                self.fault()
            while self.goes_on() and sequence < SEQUENCES - BATCH:
                wanted = 1 if next_random(&seed) & 3 else BATCH
                n = 0
                while n < wanted and self.fill(&ring, number, sequence + n, &seed, &filled[n]) == OK:
                    n += 1
                if n == 0:
                    self.sleep(&ring, &ring.lines.space, ring_has_space)
                for i in range(n):
                    if self.publish(&ring, &filled[i]):
                        self.accept(number, sequence + i)
                if n == 1:
                    wake_one(&ring.lines.items)
                elif n > 1:
                    wake_many(&ring.lines.items, n)
                sequence += n
            self.leave(&me)
            count_add(&self.producing, -1)

    # ---- consumers ----

    cdef void deliver(self, Ring *ring, Ref *ref) noexcept nogil:
        """Copy the message and look at every byte."""
        cdef RingCell *cell = <RingCell *> cell_word(&ring.cells, ref.cell)
        cdef uint8_t text[4097]
        cdef uint32_t length = load_relaxed_u32(&cell.length)
        cdef uint64_t key = 0
        cdef uint64_t producer, sequence
        cdef uint8_t bit
        if length < 8 or length > self.payload:
            self.fault()
            return
        memcpy(text, <uint8_t *> cell + sizeof(RingCell), length + PAST_THE_END)
        memcpy(&key, text, 8)
        if not bytes_agree(text + 8, key, length - 8):
            self.fault()
        producer = key >> 32
        sequence = <uint32_t> key
        if producer == NOBODY:
            return
        if producer >= <uint64_t> self.producers or sequence >= SEQUENCES:
            self.fault()
            return
        self.count(R_POPPED)
        bit = 1 << (sequence & 7)
        if bits_or(&self.delivered[(producer * SEQUENCES + sequence) // 8], bit) & bit:
            # twice
            self.fault()

    cdef bint consume_one(self, Ring *ring, uint64_t *random) noexcept nogil:
        cdef Ref ref
        cdef uint64_t how = next_random(random) & 15
        cdef Code code = take_oldest(ring, &ref)
        if code == CORRUPT:
            self.mend(ring)
        if code != OK:
            return False
        if how >= 4:
            # pop
            self.deliver(ring, &ref)
            free_taken(ring, &ref)
            return True
        # claim, then acknowledge or release
        pass_taken(ring, &ref)
        if how == 0:
            self.count(R_RELEASED)
            if ring_put_back(ring, ref.cell, ref.word) != OK:
                self.mend(ring)
            return True
        self.count(R_ACKED)
        self.deliver(ring, &ref)
        if not cell_free_if(&ring.cells, ref.cell, ref.word):
            self.fault()
        store_relaxed_u64(&ring.hint, ref.cell)
        wake_one(&ring.lines.space)
        return True

    def consume(self, uint64_t seed, Handle shared=None):
        """Until the producers have ended and nothing waits; alone, or on a handle that other threads use too."""
        cdef Ring own
        cdef Ring *ring = &own
        cdef Holder me
        if shared is not None:
            ring = &shared.ring
        with nogil:
            if shared is None and not self.sit_down(&own, &me):
                self.fault()
            while True:
                if self.consume_one(ring, &seed):
                    continue
                if count_get(&self.producing) == 0:
                    break
                self.sleep(ring, &ring.lines.items, has_items)
            if shared is None:
                self.leave(&me)

    # ---- mortals ----

    cdef void live_briefly(self, Ring *ring, uint64_t *random) noexcept nogil:
        """Stop half-way through a call."""
        cdef Filled filled
        cdef Ref ref
        cdef uint64_t index, word
        cdef uint64_t how = next_random(random) % 6
        cdef int _n
        for _n in range(next_random(random) & 7):
            self.consume_one(ring, random)
        if how == 0:
            # push, before READY
            cells_acquire(&ring.cells, 0, &ring.hint, ring.owner, &index, &word)
        elif how == 1:
            # push, after READY
            self.fill(ring, NOBODY, 0, random, &filled)
        elif how == 2:
            # push, after publishing
            if self.fill(ring, NOBODY, 0, random, &filled) == OK:
                ring_publish(ring, &filled)
        elif ring_take(ring, &ref) == OK and how != 3:
            # claim, after the CAS; or release, after the CAS
            refs_pass(&ring.refs, &ref)
            if how == 4:
                cas_seq_cst_u64(
                    cell_word(&ring.cells, ref.cell), ref.word, word_pack(word_version(ref.word) + 1, RETRY, ring.owner)
                )

    def die_again_and_again(self, uint64_t seed):
        cdef Ring ring
        cdef Holder me
        with nogil:
            while self.goes_on():
                if self.sit_down(&ring, &me):
                    self.live_briefly(&ring, &seed)
                    self.die(&me)
                    self.count(R_DIED)
                pause(200000)

    # ---- menders ----

    cdef void look(self, Ring *ring) noexcept nogil:
        refs_look(&ring.refs)

    def look_after(self, uint64_t seed):
        """Rescue the dead, and now and then call for a repair that nothing is the reason of."""
        cdef Ring ring
        cdef Holder me
        cdef uint64_t how
        with nogil:
            if not self.sit_down(&ring, &me):
                self.fault()
            while self.goes_on():
                self.rescue(&ring)
                how = next_random(&seed) & 63
                if how == 0:
                    refs_call_for_repair(&ring.refs)
                    self.mend(&ring)
                elif how < 4:
                    self.look(&ring)
                elif how < 8:
                    refs_length(&ring.refs)
                pause(50000)
            self.leave(&me)

    def finish(self, uint64_t seed):
        """After all threads: mend, take out what is left, and look whether each accepted message came exactly once."""
        cdef Ring ring
        cdef Holder me
        cdef uint64_t i
        with nogil:
            if not self.sit_down(&ring, &me):
                self.fault()
            self.rescue(&ring)
            self.mend(&ring)
            while self.consume_one(&ring, &seed):
                pass
            self.leave(&me)
            for i in range(ring.cells.count):
                if word_state(load_acquire_u64(cell_word(&ring.cells, i))) != FREE:
                    self.fault()
            for i in range(self.records.count):
                if status_state(load_acquire_u64(&self.records.first[i].status)) != SLOT_FREE:
                    self.fault()
            for i in range(<uint64_t> self.producers * SEQUENCES // 8):
                if self.accepted[i] != self.delivered[i]:
                    self.fault()
        return {name: self.counts[i] for i, name in enumerate(RING_NAMES)}


cdef class Handle:
    """A ring's handle that several threads use, as those of one process do."""

    cdef Ring ring
    cdef Holder holder
    cdef RingWorld world

    def __init__(self, RingWorld world):
        self.world = world
        if not world.sit_down(&self.ring, &self.holder):
            raise RuntimeError("no number is free")

    def leave(self):
        self.world.leave(&self.holder)
