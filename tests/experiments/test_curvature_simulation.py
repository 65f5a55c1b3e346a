"""The formulas against descent with the library's own noise, many runs at once: a coordinate is a run of its own."""

import numpy as np
import pytest

from fedcgd import BISR, BLT, DPSGD, BandedToeplitz, BinaryTree, LambdaCGD, Normalized, NuDPFTRL, Participation
from fedcgd.curvature.stationary import stationary_loss
from fedcgd.noise import NoiseStream
from fedcgd.noise.quantisation import Lattice
from fedcgd.optimisation.noise_curve import noise_curve
from fedcgd.optimisation.toeplitz import blt
from fedcgd.quadratic import Quadratic, Spectrum
from fedcgd.quadratic.loss import final_loss, gradient_norm
from fedcgd.release.run_noise import LatticeNormals, NoiseSource

EIGENVALUES = np.array([1.0, 0.5, 0.15])
QUADRATIC = Quadratic(Spectrum.from_eigenvalues(EIGENVALUES), 0.6)
KEY = bytes(range(32))  # chosen before anything was measured, as was the number of runs
RUNS, ROUNDS, STATIONARY_ROUNDS = 40_000, 25, 100
LIMIT = 3.6
"""Standard errors. Of 27 right formulas one or two are beyond 2 by chance, and any beyond this with probability 0.9 %."""
ONCE = Participation(rounds=ROUNDS, min_separation=ROUNDS)
SERIES = {
    "dp-sgd": DPSGD(),
    "lambda-cgd": LambdaCGD(0.7),
    "bisr": BISR(4),
    "banded-toeplitz": BandedToeplitz((1.0, 0.6, 0.4)),
    "blt": BLT((0.3, 0.2), (0.9, 0.4)),
    "nu-dp-ftrl": NuDPFTRL(0.1),
    "fitted blt": blt(2, ONCE, quadratic=QUADRATIC),
}
MADE_FOR_ROUNDS = {
    "noise-curve": noise_curve(4, Participation(rounds=ROUNDS, min_separation=4), quadratic=QUADRATIC),
    "tree": BinaryTree(),
    "normalized": Normalized(LambdaCGD(0.7)),
}


def simulate(mechanism, rounds: int, runs: int, stddev: float) -> tuple[np.ndarray, np.ndarray]:
    """The loss at the end, and the mean of ‖∇L‖² over all rounds, of each run of `w ← w − η·(gradient + noise)` from the optimum.

    The sum of a round goes through the grid, and its noise comes from the key as on a server.
    """
    grid = Lattice(2.0**-20)
    source = NoiseSource(mechanism, rounds, LatticeNormals(NoiseStream(KEY), grid), "buffer")
    curvature = np.repeat(EIGENVALUES, runs)
    w, norms = np.zeros(len(curvature)), np.zeros(runs)
    for t in range(rounds):
        total = grid.to_steps(curvature * w)
        source.add(total, [7] * (t + 1), stddev)
        w = w - QUADRATIC.learning_rate * grid.from_steps(total)
        norms += ((curvature * w) ** 2).reshape(-1, runs).sum(axis=0) / rounds
    return (curvature * w**2 / 2).reshape(-1, runs).sum(axis=0), norms


def check(samples: np.ndarray, expected: float) -> None:
    """The mean is the expected one, and a formula that is 4 % off would be seen."""
    mean, standard_error = samples.mean(), samples.std(ddof=1) / np.sqrt(len(samples))
    assert abs(mean - expected) < LIMIT * standard_error
    for wrong in (0.96, 1.04):
        assert abs(mean - wrong * expected) > LIMIT * standard_error


@pytest.mark.parametrize("name", [*SERIES, *MADE_FOR_ROUNDS])
def test_runs_lose_what_the_formula_says(name: str) -> None:
    mechanism = (SERIES | MADE_FOR_ROUNDS)[name]
    losses, norms = simulate(mechanism, ROUNDS, RUNS, 1.5)
    check(losses, final_loss(mechanism, ROUNDS, QUADRATIC, stddev=1.5))
    check(norms, gradient_norm(mechanism, ROUNDS, QUADRATIC, stddev=1.5))


@pytest.mark.parametrize("name", SERIES)
def test_long_runs_lose_what_the_integral_says(name: str) -> None:
    losses, _ = simulate(SERIES[name], STATIONARY_ROUNDS, RUNS, 1.0)
    check(losses, stationary_loss(SERIES[name], QUADRATIC))
