"""Traffic for tests with several producers and consumers: every call in turn, every byte checked.

Also imported by the scripts that tests run in other processes.
"""

import collections

import numpy as np

from subetha.errors import Empty, Full

PATIENCE_S = 60
STOP = b""


def payload_of(producer, sequence, length=56):
    """Bytes that all derive from producer and sequence; the first eight name them."""
    body = np.arange(length - 8, dtype=np.uint64) * np.uint64(0x9E37) + np.uint64(producer * 7919 + sequence * 104_729)
    return (
        producer.to_bytes(4, "little") + sequence.to_bytes(4, "little") + (body % np.uint64(251)).astype("u1").tobytes()
    )


def origin_of(payload):
    """(producer, sequence) of a payload; ValueError where it is torn."""
    producer, sequence = int.from_bytes(payload[:4], "little"), int.from_bytes(payload[4:8], "little")
    if payload != payload_of(producer, sequence, len(payload)):
        raise ValueError(f"torn payload of producer {producer}, sequence {sequence}: {payload.hex()}")
    return producer, sequence


def message(producer, sequence):
    return payload_of(producer, sequence, 8 + (producer + sequence) % 49)


def produce(ring, producer, count):
    """Push `count` messages, in order, by every call in turn."""
    sequence = 0
    turn = producer
    while sequence < count:
        turn += 1
        went_in = 0
        if turn % 3 == 0:
            went_in = ring.push_many([message(producer, i) for i in range(sequence, min(sequence + 5, count))])
        elif turn % 3 == 1:
            try:
                ring.try_push(message(producer, sequence))
                went_in = 1
            except Full:
                went_in = 0
        if went_in == 0:
            ring.push(message(producer, sequence), timeout=PATIENCE_S)
            went_in = 1
        sequence += went_in


def consume(ring, *, release=False):
    """Take messages by every call in turn until one says STOP; their origins in the order they came."""
    origins = []
    turn = 0
    while True:
        turn += 1
        way = turn % (5 if release else 4)
        if way == 0:
            taken = ring.pop_many(3)
        elif way == 1:
            try:
                taken = [ring.try_pop()]
            except Empty:
                taken = [ring.pop(timeout=PATIENCE_S)]
        elif way == 2:
            taken = [ring.pop(timeout=PATIENCE_S)]
        else:
            claim = ring.claim(timeout=PATIENCE_S)
            if way == 4:
                claim.release()
                continue
            taken = [claim.tobytes()]
            claim.ack()
        origins += [origin_of(payload) for payload in taken if payload != STOP]
        stops = taken.count(STOP)
        if stops:
            for _ in range(stops - 1):
                ring.push(STOP, timeout=PATIENCE_S)
            return origins


def check_each_once(origins, producers, count):
    """Raise AssertionError unless each message of each producer came exactly once."""
    seen = collections.Counter(origins)
    expected = {(producer, sequence) for producer in range(producers) for sequence in range(count)}
    doubled = [origin for origin, times in seen.items() if times > 1]
    assert not doubled, f"taken more than once: {doubled[:10]}"
    missing, foreign = expected - seen.keys(), seen.keys() - expected
    assert not missing, f"{len(missing)} never came: {sorted(missing)[:10]}"
    assert not foreign, f"never sent: {sorted(foreign)[:10]}"


def check_order(origins):
    """Raise AssertionError unless the messages of each producer came in the order it sent them."""
    last: dict[int, int] = {}
    for producer, sequence in origins:
        assert last.get(producer, -1) < sequence, f"producer {producer}: {sequence} after {last[producer]}"
        last[producer] = sequence
