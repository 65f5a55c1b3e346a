"""Rules for λ: what they choose, and the loss against the tuned λ, on the same seeds."""

import json
import math
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fedcgd.accounting.selection import select_lambda
from fedcgd_experiments.__main__ import app
from fedcgd_experiments.experiment import Point, Setup, identity
from fedcgd_experiments.rules import RULES, budgets, chosen_lambdas, losses, rule_points, rule_record
from fedcgd_experiments.sweep import ResultsFile, to_point

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


@pytest.mark.parametrize("objective", ["rmse", "max-se", "amplified-rmse", "practical"])
def test_the_papers_rules_are_those_of_the_library(objective):
    expected = select_lambda(BUDGET.participation(), objective=objective, epsilon=2.0, delta=1e-5).lam
    assert RULES[objective](BUDGET) == pytest.approx(expected, abs=1e-9)
    assert 0 < expected < 1


def test_a_third_of_the_excess_is_a_third_of_lambda_over_one_minus_lambda():
    least, chosen = RULES["amplified-rmse"](BUDGET), RULES["third of the excess"](BUDGET)
    assert 3 * chosen / (1 - chosen) == pytest.approx(least / (1 - least))
    assert RULES["practical"](BUDGET) < chosen < least


def test_a_rule_is_recorded_to_three_decimals():
    made = rule_record(("rmse", BUDGET))
    assert made["lam"] == round(RULES["rmse"](BUDGET), 3)
    assert chosen_lambdas([json.loads(json.dumps(made))]) == {BUDGET: {"rmse": made["lam"]}}


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
    assert (row.tuned_lam, row.lam, row.rule, row.seeds) == (0.5, 0.93, "rmse", 3)
    assert (row.tuned_accuracy, row.accuracy) == pytest.approx((0.61, 0.57))
    # differences −0.03, −0.04, −0.05: t = −6.928 with 2 degrees of freedom
    assert row.difference == pytest.approx(-0.04)
    assert row.p_value == pytest.approx(1 - 6.9282 / math.sqrt(2 + 6.9282**2), rel=1e-4)


def test_a_rule_that_finds_the_tuned_lambda_loses_nothing():
    ruled = [run("lambda-cgd:0.5", 0, 0.8, "validation")]
    ruled += [run("lambda-cgd:0.5", seed, 0.60 + 0.01 * seed) for seed in range(3)]
    (row,) = losses(swept(), ruled, [record("rmse", 0.5)])
    assert row.difference == 0
    assert math.isnan(row.p_value)


def test_the_command_judges_every_rule_and_the_plot_leaves_its_runs_out(tmp_path):
    swept, ruled = tmp_path / "digits.jsonl", tmp_path / "digits-rules.jsonl"
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
    command += ["--mechanism", "lambda-cgd:0.5", "--epsilon", "8", "--address", "here"]
    command += ["--learning-rate", "2", "--learning-rate", "4", "--learning-rate", "8"]
    for words in (
        command,
        ["rules", str(swept), "--output", str(ruled), "--seeds", "2", "--address", "here"],
        ["plot", str(swept), str(ruled), "--output", str(tmp_path / "plots")],
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    runs = [to_point(r) for r in ResultsFile(ruled).runs().values()]
    (chosen,) = chosen_lambdas(ResultsFile(ruled).records).values()
    assert set(chosen) == set(RULES)
    assert {p.setup.lam for p in runs} == set(chosen.values())
    assert {p.seed for p in runs if p.split == "test"} == {1000, 1001}
    assert len(losses(list(ResultsFile(swept).runs().values()), list(ResultsFile(ruled).runs().values()),
                      ResultsFile(ruled).records)) == len(RULES)  # fmt: skip
