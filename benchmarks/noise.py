"""Time and memory of the noise step against one torch.Tensor.normal_ of the same size.

python benchmarks/noise.py [--size 25000000] [--threads 2] [--repeats 9] [--json FILE]

The noise step is what the server does: two vectors and the smoothing, rounded to the integer grid and added to the sum. Both take
turns; times are processor time (user and system, all threads), ratios those of neighbours. Results are in docs/performance.md.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from fedcgd.noise import NoiseStream
from fedcgd.noise.quantisation import Grid, add_noise


def seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(*, size: int, threads: int, repeats: int) -> dict[str, Any]:
    """Seconds of both, the ratio and its spread; printed too."""
    torch.set_num_threads(threads)
    stream = NoiseStream(bytes(range(32)))
    x = torch.zeros(size)
    total = np.ones(size, np.int64)

    def add() -> None:
        add_noise(total, stream, [(1, 0, 1.0), (0, 0, -0.9)], 0.5, Grid(2.0**-23), threads=threads)

    before = peak_mib()
    add()  # compiles, and allocates what Python keeps
    extra = peak_mib() - before
    rows = [(seconds(x.normal_), seconds(add)) for _ in range(repeats)]
    normal, ours = (median(column) for column in zip(*rows, strict=True))
    ratios = sorted(b / a for a, b in rows)
    print(f"{size} numbers, {threads} threads, median of {repeats}; extra memory at the peak {extra:.0f} MiB")
    print(f"torch.Tensor.normal_   {normal * 1e3:7.1f} ms")
    print(f"add_noise, two terms   {ours * 1e3:7.1f} ms   {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    spread = [ratios[0], ratios[-1]]
    return {"normal": normal, "add_noise": ours, "ratio": median(ratios), "ratio_spread": spread, "extra_mib": extra}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--size", type=int, default=25_000_000)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--repeats", type=int, default=9)
    options.add_argument("--json", type=Path, default=None)
    args = options.parse_args()
    result = measure(size=args.size, threads=args.threads, repeats=args.repeats)
    if args.json:
        args.json.write_text(json.dumps({"size": args.size, "threads": args.threads} | result, indent=1) + "\n")


if __name__ == "__main__":
    main()
