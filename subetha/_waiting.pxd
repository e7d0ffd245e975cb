"""How long whoever takes from a ring, deque or queue looks for something new before it sleeps: the strategy of its handle.

    WAIT_SLEEP  not at all
    WAIT_BRIEF  as wait_for does: some looks in a row, then 20 us of turns for others
    WAIT_SPIN   the same, but 100 us

Only the first call that finds nothing looks like this, and the calls after it that fall into its time. One that comes later, in a
loop that claims for a tenth of a second each, sleeps at once.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from subetha._atomics cimport private_get, private_set
from subetha._handshake cimport Handshake, handshake_enter, handshake_exit, handshake_tag_of
from subetha._layout cimport SIGNAL, WAIT_BRIEF, WAIT_SPIN, Code
from subetha._process cimport SPIN_CHECKS, YIELD_NS, Check, look_for, monotonic_ns, wait_with_wakes

cdef enum:
    SPIN_NS = 100000
    LONG_TURN_NS = 100000       # of others, which is told of: the kernel's own are shorter


cdef inline Code wait_for_more(
    Handshake *header, int64_t *idle_since, uint32_t *word, Check check, void *context, int64_t *closed, int64_t deadline,
    int64_t *wakes_at, int *stage, int64_t *late_ns
) noexcept nogil:
    """`wait_with_wakes`, whose first step is as long as the handle's strategy says.

    `idle_since` is when this handle's waits found nothing for the first time since something was taken; 0: not since then.
    `late_ns` as of look_for.
    """
    cdef uint64_t parity, tag
    cdef int64_t longest, idle
    cdef Code code = SIGNAL
    if stage[0] != 0:
        return wait_with_wakes(word, check, context, closed, deadline, wakes_at, stage)
    stage[0] = 1
    parity = handshake_enter(header)
    tag = handshake_tag_of(header, parity)
    longest = SPIN_NS if tag == WAIT_SPIN else YIELD_NS if tag == WAIT_BRIEF else 0
    idle = private_get(idle_since)
    if idle == 0:
        private_set(idle_since, monotonic_ns())
    elif monotonic_ns() - idle > longest:
        longest = 0
    if longest:
        code = look_for(check, context, closed, SPIN_CHECKS, longest, late_ns)
    handshake_exit(header, parity)
    return code
