"""The language example: its three ways run, and texts of a user are bounded together."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "language_users.py"


@pytest.mark.parametrize("way", ["users", "texts", "public"])
def test_it_learns_and_says_what_it_promises(way: str) -> None:
    command = [sys.executable, PROGRAM, "--way", way, "--users", "100", "--epochs", "2", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()[-2:]
    before, after = map(float, first.split("perplexity ")[1].split(" in ")[0].split(" → "))
    assert after < before
    promise = "ε ≤ 8 at δ = 0.001 (zero out one user; sampling: none; exact Gaussian mechanism)"
    assert last == ("no privacy: ε = ∞" if way == "public" else f"for a user with at most 8 texts: {promise}")
