"""The release path of a server as the audit sees it: the very objects that a run uses, with a key of its own each time."""

import numpy as np

from fedcgd.audit.audit import Release
from fedcgd.mechanisms.mechanism import Matrix
from fedcgd.noise.keys import NoiseKey
from fedcgd.plan import Plan
from fedcgd.release import array_noise, lattice_of

_KEYS = 2**20  # repetitions of one seed


def audit_key(seed: int, repetition: int) -> NoiseKey:
    """A key for one repetition, repeatable.

    Args:
        seed: of the audit.
        repetition: from 0.
    """
    return NoiseKey.simulation(_KEYS * seed + repetition)


def server_release(plan: Plan, seed: int) -> Release:
    """What a server releases round by round: sums on the grid, nonces, noise, and back, as in `CorrelatedNoise`.

    Args:
        plan: what runs.
        seed: of the keys, one for each repetition: the noise is repeatable.

    Returns:
        What `audit_plan` takes: (sums with shape (rounds, size), repetition) → the releases, of the same shape.
    """

    def release(sums: Matrix, repetition: int) -> Matrix:
        key = audit_key(seed, repetition)
        lattice = lattice_of(plan, sums.shape[1])
        noise = array_noise(plan, key, "", lattice)
        nonces: list[int] = []
        noised = np.empty_like(sums)
        for t, row in enumerate(sums):
            total = lattice.to_steps(row)
            # Another attempt in each round, as where some rounds were tried again: noise of a wrong nonce shows.
            nonces.append(noise.add(total, earlier=nonces, attempt=t % 3 + 7 * t))
            noised[t] = lattice.from_steps(total)
        return noised

    return release
