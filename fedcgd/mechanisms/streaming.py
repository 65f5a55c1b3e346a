"""C⁻¹Z round by round, with as few vectors in memory as the mechanism needs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedcgd.mechanisms.mechanism import Mechanism, Vector


@dataclass(frozen=True)
class State:
    """What is kept between rounds. `State()` is where a run starts.

    Attributes:
        round: the next round, from 0.
        buffers: what the mechanism keeps, as `multiply_next` returned it.
    """

    round: int = 0
    buffers: tuple[Any, ...] = ()


def correlate(mechanism: Mechanism, rounds: int, z: Any, state: State) -> tuple[Any, State]:
    """(C⁻¹Z)_t for t = `state.round`, and the state for the next round. Nothing is changed in place.

    Args:
        mechanism: the matrix C.
        rounds: n, the releases of the run.
        z: Z_t, a NumPy array or a torch tensor, on any device, of any shape.
        state: what the round before returned; `State()` for the first.

    Raises:
        ValueError: after the last round.

    >>> from fedcgd.mechanisms import LambdaCGD
    >>> first, state = correlate(LambdaCGD(0.5), 2, np.array([1.0]), State())
    >>> second, _ = correlate(LambdaCGD(0.5), 2, np.array([4.0]), state)
    >>> first.tolist(), second.tolist()
    ([1.0], [3.5])
    """
    t = state.round
    if not t < rounds:
        raise ValueError(
            f"the mechanism is made for {rounds} rounds, and all of them have had their noise; more rounds are another run"
        )
    y, buffers = mechanism.multiply_next(t, rounds, z, state.buffers)
    return y, State(t + 1, buffers)


def state_before(mechanism: Mechanism, rounds: int, round: int, z_of: Callable[[int], Any]) -> State:
    """The state in which a round starts, from regenerated Z: of as many rounds before as a replay needs.

    Args:
        mechanism: the matrix C.
        rounds: n, the releases of the run.
        round: the round, from 0.
        z_of: makes Z of a round.
    """
    state = State(max(0, round + 1 - mechanism.inverse_bandwidth(rounds)))
    while state.round < round:
        _, state = correlate(mechanism, rounds, z_of(state.round), state)
    return state


def noise_mode(mechanism: Mechanism, rounds: int) -> Literal["replay", "buffer"]:
    """`buffer` if the mechanism keeps fewer vectors than the rounds that a replay goes back, else `replay`.

    Args:
        mechanism: the matrix C.
        rounds: n, the releases of the run.
    """
    return "buffer" if mechanism.num_buffers(rounds) < mechanism.inverse_bandwidth(rounds) - 1 else "replay"


def inverse_rows(mechanism: Mechanism, rounds: int) -> Iterator[tuple[int, Vector]]:
    """Row t of C⁻¹ for t = 0, 1, …, as (first, entries): C⁻¹[t, first : t + 1], all before being zero; O(n·p) memory at most.

    In buffer mode the row is what `correlate` makes of unit vectors, with the p vectors that the mechanism keeps.

    Args:
        mechanism: the matrix C.
        rounds: n, the releases of the run.
    """
    buffered, state = noise_mode(mechanism, rounds) == "buffer", State()
    for t in range(rounds):
        if buffered:
            # Row t of C⁻¹ is the noise of round t if Z_t is the unit vector t.
            row, state = correlate(mechanism, rounds, np.eye(1, rounds, t)[0], state)
            yield 0, row[: t + 1]
        else:
            weights = mechanism.inverse_row(t, rounds)
            yield t + 1 - len(weights), weights[::-1]
