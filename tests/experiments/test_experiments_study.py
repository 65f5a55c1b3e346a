"""Studies: equal budgets, tuning that looks at validation only, and results that are kept and not made again."""

import io
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from rich.console import Console

from fedcgd_experiments.results import Results, Row, known
from fedcgd_experiments.runner import carry_out
from fedcgd_experiments.studies import STUDIES
from fedcgd_experiments.study import Log, Study, best, draw, identity, missing, seeded

QUIET = Console(file=io.StringIO())


@dataclass(frozen=True, kw_only=True)
class Toy:
    """Its accuracy is `x`, but for seed 1, with which it is 1 − x; above 0.9 it breaks off."""

    arm: str
    setting: int
    x: float
    seed: int
    split: str = "validation"


@dataclass(frozen=True)
class ToyTrainer:
    fails: str = ""
    log: str = ""

    @property
    def point(self) -> type[Toy]:
        return Toy

    def groups(self, points: Sequence[Toy]) -> list[list[Toy]]:
        return [[point for point in points if point.arm == arm] for arm in dict.fromkeys(p.arm for p in points)]

    def train(self, points: Sequence[Toy], rows: Sequence[Row] = ()) -> list[Row]:
        if points[0].arm == self.fails:
            raise RuntimeError("no luck")
        if self.log:
            with Path(self.log).open("a") as file:
                file.write(f"{os.getpid()} {os.nice(0)}\n")
        return [
            asdict(p) | {"accuracy": None if p.x > 0.9 else 1 - p.x if p.seed == 1 else p.x} for p in points
        ]  # fmt: skip


def study(**changes: object) -> Study:
    given = {
        "name": "toy",
        "title": "Toy",
        "make": lambda values: Toy(**values),
        "settings": ({"setting": 1}, {"setting": 2}),
        "axes": {"x": Log(0.1, 1.0)},
        "arms": {"a": {"arm": ("a",)}, "b": {"arm": ("b",), "x": Log(0.1, 0.5)}},
        "candidates": 8,
        "finalists": 2,
        "tuning": (0,),
        "tests": (1000, 1001),
        "baselines": {"nothing": ("a",)},
        "work": "setting",
        "unit": "settings",
    }
    return Study(**(given | changes))  # type: ignore[arg-type]


def test_candidates_fill_every_axis_evenly_and_are_the_same_for_all_arms() -> None:
    found = draw({"rate": Log(1.0, 16.0), "steps": (3, 7, 21)}, 12, seed=0)
    rates = sorted(values["rate"] for values in found)
    assert all(16 ** (i / 12) <= rate <= 16 ** ((i + 1) / 12) for i, rate in enumerate(rates))
    assert sorted(values["steps"] for values in found) == [3] * 4 + [7] * 4 + [21] * 4
    assert [v["rate"] for v in draw({"other": (1, 2), "rate": Log(1.0, 16.0)}, 12, seed=0)] == [
        v["rate"] for v in found
    ]
    assert draw({"rate": Log(1.0, 16.0)}, 12, seed=1) != draw({"rate": Log(1.0, 16.0)}, 12, seed=0)


def test_all_arms_of_the_studies_have_as_many_candidates() -> None:
    for one in STUDIES.values():
        for setting in one.settings[:2]:
            assert {len(one.points(arm, setting)) for arm in one.arms} == {one.candidates}


def test_tuning_looks_at_validation_only_and_tests_only_the_best() -> None:
    one, rows = study(tuning=(0, 1)), []
    trainer = ToyTrainer()
    kinds = []
    while todo := missing(one, known(rows, Toy)):
        kinds.append({(point.seed, point.split) for point in todo})
        rows += [row for group in trainer.groups(todo) for row in trainer.train(group)]
    assert kinds == [{(0, "validation")}, {(1, "validation")}, {(1000, "test"), (1001, "test")}]
    found = known(rows, Toy)
    candidates = [point.x for point in one.points("a", {"setting": 1})]
    below = sorted(x for x in candidates if x <= 0.9)
    finalists = below[-2:]  # those of the highest accuracy with seed 0
    chosen, score = best(one, "a", {"setting": 1}, found) or (None, None)
    assert chosen is not None
    assert chosen.x in finalists
    assert score == pytest.approx(0.5)  # x with one seed and 1 − x with the other
    assert max(candidates) > 0.9  # which broke off, and is not chosen
    raised = {**found, **{identity(seeded(p, 1000, "test")): 1.0 for p in one.points("a", {"setting": 1})}}
    assert best(one, "a", {"setting": 1}, raised) == best(one, "a", {"setting": 1}, found)


def test_seeds_that_tune_may_not_test() -> None:
    with pytest.raises(ValueError, match=r"got \[1000\]"):
        study(tuning=(0, 1000))
    with pytest.raises(ValueError, match=r"\['c'\]"):
        study(baselines={"nothing": ("c",)})
    with pytest.raises(ValueError, match=r"got 9"):
        study(finalists=9)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])  # real processes
def test_results_are_kept_and_not_made_again(tmp_path: Path, processes: int) -> None:
    path, log = tmp_path / "deep" / "toy.jsonl", tmp_path / "log"
    if processes > 1:  # each stage has processes of its own, which take long to start: one stage is enough
        Results(path).append(ToyTrainer().train(missing(study(), {})))
    done = carry_out(study(), Results(path), ToyTrainer(log=str(log)), processes=processes, console=QUIET)
    assert (done.failures, done.left) == ((), 0)
    rows = Results(path).rows()
    assert len(rows) == 2 * 2 * (8 + 2)  # settings, arms, candidates and tests
    assert all(row["commit"] for row in rows)
    workers = {line.split()[0] for line in log.read_text().splitlines()}
    assert (str(os.getpid()) in workers) == (processes == 1)
    assert {int(line.split()[1]) for line in log.read_text().splitlines()} == {os.nice(0)}
    first = path.read_text()
    again = carry_out(study(), Results(path), ToyTrainer(fails="a"), console=QUIET)
    assert again.failures == ()
    assert path.read_text() == first
    path.write_text(first + '{"kind": "runs", "comm')  # killed while it wrote
    more = Results(path)
    assert len(more.rows()) == len(rows)
    more.append([rows[0] | {"seed": 5}])
    assert len(Results(path).rows()) == len(rows) + 1


def test_a_failure_is_reported_and_the_others_run(tmp_path: Path) -> None:
    results = Results(tmp_path / "toy.jsonl")
    done = carry_out(study(), results, ToyTrainer(fails="a"), console=QUIET)
    assert len(done.failures) == 1
    assert done.failures[0].startswith("toy: RuntimeError: no luck; 16 trainings as Toy(arm='a'")
    assert done.left == 16
    assert {row["arm"] for row in results.rows()} == {"b"}
    assert carry_out(study(), results, ToyTrainer(), console=QUIET).left == 0
