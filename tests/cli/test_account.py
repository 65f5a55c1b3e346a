"""`fedcgd account`: of σ, ε and δ the third from two, with all that the answer rests on, and why it holds."""

import json
from pathlib import Path

import pytest
from command_line import figures, run, shown

from fedcgd import LambdaCGD, Participation, accounting
from fedcgd.accounting.explain import explain
from fedcgd.optimisation import catalogue, table
from fedcgd.quadratic import Quadratic, Spectrum
from fedcgd.quadratic.loss import final_loss

pytestmark = pytest.mark.usefixtures("own_cache")

SHORT = ["--mechanism", "lambda-cgd:0.5", "--rounds", "40", "--separation", "10"]
BUDGET = ["--epsilon", "2", "--delta", "1e-5"]


def test_the_third_is_found_from_any_two() -> None:
    sigma = figures("account", *SHORT, *BUDGET)["noise_multiplier"]
    noise = ["--noise-multiplier", str(sigma)]
    assert figures("account", *SHORT, *noise, "--delta", "1e-5")["epsilon"] == pytest.approx(2, rel=1e-6)
    assert figures("account", *SHORT, *noise, "--epsilon", "2")["delta"] == pytest.approx(1e-5, rel=1e-6)
    less = figures("account", *SHORT, "--noise-multiplier", str(sigma / 2), "--delta", "1e-5")
    assert less["epsilon"] > 4


@pytest.mark.parametrize(("name", "known"), [("epsilon", ("--delta", "1e-5")), ("delta", ("--epsilon", "1"))])
def test_rounds_released_so_far_cost_less(name: str, known: tuple[str, str]) -> None:
    words = ["account", *SHORT, "--noise-multiplier", "3", *known]
    spent = [figures(*words, "--released", str(t))[name] for t in (0, 10, 40)]
    assert spent[0] < spent[1] < spent[2]
    assert figures(*words, "--released", "10")["condition"] in shown(run(*words, "--released", "10"))


def test_the_answer_says_what_it_rests_on() -> None:
    words = ["account", *SHORT, "--participations", "3", *BUDGET]
    found = figures(*words)
    expected = {
        "rounds": 40, "participations": 3, "min_separation": 10, "sampling": "none", "sampling_rate": None,
        "parameters": {"lam": 0.5}, "sensitivity_exact": True, "exact": True, "released": 40,
        "adjacency": "zero out one user",
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    text = shown(run(*words))
    participation = Participation(rounds=40, min_separation=10, max_participations=3)
    guarantee = accounting.calibrate(LambdaCGD(0.5), participation, epsilon=2, delta=1e-5)
    for part in (str(guarantee), str(participation), f"{found['sensitivity']:.6g} (exact)"):
        assert part in text


def test_a_bound_on_the_sensitivity_is_called_one() -> None:
    words = ["--mechanism", "band-inv-mf:8", "--rounds", "40", "--separation", "4", *BUDGET]
    found = figures("account", *words)
    participation = Participation(rounds=40, min_separation=4)
    mechanism = accounting.selection.select_mechanism("band-inv-mf:8", participation, epsilon=2, delta=1e-5)
    assert (
        accounting.calibrate(mechanism, participation, epsilon=2, delta=1e-5).proof.exact is found["sensitivity_exact"]
    )
    assert not found["sensitivity_exact"]
    for command in ("account", "compare"):
        assert f"≤ {found['sensitivity']:.6g}" in shown(run(command, *words))


def test_a_sampling_rate_is_a_number_or_a_fraction() -> None:
    words = ["--mechanism", "dp-sgd", "--rounds", "50", "--sampling", "poisson", "--delta", "1e-5"]
    found = figures("account", *words, "--noise-multiplier", "0.8", "--sampling-rate", "128/50000")
    assert (found["sampling_rate"], found["participations"]) == (128 / 50000, None)
    decimal = figures("account", *words, "--noise-multiplier", "0.8", "--sampling-rate", "0.1")
    assert decimal == figures("account", *words, "--noise-multiplier", "0.8", "--participations", "5")


@pytest.mark.parametrize("row", [row for row in table.TABLE.values() if row.parameters], ids=lambda row: row.name)
def test_numbers_may_be_left_out_as_the_help_says(row: table.Row) -> None:
    result = run("account", "--mechanism", row.name, "--rounds", "8", "--separation", "4", *BUDGET)
    assert (result.exit_code == 0) == (row.name not in ("blt", "nu-dp-ftrl", "noise-curve"))


def test_a_mechanism_is_fitted_to_a_curvature_at_the_fastest_rate_or_the_given_one(tmp_path: Path) -> None:
    spectrum = Spectrum.from_eigenvalues([1.0, 0.5, 0.2, 0.2, 0.05, 0.0])
    spectrum.save(tmp_path / "spectrum.json")
    who = Participation(rounds=40, min_separation=8)
    words = ["account", "--mechanism", "noise-curve:4", "--rounds", "40", "--separation", "8", *BUDGET]
    for more, rate in (["--learning-rate", "0.8"], 0.8), ([], 1.0):
        found = figures(*words, "--curvature", tmp_path / "spectrum.json", *more)
        quadratic = Quadratic(spectrum, rate)
        made = catalogue.mechanism("noise-curve:4", who, curvature=quadratic)
        assert found["loss"] == pytest.approx(final_loss(made, 40, quadratic, stddev=found["noise_multiplier"]))


EXPLAINED = ["--mechanism", "lambda-cgd:0.8", "--rounds", "12", "--separation", "4", "--explain"]


@pytest.mark.parametrize("asked", [{"epsilon": 2.0}, {"noise_multiplier": 3.0}])
def test_the_reasons_are_those_of_the_library(asked: dict[str, float]) -> None:
    participation = Participation(rounds=12, min_separation=4)
    expected = explain(LambdaCGD(0.8), participation, clip_norm=0.5, delta=1e-5, **asked)
    [(name, value)] = asked.items()
    words = ["account", *EXPLAINED, "--delta", "1e-5", "--clip-norm", "0.5", f"--{name.replace('_', '-')}", str(value)]
    found = figures(*words)["reasoning"]
    assert [(x["title"], x["statement"], x["value"]) for x in found] == [
        (step.title, step.statement, step.value) for step in expected
    ]
    text = " ".join(run(*words).stdout.split())
    at = [text.index(f"{count}. {step.title} {step.statement}") for count, step in enumerate(expected, start=1)]
    assert at == sorted(at)


def test_the_reasons_of_a_delta_that_was_asked_for_are_of_that_delta() -> None:
    found = figures("account", *EXPLAINED, "--noise-multiplier", "3", "--epsilon", "2")
    steps = {step["title"]: step["value"] for step in found["reasoning"]}
    assert steps["guarantee"] == pytest.approx(2, rel=1e-6)
    assert steps["noise"] == 3


@pytest.mark.parametrize(
    ("words", "remarked"),
    [(["--epsilon", "0.01"], "Note"), (["--epsilon", "20"], "Note"), (["--delta", "0.1"], "Warning"), ([], "")],
)
def test_what_nobody_takes_is_remarked_upon_and_the_result_stays_json(words: list[str], remarked: str) -> None:
    result = run("account", "--mechanism", "dp-sgd", "--rounds", "9", *BUDGET, *words, "--json")
    assert result.exit_code == 0
    assert result.stderr.partition(":")[0] == remarked
    json.loads(result.stdout)
