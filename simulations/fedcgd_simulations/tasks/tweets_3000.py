"""A tenth of the tweets, cut after sixteen word pieces: so few and short that training a block of MiniLM takes seconds."""

from pathlib import Path

import torch

from fedcgd_simulations.minilm import WIDTH, minilm_embeddings, minilm_states
from fedcgd_simulations.models import choose
from fedcgd_simulations.models.last_block import minilm_last_block
from fedcgd_simulations.models.softmax import softmax_regression
from fedcgd_simulations.task import Data, Examples, Task, classification, split
from fedcgd_simulations.tasks import tweets

SIZES = (3000, 1000, 3000)
"""To train, for validation and to test."""


def task(model: str | None, data_dir: Path | None) -> Task:
    """3000 tweets of those that train in `tweets`, and 1000 and 3000 of those for validation and test; MiniLM's last block.

    `minilm` is softmax regression on the sentence embeddings that the block (`minilm-block`) starts with.
    """
    factories = {
        "minilm-block": lambda: minilm_last_block(len(tweets.LABELS)),
        "minilm": lambda: softmax_regression(WIDTH, len(tweets.LABELS)),
    }
    factory, linear = choose("tweets-3000", model, factories), model == "minilm"
    return classification("tweets-3000", lambda: load(data_dir, linear=linear), factory)


def load(data_dir: Path | None, *, linear: bool) -> Data:
    """The tweets' embeddings, or their states below the last block. Only these tweets go through MiniLM."""
    texts, labels = tweets.read_tweets(tweets.find_file(data_dir))
    whole = tweets.parts(Examples(torch.arange(len(texts)), torch.tensor(labels)))
    sizes = zip((whole.train, whole.validation, whole.test), SIZES, strict=True)
    chosen = [split(part, size, seed=1)[0] for part, size in sizes]
    read = minilm_embeddings if linear else minilm_states
    inputs = read([texts[row] for part in chosen for row in part.inputs], length=16)
    each = torch.split(inputs, [len(part) for part in chosen])
    return Data(*(Examples(rows, part.targets) for rows, part in zip(each, chosen, strict=True)))
