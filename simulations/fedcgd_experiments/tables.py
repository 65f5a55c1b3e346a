"""The tables of a page, made from results: what stands between `<!-- table: NAME -->` and `<!-- end -->` is written by `fill`."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev

from fedcgd.participation import Sampling
from fedcgd_experiments.experiment import Record, Setup, identity
from fedcgd_experiments.federated import beside
from fedcgd_experiments.plots import MARKS
from fedcgd_experiments.rules import NAMES, Loss, corrected, losses
from fedcgd_experiments.significance import PairedComparison, compare_paired, tuned_accuracies
from fedcgd_experiments.sweep import ResultsFile, best_of_families, runs_of, to_point

LEAST_SEEDS = 10
"""A cell with fewer test seeds is left out: a table shows what is complete."""

BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

Table = Callable[[Path, str], str]
"""(folder of results, what the name says after the slash) → Markdown."""


def fill(page: str, results: Path) -> str:
    """`page` with each of its tables made anew from the files in `results`. Raises ValueError for a table that is not known."""

    def made(block: re.Match[str]) -> str:
        kind, _, argument = block[2].partition("/")
        if kind not in TABLES:
            raise ValueError(f"unknown table {block[2]}; the tables are {', '.join(TABLES)}")
        return f"{block[1]}\n{TABLES[kind](results, argument)}\n{block[3]}"

    return BLOCK.sub(made, page)


def accuracy(results: Path, task: str) -> str:
    """Without amplification: each mechanism's test accuracy at each ε, and the difference to DP-SGD's."""
    runs = _Sweep(results, task, ["none"])
    rows = {row.setup: row for row in compare_paired(runs.runs)}
    return _by_mechanism(runs, lambda setup: _compared(rows.get(setup), setup, runs))


def against_lambda_cgd(results: Path, task: str) -> str:
    """Without amplification: the difference of each mechanism to λ-CGD, in points."""
    return _differences(_Sweep(results, task, ["none"]), "lambda-cgd", leave_out=("lambda-cgd", "dp-sgd"))


def amplified(results: Path, task: str) -> str:
    """With amplification: each mechanism and sampling, and the difference to DP-SGD under Poisson sampling."""
    runs = _Sweep(results, task, ["poisson", "balls-in-bins", "cyclic-poisson"])
    rows = {row.setup: row for row in compare_paired(runs.runs, under="poisson")}
    return _by_mechanism(runs, lambda setup: _compared(rows.get(setup), setup, runs))


def same_sampling(results: Path, task: str) -> str:
    """With Balls-in-Bins on both sides: the difference to DP-SGD, in points."""
    return _differences(_Sweep(results, task, ["balls-in-bins"]), "dp-sgd", leave_out=("dp-sgd",))


def rules(results: Path, task: str) -> str:
    """What each rule for λ chooses, and what is lost against the tuned λ, in points."""
    found = _losses(results, task)
    by_budget: dict[Setup, dict[str, Loss]] = defaultdict(dict)
    for loss in found:
        by_budget[loss.budget][loss.rule] = loss
    head = ["sampling", "ε", "tuned λ", "its accuracy", *NAMES]
    lines = []
    for budget, of_rule in by_budget.items():
        first = next(iter(of_rule.values()))
        cells = [budget.sampling, f"{budget.epsilon:g}", f"{first.baseline_lam:g}", f"{100 * first.baseline:.1f}"]
        lines.append([*cells, *(_loss(of_rule.get(rule)) for rule in NAMES)])
    return _markdown(head, lines)


def rules_summary(results: Path, argument: str) -> str:
    """The mean and the worst loss of each rule over the budgets, in points, for each of the tasks in `argument` (a+b+c)."""
    head = ["data", "sampling", "budgets", *NAMES]
    lines = []
    for task in argument.split("+"):
        found = _losses(results, task)
        for sampling in dict.fromkeys(loss.budget.sampling for loss in found):
            mine = [loss for loss in found if loss.budget.sampling == sampling]
            budgets = {loss.budget for loss in mine}
            cells = [task, sampling, str(len(budgets))]
            for rule in NAMES:
                values = [100 * loss.difference for loss in mine if loss.rule == rule]
                complete = len(values) == len(budgets)
                cells.append(f"{fmean(values):+.2f}, {min(values):+.2f}" if complete else "")
            lines.append(cells)
    return _markdown(head, lines)


def between_rules(results: Path, argument: str) -> str:
    """A third of the excess against the practical rule, in points, for each of the tasks in `argument` (a+b+c).

    A cell is `λ of the practical rule → λ of the other: difference (p)`; Holm's correction is over the table.
    """
    found = [
        (task, loss)
        for task in argument.split("+")
        for loss in _losses(results, task, against="practical")
        if loss.rule == "third of the excess"
    ]
    rows: dict[tuple[str, str], dict[float, str]] = defaultdict(dict)
    for (task, _), loss in zip(found, corrected([loss for _, loss in found]), strict=True):
        cell = f"{loss.baseline_lam:g} → {_loss(loss)}"
        rows[task, loss.budget.sampling][loss.budget.epsilon] = cell
    budgets = sorted({epsilon for row in rows.values() for epsilon in row})
    head = ["data", "sampling", *(f"ε = {budget:g}" for budget in budgets)]
    return _markdown(head, ([*key, *(row.get(budget, "") for budget in budgets)] for key, row in rows.items()))


def federated(results: Path, argument: str) -> str:
    """The test accuracies of the app's runs and of their central twins, for each of the sweeps in `argument` (a+b+c)."""
    head = ["file", "mechanism", "sampling", "ε", "seeds", "central", "federated", "largest difference"]
    lines = []
    for name in argument.split("+"):
        runs = {identity(to_point(run)): run for run in runs_of(_records(results, name))}
        for row in beside(_records(results, f"{name}-federated"), runs):
            setup, numbers = row.setup, (row.central, row.federated, row.largest)
            cells = [f"`{name}`", setup.mechanism, setup.sampling, f"{setup.epsilon:g}", str(row.seeds)]
            lines.append([*cells, *(f"{100 * value:.2f}" for value in numbers)])
    return _markdown(head, lines)


def effort(results: Path, argument: str) -> str:
    """What was run, and its processor time, for each of the files in `argument` (a+b+c), and for all of them."""
    head = ["file", "tuning runs", "their seeds", "test runs", "their seeds", "learning rates", "processor minutes"]
    lines, totals = [], [0.0, 0.0, 0.0]
    for name in argument.split("+"):
        records = _records(results, name)
        federated = [record for record in records if record["kind"] == "federated"]
        points = [to_point(run) for run in [*runs_of(records), *federated]]
        splits = [[p for p in points if p.split == split] for split in ("validation", "test")]
        minutes = sum(record.get("seconds", 0.0) for record in records) / 60
        cells = [f"`{name}.jsonl`"]
        for split in splits:
            seeds = sorted({p.seed for p in split})
            cells += [f"{len(split):,}", f"{seeds[0]} … {seeds[-1]}" if seeds else ""]
        rates = sorted({p.learning_rate for p in splits[0]})
        cells += [f"{rates[0]:g} … {rates[-1]:g}" if rates else "", f"{minutes:.1f}"]
        lines.append(cells)
        totals = [sum(pair) for pair in zip(totals, (*map(len, splits), minutes), strict=True)]
    tuning, test, minutes = totals
    if len(lines) > 1:
        lines.append(["all", f"{tuning:,.0f}", "", f"{test:,.0f}", "", "", f"{minutes:.1f}"])
    return _markdown(head, lines)


class _Sweep:
    """The runs of a task under some samplings, and what the tables ask of them."""

    def __init__(self, results: Path, task: str, samplings: Sequence[Sampling]) -> None:
        every = runs_of(_records(results, task))
        self.runs = [run for run in every if run["point"]["setup"]["sampling"] in samplings]
        self.best = best_of_families(self.runs)
        self.tested = tuned_accuracies(self.runs)
        self.setups = {to_point(run).setup for run in self.runs}


TABLES: dict[str, Table] = {
    "accuracy": accuracy,
    "against-lambda-cgd": against_lambda_cgd,
    "amplified": amplified,
    "same-sampling": same_sampling,
    "rules": rules,
    "rules-summary": rules_summary,
    "between-rules": between_rules,
    "federated": federated,
    "effort": effort,
}


def _records(results: Path, name: str) -> list[Record]:
    path = results / f"{name}.jsonl"
    return ResultsFile(path).records if path.exists() else []


def _losses(results: Path, task: str, against: str | None = None) -> list[Loss]:
    runs, ruled = _records(results, task), _records(results, f"{task}-rules")
    found = losses(runs_of(runs), runs_of(ruled), ruled, against=against)
    return [loss for loss in found if loss.seeds >= LEAST_SEEDS]


def _by_mechanism(runs: _Sweep, cell: Callable[[Setup], str], *, leave_out: Iterable[str] = ()) -> str:
    """A row for each mechanism and sampling, a column for each ε; rows without any cell are left out."""
    best = runs.best
    budgets = sorted({setup.epsilon for setup in best})
    known = list(MARKS)
    rows: dict[tuple[int, str, str], dict[float, Setup]] = defaultdict(dict)
    for setup in best:
        if setup.family not in leave_out:
            place = known.index(setup.name) if setup.name in MARKS else len(known)
            rows[place, setup.family, setup.sampling][setup.epsilon] = setup
    several = len({sampling for _, _, sampling in rows}) > 1
    lines = []
    for (_, family, sampling), setups in sorted(rows.items()):
        cells = [cell(setups[epsilon]) if epsilon in setups else "" for epsilon in budgets]
        if any(cells):
            lines.append([f"{family}, {sampling}" if several else family, *cells])
    return _markdown(["mechanism", *(f"ε = {budget:g}" for budget in budgets)], lines)


def _differences(runs: _Sweep, baseline: str, *, leave_out: Iterable[str]) -> str:
    """The difference of each mechanism to `baseline` with the same sampling, in points."""
    rows = {row.setup: row for row in compare_paired(runs.runs, baseline)}

    def cell(setup: Setup) -> str:
        row = rows.get(setup)
        return "" if row is None else f"{100 * row.difference:+.2f} ({_p(row.corrected)})"

    return _by_mechanism(runs, cell, leave_out=leave_out)


def _compared(row: PairedComparison | None, setup: Setup, runs: _Sweep) -> str:
    """`71.1 ± 1.3, +24.9 (p < .001), 0.8`: accuracy and its standard deviation, the difference, and the number that was tuned."""
    accuracies = [100 * value for value in runs.tested.get(setup, {}).values()]
    if len(accuracies) < LEAST_SEEDS:
        return ""
    text = f"{fmean(accuracies):.1f} ± {stdev(accuracies):.1f}"
    if row is not None:
        text += f", {100 * row.difference:+.1f} ({_p(row.corrected)})"
    return text + _number(setup, runs)


def _number(setup: Setup, runs: _Sweep) -> str:
    """`, λ 0.8`; with † where it is the largest that was tried."""
    parameter = None if setup.in_file else setup.spelling.row.parameter
    if parameter is None or setup.spelling.value is None:
        return ""
    tried = {s for s in runs.setups if s.budget == setup.budget and s.family == setup.family}
    largest = max(float(s.spelling.value or 0) for s in tried)
    return f", {parameter.symbol} {setup.spelling.value:g}" + ("†" if setup.spelling.value == largest else "")


def _loss(loss: Loss | None) -> str:
    return "" if loss is None else f"{loss.lam:g}: {100 * loss.difference:+.2f} ({_p(loss.corrected)})"


def _p(p: float) -> str:
    if math.isnan(p):
        return "same"
    return "p < .001" if p < 0.001 else f"p {p:.2g}".replace("0.", ".", 1)


def _markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    made = [list(line) for line in lines]
    if not made:
        return "*Not run yet.*\n"
    rows = [list(head), ["---"] * len(head), *made]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
