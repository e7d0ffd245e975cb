"""Benchmarks by subject. Figures are medians of several runs; `track_*_spread` gives the range that goes with one."""

import os
import sys
from pathlib import Path

RUNS = int(os.environ.get("SUBETHA_BENCH_RUNS", "9"))
"""How often each measurement is repeated for its median."""

IS_BRIEF = RUNS == 1
"""Whether this is a run to see that everything works, with small sizes, and not one for the figures."""

# the children that benchmarks start find this package by it
sys.path.insert(0, str(Path(__file__).parents[1]))
