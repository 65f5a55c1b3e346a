"""Mechanisms by their command-line names, optimised for the run where they have free numbers."""

from collections.abc import Mapping
from typing import Any, Literal

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
from fedcgd.mechanisms.registry import NAMES, check_name
from fedcgd.mechanisms.workload import PREFIX_SUMS, Workload
from fedcgd.participation import Participation

__all__ = ["NAMES", "Objective", "make"]

Objective = Literal["rmse", "max-se"]


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
) -> Mechanism:
    """The mechanism `name` with the parameter it needs; `error` and `workload` say what an optimised one is optimised for.

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
    mechanism = _make(name, given, participation, error, workload)
    if not normalize:
        return mechanism
    if not isinstance(mechanism, Toeplitz):
        raise ValueError(f"{name} cannot be normalised: only Toeplitz mechanisms can; leave normalize out")
    return Normalized(mechanism)


_NEEDS = {
    "lambda-cgd": "lam",
    "nu-dp-ftrl": "nu",
    "blt": "degree",
    **dict.fromkeys(("bisr", "bsr", "band-inv-mf", "band-mf", "banded-toeplitz"), "bandwidth"),
}


def _advice(name: str) -> str:
    needed = _NEEDS.get(name)
    return f"{name} takes {needed}" if needed else f"{name} takes no parameter"


def _make(
    name: str,
    given: Mapping[str, Any],
    participation: Participation,
    error: Objective,
    workload: Workload,
) -> Mechanism:
    match name:
        case "dp-sgd":
            return DPSGD()
        case "lambda-cgd":
            return LambdaCGD(given["lam"])
        case "bisr":
            return BISR(given["bandwidth"])
        case "bsr":
            return BSR(given["bandwidth"])
        case "toeplitz":
            return SquareRootToeplitz()
        case "nu-dp-ftrl":
            return NuDPFTRL(given["nu"])
        case "tree":
            return Tree()
        case "diagonal":
            return Diagonal()
    raise NotImplementedError(name)
