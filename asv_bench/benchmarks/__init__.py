"""Benchmarks by subject. Figures are medians of several runs; `track_*_spread` gives the range that goes with one."""

import sys
from pathlib import Path

# the children that benchmarks start find this package by it
sys.path.insert(0, str(Path(__file__).parents[1]))
