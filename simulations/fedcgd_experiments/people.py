"""Users who are people: studies of accuracy at a user's (ε, δ), as sweeps that go on where they stopped.

    python -m fedcgd_experiments.people run --output results/people.jsonl --study epsilon --minutes 10
    python -m fedcgd_experiments.people report results/people.jsonl --output results/plots

Each arm (a mechanism, or one of Flower's own strategies) has the same number of candidates at each setting. They are tried on
validation examples with the first tuning seed, the best two with all tuning seeds; the better one is then judged by the test
examples with other seeds.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console

from fedcgd_experiments.experiment import Record
from fedcgd_experiments.people_run import FLOWER_ADAPTIVE, FLOWER_FIXED, PeoplePoint, run_people
from fedcgd_experiments.people_softmax import shared, train_people
from fedcgd_experiments.sweep import ResultsFile

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
console = Console()

TUNING_SEEDS = (100, 101, 102)
TEST_SEEDS = tuple(range(10))
_FINALISTS = 2
Candidate = Mapping[str, Any]


def _sized(name: str, sizes: Sequence[float], rates: Sequence[float]) -> list[Candidate]:
    return [{"mechanism": f"{name}:{size:g}", "learning_rate": rate} for size in sizes for rate in rates]


_FINER = (0.7, 0.84, 1.0, 1.2, 1.4, 1.7, 2.0, 2.4, 2.8, 3.4, 4.0, 4.8, 5.6, 6.7, 8.0)
_LOCAL = (3.0, 6.0, 12.0)


def _arms(*rates: float) -> dict[str, list[Candidate]]:
    """What each arm may choose from, fifteen for all: five sizes with three rates, or finer rates.

    Flower's strategies have no server rate, so they choose how far a person goes in place of it, and the norm. The sizes go from
    end to end: λ-CGD with λ = 0, and one band, are DP-FedAvg; a BLT with more buffers is the same again.
    """
    return {
        "DP-FedAvg": [{"mechanism": "dp-sgd", "learning_rate": rate} for rate in _FINER],
        "DP-λCGD": _sized("lambda-cgd", (0.1, 0.3, 0.5, 0.7, 0.9), rates),
        "BISR": _sized("bisr", (2, 4, 8, 16, 32), rates),
        "BLT": _sized("blt", (1, 2, 3, 4, 5), rates),
        "banded Toeplitz": _sized("banded-toeplitz", (2, 4, 8, 16, 32), rates),
        "tree": [{"mechanism": "tree", "learning_rate": rate} for rate in _FINER],
        "Flower, fixed clipping": [
            {"mechanism": FLOWER_FIXED, "clip_norm": norm, "local_learning_rate": local}
            for local in _LOCAL
            for norm in (0.7, 1.4, 2.8, 5.6, 11.2)
        ],
        "Flower, adaptive clipping": [
            {"mechanism": FLOWER_ADAPTIVE, "clip_norm": norm, "quantile": quantile, "local_learning_rate": local}
            for local in _LOCAL
            for norm, quantile in ((1.0, 0.5), (0.3, 0.9), (1.0, 0.9), (3.0, 0.9), (1.0, 0.99))
        ],
    }


def _under(sampling: str, arm: Sequence[Candidate]) -> list[Candidate]:
    return [{**candidate, "sampling": sampling} for candidate in arm]


def _working(arms: Mapping[str, Sequence[Candidate]], **local: Sequence[float]) -> dict[str, list[Candidate]]:
    """`arms` that also choose how a person trains, each as often: every candidate with every combination of `local`."""
    kinds = [dict(zip(local, values, strict=True)) for values in product(*local.values())]
    return {arm: [{**kind, **candidate} for kind in kinds for candidate in some] for arm, some in arms.items()}


ALL = _arms(2.0, 4.0, 8.0)
THREE = {arm: ALL[arm] for arm in ("DP-FedAvg", "DP-λCGD", "BLT")}
_STEPS = (1.4, 2.0, 2.8, 4.0, 5.6, 8.0, 11.2, 16.0)
_EIGHT: dict[str, list[Candidate]] = {
    "DP-FedAvg": [{"mechanism": "dp-sgd", "learning_rate": rate} for rate in _STEPS],
    "DP-λCGD": _sized("lambda-cgd", (0.2, 0.4, 0.6, 0.8), (4.0, 8.0)),
    "Flower, fixed clipping": [{"mechanism": FLOWER_FIXED, "clip_norm": norm} for norm in _STEPS],
}
_SAMPLED: dict[str, list[Candidate]] = {
    "DP-FedAvg": [{"mechanism": "dp-sgd", "learning_rate": 4 * rate} for rate in _FINER],
    "DP-λCGD": _sized("lambda-cgd", (0.1, 0.3, 0.5, 0.7, 0.9), (4.0, 8.0, 16.0)),
}
_CNN: dict[str, list[Candidate]] = {
    "DP-FedAvg": [{"mechanism": "dp-sgd", "learning_rate": rate} for rate in (1.0, 1.4, 2.0, 2.8, 4.0, 5.6)],
    "DP-λCGD": _sized("lambda-cgd", (0.3, 0.6), (2.0, 4.0, 8.0)),
    "BISR": _sized("bisr", (4, 16), (2.0, 4.0, 8.0)),
}
_PROXIMAL: dict[str, list[Candidate]] = {
    f"µ = {mu:g}": [
        {"proximal": mu, "local_learning_rate": local, "learning_rate": rate}
        for local in (0.3, 1.0, 3.0, 10.0)
        for rate in (1.0, 2.0, 4.0, 8.0)
    ]
    for mu in (0.0, 0.01, 0.1, 1.0)
}


@dataclass(frozen=True, kw_only=True)
class Study:
    """`arms` at each of `settings` (what differs from `base`), each tuned among its candidates and compared with `baseline`.

    Raises ValueError for arms that may choose from more candidates than others, and for test seeds that are tuned with.
    """

    base: Mapping[str, Any]
    settings: tuple[Mapping[str, Any], ...]
    arms: Mapping[str, Sequence[Candidate]]
    seeds: tuple[int, ...] = TEST_SEEDS
    tuning: tuple[int, ...] = TUNING_SEEDS
    baseline: str = "DP-FedAvg"

    def __post_init__(self) -> None:
        counts = {arm: len(candidates) for arm, candidates in self.arms.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(f"all arms must have as many candidates, got {counts}")
        if both := set(self.seeds) & set(self.tuning):
            raise ValueError(f"seeds that tune may not test, got {sorted(both)} in both")

    def points(self, arm: str, setting: Mapping[str, Any]) -> list[PeoplePoint]:
        """The candidates of `arm` at `setting`, with the first tuning seed."""
        return [
            PeoplePoint(**{**self.base, **setting, **candidate, "seed": self.tuning[0]}) for candidate in self.arms[arm]
        ]


_FASHION = {
    "task": "fashion-mnist", "users": "dirichlet:1:2500", "cohort": 100, "participations": 2, "epsilon": 1.0,
    "clip_norm": 1.0, "local_learning_rate": 3.0,
}  # fmt: skip
_TWEETS = _FASHION | {"task": "tweets", "users": "dirichlet:1:2000"}
_EPSILONS = tuple({"epsilon": epsilon} for epsilon in (0.5, 1.0, 2.0, 4.0))
STUDIES: dict[str, Study] = {
    "epsilon": Study(base=_FASHION, settings=_EPSILONS, arms=ALL),
    "tweets": Study(base=_TWEETS, settings=_EPSILONS, arms=_arms(1.0, 2.0, 4.0)),
    "cohort": Study(base=_FASHION, settings=tuple({"cohort": c} for c in (100, 250, 500)), arms=THREE),
    "skew": Study(
        base=_FASHION,
        settings=tuple({"users": f"{u}:2500"} for u in ("dirichlet:0.1", "dirichlet:1", "iid")),
        arms=THREE,
    ),
    "population": Study(base=_FASHION, settings=tuple({"population": p} for p in (0, 100_000, 1_000_000)), arms=THREE),
    "proximal": Study(
        base=_FASHION | {"mechanism": "lambda-cgd:0.5", "local_epochs": 5},
        settings=tuple({"users": f"{u}:2500", "epsilon": e} for u in ("dirichlet:0.1", "iid") for e in (1.0, 4.0)),
        arms=_PROXIMAL,
        baseline="µ = 0",
    ),
    "local": Study(
        base=_FASHION,
        settings=_EPSILONS,
        arms=_working(_EIGHT, local_epochs=(1, 2, 5, 10), local_learning_rate=(3.0, 10.0, 30.0)),
    ),
    "sampling": Study(
        base=_FASHION | {"local_epochs": 5, "local_learning_rate": 10.0},
        settings=_EPSILONS,
        arms={
            "DP-FedAvg, Poisson": _under("poisson", _SAMPLED["DP-FedAvg"]),
            "DP-FedAvg, Balls-in-Bins": _under("balls-in-bins", _SAMPLED["DP-FedAvg"]),
            "DP-λCGD, Balls-in-Bins": _under("balls-in-bins", _SAMPLED["DP-λCGD"]),
        },
        baseline="DP-FedAvg, Poisson",
    ),
    "tanh-cnn": Study(
        base=_FASHION | {"model": "tanh-cnn", "participations": 1, "local_learning_rate": 0.3},
        settings=({"epsilon": 4.0}, {"epsilon": 8.0}),
        arms=_CNN,
        seeds=(0, 1, 2, 3, 4),
        tuning=TUNING_SEEDS[:2],
    ),
}
_SCALED = ("learning_rate", "clip_norm", "local_learning_rate")
_MOST_EXTENSIONS = 20
_TOGETHER = 48  # models, whose weights are read in every round
FAILED = float("-inf")
"""The score of a candidate that broke off: below all others, and never chosen."""


@cache
def name_of(point: PeoplePoint) -> str:
    """A text that is equal exactly for equal points."""
    return json.dumps(vars(point), sort_keys=True)


def point_of(record: Record) -> PeoplePoint:
    """What a record is of."""
    return PeoplePoint(**record["point"])


def by_point(records: Iterable[Record]) -> dict[str, Record]:
    """The record of each point."""
    return {name_of(point_of(record)): record for record in records if record["kind"] == "people"}


def candidates(study: Study, arm: str, setting: Mapping[str, Any], known: Mapping[str, Record]) -> list[PeoplePoint]:
    """The candidates of `arm`; while the best is at the edge of its rates or norms, the next one beyond is one of them.

    The best is the one with the highest accuracy with the first tuning seed, then that of the finalists.
    """
    points = study.points(arm, setting)
    for _ in range(_MOST_EXTENSIONS):
        first = _best_of(points, study.tuning[:1], known)
        final = _best_of(_finalists(study, points, known), study.tuning, known)
        new = [point for chosen in (first, final) if chosen for point in beyond(chosen, points)]
        if not new:
            break
        points.append(new[0])
    return points


def beyond(chosen: PeoplePoint, points: Sequence[PeoplePoint]) -> list[PeoplePoint]:
    """What comes next after `chosen` wherever it is at the edge of what `points` try; empty if it is at none."""
    found = []
    for name in _SCALED:
        if len({getattr(point, name) for point in points}) == 1:
            continue  # it is given
        at, like = getattr(chosen, name), moved(chosen, **{name: 1})
        alike = [getattr(point, name) for point in points if moved(point, **{name: 1}) == like]
        if at == max(alike):
            found.append(moved(chosen, **{name: at * 2}))
        if at == min(alike):
            found.append(moved(chosen, **{name: at / 2}))
    return found


def moved(point: PeoplePoint, **changes: Any) -> PeoplePoint:
    """`point` with other values."""
    return replace(point, **changes)


def tuning(study: Study, arm: str, setting: Mapping[str, Any], known: Mapping[str, Record]) -> list[PeoplePoint]:
    """All tuning runs that are known to be needed: every candidate once, then the finalists with every tuning seed."""
    points = candidates(study, arm, setting, known)
    finalists = _finalists(study, points, known)
    return points + [replace(p, seed=seed) for p in finalists for seed in study.tuning[1:]]


def best(study: Study, arm: str, setting: Mapping[str, Any], known: Mapping[str, Record]) -> PeoplePoint | None:
    """The finalist with the highest mean accuracy on validation; of equals the first.

    None if some have not been run, or if none of them finished.
    """
    finalists = _finalists(study, candidates(study, arm, setting, known), known)
    return _best_of(finalists, study.tuning, known)


def _finalists(study: Study, points: Sequence[PeoplePoint], known: Mapping[str, Record]) -> list[PeoplePoint]:
    scores = _scores(points, study.tuning[:1], known)
    order = sorted(range(len(points)), key=lambda i: -scores[i]) if scores else []
    return [points[i] for i in order[:_FINALISTS] if scores[i] > FAILED]


def _best_of(points: Sequence[PeoplePoint], seeds: Sequence[int], known: Mapping[str, Record]) -> PeoplePoint | None:
    scores = _scores(points, seeds, known)
    if not scores or max(scores) == FAILED:
        return None
    return points[max(range(len(scores)), key=scores.__getitem__)]


def _scores(points: Sequence[PeoplePoint], seeds: Sequence[int], known: Mapping[str, Record]) -> list[float]:
    """The mean accuracy of each point over `seeds`, `FAILED` where one of them broke off; none if some have not been run."""
    found = [[known.get(name_of(replace(point, seed=seed))) for seed in seeds] for point in points]
    if any(record is None for records in found for record in records):
        return []
    return [
        fmean(FAILED if record.get("failure") else record["accuracy"] for record in records if record)
        for records in found
    ]


def missing(study: Study, known: Mapping[str, Record]) -> list[PeoplePoint]:
    """What there is to run now: tuning, and for arms that are tuned, the tests of the best."""
    wanted: list[PeoplePoint] = []
    for setting in study.settings:
        for arm in study.arms:
            chosen = best(study, arm, setting, known)
            wanted += tuning(study, arm, setting, known)
            wanted += [replace(chosen, seed=seed, split="test") for seed in study.seeds] if chosen else []
    return [point for point in dict.fromkeys(wanted) if name_of(point) not in known]


def carry_out(
    study: Study, results: ResultsFile, *, data_dir: str = "", late: Callable[[], bool] = lambda: False
) -> Iterator[tuple[Record, int]]:
    """Run what is missing of `study` in `results`: each record as it comes, and how many trainings are left at least.

    Ends before the next training when `late()` says so; what is in `results` is not run again.
    """
    while todo := missing(study, by_point(results.records)):
        left = len(todo)
        for together in _batches(todo, data_dir):
            if late():
                return
            alone = len(together) == 1 and not shared(together[0], data_dir=data_dir)
            records = (
                [run_people(together[0], data_dir=data_dir)] if alone else train_people(together, data_dir=data_dir)
            )
            for record in records:
                results.append(record)
                left -= 1
                yield record, left


def _batches(points: Sequence[PeoplePoint], data_dir: str) -> Iterator[list[PeoplePoint]]:
    """`points` in groups that are trained together."""
    groups: dict[str, list[PeoplePoint]] = {}
    for i, point in enumerate(points):
        groups.setdefault(shared(point, data_dir=data_dir) or str(i), []).append(point)
    for group in groups.values():
        yield from (group[start : start + _TOGETHER] for start in range(0, len(group), _TOGETHER))


@app.command("run")
def run_command(
    output: Annotated[Path, typer.Option(help="JSON lines; what is there already is not run again")],
    study: Annotated[list[str] | None, typer.Option(help="one of the studies; repeat it; all if not given")] = None,
    minutes: Annotated[float, typer.Option(help="stop after so many minutes; call again to go on")] = 60.0,
    data_dir: Annotated[str, typer.Option(help="folder of the task's files")] = "",
) -> None:
    """Run what is missing of the studies, and say what is left."""
    unknown = set(study or ()) - set(STUDIES)
    if unknown:
        raise typer.BadParameter(f"unknown study {', '.join(sorted(unknown))}; the studies are {', '.join(STUDIES)}")
    results, deadline = ResultsFile(output), time.monotonic() + 60 * minutes
    for name in study or STUDIES:
        done = carry_out(STUDIES[name], results, data_dir=data_dir, late=lambda: time.monotonic() > deadline)
        for record, left in done:
            outcome = f"broke off: {record['failure']}" if record["failure"] else f"{record['accuracy']:.4f}"
            mechanism, seconds = record["point"]["mechanism"], record["cpu_seconds"]
            console.print(f"{name}: {mechanism} {outcome} ({left} left, {seconds:.2g} s)", highlight=False)
        if todo := missing(STUDIES[name], by_point(results.records)):
            console.print(f"{name}: {len(todo)} trainings or more are left; call again to go on")
            raise typer.Exit(3)
    minutes_spent = sum(record["cpu_seconds"] for record in results.records) / 60
    console.print(f"nothing is missing; {minutes_spent:.1f} processor minutes in {output}")


@app.command("report")
def report_command(
    results: Annotated[Path, typer.Argument(help="a file that `run` wrote", exists=True)],
    output: Annotated[Path | None, typer.Option(help="folder for the plots; none are drawn if not given")] = None,
) -> None:
    """Print the tables of docs/results_federated.md, and draw its plots."""
    from fedcgd_experiments import people_report, plots  # they import this module

    records = ResultsFile(results).records
    typer.echo(people_report.report(records))
    for name, study in STUDIES.items():
        found = people_report.rows(records, study)
        alone = all(len(row.setting) == 1 for row in found)
        if output is not None and alone and len({str(row.setting) for row in found}) > 1:
            plots.save(people_report.plot(found, people_report.TITLES[name]), output / f"people-{name}.png")


if __name__ == "__main__":
    app()
