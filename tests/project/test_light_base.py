"""Without torch, matplotlib and the frameworks: the library, the command line, and Flower with a NumPy model."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "helpers" / "without_extras.py"
# These compute with torch, or wrap Opacus. Whatever is not below one of them works without.
NEED_TORCH = (
    "fedcgd.central.examples",
    "fedcgd.central.gradients",
    "fedcgd.central.releases",
    "fedcgd.central.step",
    "fedcgd.clipping.flat_models",
    "fedcgd.clipping.layerwise",
    "fedcgd.clipping.per_sample_gradients",
    "fedcgd.curvature.dominance",
    "fedcgd.curvature.hessian",
    "fedcgd.curvature.lanczos",
    "fedcgd.curvature.measure",
    "fedcgd.curvature.public",
    "fedcgd.noise.gpu_code",
    "fedcgd.noise.tensors",
    "fedcgd.opacus.",
    "fedcgd.release.tensors",
    "fedcgd_flower.gradient_step",
    "fedcgd_flower.torch_models",
)


def program(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(PROGRAM), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)


def test_only_what_computes_with_torch_needs_it() -> None:
    found = program("modules")
    assert found.returncode == 0, found.stderr
    needy = found.stdout.split()
    assert [name for name in needy if not name.startswith(NEED_TORCH)] == []
    for name in NEED_TORCH:
        assert any(one.startswith(name) for one in needy), f"{name} needs no torch any more"


def test_a_server_and_a_node_run_and_their_ledger_verifies(tmp_path: Path) -> None:
    ran = program("run", tmp_path / "run.db")
    assert ran.returncode == 0, ran.stderr
    verified = program("cli", "ledger", "verify", tmp_path / "run.db")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "ε ≤ 8" in " ".join(verified.stdout.split())


def test_a_mechanism_is_optimised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCGD_CACHE", str(tmp_path))
    words = "--mechanism band-mf:4 --rounds 40 --separation 8 --epsilon 2 --delta 1e-5"
    found = program("cli", "calibrate", *words.split())
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    ("package", "name", "extra"),
    [
        ("fedcgd.opacus", "CorrelatedPrivacyEngine", "torch"),
        ("fedcgd.clipping", "example_loss", "torch"),
        ("fedcgd_flower", "one_gradient_step", "torch"),
    ],
)
def test_what_is_missing_names_its_extra(package: str, name: str, extra: str) -> None:
    refused = program("name", package, name)
    assert refused.returncode == 1
    assert (
        f'{package}.{name}: this needs the package {extra}, which is not installed: pip install "fedcgd[{extra}]"'
        in refused.stderr
    )


def test_a_plot_names_its_extra(tmp_path: Path) -> None:
    words = f"compare --rounds 10 --participations 1 --separation 10 --epsilon 2 --delta 1e-5 --plot {tmp_path}/x.png"
    refused = program("cli", *words.split())
    assert refused.returncode not in (0, 1)
    assert 'pip install "fedcgd[plots]"' in " ".join((refused.stdout + refused.stderr).split())
