"""Time of a private training step for each way to make correlated noise, over that of `opacus.PrivacyEngine`."""

import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedcgd.central import PrivateGradient
from fedcgd.clipping.flat_models import layout
from fedcgd.mechanisms import DPSGD, Mechanism
from fedcgd.mechanisms.mechanism import Vector
from fedcgd.mechanisms.toeplitz import Toeplitz, reciprocal
from fedcgd.noise.keys import NoiseKey
from fedcgd.opacus import CorrelatedPrivacyEngine
from fedcgd.participation import Participation
from fedcgd.plan import Plan
from fedcgd_simulations.models.bert import VOCABULARY, bert
from fedcgd_simulations.models.cnn import cnn
from fedcgd_simulations.models.lstm import lstm
from fedcgd_simulations.models.vit import vit
from fedcgd_simulations.models.wideresnet import wideresnet

MODELS: dict[str, Callable[[], nn.Module]] = {
    "cnn": cnn,
    "wideresnet-40": wideresnet,
    **{name: partial(vit, name) for name in ("vit-b-16", "vit-l-16", "vit-h-14")},
    "lstm": lambda: lstm(8192),
    **{name: partial(bert, name, None) for name in ("bert-tiny", "bert-base", "bert-large")},
}
OPACUS = ("opacus", 1)
VARIANTS = [
    ("dp-sgd", 1),
    ("pure", 1),
    ("pure", 2),
    *((noise, bands) for noise in ("replay", "cpu-buffer") for bands in (2, 4, 16)),
]


@dataclass(frozen=True)
class InverseBands(Toeplitz):
    """Row t of C⁻¹ combines `bands` noise vectors: what a step costs depends on nothing else."""

    name = "inverse-bands"
    bands: int

    def coefficients(self, rounds: int) -> Vector:
        return reciprocal(self.inverse_coefficients(rounds), rounds)

    def inverse_coefficients(self, rounds: int) -> Vector:
        return np.array([1.0, *[-0.9 / self.bands] * (self.bands - 1)])[:rounds]


def inputs_for(model: str, examples: int) -> Tensor:
    """Random inputs: images for the models of CIFAR-10, 128 or 256 tokens for those of IMDB."""
    if model.startswith("bert"):
        return torch.randint(1, VOCABULARY, (examples, 128))
    if model == "lstm":
        return torch.randint(1, 8192, (examples, 256))
    return torch.randn(examples, 3, 32, 32)


def prepare(name: str, noise: str, mechanism: Mechanism, batch: int, physical: int, mode: str) -> Callable[[], None]:
    """One training step of `batch` examples, at most `physical` at once; "opacus" is all Opacus', "pure" the pure step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = MODELS[name]().to(device)
    inputs, targets = inputs_for(name, batch).to(device), torch.randint(0, 2, (batch,), device=device)
    given: dict[str, Any] = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-4),
        "data_loader": DataLoader(TensorDataset(torch.zeros(batch * 50)), batch_size=batch),
        "grad_sample_mode": mode,
    }
    plan = Plan(
        mechanism=mechanism,
        participation=Participation(rounds=2000),
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-5,
    )
    if noise == "pure":
        gradient = PrivateGradient(
            model, nn.CrossEntropyLoss(), TensorDataset(inputs, targets), plan, key=NoiseKey.generate()
        )

        def pure() -> None:
            gradient()
            given["optimizer"].step()
            given["optimizer"].zero_grad()

        return pure
    if noise == "opacus":
        private = PrivacyEngine().make_private(
            **given,
            criterion=nn.CrossEntropyLoss(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )
    else:
        private = CorrelatedPrivacyEngine(NoiseKey.generate()).make_private(
            **given, plan=plan, noise="cpu-buffer" if noise == "cpu-buffer" else "replay"
        )
    module, optimizer, *criterion, loader = private
    loss = criterion[0] if criterion else nn.CrossEntropyLoss()
    module.train()
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer)
    parts = itertools.chain.from_iterable(itertools.repeat(manager.__enter__().batch_sampler))

    def step() -> None:
        for _ in range(-(-batch // physical)):
            rows = torch.as_tensor(next(parts)) % batch
            optimizer.zero_grad()
            loss(module(inputs[rows]), targets[rows]).backward()
            optimizer.step()
        optimizer.zero_grad()  # else the gradients of examples would stay while another model has its turn

    return step


def _turn(opacus: Callable[[], None], step: Callable[[], None], steps: int, ours_first: bool) -> tuple[float, float]:
    """Seconds of a step of each."""
    ours = timed(step, steps) if ours_first else 0.0
    theirs = timed(opacus, steps)
    return theirs / steps, (ours if ours_first else timed(step, steps)) / steps


def _row(variant: tuple[str, int], seconds: list[float], ratios: list[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(ratios, n=4)
    noise, bands = variant
    return {
        "noise": noise,
        "bands": bands,
        "milliseconds": 1e3 * statistics.median(seconds),
        "ratio": middle,
        "quartiles": [low, high],
    }


def timed(step: Callable[[], None], steps: int) -> float:
    """Seconds of `steps` steps: by the wall clock on a GPU; on a CPU those that this process had the CPU for."""
    if not torch.cuda.is_available():
        started = time.process_time()  # time spent waiting for other processes tells about them
        for _ in range(steps):
            step()
        return time.process_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(
    model: str, *, batch: int, physical: int, turns: int, steps: int, mode: str, variants: list[tuple[str, int]]
) -> dict[str, Any]:
    """A record with a row for Opacus and one for each variant: median step time, median ratio to Opacus', and its quartiles.

    There are never more than two models at once: a variant takes turns with Opacus alone, and is forgotten before the next.
    `load` is the machine's load average over the last minute, at the end.
    """

    def prepared(variant: tuple[str, int]) -> Callable[[], None]:
        noise, bands = variant
        step = prepare(model, noise, InverseBands(bands) if bands > 1 else DPSGD(), batch, physical, mode)
        for _ in range(max(3, bands)):  # so that buffers are full
            step()
        return step

    opacus = prepared(OPACUS)
    rows, baseline = [], []
    for variant in variants:
        step = prepared(variant)
        pairs = [_turn(opacus, step, steps, ours_first=turn % 2 == 0) for turn in range(turns)]
        baseline += [theirs for theirs, _ in pairs]
        rows.append(_row(variant, [ours for _, ours in pairs], [ours / theirs for theirs, ours in pairs]))
        del step
        gc.collect()  # the hooks of a private model hold it in a circle
    rows.insert(0, _row(OPACUS, baseline, [1.0] * len(baseline)))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "kind": "runtime",
        "model": model,
        "parameters": layout(MODELS[model]()).size,
        "device": device,
        "batch": batch,
        "physical": physical,
        "mode": mode,
        "turns": turns,
        "steps": steps,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "rows": rows,
    }
