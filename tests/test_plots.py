"""Plots hold the figures they are given, with the right marks, and are written as PNG and SVG."""

import json
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from fedcgd.optimisation.catalogue import TABLE
from fedcgd.participation import Sampling
from fedcgd_experiments import plots
from fedcgd_experiments.experiment import Point, Setup, identity

BASE = Setup(mechanism="dp-sgd", epsilon=4.0, delta=1e-5, steps=9, epochs=10)
SETUPS = [BASE] + [replace(BASE, mechanism=f"lambda-cgd:{lam}") for lam in (0.5, 0.9)]
SETUPS += [replace(setup, epsilon=8.0) for setup in SETUPS]


def run(setup, accuracy, seed, split, rate=1.0):
    seed += 1000 * (split == "test") + 1
    point = Point(setup=setup, task="digits", clip_norm=1.0, learning_rate=rate, seed=seed, split=split)
    return {"kind": "run", "point": json.loads(identity(point)), "accuracy": accuracy}


RUNS = [
    run(setup, 0.5 + 0.1 * index + 0.02 * seed, seed, split)
    for index, setup in enumerate(SETUPS)
    for seed in (-1, 0, 1)
    for split in ("validation", "test")
]
CALIBRATIONS = {
    identity(setup): {"setup": json.loads(identity(setup)), "rmse": rmse}
    for setup, rmse in zip(SETUPS, (10.0, 4.0, 2.5, 6.0, 3.0, 1.2), strict=True)
}


def points(axes):
    return [line for container in axes.containers for line in [container.lines[0]]]


def test_accuracy_against_lambda_has_a_panel_for_each_budget():
    figure = plots.accuracy_against_lambda(RUNS, {})
    assert [axes.get_title() for axes in figure.axes] == ["ε = 4, δ = 1e-05", "ε = 8, δ = 1e-05"]
    (curve,) = points(figure.axes[0])
    assert list(curve.get_xdata()) == [0, 0.5, 0.9]
    assert list(curve.get_ydata()) == pytest.approx([0.5, 0.6, 0.7])


def test_a_sampling_looks_the_same_in_every_panel():
    """Balls-in-Bins at ε = 8 only; no amplification at both."""
    amplified = [run(replace(SETUPS[3], sampling="balls-in-bins"), 0.8, 0, "validation")]
    poisson = [run(replace(BASE, sampling="poisson"), 0.8, 0, "validation")]  # has no λ
    figure = plots.accuracy_against_lambda(poisson + amplified + RUNS, {})
    first, second = (points(axes) for axes in figure.axes)
    assert len(first) == 1
    assert {line.get_linestyle() for line in first} < {line.get_linestyle() for line in second}
    (legend,) = figure.legends
    assert [text.get_text().split(",")[0] for text in legend.get_texts()] == ["no amplification", "balls-in-bins"]
    assert all(axes.get_xlim()[1] > 0.9 for axes in figure.axes)


def test_the_optimal_lambdas_are_those_of_the_closed_forms():
    """RMSE² is proportional to sens²·(n + (1 − λ)²·n(n − 1)/2), MaxSE² to sens²·(1 + (n − 1)(1 − λ)²), k = n/b."""
    n, b, k = 90, 9, 10
    lam = np.linspace(1e-6, 0.9999, 200_001)
    sens = (1 - lam ** (2 * b)) / ((1 - lam**2) * (1 - lam**b) ** 2)
    sens = sens * sum((1 - lam ** (b * j)) ** 2 for j in range(1, k + 1))
    rmse = lam[(sens * (n + (1 - lam) ** 2 * n * (n - 1) / 2)).argmin()]
    max_se = lam[(sens * (1 + (n - 1) * (1 - lam) ** 2)).argmin()]
    assert plots.optimal_lambdas(BASE) == pytest.approx((rmse, max_se), abs=1e-3)
    assert rmse < max_se


def test_what_the_rules_chose_is_marked():
    figure = plots.accuracy_against_lambda(RUNS, {BASE: {"practical": 0.61}})
    marked = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes]
    assert "practical, none: 0.61" in marked[0]
    assert [label.split(":")[0] for label in marked[1]] == ["max-se", "rmse"]  # nothing was recorded at ε = 8
    assert any(list(line.get_xdata()) == [0.61, 0.61] for line in figure.axes[0].lines)


def test_accuracy_against_epsilon_shows_the_lambda_chosen_by_validation():
    axes = plots.accuracy_against_epsilon(RUNS).axes[0]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["dp-sgd", "lambda-cgd"]
    _, chosen = points(axes)  # 0.9 is the better λ at both budgets
    assert list(chosen.get_xdata()) == pytest.approx([4, 8], rel=0.03)  # beside the other curve
    assert list(chosen.get_ydata()) == pytest.approx([0.7, 1.0])


def test_a_curve_ascends_in_epsilon_whatever_lambda_was_chosen():
    runs = [
        run(replace(BASE, mechanism=f"lambda-cgd:{lam}", epsilon=epsilon), 0.6, 0, split)
        for lam, epsilon in ((0.8, 1.0), (0.9, 2.0), (0.5, 4.0))
        for split in ("validation", "test")
    ]
    (curve,) = points(plots.accuracy_against_epsilon(runs).axes[0])
    assert list(curve.get_xdata()) == [1, 2, 4]


def test_test_accuracy_is_at_the_learning_rate_that_validation_chose():
    other = [run(BASE, 0.99, 0, "test", rate=2.0), run(BASE, 0.1, 0, "validation", rate=2.0)]
    assert plots.by_setup(RUNS + other, "test") == plots.by_setup(RUNS, "test")
    better = [*other, run(BASE, 0.9, 1, "validation", rate=2.0), run(BASE, 0.9, 2, "validation", rate=2.0)]
    assert plots.by_setup(RUNS + better, "test")[BASE] == (0.99, 0.0)


def test_all_amplification_is_on_one_axis():
    amplified = [
        run(replace(setup, sampling="balls-in-bins"), 0.8, 0, split)
        for setup in SETUPS
        for split in ("test", "validation")
    ]
    amplified += [run(replace(SETUPS[0], sampling="poisson"), 0.7, 0, split) for split in ("test", "validation")]
    figure = plots.accuracy_against_epsilon(RUNS + amplified)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["no amplification, 10 epochs of 9 steps", "with amplification, 10 epochs of 9 steps"]
    assert list(points(figure.axes[0])[1].get_ydata()) == pytest.approx([0.7, 1.0])
    labels = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    assert labels == ["dp-sgd, balls-in-bins", "dp-sgd, poisson", "lambda-cgd, balls-in-bins"]
    assert [list(line.get_ydata()) for line in points(figure.axes[1])] == [[0.8, 0.8], [0.7], [0.8, 0.8]]


def test_a_mechanism_looks_the_same_in_every_figure():
    bisr = replace(BASE, mechanism="bisr:4")
    amplified = replace(SETUPS[1], sampling="balls-in-bins")
    runs = [run(setup, 0.8, 0, split) for setup in (bisr, SETUPS[1], amplified) for split in ("test", "validation")]
    first, second = (points(axes) for axes in plots.accuracy_against_epsilon(runs).axes)
    alone = points(plots.accuracy_against_epsilon(runs[2:]).axes[0])
    looks = [[(line.get_color(), line.get_marker()) for line in lines] for lines in (first, second, alone)]
    assert looks[0][0] == looks[1][0] == looks[2][0]  # DP-λCGD
    assert looks[0][1] != looks[0][0]
    assert first[0].get_linestyle() != second[0].get_linestyle()


def test_every_mechanism_of_the_table_has_a_look_of_its_own():
    assert set(plots.MARKS) == set(TABLE)
    assert len(set(plots.MARKS.values())) == len({marker for _, marker in plots.MARKS.values()}) == len(TABLE)
    assert set(plots.LINES) == set(get_args(Sampling))


def test_error_ratios_are_over_dp_sgd_at_the_same_budget():
    """λ = 0.9 was best on validation: 2.5/10 and 1.2/6."""
    axes = plots.error_ratios(RUNS, CALIBRATIONS).axes[0]
    (curve,) = [line for line in axes.lines if len(line.get_xdata()) == 2 and line.get_marker() != "None"]
    assert tuple(curve.get_xdata()) == (4, 8)
    assert tuple(curve.get_ydata()) == pytest.approx((0.25, 0.2))


def test_error_ratios_leave_out_what_was_only_tuned():
    bisr = replace(BASE, mechanism="bisr:4")
    known = CALIBRATIONS | {identity(bisr): {"setup": json.loads(identity(bisr)), "rmse": 3.0}}
    for split, labels in (("validation", ["lambda-cgd"]), ("test", ["lambda-cgd", "bisr"])):
        runs = [*RUNS, run(bisr, 0.7, 0, "validation"), run(bisr, 0.7, 0, split)]
        axes = plots.error_ratios(runs, known).axes[0]
        assert [text.get_text() for text in axes.get_legend().get_texts()] == labels


@pytest.mark.parametrize("first", ["opacus", "dp-sgd"])
def test_runtime_bars_show_the_ratios_to_the_first_row(first):
    row = {"noise": "replay", "bands": 2, "ratio": 1.1, "quartiles": [1.05, 1.2]}
    record = {
        "model": "cnn",
        "parameters": 300_000,
        "device": "cpu",
        "mode": "ghost",
        "rows": [row | {"noise": first, "bands": 1, "ratio": 1.0, "quartiles": [1.0, 1.0]}, row],
    }
    axes = plots.runtime_bars([record]).axes[0]
    assert [bar.get_height() for bar in axes.patches] == [1.0, 1.1]
    assert [label.get_text() for label in axes.get_xticklabels()] == [first, "replay p=2"]
    assert axes.get_ylabel() == f"time of a step over that of {first}"
    assert axes.get_title() == "cnn (0.3 M), ghost, cpu"


def test_a_plot_is_written_as_its_ending_says(tmp_path):
    for name, start in (("a/ratios.png", b"\x89PNG"), ("a/ratios.svg", b"<?xml"), ("b/ratios.svg", b"<?xml")):
        plots.save(plots.error_ratios(RUNS, CALIBRATIONS), tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    assert len(list((tmp_path / "a").iterdir())) == 2
    assert (tmp_path / "a" / "ratios.svg").read_bytes() == (tmp_path / "b" / "ratios.svg").read_bytes()


@pytest.mark.parametrize("draw", [plots.accuracy_against_epsilon, lambda runs: plots.accuracy_against_lambda(runs, {})])
def test_missing_figures_are_refused(draw):
    with pytest.raises(ValueError, match="are in these results"):
        draw([])
    with pytest.raises(ValueError, match="RMSE ratios need dp-sgd"):
        plots.error_ratios([], {})
