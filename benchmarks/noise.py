"""Time and memory of the noise step against one torch.Tensor.normal_ of the same size.

python benchmarks/noise.py [--size 25000000] [--threads 2]

`add_noise` is what the strategy does: the same in float64, rounded to the integer grid, and a smoothing vector more.
"""

import argparse
import resource
import time
from collections.abc import Callable

import numpy as np
import torch

from fedcgd.noise import NoiseStream, add_correlated
from fedcgd.noise.quantisation import add_noise


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
    add_correlated(x[:1000], stream, [(0, 0, 1.0)], 1.0)  # first use allocates what Python keeps
    before = peak_mib()
    terms = [(1, 0, 1.0), (0, 0, -0.9)]

    def add() -> None:
        add_correlated(x, stream, terms, 0.5, threads=args.threads)

    total = np.zeros(args.size, np.int64)
    total[:] = 1  # so that its memory is there

    def on_lattice() -> None:
        add_noise(total, stream, terms, 0.5, 2.0**-23, threads=args.threads)

    add()
    print(f"extra memory at the peak: {peak_mib() - before - total.nbytes / 2**20:.1f} MiB")
    rows = [(seconds(x.normal_), seconds(add), seconds(on_lattice)) for _ in range(args.repeats)]
    normal, ours, lattice = (min(column) for column in zip(*rows, strict=True))
    ratios = sorted(b / a for a, b, _ in rows)
    print(f"{args.size} float32, {args.threads} threads, best of {args.repeats}")
    print(f"torch.Tensor.normal_        {normal * 1e3:7.1f} ms")
    print(
        f"add_correlated, two terms   {ours * 1e3:7.1f} ms   {ours / normal:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )
    print(f"add_noise, on the grid      {lattice * 1e3:7.1f} ms   {lattice / normal:.2f}")


if __name__ == "__main__":
    main()
