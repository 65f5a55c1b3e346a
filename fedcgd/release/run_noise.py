"""The noise of one run: a sum gets a nonce of its own, and then noise of that nonce."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcgd.noise import NoiseStream
from fedcgd.noise.keys import NoiseKey
from fedcgd.noise.quantisation import RELATIVE_LOSS, Lattice
from fedcgd.plan import Plan
from fedcgd.release.noise_source import LatticeNormals, NoiseMode, NoiseSource


def lattice_of(plan: Plan, size: int, *, relative_loss: float = RELATIVE_LOSS) -> Lattice:
    """The lattice for sums of `size` coordinates with the noise of `plan`.

    Args:
        plan: what runs.
        size: coordinates of the sum.
        relative_loss: rounding moves an update by at most this part of the clip norm.

    Raises:
        ValueError: if no lattice holds that noise.
    """
    rounds = plan.participation.rounds
    # Rows of the inverses of sensible mechanisms are bounded; an inverse that grows is largest in its last row.
    largest = max(1.0, float(np.abs(plan.mechanism.inverse_row(rounds - 1, rounds)).sum()))
    scale = relative_loss / RELATIVE_LOSS  # `fitting` loses that part of the norm that it is given
    return Lattice.fitting(clip_norm=plan.clip_norm * scale, size=size, stddev=plan.stddev * largest)


class RunNoise:
    """The noise of one run, for sums in whole steps of `lattice`: the only place where a nonce is made and noise of it is added.

    `array_noise` makes it for a server's sums, `fedcgd.release.tensors.tensor_noise` for sums that are tensors.

    Args:
        source: makes the noise of a nonce.
        lattice: that of the sums.
        stddev: ζσ, in units of the update.
        nonce_of: (total, earlier nonces, attempt) → a nonce that is bound to `total`.
        share: of a total only that part gets noise; None is all.
    """

    def __init__(
        self,
        source: NoiseSource,
        lattice: Lattice,
        stddev: float,
        nonce_of: Callable[[Any, Sequence[int], int], int],
        share: slice | None = None,
    ) -> None:
        self.lattice = lattice
        self._source, self._stddev, self._nonce_of, self._share = source, stddev, nonce_of, share

    def add(
        self,
        total: Any,
        *,
        earlier: Sequence[int],
        attempt: int,
        record: Callable[[int], None] | None = None,
        join: Callable[[int], int] | None = None,
    ) -> int:
        """total += ζσ·(C⁻¹Z)_t in place, for round t = len(earlier), under a nonce that is bound to `total`.

        Two different sums never share their noise, whatever is copied (`fedcgd.noise.nonce`).

        Args:
            total: the round's sum, in whole steps of the lattice.
            earlier: the nonces under which the rounds before were released, as they are when this is called.
            attempt: the number of earlier tries of the round.
            record: called with the nonce before there is noise of it; what it raises leaves `total` as it is.
            join: where `total` is a part of the round's sum: called with the part's nonce, before `record`, it gives one that is
                bound to all parts.

        Returns:
            The nonce.

        Raises:
            ValueError: for a round after the last.
        """
        earlier = tuple(earlier)  # `record` may append to the very list that it was
        nonce = self._nonce_of(total, earlier, attempt)
        if join is not None:
            nonce = join(nonce)
        if record is not None:
            record(nonce)
        part = total if self._share is None else total[self._share]
        if len(part):
            self._source.add(part, [*earlier, nonce], self._stddev)
        return nonce


def array_noise(plan: Plan, key: NoiseKey, stream_id: str, lattice: Lattice, mode: NoiseMode | None = None) -> RunNoise:
    """The noise of a run for sums that are int64 arrays: what a server uses.

    Args:
        plan: what runs.
        key: where the noise comes from.
        stream_id: what tells the run from others under this key, as its ledger has it.
        lattice: that of the sums.
        mode: as in `NoiseSource`.
    """

    def nonce_of(total: NDArray[Any], earlier: Sequence[int], attempt: int) -> int:
        return key.nonce_of(stream_id, total, earlier=earlier, attempt=attempt)

    normals = LatticeNormals(NoiseStream(key.noise_of(stream_id)), lattice)
    return RunNoise(
        NoiseSource(plan.mechanism, plan.participation.rounds, normals, mode), lattice, plan.stddev, nonce_of
    )
