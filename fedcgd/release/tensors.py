"""The noise of one run for sums that are tensors, wherever they are."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fedcgd.noise import NoiseStream
from fedcgd.noise.keys import NONCE_BYTES, NoiseKey
from fedcgd.noise.quantisation import Lattice
from fedcgd.noise.tensors import TensorNormals, sum_digest
from fedcgd.plan import Plan
from fedcgd.release.run_noise import NoiseMode, NoiseSource, RunNoise


def tensor_noise(
    plan: Plan,
    key: NoiseKey,
    stream_id: str,
    lattice: Lattice,
    mode: NoiseMode | None = None,
    share: slice | None = None,
) -> RunNoise:
    """As `array_noise`, for sums that are float64 tensors of whole steps: what central training uses.

    With a `share`, some coordinates in a row, only these get their noise: others make the noise of the others.
    """

    def nonce_of(total: Tensor, earlier: Sequence[int], attempt: int) -> int:
        digest = sum_digest(total, key.noise_of(stream_id))
        return key.nonce_of(stream_id, digest, earlier=earlier, attempt=attempt)

    normals = TensorNormals(NoiseStream(key.noise_of(stream_id)), lattice, 0 if share is None else share.start)
    source = NoiseSource(plan.mechanism, plan.participation.rounds, normals, mode)
    return RunNoise(source, lattice, plan.stddev, nonce_of, share)


def joint_nonce(key: NoiseKey, stream_id: str, parts: Sequence[int], *, earlier: Sequence[int], attempt: int) -> int:
    """A nonce that is bound to all parts of a round's sum, by the nonces that are bound to each (`RunNoise.add`'s `join`)."""
    bound = np.frombuffer(b"".join(part.to_bytes(NONCE_BYTES, "big") for part in parts), np.uint8)
    return key.nonce_of(stream_id, bound, earlier=earlier, attempt=attempt)
