"""The noise of a run, round after round: replayed from the key, or kept in the mechanism's own buffers."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from fedcgd.mechanisms import Mechanism
from fedcgd.mechanisms.streaming import State, correlate, noise_mode, state_before
from fedcgd.noise import NoiseStream, Term
from fedcgd.noise.normals import normals
from fedcgd.noise.quantisation import Integers, Lattice, add_noise, add_values

NoiseMode = Literal["replay", "buffer", "cpu-buffer"]


class Normals(Protocol):
    """Where Z comes from, and how noise is added to a round's sum (`total`: one flat vector, of a kind that is its own)."""

    def add(self, total: Any, terms: Sequence[Term], stddev: float) -> None:
        """total += stddev·Σ weight·Z_(round, nonce) over `terms`, the newest first, in place."""
        ...

    def add_row(self, total: Any, row: Any, newest: Term, stddev: float) -> None:
        """total += stddev·`row` in place; the row was combined from what `vector` gave, `newest` among it."""
        ...

    def vector(self, total: Any, round: int, nonce: int) -> Any:
        """Z_(round, nonce), float32, of the length of `total` and on its device."""
        ...


class LatticeNormals:
    """Z of `stream`; sums are int64 arrays in steps of `grid` (see `fedcgd.noise.quantisation`)."""

    def __init__(self, stream: NoiseStream, grid: Lattice) -> None:
        self.grid = grid
        self._stream = stream

    def add(self, total: Integers, terms: Sequence[Term], stddev: float) -> None:
        add_noise(total, self._stream, terms, stddev, self.grid)

    def add_row(self, total: Integers, row: NDArray[np.float32], newest: Term, stddev: float) -> None:
        add_values(total, row, self._stream, newest, stddev, self.grid)

    def vector(self, total: Integers, round: int, nonce: int) -> NDArray[np.float32]:
        return normals(self._stream, round, nonce, total.size)


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
