"""σ and RMSE of every sampling × mechanism × ε, and RMSE against b: `python benchmarks/b_min_sep.py`, `--tables` to put
them into docs/accounting.md and to draw docs/samplings.svg.

n = 600 rounds, a user is expected in 12 of them, δ = 1e-3. Each row is written to benchmarks/results/b_min_sep.jsonl as soon as
it is found, and what stands there is not found again: stop and start as you like. A mechanism that a sampling does not cover is
written with the reason. σ of the first table is calibrated, with its confidence bounds. That of the second is proposed by
few draws, with the same random numbers for all b.
"""

import argparse
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from fedcgd.accounting import accountant, calibrate
from fedcgd.mechanisms import BISR, BSR, DPSGD, LambdaCGD, Mechanism, Normalized
from fedcgd.mechanisms.error import error_norms
from fedcgd.optimisation import catalogue
from fedcgd.participation import Participation

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = Path(__file__).parent / "results" / "b_min_sep.jsonl"
ROUNDS, USERS, COHORT, DELTA = 600, 50, 1, 1e-3
EPSILONS = (8.0, 4.0, 2.0, 1.0, 0.5)
LAMBDAS = (0.5, 0.8, 0.9, 0.95, 0.975)
# By ε the best of them under b-min-sep, of estimates without bounds; that of ε = 1 is taken at 0.5 too.
AMPLIFIED = {8.0: 0.9, 4.0: 0.8, 2.0: 0.8, 1.0: 0.5, 0.5: 0.5}
SEPARATION = 32
SEPARATIONS = (16, 25, 33, 40, 45)
AGAINST_B = ((8.0, 0.9), (4.0, 0.8), (1.0, 0.5))  # ε, λ
BEST, UNIT = "λ-CGD, best λ", "λ-CGD, best λ, unit columns"
OF_LAMBDA = [f"λ-CGD {lam:g}" for lam in LAMBDAS]
MECHANISMS: dict[str, Mechanism] = {
    "DP-SGD": DPSGD(),
    **{f"λ-CGD {lam:g}": LambdaCGD(lam) for lam in LAMBDAS},
    "BSR 4": BSR(4),
    "BISR 4": BISR(4),
    # Of least error for known rounds: no optimiser knows of amplification.
    "BandMF 4": catalogue.mechanism("band-mf:4", Participation(rounds=ROUNDS, min_separation=USERS // COHORT)),
}
PARTICIPATIONS = {
    "none": Participation(rounds=ROUNDS, min_separation=USERS // COHORT),
    "balls-in-bins": Participation(rounds=ROUNDS, min_separation=USERS // COHORT, sampling="balls-in-bins"),
    "poisson": Participation(rounds=ROUNDS, sampling="poisson", sampling_rate=COHORT / USERS),
    "random-allocation": Participation(
        rounds=ROUNDS, max_participations=ROUNDS * COHORT // USERS, sampling="random-allocation"
    ),
    "cyclic-poisson": Participation(
        rounds=ROUNDS, min_separation=4, sampling="cyclic-poisson", sampling_rate=4 * COHORT / USERS
    ),
    "b-min-sep": Participation.b_min_sep(ROUNDS, users=USERS, cohort_size=COHORT, min_separation=SEPARATION),
}
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
    for sampling in PARTICIPATIONS:
        for epsilon in EPSILONS:
            for name in [*MECHANISMS, UNIT]:
                if sampling != "b-min-sep" or name not in OF_LAMBDA or name == f"λ-CGD {AMPLIFIED[epsilon]:g}":
                    yield {"table": "samplings", "sampling": sampling, "epsilon": epsilon, "mechanism": name}
    for epsilon, lam in AGAINST_B:
        for b in SEPARATIONS:
            yield {"table": "separations", "epsilon": epsilon, "mechanism": f"λ-CGD {lam:g}", "b": b}


def found(point: Row, rows: list[Row]) -> Row:
    """The row of a point; `rows` are those before it."""
    epsilon, began = point["epsilon"], time.process_time()
    try:
        if point["table"] == "separations":
            mechanism = MECHANISMS[point["mechanism"]]
            there = Participation.b_min_sep(ROUNDS, users=USERS, cohort_size=COHORT, min_separation=point["b"])
            sigma = accountant(mechanism, there).rough_noise_multiplier(epsilon=epsilon, delta=DELTA)
        else:
            mechanism = _mechanism(point, rows)
            there = PARTICIPATIONS[point["sampling"]]
            sigma = calibrate(mechanism, there, epsilon=epsilon, delta=DELTA).noise_multiplier
    except ValueError as error:
        return point | {"refused": str(error)}
    return point | {
        "noise_multiplier": sigma,
        "per_column": sigma / float(np.linalg.norm(mechanism.columns(ROUNDS, np.array([0])))),
        "rmse": error_norms(mechanism, ROUNDS).rmse(sigma),
        "seconds": round(time.process_time() - began, 1),
    }


def best(rows: list[Row], sampling: str, epsilon: float) -> Row | None:
    """The row of the best λ under a sampling; None if λ-CGD is refused there."""
    wanted = {"table": "samplings", "sampling": sampling, "epsilon": epsilon}
    mine = [row for row in rows if row["mechanism"] in OF_LAMBDA and wanted.items() <= row.items() and "rmse" in row]
    return min(mine, key=lambda row: row["rmse"], default=None)


def _mechanism(point: Row, rows: list[Row]) -> Mechanism:
    if point["mechanism"] != UNIT:
        return MECHANISMS[point["mechanism"]]
    row = best(rows, point["sampling"], point["epsilon"])
    if row is None:
        raise ValueError("λ-CGD is refused")
    return Normalized(MECHANISMS[row["mechanism"]])


def kept() -> list[Row]:
    """The rows that were found."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def samplings(rows: list[Row]) -> str:
    """The first table, in Markdown."""
    lines = [
        "| sampling | mechanism | " + " | ".join(f"ε = {e:g}" for e in EPSILONS) + " |",
        "|---|---|" + "---:|" * len(EPSILONS),
    ]
    for sampling in PARTICIPATIONS:
        for name in ["DP-SGD", BEST, UNIT, "BSR 4", "BISR 4", "BandMF 4"]:
            cells = []
            for epsilon in EPSILONS:
                row = _row(rows, sampling, epsilon, name)
                lam = f", λ = {row['mechanism'].split()[1]}" if row and name == BEST else ""
                cells.append(f"{row['rmse']:.2f} ({row['per_column']:.3f}{lam})" if row else "")
            if any(cells):
                lines.append(f"| {sampling} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def separations(rows: list[Row]) -> str:
    """The second table, in Markdown."""
    head = [f"{mechanism}, ε = {epsilon:g}" for epsilon, mechanism in _lines()]
    lines = ["| b | part of n/k | " + " | ".join(head) + " |", "|---:|---:|" + "---:|" * len(head)]
    for b in SEPARATIONS:
        cells = []
        for epsilon, mechanism in _lines():
            wanted = {"table": "separations", "epsilon": epsilon, "mechanism": mechanism, "b": b}
            cells += [f"{row['rmse']:.2f}" for row in rows if wanted.items() <= row.items()] or [""]
        lines.append(f"| {b} | {b * COHORT / USERS:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: list[Row], target: Path) -> None:
    """RMSE against ε, in parts of that of DP-SGD by Poisson sampling."""
    plt.rcParams["svg.hashsalt"] = "fedcgd"  # the same file for the same numbers
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for sampling, name in SHOWN:
        found = []
        for epsilon in EPSILONS:
            row, floor = _row(rows, sampling, epsilon, name), _row(rows, "poisson", epsilon, "DP-SGD")
            found.append(row["rmse"] / floor["rmse"] if row and floor else float("nan"))
        axes.plot(EPSILONS, found, marker="o", label=f"{name}, {sampling}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axes.set(xlabel="ε", ylabel="RMSE over that of DP-SGD, poisson", ylim=(0, None))
    axes.legend(fontsize=8)
    figure.savefig(target, metadata={"Date": None})
    target.write_text("\n".join(line.rstrip() for line in target.read_text().splitlines()) + "\n")


def _row(rows: list[Row], sampling: str, epsilon: float, name: str) -> Row | None:
    if name == BEST:
        return best(rows, sampling, epsilon)
    wanted = {"table": "samplings", "sampling": sampling, "epsilon": epsilon, "mechanism": name}
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
        page = DOCS / "accounting.md"
        text = page.read_text()
        for name, table in (("samplings", samplings(kept())), ("separations", separations(kept()))):
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
