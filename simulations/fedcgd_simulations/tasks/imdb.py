"""IMDB: 50,000 film reviews, positive or negative, in the files of their collectors or from Flower Datasets."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fedcgd_simulations import text
from fedcgd_simulations.decoded import decoded
from fedcgd_simulations.minilm import minilm_embeddings
from fedcgd_simulations.models import Factory, choose
from fedcgd_simulations.models.bert import SHAPES, VOCABULARY, bert
from fedcgd_simulations.models.lstm import lstm
from fedcgd_simulations.models.softmax import softmax_regression
from fedcgd_simulations.models.weights import weights_path
from fedcgd_simulations.task import DATA_VARIABLE, Data, Examples, Task, classification, data_folders, split
from fedcgd_simulations.text import TextSizes, hashed_bag, hashed_tokens, tokens_for

CACHE = Path.home() / ".cache" / "fedcgd"
SIZES = TextSizes(vocabulary=8192, length=256, features=4096)

Labelled = tuple[list[str], list[int]]
"""Texts and labels, 1 for positive."""


def task(model: str | None, data_dir: Path | None) -> Task:
    """22,500 training, 2500 validation and 25,000 test reviews; the LSTM unless another model is named.

    A model's inputs are hashed words (`lstm`), word pieces (`bert-…`), sentence embeddings (`minilm`) or a hashed bag
    of words (`softmax`).
    """
    berts = [base + lora for base in SHAPES for lora in ("", "-lora")]
    factories: dict[str, Factory] = {
        "lstm": lambda: lstm(SIZES.vocabulary),
        **{name: partial(_bert, name) for name in berts},
        "minilm": lambda: softmax_regression(384, 2),
        "softmax": lambda: softmax_regression(SIZES.features, 2),
    }
    factory, name = choose("imdb", model, factories), model or "lstm"
    return classification("imdb", lambda: load(name, data_dir), factory)


def load(model: str, data_dir: Path | None) -> Data:
    """The reviews as the inputs of `model`. Raises ValueError that says how to get them if there are none."""
    folders = data_folders(data_dir, CACHE)
    base = next((base for folder in folders if (base := find_folder(folder))), None)
    if base is None:
        return _prepared(model, *_flower_datasets(folders))

    def read() -> Data:
        return _prepared(model, _read_part(base / "train"), _read_part(base / "test"))

    if model not in ("lstm", "softmax"):  # the inputs of others depend on weights, too
        return read()
    return decoded(f"imdb-{model}", [base / "train", base / "test", Path(__file__), Path(text.__file__)], read)


def _prepared(model: str, train: Labelled, test: Labelled) -> Data:
    known, held_out = (_examples(model, *part) for part in (train, test))
    validation, rest = split(known, len(known) // 10, seed=0)  # 2500 of 25,000 validate
    return Data(rest, validation, held_out)


def find_folder(folder: Path) -> Path | None:
    """`aclImdb` in `folder`, or `folder`: where there is one text file per review in train/pos and so on; else None."""
    for base in (folder, folder / "aclImdb"):
        if all((base / part / label).is_dir() for part in ("train", "test") for label in ("neg", "pos")):
            return base
    return None


def _read_part(folder: Path) -> Labelled:
    texts: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(("neg", "pos")):
        for path in sorted((folder / name).glob("*.txt")):
            texts.append(path.read_text(encoding="utf-8").replace("<br />", " "))
            labels.append(label)
    if not texts:
        raise ValueError(f"{folder} has no reviews (*.txt); unpack aclImdb_v1.tar.gz again")
    return texts, labels


def _examples(model: str, texts: Sequence[str], labels: Sequence[int]) -> Examples:
    if model == "lstm":
        inputs = hashed_tokens(texts, vocabulary=SIZES.vocabulary, length=SIZES.length)
    elif model == "minilm":
        inputs = minilm_embeddings(texts, length=SIZES.length)
    elif model == "softmax":
        inputs = hashed_bag(texts, features=SIZES.features)
    else:
        folder = weights_path(model.removesuffix("-lora"))
        inputs = tokens_for(folder, texts, vocabulary=VOCABULARY, length=SIZES.length)
    return Examples(inputs, torch.tensor(labels))


def _bert(name: str) -> nn.Module:
    base = name.removesuffix("-lora")
    return bert(base, weights_path(base), lora_rank=8 if name != base else None)


def _flower_datasets(folders: Sequence[Path]) -> tuple[Labelled, Labelled]:
    try:
        from flwr_datasets import FederatedDataset

        source = FederatedDataset(dataset="stanfordnlp/imdb", partitioners={})
        train, test = (source.load_split(part) for part in ("train", "test"))
        return (list(train["text"]), list(train["label"])), (list(test["text"]), list(test["label"]))
    except ImportError:
        reason = "flwr-datasets is not installed"
    except Exception as error:  # whatever a hub's client raises without a network
        reason = f"{type(error).__name__}: {error}"
    raise ValueError(
        f"IMDB not found in {', '.join(map(str, folders))} and not to be fetched ({reason}); unpack aclImdb_v1.tar.gz "
        f"from https://ai.stanford.edu/~amaas/data/sentiment/ in a folder and name it by data-dir or ${DATA_VARIABLE}, "
        "or `pip install flwr-datasets`"
    )
