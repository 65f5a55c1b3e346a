"""RMSE under a sampling of mechanisms whose numbers are chosen for it, beside what they were optimised to be without one.

`python benchmarks/damping.py` finds what is missing in benchmarks/results/damping.jsonl, each row written as soon as it is found;
`--table` prints what is there as the tables of docs/mechanisms.md. 210 rounds, δ = 1e-5. σ is calibrated under Balls-in-Bins, and
proposed by few draws, with the same random numbers for all, under b-min-sep.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from fedcgd.accounting import accountant
from fedcgd.accounting.selection import select_lambda, select_mechanism
from fedcgd.mechanisms import LambdaCGD, Mechanism
from fedcgd.mechanisms.error import error_norms
from fedcgd.optimisation import catalogue
from fedcgd.optimisation.catalogue import spelling_of
from fedcgd.optimisation.damping import damping
from fedcgd.participation import Participation

RESULTS = Path(__file__).parent / "results" / "damping.jsonl"
DELTA, ROUNDS = 1e-5, 210
LAMBDA = "lambda-cgd, λ of least RMSE"
BINS = Participation(rounds=ROUNDS, min_separation=21, sampling="balls-in-bins")
COINS = Participation.for_cohorts("b-min-sep", ROUNDS, users=21, cohort_size=1)
CELLS = [
    *((BINS, epsilon, text) for epsilon in (1.0, 4.0, 8.0) for text in (LAMBDA, "band-inv-mf:2", "blt:2", "bifr:3")),
    *((BINS, 1.0, text) for text in ("lambda-mu", "banded-toeplitz:4")),
    *((COINS, 1.0, text) for text in ("blt:2", LAMBDA, "banded-toeplitz:4")),
    *((BINS, epsilon, text) for epsilon in (4.0, 8.0) for text in ("lambda-mu", "banded-toeplitz:4")),
    *((COINS, 4.0, text) for text in ("blt:2", LAMBDA, "banded-toeplitz:4")),
]


def rmse(mechanism: Mechanism, participation: Participation, epsilon: float) -> float:
    """Per unit of clip norm."""
    sigma = accountant(mechanism, participation).rough_noise_multiplier(epsilon=epsilon, delta=DELTA)
    return error_norms(mechanism, ROUNDS).rmse(sigma)


def cell(participation: Participation, epsilon: float, text: str) -> dict[str, Any]:
    """What is chosen and its RMSE, and the RMSE of what was optimised without a sampling; None where nothing was."""
    chosen: Mechanism
    if text == LAMBDA:
        chosen = LambdaCGD(select_lambda(participation, objective="amplified-rmse", epsilon=epsilon, delta=DELTA).lam)
        before = None
    else:
        chosen = select_mechanism(text, participation, epsilon=epsilon, delta=DELTA)
        before = catalogue.mechanism(text, participation) if catalogue.MechanismSpec.parse(text).row.optimise else None
    return {
        "sampling": participation.sampling,
        "epsilon": epsilon,
        "mechanism": text,
        "chosen": spelling_of(chosen),
        "kept": chosen.num_buffers(ROUNDS),
        "rho": None if before is None else damping(chosen, before),
        "old": None if before is None else rmse(before, participation, epsilon),
        "new": rmse(chosen, participation, epsilon),
    }


def recorded() -> list[dict[str, Any]]:
    """The rows on disk."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def table() -> str:
    """A Markdown table for each sampling: a row for each mechanism, a column for each ε."""
    rows = recorded()
    text = ""
    for sampling in dict.fromkeys(row["sampling"] for row in rows):
        here = [row for row in rows if row["sampling"] == sampling]
        epsilons = sorted({row["epsilon"] for row in here})
        text += f"\n{sampling}\n\n| | vectors kept |{''.join(f' ε = {epsilon:g} |' for epsilon in epsilons)}\n"
        text += f"|---|---|{'---|' * len(epsilons)}\n"
        for name in dict.fromkeys(row["mechanism"] for row in here):
            found = {row["epsilon"]: row for row in here if row["mechanism"] == name}
            cells = [_cell(found[epsilon]) if epsilon in found else "–" for epsilon in epsilons]
            text += f"| `{name}` | {next(iter(found.values()))['kept']} | {' | '.join(cells)} |\n"
    return text


def _cell(row: dict[str, Any]) -> str:
    number = f"{row['new']:.2f}"
    if row["old"] is not None:
        return f"{row['old']:.2f} → {number} (ρ = {row['rho']:.3f})"
    values = row["chosen"].split(":")[1:]
    return f"{number} ({', '.join(f'{float(value):.2f}' for value in values if '.' in value)})"


def main() -> None:
    """Find what is missing, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="print the tables and find nothing")
    if parser.parse_args().table:
        print(table())
        return
    for participation, epsilon, text in CELLS:
        known = {(row["sampling"], row["epsilon"], row["mechanism"]) for row in recorded()}
        if (participation.sampling, epsilon, text) not in known:
            row = cell(participation, epsilon, text)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    main()
