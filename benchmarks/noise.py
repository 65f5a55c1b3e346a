"""Time and memory of the noise step against one torch.Tensor.normal_ of the same size.

python benchmarks/noise.py [--size 25000000] [--threads 2] [--repeats 9] [--json FILE]

The noise step is what the server does: two vectors and the smoothing, rounded to the integer grid and added to the sum. Beside
it: its parts, the keystream alone as `cryptography` makes it (of this cipher, and of AES-256 in counter mode), and what
Flower's differential privacy draws (float64, NumPy, one vector). All take turns; times are processor time (user and system,
all threads), ratios those within a turn. Results are in docs/performance.md.
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
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedcgd.noise import NoiseStream
from fedcgd.noise.compiled import kernels
from fedcgd.noise.quantisation import Grid, add_noise

OURS = "two rounds and smoothing, on the grid"
NORMAL = "torch.Tensor.normal_"
TERMS = [(1, 0, 1.0), (0, 0, -0.9)]
BYTES = 3 * 64 / 12  # of keystream for a coordinate: of two rounds and the smoothing


def seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def keystream(make: Callable[[], Any], size: int) -> None:
    encryptor, zeros, out = make(), bytes(2**17), memoryview(bytearray(2**17 + 16))
    for _ in range(size // len(zeros)):
        encryptor.update_into(zeros, out)


def measure(*, size: int, threads: int, repeats: int) -> dict[str, Any]:
    """Seconds of all, their ratios to `normal_` with spread; printed too."""
    torch.set_num_threads(threads)
    stream, grid = NoiseStream(bytes(range(32))), Grid(2.0**-23)
    x, flower = torch.zeros(size), np.random.default_rng(0)
    total = np.ones(size, np.int64)
    fast = kernels()
    smoothing = np.zeros(8, np.uint32)

    def chacha20() -> Any:
        return Cipher(algorithms.ChaCha20(bytes(32), bytes(16)), None).encryptor()

    def aes() -> Any:
        return Cipher(algorithms.AES(bytes(32)), modes.CTR(bytes(16))).encryptor()

    peers: dict[str, Callable[[], object]] = {
        NORMAL: x.normal_,
        OURS: lambda: add_noise(total, stream, TERMS, 0.5, grid, threads=threads),
        "one round and smoothing, on the grid": lambda: add_noise(total, stream, TERMS[:1], 0.5, grid, threads=threads),
        "keystream of the same size: ChaCha20": lambda: keystream(chacha20, int(BYTES * size)),
        "keystream of the same size: AES-256": lambda: keystream(aes, int(BYTES * size)),
        "NumPy float64 normal, as Flower draws": lambda: flower.normal(0.0, 1.0, size),
    }
    if fast is not None:
        none, width = (np.zeros((0, 8), np.uint32), np.zeros(0)), 1e-3
        peers["smoothing alone, on the grid"] = lambda: fast.add_to_grid(total, 0, *none, smoothing, width)
        peers["one vector Z, float32"] = lambda: fast.fill_normals(x.numpy(), 0, smoothing)
    extra = {}
    for name, work in peers.items():
        before = peak_mib()
        work()  # compiles, and allocates what Python keeps
        extra[name] = peak_mib() - before
    turns = [{name: seconds(work) for name, work in peers.items()} for _ in range(repeats)]
    print(f"{size} numbers, {threads} threads, median of {repeats} turns; {'machine code' if fast else 'NumPy'}")
    rows = {}
    for name in peers:
        ratios = sorted(turn[name] / turn[NORMAL] for turn in turns)
        ms = 1e3 * median(turn[name] for turn in turns)
        rows[name] = {
            "ms": ms,
            "ratio": median(ratios),
            "ratio_spread": [ratios[0], ratios[-1]],
            "extra_mib": extra[name],
        }
        print(f"{name:40} {ms:8.1f} ms   {median(ratios):5.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    print(f"extra memory at the peak: {extra[OURS]:.0f} MiB")
    return {"ratio": rows[OURS]["ratio"], "rows": rows}


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
