"""The prepared parent: forks a victim for each point, kills or stops it there, and looks at what is left.

It reads one JSON object a line (`{"do", "what", "call", "point"}`) and writes one a line. No wait is without a bound: an
alarm ends what Python can end, faulthandler the rest.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback

from ptrace import Point, Tracee, Watched, why_not

import subetha._core  # noqa: F401 - loaded before the first child, so that its addresses are everywhere the same

ALARM_S, DEADLINE_S = 40, 50


class Server:
    def __init__(self, directory):
        self.directory = directory
        self.modules, self.templates, self.falls = {}, {}, {}
        self.made = 0

    def stage(self, what, name):
        if what not in self.modules:
            self.modules[what] = importlib.import_module(f"{what}_calls")
            self.templates[what] = os.path.join(self.directory, what)
            os.mkdir(self.templates[what])
            self.modules[what].make_template(self.templates[what])
        self.made += 1
        module = self.modules[what]
        kind = {**module.DYING, **module.CALLS}[name]
        return kind.copy(self.templates[what], os.path.join(self.directory, f"{what}-{self.made}"))

    def point_of_fall(self, what, name, state):
        """The first instruction of the call after which a cell is in that state."""
        key = (what, name, state)
        if key not in self.falls:
            stage = self.stage(what, name)
            stage.before()
            before = stage.count(state)
            found = []

            def look(point):
                if not found and stage.count(state) > before:
                    found.append(point)

            tracee = Tracee(stage.setup, stage.call)
            before = stage.count(state)
            try:
                tracee.trace(Watched(stage.watched), look)
            finally:
                tracee.kill()
                stage.close()
                shutil.rmtree(stage.directory)
            if not found:
                raise RuntimeError(f"{name} never comes to {state!r}")
            self.falls[key] = found[0]
        return self.falls[key]

    def living(self, what, stage, falls):
        """Those who fall before the call, alive: with what they need opened, since to open may be to rescue."""
        others = []
        for n, (name, _) in enumerate(falls):
            fallen = self.modules[what].DYING[name](stage.directory)
            fallen.producer = self.modules[what].FALLEN + n
            others.append((fallen, Tracee(fallen.setup, fallen.call, fallen.finish)))
        return others

    def let_fall(self, what, stage, falls, others):
        for (name, state), (_, tracee) in zip(falls, others, strict=True):
            if state is None:
                tracee.run_to_end()
                continue
            before = stage.count(state)
            if not tracee.run_to(self.falls[what, name, state]) or stage.count(state) <= before:
                raise RuntimeError(f"{name} did not come to {state!r}")

    def let_die(self, what, stage, others):
        self.let_fall(what, stage, stage.dies, others)
        for _, tracee in others:
            tracee.kill()

    def let_lapse(self, what, stage, others):
        self.let_fall(what, stage, stage.lapses, others)
        for _, tracee in others:
            tracee.stop()
        stage.silent = [tracee for _, tracee in others]
        if others:
            stage.silence()

    def prepare_falls(self, what, name):
        kind = self.stage_kind(what, name)
        for fall in (*kind.dies, *kind.lapses):
            if fall[1] is not None:
                self.point_of_fall(what, *fall)

    def stage_kind(self, what, name):
        if what not in self.modules:
            shutil.rmtree(self.stage(what, name).directory)
        return self.modules[what].CALLS[name]

    @contextlib.contextmanager
    def act(self, what, name, *, finishes=0, is_traced=False, dies_later=False):
        """The stage and its victims, forked and waiting before their calls, with those dead that die first.

        Where a call is traced with the dead or the lapsed about, the survivor is a process that is stopped meanwhile, and the
        timer of the victim is, too: these would do their work before the slow steps get there.
        """
        stage = self.stage(what, name)
        tracees = []
        try:
            is_alone = is_traced and (stage.dies or stage.lapses)
            if is_alone:
                tracees.append(Tracee(stage.before, int))
                tracees[0].stop()
            else:
                stage.before()
            others = self.living(what, stage, stage.dies)
            lapsed = self.living(what, stage, stage.lapses)
            tracees += [tracee for _, tracee in (*others, *lapsed)]
            if not is_traced:
                for fallen, tracee in others:
                    stage.after_fall(fallen, tracee.pid)
            victims = [
                Tracee(stage.setup, stage.call, stage.finish if n < finishes else None) for n in range(max(1, finishes))
            ]
            tracees += victims
            if is_alone:
                victims[0].freeze_others()
            if dies_later:
                stage.let_die = lambda: self.let_die(what, stage, others)
            else:
                self.let_die(what, stage, others)
            self.let_lapse(what, stage, lapsed)
            yield stage, *victims
        finally:
            for tracee in tracees:
                tracee.kill()
            # where something was wrong the stage is not closed yet
            with contextlib.suppress(Exception):
                stage.close()
            shutil.rmtree(stage.directory)

    def trace(self, what, name):
        """Every point of the call."""
        with self.act(what, name, is_traced=True) as (stage, tracee):
            points = [list(point) for point in tracee.trace(Watched(stage.watched))]
            stage.look_at_trace()
            tracee.kill()
            return points

    def kill(self, what, name, point):
        with self.act(what, name) as (stage, tracee):
            hit = point is not None and tracee.run_to(Point(*point))
            if point is None:
                tracee.run_to_end()
            stage.victim_pid = tracee.pid
            tracee.kill()
            value = tracee.value if tracee.returned else None
            if isinstance(value, Exception):
                raise value
            stage.after_kill(tracee.returned, value)
            return hit

    def stop(self, what, name, point):
        later = not self.stage_kind(what, name).dies_first
        with self.act(what, name, finishes=1, dies_later=later) as (stage, tracee):
            hit = tracee.run_to(Point(*point))
            stage.victim_pid = tracee.pid
            tracee.stop()
            if later:
                stage.let_die()
            stage.traffic()
            tracee.go_on(stage.meanwhile)
            stage.after_stop(tracee.value)
            return hit

    def beside(self, what, name, point, other):
        """One rescuer is stopped at a point, another one killed at a second; the first goes on when all is over."""
        with self.act(what, name, finishes=2) as (stage, slow, tracee):
            slow.run_to(Point(*other))
            slow.stop()
            hit = tracee.run_to(Point(*point))
            tracee.kill()
            stage.after_kill_beside(tracee, slow)
            return hit

    def answer(self, order):
        what, name = order["what"], order["call"]
        self.prepare_falls(what, name)
        if order["do"] == "trace":
            return {"points": self.trace(what, name)}
        if order["do"] == "beside":
            return {"hit": self.beside(what, name, order["point"], order["other"])}
        return {"hit": (self.kill if order["do"] == "kill" else self.stop)(what, name, order["point"])}


def on_alarm(*_):
    raise TimeoutError(f"not over in {ALARM_S} s")


def main():
    signal.signal(signal.SIGALRM, on_alarm)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    why = why_not()
    print(json.dumps({"why_not": why}), file=out)
    if why:
        return
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    directory = tempfile.mkdtemp(prefix="subetha-crash-", dir=where)
    gc.disable()
    gc.freeze()
    try:
        server = Server(directory)
        for line in sys.stdin:
            signal.alarm(ALARM_S)
            faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
            try:
                answer = server.answer(json.loads(line))
            except BaseException:
                answer = {"fault": traceback.format_exc()}
            signal.alarm(0)
            faulthandler.cancel_dump_traceback_later()
            if server.made % 64 == 0 or "fault" in answer:
                gc.collect()
            print(json.dumps(answer), file=out)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
