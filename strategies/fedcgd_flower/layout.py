"""A model's named arrays as one flat float32 vector of what is trained, and back."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

_STYPE = "numpy.ndarray"  # Flower's name for bytes that numpy.save wrote


def view(array: Array) -> NDArray[Any]:
    """`array.numpy()`, read-only, without a copy of its bytes if Flower wrote them. Raises whatever NumPy does on other bytes."""
    file = BytesIO(array.data)  # shares the bytes
    if array.stype == _STYPE and np.lib.format.read_magic(file) == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        if not fortran and not dtype.hasobject:
            return np.frombuffer(array.data, dtype, math.prod(shape), file.tell()).reshape(shape)
    return array.numpy()


Flat = NDArray[np.float32]

_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class PassthroughArray:
    """An array that goes along unchanged: a counter, a frozen parameter. It stands at `position` among the model's arrays."""

    position: int
    name: str
    array: Array


@dataclass(frozen=True)
class Layout:
    """Names, shapes and dtypes of a model's trained arrays, in order: what turns a flat vector back into the model.

    `passthrough` are the model's other arrays, with their values. Two layouts are equal if they train the same.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    passthrough: tuple[PassthroughArray, ...] = field(default=(), compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of coordinates of the flat vector."""
        return sum(math.prod(shape) for shape in self.shapes)

    def __str__(self) -> str:
        return ", ".join(f"{name} {list(shape)}" for name, shape in zip(self.names, self.shapes, strict=True))

    def to_json(self) -> str:
        """What is trained, as text, for a message."""
        return json.dumps([self.names, self.shapes, self.dtypes])

    @staticmethod
    def from_json(text: str, passthrough: tuple[PassthroughArray, ...] = ()) -> "Layout":
        """The layout that `to_json` wrote."""
        names, shapes, dtypes = json.loads(text)
        return Layout(tuple(names), tuple(tuple(shape) for shape in shapes), tuple(dtypes), passthrough)


def layout_of(arrays: ArrayRecord, *, trainable: Collection[str] | None = None) -> Layout:
    """The layout of `arrays`, for example of a state_dict: floating-point arrays are trained, the others passed through.

    `trainable` names the arrays that are trained, where not all are (frozen layers, LoRA). Raises ValueError if nothing is
    trained, if a name is unknown or its array holds no floating-point numbers, and for a running statistic of BatchNorm.
    """
    if not arrays:
        raise ValueError("the model has no arrays; pass initial_arrays=ArrayRecord(model.state_dict())")
    if unknown := sorted(set(trainable or ()) - set(arrays)):
        raise ValueError(f"trainable names {unknown}, and the model's arrays are {list(arrays)}")
    trained: list[str] = []
    passthrough: list[PassthroughArray] = []
    for position, (name, array) in enumerate(arrays.items()):
        floating = np.issubdtype(np.dtype(array.dtype), np.floating)
        wanted = floating if trainable is None else name in trainable
        if wanted and name.rpartition(".")[2] in _STATISTICS:
            raise ValueError(
                f"{name!r} is a running statistic of BatchNorm, which follows the users' data. Use GroupNorm in the model (as "
                "opacus.validators.ModuleValidator.fix does); or leave it out of trainable=, so that the values of "
                "initial_arrays stay, as of a pretrained model"
            )
        if wanted and not floating:
            raise ValueError(f"array {name!r} has dtype {array.dtype}; only floating-point arrays can be trained")
        if wanted:
            trained.append(name)
        else:
            passthrough.append(PassthroughArray(position, name, array))
    if not trained:
        raise ValueError(f"none of the arrays {list(arrays)} is trained: they hold no floating-point numbers")
    return Layout(
        tuple(trained),
        tuple(tuple(arrays[name].shape) for name in trained),
        tuple(arrays[name].dtype for name in trained),
        tuple(passthrough),
    )


def flatten(arrays: Mapping[str, Array], layout: Layout) -> Flat:
    """The trained entries of `arrays` in the order of `layout`, shape (layout.size,), float32. Other arrays are left out.

    Raises ValueError if an array is missing, has another shape, or does not hold real numbers.
    """
    return np.concatenate([np.empty(0, np.float32), *flat_arrays(arrays, layout)])


def flat_arrays(arrays: Mapping[str, Array], layout: Layout) -> list[Flat]:
    """`flatten`, one vector an array; a copy is made only of what is not float32 in memory as it is."""
    if missing := [name for name in layout.names if name not in arrays]:
        raise ValueError(f"expected arrays {list(layout.names)}, and {missing} are missing from {list(arrays)}")
    found = []
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        value = view(arrays[name])
        if value.shape != shape:
            raise ValueError(f"array {name!r} must have shape {shape}, got {value.shape}")
        if value.dtype.kind not in "fiub":
            raise ValueError(f"array {name!r} must hold real numbers, got {value.dtype}")
        with np.errstate(over="ignore"):  # beyond float32 is ∞, and such an update is dropped
            found.append(value.ravel().astype(np.float32, copy=False))
    return found


def unflatten(flat: Flat, layout: Layout, *, passthrough: bool = True) -> ArrayRecord:
    """The named arrays of a flat vector of shape (layout.size,), each with its own shape and dtype.

    With `passthrough`, the whole model, in its own order.
    """
    if flat.shape != (layout.size,):
        raise ValueError(f"a flat model of this layout has shape ({layout.size},), got {flat.shape}")
    arrays: list[tuple[str, Array]] = []
    start = 0
    for name, shape, dtype in zip(layout.names, layout.shapes, layout.dtypes, strict=True):
        stop = start + math.prod(shape)
        arrays.append((name, Array(flat[start:stop].reshape(shape).astype(dtype, copy=False))))
        start = stop
    for part in layout.passthrough if passthrough else ():
        arrays.insert(part.position, (part.name, copy(part.array)))
    return ArrayRecord(dict(arrays))


def cast_as_trained(model: Flat, trained: Sequence[Flat], layout: Layout) -> Flat:
    """`model` as a node saw it that replied `trained`: rounded as the node rounded it, so that rounding is no update.

    Numbers that all fit 16 bits were trained in 16 bits, whatever type they travel in (no message carries bfloat16).
    """
    if set(layout.dtypes) - {"float32", "float64"}:
        model = flatten(unflatten(model, layout, passthrough=False), layout)
    for half in (_bfloat16, _float16):
        if all(np.array_equal(half(part), part) for few in (1024, None) for part in (p[:few] for p in trained)):
            return half(model)
    return model


def _float16(values: Flat) -> Flat:
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)


def _bfloat16(values: Flat) -> Flat:
    """To the nearest, ties to even: the upper half of the bits."""
    bits = np.array(values, np.float32).view(np.uint32)
    rounded: Flat = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)
    return rounded
