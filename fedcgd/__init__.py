"""Differentially private training whose noise is correlated across rounds and regenerated from a key.

>>> import fedcgd
>>> participation = fedcgd.Participation(rounds=210, min_separation=21)
>>> plan = fedcgd.Plan.calibrated(fedcgd.LambdaCGD(0.9), participation, clip_norm=1.0, epsilon=8, delta=1e-5)
>>> print(plan.guarantee())
ε ≤ 8 at δ = 1e-05 (zero out one user; sampling: none; exact Gaussian mechanism)

Names are loaded when they are first used: `import fedcgd` itself costs next to nothing.
"""

from typing import TYPE_CHECKING

from fedcgd.support.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from fedcgd import opacus
    from fedcgd.accounting.by_sampling import accountant
    from fedcgd.accounting.calibration import calibrate, compute_delta, compute_epsilon
    from fedcgd.accounting.compose import compose
    from fedcgd.accounting.guarantee import Guarantee
    from fedcgd.accounting.selection import select_lambda
    from fedcgd.ledger import JointBudget, Ledger
    from fedcgd.mechanisms import (
        BIFR,
        BISR,
        BLT,
        BSR,
        DPSGD,
        BandedToeplitz,
        BandInvMF,
        BinaryTree,
        Dense,
        Diagonal,
        LambdaCGD,
        LambdaMuCGD,
        Mechanism,
        Normalized,
        NuDPFTRL,
        SquareRootToeplitz,
    )
    from fedcgd.mechanisms.error import error_norms
    from fedcgd.mechanisms.sensitivity import sensitivity
    from fedcgd.noise.keys import NoiseKey
    from fedcgd.participation import Participation
    from fedcgd.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "BIFR",
    "BISR",
    "BLT",
    "BSR",
    "DPSGD",
    "BandInvMF",
    "BandedToeplitz",
    "BinaryTree",
    "Dense",
    "Diagonal",
    "Guarantee",
    "JointBudget",
    "LambdaCGD",
    "LambdaMuCGD",
    "Ledger",
    "Mechanism",
    "NoiseKey",
    "Normalized",
    "NuDPFTRL",
    "Participation",
    "Plan",
    "SquareRootToeplitz",
    "accountant",
    "calibrate",
    "compose",
    "compute_delta",
    "compute_epsilon",
    "error_norms",
    "opacus",
    "select_lambda",
    "sensitivity",
]

__getattr__ = lazy_exports(
    __name__,
    dict.fromkeys(__all__, "mechanisms")  # but for those that follow
    | {
        "Guarantee": "accounting",
        "accountant": "accounting",
        "calibrate": "accounting",
        "compose": "accounting",
        "compute_delta": "accounting",
        "compute_epsilon": "accounting",
        "select_lambda": "accounting.selection",
        "NoiseKey": "noise.keys",
        "JointBudget": "ledger",
        "Ledger": "ledger",
        "error_norms": "mechanisms.error",
        "sensitivity": "mechanisms.sensitivity",
        "opacus": "opacus",
        "Participation": "participation",
        "Plan": "plan",
    },
)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
