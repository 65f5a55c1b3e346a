"""Fashion-MNIST: grey 28 × 28 pictures of ten kinds of clothes, in IDX files."""

import gzip
import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedcgd_simulations.models import choose
from fedcgd_simulations.models.small_cnn import tanh_cnn
from fedcgd_simulations.models.softmax import softmax_regression
from fedcgd_simulations.task import DATA_VARIABLE, Data, Examples, Task, classification, data_folders, split

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def task(model: str | None, data_dir: Path | None) -> Task:
    """55,000 training, 5000 validation and 10,000 test examples; softmax regression, or a small CNN (`tanh-cnn`)."""
    factories = {"softmax": lambda: softmax_regression(28 * 28, 10), "tanh-cnn": tanh_cnn}
    return classification("fashion-mnist", lambda: load(data_dir), choose("fashion-mnist", model, factories))


def load(data_dir: Path | None) -> Data:
    """Pixels in [0, 1], shape (examples, 1, 28, 28)."""
    folder = find_folder(data_dir)
    images, labels, test_images, test_labels = (read_idx(folder, name) for name in FILES)
    known = to_examples(images, labels)
    validation, train = split(known, len(known) // 12, seed=0)  # 5000 of 60,000 validate
    return Data(train, validation, to_examples(test_images, test_labels))


def to_examples(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Examples:
    """Images as numbers in [0, 1] with one channel."""
    if len(images) != len(labels):
        raise ValueError(
            f"{len(images)} images but {len(labels)} labels; the Fashion-MNIST files do not belong together"
        )
    return Examples(torch.from_numpy(images[:, None] / np.float32(255)), torch.from_numpy(labels.astype(np.int64)))


def find_folder(data_dir: Path | None) -> Path:
    """The folder that holds the four files. Raises ValueError that says how to get them."""
    folders = data_folders(data_dir, DEBIAN_FOLDER)
    candidates = [base / part for base in folders for part in ("", "fashion-mnist", "FashionMNIST/raw")]
    for folder in candidates:
        if all((folder / name).is_file() or (folder / f"{name}.gz").is_file() for name in FILES):
            return folder
    raise ValueError(
        f"Fashion-MNIST not found in {', '.join(map(str, folders))}; get it with `apt-get install "
        f"dataset-fashion-mnist`, or put {', '.join(FILES)} (plain or .gz) in a folder and name it by data-dir "
        f"or ${DATA_VARIABLE}"
    )


def read_idx(folder: Path, name: str) -> NDArray[np.uint8]:
    """The array in an IDX file of bytes, plain or gzipped.

    The format: two zero bytes, the type (8 = unsigned byte), the number of dimensions, each dimension as a big-endian
    32-bit integer, then the entries.
    """
    plain = folder / name
    content = plain.read_bytes() if plain.is_file() else gzip.decompress((folder / f"{name}.gz").read_bytes())
    if content[:3] != b"\x00\x00\x08":
        raise ValueError(f"{plain} is not an IDX file of unsigned bytes: it starts with {content[:4]!r}")
    start = 4 + 4 * content[3]
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], dtype=">i4"))
    if len(content) - start != math.prod(shape):
        raise ValueError(f"{plain} should hold {shape} bytes, but {len(content) - start} are there; fetch it again")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)
