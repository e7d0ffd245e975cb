# A deque used alone: owners that follow each other, thieves, mortal thieves, menders. The rest is a ring's (ring.pxi).

cdef enum:
    UNSEEN = 0xFE           # producer of messages of a push that was cut before anybody could see them


cdef class DequeWorld(RingWorld):
    """A thread that owns is another participant after each time that it left or died."""

    # ---- the owner ----

    cdef uint64_t mine(self, Ring *ring, Holder *me) noexcept nogil:
        return status_incarnation(me.status) << 16 | ring.owner

    cdef bint owner_is_there(self, uint64_t owner) noexcept nogil:
        """As owner_is_there of _shareddeque.pxi."""
        cdef uint64_t number = owner & 0xFFFF
        cdef uint64_t status
        if number == 0 or number > self.records.count:
            return False
        status = load_seq_cst_u64(&self.records.first[number - 1].status)
        if status_state(status) == SLOT_DYING:
            return True
        return status_state(status) != SLOT_FREE and (status_incarnation(status) ^ owner >> 16) << 16 == 0

    cdef bint owner_lives(self, uint64_t owner) noexcept nogil:
        cdef uint64_t status
        if is_dead(&self.records, self.fd, self.lock_base, (owner & 0xFFFF) - 1, &status):
            return False
        return status_state(status) == SLOT_USED and self.owner_is_there(owner)

    cdef bint be_owner(self, Ring *ring, Holder *me) noexcept nogil:
        """As take_over of _shareddeque.pxi. False: somebody else is the owner, or was faster."""
        cdef uint64_t seen = load_acquire_u64(ring.ends.owner)
        if seen == self.mine(ring, me):
            return True
        if self.owner_is_there(seen):
            if self.owner_lives(seen):
                return False
            self.rescue(ring)
            if self.owner_is_there(seen):
                return False
        return deque_own(ring, seen, self.mine(ring, me))

    cdef int write(
        self, Ring *ring, uint64_t producer, uint64_t sequence, int wanted, uint64_t *random, Filled *filled
    ) noexcept nogil:
        """Cells written and not READY yet: all that are `wanted`, or none."""
        cdef uint8_t text[4096]
        cdef int n = 0
        while n < wanted and ring_write(
            ring, text, self.compose(text, producer, sequence + <uint64_t> n, random), &filled[n]
        ) == OK:
            n += 1
        if n == wanted:
            return n
        while n > 0:
            n -= 1
            cell_free_if(&ring.cells, filled[n].cell, filled[n].word)
        wake_up_to(&ring.lines.space, wanted)
        return 0

    cdef int push(self, Ring *ring, Holder *me, uint64_t producer, uint64_t sequence, uint64_t *random) noexcept nogil:
        """One message, or a batch of them; how many."""
        cdef Filled filled[BATCH]
        cdef int i
        cdef int wanted = 1
        if next_random(random) & 3 == 0:
            wanted = BATCH if <uint64_t> BATCH <= ring.cells.count else 2
        wanted = self.write(ring, producer, sequence, wanted, random, filled)
        if wanted == 0:
            return 0
        if not deque_push(ring, filled, wanted, self.mine(ring, me)):
            # nobody may take it from one who lives
            self.fault()
        for i in range(wanted):
            self.accept(producer, sequence + <uint64_t> i)
        wake_up_to(&ring.lines.items, wanted)
        return wanted

    cdef void pop(self, Ring *ring, Holder *me) noexcept nogil:
        cdef Ref ref
        cdef Code code = deque_pop(ring, &ref, self.mine(ring, me))
        if code == OK:
            self.deliver(ring, &ref)
            free_taken(ring, &ref)
        elif code == CORRUPT:
            self.mend(ring)
        elif code != EMPTY:
            self.fault()

    cdef int cut(self, Ring *ring, Holder *me, uint64_t producer, uint64_t sequence, uint64_t *random) noexcept nogil:
        """Stop half-way through a push or a pop of one's own; how many messages can be seen by then."""
        cdef Filled filled[2]
        cdef Ref ref
        cdef Ends *ends = &ring.ends
        cdef uint64_t bottom = load_relaxed_u64(ends.bottom)
        cdef uint64_t how = next_random(random) % 6
        cdef uint64_t shown = 2 if how == 3 else 1
        cdef uint64_t i
        if how < 4:
            if self.write(ring, producer if how == 3 else UNSEEN, sequence, 2, random, filled) == 0:
                return 0
            if how == 0:
                # before READY
                return 0
            # as ends_push
            deque_make_room(ring, 2)
            bottom = load_relaxed_u64(ends.bottom)
            store_relaxed_u64(ends.pushes, load_relaxed_u64(ends.pushes) | 1)
            for i in range(shown):
                cell_publish(&ring.cells, filled[i].cell, filled[i].word, READY)
                if how == 1:
                    return 0
                store_relaxed_u64(
                    ends_place(ends, bottom + i),
                    ref_empty(&ends.refs, (bottom + i) >> ends.refs.size_bits)
                    | ref_full_word(&ends.refs, word_version(filled[i].word), filled[i].cell),
                )
            if how == 2:
                # before bottom
                return 0
            # with `pushes` odd
            store_seq_cst_u64(ends.bottom, bottom + 2)
            for i in range(2):
                self.accept(producer, sequence + i)
            return 2
        # as ends_take_newest
        bottom -= 1
        if <int64_t> (bottom - load_seq_cst_u64(ends.top)) >= 0 and ends_claim(ends, &ring.cells, bottom, ring.owner, &ref):
            if how == 5:
                store_seq_cst_u64(ends.bottom, bottom)
        return 0

    def own(self, int number, uint64_t seed):
        """Push and pop wherever nobody else does; leave or die after a while, and come again."""
        cdef Ring ring
        cdef Holder me
        cdef uint64_t sequence = 0
        cdef uint64_t calls
        cdef int n
        with nogil:
            while self.goes_on() and sequence < SEQUENCES - BATCH:
                if not self.sit_down(&ring, &me):
                    pause(100000)
                    continue
                # at least one, after which this is the owner
                calls = 1 + (next_random(&seed) & 511)
                while self.goes_on() and calls and sequence < SEQUENCES - BATCH:
                    if not self.be_owner(&ring, &me):
                        pause(50000)
                        continue
                    calls -= 1
                    if next_random(&seed) & 3 == 0:
                        self.pop(&ring, &me)
                        continue
                    n = self.push(&ring, &me, number, sequence, &seed)
                    sequence += <uint64_t> n
                    if n == 0:
                        self.sleep(&ring, &ring.lines.space, ring_has_space)
                if calls == 0 and next_random(&seed) & 3:
                    sequence += <uint64_t> self.cut(&ring, &me, number, sequence, &seed)
                    # stopped at first, so that a repair may meet it
                    pause(next_random(&seed) % 500000)
                    self.die(&me)
                    self.count(R_DIED)
                else:
                    deque_disown(&ring, self.mine(&ring, &me))
                    self.leave(&me)
            count_add(&self.producing, -1)

    # ---- thieves ----

    def steal(self, uint64_t seed):
        """One message at a time or, as steal_many does, several; until nobody pushes any more and nothing waits."""
        cdef Ring ring
        cdef Holder me
        cdef Ref refs[BATCH]
        cdef int n, i
        with nogil:
            if not self.sit_down(&ring, &me):
                self.fault()
            while True:
                if next_random(&seed) & 3:
                    n = self.consume_one(&ring, &seed)
                else:
                    n = 0
                    prefetch_oldest(&ring, BATCH)
                    while n < BATCH and take_oldest(&ring, &refs[n]) == OK:
                        pass_taken(&ring, &refs[n])
                        n += 1
                    for i in range(n):
                        self.deliver(&ring, &refs[i])
                        free_taken(&ring, &refs[i])
                if n:
                    continue
                if count_get(&self.producing) == 0:
                    break
                self.sleep(&ring, &ring.lines.items, has_items)
            self.leave(&me)

    cdef void live_briefly(self, Ring *ring, uint64_t *random) noexcept nogil:
        """Stop half-way through a call of a thief."""
        cdef Ref ref
        cdef uint64_t top
        cdef uint64_t how = next_random(random) % 3
        cdef int _n
        for _n in range(next_random(random) & 7):
            self.consume_one(ring, random)
        if next_random(random) & 1:
            # a repair that nothing is the reason of
            self.mend(ring)
        if how == 0:
            # steal, before top
            top = load_seq_cst_u64(ring.ends.top)
            if <int64_t> (load_seq_cst_u64(ring.ends.bottom) - top) > 0:
                ends_claim(&ring.ends, &ring.cells, top, ring.owner, &ref)
        elif take_oldest(ring, &ref) == OK and how == 2:
            # 1: claim, after the CAS; 2: release, after the CAS
            cas_seq_cst_u64(
                cell_word(&ring.cells, ref.cell), ref.word, word_pack(word_version(ref.word) + 1, RETRY, ring.owner)
            )

    cdef void look(self, Ring *ring) noexcept nogil:
        refs_look(&ring.refs)
        deque_look(ring)
        ends_length(&ring.ends)
