"""Every model of every task trains federated, by the app as it stands: its trained parameters move as in a plain loop."""

import json
import re
import tomllib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_grid import FakeGrid, FakeNode
from flwr.app import Context, RecordDict
from transformers import BertConfig, BertModel

from fedcgd.clipping.flat_models import flatten
from fedcgd_simulations import client_app, server_app
from fedcgd_simulations.models.bert import SHAPES as BERT_SHAPES
from fedcgd_simulations.models.vit import SHAPES as VIT_SHAPES
from fedcgd_simulations.models.vit import Shape
from fedcgd_simulations.models.weights import RandomWeightsWarning
from fedcgd_simulations.task import Data, Examples
from fedcgd_simulations.tasks import NAMES, get_task

DEFAULTS = tomllib.loads((Path(__file__).parents[1] / "simulations" / "pyproject.toml").read_text())["tool"]["flwr"][
    "app"
]["config"]
USERS = 4


def models(task: str) -> list[str]:
    with pytest.raises(ValueError, match="its models are") as refused:
        get_task(task, model="?")
    return re.search(r"its models are (.*)", str(refused.value))[1].split(", ")


MODELS = [(task, model) for task in NAMES for model in models(task)]
HEAVY = {"wideresnet-40"}
FEATURES = {"imdb": 4096, "tweets": 2048}
PIXELS = {
    "digits": (64,),
    "fashion-mnist": (1, 28, 28),
    "fashion-mnist-6000": (1, 28, 28),
    "cifar10": (3, 32, 32),
}


def inputs(task: str, model: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if model == "lstm" or model.startswith("bert"):
        return torch.randint(1, 200, (USERS, 6), generator=generator)
    if model == "minilm-block":
        states = torch.randn(USERS, 5, 16, generator=generator)
        states[0, 3:] = 0
        return states
    shape = PIXELS.get(task) or (384 if model == "minilm" else FEATURES[task],)
    return torch.randn(USERS, *shape, generator=generator)


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


def one_step(task, examples: Examples, clip_norm: float) -> tuple[np.ndarray, np.ndarray]:
    """(the model, the mean of the clipped steps of all examples), by one backward pass for each."""
    model = task.model(0)
    start, total = flatten(model).double().numpy(), np.zeros(flatten(model).shape)
    for x, y in zip(examples.inputs, examples.targets, strict=True):
        model.zero_grad()
        task.loss(model(x[None]), y[None]).sum().backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.requires_grad]).double().numpy()
        total -= gradient * min(1.0, clip_norm / np.linalg.norm(gradient))
    return start, total / len(examples)


@pytest.mark.parametrize(
    ("task", "model"), [pytest.param(t, m, marks=[pytest.mark.slow] if m in HEAVY else []) for t, m in MODELS]
)
@pytest.mark.filterwarnings(f"ignore::{RandomWeightsWarning.__module__}.{RandomWeightsWarning.__name__}")
def test_two_rounds(task: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_transformers(monkeypatch)
    examples = Examples(inputs(task, model), torch.tensor([0, 1, 1, 0]))
    made = partial(tiny, data=Data(examples, examples, examples))
    for module in (server_app, client_app):
        monkeypatch.setattr(module, "get_task", made)
    client_app._material.cache_clear()
    released = []

    def keep(model, arrays):
        released.append(arrays)
        load(model, arrays)

    load = server_app.load_arrays
    monkeypatch.setattr(server_app, "load_arrays", keep)
    config = DEFAULTS | {"task": task, "model": model, "cohort": USERS, "rounds": 2, "learning-rate": 1.0}
    config |= {"epsilon": 1e9, "clip-norm": 0.5, "results": str(tmp_path / "result.json")}
    grid = FakeGrid(
        {i: FakeNode(client_app.app, config={"partition-id": i, "num-partitions": 2}) for i in range(2)}, config
    )
    server_app.app(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config))
    assert json.loads((tmp_path / "result.json").read_text())["releases"] == 2

    reference = made(task, model=model)
    start, step = one_step(reference, examples, 0.5)
    trained = [name for name, p in reference.model(0).named_parameters() if p.requires_grad]
    assert [list(arrays) for arrays in released] == [trained] * 3
    first = np.concatenate([array.numpy().ravel() for array in released[1].values()])
    assert np.linalg.norm(step) > 0
    np.testing.assert_allclose(first - start, step, atol=2e-4 + 1e-3 * np.abs(step).max())
