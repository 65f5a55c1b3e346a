"""The best recipe at an ε: every kind of private training at its best way to descend, ranked by the loss that theory expects."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import count, product, takewhile

from fedcgd.accounting import accountant, calibrate
from fedcgd.accounting.coverage import NARROW, most_bands
from fedcgd.accounting.selection import select_lambda, share_of_excess
from fedcgd.mechanisms import DPSGD, Mechanism
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd.mechanisms.streaming import noise_mode
from fedcgd.optimisation import catalogue
from fedcgd.participation import SAMPLINGS, Participation
from fedcgd.participation.samplings import Law
from fedcgd.planning.landscape import Landscape
from fedcgd.planning.problem import PlanningProblem
from fedcgd.planning.recipe import Recipe
from fedcgd.planning.rules import RULES
from fedcgd.planning.theory import Outcome, expected_outcome
from fedcgd.support.html import table

_TRIED, _RANKING, _SIGNAL = RULES.tried, RULES.ranking, RULES.signal

Progress = Callable[[str], None]


@dataclass(frozen=True)
class PlannedRecipe:
    """A recipe with its noise, and what theory expects of it.

    Attributes:
        recipe: who takes part when, and how the model is moved.
        mechanism: C, for the recipe's rounds.
        noise_multiplier: σ, noise per unit of clip norm, that keeps the budget.
        outcome: what theory expects.
    """

    recipe: Recipe
    mechanism: Mechanism
    noise_multiplier: float
    outcome: Outcome

    def _repr_html_(self) -> str:
        """The recipe as a table, for notebooks."""
        rows = {
            "recipe": self.kind,
            "mechanism": self.mechanism,
            "noise multiplier σ": self.noise_multiplier,
            "users in a round": self.recipe.cohort,
            "rounds": self.recipe.rounds,
            "schedule": self.recipe.schedule,
            "momentum": self.recipe.momentum,
            "expected excess loss": self.outcome.loss,
        }
        return table(rows)

    @property
    def kind(self) -> str:
        """What is compared: the mechanism without its number, and what is kept secret of who takes part."""
        return f"{self.mechanism.name}, {self.recipe.who}"

    @property
    def correlated(self) -> bool:
        """Whether the noise of one round depends on that of another."""
        return self.mechanism.name not in ("dp-sgd", "diagonal")


def plan_recipes(problem: PlanningProblem, *, progress: Progress = lambda _: None) -> list[PlannedRecipe]:
    """The best recipe of each kind, least expected loss first. A function of public numbers: it costs no privacy.

    Tried are DP-SGD with everybody in each round, with large cohorts and, if they can be secret, with Poisson sampling and random
    allocation; DP-λCGD and banded Toeplitz noise without a sampling; each with constant and falling rates, with and without
    momentum, and with cohorts of many sizes. With the other samplings that can be secret, where correlated noise is best without
    one: DP-λCGD (Balls-in-Bins), BSR (random allocation) or either (b-min-sep), whichever few draws say is best.

    Args:
        problem: who, how private, and what is possible.
        progress: hears what comes next.

    Raises:
        ValueError: if nothing is possible within the limits, or no noise keeps the budget.
    """
    found = _tried(problem, progress)
    kinds: dict[str, list[PlannedRecipe]] = {}
    for one in found:
        kinds.setdefault(one.kind, []).append(one)
    return sorted((_preferred(problem, same) for same in kinds.values()), key=_loss)


def shortlist(problem: PlanningProblem, count: int, *, progress: Progress = lambda _: None) -> list[PlannedRecipe]:
    """What theory holds for nearly as good as the best, each kind in each of the ways to descend once, least loss first.

    Args:
        problem: who, how private, and what is possible.
        count: the most recipes.
        progress: hears what comes next.

    Raises:
        ValueError: as `plan_recipes`.
    """
    found = _tried(problem, progress)
    groups: dict[tuple[str, str, float], list[PlannedRecipe]] = {}
    for one in found:
        groups.setdefault((one.kind, one.recipe.schedule, one.recipe.momentum), []).append(one)
    ranked = sorted((_preferred(problem, same) for same in groups.values()), key=_loss)
    return [one for one in ranked if one.outcome.loss <= _RANKING.nearly * ranked[0].outcome.loss][:count]


def _tried(problem: PlanningProblem, progress: Progress) -> list[PlannedRecipe]:
    """All that is tried, in no order."""
    landscape = problem.landscape
    found: list[PlannedRecipe] = []
    least, worse = math.inf, 0
    for steps in _steps(problem):
        progress(f"cohorts of {-(-problem.users // steps)}")
        here = [*_independent(problem, steps, landscape), *_lambdas(problem, steps, landscape)]
        found += here
        loss = min((one.outcome.loss for one in here), default=math.inf)
        worse = worse + 1 if loss > _RANKING.worse * least else 0
        if worse == 2 or (steps > _TRIED.steps[-1] and loss > least * (1 - _RANKING.level)):
            break
        least = min(least, loss)
    if not found:
        raise ValueError(
            f"no recipe has at most {problem.max_rounds} rounds of at most {problem.max_cohort} users; allow more of either"
        )
    for recipe in _best_setups([one for one in found if one.correlated]):
        bands = min(recipe.steps, _TRIED.most_bands, problem.buffers + 1)
        if bands > 1:
            progress(f"banded-toeplitz:{bands}, cohorts of {recipe.cohort}")
            found += _banded(problem, recipe, bands, landscape)
    known = _best_setups([one for one in found if one.correlated and not one.recipe.is_secret])
    for sampling in problem.secret:
        recipes = [replace(recipe, sampling=sampling) for recipe in known]
        if recipes and _sampled_names(problem, recipes[0]):
            found.append(_sampled(problem, recipes, landscape, progress))
    return found


def is_hopeless(ranked: Sequence[PlannedRecipe]) -> bool:
    """Whether the noise hides all there is to learn, in each recipe.

    Args:
        ranked: what `plan_recipes` returned.
    """
    return all(one.outcome.signal_to_noise < _SIGNAL.hopeless for one in ranked)


def expectation(planned: PlannedRecipe) -> str:
    """What signal and noise of a recipe let expect, in a sentence; a warning where the noise wins.

    The ranges are those of six sets with 10 to 1000 users (docs/guides/planning.md), linear models and networks.

    Args:
        planned: a recipe with its outcome, as `plan` ranks them.
    """
    found = planned.outcome.signal_to_noise
    low, high = next(((low, high) for below, low, high in _SIGNAL.kept if found < below), (80, 100))
    kept = (
        f"Signal to noise {as_ratio(found)}: with as much, models kept {low} to {high} % of what they gain over guessing without "
        f"noise. Without noise, descent would leave {as_part(planned.outcome.unlearned)} of the loss."
    )
    return f"Warning: the noise wins. {kept} More users, or a larger ε, help." if found < _SIGNAL.warning else kept


def recommended(ranked: Sequence[PlannedRecipe]) -> PlannedRecipe:
    """The best; of those that are as good the simplest: DP-SGD, unless it alone needs a secret, then λ-CGD, then others.

    Args:
        ranked: what `plan_recipes` returned.
    """
    correlated, plain = _best(ranked, correlated=True), _best(ranked, correlated=False)
    if correlated is None or plain is None:
        return correlated or plain or ranked[0]
    if abs(_gain(correlated, plain)) >= _RANKING.level:
        return correlated if _loss(correlated) < _loss(plain) else plain
    return correlated if _keeps_less(correlated, plain) else plain


def _best(ranked: Sequence[PlannedRecipe], *, correlated: bool) -> PlannedRecipe | None:
    """Of those of its kind that are as good as the first: what needs no amplification, then λ-CGD, then the first."""
    kind = [one for one in ranked if one.correlated == correlated]
    level = [one for one in kind if _gain(kind[0], one) < _RANKING.level]
    return min(level, key=lambda one: (one.recipe.is_secret, one.mechanism.name != "lambda-cgd"), default=None)


def _gain(one: PlannedRecipe, other: PlannedRecipe) -> float:
    """The part of the loss that `other` leaves and `one` does not."""
    return 1 - one.outcome.loss / other.outcome.loss


def _keeps_less(one: PlannedRecipe, other: PlannedRecipe) -> bool:
    """Whether the rounds of `other` have to be secret, and those of `one` have not."""
    return other.recipe.is_secret and not one.recipe.is_secret


def verdict(ranked: Sequence[PlannedRecipe]) -> str:
    """Whether correlated noise is worth it here, in a sentence.

    Args:
        ranked: what `plan_recipes` returned.
    """
    if is_hopeless(ranked):
        most = max(one.outcome.signal_to_noise for one in ranked)
        return (
            f"No useful model can be expected at this budget: the signal is at most {most:.2g} times the noise, and below "
            f"{_SIGNAL.hopeless:g} models learned next to nothing. What helps: more users, or a larger ε."
        )
    correlated, plain = _best(ranked, correlated=True), _best(ranked, correlated=False)
    if correlated is None:
        return "With full participation there is nothing to correlate: full-batch DP-SGD is best."
    if plain is None:
        return "No DP-SGD is possible within these limits."
    gain = _gain(correlated, plain)
    if abs(gain) < _RANKING.level and _keeps_less(correlated, plain):
        return f"Correlated noise needs no secret here, and is as good: {_left(correlated)}, and {_left(plain)}."
    if gain < _RANKING.level:
        level = "as good" if gain > -_RANKING.level else "better"
        return f"Correlated noise does not help here, DP-SGD is {level}: {_left(plain)}, and {_left(correlated)}."
    return f"Correlated noise helps: {_left(correlated)}, and the best {_left(plain)}.{_simpler(ranked, correlated)}"


def _simpler(ranked: Sequence[PlannedRecipe], chosen: PlannedRecipe) -> str:
    """What λ-CGD, the simplest correlated noise, leaves where another was chosen; a sentence, or nothing."""
    found = next((one for one in ranked if one.mechanism.name == "lambda-cgd"), chosen)
    return "" if chosen.mechanism.name == "lambda-cgd" or found is chosen else f" The simplest, {_left(found)}."


def _left(one: PlannedRecipe) -> str:
    """What it leaves, in words that stand in a sentence."""
    recipe = one.recipe
    who = f"secret: {recipe.sampling}" if recipe.is_secret and recipe.steps > 1 else recipe.who
    return f"{one.mechanism.name} ({who}) leaves {as_part(one.outcome.loss)} of the loss"


def as_ratio(signal_to_noise: float) -> str:
    """A whole number, or two digits where it is small."""
    return f"{signal_to_noise:.0f}" if signal_to_noise >= 10 else f"{signal_to_noise:.2g}"


def as_part(loss: float) -> str:
    """A part of the loss in three digits, or with the two that count where it is small."""
    return f"{loss:.3g}" if loss >= 1 else f"{loss:.3f}" if loss >= 0.01 else f"{loss:.2g}"


def _loss(one: PlannedRecipe) -> float:
    return one.outcome.loss


def _preferred(problem: PlanningProblem, found: list[PlannedRecipe]) -> PlannedRecipe:
    """Of those as good as the best: the fewest rounds an epoch (a network: about `network_steps`), then most participations."""
    steps = 1 if problem.model is not None else _RANKING.network_steps
    least = min(map(_loss, found))
    level = [one for one in found if one.outcome.loss <= least * (1 + _RANKING.level)]
    return min(
        level, key=lambda one: (abs(math.log(one.recipe.steps / steps)), -one.recipe.participations, one.outcome.loss)
    )


def _steps(problem: PlanningProblem) -> Iterator[int]:
    """Rounds of an epoch that the limits allow, fewest first."""
    least, most = problem.least_steps, min(problem.users, _most_participations(problem, 1))
    further = takewhile(lambda steps: steps <= most, (round(_TRIED.steps[-1] * 2 ** (i / 2)) for i in count(1)))
    # As many as whole cohorts make: 100 users in 30 rounds are 3 in a round, and those have 33 rounds.
    for steps in sorted(
        {
            problem.users // (problem.users // steps)
            for steps in {least, *_TRIED.steps, *further}
            if least <= steps <= most
        }
    ):
        if steps <= most:
            yield steps


def _most_participations(problem: PlanningProblem, steps: int) -> int:
    return (problem.max_rounds or _RANKING.most_rounds) // steps


def _participations(problem: PlanningProblem, steps: int) -> list[int]:
    """How many participations are tried: all that are allowed; of the whole batch fewer too, which a momentum may suit better."""
    most = min(problem.participations, _most_participations(problem, steps))
    fewer = [each for each in _TRIED.fewer_participations if each < most] if steps == 1 else []
    return [*fewer, most] if most else []


def _recipes(problem: PlanningProblem, steps: int, mechanism: str, sampling: str) -> Iterator[Recipe]:
    for participations, (schedule, momentum) in product(_participations(problem, steps), _TRIED.ways):
        yield Recipe(
            mechanism=mechanism, sampling=sampling, users=problem.users, steps=steps,
            participations=participations, schedule=schedule, momentum=momentum,
        )  # fmt: skip


def _planned(
    problem: PlanningProblem, recipe: Recipe, landscape: Landscape, made: Mechanism | None = None
) -> PlannedRecipe:
    made = made or catalogue.mechanism(recipe.mechanism, recipe.participation, workload=recipe.workload)
    sigma = _noise_multiplier(made, recipe.participation, problem.epsilon, problem.delta)
    return PlannedRecipe(recipe, made, sigma, expected_outcome(recipe, made, sigma, landscape))


@lru_cache(maxsize=256)
def _noise_multiplier(mechanism: Mechanism, participation: Participation, epsilon: float, delta: float) -> float:
    """σ; without a sampling it is the sensitivity times that of one release, which is found once."""
    once = Participation(rounds=1)
    if not participation.is_secret and participation != once:
        unit = _noise_multiplier(DPSGD(), once, epsilon, delta)
        return sensitivity(mechanism, participation).value * unit
    return calibrate(mechanism, participation, epsilon=epsilon, delta=delta).noise_multiplier


def _independent(problem: PlanningProblem, steps: int, landscape: Landscape) -> Iterator[PlannedRecipe]:
    samplings = ["none"]
    if any(other <= steps < 1.2 * other for other in _TRIED.sampled_steps) or steps > max(_TRIED.steps):
        samplings += [each for each in problem.secret if SAMPLINGS[each].law in NARROW]
    for sampling in samplings:
        for recipe in _recipes(problem, steps, "dp-sgd", sampling):
            yield _planned(problem, recipe, landscape)


def _lambdas(problem: PlanningProblem, steps: int, landscape: Landscape) -> Iterator[PlannedRecipe]:
    """DP-λCGD without a sampling, for each way to descend, with the λ of the rule or less."""
    if steps == 1:
        return
    for recipe in _recipes(problem, steps, "lambda-cgd", "none"):
        rule = select_lambda(
            recipe.participation, objective="excess", epsilon=problem.epsilon, delta=problem.delta,
            workload=recipe.workload,
        ).lam  # fmt: skip
        for lam in {round(share_of_excess(rule, share), 3) for share in _TRIED.shares} - {0.0}:
            yield _planned(problem, replace(recipe, mechanism=f"lambda-cgd:{lam}"), landscape)


def _best_setups(found: list[PlannedRecipe]) -> list[Recipe]:
    """The recipes of the few best set-ups, each of another cohort."""
    best: dict[int, PlannedRecipe] = {}
    for one in sorted(found, key=_loss):
        best.setdefault(one.recipe.steps, one)
    return [one.recipe for one in list(best.values())[: _RANKING.setups]]


def _banded(problem: PlanningProblem, recipe: Recipe, bands: int, landscape: Landscape) -> Iterator[PlannedRecipe]:
    for schedule, momentum in _TRIED.ways[2:]:
        other = replace(recipe, mechanism=f"banded-toeplitz:{bands}", schedule=schedule, momentum=momentum)
        made = catalogue.mechanism(other.mechanism, other.participation, workload=other.workload)
        if made.num_buffers(other.rounds) <= problem.buffers or noise_mode(made, other.rounds) == "replay":
            yield _planned(problem, other, landscape, made)


def _sampled_names(problem: PlanningProblem, recipe: Recipe) -> list[str]:
    """The mechanisms among which few draws choose.

    Bands are tried under b-min-sep, which leaves all of their privacy to the sampling if they are at most b, and under random
    allocation, which is accounted for with no more than the rounds of an epoch, and so not with λ.
    """
    covered = most_bands(recipe.participation)
    if covered is not None:
        most = min(covered, problem.buffers + 1)
        return [f"bsr:{bands}" for bands in sorted({min(bands, most) for bands in _TRIED.sampled_bands} - {1})]
    rests = recipe.participation.scheme.law is Law.RESTING_COINS
    most = min(recipe.participation.min_separation, problem.buffers + 1) if rests else 0
    return [
        *(f"lambda-cgd:{lam}" for lam in _TRIED.sampled_lambdas),
        *(f"bsr:{bands}" for bands in _TRIED.sampled_bands if bands <= most),
    ]


def _sampled(
    problem: PlanningProblem, recipes: list[Recipe], landscape: Landscape, progress: Progress
) -> PlannedRecipe:
    """The mechanism that few draws say is best in the first of the set-ups, in that where they say so: it alone is calibrated."""

    @cache
    def rough_loss(other: Recipe) -> float:
        progress(f"{other.mechanism}, {other.sampling}, cohorts of {other.cohort}")
        made = catalogue.mechanism(other.mechanism, other.participation)
        rough = accountant(made, other.participation)
        sigma = rough.rough_noise_multiplier(epsilon=problem.epsilon, delta=problem.delta)
        return expected_outcome(other, made, sigma, landscape).loss

    names = _sampled_names(problem, recipes[0])
    best = min((replace(recipes[0], mechanism=name) for name in names), key=rough_loss).mechanism
    there = [replace(each, mechanism=best) for each in recipes if best in _sampled_names(problem, each)]
    chosen = min(there, key=rough_loss)
    progress(f"{chosen.mechanism}, {chosen.sampling}, cohorts of {chosen.cohort}: σ")
    return _planned(problem, chosen, landscape)
