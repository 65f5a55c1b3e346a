"""Without torch, matplotlib and the frameworks: the library, the command line, and Flower with a NumPy model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "helpers" / "without_extras.py"
# These compute with torch, or wrap Opacus. Whatever is not below one of them works without.
NEED_TORCH = (
    "fedcgd.central.batches",
    "fedcgd.central.gradients",
    "fedcgd.central.ranks",
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
    "fedcgd.clipping.gpu_code",
    "fedcgd.noise.gpu_code",
    "fedcgd.noise.tensors",
    "fedcgd.opacus.",
    "fedcgd.release.tensors",
    "fedcgd_flower.torch_models",
)


SYSTEMS: tuple[dict[str, str], ...] = ({}, {"WINDOWS": "1"})
"""This one, and one without what Windows lacks."""


def program(*words: object, text: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(PROGRAM), *map(str, words)]
    environment = os.environ | variables
    return subprocess.run(
        command, input=text, env=environment, capture_output=True, text=True, check=False, timeout=250
    )


def test_only_what_computes_with_torch_needs_it() -> None:
    found = program("modules")
    assert found.returncode == 0, found.stderr
    needy = found.stdout.split()
    assert [name for name in needy if not name.startswith(NEED_TORCH)] == []
    for name in NEED_TORCH:
        assert any(one.startswith(name) for one in needy), f"{name} needs no torch any more"


def test_what_windows_lacks_is_needed_by_nothing() -> None:
    found = program("modules", WINDOWS="1", HIDDEN="")
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == []


@pytest.mark.parametrize("system", SYSTEMS, ids=["here", "windows"])
def test_a_server_and_a_node_run_and_their_ledger_is_verified_and_reported(
    tmp_path: Path, system: dict[str, str]
) -> None:
    ran = program("run", tmp_path / "run.db", **system)
    assert ran.returncode == 0, ran.stderr
    verified = program("cli", "ledger", "verify", tmp_path / "run.db", **system)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "ε of the whole run: at most 8" in " ".join(verified.stdout.split())
    for name in ("statement.md", "statement.json"):
        reported = program("cli", "report", tmp_path / "run.db", "-o", tmp_path / name, **system)
        assert reported.returncode == 0, reported.stdout + reported.stderr
        assert "numpy" in (tmp_path / name).read_text()
        assert "torch" not in (tmp_path / name).read_text()


def test_balls_in_bins_are_drawn_where_a_process_cannot_ask_for_its_processors() -> None:
    words = "--mechanism lambda-cgd:0.5 --rounds 20 --separation 10 --sampling balls-in-bins --epsilon 4 --delta 1e-5"
    found = program("cli", "account", *words.split(), WINDOWS="1")
    assert found.returncode == 0, found.stderr


def readme_blocks() -> list[tuple[str, str]]:
    """(what the section says to install, a block of Python in it) of the README."""
    sections = re.split(r"^## ", (Path(__file__).parents[2] / "README.md").read_text(), flags=re.MULTILINE)
    found = []
    for section in sections:
        install = re.search(r"`pip install ([^`]+)`", section)
        blocks = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        found += [(install[1] if install else "", block) for block in blocks]
    return found


HIDDEN = {"torch": "torch", "matplotlib": "plots", "opacus": "opacus", "ray": "simulation", "sklearn": "simulation"}
HIDDEN |= {"flwr": "flower", "transformers": "nlp", "triton": "gpu"}


@pytest.mark.parametrize(("install", "block"), readme_blocks(), ids=lambda value: value.partition("\n")[0])
def test_a_block_of_the_readme_runs_with_what_its_section_says_to_install(install: str, block: str) -> None:
    brought = {"opacus": {"torch"}}
    extras = re.findall(r"\[(\w+)\]", install)
    there = {name for extra in extras for name in {extra} | brought.get(extra, set())}
    named = {"sklearn"} if "scikit-learn" in install.split() else set()
    hidden = {package for package, extra in HIDDEN.items() if extra not in there and package not in named}
    ran = program("block", text=block, HIDDEN=" ".join(hidden))
    assert ran.returncode == 0, ran.stderr


def test_the_readme_says_what_its_blocks_need() -> None:
    said = ["", '".[flower]"', '".[opacus]" scikit-learn', '".[torch]" scikit-learn']
    assert sorted(install for install, _ in readme_blocks()) == said


def test_a_mechanism_is_optimised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCGD_CACHE", str(tmp_path))
    words = "--mechanism band-mf:4 --rounds 40 --separation 8 --epsilon 2 --delta 1e-5"
    found = program("cli", "account", *words.split())
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    ("package", "name", "extra"),
    [
        ("fedcgd.opacus", "CorrelatedPrivacyEngine", "torch"),
        ("fedcgd.central", "PrivateGradient", "torch"),
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
