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
from fedcgd.mechanisms.schedule import Schedule
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd.mechanisms.streaming import noise_mode
from fedcgd.optimisation import catalogue
from fedcgd.participation import SAMPLINGS, Participation
from fedcgd.participation.samplings import Law
from fedcgd.planning.landscape import Landscape
from fedcgd.planning.question import Question
from fedcgd.planning.recipe import Recipe
from fedcgd.planning.theory import Outcome, expected_outcome

WAYS: tuple[tuple[Schedule, float], ...] = (("constant", 0.0), ("linear", 0.0), ("constant", 0.9), ("linear", 0.9))
"""Schedules and momenta that are tried."""
STEPS = (1, 2, 3, 5, 7, 10, 14, 20, 30)
"""Rounds in which everybody has a turn once; more, √2 times as many each, while they are better by LEVEL, or must be."""
FEWER_TURNS = (1, 2, 3, 5, 7, 10, 14, 20, 30, 50)
"""Of the whole batch, where each costs little to try: so that more turns never end with more loss."""
SAMPLED_STEPS = {2, 3, 5, 10, 20}
"""Those of them that DP-SGD is tried at with a secret sampling, where each needs a calibration."""
SHARES = (0.5, 1.0)
"""Parts of the λ/(1 − λ) of the rule for the schedule that are tried."""
_SAMPLED_LAMBDAS, _SAMPLED_BANDS = (0.5, 0.8), (4, 8)  # each needs draws
_MOST_BANDS = 32
_NETWORK_STEPS = 20  # rounds of a turn that were best on 35 networks where theory holds others for as good
_MOST_ROUNDS = 4000  # unless a question says otherwise: of what theory answers in seconds
_FEW = 2  # set-ups that a dear mechanism is tried at
_WORSE = 1.05  # smaller cohorts than two of this loss in a row, relative to the best, are not tried

_NEARLY = 1.2  # of the least loss: what theory may be wrong about

HOPELESS = 10.0
"""A signal to noise below which nothing useful was learned."""
_WARNING = 30.0  # a signal to noise below which the noise wins
_KEPT = ((HOPELESS, 0, 20), (_WARNING, 0, 40), (60, 0, 50), (120, 15, 80), (250, 40, 100), (1000, 60, 100))
"""Below so much signal to noise, between so many percent of what a model gains over guessing without noise were kept."""

_MUCH = 0.9  # of the loss: what twice the work should bring

LEVEL = 0.02
"""Recipes whose losses differ by no more than this part are as good: theory is not better than that."""

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

    @property
    def kind(self) -> str:
        """What is compared: the mechanism without its number, and what is kept secret of who takes part."""
        return f"{self.mechanism.name}, {self.recipe.who}"

    @property
    def correlated(self) -> bool:
        """Whether the noise of one round depends on that of another."""
        return self.mechanism.name not in ("dp-sgd", "diagonal")


def plan_recipes(question: Question, *, progress: Progress = lambda _: None) -> list[PlannedRecipe]:
    """The best recipe of each kind, least expected loss first. A function of public numbers: it costs no privacy.

    Tried are DP-SGD with everybody in each round, with large cohorts and, if they can be secret, with Poisson sampling and random
    allocation; DP-λCGD and banded Toeplitz noise without a sampling; each with constant and falling rates, with and without
    momentum, and with cohorts of many sizes. With the other samplings that can be secret, where correlated noise is best without
    one: DP-λCGD (Balls-in-Bins), BSR (random allocation) or either (b-min-sep), whichever few draws say is best.

    Args:
        question: who, how private, and what is possible.
        progress: hears what comes next.

    Raises:
        ValueError: if nothing is possible within the limits, or no noise keeps the budget.
    """
    found = _tried(question, progress)
    kinds: dict[str, list[PlannedRecipe]] = {}
    for one in found:
        kinds.setdefault(one.kind, []).append(one)
    return sorted((_preferred(question, same) for same in kinds.values()), key=_loss)


def shortlist(question: Question, count: int, *, progress: Progress = lambda _: None) -> list[PlannedRecipe]:
    """What theory holds for nearly as good as the best, each kind in each of the ways to descend once, least loss first.

    Args:
        question: who, how private, and what is possible.
        count: the most recipes.
        progress: hears what comes next.

    Raises:
        ValueError: as `plan_recipes`.
    """
    found = _tried(question, progress)
    groups: dict[tuple[str, str, float], list[PlannedRecipe]] = {}
    for one in found:
        groups.setdefault((one.kind, one.recipe.schedule, one.recipe.momentum), []).append(one)
    ranked = sorted((_preferred(question, same) for same in groups.values()), key=_loss)
    return [one for one in ranked if one.outcome.loss <= _NEARLY * ranked[0].outcome.loss][:count]


def _tried(question: Question, progress: Progress) -> list[PlannedRecipe]:
    """All that is tried, in no order."""
    landscape = question.landscape
    found: list[PlannedRecipe] = []
    least, worse = math.inf, 0
    for steps in _steps(question):
        progress(f"cohorts of {-(-question.users // steps)}")
        here = [*_independent(question, steps, landscape), *_lambdas(question, steps, landscape)]
        found += here
        loss = min((one.outcome.loss for one in here), default=math.inf)
        worse = worse + 1 if loss > _WORSE * least else 0
        if worse == 2 or (steps > STEPS[-1] and loss > least * (1 - LEVEL)):
            break
        least = min(least, loss)
    if not found:
        raise ValueError(
            f"no recipe has at most {question.max_rounds} rounds of at most {question.max_cohort} users; allow more of either"
        )
    for recipe in _best_setups([one for one in found if one.correlated]):
        bands = min(recipe.steps, _MOST_BANDS, question.buffers + 1)
        if bands > 1:
            progress(f"banded-toeplitz:{bands}, cohorts of {recipe.cohort}")
            found += _banded(question, recipe, bands, landscape)
    known = _best_setups([one for one in found if one.correlated and not one.recipe.is_secret])
    for sampling in question.secret:
        recipes = [replace(recipe, sampling=sampling) for recipe in known]
        if recipes and _sampled_names(question, recipes[0]):
            found.append(_sampled(question, recipes, landscape, progress))
    return found


def is_hopeless(ranked: Sequence[PlannedRecipe]) -> bool:
    """Whether the noise hides all there is to learn, in each recipe.

    Args:
        ranked: what `plan_recipes` returned.
    """
    return all(one.outcome.signal_to_noise < HOPELESS for one in ranked)


def expectation(planned: PlannedRecipe) -> str:
    """What signal and noise of a recipe let expect, in a sentence; a warning where the noise wins.

    The ranges are those of six sets with 10 to 1000 users (docs/guides/planning.md), linear models and networks.

    Args:
        planned: a recipe with its outcome, as `plan` ranks them.
    """
    found = planned.outcome.signal_to_noise
    low, high = next(((low, high) for below, low, high in _KEPT if found < below), (80, 100))
    kept = (
        f"Signal to noise {as_ratio(found)}: with as much, models kept {low} to {high} % of what they gain over guessing without "
        f"noise. Without noise, descent would leave {as_part(planned.outcome.unlearned)} of the loss."
    )
    return f"Warning: the noise wins. {kept} More users, or a larger ε, help." if found < _WARNING else kept


def recommended(ranked: Sequence[PlannedRecipe]) -> PlannedRecipe:
    """The best; of those that are as good the simplest: DP-SGD, unless it alone needs a secret, then λ-CGD, then others.

    Args:
        ranked: what `plan_recipes` returned.
    """
    correlated, plain = _best(ranked, correlated=True), _best(ranked, correlated=False)
    if correlated is None or plain is None:
        return correlated or plain or ranked[0]
    if abs(_gain(correlated, plain)) >= LEVEL:
        return correlated if _loss(correlated) < _loss(plain) else plain
    return correlated if _keeps_less(correlated, plain) else plain


def _best(ranked: Sequence[PlannedRecipe], *, correlated: bool) -> PlannedRecipe | None:
    """Of those of its kind that are as good as the first: what keeps nothing secret, then λ-CGD, then the first."""
    kind = [one for one in ranked if one.correlated == correlated]
    level = [one for one in kind if _gain(kind[0], one) < LEVEL]
    return min(level, key=lambda one: (one.recipe.is_secret, one.mechanism.name != "lambda-cgd"), default=None)


def _gain(one: PlannedRecipe, other: PlannedRecipe) -> float:
    """The part of the loss that `other` leaves and `one` does not."""
    return 1 - one.outcome.loss / other.outcome.loss


def _keeps_less(one: PlannedRecipe, other: PlannedRecipe) -> bool:
    """Whether the rounds of `other` have to be secret, and those of `one` have not."""
    return other.recipe.is_secret and not one.recipe.is_secret


def with_more_turns(question: Question, ranked: Sequence[PlannedRecipe]) -> PlannedRecipe | None:
    """The best recipe with nothing secret and twice the turns, if theory expects it to be much better.

    ε is of the whole run: turns are work, and cost no privacy.

    Args:
        question: what was asked.
        ranked: what `plan_recipes` returned.
    """
    if question.turns >= _most_turns(question, question.least_steps):
        return None  # the rounds allow no more: the same recipes would be ranked again
    now = min((one.outcome.loss for one in ranked if not one.recipe.is_secret), default=math.inf)
    more = plan_recipes(replace(question, secret=(), turns=2 * question.turns))[0]
    return more if more.outcome.loss < _MUCH * now else None


def verdict(ranked: Sequence[PlannedRecipe]) -> str:
    """Whether correlated noise is worth it here, in a sentence.

    Args:
        ranked: what `plan_recipes` returned.
    """
    if is_hopeless(ranked):
        most = max(one.outcome.signal_to_noise for one in ranked)
        return (
            f"Nothing useful is to be expected at this budget: the signal is at most {most:.2g} times the noise, and below "
            f"{HOPELESS:g} models learned next to nothing. What helps: more users, or a larger ε."
        )
    correlated, plain = _best(ranked, correlated=True), _best(ranked, correlated=False)
    if correlated is None:
        return "There is nothing to correlate here: everybody takes part in every round. DP-SGD with the whole batch is best."
    if plain is None:
        return "No DP-SGD is possible within these limits."
    gain = _gain(correlated, plain)
    if abs(gain) < LEVEL and _keeps_less(correlated, plain):
        return f"Correlated noise needs no secret here, and is as good: {_left(correlated)}, and {_left(plain)}."
    if gain < LEVEL:
        level = "as good" if gain > -LEVEL else "better"
        return f"Correlated noise brings nothing here, DP-SGD is {level}: {_left(plain)}, and {_left(correlated)}."
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


def _preferred(question: Question, found: list[PlannedRecipe]) -> PlannedRecipe:
    """Of those that are as good as the best: the fewest rounds a turn (a network: about _NETWORK_STEPS), then the most turns."""
    steps = 1 if question.model is not None else _NETWORK_STEPS
    least = min(map(_loss, found))
    level = [one for one in found if one.outcome.loss <= least * (1 + LEVEL)]
    return min(level, key=lambda one: (abs(math.log(one.recipe.steps / steps)), -one.recipe.turns, one.outcome.loss))


def _steps(question: Question) -> Iterator[int]:
    """Rounds of a turn that the limits allow, fewest first."""
    least, most = question.least_steps, min(question.users, _most_turns(question, 1))
    further = takewhile(lambda steps: steps <= most, (round(STEPS[-1] * 2 ** (i / 2)) for i in count(1)))
    # As many as whole cohorts make: 100 users in 30 rounds are 3 in a round, and those have 33 rounds.
    for steps in sorted(
        {question.users // (question.users // steps) for steps in {least, *STEPS, *further} if least <= steps <= most}
    ):
        if steps <= most:
            yield steps


def _most_turns(question: Question, steps: int) -> int:
    return (question.max_rounds or _MOST_ROUNDS) // steps


def _turns(question: Question, steps: int) -> list[int]:
    """How many turns are tried: all that are allowed; of the whole batch fewer too, which a momentum may suit better."""
    most = min(question.turns, _most_turns(question, steps))
    fewer = [turns for turns in FEWER_TURNS if turns < most] if steps == 1 else []
    return [*fewer, most] if most else []


def _recipes(question: Question, steps: int, mechanism: str, sampling: str) -> Iterator[Recipe]:
    for turns, (schedule, momentum) in product(_turns(question, steps), WAYS):
        yield Recipe(
            mechanism=mechanism, sampling=sampling, users=question.users, steps=steps, turns=turns, schedule=schedule,
            momentum=momentum,
        )  # fmt: skip


def _planned(question: Question, recipe: Recipe, landscape: Landscape, made: Mechanism | None = None) -> PlannedRecipe:
    made = made or catalogue.mechanism(recipe.mechanism, recipe.participation, workload=recipe.workload)
    sigma = _noise_multiplier(made, recipe.participation, question.epsilon, question.delta)
    return PlannedRecipe(recipe, made, sigma, expected_outcome(recipe, made, sigma, landscape))


@lru_cache(maxsize=256)
def _noise_multiplier(mechanism: Mechanism, participation: Participation, epsilon: float, delta: float) -> float:
    """σ; without a sampling it is the sensitivity times that of one release, which is found once."""
    once = Participation(rounds=1)
    if not participation.is_secret and participation != once:
        unit = _noise_multiplier(DPSGD(), once, epsilon, delta)
        return sensitivity(mechanism, participation).value * unit
    return calibrate(mechanism, participation, epsilon=epsilon, delta=delta).noise_multiplier


def _independent(question: Question, steps: int, landscape: Landscape) -> Iterator[PlannedRecipe]:
    samplings = ["none"]
    if any(other <= steps < 1.2 * other for other in SAMPLED_STEPS) or steps > max(STEPS):
        samplings += [each for each in question.secret if SAMPLINGS[each].law in NARROW]
    for sampling in samplings:
        for recipe in _recipes(question, steps, "dp-sgd", sampling):
            yield _planned(question, recipe, landscape)


def _lambdas(question: Question, steps: int, landscape: Landscape) -> Iterator[PlannedRecipe]:
    """DP-λCGD without a sampling, for each way to descend, with the λ of the rule or less."""
    if steps == 1:
        return
    for recipe in _recipes(question, steps, "lambda-cgd", "none"):
        rule = select_lambda(
            recipe.participation, objective="excess", epsilon=question.epsilon, delta=question.delta,
            workload=recipe.workload,
        ).lam  # fmt: skip
        for lam in {round(share_of_excess(rule, share), 3) for share in SHARES} - {0.0}:
            yield _planned(question, replace(recipe, mechanism=f"lambda-cgd:{lam}"), landscape)


def _best_setups(found: list[PlannedRecipe]) -> list[Recipe]:
    """The recipes of the few best set-ups, each of another cohort."""
    best: dict[int, PlannedRecipe] = {}
    for one in sorted(found, key=_loss):
        best.setdefault(one.recipe.steps, one)
    return [one.recipe for one in list(best.values())[:_FEW]]


def _banded(question: Question, recipe: Recipe, bands: int, landscape: Landscape) -> Iterator[PlannedRecipe]:
    for schedule, momentum in WAYS[2:]:
        other = replace(recipe, mechanism=f"banded-toeplitz:{bands}", schedule=schedule, momentum=momentum)
        made = catalogue.mechanism(other.mechanism, other.participation, workload=other.workload)
        if made.num_buffers(other.rounds) <= question.buffers or noise_mode(made, other.rounds) == "replay":
            yield _planned(question, other, landscape, made)


def _sampled_names(question: Question, recipe: Recipe) -> list[str]:
    """The mechanisms among which few draws choose.

    Bands are tried under b-min-sep, which leaves all of their privacy to the sampling if they are at most b, and under random
    allocation, which is accounted for with no more than the rounds of a turn, and so not with λ.
    """
    covered = most_bands(recipe.participation)
    if covered is not None:
        most = min(covered, question.buffers + 1)
        return [f"bsr:{bands}" for bands in sorted({min(bands, most) for bands in _SAMPLED_BANDS} - {1})]
    rests = recipe.participation.scheme.law is Law.RESTING_COINS
    most = min(recipe.participation.min_separation, question.buffers + 1) if rests else 0
    return [
        *(f"lambda-cgd:{lam}" for lam in _SAMPLED_LAMBDAS),
        *(f"bsr:{bands}" for bands in _SAMPLED_BANDS if bands <= most),
    ]


def _sampled(question: Question, recipes: list[Recipe], landscape: Landscape, progress: Progress) -> PlannedRecipe:
    """The mechanism that few draws say is best in the first of the set-ups, in that where they say so: it alone is calibrated."""

    @cache
    def rough_loss(other: Recipe) -> float:
        progress(f"{other.mechanism}, {other.sampling}, cohorts of {other.cohort}")
        made = catalogue.mechanism(other.mechanism, other.participation)
        rough = accountant(made, other.participation)
        sigma = rough.rough_noise_multiplier(epsilon=question.epsilon, delta=question.delta)
        return expected_outcome(other, made, sigma, landscape).loss

    names = _sampled_names(question, recipes[0])
    best = min((replace(recipes[0], mechanism=name) for name in names), key=rough_loss).mechanism
    there = [replace(each, mechanism=best) for each in recipes if best in _sampled_names(question, each)]
    chosen = min(there, key=rough_loss)
    progress(f"{chosen.mechanism}, {chosen.sampling}, cohorts of {chosen.cohort}: σ")
    return _planned(question, chosen, landscape)
