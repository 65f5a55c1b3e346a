"""Time of sensitivity and errors for a million rounds, and time and memory of one round's noise.

python benchmarks/mechanisms.py [--rounds 1000000] [--size 1000000]

Processor time on one core of a shared 2-core virtual machine (x86-64, NumPy 2, SciPy 1, one thread):

    1000000 rounds, 10 participations                       sensitivity                    errors
    DPSGD()                                               3.1623 exact   0.03 s   RMSE 2236.0691  MaxSE 3162.2777   0.04 s
    LambdaCGD(lam=0.99)                                  22.4168 exact   0.05 s   RMSE  160.0878  MaxSE  225.2859   0.02 s
    Normalized(mechanism=LambdaCGD(lam=0.99))             3.1623 exact   0.04 s   RMSE  160.0878  MaxSE  225.2510   0.06 s
    BISR(bands=16)                                        4.5953 exact   0.03 s   RMSE  469.4549  MaxSE  663.8836   0.02 s
    BISR(bands=10000)                                     6.4626 exact   1.15 s   RMSE   28.6071  MaxSE   38.5122   0.01 s
    BandInvMF(values=(1.0, -0.6, 0.1, -0.3))              4.5782 exact   2.00 s   RMSE  647.4715  MaxSE  915.6478   0.01 s
    BSR(bands=16)                                         4.4089 exact   0.01 s   RMSE  696.1584  MaxSE  984.5037   0.03 s
    BSR(bands=10000)                                      6.3230 exact   0.01 s   RMSE   41.2639  MaxSE   57.2082   0.16 s
    Normalized(mechanism=BSR(bands=16))                   3.1623 exact   0.00 s   (n² without a banded inverse)
    BLT(scales=(0.1, 0.05, 0.01), decays=(0.9, 0.99,      4.3464 exact   0.11 s   RMSE   32.1095  MaxSE   43.0821   0.12 s
    SquareRootToeplitz()                                 10.2861 exact   0.02 s   RMSE   23.3329  MaxSE   24.0438   0.02 s
    NuDPFTRL(nu=0.0001)                                   5.9949 exact   0.02 s   RMSE   43.9600  MaxSE   61.0696   0.02 s

    round 1000 for 1000000 coordinates, in units of one normal vector (5.9 ms)
                                                       replay: made  time   buffer: kept  time   default
    DPSGD()                                                       1   0.9              0   0.9   replay
    LambdaCGD(lam=0.9)                                            2   1.6              1   1.0   replay
    Normalized(mechanism=LambdaCGD(lam=0.9))                      2   1.5              1   1.0   replay
    BISR(bands=4)                                                 4   3.0              3   1.2   replay
    BISR(bands=16)                                               16  11.9             15   1.9   replay
    BSR(bands=4)                                               1000 748.9              3   1.2   buffer
    BSR(bands=16)                                              1000 776.2             15   2.5   buffer
    BLT(scales=(0.1, 0.05, 0.01, 0.2), decays=(0.9,            1000 764.8              4   1.7   buffer
    Dense(name='band-mf')                                   1000 765.8              3   1.3   buffer
    BinaryTree()                                                     1000 730.6             10   1.7   buffer
    SquareRootToeplitz()                                       1000 768.1            999         replay
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fedcgd import Participation, error_norms, sensitivity
from fedcgd.mechanisms import (
    BISR,
    BLT,
    BSR,
    DPSGD,
    BandInvMF,
    BinaryTree,
    Dense,
    LambdaCGD,
    Mechanism,
    Normalized,
    NuDPFTRL,
    SquareRootToeplitz,
)
from fedcgd.mechanisms.streaming import State, correlate, noise_mode
from fedcgd.noise import NoiseStream, Term
from fedcgd.noise.quantisation import Lattice, add_noise


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.process_time()  # one thread, on a machine that may be busy
    return work(), time.process_time() - begin


def accounting(rounds: int) -> None:
    """Sensitivity, RMSE and MaxSE for 10 epochs."""
    plan = Participation(rounds=rounds, min_separation=rounds // 10, max_participations=10)
    mechanisms: list[Mechanism] = [
        DPSGD(),
        LambdaCGD(0.99),
        Normalized(LambdaCGD(0.99)),
        BISR(16),
        BISR(10_000),
        BandInvMF((1.0, -0.6, 0.1, -0.3)),
        BSR(16),
        BSR(10_000),
        Normalized(BSR(16)),
        BLT((0.1, 0.05, 0.01), (0.9, 0.99, 0.9999)),
        SquareRootToeplitz(),
        NuDPFTRL(1e-4),
    ]
    print(f"{rounds} rounds, 10 participations{'':22} sensitivity                    errors")
    for mechanism in mechanisms:
        found, first = timed(lambda mechanism=mechanism: sensitivity(mechanism, plan))
        line = f"{mechanism!s:.48}"
        print(f"{line:50} {found.value:9.4f} {'exact' if found.exact else 'bound'} {first:6.2f} s", end="")
        if isinstance(mechanism, Normalized) and noise_mode(mechanism, rounds) == "buffer":
            print("   (n² without a banded inverse)")
            continue
        norms, second = timed(lambda mechanism=mechanism: error_norms(mechanism, rounds))
        print(f"   RMSE {norms.rmse(found.value):9.4f}  MaxSE {norms.max_se(found.value):9.4f} {second:6.2f} s")


def last_round(size: int, rounds: int = 1000) -> None:
    """Table 5 of arXiv:2601.22334: the noise of the last round, regenerated, or from what is kept."""
    stream = NoiseStream(bytes(range(32)))
    fresh = stream.normal(rounds - 1, 0, 0, size)
    _, once = timed(lambda: stream.normal(rounds - 1, 0, 0, size))
    print(f"\nround {rounds} for {size} coordinates, in units of one normal vector ({once * 1e3:.1f} ms)")
    print(f"{'':50} replay: made  time   buffer: kept  time   default")
    mechanisms: list[Mechanism] = [
        DPSGD(),
        LambdaCGD(0.9),
        Normalized(LambdaCGD(0.9)),
        BISR(4),
        BISR(16),
        BSR(4),
        BSR(16),
        BLT((0.1, 0.05, 0.01, 0.2), (0.9, 0.99, 0.9999, 0.5)),
        Dense("band-mf", np.tile([1.0, 0, 0, 0], (rounds, 1))),
        BinaryTree(),
        SquareRootToeplitz(),
    ]

    total = np.zeros(size, np.int64)

    def replay(terms: list[Term]) -> None:
        add_noise(total, stream, terms, 1.0, Lattice(2.0**-20), threads=1)

    for mechanism in mechanisms:
        weights = mechanism.inverse_row(rounds - 1, rounds)
        terms = [(rounds - 1 - lag, 0, float(w)) for lag, w in enumerate(weights)]
        _, replayed = timed(lambda terms=terms: replay(terms))
        # What the buffers hold does not change the time.
        kept = mechanism.num_buffers(rounds)
        held = min(kept, (rounds - 1).bit_count() if isinstance(mechanism, BinaryTree) else kept)
        state = State(rounds - 1, tuple(fresh.copy() for _ in range(min(held, 20))))
        buffered = f"{'':5}"
        if held <= 20:
            _, used = timed(lambda m=mechanism, s=state: correlate(m, rounds, stream.normal(rounds - 1, 0, 0, size), s))
            buffered = f"{used / once:5.1f}"
        line = f"{mechanism!s:.48}"
        made = mechanism.inverse_bandwidth(rounds)
        print(f"{line:50} {made:12} {replayed / once:5.1f} {kept:14} {buffered}   {noise_mode(mechanism, rounds)}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=1_000_000)
    options.add_argument("--size", type=int, default=1_000_000)
    args = options.parse_args()
    accounting(args.rounds)
    last_round(args.size)


if __name__ == "__main__":
    main()
