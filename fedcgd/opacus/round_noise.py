"""The noise of central training: from a plan and a key to what is added to a round's sum."""

from collections.abc import Sequence

from torch import Tensor

from fedcgd.noise.keys import NoiseKey
from fedcgd.opacus.clipped_sum import GRID_LOSS
from fedcgd.plan import Plan
from fedcgd.release import NoiseMode, RunNoise, lattice_of
from fedcgd.release.tensors import tensor_noise


class RoundNoise:
    """The noise of a plan's rounds for `size` parameters, on the lattice, wherever the sums are."""

    def __init__(self, plan: Plan, key: NoiseKey, size: int, mode: NoiseMode | None) -> None:
        self.lattice = lattice_of(plan, size, relative_loss=GRID_LOSS)
        self._plan, self._key, self._mode = plan, key, mode
        self._run, self._noise = "", self._noise_of("")

    def add(self, total: Tensor, run: str, nonces: Sequence[int]) -> int:
        """total = (total on the lattice + ζσ·(C⁻¹Z)_t), in place, for t = len(`nonces`), those of earlier rounds.

        `total` is float64, shape (size,). Returns the round's nonce. The noise is the same on every device.
        """
        if run != self._run:
            self._run, self._noise = run, self._noise_of(run)
        total.div_(self.lattice.step).round_()
        nonce = self._noise.add(total, earlier=nonces, attempt=0)
        total.mul_(self.lattice.step)
        return nonce

    def _noise_of(self, run: str) -> RunNoise:
        return tensor_noise(self._plan, self._key, run, self.lattice, self._mode)
