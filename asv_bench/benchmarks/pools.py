"""Subetha's executor and its peers, with the same calls."""

import concurrent.futures
import contextlib
import multiprocessing

from subetha import Executor

from .peers import needed
from .work import __name__ as WORK

PEERS = ["subetha", "ProcessPoolExecutor", "multiprocessing.Pool", "loky", "dask"]


class _Pool:
    """multiprocessing.Pool."""

    def __init__(self, workers):
        self._pool = multiprocessing.get_context("forkserver").Pool(workers)

    def submit(self, function, *arguments):
        found = self._pool.apply_async(function, arguments)
        found.result = found.get
        return found

    def map(self, function, *iterables, chunksize=1):
        return self._pool.starmap(function, zip(*iterables, strict=True), chunksize)

    def shutdown(self):
        self._pool.close()
        self._pool.join()


class _Dask:
    """dask.distributed on this machine: a scheduler, and worker processes that their nannies replace."""

    def __init__(self, workers):
        distributed = needed("distributed")
        self._cluster = distributed.LocalCluster(
            n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=":0"
        )
        self._client = distributed.Client(self._cluster)

    def submit(self, function, *arguments):
        # pure: a second call with the same arguments would be none
        return self._client.submit(function, *arguments, pure=False)

    def map(self, function, *iterables, chunksize=1):
        if chunksize != 1:
            raise NotImplementedError("dask has no chunks: each call is a task of its own")
        return self._client.gather(self._client.map(function, *iterables, pure=False))

    def shutdown(self):
        self._client.close()
        self._cluster.close()


def see_that_there_is(peer):
    """NotImplementedError, by which asv skips a benchmark, where a peer is not installed."""
    if peer in ("loky", "dask"):
        needed("distributed" if peer == "dask" else peer)


@contextlib.contextmanager
def pool(peer, workers, **options):
    """A pool of warm workers; NotImplementedError where the peer is not there."""
    if peer == "subetha":
        made = Executor(workers, modules=[WORK], **options)
    elif peer == "multiprocessing.Pool":
        made = _Pool(workers)
    elif peer == "loky":
        made = needed("loky").ProcessPoolExecutor(workers)
    elif peer == "dask":
        made = _Dask(workers)
    else:
        made = concurrent.futures.ProcessPoolExecutor(
            workers, mp_context=multiprocessing.get_context(peer.partition(" ")[2] or "forkserver")
        )
    try:
        yield made
    finally:
        made.shutdown()
