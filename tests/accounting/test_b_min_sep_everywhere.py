"""b-min-sep from the command line to the ledger and the batches of Opacus: what is asked for, said and drawn
is what is accounted for.
"""

import json

import pytest
from command_line import run

from fedcgd import BSR, Participation, Plan, compute_epsilon

WHEN = ["--rounds", "12", "--separation", "3", "--delta", "1e-3", "--sampling", "b-min-sep"]


def test_from_the_command_line(few_draws: None) -> None:
    """--participations is the expected number: 3 of 12 rounds are p = 1/(4 − 3 + 1)."""
    found = run("account", "--mechanism", "bsr:2", *WHEN, "--participations", "3", "--noise-multiplier", "2", "--json")
    assert found.exit_code == 0, found.output
    values = json.loads(found.stdout)
    participation = Participation(rounds=12, min_separation=3, sampling="b-min-sep", sampling_rate=1 / 2)
    assert values["sampling_rate"] == 1 / 2
    assert "warm_start" not in values
    assert values["epsilon"] == compute_epsilon(BSR(2), participation, noise_multiplier=2.0, delta=1e-3).epsilon
    words = ("account", "--mechanism", "bsr:2", *WHEN, "--sampling-rate", "1/2", "--noise-multiplier", "2")
    assert "probability p" in run(*words).output
    cold = json.loads(run(*words, "--cold-start", "--json").stdout)
    assert cold["warm_start"] is False
    assert cold["epsilon"] > values["epsilon"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--participations", "5"], "participations must be in 1 … 4, the rounds that fit 3 apart; got 5"),
        ([], "needs --sampling-rate"),
    ],
)
def test_what_is_refused(words: list[str], message: str) -> None:
    found = run("account", "--mechanism", "bsr:4", *WHEN, *words, "--noise-multiplier", "2")
    assert found.exit_code == 2
    assert message in " ".join(found.output.split())


def test_cold_start_is_for_b_min_sep_alone() -> None:
    with pytest.raises(ValueError, match="warm_start=False"):
        Participation(rounds=4, warm_start=False)
    words = "account --mechanism dp-sgd --rounds 4 --noise-multiplier 2 --delta 1e-4 --cold-start"
    found = run(*words.split())
    assert found.exit_code == 2
    assert "warm_start=False" in found.output


@pytest.mark.parametrize("warm", [True, False])
def test_a_plan_is_the_same_after_it_was_written_down(warm: bool) -> None:
    """And records of other samplings have no further entry."""
    participation = Participation(
        rounds=12, min_separation=3, sampling="b-min-sep", sampling_rate=0.25, warm_start=warm
    )
    plan = Plan(mechanism=BSR(2), participation=participation, clip_norm=1.0, noise_multiplier=2.0, delta=1e-5)
    described = json.loads(json.dumps(plan.to_description()))
    assert Plan.from_description(described) == plan
    assert ("warm_start" in described["participation"]) is not warm
    assert ("all free" in str(participation)) is not warm
