"""What a study found: each arm at its tuned candidate, compared with the baseline that may keep the same things secret."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from fedcgd_experiments.results import Row, known, point_of
from fedcgd_experiments.significance import Pairs, holm, paired
from fedcgd_experiments.study import Point, Secret, Study, Values, best, identity, seeded


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """An arm at a setting: the candidate that validation chose, its mean validation accuracy, and its test rows by seed."""

    arm: str
    setting: Values
    point: Any
    validation: float
    tests: dict[int, Row]

    @property
    def accuracies(self) -> dict[int, float]:
        """Test accuracy by seed; a training that broke off has none."""
        return {seed: row["accuracy"] for seed, row in self.tests.items() if row["accuracy"] is not None}


def tuned(study: Study, rows: Sequence[Row], make: type[Any]) -> list[Tuned]:
    """Every arm at every setting that has been tuned and tested with all seeds."""
    accuracies = known(rows, make)
    by_point = {identity(point_of(row, make)): row for row in rows}
    found = []
    for setting in study.settings:
        for arm in study.arms:
            chosen = best(study, arm, setting, accuracies)
            tests = _tests(study, chosen[0], by_point) if chosen else None
            if chosen and tests:
                found.append(Tuned(arm=arm, setting=setting, point=chosen[0], validation=chosen[1], tests=tests))
    return found


def _tests(study: Study, point: Point, by_point: dict[str, Row]) -> dict[int, Row] | None:
    tests = {seed: by_point.get(identity(seeded(point, seed, "test"))) for seed in study.tests}
    return {seed: row for seed, row in tests.items() if row} if all(tests.values()) else None


def epsilons(study: Study) -> list[float]:
    """The budgets of a study."""
    return sorted({setting["epsilon"] for setting in study.settings})


def works(study: Study) -> list[int]:
    """How much work for each example, or each person, a study has settings for."""
    return sorted({setting[study.work] for setting in study.settings})


def pick(
    study: Study, found: Iterable[Tuned], epsilon: float, arms: Sequence[str], most: float = math.inf
) -> Tuned | None:
    """Of `arms` at a budget, with at most so much work, what is best on validation examples; None if an arm is not complete."""
    mine = [t for t in found if t.arm in arms and t.setting["epsilon"] == epsilon and t.setting[study.work] <= most]
    settings = [s for s in study.settings if s["epsilon"] == epsilon and s[study.work] <= most]
    if not mine or len(mine) < len(arms) * len(settings):
        return None
    return max(mine, key=lambda one: one.validation)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An arm at a budget against the better baseline of those that may keep the same things secret."""

    epsilon: float
    secret: Secret
    ours: Tuned
    baseline: Tuned
    pairs: Pairs
    corrected: float
    """p after Holm's correction over all comparisons that were made together."""


def _tested(one: Tuned) -> float:
    return fmean(one.accuracies.values()) if one.accuracies else -math.inf


def compare(
    study: Study, found: Sequence[Tuned], arms: Iterable[str] | None = None, *, most: float = math.inf
) -> list[Comparison]:
    """Each arm (of `arms`, if given) that is no baseline of its kind, at each budget, with the work that validation chose for it.

    Both sides may have `most` work. Of the tuned baselines the one that is best on the *test* examples stands for all of them:
    what a user cannot do, and what no arm is given, so that no gain comes from a baseline that validation mistook.
    """
    rows = []
    for epsilon in epsilons(study):
        for arm in study.arms if arms is None else arms:
            secret = study.secret(arm)
            baselines = study.baselines.get(secret, ())
            ours = pick(study, found, epsilon, [arm], most)
            others = [pick(study, found, epsilon, [baseline], most) for baseline in baselines]
            theirs = max((one for one in others if one), key=_tested) if others and all(others) else None
            pairs = paired(ours.accuracies, theirs.accuracies) if ours and theirs and arm not in baselines else None
            if pairs and ours and theirs:
                rows.append(
                    Comparison(
                        epsilon=epsilon, secret=secret, ours=ours, baseline=theirs, pairs=pairs, corrected=math.nan
                    )
                )
    corrected = holm([row.pairs.p_value for row in rows])
    return [replace(row, corrected=p) for row, p in zip(rows, corrected, strict=True)]
