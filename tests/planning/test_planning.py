"""The planner: its theory against plain simulation, its candidates within the limits, and what it prints runs."""

import contextlib
import io
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import figures, run
from flwr.serverapp.strategy import FedAvgM
from torch.utils.data import DataLoader

from fedcgd import Participation, Plan, accountant, calibrate
from fedcgd.mechanisms import BSR, DPSGD, LambdaCGD, Mechanism, matrix
from fedcgd.optimisation import catalogue
from fedcgd.planning import LinearModel, PlanningProblem, Recipe, expectation, plan_recipes, recommended, verdict
from fedcgd.planning.landscape import Landscape
from fedcgd.planning.planner import PlannedRecipe, _preferred, _steps
from fedcgd.planning.render import as_python, as_run_config
from fedcgd.planning.theory import Outcome, expected_outcome, outcome_at, unit_progress
from fedcgd.quadratic import Spectrum
from fedcgd_flower import scheduled

pytestmark = pytest.mark.usefixtures("few_draws_everywhere")
PROBLEM = PlanningProblem(users=600, epsilon=1.0, delta=1e-5, participations=4)
RECIPE = Recipe(
    mechanism="lambda-cgd:0.8", sampling="none", users=600, steps=5, participations=6, schedule="linear", momentum=0.9
)


def planned(mechanism: Mechanism, recipe: Recipe = RECIPE, *, loss: float = 0.5) -> PlannedRecipe:
    """As if theory had found a rate of 3 and this loss."""
    return PlannedRecipe(recipe, mechanism, 1.0, Outcome(3.0, 100.0, 1.0, 0.0, loss))


@pytest.fixture(scope="module")
def ranked() -> list[PlannedRecipe]:
    return plan_recipes(PROBLEM)


@pytest.fixture(scope="module")
def ranked_with_secrets(few_draws_everywhere: None) -> list[PlannedRecipe]:
    return plan_recipes(
        replace(PROBLEM, participations=2, secret=("poisson", "balls-in-bins", "b-min-sep"), max_rounds=12)
    )


@pytest.fixture(scope="module")
def with_random_allocation() -> list[PlannedRecipe]:
    """Of few rounds: a calibration for more takes many seconds."""
    return plan_recipes(replace(PROBLEM, participations=2, secret=("random-allocation",), max_rounds=4))


def descended(recipe: Recipe, rate: float, curvature: float, noise: np.ndarray, start: float) -> np.ndarray:
    """Where heavy-ball descent ends on ½μe², with `noise` (rounds, draws) added to the gradient; round by round."""
    error, velocity = np.full(noise.shape[1], start), np.zeros(noise.shape[1])
    for t, factor in enumerate(recipe.workload.rates(recipe.rounds)):
        velocity = recipe.momentum * velocity - curvature * error + noise[t]
        error = error + rate * factor * velocity
    return error


@pytest.mark.parametrize(
    ("schedule", "momentum"), [("constant", 0.0), ("linear", 0.0), ("constant", 0.9), ("linear", 0.9)]
)
def test_the_expected_loss_is_that_of_simulated_descent(schedule, momentum: float) -> None:
    """Two directions, 20,000 draws of the noise, and the loss that theory expects at its own rate: to 3 %, and of no other σ."""
    recipe = replace(RECIPE, schedule=schedule, momentum=momentum)
    mechanism, sigma = LambdaCGD(0.8), 40.0
    landscape = Landscape(np.array([0.2, 0.01]), np.array([1.0, 3.0]), np.array([0.5, 0.2]))
    found = expected_outcome(recipe, mechanism, sigma, landscape)
    generator = np.random.default_rng(3)
    inverse = np.linalg.inv(matrix(mechanism, recipe.rounds))

    def simulated(sigma: float) -> float:
        loss = 0.0
        for curvature, count, energy in zip(landscape.eigenvalues, landscape.counts, landscape.energies, strict=True):
            noise = inverse @ generator.standard_normal((recipe.rounds, 20_000)) * sigma / recipe.cohort
            noise += generator.standard_normal(noise.shape) / math.sqrt(recipe.cohort * 4)  # the draw of the cohort
            end = descended(recipe, found.learning_rate, curvature, noise, math.sqrt(energy / curvature))
            loss += count * curvature * float(np.mean(end**2))
        return loss / (1 * 0.5 + 3 * 0.2)

    assert found.loss == pytest.approx(simulated(sigma), rel=0.03)
    assert found.loss != pytest.approx(simulated(1.15 * sigma), rel=0.03)


@pytest.mark.parametrize(
    "problem",
    [
        replace(PROBLEM, users=45_000, epsilon=8.0, participations=60, model=LinearModel(classes=10, features=300)),
        PlanningProblem(users=1_000_000, epsilon=8.0, delta=1e-7, participations=2),
        PlanningProblem(users=60, epsilon=0.05, delta=1e-5, participations=2),
    ],
)
def test_no_planned_rate_lies_at_an_edge_of_what_was_tried(problem: PlanningProblem) -> None:
    for one in plan_recipes(problem):
        for factor in (0.7, 1.42):  # a little farther than the next of a grid of √2
            there = outcome_at(
                one.recipe, one.mechanism, one.noise_multiplier, problem.landscape,
                factor * one.outcome.learning_rate,
            )  # fmt: skip
            assert there.loss > one.outcome.loss


def test_no_planned_cohort_lies_at_an_edge_of_what_was_tried() -> None:
    """A million people: the same mechanism in half the cohort, or twice, is not better by more than twice LEVEL."""
    problem = PlanningProblem(users=1_000_000, epsilon=3.0, delta=1e-7, participations=5)
    plain = next(one for one in plan_recipes(problem) if one.kind.startswith("dp-sgd") and one.recipe.steps > 1)
    assert plain.recipe.steps > 60
    for factor in (0.5, 2):
        other = replace(plain.recipe, steps=round(factor * plain.recipe.steps))
        sigma = calibrate(DPSGD(), other.participation, epsilon=3.0, delta=1e-7).noise_multiplier
        assert expected_outcome(other, DPSGD(), sigma, problem.landscape).loss > 0.96 * plain.outcome.loss


@pytest.mark.parametrize(("classes", "features", "centred"), [(2, 1, True), (3, 5, False), (10, 200, True)])
def test_a_linear_model_bends_as_softmax_regression_does_at_its_start(
    classes: int, features: int, centred: bool
) -> None:
    """Its Hessian is the second moment of the inputs, of norm 1 and with a one behind, times (I − 1/c)/c over the classes.

    All of it as much smaller as clipping to norm 1 makes the gradient of each example: those of random labels, made by hand.
    """
    generator = np.random.default_rng(1)
    x = generator.normal(size=(4000, features)) + (0 if centred else 3)
    x = np.hstack([x / np.linalg.norm(x, axis=1, keepdims=True), np.ones((len(x), 1))])
    over_classes = np.eye(classes) / classes - np.full((classes, classes), 1 / classes**2)
    hessian = np.linalg.eigvalsh(np.kron(over_classes, x.T @ x / len(x)))
    residuals = np.eye(classes)[generator.integers(0, classes, len(x))] - 1 / classes
    norms = np.linalg.norm(x[:, :, None] * residuals[:, None, :], axis=(1, 2))
    hessian *= (norms / np.maximum(norms, 1)).mean() / norms.mean()
    share = float((x[:, :-1].mean(0) ** 2).sum())
    found = Landscape.linear(LinearModel(classes=classes, features=features, mean_share=share))
    assert found.counts.sum() == np.linalg.matrix_rank(over_classes) * (features + 1) == np.sum(hessian > 1e-9)
    assert found.counts @ found.eigenvalues == pytest.approx(hessian.sum())
    assert found.eigenvalues[0] == pytest.approx(hessian.max(), rel=0.1)
    assert found.counts @ found.energies == pytest.approx(0.75 * math.log(classes) / norms.mean())


def test_public_inputs_tell_their_mean_and_directions() -> None:
    """Of a few directions one by one, of many in groups, also with fewer examples than features; nothing else changes."""
    x = np.random.default_rng(2).normal(size=(40, 60)) * 0.7 ** np.arange(60) + 0.1
    for rows, features in ((40, 6), (30, 60)):
        inputs = x[:rows, :features]
        model = LinearModel.of_public_inputs(7 * inputs, classes=3)
        unit = inputs / np.linalg.norm(inputs, axis=1, keepdims=True)
        covariance = np.linalg.eigvalsh(np.cov(unit, rowvar=False, bias=True))[::-1]
        assert model.mean_share == pytest.approx(np.square(unit.mean(0)).sum())
        found, supposed = Landscape.linear(model), Landscape.linear(replace(model, shares=None))
        assert found.eigenvalues[1:7] == pytest.approx(covariance[:6] * math.sqrt(3 / 4) / 3)
        assert found.counts @ found.eigenvalues == pytest.approx(supposed.counts @ supposed.eigenvalues)
        assert (found.counts.tolist(), found.energies.tolist()) == (
            supposed.counts.tolist(),
            supposed.energies.tolist(),
        )


def test_every_kind_is_there_once_and_the_order_is_that_of_the_loss(
    ranked, ranked_with_secrets, with_random_allocation
) -> None:
    assert [one.kind for one in ranked_with_secrets] == list(dict.fromkeys(one.kind for one in ranked_with_secrets))
    assert {one.kind for one in ranked} == {
        "dp-sgd, full participation", "dp-sgd, without amplification", "lambda-cgd, without amplification",
        "banded-toeplitz, without amplification",
    }  # fmt: skip
    more = [one for one in ranked_with_secrets if one.kind not in {other.kind for other in ranked}]
    assert sorted(one.recipe.sampling for one in more) == ["b-min-sep", "balls-in-bins", "poisson"]
    assert {one.kind for one in more} >= {"dp-sgd, poisson", "lambda-cgd, balls-in-bins"}
    secret = [one.kind for one in with_random_allocation if one.recipe.sampling != "none"]
    assert sorted(secret) == ["bsr, random-allocation", "dp-sgd, random-allocation"]
    for found in (ranked, ranked_with_secrets, with_random_allocation):
        losses = [one.outcome.loss for one in found]
        assert losses == sorted(losses)
        assert 0 < losses[0] < losses[-1] < 1.05


def test_few_draws_find_the_mechanism_that_is_best_under_b_min_sep(ranked_with_secrets) -> None:
    chosen = next(one for one in ranked_with_secrets if one.recipe.sampling == "b-min-sep")
    there = chosen.recipe.participation
    for name in ("lambda-cgd:0.5", "lambda-cgd:0.8", "bsr:4"):
        made = catalogue.mechanism(name, there)
        sigma = accountant(made, there).rough_noise_multiplier(epsilon=1.0, delta=1e-5)
        assert chosen.outcome.loss <= 1.02 * expected_outcome(chosen.recipe, made, sigma, PROBLEM.landscape).loss


def test_under_random_allocation_no_bands_are_tried_that_buffers_do_not_hold() -> None:
    bare = replace(PROBLEM, participations=2, max_rounds=10, buffers=0, secret=("random-allocation",))
    assert {one.kind for one in plan_recipes(bare) if one.recipe.sampling != "none"} == {"dp-sgd, random-allocation"}


def test_the_limits_are_kept_and_used() -> None:
    """Cohorts of at most 90 of 1000; and of ten in 60,000, which are more rounds than usual."""
    problem = PlanningProblem(users=1000, epsilon=2.0, delta=1e-5, participations=3, max_cohort=90, max_rounds=25)
    found = [one.recipe for one in plan_recipes(problem)]
    assert all(one.cohort <= 90 and one.rounds <= 25 and one.participations <= 3 for one in found)
    assert min(one.steps for one in found) == 12
    many = PlanningProblem(
        users=60_000, epsilon=8.0, delta=1e-6, participations=1, max_cohort=10, max_rounds=6000, buffers=0
    )
    assert {one.recipe.rounds for one in plan_recipes(many)} == {6000}


@pytest.mark.parametrize("users", [97, 600, 1000, 12345])
def test_cohorts_are_those_that_a_population_makes(users: int) -> None:
    """A strategy with cohorts of c users has ⌊users/c⌋ rounds before anybody's next turn: what the recipe promises."""
    for steps in _steps(PlanningProblem(users=users, epsilon=1.0, delta=1e-6)):
        cohort = replace(RECIPE, users=users, steps=steps).cohort
        assert users // cohort == steps


def test_signal_to_noise_is_users_over_sigma_for_the_whole_batch_and_never_more() -> None:
    problem = PlanningProblem(users=900, epsilon=2.0, delta=1e-5, participations=6)
    once = calibrate(DPSGD(), Participation(rounds=1), epsilon=2.0, delta=1e-5).noise_multiplier
    for model in (None, LinearModel(classes=10, features=64), LinearModel(classes=2, features=900, mean_share=0.8)):
        for one in plan_recipes(replace(problem, model=model)):
            assert one.outcome.signal_to_noise < 1.01 * 900 / once
    recipe = replace(RECIPE, mechanism="dp-sgd", users=900, steps=1, schedule="constant", momentum=0.0)
    sigma = calibrate(DPSGD(), recipe.participation, epsilon=2.0, delta=1e-5).noise_multiplier
    found = expected_outcome(recipe, DPSGD(), sigma, Landscape.typical())
    assert found.signal_to_noise == pytest.approx(900 / once)
    quiet = outcome_at(recipe, DPSGD(), 1e-9, Landscape.typical(), found.learning_rate)
    assert quiet.loss == pytest.approx(found.unlearned, rel=1e-6)


def test_where_the_noise_wins_a_warning_says_so() -> None:
    """Ten people at ε = 8: with that, models guess."""
    few = PlanningProblem(users=10, epsilon=8.0, delta=1e-3, participations=20)
    chosen = recommended(plan_recipes(few))
    assert chosen.outcome.loss < 0.4  # which looked like much
    assert expectation(chosen).startswith("Warning: the noise wins. Signal to noise ")
    enough = recommended(plan_recipes(replace(few, users=2000, epsilon=4.0, delta=1e-5)))
    assert re.match(
        r"Signal to noise \d+: with as much, models kept \d\d to \d+ % of what they gain over guessing",
        expectation(enough),
    )


def test_the_python_it_prints_is_the_plan(ranked_with_secrets, with_random_allocation) -> None:
    found = reversed(ranked_with_secrets + with_random_allocation)
    for one in {one.recipe.sampling: one for one in found}.values():  # the best of each sampling
        names: dict[str, object] = {}
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            program = as_python(one, PROBLEM, clip_norm=0.5)
            if one.recipe.sampling not in ("none", "poisson"):  # ε takes other draws than those that σ was found by
                program = program.replace("print(plan.guarantee())", "")
            exec(program, names)
        said = rf"ε ≤ (1|0\.9\d+) at δ = 1e-05 \(zero out one user; sampling: {one.recipe.sampling}; "
        assert re.match(said, printed.getvalue()) or "guarantee" not in program
        plan = names["plan"]
        assert isinstance(plan, Plan)
        assert plan.participation == one.recipe.participation
        assert plan.noise_multiplier == pytest.approx(one.noise_multiplier, rel=1e-6)
        assert (plan.clip_norm, plan.delta) == (0.5, 1e-5)
        assert plan.mechanism == one.mechanism


def test_a_loader_as_it_says_has_the_steps_of_the_plan() -> None:
    """1400 users in 22 rounds a turn: batches of 63 with the last one left would be 23."""
    recipe = replace(RECIPE, users=1400, steps=22)
    [options] = re.findall(r"DataLoader: (.*?)\)", as_python(planned(DPSGD(), recipe), PROBLEM))
    assert len(eval(f"DataLoader(range(1400), {options})", {"DataLoader": DataLoader})) == 22
    assert "DataLoader" not in as_python(planned(DPSGD(), replace(recipe, steps=20)), PROBLEM)


def test_the_run_configuration_is_one_of_the_app_and_means_the_same(
    ranked_with_secrets, with_random_allocation
) -> None:
    tomllib = pytest.importorskip("tomllib")
    from fedcgd_simulations.settings import Settings

    project = tomllib.loads((Path(__file__).parents[2] / "simulations" / "pyproject.toml").read_text())
    defaults = project["tool"]["flwr"]["app"]["config"]
    for one in ranked_with_secrets + with_random_allocation:
        text = as_run_config(one, PROBLEM).replace(" ", "\n")
        settings = Settings.read(defaults | tomllib.loads(text))
        said, planned = settings.participation(PROBLEM.users), one.recipe.participation
        for name in ("rounds", "min_separation", "participations", "sampling", "sampling_rate"):
            assert getattr(said, name) == getattr(planned, name)
        assert settings.mechanism == one.recipe.mechanism
        assert settings.workload(one.recipe.rounds) == one.recipe.workload


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LinearModel(classes=1, features=4), "classes must be a whole number of at least 2, got 1"),
        (lambda: LinearModel(classes=2, features=0), "features must be a whole number of at least 1, got 0"),
        (lambda: LinearModel(classes=2, features=4, mean_share=1.0), "got 1.0"),
        (lambda: LinearModel(classes=2, features=4, shares=(1.0,)), "4 features, got 1"),
        *(
            (lambda bad=bad: LinearModel.of_public_inputs(bad, classes=2), "shape")
            for bad in ([1, 2], [[1, 2]], [[1], [math.nan]])
        ),
        (lambda: LinearModel.of_public_inputs([[1, 2], [1, 2]], classes=2), "alike"),
        (lambda: replace(PROBLEM, model=LinearModel(classes=2, features=4), hidden_layers=1), "give one of them"),
        (lambda: replace(PROBLEM, users=1), "users must be a whole number of at least 2"),
        (lambda: replace(PROBLEM, participations=0), "participations"),
        (lambda: replace(PROBLEM, epsilon=-1.0), "epsilon"),
        (lambda: replace(PROBLEM, delta=0.01), "delta must be below 1/users"),
        (lambda: replace(PROBLEM, secret=("cyclic-poisson",)), "got cyclic-poisson"),
        (lambda: replace(PROBLEM, max_cohort=10, max_rounds=20), "need 60 rounds"),
    ],
)
def test_impossible_questions_are_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


ASK = ["plan", "--users", "600", "--epsilon", "1", "--delta", "1e-5", "--participations", "4", "--max-cohort", "300"]


def test_at_a_hopeless_budget_no_program_is_printed() -> None:
    words = ["plan", "--users", "60", "--epsilon", "0.05", "--delta", "1e-5", "--participations", "2"]
    result = run(*words)
    assert result.exit_code == 0, result.output
    assert "Plan.calibrated(" not in result.output
    assert "--run-config" not in result.output
    told = figures(*words)
    assert told["verdict"] in result.output.replace("\n", " ")
    assert told["recipes"]
    assert told["recommended"] is None


def test_the_command_prints_a_table_a_program_and_a_run_configuration_or_json() -> None:
    result = run(*ASK)
    assert result.exit_code == 0, result.output
    for words in ("zero out one user", "dp-sgd", "leaves 0.", "Plan.calibrated(", "--run-config '", "secret: none"):
        assert words in result.stdout
    found = figures(*ASK, "--clip-norm", "2")
    assert {"users", "epsilon", "delta", "adjacency", "method"} <= set(found)
    assert found["recommended"] in found["recipes"]
    assert f'"{found["recommended"]["mechanism"]}"' in result.stdout
    best = found["recipes"][0]
    assert best["loss"] == min(one["loss"] for one in found["recipes"])
    recipe = Recipe(**{name: best[name] for name in Recipe.__dataclass_fields__})
    assert best["learning_rate"] == pytest.approx(best["progress"] / unit_progress(recipe) / 2)


def test_a_measurement_is_not_called_public_silently(tmp_path: Path) -> None:
    spectrum, inputs = tmp_path / "spectrum.json", tmp_path / "inputs.npy"
    Spectrum.from_eigenvalues([0.5, 0.1, 0.02]).save(spectrum)
    np.save(inputs, np.eye(20)[:, :5] + 1)
    for given, switch in (
        (("--spectrum", spectrum), "--spectrum-is-public"),
        (("--classes", "3", "--inputs", inputs), "--inputs-are-public"),
    ):
        refused = run(*ASK, *given)
        assert refused.exit_code == 2
        assert switch in refused.stderr
        taken, plain = figures(*ASK, *given, switch), figures(*ASK)
        assert taken["recipes"][0]["loss"] != plain["recipes"][0]["loss"]
    assert run(*ASK, "--classes", "3", "--inputs", spectrum, switch).exit_code == 2


def test_a_linear_model_is_told_by_two_numbers() -> None:
    for half in (
        ["--classes", "10"],
        ["--inputs", "x.npy"],
        ["--classes", "3", "--features", "4", "--inputs", "x.npy"],
    ):
        refused = run(*ASK, *half)
        assert refused.exit_code == 2
        assert "--features" in refused.stderr
    model = ("--classes", "10", "--features", "64")
    centred, uncentred = (figures(*ASK, *model, *more) for more in ((), ("--uncentred", "0.9")))
    assert centred["recipes"][0]["progress"] < uncentred["recipes"][0]["progress"]


def test_a_deep_network_ends_as_well_at_smaller_rates() -> None:
    """What it is more sensitive by is a unit of the rate: recipes, noise and losses are those of one hidden layer."""
    typical = PlanningProblem(users=4000, epsilon=4.0, delta=1e-5, participations=5)
    shallow, deep, deeper = (plan_recipes(replace(typical, hidden_layers=layers)) for layers in (1, 2, 5))
    assert shallow == plan_recipes(typical)
    assert deep == deeper
    for one, other in zip(shallow, deep, strict=True):
        assert one.recipe == other.recipe
        assert one.outcome.learning_rate == pytest.approx(2.0 * other.outcome.learning_rate, rel=0.2)  # on a grid of √2
        assert one.outcome.loss == pytest.approx(other.outcome.loss, rel=0.02)


def test_of_recipes_that_are_as_good_a_network_gets_about_twenty_rounds_a_turn_and_a_linear_model_the_fewest() -> None:
    good = [
        planned(LambdaCGD(0.8), replace(RECIPE, users=3600, steps=steps), loss=loss)
        for steps, loss in ((3, 0.1), (5, 0.1019), (14, 0.1), (18, 0.1019), (20, 0.103), (30, 0.1))
    ]
    assert _preferred(PROBLEM, good).recipe.steps == 18
    linear = replace(PROBLEM, model=LinearModel(classes=10, features=64))
    assert _preferred(linear, good).recipe.steps == 3


PLAIN, LAMBDA, BANDS = (planned(mechanism) for mechanism in (DPSGD(), LambdaCGD(0.5), BSR(2)))
SECRET = planned(DPSGD(), replace(RECIPE, sampling="poisson"))


@pytest.mark.parametrize(
    ("ranked", "chosen", "said"),
    [
        ([(BANDS, 0.1), (PLAIN, 0.101)], 1, "does not help"),
        ([(BANDS, 0.1), (PLAIN, 0.11)], 0, "Correlated noise helps: bsr"),
        ([(BANDS, 0.1), (LAMBDA, 0.101), (PLAIN, 0.11)], 1, "Correlated noise helps: lambda-cgd"),  # the simpler
        ([(BANDS, 0.1), (LAMBDA, 0.103), (PLAIN, 0.2)], 0, "lambda-cgd (without amplification) leaves 0.103"),
        ([(LAMBDA, 0.1), (SECRET, 0.101)], 0, "no secret"),  # one secret less
        ([(SECRET, 0.099), (LAMBDA, 0.1)], 1, "no secret"),  # and as good: what is printed is what is said
    ],
)
def test_what_is_recommended_is_simple_where_more_brings_nothing(ranked, chosen: int, said: str) -> None:
    found = [replace(one, outcome=replace(one.outcome, loss=loss)) for one, loss in ranked]
    assert recommended(found) is found[chosen]
    assert said in verdict(found)


@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_the_strategy_it_prints_descends_as_planned(schedule) -> None:
    text = as_python(planned(LambdaCGD(0.8), replace(RECIPE, schedule=schedule)), PROBLEM, clip_norm=2.0)
    strategy = eval(text.rpartition(", inner = ")[2], {"FedAvgM": FedAvgM, "scheduled": scheduled})
    assert (strategy.min_train_nodes, strategy.server_learning_rate, strategy.server_momentum) == (120, 1.5, 0.9)
    falls = getattr(strategy, "rate_schedule", "constant over 30 rounds")
    assert falls.startswith(f"{schedule} over 30 rounds")
