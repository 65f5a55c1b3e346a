"""σ and RMSE of every sampling × mechanism × ε for runs of three sizes, and RMSE against b: `python benchmarks/b_min_sep.py`,
`--tables` to put them into reports/accounting.md and to draw docs/samplings.svg.

δ = 1e-3. Each row is written to benchmarks/results/b_min_sep.jsonl as soon as it is found, and what stands there is not found
again: stop and start as you like. A mechanism that a sampling does not cover is written with the reason. σ of the samplings is
calibrated, with its confidence bounds; under b-min-sep λ is the one that few draws say is best. σ against b is proposed by few
draws, with the same random numbers for all b.
"""

import argparse
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from fedcgd import Participation, accountant, calibrate, error_norms
from fedcgd.mechanisms import BISR, BSR, DPSGD, LambdaCGD, Mechanism, Normalized
from fedcgd.optimisation import catalogue

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = Path(__file__).parent / "results" / "b_min_sep.jsonl"
DELTA = 1e-3
EPSILONS = (8.0, 4.0, 2.0, 1.0, 0.5)
LAMBDAS = (0.5, 0.8, 0.9, 0.95, 0.975)
SEPARATIONS = (16, 25, 33, 40, 45)
AGAINST_B = ((8.0, 0.9), (4.0, 0.8), (1.0, 0.5))  # ε, λ
BEST, UNIT = "λ-CGD, best λ", "λ-CGD, best λ, unit columns"
OF_LAMBDA = [f"λ-CGD {lam:g}" for lam in LAMBDAS]
COLUMNS = ["DP-SGD", *OF_LAMBDA, "BSR 4", "BISR 4", "BandMF 4", UNIT]


@dataclass(frozen=True)
class Size:
    """n rounds, of which a user is expected in k; `min_separation` is that of b-min-sep."""

    rounds: int
    expected: int
    min_separation: int

    @property
    def table(self) -> str:
        return f"samplings, n = {self.rounds}, k = {self.expected}"

    @property
    def turns(self) -> int:
        """Users for each one in a round."""
        return self.rounds // self.expected

    @cached_property
    def mechanisms(self) -> Mapping[str, Mechanism]:
        return {
            "DP-SGD": DPSGD(),
            **{f"λ-CGD {lam:g}": LambdaCGD(lam) for lam in LAMBDAS},
            "BSR 4": BSR(4),
            "BISR 4": BISR(4),
            # Of least error for known rounds: no optimiser knows of amplification.
            "BandMF 4": catalogue.mechanism("band-mf:4", self.participations["none"]),
        }

    @cached_property
    def participations(self) -> Mapping[str, Participation]:
        rounds, turns = self.rounds, self.turns
        return {
            "none": Participation(rounds=rounds, min_separation=turns),
            "balls-in-bins": Participation(rounds=rounds, min_separation=turns, sampling="balls-in-bins"),
            "poisson": Participation(rounds=rounds, sampling="poisson", sampling_rate=1 / turns),
            "random-allocation": Participation(
                rounds=rounds, max_participations=self.expected, sampling="random-allocation"
            ),
            "cyclic-poisson": Participation(
                rounds=rounds, min_separation=4, sampling="cyclic-poisson", sampling_rate=4 / turns
            ),
            "b-min-sep": self.b_min_sep(self.min_separation),
        }

    def b_min_sep(self, b: int) -> Participation:
        return Participation.for_cohorts("b-min-sep", self.rounds, users=self.turns, cohort_size=1, min_separation=b)


MAIN = Size(600, 12, 32)
SIZES = (MAIN, Size(100, 10, 6), Size(1000, 10, 66))
SHOWN = (
    ("none", BEST),
    ("balls-in-bins", BEST),
    ("poisson", "DP-SGD"),
    ("random-allocation", "DP-SGD"),
    ("cyclic-poisson", "BSR 4"),
    ("b-min-sep", BEST),
    ("b-min-sep", "BISR 4"),
)  # in the picture

Row = dict[str, Any]


def points() -> Iterator[Row]:
    """What identifies each row. Unit columns come last, since they have the λ that was best without."""
    for size in SIZES:
        for sampling in size.participations:
            for epsilon in EPSILONS:
                for name in COLUMNS if sampling != "b-min-sep" else ["DP-SGD", BEST, *COLUMNS[len(LAMBDAS) + 1 :]]:
                    yield {"table": size.table, "sampling": sampling, "epsilon": epsilon, "mechanism": name}
    for epsilon, lam in AGAINST_B:
        for b in SEPARATIONS:
            yield {"table": "separations", "epsilon": epsilon, "mechanism": f"λ-CGD {lam:g}", "b": b}


def found(point: Row, rows: list[Row]) -> Row:
    """The row of a point; `rows` are those before it."""
    epsilon, began = point["epsilon"], time.process_time()
    size = next((size for size in SIZES if size.table == point["table"]), MAIN)
    more: Row = {}
    try:
        if point["table"] == "separations":
            mechanism = size.mechanisms[point["mechanism"]]
            sigma = _rough(mechanism, size.b_min_sep(point["b"]), epsilon)
        else:
            there = size.participations[point["sampling"]]
            name = point["mechanism"]
            if name == BEST:
                name = _amplified(size, epsilon)
                more = {"best": name}
            mechanism = _unit(size, point, rows) if name == UNIT else size.mechanisms[name]
            sigma = calibrate(mechanism, there, epsilon=epsilon, delta=DELTA).noise_multiplier
    except ValueError as error:
        return point | {"refused": str(error)}
    return (
        point
        | more
        | {
            "noise_multiplier": sigma,
            "per_column": sigma / float(np.linalg.norm(mechanism.columns(size.rounds, np.array([0])))),
            "rmse": error_norms(mechanism, size.rounds).rmse(sigma),
            "seconds": round(time.process_time() - began, 1),
        }
    )


def _rough(mechanism: Mechanism, there: Participation, epsilon: float) -> float:
    return accountant(mechanism, there).rough_noise_multiplier(epsilon=epsilon, delta=DELTA)


def _amplified(size: Size, epsilon: float) -> str:
    """The λ-CGD that few draws say is best under b-min-sep."""
    there = size.participations["b-min-sep"]

    def error(name: str) -> float:
        mechanism = size.mechanisms[name]
        return error_norms(mechanism, size.rounds).rmse(_rough(mechanism, there, epsilon))

    return min(OF_LAMBDA, key=error)


def best(rows: list[Row], size: Size, sampling: str, epsilon: float) -> Row | None:
    """The row of the best λ under a sampling, with its name as `best`; None if λ-CGD is refused there."""
    wanted = {"table": size.table, "sampling": sampling, "epsilon": epsilon}
    names = [*OF_LAMBDA, BEST]
    mine = [row for row in rows if row["mechanism"] in names and wanted.items() <= row.items() and "rmse" in row]
    row = min(mine, key=lambda row: row["rmse"], default=None)
    return row and {"best": row["mechanism"]} | row


def _unit(size: Size, point: Row, rows: list[Row]) -> Mechanism:
    row = best(rows, size, point["sampling"], point["epsilon"])
    if row is None:
        raise ValueError("λ-CGD is refused")
    return Normalized(size.mechanisms[row["best"]])


def kept() -> list[Row]:
    """The rows that were found."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def samplings(rows: list[Row], size: Size) -> str:
    """The table of a size, in Markdown."""
    lines = [
        "| sampling | mechanism | " + " | ".join(f"ε = {e:g}" for e in EPSILONS) + " |",
        "|---|---|" + "---:|" * len(EPSILONS),
    ]
    for sampling in size.participations:
        for name in ["DP-SGD", BEST, UNIT, "BSR 4", "BISR 4", "BandMF 4"]:
            cells = []
            for epsilon in EPSILONS:
                row = _row(rows, size, sampling, epsilon, name)
                lam = f", λ = {row['best'].split()[1]}" if row and name == BEST else ""
                seconds = f"; {row['seconds']:.0f} s" if row and row["seconds"] >= 1 else ""
                cells.append(f"{row['rmse']:.2f} ({row['per_column']:.3f}{lam}{seconds})" if row else "not run")
            if set(cells) != {"not run"}:  # what a sampling does not cover has no row
                lines.append(f"| {sampling} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def separations(rows: list[Row]) -> str:
    """RMSE against b, in Markdown."""
    head = [f"{mechanism}, ε = {epsilon:g}" for epsilon, mechanism in _lines()]
    lines = ["| b | part of n/k | " + " | ".join(head) + " |", "|---:|---:|" + "---:|" * len(head)]
    for b in SEPARATIONS:
        cells = []
        for epsilon, mechanism in _lines():
            wanted = {"table": "separations", "epsilon": epsilon, "mechanism": mechanism, "b": b}
            cells += [f"{row['rmse']:.2f}" for row in rows if wanted.items() <= row.items()] or [""]
        lines.append(f"| {b} | {b / MAIN.turns:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: list[Row], target: Path) -> None:
    """RMSE against ε, in parts of that of DP-SGD by Poisson sampling."""
    plt.rcParams["svg.hashsalt"] = "fedcgd"  # the same file for the same numbers
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for sampling, name in SHOWN:
        found = []
        for epsilon in EPSILONS:
            row, floor = (_row(rows, MAIN, *of) for of in ((sampling, epsilon, name), ("poisson", epsilon, "DP-SGD")))
            found.append(row["rmse"] / floor["rmse"] if row and floor else float("nan"))
        axes.plot(EPSILONS, found, marker="o", label=f"{name}, {sampling}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axes.set(xlabel="ε", ylabel="RMSE over that of DP-SGD, poisson", ylim=(0, None))
    axes.legend(fontsize=8)
    figure.savefig(target, metadata={"Date": None})
    target.write_text("\n".join(line.rstrip() for line in target.read_text().splitlines()) + "\n")


def _row(rows: list[Row], size: Size, sampling: str, epsilon: float, name: str) -> Row | None:
    if name == BEST:
        return best(rows, size, sampling, epsilon)
    wanted = {"table": size.table, "sampling": sampling, "epsilon": epsilon, "mechanism": name}
    return next((row for row in rows if wanted.items() <= row.items() and "rmse" in row), None)


def _lines() -> list[tuple[float, str]]:
    return [(epsilon, f"λ-CGD {lam:g}") for epsilon, lam in AGAINST_B]


def main() -> None:
    """Find the rows that are missing, or print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tables", action="store_true", help="put what was found into the documentation, and find nothing"
    )
    if parser.parse_args().tables:
        page = DOCS.parent / "benchmarks" / "reports" / "accounting.md"
        text = page.read_text()
        tables = {size.table: samplings(kept(), size) for size in SIZES} | {"separations": separations(kept())}
        for name, table in tables.items():
            text = re.sub(rf"(<!-- {name} -->\n\n).*?(\n\n<!-- end -->)", rf"\g<1>{table}\g<2>", text, flags=re.DOTALL)
        page.write_text(text)
        draw(kept(), DOCS / "samplings.svg")
        return
    left = [point for point in points() if not any(point.items() <= row.items() for row in kept())]
    for i, point in enumerate(left, 1):
        row = found(point, kept())
        with RESULTS.open("a") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        print(f"{i}/{len(left)}: {row}", flush=True)


if __name__ == "__main__":
    main()
