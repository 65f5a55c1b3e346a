"""What a sampling does not cover is refused with the value, the limit and remedies that help whoever follows them."""

import re

import pytest
from sampling_table import ROUNDS, SAMPLINGS

from fedcgd import Participation, Plan
from fedcgd.accounting import accountant
from fedcgd.accounting.coverage import NegativeEntryError
from fedcgd.accounting.selection import select_mechanism
from fedcgd.mechanisms import BandedToeplitz, matrix
from fedcgd.optimisation.catalogue import mechanism

BUDGET = {"epsilon": 8.0, "delta": 1e-2}
LIMITED = {"poisson": 1, "cyclic-poisson": 2, "random-allocation": 3}
"""The most bands that C may have in the row of the table of samplings."""
GIVEN = ["lambda-cgd:0.6", "lambda-cgd:0.6:normalized", "lambda-mu:0.6:0.3", "bisr:4", "bifr:4:0.7", "band-inv-mf:4"]
GIVEN += ["bsr:4", "banded-toeplitz:4", "blt:2", "toeplitz", "nu-dp-ftrl:0.3", "tree"]
OPEN = ["lambda-cgd", "lambda-mu", "lambda-mu:0.6", "bisr", "bifr", "bifr:4", "band-inv-mf"]
BANDED = ["bsr", "banded-toeplitz", "band-mf"]


def refused(spelling: str, participation: Participation) -> str:
    with pytest.raises(ValueError, match=r"Use |write ") as told:
        Plan.calibrated(spelling, participation, clip_norm=1.0, **BUDGET)
    return str(told.value)


def follow(message: str, participation: Participation, spelling: str | None = None) -> None:
    """Do each thing that the message says one can use."""
    said = re.search(r"Use (.+?), or sampling none", message)
    assert said, message
    for remedy in re.split(", | or ", said[1]):
        accountant(mechanism(remedy, participation), participation).check()
    if spelling is None:
        return
    known = Participation(rounds=participation.rounds, min_separation=participation.spacing)
    made = mechanism(spelling, known)
    accountant(made, known).check()
    if matrix(made, ROUNDS).min() >= 0:
        assert "balls-in-bins or b-min-sep, which cover every C without negative entries" in message
        for sampling in ("balls-in-bins", "b-min-sep"):
            accountant(made, SAMPLINGS[sampling][0]).check()


@pytest.mark.parametrize("sampling", LIMITED)
@pytest.mark.parametrize("spelling", GIVEN)
def test_too_many_bands_are_refused_with_remedies_that_help(spelling: str, sampling: str) -> None:
    participation, _ = SAMPLINGS[sampling]
    message = refused(spelling, participation)
    assert ("one band" if LIMITED[sampling] == 1 else f"{LIMITED[sampling]} bands") in message
    made = mechanism(spelling, participation)
    assert f"{made.name} has {made.bandwidth(ROUNDS)}" in message
    follow(message, participation, spelling)


@pytest.mark.parametrize(("spelling", "bands"), [("bisr:4", 4), ("bifr:4:0.7", 4), ("lambda-mu:0.6:0.3", 3)])
def test_bands_of_the_inverse_are_told_from_those_of_c(spelling: str, bands: int) -> None:
    """Whoever writes bisr:4 means the 4 bands of C⁻¹, and C has as many as there are rounds."""
    participation, _ = SAMPLINGS["cyclic-poisson"]
    assert f"has {bands})" in refused(spelling, participation)


@pytest.mark.parametrize("sampling", LIMITED)
@pytest.mark.parametrize("spelling", OPEN)
def test_there_is_no_number_to_choose_where_only_dp_sgd_is_covered(spelling: str, sampling: str) -> None:
    participation, _ = SAMPLINGS[sampling]
    message = refused(spelling, participation)
    assert message.startswith("there is no ")
    assert f"{sampling} sampling" in message
    follow(message, participation)


@pytest.mark.parametrize("spelling", BANDED)
def test_open_bands_are_chosen_where_more_than_one_is_covered(spelling: str) -> None:
    assert refused(spelling, SAMPLINGS["poisson"][0]).startswith("there is no p of ")
    participation, _ = SAMPLINGS["cyclic-poisson"]
    accountant(select_mechanism(spelling, participation, **BUDGET), participation).check()


def test_negative_entries_are_refused_with_remedies_that_help() -> None:
    participation, _ = SAMPLINGS["balls-in-bins"]
    message = refused("band-inv-mf:4", participation)
    assert "is -" in message
    assert message.endswith("Use sampling none, or a mechanism without negative entries, such as bsr")
    accountant(mechanism("band-inv-mf:4", participation), SAMPLINGS["none"][0]).check()
    accountant(mechanism("bsr:2", participation), participation).check()


@pytest.mark.parametrize("sampling", ["balls-in-bins", "b-min-sep"])
def test_entries_that_are_negative_by_rounding_alone_are_accounted_for(sampling: str) -> None:
    """As an optimiser leaves them where the least error lies at an entry of 0: here one is written down."""
    participation, _ = SAMPLINGS[sampling]
    made = BandedToeplitz((1.0, 0.5, -1e-15, 0.25))
    assert matrix(made, participation.rounds).min() == -1e-15
    accountant(made, participation).check()
    with pytest.raises(NegativeEntryError):
        accountant(BandedToeplitz((1.0, 0.5, -1e-9, 0.25)), participation).check()


def test_bands_beyond_a_turn_are_refused_with_remedies_that_help() -> None:
    participation, _ = SAMPLINGS["none"]
    message = refused("band-mf:4", participation)
    assert message.startswith(
        "p of band-mf must be between 1 and 3, the rounds between two participations of a user, got 4"
    )
    assert "band-mf:3," in message
    for remedy in ("band-mf:3", "banded-toeplitz:4"):
        accountant(mechanism(remedy, participation), participation).check()
