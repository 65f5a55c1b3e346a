"""A study: arms that are tuned with equal budgets, and then judged by test examples with seeds that tuned nothing.

Every arm has as many candidates at every setting, drawn from the same axes with the same random numbers: where two arms may
choose from the same values, their candidates have the same ones. All are tried with the first tuning seed, the best few with all
tuning seeds, and the best of these is tested.
"""

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any, Literal, Protocol

import numpy as np

from fedcgd.participation import scheme_of

Values = Mapping[str, Any]
"""What a candidate, or a setting, has of each axis."""


class Point(Protocol):
    """A training run of which everything but its result is known: a frozen dataclass with these two fields, among others."""

    @property
    def seed(self) -> int: ...

    @property
    def split(self) -> str: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Log:
    """An axis of all numbers from `low` to `high`, uniform on the logarithmic scale."""

    low: float
    high: float

    def at(self, uniform: float) -> float:
        """The number below which there is the part `uniform` of the axis."""
        return self.low * math.exp(uniform * math.log(self.high / self.low))


Axis = Log | Sequence[Any]

Secret = Literal["nothing", "sampling"]


def draw(axes: Mapping[str, Axis], count: int, seed: int) -> list[dict[str, Any]]:
    """`count` candidates, one in each of `count` equal parts of every axis, the parts of the axes paired at random.

    What is drawn for an axis depends on its name, `count` and `seed` alone, and so is the same for all arms that have it. (Latin
    hypercube sampling: McKay, Beckman and Conover, "A comparison of three methods for selecting values of input variables in the
    analysis of output from a computer code", 1979.)
    """
    columns = {}
    for name, axis in axes.items():
        random = np.random.default_rng([seed, zlib.crc32(name.encode())])
        uniforms = (random.permutation(count) + random.random(count)) / count
        columns[name] = [axis.at(u) if isinstance(axis, Log) else axis[int(u * len(axis))] for u in uniforms]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@dataclass(frozen=True, kw_only=True)
class Study:
    """`arms` at each of `settings`, each tuned among `candidates` of its own axes over `axes`.

    `make` turns the values of a setting and a candidate, with `seed` and `split`, into a point. `baselines` are what the other
    arms are compared with, by what they keep secret. `work` names the value of a setting that says how much work there is for
    each example or person, and `unit` what it counts. Raises ValueError for test seeds that tune, and baselines that are no
    arms.
    """

    name: str
    title: str
    make: Callable[[Values], Point]
    settings: tuple[Values, ...]
    axes: Mapping[str, Axis]
    arms: Mapping[str, Mapping[str, Axis]]
    candidates: int
    finalists: int
    tuning: tuple[int, ...]
    tests: tuple[int, ...]
    baselines: Mapping[Secret, tuple[str, ...]]
    work: str
    unit: str

    def __post_init__(self) -> None:
        if both := set(self.tests) & set(self.tuning):
            raise ValueError(f"seeds that tune may not test, got {sorted(both)} in both")
        if unknown := {arm for some in self.baselines.values() for arm in some} - set(self.arms):
            raise ValueError(f"baselines must be arms, got {sorted(unknown)}; the arms are {', '.join(self.arms)}")
        if not 1 <= self.finalists <= self.candidates:
            raise ValueError(f"finalists must be 1 … {self.candidates} (the candidates), got {self.finalists}")

    def secret(self, arm: str) -> Secret:
        """What nobody may learn, for the ε of `arm` to hold: nothing, or who takes part when (its sampling)."""
        samplings: Any = self.arms[arm].get("sampling", ("none",))
        return "sampling" if any(scheme_of(each).hidden for each in samplings) else "nothing"

    def points(self, arm: str, setting: Values) -> list[Point]:
        """The candidates of `arm` at `setting`, with the first tuning seed. Two that are the same count twice."""
        drawn = draw({**self.axes, **self.arms[arm]}, self.candidates, seed=0)
        return [self.make({**setting, **values, "seed": self.tuning[0], "split": "validation"}) for values in drawn]


Known = Mapping[str, float]
"""By the `identity` of a point the accuracy that it had; −∞ where its training broke off."""


@cache
def identity(point: Any) -> str:
    """A text that is equal exactly for equal points."""
    return json.dumps(asdict(point), sort_keys=True)


def best(study: Study, arm: str, setting: Values, known: Known) -> tuple[Point, float] | None:
    """The finalist with the highest mean accuracy over the tuning seeds, the first of equals, and that mean.

    None while some have not been run, and if none of them finished. One candidate needs no tuning: its mean is NaN.
    """
    if study.candidates == 1:
        return study.points(arm, setting)[0], math.nan
    finalists = _finalists(study, arm, setting, known)
    scores = [_mean([seeded(point, seed) for seed in study.tuning], known) for point in finalists]
    if not scores or any(math.isnan(score) for score in scores) or max(scores) == -math.inf:
        return None
    first = max(range(len(scores)), key=scores.__getitem__)
    return finalists[first], scores[first]


def missing(study: Study, known: Known) -> list[Point]:
    """What there is to run now, each point once: candidates, finalists of arms whose candidates are done, tests of the best."""
    wanted: list[Point] = []
    for setting in study.settings:
        for arm in study.arms:
            wanted += study.points(arm, setting) if study.candidates > 1 else []
            wanted += [seeded(p, seed) for p in _finalists(study, arm, setting, known) for seed in study.tuning]
            chosen = best(study, arm, setting, known)
            if chosen:
                wanted += [seeded(chosen[0], seed, "test") for seed in study.tests]
    return [point for point in dict.fromkeys(wanted) if identity(point) not in known]


def seeded(point: Any, seed: int, split: str = "validation") -> Point:
    """`point` with another seed, judged by the examples of `split`."""
    made: Point = replace(point, seed=seed, split=split)
    return made


def _finalists(study: Study, arm: str, setting: Values, known: Known) -> list[Point]:
    points = list(dict.fromkeys(study.points(arm, setting)))
    scores = [_mean([point], known) for point in points]
    if any(math.isnan(score) for score in scores):
        return []
    order = sorted(range(len(points)), key=lambda i: -scores[i])
    return [points[i] for i in order[: study.finalists] if scores[i] > -math.inf]


def _mean(points: Sequence[Point], known: Known) -> float:
    """NaN while one of them has not been run."""
    found = [known.get(identity(point), math.nan) for point in points]
    return math.nan if any(math.isnan(value) for value in found) else fmean(found)
