"""Child processes for the benchmarks that need them: forked from a server that has imported what they need."""

import contextlib
import multiprocessing


@contextlib.contextmanager
def child(target, *args):
    """Run `target(*args, connection)` in a child; give this end of the connection. It hangs up at the end, which ends the child."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["subetha.jobqueue", "subetha.scheduler"])
    here, there = context.Pipe()
    process = context.Process(target=target, args=(*args, there))
    process.start()
    # its end is its own, so that its death ends a wait for it
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join()
