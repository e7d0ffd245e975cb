"""A disk that loses its power: after every store into a durable queue's files, what may be on the disk, and what is made of it.

A child runs jobs through a durable queue, single-stepped. The disk holds of every page (4096 bytes) what the last sync of it
wrote, or anything that stood in it since. After each change and each sync some of these mixtures are drawn, opened as after a
start of the machine, and held against what the child had been told: a job whose `submit` has returned is there once and whole,
one whose end has been told is not, and the queue is sound.

Prints one JSON object. Arguments: how many mixtures are drawn each time, after every how many changes, and a seed.
"""

import contextlib
import faulthandler
import json
import mmap
import os
import random
import shutil
import sys
import tempfile
from collections import Counter

from ptrace import Tracee, Watched, why_not
from queue_calls import FAR, FAR_AHEAD_NS, answer, answered, arguments, copy_sparse, named

from subetha import files
from subetha._core import decode_submit, encode_result
from subetha.check import check_queue
from subetha.errors import Empty, UnknownJob
from subetha.jobqueue import JobQueue
from subetha.layout import LINES_OFFSET, POOL_LINES
from subetha.pass_registry import Pass
from subetha.wire import SUBMIT_HEADER_BYTES

PAGE = 4096
MSYNC = 26
CELLS, LONG = 16, 5_000
OPTIONS = {"participants": 8, "arena_bytes": 2**16}
NAMES = [*"ABCDEFGHIJKLMNOP"]

UNKNOWN, SUBMITTING, ACCEPTED, ENDING, ENDED, ANSWERING, KEPT, FORGETTING = range(8)
EXPECTED = {
    UNKNOWN: {0},
    SUBMITTING: {0, 1},
    ACCEPTED: {1},
    ENDING: {0, 1},
    ENDED: {0},
    ANSWERING: {1},
    KEPT: {0},
    FORGETTING: {0},
}
"""How often a job may be found, by what the child had been told of it; one whose result is to be kept is found in either way
while it is ANSWERING."""
KEPT_EXPECTED = {UNKNOWN: {0}, SUBMITTING: {0}, ACCEPTED: {0}, KEPT: {1}, FORGETTING: {0, 1}, ENDED: {0}}
"""How often its result may be found, where it is to be kept (ANSWERING: it, or the job)."""
KEEPING = "LM"
"""The jobs whose results are to be kept: with one in a cell and with one in a block."""


class Story:
    """What the child does, and a shared page on which it says how far it is with each job."""

    def __init__(self, path):
        self.path = path
        self.page = mmap.mmap(-1, PAGE)

    def setup(self):
        """Whatever is long and of no interest under the stepper is done here."""
        self.queue = JobQueue.open(self.path)
        self.ids = {}
        self.passes = {
            (name, length): Pass(2 if name == "P" else 1, arguments(name, length))
            for name in NAMES
            for length in (40, LONG)
        }
        self.queue.runs({1})
        self.queue._live_closure_ids = set
        self.results = {name: encode_result(0, answer(name, "w", LONG if name in "BM" else 60)) for name in NAMES}
        for length in (40, LONG):
            self.queue.submit(self.passes["A", length])
            self.claim()[1].reply(self.results["A"])
            self.queue.recv(1)

    def told(self):
        return {name: self.page[n] for n, name in enumerate(NAMES)}

    def kept_ids(self):
        """The ids of the jobs whose results are to be kept."""
        found = ((name, self._id_at(name)) for name in KEEPING)
        return {name: int.from_bytes(self.page[at : at + 8], "little") for name, at in found}

    @staticmethod
    def _id_at(name):
        return 64 + 8 * KEEPING.index(name)

    def _tell(self, name, how):
        self.page[NAMES.index(name)] = how

    def submit(self, name, length=40, **options):
        self._tell(name, SUBMITTING)
        self.ids[name] = self.queue.submit(self.passes[name, length], **options)
        self._tell(name, ACCEPTED)

    def claim(self):
        claim = self.queue.try_claim()
        claim.started()
        return bytes(claim.payload[SUBMIT_HEADER_BYTES : SUBMIT_HEADER_BYTES + 1]).decode(), claim

    @contextlib.contextmanager
    def ending(self, name, before=ENDING, after=ENDED):
        self._tell(name, before)
        yield
        self._tell(name, after)

    def keep(self, name, length):
        """A job whose result is kept, with the arguments' block given back as soon as it is collected."""
        self.submit(name, length, priority=0, result_ttl=1000)
        at = self._id_at(name)
        self.page[at : at + 8] = self.ids[name].to_bytes(8, "little")
        found, claim = self.claim()
        with self.ending(found, ANSWERING, KEPT):
            claim.reply(self.results[found])
        self.queue.recv(1)

    def tell(self):
        """Inline and in blocks, each way to end a job, and every cell and block used again by the next one."""
        self.submit("A")
        self.submit("B", LONG, priority=0)
        self.submit("C")
        name, claim = self.claim()
        with self.ending(name):
            claim.reply(self.results[name])
        self.submit("D", LONG)
        self.queue.recv(1)
        name, claim = self.claim()
        claim.release()
        self.submit("E", LONG, priority=2)
        name, claim = self.claim()
        with self.ending(name):
            claim.ack()
        self.submit("F")
        with self.ending("C"):
            self.queue.cancel(self.ids["C"])
        self.submit("G", LONG, priority=2)
        with self.ending("D"):
            self.queue.cancel(self.ids["D"])
        self.submit("H", LONG)
        name, claim = self.claim()
        with self.ending(name):
            claim.reply(self.results[name])
        self.queue.recv(1)
        self.submit("I")
        self.submit("J", due=FAR)
        self.submit("K", LONG, due=FAR)
        with self.ending("K"):
            self.queue.cancel(self.ids["K"])
        self.keep("L", LONG)
        self.keep("M", 40)
        self.submit("N", LONG)
        for name in KEEPING:
            with self.ending(name, FORGETTING):
                self.queue.forget(self.ids[name])
        self.submit("O", LONG)
        # it goes on waiting, whatever the disk has of that
        self.claim()[1].park(FAR)
        # on the way to another one it is parked for who knows it, and the disk may have it as it was before
        self.submit("P", LONG, priority=0)
        assert self.claim()[0] != "P"


class Disk:
    """What may be on the disk of each page of the queue's files, and mixtures of it."""

    def __init__(self, path, draws, seed):
        self.path, self.draws, self.random = path, draws, random.Random(seed)
        self.maps = {}
        for name in sorted(os.listdir(path)):
            with open(os.path.join(path, name), "r+b") as file:
                self.maps[name] = mmap.mmap(file.fileno(), 0)
        self.where = tempfile.mkdtemp(
            prefix="subetha-power-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        )
        self.base = os.path.join(self.where, "base")
        os.mkdir(self.base)
        for name in self.maps:
            copy_sparse(os.path.join(path, name), os.path.join(self.base, name))
        self.now = {name: bytes(mapped) for name, mapped in self.maps.items()}
        self.unsynced = {}
        self.counts = Counter()

    def note(self):
        """Take what has changed since the last look as one more thing that may be on the disk."""
        for name, mapped in self.maps.items():
            old = self.now[name]
            if mapped[:] == old:
                continue
            new = self.now[name] = bytes(mapped)
            for at in range(0, len(new), PAGE):
                page = new[at : at + PAGE]
                if page != old[at : at + PAGE]:
                    versions = self.unsynced.setdefault((name, at), [old[at : at + PAGE]])
                    if page not in versions:
                        versions.append(page)

    def sync(self, name, start, end):
        """These bytes of a file are on the disk: their pages are what they are now."""
        self.note()
        self.counts["syncs"] += 1
        with open(os.path.join(self.base, name), "r+b") as file:
            for at in range(start // PAGE * PAGE, end, PAGE):
                if self.unsynced.pop((name, at), None) is not None:
                    os.pwrite(file.fileno(), self.now[name][at : at + PAGE], at)

    def mixtures(self):
        """All pages as they are, all as they were synced, and some drawn."""
        pages = list(self.unsynced.items())
        yield {key: versions[-1] for key, versions in pages}
        yield {}
        for _ in range(self.draws):
            yield {key: self.random.choice(versions) for key, versions in pages}

    def fail(self, told, kept_ids):
        """Lose the power now, in some of the ways it may go; each is opened and looked at."""
        for mixture in self.mixtures():
            self.counts["failures"] += 1
            image = os.path.join(self.where, "image")
            shutil.copytree(self.base, image, copy_function=copy_sparse)
            for (name, at), page in mixture.items():
                with open(os.path.join(image, name), "r+b") as file:
                    os.pwrite(file.fileno(), page, at)
            with open(os.path.join(image, "pool"), "r+b") as file:
                # another boot of the machine
                os.pwrite(file.fileno(), bytes(8), LINES_OFFSET + POOL_LINES.fields["boot"][1])
            faults = look(image, told, kept_ids)
            if faults:
                raise AssertionError(
                    f"{faults}; told {told}, {self.counts}, pages {[(key, len(v)) for key, v in self.unsynced.items()]}"
                )
            shutil.rmtree(image)

    def close(self):
        shutil.rmtree(self.where)


def kept_results(queue, kept_ids):
    """The names of the jobs whose results are there; each is forgotten."""
    found = Counter()
    for name, job_id in kept_ids.items():
        try:
            result = queue.result(job_id, 0) if job_id else None
        except (UnknownJob, TimeoutError):
            continue
        if result is not None:
            if answered(result) != (name, "w"):
                raise AssertionError(f"the result of {name} is {result!r}")
            found[name] += queue.forget(job_id)
    return found


def look(image, told, kept_ids):
    """Open a disk as after a start of the machine, and run all of its jobs: what is wrong."""
    faults = []
    with JobQueue.open(image) as queue:
        unsure = sum(how == SUBMITTING for how in told.values())
        if len(queue.quarantined()) > unsure:
            faults.append(f"quarantined: {queue.quarantined()}")
        for job in queue.quarantined():
            queue.drop_dead(job.job_id)
        kept = kept_results(queue, kept_ids)
        queue._clock_shift_ns = FAR_AHEAD_NS
        queue.submit(Pass(1, arguments("new")))
        found = Counter()
        while True:
            try:
                claim = queue.try_claim()
            except Empty:
                break
            found[named(decode_submit(claim.payload)[1].args)] += 1
            claim.ack()
        if found.pop("new", 0) != 1:
            faults.append("a new job was not run once")
        for name, how in told.items():
            times = found[name] + (kept[name] if how == ANSWERING else 0)
            if times not in EXPECTED[how]:
                faults.append(f"{name} was found {found[name]} times, its result {kept[name]} times")
            if how != ANSWERING and kept[name] not in (KEPT_EXPECTED[how] if name in KEEPING else {0}):
                faults.append(f"the result of {name} was found {kept[name]} times")
        faults += [f"cells: {queue.stats().states}"] * (queue.stats().free != CELLS)
    faults += check_queue(image, pause=0).faults
    return faults


def areas_of(pid, path):
    """Where the queue's files lie in the memory of a process: start, end, name, offset in the file."""
    with open(f"/proc/{pid}/maps") as lines:
        for line in lines:
            fields = line.split(None, 5)
            if len(fields) == 6 and os.path.dirname(fields[5].strip()) == path:
                start, end = (int(n, 16) for n in fields[0].split("-"))
                yield start, end, os.path.basename(fields[5].strip()), int(fields[2], 16)


def run(directory, draws, every, seed):
    path = os.path.join(directory, "queue")
    JobQueue.create(path, CELLS, durability="disk", **OPTIONS).close()
    story = Story(path)
    disk = Disk(path, draws, seed)
    tracee = Tracee(story.setup, story.tell)
    try:
        tracee.freeze_others()
        areas = list(areas_of(tracee.pid, path))
        disk.note()

        def at_change(_point):
            disk.counts["changes"] += 1
            disk.note()
            if (disk.counts["changes"] + seed) % every == 0:
                disk.fail(story.told(), story.kept_ids())

        def at_kernel(number, first, second):
            if number != MSYNC:
                return
            for start, end, name, offset in areas:
                if start <= first < end:
                    disk.sync(name, first - start + offset, first - start + offset + second)
                    disk.fail(story.told(), story.kept_ids())
                    return
            raise RuntimeError(f"a sync of {first:#x}, which is no file of the queue")

        tracee.trace(Watched([(os.path.join(path, name), 0) for name in disk.maps]), at_change, at_kernel)
        if isinstance(tracee.value, Exception):
            raise tracee.value
        disk.fail(story.told(), story.kept_ids())
        if set(story.told().values()) != {ACCEPTED, ENDED}:
            raise AssertionError(f"the story was not told to its end: {story.told()}")
    finally:
        tracee.kill()
        disk.close()
    return disk.counts


def main(draws, every, seed):
    why = why_not()
    directory = tempfile.mkdtemp(prefix="subetha-power-")
    try:
        where = files.file_system_of(directory)
        if why is None and where in files.MEMORY_FILE_SYSTEMS:
            why = f"{directory} lies in memory ({where}); set TMPDIR to a directory on a disk"
        if why is not None:
            print(json.dumps({"why_not": why}))
            return
        print(json.dumps(run(directory, draws, every, seed)))
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    faulthandler.enable()
    main(*map(int, sys.argv[1:]))
