"""The noise of central training: from a plan and a key to what is added to a round's sum."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fedcgd.keys import NoiseKey
from fedcgd.noise.quantisation import Grid
from fedcgd.noise.source import NoiseMode, NoiseSource, tensor_source
from fedcgd.noise.tensors import fingerprint
from fedcgd.opacus.clipped_sum import GRID_LOSS
from fedcgd.plan import Plan


class RoundNoise:
    """The noise of a plan's rounds for `size` parameters, on the grid, wherever the sums are."""

    def __init__(self, plan: Plan, key: NoiseKey, size: int, mode: NoiseMode | None) -> None:
        rounds = plan.participation.rounds
        largest = float(np.abs(plan.mechanism.inverse_row(rounds - 1, rounds)).sum())
        # `Grid.fitting` loses at most 2⁻¹⁰ of the norm that it is given.
        self.grid = Grid.fitting(
            clip_norm=plan.clip_norm * GRID_LOSS * 2**10, size=size, stddev=plan.stddev * max(1.0, largest)
        )
        self._plan, self._key, self._mode = plan, key, mode
        self._run = ""
        self._source = self._source_of("")

    def add(self, total: Tensor, run: str, nonces: Sequence[int]) -> int:
        """total = (total on the grid + ζσ·(C⁻¹Z)_t), in place, for t = len(`nonces`), those of earlier rounds; returns its nonce.

        `total` is float64, shape (size,). The nonce of a secret key is bound to it: two different sums never share their noise,
        whatever is copied. The noise is the same on every device.
        """
        if run != self._run:
            self._source, self._run = self._source_of(run), run
        total.div_(self.grid.step).round_()
        known_by = fingerprint(total, self._key.noise_of(run))
        nonce = self._key.nonce_of(run, known_by, earlier=nonces, attempt=0)
        self._source.add(total, [*nonces, nonce], self._plan.stddev)
        total.mul_(self.grid.step)
        return nonce

    def _source_of(self, run: str) -> NoiseSource:
        return tensor_source(self._plan, self._key, run, self.grid, self._mode)
