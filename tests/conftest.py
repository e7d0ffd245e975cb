"""What the tests of every layer share."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

# A loaded machine is not a failure, and a failing example has to be found again from the report alone.
settings.register_profile("subetha", deadline=None, print_blob=True)
settings.load_profile("subetha")

MEMORY = "/dev/shm"


@pytest.fixture
def shm():
    """An empty directory in memory where there is one (else among the temporary files), removed with the test."""
    where = MEMORY if os.access(MEMORY, os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix="subetha-test-", dir=where))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
