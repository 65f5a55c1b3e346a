"""The noise of a run, round after round: replayed from the key, or kept in the mechanism's own buffers."""

from collections.abc import Sequence

import numpy as np

from fedcgd.mechanisms.streaming import NoiseMode, State, correlate, noise_mode, state_before
from fedcgd.noise import NoiseStream
from fedcgd.noise.quantisation import Integers, add_noise, add_smoothing, add_values
from fedcgd.plan import Plan


class RunNoise:
    """Adds ζσ·(C⁻¹Z)_t of `plan` to the sums of its rounds, with Z from `stream`, on the grid of `fedcgd.noise.quantisation`.

    `mode` "replay" keeps nothing and makes as many vectors again as C⁻¹ has bands; "buffer" makes one and keeps the mechanism's
    buffers, float32. By default whichever the mechanism does with less. Both give the same numbers up to rounding.
    """

    def __init__(self, plan: Plan, stream: NoiseStream, *, mode: NoiseMode | None = None) -> None:
        self.mode = noise_mode(plan.mechanism, plan.participation.rounds) if mode is None else mode
        self._plan = plan
        self._stream = stream
        # (attempts of the rounds before, buffers after them), for the rounds released and with the one that was last noised.
        start: tuple[tuple[int, ...], State] = ((), State())
        self._released = start
        self._noised = start

    @property
    def largest_stddev(self) -> float:
        """ζσ·Σ|w| over the last row w of C⁻¹: what the standard deviation of a coordinate of the noise stays below.

        Rows of the inverses of sensible mechanisms are bounded; an inverse that grows is largest in its last row.
        """
        rounds = self._plan.participation.rounds
        return self._plan.stddev * max(1.0, float(np.abs(self._plan.mechanism.inverse_row(rounds - 1, rounds)).sum()))

    def add(self, total: Integers, attempts: Sequence[int], step: float) -> None:
        """total += ζσ·(C⁻¹Z)_t in place, for round t = len(attempts) − 1; total is in multiples of `step`.

        `attempts[s]` is the attempt under which round s was released, and the last one is about to be. May be repeated with
        another last attempt when a release does not happen. Raises ValueError for a round after the plan's last.
        """
        round = len(attempts) - 1
        if self.mode == "replay":
            add_noise(total, self._stream, self._plan.noise_terms(round, attempts), self._plan.stddev, step)
            return
        before = tuple(attempts[:-1])
        if before == self._noised[0]:
            self._released = self._noised
        elif before != self._released[0]:
            # Another process was at work, before a crash.
            self._released = (before, self._rebuilt(before, total.size))
        z = self._stream.normal(round, attempts[-1], 0, total.size)
        noise, following = correlate(self._plan.mechanism, self._plan.participation.rounds, z, self._released[1])
        self._noised = ((*before, attempts[-1]), following)
        add_values(total, (self._plan.stddev * noise).reshape(total.shape), step)
        add_smoothing(total, self._stream, round, attempts[-1], self._plan.stddev, step)

    def _rebuilt(self, attempts: tuple[int, ...], size: int) -> State:
        plan = self._plan
        return state_before(
            plan.mechanism,
            plan.participation.rounds,
            len(attempts),
            lambda round: self._stream.normal(round, attempts[round], 0, size),
        )
