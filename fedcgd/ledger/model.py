"""The last released model of a run, out of its ledger."""

import math
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcgd.ledger import attempts, model_file
from fedcgd.ledger.store import reader
from fedcgd.support.files import atomic_write
from fedcgd.support.numbers import plural
from fedcgd.support.untrusted import MalformedError, conform, parse_json


def released_model(path: Path | str) -> dict[str, NDArray[Any]]:
    """The trained arrays of the last released model, by name; before and after the run is sealed.

    There is nothing else in it: counters, frozen layers and statistics that stay as they were are in the model that the run
    began with (`completed`). A running variance is at least 0, as in what was released. Arrays of a dtype that NumPy does not
    have, such as bfloat16, are float32.

    Args:
        path: the ledger.

    Raises:
        ValueError: before the first release, and if the ledger does not say what the model's arrays are.
    """
    model, layout = _last(Path(path))
    if not layout:
        raise ValueError(f"{path} holds a model without the names and shapes of its arrays")
    described = parse_json(layout, [list], "the layout of the model on record")
    if len(described) != _PARTS or len({len(part) for part in described}) > 1 or len(model) % 4:
        raise MalformedError(f"{path} does not say what the arrays of its model are")
    names, shapes, dtypes = (
        conform(part, form, "the layout") for part, form in zip(described, ([str], [[int]], [str]), strict=True)
    )
    if any(size < 0 for shape in shapes for size in shape):
        raise MalformedError(f"{path} holds a model with arrays of a negative size")
    flat = np.frombuffer(model, np.float32)
    if len(flat) != sum(map(math.prod, shapes)):
        raise ValueError(f"{path} holds {len(flat)} parameters, and arrays of {sum(map(math.prod, shapes))}")
    parts = np.split(flat, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
    return {
        name: (np.maximum(part, 0) if name.rpartition(".")[2] == "running_var" else part)
        .reshape(shape)
        .astype(_dtype(dtype))
        for name, part, shape, dtype in zip(names, parts, shapes, dtypes, strict=True)
    }


_PARTS = 3  # of a layout: names, shapes and dtypes


def _last(path: Path) -> tuple[bytes, str]:
    """Model and layout. A run that goes on may release another model while this reads: then that one."""
    said = None
    while True:
        with reader(path) as connection:
            before, said = said, model_file.described(connection)
            models = attempts.count_models(connection)
        if said is None:
            raise ValueError(f"{path} has released no model yet")
        if said.round != models - 1:
            raise ValueError(
                f"{path} contradicts itself: its last model is number {said.round + 1}, and "
                f"{plural(models, 'model is', 'models are')} released; fedcgd ledger verify says what else"
            )
        try:
            return model_file.read(path, said)[0], said.layout
        except ValueError:
            if said == before:
                raise


def completed(trained: Mapping[str, NDArray[Any]], whole: Path) -> dict[str, NDArray[Any]]:
    """All arrays of a model: the trained ones, and beside them what was not trained.

    Args:
        trained: what `released_model` returned.
        whole: the file, .npz or .safetensors, of the model that the run began with: nothing in the ledger tells whether it is.

    Returns:
        Name → array, in the order of the file.

    Raises:
        ValueError: if the file lacks a trained array, or has it in another shape, and if it cannot be read.
    """
    arrays = _load(whole)
    for name, array in trained.items():
        if name not in arrays:
            raise ValueError(f"{whole} has no array {name!r}, which the run trained; it has {list(arrays)}")
        if arrays[name].shape != array.shape:
            raise ValueError(f"array {name!r} has shape {arrays[name].shape} in {whole}, and {array.shape} in the run")
    return arrays | dict(trained)


def save_model(path: Path | str, target: Path, *, carried: Path | None = None) -> int:
    """Write the last released model to a file.

    Args:
        path: the ledger.
        target: the file, .npz or .safetensors.
        carried: the file of the model that the run began with, whose other arrays are then written too (`completed`).

    Returns:
        How many arrays were written.

    Raises:
        ValueError: as `released_model` and `completed`, and for another kind of file.
    """
    arrays = released_model(path)
    if carried is not None:
        arrays = completed(arrays, carried)
    _check_suffix(target)
    with atomic_write(target) as part:
        if target.suffix == ".npz":
            np.savez(part, **arrays)  # type: ignore[arg-type]
        else:
            _safetensors().save_file({name: np.array(array, order="C") for name, array in arrays.items()}, part)
    return len(arrays)


def _check_suffix(path: Path) -> None:
    if path.suffix not in (".npz", ".safetensors"):
        raise ValueError(f"a model is a file .npz or .safetensors, got {path.name}")


def _load(path: Path) -> dict[str, NDArray[Any]]:
    _check_suffix(path)
    try:
        if path.suffix == ".safetensors":
            return dict(_safetensors().load_file(path))
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except Exception as error:  # each format has its own
        raise ValueError(f"{path} cannot be read as a model: {error}") from error


def _safetensors() -> Any:
    try:
        return import_module("safetensors.numpy")
    except ModuleNotFoundError as error:
        raise ValueError("the package safetensors is not installed; pip install safetensors, or take .npz") from error


def _dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(np.float32)
