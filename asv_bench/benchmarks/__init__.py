"""Benchmarks by subject. Figures are medians of several runs; `track_*_spread` gives the range that goes with one."""

import os
import sys
from pathlib import Path

RUNS = int(os.environ.get("SUBETHA_BENCH_RUNS", "9"))
"""How often each measurement is repeated for its median."""

# the children that benchmarks start find this package by it
sys.path.insert(0, str(Path(__file__).parents[1]))
