"""Mechanisms that come from outside of fedcgd: whether what they say of C, of its inverse and of the noise agrees.

ε is found from some of it (coefficients, columns, bandwidth), and the noise is made from the rest (rows of C⁻¹, or buffers). If
they are not of one C, ε is that of other noise than what is added.
"""

import numpy as np

from fedcgd.mechanisms.mechanism import Matrix, Mechanism
from fedcgd.mechanisms.normalized import Normalized
from fedcgd.mechanisms.streaming import State, correlate
from fedcgd.mechanisms.toeplitz import Toeplitz, convolved

_TOLERANCE = 1e-8  # what 10⁵ rounds of rounding stay below; the noise is then that of a σ that is wrong by as much
_TRIALS = 4  # columns of Z; a wrong entry shows in any of them but for a null set


def check_own(mechanism: Mechanism, rounds: int) -> None:
    """Raise ValueError unless C times the noise of all `rounds`, as a run makes it, is Z again.

    C must be finite and lower-triangular with a positive diagonal, and its `bandwidth` must cover every entry that is not zero.
    Takes O(n²). Mechanisms of fedcgd are not looked at: tests do that.
    """
    if all(
        type(part).__module__.startswith("fedcgd.") for part in (mechanism, getattr(mechanism, "mechanism", mechanism))
    ):
        return
    if type(mechanism) is Normalized:
        mechanism = mechanism.mechanism  # what divides the columns is fedcgd's
    z = np.random.default_rng(0).normal(size=(rounds, _TRIALS))
    noise = _noise(mechanism, rounds, z)
    if isinstance(mechanism, Toeplitz):
        product, size = _toeplitz_product(mechanism, rounds, noise)
    else:
        product, size = _product(mechanism, rounds, noise)
    wrong = ~(np.abs(product - z) <= _TOLERANCE * (size + np.abs(z)))
    if wrong.any():
        raise ValueError(
            f"the inverse of {mechanism.name} is not that of its C from round {int(np.argmax(wrong.any(axis=1)))} on: ε would "
            "be that of other noise than what is added; `fedcgd.mechanisms.toeplitz.reciprocal` finds the inverse of a series"
        )


def _noise(mechanism: Mechanism, n: int, z: Matrix) -> Matrix:
    """C⁻¹Z of all rounds by the rows of C⁻¹. Raises ValueError where `multiply_next` makes other noise."""
    name, bands = mechanism.name, mechanism.inverse_bandwidth(n)
    by_definition = type(mechanism).multiply_next is Mechanism.multiply_next and mechanism.num_buffers(n) >= bands - 1
    state, noise = State(), np.zeros_like(z)
    for t in range(n):
        weights = np.asarray(mechanism.inverse_row(t, n), dtype=np.float64)
        if not 1 <= len(weights) <= min(t + 1, bands):
            raise ValueError(
                f"`inverse_row` of {name} has {len(weights)} entries in round {t}, and may have {min(t + 1, bands)}: there are "
                f"{t + 1} noise vectors then, and `inverse_bandwidth` says {bands}"
            )
        noise[t] = weights @ z[t + 1 - len(weights) : t + 1][::-1]
        if by_definition:
            continue
        streamed, state = correlate(mechanism, n, z[t], state)
        if not np.allclose(streamed, noise[t], rtol=_TOLERANCE, atol=_TOLERANCE * np.abs(z).max()):
            raise ValueError(f"`multiply_next` of {name} does not make the noise of its `inverse_row` in round {t}")
    return noise


def _toeplitz_product(mechanism: Toeplitz, n: int, noise: Matrix) -> tuple[Matrix, Matrix]:
    """C·noise and |C|·|noise|, from the coefficients."""
    c = np.asarray(mechanism.coefficients(n), dtype=np.float64)
    if c.shape != (n,) or not np.isfinite(c).all() or not c[0] > 0:
        raise ValueError(
            f"`coefficients` of {mechanism.name} must be {n} finite numbers, the first of them positive; got {c.shape}: {c[:4]}…"
        )
    rounding = 1e-14 * np.log2(n + 1) * np.linalg.norm(c) * np.linalg.norm(noise, axis=0)
    size = np.maximum(convolved(np.abs(c), np.abs(noise)), 0.0)
    return convolved(c, noise), size + rounding / _TOLERANCE


def _product(mechanism: Mechanism, n: int, noise: Matrix) -> tuple[Matrix, Matrix]:
    """C·noise and |C|·|noise|, from the columns. Raises ValueError unless C is triangular with its bandwidth."""
    product, size = np.zeros_like(noise), np.zeros_like(noise)
    step = max(1, 2**22 // n)
    for start in range(0, n, step):
        indices = np.arange(start, min(n, start + step))
        columns = np.asarray(mechanism.columns(n, indices), dtype=np.float64)
        lags = np.arange(n)[:, None] - indices[None, :]
        if columns.shape != lags.shape or not np.isfinite(columns).all():
            raise ValueError(
                f"`columns` of {mechanism.name} must be finite, of shape {lags.shape}; got {columns.shape}"
            )
        if columns[lags < 0].any() or not (columns[lags == 0] > 0).all():
            raise ValueError(f"C of {mechanism.name} must be lower-triangular with a positive diagonal")
        if columns[lags >= mechanism.bandwidth(n)].any():
            raise ValueError(
                f"`bandwidth` of {mechanism.name} says that C has {mechanism.bandwidth(n)} bands, and it has "
                f"{int(lags[columns != 0].max()) + 1}; C⁻¹ has its own, `inverse_bandwidth`"
            )
        product += columns @ noise[indices]
        size += np.abs(columns) @ np.abs(noise[indices])
    return product, size
