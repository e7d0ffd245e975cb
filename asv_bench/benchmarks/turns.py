"""Peers in turn, run by run, so that a busy moment of the machine hits all of them."""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from statistics import median
from typing import Any

from . import IS_BRIEF, RUNS

Figures = dict[tuple[Any, ...], list[Any] | str]


def in_turns(
    params: Sequence[Sequence[Any]],
    begin: Callable[..., AbstractContextManager[Callable[[], Any]]],
    together: Callable[..., Any] = lambda *_: None,
) -> Figures:
    """Measure every combination of the parameters `RUNS` times, in turns; what a `setup_cache` returns.

    Parameters
    ----------
    params : sequence of sequences
        As asv's `params`, each a list.
    begin : callable
        Takes one combination and gives a context manager that gives the measurement. Where that cannot be made here, it raises
        NotImplementedError with the reason, which then stands in the place of the figures.
    together : callable
        Those combinations for which it gives the same are set up at one time and take turns; default: all.
    """
    found: Figures = {}
    combinations = sorted(itertools.product(*params), key=lambda one: str(together(*one)))
    for _, group in itertools.groupby(combinations, key=lambda one: str(together(*one))):
        with contextlib.ExitStack() as stack:
            measures = {}
            for one in group:
                try:
                    measures[one] = stack.enter_context(begin(*one))
                    found[one] = []
                except NotImplementedError as error:
                    found[one] = str(error)
            for run in range(0 if IS_BRIEF else -1, RUNS):
                for one, measure in measures.items():
                    figure = measure()
                    # the first one warms up
                    if run >= 0:
                        found[one].append(figure)
    return found


def unfolded(figures: Figures, names: Sequence[Any], reason: Callable[..., str | None] = lambda *_: None) -> Figures:
    """Of measurements that each give a dict, make one for each of its names, which is the last parameter then.

    `reason` takes all parameters and says why a dict does not have the name, where it does not.
    """
    return {
        (*params, name): found if isinstance(found, str) else reason(*params, name) or [one[name] for one in found]
        for params, found in figures.items()
        for name in names
    }


class InTurns:
    """Shows what a `setup_cache` by `in_turns` has found; a combination that was not measured is skipped with its reason."""

    timeout = 600

    def setup(self, figures, *params):
        if isinstance(figures[params], str):
            raise NotImplementedError(figures[params])


def spread(figures):
    return max(figures) - min(figures)


__all__ = ["Figures", "InTurns", "in_turns", "median", "spread", "unfolded"]
