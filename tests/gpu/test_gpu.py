"""Whole steps on a GPU: no tensor meets another device's, and the answers are a CPU's.

What only a real one can tell is in test_gpu_device.py.
"""

from collections.abc import Callable

import local_training_work as local_training
import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from gpu_runs import tf32, train
from torch import Tensor, nn
from torch.nn import functional

from fedcgd.clipping.flat_models import flatten
from fedcgd.clipping.per_sample_gradients import clipped_gradient_sum, example_loss
from fedcgd.curvature.measure import measure_spectrum
from fedcgd.curvature.public import Public, pretrained
from fedcgd.noise.quantisation import Lattice
from fedcgd_flower import LocalTask, arrays_of, one_gradient_step
from fedcgd_simulations.local_training import LocalTraining, train_many, train_one
from fedcgd_simulations.models.bert import bert
from fedcgd_simulations.models.cnn import cnn
from fedcgd_simulations.models.lstm import lstm
from fedcgd_simulations.models.small_cnn import tanh_cnn
from fedcgd_simulations.task import Examples, classification, evaluate, seeded

pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:In CPU autocast"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize(("mode", "noise"), [("hooks", "replay"), ("ghost", "buffer"), ("functorch", "cpu-buffer")])
def test_opacus_steps(mode: str, noise: str) -> None:
    expected = train("cpu", mode, noise)
    with tf32(False):
        found = train("cuda", mode, noise)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


MODELS = {
    "tanh-cnn": (tanh_cnn, lambda: torch.randn(5, 1, 28, 28)),
    "cnn": (cnn, lambda: torch.randn(5, 3, 32, 32)),
    "lstm": (lambda: lstm(50), lambda: torch.randint(1, 50, (5, 7))),
    "bert": (lambda: bert("bert-tiny", None), lambda: torch.randint(1, 50, (5, 3))),
}


def both(work: Callable[[str], object]) -> tuple[object, object]:
    """What `work` returns on a CPU and on a GPU, from the same random numbers."""
    torch.manual_seed(0)
    expected = work("cpu")
    torch.manual_seed(0)
    with tf32(False):
        found = work("cuda")
    return expected, found


@pytest.mark.parametrize("name", ["tanh-cnn", "cnn", "lstm", pytest.param("bert", marks=pytest.mark.slow)])
def test_sums_of_clipped_gradients(name: str) -> None:
    make, inputs = MODELS[name]

    def work(device: str):
        model, x = make(), inputs()
        with torch.no_grad():
            flat = flatten(model).to(device)
        examples, targets = x.to(device), torch.tensor([0, 1, 1, 1, 0], device=device)
        total, finite = clipped_gradient_sum(
            example_loss(model.to(device), cross_entropy), flat, (examples, targets), clip_norm=0.5, grid=Lattice(2.0**-20),
            counted=[True] * 4 + [False], indicator=1,
        )  # fmt: skip
        assert total.device.type == device
        return total.cpu(), finite

    (expected, counted), (found, finite) = both(work)
    assert finite == counted == 4
    torch.testing.assert_close(found, expected, rtol=0, atol=100)  # the ends of float32, in steps of 2⁻²⁰


def test_users_of_one_example() -> None:
    """What a simulated node does: the data on the GPU, the model and the answer in main memory."""
    model = seeded(2, tanh_cnn)
    work = local_training.work_of(model, clip_norm=0.5)
    work = LocalTask(**vars(work) | {"users": ("1", "2", "3"), "config": ConfigRecord()})
    examples = local_training.EXAMPLES

    def answer(device: str):
        inputs, targets = examples.inputs.to(device), examples.targets.to(device)

        def data(users, context):
            rows = torch.tensor([int(user) for user in users], device=device)
            return inputs[rows], targets[rows]

        loss = example_loss(seeded(2, tanh_cnn).to(device), cross_entropy)
        return one_gradient_step(loss, data)(work, local_training.CONTEXT)

    (expected, counted), (found, answered) = both(answer)
    assert answered == counted == 3
    np.testing.assert_allclose(found * work.clipping.grid.step, expected * work.clipping.grid.step, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", local_training.MODELS)
def test_local_training_and_evaluation(name: str) -> None:
    task = classification(name, lambda: None, local_training.MODELS[name])
    model = seeded(2, local_training.MODELS[name])
    work = local_training.work_of(model, clip_norm=0.5)
    local = LocalTraining(epochs=2, batch=5, learning_rate=0.1, proximal=0.7)
    data = local_training.EXAMPLES

    def answer(device: str):
        examples = Examples(data.inputs.to(device), data.targets.to(device))
        together = (
            train_many(task, work, examples, local_training.PARTS.__getitem__, local)[0] * work.clipping.grid.step
        )
        one = train_one(task, arrays_of(model), examples.take(local_training.PARTS["2"]), local)
        accuracy = evaluate(seeded(2, local_training.MODELS[name]).to(device), task, data)
        return np.concatenate([together, *(array.numpy().reshape(-1) for array in one.values()), [accuracy]])

    expected, found = both(answer)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_curvature() -> None:
    def answer(device: str):
        module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().to(device)
        public = Public(module, cross_entropy, torch.randn(9, 3, dtype=torch.float64), classes=2)
        trained = pretrained(public, epochs=1)
        hessian = trained.hessian(clip_norm=0.5, chunk=5)
        every = measure_spectrum(hessian, eigenvalues=100).eigenvalues
        some = measure_spectrum(hessian, eigenvalues=3, probes=1, steps=5).eigenvalues
        return np.array([*every, *some])

    expected, found = both(answer)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7)
