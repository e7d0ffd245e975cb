"""Which family of mapped structures suits a workload.

A caller says what its workload looks like (`MmfWorkloadShape`), and `MmfDispatcher` names the structure to make for it
(`MmfFamily`). Nothing here opens a file. Each family has a signature, the axes on which it has something to offer, and
each shape requires some of them; `docs/design/dispatcher.md` has the measurements behind the routing.
"""

import enum
import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

__all__ = ["Axis", "DequeVariant", "MmfDispatcher", "MmfFamily", "MmfWorkloadShape", "WorkloadShape"]

# From this many messages a call on, a batch costs less in a deque than in a ring, also where the machine is busy.
SMALLEST_CHEAP_BATCH = 4


class Axis(enum.Flag):
    """What a workload may require and a family may offer."""

    ANY_PRODUCER = enum.auto()
    """Whoever opens it may push, several at a time."""
    ANY_CONSUMER = enum.auto()
    """Whoever opens it may take, several at a time."""
    BATCHES = enum.auto()
    """A batch is published in one step, whatever its length, and is there whole or not at all."""
    IDLE_CONSUMERS = enum.auto()
    """Consumers that find nothing sleep until there is something."""
    KEYS = enum.auto()
    """Values are found by their keys."""


class DequeVariant(enum.Enum):
    """The ways of using a deque that are the better pick for some shape; one more needs measurements that show it."""

    BATCHED = "batched"
    """`SharedDeque.push_batch` on the owner's side, `steal_many` on the thieves'."""


class MmfFamily(ABC):
    """A family of mapped structures: `SHARED_RING`, ``SharedDeque(variant)`` or `SHARED_HASH_MAP`.

    Families are equal by value, and hashable.
    """

    __slots__ = ()

    SHARED_RING: ClassVar["MmfFamily"]
    SharedDeque: ClassVar[type["DequeFamily"]]
    SHARED_HASH_MAP: ClassVar["MmfFamily"]

    @abstractmethod
    def signature(self) -> Axis:
        """Return the axes on which this family has something to offer."""


@dataclass(frozen=True, slots=True, repr=False)
class PlainFamily(MmfFamily):
    """A family without variants."""

    name: str
    axes: Axis

    def signature(self) -> Axis:
        """Return the axes on which this family has something to offer."""
        return self.axes

    def __repr__(self) -> str:
        return f"MmfFamily.{self.name}"


@dataclass(frozen=True, slots=True, repr=False)
class DequeFamily(MmfFamily):
    """A work-stealing deque, used as `variant` says."""

    variant: DequeVariant

    def signature(self) -> Axis:
        """Return the axes on which this family has something to offer."""
        return Axis.ANY_CONSUMER | Axis.BATCHES | Axis.IDLE_CONSUMERS

    def __repr__(self) -> str:
        return f"MmfFamily.SharedDeque({self.variant})"


MmfFamily.SHARED_RING = PlainFamily("SHARED_RING", Axis.ANY_PRODUCER | Axis.ANY_CONSUMER | Axis.IDLE_CONSUMERS)
MmfFamily.SharedDeque = DequeFamily
MmfFamily.SHARED_HASH_MAP = PlainFamily("SHARED_HASH_MAP", Axis.KEYS)

# In the order of preference: the first one that has all that is required is picked.
FAMILIES = (MmfFamily.SHARED_RING, MmfFamily.SharedDeque(DequeVariant.BATCHED), MmfFamily.SHARED_HASH_MAP)


def _check_numbers(shape: object, least: int, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(shape, name)
        if operator.index(value) < least:
            raise ValueError(f"{name} must be at least {least}, not {value!r}")


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """How one owner hands work to thieves.

    Parameters
    ----------
    n_thieves : int
        How many take at a time; may be 0.
    batch_size : int
        Messages that the owner has at hand when it pushes; 1 where they come one by one.
    wait_idle : bool
        Whether the thieves are to leave their processors to others between batches.

    Raises
    ------
    ValueError
        `n_thieves` is negative, or `batch_size` less than 1.
    """

    n_thieves: int
    batch_size: int = 1
    wait_idle: bool = False

    def __post_init__(self) -> None:
        _check_numbers(self, 0, ("n_thieves",))
        _check_numbers(self, 1, ("batch_size",))

    @classmethod
    def request_reply(cls) -> "WorkloadShape":
        """One message at a time for one thief, whose answer the owner waits for."""
        return cls(1)

    @classmethod
    def producer_fast(cls, k: int) -> "WorkloadShape":
        """Batches of `k` for one thief."""
        return cls(1, k)

    @classmethod
    def fan_out(cls, n: int, k: int) -> "WorkloadShape":
        """Batches of `k` that `n` thieves share."""
        return cls(n, k)

    def required_signature(self) -> Axis:
        """Return the axes that this shape needs."""
        required = Axis.ANY_CONSUMER
        if self.batch_size >= SMALLEST_CHEAP_BATCH:
            required |= Axis.BATCHES
        if self.wait_idle:
            required |= Axis.IDLE_CONSUMERS
        return required


class MmfWorkloadShape(ABC):
    """A workload: `StreamingMpmc`, `WorkStealing` or `KeyValueLookup`. Equal by value, and hashable."""

    __slots__ = ()

    StreamingMpmc: ClassVar[type["StreamingMpmc"]]
    WorkStealing: ClassVar[type["WorkStealing"]]
    KeyValueLookup: ClassVar[type["KeyValueLookup"]]

    @abstractmethod
    def required_signature(self) -> Axis:
        """Return the axes that this shape needs."""


@dataclass(frozen=True, slots=True)
class StreamingMpmc(MmfWorkloadShape):
    """Messages from any number of producers to any number of consumers, which may come and go.

    Raises
    ------
    ValueError
        A number is negative.
    """

    n_producers: int
    n_consumers: int

    def __post_init__(self) -> None:
        _check_numbers(self, 0, ("n_producers", "n_consumers"))

    def required_signature(self) -> Axis:
        """Return the axes that this shape needs; however many are there at first, others may come."""
        return Axis.ANY_PRODUCER | Axis.ANY_CONSUMER


@dataclass(frozen=True, slots=True)
class WorkStealing(MmfWorkloadShape):
    """Work that one owner hands out and thieves take.

    Raises
    ------
    TypeError
        `shape` is no `WorkloadShape`.
    """

    shape: WorkloadShape

    def __post_init__(self) -> None:
        if not isinstance(self.shape, WorkloadShape):
            raise TypeError(f"WorkStealing takes a WorkloadShape, not {self.shape!r}")

    def required_signature(self) -> Axis:
        """Return the axes that this shape needs."""
        return self.shape.required_signature()


@dataclass(frozen=True, slots=True)
class KeyValueLookup(MmfWorkloadShape):
    """Values that writers enter under keys, and readers look up.

    Raises
    ------
    ValueError
        A number is negative.
    """

    n_readers: int
    n_writers: int

    def __post_init__(self) -> None:
        _check_numbers(self, 0, ("n_readers", "n_writers"))

    def required_signature(self) -> Axis:
        """Return the axes that this shape needs."""
        return Axis.KEYS


MmfWorkloadShape.StreamingMpmc = StreamingMpmc
MmfWorkloadShape.WorkStealing = WorkStealing
MmfWorkloadShape.KeyValueLookup = KeyValueLookup


class MmfDispatcher:
    """Names the family for a shape: `pick` by the kind of the shape, `pick_by_signature` by what the families offer."""

    @staticmethod
    def pick(shape: MmfWorkloadShape) -> MmfFamily:
        """Return the family that suits `shape`.

        Raises
        ------
        TypeError
            `shape` is none of the three.
        """
        match shape:
            case WorkStealing(work) if work.batch_size >= SMALLEST_CHEAP_BATCH:
                return DequeFamily(DequeVariant.BATCHED)
            case StreamingMpmc() | WorkStealing():
                return MmfFamily.SHARED_RING
            case KeyValueLookup():
                return MmfFamily.SHARED_HASH_MAP
        raise TypeError(f"a shape is a StreamingMpmc, a WorkStealing or a KeyValueLookup, not {shape!r}")

    @staticmethod
    def pick_by_signature(shape: MmfWorkloadShape) -> MmfFamily:
        """Return the first family, a ring before a deque, that offers all that `shape` requires.

        Raises
        ------
        LookupError
            None of them does (which no shape of this module comes to).
        """
        required = shape.required_signature()
        for family in FAMILIES:
            if required in family.signature():
                return family
        raise LookupError(f"no family offers {required}, as {shape!r} requires")
