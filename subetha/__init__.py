"""Subetha: Python functions in other processes of one machine, through memory-mapped files.

Every public name can be imported from here; what a name needs (numpy, the compiled core) is loaded at its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from subetha._core import Claim as Claim
    from subetha._core import HeartbeatTable as HeartbeatTable
    from subetha._core import JobClaim as JobClaim
    from subetha._core import Pass as Pass
    from subetha._core import SharedDeque as SharedDeque
    from subetha._core import SharedHashMap as SharedHashMap
    from subetha._core import SharedRing as SharedRing
    from subetha._core import SubmittedResult as SubmittedResult
    from subetha.dispatcher import Axis as Axis
    from subetha.dispatcher import DequeVariant as DequeVariant
    from subetha.dispatcher import MmfDispatcher as MmfDispatcher
    from subetha.dispatcher import MmfFamily as MmfFamily
    from subetha.dispatcher import MmfWorkloadShape as MmfWorkloadShape
    from subetha.dispatcher import WorkloadShape as WorkloadShape
    from subetha.errors import ArenaFull as ArenaFull
    from subetha.errors import ArenaTooSmall as ArenaTooSmall
    from subetha.errors import ArgsTooLarge as ArgsTooLarge
    from subetha.errors import CallFailed as CallFailed
    from subetha.errors import Empty as Empty
    from subetha.errors import ExecutionError as ExecutionError
    from subetha.errors import Full as Full
    from subetha.errors import HeartbeatError as HeartbeatError
    from subetha.errors import JobCancelled as JobCancelled
    from subetha.errors import JobTimeout as JobTimeout
    from subetha.errors import LayoutMismatch as LayoutMismatch
    from subetha.errors import MapFull as MapFull
    from subetha.errors import NotOwner as NotOwner
    from subetha.errors import PassError as PassError
    from subetha.errors import PayloadTooLarge as PayloadTooLarge
    from subetha.errors import RemoteTraceback as RemoteTraceback
    from subetha.errors import ResultTooLarge as ResultTooLarge
    from subetha.errors import SchedError as SchedError
    from subetha.errors import SubethaError as SubethaError
    from subetha.errors import TableFull as TableFull
    from subetha.errors import TransportError as TransportError
    from subetha.errors import TryAgain as TryAgain
    from subetha.errors import UnknownClosureId as UnknownClosureId
    from subetha.errors import UnknownJob as UnknownJob
    from subetha.errors import UnsupportedTransportFamily as UnsupportedTransportFamily
    from subetha.errors import WorkerDied as WorkerDied
    from subetha.executor import Executor as Executor
    from subetha.executor import default_executor as default_executor
    from subetha.executor import set_default_executor as set_default_executor
    from subetha.failover import FailoverWatchdog as FailoverWatchdog
    from subetha.failover import ReclaimReport as ReclaimReport
    from subetha.failover import iter_in_flight_bits as iter_in_flight_bits
    from subetha.futures import JobFuture as JobFuture
    from subetha.job import CurrentJob as CurrentJob
    from subetha.job import current_job as current_job
    from subetha.job import progress as progress
    from subetha.jobqueue import DeadLetter as DeadLetter
    from subetha.jobqueue import JobQueue as JobQueue
    from subetha.jobqueue import QuarantinedJob as QuarantinedJob
    from subetha.jobqueue import QueueStats as QueueStats
    from subetha.layout import HeartbeatSnapshot as HeartbeatSnapshot
    from subetha.layout import Role as Role
    from subetha.pass_registry import PassRegistry as PassRegistry
    from subetha.pass_registry import PassResult as PassResult
    from subetha.pass_registry import execute as execute
    from subetha.pass_registry import is_registered as is_registered
    from subetha.pass_registry import register as register
    from subetha.pass_registry import registered_count as registered_count
    from subetha.pass_registry import unregister as unregister
    from subetha.pool import WorkerPool as WorkerPool
    from subetha.scheduler import BackgroundScheduler as BackgroundScheduler
    from subetha.scheduler import ResultCollector as ResultCollector
    from subetha.scheduler import Submitter as Submitter
    from subetha.scheduler import WorkerLoop as WorkerLoop
    from subetha.sidecar import AdaptiveInstance as AdaptiveInstance
    from subetha.sidecar import FixedPolicy as FixedPolicy
    from subetha.sidecar import HandshakeHeader as HandshakeHeader
    from subetha.sidecar import InstanceStats as InstanceStats
    from subetha.sidecar import NoMigrationPolicy as NoMigrationPolicy
    from subetha.sidecar import ObservationRing as ObservationRing
    from subetha.sidecar import Policy as Policy
    from subetha.sidecar import Sidecar as Sidecar
    from subetha.sidecar import WaitingPolicy as WaitingPolicy
    from subetha.tasks import Task as Task
    from subetha.tasks import eager as eager
    from subetha.tasks import task as task
    from subetha.transport import MessageTransport as MessageTransport
    from subetha.wire import MAX_ARG_LEN as MAX_ARG_LEN
    from subetha.wire import MAX_RESULT_LEN as MAX_RESULT_LEN
    from subetha.wire import PAYLOAD_BYTES as PAYLOAD_BYTES
    from subetha.wire import PassSlot as PassSlot

_MODULE_OF = {
    name: module
    for module, names in {
        "_core": "Claim HeartbeatTable JobClaim Pass SharedDeque SharedHashMap SharedRing SubmittedResult",
        "dispatcher": "Axis DequeVariant MmfDispatcher MmfFamily MmfWorkloadShape WorkloadShape",
        "errors": "ArenaFull ArenaTooSmall ArgsTooLarge CallFailed Empty ExecutionError Full HeartbeatError JobCancelled "
        "JobTimeout LayoutMismatch MapFull NotOwner PassError PayloadTooLarge RemoteTraceback ResultTooLarge SchedError "
        "SubethaError TableFull TransportError TryAgain UnknownClosureId UnknownJob UnsupportedTransportFamily WorkerDied",
        "executor": "Executor default_executor set_default_executor",
        "failover": "FailoverWatchdog ReclaimReport iter_in_flight_bits",
        "futures": "JobFuture",
        "job": "CurrentJob current_job progress",
        "jobqueue": "DeadLetter JobQueue QuarantinedJob QueueStats",
        "layout": "HeartbeatSnapshot Role",
        "pass_registry": "PassRegistry PassResult execute is_registered register registered_count unregister",
        "pool": "WorkerPool",
        "scheduler": "BackgroundScheduler ResultCollector Submitter WorkerLoop",
        "sidecar": "AdaptiveInstance FixedPolicy HandshakeHeader InstanceStats NoMigrationPolicy ObservationRing Policy Sidecar "
        "WaitingPolicy",
        "tasks": "Task eager task",
        "transport": "MessageTransport",
        "wire": "MAX_ARG_LEN MAX_RESULT_LEN PAYLOAD_BYTES PassSlot",
    }.items()
    for name in names.split()
}

__all__ = ["__version__", *sorted(_MODULE_OF)]


def _version() -> str:
    # late: these modules take as long to import as half of the rest
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("subetha-scheduler")
    except PackageNotFoundError:  # imported from a source tree that is not installed
        return "0+unknown"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        globals()[name] = found = _version()
        return found
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'subetha' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"subetha.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
