"""Numbers as they come in, and in words: a user's value becomes Python's own `float` or `int` once, at the border.

NumPy scalars keep their precision through arithmetic: `float16(0.7)` times a float is a float16 again, with three digits. A bound
that was computed with such digits is none.
"""

from numbers import Real
from operator import index


def as_float(name: str, value: object) -> float:
    """`value` as Python's own float, in double precision.

    An int of Python stays one: it is no less precise, and the hash of a plan on record is that of `1`, not of `1.0`.

    Args:
        name: what the value is called, for the message.
        value: any real number, such as an int, a Fraction or a NumPy scalar.

    Raises:
        TypeError: for a text, None, a truth value and whatever else is no number.
        ValueError: for a number that no double holds.
    """
    try:
        if isinstance(value, Real):
            float(value)
    except OverflowError:
        raise ValueError(f"{name} must be at most 1.8e308, what a double holds, got a larger number") from None
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)


def as_positive(name: str, value: object) -> float:
    """`value` as `as_float` has it. Raises ValueError unless it is positive and finite; TypeError for what is no number."""
    number = as_float(name, value)
    if not 0 < number < float("inf"):
        raise ValueError(f"{name} must be positive and finite, got {number}")
    return number


def as_clip_norm(value: object) -> float:
    """ζ as `as_positive` has it, with what is usual if it is out of range."""
    try:
        return as_positive("clip_norm", value)
    except ValueError as error:
        raise ValueError(f"{error}; 1 is usual, or about the median norm of updates of public data") from None


def as_whole(name: str, value: object) -> int:
    """`value` as an int.

    Args:
        name: what the value is called, for the message.
        value: an int, or a NumPy integer.

    Raises:
        ValueError: for a number with a fraction or a decimal point, a truth value, a text and None.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None


def plural(number: int, one: str, many: str) -> str:
    """`number` with the words that belong to it: "1 user has", "2 users have"."""
    return f"{number} {one if number == 1 else many}"


def duration(seconds: float) -> str:
    """A time for people: "12 s", "40 min", "2.5 h"."""
    if seconds < 120:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
