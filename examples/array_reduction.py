"""Mean and standard deviation of a large array, from partial sums made in worker processes.

    python examples/array_reduction.py [MIB]

The array has 200 MiB by default. A part of it is written once, into the shared file from which its worker reads it.
"""

import sys

import numpy as np
import numpy.typing as npt

import subetha

PARTS = 16


def partial_sums(part: npt.NDArray[np.float64]) -> tuple[int, float, float]:
    return part.size, float(part.sum()), float(np.square(part).sum())


def main() -> None:
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    array = np.random.default_rng(1).normal(5.0, 2.0, mib * 2**20 // 8)
    with subetha.Executor() as executor:
        sums = np.array(list(executor.map(partial_sums, np.array_split(array, PARTS), buffersize=4)))
    size, total, squares = sums.sum(axis=0)
    mean = total / size
    print(f"{int(size)} numbers: mean {mean:.3f}, standard deviation {np.sqrt(squares / size - mean**2):.3f}")
    assert np.isclose(mean, array.mean())


if __name__ == "__main__":
    main()
