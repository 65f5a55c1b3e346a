"""C⁻¹Z round by round, with as few vectors in memory as the mechanism needs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fedcgd.mechanisms.mechanism import Buffered, Mechanism
from fedcgd.mechanisms.normalized import Normalized


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
    y, buffers = _next(mechanism, t, rounds, z, state.buffers)
    return y, State(t + 1, buffers)


def state_before(mechanism: Mechanism, rounds: int, round: int, z_of: Callable[[int], Any]) -> State:
    """The state in which round `round` starts, from Z made again by `z_of`: of all rounds before, or of C⁻¹'s bands."""
    inner = mechanism.mechanism if isinstance(mechanism, Normalized) else mechanism
    state = State(0 if isinstance(inner, Buffered) else max(0, round - vectors_kept(mechanism, rounds)))
    while state.round < round:
        _, state = correlate(mechanism, rounds, z_of(state.round), state)
    return state


def vectors_kept(mechanism: Mechanism, rounds: int) -> int:
    """How many vectors `correlate` keeps between rounds, at most; a replay from the key keeps none."""
    inner = mechanism.mechanism if isinstance(mechanism, Normalized) else mechanism
    return inner.buffers(rounds) if isinstance(inner, Buffered) else len(inner.inverse_row(rounds - 1, rounds)) - 1


def vectors_replayed(mechanism: Mechanism, rounds: int) -> int:
    """How many vectors Z are made in the last round if nothing is kept."""
    inner = mechanism.mechanism if isinstance(mechanism, Normalized) else mechanism
    return rounds if isinstance(inner, Buffered) else len(inner.inverse_row(rounds - 1, rounds))


def noise_mode(mechanism: Mechanism, rounds: int) -> Literal["replay", "buffer"]:
    """`buffer` if the mechanism has buffers that are fewer than the rounds a replay would go back, else `replay`."""
    return "buffer" if vectors_kept(mechanism, rounds) < vectors_replayed(mechanism, rounds) - 1 else "replay"


def _next(mechanism: Mechanism, t: int, rounds: int, z: Any, buffers: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    if isinstance(mechanism, Normalized):
        y, kept = _next(mechanism.mechanism, t, rounds, z, buffers)
        return y * float(mechanism.column_norms(rounds)[t]), kept
    if isinstance(mechanism, Buffered):
        return mechanism.next(t, rounds, z, buffers)
    weights = mechanism.inverse_row(t, rounds)
    y = z * float(weights[0])
    for weight, earlier in zip(weights[1:], buffers, strict=False):
        y = y + earlier * float(weight)
    return y, (z, *buffers)[: len(mechanism.inverse_row(rounds - 1, rounds)) - 1]
