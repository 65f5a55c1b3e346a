"""The noise of one run: a sum gets a nonce of its own, and then noise of that nonce, replayed from the key or kept in buffers."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from fedcgd.mechanisms import Mechanism
from fedcgd.mechanisms.streaming import State, correlate, noise_mode, state_before
from fedcgd.noise import NoiseStream, Term
from fedcgd.noise.keys import NoiseKey
from fedcgd.noise.quantisation import RELATIVE_LOSS, Integers, Lattice, add_noise, add_values
from fedcgd.plan import Plan


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


NoiseMode = Literal["replay", "buffer", "cpu-buffer"]


class Normals(Protocol):
    """Where Z comes from, and how noise is added to a round's sum (`total`: one flat int64 vector, in steps of `grid`)."""

    grid: Lattice

    def add(self, total: Any, terms: Sequence[Term], stddev: float) -> None:
        """total += stddev·Σ weight·Z_(round, nonce) over `terms`, the newest first, in place."""
        ...

    def add_row(self, total: Any, row: Any, newest: Term, stddev: float) -> None:
        """total += stddev·`row` in place; the row was combined from what `vector` gave, `newest` among it."""
        ...

    def vector(self, total: Any, round: int, nonce: int) -> Any:
        """Z_(round, nonce), float32, of the length of `total` and on its device."""
        ...

    def digest(self, total: Any, key: bytes) -> NDArray[Any]:
        """What tells `total` from other sums, under the secret `key`."""
        ...


class LatticeNormals:
    """Z of `stream`; sums are arrays (see `fedcgd.noise.quantisation`), whose first number is of coordinate `start`."""

    def __init__(self, stream: NoiseStream, grid: Lattice, start: int = 0) -> None:
        self.grid = grid
        self._stream, self._start = stream, start

    def add(self, total: Integers, terms: Sequence[Term], stddev: float) -> None:
        add_noise(total, self._stream, terms, stddev, self.grid, start=self._start)

    def add_row(self, total: Integers, row: NDArray[np.float32], newest: Term, stddev: float) -> None:
        add_values(total, row, self._stream, newest, stddev, self.grid, start=self._start)

    def vector(self, total: Integers, round: int, nonce: int) -> NDArray[np.float32]:
        return self._stream.normal(round, nonce, self._start, self._start + total.size)

    def digest(self, total: Integers, key: bytes) -> Integers:
        return total


class NoiseSource:
    """Adds the rows of C⁻¹Z to a run's sums. All modes give the same numbers up to rounding.

    Args:
        mechanism: the matrix C.
        rounds: n, the releases of the run.
        normals: where Z comes from; it also decides the kind of sum.
        mode: "replay" keeps nothing and makes as many vectors again as C⁻¹ has bands; "buffer" makes one and keeps the
            mechanism's buffers, float32, where the sums are; "cpu-buffer" keeps and combines them in main memory. By default
            whichever of the first two the mechanism does with less.

    Raises:
        ValueError: for another mode.
    """

    def __init__(self, mechanism: Mechanism, rounds: int, normals: Normals, mode: NoiseMode | None = None) -> None:
        if mode is None:
            mode = noise_mode(mechanism, rounds)
        if mode not in get_args(NoiseMode):
            raise ValueError(f"the noise's mode must be replay, buffer or cpu-buffer, got {mode!r}")
        self.mode: NoiseMode = mode
        self._mechanism = mechanism
        self._rounds = rounds
        self._normals = normals
        self._nonces: tuple[int, ...] = ()  # of the rounds that are in the buffers
        self._state = State()

    def add(self, total: Any, nonces: Sequence[int], stddev: float) -> None:
        """total += stddev·(C⁻¹Z)_t in place, for round t = len(nonces) − 1.

        May be repeated with another last nonce when a release does not happen.

        Args:
            total: the round's sum.
            nonces: under which each round was released; the last one is about to be: `RunNoise` makes it from this very sum.
            stddev: ζσ, in units of the update.

        Raises:
            ValueError: for a round after the last.
        """
        round = len(nonces) - 1
        if not 0 <= round < self._rounds:
            raise ValueError(f"round must be in 0 … {self._rounds - 1}, got {round}; the plan has no noise for it")
        if self.mode == "replay":
            weights = self._mechanism.inverse_row(round, self._rounds)
            terms = [(round - lag, nonces[round - lag], float(w)) for lag, w in enumerate(weights) if w]
            self._normals.add(total, terms, stddev)
            return

        def z(round: int) -> Any:
            made = self._normals.vector(total, round, nonces[round])
            on_a_device = hasattr(made, "cpu")  # a tensor, wherever it is
            return made.cpu() if self.mode == "cpu-buffer" and on_a_device else made

        state = self._state
        if self._nonces != tuple(nonces[:-1]):  # another process was at work, or the last release did not happen
            state = state_before(self._mechanism, self._rounds, round, z)
        row, following = correlate(self._mechanism, self._rounds, z(round), state)
        self._normals.add_row(total, row, (round, nonces[round], 1.0), stddev)
        self._nonces, self._state = tuple(nonces), following


class RunNoise:
    """The noise of one run, for sums in whole steps of `lattice`: the only place where a nonce is made and noise of it is added.

    Args:
        plan: what runs.
        key: where the noise comes from.
        stream_id: what tells the run from others under this key, as its ledger has it.
        normals: make the noise for sums of their kind, from the noise part of `key`.
        mode: as in `NoiseSource`.
        share: of a total only that part gets noise; None is all.
    """

    def __init__(
        self,
        plan: Plan,
        key: NoiseKey,
        stream_id: str,
        normals: Normals,
        mode: NoiseMode | None = None,
        share: slice | None = None,
    ) -> None:
        self.lattice = normals.grid
        self._source = NoiseSource(plan.mechanism, plan.participation.rounds, normals, mode)
        self._stddev, self._key, self._stream_id, self._share = plan.stddev, key, stream_id, share
        self._normals, self._secret = normals, key.noise_of(stream_id)

    def digest(self, total: Any) -> NDArray[Any]:
        """What tells `total` from other sums, and nonces are bound to: itself, in main memory.

        Args:
            total: the sum of the round, as `add` takes it.
        """
        return self._normals.digest(total, self._secret)

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

        Two different sums never share their noise, whatever is copied (`fedcgd.noise.keys`).

        Args:
            total: the round's sum, in whole steps of the lattice.
            earlier: the nonces under which the rounds before were released, as they are when this is called.
            attempt: the number of earlier tries of the round.
            record: called with the nonce before there is noise of it; what it raises leaves `total` as it is.
            join: where several processes have the same `total`: called with this one's nonce, before `record`, it gives the
                nonce of all.

        Returns:
            The nonce.

        Raises:
            ValueError: for a round after the last.
        """
        earlier = tuple(earlier)  # `record` may append to the very list that it was
        bound = self._normals.digest(total, self._secret)
        nonce = self._key.nonce_of(self._stream_id, bound, earlier=earlier, attempt=attempt)
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
    return RunNoise(plan, key, stream_id, LatticeNormals(NoiseStream(key.noise_of(stream_id)), lattice), mode)
