"""What the app says of a run in one line."""

import pytest

from fedcgd_flower.round import RoundReport
from fedcgd_simulations.report import summary

RUN = {
    "label": "bsr:4", "task": "digits", "accuracy": [0.1, 0.8123], "releases": 40, "epsilon": 0.99641, "delta": 1e-5,
    "adjacency": "zero out one user", "sampling": "random-allocation", "method": "Monte Carlo", "seed": 3, "private": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("private", "end"), [(True, ""), (False, "; the noise is that of seed 3: nothing here is private")]
)
def test_epsilon_is_said_with_all_it_rests_on_and_rounded_up(private: bool, end: str) -> None:
    assert summary(RUN | {"private": private}) == (
        "bsr:4 on digits: test accuracy 0.8123 after 40 rounds; ε ≤ 0.9965 at δ = 1e-05 (adjacency: zero out one user; "
        "sampling: random-allocation; Monte Carlo)" + end
    )


def test_the_line_of_a_round_rounds_epsilon_up() -> None:
    report = RoundReport(round=0, rounds=40)
    report.add_epsilon(0.70131, 1e-5)
    assert "0.7014" in str(report)
