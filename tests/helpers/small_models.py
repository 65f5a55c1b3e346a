"""One small model of each kind, and inputs for it."""

import re

import pytest
import torch
from transformers import BertConfig, BertModel

from fedcgd_simulations.models.bert import SHAPES as BERT_SHAPES
from fedcgd_simulations.models.vit import SHAPES as VIT_SHAPES
from fedcgd_simulations.models.vit import Shape
from fedcgd_simulations.task import Data
from fedcgd_simulations.tasks import NAMES, get_task

USERS = 4


def models(task: str) -> list[str]:
    with pytest.raises(ValueError, match="its models are") as refused:
        get_task(task, model="?")
    return re.search(r"its models are (.*)", str(refused.value))[1].split(", ")


MODELS = [
    (task, model) for task in NAMES if task != "arrays" for model in models(task)
]  # whose models follow from the data
HEAVY = {"wideresnet-40"}
every_model = pytest.mark.parametrize(
    ("task", "model"), [pytest.param(t, m, marks=[pytest.mark.slow] if m in HEAVY else []) for t, m in MODELS]
)
"""Runs a test for every model of every task."""
SHAPES = {
    "digits": (64,),
    "fashion-mnist": (1, 28, 28),
    "fashion-mnist-6000": (1, 28, 28),
    "cifar10": (3, 32, 32),
    "imdb": (4096,),
    "tweets": (2048,),
}
"""Of an example of each task, for models that take plain numbers."""


def inputs(task: str, model: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if model == "lstm" or model.startswith("bert"):
        return torch.randint(1, 200, (USERS, 6), generator=generator)
    if model == "minilm-block":
        states = torch.randn(USERS, 5, 16, generator=generator)
        states[0, 3:] = 0
        return states
    if model.startswith("scattering"):
        return torch.randn(USERS, 4800 if "-4" in model else 15552, generator=generator)
    if model == "minilm":
        return torch.randn(USERS, 384, generator=generator)
    assert task in SHAPES, f"add the shape of an example of {task} to SHAPES in tests/helpers/small_models.py"
    return torch.randn(USERS, *SHAPES[task], generator=generator)


def small_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers of a few thousand weights in the place of all."""
    for name in VIT_SHAPES:
        monkeypatch.setitem(VIT_SHAPES, name, Shape(patch=8, layers=2, heads=2, hidden=16, mlp=32, image=32))
    for name in BERT_SHAPES:
        monkeypatch.setitem(BERT_SHAPES, name, (2, 2, 16, 32))
    monkeypatch.setattr("fedcgd_simulations.models.bert.VOCABULARY", 200)
    monkeypatch.setattr("fedcgd_simulations.models.last_block.minilm_model", small_minilm)


def small_minilm(vocabulary: int = 200) -> BertModel:
    """Two layers in the place of MiniLM's six, and 16 of its 384 numbers a word."""
    config = BertConfig(
        vocab_size=vocabulary, num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    return BertModel(config)


def tiny(name: str, data: Data, *, model: str | None = None, data_dir=None):
    made = get_task(name, model=model)
    return type(made)(made.name, lambda: data, made.model, made.loss, made.metric)
