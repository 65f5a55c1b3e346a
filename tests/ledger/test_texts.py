"""The table of the ledger's words: each row is used, can be filled in, and says what to do where something is refused."""

import ast
from pathlib import Path
from string import Formatter
from types import SimpleNamespace

import pytest

from fedcgd import ledger
from fedcgd.ledger.texts import NOTES, PROBLEMS, REFUSALS, TEXTS, LedgerError, about, finding, refuse

SOURCES = [path for path in Path(ledger.__file__).parent.glob("*.py") if path.name != "texts.py"]
SAID = [
    node
    for path in SOURCES
    for node in ast.walk(ast.parse(path.read_text("utf-8")))
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
]


def test_every_row_is_used_and_belongs_to_one_kind() -> None:
    used = {node.value for node in SAID} | {"another-plan", "another-configuration"}  # of which one is chosen
    assert set(TEXTS) <= used
    assert len(TEXTS) == len(REFUSALS) + len(PROBLEMS) + len(NOTES)


class Any:
    """A fact of any kind: a number where one is asked for, else a text, with every attribute and entry."""

    def __getattr__(self, name: str) -> "Any":
        return Any()

    def __getitem__(self, name: str) -> "Any":
        return Any()

    def __eq__(self, other: object) -> bool:
        return other == 2

    def __format__(self, format_spec: str) -> str:
        return format(2, format_spec) if format_spec else "this"

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("reason", sorted(TEXTS))
def test_a_sentence_is_plain_text_on_one_line(reason: str) -> None:
    names = {
        str(name).partition(".")[0].partition("[")[0] for _, name, _, _ in Formatter().parse(TEXTS[reason]) if name
    }
    said = finding(reason, **dict.fromkeys(names, Any()))
    assert said.reason == reason
    assert not set("{}|\n") & set(said)


@pytest.mark.parametrize(("rounds", "said"), [(1, "1 round was"), (2, "2 rounds were"), (0, "0 rounds were")])
def test_a_number_has_its_noun_and_verb(rounds: int, said: str) -> None:
    assert finding("no-opening", rounds=rounds).startswith(said)


def test_an_error_knows_why_and_what_is_about_a_ledger_keeps_its_reason() -> None:
    error = refuse("begun-again", run=SimpleNamespace(begun="once", ledger="a.db"), path="b.db")
    assert isinstance(error, LedgerError)
    assert (error.reason, str(error)) == ("begun-again", str(error.args[0]))
    assert all(value in str(error) for value in ("once", "a.db", "b.db"))
    other = about("run.db", finding("two-bins", number=1, b=3))
    assert (other.reason, other.partition(":")[0]) == ("two-bins", "run.db")
    with pytest.raises(KeyError):
        finding("no such row")
