"""Rules that choose λ without data, and how much accuracy each loses against the λ that was tuned."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial

from fedcgd.accounting.selection import Objective, practical, select_lambda, third_of_excess
from fedcgd.curvature import Spectrum
from fedcgd.curvature.quadratic import Quadratic
from fedcgd_experiments.curvature_design import tamed
from fedcgd_experiments.experiment import Point, Record, Setup, identity
from fedcgd_experiments.significance import Pairs, holm, paired, tuned_accuracies
from fedcgd_experiments.sweep import best_of_families, to_point

Rule = Callable[[Setup], float]
"""The λ for a budget, from public numbers alone."""


@lru_cache
def _selected(objective: Objective, budget: Setup) -> float:
    chosen = select_lambda(budget.participation(), objective=objective, epsilon=budget.epsilon, delta=budget.delta)
    return chosen.lam


RULES: dict[str, Rule] = {
    "rmse": partial(_selected, "rmse"),
    "max-se": partial(_selected, "max-se"),
    "amplified-rmse": partial(_selected, "amplified-rmse"),
    "practical": lambda budget: practical(_selected("amplified-rmse", budget)),
    "third of the excess": lambda budget: third_of_excess(_selected("amplified-rmse", budget)),
}

CURVATURE = "curvature"
"""The rule that also asks for a spectrum and a learning rate (`curvature_record`)."""

NAMES = (*RULES, CURVATURE)


def budgets(runs: Iterable[Record]) -> list[Setup]:
    """The budgets at which DP-λCGD was tuned, as setups of DP-SGD, in the order of sampling and ε."""
    found = {setup.budget for setup in (to_point(run).setup for run in runs) if setup.family == "lambda-cgd"}
    return sorted(found, key=lambda setup: (setup.sampling, setup.epsilon))


def rule_record(asked: tuple[str, Setup]) -> Record:
    """What rule `asked[0]` chooses at the budget `asked[1]`, to three decimals, as a JSON-able record."""
    rule, setup = asked
    return {"kind": "rule", "rule": rule, "setup": asdict(setup), "lam": round(RULES[rule](setup), 3)}


def curvature_record(asked: tuple[Setup, float], spectrum: Spectrum) -> Record:
    """As `rule_record`, of the λ that adds least loss on a quadratic with this `spectrum` at the budget and rate `asked`.

    The rate is that which was tuned for DP-SGD there: it is known before any λ is.
    """
    setup, rate = asked
    chosen = select_lambda(
        setup.participation(), objective="curvature", epsilon=setup.epsilon, delta=setup.delta,
        curvature=Quadratic(tamed(spectrum, rate), rate),
    )  # fmt: skip
    said = {"kind": "rule", "rule": CURVATURE, "setup": asdict(setup), "lam": round(chosen.lam, 3)}
    return said | {"learning_rate": rate, "spectrum": spectrum.digest}


def chosen_lambdas(records: Iterable[Record]) -> dict[Setup, dict[str, float]]:
    """For each budget, as DP-SGD's setup, the λ of each rule."""
    chosen: dict[Setup, dict[str, float]] = {}
    for record in records:
        if record["kind"] == "rule":
            chosen.setdefault(Setup(**record["setup"]), {})[record["rule"]] = record["lam"]
    return chosen


def rule_points(runs: Sequence[Record], records: Iterable[Record]) -> list[Point]:
    """What has to be tuned to judge the rules of `records`: at each of their λ the rates and seeds of `runs` at that budget."""
    chosen = chosen_lambdas(records)
    points: dict[str, Point] = {}
    for point in map(to_point, runs):
        if point.split == "validation" and point.setup.family == "lambda-cgd":
            for lam in chosen.get(point.setup.budget, {}).values():
                made = replace(point, setup=_at(point.setup, lam))
                points[identity(made)] = made
    return list(points.values())


@dataclass(frozen=True, kw_only=True)
class Loss(Pairs):
    """Test accuracy at the λ of a rule, and as the baseline that at the tuned λ, or at the λ of another rule.

    `corrected` is the p-value after Holm's correction over all losses that were made together.
    """

    budget: Setup
    rule: str
    lam: float
    baseline_lam: float
    corrected: float


def losses(
    runs: Sequence[Record], rule_runs: Sequence[Record], records: Sequence[Record], *, against: str | None = None
) -> list[Loss]:
    """The loss of each rule at each budget: `runs` tuned λ, `rule_runs` are at the λ of `records`. What is missing is absent.

    With `against`, which names a rule, the baseline is the λ of that rule.
    """
    ruled, chosen = tuned_accuracies(rule_runs), chosen_lambdas(records)
    if against is None:
        tested = tuned_accuracies(runs)
        references = {s.budget: s for s in best_of_families(runs) if s.family == "lambda-cgd"}
    else:
        tested = ruled
        references = {b: _at(b, rules[against]) for b, rules in chosen.items() if against in rules}
    found: list[Loss] = []
    for budget, rules in chosen.items():
        reference = references.get(budget)
        for rule, lam in rules.items():
            setup = _at(budget, lam)
            if rule == against or reference is None or setup not in ruled or reference not in tested:
                continue
            pairs = paired(ruled[setup], tested[reference])
            if pairs is not None:
                loss = Loss(
                    **vars(pairs), budget=budget, rule=rule, lam=lam, baseline_lam=reference.lam, corrected=math.nan
                )
                found.append(loss)
    return sorted(corrected(found), key=lambda row: (row.budget.sampling, row.budget.epsilon, NAMES.index(row.rule)))


def corrected(found: Sequence[Loss]) -> list[Loss]:
    """`found`, with Holm's correction over all of them."""
    return [replace(row, corrected=p) for row, p in zip(found, holm([row.p_value for row in found]), strict=True)]


def _at(budget: Setup, lam: float) -> Setup:
    return replace(budget, mechanism=f"lambda-cgd:{lam}")
