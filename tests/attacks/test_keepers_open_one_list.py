"""A lying server: two lists, leaving a node out, replays, larger norms, old records. Nothing opens but one noised sum a round."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import keeper_openings
import numpy as np
import pytest
from keeper_openings import PLAN, SIZE, agreement_of, opening_for, updates
from scipy import stats

from fedcgd import NoiseKey
from fedcgd.keepers import Agreement, Keeper, KeeperKey, Keepers, RefusedError, add, lifted, mask
from fedcgd.keepers.keeper import UnreadableError
from fedcgd.keepers.record import Record


def simulated(**options) -> tuple[Keepers, list[Keeper], Agreement]:
    keepers, members = keeper_openings.simulated(**options)
    return keepers, members, agreement_of(keepers)


def is_uniform(residues: np.ndarray) -> bool:
    """Whether no byte of the residues has another frequency than the others, at level 1e-6."""
    counts = np.bincount(np.ascontiguousarray(residues).view(np.uint8), minlength=256)
    return stats.chisquare(counts).pvalue > 1e-6


def test_two_lists_give_two_keepers_answers_that_fit_nothing() -> None:
    """Keeper 0 is told nodes a, b, c, the others a and b: every combination that the server can form stays masked."""
    keepers, members, _ = simulated()
    agreement = agreement_of(keepers, size=40_000)
    sent = [mask(v, agreement, round=0, attempt=0, present=keepers.names) for v in updates(3, size=agreement.size)]
    answers = [members[0].answer(agreement, opening_for(members[0], sent))]
    answers += [keeper.answer(agreement, opening_for(keeper, sent[:2])) for keeper in members[1:]]
    for nodes in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
        total = sum((sent[i].residues for i in nodes), start=sum(answers, start=np.uint32(0)))
        assert is_uniform(total)
    for answer in answers:
        assert is_uniform(answer)


def test_other_seeds_for_the_tickets_of_an_opened_list_open_nothing() -> None:
    """Anybody can seal to a card. A second answer, with the server's own seed in the place of a node's, would tell its mask."""
    keepers, (keeper, *_), agreement = simulated()
    sent = [mask(v, agreement, round=0, attempt=0, present=keepers.names) for v in updates(3)]
    opening = opening_for(keeper, sent)
    answer = keeper.answer(agreement, opening)
    info = agreement.info(0, 0, keepers.names) + sent[0].ticket
    forged = replace(opening, sealed=(keepers.cards[0].seal(b"s" * 32, info), *opening.sealed[1:]))
    with Keeper.simulation(keepers, 0) as fresh:  # with the same key
        assert fresh.unreadable(agreement, forged) == ()  # it can be read: the record is what must tell
    for ask in (keeper.unreadable, keeper.answer):
        with pytest.raises(RefusedError, match="opened already"):
            ask(agreement, forged)
    swapped = replace(opening, tickets=opening.tickets[::-1], sealed=opening.sealed[::-1])
    np.testing.assert_array_equal(keeper.answer(agreement, swapped), answer)  # the same list in another order


LIES = {
    "round": ({}, {"round": 1}),
    "attempt": ({}, {"attempt": 1}),
    "present": ({}, {"present": ("simulated-00", "simulated-01", "simulated-02")}),
    "run": ({"run": "another"}, {}),
    "size": ({"size": SIZE + 1}, {}),
    "bits": ({"bits": 64}, {}),
    # Nodes are told to clip at 1, and keepers make noise for a tenth of it.
    "clip norm": ({"plan": replace(PLAN, clip_norm=0.1)}, {}),
    "noise": ({"plan": replace(PLAN, noise_multiplier=0.5)}, {}),
    # Keepers are told that fewer collude, and make less noise.
    "keepers": ({"keepers": Keepers.simulation(7, 4, colluding=0, away=1, nodes=1)}, {}),
}


@pytest.mark.parametrize("lie", LIES)
def test_masks_of_one_request_open_in_no_other(lie: str) -> None:
    """Whoever disagrees on any of it, the node or the keeper, opens nothing."""
    keepers, (keeper, *_), _ = simulated(count=4, colluding=1, away=1)
    agreement = agreement_of(keepers, run="run")
    sent = [mask(v, agreement, round=0, attempt=0, present=keepers.names) for v in updates(2)]
    good, (agreed, asked) = opening_for(keeper, sent), LIES[lie]
    with pytest.raises(UnreadableError) as refused:
        keeper.answer(replace(agreement, **agreed), replace(good, **asked))
    assert refused.value.positions == (0, 1)
    assert len(keeper.answer(agreement, good)) == SIZE  # nothing was recorded of it


def test_a_seed_cannot_be_used_twice_in_a_list() -> None:
    """It would count its node's mask twice, and open twice the update under noise for one."""
    keepers, members, agreement = simulated()
    sent = [mask(v, agreement, round=0, attempt=0, present=keepers.names) for v in updates(2)]
    good = opening_for(members[0], sent)
    twice = replace(good, tickets=good.tickets + good.tickets[:1], sealed=good.sealed + good.sealed[:1])
    with pytest.raises(RefusedError, match="is twice"):
        members[0].answer(agreement, twice)
    renamed = replace(twice, tickets=(*good.tickets, b"0" * 16))  # the seed is bound to its ticket
    with pytest.raises(UnreadableError):
        members[0].answer(agreement, renamed)
    # A node that colludes seals one seed under two tickets.
    info = agreement.info(0, 0, keepers.names)
    tickets = (b"1" * 16, b"2" * 16)
    sealed = tuple(members[0].card.seal(b"s" * 32, info + ticket) for ticket in tickets)
    other = (members[0].card.seal(b"t" * 32, info + tickets[0]), sealed[0])
    with pytest.raises(RefusedError, match="its tickets"):
        members[0].answer(agreement, replace(good, tickets=tickets[:1] * 2, sealed=other))
    honest = mask(updates(1)[0], agreement, round=0, attempt=0, present=keepers.names)
    named = replace(
        good,
        tickets=(tickets[0], honest.ticket, tickets[1]),
        sealed=(sealed[0], honest.sealed[keepers.names[0]], sealed[1]),
    )
    assert members[0].unreadable(agreement, named) == (0, 2)  # before anything is opened
    with pytest.raises(UnreadableError, match="sealed the") as refused:
        members[0].answer(agreement, named)
    assert refused.value.positions == (0, 2)


def test_noise_is_bound_to_the_list_whatever_becomes_of_random_numbers(monkeypatch, tmp_path: Path) -> None:
    """Two copies of a keeper with the same random numbers, asked for two lists, answer with two noises, not with one twice."""
    key = KeeperKey(NoiseKey.generate())
    keepers = Keepers(cards=(key.card("notary"),), colluding=0)
    agreement = agreement_of(keepers)
    lists = [[mask(v, agreement, round=0, attempt=0, present=("notary",)) for v in updates(n)] for n in (2, 3)]
    monkeypatch.setattr("os.urandom", lambda size: bytes(size))
    shares = []
    for number, sent in enumerate(lists):
        total = np.zeros(SIZE, np.uint32)
        for one in sent:
            add(total, one.residues)
        with Keeper(key, Record.open(tmp_path / f"copy-{number}", "f"), keepers.cards[0]) as keeper:
            add(total, keeper.answer(agreement, opening_for(keeper, sent)))
        shares.append(lifted(total) - np.sum(updates(len(sent)), axis=0))
    assert abs(np.corrcoef(*shares)[0, 1]) < 0.3
    assert not np.array_equal(*shares)


def test_no_two_masks_have_one_seed() -> None:
    """One seed for all keepers passes every sum and every test of uniformity, and any keeper alone opens each node."""
    keepers, _, agreement = simulated()
    keys = {keepers.card_of(key).name: key for key in (KeeperKey.simulation(7, number) for number in range(3))}
    seeds, tickets = [], []
    for round, attempt, _node in product(range(2), repeat=3):
        sent = mask(np.zeros(SIZE, np.int64), agreement, round=round, attempt=attempt, present=keepers.names)
        info = agreement.info(round, attempt, keepers.names) + sent.ticket
        seeds += [keys[name].open(sealed, info) for name, sealed in sent.sealed.items()]
        tickets.append(sent.ticket)
    assert len(set(seeds)) == len(seeds) == 3 * 8
    assert len(set(tickets)) == 8
