"""Trains central points: softmax regression for many points at once, other models through the Opacus engine."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from fedcgd.accounting import PastRun, calibrate, compose
from fedcgd.mechanisms import Mechanism
from fedcgd.noise.keys import NoiseKey
from fedcgd.opacus import CorrelatedPrivacyEngine
from fedcgd.optimisation import catalogue
from fedcgd.participation import Participation
from fedcgd.plan import Plan
from fedcgd.planning.input_mean import mean_plan, private_mean
from fedcgd.support.files import atomic_write
from fedcgd_experiments.central_softmax import train_softmax
from fedcgd_experiments.point import CentralPoint, Setup, descent
from fedcgd_experiments.results import Row
from fedcgd_experiments.runner import NEVER, Deadline, PausedError, grouped
from fedcgd_experiments.study import identity
from fedcgd_simulations.local_softmax import is_softmax
from fedcgd_simulations.task import Data, Examples, Task, average_of, evaluate, seeded
from fedcgd_simulations.tasks import get_task

TOGETHER = 256
"""Models of softmax regression that are trained at once: with 8000 weights each 8 MB, and their gradients."""

CLAIM = ("noise_multiplier", "adjacency", "method")


@dataclass(frozen=True, kw_only=True)
class CentralTrainer:
    """Trains `CentralPoint`s on the data in `data_dir`, with at most `physical_batch` per-example gradients at a time.

    A training through the engine leaves a file in `checkpoints` after each epoch, to go on from; when `late` it stops there.
    """

    data_dir: str | None = None
    physical_batch: int = 512
    checkpoints: Path | None = None
    late: Deadline = NEVER

    @property
    def point(self) -> type[CentralPoint]:
        return CentralPoint

    def groups(self, points: Sequence[CentralPoint]) -> list[list[CentralPoint]]:
        """Points of softmax regression with the same batches, up to `TOGETHER` of them; each other point by itself."""
        ordered = sorted(points, key=lambda p: (p.mechanism, p.epsilon))
        return grouped(ordered, lambda point: point.batches if self._together(point) else None, most=TOGETHER)

    def train(self, points: Sequence[CentralPoint], rows: Sequence[Row] = ()) -> list[Row]:
        """A row for each of `points`, which share their `batches`; σ of a setup that is in `rows` is that of the row.

        The seed decides the initial model, the batches and the noise, so that mechanisms are compared on the same batches.
        `seconds` is processor time, in equal parts.
        """
        torch.set_num_threads(1)
        started = time.process_time()
        if len({point.batches for point in points}) > 1:
            raise ValueError(f"points that are trained together must have the same batches, got {points}")
        point = points[0]
        task, data = get_task(point.task, model=point.model or None, data_dir=self.data_dir), self.load(point)
        check_steps(len(data.train), point.steps)
        wanted = {one.setup for one in points}
        before = {setup: {name: row[name] for name in CLAIM} for row in rows if (setup := _setup_of(row)) in wanted}
        claims = {setup: before.get(setup) or claim(setup) for setup in dict.fromkeys(one.setup for one in points)}
        plans = [plan_of(one, claims[one.setup]) for one in points]
        if point.normalise:
            if not _softmax(point.task, point.model or None, self.data_dir):
                raise ValueError(
                    f"normalise must be 0 for {point.model}: only the inputs of softmax regression are normalised"
                )
            data = normalised(data, point)
        judged = data.validation if point.split == "validation" else data.test
        model = task.model(point.seed)
        accuracies = []
        if self._together(point):
            runs = [(plan, one.descent) for plan, one in zip(plans, points, strict=True)]
            key = NoiseKey.simulation(point.seed)
            for flat in train_softmax(model, data.train, runs, key=key, steps=point.steps):
                nn.utils.vector_to_parameters(flat, model.parameters())
                accuracies.append(evaluate(model, task, judged, batch=10_000))
        else:
            for one, plan in zip(points, plans, strict=True):
                trained = train_engine(
                    one, task, data.train, plan, physical_batch=self.physical_batch, late=self.late,
                    checkpoint=None if self.checkpoints is None else self.checkpoints / _checkpoint_name(one),
                )  # fmt: skip
                accuracies.append(evaluate(trained, task, judged))
        seconds = round((time.process_time() - started) / len(points), 4)
        return [
            {**asdict(one), **claims[one.setup], "accuracy": round(accuracy, 6), "seconds": seconds}
            for one, accuracy in zip(points, accuracies, strict=True)
        ]

    def load(self, point: CentralPoint) -> Data:
        """The data of `point`, read once."""
        return _load(point.task, point.model or None, self.data_dir)

    def _together(self, point: CentralPoint) -> bool:
        plain = not point.average and not point.augmentations
        return plain and _softmax(point.task, point.model or None, self.data_dir)


def _checkpoint_name(point: CentralPoint) -> str:
    return f"{hashlib.sha256(identity(point).encode()).hexdigest()[:24]}.pt"


def check_steps(examples: int, steps: int) -> None:
    """Raise ValueError unless batches of one size, but for the last, make exactly `steps` of `examples`."""
    batch = -(-examples // steps)
    if -(-examples // batch) != steps:
        raise ValueError(f"{examples} examples cannot make {steps} steps; {-(-examples // batch)} steps would do")


def claim(setup: Setup) -> dict[str, Any]:
    """σ of `setup`, and what its ε means."""
    participation, mechanism, mean, epsilon = setup.participation(), mechanism_of(setup), None, setup.epsilon
    if setup.normalise:
        mean, epsilon = mean_plan(epsilon=epsilon, delta=setup.delta, part=setup.normalise)
    guarantee = calibrate(mechanism, participation, epsilon=epsilon, delta=setup.delta)
    described = guarantee.to_description()
    found = {name: described[name] for name in CLAIM}
    if mean is not None:
        runs = [
            PastRun(mechanism=one, participation=when, noise_multiplier=sigma)
            for one, when, sigma in (
                (mean.mechanism, mean.participation, mean.noise_multiplier),
                (mechanism, participation, guarantee.noise_multiplier),
            )
        ]
        joint = compose(runs, delta=setup.delta)
        assert joint.epsilon <= setup.epsilon
        found["method"] = (
            f"{joint.proof.method}, the inputs' normalisation ({setup.normalise:g} of the budget) and training"
        )
    return found


def normalised(data: Data, point: CentralPoint) -> Data:
    """The inputs of `data`, flat: of norm 1, less their private mean, and each channel over its private deviation.

    All that is released of the training examples is one noised mean, of rows of a picture and its channels' square norms
    together. Inputs of shape (examples, channels, …) are scaled, others are centred only. (Tramèr and Boneh, "Differentially
    Private Learning Needs Better Features (or Much More Data)", 2021, arXiv:2011.11660.)
    """
    shape = data.train.inputs.shape[1:]
    channels = shape[0] if len(shape) > 1 and shape[0] > 1 else 0

    def unit(part: Examples) -> Tensor:
        return functional.normalize(part.inputs.flatten(1), dim=1)

    rows = unit(data.train)
    squares = rows.view(len(rows), channels, -1).square().sum(2) if channels else rows[:, :0]
    found = private_mean(
        torch.cat([rows, squares], dim=1).numpy(), epsilon=point.epsilon, delta=point.delta, part=point.normalise,
        key=NoiseKey.simulation(point.seed),
    )  # fmt: skip
    released = torch.from_numpy(found.mean).float()
    mean, scale = released[: rows.shape[1]], torch.ones(rows.shape[1])
    if channels:
        square = released[rows.shape[1] :]
        # Rows were divided by their norm, from 1 to √2. The squares of a row add up to 1: their sum is the mean of 1/norm.
        left = square.sum().clamp(0.5**0.5, 1)
        mean, square = mean / left, square / left
        variance = square - mean.view(channels, -1).square().sum(1)
        variance = variance.clamp(min=found.plan.stddev / len(rows))  # as large as the noise in it
        scale = variance.rsqrt().repeat_interleave(rows.shape[1] // channels)
    return Data(
        *(Examples((unit(part) - mean) * scale, part.targets) for part in (data.train, data.validation, data.test))
    )


def mechanism_of(setup: Setup) -> Mechanism:
    """The mechanism of `setup`; the same object for those that differ by their budget alone."""
    return _made(setup.mechanism, setup.participation())


def plan_of(point: CentralPoint, claimed: Mapping[str, Any]) -> Plan:
    """What `point` releases, with the σ of its claim."""
    return Plan(
        mechanism=mechanism_of(point.setup),
        participation=point.setup.participation(),
        clip_norm=point.clip_norm,
        noise_multiplier=claimed["noise_multiplier"],
        delta=point.delta,
    )


def train_engine(
    point: CentralPoint,
    task: Task,
    train: Examples,
    plan: Plan,
    *,
    physical_batch: int,
    checkpoint: Path | None = None,
    late: Callable[[], bool] = lambda: False,
) -> nn.Module:
    """The model that `CorrelatedPrivacyEngine` trains as `point` says, on a GPU if there is one.

    After each epoch but the last the file `checkpoint` is written, from which the next call goes on; if it is `late` then,
    PausedError is raised.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = task.model(point.seed).to(device)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, scheduler = descent(point.descent, parameters, plan.participation.rounds)
    average = average_of(model, point.average)
    engine = CorrelatedPrivacyEngine(NoiseKey.simulation(point.seed))
    module, private, loss, batches = engine.make_private(
        module=model,
        optimizer=optimizer,
        criterion=_PerExample(task.loss),
        data_loader=DataLoader(TensorDataset(train.inputs, train.targets), batch_size=-(-len(train) // point.steps)),
        plan=plan,
        grad_sample_mode="ghost",
        augmentation_multiplicity=max(1, point.augmentations),
    )
    rounds = engine.accountant
    assert rounds is not None
    inputs, targets = train.inputs.to(device), train.targets.to(device)
    module.train()
    if checkpoint is not None and checkpoint.exists():
        state = engine.load_checkpoint(path=checkpoint, module=module, optimizer=private)
        scheduler.load_state_dict(state["schedule"])
        average.load_state_dict(state["average"])
    for epoch in range(rounds.released // point.steps + 1, point.epochs + 1):
        place = np.random.SeedSequence([point.seed, epoch])
        manager = BatchMemoryManager(data_loader=batches, max_physical_batch_size=physical_batch, optimizer=private)
        with manager as physical:
            # The rows by index: the loader would collate them one by one.
            for rows in physical.batch_sampler:
                private.zero_grad()
                [here] = place.spawn(1)
                drawn = seeded(
                    int(here.generate_state(1)[0]), partial(task.augmented, inputs[rows], point.augmentations)
                )
                loss(module(drawn), targets[rows].repeat_interleave(max(1, point.augmentations))).backward()  # type: ignore[no-untyped-call]
                before = rounds.released
                private.step()
                if rounds.released > before:  # the last part of a batch
                    scheduler.step()
                    average.update_parameters(model)
        if checkpoint is not None and epoch < point.epochs:
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            state = {"schedule": scheduler.state_dict(), "average": average.state_dict()}
            with atomic_write(checkpoint) as part:
                engine.save_checkpoint(path=part, module=module, optimizer=private, checkpoint_dict=state)
            if late():
                raise PausedError(f"{epoch} of {point.epochs} epochs are done")
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return average.module


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


def _setup_of(row: Row) -> Setup:
    return Setup(**{name: row[name] for name in Setup.__dataclass_fields__ if name in row})


@lru_cache(maxsize=1)
def _load(task: str, model: str | None, data_dir: str | None) -> Data:
    return get_task(task, model=model, data_dir=data_dir).load()


@lru_cache(maxsize=64)
def _made(mechanism: str, participation: Participation) -> Mechanism:
    return catalogue.mechanism(mechanism, participation)


@lru_cache
def _softmax(task: str, model: str | None, data_dir: str | None) -> bool:
    made = get_task(task, model=model, data_dir=data_dir)
    return is_softmax(made.model(0), made.loss)
