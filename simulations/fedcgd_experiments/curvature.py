"""`python -m fedcgd_experiments.curvature`: does noise that is fitted to a model's curvature train better models?

Five kinds of noise at the same budgets, on the same batches: independent, λ-CGD with the λ of the practical rule and with the λ
fitted to a spectrum, banded matrices that are best for prefix sums, and those fitted to the spectrum (NoiseCurve). The fitted
ones depend on the learning rate, so each is found again for each rate that is tried. The spectrum is that of `fedcgd curve`.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from scipy.stats import permutation_test, ttest_rel
from torch import nn

from fedcgd.accounting.selection import select_lambda
from fedcgd.cli.options import takes
from fedcgd.cli.report import explained_errors
from fedcgd.curvature import Spectrum
from fedcgd.curvature.dominance import Reference
from fedcgd.curvature.fitted import lambda_cgd
from fedcgd.curvature.noise_curve import BARRIER, noise_curve
from fedcgd.curvature.public import pretrained
from fedcgd.curvature.quadratic import Quadratic
from fedcgd.optimisation.catalogue import from_description, write_mechanism
from fedcgd.plan import Plan
from fedcgd_experiments.claims import claims_of_runs
from fedcgd_experiments.experiment import TEST_SEEDS, Point, Record, Setup, calibrate_setup, train_engine
from fedcgd_experiments.significance import holm
from fedcgd_experiments.sweep import ResultsFile, best_rates_of, here, sweep, to_point
from fedcgd_simulations.public import public_examples
from fedcgd_simulations.task import Data, Task
from fedcgd_simulations.tasks import get_task

DP_SGD, PRACTICAL, FITTED_LAMBDA = "dp-sgd", "λ-CGD, practical λ", "λ-CGD, fitted λ"
BAND_MF, NOISE_CURVE = "band-mf", "NoiseCurve"
ARMS = (DP_SGD, PRACTICAL, FITTED_LAMBDA, BAND_MF, NOISE_CURVE)
FILES = {FITTED_LAMBDA: "lambda", NOISE_CURVE: "noise-curve"}

COMPARISONS = (
    (NOISE_CURVE, BAND_MF),
    (FITTED_LAMBDA, PRACTICAL),
    (NOISE_CURVE, DP_SGD),
    (FITTED_LAMBDA, DP_SGD),
    (BAND_MF, DP_SGD),
    (NOISE_CURVE, FITTED_LAMBDA),
)
"""(what should be better, than what): those whose p-values are reported."""

PRIVATE = "private examples, for the experiment alone: covered by no ε"

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
console = Console()


@dataclass(frozen=True, kw_only=True)
class Design:
    """What is common to all runs: the task, the batches, the bands, and what the fitted noise is fitted to."""

    task: str
    model: str
    steps: int
    epochs: int
    bands: int
    clip_norm: float
    delta: float
    spectrum: Spectrum
    folder: Path
    """Where fitted mechanisms are kept: found once for each rate, since the budget has no part in them."""
    barrier: float = BARRIER
    """Of NoiseCurve."""

    def digest(self, arm: str) -> str:
        """Names all that `arm`'s mechanisms are fitted to, but for the rate: a file is of no other design than its name says."""
        fitted_to = [self.spectrum.digest, self.steps, self.epochs, self.bands]
        if arm == NOISE_CURVE:
            fitted_to.append(self.barrier)
        return hashlib.sha256(json.dumps(fitted_to).encode()).hexdigest()[:12]

    def point(self, arm: str, epsilon: float, rate: float, seed: int) -> Point:
        """A run of `arm` at this budget and learning rate that is judged by validation examples."""
        setup = Setup(mechanism="dp-sgd", epsilon=epsilon, delta=self.delta, steps=self.steps, epochs=self.epochs)
        setup = replace(setup, mechanism=self.spelling(arm, setup, rate))
        return Point(
            setup=setup, task=self.task, model=self.model, clip_norm=self.clip_norm, learning_rate=rate, seed=seed
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
            quadratic = Quadratic(tamed(self.spectrum, rate), rate)
            who = setup.participation()
            if arm == FITTED_LAMBDA:
                write_mechanism(lambda_cgd(who, quadratic=quadratic), path)
            else:
                write_mechanism(noise_curve(self.bands, who, quadratic=quadratic, barrier=self.barrier), path)
        return f"file:{path}"


@dataclass(frozen=True, kw_only=True)
class DesignOptions:
    """A design, as it is said on the command line."""

    spectrum: Annotated[Path, typer.Option(help="what `fedcgd curve` measured")]
    folder: Annotated[Path, typer.Option(help="of the fitted mechanisms")]
    task: Annotated[str, typer.Option()] = "digits"
    model: Annotated[str, typer.Option()] = "tanh-cnn"
    batch: Annotated[int, typer.Option(min=1)] = 60
    epochs: Annotated[int, typer.Option(min=1)] = 10
    bands: Annotated[int, typer.Option(min=1, help="of band-mf and NoiseCurve")] = 16
    clip_norm: Annotated[float, typer.Option()] = 1.0
    delta: Annotated[float, typer.Option()] = 1e-5
    barrier: Annotated[float, typer.Option(min=0, help="against large noise in a round, of NoiseCurve")] = BARRIER

    def get_task(self) -> Task:
        """The task, with its model."""
        return get_task(self.task, model=self.model)

    def design(self, data: Data) -> Design:
        """The design, in which an epoch of `data` is as many steps as it has batches."""
        return Design(
            task=self.task, model=self.model, steps=-(-len(data.train) // self.batch), epochs=self.epochs,
            bands=self.bands, clip_norm=self.clip_norm, delta=self.delta, spectrum=Spectrum.load(self.spectrum),
            folder=self.folder, barrier=self.barrier,
        )  # fmt: skip


def tamed(spectrum: Spectrum, rate: float) -> Spectrum:
    """`spectrum` with what is above 1/η put at 1/η: a clipped step does not overshoot as a step down a quadratic would."""
    values = np.minimum(np.array(spectrum.eigenvalues), 1 / rate)
    return Spectrum.of(values, np.array(spectrum.counts), measured_on=spectrum.measured_on)


def arm_of(setup: Setup) -> str:
    """What a record's setup is a run of."""
    if setup.mechanism.startswith("file:"):
        return next(arm for arm, name in FILES.items() if f"-{name}-rate-" in Path(setup.mechanism).name)
    return {"dp-sgd": DP_SGD, "band-mf": BAND_MF, "lambda-cgd": PRACTICAL}[setup.name]


def check_one_design(points: Iterable[Point]) -> None:
    """Raise ValueError if an arm is there at one budget in two designs: what is tuned in one would be judged in the other."""
    found: dict[tuple[str, float], tuple[object, ...]] = {}
    for point in points:
        setup = point.setup
        noise = Path(setup.mechanism).name.partition("-rate-")[0]  # in a file, with the digest of what it was fitted to
        same = (point.task, point.model, point.clip_norm, replace(setup, mechanism="dp-sgd"), noise)
        before = found.setdefault((arm_of(setup), setup.epsilon), same)
        if same != before:
            raise ValueError(
                f"runs of {arm_of(setup)} at ε = {setup.epsilon:g} are of two designs (model, clip norm, δ, steps, epochs, bands "
                "or spectrum): keep the runs of each in a file of its own"
            )


def best_rates(runs: Iterable[Record]) -> dict[tuple[str, float], float]:
    """(arm, budget) → the learning rate of highest mean validation accuracy; of equals the smaller.

    Raises ValueError as `check_one_design` does.
    """
    runs = list(runs)
    check_one_design(map(to_point, runs))
    return best_rates_of(runs, lambda setup: (arm_of(setup), setup.epsilon))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Test accuracies of two arms at one budget, on the same seeds: means, and p-values of `better` being no better."""

    epsilon: float
    better: str
    than: str
    seeds: int
    difference: float
    p_permutation: float
    """Of all ways to deal the accuracies out to the two arms, the share with a difference of the means at least as large."""
    p_paired: float
    """Of the paired t-test, one-sided."""
    corrected: float
    """`p_permutation` after Holm's correction over all comparisons."""


def tuned(runs: Iterable[Record]) -> dict[tuple[str, float], float]:
    """(arm, budget) → the mean accuracy on validation examples at the learning rate that is best on them."""
    runs = list(runs)
    rates = best_rates(runs)
    found: dict[tuple[str, float], list[float]] = defaultdict(list)
    for record in runs:
        point = to_point(record)
        key = (arm_of(point.setup), point.setup.epsilon)
        if point.split == "validation" and point.learning_rate == rates[key]:
            found[key].append(record["accuracy"])
    return {key: fmean(values) for key, values in found.items()}


def judged(runs: Iterable[Record]) -> dict[tuple[str, float], dict[int, float]]:
    """(arm, budget) → seed → accuracy on the test examples, at the learning rate that was best on validation."""
    runs = list(runs)
    rates = best_rates(runs)
    found: dict[tuple[str, float], dict[int, float]] = defaultdict(dict)
    for record in runs:
        point = to_point(record)
        key = (arm_of(point.setup), point.setup.epsilon)
        if point.split == "test" and point.learning_rate == rates.get(key):
            found[key][point.seed] = record["accuracy"]
    return dict(found)


def compare(runs: Iterable[Record]) -> list[Comparison]:
    """Every comparison of `COMPARISONS` at every budget for which both arms have the same test seeds, at least two.

    The permutation test is the exact one of two samples (appendix A.3 of Gu et al., 2026, arXiv:2510.05416): with ten seeds each
    there are 184,756 ways, and 1/184,756 is the least that p can be.
    """
    accuracies, found = judged(runs), []
    for epsilon in sorted({epsilon for _, epsilon in accuracies}):
        for better, than in COMPARISONS:
            first, second = accuracies.get((better, epsilon), {}), accuracies.get((than, epsilon), {})
            seeds = sorted(first.keys() & second.keys())
            if len(seeds) < 2:
                continue
            x, y = (np.array([part[seed] for seed in seeds]) for part in (first, second))
            test = permutation_test(
                (x, y), lambda a, b, axis: a.mean(axis) - b.mean(axis), vectorized=True,
                n_resamples=10**6, alternative="greater",
            )  # fmt: skip
            found.append(
                Comparison(
                    epsilon=epsilon,
                    better=better,
                    than=than,
                    seeds=len(seeds),
                    difference=float((x - y).mean()),
                    p_permutation=float(test.pvalue),
                    p_paired=float(ttest_rel(x, y, alternative="greater").pvalue),
                    corrected=math.nan,
                )
            )
    corrected = holm([row.p_permutation for row in found])
    return [replace(row, corrected=p) for row, p in zip(found, corrected, strict=True)]


@app.command("run")
@takes(DesignOptions)
@explained_errors()
def run_command(
    common: DesignOptions,
    output: Annotated[Path, typer.Option(help="JSON lines; what is there already is not run again")],
    arm: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(ARMS)}; all if not given")] = None,
    epsilon: Annotated[list[float] | None, typer.Option()] = None,
    learning_rate: Annotated[list[float] | None, typer.Option()] = None,
    tuning_seeds: Annotated[int, typer.Option(min=1)] = 2,
    seeds: Annotated[int, typer.Option(min=0, help="for the test; 0: only tune")] = 10,
) -> None:
    """Tune the learning rate of each kind of noise at each ε by validation examples, then judge it by the test's."""
    design = common.design(common.get_task().load())
    results = ResultsFile(output)
    failures: list[str] = []
    for budget, each in product(epsilon or [1.0, 2.0, 4.0, 8.0], arm or ARMS):
        rates = learning_rate or [0.0625, 0.125, 0.25, 0.5, 1.0, 2.0]
        points = [design.point(each, budget, rate, seed) for rate in rates for seed in range(tuning_seeds)]
        check_one_design([*map(to_point, results.runs().values()), *points])
        failed = sweep(points, results, here, data_dir=None, console=console)
        if not failed:
            best = best_rates(results.runs().values())[each, budget]
            chosen = design.point(each, budget, best, 0)
            tests = [replace(chosen, seed=TEST_SEEDS + seed, split="test") for seed in range(seeds)]
            failed = sweep(tests, results, here, data_dir=None, console=console)
        failures += failed
    for line in failures:
        console.print(line, style="red", markup=False)
    if failures:
        raise typer.Exit(1)


@app.command("certificate")
@takes(DesignOptions)
@explained_errors()
def certificate_command(
    common: DesignOptions,
    output: Annotated[Path, typer.Option(help="JSON lines, appended")],
    arm: Annotated[str, typer.Option(help=f"one of {', '.join(ARMS)}")] = NOISE_CURVE,
    epsilon: Annotated[float, typer.Option()] = 8.0,
    learning_rate: Annotated[float, typer.Option()] = 0.5,
    examples: Annotated[int, typer.Option(min=1, help="whose Hessian is looked at")] = 180,
    eigenvalues: Annotated[int, typer.Option(min=1, help="of the bound")] = 10,
    seed: Annotated[int, typer.Option(min=0, max=TEST_SEEDS - 1)] = 0,
    every: Annotated[int, typer.Option(min=1, help="steps between two looks")] = 21,
    also_private: Annotated[
        bool, typer.Option("--also-private", help="look at private examples too: for experiments alone, no ε covers it")
    ] = False,
) -> None:
    """Whether the Hessian that noise was fitted to bounds those along a run: ρ, and the ratio of eigenvalues.

    The bound is of public examples at the model that has learned random labels, as `fedcgd curve` has it. The Hessians are of the
    same examples with labels that the model in training gives them.
    """
    whole = common.get_task()
    data = whole.load()
    design = common.design(data)
    point = design.point(arm, epsilon, learning_rate, seed)
    calibration = calibrate_setup(point.setup)
    facts = design.spectrum.measured_on
    public = public_examples(design.task, model=design.model, public=facts["public"], examples=examples)
    unsure = pretrained(
        public, epochs=facts["pretraining_epochs"], learning_rate=facts["pretraining_rate"], seed=facts["seed"]
    )
    bound = Reference.of(unsure.hessian(clip_norm=facts["clip_norm"]), eigenvalues=eigenvalues)
    plan = Plan(
        mechanism=from_description(calibration["mechanism"]), participation=point.setup.participation(),
        clip_norm=design.clip_norm, noise_multiplier=calibration["noise_multiplier"], delta=design.delta,
    )  # fmt: skip
    results = ResultsFile(output)

    def look(step: int, trained: nn.Module) -> None:
        if step % every:
            return
        looked = {"public": public.at(trained.state_dict()).self_labelled()}
        if also_private:
            part = data.train.take(np.arange(min(examples, len(data.train))))
            private = replace(public, inputs=part.inputs, targets=part.targets, classes=None)
            looked[PRIVATE] = private.at(trained.state_dict())
        for on, those in looked.items():
            hessian = those.hessian(clip_norm=facts["clip_norm"])
            found = {"ratio": bound.eigenvalue_ratio(hessian), "rho": bound.dominance(hessian, warn=False)}
            record = {"kind": "certificate", "arm": arm, "point": asdict(point), "step": step, "on": on}
            results.append(record | {"eigenvalues": eigenvalues} | found)
            note = "" if found["rho"] <= 1 else "; the bound does not hold"
            console.print(f"step {step}, {on}: ratio {found['ratio']:.2f}, ρ {found['rho']:.2f}{note}")

    train_engine(point, whole, data.train, plan, physical_batch=512, watch=look)


@app.command("tuned")
@explained_errors()
def tuned_command(results: Annotated[list[Path], typer.Argument(help="files that `run` wrote", exists=True)]) -> None:
    """Validation accuracy of each kind of noise of each file at its best η: all that a choice between designs may look at."""
    found = {path: tuned(ResultsFile(path).runs().values()) for path in results}
    epsilons = sorted({epsilon for accuracies in found.values() for _, epsilon in accuracies})
    table = Table("file", "noise", *(f"ε = {epsilon:g}" for epsilon in epsilons), "mean")
    for path, accuracies in found.items():
        for each in [arm for arm in ARMS if any(arm == of for of, _ in accuracies)]:
            row = [accuracies.get((each, epsilon), math.nan) for epsilon in epsilons]
            table.add_row(path.name, each, *(f"{100 * value:.1f}" for value in [*row, fmean(row)]))
    console.print(table)


@app.command("compare")
@explained_errors()
def compare_command(results: Annotated[list[Path], typer.Argument(help="files that `run` wrote", exists=True)]) -> None:
    """Mean test accuracy of each kind of noise at each ε, and the tests of which is better."""
    files = [ResultsFile(path) for path in results]
    runs = [record for file in files for record in file.runs().values()]
    calibrations = {name: record for file in files for name, record in file.calibrations().items()}
    for task in dict.fromkeys(str(record["point"]["task"]) for record in runs):
        own = [record for record in runs if record["point"]["task"] == task]
        accuracies, rates = judged(own), best_rates(own)
        epsilons = sorted({epsilon for _, epsilon in accuracies})
        table = Table(
            "noise",
            *(f"ε = {epsilon:g}" for epsilon in epsilons),
            title=f"{task}: test accuracy, ± standard deviation, at the tuned η",
            caption=claims_of_runs(own, calibrations),
        )
        for each in ARMS:
            cells = [
                (list(accuracies.get((each, epsilon), {}).values()), rates.get((each, epsilon))) for epsilon in epsilons
            ]
            table.add_row(
                each,
                *(
                    f"{100 * fmean(v):.1f} ± {100 * stdev(v):.1f} (η {rate:g})" if len(v) > 1 else "–"
                    for v, rate in cells
                ),
            )
        console.print(table)
        table = Table("ε", "noise", "against", "difference", "p (permutation)", "Holm", "p (paired t)", "seeds")
        for row in compare(own):
            table.add_row(
                f"{row.epsilon:g}", row.better, row.than, f"{100 * row.difference:+.2f}", f"{row.p_permutation:.2g}",
                f"{row.corrected:.2g}", f"{row.p_paired:.2g}", str(row.seeds),
            )  # fmt: skip
        console.print(table)


if __name__ == "__main__":
    app()
