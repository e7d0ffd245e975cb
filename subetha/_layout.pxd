"""The structs of layout.py and the enums of the core. `_core` compares them with the numpy dtypes at import."""

from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef enum Code:
    OK = 0
    FULL = 1        # no free cell
    EMPTY = 2
    CORRUPT = 3     # places or hints contradict each other: repair
    LOST = 4        # the cell's word is not the one held any more
    NO_PLACE = 5    # every place of a ring holds a live reference
    QUOTA = 6       # the client holds as many cells as it may
    NO_BLOCK = 7    # the arena has no block of that size
    NO_DISK = 8     # the disk has no room to back a block
    TIMEOUT = 9
    CLOSED = 10
    SIGNAL = 11     # a signal came: let Python handle it
    NOT_SYNCED = 12     # the disk did not take it
    NOT_READ = 13       # the disk did not give it

cdef enum CellState:
    FREE = 0
    WRITING = 1
    READY = 2
    TAKEN = 3
    DONE = 4
    COLLECTED = 5
    RETRY = 6
    FENCED = 7
    PARKED = 8
    DEAD = 9
    QUARANTINED = 10
    OVERDUE = 11
    KEPT = 12

cdef enum BlockState:
    FREE_HOLE = 0
    FREE_BACKED = 1
    OWNED = 2
    LINKED = 3

cdef enum SlotState:
    SLOT_FREE = 0
    SLOT_USED = 1
    SLOT_DYING = 2

cdef enum MapPhase:
    STABLE = 0
    CLEANING = 1
    MOVING = 2

cdef enum:
    KEY_BYTES = 48
    KEY_WORDS = 6

cdef enum:
    # which states a reference may lead to: one bit a state
    CLAIMABLE = 1 << READY | 1 << RETRY
    COLLECTABLE = 1 << DONE | 1 << DEAD | 1 << QUARANTINED

cdef enum:
    # in the pool's word `due`
    UNKNOWN_BIT = 1
    LOOKING = 2
    # in `unknown_ns` of a parked cell
    WAS_KNOWN = 1

cdef enum OpCode:
    OP_PUSH = 1
    OP_POP = 2
    OP_CLAIM = 3
    OP_WAIT = 4
    OP_YIELD = 5
    OP_REGISTER = 6
    OP_BEAT = 7
    OP_MARK = 8
    OP_GET = 9
    OP_PUT = 10
    OP_REMOVE = 11
    OP_WATCHDOG_SCAN = 12

cdef enum WaitCode:
    WAIT_SLEEP = 0
    WAIT_BRIEF = 1
    WAIT_SPIN = 2

cdef enum:
    WAITERS_BIT = 1
    WAKE_STEP = 2

ctypedef struct RingCell:
    uint64_t word
    uint32_t length
    uint32_t reserved

ctypedef struct MapCell:
    uint64_t word
    uint64_t hash
    uint32_t key_length
    uint32_t value_length
    uint64_t key[6]

ctypedef struct Cause:
    uint64_t when_ns
    uint32_t pid
    int32_t code

ctypedef struct JobCell:
    uint64_t word
    uint64_t job_id
    uint64_t job_length
    uint64_t result_length
    uint64_t job_block
    uint64_t result_block
    uint16_t attempts
    uint16_t max_attempts
    uint8_t priority
    uint8_t doublings
    uint8_t reserved[2]
    uint32_t timeout_ms
    uint32_t keep_s
    uint64_t submitted_ns
    uint64_t started_ns
    uint64_t due_ns
    uint64_t deadline_ns
    uint64_t progress
    uint32_t backoff_ms
    uint32_t job_crc32
    uint32_t result_crc32
    uint32_t charged
    uint64_t unknown_ns
    Cause causes[4]

ctypedef struct RingLines:
    uint64_t tail
    uint8_t pad0[120]
    uint64_t head
    uint8_t pad1[120]
    uint32_t items
    uint32_t due
    uint8_t pad2[120]
    uint32_t space
    uint8_t pad3[124]

ctypedef struct DequeLines:
    uint64_t top
    uint8_t pad0[120]
    uint64_t bottom
    uint64_t owner
    uint64_t pushes
    uint8_t pad1[104]

ctypedef struct MapLines:
    uint64_t phase
    uint8_t pad0[120]
    uint64_t absent
    uint8_t pad1[120]

ctypedef struct PoolLines:
    uint32_t items
    uint8_t pad0[124]
    uint32_t space
    uint8_t pad1[124]
    uint64_t deadline
    uint8_t pad2[120]
    uint64_t boot
    uint64_t due
    uint8_t pad3[112]

ctypedef struct Participant:
    uint64_t status
    uint64_t last_seen_epoch
    uint64_t in_flight_bitmap
    uint64_t completed
    uint64_t boot_hash
    uint64_t started_ns
    uint64_t runs
    uint32_t pid
    uint32_t role

ctypedef struct Observation:
    uint64_t time_ns
    uint64_t value
    uint16_t op
    uint16_t flags
    uint32_t lap
