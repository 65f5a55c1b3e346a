"""CIFAR-10: colour 32 × 32 pictures of ten kinds of things, in the Python or the binary files of its authors."""

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcgd_simulations import scattering
from fedcgd_simulations.decoded import decoded
from fedcgd_simulations.models import Factory, choose
from fedcgd_simulations.models.cnn import cnn
from fedcgd_simulations.models.softmax import softmax_regression
from fedcgd_simulations.models.vit import vit
from fedcgd_simulations.models.wideresnet import wideresnet
from fedcgd_simulations.task import (
    DATA_VARIABLE,
    Data,
    Examples,
    Task,
    classification,
    data_folders,
    shifted_and_mirrored,
    split,
)

CACHE = Path.home() / ".cache" / "fedcgd"

Batch = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images (examples, 3, 32, 32) and labels."""


ANGLES = {"scattering": 8, "scattering-4": 4, "scattering-raw": 8, "scattering-4-raw": 4}
"""Of the wavelets whose features a linear model is trained on: 15,552 and 4800 of them; raw: not normalised in each picture."""


def task(model: str | None, data_dir: Path | None) -> Task:
    """45,000 training, 5000 validation and 10,000 test examples; the 0.3 M CNN unless another model is named."""
    factories: Mapping[str, Factory] = {
        "cnn": cnn,
        **{name: partial(softmax_regression, 192 * (1 + 2 * some + some**2), 10) for name, some in ANGLES.items()},
        "wideresnet-40": wideresnet,
        **{name: partial(vit, name) for name in ("vit-b-16", "vit-l-16", "vit-h-14")},
        **{f"{name}-lora": partial(vit, name, lora_rank=8) for name in ("vit-b-16", "vit-l-16", "vit-h-14")},
    }
    factory = choose("cifar10", model, factories)
    angles = ANGLES.get(model or "")
    raw = (model or "").endswith("-raw")
    made = classification("cifar10", lambda: load(data_dir, angles=angles, raw=raw), factory)
    return made if angles else replace(made, augment=shifted_and_mirrored)


def load(
    data_dir: Path | None, fetch: Callable[[Path], None] | None = None, *, angles: int | None = None, raw: bool = False
) -> Data:
    """The data from a local folder, or else fetched by `fetch` (torchvision) or Flower Datasets, whichever is installed.

    Args:
        data_dir: the folder; None: the usual places.
        fetch: writes the files into a folder.
        angles: of scattering features, which then stand for the pictures.
        raw: whether those are left as they are.

    Raises:
        ValueError: if there are no files and none can be fetched; it says how to get them.
    """
    folders = data_folders(data_dir, CACHE)
    files = next((files for folder in folders if (files := find_files(folder))), [])
    if not files:
        return _prepared(_fetch(folders[0], fetch or _torchvision), angles, raw)
    name = f"cifar10-scattering-{angles}{'-raw' * raw}" if angles else "cifar10"
    sources = [*files, Path(__file__), Path(scattering.__file__)]
    return decoded(name, sources, lambda: _prepared(read_files(files), angles, raw))


def _prepared(parts: tuple[Batch, Batch], angles: int | None, raw: bool) -> Data:
    known, test = (Examples(inputs(images, angles, raw), torch.from_numpy(labels)) for images, labels in parts)
    validation, train = split(known, len(known) // 10, seed=0)  # 5000 of 50,000 validate
    return Data(train, validation, test)


def inputs(images: NDArray[np.uint8], angles: int | None, raw: bool = False) -> torch.Tensor:
    """What a model takes of pictures (examples, 3, 32, 32): pixels, or scattering features."""
    pixels = _pixels(images)
    return pixels if angles is None else scattering.features(pixels, angles, normalise=not raw)


def find_files(folder: Path) -> list[Path]:
    """Five files of training pictures and one of test pictures, in `cifar-10-batches-py`, `cifar-10-batches-bin` or `folder`."""
    for base in (folder, folder / "cifar-10-batches-py", folder / "cifar-10-batches-bin"):
        for suffix in ("", ".bin"):
            files = [base / f"{name}{suffix}" for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")]
            if all(path.is_file() for path in files):
                return files
    return []


def read_files(files: Sequence[Path]) -> tuple[Batch, Batch]:
    """(training, test) of what `find_files` found."""
    *batches, test = [(_read_binary if path.suffix else _read_pickle)(path) for path in files]
    images, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    return (images, labels), test


def _read_binary(path: Path) -> Batch:
    raw = np.fromfile(path, dtype=np.uint8)
    if not raw.size or raw.size % 3073:
        raise ValueError(f"{path} should hold records of 3073 bytes, but has {raw.size} bytes; fetch it again")
    records = raw.reshape(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


class _ArrayUnpickler(pickle.Unpickler):
    """Reads dicts of arrays and numbers, and nothing that could run code."""

    ALLOWED = frozenset({"_reconstruct", "ndarray", "dtype", "_frombuffer", "scalar"})

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in self.ALLOWED:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        if (module, name) in (("_codecs", "encode"), ("__builtin__", "bytes")):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a file of images")


def _read_pickle(path: Path) -> Batch:
    content = _ArrayUnpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    images = np.asarray(content[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
    return images, np.asarray(content[b"labels"], dtype=np.int64)


def _pixels(images: NDArray[np.uint8]) -> torch.Tensor:
    mean, spread = np.float32(0.47), np.float32(0.25)  # rounded: facts about photographs rather than about these
    return torch.from_numpy((images / np.float32(255) - mean) / spread)


def _fetch(folder: Path, fetch: Callable[[Path], None]) -> tuple[Batch, Batch]:
    try:
        fetch(folder)
        files = find_files(folder)
        if files:
            return read_files(files)
        reason = f"nothing was written to {folder}"
    except (ImportError, OSError, RuntimeError) as error:  # not installed; no network; or a broken download
        reason = f"{type(error).__name__}: {error}"
    try:
        return _flower_datasets()
    except ImportError:
        reason += "; flwr-datasets is not installed"
    except Exception as error:  # whatever a hub's client raises without a network
        reason += f"; {type(error).__name__}: {error}"
    raise ValueError(
        f"CIFAR-10 not found in {folder} and not to be fetched ({reason}); put cifar-10-batches-py or "
        f"cifar-10-batches-bin from https://www.cs.toronto.edu/~kriz/cifar.html in a folder and name it by data-dir "
        f"or ${DATA_VARIABLE}"
    )


def _torchvision(folder: Path) -> None:
    from torchvision.datasets import CIFAR10

    CIFAR10(str(folder), download=True)


def _flower_datasets() -> tuple[Batch, Batch]:
    from flwr_datasets import FederatedDataset

    source = FederatedDataset(dataset="uoft-cs/cifar10", partitioners={})
    parts = []
    for name in ("train", "test"):
        rows = source.load_split(name).with_format("numpy")
        parts.append((np.ascontiguousarray(rows["img"].transpose(0, 3, 1, 2)), rows["label"].astype(np.int64)))
    return parts[0], parts[1]
