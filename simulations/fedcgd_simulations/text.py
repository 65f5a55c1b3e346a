"""Text to tensors without learning anything from it, so that no vocabulary leaks who wrote what."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class TextSizes:
    """What a task makes of its texts: so many ids of words, so many words of a text, so many features of a bag of words."""

    vocabulary: int
    length: int
    features: int


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
