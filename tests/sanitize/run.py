"""The core under ThreadSanitizer, and under AddressSanitizer with UndefinedBehaviorSanitizer: builds, runs, seeded faults.

    python tests/sanitize/run.py [--seconds N] [--only thread|address] [PYTEST-ARGUMENT ...]

Everything is built out of this tree into a temporary directory, with gcc. Each sound run has to end without a report and without
a fault that the driver counts; each build with a seeded fault has to be reported. Exit code 1: something was otherwise.

Pytest's arguments say which tests run over the address-sanitized core; by default those in TESTS.
"""

import argparse
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from Cython.Build import cythonize
from setuptools import Extension

HERE = Path(__file__).resolve().parent
TREE = HERE.parents[1]

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


ADDRESS = ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


@dataclass
class Kind:
    """A sanitizer. `faults`: which -D, in which world it has to be found, what the report then says."""

    library: str
    flags: list
    core_flags: list
    faults: dict


KINDS = {
    # Python's half of the core runs under the GIL, so only the driver is built for this one. gcc warns of fences, which it does
    # not model.
    "thread": Kind(
        "libtsan.so",
        ["-O1", "-fsanitize=thread"],
        ["-O1"],
        {
            "FAULT_STORE_RELEASE": ("ring-64", "data race"),
            "FAULT_CAS_SEQ_CST": ("ring-64", "data race"),
            "FAULT_CAS_ACQ_REL": ("queue-16", "data race"),
            "FAULT_KEPT": ("queue-16", "data race"),
            "FAULT_FETCH_ADD": ("adaptive", "data race"),
        },
    ),
    "address": Kind(
        "libasan.so",
        ADDRESS,
        ADDRESS,
        {
            "FAULT_READ_PAST": ("ring-64", "use-after-poison"),
            "FAULT_PIECE": ("queue-16", "heap-buffer-overflow"),
            # its bytes agree with no job
            "FAULT_SECOND_LOOK": ("queue-16", '"world": "queue-16"'),
            "FAULT_SHIFT": ("ring-64", "shift exponent 64 is too large"),
        },
    ),
}
# what reads bytes that it should not believe, and what moves most of them
TESTS = [
    "core/test_ring_malformed.py",
    "core/test_ring.py",
    "core/test_claim.py",
    "core/test_map_malformed.py",
    "core/test_map_blocks.py",
    "engine/test_wire.py",
    "queue/test_queue_malformed.py",
    "queue/test_queue_blocks.py",
]

PYTEST = [
    *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(TREE / "pyproject.toml"), "-m", "not slow"),
    *("--timeout=0", "-o", "faulthandler_timeout=0"),
]

OPTIONS = {
    # a suppression needs the stack of both sides, also where one of them was long ago
    "TSAN_OPTIONS": f"exitcode=66:history_size=7:suppressions={HERE / 'thread.supp'}:print_suppressions=1",
    # Python's own objects outlive it
    "ASAN_OPTIONS": "exitcode=66:detect_leaks=0:detect_stack_use_after_return=1:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def say(text):
    print(f"[{time.monotonic() - BEGAN:5.0f} s] {text}", flush=True)


def library(name):
    found = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(found):
        sys.exit(f"gcc has no {name}; on Debian it comes with gcc itself")
    return found


def sources(folder):
    """The core and the stress driver, as C."""
    shutil.copytree(TREE / "subetha", folder / "subetha", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(TREE / "setup.py", folder)
    os.chdir(folder)
    with mock.patch("setuptools.setup") as called:
        runpy.run_path("setup.py")
    (core,) = called.call_args.kwargs["ext_modules"]
    (driver,) = cythonize(
        [Extension("_stress", [str(HERE / "_stress.pyx")])],
        build_dir=str(folder / "driver"),
        include_path=[str(folder)],
        quiet=True,
    )
    return core, driver


def compiled(target, source, flags):
    """One extension module, hardly optimized: gcc takes minutes for what it both instruments and optimizes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{path}" for path in ("subetha/csrc", HERE, sysconfig.get_path("include"))]
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-std=gnu11",
        "-pthread",
        "-g",
        "-fno-omit-frame-pointer",
        "-fno-strict-aliasing",
    ]
    subprocess.run([*command, "-w", *includes, *flags, str(source), "-o", str(target)], check=True)
    return target


def driver_for(folder, name, source, flags):
    compiled(folder / name / f"_stress{SUFFIX}", source, ["-include", str(HERE / "native.h"), *flags])
    return folder / name


class Runs:
    """Runs under one sanitizer's runtime, preloaded into an ordinary Python."""

    def __init__(self, preload, package):
        self.preload = preload
        self.package = package
        self.prefix = []
        self.broken = []
        if self.start(["-c", "pass"], []).returncode != 0:
            # the sanitizer's shadow does not fit some layouts of a randomized address space
            self.prefix = ["setarch", "-R"]
            self.start(["-c", "pass"], []).check_returncode()

    def start(self, arguments, path, **more):
        environment = (
            os.environ
            | OPTIONS
            | {
                "LD_PRELOAD": self.preload,
                "PYTHONPATH": os.pathsep.join(map(str, [*path, self.package])),
                # each object in memory of its own, so that what lies behind it is somebody else's
                "PYTHONMALLOC": "malloc",
                "PYTHONDONTWRITEBYTECODE": "1",
            }
        )
        return subprocess.run([*self.prefix, sys.executable, *arguments], env=environment, cwd=self.package, **more)

    def stress(self, driver, worlds, seconds):
        arguments = [str(HERE / "stress.py"), "--seconds", str(seconds), *worlds]
        return self.start(
            arguments,
            [driver],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=900,
        )

    def sound(self, name, driver, seconds):
        done = self.stress(driver, [], seconds)
        print(done.stdout, flush=True)
        if done.returncode != 0:
            self.broken.append(f"{name}: exit code {done.returncode}")

    def fault(self, name, driver, world, report, seconds):
        """It has to be found; where it is not at first, in a longer run."""
        for longer in (1, 3, 9):
            done = self.stress(driver, [world], seconds * longer)
            if report in done.stdout and done.returncode != 0:
                say(f"{name}: found ({report})")
                return
        print(done.stdout, flush=True)
        self.broken.append(f"{name}: not found in {world}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each world of a sound run")
    parser.add_argument("--only", choices=["thread", "address"])
    parser.add_argument("pytest", nargs="*")
    options = parser.parse_args()
    # it runs elsewhere
    given = [os.path.abspath(one) if os.path.exists(one.split("::")[0]) else one for one in options.pytest]
    tests = given or [str(HERE.parent / name) for name in TESTS]
    broken = []
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(os.cpu_count()) as pool:
        folder = Path(made)
        core, driver = sources(folder)
        say("sources made")
        kinds = [kind for kind in KINDS if options.only in (None, kind)]
        built = {}
        for kind in kinds:
            # the driver with each fault and without one, and the package that it needs beside it
            for fault in (kind, *KINDS[kind].faults):
                flags = KINDS[kind].flags + ([f"-D{fault}"] if fault != kind else [])
                built[fault] = pool.submit(driver_for, folder, fault, driver.sources[0], flags)
            package = folder / f"core-{kind}" / "subetha"
            shutil.copytree(folder / "subetha", package)
            built[package] = pool.submit(compiled, package / f"_core{SUFFIX}", core.sources[0], KINDS[kind].core_flags)
        paths = {name: one.result() for name, one in built.items()}
        say("drivers and cores built")
        for kind in kinds:
            runs = Runs(library(KINDS[kind].library), folder / f"core-{kind}")
            runs.sound(kind, paths[kind], options.seconds)
            for fault, (world, report) in KINDS[kind].faults.items():
                runs.fault(fault, paths[fault], world, report, options.seconds)
            if kind == "address":
                say("tests over the address-sanitized core")
                if runs.start([*PYTEST, *tests], [], timeout=3600).returncode != 0:
                    runs.broken.append("tests over the address-sanitized core")
            broken += runs.broken
    for one in broken:
        say(f"NOT AS EXPECTED: {one}")
    say("ended")
    return int(bool(broken))


if __name__ == "__main__":
    BEGAN = time.monotonic()
    sys.exit(main())
