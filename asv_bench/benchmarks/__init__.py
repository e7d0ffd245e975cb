"""Benchmarks by subject. Figures are medians of interleaved runs; `track_*_spread` gives the range that goes with them."""
