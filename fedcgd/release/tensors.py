"""The noise of one run for sums that are tensors, wherever they are."""

from collections.abc import Sequence

from torch import Tensor

from fedcgd.noise import NoiseStream
from fedcgd.noise.keys import NoiseKey
from fedcgd.noise.quantisation import Lattice
from fedcgd.noise.tensors import TensorNormals, sum_digest
from fedcgd.plan import Plan
from fedcgd.release.noise_source import NoiseMode, NoiseSource
from fedcgd.release.run_noise import RunNoise


def tensor_noise(
    plan: Plan, key: NoiseKey, stream_id: str, lattice: Lattice, mode: NoiseMode | None = None
) -> RunNoise:
    """As `array_noise`, for sums that are float64 tensors of whole steps: what central training uses."""

    def nonce_of(total: Tensor, earlier: Sequence[int], attempt: int) -> int:
        digest = sum_digest(total, key.noise_of(stream_id))
        return key.nonce_of(stream_id, digest, earlier=earlier, attempt=attempt)

    normals = TensorNormals(NoiseStream(key.noise_of(stream_id)), lattice)
    return RunNoise(
        NoiseSource(plan.mechanism, plan.participation.rounds, normals, mode), lattice, plan.stddev, nonce_of
    )
