"""Less correlation with the same family: C with coefficients c_t·ρ^t, whose inverse has those of C⁻¹ times ρ^t."""

import numpy as np

from fedcgd.mechanisms import BLT, BandedToeplitz, BandInvMF, Mechanism, Normalized

DAMPED = (BLT, BandInvMF, BandedToeplitz)
"""The optimised mechanisms that stay of their kind."""


def damped(mechanism: Mechanism, rho: float) -> Mechanism:
    """The mechanism whose C is D·C·D⁻¹ with D = diag(1, ρ, ρ², …): Toeplitz coefficients c_t·ρ^t, of the same signs.

    Σ_t c_t·ρ^t·x^t = c(ρx), so that the inverse is 1/c(ρx): c⁻¹_t·ρ^t. Bands and buffers are as many as before.

    Args:
        mechanism: a BLT, BandInvMF or BandedToeplitz, or one of these with unit columns, which then has them anew.
        rho: ρ in [0, 1]; 1 changes nothing, and 0 leaves no correlation.

    Raises:
        ValueError: for another mechanism.

    >>> damped(BandInvMF((1.0, -0.8, -0.1)), 0.5)
    BandInvMF(values=(1.0, -0.4, -0.025))
    """
    if isinstance(mechanism, Normalized):
        return Normalized(_damped(mechanism.mechanism, rho))
    return _damped(mechanism, rho)


def _damped(mechanism: Mechanism, rho: float) -> BLT | BandInvMF | BandedToeplitz:
    match mechanism:
        case BLT(scales=scales, decays=decays):
            return BLT(tuple(scale * rho for scale in scales), tuple(decay * rho for decay in decays))
        case BandInvMF(values=values) | BandedToeplitz(values=values):
            return type(mechanism)(tuple((np.array(values) * rho ** np.arange(len(values))).tolist()))
    raise ValueError(f"{mechanism.name} cannot be damped: only blt, band-inv-mf and banded-toeplitz can")


def damping(mechanism: Mechanism, undamped: Mechanism) -> float:
    """ρ with which `mechanism` was made of `undamped`; 1 for one that is not `damped`.

    >>> damping(damped(BLT((0.4, 0.1), (0.9, 0.5)), 0.5), BLT((0.4, 0.1), (0.9, 0.5)))
    0.5
    """
    made, before = (each.mechanism if isinstance(each, Normalized) else each for each in (mechanism, undamped))
    if type(made) is not type(before) or not isinstance(before, DAMPED):
        return 1.0
    assert isinstance(made, DAMPED)  # noqa: S101
    first, full = (each.coefficients(2)[1] for each in (made, before))
    return float(first / full) if full else 1.0
