"""The design pages say what the code says. They are read from the source tree."""

import re
from pathlib import Path

import numpy as np
import pytest

from subetha import layout

TREE = Path(__file__).resolve().parents[2]
PAGES = TREE / "docs" / "design"
LABEL = re.compile(r"\b([A-Z]\d): [^\n]*?pairs with ([A-Z]\d(?:(?:, | and )[A-Z]\d)*)")


def labels_of_the_code():
    found = {}
    for file in [*TREE.glob("subetha/*.px[di]"), *TREE.glob("subetha/csrc/*.h")]:
        for label, partners in LABEL.findall(file.read_text()):
            found.setdefault(label, set()).update(re.findall(r"[A-Z]\d", partners))
    return found


def labels_of_the_page():
    rows = re.findall(r"^\| ([A-Z]\d) \| .* \| ([A-Z0-9, ]+) \|$", (PAGES / "memory-ordering.md").read_text(), re.M)
    return {label: set(partners.split(", ")) for label, partners in rows}


def test_every_label_of_an_atomic_has_its_partner():
    labels = labels_of_the_code()
    assert len(labels) > 20
    assert set().union(*labels.values()) <= set(labels)


def test_the_page_on_memory_ordering_lists_the_labels_of_the_code():
    assert labels_of_the_page() == labels_of_the_code()


def test_no_atomic_builtin_stands_outside_the_header_of_atomics():
    users = [
        f.name
        for f in TREE.glob("subetha/**/*")
        if f.suffix in {".pyx", ".pxd", ".pxi", ".h"} and "__atomic_" in f.read_text()
    ]
    assert users == ["atomics.h"]


@pytest.mark.parametrize(
    "name",
    [name for name, value in vars(layout).items() if isinstance(value, np.dtype) and value.names],
)
def test_the_page_on_memory_layout_has_the_offsets_of_layout_py(name):
    page = (PAGES / "memory-layout.md").read_text()
    section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
    rows = {field: int(offset) for offset, field in re.findall(r"^\| (\d+) \| `(\w+)` \|", section, re.M)}
    kind = getattr(layout, name)
    assert f"\n{kind.itemsize} bytes.\n" in section
    assert rows == {field: kind.fields[field][1] for field in kind.names}
