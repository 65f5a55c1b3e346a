"""A keeper's record: which requests it lets through, and in which order rounds are opened."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedcgd.keepers.record import AskedOpening, Record, RefusedError, read

RUN, ANOTHER = b"r" * 32, b"s" * 32
FINGERPRINT = "f" * 16


def asked(round: int, kind: str = "training", **changes) -> AskedOpening:
    first = AskedOpening(kind, round, attempt=0, list_hash=b"l" * 32, sealed_hash=b"s" * 32, after=None)
    return replace(first, **changes)


@pytest.fixture
def record():
    """Of rounds 1, 3 and 4 of the training, and 2 of the evaluation, each after the one before it."""
    with Record.open(":memory:", FINGERPRINT) as record:
        for number, (kind, round, after) in enumerate(
            [("training", 1, None), ("evaluation", 2, None), ("training", 3, 1), ("training", 4, 3)]
        ):
            record.write(RUN, "agreed", asked(round, kind, after=after), lambda _, nonce=2**100 + number: nonce)
        yield record


@pytest.mark.parametrize(
    ("kind", "round", "may"),
    [
        *(("training", round, round > 4) for round in (0, 2, 5, 9)),
        *(("evaluation", round, round > 2) for round in (0, 1, 3, 4)),
    ],
)
def test_a_round_before_the_last_that_is_opened_stays_closed(record: Record, kind: str, round: int, may: bool) -> None:
    """Also one that was left out: its noise would be known from the rounds after it. Each kind has rounds of its own."""
    if may:
        assert record.check(RUN, asked(round, kind)) is None
    else:
        with pytest.raises(RefusedError):
            record.check(RUN, asked(round, kind))


@pytest.mark.parametrize(
    "changes", [{"attempt": 1}, {"list_hash": b"m" * 32}, {"sealed_hash": b"t" * 32}, {"after": None}]
)
@pytest.mark.parametrize(("round", "after"), [(3, 1), (4, 3)])
def test_an_opened_round_opens_for_the_very_same_request_only(
    record: Record, round: int, after: int, changes: dict
) -> None:
    same = asked(round, after=after)
    before = record.openings()
    assert record.check(RUN, same) == record.write(RUN, "agreed", same, lambda _: pytest.fail("a second nonce"))
    assert {**vars(record.check(RUN, same)), "nonce": None} == {**vars(same), "nonce": None}
    with pytest.raises(RefusedError):
        record.check(RUN, replace(same, **changes))
    with pytest.raises(RefusedError):
        record.write(RUN, "agreed", replace(same, **changes), lambda _: 7)
    assert record.openings() == before


def test_a_share_that_the_record_does_not_know_is_not_cancelled(record: Record) -> None:
    assert record.check(RUN, asked(5, after=4)) is None
    assert record.check(RUN, asked(5, after=3)) is None
    for kind, after in (("training", 2), ("training", 0), ("training", 5), ("evaluation", 3)):
        with pytest.raises(RefusedError):
            record.check(RUN, asked(5, kind, after=after))


def test_another_run_opens_nothing_and_changes_nothing(record: Record) -> None:
    for request in (asked(5), asked(4, after=3)):
        with pytest.raises(RefusedError):
            record.check(ANOTHER, request)
        with pytest.raises(RefusedError):
            record.write(ANOTHER, "another", request, lambda _: 7)
    assert record.context == RUN


def test_a_nonce_is_made_from_all_earlier_ones_of_its_kind(record: Record) -> None:
    told: list[tuple[int, ...]] = []

    def make(earlier: tuple[int, ...]) -> int:
        told.append(earlier)
        return 2**128 - 1

    first = 2**100
    opened = record.write(RUN, "agreed", asked(7, after=4), make)
    record.write(RUN, "agreed", asked(3, "evaluation"), make)
    assert told == [(first, first + 2, first + 3), (first + 1,)]
    assert opened.nonce == 2**128 - 1
    assert opened in record.openings()
    assert record.before(opened, 9) == [(4, first + 3), (3, first + 2), (1, first)]
    assert record.before(opened, 2) == [(4, first + 3), (3, first + 2)]
    assert record.before(opened, 0) == []
    evaluated = record.openings()[-1]
    assert (evaluated.kind, record.before(evaluated, 9)) == ("evaluation", [])


def test_nothing_is_on_record_where_no_nonce_could_be_made(tmp_path: Path) -> None:
    path = tmp_path / "record"
    with Record.open(path, FINGERPRINT) as record:
        with pytest.raises(ZeroDivisionError):
            record.write(RUN, "agreed", asked(0), lambda _: 1 // 0)
        assert (record.context, record.openings()) == (None, ())
        assert record.check(ANOTHER, asked(0)) is None
        record.write(RUN, "agreed", asked(0), lambda _: 5)
    said = read(path)
    assert (said.context, said.agreement, said.key_fingerprint) == (RUN, "agreed", FINGERPRINT)
    assert [(opened.round, opened.nonce) for opened in said.openings] == [(0, 5)]
