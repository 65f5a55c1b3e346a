"""Runs in this process release the app's models, and Flower's own strategies are driven with the same cohorts and σ."""

import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_grid import FakeGrid, FakeNode
from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping, FedAvg
from typer.testing import CliRunner

from fedcgd.clipping.flat_models import flatten
from fedcgd_experiments import people, people_report, people_run, people_softmax
from fedcgd_experiments.in_process import NodeError
from fedcgd_experiments.people import STUDIES, Study, best, beyond, candidates, missing, name_of
from fedcgd_experiments.people_run import PeoplePoint, app_defaults, flower_adaptive_noise, run_people
from fedcgd_experiments.people_softmax import shared, train_people
from fedcgd_simulations import client_app, server_app
from fedcgd_simulations.flower_runs import local_superlink, run_app

POINT = PeoplePoint(
    task="digits", users="dirichlet:0.5:60", cohort=12, participations=2, mechanism="lambda-cgd:0.8", epsilon=8.0,
    clip_norm=0.5, learning_rate=1.5, local_epochs=2, local_batch=500, local_learning_rate=0.5, proximal=0.1, seed=3,
    split="test",
)  # fmt: skip
"""In whole batches: orders of examples are drawn from the model's bits, and would differ if rounding did."""


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def models_together(points: list[PeoplePoint], monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The last models of runs that are trained at once."""
    models: list[np.ndarray] = []

    def keep(model, *_, **__) -> float:
        models.append(flatten(model).numpy().copy())
        return 0.0

    monkeypatch.setattr(people_softmax, "evaluate", keep)
    train_people(points)
    return models


def model_of(point: PeoplePoint, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The last model of a run in this process."""
    models: list[np.ndarray] = []
    monkeypatch.setattr(people_run, "evaluate", lambda model, *_: models.append(flatten(model).numpy()) or 0.0)
    run_people(point)
    return models[0]


def test_the_models_of_the_app(tmp_path, monkeypatch) -> None:
    released: list[np.ndarray] = []
    load = server_app.load_arrays

    def keep(model, arrays) -> None:
        released.append(np.concatenate([array.numpy().ravel() for array in arrays.values()]))
        load(model, arrays)

    monkeypatch.setattr(server_app, "load_arrays", keep)
    monkeypatch.setattr(client_app, "vectorises", lambda model: False)  # user by user, each apart, on two nodes
    config = app_defaults() | POINT.run_config | {"results": str(tmp_path / "result.json")}
    grid = FakeGrid(
        {i: FakeNode(client_app.app, config={"partition-id": i, "num-partitions": 2}) for i in range(2)}, config
    )
    server_app.app(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config))
    figures = json.loads((tmp_path / "result.json").read_text())
    monkeypatch.undo()
    record = run_people(POINT)
    assert record["rounds"] == figures["releases"] == 10
    assert record["noise_multiplier"] == figures["noise_multiplier"]
    assert record["accuracy"] == pytest.approx(figures["accuracy"][-1], abs=0.006)  # two of 357 examples
    here = model_of(POINT, monkeypatch)
    assert np.linalg.norm(here - released[0]) > 1
    np.testing.assert_allclose(here, released[-1], atol=1e-4)
    monkeypatch.undo()
    other = model_of(replace(POINT, seed=4), monkeypatch)
    assert np.abs(other - released[-1]).max() > 0.1


def test_runs_that_are_trained_at_once_are_those_of_the_app(monkeypatch) -> None:
    others = {"mechanism": "blt:2", "epsilon": 2.0, "learning_rate": 0.7}
    local = {"local_learning_rate": 0.2, "proximal": 1.0, "clip_norm": 0.2}
    points = [
        POINT,
        replace(POINT, **others),
        replace(POINT, population=600),
        replace(POINT, mechanism="dp-sgd", **local),
    ]
    assert len({shared(point) for point in points}) == 1
    assert shared(POINT) != shared(replace(POINT, seed=4))
    assert shared(replace(POINT, model="tanh-cnn")) == ""
    together = models_together(points, monkeypatch)
    for point, found in zip(points, together, strict=True):
        expected = model_of(point, monkeypatch)
        assert np.linalg.norm(expected) > 1
        assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)  # the smoothing of the app's noise
    assert shared(POINT) != shared(replace(POINT, sampling="balls-in-bins"))
    quiet = replace(POINT, epsilon=1e7)
    np.testing.assert_allclose(models_together([quiet], monkeypatch)[0], model_of(quiet, monkeypatch), atol=5e-4)
    small = replace(POINT, local_batch=7)  # where the order of a user's examples matters, and is another one
    apart = models_together([small], monkeypatch)[0] - model_of(small, monkeypatch)
    assert 1e-3 < np.linalg.norm(apart) < 0.1 * np.linalg.norm(together[0])


@pytest.mark.parametrize(("sampling", "mechanism"), [("poisson", "dp-sgd"), ("balls-in-bins", "lambda-cgd:0.5")])
def test_people_who_are_sampled_secretly_are_those_of_the_app(sampling: str, mechanism: str, monkeypatch) -> None:
    point = replace(POINT, sampling=sampling, mechanism=mechanism, epsilon=4.0, cohort=6, participations=1)
    public = replace(point, sampling="none")
    known, secret = (people_run.prepared(one).guarantee for one in (public, point))
    assert (secret.sampling, secret.rounds) == (sampling, 10)
    assert secret.noise_multiplier < 0.8 * known.noise_multiplier
    [found], [others], expected = (
        *(models_together([one], monkeypatch) for one in (point, public)),
        model_of(point, monkeypatch),
    )
    assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)
    assert np.linalg.norm(found - others) > 0.2 * np.linalg.norm(expected)


def test_a_round_in_which_nobody_is_drawn_is_noise(monkeypatch) -> None:
    point = replace(POINT, sampling="poisson", mechanism="dp-sgd", cohort=1, participations=1)
    drawn: list[int] = []
    monkeypatch.setattr(people_softmax, "cohort", lambda *_, **__: drawn.append(1) or [])
    assert np.linalg.norm(models_together([point], monkeypatch)[0]) > 0.1
    assert len(drawn) == 60


def test_flowers_strategies_trained_at_once_are_flowers_own(monkeypatch) -> None:
    fixed = replace(POINT, mechanism="flower-fixed", learning_rate=1.0)
    adaptive = replace(fixed, mechanism="flower-adaptive", quantile=0.7, proximal=0.0)
    points = [POINT, fixed, adaptive, replace(adaptive, clip_norm=2.0, quantile=0.1, local_learning_rate=0.1)]
    assert len({shared(point) for point in points}) == 1
    for point, found in list(zip(points, models_together(points, monkeypatch), strict=True))[1:]:
        expected = model_of(point, monkeypatch)
        assert np.linalg.norm(expected) > 1
        np.testing.assert_allclose(found, expected, atol=1e-5)
    still = replace(fixed, local_learning_rate=1e-12)
    assert train_people([POINT, still])[1]["failure"] == "ZeroDivisionError: float division by zero"


@pytest.mark.slow
@pytest.mark.flower
def test_flwr_run_on_ray_has_the_accuracy_of_the_run_in_this_process(tmp_path: Path) -> None:
    with local_superlink(tmp_path / "flwr") as environment:
        figures = run_app(environment, POINT.run_config | {"results": str(tmp_path / "run.json")}, timeout=240)
    record = run_people(POINT)
    assert figures["releases"] == record["rounds"]
    assert record["accuracy"] == pytest.approx(figures["accuracy"][-1], abs=0.006)


def test_flowers_fixed_clipping_is_dp_fedavg_but_for_its_noise(monkeypatch) -> None:
    quiet = replace(POINT, epsilon=1e7, learning_rate=1.0)
    ours = model_of(replace(quiet, mechanism="dp-sgd"), monkeypatch)
    flowers = model_of(replace(quiet, mechanism="flower-fixed"), monkeypatch)
    assert np.linalg.norm(ours) > 0.5
    np.testing.assert_allclose(flowers, ours, atol=5e-3)
    loud = model_of(replace(POINT, mechanism="flower-fixed"), monkeypatch)
    assert np.abs(loud - flowers).max() > 0.05
    np.testing.assert_array_equal(loud, model_of(replace(POINT, mechanism="flower-fixed"), monkeypatch))


@pytest.mark.parametrize(("sigma", "cohort"), [(0.7, 100), (3.0, 100), (9.0, 100), (2.0, 1000)])
def test_adaptive_clipping_costs_what_the_accountant_says(sigma: float, cohort: int) -> None:
    multiplier, stddev = flower_adaptive_noise(sigma, cohort)
    flower = DifferentialPrivacyServerSideAdaptiveClipping(
        FedAvg(), multiplier, cohort, clipped_count_stddev=stddev
    )  # sets the noise of the sum
    assert 1 / math.sqrt(flower.noise_multiplier**-2 + stddev**-2) == pytest.approx(sigma)
    assert flower.noise_multiplier <= 1.2 * sigma


def test_flowers_adaptive_clipping_moves_away_from_its_quantile() -> None:
    """What docs/results_federated.md says of it; if this fails, Flower has mended it, and its numbers want to be made again."""
    flower = DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 0.0, 100, initial_clipping_norm=1.0)
    flower._geometric_update(1.0)  # every update was longer than the norm
    assert flower.clipping_norm < 1


def test_flowers_adaptive_clipping_draws_the_noise_of_the_next_norm(monkeypatch) -> None:
    """The other thing that docs/results_federated.md says of it: what was clipped to a norm has the noise of a smaller one."""
    norms: list[tuple[str, float]] = []
    flower = people_run.DifferentialPrivacyServerSideAdaptiveClipping
    for name in ("_geometric_update", "_add_noise_to_aggregated_arrays"):
        own = getattr(flower, name)

        def noted(self, *values, own=own, name=name):
            norms.append((name, self.clipping_norm))
            return own(self, *values)

        monkeypatch.setattr(flower, name, noted)
    run_people(replace(POINT, mechanism="flower-adaptive", clip_norm=0.01, participations=1))
    updates, noises = ([norm for name, norm in norms if name.startswith(start)] for start in ("_geo", "_add"))
    assert len(updates) == len(noises) == 5
    assert noises[:-1] == updates[1:]
    assert noises[0] < 0.95 * updates[0]


def test_a_larger_population_has_less_noise_in_the_mean(monkeypatch) -> None:
    near = [model_of(replace(POINT, population=size), monkeypatch) for size in (0, 60, 6_000, 6_000_000)]
    np.testing.assert_array_equal(near[0], near[1])
    noise = [float(np.linalg.norm(model - near[3])) for model in near[1:3]]
    assert noise[0] > 20 * noise[1] > 0
    with pytest.raises(ValueError, match="population must be 0 or at least the 60 users"):
        run_people(replace(POINT, population=59))


def test_what_breaks_off_in_flower_has_failed_and_no_accuracy(monkeypatch) -> None:
    logger = logging.getLogger("flwr")
    monkeypatch.setattr(logger, "level", logging.ERROR)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("by a norm of 0")

    point = replace(POINT, mechanism="flower-fixed")
    with monkeypatch.context() as patched:
        patched.setattr(people_run.DifferentialPrivacyServerSideFixedClipping, "aggregate_train", broken)
        record = run_people(point)
    assert record["accuracy"] is None
    assert record["failure"] == "ZeroDivisionError: by a norm of 0"
    assert logger.level == logging.ERROR
    monkeypatch.setattr(people_run, "trained_models", broken)  # the nodes are not Flower's
    with pytest.raises(NodeError, match="by a norm of 0"):
        run_people(point)
    assert logger.level == logging.ERROR


def test_what_broke_off_is_not_chosen_and_is_in_the_tables() -> None:
    base = {
        "task": "digits", "users": "iid:60", "cohort": 12, "participations": 2, "clip_norm": 0.5, "local_learning_rate": 0.5
    }  # fmt: skip
    arms = {
        arm: [{"mechanism": mechanism, "learning_rate": rate} for rate in (1.0, 2.0, 4.0, 8.0)]
        for arm, mechanism in (("DP-FedAvg", "dp-sgd"), ("lost", "blt:2"), ("half", "tree"))
    }
    study = Study(base=base, settings=({"epsilon": 1.0},), arms=arms, seeds=(0, 1, 2), tuning=(9, 8))
    records: list[dict] = []
    while todo := missing(study, people.by_point(records)):
        for p in todo:
            failed = p.mechanism == "blt:2" or (p.mechanism == "tree" and (p.learning_rate == 4.0 or p.seed == 1))
            records.append(
                {"kind": "people", "point": vars(p), "noise_multiplier": 5.0, "cpu_seconds": 6.0, "delta": 1e-5}
                | {"accuracy": None if failed else 0.5 + 0.1 * (p.learning_rate in (2.0, 4.0)) + 0.01 * p.seed}
                | {"failure": "E: because" if failed else ""}
                | {"adjacency": "one user", "sampling": "none", "method": "exact"}
            )
    assert best(study, "lost", study.settings[0], people.by_point(records)) is None
    baseline, half = people_report.rows(records, study)
    assert (half.arm, half.chosen.learning_rate) == ("half", 2.0)
    assert half.accuracies == pytest.approx([0.6, 0.62])
    assert half.differences == []
    assert "| 61.0 ± 1.4 (2 of 3 finished) | | | |" in people_report.table([baseline, half], study.baseline)
    told = people_report.failures_text(records, study)
    assert "- half, `tree`, rate 2, test: E: because (1 trainings)" in told
    assert "- half, `tree`, rate 4, validation: E: because (1 trainings)" in told
    assert all(f"- lost, `blt:2`, rate {rate}, validation: E: because (1 trainings)" in told for rate in (1, 2, 4, 8))


def test_every_arm_has_as_many_candidates_and_other_seeds_for_the_test() -> None:
    for name, study in STUDIES.items():
        assert len({len(study.points(arm, study.settings[0])) for arm in study.arms}) == 1
        assert not set(study.seeds) & set(study.tuning)
        assert len(study.seeds) >= (5 if name == "tanh-cnn" else 10)
        assert study.baseline in study.arms
        for arm in study.arms:
            points = study.points(arm, study.settings[-1])
            assert len({name_of(point) for point in points}) == len(points)
        if len(study.settings[0]) == 1:  # it is drawn
            assert study.arms.keys() <= people_report.MARKED.keys()
    assert set(people_report.TITLES) == set(STUDIES)
    study = STUDIES["cohort"]
    with pytest.raises(ValueError, match=r"seeds that tune may not test, got \[100\]"):
        replace(study, seeds=(100, 0))
    with pytest.raises(ValueError, match=r"as many candidates, got \{'DP-FedAvg': 15, 'BLT': 1\}"):
        replace(study, arms={"DP-FedAvg": study.arms["DP-FedAvg"], "BLT": study.arms["BLT"][:1]})
    with pytest.raises(ValueError, match="split must be validation or test, got 'tset'"):
        replace(POINT, split="tset")
    with pytest.raises(ValueError, match="sampling must be none, balls-in-bins or poisson, got 'cyclic-poisson'"):
        replace(POINT, sampling="cyclic-poisson")
    with pytest.raises(ValueError, match="which is secret with sampling = 'poisson'; take sampling = 'none'"):
        replace(POINT, sampling="poisson", mechanism="flower-fixed")


def test_an_optimum_at_an_edge_is_followed_in_all_that_is_tuned() -> None:
    study = Study(
        base={"task": "digits", "users": "iid:60", "cohort": 12, "participations": 2, "epsilon": 1.0, "clip_norm": 0.5},
        settings=({"mechanism": "dp-sgd"},),
        arms={
            "DP-FedAvg": [
                {"learning_rate": rate, "local_learning_rate": local} for rate in (1.0, 2.0) for local in (4.0, 8.0)
            ]
        },
        seeds=(0,),
        tuning=(9,),
    )

    def accuracy(point: PeoplePoint) -> float:
        return 1 - 0.1 * abs(math.log2(point.learning_rate / 8)) - 0.1 * abs(math.log2(point.local_learning_rate / 1))

    records: list[dict] = []
    while todo := missing(study, people.by_point(records)):
        records += [{"kind": "people", "point": vars(p), "accuracy": accuracy(p), "failure": ""} for p in todo]
    known = people.by_point(records)
    found = best(study, "DP-FedAvg", study.settings[0], known)
    assert (found.learning_rate, found.local_learning_rate) == (8.0, 1.0)
    assert not beyond(found, candidates(study, "DP-FedAvg", study.settings[0], known))
    assert [p.learning_rate for p in beyond(found, [found, replace(found, learning_rate=4.0)])] == [16.0]


def test_the_report_compares_seed_by_seed(monkeypatch) -> None:
    base = {
        "task": "digits", "users": "iid:60", "cohort": 12, "participations": 2, "clip_norm": 0.5, "local_learning_rate": 0.5
    }  # fmt: skip
    arms = {
        arm: [{"mechanism": name, "learning_rate": rate} for rate in (1.0, 2.0, 4.0)]
        for arm, name in (("DP-FedAvg", "dp-sgd"), ("DP-λCGD", "lambda-cgd:0.8"))
    }
    study = Study(base=base, settings=({"epsilon": 1.0}, {"epsilon": 2.0}), arms=arms, seeds=(0, 1, 2), tuning=(9,))
    monkeypatch.setattr(people, "STUDIES", {"epsilon": study})
    monkeypatch.setattr(people_report, "STUDIES", {"epsilon": study})
    monkeypatch.setattr(people_report, "TITLES", {"epsilon": "against ε"})
    records: list[dict] = []
    while todo := missing(study, people.by_point(records)):
        for p in todo:
            gain = (0.03 + 0.001 * p.seed) * (p.mechanism != "dp-sgd")
            accuracy = 0.5 + 0.05 * p.seed * (p.split == "test") + gain - 0.1 * (p.learning_rate != 2.0)
            records.append(
                {"kind": "people", "point": vars(p), "accuracy": accuracy, "noise_multiplier": 5.0, "cpu_seconds": 6.0}
                | {"delta": 1e-5, "adjacency": "one user", "sampling": "none", "method": "exact"}
            )
    found = people_report.rows(records, study)
    assert [(row.arm, row.chosen.learning_rate) for row in found] == [("DP-FedAvg", 2.0), ("DP-λCGD", 2.0)] * 2
    ours = found[1]
    np.testing.assert_allclose(ours.differences, [0.03, 0.031, 0.032])
    assert ours.p_value < 0.001
    assert ours.corrected == pytest.approx(2 * ours.p_value)
    text = people_report.report(records)
    assert "| ε = 1 | DP-λCGD | `lambda-cgd:0.8`, rate 2 | 5 | 58.1 ± 5.1 | +3.1 | < .001 | < .001 |" in text
    assert "24 trainings, 2.4 processor minutes" in text
    assert "ε at δ = 1e-05; adjacency: one user; sampling: none (exact)." in text
    assert all(axes.has_data() for axes in people_report.plot(found, "against ε").axes)


def test_a_study_tunes_then_tests_and_goes_on_where_it_stopped(tmp_path, monkeypatch) -> None:
    base = {
        name: getattr(POINT, name)
        for name in ("task", "users", "cohort", "participations", "clip_norm", "local_learning_rate")
    }
    arms = {"A": [{"mechanism": "dp-sgd", "learning_rate": rate} for rate in (1.0, 2.0, 4.0)]}
    study = Study(base=base, settings=({"epsilon": 2.0},), arms=arms, seeds=(0, 1), tuning=(9, 8))
    monkeypatch.setattr(people, "STUDIES", {"toy": study})
    run: list[PeoplePoint] = []
    peak = {1.0: 0.3, 2.0: 0.4, 4.0: 0.5, 8.0: 0.2}.__getitem__

    def pretend(point: PeoplePoint, *, data_dir: str) -> dict:
        run.append(point)
        accuracy = peak(point.learning_rate)
        return {"kind": "people", "point": vars(point), "accuracy": accuracy, "failure": "", "cpu_seconds": 0.1}

    monkeypatch.setattr(people, "run_people", pretend)
    monkeypatch.setattr(people, "shared", lambda point, **_: "")  # each apart
    path = tmp_path / "people.jsonl"
    stopped = CliRunner().invoke(people.app, ["run", "--output", str(path), "--minutes", "0"])
    assert stopped.exit_code == 3
    done = CliRunner().invoke(people.app, ["run", "--output", str(path)])
    assert done.exit_code == 0, done.output
    assert [(p.split, p.seed, p.learning_rate) for p in run] == [
        ("validation", 9, 1.0),
        ("validation", 9, 2.0),
        ("validation", 9, 4.0),
        ("validation", 9, 8.0),  # because 4 was best, and at the edge
        ("validation", 8, 4.0),  # the finalists
        ("validation", 8, 2.0),
        ("test", 0, 4.0),
        ("test", 1, 4.0),
    ]
    again = CliRunner().invoke(people.app, ["run", "--output", str(path)])
    assert again.exit_code == 0
    assert len(run) == 8
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert missing(study, people.by_point(records)) == []
    assert best(study, "A", {"epsilon": 2.0}, people.by_point(records)).learning_rate == 4.0
    wrong = CliRunner().invoke(people.app, ["run", "--output", str(path), "--study", "toys"])
    assert wrong.exit_code == 2
    assert "unknown study toys" in wrong.output
