"""The tables of a page, made from results: what stands between `<!-- table: NAME -->` and `<!-- end -->` is written by `fill`."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev

from fedcgd_experiments import real_tables
from fedcgd_experiments.comparison import Comparison, Tuned, compare, epsilons, pick, tuned, works
from fedcgd_experiments.paper_studies import PAPER_STUDIES
from fedcgd_experiments.people_point import PeoplePoint
from fedcgd_experiments.point import CentralPoint
from fedcgd_experiments.results import Results, Row, claims
from fedcgd_experiments.significance import Pairs, holm, paired
from fedcgd_experiments.studies import HEADLINES, STUDIES
from fedcgd_experiments.study import Secret, Study

BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
BUDGETS = (0.5, 1.0, 2.0, 4.0, 8.0)
NOT_RUN = "*Not run yet.*\n"
SECRETS: dict[Secret, str] = {"nothing": "without amplification", "sampling": "secret sampling"}
"""What the two kinds of arms may keep from an adversary."""


@dataclass(frozen=True)
class Case:
    """A question of the verdict: what can be secret, and whether the work is the least of the study's or any of them."""

    label: str
    secret: Secret
    little_work: bool = False


CASES = (
    Case("without amplification", "nothing"),
    Case("without amplification, little work", "nothing", little_work=True),
    Case("secret sampling", "sampling"),
    Case("secret sampling, little work", "sampling", little_work=True),
)

Table = Callable[[Path, str], str]
"""(folder of results, what the name says after the slash) → Markdown."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A study, its rows, and what is complete of it."""

    study: Study
    rows: list[Row]
    tuned: list[Tuned]

    @staticmethod
    def read(results: Path, name: str) -> "Found":
        """What is known of the study `name`. Raises ValueError for an unknown one."""
        study = STUDIES.get(name) or PAPER_STUDIES.get(name)
        if study is None:
            raise ValueError(f"unknown study {name!r}; the studies are {', '.join([*STUDIES, *PAPER_STUDIES])}")
        rows = Results(results / f"{name}.jsonl").rows()
        return Found(study=study, rows=rows, tuned=tuned(study, rows, point_class(study)))


def point_class(study: Study) -> type[CentralPoint | PeoplePoint]:
    """Of what class the points of `study` are."""
    return PeoplePoint if study.work == "work" else CentralPoint


def fill(page: str, results: Path) -> str:
    """`page` with each of its tables made anew from the files in `results`. Raises ValueError for a table that is not known."""

    def made(block: re.Match[str]) -> str:
        kind, _, argument = block[2].partition("/")
        if kind not in TABLES:
            raise ValueError(f"unknown table {block[2]}; the tables are {', '.join(TABLES)}")
        return f"{block[1]}\n{TABLES[kind](results, argument)}\n{block[3]}"

    return BLOCK.sub(made, page)


def headline(results: Path, _: str) -> str:
    """For each study, case and budget: what λ-CGD gains over the better baseline, in points."""
    lines = []
    for case in CASES:
        for name in STUDIES:
            found = Found.read(results, name)
            rows = {row.epsilon: row for row in headline_comparisons(found, case)}
            cells = [gain(rows.get(epsilon)) for epsilon in BUDGETS]
            if any(cells):
                label = case.label if not case.little_work else f"{case.label} ({min(works(found.study))} passes)"
                lines.append([label, found.study.title, *cells])
    return markdown(["what is secret", "data", *(f"ε = {epsilon:g}" for epsilon in BUDGETS)], lines)


def verdict(results: Path, _: str) -> str:
    """For each case in how many (data, ε) λ-CGD is ahead of the better baseline, behind, and neither."""
    lines = []
    for case in CASES:
        rows = [row for name in STUDIES for row in headline_comparisons(Found.read(results, name), case)]
        if rows:
            sizes = sorted(100 * row.pairs.difference for row in rows)
            ahead = sum(row.corrected < 0.05 and row.pairs.difference > 0 for row in rows)
            behind = sum(row.corrected < 0.05 and row.pairs.difference < 0 for row in rows)
            cells = [case.label, f"{ahead} of {len(rows)}", f"{behind} of {len(rows)}"]
            lines.append([*cells, f"{sizes[0]:+.1f} … {median(sizes):+.1f} … {sizes[-1]:+.1f}"])
    return markdown(["", "ahead", "behind", "points: lowest, median, highest"], lines)


def headline_comparisons(found: Found, case: Case) -> list[Comparison]:
    """The first arm of `HEADLINES` that the study has for the kind of secret, against the better baseline.

    A study of one amount of work alone is of little work.
    """
    if not case.little_work and len(works(found.study)) == 1:
        return []
    arms = [arm for arm in HEADLINES if arm in found.study.arms and found.study.secret(arm) == case.secret]
    most = min(works(found.study)) if case.little_work else math.inf
    return compare(found.study, found.tuned, arms[:1], most=most)


def accuracy(results: Path, name: str) -> str:
    """Test accuracy of each arm at each budget, at what validation chose, and the difference to the better baseline."""
    found = Found.read(results, name)
    compared = {(row.ours.arm, row.epsilon): row for row in compare(found.study, found.tuned)}
    parts = []
    for secret, label in SECRETS.items():
        lines = []
        for arm in _arms(found.study, secret):
            chosen = {epsilon: pick(found.study, found.tuned, epsilon, [arm]) for epsilon in epsilons(found.study)}
            cells = [_cell(one, compared.get((arm, epsilon))) for epsilon, one in chosen.items()]
            if any(cells):
                lines.append([arm, *cells])
        head = [label, *(f"ε = {epsilon:g}" for epsilon in epsilons(found.study))]
        parts.append(markdown(head, lines))
    said = claims(row for one in found.tuned for row in one.tests.values())
    return "\n".join([*parts, f"{said}\n"] if said else parts)


def work(results: Path, name: str) -> str:
    """Test accuracy of each arm against the work, at each budget."""
    found = Found.read(results, name)
    lines = [
        [arm, f"{epsilon:g}", *(_mean(one) for one in _by_work(found, arm, epsilon))]
        for epsilon in epsilons(found.study)
        for arm in found.study.arms
        if any(_by_work(found, arm, epsilon))
    ]
    return markdown(["arm", "ε", *(f"{count} {found.study.unit}" for count in works(found.study)[:1]),
                     *map(str, works(found.study)[1:])], lines)  # fmt: skip


def recipes(results: Path, name: str) -> str:
    """What validation chose for each arm at each budget."""
    found = Found.read(results, name)
    lines = []
    for epsilon in epsilons(found.study):
        for arm in found.study.arms:
            one = pick(found.study, found.tuned, epsilon, [arm])
            if one:
                row = next(iter(one.tests.values()))
                lines.append([arm, f"{epsilon:g}", recipe(one), f"{row['noise_multiplier']:.3g}"])
    return markdown(["arm", "ε", "recipe", "σ"], lines)


def recipe(one: Tuned) -> str:
    """The values of a tuned arm, in words."""
    point = one.point
    learning = (
        f"rate {point.learning_rate:g}, momentum {point.momentum:g}, {point.schedule}, clip norm {point.clip_norm:g}"
    )
    if isinstance(point, PeoplePoint):
        turns = f"{point.cohort} people a round, {point.participations} turns × {point.local_epochs} passes"
        return f"`{point.mechanism}`, {turns} at rate {point.local_learning_rate:g}, {learning}"
    return f"`{point.mechanism}`, {point.epochs} epochs × {point.steps} steps, {learning}"


def effort(results: Path, _: str) -> str:
    """What was run: trainings, the candidates of each arm at each setting, and processor time."""
    lines = []
    for name, study in STUDIES.items():
        rows = Found.read(results, name).rows
        if rows:
            splits = [sum(row["split"] == split for row in rows) for split in ("validation", "test")]
            commits = sorted({row["commit"] for row in rows})
            minutes = sum(row["seconds"] for row in rows) / 60
            budget = f"{study.candidates}, {study.finalists} on {len(study.tuning)} seeds"
            cells = [f"`{name}.jsonl`", budget, str(len(study.tests)), *(f"{count:,}" for count in splits)]
            lines.append([*cells, f"{minutes:.1f}", ", ".join(commits)])
    head = ["file", "candidates", "test seeds", "tuning runs", "test runs", "processor minutes", "commit"]
    return markdown(head, lines)


def recorded(results: Path, name: str) -> str:
    """Runs that name their `arm`, of an earlier study that tuned them: accuracy, and the difference to the first arm."""
    rows = Results(results / f"{name}.jsonl").rows()
    tested: dict[tuple[str, float], dict[int, float]] = defaultdict(dict)
    for row in rows:
        tested[row["arm"], row["epsilon"]][row["seed"]] = row["accuracy"]
    arms, budgets = list(dict.fromkeys(arm for arm, _ in tested)), sorted({epsilon for _, epsilon in tested})
    pairs = {key: paired(values, tested[arms[0], key[1]]) for key, values in tested.items()}
    corrected = dict(zip(pairs, holm([one.p_value if one else math.nan for one in pairs.values()]), strict=True))
    lines = []
    for arm in arms:
        cells = []
        for epsilon in budgets:
            cells.append(spread(tested[arm, epsilon].values()))
            found = pairs[arm, epsilon]
            if found and arm != arms[0]:
                cells[-1] += f"; {points(found, corrected[arm, epsilon])}"
        lines.append([arm, *cells])
    return markdown(["arm", *(f"ε = {epsilon:g}" for epsilon in budgets)], lines) + f"\n{claims(rows)}\n"


def exam(results: Path, name: str) -> str:
    """Linear models on one set: each arm, tuned alike, and the plan at its own rate; and both against Poisson sampling."""
    by_label = real_tables.cells(real_tables.rows_of(results))[name]
    poisson = by_label[real_tables.POISSON]
    lines = [[label, *map(spread_of_percent, by.values())] for label, by in by_label.items()]
    for label in (real_tables.UNAMPLIFIED[0], real_tables.PLAN, real_tables.PUBLIC):
        own = by_label.get(label)
        if own is None:
            continue
        lines.append(
            [f"{label} − {real_tables.POISSON}", *(real_tables.difference(own[e], poisson[e]) for e in poisson)]
        )
    return markdown(["", *(f"ε = {epsilon:g}" for epsilon in poisson)], lines)


def planned(results: Path, inputs: str) -> str:
    """By how many points the plan is behind the best tuned without amplification / behind tuned Poisson sampling; how often.

    `inputs` is `public` for plans from public inputs.
    """
    lost = real_tables.behind(real_tables.rows_of(results), public=inputs == "public")
    budgets = sorted({epsilon for _, epsilon in lost})
    lines = [
        [name, *(f"{lost[name, e][0]:+.1f} / {lost[name, e][1]:+.1f}" for e in budgets)]
        for name in dict.fromkeys(name for name, _ in lost)
    ]
    near = sum(best <= 1 for best, _ in lost.values()), sum(secret <= 0.5 for _, secret in lost.values())
    said = (
        f"\nWithin a point of the best tuned without amplification: {near[0]} of {len(lost)}. At most half a point behind tuned "
        f"Poisson sampling: {near[1]} of {len(lost)}.\n"
    )
    return markdown(["data, examples, features", *(f"ε = {epsilon:g}" for epsilon in budgets)], lines) + said


def networks(results: Path, _: str) -> str:
    """The CNN: each arm at the budgets that were run."""
    found = real_tables.by_epsilon(real_tables.rows_of(results))
    budgets = sorted({epsilon for by in found.values() for epsilon in by})
    lines = [[label, *(spread_of_percent(by.get(epsilon, ())) for epsilon in budgets)] for label, by in found.items()]
    return markdown(["", *(f"ε = {epsilon:g}" for epsilon in budgets)], lines)


def rates(results: Path, figure: str) -> str:
    """The CNN of one figure or tuning: validation accuracy of one seed at each rate."""
    rows = [row for row in real_tables.rows_of(results) if row.get("figure") == figure.replace("-at-", " ")]
    found: dict[tuple[str, str, float], dict[float, float]] = defaultdict(dict)
    for row in rows:
        recipe = row["recipe"]
        arm = recipe["mechanism"], f"{recipe['sampling']}, {recipe['schedule']}", row["epsilon"]
        found[arm][row["rate"]] = 100 * row["validation"]
    tried = sorted({row["rate"] for row in rows})
    lines = [
        [mechanism, how, f"{epsilon:g}", *(f"{by[rate]:.1f}" if rate in by else "" for rate in tried)]
        for (mechanism, how, epsilon), by in sorted(found.items())
    ]
    return markdown(["mechanism", "sampling, rate", "ε", *(f"rate {rate:g}" for rate in tried)], lines)


def lambdas(results: Path, _: str) -> str:
    """The linear model at each λ: mean test accuracy."""
    rows = real_tables.rows_of(results)
    lines, places = [], dict[float, None]()
    for figure, sampling in (("figure-2", "none"), ("figure-3", "balls-in-bins")):
        for epsilon, by in real_tables.against_lambda(rows, figure).items():
            places |= dict.fromkeys(by)
            lines.append([f"{sampling}, ε = {epsilon:g}", *(f"{100 * fmean(row['test']):.1f}" for row in by.values())])
    return markdown(["sampling", *(f"λ = {place:g}" for place in places)], lines)


TABLES: dict[str, Table] = {
    "verdict": verdict,
    "headline": headline,
    "accuracy": accuracy,
    "work": work,
    "recipes": recipes,
    "effort": effort,
    "recorded": recorded,
    "exam": exam,
    "planned": planned,
    "networks": networks,
    "rates": rates,
    "lambdas": lambdas,
}


def gain(row: Comparison | None) -> str:
    """The `points` of a comparison; empty for none."""
    return "" if row is None else points(row.pairs, row.corrected)


def points(pairs: Pairs, corrected: float) -> str:
    """`**+12.4** [11.0, 13.8]`: points, and their interval; bold where p after Holm's correction is below .05."""
    difference = f"{100 * pairs.difference:+.1f}"
    bold = f"**{difference}**" if corrected < 0.05 else difference
    return bold if math.isnan(pairs.low) else f"{bold} [{100 * pairs.low:.1f}, {100 * pairs.high:.1f}]"


def p_text(p: float) -> str:
    """A p-value with two digits, or what it is below; `same` where all seeds have the same difference."""
    if math.isnan(p):
        return "same"
    return "p < .001" if p < 0.001 else f"p {p:.2g}".replace("0.", ".", 1)


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table, or that there is nothing yet."""
    made = [list(line) for line in lines]
    if not made:
        return NOT_RUN
    return "".join(f"| {' | '.join(row)} |\n" for row in [list(head), ["---"] * len(head), *made])


def _arms(study: Study, secret: Secret) -> list[str]:
    """The baselines and the arms of a kind of secret, baselines first."""
    return list(
        dict.fromkeys([*study.baselines.get(secret, ()), *(arm for arm in study.arms if study.secret(arm) == secret)])
    )


def _by_work(found: Found, arm: str, epsilon: float) -> list[Tuned | None]:
    mine = {
        one.setting[found.study.work]: one for one in found.tuned if (one.arm, one.setting["epsilon"]) == (arm, epsilon)
    }
    return [mine.get(count) for count in works(found.study)]


def _mean(one: Tuned | None) -> str:
    return spread(one.accuracies.values()) if one else ""


def spread(accuracies: Iterable[float]) -> str:
    """`71.1 ± 1.3`: mean and standard deviation, in percent; empty for fewer than two."""
    return spread_of_percent([100 * value for value in accuracies])


def spread_of_percent(values: Sequence[float]) -> str:
    """As `spread`, of what is in percent; of one value the value alone."""
    deviation = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{fmean(values):.1f}{deviation}" if values else ""


def _cell(one: Tuned | None, row: Comparison | None) -> str:
    """`71.1 ± 1.3; +2.4 [1.0, 3.8], p .002`."""
    text = _mean(one)
    return text if row is None else f"{text}; {gain(row)}, {p_text(row.corrected)}"
