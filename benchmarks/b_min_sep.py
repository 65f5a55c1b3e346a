"""σ and RMSE of every sampling × mechanism × ε, for three sizes: `python benchmarks/b_min_sep.py`, `--tables` to print.

Each row is written to benchmarks/b_min_sep.jsonl as soon as it is found, and what stands there is not found again: stop
and start as you
like. Rows are of one run each, with the seconds of processor time that its calibration took; a mechanism that a sampling
does not cover is
written with the reason. δ = 1e-5; b of b-min-sep is two thirds of n/k. About an hour of one processor core.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedcgd.accounting import calibrate
from fedcgd.mechanisms import BISR, BSR, DPSGD, LambdaCGD, Mechanism, Normalized
from fedcgd.mechanisms.error import error_norms
from fedcgd.participation import Participation

RESULTS = Path(__file__).with_suffix(".jsonl")
SIZES = ((200, 10), (600, 12), (1000, 10))  # n, k
EPSILONS = (8.0, 4.0, 2.0, 1.0, 0.5)
DELTA = 1e-5
MECHANISMS: dict[str, Mechanism] = {
    "dp-sgd": DPSGD(),
    "lambda-cgd:0.5": LambdaCGD(0.5),
    "lambda-cgd:0.8": LambdaCGD(0.8),
    "lambda-cgd:0.9": LambdaCGD(0.9),
    "lambda-cgd:0.8:normalized": Normalized(LambdaCGD(0.8)),
    "bsr:4": BSR(4),
    "bsr:16": BSR(16),
    "bisr:4": BISR(4),
}


def participations(n: int, k: int) -> dict[str, Participation]:
    """In each a user is expected in k of n rounds."""
    return {
        "none": Participation(rounds=n, min_separation=n // k),
        "balls-in-bins": Participation(rounds=n, min_separation=n // k, sampling="balls-in-bins"),
        "poisson": Participation(rounds=n, sampling="poisson", sampling_rate=k / n),
        "b-min-sep": Participation.b_min_sep(n, users=n, cohort_size=k),
    }


def points() -> Iterator[dict[str, Any]]:
    """What identifies each row, small sizes and large budgets first."""
    for n, k in SIZES:
        for epsilon in EPSILONS:
            for sampling in participations(n, k):
                for name in MECHANISMS:
                    yield {"n": n, "k": k, "epsilon": epsilon, "sampling": sampling, "mechanism": name}


def found(point: dict[str, Any]) -> dict[str, Any]:
    """The row of a point."""
    mechanism = MECHANISMS[point["mechanism"]]
    began = time.process_time()
    try:
        participation = participations(point["n"], point["k"])[point["sampling"]]
        guarantee = calibrate(mechanism, participation, epsilon=point["epsilon"], delta=DELTA)
    except ValueError as error:
        return point | {"refused": str(error)}
    sigma = guarantee.noise_multiplier
    return point | {
        "noise_multiplier": sigma,
        "rmse": error_norms(mechanism, point["n"]).rmse(sigma),
        "seconds": round(time.process_time() - began, 1),
        "failure_probability": guarantee.failure_probability,
    }


def rows() -> list[dict[str, Any]]:
    """Those that were found."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def print_tables() -> None:
    """RMSE (σ; seconds), a line for each sampling and mechanism."""
    done = {tuple(row[name] for name in ("n", "k", "epsilon", "sampling", "mechanism")): row for row in rows()}
    for n, k in SIZES:
        print(f"\nn = {n}, k = {k}, δ = {DELTA:g}: RMSE (σ; seconds)\n")
        print("| sampling | mechanism | " + " | ".join(f"ε = {e:g}" for e in EPSILONS) + " |")
        print("|---|---|" + "---:|" * len(EPSILONS))
        for sampling in participations(n, k):
            for name in MECHANISMS:
                cells = []
                for epsilon in EPSILONS:
                    row = done.get((n, k, epsilon, sampling, name), {})
                    text = (
                        f"{row['rmse']:.2f} ({row['noise_multiplier']:.4g}; {row['seconds']:g})"
                        if "rmse" in row
                        else ""
                    )
                    cells.append("refused" if "refused" in row else text)
                if any(cell not in ("", "refused") for cell in cells):
                    print(f"| {sampling} | {name} | " + " | ".join(cells) + " |")


def main() -> None:
    """Find the rows that are missing, or print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", action="store_true", help="print what was found, and find nothing")
    if parser.parse_args().tables:
        print_tables()
        return
    names = ("n", "k", "epsilon", "sampling", "mechanism")
    done = {tuple(row[name] for name in names) for row in rows()}
    left = [point for point in points() if tuple(point[name] for name in names) not in done]
    for i, point in enumerate(left, 1):
        row = found(point)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        print(f"{i}/{len(left)}: {row}", flush=True)


if __name__ == "__main__":
    main()
