"""ε that jax-privacy and opake say, the peers of benchmarks/b_min_sep_peers.py. Prints JSON.

python benchmarks/b_min_sep_peer.py jax-privacy '{"column": [1, 0.5], "sampling": "b-min-sep", …}'

Needs jax-privacy 2.0 or opake-dpftrl 0.16 (Python 3.12.4 or newer: before, a dataclass of it fails), in environments of their
own; exits with 3 without it. `bound` is the ε that they report, with their confidence bounds. jax-privacy says which δ its draws
prove; `estimate` is the least ε at which their mean is δ.
"""

import argparse
import importlib.metadata
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

NOT_THERE = 3
DRAWS = {"b-min-sep": 10**6, "balls-in-bins": 10**5}  # jax-privacy takes 0.2 ms for one draw of Balls-in-Bins
AT_ONCE = 5000

Answer = dict[str, float]


def crossing(delta_at: Callable[[float], float], delta: float) -> float:
    """The least ε with δ(ε) ≤ delta, by bisection."""
    low, high = 0.0, 200.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (low, middle) if delta_at(middle) <= delta else (middle, high)
    return high


def jax_privacy(question: dict[str, Any]) -> Answer:
    """By its Monte Carlo, and by dp-accounting's privacy loss distributions of its events."""
    import dp_accounting
    import numpy as np
    from jax_privacy.batch_selection import BallsInBinsSampling, BMinSepSampling
    from jax_privacy.experimental import accounting
    from jax_privacy.experimental.monte_carlo import delta_calculation, sample_generation

    rounds, sigma, delta = question["rounds"], question["sigma"], question["delta"]
    column, b, rate = np.array(question["column"]), question["min_separation"], question["rate"]
    if question["sampling"] in ("poisson", "cyclic-poisson"):
        event = accounting.amplified_bandmf_event(
            sigma / float(np.linalg.norm(column)), rounds, num_bands=b, sampling_prob=rate
        )
        accountant = dp_accounting.pld.PLDAccountant().compose(event)
        return {"bound": accountant.get_epsilon(delta)}
    if question["sampling"] == "balls-in-bins":
        strategy = BallsInBinsSampling(cycle_length=b, iterations=rounds)
    else:
        strategy = BMinSepSampling(sampling_prob=rate, iterations=rounds, min_sep=b)
    count, generator = DRAWS[question["sampling"]], np.random.default_rng(question["seed"])
    losses = [
        np.concatenate(
            [
                sample_generation.get_privacy_loss_sample(
                    strategy, sigma, column, generator, positive_sample=positive, num_samples=AT_ONCE
                )[0]
                for _ in range(count // AT_ONCE)
            ]
        )
        for positive in (True, False)
    ]

    def delta_at(epsilon: float) -> float:
        return max(delta_calculation.delta_from_epsilon_and_samples(epsilon, drawn) for drawn in losses)

    estimate = crossing(delta_at, delta)
    scatter = max(np.std(np.maximum(-np.expm1(np.minimum(estimate - drawn, 0)), 0)) for drawn in losses) / math.sqrt(
        count
    )
    return {
        "estimate": estimate,
        # What another set of draws may say: a standard error of δ.
        "standard_error": (crossing(delta_at, delta - scatter) - crossing(delta_at, delta + scatter)) / 2,
        "bound": crossing(delta_at, delta_calculation.get_base_delta(count, delta)),
    }


def opake(question: dict[str, Any]) -> Answer:
    """By its confidence bands on privacy loss distributions. Its b-min-sep has b = the number of bands."""
    import opake.dpftrl.accounting as accounting
    import opake.dpftrl.noise as noise
    import torch
    from opake.dpftrl.noise.types import BandMfStrategy

    class Column(BandMfStrategy):
        """Its optimised bands, but these."""

        def coefficients(self, **_: Any) -> torch.Tensor:
            return torch.tensor(column, dtype=torch.float64)

    rounds, column, sigma = question["rounds"], question["column"], question["sigma"]
    gaussian = accounting.mf_gaussian(sigma, Column(bands=len(column)))
    if question["sampling"] == "b-min-sep":
        process = accounting.b_min_sep(gaussian, n_steps=rounds, p0=question["cohort"])
    elif question["sampling"] == "balls-in-bins":
        bsr = noise.bsr_strategy(bandwidth=len(column), alpha=1.0, beta=0.0)
        times = float(torch.linalg.norm(bsr.coefficients(n_steps=rounds)))  # its first entry is 1
        process = accounting.balls_in_bins(
            accounting.mf_gaussian(sigma * times, bsr), n_steps=rounds, num_bins=question["min_separation"]
        )
    else:
        process = accounting.poisson(gaussian, n_steps=rounds, sample_rate=question["rate"])
    return {"bound": process.epsilon_at(question["delta"])}


PEERS = {"jax-privacy": jax_privacy, "opake": opake}
DISTRIBUTIONS = {"jax-privacy": "jax-privacy", "opake": "opake-dpftrl"}


def main() -> None:
    """Answer one question."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("question", type=json.loads)
    args = parser.parse_args()
    try:
        version = importlib.metadata.version(DISTRIBUTIONS[args.peer])
    except importlib.metadata.PackageNotFoundError:
        print(f"{sys.executable} has no {DISTRIBUTIONS[args.peer]}: name an interpreter that has it", file=sys.stderr)
        sys.exit(NOT_THERE)
    began = time.process_time()
    answer = PEERS[args.peer](args.question)
    print(json.dumps(answer | {"version": version, "seconds": round(time.process_time() - began, 1)}))


if __name__ == "__main__":
    main()
