"""A folder for mapped files: in memory where the machine has room for that."""

import os
import shutil
import tempfile


class Folder:
    """Made in `setup`, removed in `teardown`."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="subetha-bench-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)

    def file(self, name: str) -> str:
        return os.path.join(self.path, name)

    def remove(self) -> None:
        shutil.rmtree(self.path)
