"""The noise of central training: from a plan and a key to what is added to a round's sum, in one process or in several."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fedcgd.noise.keys import NoiseKey
from fedcgd.opacus.clipped_sum import GRID_LOSS
from fedcgd.opacus.ranks import Ranks
from fedcgd.opacus.release_record import ReleaseRecord, run_of
from fedcgd.plan import Plan
from fedcgd.release import NoiseMode, lattice_of
from fedcgd.release.tensors import joint_nonce, tensor_noise


class RoundNoise:
    """The noise of a plan's rounds for `size` parameters, on the lattice, wherever the sums are. Without noise there is none."""

    def __init__(
        self,
        plan: Plan,
        key: NoiseKey,
        size: int,
        mode: NoiseMode | None,
        *,
        record: ReleaseRecord | None = None,
        ranks: Ranks | None = None,
        pieces: Sequence[slice] | None = None,
    ) -> None:
        """With a `record` each round is on it before there is noise; with `ranks` each process makes the noise of its share.

        Of a model whose parameters are spread over the ranks, sums are of the coordinates in `pieces`, and have been added up.
        """
        # Where nothing is hidden, nothing is rounded: steps as long as the clip norm asks for may be longer than a gradient.
        self.lattice = None if plan.noiseless else lattice_of(plan, size, relative_loss=GRID_LOSS)
        self._plan, self._key, self._size, self._mode = plan, key, size, mode
        self._record, self._ranks, self._pieces = record, ranks, pieces
        self._run: str | None = None
        self._begin("")

    def round_to_lattice(self, total: Tensor) -> None:
        """Make `total`, the sum of a part of a round, whole steps: such sums add up to the same bits in any order."""
        if self.lattice is not None:
            total.div_(self.lattice.step).round_().mul_(self.lattice.step)

    def add(self, total: Tensor, run: str, nonces: Sequence[int]) -> int:
        """total = (total on the lattice + ζσ·(C⁻¹Z)_t), in place, for t = len(`nonces`), those of earlier rounds.

        `total` is float64, shape (size,). Returns the round's nonce. The noise is the same on every device.
        """
        self._begin(run)
        round, kept = len(nonces), self._record
        attempt = 0 if kept is None else kept.attempt(round, self._named)
        record = None if kept is None else lambda nonce: kept.append(round, nonce, 1)
        nonce = self._add(total, nonces, attempt, record=record)
        if self.lattice is not None:
            total.mul_(self.lattice.step)
        return nonce

    def add_together(
        self, total: Tensor, run: str, nonces: Sequence[int], *, facts: Mapping[str, Any], examples: int, whole: int
    ) -> int:
        """As `add`, where `total` is what this process has summed: afterwards it is the sum of all ranks, with its noise.

        Args:
            total: as in `add`.
            run: as in `add`.
            nonces: as in `add`.
            facts: what else has to be the same on all ranks.
            examples: how many are in `total`.
            whole: how many the round has.

        Returns:
            The round's nonce.

        Raises:
            RuntimeError: on all ranks, before there is noise, if one has failed or they disagree.
        """
        ranks = self._ranks
        assert ranks is not None
        facts = {"which rounds are released": (run, *nonces), "the round's batch": whole, **facts}

        def join(nonce: int) -> int:
            parts, summed = ranks.agree(facts, nonce=nonce, examples=examples)
            if summed != whole:
                raise RuntimeError(f"the ranks have clipped {summed} examples, and {whole} were issued for the round")
            return ranks.from_first(lambda: self._put_on_record(parts, run, nonces))

        self._begin(run)
        nonce = self._add(total, nonces, 0, join=join)
        if self._pieces is None:
            ranks.add_up(total)
        if self.lattice is not None:
            total.mul_(self.lattice.step)
        return nonce

    def _add(
        self,
        total: Tensor,
        nonces: Sequence[int],
        attempt: int,
        *,
        record: Callable[[int], None] | None = None,
        join: Callable[[int], int] | None = None,
    ) -> int:
        """Make `total` whole steps with their noise, or leave it as it is in a run without noise; the round's nonce."""
        if self.lattice is not None:
            total.div_(self.lattice.step).round_()
            return self._noise.add(total, earlier=nonces, attempt=attempt, record=record, join=join)
        assert self._run is not None
        nonce = self._key.nonce_of(self._run, np.array([attempt]), earlier=nonces, attempt=attempt)
        if join is not None:
            nonce = join(nonce)
        if record is not None:
            record(nonce)
        return nonce

    def _put_on_record(self, parts: Sequence[int], run: str, nonces: Sequence[int]) -> int:
        """The nonce of the round whose parts have the nonces `parts`; durable on the record of all ranks, which rank 0 keeps."""
        assert self._record is not None
        assert self._ranks is not None
        attempt = self._record.attempt(len(nonces), self._named)
        nonce = joint_nonce(self._key, run, parts, earlier=nonces, attempt=attempt)
        self._record.append(len(nonces), nonce, self._ranks.count)
        return nonce

    def _begin(self, run: str) -> None:
        """Make the noise that of `run`, which a checkpoint may have changed."""
        if run != self._run:
            share = None if self._ranks is None or self._pieces is not None else self._ranks.share(self._size)
            if self.lattice is not None:
                self._noise = tensor_noise(self._plan, self._key, run, self.lattice, self._mode, share, self._pieces)
            if self._record is not None:  # which a mechanism that is not of the table cannot be named on
                self._named = run_of(self._plan.to_description(), run, self._key.fingerprint)
            self._run = run
