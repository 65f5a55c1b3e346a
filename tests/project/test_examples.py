"""The examples that are one file each run as printed, and the one from scratch is the library's mechanism."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedcgd import LambdaCGD, Participation, Plan

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_from_scratch_has_the_noise_of_the_library() -> None:
    scratch = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "lambda_cgd_from_scratch.py")))
    participation = Participation(rounds=scratch.ROUNDS, min_separation=scratch.SEPARATION)
    for lam in (0.0, 0.8):
        plan = Plan.calibrated(LambdaCGD(lam), participation, clip_norm=1.0, epsilon=4.0, delta=1e-5)
        sigma = scratch.gaussian_sigma(4.0, 1e-5) * scratch.sensitivity(lam)
        assert sigma == pytest.approx(plan.noise_multiplier, rel=1e-6)
    rows = scratch.clipped(np.random.default_rng(0).normal(size=(50, 640)), 1.0)
    assert np.linalg.norm(rows, axis=1).max() <= 1 + 1e-12


@pytest.mark.parametrize("name", ["lambda_cgd_from_scratch", "opacus_training"])
def test_it_runs_and_learns_something(name: str) -> None:
    done = subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    accuracies = [float(x) for x in re.findall(r"test accuracy (\d\.\d+)", done.stdout)]
    assert accuracies[-1] > 0.75
    if name == "lambda_cgd_from_scratch":
        independent, correlated = accuracies
        assert correlated > independent + 0.03
    else:
        assert "ε ≤" in done.stdout


@pytest.mark.slow
def test_the_example_of_several_processes_goes_on_in_another_number_of_them(tmp_path: Path) -> None:
    def run(processes: int) -> str:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        program = [str(EXAMPLES / "opacus_distributed.py"), "--folder", str(tmp_path)]
        done = subprocess.run([*launch, *program], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout

    printed = run(2)
    assert float(re.findall(r"test accuracy (\d\.\d+)", printed)[-1]) > 0.75
    assert "epoch 10" in printed
    assert "ε ≤" in printed
    again = run(1)  # all epochs are in the checkpoint
    assert "epoch" not in again
    assert "ε ≤" in again
