"""Mechanisms that come from outside of fedcgd: whether what they say of C, of its inverse and of the noise agrees.

ε is found from some of it (coefficients, columns, bandwidth), and the noise is made from the rest (rows of C⁻¹, or buffers). If
they are not of one C, ε is that of other noise than what is added.
"""

import numpy as np
import scipy

from fedcgd.mechanisms.mechanism import Banded, Matrix, Mechanism, Toeplitz, Vector
from fedcgd.mechanisms.normalized import Normalized
from fedcgd.mechanisms.streaming import noise_mode
from fedcgd.support.numbers import as_whole

_ENTRIES = 2**24  # of C, or of C⁻¹, that are looked at beyond what costs O(n): 128 MiB
_TOLERANCE = 1e-8
_TRIALS = 4  # columns of Z; a wrong entry shows in any of them but for a null set


def check_own(mechanism: Mechanism, rounds: int) -> None:
    """Raise ValueError unless all that `mechanism` says of itself is about one C, in every round.

    C must be finite and lower-triangular with a positive diagonal. Its `bandwidth` must cover every entry that is not zero; the
    `coefficients` must be those of `columns`; and C times the noise of all `rounds`, as a run makes it, must be Z again. Takes as
    long as making the noise of a model of four parameters, and O(n²) more for a C that is not Toeplitz. Mechanisms of fedcgd are
    not looked at: tests do that.
    """
    if all(
        type(part).__module__.startswith("fedcgd.") for part in (mechanism, getattr(mechanism, "mechanism", mechanism))
    ):
        return
    if type(mechanism) is Normalized:
        mechanism = mechanism.mechanism  # what divides the columns is fedcgd's
    name, p = mechanism.name, rounds
    if isinstance(mechanism, Banded):
        p = as_whole(f"the bandwidth of {name}", mechanism.bandwidth(rounds))
        if p < 1:
            raise ValueError(f"the bandwidth of {name} must be at least 1, got {p}")
    z = np.random.default_rng(0).normal(size=(rounds, _TRIALS))
    noise = _noise(mechanism, rounds, z)
    if isinstance(mechanism, Toeplitz):
        product, size = _toeplitz_product(mechanism, rounds, p, noise)
        _check_inverse_coefficients(mechanism, rounds)
    else:
        product, size = _product(mechanism, rounds, p, noise)
    wrong = ~(np.abs(product - z) <= _TOLERANCE * (size + np.abs(z)))
    if wrong.any():
        raise ValueError(
            f"the inverse of {name} is not that of its C from round {int(np.argmax(wrong.any(axis=1)))} on: ε would be "
            "that of other noise than what is added; `fedcgd.mechanisms.toeplitz.reciprocal` finds the inverse of a series"
        )


def _noise(mechanism: Mechanism, n: int, z: Matrix) -> Matrix:
    """C⁻¹Z of all rounds as a run makes it. Raises ValueError where rows of C⁻¹ and `multiply_next` differ.

    Rows that no run uses are compared as far as their cost allows: they only tell how large the noise can be.
    """
    name, bands, most = mechanism.name, mechanism.inverse_bandwidth(n), mechanism.num_buffers(n)
    replays, streams = noise_mode(mechanism, n) == "replay", True
    if most >= bands - 1 and type(mechanism).multiply_next is Mechanism.multiply_next:
        streams = False  # the noise of `inverse_row` by definition
    left, buffers, noise = _ENTRIES, (), np.zeros_like(z)
    for t in range(n):
        if streams:
            noise[t], buffers = mechanism.multiply_next(t, n, z[t], buffers)
            if len(buffers) > most:
                raise ValueError(f"{name} keeps {len(buffers)} buffers after round {t}, and `num_buffers` says {most}")
            if not replays and left < 0 and t < n - 1:
                continue
        weights = np.asarray(mechanism.inverse_row(t, n), dtype=np.float64)
        left -= t
        if not 1 <= len(weights) <= min(t + 1, bands):
            raise ValueError(
                f"`inverse_row` of {name} has {len(weights)} entries in round {t}, and may have {min(t + 1, bands)}: there are "
                f"{t + 1} noise vectors then, and `inverse_bandwidth` says {bands}"
            )
        replayed = weights @ z[t + 1 - len(weights) : t + 1][::-1]
        if not streams:
            noise[t] = replayed
        elif not np.allclose(noise[t], replayed, rtol=_TOLERANCE, atol=_TOLERANCE * np.abs(z).max()):
            raise ValueError(f"`multiply_next` of {name} does not make the noise of its `inverse_row` in round {t}")
        _check_diagonals(mechanism, n, t, weights)
    return noise


def _check_diagonals(mechanism: Mechanism, n: int, t: int, weights: Vector) -> None:
    """Raise ValueError unless `inverse_diagonal` has the entries of a few rows of C⁻¹: errors are found from it."""
    if t not in (0, n // 2, n - 1):
        return
    for lag in {0, 1, len(weights) - 1}:
        if lag < len(weights) and not np.isclose(mechanism.inverse_diagonal(lag, n)[t], weights[lag], rtol=_TOLERANCE):
            raise ValueError(
                f"`inverse_diagonal` of {mechanism.name} is not that of its `inverse_row` in round {t} at lag {lag}"
            )


def _toeplitz_product(mechanism: Toeplitz, n: int, p: int, noise: Matrix) -> tuple[Matrix, Matrix]:
    """C·noise and |C|·|noise|, from the coefficients. Raises ValueError unless columns and bandwidth are theirs."""
    c = np.asarray(mechanism.coefficients(n), dtype=np.float64)
    if c.shape != (n,) or not np.isfinite(c).all() or not c[0] > 0:
        raise ValueError(
            f"`coefficients` of {mechanism.name} must be {n} finite numbers, the first of them positive; got {c.shape}: {c[:4]}…"
        )
    _check_bandwidth(mechanism, p, c)
    seen = max(_ENTRIES // n, 2)
    indices = np.unique(np.linspace(0, n - 1, seen).astype(np.intp)) if seen < n else np.arange(n)
    step = max(1, 2**22 // n)
    for start in range(0, len(indices), step):
        part = indices[start : start + step]
        found = mechanism.columns(n, part)
        lags = np.arange(n)[:, None] - part[None, :]
        said = np.where(lags >= 0, c[np.maximum(lags, 0)], 0.0)
        if found.shape != said.shape or not np.allclose(found, said, rtol=_TOLERANCE, atol=_TOLERANCE * c[0]):
            raise ValueError(
                f"`columns` of {mechanism.name} are not those of its `coefficients`: they are of two matrices"
            )
    product = scipy.signal.fftconvolve(c[:, None], noise, axes=0)[:n]
    size = np.maximum(scipy.signal.fftconvolve(np.abs(c)[:, None], np.abs(noise), axes=0)[:n], 0.0)
    # The transform rounds by parts of the product of the norms, also where the terms of a row are few and small.
    rounding = 1e-14 * np.log2(n + 1) * np.linalg.norm(c) * np.linalg.norm(noise, axis=0)
    return product, size + rounding / _TOLERANCE


def _product(mechanism: Mechanism, n: int, p: int, noise: Matrix) -> tuple[Matrix, Matrix]:
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
        if columns[lags >= p].any():
            raise _wrong_bandwidth(mechanism, p, int(lags[(columns != 0)].max()) + 1)
        product += columns @ noise[indices]
        size += np.abs(columns) @ np.abs(noise[indices])
    return product, size


def _check_bandwidth(mechanism: Mechanism, p: int, c: Vector) -> None:
    if c[p:].any():
        raise _wrong_bandwidth(mechanism, p, int(np.flatnonzero(c)[-1]) + 1)


def _wrong_bandwidth(mechanism: Mechanism, said: int, found: int) -> ValueError:
    return ValueError(
        f"`bandwidth` of {mechanism.name} says that C has {said} bands, and it has {found}; C⁻¹ has its own, `inverse_bandwidth`"
    )


def _check_inverse_coefficients(mechanism: Toeplitz, n: int) -> None:
    """Raise ValueError unless the first column of C⁻¹ is its last row, backwards: errors are found from it."""
    row = np.asarray(mechanism.inverse_row(n - 1, n), dtype=np.float64)
    said = np.asarray(mechanism.inverse_coefficients(n), dtype=np.float64)
    both = np.zeros((2, n))
    both[0, : len(row)], both[1, : min(len(said), n)] = row, said[:n]
    if not np.allclose(both[0], both[1], rtol=_TOLERANCE, atol=_TOLERANCE * abs(row[0])):
        raise ValueError(f"`inverse_coefficients` of {mechanism.name} are not those of its `inverse_row`")
