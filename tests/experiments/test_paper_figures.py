"""The papers' figures as numbers: what they print, and their closed forms."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from fedcgd_experiments import paper_figures
from fedcgd_experiments.paper_figures import DRAWN
from fedcgd_experiments.paper_numbers import (
    FIGURES,
    bands,
    correlation,
    normalisation,
)


def test_a_round_has_more_noise_and_the_model_less() -> None:
    found = correlation(lam=0.8, rounds=100, epochs=4)
    ours, plain = found["lambda-cgd"], found["dp-sgd"]
    assert ours["in_a_round"] > plain["in_a_round"]
    assert ours["in_the_model"][-1] < plain["in_the_model"][-1]
    for t, value in zip(found["after"], ours["in_the_model"], strict=True):
        assert value == pytest.approx(ours["noise_multiplier"] * math.sqrt(1 + 0.2**2 * (t - 1)))
    assert ours["in_a_round"] == pytest.approx(ours["noise_multiplier"] * math.sqrt(1 + 0.8**2))


def test_unit_columns_help_most_with_few_participations() -> None:
    """Figure 6 and Lemma 9 of arXiv:2601.22334."""
    for ratios in normalisation(epochs=(1, 2, 4, 16), separations=(10, 50))["ratios"].values():
        assert all(0.9 < ratio < 1 for ratio in ratios)
        assert all(less < more for less, more in pairwise(ratios))


def test_bands_lie_between_independent_noise_and_no_amplification() -> None:
    found = bands(rounds=16, epochs=(1, 16), epsilons=(2.0,), delta=1e-6)["curves"]["2"]
    one, full = found["epochs"]["1"], found["epochs"]["16"]
    assert list(full["rmse"]) == ["1"]
    assert full["rmse"]["1"] == pytest.approx(found["full_batch"])
    assert list(one["rmse"]) == ["1", "2", "4", "8", "16"]
    assert one["rmse"][str(one["best"])] == min(one["rmse"].values())
    assert one["unamplified"] == one["rmse"]["16"] / min(one["rmse"].values())
    assert one["uncorrelated"] == one["rmse"]["1"] / min(one["rmse"].values()) > 1


def test_the_command_keeps_what_it_has_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setitem(FIGURES, "correlation", lambda: calls.append("once") or correlation(rounds=20, epochs=2))
    arguments = ["--numbers", str(tmp_path / "n.json"), "--output", str(tmp_path), "--only", "correlation"]
    for _ in range(2):
        done = CliRunner().invoke(paper_figures.app, arguments)
        assert done.exit_code == 0, done.output
    assert calls == ["once"]
    assert json.loads((tmp_path / "n.json").read_text())["correlation"]["rounds"] == 20
    assert (tmp_path / "paper-correlation.png").stat().st_size > 10_000
    assert CliRunner().invoke(paper_figures.app, [*arguments[:-1], "figure 9"]).exit_code == 2
    late = CliRunner().invoke(paper_figures.app, [*arguments[:-1], "normalisation", "--minutes", "0"])
    assert late.exit_code == 3


KEPT = Path(__file__).parents[2] / "benchmarks" / "results" / "paper_figures.json"


@pytest.mark.parametrize("name", sorted(json.loads(KEPT.read_text()).keys() & DRAWN.keys()))
def test_every_kept_figure_can_be_drawn(name: str) -> None:
    kept = json.loads(KEPT.read_text())
    figure = DRAWN[name](kept[name])
    assert all(axes.has_data() for axes in figure.axes)
    paper_figures.plt.close(figure)
