"""Every mechanism at the size that tests of all of them take."""

import numpy as np
import oracles_mechanisms as oracle
from scipy.special import binom

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
    Toeplitz,
)

N = 13
ROOT = oracle.square_root_series(64)
LOWER = np.tril(np.random.default_rng(1).random((N, N))) + np.eye(N)
DENSE = np.array([[LOWER[j + lag, j] if j + lag < N else 0.0 for lag in range(N)] for j in range(N)])


def inverse(c):
    return np.linalg.inv(oracle.toeplitz(c, N))


def cut_power(gamma, bands):
    """The first coefficients of (1 − x)^γ, each a binomial coefficient with its sign."""
    return [(-1) ** t * binom(gamma, t) for t in range(bands)]


INVERSE_ROOT = inverse(ROOT)[:, 0]
BLT_SERIES = [1.0, *(0.3 * 0.95**t + 0.1 * 0.6**t for t in range(N - 1))]
TABLE = [
    (DPSGD(), np.eye(N)),
    (LambdaCGD(0.7), oracle.toeplitz(0.7 ** np.arange(N), N)),
    (LambdaCGD(0.0), np.eye(N)),
    (LambdaMuCGD(0.8, -0.3), oracle.toeplitz([(0.8**t - (-0.3) ** t) / 1.1 for t in range(1, N + 1)], N)),
    (LambdaMuCGD(0.7, 0.0), oracle.toeplitz(0.7 ** np.arange(N), N)),
    (LambdaMuCGD(0.8, 0.3), oracle.toeplitz(0.8 ** np.arange(N), N) @ oracle.toeplitz(0.3 ** np.arange(N), N)),
    (LambdaMuCGD(0.6, 0.6), oracle.toeplitz([(t + 1) * 0.6**t for t in range(N)], N)),
    (LambdaMuCGD(0.5, -0.5), oracle.toeplitz([0.5**t * (t % 2 == 0) for t in range(N)], N)),
    (BIFR(3, 0.7), inverse(cut_power(0.7, 3))),
    (BIFR(1, 0.7), np.eye(N)),
    (BIFR(2, 0.7), oracle.toeplitz(0.7 ** np.arange(N), N)),
    (BIFR(4, 0.5), inverse(INVERSE_ROOT[:4])),
    (BIFR(6, 1.0), np.tri(N)),
    (BIFR(40, 0.3), oracle.toeplitz([(-1) ** t * binom(-0.3, t) for t in range(N)], N)),
    (BISR(4), inverse(INVERSE_ROOT[:4])),
    (BISR(1), np.eye(N)),
    (BISR(40), oracle.toeplitz(ROOT, N)),
    (BandInvMF((1.0, -0.5, -0.1, 0.2)), inverse([1.0, -0.5, -0.1, 0.2])),
    (BSR(4), oracle.toeplitz(ROOT[:4], N)),
    (BSR(1), np.eye(N)),
    (BSR(40), oracle.toeplitz(ROOT, N)),
    (BandedToeplitz((1.0, 0.6, -0.3)), oracle.toeplitz([1.0, 0.6, -0.3], N)),
    (BandedToeplitz((2.0,) * 20), oracle.toeplitz([2.0] * N, N)),
    (BLT((0.3, 0.1), (0.95, 0.6)), oracle.toeplitz(BLT_SERIES, N)),
    (SquareRootToeplitz(), oracle.toeplitz(ROOT, N)),
    (NuDPFTRL(0.2), oracle.toeplitz(ROOT[:N] * 0.8 ** np.arange(N), N)),
    (Diagonal(), np.diag([(N - j) ** 0.25 for j in range(N)])),
    (Dense("dense", DENSE), LOWER),
    (
        Dense("band-mf", DENSE[:, :3] * [1, 0.5, 0.1]),
        np.tril(LOWER) * [[(1, 0.5, 0.1, 0)[min(max(i - j, 0), 3)] for j in range(N)] for i in range(N)],
    ),
]

ONE_OF_EACH: dict[str, Mechanism] = {
    **{mechanism.name: mechanism for mechanism, _ in reversed(TABLE) if not isinstance(mechanism, Dense)},
    "tree": BinaryTree(),
}
"""The first of each name, which is the same for runs of all lengths."""

NORMALIZED = {name: Normalized(ONE_OF_EACH[name]) for name in ("lambda-cgd", "bisr", "bsr", "blt", "toeplitz")}
"""With unit columns; those that are cheap to make."""

TABLE += [(Normalized(m), oracle.normalized(c)) for m, c in TABLE if isinstance(m, Toeplitz)]
"""Each with its C by definition; the first of each name is what `ONE_OF_EACH` has."""

MECHANISMS = [mechanism for mechanism, _ in TABLE] + [BinaryTree()]
