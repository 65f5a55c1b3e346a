"""Rules for λ: what they choose, and the loss against the tuned λ, on the same seeds."""

import json
import math
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fedcgd.accounting.selection import select_lambda
from fedcgd.curvature import Spectrum
from fedcgd.curvature.loss import final_loss
from fedcgd.curvature.quadratic import Quadratic
from fedcgd.mechanisms import LambdaCGD
from fedcgd.mechanisms.sensitivity import sensitivity
from fedcgd_experiments.__main__ import app
from fedcgd_experiments.experiment import Point, Setup, identity
from fedcgd_experiments.rules import (
    CURVATURE,
    NAMES,
    RULES,
    budgets,
    chosen_lambdas,
    curvature_record,
    losses,
    rule_points,
    rule_record,
)
from fedcgd_experiments.sweep import ResultsFile, best_rates, to_point

BUDGET = Setup(mechanism="dp-sgd", epsilon=2.0, delta=1e-5, steps=9, epochs=10)
POISSON = replace(BUDGET, sampling="poisson")


def run(mechanism, seed, accuracy, split="test", *, budget=BUDGET, rate=1.0):
    seed += 1000 * (split == "test")
    setup = replace(budget, mechanism=mechanism)
    point = Point(setup=setup, task="digits", clip_norm=1.0, learning_rate=rate, seed=seed, split=split)
    return {"kind": "run", "point": json.loads(identity(point)), "accuracy": accuracy}


def record(rule, lam, budget=BUDGET):
    return {"kind": "rule", "rule": rule, "setup": json.loads(identity(budget)), "lam": lam}


def swept():
    """λ = 0.5 is best on validation, and 0.8 on test."""
    runs = [run(f"lambda-cgd:{lam}", 0, value, "validation") for lam, value in ((0.5, 0.8), (0.8, 0.7))]
    runs += [run("lambda-cgd:0.5", seed, 0.60 + 0.01 * seed) for seed in range(3)]
    return [*runs, *(run("lambda-cgd:0.8", seed, 0.9) for seed in range(3))]


@pytest.mark.parametrize("rule", RULES)
def test_the_rules_are_those_of_the_library(rule):
    objective = "excess" if rule == "third of the excess" else rule
    expected = select_lambda(BUDGET.participation(), objective=objective, epsilon=2.0, delta=1e-5).lam
    assert RULES[rule](BUDGET) == pytest.approx(expected, abs=1e-9)
    assert 0 < expected < 1


def test_a_third_of_the_excess_is_a_third_of_lambda_over_one_minus_lambda():
    least, chosen = RULES["amplified-rmse"](BUDGET), RULES["third of the excess"](BUDGET)
    assert 3 * chosen / (1 - chosen) == pytest.approx(least / (1 - least))
    assert RULES["practical"](BUDGET) < chosen < least


def test_a_rule_is_recorded_to_three_decimals():
    made = rule_record(("rmse", BUDGET))
    assert made["lam"] == round(RULES["rmse"](BUDGET), 3)
    assert chosen_lambdas([json.loads(json.dumps(made))]) == {BUDGET: {"rmse": made["lam"]}}


@pytest.mark.parametrize("rate", [0.5, 2.0, 50.0])
def test_the_curvature_rule_adds_least_loss_on_the_quadratic_at_that_rate(rate):
    """Against a search over a grid; at η = 50 the eigenvalue 0.3 would diverge, and counts as 1/η."""
    spectrum = Spectrum.of([0.3, 0.01], [5, 100])
    made = json.loads(json.dumps(curvature_record((BUDGET, rate), spectrum)))
    assert (made["rule"], made["learning_rate"], made["spectrum"]) == (CURVATURE, rate, spectrum.digest)
    tame = Quadratic(Spectrum.of([min(0.3, 1 / rate), 0.01], [5, 100]), rate)
    participation = BUDGET.participation()

    def loss(lam):
        mechanism = LambdaCGD(lam)
        return final_loss(mechanism, 90, tame, stddev=sensitivity(mechanism, participation).value)

    least = min((i / 500 for i in range(500)), key=loss)
    assert made["lam"] == pytest.approx(least, abs=0.003)
    assert chosen_lambdas([made]) == {BUDGET: {CURVATURE: made["lam"]}}


def test_rules_are_judged_where_lambda_was_tuned():
    runs = [*swept(), run("dp-sgd", 0, 0.5, "validation", budget=POISSON)]
    assert budgets(runs) == [BUDGET]


def test_the_learning_rate_at_a_rules_lambda_is_tuned_as_in_the_sweep():
    runs = [run("lambda-cgd:0.5", seed, 0.5, "validation", rate=rate) for seed in range(2) for rate in (1.0, 2.0)]
    points = rule_points(runs, [record("rmse", 0.93), record("practical", 0.0)])
    assert {(p.setup.lam, p.seed, p.learning_rate) for p in points} == {
        (lam, seed, rate) for lam in (0.93, 0.0) for seed in range(2) for rate in (1.0, 2.0)
    }
    assert {p.split for p in points} == {"validation"}


def test_the_loss_is_against_the_lambda_that_validation_chose():
    ruled = [run("lambda-cgd:0.93", 0, 0.5, "validation")]
    ruled += [run("lambda-cgd:0.93", seed, value) for seed, value in enumerate((0.57, 0.57, 0.57))]
    (row,) = losses(swept(), ruled, [record("rmse", 0.93)])
    assert (row.baseline_lam, row.lam, row.rule, row.seeds) == (0.5, 0.93, "rmse", 3)
    assert (row.baseline, row.accuracy) == pytest.approx((0.61, 0.57))
    # differences −0.03, −0.04, −0.05: t = −6.928 with 2 degrees of freedom
    assert row.difference == pytest.approx(-0.04)
    assert row.p_value == pytest.approx(1 - 6.9282 / math.sqrt(2 + 6.9282**2), rel=1e-4)


def test_rules_are_compared_with_one_another_on_the_same_seeds():
    ruled = [run(f"lambda-cgd:{lam}", 0, 0.5, "validation") for lam in (0.2, 0.6)]
    for seed, values in enumerate(((0.5, 0.53), (0.5, 0.54), (0.5, 0.55))):
        ruled += [run(f"lambda-cgd:{lam}", seed, value) for lam, value in zip((0.2, 0.6), values, strict=True)]
    chosen = [record("practical", 0.2), record("third of the excess", 0.6)]
    (row,) = losses(swept(), ruled, chosen, against="practical")
    assert (row.rule, row.lam, row.baseline_lam) == ("third of the excess", 0.6, 0.2)
    assert row.difference == pytest.approx(0.04)
    assert losses(swept(), ruled, chosen[1:], against="practical") == []


def test_a_rule_that_finds_the_tuned_lambda_loses_nothing():
    ruled = [run("lambda-cgd:0.5", 0, 0.8, "validation")]
    ruled += [run("lambda-cgd:0.5", seed, 0.60 + 0.01 * seed) for seed in range(3)]
    (row,) = losses(swept(), ruled, [record("rmse", 0.5)])
    assert row.difference == 0
    assert math.isnan(row.p_value)


def test_the_command_judges_every_rule_and_the_plot_leaves_its_runs_out(tmp_path):
    swept, ruled, spectrum = (tmp_path / name for name in ("digits.jsonl", "digits-rules.jsonl", "spectrum.json"))
    Spectrum.of([0.2, 0.01], [5, 645]).save(spectrum)
    command = [
        "sweep",
        "--output",
        str(swept),
        "--batch",
        "420",
        "--epochs",
        "2",
        "--tuning-seeds",
        "1",
        "--seeds",
        "2",
    ]
    command += ["--mechanism", "dp-sgd", "--mechanism", "lambda-cgd:0.5", "--epsilon", "8", "--address", "here"]
    command += ["--learning-rate", "2", "--learning-rate", "4", "--learning-rate", "8"]
    judge = [
        "rules",
        str(swept),
        "--output",
        str(ruled),
        "--seeds",
        "2",
        "--address",
        "here",
        "--spectrum",
        str(spectrum),
    ]
    asked = []
    for words in (
        command,
        [*judge, "--rule", "practical"],
        judge,
        ["plot", str(swept), str(ruled), "--output", str(tmp_path / "plots")],
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        asked.append({rule for chosen in chosen_lambdas(ResultsFile(ruled).records).values() for rule in chosen})
    assert asked == [set(), {"practical"}, set(NAMES), set(NAMES)]
    refused = CliRunner().invoke(app, [*judge, "--rule", "guess"])
    assert refused.exit_code == 2
    assert "unknown rule 'guess'; the rules are rmse" in " ".join(refused.output.replace("│", " ").split())
    runs = [to_point(r) for r in ResultsFile(ruled).runs().values()]
    (fitted,) = (r for r in ResultsFile(ruled).records if r["kind"] == "rule" and r["rule"] == CURVATURE)
    assert {fitted["learning_rate"]} == {
        rate for setup, rate in best_rates(ResultsFile(swept).runs().values()).items() if setup.mechanism == "dp-sgd"
    }
    (chosen,) = chosen_lambdas(ResultsFile(ruled).records).values()
    assert set(chosen) == set(NAMES)
    assert {p.setup.lam for p in runs} == set(chosen.values())
    assert {p.seed for p in runs if p.split == "test"} == {1000, 1001}
    assert len(losses(list(ResultsFile(swept).runs().values()), list(ResultsFile(ruled).runs().values()),
                      ResultsFile(ruled).records)) == len(NAMES)  # fmt: skip
