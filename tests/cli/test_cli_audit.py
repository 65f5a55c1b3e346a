"""`fedcgd audit`: verdicts by exit code, of the installation's own noise and of canaries in a file."""

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import run

from fedcgd.accounting.guarantee import ADJACENCY

CLAIM = ["--epsilon", "2", "--delta", "1e-5"]
RUN = [*CLAIM, "--mechanism", "lambda-cgd:0.8", "--rounds", "12", "--separation", "4"]


def invoke(words: list[str]):
    return run("audit", *words)


def test_the_noise_of_this_installation_passes() -> None:
    result = invoke([*RUN, "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["passed"] is True
    assert found["claimed_epsilon"] == 2
    assert 1.8 < found["epsilon_lower"] < 2
    assert (found["adjacency"], found["sampling"]) == (ADJACENCY, "none")


def test_too_small_a_noise_multiplier_exits_with_1() -> None:
    """1.9938, the σ of ε = 2, times √(2.7646 + 2.6996 + 2.3117), the norms of columns 0, 4, 8 as if they did not overlap."""
    result = invoke([*RUN, "--noise-multiplier", "5.56"])
    assert result.exit_code == 1
    assert "REFUTED" in result.stdout
    assert result.stderr


def test_a_secret_sampling_is_audited_for_who_knows_the_rounds() -> None:
    found = json.loads(invoke([*RUN, "--sampling", "balls-in-bins", "--json"]).stdout)
    assert found["passed"] is True
    assert found["sampling"].startswith("none: ")
    assert found["claimed_epsilon"] > found["epsilon_lower"] > 0.85 * found["claimed_epsilon"]


@pytest.mark.parametrize(("noise", "exit_code"), [("1.69", 0), ("1.4", 1)])
def test_coins_are_audited_beside_the_noise(noise: str, exit_code: int) -> None:
    """σ = 1.68431 has ε = 2 at δ = .1 with these coins, as `fedcgd account` says. Of the noise σ itself is what is claimed."""
    words = ["--epsilon", "2", "--delta", ".1", "--mechanism", "lambda-cgd:0.8", "--rounds", "10", "--separation", "4"]
    words += ["--sampling", "b-min-sep", "--participations", "2", "--noise-multiplier", noise, "--trials", "100000"]
    result = invoke([*words, "--json"])
    assert result.exit_code == exit_code
    found = json.loads(result.stdout)
    assert found["passed"] is True
    coins = found["with_coins"]
    assert (coins["claimed_epsilon"], coins["passed"]) == (2, exit_code == 0)


@pytest.mark.parametrize(("gap", "exit_code"), [(0.1, 0), (8.0, 1)])
def test_scores_of_canaries(tmp_path: Path, gap: float, exit_code: int) -> None:
    rng = np.random.default_rng(0)
    file = tmp_path / "scores.json"
    file.write_text(
        json.dumps({"included": (gap + rng.normal(size=300)).tolist(), "held_out": rng.normal(size=310).tolist()})
    )
    result = invoke([*CLAIM, "--scores", str(file), "--json"])
    assert result.exit_code == exit_code
    assert json.loads(result.stdout)["trials"] == 610
