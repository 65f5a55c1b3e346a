"""Optimised mechanisms: Table 4 of arXiv:2601.22334 side by side, and time and memory of the large cases.

python benchmarks/optimisation.py [--bandwidths 2 4 16 64 390]
"""

import argparse
import resource
import subprocess
import sys
import time

import numpy as np
import torch

from fedcgd import Mechanism, Normalized, Participation, calibrate, error_norms, sensitivity
from fedcgd.mechanisms.toeplitz import power_coefficients
from fedcgd.mechanisms.workload import PREFIX_SUMS
from fedcgd.optimisation.banded import band_mf, error_and_gradient
from fedcgd.optimisation.toeplitz import band_inv_mf, banded_toeplitz, blt

CIFAR = Participation(rounds=3900, min_separation=390, max_participations=10)
# The column "ε = 8 (w/o Amp)": "BandMF" is the banded Toeplitz; BandInvMF is printed under Theorem 1, valid or not.
PRINTED = {
    "banded-toeplitz": {2: 59.44, 4: 42.29, 16: 22.05, 64: 12.58, 390: 7.77},
    "band-inv-mf": {2: 12.69, 4: 10.27, 16: 8.54, 64: 8.15, 390: 7.87},
    "blt": {1: None, 2: None, 3: 8.14, 4: None},
}


def table_4(bandwidths: list[int]) -> None:
    print("n = 3900, k = 10, b = 390, ε = 8, δ = 1e-5, no amplification")
    print(f"{'mechanism':18} {'p or d':>6} {'RMSE':>8} {'printed':>8} {'ratio':>7} {'sensitivity':>16} {'seconds':>8}")
    for name, rows in PRINTED.items():
        for size, printed in rows.items():
            if name != "blt" and size not in bandwidths:
                continue
            begin = time.process_time()
            found = {"banded-toeplitz": banded_toeplitz, "band-inv-mf": band_inv_mf, "blt": blt}[name](size, CIFAR)
            seconds = time.process_time() - begin
            bound = sensitivity(found, CIFAR)
            sigma = calibrate(found, CIFAR, epsilon=8.0, delta=1e-5).noise_multiplier
            rmse = error_norms(found, CIFAR.rounds).rmse(sigma)
            beside = f"{printed:8.2f} {rmse / printed:7.4f}" if printed else f"{'':16}"
            certainty = "exact" if bound.exact else "bound"
            print(f"{name:18} {size:6} {rmse:8.3f} {beside} {bound.value:10.4f} {certainty} {seconds:8.1f}", flush=True)


def toeplitz_beside_banded(rounds: int = 1024, bands: int = 16) -> None:
    once = Participation(rounds=rounds, min_separation=rounds)

    def rmse(mechanism: Mechanism) -> float:
        return error_norms(mechanism, rounds).rmse(sensitivity(mechanism, once).value)

    begin = time.process_time()
    free = rmse(band_mf(bands, once))
    seconds = time.process_time() - begin
    toeplitz = banded_toeplitz(bands, once)
    print(f"\nn = {rounds}, {bands} bands, one participation: RMSE/σ of band-mf {free:.4f} ({seconds:.0f} s)")
    print(
        f"  banded-toeplitz {rmse(toeplitz) / free:.4f} of it, with unit columns {rmse(Normalized(toeplitz)) / free:.4f}"
    )


def alone(what: str) -> None:
    """Run one large case in a process of its own, whose largest memory is then that of the case."""
    subprocess.run([sys.executable, __file__, "--only", what], check=True)


def report(label: str, begin: tuple[float, float], result: float) -> None:
    wall, processor = time.perf_counter() - begin[0], time.process_time() - begin[1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{label}: {processor:.1f} s of processor, {wall:.1f} s by the clock, {peak:.2f} GiB at most; {result:.6f}",
        flush=True,
    )


def largest_toeplitz(rounds: int = 2**20, bands: int = 16) -> None:
    once = Participation(rounds=rounds, min_separation=rounds)
    begin = time.perf_counter(), time.process_time()
    found = banded_toeplitz(bands, once)
    report(f"banded-toeplitz optimised, n = {rounds}, p = {bands}", begin, error_norms(found, rounds).rmse(1.0))


def largest_banded(rounds: int = 16384, bands: int = 16) -> None:
    band = np.tile(power_coefficients(bands, -0.5), (rounds, 1))
    band *= np.add.outer(np.arange(rounds), np.arange(bands)) < rounds
    band /= np.linalg.norm(band, axis=1, keepdims=True)
    begin = time.perf_counter(), time.process_time()
    value, _ = error_and_gradient(band, PREFIX_SUMS)
    report(f"band-mf loss and gradient, n = {rounds}, p = {bands}", begin, value**0.5)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--bandwidths", type=int, nargs="+", default=[2, 4, 16, 64, 390])
    options.add_argument("--only", choices=["toeplitz", "banded"], help="one of the large cases alone")
    args = options.parse_args()
    if args.only:
        {"toeplitz": largest_toeplitz, "banded": largest_banded}[args.only]()
        return
    print(f"NumPy {np.__version__}, PyTorch {torch.__version__}, {torch.get_num_threads()} threads")
    table_4(args.bandwidths)
    toeplitz_beside_banded()
    print()
    alone("toeplitz")
    alone("banded")


if __name__ == "__main__":
    main()
