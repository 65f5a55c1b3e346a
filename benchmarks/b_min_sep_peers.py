"""ε under b-min-sep, Balls-in-Bins and (cyclic) Poisson next to jax-privacy's and opake's, for given noise.

python benchmarks/b_min_sep_peers.py [--jax-privacy PYTHON] [--opake PYTHON] [--tables]

PYTHON: an interpreter that has the peer (this one, unless said otherwise; "none" leaves it out). n = 1000 rounds, a user is
expected in 10 of them, δ = 1e-3. Each row is written to benchmarks/results/b_min_sep_peers.jsonl as soon as it is found, and
what stands there is not found again: stop and start as you like. `--tables` puts what was found into reports/accounting.md. Exits
with 1 if a peer should have been asked and is not there. Two hours of one core: a million draws of jax-privacy are three
minutes, opake's b-min-sep four.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from b_min_sep import Size
from b_min_sep_peer import NOT_THERE, PEERS

from fedcgd.accounting import compute_epsilon

PAGE = Path(__file__).parents[1] / "benchmarks" / "reports" / "accounting.md"
RESULTS = Path(__file__).parent / "results" / "b_min_sep_peers.jsonl"
PEER = Path(__file__).with_name("b_min_sep_peer.py")
DELTA = 1e-3
SIGMAS = (0.5, 0.7, 1.0, 2.0)  # over the norm of a column
SIZE = Size(1000, 10, 66)
PARTICIPATIONS = dict(SIZE.participations) | {"b-min-sep": SIZE.b_min_sep(66), "b-min-sep, b = 4": SIZE.b_min_sep(4)}
CELLS = (
    ("BSR 4", "b-min-sep, b = 4"),
    ("BSR 4", "cyclic-poisson"),
    ("DP-SGD", "poisson"),
    ("BSR 4", "b-min-sep"),
    ("DP-SGD", "b-min-sep"),
    ("BSR 4", "balls-in-bins"),
    ("DP-SGD", "balls-in-bins"),
)

Row = dict[str, Any]


def points() -> Iterator[Row]:
    """What identifies each row."""
    for name, sampling in CELLS:
        for sigma in SIGMAS:
            for by in ["fedcgd", *PEERS]:
                if by != "opake" or (sampling != "b-min-sep" and (name, sampling) != ("DP-SGD", "balls-in-bins")):
                    yield {"mechanism": name, "sampling": sampling, "sigma": sigma, "by": by}


def found(point: Row, python: str) -> Row | None:
    """The row of a point; None if `python` has not the peer."""
    mechanism, there = SIZE.mechanisms[point["mechanism"]], PARTICIPATIONS[point["sampling"]]
    column = mechanism.columns(SIZE.rounds, np.array([0])).ravel()
    norm = float(np.linalg.norm(column))
    if point["by"] == "fedcgd":
        began = time.process_time()
        guarantee = compute_epsilon(mechanism, there, noise_multiplier=point["sigma"] * norm, delta=DELTA)
        return point | {"bound": guarantee.epsilon, "seconds": round(time.process_time() - began, 1)}
    question = {
        "sampling": there.sampling,
        "rounds": SIZE.rounds,
        "column": list(column[: np.flatnonzero(column)[-1] + 1] / norm),
        "min_separation": there.min_separation,
        "rate": there.sampling_rate,
        "cohort": SIZE.expected / SIZE.rounds,
        "sigma": point["sigma"],
        "delta": DELTA,
        "seed": 1,
    }
    command = [python, str(PEER), point["by"], json.dumps(question)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == NOT_THERE:
        return None
    done.check_returncode()
    return point | json.loads(done.stdout.splitlines()[-1])


def kept() -> list[Row]:
    """The rows that were found."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def table(rows: list[Row]) -> str:
    """In Markdown, with ratios of ours over theirs."""
    lines = [
        "| mechanism | sampling | σ | ours | jax-privacy's estimate | its bound | opake's bound | ours over these |"
        " seconds |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, sampling in CELLS:
        for sigma in SIGMAS:
            wanted = {"mechanism": name, "sampling": sampling, "sigma": sigma}
            here = {row["by"]: row for row in rows if wanted.items() <= row.items()}
            if "fedcgd" not in here or len(here) == 1:
                continue
            ours, jax, opake = (here.get(by, {}) for by in ("fedcgd", "jax-privacy", "opake"))
            theirs = [jax.get("estimate"), jax.get("bound"), opake.get("bound")]
            cells = [f"{value:.3f}" if value else "" for value in theirs]
            if "standard_error" in jax:
                cells[0] += f" ± {jax['standard_error']:.3f}"
            ratios = ", ".join(f"{ours['bound'] / value:.3f}" if value else "–" for value in theirs)
            seconds = ", ".join(f"{row['seconds']:.0f}" if row else "–" for row in (ours, jax, opake))
            cells = [name, sampling, f"{sigma:g}", f"{ours['bound']:.3f}", *cells, ratios, seconds]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Find the rows that are missing, or put them into the documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for peer in PEERS:
        parser.add_argument(f"--{peer}", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--tables", action="store_true")
    args = parser.parse_args()
    if args.tables:
        text = re.sub(
            r"(<!-- peers -->\n\n).*?(\n\n<!-- end -->)",
            lambda match: match[1] + table(kept()) + match[2],
            PAGE.read_text(),
            flags=re.DOTALL,
        )
        PAGE.write_text(text)
        return
    pythons = {peer: getattr(args, peer.replace("-", "_")) for peer in PEERS} | {"fedcgd": sys.executable}
    missing = set()
    for point in points():
        by = point["by"]
        if pythons[by] == "none" or by in missing or any(point.items() <= row.items() for row in kept()):
            continue
        row = found(point, pythons[by])
        if row is None:
            missing.add(by)
            continue
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)
    sys.exit(bool(missing))


if __name__ == "__main__":
    main()
