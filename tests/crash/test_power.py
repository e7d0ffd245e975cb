"""The power fails at any moment: no job that a durable queue has accepted is missing, none that has ended runs again."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DRAWS, EVERY = {"all": (20, 1)}.get(os.environ.get("SUBETHA_KILL_POINTS", ""), (1, 3))
"""So many mixtures after every how many changes; which of these is another one each time."""


@pytest.mark.timeout(0)
def test_whatever_the_disk_has_kept_every_accepted_job_is_there(record_property):
    seed = int(os.environ.get("SUBETHA_POWER_SEED", random.randrange(2**32)))
    print(f"SUBETHA_POWER_SEED={seed}")
    found = subprocess.run(
        [
            *(sys.executable, "-W", "ignore::DeprecationWarning"),
            *(os.fspath(HERE / "power.py"), str(DRAWS), str(EVERY), str(seed)),
        ],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(
                map(os.fspath, (HERE, HERE.parent / "core", HERE.parent / "queue", *sys.path))
            )
        },
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert found.returncode == 0, found.stderr
    counts = json.loads(found.stdout)
    if "why_not" in counts:
        pytest.skip(counts["why_not"])
    print(counts)
    assert counts["syncs"] == 39
    assert counts["changes"] > 150
    assert counts["failures"] >= (2 + DRAWS) * (counts["changes"] // EVERY + counts["syncs"])
