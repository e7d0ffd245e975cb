"""Sizes, seeds and figures of the storms.

SUBETHA_STORM=full runs each at its full size (minutes), else it is a small one of seconds. SUBETHA_STORM_SEED=n repeats the
dice of a run; which instruction a kill hits is not in them.
"""

import os
import random
import secrets

import pytest

FULL = os.environ.get("SUBETHA_STORM", "small") == "full"
FIGURES: list[str] = []


@pytest.fixture
def sized():
    """The first number, or in a full run the second one."""
    return lambda small, full: full if FULL else small


@pytest.fixture
def dice(request):
    """A random number generator whose seed stands in the report."""
    seed = int(os.environ.get("SUBETHA_STORM_SEED") or secrets.randbits(32))
    print(f"SUBETHA_STORM_SEED={seed}")
    request.node.user_properties.append(("seed", seed))
    return random.Random(seed)


@pytest.fixture
def figures(request):
    """Take what the test counted, for the end of the report."""

    def take(**counted):
        seed = dict(request.node.user_properties).get("seed")
        numbers = ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in counted.items())
        FIGURES.append(f"{request.node.name} (seed {seed}): {numbers}")

    return take


def pytest_terminal_summary(terminalreporter):
    if FIGURES:
        terminalreporter.section("storms")
        for line in FIGURES:
            terminalreporter.write_line(line)
