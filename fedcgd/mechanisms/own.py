"""Mechanisms that come from outside of fedcgd: whether their noise is that of the C which ε is found for."""

import numpy as np

from fedcgd.mechanisms.mechanism import Mechanism

_ENTRIES = 2**24  # of C, that are looked at: 128 MiB
_TOLERANCE = 1e-8


def check_own(mechanism: Mechanism, rounds: int) -> None:
    """Raise ValueError unless C is lower-triangular, and `inverse_row` and `multiply_next` make C⁻¹Z of it, in the first rounds.

    As many rounds as 2²⁴ entries of C have; all of a run of up to 4096. Mechanisms of fedcgd are not looked at: tests do that.
    """
    if all(
        type(part).__module__.startswith("fedcgd.") for part in (mechanism, getattr(mechanism, "mechanism", mechanism))
    ):
        return
    seen = min(rounds, max(_ENTRIES // rounds, 1))
    c = mechanism.columns(rounds, np.arange(seen))[:seen]
    if np.triu(c, 1).any() or not (np.diag(c) > 0).all():
        raise ValueError(f"C of {mechanism.name} must be lower-triangular with a positive diagonal")
    z = np.random.default_rng(0).normal(size=(seen, 4))  # a wrong entry of C⁻¹ shows in any Z but for a null set
    noise, buffers = np.zeros_like(z), ()
    for t in range(seen):
        weights = mechanism.inverse_row(t, rounds)
        replayed = weights @ z[t + 1 - len(weights) : t + 1][::-1]
        streamed, buffers = mechanism.multiply_next(t, rounds, z[t], buffers)
        if not np.allclose(streamed, replayed, rtol=_TOLERANCE, atol=_TOLERANCE * np.abs(z).max()):
            raise ValueError(
                f"`multiply_next` of {mechanism.name} does not make the noise of its `inverse_row` in round {t}"
            )
        noise[t] = replayed
    wrong = np.abs(c @ noise - z) > _TOLERANCE * (np.abs(c) @ np.abs(noise) + np.abs(z))
    if wrong.any():
        raise ValueError(
            f"the inverse of {mechanism.name} is not that of its C from round {int(np.argmax(wrong.any(axis=1)))} on: ε would be "
            "that of other noise than what is added; `fedcgd.mechanisms.toeplitz.reciprocal` finds the inverse of a series"
        )
