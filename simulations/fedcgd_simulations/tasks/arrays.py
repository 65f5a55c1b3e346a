"""Examples of your own: arrays in `.npy` files, or a table in `.csv`, in the folder that data-dir names."""

import csv
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedcgd_simulations.models import choose
from fedcgd_simulations.models.softmax import UnitNorm, softmax_regression
from fedcgd_simulations.task import DATA_VARIABLE, Data, Examples, Task, classification, data_folders, split

_FILES = (
    "inputs.npy (examples, …) and labels.npy (whole numbers from 0), or data.csv with a header and a column `label`; if there "
    "are any, users in users.npy or a column `user`, and test examples in test-inputs.npy and test-labels.npy, or test.csv"
)


def task(model: str | None, data_dir: Path | None) -> Task:
    """Classification of the examples in `data_dir`: softmax regression, or a network with a hidden layer (`mlp`).

    Without test examples a fifth of the others is held out; a tenth of the rest is for validation. The number of classes, one
    more than the largest label, is taken for public, as the number of examples is.
    """
    loaded = cache(lambda: load(data_dir))
    factories = {"softmax": softmax_regression, "mlp": _network}
    factory = choose("arrays", model, {name: partial(_sized, made, loaded) for name, made in factories.items()})
    return classification("arrays", loaded, factory)


def _sized(made: Callable[[int, int], nn.Module], loaded: Callable[[], Data]) -> nn.Module:
    """`made` for as many features and classes as the data have."""
    data = loaded()
    return made(data.train.inputs[0].numel(), 1 + max(int(part.targets.max()) for part in (data.train, data.test)))


def _network(features: int, classes: int) -> nn.Module:
    hidden = 64
    return nn.Sequential(UnitNorm(), nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, classes))


def load(data_dir: Path | None) -> Data:
    """The data in `data_dir`, or in the folder that $FEDCGD_DATA names.

    Raises:
        ValueError: if there are none; for labels that are no whole numbers from 0, inputs that are not finite, and arrays of
            different lengths.
    """
    folder = next(
        (each for each in data_folders(data_dir) if (each / "inputs.npy").exists() or (each / "data.csv").exists()),
        None,
    )
    if folder is None:
        raise ValueError(f"no examples were found: name by data-dir or ${DATA_VARIABLE} a folder with {_FILES}")
    known, test = _read(folder, "", "data"), _read(folder, "test-", "test")
    if known is None:
        raise ValueError(f"{folder} has no labels.npy next to inputs.npy; it must hold {_FILES}")
    if test is None:
        test, known = split(known, max(1, len(known) // 5), seed=1)
    validation, train = split(known, max(1, len(known) // 10), seed=0)
    return Data(train, validation, test)


def _read(folder: Path, prefix: str, table: str) -> Examples | None:
    """The examples of a kind; None if there are none."""
    if (folder / f"{prefix}inputs.npy").exists() and (folder / f"{prefix}labels.npy").exists():
        inputs, labels = (np.load(folder / f"{prefix}{name}.npy", mmap_mode="c") for name in ("inputs", "labels"))
        users = folder / f"{prefix}users.npy"
        return _examples(inputs, labels, np.load(users) if users.exists() else None, folder / f"{prefix}inputs.npy")
    path = folder / f"{table}.csv"
    if not path.exists():
        return None
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or "label" not in rows[0]:
        raise ValueError(f"{path} must have a header with a column `label`, and rows")
    columns = [name for name in rows[0] if name not in ("label", "user")]
    try:
        inputs = np.array([[float(row[name]) for name in columns] for row in rows], np.float32)
        labels = np.array([int(row["label"]) for row in rows])
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: {error}; labels must be whole numbers and all other columns but `user` numbers"
        ) from error
    return _examples(inputs, labels, np.array([row["user"] for row in rows]) if "user" in rows[0] else None, path)


def _examples(
    inputs: NDArray[np.generic], labels: NDArray[np.generic], users: NDArray[np.generic] | None, path: Path
) -> Examples:
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not len(labels) or labels.min() < 0:
        raise ValueError(
            f"{path}: labels must be whole numbers from 0, one for each example, got {labels.dtype} {labels.shape}"
        )
    if len(inputs) != len(labels) or (users is not None and len(users) != len(labels)):
        raise ValueError(f"{path}: there are {len(inputs)} inputs and {len(labels)} labels; all arrays must be as long")
    made = torch.from_numpy(np.asarray(inputs, np.float32))
    if not bool(torch.isfinite(made).all()):
        raise ValueError(f"{path}: inputs must be finite numbers; fill in or leave out rows with missing values")
    return Examples(made, torch.from_numpy(labels.astype(np.int64)), None if users is None else users.astype(str))
