"""Words of many files, counted in worker processes.

    python examples/text_statistics.py [FOLDER]

FOLDER is that of Python's standard library by default. Each file is one job; the results are added up as they come.
"""

import re
import sys
import sysconfig
from collections import Counter
from concurrent.futures import as_completed
from pathlib import Path

import subetha

WORD = re.compile(r"[A-Za-z_]{3,}")


def count_words(path: Path) -> Counter[str]:
    return Counter(WORD.findall(path.read_text(errors="replace")))


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    total: Counter[str] = Counter()
    with subetha.Executor() as executor:
        for future in as_completed([executor.submit(count_words, path) for path in files]):
            total += future.result()
    print(f"{len(files)} files, {total.total()} words, {len(total)} different ones")
    for word, count in total.most_common(5):
        print(f"{count:8} {word}")


if __name__ == "__main__":
    main()
