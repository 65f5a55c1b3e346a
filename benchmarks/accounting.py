"""Noise multipliers under every sampling: the amplified columns of Table 4 of arXiv:2601.22334, and the stated speeds.

python benchmarks/accounting.py [--output benchmarks/results/accounting.json] [--only lambda-cgd] [--tables]

Each result is written as soon as it is there, and not computed again. `--tables` computes nothing and prints the tables of
`reports/accounting.md`. All of it takes about half an hour of processor time. `--speed` prints ratios of times as JSON, in a
minute.
"""

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedcgd import DPSGD, Mechanism, Participation, error_norms
from fedcgd.accounting import Guarantee, calibrate
from fedcgd.accounting.balls_in_bins.gram import bin_gram
from fedcgd.accounting.balls_in_bins.law import Bins
from fedcgd.optimisation import catalogue

EPSILONS = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25)
DELTA = 1e-5
BINS = Participation(rounds=3900, min_separation=390, sampling="balls-in-bins")
KNOWN = Participation(rounds=3900, min_separation=390, max_participations=10)  # for what optimised mechanisms assume
POISSON = Participation(rounds=3900, sampling="poisson", sampling_rate=10 / 3900)
LARGE = Participation(rounds=40_000, min_separation=2000, sampling="balls-in-bins")

# (name, its parameter): RMSE as printed, at EPSILONS. "BandMF" there is our banded-toeplitz.
TABLE: dict[tuple[str, float | int | None], tuple[float, ...]] = {
    ("lambda-cgd", 0.975): (9.33, 14.03, 21.45, 36.40, 68.37, 125.69),
    ("lambda-cgd", 0.95): (10.27, 15.28, 21.45, 31.70, 56.75, 103.44),
    ("lambda-cgd", 0.9): (13.25, 18.42, 24.73, 33.66, 54.33, 97.73),
    ("bisr", 2): (30.52, 40.58, 49.44, 58.16, 71.20, 105.09),
    ("bisr", 4): (21.00, 27.97, 34.87, 42.50, 58.27, 98.52),
    ("bisr", 16): (11.50, 15.75, 21.10, 20.25, 52.81, 96.45),
    ("bisr", 64): (6.81, 9.87, 15.92, 28.80, 53.89, 101.90),
    ("bisr", 390): (6.34, 11.30, 20.77, 38.96, 73.70, 139.68),
    ("bsr", 2): (39.65, 51.87, 62.97, 74.14, 88.33, 116.43),
    ("bsr", 4): (29.29, 39.32, 48.13, 57.03, 70.47, 104.90),
    ("bsr", 16): (16.88, 22.41, 28.59, 36.78, 55.03, 97.09),
    ("bsr", 64): (9.62, 13.32, 18.88, 29.34, 52.16, 97.51),
    ("bsr", 390): (5.49, 9.31, 17.06, 31.95, 60.43, 114.52),
    ("banded-toeplitz", 2): (37.67, 49.08, 59.95, 71.17, 86.25, 114.94),
    ("banded-toeplitz", 4): (27.00, 36.99, 45.90, 55.35, 68.64, 104.42),
    ("banded-toeplitz", 16): (15.00, 21.20, 28.13, 37.06, 56.29, 99.33),
    ("banded-toeplitz", 64): (8.77, 13.25, 19.76, 31.40, 56.07, 104.68),
    ("banded-toeplitz", 390): (5.84, 10.42, 19.16, 35.94, 68.02, 128.79),
    ("blt", 4): (5.87, 10.67, 19.50, 35.97, 69.41, 127.69),
    ("band-inv-mf", 2): (9.70, 14.90, 24.41, 43.66, 82.77, 125.87),
    ("band-inv-mf", 4): (8.07, 12.48, 20.76, 37.37, 70.90, 130.48),
    ("band-inv-mf", 16): (6.56, 11.23, 20.17, 37.09, 71.08, 130.90),
    ("band-inv-mf", 64): (6.39, 11.36, 20.87, 39.13, 74.06, 140.38),
    ("band-inv-mf", 390): (5.66, 9.86, 17.76, 33.25, 62.84, 119.20),
    ("dp-sgd", None): (),
}
PRINTED_POISSON = (21.82, 26.27, 31.68, 40.10, 59.17, 100.27)
# σ by an independent Monte Carlo (standard error 0.1 %), at ε = 8 and 1.
BEST: dict[tuple[str, float | int | None], tuple[float, float]] = {
    ("lambda-cgd", 0.9): (2.926637, 7.476348),
    ("bisr", 4): (1.544505, 3.128388),
    ("bsr", 64): (1.89501, 5.847333),
    ("dp-sgd", None): (1.210277, 2.258091),
}


def mechanism_of(name: str, parameter: float | int | None) -> Mechanism:
    """The mechanism of a row, optimised for participation (k, b) where it is optimised."""
    return catalogue.mechanism(name if parameter is None else f"{name}:{parameter}", KNOWN)


def measured(mechanism: Mechanism, participation: Participation, epsilon: float) -> dict[str, Any]:
    """σ, RMSE and seconds, or why it is refused."""
    start, cpu = time.perf_counter(), time.process_time()
    try:
        found: Guarantee = calibrate(mechanism, participation, epsilon=epsilon, delta=DELTA)
    except ValueError as error:
        return {"refused": str(error)}
    return {
        "noise_multiplier": found.noise_multiplier,
        "rmse": error_norms(mechanism, participation.rounds).rmse(found.noise_multiplier),
        "method": found.proof.method,
        "failure_probability": found.proof.failure_probability,
        "seconds": round(time.perf_counter() - start, 2),
        "processor_seconds": round(time.process_time() - cpu, 2),
    }


def tables(results: dict[str, Any]) -> str:
    """Table 4 side by side, and σ by every method, in Markdown."""
    lines = ["| mechanism | " + " | ".join(f"ε = {epsilon:g}" for epsilon in EPSILONS) + " |", "|---|" + "---:|" * 6]
    for (name, parameter), row in TABLE.items():
        cells = []
        for epsilon, printed in zip(EPSILONS, row or [None] * len(EPSILONS), strict=True):
            found = results.get(f"balls-in-bins | {name} | {parameter} | {epsilon:g}", {})
            ours = f"{found['rmse']:.2f}" if "rmse" in found else "–"
            cells.append(ours + (f" ({printed:.2f})" if printed else ""))
        label = name if parameter is None else f"{name} {parameter:g}"
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| run | ε | method | σ | fails with | processor s | σ over best known |",
        "|---|---|---|---:|---|---:|---:|",
    ]
    for key, found in results.items():
        run, name, parameter, epsilon = key.split(" | ")
        known = next((k for k in BEST if k[0] == name and str(k[1]) == parameter), None)
        if (
            "noise_multiplier" not in found
            or float(epsilon) not in (8, 1)
            or (run.startswith("balls") and known is None)
        ):
            continue
        best = BEST[known][(8, 1).index(int(float(epsilon)))] if known and run.startswith("balls") else None
        label = run.partition(",")[0] if run.startswith("balls") else run
        label += f", {name}" + ("" if parameter == "None" else f" {parameter}")
        method = "losses on a grid" if found["failure_probability"] == 0 else "Monte Carlo"
        lines.append(
            f"| {label} | {epsilon} | {method} | "
            f"{found['noise_multiplier']:.4f} | {found['failure_probability'] or 0:g} | {found['processor_seconds']:.0f} | "
            f"{'' if best is None else format(found['noise_multiplier'] / best, '.4f')} |"
        )
    return "\n".join(lines)


def speed() -> dict[str, float]:
    """Processor time of calibrations over that of 2¹⁶ plain draws of the bins' noise, which no change of the method touches."""
    ratios = {}
    for (name, parameter), epsilon in ((("bisr", 2), 1.0), (("bsr", 4), 1.0), (("bsr", 2), 0.25)):
        mechanism = mechanism_of(name, parameter)
        bins = Bins(bin_gram(mechanism, BINS))
        start = time.process_time()
        for _ in range(64):
            bins.noise(np.random.default_rng(0), 1024)
        plain = time.process_time() - start
        seconds = measured(mechanism, BINS, epsilon)["processor_seconds"]
        ratios[f"calibrate, {name} {parameter} at ε = {epsilon:g} / plain draws"] = round(seconds / plain, 2)
    return ratios


def main() -> None:
    """Fill the file, and print a line for each result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/accounting.json"))
    parser.add_argument("--only", help="rows whose name starts so")
    parser.add_argument("--tables", action="store_true", help="only print what is there")
    parser.add_argument("--speed", action="store_true", help="only ratios of times, as JSON")
    given = parser.parse_args()
    if given.speed:
        print(json.dumps(speed(), ensure_ascii=False))
        return
    results: dict[str, Any] = json.loads(given.output.read_text()) if given.output.exists() else {}
    if given.tables:
        print(tables(results))
        return

    def record(
        key: str, mechanism: Mechanism, participation: Participation, epsilon: float, printed: float | None
    ) -> bool:
        if key in results:
            return "refused" not in results[key]
        results[key] = {"printed": printed} | measured(mechanism, participation, epsilon)
        given.output.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        print(key, results[key], flush=True)
        return "refused" not in results[key]

    for (name, parameter), row in TABLE.items():
        if given.only and not name.startswith(given.only):
            continue
        mechanism = mechanism_of(name, parameter)
        for i, epsilon in enumerate(EPSILONS):
            key = f"balls-in-bins | {name} | {parameter} | {epsilon:g}"
            if not record(key, mechanism, BINS, epsilon, row[i] if row else None):
                break
    if not given.only:
        for epsilon, printed in zip(EPSILONS, PRINTED_POISSON, strict=True):
            record(f"poisson | dp-sgd | None | {epsilon:g}", DPSGD(), POISSON, epsilon, printed)
        record("b = 2000, k = 20 | lambda-cgd | 0.9 | 8", mechanism_of("lambda-cgd", 0.9), LARGE, 8.0, None)
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
