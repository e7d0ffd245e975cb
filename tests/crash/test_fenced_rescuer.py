"""A rescuer that is stopped so long that it lapses itself, while it has a dead one's job in hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("left", ["to_try_again", "to_bury", "unpublished"])
def test_a_rescuer_frees_the_cell_that_was_fenced_in_its_hands(servers, tmp_path, left):
    # `servers` skips where nothing can be stepped through
    done = subprocess.run(
        # forking beside the timer thread is what it is there for
        [sys.executable, "-W", "ignore::DeprecationWarning", HERE / "fenced_rescuer.py", tmp_path, left],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, "freed\n"), done.stderr
