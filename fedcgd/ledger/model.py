"""The last released model of a run, out of its ledger."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcgd.ledger.store import read_artifact, reader

LAYOUT = "layout"


def released_model(path: Path | str) -> dict[str, NDArray[Any]]:
    """The trained arrays of the last released model, by name; before and after the run is sealed.

    Arrays of a dtype that NumPy does not have, such as bfloat16, are float32. Raises ValueError before the first release, and if
    the ledger does not say what the model's arrays are.
    """
    with reader(path) as connection:
        model, layout = (read_artifact(connection, name) for name in ("model", LAYOUT))
    if model is None:
        raise ValueError(f"{path} has released no model yet")
    if not layout:
        raise ValueError(f"{path} holds a model without the names and shapes of its arrays")
    names, shapes, dtypes = json.loads(layout)
    flat = np.frombuffer(model, np.float32)
    if len(flat) != sum(map(math.prod, shapes)):
        raise ValueError(f"{path} holds {len(flat)} parameters, and arrays of {sum(map(math.prod, shapes))}")
    parts = np.split(flat, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
    return {
        name: part.reshape(shape).astype(_dtype(dtype))
        for name, part, shape, dtype in zip(names, parts, shapes, dtypes, strict=True)
    }


def save_model(path: Path | str, target: Path) -> int:
    """Write the last released model to `target`, .npz or .safetensors, and return how many arrays it has. As `released_model`."""
    arrays = released_model(path)
    if target.suffix == ".npz":
        with target.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    elif target.suffix == ".safetensors":
        try:
            from safetensors.numpy import save_file  # type: ignore[import-not-found,unused-ignore]
        except ModuleNotFoundError as error:
            raise ValueError(
                "the package safetensors is not installed; pip install safetensors, or write .npz"
            ) from error
        save_file({name: np.array(array, order="C") for name, array in arrays.items()}, target)
    else:
        raise ValueError(f"the model is written as .npz or .safetensors, got {target.name}")
    return len(arrays)


def _dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(np.float32)
