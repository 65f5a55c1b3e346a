"""What the runs of the curvature experiment have in common, and each one's noise: its mechanism at a budget and learning rate."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from fedcgd.accounting.selection import select_lambda
from fedcgd.cli.declare import Option
from fedcgd.optimisation.catalogue import MechanismSpec, write_mechanism
from fedcgd.optimisation.fitted import lambda_cgd
from fedcgd.optimisation.noise_curve import BARRIER, noise_curve
from fedcgd.quadratic import Quadratic, Spectrum
from fedcgd_experiments.point import TEST_SEEDS, CentralPoint, Setup
from fedcgd_experiments.study import Study, Values
from fedcgd_simulations.task import Data, Task
from fedcgd_simulations.tasks import get_task

DP_SGD, PRACTICAL, FITTED_LAMBDA = "dp-sgd", "λ-CGD, practical λ", "λ-CGD, fitted λ"
BAND_MF, NOISE_CURVE = "band-mf", "NoiseCurve"
ARMS = (DP_SGD, PRACTICAL, FITTED_LAMBDA, BAND_MF, NOISE_CURVE)
FILES = {FITTED_LAMBDA: "lambda", NOISE_CURVE: "noise-curve"}


@dataclass(frozen=True, kw_only=True)
class Design:
    """What is common to all runs, as it is said on the command line: data, batches, bands, what noise is fitted to."""

    spectrum: Annotated[Path, Option(help="what `fedcgd curve` measured")]
    folder: Annotated[Path, Option(help="of the fitted mechanisms, found once for each rate: the budget has no part")]
    task: Annotated[str, Option()] = "digits"
    model: Annotated[str, Option()] = "tanh-cnn"
    batch: Annotated[int, Option(min=1)] = 60
    epochs: Annotated[int, Option(min=1)] = 10
    bands: Annotated[int, Option(min=1, help="of band-mf and NoiseCurve")] = 16
    clip_norm: Annotated[float, Option()] = 1.0
    delta: Annotated[float, Option()] = 1e-5
    barrier: Annotated[float, Option(min=0, help="against large noise in a round, of NoiseCurve")] = BARRIER

    @cached_property
    def fitted_to(self) -> Spectrum:
        """The spectrum."""
        return Spectrum.load(self.spectrum)

    @cached_property
    def loaded(self) -> tuple[Task, Data]:
        """The task, with its model, and its data."""
        task = get_task(self.task, model=self.model)
        return task, task.load()

    @property
    def steps(self) -> int:
        """An epoch is as many steps as the data has batches."""
        return -(-len(self.loaded[1].train) // self.batch)

    def digest(self, arm: str) -> str:
        """Names all that `arm`'s mechanisms are fitted to, but for the rate: a file is of no other design than its name says."""
        fitted_to = [self.fitted_to.digest, self.steps, self.epochs, self.bands]
        if arm == NOISE_CURVE:
            fitted_to.append(self.barrier)
        return hashlib.sha256(json.dumps(fitted_to).encode()).hexdigest()[:12]

    def study(
        self, arms: Sequence[str], epsilons: Sequence[float], rates: Sequence[float], *, tuning_seeds: int, seeds: int
    ) -> Study:
        """Every arm with every rate on all tuning seeds, and the best of each tested."""
        return Study(
            name=f"{self.task}, fitted noise",
            title="Fitted noise",
            make=partial(_point, self),
            settings=tuple({"epsilon": epsilon, "epochs": self.epochs} for epsilon in epsilons),
            axes={"learning_rate": tuple(rates)},
            arms={arm: {"arm": (arm,)} for arm in arms},
            candidates=len(rates),
            finalists=len(rates),
            tuning=tuple(range(tuning_seeds)),
            tests=tuple(range(TEST_SEEDS, TEST_SEEDS + seeds)),
            baselines={},
            work="epochs",
            unit="epochs",
        )

    def point(self, arm: str, epsilon: float, rate: float, seed: int, split: str = "validation") -> CentralPoint:
        """A run of `arm` at this budget and learning rate."""
        setup = Setup(mechanism="dp-sgd", epsilon=epsilon, delta=self.delta, steps=self.steps, epochs=self.epochs)
        made: dict[str, Any] = {**vars(setup), "mechanism": self.spelling(arm, setup, rate), "split": split}
        return CentralPoint(
            **made, task=self.task, model=self.model, clip_norm=self.clip_norm, learning_rate=rate, seed=seed
        )

    def spelling(self, arm: str, setup: Setup, rate: float) -> str:
        """How the mechanism of `arm` is written for this budget and learning rate."""
        if arm == PRACTICAL:
            chosen = select_lambda(
                setup.participation(), objective="practical", epsilon=setup.epsilon, delta=setup.delta
            )
            return f"lambda-cgd:{chosen.lam:.4g}"
        if arm not in ARMS:
            raise ValueError(f"the kinds of noise are {', '.join(ARMS)}, got {arm!r}")
        if arm not in FILES:
            return {DP_SGD: "dp-sgd", BAND_MF: f"band-mf:{self.bands}"}[arm]
        path = self.folder / f"{self.task}-{self.digest(arm)}-{FILES[arm]}-rate-{rate!r}.json"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            quadratic = Quadratic(tamed(self.fitted_to, rate), rate)
            who = setup.participation()
            if arm == FITTED_LAMBDA:
                write_mechanism(lambda_cgd(who, quadratic=quadratic), path)
            else:
                write_mechanism(noise_curve(self.bands, who, quadratic=quadratic, barrier=self.barrier), path)
        return f"file:{path}"


def _point(design: Design, values: Values) -> CentralPoint:
    arm, epsilon, rate = values["arm"], values["epsilon"], values["learning_rate"]
    return design.point(arm, epsilon, rate, values["seed"], values["split"])


def tamed(spectrum: Spectrum, rate: float) -> Spectrum:
    """`spectrum` with what is above 1/η put at 1/η: a clipped step does not overshoot as a step down a quadratic would."""
    values = np.minimum(np.array(spectrum.eigenvalues), 1 / rate)
    return Spectrum.from_eigenvalues(values, np.array(spectrum.counts), measured_on=spectrum.measured_on)


def arm_of(mechanism: str) -> str:
    """The arm whose mechanism it is."""
    if mechanism.startswith("file:"):
        return next(arm for arm, name in FILES.items() if f"-{name}-rate-" in Path(mechanism).name)
    return {"dp-sgd": DP_SGD, "band-mf": BAND_MF, "lambda-cgd": PRACTICAL}[MechanismSpec.parse(mechanism).row.name]


def check_one_design(points: Iterable[CentralPoint]) -> None:
    """Raise ValueError if an arm is there at one budget in two designs: what is tuned in one would be judged in the other."""
    found: dict[tuple[str, float], tuple[object, ...]] = {}
    for point in points:
        noise = Path(point.mechanism).name.partition("-rate-")[0]  # in a file, with the digest of what it was fitted to
        same = (point.task, point.model, point.clip_norm, replace(point.setup, mechanism="dp-sgd"), noise)
        before = found.setdefault((arm_of(point.mechanism), point.epsilon), same)
        if same != before:
            raise ValueError(
                f"runs of {arm_of(point.mechanism)} at ε = {point.epsilon:g} are of two designs (model, clip norm, δ, steps, "
                "epochs, bands or spectrum): keep the runs of each in a file of its own"
            )
