"""Time and memory of the noise step against one torch.Tensor.normal_ of the same size.

python benchmarks/noise.py [--size 25000000] [--threads 2] [--repeats 9] [--json FILE]
python benchmarks/noise.py --device cuda [--size 25000000] [--repeats 9] [--json FILE]

The noise step is what the server does: two vectors and the smoothing, rounded to the integer grid and added to the sum. Beside
it: its parts, the keystream alone as `cryptography` makes it (of this cipher, and of AES-256 in counter mode), and what
Flower's differential privacy draws (float64, NumPy, one vector). All take turns; times are processor time (user and system,
all threads), ratios those within a turn. Results are in benchmarks/diary.md.

With --device it is the step of central training, on sums that are there: two vectors and the smoothing, all that a release does,
and `opacus.optimizers.DPOptimizer`'s own noise step, with the bytes a second that each must at least move. Times are the clock's.
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
from opacus.optimizers import DPOptimizer
from torch import nn

from fedcgd import LambdaCGD, NoiseKey, Participation, Plan
from fedcgd.central.releases import Releases
from fedcgd.noise import NoiseStream
from fedcgd.noise.quantisation import Lattice, add_noise
from fedcgd.noise.stream import kernels
from fedcgd.noise.tensors import TensorNormals, gpu_kernels, sum_digest

OURS = "two rounds and smoothing, on the grid"
NORMAL = "torch.Tensor.normal_"
OPACUS = "Opacus' noise step"
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
    stream, grid = NoiseStream(bytes(range(32))), Lattice(2.0**-23)
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


LEAST_BYTES = {"float32": 4, "sum": 16, "release": 20, "opacus": 16, "read": 8}
"""Of memory, a number: written; int64 read and written; the same and the gradient written; two read, two written; read."""


def measure_on(device: torch.device, *, size: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of all on `device`, their ratios to Opacus' noise step with spread, and bandwidths; printed too."""
    stream, grid = NoiseStream(bytes(range(32))), Lattice(2.0**-23)
    normals, total = TensorNormals(stream, grid), torch.zeros(size, dtype=torch.int64, device=device)
    x = torch.zeros(size, device=device)
    parameter = nn.Parameter(torch.zeros(size, device=device))
    opacus = DPOptimizer(
        torch.optim.SGD([parameter], lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1
    )
    plan = Plan(
        mechanism=LambdaCGD(0.9),
        participation=Participation(rounds=100_000),
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-5,
    )
    releases = Releases(plan, NoiseKey.generate(), size, record=None, configuration={}, device=device, mode="replay")

    def opacus_step() -> None:
        parameter.summed_grad = x.view_as(x)  # type: ignore[attr-defined]  # it remembers which tensors it took
        opacus.add_noise()

    def release() -> None:
        noised = releases.release(total, releases.count, np.arange(0))
        assert noised is not None
        mean = noised.double() * (releases.step / 512)
        parameter.grad = mean.view_as(parameter).to(parameter.dtype, copy=True)

    peers: dict[str, tuple[str, Callable[[], object]]] = {
        OPACUS: ("opacus", opacus_step),
        NORMAL: ("float32", x.normal_),
        "one vector Z, float32": ("float32", lambda: normals.vector(total, 1, 0)),
        "one round and smoothing, on the grid": ("sum", lambda: normals.add(total, TERMS[:1], 0.5)),
        OURS: ("sum", lambda: normals.add(total, TERMS, 0.5)),
        "sixteen rounds and smoothing, on the grid": (
            "sum",
            lambda: normals.add(total, [(i, 0, 0.1) for i in range(16)], 0.5),
        ),
        "what a sum is known by": ("read", lambda: sum_digest(total, bytes(32))),
        "a release: nonce, two rounds, mean, gradient": ("release", release),
    }
    for _, work in peers.values():
        work()  # compiles
    turns = [{name: clocked(work, device) for name, (_, work) in peers.items()} for _ in range(repeats)]
    rows = {}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    print(f"{size} numbers on {name}, median of {repeats} turns")
    for peer, (least, _) in peers.items():
        seconds_of = [turn[peer] for turn in turns]
        ratios = sorted(turn[peer] / turn[OPACUS] for turn in turns)
        bandwidth = LEAST_BYTES[least] * size / median(seconds_of)
        rows[peer] = {
            "ms": 1e3 * median(seconds_of),
            "ratio": median(ratios),
            "ratio_spread": [ratios[0], ratios[-1]],
            "gigabytes_per_second": bandwidth / 1e9,
        }
        spread = f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(
            f"{peer:45} {1e3 * median(seconds_of):9.3f} ms   {median(ratios):5.2f} {spread}  {bandwidth / 1e9:7.0f} GB/s"
        )
    return {"device": name, "kernels": gpu_kernels(total.device) is not None, "rows": rows}


def clocked(work: Callable[[], object], device: torch.device) -> float:
    """Seconds by the clock, until the device is done."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begin


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--size", type=int, default=25_000_000)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--repeats", type=int, default=9)
    options.add_argument("--json", type=Path, default=None)
    options.add_argument("--device", default=None, help="of the tensors; without it, a server's arrays")
    args = options.parse_args()
    if args.device:
        result = measure_on(torch.device(args.device), size=args.size, repeats=args.repeats)
    else:
        result = measure(size=args.size, threads=args.threads, repeats=args.repeats)
    if args.json:
        args.json.write_text(json.dumps({"size": args.size, "threads": args.threads} | result, indent=1) + "\n")


if __name__ == "__main__":
    main()
