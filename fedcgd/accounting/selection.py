"""Which λ, and which other numbers of a mechanism: those of least error at a budget. No choice looks at data.

The rules for λ are the minimisers that Section 5 of arXiv:2601.22334 compares.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Literal, get_args

from fedcgd.accounting.by_sampling import accountant
from fedcgd.accounting.coverage import NegativeEntryError, most_bands, nothing_to_choose
from fedcgd.accounting.search import Judge, best, iterations
from fedcgd.accounting.tolerances import TOLERANCES
from fedcgd.mechanisms import LambdaCGD, Mechanism, Normalized
from fedcgd.mechanisms.workload import PREFIX_SUMS, Workload
from fedcgd.mechanisms.workload import Objective as ErrorKind
from fedcgd.optimisation import catalogue, table
from fedcgd.optimisation.bands import power_bandwidths
from fedcgd.optimisation.damping import DAMPED, damped
from fedcgd.participation import Participation
from fedcgd.quadratic import Quadratic

Objective = Literal["rmse", "max-se", "amplified-rmse", "excess", "curvature"]
"""What the λ of λ-CGD makes least."""

PRACTICAL_DIVISOR = 3.0
"""The best accuracy was seen at 1/(1 − λ) 2–4 times below the amplified-RMSE value (Section 5.1): take the middle. That is for a
constant rate without momentum, where the noise of the last rounds, which nothing cancels any more, stays in the model."""


@dataclass(frozen=True)
class LambdaSelection:
    """The chosen λ, and the curve that was searched.

    Attributes:
        lam: λ.
        objective: what it was chosen by.
        value: the objective at λ: an error per unit of clip norm at the (ε, δ) asked for. That of "excess" is the amplified
            RMSE.
        lams: all λ that were tried, ascending.
        values: the objective at each of them.
    """

    lam: float
    objective: Objective
    value: float
    lams: tuple[float, ...]
    values: tuple[float, ...]


def select_lambda(
    participation: Participation,
    *,
    objective: Objective,
    epsilon: float,
    delta: float,
    normalize: bool = False,
    workload: Workload = PREFIX_SUMS,
    curvature: Quadratic | None = None,
    progress: Callable[[str], None] | None = None,
) -> LambdaSelection:
    """argmin over λ in [0, 1) of the objective, searched on the scale 1/(1 − λ); 0 (DP-SGD) if nothing is better.

    - `rmse`, `max-se`: ‖B‖_F/√n·σ or max row norm of B·σ, B = A·C_λ⁻¹ and σ = sens_{k,b}(C_λ)·σ_{ε,δ}, whatever the sampling:
      closed forms, O(n) each. ε and δ scale the value but do not move the minimiser. That of max-se is the larger (Lemma 3).
    - `amplified-rmse`: ‖B‖_F/√n·σ with σ calibrated under the sampling. Without a sampling it is the same as `rmse`. Found to
      about 10 % on the scale 1/(1 − λ), over which the error itself hardly changes, in about 12 calibrations.
    - `excess`: λ/(1 − λ), which is 1/(1 − λ) less 1, a third of the amplified-RMSE one. (The paper's rule, 1/(1 − λ) itself a
      third, is the same where λ is near 1, and is 0 where 1/(1 − λ) is small, which cost accuracy wherever it was tried.) That is
      for a constant rate without momentum; the share grows with momentum, and is all of it for a schedule, because both weigh
      the last rounds less, and for unit columns, because they have less noise there (`excess_share`).
    - `curvature`: the root of the loss that noise of σ, calibrated under the sampling, adds on a quadratic with this `curvature`
      (`fedcgd.quadratic.loss.final_loss`). It must come from public data.

    Args:
        participation: who takes part when, over how many rounds.
        objective: what the best λ makes smallest, as above.
        epsilon: the budget ε of the whole run.
        delta: the budget δ of the whole run.
        normalize: whether C_λ gets unit columns.
        workload: A, SGD with its momentum and learning rates; by default prefix sums.
        curvature: for the objective `curvature`, and needed there.
        progress: is called with a line of text for each calibration under a sampling.

    Returns:
        λ, and the curve that was searched.

    Raises:
        ValueError: for an unknown objective, a target that no σ reaches, a curvature with a workload, and the Poisson samplings,
            where λ > 0 is not accounted for.

    >>> participation = Participation(rounds=210, min_separation=21)
    >>> round(select_lambda(participation, objective="rmse", epsilon=8, delta=1e-5).lam, 3)
    0.874
    """
    if objective not in get_args(Objective):
        raise ValueError(f"objective must be one of {', '.join(get_args(Objective))}, got {objective!r}")
    if most_bands(participation) is not None:
        raise nothing_to_choose("lambda-cgd", "λ", participation)
    if (objective == "curvature") != (curvature is not None):
        raise ValueError(
            "the objective curvature needs a curvature (--curvature, with --learning-rate), and no other takes one"
        )
    if curvature is not None and workload != PREFIX_SUMS:
        raise ValueError(
            "the objective curvature is of descent at a constant rate without momentum: leave out the schedule and the momentum "
            f"({workload.momentum}), or take the objective excess"
        )
    judge = Judge(
        participation, epsilon, delta, "max-se" if objective == "max-se" else "rmse", workload, curvature, progress
    )

    make = partial(_mechanism, normalize=normalize)
    sampled = objective not in ("rmse", "max-se") and judge.sampled
    curve = judge.curve(make, "λ", sampled=sampled)
    lam = best(curve)
    if objective == "excess":
        lam = share_of_excess(lam, excess_share(workload, normalize=normalize))
        curve.setdefault(lam, judge.error(make(lam)))
    lams = sorted(curve)
    return LambdaSelection(lam, objective, curve[lam], tuple(lams), tuple(curve[x] for x in lams))


def select_mechanism(
    spelling: str,
    participation: Participation,
    *,
    epsilon: float,
    delta: float,
    error: ErrorKind = "rmse",
    workload: Workload = PREFIX_SUMS,
    curvature: Quadratic | None = None,
    progress: Callable[[str], None] | None = None,
) -> Mechanism:
    """The mechanism that is spelled; a number that is left open is chosen for the participation and the budget.

    - `lambda-cgd`: λ by the rule `excess` of `select_lambda` for the `workload`, or for the `curvature` if there is one.
    - A mechanism with bands: of p = 1, 2, 4, … and b (min_separation, or the rounds of an epoch under random-allocation) the one
      of least error at (ε, δ), or of least loss.
    - γ of `bifr`, λ and μ of `lambda-mu`: those of least error, or of least loss, searched as λ is, one at a time.
    - `nu-dp-ftrl`, where there is a curvature: ν for its loss.

    `blt`, `band-inv-mf` and `banded-toeplitz` are optimised without a sampling. Where the secret rounds amplify by a part that
    depends on C (Balls-in-Bins, random allocation, b-min-sep) they are then damped, c_t becoming c_t·ρ^t
    (`fedcgd.optimisation.damping`), by the ρ of least error under the sampling; ρ = 1 if none is better.

    A function of public numbers alone: the choice costs no privacy.

    Args:
        spelling: a mechanism as on the command line, such as "bifr:3:0.7", or "bifr:3" or "bifr" to have the rest chosen.
        participation: who takes part when, over how many rounds.
        epsilon: the budget ε of the whole run.
        delta: the budget δ of the whole run.
        error: which error an optimised mechanism is best at, and numbers of bands are compared by.
        workload: A, SGD with its momentum and learning rates; by default prefix sums.
        curvature: from public data; what is spelled is then fitted to it.
        progress: is called with a line of text for each candidate.

    Raises:
        ValueError: for an unknown name, a number that is impossible or has no rule, and a budget that no σ reaches.
    """
    judge = Judge(participation, epsilon, delta, error, workload, curvature, progress)
    return _chosen(catalogue.MechanismSpec.parse(spelling), judge)


def _chosen(asked: catalogue.MechanismSpec, judge: Judge) -> Mechanism:
    """What is `asked` for, with the numbers that are left open."""
    participation, workload, curvature = judge.participation, judge.workload, judge.curvature
    most = most_bands(participation)
    if asked.is_open and most is not None and (most == 1 or not asked.row.is_banded):
        symbols = " and ".join(parameter.symbol for parameter in asked.open)
        raise nothing_to_choose(asked.row.name, symbols, participation)
    if asked.is_open and asked.row.cls is LambdaCGD:
        chosen = select_lambda(
            participation,
            objective="excess" if curvature is None else "curvature",
            epsilon=judge.epsilon,
            delta=judge.delta,
            normalize=asked.normalized,
            workload=workload,
            curvature=curvature,
            progress=judge.progress,
        )
        return _mechanism(chosen.lam, asked.normalized)
    if asked.open[:1] == (table.BANDS,):
        return _with_best_bands(asked, judge)

    progress = iterations(judge.progress) if judge.progress else None

    def made(spec: catalogue.MechanismSpec) -> Mechanism:
        return catalogue.mechanism(
            spec, participation, error=judge.kind, workload=workload, curvature=curvature, progress=progress
        )

    if asked.is_open and all(parameter.least is not None for parameter in asked.open):
        return _with_best_numbers(asked, made, judge)
    found = made(asked)
    plain = found.mechanism if isinstance(found, Normalized) else found
    if asked.made is None and judge.sampled and isinstance(plain, DAMPED):
        accountant(found, participation).check()  # damping leaves the signs: what is refused is so before the search
        curve = judge.curve(partial(damped, found), "ρ", sampled=True)
        return damped(found, best(curve)) if min(curve.values()) < judge.error(found) else found
    return found


def _with_best_numbers(
    asked: catalogue.MechanismSpec, made: Callable[[catalogue.MechanismSpec], Mechanism], judge: Judge
) -> Mechanism:
    """The numbers that are open, searched one at a time with the others held fast.

    Several are searched again and again without a sampling, which takes no calibration, and then once each under it.
    """
    values = [*asked.values, *(0.0 for _ in asked.open)]

    def with_value(at: int, value: float) -> Mechanism:
        return made(replace(asked, values=(*values[:at], value, *values[at + 1 :])))

    def sweep(*, sampled: bool) -> float:
        error = inf
        for at, parameter in enumerate(asked.open, len(asked.values)):
            assert parameter.least is not None  # noqa: S101
            least = parameter.least(values)
            curve = judge.curve(partial(with_value, at), parameter.symbol, least, sampled=sampled)
            values[at], error = best(curve), min(curve.values())
        return error

    if len(asked.open) > 1:
        error, (sweeps, settled) = inf, TOLERANCES.choice.sweeps
        for _ in range(sweeps):
            before, error = error, sweep(sampled=False)
            if error > before * (1 - settled):
                break
    sweep(sampled=judge.sampled)
    return made(replace(asked, values=tuple(values)))


def _with_best_bands(asked: catalogue.MechanismSpec, judge: Judge) -> Mechanism:
    """Of p = 1, 2, 4, … and the rounds from one turn to the next the p of least error; the fewest bands among equals.

    Those whose C the sampling does not cover, because entries are negative, are left out.
    """
    numbers = power_bandwidths(judge.participation.spacing)
    quiet, found = replace(judge, progress=None), {}
    for count, p in enumerate(numbers, 1):
        if judge.progress is not None:
            judge.progress(f"p = {p}, {count} of {len(numbers)}")
        try:
            made = _chosen(replace(asked, values=(p,)), quiet)
            found[made] = judge.error(made)
        except NegativeEntryError:  # an optimum may have some, and another p none
            continue
    return min(found, key=lambda made: found[made])  # p = 1, which is diagonal, has none


def share_of_excess(lam: float, share: float) -> float:
    """The λ whose λ/(1 − λ) is a part of that of `lam`: 0 only for 0.

    Args:
        lam: λ in [0, 1).
        share: the part, positive.

    >>> share_of_excess(0.75, 1 / 3)
    0.5
    """
    return share * lam / (share * lam + 1 - lam)


def excess_share(workload: Workload, *, normalize: bool = False) -> float:
    """Which part of the RMSE-optimal λ/(1 − λ) trains best: 1/3 for a constant rate without momentum, near 1 with either.

    At a constant rate without momentum the uncancelled noise of the last rounds stays in the model, and RMSE, a mean over all
    rounds, does not see it. Momentum β averages over the last 1/(1 − β) rounds; a schedule that falls gives them no weight. Tried
    for softmax regression with β = 0 and 0.9, constant and linear, 3–20 steps × 5–20 epochs (docs/guides/planning.md). Unit
    columns give the last rounds, whose columns are cut short, less noise: for them it is 1 whatever runs.

    Args:
        workload: SGD with its momentum and learning rates.
        normalize: whether C_λ has unit columns.
    """
    falling = len(set(workload.learning_rates)) > 1
    return 1.0 if falling or normalize else (1 + (PRACTICAL_DIVISOR - 1) * workload.momentum) / PRACTICAL_DIVISOR


def _mechanism(lam: float, normalize: bool) -> Mechanism:
    return Normalized(LambdaCGD(lam)) if normalize else LambdaCGD(lam)
