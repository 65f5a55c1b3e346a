"""One point of a sweep: a training run of which everything but its result is known beforehand."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedcgd.accounting import calibrate
from fedcgd.keys import NoiseKey
from fedcgd.mechanisms.error import error_norms
from fedcgd.mechanisms.schedule import Schedule
from fedcgd.opacus import CorrelatedPrivacyEngine
from fedcgd.optimisation import catalogue
from fedcgd.optimisation.catalogue import MechanismSpec, describe, from_description
from fedcgd.participation import Participation, Sampling
from fedcgd.plan import Plan
from fedcgd_experiments.descent import Descent, Optimizer, descent
from fedcgd_experiments.softmax import train_softmax
from fedcgd_simulations.local_softmax import is_softmax
from fedcgd_simulations.task import Data, Examples, Task, evaluate
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
            MechanismSpec.parse(self.mechanism)

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
    def budget(self) -> "Setup":
        """The setup of DP-SGD there: what all mechanisms at one budget and sampling share."""
        return replace(self, mechanism="dp-sgd")

    @property
    def spelling(self) -> MechanismSpec:
        """What `mechanism` says."""
        return MechanismSpec.parse(self.mechanism)

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
        """What is compared: the mechanism without its number (λ, bands, buffers, ν), which is tuned."""
        return self.mechanism if self.in_file else str(replace(self.spelling, value=None))


TEST_SEEDS = 1000
"""Seeds below tune, seeds from here on test: no run that chose anything is among those that judge the choice."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A training run: its setup, its data and model, how it learns, its seed, and which examples judge it.

    Raises ValueError for a seed that is not one of its split's (`TEST_SEEDS`), and as `Descent` does.
    """

    setup: Setup
    task: str
    model: str | None = None
    clip_norm: float
    learning_rate: float
    optimizer: Optimizer = "sgd"
    momentum: float = 0.0
    schedule: Schedule = "constant"
    seed: int
    split: Literal["validation", "test"] = "validation"

    def __post_init__(self) -> None:
        if self.split == "validation" and not 0 <= self.seed < TEST_SEEDS:
            raise ValueError(f"seeds for tuning are 0 … {TEST_SEEDS - 1}, got {self.seed}; those above are for tests")
        if self.split == "test" and self.seed < TEST_SEEDS:
            raise ValueError(f"seeds for tests are {TEST_SEEDS} and more, got {self.seed}; those below are for tuning")
        self.descent  # noqa: B018

    @property
    def descent(self) -> Descent:
        """How the model moves."""
        return Descent(
            learning_rate=self.learning_rate,
            optimizer=self.optimizer,
            momentum=self.momentum,
            schedule=self.schedule,
        )


def identity(value: Setup | Point) -> str:
    """A text that is equal exactly for equal values, in every process."""
    return json.dumps(asdict(value), sort_keys=True)


def shared_identity(point: Point) -> str:
    """`identity` without the learning rate."""
    shared = asdict(point)
    del shared["learning_rate"]
    return json.dumps(shared, sort_keys=True)


def batch_identity(point: Point) -> str:
    """A text that is equal for points whose batches and Z are the same, whatever their mechanisms, budgets and rates."""
    shared = asdict(point) | {"participation": str(point.setup.participation())}
    for name in ("learning_rate", "setup"):
        del shared[name]
    return json.dumps(shared, sort_keys=True)


def calibrate_setup(setup: Setup) -> Record:
    """The mechanism and σ of `setup`, and what they promise, as a JSON-able record."""
    participation = setup.participation()
    started = time.process_time()
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
        "seconds": round(time.process_time() - started, 3),
    }


def run_points(
    points: Sequence[Point],
    calibrations: Mapping[str, Record],
    *,
    data_dir: str | None = None,
    physical_batch: int = 512,
    examples: int | None = None,
) -> list[Record]:
    """Train `points`, which share their `batch_identity`; a record for each `shared_identity`, with the accuracies at its rates.

    `calibrations` has the noise of each setup, by its `identity`. The seed decides the initial model, the batches and the noise,
    so that mechanisms are compared on the same batches. Softmax regression is trained at all points together (`train_softmax`),
    other models through the engine, one after the other, with at most `physical_batch` per-example gradients at a time. `seconds`
    in the records is processor time, in equal parts. With `examples`, the first so many are all there are: to measure what a step
    costs.
    """
    torch.set_num_threads(1)
    started = time.process_time()
    if len({batch_identity(one) for one in points}) > 1:
        raise ValueError(f"points that are trained together must have the same batches, got {points}")
    point = points[0]
    task = get_task(point.task, model=point.model, data_dir=data_dir)
    data = _load(point.task, point.model, data_dir)
    if examples is not None:
        data = replace(data, train=data.train.take(np.arange(examples)))
    steps = point.setup.steps
    batch = -(-len(data.train) // steps)
    if -(-len(data.train) // batch) != steps:
        would = -(-len(data.train) // batch)
        raise ValueError(f"{len(data.train)} examples cannot make {steps} steps; {would} steps would do")
    plans = [_plan(one, calibrations[identity(one.setup)]) for one in points]
    judged = data.validation if point.split == "validation" else data.test
    model, key = task.model(point.seed), NoiseKey.simulation(point.seed)
    accuracies = []
    if is_softmax(model, task.loss):
        runs = [(plan, one.descent) for plan, one in zip(plans, points, strict=True)]
        for flat in train_softmax(model, data.train, runs, key=key, steps=steps):
            nn.utils.vector_to_parameters(flat, model.parameters())
            accuracies.append(evaluate(model, task, judged))
    else:
        for one, plan in zip(points, plans, strict=True):
            trained = train_engine(one, task, data.train, plan, physical_batch=physical_batch)
            accuracies.append(evaluate(trained, task, judged))
    groups: dict[str, Record] = {}
    for one, accuracy in zip(points, accuracies, strict=True):
        empty: Record = {"learning_rates": [], "accuracies": []}
        group = groups.setdefault(
            shared_identity(one), {"kind": "runs", "point": json.loads(shared_identity(one)), **empty}
        )
        group["learning_rates"].append(one.learning_rate)
        group["accuracies"].append(round(accuracy, 9))
    seconds = (time.process_time() - started) / len(groups)
    return [group | {"seconds": round(seconds, 4)} for group in groups.values()]


def _plan(point: Point, calibration: Record) -> Plan:
    return Plan(
        mechanism=from_description(calibration["mechanism"]),
        participation=point.setup.participation(),
        clip_norm=point.clip_norm,
        noise_multiplier=calibration["noise_multiplier"],
        delta=point.setup.delta,
    )


def train_engine(
    point: Point,
    task: Task,
    train: Examples,
    plan: Plan,
    *,
    physical_batch: int,
    grad_sample_mode: str = "ghost",
    watch: Callable[[int, nn.Module], None] | None = None,
) -> nn.Module:
    """The model that `CorrelatedPrivacyEngine` trains as `point` says, on a GPU if there is one.

    `watch` is called with the number of steps and the model after each of them.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, setup = task.model(point.seed).to(device), point.setup
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, scheduler = descent(point.descent, parameters, plan.participation.rounds)
    engine = CorrelatedPrivacyEngine(NoiseKey.simulation(point.seed))
    module, private, *criterion, batches = engine.make_private(
        module=model,
        optimizer=optimizer,
        criterion=_PerExample(task.loss),
        data_loader=DataLoader(TensorDataset(train.inputs, train.targets), batch_size=-(-len(train) // setup.steps)),
        plan=plan,
        grad_sample_mode=grad_sample_mode,
    )
    loss = criterion[0] if criterion else lambda outputs, targets: -task.loss(outputs, targets).mean()
    rounds = engine.accountant
    assert rounds is not None
    inputs, targets = train.inputs.to(device), train.targets.to(device)
    module.train()
    for _ in range(setup.epochs):
        manager = BatchMemoryManager(data_loader=batches, max_physical_batch_size=physical_batch, optimizer=private)
        with manager as physical:
            # The rows by index: the loader would collate them one by one.
            for rows in physical.batch_sampler:
                private.zero_grad()
                loss(module(inputs[rows]), targets[rows]).backward()
                before = rounds.released
                private.step()
                if rounds.released > before:  # the last part of a batch
                    scheduler.step()
                    if watch is not None:
                        watch(rounds.released, model)
    return model


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
