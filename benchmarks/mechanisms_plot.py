"""Draws docs/mechanisms.svg: RMSE against memory for all mechanisms, and the noise coefficients of each.

python benchmarks/mechanisms_plot.py    (some minutes the first time; then the optimised mechanisms are in the cache)
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from fedcgd import Participation, calibrate, error_norms
from fedcgd.mechanisms import Mechanism, Toeplitz
from fedcgd.mechanisms.streaming import noise_mode
from fedcgd.optimisation import catalogue

ROUNDS, EPOCHS, EPSILON, DELTA = 1000, 10, 8.0, 1e-5  # few enough rounds for `dense`
PLAN = Participation(rounds=ROUNDS, min_separation=ROUNDS // EPOCHS, max_participations=EPOCHS)
BANDS = (2, 4, 8, 16, 32, 100)
FAMILIES: dict[str, list[str]] = {
    "dp-sgd": ["dp-sgd"],
    "lambda-cgd": [f"lambda-cgd:{lam}" for lam in (0.9, 0.95, 0.975)],
    "bisr": [f"bisr:{p}" for p in BANDS],
    "band-inv-mf": [f"band-inv-mf:{p}" for p in BANDS],
    "bsr": [f"bsr:{p}" for p in BANDS],
    "banded-toeplitz": [f"banded-toeplitz:{p}" for p in BANDS],
    "band-mf": ["band-mf:4", "band-mf:16"],
    "blt": [f"blt:{d}" for d in (1, 2, 3, 4)],
    "toeplitz": ["toeplitz"],
    "nu-dp-ftrl": ["nu-dp-ftrl:0.001"],
    "dense": ["dense"],
    "tree": ["tree"],
    "diagonal": ["diagonal"],
}
# One of each kind, for the coefficients.
SHOWN = (
    "lambda-cgd:0.975",
    "bisr:16",
    "band-inv-mf:16",
    "bsr:16",
    "banded-toeplitz:16",
    "blt:3",
    "toeplitz",
    "nu-dp-ftrl:0.001",
)


def rmse(mechanism: Mechanism) -> float:
    sigma = calibrate(mechanism, PLAN, epsilon=EPSILON, delta=DELTA).noise_multiplier
    return error_norms(mechanism, ROUNDS).rmse(sigma)


def main() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    colours = plt.get_cmap("tab20")
    for index, (name, choices) in enumerate(FAMILIES.items()):
        points = []
        for spelling in choices:
            mechanism = catalogue.mechanism(spelling, PLAN)
            points.append((mechanism.num_buffers(ROUNDS), rmse(mechanism), noise_mode(mechanism, ROUNDS)))
            print(spelling, points[-1], flush=True)
        kept, found, modes = zip(*points, strict=True)
        hollow = modes[0] == "replay"
        left.plot(
            kept, found, marker="o", label=name, color=colours(index), linewidth=1,
            markerfacecolor="white" if hollow else None,
        )  # fmt: skip
    left.set_xscale("symlog", linthresh=1)
    left.set_yscale("log")
    left.set_xlabel("vectors kept between rounds (hollow: none, if replayed from the key)")
    left.set_ylabel(f"RMSE at ε = {EPSILON:g}, δ = {DELTA:g}")
    left.set_title(f"{ROUNDS} rounds, {EPOCHS} participations {PLAN.min_separation} apart, no amplification")
    left.legend(fontsize=8, ncols=2)
    for spelling in SHOWN:
        mechanism = catalogue.mechanism(spelling, PLAN)
        assert isinstance(mechanism, Toeplitz)
        weights = mechanism.inverse_coefficients(ROUNDS)[1:]
        colour = colours(list(FAMILIES).index(spelling.partition(":")[0]))
        right.plot(
            np.arange(1, len(weights) + 1),
            np.abs(weights),
            color=colour,
            label=spelling,
            marker="." if len(weights) < 20 else "",
        )
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_ylim(1e-6, 2)
    right.set_xlabel("lag i")
    right.set_ylabel("|C⁻¹ₜ,ₜ₋ᵢ|: how much of the noise of i rounds ago comes again")
    right.legend(fontsize=8)
    target = Path(__file__).parents[1] / "docs" / "mechanisms.svg"
    plt.rcParams["svg.hashsalt"] = "fedcgd"  # the same file for the same numbers
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
