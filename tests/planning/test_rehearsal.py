"""Rehearsals: the noise is that of the real run, the best candidate is found, and nothing private is asked for."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import run
from sklearn.datasets import load_digits
from torch.nn import functional

from fedcgd.mechanisms import LambdaCGD
from fedcgd.planning import ArrayProxy, PlanningProblem, Recipe, Rehearsal, RehearsedRecipe, plan_recipes, rehearse
from fedcgd.planning.landscape import Landscape
from fedcgd.planning.planner import PlannedRecipe, shortlist
from fedcgd.planning.proxy import _clipped_mean
from fedcgd.planning.rehearsal import _identity
from fedcgd.planning.theory import outcome_at

RATES = (1 / 3, 3**-0.5, 1.0, 3**0.5, 3.0)
PROBLEM = PlanningProblem(users=600, epsilon=1.0, delta=1e-5, participations=2, max_rounds=10)
RECIPE = Recipe(
    mechanism="lambda-cgd:0.8", sampling="none", users=600, steps=5, participations=4, schedule="linear", momentum=0.9
)
MECHANISM, SIGMA, RATE = LambdaCGD(0.8), 30.0, 0.3
PLANNED = PlannedRecipe(RECIPE, MECHANISM, SIGMA, outcome_at(RECIPE, MECHANISM, SIGMA, Landscape.typical(), RATE))


def still(weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return np.zeros_like(weights)


@pytest.mark.parametrize(("examples", "share"), [(600, 1.0), (60, 1.0), (60, 0.25), (3, 1.0), (5000, 0.5)])
def test_the_noise_of_the_last_model_is_that_of_the_real_run(examples: int, share: float) -> None:
    """However many examples the proxy has, and whatever part of them is used: theory's deviation, to 3 %."""
    last = Rehearsal(PLANNED, seed=1, share=share).descend(np.zeros(20_000, np.float32), still, examples)
    assert last.std() == pytest.approx(PLANNED.outcome.noise, rel=0.03)
    assert last.std() != pytest.approx(PLANNED.outcome.noise * 1.1, rel=0.03)
    assert abs(last.mean()) < 0.03 * last.std()


def test_without_noise_it_is_descent_with_the_schedule_and_the_momentum() -> None:
    position, velocity = 2.0, 0.0
    for part in RECIPE.workload.rates(RECIPE.rounds):
        velocity = 0.9 * velocity + 0.5 * position
        position -= RATE * part * velocity
    quiet = replace(PLANNED, noise_multiplier=0.0)
    last = Rehearsal(quiet, seed=1).descend(np.full(3, 2.0), lambda weights, rows: 0.5 * weights, 10)
    assert last == pytest.approx(np.full(3, position), rel=1e-4)


@pytest.mark.parametrize(
    ("examples", "share", "used", "cohort"),
    [(600, 1.0, 600, 120), (100, 0.5, 50, 10), (5000, 1.0, 600, 120), (3, 1.0, 3, 1)],
)
def test_each_turn_takes_every_example_once(examples: int, share: float, used: int, cohort: int) -> None:
    seen: list[np.ndarray] = []

    def note(weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
        seen.append(rows)
        return np.zeros_like(weights)

    Rehearsal(PLANNED, seed=3, share=share).descend(np.zeros(2), note, examples)
    assert [len(rows) for rows in seen] == [cohort] * RECIPE.rounds
    counts = Counter(np.concatenate(seen).tolist())
    assert len(counts) == used
    assert max(counts) < examples
    assert max(counts.values()) - min(counts.values()) <= 1


def test_a_gradient_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got \(\)"):
        Rehearsal(PLANNED, seed=1).descend(np.zeros(4), lambda weights, rows: np.float32(0), 60)
    with pytest.raises(ValueError, match="needs an"):
        Rehearsal(PLANNED, seed=1).descend(np.zeros(4), still, 0)


def test_the_shortlist_is_what_is_nearly_as_good_each_way_once() -> None:
    found = shortlist(PROBLEM, 4)
    assert [one.outcome.loss for one in found] == sorted(one.outcome.loss for one in found)
    assert found[0].outcome.loss == pytest.approx(plan_recipes(PROBLEM)[0].outcome.loss, rel=0.02)
    assert found[-1].outcome.loss <= 1.2 * found[0].outcome.loss
    long = replace(
        PROBLEM, participations=20, epsilon=4.0, max_rounds=None, max_cohort=100
    )  # in which DP-SGD is far behind
    best, last = (plan_recipes(long)[place].outcome.loss for place in (0, -1))
    assert last > 1.3 * best
    assert max(one.outcome.loss for one in shortlist(long, 100)) <= 1.2 * best
    ways = [(one.kind, one.recipe.schedule, one.recipe.momentum) for one in found]
    assert len(set(ways)) == len(ways) == 3
    assert shortlist(PROBLEM, 2) == found[:2]


class Peak:
    """A score that is best for one recipe at one part of its planned rate, less for others; notes what it was asked."""

    def __init__(self, problem: PlanningProblem, place: int, part: float) -> None:
        best = shortlist(problem, 6)[place]
        self.recipe, self.rate = best.recipe, part * best.outcome.learning_rate
        self.asked: list[Rehearsal] = []

    def __call__(self, rehearsal: Rehearsal) -> float:
        self.asked.append(rehearsal)
        away = abs(math.log(rehearsal.planned.outcome.learning_rate / self.rate))
        noise = float(np.random.default_rng([rehearsal.seed, len(self.asked)]).normal()) * 0.01
        return -away - 0.2 * (rehearsal.planned.recipe != self.recipe) + noise


@pytest.mark.parametrize(("place", "part"), [(0, RATES[0]), (1, RATES[4]), (2, RATES[2])])
def test_the_best_candidate_is_found(place: int, part: float) -> None:
    peak, said = Peak(PROBLEM, place, part), list[str]()
    found = rehearse(PROBLEM, peak, public=True, progress=said.append)
    best = found[0]
    assert isinstance(best, RehearsedRecipe)
    assert best.recipe == peak.recipe
    assert best.outcome.learning_rate == pytest.approx(peak.rate)
    assert best.rehearsals == 7
    assert best.score == pytest.approx(0.0, abs=0.02)
    assert 0 < best.error < 0.01
    assert len({one.recipe for one in found}) == len(found)
    assert [one.rehearsals for one in found] == sorted((one.rehearsals for one in found), reverse=True)
    budget = [one.noise_multiplier for one in shortlist(PROBLEM, 6) if one.recipe == best.recipe]
    assert budget == [best.noise_multiplier]
    assert said[-1].startswith("100%")
    assert any("left" in text for text in said)


def test_what_diverges_is_never_first() -> None:
    planned = {one.recipe: one.outcome.learning_rate for one in shortlist(PROBLEM, 6)}

    def train(rehearsal: Rehearsal) -> float:
        part = rehearsal.planned.outcome.learning_rate / planned[rehearsal.planned.recipe]
        return math.inf if part > 1.5 else math.nan if part < 0.7 else 0.5

    for one in rehearse(PROBLEM, train, public=True)[:2]:
        assert one.outcome.learning_rate == planned[one.recipe]
        assert one.score == 0.5
    with pytest.raises(ValueError, match="no rehearsal"):
        rehearse(PROBLEM, lambda rehearsal: math.nan, public=True)


def test_what_is_on_record_is_not_tried_again(tmp_path: Path) -> None:
    record, peak = tmp_path / "tried.jsonl", Peak(PROBLEM, 1, RATES[3])
    first = rehearse(PROBLEM, peak, public=True, record=record)
    assert len(record.read_text().splitlines()) == len(peak.asked)
    whole = record.read_text()

    def never(rehearsal: Rehearsal) -> float:
        raise AssertionError("tried again")

    assert rehearse(PROBLEM, never, public=True, record=record) == first
    record.write_text(whole[:-20])  # killed while it wrote
    again = Peak(PROBLEM, 1, RATES[3])
    assert [one.recipe for one in rehearse(PROBLEM, again, public=True, record=record)] == [one.recipe for one in first]
    assert len(again.asked) == 1
    assert len(record.read_text().splitlines()) == len(peak.asked)
    assert all(json.loads(line)["recipe"]["users"] == 600 for line in record.read_text().splitlines())


def test_another_rehearsal_has_another_name_on_record() -> None:
    others = [
        Rehearsal(PLANNED, seed=1),
        Rehearsal(PLANNED, seed=2),
        Rehearsal(PLANNED, seed=1, share=0.5),
        Rehearsal(replace(PLANNED, noise_multiplier=31.0), seed=1),
        Rehearsal(replace(PLANNED, recipe=replace(RECIPE, momentum=0.0)), seed=1),
        Rehearsal(replace(PLANNED, outcome=replace(PLANNED.outcome, learning_rate=0.4)), seed=1),
    ]
    assert len({_identity(one) for one in others}) == len(others)


def test_a_proxy_is_not_called_public_silently() -> None:
    def never(rehearsal: Rehearsal) -> float:
        raise AssertionError("trained")

    with pytest.raises(ValueError, match="must not"):
        rehearse(PROBLEM, never, public=False)
    for wrong in ({"recipes": 0}, {"processes": 0}, {"repeats": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            rehearse(PROBLEM, never, public=True, **wrong)


def digits(hidden: int = 0) -> ArrayProxy:
    data = load_digits()
    return ArrayProxy(data.data[:400], data.target[:400], hidden=hidden)


def test_several_processes_give_what_one_gives() -> None:
    one, two = (rehearse(PROBLEM, digits(), public=True, recipes=1, processes=count) for count in (1, 2))
    assert one == two
    assert 0.1 < one[0].score < 0.9


@pytest.mark.parametrize("hidden", [0, 5])
def test_an_array_proxy_s_gradient_is_the_mean_of_clipped_gradients(hidden: int) -> None:
    generator = np.random.default_rng(0)
    x = np.hstack([3 * generator.normal(size=(9, 6)), np.ones((9, 1))]).astype(np.float32)
    x[:4] *= 0.05
    y = generator.integers(0, 3, 9)
    shapes = [(7, 3)] if not hidden else [(7, hidden), (hidden + 1, 3)]
    layers = [generator.normal(size=shape).astype(np.float32) for shape in shapes]
    total, scaled = torch.zeros(sum(layer.size for layer in layers)), 0
    for row, label in zip(x, y, strict=True):
        parts = [torch.tensor(layer, requires_grad=True) for layer in layers]
        seen = torch.tensor(row)
        for part in parts[:-1]:
            seen = torch.cat([torch.relu(seen @ part), torch.ones(1)])
        functional.cross_entropy((seen @ parts[-1])[None], torch.tensor([int(label)])).backward()
        flat = torch.cat([part.grad.flatten() for part in parts])
        scaled += bool(flat.norm() > 1)
        total += flat / max(1.0, float(flat.norm()))
    assert 0 < scaled < 9
    found = _clipped_mean(layers, x, np.eye(3, dtype=np.float32)[y])
    assert found == pytest.approx(total.numpy() / 9, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("hidden", [0, 16])
def test_an_array_proxy_learns_what_is_there_to_learn(hidden: int) -> None:
    long = replace(RECIPE, participations=20, users=300)
    planned = replace(PLANNED, recipe=long, noise_multiplier=0.0, outcome=replace(PLANNED.outcome, learning_rate=1.0))
    assert digits(hidden)(Rehearsal(planned, seed=0)) > 0.85
    data = load_digits()
    shuffled = np.random.default_rng(0).permutation(data.target[:400])
    assert ArrayProxy(data.data[:400], shuffled, hidden=hidden)(Rehearsal(planned, seed=0)) < 0.3


@pytest.mark.parametrize(
    ("inputs", "labels", "hidden", "what"),
    [
        (np.zeros(9), np.arange(9), 0, "rows of features, got shape"),
        (np.zeros((3, 2)), np.arange(3), 0, "at least 8 rows"),
        (np.full((9, 2), np.nan), np.arange(9), 0, "finite"),
        (np.zeros((9, 2)), np.arange(8), 0, "9 whole numbers"),
        (np.zeros((9, 2)), np.linspace(0, 1, 9), 0, "whole numbers"),
        (np.zeros((9, 2)), np.arange(9) - 1, 0, "from 0"),
        (np.zeros((9, 2)), np.zeros(9, int), 0, "two classes"),
        (np.zeros((9, 2)), np.arange(9), -1, "hidden must not be negative"),
    ],
)
def test_arrays_that_are_no_proxy_are_refused(inputs, labels, hidden: int, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        ArrayProxy(inputs, labels, hidden=hidden)


ASK = ["plan", "--users", "300", "--epsilon", "2", "--delta", "1e-5", "--participations", "2", "--max-rounds", "10"]
PROXY = ["--proxy", "a_public_proxy:train", "--proxy-is-public"]


@pytest.fixture
def a_public_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_public_proxy.py").write_text(
        "def train(rehearsal):\n    return -rehearsal.planned.outcome.learning_rate\nnumber = 3\n"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (PROXY[:2], "--proxy-is-public"),
        (["--record", "tried.jsonl"], "--proxy, or"),
        (["--proxy", "a_public_proxy:number", PROXY[-1]], "is of type int, not a function"),
    ],
)
def test_on_the_command_line_what_is_no_public_proxy_is_refused(words, says: str, a_public_proxy: None) -> None:
    refused = run(*ASK, *words)
    assert refused.exit_code == 2, refused.output
    assert says in refused.stderr


def test_the_command_line_takes_a_function_by_its_name(tmp_path: Path, a_public_proxy: None) -> None:
    words = [*ASK, *PROXY, "--record", "tried.jsonl"]
    taken = run(*words, "--json")
    assert taken.exit_code == 0, taken.output
    first = json.loads(taken.stdout)["recipes"][0]
    assert first["score"] == pytest.approx(-first["learning_rate"])
    assert first["rehearsals"] == 7
    assert f"learning rate {first['learning_rate']:.3g}" in first["python"]
    assert len((tmp_path / "tried.jsonl").read_text().splitlines()) > 30
    assert f"{first['score']:.3g} (7)" in run(*words).stdout
