"""Run every model and every broken variant with spin, each in a temporary directory.

A sound model has to finish without an error and without a truncated search; a broken variant has to fail.

    python models/check.py [--long] [--jobs N] [MODEL ...]
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TWO_WATCHDOGS = "-DNWD=2 -DNOHEALTHY -DNOCANCEL -DROUNDS=0"
# model: what has to hold, what has to fail, what has to hold and takes long
RUNS = {
    "wait": {
        "sound": ["-DNP1=2 -DNP2=1 -DNW0=2 -DNW1=1"],
        "broken": [
            "-DNP1=2 -DNP2=1 -DNW0=2 -DNW1=1 -DBROKEN_NOSECONDWAKE",
            "-DNP1=2 -DNP2=1 -DNW0=2 -DNW1=1 -DBROKEN_NOBUMP",
        ],
        "long": [],
    },
    "cells": {
        "sound": [
            "-DMAXDEATHS=2",
            "-DREUSE -DNKS=1 -DMAXDEATHS=2",
            "-DTAKEOVER -DMAXDEATHS=1",
            "-DTAKEOVER -DREUSE -DNKS=1 -DMAXDEATHS=1",
            "-DNP=2 -DNKS=1 -DNRES=1 -DMAXDEATHS=1",
            "-DNP=2 -DNC=2 -DRESERVE=1 -DCOPIES=1 -DNKS=1 -DNRES=0 -DMAXDEATHS=1",
        ],
        "broken": [
            "-DMAXDEATHS=2 -DNOBUMP",
            "-DMAXDEATHS=2 -DBROKEN_RETRY",
            "-DMAXDEATHS=2 -DBROKEN_READY",
            "-DMAXDEATHS=2 -DBROKEN_NOINC -DREUSE -DNKS=1",
            "-DTAKEOVER -DMAXDEATHS=2 -DNOBUMP",
            "-DNP=2 -DNC=2 -DRESERVE=1 -DCOPIES=1 -DNKS=1 -DNRES=0 -DMAXDEATHS=0 -DBROKEN_RESERVE",
        ],
        "long": [],
    },
    "park": {
        "sound": [
            "-DMAXDEATHS=1 -DNW=1",
            "-DMAXDEATHS=1 -DNJ=1 -DNC=1",
            "-DMAXDEATHS=2 -DNJ=1 -DNRES=2 -DNW=1 -DNC=1",
        ],
        "broken": [
            "-DMAXDEATHS=1 -DNJ=1 -DNC=1 -DNRES=0 -DNW=1 -DROUNDS=2 -DBROKEN_NOBUMP",
            "-DMAXDEATHS=1 -DNJ=1 -DNC=1 -DNRES=0 -DBROKEN_OWNER",
            "-DMAXDEATHS=1 -DNJ=1 -DNC=1 -DNRES=0 -DBROKEN_WORDFIRST",
            "-DMAXDEATHS=1 -DNJ=1 -DNC=1 -DNRES=0 -DBROKEN_ZEROLAST",
            "-DMAXDEATHS=0 -DNJ=1 -DNC=1 -DBROKEN_GUARD",
            "-DMAXDEATHS=1 -DNJ=1 -DNC=1 -DNRES=0 -DBROKEN_NORESCUE",
            "-DMAXDEATHS=0 -DNW=1 -DBROKEN_NOWORD",
        ],
        "long": ["-DMAXDEATHS=2 -DNJ=1 -DNC=1"],
    },
    "keep": {
        "sound": [
            "-DMAXDEATHS=1 -DNRES=1 -DNREAD=0 -DNEXP=1",
            "-DMAXDEATHS=2 -DNREAD=0 -DNEXP=0 -DNSUB=0",
            "-DMAXDEATHS=2 -DDELIVERED -DNREAD=0 -DNEXP=0",
            "-DMAXDEATHS=2 -DDELIVERED -DNAMED=1 -DNREAD=0 -DNEXP=0",
            "-DMAXDEATHS=1 -DDELIVERED -DNRES=1 -DNEXP=1",
            "-DMAXDEATHS=1 -DDELIVERED -DNEXP=0",
        ],
        "broken": [
            "-DMAXDEATHS=1 -DNRES=1 -DNREAD=0 -DNEXP=0 -DNSUB=0 -DBROKEN_RESCUEFREES",
            "-DMAXDEATHS=1 -DNRES=1 -DNREAD=0 -DNEXP=0 -DNSUB=0 -DBROKEN_ENDFREES",
            "-DMAXDEATHS=0 -DNRES=0 -DNREAD=0 -DNEXP=1 -DBROKEN_NOCAS",
            "-DMAXDEATHS=0 -DNRES=0 -DNEXP=0 -DBROKEN_NOCHECK",
            "-DMAXDEATHS=0 -DNRES=0 -DNREAD=0 -DNEXP=0 -DBROKEN_DUELAST",
            "-DMAXDEATHS=1 -DNREAD=0 -DNEXP=0 -DBROKEN_DUEFIRST",
            "-DMAXDEATHS=1 -DDELIVERED -DNREAD=0 -DNEXP=0 -DBROKEN_TAKEOVER",
            "-DMAXDEATHS=1 -DDELIVERED -DNAMED=1 -DNREAD=0 -DNEXP=0 -DBROKEN_SAMEVERSION",
            "-DMAXDEATHS=1 -DNRES=1 -DNREAD=0 -DNEXP=0 -DNSUB=0 -DBROKEN_STAYS",
        ],
        "long": ["-DMAXDEATHS=1 -DNRES=1 -DNREAD=0", "-DMAXDEATHS=2 -DDELIVERED -DNEXP=0"],
    },
    "bury": {
        "sound": [
            "-DMAXDEATHS=3",
            "-DMAXDEATHS=2 -DRETRIER -DNRES=1",
            "-DMAXDEATHS=1 -DFENCES=1",
            "-DMAXDEATHS=2 -DRETRIER -DNRES=1 -DFENCES=1",
            "-DMAXDEATHS=3 -DDROPPER",
            "-DMAXDEATHS=3 -DDROPPER -DRETRIER -DNRES=1",
        ],
        "broken": [
            "-DMAXDEATHS=3 -DBROKEN_DIRECT",
            "-DMAXDEATHS=3 -DBROKEN_SAMEVERSION",
            "-DMAXDEATHS=3 -DBROKEN_CHARGEALL",
            "-DMAXDEATHS=3 -DBROKEN_LETTERFIRST",
            "-DMAXDEATHS=3 -DBROKEN_UNTOLD",
            "-DMAXDEATHS=3 -DBROKEN_CAUSELAST",
            "-DMAXDEATHS=1 -DFENCES=1 -DBROKEN_NODISCARD",
            "-DMAXDEATHS=2 -DFENCES=1 -DBROKEN_LEFT",
            "-DMAXDEATHS=3 -DDROPPER -DNRES=1 -DBROKEN_LEFT",
            "-DMAXDEATHS=3 -DDROPPER -DNRES=1 -DBROKEN_DROPUNTOLD",
        ],
        "long": ["-DMAXDEATHS=3 -DRETRIER"],
    },
    "mail": {
        "sound": [
            "-DMAXDEATHS=2 -DNRES=1 -DONECOL",
            "-DMAXDEATHS=1 -DNRES=2 -DONECOL",
        ],
        "broken": [
            "-DMAXDEATHS=2 -DNRES=1 -DONECOL -DMARKLATE",
            "-DMAXDEATHS=2 -DBROKEN_NOINC",
            "-DMAXDEATHS=2 -DNRES=1 -DONECOL -DBROKEN_REG",
            "-DMAXDEATHS=2 -DNRES=1 -DONECOL -DBROKEN_CHECKFIRST",
            "-DMAXDEATHS=2 -DNRES=1 -DONECOL -DBROKEN_RESC",
            "-DMAXDEATHS=2 -DNRES=1 -DONECOL -DBROKEN_NOJOBID",
            "-DMAXDEATHS=2 -DNRES=1 -DONECOL -DNODUPCHECK",
        ],
        "long": ["-DMAXDEATHS=2 -DNRES=1"],
    },
    "lapsed": {
        "sound": [
            "-DMAXDEATHS=1",
            "-DMAXDEATHS=2",
            "-DMAXDEATHS=1 -DNC=3 -DNJ=2 -DNOTIMEOUT -DNOCANCEL",
            "-DMAXDEATHS=1 -DNOCANCEL -DROUNDS=1 -DRELEASE",
            f"-DMAXDEATHS=1 {TWO_WATCHDOGS}",
            f"-DMAXDEATHS=2 {TWO_WATCHDOGS} -DNOTIMEOUT",
            f"-DMAXDEATHS=1 {TWO_WATCHDOGS} -DNOTIMEOUT -DREUSE",
        ],
        "broken": [
            "-DMAXDEATHS=1 -DBROKEN_FENCEFIRST",
            "-DMAXDEATHS=1 -DBROKEN_TMO_NOCOPY",
            "-DMAXDEATHS=1 -DBROKEN_CANCEL",
            "-DMAXDEATHS=1 -DBROKEN_NOWITHDRAW",
            "-DMAXDEATHS=1 -DBROKEN_LEFT",
            "-DMAXDEATHS=1 -DNJ=2 -DNOHEALTHY -DNOTIMEOUT -DNOCANCEL -DROUNDS=1 -DBROKEN_NORECHECK",
            f"-DMAXDEATHS=1 {TWO_WATCHDOGS} -DNOTIMEOUT -DBROKEN_NODROP",
            f"-DMAXDEATHS=1 {TWO_WATCHDOGS} -DBROKEN_NOCHARGE",
            f"-DMAXDEATHS=1 {TWO_WATCHDOGS} -DNOTIMEOUT -DREUSE -DBROKEN_NOINC",
        ],
        "long": ["-DMAXDEATHS=1 -DNC=3 -DNJ=2"],
    },
    "blocks": {
        "sound": [
            "-DLETTERS -DNLET=2 -DMAXDEATHS=2 -DCLAIMS=0",
            "-DNLET=1 -DMAXDEATHS=2 -DNRES=2",
            "-DNC=2 -DLEADS=1 -DSTOPS=1 -DMAXDEATHS=1",
            "-DNC=2 -DLEADS=2 -DSTOPS=1 -DMAXDEATHS=1 -DNB=3 -DCLAIMS=2",
        ],
        "broken": [
            "-DLETTERS -DNLET=1 -DMAXDEATHS=1 -DCLAIMS=0 -DBROKEN_FREENEXT",
            "-DLETTERS -DNLET=1 -DMAXDEATHS=1 -DCLAIMS=0 -DBROKEN_RELEASE",
            "-DNC=2 -DLEADS=1 -DSTOPS=1 -DMAXDEATHS=0 -DNRES=0 -DNJ=1 -DBROKEN_OLDWAY",
            "-DNC=2 -DLEADS=1 -DSTOPS=1 -DMAXDEATHS=0 -DNRES=0 -DNJ=1 -DBROKEN_ONEVERSION",
        ],
        "long": [],
    },
    "repair": {
        "sound": [
            "-DNREP=2 -DMAXDEATHS=2",
            "-DNREP=2 -DMAXDEATHS=1 -DDHINTS",
            "-DNREP=1 -DTAKES=1 -DBACKS=1 -DMAXDEATHS=1",
            "-DNREP=1 -DTAKES=1 -DPUSHES=1 -DMAXDEATHS=1",
            "-DNREP=1 -DTAKES=1 -DBACKS=1 -DCALLS -DMAXDEATHS=1",
        ],
        "broken": [
            "-DNREP=2 -DMAXDEATHS=1 -DBROKEN_COUNT",
            "-DNREP=1 -DMAXDEATHS=1 -DNODUE",
            "-DNREP=1 -DTAKES=1 -DBACKS=1 -DCALLS -DMAXDEATHS=0 -DBROKEN_CALLONCE",
            "-DNREP=1 -DTAKES=1 -DBACKS=1 -DCALLS -DMAXDEATHS=0 -DBROKEN_NOCALL",
        ],
        "long": [],
    },
    "rotate": {
        "sound": [
            "-DMAXDEATHS=2 -DNRES=1 -DTBACK=1 -DTDONE=1",
            "-DMAXDEATHS=2 -DNRES=2",
            "-DMAXDEATHS=1 -DNC=3 -DNPUT=2",
            "-DMAXDEATHS=1 -DNC=3 -DLIVE0=2 -DTBACK=1",
            "-DMAXDEATHS=0 -DNC=4 -DLIVE0=2 -DNPUT=2",
        ],
        "broken": [
            "-DMAXDEATHS=0 -DBROKEN_NOROTATE",
            "-DMAXDEATHS=0 -DNC=4 -DLIVE0=2 -DNPUT=2 -DBROKEN_ONETRY",
            "-DMAXDEATHS=1 -DTBACK=1 -DBROKEN_READY",
            "-DMAXDEATHS=1 -DTBACK=1 -DNRES=1 -DNOBUMP",
        ],
        "long": [],
    },
    "map": {
        "sound": [
            "-DHAS0 -DN1=2 -DN2=1 -DKEYS1=3 -DKEYS2=3 -DOPS1=CAS+DEL -DOPS2=INS+CAS -DS=3",
            "-DHAS0 -DN1=1 -DN2=1 -DKEYS2=2 -DOPS1=SET+DEL -DOPS2=INS -DN3=1 -DCLEANED",
            "-DHAS0 -DN1=1 -DOPS1=SET+DEL -DN3=2 -DN4=1 -DNC=2 -DCLEANED",
            "-DHAS0 -DN1=1 -DKEYS1=3 -DOPS1=INS+DEL -DN3=1 -DN4=1 -DKEYS4=3 -DS=3 -DTORN -DCLEANED",
            "-DHAS0 -DN1=1 -DKEYS1=3 -DOPS1=INS+DEL -DN3=1 -DN4=1 -DKEYS4=3 -DS=3 -DCLEANED -DREADBOTH",
            "-DHAS0 -DHAS1 -DN1=1 -DOPS1=DEL -DN2=1 -DOPS2=REBUILD -DN3=1 -DS=3 -DNC=2 -DMAXSTOPS=2 -DMOVEATREST",
            "-DHAS0 -DN1=1 -DN2=1 -DOPS1=SET -DOPS2=SET+DEL -DN5=1 -DMAXDEATHS=1 -DCLEANED",
            "-DHAS0 -DN1=1 -DN2=1 -DOPS1=SET -DOPS2=SET+DEL -DN5=1 -DMAXDEATHS=1 -DCLEANED -DFREEONCE",
            "-DN1=1 -DOPS1=INS -DN3=2 -DN5=1 -DNC=2 -DMAXDEATHS=1 -DCLEANED",
            "-DHAS0 -DN1=1 -DOPS1=SET+DEL -DN3=1 -DN5=1 -DNC=2 -DMAXDEATHS=1 -DCLEANED",
            "-DHAS0 -DN1=1 -DN2=1 -DOPS1=SET -DOPS2=SET -DN5=1 -DMAXDEATHS=2",
            "-DHAS0 -DN1=1 -DOPS1=SET -DN3=1 -DOPS3=RESCUE -DN5=1 -DMAXDEATHS=2",
            "-DHAS0 -DN1=1 -DKEYS1=2 -DOPS1=INS -DN2=1 -DOPS2=REBUILD -DN3=2 -DS=3 -DNC=2 -DCLEANED",
            "-DHAS0 -DN1=2 -DN2=1 -DKEYS1=3 -DKEYS2=3 -DOPS1=CAS+DEL -DOPS2=INS+CAS -DN4=1 -DS=3 -DAPART",
            "-DBLOCKS -DTORN -DHAS0 -DN1=1 -DN2=1 -DOPS1=SET -DOPS2=SET -DN4=1",
            "-DBLOCKS -DHAS0 -DN1=1 -DOPS1=SET+DEL -DN3=1 -DN4=1 -DCLEANED",
            "-DBLOCKS -DHAS0 -DN1=1 -DN2=1 -DOPS1=CAS+DEL -DOPS2=INS+CAS -DNB=2 -DN4=1",
            "-DBLOCKS -DHAS0 -DN1=1 -DN2=1 -DOPS1=SET -DOPS2=SET -DN5=1 -DMAXDEATHS=1 -DCLEANED",
        ],
        "broken": [
            "-DN1=1 -DN2=1 -DOPS1=INS -DOPS2=REBUILD -DN3=2 -DCLEANED -DBROKEN_NOGEN",
            "-DN1=1 -DOPS1=INS -DN3=2 -DNC=2 -DCLEANED -DBROKEN_EMPTYNOGEN",
            "-DHAS0 -DN1=0 -DN2=1 -DOPS2=REBUILD -DN3=5 -DNC=2 -DCLEANED -DWRAP=4",
            "-DN1=1 -DN2=1 -DOPS1=SET -DOPS2=SET -DBROKEN_NOLOOK",
            "-DHAS0 -DN1=2 -DN2=1 -DOPS1=DEL+INS -DOPS2=INS -DKEYS1=3 -DKEYS2=2 -DS=3 -DBROKEN_DELEMPTY",
            "-DHAS0 -DHAS1 -DN1=2 -DOPS1=SET -DKEYS1=3 -DS=3 -DN4=1 -DBROKEN_SKIP",
            "-DHAS0 -DN1=1 -DN2=1 -DOPS1=SET -DOPS2=SET -DBROKEN_FREEFIRST",
            "-DHAS0 -DN1=1 -DN2=1 -DOPS1=SET -DOPS2=SET -DN5=1 -DMAXDEATHS=1 -DCLEANED -DBROKEN_NOLOOKAGAIN",
            "-DN1=1 -DOPS1=INS -DN3=2 -DN5=1 -DNC=2 -DMAXDEATHS=1 -DCLEANED -DBROKEN_NOPHASE",
            "-DN1=1 -DOPS1=INS -DN3=2 -DN5=1 -DNC=2 -DMAXDEATHS=1 -DCLEANED -DBROKEN_DEADNOPHASE",
            "-DHAS0 -DN1=1 -DOPS1=SET -DN3=1 -DNC=2 -DMAXDEATHS=1 -DCLEANED -DBROKEN_BOTH",
            "-DHAS0 -DN1=1 -DOPS1=SET -DN2=1 -DOPS2=DEL -DN5=1 -DMAXDEATHS=1 -DBROKEN_MARKFIRST",
            "-DHAS0 -DN1=1 -DOPS1=DEL -DN3=1 -DN4=1 -DNC=2 -DCLEANED -DBROKEN_OLDPHASE",
            "-DHAS0 -DHAS1 -DN1=1 -DOPS1=DEL -DN3=1 -DN4=1 -DKEYS4=3 -DS=3 -DNC=2 -DCLEANED"
            " -DREADYONLY -DLOOKATABSENT -DBROKEN_GONE",
            "-DBLOCKS -DHAS0 -DN1=1 -DN2=1 -DOPS1=SET -DOPS2=SET -DN4=1 -DBROKEN_NOBLOCKLOOK",
            "-DBLOCKS -DHAS0 -DN1=1 -DOPS1=SET -DN4=1 -DBROKEN_LATELINK",
            "-DBLOCKS -DHAS0 -DN1=1 -DN2=1 -DOPS1=SET -DOPS2=SET -DBROKEN_EARLYTAKE",
            "-DBLOCKS -DHAS0 -DN1=1 -DOPS1=SET -DMAXDEATHS=1 -DBROKEN_NOBLOCKRESCUE",
        ],
        "long": [
            "-DHAS0 -DN1=1 -DN2=1 -DOPS1=SET -DOPS2=SET -DN3=1 -DMAXDEATHS=1 -DCLEANED",
            "-DHAS0 -DN1=1 -DN2=1 -DKEYS1=3 -DKEYS2=3 -DN3=1 -DCLEANED",
            "-DHAS0 -DN1=1 -DN2=1 -DOPS1=SET -DOPS2=SET -DN3=1 -DOPS3=RESCUE -DN5=1 -DMAXDEATHS=2",
        ],
    },
    "deque": {
        "sound": [
            "-DNT=2",
            "-DNT=2 -DNOPS=1 -DNOPS2=1",
            "-DNT=1 -DNOPS=2 -DNOPS2=1 -DMAXDEATHS=2",
            "-DNT=1 -DNOPS=3",
            "-DNT=2 -DRELEASE -DBACKFIRST",
            "-DNT=1 -DNREP=1",
            "-DNT=1 -DNOPS=1 -DNOPS2=1 -DNREP=1",
        ],
        "broken": [
            "-DNT=1 -DBROKEN_POPFIRST",
            "-DNT=1 -DBROKEN_NOHELP",
            "-DNT=1 -DBROKEN_REFANYWHERE",
            "-DNT=1 -DNOPS=3 -DBROKEN_POPNOINDEX",
            "-DNT=1 -DNOPS2=1 -DBROKEN_TAKEOVER",
            "-DNT=1 -DMAXDEATHS=2 -DBROKEN_UNPUBLISHED",
            "-DNT=1 -DEARLYTAKE -DBROKEN_TOPFIRST",
            "-DNT=1 -DNOPS=1 -DNOPS2=1 -DBROKEN_EARLYTAKE",
            "-DNT=2 -DBROKEN_NOLAP",
            "-DNT=1 -DNREP=1 -DBROKEN_NOTODD",
            "-DNT=1 -DNREP=1 -DBROKEN_LATEODD",
            "-DNT=1 -DNREP=1 -DBROKEN_EARLYEVEN",
            "-DNT=1 -DNREP=1 -DBROKEN_NOTAGAIN",
        ],
        "long": [
            "-DNT=2 -DNOPS=1 -DNOPS2=1 -DEARLYTAKE",
            "-DNT=2 -DNOPS=1 -DNOPS2=1 -DNREP=1",
            "-DNT=2 -DNOPS=2 -DNOPS2=1 -DMAXDEATHS=2",
        ],
    },
}
# the verifiers of these are long, and a broken one is through soon: compiling takes more time than optimizing saves
UNOPTIMIZED = {"repair", "deque", "map", "broken"}
MEGABYTES = {"sound": 2500, "broken": 2500, "long": 12000}
TRUNCATED = ("max search depth too small", "Search not completed", "out of memory", "memory limit")


@dataclass
class Outcome:
    """What one run showed."""

    model: str
    flags: str
    kind: str
    states: str
    seconds: float
    verdict: str
    expected: bool


def explore(model: str, flags: str, kind: str) -> str:
    """The output of the verifier, or of the tool that failed before it."""
    source = Path(__file__).resolve().parent / f"{model}.pml"
    optimize = "-O0" if kind != "long" and UNOPTIMIZED & {model, kind} else "-O1"
    compiler = f"gcc {optimize} -w -DSAFETY -DCOLLAPSE -DMEMLIM={MEGABYTES[kind]} -o pan pan.c"
    with tempfile.TemporaryDirectory(prefix="subetha-model-") as folder:
        shutil.copy(source, Path(folder) / "model.pml")
        output = ""
        for command in (f"spin -a {flags} model.pml", compiler, "./pan -m1000000"):
            done = subprocess.run(
                command.split(), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
            )
            output = done.stdout
            if done.returncode and not command.startswith("./pan"):
                return f"{command.split()[0]} failed: {output.strip()[-300:]}"
        return output


def run(model: str, flags: str, kind: str) -> Outcome:
    """Explore once and judge the outcome against what was expected."""
    start = time.monotonic()
    output = explore(model, flags, kind)
    seconds = time.monotonic() - start
    errors = re.search(r"errors: (\d+)", output)
    states = re.search(r"^\s*([0-9.e+]+) states, stored", output, re.MULTILINE)
    truncated = any(text in output for text in TRUNCATED)
    if errors is None:
        verdict = output.strip()[-300:] or "no output"
    elif errors[1] != "0":
        # an assertion or an end state: what else spin calls an error proves nothing
        found = re.search(r"pan:\d+: (assertion violated|invalid end state)", output)
        verdict = "fails" if found else output.strip()[:300]
    else:
        verdict = "truncated" if truncated else "holds"
    expected = verdict == ("fails" if kind == "broken" else "holds")
    return Outcome(model, flags, kind, states[1] if states else "?", seconds, verdict, expected)


def main() -> int:
    """Run what was asked for, print the table; 1 on any surprise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: all of {', '.join(RUNS)}")
    parser.add_argument(
        "--long", action="store_true", help="also the worlds that take more than about 40 s or much memory"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at once (default 2)")
    arguments = parser.parse_args()
    unknown = set(arguments.models) - set(RUNS)
    if unknown:
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    missing = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
    if missing:
        print(f"{' and '.join(missing)} not found: apt-get install spin gcc", file=sys.stderr)
        return 1
    kinds = ["sound", "broken"]
    todo = [(m, flags, kind) for m in arguments.models or RUNS for kind in kinds for flags in RUNS[m][kind]]
    with ThreadPoolExecutor(max(1, arguments.jobs)) as pool:
        outcomes = list(pool.map(lambda one: run(*one), todo))
    if arguments.long:
        # one at a time, for their memory
        long_ones = [(m, flags, "long") for m in arguments.models or RUNS for flags in RUNS[m]["long"]]
        outcomes += [run(*one) for one in long_ones]
    width = max(len(one.flags) for one in outcomes)
    print(f"{'model':8}{'variant':{width + 2}}{'states':>12}{'seconds':>9}  verdict")
    for one in outcomes:
        wrong = "" if one.expected else "   UNEXPECTED"
        print(f"{one.model:8}{one.flags:{width + 2}}{one.states:>12}{one.seconds:9.1f}  {one.verdict}{wrong}")
    surprises = sum(not one.expected for one in outcomes)
    print(f"{len(outcomes)} runs, {surprises} surprises")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
