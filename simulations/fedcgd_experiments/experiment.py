"""One point of a sweep: a training run of which everything but its result is known beforehand."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fedcgd.accounting import calibrate
from fedcgd.keys import NoiseKey
from fedcgd.mechanisms.error import error_norms
from fedcgd.opacus import CorrelatedPrivacyEngine
from fedcgd.optimisation import catalogue
from fedcgd.optimisation.catalogue import Spelling, describe, from_description
from fedcgd.participation import Participation, Sampling
from fedcgd.plan import Plan
from fedcgd_simulations.task import Data, evaluate
from fedcgd_simulations.tasks import get_task

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the noise depends on: points that share it share a calibration. `steps` is rounds per epoch.

    `mechanism` is spelled as on the command line: "dp-sgd", "lambda-cgd:0.9", "bisr:16:normalized", "file:curve.json". Raises
    ValueError if it is misspelled, or a file that is read (to calibrate, or to count the groups of a sampling) is not there.
    """

    mechanism: str
    sampling: Sampling = "none"
    epsilon: float
    delta: float
    steps: int
    epochs: int

    def __post_init__(self) -> None:
        if not self.in_file:  # records are read where the file may be gone; their calibration holds what it said
            Spelling.parse(self.mechanism)

    def participation(self) -> Participation:
        """An epoch is `steps` rounds; cyclic Poisson sampling has as many groups as the mechanism has bands."""
        rounds = self.steps * self.epochs
        if self.sampling == "poisson":
            return Participation(rounds=rounds, sampling="poisson", sampling_rate=1 / self.steps)
        if self.sampling == "cyclic-poisson":
            groups = self.spelling.bands or 1
            return Participation(
                rounds=rounds, min_separation=groups, sampling="cyclic-poisson", sampling_rate=groups / self.steps
            )
        return Participation(rounds=rounds, min_separation=self.steps, sampling=self.sampling)

    @property
    def spelling(self) -> Spelling:
        """What `mechanism` says."""
        return Spelling.parse(self.mechanism)

    @property
    def in_file(self) -> bool:
        """Whether the mechanism is what a file says."""
        return self.mechanism.startswith("file:")

    @property
    def name(self) -> str:
        """The mechanism without its number; the whole spelling of one in a file."""
        return self.mechanism if self.in_file else self.spelling.row.name

    @property
    def lam(self) -> float:
        """λ of DP-λCGD; 0 for any other mechanism."""
        return float(self.spelling.value or 0) if self.name == "lambda-cgd" else 0.0

    @property
    def family(self) -> str:
        """What is compared: the mechanism, but DP-λCGD without its λ, which is tuned."""
        return str(replace(self.spelling, value=None)) if self.name == "lambda-cgd" else self.mechanism


@dataclass(frozen=True, kw_only=True)
class Point:
    """A training run: its setup, its data and model, how it learns, its seed, and which examples judge it."""

    setup: Setup
    task: str
    model: str | None = None
    clip_norm: float
    learning_rate: float
    seed: int
    split: Literal["validation", "test"] = "validation"


def identity(value: Setup | Point) -> str:
    """A text that is equal exactly for equal values, in every process."""
    return json.dumps(asdict(value), sort_keys=True)


def calibrate_setup(setup: Setup) -> Record:
    """The mechanism and σ of `setup`, and what they promise, as a JSON-able record."""
    participation = setup.participation()
    started = time.perf_counter()
    mechanism = catalogue.mechanism(setup.mechanism, participation)
    guarantee = calibrate(mechanism, participation, epsilon=setup.epsilon, delta=setup.delta)
    norms = error_norms(mechanism, participation.rounds)
    return {
        "kind": "calibration",
        "setup": asdict(setup),
        "mechanism": describe(mechanism),
        "noise_multiplier": guarantee.noise_multiplier,
        "rmse": norms.rmse(guarantee.noise_multiplier),
        "max_se": norms.max_se(guarantee.noise_multiplier),
        "adjacency": guarantee.adjacency,
        "method": guarantee.method,
        "seconds": round(time.perf_counter() - started, 3),
    }


def run_point(point: Point, calibration: Record, *, data_dir: str | None = None, physical_batch: int = 512) -> Record:
    """Train `point` with the noise of `calibration`; a record with its `accuracy` on its split.

    The seed decides the initial model, the batches and the noise, so that mechanisms are compared on the same batches.
    """
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.perf_counter()
    task = get_task(point.task, model=point.model, data_dir=data_dir)
    data = _load(point.task, point.model, data_dir)
    setup, model = point.setup, task.model(point.seed).to(device)
    batch = -(-len(data.train) // setup.steps)
    loader = DataLoader(TensorDataset(data.train.inputs, data.train.targets), batch_size=batch)
    if len(loader) != setup.steps:
        raise ValueError(f"{len(data.train)} examples cannot make {setup.steps} steps; {len(loader)} steps would do")
    plan = Plan(
        mechanism=from_description(calibration["mechanism"]),
        participation=setup.participation(),
        clip_norm=point.clip_norm,
        noise_multiplier=calibration["noise_multiplier"],
        delta=setup.delta,
    )
    module, optimizer, criterion, batches = CorrelatedPrivacyEngine(NoiseKey.simulation(point.seed)).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=point.learning_rate, maximize=True),
        criterion=_PerExample(task.loss),
        data_loader=loader,
        plan=plan,
        grad_sample_mode="ghost",
    )
    inputs, targets = data.train.inputs.to(device), data.train.targets.to(device)
    module.train()
    for _ in range(setup.epochs):
        manager = BatchMemoryManager(data_loader=batches, max_physical_batch_size=physical_batch, optimizer=optimizer)
        with manager as physical:
            # The rows by index: the loader would collate them one by one.
            for rows in physical.batch_sampler:
                optimizer.zero_grad()
                criterion(module(inputs[rows]), targets[rows]).backward()
                optimizer.step()
    judged = data.validation if point.split == "validation" else data.test
    return {
        "kind": "run",
        "point": asdict(point),
        "label": setup.mechanism,
        "accuracy": evaluate(model, task, judged),
        "seconds": round(time.perf_counter() - started, 3),
    }


class _PerExample:
    """Minus a loss, in the form that Opacus wants: with a `reduction` that it sets to "none" before each call.

    Minus, because a user's update is minus its gradient: noise that is added to updates has the other sign in the model than the
    same noise added to gradients, and a federated run with the point's seed shall release the same models.
    """

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.reduction = "mean"
        self._loss = loss

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -self._loss(outputs, targets)


@lru_cache(maxsize=1)
def _load(task: str, model: str | None, data_dir: str | None) -> Data:
    return get_task(task, model=model, data_dir=data_dir).load()
