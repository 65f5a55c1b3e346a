"""The studies whose results the pages show: what each tries, of which data, with which seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from fedcgd.accounting.selection import select_lambda
from fedcgd.mechanisms.schedule import Schedule, scheduled_workload
from fedcgd_experiments.people_point import PeoplePoint
from fedcgd_experiments.point import TEST_SEEDS, CentralPoint, Setup
from fedcgd_experiments.study import Axis, Log, Secret, Study, Values

BATCHED: Mapping[str, Axis] = {"steps": (3, 7, 21)}
CONSTANT: Mapping[str, Axis] = {"schedule": ("constant",), "momentum": (0.0,)}
SELECTED = "lambda-cgd:selected"
"""λ of the default rule for the run, with its schedule and momentum: no data is looked at."""

BASELINES: Mapping[Secret, tuple[str, ...]] = {
    "nothing": ("DP-SGD", "DP-SGD, full batch"),
    "sampling": ("DP-SGD, Poisson", "DP-SGD, full batch"),
}
"""By what can be secret; full batches need no sampling."""

HEADLINES = ("λ-CGD, default λ", "λ-CGD, λ = 0.9", "λ-CGD, b-min-sep", "λ-CGD, Balls-in-Bins")
"""The arms of the verdict: of each kind of secret, the first that a study has."""

LEARNING: Mapping[str, Axis] = {
    "schedule": ("constant", "linear"),
    "momentum": (0.0, 0.9),
    "clip_norm": (0.5, 1.0, 2.0),
}

ARMS: Mapping[str, Mapping[str, Axis]] = {
    "DP-SGD": {"mechanism": ("dp-sgd",), **BATCHED},
    "DP-SGD, full batch": {"mechanism": ("dp-sgd",), "steps": (1,)},
    "λ-CGD, λ = 0.7": {"mechanism": ("lambda-cgd:0.7",), **BATCHED},
    "λ-CGD, λ = 0.9": {"mechanism": ("lambda-cgd:0.9",), **BATCHED},
    "λ-CGD, default λ": {"mechanism": (SELECTED,), **BATCHED},
    "λ-CGD, default λ, constant rate": {"mechanism": (SELECTED,), **BATCHED, **CONSTANT},
    "BISR": {"mechanism": tuple(f"bisr:{bands}" for bands in (2, 4, 8, 16)), **BATCHED},
    "band-mf": {"mechanism": ("band-mf:2", "band-mf:{steps}"), **BATCHED},
    "DP-SGD, Poisson": {"mechanism": ("dp-sgd",), "sampling": ("poisson",), **BATCHED},
    "λ-CGD, Balls-in-Bins": {
        "mechanism": tuple(f"lambda-cgd:{lam}" for lam in (0.5, 0.7, 0.9)),
        "sampling": ("balls-in-bins",),
        **BATCHED,
    },
    "λ-CGD, b-min-sep": {
        "mechanism": tuple(f"lambda-cgd:{lam}" for lam in (0.5, 0.7, 0.9)),
        "sampling": ("b-min-sep",),
        **BATCHED,
    },
    "BISR, b-min-sep": {"mechanism": ("bisr:4",), "sampling": ("b-min-sep",), **BATCHED},
    "BSR, b-min-sep": {"mechanism": ("bsr:4",), "sampling": ("b-min-sep",), **BATCHED},
}


def central_point(values: Values, *, examples: int, **fixed: Any) -> CentralPoint:
    """A candidate as a point. `mechanism` may name `{steps}`, or be `SELECTED`.

    `progress` is rate·C/(1 − momentum)·rounds/`examples`: of equal values the noise moves the last model about equally far,
    whatever the batch, the epochs, the momentum and the clip norm C, so that one range of it serves all of them.
    """
    given = dict(values)
    rounds = given["steps"] * given["epochs"]
    rate = given.pop("progress") * examples * (1 - given["momentum"]) / (rounds * given["clip_norm"])
    mechanism = given["mechanism"].format(steps=given["steps"])
    if mechanism == SELECTED:
        learning = given["schedule"], given["momentum"]
        mechanism = f"lambda-cgd:{_selected(given['steps'], given['epochs'], given['epsilon'], *learning)}"
    made: dict[str, Any] = {**fixed, **given, "mechanism": mechanism, "learning_rate": float(f"{rate:.4g}")}
    return CentralPoint(**made)


@cache
def _selected(steps: int, epochs: int, epsilon: float, schedule: Schedule, momentum: float) -> float:
    setup = Setup(mechanism="dp-sgd", epsilon=epsilon, delta=1e-5, steps=steps, epochs=epochs)
    workload = scheduled_workload(schedule, steps * epochs, momentum=momentum)
    chosen = select_lambda(setup.participation(), objective="excess", epsilon=epsilon, delta=1e-5, workload=workload)
    return round(chosen.lam, 3)


def _settings(epsilons: tuple[float, ...], epochs: tuple[int, ...]) -> tuple[Values, ...]:
    return tuple({"epsilon": epsilon, "epochs": work} for epsilon in epsilons for work in epochs)


def _linear(
    name: str,
    title: str,
    *,
    examples: int,
    model: str = "",
    epochs: tuple[int, ...] = (5, 10, 20, 40),
) -> Study:
    """Softmax regression: 24 candidates, of which four are tuned with five seeds, and twenty seeds that test."""
    return Study(
        name=name,
        title=title,
        make=partial(central_point, examples=examples, task=name, model=model),
        settings=_settings((1.0, 2.0, 4.0, 8.0), epochs),
        axes={**LEARNING, "progress": Log(2**-6, 4.0)},
        arms=ARMS,
        candidates=24,
        finalists=4,
        tuning=tuple(range(5)),
        tests=_tested(20),
        baselines=BASELINES,
        work="epochs",
        unit="gradients of each example",
    )


def _tested(seeds: int) -> tuple[int, ...]:
    return tuple(range(TEST_SEEDS, TEST_SEEDS + seeds))


NETWORKED = (
    "DP-SGD",
    "DP-SGD, full batch",
    "λ-CGD, λ = 0.9",
    "DP-SGD, Poisson",
    "λ-CGD, Balls-in-Bins",
    "λ-CGD, b-min-sep",
)
"""The arms of networks."""
NETWORK_AXES: Mapping[str, Axis] = {**LEARNING, "clip_norm": (1.0,), "progress": Log(2**-7, 1.0)}


def _network(
    name: str,
    title: str,
    *,
    task: str,
    model: str,
    examples: int,
    epsilons: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0),
    epochs: int = 10,
    arms: Sequence[str] = NETWORKED,
) -> Study:
    """Every run goes through the engine: fewer arms, candidates and seeds."""
    batched: Mapping[str, Axis] = {"steps": (7, 21)}
    return Study(
        name=name,
        title=title,
        make=partial(central_point, examples=examples, task=task, model=model),
        settings=_settings(epsilons, (epochs,)),
        axes=NETWORK_AXES,
        arms={arm: {**ARMS[arm], **(batched if "full" not in arm else {})} for arm in arms},
        candidates=8,
        finalists=2,
        tuning=(0, 1),
        tests=_tested(10),
        baselines=BASELINES,
        work="epochs",
        unit="gradients of each example",
    )


def people_point(values: Values, **fixed: Any) -> PeoplePoint:
    """A candidate as a point: a person's `work` is its turns times the passes of each, of which there are about `passes`.

    `progress` is rate·C/(1 − momentum)·rounds·cohort/people, as that of `central_point` for one turn of a person.
    """
    given = dict(values)
    passes, work = given.pop("passes"), given.pop("work")
    turns = max(1, round(work / passes))
    rate = given.pop("progress") * (1 - given["momentum"]) / (turns * given["clip_norm"])
    made: dict[str, Any] = {
        **fixed, **given, "participations": turns, "local_epochs": work // turns, "learning_rate": float(f"{rate:.4g}")
    }  # fmt: skip
    return PeoplePoint(**made)


def _people(name: str, title: str, *, task: str, model: str, users: str) -> Study:
    return Study(
        name=name,
        title=title,
        make=partial(people_point, task=task, model=model, users=users),
        settings=tuple({"epsilon": epsilon, "work": work} for epsilon in (0.5, 1.0, 2.0) for work in (2,)),
        axes={
            **LEARNING,
            "cohort": (100, 250, 500),
            "passes": (1, 2, 5),
            "local_learning_rate": (3.0, 10.0, 30.0),
            "progress": Log(4.0, 256.0),
        },
        arms={
            "DP-FedAvg": {"mechanism": ("dp-sgd",)},
            "λ-CGD, λ = 0.5": {"mechanism": ("lambda-cgd:0.5",)},
            "λ-CGD, default λ": {"mechanism": ("lambda-cgd",)},
            "BISR": {"mechanism": ("bisr:2", "bisr:4", "bisr:8")},
            "DP-FedAvg, Poisson": {"mechanism": ("dp-sgd",), "sampling": ("poisson",)},
            "λ-CGD, Balls-in-Bins": {
                "mechanism": ("lambda-cgd:0.3", "lambda-cgd:0.5"), "sampling": ("balls-in-bins",)
            },
            "λ-CGD, b-min-sep": {"mechanism": ("lambda-cgd:0.3", "lambda-cgd:0.5"), "sampling": ("b-min-sep",)},
            "BISR, b-min-sep": {"mechanism": ("bisr:2", "bisr:4"), "sampling": ("b-min-sep",)},
            "BSR, b-min-sep": {"mechanism": ("bsr:2", "bsr:4"), "sampling": ("b-min-sep",)},
        },
        candidates=12,
        finalists=2,
        tuning=(0, 1, 2),
        tests=_tested(10),
        baselines={"nothing": ("DP-FedAvg",), "sampling": ("DP-FedAvg, Poisson",)},
        work="work",
        unit="passes of a person over its examples",
    )  # fmt: skip


FEW: Mapping[str, Any] = {"candidates": 12, "finalists": 2, "tuning": (0, 1), "tests": _tested(10)}
"""Of studies whose trainings take long."""

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        _linear("digits", "Digits, softmax", examples=1260),
        replace(
            _linear("tweets-3000", "3000 tweets, softmax", examples=3000, model="minilm"), tests=_tested(10)
        ),
        replace(
            _linear("fashion-mnist-6000", "Fashion-MNIST 6000, softmax", examples=6000, model="softmax", epochs=(10, 40)),
            **FEW,
        ),
        replace(
            _linear("fashion-mnist", "Fashion-MNIST, softmax", examples=55000, model="softmax", epochs=(10,)), **FEW
        ),
        _network("digits-cnn", "Digits, tanh-CNN", task="digits", model="tanh-cnn", examples=1260),
        replace(
            _network(
                "tweets-lstm", "Tweets, LSTM", task="tweets", model="lstm", examples=27933, epsilons=(1.0, 2.0),
                arms=[arm for arm in NETWORKED if arm != "λ-CGD, Balls-in-Bins"],
            ),
            tests=_tested(8),
        ),
        replace(
            _network(
                "tweets-3000-block", "3000 tweets, MiniLM's last block", task="tweets-3000", model="minilm-block",
                examples=3000, epsilons=(2.0,), epochs=5, arms=[arm for arm in NETWORKED if arm != "λ-CGD, Balls-in-Bins"],
            ),
            # What won nearly everywhere else: a training of these 1.8 million weights takes a minute.
            axes={**NETWORK_AXES, "schedule": ("linear",), "momentum": (0.9,)}, candidates=4, tests=_tested(4),
        ),
        _people(
            "people", "Fashion-MNIST, 2500 people", task="fashion-mnist", model="softmax", users="dirichlet:1:2500"
        ),
    )
}  # fmt: skip
