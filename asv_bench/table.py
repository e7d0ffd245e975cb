"""Write the table of docs/speed.md: runs its benchmarks by asv, and puts what they gave between two marks of the page.

python table.py             runs them (half an hour and more) and writes the table
python table.py --kept      writes it from the results that asv has kept last
"""

import argparse
import json
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import product
from math import isnan
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "speed.md"
BEGIN, END = "<!-- written by asv_bench/table.py -->", "<!-- until here -->"

NOTHING, QUOTE = "-", "'"


@dataclass
class Row:
    """One line of the table.

    Attributes
    ----------
    what : str
    benchmark : str
        As asv calls it.
    aim : str
    chosen : dict
        Values of parameters, of which this row has one.
    of_peers : dict, optional
        Those of the peers, where they have another word for it.
    ours : str
        Which value of the parameter `among` is this library; all others are peers.
    among : str
        "" where the benchmark has no peers.
    over : str
        A parameter of which every value is shown.
    """

    what: str
    benchmark: str
    aim: str
    chosen: dict[str, Any] = field(default_factory=dict)
    of_peers: dict[str, Any] | None = None
    ours: str = "subetha"
    among: str = "peer"
    over: str = ""


def hot(what: str, place: str, track: str, aim: str) -> Row:
    return Row(f"4 bytes to a worker process and back, {what}", f"queue.RoundTrip.{track}", aim, {"place": place})


def calls(what: str, kind: str, aim: str, peers_kind: str = "") -> Row:
    peers = {"calls": peers_kind} if peers_kind else None
    return Row(what, "executor.Throughput.track_calls", aim, {"calls": kind}, peers)


ROWS = [
    Row("ring, one thread: push and pop of 56 bytes", "ring.OneThread.track_pair", "under 60 ns"),
    Row(
        "56-byte messages between two processes, one a call",
        "ring.TwoProcesses.track_rate",
        "over 8 M/s",
        {"mode": "one a call"},
    ),
    Row(
        "the same, batches of 256", "ring.TwoProcesses.track_rate", "over 15 M/s", {"mode": "batches of 256"}
    ),
    hot("hot, p50", "unpinned", "track_hot_p50", "under 1 us near, under 3 far"),
    hot("hot, p50, near processors", "near", "track_hot_p50", "under 1 us"),
    hot("hot, p50, far processors", "far", "track_hot_p50", "under 3 us"),
    hot("hot, p99", "unpinned", "track_hot_p99", "under 5 us"),
    hot("worker asleep for 2 ms before, p50", "unpinned", "track_asleep_p50", "under 50 us"),
    Row("4-byte passes, one worker, window 512", "queue.Throughput.track_passes", "over 1.5 M/s"),
    Row(
        "`submit(f, small).result()`, window 1, p50",
        "executor.RoundTrip.track_p50",
        "under 5 us",
        {"argument": "a number"},
    ),
    calls("20,000 futures, any callable", "futures", "over 150 k/s"),
    calls("20,000 futures of a task", "futures of a task", "over 300 k/s", "futures"),
    calls("`submit_many` of small calls", "submit_many of a task", "over 1 M/s", "map"),
    calls("`map` of small calls, one result each", "map", "over 1 M/s"),
    calls("`map` of a task, one result each", "map of a task", "over 1 M/s", "map"),
    calls("`map` of small calls in chunks of 64", "map in chunks of 64", "over 6 M/s"),
    calls("`map` of a task in chunks of 64", "map of a task in chunks of 64", "over 6 M/s", "map in chunks of 64"),
    Row(
        "1 MB of bytes there and back",
        "executor.RoundTrip.track_p50",
        "under 250 us",
        {"argument": "1 MB there and back"},
    ),
    Row(
        "64 MB numpy array, its sum back",
        "executor.RoundTrip.track_p50",
        "under 12 ms",
        {"argument": "64 MB array, its sum back"},
    ),
    Row("idle worker, 10 s: processor time", "idle.Idle.track_processor", "under 0.01 s", {"process": "worker"}),
    Row("idle worker: wake-ups", "idle.Idle.track_wake_ups", "under 2 a second", {"process": "worker"}),
    Row("program with an idle worker: wake-ups", "idle.Idle.track_wake_ups", "", {"process": "program"}),
    *(
        Row(f"{'SIGKILL in mid-job until it runs again' if not n else 'the same'}, {named}{situation}", benchmark, aim, chosen)
        for n, (situation, chosen) in enumerate(
            (situation, {"situation": situation})
            for situation in ("an idle worker", "10,000 jobs waiting", "one worker, started anew")
        )
        for named, benchmark, aim in (
            ("median, ", "death.RunsAgain.track_median", "under 5 ms" if n < 2 else ""),
            ("longest, ", "death.RunsAgain.track_longest", "under 100 ms" if n < 2 else ""),
        )
    ),
    Row(
        "fresh executor of 2 workers to its first result",
        "start.FirstResult.track_first_result",
        "not slower",
        {"executor": "first"},
    ),
    Row(
        "a second one in the same program",
        "start.FirstResult.track_first_result",
        "",
        {"executor": "second"},
    ),
    Row("imports, over numpy's own", "start.Import.track_import", "under 30 ms", among="", over="statement"),
    Row("commands", "start.Command.track_command", "`subetha --help` under 150 ms", among="", over="command"),
    Row(
        "passes with so many jobs under way, one worker",
        "load.Waiting.track_passes",
        "within 25 %",
        among="",
        over="jobs",
    ),
    *(
        Row(f"{what} with so many workers", "load.Workers.track_jobs", aim, {"peer": peer}, among="", over="workers")
        for what, peer, aim in (
            ("passes", "subetha, passes", "no collapse"),
            ("futures", "subetha", "no collapse"),
            ("futures of ProcessPoolExecutor", "ProcessPoolExecutor", ""),
        )
    ),
    Row("queue of 65,536 cells, its files", "memory.Queue.track_files_when_new", "under 64 MB", among=""),
    Row("the same, every cell used", "memory.Queue.track_files_when_full", "under 64 MB", among=""),
    Row("the same, resident in the process that used them", "memory.Queue.track_resident_when_full", "", among=""),
    Row("resident memory of an idle worker with numpy", "memory.IdleWorker.track_resident", "not above"),
    Row("of that, its own alone", "memory.IdleWorker.track_unique", "not above"),
    *(
        Row(f"growth over 1,000,000 passes and 100,000 calls, {process}", "memory.ManyJobs.track_growth", "flat",
            {"process": process}, among="", over="jobs")
        for process in ("worker", "client")
    ),
    Row("worker threads, free-threaded Python", "threads.Threads.track_jobs", "scales", among="", over="threads"),
]  # fmt: skip


class Results:
    """What asv has kept of one run."""

    def __init__(self, folder: Path) -> None:
        kept = sorted(folder.glob("*/*-*.json"), key=lambda path: path.stat().st_mtime)
        if not kept:
            raise FileNotFoundError(f"{folder}: asv has kept no results there")
        found = json.loads(kept[-1].read_text())
        self.commit = found["commit_hash"]
        self.machine = json.loads((kept[-1].parent / "machine.json").read_text())
        self.benchmarks = json.loads((folder / "benchmarks.json").read_text())
        self._found = {
            name: dict(zip(found["result_columns"], columns, strict=False))
            for name, columns in found["results"].items()
        }

    def values(self, benchmark: str) -> list[tuple[dict[str, str], float]]:
        """Every combination of parameters that has a figure, as asv writes them, and the figure."""
        if benchmark not in self._found:
            return []
        found = self._found[benchmark]
        names = self.benchmarks[benchmark]["param_names"]
        combinations = product(*found["params"])
        return [
            (dict(zip(names, values, strict=True)), figure)
            for values, figure in zip(combinations, found["result"] or [], strict=False)
            if figure is not None and not isnan(figure)
        ]

    def unit(self, benchmark: str) -> str:
        return self.benchmarks[benchmark]["unit"]


def written(figure: float, unit: str) -> str:
    """In three digits, with the unit."""
    if unit.endswith("/s") and unit != "1/s":
        for size, letter in ((1e6, "M"), (1e3, "k")):
            if figure >= size:
                return f"{_digits(figure / size)} {letter}/s"
        return f"{_digits(figure)} /s"
    if unit == "us" and figure >= 1000:
        return f"{_digits(figure / 1000)} ms"
    return f"{_digits(figure)} {unit}".rstrip()


def _digits(figure: float) -> str:
    if abs(figure) >= 100:
        return f"{figure:,.0f}"
    return f"{figure:.3g}"


def cells(row: Row, results: Results | None) -> tuple[str, str]:
    """What this library and the best peer have."""
    if results is None or row.benchmark not in results.benchmarks:
        return NOTHING, NOTHING if row.among else ""
    unit = results.unit(row.benchmark)
    found = chosen(results.values(row.benchmark), row.chosen)
    if row.over:
        each = (f"{params[row.over].strip(QUOTE)}: {written(figure, unit)}" for params, figure in found)
        return "<br>".join(each) or NOTHING, ""
    if not row.among:
        return written(found[0][1], unit) if found else NOTHING, ""
    own = [(params, figure) for params, figure in found if params[row.among] == repr(row.ours)]
    if row.of_peers is not None:
        found = chosen(results.values(row.benchmark), row.of_peers)
    peers = [
        (figure, params[row.among].strip(QUOTE)) for params, figure in found if params[row.among] != repr(row.ours)
    ]
    more_is_better = unit.endswith("/s") and unit != "1/s"
    best = (max if more_is_better else min)(peers, default=None)
    return (
        written(own[0][1], unit) + spread(row, own[0][0], results) if own else NOTHING,
        f"{best[1]} {written(best[0], unit)}" if best else NOTHING,
    )


def spread(row: Row, params: dict[str, str], results: Results) -> str:
    """The range of the runs of which a figure is the median, where the benchmark has it."""
    name = f"{row.benchmark}_spread"
    return "".join(
        f" (range {written(figure, results.unit(name))})" for others, figure in results.values(name) if others == params
    )


def chosen(values: list[tuple[dict[str, str], float]], wanted: dict[str, Any]) -> list[tuple[dict[str, str], float]]:
    return [
        (params, figure)
        for params, figure in values
        if all(params[name] == repr(value) for name, value in wanted.items())
    ]


def table(results: Results | None) -> str:
    lines = []
    if results is None:
        lines.append("Not measured yet.")
    else:
        machine = results.machine
        system = machine["os"].partition("-")[0]
        lines.append(
            f"Commit {results.commit[:12]}, CPython {platform.python_version()}, {system}; "
            f"{machine['num_cpu']} x {machine['cpu']}, {int(machine['ram']) // 2**30} GiB of memory."
        )
    lines += ["", "| what | aim | Subetha | best peer | benchmark |", "|---|---|---|---|---|"]
    for row in ROWS:
        own, peer = cells(row, results)
        lines.append(f"| {row.what} | {row.aim} | {own} | {peer} | `{row.benchmark}` |")
    return "\n".join(lines)


def run() -> None:
    """Let asv run what the table needs, and keep the results."""
    names = sorted({row.benchmark.replace(".", r"\.") for row in ROWS})
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True).stdout
    asv = [sys.executable, "-m", "asv"]
    command = [*asv, "run", "--python=same", "--launch-method=forkserver", "--show-stderr"]
    command += ["--set-commit-hash", commit.strip(), "--bench", rf"^({'|'.join(names)})(_spread)?\b"]
    subprocess.run([*asv, "machine", "--yes"], cwd=HERE, check=True)
    # asv's exit code says that a benchmark has failed, too; the others have their figures all the same
    subprocess.run(command, cwd=HERE, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--kept", action="store_true", help="run nothing, take the results that asv has kept last")
    how.add_argument("--empty", action="store_true", help="write the table without figures")
    options = parser.parse_args()
    if not (options.kept or options.empty):
        run()
    page = PAGE.read_text()
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE}: expected the lines {BEGIN!r} and {END!r}, between which the table goes")
    results = None if options.empty else Results(HERE / "results")
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}")


if __name__ == "__main__":
    main()
