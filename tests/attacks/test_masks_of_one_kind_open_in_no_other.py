"""A lying server that mixes up training and evaluation: a sum of one kind opens as that kind, once, under noise of its own."""

from dataclasses import replace

import numpy as np
import pytest
from keeper_openings import PLAN, SIZE, agreement_of, opening_for, updates

from fedcgd.keepers import (
    EVALUATION,
    TRAINING,
    Agreement,
    Keeper,
    Keepers,
    NodeParticipations,
    RefusedError,
    lifted,
    mask,
)
from fedcgd.keepers.agreement import Sums
from fedcgd.keepers.keeper import UnreadableError, list_hash
from fedcgd.keepers.masks import residues_of, subtract_masks
from fedcgd.keepers.wire import from_bytes, to_bytes

KEEPERS = Keepers.simulation(7, 3, colluding=1, nodes=1)


def both(keepers: Keepers = KEEPERS, *, size: int = SIZE, **other) -> dict[str, Agreement]:
    """A run whose two kinds are the same but for their names, so that nothing else can tell them apart."""
    alone = agreement_of(keepers, size=size)
    sums = {"plan": alone.plan, "size": alone.size, "bits": alone.bits} | other
    training = replace(alone, other=Sums(**sums))
    return {TRAINING: training, EVALUATION: training.of(EVALUATION)}


@pytest.mark.parametrize(("sealed", "asked"), [(TRAINING, EVALUATION), (EVALUATION, TRAINING)])
def test_what_was_masked_for_one_kind_is_unreadable_as_the_other(sealed: str, asked: str) -> None:
    agreements, keeper = both(), Keeper.simulation(KEEPERS, 0)
    sent = [mask(v, agreements[sealed], round=0, attempt=0, present=KEEPERS.names) for v in updates(2)]
    opening = opening_for(keeper, sent)
    for told in (agreements[asked], from_bytes(to_bytes(agreements[asked], opening), KEEPERS)[0]):
        with pytest.raises(UnreadableError) as refused:
            keeper.answer(told, opening)
        assert refused.value.positions == (0, 1)
    assert len(keeper.answer(agreements[sealed], opening)) == SIZE  # nothing was recorded of the other
    assert list_hash(agreements[sealed], opening) != list_hash(agreements[asked], opening)


@pytest.mark.parametrize(("first", "second"), [(TRAINING, EVALUATION), (EVALUATION, TRAINING)])
def test_an_opening_is_replayed_as_no_other_kind_and_a_second_list_of_neither_opens(first: str, second: str) -> None:
    agreements, keeper = both(), Keeper.simulation(KEEPERS, 0)
    sent = {
        kind: [mask(v, agreements[kind], round=0, attempt=0, present=KEEPERS.names) for v in updates(3)]
        for kind in agreements
    }
    done = keeper.answer(agreements[first], opening_for(keeper, sent[first]))
    with pytest.raises(UnreadableError):
        keeper.answer(agreements[second], opening_for(keeper, sent[first]))
    keeper.answer(agreements[second], opening_for(keeper, sent[second]))  # a round of its own
    for kind in agreements:
        with pytest.raises(RefusedError, match="another request"):
            keeper.answer(agreements[kind], opening_for(keeper, sent[kind][1:]))
    np.testing.assert_array_equal(keeper.answer(agreements[first], opening_for(keeper, sent[first])), done)


def share(keeper: Keeper, agreement: Agreement, round: int = 0, after: int | None = None) -> np.ndarray:
    """What a keeper adds to a sum of zeros in this round."""
    [sent] = [
        mask(np.zeros(agreement.size, np.int64), agreement, round=round, attempt=0, present=agreement.keepers.names)
    ]
    total = keeper.answer(agreement, opening_for(keeper, [sent], round, after=after))
    info = agreement.info(round, 0, agreement.keepers.names) + sent.ticket
    negative = residues_of(np.zeros(agreement.size, np.int64), agreement.bits)
    subtract_masks(negative, [keeper._key.open(sent.sealed[keeper.card.name], info)])
    return lifted(total - negative)


def test_the_two_kinds_share_no_noise_and_a_share_cancels_only_what_was_shown_in_its_own_kind() -> None:
    """Simulated keepers number their noise by the try alone: only the streams tell the kinds apart."""
    agreements, keeper = both(size=20_000), Keeper.simulation(KEEPERS, 0)
    earlier = share(keeper, agreements[TRAINING])
    with pytest.raises(RefusedError, match="evaluation round"):
        share(keeper, agreements[EVALUATION], 1, after=0)
    own = share(keeper, agreements[EVALUATION])
    assert abs(np.corrcoef(earlier, own)[0, 1]) < 0.05
    later = share(keeper, agreements[EVALUATION], 1, after=0)
    assert abs(np.corrcoef(earlier, later)[0, 1]) < 0.05
    assert np.corrcoef(own, later)[0, 1] == pytest.approx(-0.9 / np.sqrt(1.81), abs=0.03)


def test_a_kind_is_bound_to_the_run_that_a_key_serves_with_the_plans_of_both() -> None:
    """Evaluations under another plan, or in a run that was said to have none, are another run."""
    keeper, agreements = Keeper.simulation(KEEPERS, 0), both()
    share(keeper, agreements[TRAINING])
    for other in (both(plan=replace(PLAN, noise_multiplier=1.0)), both(bits=64)):
        assert other[EVALUATION].context == other[TRAINING].context
        with pytest.raises(RefusedError, match="served another"):
            share(keeper, other[EVALUATION])
    alone = Keeper.simulation(KEEPERS, 0)
    share(alone, agreement_of(KEEPERS))
    with pytest.raises(RefusedError, match="served another"):
        share(alone, agreements[EVALUATION])
    with pytest.raises(ValueError, match="kind 'evaluation'"):
        agreement_of(KEEPERS).of(EVALUATION)


def test_a_node_counts_the_turns_of_each_kind_by_its_own_plan() -> None:
    often = replace(PLAN, participation=replace(PLAN.participation, min_separation=2))
    agreements = both(plan=often)
    with NodeParticipations.open(":memory:") as turns:
        turns.count(agreements[TRAINING], 4, 0, ["ada"])
        turns.count(agreements[EVALUATION], 0, 0, ["ada"])  # the fourth round of training was not one of evaluation
        turns.count(agreements[EVALUATION], 2, 0, ["ada"])
        for kind, round in ((TRAINING, 6), (EVALUATION, 3)):
            with pytest.raises(RefusedError, match="rounds apart"):
                turns.count(agreements[kind], round, 0, ["ada"])
        with pytest.raises(RefusedError, match="2 already"):
            turns.count(agreements[EVALUATION], 2, 0, ["ada"])
        with pytest.raises(RefusedError, match="another run"):
            turns.count(both(plan=PLAN)[EVALUATION], 6, 0, ["ben"])
        turns.count(agreements[TRAINING], 7, 0, ["ada"])
        turns.count(agreements[EVALUATION], 7, 0, ["evaluation ada", "ada"])  # names are not mixed up with kinds


def test_the_keepers_limit_covers_both_kinds_together() -> None:
    epsilon = PLAN.guarantee().epsilon
    limited = replace(KEEPERS, epsilon=1.01 * epsilon, delta=PLAN.delta)
    assert agreement_of(limited)
    with pytest.raises(ValueError, match="evaluations together"):
        both(limited)
    cheap = both(limited, plan=replace(PLAN, noise_multiplier=100.0))
    described = cheap[EVALUATION].to_description()
    assert Agreement.from_description(described, limited, EVALUATION) == cheap[EVALUATION]
    described["evaluation"]["plan"] = PLAN.to_description()
    for kind in (TRAINING, EVALUATION):
        with pytest.raises(ValueError, match="together have"):
            Agreement.from_description(described, limited, kind)


def test_shares_of_the_evaluations_noise_too_small_to_be_rounded_one_by_one_are_refused() -> None:
    with pytest.raises(ValueError, match="the lattice"):
        both(plan=replace(PLAN, noise_multiplier=1e-4))
