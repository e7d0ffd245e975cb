"""A folder for mapped files: in memory where the machine has room for that, unless told otherwise."""

import os
import shutil
import tempfile


class Folder:
    """Made in `setup`, removed in `teardown`."""

    def __init__(self, parent: str | None = "/dev/shm") -> None:
        self.path = tempfile.mkdtemp(prefix="subetha-bench-", dir=parent if parent and os.path.isdir(parent) else None)

    def file(self, name: str) -> str:
        return os.path.join(self.path, name)

    def remove(self) -> None:
        shutil.rmtree(self.path)
