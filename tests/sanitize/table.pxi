# A heartbeat table: participants that come and go, those who look, the watchdog.

cdef enum:
    T_REGISTERED
    T_DIED
    T_BEATS
    T_SNAPSHOTS
    T_SCANS
    TABLE_COUNTS

TABLE_NAMES = "registered died beats snapshots scans".split()


cdef class TableWorld(World):

    def __init__(self, const uint8_t[::1] contents, int fd, sizes, int slots):
        cdef uint8_t *base = <uint8_t *> &contents[0]
        cdef uint64_t records = sizes[0]
        self.maps = contents
        self.fd = fd
        self.lock_base = contents.shape[0]
        self.epoch_at = <uint64_t *> (base + 128)
        self.records.first = <Participant *> (base + records)
        self.records.count = slots
        self.poison(base, 128)
        self.poison(base + 128 + 16, 112)

    def take_part(self, uint64_t seed):
        """Register, beat and mark, unregister; or die."""
        cdef Holder me
        cdef uint64_t bit
        cdef int _n
        with nogil:
            while self.goes_on():
                if not self.join(&me, <uint32_t> next_random(&seed) | 1, next_random(&seed) & 1):
                    sched_yield()
                    continue
                self.count(T_REGISTERED)
                for _n in range(next_random(&seed) & 31):
                    bit = <uint64_t> 1 << (next_random(&seed) & 63)
                    # T3: as mark_in_flight and clear_in_flight
                    fetch_or_acq_rel_u64(&me.record.in_flight_bitmap, bit)
                    store_release_u64(&me.record.last_seen_epoch, load_acquire_u64(self.epoch_at))
                    fetch_add_acq_rel_u64(&me.record.completed, 1)
                    fetch_and_acq_rel_u64(&me.record.in_flight_bitmap, ~bit)
                    self.count(T_BEATS)
                if next_random(&seed) & 7:
                    self.leave(&me)
                else:
                    self.die(&me)
                    self.count(T_DIED)

    def watch(self):
        """Tick, and read every record; each must show one registration, and none of two."""
        cdef Participant copy
        cdef uint64_t slot
        with nogil:
            while self.goes_on():
                fetch_add_acq_rel_u64(self.epoch_at, 1)
                self.count(T_SCANS)
                for slot in range(self.records.count):
                    if record_snapshot(&self.records.first[slot], &copy) == OK:
                        self.count(T_SNAPSHOTS)
                        if copy.started_ns != copy.pid or copy.role != (copy.pid & 3):
                            self.fault()
                sched_yield()

    def rescue(self):
        """Free the records of the dead."""
        cdef Death death
        cdef uint64_t slot, status
        with nogil:
            while True:
                for slot in range(self.records.count):
                    if is_dead(&self.records, self.fd, self.lock_base, slot, &status) and death_begin(
                        &self.records, slot, status, &death
                    ):
                        death_end(&death)
                sched_yield()
                if not self.goes_on():
                    break

    def finish(self):
        cdef uint64_t i
        self.rescue()
        for i in range(self.records.count):
            if status_state(load_acquire_u64(&self.records.first[i].status)) != SLOT_FREE:
                self.fault()
        return {name: self.counts[i] for i, name in enumerate(TABLE_NAMES)}
