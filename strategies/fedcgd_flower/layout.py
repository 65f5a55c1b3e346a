"""A model's named arrays as one flat float32 vector, and back."""

import json
import math
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

Flat = NDArray[np.float32]


@dataclass(frozen=True)
class Layout:
    """Names, shapes and dtypes of a model's arrays, in order: what turns a flat vector back into the model."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of coordinates of the flat vector."""
        return sum(math.prod(shape) for shape in self.shapes)

    def to_json(self) -> str:
        """This layout as text, for a message."""
        return json.dumps([self.names, self.shapes, self.dtypes])

    @staticmethod
    def from_json(text: str) -> "Layout":
        """The layout that `to_json` wrote."""
        names, shapes, dtypes = json.loads(text)
        return Layout(tuple(names), tuple(tuple(shape) for shape in shapes), tuple(dtypes))


def layout_of(arrays: ArrayRecord) -> Layout:
    """The layout of `arrays`. Raises ValueError if there are none, or if one does not hold floating-point numbers."""
    if not arrays:
        raise ValueError("the model has no arrays; pass initial_arrays=ArrayRecord(model.state_dict())")
    for name, array in arrays.items():
        if not np.issubdtype(np.dtype(array.dtype), np.floating):
            raise ValueError(
                f"array {name!r} has dtype {array.dtype}; only floating-point arrays can carry noise. "
                "Leave counters out of the arrays, or use GroupNorm in place of BatchNorm"
            )
    return Layout(
        tuple(arrays.keys()),
        tuple(tuple(array.shape) for array in arrays.values()),
        tuple(array.dtype for array in arrays.values()),
    )


def flatten(arrays: ArrayRecord, layout: Layout) -> Flat:
    """The entries of `arrays` in the order of `layout`, shape (layout.size,), float32.

    Raises ValueError if names or shapes differ from the layout.
    """
    if tuple(arrays.keys()) != layout.names:
        raise ValueError(f"expected arrays {list(layout.names)}, got {list(arrays.keys())}")
    parts = []
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        value = arrays[name].numpy()
        if value.shape != shape:
            raise ValueError(f"array {name!r} must have shape {shape}, got {value.shape}")
        parts.append(np.asarray(value, dtype=np.float32).ravel())
    return np.concatenate(parts)


def unflatten(flat: Flat, layout: Layout) -> ArrayRecord:
    """The named arrays of a flat vector of shape (layout.size,), each with its own shape and dtype."""
    if flat.shape != (layout.size,):
        raise ValueError(f"a flat model of this layout has shape ({layout.size},), got {flat.shape}")
    arrays: dict[str, Array] = {}
    start = 0
    for name, shape, dtype in zip(layout.names, layout.shapes, layout.dtypes, strict=True):
        stop = start + math.prod(shape)
        arrays[name] = Array(flat[start:stop].reshape(shape).astype(dtype))
        start = stop
    return ArrayRecord(arrays)
