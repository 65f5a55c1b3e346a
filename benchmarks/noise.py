"""Time and memory of the noise step against one torch.Tensor.normal_ of the same size.

python benchmarks/noise.py [--size 25000000] [--threads 2]

On 2 virtual cores of an AMD EPYC (AVX2), which other work shared: extra memory 15.0 MiB; processor time for 25 million numbers
0.098 s for normal_, 0.237 s in all for two terms on two threads, which is a ratio of 1.2 if both cores are free.
"""

import argparse
import resource
import time
from collections.abc import Callable

import numpy as np
import torch

from fedcgd.noise import NoiseStream, add_correlated, for_each_chunk


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

    def wide() -> None:
        for_each_chunk(lambda *_: None, stream, terms, 0.5, 0, args.size, dtype=np.dtype("f8"), threads=args.threads)

    add()
    print(f"extra memory at the peak: {peak_mib() - before:.1f} MiB")
    rows = [(seconds(x.normal_), seconds(add), seconds(wide)) for _ in range(args.repeats)]
    normal, ours, wider = (min(column) for column in zip(*rows, strict=True))
    ratios = sorted(b / a for a, b, _ in rows)
    print(f"{args.size} float32, {args.threads} threads, best of {args.repeats}")
    print(f"torch.Tensor.normal_        {normal * 1e3:7.1f} ms")
    print(
        f"add_correlated, two terms   {ours * 1e3:7.1f} ms   {ours / normal:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )
    print(f"the same noise in float64   {wider * 1e3:7.1f} ms   {wider / normal:.2f}")


if __name__ == "__main__":
    main()
