"""Time and memory of the noise step against one torch.Tensor.normal_ of the same size.

python benchmarks/noise.py [--size 25000000] [--threads 2]

The noise step is what the strategy does: two vectors and the smoothing, in float64, rounded to the integer grid.
"""

import argparse
import resource
import time
from collections.abc import Callable

import numpy as np
import torch

from fedcgd.noise import NoiseStream
from fedcgd.noise.quantisation import Grid, add_noise


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--size", type=int, default=25_000_000)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--repeats", type=int, default=9)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    stream = NoiseStream(bytes(range(32)))
    x = torch.zeros(args.size)
    grid = Grid(2.0**-23)
    terms = [(1, 0, 1.0), (0, 0, -0.9)]
    total = np.ones(args.size, np.int64)
    add_noise(total[:1000], stream, terms, 0.5, grid)  # first use allocates what Python keeps
    before = peak_mib()

    def add() -> None:
        add_noise(total, stream, terms, 0.5, grid, threads=args.threads)

    add()
    print(f"extra memory at the peak: {peak_mib() - before:.1f} MiB")
    rows = [(seconds(x.normal_), seconds(add)) for _ in range(args.repeats)]
    normal, ours = (min(column) for column in zip(*rows, strict=True))
    ratios = sorted(b / a for a, b in rows)
    print(f"{args.size} numbers, {args.threads} threads, best of {args.repeats}")
    print(f"torch.Tensor.normal_   {normal * 1e3:7.1f} ms")
    print(f"add_noise, two terms   {ours * 1e3:7.1f} ms   {ours / normal:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
