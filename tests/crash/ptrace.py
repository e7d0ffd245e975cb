"""Run one call of a child process up to any of its machine instructions, and kill or stop it there.

`Tracee` forks a child that asks to be traced. Its main thread alone is: the timer thread of the library runs on beside it.
`Tracee.trace` single-steps the call once and notes the instructions; `Tracee.run_to` goes to one of them by a hardware
breakpoint, which belongs to that thread only, so that the next child gets there in the time that the call takes.
"""

import ctypes
import gc
import mmap
import os
import pickle
import platform
import signal
import traceback
from typing import NamedTuple

from subetha.errors import Empty, Full

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.ptrace.restype = ctypes.c_long
LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
LIBC.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
LIBC.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
LIBC.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]

TRACEME, PEEKUSER, POKEUSER, CONT, SINGLESTEP, DETACH, SEIZE, INTERRUPT = 0, 3, 6, 7, 9, 17, 0x4206, 0x4207
RIP, RAX, RDI, RSI = 16 * 8, 10 * 8, 14 * 8, 13 * 8  # offsets in struct user of x86-64
DEBUG_REGISTERS = 848
PR_SET_PDEATHSIG = 1
WALL = 0x40000000
SYSCALL = b"\x0f\x05"


def ptrace(request, pid, address=0, data=0):
    ctypes.set_errno(0)
    value = LIBC.ptrace(request, pid, address, data)
    if value == -1 and ctypes.get_errno():
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace request {request:#x} of process {pid}: {os.strerror(number)}")
    return value


class Point(NamedTuple):
    """An instruction of a call: the `hit`-th time that it comes to `offset` in the file `module`.

    `tells` where what others see is not the same as at the point before it.
    """

    module: str
    offset: int
    hit: int
    tells: bool


class Text:
    """Where the files of a process are mapped as code."""

    def __init__(self, pid):
        self.areas, self.bases = [], {}
        with open(f"/proc/{pid}/maps") as lines:
            for line in lines:
                fields = line.split(None, 5)
                start, end = (int(n, 16) for n in fields[0].split("-"))
                name = os.path.basename(fields[5].strip()) if len(fields) == 6 else ""
                self.bases.setdefault(name, start)
                if "x" in fields[1]:
                    self.areas.append((start, end, name))

    def name_of(self, address):
        for start, end, name in self.areas:
            if start <= address < end:
                return name
        return ""

    def address_of(self, point):
        return self.bases[point.module] + point.offset

    @property
    def core(self):
        return next((start, end, name) for start, end, name in self.areas if name.startswith("_core."))


class Watched:
    """The first bytes (0: all) of files that processes share, and whether they are what they were at the last look."""

    def __init__(self, places):
        self.pairs = []
        for path, length in places:
            with open(path, "r+b") as file:
                mapped = mmap.mmap(file.fileno(), length)
            copy = (ctypes.c_char * len(mapped))()
            self.pairs.append(
                (mapped, ctypes.addressof(ctypes.c_char.from_buffer(mapped)), ctypes.addressof(copy), copy)
            )
            LIBC.memcpy(self.pairs[-1][2], self.pairs[-1][1], len(mapped))

    def changed(self):
        found = False
        for mapped, at, copy_at, _ in self.pairs:
            if LIBC.memcmp(at, copy_at, len(mapped)):
                LIBC.memcpy(copy_at, at, len(mapped))
                found = True
        return found


class Tracee:
    """A child that runs `setup()`, `call()`, then `finish(value)`. It waits, stopped, before the call and after it.

    `setup` gives the callable, so that whatever is opened is opened in the child. What the call gave back is told at once
    through a shared page, so it is known to have returned even where the child is killed right after it.
    """

    text = None

    def __init__(self, setup, call, finish=None):
        self.page = mmap.mmap(-1, 1 << 17)
        self.frozen = []
        self.is_traced = True
        self.pid = os.fork()
        if self.pid == 0:
            self._child(setup, call, finish)
        self._wait(signal.SIGSTOP)
        if Tracee.text is None:
            # the same for every child of this process
            Tracee.text = Text(self.pid)

    def _child(self, setup, call, finish):
        code = 1
        try:
            gc.disable()
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            ptrace(TRACEME, 0)
            setup()
            signal.raise_signal(signal.SIGSTOP)
            try:
                value = call()
            except (Empty, Full) as error:
                # while it was stopped others were faster
                value = error
            self._tell(1, value)
            if not self.page[1]:
                signal.raise_signal(signal.SIGSTOP)
            if finish is not None:
                self._tell(2, finish(value))
            code = 0
        except BaseException:
            self._tell(9, traceback.format_exc())
        finally:
            os._exit(code)

    def _tell(self, what, value):
        words = pickle.dumps(value)
        self.page[8 : 8 + len(words)] = words
        self.page[0] = what

    def _told(self):
        return pickle.loads(self.page[8:])

    @property
    def returned(self):
        """Had the call returned?"""
        return self.page[0] in (1, 2)

    @property
    def value(self):
        """What the call, or `finish`, gave back."""
        return self._told()

    def _wait(self, expected):
        """Wait until it stops by `expected` or for a step; the signal that stopped it."""
        _, status = os.waitpid(self.pid, WALL)
        if not os.WIFSTOPPED(status):
            self.pid = None
            raise RuntimeError(
                f"the child ended ({os.waitstatus_to_exitcode(status)}): {self.page[0] and self._told()}"
            )
        stopped_by = os.WSTOPSIG(status)
        if stopped_by not in (expected, signal.SIGSTOP):
            raise RuntimeError(f"the child was stopped by {signal.Signals(stopped_by).name}")
        return stopped_by

    def rip(self):
        return LIBC.ptrace(PEEKUSER, self.pid, RIP, 0) & 0xFFFFFFFFFFFFFFFF

    def freeze_others(self):
        """Stop its other threads (the timer), for as long as the single steps of a trace take."""
        for task in map(int, os.listdir(f"/proc/{self.pid}/task")):
            if task != self.pid:
                ptrace(SEIZE, task)
                ptrace(INTERRUPT, task)
                os.waitpid(task, WALL)
                self.frozen.append(task)

    def trace(self, watched, at_change=None, at_kernel=None):
        """Single-step the call to its end; its Points. `at_change(point)` is called where the watched files have changed, and
        `at_kernel(number, first, second)`, with the number and arguments of a system call, after it.

        Points are all instructions inside the extension module, and those elsewhere (libc) at which the files have changed.
        """
        start, end, module = self.text.core
        points, seen, kinds = [], {}, {}
        before, is_written, after_kernel = 0, False, False
        asked = None
        with open(f"/proc/{self.pid}/mem", "rb", 0) as memory:
            while True:
                LIBC.ptrace(SINGLESTEP, self.pid, 0, 0)
                if self._wait(signal.SIGTRAP) == signal.SIGSTOP:
                    return points
                rip = self.rip()
                if rip == before:
                    continue  # a repeated string instruction is one
                if asked is not None:
                    at_kernel(*asked)
                    asked = None
                hit = seen[rip] = seen.get(rip, 0) + 1
                is_core = start <= rip < end
                changed = is_written and watched.changed()
                name = module if is_core else self.text.name_of(rip) if changed else ""
                # what seems to change under the kernel's own page, or when all is told, was changed by another thread
                if name and name != "[vdso]" and not self.page[0]:
                    point = Point(name, rip - self.text.bases[name], hit, changed or (is_core and after_kernel))
                    after_kernel = after_kernel and not is_core
                    points.append(point)
                    if changed and at_change is not None:
                        at_change(point)
                if rip not in kinds:
                    name = self.text.name_of(rip)
                    # the interpreter itself writes into no mapped file
                    is_written = not name.startswith(("python", "libpython"))
                    kinds[rip] = (os.pread(memory.fileno(), 2, rip) == SYSCALL, is_written)
                is_kernel, is_written = kinds[rip]
                if is_kernel and at_kernel is not None:
                    asked = [ptrace(PEEKUSER, self.pid, register) for register in (RAX, RDI, RSI)]
                after_kernel = after_kernel or is_kernel
                before = rip

    def run_to(self, point):
        """Go on to the point. False: the call ended before it came there."""
        address = self.text.address_of(point)
        ptrace(POKEUSER, self.pid, DEBUG_REGISTERS, address)
        ptrace(POKEUSER, self.pid, DEBUG_REGISTERS + 7 * 8, 1)
        hits = 0
        while hits < point.hit:
            ptrace(CONT, self.pid)
            if self._wait(signal.SIGTRAP) == signal.SIGSTOP:
                return False
            if self.rip() != address:
                raise RuntimeError(f"stopped at {self.rip():#x} instead of {address:#x}")
            hits += 1
        return True

    def run_to_end(self):
        """Let the call return."""
        ptrace(CONT, self.pid)
        self._wait(signal.SIGSTOP)

    def kill(self):
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
            for task in self.frozen:
                os.waitpid(task, WALL)
            while True:
                _, status = os.waitpid(self.pid, WALL)
                if not os.WIFSTOPPED(status):
                    break
            self.pid = None

    def stop(self):
        """SIGSTOP, where it is, with all its threads, and traced no more."""
        self.page[1] = 1
        ptrace(POKEUSER, self.pid, DEBUG_REGISTERS + 7 * 8, 0)
        ptrace(DETACH, self.pid, 0, signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED | WALL)
        if not os.WIFSTOPPED(status):
            raise RuntimeError(f"the child did not stop: {status:#x}")

    def go_on(self, meanwhile=None):
        """SIGCONT, and wait for the end of the child; until then `meanwhile()`."""
        os.kill(self.pid, signal.SIGCONT)
        while True:
            pid, status = os.waitpid(self.pid, WALL | (os.WNOHANG if meanwhile else 0))
            if pid:
                break
            meanwhile()
        self.pid = None
        if os.waitstatus_to_exitcode(status) != 0:
            raise RuntimeError(
                f"the child ended ({os.waitstatus_to_exitcode(status)}): {self.page[0] and self._told()}"
            )


def why_not():
    """Why calls cannot be stepped through here, or None where they can."""
    if platform.machine() != "x86_64":
        return f"the stepper knows x86-64 only, this is {platform.machine()}"
    tracees = []
    try:
        tracees += [Tracee(lambda: None, os.getppid), Tracee(lambda: None, os.getppid)]
        for _ in range(100):
            ptrace(SINGLESTEP, tracees[0].pid)
            tracees[0]._wait(signal.SIGTRAP)
        rip, text = tracees[0].rip(), tracees[0].text
        name = text.name_of(rip)
        if not tracees[1].run_to(Point(name, rip - text.bases[name], 1, False)):
            return "hardware breakpoints do not work here"
    except (OSError, RuntimeError) as error:
        return f"ptrace is not permitted: {error}"
    finally:
        for tracee in tracees:
            tracee.kill()
    return None
