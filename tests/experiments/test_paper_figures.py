"""The papers' figures as numbers: what they print, their lemmas, and closed forms."""

import json
import math
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fedcgd import DPSGD, LambdaCGD, Participation, error_norms, select_lambda, sensitivity
from fedcgd.optimisation import catalogue
from fedcgd_experiments import paper_figures, paper_numbers
from fedcgd_experiments.paper_figures import DRAWN
from fedcgd_experiments.paper_numbers import (
    FIGURES,
    bands,
    correlation,
    epochs_and_lambda,
    error_and_learning,
    example_b1,
    newman,
    normalisation,
    rational,
    square_root_error,
)

SIZES = [(k, b) for k in (1, 2, 8, 32, 128) for b in (1, 4, 32, 256, 2048) if k * b <= 2**16]


def max_se(lam: float, k: int, b: int) -> float:
    """MaxSE of DP-λCGD for σ_{ε,δ} = 1, n = k·b, by its closed forms (equations 13 to 15 of arXiv:2601.22334)."""
    n = k * b
    if lam == 0:
        return math.sqrt(n * k)
    lags = np.arange(1, k + 1)
    squares = (1 - lam ** (2 * b)) / ((1 - lam**2) * (1 - lam**b) ** 2) * ((1 - lam ** (b * lags)) ** 2).sum()
    return math.sqrt((1 + (1 - lam) ** 2 * (n - 1)) * float(squares))


def test_max_se_of_the_best_lambda_grows_as_lemma_2_says() -> None:
    """inf over λ of MaxSE is at most a constant times k + √k·n^(1/4) (Lemma 2 of arXiv:2601.22334); DP-SGD's √(nk) is not."""

    def bound(k: int, b: int) -> float:
        return k + math.sqrt(k) * (k * b) ** 0.25

    best, plain = {}, {}
    for k, b in SIZES:
        found = select_lambda(
            Participation(rounds=k * b, min_separation=b, max_participations=k),
            objective="max-se",
            epsilon=1.0,
            delta=1e-5,
        )
        best[k, b], plain[k, b] = max_se(found.lam, k, b) / bound(k, b), max_se(0.0, k, b) / bound(k, b)
        # The λ of the lemma's proof are allowed, so none of them is better.
        proofs = math.exp(-1 / b), math.exp(-1 / math.sqrt(k * b))
        assert max_se(found.lam, k, b) <= min(max_se(lam, k, b) for lam in proofs) * (1 + 1e-6)
    assert max(best.values()) < 1.6
    assert max(best[k, b] for k, b in SIZES if k * b > 2**14) <= 1.3 * max(
        best[k, b] for k, b in SIZES if k * b <= 2**12
    )
    assert max(plain.values()) > 5


def test_the_closed_forms_are_those_of_the_library() -> None:
    for lam, k, b in ((0.0, 3, 5), (0.7, 4, 6), (0.95, 2, 40)):
        participation = Participation(rounds=k * b, min_separation=b, max_participations=k)
        mechanism = LambdaCGD(lam)
        found = error_norms(mechanism, k * b).max_se(sensitivity(mechanism, participation).value)
        assert found == pytest.approx(max_se(lam, k, b), rel=1e-9)


def max_se_in_full_batches(c: np.ndarray) -> float:
    """‖A·C⁻¹‖_{2→∞} times the largest ‖C·u‖ over all u in {−1, 1}ⁿ: one dimension, b = 1, k = n."""
    n = len(c)
    signs = np.array(list(product((-1.0, 1.0), repeat=n - 1)))
    every = np.hstack([np.ones((len(signs), 1)), signs])
    largest = np.linalg.norm(every @ c.T, axis=1).max()
    return float(np.linalg.norm(np.tri(n) @ np.linalg.inv(c), axis=1).max() * largest)


def test_no_mechanism_beats_independent_noise_in_full_batches() -> None:
    """Lemma 5 of arXiv:2601.22334: for b = 1 and k = n, in one dimension, C = I has the least MaxSE, which is n."""
    n = 9
    assert max_se_in_full_batches(np.eye(n)) == pytest.approx(n)
    once = Participation(rounds=n, max_participations=1)  # what the optimised ones are optimised for
    for row in catalogue.TABLE.values():
        sizes = {catalogue.BANDS: 3, catalogue.BUFFERS: 2}
        spelling = ":".join([row.name, *(str(sizes.get(parameter, 0.6)) for parameter in row.parameters)])
        if row.name == "noise-curve":  # is fitted to a curvature
            continue
        c = catalogue.mechanism(spelling, once).columns(n, np.arange(n))
        assert max_se_in_full_batches(c) >= n * (1 - 1e-6), spelling
    generator = np.random.default_rng(0)
    random = [
        np.tril(generator.normal(size=(n, n)), -1) * s + np.diag(generator.uniform(0.5, 2, n)) for s in (0.05, 0.3, 1.0)
    ]
    for c in random:
        assert max_se_in_full_batches(c) >= n * (1 - 1e-9)
    # With fewer participations it is not so: the lemma needs k = n.
    few = Participation(rounds=n, min_separation=3)
    error = {lam: error_norms(LambdaCGD(lam), n).max_se(sensitivity(LambdaCGD(lam), few).value) for lam in (0.0, 0.4)}
    assert error[0.4] < error[0.0]


def test_example_b1_is_the_printed_matrix() -> None:
    found = example_b1()
    assert found["largest_difference"] < 6e-4  # it is printed with three digits
    assert found["error"] <= found["printed_error"]


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


def test_the_distance_to_the_square_root_is_the_largest_on_the_circle() -> None:
    inverse = np.array([1.0, -0.5, -0.1, -0.07])
    x = (1 - 1 / 4) * np.exp(2j * np.pi * np.linspace(0, 1, 4096, endpoint=False))
    slow = max(abs(sum(c * z**t for t, c in enumerate(inverse)) - (1 - z) ** 0.5) for z in x)
    assert square_root_error(inverse) == pytest.approx(slow)


@pytest.mark.parametrize("degree", [5, 9, 16, 25, 36])
def test_newmans_function_keeps_newmans_bound(degree: int) -> None:
    """sup |r(x) − √x| ≤ 3·exp(−√d) over [0, 1]; polynomials of that degree cannot (their error is of the order of 1/d)."""
    assert 0 < newman(degree) <= 3 * math.exp(-math.sqrt(degree))
    assert newman(36) < 0.28 / (2 * 36)


def test_buffers_come_nearer_than_bands() -> None:
    found = rational(rounds=100, degrees=(1, 2, 3))
    for name in ("approximation", "excess"):
        assert all(more > less for more, less in pairwise(found["blt"][name]))
        assert all(buffers < few for buffers, few in zip(found["blt"][name], found["bands"][name], strict=True))
    assert 0 < found["blt"]["excess"][2] < 0.01


def test_training_figures_tune_each_point() -> None:
    found = epochs_and_lambda(epochs=(1,), lams=(0.0, 0.5), rates=(0.5, 2.0), seeds=(0, 1), batch=126)
    assert found["steps"] == 10
    assert all(
        0.05 < mean <= 1 and spread >= 0 and rate in (0.5, 2.0)
        for mean, spread, rate in found["accuracy"]["1"].values()
    )
    learned = error_and_learning(
        optimizer="adam",
        mechanisms=("dp-sgd",),
        errors=(0.1, 1000.0),
        rates=(0.003, 0.03),
        seeds=(0, 1),
        epochs=1,
        batch=126,
    )
    quiet, loud = learned["cross_entropy"]["dp-sgd"]
    assert quiet[0] < loud[0]
    assert learned["max_se"]["dp-sgd"] == pytest.approx([e * math.sqrt(10 / 5.5) for e in (0.1, 1000.0)])


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


def test_independent_noise_is_named() -> None:
    assert paper_numbers.banded(1, 10) == DPSGD()
