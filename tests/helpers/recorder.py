"""Figures of the accounting for many small runs, as JSON: what `tests/helpers/recorded.json` was made with, and is compared with.

The file holds what commit 9ec9bba said. In a checkout of that commit, with this file copied into its `tests`:

    PYTHONPATH=. python tests/helpers/recorder.py > recorded.json

but for two figures of deterministic Balls-in-Bins with 60 rounds in 20 bins (ε 3.67385 at σ = 2, σ 7.09434 for (1, 1e-6)):
Hölder's bound is now the least over all orders, where it was that of the largest order of nearly the least. Both questions were
simulated with 2·10⁷ draws of the privacy loss, which give δ = 8.6(1.0)e-7 for the 1e-5, and 1.0(0.2)e-7 for the 1e-6 asked.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from fedcgd import Participation, accounting, select_lambda, sensitivity
from fedcgd.mechanisms import (
    BISR,
    BLT,
    BSR,
    DPSGD,
    BandedToeplitz,
    BandInvMF,
    Diagonal,
    LambdaCGD,
    Normalized,
    NuDPFTRL,
    SquareRootToeplitz,
)

try:
    from fedcgd.accounting import compute_delta, compute_epsilon
    from fedcgd.mechanisms import BinaryTree, Dense
    from fedcgd.mechanisms.error import error_norms
except ImportError:  # their names at 9ec9bba
    from fedcgd.mechanisms import Explicit as Dense
    from fedcgd.mechanisms import Tree as BinaryTree

    compute_epsilon, compute_delta = accounting.epsilon, accounting.delta
    from fedcgd.mechanisms.errors import error_norms

TARGETS = ((8.0, 1e-5), (1.0, 1e-6))


def explicit(n: int, p: int) -> np.ndarray:
    """A band that is no Toeplitz matrix: C[j + i, j] = (1 + j/n)/(1 + i)."""
    return np.array([[(1 + j / n) / (1 + i) if j + i < n else 0.0 for i in range(p)] for j in range(n)])


MECHANISMS: dict[str, Callable[[int], Any]] = {
    "dp-sgd": lambda n: DPSGD(),
    "lambda-cgd": lambda n: LambdaCGD(0.9),
    "lambda-cgd, normalised": lambda n: Normalized(LambdaCGD(0.9)),
    "bisr": lambda n: BISR(4),
    "bsr": lambda n: BSR(4),
    "bsr, normalised": lambda n: Normalized(BSR(4)),
    "toeplitz": lambda n: SquareRootToeplitz(),
    "nu-dp-ftrl": lambda n: NuDPFTRL(0.1),
    "tree": lambda n: BinaryTree(),
    "diagonal": lambda n: Diagonal(),
    "banded-toeplitz": lambda n: BandedToeplitz((1.0, 0.6, 0.3, 0.1)),
    "band-inv-mf": lambda n: BandInvMF((1.0, -0.5, -0.2)),
    "band-inv-mf, negative C": lambda n: BandInvMF((1.0, 0.5)),
    "blt": lambda n: BLT((0.2, 0.1), (0.95, 0.5)),
    "band-mf": lambda n: Dense("band-mf", explicit(n, 4)),
    "dense": lambda n: Dense("dense", explicit(n, n)),
}

KNOWN = [
    Participation(rounds=12, min_separation=4),
    Participation(rounds=60, min_separation=20, max_participations=2),
    Participation(rounds=50),
    Participation(rounds=256, min_separation=32),
]
COINS = [
    Participation(rounds=100, sampling="poisson", sampling_rate=0.05),
    Participation(rounds=1000, sampling="poisson", sampling_rate=0.01),
    Participation(rounds=120, min_separation=4, sampling="cyclic-poisson", sampling_rate=0.2),
]
FEW_COINS = [Participation(rounds=n, sampling="poisson", sampling_rate=q) for n, q in ((1, 0.3), (3, 0.1), (5, 0.5))]
BINS = [  # mechanism, participation, method; the quick ones first
    ("dp-sgd", Participation(rounds=60, min_separation=20, sampling="balls-in-bins"), None),
    ("lambda-cgd", Participation(rounds=60, min_separation=5, sampling="balls-in-bins"), None),
    ("lambda-cgd", Participation(rounds=12, min_separation=4, sampling="balls-in-bins"), "deterministic"),
    ("band-inv-mf, negative C", Participation(rounds=12, min_separation=4, sampling="balls-in-bins"), None),
    ("bsr", Participation(rounds=60, min_separation=20, sampling="balls-in-bins"), None),
    ("tree", Participation(rounds=64, min_separation=16, sampling="balls-in-bins"), "monte-carlo"),
    ("dense", Participation(rounds=12, min_separation=4, sampling="balls-in-bins"), "monte-carlo"),
    ("lambda-cgd, normalised", Participation(rounds=60, min_separation=20, sampling="balls-in-bins"), "deterministic"),
]
SELECTIONS = [
    ("rmse", KNOWN[3], False),
    ("rmse", KNOWN[1], True),
    ("max-se", KNOWN[3], False),
    ("practical", KNOWN[3], False),
    ("amplified-rmse", KNOWN[3], True),
    ("rmse", BINS[1][1], False),
    ("practical", BINS[1][1], False),
]


def reach(name: str, participation: Participation, released: int | None) -> dict[str, Any]:
    found = sensitivity(MECHANISMS[name](participation.rounds), participation, released=released)
    return {"value": found.value, "exact": found.exact, "method": found.method}


def errors(name: str, participation: Participation) -> dict[str, Any]:
    norms = error_norms(MECHANISMS[name](participation.rounds), participation.rounds)
    return {"rmse": norms.rmse(1.0), "max_se": norms.max_se(1.0)}


def calibrated(name: str, participation: Participation, target: tuple[float, float], method: Any) -> dict[str, Any]:
    mechanism = MECHANISMS[name](participation.rounds)
    return figures(accounting.calibrate(mechanism, participation, epsilon=target[0], delta=target[1], method=method))


def spent(name: str, participation: Participation, released: int | None, method: Any) -> dict[str, Any]:
    """ε at δ = 1e-5, and δ at that ε, for σ = 2."""
    mechanism = MECHANISMS[name](participation.rounds)
    options = {"noise_multiplier": 2.0, "released": released, "method": method}
    found = compute_epsilon(mechanism, participation, delta=1e-5, **options)
    back = compute_delta(mechanism, participation, epsilon=1.0, **options)
    return figures(found) | {"delta_at_1": back.delta}


def figures(found: Any) -> dict[str, Any]:
    return {
        "noise_multiplier": found.noise_multiplier,
        "epsilon": found.epsilon,
        "sensitivity": found.sensitivity,
        "exact": found.exact,
        "draws": found.failure_probability > 0,
    }


def selected(objective: Any, participation: Participation, normalize: bool) -> dict[str, Any]:
    found = select_lambda(participation, objective=objective, epsilon=2.0, delta=1e-5, normalize=normalize)
    return {"lam": found.lam, "value": found.value}


def cases() -> dict[str, Callable[[], dict[str, Any]]]:
    """A name for each run and what makes its figures."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for participation in KNOWN:
        part = participation.rounds // 3 + 1
        for name in MECHANISMS:
            for released in (None, part):
                found[f"sensitivity | {name} | {text(participation)} | {released}"] = partial(
                    reach, name, participation, released
                )
                found[f"spent | {name} | {text(participation)} | {released}"] = partial(
                    spent, name, participation, released, None
                )
            for target in TARGETS:
                found[f"calibrate | {name} | {text(participation)} | {target}"] = partial(
                    calibrated, name, participation, target, None
                )
            found[f"error | {name} | {text(participation)}"] = partial(errors, name, participation)
    for participation in COINS + FEW_COINS:
        for name in ("dp-sgd", "diagonal", "bsr", "bsr, normalised", "banded-toeplitz", "lambda-cgd"):
            if participation in FEW_COINS and name != "dp-sgd":
                continue
            for released in (None, participation.rounds // 3 + 1):
                found[f"spent | {name} | {text(participation)} | {released}"] = partial(
                    spent, name, participation, released, None
                )
            for target in TARGETS:
                found[f"calibrate | {name} | {text(participation)} | {target}"] = partial(
                    calibrated, name, participation, target, None
                )
    for name, participation, method in BINS:
        for released in (None, participation.rounds // 3 + 1):
            found[f"spent | {name} | {text(participation)} | {method} | {released}"] = partial(
                spent, name, participation, released, method
            )
        for target in TARGETS:
            found[f"calibrate | {name} | {text(participation)} | {method} | {target}"] = partial(
                calibrated, name, participation, target, method
            )
    for objective, participation, normalize in SELECTIONS:
        found[f"select-lambda | {objective} | {text(participation)} | {normalize}"] = partial(
            selected, objective, participation, normalize
        )
    return found


def text(participation: Participation) -> str:
    p = participation
    return f"{p.sampling} n={p.rounds} b={p.min_separation} k={p.max_participations} q={p.sampling_rate}"


def outcome(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The figures, or that they are refused."""
    try:
        return make()
    except ValueError:
        return {"refused": True}


if __name__ == "__main__":
    import time

    recorded = {}
    for name, make in cases().items():
        start = time.perf_counter()
        recorded[name] = outcome(make)
        seconds = time.perf_counter() - start
        if seconds > 0.3:
            print(f"{seconds:.1f} s: {name}", file=sys.stderr)
    made_by = "commit 9ec9bba, PYTHONPATH=. python tests/helpers/recorder.py > recorded.json"
    print(json.dumps({"made_by": made_by, "figures": recorded}, ensure_ascii=False, indent=0))
