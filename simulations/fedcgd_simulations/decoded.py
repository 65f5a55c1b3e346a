"""Data that are decoded once and then mapped into memory: processes share them, and read no other rows than they take."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedcgd.support.cache import cache_folder
from fedcgd_simulations.task import Data, Examples

_PARTS = tuple((part, array) for part in ("train", "validation", "test") for array in ("inputs", "targets"))


def decoded(name: str, sources: Iterable[Path], load: Callable[[], Data]) -> Data:
    """What `load` reads from `sources`, as files in the cache folder (`fedcgd.support.cache`) that are mapped into memory.

    Args:
        name: of the task and how it is prepared.
        sources: the files and folders that it is read from, and the code that reads it; where they changed, it is read anew.
        load: makes the data; it names no users.

    Returns:
        The data; if the cache folder cannot be written, as `load` made them.
    """
    try:
        folder = cache_folder() / f"{name}-{_digest(sources)}"
    except RuntimeError:  # no home
        return load()
    if not folder.is_dir():
        made = load()
        try:
            _write(made, folder)
        except OSError:  # a full disk, or a folder that others own
            return made
    arrays = iter([mapped(folder / f"{part}-{array}.npy") for part, array in _PARTS])
    return Data(*(Examples(inputs, next(arrays)) for inputs in arrays))


def mapped(path: Path) -> Tensor:
    """The array in a `.npy` file, of which no more is read than is used. What is written into it stays in this process."""
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def _write(data: Data, folder: Path) -> None:
    """All at once, so that a process that reads at the same time finds all or nothing."""
    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        for split, array in _PARTS:
            np.save(part / f"{split}-{array}.npy", getattr(getattr(data, split), array).numpy())
        part.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _digest(sources: Iterable[Path]) -> str:
    """Of where data lie, their sizes and times; of code, of what it says."""
    stamps = sorted(
        path.read_text(encoding="utf-8")
        if path.suffix == ".py"
        else f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}"
        for path in _files(sources)
    )
    return hashlib.sha256("\0".join(stamps).encode()).hexdigest()[:24]


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        yield from path.rglob("*") if path.is_dir() else [path]
