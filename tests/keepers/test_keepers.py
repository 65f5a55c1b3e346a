"""Keepers: what opens is the sum with the planned noise, once, and only for parties that agree."""

import json
import os
import pickle
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keeper_openings import PLAN, SIZE, agreement_of, opening_for, simulated, updates
from plans import make_plan

from fedcgd import BISR, BSR, DPSGD, LambdaCGD, NoiseKey, Normalized, Participation
from fedcgd.keepers import Agreement, Card, Keeper, KeeperKey, Keepers, Opening, RefusedError, add, lifted, mask
from fedcgd.keepers.agreement import sums_of
from fedcgd.keepers.keeper import UnreadableError, share_terms
from fedcgd.keepers.masks import add_masks, residues_of, subtract_masks
from fedcgd.keepers.record import Record, read, record_file
from fedcgd.release import lattice_of


def opened_sum(keepers, agreement, members, values, *, round, attempt=0, present=None, after=None) -> np.ndarray:
    """What the server has in the end: Σ values + Σ shares of the keepers present, in steps."""
    present = present or keepers.names
    sent = [mask(v, agreement, round=round, attempt=attempt, present=present) for v in values]
    total = np.zeros(agreement.size, sent[0].residues.dtype)
    for one in sent:
        add(total, one.residues)
    for keeper in members:
        if keeper.card.name in present:
            earlier = after.get(keeper.card.name) if isinstance(after, dict) else after
            add(total, keeper.answer(agreement, opening_for(keeper, sent, round, attempt, present, earlier)))
    return lifted(total)


# What opens.


def test_the_noise_of_three_keepers_has_the_planned_covariance_over_rounds() -> None:
    """Σ_i (C⁻¹Z_i) of 3 shares of variance (ζσ)²/2: 1.5 times C⁻¹C⁻ᵀ, written out for λ = 0.9."""
    keepers, members = simulated()
    size = 40_000
    agreement = agreement_of(keepers, size=size)
    rows = []
    for round in range(4):
        zeros = [np.zeros(size, np.int64)] * 2
        noise = opened_sum(keepers, agreement, members, zeros, round=round, after=round - 1 if round else None)
        rows.append(noise * agreement.step / PLAN.stddev)
    found = np.cov(np.array(rows))
    expected = 1.5 * np.array([[1, -0.9, 0, 0], [-0.9, 1.81, -0.9, 0], [0, -0.9, 1.81, -0.9], [0, 0, -0.9, 1.81]])
    tolerance = 5 * 2.715 / np.sqrt(size / 2)  # five standard errors of the largest variance
    np.testing.assert_allclose(found, expected, atol=tolerance)
    assert np.abs(found - expected * 1.2).max() > tolerance  # a wrong scale is seen


def test_a_keeper_that_was_away_cancels_by_the_length_of_its_gap() -> None:
    """Present in rounds 0 and 3: Z_3 − 0.9³·Z_0; so the covariance is −0.729."""
    terms = share_terms(LambdaCGD(0.9), 12, 3, 5, [(0, 4)])
    assert terms == [(3, 5, 1.0), (0, 4, pytest.approx(-0.729))]
    assert share_terms(LambdaCGD(0.9), 12, 3, 5, [(2, 4)]) == [(3, 5, 1.0), (2, 4, -0.9)]
    assert share_terms(LambdaCGD(0.9), 12, 3, 5, []) == [(3, 5, 1.0)]
    assert share_terms(DPSGD(), 12, 3, 5, [(2, 4)]) == [(3, 5, 1.0)]
    # C's coefficients are 1, 1/2, 3/8, 1/4.
    terms = share_terms(BISR(3), 12, 3, 5, [(1, 4), (0, 3)])
    assert terms == [(3, 5, 1.0), (1, 4, pytest.approx(-3 / 8)), (0, 3, pytest.approx(-1 / 16))]
    norm = float(Normalized(LambdaCGD(0.5)).column_norms(4)[2])
    terms = share_terms(Normalized(LambdaCGD(0.5)), 4, 2, 5, [(0, 4)])
    assert terms == [(2, 5, pytest.approx(norm)), (0, 4, pytest.approx(-0.25 * norm))]


def test_rounds_go_on_without_the_keepers_that_may_be_away() -> None:
    keepers, members = simulated(4, 1, away=1)
    agreement = agreement_of(keepers)
    last: dict[str, int] = {}
    for round, missing in enumerate([None, 2, 2, None, 0]):
        present = tuple(name for i, name in enumerate(keepers.names) if i != missing)
        values = updates(3, round)
        found = opened_sum(keepers, agreement, members, values, round=round, present=present, after=last)
        last |= dict.fromkeys(present, round)
        noise = (found - np.sum(values, axis=0)) * agreement.step / PLAN.stddev
        # len(present) / (K − t − d) shares of variance 1.81 at most: none is left under a mask.
        assert 0.5 < noise.std() < 2 * np.sqrt(2 * 1.81)
    with pytest.raises(ValueError, match="4 keepers"):
        mask(values[0], agreement, round=5, attempt=0, present=keepers.names[:2])


@settings(derandomize=True, max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(-(2**27), 2**27), min_size=5, max_size=5), min_size=1, max_size=6), st.booleans())
def test_masked_sums_are_exact(rows: list[list[int]], wide: bool) -> None:
    values = [np.array(row, np.int64) for row in rows]
    bits = 64 if wide else 32
    seeds = [os.urandom(32) for _ in values]
    total = residues_of(np.zeros(5, np.int64), bits)
    for value, seed in zip(values, seeds, strict=True):
        masked = residues_of(value, bits)
        add_masks(masked, [seed])
        add(total, masked)
    subtract_masks(total, seeds)
    assert lifted(total).tolist() == [sum(column) for column in zip(*rows, strict=True)]


def test_a_mask_is_chacha20_of_its_seed_and_does_not_depend_on_how_it_is_cut() -> None:
    """RFC 8439, 2.3.2 is for another nonce; here key 0 and nonce 0: its first test vector of appendix A.1."""
    total = np.zeros(16, np.uint32)
    add_masks(total, [bytes(32)])
    expected = (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert total.astype("<u4").tobytes().hex() == expected
    long = np.zeros(200_001, np.uint32)
    add_masks(long, [bytes(32)])
    np.testing.assert_array_equal(long[:16], total)
    assert len(np.unique(long[: 2**17])) > 2**17 * 0.999  # no chunk is used again
    assert not np.intersect1d(long[: 2**16], long[2**16 : 2**17]).size > 10
    both = long.copy()
    add_masks(both, [b"1" * 32, b"2" * 32])
    for seed in (b"1" * 32, b"2" * 32):
        add_masks(long, [seed])
    np.testing.assert_array_equal(both, long)


# What is refused.


def test_the_same_request_again_gets_the_same_answer_and_another_none(tmp_path: Path) -> None:
    keepers = Keepers.simulation(7, 1, colluding=0)
    agreement = agreement_of(keepers)
    sent = [mask(v, agreement, round=2, attempt=0, present=keepers.names) for v in updates(3)]
    with Keeper.simulation(keepers, 0, tmp_path / "record") as keeper:
        first = keeper.answer(agreement, opening_for(keeper, sent, 2))
        np.testing.assert_array_equal(first, keeper.answer(agreement, opening_for(keeper, sent[::-1], 2)))
    with Keeper.simulation(keepers, 0, tmp_path / "record") as keeper:  # after a crash
        np.testing.assert_array_equal(first, keeper.answer(agreement, opening_for(keeper, sent, 2)))
        with pytest.raises(RefusedError, match="opened already"):
            keeper.answer(agreement, opening_for(keeper, sent[:2], 2))
    assert [opened.round for opened in read(tmp_path / "record").openings] == [2]


def test_what_a_keeper_cannot_open_it_names_and_does_not_record() -> None:
    keepers, members = simulated()
    agreement = agreement_of(keepers)
    sent = [mask(v, agreement, round=0, attempt=0, present=keepers.names) for v in updates(3)]
    good = opening_for(members[0], sent)
    bad = Opening(
        round=0,
        attempt=0,
        present=good.present,
        tickets=good.tickets,
        sealed=(good.sealed[0], good.sealed[1][:-1] + bytes([good.sealed[1][-1] ^ 1]), b""),
        after=None,
    )
    assert members[0].unreadable(agreement, bad) == (1, 2)
    with pytest.raises(UnreadableError) as refused:
        members[0].answer(agreement, bad)
    assert refused.value.positions == (1, 2)
    assert members[0].unreadable(agreement, good) == ()
    members[0].answer(agreement, good)


def test_a_keeper_refuses_what_is_no_request_of_its_run() -> None:
    keepers, members = simulated(3, 1, away=1)
    agreement = agreement_of(keepers)
    sent = [mask(v, agreement, round=0, attempt=0, present=keepers.names) for v in updates(2)]
    good = opening_for(members[0], sent)

    def refused(match: str, of: Agreement = agreement, **changes) -> None:
        with pytest.raises(RefusedError, match=match):
            members[0].answer(of, Opening(**{**vars(good), **changes}))

    refused("0 nodes are on the list", tickets=(), sealed=())
    refused("a node is twice", tickets=good.tickets[:1] * 2, sealed=good.sealed[:1] * 2)
    refused("has a ticket", tickets=good.tickets[:1])
    refused("is not one of the round's", present=keepers.names[1:])
    refused("a round needs 2 of 3", present=keepers.names[:1])
    refused("sorted names", present=keepers.names[::-1])
    refused("comes before it", after=0)
    refused("round must be in 0 … 11", round=12)
    refused("has no share of round 0", round=1, after=0, **_sealed(members[0], agreement, 1))
    other = Keepers.simulation(8, 3, colluding=1)
    refused("has another key", of=agreement_of(other))
    renamed = Keepers(cards=(members[1].card, Card("another", members[0].card.public_key)), colluding=0)
    refused("is none of this run's", of=agreement_of(renamed))
    members[0].answer(agreement, good)


def test_the_sum_of_fewer_nodes_than_agreed_is_not_opened() -> None:
    """The least is in everybody's file, so that a server cannot say another one; with 1 a node's own sum may be opened."""
    keepers = Keepers.simulation(7, 3, colluding=1)
    assert keepers.nodes == 2
    assert Keepers.from_toml(replace(keepers, nodes=5).to_toml()).nodes == 5
    assert replace(keepers, nodes=1).digest != keepers.digest
    agreement, keeper = agreement_of(keepers), Keeper.simulation(keepers, 0)
    sent = [mask(v, agreement, round=0, attempt=0, present=keepers.names) for v in updates(2)]
    for ask in (keeper.answer, keeper.unreadable):
        with pytest.raises(RefusedError, match="keepers' file"):
            ask(agreement, opening_for(keeper, sent[:1]))
    keeper.answer(agreement, opening_for(keeper, sent))
    for nodes in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="whole number"):
            replace(keepers, nodes=nodes)


def _sealed(keeper: Keeper, agreement: Agreement, round: int) -> dict[str, object]:
    sent = [mask(v, agreement, round=round, attempt=0, present=agreement.keepers.names) for v in updates(2)]
    opening = opening_for(keeper, sent, round)
    return {"tickets": opening.tickets, "sealed": opening.sealed}


@pytest.mark.parametrize(
    ("mechanism", "sampling", "noise", "message"),
    [
        (BSR(4), "none", 1.0, "nothing else is proven"),
        (LambdaCGD(0.9), "balls-in-bins", 1.0, "sampling 'none'"),
        (LambdaCGD(0.9), "none", 0.0, "this plan has none"),
    ],
)
def test_plans_that_keepers_cannot_serve_are_refused(mechanism, sampling, noise, message) -> None:
    plan = make_plan(mechanism, Participation(rounds=12, min_separation=3, sampling=sampling), noise_multiplier=noise)
    with pytest.raises(ValueError, match=message):
        agreement_of(Keepers.simulation(7, 3, colluding=1), plan)


def test_an_agreement_travels_and_another_is_told_apart() -> None:
    keepers = Keepers.simulation(7, 3, colluding=1)
    agreement = agreement_of(keepers, run="r")
    described = json.loads(json.dumps(agreement.to_description()))
    assert Agreement.from_description(described, keepers) == agreement
    with pytest.raises(ValueError, match="the same"):
        Agreement.from_description(described, Keepers.simulation(7, 3, colluding=2))
    with pytest.raises(ValueError, match="another version"):
        Agreement.from_description({**described, "protocol": "fedcgd keepers 0"}, keepers)
    for part in ({"protocol": described["protocol"]}, {}):
        with pytest.raises(ValueError, match="the agreement"):
            Agreement.from_description(part, keepers)
    for size in (0, 2**32 + 1):
        with pytest.raises(ValueError, match="size"):
            Agreement(**{**vars(agreement), "size": size})
    contexts = {agreement.context}
    for change in ({"size": 301}, {"bits": 64}, {"run": "s"}):
        contexts.add(Agreement(**{**vars(agreement), **change}).context)
    assert len(contexts) == 4


@pytest.mark.parametrize("factor", [2.0**-30, 0.5, 2.0, 2.0**10])
def test_no_party_works_on_another_lattice_than_the_plans(factor: float) -> None:
    """On a lattice as fine as 2⁴⁶ steps for each standard deviation, the noise would be coarser than the sums."""
    keepers = Keepers.simulation(7, 3, colluding=1)
    described = agreement_of(keepers).to_description()
    with pytest.raises(ValueError, match="another version"):
        Agreement.from_description(described | {"step": factor * described["step"]}, keepers)


@pytest.mark.parametrize("run", ["r\nround 1 of 210 opened for 60 nodes", "r" * 65, 7, None, "\x1b[2J"])
def test_a_run_is_named_by_a_word_so_that_a_server_writes_nothing_else_into_a_keepers_log(run) -> None:
    keepers = Keepers.simulation(7, 3, colluding=1)
    described = agreement_of(keepers).to_description() | {"run": run}
    with pytest.raises(ValueError, match="run"):
        Agreement.from_description(described, keepers)


# Keys, cards and the file that says who the keepers are.


def test_keepers_are_the_same_after_a_file(tmp_path: Path) -> None:
    cards = [KeeperKey.from_file(tmp_path / f"{name}.key", create=True).card(name) for name in ("court", "union")]
    keepers = Keepers(cards=tuple(cards), colluding=1)
    (tmp_path / "keepers.toml").write_text(keepers.to_toml())
    assert Keepers.from_file(tmp_path / "keepers.toml") == keepers
    assert Keepers(cards=tuple(cards[::-1]), colluding=1).digest == keepers.digest
    assert keepers.card_of(KeeperKey.from_file(tmp_path / "union.key")) == cards[1]
    with pytest.raises(ValueError, match="the keepers"):
        keepers.card_of(KeeperKey(NoiseKey.generate()))
    assert stat.S_IMODE((tmp_path / "court.key").stat().st_mode) == 0o600
    with Keeper.open(tmp_path / "court.key", keepers) as keeper:
        assert keeper.card.name == "court"
    assert stat.S_IMODE(record_file(tmp_path / "court.key").stat().st_mode) == 0o600


def test_a_key_whose_record_is_lost_opens_nothing(tmp_path: Path) -> None:
    """Else the rounds that it has opened could be opened again, for other lists."""
    key = KeeperKey.from_file(tmp_path / "court.key", create=True)
    keepers = Keepers(cards=(key.card("court"),), colluding=0)
    Keeper.open(tmp_path / "court.key", keepers).close()
    record_file(tmp_path / "court.key").unlink()
    with pytest.raises(ValueError, match="this keeper"):
        Keeper.open(tmp_path / "court.key", keepers)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "colluding is missing"),
        ("colluding = 1", "1 to 64 keepers, got 0"),
        ("colluding = 1\nx = 2", "unknown entries \\['x'\\]"),
        ("colluding = 1\nkeeper = 2", "in double brackets"),
        ("colluding = 1\n[[keeper]]\nname = 'a'", "has a name, a public_key"),
        ("colluding = 1\n[[keeper]]\nname = 'a'\npublic_key = '?'", "is not Base64"),
        ("colluding = 1\n[[keeper]]\nname = 'a'\npublic_key = 'aaaa'", "no valid public key: 1216 bytes"),
        ("colluding = 1\n[[keeper]]\nname = 'a b'\npublic_key = 'aaaa'", "name has 1 to 64"),
        ("colluding = = 1", "does not say who the keepers are"),
    ],
)
def test_a_file_that_does_not_hold_keepers_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "keepers.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        Keepers.from_file(tmp_path / "keepers.toml")


def test_keepers_that_contradict_each_other_are_refused() -> None:
    one, two = (KeeperKey.simulation(1, i).card(f"k{i}") for i in range(2))
    with pytest.raises(ValueError, match="at least"):
        Keepers(cards=(one, two), colluding=1, away=1)
    with pytest.raises(ValueError, match="same public_key"):
        Keepers(cards=(one, Card("other", one.public_key)), colluding=0)
    with pytest.raises(ValueError, match="same name"):
        Keepers(cards=(one, Card("k0", two.public_key)), colluding=0)
    with pytest.raises(ValueError, match="colluding must"):
        Keepers(cards=(one, two), colluding=True)


def test_keys_never_show() -> None:
    root = bytes(range(32))
    key = KeeperKey(NoiseKey(root))
    keeper = Keeper(key, Record.open(":memory:", "f"), key.card("court"))
    for text in (repr(key), str(key), repr(keeper)):
        assert root.hex() not in text
        assert "hidden" in text or "fingerprint" in text
    for secret in (key, keeper):
        with pytest.raises(TypeError):
            pickle.dumps(secret)


def test_a_record_belongs_to_its_key(tmp_path: Path) -> None:
    Record.open(tmp_path / "record", "one").close()
    with pytest.raises(ValueError, match="every key"):
        Record.open(tmp_path / "record", "two")
    (tmp_path / "text").write_text("no database, and long enough not to be taken for an empty one" * 20)
    (tmp_path / "text").chmod(0o600)
    with pytest.raises(ValueError, match="keeper's record"):
        Record.open(tmp_path / "text", "one")
    with pytest.raises(ValueError, match="keeper's record"):
        read(tmp_path / "nothing")


def test_residues_have_64_bits_where_32_would_wrap() -> None:
    keepers, members = simulated()
    loud = make_plan(LambdaCGD(0.9), PLAN.participation, noise_multiplier=50_000.0)
    agreement = agreement_of(keepers, loud)
    assert (agreement_of(keepers).bits, agreement.bits) == (32, 64)
    far = make_plan(LambdaCGD(0.9), PLAN.participation, clip_norm=4.0)
    users = 2**31 * lattice_of(far, SIZE).step / 4.0  # whose updates together reach beyond
    found = [sums_of(far, size=SIZE, keepers=keepers, users=int(part * users)).bits for part in (0.5, 1.01)]
    assert found == [32, 64]
    noise = opened_sum(keepers, agreement, members, updates(2), round=0) * agreement.step
    assert 0.8 < noise.std() / (50_000 * np.sqrt(1.5)) < 1.2
