"""C⁻¹Z round by round, with as few vectors in memory as the mechanism needs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fedcgd.mechanisms.mechanism import Mechanism


@dataclass(frozen=True)
class State:
    """What is kept between rounds: the next round, and some vectors."""

    round: int = 0
    buffers: tuple[Any, ...] = ()


def correlate(mechanism: Mechanism, rounds: int, z: Any, state: State) -> tuple[Any, State]:
    """(C⁻¹Z)_t for t = `state.round`, and the state for the next round; start with `State()`.

    `z` is Z_t: a NumPy array or a torch tensor, on any device, of any shape. Nothing is changed in place. Raises ValueError after
    the last round.
    """
    t = state.round
    if not t < rounds:
        raise ValueError(f"the mechanism is made for {rounds} rounds, and all of them have had their noise")
    y, buffers = mechanism.next(t, rounds, z, state.buffers)
    return y, State(t + 1, buffers)


def state_before(mechanism: Mechanism, rounds: int, round: int, z_of: Callable[[int], Any]) -> State:
    """The state in which round `round` starts, from Z made again by `z_of`: of as many rounds before as a replay needs."""
    state = State(max(0, round + 1 - mechanism.replayed(rounds)))
    while state.round < round:
        _, state = correlate(mechanism, rounds, z_of(state.round), state)
    return state


def noise_mode(mechanism: Mechanism, rounds: int) -> Literal["replay", "buffer"]:
    """`buffer` if the mechanism keeps fewer vectors than the rounds that a replay goes back, else `replay`."""
    return "buffer" if mechanism.kept(rounds) < mechanism.replayed(rounds) - 1 else "replay"
