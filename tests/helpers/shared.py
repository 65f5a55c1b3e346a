"""What tests of several packages make: one of each mechanism, and a model of one array."""

import numpy as np
from flwr.app import Array, ArrayRecord

from fedcgd.mechanisms import (
    BIFR,
    BISR,
    BLT,
    BSR,
    DPSGD,
    BandedToeplitz,
    BandInvMF,
    BinaryTree,
    Diagonal,
    LambdaCGD,
    LambdaMuCGD,
    Mechanism,
    Normalized,
    NuDPFTRL,
    SquareRootToeplitz,
)

MECHANISMS: dict[str, Mechanism] = {
    "dp-sgd": DPSGD(),
    "lambda-cgd": LambdaCGD(0.7),
    "bisr": BISR(4),
    "bifr": BIFR(3, 0.7),
    "lambda-mu": LambdaMuCGD(0.8, -0.3),
    "bsr": BSR(4),
    "blt": BLT((0.3, 0.1), (0.95, 0.6)),
    "tree": BinaryTree(),
    "diagonal": Diagonal(),
    "banded-toeplitz": BandedToeplitz((1.0, 0.6, -0.3)),
    "band-inv-mf": BandInvMF((1.0, -0.5, -0.1, 0.2)),
    "toeplitz": SquareRootToeplitz(),
    "nu-dp-ftrl": NuDPFTRL(0.2),
}
"""One of each that is the same for runs of all lengths."""

NORMALIZED = {name: Normalized(MECHANISMS[name]) for name in ("lambda-cgd", "bisr", "bsr", "blt", "toeplitz")}
"""With unit columns; those that are cheap to make."""


def record(values) -> ArrayRecord:
    """A model of one array, float32."""
    return ArrayRecord({"w": Array(np.asarray(values, np.float32))})
