"""Which family a shape is routed to, and that both ways of asking agree."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subetha.dispatcher import (
    FAMILIES,
    SMALLEST_CHEAP_BATCH,
    Axis,
    DequeVariant,
    MmfDispatcher,
    MmfFamily,
    MmfWorkloadShape,
    WorkloadShape,
)

BATCHED = MmfFamily.SharedDeque(DequeVariant.BATCHED)

counts = st.one_of(st.integers(0, 40), st.integers(0, 2**64))
sizes = st.one_of(st.integers(1, 2 * SMALLEST_CHEAP_BATCH), st.integers(1, 2**64))
work = st.builds(WorkloadShape, n_thieves=counts, batch_size=sizes, wait_idle=st.booleans())
shapes = st.one_of(
    st.builds(MmfWorkloadShape.StreamingMpmc, counts, counts),
    st.builds(MmfWorkloadShape.WorkStealing, work),
    st.builds(MmfWorkloadShape.KeyValueLookup, counts, counts),
)
EACH_KIND = [
    MmfWorkloadShape.StreamingMpmc(1, 2),
    MmfWorkloadShape.WorkStealing(WorkloadShape.fan_out(2, 8)),
    MmfWorkloadShape.KeyValueLookup(3, 4),
]


@given(shapes)
def test_picking_by_the_shape_and_by_its_signature_agree(shape):
    assert MmfDispatcher.pick(shape) == MmfDispatcher.pick_by_signature(shape)


@given(shapes)
def test_what_is_picked_offers_all_that_the_shape_requires(shape):
    assert shape.required_signature() in MmfDispatcher.pick(shape).signature()


@pytest.mark.parametrize(
    ("shape", "family"),
    [
        (MmfWorkloadShape.StreamingMpmc(1, 1), MmfFamily.SHARED_RING),
        (MmfWorkloadShape.StreamingMpmc(16, 16), MmfFamily.SHARED_RING),
        (MmfWorkloadShape.KeyValueLookup(1, 1), MmfFamily.SHARED_HASH_MAP),
        (MmfWorkloadShape.WorkStealing(WorkloadShape.request_reply()), MmfFamily.SHARED_RING),
        (MmfWorkloadShape.WorkStealing(WorkloadShape.producer_fast(3)), MmfFamily.SHARED_RING),
        (MmfWorkloadShape.WorkStealing(WorkloadShape.producer_fast(4)), BATCHED),
        (MmfWorkloadShape.WorkStealing(WorkloadShape.fan_out(8, 1)), MmfFamily.SHARED_RING),
        (MmfWorkloadShape.WorkStealing(WorkloadShape.fan_out(8, 256)), BATCHED),
        (MmfWorkloadShape.WorkStealing(WorkloadShape(2, 1, True)), MmfFamily.SHARED_RING),
        (MmfWorkloadShape.WorkStealing(WorkloadShape(2, 64, True)), BATCHED),
    ],
)
def test_a_shape_is_routed_as_measured(shape, family):
    assert MmfDispatcher.pick(shape) == family


def test_every_family_and_every_variant_is_the_pick_of_some_shape():
    picked = {MmfDispatcher.pick(shape) for shape in [*EACH_KIND, MmfWorkloadShape.StreamingMpmc(1, 1)]}
    assert picked == set(FAMILIES)
    assert {family.variant for family in picked if isinstance(family, MmfFamily.SharedDeque)} == set(DequeVariant)


@pytest.mark.parametrize(
    ("made", "numbers"),
    [
        (WorkloadShape.request_reply(), (1, 1, False)),
        (WorkloadShape.producer_fast(8), (1, 8, False)),
        (WorkloadShape.fan_out(3, 8), (3, 8, False)),
        (WorkloadShape(2, wait_idle=True), (2, 1, True)),
    ],
)
def test_the_named_shapes_are_what_their_names_say(made, numbers):
    assert (made.n_thieves, made.batch_size, made.wait_idle) == numbers


def test_each_requirement_adds_its_axis():
    required = [WorkloadShape(2, size, idle).required_signature() for size in (1, 64) for idle in (False, True)]
    assert required == [
        Axis.ANY_CONSUMER,
        Axis.ANY_CONSUMER | Axis.IDLE_CONSUMERS,
        Axis.ANY_CONSUMER | Axis.BATCHES,
        Axis.ANY_CONSUMER | Axis.BATCHES | Axis.IDLE_CONSUMERS,
    ]


def test_only_the_ring_lets_anybody_push():
    assert [family for family in FAMILIES if Axis.ANY_PRODUCER in family.signature()] == [MmfFamily.SHARED_RING]


@pytest.mark.parametrize("value", [*EACH_KIND, *FAMILIES], ids=repr)
def test_shapes_and_families_are_values(value):
    for same in (copy.copy(value), pickle.loads(pickle.dumps(value))):
        assert (same, hash(same)) == (value, hash(value))
    assert [other for other in (*EACH_KIND, *FAMILIES) if other == value] == [value]


def test_a_family_is_written_as_it_is_called():
    assert [repr(family) for family in FAMILIES] == [
        "MmfFamily.SHARED_RING",
        "MmfFamily.SharedDeque(DequeVariant.BATCHED)",
        "MmfFamily.SHARED_HASH_MAP",
    ]


@pytest.mark.parametrize("kind", [MmfWorkloadShape.StreamingMpmc, MmfWorkloadShape.KeyValueLookup])
@pytest.mark.parametrize("numbers", [(-1, 1), (1, -1)])
def test_negative_numbers_are_refused(kind, numbers):
    with pytest.raises(ValueError, match="at least 0, not -1"):
        kind(*numbers)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((-1, 1), "n_thieves must be at least 0"), ((1, 0), "batch_size must be at least 1"), ((1, -8), "batch_size")],
)
def test_a_workload_of_impossible_numbers_is_refused(numbers, text):
    with pytest.raises(ValueError, match=text):
        WorkloadShape(*numbers)


@pytest.mark.parametrize("wrong", [1.5, "8", None])
def test_what_is_no_whole_number_is_refused(wrong):
    with pytest.raises(TypeError):
        WorkloadShape(1, wrong)
    with pytest.raises(TypeError):
        MmfWorkloadShape.StreamingMpmc(wrong, 1)


@pytest.mark.parametrize("wrong", [8, MmfWorkloadShape.StreamingMpmc(1, 1)])
def test_work_stealing_takes_a_workload_shape_only(wrong):
    with pytest.raises(TypeError, match="takes a WorkloadShape"):
        MmfWorkloadShape.WorkStealing(wrong)


@pytest.mark.parametrize("wrong", [None, WorkloadShape.request_reply(), MmfFamily.SHARED_RING])
def test_what_is_no_shape_is_refused(wrong):
    with pytest.raises(TypeError, match="not "):
        MmfDispatcher.pick(wrong)


def test_a_requirement_that_no_family_meets_is_an_error():
    class Impossible(MmfWorkloadShape):
        def required_signature(self):
            return Axis.KEYS | Axis.ANY_PRODUCER

    with pytest.raises(LookupError, match="KEYS"):
        MmfDispatcher.pick_by_signature(Impossible())
