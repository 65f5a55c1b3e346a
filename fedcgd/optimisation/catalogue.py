"""Mechanisms by their command-line names, optimised for the run where they have free numbers."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from fedcgd.mechanisms import (
    BISR,
    BSR,
    DPSGD,
    Diagonal,
    LambdaCGD,
    Mechanism,
    Normalized,
    NuDPFTRL,
    SquareRootToeplitz,
    Toeplitz,
    Tree,
)
from fedcgd.mechanisms.serialisation import NAMES, check_name
from fedcgd.mechanisms.workload import PREFIX_SUMS, Workload
from fedcgd.optimisation.banded import band_mf, dense
from fedcgd.optimisation.cache import cached
from fedcgd.optimisation.lbfgs import Progress
from fedcgd.optimisation.toeplitz import Objective, band_inv_mf, banded_toeplitz, blt
from fedcgd.participation import Participation

__all__ = ["NAMES", "make"]


def make(
    name: str,
    *,
    rounds: int,
    participation: Participation,
    lam: float | None = None,
    bandwidth: int | None = None,
    degree: int | None = None,
    nu: float | None = None,
    normalize: bool = False,
    error: Objective = "rmse",
    workload: Workload = PREFIX_SUMS,
    progress: Progress | None = None,
) -> Mechanism:
    """The mechanism `name` with the parameter it needs; `error` and `workload` say what an optimised one is optimised for.

    Optimised mechanisms are kept in the cache folder (`fedcgd.optimisation.cache`). `progress` hears of each 20 iterations.

    Raises ValueError for an unknown name, a parameter that is missing or does not belong to the mechanism, and a normalisation
    that would not keep C⁻¹Z cheap.
    """
    check_name(name)
    given = {"lam": lam, "bandwidth": bandwidth, "degree": degree, "nu": nu}
    needed = _NEEDS.get(name)
    for parameter, value in given.items():
        if value is not None and parameter != needed:
            raise ValueError(f"{parameter} does not belong to {name}, got {value}; {_advice(name)}")
    if needed is not None and given[needed] is None:
        raise ValueError(f"{name} needs {needed}; {_advice(name)}")
    if participation.rounds != rounds:
        raise ValueError(f"participation is for {participation.rounds} rounds, and {rounds} are asked for")
    if name in _OPTIMISED:
        request = {
            "name": name,
            "parameter": None if needed is None else given[needed],
            "participation": (rounds, participation.min_separation, participation.participations),
            "error": error,
            "workload": asdict(workload),
        }
        mechanism = cached(request, lambda: _optimise(name, given, participation, error, workload, progress))
    else:
        mechanism = _FIXED[name](None if needed is None else given[needed])
    if not normalize:
        return mechanism
    if isinstance(mechanism, Toeplitz):
        return Normalized(mechanism)
    raise ValueError(f"{name} cannot be normalised: only Toeplitz mechanisms can; leave normalize out")


_NEEDS = {
    "lambda-cgd": "lam",
    "nu-dp-ftrl": "nu",
    "blt": "degree",
    **dict.fromkeys(("bisr", "bsr", "band-inv-mf", "band-mf", "banded-toeplitz"), "bandwidth"),
}


def _advice(name: str) -> str:
    needed = _NEEDS.get(name)
    return f"{name} takes {needed}" if needed else f"{name} takes no parameter"


_FIXED: dict[str, Callable[[Any], Mechanism]] = {
    "dp-sgd": lambda _: DPSGD(),
    "lambda-cgd": LambdaCGD,
    "bisr": BISR,
    "bsr": BSR,
    "toeplitz": lambda _: SquareRootToeplitz(),
    "nu-dp-ftrl": NuDPFTRL,
    "tree": lambda _: Tree(),
    "diagonal": lambda _: Diagonal(),
}

_OPTIMISED = ("band-inv-mf", "band-mf", "banded-toeplitz", "blt", "dense")


def _optimise(
    name: str,
    given: Mapping[str, Any],
    participation: Participation,
    error: Objective,
    workload: Workload,
    progress: Progress | None,
) -> Mechanism:
    if name in ("band-mf", "dense") and error != "rmse":
        raise ValueError(f"{name} is optimised for rmse only, not for {error}; banded-toeplitz and blt know both")
    match name:
        case "band-inv-mf":
            return band_inv_mf(given["bandwidth"], participation, error=error, workload=workload, progress=progress)
        case "banded-toeplitz":
            return banded_toeplitz(given["bandwidth"], participation, error=error, workload=workload, progress=progress)
        case "blt":
            return blt(given["degree"], participation, error=error, workload=workload, progress=progress)
        case "band-mf":
            return band_mf(given["bandwidth"], participation, workload=workload, progress=progress)
        case _:
            return dense(participation, workload=workload, progress=progress)
